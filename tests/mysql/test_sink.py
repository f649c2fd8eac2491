"""`MySQLSink` on a real server, without Spark: each test plays the coordinator, and a second connection looks on."""

from __future__ import annotations

import hashlib
import logging
import pickle
import re
import threading
from collections.abc import Iterator
from datetime import datetime
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import pymysql
import pytest

from sinks import CommitOutcome, Committable
from sinks.errors import BadValue, ConfigurationError, SchemaMismatch, SinkError, TransactionBlocked
from sinks.mysql import MySQLSink, catalog, xa
from sinks.mysql.connection import execute, is_mariadb, parameters, query
from sinks.testing.servers.mariadb import MariaDBServer
from sinks.testing.servers.mysql import MySQLService
from sinks.testing.table import (
    CHANGES,
    COMMITTED,
    SCHEMA,
    batch,
    checkpoint,
    context,
    eventually,
    pre_commit,
    rows_of,
)
from sinks.testing.table_suite import TableSuite
from sinks.transaction import Fingerprint, TransactionId
from tests.mysql.observer import Observer, held, with_option

_made: list[MySQLSink] = []


def make(db: Observer, *, check: pa.Schema | None = SCHEMA, **options: Any) -> MySQLSink:
    """A sink as the driver has it; closed at the end of the test."""
    sink = MySQLSink(options.pop("dsn", db.dsn), options.pop("table", "orders"), **options)
    _made.append(sink)
    if check is not None:
        sink.check(check)
    return sink


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    while _made:
        _made.pop().close()


@pytest.fixture(params=["xa", "staged"])
def sink(db: Observer, request: pytest.FixtureRequest) -> Iterator[MySQLSink]:
    sink = make(db, strategy=request.param, lock_timeout="1 s")
    yield sink
    sink.close()


def end(committable: Committable, db: Observer, how: str) -> None:
    """What an operator does with a prepared branch, once the session that MariaDB ties it to has ended."""
    session = committable.proof.get("session")
    eventually(lambda: not db.run("SELECT 1 FROM information_schema.processlist WHERE id = %s", [session]))
    db.run(f"XA {how} {xa.xid(committable.transaction, db.schema)}")


# ---------------------------------------------------------------------- the protocol, both strategies
def test_a_task_whose_connection_dies_leaves_nothing_but_what_a_sweep_finds(db: Observer, sink: MySQLSink) -> None:
    transaction = sink.begin_transaction(context(sink))
    sink.write(transaction, rows_of(1))
    db.run(f"KILL {transaction.connection.thread_id()}")
    with pytest.raises(pymysql.OperationalError):
        sink.pre_commit(transaction)
    sink.rollback(transaction)
    for identity in sink.in_doubt("job"):
        sink.abort(identity)
    assert db.pending() == 0
    assert db.visible() == []


def test_the_sink_travels_to_the_tasks_with_what_the_driver_found(db: Observer, sink: MySQLSink) -> None:
    with sink._server.lend():
        pass
    copy = pickle.loads(pickle.dumps(sink))
    assert copy._target.planned() == sink._target.plan
    committable = pre_commit(copy, rows_of(1))
    copy.close()
    assert sink.commit_all(checkpoint(), [committable]) == [COMMITTED]


def test_odd_names_of_sink_and_columns(db: Observer) -> None:
    db.run("CREATE TABLE `Täg``lich %s` (`a b` bigint, `select` text, `q'\"` text) ENGINE=InnoDB")
    schema = pa.schema([("a b", pa.int64()), ("select", pa.string()), ("q'\"", pa.string())])
    for strategy in ("xa", "staged"):
        sink = make(db, table="`Täg``lich %s`", name="sink 😀 %s '", strategy=strategy, check=schema)
        row = {"a b": 1, "select": "%s", "q'\"": None}
        assert sink.commit_all(checkpoint(), [pre_commit(sink, batch([row], schema))]) == [COMMITTED]
    assert db.run("SELECT * FROM `Täg``lich %s`") == [(1, "%s", None)] * 2


@pytest.mark.parametrize("numbers", [(0, 0, 0), (10**18, 10**5, 10**9)])
def test_the_longest_names_fit_a_branch_and_come_back(numbers: tuple[int, int, int]) -> None:
    name = TransactionId("j" * 80 + "é", "0badcafe", numbers[0], "s" * 80 + "é", numbers[1], 99, 9, 9, numbers[2])
    identity = xa.identity_of(str(name))
    assert max(map(len, identity.values())) <= 64
    assert xa.name_of(identity) == str(name)


def test_a_name_that_is_too_long_for_a_branch_is_refused() -> None:
    name = TransactionId("j" * 80, "0badcafe", 0, "s" * 80, 10**9, 10**9, 10**9, 10**9, 10**9)
    with pytest.raises(SinkError, match="staged"):
        xa.identity_of(str(name))


def test_in_doubt_leaves_other_sinks_databases_and_people_alone(
    db: Observer, sink: MySQLSink, mysql: MySQLService
) -> None:
    other = make(db, name="other", strategy=sink.strategy)
    pre_commit(other, rows_of(1))
    db.run("CREATE TABLE tpc_00000000000000000000 (id int)")
    somebody = Observer(db.dsn)
    form = xa.format_of(db.schema)
    branches = [f"'tpc.somebody else', 'x', {form}", f"'{'x' * 64}', '{'y' * 64}', 1", f"X'00ff', X'fe', {form}"]
    for branch in branches:
        for command in ("XA START %s", "INSERT INTO tpc_00000000000000000000 VALUES (1)", "XA END %s", "XA PREPARE %s"):
            execute(somebody.connection, command.replace("%s", branch))
        somebody.close()
        somebody = Observer(db.dsn)
    assert list(sink.in_doubt("job")) == []
    for branch in branches:
        db.run(f"XA ROLLBACK {branch}")
    with mysql.database() as dsn:
        elsewhere = Observer(dsn)
        elsewhere.run("CREATE TABLE orders (id bigint, name text) ENGINE=InnoDB")
        far = make(elsewhere, strategy=sink.strategy)
        committable = pre_commit(far, rows_of(1))
        assert list(sink.in_doubt("job")) == []
        assert list(far.in_doubt("job")) == [dict(committable.transaction)]
        elsewhere.close()
    somebody.close()


# ---------------------------------------------------------------------- lost, held, unknown, ask again
@pytest.mark.parametrize("mysql", ["mysql_server", "mariadb"], indirect=True, ids=["MySQL", "MariaDB"])
def test_a_branch_that_its_session_still_holds_is_asked_again_not_lost(
    db: Observer, mysql: MySQLService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a task that hangs, or whose host is cut off, between XA PREPARE and the end of its session."""
    monkeypatch.setattr(xa, "_DETACH_TIMEOUT", 1.0)
    sink = make(db, strategy="xa", lock_timeout=1)
    transaction: Any = sink.begin_transaction(context(sink))
    sink.write(transaction, rows_of(1))
    transaction.finish()
    ledger, name = sink._target.planned().ledger, transaction.context.transaction_id
    ledger.insert(transaction.connection, {name: TransactionId.parse(name)}, committed=True)
    committable = Committable(transaction.identity, proof=ledger.proof())
    branch = xa.xid(transaction.identity, db.schema)

    def stays_open(why: str) -> None:
        with pytest.raises(pymysql.OperationalError, match=why):
            sink.commit(committable)
        assert db.ledger() == {}

    stays_open("Lock wait")
    transaction.execute(f"XA END {branch}")
    stays_open("Lock wait")
    transaction.execute(f"XA PREPARE {branch}")
    if "MariaDB" in db.run("SELECT VERSION()")[0][0]:  # MySQL lets go of it at once
        stays_open("has not let go")
        with pytest.raises(pymysql.OperationalError, match="has not let go"):
            sink.abort(committable.transaction)
    transaction.connection.close()
    eventually(lambda: sink.commit(committable) == COMMITTED)
    assert db.ids() == [1]


def test_a_staged_commit_in_flight_is_asked_again_not_lost(db: Observer) -> None:
    sink = make(db, strategy="staged", lock_timeout=1)
    committable = pre_commit(sink, rows_of(1))
    name = committable.transaction["transaction_id"]
    columns = "transaction_id, committed, job, lineage, sink, checkpoint"
    in_flight = f"INSERT INTO tpc_ledger ({columns}) VALUES ('{name}', true, '', '', '', 0)"
    with held(db.dsn, in_flight) as other:
        (outcome,) = sink.commit_all(checkpoint(), [committable])
        assert isinstance(outcome, pymysql.OperationalError)
        assert outcome.args[0] == 1205
        with pytest.raises(pymysql.OperationalError, match="Lock wait"):
            sink.abort(committable.transaction)
        other.commit()
    assert sink.commit_all(checkpoint(), [committable]) == [COMMITTED]
    assert db.staging() == []


def test_a_pooled_connection_that_died_is_replaced_unseen(db: Observer, sink: MySQLSink) -> None:
    committable = pre_commit(sink, rows_of(1))
    with sink._server.lend() as connection:
        thread = connection.thread_id()
    db.run(f"KILL {thread}")
    eventually(lambda: not db.run(f"SELECT 1 FROM information_schema.processlist WHERE id = {thread}"))
    assert sink.commit_all(checkpoint(), [committable]) == [COMMITTED]
    assert db.ids() == [1]


def test_a_connection_cut_during_commit_is_asked_again(db: Observer) -> None:
    sink = make(db, strategy="staged", lock_timeout=300)
    committables = [pre_commit(sink, rows_of(n), subtask=n) for n in range(2)]
    answers: list[Any] = []
    waiting = "SELECT id FROM information_schema.processlist WHERE db = DATABASE() AND state LIKE 'Waiting for%lock'"
    locking = Observer(db.dsn)
    locking.run("LOCK TABLES orders WRITE")
    thread = threading.Thread(target=lambda: answers.extend(sink.commit_all(checkpoint(), committables)))
    thread.start()
    eventually(lambda: bool(db.run(waiting)))
    db.run(f"KILL {db.run(waiting)[0][0]}")
    thread.join()
    locking.close()
    assert [type(answer) for answer in answers] == [pymysql.OperationalError] * 2
    assert db.visible() == []
    assert db.ledger() == {}
    assert sink.commit_all(checkpoint(), committables) == [COMMITTED, COMMITTED]
    assert db.ids() == [0, 1]


def test_a_crash_between_move_and_drop_is_not_in_doubt(db: Observer) -> None:
    sink = make(db, strategy="staged", lock_timeout=1)
    committable = pre_commit(sink, rows_of(1))
    with held(db.dsn, f"SELECT * FROM {committable.transaction['table']}"):  # whoever reads a table keeps it
        assert sink.commit_all(checkpoint(), [committable]) == [COMMITTED]
    assert db.ids() == [1]
    assert len(db.staging()) == 1
    assert list(sink.in_doubt("job")) == []
    assert sink.commit_all(checkpoint(), [committable]) == [COMMITTED]
    assert db.staging() == []
    assert db.ids() == [1]


# ---------------------------------------------------------------------- the server's limits
@pytest.mark.parametrize(("mode", "expected"), [("append", "gtrid"), ("upsert", "table")])
def test_auto_asks_the_server_and_says_why(
    db: Observer, caplog: pytest.LogCaptureFixture, mode: str, expected: str
) -> None:
    db.run("ALTER TABLE orders ADD PRIMARY KEY (id)")
    with caplog.at_level(logging.INFO, "sinks.mysql"):
        sink = make(db, mode=mode, keys=["id"] if mode == "upsert" else [])
    assert f"strategy {'xa' if expected == 'gtrid' else 'staged'}: " in caplog.text
    assert "; by LOAD DATA" in caplog.text
    assert expected in pre_commit(sink, rows_of(1)).transaction


@pytest.mark.usefixtures("without_local")
@pytest.mark.parametrize("strategy", ["xa", "staged"])
def test_insert_takes_the_place_of_load_data(db: Observer, caplog: pytest.LogCaptureFixture, strategy: str) -> None:
    with caplog.at_level(logging.INFO, "sinks.mysql"):
        sink = make(db, strategy=strategy)
    assert "by INSERT, since local_infile is OFF" in caplog.text
    committables = [pre_commit(sink, rows_of(*range(1000)), rows_of(1000))]
    assert sink.commit_all(checkpoint(), committables) == [COMMITTED]
    assert db.ids() == list(range(1001))


@pytest.mark.usefixtures("without_local")
@pytest.mark.parametrize("strategy", ["xa", "staged"])
def test_bad_values_are_refused_by_insert_too(db: Observer, strategy: str) -> None:
    sink = make(db, strategy=strategy)
    with pytest.raises(BadValue, match=rf"{db.schema}\.orders.*partition 0 of checkpoint 0.*'name'"):
        pre_commit(sink, batch([{"id": 1, "name": "x" * 101}], SCHEMA))
    with pytest.raises(BadValue, match="'name'"):  # a space that does not fit is a note, and no error
        pre_commit(sink, batch([{"id": 1, "name": " " * 101}], SCHEMA))
    assert db.pending() == 0


def test_load_data_switched_off_after_the_check(db: Observer, request: pytest.FixtureRequest) -> None:
    sink = make(db)
    request.getfixturevalue("without_local")
    assert sink.commit_all(checkpoint(), [pre_commit(sink, rows_of(1))]) == [COMMITTED]
    assert db.ids() == [1]


def test_the_server_cannot_read_a_file_of_ours(db: Observer) -> None:
    """PyMySQL would hand over any file that a server names; the connections of the sink do not."""
    sink = make(db)
    with sink._server.lend() as connection, pytest.raises(RuntimeError, match="local_infile option is false"):
        execute(connection, "LOAD DATA LOCAL INFILE '/etc/passwd' INTO TABLE orders")


def test_a_locked_table_blocks_within_the_limit(db: Observer) -> None:
    sink = make(db, strategy="xa", lock_timeout=0.2)
    locking = Observer(db.dsn)
    locking.run("LOCK TABLES orders WRITE")
    with pytest.raises(TransactionBlocked, match=rf"{db.schema}\.orders.*partition 0"):
        pre_commit(sink, rows_of(1))
    locking.close()
    assert db.pending() == 0


def test_a_live_sibling_with_the_same_key_blocks(db: Observer) -> None:
    db.run("ALTER TABLE orders ADD PRIMARY KEY (id)")
    sink = make(db, strategy="xa", lock_timeout=0.2)
    first = pre_commit(sink, rows_of(1), subtask=0)
    with pytest.raises(TransactionBlocked, match="same unique value"):
        pre_commit(sink, rows_of(1), subtask=1)
    sink.abort(first.transaction)
    assert sink.commit_all(checkpoint(), [pre_commit(sink, rows_of(1), subtask=1)]) == [COMMITTED]


def test_sessions_do_not_depend_on_the_defaults_of_the_server(db: Observer, mysql: MySQLService) -> None:
    """Lax modes, another zone, another isolation level, a limit on statements: none of them reaches our sessions."""
    isolation = "tx_isolation" if is_mariadb(db.connection) else "transaction_isolation"
    defaults = {"sql_mode": "''", "time_zone": "'+05:00'", "sql_notes": "0", isolation: "'SERIALIZABLE'"}
    defaults |= {isolation.replace("isolation", "read_only"): "1", "max_join_size": "1", "sql_big_selects": "0"}
    if is_mariadb(db.connection):
        defaults["note_verbosity"] = "''"
    db.run("CREATE TABLE at (id bigint, at timestamp NULL) ENGINE=InnoDB")
    admin = Observer(db.dsn)
    before = {name: admin.run(f"SELECT @@global.{name}")[0][0] for name in defaults}
    try:
        for name, value in defaults.items():
            admin.run(f"SET GLOBAL {name} = {value}")
        schema = pa.schema([("id", pa.int64()), ("at", pa.timestamp("us", "UTC"))])
        sink = make(db, table="at", check=schema)
        committable = pre_commit(sink, batch([{"id": 1, "at": 0}, {"id": 2, "at": 1_000_000}][1:], schema))
        assert sink.commit_all(checkpoint(), [committable]) == [COMMITTED]
        assert db.run("SELECT UNIX_TIMESTAMP(at) FROM at") == [(1,)]
        with sink._server.lend() as connection, connection.cursor() as cursor:
            cursor.execute(f"SELECT @@sql_mode LIKE '%STRICT_ALL_TABLES%', @@{isolation}, @@sql_notes")
            assert cursor.fetchone() == (1, "READ-COMMITTED", 1)
        with pytest.raises(BadValue, match="name"):
            pre_commit(make(db), batch([{"id": 1, "name": "x" + " " * 110}], SCHEMA))
    finally:
        for name, value in before.items():
            admin.run(f"SET GLOBAL {name} = %s", [value])
        admin.close()


@pytest.mark.parametrize("strategy", ["xa", "staged"])
def test_a_task_may_be_without_rows_for_longer_than_the_server_waits_by_default(
    db: Observer, mysql: MySQLService, strategy: str
) -> None:
    admin = Observer(db.dsn)
    idle = ["idle_transaction_timeout", "idle_write_transaction_timeout"] if is_mariadb(db.connection) else []
    ((before,),) = admin.run("SELECT @@global.wait_timeout")
    try:
        for limit in ("wait_timeout", *idle):
            admin.run(f"SET GLOBAL {limit} = 300")
        sink = make(db, strategy=strategy)
        transaction: Any = sink.begin_transaction(context(sink))
        limits = ", ".join(f"@@session.{limit}" for limit in ("wait_timeout", *idle))
        assert query(transaction.connection, f"SELECT {limits}") == [(28800, *(0 for _ in idle))]
        for n in (1, 2):
            sink.write(transaction, rows_of(n))
        committable = sink.pre_commit(transaction).of("orders", 0, Fingerprint(2))
    finally:
        for limit in idle:
            admin.run(f"SET GLOBAL {limit} = 0")
        admin.run(f"SET GLOBAL wait_timeout = {before}")
        admin.close()
    assert sink.commit_all(checkpoint(), [committable]) == [COMMITTED]
    assert db.ids() == [1, 2]


@pytest.fixture(scope="module")
def without_capitals() -> Iterator[MariaDBServer]:
    with MariaDBServer({"lower_case_table_names": "1"}) as server:
        yield server


@pytest.mark.parametrize("strategy", ["xa", "staged"])
def test_a_server_that_does_not_care_for_capitals(without_capitals: MariaDBServer, strategy: str) -> None:
    """What the sweep lists goes by the same names as what the tasks have pre-committed."""
    with without_capitals.database() as dsn:
        db = Observer(dsn)
        db.run("CREATE TABLE orders (id bigint, name text) ENGINE=InnoDB")
        sink = make(db, table=f"{db.schema.upper()}.Orders", strategy=strategy)
        committable = pre_commit(sink, rows_of(1))
        assert list(sink.in_doubt("job")) == [dict(committable.transaction)]
        sink.abort(committable.transaction)
        assert db.pending() == 0
        assert sink.commit_all(checkpoint(), [pre_commit(sink, rows_of(2), subtask=1)]) == [COMMITTED]
        assert db.ids() == [2]
        sink.close()
        db.close()


# ---------------------------------------------------------------------- set-up
def test_all_reasons_against_the_table_come_in_one_error(db: Observer) -> None:
    schema = pa.schema([("id", pa.int64()), ("surname", pa.string()), ("gone", pa.string())])
    with pytest.raises(ConfigurationError) as caught:
        make(db, check=schema, mode="upsert", keys=["id"], order_by="at", delete_marker="gone")
    for reason in ("surname", "'at'", "must be boolean", "needs a unique index", f"{db.schema}.orders"):
        assert reason in str(caught.value)


def test_a_missing_table_is_told_with_a_hint(db: Observer) -> None:
    with pytest.raises(ConfigurationError, match=rf"no table {db.schema}\.ORDERS.*create_table"):
        make(db, table="ORDERS")


@pytest.mark.parametrize("table", ["a.b.c", "`open", "", "a b", "a; DROP TABLE orders", "a.", ".a", "``"])
def test_what_is_no_table_name(db: Observer, table: str) -> None:
    with pytest.raises(ConfigurationError, match="is not a table name"):
        make(db, table=table, name="x")


@pytest.mark.parametrize("table", ["`Odd ``Name`", "{schema}.`Daily.Orders`", "plain", "täglich"])
def test_table_names_are_read_as_in_sql(db: Observer, table: str) -> None:
    table = table.format(schema=db.schema)
    for strategy in ("xa", "staged"):
        sink = make(db, table=table, strategy=strategy, create_table=True)
        sink.commit_all(checkpoint(), [pre_commit(sink, rows_of(1))])
    assert db.ids(table) == [1, 1]


def test_a_view_and_a_table_without_transactions_are_no_targets(db: Observer) -> None:
    db.run("CREATE VIEW seen AS SELECT * FROM orders")
    with pytest.raises(ConfigurationError, match="is a view"):
        make(db, table="seen")
    db.run("CREATE TABLE flat (id bigint, name text) ENGINE=MyISAM")
    with pytest.raises(ConfigurationError, match="engine is MyISAM"):
        make(db, table="flat")


def test_a_timestamp_that_is_no_null_gets_no_default_of_the_server(db: Observer) -> None:
    """As MariaDB before 10.10 gives it: the time of whatever changes the row."""
    fields = [pa.field(name, pa.timestamp("us", "UTC"), nullable=False) for name in ("since", "until")]
    dsn = with_option(db.dsn, "init_command=SET SESSION explicit_defaults_for_timestamp = 0")
    make(db, dsn=dsn, table="made", check=pa.schema(fields), create_table=True)
    assert "current_timestamp" not in db.run("SHOW CREATE TABLE made")[0][1].lower()


def test_create_table_with_its_key(db: Observer) -> None:
    for _ in range(2):
        make(db, table="made", check=CHANGES, create_table=True, mode="upsert", keys=["name"], delete_marker="gone")
    described = [(name, kind.removesuffix("(20)"), null) for name, kind, null, *_ in db.run("DESCRIBE made")]
    assert described == [("id", "bigint", "YES"), ("name", "varchar(255)", "NO"), ("at", "bigint", "YES")]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"strategy": "fast"}, "strategy"),
        ({"strategy": "prepared"}, '"xa"'),
        ({"mode": "merge"}, "mode"),
        ({"mode": "upsert"}, "keys"),
        ({"mode": "upsert", "keys": ["id"], "strategy": "xa"}, "staged"),
        ({"keys": ["id"]}, "upsert"),
        ({"mode": "upsert", "keys": ["id", "id"]}, "twice"),
        ({"mode": "upsert", "keys": ["id"], "delete_marker": "id"}, "delete_marker"),
        ({"lock_timeout": 0}, "lock_timeout"),
    ],
)
def test_options_that_contradict_each_other(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        MySQLSink("mysql://h/d", "orders", **options)


@pytest.fixture
def limited(db: Observer, mysql: MySQLService) -> Iterator[str]:
    """The DSN of a user who may do nothing yet."""
    user = f"{db.schema}_limited"
    with mysql.connect() as admin:
        dsn = mysql.add_user(admin, user, "USAGE ON *.*", db.schema)
        yield dsn
        execute(admin, f"DROP USER {user}@'%'")


def test_missing_privileges_are_all_named(db: Observer, limited: str, mysql: MySQLService) -> None:
    user = f"{parameters(limited)['user']}@'%'"
    db.run("ALTER TABLE orders ADD PRIMARY KEY (id)")
    admin = mysql.connect()
    execute(admin, f"GRANT SELECT ON {db.schema}.orders TO {user}")
    options = {"dsn": limited, "mode": "upsert", "keys": ["id"], "strategy": "staged"}
    with pytest.raises(ConfigurationError) as caught:
        make(db, **options)
    *reasons, code = str(caught.value).splitlines()[1:]
    assert code == "[EO-CONFIG]"
    grants = [line.split("- ")[1].split(" is missing")[0] for line in reasons]
    assert [line.split(" ON ")[0] for line in grants] == ["GRANT INSERT", "GRANT UPDATE", "GRANT CREATE, DROP"]
    for grant in grants:
        execute(admin, f"{grant} TO {user}")
    execute(admin, f"GRANT SELECT, INSERT, DELETE ON {db.schema}.* TO {user}")  # of the ledger and the staging tables
    admin.close()
    sink = make(db, **options)
    assert sink.commit_all(checkpoint(), [pre_commit(sink, rows_of(1))]) == [COMMITTED]


def test_a_driver_killed_while_it_tries_its_privileges_leaves_a_table_that_the_next_one_drops(
    db: Observer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(connection: Any, statement: str) -> None:
        if statement.startswith("DROP TABLE"):
            raise KeyboardInterrupt
        execute(connection, statement)

    with monkeypatch.context() as patched:
        patched.setattr(catalog, "execute", killed)
        with pytest.raises(KeyboardInterrupt):
            make(db, strategy="staged")
    assert len(db.run("SHOW TABLES LIKE 'tpc\\_rights'")) == 1
    make(db, strategy="staged")
    assert db.run("SHOW TABLES LIKE 'tpc\\_rights'") == []


def test_a_user_who_may_not_see_the_database(db: Observer, limited: str) -> None:
    with pytest.raises(ConfigurationError, match="Access denied"):
        make(db, dsn=limited)


def test_rows_that_swap_a_unique_value_need_a_privilege_that_is_named(
    db: Observer, limited: str, mysql: MySQLService
) -> None:
    db.run("ALTER TABLE orders ADD PRIMARY KEY (id), ADD UNIQUE named (name)")
    db.run("INSERT INTO orders VALUES (1, 'a'), (2, 'b')")
    with mysql.connect() as admin:
        user = f"{parameters(limited)['user']}@'%'"
        execute(admin, f"GRANT SELECT, INSERT, UPDATE, DELETE, CREATE, DROP ON {db.schema}.* TO {user}")
    sink = make(db, dsn=limited, mode="upsert", keys=["id"])
    swapped = batch([{"id": 1, "name": "b"}, {"id": 2, "name": "a"}], SCHEMA)
    with pytest.raises(BadValue, match="needs the right CREATE TEMPORARY TABLES"):
        sink.validate_all(checkpoint(), [pre_commit(sink, swapped)])


def test_an_appending_user_needs_no_more_than_insert_and_the_ledger(
    db: Observer, limited: str, mysql: MySQLService
) -> None:
    make(db)
    user = f"{parameters(limited)['user']}@'%'"
    with mysql.connect() as admin:
        execute(admin, f"GRANT INSERT ON {db.schema}.orders TO {user}")
        for ledger in ("tpc_ledger", "tpc_ledger_witness"):
            execute(admin, f"GRANT SELECT, INSERT, DELETE ON {db.schema}.{ledger} TO {user}")
        if not is_mariadb(admin):
            execute(admin, f"GRANT XA_RECOVER_ADMIN ON *.* TO {user}")
    sink = make(db, dsn=limited, strategy="xa")
    assert sink.commit_all(checkpoint(), [pre_commit(sink, rows_of(1))]) == [COMMITTED]


SECRET = "s3cr=t/p@ss word"


def test_a_wrong_dsn_is_explained_without_the_password(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    sink = MySQLSink(f"mysql://me:{quote(SECRET, safe='')}@127.0.0.1:1/shop", "orders")
    with pytest.raises(ConfigurationError) as caught:
        sink.check(SCHEMA)
    for part in ("127.0.0.1", "port=1", "shop", "me"):
        assert part in str(caught.value)
    shown = [str(caught.value), repr(caught.value), repr(sink), str(sink), repr(sink._server), caplog.text]
    shown.append(str(caught.value.__cause__))
    for text in shown:
        assert SECRET not in text
        assert quote(SECRET, safe="") not in text


@pytest.mark.parametrize(
    "dsn", ["postgresql://u:s3cret@h/d", "mysql://u:s3cret@h:port/d", "s3cret", "mysql://u:s3cret@h"]
)
def test_an_unreadable_dsn_is_refused_without_being_shown(dsn: str) -> None:
    with pytest.raises(ConfigurationError, match="DSN") as caught:
        MySQLSink(dsn, "orders")
    assert "s3cret" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_unknown_parameters_are_named_and_not_their_values(db: Observer) -> None:
    with pytest.raises(ConfigurationError, match="sslmod") as caught:
        make(db, connect_options={"sslmod": "s3cret"})
    assert "s3cret" not in str(caught.value)


def test_a_wrong_password_is_not_shown(db: Observer) -> None:
    with pytest.raises(ConfigurationError, match="Access denied") as caught:
        make(db, connect_options={"password": SECRET})
    assert SECRET not in str(caught.value)


def test_committables_hold_no_password(db: Observer, sink: MySQLSink) -> None:
    password = str(parameters(db.dsn)["password"])
    assert password
    assert password not in str(pre_commit(sink, rows_of(1)).to_json())
    assert password not in repr(sink)


def test_parameters_pass_through(db: Observer) -> None:
    sink = make(db, connect_options={"read_timeout": 77})
    with sink._server.lend() as connection:
        assert connection._read_timeout == 77
    sink = make(db, dsn=with_option(db.dsn, "read_timeout=78"))
    with sink._server.lend() as connection:
        assert connection._read_timeout == 78


@pytest.mark.parametrize("version", ["8.0.28", "5.7.44-log", "10.4.34-MariaDB-1:10.4", "10.5.1-MariaDB"])
def test_servers_that_forget_prepared_transactions_are_refused(
    db: Observer, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = make(db, check=None)
    with sink._server.lend() as connection:
        connection.server_version = version  # type: ignore[attr-defined]
    monkeypatch.setattr("sinks.mysql.server.query", lambda *_: [(version,)])
    with pytest.raises(ConfigurationError, match=rf"{version.split('-')[0]}.*needs .* or newer"):
        sink.check(SCHEMA)


# ---------------------------------------------------------------------- values that the table refuses
_NUMBERS = "ALTER TABLE orders ADD INDEX numbers (id, (CAST(substr(name, 5) AS unsigned)))"
_PERIOD = "ALTER TABLE orders ADD PERIOD FOR valid (since, until), ADD UNIQUE once (id, valid WITHOUT OVERLAPS)"
_DAYS = "ALTER TABLE orders ADD since date DEFAULT '2026-01-01', ADD until date DEFAULT '2026-12-31'"
_COMPACT = [
    "SET SESSION innodb_strict_mode = OFF",
    "DROP TABLE orders",
    "CREATE TABLE orders (id bigint, name text, "
    + ", ".join(f"c{n} text DEFAULT (repeat('x', 740))" for n in range(10))
    + ") ROW_FORMAT=COMPACT",
]


@pytest.mark.parametrize("strategy", ["xa", "staged"])
@pytest.mark.parametrize(
    ("constraints", "row", "named"),
    [
        (["ALTER TABLE orders ADD CONSTRAINT positive CHECK (id > 0)"], {"id": -1, "name": "x"}, "positive"),
        (["ALTER TABLE orders MODIFY name varchar(100) NOT NULL"], {"id": 1, "name": None}, "name"),
        (["ALTER TABLE orders ADD CONSTRAINT once UNIQUE (name)"], {"id": 1, "name": "row 5"}, "once"),
        (["ALTER TABLE orders MODIFY name varchar(5)"], {"id": 1, "name": "row 55"}, "name"),
        (
            [
                "CREATE TABLE people (name varchar(100) PRIMARY KEY) ENGINE=InnoDB",
                "INSERT INTO people VALUES ('row 5')",
                "ALTER TABLE orders ADD CONSTRAINT known FOREIGN KEY (name) REFERENCES people (name)",
            ],
            {"id": 1, "name": "nobody"},
            "known",
        ),
        (
            [
                "ALTER TABLE orders MODIFY id bigint",  # else MariaDB says of INSERT … SELECT that the id is null
                "CREATE TRIGGER no BEFORE INSERT ON orders FOR EACH ROW BEGIN IF NEW.id = 1 THEN"
                " SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'refused by policy'; END IF; END",
            ],
            {"id": 1, "name": "x"},
            "refused by policy",
        ),
        (["ALTER TABLE orders ADD UNIQUE starts (name(3))"], {"id": 1, "name": "row 6"}, "starts"),
        (["ALTER TABLE orders ADD UNIQUE nocase (name)"], {"id": 1, "name": "ROW 5"}, "nocase"),
        (
            ["ALTER TABLE orders PARTITION BY RANGE (id) (PARTITION p0 VALUES LESS THAN (10))"],
            {"id": 99, "name": "x"},
            "99|partition",
        ),
        (["ALTER TABLE orders ADD hundreds tinyint DEFAULT (id * 10)"], {"id": 99, "name": "x"}, "hundreds"),
        (["ALTER TABLE orders ADD inverse int DEFAULT (1 DIV id)"], {"id": 0, "name": "x"}, "by 0"),
        ([_NUMBERS], {"id": 1, "name": "row x"}, "numbers"),
        (_COMPACT, {"id": 1, "name": "x" * 4000}, "Row size too large"),
        (
            [
                "ALTER TABLE orders MODIFY id bigint",
                "CREATE TRIGGER own BEFORE INSERT ON orders FOR EACH ROW BEGIN IF NEW.id = 1 THEN"
                " SIGNAL SQLSTATE '45000' SET MYSQL_ERRNO = 30001, MESSAGE_TEXT = 'a code of its own'; END IF; END",
            ],
            {"id": 1, "name": "x"},
            "a code of its own",
        ),
        ([_DAYS, _PERIOD], {"id": 5, "name": "x"}, "once"),
        (
            [
                "ALTER TABLE orders MODIFY id bigint",
                "CREATE TRIGGER one BEFORE INSERT ON orders FOR EACH ROW"
                " SET NEW.name = IF(NEW.id = 1, (SELECT 'a' UNION SELECT 'b'), NEW.name)",
            ],
            {"id": 1, "name": "x"},
            "more than 1 row",
        ),
    ],
    ids=[
        "check",
        "not null",
        "unique",
        "too long",
        "foreign key",
        "trigger",
        "prefix",
        "collation",
        "partition",
        "default",
        "zero",
        "expression",
        "page",
        "signal",
        "period",
        "statement",
    ],
)
def test_a_refused_row_fails_the_checkpoint_before_the_decision(
    db: Observer, strategy: str, constraints: list[str], row: dict[str, Any], named: str
) -> None:
    if (_NUMBERS if is_mariadb(db.connection) else _PERIOD) in constraints:
        pytest.skip("MySQL has no periods, and MariaDB no indexes over expressions")
    for constraint in constraints:
        db.run(constraint)
    sink = make(db, strategy=strategy)
    committables: list[Committable] = []

    def until_the_decision() -> None:
        committables.append(pre_commit(sink, rows_of(5), batch([row], SCHEMA)))
        sink.validate_all(checkpoint(), committables)

    with pytest.raises(BadValue, match=named) as caught:
        until_the_decision()
    assert f"{db.schema}.orders" in str(caught.value)
    assert "tpc_" not in str(caught.value)
    for committable in committables:
        sink.abort(committable.transaction)
    assert db.pending() == 0
    assert db.visible() == []
    assert not any(db.ledger().values())


def test_a_format_that_the_definition_does_not_name_is_known(db: Observer) -> None:
    """A page of a compressed table has room for less than one of a staging table."""
    names = [f"c{n}" for n in range(60)]
    schema = pa.schema([(name, pa.string()) for name in names])
    db.run("SET SESSION innodb_strict_mode = OFF")
    db.run(f"CREATE TABLE wide ({' text, '.join(names)} text) ENGINE=InnoDB KEY_BLOCK_SIZE=1")
    sink = make(db, table="wide", strategy="staged", check=schema)
    row = {name: hashlib.sha512(name.encode()).hexdigest() for name in names}
    with pytest.raises(BadValue, match="Row size too large"):
        sink.validate_all(checkpoint(), [pre_commit(sink, batch([row], schema))])


@pytest.mark.parametrize("strategy", ["xa", "staged"])
def test_a_bad_row_is_named_by_its_number(db: Observer, strategy: str) -> None:
    sink = make(db, strategy=strategy)
    long = batch([{"id": 3, "name": "x"}, {"id": 4, "name": "x" * 101}], SCHEMA)
    with pytest.raises(BadValue, match=r"partition 3 of checkpoint 7.*'name' at row 4"):
        pre_commit(sink, rows_of(1, 2), long, checkpoint=7, subtask=3)


@pytest.mark.parametrize("strategy", ["xa", "staged"])
def test_defaults_counters_and_generated_columns(db: Observer, strategy: str) -> None:
    db.run(
        "CREATE TABLE rich (number bigint AUTO_INCREMENT PRIMARY KEY, id bigint NOT NULL, name text,"
        " made varchar(10) NOT NULL DEFAULT 'here', twice bigint GENERATED ALWAYS AS (id * 2) STORED) ENGINE=InnoDB"
    )
    sink = make(db, table="rich", strategy=strategy)
    committable = pre_commit(sink, rows_of(21))
    sink.validate_all(checkpoint(), [committable])
    assert sink.commit_all(checkpoint(), [committable]) == [COMMITTED]
    assert [row[1:] for row in db.visible("rich")] == [(21, "row 21", "here", 42)]  # trying the move takes a number too
    with pytest.raises(SchemaMismatch, match="generated"):
        make(db, table="rich", check=pa.schema([("id", pa.int64()), ("twice", pa.int64())]), strategy=strategy)


@pytest.mark.parametrize("strategy", ["xa", "staged"])
def test_a_counter_that_is_written_is_written_as_it_is(db: Observer, strategy: str) -> None:
    """The server would put the next number in place of NULL, and by default in place of 0."""
    db.run("CREATE TABLE numbered (id bigint AUTO_INCREMENT PRIMARY KEY, name text) ENGINE=InnoDB")
    sink = make(db, table="numbered", strategy=strategy)
    assert sink.commit_all(checkpoint(), [pre_commit(sink, rows_of(0, 41))]) == [COMMITTED]
    assert db.ids("numbered") == [0, 41]
    with pytest.raises(BadValue, match=r'row 1, column "id": NULL'):
        pre_commit(sink, batch([{"id": None, "name": "x"}], SCHEMA))


# ---------------------------------------------------------------------- upsert and delete
@pytest.fixture
def keyed(db: Observer) -> Observer:
    db.run("DROP TABLE orders")
    db.run("CREATE TABLE orders (id bigint PRIMARY KEY, name varchar(100) NOT NULL) ENGINE=InnoDB")
    return db


def test_an_order_column_that_the_table_has(keyed: Observer) -> None:
    keyed.run("ALTER TABLE orders ADD at bigint")
    keyed.run("INSERT INTO orders VALUES (1, 'old', 1)")
    sink = make(keyed, check=CHANGES.remove(3), mode="upsert", keys=["id"], order_by="at")
    rows = [{"id": 1, "name": "b", "at": 3}, {"id": 1, "name": "a", "at": 2}]
    assert sink.commit_all(checkpoint(), [pre_commit(sink, batch(rows, CHANGES.remove(3)))]) == [COMMITTED]
    assert keyed.visible() == [(1, "b", 3)]


def test_keys_are_compared_as_the_table_does(db: Observer) -> None:
    db.run("CREATE TABLE words (word varchar(20) COLLATE utf8mb4_general_ci PRIMARY KEY, at bigint) ENGINE=InnoDB")
    db.run("INSERT INTO words VALUES ('Ab', 0)")
    schema = pa.schema([("word", pa.string()), ("at", pa.int64())])
    sink = make(db, table="words", check=schema, mode="upsert", keys=["word"], order_by="at")
    rows = [{"word": "AB", "at": 1}, {"word": "ab", "at": 2}, {"word": "é", "at": 3}]
    committable = pre_commit(sink, batch(rows, schema))
    assert sink.commit_all(checkpoint(), [committable]) == [COMMITTED]
    assert db.visible("words") == [("Ab", 2), ("é", 3)]


def test_another_unique_index_of_an_upsert_is_no_key_and_is_tried_before_the_decision(keyed: Observer) -> None:
    """ON DUPLICATE KEY UPDATE would change row 1."""
    keyed.run("ALTER TABLE orders ADD UNIQUE names (name)")
    keyed.run("INSERT INTO orders VALUES (1, 'taken')")
    sink = make(keyed, mode="upsert", keys=["id"])
    committable = pre_commit(sink, batch([{"id": 2, "name": "taken"}], SCHEMA))
    with pytest.raises(BadValue, match="names"):
        sink.validate_all(checkpoint(), [committable])
    assert keyed.visible() == [(1, "taken")]


# ---------------------------------------------------------------------- like every table
def test_a_key_is_not_updated_to_the_present_time(db: Observer) -> None:
    """Which the first timestamp of a table gets by itself, unless explicit_defaults_for_timestamp is on."""
    db.run(
        "CREATE TABLE readings (at timestamp(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6) ON UPDATE CURRENT_TIMESTAMP(6),"
        " sensor bigint, celsius double, PRIMARY KEY (at, sensor))"
    )
    schema = pa.schema([("at", pa.timestamp("us", "UTC")), ("sensor", pa.int64()), ("celsius", pa.float64())])
    sink = make(db, table="readings", check=schema, mode="upsert", keys=["at", "sensor"])
    for number, celsius in enumerate((20.5, 21.5)):
        rows = batch([{"at": 1_000_000, "sensor": 7, "celsius": celsius}], schema)
        assert sink.commit_all(checkpoint(number), [pre_commit(sink, rows, checkpoint=number)]) == [COMMITTED]
    db.run("SET time_zone = '+00:00'")
    assert db.run("SELECT * FROM readings") == [(datetime(1970, 1, 1, 0, 0, 1), 7, 21.5)]


@pytest.mark.usefixtures("without_local")
@pytest.mark.parametrize("names", ["latin1", "utf8mb3"])
def test_texts_are_what_they_were_whatever_names_an_init_command_sets(db: Observer, names: str) -> None:
    db.run("ALTER TABLE orders CONVERT TO CHARACTER SET utf8mb4")
    sink = make(db, connect_options={"init_command": f"SET NAMES {names}"})
    text = "täglich €\u2028😀"
    assert sink.commit_all(checkpoint(), [pre_commit(sink, batch([{"id": 1, "name": text}], SCHEMA))]) == [COMMITTED]
    assert db.visible() == [(1, text)]


@pytest.mark.usefixtures("without_local")
def test_a_zero_keeps_its_sign_in_an_insert(db: Observer) -> None:
    db.run("ALTER TABLE orders ADD amount double")
    schema = pa.schema([("id", pa.int64()), ("amount", pa.float64())])
    sink = make(db, check=schema)
    rows: list[dict[str, Any]] = [{"id": 0, "amount": -0.0}, {"id": 1, "amount": 0.0}, {"id": 2, "amount": None}]
    assert sink.commit_all(checkpoint(), [pre_commit(sink, batch(rows, schema))]) == [COMMITTED]
    assert [str(amount) for (amount,) in db.run("SELECT amount FROM orders ORDER BY id")] == ["-0.0", "0.0", "None"]


@pytest.mark.usefixtures("without_local")
def test_rows_that_no_statement_of_the_server_has_room_for(db: Observer, request: pytest.FixtureRequest) -> None:
    """INSERTs of several rows are halved until they fit; for a row alone there is advice."""
    db.run("ALTER TABLE orders MODIFY name longtext")
    admin = Observer(db.dsn)
    ((before,),) = admin.run("SELECT @@global.max_allowed_packet")
    admin.run(f"SET GLOBAL max_allowed_packet = {2**24}")
    request.addfinalizer(admin.close)
    request.addfinalizer(lambda: admin.run(f"SET GLOBAL max_allowed_packet = {before}"))
    sink = make(db, strategy="staged")
    rows = [{"id": n, "name": "x" * (6 * 2**20 if n > 996 else 1)} for n in range(1000)]
    assert sink.commit_all(checkpoint(), [pre_commit(sink, batch(rows, SCHEMA))]) == [COMMITTED]
    assert db.run("SELECT count(*), sum(length(name)) FROM orders") == [(1000, 997 + 18 * 2**20)]
    admin.run(f"SET GLOBAL max_allowed_packet = {2**20}")
    sink.close()
    with pytest.raises(BadValue, match=r"row 2 needs an INSERT of \d+ bytes.* max_allowed_packet = 1048576: raise it"):
        pre_commit(sink, batch([{"id": 1, "name": ""}, {"id": 2, "name": "x" * 2**21}], SCHEMA), checkpoint=1)
    admin.run("SET GLOBAL local_infile = ON")  # in packets
    name = "x" * 2**21
    committables = [pre_commit(sink, batch([{"id": 1000, "name": name}], SCHEMA), checkpoint=2)]
    assert sink.commit_all(checkpoint(2), committables) == [COMMITTED]
    assert db.run("SELECT name FROM orders WHERE id = 1000") == [(name,)]


def test_an_upsert_that_no_statement_has_room_for_is_found_before_the_decision(
    keyed: Observer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names each staging table with all its columns, and the server does not say why it hangs up. A limit that was
    lowered after the decision is told, too."""
    sink = make(keyed, check=CHANGES, mode="upsert", keys=["id"], order_by="at", delete_marker="gone")
    ((most,),) = keyed.run("SELECT @@max_allowed_packet")
    committables = [pre_commit(sink, batch([{"id": 1, "name": "a", "at": 1, "gone": False}], CHANGES))]
    monkeypatch.setattr("sinks.mysql.staging._FRAME", most)
    advice = rf"takes statements of up to [\d,]+ bytes, and the server takes max_allowed_packet = {most:,}: set that"
    with pytest.raises(ConfigurationError, match=advice):
        sink.validate_all(checkpoint(), committables)
    (outcome,) = sink.commit_all(checkpoint(), committables)
    assert isinstance(outcome, CommitOutcome)
    assert re.search(advice, outcome.reason)
    monkeypatch.undo()
    sink.validate_all(checkpoint(), committables)
    assert sink.commit_all(checkpoint(), committables) == [COMMITTED]
    assert keyed.visible() == [(1, "a")]


def test_a_ledger_whose_witness_has_too_long_a_name(db: Observer) -> None:
    with pytest.raises(ConfigurationError, match="leaves no room for the name of its witness"):
        make(db, ledger="l" * 57)
    make(db, ledger="l" * 56)


class TestTable(TableSuite):
    make = staticmethod(make)
    held = staticmethod(held)
    end_prepared = staticmethod(end)
    sessions = staticmethod(Observer.sessions)
    two_phase = "xa"
    alter_rows = ("CREATE TRIGGER meddles BEFORE INSERT ON orders FOR EACH ROW SET NEW.name = 'meddled'",)
    spoil_ledger = ("ALTER TABLE tpc_ledger ENGINE=MyISAM",)
