"""A sink that adds files to a folder, or to a prefix of an object store.

A task writes its files below the hidden folder `_tpc`, where readers do not look, and pre-commits
by a *mark*, which is a small file that lists them. For each transaction the file `decided/NAME`
decides the outcome. It is put only once, whoever tries: with the list of the files by a commit, or
empty by an abort. So a commit and an abort by two drivers cannot both take effect. After the
decision each file gets its own name, which never changes, so a repeated commit does nothing twice.
The mark is deleted last.

    _tpc/layout                       format, columns and partition columns of all files
    _tpc/APP/staged/NAME-0            a file that is not visible yet
    _tpc/APP/pre-committed/NAME       the mark
    _tpc/APP/decided/NAME             the files, or nothing if it was aborted
    day=2024-01-01/part-NAME-0.zstd.parquet

APP stands for job and sink, and NAME is the name of the transaction.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from sinks._util.threads import side_by_side
from sinks.arrow.convert import RefusedValue
from sinks.audit import Audit, Holding, Part
from sinks.base import Sink
from sinks.dead_letters import Refusal, find_refused_rows
from sinks.diagnosis import Finding
from sinks.errors import (
    BadValue,
    CommittedError,
    ConfigurationError,
    SchemaMismatch,
    TransactionEnded,
)
from sinks.files.layout import (
    CODECS,
    Format,
    Layout,
    column_problems,
    encoded,
    folder_of,
    partition_problems,
    require_folder_names,
    suffix,
)
from sinks.lake.buffer import RowBuffer
from sinks.lake.columns import column_of, converted, partitions
from sinks.lake.files import ObjectFiles, address, files_at, make_durable
from sinks.lake.sink import app_of
from sinks.optional import Auditable, DeadLettering, Diagnosable, DirectCommitting, Validating
from sinks.options import no_flags
from sinks.transaction import (
    Checkpoint,
    CommitOutcome,
    Committable,
    Identity,
    TransactionContext,
    TransactionId,
)

_LAYOUT = "_tpc/layout"
_SUCCESS = "_SUCCESS"
_ABORTED = b""
"""What the decision about an aborted transaction contains."""
_LOGS = {
    "_spark_metadata": "Spark's own file sink has written there, and Spark reads only its files",
    "_delta_log": "it is a Delta table, whose log does not know other files",
}
"""Folders with which readers do not look for files."""


@dataclass
class FileTransaction:
    """The rows and files of one transaction, in its task."""

    context: TransactionContext
    columns: pa.Schema
    waiting: RowBuffer = field(default_factory=RowBuffer)
    files: list[dict[str, Any]] = field(default_factory=list)
    """Of each file the `path` at which it will be visible, its `rows` and its `size`."""
    sealing: bool = False
    """True when the mark may exist."""

    @property
    def name(self) -> str:
        return self.context.transaction_id


class FileSink(
    DirectCommitting[FileTransaction],
    DeadLettering[FileTransaction],
    Validating[FileTransaction],
    Auditable[FileTransaction],
    Diagnosable[FileTransaction],
):
    """A sink that adds files of Parquet or JSON lines to a folder or an object store.

    Readers see whole files, one after the other. All files of a checkpoint are visible when
    `foreachBatch` returns.
    """

    system = "a folder of files"

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        format: Format = "parquet",
        partition_by: Sequence[str] = (),
        compression: str | None = None,
        max_rows_per_file: int | None = None,
        success_marker: bool = False,
        storage_options: Mapping[str, str] | None = None,
        name: str | None = None,
        transform: Callable[..., Any] | None = None,
        dead_letters: Sink | None = None,
        max_dead_letters: int | float = 1000,
    ) -> None:
        """Set up the sink; nothing is opened yet.

        * `path` is a folder that all executors share, or a URI that begins with `s3://`, `gs://` or
          `az://`.
        * `format` is "parquet", or "jsonl" for one JSON object a line.
        * `partition_by` names columns that become folders, such as `day=2024-01-01`.
        * `compression` is "zstd" (the default), "snappy", "gzip", "lz4" or "none" for Parquet, and
          "none" (the default) or "gzip" for JSON lines.
        * `max_rows_per_file` limits the rows of a file. A task begins another file in any case when
          its rows take 64 MiB of memory.
        * `success_marker` puts the file `_SUCCESS` after each checkpoint.
        * `storage_options` are obstore's. Environment variables work, too.

        Raises ConfigurationError for options that do not go together, and for a URI with
        credentials.
        """
        self._uri = address(path, name or "")
        super().__init__(
            name=name or self._uri.rpartition("/")[2],
            transform=transform,
            dead_letters=dead_letters,
            max_dead_letters=max_dead_letters,
        )
        if format not in CODECS:
            raise ConfigurationError(
                f'sink {self.name!r}: format is "parquet" or "jsonl", not {format!r}'
            )
        if compression is not None and compression not in CODECS[format]:
            raise ConfigurationError(
                f"sink {self.name!r}: compression of {format} is one of "
                f"{', '.join(CODECS[format])}, not {compression!r}"
            )
        if max_rows_per_file is not None and (
            isinstance(max_rows_per_file, bool)
            or not isinstance(max_rows_per_file, int)
            or max_rows_per_file < 1
        ):
            raise ConfigurationError(
                f"sink {self.name!r}: max_rows_per_file must be a whole number from 1, not "
                f"{max_rows_per_file!r}"
            )
        if problem := next(no_flags(success_marker=success_marker), None):
            raise ConfigurationError(f"sink {self.name!r}: {problem}")
        self._format = format
        self._partition_by = (partition_by,) if isinstance(partition_by, str) else (*partition_by,)
        self._compression = compression or next(iter(CODECS[format]))
        self._most = max_rows_per_file
        self._success_marker = success_marker
        self._options = dict(storage_options or {})
        self._columns: pa.Schema | None = None
        """Columns of the files, which `check` has found."""
        self._store: ObjectFiles | None = None

    def __str__(self) -> str:
        return self._uri

    def __repr__(self) -> str:
        return f"FileSink(name={self.name!r}, path={self._uri!r})"

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_store": None}

    def close(self) -> None:
        self._store = None

    def _files(self) -> ObjectFiles:
        if self._store is None:
            if self._is_missing():
                raise ConfigurationError(
                    f"sink {self.name!r}: there is no folder {self._uri}: mount or restore it"
                )
            self._store = files_at(self._uri, self._options)
        return self._store

    def _is_missing(self) -> bool:
        """Tell whether the local folder does not exist. A store has no folders."""
        return "://" not in self._uri and not Path(self._uri).is_dir()

    # ------------------------------------------------------------------ set-up
    def check(self, schema: pa.Schema) -> None:
        """Make the folder, and compare the columns with those of the files that are there.

        New columns are fine. Raises ConfigurationError with all reasons at once, or SchemaMismatch
        if all of them are about columns.
        """
        layout = None if self._is_missing() else self._layout()
        known = layout.columns if layout else pa.schema([])
        columns = column_problems(schema, known, adds=True)
        others = list(self._problems(layout))
        if not columns:
            added = [f for f in schema if f.name not in known.names]
            known = pa.schema([*known, *(column_of(f).with_nullable(True) for f in added)])
            others += partition_problems(known, self._partition_by)
        if columns or others:
            kind = ConfigurationError if others else SchemaMismatch
            reasons = "".join(f"\n  - {reason}" for reason in [*others, *columns])
            raise kind(f"sink {self.name!r} cannot write to {self}:{reasons}")
        if self._is_missing():
            folder = Path(self._uri)
            known_parent = next(parent for parent in folder.parents if parent.exists())
            folder.mkdir(parents=True, exist_ok=True)
            make_durable(folder, known_parent)
        if layout is None or added:
            layout = Layout(self._format, known, self._partition_by)
            self._files().put(_LAYOUT, layout.to_bytes())
        self._columns = known

    def _layout(self) -> Layout | None:
        data = self._files().get(_LAYOUT)
        return Layout.from_bytes(data) if data else None

    def _problems(self, layout: Layout | None) -> Iterable[str]:
        """List the reasons, apart from columns, why files cannot be added to the folder."""
        if layout is None:
            for folder, why in _LOGS.items():
                if not self._is_missing() and self._files().has_folder(folder):
                    yield f"it has the folder {folder}, so {why}: use another folder"
            return
        for option, mine, theirs in (
            ("format", self._format, layout.format),
            ("partition_by", [*self._partition_by], [*layout.partition_by]),
        ):
            if mine != theirs:
                yield (
                    f"{option} is {mine!r}, and was {theirs!r} for the files that are there: use "
                    "another folder"
                )

    def weaknesses(self) -> Sequence[str]:
        if "://" in self._uri and not self._files().puts_once(f"_tpc/probe-{time.time_ns()}"):
            return (
                f"the store of {self._uri} ignores the condition of a put, so a commit and an "
                "abort by two drivers may both take effect",
            )
        return ()

    def describe_writing(self, written: Identity | None = None) -> str:
        parts = f", partitioned by {', '.join(self._partition_by)}" if self._partition_by else ""
        return f"append; {self._format} files ({self._compression}){parts}"

    def diagnose(self, job: str) -> Iterable[Finding]:
        yield from super().diagnose(job)
        if self._is_missing():
            yield Finding.ok(f"there is no folder {self} yet; the first batch makes it")
            return
        layout = self._layout()
        for problem in self._problems(layout):
            why, _, fix = problem.rpartition(": ")
            yield Finding.error(f"the sink cannot write to {self}: {why}", fix)
        if layout:
            yield Finding.ok(f"{self} has {layout.format} files of {len(layout.columns)} columns")

    # ------------------------------------------------------------------ in the task
    def begin_transaction(self, context: TransactionContext) -> FileTransaction:
        columns = self._columns or pa.schema(map(column_of, context.schema))
        if problems := column_problems(context.schema, columns, adds=False):
            reasons = "; ".join(problems)
            raise SchemaMismatch(f"sink {self.name!r} cannot write to {self}: {reasons}")
        return FileTransaction(context, columns)

    def write(self, transaction: FileTransaction, batch: pa.RecordBatch) -> None:
        who = f"{self}, partition {transaction.context.subtask}"
        rows = converted(batch, transaction.columns, self._partition_by, who)
        for name in self._partition_by:
            try:
                require_folder_names(name, rows[name], len(self._partition_by))
            except RefusedValue as refused:
                why = f"column {name!r}: {refused}"
                raise BadValue(f"{who}: row {refused.index + 1} of a batch, {why}").because(
                    why
                ) from None
        transaction.waiting.add(rows)
        if transaction.waiting.is_full:
            self._flush(transaction)

    def write_good_rows(
        self, transaction: FileTransaction, batch: pa.RecordBatch, most: int
    ) -> Sequence[Refusal]:
        return find_refused_rows(
            batch, lambda piece: self.write(transaction, piece), most, alone=True
        )

    def _flush(self, transaction: FileTransaction) -> None:
        if (rows := transaction.waiting.take()) is None:
            return
        for values, part in partitions(rows, self._partition_by):
            for start in range(0, part.num_rows, self._most or part.num_rows):
                self._stage(transaction, folder_of(values), part.slice(start, self._most))

    def _stage(self, transaction: FileTransaction, folder: str, rows: pa.Table) -> None:
        number = len(transaction.files)
        data = encoded(rows, self._format, self._compression)
        end = suffix(self._format, self._compression)
        path = f"{folder}part-{transaction.name}-{number}{end}"
        transaction.files.append({"path": path, "rows": rows.num_rows, "size": len(data)})
        self._files().put(_staged(transaction.name, number), data)

    def pre_commit(self, transaction: FileTransaction) -> Committable:
        self._flush(transaction)
        name = transaction.name
        transaction.sealing = True
        self._files().put(_mark(name), json.dumps(transaction.files).encode())
        # In this order: an abort puts its decision first, and looks for the mark then.
        if self._files().exists(_decision(name)):
            raise TransactionEnded(f"sink {self.name!r}: somebody has aborted {name}")
        return Committable({"transaction": name}, {"target": self._uri, "files": transaction.files})

    def commit_directly(self, transaction: FileTransaction) -> None:
        self._flush(transaction)
        if missing := self._show(transaction.name, transaction.files):
            raise FileNotFoundError(f"{self}/{missing} was deleted before it was visible")

    def rollback(self, transaction: FileTransaction) -> None:
        name = transaction.name
        if transaction.sealing:
            try:
                self.abort({"transaction": name})
            except CommittedError:  # by an operator; its files are needed
                return
        staged = [_staged(name, number) for number in range(len(transaction.files))]
        self._files().delete(staged)
        if not transaction.context.exactly_once:
            self._files().delete([file["path"] for file in transaction.files])

    # ------------------------------------------------------------------ commit
    def validate_all(self, checkpoint: Checkpoint, committables: Sequence[Committable]) -> None:
        """Raise TransactionEnded if the driver does not see what the tasks have pre-committed."""
        marked = self._marked(app_of(checkpoint.job, self.name))
        for committable in committables:
            name = committable.transaction["transaction"]
            unfit = committable.target_mismatch(self._uri)
            if unfit := unfit or ("" if name in marked else self._not_seen(name)):
                raise TransactionEnded(f"sink {self.name!r}: {unfit}")

    def _not_seen(self, name: str) -> str:
        shared = "" if "://" in self._uri else ", or executors do not share the folder"
        return f"{self._uri}/{_mark(name)} is missing: somebody has deleted it{shared}"

    def commit_all(
        self, checkpoint: Checkpoint, committables: Sequence[Committable]
    ) -> Sequence[CommitOutcome | Exception]:
        """Commit each transaction, and put the marker if the whole checkpoint is visible."""
        outcomes = super().commit_all(checkpoint, committables)
        if self._success_marker and all(one == CommitOutcome.COMMITTED for one in outcomes):
            about = {
                "job": checkpoint.job,
                "lineage": checkpoint.lineage,
                "checkpoint": checkpoint.checkpoint_id,
            }
            self._files().put(_SUCCESS, json.dumps(about).encode())
        return outcomes

    def commit(self, committable: Committable) -> CommitOutcome:
        name = committable.transaction["transaction"]
        if astray := committable.target_mismatch(self._uri):
            return CommitOutcome.unknown(f"{name}: {astray}")
        files = self._files()
        mark = files.get(_mark(name))
        if mark is None:
            decision = files.get(_decision(name))
            if decision is None:
                return CommitOutcome.unknown(
                    f"{name}: {self} has no decision about it, and {self._not_seen(name)}"
                )
            # the mark is deleted when all files are visible
            return CommitOutcome.COMMITTED if decision else self._lost(name)
        staged = [_staged(name, number) for number in range(len(json.loads(mark)))]
        # Files are missing, too, if they were committed before, but then the decision is there.
        gone = files.missing(staged)
        decision = files.put_once(_decision(name), _ABORTED if gone else mark)
        if decision == _ABORTED:
            return self._lost(name, *sorted(gone))
        return self._finish(name, json.loads(mark))

    def _lost(self, name: str, *gone: str) -> CommitOutcome:
        why = f", and {gone[0]} is missing" if gone else ""
        return CommitOutcome.lost(f"{name} was aborted, as {self}/{_decision(name)} says{why}")

    def _finish(self, name: str, files: Sequence[Mapping[str, Any]]) -> CommitOutcome:
        """Make the files of a transaction visible that is decided to be committed."""
        if missing := self._show(name, files):
            return CommitOutcome.unknown(
                f"{name}: it is decided that {self}/{missing} becomes visible, and the file is "
                f"missing, as is {_staged(name, 0).rpartition('-')[0]}-…: a reader of the folder "
                "or somebody else has deleted it"
            )
        self._files().delete([_mark(name)])
        return CommitOutcome.COMMITTED

    def _show(self, name: str, files: Sequence[Mapping[str, Any]]) -> str:
        """Make files visible. Return the path of a file that does not exist, or ""."""
        for number, file in enumerate(files):
            if not self._files().move(_staged(name, number), file["path"]):
                return str(file["path"])
        return ""

    # ------------------------------------------------------------------ abort, and what is in doubt
    def abort(self, transaction: Identity) -> None:
        name = transaction["transaction"]
        if self._files().put_once(_decision(name), _ABORTED) != _ABORTED:
            raise CommittedError(f"{name}: {self}/{_decision(name)} says that it is committed")
        self._discard(name)

    def _discard(self, name: str) -> None:
        """Delete the files of an aborted transaction, then its mark."""
        if (mark := self._files().get(_mark(name))) is not None:
            staged = [_staged(name, number) for number in range(len(json.loads(mark)))]
            self._files().delete(staged)
            self._files().delete([_mark(name)])

    def owns(self, job: str, transaction: Identity) -> bool:
        with suppress(LookupError, TypeError, ValueError):
            return _app(TransactionId.parse(transaction["transaction"])) == app_of(job, self.name)
        return False

    def in_doubt(self, job: str) -> Iterable[Identity]:
        if self._is_missing():
            return []
        app = app_of(job, self.name)
        marked = self._marked(app)
        # after the marks, because a mark outlives the decision for a moment
        decided = self._decided(app) if marked else {}
        return [{"transaction": name} for name in marked if name not in decided]

    def _marked(self, app: str) -> list[str]:
        """Return the names of the transactions that have a mark."""
        names = self._files().names(f"_tpc/{app}/pre-committed")
        return [name for name in names if _is_of(app, name)]

    def _decided(self, app: str) -> dict[str, bool]:
        """Return the names of the transactions that are decided: True for a committed one."""
        sizes = self._files().sizes(f"_tpc/{app}/decided")
        return {name: size > 0 for name, size in sizes.items() if _is_of(app, name)}

    def purge(self, checkpoint: Checkpoint) -> None:
        """Delete old decisions, and what processes left that died in a task, a commit or an abort.

        The decisions about the newest committed checkpoint stay.
        """
        app = app_of(checkpoint.job, self.name)
        files = self._files()
        # in this order, because a file is staged before its mark, and marked before the decision
        staged = files.names(f"_tpc/{app}/staged")
        marked = self._marked(app)
        decided = self._decided(app)
        newest = _newest(decided).get(checkpoint.lineage, -1)

        def is_before(name: str, number: int) -> bool:
            parsed = TransactionId.parse(name)
            return parsed.lineage == checkpoint.lineage and parsed.checkpoint < number

        old = checkpoint.oldest_retained
        for name in marked:
            if name in decided and is_before(name, old):
                if decided[name]:
                    self._show(name, json.loads(files.get(_mark(name)) or b"[]"))
                    files.delete([_mark(name)])
                else:
                    self._discard(name)
        waiting = {name for name in marked if name not in decided}
        dead = [
            f"_tpc/{app}/staged/{file}"
            for file in staged
            if _is_of(app, name := file.rpartition("-")[0])
            and name not in waiting
            and is_before(name, old)
        ]
        files.delete(dead)
        files.delete(
            [
                _decision(name)
                for name, committed in decided.items()
                if is_before(name, min(old, newest) if committed else old)
            ]
        )

    def committed_checkpoints(self, job: str) -> Mapping[str, int]:
        return {} if self._is_missing() else _newest(self._decided(app_of(job, self.name)))

    def audit(self, job: str, parts: Sequence[Part], *, quick: bool = False) -> Audit:
        decided = self._decided(app_of(job, self.name))
        return Audit([self._holding(part, decided) for part in parts])

    def _holding(self, part: Part, decided: Mapping[str, bool]) -> Holding:
        known = {c.transaction["transaction"] for c in part.committables}
        unnamed = tuple(
            name
            for name, committed in decided.items()
            if committed and name not in known and _is_in(part, TransactionId.parse(name))
        )
        files = [file for c in part.committables for file in c.proof["files"]]
        sizes = side_by_side(self._files().size, [file["path"] for file in files])
        if altered := [
            file for file, size in zip(files, sizes, strict=True) if size != file["size"]
        ]:
            why = (
                f"{len(altered)} of its files, such as {altered[0]['path']}, were deleted or "
                "altered by somebody, for example by a job that compacts them"
            )
            return Holding(remarks=(why,), unexpected=unnamed)
        return Holding(rows=sum(file["rows"] for file in files), unexpected=unnamed)


def _newest(decided: Mapping[str, bool]) -> dict[str, int]:
    """Return the newest committed checkpoint of each lineage."""
    newest = dict[str, int]()
    for name in (TransactionId.parse(text) for text, committed in decided.items() if committed):
        newest[name.lineage] = max(name.checkpoint, newest.get(name.lineage, -1))
    return newest


def _is_in(part: Part, name: TransactionId) -> bool:
    return (name.lineage, name.checkpoint) == (part.lineage, part.checkpoint_id)


def _app(name: TransactionId) -> str:
    """Return what `app_of` does, for a parsed name, whose job and sink are tokens already."""
    return f"tpc.{name.job}.{name.sink}"


def _is_of(app: str, text: str) -> bool:
    """Tell whether a text is the name of a transaction of `app`."""
    with suppress(ValueError):
        return _app(TransactionId.parse(text)) == app
    return False


def _path(folder: str, name: str) -> str:
    return f"_tpc/{_app(TransactionId.parse(name))}/{folder}/{name}"


def _staged(name: str, number: int) -> str:
    return f"{_path('staged', name)}-{number}"


def _mark(name: str) -> str:
    return _path("pre-committed", name)


def _decision(name: str) -> str:
    return _path("decided", name)
