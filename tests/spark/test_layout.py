"""R13 with several sinks: the layout that a record gets (acks of the persisted batch) must be the layout that a replay
compares it with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from coordinator.spark.batch import RowTransfer, SparkBatch
from coordinator.task.task import SinkTask
from examples.custom_sink import FileSink
from tests.spark.job import wait_for


def test_the_recorded_layout_is_the_one_that_a_replay_compares(spark: Any, tmp_path: Path) -> None:
    """foreachBatch(lambda df, n: coordinator(df.groupBy(...).count(), n)) with two sinks: under AQE a persisted shuffle
    keeps its partitions, one that is not persisted is coalesced."""
    (tmp_path / "rows").mkdir()
    sinks = [FileSink(tmp_path / "rows", "a"), FileSink(tmp_path / "rows", "b")]
    seen: list[tuple[int, int]] = []

    def each(df: Any, n: int) -> None:
        counts = df.groupBy((df.value % 7).alias("key")).count()
        acks = SparkBatch(counts, n, RowTransfer(), {s.name: s for s in sinks}).run(
            {s.name: SinkTask(s, "job", "aa", n, 1) for s in sinks}, lambda _: None
        )
        seen.append(
            (
                sum(ack.sink == "a" for ack in acks),
                SparkBatch(counts, n, RowTransfer(), {s.name: s for s in sinks}).partitions(sinks[0]),
            )
        )

    source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 1000).load()
    query = source.writeStream.foreachBatch(each).option("checkpointLocation", str(tmp_path / "spark")).start()
    try:
        wait_for(lambda: seen or not query.isActive)
    finally:
        query.stop()
    then, now = seen[0]
    assert then == now, (
        f"recorded {then}, a replay sees {now}: 'written in {then} partitions, and the batch now has {now}'"
    )
