"""Which partition a record goes to: by its key, as Kafka's clients have it, for a column at once."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from kafka.partitioner.default import murmur2 as murmur2_of_one

Hashes = npt.NDArray[np.uint32]

_SEED, _FACTOR = np.uint32(0x9747B28C), np.uint32(0x5BD1E995)
_LONG = 4096
"""Bytes of a key that is hashed by itself: a column is hashed in as many steps as its longest key has words."""


def murmur2(keys: pa.Array) -> Hashes:
    """Java's, of a binary column without nulls."""
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
    found: Hashes = np.zeros(len(keys), np.uint32)
    found[order] = hashes
    for long in np.flatnonzero(lengths >= _LONG).tolist():
        found[long] = murmur2_of_one(keys[long].as_py()) & 0xFFFFFFFF
    found &= np.uint32(0x7FFFFFFF)
    return found


def _crc32(keys: pa.Array) -> Hashes:
    return np.array([zlib.crc32(key or b"") for key in keys.to_pylist()], np.uint32)


PARTITIONERS: dict[str, tuple[Callable[[pa.Array], Any] | None, Callable[[pa.Array], Any]]] = {
    "murmur2_random": (murmur2, pc.is_null),
    "murmur2": (murmur2, lambda keys: pa.array([False] * len(keys))),
    "consistent_random": (_crc32, lambda keys: pc.less(pc.fill_null(pc.binary_length(keys), 0), 1)),
    "consistent": (_crc32, lambda keys: pa.array([False] * len(keys))),
    "random": (None, lambda keys: pa.array([True] * len(keys))),
}
"""By librdkafka's names for them: a hash of keys, and which keys leave the choice to the producer."""

FREE = -1
"""No partition: the producer chooses."""


def partitions_of(rows: pa.RecordBatch, count: int, partitioner: str) -> npt.NDArray[np.int64]:
    """Of each row, by its column `partition`, or by its key; or `FREE`."""
    hash, is_free = PARTITIONERS[partitioner]
    found = np.full(rows.num_rows, FREE, np.int64)
    if "key" in rows.schema.names and hash and rows["key"].null_count < rows.num_rows:
        keys = rows["key"].cast(pa.binary())
        free = is_free(keys).to_numpy(zero_copy_only=False)
        found = np.where(free, FREE, hash(pc.fill_null(keys, b"")).astype(np.int64) % count)
    if "partition" in rows.schema.names:
        wanted = pc.fill_null(rows["partition"], FREE).to_numpy(zero_copy_only=False).astype(np.int64)
        found = np.where(wanted == FREE, found, wanted)
    return found
