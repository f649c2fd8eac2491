"""A disk fills up under a query: Spark's checkpointLocation, checkpoint storage, or spark.local.dir."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from coordinator import CheckpointCoordinator, CheckpointListener, Step
from examples.custom_sink import FileSink
from tests.spark.job import CONF, wait_for
from tests.spark.test_spark import visible
from tests.storage.test_failures import in_mount, needs_mount

PAGE = 4096


def fill(folder: Path, pages_left: int = 0) -> None:
    with (folder / "ballast").open("wb", buffering=0) as ballast:
        free = os.statvfs(folder)
        ballast.write(bytes(max(0, free.f_bavail * free.f_bsize - pages_left * PAGE)))


@dataclass
class FillAfterSecond(CheckpointListener):
    folder: Path
    pages_left: int

    def on_step(self, step: Step, checkpoint_id: int, facts: Mapping[str, Any]) -> None:
        if step is Step.DONE and checkpoint_id == 1:
            fill(self.folder, self.pages_left)


def play(small: Path, folder: Path, full: Mapping[str, Sequence[int]]) -> None:
    """Prints, for each place that is on the small disk and each time at which that is full, the error and the rows."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[2]")
    for key, value in (CONF | {"spark.local.dir": str(small)}).items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    numbers = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 10).load()

    def run(name: str, spark_at: Path, storage_at: Path, df: Any, *listeners: CheckpointListener) -> str:
        (folder / name).mkdir(exist_ok=True)
        sink = FileSink(folder / name)
        try:
            with CheckpointCoordinator(name, [sink], storage_at.as_uri(), listeners=listeners) as coordinator:
                writer = coordinator.write_stream(df).option("checkpointLocation", str(spark_at / name))
                query = writer.start()
                if listeners:
                    query.awaitTermination(300)
                else:
                    wait_for(lambda: len(query.recentProgress) >= 2 or not query.isActive)
                    if error := query.exception():
                        raise error
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def over(name: str, spark_at: Path, storage_at: Path, df: Any, pages_left: int) -> None:
        error = run(name, spark_at, storage_at, df, FillAfterSecond(small, pages_left))
        before = len(visible(FileSink(folder / name)))
        (small / "ballast").unlink()
        again = run(name, spark_at, storage_at, df)
        values = sorted(row["value"] for row in visible(FileSink(folder / name)))
        print(json.dumps([name, error, again, before, len(values), values == list(range(len(values)))]))

    places = {
        "location": (small, folder, numbers),
        "storage": (folder, small, numbers),
        "local": (folder, folder, numbers.repartition(3)),
    }
    for place, many in full.items():
        for pages_left in many:
            over(f"{place}-{pages_left}", *places[place], pages_left)


# Into its location a batch writes an offset and a commit, each with a checksum.
FULL = {"location": (0, 2), "storage": (0, 1), "local": (0,)}
AT_A_CHECKSUM = {"location": (1, 3, 4)}


@needs_mount
@pytest.mark.slow
@pytest.mark.parametrize(
    "full", [FULL, pytest.param(AT_A_CHECKSUM, marks=pytest.mark.large)], ids=["", "at a checksum"]
)
def test_the_query_stops_and_goes_on_when_there_is_space(tmp_path: Path, full: Mapping[str, Sequence[int]]) -> None:
    small = tmp_path / "small"
    call = f"play(Path({str(small)!r}), Path({str(tmp_path)!r}), {full})"
    code = f"from pathlib import Path; from tests.spark.test_full_disk import play; {call}"
    printed = in_mount("tmpfs -o size=8m", small, [sys.executable, "-c", code])
    told = [json.loads(line) for line in printed.splitlines()]
    assert len(told) == sum(map(len, full.values()))
    for name, error, again, before, rows, each_once in told:
        assert "No space left on device" in error, name
        assert again == "", name
        assert before >= 20, name
        assert rows > before, name
        assert each_once, name
