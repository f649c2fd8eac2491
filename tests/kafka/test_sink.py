"""KafkaSink on a real broker: what arrives, what is refused, and what became of a transaction."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from datetime import datetime, timezone
from functools import partial
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.cimpl import NewPartitions, NewTopic
from confluent_kafka.serialization import SerializationContext
from kafka.errors import (
    KafkaConnectionError,
    KafkaError,
    KafkaTimeoutError,
    NotControllerError,
    RequestTimedOutError,
    SaslAuthenticationFailedError,
)
from kafka.protocol.parser import KafkaProtocol
from kafka.protocol.sasl import SaslAuthenticateRequest
from tenacity import Retrying, stop_after_delay

from sinks.errors import BadValue, CommittedError, ConfigurationError, SchemaMismatch, SinkError
from sinks.kafka import KafkaSink, commit, producer, written_topics
from sinks.kafka.cluster import Cluster
from sinks.kafka.connection import Connections
from sinks.kafka.errors import NotYetKnown, is_passing
from sinks.kafka.internals import Client
from sinks.kafka.memory import GroupMemory
from sinks.kafka.options import client_options
from sinks.kafka.producer import TransactionalProducer
from sinks.kafka.record_batch import CODECS
from sinks.kafka.topics import Topics
from sinks.testing.servers.kafka import KafkaServer, KafkaService
from sinks.testing.table import eventually
from sinks.transaction import Checkpoint, CommitOutcome, CommitState, Committable
from tests.kafka.reading import read, settled
from tests.kafka.tasks import LINEAGE, TEXTS, anew, begun, pre_commit, sink_of, texts


def values(kafka: KafkaService, topic: str, **how: Any) -> list[str]:
    settled(kafka.bootstrap)
    return sorted((message.value() or b"").decode() for message in read(kafka.client_options(), topic, **how))


def outcome(sink: KafkaSink, committable: Committable, timeout: float = 120) -> CommitOutcome:
    """Ask until the outcome is final."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            return sink.commit(committable)
        except NotYetKnown:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def go_on(transaction: TransactionalProducer, batch: pa.RecordBatch, seconds: float = 120) -> None:
    """Write and flush, until that fails or the time is up."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        transaction.write(batch)
        transaction.flush(60)
        time.sleep(0.05)


def numbered(partition: int) -> pa.RecordBatch:
    """A row for this partition, with its number."""
    return pa.RecordBatch.from_pydict({"value": [f"{partition}"], "partition": pa.array([partition], pa.int32())})


def expect_fenced(task: KafkaSink, driver: KafkaSink) -> None:
    """What the driver aborts, the task cannot go on with."""
    zombie = begun(task, numbered(0))
    zombie.flush(60)
    (identity,) = driver.in_doubt("job")
    driver.abort(identity)
    with pytest.raises(RuntimeError, match=r"taken its place|not taken"):
        go_on(zombie, numbered(1))
    task.rollback(zombie)


# ---------------------------------------------------------------------- what arrives
def test_keys_values_tombstones_and_partitions(kafka: KafkaService, kafka_topic: str, sink: KafkaSink) -> None:
    batch = pa.RecordBatch.from_pydict(
        {
            "key": pa.array([b"k", None, b"", b"\x00\xff"], pa.binary()),
            "value": pa.array(["täglich", "", None, "x" * 5000], pa.string()),
            "partition": pa.array([0, 1, 2, 2], pa.int32()),
        }
    )
    sink.check(batch.schema)
    committable = pre_commit(sink, batch)
    assert values(kafka, kafka_topic) == []
    assert sink.commit(committable) == CommitOutcome.COMMITTED
    settled(kafka.bootstrap)
    written = [(m.partition(), m.key(), m.value()) for m in read(kafka.client_options(), kafka_topic)]
    assert sorted(written, key=str) == sorted(
        [
            (0, b"k", "täglich".encode()),
            (1, None, b""),
            (2, b"", None),
            (2, b"\x00\xff", b"x" * 5000),
        ],
        key=str,
    )


def timed(moment: datetime | None) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"value": ["a"], "timestamp": pa.array([moment], pa.timestamp("us", "UTC"))})


@pytest.mark.parametrize("milliseconds", [0, -1, -2, -(10**12)])
def test_a_timestamp_that_is_not_after_1970_is_refused(sink: KafkaSink, milliseconds: int) -> None:
    """Kafka takes 0 and -1 for none; and of earlier ones the broker's log cleaner says "Invalid negative timestamp",
    and never compacts the partition again."""
    with pytest.raises(BadValue, match=f"row 1 of a batch: the timestamp is {milliseconds} ms from 1970"):
        pre_commit(sink, timed(datetime.fromtimestamp(milliseconds / 1000, timezone.utc)))


@pytest.mark.parametrize(("micros", "millis"), [(501, 1), (1_499, 1), (1_500, 2), (10**15 + 1, 10**12)])
def test_a_timestamp_is_rounded_whatever_zone_it_is_in(
    kafka: KafkaService, kafka_topic: str, sink: KafkaSink, micros: int, millis: int
) -> None:
    """Python knows no zone of this name, which Spark takes."""
    rows = {"value": ["a"], "timestamp": pa.array([micros], pa.timestamp("us", "GMT+8"))}
    assert sink.commit(pre_commit(sink, pa.RecordBatch.from_pydict(rows))) == CommitOutcome.COMMITTED
    settled(kafka.bootstrap)
    assert [message.timestamp()[1] for message in read(kafka.client_options(), kafka_topic)] == [millis]


def test_rows_with_timestamps_whose_acknowledgement_gets_lost(
    kafka: KafkaService, kafka_topic: str, sink: KafkaSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For what it has already, a leader answers with a time, as if that were its own in place of the records'."""
    produce = Cluster.produce

    def twice(self: Cluster, node: int, name: str, batches: Any, limit: int, answered: Any, *, adds: bool) -> None:
        again = partial(produce, self, node, name, batches, limit, answered, adds=adds)
        produce(self, node, name, batches, limit, lambda _: again(), adds=adds)

    monkeypatch.setattr(Cluster, "produce", twice)
    moment = datetime(2020, 1, 2, tzinfo=timezone.utc)
    assert sink.commit(pre_commit(sink, timed(moment))) == CommitOutcome.COMMITTED
    settled(kafka.bootstrap)
    (message,) = read(kafka.client_options(), kafka_topic)
    assert message.timestamp()[1] == moment.timestamp() * 1000


HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


@pytest.mark.parametrize("header", [None, {"key": None, "value": b"v"}, {"key": "k\0x", "value": b"v"}])
def test_a_header_without_a_whole_key_is_refused(sink: KafkaSink, header: Any) -> None:
    """Consumers of librdkafka would see what stands before the NUL."""
    rows = {"value": ["a", "b"], "headers": pa.array([None, [{"key": "", "value": None}, header]], HEADERS)}
    with pytest.raises(BadValue, match=r"row 2 of a batch: a header is null, or its key is, or holds a NUL"):
        pre_commit(sink, pa.RecordBatch.from_pydict(rows))


def test_a_topic_that_has_a_time_of_its_own_takes_no_timestamps(kafka: KafkaService) -> None:
    moment = datetime(2026, 2, 3, tzinfo=timezone.utc)
    with kafka.topic(config={"message.timestamp.type": "LogAppendTime"}) as topic:
        sink = sink_of(kafka, topic)
        with pytest.raises(ConfigurationError, match="puts its own time in place of the records' timestamps"):
            pre_commit(sink, timed(moment))
        assert sink.commit(pre_commit(sink, timed(None), slot=1)) == CommitOutcome.COMMITTED
        sink.close()


def test_a_wall_clock_is_no_point_in_time(sink: KafkaSink) -> None:
    with pytest.raises(SchemaMismatch, match="must be timestamp, a point in time"):
        sink.check(pa.schema([("value", pa.string()), ("timestamp", pa.timestamp("us"))]))


def test_headers_and_timestamps(kafka: KafkaService, kafka_topic: str, sink: KafkaSink) -> None:
    headers = pa.list_(pa.struct({"key": pa.string(), "value": pa.binary()}))
    moment = datetime(2026, 2, 3, 4, 5, 6, 789000, timezone.utc)
    batch = pa.RecordBatch.from_pydict(
        {
            "value": ["a", "b"],
            "headers": pa.array([[{"key": "h", "value": b"1"}, {"key": "h", "value": None}], None], headers),
            "timestamp": pa.array([moment, None], pa.timestamp("us", "UTC")),
        }
    )
    sink.check(batch.schema)
    before = time.time()
    assert sink.commit(pre_commit(sink, batch)) == CommitOutcome.COMMITTED
    settled(kafka.bootstrap)
    a, b = sorted(read(kafka.client_options(), kafka_topic), key=lambda message: message.value() or b"")
    assert a.headers() == [("h", b"1"), ("h", None)]
    assert a.timestamp()[1] == int(moment.timestamp() * 1000)
    assert b.headers() is None
    assert b.timestamp()[1] >= int(before * 1000) - 1


@pytest.mark.parametrize("compression", CODECS)
def test_every_compression_is_read_by_others(kafka: KafkaService, kafka_topic: str, compression: str) -> None:
    """The broker looks into each record batch, and the consumer at its checksum."""
    sink = sink_of(kafka, kafka_topic, options={"compression.type": compression})
    rows = [f"{n} {'abc' * (n % 40)} {n * n}" for n in range(20_000)] + [random.Random(1).randbytes(300_000).hex()]
    batch = pa.RecordBatch.from_pydict({"key": [row[:4] for row in rows], "value": rows})
    assert sink.commit(pre_commit(sink, batch)) == CommitOutcome.COMMITTED
    sink.close()
    settled(kafka.bootstrap)
    messages = read({**kafka.client_options(), "check.crcs": True}, kafka_topic)
    assert sorted((message.value() or b"").decode() for message in messages) == sorted(rows)


def test_rows_may_name_their_topics(kafka: KafkaService, kafka_topic: str) -> None:
    with kafka.topic(partitions=1) as other:
        sink = sink_of(kafka, kafka_topic, name="two topics")
        batch = pa.RecordBatch.from_pydict({"value": ["a", "b", "c"], "topic": [other, None, kafka_topic]})
        sink.check(batch.schema)
        assert sink.commit(pre_commit(sink, batch)) == CommitOutcome.COMMITTED
        sink.close()
        assert values(kafka, kafka_topic) == ["b", "c"]
        assert values(kafka, other) == ["a"]


@pytest.mark.parametrize("name", [None, "", "a b", "..", "x" * 250, "tägig", b"\xff", "__transaction_state"], ids=ascii)
def test_a_row_without_topic_is_refused(kafka: KafkaService, kafka_topic: str, name: str | bytes | None) -> None:
    """An empty name is none, and does not stand for the sink's own topic."""
    sink = sink_of(kafka, None if name is None else kafka_topic, name="no topic")
    raw = pa.array([kafka_topic.encode(), name.encode() if isinstance(name, str) else name], pa.binary())
    batch = pa.RecordBatch.from_pydict({"value": ["a", "b"], "topic": raw.view(pa.string())})
    with pytest.raises(BadValue, match=r"row 2 of a batch: .*(is no name of a topic|the sink has no topic)"):
        pre_commit(sink, batch)
    sink.close()
    assert values(kafka, kafka_topic, isolation="read_uncommitted") in ([], ["a"])
    assert values(kafka, kafka_topic) == []


def test_keys_go_where_java_clients_put_them(kafka: KafkaService, kafka_topic: str, sink: KafkaSink) -> None:
    """Murmur2 of the key modulo three partitions, as computed by Kafka's own org.apache.kafka.common.utils.Utils."""
    hashes = {"21": -973932308, "foobar": -790332482, "a-little-bit-long-string": -985981536}
    keys = {key: (hash & 0x7FFFFFFF) % 3 for key, hash in hashes.items()}
    batch = pa.RecordBatch.from_pydict({"key": list(keys), "value": list(keys)})
    sink.commit(pre_commit(sink, batch))
    settled(kafka.bootstrap)
    partitions = {(m.key() or b"").decode(): m.partition() for m in read(kafka.client_options(), kafka_topic)}
    assert partitions == keys


def test_a_full_queue_waits_and_keeps_the_order(kafka: KafkaService) -> None:
    with kafka.topic(partitions=1) as topic:
        sink = sink_of(kafka, topic, options={"queue.buffering.max.kbytes": 64, "batch.size": 3000})
        rows = [f"{i:05d}" for i in range(20_000)]
        committable = pre_commit(sink, *[texts(*rows[i : i + 5000]) for i in range(0, len(rows), 5000)])
        assert sink.commit(committable) == CommitOutcome.COMMITTED
        sink.close()
        settled(kafka.bootstrap)
        assert [(m.value() or b"").decode() for m in read(kafka.client_options(), topic)] == rows


def test_at_least_once_is_visible_at_once(kafka: KafkaService, kafka_topic: str, sink: KafkaSink) -> None:
    sink.commit_directly(begun(sink, texts("a", "b")))
    assert values(kafka, kafka_topic) == ["a", "b"]
    assert list(sink.in_doubt("job")) == []


def test_a_serializer_makes_the_value(kafka: KafkaService, kafka_topic: str) -> None:
    def shout() -> Any:
        return lambda value, about: f"{about.topic}:{value['word'].upper()}".encode()

    sink = sink_of(kafka, kafka_topic, value_serializer=shout)
    batch = pa.RecordBatch.from_pydict({"value": pa.array([{"word": "a"}, None])})
    sink.check(batch.schema)
    sink.commit(pre_commit(sink, batch))
    sink.close()
    assert values(kafka, kafka_topic) == ["", f"{kafka_topic}:A"]


def test_a_value_that_the_serializer_refuses(kafka: KafkaService, kafka_topic: str) -> None:
    def picky() -> Any:
        def serialize(value: str, context: SerializationContext) -> bytes:
            if value == "b":
                raise KeyError("word")
            return value.encode()

        return serialize

    sink = sink_of(kafka, kafka_topic, value_serializer=picky)
    with pytest.raises(BadValue, match=r"row 2 of a batch: the serializer refuses column `value`.*word"):
        pre_commit(sink, texts("a", "b"))
    sink.close()


# ---------------------------------------------------------------------- checks before the first batch
@pytest.mark.parametrize(
    ("kind", "hint"),
    [(pa.int64(), "cast it to string"), (pa.struct([("id", pa.int64())]), "value_format='json' writes it as JSON")],
    ids=str,
)
def test_a_value_that_is_no_text_and_what_makes_one_of_it(sink: KafkaSink, kind: pa.DataType, hint: str) -> None:
    with pytest.raises(SchemaMismatch, match=rf"column `value` is .*, and must be string or binary; {hint}"):
        sink.check(pa.schema([("value", kind)]))


def test_all_that_is_wrong_with_the_columns_is_named_at_once(sink: KafkaSink) -> None:
    schema = pa.schema([("key", pa.int64()), ("valeu", pa.string()), ("partition", pa.string())])
    with pytest.raises(SchemaMismatch) as caught:
        sink.check(schema)
    for part in (
        "no column `value`",
        "`key` is int64",
        "drop `valeu`, or",
        "='json' makes it",
        "`partition` is string",
    ):
        assert part in str(caught.value)


def test_two_jobs_that_start_at_once_with_sinks_of_one_name(
    kafka: KafkaService, kafka_topic: str, sink: KafkaSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each begins a transaction to see that it may, under an id that has no job in it, and fences the other."""
    add_offset, others = GroupMemory.add_offset, [sink_of(kafka, kafka_topic) for _ in range(3)]

    def amid(*about: Any, **more: Any) -> Any:
        if others:
            with closing(others.pop()) as other:
                other.check(TEXTS)
        return add_offset(*about, **more)

    monkeypatch.setattr(GroupMemory, "add_offset", amid)
    sink.check(TEXTS)
    assert others == []


def test_a_missing_topic(kafka: KafkaService) -> None:
    sink = sink_of(kafka, "no-such-topic")
    with pytest.raises(ConfigurationError, match=r"no topic 'no-such-topic'.*create_topic=True"):
        sink.check(TEXTS)
    sink.close()


def test_a_missing_topic_is_created_on_request(kafka: KafkaService, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the brokers answer that another of them is the controller, or not in time."""
    sink = sink_of(kafka, f"made-{time.time_ns()}", create_topic=True)
    create, errors = Topics.create, [NotControllerError("moved"), RequestTimedOutError("late")]

    def late(self: Topics, name: str) -> None:
        if errors:
            raise errors.pop()
        create(self, name)

    monkeypatch.setattr(Topics, "create", late)
    sink.check(TEXTS)
    assert errors == []
    assert sink.commit(pre_commit(sink, texts("a"))) == CommitOutcome.COMMITTED
    sink.close()
    assert sink.topic
    assert values(kafka, sink.topic) == ["a"]
    admin = kafka.admin()
    admin.delete_topics([sink.topic])[sink.topic].result(120)


def test_a_timeout_above_the_brokers_limit(kafka: KafkaService, kafka_topic: str) -> None:
    sink = sink_of(kafka, kafka_topic, transaction_timeout=901)
    with pytest.raises(ConfigurationError, match=r"transaction\.max\.timeout\.ms"):
        sink.check(TEXTS)
    sink.close()


def test_nobody_listens_at_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    clients = list[object]()

    class Counted(Client):
        def __init__(self, *arguments: Any) -> None:
            clients.append(self)
            super().__init__(*arguments)

    monkeypatch.setattr("sinks.kafka.connection.Client", Counted)
    sink = KafkaSink("127.0.0.1:9", "t", timeout=2)
    with pytest.raises(ConfigurationError, match=r"127\.0\.0\.1:9 cannot be asked: .*does not answer: check that all"):
        sink.check(TEXTS)
    assert len(clients) == 1, "each of them tries for one timeout"
    sink.close()


def test_brokers_that_are_not_reached_leave_no_thread_and_no_open_file(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "kafka")  # what is logged holds the socket that was refused

    def left() -> tuple[int, int]:
        gc.collect()
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    before = left()
    for _ in range(3):
        sink = KafkaSink("127.0.0.1:9", "t", timeout=0.1)
        with pytest.raises(ConfigurationError, match="cannot be asked"):
            sink.check(TEXTS)
        sink.close()
    eventually(lambda: all(now <= then for now, then in zip(left(), before, strict=True)))


def test_brokers_that_are_down_are_named_and_what_to_do() -> None:
    with KafkaServer() as server:
        sink = sink_of(server, "orders", create_topic=True)
        sink.check(TEXTS)
        committable = pre_commit(sink, texts("a"))
        sink._access.timeout = 1
        sink._brokers.net.timeout_ms = 1000
        server.kill()
        calls: list[Callable[[], object]] = [
            lambda: sink.validate_all(Checkpoint("job", LINEAGE, 0), [committable]),
            lambda: sink.commit(committable),
            lambda: list(sink.in_doubt("job")),
        ]
        for call in calls:
            with pytest.raises(KafkaError, match=f"{server.bootstrap} does not answer: check that all of them run"):
                call()
        with pytest.raises(RuntimeError, match=f"{server.bootstrap} does not answer: check that all of them run"):
            begun(sink)
        sink.close()


@pytest.mark.parametrize("name", ["transactional.id", "acks", "transaction.timeout.ms", "bootstrap.servers"])
def test_options_that_are_the_sinks(name: str) -> None:
    with pytest.raises(ConfigurationError, match=name):
        KafkaSink("localhost:9092", "t", options={name: "1"})


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("retries", 1, r"there is no option retries: there are batch\.size, .* client_options={…} takes"),
        ("compression.type", "brotli", "compression.type is one of none, gzip, snappy, lz4, zstd, not 'brotli'"),
        ("partitioner", "fnv1a", "partitioner is not to be set: .*murmur2.* a column `partition`"),
        ("batch.size", "1 MB", "batch.size is a whole number above 0"),
    ],
)
def test_options_that_cannot_be(option: str, value: object, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        KafkaSink("localhost:9092", "t", options={option: value})


@pytest.mark.parametrize("seconds", [0.5, 3e6, float("inf"), float("nan")])
def test_a_timeout_that_brokers_cannot_be_told(seconds: float) -> None:
    with pytest.raises(ConfigurationError, match="transaction_timeout must be"):
        KafkaSink("localhost:9092", "t", transaction_timeout=seconds)


def test_linger_changes_nothing_and_the_log_says_why(
    kafka: KafkaService, kafka_topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    sink = sink_of(kafka, kafka_topic, options={"linger.ms": 5})
    sink.check(TEXTS)
    assert sink.commit(pre_commit(sink, texts("a"))) == CommitOutcome.COMMITTED
    assert values(kafka, kafka_topic) == ["a"]
    sink.close()
    (told,) = [record for record in caplog.records if record.name == "sinks.kafka.options"]
    assert told.getMessage() == (
        "the option linger.ms changes nothing: a record batch is sent when it is full (batch.size) or the task ends"
    )
    assert told.levelno == logging.WARNING


def test_certificates_that_cannot_be_read() -> None:
    sink = KafkaSink("localhost:9092", "t", options={"security.protocol": "SSL", "ssl.ca.location": "/no/such/file"})
    with pytest.raises(ConfigurationError, match=r"cannot be read: .*No such file"):
        sink.check(TEXTS)


def test_a_token_that_cannot_be_had_now_is_asked_for_again() -> None:
    """kafka-python fails for good with what the function raises."""
    tokens = [("a token", 60.0)]
    options = {"sasl.mechanism": "OAUTHBEARER", "oauth_cb": lambda _: tokens.pop()}
    provider = client_options("b:1", options, {})["sasl_oauth_token_provider"]
    assert provider.token() == "a token"
    with pytest.raises(KafkaError, match=r"oauth_cb gave no token: IndexError") as error:
        provider.token()
    assert is_passing(error.value)


def test_the_password_is_in_no_representation(kafka: KafkaService) -> None:
    sink = KafkaSink("h:1", "t", options={"sasl.password": "secret"})
    assert "secret" not in repr(sink)


def test_a_password_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    connected = Cluster({"bootstrap_servers": ["127.0.0.1:1"], "sasl_plain_password": "secret"}, 1)
    with pytest.raises(KafkaError):
        connected.cluster_id()
    login = SaslAuthenticateRequest(version=2, auth_bytes=b"app\0app\0secret")
    parser = KafkaProtocol()
    parser.send_request(login)
    parser.send_bytes()
    logging.getLogger("kafka.net.connection").debug("%s Request %d: %s", connected, 1, login)
    assert "secret" not in caplog.text
    logging.getLogger("kafka.net.connection").warning("%s failed", SaslAuthenticationFailedError())
    assert "SaslAuthenticationFailed" in caplog.text


def test_certificates_are_named_in_one_place() -> None:
    both = {"security.protocol": "SSL", "ssl.ca.location": "/etc/ca.pem"}, {"ssl_cafile": "/etc/ca.pem"}
    with pytest.raises(ConfigurationError, match=r"ssl\.ca\.location of options and ssl_cafile of client_options both"):
        client_options("broker:9092", *both)
    with pytest.raises(ConfigurationError, match=r"enable\.ssl\.certificate\.verification of options and ssl_cafile"):
        client_options("broker:9092", {"enable.ssl.certificate.verification": "false"}, both[1])
    made = client_options("broker:9092", {"security.protocol": "SSL"}, both[1])
    assert "ssl_context" not in made
    assert client_options("broker:9092", both[0], {"ssl_context": made})["ssl_context"] is made


# ---------------------------------------------------------------------- what the broker does not take
@pytest.mark.parametrize("where", ["producer", "topic"])
def test_a_record_too_large(kafka: KafkaService, where: str) -> None:
    with kafka.topic(config={"max.message.bytes": "2000"} if where == "topic" else {}) as topic:
        sink = sink_of(kafka, topic, options={} if where == "topic" else {"message.max.bytes": 2000})
        with pytest.raises(BadValue, match="MESSAGE_SIZE_TOO_LARGE"):
            pre_commit(sink, texts("small", "x" * 3000, "small"))
        assert list(sink.in_doubt("job")) == []
        sink.close()
        assert values(kafka, topic) == []


def test_a_partition_that_is_not_there(sink: KafkaSink) -> None:
    batch = pa.RecordBatch.from_pydict({"value": ["a", "b"], "partition": pa.array([0, 3], pa.int32())})
    with pytest.raises(SinkError, match=r"no such partition|no partition 3"):
        pre_commit(sink, batch)


@pytest.mark.parametrize("accepted", [False, True], ids=["write", "write_good_rows"])
def test_partitions_that_become_more_meanwhile(kafka: KafkaService, accepted: bool) -> None:
    with kafka.topic(partitions=3) as topic:
        sink = sink_of(kafka, topic)
        transaction = begun(sink, numbered(2))
        admin = kafka.admin()
        admin.create_partitions([NewPartitions(topic, 8)])[topic].result(120)
        eventually(lambda: len((sink._brokers.topics.describe(topic) or {})["partitions"]) == 8)
        if accepted:
            assert list(sink.write_good_rows(transaction, numbered(7), 1)) == []
        else:
            sink.write(transaction, numbered(7))
        with pytest.raises(BadValue, match="no partition 8, which a row asks for: it has 8"):
            sink.write(transaction, numbered(8))
        assert sink.commit(sink.pre_commit(transaction)) == CommitOutcome.COMMITTED
        settled(kafka.bootstrap)
        placed = {message.partition(): message.value() for message in read(kafka.client_options(), topic)}
        assert placed == {2: b"2", 7: b"7"}
        sink.close()


@pytest.mark.parametrize("may_ask", [True, False], ids=["limit", "no permission to ask for it"])
def test_small_records_that_are_too_large_together(
    kafka: KafkaService, may_ask: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = sink_of(kafka, None, name="together")
    if not may_ask:
        monkeypatch.setattr(Topics, "largest_batch", lambda *_: None)
    with kafka.topic(partitions=20, config={"max.message.bytes": "2000"}) as topic:
        rows = pa.RecordBatch.from_pydict({"value": ["x" * 50] * 300, "topic": [topic] * 300})
        if may_ask:
            assert sink.commit(pre_commit(sink, *[rows] * 20)) == CommitOutcome.COMMITTED
            assert len(values(kafka, topic)) == 6000
        else:
            with pytest.raises(BadValue, match=r"options=\{'batch.size': …\}.*MESSAGE_SIZE_TOO_LARGE"):
                pre_commit(sink, *[rows] * 20)
    sink.close()


def test_a_topic_that_is_deleted_meanwhile(kafka: KafkaService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(written_topics, "LOOK_INTERVAL", 0.5)
    with kafka.topic() as topic:
        sink = sink_of(kafka, topic, name="deleted")
        transaction = begun(sink, texts("a"))
        transaction.flush(60)
        admin = kafka.admin()
        admin.delete_topics([topic])[topic].result(120)
        time.sleep(1)
        with pytest.raises(ConfigurationError, match=f"topic '{topic}' was deleted while rows went there"):
            go_on(transaction, texts("b"))
        sink.rollback(transaction)
        sink.close()
        admin.create_topics([NewTopic(topic, 1)])[topic].result(120)  # for the fixture to delete


def test_a_transaction_that_another_attempt_has_fenced(kafka: KafkaService, kafka_topic: str, sink: KafkaSink) -> None:
    """A zombie task: its successor in the same slot has begun."""
    zombie = begun(sink, texts("zombie"))
    zombie.flush(60)
    successor = begun(sink, texts("successor"))
    with pytest.raises(RuntimeError, match=r"taken its place|not taken"):
        go_on(zombie, texts("zombie again"))
    sink.rollback(zombie)
    assert sink.commit(sink.pre_commit(successor)) == CommitOutcome.COMMITTED
    assert values(kafka, kafka_topic) == ["successor"]


def answer_fences(monkeypatch: pytest.MonkeyPatch, fences: bool) -> None:
    """As a cluster where an operator has raised transaction.version to 2, or has not."""

    async def answer(_: Cluster) -> bool:
        return fences

    monkeypatch.setattr(Cluster, "_fences", answer)


@pytest.mark.parametrize("fences", [True, False], ids=["fenced by EndTxn", "fenced by InitProducerId"])
def test_an_aborted_task_cannot_go_on(
    kafka: KafkaService, kafka_topic: str, sink: KafkaSink, fences: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped task whose transaction was swept wakes up and writes to a partition that it had not touched: it must
    not come through with half of its records."""
    answer_fences(monkeypatch, fences)
    zombie = begun(sink, numbered(0))
    zombie.flush(60)
    (identity,) = sink.in_doubt("job")
    sink.abort(identity)
    sink.write(zombie, numbered(1))
    with pytest.raises(RuntimeError, match=r"not taken|ended this transaction"):
        sink.pre_commit(zombie)
    sink.rollback(zombie)
    settled(kafka.bootstrap)
    assert list(sink.in_doubt("job")) == []
    assert values(kafka, kafka_topic) == []


LARGE = pytest.mark.large


@pytest.fixture(
    scope="module",
    params=["not finalised", pytest.param("3.9.1", marks=LARGE), pytest.param("3.3.2", marks=LARGE)],
)
def upgraded(request: pytest.FixtureRequest) -> Iterator[KafkaServer]:
    """A cluster that came from Kafka 3, where nobody has raised transaction.version yet; and Kafka 3. Both take only
    short transactions."""
    old, short = request.param != "not finalised", {"transaction.max.timeout.ms": "30000"}
    how: dict[str, Any] = {"version": request.param} if old else {"features": {"transaction.version": "0"}}
    with KafkaServer(short, **how) as server:
        yield server


def test_a_cluster_that_was_upgraded_and_not_finalised(upgraded: KafkaServer) -> None:
    with upgraded.topic(partitions=3) as topic:
        sink = sink_of(upgraded, topic, transaction_timeout=20)
        sink.check(TEXTS)
        committed = pre_commit(sink, texts("a"))
        for _ in range(2):
            assert outcome(sink, committed) == CommitOutcome.COMMITTED
        with pytest.raises(CommittedError):
            sink.abort(committed.transaction)
        expect_fenced(sink, sink)
        aborted = pre_commit(sink, texts("b"))
        for _ in range(2):
            sink.abort(aborted.transaction)
        assert outcome(sink, aborted).state is CommitState.LOST
        assert list(sink.in_doubt("job")) == []
        assert values(upgraded, topic) == ["a"]
        sink.close()


def test_what_a_zombie_writes_after_its_abort_is_not_ended_by_the_next_transaction(upgraded: KafkaServer) -> None:
    """Kafka before 3.6 takes it, in a transaction that no coordinator knows of; with the next commit of this
    transactional id it would be visible."""
    with upgraded.topic(partitions=1) as topic:
        driver, task = (
            sink_of(upgraded, topic, transaction_timeout=20),
            sink_of(upgraded, topic, transaction_timeout=20),
        )
        zombie = begun(task, texts("zombie"))
        zombie.flush(60)
        (identity,) = driver.in_doubt("job")
        driver.abort(identity)
        with suppress(RuntimeError):
            zombie.write(texts("late"))
            zombie.flush(60)
        made = pre_commit(driver, texts("a"), checkpoint=1)
        assert made.transaction["transactional_id"] == identity["transactional_id"]
        if outcome(driver, made).state is CommitState.LOST:
            assert outcome(driver, pre_commit(driver, texts("a"), checkpoint=1, slot=1)) == CommitOutcome.COMMITTED
        assert values(upgraded, topic) == ["a"]
        for each in (driver, task):
            each.close()


@pytest.mark.parametrize("overtaken", [False, True])
def test_an_abort_with_requests_under_way(
    upgraded: KafkaServer, overtaken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a killed task that rolls back when the next attempt, under the same id, has pre-committed; or before."""
    monkeypatch.setattr(producer, "_SETTLE_TIMEOUT", 0.1)
    with upgraded.topic(partitions=1) as topic, closing(sink_of(upgraded, topic, transaction_timeout=20)) as sink:
        killed = begun(sink, texts("killed"))
        with monkeypatch.context() as deaf:
            deaf.setattr(killed, "_hear", lambda timeout: time.sleep(timeout))
            with pytest.raises(KafkaTimeoutError, match="not acknowledged in time"):
                killed.flush(0.2)
            newer = pre_commit(sink, texts("next")) if overtaken else None
            killed.abort(60)
        assert list(sink.in_doubt("job")) == ([newer.transaction] if newer else [])
        with pytest.raises(RuntimeError, match=r"taken its place|not taken"):
            go_on(killed, texts("late"))
        if newer:
            assert outcome(sink, newer) == CommitOutcome.COMMITTED
        assert values(upgraded, topic) == ["next"] * overtaken


@pytest.mark.parametrize("fences", [True, False], ids=["fenced by EndTxn", "fenced by InitProducerId"])
def test_a_late_abort_does_not_touch_the_transaction_that_has_the_id_now(
    sink: KafkaSink, fences: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """InitProducerId with the listed id and epoch would: the coordinator compares no epoch with that of an open one."""
    answer_fences(monkeypatch, fences)
    before = pre_commit(sink, texts("before"))
    now = pre_commit(sink, texts("now"))
    sink.abort(before.transaction)
    assert list(sink.in_doubt("job")) == [dict(now.transaction)]
    assert outcome(sink, now) == CommitOutcome.COMMITTED


# ---------------------------------------------------------------------- what became of it
def next_in_slot(sink: KafkaSink) -> None:
    """The pooled id is used again: the coordinator forgets what was before."""
    sink.rollback(begun(sink, texts("next")))


@pytest.mark.parametrize("again", [False, True], ids=["remembered", "forgotten"])
def test_committed_stays_committed(sink: KafkaSink, again: bool) -> None:
    committable = pre_commit(sink, texts("a"))
    assert sink.commit(committable) == CommitOutcome.COMMITTED
    if again:
        next_in_slot(sink)
    assert outcome(sink, committable) == CommitOutcome.COMMITTED


@pytest.mark.parametrize("again", [False, True], ids=["remembered", "forgotten"])
def test_aborted_stays_lost(sink: KafkaSink, again: bool) -> None:
    committable = pre_commit(sink, texts("a"))
    sink.abort(committable.transaction)
    if again:
        next_in_slot(sink)
    answer = outcome(sink, committable)
    assert answer.state is CommitState.LOST
    assert "aborted" in answer.reason


def test_what_was_lost_is_not_written_again_to_another_topic(kafka: KafkaService, sink: KafkaSink) -> None:
    """The sink was given another one while a checkpoint was in doubt."""
    elsewhere = sink_of(kafka, "others", name=sink.name)
    lost, whole = pre_commit(sink, texts("a")), pre_commit(sink, texts("b"), subtask=1)
    sink.abort(lost.transaction)
    answer = outcome(elsewhere, lost)
    assert answer.state is CommitState.UNKNOWN
    assert f"written for topic {sink.topic!r}, and the sink writes to topic 'others' now" in answer.reason
    assert outcome(elsewhere, whole) == CommitOutcome.COMMITTED
    assert outcome(sink, lost).state is CommitState.LOST
    elsewhere.close()


def test_a_transaction_whose_time_is_up_is_lost(kafka: KafkaService, kafka_topic: str) -> None:
    sink = sink_of(kafka, kafka_topic, transaction_timeout=5)
    again = Retrying(stop=stop_after_delay(120), reraise=True)  # on a busy machine it may be up before
    committable = again(lambda: pre_commit(sink, texts("a")))
    eventually(lambda: not list(sink.in_doubt("job")))
    assert outcome(sink, committable).state is CommitState.LOST
    sink.close()
    assert values(kafka, kafka_topic) == []


def test_abort_of_a_committed_one_raises_even_when_asked_late(sink: KafkaSink) -> None:
    committable = pre_commit(sink, texts("a"))
    sink.commit(committable)
    with pytest.raises(CommittedError):
        sink.abort(committable.transaction)


def forgotten(sink: KafkaSink, *, commit: bool) -> Committable:
    committable = pre_commit(sink, texts("a"))
    if commit:
        sink.commit(committable)
    else:
        sink.abort(committable.transaction)
    next_in_slot(sink)
    return committable


@pytest.mark.parametrize("commit", [True, False])
def test_unknown_when_retention_has_taken_the_witness(kafka: KafkaService, sink: KafkaSink, commit: bool) -> None:
    committable = forgotten(sink, commit=commit)
    settled(kafka.bootstrap)
    proof = committable.proof
    delete_records(kafka, proof["topic"], proof["partition"], proof["offset"] + 1)
    answer = outcome(sink, committable)
    assert answer.state is CommitState.UNKNOWN
    assert "retention" in answer.reason


def delete_records(kafka: KafkaService, topic: str, partition: int, end: int) -> None:
    at, admin = TopicPartition(topic, partition, end), kafka.admin()
    admin.delete_records([at])[at].result(120)


def test_lost_by_deleted_records_stays_lost(kafka: KafkaService, sink: KafkaSink) -> None:
    """Its answer may come to nobody: the driver dies, or another participant cannot be asked yet."""
    committable = pre_commit(sink, texts("a"))
    delete_records(kafka, sink.topic or "", committable.proof["partition"], committable.proof["offset"] + 1)
    for _ in range(2):
        answer = outcome(sink, committable)
        assert (answer.state, "abort" in answer.reason) == (CommitState.LOST, True)


@pytest.mark.parametrize("commit", [True, False])
def test_any_partition_has_a_witness(kafka: KafkaService, sink: KafkaSink, commit: bool) -> None:
    committable = pre_commit(sink, numbered(0), numbered(1))
    sink.commit(committable) if commit else sink.abort(committable.transaction)
    next_in_slot(sink)
    settled(kafka.bootstrap)
    assert committable.proof["partition"] == 0
    delete_records(kafka, sink.topic or "", 0, committable.proof["offset"] + 1)
    assert outcome(sink, committable).state is (CommitState.COMMITTED if commit else CommitState.LOST)


def test_a_topic_without_rows_of_the_transaction_may_be_deleted(kafka: KafkaService) -> None:
    with kafka.topic(partitions=1) as default, kafka.topic(partitions=1) as named:
        sink = sink_of(kafka, default)
        committable = pre_commit(sink, pa.RecordBatch.from_pydict({"value": ["a"], "topic": [named]}))
        assert list(committable.proof["topic_ids"]) == [named]
        sink.close()


@pytest.mark.parametrize("commit", [True, False])
def test_unknown_when_another_record_stands_there(kafka: KafkaService, sink: KafkaSink, commit: bool) -> None:
    """The topic was made anew."""
    committable = forgotten(sink, commit=commit)
    stranger = pre_commit(sink, *[texts(f"s{i}", f"t{i}") for i in range(10)], subtask=5)
    sink.commit(stranger)
    moved = Committable(committable.transaction, stranger.proof)
    answer = outcome(sink, moved)
    assert (answer.state, answer.expired) == (CommitState.UNKNOWN, False)
    assert "not its record" in answer.reason


def test_unknown_when_compaction_has_taken_the_witness(sink: KafkaSink, monkeypatch: pytest.MonkeyPatch) -> None:
    committable = forgotten(sink, commit=True)
    monkeypatch.setattr(commit, "_batch_at", lambda *_: None)
    answer = outcome(sink, committable)
    assert (answer.state, answer.expired) == (CommitState.UNKNOWN, True)


def test_unknown_on_another_cluster(sink: KafkaSink) -> None:
    committable = forgotten(sink, commit=True)
    elsewhere = Committable(committable.transaction, {**committable.proof, "cluster": "another"})
    assert sink.commit(elsewhere).state is CommitState.UNKNOWN


def test_a_transaction_of_the_same_name_on_another_cluster_is_not_ended(sink: KafkaSink) -> None:
    """Ids and epochs are small numbers: two clusters of one job may well have the same ones."""
    here = pre_commit(sink, texts("a"))
    elsewhere = Committable(here.transaction, {**here.proof, "cluster": "another"})
    answer = sink.commit(elsewhere)
    assert answer.state is CommitState.UNKNOWN
    assert "was written to the cluster another" in answer.reason
    assert list(sink.in_doubt("job")) == [dict(here.transaction)]


def test_asked_again_while_a_stray_transaction_holds_up_readers(kafka: KafkaService) -> None:
    """R7: the witness lies behind somebody's open transaction, so nobody can tell yet."""
    with kafka.topic(partitions=1) as topic:
        sink = sink_of(kafka, topic)
        stray = pre_commit(sink, texts("stray"), subtask=7)
        committable = forgotten(sink, commit=True)
        with pytest.raises(NotYetKnown, match="last stable offset"):
            sink.commit(committable)
        sink.abort(stray.transaction)
        assert outcome(sink, committable) == CommitOutcome.COMMITTED
        sink.close()


def test_outcomes_of_many_in_one_call(kafka: KafkaService, kafka_topic: str, sink: KafkaSink) -> None:
    committables = [pre_commit(sink, texts(f"v{i}"), subtask=i) for i in range(4)]
    sink.abort(committables[2].transaction)
    settled(kafka.bootstrap)
    outcomes = sink.notify_checkpoint_complete(Checkpoint("job", LINEAGE, 0), committables)
    states = [answer.state if isinstance(answer, CommitOutcome) else answer for answer in outcomes]
    assert states == [CommitState.COMMITTED, CommitState.COMMITTED, CommitState.LOST, CommitState.COMMITTED]
    assert values(kafka, kafka_topic) == ["v0", "v1", "v3"]


def test_r5_a_pooled_id_names_each_transaction_by_its_epoch(
    kafka: KafkaService, kafka_topic: str, sink: KafkaSink
) -> None:
    """What is decided about the one before must not touch the one that has the id now."""
    before = pre_commit(sink, texts("before"))
    sink.abort(before.transaction)
    settled(kafka.bootstrap)
    now = pre_commit(sink, texts("now"))
    assert before.transaction["transactional_id"] == now.transaction["transactional_id"]
    assert dict(before.transaction) != dict(now.transaction)
    assert outcome(sink, before).state is CommitState.LOST
    sink.abort(before.transaction)
    assert list(sink.in_doubt("job")) == [dict(now.transaction)]
    assert sink.commit(now) == CommitOutcome.COMMITTED
    assert values(kafka, kafka_topic) == ["now"]


def test_an_epoch_that_runs_over(kafka: KafkaService, kafka_topic: str, sink: KafkaSink) -> None:
    """Each checkpoint raises the epoch of a pooled id twice; near 32,767 the broker hands out another producer id."""
    if kafka.unmanaged:
        pytest.skip(kafka.unmanaged)
    first = pre_commit(sink, texts("first"))
    assert sink.commit(first) == CommitOutcome.COMMITTED
    settled(kafka.bootstrap)
    sink.close()
    _raise_epoch_to(32_756, kafka, first.transaction["transactional_id"])
    seen = []
    for number in range(8):
        committable = pre_commit(sink, texts(f"v{number}"))
        seen.append((committable.transaction["producer_id"], committable.transaction["producer_epoch"]))
        assert outcome(sink, committable) == CommitOutcome.COMMITTED
        assert outcome(sink, committable) == CommitOutcome.COMMITTED
    assert len(set(seen)) == len(seen)
    assert seen[0] > (first.transaction["producer_id"], 32_756)
    assert seen[0][0] == first.transaction["producer_id"] != seen[-1][0]
    assert values(kafka, kafka_topic) == sorted(["first", *(f"v{number}" for number in range(8))])
    assert outcome(sink, first) == CommitOutcome.COMMITTED


def _raise_epoch_to(epoch: int, kafka: KafkaService, transactional_id: str) -> None:
    """In the coordinator's log, from which it starts anew: thousands of calls would leave it so, in half a minute."""
    options = kafka.client_options()
    *_, last = (
        record
        for record in read(options, "__transaction_state")
        if (record.key() or b"").endswith(transactional_id.encode())
    )
    state = bytearray(last.value() or b"")
    state[10:12] = epoch.to_bytes(2, "big")  # behind its version and the producer id
    producer = Producer(options | {"client.id": "__admin_client"})  # the one that may write there
    producer.produce("__transaction_state", bytes(state), last.key(), last.partition() or 0)
    assert producer.flush(120) == 0
    kafka.kill()
    kafka.start()


# ---------------------------------------------------------------------- topics that are made anew
def test_a_topic_made_anew_after_the_pre_commit_is_lost_and_written_again(
    kafka: KafkaService, kafka_topic: str, sink: KafkaSink
) -> None:
    """EndTxn would be answered with success, and all records of the checkpoint were gone with the old topic."""
    committables = [pre_commit(sink, texts(f"row {n}"), subtask=n) for n in range(2)]
    anew(kafka, kafka_topic)
    for answer in sink.commit_all(Checkpoint("job", "l", 0), committables):
        assert isinstance(answer, CommitOutcome)
        assert answer.state is CommitState.LOST
        assert "deleted and made anew" in answer.reason
    replay = [pre_commit(sink, texts(f"row {n}"), subtask=n) for n in range(2)]
    assert list(sink.commit_all(Checkpoint("job", "l", 0), replay)) == [CommitOutcome.COMMITTED] * 2
    assert values(kafka, kafka_topic) == ["row 0", "row 1"]


def test_a_topic_that_is_deleted_while_rows_go_there_is_told(
    kafka: KafkaService, kafka_topic: str, sink: KafkaSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(written_topics, "LOOK_INTERVAL", 0.5)
    transaction = begun(sink, texts("a"))
    transaction.flush(120)
    anew(kafka, kafka_topic, create=False)
    sink.write(transaction, texts("b"))
    with pytest.raises(ConfigurationError, match=f"topic '{kafka_topic}' was deleted while rows went there"):
        sink.pre_commit(transaction)
    sink.rollback(transaction)


def test_one_of_several_topics_made_anew_takes_the_transaction_with_it(kafka: KafkaService) -> None:
    with kafka.topic() as first, kafka.topic() as second:
        sink = sink_of(kafka, None)
        rows = pa.RecordBatch.from_pylist([{"value": "a", "topic": first}, {"value": "b", "topic": second}])
        committable = pre_commit(sink, rows)
        assert set(committable.proof["topic_ids"]) == {first, second}
        anew(kafka, second)
        assert sink.commit(committable).state is CommitState.LOST
        assert values(kafka, first) == []
        assert sink.commit(pre_commit(sink, rows)) == CommitOutcome.COMMITTED
        assert values(kafka, first) == ["a"]
        assert values(kafka, second) == ["b"]
        sink.close()


def test_a_deleted_topic_is_asked_for_until_it_is_created(
    kafka: KafkaService, kafka_topic: str, sink: KafkaSink
) -> None:
    committable = pre_commit(sink, texts("a"))
    anew(kafka, kafka_topic, create=False)
    with pytest.raises(NotYetKnown, match="there is no topic"):
        sink.commit(committable)
    admin = kafka.admin()
    admin.create_topics([NewTopic(kafka_topic, 1)])[kafka_topic].result(120)
    eventually(lambda: sink._brokers.topics.describe(kafka_topic) is not None)
    assert sink.commit(committable).state is CommitState.LOST


def test_a_topic_that_is_deleted_after_the_commit_is_as_with_any_writer(
    kafka: KafkaService, kafka_topic: str, sink: KafkaSink
) -> None:
    committable = pre_commit(sink, texts("a"))
    assert sink.commit(committable) == CommitOutcome.COMMITTED
    anew(kafka, kafka_topic)
    assert sink.commit(committable) == CommitOutcome.COMMITTED


def test_a_topic_made_anew_is_not_asked_for_a_record_of_the_old_one(
    kafka: KafkaService, kafka_topic: str, sink: KafkaSink
) -> None:
    """Its coordinator knows the next transaction of the id alone, and in an empty topic every record is yet to come."""
    committable = pre_commit(sink, texts("a"))
    assert sink.commit(committable) == CommitOutcome.COMMITTED
    pre_commit(sink, texts("b"))
    anew(kafka, kafka_topic)
    answer = sink.commit(committable)
    assert answer.state is CommitState.UNKNOWN
    assert "deleted and made anew" in answer.reason


def test_a_begin_that_failed_does_not_fence_the_one_after_it(sink: KafkaSink, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its coordinator is told late, when a broker that was asked beside it has failed, and all was asked again."""
    find, fences, tries, told = Connections.coordinators_of, Cluster._fences, itertools.count(), threading.Event()

    async def late(self: Connections, *about: Any) -> Any:
        if next(tries):
            return await find(self, *about)
        try:
            await self.client._loop.sleep(0.5)
            return await find(self, *about)
        finally:
            told.set()

    async def failing(self: Cluster) -> bool:
        monkeypatch.setattr(Cluster, "_fences", fences)
        raise KafkaConnectionError("closed")

    monkeypatch.setattr(Connections, "coordinators_of", late)
    monkeypatch.setattr(Cluster, "_fences", failing)
    committable = pre_commit(sink, texts("a"))
    assert told.wait(120)
    assert sink.commit(committable) == CommitOutcome.COMMITTED


def test_a_topic_made_anew_while_the_commit_is_under_way(
    kafka: KafkaService, kafka_topic: str, sink: KafkaSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = Cluster.commit

    def late(*about: Any, **more: Any) -> Any:
        anew(kafka, kafka_topic)
        return commit(*about, **more)

    committable = pre_commit(sink, texts("a"))
    monkeypatch.setattr(Cluster, "commit", late)
    answer = sink.commit(committable)
    assert answer.state is CommitState.UNKNOWN
    assert "while its topic" in answer.reason


@pytest.mark.parametrize("number", [-1, 2**32])
def test_a_partition_that_cannot_be_is_refused_as_in_sparks_sink(sink: KafkaSink, number: int) -> None:
    rows = pa.RecordBatch.from_pydict({"value": ["a"], "partition": pa.array([number], pa.int64())})
    with pytest.raises(BadValue, match=f"asks for partition {number}, .*null leaves the choice"):
        pre_commit(sink, rows)


def test_a_leader_that_has_lost_what_a_task_has_written_fails_it(upgraded: KafkaServer) -> None:
    """With the power, or to a replica that lagged behind. Such a leader does not know the producer, and takes what
    comes next for the first."""
    with upgraded.topic(partitions=1) as topic, closing(sink_of(upgraded, topic, transaction_timeout=20)) as sink:
        transaction = begun(sink, texts("a", "b"))
        transaction.flush(60)
        upgraded.kill()
        folder = upgraded.broker()._data / f"{topic}-0"
        (folder / f"{0:020d}.log").write_bytes(b"")
        upgraded.start()
        sink.write(transaction, texts("c"))
        with pytest.raises(RuntimeError, match=rf"{topic}-0 has lost records"):
            sink.pre_commit(transaction)
        sink.rollback(transaction)
        assert values(upgraded, topic) == []
