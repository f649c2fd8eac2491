"""A streaming query in one process, for tests: it calls the coordinator as Spark does, from the
same two logs.

`offsets/N` is there before batch N is handed over, `commits/N` after it came back, and a restart
hands over the first batch that has no commit, with the same rows. Sinks, storage and protocol are
the real ones; only Spark is missing, so a driver starts in a fraction of a second and can be killed
thousands of times.
"""

from __future__ import annotations

import hashlib
import json
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa
from pyspark import cloudpickle

from coordinator import CheckpointCoordinator
from coordinator.protocol.ports import BatchFacts, TopicIds
from coordinator.spark.checkpoint_location import facts_in
from coordinator.task.row_hash import HASH_COLUMN
from coordinator.task.task import Ack, OnePass, SinkTask
from sinks.base import TwoPhaseCommitSink

Partitions = Sequence[pa.Table]


class LocalBatch:
    """One micro-batch of in-memory partitions."""

    row_hash = "local"

    def __init__(
        self, facts: BatchFacts, run_id: str, partitions: Partitions, query: LocalQuery
    ) -> None:
        self.facts = facts
        self.run_id = run_id
        self.location = str(query.folder)
        self.query = query
        self.active = not query.stopped
        self.topic_ids = query.topic_ids
        self.rows: int | None = sum(rows.num_rows for rows in partitions)
        self._partitions = partitions
        self._attempts = 0
        self.drained = 0
        self._cancelled = False

    def raise_stopped(self) -> NoReturn:
        raise QueryStopped

    def facts_of(self, checkpoint_id: int) -> BatchFacts:
        return self.query.facts_of(checkpoint_id)

    def is_done(self, checkpoint_id: int) -> bool:
        return (self.query.folder / "commits" / str(checkpoint_id)).exists()

    def schema(self, sink: TwoPhaseCommitSink[Any]) -> pa.Schema:
        return self._partitions[0].schema

    def partitions(self, sink: TwoPhaseCommitSink[Any]) -> int:
        return len(self._partitions)

    def run(self, tasks: Mapping[str, SinkTask], ended: Callable[[str], None]) -> list[Ack]:
        acks: list[Ack] = []
        self._cancelled = False
        alone = [task for task in tasks.values() if task.replay or task.sink.writes_alone]
        together = tuple(task for task in tasks.values() if task not in alone)
        passes = [OnePass(together)] if together else []
        passes += [OnePass((task,)) for task in alone]
        for one_pass in passes:
            replay = one_pass.tasks[0].replay
            partitions = self._partitions
            if replay and replay.spooled:
                partitions = [partitions[0].slice(0, 0)] * (1 + max(replay.lost))
            elif replay and replay.single_partition:
                partitions = [pa.concat_tables(partitions)]
            for subtask, rows in enumerate(partitions):
                if self._cancelled:
                    raise RuntimeError("cancelled")
                self._attempts += 1
                copy: OnePass = cloudpickle.loads(cloudpickle.dumps(one_pass))  # type: ignore[no-untyped-call]
                acks += copy.run(with_row_hash(rows), subtask, self._attempts)
            for task in one_pass.tasks:
                ended(task.sink.name)
        return acks

    def cancel(self) -> None:
        self._cancelled = True

    def weaknesses(self, *, recomputed: bool) -> list[str]:
        return []

    def drain(self) -> None:
        self.drained += 1

    def same_rows(self, other: LocalBatch) -> bool:
        return self._partitions is other._partitions


@dataclass(frozen=True)
class Progress:
    batchId: int  # noqa: N815 - Spark's name


class QueryStopped(Exception):
    """Ends a query that was told to stop."""


class LocalQuery:
    """`input[n]` are the partitions of batch n; `folder` plays the checkpointLocation."""

    def __init__(self, folder: str | Path, input: Sequence[Partitions]) -> None:
        self.folder = Path(folder)
        self.input = input
        for log in ("offsets", "commits"):
            (self.folder / log).mkdir(parents=True, exist_ok=True)
        identity = self.folder / "metadata"
        if not identity.exists():
            identity.write_text(json.dumps({"id": str(uuid.uuid4())}))
        self.query_id = json.loads(identity.read_text())["id"]
        self.stopped = False
        self.topic_ids: Callable[[], TopicIds] = tuple
        """As `MicroBatch` has it."""
        self._batch: LocalBatch | None = None
        self._handed_over: list[int] = []
        self._ended = threading.Event()
        self._ended.set()

    def batch(self, n: int, run_id: str) -> LocalBatch:
        staged = self.folder / "offsets" / f".{uuid.uuid4()}"
        staged.write_text(f'v1\n{{}}\n{{"end":{n}}}')
        # as Spark does: another driver may read it meanwhile
        staged.replace(self.folder / "offsets" / str(n))
        if self._batch and self._batch.run_id != run_id:
            self._handed_over.clear()
        self._handed_over.append(n)
        self._batch = LocalBatch(self.facts_of(n), run_id, self.input[n], self)
        return self._batch

    def facts_of(self, n: int) -> BatchFacts:
        return facts_in((self.folder / "offsets" / str(n)).read_text(), n, self.query_id)

    def next_batch(self) -> int:
        """As Spark chooses it: the newest that has offsets, again if it is not in `commits`."""
        newest = max(
            (int(file.name) for file in (self.folder / "offsets").glob("[0-9]*")), default=0
        )
        return newest + (self.folder / "commits" / str(newest)).exists()

    def run(self, coordinator: CheckpointCoordinator) -> None:
        """Run to the end of the input from wherever the logs say, as one start of the query."""
        run_id = str(uuid.uuid4())
        self._ended.clear()
        try:
            for n in range(self.next_batch(), len(self.input)):
                coordinator.process(self.batch(n, run_id))
                (self.folder / "commits" / str(n)).touch()
        except QueryStopped:
            pass
        finally:
            self._ended.set()

    @property
    def isActive(self) -> bool:  # noqa: N802 - Spark's name
        return not self._ended.is_set()

    @property
    def status(self) -> dict[str, bool]:
        return {"isTriggerActive": self.isActive}

    @property
    def recentProgress(self) -> list[Progress]:  # noqa: N802 - Spark's name
        return [Progress(n) for n in self._handed_over]

    def exception(self) -> None:
        """`run` raises it."""

    def stop(self) -> None:
        """From another thread: returns when `run` has returned."""
        self.stopped = True
        if self._batch:
            self._batch.active = False
        self._ended.wait()


def with_row_hash(rows: pa.Table) -> list[pa.RecordBatch]:
    """The record batches of a partition with the row hash that Spark would add."""
    hashes = [
        int.from_bytes(hashlib.sha256(repr(row).encode()).digest()[:8], "big", signed=True)
        for row in rows.to_pylist()
    ]
    batches: list[pa.RecordBatch] = rows.append_column(
        HASH_COLUMN, pa.array(hashes, pa.int64())
    ).to_batches(100)
    return batches
