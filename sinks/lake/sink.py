"""Two-phase commit into a lake table.

Tasks write files that no reader knows. The driver names the files of a checkpoint in one commit of
the table.

A task pre-commits by a *mark*: the small file `_tpc/APP/TRANSACTION.json` beside the data, which
has the paths of the transaction's files. APP stands for job and sink. A transaction is in doubt if
it has a mark, and the table has decided nothing about it.

What became of a transaction is decided in one place, the table's own log. The log takes a commit
only on top of what its writer has read. Each commit carries a `LakeMemory` of what was committed
and aborted before. So a commit and an abort by two drivers cannot both take effect, and files are
deleted only when no commit can name them any more.
"""

from __future__ import annotations

import json
import random
import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import pyarrow as pa

from sinks._util.log import get_logger
from sinks._util.threads import side_by_side
from sinks.arrow.types import lacking, spark_name
from sinks.audit import Audit, Holding, Part
from sinks.base import Sink
from sinks.dead_letters import Refusal, find_refused_rows
from sinks.diagnosis import Finding, SchemaChange, SchemaDiff
from sinks.errors import (
    CommittedError,
    ConfigurationError,
    SchemaMismatch,
    TransactionBlocked,
    TransactionEnded,
)
from sinks.lake.buffer import RowBuffer
from sinks.lake.columns import column_of, converted, mismatches
from sinks.lake.files import Files
from sinks.optional import (
    Auditable,
    DeadLettering,
    Diagnosable,
    SchemaEvolving,
    Validating,
    WholeCommitting,
)
from sinks.options import no_flags
from sinks.transaction import (
    Checkpoint,
    CommitOutcome,
    CommitState,
    Committable,
    Identity,
    TransactionContext,
    TransactionId,
    token,
)

logger = get_logger(__name__)

Evolution = Literal["none", "add"]
File = dict[str, Any]
"""A file of data as JSON: its `path`, its `rows`, and what else the table's log says of it."""

Marked = Mapping[TransactionId, str]
"""Transactions that have a mark, each with its name as text."""

_TRIES = 200
"""How often the sink tries a commit if another writer is first each time."""


class Outrun(Exception):
    """Another writer has changed the table first."""


@dataclass
class LakeMemory:
    """A table's own memory of a sink's transactions.

    The memory changes only in one step with the table. `newest` has the newest committed checkpoint
    of each lineage. `committed` and `aborted` name transactions by lineage and checkpoint.
    """

    newest: dict[str, int] = field(default_factory=dict)
    committed: dict[str, list[str]] = field(default_factory=dict)
    aborted: dict[str, list[str]] = field(default_factory=dict)

    def is_committed(self, name: TransactionId) -> bool | None:
        """Return True for a committed transaction, and False for an aborted one.

        Return None if the table has decided nothing about the transaction. Of a forgotten
        checkpoint, everything counts as committed, because somebody may have put its marks back,
        and an abort deletes files.
        """
        place = _place(name)
        short = _short(name)
        if short in self.aborted.get(place, ()):
            return False
        forgotten = place not in self.committed and name.checkpoint < self.newest.get(
            name.lineage, -1
        )
        return True if forgotten or short in self.committed.get(place, ()) else None

    def commit(self, name: TransactionId) -> None:
        self.committed.setdefault(_place(name), []).append(_short(name))
        self.newest[name.lineage] = max(name.checkpoint, self.newest.get(name.lineage, -1))

    def abort(self, name: TransactionId) -> None:
        self.aborted.setdefault(_place(name), []).append(_short(name))

    def others(
        self, lineage: str, checkpoint: int, names: Collection[TransactionId]
    ) -> tuple[str, ...]:
        """Return the committed transactions of a checkpoint that are not among `names`."""
        known = {_short(name) for name in names}
        shorts = self.committed.get(f"{lineage}.{checkpoint}", ())
        return tuple(f"{lineage}.{checkpoint}.{short}" for short in shorts if short not in known)

    def forget(self, checkpoint: Checkpoint) -> None:
        """Drop the transactions of checkpoints that recovery no longer asks for."""
        for place in {*self.committed, *self.aborted}:
            lineage, _, number = place.partition(".")
            if lineage == checkpoint.lineage and int(number) < checkpoint.oldest_retained:
                self.committed.pop(place, None)
                self.aborted.pop(place, None)

    def to_json(self) -> str:
        return json.dumps(self.__dict__, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes | None) -> LakeMemory:
        return cls(**json.loads(text)) if text else cls()


def _place(name: TransactionId) -> str:
    return f"{name.lineage}.{name.checkpoint}"


def _short(name: TransactionId) -> str:
    return f"{name.subtask}.{name.attempt_label}"


@dataclass(frozen=True)
class LakeTable:
    """A table as a task has to know it.

    * `target` is the place and the ID of the table. People read it, and the sink notices another
      table by it.
    * `columns` are the columns of the table, and not of the batch. The table is partitioned by
      `parts`.
    * `layout` stands for the columns and the partitioning. Files that were written for another
      layout cannot be committed.
    * `details` is what only one kind of table needs.
    """

    target: str
    columns: pa.Schema
    parts: Sequence[str]
    layout: str
    details: Any = ()


@dataclass
class LakeTransaction:
    """The rows and files of one transaction, in its task."""

    context: TransactionContext
    table: LakeTable
    waiting: RowBuffer = field(default_factory=RowBuffer)
    files: list[File] = field(default_factory=list)
    begun: list[str] = field(default_factory=list)
    """Paths of files that may exist."""


class LakeSink(
    WholeCommitting[LakeTransaction],
    DeadLettering[LakeTransaction],
    SchemaEvolving[LakeTransaction],
    Validating[LakeTransaction],
    Auditable[LakeTransaction],
    Diagnosable[LakeTransaction],
):
    """A sink that appends rows to a lake table.

    Delta and Iceberg differ in the abstract methods, from `_look` on.
    """

    # In at-least-once mode each task would make a commit of its own, and all would contend for the
    # table.
    takes_at_least_once = False

    def __init__(
        self,
        name: str,
        schema_evolution: Evolution,
        create_table: bool,
        transform: Callable[..., Any] | None,
        dead_letters: Sink | None,
        max_dead_letters: int | float,
    ) -> None:
        super().__init__(
            name=name,
            transform=transform,
            dead_letters=dead_letters,
            max_dead_letters=max_dead_letters,
        )
        if schema_evolution not in ("none", "add"):
            raise ConfigurationError(
                f'sink {name!r}: schema_evolution is "none" or "add", not {schema_evolution!r}'
            )
        if problem := next(no_flags(create_table=create_table), None):
            raise ConfigurationError(f"sink {name!r}: {problem}")
        self.evolves = schema_evolution != "none"
        self._create_table = create_table
        self._table: LakeTable | None = None
        self._handle: Any = None
        self._store: Files | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}(name={self.name!r}, table={str(self)!r})"

    def close(self) -> None:
        self._handle = self._store = None

    def _files(self) -> Files:
        if self._store is None:
            self._store = self._open_files()
        return self._store

    # ------------------------------------------------------------------ one kind of table
    @abstractmethod
    def _look(self) -> LakeTable | None:
        """Read the table as it is now; return None if there is none.

        `_remembered` and `_append` build on what this method has read.
        """

    @abstractmethod
    def _location(self) -> str:
        """Return where the table is; return "" while nobody knows.

        The place is a folder, or a URI without credentials.
        """

    @abstractmethod
    def _create(self, schema: pa.Schema) -> None:
        """Create a table with these columns, unless there is one."""

    @abstractmethod
    def _problems(self) -> Iterable[str]:
        """List the reasons why rows cannot be appended to the table that `_look` has read."""

    @abstractmethod
    def _add_columns(self, columns: pa.Schema) -> None: ...

    @abstractmethod
    def _open_files(self) -> Files: ...

    @abstractmethod
    def _write_files(
        self, table: LakeTable, rows: pa.Table, name: str, begun: list[str]
    ) -> list[File]:
        """Write rows into new files, which are durable when the method returns.

        No other call has the same `name`. Each path is added to `begun` before its file exists.
        """

    @abstractmethod
    def _made_by(self, text: str, paths: Sequence[str]) -> Sequence[str]:
        """Return those of the paths that have a name which the transaction gives its files.

        Others may have written the mark that has the paths, so the sink deletes no other file.
        """

    @abstractmethod
    def _remembered(self, app: str) -> LakeMemory | None:
        """Return what the table that `_look` has read remembers of `app`.

        Return None if the table has changed since.
        """

    @abstractmethod
    def _append(
        self, app: str, memory: LakeMemory, files: Sequence[File], about: Mapping[str, str]
    ) -> None:
        """Commit files and memory in one step.

        Raises Outrun if the table, or what it remembers of `app`, is no longer what `_look` has
        read.
        """

    @abstractmethod
    def _rows_held(self, paths: Sequence[str]) -> Mapping[str, int]:
        """Return how many rows each of these files has, as the table counts them.

        A file that the table no longer has is missing from the result.
        """

    # ------------------------------------------------------------------ set-up
    def check(self, schema: pa.Schema) -> None:
        """Find the table, or create it.

        Raises ConfigurationError with all reasons at once, or SchemaMismatch if all of them are
        about columns.
        """
        if self._look() is None and self._create_table:
            try:
                self._create(pa.schema(map(column_of, schema)))
            except Exception as error:  # deltalake adds a stack of its own
                why = str(error).partition("\n")[0]
                raise ConfigurationError(
                    f"sink {self.name!r} cannot create {self}: {why}"
                ) from error
        table = self._require_table()
        self._require_fit(schema, table, self._problems(), adds=self.evolves)
        self._table = table

    def _require_fit(
        self, schema: pa.Schema, table: LakeTable, others: Iterable[str] = (), *, adds: bool = False
    ) -> None:
        """Raise an error with all reasons why rows of this schema cannot be written.

        `others` are reasons that are not about columns. With `adds`, columns that the table lacks
        are fine.
        """
        columns = list(mismatches(schema, table.columns, adds=adds))
        others = list(others)
        if columns or others:
            kind = ConfigurationError if others else SchemaMismatch
            reasons = "".join(f"\n  - {reason}" for reason in [*others, *columns])
            raise kind(f"sink {self.name!r} cannot write to {table.target}:{reasons}")

    def evolve(self, schema: pa.Schema) -> None:
        """Add the columns that the table lacks. They take NULL."""
        table = self._require_table()
        if added := [field.with_nullable(True) for field in lacking(schema, table.columns.names)]:
            logger.info(
                "sink %r adds columns to %s: %s",
                self.name,
                table.target,
                ", ".join(map(str, added)),
            )
            self._add_columns(pa.schema(map(column_of, added)))
        self.check(schema)

    def schema_diff(self, schema: pa.Schema) -> SchemaDiff:
        columns = self._require_table().columns
        added = [
            SchemaChange(
                field.name,
                f"add column {field.name}: {spark_name(field.type)}",
                "add",
                "nothing",
                self.evolves,
            )
            for field in lacking(schema, columns.names)
        ]
        return SchemaDiff(tuple(added), tuple(mismatches(schema, columns, adds=True)))

    def _look_again(self) -> LakeTable | None:
        """Read the table again, and let tasks write for the table as it is now.

        Return None if there is no table.
        """
        table = self._look()
        if table and self._table:
            self._table = table
        return table

    def _require_table(self) -> LakeTable:
        if (table := self._look_again()) is None:
            raise ConfigurationError(
                f"sink {self.name!r}: there is no table {self}: create it, or set create_table=True"
            )
        return table

    def diagnose(self, job: str) -> Iterable[Finding]:
        yield from super().diagnose(job)
        if table := self._look():
            yield Finding.ok(f"the table {table.target} is at {self._location()}")
            for problem in self._problems():
                why, _, fix = problem.rpartition(": ")
                yield Finding.error(f"the sink cannot write to {table.target}: {why}", fix)
        elif self._create_table:
            yield Finding.ok(f"there is no table {self} yet; the first batch creates it")
        else:
            yield Finding.error(f"there is no table {self}", "create it, or set create_table=True")

    def weaknesses(self) -> Sequence[str]:
        local = self._location().startswith(("/", "file:"))
        why = (
            f"{self} is in a local folder, whose metadata nobody syncs to disk: a power failure "
            "may lose rows"
        )
        return (why,) if local else ()

    def describe_writing(self, written: Identity | None = None) -> str:
        return "append; one commit of the table a checkpoint"

    # ------------------------------------------------------------------ in the task
    def begin_transaction(self, context: TransactionContext) -> LakeTransaction:
        table = self._table or self._require_table()
        self._require_fit(context.schema, table)  # somebody may have altered it since `check`
        return LakeTransaction(context, table)

    def write(self, transaction: LakeTransaction, batch: pa.RecordBatch) -> None:
        table = transaction.table
        rows = converted(
            batch,
            table.columns,
            table.parts,
            f"{table.target}, partition {transaction.context.subtask}",
        )
        transaction.waiting.add(rows)
        if transaction.waiting.is_full:
            self._flush(transaction)

    def write_good_rows(
        self, transaction: LakeTransaction, batch: pa.RecordBatch, most: int
    ) -> Sequence[Refusal]:
        """Write the rows of the batch, and return the rows that `write` rejects by BadValue.

        Such a row has, for example, a NULL where the table takes none.
        """
        return find_refused_rows(
            batch, lambda piece: self.write(transaction, piece), most, alone=True
        )

    def _flush(self, transaction: LakeTransaction) -> None:
        if (rows := transaction.waiting.take()) is None:
            return
        name = f"{transaction.context.transaction_id}-{len(transaction.files)}"
        transaction.files += self._write_files(transaction.table, rows, name, transaction.begun)

    def pre_commit(self, transaction: LakeTransaction) -> Committable:
        self._flush(transaction)
        text = transaction.context.transaction_id
        files = transaction.files
        table = transaction.table
        self._files().put(_mark(text), json.dumps([file["path"] for file in files]).encode())
        return Committable(
            {"transaction": text}, {"target": table.target, "layout": table.layout, "files": files}
        )

    def rollback(self, transaction: LakeTransaction) -> None:
        self._files().delete([_mark(transaction.context.transaction_id)])
        self._files().delete(transaction.begun)

    # ------------------------------------------------------------------ commit
    def validate_all(self, checkpoint: Checkpoint, committables: Sequence[Committable]) -> None:
        """Raise TransactionEnded if rows have to be written again.

        That is so if the rows are for another table or layout than there is now, or if somebody has
        deleted their mark. Raises ConfigurationError if the table was altered so that the sink
        cannot write to it.
        """
        table = self._require_table()
        if reasons := list(self._problems()):
            raise ConfigurationError(
                f"sink {self.name!r}: {table.target} was altered: {'; '.join(reasons)}"
            )
        marked = self._marked(app_of(checkpoint.job, self.name)).values()
        for committable in committables:
            text = committable.transaction["transaction"]
            unfit = committable.target_mismatch(table.target) or _unfit(committable, table)
            if unfit := unfit or (f"{_mark(text)} is gone" if text not in marked else ""):
                raise TransactionEnded(f"sink {self.name!r}: {unfit}")

    def commit_whole(
        self, checkpoint: Checkpoint, committables: Sequence[Committable]
    ) -> Sequence[CommitOutcome]:
        """Commit all transactions by one commit of the table, or none of them."""
        if not all(committable.proof for committable in committables):
            reason = (
                "only the record tells its files: restore checkpoint storage, or write its rows by "
                "hand"
            )
            return [CommitOutcome.unknown(reason)] * len(committables)
        by_name = {TransactionId.parse(c.transaction["transaction"]): c for c in committables}
        first = next(iter(by_name))
        outcomes = dict[TransactionId, CommitOutcome]()

        def decide(table: LakeTable, marked: Marked, memory: LakeMemory) -> list[File] | None:
            open_ = [
                name for name in by_name if memory.is_committed(name) is None and name in marked
            ]
            gone = self._files().missing(
                file["path"] for name in open_ for file in by_name[name].proof["files"]
            )
            altered = (
                "; ".join(self._problems())
                if any(_unfit(c, table) for c in by_name.values())
                else ""
            )
            outcomes.update(
                {
                    name: _outcome(table, memory, marked, gone, altered, name, c)
                    for name, c in by_name.items()
                }
            )
            if lost := [name for name in open_ if outcomes[name].state is CommitState.LOST]:
                for name in lost:
                    memory.abort(name)
                return []
            held = [name for name in by_name if outcomes[name].state is CommitState.HELD]
            committed = [name for name in by_name if outcomes[name].state is CommitState.COMMITTED]
            if not held or len(held) + len(committed) < len(by_name):
                return None
            for name in held:
                memory.commit(name)
                outcomes[name] = CommitOutcome.COMMITTED
            memory.forget(checkpoint)
            return [file for name in held for file in by_name[name].proof["files"]]

        about = {
            "tpc.job": checkpoint.job,
            "tpc.lineage": first.lineage,
            "tpc.checkpoint": str(first.checkpoint),
        }
        self._change(_app(first), decide, about)
        done = [c for name, c in by_name.items() if outcomes[name].state is CommitState.COMMITTED]
        self._files().delete([_mark(c.transaction["transaction"]) for c in done])
        return [outcomes[name] for name in by_name]

    def _change(
        self,
        app: str,
        decide: Callable[[LakeTable, Marked, LakeMemory], list[File] | None],
        about: Mapping[str, str],
    ) -> None:
        """Let `decide` change the memory and name files to append, and commit both.

        `decide` gets the table, the marked transactions and the memory. It returns None if there is
        nothing to change. If another writer changes the table first, `decide` is called again with
        what the table has then. Raises TransactionBlocked if that goes on for `_TRIES` tries.
        """
        outrun = Outrun()
        for attempt in range(_TRIES):
            # The marks are read before the memory, because a decided transaction may lose its mark
            # between the two.
            marked = self._marked(app)
            table, memory = self._table_and_memory(app) or (self._require_table(), LakeMemory())
            try:
                if (files := decide(table, marked, memory)) is not None:
                    self._append(app, memory, files, about)
                return
            except Outrun as error:
                outrun = error
            time.sleep(random.uniform(0, min(0.5, 0.01 * (attempt + 1))))
        raise TransactionBlocked(
            f"sink {self.name!r}: {self} took no commit in {_TRIES} tries: {outrun}"
        ) from outrun

    def _table_and_memory(self, app: str) -> tuple[LakeTable, LakeMemory] | None:
        """Read the table and what it remembers of `app`, both at one moment.

        Return None if there is no table.
        """
        while (table := self._look_again()) is not None:
            if (memory := self._remembered(app)) is not None:
                return table, memory
        return None

    # ------------------------------------------------------------------ abort, and what is in doubt
    def abort(self, transaction: Identity) -> None:
        [error] = self.abort_all([transaction])
        if error:
            raise error

    def abort_all(self, transactions: Sequence[Identity]) -> Sequence[CommittedError | None]:
        """Abort all transactions by one commit of the table."""
        names = {
            its["transaction"]: TransactionId.parse(its["transaction"]) for its in transactions
        }
        decided = dict[str, bool | None]()
        """True for a committed transaction, False for an aborted one, and None if the table knows
        nothing of it."""

        def decide(table: LakeTable, marked: Marked, memory: LakeMemory) -> list[File] | None:
            decided.update({text: memory.is_committed(name) for text, name in names.items()})
            open_ = [
                text for text, name in names.items() if decided[text] is None and name in marked
            ]
            for text in open_:
                memory.abort(names[text])
                decided[text] = False
            return [] if open_ else None

        first, *others = names
        about = {"tpc.aborted": f"{first} and {len(others)} more" if others else first}
        self._change(_app(names[first]), decide, about)
        try:
            side_by_side(
                self._discard, [text for text, committed in decided.items() if committed is False]
            )
        except Exception:
            logger.info(
                "files of aborted transactions are deleted when sink %r purges",
                self.name,
                exc_info=True,
            )
        why = f"its checkpoint is committed, as {self} remembers"
        texts = [its["transaction"] for its in transactions]
        return [CommittedError(f"{text}: {why}") if decided[text] else None for text in texts]

    def _discard(self, text: str) -> None:
        """Delete the files of an aborted transaction, then its mark."""
        if (mark := self._files().get(_mark(text))) is not None:
            with suppress(ValueError, TypeError):  # the task died while it wrote the mark
                self._files().delete(self._made_by(text, json.loads(mark)))
            self._files().delete([_mark(text)])

    def owns(self, job: str, transaction: Identity) -> bool:
        with suppress(LookupError, TypeError, ValueError):
            return _app(TransactionId.parse(transaction["transaction"])) == app_of(job, self.name)
        return False

    def in_doubt(self, job: str) -> Iterable[Identity]:
        if self._look() is None:
            return []
        marked = self._marked(app_of(job, self.name))
        seen = self._table_and_memory(app_of(job, self.name)) if marked else None
        return [
            {"transaction": text}
            for name, text in marked.items()
            if seen and seen[1].is_committed(name) is None
        ]

    def _marked(self, app: str) -> Marked:
        """Return the transactions that have a mark.

        They are pre-committed, or they are decided and their mark is yet to be deleted.
        """
        marked = {}
        for file in self._files().names(f"_tpc/{app}"):
            with suppress(ValueError):  # something else
                name = TransactionId.parse(text := file.removesuffix(".json"))
                if _app(name) == app:
                    marked[name] = text
        return marked

    def purge(self, checkpoint: Checkpoint) -> None:
        """Delete the marks and files of processes that died during `commit` or `abort`.

        The memory itself is shortened by the next commit.
        """
        if seen := self._table_and_memory(app := app_of(checkpoint.job, self.name)):
            for name, text in self._marked(app).items():
                committed = seen[1].is_committed(name)
                if committed:
                    self._files().delete([_mark(text)])
                elif committed is False:
                    self._discard(text)

    def committed_checkpoints(self, job: str) -> Mapping[str, int]:
        seen = self._table_and_memory(app_of(job, self.name))
        return seen[1].newest if seen else {}

    def audit(self, job: str, parts: Sequence[Part], *, quick: bool = False) -> Audit:
        if (seen := self._table_and_memory(app_of(job, self.name))) is None:
            return Audit([Holding(rows=0)] * len(parts))
        paths = [
            [file["path"] for c in part.committables for file in c.proof["files"]] for part in parts
        ]
        held = dict(self._rows_held([path for some in paths for path in some]))
        if not quick:
            # the table names these files, and nobody can read them
            held |= dict.fromkeys(self._files().missing(held), 0)
        return Audit(
            [_holding(seen[1], part, some, held) for part, some in zip(parts, paths, strict=True)]
        )

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_handle": None, "_store": None}


def _outcome(
    table: LakeTable,
    memory: LakeMemory,
    marked: Marked,
    gone: set[str],
    altered: str,
    name: TransactionId,
    committable: Committable,
) -> CommitOutcome:
    """Return the outcome of one transaction as the table stands.

    HELD means that the transaction is pre-committed and fits the table. `altered` says why the sink
    cannot write to the table, and is "" if it can. With such a reason, rows that do not fit are
    UNKNOWN and not LOST, because the coordinator writes the rows of a LOST transaction again.
    """
    text = committable.transaction["transaction"]
    committed = memory.is_committed(name)
    if committed:
        return CommitOutcome.COMMITTED
    if committed is False:
        return CommitOutcome.lost(f"{text} was aborted, as {table.target} remembers")
    if astray := committable.target_mismatch(table.target):
        return CommitOutcome.unknown(f"{text}: {astray}")
    if name not in marked:
        return CommitOutcome.unknown(
            f"{text}: {table.target} remembers nothing of it, and its mark {_mark(text)} is gone"
        )
    if unfit := _unfit(committable, table):
        if altered:
            return CommitOutcome.unknown(
                f"{text}: {table.target} was altered, undo that: {altered}"
            )
        return CommitOutcome.lost(f"{text}: {unfit}")
    if mine := gone.intersection(file["path"] for file in committable.proof["files"]):
        return CommitOutcome.lost(
            f"{text}: somebody has deleted {min(mine)}, which was not visible yet"
        )
    return CommitOutcome.HELD


def _unfit(committable: Committable, table: LakeTable) -> str:
    """Say why a transaction's files cannot be committed to the table; return "" if they can."""
    same = committable.proof["layout"] == table.layout
    return (
        ""
        if same
        else f"{table.target} has other columns or partitions than when its rows were written"
    )


def _holding(
    memory: LakeMemory, part: Part, paths: Sequence[str], held: Mapping[str, int]
) -> Holding:
    names = {TransactionId.parse(c.transaction["transaction"]) for c in part.committables}
    unnamed = memory.others(part.lineage, part.checkpoint_id, names)
    if gone := [path for path in paths if path not in held]:
        why = (
            f"{len(gone)} of its files are not counted by the table any more: compacted, or "
            "deleted with their rows"
        )
        return Holding(remarks=(why,), unexpected=unnamed)
    return Holding(rows=sum(held[path] for path in paths), unexpected=unnamed)


def app_of(job: str, sink: str) -> str:
    """Return the name of a job's sink in a table.

    The name is the key of the sink's memory, and the folder of its marks.
    """
    return f"tpc.{token(job)}.{token(sink)}"


def _app(name: TransactionId) -> str:
    """Return what `app_of` does, for a parsed name, whose job and sink are tokens already."""
    return f"tpc.{name.job}.{name.sink}"


def _mark(text: str) -> str:
    """Return the path of a transaction's mark."""
    return f"_tpc/{_app(TransactionId.parse(text))}/{text}.json"
