"""Kafka, PostgreSQL and MySQL in one checkpoint: all of it becomes visible in each, once, or nothing in any."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psycopg
import pytest

from coordinator import Step
from sinks.base import TwoPhaseCommitSink
from sinks.mysql import MySQLSink
from sinks.postgres import PostgresSink
from sinks.testing.conformance import example_input, ids
from sinks.testing.driver import KILLED, Driver, KillAt
from sinks.testing.servers.kafka import KafkaService
from sinks.testing.servers.mysql import MySQLService
from tests.kafka.reading import read, settled
from tests.kafka.tasks import AsRecords


class Targets:
    """One table or topic in each system, and what is visible there."""

    def __init__(self, kafka: KafkaService, topic: str, postgres: str, mysql: MySQLService, database: str) -> None:
        self.kafka, self.topic, self.postgres, self.mysql, self.database = kafka, topic, postgres, mysql, database

    def sinks(self) -> list[TwoPhaseCommitSink[Any]]:
        return [
            AsRecords(self.kafka.bootstrap, self.topic, name="kafka"),
            PostgresSink(self.postgres, "prepared", strategy="prepared", create_table=True),
            PostgresSink(self.postgres, "staged", strategy="staged", create_table=True),
            MySQLSink(self.database, "orders", name="mysql", create_table=True),
        ]

    def visible(self) -> Mapping[str, Counter[int]]:
        settled(self.kafka.bootstrap)
        messages = read(self.kafka.client_options(), self.topic)
        found = {"kafka": Counter(json.loads(message.value() or b"")["id"] for message in messages)}
        with psycopg.connect(self.postgres) as connection:
            for table in ("prepared", "staged"):
                if connection.execute("SELECT to_regclass(%s)", [table]).fetchone() != (None,):
                    found[table] = Counter(id for (id,) in connection.execute(f"SELECT id FROM {table}"))
        with self.mysql.connect(self.database) as mysql, mysql.cursor() as cursor:
            cursor.execute("SELECT id FROM orders")
            found["mysql"] = Counter(id for (id,) in cursor.fetchall())
        return found

    def nothing_in_doubt(self, sinks: Sequence[TwoPhaseCommitSink[Any]], job: str) -> None:
        for sink in sinks:
            sink.open()
            assert list(sink.in_doubt(job)) == []
            sink.close()


@pytest.fixture
def targets(
    kafka: KafkaService, kafka_topic: str, pg_database: str, mysql: MySQLService, mysql_database: str
) -> Targets:
    return Targets(kafka, kafka_topic, pg_database, mysql, mysql_database)


def driver(targets: Targets, folder: Path, **options: Any) -> Driver:
    first, *others = targets.sinks()
    storage = f"file://{folder / 'storage'}"
    return Driver("several", first, storage, folder / "query", example_input(6), others=others, **options)


def exactly_once(targets: Targets) -> None:
    expected = Counter(ids(example_input(6)))
    assert targets.visible() == dict.fromkeys(("kafka", "prepared", "staged", "mysql"), expected)
    targets.nothing_in_doubt(targets.sinks(), "several")


@pytest.mark.chaos
@pytest.mark.parametrize(
    "step",
    [
        Step.PRE_COMMITTED,
        Step.COMPLETE,
        *(pytest.param(step, marks=pytest.mark.large) for step in (Step.COMMITTING, Step.COMMITTED)),
    ],
)
def test_all_or_nothing_over_a_kill(targets: Targets, tmp_path: Path, step: Step) -> None:
    assert driver(targets, tmp_path, listeners=[KillAt(step, checkpoint_id=1)]).run() == KILLED
    assert driver(targets, tmp_path).run() == 0
    exactly_once(targets)


@pytest.mark.chaos
@pytest.mark.slow
@pytest.mark.large  # tests/chaos has it with three systems
@pytest.mark.parametrize("seed", [1, 2])
def test_killed_at_random_moments(targets: Targets, tmp_path: Path, seed: int) -> None:
    moments = random.Random(seed)
    for _ in range(12):
        driver(targets, tmp_path, kill_after=moments.uniform(0.05, 1.2)).run()
    assert driver(targets, tmp_path).run() == 0
    exactly_once(targets)
