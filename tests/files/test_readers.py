"""Files as Spark, pyarrow and DuckDB read them, beside files that are not visible yet."""

from __future__ import annotations

import datetime
import json
import math
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pytest
import sqlalchemy
from obstore.store import LocalStore
from pyspark.sql import SparkSession
from pyspark.sql import functions as f

from coordinator import CheckpointCoordinator
from sinks.base import Sink
from sinks.files import FileSink
from sinks.sqlalchemy import SqlAlchemySink
from tests.files.reading import names_of
from tests.files.test_files import committed, pre_committed

UTC = datetime.timezone.utc
LEAP_DAY = datetime.date(2024, 2, 29)
MOMENT = datetime.datetime(2024, 10, 27, 0, 30, 0, 1, UTC)
PRICES = [Decimal("0.0001"), None, Decimal("-9999999999999999.9999"), Decimal("1")]
TABLE = pa.table(
    {
        "id": pa.array([1, 2, 3, 4], pa.int64()),
        "shop": ["a/b 50%", "ü", None, "ü"],
        "day": pa.array([LEAP_DAY, None, datetime.date(1, 1, 1), LEAP_DAY]),
        "amount": pa.array([0.1, math.nan, None, -1e300]),
        "price": pa.array(PRICES, pa.decimal128(20, 4)),
        "seen": pa.array([MOMENT, None, None, None], pa.timestamp("us", "UTC")),
        "tags": pa.array([["x", None], [], None, ["ü"]], pa.list_(pa.string())),
    }
)


@pytest.fixture(params=["parquet", "jsonl"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Partitioned, with one checkpoint that is visible and one that is only pre-committed, and a marker."""
    folder = tmp_path / str(request.param)
    sink = FileSink(folder, format=request.param, partition_by=["shop", "day"], success_marker=True)
    committed(sink, pre_committed(sink, TABLE))
    pre_committed(sink, TABLE, subtask=1, checkpoint=1)
    return folder


def expected() -> list[dict[str, Any]]:
    return [row | {"amount": "NaN"} if row["id"] == 2 else row for row in TABLE.to_pylist()]


def comparable(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for row in rows:
        if isinstance(row["amount"], float) and math.isnan(row["amount"]):
            row["amount"] = "NaN"
    return sorted(rows, key=lambda row: row["id"])


def test_spark(spark: SparkSession, folder: Path) -> None:
    schema = "id BIGINT, shop STRING, day DATE, amount DOUBLE, price DECIMAL(20, 4), seen TIMESTAMP, tags ARRAY<STRING>"
    format = "parquet" if folder.name == "parquet" else "json"
    table = spark.read.schema(schema).format(format).load(str(folder))
    rows = [row.asDict() for row in table.collect()]
    for row in rows:
        row["seen"] = row["seen"] and row["seen"].astimezone(UTC)
    assert comparable(rows) == expected()
    assert [row.id for row in table.where("shop = 'ü' AND amount > 0").collect()] == [2], "NaN is above all numbers"
    assert [row.id for row in table.where("shop IS NULL").collect()] == [3]


def test_spark_names_partition_folders_alike(spark: SparkSession, tmp_path: Path) -> None:
    """As Spark's own writer does, for every character that has a place in a folder's name."""
    texts = [f"a{chr(number)}b" for number in [*range(1, 256), 0x2028, 0x65E5, 0x1F642]]
    table = pa.table({"id": range(len(texts)), "text": texts})
    sink = FileSink(tmp_path / "sink", partition_by=["text"])
    committed(sink, pre_committed(sink, table))
    frame = spark.createDataFrame(list(enumerate(texts)), "id BIGINT, text STRING")
    frame.coalesce(1).write.partitionBy("text").parquet(str(tmp_path / "spark"))
    folders = [{path.name for path in (tmp_path / who).glob("text=*")} for who in ("sink", "spark")]
    assert folders[0] == folders[1]
    assert len(folders[0]) == len(texts)


def test_spark_goes_on_where_the_columns_grew(spark: SparkSession, tmp_path: Path) -> None:
    sink = FileSink(tmp_path)
    committed(sink, pre_committed(sink, pa.table({"id": [1]})))
    committed(sink, pre_committed(sink, pa.table({"id": [2], "more": ["x"]}), subtask=1))
    table = spark.read.option("mergeSchema", "true").parquet(str(tmp_path)).orderBy("id")
    assert [row.asDict() for row in table.select("id", "more").collect()] == [
        {"id": 1, "more": None},
        {"id": 2, "more": "x"},
    ]
    assert spark.read.parquet(str(tmp_path)).agg(f.count("*")).collect()[0][0] == 2


@pytest.mark.parametrize("folder", ["parquet"], indirect=True)
def test_pyarrow(folder: Path) -> None:
    parts = ds.partitioning(pa.schema([TABLE.schema.field("shop"), TABLE.schema.field("day")]), flavor="hive")
    table = ds.dataset(folder, format="parquet", partitioning=parts).to_table()
    assert comparable(table.select(TABLE.column_names).to_pylist()) == expected()


def test_duckdb(folder: Path) -> None:
    duckdb = pytest.importorskip("duckdb")
    partitions = "hive_partitioning = true, hive_types = {shop: VARCHAR, day: DATE}"
    source = f"read_parquet('{folder}/**/*.parquet', {partitions})"
    if folder.name == "jsonl":
        types = "{id: 'BIGINT', amount: 'DOUBLE', price: 'DECIMAL(20, 4)', seen: 'TIMESTAMPTZ', tags: 'VARCHAR[]'}"
        source = f"read_json('{folder}/**/*.jsonl', columns = {types}, {partitions})"
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        found = connection.execute(f"SELECT {', '.join(TABLE.column_names)} FROM {source}").fetchall()
    rows = [dict(zip(TABLE.column_names, row, strict=True)) for row in found]
    for row in rows:
        row["seen"] = row["seen"] and row["seen"].astimezone(UTC)
    assert comparable(rows) == expected()


def test_a_pattern_over_all_folders_finds_nothing_hidden(folder: Path) -> None:
    """For readers that do not pass over hidden names, as a shell with `**` that shows them."""
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.suffix in (".parquet", ".jsonl")}
    assert found == set(names_of(LocalStore(folder)))
    assert len(found) == 4


def test_a_stream_writes_files_and_a_table_in_one_checkpoint(spark: SparkSession, tmp_path: Path) -> None:
    for number in range(3):
        rows = [(10 * number + n, f"shop {n % 2}", 0.5) for n in range(10)]
        frame = spark.createDataFrame(rows, "id BIGINT, shop STRING, amount DOUBLE")
        frame.coalesce(2).write.mode("append").json(str(tmp_path / "input"))
    database = f"sqlite:///{tmp_path}/orders.db"
    sinks: list[Sink] = [
        FileSink(tmp_path / "orders", partition_by=["shop"], success_marker=True),
        SqlAlchemySink(database, "orders", name="table", create_table=True),
    ]
    stream = spark.readStream.schema("id BIGINT, shop STRING, amount DOUBLE").option("maxFilesPerTrigger", 2)
    with CheckpointCoordinator("orders", sinks, (tmp_path / "storage").as_uri()) as coordinator:
        writer = stream.json(str(tmp_path / "input")).writeStream.foreachBatch(coordinator)
        writer = writer.option("checkpointLocation", str(tmp_path / "spark")).trigger(availableNow=True)
        writer.start().awaitTermination()
    read = spark.read.parquet(str(tmp_path / "orders"))
    assert sorted((row.id, row.shop) for row in read.collect()) == [(id, f"shop {id % 10 % 2}") for id in range(30)]
    engine = sqlalchemy.create_engine(database)
    with engine.connect() as connection:
        assert sorted(connection.execute(sqlalchemy.text("SELECT id FROM orders")).scalars()) == list(range(30))
    engine.dispose()
    marker = json.loads((tmp_path / "orders" / "_SUCCESS").read_text())
    assert marker["job"] == "orders"
    assert marker["checkpoint"] > 0
