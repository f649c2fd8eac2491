"""Executors that are processes: what they share, and what is lost with one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator import CheckpointConfig
from examples.custom_sink import FileSink
from sinks.testing import Hooked
from tests.spark.cluster import standalone_cluster
from tests.spark.job import Once, SparkJob, cool, write_input
from tests.spark.test_shared import two_sinks, with_random_id
from tests.spark.test_spark import assert_exactly_once, linger, visible

MEMORY = {"spark.executor.memory": "512m"}
SPECULATION = MEMORY | {
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.multiplier": "1.1",
    "spark.speculation.quantile": "0.5",
    "spark.speculation.efficiency.enabled": "false",
    "spark.speculation.minTaskRuntime": "5s",  # of a task that lingers, and of no other
}


EXECUTORS = "local-cluster[2,2,1024]"
"""Two of two cores each; one driver runs all jobs."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The master of two workers on two hosts."""
    with standalone_cluster(tmp_path_factory.mktemp("cluster"), cores=2) as master:
        yield master
        cool()


def test_sinks_on_two_executors_get_the_same_rows(tmp_path: Path) -> None:
    """Three partitions and four cores: tasks of both sinks run at once, on two executors."""
    write_input(tmp_path / "input", batches=2)
    sinks = two_sinks(tmp_path)
    functions = {"b": lambda df: df}  # so that the sinks share no pass
    job = SparkJob(tmp_path, sinks, master=EXECUTORS, conf=MEMORY, shape=with_random_id, transforms=functions)
    assert job.run() == 0, job.output()
    one, other = ({row["id"]: row["random"] for row in visible(sink)} for sink in sinks)
    assert len(one) == 300
    assert one == other


def kill_executor() -> None:
    """The JVM that started the daemon which forked this Python worker."""
    daemon = os.getppid()
    status = Path(f"/proc/{daemon}/stat").read_text().rsplit(")", 1)[1].split()
    os.kill(int(status[1]), signal.SIGKILL)


def round_robin(df: Any) -> Any:
    return df.repartition(16)


def by_chance(df: Any) -> Any:
    """Rows go to other partitions when they are computed again."""
    return with_random_id(df).repartition(16, "random")


@pytest.mark.parametrize("shape", [pytest.param(round_robin, marks=pytest.mark.large), by_chance])
def test_executor_dies_with_its_shuffle_files(tmp_path: Path, shape: Any) -> None:
    """While a part of the sink's tasks has pre-committed. Spark computes the files again, and runs those tasks that it
    has not seen end; or, where that would mix rows of two computations, it fails the job, and the checkpoint is tried
    again as a whole."""
    (tmp_path / "rows").mkdir()
    sink = FileSink(tmp_path / "rows")
    ids = write_input(tmp_path / "input", batches=1, files=4)
    hooked = Hooked(sink, "pre_commit", nth=2, after=True, hook=Once(tmp_path / "killed", kill_executor))
    job = SparkJob(
        tmp_path,
        [hooked],
        master=EXECUTORS,
        conf=MEMORY,
        shape=shape,
        files_per_batch=4,
        config=CheckpointConfig(tolerable_failed_checkpoints=3),
    )
    assert job.run() == 0, job.output()
    assert (tmp_path / "killed").exists()
    assert_exactly_once(sink, ids)


@pytest.mark.large  # the kit has two attempts of one subtask, for each sink
def test_speculative_loser(tmp_path: Path, cluster: str) -> None:
    """The copy wins, and the straggler's transaction never becomes visible."""
    (tmp_path / "rows").mkdir()
    sink = FileSink(tmp_path / "rows")
    ids = write_input(tmp_path / "input", batches=2)
    hooked = Hooked(sink, "pre_commit", after=True, hook=Once(tmp_path / "lingered", linger))
    job = SparkJob(tmp_path, [hooked], master=cluster, conf=SPECULATION)
    assert job.run() == 0, job.output()
    assert (tmp_path / "lingered").exists()
    assert_exactly_once(sink, ids)
    assert len(os.listdir(sink.folder)) > 6, "there was no loser"
