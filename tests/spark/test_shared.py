"""Several sinks write one batch: it is computed once, whoever keeps it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession, functions

from coordinator import CheckpointCoordinator
from coordinator.operations.inspection.balance import take_balance
from coordinator.spark.batch import setting
from examples.custom_sink import FileSink
from tests.spark.job import wait_for


def two_sinks(folder: Path) -> list[FileSink]:
    sinks = []
    for name in ("a", "b"):
        (folder / name).mkdir()
        sinks.append(FileSink(folder / name, name))
    return sinks


def with_random_id(df: Any) -> Any:
    """Another id each time that a row is computed, as Spark's own uuid(), which has a seed, does not give."""
    return df.withColumn("random", functions.expr("reflect('java.util.UUID', 'randomUUID')"))


def test_a_batch_that_the_user_keeps_is_kept(spark: SparkSession, tmp_path: Path) -> None:
    a, b = two_sinks(tmp_path)
    b.transform = lambda df: df.where("value % 5 = 0")
    coordinator = CheckpointCoordinator("spark-job", [a, b], f"file://{tmp_path}/storage")
    seen: list[tuple[bool, bool]] = []

    def each(df: DataFrame, batch_id: int) -> None:
        kept = with_random_id(df).persist()
        before = kept.collect()
        coordinator(kept, batch_id)
        seen.append((kept.storageLevel.useMemory, kept.collect() == before))
        kept.unpersist()

    source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 10).load()
    query = source.writeStream.foreachBatch(each).option("checkpointLocation", str(tmp_path / "spark")).start()
    try:
        wait_for(lambda: seen or not query.isActive)
    finally:
        query.stop()
    coordinator.close()
    assert seen[0] == (True, True), "it was thrown away, and computed again with other values"
    of_books = [
        tuple(line.counts[name] for name in ("batch", "filtered", "read"))
        for line in take_balance(coordinator._protocol.store, {}).lines
    ]
    assert sorted(of_books[:2]) == [(10, 0, 10), (10, 8, 2)]


COLUMNAR = "spark.sql.inMemoryColumnarStorage.enableVectorizedReader"


@pytest.mark.parametrize("own", ["", "true"])
def test_a_setting_comes_back_though_who_changed_it_was_killed(spark: SparkSession, own: str) -> None:
    """With Spark Connect (up to 4.2) a batch's settings are those of the user's session, which outlives the worker."""
    session = spark.newSession()
    conf = session.conf
    if own:
        conf.set(COLUMNAR, own)
    before = conf.getAll
    killed = setting(session, COLUMNAR, "false")
    killed.__enter__()  # and never left
    assert conf.get(COLUMNAR) == "false"
    with setting(session, COLUMNAR, "false"):
        assert conf.get(COLUMNAR) == "false"
    assert conf.get(COLUMNAR) == "true"
    assert conf.getAll == before
