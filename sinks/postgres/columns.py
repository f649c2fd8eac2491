"""The columns of a PostgreSQL table, and which Arrow type goes into which of its types, and how.

COPY BINARY does not check types: the receive function of the column's type gets the bytes of the
field as they are (PostgreSQL manual, COPY, "Binary Format"). So text goes into every type whose
binary form is its text (varchar, json, enums, …), and every other column needs exactly its own
form.

PostgreSQL rounds and cuts without a word (manual, "Numeric Types", "Date/Time Types", "Character
Types"), unless such values are refused here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as at
from psycopg import sql
from psycopg.postgres import types as builtin

from sinks.arrow import convert
from sinks.arrow.convert import (
    Convert,
    Holds,
    RefusedValue,
    Unfit,
    created_type,
    refuse,
    same,
    short,
)
from sinks.arrow.types import bytes_of, is_list, is_text
from sinks.sql import table as tables


@dataclass(frozen=True)
class PostgresColumn(tables.Column):
    """A column of the target as the catalog describes it.

    `type` is pg_type.typname (`int4`, `int4[]` for its array, a domain's base type). `kind` is
    pg_type.typtype of the type, or of an array's element (`e`: an enum, `d`: a domain). `limits` is
    the type, or an array's element, with its modifiers and without domains (`numeric(5,2)`).
    `collation` is the clause for a collation that is not the type's own. `always` says that it is
    an identity column that is GENERATED ALWAYS.
    """

    kind: str = "b"
    limits: str = ""
    collation: str = ""
    always: bool = False

    def conversion(self, arrow: pa.DataType) -> Convert:
        if self.type.endswith("[]"):
            return _array(arrow, self)
        name = "text" if self.kind == "e" else self.type
        if at.is_null(arrow):
            return lambda array: pa.nulls(len(array), pa.string())
        if name not in _HOLDS:
            other = "alter it to a text, jsonb or bytea column, or drop the column in Spark"
            raise Unfit(f"PostgreSQL type {name} is not supported; {other}")
        checked = _holds(name, self.limits or self.in_sql).conversion(arrow)
        form = _FORMS.get(name, same)
        if is_text(arrow) and name != "uuid":
            return lambda array: form(_without_nul(checked(array)))
        return lambda array: form(checked(array))


# ---------------------------------------------------------------------- what columns hold
# PostgreSQL's years (manual, "Date/Time Types"; src/include/datatype/timestamp.h), counted from
# 1970. Values below must not get to it: counted from 2000 they wrap around, or are what it takes
# for -infinity.
_DAYS = (-2_440_588, 2_145_042_905)
_MICROSECONDS = (-210_866_803_200_000_000, 2**63 - 1)
_YEARS = "of PostgreSQL"
_HOLDS = {
    "bool": Holds(convert.BOOLEAN),
    "int2": Holds(convert.INTEGER, to=pa.int16()),
    "int4": Holds(convert.INTEGER, to=pa.int32()),
    "int8": Holds(convert.INTEGER, to=pa.int64()),
    "float4": Holds(convert.FLOAT, to=pa.float32()),
    "float8": Holds(convert.FLOAT, to=pa.float64()),
    "numeric": Holds(convert.DECIMAL),
    **dict.fromkeys(("text", "varchar", "citext", "name", "uuid"), Holds(convert.TEXT)),
    "bpchar": Holds(convert.TEXT, drops=True, fills=True),
    **dict.fromkeys(("json", "jsonb"), Holds(convert.JSON)),
    "bytea": Holds(convert.BYTES),
    "date": Holds(convert.DATE, bounds=_DAYS, years=_YEARS),
    "timestamp": Holds(convert.wall_clock("timestamptz"), bounds=_MICROSECONDS, years=_YEARS),
    "timestamptz": Holds(convert.MOMENT, bounds=_MICROSECONDS, years=_YEARS),
    "time": Holds(convert.TIME),
    "interval": Holds(convert.SPAN),
}
_LIMITED = re.compile(r"[a-z]+(?: varying)?((?: (?!with)[a-z]+)*)(?:\((-?\d+)(?:,(-?\d+))?\))?")
"""A type's name with fields, as in `interval day to second(0)`, and one or two numbers."""


def _holds(name: str, declared: str) -> Holds:
    """Return what a type holds, within the limits of `declared`. Raises Unfit."""
    holds = replace(_HOLDS[name], name=declared)
    match = _LIMITED.match(declared)
    fields, size, scale = match.groups() if match else ("", None, None)
    if name == "interval" and fields:
        raise Unfit("it cuts off what it has no field for; make the column a plain interval")
    if size is None:
        return holds
    if name in ("time", "timestamp", "timestamptz", "interval"):
        return replace(holds, unit=10 ** (6 - int(size)))
    return (
        replace(holds, scale=int(scale or 0))
        if name == "numeric"
        else replace(holds, longest=int(size))
    )


# ---------------------------------------------------------------- the form of values in COPY BINARY
def _without_nul(array: pa.Array) -> pa.Array:
    """Refuse strings with a NUL, which PostgreSQL's text does not have.

    This looks at the bytes once, and at offsets only if there is a NUL.
    """
    if not bytes_of(array).all():
        index = pc.index(pc.greater_equal(pc.find_substring(array, pattern="\0"), 0), True).as_py()
        if index >= 0:
            raise RefusedValue(
                index, f"{short(array[index])} holds a NUL, which PostgreSQL's text cannot"
            )
    return array


_UUID = "[0-9A-Fa-f]{4}(-?[0-9A-Fa-f]{4}){7}"


def _uuid(array: pa.Array) -> pa.Array:
    """Convert strings, in the forms that uuid_in() takes, to the bytes of a uuid."""
    is_uuid = pc.match_substring_regex(array, rf"^({_UUID}|\{{{_UUID}\}})$")
    refuse(array, pc.invert(is_uuid), "is no uuid")
    digits = pc.replace_substring_regex(array.cast(pa.string()).fill_null("0" * 32), "[-{}]", "")
    packed = pa.py_buffer(bytes.fromhex(bytes_of(digits).tobytes().decode()))
    values = pa.Array.from_buffers(pa.binary(16), len(array), [None, packed]).cast(pa.binary())
    return pc.if_else(array.is_valid(), values, None)


_FORMS: dict[str, Convert] = {
    "numeric": lambda array: (
        array.cast(pa.decimal128(20, 0)) if at.is_integer(array.type) else array
    ),
    # version 1
    "jsonb": lambda array: pc.binary_join_element_wise("\x01", array.cast(pa.string()), ""),
    "uuid": _uuid,
}


# ---------------------------------------------------------------------- arrays
_IN_ARRAYS = (
    "bool",
    "int2",
    "int4",
    "int8",
    "float4",
    "float8",
    "numeric",
    "text",
    "bytea",
    "date",
    "timestamp",
    "time",
)
"""The types whose arrays pgpq encodes, with the OID of the element."""


def _array(arrow: pa.DataType, column: PostgresColumn) -> Convert:
    name = column.type.removesuffix("[]")
    if at.is_null(arrow):
        return lambda array: pa.nulls(len(array), pa.binary())
    if not is_list(arrow):
        raise Unfit("it takes an array")
    if at.is_nested(arrow.value_type):
        raise Unfit("arrays of arrays, structs or maps go into a jsonb column")
    if name not in _IN_ARRAYS or column.kind != "b":
        raise Unfit(
            f"its elements are none of {', '.join(_IN_ARRAYS)}: make the column text[] or jsonb"
        )
    if at.is_null(arrow.value_type) and name != "text":
        raise Unfit("its elements have no type: cast it in Spark")
    element = PostgresColumn(
        column.name, name, column.declared.removesuffix("[]"), limits=column.limits
    )
    converted = element.conversion(arrow.value_type)

    def convert(array: pa.Array) -> pa.Array:
        offsets = np.concatenate(
            [[0], np.cumsum(pc.fill_null(pc.list_value_length(array), 0))]
        ).astype(np.int32)
        try:
            values = converted(pc.list_flatten(array))
        except RefusedValue as refused:
            raise RefusedValue(
                int(np.searchsorted(offsets, refused.index, side="right")) - 1, str(refused)
            ) from None
        return pa.ListArray.from_arrays(pa.array(offsets), values, mask=array.is_null())

    return convert


# -------------------------------------------------------------------- columns that the sink creates
def target_type(arrow: pa.DataType) -> str:
    """Return the type of a column that the sink creates for an Arrow type. Raises Unfit."""
    if at.is_decimal(arrow):
        return f"numeric({arrow.precision},{arrow.scale})"
    if (
        is_list(arrow)
        and builtin[(element := target_type(arrow.value_type)).split("(")[0]].name in _IN_ARRAYS
    ):
        return f"{element}[]"
    return created_type(arrow, _CREATED, "jsonb", "PostgreSQL")


_CREATED = {
    "boolean": "boolean",
    "tinyint": "smallint",
    "smallint": "smallint",
    "int": "integer",
    "bigint": "bigint",
    "float": "real",
    "double": "double precision",
    "string": "text",
    "void": "text",
    "binary": "bytea",
    "date": "date",
    "timestamp": "timestamptz",
    "timestamp_ntz": "timestamp",
    "time": "time",
    "interval day to second": "interval",
}


# ---------------------------------------------------------------------- the table
@dataclass(frozen=True)
class Check:
    """A CHECK constraint and the columns that it reads."""

    name: str
    expression: str
    columns: tuple[str, ...]


@dataclass(frozen=True)
class SpecialUnique:
    """A unique index that is partial or over expressions, in SQL.

    `reads` are the columns that it depends on, including those of a condition.
    """

    columns: tuple[str, ...]
    expressions: tuple[str, ...]
    reads: tuple[str, ...]
    nulls_equal: bool


@dataclass(frozen=True, kw_only=True)
class PostgresTarget(tables.Target):
    """A table, or partitioned table, that rows go to."""

    columns: tuple[PostgresColumn, ...]
    checks: tuple[Check, ...]
    unwritable: tuple[str, ...] = ()
    """The reasons why rows cannot go there at all: row-level security, rules, partitions that are
    foreign tables."""
    long_indexes: tuple[tuple[str, ...], ...] = ()
    """The columns of each index that has a column without a fixed length. Such an index takes no
    value beyond a third of a page."""

    special_uniques: tuple[SpecialUnique, ...] = ()
    keyless: bool = False
    """True if the table has no replica identity, or not all that a publication's filter asks for. A
    publication may refuse updates and deletes then."""

    @property
    def identifier(self) -> sql.Identifier:
        return sql.Identifier(self.schema, self.name)

    @property
    def always_identity(self) -> set[str]:
        return {column.name for column in self.columns if column.always}
