"""Peak memory of a task's Python worker, read in the worker itself."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame

from benchmarks import spark as sparks
from coordinator import CheckpointCoordinator
from sinks import TwoPhaseCommitSink
from sinks.testing.driver import Hooked

FRESH_WORKERS = {"spark.python.worker.reuse": "false"}
"""For the session: each task gets a process of its own, that has seen no other partition."""


def peak(df: DataFrame, sink: TwoPhaseCommitSink[Any], folder: Path) -> float:
    """MiB that the worker of a single partition with these rows had taken at most when it had
    pre-committed. The file `begun` is in the folder from the begin of the transaction on, and the
    job is named after the folder. Needs FRESH_WORKERS."""
    folder.mkdir(parents=True, exist_ok=True)
    begun = Hooked(sink, "begin_transaction", after=True, hook=(folder / "begun").touch)
    watched = Hooked(begun, "pre_commit", after=True, hook=partial(_leave_peak, folder / "peak"))
    with CheckpointCoordinator(
        folder.name, [watched], (folder / "storage").as_uri()
    ) as coordinator:
        stream = sparks.Stream(df, coordinator, folder / "spark")
        try:
            stream.run()
        finally:
            stream.stop()
    return int((folder / "peak").read_text()) / 1024


def _leave_peak(path: Path) -> None:
    match = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    path.write_text(match[1])
