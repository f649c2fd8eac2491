"""Broken in what is answered: audits, many aborts in one call, evolution, purges, opening, errors of the system."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from sinks import Checkpoint, Committable, Identity, TransactionContext
from sinks.audit import Audit, Holding, Part
from sinks.errors import CommittedError, SinkError
from sinks.testing import SCHEMA, Clause
from sinks.transaction import Fingerprint, TransactionId
from tests.testing.broken_for_ever import AUDITED
from tests.testing.broken_tasks import FAILED
from tests.testing.catalogue import breaks
from tests.testing.shelf import EvolvingShelf, Handle, Shelf, stored


# ---------------------------------------------------------------------- audit
class _Fingerprints(Shelf):
    """Stores the fingerprint of a transaction beside its rows."""

    def print_at(self, name: str) -> Path:
        (self.folder / "prints").mkdir(exist_ok=True)
        return self.folder / "prints" / name

    def record_fingerprint(self, transaction: Handle, fingerprint: Fingerprint) -> None:
        rows, hash = fingerprint.rows, fingerprint.hash
        self.print_at(transaction.name).write_bytes(rows.to_bytes(8, "big") + hash.to_bytes(8, "big"))

    def rollback(self, transaction: Handle) -> None:
        super().rollback(transaction)
        self.print_at(transaction.name).unlink(missing_ok=True)

    def abort(self, transaction: Identity) -> None:
        super().abort(transaction)
        self.print_at(transaction["name"]).unlink(missing_ok=True)

    def print_of(self, committable: Committable) -> Fingerprint:
        data = self.print_at(committable.transaction["name"]).read_bytes()
        return Fingerprint(int.from_bytes(data[:8], "big"), int.from_bytes(data[8:], "big"))

    def sum(self, prints: Sequence[Fingerprint]) -> Fingerprint:
        return sum(prints, Fingerprint())

    def audit(self, job: str, parts: Sequence[Part], *, quick: bool = False) -> Audit:
        sums = [self.sum([self.print_of(each) for each in part.committables]) for part in parts]
        return Audit([Holding(fingerprint=each) for each in sums])


@breaks(Clause.AUDIT, AUDITED)
class AddsHashesWithoutEnd(_Fingerprints):
    def sum(self, prints: Sequence[Fingerprint]) -> Fingerprint:
        return Fingerprint(sum(each.rows for each in prints), sum(each.hash for each in prints))


@breaks(Clause.AUDIT, AUDITED)
class HoldsHashesWithASign(_Fingerprints):
    """As a BIGINT does."""

    def print_of(self, committable: Committable) -> Fingerprint:
        found = super().print_of(committable)
        return Fingerprint(found.rows, found.hash - 2**64 if found.hash >= 2**63 else found.hash)

    def sum(self, prints: Sequence[Fingerprint]) -> Fingerprint:
        return Fingerprint(sum(each.rows for each in prints), sum(each.hash for each in prints))


@breaks(Clause.AUDIT, AUDITED)
class HoldsHashesAsFloats(_Fingerprints):
    """As JSON does in JavaScript, and Lua."""

    def print_of(self, committable: Committable) -> Fingerprint:
        found = super().print_of(committable)
        return Fingerprint(found.rows, int(float(found.hash)) % 2**64)


@breaks(Clause.AUDIT, AUDITED)
class AuditsAllLineages(Shelf):
    def audit(self, job: str, parts: Sequence[Part], *, quick: bool = False) -> Audit:
        def without_lineage(name: str) -> TransactionId:
            return replace(TransactionId.parse(name), lineage="", task_attempt=0)

        def count(part: Part) -> int:
            named = [without_lineage(each.transaction["name"]) for each in part.committables]
            paths = [path for path in self.paths(job, "done") if without_lineage(path.stem) in named]
            return sum(len([*stored(path)]) for path in paths)

        return Audit([Holding(rows=count(part)) for part in parts])


# ---------------------------------------------------------------------- abort_all
TOGETHER = "abort_all_answers_for_each"


@breaks(Clause.ABORT_ALL, TOGETHER)
class RaisesForAll(Shelf):
    """An error of one is the answer for all, and `CommittedError` means that nothing is left to abort."""

    def abort_all(self, transactions: Sequence[Identity]) -> Sequence[Exception | None]:
        for transaction in transactions:
            self.abort(transaction)
        return [None] * len(transactions)


@breaks(Clause.ABORT_ALL, TOGETHER)
class StopsAtTheFirstThatIsCommitted(Shelf):
    def abort_all(self, transactions: Sequence[Identity]) -> Sequence[Exception | None]:
        answers: list[Exception | None] = []
        try:
            for transaction in transactions:
                self.abort(transaction)
                answers.append(None)
        except CommittedError as error:
            answers += [error] * (len(transactions) - len(answers))
        return answers


@breaks(Clause.ABORT_ALL, TOGETHER)
class AnswersForWhatItFound(Shelf):
    """As an UPDATE tells the rows that it changed."""

    def abort_all(self, transactions: Sequence[Identity]) -> Sequence[Exception | None]:
        states = ("ready", "done", "gone")
        return super().abort_all(
            [each for each in transactions if any(self.path(each["name"], state).exists() for state in states)]
        )


@breaks(Clause.ABORT_ALL, TOGETHER)
class AnswersNone(Shelf):
    def abort_all(self, transactions: Sequence[Identity]) -> Any:
        super().abort_all(transactions)


@breaks(Clause.ABORT_ALL, TOGETHER)
class SaysAbortedOfWhatIsCommitted(Shelf):
    """As an UPDATE whose WHERE leaves it out."""

    def abort_all(self, transactions: Sequence[Identity]) -> Sequence[Exception | None]:
        super().abort_all(transactions)
        return [None] * len(transactions)


@breaks(Clause.ABORT_ALL, TOGETHER)
class AnswersErrorsFirst(Shelf):
    def abort_all(self, transactions: Sequence[Identity]) -> Sequence[Exception | None]:
        return sorted(super().abort_all(transactions), key=lambda answer: answer is None)


@breaks(Clause.ABORT_ALL, TOGETHER)
class AbortsAllOrNone(Shelf):
    """It tells of each, and none is aborted if one cannot be."""

    def abort_all(self, transactions: Sequence[Identity]) -> Sequence[Exception | None]:
        done = [self.path(each["name"], "done").exists() for each in transactions]
        if any(done):
            return [
                CommittedError(f"{each['name']}") if is_done else None
                for each, is_done in zip(transactions, done, strict=True)
            ]
        return super().abort_all(transactions)


@breaks(Clause.ABORT_ALL, TOGETHER)
class ProvesWhatWasNeverSeen(Shelf):
    """Its abort of one leaves no such proof, and nothing is barred by this one."""

    def abort_all(self, transactions: Sequence[Identity]) -> Sequence[Exception | None]:
        answers = super().abort_all(transactions)
        for transaction, answer in zip(transactions, answers, strict=True):
            if answer is None:
                self.path(transaction["name"], "gone").touch()
        return answers


@breaks(Clause.ABORT_ALL, "abort_all_of_many")
class AbortsAHundredAtMost(Shelf):
    """As an IN list does, or a request with pages."""

    def abort_all(self, transactions: Sequence[Identity]) -> Sequence[Exception | None]:
        return [*super().abort_all(transactions[:100])] + [None] * (len(transactions) - 100)


# ---------------------------------------------------------------------- evolution by two drivers
BOTH = "evolve_by_two_drivers_whose_columns_differ"


class _KeepsColumns(EvolvingShelf):
    known: Sequence[str] = ()

    def check(self, schema: pa.Schema) -> None:
        self.known = [*self.columns]

    def write_columns(self, columns: Sequence[str]) -> None:
        draft = self.folder / f"draft-{id(self)}"
        draft.write_text(" ".join(name for name in columns if name not in SCHEMA.names))
        draft.rename(self.folder / "added")


@breaks(Clause.EVOLVE, BOTH)
class EvolvesWhatItChecked(_KeepsColumns):
    """It writes the columns that it has seen, and its own new ones, as a registry is given a whole schema."""

    def evolve(self, schema: pa.Schema) -> None:
        new = [name for name in schema.names if name not in self.known]
        if new:
            self.write_columns([*self.known, *new])


@breaks(Clause.EVOLVE, BOTH)
class EvolvesToTheBatch(_KeepsColumns):
    """The table has the columns of the newest batch."""

    def evolve(self, schema: pa.Schema) -> None:
        if {*schema.names} - {*self.columns}:
            self.write_columns(schema.names)


@breaks(Clause.EVOLVE, BOTH)
class FailsForEverIfAnotherEvolved(_KeepsColumns):
    def evolve(self, schema: pa.Schema) -> None:
        if [*self.columns] != [*self.known]:
            raise SinkError("the columns have changed since the check")
        new = [name for name in schema.names if name not in self.known]
        if new:
            self.write_columns([*self.known, *new])

    def check(self, schema: pa.Schema) -> None:
        self.known = self.known or [*self.columns]


@breaks(Clause.EVOLVE, "evolve_beside_another_driver")
class ReadsThenWritesItsColumns(_KeepsColumns):
    def evolve(self, schema: pa.Schema) -> None:
        columns = [*self.columns]
        new = [name for name in schema.names if name not in columns]
        if new:
            self.write_columns([*columns, *new])


# ---------------------------------------------------------------------- purge
DEAD = "purge_removes_what_dead_tasks_left"


@breaks(Clause.PURGE_LEFTOVERS, DEAD)
class PurgesTheCheckpointBefore(Shelf):
    """The ones before that were purged by then, weren't they?"""

    def purge(self, checkpoint: Checkpoint) -> None:
        for path in [*self.paths(checkpoint.job, "open"), *self.paths(checkpoint.job, "gone")]:
            name = TransactionId.find(path.stem)
            if name.lineage == checkpoint.lineage and name.checkpoint == checkpoint.oldest_retained - 1:
                path.unlink(missing_ok=True)


@breaks(Clause.PURGE_LEFTOVERS, DEAD)
class PurgesTheFirstThatItFinds(Shelf):
    def purge(self, checkpoint: Checkpoint) -> None:
        for path in sorted(self.paths(checkpoint.job, "open")):
            name = TransactionId.find(path.stem)
            if name.lineage == checkpoint.lineage and name.checkpoint < checkpoint.oldest_retained:
                path.unlink(missing_ok=True)
                return


@breaks(Clause.PURGE_LEFTOVERS, DEAD)
class PurgesWhatItsGenerationLeft(Shelf):
    def purge(self, checkpoint: Checkpoint) -> None:
        paths = sorted(self.paths(checkpoint.job, "open"), key=lambda path: TransactionId.parse(path.stem).generation)
        newest = TransactionId.parse(paths[-1].stem).generation if paths else 0
        for path in paths:
            name = TransactionId.parse(path.stem)
            old = name.lineage == checkpoint.lineage and name.checkpoint < checkpoint.oldest_retained
            if old and name.generation == newest:
                path.unlink(missing_ok=True)


# ---------------------------------------------------------------------- open, in several tasks
class _Opens(Shelf):
    """Makes a folder for what it writes."""

    def make(self) -> None:
        raise NotImplementedError

    def open(self) -> None:
        self.make()

    def begin_transaction(self, context: TransactionContext) -> Handle:
        if not (self.folder / "staged").is_dir():
            raise FileNotFoundError("staged")
        return super().begin_transaction(context)


@breaks(Clause.OPEN, "open_in_many_tasks_at_once")
class LooksThenMakesItsFolder(_Opens):
    def make(self) -> None:
        if not (self.folder / "staged").exists():
            (self.folder / "staged").mkdir()


@breaks(Clause.OPEN, "open_in_many_tasks_at_once")
class MakesItsFolderThenMarksIt(_Opens):
    """The mark is what the others look for."""

    def make(self) -> None:
        mark = self.folder / "made"
        if mark.exists():
            return
        for folder in ("staged", "old"):
            target = self.folder / folder
            target.mkdir()
        mark.touch()


# ---------------------------------------------------------------------- errors of the system
@breaks(Clause.RETRY, FAILED, inside="write")
class WrapsErrorsOfAWrite(Shelf):
    def write(self, transaction: Handle, batch: pa.RecordBatch) -> None:
        try:
            self.send(transaction, batch)
        except OSError as error:
            raise SinkError(f"the shelf could not take rows: {error}") from error

    def send(self, transaction: Handle, batch: pa.RecordBatch) -> None:
        super().write(transaction, batch)


@breaks(Clause.RETRY, FAILED, inside="pre_commit")
class WrapsErrorsOfAPreCommit(Shelf):
    def pre_commit(self, transaction: Handle) -> Identity | Committable:
        try:
            return self.seal(transaction)
        except OSError as error:
            raise SinkError(f"the shelf could not keep rows: {error}") from error

    def seal(self, transaction: Handle) -> Identity | Committable:
        return super().pre_commit(transaction)


@breaks(Clause.RETRY, "begin_transaction_fails_at_any_line")
class WrapsErrorsOfABegin(Shelf):
    def begin_transaction(self, context: TransactionContext) -> Handle:
        try:
            return self.begin(context)
        except OSError as error:
            raise SinkError(f"the shelf could not begin: {error}") from error

    def begin(self, context: TransactionContext) -> Handle:
        return super().begin_transaction(context)


@breaks(Clause.RETRY, "open_fails_in_a_task")
class WrapsErrorsOfOpen(Shelf):
    def open(self) -> None:
        try:
            self.connect()
        except OSError as error:
            raise SinkError(f"the shelf could not be opened: {error}") from error

    def connect(self) -> None:
        self.folder.stat()
        self.connected = True
