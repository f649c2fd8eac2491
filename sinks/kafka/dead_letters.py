"""Dead letters of a KafkaSink: which rows no topic takes, told before they are produced; letters as records; and the
newest letters in a topic, read as a consumer with read_committed sees them, to its end and no further."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from datetime import datetime
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from confluent_kafka import Consumer, KafkaError, Message, TopicPartition

from sinks.dead_letters import DeadLetters, Refusal
from sinks.errors import SinkError
from sinks.kafka.cluster import Cluster
from sinks.kafka.columns import refusals
from sinks.kafka.record_batch import by_topic, sizes
from sinks.progress import progress

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
    "exactly_once.lineage": "lineage",
    "exactly_once.sink": "sink",
    "exactly_once.checkpoint": "checkpoint",
    "exactly_once.time": "time",
}
"""Texts all, the first five under the names of Kafka Streams (KIP-1034, `ExceptionHandlerUtils` of Kafka 4.2)."""

_ROW, _ROW_SCHEMA = "exactly_once.row", "exactly_once.row_schema"
"""The whole row, where the value is the row's own; and the types of its columns, if Spark has names for them."""
_ANY = "utf-8", "surrogateescape"
"""For texts of Spark, which may be no UTF-8. What is none becomes JSON that no text column takes."""

_HELD_UP = 5.0
"""Seconds that the end of a transaction is waited for that holds readers up."""
_PAUSE = 0.05
_WINDOW = 2_000
"""Offsets of a partition that are looked at first for the newest letters; then ten times as many, and so on."""
_TOGETHER = 500


def records(letters: pa.RecordBatch) -> pa.RecordBatch:
    """Letters as columns of a KafkaSink: raw key and value, or, without a value, the whole row as JSON."""
    rows = letters["row"].cast(pa.binary())
    value = pc.if_else(letters["value"].is_valid(), letters["value"], rows)
    texts = {name: letters[column].cast(pa.string()).cast(pa.binary()) for name, column in _HEADERS.items()}
    texts[_ROW] = pc.if_else(letters["value"].is_valid(), rows, None)
    texts[_ROW_SCHEMA] = letters["row_schema"].cast(pa.binary())
    of_rows = zip(*(column.to_pylist() for column in texts.values()), strict=True)
    headers = [
        [{"key": name, "value": text} for name, text in zip(texts, each, strict=True) if text is not None]
        for each in of_rows
    ]
    return pa.RecordBatch.from_arrays([letters["key"], value, pa.array(headers, RECORDS[2].type)], schema=RECORDS)


def letter_of(message: Message) -> dict[str, Any] | None:
    """The columns of the letter that a record is; None for one that is none."""
    pairs: Any = message.headers() or ()
    headers = {name: value or b"" for name, value in pairs}
    if not _HEADERS.keys() <= headers.keys():
        return None
    letter: dict[str, Any] = {
        column: headers[name].decode("utf-8", "backslashreplace") for name, column in _HEADERS.items()
    }
    letter |= {name: int(letter[name]) for name in ("checkpoint", "partition", "row_number")}
    letter["time"] = datetime.fromisoformat(letter["time"].replace("Z", "+00:00"))
    schema, value = headers.get(_ROW_SCHEMA), message.value() or b""
    row = headers.get(_ROW, value).decode(*_ANY).encode("utf-8", "backslashreplace").decode()
    raw = message.value() if _ROW in headers else None
    return letter | {"key": message.key(), "value": raw, "row": row, "row_schema": schema and schema.decode()}


def refused(
    batch: pa.RecordBatch, default_topic: str | None, largest: int, partitions: Callable[[str, int], int]
) -> Iterator[Refusal]:
    """Rows for a partition that their topic has not, or of more than `largest` bytes. `partitions`: how many a topic
    has, of which a row asks for this one."""
    if "partition" in batch.schema.names:
        wanted, count = batch["partition"], _partitions(batch, default_topic, partitions)
        yield from refusals(
            pc.greater_equal(wanted, count),
            "NoPartition",
            lambda at: f"it asks for partition {wanted[at]}, and the topic has {count[at]}",
        )
    size = pa.array(sizes(batch))
    yield from refusals(
        pc.greater(size, largest),
        "RecordTooLarge",
        lambda at: f"the record has {size[at]} bytes, and the producer or the topic takes {largest}",
    )


def _partitions(batch: pa.RecordBatch, default_topic: str | None, partitions: Callable[[str, int], int]) -> pa.Array:
    """Of the topic of each row that asks for one."""
    places = pa.array(range(batch.num_rows), pa.int64())
    counts: list[int | None] = [None] * batch.num_rows
    for topic, rows in by_topic(batch.append_column("place of the row", places), default_topic):
        last = pc.max(rows["partition"]).as_py()
        if topic and last is not None:
            count = partitions(topic, last)
            for place in rows["place of the row"].to_pylist():
                counts[place] = count
    return pa.array(counts, pa.int64())


# ---------------------------------------------------------------------- read again
Ends = Mapping[int, int]
"""By partition."""


def read_dead_letters(
    cluster: Cluster, options: Mapping[str, Any], topic: str, of: tuple[str, str], most: int, timeout: float
) -> DeadLetters:
    """Those `of` a job and a sink, the last `most` of each partition. `options` are librdkafka's; `timeout`: seconds
    without any answer."""
    if (about := cluster.topic(topic)) is None:
        return DeadLetters((), (f"there is no topic {topic!r}",))
    starts, ends, gaps = _stable(cluster, topic, [partition["partition_index"] for partition in about["partitions"]])
    if "compact" in cluster.configs("TOPIC", topic, ["cleanup.policy"]).get("cleanup.policy", ""):
        gaps.append(f"topic {topic!r} is compacted, which removes letters with a key that a later one has")
    window = _WINDOW
    with closing(_consumer(options)) as consumer:
        while True:
            firsts = {at: max(starts[at], end - window) for at, end in ends.items()}
            newest: dict[int, deque[Mapping[str, Any]]] = {at: deque(maxlen=most) for at in ends}
            for message in _read(consumer, topic, firsts, ends, timeout):
                letter = letter_of(message)
                if letter is not None and (letter["job"], letter["sink"]) == of:
                    newest[message.partition() or 0].append(letter)
            if all(firsts[at] == starts[at] or len(newest[at]) == most for at in ends):
                return DeadLetters([letter for letters in newest.values() for letter in letters], tuple(gaps))
            window *= 10


def _stable(cluster: Cluster, topic: str, partitions: list[int]) -> tuple[Ends, Ends, list[str]]:
    """The first offset of each partition; where readers stop now; and what they do not get: what was removed, and what
    comes before the end as it was at first."""
    places = [(topic, at) for at in partitions]
    ends, deadline = cluster.ends(places, committed=False), time.monotonic() + _HELD_UP
    stable = cluster.ends(places, committed=True)
    while any(stable[place] < ends[place] for place in places) and time.monotonic() < deadline:
        time.sleep(_PAUSE)
        stable = cluster.ends(places, committed=True)
    starts = cluster.starts(places)
    gaps = [
        f"{topic}-{at} begins at offset {start}: retention, or somebody, has removed records"
        for (_, at), start in starts.items()
        if start
    ]
    gaps += [
        f"readers of {topic}-{at} are held up at offset {stable[topic, at]} by a transaction that is open"
        for (_, at), end in ends.items()
        if stable[topic, at] < end
    ]
    return {at: starts[topic, at] for at in partitions}, {at: stable[topic, at] for at in partitions}, gaps


def _read(consumer: Consumer, topic: str, firsts: Ends, ends: Ends, timeout: float) -> Iterator[Message]:
    """Committed records of these offsets. Markers and what was aborted are in between, so the end is told by what comes
    after it, or by the end of the partition. Raises `SinkError` if nothing comes."""
    left = {at for at, end in ends.items() if firsts[at] < end}
    consumer.assign([TopicPartition(topic, at, firsts[at]) for at in left])
    heard, last = time.monotonic(), None
    with progress(f"read topic {topic}", sum(ends[at] - firsts[at] for at in left), "offsets") as advance:
        while left:
            for message in consumer.consume(_TOGETHER, timeout=_PAUSE):
                error, at, offset = message.error(), message.partition(), message.offset()
                if error is not None and error.code() != KafkaError._PARTITION_EOF:
                    last = error
                    if error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
                        raise SinkError(f"the principal may not read topic {topic!r} (ACL: Read on the topic)")
                    continue
                heard = time.monotonic()
                if at not in left or offset is None:
                    continue
                if error is None and offset < ends[at]:
                    yield message
                if offset + (error is None) >= ends[at]:
                    left.discard(at)
                    advance(ends[at] - firsts[at])
                    consumer.incremental_unassign([TopicPartition(topic, at)])
            if time.monotonic() - heard > timeout:
                at, why = min(left), f": {last}" if last else ""
                raise SinkError(f"{topic}-{at} could not be read to offset {ends[at]} in time{why}")
    consumer.unassign()


def _consumer(options: Mapping[str, Any]) -> Consumer:
    return Consumer(
        {
            **options,
            "group.id": "tpc.dead-letters",  # of no member, and nothing is committed to it: no right is needed for it
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "isolation.level": "read_committed",
            "auto.offset.reset": "earliest",
            "fetch.wait.max.ms": 20,
            "log_level": 0,
        }
    )
