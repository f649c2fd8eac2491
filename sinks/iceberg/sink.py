"""A sink that appends to Iceberg tables, by pyiceberg."""

from __future__ import annotations

import base64
import io
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as fs
import pyarrow.types as at
import pydantic
import pyiceberg.io.pyarrow as by_arrow
from pyiceberg.avro.decoder import new_decoder
from pyiceberg.avro.encoder import BinaryEncoder
from pyiceberg.avro.resolver import construct_writer, resolve_reader
from pyiceberg.catalog import load_catalog
from pyiceberg.exceptions import CommitFailedException, NoSuchTableError, ValidationError
from pyiceberg.io.pyarrow import ArrowProjectionVisitor as Visitor
from pyiceberg.io.pyarrow import (
    PyArrowFile,
    PyArrowFileIO,
    _dataframe_to_data_files,
    schema_to_pyarrow,
)
from pyiceberg.manifest import DataFile, ManifestContent, data_file_with_partition
from pyiceberg.schema import Schema
from pyiceberg.table import Table, TableProperties, Transaction
from pyiceberg.table.metadata import TableMetadata, TableMetadataUtil
from pyiceberg.table.refs import SnapshotRefType
from pyiceberg.table.update import (
    AddSnapshotUpdate,
    AssertTableUUID,
    SetSnapshotRefUpdate,
    TableUpdate,
)
from pyiceberg.transforms import DayTransform
from pyiceberg.typedef import IcebergBaseModel
from pyiceberg.types import StructType
from pyiceberg.utils.concurrent import ExecutorFactory

from sinks._util.threads import ThreadPool, side_by_side
from sinks.base import Sink
from sinks.errors import ConfigurationError, SchemaMismatch
from sinks.lake.files import Files, make_durable
from sinks.lake.sink import Evolution, File, LakeMemory, LakeSink, LakeTable, Outrun

_BARE: Any = {
    "snapshots": [],
    "snapshot_log": [],
    "metadata_log": [],
    "refs": {},
    "current_snapshot_id": None,
}
"""Changes to a table's metadata that leave out its history, which tasks do not need."""
_COUNTS = by_arrow.MetricsMode(by_arrow.MetricModeTypes.COUNTS)
_ONE_ROW_GROUP = {TableProperties.PARQUET_ROW_GROUP_LIMIT: str(1 << 30)}
"""A property that gives each file one row group. If a file has several, pyiceberg leaves row groups
without bounds out of the file's bounds, for example where a string is longer than 4 KiB. Readers
would then miss the rows of these row groups."""
_FORMAT = 2
"""The version of Iceberg's format that pyiceberg can write and this sink was made for."""
_OF_STORES = (
    "adls.",
    "client.",
    "gcs.",
    "hdfs.",
    "s3.",
    "buffer-size",
    "DEFAULT_NETLOC",
    "DEFAULT_SCHEME",
)
"""Beginnings of the names of the properties with which pyiceberg opens files. A catalog adds
properties of its own, and objects that cannot travel to tasks, so only these properties do."""
_FAILS = {("identity", "float"), ("identity", "double"), ("truncate", "binary"), ("bucket", "time")}
"""Transforms and types of partition columns with which pyiceberg duplicates rows, or fails."""


def _with_nulls(build: Callable[..., Any]) -> Callable[..., Any]:
    """Correct a method of pyiceberg that makes a NULL list, or map, of structs an empty one."""

    def built(visitor: Visitor, kind: object, given: Any, *parts: object) -> Any:
        made = build(visitor, kind, given, *parts)
        if made is not None and given.null_count:
            made = pc.if_else(given.is_valid(), made, None).cast(made.type)  # which has field ids
        return made

    return built


for _name in ("list", "map"):
    setattr(Visitor, _name, _with_nulls(getattr(Visitor, _name)))


def _or_without_bounds(collect: Callable[..., Any]) -> Callable[..., Any]:
    """Correct a function of pyiceberg that fails if Python has no such bound.

    That is so for a year beyond 9999, or a string that ends with U+D800. The columns of such a file
    get counts only.
    """

    def collected(stats_columns: Mapping[int, Any], **of: Any) -> Any:
        try:
            statistics = collect(stats_columns=stats_columns, **of)
            statistics.to_serialized_dict()
            return statistics
        except (OverflowError, UnicodeEncodeError):
            counts = {id: replace(column, mode=_COUNTS) for id, column in stats_columns.items()}
            return collect(stats_columns=counts, **of)

    return collected


by_arrow.data_file_statistics_from_parquet_metadata = _or_without_bounds(
    by_arrow.data_file_statistics_from_parquet_metadata
)


def _by_whole_days(of: Callable[..., Any]) -> Callable[..., Any]:
    """Correct the day transform of pyiceberg for times before 1970.

    pyiceberg assigns the last second of such a day to the next day, where readers miss its rows.
    """

    def transform(by: DayTransform[Any], source: object) -> Callable[[Any], Any]:
        days = of(by, source)
        moment = pa.timestamp("us")
        return lambda given: days(
            pc.floor_temporal(given.cast(moment), unit="day")
            if at.is_timestamp(given.type)
            else given
        )

    return transform


DayTransform.pyarrow_transform = _by_whole_days(DayTransform.pyarrow_transform)  # type: ignore[method-assign]


class TableFiles(Files):
    """The files of one table, by pyiceberg.

    A path is whole, or it is below the table's location.
    """

    def __init__(self, location: str, properties: Mapping[str, str]) -> None:
        self.place = location, properties
        self._location = location.rstrip("/")
        self.properties = dict(properties)
        self._io = PyArrowFileIO(self.properties)

    def put(self, path: str, data: bytes) -> None:
        with self._io.new_output(self._whole(path)).create(overwrite=True) as stream:
            stream.write(data)
        self.settle([path])

    def settle(self, paths: Sequence[str]) -> None:
        """Make files durable that are written already. Only local files need this."""
        for path in paths:
            scheme, _, place = PyArrowFileIO.parse_location(self._whole(path), self.properties)
            if scheme == "file":
                _, _, root = PyArrowFileIO.parse_location(self._location, self.properties)
                make_durable(Path(place), Path(root))

    def get(self, path: str) -> bytes | None:
        with suppress(FileNotFoundError), self._io.new_input(self._whole(path)).open() as stream:
            return bytes(stream.read())
        return None

    def names(self, folder: str) -> list[str]:
        scheme, netloc, place = PyArrowFileIO.parse_location(self._whole(folder), self.properties)
        entries = self._io.fs_by_scheme(scheme, netloc).get_file_info(
            fs.FileSelector(place, allow_not_found=True)
        )
        return [entry.base_name for entry in entries]

    def delete(self, paths: Sequence[str]) -> None:
        side_by_side(self._delete, paths)

    def _delete(self, path: str) -> None:
        with suppress(FileNotFoundError):
            self._io.delete(self._whole(path))

    def exists(self, path: str) -> bool:
        return bool(self._io.new_input(self._whole(path)).exists())

    def _whole(self, path: str) -> str:
        return path if urlsplit(path).scheme or path.startswith("/") else f"{self._location}/{path}"


class IcebergSink(LakeSink):
    """A sink that appends rows to an Iceberg table.

    Each checkpoint is one snapshot.
    """

    system = "Apache Iceberg"

    def __init__(
        self,
        table: str,
        *,
        catalog: str | Mapping[str, str],
        branch: str = "main",
        create_table: bool = False,
        schema_evolution: Evolution = "none",
        name: str | None = None,
        transform: Callable[..., Any] | None = None,
        dead_letters: Sink | None = None,
        max_dead_letters: int | float = 1000,
    ) -> None:
        """Set up the sink; nothing is opened yet.

        * `table` is `NAMESPACE.TABLE`.
        * `catalog` has pyiceberg's properties (`name`, `type`, `uri`, `warehouse` …), or is the
          name of a catalog in pyiceberg's configuration file.
        * `branch` is the branch of the table that gets the rows. It must exist, unless it is
          `main`.
        * `create_table` creates a missing table from the first batch.

        Raises ConfigurationError for options that no table can have.
        """
        super().__init__(
            name or table, schema_evolution, create_table, transform, dead_letters, max_dead_letters
        )
        if "." not in table:
            raise ConfigurationError(
                f"sink {self.name!r}: a table of Iceberg is NAMESPACE.TABLE, not {table!r}"
            )
        self.table = table
        self._catalog = catalog
        self._branch = branch

    def __str__(self) -> str:
        return self.table

    # ------------------------------------------------------------------ the table
    def check(self, schema: pa.Schema) -> None:
        if any(map(_lacks_name, schema)):
            raise SchemaMismatch(
                f"sink {self.name!r}: a column, or a field of a struct, has an empty name, which "
                "pyiceberg cannot write: give it another one in Spark"
            )
        super().check(schema)

    def close(self) -> None:
        if self._handle is not None:
            self._handle.catalog.close()
        super().close()

    def _look(self) -> LakeTable | None:
        if not isinstance(ExecutorFactory.get_or_create(), ThreadPool):
            ExecutorFactory._instance = ThreadPool(ExecutorFactory.max_workers())
        catalog = self._handle.catalog if self._handle is not None else self._open_catalog()
        try:
            self._handle = catalog.load_table(self.table)
        except Exception as error:
            catalog.close()
            self._handle = None
            if isinstance(error, NoSuchTableError):
                return None
            if unknown := _unknown_to_pyiceberg(error):
                raise ConfigurationError(
                    f"sink {self.name!r}: pyiceberg cannot read the metadata of {self.table}: "
                    f"{unknown}. Its table has something newer than format version {_FORMAT}: use "
                    "a table of that version"
                ) from error
            raise
        metadata = self._handle.metadata
        columns = schema_to_pyarrow(metadata.schema(), include_field_ids=False)
        layout = (
            f"{metadata.format_version}.{metadata.default_spec_id}.{metadata.current_schema_id}"
        )
        mine = {
            key: value for key, value in metadata.properties.items() if not key.startswith("tpc.")
        }
        plain = metadata.model_copy(update=_BARE | {"properties": mine | _ONE_ROW_GROUP})
        # the method of version 3 itself raises NotImplementedError
        text = IcebergBaseModel.model_dump_json(plain)
        known = self._handle.io.properties
        place = (
            metadata.location,
            {key: value for key, value in known.items() if key.startswith(_OF_STORES)},
        )
        # the table may be another one, or have other credentials
        if getattr(self._store, "place", None) != place:
            self._store = TableFiles(*place)
        where = self.table if self._branch == "main" else f"{self.table}, branch {self._branch}"
        parts = [
            str(metadata.schema().find_column_name(field.source_id))
            for field in metadata.spec().fields
        ]
        return LakeTable(f"{where} ({metadata.table_uuid})", columns, parts, layout, (text, *place))

    def _open_catalog(self) -> Any:
        import sinks.iceberg.rest  # noqa: F401  # here, because tasks do not call the catalog

        return (
            load_catalog(self._catalog)
            if isinstance(self._catalog, str)
            else load_catalog(**self._catalog)
        )

    def _location(self) -> str:
        return str(self._handle.metadata.location) if self._look() else ""

    def _create(self, schema: pa.Schema) -> None:
        with self._open_catalog() as catalog:
            catalog.create_namespace_if_not_exists(self.table.rpartition(".")[0])
            catalog.create_table_if_not_exists(self.table, schema)

    def _problems(self) -> Iterable[str]:
        table: Table = self._handle
        yield from self._of_other_format()
        if (kind := table.properties.get("write.format.default", "parquet")) != "parquet":
            yield (
                f"its files are {kind}, and this sink writes parquet: set write.format.default to "
                "that"
            )
        for part in table.spec().fields:
            by = str(part.transform)
            kind = str(table.schema().find_type(part.source_id))
            if (by.partition("[")[0], kind) in _FAILS:
                yield (
                    f"it is partitioned by {part.name!r}, {by} of a {kind}: it doubles rows or "
                    "fails, use another"
                )
        by_column: dict[int, list[str]] = {}
        for part in table.spec().fields:
            by_column.setdefault(part.source_id, []).append(f"{part.name!r} ({part.transform})")
        for source, parts in by_column.items():
            if len(parts) > 1:
                column = table.schema().find_column_name(source)
                yield (
                    f"its partition fields {' and '.join(parts)} are of one column, {column!r}, "
                    "which pyiceberg cannot write: drop all but one (ALTER TABLE … DROP PARTITION "
                    "FIELD in Spark)"
                )
        ref = table.metadata.refs.get(self._branch)
        yield from self._without_branch()
        if ref is not None and ref.snapshot_ref_type != SnapshotRefType.BRANCH:
            yield f"{self._branch!r} is a tag there, which takes no commits: name a branch"
        if ":memory:" in str(table.catalog.properties.get("uri")):
            yield (
                "its catalog is in the memory of this process, where no other sees it: use a file "
                "or a server"
            )

    def _of_other_format(self) -> list[str]:
        version = self._handle.metadata.format_version
        why = (
            f"it has format version {version}, and this sink writes version {_FORMAT}: use a table "
            "of that"
        )
        return [] if version == _FORMAT else [why]

    def _without_branch(self) -> list[str]:
        gone = self._branch != "main" and self._branch not in self._handle.metadata.refs
        create = (
            "create it. If it was dropped, create it at its last snapshot, or its earlier rows "
            "stay out"
        )
        return [f"it has no branch {self._branch!r}: {create}"] if gone else []

    def _add_columns(self, columns: pa.Schema) -> None:
        with self._handle.update_schema() as update:
            update.union_by_name(columns)

    # ------------------------------------------------------------------ in the task
    def _open_files(self) -> Files:
        return TableFiles(*(self._table or self._require_table()).details[1:])

    def _write_files(
        self, table: LakeTable, rows: pa.Table, name: str, begun: list[str]
    ) -> list[File]:
        text, location, properties = table.details
        metadata = TableMetadataUtil.parse_raw(text)
        unique = _unique(name)
        recording = Recording(dict(properties))
        recording.begun = begun
        files = list(_dataframe_to_data_files(metadata, rows, recording, unique))
        TableFiles(location, properties).settle([file.file_path for file in files])
        return [_to_json(file, metadata) for file in files]

    def _made_by(self, text: str, paths: Sequence[str]) -> Sequence[str]:
        unique = {str(_unique(f"{text}-{number}")) for number in range(len(paths))}
        return [
            path
            for path in map(str, paths)
            if any(each in path.rpartition("/")[2] for each in unique)
        ]

    # ------------------------------------------------------------------ snapshots
    def _remembered(self, app: str) -> LakeMemory:
        return LakeMemory.from_json(self._handle.properties.get(app))

    def _append(
        self, app: str, memory: LakeMemory, files: Sequence[File], about: Mapping[str, str]
    ) -> None:
        """Commit files and memory in one step, without pyiceberg's own loop.

        The retries of that loop commit on top of what nobody has looked at. After a conflict the
        loop deletes manifests, and a commit whose answer got lost may have put them into the table.
        """
        table: Table = self._handle
        metadata = table.metadata
        # pyiceberg would create a branch without its earlier rows, and fails at another format
        for reason in [*self._of_other_format(), *self._without_branch()]:
            raise ConfigurationError(f"sink {self.name!r} cannot commit to {self.table}: {reason}")
        try:
            transaction = _Transaction(table)
            transaction.set_properties({app: memory.to_json()})
            update = transaction.update_snapshot(
                snapshot_properties=dict(about), branch=self._branch
            )
            columns = {part.source_id for spec in metadata.partition_specs for part in spec.fields}
            # pyiceberg fails to merge if one of these columns was dropped
            merges = files and columns <= metadata.schema().field_ids
            with update.merge_append() if merges else update.fast_append() as append:
                for file in files:
                    append.append_data_file(_from_json(file, metadata))
            same = AssertTableUUID(uuid=metadata.table_uuid)
            updates = tuple(
                _in_order(_with_retention(each, metadata), metadata)
                for each in transaction._updates
            )
            table._do_commit(updates, (*transaction._requirements, same))
        except (CommitFailedException, ValueError) as error:
            # a commit to another branch was first if the error is about the sequence number
            if isinstance(error, ValueError) and "last sequence number" not in str(error):
                raise
            raise Outrun(error) from error

    def _rows_held(self, paths: Sequence[str]) -> Mapping[str, int]:
        table: Table = self._handle
        wanted = set(paths)
        snapshot = table.snapshot_by_name(self._branch)
        rows: dict[str, int] = {}
        for manifest in snapshot.manifests(table.io) if snapshot else ():  # the newest first
            if len(rows) == len(wanted):
                break
            if manifest.content is ManifestContent.DATA:
                files = (entry.data_file for entry in manifest.fetch_manifest_entry(table.io))
                rows |= {
                    file.file_path: file.record_count for file in files if file.file_path in wanted
                }
        return rows


def _with_retention(update: TableUpdate, metadata: TableMetadata) -> TableUpdate:
    """Keep the settings of a branch that say how long its snapshots stay.

    pyiceberg moves a branch without these settings.
    """
    if (
        not isinstance(update, SetSnapshotRefUpdate)
        or (ref := metadata.refs.get(update.ref_name)) is None
    ):
        return update
    names = ("min_snapshots_to_keep", "max_snapshot_age_ms", "max_ref_age_ms")
    return update.model_copy(update={name: getattr(ref, name) for name in names})


def _in_order(update: TableUpdate, metadata: TableMetadata) -> TableUpdate:
    """Make no snapshot older than the snapshot before it, even if the clock is behind.

    Catalogs refuse a log that is out of order.
    """
    if not isinstance(update, AddSnapshotUpdate):
        return update
    newest = max(
        [metadata.last_updated_ms, *(entry.timestamp_ms for entry in metadata.snapshot_log)]
    )
    later = max(update.snapshot.timestamp_ms, newest)
    return update.model_copy(
        update={"snapshot": update.snapshot.model_copy(update={"timestamp_ms": later})}
    )


def _unknown_to_pyiceberg(error: Exception) -> str:
    """Say on one line what pyiceberg does not know in a table's metadata.

    Return "" for another error. Return "", too, for an answer that is not metadata. A gateway gives
    such an answer, and there may be another answer when the catalog is asked again.
    """
    cause = error.__cause__ if isinstance(error, ValidationError) else error
    if not isinstance(cause, pydantic.ValidationError):
        return ""
    parts = cause.errors(include_url=False)
    if any(part["type"] in ("json_invalid", "missing") for part in parts):
        return ""
    return "; ".join(f"{'.'.join(map(str, part['loc'])) or 'it'}: {part['msg']}" for part in parts)


# ---------------------------------------------------- data files as JSON, for the way to the commit
def _unique(name: str) -> uuid.UUID:
    """Return the UUID with which pyiceberg names the files that one call writes."""
    return uuid.uuid5(uuid.NAMESPACE_OID, name)


def _lacks_name(field: pa.Field) -> bool:
    """Tell whether the field, or a field at any depth of it, has an empty name."""
    children = [field.type.field(number) for number in range(field.type.num_fields)]
    return not field.name or any(map(_lacks_name, children))


def _to_json(file: DataFile, table: TableMetadata) -> dict[str, Any]:
    """Return a data file as JSON: its entry in a manifest, with path and rows beside the entry."""
    stream = io.BytesIO()
    construct_writer(_fields(table)).write(BinaryEncoder(stream), file)
    return {
        "path": file.file_path,
        "rows": file.record_count,
        "avro": base64.b64encode(stream.getvalue()).decode(),
    }


def _from_json(file: Mapping[str, Any], table: TableMetadata) -> DataFile:
    """Return the data file that `_to_json` made JSON of."""
    fields = Schema(*_fields(table).fields)
    reader = resolve_reader(fields, fields, read_types={-1: DataFile})
    parsed: DataFile = reader.read(new_decoder(base64.b64decode(file["avro"])))
    parsed.spec_id = table.default_spec_id
    return parsed


def _fields(table: TableMetadata) -> StructType:
    return data_file_with_partition(
        table.spec().partition_type(table.schema()), table.format_version
    )


class _Transaction(Transaction):
    """A transaction that makes its metadata once for each update.

    pyiceberg itself makes the metadata at each look, with a deep copy of all snapshots. An append
    looks some fifteen times.
    """

    _made: tuple[int, TableMetadata] | None = None

    @property
    def table_metadata(self) -> TableMetadata:
        if self._made is None or self._made[0] != len(self._updates):
            self._made = len(self._updates), super().table_metadata
        return self._made[1]


class Recording(PyArrowFileIO):
    """A file IO that adds each path to `begun` before the file exists."""

    begun: list[str]

    def new_output(self, location: str) -> PyArrowFile:
        self.begun.append(location)
        return super().new_output(location)
