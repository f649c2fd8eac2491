"""A Spark streaming job in a process group of its own: driver, JVM and Python workers, killable as one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from pyspark import cloudpickle

from coordinator import CheckpointConfig, CheckpointCoordinator, CheckpointListener, Step
from sinks.base import TwoPhaseCommitSink
from sinks.testing import rows

KILLED = -signal.SIGKILL


def die_with_all() -> None:
    """SIGKILL to driver, JVM and workers at once, as when the machine goes down."""
    os.killpg(0, signal.SIGKILL)


@dataclass
class KillGroupAt(CheckpointListener):
    step: Step
    checkpoint_id: int

    def on_step(self, step: Step, checkpoint_id: int, facts: Mapping[str, Any]) -> None:
        if step is self.step and checkpoint_id == self.checkpoint_id:
            die_with_all()


@dataclass
class Once:
    """Calls `hook` the first time that any process calls this; `marker` is a file that must not exist."""

    marker: Path
    hook: Callable[[], None]

    def __call__(self) -> None:
        try:
            os.close(os.open(self.marker, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        self.hook()


def wait_for(condition: Callable[[], Any], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.02)


def write_input(folder: Path, batches: int = 3, files: int = 3, rows_per_file: int = 50) -> list[int]:
    """Parquet files, `files` of them a batch, one partition each. Returns the ids in them."""
    folder.mkdir(parents=True)
    for i in range(batches * files):
        path = folder / f"{i:04d}.parquet"
        pq.write_table(rows(1000 * i, rows_per_file), path)
        os.utime(path, (1_700_000_000 + i, 1_700_000_000 + i))
    return [1000 * i + j for i in range(batches * files) for j in range(rows_per_file)]


@dataclass
class SparkJob:
    """Reads `source` to its end into the sinks: without one, `folder/input`, three files a batch."""

    folder: Path
    sinks: Sequence[TwoPhaseCommitSink[Any]]
    job: str = "spark-job"
    master: str = "local[2,4]"
    listeners: Sequence[CheckpointListener] = ()
    config: CheckpointConfig = field(default_factory=lambda: CheckpointConfig(commit_timeout=30))
    conf: Mapping[str, str] = field(default_factory=dict)
    source: Callable[[Any], Any] | None = None
    """SparkSession -> streaming DataFrame."""
    shape: Callable[[Any], Any] | None = None
    """DataFrame -> DataFrame between source and sinks."""
    output_mode: str = "append"
    files_per_batch: int = 3

    def run_here(self) -> None:
        from pyspark.sql import SparkSession

        builder = (
            SparkSession.builder.master(self.master)
            .config("spark.ui.enabled", "false")
            .config("spark.driver.host", "127.0.0.1")
            .config("spark.driver.bindAddress", "127.0.0.1")
            .config("spark.sql.session.timeZone", "UTC")
            .config("spark.sql.shuffle.partitions", "2")
            .config("spark.sql.files.maxPartitionBytes", "4096")
            .config("spark.sql.files.openCostInBytes", "4096")
            .config("spark.ui.showConsoleProgress", "false")
            .config("spark.local.dir", str(self.folder / "local"))
        )
        for key, value in self.conf.items():
            builder = builder.config(key, value)
        spark = builder.getOrCreate()
        spark.sparkContext.setLogLevel("OFF")
        df = self.source(spark) if self.source else self._files(spark)
        df = self.shape(df) if self.shape else df
        storage = f"file://{self.folder / 'storage'}"
        with CheckpointCoordinator(self.job, self.sinks, storage, self.config, self.listeners) as coordinator:
            query = (
                df.writeStream.foreachBatch(coordinator)
                .outputMode(self.output_mode)
                .option("checkpointLocation", str(self.folder / "spark"))
                .trigger(availableNow=True)
                .start()
            )
            query.awaitTermination()
        spark.stop()

    def _files(self, spark: Any) -> Any:
        reader = spark.readStream.schema("id long, name string, amount double")
        return reader.option("maxFilesPerTrigger", self.files_per_batch).parquet(str(self.folder / "input"))

    def start(self) -> subprocess.Popen[bytes]:
        with tempfile.NamedTemporaryFile(dir=self.folder, suffix=".job", delete=False) as file:
            file.write(cloudpickle.dumps(self))
        self.log = Path(file.name).with_suffix(".log")
        with self.log.open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "tests.spark.job", file.name],
                start_new_session=True,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ
                | {"PYSPARK_PYTHON": sys.executable, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )

    def run(self, timeout: float = 120) -> int:
        process = self.start()
        try:
            return process.wait(timeout)
        finally:
            end_group(process)

    def output(self) -> str:
        return self.log.read_text(errors="replace")


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of the process group, and wait until nothing of it runs."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        process.poll()
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        time.sleep(0.05)


if __name__ == "__main__":
    with open(sys.argv[1], "rb") as pickled:
        job: SparkJob = cloudpickle.load(pickled)
    job.run_here()
