"""From Arrow columns to Kafka's record batches, without a Python object for each record.

The batches have message format 2. The module also says which partition a record goes to.

The records of a batch are, one after another, a few numbers, the key, a number, the value, and the
headers. Arrow joins these columns row by row, and the data of the joined column is what a batch
holds.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from crc32c import crc32c

from sinks.kafka.internals import murmur2 as murmur2_of_key
from sinks.kafka.row_bytes import (
    Numbers,
    RowBytes,
    binary,
    ends_of,
    lengths_of,
    rows_of,
    size,
    varints,
)

_TRANSACTIONAL = 0x10
_FORMAT = 2
_NONE = 1
"""The length of null, which is -1, as a varint."""
HEADER = 61
"""The bytes of a batch before its records."""


# ---------------------------------------------------------------------- columns
def milliseconds(moments: pa.Array) -> pa.Array:
    """Convert timestamps to milliseconds since 1970, rounded.

    That is what Kafka keeps of points in time. The time zone of the column makes no difference, and
    null stays null.
    """
    in_micros = moments.cast(pa.timestamp("us", moments.type.tz))
    micros = in_micros.view(pa.int64())
    millis = (micros.fill_null(0).to_numpy() + 500) // 1000
    is_null = micros.is_null().to_numpy(zero_copy_only=False)
    return pa.array(millis, mask=is_null)


def by_topic(
    batch: pa.RecordBatch, default: str | None
) -> Iterator[tuple[str | None, pa.RecordBatch]]:
    """Yield each topic of the column `topic` with its rows, in their order.

    Rows go to `default` where the column is null, or if there is no such column.
    """
    if "topic" not in batch.schema.names:
        yield default, batch
        return
    topics = batch["topic"]
    if default is not None:
        topics = pc.fill_null(topics, default)
    for topic in pc.unique(topics).to_pylist():
        of_topic = pc.is_null(topics) if topic is None else pc.equal(topics, topic)
        yield topic, batch.filter(of_topic)


def _flat(lists: pa.Array) -> tuple[pa.Array, Numbers]:
    """Return all elements of the lists, and `len(lists) + 1` places among them.

    The places are where the elements of each list begin, and where those of the last list end. A
    null list has no elements.
    """
    counts = pc.fill_null(pc.list_value_length(lists), 0)
    return lists.flatten(), _starts(counts.to_numpy(zero_copy_only=False))


def _starts(lengths: npt.NDArray[Any]) -> Numbers:
    """Return where pieces of these lengths begin, one after another, and where the last ends."""
    ends = np.cumsum(lengths, dtype=np.int64)
    return np.concatenate([[0], ends])


# ---------------------------------------------------------------------- records
def _headers(lists: pa.Array) -> tuple[RowBytes, pa.Array | None]:
    """Return how many headers each row has, and the encoded headers of each row.

    All headers are encoded at once, and the headers of a row are a slice of them. Without any
    header, the count is 0 and the column is None.
    """
    each, ends = _flat(lists)
    if not len(each):
        return 0, None
    key = each.field("key").cast(pa.binary())
    value = each.field("value").cast(pa.binary())
    key_length = varints(lengths_of(key))
    value_length = varints(lengths_of(value))
    joined = rows_of(
        len(each),
        [key_length, key, value_length, value],
    )
    ends_of_rows = ends_of(joined)[ends]
    counts = varints(np.diff(ends))
    return counts, binary(ends_of_rows, joined.buffers()[2])


def _records(rows: pa.RecordBatch, deltas: Numbers | None) -> list[Any]:
    """Return the records of a batch, in pieces that are bytes or buffers.

    `deltas` are the milliseconds from the batch's first timestamp to each row's timestamp. They are
    None if all rows have the batch's timestamp.
    """
    count = rows.num_rows
    names = rows.schema.names
    key = rows["key"].cast(pa.binary()) if "key" in names else None
    value = rows["value"].cast(pa.binary()) if "value" in names else None
    has: RowBytes = 0
    headers = None
    if "headers" in names:
        has, headers = _headers(rows["headers"])
    timestamp: RowBytes = 0 if deltas is None else varints(deltas)
    place = varints(np.arange(count, dtype=np.int64))
    lengths = [None if column is None else lengths_of(column) for column in (key, value)]
    key_length, value_length = (_NONE if some is None else varints(some) for some in lengths)
    if headers is not None:
        lengths.append(lengths_of(headers))
    length: Numbers = np.ones(count, np.int64)
    for part in (timestamp, place, key_length, value_length, has):
        length += size(part)
    for some in lengths:
        if some is not None:
            length += np.maximum(some, 0)
    every = (
        varints(length),
        0,
        timestamp,
        place,
        key_length,
        key,
        value_length,
        value,
        has,
        headers,
    )
    parts = [part for part in every if part is not None]
    # a row ends with a 0 then, which stands at the beginning of the next one here
    if headers is None:
        parts.insert(0, parts.pop())
    joined = rows_of(count, parts)
    end = int(ends_of(joined)[-1])
    data = joined.buffers()[2].slice(0, end)
    return [data] if headers is not None else [data.slice(1), b"\0"]


# ---------------------------------------------------------------------- batches
CODECS: Sequence[str] = ("none", "gzip", "snappy", "lz4", "zstd")
"""The codecs, in the order of their numbers in a record batch."""

_SNAPPY_BLOCK = 32 << 10
_XERIAL = b"\x82SNAPPY\0" + struct.pack(">ii", 1, 1)
_LZ4_BLOCK = 64 << 10
_LZ4_FRAME = bytes.fromhex("04224d18604082")
"""The header of a frame of version 1, with blocks of 64 KiB that do not depend on others, and the
checksum of the header. Arrow's own frames have blocks that depend on others, which Java cannot
read."""
_LZ4_RAW = 1 << 31


def _compressed(codec: str, pieces: list[Any]) -> list[Any]:
    if codec == "none":
        return pieces
    data = b"".join(pieces)
    if codec in _FRAMED:
        return list(_FRAMED[codec](data))
    return [pa.compress(data, codec)]


def _snappy(data: bytes) -> Iterator[bytes]:
    """Yield the compressed data in pieces, in the frame of the Java library snappy-java."""
    yield _XERIAL
    for start in range(0, len(data), _SNAPPY_BLOCK):
        plain = memoryview(data)[start : start + _SNAPPY_BLOCK]
        block = pa.compress(plain, "snappy", asbytes=True)
        yield struct.pack(">i", len(block))
        yield block


def _lz4(data: bytes) -> Iterator[bytes]:
    yield _LZ4_FRAME
    for start in range(0, len(data), _LZ4_BLOCK):
        block = memoryview(data)[start : start + _LZ4_BLOCK]
        compressed = pa.compress(block, "lz4_raw", asbytes=True)
        if len(compressed) < len(block):
            yield struct.pack("<I", len(compressed))
            yield compressed
        else:
            yield struct.pack("<I", len(block) | _LZ4_RAW)
            yield bytes(block)
    yield struct.pack("<I", 0)


_FRAMED = {"snappy": _snappy, "lz4": _lz4}


class Origin(NamedTuple):
    """The producer of a transaction, and the sequence number of a batch's first record."""

    producer_id: int
    epoch: int
    sequence: int


_PLAIN = Origin(-1, -1, -1)


def record_batch(
    rows: pa.RecordBatch, now: int, codec: str = "none", origin: Origin | None = None
) -> bytes:
    """Return one record batch of at least one row.

    * `rows` have any of the columns `value` and `key` (string or binary), `headers` and
      `timestamp`.
    * `now` is the timestamp of rows without one, in milliseconds since 1970.
    * `codec` is one of `CODECS`. If it makes the records longer, they stay uncompressed.
    * With an `origin`, the batch is part of a transaction.
    """
    first = last = now
    deltas = None
    if "timestamp" in rows.schema.names:
        timestamps = pc.fill_null(milliseconds(rows["timestamp"]), now)
        moments = timestamps.to_numpy(zero_copy_only=False)
        first = int(moments[0])
        last = int(moments.max())
        deltas = moments - first
    plain = _records(rows, deltas)
    pieces = _compressed(codec, plain)
    # of random bytes, which `bounds` has no room for
    if sum(map(len, pieces)) > sum(map(len, plain)):
        codec = "none"
        pieces = plain
    attributes = CODECS.index(codec) | (_TRANSACTIONAL if origin else 0)
    count = rows.num_rows
    rest = struct.pack(
        ">hiqqqhii",
        attributes,
        count - 1,
        first,
        last,
        *(origin or _PLAIN),
        count,
    )
    crc = crc32c(rest)
    length = 9 + len(rest) + sum(map(len, pieces))
    for piece in pieces:
        crc = crc32c(piece, crc)
    begin = struct.pack(">qiibI", 0, length, -1, _FORMAT, crc)
    return b"".join((begin, rest, *pieces))


def latest_time(batch: bytes) -> int:
    """Return the latest timestamp in a `record_batch`, in milliseconds since 1970."""
    (latest,) = struct.unpack_from(">q", batch, 35)
    return int(latest)


# ---------------------------------------------------------------------- partitions
_SEED = np.uint32(0x9747B28C)
_FACTOR = np.uint32(0x5BD1E995)
_LONG = 4096
"""From this many bytes on, a key is hashed by itself. A column is hashed in as many steps as its
longest key has words."""


def murmur2(keys: pa.Array) -> npt.NDArray[np.uint32]:
    """Hash each key of a binary column without nulls, as the Java clients do.

    Spark's own Kafka sink uses the Java clients, so equal keys go to the same partition with both.
    The hashes are not negative as 32-bit integers.
    """
    ends = ends_of(keys).astype(np.int64)
    lengths = np.diff(ends)
    longest_first = np.argsort(-lengths, kind="stable")
    first_short = np.searchsorted(-lengths[longest_first], -_LONG)
    order = longest_first[first_short:]
    start = ends[:-1][order]
    length = lengths[order]
    data = np.frombuffer(keys.buffers()[2] or b"", np.uint8)
    # a word of four bytes begins at each byte but the last three
    words = np.ndarray(
        (max(0, len(data) - 3),),
        "<u4",
        data,
        strides=(1,),
    )
    hashes = _SEED ^ length.astype(np.uint32)
    whole_words = length // 4
    most_words = int(whole_words[0]) if len(whole_words) else 0
    for at in range(most_words):
        longer = int(np.searchsorted(-whole_words, -at))
        word = words[start[:longer] + 4 * at] * _FACTOR
        mixed = (word ^ word >> np.uint32(24)) * _FACTOR
        hashes[:longer] = hashes[:longer] * _FACTOR ^ mixed
    rest = length % 4
    tail = start + 4 * whole_words
    for nth in (2, 1, 0):
        some = rest > nth
        byte = data[tail[some] + nth].astype(np.uint32)
        hashes[some] ^= byte << np.uint32(8 * nth)
    hashes[rest > 0] *= _FACTOR
    hashes ^= hashes >> np.uint32(13)
    hashes *= _FACTOR
    hashes ^= hashes >> np.uint32(15)
    of_keys = np.zeros(len(keys), np.uint32)
    of_keys[order] = hashes
    for long in np.flatnonzero(lengths >= _LONG).tolist():
        key = keys[long].as_py()
        of_keys[long] = murmur2_of_key(key) & 0xFFFFFFFF
    of_keys &= np.uint32(0x7FFFFFFF)
    return of_keys


FREE = -1
"""In place of a partition: the producer chooses one."""


def partitions_of(rows: pa.RecordBatch, count: int) -> npt.NDArray[np.int64]:
    """Return the number of each row's partition, of the topic's `count` partitions.

    The column `partition` comes first, then the key's hash. A row with neither gets `FREE`.
    """
    partitions = np.full(rows.num_rows, FREE, np.int64)
    if "key" in rows.schema.names and rows["key"].null_count < rows.num_rows:
        keys = rows["key"].cast(pa.binary())
        has_no_key = keys.is_null().to_numpy(zero_copy_only=False)
        hashes = murmur2(pc.fill_null(keys, b"")).astype(np.int64)
        partitions = np.where(has_no_key, FREE, hashes % count)
    if "partition" in rows.schema.names:
        numbers = pc.fill_null(rows["partition"], FREE)
        wanted = numbers.to_numpy(zero_copy_only=False).astype(np.int64)
        partitions = np.where(wanted == FREE, partitions, wanted)
    return partitions


# --------------------------------------------------------------------- rows on their way to batches
@dataclass(frozen=True)
class RecordBatchPlan:
    """The rows of one topic, with what each row takes in a record batch and its partition."""

    rows: pa.RecordBatch
    sizes: Numbers
    """The bytes of key, value and headers of each row."""
    bounds: Numbers
    """The bytes that each row takes in a batch, at most."""

    @classmethod
    def of(cls, rows: pa.RecordBatch) -> RecordBatchPlan:
        names = rows.schema.names
        sizes = np.zeros(rows.num_rows, np.int64)
        for name in ("key", "value"):
            if name in names:
                sizes += np.maximum(lengths_of(rows[name]), 0)
        fixed = 16 + (9 if "timestamp" in names else 0) + (4 if "key" in names else 0)
        around: Numbers = np.array(fixed, np.int64)
        if "headers" in names:
            each, ends = _flat(rows["headers"])
            lengths = np.zeros(len(each), np.int64)
            for name in ("key", "value"):
                lengths += np.maximum(lengths_of(each.field(name)), 0)
            sizes += np.diff(_starts(lengths)[ends])
            around = around + 5 + 10 * np.diff(ends)
        return cls(rows, sizes, sizes + around)

    def shares(self, count: int) -> Iterator[tuple[int, pa.RecordBatch, Numbers]]:
        """Yield each partition that rows go to, or `FREE`, with these rows and their bounds.

        The topic has `count` partitions. The rows come without the columns that only say where they
        go.
        """
        where = partitions_of(self.rows, count)
        kept = [name for name in self.rows.schema.names if name not in ("topic", "partition")]
        rows = self.rows.select(kept)
        if (where == where[0]).all():
            yield int(where[0]), rows, self.bounds
            return
        order = np.argsort(where, kind="stable")
        where = where[order]
        bounds = self.bounds[order]
        changes = np.flatnonzero(np.diff(where)) + 1
        ends = [*changes.tolist(), len(where)]
        for start, end in zip([0, *ends], ends, strict=False):
            # a slice would keep the whole batch in memory
            some = rows.take(pa.array(order[start:end]))
            yield int(where[start]), some, bounds[start:end]
