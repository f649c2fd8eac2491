"""What the protocol itself costs: many participants, and many earlier checkpoints.

By itself it measures the driver's part of a checkpoint of many participants: `python -m
benchmarks.protocol [PARTICIPANTS ...] [--json FILE]`.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow as pa

from benchmarks.bench import heading, save, say, show
from benchmarks.measure import spread
from coordinator import CheckpointConfig, CheckpointCoordinator, CheckpointListener, Step
from coordinator.protocol.ports import BatchFacts
from sinks import CommitOutcome, Committable, Identity, TransactionContext, TwoPhaseCommitSink
from sinks.testing import LocalBatch, LocalQuery, rows

_MEASURED = 200
"""Checkpoints timed at each mark."""

_FOLDER = tempfile.mkdtemp()
"""Of a query that nobody runs: the batches are made here."""


class Times(CheckpointListener):
    """When each step was last come by."""

    def __init__(self) -> None:
        self.at: dict[Step, float] = {}

    def on_step(self, step: Step, checkpoint_id: int, facts: Mapping[str, Any]) -> None:
        self.at[step] = time.perf_counter()


class NoSink(TwoPhaseCommitSink[int]):
    """Keeps nothing, so that what is measured is the coordinator and its storage alone."""

    def begin_transaction(self, context: TransactionContext) -> int:
        return context.checkpoint_id

    def write(self, transaction: int, batch: pa.RecordBatch) -> None:
        pass

    def pre_commit(self, transaction: int) -> Identity:
        return {"number": transaction}

    def rollback(self, transaction: int) -> None:
        pass

    def commit(self, committable: Committable) -> CommitOutcome:
        return CommitOutcome.COMMITTED

    def abort(self, transaction: Identity) -> None:
        pass

    def in_doubt(self, job: str) -> Iterable[Identity]:
        return []


def batch(number: int, partitions: list[pa.Table]) -> LocalBatch:
    return LocalBatch(
        BatchFacts(number, "query", (f'{{"end":{number}}}',)),
        "run",
        partitions,
        LocalQuery(_FOLDER, []),
    )


class ManyParticipants:
    """Checkpoints with one row in each of many partitions; `run` returns the seconds that their
    commit took."""

    def __init__(self, sink: TwoPhaseCommitSink[Any], participants: int, storage: str) -> None:
        self._times = Times()
        config = CheckpointConfig(sweep_interval=3600, timeout=3600)
        self._coordinator = CheckpointCoordinator(
            f"many-{sink.name}", [sink], storage, config, [self._times]
        )
        self._partitions = [rows(i, 1) for i in range(participants)]
        self._number = 0

    def run(self) -> float:
        self._coordinator.process(batch(self._number, self._partitions))
        self._number += 1
        return self._times.at[Step.COMMITTED] - self._times.at[Step.COMMITTING]

    @property
    def driver(self) -> float:
        """Seconds of the last `run` from the last acknowledgement to the end."""
        return self._times.at[Step.DONE] - self._times.at[Step.PRE_COMMITTED]

    def close(self) -> None:
        self._coordinator.close()


def growth(storage: str, marks: list[int], limit: float) -> dict[int, float]:
    """Median seconds of a checkpoint after that many earlier ones.

    Marks not reached in `limit` seconds are absent.
    """
    medians: dict[int, float] = {}
    deadline = time.monotonic() + limit
    partitions = [rows(0, 1)]
    with CheckpointCoordinator("growth", [NoSink(name="none")], storage) as coordinator:
        number = 0
        for mark in marks:
            while number < mark:
                coordinator.process(batch(number, partitions))
                number += 1
                if time.monotonic() > deadline:
                    return medians
            seconds = []
            for _ in range(_MEASURED):
                start = time.perf_counter()
                coordinator.process(batch(number, partitions))
                seconds.append(time.perf_counter() - start)
                number += 1
            medians[mark] = median(seconds)
    return medians


def driver(participants: int, runs: int = 5) -> list[float]:
    """Seconds of the driver's part of a checkpoint, with a sink that has nothing to do and records
    in files."""
    many = ManyParticipants(NoSink(name="none"), participants, f"file://{tempfile.mkdtemp()}")
    seconds = []
    for _ in range(runs):
        many.run()
        seconds.append(many.driver)
    many.close()
    return seconds


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.protocol")
    parser.add_argument("participants", type=int, nargs="*", default=[1000, 10_000])
    parser.add_argument("--json", type=Path, help="file for the table")
    arguments = parser.parse_args()
    say(about := heading([], "no server"))
    title = "Driver's part of a checkpoint, from the last acknowledgement (aim at 10,000: < 5 s)"
    show(
        title,
        ["participants", "s"],
        [[f"{count:,}", spread(driver(count))] for count in arguments.participants],
    )
    save(arguments.json, about)
