"""What is special when this server dies, freezes or is changed under a job; the rest is in `TableCrashes`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy.exc import OperationalError

from coordinator import Step
from coordinator.errors import InDoubtError
from sinks.errors import ConfigurationError
from sinks.postgres import PostgresSink, connection
from sinks.sqlalchemy import SqlAlchemySink
from sinks.testing import KILLED, Driver
from sinks.testing.conformance import example_input
from sinks.testing.driver import KillAt
from sinks.testing.servers.postgres import PostgresServer, PostgresService
from sinks.testing.table import SCHEMA, context, rows_of
from sinks.testing.table_crashes import At, TableCrashes, assert_exactly_once, run
from tests.postgres.observer import Observer


@pytest.fixture
def server(own_postgres: PostgresServer) -> PostgresServer:
    return own_postgres


@pytest.fixture
def dsn(server: PostgresServer) -> Iterator[str]:
    with server.database() as dsn:
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute("CREATE TABLE orders (id bigint NOT NULL, name text, amount double precision)")
        yield dsn


def test_an_operator_rolls_back_a_decided_prepared_transaction(tmp_path: Path, dsn: str) -> None:
    def roll_back() -> None:
        with psycopg.connect(dsn, autocommit=True) as connection:
            prepared = connection.execute(
                "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"
            ).fetchall()
            assert len(prepared) == 3
            connection.execute(f"ROLLBACK PREPARED '{prepared[0][0]}'")

    input = example_input()
    run(tmp_path, PostgresSink(dsn, "orders", strategy="prepared"), input, At(Step.COMPLETE, roll_back))
    assert_exactly_once(Observer(dsn), input)


def test_a_table_changed_after_the_decision_is_mended_and_every_row_is_there_once(tmp_path: Path, dsn: str) -> None:
    def alter(change: str) -> None:
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(f"ALTER TABLE orders {change}".encode())

    input = example_input()
    sink = PostgresSink(dsn, "orders", strategy="staged")
    killed = KillAt(Step.COMPLETE, checkpoint_id=1)
    driver = Driver("job", sink, f"file://{tmp_path / 'storage'}", tmp_path / "query", input, [killed])
    assert driver.run() == KILLED
    alter("RENAME amount TO price")
    for _ in range(2):
        with pytest.raises(InDoubtError, match=r'no column "amount" any more.*safe in the staging table') as error:
            run(tmp_path, sink, input)
        assert "whether these took effect" not in str(error.value)
    alter("RENAME price TO amount")
    run(tmp_path, sink, input)
    assert_exactly_once(Observer(dsn), input)


ENDS = pytest.mark.timeout(300)
"""Of a wait that lasts some seconds: a hang takes as long as the server is frozen."""


class Frozen:
    """While the server is frozen, it may be silent for a second, not for five, and a connection may take two, not ten.
    Before and after that, a busy machine has the time that it needs."""

    def __init__(self, server: PostgresServer) -> None:
        self._server = server
        self._patched = pytest.MonkeyPatch()

    def begin(self) -> None:
        theirs, ours, limit = psycopg.connect, connection.Connection.connect, {"connect_timeout": 2}
        self._server.pause()
        patch = self._patched.setattr
        patch(connection, "SILENCE", 1)
        patch(psycopg, "connect", lambda *args, **options: theirs(*args, **options | limit))
        patch(connection.Connection, "connect", lambda *args, **options: ours(*args, **options | limit))

    def end(self) -> None:
        self._patched.undo()
        self._server.resume()


@pytest.fixture
def frozen(server: PostgresServer) -> Iterator[Frozen]:
    frozen = Frozen(server)
    yield frozen
    frozen.end()


@ENDS
@pytest.mark.parametrize("strategy", ["prepared", pytest.param("staged", marks=pytest.mark.large)])
def test_a_server_that_freezes_holds_nobody_up(tmp_path: Path, dsn: str, strategy: Any, frozen: Frozen) -> None:
    """It is asked once, and given up."""
    input = example_input()
    sink = PostgresSink(dsn, "orders", strategy=strategy)
    with pytest.raises(InDoubtError, match="is still not known to be visible"):
        run(tmp_path, sink, input, At(Step.COMMITTING, frozen.begin), commit_timeout=1)
    frozen.end()
    run(tmp_path, sink, input)
    assert_exactly_once(Observer(dsn), input)


@ENDS
def test_a_server_that_freezes_under_a_copy(dsn: str, frozen: Frozen) -> None:
    with closing(PostgresSink(dsn, "orders", strategy="prepared")) as sink:
        sink.check(SCHEMA)
        transaction = sink.begin_transaction(context(sink))
        sink.write(transaction, rows_of(1))
        frozen.begin()
        with pytest.raises(psycopg.OperationalError, match="takes connections and does not answer"):
            sink.pre_commit(transaction)
        transaction.discard()


@ENDS
def test_a_server_that_freezes_under_sqlalchemy(dsn: str, frozen: Frozen) -> None:
    """A URL without a driver means psycopg."""
    with closing(SqlAlchemySink(dsn, "orders")) as sink:
        sink.check(SCHEMA)
        transaction = sink.begin_transaction(context(sink))
        sink.write(transaction, rows_of(1))
        frozen.begin()
        with pytest.raises(OperationalError, match="takes connections and does not answer"):
            sink.pre_commit(transaction)
        transaction.discard()


def test_prepared_transactions_run_out_in_the_middle(tmp_path: Path) -> None:
    with PostgresServer({"max_prepared_transactions": "2"}) as small, small.database() as dsn:
        input = example_input()
        with pytest.raises(ConfigurationError, match="max_prepared_transactions"):
            run(tmp_path, PostgresSink(dsn, "orders", create_table=True), input)
        assert_exactly_once(Observer(dsn), [])
        run(tmp_path, PostgresSink(dsn, "orders", strategy="staged"), input)
        assert_exactly_once(Observer(dsn), input)


def test_a_wrong_address_is_said_at_once_and_without_the_password(
    tmp_path: Path, postgres: PostgresService, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    with postgres.database() as dsn:
        wrong = psycopg.conninfo.make_conninfo(dsn, password="hunter2")
        if postgres.unmanaged:
            pytest.skip(postgres.unmanaged)
        with pytest.raises(ConfigurationError, match="password") as error:
            run(tmp_path, PostgresSink(wrong, "orders", create_table=True), example_input())
    assert "hunter2" not in str(error.value)
    assert "hunter2" not in caplog.text
    assert not any("hunter2" in path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file())


class TestCrashes(TableCrashes):
    make = PostgresSink
    observe = Observer
    strategies = ("prepared", "staged")

    @pytest.fixture(params=strategies)
    def strategy(self, request: pytest.FixtureRequest) -> str:
        return str(request.param)

    def cut_connections(self, server: PostgresServer) -> None:
        with server.connect() as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'"
            )
