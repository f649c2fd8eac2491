"""Spark's own readers see what the sinks have committed, and Spark's Delta writer takes turns with DeltaSink."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyspark
import pytest
from pyiceberg.transforms import IdentityTransform

from sinks.testing import rows
from tests.lakes.tables import DeltaLake, IcebergLake
from tests.lakes.test_lakes import COMMITTED, committed, pre_committed

pytestmark = pytest.mark.large
EXPECTED = {"ids": [0, 1, 10, 11, 20, 21], "by bounds": [11, 20], "by partition": [20]}


def read_by_spark(kind: str, place: str) -> Any:
    command = [sys.executable, "-m", "tests.lakes.spark_reader", kind, place]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_spark_reads_and_writes_a_delta_table(tmp_path: Path) -> None:
    lake = DeltaLake(tmp_path)
    lake.create(partition_by=["name"])
    sink = lake.sink()
    for n in range(3):
        assert committed(sink, pre_committed(sink, rows(10 * n, 2), n)) == [COMMITTED]
    waiting = pre_committed(sink, rows(30, 1), 3)
    assert read_by_spark("delta", lake.uri) == EXPECTED
    assert committed(sink, waiting) == [COMMITTED]
    assert lake.ids() == [0, 1, 10, 11, 20, 21, 30, 900]


@pytest.mark.skipif(not pyspark.__version__.startswith("4.1."), reason="Iceberg's newest release is for Spark 4.1")
def test_spark_reads_an_iceberg_table(tmp_path: Path) -> None:
    lake = IcebergLake(tmp_path)
    lake.create()
    with lake.table().update_spec() as update:
        update.add_field("name", IdentityTransform())
    sink = lake.sink()
    for n in range(3):
        assert committed(sink, pre_committed(sink, rows(10 * n, 2), n)) == [COMMITTED]
    pre_committed(sink, rows(30, 1), 3)
    assert read_by_spark("iceberg", lake.table().metadata_location) == EXPECTED
