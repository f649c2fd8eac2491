"""IcebergSink passes the conformance kit."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pytest
from pyiceberg.catalog import load_catalog
from pyiceberg.transforms import BucketTransform

from sinks.iceberg import IcebergSink
from sinks.testing import SCHEMA, Ability, OverSpark, SinkConformance
from sinks.testing.kit import SinkTests
from sinks.testing.values import SAMPLES


class Table(SinkTests):
    buckets = 0
    bad: ClassVar = {"id": None}
    types = tuple(SAMPLES)
    cannot: ClassVar = {
        Ability.DIRECTLY: "each task would make a commit of the table",
        Ability.DEAD_TASKS: "remove_orphan_files does",
    }

    @pytest.fixture
    def sink(self, tmp_path: Path) -> IcebergSink:
        self.catalog = {
            "type": "sql",
            "uri": f"sqlite:///{tmp_path}/catalog.db",
            "warehouse": f"file://{tmp_path}/lake",
        }
        columns = pa.schema([SCHEMA.field(0).with_nullable(False), *list(SCHEMA)[1:]])
        with load_catalog(**self.catalog) as catalog:
            catalog.create_namespace("test")
            table = catalog.create_table("test.rows", columns)
            if self.buckets:
                with table.update_spec() as update:
                    update.add_field("id", BucketTransform(self.buckets))
        return IcebergSink("test.rows", catalog=self.catalog)

    def accepting(self, sink: IcebergSink, schema: pa.Schema) -> IcebergSink:
        return IcebergSink("test.accepting", catalog=self.catalog, create_table=True)

    def evolving(self, sink: IcebergSink) -> IcebergSink:
        return IcebergSink("test.rows", catalog=self.catalog, schema_evolution="add")

    def visible(self, sink: IcebergSink) -> Sequence[Mapping[str, Any]]:
        with load_catalog(**self.catalog) as catalog:
            return list(catalog.load_table(sink.table).scan().to_arrow().to_pylist())

    def leftovers(self, sink: IcebergSink) -> Sequence[str]:
        with load_catalog(**self.catalog) as catalog:
            table = catalog.load_table(sink.table)
            named = {one.file.file_path.rpartition("/")[2] for one in table.scan().plan_files()}
            folder = Path(table.location().removeprefix("file://"), "data")
            return [path.name for path in folder.rglob("*.parquet") if path.name not in named]


class TestIcebergSink(Table, SinkConformance):
    pass


@pytest.mark.large
class TestPartitioned(Table, SinkConformance):
    buckets = 4


@pytest.mark.large
class TestOverSpark(Table, OverSpark):
    pass
