"""A participant: the rows of one partition on their way into a sink.

The rows that the sink refuses go into its dead-letter sink.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sinks._util.log import get_logger
from sinks.base import Sink
from sinks.dead_letters import (
    UNTRIED,
    RecordedRefusals,
    Refusal,
    letter_rows,
    letters_in_ascii,
    most_in_task,
    shortened,
    too_many,
    without,
)
from sinks.errors import BadValue
from sinks.optional import Auditable, DeadLettering, commit_now
from sinks.transaction import Checkpoint, Committable, Fingerprint, Refused, TransactionId

logger = get_logger(__name__)

MAX_WAITING_BYTES = 64 * 2**20
"""The bytes that the waiting rows of a task may take in memory."""
_MAX_REFUSALS_IN_A_ROUND = 1000
"""The number of refusals, each of one row, after which a round tries no further row.

The next round begins at the other end. If as many rows are refused there, too, the target refuses
too many.
"""


@dataclass
class SinkTransaction:
    """A transaction of a sink in a task, with count and hash of its rows.

    It begins with its first row. `transaction_id` has the name of the task's sink, even where
    `sink` takes the dead letters of that sink.
    """

    sink: Sink
    transaction_id: TransactionId
    slot: int
    exactly_once: bool
    fingerprint: Fingerprint = field(default_factory=Fingerprint)
    bytes: int = 0
    committable: Committable | None = None
    refused: list[Refused] = field(default_factory=list)
    """The hash and the error of each row, if the rows are dead letters."""
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

    def write(self, numbered: NumberedRows) -> None:
        self._begin(numbered.rows.schema)
        self.sink.write(self._transaction, numbered.rows)
        self._add(numbered)

    def write_good_rows(self, numbered: NumberedRows, most: int) -> Sequence[Refusal]:
        """Write the rows that the target takes, and return the refusals of the others.

        If more than `most` refusals are final, not all refusals are returned.
        """
        self._begin(numbered.rows.schema)
        assert isinstance(self.sink, DeadLettering)
        refused = self.sink.write_good_rows(self._transaction, numbered.rows, most)
        if sum(refusal.final for refusal in refused) <= most:
            self._add(numbered.without(refused))
        return refused

    def _begin(self, schema: pa.Schema) -> None:
        if not self._begun:
            self.open()
            own = replace(self.transaction_id, sink=self.sink.name)
            context = own.context(schema, self.slot, exactly_once=self.exactly_once)
            self._transaction = self.sink.begin_transaction(context)
            self._begun = True

    def _add(self, numbered: NumberedRows) -> None:
        if count := numbered.rows.num_rows:
            self.bytes += numbered.rows.nbytes
            self.fingerprint = self.fingerprint.add(count, pc.sum(numbered.hashes).as_py())

    def pre_commit(self) -> None:
        """Pre-commit the transaction, or commit it in at-least-once mode.

        Does nothing without rows.
        """
        if not self._begun:
            return
        if not self.fingerprint.rows:
            self.undo()
        elif not self.exactly_once:
            task = self.transaction_id
            commit_now(
                self.sink, self._transaction, Checkpoint(task.job, task.lineage, task.checkpoint)
            )
        else:
            if isinstance(self.sink, Auditable):
                self.sink.record_fingerprint(self._transaction, self.fingerprint)
            committable = self.sink.snapshot_state(self._transaction)
            self.committable = committable.of(
                self.sink.name, self.transaction_id.subtask, self.fingerprint, self.refused
            )
        self._begun = False

    def undo(self) -> None:
        """Roll the transaction back, or abort it if it is pre-committed.

        If that fails, the transaction is left to the sweep.
        """
        try:
            if self._begun:
                self._begun = False
                self.sink.rollback(self._transaction)
            elif self.committable:
                self.sink.abort(self.committable.transaction)
        except Exception:
            logger.warning(
                "sink %r could not roll back; it is left to the sweep",
                self.sink.name,
                exc_info=True,
            )


@dataclass
class DeadLetterTransaction(SinkTransaction):
    """The transaction of a dead-letter sink, in a task of the sink that refuses the rows."""

    def write_refused(self, numbered: NumberedRows, refused: Sequence[Refusal]) -> None:
        """Write the refused ones of the rows, in the order of their numbers."""
        if not refused:
            return
        refused = sorted(refused, key=lambda refusal: numbered.numbers[refusal.row].as_py())
        own = numbered.hashes.take(pa.array([refusal.row for refusal in refused], pa.int64()))
        context = self.transaction_id.context(numbered.rows.schema)
        letters = letter_rows(context, numbered.rows, numbered.numbers, refused)
        self._begin(letters.schema)
        if isinstance(self.sink, DeadLettering) and self.sink.lacks_characters():
            letters = letters_in_ascii(letters)
        self.write(NumberedRows(letters, own, letters["row_number"]))
        self.refused += [
            Refused(row_hash, refusal.error_class, shortened(refusal.error))
            for row_hash, refusal in zip(own.to_pylist(), refused, strict=True)
        ]


TriedRows: TypeAlias = Iterator[tuple["NumberedRows", Sequence[Refusal]]]
"""Rows that were tried, and the refusals of those that the target refuses permanently."""


@dataclass
class GoodRows:
    """The writer of those rows of a partition that the target takes.

    A row that the target may refuse because of other rows (a foreign key, a trigger) waits here,
    and is tried again when the others are written. `where` says which rows these are, for people.
    """

    own: SinkTransaction
    where: str
    _waiting: dict[str, list[NumberedRows]] = field(default_factory=dict)
    """The rows that wait, by the class of the error.

    Rows that lack the same kind of thing may refer to each other, even in a circle. If they are
    tried together, they get into one statement.
    """
    _size: int = 0

    @property
    def max_refused(self) -> int:
        """Return the number of rows that may be refused permanently."""
        sink = self.own.sink
        return most_in_task(sink.max_dead_letters) if isinstance(sink, DeadLettering) else 0

    def write(self, numbered: NumberedRows) -> TriedRows:
        refused = self.own.write_good_rows(numbered, self.max_refused)
        yield numbered, self._wait(numbered, refused)
        if self._size <= MAX_WAITING_BYTES:
            return
        tried, _ = self._try_again()
        for again, refused in tried:
            yield again, self._wait(again, refused)
        if self._size > MAX_WAITING_BYTES // 2:  # or each record batch would retry all
            raise self._too_large([refusal for _, refused in tried for refusal in refused])

    def finish(self) -> TriedRows:
        """Try the waiting rows again, after the last row, as long as the target takes some of them.

        The others are refused permanently.
        """
        in_vain = 0
        while self._waiting:
            tried, any_written = self._try_again()
            in_vain = 0 if any_written else in_vain + 1
            untried = any(
                refusal.error_class == UNTRIED for _, refused in tried for refusal in refused
            )
            is_over = in_vain == 2 or (in_vain == 1 and not untried)
            for numbered, refused in tried:
                yield numbered, refused if is_over else self._wait(numbered, refused)

    def _wait(self, numbered: NumberedRows, refused: Sequence[Refusal]) -> Sequence[Refusal]:
        """Keep the rows that the target may take later, and return the refusals of the others."""
        kinds: dict[str, list[int]] = {}
        for refusal in refused:
            if not refusal.final:
                kinds.setdefault(refusal.error_class, []).append(refusal.row)
        for kind, places in kinds.items():
            rows = numbered.take(places)
            self._waiting.setdefault(kind, []).append(rows)
            self._size += rows.nbytes
        return [refusal for refusal in refused if refusal.final]

    def _try_again(self) -> tuple[list[tuple[NumberedRows, Sequence[Refusal]]], bool]:
        """Try all rows that wait once more, backwards each time.

        The order changes because rows may come before those that they refer to. Returns them with
        what is refused now, and whether any row was written.
        """
        waiting = self._waiting
        self._waiting = {}
        self._size = 0
        tried = []
        any_written = False
        for _, parts in sorted(waiting.items()):
            numbered = NumberedRows.concatenate(parts).reversed()
            refused = self.own.write_good_rows(
                numbered, max(self.max_refused, _MAX_REFUSALS_IN_A_ROUND)
            )
            any_written = any_written or len(refused) < numbered.rows.num_rows
            tried.append((numbered, refused))
        return tried, any_written

    def _too_large(self, refused: Sequence[Refusal]) -> BadValue:
        reasons = dict.fromkeys(
            f"\n  - {one.error_class}: {shortened(one.error)}" for one in refused if one.error
        )
        return BadValue(
            f"sink {self.own.sink.name!r}: so many of {self.where} are refused as long as others "
            f"are not written that they take more than {MAX_WAITING_BYTES >> 20} MiB in the task; "
            f"the first reasons:{''.join([*reasons][:3])}\nFix what the target names, or write "
            "smaller batches [EO-WAITING-ROWS]"
        )


@dataclass
class FirstWrite:
    """The first write of rows, when the target says which of them it takes.

    `where` says which rows these are, for people.
    """

    own: SinkTransaction
    dead_letters: DeadLetterTransaction | None
    where: str
    _rows: int = 0

    def __post_init__(self) -> None:
        self._good = GoodRows(self.own, self.where)

    def write(self, batch: pa.RecordBatch) -> None:
        numbered = NumberedRows.from_batch(batch, self._rows)
        self._rows += batch.num_rows
        if self.dead_letters is None:
            self.own.write(numbered)
        else:
            self._write_letters(self.dead_letters, self._good.write(numbered))

    def finish(self) -> None:
        """Write the rows that still wait, after the last row, or make dead letters of them."""
        if self.dead_letters is not None:
            self._write_letters(self.dead_letters, self._good.finish())

    def _write_letters(self, letters: DeadLetterTransaction, tried: TriedRows) -> None:
        for numbered, refused in tried:
            before = letters.refused
            most = self._good.max_refused
            if len(before) + len(refused) > most:
                sink = self.own.sink
                assert isinstance(sink, DeadLettering)
                reasons = [(row.error_class, row.error) for row in before[:3]]
                reasons += [(row.error_class, row.error) for row in refused[: 3 - len(reasons)]]
                count = f"more than {most:,} of {self.where} alone"
                raise too_many(sink.name, count, sink.max_dead_letters, reasons)
            letters.write_refused(numbered, refused)


@dataclass
class ReplayWrite:
    """The write of lost rows in a replay.

    The record says which rows the target took then (R17), and no other row is tried. The rows go
    the same way as the first time, since a row may have waited for another one. `where` is as for
    `FirstWrite`.
    """

    own: SinkTransaction | None
    dead_letters: DeadLetterTransaction | None
    recorded: RecordedRefusals
    where: str
    _rows: int = 0

    def __post_init__(self) -> None:
        self._good = (
            GoodRows(self.own, self.where) if self.own and self.own.sink.dead_letters else None
        )

    def write(self, batch: pa.RecordBatch) -> None:
        numbered = NumberedRows.from_batch(batch, self._rows)
        self._rows += batch.num_rows
        refused = self.recorded.find_refused(numbered.hashes)
        accepted = numbered.without(refused)
        if self._good and accepted.rows.num_rows:
            self._require_taken(self._good.write(accepted))
        elif self.own and accepted.rows.num_rows:
            self.own.write(accepted)
        if self.dead_letters:
            self.dead_letters.write_refused(numbered, refused)

    def finish(self) -> None:
        """Write the rows that still wait, after the last row."""
        if self._good:
            self._require_taken(self._good.finish())

    def _require_taken(self, tried: TriedRows) -> None:
        for numbered, refused in tried:
            for refusal in refused[:1]:
                raise BadValue(
                    f"of {self.where} the row {numbered.numbers[refusal.row]}, counted from 0, was "
                    "taken when the checkpoint was decided, and the target refuses it now: "
                    f"{refusal.error_class}: {refusal.error}. Let the table take it again, and "
                    "start the query again: it writes the row once [EO-REPLAY-REFUSED]"
                )


@dataclass(frozen=True)
class NumberedRows:
    """Rows of a partition, each with its hash, and its number in the partition, from 0."""

    rows: pa.RecordBatch
    hashes: pa.Array
    numbers: pa.Array

    @classmethod
    def from_batch(cls, batch: pa.RecordBatch, first: int) -> NumberedRows:
        """Number the rows of a record batch, whose last column has the hashes, from `first` on."""
        last = batch.num_columns - 1
        numbers = pa.array(np.arange(first, first + batch.num_rows, dtype=np.int64))
        return cls(batch.remove_column(last), batch.column(last), numbers)

    @classmethod
    def concatenate(cls, parts: Sequence[NumberedRows]) -> NumberedRows:
        [rows] = pa.Table.from_batches([part.rows for part in parts]).combine_chunks().to_batches()
        hashes = pa.concat_arrays([part.hashes for part in parts])
        return cls(rows, hashes, pa.concat_arrays([part.numbers for part in parts]))

    @property
    def nbytes(self) -> int:
        return int(self.rows.nbytes + self.hashes.nbytes + self.numbers.nbytes)

    def take(self, places: Sequence[int] | pa.Array) -> NumberedRows:
        chosen = pa.array(places, pa.int64())
        return NumberedRows(
            self.rows.take(chosen), self.hashes.take(chosen), self.numbers.take(chosen)
        )

    def without(self, refused: Sequence[Refusal]) -> NumberedRows:
        return self.take(without(self.rows.num_rows, refused)) if refused else self

    def reversed(self) -> NumberedRows:
        return self.take(range(self.rows.num_rows - 1, -1, -1))
