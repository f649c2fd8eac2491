"""Small correct sinks into files, for the broken ones to differ from in one place. A transaction is one file,
whose suffix tells its state: `open`, `ready` (pre-committed), `done` (visible) or `gone` (aborted)."""

from __future__ import annotations

import fcntl
import json
import os
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa

from sinks import Checkpoint, CommitOutcome, Committable, Identity, TransactionContext
from sinks.audit import Audit, Holding, Part
from sinks.base import Sink
from sinks.dead_letters import Refusal
from sinks.diagnosis import SchemaChange, SchemaDiff
from sinks.errors import CommittedError, ConfigurationError
from sinks.optional import (
    Auditable,
    DeadLettering,
    Diagnosable,
    DirectCommitting,
    JointCommitting,
    SchemaEvolving,
    Validating,
    WholeCommitting,
)
from sinks.testing import SCHEMA, SinkConformance
from sinks.testing.values import SAMPLES
from sinks.transaction import TransactionId, token

Rows = list[dict[str, Any]]


class File:
    """A file to write to, that nobody is warned of if it stays open."""

    descriptor = -1

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

    def write(self, data: bytes) -> int:
        return os.write(self.descriptor, data)

    def tell(self) -> int:
        return os.lseek(self.descriptor, 0, os.SEEK_CUR)

    def clear(self) -> None:
        os.ftruncate(self.descriptor, os.lseek(self.descriptor, 0, os.SEEK_SET))

    def close(self) -> None:
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    __del__ = close


@dataclass
class Handle:
    context: TransactionContext
    name: str
    file: File


REFUSED = "refused"
"""The name that no row may have, if the shelf is asked."""


class Shelf(
    DirectCommitting[Handle], DeadLettering[Handle], Validating[Handle], Auditable[Handle], Diagnosable[Handle]
):
    columns: Sequence[str] | None = SCHEMA.names
    key: str | None = None
    shouts = False
    shown_in: Sequence[str] = ("done",)

    def __init__(self, folder: Path, name: str = "shelf") -> None:
        super().__init__(name=name)
        self.folder = folder

    def path(self, name: str, state: str) -> Path:
        return self.folder / f"{name}.{state}"

    def check(self, schema: pa.Schema) -> None:
        if self.columns and (strange := [name for name in schema.names if name not in self.columns]):
            raise ConfigurationError(f"the shelf has no columns {strange}")

    # ------------------------------------------------------------------ in the task
    def name_of(self, context: TransactionContext) -> str:
        return context.transaction_id

    def begin_transaction(self, context: TransactionContext) -> Handle:
        name = self.name_of(context)
        return Handle(context, name, File(self.path(name, "open")))

    def write(self, transaction: Handle, batch: pa.RecordBatch) -> None:
        self.put(transaction, batch.to_pylist())

    def write_good_rows(self, transaction: Handle, batch: pa.RecordBatch, most: int) -> Sequence[Refusal]:
        rows = batch.to_pylist()
        self.put(transaction, [row for row in rows if row["name"] != REFUSED])
        return [Refusal(at, "BadValue", "it is refused") for at, row in enumerate(rows) if row["name"] == REFUSED]

    def merged(self, rows: Rows) -> Rows:
        """The last row of each key; null is none."""
        keyed = [(row, object() if row["id"] is None else row["id"]) for row in rows]
        return list({key: row for row, key in keyed}.values())

    def order(self, path: Path) -> int:
        """In which files are merged."""
        return TransactionId.find(path.name).checkpoint

    def put(self, transaction: Handle, rows: Rows) -> None:
        pickle.dump([self.meant(row) for row in rows], transaction.file)

    def meant(self, row: dict[str, Any]) -> dict[str, Any]:
        return row | {"name": row["name"].upper()} if self.shouts else row

    def pre_commit(self, transaction: Handle) -> Identity | Committable:
        transaction.file.close()
        self.path(transaction.name, "open").rename(self.path(transaction.name, "ready"))
        return {"name": transaction.name}

    def rollback(self, transaction: Handle) -> None:
        transaction.file.close()
        for state in ("open", "ready"):
            self.path(transaction.name, state).unlink(missing_ok=True)

    def commit_directly(self, transaction: Handle) -> None:
        transaction.file.close()
        self.path(transaction.name, "open").rename(self.path(f"direct-{transaction.name}", "done"))

    # ------------------------------------------------------------------ on the driver
    def commit(self, committable: Committable) -> CommitOutcome:
        name = committable.transaction["name"]
        try:
            self.path(name, "ready").rename(self.path(name, "done"))
        except FileNotFoundError:
            return self.of_gone(name)
        return CommitOutcome.COMMITTED

    def of_gone(self, name: str) -> CommitOutcome:
        if self.path(name, "done").exists():
            return CommitOutcome.COMMITTED
        if self.path(name, "gone").exists():
            return CommitOutcome.lost(f"{name} was aborted")
        return CommitOutcome.unknown(f"there is nothing of {name}")

    def abort(self, transaction: Identity) -> None:
        name = transaction["name"]
        try:
            self.path(name, "ready").rename(self.path(name, "gone"))
        except FileNotFoundError:
            if self.path(name, "done").exists():
                raise CommittedError(f"{name} is committed") from None

    def in_doubt(self, job: str) -> Iterable[Identity]:
        return [{"name": path.stem} for path in self.paths(job, "ready")]

    def paths(self, job: str, state: str) -> list[Path]:
        paths = self.folder.glob(f"{TransactionId.prefix(job)}*.{state}")
        return [path for path in paths if TransactionId.parse(path.stem).sink == token(self.name)]

    def committed_checkpoints(self, job: str) -> Mapping[str, int] | None:
        newest: dict[str, int] = {}
        for path in self.paths(job, "done"):
            name = TransactionId.parse(path.stem)
            newest[name.lineage] = max(name.checkpoint, newest.get(name.lineage, 0))
        return newest

    def purge(self, checkpoint: Checkpoint) -> None:
        for path in [*self.paths(checkpoint.job, "open"), *self.paths(checkpoint.job, "gone")]:
            name = TransactionId.find(path.stem)
            if name.lineage == checkpoint.lineage and name.checkpoint < checkpoint.oldest_retained:
                path.unlink(missing_ok=True)

    def validate_all(self, checkpoint: Checkpoint, committables: Sequence[Committable]) -> None:
        for committable in committables:
            assert self.path(committable.transaction["name"], "ready").exists()

    def audit(self, job: str, parts: Sequence[Part], *, quick: bool = False) -> Audit:
        return Audit(
            [Holding(rows=sum(self.count(committable) for committable in part.committables)) for part in parts]
        )

    def count(self, committable: Committable) -> int:
        paths = [self.path(committable.transaction["name"], state) for state in self.shown_in]
        return len([row for path in paths if path.exists() for row in stored(path)])

    @contextmanager
    def locked(self) -> Iterator[None]:
        with (self.folder / "lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def probe_schema(self) -> pa.Schema | None:
        return SCHEMA


class AnyShelf(Shelf):
    """Takes any columns."""

    columns = None


class KeyedShelf(Shelf):
    """Rows replace those of the same `id`."""

    key = "id"


class EvolvingShelf(SchemaEvolving[Handle], Shelf):
    """Its columns are in a file."""

    @property
    def columns(self) -> Sequence[str]:  # type: ignore[override]
        added = self.folder / "added"
        return [*SCHEMA.names, *(added.read_text().split() if added.exists() else ())]

    def check(self, schema: pa.Schema) -> None:
        pass

    def evolve(self, schema: pa.Schema) -> None:
        with self.locked():
            new = [name for name in schema.names if name not in self.columns]
            draft = self.folder / "draft"
            draft.write_text(" ".join([*self.columns[3:], *new]))
            draft.rename(self.folder / "added")

    def put(self, transaction: Handle, rows: Rows) -> None:
        if strange := {name for row in rows for name in row} - {*self.columns}:
            raise ValueError(f"the shelf has no columns {strange}")
        super().put(transaction, rows)

    def schema_diff(self, schema: pa.Schema) -> SchemaDiff | None:
        new = [name for name in schema.names if name not in self.columns]
        return SchemaDiff(tuple(SchemaChange(name, f"add {name}", "add", "nothing") for name in new))


class WholeShelf(WholeCommitting[Handle], JointCommitting[Handle], Shelf):
    """A checkpoint becomes visible as a whole, with all sinks of the shelf: `manifest` names the files that are."""

    shown_in = ("ready",)

    def shown(self) -> set[str]:
        manifest = self.folder / "manifest"
        return set(json.loads(manifest.read_text())) if manifest.exists() else set()

    def show(self, names: Iterable[str]) -> None:
        draft = self.folder / "draft"
        draft.write_text(json.dumps(sorted(self.shown() | set(names))))
        draft.rename(self.folder / "manifest")

    def commit_whole(
        self, checkpoint: Checkpoint, committables: Sequence[Committable]
    ) -> Sequence[CommitOutcome | Exception]:
        return self.settle(committables)

    def place(self) -> str:
        return str(self.folder)

    def commit_jointly(
        self, checkpoint: Checkpoint, shares: Sequence[tuple[Sink, Sequence[Committable]]]
    ) -> Sequence[Sequence[CommitOutcome]]:
        answers = iter(self.settle([committable for _, own in shares for committable in own]))
        return [[next(answers) for _ in own] for _, own in shares]

    def settle(self, committables: Sequence[Committable]) -> list[CommitOutcome]:
        names = [c.transaction["name"] for c in committables]
        with self.locked():
            shown = self.shown()
            there = [name in shown or self.path(name, "ready").exists() for name in names]
            if all(there):
                self.show(names)
                return [CommitOutcome.COMMITTED] * len(names)
            return [
                CommitOutcome.COMMITTED if name in shown else CommitOutcome.HELD if ready else self.of_gone(name)
                for name, ready in zip(names, there, strict=True)
            ]

    def abort(self, transaction: Identity) -> None:
        with self.locked():
            if transaction["name"] in self.shown():
                raise CommittedError(f"{transaction['name']} is committed")
            super().abort(transaction)

    def paths(self, job: str, state: str) -> list[Path]:
        paths, shown = super().paths(job, "ready" if state == "done" else state), self.shown()
        return [path for path in paths if (path.stem in shown) == (state == "done")]


class Kit(SinkConformance):
    """Of any shelf."""

    def visible(self, sink: Shelf) -> Rows:
        paths = list(sink.folder.glob("*.done"))
        if isinstance(sink, WholeShelf):
            paths += [sink.path(name, "ready") for name in sink.shown()]
        rows = [row for path in sorted(paths, key=sink.order) for row in stored(path)]
        if isinstance(sink, EvolvingShelf):
            rows = [dict.fromkeys(sink.columns) | row for row in rows]
        return sink.merged(rows) if sink.key else rows

    def leftovers(self, sink: Shelf) -> list[str]:
        shown = sink.shown() if isinstance(sink, WholeShelf) else ()
        paths = (path for path in sink.folder.glob("*.*") if path.suffix not in (".done", ".gone"))
        return [path.name for path in paths if path.stem not in shown]

    types: ClassVar[Any] = tuple(SAMPLES)
    bad: ClassVar = {"name": REFUSED}

    def accepting(self, sink: Shelf, schema: pa.Schema) -> Shelf:
        if isinstance(sink, EvolvingShelf):
            return AnyShelf(sink.folder, sink.name)
        other: Shelf = pickle.loads(pickle.dumps(sink))
        other.columns = None
        return other

    def evolving(self, sink: Shelf) -> Shelf:
        kind = type(sink) if isinstance(sink, EvolvingShelf) else EvolvingShelf
        return kind(sink.folder)

    def set_otherwise(self, sink: Shelf) -> Sequence[Shelf]:
        other: Shelf = pickle.loads(pickle.dumps(sink))
        other.shouts = True
        return [other]

    def upserting(self, sink: Shelf) -> Shelf:
        other: Shelf = pickle.loads(pickle.dumps(sink))
        other.key = "id"
        return other


def stored(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        while True:
            try:
                yield from pickle.load(file)
            except EOFError:
                return
