"""A participant: the rows of one partition on their way into a sink, and those that it refuses into its sink of dead
letters."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

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

logger = logging.getLogger(__name__)

MOST_WAITING_BYTES = 64 * 2**20
"""What the rows that wait may take in a task."""
_PATIENCE = 1000
"""After so many refusals, each of one row, a round tries no further row: with as many from the other end in vain, the
target refuses too many."""


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

    def write(self, given: NumberedRows) -> None:
        self._begin(given.rows.schema)
        self.sink.write(self._transaction, given.rows)
        self._add(given)

    def write_good_rows(self, given: NumberedRows, most: int) -> Sequence[Refusal]:
        """Write the rows that the target takes; returns the others, and not all of them if more than `most` are
        final."""
        self._begin(given.rows.schema)
        assert isinstance(self.sink, DeadLettering)
        refused = self.sink.write_good_rows(self._transaction, given.rows, most)
        if sum(refusal.final for refusal in refused) <= most:
            self._add(given.without(refused))
        return refused

    def _begin(self, schema: pa.Schema) -> None:
        if not self._begun:
            self.open()
            own = replace(self.transaction_id, sink=self.sink.name)
            context = own.context(schema, self.slot, exactly_once=self.exactly_once)
            self._transaction = self.sink.begin_transaction(context)
            self._begun = True

    def _add(self, given: NumberedRows) -> None:
        if count := given.rows.num_rows:
            self.bytes += given.rows.nbytes
            self.fingerprint = self.fingerprint.add(count, pc.sum(given.hashes).as_py())

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

    def write_refused(self, given: NumberedRows, refused: Sequence[Refusal]) -> None:
        """Write the refused ones of the rows, in the order of their numbers."""
        if not refused:
            return
        refused = sorted(refused, key=lambda refusal: given.numbers[refusal.row].as_py())
        own = given.hashes.take(pa.array([refusal.row for refusal in refused], pa.int64()))
        context = self.transaction_id.context(given.rows.schema)
        letters = letter_rows(context, given.rows, given.numbers, refused)
        self._begin(letters.schema)
        if isinstance(self.sink, DeadLettering) and self.sink.lacks_characters():
            letters = letters_in_ascii(letters)
        self.write(NumberedRows(letters, own, letters["row_number"]))
        self.refused += [
            Refused(row_hash, refusal.error_class, shortened(refusal.error))
            for row_hash, refusal in zip(own.to_pylist(), refused, strict=True)
        ]


Answers: TypeAlias = Iterator[tuple["NumberedRows", Sequence[Refusal]]]
"""Rows, and those of them that the target refuses for good."""


@dataclass
class GoodRows:
    """Writes the rows of a partition that the target takes. A row that it may refuse because of other rows (a foreign
    key, a trigger) waits here, and is tried again when those are written. `where`: what rows these are, for people."""

    own: SinkTransaction
    where: str
    _waiting: dict[str, list[NumberedRows]] = field(default_factory=dict)
    """By the class of the error. Rows that lack the same kind of thing may refer to each other, even in a circle: tried
    together, they get into one statement."""
    _size: int = 0

    @property
    def most(self) -> int:
        """So many rows may be refused for good."""
        sink = self.own.sink
        return most_in_task(sink.max_dead_letters) if isinstance(sink, DeadLettering) else 0

    def write(self, given: NumberedRows) -> Answers:
        refused = self.own.write_good_rows(given, self.most)
        yield given, self._wait(given, refused)
        if self._size <= MOST_WAITING_BYTES:
            return
        tried, _ = self._try_again()
        for again, refused in tried:
            yield again, self._wait(again, refused)
        if self._size > MOST_WAITING_BYTES // 2:  # else each record batch would try them all again
            raise self._too_large([refusal for _, refused in tried for refusal in refused])

    def finish(self) -> Answers:
        """After the last row: try those that wait again, as long as that lets some of them in. The others are refused
        for good."""
        in_vain = 0
        while self._waiting:
            tried, any_written = self._try_again()
            in_vain = 0 if any_written else in_vain + 1
            untried = any(refusal.error_class == UNTRIED for _, refused in tried for refusal in refused)
            is_over = in_vain == 2 or (in_vain == 1 and not untried)
            for given, refused in tried:
                yield given, refused if is_over else self._wait(given, refused)

    def _wait(self, given: NumberedRows, refused: Sequence[Refusal]) -> Sequence[Refusal]:
        """Keep the rows that may get in later; returns the others."""
        kinds: dict[str, list[int]] = {}
        for refusal in refused:
            if not refusal.final:
                kinds.setdefault(refusal.error_class, []).append(refusal.row)
        for kind, places in kinds.items():
            rows = given.at(places)
            self._waiting.setdefault(kind, []).append(rows)
            self._size += rows.nbytes
        return [refusal for refusal in refused if refusal.final]

    def _try_again(self) -> tuple[list[tuple[NumberedRows, Sequence[Refusal]]], bool]:
        """Try all rows that wait once more, backwards each time, since rows may come before those that they refer to.
        Returns them with what is refused now, and whether any was written."""
        waiting, self._waiting, self._size = self._waiting, {}, 0
        tried, any_written = [], False
        for _, parts in sorted(waiting.items()):
            given = NumberedRows.together(parts).backwards()
            refused = self.own.write_good_rows(given, max(self.most, _PATIENCE))
            any_written = any_written or len(refused) < given.rows.num_rows
            tried.append((given, refused))
        return tried, any_written

    def _too_large(self, refused: Sequence[Refusal]) -> BadValue:
        reasons = dict.fromkeys(f"\n  - {one.error_class}: {shortened(one.error)}" for one in refused if one.error)
        return BadValue(
            f"sink {self.own.sink.name!r}: so many of {self.where} are refused as long as others are not written that "
            f"those which wait take more than {MOST_WAITING_BYTES >> 20} MiB in the task; the first reasons:"
            f"{''.join([*reasons][:3])}\n"
            "Nothing of the checkpoint is visible. Fix what the target names, let rows come after those that they need "
            "(sortWithinPartitions in the sink's transform=), or write smaller batches"
        )


@dataclass
class FirstWrite:
    """Writes rows for the first time: the target says which it takes. `where`: what rows these are, for people."""

    own: SinkTransaction
    letters: LettersTransaction | None
    where: str
    _rows: int = 0

    def __post_init__(self) -> None:
        self._good = GoodRows(self.own, self.where)

    def write(self, batch: pa.RecordBatch) -> None:
        given = NumberedRows.of(batch, self._rows)
        self._rows += batch.num_rows
        if self.letters is None:
            self.own.write(given)
        else:
            self._write_letters(self.letters, self._good.write(given))

    def finish(self) -> None:
        """After the last row: what still waits is written, or becomes a dead letter."""
        if self.letters is not None:
            self._write_letters(self.letters, self._good.finish())

    def _write_letters(self, letters: LettersTransaction, answers: Answers) -> None:
        for given, refused in answers:
            before, most = letters.refused, self._good.most
            if len(before) + len(refused) > most:
                sink = self.own.sink
                assert isinstance(sink, DeadLettering)
                reasons = [(row.error_class, row.error) for row in before[:3]]
                reasons += [(row.error_class, row.error) for row in refused[: 3 - len(reasons)]]
                count = f"more than {most:,} of {self.where} alone"
                raise too_many(sink.name, count, sink.max_dead_letters, reasons)
            letters.write_refused(given, refused)


@dataclass
class ReplayWrite:
    """Writes lost rows again: the record says which the target took then (R17), and no other row is tried. They go the
    way of the first time, since one may have waited for another. `where`: as for `FirstWrite`."""

    own: SinkTransaction | None
    letters: LettersTransaction | None
    recorded: RecordedRefusals
    where: str
    _rows: int = 0

    def __post_init__(self) -> None:
        self._good = GoodRows(self.own, self.where) if self.own and self.own.sink.dead_letters else None

    def write(self, batch: pa.RecordBatch) -> None:
        given = NumberedRows.of(batch, self._rows)
        self._rows += batch.num_rows
        refused = self.recorded.find_refused(given.hashes)
        accepted = given.without(refused)
        if self._good and accepted.rows.num_rows:
            self._require_taken(self._good.write(accepted))
        elif self.own and accepted.rows.num_rows:
            self.own.write(accepted)
        if self.letters:
            self.letters.write_refused(given, refused)

    def finish(self) -> None:
        """After the last row: what still waits is written."""
        if self._good:
            self._require_taken(self._good.finish())

    def _require_taken(self, answers: Answers) -> None:
        for given, refused in answers:
            for refusal in refused[:1]:
                raise BadValue(
                    f"of {self.where} the row {given.numbers[refusal.row]}, counted from 0, was taken when the "
                    f"checkpoint was decided, and the target refuses it now: {refusal.error_class}: {refusal.error}. "
                    "Let the table take it again, and start the query again: it writes the row once"
                )


@dataclass(frozen=True)
class NumberedRows:
    """Rows of a partition, each with its hash, and its number there, from 0."""

    rows: pa.RecordBatch
    hashes: pa.Array
    numbers: pa.Array

    @classmethod
    def of(cls, batch: pa.RecordBatch, first: int) -> NumberedRows:
        """Of a record batch whose last column has the hashes."""
        last, numbers = batch.num_columns - 1, pa.array(np.arange(first, first + batch.num_rows, dtype=np.int64))
        return cls(batch.remove_column(last), batch.column(last), numbers)

    @classmethod
    def together(cls, parts: Sequence[NumberedRows]) -> NumberedRows:
        [rows] = pa.Table.from_batches([part.rows for part in parts]).combine_chunks().to_batches()
        hashes = pa.concat_arrays([part.hashes for part in parts])
        return cls(rows, hashes, pa.concat_arrays([part.numbers for part in parts]))

    @property
    def nbytes(self) -> int:
        return int(self.rows.nbytes + self.hashes.nbytes + self.numbers.nbytes)

    def at(self, places: Sequence[int] | pa.Array) -> NumberedRows:
        chosen = pa.array(places, pa.int64())
        return NumberedRows(self.rows.take(chosen), self.hashes.take(chosen), self.numbers.take(chosen))

    def without(self, refused: Sequence[Refusal]) -> NumberedRows:
        return self.at(without(self.rows.num_rows, refused)) if refused else self

    def backwards(self) -> NumberedRows:
        return self.at(range(self.rows.num_rows - 1, -1, -1))
