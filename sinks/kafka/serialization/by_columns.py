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
    columns = {field.name: column for field, column in zip(rows.type, rows.flatten(), strict=True)}
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
        part = Bytes(np.full((1, len(where)), part, np.uint8), np.ones(len(where), np.int64))
    return Bytes(part.bytes, part.lengths * where)


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
    which = Bytes(branch[None], np.ones(len(column), np.int64))
    return [_only(where, which), *_value(schema[1 - null], column, there)]


def _value(schema: Schema, column: pa.Array, where: Mask) -> RowPieces:
    kind = schema["type"] if isinstance(schema, dict) else schema
    if kind == "record":
        return record(schema, column, where)
    if kind in ("int", "long"):
        return [_only(where, varints(_integers(column)))]
    if kind == "boolean":
        return [
            _only(
                where,
                Bytes(_integers(column).astype(np.uint8)[None], np.ones(len(column), np.int64)),
            )
        ]
    if kind in ("float", "double"):
        return [_only(where, _floats(column, pa.float32() if kind == "float" else pa.float64()))]
    if kind == "enum":
        symbols = pc.index_in(column, pa.array(schema["symbols"], column.type))
        if not valid(symbols)[where].all():
            raise RowByRow
        return [_only(where, varints(_integers(symbols)))]
    if kind == "fixed":
        data = _bytes(column)
        if (lengths_of(data)[where] != schema["size"]).any():
            raise RowByRow
        return [data]
    if kind in ("string", "bytes"):
        data = _bytes(column)
        if isinstance(schema, dict) and schema.get("logicalType") == "uuid":
            are = (
                pc.match_substring_regex(column, f"^{UUID}$")
                .fill_null(False)
                .to_numpy(zero_copy_only=False)
            )
            if not are[where].all():
                raise RowByRow
        return [_only(where, varints(np.maximum(lengths_of(data), 0))), data]
    raise RowByRow


def _integers(column: pa.Array) -> Numbers:
    """Return the values as integers; 0 stands for null."""
    numbers: Numbers = column.cast(pa.int64()).fill_null(0).to_numpy()
    return numbers


def _floats(column: pa.Array, kind: pa.DataType) -> Bytes:
    """Return the bytes of floats, in little-endian order, as Avro has them; 0 stands for null."""
    numbers = column.cast(kind).fill_null(0).to_numpy()
    data = (
        numbers.astype(numbers.dtype.newbyteorder("<"), copy=False)
        .view(np.uint8)
        .reshape(len(numbers), -1)
    )
    return Bytes(np.ascontiguousarray(data.T), np.full(len(numbers), data.shape[1], np.int64))


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
