"""Spark reads a topic, and writes into Kafka or PostgreSQL."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest
from confluent_kafka import Producer

from sinks.base import TwoPhaseCommitSink
from sinks.kafka import KafkaSink
from sinks.postgres import PostgresSink
from sinks.testing.servers.kafka import KafkaService
from sinks.testing.servers.spark_kafka import spark_kafka_jars
from tests.kafka.reading import read, settled
from tests.spark.job import SparkJob

JOB = "spark-job"
PARTITIONS, BATCHES, RECORDS = 3, 3, 450


@dataclass
class KafkaSource:
    """A topic from its beginning, in `BATCHES` micro-batches or one more (markers have offsets too)."""

    bootstrap: str
    topic: str

    def __call__(self, spark: Any) -> Any:
        return (
            spark.readStream.format("kafka")
            .option("kafka.bootstrap.servers", self.bootstrap)
            .option("kafka.isolation.level", "read_committed")
            .option("subscribe", self.topic)
            .option("startingOffsets", "earliest")
            .option("maxOffsetsPerTrigger", RECORDS // BATCHES)
            .load()
        )


class IntoKafka:
    def __init__(self, kafka: KafkaService, topic: str) -> None:
        self._kafka = kafka
        self.topic = topic
        self.sink = KafkaSink(kafka.bootstrap, topic)

    @staticmethod
    def shape(df: Any) -> Any:
        return df.select("key", "value")

    def ids(self, isolation: str = "read_committed") -> Counter[int]:
        settled(self._kafka.bootstrap)
        found = read(self._kafka.client_options(), self.topic, isolation)
        return Counter(json.loads(message.value() or b"")["id"] for message in found)

    def in_doubt(self) -> int:
        with closing(self.sink):
            return len(list(self.sink.in_doubt(JOB)))


class IntoPostgres:
    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self.sink = PostgresSink(dsn, "orders", strategy="prepared", create_table=True)

    @staticmethod
    def shape(df: Any) -> Any:
        return df.selectExpr("from_json(CAST(value AS STRING), 'id BIGINT, name STRING') AS row").select("row.*")

    def ids(self) -> Counter[int]:
        return Counter(self._column("SELECT id FROM orders"))

    def in_doubt(self) -> int:
        return len(self._column("SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"))

    def _column(self, query: str) -> list[Any]:
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            return [value for (value,) in connection.execute(query).fetchall()]


Target = IntoKafka | IntoPostgres


def write_records(kafka: KafkaService, topic: str, ids: Iterable[int]) -> None:
    """JSON records over all partitions; in front of them a transaction that was aborted."""
    options = {**kafka.client_options(), "transactional.id": f"input-{topic}", "partitioner": "murmur2_random"}
    producer = Producer(options)
    producer.init_transactions(30)
    producer.begin_transaction()
    for partition in range(PARTITIONS):
        producer.produce(topic, json.dumps({"id": -1, "name": "never committed"}), partition=partition)
    producer.flush(30)
    producer.abort_transaction(30)
    producer.begin_transaction()
    for id in ids:
        producer.produce(topic, json.dumps({"id": id, "name": f"name {id}"}), str(id), partition=id % PARTITIONS)
    producer.commit_transaction(30)
    settled(kafka.bootstrap)


@pytest.fixture(scope="module")
def source(kafka: KafkaService) -> Iterator[KafkaSource]:
    with kafka.topic(PARTITIONS) as topic:
        write_records(kafka, topic, range(RECORDS))
        yield KafkaSource(kafka.bootstrap, topic)


@pytest.fixture
def into_kafka(kafka: KafkaService, kafka_topic: str) -> IntoKafka:
    return IntoKafka(kafka, kafka_topic)


@pytest.fixture
def target(request: pytest.FixtureRequest) -> Target:
    if request.param == "postgres":
        return IntoPostgres(request.getfixturevalue("pg_database"))
    into: IntoKafka = request.getfixturevalue("into_kafka")
    return into


into_either = pytest.mark.parametrize("target", ["kafka", "postgres"], indirect=True)


def reading(
    folder: Path, source: KafkaSource, target: Target, sink: TwoPhaseCommitSink[Any] | None = None, **options: Any
) -> SparkJob:
    conf = {"spark.jars": spark_kafka_jars()} | options.pop("conf", {})
    return SparkJob(folder, [sink or target.sink], JOB, source=source, shape=target.shape, conf=conf, **options)


def finish(last: SparkJob, target: Target) -> None:
    """Run the job to its end: every record of the input is visible once, and nothing is left in doubt."""
    assert last.run() == 0, last.output()
    every_record_once(target)


def every_record_once(target: Target) -> None:
    assert target.ids() == Counter(range(RECORDS))
    assert target.in_doubt() == 0
