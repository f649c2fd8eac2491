"""Small rows reach Python without Spark's limit on record batches, and each with its hash."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from datetime import date, datetime
from decimal import Decimal
from functools import reduce
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyspark
import pytest
from pyspark import TaskContext
from pyspark.sql import DataFrame, Row, SparkSession, functions
from pyspark.sql.types import StructType

from coordinator import CheckpointConfig, CheckpointCoordinator
from coordinator.spark import batch as spark_batch
from coordinator.spark.batch import MAX_BYTES, MAX_RECORDS, SMALL_BATCH, UNLIMITED, RowTransfer, setting
from coordinator.task.row_hash import HASH_COLUMN, with_row_hash
from examples.custom_sink import FileSink
from sinks.dead_letters import Refusal, letter_rows
from sinks.errors import SchemaMismatch
from sinks.kafka.columns import KafkaColumns
from sinks.transaction import TransactionContext
from tests.spark.job import wait_for
from tests.spark.test_spark import visible

DIFFERENT = {
    "nulls change places": ("7, cast(NULL AS int)", "cast(NULL AS int), 7"),
    "of an array": ("array(7, NULL)", "array(NULL, 7)"),
    "fewer of them": ("array(7, NULL)", "array(7)"),
    "an empty array": ("cast(array() AS array<int>)", "cast(NULL AS array<int>)"),
    "inner bounds": ("array(array(1, 2), array(3))", "array(array(1), array(2, 3))"),
    "of a struct": ("named_struct('a', 'x', 'b', cast(NULL AS string))", "named_struct('a', NULL, 'b', 'x')"),
    "a text that reads so": ("array('null', NULL)", "array(NULL, 'null')"),
    "no struct": ("named_struct('a', cast(NULL AS int))", "cast(NULL AS struct<a: int>)"),
    "equal in a collation": ("'a' COLLATE UTF8_LCASE", "'A' COLLATE UTF8_LCASE"),
    "microseconds inside": ("array(timestamp_micros(1))", "array(timestamp_micros(2))"),
    "of texts": ("array('', NULL)", "array(NULL, '')"),
    "texts joined": ("array('a\\nb')", "array('a', 'b')"),
    "of bytes": ("array(X'00', NULL)", "array(NULL, X'00')"),
    "of moments": ("array(timestamp_micros(1), NULL)", "array(NULL, timestamp_micros(1))"),
    "below a struct": ("named_struct('a', array(1.5D, NULL))", "named_struct('a', array(NULL, 1.5D))"),
    "names that differ in capitals": (
        "named_struct('a', 1, 'A', cast(NULL AS int))",
        "named_struct('a', cast(NULL AS int), 'A', 1)",
    ),
    "names with dots": ("named_struct('a.b `c', 1, 'a', 2)", "named_struct('a.b `c', 2, 'a', 1)"),
    "the sign of zero": ("0.0D", "-0.0D"),
    "of zeros": ("array(0.0F, 1.0F)", "array(-0.0F, 1.0F)"),
    "bounds of two arrays": ("array(0), cast(array() AS array<int>)", "cast(array() AS array<int>), array(0)"),
    "of two arrays": ("array(1, 2), array(3)", "array(1), array(2, 3)"),
    "no array": ("cast(NULL AS array<int>), array(1)", "array(1), cast(NULL AS array<int>)"),
    "of large decimals": ("array(7.5BD, NULL)", "array(NULL, 7.5BD)"),
    "of a map": ("map('a', cast(NULL AS int), 'b', 1)", "map('a', 1, 'b', cast(NULL AS int))"),
    "bytes as keys": ("map(X'00', 1)", "map(X'01', 1)"),
    "decimals of another scale": ("1.00BD", "100BD"),
    "a text and its bytes": ("'a'", "X'61'"),
    "a day and its number": ("DATE'1970-01-02'", "1"),
}


SPARK_3 = pyspark.__version__.startswith("3.")
if SPARK_3:
    del DIFFERENT["equal in a collation"]  # which Spark has since 4.0
HAS_BYTE_LIMIT = pytest.mark.skipif(SPARK_3, reason="Spark limits the bytes of a record batch since 4.0")
NO_VARIANTS = pytest.mark.skipif(SPARK_3, reason="Spark has variants since 4.0")


def test_rows_that_differ_have_other_hashes(spark: SparkSession) -> None:
    """Spark's xxhash64 alone takes many of these pairs for the same row."""
    here, there = (hashes_of(spark, [pair[side] for pair in DIFFERENT.values()]) for side in (0, 1))
    same = [case for case, one, other in zip(DIFFERENT, here, there, strict=True) if one == other]
    assert same == []


def test_columns_that_change_places_have_other_hashes(spark: SparkSession) -> None:
    df = spark.sql("SELECT 1 AS id, 2 AS amount, 3 AS price")
    renamed = df.toDF("id", "price", "amount")
    [[one], [other]] = (with_row_hash(each).select(HASH_COLUMN).collect() for each in (df, renamed))
    assert one != other


def test_a_row_has_the_same_hash_each_time(spark: SparkSession) -> None:
    row = "map(X'00', 1), map(named_struct('a', 1), 1), named_struct('b', map(array(X'01'), 2))"
    assert hash_of(spark, row) == hash_of(spark, row)


ORDINARY = (
    "7 AS id, 'x' AS name, cast(NULL AS double) AS amount, 0.00BD AS zero, TIMESTAMP'2024-01-02 03:04:05.678901' AS at,"
    " named_struct('a', 1, 'b', array('x', NULL)) AS s, array(TIMESTAMP'2024-01-02 03:04:05.678901') AS times,"
    " map('k', DATE'2024-01-02') AS days, map(X'00', named_struct('n', 1)) AS bytes,"
    " named_struct('a', 1, 'A', 2) AS alike, array(1.5D, NULL) AS numbers, array(named_struct('x', 1)) AS structs,"
    " parse_json('[1]') AS v, true AS `a blank`, 1 AS ``"
)


@NO_VARIANTS
def test_hashes_are_those_of_earlier_versions(spark: SparkSession) -> None:
    """A replay after an upgrade compares them: these are of 0.2.1."""

    def hash_under_names(row: str) -> int:
        return int(with_row_hash(spark.sql(f"SELECT {row}")).select(HASH_COLUMN).collect()[0][0])

    assert hash_under_names(ORDINARY) == 1262612638950493676
    assert hash_under_names("1 AS `user.id`, array(array(1)) AS `a``b.c`") == 4756304149877750805
    alike = "1 AS a, array(array(1)) AS A, map('k', 1) AS b, 2 AS B"
    with setting(spark, "spark.sql.caseSensitive", "true"):
        assert hash_under_names(alike) == 8821263843836387075
    assert hash_under_names(alike) == 8821263843836387075, "whether capitals count for Spark or not"


def test_a_hash_does_not_depend_on_the_session(spark: SparkSession) -> None:
    row = "timestamp_micros(1) AS a, array(timestamp_micros(1)) AS b, named_struct('n', cast(NULL AS int)) AS c"
    usual = hash_of(spark, row)
    with (
        setting(spark, "spark.sql.session.timeZone", "America/St_Johns"),
        setting(spark, "spark.sql.jsonGenerator.ignoreNullFields", "false"),
    ):
        assert hash_of(spark, row) == usual


def hashes_of(spark: SparkSession, rows: Sequence[str]) -> list[int]:
    """Those of rows of other columns each, by one job."""

    def hashed(row: str) -> DataFrame:
        df = spark.sql(f"SELECT {row}")
        df = df.toDF(*map(str, range(len(df.columns))))  # names are hashed, too
        return with_row_hash(df).select(HASH_COLUMN)

    return [int(found[0]) for found in reduce(DataFrame.unionAll, map(hashed, rows)).collect()]


def hash_of(spark: SparkSession, row: str) -> int:
    [found] = hashes_of(spark, [row])
    return found


@HAS_BYTE_LIMIT
@pytest.mark.parametrize(
    ("row_size", "own", "limit"),
    [
        (SMALL_BATCH / 10_000, {}, UNLIMITED),
        (SMALL_BATCH / 10_000 + 1, {}, None),
        (None, {}, None),
        (1.0, {MAX_BYTES: "1m"}, "1m"),
        (1.0, {MAX_RECORDS: "0"}, None),
        (1000.0, {MAX_RECORDS: "20000"}, None),
    ],
    ids=["small", "larger", "not known", "limit of the user", "no number of rows", "more rows"],
)
def test_the_limit_is_off_for_small_rows(
    spark: SparkSession, row_size: float | None, own: dict[str, str], limit: str | None
) -> None:
    transfer = RowTransfer()
    transfer.row_size = row_size
    with ExitStack() as settings:
        for key, value in own.items():
            settings.enter_context(setting(spark, key, value))
        with transfer.limited(spark, lambda: True):
            assert spark.conf.get(MAX_BYTES, None) == limit
        assert spark.conf.get(MAX_BYTES, None) == own.get(MAX_BYTES)
    assert transfer.row_size is None, "what comes after a failure is as unknown"


# ---------------------------------------------------------------------- in a query
@pytest.fixture(autouse=True)
def _no_batch_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spark_batch, "FEW_ROWS", 0)


class NotingSink(FileSink):
    """Leaves the limit that each of its transactions was written under: a file with a line for each."""

    def begin_transaction(self, context: TransactionContext) -> Any:
        task = TaskContext.get()
        assert task is not None
        with (self.folder.parent / f"limits-{self.name}").open("a") as notes:
            notes.write(f"{context.checkpoint_id} {task.getLocalProperty(MAX_BYTES)}\n")
        with (self.folder.parent / f"descriptions-{self.name}").open("a") as notes:
            notes.write(f"{task.getLocalProperty('spark.job.description')}\n")
        return super().begin_transaction(context)


def limits(sink: NotingSink) -> dict[int, list[str]]:
    """By checkpoint."""
    found: dict[int, list[str]] = {}
    for line in (sink.folder.parent / f"limits-{sink.name}").read_text().splitlines():
        n, limit = line.split()
        found.setdefault(int(n), []).append(limit)
    return found


def run(
    spark: SparkSession,
    folder: Path,
    shape: Callable[[DataFrame], DataFrame],
    names: tuple[str, ...] = ("a",),
    transform: Callable[[DataFrame], DataFrame] | None = None,
    inside: Callable[[DataFrame], DataFrame] = lambda df: df,
    **config: Any,
) -> list[NotingSink]:
    """A query with three checkpoints of 10 rows each, in two partitions. `inside` is called in foreachBatch."""
    sinks = []
    for name in names:
        (folder / name).mkdir()
        sinks.append(NotingSink(folder / name, name))
        sinks[-1].transform = transform
    source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 10).option("numPartitions", 2)
    writer = shape(source.load().selectExpr("value AS id")).writeStream
    done: list[int] = []
    with CheckpointCoordinator("job", sinks, f"file://{folder}/storage", CheckpointConfig(**config)) as coordinator:

        def each(df: DataFrame, n: int) -> None:
            if n < 3:
                coordinator(inside(df), n)
                assert df.sparkSession.conf.get(MAX_BYTES, None) is None, "it was not put back"
                done.append(n)

        query = writer.foreachBatch(each).option("checkpointLocation", f"{folder}/spark").start()
        wait_for(lambda: len(done) == 3 or not query.isActive)
        query.stop()
    assert query.exception() is None
    return sinks


@HAS_BYTE_LIMIT
def test_the_limit_is_off_in_a_query(spark: SparkSession, tmp_path: Path) -> None:
    [sink] = run(spark, tmp_path, lambda df: df.selectExpr("id", "'x' AS name"))
    assert [set(limits(sink)[n]) for n in range(3)] == [{"None"}, {UNLIMITED}, {UNLIMITED}]
    assert sorted(row["id"] for row in visible(sink)) == list(range(30))


class CountingSink(FileSink):
    """Leaves the number of rows of each record batch, by checkpoint."""

    def begin_transaction(self, context: TransactionContext) -> Any:
        self.checkpoint = context.checkpoint_id
        return super().begin_transaction(context)

    def write(self, transaction: Any, batch: pa.RecordBatch) -> None:
        with (self.folder.parent / "batches").open("a") as notes:
            notes.write(f"{self.checkpoint} {batch.num_rows}\n")
        super().write(transaction, batch)


@pytest.mark.skipif(not SPARK_3, reason="Spark limits the bytes of a record batch since 4.0")
def test_large_rows_come_in_few(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second checkpoint on: 10 rows of 100 kB in each partition, where 300 kB are the most."""
    monkeypatch.setattr(spark_batch, "LARGEST_BATCH", 300_000)
    (tmp_path / "rows").mkdir()
    sink = CountingSink(tmp_path / "rows")
    source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 20).option("numPartitions", 2)
    rows = source.load().selectExpr("value AS id", "repeat('x', 100000) AS v")
    done: list[int] = []
    with CheckpointCoordinator("job", [sink], f"file://{tmp_path}/storage") as coordinator:

        def each(df: DataFrame, n: int) -> None:
            if n < 2:
                coordinator(df, n)
                done.append(n)

        query = rows.writeStream.foreachBatch(each).option("checkpointLocation", f"{tmp_path}/spark").start()
        wait_for(lambda: len(done) == 2 or not query.isActive)
        query.stop()
    assert query.exception() is None
    counts = {tuple(map(int, line.split())) for line in (tmp_path / "batches").read_text().splitlines()}
    assert counts == {(0, 10), (1, 2), (1, 1)} or counts == {(0, 10), (1, 2)}
    assert spark.conf.get(MAX_RECORDS) == "10000"


@HAS_BYTE_LIMIT
def test_the_limit_stays_after_few_rows(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoint 1 has 100 times as many."""

    def a_large_one(df: DataFrame) -> DataFrame:
        return df.selectExpr("id", "explode(if(id BETWEEN 10 AND 19, sequence(1, 100), array(0))) AS part")

    monkeypatch.setattr(spark_batch, "FEW_ROWS", 10)
    [sink] = run(spark, tmp_path, a_large_one)
    assert [set(limits(sink)[n]) for n in range(3)] == [{"None"}, {"None"}, {UNLIMITED}]
    assert len(visible(sink)) == 1020


@HAS_BYTE_LIMIT
def test_two_sinks_side_by_side(spark: SparkSession, tmp_path: Path) -> None:
    for sink in run(spark, tmp_path, lambda df: df, names=("a", "b")):
        assert [set(limits(sink)[n]) for n in range(3)] == [{"None"}, {UNLIMITED}, {UNLIMITED}]
        assert sorted(row["id"] for row in visible(sink)) == list(range(30))
    descriptions = (tmp_path / "descriptions-a").read_text()
    for n in range(3):  # after Spark's own, with the ids of query and run
        assert f"batch = {n}<br/>checkpoint {n}: pre-commit a, b" in descriptions


@HAS_BYTE_LIMIT
def test_rows_that_have_grown_bring_the_limit_back(spark: SparkSession, tmp_path: Path) -> None:
    [sink] = run(spark, tmp_path, lambda df: df.selectExpr("id", "repeat('x', if(id < 10, 10, 10000)) AS v"))
    rows = sorted((row["id"], len(row["v"])) for row in visible(sink))
    assert rows == [(id, 10 if id < 10 else 10_000) for id in range(30)]
    assert [set(limits(sink)[n]) for n in range(3)] == [{"None"}, {UNLIMITED}, {"None"}]


@pytest.mark.parametrize("where", ["query", "inside", "transform"])
def test_queries_that_run_python_keep_the_limit(spark: SparkSession, tmp_path: Path, where: str) -> None:
    """Their own functions would get record batches without any bound."""

    def same(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches

    def in_python(df: DataFrame) -> DataFrame:
        return df.mapInArrow(same, df.schema)

    shapes = {"shape": in_python} if where == "query" else {"shape": lambda df: df, where: in_python}
    [sink] = run(spark, tmp_path, **shapes)
    assert {limit for each in limits(sink).values() for limit in each} == {"None"}
    assert sorted(row["id"] for row in visible(sink)) == list(range(30))


def test_a_later_query_of_the_same_coordinator_that_runs_python(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    sink = NotingSink(tmp_path / "a", "a")
    coordinator = CheckpointCoordinator("job", [sink], f"file://{tmp_path}/storage")

    def checkpoint(shape: Callable[[DataFrame], DataFrame]) -> None:
        """A query of one checkpoint: the rows that were added since the last one."""
        spark.range(10).write.mode("append").parquet(f"{tmp_path}/rows")
        source = spark.readStream.schema("id long").parquet(f"{tmp_path}/rows")
        writer = shape(source).writeStream.foreachBatch(coordinator).trigger(availableNow=True)
        query = writer.option("checkpointLocation", f"{tmp_path}/spark").start()
        assert query.awaitTermination(300)

    def in_python(df: DataFrame) -> DataFrame:
        return df.mapInArrow(lambda batches: batches, df.schema)

    checkpoint(lambda df: df)
    checkpoint(lambda df: df)
    checkpoint(in_python)
    coordinator.close()
    assert [set(limits(sink)[n]) for n in range(3)] == [{"None"}, {"None"}, {"None"}]


def test_a_column_is_not_replaced_by_the_hash(spark: SparkSession) -> None:
    with pytest.raises(SchemaMismatch, match="is taken by the coordinator: rename this column"):
        with_row_hash(spark.range(1).withColumnRenamed("id", HASH_COLUMN.upper()))


# ---------------------------------------------------------------------- values of Kafka as JSON
def test_json_of_kafka_keeps_microseconds(spark: SparkSession) -> None:
    with setting(spark, "spark.sql.session.timeZone", "Europe/Berlin"):
        df = spark.sql(
            "SELECT timestamp_micros(1) AS at, TIMESTAMP_NTZ'2026-01-02 03:04:05.678901' AS wall,"
            " TIMESTAMP'1890-01-01 00:00:00' AS old, 1 AS n, cast(NULL AS int) AS none"
        )
        [row] = KafkaColumns(True)(df).collect()
    assert json.loads(row.value) == {
        "at": "1970-01-01T01:00:00.000001+01:00",
        "wall": "2026-01-02T03:04:05.678901",
        "old": "1890-01-01T00:00:00.000000+00:53:28",
        "n": 1,
        "none": None,
    }


MOMENTS = (
    *("2026-07-01 12:00:00.000001", "2026-01-01 00:00:00", "2026-10-25 00:30:00", "2026-10-25 01:30:00"),
    *("1969-12-31 23:59:59.999999", "1890-01-01 00:00:00", "1582-10-10 12:34:56.7", "0001-01-01 00:00:00"),
    *("1847-12-01 00:00:30", "9999-12-31 11:00:00.1"),
)
JSON_SETTINGS = {
    "spark.sql.ansi.enabled": "false",
    "spark.sql.caseSensitive": "true",
    "spark.sql.jsonGenerator.ignoreNullFields": "true",
    "spark.sql.jsonGenerator.writeNullIfWithDefaultValue": "false",
    "spark.sql.legacy.castComplexTypesToString.enabled": "true",
    "spark.sql.mapKeyDedupPolicy": "LAST_WIN",
    "spark.sql.optimizer.enableJsonExpressionOptimization": "false",
    "spark.sql.parser.quotedRegexColumnNames": "true",
    "spark.sql.timestampType": "TIMESTAMP_NTZ",
}
"""Which may alter what Spark makes of an expression; none of these is the default."""


@NO_VARIANTS
@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin", "America/St_Johns"])
def test_json_of_kafka_is_the_same_whatever_the_settings(spark: SparkSession, zone: str) -> None:
    """LEGACY is what Spark's own error advises who comes from Spark 2. Kafka's rows are compared by a replay."""
    moments = ", ".join(f"TIMESTAMP'{moment} UTC'" for moment in MOMENTS)
    moments += ", timestamp_seconds(253402400000), timestamp_seconds(-62167400000), NULL"
    df = spark.sql(
        f"SELECT at, cast(at AS date) AS day, cast(at AS timestamp_ntz) AS wall, if(second(at) = 0, NULL, at) AS rare,"
        " map('k', at, 'none', NULL) AS m, array(named_struct('at', at, 'n', 0BD), NULL) AS a, 0e-12BD AS zero,"
        " named_struct('in.ner', named_struct('b`t', cast(at AS date))) AS `s.t`, cast(NULL AS struct<d: date>) AS s,"
        " X'00ff' AS bytes, 1.5F AS f, INTERVAL '1' DAY AS span, parse_json('[1]') AS v"
        f" FROM VALUES {', '.join(f'({each})' for each in moments.split(', '))} AS t(at)"
    )

    def made(**settings: str) -> list[str]:
        with ExitStack() as stack:
            for key, value in {"spark.sql.session.timeZone": zone, **settings}.items():
                stack.enter_context(setting(spark, key, value))
            return [row.value for row in KafkaColumns(True)(df.coalesce(1)).collect()]

    usual = made()
    assert made(**{"spark.sql.legacy.timeParserPolicy": "legacy"}) == usual
    assert made(**{"spark.sql.legacy.timeParserPolicy": "EXCEPTION"}) == usual
    assert made(**JSON_SETTINGS) == usual


@pytest.mark.parametrize(
    ("column", "told"),
    [
        ("map(X'00', 1) AS m", "a map with keys of binary"),
        ("array(named_struct('a', map(array(1), 1))) AS value", "a map with keys of array<int>"),
        ("map(DATE'2024-01-01', 1) AS m", "a map with keys of date"),  # the days since 1970, to Spark
        ("map(TIMESTAMP'2024-01-01 00:00:00', 1) AS m", "a map with keys of timestamp"),
        ("map(INTERVAL '1' DAY, 1) AS m", "a map with keys of interval day"),
        ("named_struct('a', 1, 'a', 2) AS value", "a struct with two fields `a`"),
    ],
)
def test_what_json_of_kafka_cannot_tell(spark: SparkSession, column: str, told: str) -> None:
    with pytest.raises(SchemaMismatch, match=f"column `value` holds {told}"):
        KafkaColumns(True)(spark.sql(f"SELECT {column}"))


def test_json_of_kafka_names_keys_as_spark_writes_them(spark: SparkSession) -> None:
    [row] = KafkaColumns(True)(spark.sql("SELECT map('a', map(1.50BD, map(true, map(2, 3)))) AS value")).collect()
    assert json.loads(row.value) == {"a": {"1.50": {"true": {"2": 3}}}}


@NO_VARIANTS
def test_json_of_kafka_is_made_of_variants_too(spark: SparkSession) -> None:
    variants = """SELECT parse_json('{"a": [1, null]}') AS value, parse_json('"k"') AS key"""
    assert KafkaColumns(True)(spark.sql(variants)).collect() == [Row(value='{"a":[1,null]}', key='"k"')]


MEMBERS = pa.struct([("a", pa.int32()), ("b", pa.list_(pa.decimal128(38, 18)))])
OF_A_LETTER: list[tuple[pa.DataType, list[Any]]] = [
    (pa.bool_(), [True, False]),
    (pa.int8(), [-128, 127]),
    (pa.int64(), [-(2**63), 2**63 - 1]),
    (pa.float32(), [0.1, 7.038530691851209e-26]),
    (pa.float64(), [1e308, float("-inf")]),
    (pa.decimal128(38, 18), [Decimal("12345678901234567890.123456789012345678"), Decimal("-1E-18")]),
    (pa.string(), ['"\\\0ü\n', ""]),
    (pa.binary(), [b"\x00\xff", b""]),
    (pa.date32(), [date(1, 1, 1), date(9999, 12, 31)]),
    (pa.timestamp("us", "UTC"), [datetime(1, 1, 1, 0, 0, 0, 1), datetime(9999, 12, 31)]),
    (pa.timestamp("us"), [datetime(2024, 2, 29, 23, 59, 59, 999999), datetime(1, 1, 1)]),
    (MEMBERS, [{"a": 1, "b": [Decimal("0.1"), None]}, {"a": None, "b": None}]),
    (pa.list_(pa.timestamp("us")), [[datetime(2024, 1, 1), None], []]),
    (pa.map_(pa.string(), MEMBERS), [[("ä", {"a": 1, "b": []})], []]),
]


@pytest.mark.skipif(SPARK_3, reason="DataFrame.toArrow came with Spark 4.0")
def test_spark_reads_the_row_of_a_letter_as_it_was(spark: SparkSession) -> None:
    arrays = [pa.array([*values, None], kind) for kind, values in OF_A_LETTER]
    batch = pa.RecordBatch.from_arrays(arrays, [f"c{at}" for at in range(len(arrays))])
    context = TransactionContext("job", "0badcafe", 7, "sink", 1, "", batch.schema, "")
    refused = [Refusal(row, "Bad", "why") for row in range(batch.num_rows)]
    dead = letter_rows(context, batch, pa.array(range(batch.num_rows)), refused).to_pylist()
    rows = spark.createDataFrame([(one["row"],) for one in dead], "row string").coalesce(1)
    schema = StructType.fromJson(json.loads(dead[0]["row_schema"]))
    parsed = functions.from_json("row", schema, {"mode": "FAILFAST"}).alias("row")
    found = rows.select(parsed).select("row.*").toArrow()
    assert [column.combine_chunks().cast(kind) for column, (kind, _) in zip(found, OF_A_LETTER, strict=True)] == arrays
