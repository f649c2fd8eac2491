"""Without Spark: psql with ready files, and the sink driven by hand in processes that hold their
rows already."""

from __future__ import annotations

import itertools
import multiprocessing
import subprocess
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pyarrow as pa

from benchmarks.target import psql
from sinks import TwoPhaseCommitSink
from sinks.transaction import Checkpoint, CommitOutcome, Committable, Fingerprint, TransactionId

BATCH = 10_000
"""Rows of an Arrow batch: Spark's default."""


def copy_files(dsn: str, paths: Sequence[Path]) -> float:
    """Seconds that psql takes to copy the files into the table, one connection for each, all at
    once."""
    client = str(psql())
    start = time.perf_counter()
    running = [
        subprocess.Popen(
            [client, dsn, "-qXc", rf"\copy t FROM '{path}' (FORMAT binary)"], stderr=subprocess.PIPE
        )
        for path in paths
    ]
    errors = [process.communicate()[1] for process in running]
    seconds = time.perf_counter() - start
    if any(process.returncode for process in running):
        raise RuntimeError(f"psql failed: {errors}")
    return seconds


class Feeders:
    """Processes that each hold a part of the rows as Arrow batches, and write it through the sink
    when told to."""

    def __init__(
        self, sink: TwoPhaseCommitSink[Any], rows: pa.Table, parts: int, folder: Path
    ) -> None:
        self._sink = sink
        self._checkpoints = itertools.count()
        sink.check(rows.schema)
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for part in range(parts):
            low = part * rows.num_rows // parts
            high = (part + 1) * rows.num_rows // parts
            path = folder / f"{sink.name}-{part}.arrow"
            with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, rows.schema) as writer:
                writer.write_table(rows.slice(low, high - low).combine_chunks(), BATCH)
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_feed, args=(theirs, sink, part, str(path)), daemon=True
            )
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)
        for pipe in self._pipes:
            pipe.recv()

    def run(self) -> float:
        """Seconds from the first row to the commit."""
        number = next(self._checkpoints)
        start = time.perf_counter()
        for pipe in self._pipes:
            pipe.send(number)
        committables: list[Committable] = [pipe.recv() for pipe in self._pipes]
        outcomes = self._sink.notify_checkpoint_complete(
            Checkpoint("direct", "bench", number), committables
        )
        seconds = time.perf_counter() - start
        if any(outcome != CommitOutcome.COMMITTED for outcome in outcomes):
            raise RuntimeError(f"not committed: {outcomes}")
        return seconds

    def close(self) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.send(None)
            process.join()
        self._sink.close()


def _feed(pipe: Connection, sink: TwoPhaseCommitSink[Any], part: int, path: str) -> None:
    with pa.OSFile(path) as file:
        batches = list(pa.ipc.open_file(file).read_all().to_batches())
    rows = sum(batch.num_rows for batch in batches)
    pipe.send(rows)
    while (number := pipe.recv()) is not None:
        name = TransactionId("direct", "bench", number, sink.name, part, 1, 0, 0, part)
        transaction = sink.begin_transaction(name.context(batches[0].schema))
        for batch in batches:
            sink.write(transaction, batch)
        pipe.send(sink.snapshot_state(transaction).of(sink.name, part, Fingerprint(rows)))
