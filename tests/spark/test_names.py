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
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession, functions

from coordinator import CheckpointConfig, CheckpointCoordinator, CheckpointListener, Step
from examples.custom_sink import FileSink
from sinks.base import TwoPhaseCommitSink
from sinks.delta import DeltaSink
from sinks.iceberg import IcebergSink
from sinks.kafka import KafkaSink
from sinks.kafka.columns import with_json
from sinks.mysql import MySQLSink
from sinks.postgres import PostgresSink
from sinks.row_hash import HASH_COLUMN, with_row_hash
from sinks.sqlalchemy import SqlAlchemySink
from sinks.testing.servers.common import Service
from tests.kafka.reading import read
from tests.lakes.tables import DeltaLake, IcebergLake
from tests.mysql.observer import Observer as MySQLObserver
from tests.postgres.observer import Observer
from tests.spark.test_arrow import setting
from tests.spark.test_spark import visible

pytestmark = pytest.mark.ci

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
