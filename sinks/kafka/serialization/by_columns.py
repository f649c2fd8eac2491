"""Records of Avro from columns of plain types, for all rows at once."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sinks.arrow.types import is_bytes, is_text
from sinks.kafka.row_bytes import Bytes, Numbers, RowBytes, lengths_of, varints
from sinks.kafka.serialization.avro import UUID, Schema, null_first

RowPieces: TypeAlias = "list[RowBytes | pa.Array]"
"""The bytes of all rows in pieces. Each piece has some bytes of every row, and the joined pieces
are the records."""
Mask = npt.NDArray[np.bool_]


class RowByRow(Exception):
    """Columns that cannot be written at once."""


def record(schema: Schema, rows: pa.StructArray, where: Mask) -> RowPieces:
    """Encode rows to the same bytes as fastavro does.

    Rows that `where` rules out get no bytes. Raises RowByRow for types that this module does not
    write, and if a row is to be refused.
    """
    names = [field.name for field in rows.type]
    columns = dict(zip(names, rows.flatten(), strict=True))
    parts: RowPieces = []
    for field in schema["fields"]:
        column = columns.get(field["name"])
        if column is not None:
            parts += _union(field["type"], column, where)
        elif null_first(field["type"]) and field.get("default") is None:
            parts.append(_only(where, 0))
        else:
            raise RowByRow
    return parts


def valid(column: pa.Array) -> Mask:
    mask: Mask = column.is_valid().to_numpy(zero_copy_only=False)
    return mask


def _only(where: Mask, part: RowBytes) -> RowBytes:
    """Return the bytes of the rows in `where`, and none for the other rows."""
    if where.all():
        return part
    if isinstance(part, int):
        same = np.full((1, len(where)), part, np.uint8)
        part = _of_one_byte(same)
    return Bytes(part.bytes, part.lengths * where)


def _of_one_byte(bytes: npt.NDArray[np.uint8]) -> Bytes:
    """Return pieces of one byte each; the array has one row, with a column for each piece."""
    _, count = bytes.shape
    return Bytes(bytes, np.ones(count, np.int64))


def _union(schema: Schema, column: pa.Array, where: Mask) -> RowPieces:
    if not isinstance(schema, list):
        if not valid(column)[where].all():
            raise RowByRow
        return _value(schema, column, where)
    null = schema.index("null") if len(schema) == 2 and "null" in schema else -1
    if null < 0:
        raise RowByRow
    there = where & valid(column)
    branch = np.where(there, 2 * (1 - null), 2 * null).astype(np.uint8)
    which = _of_one_byte(branch[None])
    values = _value(schema[1 - null], column, there)
    return [_only(where, which), *values]


def _value(schema: Schema, column: pa.Array, where: Mask) -> RowPieces:
    kind = schema["type"] if isinstance(schema, dict) else schema
    if kind == "record":
        return record(schema, column, where)
    if kind in ("int", "long"):
        numbers = varints(_integers(column))
        return [_only(where, numbers)]
    if kind == "boolean":
        bits = _integers(column).astype(np.uint8)
        return [_only(where, _of_one_byte(bits[None]))]
    if kind in ("float", "double"):
        floats = _floats(column, pa.float32() if kind == "float" else pa.float64())
        return [_only(where, floats)]
    if kind == "enum":
        symbols = pa.array(schema["symbols"], column.type)
        places = pc.index_in(column, symbols)
        if not valid(places)[where].all():
            raise RowByRow
        return [_only(where, varints(_integers(places)))]
    if kind == "fixed":
        data = _bytes(column)
        if (lengths_of(data)[where] != schema["size"]).any():
            raise RowByRow
        return [data]
    if kind in ("string", "bytes"):
        data = _bytes(column)
        if isinstance(schema, dict) and schema.get("logicalType") == "uuid":
            _require_uuids(column, where)
        lengths = np.maximum(lengths_of(data), 0)
        return [_only(where, varints(lengths)), data]
    raise RowByRow


def _require_uuids(column: pa.Array, where: Mask) -> None:
    matches = pc.match_substring_regex(column, f"^{UUID}$")
    is_uuid = matches.fill_null(False).to_numpy(zero_copy_only=False)
    if not is_uuid[where].all():
        raise RowByRow


def _integers(column: pa.Array) -> Numbers:
    """Return the values as integers; 0 stands for null."""
    integers = column.cast(pa.int64())
    numbers: Numbers = integers.fill_null(0).to_numpy()
    return numbers


def _floats(column: pa.Array, kind: pa.DataType) -> Bytes:
    """Return the bytes of floats, in little-endian order, as Avro has them; 0 stands for null."""
    floats = column.cast(kind)
    numbers = floats.fill_null(0).to_numpy()
    count = len(numbers)
    little_endian = numbers.dtype.newbyteorder("<")
    numbers = numbers.astype(little_endian, copy=False)
    data = numbers.view(np.uint8).reshape(count, -1)
    _, width = data.shape
    return Bytes(
        np.ascontiguousarray(data.T),
        np.full(count, width, np.int64),
    )


def _bytes(column: pa.Array) -> pa.Array:
    if not (is_text(column.type) or is_bytes(column.type)):
        raise RowByRow
    data = column.cast(pa.binary())
    if is_text(column.type):
        try:
            data.cast(pa.string())  # a text of Spark may be no UTF-8
        except pa.ArrowInvalid:
            raise RowByRow from None
    return data
