"""MySQLSink on MySQL, or on MariaDB, beside its peers and its limits, in one run:

    python -m benchmarks.mysql [--server mariadb] [--rows 1000000] [--runs 5]
        [--only throughput,small,participants]

The tables that are printed are Markdown.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median

import pyarrow as pa
from pyarrow import csv
from pyspark.sql import DataFrame

from benchmarks import direct, protocol
from benchmarks import spark as sparks
from benchmarks.bench import (
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
from benchmarks.shapes import PLAIN
from sinks.mysql import MySQLSink
from sinks.mysql.connection import execute, parameters, query
from sinks.testing.servers.mariadb import MariaDBServer
from sinks.testing.servers.maven import maven_jars
from sinks.testing.servers.mysql import EmbeddedMySQL, MySQLServer

JDBC_DRIVER = "com.mysql:mysql-connector-j:9.4.0"
SERVERS: dict[str, tuple[type[EmbeddedMySQL], dict[str, str]]] = {
    "mysql": (MySQLServer, {"innodb_buffer_pool_size": "1G", "innodb_redo_log_capacity": "2G"}),
    "mariadb": (MariaDBServer, {"innodb_buffer_pool_size": "1G", "innodb_log_file_size": "2G"}),
}
SECTIONS = ("throughput", "small", "participants")
TYPES = {
    "id": "bigint",
    "name": "varchar(100)",
    "amount": "double",
    "qty": "int",
    "ts": "timestamp(6) NULL",
}

XA = "exactly-once, xa"
STAGED = "exactly-once, staged"
AT_LEAST_ONCE = "at-least-once"
COUNT = "mapInArrow, rows counted"
LOAD_1 = "LOAD DATA of a ready file, 1 connection"
LOAD_2 = "LOAD DATA of ready files, 2 connections"
DIRECT_1 = "sink without Spark, 1 process"
DIRECT_2 = "sink without Spark, 2 processes"


def jdbc_name(batchsize: int, rewrite: bool) -> str:
    return f"Spark JDBC, batchsize {batchsize:,}, rewrite {'on' if rewrite else 'off'}"


def create_table(name: str, *, key: bool = False) -> str:
    columns = (
        ", ".join(f"{column} {kind}" for column, kind in TYPES.items()) + ", PRIMARY KEY (id)" * key
    )
    return f"CREATE TABLE {name} ({columns}) ENGINE=InnoDB"


class Target:
    """Table `t` in one database.

    The expected rows come from files that pyarrow's CSV writer made.
    """

    def __init__(
        self, server: EmbeddedMySQL, dsn: str, rows: pa.Table, folder: Path, *, key: bool
    ) -> None:
        self.dsn = dsn
        self._admin = server.connect(dsn, local_infile=True)
        self._server = server
        self._rows = rows
        self._folder = folder
        execute(self._admin, create_table("t", key=key))
        self.load(self.files(1))
        self._expected = self._state()

    def files(self, parts: int) -> list[Path]:
        """The rows in ready files for LOAD DATA, in `parts` files of the same size."""
        paths = []
        for part in range(parts):
            path = self._folder / f"rows-{part}-of-{parts}.csv"
            low = part * self._rows.num_rows // parts
            high = (part + 1) * self._rows.num_rows // parts
            rows = self._rows.slice(low, high - low)
            column = rows.schema.get_field_index("ts")
            wall = (
                rows["ts"].cast(pa.timestamp("us", "UTC")).cast(pa.int64()).cast(pa.timestamp("us"))
            )
            options = csv.WriteOptions(include_header=False)
            csv.write_csv(rows.set_column(column, "ts", wall.cast(pa.string())), str(path), options)
            paths.append(path)
        return paths

    def load(self, paths: Sequence[Path]) -> float:
        """Seconds that LOAD DATA LOCAL takes for the files, one connection for each, all at
        once."""
        connections = [self._server.connect(self.dsn, local_infile=True) for _ in paths]

        def one(number: int) -> None:
            execute(connections[number], "SET time_zone = '+00:00'")
            statement = (
                "LOAD DATA LOCAL INFILE %s INTO TABLE t FIELDS TERMINATED BY ',' ENCLOSED BY '\"'"
            )
            execute(connections[number], statement, [str(paths[number])])

        start = time.perf_counter()
        with ThreadPoolExecutor(len(paths)) as pool:
            list(pool.map(one, range(len(paths))))
        seconds = time.perf_counter() - start
        for connection in connections:
            connection.close()
        return seconds

    def clear(self) -> None:
        execute(self._admin, "TRUNCATE TABLE t")

    def check(self) -> None:
        """Raise AssertionError unless the table holds just the expected rows and nothing is left
        prepared or staged."""
        state = self._state()
        if state != self._expected:
            raise AssertionError(
                f"(rows, distinct ids, content hash) are {state}, not {self._expected}"
            )
        tables = query(self._admin, "SHOW TABLES LIKE 'tpc\\_%%'")
        staging = [table for (table,) in tables if not table.startswith("tpc_ledger")]
        leftovers = [*query(self._admin, "XA RECOVER"), *staging]
        if leftovers:
            raise AssertionError(f"left behind in the database: {leftovers}")

    def _state(self) -> tuple[object, ...]:
        execute(self._admin, "SET time_zone = '+00:00'")
        columns = ", ".join(TYPES)
        statement = (
            f"SELECT count(*), count(DISTINCT id), sum(crc32(concat_ws('|', {columns}))) FROM t"
        )
        return query(self._admin, statement)[0]

    def close(self) -> None:
        self._admin.close()


class MySQLBench(Bench):
    def __init__(
        self, server: EmbeddedMySQL, options: Namespace, folder: Path, stack: ExitStack
    ) -> None:
        super().__init__(server, options, folder, stack, maven_jars(JDBC_DRIVER, transitive=False))
        self.server = server

    # ------------------------------------------------------------------ sections
    def throughput(self) -> None:
        """From df to committed, against Spark's JDBC writer, and against what bounds it."""
        runs = self.options.runs
        count = self.options.rows
        with ExitStack() as stack:
            dsn = stack.enter_context(self.server.database())
            rows = PLAIN.of(self.spark.range(count).selectExpr("id AS i")).toArrow()
            target = Target(self.server, dsn, rows, self.folder, key=not self.options.keyless)
            stack.callback(target.close)
            contenders = self._spark_contenders(stack, dsn, target) + self._direct_contenders(
                stack, dsn, target, rows
            )
            warm = rounds(contenders, runs, self.options.warm, tell, self.server_pid)
        by_name = {contender.name: contender for contender in contenders}
        best_jdbc = min(
            (c for c in contenders if c.name.startswith("Spark JDBC")),
            key=lambda c: median(c.seconds),
        )
        ours = by_name[XA]
        aims = [
            ("exactly-once over Spark's best JDBC setting", ours, best_jdbc, 2.0),
            ("exactly-once over LOAD DATA, 2 connections", ours, by_name[LOAD_2], 0.9),
            ("fed directly over LOAD DATA, 1 connection", by_name[DIRECT_1], by_name[LOAD_1], 0.9),
            ("fed directly over LOAD DATA, 2 connections", by_name[DIRECT_2], by_name[LOAD_2], 0.9),
            ("exactly-once over at-least-once", ours, by_name[AT_LEAST_ONCE], 0.95),
        ]
        bases = [("best Spark JDBC", best_jdbc), ("LOAD DATA, 2 connections", by_name[LOAD_2])]
        table = "a table without a key" if self.options.keyless else "a table with a primary key"
        report(
            f"plain: {count:,} rows into {table}, {runs} rounds after {warm}",
            count,
            contenders,
            bases,
            aims,
        )

    def _spark_contenders(self, stack: ExitStack, dsn: str, target: Target) -> list[Contender]:
        rows = self.options.rows
        works: list[tuple[str, sparks.Work]] = []
        for name, strategy, mode in (
            (XA, "xa", "exactly_once"),
            (STAGED, "staged", "exactly_once"),
            (AT_LEAST_ONCE, "xa", "at_least_once"),
        ):
            job = f"plain-{mode}-{strategy}"
            sink = MySQLSink(dsn, "t", name=job, strategy=strategy)  # type: ignore[arg-type]
            works.append((name, self.coordinator(stack, job, sink, mode)))
        for batchsize in (1000, 10_000):
            for rewrite in (False, True):
                works.append((jdbc_name(batchsize, rewrite), jdbc(dsn, batchsize, rewrite)))
        contenders = []
        for name, work in works:
            stream = self.stream(stack, PLAIN.of(sparks.numbers(self.spark, rows)), work)
            contenders.append(Contender(name, stream.run, target.clear, target.check))
        stream = self.stream(
            stack, PLAIN.of(sparks.numbers(self.spark, rows)), sparks.count_in_python(rows)
        )
        return [*contenders, Contender(COUNT, stream.run)]

    def _direct_contenders(
        self, stack: ExitStack, dsn: str, target: Target, rows: pa.Table
    ) -> list[Contender]:
        contenders = []
        for parts, load, fed in ((1, LOAD_1, DIRECT_1), (2, LOAD_2, DIRECT_2)):
            paths = target.files(parts)
            contenders.append(
                Contender(load, partial(target.load, paths), target.clear, target.check)
            )
            sink = MySQLSink(dsn, "t", name=f"direct-{parts}", strategy="xa")
            feeders = direct.Feeders(sink, rows, parts, self.folder)
            stack.callback(feeders.close)
            contenders.append(Contender(fed, feeders.run, target.clear, target.check))
        return contenders

    def small(self) -> None:
        """What a checkpoint of 0 or 100 rows adds to foreachBatch with the same Spark job."""
        with ExitStack() as stack:
            dsn = stack.enter_context(self.server.database())
            with self.server.connect(dsn) as admin:
                execute(admin, create_table("t"))
            groups: list[list[Contender]] = []
            for rows in self.options.small_rows:
                group = []
                for name, strategy in (("Spark job alone", ""), (XA, "xa"), (STAGED, "staged")):
                    work: sparks.Work = sparks.job_only
                    if strategy:
                        job = f"small-{rows}-{strategy}"
                        sink = MySQLSink(dsn, "t", name=job, strategy=strategy)  # type: ignore[arg-type]
                        work = self.coordinator(stack, job, sink)
                    stream = self.stream(stack, PLAIN.of(sparks.numbers(self.spark, rows)), work)
                    group.append(Contender(f"{rows} rows: {name}", stream.run))
                groups.append(group)
            self.small_checkpoints(groups)

    def participants(self) -> None:
        """How long many participants take to commit."""
        contenders = []
        count = self.options.participants
        with ExitStack() as stack:
            dsn = stack.enter_context(self.server.database())
            with self.server.connect(dsn) as admin:
                execute(admin, "CREATE TABLE t (id bigint, name text, amount double) ENGINE=InnoDB")
            for strategy in ("xa", "staged"):
                sink = MySQLSink(dsn, "t", name=f"many-{strategy}", strategy=strategy)
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


def jdbc(dsn: str, batchsize: int, rewrite: bool) -> sparks.Work:
    """Spark's JDBC writer."""
    parts = parameters(dsn)

    def work(df: DataFrame, batch_id: int) -> None:
        df.write.format("jdbc").mode("append").options(
            url=f"jdbc:mysql://{parts['host']}:{parts['port']}/{parts['database']}?connectionTimeZone=UTC"
            f"&forceConnectionTimeZoneToSession=true&rewriteBatchedStatements={str(rewrite).lower()}&sslMode=DISABLED&allowPublicKeyRetrieval=true",
            driver="com.mysql.cj.jdbc.Driver",
            user=parts["user"],
            password=parts["password"],
            dbtable="t",
            batchsize=batchsize,
        ).save()

    return work


def main(arguments: list[str] | None = None) -> None:
    parser = command_line("benchmarks.mysql", __doc__, SECTIONS, ["plain"])
    parser.add_argument("--server", choices=SERVERS, default="mysql")
    parser.add_argument(
        "--keyless", action="store_true", help="throughput into a table without a primary key"
    )
    options = parser.options(arguments)
    with ExitStack() as stack:
        kind, chosen = SERVERS[options.server]
        server = stack.enter_context(kind(chosen))
        with server.connect() as connection:
            [(version, binary_log)] = query(connection, "SELECT VERSION(), @@log_bin")
        settings = ", ".join(f"{name}={value}" for name, value in chosen.items())
        about = heading(
            ("PyMySQL",),
            f"{kind.PRODUCT} {version} with {settings}, binary log "
            f"{'on' if binary_log else 'off'}, JDBC driver {JDBC_DRIVER}",
        )
        say(about)
        bench = MySQLBench(server, options, working_folder(stack), stack)
        for section in options.only:
            getattr(bench, section)()
        save(options.json, about)


if __name__ == "__main__":
    main()
