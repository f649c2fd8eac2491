"""What Avro makes of columns of plain types, all rows at once: `Format.at_once`."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as t

from sinks.arrow.types import is_bytes, is_text
from sinks.kafka.row_bytes import Bytes, Numbers, Part, lengths_of, varints

Parts: TypeAlias = "list[Part | pa.Array]"
Mask = npt.NDArray[np.bool_]


class RowByRow(Exception):
    """Such columns are not written at once."""


def valid(column: pa.Array) -> Mask:
    found: Mask = column.is_valid().to_numpy(zero_copy_only=False)
    return found


def only(where: Mask, part: Part) -> Part:
    """Of these rows alone."""
    if where.all():
        return part
    if isinstance(part, int):
        part = Bytes(np.full((1, len(where)), part, np.uint8), np.ones(len(where), np.int64))
    return Bytes(part.bytes, part.lengths * where)


def whole_numbers(column: pa.Array) -> Numbers:
    """Of booleans, integers, days and times in microseconds; 0 of null."""
    if t.is_timestamp(column.type) and column.type.unit != "us":
        raise RowByRow
    if t.is_date32(column.type):
        column = column.cast(pa.int32())
    elif not (t.is_boolean(column.type) or t.is_signed_integer(column.type) or t.is_timestamp(column.type)):
        raise RowByRow
    found: Numbers = column.cast(pa.int64()).fill_null(0).to_numpy()
    return found


def floats(column: pa.Array, kind: pa.DataType) -> Bytes:
    """As they are in memory."""
    if not t.is_floating(column.type):
        raise RowByRow
    numbers = column.cast(kind).fill_null(0).to_numpy()
    data = numbers.astype(numbers.dtype.newbyteorder("<"), copy=False).view(np.uint8).reshape(len(numbers), -1)
    return Bytes(np.ascontiguousarray(data.T), np.full(len(numbers), data.shape[1], np.int64))


def text(column: pa.Array) -> Parts:
    """How many bytes, and these."""
    if is_text(column.type):
        data = column.cast(pa.binary())
        try:
            data.cast(pa.string())  # a text of Spark may be no UTF-8
        except pa.ArrowInvalid:
            raise RowByRow from None
    elif is_bytes(column.type):
        data = column.cast(pa.binary())
    else:
        raise RowByRow
    lengths = np.maximum(lengths_of(data), 0)
    return [varints(lengths), data]
