"""Spark's side: the session, streaming queries that wait until they are asked for a batch, and what
they do with it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import Queue
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from coordinator.task.row_hash import with_row_hash

CORES = 2

Work = Callable[[DataFrame, int], Any]


def session(jars: Sequence[Path | str], **conf: str) -> SparkSession:
    """A local session with these jars."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = (
        SparkSession.builder.master(f"local[{CORES}]")
        .config("spark.driver.memory", "3g")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.shuffle.partitions", str(CORES))
        .config("spark.jars", ",".join(map(str, jars)))
        .config("spark.log.level", "ERROR")
    )
    for key, value in conf.items():
        builder = builder.config(key.replace("__", "."), value)
    return builder.getOrCreate()


def numbers(spark: SparkSession, rows: int, partitions: int = CORES) -> DataFrame:
    """A stream with the numbers 0 … rows-1 as column `i` in every micro-batch."""
    source = spark.readStream.format("rate-micro-batch")
    source = source.option("rowsPerBatch", max(rows, 1)).option("numPartitions", partitions)
    df = source.load().selectExpr(f"value % {max(rows, 1)} AS i")
    return df if rows else df.where("i < 0")


class Stream:
    """One streaming query, whose micro-batches wait inside foreachBatch until `run` asks for
    one."""

    def __init__(self, df: DataFrame, work: Work, folder: Path) -> None:
        self.work = work
        self._asked: Queue[bool] = Queue()
        self._answers: Queue[float | BaseException] = Queue()
        writer = df.writeStream.foreachBatch(self._batch).option("checkpointLocation", str(folder))
        self._query = writer.trigger(processingTime="0 seconds").start()

    def _batch(self, df: DataFrame, batch_id: int) -> None:
        if not self._asked.get():
            return
        start = time.perf_counter()
        try:
            self.work(df, batch_id)
        except BaseException as error:
            self._answers.put(error)
            raise
        self._answers.put(time.perf_counter() - start)

    def run(self) -> float:
        """Let one micro-batch pass; returns the seconds from the begin of foreachBatch to its
        end."""
        self._asked.put(True)
        answer = self._answers.get()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def stop(self) -> None:
        for _ in range(1000):  # batches may follow before the query stops
            self._asked.put(False)
        self._query.stop()


def jdbc(url: str, user: str, password: str, table: str, *, batchsize: int, rewrite: bool) -> Work:
    """Spark's JDBC writer. `stringtype` lets it write text into jsonb."""

    def work(df: DataFrame, batch_id: int) -> None:
        df.write.format("jdbc").mode("append").options(
            url=f"{url}?stringtype=unspecified"
            + ("&reWriteBatchedInserts=true" if rewrite else ""),
            driver="org.postgresql.Driver",
            user=user,
            password=password,
            dbtable=table,
            batchsize=batchsize,
        ).save()

    return work


def kafka(bootstrap: str, topic: str, **options: str) -> Work:
    """Spark's Kafka sink, with options of its producer; __ in their names stands for a dot."""
    producer = {f"kafka.{name.replace('__', '.')}": value for name, value in options.items()}

    def work(df: DataFrame, batch_id: int) -> None:
        writer = df.write.format("kafka").options(**producer)
        writer.option("kafka.bootstrap.servers", bootstrap).option("topic", topic).save()

    return work


def count_in_python(expected: int) -> Work:
    """mapInArrow with nothing behind it: the rows arrive in Python and are counted."""

    def count(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rows = sum(batch.num_rows for batch in batches)
        yield pa.RecordBatch.from_pydict({"rows": pa.array([rows], pa.int64())})

    def work(df: DataFrame, batch_id: int) -> None:
        arrived = sum(row.rows for row in df.mapInArrow(count, "rows bigint").collect())
        if arrived != expected:
            raise AssertionError(f"{arrived} rows arrived in Python, not {expected}")

    return work


def rows_only(df: DataFrame, batch_id: int) -> None:
    """The least that Spark does for rows that leave its JVM: a job that gives them to the driver,
    no Python worker."""
    df.toArrow()


def job_only(df: DataFrame, batch_id: int) -> None:
    """The Spark job of a checkpoint without a coordinator: hashed rows to Python, one row back for
    each partition."""

    def acknowledge(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rows = sum(batch.num_rows for batch in batches)
        yield pa.RecordBatch.from_pydict({"ack": pa.array([str(rows)])})

    with_row_hash(df).mapInArrow(acknowledge, "ack string").collect()
