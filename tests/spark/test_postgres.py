"""Spark streams into PostgreSQL, with the driver's whole process group killed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import psycopg
import pytest

from coordinator import Step
from sinks.postgres import PostgresSink
from sinks.testing import Hooked
from sinks.testing.driver import die
from tests.spark.job import KILLED, KillGroupAt, Once, SparkJob, write_input

LEFT = (
    "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"
    " UNION ALL SELECT relname FROM pg_class WHERE relkind = 'r' AND relname ~ '^tpc_[0-9a-f]{20}$'"
)


def query(dsn: str, statement: str) -> list[Any]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        return connection.execute(statement).fetchall()


@pytest.mark.parametrize("strategy", ["prepared", pytest.param("staged", marks=pytest.mark.large)])
def test_killed_at_the_worst_moments(tmp_path: Path, pg_database: str, strategy: Any) -> None:
    """After pre-commit, after the decision, and a Python worker between its PREPARE and its ack."""
    ids = write_input(tmp_path / "input")
    sink = PostgresSink(pg_database, "orders", strategy=strategy, create_table=True)
    assert SparkJob(tmp_path, [sink], listeners=[KillGroupAt(Step.PRE_COMMITTED, 0)]).run() == KILLED
    assert len(query(pg_database, LEFT)) == 3
    assert SparkJob(tmp_path, [sink], listeners=[KillGroupAt(Step.COMPLETE, 1)]).run() == KILLED
    assert len(query(pg_database, LEFT)) == 3
    worker = Hooked(sink, "pre_commit", after=True, hook=Once(tmp_path / "killed", die))
    job = SparkJob(tmp_path, [worker])
    assert job.run() == 0, job.output()
    assert (tmp_path / "killed").exists()
    assert Counter(id for (id,) in query(pg_database, "SELECT id FROM orders")) == Counter(ids)
    assert query(pg_database, LEFT) == []


def count_by_remainder(df: Any) -> Any:
    return df.groupBy((df.id % 10).alias("key")).count()


@pytest.mark.large
def test_a_stateful_count_is_upserted(tmp_path: Path, pg_database: str) -> None:
    ids = write_input(tmp_path / "input")

    def job(**options: Any) -> SparkJob:
        sink = PostgresSink(pg_database, "counts", mode="upsert", keys=["key"], create_table=True)
        return SparkJob(tmp_path, [sink], shape=count_by_remainder, output_mode="update", **options)

    assert job(listeners=[KillGroupAt(Step.COMPLETE, 1)]).run() == KILLED
    last = job()
    assert last.run() == 0, last.output()
    assert dict(query(pg_database, "SELECT key, count FROM counts")) == Counter(id % 10 for id in ids)
    assert query(pg_database, LEFT) == []
