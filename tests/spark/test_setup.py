"""What a user sees of a query that cannot start, that fails, and that ends well."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession, functions
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from coordinator import CheckpointConfig, CheckpointCoordinator, CheckpointListener, Step
from coordinator.errors import (
    CheckpointError,
    CheckpointFailed,
    QueryNotAdopted,
    Superseded,
    WorkersNotReady,
)
from coordinator.spark import lifecycle
from coordinator.storage import StorageError
from examples.custom_sink import FileSink
from sinks.errors import ConfigurationError
from sinks.postgres import PostgresSink
from sinks.testing.servers.postgres import PostgresService
from tests.spark.job import SparkJob, wait_for, write_input
from tests.spark.test_spark import visible


def numbers(spark: SparkSession) -> DataFrame:
    return spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 10).option("numPartitions", 2).load()


def into(dsn: str, folder: Path) -> CheckpointCoordinator:
    sink = PostgresSink(dsn, table="numbers", create_table=True)
    return CheckpointCoordinator("numbers", [sink], (folder / "storage").as_uri())


def start(writer: DataStreamWriter, folder: Path) -> StreamingQuery:
    return writer.option("checkpointLocation", str(folder / "spark")).start()


def test_wrong_passwords_of_all_sinks_are_told_before_the_query_starts(
    spark: SparkSession, tmp_path: Path, pg_database: str
) -> None:
    sinks = [PostgresSink(wrong(pg_database), table=table, create_table=True) for table in ("numbers", "copies")]
    coordinator = CheckpointCoordinator("numbers", sinks, (tmp_path / "storage").as_uri())
    failed = "password authentication failed.*[Cc]heck host"
    with pytest.raises(ConfigurationError, match=rf"(?s)sink 'numbers'.*{failed}.*\nsink 'copies'.*{failed}"):
        coordinator.write_stream(numbers(spark))
    assert not (tmp_path / "storage" / "numbers").exists()


def test_a_foreign_key_between_two_sinks_is_told_before_the_query_starts(
    spark: SparkSession, tmp_path: Path, pg_database: str
) -> None:
    with psycopg.connect(pg_database) as connection:
        connection.execute("CREATE TABLE numbers (timestamp timestamptz, value bigint PRIMARY KEY)")
        connection.execute(
            "CREATE TABLE copies (timestamp timestamptz, value bigint CONSTRAINT of_number REFERENCES numbers)"
        )
    sinks = [PostgresSink(pg_database, table) for table in ("numbers", "copies")]
    coordinator = CheckpointCoordinator("numbers", sinks, (tmp_path / "storage").as_uri())
    with pytest.raises(ConfigurationError, match=r"sink 'copies': the foreign key of_number .* sink 'numbers'"):
        coordinator.write_stream(numbers(spark))
    coordinator.close()
    assert not (tmp_path / "storage" / "numbers").exists()


def test_a_storage_that_cannot_be_reached_is_told_before_the_query_starts(spark: SparkSession, tmp_path: Path) -> None:
    sink = FileSink(tmp_path)
    coordinator = CheckpointCoordinator("numbers", [sink], "postgresql://app@127.0.0.1:1/checkpoints")
    with pytest.raises(StorageError, match=r"127\.0\.0\.1:1/checkpoints: cannot connect: .*Check that the server runs"):
        coordinator.write_stream(numbers(spark))
    coordinator.close()


def test_workers_that_cannot_load_the_sinks_are_told_of_before_the_query_starts(
    spark: SparkSession, tmp_path: Path, pg_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = tmp_path / "bare" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", bare.parents[1]], check=True)
    monkeypatch.setattr(spark.sparkContext, "pythonExec", str(bare))
    told = rf"{bare} says ModuleNotFoundError: No module named .*PYSPARK_PYTHON={sys.executable}"
    with pytest.raises(WorkersNotReady, match=told):
        into(pg_database, tmp_path).write_stream(numbers(spark))
    assert not (tmp_path / "spark").exists()


def test_what_stops_the_query_is_raised_at_the_end_of_the_block(
    spark: SparkSession, tmp_path: Path, pg_database: str, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        pytest.raises(ConfigurationError, match=r"sink 'numbers'.*password") as raised,
        into(wrong(pg_database), tmp_path) as coordinator,
    ):
        start(numbers(spark).writeStream.foreachBatch(coordinator), tmp_path).awaitTermination(300)
    assert raised.value.__cause__ is None
    assert raised.value.__suppress_context__, "Spark's exception would be printed too, with the stacks of both sides"
    assert [record for record in caplog.records if record.exc_info] == []


def test_what_stopped_the_query_is_raised_also_if_nobody_waited_for_it(
    spark: SparkSession, tmp_path: Path, pg_database: str
) -> None:
    def run() -> None:
        with into(wrong(pg_database), tmp_path) as coordinator:
            query = start(numbers(spark).writeStream.foreachBatch(coordinator), tmp_path)
            wait_for(lambda: not query.isActive)

    with pytest.raises(ConfigurationError, match=r"sink 'numbers'.*password"):
        run()


def wait_here(query: StreamingQuery) -> None:
    with pytest.raises(StreamingQueryException, match="too many"):
        query.awaitTermination(300)


def end_with_another_error(query: StreamingQuery) -> None:
    try:
        query.awaitTermination(300)
    except StreamingQueryException as error:
        raise LookupError(f"my own, after {error}") from None


@pytest.mark.parametrize(
    ("waits", "raised", "text"),
    [
        (wait_here, CheckpointFailed, "too many"),
        (lambda query: None, CheckpointFailed, "too many"),
        (end_with_another_error, LookupError, "my own"),
    ],
    ids=["also if the block caught it", "also if nobody waited", "unless another error leaves the block"],
)
def test_what_the_query_failed_with_is_raised_at_the_end_of_the_block(
    spark: SparkSession, tmp_path: Path, waits: Callable[[StreamingQuery], None], raised: type[Exception], text: str
) -> None:
    failing = numbers(spark).select(functions.expr("assert_true(value < 15, 'too many')").alias("a"), "value")
    (tmp_path / "rows").mkdir()

    def run() -> None:
        with CheckpointCoordinator("n", [FileSink(tmp_path / "rows")], (tmp_path / "s").as_uri()) as coordinator:
            query = start(coordinator.write_stream(failing), tmp_path)
            wait_for(lambda: not query.isActive)
            waits(query)

    with pytest.raises(raised, match=text):
        run()


def test_a_failure_of_a_start_before_is_not_raised_at_the_end(spark: SparkSession, tmp_path: Path) -> None:
    files = Files(spark, tmp_path)
    with files.coordinator() as coordinator:
        with pytest.raises(StreamingQueryException, match="too many"):
            run_all(coordinator.write_stream(files.df.where("assert_true(id < 0, 'too many') is null")), tmp_path)
        run_all(coordinator.write_stream(files.df), tmp_path)
    assert files.visible() == files.ids


def test_the_end_of_the_block_stops_a_query_that_has_had_no_batch(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    with CheckpointCoordinator("n", [FileSink(tmp_path / "rows")], (tmp_path / "s").as_uri()) as coordinator:
        query = start(coordinator.write_stream(numbers(spark)), tmp_path)
    assert not query.isActive


def test_a_second_query_of_a_coordinator_is_refused_and_the_first_goes_on(spark: SparkSession, tmp_path: Path) -> None:
    """The end of the block tells of it, too."""
    (tmp_path / "rows").mkdir()
    coordinator = CheckpointCoordinator("n", [FileSink(tmp_path / "rows")], (tmp_path / "s").as_uri())
    told = r"serves query .* which runs, and was called by"
    first = start(coordinator.write_stream(numbers(spark)), tmp_path / "first")
    wait_for(lambda: bool(first.recentProgress))
    second = start(coordinator.write_stream(numbers(spark)), tmp_path / "second")
    with pytest.raises(StreamingQueryException, match=told):
        second.awaitTermination(300)
    newest = first.lastProgress["batchId"]  # type: ignore[index]
    wait_for(lambda: first.lastProgress["batchId"] > newest + 1)  # type: ignore[index]
    with pytest.raises(StreamingQueryException, match=told):
        coordinator.__exit__(None, None, None)


def test_an_error_that_the_function_around_keeps_from_spark_is_raised_at_the_end(
    spark: SparkSession, tmp_path: Path
) -> None:
    (tmp_path / "rows").mkdir()
    coordinator = CheckpointCoordinator("n", [FileSink(tmp_path / "rows")], (tmp_path / "s").as_uri())
    kept = dict[int, str]()

    def keeping(df: DataFrame, n: int) -> None:
        try:
            coordinator(df.where("value % 2 = 0"), n)
            coordinator(df.where("value % 2 = 1"), n)
        except CheckpointError as error:
            kept[n] = str(error)

    coordinator.__enter__()
    start(numbers(spark).writeStream.foreachBatch(keeping), tmp_path)
    wait_for(lambda: len(kept) > 1)
    assert "batch 0 failed, but Spark considers it finished" in kept[1]
    with pytest.raises(CheckpointError, match=r"Spark considers it finished.*caught the error: .*called twice"):
        coordinator.__exit__(None, None, None)


def test_a_block_inside_of_the_function_fails_the_query(spark: SparkSession, tmp_path: Path) -> None:
    """Its end would stop the query within the batch, as if somebody had asked for it, at each start."""
    (tmp_path / "rows").mkdir()

    def each(df: DataFrame, n: int) -> None:
        with CheckpointCoordinator("n", [FileSink(tmp_path / "rows")], (tmp_path / "s").as_uri()) as coordinator:
            coordinator(df, n)

    with pytest.raises(StreamingQueryException, match="a batch of job 'n' cannot stop its own query"):
        start(numbers(spark).writeStream.foreachBatch(each), tmp_path).awaitTermination(300)


def run_all(writer: DataStreamWriter, folder: Path) -> None:
    """All of the input there is."""
    assert start(writer.trigger(availableNow=True), folder).awaitTermination(300)


def test_a_function_that_would_end_the_program_fails_the_query(spark: SparkSession, tmp_path: Path) -> None:
    """Spark would wait for ever for what the coordinator answers, also in `query.stop()`."""
    files = Files(spark, tmp_path)
    coordinator = files.coordinator()
    [sink] = coordinator.sinks.values()
    sink.transform = lambda df: sys.exit("no more")
    query = start(files.df.writeStream.foreachBatch(coordinator), tmp_path)
    wait_for(lambda: not query.isActive)
    assert isinstance(coordinator.last_error, CheckpointError)
    assert "SystemExit('no more') was raised in a batch" in str(query.exception())
    coordinator.close()


def roll_back_to(n: int, location: Path) -> None:
    """As the message says: `delete commits/n, and the later files of commits/ and offsets/`."""
    for log, first in (("commits", n), ("offsets", n + 1)):
        for file in (location / log).iterdir():
            number = file.name.removeprefix(".").removesuffix(".crc")
            if number.isdecimal() and int(number) >= first:
                file.unlink()


@dataclass
class Files:
    """A query over files, one a batch, and a function around its coordinator."""

    spark: SparkSession
    folder: Path

    def __post_init__(self) -> None:
        (self.folder / "rows").mkdir()
        self.ids = write_input(self.folder / "input", batches=4, files=1)
        read = self.spark.readStream.schema("id long, name string, amount double").option("maxFilesPerTrigger", 1)
        self.df = read.parquet(str(self.folder / "input"))

    def coordinator(self, job: str = "n", **options: Any) -> CheckpointCoordinator:
        storage, config = (self.folder / "s").as_uri(), CheckpointConfig(**options)
        return CheckpointCoordinator(job, [FileSink(self.folder / "rows")], storage, config)

    def visible(self) -> list[int]:
        return sorted(row["id"] for row in visible(FileSink(self.folder / "rows")))


def test_the_rows_of_a_second_call_come_by_what_its_error_says(spark: SparkSession, tmp_path: Path) -> None:
    files = Files(spark, tmp_path)
    coordinator = files.coordinator()

    def twice(df: DataFrame, n: int) -> None:
        coordinator(df.where("id % 2 = 0") if n == 3 else df, n)
        if n == 3:
            coordinator(df.where("id % 2 = 1"), n)

    with pytest.raises(StreamingQueryException, match=r"called twice for batch 3.*ARE MISSING.*second coordinator"):
        run_all(files.df.writeStream.foreachBatch(twice), tmp_path)
    coordinator.close()
    first, second = files.coordinator(), files.coordinator("second", adopt=True)

    def each(df: DataFrame, n: int) -> None:
        first(df.where("id % 2 = 0"), n)
        second(df.where("id % 2 = 1"), n)

    run_all(files.df.writeStream.foreachBatch(each), tmp_path)
    assert files.visible() == files.ids
    for one in (first, second):
        one.close()
    with files.coordinator() as again:
        run_all(again.write_stream(files.df), tmp_path)


def test_a_batch_that_a_function_leaves_out_is_named_as_the_cause(spark: SparkSession, tmp_path: Path) -> None:
    files = Files(spark, tmp_path)
    coordinator = files.coordinator()

    def leaving_out(df: DataFrame, n: int) -> None:
        if n != 0:
            coordinator(df, n)

    with (
        pytest.raises(QueryNotAdopted, match=r"batch 1, but .* your function around the coordinator left out"),
        coordinator,
    ):
        run_all(files.df.writeStream.foreachBatch(leaving_out), tmp_path)


def test_offsets_that_another_driver_has_replaced_stop_the_query(spark: SparkSession, tmp_path: Path) -> None:
    """Spark renames the file of a batch without overwrite, which is atomic in HDFS and a few others only: of two
    drivers that plan the batch at the same moment both may go on, with the offsets of the one that came second."""
    files = Files(spark, tmp_path)
    coordinator = files.coordinator()

    def each(df: DataFrame, n: int) -> None:
        if n == 1:
            file = tmp_path / "spark" / "offsets" / "1"
            theirs = re.sub('(?<="batchTimestampMs":)[0-9]+', "1", file.read_text())
            file.write_text(theirs)
        coordinator(df, n)

    with pytest.raises(Superseded, match=r"offsets/1 in .* is of another driver"), coordinator:
        run_all(files.df.writeStream.foreachBatch(each), tmp_path)
    assert len(files.visible()) == len(files.ids) // 4


def wrong(dsn: str) -> str:
    password = conninfo_to_dict(dsn)["password"]
    return dsn.replace(f":{password}@", ":wrong@")


@pytest.mark.parametrize("batches", [3, *(pytest.param(batches, marks=pytest.mark.large) for batches in (2, 5))])
def test_the_end_of_the_block_ends_the_query_well(
    spark: SparkSession,
    tmp_path: Path,
    postgres: PostgresService,
    pg_database: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    batches: int,
) -> None:
    """Mostly amid a batch: this source always has another one."""
    monkeypatch.setattr(lifecycle, "_BATCH_GRACE_PERIOD", 300)
    caplog.set_level(logging.INFO, "coordinator")
    with into(pg_database, tmp_path) as coordinator:
        query = start(coordinator.write_stream(numbers(spark)), tmp_path)
        wait_for(lambda: len(query.recentProgress) >= batches)
    assert not query.isActive
    with psycopg.connect(pg_database) as connection:
        row = connection.execute("SELECT count(*), count(DISTINCT value), max(value) + 1 FROM numbers").fetchone()
        left = connection.execute("SELECT gid FROM pg_prepared_xacts WHERE database = current_database()").fetchall()
        connection.execute("DROP TABLE numbers")
    assert row
    assert row[0] == row[1] == row[2] >= 10 * batches
    assert left == []
    assert f"job numbers wrote checkpoints 0 to {row[0] // 10 - 1}; rows: {row[0]:,} into numbers" in caplog.text
    assert [record for record in caplog.records if record.levelno > logging.INFO or record.exc_info] == []


@dataclass
class Tell(CheckpointListener):
    done: threading.Event

    def on_step(self, step: Step, checkpoint_id: int, facts: Mapping[str, Any]) -> None:
        if step is Step.DONE and checkpoint_id == 1:
            self.done.set()


class Stopped(SparkJob):
    """Many a query, each stopped right when Spark gets to write into its own log that a batch is through."""

    def run_here(self) -> None:
        with pytest.MonkeyPatch.context() as patient:
            patient.setattr(lifecycle, "_BATCH_GRACE_PERIOD", 300)
            self._run()

    def _run(self) -> None:
        spark = self.session()
        spark.sparkContext.setLogLevel("WARN")
        with open(f"/proc/{spark._sc._gateway.proc.pid}/fd/2", errors="replace") as log_of_the_jvm:
            log_of_the_jvm.seek(0, os.SEEK_END)
            spark._jvm.org.apache.logging.log4j.LogManager.getLogger("test").warn("Spark's log is read")
            for n in range(5):
                done = threading.Event()
                at, listener = self.folder / str(n), Tell(done)
                with CheckpointCoordinator("stopped", self.sinks, at.as_uri(), listeners=[listener]) as coordinator:
                    start(coordinator.write_stream(numbers(spark)), at)
                    assert done.wait(300)
            print(log_of_the_jvm.read())


class TestJobs:
    def test_a_stop_interrupts_no_write_of_spark_itself(self, tmp_path: Path) -> None:
        (tmp_path / "rows").mkdir()
        job = Stopped(tmp_path, [FileSink(tmp_path / "rows")])
        assert job.run() == 0, job.output()
        assert "Spark's log is read" in job.output()
        assert "Interrupted" not in job.output()
        assert "\tat " not in job.output()
