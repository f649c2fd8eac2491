"""The conformance kit for SkeletonSink. `visible` must read the system without the sink."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from coordinator.cli.skeleton.sink import COMMITTED, OPEN, PRE_COMMITTED, SkeletonSink
from sinks.testing import SinkConformance


class TestSkeletonSink(SinkConformance):
    @pytest.fixture
    def sink(self, tmp_path: Path) -> SkeletonSink:
        return SkeletonSink(tmp_path / "skeleton")

    types = pa.bool_(), pa.int32(), pa.int64(), pa.float64(), pa.string(), pa.list_(pa.int64())

    def visible(self, sink: SkeletonSink) -> Sequence[Mapping[str, Any]]:
        files = (sink.folder / COMMITTED).glob("*")
        return [
            json.loads(line)
            for file in files
            for line in file.read_text(encoding="utf-8").splitlines()
        ]

    def leftovers(self, sink: SkeletonSink) -> Sequence[str]:
        return [
            file.name for state in (OPEN, PRE_COMMITTED) for file in (sink.folder / state).glob("*")
        ]
