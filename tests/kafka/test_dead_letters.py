"""Records that no topic takes go to another sink, and rows that a table refuses to a topic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from sinks.errors import ConfigurationError
from sinks.kafka import KafkaSink
from sinks.sqlalchemy import SqlAlchemySink
from sinks.testing.servers.kafka import KafkaService
from sinks.testing.table_crashes import run
from tests.dead_letters import batch, ids
from tests.kafka.reading import read, settled
from tests.sqlalchemy_sink.test_dead_letters import Observer


@pytest.fixture
def topic(kafka: KafkaService, kafka_topic: str) -> str:
    return kafka_topic


def messages(kafka: KafkaService, topic: str) -> list[Any]:
    settled(kafka.bootstrap)
    return read(kafka.client_options(), topic)


def test_rows_of_a_table_go_to_a_topic(tmp_path: Path, kafka: KafkaService, topic: str) -> None:
    url = f"sqlite:///{tmp_path / 'rows.db'}"
    with Observer(url).engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE good (id bigint, name varchar(20) NOT NULL, amount float)")
    input = [batch(number, by_client=None, by_server=False) for number in range(2)]
    letters = KafkaSink(kafka.bootstrap, topic, name="letters")
    run(tmp_path, SqlAlchemySink(url, "good", dead_letters=letters), input)
    found = messages(kafka, topic)
    assert sorted(json.loads(one.value())["id"] for one in found) == ids(input, bad=True)
    assert Observer(url).ids("good") == ids(input, bad=False)
    [one] = [one for one in found if json.loads(one.value())["id"] == 29]
    headers = {name: value.decode() for name, value in one.headers()}
    assert one.key() is None
    assert headers.pop("exactly_once.time").endswith("Z")
    assert headers == {
        "__streams.errors.exception": "BadValue",
        "__streams.errors.message": 'column "name": NULL in a column that takes none',
        "__streams.errors.topic": "good",
        "__streams.errors.partition": "0",
        "__streams.errors.offset": "29",
        "exactly_once.job": "job",
        "exactly_once.sink": "good",
        "exactly_once.checkpoint": "0",
    }


def test_records_go_to_a_table_with_key_and_value_as_they_are(tmp_path: Path, kafka: KafkaService, topic: str) -> None:
    url = f"sqlite:///{tmp_path / 'rows.db'}"
    letters = SqlAlchemySink(url, "dead", create_table=True)
    sink = KafkaSink(kafka.bootstrap, topic, dead_letters=letters, options={"message.max.bytes": 2000})
    moment = pa.scalar(0, pa.timestamp("us", "UTC"))
    rows: list[dict[str, Any]] = [
        {"key": b"fits", "value": b"x" * 1900},
        {"key": b"too large", "value": b"x" * 2000},
        {"key": b"too much with headers", "value": b"", "headers": [{"key": "h", "value": b"x" * 2000}]},
        {"key": b"no partition", "value": b"", "partition": 99},
        {"key": b"negative", "value": b"", "partition": -1},
        {"key": b"no time", "value": b"", "timestamp": moment.as_py()},
        {"key": b"plain", "value": None, "partition": 0, "headers": []},
    ]
    headers = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    bytes_of, others = ("key", "value"), [("headers", headers), ("timestamp", moment.type)]
    schema = pa.schema([*((name, pa.binary()) for name in bytes_of), ("partition", pa.int32()), *others])
    run(tmp_path, sink, [[pa.Table.from_pylist(rows, schema=schema)]])
    assert {one.key() for one in messages(kafka, topic)} == {b"fits", b"plain"}
    found = Observer(url).run("SELECT key, error_class, length(value) FROM dead ORDER BY row_number")
    assert found == [
        (b"too large", "RecordTooLarge", 2000),
        (b"too much with headers", "RecordTooLarge", 0),
        (b"no partition", "NoPartition", 0),
        (b"negative", "NoPartition", 0),
        (b"no time", "NoTimestamp", 0),
    ]


def test_a_row_without_a_topic_goes_to_the_dead_letters_topic(tmp_path: Path, kafka: KafkaService, topic: str) -> None:
    letters = KafkaSink(kafka.bootstrap, topic, name="letters")
    table = pa.table({"topic": pa.array([None], pa.string()), "key": ["k"], "value": ["v"]})
    run(tmp_path, KafkaSink(kafka.bootstrap, name="many", dead_letters=letters), [[table]])
    [one] = messages(kafka, topic)
    assert (one.key(), one.value(), dict(one.headers())["__streams.errors.exception"]) == (b"k", b"v", b"NoTopic")


def test_serializers_do_without() -> None:
    serializer: Any = lambda: bytes  # noqa: E731
    with pytest.raises(ConfigurationError, match="it takes no dead_letters"):
        KafkaSink("b:1", "t", value_serializer=serializer, dead_letters=KafkaSink("b:1", "d"))
