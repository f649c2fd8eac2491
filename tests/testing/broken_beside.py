"""Broken beside others: threads that share a session, tasks that share an index, readers."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import signal
import threading
import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from sinks import Checkpoint, CommitOutcome, Committable, Identity, TransactionContext
from sinks.testing import Clause
from tests.testing.catalogue import breaks
from tests.testing.shelf import Handle, Shelf, WholeShelf, stored

COMMITTED = CommitOutcome.COMMITTED
SEEN, BESIDE = "what_is_committed_becomes_visible_as_a_whole", "commits_side_by_side"


# ---------------------------------------------------------------------- in the middle of a commit
class _Copies(Shelf):
    """Commits by a copy, as between two file systems."""

    def copy(self, ready: Path, done: Path) -> None:
        raise NotImplementedError

    def commit(self, committable: Committable) -> CommitOutcome:
        name = committable.transaction["name"]
        ready, done = self.path(name, "ready"), self.path(name, "done")
        if not ready.exists():
            return self.of_gone(name)
        if not done.exists():
            self.copy(ready, done)
        ready.unlink()
        return COMMITTED


@breaks(Clause.COMMIT_DIES, "a_driver_killed_at_any_line_of_commit")
class CopiesByTheLibrary(_Copies):
    def copy(self, ready: Path, done: Path) -> None:
        shutil.copyfile(ready, done)


@breaks(Clause.COMMIT_DIES, "a_driver_killed_at_any_line_of_commit")
class CopiesByBytes(_Copies):
    def copy(self, ready: Path, done: Path) -> None:
        done.write_bytes(ready.read_bytes())


@breaks(Clause.COMMIT, SEEN)
class ShowsRowByRow(_Copies):
    def copy(self, ready: Path, done: Path) -> None:
        with done.open("wb", buffering=0) as file:
            for row in stored(ready):
                pickle.dump([row], file)


@breaks(Clause.AT_ONCE, SEEN)
class WritesItsManifestInPlace(WholeShelf):
    def show(self, names: Iterable[str]) -> None:
        (self.folder / "manifest").write_text(json.dumps(sorted(self.shown() | set(names))))


@breaks(Clause.AT_ONCE, SEEN)
class ShowsOneThenTheRest(WholeShelf):
    """After a long loop in which nothing becomes visible."""

    def show(self, names: Iterable[str]) -> None:
        for name in names:
            os.utime(self.path(name, "ready"))
        super().show(list(names)[:1])
        super().show(names)


@breaks(Clause.AT_ONCE, SEEN)
class AppendsToItsManifest(WholeShelf):
    """Of a few names the file shows all at once, when it is closed."""

    def shown(self) -> set[str]:
        manifest = self.folder / "manifest"
        lines = manifest.read_text().split("\n")[:-1] if manifest.exists() else []
        return {json.loads(line)["name"] for line in lines}

    def show(self, names: Iterable[str]) -> None:
        with (self.folder / "manifest").open("a") as file:
            for name in names:
                file.write(json.dumps({"name": name, "file": str(self.path(name, "ready")), "job": "j" * 50}) + "\n")


# ---------------------------------------------------------------------- threads that share a session
class _Session:
    """Does what it was told when it commits, as a connection to a database."""

    def __init__(self) -> None:
        self.told: list[Callable[[], object]] = []

    def commit(self) -> None:
        told, self.told = self.told, []
        for each in told:
            each()

    def rollback(self) -> None:
        self.told = []


class _SharesASession(Shelf):
    def __init__(self, folder: Path, name: str = "shelf") -> None:
        super().__init__(folder, name)
        self.session = _Session()

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"session": _Session()}


@breaks(Clause.THREADS, BESIDE, then="the other fails")
class RollsBackForAllThreads(_SharesASession):
    def commit(self, committable: Committable) -> CommitOutcome:
        name = committable.transaction["name"]
        ready = self.path(name, "ready")
        if not ready.exists():
            return self.of_gone(name)
        try:
            self.session.told.append(lambda: ready.rename(self.path(name, "done")))
            self.session.commit()
        except Exception:
            self.session.rollback()
            raise
        return COMMITTED


@breaks(Clause.THREADS, BESIDE, then="the first fails")
class CommitsForAllThreads(_SharesASession):
    def commit(self, committable: Committable) -> CommitOutcome:
        name = committable.transaction["name"]
        ready, done = self.path(name, "ready"), self.path(name, "done")
        if not ready.exists():
            return self.of_gone(name)

        def add() -> None:
            with done.open("ab") as file:
                file.write(ready.read_bytes())

        self.session.told.append(add)
        self.session.told.append(ready.unlink)
        self.session.commit()
        return COMMITTED


_lock = threading.Lock()


@breaks(Clause.THREADS, "a_driver_of_another_process_commits_the_same")
class LocksInItsProcess(_Copies):
    def copy(self, ready: Path, done: Path) -> None:
        data = ready.read_bytes()
        with done.open("ab", buffering=0) as file:
            file.write(data)

    def commit(self, committable: Committable) -> CommitOutcome:
        with _lock:
            return super().commit(committable)


@breaks(Clause.THREADS, "other_threads_call_the_same_sink")
class TimesOutByASignal(Shelf):
    def commit(self, committable: Committable) -> CommitOutcome:
        signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGALRM))
        return super().commit(committable)


@breaks(Clause.LEAKS, "nothing_grows_with_each_transaction")
class ConnectsInEachThread(Shelf):
    def __init__(self, folder: Path, name: str = "shelf") -> None:
        super().__init__(folder, name)
        self.connections: dict[threading.Thread, int] = {}

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"connections": {}}

    def commit(self, committable: Committable) -> CommitOutcome:
        thread = threading.current_thread()
        if thread not in self.connections:
            self.connections[thread] = os.open(self.folder, os.O_RDONLY)
        return super().commit(committable)

    def close(self) -> None:
        for descriptor in self.connections.values():
            os.close(descriptor)
        self.connections.clear()


@breaks(Clause.LEAKS, "nothing_grows_with_each_transaction")
class ConnectsEachTimeItIsOpened(Shelf):
    connections: tuple[int, ...] = ()

    def open(self) -> None:
        self.connections += (os.open(self.folder, os.O_RDONLY),)

    def close(self) -> None:
        for descriptor in self.connections:
            os.close(descriptor)
        self.connections = ()

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"connections": ()}


@breaks(Clause.COMMIT_ALL, "commit_all_tells_the_outcome_of_each_in_order", lost=0)
class AnswersInTheOrderOfNames(Shelf):
    """As a query does that selects them by `IN`."""

    def commit_all(self, checkpoint: Checkpoint, committables: Sequence[Committable]) -> Sequence[Any]:
        return [self.commit(each) for each in sorted(committables, key=lambda each: str(each.transaction["name"]))]


@breaks(Clause.COMMIT_ALL, "commit_all_tells_the_outcome_of_each_in_order", lost=1)
class MarksTheCheckpointAsDone(Shelf):
    """And moves nothing of it any more, not even what is written again in place of a loss."""

    def commit_all(self, checkpoint: Checkpoint, committables: Sequence[Committable]) -> Sequence[Any]:
        mark = self.folder / f"{checkpoint.lineage}-{checkpoint.checkpoint_id}.mark"
        if mark.exists():
            gone = [self.path(each.transaction["name"], "gone").exists() for each in committables]
            return [CommitOutcome.lost("aborted") if lost else COMMITTED for lost in gone]
        answers = [self.commit(each) for each in committables]
        mark.touch()
        return answers


# ---------------------------------------------------------------------- tasks that share an index
INDEX = "a_pre_commit_beside_another_task_or_a_sweep"


class _Indexed(Shelf):
    """Lists what its index has, as over a store that lists nothing."""

    def listed(self) -> list[str]:
        index = self.folder / "index"
        return index.read_text().split() if index.exists() else []

    def write_index(self, names: Sequence[str]) -> None:
        draft = self.folder / uuid.uuid4().hex
        draft.write_text("".join(f"{name}\n" for name in names))
        draft.rename(self.folder / "index")

    def in_doubt(self, job: str) -> Iterable[Identity]:
        listed = self.listed()
        return [identity for identity in super().in_doubt(job) if identity["name"] in listed]


@breaks(Clause.IN_DOUBT, INDEX, stopped="pre_commit")
class TasksWriteTheIndexAnew(_Indexed):
    def pre_commit(self, transaction: Handle) -> Identity | Committable:
        identity, listed = super().pre_commit(transaction), self.listed()
        self.write_index([*listed, transaction.name])
        return identity


@breaks(Clause.IN_DOUBT, INDEX, stopped="abort")
class SweepsWriteTheIndexAnew(_Indexed):
    def pre_commit(self, transaction: Handle) -> Identity | Committable:
        with (self.folder / "index").open("a") as file:
            file.write(f"{transaction.name}\n")
        return super().pre_commit(transaction)

    def abort(self, transaction: Identity) -> None:
        super().abort(transaction)
        listed = self.listed()
        self.write_index([name for name in listed if name != transaction["name"]])


# ---------------------------------------------------------------------- names
ALIKE = "names_that_look_alike_are_not_the_same"


class _RawNames(Shelf):
    def name_of(self, context: TransactionContext) -> str:
        return f"{context.job}+{context.sink}+{context.transaction_id}"

    def committed_checkpoints(self, job: str) -> None:
        return None


@breaks(Clause.IN_DOUBT_JOB, ALIKE, ours="job+s?n*", theirs="job+sink")
class TakesANameForAGlob(_RawNames):
    def paths(self, job: str, state: str) -> list[Path]:
        return list(self.folder.glob(f"{job}+{self.name}+*.{state}"))


@breaks(Clause.IN_DOUBT_JOB, ALIKE, ours="j.b+s.nk", theirs="job+sink")
class TakesANameForAPattern(_RawNames):
    def paths(self, job: str, state: str) -> list[Path]:
        return [path for path in self.folder.glob(f"*.{state}") if re.match(rf"{job}\+{self.name}\+", path.name)]
