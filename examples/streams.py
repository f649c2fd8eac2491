"""What the examples share: a quiet local session that reads Kafka, a topic with records in it, a job to kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from pyspark.sql import DataFrame, SparkSession

from sinks.testing.servers.spark_kafka import spark_kafka_jars


def local_session() -> SparkSession:
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    return (
        SparkSession.builder.master("local[2]")
        .config("spark.jars", spark_kafka_jars())
        .config("spark.sql.shuffle.partitions", "2")
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
    producer = Producer({"bootstrap.servers": bootstrap, "queue.buffering.max.messages": 0})  # no limit: it fits
    for number, value in enumerate(values):
        producer.produce(topic, value, partition=number % partitions)
        producer.poll(0)
    if left := producer.flush(120):
        raise SystemExit(f"{left:,} records could not be written to topic {topic} within 120 s")


def die() -> None:
    """SIGKILL to this process and its group, driver, JVM and Python workers, as when the machine goes down."""
    os.killpg(0, signal.SIGKILL)


def run_job(module: str, options: Sequence[str], expected: int = 0) -> None:
    """Run `python -m module job OPTIONS` to its end. Raises SystemExit with its output if it does not end with the
    expected status."""
    command = [sys.executable, "-m", module, "job", *options]
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        _, errors = process.communicate(timeout=900)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    if process.returncode != expected:
        raise SystemExit(f"the job ended with status {process.returncode}:\n{errors.decode()[-3000:]}")
