"""What came to Spark after 4.0, beside the coordinator. docs/versions.md says what was found."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyspark
import pytest
from pyspark.errors import IllegalArgumentException
from pyspark.sql import SparkSession, functions

from coordinator import CheckpointCoordinator, Step
from coordinator.errors import CheckpointGap
from coordinator.spark.batch import SparkBatch
from examples.custom_sink import FileSink
from sinks.base import TwoPhaseCommitSink
from tests.spark.job import KILLED, KillGroupAt, SparkJob, wait_for, write_input
from tests.spark.test_spark import ROCKSDB, assert_exactly_once, count_by_remainder, visible

VERSION = tuple(map(int, pyspark.__version__.split(".")[:2]))


@pytest.fixture
def sink(tmp_path: Path) -> FileSink:
    (tmp_path / "rows").mkdir()
    return FileSink(tmp_path / "rows")


def in_python(df: Any) -> Any:
    twice = functions.udf(lambda x: 2 * x, "long")
    return df.withColumn("twice", twice("id"))


def numbers_only(df: Any) -> Any:
    """What Spark's cache reads in columns; with a string among them it reads rows."""
    return df.drop("name")


class TestJobs:
    @pytest.mark.parametrize(
        "shape", [pytest.param(None, marks=pytest.mark.large), numbers_only], ids=["rows", "columns"]
    )
    def test_python_in_the_transforms_of_two_sinks(self, tmp_path: Path, sink: FileSink, shape: Any) -> None:
        """Several sinks read the batch from Spark's cache. Spark 4.2.0 hangs where a UDF reads columns from there."""
        ids = write_input(tmp_path / "input")
        (tmp_path / "others").mkdir()
        sinks: list[TwoPhaseCommitSink[Any]] = [sink, FileSink(tmp_path / "others", name="others")]
        job = SparkJob(tmp_path, sinks, shape=shape, transforms={each.name: in_python for each in sinks})
        assert job.run() == 0, job.output()
        for each in sinks:
            assert isinstance(each, FileSink)
            assert_exactly_once(each, ids)
            assert Counter(row["twice"] for row in visible(each)) == Counter(2 * id for id in ids)

    @pytest.mark.skipif(VERSION < (4, 3), reason="Spark 4.3 pipelines the input and output of Python workers")
    def test_pipelined_python_workers(self, tmp_path: Path, sink: FileSink) -> None:
        ids = write_input(tmp_path / "input")

        def job(**options: Any) -> SparkJob:
            return SparkJob(tmp_path, [sink], conf={"spark.python.udf.pipelined.enabled": "true"}, **options)

        assert job(listeners=[KillGroupAt(Step.COMPLETE, 1)]).run() == KILLED
        last = job()
        assert last.run() == 0, last.output()
        assert_exactly_once(sink, ids)


@pytest.mark.skipif(VERSION < (4, 2), reason="Spark 4.2 repartitions state")
def test_repartitioned_state_is_refused(spark: SparkSession, tmp_path: Path, sink: FileSink) -> None:
    write_input(tmp_path / "input", batches=1)
    session = spark.newSession()
    for key, value in ROCKSDB.items():
        session.conf.set(key, value)
    location = tmp_path / "spark"

    def run() -> None:
        with CheckpointCoordinator("counts", [sink], f"file://{tmp_path}/storage") as coordinator:
            files = session.readStream.schema("id long, name string, amount double").parquet(str(tmp_path / "input"))
            writer = coordinator.write_stream(count_by_remainder(files)).outputMode("update")
            query = writer.option("checkpointLocation", str(location)).trigger(availableNow=True).start()
            wait_for(lambda: not query.isActive)

    run()
    written = visible(sink)
    session._streamingCheckpointManager.repartition(str(location), 3)
    write_input(tmp_path / "more", batches=1)
    for file in (tmp_path / "more").iterdir():
        file.rename(tmp_path / "input" / f"more-{file.name}")
    with pytest.raises(CheckpointGap, match=r"StreamingCheckpointManager\.repartition"):
        run()
    assert visible(sink) == written


@pytest.mark.skipif(VERSION < (4, 2), reason="Python knows real-time mode since Spark 4.2")
def test_real_time_mode_is_refused_by_spark(spark: SparkSession, tmp_path: Path, sink: FileSink) -> None:
    numbers = spark.readStream.format("rate").load()
    real_time: Any = {"realTime": "5 seconds"}  # missing in PySpark's own overloads
    with CheckpointCoordinator("numbers", [sink], f"file://{tmp_path}/storage") as coordinator:
        writer = coordinator.write_stream(numbers).option("checkpointLocation", str(tmp_path / "spark"))
        with pytest.raises(IllegalArgumentException, match="ForeachBatchSink is not in the sink allowlist for Real"):
            writer.outputMode("update").trigger(**real_time).start()
    assert visible(sink) == []


@pytest.mark.parametrize("count", [1, 2])
def test_observed_metrics_count_each_row_once(spark: SparkSession, tmp_path: Path, sink: FileSink, count: int) -> None:
    (tmp_path / "others").mkdir()
    sinks = [sink, FileSink(tmp_path / "others", name="others")][:count]
    ids = write_input(tmp_path / "input")
    with CheckpointCoordinator("observed", sinks, f"file://{tmp_path}/storage") as coordinator:
        files = spark.readStream.schema("id long, name string, amount double").parquet(str(tmp_path / "input"))
        observed = files.observe("seen", functions.count("*").alias("rows"))
        writer = coordinator.write_stream(observed).option("checkpointLocation", str(tmp_path / "spark"))
        query = writer.trigger(availableNow=True).start()
        query.awaitTermination()
    progress = query.lastProgress
    assert progress is not None
    assert progress["observedMetrics"]["seen"]["rows"] == len(ids), progress["observedMetrics"]


@pytest.mark.parametrize(
    ("offsets", "topics"),
    [('{"orders":{"0":7}}', ["orders"]), ('orders_2:{"orders":{"0":7}}', ["orders"]), ("-", []), ("orders_2:-", [])],
)
def test_topics_are_read_of_both_formats_of_the_offset_log(offsets: str, topics: list[str]) -> None:
    """In the second, since Spark 4.2, the name of the source comes first."""
    batch = object.__new__(SparkBatch)
    batch._execution = SimpleNamespace(topic_ids=lambda source, topics: dict.fromkeys(topics, "id"))  # type: ignore[assignment]
    assert list(batch._ids(0, offsets)) == topics
