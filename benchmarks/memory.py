"""Peak memory of a task's Python worker, read in the worker itself."""

from __future__ import annotations

import re
from pathlib import Path

from pyspark.sql import SparkSession

from benchmarks import spark as sparks
from benchmarks.shapes import Shape
from coordinator import CheckpointCoordinator
from sinks import Committable
from sinks.postgres import PostgresSink
from sinks.postgres.copying import CopyTransaction

FRESH_WORKERS = {"spark.python.worker.reuse": "false"}
"""For the session: each task gets a process of its own, that has seen no other partition."""


class WatchedSink(PostgresSink):
    """Leaves the worker's peak in a file when it has pre-committed."""

    peak_file: str

    def pre_commit(self, transaction: CopyTransaction) -> Committable:
        committable = super().pre_commit(transaction)
        status = Path("/proc/self/status").read_text()
        match = re.search(r"VmHWM:\s*(\d+) kB", status)
        assert match is not None
        Path(self.peak_file).write_text(match[1])
        return committable


def peak(spark: SparkSession, sink: WatchedSink, shape: Shape, rows: int, folder: Path) -> float:
    """MiB that the worker of a single partition with this many rows took at most. Needs FRESH_WORKERS."""
    folder.mkdir(parents=True)
    sink.peak_file = str(folder / "peak")
    storage = (folder / "storage").as_uri()
    with CheckpointCoordinator(f"memory-{rows}", [sink], storage) as coordinator:
        stream = sparks.Stream(shape.of(sparks.numbers(spark, rows, partitions=1)), coordinator, folder / "spark")
        try:
            stream.run()
        finally:
            stream.stop()
    return int(Path(sink.peak_file).read_text()) / 1024
