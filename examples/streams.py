"""What the examples share: a quiet local session that reads Kafka, a topic with records in it, a
job to kill."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from pyspark.sql import DataFrame, SparkSession
from sqlalchemy import Engine, create_engine

from coordinator import CheckpointListener, Step
from sinks.mysql.connection import Connection, parameters
from sinks.testing.servers.kafka import KafkaServer
from sinks.testing.servers.mariadb import mysql_or_mariadb
from sinks.testing.servers.postgres import PostgresServer
from sinks.testing.servers.spark_kafka import spark_kafka_jars


def local_session() -> SparkSession:
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    return (
        SparkSession.builder.master("local[2]")
        .config("spark.jars", spark_kafka_jars())
        .config("spark.sql.shuffle.partitions", "2")
        # some 40 ms less in each checkpoint
        .config("spark.python.unix.domain.socket.enabled", "true")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.log.level", "OFF")
        .getOrCreate()
    )


def read_topic(spark: SparkSession, bootstrap: str, topic: str, per_batch: int) -> DataFrame:
    """The committed records of a topic from its beginning, `per_batch` in a micro-batch."""
    return (
        spark.readStream.format("kafka")
        .option("kafka.bootstrap.servers", bootstrap)
        .option("kafka.isolation.level", "read_committed")
        .option("subscribe", topic)
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", per_batch)
        .load()
    )


def create_topic(bootstrap: str, topic: str, partitions: int) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic(topic, partitions)])[topic].result(30)


def write_topic(bootstrap: str, topic: str, values: Iterable[str], partitions: int) -> None:
    """Create the topic, with the values dealt out to its partitions in turn."""
    create_topic(bootstrap, topic, partitions)
    # no limit: it fits
    producer = Producer({"bootstrap.servers": bootstrap, "queue.buffering.max.messages": 0})
    for number, value in enumerate(values):
        producer.produce(topic, value, partition=number % partitions)
        producer.poll(0)
    if left := producer.flush(120):
        raise SystemExit(f"{left:,} records could not be written to topic {topic} within 120 s")


def mysql_engine(dsn: str) -> Engine:
    """SQLAlchemy with the connections of MySQLSink, which know how the DSN's login is proven."""
    return create_engine(
        "mysql+pymysql://", creator=lambda: Connection(charset="utf8mb4", **parameters(dsn))
    )


def die() -> None:
    """SIGKILL to this process and its group, driver, JVM and Python workers, as when the machine
    goes down."""
    os.killpg(0, signal.SIGKILL)


class DieAt(CheckpointListener):
    """SIGKILL to driver, JVM and Python workers at a step of a checkpoint, e.g. "COMPLETE 4"; never
    for ""."""

    def __init__(self, moment: str) -> None:
        self._moment = moment

    def on_step(self, step: Step, checkpoint_id: int, facts: Mapping[str, Any]) -> None:
        if f"{step.name} {checkpoint_id}" == self._moment:
            die()


def run_job(module: str, options: Sequence[str], expected: int = 0) -> None:
    """Run `python -m module job OPTIONS` to its end.

    Raises SystemExit with its output if it does not end with the expected status.
    """
    command = [sys.executable, "-m", module, "job", *options]
    process = subprocess.Popen(
        command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    try:
        _, errors = process.communicate(timeout=900)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    if process.returncode != expected:
        raise SystemExit(
            f"the job ended with status {process.returncode}:\n{errors.decode()[-3000:]}"
        )


def show(found: Mapping[str, Counter[int]], per_batch: int) -> None:
    """Print for each system how many of its rows are of which checkpoint, by their ids."""
    for name, times in found.items():
        by_checkpoint = Counter(id // per_batch for id in times.elements())
        told = ", ".join(
            f"{checkpoint}: {rows}" for checkpoint, rows in sorted(by_checkpoint.items())
        )
        print(f"  {name:10s} rows by checkpoint: {told}", flush=True)


def show_losses(found: Mapping[str, Counter[int]], rows: int) -> None:
    """Print for each system how many of so many rows it lacks, and how many come too often."""
    for name, times in found.items():
        doubled = sum(count - 1 for count in times.values())
        print(f"{name:10s}: {rows - len(times)} lost, {doubled} duplicated", flush=True)


def committed(bootstrap: str, topic: str) -> list[bytes]:
    """The values that a read_committed consumer sees: of each partition up to its end or its first
    open transaction."""
    options = {
        "isolation.level": "read_committed",
        "enable.partition.eof": True,
        "enable.auto.commit": False,
    }
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "example", **options})
    try:
        partitions = consumer.list_topics(topic, timeout=30).topics[topic].partitions
        consumer.assign([TopicPartition(topic, partition, 0) for partition in partitions])
        values: list[bytes] = []
        ended: set[int | None] = set()
        while len(ended) < len(partitions):
            message = consumer.poll(30)
            if message is None:
                raise SystemExit(f"no answer from {bootstrap} for 30 s")
            error = message.error()
            if error is None:
                values.append(message.value() or b"")
            elif error.code() == KafkaError._PARTITION_EOF:
                ended.add(message.partition())
            elif not error.retriable():
                raise SystemExit(f"topic {topic} cannot be read: {error}")
        return values
    finally:
        consumer.close()


SYSTEMS = {"bootstrap": "brokers", "postgres": "a PostgreSQL DSN", "mysql": "a MySQL DSN"}


def parse_arguments(
    description: str | None, amount: str, default: int, places: Sequence[str]
) -> argparse.Namespace:
    """Of an example over all `SYSTEMS`: `--AMOUNT`, and those of its `job`, which needs `places`
    too."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, what in SYSTEMS.items():
        parser.add_argument(f"--{name}", help=f"{what}; a server is started if there is none")
    parser.add_argument(f"--{amount}", type=int, default=default)
    worker = parser.add_subparsers(dest="command").add_parser("job")
    for name in (*SYSTEMS, *places):
        worker.add_argument(f"--{name}", required=True)
    worker.add_argument("--folder", type=Path, required=True)
    worker.add_argument("--die-at", default="")
    return parser.parse_args()


@contextmanager
def all_systems(args: argparse.Namespace) -> Iterator[tuple[str, str, str]]:
    """The addresses of Kafka, PostgreSQL and MySQL: those given, or of servers that are started for
    it. SIGTERM is like Ctrl-C from here on: it ends the job and the servers too."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with ExitStack() as stack:
        bootstrap = args.bootstrap or stack.enter_context(KafkaServer()).bootstrap
        postgres = args.postgres or stack.enter_context(PostgresServer()).dsn
        mysql = args.mysql or stack.enter_context(
            stack.enter_context(mysql_or_mariadb()).database()
        )
        yield bootstrap, postgres, mysql
