"""Flights from a Kafka topic into a PostgreSQL table, exactly-once, while the job is killed and
started again.

    python -m examples.kafka_to_postgres [--bootstrap host:port] [--dsn postgresql://…]
        [--rows 336776]

`job` is the pipeline, to be copied; the rest kills it twice with SIGKILL and shows what the table
holds. Kafka and PostgreSQL are started for it unless `--bootstrap` and `--dsn` (or the
environment's DSN) name some.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import uuid
from contextlib import ExitStack, closing
from pathlib import Path

import psycopg
from psycopg import sql
from pyspark.sql import functions as f

from coordinator import CheckpointCoordinator
from examples.flights_job import SCHEMA
from examples.kafka_flights import BATCHES, PARTITIONS, flights, report, run_and_kill
from examples.streams import DieAt, local_session, read_topic, write_topic
from sinks.postgres import PostgresSink
from sinks.testing.servers.kafka import KafkaServer
from sinks.testing.servers.postgres import PostgresServer

JOB = "kafka-to-postgres"


def job(args: argparse.Namespace) -> None:
    """From a topic of JSON objects into a table with a column for each of their fields."""
    spark = local_session()
    records = read_topic(spark, args.bootstrap, args.topic, args.per_batch)
    rows = records.select(f.from_json(f.col("value").cast("string"), SCHEMA).alias("row")).select(
        "row.*"
    )
    coordinator = CheckpointCoordinator(
        job=JOB,
        sinks=[PostgresSink(os.environ["DSN"], table=args.table, create_table=True)],
        storage=(args.folder / "checkpoints").absolute().as_uri(),
        listeners=[DieAt(args.die_at)],
    )
    with coordinator:
        writer = rows.writeStream.foreachBatch(coordinator).option(
            "checkpointLocation", str(args.folder / "spark")
        )
        writer.trigger(availableNow=True).start().awaitTermination()
    spark.stop()


def run(bootstrap: str, dsn: str, folder: Path, rows: int | None) -> str:
    """Returns the name of the table."""
    # for the job: it may hold a password, so it does not go into the command line
    os.environ["DSN"] = dsn
    topic = f"flights-{uuid.uuid4().hex[:8]}"
    table = f"flights_{uuid.uuid4().hex[:8]}"
    values = flights(rows)
    write_topic(bootstrap, topic, values, PARTITIONS)
    print(f"{len(values):,} flights in topic {topic}", flush=True)

    def ids() -> list[int]:
        with psycopg.connect(dsn) as connection:
            query = sql.SQL("SELECT id FROM {}").format(sql.Identifier(table))
            return [id for (id,) in connection.execute(query)]

    def state() -> str:
        with closing(PostgresSink(dsn, table)) as sink:
            in_doubt = len(list(sink.in_doubt(JOB)))
        return f"{in_doubt} transactions in doubt, the table shows {len(ids()):,} flights"

    options = [
        "--bootstrap",
        bootstrap,
        "--topic",
        topic,
        "--table",
        table,
        "--folder",
        str(folder),
    ]
    run_and_kill(
        "examples.kafka_to_postgres", [*options, "--per-batch", str(len(values) // BATCHES)], state
    )
    report(f"table {table}", ids(), len(values))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bootstrap", help="brokers, host:port,…; one is started if there is none")
    parser.add_argument(
        "--dsn", default=os.environ.get("DSN"), help="a PostgreSQL; one is started if there is none"
    )
    parser.add_argument("--rows", type=int, help="only the first so many flights")
    worker = parser.add_subparsers(dest="command").add_parser("job")
    for name in ("bootstrap", "topic", "table"):
        worker.add_argument(f"--{name}", required=True)
    worker.add_argument("--per-batch", type=int, required=True)
    worker.add_argument("--folder", type=Path, required=True)
    worker.add_argument("--die-at", default="")
    args = parser.parse_args()
    if args.command == "job":
        job(args)
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        bootstrap = args.bootstrap or stack.enter_context(KafkaServer()).bootstrap
        dsn = (
            args.dsn or stack.enter_context(PostgresServer({"max_prepared_transactions": "64"})).dsn
        )
        run(bootstrap, dsn, folder, args.rows)


if __name__ == "__main__":
    main()
