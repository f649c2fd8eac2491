"""Dead letters of a KafkaSink: which rows no topic takes, told before they are produced; and letters as records."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from confluent_kafka import Message

from sinks.dead_letters import Refusal
from sinks.kafka.columns import refusals
from sinks.kafka.record_batch import by_topic, sizes
from sinks.spark_types import schema_of_json

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
"""Columns beside the raw key and value, if these are there; and the types of all, if Spark has names for them."""
_ANY = "utf-8", "surrogateescape"
"""For texts of Spark, which may be no UTF-8. What is none becomes JSON that no text column takes."""


def records(letters: pa.RecordBatch) -> pa.RecordBatch:
    """Letters as columns of a KafkaSink: raw key and value, or, without a value, the whole row as JSON."""
    value = pc.if_else(letters["value"].is_valid(), letters["value"], letters["row"].cast(pa.binary()))
    texts = {column: letters[column].cast(pa.string()).to_pylist() for column in set(_HEADERS.values())}
    headers = [
        [{"key": name, "value": texts[column][at].encode()} for name, column in _HEADERS.items()]
        + [{"key": name, "value": text.encode(*_ANY)} for name, text in _about_row(letters, at)]
        for at in range(letters.num_rows)
    ]
    return pa.RecordBatch.from_arrays([letters["key"], value, pa.array(headers, RECORDS[2].type)], schema=RECORDS)


def _about_row(letters: pa.RecordBatch, at: int) -> Iterator[tuple[str, str]]:
    if letters["value"][at].is_valid:
        there = [name for name in ("key", "value") if letters[name][at].is_valid]
        row = letters["row"].cast(pa.binary())[at].as_py().decode(*_ANY)
        yield _ROW, _joined({name: text for name, text in members(row).items() if name not in there})
    if letters["row_schema"][at].is_valid:
        yield _ROW_SCHEMA, letters["row_schema"][at].as_py()


def letter_of(message: Message) -> dict[str, Any] | None:
    """The columns of the letter that a record is; None for one that is none."""
    told: Any = message.headers() or ()
    headers = {name: value or b"" for name, value in told}
    if not _HEADERS.keys() <= headers.keys():
        return None
    letter: dict[str, Any] = {
        column: headers[name].decode("utf-8", "backslashreplace") for name, column in _HEADERS.items()
    }
    letter |= {name: int(letter[name]) for name in ("checkpoint", "partition", "row_number")}
    letter["time"] = datetime.fromisoformat(letter["time"].replace("Z", "+00:00"))
    schema = headers.get(_ROW_SCHEMA)
    key, value = message.key(), message.value()
    letter |= {"key": key, "value": value if _ROW in headers else None, "row_schema": schema and schema.decode()}
    row = _row(headers[_ROW].decode(*_ANY), letter) if _ROW in headers else (value or b"").decode(*_ANY)
    letter["row"] = row.encode("utf-8", "backslashreplace").decode()
    return letter


def _row(others: str, letter: Mapping[str, Any]) -> str:
    """All columns as JSON again, as they were."""
    if letter["row_schema"] is None:
        return others
    known = members(others)
    return _joined(
        {
            one.name: known[one.name] if one.name in known else _text(letter[one.name], one.type)
            for one in schema_of_json(json.loads(letter["row_schema"]))
        }
    )


def _text(raw: bytes, kind: pa.DataType) -> str:
    text = raw.decode(*_ANY) if pa.types.is_string(kind) else base64.b64encode(raw).decode()
    return json.dumps(text, ensure_ascii=False)


def members(text: str) -> dict[str, str]:
    """Of a JSON object without spaces between its parts, each value as it is written.

    >>> members('{"a":1.10,"b":{"c":[1,2]}}')
    {'a': '1.10', 'b': '{"c":[1,2]}'}
    """
    found, decode, at = dict[str, str](), json.JSONDecoder().raw_decode, 1
    while text[at] != "}":
        name, colon = decode(text, at)
        _, end = decode(text, colon + 1)
        found[name] = text[colon + 1 : end]
        at = end + (text[end] == ",")
    return found


def _joined(members: Mapping[str, str]) -> str:
    return "{" + ",".join(f"{json.dumps(name, ensure_ascii=False)}:{text}" for name, text in members.items()) + "}"


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
