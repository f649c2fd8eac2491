"""Broken so that rows are lost or wrong: stages and files that two transactions share, names, values, open ones."""

from __future__ import annotations

import hashlib
import os
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sinks import CommitOutcome, Committable, Identity, TransactionContext
from sinks.errors import SinkError
from sinks.testing import Clause
from sinks.testing.outcomes import LONG_ENDS, LONG_JOBS, LONG_SINKS
from sinks.transaction import TransactionId, token
from tests.testing.catalogue import breaks
from tests.testing.shelf import File, Handle, Rows, Shelf

COMMITTED = CommitOutcome.COMMITTED


# ---------------------------------------------------------------------- a stage for each slot
SLOTS = "what_is_pre_committed_lives_on_when_its_slot_is_used_again"


class _Stages(Shelf):
    """Rows lie in a stage that is named by the slot, and what is ready is a link to it."""

    def stage_of(self, context: TransactionContext) -> str:
        raise NotImplementedError

    def stage(self, context: TransactionContext) -> Path:
        (self.folder / "stages").mkdir(exist_ok=True)
        return self.folder / "stages" / self.stage_of(context)

    def begin_transaction(self, context: TransactionContext) -> Handle:
        return Handle(context, self.name_of(context), File(self.stage(context)))  # which clears it

    def pre_commit(self, transaction: Handle) -> Identity | Committable:
        transaction.file.close()
        stage = self.stage(transaction.context)
        os.link(stage, self.path(transaction.name, "ready"))
        return Committable({"name": transaction.name}, {"stage": str(stage)})

    def rollback(self, transaction: Handle) -> None:
        super().rollback(transaction)
        self.stage(transaction.context).unlink(missing_ok=True)

    def commit_directly(self, transaction: Handle) -> None:
        transaction.file.close()
        self.stage(transaction.context).rename(self.path(f"direct-{transaction.name}", "done"))

    def commit(self, committable: Committable) -> CommitOutcome:
        outcome = super().commit(committable)
        if outcome == COMMITTED:
            Path(committable.proof["stage"]).unlink(missing_ok=True)
        return outcome


@breaks(Clause.SLOT, SLOTS)
class StagesByTheSlot(_Stages):
    """As the docs say: a small number, to build names that are used again."""

    def stage_of(self, context: TransactionContext) -> str:
        return f"{token(context.job)}-{token(context.sink)}-{context.subtask}-{context.slot}"


@breaks(Clause.SLOT, SLOTS)
class StagesByCheckpointAndSlot(_Stages):
    """A zombie has the same ones."""

    def stage_of(self, context: TransactionContext) -> str:
        name = TransactionId.parse(context.transaction_id)
        return f"{name.job}.{name.lineage}.{name.sink}.{name.checkpoint}.{name.subtask}.{context.slot}"


@breaks(Clause.SLOT, SLOTS)
class AbortsWhatHadItsSlot(Shelf):
    """And leaves the proof, so that the rows are written again. But a zombie can do so for ever."""

    def begin_transaction(self, context: TransactionContext) -> Handle:
        transaction = super().begin_transaction(context)
        (self.folder / "holders").mkdir(exist_ok=True)
        name = f"{token(context.job)}-{token(context.sink)}-{context.subtask}-{context.slot}"
        holder = self.folder / "holders" / name
        if holder.exists():
            before = self.path(holder.read_text(), "ready")
            if before.exists():
                before.rename(before.with_suffix(".gone"))
        holder.write_text(transaction.name)
        return transaction


# ---------------------------------------------------------------------- at-least-once mode
DIRECT = "at_least_once_transactions_are_told_apart_by_their_names"


class _NamesDirectRows(Shelf):
    def direct(self, context: TransactionContext) -> str:
        raise NotImplementedError

    def commit_directly(self, transaction: Handle) -> None:
        transaction.file.close()
        done = self.path(f"direct-{self.direct(transaction.context)}", "done")
        self.path(transaction.name, "open").rename(done)

    def order(self, path: Path) -> int:
        return 0 if path.name.startswith("direct-") else super().order(path)


@breaks(Clause.NAMES, DIRECT)
class NamesDirectRowsWithoutLineage(_NamesDirectRows):
    def direct(self, context: TransactionContext) -> str:
        return f"{context.job}-{context.sink}-{context.checkpoint_id}-{context.subtask}-{context.attempt}"


@breaks(Clause.NAMES, DIRECT)
class NamesDirectRowsWithoutJob(_NamesDirectRows):
    def direct(self, context: TransactionContext) -> str:
        return f"{context.lineage}-{context.sink}-{context.checkpoint_id}-{context.subtask}-{context.attempt}"


@breaks(Clause.NAMES, DIRECT)
class NamesDirectRowsWithoutSink(_NamesDirectRows):
    def direct(self, context: TransactionContext) -> str:
        return f"{context.job}-{context.lineage}-{context.checkpoint_id}-{context.subtask}-{context.attempt}"


@breaks(Clause.NAMES, DIRECT)
class NamesDirectRowsWithoutCheckpoint(_NamesDirectRows):
    def direct(self, context: TransactionContext) -> str:
        return f"{context.job}-{context.lineage}-{context.sink}-{context.subtask}-{context.attempt}"


@breaks(Clause.NAMES, DIRECT)
class NamesDirectRowsWithoutAttempt(_NamesDirectRows):
    """The second attempt overwrites the first, whose rows a reader may have seen."""

    def direct(self, context: TransactionContext) -> str:
        return f"{context.job}-{context.lineage}-{context.sink}-{context.checkpoint_id}-{context.subtask}"


# ---------------------------------------------------------------------- upserts
REPLACED = "an_upsert_replaces_rows"


class _Merges(Shelf):
    """Values of a row are put over those of the older one."""

    def over(self, old: Any, new: Any) -> Any:
        raise NotImplementedError

    def merged(self, rows: Rows) -> Rows:
        kept: dict[Any, dict[str, Any]] = {}
        for row in rows:
            key = object() if row["id"] is None else row["id"]
            old = kept.get(key, row)
            kept[key] = {name: self.over(old[name], row[name]) for name in row}
        return list(kept.values())


@breaks(Clause.UPSERT, REPLACED)
class KeepsAValueForNull(_Merges):
    """As `COALESCE(new.name, old.name)` does, and a document store that is sent no nulls."""

    def over(self, old: Any, new: Any) -> Any:
        return old if new is None else new


@breaks(Clause.UPSERT, REPLACED)
class KeepsAValueForNothing(_Merges):
    """As `new or old` does."""

    def over(self, old: Any, new: Any) -> Any:
        return new or old


@breaks(Clause.UPSERT, REPLACED)
class KeepsTheGreaterValue(_Merges):
    def over(self, old: Any, new: Any) -> Any:
        return new if new is None or old is None else max(old, new)


# ---------------------------------------------------------------------- names
ALIKE = "names_that_look_alike_are_not_the_same"


class _Names(Shelf):
    """Names begin with hashes of the job and the sink, which were made fit for the system before."""

    def fit_job(self, name: str) -> str:
        return name

    def fit_sink(self, name: str) -> str:
        return name

    def beginning(self, job: str) -> str:
        return f"{_hash(self.fit_job(job))}+{_hash(self.fit_sink(self.name))}+"

    def name_of(self, context: TransactionContext) -> str:
        return self.beginning(context.job) + context.transaction_id

    def paths(self, job: str, state: str) -> list[Path]:
        return list(self.folder.glob(f"{self.beginning(job)}*.{state}"))

    def committed_checkpoints(self, job: str) -> Mapping[str, int] | None:
        return None


def _hash(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:10]


def in_ascii(name: str) -> str:
    """As a name that is made fit for a URL, a topic or a column."""
    return "".join(c if c.isascii() else "_" for c in name)


@breaks(Clause.IN_DOUBT_JOB, ALIKE, ours="注文+sink", theirs="請求+sink")
class TellsJobsApartInAsciiOnly(_Names):
    fit_job = staticmethod(in_ascii)


@breaks(Clause.IN_DOUBT_JOB, ALIKE, ours="job+注文", theirs="job+請求")
class TellsSinksApartInAsciiOnly(_Names):
    fit_sink = staticmethod(in_ascii)


@breaks(Clause.IN_DOUBT_JOB, ALIKE, ours=LONG_JOBS[0], theirs=LONG_JOBS[1])
class CutsJobsAt64Characters(_Names):
    def fit_job(self, name: str) -> str:
        return name[:64]


@breaks(Clause.IN_DOUBT_JOB, ALIKE, ours=LONG_SINKS[0], theirs=LONG_SINKS[1])
class CutsSinksAt64Characters(_Names):
    def fit_sink(self, name: str) -> str:
        return name[:64]


@breaks(Clause.IN_DOUBT_JOB, ALIKE, ours=LONG_ENDS[0], theirs=LONG_ENDS[1])
class KeepsTheEndOfJobs(_Names):
    """Of long ones, since the beginning is often the same."""

    def fit_job(self, name: str) -> str:
        return name[-64:]


@breaks(Clause.IN_DOUBT_JOB, ALIKE, ours="caf\u00e9+sink", theirs="cafe\u0301+sink")
class NormalizesNames(_Names):
    """As some file systems do."""

    def fit_job(self, name: str) -> str:
        return unicodedata.normalize("NFC", name)


@breaks(Clause.IN_DOUBT_JOB, ALIKE, ours="straße+sink", theirs="strasse+sink")
class FoldsNames(_Names):
    """As a collation of a database does."""

    def fit_job(self, name: str) -> str:
        return name.replace("ß", "ss")


# ---------------------------------------------------------------------- an open transaction
OPEN = "a_commit_beside_a_pre_commit"


@breaks(Clause.COMMIT_OPEN, OPEN)
class TellsAnOpenOneLost(Shelf):
    """It is not pre-committed, so no record can name it."""

    def of_gone(self, name: str) -> CommitOutcome:
        if self.path(name, "open").exists():
            return CommitOutcome.lost(f"{name} was never pre-committed")
        return super().of_gone(name)


@breaks(Clause.COMMIT_OPEN, OPEN)
class CommitsAnOpenOne(Shelf):
    """With the rows that it has so far."""

    def commit(self, committable: Committable) -> CommitOutcome:
        name = committable.transaction["name"]
        if self.path(name, "open").exists():
            self.path(f"early-{name}", "done").write_bytes(self.path(name, "open").read_bytes())
            return COMMITTED
        return super().commit(committable)


@breaks(Clause.COMMIT_OPEN, OPEN)
class LooksForItThenBarsIt(Shelf):
    """What it does not find, it bars by a tombstone, which a pre-commit looks for before it is durable."""

    def of_gone(self, name: str) -> CommitOutcome:
        outcome = super().of_gone(name)
        if outcome.state.name == "UNKNOWN":
            self.path(name, "gone").touch()
            return CommitOutcome.lost(f"{name} was not there, and cannot come any more")
        return outcome

    def pre_commit(self, transaction: Handle) -> Identity | Committable:
        if self.path(transaction.name, "gone").exists():
            raise SinkError(f"{transaction.name} was given up")
        return super().pre_commit(transaction)
