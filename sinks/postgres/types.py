"""Which Arrow type goes into which PostgreSQL type, and how.

COPY BINARY does not check types: the receive function of the column's type gets the bytes of the field as they are
(PostgreSQL manual, COPY, "Binary Format"). So text goes into every type whose binary form is its text (varchar, json,
enums, …), and every other column needs exactly its own form.
"""

from __future__ import annotations

import ipaddress
import math
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as at
from psycopg.postgres import types as builtin

from sinks.arrow.convert import (
    Convert,
    CreatedTypes,
    RefusedValue,
    Unfit,
    cast,
    checked,
    created_type,
    narrowed,
    no_internals,
    require_moments,
    require_wall_clock,
    same,
    short,
    within,
)
from sinks.arrow.json import to_json
from sinks.arrow.types import bytes_of, is_bytes, is_list, is_moment, is_text
from sinks.postgres.exact import exactness
from sinks.sql import encoder as values
from sinks.sql import target as targets

INTEGERS = {"int2": pa.int16(), "int4": pa.int32(), "int8": pa.int64()}
FLOATS = {"float4": pa.float32(), "float8": pa.float64()}
TEXTS = {"text", "varchar", "bpchar", "citext", "name", "json"}
# The types whose arrays pgpq encodes by itself, OID of the element included, and the Arrow type that it needs for that
_PLAIN = {
    "bool": pa.bool_(),
    **INTEGERS,
    **FLOATS,
    "numeric": pa.decimal128(20, 0),
    "text": pa.string(),
    "bytea": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us"),
    "time": pa.time64("us"),
}
# PostgreSQL's years (manual, "Date/Time Types"; src/include/datatype/timestamp.h), counted from 1970. Values below must
# not get to it: counted from 2000 they wrap around, or are what it takes for -infinity.
_MICROSECONDS = (-210_866_803_200_000_000, 2**63 - 1)
_DAYS = (-2_440_588, 2_145_042_905)
_NO_YEAR = "from 1970 is outside the years of PostgreSQL"
_EPOCH = 946_684_800_000_000
"""2000-01-01, PostgreSQL's zero, in microseconds from 1970."""
_DECLARED = {
    "smallint": "int2",
    "integer": "int4",
    "bigint": "int8",
    "real": "float4",
    "double precision": "float8",
    "boolean": "bool",
    "timestamp with time zone": "timestamptz",
    "timestamp without time zone": "timestamp",
    "character varying": "varchar",
}


@dataclass(frozen=True)
class Column(targets.Column):
    """One column of the target as the catalog tells.

    `type` is pg_type.typname (`int4`, `_int4` for its array, a domain's base type) or the type as declared; `kind` is
    pg_type.typtype of the type, or of an array's element (`e`: an enum, `d`: a domain); `element` the OID of an array's
    element type. `limits` is the type, or an array's element, with its modifiers and without domains (`numeric(5,2)`).
    """

    kind: str = "b"
    element: int = 0
    limits: str = ""
    domain: bool = False

    @property
    def typname(self) -> str:
        name = self.type.split("(")[0]
        array = name.endswith("[]")
        name = _DECLARED.get(name.removesuffix("[]"), name.removesuffix("[]"))
        return f"_{name}" if array else name

    @property
    def holding(self) -> tuple[str, ...]:
        return (self.declared, *([self.limits] * self.domain))

    @property
    def is_array(self) -> bool:
        """An enum may have a name that begins with an underscore; only an array has elements."""
        return self.typname.startswith("_") and (self.kind != "e" or self.element != 0)


def conversion(arrow: pa.DataType, column: Column, *, rounding: bool = False) -> Convert:
    """How values of an Arrow type get into a column. Those that the column would round or cut are refused, unless
    `rounding`. Raises Unfit."""
    if column.is_array:
        return _array(arrow, column, rounding)
    convert, judge = _plain(arrow, column, rounding), exactness(column.limits or column.declared or column.type)
    if rounding or judge is None:
        return convert
    return lambda array: judge(convert(array))


def _plain(arrow: pa.DataType, column: Column, rounding: bool) -> Convert:
    name = column.typname
    if at.is_null(arrow):
        return lambda array: pa.nulls(len(array), _PLAIN.get(name, pa.string()))
    if column.kind == "e" or name in TEXTS:
        return _text(arrow, json=name == "json")
    if name in _CAST:
        target, fits, wanted = _CAST[name]
        return cast(arrow, target, fits(arrow), f"cast it to {wanted} in Spark")
    if name in FLOATS:
        if at.is_float64(arrow) and name == "float4":
            return lambda array: narrowed(array, "real", exact=not rounding)
        may = at.is_floating(arrow) or (at.is_integer(arrow) and arrow.bit_width <= 32)
        return cast(arrow, FLOATS[name], may, "cast it to double in Spark")
    if name in _CONVERSIONS:
        return _CONVERSIONS[name](arrow)
    raise Unfit(f"PostgreSQL type {name} is not supported; use a text, jsonb or bytea column, or a view with a cast")


def _text(arrow: pa.DataType, *, json: bool) -> Convert:
    if is_text(arrow):
        return _without_nul
    if json and at.is_nested(arrow):
        no_internals(arrow)
        return to_json
    raise Unfit("cast it to string in Spark" + (" (or give a struct, map or array)" if json else ""))


def _without_nul(array: pa.Array) -> pa.Array:
    """PostgreSQL has no NUL in text. Looks at the bytes once; offsets only where there is one."""
    if not bytes_of(array).all():
        index = pc.index(pc.greater_equal(pc.find_substring(array, pattern="\0"), 0), True).as_py()
        if index >= 0:
            raise RefusedValue(index, f"{short(array[index])} holds a NUL, which PostgreSQL's text cannot")
    return array


def _jsonb(arrow: pa.DataType) -> Convert:
    text = _text(arrow, json=True)

    def convert(array: pa.Array) -> pa.Array:
        return pc.binary_join_element_wise("\x01", text(array).cast(pa.string()), "")

    return convert


def _date(arrow: pa.DataType) -> Convert:
    if not at.is_date32(arrow):
        raise Unfit("cast it to date in Spark")

    def convert(array: pa.Array) -> pa.Array:
        within(array.view(pa.int32()), _DAYS, f"days {_NO_YEAR}")
        return array

    return convert


def _numeric(arrow: pa.DataType) -> Convert:
    if at.is_decimal(arrow) and not at.is_decimal256(arrow):
        return same
    fits = at.is_integer(arrow)
    return cast(arrow, pa.decimal128(20, 0), fits, "cast it to decimal in Spark, with the precision that you want")


def _timestamptz(arrow: pa.DataType) -> Convert:
    require_moments(arrow)
    return _moments


def _timestamp(arrow: pa.DataType) -> Convert:
    require_wall_clock(arrow, "timestamptz")
    return _moments


def _moments(array: pa.Array) -> pa.Array:
    whole = checked(array, pa.timestamp("us", array.type.tz)).view(pa.int64())
    return within(whole, _MICROSECONDS, f"microseconds {_NO_YEAR}").view(pa.timestamp("us"))


_UUID = re.compile(r"(\{)?[0-9A-Fa-f]{4}(-?[0-9A-Fa-f]{4}){7}(?(1)\})")
_HEX = np.full(256, 255, np.uint8)
_HEX[np.frombuffer(b"0123456789abcdef", np.uint8)] = np.arange(16)
_HEX[np.frombuffer(b"ABCDEF", np.uint8)] = np.arange(10, 16)
_DIGITS = np.array([i for i in range(36) if i not in (8, 13, 18, 23)])


def _uuid(arrow: pa.DataType) -> Convert:
    if not is_text(arrow):
        raise Unfit("give it as string")

    def convert(array: pa.Array) -> pa.Array:
        filled = array.cast(pa.string()).fill_null("00000000-0000-0000-0000-000000000000")
        lengths = pc.binary_length(filled)
        if len(filled) and pc.all(pc.equal(lengths, 36)).as_py():
            _, _, data = filled.buffers()
            start = filled.offset and int(np.frombuffer(filled.buffers()[1], np.int32)[filled.offset])
            text = np.frombuffer(data, np.uint8, 36 * len(filled), start).reshape(-1, 36)
            digits = _HEX[text[:, _DIGITS]]
            if digits.max() < 16 and (text[:, [8, 13, 18, 23]] == ord("-")).all():
                packed = np.ascontiguousarray(digits[:, 0::2] << 4 | digits[:, 1::2])
                plain = pa.Array.from_buffers(pa.binary(16), len(filled), [None, pa.py_buffer(packed)])
                return pc.if_else(array.is_valid(), plain.cast(pa.binary()), None)
        return _each(array, pack, "is no uuid")

    def pack(text: str) -> bytes:
        if not _UUID.fullmatch(text):  # the forms of uuid_in(); Python's takes more, such as underscores
            raise ValueError
        return bytes.fromhex(text.strip("{}").replace("-", ""))

    return convert


def _inet(arrow: pa.DataType) -> Convert:
    """Family, bits, is_cidr, length, address (src/backend/utils/adt/network.c, network_send)."""
    if not is_text(arrow):
        raise Unfit("give it as string")

    def pack(text: str) -> bytes:
        if "%" in text:  # a zone, which PostgreSQL has no place for
            raise ValueError
        address = ipaddress.ip_interface(text)
        packed, bits = address.ip.packed, address.network.prefixlen
        return struct.pack("BBBB", 2 if address.version == 4 else 3, bits, False, len(packed)) + packed

    return lambda array: _each(array, pack, "is no address")


def _each(array: pa.Array, pack: Callable[[str], bytes], complaint: str) -> pa.Array:
    packed: list[bytes | None] = []
    for index, text in enumerate(array.to_pylist()):
        try:
            packed.append(None if text is None else pack(text))
        except ValueError:
            raise RefusedValue(index, f"{short(text)} {complaint}") from None
    return pa.array(packed, pa.binary())


_CAST: dict[str, tuple[pa.DataType, Callable[[pa.DataType], bool], str]] = {
    **{name: (kind, at.is_integer, "an integer type") for name, kind in INTEGERS.items()},
    "bool": (pa.bool_(), at.is_boolean, "boolean"),
    "time": (pa.time64("us"), at.is_time, "time"),
    "interval": (pa.duration("us"), at.is_duration, "a day-time interval"),
}
_CONVERSIONS: dict[str, Callable[[pa.DataType], Convert]] = {
    "numeric": _numeric,
    "bytea": lambda arrow: cast(arrow, arrow, is_bytes(arrow), "cast it to binary in Spark"),
    "date": _date,
    "timestamp": _timestamp,
    "timestamptz": _timestamptz,
    "jsonb": _jsonb,
    "uuid": _uuid,
    "inet": _inet,
}


def _array(arrow: pa.DataType, column: Column, rounding: bool) -> Convert:
    if at.is_null(arrow):
        return lambda array: pa.nulls(len(array), pa.binary())
    if not is_list(arrow):
        raise Unfit("it takes an array")
    if column.kind == "d":
        raise Unfit("arrays of domains are not supported; use an array of the type that the domain is of, or jsonb")
    if at.is_nested(arrow.value_type):
        raise Unfit("arrays of arrays, structs or maps go into a jsonb column")
    name = column.typname[1:]
    kind = Column(column.name, name, column.declared.removesuffix("[]"), kind=column.kind, limits=column.limits)
    element = conversion(arrow.value_type, kind, rounding=rounding)
    # pgpq writes the OID of the built-in type, which is not that of an enum of the same name
    plain = name in _PLAIN and column.element in (0, builtin[name].oid)

    def convert(array: pa.Array) -> pa.Array:
        lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy()
        offsets = np.zeros(len(array) + 1, np.int32)
        np.cumsum(lengths, out=offsets[1:])
        try:
            values = element(pc.list_flatten(array))
        except RefusedValue as refused:
            raise RefusedValue(int(np.searchsorted(offsets, refused.index, side="right")) - 1, str(refused)) from None
        if plain:
            return pa.ListArray.from_arrays(pa.array(offsets), values, mask=array.is_null())
        return _packed(array, values, offsets, column.element)

    return convert


def _packed(array: pa.Array, values: pa.Array, offsets: np.ndarray, oid: int) -> pa.Array:
    """Arrays whose element type only the catalog knows: dimensions, has-nulls, element OID, length, lower bound, then
    the elements (src/backend/utils/adt/arrayfuncs.c, array_send)."""
    binary = _binary(values)
    sizes = _fixed(pc.binary_length(binary).fill_null(0).to_numpy().astype(">i4"))
    fields = pc.if_else(
        binary.is_valid(), pc.binary_join_element_wise(sizes, binary.fill_null(b""), b""), pa.scalar(b"\xff" * 4)
    )
    counts = np.diff(offsets)
    nulls = np.concatenate([[0], np.cumsum(binary.is_null().to_numpy(zero_copy_only=False))])
    head = np.empty((len(array), 5), ">u4")
    head[:] = np.stack(np.broadcast_arrays(1, np.diff(nulls[offsets]) > 0, oid, counts, 1), axis=1)
    heads = pc.if_else(pa.array(counts > 0), _fixed(head), pa.scalar(struct.pack(">iiI", 0, 0, oid)))
    bodies = pc.binary_join(pa.ListArray.from_arrays(pa.array(offsets), fields), b"")
    return pc.if_else(array.is_valid(), pc.binary_join_element_wise(heads, bodies, b""), pa.scalar(None, pa.binary()))


def _binary(values: pa.Array) -> pa.Array:
    """The binary form of elements, length not included."""
    if is_text(values.type) or at.is_binary(values.type):
        return values.cast(pa.binary())
    whole = values.view(pa.int64()).fill_null(0).to_numpy()
    if at.is_timestamp(values.type):
        form = (whole - _EPOCH).astype(">i8")
    else:  # microseconds, days, months
        form = np.stack([whole, np.zeros_like(whole)], axis=1).astype(">i8")
    return pc.if_else(values.is_valid(), _fixed(form), pa.scalar(None, pa.binary()))


def _fixed(rows: np.ndarray) -> pa.Array:
    """A binary value for each row of an array."""
    width = rows.itemsize * math.prod(rows.shape[1:])
    return pa.Array.from_buffers(pa.binary(width), len(rows), [None, pa.py_buffer(rows)]).cast(pa.binary())


def mismatches(schema: pa.Schema, columns: Sequence[Column]) -> list[str]:
    """Every reason why rows of `schema` do not fit a table of `columns`; [] if they do."""
    return values.mismatches(schema, columns, conversion)


def target_type(arrow: pa.DataType) -> str:
    """The PostgreSQL type of a column that the sink creates for an Arrow type. Raises Unfit for one that has none."""
    if at.is_decimal(arrow):
        return f"numeric({arrow.precision},{arrow.scale})"
    if is_list(arrow) and not at.is_nested(arrow.value_type):
        return target_type(arrow.value_type) + "[]"
    return created_type(arrow, _CREATED, "jsonb", "PostgreSQL")


_CREATED: CreatedTypes = [
    (at.is_boolean, "boolean"),
    (lambda t: at.is_int8(t) or at.is_int16(t), "smallint"),
    (at.is_int32, "integer"),
    (at.is_int64, "bigint"),
    (at.is_float32, "real"),
    (at.is_float64, "double precision"),
    (lambda t: is_text(t) or at.is_null(t), "text"),
    (is_bytes, "bytea"),
    (at.is_date32, "date"),
    (is_moment, "timestamptz"),
    (at.is_timestamp, "timestamp"),
    (at.is_time, "time"),
    (at.is_duration, "interval"),
]
