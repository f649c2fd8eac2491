"""How often a small checkpoint asks the server, and what changes between two of them, or amid one, though it asks for
that together with other things, or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any

import pymysql
import pytest

from sinks import CommitOutcome
from sinks._util import idle_connections
from sinks.errors import ConfigurationError, TransactionEnded
from sinks.mysql import MySQLSink, xa
from sinks.mysql.connection import Connection, execute, is_mariadb, parameters, query
from sinks.sql import server as of_sinks
from sinks.testing.servers.mysql import EmbeddedMySQL, MySQLService
from sinks.testing.table import COMMITTED, SCHEMA, checkpoint, eventually, pre_commit, rows_of, why_unknown
from sinks.transaction import CommitState
from tests.amid import WHEN, nothing, write
from tests.mysql.observer import ON_MARIADB, Observer


@pytest.fixture(params=["xa", "staged"])
def sink(db: Observer, request: pytest.FixtureRequest) -> Iterator[MySQLSink]:
    sink = MySQLSink(db.dsn, "orders", strategy=request.param, lock_timeout=1)
    sink.check(SCHEMA)
    yield sink
    sink.close()


def require_outcome(outcome: CommitOutcome | Exception) -> None:
    """Raise what makes the coordinator ask again."""
    if isinstance(outcome, Exception):
        raise outcome


def cut(db: Observer) -> None:
    """End all other sessions of the database."""
    for (session,) in db.run(
        "SELECT id FROM information_schema.processlist WHERE db = DATABASE() AND id <> CONNECTION_ID()"
    ):
        db.run(f"KILL {session}")
    eventually(lambda: not db.sessions())


def test_messages_of_a_checkpoint(db: Observer, sink: MySQLSink, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[object] = []
    send = Connection._execute_command  # type: ignore[attr-defined]

    def counting(self: Connection, command: int, statement: Any) -> None:
        sent.append(statement)
        send(self, command, statement)

    monkeypatch.setattr(of_sinks, "_TRUSTED_SECONDS", 600)  # after which a connection is asked whether it still works
    monkeypatch.setattr(idle_connections, "IDLE_SECONDS", 120.0)
    assert write(sink, 0) == COMMITTED
    monkeypatch.setattr(Connection, "_execute_command", counting)
    assert write(sink, 1) == COMMITTED
    connects = 2 if is_mariadb(db.connection) else 0  # a branch of MariaDB keeps its session
    assert len(sent) <= {"xa": 6 + 2 * connects, "staged": 27}[sink.strategy], "\n".join(map(str, sent))


def test_connections_that_the_server_has_closed_are_not_used(db: Observer, sink: MySQLSink) -> None:
    for n in range(2):
        assert write(sink, n) == COMMITTED
        cut(db)
    assert write(sink, 2) == COMMITTED
    assert db.ids() == [0, 1, 2]


def test_a_session_that_keeps_its_branch_is_ended(db: Observer) -> None:
    with closing(MySQLSink(db.dsn, "orders", strategy="xa")) as sink:
        sink.check(SCHEMA)
        if not is_mariadb(db.connection):
            sink._server.close()
            db.run("SET GLOBAL xa_detach_on_prepare = OFF")
        try:
            committables = [pre_commit(sink, rows_of(n), subtask=n) for n in range(2)]
            assert sink.commit_all(checkpoint(), committables) == [COMMITTED] * 2
        finally:
            if not is_mariadb(db.connection):
                db.run("SET GLOBAL xa_detach_on_prepare = ON")
    assert db.ids() == [0, 1]


TRIGGER = "CREATE TRIGGER t BEFORE INSERT ON orders FOR EACH ROW SET NEW.name = upper(NEW.name)"


@WHEN
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["ALTER TABLE orders ADD extra text"], ""),
        (["ALTER TABLE orders DROP name, ADD name bigint"], "bigint"),
        (["ALTER TABLE orders DROP name, ADD name varchar(3)"], r"varchar\(3\)|truncated"),
        (["ALTER TABLE orders RENAME COLUMN name TO title"], '"name"'),
        (["ALTER TABLE orders ADD extra text NOT NULL"], '"extra"'),
        (["RENAME TABLE orders TO others"], "(?i)orders.*(gone|exist)"),
        (["DROP TABLE orders", "CREATE VIEW orders AS SELECT 1 AS id, 'a' AS name"], "orders.*(view|insertable)"),
        (["DROP TABLE orders", "CREATE TABLE orders (id bigint NOT NULL, name varchar(100)) ENGINE=InnoDB"], ""),
        (["ALTER TABLE orders ENGINE=MyISAM"], "MyISAM"),
        (["CREATE UNIQUE INDEX one ON orders ((1))"], "one"),
        ([TRIGGER], "trigger t is new"),
    ],
)
def test_a_target_that_changes(db: Observer, sink: MySQLSink, changes: list[str], message: str, when: str) -> None:
    if "INDEX" in changes[0] and is_mariadb(db.connection):
        changes = ["CREATE UNIQUE INDEX one ON orders (name(3))"]
    assert write(sink, 0) == COMMITTED
    db.run("SET SESSION lock_wait_timeout = 1, SESSION innodb_lock_wait_timeout = 1")
    # MariaDB lets them through while a branch is prepared whose session has ended
    goes_through = when == "then" and message in ("MyISAM", "trigger t is new") and is_mariadb(db.connection)

    def alter() -> None:
        if when != "between" and sink.strategy == "xa" and not goes_through:
            with pytest.raises(pymysql.OperationalError, match="Lock wait timeout"):  # the branch keeps it as it is
                db.run(changes[0])
            return
        db.run("SET SESSION lock_wait_timeout = 120")  # until a session that was closed has ended
        for change in changes:
            db.run(change)

    if when == "between":
        alter()
    amid, then = (alter if when == moment else nothing for moment in ("amid", "then"))
    if message and (when == "between" or sink.strategy == "staged"):
        with pytest.raises(Exception, match=message):
            write(sink, 1, amid, then)
    elif goes_through and message == "MyISAM":
        assert message in why_unknown(write(sink, 1, amid, then))
        assert db.ids() == [0]
        return
    else:
        assert write(sink, 1, amid, then) == COMMITTED
        assert 1 in db.ids()
    assert db.pending() == 0


@ON_MARIADB
@pytest.mark.parametrize("table", ["orders", "tpc_ledger", "tpc_ledger_witness"])
def test_rows_are_written_again_after_another_engine(db: Observer, table: str) -> None:
    """As the error says."""
    db.run("SET SESSION lock_wait_timeout = 1, SESSION innodb_lock_wait_timeout = 1")
    with closing(MySQLSink(db.dsn, "orders", strategy="xa", lock_timeout=1)) as sink:
        sink.check(SCHEMA)
        assert write(sink, 0) == COMMITTED
        committable = pre_commit(sink, rows_of(1), checkpoint=1)
        xa.await_session(db.connection, committable.proof["session"])
        db.run(f"ALTER TABLE {table} ENGINE=Aria")
        for _ in range(2):
            (outcome,) = sink.commit_all(checkpoint(1), [committable])
            assert f"the engine of {table} is Aria" in why_unknown(outcome)
        db.run("XA ROLLBACK " + why_unknown(outcome).split("XA ROLLBACK ")[1].split(";")[0])
        for statement in (f"RENAME TABLE {table} TO x", f"DROP TABLE {table}", f"RENAME TABLE x TO {table}"):
            db.run(statement)
        db.run(f"ALTER TABLE {table} ENGINE=InnoDB")
        (outcome,) = sink.commit_all(checkpoint(1), [committable])
        assert isinstance(outcome, CommitOutcome)
        assert outcome.state is CommitState.LOST
        assert write(sink, 2) == COMMITTED
    assert db.ids() == [0, 2]


@ON_MARIADB
@pytest.mark.parametrize("table", ["orders", "tpc_ledger", "tpc_ledger_witness"])
def test_nothing_gets_another_engine_amid_the_commit(db: Observer, table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    db.run("SET SESSION lock_wait_timeout = 1, SESSION innodb_lock_wait_timeout = 1")
    send, refused = Connection._execute_command, []  # type: ignore[attr-defined]

    def alter(self: Connection, command: int, statement: Any) -> None:
        if "XA COMMIT" in str(statement):
            with pytest.raises(pymysql.OperationalError, match="Lock wait timeout"):
                db.run(f"ALTER TABLE {table} ENGINE=MyISAM")
            refused.append(table)
        send(self, command, statement)

    with closing(MySQLSink(db.dsn, "orders", strategy="xa")) as sink:
        sink.check(SCHEMA)
        monkeypatch.setattr(Connection, "_execute_command", alter)
        assert write(sink, 0) == COMMITTED
    assert (db.ids(), refused) == ([0], [table])


@ON_MARIADB
def test_a_table_of_the_same_name_in_capitals_may_have_another_engine(db: Observer) -> None:
    db.run("CREATE TABLE ORDERS (id bigint) ENGINE=MyISAM")
    with closing(MySQLSink(db.dsn, "orders", strategy="xa")) as sink:
        sink.check(SCHEMA)
        assert write(sink, 0) == COMMITTED
    assert db.ids() == [0]


@WHEN
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("DELETE FROM tpc_ledger WHERE transaction_id = 'ledger'", "not the ledger that the query started with"),
        ("TRUNCATE tpc_ledger", "not the ledger that the query started with"),
        ("ALTER TABLE tpc_ledger DROP PRIMARY KEY", "is not a ledger of this version"),
        ("ALTER TABLE tpc_ledger ENGINE=MyISAM", "is not a ledger of this version"),
        ("ALTER TABLE tpc_ledger RENAME COLUMN lineage TO history", "lineage"),
        ("DROP TABLE tpc_ledger", "tpc_ledger"),
        ("DROP TABLE tpc_ledger_witness", "tpc_ledger_witness"),
    ],
)
def test_a_ledger_that_changes(db: Observer, sink: MySQLSink, change: str, message: str, when: str) -> None:
    db.run("SET SESSION lock_wait_timeout = 1, SESSION innodb_lock_wait_timeout = 1")
    assert write(sink, 0) == COMMITTED
    if when == "then":
        outcome: object = None
        with suppress(Exception):
            outcome = write(sink, 1, then=lambda: db.run(change))
        assert db.ids() == ([0, 1] if outcome == COMMITTED else [0])
        return
    if when == "between":
        db.run(change)
    amid = (lambda: db.run(change)) if when == "amid" else nothing
    with pytest.raises(Exception, match=message):
        require_outcome(write(sink, 1, amid=amid))
    assert db.ids() == [0]


@WHEN
@pytest.mark.parametrize("privilege", ["INSERT ON {}.orders", "INSERT ON {}.tpc_ledger", "SELECT ON {}.tpc_ledger"])
def test_privileges_that_are_revoked(db: Observer, mysql: MySQLService, privilege: str, when: str) -> None:
    with closing(MySQLSink(db.dsn, "orders", strategy="xa")) as first:
        first.check(SCHEMA)
    user = f"{db.schema}_less"[-32:]
    with mysql.connect() as admin:
        dsn = mysql.add_user(admin, user, f"INSERT ON {db.schema}.orders", db.schema)
        for table in ("tpc_ledger", "tpc_ledger_witness"):
            execute(admin, f"GRANT SELECT, INSERT, DELETE ON {db.schema}.{table} TO '{user}'@'%'")
        if not is_mariadb(admin):
            execute(admin, f"GRANT XA_RECOVER_ADMIN ON *.* TO '{user}'@'%'")
        with closing(MySQLSink(dsn, "orders", strategy="xa", lock_timeout=1)) as sink:
            sink.check(SCHEMA)
            assert write(sink, 0) == COMMITTED

            def revoke() -> None:
                execute(admin, f"REVOKE {privilege.format(db.schema)} FROM '{user}'@'%'")

            if when == "between":
                revoke()
            outcome: object = None
            with suppress(ConfigurationError, pymysql.OperationalError):
                outcome = write(sink, 1, *(revoke if when == moment else nothing for moment in ("amid", "then")))
            assert (outcome == COMMITTED) == (db.ids() == [0, 1])
            assert outcome != COMMITTED or when != "between"
        execute(admin, f"DROP USER '{user}'@'%'")


@WHEN
def test_another_server_behind_the_same_address(
    db: Observer, sink: MySQLSink, server: EmbeddedMySQL, when: str
) -> None:
    """Open connections are cut, as in a failover, and the next ones lead to a server that has a table and a ledger of
    the same names."""
    with server.connect() as admin:
        execute(admin, f"CREATE DATABASE {db.schema}")
    try:
        with (
            closing(MySQLSink(server.url(db.schema), "orders", strategy=sink.strategy, create_table=True)) as there,
            closing(server.connect(server.url(db.schema))) as other,
        ):
            there.check(SCHEMA)
            assert write(there, 0) == write(sink, 0) == COMMITTED

            def swap() -> None:
                cut(db)
                vars(sink._server)["_parameters"] |= parameters(server.url(db.schema))

            if when == "between":
                swap()
            outcome: object = None
            with suppress(ConfigurationError, TransactionEnded, pymysql.OperationalError):
                outcome = write(sink, 1, *(swap if when == moment else nothing for moment in ("amid", "then")))
            assert outcome != COMMITTED
            assert [*db.ids(), *(id for (id,) in query(other, "SELECT id FROM orders"))] == [0, 0]
    finally:
        with server.connect() as admin:
            execute(admin, f"DROP DATABASE {db.schema}")
