"""Dead letters of a KafkaSink.

The module finds rows that no topic takes before they are produced, and writes dead letters as
records. It also reads the newest dead letters of a topic. It reads as a consumer with
read_committed does, and only up to the end that the topic has when the reading begins.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from kafka.errors import TopicAuthorizationFailedError, UnsupportedCodecError

from sinks.arrow.json import escaped
from sinks.dead_letters import DeadLetters, Refusal
from sinks.errors import SinkError
from sinks.kafka.audit import batches
from sinks.kafka.cluster import Cluster
from sinks.kafka.columns import refusals
from sinks.kafka.connection import Where
from sinks.kafka.producer import TransactionalProducer
from sinks.kafka.record_batch import by_topic

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
"""Headers, all of them strings, with the columns that they come from. The first five have the names
of Kafka Streams (KIP-1034, `ExceptionHandlerUtils` of Kafka 4.2)."""

_ROW = "exactly_once.row"
_ROW_SCHEMA = "exactly_once.row_schema"
"""Headers with the whole row, if the value is the row's own, and with the types of its columns, if
Spark has names for them."""

_HELD_UP = 5.0
"""Seconds to wait for the end of a transaction that holds readers up."""
_PAUSE = 0.05
_WINDOW = 2_000
"""How many offsets of a partition are read first for the newest dead letters. If these are too few,
ten times as many are read, and so on."""


def records(letters: pa.RecordBatch) -> pa.RecordBatch:
    """Convert dead letters to the columns of a KafkaSink.

    They get the raw key and value of the row. If the row has no value, its value is the whole row
    as JSON.
    """
    rows = letters["row"].cast(pa.binary())
    value = pc.if_else(letters["value"].is_valid(), letters["value"], rows)
    texts = {
        name: letters[column].cast(pa.string()).cast(pa.binary())
        for name, column in _HEADERS.items()
    }
    texts[_ROW] = pc.if_else(letters["value"].is_valid(), rows, None)
    texts[_ROW_SCHEMA] = letters["row_schema"].cast(pa.binary())
    of_rows = zip(*(column.to_pylist() for column in texts.values()), strict=True)
    headers = [
        [
            {"key": name, "value": text}
            for name, text in zip(texts, each, strict=True)
            if text is not None
        ]
        for each in of_rows
    ]
    return pa.RecordBatch.from_arrays(
        [letters["key"], value, pa.array(headers, RECORDS[2].type)], schema=RECORDS
    )


def letter_of(record: Any) -> dict[str, Any] | None:
    """Return the columns of the dead letter that a record is, or None for any other record."""
    headers = {name: value or b"" for name, value in record.headers}
    if not _HEADERS.keys() <= headers.keys():
        return None
    letter: dict[str, Any] = {
        column: headers[name].decode("utf-8", "backslashreplace")
        for name, column in _HEADERS.items()
    }
    letter |= {name: int(letter[name]) for name in ("checkpoint", "partition", "row_number")}
    letter["time"] = datetime.fromisoformat(letter["time"].replace("Z", "+00:00"))
    schema = headers.get(_ROW_SCHEMA)
    value = record.value or b""
    row = escaped(headers.get(_ROW, value))
    raw = record.value if _ROW in headers else None
    return letter | {
        "key": record.key,
        "value": raw,
        "row": row,
        "row_schema": schema and schema.decode(),
    }


def refused(
    batch: pa.RecordBatch, default_topic: str | None, producer: TransactionalProducer
) -> Iterator[Refusal]:
    """Yield rows that their topic does not take.

    Such a row asks for a partition that its topic does not have, or its record is too large. Each
    row needs a topic, by its column or by default.
    """
    numbered = batch.append_column("number of the row", pa.array(range(batch.num_rows)))
    for topic, rows in by_topic(numbered, default_topic):
        for refusal in _of_topic(str(topic), rows, producer):
            yield replace(refusal, row=rows["number of the row"][refusal.row].as_py())


def _of_topic(
    topic: str, rows: pa.RecordBatch, producer: TransactionalProducer
) -> Iterator[Refusal]:
    if "partition" in rows.schema.names:
        wanted = rows["partition"]
        count = producer.partitions(topic, pc.max(wanted).as_py() or 0)
        yield from refusals(
            pc.greater_equal(wanted, count),
            "NoPartition",
            lambda at: f"it asks for partition {wanted[at]}, and the topic has {count}",
        )
    for at, size, most in producer.too_large(topic, rows):
        why = f"the record has {size} bytes, and the producer or the topic takes {most}"
        yield Refusal(at, "RecordTooLarge", why)


# ---------------------------------------------------------------------- read again
def read_dead_letters(cluster: Cluster, topic: str, of: tuple[str, str], most: int) -> DeadLetters:
    """Return the dead letters of a job and a sink, the last `most` of each partition.

    `of` is the job and the sink. The result names gaps, such as records that retention has removed.
    """
    if (about := cluster.topics.place(topic)) is None:
        return DeadLetters((), (f"there is no topic {topic!r}",))
    places = [(topic, number) for number in sorted(about.leaders)]
    letters = list[Mapping[str, Any]]()
    gaps = list[str]()
    if "compact" in cluster.topics.settings(topic, ["cleanup.policy"]).get("cleanup.policy", ""):
        gaps.append(
            f"topic {topic!r} is compacted, which removes letters with a key that a later one has"
        )
    written = cluster.topics.ends(places)
    deadline = time.monotonic() + _HELD_UP
    while (
        ends := cluster.topics.ends(places, committed=True)
    ) != written and time.monotonic() < deadline:
        time.sleep(_PAUSE)
    starts = cluster.topics.logs(places).starts
    for place in places:
        where = f"{topic}-{place[1]}"
        start = starts[place]
        end = ends[place]
        if start:
            gaps.append(
                f"{where} begins at offset {start}: retention, or somebody, has removed records"
            )
        if end < written[place]:
            gaps.append(
                f"readers of {where} are held up at offset {end} by a transaction that is open"
            )
        first = end
        window = _WINDOW
        newest = deque[Mapping[str, Any]]()
        while first > start and len(newest) < most:
            first = max(start, end - window)
            window = 10 * window
            newest = deque(_letters(cluster, place, first, end, of), maxlen=most)
        letters += newest
    return DeadLetters(letters, tuple(gaps))


def _letters(
    cluster: Cluster, place: Where, first: int, end: int, of: tuple[str, str]
) -> Iterator[Mapping[str, Any]]:
    try:
        for batch, visible in batches(cluster, place, first, end, _HELD_UP):
            for record in batch if visible else ():
                letter = letter_of(record) if first <= record.offset < end else None
                if letter is not None and (letter["job"], letter["sink"]) == of:
                    yield letter
    except TopicAuthorizationFailedError as error:
        raise SinkError(
            f"the principal may not read topic {place[0]!r} (ACL: Read on the topic)"
        ) from error
    except UnsupportedCodecError as error:
        raise SinkError(
            f"the letters in topic {place[0]!r} are compressed ({error}): install "
            "kafka-python[lz4,snappy,zstd]"
        ) from error
