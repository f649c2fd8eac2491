"""Which Arrow type goes into which MySQL type, and as what text.

Rows reach the server as text, and most of what does not fit comes back as a warning, which fails the transaction (see
`loading`). What the server would alter without a word is refused here: fractions of a second that are rounded, NULL
that becomes the current time or the next number, '1' that becomes the first member of an ENUM, and the like. With
`rounding` numbers and times are rounded here, since servers do it in different ways, and with warnings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as at

from sinks.arrow.convert import (
    ROUNDING,
    Convert,
    CreatedTypes,
    Unfit,
    checked,
    created_type,
    narrowed,
    no_internals,
    refuse,
    refuse_strangers,
    require_moments,
    require_wall_clock,
    same,
    to_scale,
    to_unit,
    within,
)
from sinks.arrow.json import to_json
from sinks.arrow.types import is_bytes, is_moment, is_text
from sinks.sql import encoder as values
from sinks.sql import target as targets
from sinks.sql.mysql import as_mysql_json, beyond_doubles

_BITS = {"tinyint": 8, "smallint": 16, "mediumint": 24, "int": 32, "bigint": 64}
_TEXTS = {"char", "varchar", "tinytext", "text", "mediumtext", "longtext"}
_BINARIES = {"binary", "varbinary", "tinyblob", "blob", "mediumblob", "longblob"}
_OWN_TEXTS = {"uuid", "inet4", "inet6"}  # MariaDB's; the server reads and checks their text
# 0001-01-01 to 9999-12-31, counted from 1970
_DAYS = (-719_162, 2_932_896)
_MICROSECONDS = (_DAYS[0] * 86_400_000_000, (_DAYS[1] + 1) * 86_400_000_000 - 1)


@dataclass(frozen=True)
class Column(targets.Column):
    """One column of the target as information_schema tells: `type` is DATA_TYPE, `declared` COLUMN_TYPE.

    `counter` is one with AUTO_INCREMENT. `precision` and `scale` are those of numbers (for BIT, its bits), `digits`
    those of fractions of a second, `length` is in bytes. `collation` is "" for what is no text. `members` are those of
    an ENUM or SET.
    """

    counter: bool = False
    precision: int = 0
    scale: int | None = None
    digits: int = 0
    length: int = 0
    charset: str = ""
    collation: str = ""
    members: tuple[str, ...] = ()

    @property
    def holding(self) -> tuple[str, ...]:
        return (f"{self.declared} {self.collation}".rstrip(),)

    @property
    def unsigned(self) -> bool:
        return "unsigned" in self.declared

    @property
    def form(self) -> Form:
        if self.type in _BINARIES:
            return Form.HEX
        if self.type == "bit":
            return Form.BITS
        if self.type in _BITS or self.type in ("float", "double", "year"):
            return Form.NUMBER
        words = ("decimal", "date", "datetime", "timestamp", "time")  # in SQL 1.5E-7 is a double, '1.5E-7' a decimal
        return Form.WORD if self.type in words else Form.TEXT


class Form(Enum):
    """How a column's text stands in a row."""

    NUMBER = "number"  # as it is
    WORD = "word"  # quoted in SQL, with nothing in it to escape
    TEXT = "text"  # anything: quoted in SQL, escaped
    HEX = "hex"  # hexadecimal digits of bytes
    BITS = "bits"  # a number that only SQL can turn into a BIT


def conversion(arrow: pa.DataType, column: Column, *, rounding: bool = False) -> Convert:
    """How values of an Arrow type become the text of a column. Those that the column would round, or whose blanks it
    would drop, are refused, unless `rounding`. Raises Unfit."""
    if at.is_null(arrow):
        return lambda array: pa.nulls(len(array), pa.string())
    name = column.type
    if name in _BITS or name == "bit":
        return _integer(arrow, column)
    if name in _BINARIES:
        return _binary(arrow, column)
    if name in _TEXTS or name in _OWN_TEXTS or name == "json":
        return _text(arrow, column, rounding)
    if name in ("enum", "set"):
        return _member(arrow, column, rounding)
    if name in _CONVERSIONS:
        return _CONVERSIONS[name](arrow, column, rounding)
    raise Unfit(f"type {name} is not supported; use a text, json or blob column, or a view with a conversion")


def _string(array: pa.Array) -> pa.Array:
    return array.cast(pa.string())


# ---------------------------------------------------------------------- numbers
def _integer(arrow: pa.DataType, column: Column) -> Convert:
    if at.is_boolean(arrow) and column.type in ("tinyint", "bit"):
        return lambda array: _string(array.cast(pa.int8()))
    if not at.is_integer(arrow) and not (at.is_decimal(arrow) and arrow.scale == 0):
        raise Unfit("cast it to an integer type in Spark")
    if column.type == "bit":
        bounds = 0, 2**column.precision - 1
    elif column.unsigned:
        bounds = 0, 2 ** _BITS[column.type] - 1
    else:
        bounds = -(2 ** (_BITS[column.type] - 1)), 2 ** (_BITS[column.type] - 1) - 1
    return lambda array: _string(within(array, bounds, f"is out of range of {column.declared or column.type}"))


def _year(arrow: pa.DataType, column: Column, rounding: bool) -> Convert:
    if not at.is_integer(arrow):
        raise Unfit("cast it to an integer type in Spark")
    # 0 to 99 would be years of two digits
    return lambda array: _string(within(array, (1901, 2155), "is outside the years of YEAR, which are 1901 to 2155"))


def _decimal(arrow: pa.DataType, column: Column, rounding: bool) -> Convert:
    precision, scale = column.precision, column.scale or 0
    if not at.is_integer(arrow) and not at.is_decimal(arrow):
        raise Unfit("cast it to decimal in Spark, with the precision that you want")
    if at.is_decimal(arrow) and arrow.scale <= scale and arrow.precision - arrow.scale <= precision - scale:
        fitting: Convert = same
    else:
        declared = column.declared or "decimal"
        fitting = lambda array: to_scale(array, precision, scale, declared, rounding=rounding)  # noqa: E731
    if column.unsigned:
        return lambda array: _string(fitting(within(array, (0, 10**76), "is below 0")))
    return lambda array: _string(fitting(array))


def _float(arrow: pa.DataType, column: Column, rounding: bool) -> Convert:
    if column.scale is not None and not rounding:
        raise Unfit(f"{column.declared} rounds to {column.scale} digits: use double or decimal{ROUNDING}")
    single = column.type == "float"
    target = pa.float32() if single else pa.float64()
    if not at.is_floating(arrow) and not (at.is_integer(arrow) and arrow.bit_width <= 32):
        raise Unfit("cast it to double in Spark")

    def convert(array: pa.Array) -> pa.Array:
        if at.is_floating(array.type):
            refuse(array, pc.invert(pc.is_finite(array)), "is no number, and MySQL has no NaN and no infinities")
        if single and at.is_float64(array.type):
            array = narrowed(array, "float", exact=not rounding)
        fitting = array.cast(target, safe=False) if rounding else checked(array, target)
        return _string(fitting.cast(pa.float64()))  # servers read a float's own shortest text as a double first

    return convert


# ---------------------------------------------------------------------- text and bytes
def _text(arrow: pa.DataType, column: Column, rounding: bool) -> Convert:
    if (is_text(arrow) or at.is_nested(arrow)) and column.type == "json" and not column.collation:
        return as_mysql_json(arrow, rounding=rounding)  # MariaDB's is a text, and has a collation
    if at.is_nested(arrow) and (column.type == "json" or column.type == "longtext"):
        no_internals(arrow)
        return to_json
    if not is_text(arrow):
        more = " (or give a struct, map or array)" if column.type == "json" else ""
        raise Unfit(f"cast it to string in Spark{more}")
    if column.type != "char" or rounding:
        return same

    def convert(array: pa.Array) -> pa.Array:
        refuse(array, pc.ends_with(array, " "), f"ends with a space, which CHAR drops: use VARCHAR{ROUNDING}")
        return array

    return convert


def _member(arrow: pa.DataType, column: Column, rounding: bool) -> Convert:
    if not is_text(arrow):
        raise Unfit("cast it to string in Spark")
    members, several = column.members, column.type == "set"

    def convert(array: pa.Array) -> pa.Array:
        refuse_strangers(array, members, column.declared, several=several, rounding=rounding)
        return array

    return convert


_HEX = np.array([f"{byte:02X}".encode() for byte in range(256)], "S2").view(np.uint16)


def _binary(arrow: pa.DataType, column: Column) -> Convert:
    if not is_bytes(arrow):
        raise Unfit("cast it to binary in Spark")

    def convert(array: pa.Array) -> pa.Array:
        if column.type == "binary":
            other = pc.not_equal(pc.binary_length(array), column.length)
            refuse(array, other, f"is not {column.length} bytes long: {column.declared} would fill it up with zeros")
        return _hex(array.cast(pa.large_binary()))

    return convert


def _hex(array: pa.Array) -> pa.Array:
    _, offsets, data = array.buffers()
    bounds = np.frombuffer(offsets, np.int64)[array.offset : array.offset + len(array) + 1]
    used = np.frombuffer(data, np.uint8)[bounds[0] : bounds[-1]] if data is not None else np.zeros(0, np.uint8)
    digits = pa.LargeStringArray.from_buffers(
        len(array), pa.py_buffer((bounds - bounds[0]) * 2), pa.py_buffer(_HEX[used])
    )
    return pc.if_else(array.is_valid(), digits, None) if array.null_count else digits


# ---------------------------------------------------------------------- days and times
def _date(arrow: pa.DataType, column: Column, rounding: bool) -> Convert:
    if not at.is_date32(arrow):
        raise Unfit("cast it to date in Spark")

    def convert(array: pa.Array) -> pa.Array:
        return _string(_calendar(array, pa.int32(), _DAYS))

    return convert


def _calendar(array: pa.Array, whole: pa.DataType, bounds: tuple[int, int]) -> pa.Array:
    counts = array.view(whole)
    outside = pc.or_(pc.less(counts, bounds[0]), pc.greater(counts, bounds[1]))
    refuse(array, outside, "is outside the years 0001 to 9999")
    return array


def _whole(array: pa.Array, column: Column, rounding: bool) -> pa.Array:
    """`array` is in microseconds."""
    return to_unit(array, 10 ** (6 - column.digits), column.declared or column.type, rounding=rounding)


def _datetime(arrow: pa.DataType, column: Column, rounding: bool) -> Convert:
    require_wall_clock(arrow, "timestamp")
    return _moments(column, rounding)


def _timestamp(arrow: pa.DataType, column: Column, rounding: bool) -> Convert:
    require_moments(arrow)
    return _moments(column, rounding)


def _moments(column: Column, rounding: bool) -> Convert:
    def convert(array: pa.Array) -> pa.Array:
        kept = _whole(checked(array, pa.timestamp("us", array.type.tz)), column, rounding)
        _calendar(kept, pa.int64(), _MICROSECONDS)
        return _string(kept.view(pa.int64()).view(pa.timestamp("us")))  # the wall clock of UTC, as the session's

    return convert


def _time(arrow: pa.DataType, column: Column, rounding: bool) -> Convert:
    if at.is_time(arrow):  # as a span, which can be rounded to 24:00:00
        return lambda array: _span(_whole(checked(array, pa.time64("us")).view(pa.duration("us")), column, rounding))
    if at.is_duration(arrow):
        return lambda array: _span(_whole(checked(array, pa.duration("us")), column, rounding))
    raise Unfit("cast it to time, or to a day-time interval, in Spark")


def _span(array: pa.Array) -> pa.Array:
    counts = array.view(pa.int64())
    whole = pc.abs(counts)
    seconds = pc.divide(whole, 1_000_000)
    hours, minutes = pc.divide(seconds, 3600), pc.divide(seconds, 60)
    parts = [
        hours,
        pc.subtract(minutes, pc.multiply(hours, 60)),
        pc.subtract(seconds, pc.multiply(minutes, 60)),
    ]
    clock = pc.binary_join_element_wise(*map(_string, parts), ":")
    fraction = pc.utf8_lpad(_string(pc.subtract(whole, pc.multiply(seconds, 1_000_000))), 6, "0")
    sign = pc.if_else(pc.less(counts, 0), "-", "")
    return pc.binary_join_element_wise(pc.binary_join_element_wise(sign, clock, ""), fraction, ".")


_CONVERSIONS: dict[str, Callable[[pa.DataType, Column, bool], Convert]] = {
    "year": _year,
    "decimal": _decimal,
    "float": _float,
    "double": _float,
    "date": _date,
    "datetime": _datetime,
    "timestamp": _timestamp,
    "time": _time,
}


# ---------------------------------------------------------------------- schemas
def mismatches(schema: pa.Schema, columns: Sequence[Column], *, rounding: bool = False) -> list[str]:
    """Every reason why rows of `schema` do not fit a table of `columns`; [] if they do."""
    return values.mismatches(schema, columns, partial(conversion, rounding=rounding))


def target_type(arrow: pa.DataType, *, key: bool = False) -> str:
    """The MySQL type of a column that the sink creates for an Arrow type; `key` for one that gets an index, which text
    and bytes of any length cannot have. Raises Unfit for one that has none."""
    if is_text(arrow):
        return "varchar(255)" if key else "longtext"
    if is_bytes(arrow):
        return "varbinary(255)" if key else "longblob"
    if at.is_decimal(arrow) and arrow.scale <= 30:
        return f"decimal({arrow.precision},{arrow.scale})"
    return created_type(arrow, _CREATED, "longtext" if beyond_doubles(arrow) else "json", "MySQL")


_CREATED: CreatedTypes = [
    (at.is_boolean, "boolean"),
    (at.is_int8, "tinyint"),
    (at.is_int16, "smallint"),
    (at.is_int32, "int"),
    (at.is_int64, "bigint"),
    (at.is_float32, "float"),
    (at.is_float64, "double"),
    (at.is_null, "longtext"),
    (at.is_date32, "date"),
    (is_moment, "timestamp(6)"),
    (at.is_timestamp, "datetime(6)"),
    (lambda t: at.is_time(t) or at.is_duration(t), "time(6)"),
]
