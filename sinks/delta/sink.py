"""A sink that appends to Delta tables, by deltalake (delta-rs)."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pyarrow.types as at
from deltalake import CommitProperties, DeltaTable, Schema, Transaction
from deltalake.exceptions import CommitFailedError, TableNotFoundError
from deltalake.transaction import AddAction

from sinks.arrow.convert import RefusedValue, in_years
from sinks.arrow.types import is_bytes, is_text
from sinks.base import Sink
from sinks.errors import BadValue, ConfigurationError
from sinks.lake.columns import partitions, without_nan
from sinks.lake.files import ObjectFiles, address, files_at
from sinks.lake.sink import (
    Evolution,
    File,
    LakeMemory,
    LakeSink,
    LakeTable,
    LakeTransaction,
    Outrun,
    app_of,
)
from sinks.transaction import Checkpoint

_FEATURES = {
    *("appendOnly", "changeDataFeed", "checkConstraints", "columnMapping", "deletionVectors"),
    *("generatedColumns", "invariants", "timestampNtz", "v2Checkpoint"),
}
"""Features that a table may have. deltalake supports each of them, and either an append can ignore
the feature, or `_problems` looks how the table uses it."""
_RULES = {
    **dict.fromkeys(
        ("delta.generationExpression", "delta.identity.start", "delta.invariants"),
        "use a table without",
    ),
    "__CHAR_VARCHAR_TYPE_STRING": "make it a string, by ALTER COLUMN … TYPE STRING in Spark",
}
_FORGETS = "delta.setTransactionRetentionDuration"
_COLUMNS = 32
"""How many columns of a file get statistics, as with Delta's own writers. If a table has one of the
settings in `_CHOSEN`, which say how many or which columns, all columns get them."""
_CHOSEN = {"delta.dataSkippingNumIndexedCols", "delta.dataSkippingStatsColumns"}
_LONGEST = 32
"""The most characters that a bound takes from a string. An upper bound has one more."""
_LAST_MOMENT = 253_402_300_799_999_000
"""Microseconds from 1970 to the last whole millisecond of the year 9999. Readers take no bound
beyond it."""


class DeltaSink(LakeSink):
    """A sink that appends rows to a Delta table.

    Each checkpoint is one entry of the table's log.
    """

    system = "Delta Lake"

    def __init__(
        self,
        uri: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, str] | None = None,
        partition_by: Sequence[str] = (),
        create_table: bool = False,
        schema_evolution: Evolution = "none",
        name: str | None = None,
        transform: Callable[..., Any] | None = None,
        dead_letters: Sink | None = None,
        max_dead_letters: int | float = 1000,
    ) -> None:
        """Set up the sink; nothing is opened yet.

        * `uri` is a folder, or a URI that begins with `s3://`, `gs://` or `az://`.
        * `storage_options` are deltalake's. Environment variables work, too.
        * `create_table` creates a missing table from the first batch, with `partition_by`.

        Raises ConfigurationError for options that no table can have, and for a URI with
        credentials.
        """
        self._uri = address(uri, name or "")
        super().__init__(
            name or self._uri.rpartition("/")[2],
            schema_evolution,
            create_table,
            transform,
            dead_letters,
            max_dead_letters,
        )
        self._options = dict(storage_options or {})
        self._partition_by = [partition_by] if isinstance(partition_by, str) else list(partition_by)
        self._entry: tuple[str, object] = "", None
        """Path and stamp of the newest log entry that was read. If another file has that path now,
        the table is another one, too."""

    def __str__(self) -> str:
        return self._uri

    # ------------------------------------------------------------------ the table
    def _look(self) -> LakeTable | None:
        try:
            if self._handle is None:
                self._handle = DeltaTable(self._uri, storage_options=self._options)
            else:
                self._handle.update_incremental()
                if self._files().stamp(self._entry[0]) != self._entry[1]:  # type: ignore[attr-defined]
                    self._handle = None  # it is another table
                    return self._look()
            entry = f"_delta_log/{self._handle.version():020d}.json"
            self._entry = entry, self._files().stamp(entry)  # type: ignore[attr-defined]
        except Exception as error:
            self._handle = None
            if isinstance(error, TableNotFoundError):
                return None
            raise
        columns = _arrow(self._handle.schema())
        parts = self._handle.metadata().partition_columns
        # Without the metadata of fields within structs: deltalake gives it in another order at each
        # look, and files do not depend on it.
        shown = columns.to_string(show_field_metadata=False, show_schema_metadata=False)
        layout = hashlib.sha256(f"{shown}{parts}".encode()).hexdigest()[:16]
        chosen = _CHOSEN & self._handle.metadata().configuration.keys()
        most = len(columns) if chosen else _COLUMNS
        return LakeTable(
            f"{self._uri} ({self._handle.metadata().id})", columns, parts, layout, most
        )

    def _location(self) -> str:
        return self._uri

    def _create(self, schema: pa.Schema) -> None:
        options: Any = {
            "storage_options": self._options,
            "partition_by": self._partition_by or None,
        }
        DeltaTable.create(self._uri, schema, mode="ignore", **options)

    def _problems(self) -> Iterable[str]:
        table: DeltaTable = self._handle
        settings = table.metadata().configuration
        for name in sorted(settings):
            if name.startswith("delta.constraints."):
                yield f"it has a CHECK constraint, {name[18:]!r}, which nobody would ask: drop it"
        if settings.get("delta.columnMapping.mode", "none") != "none":
            yield (
                "its columns are mapped (delta.columnMapping.mode), which this sink cannot do: use "
                "a table without"
            )
        if _FORGETS in settings:
            yield f"{_FORGETS} lets its log forget what was committed: unset it"
        protocol = table.protocol()
        implied = ["identityColumns"] if protocol.min_writer_version == 6 else []
        if unknown := {*(protocol.writer_features or implied)} - _FEATURES:
            yield (
                f"it has features that deltalake cannot write: {', '.join(sorted(unknown))}: DROP "
                "FEATURE in Spark"
            )
        for column, metadata in _metadata(json.loads(table.schema().to_json()), ""):
            for rule in sorted(_RULES.keys() & metadata):
                yield (
                    f"column {column!r} has {rule}, which writers keep and this sink cannot: "
                    f"{_RULES[rule]}"
                )
        columns = _arrow(table.schema())
        parts = table.metadata().partition_columns
        for name in parts:
            kind = columns.field(name).type
            if not (
                is_text(kind) or at.is_integer(kind) or at.is_date(kind) or at.is_boolean(kind)
            ):
                yield (
                    f"partition column {name!r} is no text, integer, date or boolean: partition by "
                    "another one"
                )
        if len(parts) == len(columns):
            yield (
                "all its columns are partition columns, so that readers find no rows: partition by "
                "fewer"
            )
        if self._partition_by and self._partition_by != parts:
            yield (
                f"it is partitioned by {parts}, and partition_by is {self._partition_by}: leave "
                "that out"
            )

    def _add_columns(self, columns: pa.Schema) -> None:
        self._handle.alter.add_columns(Schema.from_arrow(columns).fields)

    def weaknesses(self) -> Sequence[str]:
        if "://" in self._uri and not self._open_files().puts_once(f"_tpc/probe-{time.time_ns()}"):
            return (
                f"the store of {self._uri} ignores the condition of a put: two writers may "
                "overwrite each other",
            )
        return super().weaknesses()

    # ------------------------------------------------------------------ in the task
    def _open_files(self) -> ObjectFiles:
        return files_at(self._uri, self._options)

    def write(self, transaction: LakeTransaction, batch: pa.RecordBatch) -> None:
        for name in transaction.table.parts:
            texts = batch[name] if name in batch.schema.names else None
            if texts is not None and is_text(texts.type) and pc.any(pc.equal(texts, "")).as_py():
                why = f"an empty text in the partition column {name!r}, which Delta reads as NULL"
                raise BadValue(
                    f"{self._uri}, partition {transaction.context.subtask}: {why}"
                ).because(why)
        super().write(transaction, batch)

    def _write_files(
        self, table: LakeTable, rows: pa.Table, name: str, begun: list[str]
    ) -> list[File]:
        files = []
        for number, (values, part) in enumerate(partitions(rows, table.parts)):
            path = f"part-{name}-{number}.zstd.parquet"
            stream = io.BytesIO()
            pq.write_table(part, stream, compression="zstd", write_statistics=without_nan(part))
            data = stream.getvalue()
            begun.append(path)
            self._files().put(path, data)
            size = len(data)
            stats = json.dumps(_statistics(part, table.details), ensure_ascii=False)
            files.append(
                {
                    "path": path,
                    "size": size,
                    "rows": part.num_rows,
                    "values": values,
                    "stats": stats,
                }
            )
        return files

    def _made_by(self, text: str, paths: Sequence[str]) -> Sequence[str]:
        return [
            path for path in map(str, paths) if path.startswith(f"part-{text}-") and "/" not in path
        ]

    # ------------------------------------------------------------------ the log
    def _remembered(self, app: str) -> LakeMemory | None:
        """Return what the table remembers of `app`, from a file whose number the log has.

        The log keeps only a number for each app. So the memory is in a file of that number, which
        is put before the log has the number. Raises ConfigurationError if the file is gone, or if
        the log may have forgotten the number.
        """
        number = self._handle.transaction_version(app)
        if number is None:
            if _FORGETS in self._handle.metadata().configuration:
                raise ConfigurationError(
                    f"sink {self.name!r}: {self._uri} has {_FORGETS}, so its log may have "
                    "forgotten what this sink has committed: look whether the newest checkpoint "
                    "is in the table, and unset the property [EO-LAKE-HISTORY]"
                )
            return LakeMemory()
        if (text := self._files().get(_memory(app, number))) is None:
            self._look()
            if self._handle is None or self._handle.transaction_version(app) != number:
                return None
            raise ConfigurationError(
                f"sink {self.name!r}: {self._uri}/{_memory(app, number)} is gone, in which the "
                "table has what this sink has committed: restore the folder _tpc [EO-LAKE-HISTORY]"
            )
        return LakeMemory.from_json(text)

    def _append(
        self, app: str, memory: LakeMemory, files: Sequence[File], about: Mapping[str, str]
    ) -> None:
        table: DeltaTable = self._handle
        before = table.transaction_version(app) or 0
        now = int(time.time() * 1000)
        # a number that no other writer takes, and that is later than `before`
        number = max(before, time.time_ns()) + 1 + secrets.randbits(20)
        self._files().put(_memory(app, number), memory.to_json().encode())
        adds = [AddAction(f["path"], f["size"], f["values"], now, True, f["stats"]) for f in files]
        properties = CommitProperties(
            app_transactions=[Transaction(app, number, now)], custom_metadata=dict(about)
        )
        parts = table.metadata().partition_columns
        try:
            table.create_write_transaction(
                [*adds], "append", table.schema(), partition_by=parts, commit_properties=properties
            )
        except CommitFailedError as error:  # perhaps by this very commit, whose answer got lost
            raise Outrun(error) from error

    def purge(self, checkpoint: Checkpoint) -> None:
        super().purge(checkpoint)
        app = app_of(checkpoint.job, self.name)
        if self._handle is not None and (newest := self._handle.transaction_version(app)):
            numbers = map(_MEMORY.fullmatch, self._files().names(f"_tpc/{app}"))
            self._files().delete(
                [_memory(app, int(n[1])) for n in numbers if n and int(n[1]) < newest]
            )

    def _rows_held(self, paths: Sequence[str]) -> Mapping[str, int]:
        actions = pa.table(self._handle.get_add_actions(flatten=True)).select(
            ["path", "num_records"]
        )
        known = actions.filter(
            pc.is_in(actions["path"], pa.array(paths, actions["path"].type))
        ).drop_null()
        return dict(zip(*(column.to_pylist() for column in known), strict=True))


_MEMORY = re.compile(r"memory-(\d+)\.json")


def _memory(app: str, number: int) -> str:
    return f"_tpc/{app}/memory-{number}.json"


def _arrow(schema: Schema) -> pa.Schema:
    return pa.schema([field.remove_metadata() for field in pa.schema(schema.to_arrow())])


def _metadata(kind: Any, path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each column, and each field within a column, with its metadata.

    `kind` is a type of the schema, as the log has it. The name of a field begins with `path`.
    """
    if not isinstance(kind, dict):
        return
    for field in kind.get("fields", ()):
        where = f"{path}.{field['name']}" if path else field["name"]
        yield where, field["metadata"]
        yield from _metadata(field["type"], where)
    yield from _metadata(kind.get("elementType"), f"{path}[]")
    yield from _metadata(kind.get("keyType"), f"{path}{{}}")
    yield from _metadata(kind.get("valueType"), f"{path}{{}}")


# ---------------------------------------------------------------------- what the log says of a file
def _statistics(rows: pa.Table, most: int) -> dict[str, Any]:
    """Return the statistics of a file, of its first `most` columns.

    Either all columns that have values get bounds, apart from binary ones, or none does, because
    deltalake's readers miss rows if one of the bounds is missing.
    """
    flat = [name for name in rows.column_names[:most] if not at.is_nested(rows[name].type)]
    nulls = {name: rows[name].null_count for name in flat}
    some = [name for name in flat if nulls[name] < rows.num_rows and not is_bytes(rows[name].type)]
    bounds = [(name, found) for name in some if (found := _bounds(rows[name]))]
    low, high = ({name: found[end] for name, found in bounds} for end in (0, 1))
    ends = {"minValues": low, "maxValues": high} if len(bounds) == len(some) else {}
    return {"numRecords": rows.num_rows, **ends, "nullCount": nulls}


def _bounds(column: pa.ChunkedArray) -> tuple[Any, Any] | None:
    """Return a value that no value of the column is below, and one that none is above.

    Return None if the log can have no such bounds, for example because JSON has no form for them.
    """
    kind = column.type
    try:
        for chunk in column.chunks:
            in_years(chunk)
    except RefusedValue:
        return None  # deltalake cannot read a table with such a bound of a date
    if at.is_timestamp(kind):
        return _of_times(column)
    if at.is_floating(kind) and not pc.all(pc.is_finite(column)).as_py():
        return None  # Delta orders NaN above all numbers, Arrow nowhere
    ends = pc.min_max(column.cast(pa.string()) if at.is_date(kind) else column).as_py()
    low = ends["min"]
    high = ends["max"]
    if at.is_floating(kind):
        # -0.0 is below 0.0 for deltalake, and equal for Arrow
        return low or -0.0, high or 0.0
    if at.is_decimal(kind):
        exact = all(
            Decimal(text := repr(float(end))) == end and "e" not in text for end in (low, high)
        )
        return (float(low), float(high)) if exact else None
    if not isinstance(high, str):
        return low, high
    above = high if len(high) <= _LONGEST else high[:_LONGEST] + chr(0x10FFFF)
    return (low[:_LONGEST], above) if above >= high else None


def _of_times(column: pa.ChunkedArray) -> tuple[str, str] | None:
    """Return the bounds of times in whole milliseconds, as Delta has them.

    The lower bound is rounded down, and the upper bound is rounded up. Return None if readers would
    not take the upper bound.
    """
    counts = pc.min_max(column.cast(pa.timestamp("us", column.type.tz)).cast(pa.int64())).as_py()
    if counts["max"] > _LAST_MOMENT:
        return None
    bounds = pa.array([counts["min"] // 1000, -(-counts["max"] // 1000)]).cast(pa.timestamp("ms"))
    zone = "Z" if column.type.tz else ""
    return tuple(f"{text.replace(' ', 'T')}{zone}" for text in bounds.cast(pa.string()).to_pylist())  # type: ignore[return-value]
