"""Java of the tests: most of its processes live for seconds, in which they load and compile Spark's classes.

    python -m tests.jvm

archives those that a streaming job loads, for all later starts of Spark (JEP 350, "Dynamic CDS Archives").
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

CLASSES = Path(__file__).parents[1] / ".cache" / "spark-classes.jsa"
SHORT_LIVED = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
QUIET = "-Xlog:disable -Xlog:all=off"


def prepare() -> None:
    """Have the Java processes that start from now on start fast; with `CLASSES`, if it is there: a JVM of another
    version, or with other classes, goes without it."""
    _set(f"{SHORT_LIVED} -XX:SharedArchiveFile={CLASSES} {QUIET}" if CLASSES.exists() else SHORT_LIVED)


def archive() -> None:
    """Run a small streaming job, and keep the classes of its JVM in `CLASSES`."""
    from pyspark.sql import DataFrame, SparkSession

    CLASSES.parent.mkdir(exist_ok=True)
    file = CLASSES.with_suffix(".new")
    _set(f"{SHORT_LIVED} -XX:ArchiveClassesAtExit={file} {QUIET}")
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")

    def same(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return batches

    def work(df: DataFrame, _: int) -> None:
        df.mapInArrow(same, df.schema).collect()

    with tempfile.TemporaryDirectory() as folder:
        table = pa.table({"id": pa.array([1], pa.int64())})
        (Path(folder) / "input").mkdir()
        pq.write_table(table, Path(folder) / "input" / "0.parquet")
        spark = (
            SparkSession.builder.master("local[1]")
            .config("spark.driver.host", "127.0.0.1")
            .config("spark.driver.bindAddress", "127.0.0.1")
            .config("spark.ui.enabled", "false")
            .config("spark.ui.showConsoleProgress", "false")
            .config("spark.local.dir", folder)
            .config("spark.log.level", "OFF")
            .getOrCreate()
        )
        stream = spark.readStream.schema("id long").parquet(f"{folder}/input").writeStream.foreachBatch(work)
        stream.option("checkpointLocation", f"{folder}/spark").trigger(availableNow=True).start().awaitTermination()
        gateway = spark.sparkContext._gateway
        assert gateway is not None
        spark.stop()
        gateway.proc.stdin.close()
        gateway.proc.wait(120)
    file.replace(CLASSES)


def _set(options: str) -> None:
    before = os.environ.get("JAVA_TOOL_OPTIONS", "")
    if options not in before:
        os.environ["JAVA_TOOL_OPTIONS"] = f"{before} {options}".strip()


if __name__ == "__main__":
    archive()
