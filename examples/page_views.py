"""Page views of two apps on two Kafka partitions, counted per app into MySQL, over a crash between
two checkpoints.

    python -m examples.page_views

The job gets SIGKILL when checkpoint 100 is visible in the table and Spark does not know yet, and is
started again. It runs twice: with the coordinator and `MySQLSink` (upserts), and as it is often
written today, with a foreachBatch function that adds each batch's counts to the table. Kafka and
MySQL are started for it unless `--bootstrap` and `--dsn` name some.
"""

from __future__ import annotations

import argparse
import json
import signal
import tempfile
import uuid
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as f
from sqlalchemy import text

from coordinator import CheckpointCoordinator
from coordinator.storage import open_storage
from coordinator.store.job_store import JobStore
from examples.streams import (
    DieAt,
    die,
    local_session,
    mysql_engine,
    read_topic,
    run_job,
    write_topic,
)
from sinks.mysql import MySQLSink
from sinks.testing.servers.kafka import KafkaServer
from sinks.testing.servers.mariadb import mysql_or_mariadb

APPS = ["app0", "app1"]
VIEWS_PER_BATCH = 40
JOB = "page-views"


# -------------------------------------------------------------------- the job, a process of its own
def at_least_once(dsn: str, table: str, die_at: int) -> Any:
    """What Spark itself offers for a database: after a crash it runs a batch again that is in the
    table already."""

    def add(df: DataFrame, batch_id: int) -> None:
        rows = [row.asDict() for row in df.groupBy("app").count().collect()]
        with mysql_engine(dsn).begin() as connection:
            for row in rows:
                statement = (
                    f"INSERT INTO {table} VALUES (:app, :count) ON DUPLICATE KEY UPDATE `count` ="
                    " `count` + :count"
                )
                connection.execute(text(statement), row)
        if batch_id == die_at:
            die()

    return add


def job(args: argparse.Namespace) -> None:
    spark = local_session()
    source = read_topic(spark, args.bootstrap, args.topic, VIEWS_PER_BATCH)
    views = source.select(f.get_json_object(f.col("value").cast("string"), "$.app").alias("app"))
    if args.at_least_once:
        writer = views.writeStream.foreachBatch(at_least_once(args.dsn, args.table, args.die_at))
    else:
        coordinator = CheckpointCoordinator(
            JOB,
            [MySQLSink(args.dsn, args.table, mode="upsert", keys=["app"])],
            _storage(args.folder),
            listeners=[DieAt(f"COMMITTED {args.die_at}")],
        )
        writer = (
            views.groupBy("app").count().writeStream.outputMode("update").foreachBatch(coordinator)
        )
    location = str(args.folder / "spark")
    writer.option("checkpointLocation", location).trigger(
        availableNow=True
    ).start().awaitTermination()
    spark.stop()


# ---------------------------------------------------------------------- what happens to it
def run(bootstrap: str, dsn: str, folder: Path, crash_at: int = 100) -> dict[str, dict[str, int]]:
    """Returns the counts in the table after each of the two pipelines."""
    topic = f"page-views-{uuid.uuid4().hex[:8]}"
    views = VIEWS_PER_BATCH * (crash_at + 3)
    values = (json.dumps({"app": APPS[view % 2], "page": f"/{view % 7}"}) for view in range(views))
    write_topic(bootstrap, topic, values, partitions=len(APPS))
    print(f"{views:,} page views, {views // 2:,} of each app, on 2 partitions", flush=True)
    found = {}
    for name in ("exactly once", "at least once"):
        table = f"page_views_{uuid.uuid4().hex[:8]}"
        with mysql_engine(dsn).begin() as connection:
            connection.execute(
                text(f"CREATE TABLE {table} (app varchar(20) PRIMARY KEY, `count` bigint NOT NULL)")
            )
        options = ["--bootstrap", bootstrap, "--dsn", dsn, "--topic", topic, "--table", table]
        options += [
            "--folder",
            str(folder / name),
            *(["--at-least-once"] if name == "at least once" else []),
        ]
        print(f"\n{name}: the job runs until it is killed at checkpoint {crash_at}", flush=True)
        run_job(
            "examples.page_views", [*options, "--die-at", str(crash_at)], expected=-signal.SIGKILL
        )
        if name == "exactly once":
            print(f"  in checkpoint storage: {in_storage(folder / name)}")
        print(f"  in the table:          {in_table(dsn, table)}; it is started again", flush=True)
        run_job("examples.page_views", options)
        found[name] = in_table(dsn, table)
        doubled = sum(found[name].values()) - views
        print(
            f"  in the table:          {found[name]}: {doubled} of {views:,} counted twice",
            flush=True,
        )
    return found


def in_storage(folder: Path) -> dict[str, Any]:
    """The newest complete checkpoint: source offsets and what was committed with them."""
    newest = JobStore(open_storage(_storage(folder)), JOB).load_newest()
    assert newest
    record = newest.record
    return {
        "checkpoint": record.checkpoint_id,
        "offsets": json.loads(record.offsets[0]),
        "rows": dict(record.rows),
    }


def in_table(dsn: str, table: str) -> dict[str, int]:
    with mysql_engine(dsn).begin() as connection:
        return {
            app: int(count)
            for app, count in connection.execute(text(f"SELECT * FROM {table} ORDER BY app"))
        }


def _storage(folder: Path) -> str:
    return (folder / "checkpoints").absolute().as_uri()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bootstrap", help="brokers, host:port,…; one is started if there is none")
    parser.add_argument(
        "--dsn",
        help="mysql://user:password@host:3306/database; a server is started if there is none",
    )
    parser.add_argument(
        "--crash-at", type=int, default=100, help="the checkpoint after which the job is killed"
    )
    commands = parser.add_subparsers(dest="command")
    worker = commands.add_parser("job")
    for name in ("--bootstrap", "--dsn", "--topic", "--table"):
        worker.add_argument(name, required=True)
    worker.add_argument("--folder", type=Path, required=True)
    worker.add_argument("--die-at", type=int, default=-1)
    worker.add_argument("--at-least-once", action="store_true")
    args = parser.parse_args()
    if args.command == "job":
        job(args)
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        bootstrap = args.bootstrap or stack.enter_context(KafkaServer()).bootstrap
        dsn = args.dsn or stack.enter_context(stack.enter_context(mysql_or_mariadb()).database())
        run(bootstrap, dsn, folder, args.crash_at)


if __name__ == "__main__":
    main()
