"""How often a small checkpoint asks the server, and what changes between two of them, or amid one, though it asks for
that together with other things, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from sinks._util import idle_connections
from sinks.errors import ConfigurationError, TransactionEnded
from sinks.postgres import PostgresSink
from sinks.sql import server
from sinks.testing.servers.postgres import PostgresService
from sinks.testing.table import COMMITTED, SCHEMA
from tests.amid import WHEN, nothing, write
from tests.postgres.observer import Observer


@pytest.fixture(params=["prepared", "staged"])
def sink(db: Observer, request: pytest.FixtureRequest) -> Iterator[PostgresSink]:
    sink = PostgresSink(db.dsn, "orders", strategy=request.param, lock_timeout=0.5)
    sink.check(SCHEMA)
    yield sink
    sink.close()


def test_messages_of_a_checkpoint(sink: PostgresSink, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []

    def counting(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, query: Any, *args: Any, **options: Any) -> Any:
            sent.append(str(query))
            return method(self, query, *args, **options)

        return call

    monkeypatch.setattr(server, "_TRUSTED_SECONDS", 600)  # after which a connection is asked whether it still works
    monkeypatch.setattr(idle_connections, "IDLE_SECONDS", 120.0)
    assert write(sink, 0) == COMMITTED
    monkeypatch.setattr(psycopg.ClientCursor, "execute", counting(psycopg.ClientCursor.execute))
    monkeypatch.setattr(psycopg.ClientCursor, "copy", counting(psycopg.ClientCursor.copy))
    assert write(sink, 1) == COMMITTED
    assert len(sent) <= {"prepared": 6, "staged": 28}[sink.strategy], "\n".join(sent)


def test_connections_that_the_server_has_closed_are_not_used(db: Observer, sink: PostgresSink) -> None:
    for n in range(2):
        assert write(sink, n) == COMMITTED
        assert db.end_sessions("datname = current_database() AND application_name LIKE 'tpc %'") > 0
    assert write(sink, 2) == COMMITTED
    assert db.ids() == [0, 1, 2]


TRIGGER = (
    "CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';"
    "CREATE TRIGGER t BEFORE INSERT ON orders FOR EACH ROW EXECUTE FUNCTION f()"
)


@WHEN
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("ALTER TABLE orders ADD extra text", ""),
        ("ALTER TABLE orders ALTER name TYPE bigint USING 1", "bigint"),
        ("ALTER TABLE orders RENAME name TO title", '"name"'),
        ("ALTER TABLE orders RENAME TO others", "orders.*(not there any more|gone|does not exist)"),
        (
            "DROP TABLE orders; CREATE VIEW orders AS SELECT 1 AS id",
            "orders.*(a view|not a|not in the|cannot)",
        ),
        ("DROP TABLE orders; CREATE TABLE orders (id bigint NOT NULL, name text)", ""),
        ("CREATE UNIQUE INDEX one ON orders ((true))", "one"),
        (TRIGGER, "trigger t of orders is new"),
    ],
)
def test_a_target_that_changes(db: Observer, sink: PostgresSink, change: str, message: str, when: str) -> None:
    assert write(sink, 0) == COMMITTED
    if when == "between":
        db.run(change)

    def alter() -> None:
        db.run("SET lock_timeout = '100ms'")
        if sink.strategy == "staged":
            db.run(change)
            return
        with pytest.raises(psycopg.errors.LockNotAvailable):  # what is prepared keeps it as it is
            db.run(change)

    amid, then = (alter if when == moment else nothing for moment in ("amid", "then"))
    if message and (when == "between" or sink.strategy == "staged"):
        with pytest.raises(Exception, match=message):
            write(sink, 1, amid, then)
    else:
        assert write(sink, 1, amid, then) == COMMITTED
        assert 1 in db.ids()
    assert db.pending() == 0


@WHEN
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("DELETE FROM tpc_ledger WHERE transaction_id = 'ledger'", "not the ledger that the query started with"),
        ("TRUNCATE tpc_ledger", "not the ledger that the query started with"),
        ("ALTER TABLE tpc_ledger DROP CONSTRAINT tpc_ledger_pkey", "is not a ledger of this version"),
        ("ALTER TABLE tpc_ledger RENAME lineage TO history", "lineage"),
        ("DROP TABLE tpc_ledger", "tpc_ledger"),
        ("DROP TABLE tpc_ledger_witness", "tpc_ledger_witness"),
    ],
)
def test_a_ledger_that_changes(db: Observer, sink: PostgresSink, change: str, message: str, when: str) -> None:
    db.run("SET lock_timeout = '100ms'")
    assert write(sink, 0) == COMMITTED
    if when == "then":
        outcome: object = None
        with suppress(Exception):
            outcome = write(sink, 1, then=lambda: db.run(change))
        assert db.ids() == ([0, 1] if outcome == COMMITTED else [0])
        return
    if when == "between":
        db.run(change)
    with pytest.raises(Exception, match=message):
        write(sink, 1, amid=(lambda: db.run(change)) if when == "amid" else nothing)
    assert db.ids() == [0]


@WHEN
@pytest.mark.parametrize("privilege", ["INSERT ON orders", "INSERT ON tpc_ledger", "USAGE ON SCHEMA public"])
def test_privileges_that_are_revoked(db: Observer, sink: PostgresSink, privilege: str, when: str) -> None:
    role = f"writer_{conninfo_to_dict(db.dsn)['dbname']}"
    db.run(f"CREATE ROLE {role} LOGIN PASSWORD 'p'; GRANT ALL ON SCHEMA public TO {role}")
    db.run(f"GRANT ALL ON ALL TABLES IN SCHEMA public TO {role}")
    db.run("REVOKE ALL ON SCHEMA public FROM PUBLIC")
    limited = PostgresSink(
        db.dsn, "orders", strategy=sink.strategy, connect_options={"user": role, "password": "p"}, lock_timeout=0.5
    )
    try:
        limited.check(SCHEMA)
        assert write(limited, 0) == COMMITTED

        def revoke() -> None:
            db.run(f"REVOKE {privilege} FROM {role}")

        if when == "between":
            revoke()
        outcome: object = None
        with suppress(ConfigurationError, psycopg.errors.InsufficientPrivilege):
            outcome = write(limited, 1, *(revoke if when == moment else nothing for moment in ("amid", "then")))
        assert (outcome == COMMITTED) == (db.ids() == [0, 1])
        assert outcome != COMMITTED or when != "between"
    finally:
        limited.close()
        for gid in db.prepared():
            db.run(f"ROLLBACK PREPARED '{gid}'")
        db.run(f"DROP OWNED BY {role}")
        db.run(f"DROP ROLE {role}")


@WHEN
def test_another_database_behind_the_same_address(
    db: Observer, sink: PostgresSink, postgres: PostgresService, when: str
) -> None:
    """Open connections are cut, as in a failover, and the next ones lead to the other database."""
    with (
        postgres.database() as dsn,
        closing(Observer(dsn)) as other,
        closing(PostgresSink(dsn, "orders", strategy=sink.strategy, create_table=True)) as there,
    ):
        there.check(SCHEMA)
        assert write(there, 0) == write(sink, 0) == COMMITTED

        def swap() -> None:
            db.end_sessions("application_name LIKE 'tpc %'")
            vars(sink._server)["_parameters"]["dbname"] = conninfo_to_dict(dsn)["dbname"]

        if when == "between":
            swap()
        outcome: object = None
        with suppress(ConfigurationError, TransactionEnded, psycopg.OperationalError):
            outcome = write(sink, 1, *(swap if when == moment else nothing for moment in ("amid", "then")))
        assert outcome != COMMITTED
        assert [*db.ids(), *other.ids()] == [0, 0]


def test_what_is_remembered_is_read_from_the_ledger_that_is_there_now(db: Observer, sink: PostgresSink) -> None:
    assert write(sink, 0) == COMMITTED
    ((_, newest),) = sink.committed_checkpoints("job").items()
    assert newest == 0
    db.run("DELETE FROM tpc_ledger WHERE NOT transaction_id = 'ledger'")
    with pytest.raises(ConfigurationError, match="the ledger alone was restored"):
        sink.committed_checkpoints("job")
    db.run("DROP TABLE tpc_ledger_witness")
    assert sink.committed_checkpoints("job") == {}
    db.run("DROP TABLE tpc_ledger")
    assert sink.committed_checkpoints("job") == {}
