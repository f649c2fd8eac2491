"""The documented custom sink passes the conformance kit."""

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from examples.custom_sink import FileSink
from sinks import Checkpoint
from sinks.testing import OverSpark, SinkConformance
from sinks.testing.values import SAMPLES
from sinks.transaction import TransactionId


class TestFileSink(OverSpark, SinkConformance):
    @pytest.fixture
    def sink(self, tmp_path: Path) -> FileSink:
        self.server = threading.Lock()  # a test class may hold what cannot be pickled
        (tmp_path / "rows").mkdir()
        return FileSink(tmp_path / "rows")

    def test_purge_removes_what_is_no_longer_asked_for(self, sink: FileSink) -> None:
        """of this job, lineage and sink"""
        about = {"job": self.job, "lineage": "0badcafe", "sink": sink.name}
        names = [
            TransactionId(**(about | other), checkpoint=n, subtask=0, generation=1, round=0, attempt=0, task_attempt=1)
            for other, n in [({}, 6), ({}, 7), ({"job": "other"}, 1), ({"lineage": "aa"}, 1), ({"sink": "other"}, 1)]
        ]
        for state in ("withdrawn", "open"):
            files = [sink.folder / f".{state}-{name}.parquet" for name in names]
            for file in files:
                file.touch()
            sink.purge(Checkpoint(self.job, "0badcafe", 9, oldest_retained=7))
            assert sorted(sink.folder.glob(f".{state}-*")) == sorted(files[1:])

    types = tuple(SAMPLES)

    def visible(self, sink: FileSink) -> Sequence[Mapping[str, Any]]:
        files = map(pq.ParquetFile, sink.folder.glob("[!.]*.parquet"))
        return [row for file in files for row in file.read(use_threads=False).to_pylist()]

    def leftovers(self, sink: FileSink) -> Sequence[str]:
        return [file.name for file in sink.folder.glob(".*.parquet") if not file.name.startswith(".withdrawn-")]
