"""PostgresSink beside its peers and its limits, in one run: `make bench`, or

    python -m benchmarks.postgres [--rows 1000000] [--runs 5] [--only throughput,small] [--shapes plain,wide] [--flink]

Sections: throughput, small, participants, growth, memory. The tables that are printed are Markdown.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from statistics import median

from pyspark.sql import DataFrame, SparkSession

from benchmarks import direct, flink, memory, protocol
from benchmarks import spark as sparks
from benchmarks.measure import Contender, ratios, rounds, spread, table
from benchmarks.shapes import PLAIN, SHAPES, Shape
from benchmarks.target import SETTINGS, Target
from coordinator import CheckpointConfig, CheckpointCoordinator
from sinks.postgres import PostgresSink
from sinks.testing.servers.postgres import PostgresServer

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".cache"
FLINK = ROOT.parent / "shared" / "peers" / "flink"
GROWTH_LIMIT = 300.0
"""Seconds for each storage of the growth section."""
SECTIONS = ("throughput", "small", "participants", "growth", "memory")

# Of the throughput section, where others are compared with them.
PREPARED, STAGED, AT_LEAST_ONCE = "exactly-once, prepared", "exactly-once, staged", "at-least-once"
COUNT, COPY_1, COPY_2 = (
    "mapInArrow, rows counted",
    "psql \\copy binary, 1 connection",
    "psql \\copy binary, 2 connections",
)
DIRECT_1, DIRECT_2 = "sink without Spark, 1 process", "sink without Spark, 2 processes"


def jdbc_name(batchsize: int, rewrite: bool) -> str:
    return f"Spark JDBC, batchsize {batchsize:,}, rewrite {'on' if rewrite else 'off'}"


class Bench:
    """One run: the server, the session, a folder, and what was asked for."""

    def __init__(self, options: argparse.Namespace, server: PostgresServer, folder: Path, stack: ExitStack) -> None:
        self.options = options
        self.server = server
        self.folder = folder
        self.stack = stack
        self._spark: SparkSession | None = None

    @property
    def spark(self) -> SparkSession:
        if self._spark is None:
            self._spark = sparks.session(CACHE)
            self.stack.callback(self.stop_spark)
        return self._spark

    def stop_spark(self) -> None:
        if self._spark is not None:
            self._spark.stop()
            self._spark = None

    def coordinator(self, stack: ExitStack, name: str, sink: PostgresSink, mode: str) -> CheckpointCoordinator:
        storage = (self.folder / "storage" / name).as_uri()
        config = CheckpointConfig(mode=mode)  # type: ignore[arg-type]
        return stack.enter_context(CheckpointCoordinator(name, [sink], storage, config))

    # ------------------------------------------------------------------ sections
    def throughput(self, shape: Shape) -> None:
        """From df to committed, against Spark's JDBC writer, and against what bounds it."""
        runs, count = self.options.runs, self.options.rows
        with ExitStack() as stack:
            dsn = stack.enter_context(self.server.database())
            target = Target(self.server, dsn, shape, count)
            stack.callback(target.close)
            contenders = self._spark_contenders(stack, dsn, target, shape) + self._direct_contenders(
                stack, dsn, target, shape
            )
            rounds(contenders, runs, self.options.warm, tell)
            by_name = {contender.name: contender for contender in contenders}
        best_jdbc = min((c for c in contenders if c.name.startswith("Spark JDBC")), key=lambda c: median(c.seconds))
        say(f"\n## {shape.name}: {count:,} rows, {runs} rounds\n")
        bases = [best_jdbc, by_name[COUNT]]
        lines = []
        for c in contenders:
            rates = [count / s / 1e6 for s in c.seconds]
            times = [spread(ratios(c, base)) for base in bases]
            lines.append([c.name, spread(rates), *times, f"{median(c.load):.1f}"])
        say(table(["what", "million rows/s", "x best Spark JDBC", "x mapInArrow bound", "load"], lines))
        say("\nAims, ratios of the same round:\n")
        ours = by_name[PREPARED]
        aims = [
            ("exactly-once over Spark's best JDBC setting", ours, best_jdbc, 2.2),
            ("exactly-once over Spark's default JDBC setting", ours, by_name[jdbc_name(1000, False)], 4.0),
            ("exactly-once over mapInArrow with nothing behind it", ours, by_name[COUNT], 0.85),
            ("fed directly over \\copy, 1 connection", by_name[DIRECT_1], by_name[COPY_1], 0.9),
            ("fed directly over \\copy, 2 connections", by_name[DIRECT_2], by_name[COPY_2], 0.9),
            ("exactly-once over at-least-once", ours, by_name[AT_LEAST_ONCE], 0.95),
        ]
        say(table(["what", "aim", "measured"], [[w, f">= {aim}", spread(ratios(a, b))] for w, a, b, aim in aims]))

    def _spark_contenders(self, stack: ExitStack, dsn: str, target: Target, shape: Shape) -> list[Contender]:
        rows = self.options.rows
        works: list[tuple[str, sparks.Work, bool]] = []
        for name, strategy, mode in (
            (PREPARED, "prepared", "exactly_once"),
            (STAGED, "staged", "exactly_once"),
            (AT_LEAST_ONCE, "prepared", "at_least_once"),
        ):
            job = f"{shape.name}-{mode}-{strategy}"
            sink = PostgresSink(dsn, "t", name=job, strategy=strategy)  # type: ignore[arg-type]
            works.append((name, self.coordinator(stack, job, sink, mode), False))
        for batchsize in (1000, 10_000):
            for rewrite in (False, True):
                user, password = self.server.user, self.server.password
                url = self.server.jdbc_url.rpartition("/")[0] + "/" + dsn.rpartition("/")[2]
                work = sparks.jdbc(url, user, password, "t", batchsize=batchsize, rewrite=rewrite)
                works.append((jdbc_name(batchsize, rewrite), work, True))
        contenders = []
        for name, work, jdbc in works:
            stream = self._stream(stack, shape.of(sparks.numbers(self.spark, rows), jdbc=jdbc), work)
            contenders.append(Contender(name, stream.run, target.clear, target.check))
        stream = self._stream(stack, shape.of(sparks.numbers(self.spark, rows)), sparks.count_in_python(rows))
        return [*contenders, Contender(COUNT, stream.run)]

    def _direct_contenders(self, stack: ExitStack, dsn: str, target: Target, shape: Shape) -> list[Contender]:
        contenders = []
        rows = shape.of(self.spark.range(self.options.rows).selectExpr("id AS i")).toArrow()
        for parts, copy, fed in ((1, COPY_1, DIRECT_1), (2, COPY_2, DIRECT_2)):
            paths = target.dump(self.folder, parts)
            run_copy = _later(direct.copy_files, dsn, paths)
            contenders.append(Contender(copy, run_copy, target.clear, target.check))
            sink = PostgresSink(dsn, "t", name=f"{shape.name}-direct-{parts}", strategy="prepared")
            feeders = direct.Feeders(sink, rows, parts, self.folder)
            stack.callback(feeders.close)
            contenders.append(Contender(fed, feeders.run, target.clear, target.check))
        return contenders

    def _stream(self, stack: ExitStack, df: DataFrame, work: sparks.Work) -> sparks.Stream:
        stream = sparks.Stream(df, work, Path(tempfile.mkdtemp(dir=self.folder)))
        stack.callback(stream.stop)
        return stream

    def small(self) -> None:
        """What a checkpoint of 0 or 100 rows adds to foreachBatch with the same Spark job."""
        runs = self.options.runs * 6
        lines = []
        with ExitStack() as stack:
            dsn = stack.enter_context(self.server.database())
            groups: list[list[Contender]] = []
            with self.server.connect(dsn) as admin:
                admin.execute(PLAIN.create_table("t"))
            for rows in (0, 100):
                group = []
                for name, strategy in (("Spark job alone", ""), (PREPARED, "prepared"), (STAGED, "staged")):
                    work: sparks.Work = sparks.job_only
                    if strategy:
                        job = f"small-{rows}-{strategy}"
                        sink = PostgresSink(dsn, "t", name=job, strategy=strategy)  # type: ignore[arg-type]
                        work = self.coordinator(stack, job, sink, "exactly_once")
                    stream = self._stream(stack, PLAIN.of(sparks.numbers(self.spark, rows)), work)
                    group.append(Contender(f"{rows} rows: {name}", stream.run))
                groups.append(group)
            rounds([c for group in groups for c in group], runs, 5, tell)
            for base, *others in groups:
                for c in (base, *others):
                    added = [(a - b) * 1000 for a, b in zip(c.seconds, base.seconds, strict=True)]
                    times = [s * 1000 for s in c.seconds]
                    lines.append([c.name, spread(times, "{:.0f}"), spread(added, "{:.0f}"), f"{median(c.load):.1f}"])
        say(f"\n## Small checkpoints, {runs} rounds (aim: <= 50 ms added)\n")
        say(table(["what", "ms", "ms added", "load"], lines))

    def participants(self) -> None:
        """How long 1,000 participants take to commit."""
        contenders = []
        with ExitStack() as stack:
            dsn = stack.enter_context(self.server.database())
            with self.server.connect(dsn) as admin:
                admin.execute("CREATE TABLE t (id bigint, name text, amount double precision)")
            for strategy in ("prepared", "staged"):
                sink = PostgresSink(dsn, "t", name=f"many-{strategy}", strategy=strategy)
                many = protocol.ManyParticipants(sink, 1000, (self.folder / "many" / strategy).as_uri())
                stack.callback(many.close)
                contenders.append(Contender(f"1,000 participants: {strategy}", many.run))
            rounds(contenders, min(self.options.runs, 3), 1, tell)
        say("\n## Commit of 1,000 participants (aim: < 1 s)\n")
        say(table(["what", "s", "load"], [[c.name, spread(c.seconds), f"{median(c.load):.1f}"] for c in contenders]))

    def growth(self) -> None:
        """What a checkpoint costs after many earlier ones: coordinator and storage alone."""
        marks = [mark for mark in (1000, 10_000, 100_000) if mark <= self.options.earlier]
        fast = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else self.folder
        folder = Path(tempfile.mkdtemp(dir=fast))
        self.stack.callback(shutil.rmtree, folder, ignore_errors=True)
        lines = []
        for name, uri in (
            ("memory:", "memory:growth"),
            (f"file: on {fast}", (folder / "files").as_uri()),
            (f"sqlite: on {fast}", f"sqlite:///{folder}/storage.sqlite"),
        ):
            start = time.perf_counter()
            found = protocol.growth(uri, marks, GROWTH_LIMIT)
            tell(f"growth {name}: {time.perf_counter() - start:.0f} s")
            cells = [f"{found[mark] * 1000:.2f}" if mark in found else "not reached" for mark in marks]
            lines.append([name, *cells])
        say("\n## ms per checkpoint after this many earlier ones, by storage (aim: does not grow)\n")
        say(table(["storage", *(f"{mark:,}" for mark in marks)], lines))

    def memory(self) -> None:
        """Whether a task's memory grows with its partition. Restarts Spark, for fresh Python workers."""
        self.stop_spark()
        sizes, found = (100_000, 2_000_000), []
        spark = sparks.session(CACHE, **memory.FRESH_WORKERS)
        try:
            with self.server.database() as dsn:
                with self.server.connect(dsn) as admin:
                    admin.execute(PLAIN.create_table("t"))
                for run in range(min(self.options.runs, 3)):
                    for rows in sizes:
                        sink = memory.WatchedSink(dsn, "t", name=f"memory-{run}", strategy="prepared")
                        peak = memory.peak(spark, sink, PLAIN, rows, self.folder / f"memory-{run}-{rows}")
                        tell(f"round {run + 1} peak of a task with {rows:,} rows: {peak:.1f} MiB")
                        found.append((rows, peak))
        finally:
            spark.stop()
        say("\n## Peak memory of a task's Python worker, MiB (aim: does not grow)\n")
        lines = [[f"{rows:,}", spread([p for r, p in found if r == rows], "{:.1f}")] for rows in sizes]
        say(table(["rows of the partition", "MiB"], lines))

    def flink(self) -> None:
        """Flink's XA sink on the same server, after the others: it is a program of its own."""
        say(f"\n## Flink, plain rows, {self.options.rows:,} of them, on the same server\n")
        lines = []
        with self.server.database() as dsn:
            for name, rates in flink.measure(FLINK, CACHE, self.server, dsn, self.options.rows, self.options.runs):
                tell(f"{name}: {spread(rates, '{:,.0f}')} rows/s")
                lines.append([name, spread([rate / 1e6 for rate in rates]), f"{os.getloadavg()[0]:.1f}"])
        say(table(["what", "million rows/s", "load"], lines))


def _later(function: Callable[..., float], *arguments: object) -> Callable[[], float]:
    return lambda: function(*arguments)


def tell(line: str) -> None:
    print(f"  {line}", flush=True)


def say(text: str) -> None:
    print(text, flush=True)


def heading(server_version: str) -> str:
    releases = " ".join(f"{name} {version(name)}" for name in ("pyspark", "pyarrow", "psycopg", "pgpq"))
    return (
        f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, "
        f"Python {platform.python_version()}, {releases}, PostgreSQL {server_version} with "
        + ", ".join(f"{name}={value}" for name, value in SETTINGS.items())
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.postgres", description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--runs", type=int, default=5, help="rounds that count")
    parser.add_argument("--warm", type=int, default=2, help="rounds before, that do not count")
    parser.add_argument("--only", default=",".join(SECTIONS), help=f"of {','.join(SECTIONS)}")
    parser.add_argument("--shapes", default=",".join(SHAPES), help=f"of {','.join(SHAPES)}, for throughput")
    parser.add_argument("--earlier", type=int, default=100_000, help="earlier checkpoints to simulate, for growth")
    parser.add_argument("--flink", action="store_true", help=f"also Flink's sink: {FLINK.relative_to(ROOT.parent)}")
    options = parser.parse_args(arguments)
    chosen = options.only.split(",") if options.only else []
    if unknown := [*(set(chosen) - set(SECTIONS)), *(set(options.shapes.split(",")) - set(SHAPES))]:
        parser.error(f"unknown: {', '.join(unknown)}")
    if options.flink and not FLINK.exists():
        parser.error(f"there is no {FLINK}")
    CACHE.mkdir(exist_ok=True)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True)))
        server = stack.enter_context(PostgresServer(SETTINGS))
        with server.connect() as connection:
            number = connection.info.server_version
        say(heading(f"{number // 10000}.{number % 10000}"))
        bench = Bench(options, server, folder, stack)
        for section in chosen:
            if section == "throughput":
                for name in options.shapes.split(","):
                    bench.throughput(SHAPES[name])
            else:
                getattr(bench, section)()
        if options.flink:
            bench.flink()


if __name__ == "__main__":
    main()
