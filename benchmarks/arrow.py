"""The way of rows into Python, with nothing behind it: under Spark's limit on record batches, and
without, as small rows come: `python -m benchmarks.arrow [--rows 1000000] [--runs 5] [--shapes
plain,wide]`.

Then the largest record batch, by the size of rows. The tables that are printed are Markdown.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial

import pyarrow as pa
from pyspark.sql import DataFrame

from benchmarks.bench import Bench, command_line, heading, report, say, tell, working_folder
from benchmarks.measure import Contender, rounds, table
from benchmarks.shapes import SHAPES, Shape
from benchmarks.spark import CORES
from coordinator.spark.batch import MAX_BYTES, UNLIMITED, setting
from coordinator.task.row_hash import with_row_hash

SECTIONS = ("throughput", "memory")
SPARKS = "Spark's limit"
NONE = "no limit"

Way = Callable[[DataFrame], AbstractContextManager[None]]
"""How a DataFrame with hashes is handed to Python while it lasts."""

SIZES = pa.schema([("rows", pa.int64()), ("bytes", pa.int64())])

ROWS = {
    "100 bytes": "repeat('x', 100)",
    "10 kB": "repeat('x', 10000)",
    "100 bytes, then 1 MB": "repeat('x', if(id < 5000, 100, 1000000))",
}
"""Of 5,100 rows in one partition. As many of 1 MB, without a limit, are more than a JVM holds, and
end it."""


@contextmanager
def without_limit(df: DataFrame) -> Iterator[None]:
    with setting(df.sparkSession, MAX_BYTES, UNLIMITED):
        yield


WAYS: dict[str, Way] = {SPARKS: lambda df: nullcontext(), NONE: without_limit}


def record_batches(df: DataFrame) -> list[tuple[int, int]]:
    """Rows and bytes of each that arrives in Python."""

    def sizes(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        sizes = [(batch.num_rows, batch.nbytes) for batch in batches]
        yield pa.RecordBatch.from_pylist([{"rows": r, "bytes": b} for r, b in sizes], schema=SIZES)

    return [
        (row.rows, row.bytes) for row in df.mapInArrow(sizes, "rows long, bytes long").collect()
    ]


class ArrowBench(Bench):
    def throughput(self, shape: Shape) -> None:
        rows = self.options.rows
        df = with_row_hash(shape.of(self.spark.range(0, rows, 1, CORES).selectExpr("id AS i")))

        def run(way: Way) -> float:
            start = time.perf_counter()
            with way(df):
                arrived = sum(rows for rows, _ in record_batches(df))
            if arrived != rows:
                raise AssertionError(f"{arrived} rows arrived in Python, not {rows}")
            return time.perf_counter() - start

        by_name = {name: Contender(name, partial(run, way)) for name, way in WAYS.items()}
        warm = rounds(list(by_name.values()), self.options.runs, self.options.warm, tell)
        sparks = by_name[SPARKS]
        none = by_name[NONE]
        aims = [("over Spark's limit", none, sparks, 1.5)]
        report(
            f"{shape.name}, {rows:,} rows, {self.options.runs} rounds after {warm}",
            rows,
            list(by_name.values()),
            [("Spark's limit", sparks)],
            aims,
        )

    def memory(self) -> None:
        lines = []
        for name, value in ROWS.items():
            df = with_row_hash(self.spark.range(0, 5100, 1, 1).selectExpr("id", f"{value} AS v"))
            largest = []
            for way in WAYS.values():
                with way(df):
                    largest.append(max(size for _, size in record_batches(df)) / 2**20)
            lines.append([name, *(f"{size:.1f}" for size in largest)])
        say("\n## The largest record batch, MiB\n")
        say(table(["rows of", *WAYS], lines))


def main(arguments: list[str] | None = None) -> None:
    parser = command_line("benchmarks.arrow", __doc__, SECTIONS, list(SHAPES))
    options = parser.options(arguments)
    with ExitStack() as stack:
        bench = ArrowBench(None, options, working_folder(stack), stack)
        say(heading([], "no server"))
        for name in options.shapes if "throughput" in options.only else []:
            bench.throughput(SHAPES[name])
        if "memory" in options.only:
            bench.memory()


if __name__ == "__main__":
    main(sys.argv[1:])
