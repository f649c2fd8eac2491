"""A participant: the rows of one partition on their way into a sink, and those that it refuses into its sink of dead
letters."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from sinks.base import Sink
from sinks.dead_letters import (
    RecordedRefusals,
    Refusal,
    letter_rows,
    letters_in_ascii,
    most_in_task,
    shortened,
    too_many,
    without,
)
from sinks.optional import Auditable, DeadLettering, commit_now
from sinks.transaction import Checkpoint, Committable, Fingerprint, Refused, TransactionId

logger = logging.getLogger(__name__)


@dataclass
class SinkTransaction:
    """One transaction of a sink in a task, with count and hash of its rows. It begins with its first row.
    `transaction_id` has the name of the task's sink, also where `sink` takes its dead letters."""

    sink: Sink
    transaction_id: TransactionId
    slot: int
    exactly_once: bool
    fingerprint: Fingerprint = field(default_factory=Fingerprint)
    bytes: int = 0
    committable: Committable | None = None
    refused: list[Refused] = field(default_factory=list)
    """If its rows are dead letters: the hash of each, and the error."""
    _is_open: bool = False
    _begun: bool = False
    _transaction: Any = None

    def open(self) -> None:
        if not self._is_open:
            self._is_open = True
            self.sink.open()

    def close(self) -> None:
        if self._is_open:
            try:
                self.sink.close()
            except Exception:
                where = self.sink.name, self.transaction_id.subtask
                logger.warning("sink %r could not be closed in subtask %d", *where, exc_info=True)

    def write(self, rows: pa.RecordBatch, hashes: pa.Array) -> None:
        self._begin(rows.schema)
        self.sink.write(self._transaction, rows)
        self._add(rows, hashes)

    def write_good_rows(self, rows: pa.RecordBatch, hashes: pa.Array, most: int) -> Sequence[Refusal]:
        """Write the rows that the target takes; returns the others."""
        self._begin(rows.schema)
        assert isinstance(self.sink, DeadLettering)
        refused = self.sink.write_good_rows(self._transaction, rows, most)
        if len(refused) <= most:
            self._add(*_accepted(rows, hashes, refused))
        return refused

    def _begin(self, schema: pa.Schema) -> None:
        if not self._begun:
            self.open()
            own = replace(self.transaction_id, sink=self.sink.name)
            context = own.context(schema, self.slot, exactly_once=self.exactly_once)
            self._transaction = self.sink.begin_transaction(context)
            self._begun = True

    def _add(self, rows: pa.RecordBatch, hashes: pa.Array) -> None:
        if rows.num_rows:
            self.bytes += rows.nbytes
            self.fingerprint = self.fingerprint.add(rows.num_rows, pc.sum(hashes).as_py())

    def pre_commit(self) -> None:
        """Pre-commit, if there are rows; in at-least-once mode commit."""
        if not self._begun:
            return
        if not self.fingerprint.rows:
            self.undo()
        elif not self.exactly_once:
            task = self.transaction_id
            commit_now(self.sink, self._transaction, Checkpoint(task.job, task.lineage, task.checkpoint))
        else:
            if isinstance(self.sink, Auditable):
                self.sink.record_fingerprint(self._transaction, self.fingerprint)
            committable = self.sink.snapshot_state(self._transaction)
            self.committable = committable.of(
                self.sink.name, self.transaction_id.subtask, self.fingerprint, self.refused
            )
        self._begun = False

    def undo(self) -> None:
        """Roll it back, or abort it if it is pre-committed. What fails is left to the sweep."""
        try:
            if self._begun:
                self._begun = False
                self.sink.rollback(self._transaction)
            elif self.committable:
                self.sink.abort(self.committable.transaction)
        except Exception:
            logger.warning("sink %r could not roll back; it is left to the sweep", self.sink.name, exc_info=True)


@dataclass
class LettersTransaction(SinkTransaction):
    """The transaction of a sink of dead letters, in a task of the sink that refuses them."""

    _rows_before: int = 0

    def write_refused(self, rows: pa.RecordBatch, hashes: pa.Array, refused: Sequence[Refusal]) -> None:
        """Write the refused ones of `rows`. Called for every batch of the partition in turn, since row numbers count
        on."""
        if refused:
            own = hashes.take(pa.array([refusal.row for refusal in refused], pa.int64()))
            letters = letter_rows(self.transaction_id.context(rows.schema), rows, self._rows_before, refused)
            self._begin(letters.schema)
            lacking = isinstance(self.sink, DeadLettering) and self.sink.lacks_characters()
            self.write(letters_in_ascii(letters) if lacking else letters, own)
            self.refused += [
                Refused(row_hash, refusal.error_class, shortened(refusal.error))
                for row_hash, refusal in zip(own.to_pylist(), refused, strict=True)
            ]
        self._rows_before += rows.num_rows


@dataclass
class FirstWrite:
    """Writes rows for the first time: the target says which it takes. `where`: what rows these are, for people."""

    own: SinkTransaction
    letters: LettersTransaction | None
    where: str

    def write(self, batch: pa.RecordBatch) -> None:
        rows, hashes = split_hash_column(batch)
        if self.letters is None:
            self.own.write(rows, hashes)
            return
        sink, before = self.own.sink, self.letters.refused
        assert isinstance(sink, DeadLettering)
        most = most_in_task(sink.max_dead_letters)
        refused = self.own.write_good_rows(rows, hashes, most - len(before))
        if len(before) + len(refused) > most:
            reasons = [(row.error_class, row.error) for row in before[:3]]
            reasons += [(row.error_class, row.error) for row in refused[: 3 - len(reasons)]]
            raise too_many(sink.name, f"more than {most:,} of {self.where} alone", sink.max_dead_letters, reasons)
        self.letters.write_refused(rows, hashes, refused)


@dataclass
class ReplayWrite:
    """Writes lost rows again: the record says which the target took then (R17), whatever it would take now."""

    own: SinkTransaction | None
    letters: LettersTransaction | None
    recorded: RecordedRefusals

    def write(self, batch: pa.RecordBatch) -> None:
        rows, hashes = split_hash_column(batch)
        refused = self.recorded.find_refused(hashes)
        accepted, their_hashes = _accepted(rows, hashes, refused)
        if self.own and accepted.num_rows:
            self.own.write(accepted, their_hashes)
        if self.letters:
            self.letters.write_refused(rows, hashes, refused)


def split_hash_column(batch: pa.RecordBatch) -> tuple[pa.RecordBatch, pa.Array]:
    """The rows, and their hashes, which are the last column."""
    last = batch.num_columns - 1
    return batch.remove_column(last), batch.column(last)


def _accepted(rows: pa.RecordBatch, hashes: pa.Array, refused: Sequence[Refusal]) -> tuple[pa.RecordBatch, pa.Array]:
    """The rows that were not refused, with their hashes."""
    if not refused:
        return rows, hashes
    accepted = without(rows.num_rows, refused)
    return rows.take(accepted), hashes.take(accepted)
