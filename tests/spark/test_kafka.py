"""Kafka -> Spark -> Kafka and PostgreSQL, while drivers, Python workers and the broker get SIGKILL."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest
from confluent_kafka import Producer

from coordinator import CheckpointConfig, CheckpointListener, Step
from sinks.base import TwoPhaseCommitSink
from sinks.kafka import KafkaSink
from sinks.postgres import PostgresSink
from sinks.testing import Hooked
from sinks.testing.driver import die
from sinks.testing.servers.kafka import KafkaServer, KafkaService
from sinks.testing.servers.spark_kafka import spark_kafka_jars
from tests.kafka.reading import read, settled
from tests.spark.cluster import standalone_cluster
from tests.spark.job import KILLED, KillGroupAt, Once, SparkJob, end_group

JOB = "spark-job"
PARTITIONS, BATCHES, RECORDS = 3, 3, 450
SPECULATION = {
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.multiplier": "1.1",
    "spark.speculation.quantile": "0.5",
    "spark.speculation.efficiency.enabled": "false",
    "spark.executor.memory": "512m",
    "spark.executorEnv.PYTHONPATH": os.getcwd(),  # where a user would install the packages on the workers
}


@dataclass
class KafkaSource:
    """A topic from its beginning, in `BATCHES` micro-batches or one more (markers have offsets too)."""

    bootstrap: str
    topic: str

    def __call__(self, spark: Any) -> Any:
        return (
            spark.readStream.format("kafka")
            .option("kafka.bootstrap.servers", self.bootstrap)
            .option("kafka.isolation.level", "read_committed")
            .option("subscribe", self.topic)
            .option("startingOffsets", "earliest")
            .option("maxOffsetsPerTrigger", RECORDS // BATCHES)
            .load()
        )


class IntoKafka:
    def __init__(self, kafka: KafkaService, topic: str) -> None:
        self._kafka = kafka
        self.topic = topic
        self.sink = KafkaSink(kafka.bootstrap, topic)

    @staticmethod
    def shape(df: Any) -> Any:
        return df.select("key", "value")

    def ids(self, isolation: str = "read_committed") -> Counter[int]:
        settled(self._kafka.bootstrap)
        found = read(self._kafka.client_options(), self.topic, isolation)
        return Counter(json.loads(message.value() or b"")["id"] for message in found)

    def in_doubt(self) -> int:
        with closing(self.sink):
            return len(list(self.sink.in_doubt(JOB)))


class IntoPostgres:
    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self.sink = PostgresSink(dsn, "orders", strategy="prepared", create_table=True)

    @staticmethod
    def shape(df: Any) -> Any:
        return df.selectExpr("from_json(CAST(value AS STRING), 'id BIGINT, name STRING') AS row").select("row.*")

    def ids(self) -> Counter[int]:
        return Counter(self._column("SELECT id FROM orders"))

    def in_doubt(self) -> int:
        return len(self._column("SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"))

    def _column(self, query: str) -> list[Any]:
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            return [value for (value,) in connection.execute(query).fetchall()]


Target = IntoKafka | IntoPostgres


def write_records(kafka: KafkaService, topic: str, ids: Iterable[int]) -> None:
    """JSON records over all partitions; in front of them a transaction that was aborted."""
    options = {**kafka.client_options(), "transactional.id": f"input-{topic}", "partitioner": "murmur2_random"}
    producer = Producer(options)
    producer.init_transactions(30)
    producer.begin_transaction()
    for partition in range(PARTITIONS):
        producer.produce(topic, json.dumps({"id": -1, "name": "never committed"}), partition=partition)
    producer.flush(30)
    producer.abort_transaction(30)
    producer.begin_transaction()
    for id in ids:
        producer.produce(topic, json.dumps({"id": id, "name": f"name {id}"}), str(id), partition=id % PARTITIONS)
    producer.commit_transaction(30)
    settled(kafka.bootstrap)


@pytest.fixture(scope="module")
def source(kafka: KafkaService) -> Iterator[KafkaSource]:
    with kafka.topic(PARTITIONS) as topic:
        write_records(kafka, topic, range(RECORDS))
        yield KafkaSource(kafka.bootstrap, topic)


@pytest.fixture
def into_kafka(kafka: KafkaService, kafka_topic: str) -> IntoKafka:
    return IntoKafka(kafka, kafka_topic)


@pytest.fixture
def target(request: pytest.FixtureRequest) -> Target:
    if request.param == "postgres":
        return IntoPostgres(request.getfixturevalue("pg_database"))
    into: IntoKafka = request.getfixturevalue("into_kafka")
    return into


into_either = pytest.mark.parametrize(
    "target", ["kafka", pytest.param("postgres", marks=pytest.mark.large)], indirect=True
)


def job(
    folder: Path, source: KafkaSource, target: Target, sink: TwoPhaseCommitSink[Any] | None = None, **options: Any
) -> SparkJob:
    conf = {"spark.jars": spark_kafka_jars()} | options.pop("conf", {})
    return SparkJob(folder, [sink or target.sink], JOB, source=source, shape=target.shape, conf=conf, **options)


def finish(last: SparkJob, target: Target) -> None:
    """Run the job to its end: every record of the input is visible once, and nothing is left in doubt."""
    assert last.run() == 0, last.output()
    every_record_once(target)


def every_record_once(target: Target) -> None:
    assert target.ids() == Counter(range(RECORDS))
    assert target.in_doubt() == 0


@into_either
@pytest.mark.chaos
def test_driver_and_python_worker_killed(tmp_path: Path, source: KafkaSource, target: Target) -> None:
    """The whole process group after pre-commit, then after the decision; then a worker between pre-commit and ack."""
    assert job(tmp_path, source, target, listeners=[KillGroupAt(Step.PRE_COMMITTED, 0)]).run() == KILLED
    assert target.in_doubt() == PARTITIONS
    assert job(tmp_path, source, target, listeners=[KillGroupAt(Step.COMPLETE, 1)]).run() == KILLED
    assert target.in_doubt() == PARTITIONS
    assert 0 < target.ids().total() <= RECORDS // BATCHES
    worker = Hooked(target.sink, "pre_commit", after=True, hook=Once(tmp_path / "killed", die))
    finish(job(tmp_path, source, target, worker), target)
    assert (tmp_path / "killed").exists()


@dataclass
class CrashBroker(CheckpointListener):
    """Asks for a crash of the broker, by a file, at each of these moments once; goes on when the broker is dead."""

    request: Path
    moments: list[tuple[Step, int]]

    def on_step(self, step: Step, checkpoint_id: int, facts: Mapping[str, Any]) -> None:
        if (step, checkpoint_id) in self.moments:
            self.moments.remove((step, checkpoint_id))
            self.request.touch()
            deadline = time.monotonic() + 30
            while self.request.exists() and time.monotonic() < deadline:
                time.sleep(0.01)


@into_either
@pytest.mark.chaos
def test_broker_killed_while_the_job_goes_on(
    kafka: KafkaService, tmp_path: Path, source: KafkaSource, target: Target
) -> None:
    """Between two micro-batches, under the tasks, and between the decision and the commit."""
    if not isinstance(kafka, KafkaServer):
        pytest.skip(kafka.unmanaged)
    crash = CrashBroker(tmp_path / "request", [(Step.DONE, 0), (Step.TRIGGERED, 1), (Step.COMPLETE, 2)])
    config = CheckpointConfig(commit_timeout=60, tolerable_failed_checkpoints=3)
    only = job(tmp_path, source, target, listeners=[crash], config=config)
    process, crashes = only.start(), 0
    try:
        deadline = time.monotonic() + 180
        while process.poll() is None:
            assert time.monotonic() < deadline, only.output()
            if crash.request.exists():
                kafka.kill()
                crash.request.unlink()
                kafka.start()
                crashes += 1
            time.sleep(0.02)
    finally:
        end_group(process)
    assert process.returncode == 0, only.output()
    assert crashes == 3
    every_record_once(target)


def fail() -> None:
    raise OSError("the disk hiccupped")


@pytest.mark.slow
def test_task_that_fails_after_writing_and_succeeds_on_retry(
    tmp_path: Path, source: KafkaSource, into_kafka: IntoKafka
) -> None:
    """The second attempt has a pooled transactional id of its own."""
    sink = Hooked(into_kafka.sink, "write", after=True, hook=Once(tmp_path / "failed", fail))
    finish(job(tmp_path, source, into_kafka, sink), into_kafka)
    assert (tmp_path / "failed").exists()


def linger() -> None:
    time.sleep(100)


@pytest.mark.large
def test_speculative_loser_on_pooled_ids(tmp_path: Path, source: KafkaSource, into_kafka: IntoKafka) -> None:
    """The copy of a task neither fences the original nor is fenced by it, and the loser's records stay invisible."""
    sink = Hooked(into_kafka.sink, "pre_commit", after=True, hook=Once(tmp_path / "lingered", linger))
    with standalone_cluster(tmp_path) as master:
        finish(job(tmp_path, source, into_kafka, sink, master=master, conf=SPECULATION), into_kafka)
    assert (tmp_path / "lingered").exists()
    assert into_kafka.ids("read_uncommitted").total() > RECORDS, "there was no loser"


@pytest.mark.large
@pytest.mark.chaos
def test_a_topic_written_by_the_sink_is_a_source(
    tmp_path: Path, source: KafkaSource, into_kafka: IntoKafka, pg_database: str
) -> None:
    """Kafka -> Kafka -> PostgreSQL: the second job reads neither what the first one left in doubt, nor its orphans."""
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    table, middle = IntoPostgres(pg_database), KafkaSource(source.bootstrap, into_kafka.topic)
    assert job(first, source, into_kafka, listeners=[KillGroupAt(Step.PRE_COMMITTED, 1)]).run() == KILLED
    early = job(second, middle, table)
    assert early.run() == 0, early.output()
    assert 0 < table.ids().total() <= RECORDS // BATCHES
    finish(job(first, source, into_kafka), into_kafka)
    finish(job(second, middle, table), table)
    assert into_kafka.ids("read_uncommitted").total() > RECORDS, "there was no orphan"
