"""From Arrow columns to arrays of `rd_kafka_message_t`, without a Python object per record."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sinks.kafka.librdkafka import ANY_PARTITION, MESSAGE

Addresses = npt.NDArray[np.uint64]

_EMPTY = np.zeros(1, np.uint8)  # what an empty key or value points to: address 0 would be a null


def milliseconds(moments: pa.Array) -> pa.Array:
    """From 1970, rounded, which is what Kafka keeps of points in time, in whatever zone."""
    counts = moments.cast(pa.timestamp("us", moments.type.tz)).view(pa.int64())
    whole = (counts.fill_null(0).to_numpy() + 500) // 1000
    return pa.array(whole, mask=counts.is_null().to_numpy(zero_copy_only=False))


def messages(batch: pa.RecordBatch) -> npt.NDArray[np.void]:
    """One message per row of the columns `key`, `value` (string or binary) and `partition` (int), each optional. They
    point into the batch's buffers: keep it as long as the messages."""
    made = np.zeros(batch.num_rows, MESSAGE)
    names = batch.schema.names
    for column, pointer, length in (("value", "payload", "len"), ("key", "key", "key_len")):
        if column in names:
            made[pointer], made[length] = _cells(batch.column(column))
    made["partition"] = ANY_PARTITION
    if "partition" in names:
        made["partition"] = pc.fill_null(batch.column("partition"), ANY_PARTITION).to_numpy(zero_copy_only=False)
    return made


def by_topic(batch: pa.RecordBatch, default: str | None) -> Iterator[tuple[str | None, pa.RecordBatch]]:
    """The rows of each topic of the column `topic`, in their order; `default` where it is null or absent."""
    if "topic" not in batch.schema.names:
        yield default, batch
        return
    topics = batch.column("topic")
    for topic in pc.unique(topics).to_pylist():
        rows = pc.is_null(topics) if topic is None else pc.equal(topics, topic)
        yield topic if topic is not None else default, batch.filter(rows)


def _cells(array: pa.Array) -> tuple[Addresses, Addresses]:
    """Address and length of each cell of a string or binary array; 0 and 0 for null."""
    wide = pa.types.is_large_string(array.type) or pa.types.is_large_binary(array.type)
    validity, offsets, data = array.buffers()
    ends = np.frombuffer(offsets, np.int64 if wide else np.int32, len(array) + 1 + array.offset)[array.offset :]
    lengths = np.diff(ends).astype(np.uint64)
    addresses = ends[:-1].astype(np.uint64) + np.uint64(data.address if data else 0)
    addresses[lengths == 0] = _EMPTY.ctypes.data
    if validity is not None and array.null_count:
        nulls = array.is_null().to_numpy(zero_copy_only=False)
        addresses[nulls] = lengths[nulls] = 0
    return addresses, lengths
