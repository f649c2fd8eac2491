"""Broken where a transaction begins, in upserts, and in aborts beside what is committed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from sinks import Checkpoint, CommitOutcome, Committable, Identity, TransactionContext
from sinks.errors import BadValue
from sinks.testing import Clause
from sinks.transaction import TransactionId
from tests.testing.catalogue import breaks
from tests.testing.shelf import File, Handle, Rows, Shelf

# ---------------------------------------------------------------------- begin_transaction, in two requests
BEGINS = "begin_transaction_fails_at_any_line"


class _Uploads(Shelf):
    """Begins an upload, whose name the store chooses, and enters it in a list by which it is found again."""

    def begin_transaction(self, context: TransactionContext) -> Handle:
        name = self.name_of(context)
        self.upload(name).touch()
        self.path(name, "entry").touch()
        return Handle(context, name, File(self.path(name, "open")))

    def upload(self, name: str) -> Path:
        return self.folder / f"{TransactionId.parse(name).task_attempt}.upload"

    def end(self, name: str) -> None:
        self.upload(name).unlink()
        self.path(name, "entry").unlink()

    def pre_commit(self, transaction: Handle) -> Identity | Committable:
        identity = super().pre_commit(transaction)
        self.end(transaction.name)
        return identity

    def rollback(self, transaction: Handle) -> None:
        super().rollback(transaction)
        if self.upload(transaction.name).exists():
            self.end(transaction.name)


@breaks(Clause.BEGIN_FAILS, BEGINS)
class LosesAnUploadThatItCouldNotEnter(_Uploads):
    def purge(self, checkpoint: Checkpoint) -> None:
        super().purge(checkpoint)
        for path in self.paths(checkpoint.job, "entry"):
            if TransactionId.parse(path.stem).checkpoint < checkpoint.oldest_retained:
                self.end(path.stem)


@breaks(Clause.BEGIN_FAILS, BEGINS)
class CannotAbortWhatHasHalfBegun(_Uploads):
    """It lists its uploads, and looks for the entry of each when it aborts."""

    def in_doubt(self, job: str) -> Iterable[Identity]:
        halves = [{"upload": path.name} for path in self.folder.glob("*.upload")]
        return [*super().in_doubt(job), *halves]

    def abort(self, transaction: Identity) -> None:
        if "upload" in transaction:
            number = int(transaction["upload"].partition(".")[0])
            entries = [path.stem for path in self.folder.glob("*.entry")]
            (name,) = [name for name in entries if TransactionId.parse(name).task_attempt == number]
            self.end(name)
        else:
            super().abort(transaction)


@breaks(Clause.BEGIN_FAILS, BEGINS)
class StaysLockedIfItCouldNotBegin(Shelf):
    def begin_transaction(self, context: TransactionContext) -> Handle:
        lock = self.folder / "lock"
        lock.touch(exist_ok=False)
        transaction = super().begin_transaction(context)
        lock.unlink()
        return transaction


# ---------------------------------------------------------------------- upserts
NULL, TWICE = "upserts_of_rows_whose_key_is_null", "upserts_of_one_key_in_one_checkpoint"
REPLACED = "an_upsert_replaces_rows"


@breaks(Clause.UPSERT_NULL, NULL)
class DropsRowsWithoutAKey(Shelf):
    """As a MERGE does whose second branch asks for a key."""

    def merged(self, rows: Rows) -> Rows:
        return [row for row in super().merged(rows) if row["id"] is not None]


@breaks(Clause.UPSERT_NULL, NULL)
class TakesNullForAKey(Shelf):
    """As a dict does."""

    def merged(self, rows: Rows) -> Rows:
        return list({row["id"]: row for row in rows}.values())


@breaks(Clause.UPSERT_NULL, NULL)
class RefusesNullWithAnyError(Shelf):
    def put(self, transaction: Handle, rows: Rows) -> None:
        if any(row["id"] is None for row in rows):
            raise TypeError("the key is None")
        super().put(transaction, rows)


@breaks(Clause.UPSERT_NULL, NULL)
class RefusesNullAfterTheDecision(Shelf):
    def put(self, transaction: Handle, rows: Rows) -> None:
        super().put(transaction, rows)
        if any(row["id"] is None for row in rows):
            self.path(transaction.name, "null").touch()

    def commit(self, committable: Committable) -> CommitOutcome:
        if self.path(committable.transaction["name"], "null").exists():
            raise BadValue("the key is None")
        return super().commit(committable)


class _MergesBatches(Shelf):
    def chosen(self, rows: Rows) -> Rows:
        raise NotImplementedError

    def put(self, transaction: Handle, rows: Rows) -> None:
        super().put(transaction, self.chosen(rows) if self.key else rows)


@breaks(Clause.UPSERT_TWICE, TWICE)
class KeepsTheFirstRowOfAKey(_MergesBatches):
    """As `drop_duplicates` does."""

    def chosen(self, rows: Rows) -> Rows:
        return list({row["id"]: row for row in reversed(rows)}.values())


@breaks(Clause.UPSERT_TWICE, TWICE)
class SortsByTheWholeRow(_MergesBatches):
    def chosen(self, rows: Rows) -> Rows:
        return sorted(rows, key=lambda row: (row["id"] is None, row["id"] or 0, row["amount"]))


@breaks(Clause.UPSERT_TWICE, TWICE)
class ShowsBothRowsOfAKey(Shelf):
    """Deletes older rows of its keys, then inserts all of its own."""

    def merged(self, rows: Rows) -> Rows:
        numbers = {row["id"]: n for n, row in enumerate(rows)}
        return [row for n, row in enumerate(rows) if n > numbers[row["id"]] - 3 or row["id"] is None]


@breaks(Clause.IDEMPOTENT, REPLACED)
@breaks(Clause.IDEMPOTENT, TWICE)
class UpsertsAgain(Shelf):
    """Each time that it is asked: an upsert is idempotent, isn't it?"""

    def order(self, path: Path) -> int:
        return path.stat().st_mtime_ns

    def commit(self, committable: Committable) -> CommitOutcome:
        outcome, done = super().commit(committable), self.path(committable.transaction["name"], "done")
        if done.exists():
            done.touch()
        return outcome


# ---------------------------------------------------------------------- abort
ONLY = "commit_and_abort_end_only_what_they_name"


@breaks(Clause.ABORT, ONLY)
class AbortDeletesCommittedRowsOfTheSubtask(Shelf):
    def abort(self, transaction: Identity) -> None:
        super().abort(transaction)
        if self.path(name := transaction["name"], "gone").exists():
            subtask = TransactionId.parse(name).subtask
            for path in self.folder.glob("*.done"):
                if TransactionId.parse(path.stem).subtask != subtask:
                    path.unlink()


@breaks(Clause.ABORT, ONLY)
class AbortForgetsWhatIsCommitted(Shelf):
    def abort(self, transaction: Identity) -> None:
        super().abort(transaction)
        for path in self.folder.glob("*.done"):
            path.rename(self.path(f"old-{path.stem}", "done"))
