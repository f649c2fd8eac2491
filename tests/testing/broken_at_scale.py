"""Broken where small numbers, one process, usual names and values do not show it."""

from __future__ import annotations

import os
import threading
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from math import copysign, isnan, nan
from pathlib import Path
from typing import Any

import pyarrow as pa

from sinks import Checkpoint, CommitOutcome, Committable, Identity, TransactionContext
from sinks.audit import Audit, Holding, Part
from sinks.diagnosis import SchemaDiff
from sinks.errors import CommittedError
from sinks.testing import SCHEMA, Clause
from sinks.transaction import TransactionId, token
from tests.testing.broken_drivers import DIES, ONCE, PURGED, REMEMBERED, SILENT
from tests.testing.broken_tasks import _Alters
from tests.testing.catalogue import breaks
from tests.testing.shelf import AnyShelf, EvolvingShelf, Handle, Rows, Shelf, WholeShelf

COMMITTED = CommitOutcome.COMMITTED


# ---------------------------------------------------------------------- commit_all for speed
class _AllAtOnce(Shelf):
    """`commit_all` moves those that are there, and `commit` is as it should be."""

    def commit_all(self, checkpoint: Checkpoint, committables: Sequence[Committable]) -> Sequence[Any]:
        self.move([committable.transaction["name"] for committable in committables])
        return [self.of_gone(committable.transaction["name"]) for committable in committables]

    def move(self, names: list[str]) -> None:
        raise NotImplementedError

    def ready(self, names: list[str]) -> list[Path]:
        return [path for name in names if (path := self.path(name, "ready")).exists()]


@breaks(Clause.COMMIT_DIES, DIES, count=3)
@breaks(Clause.ASK_AGAIN, SILENT, count=3)
class MovesThenMarks(_AllAtOnce):
    def move(self, names: list[str]) -> None:
        for path in self.ready(names):
            done = path.with_suffix(".done")
            done.write_bytes((done.read_bytes() if done.exists() else b"") + path.read_bytes())
            path.unlink()


@breaks(Clause.THREADS, "two_drivers_commit_the_same", count=3)
class TwoDriversMoveTwice(_AllAtOnce):
    def move(self, names: list[str]) -> None:
        data = {path: path.read_bytes() for path in self.ready(names)}
        for path, rows in data.items():
            with path.with_suffix(".done").open("ab", buffering=0) as file:
                file.write(rows)
            path.unlink(missing_ok=True)


@breaks(Clause.ABORT_OR_COMMIT, "an_abort_beside_a_commit", count=3)
class MovesWhatIsAbortedMeanwhile(_AllAtOnce):
    def move(self, names: list[str]) -> None:
        data = {path: path.read_bytes() for path in self.ready(names)}
        for path, rows in data.items():
            path.with_suffix(".done").write_bytes(rows)
            path.unlink(missing_ok=True)


@breaks(Clause.ASK_AGAIN, SILENT, count=3)
class TakesAFailureForUnknown(_AllAtOnce):
    def commit_all(self, checkpoint: Checkpoint, committables: Sequence[Committable]) -> Sequence[Any]:
        try:
            return super().commit_all(checkpoint, committables)
        except Exception as error:
            return [CommitOutcome.unknown(str(error))] * len(committables)

    def move(self, names: list[str]) -> None:
        for path in self.ready(names):
            path.rename(path.with_suffix(".done"))


@breaks(Clause.HELD, ONCE)
class HoldsBackForNothing(WholeShelf):
    def commit_whole(self, checkpoint: Checkpoint, committables: Sequence[Committable]) -> Sequence[CommitOutcome]:
        return [CommitOutcome.HELD] * len(committables)


# ---------------------------------------------------------------------- numbers
@breaks(Clause.MEMORY, REMEMBERED)
class RemembersByText(Shelf):
    def committed_checkpoints(self, job: str) -> Mapping[str, int] | None:
        newest: dict[str, str] = {}
        for path in self.paths(job, "done"):
            name = TransactionId.parse(path.stem)
            newest[name.lineage] = max(str(name.checkpoint), newest.get(name.lineage, ""))
        return {lineage: int(text) for lineage, text in newest.items()}


@breaks(Clause.MEMORY, REMEMBERED)
class RemembersTheLastCommit(Shelf):
    def commit(self, committable: Committable) -> CommitOutcome:
        outcome = super().commit(committable)
        if outcome == COMMITTED:
            os.utime(self.path(committable.transaction["name"], "done"))
        return outcome

    def committed_checkpoints(self, job: str) -> Mapping[str, int] | None:
        paths = sorted(self.paths(job, "done"), key=lambda path: path.stat().st_mtime_ns)
        return {name.lineage: name.checkpoint for name in (TransactionId.parse(path.stem) for path in paths)}


@breaks(Clause.PURGE, PURGED)
class PurgesByText(Shelf):
    def purge(self, checkpoint: Checkpoint) -> None:
        for path in self.paths(checkpoint.job, "gone"):
            name = TransactionId.parse(path.stem)
            if name.lineage == checkpoint.lineage and str(name.checkpoint) <= str(checkpoint.oldest_retained):
                path.unlink()


@breaks(Clause.IN_DOUBT, "many_commit_at_once")
class ListsTheFirstPage(Shelf):
    def in_doubt(self, job: str) -> Iterable[Identity]:
        return list(super().in_doubt(job))[:100]


@breaks(Clause.WRITE, "many_rows_in_several_batches_arrive")
class TakesTenThousandRows(Shelf):
    def put(self, transaction: Handle, rows: Rows) -> None:
        if transaction.file.tell():
            return
        super().put(transaction, rows[:10_000])


@breaks(Clause.AUDIT, "the_audit_counts_what_is_visible")
class CountsTheFirstParticipant(Shelf):
    def audit(self, job: str, parts: Sequence[Part], *, quick: bool = False) -> Audit:
        return Audit([Holding(rows=part.committables[0].fingerprint.rows) for part in parts])


@breaks(Clause.AUDIT, "the_audit_counts_what_is_visible")
class AuditsTheFirstCheckpoint(Shelf):
    def audit(self, job: str, parts: Sequence[Part], *, quick: bool = False) -> Audit:
        return super().audit(job, parts[:1], quick=quick)


@breaks(Clause.AUDIT, "the_audit_counts_what_is_visible")
class TellsWhatTheRecordHas(Shelf):
    def audit(self, job: str, parts: Sequence[Part], *, quick: bool = False) -> Audit:
        return Audit([Holding(rows=sum(each.fingerprint.rows for each in part.committables)) for part in parts])


@breaks(Clause.IDEMPOTENT, "many_commit_at_once")
class LooksForItAmongTheLastHundred(Shelf):
    """As a queue that knows messages again for some minutes."""

    def of_gone(self, name: str) -> CommitOutcome:
        newest = sorted(self.folder.glob("*.done"), key=lambda path: path.stat().st_ctime_ns)[-100:]
        return super().of_gone(name if self.path(name, "done") in newest else "")


@breaks(Clause.LEAKS, "nothing_grows_with_each_transaction")
class KeepsFilesOpen(Shelf):
    def pre_commit(self, transaction: Handle) -> Identity | Committable:
        os.dup(transaction.file.descriptor)
        return super().pre_commit(transaction)


# ---------------------------------------------------------------------- names
ALIKE = "names_that_look_alike_are_not_the_same"


class _Joined(Shelf):
    def joined(self, job: str, sink: str) -> str:
        raise NotImplementedError

    def name_of(self, context: TransactionContext) -> str:
        return f"{token(self.joined(context.job, context.sink))}-{context.transaction_id}"

    def paths(self, job: str, state: str) -> list[Path]:
        return list(self.folder.glob(f"{token(self.joined(job, self.name))}-tpc.*.{state}"))

    def committed_checkpoints(self, job: str) -> Mapping[str, int] | None:
        return None


@breaks(Clause.IN_DOUBT_JOB, ALIKE, ours="a:b+c", theirs="a+b:c")
class JoinsJobAndSink(_Joined):
    def joined(self, job: str, sink: str) -> str:
        return f"{job}:{sink}"


@breaks(Clause.IN_DOUBT_JOB, ALIKE, ours="job+sink", theirs="job+Sink")
class IgnoresTheCaseOfSinks(_Joined):
    def joined(self, job: str, sink: str) -> str:
        return f"{job!r} {sink.lower()!r}"


@breaks(Clause.IN_DOUBT_JOB, ALIKE, ours="job+sink", theirs="job+sink2")
class TakesSinksByTheirBeginning(_Joined):
    def joined(self, job: str, sink: str) -> str:
        return f"{job!r} {sink[:4]!r}"


@breaks(Clause.IN_DOUBT_JOB, ALIKE, ours="job+sink", theirs="job +sink")
@breaks(Clause.IN_DOUBT_JOB, ALIKE, ours="job+sink", theirs="job+sink ")
class ComparesWithoutTrailingSpaces(_Joined):
    def joined(self, job: str, sink: str) -> str:
        return f"{job.rstrip()!r} {sink.rstrip()!r}"


@breaks(Clause.IN_DOUBT_JOB, ALIKE, ours="job+sink", theirs="jöb+sink")
class ComparesWithoutAccents(_Joined):
    def joined(self, job: str, sink: str) -> str:
        return repr([unicodedata.normalize("NFD", text).encode("ascii", "ignore") for text in (job, sink)])


@breaks(Clause.MEMORY, ALIKE, ours="job+sink", theirs="JOB+sink")
class RemembersJobsOfAnyCase(Shelf):
    def committed_checkpoints(self, job: str) -> Mapping[str, int] | None:
        other = super().committed_checkpoints(job[:8] + job[8:].swapcase()) or {}
        return {**other, **(super().committed_checkpoints(job) or {})} if job.endswith("job") else other


@breaks(Clause.NAMES, "the_longest_names", characters="j")
class CutsNames(Shelf):
    def name_of(self, context: TransactionContext) -> str:
        return context.transaction_id[:110]

    def paths(self, job: str, state: str) -> list[Path]:
        return list(self.folder.glob(f"{TransactionId.prefix(job)}*.{state}"))

    def committed_checkpoints(self, job: str) -> None:
        return None


# ---------------------------------------------------------------------- process and state
COPIED = "a_copy_of_the_sink_touches_no_transaction"


@breaks(Clause.CHECK, "a_copy_of_the_sink_touches_no_transaction", what="checked")
class StartsOverWhenItChecks(Shelf):
    def check(self, schema: pa.Schema) -> None:
        super().check(schema)
        for path in self.folder.glob("*.done"):
            path.unlink()


@breaks(Clause.OPEN_KEEPS, COPIED, what="opened")
class SweepsWhenItOpens(Shelf):
    def open(self) -> None:
        for path in self.folder.glob("*.ready"):
            path.rename(path.with_suffix(".gone"))


@breaks(Clause.OPEN_KEEPS, COPIED, what="opened")
class ClearsWhatIsOpenWhenItOpens(Shelf):
    def open(self) -> None:
        for path in self.folder.glob("*.open"):
            path.unlink()


@breaks(Clause.PICKLED, "the_sink_travels_whatever_its_transform_is")
class TravelsWithItsTransform(Shelf):
    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)


@breaks(Clause.PICKLED, "the_sink_travels_whatever_its_transform_is")
class SkipsTheConstructorOfTheBase(Shelf):
    def __init__(self, folder: Path, name: str = "shelf") -> None:
        self.folder, self.name = folder, name


@breaks(Clause.PICKLED, "the_sink_travels_whatever_its_transform_is")
class TravelsWithoutWhatTheBaseHas(Shelf):
    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "name": self.name}


@breaks(Clause.PICKLED, "another_process_sees_and_commits_what_a_dead_one_pre_committed")
class IsBoundToItsProcess(Shelf):
    def __init__(self, folder: Path, name: str = "shelf") -> None:
        super().__init__(folder, name)
        self.process = os.getpid()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        if os.getpid() != self.process:
            raise RuntimeError("another process")


@breaks(Clause.DURABLE, "another_process_sees_and_commits_what_a_dead_one_pre_committed")
class DependsOnTheWorkingDirectory(Shelf):
    def __init__(self, folder: Path, name: str = "shelf") -> None:
        super().__init__(Path(os.path.relpath(folder)), name)


@breaks(Clause.THREADS, "other_threads_call_the_same_sink")
class IsBoundToItsThread(Shelf):
    thread = 0

    def open(self) -> None:
        self.thread = threading.get_ident()

    def in_doubt(self, job: str) -> Iterable[Identity]:
        if self.thread != threading.get_ident():
            raise RuntimeError("opened in another thread")
        return super().in_doubt(job)


@breaks(Clause.BEGIN_FAILS, "begin_transaction_fails_and_leaves_nothing")
class FailsAfterItHasBegun(Shelf):
    def begin_transaction(self, context: TransactionContext) -> Handle:
        transaction = super().begin_transaction(context)
        self.check(context.schema)
        return transaction


@breaks(Clause.PURGE, PURGED)
class PurgesWhatIsOpen(Shelf):
    def purge(self, checkpoint: Checkpoint) -> None:
        for path in self.paths(checkpoint.job, "open"):
            path.unlink()


@breaks(Clause.PURGE, PURGED)
class PurgesWhatOthersHaveOpen(Shelf):
    def purge(self, checkpoint: Checkpoint) -> None:
        super().purge(checkpoint)
        for path in self.folder.glob("*.open"):
            if TransactionId.find(path.stem).checkpoint < checkpoint.oldest_retained:
                path.unlink()


# ---------------------------------------------------------------------- values
VALUES = "odd_values_arrive_as_they_are_or_are_refused"


@breaks(Clause.WRITE, VALUES, value=nan)
class StoresNaNAsNull(_Alters):
    def value(self, value: Any) -> Any:
        return None if isinstance(value, float) and isnan(value) else value


@breaks(Clause.WRITE, VALUES, value=-0.0)
class LosesTheSignOfZero(_Alters):
    def value(self, value: Any) -> Any:
        return 0.0 if value == 0 and copysign(1, value) < 0 else value


@breaks(Clause.WRITE, VALUES, value="\r\n")
class WritesUnixLines(_Alters):
    def value(self, value: Any) -> Any:
        return value.replace("\r\n", "\n") if isinstance(value, str) else value


@breaks(Clause.BAD_VALUE, VALUES, value="a\0b")
class FailsOnNul(_Alters):
    def value(self, value: Any) -> Any:
        if isinstance(value, str) and "\0" in value:
            raise ValueError("embedded null character")
        return value


@breaks(Clause.WRITE, "columns_of_another_type_arrive_or_are_refused")
class TurnsTextsIntoNumbers(_Alters):
    """As a database does with texts in a column of numbers."""

    def value(self, value: Any) -> Any:
        try:
            return float(value) if isinstance(value, str) else value
        except ValueError:
            return value


@breaks(Clause.WRITE, "columns_in_another_order")
class TakesColumnsByTheirPlace(AnyShelf):
    def write(self, transaction: Handle, batch: pa.RecordBatch) -> None:
        self.put(transaction, [dict(zip(SCHEMA.names, row.values(), strict=False)) for row in batch.to_pylist()])


@breaks(Clause.WRITE, "columns_in_another_order")
class TakesColumnsInTheOrderOfItsTable(AnyShelf):
    def check(self, schema: pa.Schema) -> None:
        super().check(schema)
        with suppress(FileExistsError), (self.folder / "columns").open("x") as file:
            file.write(" ".join(schema.names))

    def write(self, transaction: Handle, batch: pa.RecordBatch) -> None:
        columns = (self.folder / "columns").read_text().split()
        self.put(transaction, [dict(zip(columns, row.values(), strict=False)) for row in batch.to_pylist()])


# ---------------------------------------------------------------------- evolution
EVOLVED = "evolve_takes_new_columns"


@breaks(Clause.EVOLVE, EVOLVED)
class EvolvesOnce(EvolvingShelf):
    def evolve(self, schema: pa.Schema) -> None:
        (self.folder / "evolved").touch(exist_ok=False)
        super().evolve(schema)


@breaks(Clause.EVOLVE, EVOLVED)
class AddsWhatItsCheckMissed(EvolvingShelf):
    missing: Sequence[str] = ()

    def check(self, schema: pa.Schema) -> None:
        self.missing = [name for name in schema.names if name not in self.columns]

    def evolve(self, schema: pa.Schema) -> None:
        if {*self.missing} & {*self.columns}:
            raise ValueError(f"duplicate column in {self.missing}")
        super().evolve(schema)
        self.missing = ()


@breaks(Clause.EVOLVE, "evolve_fails_and_is_called_again")
class AltersItsStagingSecond(EvolvingShelf):
    def evolve(self, schema: pa.Schema) -> None:
        new = {*schema.names} - {*self.columns}
        super().evolve(schema)
        for name in new:
            (self.folder / f"staging-{name}").touch()

    def put(self, transaction: Handle, rows: Rows) -> None:
        for name in rows[0].keys() - SCHEMA.names:
            assert (self.folder / f"staging-{name}").exists(), f"no column {name}"
        super().put(transaction, rows)


@breaks(Clause.EVOLVE, EVOLVED)
class DropsOlderRows(EvolvingShelf):
    def evolve(self, schema: pa.Schema) -> None:
        super().evolve(schema)
        for path in self.folder.glob("*.done"):
            path.unlink()


@breaks(Clause.SCHEMA_DIFF, EVOLVED)
class TellsNoChange(EvolvingShelf):
    def schema_diff(self, schema: pa.Schema) -> SchemaDiff | None:
        return SchemaDiff()


@breaks(Clause.SCHEMA_DIFF, EVOLVED)
class AlwaysTellsAChange(EvolvingShelf):
    def schema_diff(self, schema: pa.Schema) -> SchemaDiff | None:
        return super().schema_diff(schema.append(pa.field("another", pa.int64())))


class _ForgetsAllButTheNewest(Shelf):
    states: tuple[str, ...]

    def purge(self, checkpoint: Checkpoint) -> None:
        """What is committed stays visible, under a name that nobody asks for."""
        for state in self.states:
            for path in sorted(self.paths(checkpoint.job, state), key=lambda path: path.stat().st_mtime_ns)[:-10]:
                path.rename(self.path(f"forgotten-{path.stem}", state))


@breaks(Clause.PURGE, "many_commit_at_once")
class RemembersTheNewestTenCommits(_ForgetsAllButTheNewest):
    states = ("done",)


@breaks(Clause.PURGE, "many_commit_at_once")
class RemembersTheNewestTenAborts(_ForgetsAllButTheNewest):
    states = ("gone",)


@breaks(Clause.ABORT_OR_COMMIT, "a_commit_beside_an_abort")
class LooksBeforeItAborts(Shelf):
    def abort(self, transaction: Identity) -> None:
        name = transaction["name"]
        if self.path(name, "done").exists():
            raise CommittedError(f"{name} is committed")
        self.path(name, "ready").unlink(missing_ok=True)
        self.path(name, "gone").touch()


@breaks(Clause.PRE_COMMIT, "a_copy_of_the_sink_touches_no_transaction", what="opened")
class IsSlowerThanItSays(Shelf):
    """What it pre-commits is listed when it is asked again."""

    asked = False

    def in_doubt(self, job: str) -> Iterable[Identity]:
        asked, self.asked = self.asked, True
        return super().in_doubt(job) if asked else []
