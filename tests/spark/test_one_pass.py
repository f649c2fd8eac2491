"""Several sinks share one pass over the rows: each row is computed and transferred once for all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession, functions

from coordinator import CheckpointCoordinator, Step
from coordinator.store.job_store import JobStore
from coordinator.task.row_hash import with_row_hash
from examples.custom_sink import FileSink
from sinks import Select
from sinks.errors import ConfigurationError
from tests.spark.job import KILLED, KillGroupAt, SparkJob, wait_for, write_input
from tests.spark.test_shared import with_random_id


def sinks_with(folder: Path, transforms: dict[str, Any]) -> list[FileSink]:
    sinks = []
    for name, transform in transforms.items():
        (folder / name).mkdir(parents=True)
        sinks.append(FileSink(folder / name, name))
        sinks[-1].transform = transform
    return sinks


def rows_of(sink: FileSink) -> list[dict[str, Any]]:
    rows = [row for file in sink.folder.glob("[!.]*.parquet") for row in pq.read_table(file).to_pylist()]
    return sorted(rows, key=lambda row: [str(value) for value in row.values()])


def run_once(spark: SparkSession, folder: Path, sinks: list[FileSink], shape: Any = lambda df: df) -> tuple[Any, Any]:
    """Run one batch of ten rows. Returns the coordinator, and the batch's DataFrame."""
    coordinator = CheckpointCoordinator("spark-job", sinks, f"file://{folder}/storage")
    seen: list[DataFrame] = []

    def each(df: DataFrame, batch_id: int) -> None:
        if not seen:
            shaped = shape(df)
            coordinator(shaped, batch_id)
            seen.append(shaped)

    source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 10).load()
    query = source.writeStream.foreachBatch(each).option("checkpointLocation", str(folder / "spark")).start()
    try:
        wait_for(lambda: seen or not query.isActive)
    finally:
        query.stop()
    if error := query.exception():
        raise error
    return coordinator, seen[0]


THIRDS = Select("value", "value * 2 AS `twice.as``much`", "random", where="value % 3 = 0")


def test_sinks_share_one_pass(spark: SparkSession, tmp_path: Path) -> None:
    """The rows of all are of one computation, though nothing keeps them."""
    a, b, thirds, again = sinks_with(tmp_path, {"a": None, "b": None, "thirds": THIRDS, "again": THIRDS})
    before = len(spark.sparkContext._jsc.getPersistentRDDs())
    run_once(spark, tmp_path, [a, b, thirds, again], with_random_id)
    assert len(spark.sparkContext._jsc.getPersistentRDDs()) == before
    assert sorted(row["value"] for row in rows_of(a)) == list(range(10))
    assert rows_of(a) == rows_of(b)
    random = {row["value"]: row["random"] for row in rows_of(a)}
    wanted = [{"value": n, "twice.as`much": 2 * n, "random": random[n]} for n in (0, 3, 6, 9)]
    assert rows_of(thirds) == wanted
    assert rows_of(again) == rows_of(thirds)


def test_a_row_has_the_hash_that_it_has_alone(spark: SparkSession, tmp_path: Path) -> None:
    """So a replay by another number of sinks, or by an earlier version, tells whether it writes the same rows."""
    nested = Select("value", "struct(value AS v, 'a' AS w) AS s", "array(value, NULL) AS l", "map('k', value) AS m")
    plain, part = sinks_with(tmp_path, {"plain": None, "part": nested})
    coordinator, df = run_once(spark, tmp_path, [plain, part])
    store: JobStore = coordinator._protocol.store
    newest = store.load_newest()
    assert newest is not None
    for name, rows in (("plain", df), ("part", nested(df))):
        hashes = [row[-1] for row in with_row_hash(rows).collect()]
        own = [c.fingerprint for (sink, _), c in newest.committables.items() if sink == name]
        assert sum(one.hash for one in own) % 2**64 == sum(hashes) % 2**64
        assert sum(one.rows for one in own) == len(hashes)


def test_all_columns_whatever_their_names(spark: SparkSession) -> None:
    df = spark.sql("SELECT id, 'x' AS `a.b`, 1 AS n, 2 AS N FROM range(3)")
    assert Select(where="id > 1")(df).collect() == [(2, "x", 1, 2)]
    assert Select("*", "id + 1 AS next")(df.drop("n")).columns == ["id", "a.b", "next"]


@pytest.mark.parametrize("expression", ["explode(array(1, 2)) AS n", "count(*) AS n", "s.*"])
def test_what_does_not_take_each_row_by_itself_is_refused(spark: SparkSession, tmp_path: Path, expression: str) -> None:
    a, b = sinks_with(tmp_path, {"a": None, "b": Select(expression)})
    with pytest.raises(Exception, match=r"takes? each row by itself|makes one column") as error:
        run_once(spark, tmp_path, [a, b], lambda df: df.withColumn("s", functions.struct("value", "timestamp")))
    assert ConfigurationError.__name__ in str(error.value)
    assert rows_of(a) == []


def test_a_lost_participant_of_one_sink_is_written_again(tmp_path: Path) -> None:
    """In the layout of the pass that all sinks shared, though the other columns are not written now."""
    ids = write_input(tmp_path / "input")
    names: dict[str, Any] = {"all": None, "names": Select("name", "n"), "few": Select("n", where="n > 2")}
    every, named, few = sinks_with(tmp_path, names)

    def job(*listeners: Any) -> SparkJob:
        conf = {"spark.sql.shuffle.partitions": "7"}
        return SparkJob(
            tmp_path,
            [every, named, few],
            listeners=listeners,
            transforms=names,
            conf=conf,
            shape=lambda df: df.groupBy("name", "id").agg(functions.count("*").alias("n"), functions.sum("amount")),
            output_mode="update",
        )

    assert job(KillGroupAt(Step.COMPLETE, 1)).run() == KILLED
    lost = sorted(named.in_doubt("spark-job"), key=str)
    assert lost
    named.abort(lost[-1])
    again = job()
    assert again.run() == 0, again.output()
    assert "writing lost transactions again" in again.output()
    assert sorted(row["id"] for row in rows_of(every)) == ids
    assert len(rows_of(named)) == len(ids)
    assert rows_of(few) == []
