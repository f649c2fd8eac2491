"""Lake tables as others see and change them: past the sinks."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake
from pyiceberg.catalog import load_catalog
from pyiceberg.transforms import IdentityTransform

from sinks.delta import DeltaSink
from sinks.iceberg import IcebergSink
from sinks.lake.sink import LakeSink
from sinks.testing import SCHEMA


class Lake:
    """A table of SCHEMA, and what an operator or another writer does with it."""

    kind: str

    def sink(self, **options: Any) -> LakeSink:
        raise NotImplementedError

    def create(self, schema: pa.Schema = SCHEMA) -> None:
        raise NotImplementedError

    def read(self) -> pa.Table:
        raise NotImplementedError

    def append(self, rows: pa.Table) -> None:
        raise NotImplementedError

    def files(self) -> list[Path]:
        """Of data, whether a reader knows them or not."""
        raise NotImplementedError

    def is_of(self, path: Path, transaction: str) -> bool:
        """Whether a file is the first that the transaction has written."""
        raise NotImplementedError

    def versions(self) -> int:
        """How many commits it has had."""
        raise NotImplementedError

    def close(self) -> None:
        pass

    def drop_column(self, name: str) -> None:
        raise NotImplementedError

    def rows(self) -> list[dict[str, Any]]:
        return list(self.read().select(SCHEMA.names).to_pylist())

    def names_found(self, name: str) -> list[str]:
        """By a reader that skips partitions."""
        raise NotImplementedError

    def ids(self) -> list[int]:
        return sorted(row["id"] for row in self.rows())


class DeltaLake(Lake):
    kind = "delta"

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.uri = str(folder / "delta")

    def sink(self, **options: Any) -> DeltaSink:
        return DeltaSink(self.uri, **{"name": "lake", **options})

    def create(self, schema: pa.Schema = SCHEMA, **options: Any) -> None:
        DeltaTable.create(self.uri, schema, **options)

    def table(self) -> DeltaTable:
        return DeltaTable(self.uri)

    def read(self) -> pa.Table:
        return self.table().to_pyarrow_table() if self.table().file_uris() else SCHEMA.empty_table()

    def append(self, rows: pa.Table) -> None:
        write_deltalake(self.uri, rows, mode="append")

    def files(self) -> list[Path]:
        return sorted(Path(self.uri).glob("*.parquet"))

    def is_of(self, path: Path, transaction: str) -> bool:
        return path.name.startswith(f"part-{transaction}-")

    def names_found(self, name: str) -> list[str]:
        found = self.table().to_pyarrow_table(filters=[("name", "=", name)])
        return list(found["name"].to_pylist())

    def versions(self) -> int:
        return self.table().version()

    def compact(self) -> None:
        self.table().optimize.compact()

    def drop_column(self, name: str) -> None:
        write_deltalake(self.uri, self.read().drop_columns([name]), mode="overwrite", schema_mode="overwrite")

    def repartition(self) -> None:
        write_deltalake(self.uri, self.read(), mode="overwrite", schema_mode="overwrite", partition_by=["name"])


class IcebergLake(Lake):
    kind = "iceberg"

    def __init__(self, folder: Path, uri: str = "") -> None:
        folder.mkdir(exist_ok=True)
        self.name = "test.orders"
        self._catalog: Any = None
        self.properties = {
            "name": "test",
            "type": "sql",
            "uri": uri or f"sqlite:///{folder}/catalog.db",
            "warehouse": f"file://{folder}/iceberg",
        }

    def sink(self, **options: Any) -> IcebergSink:
        return IcebergSink(self.name, **{"name": "lake", "catalog": self.properties, **options})

    def create(self, schema: pa.Schema = SCHEMA, **options: Any) -> None:
        with load_catalog(**self.properties) as catalog:
            catalog.create_namespace_if_not_exists("test")
            catalog.create_table(self.name, schema, **options)

    def table(self) -> Any:
        if self._catalog is None:
            self._catalog = load_catalog(**self.properties)
        return self._catalog.load_table(self.name)

    def close(self) -> None:
        if self._catalog is not None:
            self._catalog.close()

    def read(self) -> pa.Table:
        return self.table().scan().to_arrow()

    def append(self, rows: pa.Table) -> None:
        self.table().append(rows)

    def files(self) -> list[Path]:
        return sorted(Path(self.table().location().removeprefix("file://"), "data").rglob("*.parquet"))

    def is_of(self, path: Path, transaction: str) -> bool:
        return str(uuid.uuid5(uuid.NAMESPACE_OID, f"{transaction}-0")) in path.name

    def names_found(self, name: str) -> list[str]:
        return list(self.table().scan(row_filter=f"name == '{name}'").to_arrow()["name"].to_pylist())

    def versions(self) -> int:
        return len(self.table().history())

    def compact(self) -> None:
        self.table().overwrite(self.read())

    def drop_column(self, name: str) -> None:
        with self.table().update_schema() as update:
            update.delete_column(name)

    def repartition(self) -> None:
        with self.table().update_spec() as update:
            update.add_field("name", IdentityTransform())


LAKES: Sequence[type[DeltaLake] | type[IcebergLake]] = (DeltaLake, IcebergLake)
