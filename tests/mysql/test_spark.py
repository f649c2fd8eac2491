"""Spark streams into MySQL, with the driver's whole process group killed."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from coordinator import Step
from sinks.mysql import MySQLSink
from sinks.testing import Hooked
from sinks.testing.driver import die
from tests.mysql.play import Observer
from tests.spark.job import KILLED, KillGroupAt, Once, SparkJob, write_input

pytestmark = pytest.mark.large


@pytest.mark.parametrize("strategy", ["xa", "staged"])
def test_killed_at_the_worst_moments(tmp_path: Path, mysql_database: str, strategy: Any) -> None:
    """After pre-commit, after the decision, and a Python worker between its XA PREPARE and its ack."""
    ids = write_input(tmp_path / "input")
    sink = MySQLSink(mysql_database, "orders", strategy=strategy, create_table=True)
    with closing(Observer(mysql_database)) as observer:
        assert SparkJob(tmp_path, [sink], listeners=[KillGroupAt(Step.PRE_COMMITTED, 0)]).run() == KILLED
        assert observer.pending() == 3
        assert SparkJob(tmp_path, [sink], listeners=[KillGroupAt(Step.COMPLETE, 1)]).run() == KILLED
        assert observer.pending() == 3
        worker = Hooked(sink, "pre_commit", after=True, hook=Once(tmp_path / "killed", die))
        job = SparkJob(tmp_path, [worker])
        assert job.run() == 0, job.output()
        assert (tmp_path / "killed").exists()
        assert Counter(observer.ids()) == Counter(ids)
        assert observer.pending() == 0


def count_by_remainder(df: Any) -> Any:
    return df.groupBy((df.id % 10).alias("key")).count()


def test_a_stateful_count_is_upserted(tmp_path: Path, mysql_database: str) -> None:
    ids = write_input(tmp_path / "input")

    def job(**options: Any) -> SparkJob:
        sink = MySQLSink(mysql_database, "counts", mode="upsert", keys=["key"], create_table=True)
        return SparkJob(tmp_path, [sink], shape=count_by_remainder, output_mode="update", **options)

    assert job(listeners=[KillGroupAt(Step.COMPLETE, 1)]).run() == KILLED
    last = job()
    assert last.run() == 0, last.output()
    with closing(Observer(mysql_database)) as observer:
        assert dict(observer.run("SELECT `key`, `count` FROM counts")) == Counter(id % 10 for id in ids)
        assert observer.pending() == 0
