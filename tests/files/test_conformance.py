"""FileSink passes the conformance kit."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pytest

from sinks.files import FileSink
from sinks.testing import SinkConformance
from sinks.testing.kit import SinkTests
from sinks.testing.values import SAMPLES
from tests.files.reading import rows_of


class Folder(SinkTests):
    options: ClassVar[Mapping[str, Any]] = {}
    types = tuple(SAMPLES)

    @pytest.fixture
    def sink(self, tmp_path: Path) -> FileSink:
        return FileSink(tmp_path / "rows", **self.options)

    def accepting(self, sink: FileSink, schema: pa.Schema) -> FileSink:
        return FileSink(f"{sink}-2", **self.options)

    def set_otherwise(self, sink: FileSink) -> Sequence[FileSink]:
        options: Sequence[dict[str, Any]] = [{"format": "jsonl"}, {"compression": "gzip"}, {"partition_by": ["name"]}]
        return [FileSink(str(sink), **{**self.options, **other}) for other in options]

    def visible(self, sink: FileSink) -> Sequence[Mapping[str, Any]]:
        return list(rows_of(Path(str(sink))))

    def leftovers(self, sink: FileSink) -> Sequence[str]:
        hidden = Path(str(sink), "_tpc").rglob("*")
        return [path.name for path in hidden if path.is_file() and path.parent.name in ("staged", "pre-committed")]


class TestFileSink(Folder, SinkConformance):
    pass
