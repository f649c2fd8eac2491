"""One stream of orders into Kafka, PostgreSQL and a Delta table: each checkpoint is in all three,
or in none.

    python -m examples.orders_to_lake

The job gets SIGKILL three times: when all is pre-committed and nothing decided, when it is decided
and nothing committed, and between the commits of two systems. After each kill the three are
compared: all have the same checkpoints, but for the one whose commits the third kill cut off, which
the next start finishes.
"""

from __future__ import annotations

import argparse
import json
import signal
import tempfile
import uuid
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import psycopg
from deltalake import DeltaTable
from psycopg import sql
from pyspark.sql import functions as f

from coordinator import CheckpointCoordinator
from examples.streams import (
    DieAt,
    committed,
    create_topic,
    die,
    local_session,
    read_topic,
    run_job,
    show,
    show_losses,
    write_topic,
)
from sinks import Checkpoint, CommitOutcome, Committable
from sinks.delta import DeltaSink
from sinks.kafka import KafkaSink
from sinks.postgres import PostgresSink
from sinks.testing.servers.kafka import KafkaServer
from sinks.testing.servers.postgres import PostgresServer

ORDERS = 3000
PER_BATCH = 500
KILLS = {
    "PRE_COMMITTED 1": "in checkpoint 1, all pre-committed and nothing decided",
    "COMMITTING 3": "in checkpoint 3, decided and nothing committed",
    "delta 4": "in checkpoint 4, committed by Kafka and PostgreSQL and not by Delta",
}


class DyingDelta(DeltaSink):
    """SIGKILL before its commit of a checkpoint, if that is the moment to die."""

    die_at = ""

    def commit_whole(
        self, checkpoint: Checkpoint, committables: Sequence[Committable]
    ) -> Sequence[CommitOutcome]:
        if f"delta {checkpoint.checkpoint_id}" == self.die_at:
            die()
        return super().commit_whole(checkpoint, committables)


def job(args: argparse.Namespace) -> None:
    spark = local_session()
    value = f.from_json(f.col("value").cast("string"), "id BIGINT, customer STRING, cents BIGINT")
    orders = (
        read_topic(spark, args.bootstrap, args.source, PER_BATCH)
        .select(value.alias("order"))
        .select("order.*")
    )
    lake = DyingDelta(args.lake, name="lake", create_table=True)
    lake.die_at = args.die_at
    coordinator = CheckpointCoordinator(
        "orders-to-lake",
        [
            KafkaSink(args.bootstrap, args.target, name="events", value_format="json"),
            PostgresSink(
                args.postgres, args.table, name="orders", create_table=True, strategy="staged"
            ),
            lake,
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
    bootstrap: str, postgres: str, folder: Path, orders: int = ORDERS
) -> dict[str, Counter[int]]:
    """Returns how often each order is visible in each system."""
    source = f"orders-{uuid.uuid4().hex[:8]}"
    target = f"events-{uuid.uuid4().hex[:8]}"
    table = source.replace("-", "_")
    lake = str(folder / "lake")
    values = (
        json.dumps({"id": i, "customer": f"c{i % 7}", "cents": 100 + i % 900})
        for i in range(orders)
    )
    write_topic(bootstrap, source, values, partitions=2)
    create_topic(bootstrap, target, 2)
    print(
        f"{orders:,} orders, {PER_BATCH} in a checkpoint, into Kafka, PostgreSQL and Delta",
        flush=True,
    )
    options = [
        "--bootstrap",
        bootstrap,
        "--postgres",
        postgres,
        "--source",
        source,
        "--target",
        target,
    ]
    options += ["--table", table, "--lake", lake, "--folder", str(folder)]
    for moment, words in KILLS.items():
        run_job("examples.orders_to_lake", [*options, "--die-at", moment], expected=-signal.SIGKILL)
        print(f"killed {words}", flush=True)
        show(visible(bootstrap, target, postgres, table, lake), PER_BATCH)
    run_job("examples.orders_to_lake", options)
    print("run to its end", flush=True)
    found = visible(bootstrap, target, postgres, table, lake)
    show(found, PER_BATCH)
    show_losses(found, orders)
    return found


def visible(
    bootstrap: str, topic: str, postgres: str, table: str, lake: str
) -> dict[str, Counter[int]]:
    with psycopg.connect(postgres) as connection:
        query = sql.SQL("SELECT id FROM {}").format(sql.Identifier(table))
        in_postgres = Counter(id for (id,) in connection.execute(query))
    in_kafka = Counter(json.loads(value)["id"] for value in committed(bootstrap, topic))
    in_delta = Counter(DeltaTable(lake).to_pyarrow_table(columns=["id"])["id"].to_pylist())
    return {"Kafka": in_kafka, "PostgreSQL": in_postgres, "Delta": in_delta}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--orders", type=int, default=ORDERS)
    worker = parser.add_subparsers(dest="command").add_parser("job")
    for name in ("bootstrap", "postgres", "source", "target", "table", "lake"):
        worker.add_argument(f"--{name}", required=True)
    worker.add_argument("--folder", type=Path, required=True)
    worker.add_argument("--die-at", default="")
    args = parser.parse_args()
    if args.command == "job":
        job(args)
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the job and the servers, too
    with (
        tempfile.TemporaryDirectory() as folder,
        KafkaServer() as kafka,
        PostgresServer() as postgres,
    ):
        run(kafka.bootstrap, postgres.dsn, Path(folder), args.orders)


if __name__ == "__main__":
    main()
