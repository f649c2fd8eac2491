"""Broken where a job starts again, in another process or with other settings; where attempts run side by side."""

from __future__ import annotations

import atexit
import pickle
import time
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa

from sinks import Checkpoint, CommitOutcome, Committable, Identity, TransactionContext
from sinks.dead_letters import DeadLetters
from sinks.testing import Clause
from sinks.transaction import TransactionId, token
from tests.testing.broken_at_scale import EVOLVED
from tests.testing.broken_drivers import GONE
from tests.testing.broken_tasks import TYPES
from tests.testing.catalogue import breaks
from tests.testing.shelf import AnyShelf, EvolvingShelf, Handle, Rows, Shelf, stored


# ---------------------------------------------------------------------- made anew
@breaks(Clause.MADE_ANEW, "a_sink_made_anew_ends_what_the_former_one_pre_committed")
class IsAnotherEachTimeItIsMade(Shelf):
    def __init__(self, folder: Path, name: str = "shelf") -> None:
        super().__init__(folder, name)
        self.prefix = uuid.uuid4().hex

    def name_of(self, context: TransactionContext) -> str:
        return f"{self.prefix}-{context.transaction_id}"

    def paths(self, job: str, state: str) -> list[Path]:
        paths = self.folder.glob(f"{self.prefix}-{TransactionId.prefix(job)}*.{state}")
        return [path for path in paths if TransactionId.find(path.stem).sink == token(self.name)]

    def committed_checkpoints(self, job: str) -> None:
        return None


@breaks(Clause.DURABLE, "another_process_sees_and_commits_what_a_dead_one_pre_committed")
class FindsTransactionsByTheirHash(Shelf):
    def path(self, name: str, state: str) -> Path:
        return self.folder / f"{hash(name)}-{name}.{state}"

    def paths(self, job: str, state: str) -> list[Path]:
        return list(self.folder.glob(f"*{TransactionId.prefix(job)}*.{state}"))

    def in_doubt(self, job: str) -> Iterable[Identity]:
        return [{"name": path.stem[path.stem.index("tpc.") :]} for path in self.paths(job, "ready")]


ELSEWHERE = "another_process_sees_and_commits_what_a_dead_one_pre_committed"


@breaks(Clause.DURABLE, ELSEWHERE)
class ClearsUpWhenItsProcessEnds(Shelf):
    """As a `tempfile.TemporaryDirectory`."""

    def pre_commit(self, transaction: Handle) -> Identity | Committable:
        atexit.register(self.path(transaction.name, "ready").unlink, missing_ok=True)
        return super().pre_commit(transaction)


class _Ages(Shelf):
    def paths_of_last_week(self, job: str, state: str) -> list[Path]:
        return [path for path in self.paths(job, state) if time.time() - path.stat().st_mtime > 7 * 86_400]


@breaks(Clause.IN_DOUBT, ELSEWHERE)
class ListsWhatIsYoung(_Ages):
    def in_doubt(self, job: str) -> Iterable[Identity]:
        old = [path.stem for path in self.paths_of_last_week(job, "ready")]
        return [identity for identity in super().in_doubt(job) if identity["name"] not in old]


@breaks(Clause.OPEN_KEEPS, ELSEWHERE)
class TakesLongTasksForDead(_Ages):
    def in_doubt(self, job: str) -> Iterable[Identity]:
        for path in self.paths_of_last_week(job, "open"):
            path.unlink()
        return super().in_doubt(job)


@breaks(Clause.LOST, ELSEWHERE)
class PurgesByAge(_Ages):
    def purge(self, checkpoint: Checkpoint) -> None:
        super().purge(checkpoint)
        for path in self.paths_of_last_week(checkpoint.job, "gone"):
            path.unlink()


@breaks(Clause.IDEMPOTENT, ELSEWHERE)
class CommitsIntoAFileOfToday(Shelf):
    def path(self, name: str, state: str) -> Path:
        return super().path(name + time.strftime("-%Y-%m-%d") * (state == "done"), state)

    def committed_checkpoints(self, job: str) -> None:
        return None


@breaks(Clause.SETTINGS, "settings_that_changed_before_the_commit")
class CommitsByTheSettingsOfToday(Shelf):
    def put(self, transaction: Handle, rows: Rows) -> None:
        pickle.dump(rows, transaction.file)

    def commit(self, committable: Committable) -> CommitOutcome:
        ready = self.path(committable.transaction["name"], "ready")
        if self.shouts and ready.exists():
            ready.write_bytes(pickle.dumps([self.meant(row) for row in stored(ready)]))
        return super().commit(committable)


@breaks(Clause.SETTINGS, "settings_that_changed_before_the_commit")
class TakesOtherSettingsForALoss(Shelf):
    def commit(self, committable: Committable) -> CommitOutcome:
        return CommitOutcome.lost("it is set otherwise") if self.shouts else super().commit(committable)


# ---------------------------------------------------------------------- attempts
ATTEMPTS = "two_attempts_of_one_subtask_are_open_at_once"


class _Draft(Shelf):
    """Writes into a file for the subtask of a driver until it is pre-committed."""

    def draft(self, context: TransactionContext) -> Path:
        generation = TransactionId.parse(context.transaction_id).generation
        return self.folder / f"draft-{generation}-{context.checkpoint_id}-{context.subtask}"

    def rollback(self, transaction: Handle) -> None:
        self.draft(transaction.context).unlink(missing_ok=True)
        super().rollback(transaction)


@breaks(Clause.NAMES, ATTEMPTS, loser="goes on")
@breaks(Clause.NAMES, ATTEMPTS, loser="is stopped")
class AttemptsShareADraft(_Draft):
    def put(self, transaction: Handle, rows: Rows) -> None:
        with self.draft(transaction.context).open("ab") as file:
            pickle.dump(rows, file)

    def pre_commit(self, transaction: Handle) -> Identity | Committable:
        self.draft(transaction.context).replace(self.path(transaction.name, "open"))
        return super().pre_commit(transaction)


@breaks(Clause.NAMES, ATTEMPTS, loser="is killed")
class ASlowAttemptRollsTheOtherBack(Shelf):
    def rollback(self, transaction: Handle) -> None:
        super().rollback(transaction)
        name = transaction.name.rpartition(".")[0]
        for path in self.folder.glob(f"{name}.*.done"):
            path.unlink()


@breaks(Clause.IN_DOUBT, ATTEMPTS, loser="goes on")
class TheLastAttemptWins(Shelf):
    def pre_commit(self, transaction: Handle) -> Identity | Committable:
        for path in self.folder.glob(f"{transaction.name.rpartition('.')[0]}.*.ready"):
            path.rename(path.with_suffix(".gone"))
        return super().pre_commit(transaction)


# ---------------------------------------------------------------------- abort
@breaks(Clause.ABORT_LEFTOVERS, GONE)
class KeepsTheRowsOfWhatIsAborted(Shelf):
    def abort(self, transaction: Identity) -> None:
        ready = self.path(transaction["name"], "ready")
        if ready.exists():
            self.path(transaction["name"], "rows").write_bytes(ready.read_bytes())
        super().abort(transaction)


@breaks(Clause.ABORT, GONE)
class ShowsAbortedRowsWithTheNext(Shelf):
    def remains(self, subtask: int) -> Path:
        return self.folder / f"remains-{subtask}"

    def put(self, transaction: Handle, rows: Rows) -> None:
        remains = self.remains(transaction.context.subtask)
        super().put(transaction, rows + (list(stored(remains)) if remains.exists() else []))

    def abort(self, transaction: Identity) -> None:
        ready = self.path(transaction["name"], "ready")
        if ready.exists():
            self.remains(TransactionId.parse(transaction["name"]).subtask).write_bytes(ready.read_bytes())
        super().abort(transaction)


# ---------------------------------------------------------------------- batches
@breaks(Clause.WRITE, "texts_that_are_a_dictionary_arrive_or_are_refused")
class TakesTheIndicesOfADictionary(AnyShelf):
    def write(self, transaction: Handle, batch: pa.RecordBatch) -> None:
        dictionaries = {
            name: column.indices.to_pylist()
            for name, column in zip(batch.schema.names, batch.columns, strict=True)
            if isinstance(column, pa.DictionaryArray)
        }
        rows = [row | {name: all[n] for name, all in dictionaries.items()} for n, row in enumerate(batch.to_pylist())]
        self.put(transaction, rows)


@breaks(Clause.WRITE, "part_of_a_larger_batch_arrives_alone")
class ReadsValidityFromItsStart(Shelf):
    def write(self, transaction: Handle, batch: pa.RecordBatch) -> None:
        rows, (bits, *_) = batch.to_pylist(), batch.column("name").buffers()
        valid = [bits is None or bits.to_pybytes()[n // 8] >> n % 8 & 1 for n in range(len(rows))]
        self.put(transaction, [row | {} if valid[n] else row | {"name": None} for n, row in enumerate(rows)])


@breaks(Clause.WRITE, TYPES)
class ReadsFlagsFromTheirStart(AnyShelf):
    def write(self, transaction: Handle, batch: pa.RecordBatch) -> None:
        rows = batch.to_pylist()
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            if column.type == pa.bool_():
                bits = column.buffers()[1].to_pybytes()
                for n, row in enumerate(rows):
                    row[name] = row[name] if row[name] is None else bool(bits[n // 8] >> n % 8 & 1)
        self.put(transaction, rows)


# ---------------------------------------------------------------------- letters, evolution
LETTERS = "letters_are_told_of_that_are_visible"


class _Finds(AnyShelf):
    states: tuple[str, ...] = ("done",)

    def read_dead_letters(self, job: str, sink: str, most: int) -> DeadLetters | None:
        letters = [row for state in self.states for path in self.folder.glob(f"*.{state}") for row in stored(path)]
        return DeadLetters(self.chosen([letter for letter in letters if self.matches(letter, job, sink)], most))

    def matches(self, letter: dict[str, Any], job: str, sink: str) -> bool:
        return bool(letter["job"] == job and letter["sink"] == sink)

    def chosen(self, letters: Rows, most: int) -> Rows:
        return sorted(letters, key=lambda letter: -letter["row_number"])[:most]


@breaks(Clause.LETTERS, LETTERS)
class TellsOfLettersInDoubt(_Finds):
    states = ("done", "ready")


@breaks(Clause.LETTERS, LETTERS)
class TellsOfTheLettersOfAllSinks(_Finds):
    def matches(self, letter: dict[str, Any], job: str, sink: str) -> bool:
        return bool(letter["job"] == job)


@breaks(Clause.LETTERS, LETTERS)
class TellsOfTheOldestLetters(_Finds):
    def chosen(self, letters: Rows, most: int) -> Rows:
        return sorted(letters, key=lambda letter: letter["row_number"])[:most]


@breaks(Clause.EVOLVE, EVOLVED)
class TakesNewRowsOnly(EvolvingShelf):
    def write(self, transaction: Handle, batch: pa.RecordBatch) -> None:
        if {*batch.schema.names} != {*self.columns}:
            raise ValueError("other columns")
        super().write(transaction, batch)
