"""PostgresSink beside its peers and its limits, in one run: `make bench`, or

    python -m benchmarks.postgres [--rows 1000000] [--runs 5] [--only throughput,small]
        [--shapes plain,wide] [--flink]

Sections: throughput, small, steps, tail, paced, participants, growth, memory. The tables that are
printed are Markdown.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from benchmarks import direct, flink, memory, protocol
from benchmarks import spark as sparks
from benchmarks.bench import (
    FEW,
    Bench,
    command_line,
    heading,
    report,
    save,
    say,
    show,
    tell,
    working_folder,
)
from benchmarks.measure import Contender, rounds, spread
from benchmarks.shapes import PLAIN, SHAPES, Shape
from benchmarks.target import SETTINGS, Target
from sinks.postgres import PostgresSink
from sinks.testing.servers.maven import maven_jars
from sinks.testing.servers.postgres import PostgresServer, jdbc_url
from sinks.testing.servers.s3 import S3Server

JDBC_DRIVER = "org.postgresql:postgresql:42.7.8"
GROWTH_LIMIT = 300.0
"""Seconds for each storage of the growth section."""
SECTIONS = ("throughput", "small", "steps", "tail", "paced", "participants", "growth", "memory")

# Of the throughput section, where others are compared with them.
PREPARED = "exactly-once, prepared"
STAGED = "exactly-once, staged"
AT_LEAST_ONCE = "at-least-once"
SPOOLED = "exactly-once, prepared, rows kept"
COUNT = "mapInArrow, rows counted"
COPY_1 = "psql \\copy binary, 1 connection"
COPY_2 = "psql \\copy binary, 2 connections"
DIRECT_1 = "sink without Spark, 1 process"
DIRECT_2 = "sink without Spark, 2 processes"


def jdbc_name(batchsize: int, rewrite: bool) -> str:
    return f"Spark JDBC, batchsize {batchsize:,}, rewrite {'on' if rewrite else 'off'}"


class PostgresBench(Bench):
    def __init__(
        self, server: PostgresServer, options: Namespace, folder: Path, stack: ExitStack
    ) -> None:
        super().__init__(server, options, folder, stack, maven_jars(JDBC_DRIVER, transitive=False))
        self.server = server

    # ------------------------------------------------------------------ sections
    def throughput(self, shape: Shape) -> None:
        """From df to committed, against Spark's JDBC writer, and against what bounds it."""
        runs = self.options.runs
        count = self.options.rows
        with ExitStack() as stack:
            dsn = stack.enter_context(self.server.database())
            target = Target(self.server, dsn, shape, count)
            stack.callback(target.close)
            contenders = self._spark_contenders(
                stack, dsn, target, shape
            ) + self._direct_contenders(stack, dsn, target, shape)
            peers = self._flink_contenders(stack, dsn, target, shape)
            contenders += peers
            warm = rounds(contenders, runs, self.options.warm, tell, self.server_pid)
            by_name = {contender.name: contender for contender in contenders}
        best_jdbc = min(
            (c for c in contenders if c.name.startswith("Spark JDBC")),
            key=lambda c: median(c.seconds),
        )
        ours = by_name[PREPARED]
        aims = [
            ("exactly-once over Spark's best JDBC setting", ours, best_jdbc, 2.2),
            (
                "exactly-once over Spark's default JDBC setting",
                ours,
                by_name[jdbc_name(1000, False)],
                4.0,
            ),
            ("exactly-once over mapInArrow with nothing behind it", ours, by_name[COUNT], 0.85),
            ("fed directly over \\copy, 1 connection", by_name[DIRECT_1], by_name[COPY_1], 0.9),
            ("fed directly over \\copy, 2 connections", by_name[DIRECT_2], by_name[COPY_2], 0.9),
            ("exactly-once over at-least-once", ours, by_name[AT_LEAST_ONCE], 0.95),
            ("rows kept over rows not kept", by_name[SPOOLED], ours, 0.9),
        ]
        bases = [("best Spark JDBC", best_jdbc), ("mapInArrow bound", by_name[COUNT])]
        if peers:
            best_flink = min(peers, key=lambda c: median(c.seconds))
            aims.append(
                ("exactly-once over Flink's exactly-once, best setting", ours, best_flink, 1.0)
            )
            bases.append(("best Flink", best_flink))
        report(
            f"{shape.name}: {count:,} rows, {runs} rounds after {warm}",
            count,
            contenders,
            bases,
            aims,
        )

    def _spark_contenders(
        self, stack: ExitStack, dsn: str, target: Target, shape: Shape
    ) -> list[Contender]:
        rows = self.options.rows
        works: list[tuple[str, sparks.Work, bool]] = []
        for name, strategy, mode, replay in (
            (PREPARED, "prepared", "exactly_once", "recompute"),
            (SPOOLED, "prepared", "exactly_once", "spool"),
            (STAGED, "staged", "exactly_once", "recompute"),
            (AT_LEAST_ONCE, "prepared", "at_least_once", "recompute"),
        ):
            job = f"{shape.name}-{mode}-{strategy}-{replay}"
            sink = PostgresSink(dsn, "t", name=job, strategy=strategy)  # type: ignore[arg-type]
            works.append((name, self.coordinator(stack, job, sink, mode, replay=replay), False))
        for batchsize in (1000, 10_000):
            for rewrite in (False, True):
                works.append(
                    (jdbc_name(batchsize, rewrite), self._jdbc(dsn, batchsize, rewrite), True)
                )
        contenders = []
        for name, work, jdbc in works:
            stream = self.stream(stack, shape.of(sparks.numbers(self.spark, rows), jdbc=jdbc), work)
            contenders.append(Contender(name, stream.run, target.clear, target.check))
        stream = self.stream(
            stack, shape.of(sparks.numbers(self.spark, rows)), sparks.count_in_python(rows)
        )
        return [*contenders, Contender(COUNT, stream.run)]

    def _jdbc(self, dsn: str, batchsize: int, rewrite: bool) -> sparks.Work:
        user = self.server.user
        password = self.server.password
        return sparks.jdbc(jdbc_url(dsn), user, password, "t", batchsize=batchsize, rewrite=rewrite)

    def _flink_contenders(
        self, stack: ExitStack, dsn: str, target: Target, shape: Shape
    ) -> list[Contender]:
        if not self.options.flink or shape is not PLAIN:
            return []
        return list(
            flink.jdbc(stack, self.options.flink, self.server, dsn, self.options.rows, target)
        )

    def _direct_contenders(
        self, stack: ExitStack, dsn: str, target: Target, shape: Shape
    ) -> list[Contender]:
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

    def small(self) -> None:
        """What a checkpoint of 0 or 100 rows adds to foreachBatch with the same Spark job."""
        with ExitStack() as stack:
            dsn = stack.enter_context(self.server.database())
            groups: list[list[Contender]] = []
            with self.server.connect(dsn) as admin:
                admin.execute(PLAIN.create_table("t"))
            for rows in self.options.small_rows:
                group = []
                for name, strategy in (
                    ("Spark job alone", ""),
                    (PREPARED, "prepared"),
                    (STAGED, "staged"),
                ):
                    work: sparks.Work = sparks.job_only
                    if strategy:
                        job = f"small-{rows}-{strategy}"
                        sink = PostgresSink(dsn, "t", name=job, strategy=strategy)  # type: ignore[arg-type]
                        work = self.coordinator(stack, job, sink)
                    stream = self.stream(stack, PLAIN.of(sparks.numbers(self.spark, rows)), work)
                    group.append(Contender(f"{rows} rows: {name}", stream.run))
                groups.append(group)
            self.small_checkpoints(groups)

    def few(self, stack: ExitStack) -> dict[str, sparks.Stream]:
        dsn = stack.enter_context(self.server.database())
        with self.server.connect(dsn) as admin:
            admin.execute(PLAIN.create_table("t"))
        works = {jdbc_name(1000, False): self._jdbc(dsn, 1000, False)}
        for name, strategy in ((PREPARED, "prepared"), (STAGED, "staged")):
            job = f"few-{strategy}-{dsn.rpartition('/')[2]}"
            sink = PostgresSink(dsn, "t", name=job, strategy=strategy)  # type: ignore[arg-type]
            works[name] = self.coordinator(stack, job, sink)
        rows = PLAIN.of(sparks.numbers(self.spark, FEW))
        return {name: self.stream(stack, rows, work) for name, work in works.items()}

    def questions(self, run: Callable[[], object]) -> int:
        """By the server's log, which has each for this while."""
        with self.server.connect() as admin:
            for level in ("all", "none"):
                admin.execute(f"ALTER SYSTEM SET log_statement = '{level}'")
                admin.execute("SELECT pg_reload_conf()")
                time.sleep(0.5)
                if level == "all":
                    begin = len(self.server.log)
                    run()
                    written = self.server.log[begin:]
        return sum(written.count(f"LOG:  {how}") for how in ("statement: ", "execute "))

    def participants(self) -> None:
        """How long many participants take to commit."""
        contenders = []
        count = self.options.participants
        with ExitStack() as stack:
            dsn = stack.enter_context(self.server.database())
            with self.server.connect(dsn) as admin:
                admin.execute("CREATE TABLE t (id bigint, name text, amount double precision)")
            for strategy in ("prepared", "staged"):
                sink = PostgresSink(dsn, "t", name=f"many-{strategy}", strategy=strategy)
                many = protocol.ManyParticipants(
                    sink, count, (self.folder / "many" / strategy).as_uri()
                )
                stack.callback(many.close)
                contenders.append(Contender(f"{count:,} participants: {strategy}", many.run))
            rounds(contenders, min(self.options.runs, 3), 1, tell)
        lines = [[c.name, spread(c.seconds), f"{median(c.load):.1f}"] for c in contenders]
        show(
            f"Commit of {count:,} participants (aim at 1,000: < 1 s)", ["what", "s", "load"], lines
        )

    def growth(self) -> None:
        """What a checkpoint costs after many earlier ones: coordinator and storage alone."""
        marks = [mark for mark in (100, 1000, 10_000, 100_000) if mark <= self.options.earlier]
        fast = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else self.folder
        folder = Path(tempfile.mkdtemp(dir=fast))
        self.stack.callback(shutil.rmtree, folder, ignore_errors=True)
        s3 = self.stack.enter_context(S3Server())
        os.environ.update(s3.environment)
        lines = []
        for name, uri in (
            ("memory:", "memory:growth"),
            (f"file: on {fast}", (folder / "files").as_uri()),
            (f"sqlite: on {fast}", f"sqlite:///{folder}/storage.sqlite"),
            ("s3: of moto, with versions", f"s3://{s3.make_bucket(versioned=True)}/growth"),
        ):
            start = time.perf_counter()
            seconds = protocol.growth(uri, marks, GROWTH_LIMIT)
            tell(f"growth {name}: {time.perf_counter() - start:.0f} s")
            cells = [
                f"{seconds[mark] * 1000:.2f}" if mark in seconds else "not reached"
                for mark in marks
            ]
            lines.append([name, *cells])
        title = "ms per checkpoint after this many earlier ones, by storage (aim: does not grow)"
        show(title, ["storage", *(f"{mark:,}" for mark in marks)], lines)

    def memory(self) -> None:
        """Whether a task's memory grows with its partition.

        Restarts Spark, for fresh Python workers.
        """
        self.stop_spark()
        sizes = (100_000, 2_000_000)
        peaks = []
        spark = sparks.session(self.jars, **memory.FRESH_WORKERS)
        try:
            with self.server.database() as dsn:
                with self.server.connect(dsn) as admin:
                    admin.execute(PLAIN.create_table("t"))
                for run in range(min(self.options.runs, 3)):
                    for rows in sizes:
                        sink = PostgresSink(dsn, "t", name=f"memory-{run}", strategy="prepared")
                        df = PLAIN.of(sparks.numbers(spark, rows, partitions=1))
                        peak = memory.peak(df, sink, self.folder / f"memory-{run}-{rows}")
                        tell(f"round {run + 1} peak of a task with {rows:,} rows: {peak:.1f} MiB")
                        peaks.append((rows, peak))
        finally:
            spark.stop()
        lines = [
            [f"{rows:,}", spread([p for r, p in peaks if r == rows], "{:.1f}")] for rows in sizes
        ]
        title = "Peak memory of a task's Python worker, MiB (aim: does not grow)"
        show(title, ["rows of the partition", "MiB"], lines)


def _later(function: Callable[..., float], *arguments: object) -> Callable[[], float]:
    return lambda: function(*arguments)


def main(arguments: list[str] | None = None) -> None:
    parser = command_line("benchmarks.postgres", __doc__, SECTIONS, list(SHAPES))
    parser.add_argument(
        "--earlier", type=int, default=100_000, help="earlier checkpoints to simulate, for growth"
    )
    options = parser.options(arguments)
    with ExitStack() as stack:
        settings = SETTINGS | {"max_prepared_transactions": str(options.participants + 100)}
        server = stack.enter_context(PostgresServer(settings))
        with server.connect() as connection:
            number = connection.info.server_version
        shown = ", ".join(f"{name}={value}" for name, value in settings.items())
        about = heading(
            ("psycopg", "pgpq"), f"PostgreSQL {number // 10000}.{number % 10000} with {shown}"
        )
        say(about)
        bench = PostgresBench(server, options, working_folder(stack), stack)
        for section in options.only:
            if section == "throughput":
                for name in options.shapes:
                    bench.throughput(SHAPES[name])
            else:
                getattr(bench, section)()
        save(options.json, about)


if __name__ == "__main__":
    main()
