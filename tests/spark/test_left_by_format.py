"""What `format("exactly_once")` of version 0.2.1 has left: foreachBatch continues the job in the same
checkpointLocation.

`left_by_format.json` is such a job, made by that version with Spark 4.2.0: checkpoint 0 is visible. The process that
decided checkpoint 1 was killed when the record was there, so the two transactions of checkpoint 1 are in doubt.
"""

from __future__ import annotations

import base64
import json
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from coordinator import CheckpointCoordinator
from coordinator.errors import ReplayMismatch
from examples.custom_sink import FileSink

LEFT = Path(__file__).with_name("left_by_format.json")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in json.loads(LEFT.read_text()).items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(base64.b64decode(content) if file.suffix == ".parquet" else content.encode())
    return tmp_path


def visible(folder: Path) -> Counter[int]:
    files = (folder / "rows").glob("tpc.*.parquet")
    return Counter(value for file in files for value in pq.read_table(file)["value"].to_pylist())


def records(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "storage").glob("*/*/checkpoint/*")}


def run(spark: SparkSession, folder: Path) -> None:
    """One start with foreachBatch. It processes the batch that is not done, and one more."""
    source = spark.readStream.format("rate-micro-batch").option("startTimestamp", 0)
    rows = source.option("rowsPerBatch", 10).option("numPartitions", 2).load()
    with CheckpointCoordinator("orders", [FileSink(folder / "rows")], f"file://{folder}/storage") as coordinator:
        writer = coordinator.write_stream(rows).option("checkpointLocation", f"{folder}/spark")
        assert writer.trigger(availableNow=True).start().awaitTermination(300)


def test_a_decided_checkpoint_becomes_visible_and_the_next_batch_is_written(spark: SparkSession, folder: Path) -> None:
    before = records(folder)
    assert visible(folder) == Counter(range(10))
    run(spark, folder)
    assert visible(folder) == Counter(range(30))
    assert list(FileSink(folder / "rows").in_doubt("orders")) == []
    after = records(folder)
    assert len(after) == 3
    assert after.items() >= before.items()


def test_a_lost_transaction_is_refused_with_what_to_do(spark: SparkSession, folder: Path) -> None:
    """That version hashed rows in Python, so nobody can tell whether a replay would write the same rows."""
    sink = FileSink(folder / "rows")
    lost, other = sorted(sink.in_doubt("orders"), key=str)
    sink.abort(lost)
    before = records(folder)
    with pytest.raises(ReplayMismatch) as raised:
        run(spark, folder)
    assert "Start the query with that version, as you did before, until this checkpoint is visible" in str(raised.value)
    assert [lost] == raised.value.transactions
    assert visible(folder) == Counter([*range(10), *pq.read_table(sink.folder / other["file"])["value"].to_pylist()])
    assert records(folder) == before
