"""What grows with the records that storage retains, and with the columns of a batch.

    python -m benchmarks.scale [--records 10000] [--columns 150,1500]

records: a job whose storage (a folder) retains so many checkpoints: seconds of a start, and, by the
clock and of processors, of each command of the CLI that only looks, in a process of its own, its
interpreter included. (`verify` reads all records.) columns: seconds of an empty batch of so many
columns, from its schema to the record, without Spark.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pyarrow as pa

from coordinator import CheckpointConfig, CheckpointCoordinator
from coordinator.store.job_store import JobStore
from examples.custom_sink import FileSink
from sinks.testing import LocalQuery
from sinks.testing.conformance import example_input

READING = ("status", "history", "checkpoints show", "in-doubt list", "resolve")
COMMANDS = ("--version", *READING, "verify --quick")


def timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def of_records(folder: Path, count: int) -> None:
    (folder / "rows").mkdir()
    storage = (folder / "checkpoints").as_uri()
    config = CheckpointConfig(retained_checkpoints=count + 10)

    def job() -> CheckpointCoordinator:
        return CheckpointCoordinator(
            "scale", [FileSink(folder / "rows", name="files")], storage, config
        )

    query = LocalQuery(folder / "query", example_input(1))
    with job() as coordinator:
        query.run(coordinator)
        store = JobStore(coordinator.storage, "scale")
        newest = store.load_newest()
        assert newest
        for id in range(1, count):
            store.put(replace(newest.record, checkpoint_id=id, committables=()))
    (folder / "job.toml").write_text(
        f'job = "scale"\nstorage = "{storage}"\n[checkpointing]\nretained_checkpoints = '
        f'{count + 10}\n[[sinks]]\ntype = "examples.custom_sink:FileSink"\nfolder = '
        f'"{folder / "rows"}"\nname = "files"\n'
    )
    with job() as coordinator:
        print(f"{count:,} records: a start {timed(coordinator.recover):.2f} s")
    for command in COMMANDS:
        arguments = [sys.executable, "-m", "coordinator.cli", *command.split()]
        if command != "--version":
            arguments += ["--job", str(folder / "job.toml")]
        before = _processor_time()
        told = timed(partial(subprocess.run, arguments, capture_output=True))
        print(
            f"{count:,} records: coordinator {command} {told:.2f} s, "
            f"{_processor_time() - before:.2f} s of processors"
        )


def _processor_time() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def of_columns(folder: Path, count: int) -> None:
    (folder / "rows").mkdir()
    batch = [pa.table({f"column_{at}": pa.array([], pa.int64()) for at in range(count)})]
    with CheckpointCoordinator(
        "wide", [FileSink(folder / "rows")], f"memory:wide{count}"
    ) as coordinator:
        LocalQuery(folder / "query", [batch]).run(coordinator)
        many = LocalQuery(folder / "query", [batch] * 6)
        print(f"{count:,} columns: an empty batch {timed(lambda: many.run(coordinator)) / 5:.3f} s")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--records", type=int, default=10_000)
    parser.add_argument("--columns", default="150,1500")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        of_records(Path(folder), options.records)
    for count in map(int, options.columns.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            of_columns(Path(folder), count)


if __name__ == "__main__":
    main()
