"""Appends to Iceberg tables, by pyiceberg."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa
from pyiceberg.catalog import load_catalog
from pyiceberg.exceptions import CommitFailedException, NoSuchTableError
from pyiceberg.io.pyarrow import _dataframe_to_data_files, schema_to_pyarrow
from pyiceberg.manifest import ManifestContent
from pyiceberg.table import Table
from pyiceberg.table.metadata import TableMetadataUtil

from sinks.base import Sink
from sinks.errors import ConfigurationError
from sinks.iceberg.data_file import TableFiles, from_json, recording, to_json
from sinks.lake.files import Files
from sinks.lake.memory import Memory
from sinks.lake.sink import Evolution, File, LakeSink, LakeTable, Outrun

_BARE: Any = {"snapshots": [], "snapshot_log": [], "metadata_log": [], "refs": {}, "current_snapshot_id": None}


class IcebergSink(LakeSink):
    """Appends rows to an Iceberg table, whose every checkpoint is one snapshot."""

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
        """`table` is `NAMESPACE.TABLE`. `catalog` has pyiceberg's properties (`name`, `type`, `uri`, `warehouse` …), or
        is the name of one in its configuration file."""
        super().__init__(name or table, schema_evolution, create_table, transform, dead_letters, max_dead_letters)
        if "." not in table:
            raise ConfigurationError(f"sink {self.name!r}: a table of Iceberg is NAMESPACE.TABLE, not {table!r}")
        self.table, self._catalog, self._branch = table, catalog, branch

    def __str__(self) -> str:
        return self.table

    # ------------------------------------------------------------------ the table
    def close(self) -> None:
        if self._handle is not None:
            self._handle.catalog.close()
        super().close()

    def _look(self) -> LakeTable | None:
        catalog = self._handle.catalog if self._handle is not None else self._open_catalog()
        try:
            self._handle = catalog.load_table(self.table)
        except NoSuchTableError:
            catalog.close()
            self._handle = None
            return None
        metadata = self._handle.metadata
        columns = schema_to_pyarrow(metadata.schema(), include_field_ids=False)
        layout = f"{metadata.format_version}.{metadata.default_spec_id}.{metadata.current_schema_id}"
        mine = {key: value for key, value in metadata.properties.items() if not key.startswith("tpc.")}
        plain = metadata.model_copy(update=_BARE | {"properties": mine})
        place = metadata.location, self._handle.io.properties
        if getattr(self._store, "place", None) != place:  # it may be another table, or have other credentials
            self._store = TableFiles(*place)
        return LakeTable(f"{self.table} ({metadata.table_uuid})", columns, layout, (plain.model_dump_json(), *place))

    def _open_catalog(self) -> Any:
        return load_catalog(self._catalog) if isinstance(self._catalog, str) else load_catalog(**self._catalog)

    def _location(self) -> str:
        return str(self._handle.metadata.location)

    def _create(self, schema: pa.Schema) -> None:
        with self._open_catalog() as catalog:
            catalog.create_namespace_if_not_exists(self.table.rpartition(".")[0])
            catalog.create_table_if_not_exists(self.table, schema)

    def _problems(self) -> Iterable[str]:
        table: Table = self._handle
        if (version := table.metadata.format_version) != 2:
            yield f"it has format version {version}, and this sink writes version 2"
        if (kind := table.properties.get("write.format.default", "parquet")) != "parquet":
            yield f"its files are {kind} (write.format.default), and this sink writes parquet"
        if self._branch != "main" and self._branch not in table.metadata.refs:
            yield f"it has no branch {self._branch!r}: create it"
        if ":memory:" in str(table.catalog.properties.get("uri")):
            yield "its catalog is in the memory of this process: no other can see it"

    def _add_columns(self, columns: pa.Schema) -> None:
        with self._handle.update_schema() as update:
            update.union_by_name(columns)

    def weaknesses(self) -> Sequence[str]:
        local = self._look() is not None and self._location().startswith(("/", "file:"))
        why = f"{self.table} is in a local folder, where pyiceberg does not fsync: a power failure may lose rows"
        return (why,) if local else ()

    # ------------------------------------------------------------------ in the task
    def _open_files(self) -> Files:
        return TableFiles(*(self._table or self._require_table()).details[1:])

    def _write_files(self, table: LakeTable, rows: pa.Table, name: str, begun: list[str]) -> list[File]:
        text, location, properties = table.details
        metadata, unique = TableMetadataUtil.parse_raw(text), uuid.uuid5(uuid.NAMESPACE_OID, name)
        files = list(_dataframe_to_data_files(metadata, rows, recording(properties, begun), unique))
        TableFiles(location, properties).settle([file.file_path for file in files])
        return [to_json(file, metadata) for file in files]

    # ------------------------------------------------------------------ snapshots
    def _remembered(self, app: str) -> Memory:
        return Memory.from_json(self._handle.properties.get(app))

    def _append(self, app: str, memory: Memory, files: Sequence[File], about: Mapping[str, str]) -> None:
        """Without pyiceberg's own retries: they commit on top of what nobody has looked at."""
        table: Table = self._handle
        metadata = table.metadata
        once = {**metadata.properties, "commit.retry.num-retries": "0"}
        table.metadata = metadata.model_copy(update={"properties": once})
        try:
            transaction = table.transaction()
            transaction.set_properties({app: memory.to_json()})
            update = transaction.update_snapshot(snapshot_properties=dict(about), branch=self._branch)
            merges = files and metadata.properties.get("commit.manifest-merge.enabled") != "false"
            with update.merge_append() if merges else update.fast_append() as append:
                for file in files:
                    append.append_data_file(from_json(file, metadata))
            transaction.commit_transaction()
        except (CommitFailedException, ValueError) as error:
            if isinstance(error, ValueError) and "last sequence number" not in str(error):  # of another branch
                raise
            raise Outrun(error) from error

    def _rows_held(self, paths: Sequence[str]) -> Mapping[str, int]:
        table: Table = self._handle
        wanted, snapshot = set(paths), table.snapshot_by_name(self._branch)
        entries = (
            entry.data_file
            for manifest in (snapshot.manifests(table.io) if snapshot and wanted else ())
            if manifest.content is ManifestContent.DATA
            for entry in manifest.fetch_manifest_entry(table.io)
        )
        return {file.file_path: file.record_count for file in entries if file.file_path in wanted}
