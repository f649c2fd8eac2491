"""Broken by mistakes that are easily made over object stores, services and key-value stores, with many rows or batches,
or beside another driver."""

from __future__ import annotations

import contextlib
import os
import pickle
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from sinks import Checkpoint, CommitOutcome, Committable, Identity, TransactionContext
from sinks.errors import CommittedError
from sinks.testing import Clause
from sinks.testing.table import eventually
from sinks.transaction import TransactionId
from tests.testing.broken_drivers import BESIDE, GONE, ONCE, PARTS, PURGED, REMEMBERED, SILENT
from tests.testing.broken_tasks import FAILED, ROLLED_BACK, TEXTS, _Alters
from tests.testing.catalogue import breaks
from tests.testing.shelf import Handle, Rows, Shelf, stored

COMMITTED = CommitOutcome.COMMITTED
ALIKE, SEEN = "names_that_look_alike_are_not_the_same", "what_is_committed_becomes_visible_as_a_whole"
MANY, MANY_ROWS = "many_commit_at_once", "many_rows_in_several_batches_arrive"
EQUAL = "equal_rows_arrive_as_often_as_they_come"
A_COMMIT_BESIDE = "a_commit_beside_an_abort"


# ---------------------------------------------------------------------- an object for each record batch
class _Parts(Shelf):
    """A listing has pages of fifty."""

    def put(self, transaction: Handle, rows: Rows) -> None:
        number = transaction.__dict__.setdefault("parts", 0)
        self.part(transaction, number).write_bytes(pickle.dumps(rows))
        transaction.__dict__["parts"] += 1

    def part(self, transaction: Handle, number: int) -> Path:
        return self.folder / f"{transaction.name}.{number:06}.part"

    def listed(self, name: str) -> list[Path]:
        return sorted(self.folder.glob(f"{name}.*.part"))

    def pre_commit(self, transaction: Handle) -> Identity | Committable:
        for part in self.listed(transaction.name):
            transaction.file.write(part.read_bytes())
        return super().pre_commit(transaction)

    def rollback(self, transaction: Handle) -> None:
        super().rollback(transaction)
        self.clear(transaction.name)

    def abort(self, transaction: Identity) -> None:
        super().abort(transaction)
        self.clear(transaction["name"])

    def clear(self, name: str) -> None:
        for part in self.listed(name):
            part.unlink()


@breaks(Clause.WRITE, MANY_ROWS)
@breaks(Clause.LEFTOVERS, ROLLED_BACK)
@breaks(Clause.ABORT_LEFTOVERS, GONE)
class ReadsTheFirstPageOfItsParts(_Parts):
    def listed(self, name: str) -> list[Path]:
        return super().listed(name)[:50]


@breaks(Clause.HANDLE, "two_open_transactions_of_one_sink_object_do_not_meet")
class CountsPartsInTheObject(_Parts):
    parts = 0

    def begin_transaction(self, context: TransactionContext) -> Handle:
        self.parts = 0
        return super().begin_transaction(context)

    def put(self, transaction: Handle, rows: Rows) -> None:
        self.part(transaction, self.parts).write_bytes(pickle.dumps(rows))
        self.parts += 1


@breaks(Clause.LEFTOVERS, FAILED, inside="write")
class ForgetsThePartThatFailed(_Parts):
    """Deletes as many as it has counted."""

    def clear(self, name: str) -> None:
        pass

    def rollback(self, transaction: Handle) -> None:
        super().rollback(transaction)
        for number in range(transaction.__dict__.get("parts", 0)):
            self.part(transaction, number).unlink()


@breaks(Clause.WRITE, FAILED, inside="write")
class WritesHalfABatchAgain(Shelf):
    def write(self, transaction: Handle, batch: pa.RecordBatch) -> None:
        for _ in range(3):
            with contextlib.suppress(ConnectionError):
                for number in range(batch.num_rows):
                    super().write(transaction, batch.slice(number, 1))
                return
        raise ConnectionError("tried three times")


@breaks(Clause.WRITE, EQUAL)
class KnowsABatchAgainByItsContent(Shelf):
    """So that a request may be repeated."""

    def put(self, transaction: Handle, rows: Rows) -> None:
        known = transaction.__dict__.setdefault("known", [])
        if rows not in known:
            known.append(rows)
            super().put(transaction, rows)


# ---------------------------------------------------------------------- many rows
@breaks(Clause.WRITE, SEEN)
@breaks(Clause.WRITE, MANY_ROWS)
class LosesALastRow(Shelf):
    """Of chunks of a hundred, where one is left."""

    def put(self, transaction: Handle, rows: Rows) -> None:
        for start in range(0, max(1, len(rows) - 1), 100):
            super().put(transaction, rows[start : start + 100])


@breaks(Clause.COMMIT, SEEN)
class CommitsInChunks(Shelf):
    """Under names of their own: again is the same."""

    def commit(self, committable: Committable) -> CommitOutcome:
        name = committable.transaction["name"]
        ready = self.path(name, "ready")
        if not ready.exists():
            return self.of_gone(name)
        rows = list(stored(ready))
        for start in range(0, len(rows), 500):
            self.path(f"{start}-{name}", "done").write_bytes(pickle.dumps(rows[start : start + 500]))
        ready.rename(self.path(name, "gone"))
        return COMMITTED


@breaks(Clause.WRITE, TEXTS)
class TakesValuesForPaths(_Alters):
    """As folders that are named after a column."""

    def value(self, value: Any) -> Any:
        return value.replace("/", "_") if isinstance(value, str) else value


# ---------------------------------------------------------------------- what is listed
@breaks(Clause.IN_DOUBT, ALIKE, ours="a:b+c", theirs="a+b:c")
class ComparesTheNameOfASinkAsItIs(Shelf):
    def in_doubt(self, job: str) -> Iterable[Identity]:
        listed = super().in_doubt(job)
        sinks = [TransactionId.parse(identity["name"]).sink.rpartition("-")[0] for identity in listed]
        return [identity for identity, sink in zip(listed, sinks, strict=True) if sink == self.name]


@breaks(Clause.IN_DOUBT_RESOLVED, ONCE)
class KeepsItsListForAWhile(Shelf):
    listed: tuple[float, str, list[Identity]] = (0, "", [])

    def in_doubt(self, job: str) -> Iterable[Identity]:
        at, of, listed = self.listed
        if of != job or time.monotonic() > at + 600:
            listed = list(super().in_doubt(job))
            self.listed = time.monotonic(), job, listed
        return listed


@breaks(Clause.IN_DOUBT_RESOLVED, SILENT)
class LinksThenUnlinks(Shelf):
    """Takes what is linked for done."""

    def commit(self, committable: Committable) -> CommitOutcome:
        name = committable.transaction["name"]
        ready, done = self.path(name, "ready"), self.path(name, "done")
        if not ready.exists():
            return self.of_gone(name)
        try:
            os.link(ready, done)
        except FileExistsError:
            return COMMITTED
        ready.unlink()
        return COMMITTED


@breaks(Clause.MEMORY, REMEMBERED)
class RemembersItsOwnCommits(Shelf):
    """And what was there when it was opened."""

    memory: dict[str, int] | None = None

    def committed_checkpoints(self, job: str) -> Mapping[str, int] | None:
        if self.memory is None or job != "conformance":
            self.memory = dict(super().committed_checkpoints(job) or {})
        return self.memory

    def commit(self, committable: Committable) -> CommitOutcome:
        outcome = super().commit(committable)
        self.memory = None
        return outcome

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"memory": None}


@breaks(Clause.MEMORY, MANY)
class RemembersTheFirstPage(Shelf):
    def committed_checkpoints(self, job: str) -> Mapping[str, int] | None:
        names = [TransactionId.parse(path.stem) for path in sorted(self.paths(job, "done"))[:50]]
        return {name.lineage: max(each.checkpoint for each in names) for name in names}


# ---------------------------------------------------------------------- other transactions
@breaks(Clause.NAMES, ROLLED_BACK)
class BeginsWithAClearSubtask(Shelf):
    def begin_transaction(self, context: TransactionContext) -> Handle:
        name = self.name_of(context)
        for path in self.folder.glob(f"{name.rpartition('.')[0]}.*.ready"):
            path.write_bytes(b"")
        return super().begin_transaction(context)


@breaks(Clause.COMMIT_BY_NAME, ROLLED_BACK)
@breaks(Clause.COMMIT_BY_NAME, PARTS)
class SettlesTheCheckpoint(Shelf):
    def commit(self, committable: Committable) -> CommitOutcome:
        outcome = super().commit(committable)
        name = TransactionId.parse(committable.transaction["name"])
        for path in self.folder.glob("*.ready"):
            other = TransactionId.parse(path.stem)
            if (other.job, other.lineage, other.checkpoint) == (name.job, name.lineage, name.checkpoint):
                path.rename(path.with_suffix(".done"))
        return outcome


@breaks(Clause.PURGE, PURGED)
class PurgesRowsThatNobodyPreCommitted(Shelf):
    def purge(self, checkpoint: Checkpoint) -> None:
        super().purge(checkpoint)
        for path in self.paths(checkpoint.job, "open"):
            os.truncate(path, 0)


class _Proves(Shelf):
    """The rows of what is aborted stay until the purge; a proof says which these are."""

    def abort(self, transaction: Identity) -> None:
        name = transaction["name"]
        if self.path(name, "done").exists():
            raise CommittedError(name)
        if self.path(name, "ready").exists():
            self.path(name, "gone").touch()

    def commit(self, committable: Committable) -> CommitOutcome:
        name = committable.transaction["name"]
        return self.of_gone(name) if self.path(name, "gone").exists() else super().commit(committable)

    def paths(self, job: str, state: str) -> list[Path]:
        paths = super().paths(job, state)
        return [path for path in paths if state != "ready" or not path.with_suffix(".gone").exists()]


@breaks(Clause.PURGE, "silence_is_no_answer", method="purge")
@breaks(Clause.PURGE, "a_driver_killed_at_any_line_of_purge")
class PurgesTheProofFirst(_Proves):
    def purge(self, checkpoint: Checkpoint) -> None:
        for path in self.paths(checkpoint.job, "gone"):
            name = TransactionId.parse(path.stem)
            if name.lineage == checkpoint.lineage and name.checkpoint < checkpoint.oldest_retained:
                path.unlink()
                path.with_suffix(".ready").unlink(missing_ok=True)


@breaks(Clause.ABORT_OR_COMMIT, A_COMMIT_BESIDE)
class MarksThenDrops(_Proves):
    """And whoever commits does not look at the mark."""

    def abort(self, transaction: Identity) -> None:
        super().abort(transaction)
        self.path(transaction["name"], "ready").unlink(missing_ok=True)

    def commit(self, committable: Committable) -> CommitOutcome:
        return Shelf.commit(self, committable)


@breaks(Clause.ABORT_OR_COMMIT, A_COMMIT_BESIDE)
class DropsTheRowsFirst(Shelf):
    def abort(self, transaction: Identity) -> None:
        name = transaction["name"]
        if self.path(name, "ready").exists():
            os.truncate(self.path(name, "ready"), 0)
        super().abort(transaction)


# ---------------------------------------------------------------------- services
@breaks(Clause.THREADS, MANY)
class TakesBusyForLost(Shelf):
    """As of an answer 409. The first commit takes until another one meets it."""

    def commit(self, committable: Committable) -> CommitOutcome:
        name = committable.transaction["name"]
        try:
            self.path(name, "busy").touch(exist_ok=False)
        except FileExistsError:
            self.met.touch()
            return CommitOutcome.lost(f"{name} is busy")
        try:
            eventually(self.met.exists)
            return super().commit(committable)
        finally:
            self.path(name, "busy").unlink()

    @property
    def met(self) -> Path:
        return self.folder / "met"


@breaks(Clause.COMMIT, ONCE)
class AnswersBeforeItIsDone(Shelf):
    """As of an answer 202; it is done when it is asked for again."""

    accepted = ""

    def commit(self, committable: Committable) -> CommitOutcome:
        outcome = self.of_gone(name := committable.transaction["name"])
        if outcome != COMMITTED and self.path(name, "ready").exists() and self.accepted != name:
            self.accepted = name
            return COMMITTED
        return super().commit(committable)


@breaks(Clause.IDENTITY, "pre_committed_rows_are_invisible_and_in_doubt")
class ListsNumbersForTexts(Shelf):
    def pre_commit(self, transaction: Handle) -> Identity | Committable:
        number = str(TransactionId.parse(transaction.name).task_attempt)
        return {**super().pre_commit(transaction), "number": number}  # type: ignore[dict-item]

    def in_doubt(self, job: str) -> Iterable[Identity]:
        names = [str(identity["name"]) for identity in super().in_doubt(job)]
        return [{"name": name, "number": TransactionId.parse(name).task_attempt} for name in names]


@breaks(Clause.THREADS, BESIDE, then="both go on")
class WritesOneManifest(Shelf):
    """What is visible is read, and written with one more."""

    def commit(self, committable: Committable) -> CommitOutcome:
        name = committable.transaction["name"]
        ready, table = self.path(name, "ready"), self.path("table", "done")
        if self.path(name, "moved").exists() or not ready.exists():
            return COMMITTED if self.path(name, "moved").exists() else self.of_gone(name)
        rows = list(stored(table)) if table.exists() else []
        table.write_bytes(pickle.dumps([*rows, *stored(ready)]))
        ready.rename(self.path(name, "moved"))
        return COMMITTED

    def order(self, path: Path) -> int:
        return 0
