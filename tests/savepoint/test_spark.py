"""Savepoints of real Spark queries into PostgreSQL."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from coordinator import CheckpointConfig, CheckpointCoordinator, Savepoint, list_savepoints, restore_savepoint
from coordinator.operations.requests import ask_driver
from coordinator.spark.checkpoint_location import _Directory, _HadoopDirectory, open_location
from coordinator.storage import open_storage
from coordinator.store.job_store import JobStore
from sinks.postgres import PostgresSink
from tests.spark.job import wait_for, write_input

PROVIDER = "org.apache.spark.sql.execution.streaming.state.{}StateStoreProvider"
STORE = "spark.sql.streaming.stateStore"
BACKENDS = {
    "hashmap": {f"{STORE}.providerClass": PROVIDER.format("HDFSBacked")},
    "rocksdb": {f"{STORE}.providerClass": PROVIDER.format("RocksDB")},
    "rocksdb, changelog, format 2": {
        f"{STORE}.providerClass": PROVIDER.format("RocksDB"),
        f"{STORE}.rocksdb.changelogCheckpointing.enabled": "true",
        f"{STORE}.checkpointFormatVersion": "2",
    },
}
# Much maintenance: snapshots are made and old files deleted all the time.
BUSY = {
    f"{STORE}.minDeltasForSnapshot": "2",
    f"{STORE}.maintenanceInterval": "50ms",
    "spark.sql.streaming.minBatchesToRetain": "2",
}


def query_of(dsn: str, statement: str) -> list[Any]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        return connection.execute(statement).fetchall()


class Play:
    """A job of numbers 0, 1, 2 … into a table, in its own session."""

    def __init__(self, spark: SparkSession, dsn: str, folder: Path, conf: dict[str, str] | None = None) -> None:
        self.session, self.dsn, self.folder = spark.newSession(), dsn, folder
        for key, value in (conf or {}).items():
            self.session.conf.set(key, value)
        self.target = f"file://{folder}/savepoints"

    def coordinator(self, **sink: Any) -> CheckpointCoordinator:
        table = PostgresSink(self.dsn, "numbers", create_table=True, **sink)
        return CheckpointCoordinator("job", [table], f"file://{self.folder}/storage")

    def numbers(self, batch: int = 10) -> DataFrame:
        source = self.session.readStream.format("rate-micro-batch").option("rowsPerBatch", batch)
        return source.option("numPartitions", 2).load().selectExpr("value")

    def start(self, df: DataFrame, coordinator: CheckpointCoordinator, location: str = "spark") -> StreamingQuery:
        writer = coordinator.write_stream(df).outputMode("update")
        return writer.option("checkpointLocation", str(self.folder / location)).start()

    def restore(self, savepoint: Savepoint, location: str, **options: Any) -> None:
        storage = f"file://{self.folder}/storage"
        restore_savepoint(savepoint.uri, str(self.folder / location), **{"storage": storage} | options)

    def values(self) -> list[int]:
        return sorted(value for (value,) in query_of(self.dsn, "SELECT value FROM numbers"))


@pytest.mark.parametrize("kind", [_Directory, _HadoopDirectory])
def test_a_checkpoint_location_is_read_and_written(spark: SparkSession, tmp_path: Path, kind: Any) -> None:
    root = tmp_path / "a %20folder"
    location = kind(f"file:{root}" if kind is _HadoopDirectory else root)
    assert location.files() == []
    location.write("state/0/1.delta", iter([b"one", b"", b"two" * (1 << 19)]))
    location.write("metadata", [b"old"])
    location.write("metadata", [b"new"])
    (root / ".hidden").mkdir()
    (root / ".hidden/metadata").write_text("")
    assert location.files() == ["metadata", "state/0/1.delta"]
    assert b"".join(location.read("metadata")) == b"new"
    assert (
        b"".join(location.read("state/0/1.delta"))
        == (root / "state/0/1.delta").read_bytes()
        == b"one" + b"two" * (1 << 19)
    )
    with pytest.raises(FileNotFoundError):
        list(location.read("nowhere"))
    assert open_location(f"file:{root}").files() == open_location(str(root)).files() == location.files()
    with pytest.raises(OSError, match="exists"):
        location.write("metadata/file", [b""])
    with pytest.raises(OSError, match="No FileSystem for scheme"):
        open_location("nowhere://host/folder")


def batches(query: StreamingQuery) -> int:
    last = query.lastProgress
    return -1 if last is None else int(last["batchId"])


def test_stopped_with_a_savepoint_and_restored_with_another_parallelism(
    spark: SparkSession, pg_database: str, tmp_path: Path
) -> None:
    play = Play(spark, pg_database, tmp_path, {"spark.sql.adaptive.enabled": "false"})
    coordinator = play.coordinator()
    query = play.start(play.numbers().repartition("value"), coordinator)
    wait_for(lambda: batches(query) >= 1)
    savepoint = coordinator.stop_with_savepoint(query, play.target)
    n = savepoint.checkpoint_id
    assert query.exception() is None
    assert not query.isActive
    assert play.values() == list(range(10 * (n + 1)))
    assert savepoint.record.partitions == {"numbers": 2}
    coordinator.close()

    play.restore(savepoint, "restored")
    play.session.conf.set("spark.sql.shuffle.partitions", "3")
    coordinator = play.coordinator()
    query = play.start(play.numbers().repartition(4, "value"), coordinator, "restored")
    wait_for(lambda: batches(query) >= n + 2)
    second = coordinator.stop_with_savepoint(query, play.target)
    coordinator.close()
    assert query.exception() is None
    assert play.values() == list(range(10 * (second.checkpoint_id + 1)))
    assert second.record.partitions == {"numbers": 4}
    assert second.lineage != savepoint.lineage


@pytest.mark.parametrize("how", ["stop", "cancel"])
def test_asked_for_through_storage(spark: SparkSession, pg_database: str, tmp_path: Path, how: str) -> None:
    """By an operator, of a query that its program waits for and then closes."""
    play = Play(spark, pg_database, tmp_path)
    place = f"file://{tmp_path}/storage"
    config = CheckpointConfig(savepoint_dir=play.target)
    sink = PostgresSink(play.dsn, "numbers", create_table=True)
    with ThreadPoolExecutor(1) as operator, CheckpointCoordinator("job", [sink], place, config) as coordinator:
        query = play.start(play.numbers(), coordinator)
        wait_for(lambda: batches(query) >= 1)
        asked = operator.submit(ask_driver, JobStore(open_storage(place), "job"), how)
        assert query.awaitTermination(300)
    taken = asked.result(300)
    assert query.exception() is None
    assert play.values() == list(range(10 * (taken["checkpoint"] + 1)))
    assert [one.uri for one in list_savepoints(play.target)] == [taken["uri"]]


def test_taken_of_a_running_and_of_an_idle_query_and_of_a_stopped_one(
    spark: SparkSession, pg_database: str, tmp_path: Path
) -> None:
    ids = write_input(tmp_path / "input", batches=4, files=1)
    play = Play(spark, pg_database, tmp_path)
    files = play.session.readStream.schema("id long, name string, amount double").option("maxFilesPerTrigger", 1)
    df = files.parquet(str(tmp_path / "input")).selectExpr("id AS value")
    with play.coordinator() as coordinator:
        query = play.start(df, coordinator)
        wait_for(lambda: batches(query) >= 0)
        running = coordinator.trigger_savepoint(play.target)
        wait_for(lambda: (tmp_path / "spark/commits/3").exists())
        idle = coordinator.trigger_savepoint(play.target)
        assert query.isActive
        query.stop()
    with play.coordinator() as coordinator:
        stopped = coordinator.trigger_savepoint(play.target, str(tmp_path / "spark"))
    assert running.checkpoint_id <= idle.checkpoint_id == stopped.checkpoint_id == 3

    play.restore(running, "a", allow_later_checkpoints=True)
    query_of(pg_database, f"DELETE FROM numbers WHERE value >= {1000 * (running.checkpoint_id + 1)} RETURNING 1")
    with play.coordinator() as coordinator:
        query = play.start(df, coordinator, "a")
        query.processAllAvailable()
        query.stop()
    assert Counter(play.values()) == Counter(ids)


@pytest.mark.parametrize(
    "backend", [pytest.param(name, marks=() if "format 2" in name else pytest.mark.large) for name in BACKENDS]
)
def test_state_comes_back(spark: SparkSession, pg_database: str, tmp_path: Path, backend: str) -> None:
    """Counts so far are state: a restored query that had lost or doubled some would show it."""
    play = Play(spark, pg_database, tmp_path, BACKENDS[backend] | BUSY)
    counted = play.numbers().selectExpr("value % 7 AS value").groupBy("value").count()

    def counts() -> dict[int, int]:
        return dict(query_of(pg_database, "SELECT value, count FROM numbers"))

    def expected(savepoint: Savepoint) -> dict[int, int]:
        return dict(Counter(value % 7 for value in range(10 * (savepoint.checkpoint_id + 1))))

    coordinator = play.coordinator(mode="upsert", keys=["value"])
    query = play.start(counted, coordinator)
    wait_for(lambda: batches(query) >= 0)
    savepoints = []
    while batches(query) < 4:
        savepoints.append(coordinator.trigger_savepoint(play.target))
    savepoints.append(coordinator.stop_with_savepoint(query, play.target))
    assert query.exception() is None
    assert counts() == expected(savepoints[-1])
    coordinator.close()

    # Upserts of the same counts: here it does no harm to go back to before what is visible.
    play.restore(savepoints[len(savepoints) // 2], "restored", allow_later_checkpoints=True)
    coordinator = play.coordinator(mode="upsert", keys=["value"])
    restored = play.start(counted, coordinator, "restored")
    wait_for(lambda: batches(restored) >= savepoints[-1].checkpoint_id + 1)
    last = coordinator.stop_with_savepoint(restored, play.target)
    assert restored.exception() is None
    assert counts() == expected(last)
    coordinator.close()
