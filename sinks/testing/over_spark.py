"""`OverSpark`: the sink in a real local Spark, for those who want to see that too.

It takes half a minute.

class TestMySink(OverSpark, SinkConformance):
    ...
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq

from coordinator import CheckpointConfig, CheckpointCoordinator, CheckpointListener, Step
from sinks.base import Sink
from sinks.testing.clauses import Clause
from sinks.testing.driver import COMMIT_TIMEOUT, KILLED, KillAt, in_process
from sinks.testing.kit import SinkTests, rows

_TIMEOUT = 600  # seconds for a driver, which takes 20 on a laptop


@dataclass
class _Query:
    """Reads the files to their end into the sink, two a batch."""

    job: str
    sink: Sink
    folder: Path
    listeners: Sequence[CheckpointListener] = ()

    def __call__(self) -> None:
        os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        from pyspark.sql import SparkSession

        builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
        spark = builder.config("spark.local.dir", str(self.folder / "local")).getOrCreate()
        reader = spark.readStream.schema("id long, name string, amount double").option(
            "maxFilesPerTrigger", 2
        )
        storage = f"file://{self.folder / 'storage'}"
        config = CheckpointConfig(commit_timeout=COMMIT_TIMEOUT)
        with CheckpointCoordinator(
            self.job, [self.sink], storage, config, self.listeners
        ) as coordinator:
            writer = coordinator.write_stream(reader.parquet(str(self.folder / "input")))
            writer = writer.option("checkpointLocation", str(self.folder / "query")).trigger(
                availableNow=True
            )
            writer.start().awaitTermination()
        spark.stop()


class OverSpark(SinkTests):
    """One test more, for a class with the hooks of `SinkTests`."""

    def test_over_a_local_spark(self, sink: Sink, tmp_path: Path) -> None:
        """A driver that is killed with a checkpoint complete and nothing of it committed, and the
        next."""
        tables = [rows(1000 * n, 50) for n in range(6)]
        (tmp_path / "input").mkdir()
        for n, table in enumerate(tables):
            file = tmp_path / "input" / f"{n}.parquet"
            pq.write_table(table, file)
            os.utime(file, (1_700_000_000 + n, 1_700_000_000 + n))
        kill = KillAt(Step.COMPLETE, checkpoint_id=1)
        for listeners, expected in (([kill], KILLED), ([], 0)):
            query = _Query(self.job, sink, tmp_path, listeners)
            ended = in_process(query, tmp_path, type(sink), _TIMEOUT)
            self.expect_end(Clause.EXACTLY_ONCE, "a driver of Spark", ended, expected)
        self.expect_rows(sink, Clause.EXACTLY_ONCE, "after a driver of Spark was killed", *tables)
        self.expect_doubts(sink, Clause.EXACTLY_ONCE, "after a driver of Spark was killed")
