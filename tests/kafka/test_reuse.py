"""What a task and the driver do not ask the brokers each time, and it changes: between two batches, and amid one."""

from __future__ import annotations

import contextlib
import pickle
import shutil
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from kafka import TopicPartition
from kafka.admin import KafkaAdminClient
from kafka.errors import KafkaError
from kafka.net.connection import KafkaConnection
from kafka.protocol.admin.topics import ElectionType
from kafka.protocol.metadata import CoordinatorType

from coordinator import Step
from sinks._util import idle_connections
from sinks.kafka import KafkaSink
from sinks.kafka.cluster import Cluster
from sinks.kafka.errors import NotYetKnown, patiently
from sinks.kafka.sink import _group
from sinks.testing.conformance import example_input
from sinks.testing.servers.kafka import KafkaServer, KafkaService, _id
from sinks.testing.table import eventually
from sinks.transaction import Checkpoint, CommitOutcome, CommitState, Committable
from tests.kafka.tasks import LINEAGE, AsRecords, anew, begun, pre_commit, sink_of, texts
from tests.kafka.test_crashes import At, every_row_once, run
from tests.kafka.test_sink import values

COMMITTED = CommitOutcome.COMMITTED
T = TypeVar("T")


@pytest.fixture(autouse=True)
def _long_rests(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(idle_connections, "IDLE_SECONDS", 120.0)
    yield
    for place in list(idle_connections._idle):
        while (connection := idle_connections.take(place[1:])) is not None:
            idle_connections.disconnect(connection)


def in_a_task(sink: KafkaSink, value: str, subtask: int = 0) -> tuple[Cluster, Committable]:
    copy: KafkaSink = pickle.loads(pickle.dumps(sink))
    committable = pre_commit(copy, texts(value), subtask=subtask)
    cluster = copy._brokers
    copy.close()
    return cluster, committable


def committed(sink: KafkaSink, *committables: Committable) -> bool:
    sink.validate_all(Checkpoint("job", "l", 0), committables)
    return list(sink.commit_all(Checkpoint("job", "l", 0), committables)) == [COMMITTED] * len(committables)


def again(question: Callable[[], T]) -> T:
    """As Spark and the protocol do, while brokers die."""
    answers: list[T] = []

    def answered() -> bool:
        with contextlib.suppress(RuntimeError, KafkaError, NotYetKnown):
            answers.append(question())
        return bool(answers)

    eventually(answered, 400)  # each try may begin with the broker that is frozen
    return answers[0]


# ---------------------------------------------------------------------- the connection
def test_the_next_task_of_a_process_has_the_connection_of_the_last_one(
    kafka: KafkaService, kafka_topic: str, sink: KafkaSink
) -> None:
    (connection, earlier), (same, later) = in_a_task(sink, "1"), in_a_task(sink, "2", 1)
    assert connection is same
    copies = [pickle.loads(pickle.dumps(sink)) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:  # two at once have two
        open = list(pool.map(lambda at: begun(copies[at], texts(f"{at + 3}"), subtask=at + 2), range(2)))
    assert copies[0]._brokers is not copies[1]._brokers
    others = [copy.pre_commit(transaction) for copy, transaction in zip(copies, open, strict=True)]
    for copy in copies:
        copy.close()
    assert committed(sink, earlier, later, *others)
    assert values(kafka, kafka_topic) == ["1", "2", "3", "4"]


def test_a_connection_that_no_task_takes_is_closed(sink: KafkaSink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle_connections, "IDLE_SECONDS", 0.2)
    cluster, committable = in_a_task(sink, "1")
    eventually(lambda: not cluster.net.is_open)
    assert in_a_task(sink, "1")[0] is not cluster
    sink.abort(committable.transaction)


def test_a_task_that_fails_leaves_no_connection_to_the_next_one(sink: KafkaSink) -> None:
    cluster, committable = in_a_task(sink, "1")
    copy = pickle.loads(pickle.dumps(sink))
    transaction = begun(copy, texts("2"), subtask=1)
    assert copy._brokers is cluster
    copy.rollback(transaction)
    copy.close()
    assert in_a_task(sink, "2", 1)[0] is not cluster
    assert committed(sink, committable)


@pytest.mark.parametrize(
    "other", [{"options": {"client.id": "other"}}, {"client_options": {"client_id": "other"}}, {"timeout": 9}]
)
def test_a_sink_with_other_settings_has_its_own(
    kafka: KafkaService, kafka_topic: str, sink: KafkaSink, other: dict[str, Any]
) -> None:
    differs, alike = sink_of(kafka, kafka_topic, **other), sink_of(kafka, kafka_topic)
    first = in_a_task(sink, "1")[0]
    assert in_a_task(differs, "2", 1)[0] is not first
    assert in_a_task(alike, "3", 2)[0] is first
    differs.close()
    alike.close()


def test_what_cannot_be_compared_is_connected_anew(kafka: KafkaService, kafka_topic: str) -> None:
    sink = sink_of(kafka, kafka_topic, client_options={"socket_options": []})
    assert in_a_task(sink, "1")[0] is not in_a_task(sink, "2", 1)[0]
    sink.close()


# ---------------------------------------------------------------------- the topic
def test_a_topic_made_anew_between_two_tasks(kafka: KafkaService, kafka_topic: str, sink: KafkaSink) -> None:
    _, before = in_a_task(sink, "before")
    assert committed(sink, before)
    anew(kafka, kafka_topic)
    _, after = in_a_task(sink, "after")
    assert after.proof["topic_ids"] != before.proof["topic_ids"]
    assert committed(sink, after)
    assert values(kafka, kafka_topic) == ["after"]


def test_a_topic_made_anew_between_validation_and_commit(
    kafka: KafkaService, kafka_topic: str, sink: KafkaSink
) -> None:
    _, committable = in_a_task(sink, "1")
    sink.validate_all(Checkpoint("job", "l", 0), [committable])
    anew(kafka, kafka_topic)
    assert sink.commit(committable).state is CommitState.LOST


def test_what_a_driver_asks_the_brokers_of_a_checkpoint(sink: KafkaSink, monkeypatch: pytest.MonkeyPatch) -> None:
    send, asked = KafkaConnection._send_request, Counter[str]()

    def counted(connection: KafkaConnection, request: Any, **more: Any) -> Any:
        asked[type(request).__name__.removesuffix("Request")] += 1
        return send(connection, request, **more)

    def checkpoint(number: int) -> None:
        committables = [in_a_task(sink, "a", subtask)[1] for subtask in range(2)]
        asked.clear()
        assert sink.committed_checkpoints("job") == ({LINEAGE: 0} if number else None)
        assert committed(sink, *committables)

    monkeypatch.setattr(KafkaConnection, "_send_request", counted)
    checkpoint(0)
    checkpoint(1)
    memory = ["Metadata", "ListTransactions", "OffsetFetch"]
    logs = ["Metadata", "DescribeProducers", "ListOffsets"]
    validation, commit = [*logs, "DescribeTransactions"], [*logs, "ApiVersions", "EndTxn", "EndTxn", "Metadata"]
    assert asked == Counter([*memory, *validation, *commit])


# ---------------------------------------------------------------------- another cluster at the same address
@pytest.fixture(scope="module")
def server() -> Iterator[KafkaServer]:
    with KafkaServer() as server:
        yield server


@pytest.mark.slow
def test_another_cluster_behind_the_address(server: KafkaServer) -> None:
    with closing(KafkaSink(server.bootstrap, "orders", create_topic=True)) as sink:
        sink.check(texts("").schema)
        assert committed(sink, in_a_task(sink, "1")[1])
        _, old = in_a_task(sink, "2", 1)
        server.kill()
        for broker in server.brokers:
            shutil.rmtree(broker._data)
            broker.format(_id(), server._first_records())
        server.start()
        admin = server.admin()
        admin.create_topics([NewTopic("orders", 1)])["orders"].result(120)
        again(lambda: eventually(lambda: sink._brokers.topics.place("orders") is not None))
        _, new = again(lambda: in_a_task(sink, "3"))
        assert new.proof["cluster"] != old.proof["cluster"]
        answer = again(lambda: sink.commit(old))
        assert answer.state is CommitState.UNKNOWN
        assert f"written to the cluster {old.proof['cluster']}" in answer.reason
        assert committed(sink, new)
        assert values(server, "orders") == ["3"]


# ---------------------------------------------------------------------- transaction.version
@pytest.mark.slow
def test_transaction_version_is_lowered_and_raised_under_a_query(server: KafkaServer) -> None:
    """EndTxn as of version 2 would leave a transaction open for ever where there is none."""
    with (
        server.topic() as topic,
        closing(KafkaSink(server.bootstrap, topic)) as sink,
        closing(KafkaAdminClient(bootstrap_servers=server.bootstrap.split(","))) as admin,
    ):
        sink.check(texts("").schema)
        assert committed(sink, in_a_task(sink, "2 and 2")[1])
        for before, after in ((2, 0), (0, 2)):
            _, decided = in_a_task(sink, f"{before} and {after}")
            copy = pickle.loads(pickle.dumps(sink))
            amid = begun(copy, texts("amid"), subtask=1)
            admin.update_features({"transaction.version": ("UPGRADE" if after else "SAFE_DOWNGRADE", after)})
            eventually(lambda after=after: sink._brokers.fences is (after == 2))  # type: ignore[misc]
            assert committed(sink, decided)
            copy.rollback(amid)
            copy.close()
            assert committed(sink, in_a_task(sink, f"{after} and {after}")[1])
            eventually(lambda: not list(sink.in_doubt("job")))
        assert values(server, topic) == ["0 and 0", "0 and 2", "2 and 0", "2 and 2", "2 and 2"]


# ---------------------------------------------------------------------- coordinators and leaders
@pytest.fixture(scope="module")
def three() -> Iterator[KafkaServer]:
    with KafkaServer(brokers=3) as server:
        yield server


def coordinator_of(sink: KafkaSink, transactional_id: str) -> int:
    from kafka.protocol.metadata import CoordinatorType, FindCoordinatorRequest

    request = FindCoordinatorRequest(
        key_type=CoordinatorType.TRANSACTION.value, coordinator_keys=[transactional_id], min_version=4
    )
    answer = sink._brokers.net.ask(lambda: sink._brokers.net.request(request))
    return int(answer.coordinators[0].node_id)


def lead(server: KafkaServer, topic: str, node: int) -> None:
    """This broker leads all of the topic."""
    admin = KafkaAdminClient(bootstrap_servers=server.bootstrap.split(","))

    def partitions() -> list[dict[str, Any]]:
        (about,) = admin.describe_topics([topic])
        return list(about["partitions"])

    eventually(lambda: all(node in partition["isr_nodes"] for partition in partitions()))
    first = {
        partition["partition_index"]: [node, *(other for other in partition["replica_nodes"] if other != node)]
        for partition in partitions()
    }
    admin.alter_partition_reassignments({TopicPartition(topic, at): nodes for at, nodes in first.items()})
    admin.elect_leaders(ElectionType.PREFERRED, {topic: list(first)}, raise_errors=False)
    eventually(lambda: all(partition["leader_id"] == node for partition in partitions()))
    admin.close()


def move(server: KafkaServer, topic: str, away_from: int) -> None:
    """Another broker leads what this one has led of the topic."""
    admin = KafkaAdminClient(bootstrap_servers=server.bootstrap.split(","))

    def led() -> dict[int, list[int]]:
        (about,) = admin.describe_topics([topic])
        return {
            partition["partition_index"]: partition["replica_nodes"]
            for partition in about["partitions"]
            if partition["leader_id"] == away_from
        }

    replicas = led()
    assert replicas
    others = {at: [*(node for node in nodes if node != away_from), away_from] for at, nodes in replicas.items()}
    admin.alter_partition_reassignments({TopicPartition(topic, at): nodes for at, nodes in others.items()})
    admin.elect_leaders(ElectionType.PREFERRED, {topic: list(others)}, raise_errors=False)
    eventually(lambda: not led())
    admin.close()


HANG = 240.0
"""Seconds of a request to a frozen broker. A test in which none may be sent takes less than half of it."""

Change = Callable[[KafkaServer, KafkaSink, Committable], Any]


def _coordinator_moves(server: KafkaServer, sink: KafkaSink, committable: Committable) -> None:
    move(server, "__transaction_state", coordinator_of(sink, committable.transaction["transactional_id"]))


def _leader_moves(server: KafkaServer, sink: KafkaSink, committable: Committable) -> None:
    place = sink._brokers.topics.place(str(sink.topic))
    assert place
    move(server, str(sink.topic), place.leaders[committable.proof["partition"]])


def _coordinator_freezes(server: KafkaServer, sink: KafkaSink, committable: Committable) -> None:
    server.broker(coordinator_of(sink, committable.transaction["transactional_id"])).pause()


def _coordinator_dies(server: KafkaServer, sink: KafkaSink, committable: Committable) -> None:
    server.broker(coordinator_of(sink, committable.transaction["transactional_id"])).kill()


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        _coordinator_moves,
        _leader_moves,
        *(pytest.param(change, marks=pytest.mark.large) for change in (_coordinator_freezes, _coordinator_dies)),
    ],
)
def test_what_moves_between_two_batches_and_amid_one(three: KafkaServer, change: Change) -> None:
    three.start()
    timeout = 10 if change is _coordinator_freezes else 30
    with (
        three.topic() as topic,
        closing(KafkaSink(three.bootstrap, topic, name=f"of-{uuid.uuid4().hex}", timeout=timeout)) as sink,
    ):
        sink.check(texts("").schema)
        _, first = in_a_task(sink, "1")
        assert committed(sink, first)
        change(three, sink, first)
        _, second = again(lambda: in_a_task(sink, "2"))
        three.start()
        change(three, sink, second)
        again(lambda: sink.validate_all(Checkpoint("job", "l", 0), [second]))
        assert again(lambda: sink.commit(second)) == COMMITTED
        three.start()
        copy = pickle.loads(pickle.dumps(sink))
        transaction = begun(copy, texts("3"))
        change(three, sink, second)
        third = copy.pre_commit(transaction)
        copy.close()
        again(lambda: sink.validate_all(Checkpoint("job", "l", 0), [third]))
        assert again(lambda: sink.commit(third)) == COMMITTED
        three.start()  # for the reader, which would wait for a frozen broker in vain
        assert values(three, topic) == ["1", "2", "3"]


def leader_known_to(server: KafkaServer, node: int, topic: str) -> int:
    """Who leads the topic's partition: one broker may hear of a change later than another."""
    options: dict[str, Any] = server.client_options() | {"bootstrap.servers": server.broker(node).address}
    admin = AdminClient(options)
    return admin.list_topics(topic, timeout=120).topics[topic].partitions[0].leader


@pytest.mark.slow
def test_a_leader_that_freezes_is_not_asked_any_more_once_it_is_replaced(three: KafkaServer) -> None:
    three.start()
    with (
        three.topic() as topic,
        closing(KafkaSink(three.bootstrap, topic, name=f"of-{uuid.uuid4().hex}", timeout=HANG)) as sink,
    ):
        _, committable = in_a_task(sink, "1")
        name = committable.transaction["transactional_id"]
        lead(three, topic, next(node for node in (1, 2, 3) if node != coordinator_of(sink, name)))
        sink.validate_all(Checkpoint("job", "l", 0), [committable])
        leader = sink._brokers.net.leaders[topic][0]
        three.broker(leader).pause()
        others = {1, 2, 3} - {leader}
        eventually(lambda: leader not in {leader_known_to(three, node, topic) for node in others})
        sink._brokers.net.client._manager.close(leader)  # or it may be asked who leads
        began = time.monotonic()
        sink.validate_all(Checkpoint("job", "l", 0), [committable])
        assert time.monotonic() - began < HANG / 2
        three.start()
        assert committed(sink, committable)


@pytest.mark.slow
def test_a_broker_that_joins_while_a_driver_is_connected(three: KafkaServer) -> None:
    """The client's own list of brokers may be five minutes old: a transaction in doubt was not listed."""
    three.start()
    with three.topic() as topic:
        with closing(KafkaSink(three.bootstrap, topic, name=f"of-{uuid.uuid4().hex}")) as sink:
            assert committed(sink, in_a_task(sink, "1")[1])
        three.broker(3).stop()
        eventually(lambda: 3 not in three.admin().list_topics(timeout=120).brokers)
        with closing(sink):
            sink.check(texts("").schema)
            three.broker(3).start()
            for of in ("__transaction_state", topic):
                lead(three, of, 3)
            _, second = in_a_task(sink, "2")
            assert list(sink.in_doubt("job")) == [second.transaction]
            assert committed(sink, second)
        assert values(three, topic) == ["1", "2"]


@pytest.mark.slow
def test_a_broker_that_freezes_fails_no_checkpoint(three: KafkaServer) -> None:
    three.start()
    with three.topic() as topic, closing(KafkaSink(three.bootstrap, topic, timeout=15)) as sink:
        assert sink.commit(pre_commit(sink, texts("1"), checkpoint=1)) == COMMITTED
        assert sink.committed_checkpoints("job") == {LINEAGE: 1}
        three.broker(3).pause()
        assert sink.committed_checkpoints("job") == {LINEAGE: 1}
        three.start()


@pytest.mark.slow
def test_what_any_broker_can_tell_is_not_asked_of_one_that_has_failed_to_answer(three: KafkaServer) -> None:
    """It had the fewest requests, and took the time of the second try as well: the checkpoint failed."""
    three.start()
    with three.topic() as topic, closing(KafkaSink(three.bootstrap, topic, timeout=HANG)) as sink:
        assert sink.commit(pre_commit(sink, texts("1"), checkpoint=1)) == COMMITTED
        assert sink.committed_checkpoints("job") == {LINEAGE: 1}
        three.broker(3).pause()
        eventually(lambda: 3 not in three.admin().list_topics(timeout=120).brokers)
        group = _group("job", sink.name)
        # As when it has not answered; the client's list of brokers still has it
        sink._brokers.net.client._manager.close(3)
        began = time.monotonic()
        assert patiently(lambda: sink._brokers.memory.settled_offsets(group, "tpc."), HANG / 2)
        assert time.monotonic() - began < HANG / 2
        three.start()


@pytest.mark.slow
def test_a_transaction_begins_without_a_broker_that_is_frozen_and_does_not_matter(three: KafkaServer) -> None:
    """It had the fewest requests, as above."""
    three.start()
    with three.topic() as topic, closing(KafkaSink(three.bootstrap, topic, timeout=HANG)) as sink:
        names = (f"tpc.{uuid.uuid4().hex}" for _ in iter(int, 1))
        name = next(name for name in names if coordinator_of(sink, name) in (1, 2))
        again(lambda: sink._brokers.begin(name, 60_000))
        list(sink.in_doubt("job"))  # connects to all
        three.broker(3).pause()
        sink._brokers.net.client._manager.close(3)
        began = time.monotonic()
        sink._brokers.begin(name, 60_000, topic)
        assert time.monotonic() - began < HANG / 2
        three.start()


@pytest.mark.slow
def test_a_group_coordinator_that_was_frozen_and_replaced_does_not_tell_of_then(three: KafkaServer) -> None:
    """It answers from its memory, before it learns that another has the group: as if brokers had been set back."""
    three.start()
    name = f"of-{uuid.uuid4().hex}"
    with (
        three.topic() as topic,
        closing(KafkaSink(three.bootstrap, topic, name=name)) as driver,
        closing(KafkaSink(three.bootstrap, topic, name=name, timeout=10)) as other,
    ):
        assert driver.commit(pre_commit(driver, texts("1"), checkpoint=1)) == COMMITTED
        assert driver.committed_checkpoints("job") == {LINEAGE: 1}
        node = driver._brokers.net._coordinators[CoordinatorType.GROUP, _group("job", name)]
        three.broker(node).pause()
        eventually(lambda: node not in three.admin().list_topics(timeout=120).brokers)
        second = again(lambda: pre_commit(other, texts("2"), checkpoint=2))
        assert again(lambda: other.commit(second)) == COMMITTED
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(driver.committed_checkpoints, "job")
            connection = driver._brokers.net.client._manager._conns[node]
            eventually(lambda: answer.done() or connection.in_flight_requests)
            three.broker(node).resume()
            assert answer.result() == {LINEAGE: 2}


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.parametrize("step", [pytest.param(Step.PRE_COMMITTED, marks=pytest.mark.large), Step.COMPLETE])
def test_the_transaction_coordinator_dies_and_another_takes_over(
    three: KafkaServer, tmp_path: Path, step: Step
) -> None:
    three.start()
    with three.topic(partitions=3) as topic:
        sink = AsRecords(three.bootstrap, topic)
        assert list(sink.weaknesses()) == []  # 3 replicas, of which 2 must be in sync
        killed: list[int] = []

        def kill_a_coordinator() -> None:
            (first, *_) = sink.in_doubt("crashes")
            node = coordinator_of(sink, first["transactional_id"])
            three.broker(node).kill()
            killed.append(node)

        run(sink, tmp_path, example_input(), At(step, 1, kill_a_coordinator))
        assert len(killed) == 1
        every_row_once(three, sink, example_input())
        three.start()


def test_one_brokers_word_is_a_weakness(three: KafkaServer) -> None:
    with three.topic(config={"min.insync.replicas": "1"}) as topic:
        sink = KafkaSink(three.bootstrap, topic)
        eventually(lambda: "has 3 replicas and min.insync.replicas = 1" in "".join(sink.weaknesses()))  # as all know it
        sink.close()
