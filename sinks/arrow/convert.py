"""Descriptions of what columns hold, and conversions of Arrow values for these columns.

A value goes into a column as it is, or is refused. Each database has a table from the names of its
types to `Holds`. A database's own module does only what no other database does, which is the form
in which the database takes the values.
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
"""How many decimal digits a double holds exactly."""
_DAYS = (-719_162, 2_932_896)
"""The days 0001-01-01 and 9999-12-31, counted from 1970."""
_MICROSECONDS = (_DAYS[0] * 86_400_000_000, (_DAYS[1] + 1) * 86_400_000_000 - 1)
"""The first and the last microsecond of the years 0001 to 9999, counted from 1970."""


class Unfit(SchemaMismatch):
    """An Arrow type does not go into the column. The message says what to do.

    The message is a part of another error's message, so it has no code of its own.
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
"""A function from the batch's array to an array in the form that the column takes. It raises
RefusedValue for a value that does not go in."""


# ---------------------------------------------------------------------- which Arrow types
Takes = Callable[[pa.DataType], None]
"""A function that raises Unfit for an Arrow type that does not go into the column."""


def only(test: Callable[[pa.DataType], bool], what: str, more: str = "") -> Takes:
    """Return a function that takes the Arrow types for which `test` is true.

    For another type, the message of Unfit advises a cast to `what`. The message ends with `more`.
    """

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
    """Return a function that takes times without a time zone.

    `zoned` is the database's type for points in time, which the message of Unfit offers for those.
    """
    other = f" (in the session's time zone), or make the column {zoned}, which has points in time"
    return only(
        lambda arrow: at.is_timestamp(arrow) and not is_moment(arrow), "timestamp_ntz", other
    )


# ---------------------------------------------------------------------- what of their values
@dataclass(frozen=True)
class Holds:
    """A description of what a column holds.

    A limit that is not given does not exist, or the server itself refuses what is beyond it. Values
    that the column would round, or whose blanks it would drop, are refused.

    * `takes` is the check of Arrow types. `name` is what messages call the column's type.
    * `bounds` are the limits of integers, and of dates and timestamps in days or microseconds from
      1970. Dates and timestamps without `bounds` are from the years 0001 to 9999.
    * `complaint` is what a message says of a number outside the range. `years` is what a message
      says of the limits of dates and timestamps.
    * `to` is the type in which integers without `bounds`, and floating-point numbers, are handed
      over.
    * `precision` and `scale` are the digits of exact numbers. If `to` is a floating-point type,
      `scale` is what MySQL's float(7,4) rounds to.
    * `missing` tells which floating-point numbers the database has no place for, and what to say of
      them.
    * `unit` is the number of microseconds of which times are multiples.
    * `size` is the exact number of bytes of a binary value.
    * `longest` is the most characters of a string.
    * `drops` says that the column drops blanks at the end of a string, so it takes none there. If
      the column also `fills` its strings up with blanks, it takes a string with the full length.
    * `members` are the only strings that the column takes.
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
        """Return the conversion of values of an Arrow type to values of the column.

        Points in time become the wall clock of UTC. Raises Unfit for a type that does not go in.
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
        """Refuse numbers that would be rounded, or have more digits than the precision.

        Without a precision, the server judges how large a number may be.
        """
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
        """Convert doubles to 32-bit floats.

        Refuses a value that would be rounded, or would become infinite or zero.
        """
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
        # no string has more characters than bytes, which are counted sooner
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
        """Refuse a string that is not one of the members, letter by letter.

        Databases take a number for the position of a member. They take a string that compares
        equal, such as one in capitals, for the member.
        """
        known = pc.is_in(array.cast(pa.string()), pa.array(members, pa.string()))
        return refuse(
            array, pc.and_(array.is_valid(), pc.invert(known)), f"is no member of {self.name}"
        )


def same(array: pa.Array) -> pa.Array:
    return array


def in_years(array: pa.Array) -> pa.Array:
    """Return the same array, and refuse days and moments outside the years 0001 to 9999.

    Python, and the text of a lake's log, have no other years.
    """
    if at.is_date32(array.type) or at.is_timestamp(array.type):
        Holds(DATE if at.is_date32(array.type) else TIMESTAMP).conversion(array.type)(array)
    return array


def in_utf8(array: pa.Array) -> pa.Array:
    """Return the same array, and refuse invalid UTF-8.

    Spark makes a string of any bytes that are cast to string.
    """
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:  # perhaps of values outside this slice, if they are nested
        if (index := first_refused(array, lambda one: one.validate(full=True))) is not None:
            raise RefusedValue(index, "the text is not UTF-8") from None
    return array


def first_refused(array: pa.Array, call: Callable[[pa.Array], object]) -> int | None:
    """Return the place of the first value that `call` refuses when it gets that value alone.

    A value is refused, too, if Python has no such value. Return None if `call` takes each value.
    """
    for index in range(len(array)):
        try:
            call(array.take(pa.array([index])))
        except (ValueError, OverflowError):
            return index
    return None


def as_json(arrow: pa.DataType) -> Convert:
    """Return the conversion of a type to JSON. Raises Unfit.

    A string is taken as the JSON that it is.
    """
    if is_text(arrow):
        return same
    no_internals(arrow)
    return to_json


def no_internals(arrow: pa.DataType) -> None:
    """Raise Unfit for a type that holds a variant, geometry or geography.

    Spark hands these over as a struct of their inner bytes. The fields' metadata says so
    (pyspark.sql.pandas.types.to_arrow_type). Nobody wants to find these bytes in a target.
    """
    for field in (arrow.field(i) for i in range(arrow.num_fields)):
        for name in ("variant", "geometry", "geography"):
            if (field.metadata or {}).get(name.encode()) == b"true":
                by = "to_json" if name == "variant" else "st_asbinary"
                raise Unfit(f"it holds a {name}: use {by}() in Spark")
        no_internals(field.type)


def bits(count: int, *, signed: bool = True) -> tuple[int, int]:
    """Return the first and the last of the integers with `count` bits."""
    return (-(2 ** (count - 1)), 2 ** (count - 1) - 1) if signed else (0, 2**count - 1)


def digits_of(arrow: pa.DataType) -> tuple[int, int]:
    """Return how many digits an integer or decimal type has, and how many of them are fractions."""
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
    """Cast an array, and refuse the first value that would lose something.

    Messages show the value of `given`, of which the array was made.
    """
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
    """Return the same array, or refuse the first value at which `bad` is true."""
    if pc.any(bad).as_py():
        index = pc.index(bad, True).as_py()
        raise RefusedValue(index, f"{short(array[index])} {complaint}")
    return array


def short(value: object) -> str:
    """Return a value, of Arrow or of Python, as text for a message, cut to 60 characters."""
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
    """Return the column that a sink creates for an Arrow type.

    `types` has the columns by Spark's name of the type. `nested` is the column for structs, maps
    and lists. Raises Unfit for a type that the system has no column for.
    """
    if (kind := types.get(spark_name(arrow))) is not None:
        return kind
    if not at.is_nested(arrow):
        raise Unfit(f"no {system} type for {arrow}; cast it in Spark")
    try:
        no_internals(arrow)
    except Unfit as unfit:
        raise Unfit(f"no {system} type for {arrow}: {unfit}") from None
    return nested
