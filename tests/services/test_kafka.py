"""The Kafka brokers that the other tests stand on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Producer, TopicPartition

from sinks.testing.servers.kafka import ExternalKafka, KafkaServer, KafkaService, kafka_service
from tests.kafka.reading import partitions_of


@pytest.fixture(scope="module")
def one_broker(kafka: KafkaService) -> Iterator[KafkaServer]:
    if isinstance(kafka, KafkaServer):
        yield kafka
        return
    with KafkaServer() as server:
        yield server


@pytest.fixture
def server(one_broker: KafkaServer) -> KafkaServer:
    """One broker, to be killed; up again for the next test."""
    one_broker.start()
    return one_broker


@pytest.fixture(scope="module")
def three_brokers() -> Iterator[KafkaServer]:
    with KafkaServer(brokers=3) as server:
        yield server


@pytest.fixture
def three(three_brokers: KafkaServer) -> KafkaServer:
    """Three brokers, to be killed; all up again for the next test."""
    three_brokers.start()
    return three_brokers


@pytest.fixture(scope="module")
def secured() -> Iterator[KafkaServer]:
    with KafkaServer(users=["ann"]) as server:
        yield server


def _produce(service: KafkaService, topic: str, *values: str, user: str | None = None, **options: str) -> None:
    """Returns when each value is acknowledged by all replicas in sync; raises KafkaException when one is not."""
    errors: list[KafkaError] = []
    producer = Producer(service.client_options(user) | {"acks": "all"} | options)
    for value in values:
        producer.produce(topic, value, on_delivery=lambda error, _: errors.append(error) if error else None)
    left = producer.flush(120)
    assert left == 0, f"{left} of {values} were neither acknowledged nor refused within 120 s"
    if errors:
        raise KafkaException(errors[0])


def _read(service: KafkaService, topic: str, count: int, user: str | None = None) -> list[str]:
    """The first `count` committed values of the topic, sorted; fewer when they do not come within two minutes."""
    consumer = Consumer(service.client_options(user) | {"group.id": "tests", "isolation.level": "read_committed"})
    found: list[str] = []
    try:
        consumer.assign([TopicPartition(topic, n, OFFSET_BEGINNING) for n in partitions_of(consumer, topic)])
        deadline = time.monotonic() + 120
        while len(found) < count and time.monotonic() < deadline:
            message = consumer.poll(0.5)
            if message is None:
                continue
            error = message.error()
            if error is None:
                found.append((message.value() or b"").decode())
            elif not error.retriable():
                raise KafkaException(error)
    finally:
        consumer.close()
    return sorted(found)


def _gone(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def _wait_until_gone(*pids: int, seconds: float = 120) -> bool:
    deadline = time.monotonic() + seconds
    while not all(map(_gone, pids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_what_is_produced_is_read(server: KafkaServer) -> None:
    with server.topic(partitions=3) as topic:
        _produce(server, topic, "a", "b", "c")
        assert _read(server, topic, 3) == ["a", "b", "c"]


def test_topics_have_what_was_asked_for_and_are_deleted(server: KafkaServer) -> None:
    with server.topic(partitions=3, config={"max.message.bytes": "1000"}) as topic:
        assert len(server.admin().list_topics(topic).topics[topic].partitions) == 3
        with pytest.raises(KafkaException, match="MSG_SIZE_TOO_LARGE"):
            _produce(server, topic, "x" * 2000)
    assert topic not in server.admin().list_topics().topics


def test_topic_may_be_deleted_by_the_test(server: KafkaServer) -> None:
    with server.topic() as topic:
        admin = server.admin()
        admin.delete_topics([topic])[topic].result(120)


@pytest.mark.parametrize("way", [pytest.param("kill", marks=pytest.mark.large), "pause"])
def test_topic_is_deleted_after_a_test_that_left_the_broker_down(server: KafkaServer, way: str) -> None:
    with server.topic() as topic:
        getattr(server.broker(), way)()
    assert topic not in server.admin().list_topics().topics


def test_topics_are_not_made_by_themselves(server: KafkaServer) -> None:
    with pytest.raises(KafkaException, match="UNKNOWN_TOPIC"):
        _produce(server, "nobody_made_this", "a", **{"topic.metadata.propagation.max.ms": "500"})


@pytest.mark.large
def test_settings_reach_the_broker_and_nothing_is_left_after_exit() -> None:
    with KafkaServer({"transaction.max.timeout.ms": "5000"}) as server:
        home, pid = server.home, server.broker().pid
        assert home.is_dir()
        assert ExternalKafka(server.bootstrap).has({"transaction.max.timeout.ms": "5000"})
        assert not ExternalKafka(server.bootstrap).has({"transaction.max.timeout.ms": "6000"})
        producer = Producer(server.client_options() | {"transactional.id": "t", "transaction.timeout.ms": "6000"})
        with pytest.raises(KafkaException, match="INVALID_TRANSACTION_TIMEOUT"):
            producer.init_transactions(120)
    assert _gone(pid)
    assert not home.exists()


def test_kill_keeps_what_was_acknowledged_and_a_flushed_transaction_open(server: KafkaServer) -> None:
    with server.topic(partitions=3) as topic, server.topic() as other:
        values = sorted(f"{number:04}" for number in range(1000))
        _produce(server, topic, *values)
        producer = Producer(server.client_options() | {"transactional.id": "outlives-the-broker"})
        producer.init_transactions(120)
        producer.begin_transaction()
        producer.produce(other, "a")
        producer.flush(120)
        port, pid = server.broker().port, server.broker().pid
        server.kill()
        assert [server.running, _gone(pid)] == [False, True]
        with pytest.raises(RuntimeError, match=r"call start\(\) first"):
            _ = server.broker().pid

        server.start()
        assert server.running
        assert server.broker().port == port
        assert server.broker().pid != pid
        assert _read(server, topic, 1000) == values
        _produce(server, other, "b")
        producer.commit_transaction(120)
        assert _read(server, other, 2) == ["a", "b"]


@pytest.mark.large
def test_restart_on_the_same_port(server: KafkaServer) -> None:
    with server.topic() as topic:
        _produce(server, topic, "a")
        port, pid = server.broker().port, server.broker().pid
        server.restart()
        assert server.broker().port == port
        assert server.broker().pid != pid
        assert _read(server, topic, 1) == ["a"]


@pytest.mark.large
def test_start_after_the_broker_died_by_itself(server: KafkaServer) -> None:
    os.kill(server.broker().pid, signal.SIGKILL)
    deadline = time.monotonic() + 120
    while server.running and time.monotonic() < deadline:
        time.sleep(0.02)
    server.start()
    assert server.admin().list_topics(timeout=120).brokers.keys() == {1}


def test_start_of_a_running_broker_changes_nothing(server: KafkaServer) -> None:
    pid = server.broker().pid
    server.start()
    assert server.broker().pid == pid


def test_paused_broker_answers_when_it_is_resumed(server: KafkaServer) -> None:
    with server.topic() as topic:
        producer = Producer(server.client_options())
        producer.produce(topic, "a")
        assert producer.flush(120) == 0
        server.broker().pause()
        producer.produce(topic, "b")
        assert producer.flush(2) == 1
        assert server.running
        server.broker().resume()
        assert producer.flush(120) == 0
        assert _read(server, topic, 2) == ["a", "b"]


@pytest.mark.large
def test_paused_broker_can_be_stopped(server: KafkaServer) -> None:
    pid = server.broker().pid
    server.broker().pause()
    server.stop()
    assert _gone(pid)
    server.start()


def test_transaction_that_timed_out_is_aborted(server: KafkaServer) -> None:
    with server.topic() as topic:
        options = {"transactional.id": "times-out", "transaction.timeout.ms": "1000"}
        producer = Producer(server.client_options() | options)
        producer.init_transactions(120)
        producer.begin_transaction()
        producer.produce(topic, "too late")
        producer.flush(120)
        _produce(server, topic, "behind it")
        assert _read(server, topic, 1) == ["behind it"]
        with pytest.raises(KafkaException):
            producer.commit_transaction(120)


def test_unknown_broker_is_told(server: KafkaServer) -> None:
    with pytest.raises(LookupError, match="no broker 2: it runs 1"):
        server.broker(2)


@pytest.mark.large
def test_bad_setting_is_told() -> None:
    with pytest.raises(RuntimeError, match=r"Invalid value none for configuration min\.insync\.replicas"):  # noqa: SIM117
        with KafkaServer({"min.insync.replicas": "none"}):
            pass


def test_broker_that_does_not_come_up_is_told_with_its_log() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)Kafka broker 1 ended by itself.*no\.such\.Authorizer"):  # noqa: SIM117
        with KafkaServer({"authorizer.class.name": "no.such.Authorizer"}):
            pass


@pytest.mark.large  # its watchdog is that of PostgreSQL: test_services.py
@pytest.mark.parametrize("paused", [False, True])
def test_nothing_is_left_after_sigkill_of_the_owner(paused: bool) -> None:
    program = (
        "import sys, time; from sinks.testing.servers.kafka import KafkaServer; server = KafkaServer();"
        "server.start(); server.broker().pause() if 'True' in sys.argv else None;"
        "print(server.broker().pid, server.home, flush=True); time.sleep(600)"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", program, str(paused)], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    )
    try:
        assert owner.stdout is not None
        pid, home = owner.stdout.readline().split()
        processes = [int(pid), *(child.pid for child in psutil.Process(owner.pid).children())]
        assert len(set(processes)) == 2  # the broker and the watchdog
        assert not any(map(_gone, processes))
    finally:
        owner.kill()
        owner.communicate()
    assert _wait_until_gone(*processes)
    assert not Path(home).exists()


# ---------------------------------------------------------------------- three brokers


@pytest.mark.large
def test_three_brokers_survive_the_loss_of_any(three: KafkaServer) -> None:
    with three.topic(partitions=3) as topic:
        assert sorted(partitions_of(three.admin(), topic)[0].replicas) == [1, 2, 3]
        producer = Producer(three.client_options() | {"transactional.id": "survives"})
        producer.init_transactions(120)
        for node in (1, 2, 3):
            producer.begin_transaction()
            producer.produce(topic, f"{node} before")
            producer.flush(120)
            three.broker(node).kill()
            assert not three.running
            producer.produce(topic, f"{node} after")
            producer.commit_transaction(120)
            three.broker(node).start()
        expected = [f"{node} {when}" for node in (1, 2, 3) for when in ("after", "before")]
        assert _read(three, topic, 6) == expected


@pytest.mark.large
def test_three_brokers_need_two(three: KafkaServer) -> None:
    """Acknowledged means that two brokers have it."""
    with three.topic() as topic:
        _produce(three, topic, "a")
        for node in (1, 2):
            three.broker(node).kill()
        with pytest.raises(KafkaException):
            _produce(three, topic, "b", **{"message.timeout.ms": "2000"})
        three.start()
        _produce(three, topic, "c")
        assert "a" in _read(three, topic, 2)


@pytest.mark.large
@pytest.mark.parametrize("way", ["kill", "stop"])
def test_three_brokers_start_again_with_their_data(three: KafkaServer, way: str) -> None:
    with three.topic(partitions=3) as topic:
        values = sorted(f"{number:04}" for number in range(1000))
        _produce(three, topic, *values)
        addresses = [broker.address for broker in three.brokers]
        getattr(three, way)()
        assert not any(broker.running for broker in three.brokers)
        three.start()
        assert [broker.address for broker in three.brokers] == addresses
        found = _read(three, topic, 1000)
        assert [value for value, times in Counter(found).items() if times > 1] == []
        assert found == values


# ---------------------------------------------------------------------- users and permissions


@pytest.mark.large
def test_users_come_in_by_tls_with_their_password(secured: KafkaServer) -> None:
    with secured.topic() as topic:
        secured.allow("ann", "topic", topic, "write")
        _produce(secured, topic, "a", user="ann")
        assert _read(secured, topic, 1) == ["a"]


@pytest.mark.large
@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param({"sasl.password": "wrong"}, id="password"),
        pytest.param({"sasl.username": "bob"}, id="user"),
        pytest.param({"ssl.ca.location": "probe"}, id="certificate"),
        pytest.param({"security.protocol": "PLAINTEXT"}, id="no TLS"),
    ],
)
def test_nobody_else_comes_in(secured: KafkaServer, wrong: dict[str, str]) -> None:
    options = secured.client_options("ann") | {"allow.auto.create.topics": "false"}
    assert Producer(options).list_topics(timeout=120).brokers
    with pytest.raises(KafkaException, match=r"_TRANSPORT|_TIMED_OUT|_AUTHENTICATION"):
        Producer(options | wrong).list_topics(timeout=3)


@pytest.mark.large
def test_users_have_only_the_permissions_they_were_given(secured: KafkaServer) -> None:
    with secured.topic() as topic:
        with pytest.raises(KafkaException, match="TOPIC_AUTHORIZATION_FAILED"):
            _produce(secured, topic, "a", user="ann")
        secured.allow("ann", "topic", topic, "write")
        _produce(secured, topic, "b", user="ann")
        secured.withdraw("ann", "topic", topic, "write")
        with pytest.raises(KafkaException, match="TOPIC_AUTHORIZATION_FAILED"):
            _produce(secured, topic, "c", user="ann")
        assert _read(secured, topic, 1) == ["b"]


@pytest.mark.large
def test_transactional_ids_need_a_permission_of_their_own(secured: KafkaServer) -> None:
    with secured.topic() as topic:
        secured.allow("ann", "topic", topic, "write")
        producer = Producer(secured.client_options("ann") | {"transactional.id": "anns"})
        with pytest.raises(KafkaException, match="TRANSACTIONAL_ID_AUTHORIZATION_FAILED"):
            producer.init_transactions(120)
        secured.allow("ann", "transactional_id", "anns", "write")
        producer = Producer(secured.client_options("ann") | {"transactional.id": "anns"})
        producer.init_transactions(120)
        producer.begin_transaction()
        producer.produce(topic, "a")
        producer.commit_transaction(120)
        assert _read(secured, topic, 1) == ["a"]


@pytest.mark.large
def test_users_and_permissions_survive_a_crash(secured: KafkaServer) -> None:
    with secured.topic() as topic:
        secured.allow("ann", "topic", topic, "write")
        secured.kill()
        secured.start()
        _produce(secured, topic, "a", user="ann")


# ---------------------------------------------------------------------- where the brokers come from


def test_brokers_from_the_environment(server: KafkaServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_KAFKA_BOOTSTRAP", server.bootstrap)
    with kafka_service({"auto.create.topics.enable": "false"}) as service:
        assert isinstance(service, ExternalKafka)
        assert service.bootstrap == server.bootstrap
        with service.topic(partitions=2) as topic:
            _produce(service, topic, "a")
            assert _read(service, topic, 1) == ["a"]
        with pytest.raises(RuntimeError, match="not ours to stop"):
            service.restart()
    assert server.running
    assert not isinstance(kafka_service({"auto.create.topics.enable": "true"}), ExternalKafka)
