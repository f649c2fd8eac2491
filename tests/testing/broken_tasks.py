"""Broken in what a task does: the object, begin, write, pre-commit, rollback."""

from __future__ import annotations

import contextlib
import os
import threading
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa

from sinks import Checkpoint, CommitOutcome, Committable, Identity, TransactionContext
from sinks.dead_letters import Refusal
from sinks.errors import ConfigurationError
from sinks.testing import Clause
from sinks.transaction import TransactionId
from tests.testing.catalogue import breaks
from tests.testing.shelf import REFUSED, AnyShelf, File, Handle, Rows, Shelf

OPENED = "the_sink_is_closed_and_opened_again_in_any_process"
CHECKED = "check_takes_and_refuses_columns"
NAMED = "transactions_are_told_apart_by_each_part_of_their_names"
ATTEMPTS, ZOMBIE = "two_attempts_of_one_subtask_are_open_at_once", "of an older driver goes on"


# ---------------------------------------------------------------------- the object
@breaks(Clause.PICKLED, OPENED)
class IsNamedAnewWhenPickled(Shelf):
    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"name": f"shelf-{os.urandom(4).hex()}"}


@breaks(Clause.PICKLED, OPENED)
class KeepsALockInTheObject(Shelf):
    def open(self) -> None:
        self.lock = threading.Lock()


@breaks(Clause.CLOSE, OPENED)
class ClosesOnlyWhatWasOpened(Shelf):
    def open(self) -> None:
        self.session = "open"

    def close(self) -> None:
        del self.session


@breaks(Clause.OPEN, OPENED)
class IsNotOpenedAgain(Shelf):
    closed = False

    def open(self) -> None:
        if self.closed:
            raise RuntimeError("closed for good")

    def close(self) -> None:
        self.closed = True


@breaks(Clause.CLOSE_KEEPS, "a_copy_of_the_sink_touches_no_transaction", what="closed")
class ClosesTransactionsToo(Shelf):
    is_open = False

    def open(self) -> None:
        self.is_open = True

    def close(self) -> None:
        if not self.is_open:  # also in a copy that has not is_open anything
            for path in self.folder.glob("*.ready"):
                path.unlink()
        self.is_open = False

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"is_open": False}

    def pre_commit(self, transaction: Handle) -> Identity | Committable:
        identity = super().pre_commit(transaction)
        self.is_open = False
        return identity


@breaks(Clause.CHECK, CHECKED)
class ChecksOnce(Shelf):
    def check(self, schema: pa.Schema) -> None:
        super().check(schema)
        (self.folder / "table").touch(exist_ok=False)


@breaks(Clause.CHECK_REFUSES, CHECKED)
class AcceptsWhatItCannotTake(Shelf):
    def check(self, schema: pa.Schema) -> None:
        pass


@breaks(Clause.CHECK_REFUSES, CHECKED)
class NamesOneReasonOnly(Shelf):
    def check(self, schema: pa.Schema) -> None:
        for name in schema.names:
            if name not in (self.columns or ()):
                raise ConfigurationError(f"there is no column {name}")


@breaks(Clause.CHECK_REFUSES, CHECKED)
class RefusesWithAnyError(Shelf):
    def check(self, schema: pa.Schema) -> None:
        if strange := set(schema.names) - set(self.columns or ()):
            raise KeyError(*strange)


@breaks(Clause.WEAKNESSES, "what_operators_are_told_is_told_as_documented")
class AnswersWithOneText(Shelf):
    def weaknesses(self) -> Sequence[str]:
        return "no fsync"


@breaks(Clause.DIAGNOSE, "what_operators_are_told_is_told_as_documented")
class LeavesItsTrialInDoubt(Shelf):
    def diagnose(self, job: str) -> Iterable[Any]:
        name = TransactionId(job, "doctor", 0, self.name, 0, 0, 0, 0, 0)
        self.path(str(name), "ready").touch()
        return ()


@breaks(Clause.DIAGNOSE, "what_operators_are_told_is_told_as_documented")
class FindsTexts(Shelf):
    def diagnose(self, job: str) -> Iterable[Any]:
        return ["all is well"]


@breaks(Clause.INSPECT, "what_operators_are_told_is_told_as_documented")
class InspectsTheFirstOnly(Shelf):
    def inspect(self, transactions: Sequence[Identity]) -> Sequence[Any]:
        return super().inspect(transactions[:1])


# ---------------------------------------------------------------------- begin
@breaks(Clause.BEGIN, "two_open_transactions_of_one_sink_object_do_not_meet")
class OneTransactionAtATime(Shelf):
    def begin_transaction(self, context: TransactionContext) -> Handle:
        if any(self.folder.glob("*.open")):
            raise RuntimeError("a transaction is open")
        return super().begin_transaction(context)


class _WithoutPart(Shelf):
    """Its names do not hold a part of `context.transaction_id`."""

    part: str
    nothing: Any = 0

    def name_of(self, context: TransactionContext) -> str:
        name = replace(TransactionId.parse(context.transaction_id), job=context.job, sink=context.sink)
        return str(replace(name, **{self.part: self.nothing}))


@breaks(Clause.NAMES, NAMED)
class NamesWithoutLineage(_WithoutPart):
    part, nothing = "lineage", "all"


@breaks(Clause.NAMES, NAMED)
class NamesWithoutCheckpoint(_WithoutPart):
    part = "checkpoint"


@breaks(Clause.NAMES, NAMED)
class NamesWithoutSubtask(_WithoutPart):
    part = "subtask"


@breaks(Clause.NAMES, NAMED)
class NamesWithoutGenerationAndAttempt(_WithoutPart):
    part = "generation"

    def name_of(self, context: TransactionContext) -> str:
        return super().name_of(context).rpartition("a")[0] + "a0"


@breaks(Clause.NAMES, NAMED)
class NamesWithoutGeneration(_WithoutPart):
    part = "generation"


@breaks(Clause.NAMES, NAMED)
class NamesWithoutRound(_WithoutPart):
    part = "round"


@breaks(Clause.NAMES, NAMED)
class NamesWithoutAttempt(_WithoutPart):
    part = "attempt"


@breaks(Clause.NAMES, NAMED)
class NamesWithoutTaskAttempt(_WithoutPart):
    part = "task_attempt"


@breaks(Clause.NAMES, "in_doubt_lists_no_other_sinks_transactions")
class NamesWithoutSink(_WithoutPart):
    part, nothing = "sink", "any"

    def paths(self, job: str, state: str) -> list[Path]:
        return list(self.folder.glob(f"{TransactionId.prefix(job)}*.{state}"))


class _SharedDraft(Shelf):
    """Writes into a file for the subtask until it is pre-committed."""

    def draft(self, context: TransactionContext) -> Path:
        return self.folder / f"draft-{context.subtask}"

    def begin_transaction(self, context: TransactionContext) -> Handle:
        return Handle(context, context.transaction_id, File(self.draft(context)))

    def pre_commit(self, transaction: Handle) -> Identity | Committable:
        transaction.file.close()
        self.draft(transaction.context).rename(self.path(transaction.name, "ready"))
        return {"name": transaction.name}


@breaks(Clause.NAMES, ATTEMPTS, loser=ZOMBIE)
class ZombiesWriteIntoTheSameDraft(_SharedDraft):
    pass


@breaks(Clause.IN_DOUBT, ATTEMPTS, loser=ZOMBIE)
class ZombiesThrowAwayWhatIsReady(_SharedDraft):
    def rollback(self, transaction: Handle) -> None:
        for path in self.paths(transaction.context.job, "ready"):
            if TransactionId.parse(path.stem).subtask == transaction.context.subtask:
                path.unlink()


@breaks(Clause.HANDLE, "two_open_transactions_of_one_sink_object_do_not_meet")
class KeepsTheHandleInTheObject(Shelf):
    def begin_transaction(self, context: TransactionContext) -> Handle:
        self.current = super().begin_transaction(context)
        return self.current

    def write(self, transaction: Handle, batch: pa.RecordBatch) -> None:
        super().write(self.current, batch)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"current": None}


# ---------------------------------------------------------------------- write
@breaks(Clause.WRITE_INVISIBLE, "written_rows_are_invisible_and_not_in_doubt")
class ShowsWhatIsWritten(Shelf):
    def begin_transaction(self, context: TransactionContext) -> Handle:
        name = context.transaction_id
        return Handle(context, name, File(self.path(name, "done")))

    def pre_commit(self, transaction: Handle) -> Identity | Committable:
        self.path(transaction.name, "done").rename(self.path(transaction.name, "ready"))
        return {"name": transaction.name}


BAD = "bad_rows_are_named_and_the_others_written"
TEXTS, NULLS = "texts_and_numbers_arrive_as_they_are", "nulls_arrive_as_nulls"
TYPES = "values_of_every_type_that_it_takes_arrive"


@breaks(Clause.WRITE, "all_batches_of_a_transaction_belong_to_it")
class KeepsTheLastBatch(Shelf):
    def put(self, transaction: Handle, rows: Rows) -> None:
        transaction.file.clear()
        super().put(transaction, rows)


@breaks(Clause.WRITE, "all_batches_of_a_transaction_belong_to_it")
class KeepsTheFirstBatch(Shelf):
    def put(self, transaction: Handle, rows: Rows) -> None:
        if not transaction.file.tell():
            super().put(transaction, rows)


@breaks(Clause.WRITE, "many_rows_in_several_batches_arrive")
class KeepsAHundredRows(Shelf):
    def put(self, transaction: Handle, rows: Rows) -> None:
        super().put(transaction, rows[:100])


@breaks(Clause.WRITE, "equal_rows_arrive_as_often_as_they_come")
class DropsEqualRows(Shelf):
    def put(self, transaction: Handle, rows: Rows) -> None:
        super().put(transaction, [row for n, row in enumerate(rows) if row not in rows[:n]])


@breaks(Clause.WRITE, "part_of_a_larger_batch_arrives_alone")
class ReadsBuffersFromTheirStart(Shelf):
    def write(self, transaction: Handle, batch: pa.RecordBatch) -> None:
        rows, (_, data) = batch.to_pylist(), batch.column("id").buffers()
        self.put(transaction, [row | {"id": memoryview(data).cast("q")[n]} for n, row in enumerate(rows)])


class _Alters(Shelf):
    def put(self, transaction: Handle, rows: Rows) -> None:
        super().put(transaction, [self.altered(row) for row in rows])

    def altered(self, row: dict[str, Any]) -> dict[str, Any]:
        return {name: self.value(value) for name, value in row.items()}

    def value(self, value: Any) -> Any:
        return value


@breaks(Clause.WRITE, TEXTS)
class LosesAColumn(_Alters):
    def altered(self, row: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in row.items() if name != "amount"}


@breaks(Clause.WRITE, TEXTS)
class SwapsColumns(_Alters):
    def altered(self, row: dict[str, Any]) -> dict[str, Any]:
        return row | {"name": row["amount"], "amount": row["name"]}


@breaks(Clause.WRITE, NULLS)
class StoresNullsAsZero(_Alters):
    def altered(self, row: dict[str, Any]) -> dict[str, Any]:
        return row | {"amount": row["amount"] or 0.0}


@breaks(Clause.WRITE, NULLS)
class StoresNullsAsText(_Alters):
    def altered(self, row: dict[str, Any]) -> dict[str, Any]:
        return row | {"name": str(row["name"])}


@breaks(Clause.WRITE, NULLS)
class StoresEmptyTextsAsNull(_Alters):
    def altered(self, row: dict[str, Any]) -> dict[str, Any]:
        return row | {"name": row["name"] or None}


@breaks(Clause.WRITE_GOOD_ROWS, BAD)
class CountsBadRowsFromOne(Shelf):
    def write_good_rows(self, transaction: Handle, batch: pa.RecordBatch, most: int) -> Sequence[Refusal]:
        return [replace(refusal, row=refusal.row + 1) for refusal in super().write_good_rows(transaction, batch, most)]


@breaks(Clause.WRITE_GOOD_ROWS, BAD)
class LosesABatchWithABadRow(Shelf):
    def write_good_rows(self, transaction: Handle, batch: pa.RecordBatch, most: int) -> Sequence[Refusal]:
        at = transaction.file.tell()
        if refused := super().write_good_rows(transaction, batch, most):
            os.truncate(self.path(transaction.name, "open"), at)
            os.lseek(transaction.file.descriptor, at, os.SEEK_SET)
        return refused


@breaks(Clause.WRITE_GOOD_ROWS, BAD)
class NamesOneOfNeighbours(Shelf):
    """As a search does that goes on after the row behind a bad one."""

    def write_good_rows(self, transaction: Handle, batch: pa.RecordBatch, most: int) -> Sequence[Refusal]:
        refused = super().write_good_rows(transaction, batch, most)
        places = [refusal.row for refusal in refused]
        return [refusal for refusal in refused if refusal.row - 1 not in places]


@breaks(Clause.WRITE_GOOD_ROWS, BAD)
class NeedsAGoodRow(Shelf):
    """As an INSERT without VALUES fails."""

    def put(self, transaction: Handle, rows: Rows) -> None:
        if not rows:
            raise ValueError("no rows to insert")
        super().put(transaction, rows)


@breaks(Clause.WRITE_GOOD_ROWS, BAD)
class NamesNoMoreThanItIsAskedFor(Shelf):
    def write_good_rows(self, transaction: Handle, batch: pa.RecordBatch, most: int) -> Sequence[Refusal]:
        return super().write_good_rows(transaction, batch, most)[:most]


@breaks(Clause.WRITE_GOOD_ROWS, BAD)
class BlamesRowsForAnOutage(Shelf):
    def write_good_rows(self, transaction: Handle, batch: pa.RecordBatch, most: int) -> Sequence[Refusal]:
        refused = []
        for at, row in enumerate(batch.to_pylist()):
            try:
                if row["name"] == REFUSED:
                    raise ValueError("it is refused")
                self.put(transaction, [row])
            except Exception as error:
                refused.append(Refusal(at, type(error).__name__, str(error)))
        return refused


@breaks(Clause.WRITE, NULLS)
class SkipsRowsWithNulls(Shelf):
    def put(self, transaction: Handle, rows: Rows) -> None:
        super().put(transaction, [row for row in rows if None not in row.values()])


@breaks(Clause.WRITE, TEXTS)
class StripsTexts(_Alters):
    def value(self, value: Any) -> Any:
        return value.strip() if isinstance(value, str) else value


@breaks(Clause.WRITE, TEXTS)
class CutsLongTexts(_Alters):
    def value(self, value: Any) -> Any:
        return value[:255] if isinstance(value, str) else value


@breaks(Clause.WRITE, TEXTS)
class NormalizesTexts(_Alters):
    def value(self, value: Any) -> Any:
        return unicodedata.normalize("NFC", value) if isinstance(value, str) else value


@breaks(Clause.WRITE, TEXTS)
class TakesTheBasicPlaneOnly(_Alters):
    def value(self, value: Any) -> Any:
        return "".join(c if ord(c) < 2**16 else "?" for c in value) if isinstance(value, str) else value


@breaks(Clause.WRITE, TEXTS)
class EscapesQuotes(_Alters):
    def value(self, value: Any) -> Any:
        return value.replace("'", "''") if isinstance(value, str) else value


@breaks(Clause.WRITE, TEXTS)
class HoldsIntegersAsFloats(_Alters):
    def value(self, value: Any) -> Any:
        return int(float(value)) if isinstance(value, int) else value


@breaks(Clause.WRITE, TEXTS)
class HoldsFloatsInSixDigits(_Alters):
    def value(self, value: Any) -> Any:
        return float(f"{value:.6g}") if isinstance(value, float) else value


@breaks(Clause.WRITE, TEXTS)
class LimitsABatch(_Alters):
    def put(self, transaction: Handle, rows: Rows) -> None:
        if len(repr(rows)) > 10_000:
            raise ValueError("more than 10 kB")
        super().put(transaction, rows)


@breaks(Clause.WRITE, "columns_of_any_name_arrive_or_are_refused")
class KeepsItsColumnsInALine(AnyShelf):
    """As the first one of a CSV file, which nobody has quoted."""

    def put(self, transaction: Handle, rows: Rows) -> None:
        names = ",".join(rows[0]).split(",") if rows else []
        super().put(transaction, [dict(zip(names, row.values(), strict=False)) for row in rows])


@breaks(Clause.CHECK_REFUSES, "columns_of_any_name_arrive_or_are_refused")
class FailsOnNamesThatNobodyQuoted(AnyShelf):
    def check(self, schema: pa.Schema) -> None:
        if strange := [name for name in schema.names if not name.isidentifier()]:
            raise ValueError(f"syntax error near {strange[0]}")


@breaks(Clause.WRITE, TYPES)
class HoldsDecimalsAsFloats(_Alters, AnyShelf):
    def value(self, value: Any) -> Any:
        return float(value) if isinstance(value, Decimal) else value


@breaks(Clause.WRITE, TYPES)
class CutsMicroseconds(_Alters, AnyShelf):
    def value(self, value: Any) -> Any:
        return value.replace(microsecond=0) if isinstance(value, datetime) else value


@breaks(Clause.WRITE, TYPES)
class ForgetsTimeZones(_Alters, AnyShelf):
    def value(self, value: Any) -> Any:
        return value.replace(tzinfo=None) if isinstance(value, datetime) else value


@breaks(Clause.WRITE, TYPES)
class TakesNoEmptyLists(_Alters, AnyShelf):
    def value(self, value: Any) -> Any:
        return None if value == [] else value


@breaks(Clause.WRITE, TYPES)
class HoldsBytesAsText(_Alters, AnyShelf):
    def value(self, value: Any) -> Any:
        return value.decode(errors="replace") if isinstance(value, bytes) else value


@breaks(Clause.UPSERT, "an_upsert_replaces_rows")
class ForgetsItsKey(Shelf):
    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, None if name == "key" else value)


# ---------------------------------------------------------------------- pre-commit
@breaks(Clause.PRE_COMMIT, "pre_committed_rows_are_invisible_and_in_doubt")
class ShowsWhatIsPreCommitted(Shelf):
    def pre_commit(self, transaction: Handle) -> Identity | Committable:
        identity = super().pre_commit(transaction)
        self.path(f"early-{transaction.name}", "done").write_bytes(self.path(transaction.name, "ready").read_bytes())
        return identity


@breaks(Clause.PRE_COMMIT, "all_batches_of_a_transaction_belong_to_it")
class PreCommitsOneBatchOnly(Shelf):
    def write(self, transaction: Handle, batch: pa.RecordBatch) -> None:
        if transaction.file.tell():
            self.path(f"early-{transaction.name}", "done").touch()
        super().write(transaction, batch)

    def pre_commit(self, transaction: Handle) -> Identity | Committable:
        early, identity = self.path(f"early-{transaction.name}", "done"), super().pre_commit(transaction)
        if early.exists():
            early.write_bytes(self.path(transaction.name, "ready").read_bytes())
        return identity


@breaks(Clause.PRE_COMMIT_ABORTED, "an_abort_beside_a_pre_commit")
class TakesARefusalForSuccess(Shelf):
    """An abort bars the way of an open transaction, whose task believes that its answer got lost."""

    def abort(self, transaction: Identity) -> None:
        super().abort(transaction)
        name = transaction["name"]
        with contextlib.suppress(FileNotFoundError):
            self.path(name, "open").rename(self.path(name, "gone"))

    def pre_commit(self, transaction: Handle) -> Identity | Committable:
        with contextlib.suppress(FileNotFoundError):
            return super().pre_commit(transaction)
        return {"name": transaction.name}


@breaks(Clause.PRE_COMMIT, "a_transaction_of_no_rows")
class NeedsRows(Shelf):
    def pre_commit(self, transaction: Handle) -> Identity | Committable:
        if not transaction.file.tell():
            raise ValueError("no rows")
        return super().pre_commit(transaction)


@breaks(Clause.PRE_COMMIT_EMPTY, "a_transaction_of_no_rows")
class CannotFindWhatIsEmpty(Shelf):
    def pre_commit(self, transaction: Handle) -> Identity | Committable:
        empty = not transaction.file.tell()
        identity = super().pre_commit(transaction)
        if empty:
            self.path(transaction.name, "ready").unlink()
        return identity


class _Identity(Shelf):
    def identity(self, name: str) -> Any:
        return {"name": name}

    def pre_commit(self, transaction: Handle) -> Identity | Committable:
        super().pre_commit(transaction)
        return self.identity(transaction.name)  # type: ignore[no-any-return]

    def in_doubt(self, job: str) -> Iterable[Identity]:
        return [self.identity(path.stem) for path in self.paths(job, "ready")]


JSON = "the_identity_is_a_dict_of_json_values"


@breaks(Clause.IDENTITY, JSON)
class IdentifiesByATuple(_Identity):
    def identity(self, name: str) -> Any:
        return {"name": name, "parts": tuple(name.split("."))}


@breaks(Clause.IDENTITY, JSON)
class IdentifiesByBytes(_Identity):
    def identity(self, name: str) -> Any:
        return {"name": name, "key": name.encode()}


@breaks(Clause.IDENTITY, JSON)
class IdentifiesByNumbers(_Identity):
    def identity(self, name: str) -> Any:
        return {"name": name, 1: "one"}


@breaks(Clause.IDENTITY, JSON)
class IdentifiesByText(_Identity):
    def identity(self, name: str) -> Any:
        return name


@breaks(Clause.IDENTITY, JSON)
class ProvesByASet(Shelf):
    def pre_commit(self, transaction: Handle) -> Identity | Committable:
        super().pre_commit(transaction)
        return Committable({"name": transaction.name}, {"files": {transaction.name}})


@breaks(Clause.IDENTITY, "pre_committed_rows_are_invisible_and_in_doubt")
class ListsMoreThanTheIdentity(Shelf):
    def in_doubt(self, job: str) -> Iterable[Identity]:
        return [{"name": path.stem, "size": path.stat().st_size} for path in self.paths(job, "ready")]


@breaks(Clause.IDENTITY, "pre_committed_rows_are_invisible_and_in_doubt")
class IdentifiesByTheTime(_Identity):
    calls: ClassVar[list[str]] = []

    def identity(self, name: str) -> Any:
        self.calls.append(name)
        return {"name": name, "listed": len(self.calls)}


@breaks(Clause.DURABLE, "another_process_sees_and_commits_what_a_dead_one_pre_committed")
class KeepsADictInTheProcess(Shelf):
    prepared: ClassVar[dict[str, bytes]] = {}

    def pre_commit(self, transaction: Handle) -> Identity | Committable:
        transaction.file.close()
        self.prepared[transaction.name] = self.path(transaction.name, "open").read_bytes()
        return {"name": transaction.name}

    def commit(self, committable: Committable) -> CommitOutcome:
        name = committable.transaction["name"]
        if name in self.prepared:
            self.path(name, "ready").write_bytes(self.prepared.pop(name))
        return super().commit(committable)

    def abort(self, transaction: Identity) -> None:
        if self.prepared.pop(transaction["name"], None):
            self.path(transaction["name"], "ready").touch()
        super().abort(transaction)

    def in_doubt(self, job: str) -> Iterable[Identity]:
        return [{"name": name} for name in self.prepared if name.startswith(TransactionId.prefix(job))]


@breaks(Clause.DURABLE, "another_process_sees_and_commits_what_a_dead_one_pre_committed")
class CommitsInTheProcessThatPreCommitted(Shelf):
    def pre_commit(self, transaction: Handle) -> Identity | Committable:
        super().pre_commit(transaction)
        return Committable({"name": transaction.name}, {"pid": os.getpid()})

    def commit(self, committable: Committable) -> CommitOutcome:
        if committable.proof["pid"] != os.getpid():
            raise RuntimeError("the session of this transaction is gone")
        return super().commit(committable)


@breaks(Clause.TASK_DIES, "a_task_killed_at_any_line_of_pre_commit")
class LocksWhileItPreCommits(Shelf):
    def pre_commit(self, transaction: Handle) -> Identity | Committable:
        lock = self.folder / "lock"
        lock.touch(exist_ok=False)
        identity = super().pre_commit(transaction)
        lock.unlink()
        return identity


# ---------------------------------------------------------------------- rollback
ROLLED_BACK, FAILED = "rollback_leaves_nothing", "a_task_fails_and_rolls_back"
ANSWER_LOST = "rollback_after_a_pre_commit_whose_answer_was_lost"


@breaks(Clause.LEFTOVERS, ROLLED_BACK)
class RollsNothingBack(Shelf):
    def rollback(self, transaction: Handle) -> None:
        transaction.file.close()


@breaks(Clause.ROLLBACK, ROLLED_BACK)
class RollsBackWhatOthersPreCommitted(Shelf):
    def rollback(self, transaction: Handle) -> None:
        super().rollback(transaction)
        for path in self.paths(transaction.context.job, "ready"):
            path.unlink()


@breaks(Clause.ROLLBACK, ROLLED_BACK)
class ShowsWhatIsRolledBack(Shelf):
    def rollback(self, transaction: Handle) -> None:
        transaction.file.close()
        self.path(transaction.name, "open").rename(self.path(transaction.name, "done"))


@breaks(Clause.ROLLBACK, ROLLED_BACK)
class CannotRollBackBeforeTheFirstRow(Shelf):
    def rollback(self, transaction: Handle) -> None:
        if not transaction.file.tell():
            raise ValueError("nothing was written")
        super().rollback(transaction)


@breaks(Clause.ROLLBACK_AFTER, ANSWER_LOST)
class ShowsWhatWasPreCommitted(Shelf):
    def rollback(self, transaction: Handle) -> None:
        ready = self.path(transaction.name, "ready")
        if ready.exists():
            ready.rename(self.path(transaction.name, "done"))
        super().rollback(transaction)


@breaks(Clause.ROLLBACK_AFTER, ANSWER_LOST)
class ExpectsItsFileToBeThere(Shelf):
    def rollback(self, transaction: Handle) -> None:
        transaction.file.close()
        self.path(transaction.name, "open").unlink()


@breaks(Clause.ROLLBACK_AFTER, FAILED, inside="pre_commit")
class CannotRollBackWhatIsClosed(Shelf):
    def rollback(self, transaction: Handle) -> None:
        if transaction.file.descriptor < 0:
            raise ValueError("I/O on a closed file")
        super().rollback(transaction)


@breaks(Clause.LEFTOVERS, FAILED, inside="pre_commit")
class LeavesItsMarkWhenPreCommitFails(Shelf):
    def pre_commit(self, transaction: Handle) -> Identity | Committable:
        mark = self.path(transaction.name, "sealing")
        mark.touch()
        identity = super().pre_commit(transaction)
        mark.unlink()
        return identity


@breaks(Clause.WRITE, FAILED, inside="write")
class GivesUpAfterThreeTries(Shelf):
    def write(self, transaction: Handle, batch: pa.RecordBatch) -> None:
        for _ in range(3):
            with contextlib.suppress(ConnectionError):
                super().write(transaction, batch)
                return


@breaks(Clause.PRE_COMMIT, FAILED, inside="pre_commit")
class TellsNothingOfAFailedPreCommit(Shelf):
    def pre_commit(self, transaction: Handle) -> Identity | Committable:
        with contextlib.suppress(ConnectionError):
            super().pre_commit(transaction)
        return {"name": transaction.name}


# ---------------------------------------------------------------------- commit_directly, validate_all
DIRECT = "commit_directly_makes_rows_visible_now"


@breaks(Clause.DIRECTLY, DIRECT)
class CommitsDirectlyLater(Shelf):
    def commit_directly(self, transaction: Handle) -> None:
        self.pre_commit(transaction)


@breaks(Clause.DIRECTLY, DIRECT)
class LeavesADirectCommitInDoubt(Shelf):
    def commit_directly(self, transaction: Handle) -> None:
        transaction.file.close()
        rows = self.path(transaction.name, "open").read_bytes()
        super().commit_directly(transaction)
        self.path(transaction.name, "ready").write_bytes(rows)


@breaks(Clause.MEMORY_DIRECTLY, DIRECT)
class RemembersWhatIsCommittedDirectly(Shelf):
    def commit_directly(self, transaction: Handle) -> None:
        self.commit(Committable(self.pre_commit(transaction)))  # type: ignore[arg-type]


@breaks(Clause.AT_LEAST_ONCE, "at_least_once_loses_nothing_when_killed_again_and_again")
class SkipsASubtaskAtLeastOnce(Shelf):
    def commit_directly(self, transaction: Handle) -> None:
        if transaction.context.subtask == 2:
            self.rollback(transaction)
        else:
            super().commit_directly(transaction)


@breaks(Clause.VALIDATE, "validate_all_decides_nothing")
class CommitsWhenItValidates(Shelf):
    def validate_all(self, checkpoint: Checkpoint, committables: Sequence[Committable]) -> None:
        self.commit_all(checkpoint, committables)


@breaks(Clause.VALIDATE, "validate_all_decides_nothing")
class RefusesASecondValidation(Shelf):
    def validate_all(self, checkpoint: Checkpoint, committables: Sequence[Committable]) -> None:
        (self.folder / f"validated-{checkpoint.checkpoint_id}").touch(exist_ok=False)
