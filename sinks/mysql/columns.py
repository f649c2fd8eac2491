"""The columns of a MySQL or MariaDB table, and the values that go into them.

It says which Arrow type goes into which of their types, and as what text. Rows reach the server as
text, and most of what does not fit comes back as a warning, which fails the transaction (see
`load`). What the server would alter without a word is refused here: fractions of a second that are
rounded, NULL that becomes the current time or the next number, '1' that becomes the first member of
an ENUM, and the like.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from enum import Enum
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as at

from sinks.arrow import convert
from sinks.arrow.convert import (
    Convert,
    Holds,
    RefusedValue,
    Unfit,
    as_json,
    bits,
    created_type,
    in_utf8,
    same,
    short,
)
from sinks.arrow.types import is_bytes, is_text, spark_name
from sinks.mysql.connection import quoted
from sinks.sql import table as tables

_BITS = {"tinyint": 8, "smallint": 16, "mediumint": 24, "int": 32, "bigint": 64}
_NO_INFINITIES = (
    lambda array: pc.invert(pc.is_finite(array)),
    "is no number, and MySQL has no NaN and no infinities",
)
_BINARIES = {"binary", "varbinary", "tinyblob", "blob", "mediumblob", "longblob"}


@dataclass(frozen=True)
class MySQLColumn(tables.Column):
    """A column of the target as information_schema describes it.

    `type` is DATA_TYPE, and `declared` is COLUMN_TYPE. `precision` and `scale` are those of numbers
    (for BIT, its bits), `digits` those of fractions of a second, and `length` is in bytes.
    `collation` is "" for a column that is no text. `members` are those of an ENUM. `on_update` is
    the time that the server puts into the column when an UPDATE changes the row, as ON UPDATE has
    it; "" for none.
    """

    precision: int = 0
    scale: int | None = None
    digits: int = 0
    length: int = 0
    collation: str = ""
    members: tuple[str, ...] = ()
    on_update: str = ""

    @property
    def staged_as(self) -> str:
        return f"{self.declared} {self.collation}".rstrip()

    @property
    def unsigned(self) -> bool:
        return "unsigned" in self.declared

    @property
    def form(self) -> Form:
        return _FORMS.get(self.type, Form.TEXT)

    def conversion(self, arrow: pa.DataType) -> Convert:
        """Return how values of an Arrow type become the text of the column.

        A text must be UTF-8: LOAD DATA would take the end of a line for a part of invalid UTF-8.
        """
        converted = self._conversion(arrow)
        return (lambda array: in_utf8(converted(array))) if self.form is Form.TEXT else converted

    def _conversion(self, arrow: pa.DataType) -> Convert:
        if at.is_null(arrow):
            return lambda array: pa.nulls(len(array), pa.string())
        if self.type not in _HOLDS:
            other = "alter it to a text, json or blob column, or drop the column in Spark"
            raise Unfit(f"type {self.type} is not supported; {other}")
        if any("?" in member for member in self.members):
            shown = (
                "the catalog shows characters beyond U+FFFF as question marks, so its members are "
                "not known"
            )
            raise Unfit(f"{shown}: use a varchar column")
        holds = self._holds()
        if holds.takes is convert.JSON and not self.collation and self.type == "json":
            holds.takes(arrow)
            return as_mysql_json(arrow)  # MariaDB's is a text, and has a collation
        checked = holds.conversion(arrow)
        written = _WRITTEN.get(self.type, same if self.form is Form.TEXT else _string)
        return lambda array: written(checked(array))

    def _holds(self) -> Holds:
        holds = replace(_HOLDS[self.type], name=self.in_sql)
        if self.type == "bit":
            return replace(holds, bounds=bits(self.precision, signed=False))
        if self.type in _BITS:
            return replace(holds, bounds=bits(_BITS[self.type], signed=not self.unsigned))
        if self.type == "decimal":
            unsigned = (0, 10**76) if self.unsigned else None
            return replace(holds, precision=self.precision, scale=self.scale or 0, bounds=unsigned)
        if self.type == "binary":
            return replace(holds, size=self.length)
        if self.type == "enum":
            return replace(holds, members=self.members)
        return replace(holds, scale=self.scale, unit=10 ** (6 - self.digits))


class Form(Enum):
    """The ways in which a column's text stands in a row."""

    # with nothing in it to escape; in SQL 1.5E-7 is a double, '1.5E-7' what the column takes
    WORD = "word"
    TEXT = "text"  # anything: escaped
    HEX = "hex"  # hexadecimal digits of bytes
    BITS = "bits"  # a number that only SQL can turn into a BIT


_FORMS = {
    **dict.fromkeys((*_BITS, "float", "double", "year", "decimal"), Form.WORD),
    **dict.fromkeys(("date", "datetime", "timestamp", "moment", "time"), Form.WORD),
    **dict.fromkeys(_BINARIES, Form.HEX),
    "bit": Form.BITS,
}


# ---------------------------------------------------------------------- what columns hold
def _is_integer(arrow: pa.DataType) -> bool:
    return bool(at.is_integer(arrow) or (at.is_decimal(arrow) and arrow.scale == 0))


_INTEGER = Holds(convert.only(_is_integer, "an integer type"))
_FLAG = Holds(
    convert.only(lambda arrow: at.is_boolean(arrow) or _is_integer(arrow), "an integer type")
)
# 0 to 99 would be years of two digits
_YEARS = "is outside the years of YEAR, which are 1901 to 2155"
_HOLDS = {
    **dict.fromkeys(("tinyint", "bit"), _FLAG),
    **dict.fromkeys(("smallint", "mediumint", "int", "bigint"), _INTEGER),
    "year": Holds(convert.INTEGER, bounds=(1901, 2155), complaint=_YEARS),
    "decimal": Holds(convert.DECIMAL, complaint="is below 0"),
    "float": Holds(convert.FLOAT, to=pa.float32(), missing=_NO_INFINITIES),
    "double": Holds(convert.FLOAT, to=pa.float64(), missing=_NO_INFINITIES),
    "char": Holds(convert.TEXT, drops=True),
    **dict.fromkeys(("varchar", "tinytext", "text", "mediumtext", "enum"), Holds(convert.TEXT)),
    # MariaDB's, which checks their text
    **dict.fromkeys(("uuid", "inet4", "inet6"), Holds(convert.TEXT)),
    **dict.fromkeys(("json", "longtext"), Holds(convert.JSON)),
    **dict.fromkeys(_BINARIES, Holds(convert.BYTES)),
    "date": Holds(convert.DATE),
    "datetime": Holds(convert.wall_clock("timestamp")),
    # "moment": in UTC, as a datetime
    **dict.fromkeys(("timestamp", "moment"), Holds(convert.MOMENT)),
    "time": Holds(convert.TIME_OR_SPAN),
}


# ---------------------------------------------------------------------- values as text
def _string(array: pa.Array) -> pa.Array:
    return (array.cast(pa.int8()) if at.is_boolean(array.type) else array).cast(pa.string())


_HEX = np.array([f"{byte:02X}".encode() for byte in range(256)], "S2").view(np.uint16)


def _hex(array: pa.Array) -> pa.Array:
    array = array.cast(pa.large_binary())
    _, offsets, data = array.buffers()
    bounds = np.frombuffer(offsets, np.int64)[array.offset : array.offset + len(array) + 1]
    used = (
        np.frombuffer(data, np.uint8)[bounds[0] : bounds[-1]]
        if data is not None
        else np.zeros(0, np.uint8)
    )
    digits = pa.LargeStringArray.from_buffers(
        len(array), pa.py_buffer((bounds - bounds[0]) * 2), pa.py_buffer(_HEX[used])
    )
    return pc.if_else(array.is_valid(), digits, None) if array.null_count else digits


def _span(array: pa.Array) -> pa.Array:
    counts = array.view(pa.int64())
    whole = pc.abs(counts)
    seconds = pc.divide(whole, 1_000_000)
    hours = pc.divide(seconds, 3600)
    minutes = pc.divide(seconds, 60)
    parts = (
        hours,
        pc.subtract(minutes, pc.multiply(hours, 60)),
        pc.subtract(seconds, pc.multiply(minutes, 60)),
    )
    clock = pc.binary_join_element_wise(*map(_string, parts), ":")
    fraction = pc.utf8_lpad(_string(pc.subtract(whole, pc.multiply(seconds, 1_000_000))), 6, "0")
    sign = pc.if_else(pc.less(counts, 0), "-", "")
    return pc.binary_join_element_wise(pc.binary_join_element_wise(sign, clock, ""), fraction, ".")


_WRITTEN: dict[str, Convert] = {
    **dict.fromkeys(_BINARIES, _hex),
    # servers read its own text as a double first
    "float": lambda array: array.cast(pa.float64()).cast(pa.string()),
    "time": _span,
}


# ---------------------------------------------------------------------- JSON
# It has 64-bit integers and doubles, and the last of equal names. MariaDB's is a text.
_SUSPICIOUS = r'"\s*:(?s:.*)"\s*:|[0-9.]{16}|[0-9][eE][+-]?[0-9]{3}'
"""Two names, or a number that may have more digits than a double, or be beyond its range."""


def beyond_doubles(arrow: pa.DataType) -> pa.DataType | None:
    """Return the type itself, or the first type in it, whose values may exceed a double's digits.

    Return None if there is no such type.
    """
    if at.is_decimal(arrow) and arrow.precision > convert.DOUBLE_DIGITS:
        return arrow
    inner = (beyond_doubles(arrow.field(i).type) for i in range(arrow.num_fields))
    return next(filter(None, inner), None)


def as_mysql_json(arrow: pa.DataType) -> Convert:
    """Return the conversion of an Arrow type into JSON. Raises Unfit.

    Strings go in as the JSON that they are, and all others as `to_json` writes them. The conversion
    refuses a value of which MySQL would drop a name or a digit.
    """
    as_text = as_json(arrow)
    if wide := beyond_doubles(arrow):
        raise Unfit(
            f"it holds a {spark_name(wide)}, and MySQL's JSON keeps such numbers as doubles, with "
            f"{convert.DOUBLE_DIGITS} digits: make the column longtext, or cast to string in Spark"
        )
    judged = is_text(arrow) or _holds_map(arrow)
    return (lambda array: _unaltered(as_text(array))) if judged else as_text


def _holds_map(arrow: pa.DataType) -> bool:
    """Tell whether there are maps in a type: their keys are names, and may come twice."""
    return at.is_map(arrow) or any(_holds_map(arrow.field(i).type) for i in range(arrow.num_fields))


def _unaltered(array: pa.Array) -> pa.Array:
    decoder = json.JSONDecoder(
        object_pairs_hook=_distinct_names, parse_float=_check_number, parse_int=_check_number
    )
    suspicious = pc.fill_null(pc.match_substring_regex(array, _SUSPICIOUS), False)
    for index in np.flatnonzero(suspicious.to_numpy(zero_copy_only=False)):
        try:
            decoder.decode(array[index].as_py())
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise RefusedValue(int(index), f"{short(array[index])} is no JSON: {error}") from None
        except ValueError as error:
            altered = (
                f"{short(array[index])} would be altered by MySQL's JSON, use a longtext column"
            )
            raise RefusedValue(int(index), f"{altered}: {error}") from None
    return array


def _distinct_names(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON. Raises ValueError for a name that comes twice."""
    members = dict(pairs)
    if len(members) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} comes twice")
    return members


def _check_number(text: str) -> None:
    """Raise ValueError for a number that neither a 64-bit integer nor a double holds."""
    value = float(text)
    try:
        exact = Decimal(text)
    except InvalidOperation:  # its exponent is too large for a Decimal
        raise ValueError(f"{text[:60]} is out of range of a double") from None
    if math.isinf(value) or (exact and not value):
        raise ValueError(f"{text[:60]} is out of range of a double")
    is_integer = text.lstrip("-").isdigit() and -(2**63) <= exact < 2**64
    if not (is_integer or exact == Decimal(repr(value))):
        raise ValueError(f"{text[:60]} would be rounded to {value!r}")


# ---------------------------------------------------------------------- members of ENUM
_MARKS = {"\\0": "\0", "\\n": "\n", "\\r": "\r", "''": "'"}


def members_of(declared: str) -> tuple[str, ...]:
    """Return the members of an ENUM whose type the catalog writes like this.

    The catalog writes some characters as marks, and characters beyond U+FFFF as question marks.
    """
    written = re.findall(r"'((?:[^'\\]|''|\\.)*)'", declared)
    return tuple(
        re.sub(r"''|\\.", lambda mark: _MARKS.get(mark[0], mark[0][1]), member)
        for member in written
    )


# -------------------------------------------------------------------- columns that the sink creates
def target_type(arrow: pa.DataType, *, key: bool = False) -> str:
    """Return the MySQL type of a column that the sink creates for an Arrow type.

    `key` says that the column gets an index, which text and bytes of any length cannot have. Raises
    Unfit for a type that has no counterpart.
    """
    if is_text(arrow):
        return "varchar(255)" if key else "longtext"
    if is_bytes(arrow):
        return "varbinary(255)" if key else "longblob"
    if at.is_decimal(arrow) and arrow.scale <= 30:
        return f"decimal({arrow.precision},{arrow.scale})"
    return created_type(arrow, _CREATED, "longtext" if beyond_doubles(arrow) else "json", "MySQL")


_CREATED = {
    "boolean": "boolean",
    "tinyint": "tinyint",
    "smallint": "smallint",
    "int": "int",
    "bigint": "bigint",
    "float": "float",
    "double": "double",
    "void": "longtext",
    "date": "date",
    "timestamp": "timestamp(6)",
    "timestamp_ntz": "datetime(6)",
    "time": "time(6)",
    "interval day to second": "time(6)",
}


# ---------------------------------------------------------------------- the table
@dataclass(frozen=True, kw_only=True)
class MySQLTarget(tables.Target):
    """A table that rows go to.

    `definition` tells all of it but triggers, and which tables refer to it.
    """

    columns: tuple[MySQLColumn, ...]
    engine: str
    definition: str = ""

    @property
    def identifier(self) -> str:
        return quoted(self.schema, self.name)
