"""The task that runs inside an executor.

It writes a partition into one sink or several, each of which is a participant, and sends acks to
the driver.
"""

from __future__ import annotations

import gc
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import methodcaller
from typing import Protocol, TypeAlias

import pyarrow as pa

from coordinator.task.participant import (
    DeadLetterTransaction,
    FirstWrite,
    ReplayWrite,
    SinkTransaction,
)
from sinks._util.log import get_logger
from sinks.base import Sink
from sinks.dead_letters import RecordedRefusals
from sinks.errors import SinkError
from sinks.transaction import Committable, Fingerprint, Refused, TransactionId

logger = get_logger("sinks.task")

Share: TypeAlias = Callable[[pa.RecordBatch], pa.RecordBatch]
"""The function that takes a sink's rows out of a record batch that several sinks share."""


@dataclass(frozen=True)
class Ack:
    """The outcome of one transaction in a task.

    A task sends one ack for its sink, and one for its dead-letter sink. `committable` is None
    without rows and after an error. `bytes` are those of the record batches.
    """

    sink: str
    subtask: int
    fingerprint: Fingerprint = field(default_factory=Fingerprint)
    committable: Committable | None = None
    error: SinkError | None = None
    bytes: int = 0

    def to_json(self) -> str:
        return json.dumps(
            vars(self)
            | {
                "fingerprint": self.fingerprint.to_json(),
                "committable": self.committable and self.committable.to_json(),
                "error": self.error and self.error.to_json(),
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Ack:
        value = json.loads(text)
        parsed = {
            "fingerprint": Fingerprint.from_json(value["fingerprint"]),
            "committable": value["committable"] and Committable.from_json(value["committable"]),
            "error": value["error"] and SinkError.from_json(value["error"]),
        }
        return cls(**value | parsed)


@dataclass(frozen=True)
class LostRows:
    """The rows that the tasks of one sink have to write again in a replay.

    `own` are the subtasks whose transactions in the sink itself are lost, and `dead_letters` those
    whose transactions in its dead-letter sink are. `refused` has, by subtask, the rows that the
    record names as dead letters, so that they are separated as before. `single_partition` means
    that the batch was written as one partition, and has to come as one again. `spooled` gives the
    kept rows of a subtask, in place of the batch.
    """

    own: frozenset[int]
    dead_letters: frozenset[int] = frozenset()
    refused: Mapping[int, Sequence[Refused]] = field(default_factory=dict)
    single_partition: bool = False
    spooled: Callable[[int], Iterator[pa.RecordBatch]] | None = None

    @property
    def lost(self) -> frozenset[int]:
        return self.own | self.dead_letters


_tasks: Counter[tuple[type[Sink], ...]] = Counter()
"""The number of tasks that this worker has begun, by the kinds of their sinks."""


def _freeze_imports(kind: tuple[type[Sink], ...]) -> None:
    """Leave what this worker has imported out of its searches for garbage.

    This is done when the second task of a kind begins. PySpark's daemon calls `gc.collect` after
    each task (pyspark/daemon.py), and would go through all those modules each time. It did so after
    the task before, so hardly any garbage is kept permanently. Only Spark's Python workers call
    `OnePass`, so no driver does this. Users read of it in docs/sizing.md.
    """
    _tasks[kind] += 1
    if _tasks[kind] == 2:
        gc.freeze()


class RowsKept(Protocol):
    """The rows of a participant on their way into the spool, as they pass."""

    def write(self, batch: pa.RecordBatch) -> None:
        """Keep some rows."""

    def finish(self) -> None:
        """End what is kept, after the last row."""

    def close(self) -> None:
        """Release what is open. Without `finish`, the kept rows never count."""


@dataclass(frozen=True)
class SinkTask:
    """What the tasks of a checkpoint do for one sink.

    With `replay`, all partitions but those that it names are drained. `attempt` is the number of
    tries of the checkpoint that have failed before. `exactly_once` is False in at-least-once mode,
    where the task commits by itself.
    """

    sink: Sink
    job: str
    lineage: str
    checkpoint_id: int
    generation: int
    round: int = 0
    attempt: int = 0
    exactly_once: bool = True
    replay: LostRows | None = None
    spooling: Callable[[int, str], RowsKept] | None = None
    """The function that begins to keep a participant's rows, called with subtask and attempt."""

    def run(
        self, batches: Iterable[pa.RecordBatch], subtask: int, task_attempt: int, slot: int = 0
    ) -> list[Ack]:
        """Write a partition into this sink alone."""
        return OnePass((self,)).run(batches, subtask, task_attempt, slot)

    def part(self, subtask: int, task_attempt: int, slot: int, share: Share) -> _Part | None:
        """Begin this sink's part in a task; None if the task has nothing to write for it."""
        tries = self.generation, self.round, self.attempt, task_attempt
        id = TransactionId(
            self.job, self.lineage, self.checkpoint_id, self.sink.name, subtask, *tries
        )
        write = self._first_or_replay(id, slot)
        transactions = [each for each in (write.own, write.dead_letters) if each]
        if not transactions:
            return None
        spooled = self.replay and self.replay.spooled
        kept = self.spooling(subtask, id.attempt_label) if self.spooling and not spooled else None
        return _Part(self.sink.name, share, write, transactions, kept)

    def _first_or_replay(self, task: TransactionId, slot: int) -> FirstWrite | ReplayWrite:
        arguments = task, slot, self.exactly_once
        replay = self.replay
        letters_sink = self.sink.dead_letters
        subtask = task.subtask
        where = f"the rows of partition {subtask} of checkpoint {self.checkpoint_id}"
        if replay is None:
            dead_letters = DeadLetterTransaction(letters_sink, *arguments) if letters_sink else None
            return FirstWrite(SinkTransaction(self.sink, *arguments), dead_letters, where)
        own = SinkTransaction(self.sink, *arguments) if subtask in replay.own else None
        dead_letters = None
        if letters_sink and subtask in replay.dead_letters:
            dead_letters = DeadLetterTransaction(letters_sink, *arguments)
        return ReplayWrite(
            own, dead_letters, RecordedRefusals(replay.refused.get(subtask, ())), where
        )


@dataclass(frozen=True)
class _Part:
    """One sink's part in a task: its transactions, and the way of the rows into them."""

    sink: str
    share: Share
    rows: FirstWrite | ReplayWrite
    transactions: Sequence[SinkTransaction]
    kept: RowsKept | None

    def open(self) -> None:
        if self.rows.own:
            self.rows.own.open()

    def write(self, shared: pa.RecordBatch) -> None:
        batch = self.share(shared)
        if batch.num_rows:
            if self.kept:
                self.kept.write(batch)
            self.rows.write(batch)

    def finish(self) -> None:
        if self.kept:
            self.kept.finish()
        self.rows.finish()

    def pre_commit(self) -> None:
        for transaction in self.transactions:
            transaction.pre_commit()

    def acks(self, subtask: int) -> list[Ack]:
        return [
            Ack(each.sink.name, subtask, each.fingerprint, each.committable, bytes=each.bytes)
            for each in self.transactions
        ]

    def undo(self) -> None:
        for transaction in self.transactions:
            transaction.undo()

    def close(self) -> None:
        if self.kept:
            self.kept.close()
        for transaction in self.transactions:
            transaction.close()


class _Parts(list[_Part]):
    """The parts of a task, which take each step one after the other."""

    at_work: _Part
    """The part that takes a step, or has failed in it."""

    def each(self, step: Callable[[_Part], None]) -> None:
        for part in self:
            self.at_work = part
            step(part)


@dataclass(frozen=True)
class OnePass:
    """The function given to `DataFrame.mapInArrow`, by which a task writes its partition.

    Each row goes to all sinks of `tasks`, each of which is a participant with transactions of its
    own. What a sink gets carries the row hash as its last column; `shares` say how to get that from
    a record batch, by task (default: all of it). An error of one sink undoes the work of all. A
    `SinkError` comes back in the ack, since Spark's retries cannot help; any other error fails the
    Spark task.
    """

    tasks: tuple[SinkTask, ...]
    shares: tuple[Share, ...] = ()

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        task = TaskContext.get()
        assert task is not None, "this runs inside a Spark task"
        _freeze_imports(tuple(type(each.sink) for each in self.tasks))
        acks = self.run(batches, task.partitionId(), task.taskAttemptId(), task.attemptNumber())
        yield pa.record_batch({"ack": pa.array([ack.to_json() for ack in acks], pa.string())})

    def run(
        self, batches: Iterable[pa.RecordBatch], subtask: int, task_attempt: int, slot: int = 0
    ) -> list[Ack]:
        """Write one partition, and return an ack for each transaction.

        `slot` is the number of Spark's attempt at this partition.
        """
        rows_of_batch = iter(batches)
        shares = self.shares or (_whole,) * len(self.tasks)
        begun = (
            task.part(subtask, task_attempt, slot, share)
            for task, share in zip(self.tasks, shares, strict=True)
        )
        parts = _Parts(part for part in begun if part)
        if not parts:
            _drain(rows_of_batch)
            return []
        try:
            parts.each(_Part.open)
            for batch in self._spooled(subtask) or rows_of_batch:
                parts.each(methodcaller("write", batch))
            parts.each(_Part.finish)
            parts.each(_Part.pre_commit)
            return [ack for part in parts for ack in part.acks(subtask)]
        except BaseException as error:
            for part in parts:
                part.undo()
            if not isinstance(error, SinkError):
                raise
            sink = parts.at_work.sink
            checkpoint_id = self.tasks[0].checkpoint_id
            logger.warning(
                "subtask %d of sink %r in checkpoint %d failed: %s",
                subtask,
                sink,
                checkpoint_id,
                error,
            )
            _drain(rows_of_batch)
            return [Ack(sink, subtask, error=error)]
        finally:
            for part in parts:
                part.close()

    def _spooled(self, subtask: int) -> Iterator[pa.RecordBatch] | None:
        """Return the kept rows of a replay, which come in place of the batch, to one sink."""
        replay = self.tasks[0].replay
        return replay.spooled(subtask) if replay and replay.spooled else None


def together(tasks: Iterable[SinkTask]) -> Iterator[tuple[SinkTask, ...]]:
    """Yield the tasks that one Spark job can do together.

    A replay of one partition cannot be in one Spark job with that of several partitions.
    """
    groups: dict[bool, list[SinkTask]] = {False: [], True: []}
    for task in tasks:
        groups[bool(task.replay and task.replay.single_partition)].append(task)
    return (tuple(group) for group in groups.values() if group)


def _whole(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


def _drain(batches: Iterator[pa.RecordBatch]) -> None:
    for _ in batches:
        pass
