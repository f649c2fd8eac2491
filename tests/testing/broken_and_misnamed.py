"""Broken in what many tests come by, so that the first one that fails has to name the clause."""

from __future__ import annotations

import pickle

import pyarrow as pa

from sinks import CommitOutcome, Committable, Identity, TransactionContext
from sinks.testing import Clause
from sinks.transaction import Fingerprint
from tests.testing.broken_drivers import ONCE
from tests.testing.broken_tasks import OPENED
from tests.testing.catalogue import breaks
from tests.testing.shelf import Handle, Rows, Shelf, stored

COMMITTED = CommitOutcome.COMMITTED
HASHED = "a_fingerprint_of_any_rows_is_recorded"


# ---------------------------------------------------------------------- fingerprints
@breaks(Clause.FINGERPRINT, HASHED)
class PacksASignedHash(Shelf):
    def record_fingerprint(self, transaction: Handle, fingerprint: Fingerprint) -> None:
        fingerprint.hash.to_bytes(8, "big", signed=True)


@breaks(Clause.FINGERPRINT, HASHED)
class PacksASignedHashWhenItPreCommits(Shelf):
    hashes: dict[str, int]

    def record_fingerprint(self, transaction: Handle, fingerprint: Fingerprint) -> None:
        transaction.__dict__["hash"] = fingerprint.hash

    def pre_commit(self, transaction: Handle) -> Identity | Committable:
        transaction.__dict__.get("hash", 0).to_bytes(8, "big", signed=True)
        return super().pre_commit(transaction)


@breaks(Clause.FINGERPRINT, HASHED)
class PacksASignedHashWhenItCommits(Shelf):
    def record_fingerprint(self, transaction: Handle, fingerprint: Fingerprint) -> None:
        transaction.__dict__["hash"] = fingerprint.hash

    def pre_commit(self, transaction: Handle) -> Identity | Committable:
        identity = super().pre_commit(transaction)
        return Committable(identity, {"hash": transaction.__dict__.get("hash", 0)})  # type: ignore[arg-type]

    def commit(self, committable: Committable) -> CommitOutcome:
        committable.proof.get("hash", 0).to_bytes(8, "big", signed=True)
        return super().commit(committable)


# ---------------------------------------------------------------------- limits
MANY_ROWS = "many_rows_in_several_batches_arrive"


@breaks(Clause.COMMIT, MANY_ROWS)
class UnpacksItsRows(Shelf):
    """As `redis.call("RPUSH", key, unpack(rows))` in Lua."""

    def commit(self, committable: Committable) -> CommitOutcome:
        ready = self.path(committable.transaction["name"], "ready")
        if ready.exists() and len([*stored(ready)]) > 7_999:
            raise RuntimeError("too many results to unpack")
        return super().commit(committable)


@breaks(Clause.PRE_COMMIT, MANY_ROWS)
class SealsTenThousandRows(Shelf):
    def pre_commit(self, transaction: Handle) -> Identity | Committable:
        if transaction.file.tell() > 1_000_000:
            raise RuntimeError("the request is too large")
        return super().pre_commit(transaction)


@breaks(Clause.COMMIT, "odd_values_arrive_as_they_are_or_are_refused", value="a\0b")
class FailsOnNulWhenItCommits(Shelf):
    """After its tasks have taken it, so that the job stops with its checkpoint decided."""

    def commit(self, committable: Committable) -> CommitOutcome:
        ready = self.path(committable.transaction["name"], "ready")
        if ready.exists() and any("\0" in (row["name"] or "") for row in stored(ready)):
            raise ValueError("embedded null character")
        return super().commit(committable)


# ---------------------------------------------------------------------- what was visible before
class _OneFile(Shelf):
    """Readers see one file."""

    def written(self, before: Rows, rows: Rows) -> Rows:
        raise NotImplementedError

    def order(self, path: object) -> int:
        return 0

    def commit(self, committable: Committable) -> CommitOutcome:
        outcome = super().commit(committable)
        name = committable.transaction["name"]
        done, table = self.path(name, "done"), self.path("table", "done")
        if outcome == COMMITTED and not self.path(name, "moved").exists():
            before = list(stored(table)) if table.exists() else []
            table.write_bytes(pickle.dumps(self.written(before, list(stored(done)))))
            done.write_bytes(pickle.dumps([]))
            self.path(name, "moved").touch()
        return outcome


@breaks(Clause.COMMIT_KEEPS, ONCE)
class ForgetsEarlierRows(_OneFile):
    """As a manifest that names the files of this commit."""

    def written(self, before: Rows, rows: Rows) -> Rows:
        return rows


@breaks(Clause.COMMIT_KEEPS, ONCE)
class OverwritesRowsByTheirPlace(_OneFile):
    """As parts that are numbered from 0 in each checkpoint."""

    def written(self, before: Rows, rows: Rows) -> Rows:
        return [*rows, *before[len(rows) :]]


@breaks(Clause.COMMIT_KEEPS, ONCE)
class ShowsTheNewestCheckpoint(Shelf):
    def commit(self, committable: Committable) -> CommitOutcome:
        outcome = super().commit(committable)
        name = committable.transaction["name"]
        for path in self.folder.glob("tpc.*.done"):
            if self.order(path) < self.order(self.path(name, "done")):
                path.write_bytes(pickle.dumps([]))
        return outcome


# ---------------------------------------------------------------------- close
class _Staging(Shelf):
    """Has a folder beside, which `open` makes."""

    def open(self) -> None:
        (self.folder / "staging").mkdir(exist_ok=True)

    def begin_transaction(self, context: TransactionContext) -> Handle:
        (self.folder / "staging" / "x").touch()
        (self.folder / "staging" / "x").unlink()
        return super().begin_transaction(context)

    def end(self) -> None:
        if (self.folder / "staging").exists():
            (self.folder / "staging").rmdir()


@breaks(Clause.CLOSE_BESIDE, OPENED)
class RemovesItsFolderWhenItCloses(_Staging):
    def close(self) -> None:
        self.end()


@breaks(Clause.CLOSE_BESIDE, OPENED)
class StopsTheServiceWhenItCloses(Shelf):
    """As a session that all have in common."""

    def open(self) -> None:
        (self.folder / "service").touch()

    def write(self, transaction: Handle, batch: pa.RecordBatch) -> None:
        if not (self.folder / "service").exists():
            raise ConnectionError("the session is closed")
        super().write(transaction, batch)

    def close(self) -> None:
        (self.folder / "service").unlink(missing_ok=True)


@breaks(Clause.OPEN, OPENED)
class OpensOnce(_Staging):
    """It knows that it was open."""

    was_open = False

    def open(self) -> None:
        if not self.was_open:
            super().open()
        self.was_open = True

    def close(self) -> None:
        if self.was_open and not list(self.folder.glob("*.open")):
            self.closed = True

    def begin_transaction(self, context: TransactionContext) -> Handle:
        if getattr(self, "closed", False):
            raise RuntimeError("it is closed")
        return super().begin_transaction(context)
