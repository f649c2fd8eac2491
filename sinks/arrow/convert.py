"""What a column holds, as data, and how Arrow values get into it: as they are, rounded if that is allowed, or refused.

Each database has a table from the names of its types to `Holds`, and does itself only what no other does: the form in
which it takes the values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as at

from sinks.arrow.json import to_json
from sinks.arrow.types import is_bytes, is_text, spark_name
from sinks.errors import SchemaMismatch

DOUBLE_DIGITS = 15
"""So many decimal digits a double holds exactly."""
ROUNDING = ' (rounding="allow" of the sink stores such values rounded)'
"""What errors say about values that a column cannot hold as they are."""
_DAYS = (-719_162, 2_932_896)
"""From 0001-01-01 to 9999-12-31, counted from 1970."""
_MICROSECONDS = (_DAYS[0] * 86_400_000_000, (_DAYS[1] + 1) * 86_400_000_000 - 1)


class Unfit(SchemaMismatch):
    """The Arrow type does not go into the column; the message says what to do."""


class RefusedValue(ValueError):
    """A value of a column cannot be converted. `index` is its position in the array that was given."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(reason)
        self.index = index


Convert = Callable[[pa.Array], pa.Array]
"""From the batch's array to one in the form that the column takes. Raises RefusedValue."""


# ---------------------------------------------------------------------- which Arrow types
Takes = Callable[[pa.DataType], None]
"""Raises Unfit for an Arrow type that does not go in."""


def only(test: Callable[[pa.DataType], bool], what: str, more: str = "") -> Takes:
    def takes(arrow: pa.DataType) -> None:
        if not test(arrow):
            raise Unfit(f"cast it to {what} in Spark{more}")

    return takes


BOOLEAN = only(at.is_boolean, "boolean")
INTEGER = only(at.is_integer, "an integer type")
DECIMAL = only(
    lambda arrow: at.is_integer(arrow) or (at.is_decimal(arrow) and not at.is_decimal256(arrow)),
    "decimal",
    ", with the precision that you want",
)
FLOAT = only(lambda arrow: at.is_floating(arrow) or (at.is_integer(arrow) and arrow.bit_width <= 32), "double")
TEXT = only(is_text, "string")
JSON = only(lambda arrow: is_text(arrow) or at.is_nested(arrow), "string", " (or give a struct, map or array)")
BYTES = only(is_bytes, "binary")
DATE = only(at.is_date32, "date")
TIME = only(at.is_time, "time")
SPAN = only(at.is_duration, "a day-time interval")
TIME_OR_SPAN = only(lambda arrow: at.is_time(arrow) or at.is_duration(arrow), "time, or to a day-time interval,")
TIMESTAMP = only(at.is_timestamp, "timestamp")


def MOMENT(arrow: pa.DataType) -> None:  # noqa: N802
    """A point in time."""
    TIMESTAMP(arrow)
    if arrow.tz is None:
        raise Unfit("cast it to timestamp in Spark: a wall clock is no point in time, and which zone's only you know")


def wall_clock(zoned: str) -> Takes:
    """`zoned` is the database's type for points in time."""

    def takes(arrow: pa.DataType) -> None:
        if not at.is_timestamp(arrow) or arrow.tz is not None:
            other = f" (in the session's time zone), or make the column {zoned}: the batch has points in time"
            raise Unfit(f"cast it to timestamp_ntz in Spark{other if at.is_timestamp(arrow) else ''}")

    return takes


# ---------------------------------------------------------------------- what of their values
@dataclass(frozen=True)
class Holds:
    """What a column holds. Where there is no limit here, there is none, or the server says what is beyond it."""

    takes: Takes
    name: str = ""
    """What messages call the column's type."""
    to: pa.DataType | None = None
    """Of integers and floating-point numbers: the type in which they are handed over."""
    bounds: tuple[int, int] | None = None
    """First and last of integers, of days and microseconds from 1970; of those two, without it, the years to 9999."""
    complaint: str = ""
    """About what is not within the bounds, if there is more to say than that."""
    years: str = "0001 to 9999"
    precision: int | None = None
    scale: int | None = None
    """Without a precision the server judges how large a decimal may be. Of floating-point numbers: what MySQL's
    float(7,4) rounds to."""
    missing: tuple[Convert, str] | None = None
    """Which floating-point numbers the database has no place for, and what to say of them."""
    unit: int = 1
    """Times are multiples of so many microseconds."""
    size: int | None = None
    """Just so many bytes."""
    longest: int | None = None
    """So many characters at most."""
    cuts: bool = False
    """The server refuses longer texts by itself, but cuts blanks at their end off."""
    padded: bool = False
    """Blanks at the end are not told from the padding up to `longest`."""
    drops: bool = False
    """Blanks at the end are not kept."""
    members: Sequence[str] | None = None
    several: bool = False
    """With commas in between, each once, in the order of the declaration."""


def conversion(arrow: pa.DataType, holds: Holds, *, rounding: bool = False) -> Convert:
    """From values of an Arrow type to those of a column. What it would round, or whose blanks it would drop, is
    refused, unless `rounding`. Points in time become the wall clock of UTC. Raises Unfit."""
    holds.takes(arrow)
    steps = list(_steps(arrow, holds, rounding))

    def convert(array: pa.Array) -> pa.Array:
        for step in steps:
            array = step(array)
        return array

    return convert


def _steps(arrow: pa.DataType, holds: Holds, rounding: bool) -> Iterator[Convert]:
    if is_text(arrow) or at.is_nested(arrow):
        yield as_json(arrow)
        if holds.members is not None:
            yield partial(_refuse_strangers, members=holds.members, holds=holds, rounding=rounding)
        if not rounding and (holds.drops or holds.longest is not None):
            yield partial(_refuse_blanks, holds=holds)
    elif is_bytes(arrow) and holds.size is not None:
        yield partial(_of_size, holds=holds)
    elif at.is_date32(arrow):
        complaint = f"days from 1970 is outside the years {holds.years}"
        yield lambda array: _within(array.view(pa.int32()), holds.bounds or _DAYS, complaint).view(arrow)
    elif at.is_timestamp(arrow):
        yield from _times(pa.timestamp("us", arrow.tz), holds, rounding)
        complaint = f"microseconds from 1970 is outside the years {holds.years}"
        bounds, clock = holds.bounds or _MICROSECONDS, pa.timestamp("us")
        yield lambda array: _within(array.view(pa.int64()), bounds, complaint).view(clock)
    elif at.is_time(arrow) or at.is_duration(arrow):
        yield from _times(pa.time64("us") if at.is_time(arrow) else pa.duration("us"), holds, rounding)
    elif at.is_integer(arrow) or at.is_decimal(arrow) or at.is_floating(arrow):
        yield from _numbers(arrow, holds, rounding)


def same(array: pa.Array) -> pa.Array:
    return array


def as_json(arrow: pa.DataType) -> Convert:
    """Texts are taken as what they are. Raises Unfit."""
    if is_text(arrow):
        return same
    no_internals(arrow)
    return to_json


# ---------------------------------------------------------------------- numbers
def bits(count: int, *, signed: bool = True) -> tuple[int, int]:
    """First and last of the integers with so many bits."""
    return (-(2 ** (count - 1)), 2 ** (count - 1) - 1) if signed else (0, 2**count - 1)


def _numbers(arrow: pa.DataType, holds: Holds, rounding: bool) -> Iterator[Convert]:
    if at.is_floating(arrow) or (holds.to is not None and at.is_floating(holds.to)):
        yield from _floats(arrow, holds, rounding)
        return
    if holds.bounds is not None and not _surely_within(arrow, holds.bounds):
        complaint = holds.complaint or f"is out of range of {holds.name}"
        yield partial(_within, bounds=holds.bounds, complaint=complaint)
    if holds.to is not None and arrow != holds.to:
        yield lambda array: array.cast(holds.to)
    if not _surely_of_scale(arrow, holds):
        yield partial(_to_scale, holds=holds, rounding=rounding)


def _surely_within(arrow: pa.DataType, bounds: tuple[int, int]) -> bool:
    if not at.is_integer(arrow):
        return False
    low, high = bits(arrow.bit_width, signed=at.is_signed_integer(arrow))
    return bounds[0] <= low and high <= bounds[1]


def _within(array: pa.Array, bounds: tuple[int, int], complaint: str) -> pa.Array:
    low, high = bounds
    found = pc.min_max(array).as_py()
    if found["min"] is not None and not (low <= found["min"] and found["max"] <= high):
        index = next(i for i, value in enumerate(array.to_pylist()) if value is not None and not low <= value <= high)
        raise RefusedValue(index, f"{short(array[index])} {complaint}")
    return array


def digits_of(arrow: pa.DataType) -> tuple[int, int]:
    """How many digits an integer or decimal has, and how many of them are fractions."""
    if at.is_integer(arrow):
        return len(str(2 ** (arrow.bit_width - at.is_signed_integer(arrow)))), 0
    return arrow.precision, arrow.scale


def _surely_of_scale(arrow: pa.DataType, holds: Holds) -> bool:
    digits, scale = digits_of(arrow)
    fits = holds.precision is None or digits - scale <= holds.precision - (holds.scale or 0)
    return holds.scale is None or (fits and scale <= holds.scale)


def _to_scale(array: pa.Array, *, holds: Holds, rounding: bool) -> pa.Array:
    """Half is rounded away from zero."""
    assert holds.scale is not None
    given = scaled = array.cast(pa.decimal128(20, 0)) if at.is_integer(array.type) else array
    if given.type.scale > holds.scale:
        if rounding:
            wide = given.cast(pa.decimal256(76, given.type.scale))
            scaled = pc.round(wide, holds.scale, round_mode="half_towards_infinity")
        scaled = _cast(scaled, pa.decimal256(76, holds.scale), would_be_rounded(holds.name), given)
    if holds.precision is None:
        return array
    return _cast(scaled, pa.decimal256(holds.precision, holds.scale), f"is out of range of {holds.name}", given)


def _floats(arrow: pa.DataType, holds: Holds, rounding: bool) -> Iterator[Convert]:
    if holds.scale is not None and not rounding:
        raise Unfit(f"{holds.name} rounds to {holds.scale} digits: use double or decimal{ROUNDING}")
    if at.is_floating(arrow) and holds.missing is not None:
        is_missing, reason = holds.missing
        yield lambda array: refuse(array, is_missing(array), reason)
    if at.is_float64(arrow) and at.is_float32(holds.to):
        yield partial(_narrowed, name=holds.name, rounding=rounding)
    elif rounding:
        yield lambda array: array.cast(holds.to, safe=False)
    else:
        yield partial(_cast, to=holds.to, complaint="is out of range of what the column holds exactly")


def _narrowed(array: pa.Array, *, name: str, rounding: bool) -> pa.Array:
    """Refuses also what would become infinite or zero."""
    rounded = array.cast(pa.float32(), safe=False)
    lost = pc.or_(
        pc.and_(pc.is_inf(rounded), pc.is_finite(array)), pc.and_(pc.equal(rounded, 0), pc.not_equal(array, 0))
    )
    refuse(array, lost, f"is out of range of {name}")
    if not rounding:
        other = pc.and_(pc.not_equal(rounded.cast(pa.float64()), array), pc.invert(pc.is_nan(array)))
        refuse(array, other, would_be_rounded(name))
    return rounded


# ---------------------------------------------------------------------- days and times
def _times(to: pa.DataType, holds: Holds, rounding: bool) -> Iterator[Convert]:
    yield partial(_cast, to=to, complaint="is out of range")
    if holds.unit > 1:
        yield partial(_to_unit, holds=holds, rounding=rounding)


def _to_unit(array: pa.Array, *, holds: Holds, rounding: bool) -> pa.Array:
    counts = array.view(pa.int64()).fill_null(0).to_numpy()
    rest = counts % holds.unit
    if not rest.any():
        return array
    if not rounding:
        index = int(rest.nonzero()[0][0])
        raise RefusedValue(index, f"{short(array[index])} {would_be_rounded(holds.name)}")
    rounded = (counts + holds.unit // 2) // holds.unit * holds.unit
    return pa.array(rounded, mask=array.is_null().to_numpy(False)).view(array.type)


# ---------------------------------------------------------------------- text and bytes
def _refuse_blanks(texts: pa.Array, *, holds: Holds) -> pa.Array:
    """And what is too long."""
    if holds.drops:
        refuse(texts, pc.ends_with(texts, " "), f"ends with a space, which CHAR drops: use VARCHAR{ROUNDING}")
    if (longest := holds.longest) is None:
        return texts
    if (pc.max(pc.binary_length(texts)).as_py() or 0) > longest:  # bytes; no text has more characters
        too_long, reason = pc.greater(pc.utf8_length(texts), longest), f"is longer than {holds.name}"
        if holds.cuts:
            too_long = pc.and_(too_long, pc.ends_with(texts, " "))
            reason = f"has more than {longest} characters, and databases cut blanks off{ROUNDING}"
        refuse(texts, too_long, reason)
    if holds.padded:
        lost = pc.and_(pc.ends_with(texts, " "), pc.less(pc.utf8_length(texts), longest))
        refuse(texts, lost, f"ends with a blank, which {holds.name} does not tell from its padding{ROUNDING}")
    return texts


def _refuse_strangers(array: pa.Array, *, members: Sequence[str], holds: Holds, rounding: bool) -> pa.Array:
    """Refuse what is no member of an enumeration: databases take a number for a member's position, and a text that
    compares equal, such as one in capitals, for the member."""
    texts = array.cast(pa.string())
    words, rows = texts, pa.array(range(len(texts)))
    if holds.several:
        lists = pc.split_pattern(pc.if_else(pc.equal(texts, ""), None, texts), ",")
        words, rows = pc.list_flatten(lists), pc.list_parent_indices(lists)
    strange = pc.and_(words.is_valid(), pc.invert(pc.is_in(words, pa.array(members, pa.string()))))
    if pc.any(strange).as_py():
        index = rows[pc.index(strange, True).as_py()].as_py()
        raise RefusedValue(index, f"{short(texts[index])} is no member of {holds.name}")
    if holds.several and not rounding:
        for text in texts.unique().drop_null().to_pylist():
            given = text.split(",")
            if text != (kept := ",".join(member for member in members if member in given)):
                raise RefusedValue(pc.index(texts, text).as_py(), f"{short(text)} would be kept as {kept!r}{ROUNDING}")
    return array


def _of_size(array: pa.Array, *, holds: Holds) -> pa.Array:
    other = pc.not_equal(pc.binary_length(array), holds.size)
    return refuse(array, other, f"is not {holds.size} bytes long: {holds.name} would fill it up with zeros")


# ---------------------------------------------------------------------- refusals
def _cast(array: pa.Array, to: pa.DataType, complaint: str, given: pa.Array | None = None) -> pa.Array:
    """Cast what loses nothing. Messages show the value of `given`, of which the array was made."""
    try:
        return array.cast(to)
    except pa.ArrowInvalid:
        index = next(index for index in range(len(array)) if not _can_be_cast(array.slice(index, 1), to))
        raise RefusedValue(index, f"{short((array if given is None else given)[index])} {complaint}") from None


def _can_be_cast(array: pa.Array, to: pa.DataType) -> bool:
    try:
        array.cast(to)
    except pa.ArrowInvalid:
        return False
    return True


def would_be_rounded(name: str) -> str:
    return f"would be rounded to {name}{ROUNDING}"


def refuse(array: pa.Array, bad: pa.Array, reason: str) -> pa.Array:
    """The same array. Refuses the first value at which `bad` is true."""
    if pc.any(bad).as_py():
        index = pc.index(bad, True).as_py()
        raise RefusedValue(index, f"{short(array[index])} {reason}")
    return array


def no_internals(arrow: pa.DataType) -> None:
    """Spark hands a variant, geometry or geography over as a struct of its inner bytes, told by the fields' metadata
    (pyspark.sql.pandas.types.to_arrow_type): never what anybody wants to find as JSON. Raises Unfit."""
    for field in (arrow.field(i) for i in range(arrow.num_fields)):
        for name in ("variant", "geometry", "geography"):
            if (field.metadata or {}).get(name.encode()) == b"true":
                by = "to_json" if name == "variant" else "st_asbinary"
                raise Unfit(f"it holds a {name}: use {by}() in Spark")
        no_internals(field.type)


def short(value: object) -> str:
    """A value, of Arrow or of Python, for a message; cut to 60 characters."""
    if isinstance(value, pa.Scalar):
        try:
            value = value.as_py()
        except (ValueError, OverflowError, KeyError):  # Python has no such year, or zone
            value = getattr(value, "value", "…")
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


# ---------------------------------------------------------------------- columns that a sink creates
CreatedT = TypeVar("CreatedT")


def created_type(arrow: pa.DataType, types: Mapping[str, CreatedT], nested: CreatedT, system: str) -> CreatedT:
    """The column that a sink creates for an Arrow type: the one of `types` by Spark's name, `nested` for structs, maps
    and lists. Raises Unfit for one that the system has none for."""
    if (found := types.get(spark_name(arrow))) is not None:
        return found
    if not at.is_nested(arrow):
        raise Unfit(f"no {system} type for {arrow}; cast it in Spark")
    try:
        no_internals(arrow)
    except Unfit as unfit:
        raise Unfit(f"no {system} type for {arrow}: {unfit}") from None
    return nested
