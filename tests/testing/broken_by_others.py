"""Broken in what the kit had not looked at: long lives, silence outside of commit, several batches, other zones."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any, ClassVar

import pyarrow as pa

from sinks import Checkpoint, CommitOutcome, Committable, Identity
from sinks.audit import Audit, Holding, Part
from sinks.base import Sink
from sinks.dead_letters import Refusal
from sinks.diagnosis import InDoubt
from sinks.errors import CommittedError
from sinks.testing import Clause
from sinks.transaction import TransactionId
from tests.testing.broken_tasks import _Alters
from tests.testing.catalogue import breaks
from tests.testing.shelf import AnyShelf, EvolvingShelf, Handle, Rows, Shelf, WholeShelf, stored

COMMITTED = CommitOutcome.COMMITTED


# ---------------------------------------------------------------------- commit_all, commit_whole
@breaks(Clause.AT_ONCE, "what_is_unknown_keeps_no_sibling_from_its_outcome")
class ShowsBesideWhatIsUnknown(WholeShelf):
    def settle(self, committables: Sequence[Committable]) -> list[CommitOutcome]:
        answers = super().settle(committables)
        if any(a.state.name == "UNKNOWN" for a in answers):
            known = [c for c, a in zip(committables, answers, strict=True) if a.state.name != "UNKNOWN"]
            if known:
                super().settle(known)
        return answers


@breaks(Clause.JOINTLY, "sinks_of_one_place_commit_as_one", lost=1)
class CommitsOneSinkAfterTheOther(WholeShelf):
    def commit_jointly(
        self, checkpoint: Checkpoint, shares: Sequence[tuple[Sink, Sequence[Committable]]]
    ) -> Sequence[Sequence[CommitOutcome]]:
        return [self.settle(own) for _, own in shares]


@breaks(Clause.JOINTLY, "sinks_of_one_place_commit_as_one", lost=0)
class MovesOneSinkAfterTheOther(WholeShelf):
    """It knows that all are there before it moves any."""

    def commit_jointly(
        self, checkpoint: Checkpoint, shares: Sequence[tuple[Sink, Sequence[Committable]]]
    ) -> Sequence[Sequence[CommitOutcome]]:
        there = [c.transaction["name"] for _, own in shares for c in own]
        if all(self.path(name, "ready").exists() for name in there):
            return [self.settle(own) for _, own in shares]
        return super().commit_jointly(checkpoint, shares)


@breaks(Clause.JOINTLY, "sinks_of_one_place_commit_as_one", lost=0)
class IsAPlaceByItself(WholeShelf):
    def place(self) -> str:
        return self.name


@breaks(Clause.WRITE, "equal_rows_arrive_as_often_as_they_come")
class DropsRowsThatAreThereAlready(Shelf):
    def commit(self, committable: Committable) -> CommitOutcome:
        there = [row for path in self.folder.glob("*.done") for row in stored(path)]
        ready = self.path(committable.transaction["name"], "ready")
        if ready.exists():
            ready.write_bytes(pickle.dumps([row for row in stored(ready) if row not in there]))
        return super().commit(committable)


# ---------------------------------------------------------------------- silence
@breaks(Clause.IN_DOUBT, "silence_is_no_answer", method="in_doubt")
class ListsNothingWhenTheSystemIsSilent(Shelf):
    def in_doubt(self, job: str) -> Iterable[Identity]:
        try:
            return self._listed(job)
        except Exception:
            return []

    def _listed(self, job: str) -> list[Identity]:
        return list(super().in_doubt(job))


@breaks(Clause.MEMORY, "silence_is_no_answer", method="committed_checkpoints")
class RemembersNothingWhenTheSystemIsSilent(Shelf):
    def committed_checkpoints(self, job: str) -> Mapping[str, int] | None:
        try:
            return self._remembered(job)
        except Exception:
            return {}

    def _remembered(self, job: str) -> Mapping[str, int] | None:
        return super().committed_checkpoints(job)


@breaks(Clause.ABORT, "silence_is_no_answer", method="abort")
class SaysAbortedWhenTheSystemIsSilent(Shelf):
    def abort(self, transaction: Identity) -> None:
        try:
            self._abort(transaction)
        except CommittedError:
            raise
        except Exception:
            return

    def _abort(self, transaction: Identity) -> None:
        super().abort(transaction)


@breaks(Clause.PURGE, "silence_is_no_answer", method="purge")
class ForgetsItsMemoryWhenPurgeFails(Shelf):
    def purge(self, checkpoint: Checkpoint) -> None:
        memory = dict(super().committed_checkpoints(checkpoint.job) or {})
        file = self.folder / "memory"
        file.write_text("")
        file.write_text(repr(memory))
        file.unlink()

    def committed_checkpoints(self, job: str) -> Mapping[str, int] | None:
        if (self.folder / "memory").exists():
            text = (self.folder / "memory").read_text()
            return dict(eval(text)) if text else {}
        return super().committed_checkpoints(job)


@breaks(Clause.LEFTOVERS, "a_task_fails_and_rolls_back", inside="write")
class LeavesItsMarkWhenAWriteFails(Shelf):
    def write(self, transaction: Handle, batch: pa.RecordBatch) -> None:
        mark = self.path(transaction.name, "writing")
        mark.touch()
        super().write(transaction, batch)
        mark.unlink()


# ---------------------------------------------------------------------- a long life
@breaks(Clause.IN_DOUBT, "two_attempts_of_one_subtask_are_open_at_once", loser="goes on")
class ListsWhatItListedBefore(Shelf):
    listed: Any = None

    def open(self) -> None:
        self.listed = {}

    def in_doubt(self, job: str) -> Iterable[Identity]:
        if self.listed is None:
            return super().in_doubt(job)
        if job not in self.listed:
            self.listed[job] = list(super().in_doubt(job))
        return list(self.listed[job])

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"listed": None}


@breaks(Clause.LEAKS, "nothing_grows_with_each_transaction")
class HoldsAFileForEachCommitUntilItCloses(Shelf):
    files: Any = ()

    def commit(self, committable: Committable) -> CommitOutcome:
        self.files = [*self.files, os.open(self.folder, os.O_RDONLY)]
        return super().commit(committable)

    def close(self) -> None:
        for file in self.files:
            os.close(file)
        self.files = ()

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"files": ()}


@breaks(Clause.LOST, "another_process_sees_and_commits_what_a_dead_one_pre_committed")
class ProvesAbortsInItsProcess(Shelf):
    aborted: ClassVar[set[str]] = set()

    def abort(self, transaction: Identity) -> None:
        super().abort(transaction)
        gone = self.path(transaction["name"], "gone")
        if gone.exists():
            self.aborted.add(str(gone))
            gone.unlink()

    def of_gone(self, name: str) -> CommitOutcome:
        if str(self.path(name, "gone")) in self.aborted:
            return CommitOutcome.lost(f"{name} was aborted")
        return super().of_gone(name)


@breaks(Clause.MEMORY, "another_process_sees_and_commits_what_a_dead_one_pre_committed")
class RemembersInItsProcess(Shelf):
    memory: ClassVar[dict[str, Any]] = {}

    def commit(self, committable: Committable) -> CommitOutcome:
        outcome = super().commit(committable)
        if outcome == COMMITTED:
            name = TransactionId.parse(committable.transaction["name"])
            key = f"{self.folder}{name.job}{name.sink}"
            mine = self.memory.setdefault(key, {})
            mine[name.lineage] = max(name.checkpoint, mine.get(name.lineage, 0))
        return outcome

    def committed_checkpoints(self, job: str) -> Mapping[str, int] | None:
        name = TransactionId.parse(str(TransactionId(job, "0", 0, self.name, 0, 0, 0, 0, 0)))
        return dict(self.memory.get(f"{self.folder}{name.job}{name.sink}", {}))


# ---------------------------------------------------------------------- check, open, close
@breaks(Clause.IN_DOUBT, "written_rows_are_invisible_and_not_in_doubt")
class NeedsACheckBeforeItLists(Shelf):
    def check(self, schema: pa.Schema) -> None:
        super().check(schema)
        (self.folder / "table").touch()

    def in_doubt(self, job: str) -> Iterable[Identity]:
        if not (self.folder / "table").exists():
            raise FileNotFoundError("there is no table")
        return super().in_doubt(job)


@breaks(Clause.CHECK, "a_copy_of_the_sink_touches_no_transaction", what="checked")
class ClearsWhatIsInDoubtWhenItChecks(Shelf):
    def check(self, schema: pa.Schema) -> None:
        super().check(schema)
        for path in self.folder.glob("*.ready"):
            path.unlink()


# ---------------------------------------------------------------------- owns
@breaks(Clause.OWNS, "transactions_are_told_apart_by_each_part_of_their_names")
class DisownsItsOwn(Shelf):
    def owns(self, job: str, transaction: Identity) -> bool:
        return TransactionId.parse(transaction["name"]).generation == 1


@breaks(Clause.OWNS, "transactions_are_told_apart_by_each_part_of_their_names")
class CannotTellWhatIsForeign(Shelf):
    def owns(self, job: str, transaction: Identity) -> bool:
        return bool(transaction["name"].startswith(TransactionId.prefix(job)))


# ---------------------------------------------------------------------- batches and values
@breaks(Clause.WRITE, "nulls_arrive_as_nulls")
class InfersTypesFromTheFirstBatch(Shelf):
    def write(self, transaction: Handle, batch: pa.RecordBatch) -> None:
        empty = [n for n, c in zip(batch.schema.names, batch.columns, strict=True) if c.null_count == len(c)]
        if not transaction.file.tell():
            transaction.__dict__["empty"] = empty
        gone = dict.fromkeys(transaction.__dict__["empty"])
        self.put(transaction, [row | gone for row in batch.to_pylist()])


@breaks(Clause.WRITE, "many_rows_in_several_batches_arrive")
class CutsAfterAMegabyte(Shelf):
    def put(self, transaction: Handle, rows: Rows) -> None:
        if transaction.file.tell() < 1_000_000:
            super().put(transaction, rows)


@breaks(Clause.WRITE, "many_rows_in_several_batches_arrive")
class TakesAMegabyteInABatch(Shelf):
    def put(self, transaction: Handle, rows: Rows) -> None:
        while len(pickle.dumps(rows)) > 1_000_000:
            rows = rows[: len(rows) // 2]
        super().put(transaction, rows)


@breaks(Clause.WRITE, "values_of_every_type_that_it_takes_arrive")
class TakesTheZoneOfTheMachineForUTC(_Alters, AnyShelf):
    def value(self, value: Any) -> Any:
        if isinstance(value, datetime) and value.tzinfo:
            return datetime.fromtimestamp(time.mktime(value.timetuple()), timezone.utc)
        return value


@breaks(Clause.WRITE_GOOD_ROWS, "bad_rows_are_named_and_the_others_written")
class NumbersRefusedRowsOverBatches(Shelf):
    def write_good_rows(self, transaction: Handle, batch: pa.RecordBatch, most: int) -> Sequence[Refusal]:
        before = transaction.__dict__.setdefault("before", 0)
        transaction.__dict__["before"] += batch.num_rows
        return [
            Refusal(o.row + before, o.error_class, o.error) for o in super().write_good_rows(transaction, batch, most)
        ]


@breaks(Clause.ROLLBACK, "rollback_leaves_nothing")
class KeepsWhatWasRolledBack(Shelf):
    buffer: Any = ()

    def write(self, transaction: Handle, batch: pa.RecordBatch) -> None:
        self.buffer = [*self.buffer, *batch.to_pylist()]

    def pre_commit(self, transaction: Handle) -> Identity | Committable:
        self.put(transaction, list(self.buffer))
        self.buffer = ()
        return super().pre_commit(transaction)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"buffer": ()}


@breaks(Clause.ROLLBACK, "rollback_leaves_nothing")
class RollsBackByPrefix(Shelf):
    def rollback(self, transaction: Handle) -> None:
        super().rollback(transaction)
        for state in ("open", "ready"):
            for path in self.folder.glob(f"{transaction.name}*.{state}"):
                path.unlink()


@breaks(Clause.ROLLBACK, "rollback_leaves_nothing")
class RollsBackTheWholeCheckpoint(Shelf):
    def rollback(self, transaction: Handle) -> None:
        super().rollback(transaction)
        name = TransactionId.parse(transaction.name)
        for path in self.folder.glob("*.open"):
            other = TransactionId.parse(path.stem)
            if (other.checkpoint, other.generation) == (name.checkpoint, name.generation):
                path.unlink()


# ---------------------------------------------------------------------- optional
@breaks(Clause.AUDIT, "the_audit_counts_what_is_visible")
class AuditsSlowlyOnly(Shelf):
    def audit(self, job: str, parts: Sequence[Part], *, quick: bool = False) -> Audit:
        if quick:
            raise NotImplementedError
        return super().audit(job, parts)


@breaks(Clause.AUDIT, "the_audit_counts_what_is_visible")
class AuditsAllJobs(Shelf):
    def audit(self, job: str, parts: Sequence[Part], *, quick: bool = False) -> Audit:
        def count(part: Part) -> int:
            paths = self.folder.glob(f"tpc.*.{part.lineage}.{part.checkpoint_id}.*.done")
            return len([row for path in paths for row in stored(path)])

        return Audit([Holding(rows=count(part)) for part in parts])


@breaks(Clause.VALIDATE, "validate_all_decides_nothing")
class LocksWhatItValidates(Shelf):
    def validate_all(self, checkpoint: Checkpoint, committables: Sequence[Committable]) -> None:
        (self.folder / "locked").touch()
        self.valid = True

    def commit(self, committable: Committable) -> CommitOutcome:
        if (self.folder / "locked").exists() and not hasattr(self, "valid"):
            raise TimeoutError("locked by another session")
        return super().commit(committable)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name != "valid"}


@breaks(Clause.INSPECT, "what_operators_are_told_is_told_as_documented")
class InspectsSomethingOnly(Shelf):
    def inspect(self, transactions: Sequence[Identity]) -> Sequence[InDoubt]:
        oldest = min(TransactionId.parse(identity["name"]).checkpoint for identity in transactions)
        assert oldest >= 0
        return super().inspect(transactions)


@breaks(Clause.EVOLVE, "evolve_takes_new_columns")
class TakesAwayColumnsThatAreGone(EvolvingShelf):
    def evolve(self, schema: pa.Schema) -> None:
        super().evolve(schema)
        for path in self.folder.glob("*.done"):
            rows = [{n: v for n, v in row.items() if n in schema.names} for row in stored(path)]
            path.write_bytes(pickle.dumps(rows))


@breaks(Clause.EVOLVE, "evolve_takes_new_columns")
class TakesNewColumnsByTheirPlace(EvolvingShelf):
    def write(self, transaction: Handle, batch: pa.RecordBatch) -> None:
        self.put(transaction, [dict(zip(self.columns, row.values(), strict=False)) for row in batch.to_pylist()])


@breaks(Clause.IN_DOUBT_RESOLVED, "abort_leaves_nothing_and_may_be_repeated")
class AbortsOnlyWhatItListed(Shelf):
    listed: Sequence[Identity] = ()

    def in_doubt(self, job: str) -> Iterable[Identity]:
        self.listed = list(super().in_doubt(job))
        return self.listed

    def abort(self, transaction: Identity) -> None:
        if self.listed and transaction not in self.listed:
            return
        super().abort(transaction)


@breaks(Clause.WRITE, "equal_rows_arrive_as_often_as_they_come")
class MergesEqualParticipants(WholeShelf):
    def settle(self, committables: Sequence[Committable]) -> list[CommitOutcome]:
        seen: list[Any] = []
        for committable in committables:
            path = self.path(committable.transaction["name"], "ready")
            if path.exists():
                rows = list(stored(path))
                if rows in seen:
                    path.write_bytes(pickle.dumps([]))
                seen.append(rows)
        return super().settle(committables)
