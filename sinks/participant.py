"""One sink's share of a participant's rows: its own, or the dead letters among them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from sinks.base import Sink
from sinks.dead_letters import Refusal, shortened, without
from sinks.transaction import Committable, Fingerprint, Refused, TransactionContext

logger = logging.getLogger(__name__)


class Share:
    """One transaction of the sink, and what was written in it."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.fingerprint = Fingerprint()
        self.bytes = 0
        self.committable: Committable | None = None
        self.refused: list[Refused] = []
        """What its rows were refused for, if they are dead letters."""
        self.is_open = False
        self._transaction: Any = None

    def begin(self, context: TransactionContext) -> None:
        self._transaction = self.sink.begin_transaction(context)
        self.is_open = True

    def write(self, rows: pa.RecordBatch, hashes: pa.Array) -> Sequence[Refusal]:
        """Answers that none was refused."""
        self.sink.write(self._transaction, rows)
        self._add(rows, hashes)
        return ()

    def write_accepted(self, rows: pa.RecordBatch, hashes: pa.Array, most: int) -> Sequence[Refusal]:
        """Answers those that were not written."""
        refused = self.sink.write_accepted(self._transaction, rows, most)
        if len(refused) <= most:
            self._add(*others(rows, hashes, refused))
        return refused

    def write_letters(self, rows: pa.RecordBatch, hashes: pa.Array, refused: Sequence[Refusal]) -> None:
        """`hashes` are those of the batch that the letters are from."""
        own = hashes.take(pa.array([one.row for one in refused], pa.int64()))
        self.write(rows, own)
        self.refused += [
            Refused(number, one.error_class, shortened(one.error))
            for number, one in zip(own.to_pylist(), refused, strict=True)
        ]

    def _add(self, rows: pa.RecordBatch, hashes: pa.Array) -> None:
        if rows.num_rows:
            self.bytes += rows.nbytes
            self.fingerprint = self.fingerprint.add(rows.num_rows, pc.sum(hashes).as_py())

    def end(self, subtask: int, *, exactly_once: bool) -> None:
        """Pre-commit, if there are rows."""
        if not self.is_open:
            return
        if not self.fingerprint.rows:
            self.undo()
        elif not exactly_once:
            self.sink.commit_directly(self._transaction)
        else:
            self.sink.sum_up(self._transaction, self.fingerprint)
            committable = self.sink.snapshot_state(self._transaction)
            self.committable = committable.of(self.sink.name, subtask, self.fingerprint, self.refused)
        self.is_open = False

    def undo(self) -> None:
        """What cannot be undone is left to the sweep."""
        try:
            if self.is_open:
                self.is_open = False
                self.sink.rollback(self._transaction)
            elif self.committable:
                self.sink.abort(self.committable.transaction)
        except Exception:
            logger.warning("sink %r could not roll back; it is left to the sweep", self.sink.name, exc_info=True)


def others(rows: pa.RecordBatch, hashes: pa.Array, refused: Sequence[Refusal]) -> tuple[pa.RecordBatch, pa.Array]:
    """The rows that were not refused, with their hashes."""
    if not refused:
        return rows, hashes
    kept = without(rows.num_rows, refused)
    return rows.take(kept), hashes.take(kept)
