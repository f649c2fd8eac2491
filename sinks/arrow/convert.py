"""Arrow values on their way into a column: what fits, what is refused, and how both are told."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as at

from sinks.errors import SchemaMismatch


class RefusedValue(ValueError):
    """A value of a column cannot be converted. `index` is its position in the array that was given."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(reason)
        self.index = index


Convert = Callable[[pa.Array], pa.Array]
"""From the batch's array to one in the form that the column takes. Raises RefusedValue."""


DOUBLE_DIGITS = 15
"""So many decimal digits a double holds exactly."""
ROUNDING = ' (rounding="allow" of the sink stores such values rounded)'
"""What errors say about values that a column cannot hold as they are."""


class Unfit(SchemaMismatch):
    """The Arrow type does not go into the column; the message says what to do."""


def same(array: pa.Array) -> pa.Array:
    return array


def cast(arrow: pa.DataType, target: pa.DataType, fits: bool, advice: str) -> Convert:
    """A cast that loses nothing. Raises Unfit with `advice`."""
    if not fits:
        raise Unfit(advice)
    if arrow == target:
        return same
    return lambda array: checked(array, target)


def checked(array: pa.Array, target: pa.DataType) -> pa.Array:
    """Cast what loses nothing. Raises RefusedValue."""
    try:
        return array.cast(target)
    except pa.ArrowInvalid:
        index = _first_that_fails(array, target)
        exactly = " of what the column holds exactly" if at.is_floating(target) else ""
        raise RefusedValue(index, f"{short(array[index])} is out of range{exactly}") from None


def _first_that_fails(array: pa.Array, target: pa.DataType) -> int:
    for index in range(len(array)):
        try:
            array.slice(index, 1).cast(target)
        except pa.ArrowInvalid:
            return index
    raise AssertionError("each value alone can be cast")


def narrowed(array: pa.Array, name: str, *, exact: bool = False) -> pa.Array:
    """double as float32, the database's type `name`: rounded; refused if it would become infinite or zero, or, if it
    has to be `exact`, another number."""
    given, rounded = array, array.cast(pa.float32(), safe=False)
    lost = pc.or_(
        pc.and_(pc.is_inf(rounded), pc.is_finite(given)), pc.and_(pc.equal(rounded, 0), pc.not_equal(given, 0))
    )
    refuse(given, lost, f"is out of range of {name}")
    if exact:
        other = pc.and_(pc.not_equal(rounded.cast(pa.float64()), given), pc.invert(pc.is_nan(given)))
        refuse(given, other, would_be_rounded(name))
    return rounded


def to_scale(array: pa.Array, precision: int, scale: int, declared: str, *, rounding: bool = False) -> pa.Array:
    """Integers or decimals as what `declared`, a decimal of this precision and scale, holds. Half is rounded away from
    zero."""
    if at.is_integer(array.type):
        array = array.cast(pa.decimal128(20, 0))
    given, scaled = array, pa.decimal256(76, scale)
    if array.type.scale > scale:
        if rounding:
            wide = array.cast(pa.decimal256(76, array.type.scale))
            array = pc.round(wide, scale, round_mode="half_towards_infinity")
        try:
            array = array.cast(scaled)
        except pa.ArrowInvalid:
            index = _first_that_fails(array, scaled)
            raise RefusedValue(index, f"{short(given[index])} {would_be_rounded(declared)}") from None
    target = pa.decimal256(precision, scale)
    try:
        return array.cast(target)
    except pa.ArrowInvalid:
        index = _first_that_fails(array, target)
        raise RefusedValue(index, f"{short(given[index])} is out of range of {declared}") from None


def to_unit(array: pa.Array, unit: int, declared: str, *, rounding: bool = False) -> pa.Array:
    """Times in microseconds, of which `declared` holds multiples of `unit`."""
    counts = array.view(pa.int64()).fill_null(0).to_numpy()
    rest = counts % unit
    if not rest.any():
        return array
    if not rounding:
        index = int(rest.nonzero()[0][0])
        raise RefusedValue(index, f"{short(array[index])} {would_be_rounded(declared)}")
    return pa.array((counts + unit // 2) // unit * unit, mask=array.is_null().to_numpy(False)).view(array.type)


def would_be_rounded(declared: str) -> str:
    return f"would be rounded to {declared}{ROUNDING}"


def refuse_strangers(
    texts: pa.Array, members: Sequence[str], declared: str, *, several: bool, rounding: bool = False
) -> None:
    """Refuse what is no member of an enumeration (or, with `several`, members with commas in between): databases take
    a number for a member's position, and a text that compares equal, such as one in capitals, for the member. Of
    several they keep each once, in the order of the declaration: what is written otherwise is for `rounding`."""
    texts, known = texts.cast(pa.string()), pa.array(members, pa.string())
    words, rows = texts, pa.array(range(len(texts)))
    if several:
        lists = pc.split_pattern(pc.if_else(pc.equal(texts, ""), None, texts), ",")
        words, rows = pc.list_flatten(lists), pc.list_parent_indices(lists)
    strange = pc.and_(words.is_valid(), pc.invert(pc.is_in(words, known)))
    if pc.any(strange).as_py():
        index = rows[pc.index(strange, True).as_py()].as_py()
        raise RefusedValue(index, f"{short(texts[index])} is no member of {declared}")
    if several and not rounding:
        for text in texts.unique().drop_null().to_pylist():
            given = text.split(",")
            if text != (kept := ",".join(member for member in members if member in given)):
                raise RefusedValue(pc.index(texts, text).as_py(), f"{short(text)} would be kept as {kept!r}{ROUNDING}")


def refuse(array: pa.Array, bad: pa.Array, reason: str) -> None:
    """Raise RefusedValue for the first value of `array` at which `bad` is true."""
    if pc.any(bad).as_py():
        index = pc.index(bad, True).as_py()
        raise RefusedValue(index, f"{short(array[index])} {reason}")


def within(array: pa.Array, bounds: tuple[int, int], complaint: str) -> pa.Array:
    """The same array. Refuses what is not within the bounds."""
    low, high = bounds
    found = pc.min_max(array).as_py()
    if found["min"] is not None and not (low <= found["min"] and found["max"] <= high):
        index = next(i for i, value in enumerate(array.to_pylist()) if value is not None and not low <= value <= high)
        raise RefusedValue(index, f"{short(array[index])} {complaint}")
    return array


def require_moments(arrow: pa.DataType) -> None:
    """Raises Unfit for what are no points in time."""
    if not at.is_timestamp(arrow) or arrow.tz is None:
        clock = ": a timestamp_ntz is a wall clock, and which zone's only you know" if at.is_timestamp(arrow) else ""
        raise Unfit(f"cast it to timestamp in Spark{clock}")


def require_wall_clock(arrow: pa.DataType, zoned: str) -> None:
    """Raises Unfit for what is none. `zoned` is the database's type for points in time."""
    if not at.is_timestamp(arrow) or arrow.tz is not None:
        other = f" (in the session's time zone), or make the column {zoned}: the batch has points in time"
        raise Unfit(f"cast it to timestamp_ntz in Spark{other if at.is_timestamp(arrow) else ''}")


def no_internals(arrow: pa.DataType) -> None:
    """Spark hands a variant, geometry or geography over as a struct of its inner bytes, told by the fields' metadata
    (pyspark.sql.pandas.types.to_arrow_type): never what anybody wants to find as JSON. Raises Unfit."""
    for field in (arrow.field(i) for i in range(arrow.num_fields)):
        for name in ("variant", "geometry", "geography"):
            if (field.metadata or {}).get(name.encode()) == b"true":
                by = "to_json" if name == "variant" else "st_asbinary"
                raise Unfit(f"it holds a {name}: use {by}() in Spark")
        no_internals(field.type)


CreatedTypes = Sequence[tuple[Callable[[pa.DataType], bool], str]]
"""Types of columns that a sink creates, each after the test for what it is for."""


def created_type(arrow: pa.DataType, plain: CreatedTypes, nested: str, system: str) -> str:
    """The first of `plain` that is for an Arrow type; `nested` for structs, maps and lists. Raises Unfit for one that
    the system has none for."""
    for test, name in plain:
        if test(arrow):
            return name
    if not at.is_nested(arrow):
        raise Unfit(f"no {system} type for {arrow}; cast it in Spark")
    try:
        no_internals(arrow)
    except Unfit as unfit:
        raise Unfit(f"no {system} type for {arrow}: {unfit}") from None
    return nested


def short(value: object) -> str:
    """A value, of Arrow or of Python, for a message; cut to 60 characters."""
    if isinstance(value, pa.Scalar):
        try:
            value = value.as_py()
        except (ValueError, OverflowError, KeyError):  # Python has no such year, or zone
            value = getattr(value, "value", "…")
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
