"""Brokers that die between any two steps, and transactions that end without us: every row is there once."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import OFFSET_END
from confluent_kafka import TopicPartition as Place
from kafka import TopicPartition
from kafka.admin import AbortTransactionSpec, KafkaAdminClient

from coordinator import CheckpointConfig, CheckpointCoordinator, CheckpointListener, Step
from sinks.base import TwoPhaseCommitSink
from sinks.kafka import KafkaSink
from sinks.testing import Hooked, rows
from sinks.testing.conformance import example_input, ids
from sinks.testing.driver import KILLED, Driver, KillAt
from sinks.testing.local import LocalQuery, Partitions
from sinks.testing.servers.kafka import KafkaServer, KafkaService
from sinks.testing.table import eventually
from tests.kafka.reading import read, settled
from tests.kafka.tasks import AsRecords
from tests.protocol.job import Steps


@dataclass
class At(CheckpointListener):
    """Does something at a step of a checkpoint, once."""

    step: Step
    checkpoint_id: int
    action: Callable[[], None]
    done: bool = False

    def on_step(self, step: Step, checkpoint_id: int, facts: Mapping[str, Any]) -> None:
        if not self.done and (step, checkpoint_id) == (self.step, self.checkpoint_id):
            self.done = True
            self.action()


def run(sink: TwoPhaseCommitSink[Any], folder: Path, input: list[Partitions], *listeners: CheckpointListener) -> None:
    config = CheckpointConfig(commit_timeout=300, tolerable_failed_checkpoints=2)
    storage = f"file://{folder / 'storage'}"
    with CheckpointCoordinator("crashes", [sink], storage, config, listeners) as coordinator:
        LocalQuery(folder / "query", input).run(coordinator)


def every_row_once(kafka: KafkaService, sink: KafkaSink, input: list[Partitions]) -> None:
    settled(kafka.bootstrap)
    assert sink.topic
    seen = Counter(json.loads(m.value() or b"")["id"] for m in read(kafka.client_options(), sink.topic))
    assert seen == Counter(ids(input))
    assert list(sink.in_doubt("crashes")) == []
    sink.close()


@pytest.fixture
def sink(kafka: KafkaService, kafka_topic: str) -> KafkaSink:
    if kafka.unmanaged:
        pytest.skip(kafka.unmanaged)
    return AsRecords(kafka.bootstrap, kafka_topic)


def crash(kafka: KafkaService) -> Callable[[], None]:
    def kill_and_start() -> None:
        kafka.kill()
        kafka.start()

    return kill_and_start


@pytest.mark.chaos
@pytest.mark.parametrize(
    "step",
    [
        Step.PRE_COMMITTED,
        Step.COMPLETE,
        *(pytest.param(step, marks=pytest.mark.large) for step in (Step.TRIGGERED, Step.COMMITTED)),
    ],
)
def test_broker_killed_between_steps(kafka: KafkaService, sink: KafkaSink, tmp_path: Path, step: Step) -> None:
    at = At(step, 1, crash(kafka))
    run(sink, tmp_path, example_input(), at)
    assert at.done
    every_row_once(kafka, sink, example_input())


@pytest.mark.large
@pytest.mark.chaos
@pytest.mark.parametrize("method", ["write", "pre_commit", "commit_all"])
def test_broker_killed_around_a_call(kafka: KafkaService, sink: KafkaSink, tmp_path: Path, method: str) -> None:
    hooked = Hooked(sink, method, nth=2, after=True, hook=_Crash.of(kafka))
    run(hooked, tmp_path, example_input())
    assert _Crash.calls == 1
    every_row_once(kafka, sink, example_input())


class _Crash:
    """Picklable, as hooks have to be; tasks run in this process."""

    kafka: KafkaService
    calls = 0

    @classmethod
    def of(cls, kafka: KafkaService) -> Callable[[], None]:
        cls.kafka, cls.calls = kafka, 0
        return _crash

    @classmethod
    def crash(cls) -> None:
        cls.calls += 1
        crash(cls.kafka)()


def _crash() -> None:
    from tests.kafka import test_crashes

    test_crashes._Crash.crash()


def test_time_is_up_after_the_decision(kafka: KafkaService, kafka_topic: str, tmp_path: Path) -> None:
    """The broker aborts what the record names: it is proven lost, and written again."""
    sink = AsRecords(kafka.bootstrap, kafka_topic, transaction_timeout=6)
    lost: dict[int, int] = {}

    class Watch(CheckpointListener):
        def on_step(self, step: Step, checkpoint_id: int, facts: Mapping[str, Any]) -> None:
            if step is Step.REPLAYING:  # on a machine that stands still, that of another one, too
                lost.setdefault(checkpoint_id, len(facts["lost"]))

    def wait_until_aborted() -> None:
        eventually(lambda: not list(sink.in_doubt("crashes")))

    run(sink, tmp_path, example_input(), At(Step.COMPLETE, 1, wait_until_aborted), Watch())
    assert lost[1] == 3
    every_row_once(kafka, sink, example_input())


def test_time_is_up_before_the_decision(kafka: KafkaService, kafka_topic: str, tmp_path: Path) -> None:
    """The brokers are asked whether the acknowledged transactions still stand: they are written again, and no replay
    asks for the same rows."""
    sink = AsRecords(kafka.bootstrap, kafka_topic, transaction_timeout=6)
    seen = Steps()

    def wait_until_aborted() -> None:
        eventually(lambda: not list(sink.in_doubt("crashes")))

    run(sink, tmp_path, example_input(), At(Step.PRE_COMMITTED, 0, wait_until_aborted), seen)
    every_row_once(kafka, sink, example_input())
    assert (Step.FAILED, 0) in seen.seen
    assert (Step.REPLAYING, 0) not in seen.seen


@pytest.mark.parametrize("step", [Step.PRE_COMMITTED, Step.COMPLETE])
def test_an_operator_ends_a_transaction_in_one_partition(kafka: KafkaService, tmp_path: Path, step: Step) -> None:
    """As `kafka-transactions.sh abort` does: the coordinator still calls it open, and would commit what is left. Before
    the decision nothing has to be replayed."""
    seen = Steps()
    with kafka.topic(2) as topic, closing(KafkaAdminClient(bootstrap_servers=kafka.bootstrap)) as admin:

        def end_transaction() -> None:
            described = admin.describe_producers([TopicPartition(topic, number) for number in range(2)])
            place, producer = next(
                (place, producer)
                for place, about in described.items()
                for producer in about.active_producers
                if producer.current_transaction_start_offset >= 0
            )
            who = producer.producer_id, producer.producer_epoch, max(0, producer.coordinator_epoch)
            admin.abort_transaction(AbortTransactionSpec(place, *who))

        sink = AsRecords(kafka.bootstrap, topic)
        run(sink, tmp_path, example_input(), At(step, 1, end_transaction), seen)
        every_row_once(kafka, sink, example_input())
    assert ((Step.REPLAYING, 1) in seen.seen) is (step is Step.COMPLETE)


@pytest.mark.parametrize("step", [Step.PRE_COMMITTED, Step.COMPLETE])
def test_somebody_deletes_records_of_open_transactions(kafka: KafkaService, tmp_path: Path, step: Step) -> None:
    """Up to the high watermark, as `kafka-delete-records.sh` does: the transactions stay open, and EndTxn would say
    that all is committed. Before the decision nothing has to be replayed."""
    seen, admin = Steps(), kafka.admin()
    with kafka.topic(2) as topic:

        def delete() -> None:
            (deleted,) = admin.delete_records([Place(topic, 1, OFFSET_END)]).values()
            deleted.result(120)

        sink = AsRecords(kafka.bootstrap, topic)
        run(sink, tmp_path, example_input(), At(step, 0, delete), seen)
        every_row_once(kafka, sink, example_input())
    assert ((Step.REPLAYING, 0) in seen.seen) is (step is Step.COMPLETE)


@pytest.mark.parametrize("step", [Step.PRE_COMMITTED, Step.COMPLETE])
def test_a_machine_loses_what_its_broker_had_acknowledged(kafka: KafkaService, tmp_path: Path, step: Step) -> None:
    """A broker writes to the page cache. With the power go the last records, and the coordinator does not know."""
    if not isinstance(kafka, KafkaServer):
        pytest.skip("its disk is not ours")
    seen = Steps()
    with kafka.topic() as topic:

        def lose_the_last_batch() -> None:
            kafka.kill()
            log = kafka.broker()._data / f"{topic}-0" / f"{0:020d}.log"
            data, ends = log.read_bytes(), [0]
            while ends[-1] < len(data) and (length := int.from_bytes(data[ends[-1] + 8 : ends[-1] + 12], "big")):
                ends.append(ends[-1] + 12 + length)
            log.write_bytes(data[: ends[-2]])
            kafka.start()

        sink = AsRecords(kafka.bootstrap, topic, options={"batch.size": 200})
        run(sink, tmp_path, example_input(), At(step, 1, lose_the_last_batch), seen)
        every_row_once(kafka, sink, example_input())
    assert ((Step.REPLAYING, 1) in seen.seen) is (step is Step.COMPLETE)


def test_ids_left_over_by_a_job_that_shrank(kafka: KafkaService, kafka_topic: str, tmp_path: Path) -> None:
    """Four participants pre-commit and the driver dies; the next start has one partition, and uses one id only."""
    sink = AsRecords(kafka.bootstrap, kafka_topic)
    wide: list[Partitions] = [[rows(100 * p, 5) for p in range(4)]]
    narrow: list[Partitions] = [[rows(0, 5)], [rows(1000, 5)]]

    def driver(input: list[Partitions], *listeners: CheckpointListener) -> Driver:
        storage = f"file://{tmp_path / 'storage'}"
        return Driver("crashes", sink, storage, tmp_path / "query", input, listeners=listeners)

    assert driver(wide, KillAt(Step.PRE_COMMITTED)).run() == KILLED
    sink.open()
    assert len(list(sink.in_doubt("crashes"))) == 4
    assert driver(narrow).run() == 0
    every_row_once(kafka, sink, narrow)
