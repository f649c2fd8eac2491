"""One life of a driver without Spark: real protocol, sinks and storage over a `LocalQuery`, in a process of its own.

A process has no other way to end than any driver: it returns, it fails, or it is killed.
"""

from __future__ import annotations

import logging
import math
import os
import random
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import pyarrow as pa

import coordinator.storage.files
import coordinator.storage.sql  # noqa: F401
import sinks.kafka
import sinks.mysql
import sinks.postgres  # noqa: F401
from coordinator import CheckpointConfig, CheckpointCoordinator
from coordinator.task.task import Ack, SinkTask
from sinks.base import TwoPhaseCommitSink
from sinks.testing import SCHEMA
from sinks.testing.driver import fork, redirect_output
from sinks.testing.local import LocalBatch, LocalQuery, Partitions
from tests.chaos import bugs, faults
from tests.chaos.faults import Fault, Injector, Steps, watched, watched_storage

CHECKPOINT = 100_000
"""A row's id is checkpoint * 100,000 + partition * 1,000 + number."""
PARTITIONS = 3
COUNTS = (0, 3, 10, 40)
"""Rows that a partition may have; the first has 7."""
_LIMIT = 900
"""Seconds after which a driver that nobody watches any more ends itself."""


@dataclass(frozen=True)
class Input(Sequence[Partitions]):
    """`batches` micro-batches of three partitions with up to 40 rows, now and then one without any, made from a seed:
    the same for every driver. With `hot`, each partition with rows updates one key of its own in every checkpoint (its
    id is negative, its amount the checkpoint), besides the rows whose keys come once. From the batch `wider` on, rows
    have one more column."""

    seed: str
    batches: int
    hot: bool = False
    wider: float = math.inf

    def __len__(self) -> int:
        return self.batches

    def __getitem__(self, n: Any) -> Partitions:
        if not 0 <= n < self.batches:
            raise IndexError(n)
        rng = random.Random(f"{self.seed}/{n}")
        return [self._partition(n, p, rng.choice(COUNTS) if p else 7) for p in range(PARTITIONS)]

    def _partition(self, n: int, partition: int, count: int) -> pa.Table:
        ids = [n * CHECKPOINT + partition * 1000 + i for i in range(count)]
        amounts = [i + 0.5 for i in range(count)]
        if self.hot:
            ids, amounts = [-1 - partition, *ids], [float(n), *amounts]
        rows = pa.table([ids, [f"user-{id}" for id in ids], amounts], schema=SCHEMA)
        return rows if n < self.wider else rows.append_column("note", pa.array([f"of {n}"] * len(ids), pa.string()))

    def ids(self) -> list[list[int]]:
        """By checkpoint, without the hot keys."""
        return [[id for table in batch for id in table["id"].to_pylist() if id >= 0] for batch in self]


@dataclass(frozen=True)
class Life:
    """All that a driver is started with. `folder` plays the checkpointLocation."""

    job: str
    sinks: Sequence[TwoPhaseCommitSink[Any]]
    storage: str
    folder: Path
    input: Input
    config: CheckpointConfig
    faults: Sequence[Fault] = ()
    bug: str | None = None
    peer: Mapping[str, str] | None = None
    """Spark's own writer with these options, in place of the coordinator and its sinks."""


class LocalProcess:
    """A driver's process, and our end of the connection to it."""

    def __init__(self, life: Life) -> None:
        self.connection, theirs = Pipe()
        self._process = fork(live, life, theirs, preload=__name__)
        theirs.close()

    @property
    def sentinel(self) -> int:
        """Readable once the process has ended."""
        return self._process.sentinel

    @property
    def pid(self) -> int:
        pid = self._process.pid
        assert pid is not None
        return pid

    @property
    def exitcode(self) -> int | None:
        """None while it runs; -9 after SIGKILL."""
        return self._process.exitcode

    def signal(self, number: int) -> None:
        if self.exitcode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def close(self) -> None:
        """The process has ended."""
        self.connection.close()


def live(life: Life, connection: Connection) -> None:
    """In a process that the faults of a life may strike: it ends here, and the supervisor is told if it fails."""
    signal.alarm(_LIMIT)
    redirect_output(life.folder / "driver.log")
    logging.basicConfig(level=logging.WARNING, format=f"%(asctime)s {os.getpid()} %(name)s %(message)s", force=True)
    logging.raiseExceptions = False  # nobody reads them
    faults.here = Injector(connection, life.faults)
    try:
        bugs.switch_on(life.bug)
        sinks = [watched(sink) for sink in life.sinks]
        storage = watched_storage(life.storage)
        with CheckpointCoordinator(life.job, sinks, storage, life.config, [Steps()]) as coordinator:
            _Query(life.folder, life.input).run(coordinator)
    except Exception as error:
        logging.exception("it fails")
        faults.failed(error)
        os._exit(1)
    os._exit(0)


class _Query(LocalQuery):
    def batch(self, n: int, run_id: str) -> LocalBatch:
        batch = super().batch(n, run_id)
        batch.__class__ = _Batch
        return batch


class _Batch(LocalBatch):
    """Hands other rows to a replay than to the first writing, when the fault `source` says so: as a query with the
    current time or a changing lookup in it would."""

    def run(self, tasks: Mapping[str, SinkTask], ended: Callable[[str], None]) -> list[Ack]:
        if faults.here and faults.here.unfaithful and any(task.round for task in tasks.values()):
            self._partitions = [table.slice(0, table.num_rows - 1) for table in self._partitions]
        return super().run(tasks, ended)
