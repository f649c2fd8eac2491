"""Which Arrow type goes into which column, in which Python values, and what a created table declares.

Databases differ; the rules here are the same for all. A value goes in only if no database alters it on the way; with
`rounding` it is rounded here first.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as at
import sqlalchemy as sa
from sqlalchemy.dialects import mysql
from sqlalchemy.types import TypeEngine

from sinks.arrow.convert import (
    DOUBLE_DIGITS,
    ROUNDING,
    Convert,
    Unfit,
    cast,
    checked,
    narrowed,
    no_internals,
    refuse,
    refuse_strangers,
    same,
    to_scale,
    to_unit,
    would_be_rounded,
)
from sinks.arrow.json import to_json
from sinks.arrow.types import is_bytes, is_text, spark_name
from sinks.sql import target as targets
from sinks.sql.mysql import as_mysql_json, beyond_doubles

# SQLite has no other type for fractions.
_SQLITE_DIGITS = DOUBLE_DIGITS
_SQLITE_WHOLE = 2**53
_NUMBER = r"^\s*[-+.]?[0-9.]"
"""What texts begin with that SQLite may take for a number."""
_KEY_LENGTH = 255
_INFINITE = (lambda array: pc.invert(pc.is_finite(array)), "is no number, and MySQL has no NaN and no infinities")
_NO_NUMBER = {
    "sqlite": (pc.is_nan, "would become NULL in SQLite"),
    "mysql": _INFINITE,
    "mariadb": _INFINITE,
}
"""Which floating-point numbers a database has no place for."""
_BINARIES = (sa.LargeBinary, sa.BINARY, sa.VARBINARY, mysql.TINYBLOB, mysql.MEDIUMBLOB, mysql.LONGBLOB)


@dataclass(frozen=True, kw_only=True)
class Column(targets.Column):
    """One column of the target, with its type as SQLAlchemy has it."""

    kind: TypeEngine[Any]
    dialect: str

    @classmethod
    def of(cls, name: str, kind: TypeEngine[Any], dialect: str) -> Column:
        return cls(name, repr(kind), kind=kind, dialect=dialect)


def conversion(arrow: pa.DataType, column: Column, *, rounding: bool = False) -> Convert:
    """The conversion of a batch's column to the values that go into the table's. Those that it would round, or whose
    blanks it would drop, are refused, unless `rounding`. Raises Unfit."""
    kind = column.kind
    if isinstance(kind, sa.JSON):
        if column.dialect == "mysql":
            return as_mysql_json(arrow, rounding=rounding)
        return _no_number if column.dialect == "sqlite" and is_text(arrow) else _as_text(arrow)
    if isinstance(kind, mysql.ENUM | mysql.SET) and not is_text(arrow):
        raise Unfit("cast to string in Spark")
    if isinstance(kind, sa.String):
        text = _as_text(arrow) if at.is_nested(arrow) else _only(is_text(arrow), "cast to string in Spark")
        return _text(text, kind, rounding)
    if isinstance(kind, mysql.BINARY | sa.BINARY) and kind.length:
        return _padded(_only(is_bytes(arrow), "cast to binary in Spark"), kind.length)
    if isinstance(kind, sa.Float):
        return _floating(arrow, column, rounding)
    if isinstance(kind, sa.Numeric):
        return _decimal(arrow, column, rounding)
    if isinstance(kind, sa.DateTime | sa.Time):
        return _moment(arrow, kind, column, rounding)
    for kinds, fits, name in (
        (sa.Boolean, at.is_boolean(arrow), "boolean"),
        (sa.Integer, at.is_integer(arrow) or at.is_boolean(arrow), "an integer type"),
        (_BINARIES, is_bytes(arrow), "binary"),
        (sa.Date, at.is_date(arrow), "date"),
    ):
        if isinstance(kind, kinds):
            return _only(fits, f"cast to {name} in Spark")
    raise Unfit("this sink does not know the column's type; use the sink of that database, or a column of another type")


def _only(fits: bool, advice: str) -> Convert:
    if not fits:
        raise Unfit(advice)
    return same


def _text(convert: Convert, kind: sa.String, rounding: bool) -> Convert:
    """What databases cut, fill up, or take for something else, without a word."""
    members = list(kind.values if isinstance(kind, mysql.SET) else kind.enums if isinstance(kind, sa.Enum) else ())
    length = None if members else kind.length

    def exact(array: pa.Array) -> pa.Array:
        texts = convert(array)
        if members:
            several = isinstance(kind, mysql.SET)
            refuse_strangers(texts, members, repr(kind), several=several, rounding=rounding)
        if isinstance(kind, sa.CHAR) and not rounding:
            refuse(texts, pc.ends_with(texts, " "), f"ends with a space, which CHAR drops: use VARCHAR{ROUNDING}")
        if length is not None and not rounding and pc.any(blank := pc.ends_with(texts, " ")).as_py():
            too_long = pc.and_(blank, pc.greater(pc.utf8_length(texts), length))
            refuse(texts, too_long, f"has more than {length} characters, and databases cut blanks off{ROUNDING}")
        return texts

    return exact


def _padded(convert: Convert, length: int) -> Convert:
    def exact(array: pa.Array) -> pa.Array:
        refuse(
            array, pc.not_equal(pc.binary_length(array), length), f"is not {length} bytes long, and would be filled up"
        )
        return convert(array)

    return exact


def _as_text(arrow: pa.DataType) -> Convert:
    """JSON text; a string is taken as the JSON text that it is. (The engine's json_serializer leaves text alone.)"""
    if is_text(arrow):
        return same
    no_internals(arrow)
    return to_json


def _no_number(array: pa.Array) -> pa.Array:
    number = pc.match_substring_regex(array, _NUMBER)
    refuse(array, number, "is a number by itself, which SQLite would make a double: use a text column")
    return array


def _floating(arrow: pa.DataType, column: Column, rounding: bool) -> Convert:
    if not (at.is_floating(arrow) or (at.is_integer(arrow) and arrow.bit_width <= 32)):
        raise Unfit("cast to double in Spark")
    if getattr(column.kind, "scale", None) is not None and not rounding:  # float(7,4) of MySQL
        raise Unfit(f"the column rounds to {column.kind.scale} digits: use double or decimal{ROUNDING}")  # type: ignore[attr-defined]
    fitting = same
    if _single(column) and at.is_float64(arrow):
        fitting = lambda array: narrowed(array, column.type, exact=not rounding)  # noqa: E731
    elif _single(column) and at.is_integer(arrow):
        return lambda array: array.cast(pa.float32(), safe=False) if rounding else checked(array, pa.float32())
    if column.dialect not in _NO_NUMBER or not at.is_floating(arrow):
        return fitting
    is_none, reason = _NO_NUMBER[column.dialect]

    def number(array: pa.Array) -> pa.Array:
        refuse(array, is_none(array), reason)
        return fitting(array)

    return number


def _single(column: Column) -> bool:
    """Whether the column has 32 bits. SQLite has none such."""
    kind = column.kind
    if column.dialect == "sqlite" or isinstance(kind, sa.Double):
        return False
    if column.dialect in ("mysql", "mariadb"):
        return isinstance(kind, mysql.FLOAT)  # REAL and DOUBLE have 64
    return isinstance(kind, sa.REAL) or (getattr(kind, "precision", None) or 53) <= 24


def _decimal(arrow: pa.DataType, column: Column, rounding: bool = False) -> Convert:
    assert isinstance(column.kind, sa.Numeric)
    if at.is_integer(arrow):
        digits, scale = len(str(2 ** (arrow.bit_width - 1))), 0
    elif at.is_decimal(arrow):
        digits, scale = arrow.precision, arrow.scale
    else:
        raise Unfit("cast to decimal in Spark")
    if column.dialect == "sqlite" and at.is_decimal(arrow) and digits > _SQLITE_DIGITS:
        raise Unfit(
            f"SQLite keeps {_SQLITE_DIGITS} digits; cast to decimal({_SQLITE_DIGITS}, {min(scale, 15)}) or string"
        )
    wanted, fraction = column.kind.precision, column.kind.scale or 0
    fitting = same
    if wanted is not None and (scale > fraction or digits - scale > wanted - fraction):
        fitting = lambda array: to_scale(array, wanted, fraction, column.type, rounding=rounding)  # noqa: E731
    if column.dialect != "sqlite" or digits <= _SQLITE_DIGITS or rounding:
        return fitting

    def exact(array: pa.Array) -> pa.Array:
        refuse(array, pc.greater(pc.abs(array), _SQLITE_WHOLE), would_be_rounded("a double, as SQLite has numbers"))
        return fitting(array)

    return exact


def _moment(arrow: pa.DataType, kind: sa.DateTime | sa.Time, column: Column, rounding: bool) -> Convert:
    if isinstance(kind, sa.Time) and kind.timezone:
        raise Unfit("a time of day in Spark has no zone, and the column asks for one: use a plain time column")
    if isinstance(kind, sa.Time):
        clock = cast(arrow, pa.time64("us"), at.is_time(arrow), "cast to time in Spark")
    elif not at.is_timestamp(arrow):
        raise Unfit("cast to timestamp in Spark")
    elif arrow.tz is None and (kind.timezone or isinstance(kind, mysql.TIMESTAMP)):
        raise Unfit("a wall clock is no point in time; cast to timestamp in Spark, where the zone is known")
    elif kind.timezone:
        clock = partial(checked, target=pa.timestamp("us", "UTC"))
    else:
        exact = pa.timestamp("us", arrow.tz)
        clock = lambda array: checked(array, exact).cast(pa.timestamp("us"))  # noqa: E731 - the wall clock in UTC
    unit = 10 ** (6 - _digits(column))
    return lambda array: to_unit(clock(array), unit, column.type, rounding=rounding)


def _digits(column: Column) -> int:
    """Of fractions of a second."""
    if column.dialect in ("mysql", "mariadb"):
        return getattr(column.kind, "fsp", None) or 0
    digits = getattr(column.kind, "precision", None)
    return 6 if digits is None else min(6, int(digits))


def declared(arrow: pa.DataType, dialect: str, key: bool = False) -> TypeEngine[Any]:
    """The type of a column that a created table has for Spark's values. Raises Unfit."""
    simple: dict[pa.DataType, TypeEngine[Any]] = {
        pa.bool_(): sa.Boolean(),
        pa.int8(): sa.SmallInteger(),
        pa.int16(): sa.SmallInteger(),
        pa.int32(): sa.Integer(),
        pa.int64(): sa.BigInteger(),
        pa.float32(): sa.REAL().with_variant(mysql.FLOAT(), "mysql", "mariadb"),
        pa.float64(): sa.Double(),
        pa.date32(): sa.Date(),
    }
    if arrow in simple:
        return simple[arrow]
    if is_text(arrow):
        return sa.String(_KEY_LENGTH) if key else sa.Text().with_variant(mysql.LONGTEXT(), "mysql", "mariadb")
    if is_bytes(arrow):
        return sa.LargeBinary().with_variant(mysql.LONGBLOB(), "mysql", "mariadb")
    if at.is_decimal(arrow):
        kind = sa.Numeric(arrow.precision, arrow.scale)
        _decimal(arrow, Column.of("", kind, dialect))
        return kind
    if at.is_timestamp(arrow):
        return sa.DateTime(timezone=arrow.tz is not None).with_variant(mysql.DATETIME(fsp=6), "mysql", "mariadb")
    if at.is_time(arrow):
        return sa.Time().with_variant(mysql.TIME(fsp=6), "mysql", "mariadb")
    if at.is_nested(arrow):
        no_internals(arrow)
        return mysql.LONGTEXT() if dialect == "mysql" and beyond_doubles(arrow) else sa.JSON()
    raise Unfit(f"{spark_name(arrow)} has no portable column type: cast it in Spark, to string for example")
