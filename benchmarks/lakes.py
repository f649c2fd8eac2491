"""Lake tables: a micro-batch beside Spark's own Delta writer, and what a commit of many files
takes.

    # 1,000,000 rows, 5 runs; by turns, after a warm-up
    python -m benchmarks.lakes spark [ROWS] [RUNS]
    # commits of 1, 100 and 1,000 files, and after 500 checkpoints
    python -m benchmarks.lakes commits [RUNS]

Spark's writer is delta-spark in foreachBatch with `txnAppId` and `txnVersion`. Both write the same
five columns.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import pyarrow as pa
from pyspark.sql import DataFrame

from benchmarks import spark
from benchmarks.measure import Contender, rounds, spread
from coordinator import CheckpointCoordinator
from sinks.delta import DeltaSink
from sinks.iceberg import IcebergSink
from sinks.lake.sink import LakeSink
from sinks.testing.servers.maven import maven_jars
from sinks.transaction import Checkpoint, Committable, Fingerprint, TransactionId

DELTA_SPARK = "io.delta:delta-spark_4.2_2.13:4.4.0"
"""Batches until Java has compiled what both need."""
COLUMNS = (
    "i AS id",
    "concat('name-', i) AS name",
    "i / 7D AS amount",
    "cast(i % 1000 AS int) AS quantity",
    "timestamp_micros(1700000000000000 + i) AS at",
)
SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string()), ("amount", pa.float64())])


def beside_spark(rows: int, runs: int, folder: Path) -> None:
    jars = [
        jar for jar in maven_jars(DELTA_SPARK) if jar.name.startswith(("delta-", "unitycatalog-"))
    ]
    session = spark.session(
        jars,
        spark__sql__extensions="io.delta.sql.DeltaSparkSessionExtension",
        spark__sql__catalog__spark_catalog="org.apache.spark.sql.delta.catalog.DeltaCatalog",
        # of 50, which a table of few files does not need
        spark__databricks__delta__snapshotPartitions="2",
        spark__python__unix__domain__socket__enabled="true",
    )
    theirs = str(folder / "theirs")
    ours = str(folder / "ours")

    def write(df: DataFrame, batch_id: int) -> None:
        options = {"txnAppId": "bench", "txnVersion": str(batch_id)}
        df.write.format("delta").mode("append").options(**options).save(theirs)

    sinks = [DeltaSink(ours, create_table=True)]
    contenders = []
    streams = []
    with CheckpointCoordinator("bench", sinks, (folder / "checkpoints").as_uri()) as coordinator:
        for name, work in (("delta-spark", write), ("DeltaSink", coordinator)):
            df = spark.numbers(session, rows).selectExpr(*COLUMNS)
            streams.append(stream := spark.Stream(df, work, folder / f"query-{name}"))
            contenders.append(Contender(name, stream.run))
        warm = rounds(contenders, runs, None, print)
        for stream in streams:
            stream.stop()
    for contender, uri in zip(contenders, (theirs, ours), strict=True):
        table = session.read.format("delta").load(uri)
        totals = table.selectExpr("count(*)", "count(DISTINCT id)", "max(at)").first()
        assert totals is not None
        assert tuple(totals)[:2] == ((runs + warm) * rows, rows), f"{contender.name}: {totals}"
        newest = table.where(
            f"at = timestamp_micros(1700000000000000 + {rows - 1}) AND id > {rows - 2}"
        ).count()
        assert newest == runs + warm, (
            f"{contender.name}: Spark finds {newest} rows by the bounds of files"
        )
        seconds = spread([1000 * one for one in contender.seconds], "{:,.0f}")
        print(
            f"{contender.name:12s} {rows:9,d} rows: {seconds} ms, {spread(contender.processor)} "
            "CPU s"
        )
    session.stop()


def commits(runs: int, folder: Path) -> None:
    catalog = {
        "type": "sql",
        "uri": f"sqlite:///{folder}/catalog.db",
        "warehouse": f"file://{folder}/iceberg",
    }
    made: list[LakeSink] = [
        DeltaSink(folder / "delta", create_table=True, name="lake"),
        IcebergSink("bench.rows", catalog=catalog, create_table=True, name="lake"),
    ]
    for sink in made:
        checkpoint = 0
        for files in (1, 100, 1000):
            seconds = []
            for _ in range(runs):
                seconds.append(_commit(sink, checkpoint, files))
                checkpoint += 1
            print(
                f"{sink.system}: a commit of {files:5,d} files takes "
                f"{spread([s * 1000 for s in seconds])} ms"
            )
        while checkpoint < 500:
            last = _commit(sink, checkpoint, 1)
            checkpoint += 1
        times = [_commit(sink, checkpoint + n, 1) for n in range(runs)]
        print(
            f"{sink.system}: after {checkpoint} checkpoints one of a file takes "
            f"{median([*times, last]) * 1000:.1f} ms"
        )


def _commit(sink: LakeSink, checkpoint: int, files: int) -> float:
    """Seconds of `commit_all` and `purge` alone."""
    batch = pa.RecordBatch.from_pydict({"id": [1], "name": ["a"], "amount": [0.5]}, schema=SCHEMA)
    sink.check(SCHEMA)
    made: list[Committable] = []
    for subtask in range(files):
        name = TransactionId("bench", "0badcafe", checkpoint, sink.name, subtask, 1, 0, 0, 0)
        transaction = sink.begin_transaction(name.context(SCHEMA))
        sink.write(transaction, batch)
        made.append(sink.snapshot_state(transaction).of(sink.name, subtask, Fingerprint(1)))
    began = time.perf_counter()
    answers = sink.commit_all(
        Checkpoint("bench", "0badcafe", checkpoint, max(0, checkpoint - 1)), made
    )
    sink.purge(Checkpoint("bench", "0badcafe", checkpoint, max(0, checkpoint - 1)))
    seconds = time.perf_counter() - began
    assert all(str(getattr(one, "state", one)) for one in answers), answers
    return seconds


def main(what: str = "spark", *numbers: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        given = [int(number.replace(",", "")) for number in numbers]
        if what == "spark":
            rows, runs = (*given, *(1_000_000, 5)[len(given) :])
            beside_spark(rows, runs, Path(folder))
        else:
            commits(given[0] if given else 5, Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
