"""DeltaSink passes the conformance kit."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from sinks.delta import DeltaSink
from sinks.testing import SCHEMA, Ability, OverSpark, SinkConformance
from sinks.testing.kit import SinkTests
from sinks.testing.values import SAMPLES


class Table(SinkTests):
    partition_by: ClassVar[Sequence[str]] = ()
    bad: ClassVar = {"id": None}
    types = tuple(SAMPLES)
    cannot: ClassVar = {
        Ability.DIRECTLY: "each task would make a commit of the table",
        Ability.DEAD_TASKS: "VACUUM does",
    }

    @pytest.fixture
    def sink(self, tmp_path: Path) -> DeltaSink:
        columns = pa.schema([SCHEMA.field(0).with_nullable(False), *list(SCHEMA)[1:]])
        DeltaTable.create(str(tmp_path / "rows"), columns, partition_by=list(self.partition_by))
        return DeltaSink(tmp_path / "rows")

    def accepting(self, sink: DeltaSink, schema: pa.Schema) -> DeltaSink:
        return DeltaSink(f"{sink}-2", create_table=True)

    def evolving(self, sink: DeltaSink) -> DeltaSink:
        return DeltaSink(str(sink), schema_evolution="add")

    def visible(self, sink: DeltaSink) -> Sequence[Mapping[str, Any]]:
        files = DeltaTable(str(sink)).file_uris()
        return DeltaTable(str(sink)).to_pyarrow_table().to_pylist() if files else []

    def leftovers(self, sink: DeltaSink) -> Sequence[str]:
        named = {path.rpartition("/")[2] for path in DeltaTable(str(sink)).file_uris()}
        return [path.name for path in Path(str(sink)).glob("part-*") if path.name not in named]


class TestDeltaSink(Table, SinkConformance):
    pass


class TestPartitioned(Table, SinkConformance):
    partition_by = ("id",)


@pytest.mark.large
class TestOverSpark(Table, OverSpark):
    pass
