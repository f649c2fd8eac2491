"""Whether SkeletonSink keeps the contract: the conformance kit. Its `visible` must not use the sink."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from coordinator.cli.skeleton.sink import SkeletonSink
from sinks.testing import SinkConformance


class TestSkeletonSink(SinkConformance):
    @pytest.fixture
    def sink(self, tmp_path: Path) -> SkeletonSink:
        return SkeletonSink(tmp_path / "skeleton")

    def visible(self, sink: SkeletonSink) -> Sequence[Mapping[str, Any]]:
        files = (sink.folder / "committed").glob("*")
        return [json.loads(line) for file in files for line in file.read_text().splitlines()]
