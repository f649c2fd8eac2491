"""The task that runs inside an executor.

It drives one sink through one participant, and sends an ack to the driver.
"""

from __future__ import annotations

import gc
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

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


_tasks: Counter[type[Sink]] = Counter()
"""The number of tasks that this worker has begun, by kind of sink."""


def _freeze_imports(kind: type[Sink]) -> None:
    """Leave what this worker has imported out of its searches for garbage.

    This is done when the second task of a kind begins. PySpark's daemon calls `gc.collect` after
    each task (pyspark/daemon.py), and would go through all those modules each time. It did so after
    the task before, so hardly any garbage is kept permanently. Only Spark's Python workers call a
    `SinkTask`, so no driver does this. Users read of it in docs/sizing.md.
    """
    _tasks[kind] += 1
    if _tasks[kind] == 2:
        gc.freeze()


@dataclass(frozen=True)
class SinkTask:
    """The function given to `DataFrame.mapInArrow`.

    Batches carry the row hash as their last column. A `SinkError` comes back in the ack, since
    Spark's retries cannot help; any other error fails the Spark task. With `replay`, all partitions
    but those that it names are drained. `attempt` is the number of tries of the checkpoint that
    have failed before. `exactly_once` is False in at-least-once mode, where the task commits by
    itself.
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
    spooling: Callable[[Iterable[pa.RecordBatch], int, str], Iterator[pa.RecordBatch]] | None = None
    """The function that keeps rows in the spool, and yields them.

    It is called with the rows, the subtask and the attempt.
    """

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        task = TaskContext.get()
        assert task is not None, "a SinkTask runs inside a Spark task"
        _freeze_imports(type(self.sink))
        acks = self.run(batches, task.partitionId(), task.taskAttemptId(), task.attemptNumber())
        yield pa.record_batch({"ack": pa.array([ack.to_json() for ack in acks], pa.string())})

    def run(
        self, batches: Iterable[pa.RecordBatch], subtask: int, task_attempt: int, slot: int = 0
    ) -> list[Ack]:
        rows_of_batch = iter(batches)
        tries = self.generation, self.round, self.attempt, task_attempt
        task = TransactionId(
            self.job, self.lineage, self.checkpoint_id, self.sink.name, subtask, *tries
        )
        write = self._first_or_replay(task, slot)
        transactions = [
            transaction for transaction in (write.own, write.dead_letters) if transaction
        ]
        if not transactions:
            _drain(rows_of_batch)
            return []
        try:
            if write.own:
                write.own.open()
            rows = rows_of_batch
            if self.replay and self.replay.spooled:
                rows = self.replay.spooled(subtask)
            elif self.spooling:
                rows = self.spooling(rows_of_batch, subtask, task.attempt_label)
            for batch in rows:
                if batch.num_rows:
                    write.write(batch)
            write.finish()
            for transaction in transactions:
                transaction.pre_commit()
            return [
                Ack(each.sink.name, subtask, each.fingerprint, each.committable, bytes=each.bytes)
                for each in transactions
            ]
        except BaseException as error:
            for transaction in transactions:
                transaction.undo()
            if not isinstance(error, SinkError):
                raise
            logger.warning(
                "subtask %d of checkpoint %d failed: %s", subtask, self.checkpoint_id, error
            )
            _drain(rows_of_batch)
            return [Ack(self.sink.name, subtask, error=error)]
        finally:
            for transaction in transactions:
                transaction.close()

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


def _drain(batches: Iterator[pa.RecordBatch]) -> None:
    for _ in batches:
        pass
