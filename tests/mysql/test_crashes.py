"""What is special when this server dies, freezes or is changed under a job; the rest is in `TableCrashes`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pymysql
import pytest

from coordinator import Step
from coordinator.errors import CheckpointFailed
from sinks.errors import ConfigurationError
from sinks.mysql import MySQLSink, xa
from sinks.mysql.connection import parameters, query
from sinks.testing import Hooked
from sinks.testing.conformance import example_input
from sinks.testing.servers.mysql import EmbeddedMySQL
from sinks.testing.table_crashes import At, TableCrashes, assert_exactly_once, run
from tests.mysql.observer import Observer


@pytest.fixture
def dsn(server: EmbeddedMySQL) -> Iterator[str]:
    with server.database() as dsn:
        with closing(Observer(dsn)) as observer:
            observer.run("CREATE TABLE orders (id bigint NOT NULL, name text, amount double) ENGINE=InnoDB")
        yield dsn


def test_an_operator_rolls_back_a_decided_branch(tmp_path: Path, dsn: str) -> None:
    sink = MySQLSink(dsn, "orders", strategy="xa")

    def roll_back() -> None:
        first, *others = sink.in_doubt("job")
        assert len(others) == 2
        with closing(Observer(dsn)) as observer:
            observer.run(f"XA ROLLBACK {xa.xid(first, observer.schema)}")

    input = example_input()
    run(tmp_path, sink, input, At(Step.COMPLETE, roll_back))
    assert_exactly_once(Observer(dsn), input)


def test_an_orphan_that_holds_the_key_of_its_own_retry_is_swept(tmp_path: Path, dsn: str) -> None:
    """An executor that dies between XA PREPARE and its ack leaves row locks (R8)."""
    with closing(Observer(dsn)) as observer:
        observer.run("ALTER TABLE orders ADD PRIMARY KEY (id)")
    input = example_input()
    sink = MySQLSink(dsn, "orders", strategy="xa", lock_timeout=60)

    def fail() -> None:
        raise RuntimeError("the executor is gone")

    with pytest.raises(CheckpointFailed):
        run(tmp_path, Hooked(sink, "pre_commit", after=True, hook=fail), input)
    run(tmp_path, sink, input)
    assert_exactly_once(Observer(dsn), input)


def test_a_wrong_password_is_said_at_once_and_not_shown(
    tmp_path: Path, server: EmbeddedMySQL, dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    wrong = server.url(parameters(dsn)["database"], password="hunter2")
    with pytest.raises(ConfigurationError, match="Access denied") as error:
        run(tmp_path, MySQLSink(wrong, "orders", create_table=True), example_input())
    assert "hunter2" not in str(error.value)
    assert "hunter2" not in caplog.text
    assert not any("hunter2" in path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file())


class TestCrashes(TableCrashes):
    make = MySQLSink
    observe = Observer
    strategies = ("xa", "staged")

    @pytest.fixture(params=strategies)
    def strategy(self, request: pytest.FixtureRequest) -> str:
        return str(request.param)

    def cut_connections(self, server: EmbeddedMySQL) -> None:
        with server.connect() as connection:
            others = (
                "SELECT id FROM information_schema.processlist WHERE id <> CONNECTION_ID() AND user LIKE 'test\\_%'"
            )
            for (session,) in query(connection, others):
                with suppress(pymysql.OperationalError):  # it has gone by itself
                    query(connection, f"KILL {session}")
