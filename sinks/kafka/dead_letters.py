"""Dead letters of a KafkaSink: which rows no topic takes, told before they are produced; and letters as records."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from sinks.dead_letters import Refusal
from sinks.kafka.messages import LARGEST_PARTITION, by_topic

RECORDS = pa.schema(
    [
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("headers", pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))),
    ]
)
_HEADERS = {
    "__streams.errors.exception": "error_class",
    "__streams.errors.message": "error",
    "__streams.errors.topic": "sink",
    "__streams.errors.partition": "partition",
    "__streams.errors.offset": "row_number",
    "exactly_once.job": "job",
    "exactly_once.sink": "sink",
    "exactly_once.checkpoint": "checkpoint",
    "exactly_once.time": "time",
}
"""Texts all, the first five under the names of Kafka Streams (KIP-1034, `ExceptionHandlerUtils` of Kafka 4.2)."""


def records(letters: pa.RecordBatch) -> pa.RecordBatch:
    """Letters as columns of a KafkaSink: raw key and value, or, without a value, the whole row as JSON."""
    value = pc.if_else(letters["value"].is_valid(), letters["value"], letters["row"].cast(pa.binary()))
    texts = {column: letters[column].cast(pa.string()).to_pylist() for column in set(_HEADERS.values())}
    headers = [
        [{"key": name, "value": texts[column][at].encode()} for name, column in _HEADERS.items()]
        for at in range(letters.num_rows)
    ]
    return pa.RecordBatch.from_arrays([letters["key"], value, pa.array(headers, RECORDS[2].type)], schema=RECORDS)


def refused(
    batch: pa.RecordBatch, default_topic: str | None, largest: int, partitions: Callable[[str], int]
) -> list[Refusal]:
    """Rows without a topic, for a partition that is not there, with a timestamp that Kafka takes for none, or of more
    than `largest` bytes. `partitions` says how many a topic has."""
    reasons: dict[int, tuple[str, str]] = {}

    def say(bad: pa.Array, kind: str, why: Callable[[int], str]) -> None:
        for at in pc.indices_nonzero(pc.fill_null(bad, False)).to_pylist():
            reasons.setdefault(at, (kind, why(at)))

    names = batch.schema.names
    if default_topic is None:
        say(batch["topic"].is_null(), "NoTopic", lambda at: "the column topic is null, and the sink has no topic")
    if "partition" in names:
        wanted = batch["partition"]
        count = _partitions(batch, default_topic, partitions)
        say(
            pc.or_(pc.less(wanted, 0), pc.greater_equal(wanted, count)),
            "NoPartition",
            lambda at: f"it asks for partition {wanted[at]}, and the topic has {count[at]}",
        )
    if "timestamp" in names:
        moment = batch["timestamp"].cast(pa.timestamp("ms", "UTC"), safe=False).cast(pa.int64())
        none = pc.or_(pc.equal(moment, 0), pc.equal(moment, -1))
        say(none, "NoTimestamp", lambda at: "the timestamp stands for none in Kafka, which would put the present there")
    size = _size(batch)
    say(
        pc.greater(size, largest),
        "RecordTooLarge",
        lambda at: f"the record has {size[at]} bytes, and the producer or the topic takes {largest}",
    )
    return [Refusal(at, *reasons[at]) for at in sorted(reasons)]


def _partitions(batch: pa.RecordBatch, default_topic: str | None, partitions: Callable[[str], int]) -> pa.Array:
    """Of each row's topic; where it has none, as many as can be."""
    places = pa.array(range(batch.num_rows), pa.int64())
    counts = [LARGEST_PARTITION + 1] * batch.num_rows
    asked = batch.append_column("place of the row", places)
    for topic, rows in by_topic(asked, default_topic):
        if topic is not None and rows["partition"].null_count < rows.num_rows:
            count = partitions(topic)
            for place in rows["place of the row"].to_pylist():
                counts[place] = count
    return pa.array(counts, pa.int64())


def _size(batch: pa.RecordBatch) -> pa.Array:
    """Bytes of key, value and headers, which librdkafka compares with message.max.bytes."""
    sizes: Sequence[pa.Array] = [
        pc.fill_null(pc.binary_length(batch[name]), 0).cast(pa.int64())
        for name in ("key", "value")
        if name in batch.schema.names
    ]
    total = pa.array([0] * batch.num_rows, pa.int64())
    for size in sizes:
        total = pc.add(total, size)
    if "headers" in batch.schema.names:
        lists = batch["headers"]
        each = pc.list_flatten(lists)
        bytes_of = pc.add(
            pc.fill_null(pc.binary_length(each.field("key")), 0), pc.fill_null(pc.binary_length(each.field("value")), 0)
        ).cast(pa.int64())
        table = pa.table({"row": pc.list_parent_indices(lists).cast(pa.int64()), "size": bytes_of})
        counted = [0] * batch.num_rows
        for row in table.group_by("row").aggregate([("size", "sum")]).to_pylist():
            counted[row["row"]] = row["size_sum"]
        total = pc.add(total, pa.array(counted, pa.int64()))
    return total
