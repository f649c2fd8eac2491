"""One stream of orders into Kafka, PostgreSQL and MySQL: each checkpoint is in all three, or in
none.

    python -m examples.orders_fan_out

Every order becomes an event in a Kafka topic, a row in PostgreSQL, and, without its amount, a row
in MySQL. The job gets SIGKILL twice: when all is pre-committed but not decided, and when it is
decided but not yet committed anywhere. Kafka, PostgreSQL and MySQL are started for it unless
addresses are given.
"""

from __future__ import annotations

import argparse
import json
import signal
import tempfile
import uuid
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import psycopg
from psycopg import sql
from pyspark.sql import functions as f
from sqlalchemy import text

from coordinator import CheckpointCoordinator
from examples.streams import (
    DieAt,
    all_systems,
    committed,
    create_topic,
    local_session,
    mysql_engine,
    parse_arguments,
    read_topic,
    run_job,
    show_losses,
    write_topic,
)
from sinks import Select
from sinks.kafka import KafkaSink
from sinks.mysql import MySQLSink
from sinks.postgres import PostgresSink

ORDERS = 3000
PER_BATCH = 500
CUSTOMERS = 7
KILLS = {
    "PRE_COMMITTED 1": "in checkpoint 1, all pre-committed and nothing decided",
    "COMMITTING 3": "in checkpoint 3, decided and nothing committed",
}


def job(args: argparse.Namespace) -> None:
    spark = local_session()
    value = f.from_json(f.col("value").cast("string"), "id BIGINT, customer STRING, cents BIGINT")
    orders = (
        read_topic(spark, args.bootstrap, args.source, PER_BATCH)
        .select(value.alias("order"))
        .select("order.*")
    )

    coordinator = CheckpointCoordinator(
        "orders",
        # visible in this order: who reads an event finds its row
        [
            PostgresSink(args.postgres, args.table, name="orders", create_table=True),
            MySQLSink(
                args.mysql,
                args.table,
                name="customers",
                create_table=True,
                transform=Select("id", "customer"),
            ),
            KafkaSink(args.bootstrap, args.target, name="events", value_format="json"),
        ],
        (args.folder / "checkpoints").absolute().as_uri(),
        listeners=[DieAt(args.die_at)],
    )
    with coordinator:
        writer = orders.writeStream.foreachBatch(coordinator).option(
            "checkpointLocation", str(args.folder / "spark")
        )
        writer.trigger(availableNow=True).start().awaitTermination()
    spark.stop()


def run(
    bootstrap: str,
    postgres: str,
    mysql: str,
    folder: Path,
    orders: int = ORDERS,
    kills: Mapping[str, str] = KILLS,
) -> dict[str, Counter[int]]:
    """Returns how often each order is visible in each system."""
    source = f"orders-{uuid.uuid4().hex[:8]}"
    target = f"events-{uuid.uuid4().hex[:8]}"
    table = source.replace("-", "_")
    values = (
        json.dumps({"id": i, "customer": f"c{i % CUSTOMERS}", "cents": 100 + i % 900})
        for i in range(orders)
    )
    write_topic(bootstrap, source, values, partitions=2)
    create_topic(bootstrap, target, 2)
    print(f"{orders:,} orders from Kafka into PostgreSQL, MySQL and Kafka", flush=True)
    options = [
        "--bootstrap",
        bootstrap,
        "--postgres",
        postgres,
        "--mysql",
        mysql,
        "--source",
        source,
    ]
    options += ["--target", target, "--table", table, "--folder", str(folder)]
    for moment, words in kills.items():
        killed = [*options, "--die-at", moment]
        run_job("examples.orders_fan_out", killed, expected=-signal.SIGKILL)
        seen = {
            name: sum(found.values())
            for name, found in visible(bootstrap, target, postgres, mysql, table).items()
        }
        print(f"killed {words}; visible: {seen}", flush=True)
    run_job("examples.orders_fan_out", options)
    found = visible(bootstrap, target, postgres, mysql, table)
    show_losses(found, orders)
    return found


def visible(
    bootstrap: str, topic: str, postgres: str, mysql: str, table: str
) -> dict[str, Counter[int]]:
    with psycopg.connect(postgres) as connection:
        query = sql.SQL("SELECT id FROM {}").format(sql.Identifier(table))
        in_postgres = Counter(id for (id,) in connection.execute(query))
    with mysql_engine(mysql).begin() as connection_:
        in_mysql = Counter(id for (id,) in connection_.execute(text(f"SELECT id FROM {table}")))
    in_kafka = (json.loads(value)["id"] for value in committed(bootstrap, topic))
    return {"PostgreSQL": in_postgres, "MySQL": in_mysql, "Kafka": Counter(in_kafka)}


def main() -> None:
    args = parse_arguments(__doc__, "orders", ORDERS, ("source", "target", "table"))
    if args.command == "job":
        job(args)
        return
    with tempfile.TemporaryDirectory() as folder, all_systems(args) as (bootstrap, postgres, mysql):
        run(bootstrap, postgres, mysql, Path(folder), args.orders)


if __name__ == "__main__":
    main()
