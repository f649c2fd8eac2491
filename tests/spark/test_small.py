"""Small batches are written on the driver, by one participant, as tasks would write them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from pyspark import TaskContext
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession, functions

from coordinator import CheckpointConfig, CheckpointCoordinator, CheckpointListener, Step
from coordinator.spark import arrow, internals, small
from coordinator.spark.small import Cancelled, OneParticipant
from examples.custom_sink import FileSink
from sinks.optional import DriverWriting
from sinks.postgres import PostgresSink
from sinks.row_hash import with_row_hash
from sinks.task import SinkTask
from sinks.testing import rows
from sinks.testing.local import with_row_hash as hashed_locally
from tests.spark.job import wait_for
from tests.spark.test_arrow import ALL_TYPES, EMPTY, FULL
from tests.spark.test_spark import visible


def in_tasks(hashed: DataFrame) -> list[pa.RecordBatch]:
    """What Python workers get."""

    def serialized(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            stream = pa.BufferOutputStream()
            with pa.ipc.new_stream(stream, batch.schema) as writer:
                writer.write_batch(batch)
            yield pa.RecordBatch.from_pydict({"batch": [stream.getvalue().to_pybytes()]})

    found = hashed.mapInArrow(serialized, "batch binary").collect()
    return [pa.ipc.open_stream(row.batch).read_next_batch() for row in found]


@pytest.mark.parametrize("zone", ["UTC", "America/St_Johns"])
def test_the_driver_gets_rows_of_all_types_as_tasks_do(spark: SparkSession, zone: str) -> None:
    parts = [None, *(json.dumps(json.loads(row)) for row in (FULL, EMPTY))]
    values = spark.createDataFrame([(part,) for part in parts], "text string").coalesce(1)
    parsed = values.select(functions.from_json("text", ALL_TYPES).alias("all")).select("all.*")
    hashed = with_row_hash(parsed.withColumnRenamed("a.b `c", "c"))  # a name that mapInArrow does not take
    with arrow.setting(spark, "spark.sql.session.timeZone", zone):
        [batch] = small.rows_of(hashed, 10) or []
        assert batch.num_rows == 3
        [other] = in_tasks(hashed)
        assert batch.schema.remove(batch.num_columns - 1) == other.schema.remove(other.num_columns - 1)
        assert batch.to_pydict() == other.to_pydict()


@pytest.mark.parametrize(
    "shape",
    [
        ("id % 2 AS even", 21),
        ("id", "if(id = 7, repeat('x', 2000000), 'x') AS v", 20),
        ("parse_json('1') AS v", 20),
    ],
    ids=["one row more", "a large row", "a size that cannot be told"],
)
def test_what_is_not_small_is_not_fetched(spark: SparkSession, shape: tuple[Any, ...]) -> None:
    *columns, count = shape
    df = spark.range(0, count, 1, 3).selectExpr(*columns)
    assert small.rows_of(with_row_hash(df), 20) is None


def test_no_more_is_fetched_than_the_bound(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[pa.RecordBatch] = []

    def noting(df: DataFrame) -> list[pa.RecordBatch]:
        fetched.extend(collect(df))
        return fetched

    collect = internals.collect_as_arrow
    monkeypatch.setattr(small, "collect_as_arrow", noting)
    df = spark.range(0, 100_000, 1, 4).selectExpr("id", "repeat('x', if(id % 2 = 0, 100000, 700)) AS v")
    assert small.rows_of(with_row_hash(df), 1000) is None
    assert sum(batch.num_rows for batch in fetched) == 4 * 1001  # of each partition
    assert sum(batch.nbytes for batch in fetched) < 4 * small.BATCH_BYTES


# ---------------------------------------------------------------------- in a query
class HereOrThere(FileSink, DriverWriting[Any]):
    """Takes small batches on the driver; `tried_here` is called there before each write."""

    tried_here: Callable[[], None] = staticmethod(lambda: None)

    def write(self, transaction: Any, batch: pa.RecordBatch) -> None:
        if TaskContext.get() is None:
            type(self).tried_here()
        super().write(transaction, batch)


class Participants(CheckpointListener):
    """By checkpoint; and those of replays. `lose` is called when that checkpoint is complete."""

    def __init__(self, lose: Callable[[], None] = lambda: None, lost: int = -1) -> None:
        self.found: dict[int, int] = {}
        self.replayed: list[int] = []
        self._lose, self._lost = lose, lost

    def on_step(self, step: Step, checkpoint_id: int, facts: Mapping[str, Any]) -> None:
        if step is Step.PRE_COMMITTED:
            self.found[checkpoint_id] = facts["participants"]
        if step is Step.COMPLETE and checkpoint_id == self._lost:
            self._lose()
        if step is Step.REPLAY_COMPLETE:
            self.replayed.append(checkpoint_id)


def run(
    spark: SparkSession,
    folder: Path,
    sink: Any,
    last: int,
    listener: Participants,
    shape: Callable[[DataFrame], DataFrame] = lambda df: df,
    between: Callable[[int], None] = lambda n: None,
    mode: str = "append",
    **config: Any,
) -> None:
    """A query up to that checkpoint, of 10 rows each in two partitions. The next batch fails it: Spark fails a stateful
    query as well when nothing computes a batch of it."""
    source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 10).option("numPartitions", 2)
    settings = CheckpointConfig(rows_on_driver=100, **config)
    coordinator = CheckpointCoordinator("job", [sink], f"file://{folder}/storage", settings, [listener])

    def each(df: DataFrame, n: int) -> None:
        if n > last:
            raise EOFError("no more")
        coordinator(df, n)
        between(n)

    writer = shape(source.load().selectExpr("value AS id")).writeStream.outputMode(mode).foreachBatch(each)
    with pytest.raises(StreamingQueryException, match="EOFError: no more"), coordinator:
        writer.option("checkpointLocation", f"{folder}/spark").start().awaitTermination(300)


@pytest.fixture
def sink(tmp_path: Path) -> HereOrThere:
    (tmp_path / "rows").mkdir()
    return HereOrThere(tmp_path / "rows")


def a_large_one(df: DataFrame) -> DataFrame:
    """Checkpoint 2 has 1,000 rows."""
    return df.selectExpr("id", "explode(if(id BETWEEN 20 AND 29, sequence(0, 99), array(0))) AS part")


def test_a_batch_goes_to_the_driver_after_a_small_one_and_to_tasks_if_it_is_large(
    spark: SparkSession, tmp_path: Path, sink: HereOrThere
) -> None:
    """What the driver wrote and the system lost is replayed by a task, as a whole."""

    def lose() -> None:
        for one in sink.in_doubt("job"):
            sink.abort(one)

    told = Participants(lose, lost=4)
    run(spark, tmp_path, sink, 4, told, a_large_one)
    assert told.found == {0: 2, 1: 1, 2: 2, 3: 2, 4: 1}
    assert told.replayed == [4]
    expected = [(id, part) for id in range(50) for part in (range(100) if 20 <= id < 30 else [0])]
    assert sorted((row["id"], row["part"]) for row in visible(sink)) == expected
    assert list(sink.in_doubt("job")) == []


def test_what_the_driver_cannot_write_tasks_do(spark: SparkSession, tmp_path: Path, sink: HereOrThere) -> None:
    def fail() -> None:
        raise OSError("no route from here")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HereOrThere, "tried_here", fail)
        run(spark, tmp_path, sink, 2, told := Participants())
    assert told.found == {0: 2, 1: 2, 2: 2}
    assert sorted(row["id"] for row in visible(sink)) == list(range(30))
    assert list(sink.in_doubt("job")) == []


def test_a_stateful_query_keeps_its_state(spark: SparkSession, tmp_path: Path, sink: HereOrThere) -> None:
    """Of a batch that is left to tasks, a part was computed before."""

    def counted(df: DataFrame) -> DataFrame:
        return a_large_one(df).groupBy(functions.expr("id % 20").alias("key"), "part").count()

    conf = {
        "spark.sql.streaming.stateStore.providerClass": (
            "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
        ),
        "spark.sql.streaming.stateStore.checkpointFormatVersion": "2",
    }
    for key, value in conf.items():
        spark.conf.set(key, value)
    try:
        run(spark, tmp_path, sink, 3, told := Participants(), counted, mode="update")
    finally:
        for key in conf:
            spark.conf.unset(key)
    assert set(told.found.values()) == {1, 2}
    counts: dict[tuple[int, int], list[int]] = {}
    for row in visible(sink):
        counts.setdefault((row["key"], row["part"]), []).append(row["count"])
    keys = [(key, part) for key in range(20) for part in (range(100) if key < 10 else [0])]
    assert sorted(counts) == keys
    assert {key: sorted(found) for key, found in counts.items()} == {
        (key, part): [1, 2] if part == 0 else [1] for key, part in keys
    }


def test_sessions_that_end_between_checkpoints(spark: SparkSession, tmp_path: Path, pg_database: str) -> None:
    """The driver keeps its connection, and takes another one if its server has ended it."""
    sink = PostgresSink(pg_database, "numbers", create_table=True)
    sessions: list[set[int]] = []

    def between(n: int) -> None:
        with psycopg.connect(pg_database, autocommit=True) as admin:
            mine = "FROM pg_stat_activity WHERE application_name = 'tpc numbers' AND datname = current_database()"
            sessions.append({pid for (pid,) in admin.execute(f"SELECT pid {mine}")})
            if n == 2:
                admin.execute(f"SELECT pg_terminate_backend(pid, 10000) {mine}")

    run(spark, tmp_path, sink, 4, told := Participants(), between=between)
    assert [told.found[n] for n in range(1, 5)] == [1, 1, 1, 1]
    assert sessions[1] == sessions[2]
    assert not sessions[2] & sessions[3]
    assert sessions[3] == sessions[4]
    with psycopg.connect(pg_database) as reader:
        assert reader.execute("SELECT id FROM numbers ORDER BY id").fetchall() == [(id,) for id in range(50)]
        assert reader.execute("SELECT count(*) FROM pg_prepared_xacts").fetchone() == (0,)


# ---------------------------------------------------------------------- cancelled
@pytest.mark.parametrize("stopped", [False, True], ids=["cancelled", "stopped"])
def test_who_is_cancelled_does_not_wait_and_leaves_nothing(sink: HereOrThere, stopped: bool) -> None:
    writing, go_on = threading.Event(), threading.Event()

    def hang() -> None:
        writing.set()
        assert go_on.wait(300)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HereOrThere, "tried_here", hang)
        one = OneParticipant(SinkTask(sink, "job", "aa", 1, 1), hashed_locally(rows(0, 5)))
        if not stopped:
            threading.Thread(target=lambda: [step() for step in (writing.wait, one.cancel)]).start()
        with pytest.raises(Cancelled):
            one.acks(lambda: not (stopped and writing.is_set()))
        assert len(list(sink.folder.iterdir())) == 1
        go_on.set()
        wait_for(lambda: list(sink.folder.iterdir()) == [])
