"""SkeletonSink: rows of a Spark stream, each exactly once, in TODO: name your system.

It works as it is, with folders as the system: a transaction is a file of JSON lines, and its folder
is its state. `rename` makes a change of state atomic, because two processes cannot both move one
file. Replace the methods one by one with calls of your system, and run the test after each. The
docstrings of sinks.TwoPhaseCommitSink, and docs/custom-sinks.md, say what each method has to do.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn, TextIO

import pyarrow as pa

from sinks import Checkpoint, CommitOutcome, Committable, Identity, TransactionContext
from sinks.audit import Audit, Holding, Part
from sinks.errors import BadValue, CommittedError, SinkError
from sinks.optional import Auditable, Diagnosable, DirectCommitting, Validating
from sinks.transaction import TransactionId, token

OPEN = "open"
PRE_COMMITTED = "pre-committed"
COMMITTED = "committed"
ABORTED = "aborted"
STATES = (OPEN, PRE_COMMITTED, COMMITTED, ABORTED)
"""The states of a transaction, each of which is a folder."""


class SkeletonSink(
    DirectCommitting[TextIO],
    Validating[TextIO],
    Auditable[TextIO],
    Diagnosable[TextIO],
):
    """A sink that writes into `folder`, which the driver and all executors reach.

    The handle of a transaction is its open file.
    """

    system = "Skeleton"  # as messages call it

    def __init__(self, folder: str | Path, name: str = "skeleton") -> None:
        super().__init__(name=name)
        # The sink is pickled, so addresses belong here, and connections into the handle.
        self.folder = Path(folder)

    # ------------------------------------------------------------------ in both
    def open(self) -> None:
        for state in STATES:
            folder = self.folder / state
            folder.mkdir(parents=True, exist_ok=True)

    # ------------------------------------------------------------------ in the task
    def begin_transaction(self, context: TransactionContext) -> TextIO:
        file = self._file(OPEN, context.transaction_id)
        return file.open("x", encoding="utf-8")

    def write(self, transaction: TextIO, batch: pa.RecordBatch) -> None:
        for row in batch.to_pylist():
            line = json.dumps(row, default=_refuse)
            transaction.write(line + "\n")

    def pre_commit(self, transaction: TextIO) -> Identity:
        name = self._seal(transaction)
        if not self._move(name, OPEN, PRE_COMMITTED):
            raise SinkError(f"{name} is no longer open in {self.folder}; was it deleted?")
        return {"name": name}

    def rollback(self, transaction: TextIO) -> None:
        transaction.close()
        name = Path(transaction.name).name
        for state in (OPEN, PRE_COMMITTED):  # pre_commit may have failed after it took effect
            self._file(state, name).unlink(missing_ok=True)

    def commit_directly(self, transaction: TextIO) -> None:
        """Commit in at-least-once mode. `committed_checkpoints` ignores a file with this name."""
        name = self._seal(transaction)
        if not self._move(name, OPEN, COMMITTED, f"direct-{name}"):
            raise SinkError(f"{name} is no longer open in {self.folder}; was it deleted?")

    # ------------------------------------------------------------------ on the driver
    def commit(self, committable: Committable) -> CommitOutcome:
        name = committable.transaction["name"]
        self._move(name, PRE_COMMITTED, COMMITTED)
        if self._is(name, COMMITTED):
            return CommitOutcome.COMMITTED
        if self._is(name, ABORTED):
            return CommitOutcome.lost(f"{name} was aborted: it is in {self.folder / ABORTED}")
        return CommitOutcome.unknown(
            f"{name} is in no folder of {self.folder}; was it deleted, or purged?"
        )

    def abort(self, transaction: Identity) -> None:
        name = transaction["name"]
        self._move(name, PRE_COMMITTED, ABORTED)
        if self._is(name, COMMITTED):
            raise CommittedError(f"{name} is committed: it is in {self.folder / COMMITTED}")

    def in_doubt(self, job: str) -> Iterable[Identity]:
        return [{"name": name} for name in self._names(PRE_COMMITTED, job)]

    def committed_checkpoints(self, job: str) -> Mapping[str, int]:
        newest: dict[str, int] = {}
        for id in self._names(COMMITTED, job).values():
            known = newest.get(id.lineage, 0)
            newest[id.lineage] = max(known, id.checkpoint)
        return newest

    def purge(self, checkpoint: Checkpoint) -> None:
        for state in (OPEN, ABORTED):  # leftovers of dead tasks, and old proofs
            names = self._names(state, checkpoint.job, checkpoint.lineage)
            for name, id in names.items():
                if id.checkpoint < checkpoint.oldest_retained:
                    self._file(state, name).unlink(missing_ok=True)

    # ------------------------------------------------------------------ Validating
    def validate_all(self, checkpoint: Checkpoint, committables: Sequence[Committable]) -> None:
        names = [committable.transaction["name"] for committable in committables]
        missing = [name for name in names if not self._is(name, PRE_COMMITTED)]
        if missing:
            raise SinkError(
                f"{', '.join(missing)} is not in {self.folder / PRE_COMMITTED}; was it deleted?"
            )

    # ------------------------------------------------------------------ Auditable
    def audit(self, job: str, parts: Sequence[Part], *, quick: bool = False) -> Audit:
        holdings = []
        for part in parts:
            rows = sum(map(self._count, part.committables))
            holdings.append(Holding(rows=rows))
        return Audit(holdings)

    def _count(self, committable: Committable) -> int:
        file = self._file(COMMITTED, committable.transaction["name"])
        if not file.exists():
            return 0
        return file.read_bytes().count(b"\n")

    # ------------------------------------------------------------------ Diagnosable
    def probe_schema(self) -> pa.Schema:
        return pa.schema([("id", pa.int64())])

    # ------------------------------------------------------------------ the system that you replace
    def _seal(self, transaction: TextIO) -> str:
        transaction.flush()
        os.fsync(transaction.fileno())
        transaction.close()
        return Path(transaction.name).name

    def _move(self, name: str, before: str, after: str, new_name: str = "") -> bool:
        """Move a file to another state, and tell whether the file was there.

        The move is durable when this returns, even if another process has just made it.
        """
        source = self._file(before, name)
        target = self._file(after, new_name or name)
        try:
            os.rename(source, target)
            moved = True
        except FileNotFoundError:
            moved = False
        for state in STATES:
            folder = os.open(self.folder / state, os.O_RDONLY)
            os.fsync(folder)
            os.close(folder)
        return moved

    def _file(self, state: str, name: str) -> Path:
        return self.folder / state / name

    def _is(self, name: str, state: str) -> bool:
        return self._file(state, name).exists()

    def _names(self, state: str, job: str, lineage: str | None = None) -> dict[str, TransactionId]:
        """Return this sink's transactions of a job (or lineage) in a state: the parts, by name."""
        prefix = TransactionId.prefix(job, lineage)
        folder = self.folder / state
        names = {}
        for file in folder.glob(f"{prefix}*"):
            id = TransactionId.parse(file.name)
            if id.sink == token(self.name):
                names[file.name] = id
        return names


def _refuse(value: object) -> NoReturn:
    raise BadValue(f"JSON has no {type(value).__name__}: {value!r}")
