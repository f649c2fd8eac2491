"""The streaming job of `examples.flights_demo`: flights from Parquet files into a PostgreSQL
table.

The demo starts it as a process of its own, kills it and starts it again. The job knows nothing of
that: it tells its supervisor each step through a socket, and goes on when it is answered.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from psycopg.conninfo import conninfo_to_dict
from pyspark.sql import DataFrame, SparkSession

from coordinator import CheckpointCoordinator, CheckpointListener, Step
from sinks.postgres import PostgresSink

FILES_PER_BATCH = 4
SCHEMA = """
    id BIGINT, year BIGINT, month BIGINT, day BIGINT,
    dep_time DOUBLE, sched_dep_time BIGINT, dep_delay DOUBLE,
    arr_time DOUBLE, sched_arr_time BIGINT, arr_delay DOUBLE,
    carrier STRING, flight BIGINT, tailnum STRING, origin STRING, dest STRING,
    air_time DOUBLE, distance BIGINT, hour BIGINT, minute BIGINT, time_hour TIMESTAMP
"""


class Supervised(CheckpointListener):
    """Tells the supervisor of every step, and waits for its answer.

    Instead of an answer there may come SIGKILL.
    """

    def __init__(self, channel: socket.socket) -> None:
        self._lines = channel.makefile("rw")

    def on_step(self, step: Step, checkpoint_id: int, facts: Mapping[str, Any]) -> None:
        self.tell(step.name, checkpoint_id)

    def tell(self, step: str, checkpoint_id: int) -> None:
        try:
            self._lines.write(f"{step} {checkpoint_id}\n")
            self._lines.flush()
            answered = self._lines.readline()
        except OSError:
            answered = ""
        if not answered:  # the supervisor is gone
            os.killpg(0, signal.SIGKILL)


def jdbc_writer(dsn: str, table: str, supervised: Supervised) -> Callable[[DataFrame, int], None]:
    """What Spark itself has for `foreachBatch` into a database."""
    # takes a quarter of the time of all that is imported above
    from sinks.testing.servers.postgres import jdbc_url

    login = conninfo_to_dict(dsn)

    def write(df: DataFrame, batch_id: int) -> None:
        supervised.tell("WRITING", batch_id)
        df.write.format("jdbc").mode("append").options(
            url=jdbc_url(dsn),
            driver="org.postgresql.Driver",
            user=login["user"],
            password=login["password"],
            dbtable=table,
        ).save()
        supervised.tell("DONE", batch_id)

    return write


def stream(flights: DataFrame, write: Callable[[DataFrame, int], None], folder: Path) -> None:
    writer = flights.writeStream.foreachBatch(write).option(
        "checkpointLocation", str(folder / "spark")
    )
    writer.trigger(availableNow=True).start().awaitTermination()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--input", required=True, help="the folder of Parquet files")
    parser.add_argument("--folder", type=Path, required=True, help="where checkpoints go")
    parser.add_argument("--table", required=True)
    parser.add_argument(
        "--channel", type=int, required=True, help="file descriptor of the socket to the supervisor"
    )
    parser.add_argument(
        "--jdbc", metavar="JAR", help="write with Spark's JDBC writer, and this driver"
    )
    args = parser.parse_args()
    # it holds the password, so it does not go into the command line
    dsn = os.environ["FLIGHTS_DSN"]
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)

    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        # some 40 ms less in each checkpoint
        .config("spark.python.unix.domain.socket.enabled", "true")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.log.level", "ERROR")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.local.dir", str(args.folder / "local"))
        .config("spark.jars", args.jdbc or "")
        .config("spark.sql.session.timeZone", "UTC")
        # a task, and so a transaction, for each file
        .config("spark.sql.files.minPartitionNum", FILES_PER_BATCH)
        .getOrCreate()
    )
    flights = (
        spark.readStream.schema(SCHEMA)
        .option("maxFilesPerTrigger", FILES_PER_BATCH)
        .parquet(args.input)
    )
    with socket.socket(fileno=args.channel) as channel:
        supervised = Supervised(channel)
        if args.jdbc:
            stream(flights, jdbc_writer(dsn, args.table, supervised), args.folder)
        else:
            coordinator = CheckpointCoordinator(
                job="flights",
                sinks=[PostgresSink(dsn, table=args.table, create_table=True)],
                storage=(args.folder / "checkpoints").absolute().as_uri(),
                listeners=[supervised],
            )
            with coordinator:
                stream(flights, coordinator, args.folder)
    spark.stop()


if __name__ == "__main__":
    main()
