"""The bytes of many rows at once, without a Python object for each row.

The bytes of a row are numbers and strings, one after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Numbers = npt.NDArray[np.int64]


class Bytes(NamedTuple):
    """A few bytes of each row, such as those of a number."""

    bytes: npt.NDArray[np.uint8]
    """The first byte of all rows, then the second byte of all rows, and so on."""
    lengths: Numbers


RowBytes = Bytes | int
"""Bytes that belong into each row. They are a few of its own, such as those of a number, or one
byte that all rows share."""


def varints(numbers: Numbers) -> Bytes:
    """Encode numbers as zigzag varints, which Kafka and Avro use."""
    unsigned = ((numbers << 1) ^ (numbers >> 63)).view(np.uint64)
    width = max(1, -(-int(unsigned.max(initial=0)).bit_length() // 7))
    lengths = np.ones(len(numbers), np.int64)
    for more in range(1, width):
        lengths += unsigned >= np.uint64(1 << 7 * more)
    bytes = np.empty((width, len(numbers)), np.uint8)
    for at in range(width):
        bytes[at] = (unsigned >> np.uint64(7 * at)) & np.uint64(0x7F)
        if at + 1 < width:
            bytes[at] |= np.where(lengths > at + 1, np.uint8(0x80), np.uint8(0))
    return Bytes(bytes, lengths)


def lengths_of(column: pa.Array) -> Numbers:
    """Return the length of each value in bytes; -1 stands for null.

    The column holds strings or binary values.
    """
    lengths: Numbers = (
        pc.fill_null(pc.binary_length(column), -1).to_numpy(zero_copy_only=False).astype(np.int64)
    )
    return lengths


def texts(count: int, *parts: RowBytes) -> pa.Array:
    """Join the numbers of each row into one binary value.

    `count` is the number of rows.
    """
    width = sum(1 if isinstance(part, int) else len(part.bytes) for part in parts)
    data = np.empty((count, width), np.uint8)
    used = np.ones((count, width), np.bool_)
    at = 0
    for part in parts:
        if isinstance(part, int):
            data[:, at], at = part, at + 1
            continue
        for nth, bytes in enumerate(part.bytes):
            data[:, at], used[:, at], at = bytes, part.lengths > nth, at + 1
    ends = np.zeros(count + 1, np.int32)
    np.cumsum(np.broadcast_to(sum(size(part) for part in parts), count), out=ends[1:])
    return binary(ends, pa.py_buffer(data[used]))


def size(part: RowBytes) -> Numbers | int:
    return 1 if isinstance(part, int) else part.lengths


def binary(ends: npt.NDArray[np.int32], data: Any) -> pa.Array:
    return pa.Array.from_buffers(pa.binary(), len(ends) - 1, [None, pa.py_buffer(ends), data])


def ends_of(column: pa.Array) -> npt.NDArray[np.int32]:
    return np.frombuffer(column.buffers()[1], np.int32, len(column) + 1 + column.offset)[
        column.offset :
    ]


def rows_of(count: int, parts: Sequence[RowBytes | pa.Array]) -> pa.Array:
    """Join the numbers and bytes of each row into one binary value; null adds nothing.

    `count` is the number of rows. One `take` from all columns is three times as fast as Arrow's own
    join.
    """
    columns = list[pa.Array]()
    for whole, group in groupby(parts, lambda part: isinstance(part, pa.Array)):
        some = list(group)
        columns += some if whole else [texts(count, *some)]
    if len(columns) == 1:
        return columns[0]
    order = np.arange(count, dtype=np.int32)[:, None] + count * np.arange(
        len(columns), dtype=np.int32
    )
    joined = pa.concat_arrays(columns).take(pa.array(order.ravel()))
    return binary(ends_of(joined)[:: len(columns)].copy(), joined.buffers()[2])
