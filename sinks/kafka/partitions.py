"""Which partition a record goes to: by its key, as Kafka's clients have it, for a column at once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from kafka.partitioner.default import murmur2 as murmur2_of_key

Hashes = npt.NDArray[np.uint32]

_SEED, _FACTOR = np.uint32(0x9747B28C), np.uint32(0x5BD1E995)
_LONG = 4096
"""Bytes of a key that is hashed by itself: a column is hashed in as many steps as its longest key has words."""


def murmur2(keys: pa.Array) -> Hashes:
    """Of a binary column without nulls, as of the Java clients, and so of Spark's own sink."""
    ends = np.frombuffer(keys.buffers()[1], np.int32, len(keys) + 1 + keys.offset)[keys.offset :].astype(np.int64)
    lengths = np.diff(ends)
    order = np.argsort(-lengths, kind="stable")
    order = order[np.searchsorted(-lengths[order], -_LONG) :]
    start, length = ends[:-1][order], lengths[order]
    data = np.frombuffer(keys.buffers()[2] or b"", np.uint8)
    words = np.ndarray((max(0, len(data) - 3),), "<u4", data, strides=(1,))
    hashes = _SEED ^ length.astype(np.uint32)
    whole = length // 4
    for at in range(int(whole[0]) if len(whole) else 0):
        longer = int(np.searchsorted(-whole, -at))
        word = words[start[:longer] + 4 * at] * _FACTOR
        hashes[:longer] = hashes[:longer] * _FACTOR ^ (word ^ word >> np.uint32(24)) * _FACTOR
    rest, tail = length % 4, start + 4 * whole
    for nth in (2, 1, 0):
        some = rest > nth
        hashes[some] ^= data[tail[some] + nth].astype(np.uint32) << np.uint32(8 * nth)
    hashes[rest > 0] *= _FACTOR
    hashes ^= hashes >> np.uint32(13)
    hashes *= _FACTOR
    hashes ^= hashes >> np.uint32(15)
    of_keys: Hashes = np.zeros(len(keys), np.uint32)
    of_keys[order] = hashes
    for long in np.flatnonzero(lengths >= _LONG).tolist():
        of_keys[long] = murmur2_of_key(keys[long].as_py()) & 0xFFFFFFFF
    of_keys &= np.uint32(0x7FFFFFFF)
    return of_keys


FREE = -1
"""No partition: the producer chooses."""


def partitions_of(rows: pa.RecordBatch, count: int) -> npt.NDArray[np.int64]:
    """Of each row, by its column `partition`, or by its key; or `FREE`."""
    partitions = np.full(rows.num_rows, FREE, np.int64)
    if "key" in rows.schema.names and rows["key"].null_count < rows.num_rows:
        keys = rows["key"].cast(pa.binary())
        hashes = murmur2(pc.fill_null(keys, b"")).astype(np.int64)
        partitions = np.where(keys.is_null().to_numpy(zero_copy_only=False), FREE, hashes % count)
    if "partition" in rows.schema.names:
        wanted = pc.fill_null(rows["partition"], FREE).to_numpy(zero_copy_only=False).astype(np.int64)
        partitions = np.where(wanted == FREE, partitions, wanted)
    return partitions
