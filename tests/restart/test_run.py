"""Real Spark queries into a real PostgreSQL that fail, are restarted, and are stopped by signals."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from coordinator import (
    CheckpointConfig,
    CheckpointCoordinator,
    CheckpointListener,
    FixedDelay,
    NoRestart,
    RunSummary,
    Step,
    run,
)
from coordinator.errors import (
    CheckpointError,
    CheckpointFailed,
    CheckpointLocationMismatch,
    JobFailed,
    UnsupportedSpark,
)
from coordinator.spark.internals import StreamExecution
from sinks.errors import BadValue, TargetChanged
from sinks.postgres import PostgresSink
from sinks.testing import Hooked
from sinks.testing.servers.postgres import PostgresService
from sinks.testing.table import eventually
from tests.protocol.job import fail
from tests.spark.job import Once, wait_for, write_input

SOON = FixedDelay(attempts=3, delay=0.1)


class At(CheckpointListener):
    """Calls `hook` each time that the driver comes to a step of a checkpoint."""

    def __init__(self, step: Step, checkpoint_id: int, hook: Callable[[], object]) -> None:
        self.step, self.checkpoint_id, self.hook = step, checkpoint_id, hook

    def on_step(self, step: Step, checkpoint_id: int, facts: Mapping[str, Any]) -> None:
        if (step, checkpoint_id) == (self.step, self.checkpoint_id):
            self.hook()


class Job:
    """Three batches of files into a table of PostgreSQL."""

    def __init__(self, spark: SparkSession, folder: Path, dsn: str) -> None:
        self.spark, self.folder, self.dsn = spark, folder, dsn
        self.ids = write_input(folder / "input")
        self.sink = PostgresSink(dsn, "orders", create_table=True)
        self.starts = 0

    def coordinator(self, sink: Any = None, *listeners: CheckpointListener) -> CheckpointCoordinator:
        storage, config = f"file://{self.folder}/storage", CheckpointConfig(commit_timeout=5)
        return CheckpointCoordinator("orders", [sink or self.sink], storage, config, listeners)

    def start(self, coordinator: Any, shape: Callable[[DataFrame], DataFrame] = lambda df: df) -> StreamingQuery:
        self.starts += 1
        reader = self.spark.readStream.schema("id long, name string, amount double")
        df = shape(reader.option("maxFilesPerTrigger", 3).parquet(str(self.folder / "input")))
        writer = df.writeStream.foreachBatch(coordinator).trigger(availableNow=True)
        return writer.option("checkpointLocation", str(self.folder / "spark")).start()

    def run(self, coordinator: Any, restart: Any = SOON, **options: Any) -> RunSummary:
        return run(lambda: self.start(coordinator, **options), restart, coordinator)

    def query(self, statement: str) -> list[Any]:
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            return connection.execute(statement).fetchall()

    def written(self) -> list[int]:
        return sorted(id for (id,) in self.query("SELECT id FROM orders"))

    def in_doubt(self) -> list[Any]:
        prepared = self.query("SELECT gid FROM pg_prepared_xacts WHERE database = current_database()")
        return prepared + list(self.sink.in_doubt("orders"))


@pytest.fixture
def job(spark: SparkSession, tmp_path: Path, pg_database: str) -> Iterator[Job]:
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    job = Job(spark, tmp_path, pg_database)
    yield job
    job.sink.close()
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers


def failing(times: int, marker: Path) -> Callable[[DataFrame], DataFrame]:
    """A map function that fails on the id 3001, of the second batch, as often as that."""

    def down() -> None:
        raise ConnectionError("the lookup is down")

    def check(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            if 3001 in batch.column(0).to_pylist():
                for number in range(times):
                    Once(Path(f"{marker}{number}"), down)()
            yield batch

    return lambda df: df.mapInArrow(check, df.schema)


def test_an_error_that_a_function_has_caught_is_not_blamed(job: Job) -> None:
    """It calls again with the same rows, which works; then something else fails."""
    coordinator = job.coordinator(Hooked(job.sink, "validate_all", 1, hook=fail))

    def each(df: DataFrame, n: int) -> None:
        if n == 1:
            raise ConnectionError("the source is down")
        with suppress(CheckpointError):
            coordinator(df, n)
        coordinator(df, n)

    with pytest.raises(JobFailed, match="the source is down"):
        run(lambda: job.start(each), NoRestart(), coordinator)
    assert len(job.written()) == len(job.ids) // 3


def test_a_spark_that_is_not_supported_is_not_tried_again(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(_: object) -> str:
        raise UnsupportedSpark("StreamExecution.runId() is gone")

    monkeypatch.setattr(StreamExecution, "run_id", property(unsupported))
    with pytest.raises(JobFailed, match=r"at attempt 1, and a restart cannot fix it: UnsupportedSpark"):
        job.run(job.coordinator())


def test_a_failing_map_function_recovers(job: Job, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "coordinator.restart"):
        summary = job.run(job.coordinator(), shape=failing(2, tmp_path / "failed"))
    first, second, third = summary.attempts
    assert summary.stopped_by == ""
    assert isinstance(first.error, CheckpointFailed)
    assert "the lookup is down" in str(first.error)
    assert third.error is None
    assert first.offsets_before == ()
    assert first.offsets_after == second.offsets_before == second.offsets_after == third.offsets_before != ()
    assert third.offsets_after != third.offsets_before
    assert job.written() == job.ids
    assert job.in_doubt() == []
    told = [record for record in caplog.records if record.name == "coordinator.restart"]
    levels = [record.levelname for record in told if "the lookup is down" in record.message]
    assert levels == ["WARNING", "WARNING"]
    assert f"attempt 2 starts after offsets {second.offsets_before}" in caplog.text


@pytest.mark.large
def test_a_failure_that_stays_exhausts_the_strategy(job: Job, tmp_path: Path) -> None:
    with pytest.raises(
        JobFailed, match=r"(?s)failed at attempt 2, and FixedDelay\(attempts=1, .*the lookup is down"
    ) as failed:
        job.run(job.coordinator(), FixedDelay(1, 0.1), shape=failing(9, tmp_path / "failed"))
    assert isinstance(failed.value.__cause__, CheckpointFailed)
    assert [attempt.number for attempt in failed.value.attempts] == [1, 2]
    assert job.in_doubt() == []


def test_a_poison_row_is_retried(job: Job) -> None:
    with psycopg.connect(job.dsn, autocommit=True) as connection:
        connection.execute("CREATE TABLE orders (id bigint CHECK (id <> 5), name text, amount double precision)")
    with pytest.raises(JobFailed) as failed:
        job.run(job.coordinator(), FixedDelay(1, 0))
    assert [type(attempt.error) for attempt in failed.value.attempts] == [BadValue, BadValue]


def test_a_replaced_checkpoint_location_is_fatal(job: Job) -> None:
    job.run(job.coordinator())
    (job.folder / "spark").rename(job.folder / "old")
    with pytest.raises(JobFailed, match="a restart cannot fix it") as failed:
        job.run(job.coordinator())
    assert isinstance(failed.value.__cause__, CheckpointLocationMismatch)
    assert job.starts == 2


def test_a_trigger_that_nobody_has_looked_at_is_not_taken_as_meant_by_a_restart(job: Job) -> None:
    def run(statement: str) -> None:
        with psycopg.connect(job.dsn, autocommit=True) as connection:
            connection.execute(statement)

    def leave_rows_out() -> None:
        run("CREATE FUNCTION skip() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'")
        run("CREATE TRIGGER skips BEFORE INSERT ON orders FOR EACH ROW EXECUTE FUNCTION skip()")

    with pytest.raises(JobFailed, match=r"attempt 1, and a restart cannot fix it: TargetChanged: .*skips") as failed:
        job.run(job.coordinator(None, At(Step.DONE, 0, leave_rows_out)))
    assert isinstance(failed.value.__cause__, TargetChanged)
    run("DROP TRIGGER skips ON orders")
    job.run(job.coordinator())
    assert job.written() == job.ids


def test_a_query_that_cannot_be_started_is_fatal_but_a_service_that_is_away_is_not(job: Job) -> None:
    with pytest.raises(JobFailed, match="a restart cannot fix it: AnalysisException"):
        job.run(job.coordinator(), shape=lambda df: df.select("missing"))
    calls: list[int] = []

    def away(df: DataFrame) -> DataFrame:
        calls.append(1)
        if len(calls) == 1:
            raise ConnectionError("the schema registry is away")
        return df

    assert len(job.run(job.coordinator(), shape=away).attempts) == 2
    assert job.written() == job.ids


def test_without_a_coordinator(job: Job) -> None:
    def fail(df: DataFrame, batch_id: int) -> None:
        raise ValueError("of the user's own function")

    with pytest.raises(JobFailed, match=r"the query failed at attempt 1, and NoRestart\(\)"):
        run(lambda: job.start(fail), NoRestart())


def test_postgres_is_killed_and_comes_back(job: Job, postgres: PostgresService) -> None:
    if postgres.unmanaged:
        pytest.skip(postgres.unmanaged)
    back: list[threading.Thread] = []

    def kill() -> None:
        if not back:
            postgres.kill()
            back.append(threading.Thread(target=come_back))
            back[0].start()

    def come_back() -> None:
        eventually(lambda: job.starts > 1)
        postgres.start()

    summary = job.run(job.coordinator(None, At(Step.TRIGGERED, 1, kill)), FixedDelay(600, 1))
    back[0].join()
    assert len(summary.attempts) > 1
    assert job.written() == job.ids
    assert job.in_doubt() == []


class Signals:
    """SIGTERM to the driver, again and again while it stops, from whatever process this is called in."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.armed, self.driver = folder, folder / "armed", os.getpid()

    def __call__(self) -> None:
        for _ in range(3):
            os.kill(self.driver, signal.SIGTERM)
            time.sleep(0.4)


class TermAfterPreCommit(PostgresSink):
    term: Signals

    def pre_commit(self, transaction: Any) -> Any:
        identity = super().pre_commit(transaction)
        if self.term.armed.exists():
            (self.term.folder / f"worker-{os.getpid()}").touch()
            wait_for(lambda: len(list(self.term.folder.glob("worker-*"))) == 2)  # else one might pre-commit too late
            self.term()
            time.sleep(1000)  # Spark ends this worker
        return identity


@pytest.mark.parametrize("strategy", ["prepared", pytest.param("staged", marks=pytest.mark.large)])
def test_sigterm_leaves_nothing_in_doubt(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: Any
) -> None:
    """With a batch that does not end within the time that a stop waits for it."""
    monkeypatch.setattr("coordinator.spark.lifecycle._BATCH_GRACE_PERIOD", 0.3)
    job.sink = PostgresSink(job.dsn, "orders", create_table=True, strategy=strategy)
    term = Signals(tmp_path)
    sink = TermAfterPreCommit(job.dsn, "orders", create_table=True, strategy=strategy)
    sink.term = term
    summary = job.run(job.coordinator(sink, At(Step.TRIGGERED, 1, term.armed.touch)))
    assert summary.stopped_by == "SIGTERM"
    assert job.in_doubt() == []
    assert job.written() == job.ids[:150], "checkpoint 1 was aborted"

    summary = job.run(job.coordinator(None, At(Step.COMMITTING, 1, term)))
    assert summary.stopped_by == "SIGTERM"
    assert [attempt.error for attempt in summary.attempts] == [None]
    assert job.in_doubt() == []
    assert len(job.written()) == 300, "checkpoint 1 was committed"
    assert job.run(job.coordinator()).stopped_by == ""
    assert job.written() == job.ids
    assert job.in_doubt() == []


def test_a_stop_ends_the_restart_delay(job: Job, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def stop_when_waiting() -> None:
        while "attempt 2 starts in" not in caplog.text:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    waiter = threading.Thread(target=stop_when_waiting, daemon=True)
    waiter.start()
    with caplog.at_level(logging.INFO, "coordinator.restart"):
        summary = job.run(job.coordinator(), FixedDelay(1, 86_400), shape=failing(1, tmp_path / "failed"))
    assert summary.stopped_by == "SIGTERM"
    assert len(summary.attempts) == job.starts == 1
    assert job.in_doubt() == []
    assert job.run(job.coordinator()).attempts[0].error is None
    assert job.written() == job.ids


def test_stop_from_another_thread(job: Job) -> None:
    stop = threading.Event()
    coordinator = job.coordinator(None, At(Step.COMPLETE, 0, stop.set))
    found: list[RunSummary] = []
    runner = threading.Thread(target=lambda: found.append(run(lambda: job.start(coordinator), SOON, coordinator, stop)))
    runner.start()
    runner.join(300)
    assert found[0].stopped_by == "stop"
    assert job.in_doubt() == []
