"""The types of columns: which Arrow type goes into which, and what a created table declares.

It also says in which Python values they go in. Databases differ; the rules here are the same for
all. A value goes in only if no database alters it on the way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as at
import sqlalchemy as sa
from sqlalchemy.types import TypeEngine

from sinks.arrow import convert
from sinks.arrow.convert import (
    DOUBLE_DIGITS,
    Convert,
    Holds,
    Unfit,
    as_json,
    created_type,
    refuse,
    would_be_rounded,
)
from sinks.arrow.types import is_text
from sinks.sql import table as tables

_NUMBER = r"^\s*[-+.]?[0-9.]"
"""The beginning of strings that SQLite may take for a number."""
_MISSING = {"sqlite": (pc.is_nan, "would become NULL in SQLite")}
_INTEGER = convert.only(
    lambda arrow: at.is_integer(arrow) or at.is_boolean(arrow), "an integer type"
)
_BINARIES = (sa.LargeBinary, sa.BINARY, sa.VARBINARY)


@dataclass(frozen=True, kw_only=True)
class SqlAlchemyColumn(tables.Column):
    """A column of the target, with its type as SQLAlchemy has it."""

    kind: TypeEngine[Any]
    dialect: str

    @classmethod
    def of(cls, name: str, kind: TypeEngine[Any], dialect: str) -> SqlAlchemyColumn:
        return cls(name, repr(kind), kind=kind, dialect=dialect)

    def conversion(self, arrow: pa.DataType) -> Convert:
        if isinstance(self.kind, sa.JSON):
            if self.dialect == "sqlite" and is_text(arrow):
                return _no_number
            if self.dialect == "sqlite" and not at.is_nested(arrow):
                raise Unfit(
                    "SQLite makes doubles of numbers in it: make it a text column, or give a "
                    "struct or array"
                )
            return as_json(arrow)
        holds = self._holds()
        checked = holds.conversion(arrow)
        if self.dialect == "sqlite" and holds.takes is convert.DECIMAL:
            return _as_double(arrow, checked)
        if isinstance(self.kind, sa.DateTime) and self._has_zone:
            return lambda array: checked(array).view(pa.int64()).view(pa.timestamp("us", "UTC"))
        # PostgreSQL casts a boolean to no other integer type than `integer`
        if isinstance(self.kind, sa.Integer) and at.is_boolean(arrow):
            return lambda array: checked(array).cast(pa.int8())
        return checked

    def _holds(self) -> Holds:
        kind = self.kind
        name = self.type
        match kind:
            case sa.Enum():
                return Holds(convert.TEXT, name, members=kind.enums)
            case sa.String() if type(kind) is sa.String and self.dialect == "postgresql":
                raise Unfit(
                    'PostgreSQL cuts texts for its types name and "char": make it a text column'
                )
            case sa.String():
                longest = None if self.dialect == "sqlite" else kind.length  # SQLite cuts nothing
                return Holds(
                    convert.JSON,
                    name,
                    longest=longest,
                    drops=isinstance(kind, sa.CHAR),
                    fills=self.dialect == "postgresql",
                )
            case sa.Float():
                has_32_bits = (
                    isinstance(kind, sa.REAL) or (getattr(kind, "precision", None) or 53) <= 24
                )
                is_double = (
                    self.dialect == "sqlite" or isinstance(kind, sa.Double) or not has_32_bits
                )
                to = pa.float64() if is_double else pa.float32()
                scale = getattr(kind, "scale", None)
                return Holds(
                    convert.FLOAT, name, to=to, scale=scale, missing=_MISSING.get(self.dialect)
                )
            case sa.Numeric():
                scale = None if kind.precision is None else kind.scale or 0
                # Arrow has no more
                precision = kind.precision if (kind.precision or 0) <= 76 else None
                return Holds(convert.DECIMAL, name, precision=precision, scale=scale)
            case sa.DateTime():
                return Holds(
                    convert.MOMENT if self._has_zone else convert.TIMESTAMP, name, unit=self._unit
                )
            case sa.Time() if self._has_zone:
                raise Unfit(
                    "a time of day in Spark has no zone, and the column asks for one: use a plain "
                    "time column"
                )
            case sa.Time():
                return Holds(convert.TIME, name, unit=self._unit)
            case sa.BINARY():
                return Holds(convert.BYTES, name, size=kind.length or None)
        for kinds, takes in (
            (sa.Boolean, convert.BOOLEAN),
            (sa.Integer, _INTEGER),
            (_BINARIES, convert.BYTES),
            (sa.Date, convert.DATE),
        ):
            if isinstance(kind, kinds):
                return Holds(takes, name)
        other = "use the sink of that database, or a column of another type"
        raise Unfit(f"this sink does not know the column's type; {other}")

    @property
    def _has_zone(self) -> bool:
        """True if the column has a time zone.

        SQLAlchemy takes the 6 of SQLite's DATETIME(6) for a `timezone`, so only True counts.
        """
        return getattr(self.kind, "timezone", False) is True

    @property
    def _unit(self) -> int:
        """The smallest unit of the column's time, in microseconds."""
        digits = getattr(self.kind, "precision", None)
        digits = 6 if digits is None else digits
        return int(10 ** (6 - min(6, int(digits))))


def _no_number(array: pa.Array) -> pa.Array:
    number = pc.match_substring_regex(array, _NUMBER)
    return refuse(
        array, number, "is a number by itself, which SQLite would make a double: use a text column"
    )


def _as_double(arrow: pa.DataType, checked: Convert) -> Convert:
    """Return the conversion into a double, since SQLite has no other type for fractions.

    Raises Unfit for decimals with more digits than a double keeps.
    """
    digits, scale = convert.digits_of(arrow)
    if digits <= DOUBLE_DIGITS:
        return checked
    if at.is_decimal(arrow):
        fitting = f"decimal({DOUBLE_DIGITS}, {min(scale, DOUBLE_DIGITS)})"
        raise Unfit(f"SQLite keeps {DOUBLE_DIGITS} digits; cast to {fitting} or string")
    reason = would_be_rounded("a double, as SQLite has numbers")
    return lambda array: checked(refuse(array, pc.greater(pc.abs(array), 2**53), reason))


def declared(arrow: pa.DataType, dialect: str, key: bool = False) -> TypeEngine[Any]:
    """Return the type of a column that a created table has for Spark's values.

    Raises Unfit.
    """
    types: dict[str, TypeEngine[Any]] = {
        "boolean": sa.Boolean(),
        "tinyint": sa.SmallInteger(),
        "smallint": sa.SmallInteger(),
        "int": sa.Integer(),
        "bigint": sa.BigInteger(),
        "float": sa.REAL(),
        "double": sa.Double(),
        "string": sa.String(255) if key else sa.Text(),
        "binary": sa.LargeBinary(),
        "date": sa.Date(),
        "timestamp": sa.DateTime(timezone=True),
        "timestamp_ntz": sa.DateTime(),
        "time": sa.Time(),
    }
    if at.is_decimal(arrow):
        kind = sa.Numeric(arrow.precision, arrow.scale)
        SqlAlchemyColumn.of("", kind, dialect).conversion(arrow)
        return kind
    return created_type(arrow, types, sa.JSON(), "portable")


# ---------------------------------------------------------------------- the table
@dataclass(frozen=True, kw_only=True)
class SqlAlchemyTarget(tables.Target):
    """A table that rows go to.

    What judges its rows is not asked for, so it is assumed that there may be something.
    """

    columns: tuple[SqlAlchemyColumn, ...]
    table: sa.Table
    constraints: tuple[str, ...] = ("what the table has",)

    def is_unique(self, keys: tuple[str, ...]) -> bool:
        known = self.table.constraints
        uniques = [
            tuple[Any, ...](c)
            for c in known
            if isinstance(c, sa.PrimaryKeyConstraint | sa.UniqueConstraint)
        ]
        indexes = (index for index in self.table.indexes if index.unique and not is_partial(index))
        uniques += [tuple[Any, ...](index.expressions) for index in indexes]
        return any(
            {getattr(part, "name", None) for part in parts} == set(keys) for parts in uniques
        )


def is_partial(index: sa.Index) -> bool:
    return any(
        name.endswith("_where") and rule is not None for name, rule in index.dialect_kwargs.items()
    )
