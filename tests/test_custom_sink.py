"""The documented custom sink passes the conformance kit."""

from collections.abc import Sequence
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from examples.custom_sink import FileSink
from sinks.testing import SinkConformance


class TestFileSink(SinkConformance):
    @pytest.fixture
    def sink(self, tmp_path: Path) -> FileSink:
        (tmp_path / "rows").mkdir()
        return FileSink(tmp_path / "rows")

    def visible(self, sink: FileSink) -> Sequence[int]:
        return [id for file in sink.folder.glob("[!.]*.parquet") for id in pq.read_table(file)["id"].to_pylist()]
