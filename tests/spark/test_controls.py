"""Flink's controls in real Spark queries."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from coordinator import (
    CheckpointConfig,
    CheckpointCoordinator,
    CheckpointingMode,
    ExternalizedCheckpointCleanup,
    StateBackend,
)
from coordinator.errors import NotExactlyOnce, QueryNotAdopted
from coordinator.listener import Step
from coordinator.operations.heartbeat import look_for_driver
from coordinator.operations.requests import ask_driver
from coordinator.storage import CheckpointStorage, open_storage, storage_at
from coordinator.store.job_store import JobStore
from coordinator.task.task import Ack, SinkTask
from examples.custom_sink import FileSink
from sinks._util.machine import Clock, Event
from sinks.postgres import PostgresSink
from sinks.testing import Hooked
from sinks.testing.local import with_row_hash
from tests.protocol.job import Steps
from tests.spark.job import Once, SparkJob, wait_for, write_input
from tests.spark.test_spark import assert_exactly_once, visible


@pytest.fixture
def sink(tmp_path: Path) -> FileSink:
    (tmp_path / "rows").mkdir()
    return FileSink(tmp_path / "rows")


def nap() -> None:
    """For longer than a test waits for its job."""
    time.sleep(1000)


def slow_once(marker: Path) -> Any:
    """DataFrame -> DataFrame whose first task in all of the job's life takes a nap."""

    def slow(batches: Iterator[Any]) -> Iterator[Any]:
        Once(marker, nap)()
        yield from batches

    return lambda df: df.mapInArrow(slow, df.schema)


@dataclass
class UpWhenNapping(Clock):
    """The time of a checkpoint is up as soon as a task naps, once, and no sooner."""

    marker: Path
    gone: float = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.gone

    def wait(self, event: Event, seconds: float) -> bool:
        if seconds != LONG or self.gone:
            return super().wait(event, seconds)
        while not event.wait(0.05):
            if self.marker.exists():
                self.gone = LONG
                return False
        return True


LONG = 1200.0
"""Seconds that a checkpoint may take; a test waits less long for its job."""


class TestJobs:
    def test_a_slow_checkpoint_is_cancelled_in_spark_and_tried_again(self, tmp_path: Path, sink: FileSink) -> None:
        """Of the two sinks, one has pre-committed when the other is cancelled."""
        ids = write_input(tmp_path / "input")
        (tmp_path / "slow").mkdir()
        slow = FileSink(tmp_path / "slow", name="slow")
        slow.transform = slow_once(tmp_path / "marker")
        config = CheckpointConfig(timeout=LONG, tolerable_failed_checkpoints=3, sweep_interval=1)
        job = SparkJob(tmp_path, [sink, slow], config=config, clock=UpWhenNapping(tmp_path / "marker"))
        assert job.run() == 0, job.output()
        assert_exactly_once(sink, ids)
        assert_exactly_once(slow, ids)

    def test_a_slow_checkpoint_fails_the_query_with_nothing_visible(self, tmp_path: Path, sink: FileSink) -> None:
        ids = write_input(tmp_path / "input")
        clock, shape = UpWhenNapping(tmp_path / "marker"), slow_once(tmp_path / "marker")
        job = SparkJob(tmp_path, [sink], config=CheckpointConfig(timeout=LONG), clock=clock, shape=shape)
        assert job.run() == 1
        assert "checkpoint 0 was not complete within 1200 s (CheckpointConfig.timeout)" in job.output()
        assert visible(sink) == []
        again = SparkJob(tmp_path, [sink], shape=shape)
        assert again.run() == 0, again.output()
        assert_exactly_once(sink, ids)


def numbers(spark: SparkSession) -> DataFrame:
    return spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 10).option("numPartitions", 2).load()


def start(coordinator: CheckpointCoordinator, df: DataFrame, folder: Path) -> StreamingQuery:
    return coordinator.write_stream(df).option("checkpointLocation", str(folder / "spark")).start()


def test_interval_gives_the_trigger_and_cancel_ends_it_all(spark: SparkSession, tmp_path: Path, sink: FileSink) -> None:
    steps = Steps()
    config = CheckpointConfig(interval=1.5, externalized_cleanup=ExternalizedCheckpointCleanup.DELETE_ON_CANCELLATION)
    coordinator = CheckpointCoordinator("spark-job", [sink], f"file://{tmp_path}/storage", config, [steps])
    query = start(coordinator, numbers(spark), tmp_path)
    wait_for(lambda: len(query.recentProgress) >= 3)
    execution: Any = query
    assert execution._jsq.streamingQuery().trigger().toString() == "ProcessingTimeTrigger(1500)"
    coordinator.cancel(query)
    assert not query.isActive
    assert records(tmp_path) == []
    rows = [row["value"] for row in visible(sink)]
    assert sorted(rows) == list(range(len(rows)))
    assert list(sink.in_doubt("spark-job")) == []


def records(folder: Path) -> list[Any]:
    store = JobStore(open_storage(f"file://{folder}/storage"), "spark-job")
    newest = store.load_newest()
    return [record for n in range(newest.checkpoint_id + 1 if newest else 0) if (record := store.get(n, 0)) is not None]


@pytest.mark.parametrize("backend", list(StateBackend))
def test_state_backend(spark: SparkSession, tmp_path: Path, sink: FileSink, backend: StateBackend) -> None:
    session = spark.newSession()
    config = CheckpointConfig(state_backend=backend)
    coordinator = CheckpointCoordinator("spark-job", [sink], f"file://{tmp_path}/storage", config)
    counted = numbers(session).selectExpr("value % 3 AS key").groupBy("key").count()
    writer = coordinator.write_stream(counted).outputMode("update")
    query = writer.option("checkpointLocation", str(tmp_path / "spark")).start()
    wait_for(lambda: len(query.recentProgress) >= 2)
    query.stop()
    coordinator.close()
    assert list((tmp_path / "spark" / "state").rglob("*.zip" if backend is StateBackend.ROCKSDB else "*.delta")) or (
        list((tmp_path / "spark" / "state").rglob("*.changelog"))
    )
    last = max(query.recentProgress, key=lambda progress: int(progress["batchId"]))
    metrics = last["stateOperators"][0]["customMetrics"]
    assert ("rocksdbCommitFlushLatency" in str(metrics)) is (backend is StateBackend.ROCKSDB)


@pytest.fixture
def talker() -> Iterator[int]:
    """The port of a server that says five lines to whom connects, and keeps the connection."""
    with socket.create_server(("127.0.0.1", 0)) as server, ExitStack() as connections:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connections.enter_context(server.accept()[0]).sendall(b"line\n" * 5)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join(300)


def test_a_source_that_cannot_be_read_again_is_not_exactly_once(
    spark: SparkSession, tmp_path: Path, sink: FileSink, talker: int
) -> None:
    lines = spark.readStream.format("socket").option("host", "127.0.0.1").option("port", talker).load()
    strict = CheckpointConfig(require="exactly-once")
    coordinator = CheckpointCoordinator("spark-job", [sink], f"file://{tmp_path}/storage", strict)
    query = start(coordinator, lines, tmp_path)
    with pytest.raises(Exception, match=r"NotExactlyOnce: job 'spark-job' .* TextSocketV2\[.*keeps no rows to read"):
        query.awaitTermination(300)
    assert visible(sink) == []

    lenient = CheckpointCoordinator("spark-job", [sink], f"file://{tmp_path}/storage")
    query = lenient.write_stream(lines).start()
    wait_for(lambda: visible(sink))
    query.stop()
    assert [reason.split(" ")[0:2] for reason in lenient.guarantee.weaknesses] == [
        ["Spark's", "checkpointLocation"],
        ["the", "source"],
    ]
    lenient.close()


def test_replayable_source_and_durable_settings_are_exactly_once(
    spark: SparkSession, tmp_path: Path, sink: FileSink
) -> None:
    strict = CheckpointConfig(require="exactly-once")
    with CheckpointCoordinator("spark-job", [sink], f"file://{tmp_path}/storage", strict) as coordinator:
        query = start(coordinator, numbers(spark), tmp_path)
        wait_for(lambda: visible(sink))
        query.stop()
        assert str(coordinator.guarantee) == "exactly-once: yes"


def test_a_start_knows_the_weaknesses_of_its_tables(spark: SparkSession, tmp_path: Path, pg_database: str) -> None:
    """Before the first batch, which may be hours away: the sinks are asked when the query is set up."""
    with psycopg.connect(pg_database, autocommit=True) as connection:
        connection.execute("CREATE UNLOGGED TABLE quick (value bigint)")
    sink, rows = PostgresSink(pg_database, "quick"), numbers(spark).select("value")
    with CheckpointCoordinator("lenient", [sink], f"file://{tmp_path}/lenient") as coordinator:
        coordinator.write_stream(rows)
        [why] = coordinator.guarantee.weaknesses
        assert why == "sink 'quick': public.quick is UNLOGGED, so a crash of the server empties it"
    strict = CheckpointConfig(require="exactly-once")
    with (
        CheckpointCoordinator("strict", [PostgresSink(pg_database, "quick")], f"file://{tmp_path}/s", strict) as job,
        pytest.raises(NotExactlyOnce, match="UNLOGGED"),
    ):
        job.write_stream(rows)


def test_a_query_that_is_not_deterministic_needs_checked_shuffles(
    spark: SparkSession, tmp_path: Path, sink: FileSink
) -> None:
    """test_executors.py shows what the check is for: without it rows were lost and doubled there."""
    session = spark.newSession()
    for number, (expression, checked) in enumerate([("rand()", "true"), ("rand()", "false"), ("value + 1", "false")]):
        session.conf.set("spark.sql.shuffle.orderIndependentChecksum.enableFullRetryOnMismatch", checked)
        folder = tmp_path / str(number)
        with CheckpointCoordinator(f"job-{number}", [sink], f"file://{folder}/storage") as coordinator:
            query = start(coordinator, numbers(session).selectExpr("value", f"{expression} AS more"), folder)
            wait_for(lambda: query.recentProgress)  # noqa: B023
            query.stop()
            reasons = coordinator.guarantee.weaknesses
        assert ["not deterministic" in reason for reason in reasons] == [True] * (number == 1), reasons


def test_what_depends_on_the_order_of_rows_is_named(spark: SparkSession, tmp_path: Path, sink: FileSink) -> None:
    """In the query itself, and in what a sink makes of the batch. Shuffles that are not checked may mix its results."""
    session = spark.newSession()
    session.conf.set("spark.sql.shuffle.orderIndependentChecksum.enableFullRetryOnMismatch", "false")
    rows = numbers(session).selectExpr("value", "value % 3 AS key")
    queries: dict[str, tuple[DataFrame, list[str]]] = {
        "subset": (rows.dropDuplicates(["key"]), ["dropDuplicates on some of the columns"]),
        "all columns": (rows.dropDuplicates(), []),
        "first": (rows.groupBy("key").agg({"value": "first"}).withColumnRenamed("first(value)", "value"), ["first()"]),
        "sum": (rows.groupBy("key").agg({"value": "sum"}).withColumnRenamed("sum(value)", "value"), []),
    }
    for name, (query, named) in queries.items():
        folder = tmp_path / name.replace(" ", "-")
        with CheckpointCoordinator(name.replace(" ", "-"), [sink], f"file://{folder}/storage") as coordinator:
            stream = query.writeStream.foreachBatch(coordinator).outputMode("update")
            started = stream.option("checkpointLocation", f"{folder}/spark").start()
            wait_for(lambda: coordinator.guarantee.weaknesses or started.recentProgress)  # noqa: B023
            started.stop()
            reasons = coordinator.guarantee.weaknesses
        assert [reason.split(",")[0] for reason in reasons] == [
            *(f"the query has {function}" for function in named),
            *(["the query is not deterministic"] if named else []),
        ], name


def test_the_last_heartbeat_names_what_the_query_failed_with_outside_of_the_coordinator(
    spark: SparkSession, tmp_path: Path, sink: FileSink
) -> None:
    def call(df: DataFrame, batch_id: int) -> None:
        coordinator(df, batch_id)
        raise RuntimeError("the disk of the driver is full")

    def run() -> None:
        writer = numbers(spark).writeStream.foreachBatch(call).option("checkpointLocation", f"{tmp_path}/spark")
        with coordinator:
            writer.start().awaitTermination(300)

    storage = f"file://{tmp_path}/storage"
    coordinator = CheckpointCoordinator("numbers", [sink], storage)
    with pytest.raises(StreamingQueryException, match="the disk of the driver is full"):
        run()
    driver = look_for_driver(JobStore(open_storage(storage), "numbers"))
    assert driver
    assert "the disk of the driver is full" in driver.sign.ended


def test_a_query_that_ran_at_least_once_is_adopted_without_loss(
    spark: SparkSession, tmp_path: Path, pg_database: str
) -> None:
    """It wrote as Spark's JDBC writer does, at least once, and failed after the rows of batch 3 were there."""

    def insert(df: DataFrame, batch_id: int) -> None:
        with psycopg.connect(pg_database) as connection:
            connection.cursor().executemany("INSERT INTO numbers VALUES (%s)", [(row.value,) for row in df.collect()])
        if batch_id == 3:
            raise RuntimeError("after the rows of batch 3 were written")

    with psycopg.connect(pg_database) as connection:
        connection.execute("CREATE TABLE numbers (value bigint)")
    plain = numbers(spark).select("value")
    location = str(tmp_path / "spark")
    query = plain.writeStream.foreachBatch(insert).option("checkpointLocation", location).start()
    with pytest.raises(Exception, match="after the rows of batch 3"):
        query.awaitTermination(300)

    sink = PostgresSink(pg_database, table="numbers")
    storage = f"file://{tmp_path}/storage"
    with (
        pytest.raises(QueryNotAdopted, match=r"Spark asks for batch 3, .*adopt=True"),
        CheckpointCoordinator("numbers", [sink], storage) as refusing,
    ):
        start(refusing, plain, tmp_path).awaitTermination(300)
    for config in (CheckpointConfig(adopt=True), CheckpointConfig()):
        with CheckpointCoordinator("numbers", [sink], storage, config) as coordinator:
            query = start(coordinator, plain, tmp_path)
            wait_for(lambda: len(query.recentProgress) >= 3)  # noqa: B023
            query.stop()
    with psycopg.connect(pg_database) as connection:
        counts: dict[int, int] = dict(connection.execute("SELECT value, count(*) FROM numbers GROUP BY 1").fetchall())
    assert sorted(counts) == list(range(len(counts)))
    assert {value // 10 for value, count in counts.items() if count > 1} == {3}, "only what was doubled before"


def test_a_coordinator_called_twice_for_a_batch(spark: SparkSession, tmp_path: Path, sink: FileSink) -> None:
    """The second call's rows would be dropped; the same rows again do no harm."""
    coordinator = CheckpointCoordinator("spark-job", [sink], f"file://{tmp_path}/storage")

    def each(df: DataFrame, batch_id: int) -> None:
        coordinator(df.where("value % 2 = 0"), batch_id)
        coordinator(df.where("value % 2 = 0"), batch_id)
        if batch_id == 1:
            coordinator(df.where("value % 2 = 1"), batch_id)

    query = numbers(spark).writeStream.foreachBatch(each).option("checkpointLocation", str(tmp_path / "spark")).start()
    with pytest.raises(Exception, match=r"called twice for batch 1, with different DataFrames"):
        query.awaitTermination(300)
    coordinator.close()
    assert sorted(row["value"] for row in visible(sink)) == list(range(0, 20, 2))


def test_a_savepoint_is_asked_for_while_batches_follow_each_other(
    spark: SparkSession, tmp_path: Path, sink: FileSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To open its storage may take longer than a batch."""
    steps = Steps()

    def slow(target: str) -> AbstractContextManager[CheckpointStorage]:
        before = len(steps.seen)
        wait_for(lambda: [step for step, _ in steps.seen[before:]].count(Step.TRIGGERED) > 1)
        return storage_at(target)

    monkeypatch.setattr("coordinator.operations.savepoints.on_driver.storage_at", slow)
    place = f"file://{tmp_path}/storage"
    config = CheckpointConfig(savepoint_dir=f"file://{tmp_path}/savepoints", request_poll_interval=0.1)
    with CheckpointCoordinator("spark-job", [sink], place, config, [steps]) as coordinator:
        start(coordinator, numbers(spark), tmp_path)
        wait_for(lambda: (Step.DONE, 0) in steps.seen)
        assert ask_driver(JobStore(open_storage(place), "spark-job"), "stop")["checkpoint"] > 0


def test_an_orphan_of_a_quiet_stream_is_swept(spark: SparkSession, tmp_path: Path, sink: FileSink) -> None:
    """A task that outlives its batch pre-commits when Spark has nothing to call for any more."""
    ids = write_input(tmp_path / "input", batches=1)
    files = spark.readStream.schema("id long, name string, amount double").parquet(str(tmp_path / "input"))
    coordinator = CheckpointCoordinator(
        "spark-job", [sink], f"file://{tmp_path}/storage", CheckpointConfig(sweep_interval=1)
    )
    query = start(coordinator, files, tmp_path)
    wait_for(lambda: len(visible(sink)) == len(ids) and query.status["message"] == "Waiting for next trigger")
    late = SinkTask(sink, "spark-job", coordinator.newest_checkpoint()["lineage"], 0, 1)
    [ack] = late.run(with_row_hash(pa.table({"id": [7]})), subtask=0, task_attempt=999)
    assert isinstance(ack, Ack)
    wait_for(lambda: not list(sink.in_doubt("spark-job")))
    query.stop()
    wait_for(lambda: not (coordinator._sweep_thread and coordinator._sweep_thread.is_alive()))
    coordinator.close()
    assert_exactly_once(sink, ids)


@dataclass
class Late:
    """In the task: says that it is about to pre-commit, and does so when it is let go."""

    folder: Path

    def __call__(self) -> None:
        (self.folder / "late").touch()
        wait_for((self.folder / "let-go").exists)


@dataclass
class ReleasedInTheGracePeriod(Clock):
    """Stands still. As soon as the coordinator waits, the task pre-commits, and the wait ends when it has."""

    folder: Path
    pre_committed: Callable[[], Any]
    slept: list[float] = field(default_factory=list)

    def monotonic(self) -> float:
        return 0.0

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        (self.folder / "let-go").touch()
        wait_for(self.pre_committed)


def test_a_task_that_outlives_the_stop_of_its_query_leaves_nothing_in_doubt(
    spark: SparkSession, tmp_path: Path, pg_database: str
) -> None:
    """Spark cancels the task, yet its Python worker goes on and pre-commits, after `query.stop()` has returned."""
    table = PostgresSink(pg_database, table="numbers", create_table=True, strategy="prepared")
    hooked = Hooked(table, "pre_commit", hook=Once(tmp_path / "begun", Late(tmp_path)))

    def prepared() -> list[Any]:
        with psycopg.connect(pg_database) as connection:
            return connection.execute("SELECT gid FROM pg_prepared_xacts").fetchall()

    clock = ReleasedInTheGracePeriod(tmp_path, prepared)
    coordinator = CheckpointCoordinator("spark-job", [hooked], f"file://{tmp_path}/storage", clock=clock)
    query = start(coordinator, numbers(spark).select("value").coalesce(1), tmp_path)
    wait_for((tmp_path / "late").exists)
    query.stop()
    assert clock.slept == []
    coordinator.close()
    assert clock.slept == [2.0]
    assert prepared() == []


def test_at_least_once_mode_says_so(tmp_path: Path, sink: FileSink) -> None:
    config = CheckpointConfig(mode=CheckpointingMode.AT_LEAST_ONCE)
    coordinator = CheckpointCoordinator("spark-job", [sink], f"file://{tmp_path}/storage", config)
    assert str(coordinator.guarantee).startswith("exactly-once: no, because the mode is AT_LEAST_ONCE")
