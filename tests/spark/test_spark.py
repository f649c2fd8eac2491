"""The protocol inside real Spark queries, with a sink that needs no server. `test_killed.py` kills their drivers."""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from coordinator import CheckpointConfig, Step
from coordinator.config import Replay
from examples.custom_sink import FileSink
from sinks.testing import Hooked, rows
from sinks.testing.driver import die
from tests.spark.job import KILLED, KillGroupAt, Once, SparkJob, write_input

ROCKSDB = {
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    "spark.sql.streaming.stateStore.checkpointFormatVersion": "2",
}


@pytest.fixture
def sink(tmp_path: Path) -> FileSink:
    (tmp_path / "rows").mkdir()
    return FileSink(tmp_path / "rows")


def visible(sink: FileSink) -> list[dict[str, Any]]:
    return [row for file in sink.folder.glob("[!.]*.parquet") for row in pq.read_table(file).to_pylist()]


def assert_exactly_once(sink: FileSink, ids: list[int], job: str = "spark-job") -> None:
    seen = Counter(row["id"] for row in visible(sink))
    assert [id for id, count in seen.items() if count > 1] == []
    assert sorted(seen) == ids
    assert list(sink.in_doubt(job)) == []


@pytest.mark.large
def test_driver_and_executors_killed_and_restarted(tmp_path: Path, sink: FileSink) -> None:
    ids, master = write_input(tmp_path / "input"), "local-cluster[2,1,1024]"
    assert SparkJob(tmp_path, [sink], master=master, listeners=[KillGroupAt(Step.COMPLETE, 1)]).run() == KILLED
    job = SparkJob(tmp_path, [sink], master=master)
    assert job.run() == 0, job.output()
    assert_exactly_once(sink, ids)


def count_by_remainder(df: Any) -> Any:
    return df.groupBy((df.id % 10).alias("key")).count()


@pytest.mark.parametrize(
    ("method", "after"),
    [
        ("write", True),
        pytest.param("pre_commit", False, marks=pytest.mark.large),
        pytest.param("pre_commit", True, marks=pytest.mark.large),  # test_killed.py has it with other sinks
    ],
)
def test_python_worker_killed(tmp_path: Path, sink: FileSink, method: str, after: bool) -> None:
    """Spark runs the task again; what the dead worker left behind is swept."""
    ids = write_input(tmp_path / "input")
    hooked = Hooked(sink, method, after=after, hook=Once(tmp_path / "killed", die))
    job = SparkJob(tmp_path, [hooked])
    assert job.run() == 0, job.output()
    assert (tmp_path / "killed").exists()
    assert_exactly_once(sink, ids)


def fail() -> None:
    raise OSError("the disk hiccupped")


def test_task_that_fails_and_succeeds_on_retry(tmp_path: Path, sink: FileSink) -> None:
    ids = write_input(tmp_path / "input")
    job = SparkJob(tmp_path, [Hooked(sink, "write", hook=Once(tmp_path / "failed", fail))])
    assert job.run() == 0, job.output()
    assert (tmp_path / "failed").exists()
    assert_exactly_once(sink, ids)


def linger() -> None:
    """For longer than a test waits for its job."""
    time.sleep(1000)


def withdraw_one(folder: Path) -> None:
    sink = FileSink(folder)
    sink.abort(sorted(sink.in_doubt("spark-job"), key=str)[0])


@pytest.mark.large  # test_killed.py has it with another sink
def test_a_lost_transaction_is_written_again_from_the_spool(tmp_path: Path, sink: FileSink) -> None:
    ids = write_input(tmp_path / "input", batches=2)
    config = CheckpointConfig(replay=Replay.SPOOL)
    assert SparkJob(tmp_path, [sink], listeners=[KillGroupAt(Step.COMPLETE, 0)], config=config).run() == KILLED
    withdraw_one(sink.folder)
    job = SparkJob(tmp_path, [sink], config=config)
    assert job.run() == 0, job.output()
    assert_exactly_once(sink, ids)


def test_replaced_checkpoint_location(tmp_path: Path, sink: FileSink) -> None:
    ids = write_input(tmp_path / "input")
    assert SparkJob(tmp_path, [sink]).run() == 0
    (tmp_path / "spark").rename(tmp_path / "spark-before")
    job = SparkJob(tmp_path, [sink])
    assert job.run() == 1
    assert "checkpointLocation was replaced" in job.output()
    assert_exactly_once(sink, ids)


def test_an_older_checkpoint_location_with_other_files_under_the_same_offset(tmp_path: Path, sink: FileSink) -> None:
    """R12: Spark's file source counts its batches, so all that tells them apart is when they were planned."""
    ids = write_input(tmp_path / "input", batches=1)
    assert SparkJob(tmp_path, [sink]).run() == 0
    shutil.copytree(tmp_path / "spark", tmp_path / "backup")
    ids += add_file(tmp_path / "input", 10)
    assert SparkJob(tmp_path, [sink]).run() == 0
    shutil.rmtree(tmp_path / "spark")
    (tmp_path / "backup").rename(tmp_path / "spark")
    add_file(tmp_path / "input", 11)
    job = SparkJob(tmp_path, [sink])
    assert job.run() == 1, "the rows of the last file are lost"
    told = "batch 1 is complete in storage, but its record is of a batch that Spark planned at another time"
    assert told in job.output()
    assert_exactly_once(sink, ids)


def add_file(folder: Path, number: int) -> list[int]:
    path = folder / f"{number:04d}.parquet"
    pq.write_table(rows(1000 * number, 50), path)
    os.utime(path, (1_700_000_000 + number, 1_700_000_000 + number))
    return [1000 * number + j for j in range(50)]
