"""What runs inside an executor: one sink driven through one participant, and the ack that goes back to the driver."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from sinks.base import TwoPhaseCommitSink
from sinks.errors import LargeRow, SinkError
from sinks.transaction import Committable, Fingerprint, TransactionContext, TransactionId

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

logger = logging.getLogger(__name__)

HASH_COLUMN = "__tpc_row_hash"
ACK_SCHEMA = "subtask int, ack string"
_ACK_ARROW = pa.schema([("subtask", pa.int32()), ("ack", pa.string())])
_ON_DRIVER = 10**15
"""In place of Spark's number of a task attempt, which counts from 0 and never gets there."""


@dataclass(frozen=True)
class Ack:
    """One participant's acknowledgement. `committable` is None for a partition without rows and after an error; `bytes`
    are those of the record batches."""

    subtask: int
    fingerprint: Fingerprint
    committable: Committable | None = None
    error: SinkError | None = None
    bytes: int = 0

    def to_json(self) -> str:
        return json.dumps(
            {
                "subtask": self.subtask,
                "fingerprint": self.fingerprint.to_json(),
                "committable": self.committable and self.committable.to_json(),
                "error": self.error and self.error.to_json(),
                "bytes": self.bytes,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Ack:
        value: dict[str, Any] = json.loads(text)
        return cls(
            value["subtask"],
            Fingerprint.from_json(value["fingerprint"]),
            value["committable"] and Committable.from_json(value["committable"]),
            value["error"] and SinkError.from_json(value["error"]),
            value["bytes"],
        )


@dataclass(frozen=True)
class SinkTask:
    """The function given to `DataFrame.mapInArrow`. Batches carry the row hash as their last column.

    A `SinkError` comes back in the ack, since Spark's retries cannot help; anything else fails the Spark task.
    With `only`, all partitions but those are drained: a replay rewrites lost participants alone.
    """

    sink: TwoPhaseCommitSink[Any]
    job: str
    lineage: str
    checkpoint_id: int
    generation: int
    round: int = 0
    attempt: int = 0
    only: frozenset[int] | None = None
    exactly_once: bool = True
    whole: bool = False
    """Whether all rows are to come as one partition: a replay of a batch that was written as one."""
    rows: Callable[[Iterable[pa.RecordBatch], int, str], Iterator[pa.RecordBatch]] | None = None
    """Takes the rows that Spark gives to a subtask in an attempt; keeps them as they pass, or gives others instead."""

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        task = TaskContext.get()
        assert task is not None, "a SinkTask runs inside a Spark task"
        ack = self.run(batches, task.partitionId(), task.taskAttemptId(), task.attemptNumber())
        yield pa.RecordBatch.from_pylist([{"subtask": ack.subtask, "ack": ack.to_json()}], schema=_ACK_ARROW)

    def run(self, batches: Iterable[pa.RecordBatch], subtask: int, task_attempt: int, slot: int = 0) -> Ack:
        batches = iter(batches)
        if self.only is not None and subtask not in self.only:
            _drain(batches)
            return Ack(subtask, Fingerprint())
        if self.rows:
            batches = self.rows(batches, subtask, self._attempt(task_attempt))
        try:
            self.sink.open()
            return self._participate(batches, subtask, task_attempt, slot)
        except SinkError as error:
            logger.warning("subtask %d of checkpoint %d failed: %s", subtask, self.checkpoint_id, error)
            _drain(batches)
            return Ack(subtask, Fingerprint(), error=error)
        finally:
            try:
                self.sink.close()
            except Exception:
                logger.warning("sink %r could not be closed in subtask %d", self.sink.name, subtask, exc_info=True)

    def run_on_driver(self, batches: Iterable[pa.RecordBatch]) -> Ack:
        """The one participant of a small batch. With the driver's own sink, which is open and stays so."""
        try:
            rows = self.rows(batches, 0, self._attempt(_ON_DRIVER)) if self.rows else iter(batches)
            return self._participate(rows, 0, _ON_DRIVER, 0)
        except SinkError as error:
            logger.warning("checkpoint %d failed on the driver: %s", self.checkpoint_id, error)
            return Ack(0, Fingerprint(), error=error)

    def _participate(self, batches: Iterator[pa.RecordBatch], subtask: int, task_attempt: int, slot: int) -> Ack:
        filled = (batch for batch in batches if batch.num_rows)
        first = next(filled, None)
        fingerprint, size = Fingerprint(), 0
        if first is None:
            return Ack(subtask, fingerprint)
        schema = first.schema.remove(first.num_columns - 1)
        transaction = self.sink.begin_transaction(self._context(schema, subtask, task_attempt, slot))
        try:
            for batch in chain([first], filled):
                *columns, hashes = batch.columns
                if hashes.null_count:
                    raise LargeRow(
                        "a row takes more than its share of a record batch (64 MiB / maxRecordsPerBatch); from here "
                        "on this driver lets Spark's maxBytesPerBatch bound record batches instead"
                    )
                rows = pa.RecordBatch.from_arrays(columns, schema=schema)
                self.sink.write(transaction, rows)
                size += rows.nbytes
                fingerprint = fingerprint.add(batch.num_rows, pc.sum(hashes).as_py())
            if not self.exactly_once:
                self.sink.commit_directly(transaction)
                return Ack(subtask, fingerprint, bytes=size)
            self.sink.sum_up(transaction, fingerprint)
            committable = self.sink.snapshot_state(transaction)
            return Ack(subtask, fingerprint, committable.of(self.sink.name, subtask, fingerprint), bytes=size)
        except BaseException:
            try:
                self.sink.rollback(transaction)
            except Exception:
                logger.warning("rollback of subtask %d failed; it is left to the sweep", subtask, exc_info=True)
            raise

    def _attempt(self, task_attempt: int) -> str:
        return f"g{self.generation}r{self.round}t{self.attempt}a{task_attempt}"

    def _context(self, schema: pa.Schema, subtask: int, task_attempt: int, slot: int) -> TransactionContext:
        name = TransactionId(
            self.job,
            self.lineage,
            self.checkpoint_id,
            self.sink.name,
            subtask,
            self.generation,
            self.round,
            self.attempt,
            task_attempt,
        )
        return TransactionContext(
            self.job,
            self.lineage,
            self.checkpoint_id,
            self.sink.name,
            subtask,
            self._attempt(task_attempt),
            schema,
            str(name),
            slot,
            self.exactly_once,
        )


def with_row_hash(df: DataFrame) -> DataFrame:
    """`df` with Spark's xxhash64 of each row as last column. Maps and variants, which have no hash, go in as JSON."""
    from pyspark.sql import functions

    return df.withColumn(
        HASH_COLUMN, functions.xxhash64(*[_hashable(df, f.name, f.dataType.jsonValue()) for f in df.schema])
    )


def _hashable(df: DataFrame, name: str, data_type: Any) -> Column:
    from pyspark.sql import functions

    column = df[f"`{name.replace('`', '``')}`"]
    kinds = json.dumps(data_type)
    return functions.to_json(functions.struct(column)) if '"map"' in kinds or '"variant"' in kinds else column


def _drain(batches: Iterator[pa.RecordBatch]) -> None:
    for _ in batches:
        pass
