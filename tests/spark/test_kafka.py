"""Kafka -> Spark -> Kafka and PostgreSQL. `test_killed.py` kills their drivers and their broker."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator import Step
from sinks.testing import Hooked
from tests.spark.job import KILLED, KillGroupAt, Once
from tests.spark.kafka import BATCHES, RECORDS, IntoKafka, IntoPostgres, KafkaSource, finish, reading
from tests.spark.kafka import into_kafka as into_kafka
from tests.spark.kafka import source as source
from tests.spark.test_executors import SPECULATION
from tests.spark.test_executors import cluster as cluster
from tests.spark.test_spark import linger

pytestmark = pytest.mark.large


def test_speculative_loser_on_pooled_ids(
    tmp_path: Path, source: KafkaSource, into_kafka: IntoKafka, cluster: str
) -> None:
    """The copy of a task neither fences the original nor is fenced by it, and the loser's records stay invisible."""
    sink = Hooked(into_kafka.sink, "pre_commit", after=True, hook=Once(tmp_path / "lingered", linger))
    finish(reading(tmp_path, source, into_kafka, sink, master=cluster, conf=SPECULATION), into_kafka)
    assert (tmp_path / "lingered").exists()
    assert into_kafka.ids("read_uncommitted").total() > RECORDS, "there was no loser"


@pytest.mark.chaos
def test_a_topic_written_by_the_sink_is_a_source(
    tmp_path: Path, source: KafkaSource, into_kafka: IntoKafka, pg_database: str
) -> None:
    """Kafka -> Kafka -> PostgreSQL: the second job reads neither what the first one left in doubt, nor its orphans."""
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    table, middle = IntoPostgres(pg_database), KafkaSource(source.bootstrap, into_kafka.topic)
    assert reading(first, source, into_kafka, listeners=[KillGroupAt(Step.PRE_COMMITTED, 1)]).run() == KILLED
    early = reading(second, middle, table)
    assert early.run() == 0, early.output()
    assert 0 < table.ids().total() <= RECORDS // BATCHES
    finish(reading(first, source, into_kafka), into_kafka)
    finish(reading(second, middle, table), table)
    assert into_kafka.ids("read_uncommitted").total() > RECORDS, "there was no orphan"
