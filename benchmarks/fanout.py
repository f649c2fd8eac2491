"""One batch for several sinks, beside what users write by hand for it, in one run:

    python -m benchmarks.fanout [--rows 300000] [--runs 5] [--warm 6]

By hand, a batch is persisted, and written by Spark's JDBC and Kafka writers one after the other.
That is at-least-once. The tables that are printed are Markdown.

    python -m benchmarks.fanout --only tables [--runs 5] [--warm 6]

One sink writes a batch of 5,000 rows into 50 tables that the rows name, beside the same number of
rows into one table.
"""

from __future__ import annotations

from contextlib import ExitStack
from statistics import median
from typing import Literal

from pyspark.sql import DataFrame

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
from benchmarks.measure import Contender, ratios, rounds, spread
from benchmarks.shapes import PLAIN
from benchmarks.topic import JVM, PARTITIONS, SETTINGS
from coordinator import CheckpointCoordinator
from sinks import TwoPhaseCommitSink
from sinks.kafka import KafkaSink
from sinks.postgres import PostgresSink
from sinks.testing.servers.kafka import KafkaServer
from sinks.testing.servers.maven import maven_jars
from sinks.testing.servers.postgres import PostgresServer, jdbc_url
from sinks.testing.servers.spark_kafka import SPARK_KAFKA

ROWS = 300_000
POSTGRES = {
    "max_prepared_transactions": "100",
    "shared_buffers": "512MB",
    "max_wal_size": "8GB",
}
PRODUCER = {
    "linger__ms": "20",
    "batch__size": str(2**20),
    "buffer__memory": str(2**28),
    "max__request__size": str(2**23),
}
"""Settings with which Spark's Kafka writer is fastest."""

NAMED_TABLES = 50
NAMED_ROWS = 5_000
STRATEGIES: tuple[Literal["prepared", "staged"], ...] = ("prepared", "staged")

TABLE = "exactly-once: a table"
TOPIC = "exactly-once: a topic"
BOTH = "exactly-once: a table and a topic"
TWO_TABLES = "exactly-once: two tables"
BOTH_BY_HAND = "by hand: a table and a topic"
TWO_TABLES_BY_HAND = "by hand: two tables"


class FanoutBench(Bench):
    def contenders(
        self, stack: ExitStack, postgres: PostgresServer, kafka: KafkaServer
    ) -> list[Contender]:
        dsn = stack.enter_context(postgres.database())
        topic = stack.enter_context(kafka.topic(PARTITIONS))
        admin = stack.enter_context(postgres.connect(dsn))
        for table in ("t", "u"):
            admin.execute(PLAIN.create_table(table))

        def into_table(name: str, table: str = "t") -> PostgresSink:
            return PostgresSink(dsn, table, name=name, strategy="prepared")

        def into_topic(name: str) -> KafkaSink:
            return KafkaSink(kafka.bootstrap, topic, name=name, value_format="json")

        def job(name: str, *sinks: TwoPhaseCommitSink) -> CheckpointCoordinator:
            storage = (self.folder / "storage" / name).as_uri()
            return stack.enter_context(CheckpointCoordinator(name, list(sinks), storage))

        def jdbc(table: str) -> sparks.Work:
            url = jdbc_url(dsn)
            login = postgres.user, postgres.password
            return sparks.jdbc(url, *login, table, batchsize=10_000, rewrite=True)

        into_t = jdbc("t")
        into_u = jdbc("u")
        spark_kafka = sparks.kafka(kafka.bootstrap, topic, **PRODUCER)

        def both_by_hand(df: DataFrame, batch_id: int) -> None:
            df.persist()
            try:
                into_t(df, batch_id)
                spark_kafka(df.selectExpr("to_json(struct(*)) AS value"), batch_id)
            finally:
                df.unpersist()

        def two_tables_by_hand(df: DataFrame, batch_id: int) -> None:
            df.persist()
            try:
                into_t(df, batch_id)
                into_u(df, batch_id)
            finally:
                df.unpersist()

        works: dict[str, sparks.Work] = {
            TABLE: job("table", into_table("p")),
            TOPIC: job("topic", into_topic("k")),
            BOTH: job("both", into_table("p"), into_topic("k")),
            TWO_TABLES: job("tables", into_table("p"), into_table("q", "u")),
            BOTH_BY_HAND: both_by_hand,
            TWO_TABLES_BY_HAND: two_tables_by_hand,
        }
        rows = PLAIN.of(sparks.numbers(self.spark, self.options.rows))

        def clear() -> None:
            admin.execute("TRUNCATE t, u")

        return [
            Contender(name, self.stream(stack, rows, work).run, clear)
            for name, work in works.items()
        ]

    def measure(self, postgres: PostgresServer, kafka: KafkaServer) -> None:
        options = self.options
        with ExitStack() as stack:
            contenders = self.contenders(stack, postgres, kafka)
            warm = rounds(contenders, options.runs, options.warm, tell)
        by_name = {contender.name: contender for contender in contenders}
        both = by_name[BOTH]
        two = by_name[TWO_TABLES]
        one = by_name[TABLE]
        report(
            f"{options.rows:,} rows, {options.runs} rounds after {warm}",
            options.rows,
            contenders,
            [],
            [
                ("a table and a topic over by hand", both, by_name[BOTH_BY_HAND], 1.8),
                ("two tables over by hand", two, by_name[TWO_TABLES_BY_HAND], 2.5),
            ],
        )
        apart = [a + b for a, b in zip(one.seconds, by_name[TOPIC].seconds, strict=True)]
        of_apart = [a / b for a, b in zip(both.seconds, apart, strict=True)]
        processor = [a / b for a, b in zip(two.processor, one.processor, strict=True)]
        show(
            "Several sinks over fewer",
            ["what", "aim", "measured"],
            [
                [
                    "a table and a topic: time over that of the two apart",
                    "<= 0.80",
                    spread(of_apart),
                ],
                ["two tables: time over one table's", "<= 1.6", spread(ratios(one, two))],
                ["two tables: processor time over one table's", "<= 1.7", spread(processor)],
            ],
        )
        say(f"\nMedian load {median(load for c in contenders for load in c.load):.1f}.")

    def many_tables(self, postgres: PostgresServer) -> None:
        """A small batch for many tables over one as large for one table, by each strategy."""
        options = self.options
        with ExitStack() as stack:
            dsn = stack.enter_context(postgres.database())
            admin = stack.enter_context(postgres.connect(dsn))
            names = ["t", *(f"t{n}" for n in range(NAMED_TABLES))]
            for name in names:
                admin.execute(PLAIN.create_table(name))

            def clear() -> None:
                admin.execute(f"TRUNCATE {', '.join(names)}".encode())

            def contender(name: str, df: DataFrame, sink: PostgresSink) -> Contender:
                work = self.coordinator(stack, sink.name, sink)
                return Contender(name, self.stream(stack, df, work).run, clear)

            numbers = sparks.numbers(self.spark, NAMED_ROWS)
            rows = PLAIN.of(numbers)
            named = rows.selectExpr(
                f"concat('t', id % {NAMED_TABLES}) AS table", "to_json(struct(*)) AS payload"
            )
            contenders = []
            for strategy in STRATEGIES:
                one = PostgresSink(dsn, "t", name=f"one-{strategy}", strategy=strategy)
                many = PostgresSink(
                    dsn,
                    tables={name: {} for name in names[1:]},
                    name=f"many-{strategy}",
                    strategy=strategy,
                )
                contenders.append(contender(f"one table, {strategy}", rows, one))
                contenders.append(contender(f"{NAMED_TABLES} tables, {strategy}", named, many))
            warm = rounds(contenders, options.runs, options.warm, tell)
        pairs = list(zip(contenders[::2], contenders[1::2], strict=True))
        show(
            f"{NAMED_ROWS:,} rows, {options.runs} rounds after {warm}",
            ["what", "ms", "time over one table's (aim <= 3)"],
            [
                [its.name, spread((s * 1000 for s in its.seconds), "{:.0f}"), over]
                for one_table, tables in pairs
                for its, over in (
                    (one_table, ""),
                    (tables, spread(ratios(one_table, tables))),
                )
            ],
        )


def main(arguments: list[str] | None = None) -> None:
    parser = command_line("benchmarks.fanout", __doc__, ["throughput", "tables"], ["plain"])
    parser.set_defaults(rows=ROWS)
    options = parser.options(arguments)
    with ExitStack() as stack:
        postgres = stack.enter_context(PostgresServer(POSTGRES))
        about = heading(("psycopg", "pgpq", "kafka-python"), "PostgreSQL and Kafka on this machine")
        say(about)
        if "throughput" in options.only:
            kafka = stack.enter_context(KafkaServer(SETTINGS, jvm=JVM))
            driver = maven_jars("org.postgresql:postgresql:42.7.8", transitive=False)
            jars = [*driver, *maven_jars(*SPARK_KAFKA, transitive=False)]
            bench = FanoutBench(None, options, working_folder(stack), stack, jars)
            bench.measure(postgres, kafka)
            bench.stop_spark()
        if "tables" in options.only:
            FanoutBench(None, options, working_folder(stack), stack).many_tables(postgres)
        save(options.json, about)


if __name__ == "__main__":
    main()
