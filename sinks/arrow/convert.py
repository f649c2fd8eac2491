"""What a column holds, as data, and how Arrow values get into it: as they are, or refused.

Each database has a table from the names of its types to `Holds`, and does itself only what no other
does: the form in which it takes the values.
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
from sinks.arrow.types import is_bytes, is_moment, is_text, spark_name
from sinks.errors import SchemaMismatch, without_code

DOUBLE_DIGITS = 15
"""So many decimal digits a double holds exactly."""
_DAYS = (-719_162, 2_932_896)
"""From 0001-01-01 to 9999-12-31, counted from 1970."""
_MICROSECONDS = (_DAYS[0] * 86_400_000_000, (_DAYS[1] + 1) * 86_400_000_000 - 1)


class Unfit(SchemaMismatch):
    """The Arrow type does not go into the column; the message says what to do.

    The message is a part of another error's, so it has no code of its own.
    """

    def __str__(self) -> str:
        return without_code(super().__str__())


class RefusedValue(ValueError):
    """A value of a column cannot be converted.

    `index` is its position in the array that was given.
    """

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
FLOAT = only(
    lambda arrow: at.is_floating(arrow) or (at.is_integer(arrow) and arrow.bit_width <= 32),
    "double",
)
TEXT = only(is_text, "string")
JSON = only(
    lambda arrow: is_text(arrow) or at.is_nested(arrow),
    "string",
    " (or give a struct, map or array)",
)
BYTES = only(is_bytes, "binary")
DATE = only(at.is_date32, "date")
TIME = only(at.is_time, "time")
SPAN = only(at.is_duration, "a day-time interval")
TIME_OR_SPAN = only(
    lambda arrow: at.is_time(arrow) or at.is_duration(arrow), "time, or to a day-time interval,"
)
TIMESTAMP = only(at.is_timestamp, "timestamp")
MOMENT = only(
    is_moment, "timestamp", " (a wall clock is no point in time, and which zone's only you know)"
)


def wall_clock(zoned: str) -> Takes:
    """`zoned` is the database's type for points in time."""
    other = f" (in the session's time zone), or make the column {zoned}, which has points in time"
    return only(
        lambda arrow: at.is_timestamp(arrow) and not is_moment(arrow), "timestamp_ntz", other
    )


# ---------------------------------------------------------------------- what of their values
@dataclass(frozen=True)
class Holds:
    """What a column holds.

    Where there is no limit here, there is none, or the server refuses what is beyond it.

    `name` is what messages call the column's type. Values that the column would round, or whose
    blanks it would drop, are refused.

    Integers have `bounds`, as dates and timestamps have, counted in days or microseconds from 1970
    (otherwise theirs are the years 0001 to 9999); `complaint` is about what is outside. Or `to` is
    the type in which integers, and floating-point numbers, are handed over; a `scale` of the latter
    is what MySQL's float(7,4) rounds to. `missing` tells those that the database has no place for,
    and what to say of them. Times are multiples of `unit` microseconds.

    Bytes have just the `size`, and texts at most the `longest` many characters; a column that
    `drops` blanks at a text's end takes none there, unless it `fills` its texts up with blanks, and
    the text has the full length. A text is one of the `members`.
    """

    takes: Takes
    name: str = ""
    to: pa.DataType | None = None
    bounds: tuple[int, int] | None = None
    complaint: str = ""
    years: str = "0001 to 9999"
    precision: int | None = None
    scale: int | None = None
    missing: tuple[Convert, str] | None = None
    unit: int = 1
    size: int | None = None
    longest: int | None = None
    drops: bool = False
    fills: bool = False
    members: Sequence[str] | None = None

    def conversion(self, arrow: pa.DataType) -> Convert:
        """From values of an Arrow type to those of the column.

        Points in time become the wall clock of UTC. Raises Unfit.
        """
        if self.scale is not None and self.to is not None and at.is_floating(self.to):
            other = "alter it to double or decimal, or drop the column in Spark"
            raise Unfit(
                f"{self.name} rounds to {self.scale} digits, so nothing goes into it: {other}"
            )
        self.takes(arrow)
        steps = list(self._steps(arrow))

        def convert(array: pa.Array) -> pa.Array:
            for step in steps:
                array = step(array)
            return array

        return convert

    def _steps(self, arrow: pa.DataType) -> Iterator[Convert]:
        if is_text(arrow) or at.is_nested(arrow):
            yield as_json(arrow)
            if self.members is not None:
                yield partial(self._of_members, self.members)
            if self.drops or self.longest is not None:
                yield self._with_its_blanks
        elif is_bytes(arrow) and self.size is not None:
            complaint = f"is not {self.size} bytes long: {self.name} would fill it up with zeros"
            yield lambda array: refuse(
                array, pc.not_equal(pc.binary_length(array), self.size), complaint
            )
        elif at.is_date32(arrow):
            yield partial(self._within_years, "days", self.bounds or _DAYS, pa.int32(), arrow)
        elif at.is_timestamp(arrow):
            yield from self._times(arrow, pa.timestamp("us", arrow.tz))
            bounds = self.bounds or _MICROSECONDS
            yield partial(
                self._within_years, "microseconds", bounds, pa.int64(), pa.timestamp("us")
            )
        elif at.is_time(arrow) or at.is_duration(arrow):
            yield from self._times(
                arrow, pa.time64("us") if at.is_time(arrow) else pa.duration("us")
            )
        elif at.is_floating(arrow) or (self.to is not None and at.is_floating(self.to)):
            yield from self._floats(arrow)
        elif at.is_integer(arrow) or at.is_decimal(arrow):
            yield from self._exact_numbers(arrow)

    # ------------------------------------------------------------------ numbers
    def _exact_numbers(self, arrow: pa.DataType) -> Iterator[Convert]:
        complaint = self.complaint or f"is out of range of {self.name}"
        if self.bounds is not None:
            low, high = bits(arrow.bit_width, signed=not at.is_unsigned_integer(arrow))
            if not at.is_integer(arrow) or low < self.bounds[0] or high > self.bounds[1]:
                yield partial(_within, self.bounds, complaint)
        elif self.to is not None and arrow != self.to:
            yield lambda array: _cast(array, self.to, complaint)
        if self.scale is not None:
            digits, scale = digits_of(arrow)
            if scale > self.scale or (
                self.precision and digits - scale > self.precision - self.scale
            ):
                yield partial(self._to_scale, self.scale)

    def _to_scale(self, scale: int, array: pa.Array) -> pa.Array:
        """Without a precision the server judges how large it may be."""
        given = scaled = array.cast(pa.decimal128(20, 0)) if at.is_integer(array.type) else array
        if given.type.scale > scale:
            scaled = _cast(given, pa.decimal256(76, scale), would_be_rounded(self.name))
        if self.precision is None:
            return array
        return _cast(
            scaled, pa.decimal256(self.precision, scale), f"is out of range of {self.name}", given
        )

    def _floats(self, arrow: pa.DataType) -> Iterator[Convert]:
        if at.is_floating(arrow) and self.missing is not None:
            is_missing, complaint = self.missing
            yield lambda array: refuse(array, is_missing(array), complaint)
        if at.is_float64(arrow) and at.is_float32(self.to):
            yield self._narrowed
        elif arrow != self.to:
            yield lambda array: _cast(
                array, self.to, "is out of range of what the column holds exactly"
            )

    def _narrowed(self, array: pa.Array) -> pa.Array:
        """Refuses also what would become infinite or zero."""
        rounded = array.cast(pa.float32(), safe=False)
        infinite = pc.and_(pc.is_inf(rounded), pc.is_finite(array))
        zero = pc.and_(pc.equal(rounded, 0), pc.not_equal(array, 0))
        refuse(array, pc.or_(infinite, zero), f"is out of range of {self.name}")
        other = pc.and_(
            pc.not_equal(rounded.cast(pa.float64()), array), pc.invert(pc.is_nan(array))
        )
        refuse(array, other, would_be_rounded(self.name))
        return rounded

    # ------------------------------------------------------------------ days and times
    def _within_years(
        self,
        counted: str,
        bounds: tuple[int, int],
        whole: pa.DataType,
        to: pa.DataType,
        array: pa.Array,
    ) -> pa.Array:
        counts = _within(
            bounds, f"{counted} from 1970 is outside the years {self.years}", array.view(whole)
        )
        return array if array.type == to else counts.view(to)

    def _times(self, arrow: pa.DataType, to: pa.DataType) -> Iterator[Convert]:
        if arrow != to:
            yield lambda array: _cast(array, to, "is out of range")
        if self.unit > 1:
            yield self._whole_units

    def _whole_units(self, array: pa.Array) -> pa.Array:
        counts = array.view(pa.int64()).fill_null(0).to_numpy()
        return refuse(array, pa.array(counts % self.unit != 0), would_be_rounded(self.name))

    # ------------------------------------------------------------------ texts
    def _with_its_blanks(self, texts: pa.Array) -> pa.Array:
        if self.drops:
            cut = pc.ends_with(texts, " ")
            if self.fills and pc.any(cut).as_py():
                cut = pc.and_(
                    cut,
                    pc.not_equal(
                        pc.utf8_length(texts), -1 if self.longest is None else self.longest
                    ),
                )
            refuse(texts, cut, "ends with a space, which CHAR drops: use VARCHAR")
        # bytes; no text has more characters
        if (
            self.longest is not None
            and (pc.max(pc.binary_length(texts)).as_py() or 0) > self.longest
        ):
            refuse(
                texts,
                pc.greater(pc.utf8_length(texts), self.longest),
                f"is longer than {self.name}",
            )
        return texts

    def _of_members(self, members: Sequence[str], array: pa.Array) -> pa.Array:
        """Databases take a number for a member's position, and a text that compares equal, such as
        one in capitals, for the member."""
        known = pc.is_in(array.cast(pa.string()), pa.array(members, pa.string()))
        return refuse(
            array, pc.and_(array.is_valid(), pc.invert(known)), f"is no member of {self.name}"
        )


def same(array: pa.Array) -> pa.Array:
    return array


def in_years(array: pa.Array) -> pa.Array:
    """The same array.

    Refuses days and moments of which Python, and the text of a lake's log, have no year.
    """
    if at.is_date32(array.type) or at.is_timestamp(array.type):
        Holds(DATE if at.is_date32(array.type) else TIMESTAMP).conversion(array.type)(array)
    return array


def in_utf8(array: pa.Array) -> pa.Array:
    """The same array. Spark makes any bytes a text that is cast so."""
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:  # perhaps of values outside this slice, if they are nested
        if (index := first_refused(array, lambda one: one.validate(full=True))) is not None:
            raise RefusedValue(index, "the text is not UTF-8") from None
    return array


def first_refused(array: pa.Array, call: Callable[[pa.Array], object]) -> int | None:
    """The place of the first value that, by itself, a call to Arrow refuses, or Python has no such
    value."""
    for index in range(len(array)):
        try:
            call(array.take(pa.array([index])))
        except (ValueError, OverflowError):
            return index
    return None


def as_json(arrow: pa.DataType) -> Convert:
    """Texts are taken as the JSON that they are. Raises Unfit."""
    if is_text(arrow):
        return same
    no_internals(arrow)
    return to_json


def no_internals(arrow: pa.DataType) -> None:
    """Spark hands a variant, geometry or geography over as a struct of its inner bytes, told by the
    fields' metadata (pyspark.sql.pandas.types.to_arrow_type): never what anybody wants to find as
    JSON. Raises Unfit."""
    for field in (arrow.field(i) for i in range(arrow.num_fields)):
        for name in ("variant", "geometry", "geography"):
            if (field.metadata or {}).get(name.encode()) == b"true":
                by = "to_json" if name == "variant" else "st_asbinary"
                raise Unfit(f"it holds a {name}: use {by}() in Spark")
        no_internals(field.type)


def bits(count: int, *, signed: bool = True) -> tuple[int, int]:
    """First and last of the integers with so many bits."""
    return (-(2 ** (count - 1)), 2 ** (count - 1) - 1) if signed else (0, 2**count - 1)


def digits_of(arrow: pa.DataType) -> tuple[int, int]:
    """How many digits an integer or decimal has, and how many of them are fractions."""
    if at.is_integer(arrow):
        return len(str(2 ** (arrow.bit_width - at.is_signed_integer(arrow)))), 0
    return arrow.precision, arrow.scale


# ---------------------------------------------------------------------- refusals
def _within(bounds: tuple[int, int], complaint: str, array: pa.Array) -> pa.Array:
    low, high = bounds
    extremes = pc.min_max(array).as_py()
    if extremes["min"] is not None and not (low <= extremes["min"] and extremes["max"] <= high):
        refuse(
            array,
            pa.array(value is not None and not low <= value <= high for value in array.to_pylist()),
            complaint,
        )
    return array


def _cast(
    array: pa.Array, to: pa.DataType, complaint: str, given: pa.Array | None = None
) -> pa.Array:
    """Cast what loses nothing. Messages show the value of `given`, of which the array was made."""
    try:
        return array.cast(to)
    except pa.ArrowInvalid:
        if (index := first_refused(array, lambda one: one.cast(to))) is None:
            raise
        given = array if given is None else given
        raise RefusedValue(index, f"{short(given[index])} {complaint}") from None


def would_be_rounded(name: str) -> str:
    return f"would be rounded to {name}: cast it in Spark"


def refuse(array: pa.Array, bad: pa.Array, complaint: str) -> pa.Array:
    """The same array. Refuses the first value at which `bad` is true."""
    if pc.any(bad).as_py():
        index = pc.index(bad, True).as_py()
        raise RefusedValue(index, f"{short(array[index])} {complaint}")
    return array


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


def created_type(
    arrow: pa.DataType, types: Mapping[str, CreatedT], nested: CreatedT, system: str
) -> CreatedT:
    """The column that a sink creates for an Arrow type: the one of `types` by Spark's name,
    `nested` for structs, maps and lists. Raises Unfit for one that the system has none for."""
    if (kind := types.get(spark_name(arrow))) is not None:
        return kind
    if not at.is_nested(arrow):
        raise Unfit(f"no {system} type for {arrow}; cast it in Spark")
    try:
        no_internals(arrow)
    except Unfit as unfit:
        raise Unfit(f"no {system} type for {arrow}: {unfit}") from None
    return nested
