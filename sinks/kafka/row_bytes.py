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

_SEVEN_BITS = np.uint64(0x7F)
_MORE_FOLLOW = np.uint8(0x80)
_LAST = np.uint8(0)


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
    zigzag = (numbers << 1) ^ (numbers >> 63)
    unsigned = zigzag.view(np.uint64)
    largest = int(unsigned.max(initial=0))
    width = max(1, _bytes_of_varint(largest))
    lengths = np.ones(len(numbers), np.int64)
    for more in range(1, width):
        least = np.uint64(1 << 7 * more)
        lengths += unsigned >= least
    bytes = np.empty((width, len(numbers)), np.uint8)
    for at in range(width):
        shift = np.uint64(7 * at)
        bytes[at] = (unsigned >> shift) & _SEVEN_BITS
        if at + 1 < width:
            continues = lengths > at + 1
            bytes[at] |= np.where(continues, _MORE_FOLLOW, _LAST)
    return Bytes(bytes, lengths)


def _bytes_of_varint(number: int) -> int:
    """Return how many bytes of seven bits a number fills; 0 fills none."""
    return -(-number.bit_length() // 7)


def lengths_of(column: pa.Array) -> Numbers:
    """Return the length of each value in bytes; -1 stands for null.

    The column holds strings or binary values.
    """
    lengths = pc.binary_length(column)
    lengths = pc.fill_null(lengths, -1)
    numbers: Numbers = lengths.to_numpy(zero_copy_only=False).astype(np.int64)
    return numbers


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
            data[:, at] = part
            at += 1
            continue
        for nth, bytes in enumerate(part.bytes):
            data[:, at] = bytes
            used[:, at] = part.lengths > nth
            at += 1
    lengths = sum(size(part) for part in parts)
    ends = np.zeros(count + 1, np.int32)
    np.cumsum(np.broadcast_to(lengths, count), out=ends[1:])
    return binary(ends, pa.py_buffer(data[used]))


def size(part: RowBytes) -> Numbers | int:
    """Return how many bytes the part has in each row."""
    return 1 if isinstance(part, int) else part.lengths


def binary(ends: npt.NDArray[np.int32], data: Any) -> pa.Array:
    """Return a binary column whose value n is `data[ends[n]:ends[n + 1]]`."""
    valid = None
    return pa.Array.from_buffers(
        pa.binary(),
        len(ends) - 1,
        [valid, pa.py_buffer(ends), data],
    )


def ends_of(column: pa.Array) -> npt.NDArray[np.int32]:
    """Return where the values of a column of strings or binary values begin, and the last ends."""
    _, offsets, _ = column.buffers()
    count = column.offset + len(column) + 1
    ends = np.frombuffer(offsets, np.int32, count)
    return ends[column.offset :]


def rows_of(count: int, parts: Sequence[RowBytes | pa.Array]) -> pa.Array:
    """Join the numbers and bytes of each row into one binary value; null adds nothing.

    `count` is the number of rows. One `take` from all columns is three times as fast as Arrow's own
    join.
    """
    columns = list[pa.Array]()
    for is_column, group in groupby(parts, lambda part: isinstance(part, pa.Array)):
        if is_column:
            columns += group
        else:
            columns.append(texts(count, *group))
    if len(columns) == 1:
        return columns[0]
    rows = np.arange(count, dtype=np.int32)
    starts = count * np.arange(len(columns), dtype=np.int32)
    order = rows[:, None] + starts
    stacked = pa.concat_arrays(columns)
    joined = stacked.take(pa.array(order.ravel()))
    ends = ends_of(joined)[:: len(columns)]
    return binary(ends.copy(), joined.buffers()[2])
