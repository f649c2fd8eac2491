"""Which Arrow type goes into which MySQL type, and as what text.

Rows reach the server as text, and most of what does not fit comes back as a warning, which fails the transaction (see
`loading`). What the server would alter without a word is refused here: fractions of a second that are rounded, NULL
that becomes the current time or the next number, '1' that becomes the first member of an ENUM, and the like. With
`rounding` numbers and times are rounded here, since servers do it in different ways, and with warnings.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as at

from sinks.arrow import convert
from sinks.arrow.convert import Convert, Holds, Unfit, bits, created_type, same
from sinks.arrow.types import is_bytes, is_text
from sinks.sql import target as targets
from sinks.sql.mysql import NO_INFINITIES, as_mysql_json, beyond_doubles

_BITS = {"tinyint": 8, "smallint": 16, "mediumint": 24, "int": 32, "bigint": 64}
_BINARIES = {"binary", "varbinary", "tinyblob", "blob", "mediumblob", "longblob"}


@dataclass(frozen=True)
class MySQLColumn(targets.Column):
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
        return _FORMS.get(self.type, Form.TEXT)

    def conversion(self, arrow: pa.DataType, *, rounding: bool = False) -> Convert:
        """To the text of the column."""
        if at.is_null(arrow):
            return lambda array: pa.nulls(len(array), pa.string())
        if self.type not in _HOLDS:
            other = "use a text, json or blob column, or a view with a conversion"
            raise Unfit(f"type {self.type} is not supported; {other}")
        holds = self._holds(rounding)
        if holds.takes is convert.JSON and not self.collation and self.type == "json":
            holds.takes(arrow)
            return as_mysql_json(arrow, rounding=rounding)  # MariaDB's is a text, and has a collation
        checked = holds.conversion(arrow)
        written = _WRITTEN.get(self.type, same if self.form is Form.TEXT else _string)
        return lambda array: written(checked(array))

    def _holds(self, rounding: bool) -> Holds:
        holds = replace(_HOLDS[self.type], name=self.in_sql, rounding=rounding)
        if self.type == "bit":
            return replace(holds, bounds=bits(self.precision, signed=False))
        if self.type in _BITS:
            return replace(holds, bounds=bits(_BITS[self.type], signed=not self.unsigned))
        if self.type == "decimal":
            unsigned = (0, 10**76) if self.unsigned else None
            return replace(holds, precision=self.precision, scale=self.scale or 0, bounds=unsigned)
        if self.type == "binary":
            return replace(holds, size=self.length)
        if self.type in ("enum", "set"):
            return replace(holds, members=self.members)
        return replace(holds, scale=self.scale, unit=10 ** (6 - self.digits))


class Form(Enum):
    """How a column's text stands in a row."""

    NUMBER = "number"  # as it is
    WORD = "word"  # quoted in SQL, with nothing in it to escape
    TEXT = "text"  # anything: quoted in SQL, escaped
    HEX = "hex"  # hexadecimal digits of bytes
    BITS = "bits"  # a number that only SQL can turn into a BIT


_FORMS = {
    **dict.fromkeys((*_BITS, "float", "double", "year"), Form.NUMBER),
    # in SQL 1.5E-7 is a double, '1.5E-7' a decimal
    **dict.fromkeys(("decimal", "date", "datetime", "timestamp", "time"), Form.WORD),
    **dict.fromkeys(_BINARIES, Form.HEX),
    "bit": Form.BITS,
}


# ---------------------------------------------------------------------- what columns hold
def _is_integer(arrow: pa.DataType) -> bool:
    return bool(at.is_integer(arrow) or (at.is_decimal(arrow) and arrow.scale == 0))


_INTEGER = Holds(convert.only(_is_integer, "an integer type"))
_FLAG = Holds(convert.only(lambda arrow: at.is_boolean(arrow) or _is_integer(arrow), "an integer type"))
_YEARS = "is outside the years of YEAR, which are 1901 to 2155"  # 0 to 99 would be years of two digits
_HOLDS = {
    **dict.fromkeys(("tinyint", "bit"), _FLAG),
    **dict.fromkeys(("smallint", "mediumint", "int", "bigint"), _INTEGER),
    "year": Holds(convert.INTEGER, bounds=(1901, 2155), complaint=_YEARS),
    "decimal": Holds(convert.DECIMAL, complaint="is below 0"),
    "float": Holds(convert.FLOAT, to=pa.float32(), missing=NO_INFINITIES),
    "double": Holds(convert.FLOAT, to=pa.float64(), missing=NO_INFINITIES),
    "char": Holds(convert.TEXT, drops=True),
    **dict.fromkeys(("varchar", "tinytext", "text", "mediumtext", "enum"), Holds(convert.TEXT)),
    **dict.fromkeys(("uuid", "inet4", "inet6"), Holds(convert.TEXT)),  # MariaDB's, which checks their text
    "set": Holds(convert.TEXT, several=True),
    **dict.fromkeys(("json", "longtext"), Holds(convert.JSON)),
    **dict.fromkeys(_BINARIES, Holds(convert.BYTES)),
    "date": Holds(convert.DATE),
    "datetime": Holds(convert.wall_clock("timestamp")),
    "timestamp": Holds(convert.MOMENT),
    "time": Holds(convert.TIME_OR_SPAN),
}


# ---------------------------------------------------------------------- values as text
def _string(array: pa.Array) -> pa.Array:
    return (array.cast(pa.int8()) if at.is_boolean(array.type) else array).cast(pa.string())


def _float(array: pa.Array) -> pa.Array:
    """Servers read a float's own shortest text as a double first."""
    return array.cast(pa.float64()).cast(pa.string())


_HEX = np.array([f"{byte:02X}".encode() for byte in range(256)], "S2").view(np.uint16)


def _hex(array: pa.Array) -> pa.Array:
    array = array.cast(pa.large_binary())
    _, offsets, data = array.buffers()
    bounds = np.frombuffer(offsets, np.int64)[array.offset : array.offset + len(array) + 1]
    used = np.frombuffer(data, np.uint8)[bounds[0] : bounds[-1]] if data is not None else np.zeros(0, np.uint8)
    digits = pa.LargeStringArray.from_buffers(
        len(array), pa.py_buffer((bounds - bounds[0]) * 2), pa.py_buffer(_HEX[used])
    )
    return pc.if_else(array.is_valid(), digits, None) if array.null_count else digits


def _span(array: pa.Array) -> pa.Array:
    counts = array.view(pa.int64())
    whole = pc.abs(counts)
    seconds = pc.divide(whole, 1_000_000)
    hours, minutes = pc.divide(seconds, 3600), pc.divide(seconds, 60)
    parts = hours, pc.subtract(minutes, pc.multiply(hours, 60)), pc.subtract(seconds, pc.multiply(minutes, 60))
    clock = pc.binary_join_element_wise(*map(_string, parts), ":")
    fraction = pc.utf8_lpad(_string(pc.subtract(whole, pc.multiply(seconds, 1_000_000))), 6, "0")
    sign = pc.if_else(pc.less(counts, 0), "-", "")
    return pc.binary_join_element_wise(pc.binary_join_element_wise(sign, clock, ""), fraction, ".")


_WRITTEN = {**dict.fromkeys(_BINARIES, _hex), "float": _float, "time": _span}


# ---------------------------------------------------------------------- columns that the sink creates
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
