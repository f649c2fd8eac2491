"""Columns by any name, as what flattens JSON makes them: every sink writes them, or says at the start why not."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pyspark.sql import DataFrame, SparkSession, functions

from coordinator import CheckpointConfig, CheckpointCoordinator, CheckpointListener, Step
from coordinator.spark.batch import setting
from sinks.base import TwoPhaseCommitSink
from sinks.delta import DeltaSink
from sinks.iceberg import IcebergSink
from sinks.kafka.columns import KafkaColumns
from sinks.mysql import MySQLSink
from sinks.postgres import PostgresSink
from sinks.sqlalchemy import SqlAlchemySink
from tests.lakes.tables import DeltaLake, IcebergLake
from tests.mysql.observer import Observer as MySQLObserver
from tests.postgres.observer import Observer
from tests.spark.connect import ConnectJob
from tests.spark.job import write_input

NAMES = ("id", "user.id", "a`b", "a blank", "*", ".dot", "x.*", "%s", ":p", "`q`", 'double"quote', "ü")
"""Of columns that hold the id, a text each."""


def odd(df: DataFrame, *more: str) -> DataFrame:
    own = [functions.col("id").cast("string").alias(name) for name in (*NAMES[1:], *more)]
    inner = functions.struct(functions.col("id").alias("in.ner"), functions.lit(1).alias("b`t"))
    return df.select("id", *own, inner.alias("nes.ted"))


def expected(id: int, *more: str) -> dict[str, Any]:
    return dict.fromkeys([*NAMES, *more], str(id)) | {"id": id, "nes.ted": {"in.ner": id, "b`t": 1}}


def checkpoint(
    spark: SparkSession,
    folder: Path,
    sink: TwoPhaseCommitSink[Any],
    first: int,
    shape: Callable[[DataFrame], DataFrame] = odd,
    *listeners: CheckpointListener,
    rows: int = 2,
    **config: Any,
) -> None:
    """A run of the query with one more checkpoint of `rows` rows, whose ids begin with `first`."""
    spark.range(first, first + rows, numPartitions=1).write.mode("append").parquet(f"{folder}/input")
    source = spark.readStream.schema("id long").parquet(f"{folder}/input")
    with CheckpointCoordinator(
        "names", [sink], f"file://{folder}/storage", CheckpointConfig(**config), listeners
    ) as coordinator:
        writer = shape(source).writeStream.foreachBatch(coordinator).trigger(availableNow=True)
        query = writer.option("checkpointLocation", f"{folder}/spark").start()
        assert query.awaitTermination(300)


@dataclass
class Table:
    """What others read there."""

    sink: Callable[..., TwoPhaseCommitSink[Any]]
    read: Callable[[], list[Mapping[str, Any]]]

    def rows(self) -> list[dict[str, Any]]:
        def plain(value: Any) -> Any:
            return json.loads(value) if isinstance(value, str) and value.startswith("{") else value

        found = [{name: plain(value) for name, value in row.items()} for row in self.read()]
        return sorted(found, key=lambda row: int(row["id"]))


@pytest.fixture
def postgres_table(pg_database: str) -> Table:
    def read() -> list[Mapping[str, Any]]:
        with psycopg.connect(pg_database, row_factory=psycopg.rows.dict_row) as connection:
            return list(connection.execute('SELECT * FROM "odd"'))

    return Table(lambda **options: PostgresSink(pg_database, "odd", create_table=True, **options), read)


@pytest.fixture
def mysql_table(mysql_database: str) -> Table:
    def read() -> list[Mapping[str, Any]]:
        with closing(MySQLObserver(mysql_database)) as observer:
            names = [name for (name, *_) in observer.run("SHOW COLUMNS FROM odd")]
            return [dict(zip(names, row, strict=True)) for row in observer.run("SELECT * FROM odd")]

    return Table(lambda **options: MySQLSink(mysql_database, "odd", create_table=True, **options), read)


@pytest.fixture
def sqlite_table(tmp_path: Path) -> Table:
    def read() -> list[Mapping[str, Any]]:
        with closing(sqlite3.connect(tmp_path / "odd.db")) as connection:
            connection.row_factory = sqlite3.Row
            return [dict(row) for row in connection.execute("SELECT * FROM odd")]

    url = f"sqlite:///{tmp_path}/odd.db"
    return Table(lambda **options: SqlAlchemySink(url, "odd", create_table=True, **options), read)


@pytest.fixture
def delta_table(tmp_path: Path) -> Table:
    lake = DeltaLake(tmp_path / "delta")
    return Table(lambda **options: DeltaSink(lake.uri, create_table=True, **options), lambda: lake.read().to_pylist())


@pytest.fixture
def iceberg_table(tmp_path: Path) -> Iterator[Table]:
    lake = IcebergLake(tmp_path / "iceberg")
    catalog = lake.properties
    yield Table(
        lambda **options: IcebergSink("test.odd", catalog=catalog, create_table=True, **options),
        lambda: lake_rows(lake),
    )
    lake.close()


def lake_rows(lake: IcebergLake) -> list[Mapping[str, Any]]:
    lake.name = "test.odd"
    return list(lake.read().to_pylist())


TABLES = ["postgres", "mysql", "sqlite", "delta", "iceberg"]


@pytest.fixture(params=TABLES)
def table(request: pytest.FixtureRequest) -> Table:
    found: Table = request.getfixturevalue(f"{request.param}_table")
    return found


def test_a_table_has_columns_by_any_name(spark: SparkSession, tmp_path: Path, table: Table) -> None:
    """Also those that it gets later on."""
    checkpoint(spark, tmp_path, table.sink(), 0)
    assert table.rows() == [expected(0), expected(1)]
    evolving = table.sink(schema_evolution="add")
    checkpoint(spark, tmp_path, evolving, 2, lambda df: odd(df, "la.ter", "b`"))
    later = {"la.ter": None, "b`": None}
    assert table.rows() == [*(expected(id) | later for id in (0, 1)), *(expected(id, *later) for id in (2, 3))]


@dataclass
class Undo(CheckpointListener):
    """An operator ends a transaction of the first checkpoint between its decision and its commit."""

    dsn: str

    def on_step(self, step: Step, checkpoint_id: int, facts: Mapping[str, Any]) -> None:
        if step is Step.COMPLETE and checkpoint_id == 0:
            with closing(Observer(self.dsn)) as observer:
                [name] = observer.prepared()
                observer.run(f"ROLLBACK PREPARED '{name}'")


@pytest.mark.parametrize("replay", ["recompute", "spool"])
def test_a_replay_with_dead_letters_finds_the_same_rows(
    spark: SparkSession, tmp_path: Path, pg_database: str, postgres_table: Table, replay: str
) -> None:
    """The table refuses id 1, and what the checkpoint has lost is written again, letters of earlier rows beside it."""
    with closing(Observer(pg_database)) as observer:
        columns = ", ".join(f'"{name.replace(chr(34), chr(34) * 2)}" text' for name in NAMES[1:])
        observer.run(f'CREATE TABLE odd (id bigint CHECK (id <> 1), {columns}, "nes.ted" jsonb)')
    dead = SqlAlchemySink(f"sqlite:///{tmp_path}/dead.db", "dead", create_table=True)
    sink = postgres_table.sink(strategy="prepared", dead_letters=dead)
    checkpoint(spark, tmp_path, sink, 0, odd, Undo(pg_database), rows=3, replay=replay)
    assert postgres_table.rows() == [expected(0), expected(2)]
    with closing(sqlite3.connect(tmp_path / "dead.db")) as connection:
        [[row]] = connection.execute("SELECT row FROM dead")
    assert json.loads(row) == expected(1)


def test_rows_are_upserted_by_a_key_with_a_dot(
    spark: SparkSession, tmp_path: Path, pg_database: str, postgres_table: Table
) -> None:
    def changes(df: DataFrame) -> DataFrame:
        at, gone = functions.lit(1).alias("at`s"), functions.lit(False).alias("is.gone")
        return odd(df).select(*(functions.col(f"`{name.replace('`', '``')}`") for name in odd(df).columns), at, gone)

    sink = postgres_table.sink(mode="upsert", keys=["user.id", "a`b"], order_by="at`s", delete_marker="is.gone")
    checkpoint(spark, tmp_path, sink, 0, changes)
    checkpoint(spark, tmp_path, sink, 1, changes)
    assert postgres_table.rows() == [expected(id) | {"at`s": 1} for id in (0, 1, 2)]


def test_json_of_kafka_has_fields_by_any_name(spark: SparkSession) -> None:
    """Also by names that differ in capitals alone, which a struct of Spark may have."""
    df = odd(spark.range(1), "A`B", "USER.ID", "", "KEY")
    for regex in ("false", "true"):
        with setting(spark, "spark.sql.parser.quotedRegexColumnNames", regex):
            [row] = KafkaColumns(True)(df).collect()
            assert json.loads(row.value) == expected(0, "A`B", "USER.ID", "", "KEY")


def shaped(df: DataFrame) -> DataFrame:
    own = functions.col("id").alias("user.id"), functions.col("name").alias("a`b"), functions.col("name").alias("A`B")
    return df.select("id", *own, functions.struct(functions.col("id").alias("in.ner")).alias("nes.ted"))


def test_a_query_of_connect_has_columns_by_any_name(spark: SparkSession, tmp_path: Path, pg_database: str) -> None:
    """Also such as differ in capitals alone."""
    ids = write_input(tmp_path / "input", batches=1)
    url = f"sc://127.0.0.1:{spark.sparkContext.getConf().get('spark.connect.grpc.binding.port')}"
    job = ConnectJob(tmp_path, [PostgresSink(pg_database, "odd", create_table=True)], shape=shaped, url=url)
    assert job.run() == 0, job.output()
    with closing(Observer(pg_database)) as observer:
        found = observer.run('SELECT "user.id", "a`b" = "A`B", ("nes.ted" ->> \'in.ner\')::bigint FROM odd ORDER BY 1')
    assert found == [(id, True, id) for id in ids]
