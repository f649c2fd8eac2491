"""Records that no topic takes go to another sink, and rows that a table refuses to a topic."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import Producer, TopicPartition
from kafka.admin import ConfigResource, KafkaAdminClient

from sinks.arrow.spark_types import schema_to_json
from sinks.dead_letters import SCHEMA, DeadLetters, Refusal, letter_rows
from sinks.errors import ConfigurationError, SinkError
from sinks.kafka import KafkaSink
from sinks.kafka import dead_letters as reading
from sinks.kafka.dead_letters import RECORDS, letter_of, records
from sinks.sqlalchemy import SqlAlchemySink
from sinks.testing.servers.kafka import KafkaService
from sinks.testing.table import eventually
from sinks.testing.table_crashes import run
from sinks.transaction import TransactionContext
from tests.dead_letters import batch, ids
from tests.kafka.reading import read, settled
from tests.kafka.tasks import TEXTS, begun, texts
from tests.sqlalchemy_sink.test_dead_letters import Observer


@pytest.fixture
def topic(kafka: KafkaService, kafka_topic: str) -> str:
    return kafka_topic


@pytest.fixture
def one_partition(kafka: KafkaService) -> Iterator[str]:
    with kafka.topic() as topic:
        yield topic


def messages(kafka: KafkaService, topic: str) -> list[Any]:
    settled(kafka.bootstrap)
    return read(kafka.client_options(), topic)


def test_rows_of_a_table_go_to_a_topic(tmp_path: Path, kafka: KafkaService, topic: str) -> None:
    url = f"sqlite:///{tmp_path / 'rows.db'}"
    with Observer(url).engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE good (id bigint, name varchar(20) NOT NULL, amount float)")
    input = [batch(number, by_client=None, by_server=False) for number in range(2)]
    dead = KafkaSink(kafka.bootstrap, topic, name="letters")
    run(tmp_path, SqlAlchemySink(url, "good", dead_letters=dead), input)
    written = messages(kafka, topic)
    assert sorted(json.loads(message.value())["id"] for message in written) == ids(input, bad=True)
    assert Observer(url).ids("good") == ids(input, bad=False)
    [message] = [message for message in written if json.loads(message.value())["id"] == 29]
    headers = {name: value.decode() for name, value in message.headers()}
    assert message.key() is None
    assert headers.pop("exactly_once.time").endswith("Z")
    assert len(headers.pop("exactly_once.lineage")) == 8
    assert headers == {
        "__streams.errors.exception": "BadValue",
        "__streams.errors.message": 'column "name": NULL in a column that takes none',
        "__streams.errors.topic": "good",
        "__streams.errors.partition": "0",
        "__streams.errors.offset": "29",
        "exactly_once.job": "job",
        "exactly_once.sink": "good",
        "exactly_once.checkpoint": "0",
        "exactly_once.row_schema": schema_to_json(input[0][0].schema),
    }


def test_records_go_to_a_table_with_key_and_value_as_they_are(tmp_path: Path, kafka: KafkaService, topic: str) -> None:
    url = f"sqlite:///{tmp_path / 'rows.db'}"
    dead = SqlAlchemySink(url, "dead", create_table=True)
    sink = KafkaSink(kafka.bootstrap, topic, dead_letters=dead, options={"message.max.bytes": 2000})
    moment = pa.scalar(0, pa.timestamp("us", "UTC"))
    rows: list[dict[str, Any]] = [
        {"key": b"fits", "value": b"x" * 1900},
        {"key": b"too large", "value": b"x" * 2000},
        {"key": b"too much with headers", "value": b"", "headers": [{"key": "h", "value": b"x" * 2000}]},
        {"key": b"no partition", "value": b"", "partition": 99},
        {"key": b"negative", "value": b"", "partition": -1},
        {"key": b"no time", "value": b"", "timestamp": moment.as_py()},
        {"key": b"before 1970", "value": b"", "timestamp": moment.as_py() - timedelta(days=1)},
        {"key": b"a time", "value": b"", "timestamp": moment.as_py() + timedelta(microseconds=600)},
        {"key": b"no header", "value": b"", "headers": [{"key": "h", "value": b""}, {"key": None, "value": b""}]},
        {"key": b"plain", "value": None, "partition": 0, "headers": []},
        {"key": b"nowhere", "value": b"", "topic": ""},
        {"key": b"no name", "value": b"", "topic": "a b", "partition": 0},
    ]
    headers = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    bytes_of, others = ("key", "value"), [("headers", headers), ("timestamp", moment.type)]
    schema = pa.schema(
        [*((name, pa.binary()) for name in bytes_of), ("topic", pa.string()), ("partition", pa.int32()), *others]
    )
    run(tmp_path, sink, [[pa.Table.from_pylist(rows, schema=schema)]])
    assert {message.key() for message in messages(kafka, topic)} == {b"fits", b"plain", b"a time"}
    stored = Observer(url).run("SELECT key, error_class, length(value) FROM dead ORDER BY row_number")
    assert stored == [
        (b"too large", "RecordTooLarge", 2000),
        (b"too much with headers", "RecordTooLarge", 0),
        (b"no partition", "NoPartition", 0),
        (b"negative", "NoPartition", 0),
        (b"no time", "BadTimestamp", 0),
        (b"before 1970", "BadTimestamp", 0),
        (b"no header", "BadHeader", 0),
        (b"nowhere", "NoTopic", 0),
        (b"no name", "NoTopic", 0),
    ]


@pytest.mark.parametrize(("routed", "compression"), [(False, "none"), (True, "none"), (True, "zstd")])
def test_a_record_that_is_just_too_large_is_a_dead_letter(
    tmp_path: Path, kafka: KafkaService, topic: str, routed: bool, compression: str
) -> None:
    """What a record takes beside its bytes depends on its headers; and the topic takes it compressed."""
    with kafka.topic(config={"max.message.bytes": "2000"}) as small:
        kinds = [(count, left) for count in (0, 1, 40, 300) for left in (0, 60, 80, 128)]
        rows: dict[str, Any] = {
            "key": [f"{count} {left}".encode() for count, left in kinds] + [b"even"],
            "value": [os.urandom(2000 - 6 * count - left) for count, left in kinds] + [b"x" * 9000],
            "headers": [[{"key": "k", "value": os.urandom(5)}] * count for count, _ in kinds] + [[]],
        }
        table = pa.Table.from_pydict(rows, schema=RECORDS)
        sink = KafkaSink(
            kafka.bootstrap,
            None if routed else small,
            name="s",
            options={"compression.type": compression},
            dead_letters=KafkaSink(kafka.bootstrap, topic, name="letters"),
        )
        run(tmp_path, sink, [[table.append_column("topic", [[small] * len(table)]) if routed else table]])
        written = {message.key() for message in messages(kafka, small)}
        letters = {message.key() for message in messages(kafka, topic)}
        assert (written | letters, written & letters) == ({*rows["key"]}, set())
        assert {b"0 0", b"0 60", b"1 60"} <= letters
        assert {b"0 80", b"0 128", b"1 80"} <= written
        assert (b"even" in written, b"40 128" in written) == (compression == "zstd", compression == "zstd")


def test_rows_that_fit_since_the_topics_limit_was_raised(kafka: KafkaService, topic: str) -> None:
    """Amid a run, whose start has told the tasks the limit."""
    with kafka.topic(config={"max.message.bytes": "2000"}) as small:
        sink = KafkaSink(kafka.bootstrap, small, dead_letters=KafkaSink(kafka.bootstrap, topic, name="letters"))
        sink.check(TEXTS)

        def refused() -> list[str]:
            copy = pickle.loads(pickle.dumps(sink))
            transaction = begun(copy)
            try:
                return [each.error_class for each in copy.write_good_rows(transaction, texts("x" * 3000), 10)]
            finally:
                copy.rollback(transaction)
                copy.close()

        assert refused() == ["RecordTooLarge"]
        admin = KafkaAdminClient(bootstrap_servers=kafka.bootstrap.split(","))
        admin.alter_configs([ConfigResource("TOPIC", small, {"max.message.bytes": "4000"})])
        admin.close()
        eventually(lambda: refused() == [])
        sink.close()


def test_a_row_without_a_topic_goes_to_the_dead_letters_topic(tmp_path: Path, kafka: KafkaService, topic: str) -> None:
    """And is shown from there, with key and value as they were."""
    dead = KafkaSink(kafka.bootstrap, topic, name="letters")
    rows = {
        "topic": pa.array([None] * 3, pa.string()),
        "key": pa.array([b"k", None, b"n"]),
        "partition": pa.array([0, 0, None], pa.int32()),
        "value": pa.array(["v", 'ä"', None]),
    }
    sink = KafkaSink(kafka.bootstrap, name="many", dead_letters=dead)
    run(tmp_path, sink, [[pa.table(rows)]])
    by_key = {message.key(): message for message in messages(kafka, topic)}
    assert {key: message.value() for key, message in by_key.items() if key != b"n"} == {b"k": b"v", None: 'ä"'.encode()}
    headers = dict(by_key[b"k"].headers())
    assert (headers["__streams.errors.exception"], headers["exactly_once.row"]) == (
        b"NoTopic",
        b'{"topic":null,"key":"aw==","partition":0,"value":"v"}',
    )
    newest = dead.read_dead_letters("job", "many", 9)
    dead.close()
    assert newest
    shown = {letter["row_number"]: letter for letter in newest.rows}
    assert shown[0]["row"] == '{"topic":null,"key":"aw==","partition":0,"value":"v"}'
    assert json.loads(shown[1]["row"]) == {"topic": None, "key": None, "partition": 0, "value": 'ä"'}
    assert [(shown[at]["key"], shown[at]["value"]) for at in range(3)] == [
        (b"k", b"v"),
        (None, 'ä"'.encode()),
        (b"n", None),
    ]


@pytest.mark.parametrize("text", [b"\xff", b'a"\xff\n'])
def test_a_text_that_is_no_utf8_is_shown(text: bytes) -> None:
    """And its letter is one that any table takes."""
    context = TransactionContext("job", "0badcafe", 7, "sink", 1, "", SCHEMA, "")
    bad = pa.array([text]).view(pa.string())
    large = pa.array([text], pa.large_binary()).view(pa.large_string())  # spark.sql.execution.arrow.useLargeVarTypes
    for columns in ({"value": bad, "other": pa.array([1.10])}, {"name": bad}, {"value": large}):
        rows = pa.RecordBatch.from_pydict(columns)
        letters = letter_rows(context, rows, pa.array([2]), [Refusal(0, "Bad", "why")])
        letters.validate(full=True)
        batch = records(letters)
        key, value, headers = (batch[name][0].as_py() for name in ("key", "value", "headers"))
        pairs = [(header["key"], header["value"]) for header in headers]
        letter = letter_of(SimpleNamespace(key=key, value=value, headers=pairs))
        assert letter
        assert letter["value"] == (text if "value" in columns else None)
        assert text.decode("utf-8", "surrogateescape") in json.loads(letter["row"]).values()


def test_the_newest_letters_of_a_topic(
    tmp_path: Path, kafka: KafkaService, one_partition: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was removed there, or is held up, is never taken for nothing."""
    monkeypatch.setattr(reading, "_HELD_UP", 0.1)
    monkeypatch.setattr(reading, "_WINDOW", 3)  # two markers and a letter
    url = f"sqlite:///{tmp_path / 'rows.db'}"
    with Observer(url).engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE good (id bigint, name varchar(20) NOT NULL, amount float)")
    input = [batch(number, by_client=None, by_server=False) for number in range(3)]
    dead = KafkaSink(kafka.bootstrap, one_partition, name="letters")
    sink = SqlAlchemySink(url, "good", dead_letters=dead)
    run(tmp_path, sink, input)
    bad, newest = ids(input, bad=True), ids(input[2:], bad=True)

    def shown(most: int) -> tuple[list[int], list[str]]:
        last = dead.read_dead_letters("job", "good", most)
        assert last
        return [json.loads(letter["row"])["id"] for letter in last.rows], [gap.partition(":")[0] for gap in last.gaps]

    assert shown(100) == (bad, [])
    assert shown(2) == (newest[-2:], [])
    assert (
        dead.read_dead_letters("job", "other", 100) == dead.read_dead_letters("other", "good", 100) == DeadLetters([])
    )

    [first] = [message for message in messages(kafka, one_partition) if json.loads(message.value())["id"] == newest[0]]
    open_transaction = Producer(kafka.client_options() | {"transactional.id": f"other {one_partition}"})
    open_transaction.init_transactions(30)
    open_transaction.begin_transaction()
    open_transaction.produce(one_partition, b"aborted, and no letter", headers=first.headers())
    open_transaction.flush()
    rows, [gap] = shown(100)
    assert rows == bad
    assert gap.startswith(f"readers of {one_partition}-0 are held up at ")
    open_transaction.abort_transaction()

    admin, place = kafka.admin(), TopicPartition(one_partition, 0, first.offset())
    admin.delete_records([place])[place].result(30)
    assert shown(100) == (newest, [f"{one_partition}-0 begins at offset {first.offset()}"])
    dead.close()


def test_letters_that_kafka_python_cannot_read_here(
    tmp_path: Path, kafka: KafkaService, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kafka.codec.has_lz4", lambda: False)
    dead = KafkaSink(kafka.bootstrap, topic, name="letters", options={"compression.type": "lz4"})
    rows = pa.table({"value": ["x" * 100] * 9, "partition": pa.array([9] * 9, pa.int32())})
    run(tmp_path, KafkaSink(kafka.bootstrap, topic, name="many", dead_letters=dead), [[rows]])
    settled(kafka.bootstrap)
    with pytest.raises(SinkError, match=r"are compressed .*: install kafka-python\[lz4,snappy,zstd\]"):
        dead.read_dead_letters("job", "many", 9)
    dead.close()


def test_serializers_do_without() -> None:
    serializer: Any = lambda: bytes  # noqa: E731
    with pytest.raises(ConfigurationError, match="it takes no dead_letters"):
        KafkaSink("b:1", "t", value_serializer=serializer, dead_letters=KafkaSink("b:1", "d"))
