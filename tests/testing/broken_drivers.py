"""Broken in what a driver does: commit, abort, in_doubt, memory, and the protocol as a whole."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from sinks import Checkpoint, CommitOutcome, Committable, Identity, TransactionContext
from sinks.audit import Audit, Holding, Part
from sinks.errors import CommittedError
from sinks.testing import Clause
from sinks.testing.kit import LINEAGE
from sinks.transaction import TransactionId, token
from tests.testing.catalogue import breaks
from tests.testing.shelf import Handle, Shelf, WholeShelf

COMMITTED = CommitOutcome.COMMITTED
OPERATORS = "what_operators_are_told_is_told_as_documented"
ONCE, AGAIN = "commit_makes_all_rows_visible_once", "commit_is_idempotent"
NEVER, ABORTED = "commit_of_what_was_never_seen_is_no_success_and_no_proof", "commit_after_abort_is_lost_and_stays_lost"
SILENT, BESIDE = "a_system_that_does_not_answer_is_no_outcome", "commits_side_by_side"
DIES, EACH = "a_driver_killed_at_any_line_of_commit", "commit_all_tells_the_outcome_of_each_in_order"
PICKLED = "commit_needs_only_the_pickled_sink_and_the_committable_as_json"
ONLY = "commit_and_abort_end_only_what_they_name"


# ---------------------------------------------------------------------- audit
@breaks(Clause.AUDIT, "the_audit_counts_what_is_visible")
class CountsOneTooFew(Shelf):
    def audit(self, job: str, parts: Sequence[Part], *, quick: bool = False) -> Audit:
        return Audit([Holding(rows=sum(c.fingerprint.rows for c in part.committables) - 1) for part in parts])


# ---------------------------------------------------------------------- commit
@breaks(Clause.COMMIT, ONCE)
class SaysCommittedAndDoesNothing(Shelf):
    def commit(self, committable: Committable) -> CommitOutcome:
        return COMMITTED


@breaks(Clause.HELD, ONCE)
class CommitsLater(Shelf):
    def commit(self, committable: Committable) -> CommitOutcome:
        return CommitOutcome.HELD


@breaks(Clause.COMMIT_OUTCOME, ONCE)
class AnswersTrue(Shelf):
    def commit(self, committable: Committable) -> Any:
        return bool(super().commit(committable))


@breaks(Clause.COMMIT_OUTCOME, ONCE)
class AnswersNothing(Shelf):
    def commit(self, committable: Committable) -> Any:
        super().commit(committable)


@breaks(Clause.COMMIT_OUTCOME, ABORTED)
class GivesNoReason(Shelf):
    def of_gone(self, name: str) -> CommitOutcome:
        return CommitOutcome(super().of_gone(name).state)


@breaks(Clause.COMMIT_BY_NAME, PICKLED)
class KnowsItsOwnTransactionsOnly(Shelf):
    def __init__(self, folder: Path, name: str = "shelf") -> None:
        super().__init__(folder, name)
        self.own: dict[str, Path] = {}

    def pre_commit(self, transaction: Handle) -> Identity | Committable:
        self.own[transaction.name] = self.path(transaction.name, "ready")
        return super().pre_commit(transaction)

    def commit(self, committable: Committable) -> CommitOutcome:
        self.own[committable.transaction["name"]]
        return super().commit(committable)


@breaks(Clause.COMMIT_BY_NAME, ONLY)
class CommitsByPrefix(Shelf):
    def commit(self, committable: Committable) -> CommitOutcome:
        outcome = super().commit(committable)
        for path in self.folder.glob(f"{committable.transaction['name']}*.ready"):
            path.rename(path.with_suffix(".done"))
        return outcome


@breaks(Clause.COMMIT_BY_NAME, ONLY)
class CommitsAllOfTheJob(Shelf):
    def commit(self, committable: Committable) -> CommitOutcome:
        outcome = super().commit(committable)
        for path in self.paths("conformance", "ready"):
            path.rename(path.with_suffix(".done"))
        return outcome


@breaks(Clause.IDEMPOTENT, AGAIN)
class IsLostTheSecondTime(Shelf):
    def of_gone(self, name: str) -> CommitOutcome:
        return CommitOutcome.lost("it is not there")


@breaks(Clause.IDEMPOTENT, AGAIN)
class IsUnknownTheSecondTime(Shelf):
    def of_gone(self, name: str) -> CommitOutcome:
        return CommitOutcome.unknown("it is not there")


@breaks(Clause.IDEMPOTENT, AGAIN)
class FailsTheSecondTime(Shelf):
    def of_gone(self, name: str) -> CommitOutcome:
        raise FileNotFoundError(name)


class _Copies(Shelf):
    """Commits by writing the rows to one file for all, which starts with the newest."""

    def commit(self, committable: Committable) -> CommitOutcome:
        name = committable.transaction["name"]
        ready, done = self.path(name, "ready"), self.path(name, "done")
        if not ready.exists():
            return self.of_gone(name)
        self.copy(ready, done)
        return COMMITTED

    def copy(self, ready: Path, done: Path) -> None:
        ready.rename(done)


@breaks(Clause.IDEMPOTENT, AGAIN)
class CommitsOnceMoreEachTime(_Copies):
    def copy(self, ready: Path, done: Path) -> None:
        with done.open("ab") as file:
            file.write(ready.read_bytes())

    def in_doubt(self, job: str) -> Iterable[Identity]:
        return [identity for identity in super().in_doubt(job) if not self.path(identity["name"], "done").exists()]


@breaks(Clause.LOST, ABORTED)
class ForgetsWhatItAborted(Shelf):
    def abort(self, transaction: Identity) -> None:
        super().abort(transaction)
        self.path(transaction["name"], "gone").unlink(missing_ok=True)


@breaks(Clause.LOST, ABORTED)
class ForgetsALossThatWasTold(Shelf):
    def of_gone(self, name: str) -> CommitOutcome:
        outcome = super().of_gone(name)
        self.path(name, "gone").unlink(missing_ok=True)
        return outcome


@breaks(Clause.LOST, ABORTED)
class TakesWhatIsAbortedForCommitted(Shelf):
    def of_gone(self, name: str) -> CommitOutcome:
        return COMMITTED


@breaks(Clause.LOST_PROOF, NEVER)
class TakesNotFoundForLost(Shelf):
    def of_gone(self, name: str) -> CommitOutcome:
        outcome = super().of_gone(name)
        return outcome if outcome == COMMITTED else CommitOutcome.lost("it is not there")


@breaks(Clause.NOT_FOUND, NEVER)
class TakesNotFoundForCommitted(Shelf):
    def of_gone(self, name: str) -> CommitOutcome:
        gone = self.path(name, "gone").exists()
        return CommitOutcome.lost("it was aborted") if gone else COMMITTED


@breaks(Clause.NOT_FOUND, NEVER)
class FailsForEverOnNotFound(Shelf):
    def of_gone(self, name: str) -> CommitOutcome:
        if not self.path(name, "gone").exists() and not self.path(name, "done").exists():
            raise KeyError(name)
        return super().of_gone(name)


@breaks(Clause.COMMIT_OUTCOME, NEVER)
class DoesNotSayWhyItCannotTell(Shelf):
    def of_gone(self, name: str) -> CommitOutcome:
        outcome = super().of_gone(name)
        return CommitOutcome.unknown("") if "nothing" in outcome.reason else outcome


@breaks(Clause.ABORT_UNSEEN, "abort_of_what_was_never_seen_is_no_error_and_no_commit")
class TakesWhatWasNeverThereForCommitted(Shelf):
    def of_gone(self, name: str) -> CommitOutcome:
        gone = self.path(name, "gone").exists()
        return CommitOutcome.lost("it was aborted") if gone else COMMITTED


# ---------------------------------------------------------------------- a system that fails, drivers that die
@breaks(Clause.ASK_AGAIN, SILENT)
class TakesAnErrorForLost(Shelf):
    def commit(self, committable: Committable) -> CommitOutcome:
        try:
            return self._commit(committable)
        except Exception as error:
            return CommitOutcome.lost(f"{error}")

    def _commit(self, committable: Committable) -> CommitOutcome:
        return super().commit(committable)


@breaks(Clause.ASK_AGAIN, SILENT)
class TakesAnErrorForUnknown(Shelf):
    def commit(self, committable: Committable) -> CommitOutcome:
        try:
            return self._commit(committable)
        except Exception as error:
            return CommitOutcome.unknown(f"{error}")

    def _commit(self, committable: Committable) -> CommitOutcome:
        return super().commit(committable)


@breaks(Clause.ASK_AGAIN, SILENT)
class SwallowsErrors(Shelf):
    def commit(self, committable: Committable) -> CommitOutcome:
        with contextlib.suppress(Exception):
            super().commit(committable)
        return COMMITTED


@breaks(Clause.ASK_AGAIN, SILENT)
class StaysLockedAfterAnError(Shelf):
    def commit(self, committable: Committable) -> CommitOutcome:
        lock = self.path(committable.transaction["name"], "lock")
        lock.touch(exist_ok=False)
        outcome = super().commit(committable)
        lock.unlink()
        return outcome


@breaks(Clause.ASK_AGAIN, SILENT)
class ThrowsAwayWhatFailed(Shelf):
    def commit(self, committable: Committable) -> CommitOutcome:
        try:
            return self._commit(committable)
        except Exception:
            self.path(committable.transaction["name"], "ready").unlink(missing_ok=True)
            raise

    def _commit(self, committable: Committable) -> CommitOutcome:
        return super().commit(committable)


@breaks(Clause.ASK_AGAIN, "commit_all_goes_on_when_one_fails")
class GivesUpAfterAFailedCommitAll(Shelf):
    def commit(self, committable: Committable) -> CommitOutcome:
        failed = self.folder / "failed"
        return CommitOutcome.unknown("an earlier commit failed") if failed.exists() else super().commit(committable)

    def commit_all(self, checkpoint: Checkpoint, committables: Sequence[Committable]) -> Sequence[Any]:
        answers = super().commit_all(checkpoint, committables)
        if any(isinstance(answer, Exception) for answer in answers):
            (self.folder / "failed").touch()
        return answers


@breaks(Clause.COMMIT_DIES, DIES)
class CommitsInTwoSteps(_Copies):
    def copy(self, ready: Path, done: Path) -> None:
        rows = ready.read_bytes()
        ready.unlink()
        done.write_bytes(rows)


@breaks(Clause.COMMIT_DIES, DIES)
class TakesAPartForTheWhole(_Copies):
    def commit(self, committable: Committable) -> CommitOutcome:
        done = self.path(committable.transaction["name"], "done")
        return COMMITTED if done.exists() else super().commit(committable)

    def copy(self, ready: Path, done: Path) -> None:
        with done.open("wb", buffering=0) as file:
            rows = ready.read_bytes()
            file.write(rows)
        ready.unlink()


@breaks(Clause.COMMIT_DIES, DIES)
class MarksBeforeItCommits(Shelf):
    def commit(self, committable: Committable) -> CommitOutcome:
        mark = self.path(committable.transaction["name"], "mark")
        if mark.exists():
            return COMMITTED
        mark.touch()
        return super().commit(committable)


@breaks(Clause.THREADS, BESIDE, then="both go on")
class CommitsThroughOneDraft(_Copies):
    def copy(self, ready: Path, done: Path) -> None:
        draft = self.folder / "draft"
        ready.rename(draft)
        draft.rename(done)


@breaks(Clause.THREADS, BESIDE, then="both go on")
class KeepsTheNameInTheObject(Shelf):
    current = ""

    def commit(self, committable: Committable) -> CommitOutcome:
        self.current = committable.transaction["name"]
        if self.path(self.current, "gone").exists():
            return self.of_gone(self.current)
        with contextlib.suppress(FileNotFoundError):
            self.path(self.current, "ready").rename(self.path(self.current, "done"))
        return COMMITTED


@breaks(Clause.THREADS, "many_commit_at_once")
@breaks(Clause.THREADS, BESIDE, then="both go on")
class TakesOneRequestAtATime(Shelf):
    """As a service that mixes up what overlaps."""

    busy: ClassVar[list[str]] = []

    def commit(self, committable: Committable) -> CommitOutcome:
        if self.busy:
            return CommitOutcome.unknown(f"busy with {self.busy}")
        self.busy.append(committable.transaction["name"])
        try:
            time.sleep(0.001)
            return super().commit(committable)
        finally:
            self.busy.clear()


@breaks(Clause.THREADS, "two_drivers_commit_the_same")
class TwoDriversWriteTwice(_Copies):
    def copy(self, ready: Path, done: Path) -> None:
        rows = ready.read_bytes()
        with done.open("ab") as file:
            file.write(rows)
        ready.unlink(missing_ok=True)


@breaks(Clause.THREADS, "many_commit_at_once")
class TakesTenAtMost(Shelf):
    def commit_all(self, checkpoint: Checkpoint, committables: Sequence[Committable]) -> Sequence[Any]:
        answers = list(super().commit_all(checkpoint, committables[:10]))
        return answers + [CommitOutcome.unknown("too many")] * (len(committables) - len(answers))


# ---------------------------------------------------------------------- a checkpoint
@breaks(Clause.COMMIT_ALL, EACH, lost=0)
class LeavesOutWhatIsLost(Shelf):
    def commit_all(self, checkpoint: Checkpoint, committables: Sequence[Committable]) -> Sequence[Any]:
        answers = super().commit_all(checkpoint, committables)
        return [answer for answer in answers if answer == COMMITTED] or answers


@breaks(Clause.COMMIT_ALL, EACH, lost=0)
class TellsThemInAnotherOrder(Shelf):
    def commit_all(self, checkpoint: Checkpoint, committables: Sequence[Committable]) -> Sequence[Any]:
        return sorted(super().commit_all(checkpoint, committables), key=lambda answer: answer != COMMITTED)


@breaks(Clause.COMMIT_ALL, EACH, lost=1)
class StopsAtTheFirstLoss(Shelf):
    def commit_all(self, checkpoint: Checkpoint, committables: Sequence[Committable]) -> Sequence[Any]:
        answers: list[CommitOutcome] = []
        for committable in committables:
            going_on = all(answer == COMMITTED for answer in answers)
            answers.append(self.commit(committable) if going_on else CommitOutcome.HELD)
        return answers


@breaks(Clause.COMMIT_ALL, "several_participants_commit_together")
class CommitsTheFirstAndSaysAll(Shelf):
    def commit_all(self, checkpoint: Checkpoint, committables: Sequence[Committable]) -> Sequence[Any]:
        return [self.commit(committables[0])] * len(committables)


@breaks(Clause.COMMIT_ALL_GOES_ON, "commit_all_goes_on_when_one_fails")
class StopsAtTheFirstError(Shelf):
    def commit_all(self, checkpoint: Checkpoint, committables: Sequence[Committable]) -> Sequence[Any]:
        try:
            return [self.commit(committable) for committable in committables]
        except Exception as error:
            return [error] * len(committables)


@breaks(Clause.HELD, "commit_all_goes_on_when_one_fails")
class TellsNoError(Shelf):
    def commit_all(self, checkpoint: Checkpoint, committables: Sequence[Committable]) -> Sequence[Any]:
        answers = super().commit_all(checkpoint, committables)
        return [CommitOutcome.HELD if isinstance(answer, Exception) else answer for answer in answers]


@breaks(Clause.AT_ONCE, "what_is_committed_becomes_visible_as_a_whole")
class ShowsOneByOne(WholeShelf):
    def settle(self, committables: Sequence[Committable]) -> list[CommitOutcome]:
        return [super(ShowsOneByOne, self).settle([committable])[0] for committable in committables]


@breaks(Clause.AT_ONCE, EACH, lost=0)
class ShowsWhatIsHeld(WholeShelf):
    def settle(self, committables: Sequence[Committable]) -> list[CommitOutcome]:
        answers = super().settle(committables)
        names = [c.transaction["name"] for c in committables]
        self.show(name for name, answer in zip(names, answers, strict=True) if answer == CommitOutcome.HELD)
        return answers


# ---------------------------------------------------------------------- abort
GONE, TOLD = "abort_leaves_nothing_and_may_be_repeated", "abort_after_commit_raises_and_changes_nothing"


@breaks(Clause.IN_DOUBT_RESOLVED, GONE)
class AbortsNothing(Shelf):
    def abort(self, transaction: Identity) -> None:
        if self.path(transaction["name"], "done").exists():
            raise CommittedError(transaction["name"])


@breaks(Clause.ABORT, GONE)
class ShowsWhatIsAborted(Shelf):
    def abort(self, transaction: Identity) -> None:
        self.commit(Committable(transaction))


@breaks(Clause.ABORT, ONLY)
class AbortsByPrefix(Shelf):
    def abort(self, transaction: Identity) -> None:
        super().abort(transaction)
        for path in self.folder.glob(f"{transaction['name']}*.ready"):
            path.rename(path.with_suffix(".gone"))


@breaks(Clause.ABORT, "commit_and_abort_end_only_what_they_name")
class AbortsTheSubtask(Shelf):
    def abort(self, transaction: Identity) -> None:
        super().abort(transaction)
        for path in self.folder.glob(f"{transaction['name'].rpartition('.')[0]}.*.ready"):
            path.rename(path.with_suffix(".gone"))


@breaks(Clause.ABORT, "in_doubt_lists_no_other_sinks_transactions")
class AbortsForOtherSinks(Shelf):
    def abort(self, transaction: Identity) -> None:
        super().abort(transaction)
        for path in self.folder.glob("*.ready"):
            path.rename(path.with_suffix(".gone"))


@breaks(Clause.ABORT_AGAIN, GONE)
class AbortsOnce(Shelf):
    def abort(self, transaction: Identity) -> None:
        if self.path(transaction["name"], "gone").exists():
            raise FileNotFoundError(transaction["name"])
        super().abort(transaction)


@breaks(Clause.ABORT_UNSEEN, "abort_of_what_was_never_seen_is_no_error_and_no_commit")
class CannotAbortWhatWasNeverThere(Shelf):
    def abort(self, transaction: Identity) -> None:
        name = transaction["name"]
        if not any(self.path(name, state).exists() for state in ("ready", "done", "gone")):
            raise FileNotFoundError(name)
        super().abort(transaction)


@breaks(Clause.ABORT_COMMITTED, TOLD)
class DoesNotTellThatItIsCommitted(Shelf):
    def abort(self, transaction: Identity) -> None:
        with contextlib.suppress(CommittedError):
            super().abort(transaction)


@breaks(Clause.ABORT_COMMITTED, TOLD)
class TellsAnotherError(Shelf):
    def abort(self, transaction: Identity) -> None:
        try:
            super().abort(transaction)
        except CommittedError as error:
            raise ValueError(error) from None


@breaks(Clause.ABORT_COMMITTED, TOLD)
class AbortsWhatIsCommitted(Shelf):
    def abort(self, transaction: Identity) -> None:
        try:
            super().abort(transaction)
        except CommittedError:
            self.path(transaction["name"], "done").unlink()
            raise


@breaks(Clause.ABORT_OR_COMMIT, "an_abort_beside_a_commit")
class CommitsWhatIsAbortedMeanwhile(_Copies):
    def copy(self, ready: Path, done: Path) -> None:
        rows = ready.read_bytes()
        done.write_bytes(rows)
        ready.unlink(missing_ok=True)


@breaks(Clause.ABORT_DIES, "a_driver_killed_at_any_line_of_abort")
class AbortsInTwoSteps(Shelf):
    def abort(self, transaction: Identity) -> None:
        name = transaction["name"]
        if self.path(name, "done").exists():
            raise CommittedError(name)
        if self.path(name, "ready").exists():
            self.path(name, "ready").unlink()
            self.path(name, "gone").touch()


# ---------------------------------------------------------------------- in doubt
PARTS = "transactions_are_told_apart_by_each_part_of_their_names"
ALIKE, IDLE = "names_that_look_alike_are_not_the_same", "in_doubt_changes_nothing"


@breaks(Clause.IN_DOUBT, PARTS)
class ListsTheNewestLineage(Shelf):
    def in_doubt(self, job: str) -> Iterable[Identity]:
        names = [TransactionId.parse(path.stem) for path in self.paths(job, "ready")]
        newest = max((name.lineage for name in names), default="")
        return [identity for identity in super().in_doubt(job) if f".{newest}." in identity["name"]]


@breaks(Clause.IN_DOUBT, PARTS)
class ListsTheNewestGeneration(Shelf):
    def in_doubt(self, job: str) -> Iterable[Identity]:
        listed = list(super().in_doubt(job))
        newest = max((TransactionId.parse(identity["name"]).generation for identity in listed), default=0)
        return [identity for identity in listed if TransactionId.parse(identity["name"]).generation == newest]


@breaks(Clause.IN_DOUBT, PARTS)
class ListsAFew(Shelf):
    def in_doubt(self, job: str) -> Iterable[Identity]:
        return list(super().in_doubt(job))[:5]


@breaks(Clause.IN_DOUBT, PARTS)
class ListsOneOfEachSubtask(Shelf):
    def in_doubt(self, job: str) -> Iterable[Identity]:
        return {TransactionId.parse(identity["name"]).subtask: identity for identity in super().in_doubt(job)}.values()


@breaks(Clause.IN_DOUBT_JOB, ALIKE, ours="job+sink", theirs="job-2+sink")
class ListsAllJobs(Shelf):
    def paths(self, job: str, state: str) -> list[Path]:
        return list(self.folder.glob(f"tpc.*.{state}"))


class _RawNames(Shelf):
    """Names begin with the job, as it is."""

    def name_of(self, context: TransactionContext) -> str:
        raw = context.job.replace("/", "-").replace(" ", "-")
        return f"{raw}-{context.transaction_id}"

    def matches(self, path: Path, job: str) -> bool:
        raise NotImplementedError

    def committed_checkpoints(self, job: str) -> Mapping[str, int] | None:
        return None

    def paths(self, job: str, state: str) -> list[Path]:
        job = job.replace("/", "-").replace(" ", "-")
        paths = [path for path in self.folder.glob(f"*.{state}") if self.matches(path, job)]
        return [path for path in paths if TransactionId.find(path.stem).sink == token(self.name)]


@breaks(Clause.IN_DOUBT_JOB, ALIKE, ours="job+sink", theirs="jo+sink")
class MatchesJobsByPrefix(_RawNames):
    def matches(self, path: Path, job: str) -> bool:
        return path.name.startswith(job)


@breaks(Clause.IN_DOUBT_JOB, ALIKE, ours="job+sink", theirs="JOB+sink")
class IgnoresCase(_RawNames):
    def matches(self, path: Path, job: str) -> bool:
        return path.name.lower().startswith(f"{job.lower()}-tpc.")


@breaks(Clause.IN_DOUBT_JOB, ALIKE, ours="_+sink", theirs="j+sink")
class MatchesJobsByPattern(_RawNames):
    def matches(self, path: Path, job: str) -> bool:
        return path.match(f"{job.replace('_', '*').replace('%', '*')}-tpc.*")


@breaks(Clause.IN_DOUBT, ALIKE, ours="job+sink", theirs="jöb+sink")
class TakesAsciiJobsOnly(_RawNames):
    def matches(self, path: Path, job: str) -> bool:
        return path.name.startswith(f"{job.encode('ascii', 'ignore').decode()}-tpc.")


@breaks(Clause.IN_DOUBT_SINK, "in_doubt_lists_no_other_sinks_transactions")
class ListsAllSinks(Shelf):
    def paths(self, job: str, state: str) -> list[Path]:
        return list(self.folder.glob(f"{TransactionId.prefix(job)}*.{state}"))


@breaks(Clause.IN_DOUBT_OPEN, "written_rows_are_invisible_and_not_in_doubt")
class ListsWhatIsOpen(Shelf):
    def in_doubt(self, job: str) -> Iterable[Identity]:
        return [{"name": path.stem} for state in ("open", "ready") for path in self.paths(job, state)]


@breaks(Clause.IN_DOUBT_RESOLVED, GONE)
class ListsWhatIsAborted(Shelf):
    def in_doubt(self, job: str) -> Iterable[Identity]:
        return [{"name": path.stem} for state in ("gone", "ready") for path in self.paths(job, state)]


@breaks(Clause.IN_DOUBT_RESOLVED, ONCE)
class ListsWhatIsCommitted(Shelf):
    def in_doubt(self, job: str) -> Iterable[Identity]:
        return [{"name": path.stem} for state in ("done", "ready") for path in self.paths(job, state)]


@breaks(Clause.IN_DOUBT_READS, IDLE)
class SweepsWhenItLists(Shelf):
    def in_doubt(self, job: str) -> Iterable[Identity]:
        for path in self.paths(job, "ready")[1:]:
            path.rename(path.with_suffix(".gone"))
        return [{"name": path.stem} for path in self.paths(job, "ready")]


@breaks(Clause.IN_DOUBT_READS, IDLE)
class RemovesWhatIsOpenWhenItLists(Shelf):
    def in_doubt(self, job: str) -> Iterable[Identity]:
        for path in self.paths(job, "open"):
            path.unlink()
        return super().in_doubt(job)


# ---------------------------------------------------------------------- proofs
PURGED = "purge_removes_nothing_that_is_still_asked_for"


class _Purges(Shelf):
    def purge(self, checkpoint: Checkpoint) -> None:
        for path in self.folder.glob("*.gone"):
            if self.purgeable(TransactionId.parse(path.stem), checkpoint):
                path.unlink()

    def purgeable(self, name: TransactionId, checkpoint: Checkpoint) -> bool:
        own = TransactionId.parse(str(TransactionId(checkpoint.job, checkpoint.lineage, 0, self.name, 0, 0, 0, 0, 0)))
        same = (name.job, name.lineage, name.sink) == (own.job, own.lineage, own.sink)
        return same and name.checkpoint < checkpoint.oldest_retained


@breaks(Clause.PURGE, PURGED)
class PurgesWhatIsRetained(_Purges):
    def purgeable(self, name: TransactionId, checkpoint: Checkpoint) -> bool:
        return name.checkpoint < checkpoint.checkpoint_id and super().purgeable(replace(name, checkpoint=0), checkpoint)


@breaks(Clause.PURGE, PURGED)
class PurgesOtherJobs(_Purges):
    def purgeable(self, name: TransactionId, checkpoint: Checkpoint) -> bool:
        return super().purgeable(replace(name, job=token(checkpoint.job)), checkpoint)


@breaks(Clause.PURGE, PURGED)
class PurgesOtherLineages(_Purges):
    def purgeable(self, name: TransactionId, checkpoint: Checkpoint) -> bool:
        return super().purgeable(replace(name, lineage=checkpoint.lineage), checkpoint)


@breaks(Clause.PURGE, PURGED)
class PurgesOtherSinks(_Purges):
    def purgeable(self, name: TransactionId, checkpoint: Checkpoint) -> bool:
        return super().purgeable(replace(name, sink=token(self.name)), checkpoint)


@breaks(Clause.PURGE, PURGED)
class PurgesWhatIsInDoubt(Shelf):
    def purge(self, checkpoint: Checkpoint) -> None:
        for path in self.paths(checkpoint.job, "ready"):
            if TransactionId.parse(path.stem).checkpoint < checkpoint.oldest_retained:
                path.unlink()


@breaks(Clause.PURGE, PURGED)
class PurgesRows(Shelf):
    def purge(self, checkpoint: Checkpoint) -> None:
        for path in self.paths(checkpoint.job, "done"):
            if TransactionId.parse(path.stem).checkpoint < checkpoint.oldest_retained:
                path.unlink()


@breaks(Clause.PURGE, PURGED)
class PurgesOnce(_Purges):
    def purge(self, checkpoint: Checkpoint) -> None:
        (self.folder / "purged").touch(exist_ok=False)


@breaks(Clause.PURGE, "a_driver_killed_at_any_line_of_purge")
class PurgesIntoAFileOnTheWay(_Purges):
    def purge(self, checkpoint: Checkpoint) -> None:
        on_the_way = self.folder / "purging"
        if on_the_way.exists():
            raise FileExistsError("another driver purges")
        on_the_way.touch()
        super().purge(checkpoint)
        on_the_way.unlink()


@breaks(Clause.PURGE_LEFTOVERS, "a_task_killed_at_any_line_of_pre_commit")
class PurgesProofsAlone(_Purges):
    pass


@breaks(Clause.PURGE_BESIDE, "a_purge_beside_a_pre_commit", stopped="pre_commit")
class PurgesWhatIsBeingSealed(Shelf):
    """Takes it for what a dead task left."""

    def pre_commit(self, transaction: Handle) -> Identity | Committable:
        transaction.file.close()
        sealing = self.path(transaction.name, "open").rename(self.path(transaction.name, "sealing"))
        sealing.rename(self.path(transaction.name, "ready"))
        return {"name": transaction.name}

    def purge(self, checkpoint: Checkpoint) -> None:
        super().purge(checkpoint)
        for path in self.folder.glob("*.sealing"):
            path.unlink()


@breaks(Clause.PURGE_BESIDE, "a_purge_beside_a_pre_commit", stopped="purge")
class WritesItsListAnewWhenItPurges(Shelf):
    def pre_commit(self, transaction: Handle) -> Identity | Committable:
        identity = super().pre_commit(transaction)
        with (self.folder / "list").open("a") as file:
            file.write(f"{transaction.name}\n")
        return identity

    def listed(self) -> list[str]:
        file = self.folder / "list"
        return file.read_text().split() if file.exists() else []

    def in_doubt(self, job: str) -> Iterable[Identity]:
        listed = self.listed()
        return [identity for identity in super().in_doubt(job) if identity["name"] in listed]

    def purge(self, checkpoint: Checkpoint) -> None:
        super().purge(checkpoint)
        ready = [name for name in self.listed() if self.path(name, "ready").exists()]
        (self.folder / "list").write_text("".join(f"{name}\n" for name in ready))


@breaks(Clause.PURGE_BESIDE, "a_purge_beside_committed_checkpoints", stopped="purge")
class RemovesAllMarksAndSetsTheNewest(Shelf):
    def commit(self, committable: Committable) -> CommitOutcome:
        outcome = super().commit(committable)
        if outcome == COMMITTED:
            self.path(committable.transaction["name"], "mark").touch()
        return outcome

    def committed_checkpoints(self, job: str) -> Mapping[str, int] | None:
        marks = [TransactionId.parse(path.stem) for path in self.paths(job, "mark")]
        return {name.lineage: name.checkpoint for name in sorted(marks, key=lambda name: name.checkpoint)}

    def purge(self, checkpoint: Checkpoint) -> None:
        super().purge(checkpoint)
        marks = sorted(self.paths(checkpoint.job, "mark"), key=lambda path: TransactionId.parse(path.stem).checkpoint)
        for path in marks:
            path.unlink()
        marks[-1].touch()


@breaks(Clause.PURGE_BESIDE, "a_purge_beside_committed_checkpoints", stopped="committed_checkpoints")
class TakesAFileThatIsGoneForNoMemory(Shelf):
    def committed_checkpoints(self, job: str) -> Mapping[str, int] | None:
        newest = max(self.folder.glob("memory-*"), default=self.folder)
        if not newest.exists():
            return {}
        return super().committed_checkpoints(job)

    def purge(self, checkpoint: Checkpoint) -> None:
        super().purge(checkpoint)
        older = list(self.folder.glob("memory-*"))
        (self.folder / f"memory-{checkpoint.checkpoint_id:09}").touch()
        for path in older:
            path.unlink()


@breaks(Clause.ABORT_UNSEEN, "abort_of_what_was_never_seen_is_no_error_and_no_commit")
class LeavesAProofThatBarsNothing(Shelf):
    def abort(self, transaction: Identity) -> None:
        super().abort(transaction)
        self.path(transaction["name"], "gone").touch()

    def of_gone(self, name: str) -> CommitOutcome:
        outcome = super().of_gone(name)
        self.path(name, "gone").unlink(missing_ok=True)
        return outcome


# ---------------------------------------------------------------------- memory
REMEMBERED = "committed_checkpoints_are_those_that_are_visible"


@breaks(Clause.MEMORY, REMEMBERED)
class RemembersWhatIsPreCommitted(Shelf):
    def committed_checkpoints(self, job: str) -> Mapping[str, int] | None:
        ready = [TransactionId.parse(path.stem) for path in self.paths(job, "ready")]
        return {name.lineage: name.checkpoint for name in ready} | dict(super().committed_checkpoints(job) or {})


@breaks(Clause.MEMORY, REMEMBERED)
class RemembersWhatIsAborted(Shelf):
    def committed_checkpoints(self, job: str) -> Mapping[str, int] | None:
        gone = [TransactionId.parse(path.stem) for path in self.paths(job, "gone")]
        return {name.lineage: name.checkpoint for name in gone} | dict(super().committed_checkpoints(job) or {})


@breaks(Clause.MEMORY, REMEMBERED)
class RemembersOneLineage(Shelf):
    def committed_checkpoints(self, job: str) -> Mapping[str, int] | None:
        return dict(sorted((super().committed_checkpoints(job) or {}).items())[:1])


@breaks(Clause.MEMORY, REMEMBERED)
class RemembersTheFirstOne(Shelf):
    def committed_checkpoints(self, job: str) -> Mapping[str, int] | None:
        names = sorted(TransactionId.parse(path.stem).checkpoint for path in self.paths(job, "done"))
        return {LINEAGE: names[0]} if names else {}


@breaks(Clause.MEMORY, REMEMBERED)
class RemembersForAllJobs(Shelf):
    def committed_checkpoints(self, job: str) -> Mapping[str, int] | None:
        return super().committed_checkpoints("conformance")


@breaks(Clause.MEMORY, REMEMBERED)
class RemembersForAllSinks(Shelf):
    def committed_checkpoints(self, job: str) -> Mapping[str, int] | None:
        done = [TransactionId.parse(path.stem) for path in self.folder.glob(f"{TransactionId.prefix(job)}*.done")]
        return {name.lineage: name.checkpoint for name in done}


# ---------------------------------------------------------------------- the whole
@breaks(Clause.EXACTLY_ONCE, "an_undisturbed_run")
class LosesTheThirdPartition(Shelf):
    def commit_all(self, checkpoint: Checkpoint, committables: Sequence[Committable]) -> Sequence[Any]:
        for committable in committables[2:]:
            if checkpoint.job == "conformance" and checkpoint.checkpoint_id:
                self.abort(committable.transaction)
                return [*super().commit_all(checkpoint, committables[:2]), COMMITTED]
        return super().commit_all(checkpoint, committables)


@breaks(Clause.EXACTLY_ONCE, "killed_again_and_again")
class ForgetsAllWhenItIsOpened(Shelf):
    """As a system without durability would when its process ends."""

    def open(self) -> None:
        for path in self.folder.glob("*.done"):
            if TransactionId.find(path.name).checkpoint == 0 and list(self.folder.glob("*.ready")):
                path.unlink()
