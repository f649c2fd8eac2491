"""Every sink, replay, a stateful query, a savepoint and its restore, Spark Connect, and SIGKILL, once each.

Not collected by `make test`, where the tests of each of these are more thorough.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pyspark
import pytest
from pyspark.sql import SparkSession, functions

from coordinator import CheckpointCoordinator, Step, restore_savepoint
from sinks.base import TwoPhaseCommitSink
from sinks.kafka import KafkaSink
from sinks.mysql import MySQLSink
from sinks.postgres import PostgresSink
from sinks.sqlalchemy import SqlAlchemySink
from sinks.testing.driver import die
from sinks.testing.servers.kafka import KafkaService
from tests.kafka.reading import read, settled
from tests.mysql.observer import Observer as MySQLObserver
from tests.postgres.observer import Observer
from tests.spark.connect import ConnectJob, ConnectServer
from tests.spark.job import KILLED, KillGroupAt, SparkJob, cool, write_input
from tests.spark.test_connect import CallAt
from tests.spark.test_spark import ROCKSDB, count_by_remainder
from tests.spark.workers import HAS_CONNECT


@dataclass
class Targets:
    kafka: KafkaService
    topic: str
    postgres: str
    mysql: str

    def sinks(self) -> list[TwoPhaseCommitSink[Any]]:
        alchemy = self.postgres.replace("postgresql://", "postgresql+psycopg://")
        return [
            PostgresSink(self.postgres, "prepared", strategy="prepared", create_table=True),
            PostgresSink(self.postgres, "staged", strategy="staged", create_table=True),
            MySQLSink(self.mysql, "xa", strategy="xa", create_table=True),
            MySQLSink(self.mysql, "moved", strategy="staged", create_table=True),
            SqlAlchemySink(alchemy, "merged", create_table=True, ledger="alchemy_ledger"),
            KafkaSink(self.kafka.bootstrap, self.topic, name="kafka"),
        ]

    def ids(self) -> dict[str, Counter[int]]:
        """What is visible under the name of each sink."""
        settled(self.kafka.bootstrap)
        messages = read(self.kafka.client_options(), self.topic)
        found = {"kafka": Counter(json.loads(message.value() or b"")["id"] for message in messages)}
        with closing(Observer(self.postgres)) as postgres, closing(MySQLObserver(self.mysql)) as mysql:
            for table in ("prepared", "staged", "merged"):
                found[table] = Counter(id for (id,) in postgres.run(f"SELECT id FROM {table}"))
            for table in ("xa", "moved"):
                found[table] = Counter(id for (id,) in mysql.run(f"SELECT id FROM {table}"))
        return found

    def in_doubt(self, job: str) -> dict[str, int]:
        found = {}
        for sink in self.sinks():
            with closing(sink):
                sink.open()
                found[sink.name] = len(list(sink.in_doubt(job)))
        return found


@pytest.fixture
def targets(kafka: KafkaService, kafka_topic: str, pg_database: str, mysql_database: str) -> Targets:
    return Targets(kafka, kafka_topic, pg_database, mysql_database)


def as_event(df: Any) -> Any:
    return df.select(functions.to_json(functions.struct("id")).alias("value"))


PATIENCE = 600
"""Seconds for one job into seven sinks, when two Sparks and more share the machine."""


def into_every_sink(folder: Path, targets: Targets, *listeners: KillGroupAt) -> SparkJob:
    *_, kafka = sinks = targets.sinks()
    return SparkJob(folder, sinks, listeners=listeners, transforms={kafka.name: as_event})


@pytest.mark.timeout(2 * PATIENCE)
def test_every_sink_over_a_kill_and_a_loss(targets: Targets, tmp_path: Path) -> None:
    """SIGKILL when all have pre-committed and the checkpoint is complete; then one transaction is lost and replayed."""
    ids = write_input(tmp_path / "input", batches=2)
    job = into_every_sink(tmp_path, targets, KillGroupAt(Step.COMPLETE, 1))
    assert job.run(PATIENCE) == KILLED, job.output()
    assert targets.in_doubt(job.job) == {sink.name: 3 for sink in job.sinks}
    lose_one(targets.sinks()[0], job.job)
    job = into_every_sink(tmp_path, targets)
    assert job.run(PATIENCE) == 0, job.output()
    assert targets.ids() == {sink.name: Counter(ids) for sink in job.sinks}
    assert targets.in_doubt(job.job) == {sink.name: 0 for sink in job.sinks}


HERE = Path(pyspark.__file__).parents[1]


def on_another_spark(job: SparkJob) -> int:
    """By the one that comes next on the path: of the environment, and not that of this suite."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "path", [folder for folder in sys.path if Path(folder) != HERE])
        try:
            return job.run(PATIENCE)
        finally:
            cool()


@pytest.mark.skipif(Path(pytest.__file__).parents[1] == HERE, reason="this is the Spark of the environment")
@pytest.mark.timeout(4 * PATIENCE)
def test_another_spark_takes_over_and_hands_back(pg_database: str, tmp_path: Path) -> None:
    """A query with state, killed with a decided checkpoint in either, and ended in this one."""
    ids = write_input(tmp_path / "input", batches=4)

    def job(*listeners: KillGroupAt) -> SparkJob:
        sink = PostgresSink(pg_database, "orders", create_table=True)
        return SparkJob(tmp_path, [sink], shape=without_doubles, listeners=listeners)

    here = job(KillGroupAt(Step.COMPLETE, 1))
    assert here.run(PATIENCE) == KILLED, here.output()
    there = job(KillGroupAt(Step.COMPLETE, 2))
    assert on_another_spark(there) == KILLED, there.output()
    here = job()
    assert here.run(PATIENCE) == 0, here.output()
    with closing(Observer(pg_database)) as observer:
        assert Counter(id for (id,) in observer.run("SELECT id FROM orders")) == Counter(ids)
        assert observer.pending() == 0


def without_doubles(df: Any) -> Any:
    return df.dropDuplicates(["id", "name", "amount"])


def lose_one(sink: TwoPhaseCommitSink[Any], job: str) -> None:
    with closing(sink):
        sink.open()
        sink.abort(sorted(sink.in_doubt(job), key=str)[0])


def test_a_stateful_query_over_a_kill_a_savepoint_and_its_restore(
    spark: SparkSession, pg_database: str, tmp_path: Path
) -> None:
    ids = write_input(tmp_path / "input", batches=2)

    def sink() -> PostgresSink:
        return PostgresSink(pg_database, "counts", mode="upsert", keys=["key"], create_table=True)

    def counts() -> dict[int, int]:
        with psycopg.connect(pg_database) as connection:
            return dict(connection.execute("SELECT key, count FROM counts").fetchall())

    killed = SparkJob(
        tmp_path,
        [sink()],
        shape=count_by_remainder,
        output_mode="update",
        conf=ROCKSDB,
        listeners=[KillGroupAt(Step.DONE, 0)],
    )
    assert killed.run() == KILLED, killed.output()

    session = spark.newSession()
    for key, value in ROCKSDB.items():
        session.conf.set(key, value)
    storage, target = f"file://{tmp_path}/storage", f"file://{tmp_path}/savepoints"

    def go_on(location: Path) -> CheckpointCoordinator:
        coordinator = CheckpointCoordinator(killed.job, [sink()], storage)
        writer = coordinator.write_stream(count_by_remainder(killed._files(session))).outputMode("update")
        query = writer.option("checkpointLocation", str(location)).trigger(availableNow=True).start()
        query.awaitTermination()
        return coordinator

    with go_on(tmp_path / "spark") as coordinator:
        assert counts() == Counter(id % 10 for id in ids)
        savepoint = coordinator.trigger_savepoint(target, str(tmp_path / "spark"))
    restore_savepoint(savepoint.uri, str(tmp_path / "restored"), storage=storage)
    (tmp_path / "more").mkdir()
    more = write_input(tmp_path / "more" / "input", batches=1)
    for file in (tmp_path / "more" / "input").iterdir():
        file.rename(tmp_path / "input" / f"more-{file.name}")
    with go_on(tmp_path / "restored"):
        assert counts() == Counter(id % 10 for id in [*ids, *more])


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ConnectServer]:
    (tmp_path / "server").mkdir()
    with ConnectServer(tmp_path / "server") as server:
        yield server


def upper_case(df: Any) -> Any:
    return df.selectExpr("id", "upper(name) AS name")


@pytest.mark.skipif(not HAS_CONNECT, reason="this Spark has no Connect server among its jars")
def test_spark_connect_over_a_kill(server: ConnectServer, pg_database: str, tmp_path: Path) -> None:
    ids = write_input(tmp_path / "input", batches=2)

    def job(*listeners: Any) -> ConnectJob:
        tables: Sequence[Any] = [PostgresSink(pg_database, table, create_table=True) for table in ("a", "b")]
        return ConnectJob(tmp_path, tables, url=server.url, transforms={"b": upper_case}, listeners=listeners)

    assert job(CallAt(Step.COMPLETE, 1, die)).run() == 1
    last = job()
    assert last.run() == 0, last.output()
    with closing(Observer(pg_database)) as observer:
        assert Counter(observer.run("SELECT id FROM a")) == Counter((id,) for id in ids)
        assert Counter(observer.run("SELECT id, name = upper(name) FROM b")) == Counter((id, True) for id in ids)
        assert observer.prepared() == []


def test_a_query_that_is_stopped_amid_a_batch_ends_well(spark: SparkSession, pg_database: str, tmp_path: Path) -> None:
    numbers = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 10).load()
    with CheckpointCoordinator("numbers", [PostgresSink(pg_database, "n", create_table=True)], "memory:n") as it:
        query = it.write_stream(numbers).option("checkpointLocation", str(tmp_path / "spark")).start()
        while not query.lastProgress:
            assert query.isActive, query.exception()
        query.stop()
        assert query.exception() is None, f"Spark {pyspark.__version__}"
    with closing(Observer(pg_database)) as observer:
        values = sorted(value for (value,) in observer.run("SELECT value FROM n"))
        assert values == list(range(len(values)))
        assert observer.prepared() == []
