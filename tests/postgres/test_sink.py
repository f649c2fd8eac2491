"""`PostgresSink` on a real server, without Spark: each test plays the coordinator, and a second connection looks on."""

from __future__ import annotations

import contextlib
import logging
import pickle
import random
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from typing import Any
from unittest.mock import Mock
from urllib.parse import quote

import psycopg
import pyarrow as pa
import pytest
from psycopg.conninfo import conninfo_to_dict

from sinks import Committable
from sinks.errors import BadValue, ConfigurationError, SchemaMismatch, TransactionBlocked
from sinks.postgres import PostgresSink
from sinks.sql.databases import postgres_settings
from sinks.sql.dialect import Move
from sinks.testing.servers.postgres import PostgresService
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
    why_unknown,
)
from sinks.testing.table_suite import TableSuite
from sinks.transaction import Fingerprint, TransactionId
from tests.postgres.observer import Observer, held

_made: list[PostgresSink] = []


def make(db: Observer, *, check: pa.Schema | None = SCHEMA, **options: Any) -> PostgresSink:
    """A sink as the driver has it; closed at the end of the test."""
    sink = PostgresSink(db.dsn, options.pop("table", "orders"), **options)
    _made.append(sink)
    if check is not None:
        sink.check(check)
    return sink


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    while _made:
        _made.pop().close()


@pytest.fixture(params=["prepared", "staged"])
def sink(db: Observer, request: pytest.FixtureRequest) -> Iterator[PostgresSink]:
    sink = make(db, strategy=request.param, lock_timeout="300 ms")
    yield sink
    sink.close()


def end(committable: Committable, db: Observer, how: str) -> None:
    """What an operator does with a prepared transaction."""
    db.run(f"{how} PREPARED '{committable.transaction['gid']}'")


# ---------------------------------------------------------------------- the protocol, both strategies
def test_no_session_stays_inside_a_transaction(db: Observer, sink: PostgresSink) -> None:
    """It would hold back the vacuum."""
    pre_commit(sink, rows_of(1))
    assert db.sessions() == 0
    transaction = sink.begin_transaction(context(sink, subtask=1))
    sink.write(transaction, rows_of(2))
    sink.rollback(transaction)
    assert db.sessions() == 0


def test_a_task_whose_connection_dies_leaves_nothing(db: Observer, sink: PostgresSink) -> None:
    transaction = sink.begin_transaction(context(sink))
    sink.write(transaction, rows_of(1))
    db.end_sessions(f"pid = {transaction.connection.info.backend_pid}")
    with pytest.raises(psycopg.OperationalError):
        sink.pre_commit(transaction)
    sink.rollback(transaction)
    assert db.pending() == 0
    assert db.visible() == []


def fail_unnoticed(connection: psycopg.Connection[Any]) -> None:
    with contextlib.suppress(psycopg.DataError):
        connection.execute("SELECT 1 / 0")
    assert connection.info.transaction_status == psycopg.pq.TransactionStatus.INERROR


def test_a_commit_that_the_server_answers_with_rollback_is_no_success(db: Observer, sink: PostgresSink) -> None:
    """It does so, without an error, where somebody has swallowed that of a statement before."""
    transaction: Any = sink.begin_transaction(context(sink))
    sink.write(transaction, rows_of(1))
    transaction.finish()
    fail_unnoticed(transaction.connection)
    with pytest.raises(psycopg.Error, match="rolled back in place of a commit"):
        transaction.prepare() if sink.strategy == "prepared" else transaction.commit()
    sink.rollback(transaction)
    lent = sink._server.lend()
    with pytest.raises(psycopg.Error, match="rolled back in place"), lent as driver, sink._server.transaction(driver):
        fail_unnoticed(driver)
    assert db.pending() == db.sessions() == 0


def test_a_statement_that_cannot_be_sent_takes_no_begin_with_it(db: Observer) -> None:
    with make(db, strategy="staged")._server.lend() as connection:
        connection.defer("BEGIN")
        with pytest.raises(psycopg.DataError):
            connection.execute("SELECT %s", ["\0"])
        connection.execute("SELECT 1")
        assert connection.info.transaction_status == psycopg.pq.TransactionStatus.INTRANS
        connection.rollback()


def test_the_sink_travels_to_the_tasks_with_what_the_driver_found(db: Observer, sink: PostgresSink) -> None:
    with sink._server.lend():
        pass
    copy = pickle.loads(pickle.dumps(sink))
    db.run("ALTER ROLE CURRENT_USER SET search_path = pg_catalog")  # a task that resolved the table anew would fail
    committable = pre_commit(copy, rows_of(1))
    copy.close()
    assert sink.commit_all(checkpoint(), [committable]) == [COMMITTED]
    db.run("ALTER ROLE CURRENT_USER RESET search_path")


def in_a_task(sink: PostgresSink, number: int) -> tuple[int, Committable]:
    """The server's process for a task that has a copy of the sink, and what it pre-committed."""
    copy = pickle.loads(pickle.dumps(sink))
    transaction = copy.begin_transaction(context(copy, subtask=number))
    pid = transaction.connection.info.backend_pid
    copy.write(transaction, rows_of(number))
    committable = copy.pre_commit(transaction).of(copy.name, number, Fingerprint(1, 0))
    copy.close()
    return pid, committable


@pytest.fixture
def patient_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait for the next task for as long as a busy machine takes."""
    monkeypatch.setattr("sinks._util.idle_connections.IDLE_SECONDS", 120.0)


@pytest.mark.usefixtures("patient_connections")
def test_the_next_task_of_a_process_has_the_connection_of_the_last_one(db: Observer, sink: PostgresSink) -> None:
    (first, by_first), (second, by_second) = in_a_task(sink, 1), in_a_task(sink, 2)
    assert first == second
    with ThreadPoolExecutor(2) as pool:  # two at once have two
        at_once = [pool.submit(in_a_task, sink, number) for number in (3, 4)]
        others = [each.result()[1] for each in at_once]
    db.end_sessions("application_name LIKE 'tpc %'")
    third, by_third = in_a_task(sink, 5)
    assert third != first
    assert sink.commit_all(checkpoint(), [by_first, by_second, *others, by_third]) == [COMMITTED] * 5
    assert db.ids() == [1, 2, 3, 4, 5]


def test_a_connection_that_no_task_takes_is_closed(
    db: Observer, sink: PostgresSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sinks._util.idle_connections.IDLE_SECONDS", 0.2)
    pid, _ = in_a_task(sink, 1)
    eventually(lambda: db.run("SELECT 1 FROM pg_stat_activity WHERE pid = %s", [pid]) == [])


@pytest.mark.usefixtures("patient_connections")
def test_a_task_that_fails_leaves_no_connection_to_the_next_one(db: Observer, sink: PostgresSink) -> None:
    pid, _ = in_a_task(sink, 1)
    copy = pickle.loads(pickle.dumps(sink))
    transaction = copy.begin_transaction(context(copy, subtask=2))
    assert transaction.connection.info.backend_pid == pid
    copy.rollback(transaction)
    copy.close()
    assert in_a_task(sink, 2)[0] != pid


def test_in_doubt_leaves_other_sinks_and_databases_alone(
    db: Observer, sink: PostgresSink, postgres: PostgresService
) -> None:
    other = make(db, name="other", strategy=sink.strategy)
    pre_commit(other, rows_of(1))
    db.run("CREATE TABLE tpc_00000000000000000000 ()")
    with held(db.dsn, "CREATE TABLE mine ()", "PREPARE TRANSACTION 'tpc.somebody else'"):
        assert list(sink.in_doubt("job")) == []
    db.run("ROLLBACK PREPARED 'tpc.somebody else'")
    with postgres.database() as dsn:
        elsewhere = Observer(dsn)
        elsewhere.run("CREATE TABLE orders (id bigint, name text)")
        far = make(elsewhere, strategy=sink.strategy)
        pre_commit(far, rows_of(1))
        assert list(sink.in_doubt("job")) == []
        assert len(list(far.in_doubt("job"))) == 1
        elsewhere.close()


def test_environments_in_two_schemas_leave_each_other_alone(db: Observer) -> None:
    """They have the same names of job, sink and table, and each sweeps while the other's batch is under way."""
    sinks = {}
    for schema in ("staging", "prod"):
        db.run(f"CREATE SCHEMA {schema}")
        db.run(f"CREATE TABLE {schema}.orders (id bigint NOT NULL, name text)")
        options = {"options": f"-c search_path={schema}"}
        sinks[schema] = make(db, strategy="prepared", connect_options=options)
    written = {schema: pre_commit(sink, rows_of(1)) for schema, sink in sinks.items()}
    for schema, sink in sinks.items():
        assert list(sink.in_doubt("job")) == [written[schema].transaction]
    before_any_check = make(db, table="prod.orders", name="orders", check=None)
    for transaction in before_any_check.in_doubt("job"):
        before_any_check.abort(transaction)
    assert sinks["staging"].commit(written["staging"]) == COMMITTED
    assert (db.ids("staging.orders"), db.ids("prod.orders"), db.prepared()) == ([1], [], [])


def test_an_orphan_is_found_after_the_table_or_the_ledger_got_another_name(db: Observer) -> None:
    orphan = pre_commit(make(db, strategy="prepared"), rows_of(1)).transaction
    db.run("CREATE TABLE orders_2 (id bigint NOT NULL, name text)")
    for options in ({"table": "orders_2", "name": "orders"}, {"ledger": "other"}):
        assert list(make(db, strategy="prepared", **options).in_doubt("job")) == [orphan]


# ---------------------------------------------------------------------- lost, held, unknown, ask again
def test_a_prepared_commit_in_flight_is_asked_again_not_lost(db: Observer) -> None:
    sink = make(db, strategy="prepared", lock_timeout=0.3)
    transaction: Any = sink.begin_transaction(context(sink))
    sink.write(transaction, rows_of(1))
    transaction.finish()
    gid = transaction.context.transaction_id
    named = {gid: TransactionId.parse(gid)}
    sink._target.planned().ledger.insert(transaction.connection, named, committed=True)  # the task hangs before PREPARE
    committable = Committable({"gid": gid})
    with pytest.raises(psycopg.errors.LockNotAvailable):
        sink.commit(committable)
    transaction.seal("COMMIT")
    assert sink.commit(committable) == COMMITTED
    assert db.ids() == [1]


def test_a_staged_commit_in_flight_is_asked_again_not_lost(db: Observer) -> None:
    sink = make(db, strategy="staged", lock_timeout=0.3)
    committable = pre_commit(sink, rows_of(1))
    name = committable.transaction["transaction_id"]
    in_flight = f"INSERT INTO tpc_ledger VALUES ('{name}', true, '', '', '', 0)"
    with held(db.dsn, in_flight, f"DROP TABLE {committable.transaction['table']}") as other:
        (outcome,) = sink.commit_all(checkpoint(), [committable])
        assert isinstance(outcome, psycopg.errors.LockNotAvailable)
        with pytest.raises(psycopg.errors.LockNotAvailable):
            sink.abort(committable.transaction)
        other.commit()
    assert sink.commit_all(checkpoint(), [committable]) == [COMMITTED]


def test_a_pooled_connection_that_died_is_replaced_unseen(db: Observer, sink: PostgresSink) -> None:
    committable = pre_commit(sink, rows_of(1))
    with sink._server.lend() as connection:
        pid = connection.info.backend_pid
    db.end_sessions(f"pid = {pid}")
    assert sink.commit_all(checkpoint(), [committable]) == [COMMITTED]
    assert db.ids() == [1]


def test_a_connection_cut_during_commit_is_asked_again(db: Observer) -> None:
    sink = make(db, strategy="staged", lock_timeout=300)
    committables = [pre_commit(sink, rows_of(n), subtask=n) for n in range(2)]
    answers: list[Any] = []
    waiting = "application_name = 'tpc orders' AND wait_event_type = 'Lock'"
    with held(db.dsn, "LOCK TABLE orders"):
        thread = threading.Thread(target=lambda: answers.extend(sink.commit_all(checkpoint(), committables)))
        thread.start()
        eventually(lambda: db.end_sessions(waiting) > 0)
        thread.join()
    assert [type(answer) for answer in answers] == [psycopg.errors.AdminShutdown] * 2
    assert db.visible() == []
    assert db.ledger() == {}
    assert sink.commit_all(checkpoint(), committables) == [COMMITTED, COMMITTED]
    assert db.ids() == [0, 1]


def test_a_trigger_that_drops_rows_is_no_lost_row(db: Observer) -> None:
    db.run("CREATE FUNCTION skip() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'")
    db.run("CREATE TRIGGER skip BEFORE INSERT ON orders FOR EACH ROW WHEN (NEW.id = 1) EXECUTE FUNCTION skip()")
    sink = make(db, strategy="staged")
    committable = pre_commit(sink, rows_of(1, 2))
    sink.validate_all(checkpoint(), [committable])
    assert sink.commit_all(checkpoint(), [committable]) == [COMMITTED]
    assert db.ids() == [2]


def test_a_crash_between_move_and_drop_is_not_in_doubt(db: Observer) -> None:
    sink = make(db, strategy="staged")
    committable = pre_commit(sink, rows_of(1))
    db.run("CREATE TABLE kept AS SELECT 1")
    sink.commit_all(checkpoint(), [committable])
    table, name = committable.transaction["table"], committable.transaction["transaction_id"]
    db.run(f"CREATE TABLE {table} (id bigint)")
    db.run(f"COMMENT ON TABLE {table} IS '{name}'")
    assert list(sink.in_doubt("job")) == []
    assert sink.commit_all(checkpoint(), [committable]) == [COMMITTED]
    assert db.staging() == []
    assert db.ids() == [1]


# ---------------------------------------------------------------------- the server's limits
def test_too_few_prepared_transactions_is_told_and_leaves_nothing(db: Observer) -> None:
    sink = make(db, strategy="prepared")
    done: list[Committable] = []

    def exhaust() -> None:
        for subtask in range(65):
            done.append(pre_commit(sink, rows_of(subtask), subtask=subtask))

    with pytest.raises(ConfigurationError, match=r"max_prepared_transactions.*staged"):
        exhaust()
    assert len(db.prepared()) == len(done)
    for committable in done:
        sink.abort(committable.transaction)
    assert db.pending() == 0
    assert db.visible() == []


def test_prepared_is_refused_at_once_where_it_is_switched_off(unprepared_db: Observer) -> None:
    with pytest.raises(ConfigurationError, match=r"max_prepared_transactions.*staged"):
        make(unprepared_db, strategy="prepared")


def test_prepared_switched_off_after_the_check(unprepared_db: Observer, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = make(unprepared_db, check=None, strategy="prepared")
    with pytest.raises(ConfigurationError, match="max_prepared_transactions"):
        pre_commit(sink, rows_of(1))
    assert unprepared_db.visible() == []


@pytest.mark.parametrize(
    ("mode", "off", "expected"), [("append", False, "gid"), ("append", True, "table"), ("upsert", False, "table")]
)
def test_auto_asks_the_server_and_says_why(
    db: Observer, unprepared_db: Observer, caplog: pytest.LogCaptureFixture, mode: str, off: bool, expected: str
) -> None:
    where = unprepared_db if off else db
    where.run("ALTER TABLE orders ADD PRIMARY KEY (id)")
    with caplog.at_level(logging.INFO, "sinks.postgres"):
        sink = make(where, mode=mode, keys=["id"] if mode == "upsert" else [])
    assert f"strategy {'prepared' if expected == 'gid' else 'staged'}: " in caplog.text
    assert expected in pre_commit(sink, rows_of(1)).transaction


def test_a_trigger_that_notifies_cannot_be_prepared_and_is_explained(db: Observer) -> None:
    db.run("CREATE FUNCTION tell() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN NOTIFY orders; RETURN NEW; END'")
    db.run("CREATE TRIGGER tell BEFORE INSERT ON orders FOR EACH ROW EXECUTE FUNCTION tell()")
    sink = make(db, strategy="prepared")
    with pytest.raises(ConfigurationError, match=r"trigger.*staged"):
        pre_commit(sink, rows_of(1))
    assert db.pending() == 0
    staged = make(db, strategy="staged")
    committable = pre_commit(staged, rows_of(1))
    staged.validate_all(checkpoint(), [committable])
    assert staged.commit_all(checkpoint(), [committable]) == [COMMITTED]
    assert db.ids() == [1]


def test_a_locked_table_blocks_within_the_limit(db: Observer) -> None:
    sink = make(db, strategy="prepared", lock_timeout=0.2)
    with held(db.dsn, "LOCK TABLE orders"), pytest.raises(TransactionBlocked, match=r"public\.orders.*partition 0"):
        pre_commit(sink, rows_of(1))
    assert db.pending() == 0


def test_a_live_sibling_with_the_same_key_blocks_and_the_index_is_named(db: Observer) -> None:
    db.run("ALTER TABLE orders ADD PRIMARY KEY (id)")
    sink = make(db, strategy="prepared", lock_timeout=0.2)
    first = pre_commit(sink, rows_of(1), subtask=0)
    with pytest.raises(TransactionBlocked, match=r"orders_pkey.*same unique value"):
        pre_commit(sink, rows_of(1), subtask=1)
    sink.abort(first.transaction)
    assert sink.commit_all(checkpoint(), [pre_commit(sink, rows_of(1), subtask=1)]) == [COMMITTED]


def test_commits_are_flushed_even_if_the_server_would_not(db: Observer) -> None:
    db.run("ALTER ROLE CURRENT_USER SET synchronous_commit = off")
    try:
        sink = make(db, strategy="staged")
        transaction = sink.begin_transaction(context(sink))
        assert transaction.connection.info.backend_pid
        with sink._server.lend() as connection, sink._server.transaction(connection):
            (setting,) = connection.execute("SHOW synchronous_commit").fetchone() or ("",)
        assert setting == "local"
        sink.rollback(transaction)
    finally:
        db.run("ALTER ROLE CURRENT_USER RESET synchronous_commit")


# ---------------------------------------------------------------------- set-up
def test_all_reasons_against_the_table_come_in_one_error(db: Observer) -> None:
    schema = pa.schema([("id", pa.int64()), ("surname", pa.string()), ("gone", pa.string())])
    with pytest.raises(ConfigurationError) as caught:
        make(db, check=schema, mode="upsert", keys=["id"], order_by="at", delete_marker="gone")
    for reason in ("surname", "'at'", "must be boolean", "needs a unique index", "public.orders"):
        assert reason in str(caught.value)


def test_a_missing_table_is_told_with_a_hint(db: Observer) -> None:
    db.run('CREATE TABLE "Customers" (id bigint)')
    with pytest.raises(ConfigurationError, match=r"no table public\.customers.*capitals.*create_table=True"):
        make(db, table="Customers")


@pytest.mark.parametrize("table", ["a.b.c.d", '"open', "", "a b", "a; DROP TABLE orders"])
def test_what_is_no_table_name(db: Observer, table: str) -> None:
    with pytest.raises(ConfigurationError, match="name"):
        make(db, table=table, name="x")


@pytest.mark.parametrize("table", ['"Odd ""Name"', 'shop."Daily.Orders"', "SHOP.Plain"])
def test_table_names_are_read_as_in_sql(db: Observer, table: str) -> None:
    db.run("CREATE SCHEMA shop")
    for strategy in ("prepared", "staged"):
        sink = make(db, table=table, strategy=strategy, create_table=True)
        sink.commit_all(checkpoint(), [pre_commit(sink, rows_of(1))])
    assert db.ids(table) == [1, 1]


def test_a_view_is_no_target(db: Observer) -> None:
    db.run("CREATE VIEW seen AS SELECT * FROM orders")
    with pytest.raises(ConfigurationError, match="a view"):
        make(db, table="seen")


def test_create_table_with_its_key(db: Observer) -> None:
    make(db, table="made", check=CHANGES, create_table=True, mode="upsert", keys=["id"], delete_marker="gone")
    assert db.run("SELECT attname FROM pg_attribute WHERE attrelid = 'made'::regclass AND attnum > 0 ORDER BY 1") == [
        ("at",),
        ("id",),
        ("name",),
    ]
    make(db, table="made", check=CHANGES, create_table=True, mode="upsert", keys=["id"], delete_marker="gone")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"strategy": "fast"}, "strategy"),
        ({"mode": "merge"}, "mode"),
        ({"mode": "upsert"}, "keys"),
        ({"mode": "upsert", "keys": ["id"], "strategy": "prepared"}, "staged"),
        ({"keys": ["id"]}, "upsert"),
        ({"mode": "upsert", "keys": ["id", "id"]}, "twice"),
        ({"mode": "upsert", "keys": ["id"], "delete_marker": "id"}, "delete_marker"),
        ({"lock_timeout": 0}, "lock_timeout"),
    ],
)
def test_options_that_contradict_each_other(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        PostgresSink("postgresql://h/d", "orders", **options)


def test_missing_privileges_are_named_as_the_statements_to_run(db: Observer) -> None:
    role = f"limited_{conninfo_to_dict(db.dsn)['dbname']}"
    db.run(f"CREATE ROLE {role} LOGIN PASSWORD 'p'")
    try:
        db.run("REVOKE CREATE ON SCHEMA public FROM PUBLIC")
        options = {"connect_options": {"user": role, "password": "p"}, "mode": "upsert", "keys": ["id"]}
        db.run("ALTER TABLE orders ADD PRIMARY KEY (id)")
        with pytest.raises(ConfigurationError) as caught:
            make(db, **options)
        grants = [line.split("run: ")[1] for line in str(caught.value).splitlines() if "run: " in line]
        assert len(grants) == 2
        for grant in grants:
            db.run(grant)
        sink = make(db, **options)
        assert sink.commit_all(checkpoint(), [pre_commit(sink, rows_of(1))]) == [COMMITTED]
    finally:
        db.run(f"DROP OWNED BY {role}")
        db.run(f"DROP ROLE {role}")


def test_a_schema_that_the_role_may_not_use(db: Observer) -> None:
    role = f"outsider_{conninfo_to_dict(db.dsn)['dbname']}"
    db.run("CREATE SCHEMA hidden; CREATE TABLE hidden.orders (id bigint, name text)")
    db.run(f"CREATE ROLE {role} LOGIN PASSWORD 'p'")
    try:
        with pytest.raises(ConfigurationError, match=r"lacks a right.*schema hidden"):
            make(db, table="hidden.orders", connect_options={"user": role, "password": "p"})
    finally:
        db.run(f"DROP ROLE {role}")


def test_a_role_that_may_not_commit_gets_the_statement_for_the_operator(db: Observer) -> None:
    role = f"stranger_{conninfo_to_dict(db.dsn)['dbname']}"
    sink = make(db, strategy="prepared")
    committable = pre_commit(sink, rows_of(1))
    db.run(f"CREATE ROLE {role} LOGIN PASSWORD 'p'")
    try:
        db.run(f"GRANT ALL ON orders, tpc_ledger, tpc_ledger_witness TO {role}")
        stranger = make(db, strategy="prepared", connect_options={"user": role, "password": "p"})
        (outcome,) = stranger.commit_all(checkpoint(), [committable])
        assert f"COMMIT PREPARED '{committable.transaction['gid']}'" in why_unknown(outcome)
        with pytest.raises(ConfigurationError, match="ROLLBACK PREPARED"):
            stranger.abort(committable.transaction)
        db.run(f"COMMIT PREPARED '{committable.transaction['gid']}'")
        assert stranger.commit_all(checkpoint(), [committable]) == [COMMITTED]
    finally:
        db.run(f"DROP OWNED BY {role}")
        db.run(f"DROP ROLE {role}")


SECRET = "s3cr=t/p@ss word"


@pytest.mark.parametrize(
    "dsn",
    [
        f"postgresql://postgres:{quote(SECRET, safe='')}@127.0.0.1:1/shop",
        f"host=127.0.0.1 port=1 dbname=shop user=postgres password='{SECRET}'",
    ],
)
def test_a_wrong_dsn_is_explained_without_the_password(dsn: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    sink = PostgresSink(dsn, "orders")
    with pytest.raises(ConfigurationError) as caught:
        sink.check(SCHEMA)
    for part in ("127.0.0.1", "port=1", "shop", "postgres"):
        assert part in str(caught.value)
    shown = [str(caught.value), repr(caught.value), repr(sink), str(sink), repr(sink._server), caplog.text]
    shown.append(str(caught.value.__cause__))
    for text in shown:
        assert SECRET not in text
        assert quote(SECRET, safe="") not in text


@pytest.mark.parametrize("dsn", ["postgresql://u:s3cret@h/d?sslmod=off", "password=s3cret hots=x", "s3cret"])
def test_an_unreadable_dsn_is_refused_without_being_shown(dsn: str) -> None:
    with pytest.raises(ConfigurationError, match="libpq cannot read") as caught:
        PostgresSink(dsn, "orders")
    assert "s3cret" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


@pytest.mark.parametrize("dsn", ["postgresql://u:my@s3cret@h/d", "postgresql://u:my/s3cret@h/d?user=a@b"])
def test_a_password_that_is_not_encoded_is_not_taken_for_the_address(dsn: str) -> None:
    with pytest.raises(ConfigurationError, match=r"holds an '@' too many: write '@', .* as %40") as caught:
        PostgresSink(dsn, "orders")
    assert "s3cret" not in str(caught.value)


def test_a_wrong_password_is_not_shown(db: Observer) -> None:
    with pytest.raises(ConfigurationError, match="password authentication failed") as caught:
        make(db, connect_options={"password": SECRET})
    assert SECRET not in str(caught.value)


def test_committables_hold_no_password(db: Observer, sink: PostgresSink) -> None:
    password = str(conninfo_to_dict(db.dsn)["password"])
    assert password
    assert password not in str(pre_commit(sink, rows_of(1)).to_json())
    assert password not in repr(sink)


def test_libpq_parameters_pass_through(db: Observer) -> None:
    sink = make(db, connect_options={"application_name": "mine", "options": "-c work_mem=7MB"})
    with sink._server.lend() as connection:
        assert connection.info.parameter_status("application_name") == "mine"
        assert connection.execute("SHOW work_mem").fetchone() == ("7MB",)
    with pytest.raises(ConfigurationError, match="sslmode"):
        make(db, connect_options={"sslmode": "require", "sslrootcert": "system"})


def test_a_row_may_refer_to_one_of_another_partition(db: Observer) -> None:
    """PostgreSQL looks at references at the end of each statement."""
    db.run("ALTER TABLE orders ADD PRIMARY KEY (id), ADD parent bigint REFERENCES orders")
    schema = SCHEMA.append(pa.field("parent", pa.int64()))
    sink = make(db, strategy="staged", check=schema)
    child, parent = (
        pa.RecordBatch.from_pylist([{"id": n, "name": "x", "parent": of}], schema=schema)
        for n, of in ((1, 2), (2, None))
    )
    committables = [pre_commit(sink, child, subtask=0), pre_commit(sink, parent, subtask=1)]
    sink.validate_all(checkpoint(), committables)
    assert sink.commit_all(checkpoint(), committables) == [COMMITTED, COMMITTED]
    assert db.ids() == [1, 2]


def test_what_is_committed_at_once_stays_committed_where_its_staging_table_cannot_be_dropped(
    db: Observer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task that failed here would be done again, and its rows be there twice."""
    sink = make(db, strategy="staged")
    transaction = sink.begin_transaction(context(sink))
    sink.write(transaction, rows_of(1))
    failing = Mock(side_effect=psycopg.OperationalError("the server is gone"))
    monkeypatch.setattr(sink._backend.staging, "drop_unused", failing)
    sink.commit_directly(transaction)
    assert db.ids() == [1]
    assert len(db.staging()) == 1


# ---------------------------------------------------------------------- values that the table refuses
@pytest.mark.parametrize("strategy", ["prepared", "staged"])
@pytest.mark.parametrize(
    ("constraint", "row", "named"),
    [
        ("ALTER TABLE orders ADD CONSTRAINT positive CHECK (id > 0)", {"id": -1, "name": "x"}, "positive"),
        ("ALTER TABLE orders ALTER name SET NOT NULL", {"id": 1, "name": None}, "name"),
        ("ALTER TABLE orders ADD UNIQUE (name)", {"id": 1, "name": "row 5"}, "orders_name_key"),
        (
            "CREATE TABLE people (name text PRIMARY KEY); INSERT INTO people VALUES ('row 5');"
            "ALTER TABLE orders ADD CONSTRAINT known FOREIGN KEY (name) REFERENCES people"
            " DEFERRABLE INITIALLY DEFERRED",
            {"id": 1, "name": "nobody"},
            "known",
        ),
        (
            "CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RAISE ''refused by policy''; END';"
            "CREATE TRIGGER no BEFORE INSERT ON orders FOR EACH ROW WHEN (NEW.id = 1) EXECUTE FUNCTION no()",
            {"id": 1, "name": "x"},
            "refused by policy",
        ),
        (
            "ALTER TABLE orders ADD CONSTRAINT apart EXCLUDE USING btree (name WITH =)",
            {"id": 1, "name": "row 5"},
            "apart",
        ),
        ("ALTER TABLE orders ADD inverse bigint GENERATED ALWAYS AS (1 / id) STORED", {"id": 0, "name": "x"}, "zero"),
        ("CREATE UNIQUE INDEX lowered ON orders (lower(name))", {"id": 1, "name": "ROW 5"}, "lowered"),
    ],
    ids=["check", "not null", "unique", "foreign key", "trigger", "exclusion", "generated", "expression index"],
)
def test_a_refused_row_fails_the_checkpoint_before_the_decision(
    db: Observer, strategy: str, constraint: str, row: dict[str, Any], named: str
) -> None:
    db.run(constraint)
    sink = make(db, strategy=strategy)
    committables: list[Committable] = []

    def until_the_decision() -> None:
        committables.append(pre_commit(sink, rows_of(5), batch([row], SCHEMA)))
        sink.validate_all(checkpoint(), committables)

    with pytest.raises(BadValue) as caught:
        until_the_decision()
    assert named in str(caught.value)
    assert "public.orders" in str(caught.value)
    assert "tpc_" not in str(caught.value)
    for committable in committables:
        sink.abort(committable.transaction)
    assert db.pending() == 0
    assert db.visible() == []
    assert not any(db.ledger().values())


@pytest.mark.parametrize("strategy", ["prepared", "staged"])
def test_a_bad_row_is_named_by_its_number(db: Observer, strategy: str) -> None:
    db.run("ALTER TABLE orders ADD CONSTRAINT positive CHECK (id > 0)")
    sink = make(db, strategy=strategy)
    with pytest.raises(BadValue, match=r"partition 3 of checkpoint 7.*row 4.*positive"):
        pre_commit(sink, rows_of(1, 2), rows_of(3, -4), checkpoint=7, subtask=3)


def test_a_row_without_a_partition(db: Observer) -> None:
    db.run("CREATE TABLE parts (id bigint, name text) PARTITION BY RANGE (id)")
    db.run("CREATE TABLE parts_1 PARTITION OF parts FOR VALUES FROM (0) TO (10)")
    for strategy in ("prepared", "staged"):
        sink = make(db, table="parts", strategy=strategy)
        with pytest.raises(BadValue, match="no partition"):
            sink.validate_all(checkpoint(), [pre_commit(sink, rows_of(99))])
        good = pre_commit(sink, rows_of(5))
        sink.validate_all(checkpoint(), [good])
        assert sink.commit_all(checkpoint(), [good]) == [COMMITTED]
    assert db.ids("parts") == [5, 5]


def test_partitions_without_rows_are_not_locked(db: Observer) -> None:
    """Somebody may drop them, or VACUUM FULL, while a transaction is prepared."""
    db.run("CREATE TABLE parts (id bigint, name text) PARTITION BY RANGE (id)")
    for n in range(3):
        db.run(f"CREATE TABLE parts_{n} PARTITION OF parts FOR VALUES FROM ({10 * n}) TO ({10 * n + 10})")
    sink = make(db, table="parts", strategy="prepared")
    committable = pre_commit(sink, rows_of(5))
    locked = db.run(
        "SELECT DISTINCT relation::regclass::text FROM pg_locks WHERE locktype = 'relation' AND pid IS NULL"
        " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    )
    assert {name for (name,) in locked if name.startswith("parts")} == {"parts", "parts_0"}
    assert sink.commit_all(checkpoint(), [committable]) == [COMMITTED]


@pytest.mark.parametrize("strategy", ["prepared", "staged"])
def test_a_row_outside_of_the_partition_that_is_the_target(db: Observer, strategy: str) -> None:
    db.run("CREATE TABLE parts (id bigint, name text) PARTITION BY RANGE (id)")
    db.run("CREATE TABLE parts_1 PARTITION OF parts FOR VALUES FROM (0) TO (10)")
    sink = make(db, table="parts_1", strategy=strategy)
    with pytest.raises(BadValue, match="violates partition constraint"):  # outside of its bounds
        sink.validate_all(checkpoint(), [pre_commit(sink, rows_of(5, 99))])
    good = pre_commit(sink, rows_of(5))
    sink.validate_all(checkpoint(), [good])
    assert sink.commit_all(checkpoint(), [good]) == [COMMITTED]
    assert db.ids("parts") == [5]


@pytest.mark.parametrize("there", [True, False])
def test_a_clash_of_values_that_python_has_not(db: Observer, there: bool) -> None:
    db.run("CREATE TABLE ends (at timestamp UNIQUE)")
    if there:
        db.run("INSERT INTO ends VALUES ('10000-01-01')")
    schema = pa.schema([("at", pa.timestamp("us"))])
    sink = make(db, table="ends", strategy="staged", check=schema)
    year_10000 = pa.array([253_402_300_800_000_000] * (1 if there else 2), schema.field("at").type)
    with pytest.raises(BadValue, match=r"ends_at_key.*10000-01-01"):
        sink.validate_all(checkpoint(), [pre_commit(sink, pa.record_batch([year_10000], schema=schema))])


def test_periods_that_overlap_are_found_before_the_decision(db: Observer) -> None:
    db.needs(18, "WITHOUT OVERLAPS")
    db.run("ALTER TABLE orders ADD room int4range DEFAULT '[1,2)', ADD during tstzrange DEFAULT '[2026-01-01,)'")
    db.run("ALTER TABLE orders ADD PRIMARY KEY (room, during WITHOUT OVERLAPS)")
    sink = make(db, strategy="staged")
    with pytest.raises(BadValue, match="orders_pkey"):
        sink.validate_all(checkpoint(), [pre_commit(sink, rows_of(1, 2))])


@pytest.mark.parametrize("options", [{}, {"mode": "upsert", "keys": ["name"]}])
def test_an_index_for_which_other_values_are_equal_than_in_its_column(db: Observer, options: dict[str, Any]) -> None:
    try:
        db.run("CREATE COLLATION any_case (provider = icu, locale = 'und-u-ks-level2', deterministic = false)")
    except psycopg.errors.FeatureNotSupported:
        pytest.skip("PostgreSQL was built without ICU")
    db.run("ALTER TABLE orders ALTER name SET NOT NULL; CREATE UNIQUE INDEX ON orders (name COLLATE any_case)")
    rows = batch([{"id": 1, "name": "a"}, {"id": 2, "name": "A"}], SCHEMA)
    if options:
        with pytest.raises(ConfigurationError, match="needs a unique index on just these columns"):
            make(db, **options)
        return
    sink = make(db, strategy="staged")
    with pytest.raises(BadValue, match="orders_name_idx"):
        sink.validate_all(checkpoint(), [pre_commit(sink, rows)])


def test_upserts_that_a_publication_refuses_are_found_before_the_decision(db: Observer) -> None:
    db.run("CREATE TABLE stock (id bigint NOT NULL UNIQUE, name text); CREATE PUBLICATION everything FOR ALL TABLES")
    sink = make(db, table="stock", mode="upsert", keys=["id"])
    with pytest.raises(ConfigurationError, match="REPLICA IDENTITY"):
        sink.validate_all(checkpoint(), [pre_commit(sink, rows_of(1))])
    db.run("ALTER TABLE stock REPLICA IDENTITY USING INDEX stock_id_key")
    committables = [pre_commit(sink, rows_of(1))]
    sink.validate_all(checkpoint(), committables)
    assert sink.commit_all(checkpoint(), committables) == [COMMITTED]


def test_texts_that_order_changes_are_compared_as_spark_does(db: Observer) -> None:
    """Byte by byte, whatever the database's locale, and the collations of the staging tables."""
    db.run("CREATE TABLE stock (id bigint PRIMARY KEY, n bigint)")
    schema = pa.schema([("id", pa.int64()), ("n", pa.int64()), ("at", pa.string())])
    upsert: dict[str, Any] = {"table": "stock", "mode": "upsert", "keys": ["id"], "order_by": "at"}
    sink = make(db, check=schema, **upsert)
    changes = [batch([{"id": 1, "n": n, "at": at}], schema) for n, at in enumerate(("a", "B"))]
    staged = [pre_commit(sink, rows, subtask=subtask) for subtask, rows in enumerate(changes)]
    db.run(f'ALTER TABLE {staged[0].transaction["table"]} ALTER at TYPE text COLLATE "POSIX"')
    sink.validate_all(checkpoint(), staged)
    assert sink.commit_all(checkpoint(), staged) == [COMMITTED] * 2
    assert db.run("SELECT n FROM stock") == [(0,)]
    changes = [batch([{"id": 1, "n": n, "at": "B"}], schema) for n in range(2)]
    staged = [pre_commit(sink, rows, subtask=subtask, checkpoint=1) for subtask, rows in enumerate(changes)]
    db.run(f'ALTER TABLE {staged[0].transaction["table"]} ALTER at TYPE text COLLATE "POSIX"')
    with pytest.raises(BadValue, match=r"different changes of the key \(id\) = \(1\), all with at = B"):
        sink.validate_all(checkpoint(1), staged)


@pytest.mark.parametrize(
    ("kind", "arrow", "one", "other"),
    [
        ("json", pa.string(), '{"a": [1, null]}', '{"a": [1, 2]}'),
        ("jsonb", pa.string(), '{"a": [1, null]}', '{"a": [1, 2]}'),
        ("text", pa.string(), "x" * 70000 + "a", "x" * 70000 + "b"),
        ("bytea", pa.binary(), b"\xff\x00", b"\xff"),
        ("real", pa.float32(), 16777215.0, 16777214.0),
        ("double precision", pa.float64(), 0.1 + 0.2, float("nan")),
        ("numeric", pa.decimal128(38, 9), Decimal("1.000000001"), Decimal("1.000000002")),
        ("timestamptz", pa.timestamp("us", "UTC"), 1, 2),
        ("boolean", pa.bool_(), True, False),
        ("bigint[]", pa.list_(pa.int64()), [1, None], [None, 1]),
    ],
)
def test_equal_changes_are_told_apart_by_values_of_every_type(
    db: Observer, kind: str, arrow: pa.DataType, one: Any, other: Any
) -> None:
    """Two partitions may deliver the same change, and not two different ones."""
    schema = pa.schema([("id", pa.int64()), ("at", pa.int64()), ("note", arrow)])
    db.run(f"CREATE TABLE notes (id bigint PRIMARY KEY, note {kind})")
    sink = make(db, check=schema, table="notes", mode="upsert", keys=["id"], order_by="at")
    for number, notes in enumerate([(one, one), (None, None), (one, other), (one, None)]):
        rows = [batch([{"id": 1, "at": 5, "note": note}], schema) for note in notes]
        staged = [pre_commit(sink, row, checkpoint=number, subtask=n) for n, row in enumerate(rows)]
        if notes[0] == notes[1]:
            sink.validate_all(checkpoint(number), staged)
            continue
        with pytest.raises(BadValue, match=r"2 partitions have different changes of the key \(id\) = \(1\)"):
            sink.validate_all(checkpoint(number), staged)


def test_a_staging_table_keeps_the_order_of_its_rows(db: Observer) -> None:
    """Long and short ones, and such that a refused row's savepoint put in once more."""
    db.run("CREATE TABLE stock (id bigint PRIMARY KEY, name text, CHECK (id % 700 <> 7))")
    chance, schema = random.Random(5), pa.schema([*SCHEMA, ("at", pa.int64())])
    names = ["x" * chance.choice((1, 50, 900, 3000)) for _ in range(6000)]
    rows = [{"id": id, "name": name, "at": 1} for id, name in enumerate(names)]
    sink = make(db, check=schema, table="stock", mode="upsert", keys=["id"], order_by="at")
    for subtask, size in enumerate((6000, 500, 37)):
        transaction = sink.begin_transaction(context(sink, subtask=subtask, schema=schema))
        for start in range(0, len(rows), size):
            sink.write_good_rows(transaction, batch(rows[start : start + size], schema), 1000)
        table = sink.pre_commit(transaction).transaction["table"]
        ids = [id for (id,) in db.run(f"SELECT id FROM {table} ORDER BY ctid")]
        assert ids == [id for id in range(6000) if id % 700 != 7]


def test_documents_order_no_changes(db: Observer) -> None:
    """The server compares them in another way than Spark."""
    db.run("CREATE TABLE stock (id bigint PRIMARY KEY)")
    schema = pa.schema([("id", pa.int64()), ("at", pa.struct([("n", pa.int64())]))])
    with pytest.raises(
        ConfigurationError, match="order_by names the column 'at', a struct<n: int64>, which the database sorts"
    ):
        make(db, check=schema, table="stock", mode="upsert", keys=["id"], order_by="at")


@pytest.mark.parametrize("published", ["(id, name) WHERE (name <> '')", "(name)"])
def test_upserts_that_the_filter_of_a_publication_refuses(db: Observer, published: str) -> None:
    """Of rows by more than the replica identity has, or of columns, which leave it out."""
    db.needs(15, "such publications")
    db.run("CREATE TABLE stock (id bigint PRIMARY KEY, name text)")
    schema = pa.schema([*SCHEMA, ("gone", pa.bool_())])
    upsert: dict[str, Any] = {"mode": "upsert", "keys": ["id"], "order_by": "name", "delete_marker": "gone"}
    sink = make(db, table="stock", check=schema, **upsert)
    db.run(f"CREATE PUBLICATION filtered FOR TABLE stock {published}")
    with pytest.raises(ConfigurationError, match=r"publication|Column list"):
        sink.validate_all(checkpoint(), [pre_commit(sink, batch([{"id": 1, "name": "a", "gone": False}], schema))])


@pytest.mark.parametrize(
    ("index", "options"),
    [
        ("CREATE INDEX ON orders (name)", {"strategy": "prepared"}),
        ("CREATE INDEX ON orders (name)", {"strategy": "staged"}),
        ("CREATE UNIQUE INDEX ON orders (id) INCLUDE (name)", {"strategy": "staged"}),
        ("ALTER TABLE orders ADD PRIMARY KEY (name)", {"mode": "upsert", "keys": ["name"]}),
    ],
)
def test_a_value_that_is_too_long_for_an_index(db: Observer, index: str, options: dict[str, Any]) -> None:
    """A staging table, without indexes, takes it."""
    db.run(index)
    sink = make(db, **options)
    good = pre_commit(sink, rows_of(1))
    sink.validate_all(checkpoint(), [good])
    assert sink.commit_all(checkpoint(), [good]) == [COMMITTED]
    long = batch([{"id": 2, "name": random.Random(1).randbytes(4000).hex()}], SCHEMA)
    with pytest.raises(BadValue, match=r"index row size .* exceeds"):
        sink.validate_all(checkpoint(1), [pre_commit(sink, long, checkpoint=1)])
    assert db.ids() == [1]


def test_row_security_is_refused(db: Observer) -> None:
    role = f"guarded_{conninfo_to_dict(db.dsn)['dbname']}"
    db.run(f"CREATE ROLE {role} LOGIN PASSWORD 'p'")
    try:
        db.run("ALTER TABLE orders ENABLE ROW LEVEL SECURITY")
        db.run("CREATE POLICY small ON orders USING (id < 10)")
        db.run(f"GRANT ALL ON orders TO {role}; GRANT ALL ON SCHEMA public TO {role}")
        options = {"connect_options": {"user": role, "password": "p"}}
        for strategy in ("prepared", "staged"):
            with pytest.raises(ConfigurationError, match=r"row-level security for this role: .*BYPASSRLS"):
                make(db, strategy=strategy, **options)
    finally:
        db.run(f"DROP OWNED BY {role}")
        db.run(f"DROP ROLE {role}")


def test_a_rule_is_refused(db: Observer) -> None:
    """COPY would pass it over, and leave in the table what the rule has elsewhere."""
    db.run("CREATE TABLE archive (LIKE orders)")
    db.run(
        "CREATE RULE archived AS ON INSERT TO orders WHERE NEW.id < 10 DO INSTEAD INSERT INTO archive VALUES (NEW.*)"
    )
    with pytest.raises(ConfigurationError, match="the rule archived, which COPY passes over"):
        make(db)


def test_a_table_that_others_inherit_from(db: Observer) -> None:
    """No index of it binds their rows: an upsert would add a key once more, and an append may."""
    db.run("CREATE TABLE parents (id bigint PRIMARY KEY, name text)")
    upserts: dict[str, Any] = {"table": "parents", "mode": "upsert", "keys": ["id"]}
    sink = make(db, **upserts)
    committable = pre_commit(sink, rows_of(1))
    db.run("CREATE TABLE children () INHERITS (parents)")
    db.run("INSERT INTO children VALUES (1, 'old')")
    with pytest.raises(ConfigurationError, match=r"no unique index on \(id\) any more .*children inherits from it"):
        sink.validate_all(checkpoint(), [committable])
    with pytest.raises(ConfigurationError, match=r"needs a unique index .*; the table children inherits from it"):
        make(db, **upserts)
    append = make(db, table="parents", name="append", strategy="staged")
    committables = [pre_commit(append, rows_of(1))]
    append.validate_all(checkpoint(), committables)
    assert append.commit_all(checkpoint(), committables) == [COMMITTED]
    with pytest.raises(BadValue, match="parents_pkey"):
        append.validate_all(checkpoint(1), [pre_commit(append, rows_of(1), checkpoint=1)])


@pytest.mark.parametrize("strategy", ["prepared", "staged"])
def test_defaults_identities_and_generated_columns(db: Observer, strategy: str) -> None:
    db.run(
        "CREATE TABLE rich (number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, id bigint NOT NULL, name text,"
        " made text NOT NULL DEFAULT 'here', double bigint GENERATED ALWAYS AS (id * 2) STORED)"
    )
    sink = make(db, table="rich", strategy=strategy)
    committable = pre_commit(sink, rows_of(21))
    sink.validate_all(checkpoint(), [committable])
    assert sink.commit_all(checkpoint(), [committable]) == [COMMITTED]
    assert [row[1:] for row in db.visible("rich")] == [(21, "row 21", "here", 42)]  # trying the move takes a number too


@pytest.mark.parametrize("strategy", ["prepared", "staged"])
def test_an_identity_column_that_is_written(db: Observer, strategy: str) -> None:
    db.run("CREATE TABLE numbered (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, name text)")
    sink = make(db, table="numbered", strategy=strategy)
    assert sink.commit_all(checkpoint(), [pre_commit(sink, rows_of(41))]) == [COMMITTED]
    assert db.ids("numbered") == [41]


@pytest.mark.parametrize("kind", ["ALWAYS", "BY DEFAULT"])
def test_an_identity_column_that_an_upsert_would_have_to_change(db: Observer, kind: str) -> None:
    db.run(f"CREATE TABLE numbered (id bigint GENERATED {kind} AS IDENTITY, name text PRIMARY KEY)")
    db.run("INSERT INTO numbered OVERRIDING SYSTEM VALUE VALUES (7, 'row 41')")
    sink = make(db, table="numbered", check=None, mode="upsert", keys=["name"])
    if kind == "ALWAYS":
        with pytest.raises(SchemaMismatch, match=r"'id' is GENERATED ALWAYS .*: make it BY DEFAULT, or leave it out"):
            sink.check(SCHEMA)
    else:
        sink.check(SCHEMA)
        assert sink.commit_all(checkpoint(), [pre_commit(sink, rows_of(41))]) == [COMMITTED]
        assert db.ids("numbered") == [41]


def test_rows_of_a_partition_that_others_refer_to_by_the_whole_table_do_not_go_out_and_in(db: Observer) -> None:
    """PostgreSQL would take them along."""
    db.run("DROP TABLE orders; CREATE TABLE orders (id bigint, name text, PRIMARY KEY (id)) PARTITION BY RANGE (id)")
    db.run("CREATE TABLE orders_1 PARTITION OF orders FOR VALUES FROM (0) TO (100)")
    db.run("CREATE UNIQUE INDEX named ON orders_1 (name)")
    db.run("CREATE TABLE parts (id bigint REFERENCES orders ON DELETE CASCADE)")
    db.run("INSERT INTO orders VALUES (1, 'a'), (2, 'b'); INSERT INTO parts VALUES (1), (2)")
    sink = make(db, table="orders_1", mode="upsert", keys=["id"], strategy="staged")
    rows = batch([{"id": 1, "name": "b"}, {"id": 2, "name": "a"}], rows_of(1).schema)
    with pytest.raises(BadValue, match="named"):
        sink.validate_all(checkpoint(), [pre_commit(sink, rows)])
    assert (db.visible(), db.ids("parts")) == ([(1, "a"), (2, "b")], [1, 2])


def test_the_server_notices_when_the_machine_of_a_task_is_gone(db: Observer) -> None:
    """While it waits for rows of a COPY, no other limit counts."""
    sink = make(db)
    with sink._server.lend() as connection, connection.transaction():
        connection.execute(postgres_settings(5))
        names = ("tcp_keepalives_idle", "tcp_keepalives_interval", "tcp_keepalives_count")
        assert [connection.execute(f"SHOW {name}").fetchone() for name in names] == [("20",), ("10",), ("4",)]


# ---------------------------------------------------------------------- upsert and delete
@pytest.fixture
def keyed(db: Observer) -> Observer:
    db.run("DROP TABLE orders; CREATE TABLE orders (id bigint PRIMARY KEY, name text NOT NULL)")
    return db


@pytest.mark.parametrize(
    ("column", "tried"),
    [
        ("number bigserial", False),
        ("number bigint GENERATED ALWAYS AS IDENTITY", False),
        ("number uuid DEFAULT gen_random_uuid()", False),
        ("number int", False),
        ("number int DEFAULT 7", True),
        ("number timestamptz DEFAULT now()", True),
        ("number int DEFAULT seven()", True),
    ],
)
def test_a_move_is_tried_for_an_index_over_defaults_only_where_they_may_clash(
    keyed: Observer, column: str, tried: bool
) -> None:
    """It would cost a second move, and numbers of sequences."""
    keyed.run("CREATE FUNCTION seven() RETURNS int LANGUAGE sql AS 'SELECT 7'")  # VOLATILE, unless it is said
    keyed.run(f"ALTER TABLE orders ADD COLUMN {column} UNIQUE")
    sink = make(keyed, strategy="staged")
    with sink._server.lend() as connection:
        target = sink._backend.catalog.describe(connection, "public", "orders")
        assert target
        move = Move(target, [], [], SCHEMA.names, {})
        assert sink._backend.staging.constraints(connection, move) == ["index orders_number_key"] * tried


@pytest.mark.parametrize("mode", ["append", "upsert"])
def test_a_sequence_that_is_behind_the_table_is_found_before_the_decision(db: Observer, mode: Any) -> None:
    """As after a load of rows with their numbers. Each try would take one number more."""
    db.run("ALTER TABLE orders ADD number bigserial PRIMARY KEY, ADD UNIQUE (id)")
    db.run("INSERT INTO orders SELECT n, 'loaded', n FROM generate_series(1, 9) AS n")
    sink = make(
        db,
        strategy="staged",
        mode=mode,
        keys=["id"] * (mode == "upsert"),
        order_by="name" if mode == "upsert" else None,
    )
    with pytest.raises(BadValue, match=r"\(number\)=\(1\) already exists"):
        sink.validate_all(checkpoint(), [pre_commit(sink, rows_of(10))])
    db.run("SELECT setval('orders_number_seq', 9)")
    made = [pre_commit(sink, rows_of(10, 11))]
    sink.validate_all(checkpoint(), made)
    assert sink.commit_all(checkpoint(), made) == [COMMITTED]
    db.run("INSERT INTO orders VALUES (12, 'loaded', 16)")  # behind a gap: the row that is tried passes
    made = [pre_commit(sink, rows_of(*range(20, 30)), checkpoint=1)]
    sink.validate_all(checkpoint(1), made)
    reason = why_unknown(sink.commit_all(checkpoint(1), made)[0])
    assert "set the key's sequence beyond the table's keys (setval)" in reason
    db.run("SELECT setval('orders_number_seq', 16)")
    assert sink.commit_all(checkpoint(1), made) == [COMMITTED]


def test_another_unique_index_of_an_upsert_is_tried_before_the_decision(keyed: Observer) -> None:
    keyed.run("ALTER TABLE orders ADD UNIQUE (name)")
    keyed.run("INSERT INTO orders VALUES (1, 'taken')")
    sink = make(keyed, mode="upsert", keys=["id"])
    committable = pre_commit(sink, batch([{"id": 2, "name": "taken"}], SCHEMA))
    with pytest.raises(BadValue, match="orders_name_key"):
        sink.validate_all(checkpoint(), [committable])
    assert keyed.visible() == [(1, "taken")]


# ---------------------------------------------------------------------- like every table
class TestTable(TableSuite):
    make = staticmethod(make)
    held = staticmethod(held)
    end_prepared = staticmethod(end)
    sessions = staticmethod(Observer.sessions)
    two_phase = "prepared"
    alter_rows = (
        "CREATE FUNCTION meddle() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN NEW.name = 'meddled'; RETURN NEW; END$$",
        "CREATE TRIGGER meddles BEFORE INSERT ON orders FOR EACH ROW EXECUTE FUNCTION meddle()",
    )
    spoil_ledger = ("ALTER TABLE tpc_ledger DROP CONSTRAINT tpc_ledger_pkey",)


@pytest.mark.parametrize("length", [62, 63, 64])
def test_a_ledger_whose_name_is_cut_to_that_of_its_witness(db: Observer, length: int) -> None:
    if length > 62:
        with pytest.raises(ConfigurationError, match="give it a shorter name"):
            make(db, ledger="x" * length)
        return
    sink = make(db, ledger="x" * length)
    assert sink.commit_all(checkpoint(), [pre_commit(sink, rows_of(1))]) == [COMMITTED]
    assert db.ids() == [1]


def test_a_backslash_in_the_name_of_the_table_hides_no_error(db: Observer, sink: PostgresSink) -> None:
    db.run(r'CREATE TABLE "a\d" (id bigint NOT NULL, name text)')
    sink = make(db, table=r'"a\d"', strategy=sink.strategy)
    with pytest.raises(BadValue, match=r'public.a\\d.*column "id"'):
        pre_commit(sink, batch([{"id": None, "name": "a"}], SCHEMA))


@pytest.mark.parametrize(
    "line",
    [
        "SELECT id INTO STRICT NEW.id FROM orders WHERE false",
        "NEW.id = (SELECT n FROM generate_series(1, 2) n)",
        "ASSERT false",
    ],
)
def test_what_the_statements_of_a_trigger_meet_is_a_bad_row(db: Observer, sink: PostgresSink, line: str) -> None:
    db.run(f"CREATE FUNCTION judge() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN {line}; RETURN NEW; END'")
    db.run("CREATE TRIGGER judge BEFORE INSERT ON orders FOR EACH ROW EXECUTE FUNCTION judge()")
    sink.check(SCHEMA)
    with pytest.raises(BadValue):
        sink.validate_all(checkpoint(), [pre_commit(sink, rows_of(1))])


def test_a_name_that_is_too_long_for_its_type_is_a_bad_row(db: Observer, sink: PostgresSink) -> None:
    db.run("ALTER TABLE orders ALTER name TYPE name")
    sink.check(SCHEMA)
    with pytest.raises(BadValue, match="identifier too long"):
        pre_commit(sink, batch([{"id": 1, "name": "x" * 64}], SCHEMA))


@pytest.mark.parametrize("beside", ["deferrable", "invalid"])
def test_a_second_index_on_the_keys(db: Observer, beside: str) -> None:
    """A deferrable one takes no ON CONFLICT; one that is being built is left alone."""
    db.run("ALTER TABLE orders ADD PRIMARY KEY (id)")
    if beside == "deferrable":
        db.run("ALTER TABLE orders ADD UNIQUE (id) DEFERRABLE")
        with pytest.raises(ConfigurationError, match="nor deferrable"):
            make(db, mode="upsert", keys=["id"])
        return
    db.run("CREATE UNIQUE INDEX being_built ON orders (id)")
    db.run("UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'being_built'::regclass")
    sink = make(db, mode="upsert", keys=["id"])
    for number in range(2):
        staged = [pre_commit(sink, rows_of(1), checkpoint=number)]
        sink.validate_all(checkpoint(number), staged)
        assert sink.commit_all(checkpoint(number), staged) == [COMMITTED]
    assert db.ids() == [1]


def test_a_check_that_reads_a_table_is_tried_before_the_decision(db: Observer) -> None:
    """It says of the target what it does not say of a staging table."""
    db.run("CREATE FUNCTION few() RETURNS boolean LANGUAGE sql AS 'SELECT count(*) < 2 FROM orders'")
    db.run("ALTER TABLE orders ADD CONSTRAINT few CHECK (few() OR id < 0)")
    sink = make(db, strategy="staged")
    with pytest.raises(BadValue, match="few"):
        sink.validate_all(checkpoint(), [pre_commit(sink, rows_of(1, 2, 3))])


def test_a_rule_that_takes_no_upsert_is_told_before_the_decision(db: Observer) -> None:
    db.run("ALTER TABLE orders ADD PRIMARY KEY (id)")
    db.run("CREATE RULE none AS ON UPDATE TO orders WHERE new.id < 0 DO INSTEAD NOTHING")
    sink = make(db, mode="upsert", keys=["id"])
    with pytest.raises(ConfigurationError, match="ON CONFLICT clause cannot be used"):
        sink.validate_all(checkpoint(), [pre_commit(sink, rows_of(1))])


# ---------------------------------------------------------------------- what a unique index may look like
KEYED = pa.schema([("code", pa.string()), ("n", pa.int64())])


def upserted(
    db: Observer, *changes: tuple[Any, ...], schema: pa.Schema = KEYED, keys: Sequence[str] = ("code",)
) -> None:
    """Upsert those rows, each in a partition of its own."""
    sink = make(db, table="t", mode="upsert", keys=keys, check=schema)
    rows = [batch([dict(zip(schema.names, change, strict=True))], schema) for change in changes]
    committables = [pre_commit(sink, row, subtask=n) for n, row in enumerate(rows)]
    sink.validate_all(checkpoint(), committables)
    assert set(sink.commit_all(checkpoint(), committables)) == {COMMITTED}


@pytest.mark.parametrize(
    "index",
    [
        "(code) NULLS NOT DISTINCT",
        "(code DESC NULLS LAST) INCLUDE (n)",
        "(code text_pattern_ops)",
        '(code COLLATE "POSIX")',
        "(code) INCLUDE (n)",
    ],
)
def test_unique_indexes_that_upserts_go_by(db: Observer, index: str) -> None:
    if "NOT DISTINCT" in index:
        db.needs(15, "NULLS NOT DISTINCT")
    db.run("CREATE TABLE t (code text, n bigint)")
    db.run(f"CREATE UNIQUE INDEX t_code ON t {index}")
    db.run("INSERT INTO t VALUES ('a', 1), (NULL, 9)")
    upserted(db, ("a", 2), ("b", 3))
    assert db.visible("t", "n") == [("a", 2), ("b", 3), (None, 9)]


@pytest.mark.parametrize(
    ("table", "what"),
    [
        ("CREATE UNIQUE INDEX t_code ON t (code) WHERE n > 0", "t_code is partial"),
        ("CREATE UNIQUE INDEX t_code ON t (lower(code))", "t_code is over an expression"),
        ("CREATE UNIQUE INDEX t_code ON t (code, n)", r"t_code is on \(code, n\)"),
        ("ALTER TABLE t ADD CONSTRAINT t_code UNIQUE (code) DEFERRABLE", "t_code is deferrable"),
    ],
)
def test_unique_indexes_that_upserts_cannot_go_by_are_named(db: Observer, table: str, what: str) -> None:
    db.run("CREATE TABLE t (code text, n bigint)")
    db.run(table)
    with pytest.raises(ConfigurationError, match=rf"upsert by \(code\) needs a unique index .*; {what}\s\["):
        make(db, table="t", mode="upsert", keys=["code"], check=KEYED)


def test_an_index_of_periods_is_named(db: Observer) -> None:
    db.needs(18, "WITHOUT OVERLAPS")
    db.run("CREATE TABLE t (r int4range, n bigint, v int4range, PRIMARY KEY (r, v WITHOUT OVERLAPS))")
    with pytest.raises(ConfigurationError, match="t_pkey is a constraint that no two rows overlap"):
        make(db, table="t", mode="upsert", keys=["r", "v"], check=pa.schema([("n", pa.int64())]))


def test_a_key_that_is_null_is_a_bad_row_where_the_index_takes_it_for_a_value(db: Observer) -> None:
    db.needs(15, "NULLS NOT DISTINCT")
    db.run("CREATE TABLE t (code text UNIQUE NULLS NOT DISTINCT, n bigint)")
    with pytest.raises(BadValue, match=r'table public.t: row 1, column "code": a key cannot be NULL'):
        upserted(db, (None, 1))
    assert db.visible("t") == []


def test_a_null_that_is_a_value_is_handed_on(db: Observer) -> None:
    """Of another unique index: 1 has NULL and 2 has 'a', and each gets the other's."""
    db.needs(15, "NULLS NOT DISTINCT")
    db.run("CREATE TABLE t (id bigint PRIMARY KEY, code text UNIQUE NULLS NOT DISTINCT)")
    db.run("INSERT INTO t VALUES (1, NULL), (2, 'a')")
    swap = pa.schema([("id", pa.int64()), ("code", pa.string())])
    upserted(db, (1, "a"), (2, None), schema=swap, keys=["id"])
    assert db.visible("t") == [(1, "a"), (2, None)]


@pytest.mark.parametrize("there", [True, False])
def test_nulls_that_clash_are_found_before_the_decision(db: Observer, there: bool) -> None:
    """Also where the batch does not write the column, which is NULL by default."""
    db.needs(15, "NULLS NOT DISTINCT")
    db.run("CREATE TABLE t (n bigint, code text UNIQUE NULLS NOT DISTINCT)")
    if there:
        db.run("INSERT INTO t VALUES (7, NULL)")
    sink = make(db, table="t", strategy="staged", check=pa.schema([("n", pa.int64())]))
    rows = pa.schema([("n", pa.int64())])
    committables = [pre_commit(sink, batch([{"n": n}], rows), subtask=n) for n in range(2)]
    with pytest.raises(BadValue, match="t_code_key"):
        sink.validate_all(checkpoint(), committables)


POSTS = pa.schema([("id", pa.int64()), ("title", pa.string()), ("author", pa.int64()), ("gone", pa.bool_())])


@pytest.mark.parametrize("way", [1, -1])
@pytest.mark.parametrize(
    ("index", "changed"),
    [
        ("(author) WHERE NOT gone", [(1, "A", 7, True), (2, "B", 7, False)]),  # the next one takes the place
        ("(title) WHERE NOT gone", [(1, "B", 7, False), (2, "A", 7, True)]),
        ("(lower(title)) WHERE NOT gone", [(1, "b", 7, False), (2, "a", 7, True)]),
        ("(author, lower(title))", [(1, "b", 7, False), (2, "a", 7, True)]),
        ("((author || '-' || \"title\")) NULLS NOT DISTINCT", [(1, "B", 7, False), (2, "A", 7, True)]),
        ("(lower(title))", [(1, None, 7, False), (2, "a", 7, True)]),
    ],
)
def test_values_of_partial_and_expression_indexes_are_handed_on(
    db: Observer, index: str, changed: list[tuple[Any, ...]], way: int
) -> None:
    """Whichever of the two rows the server would change first."""
    if "NOT DISTINCT" in index:
        db.needs(15, "NULLS NOT DISTINCT")
    db.run("CREATE TABLE t (id bigint PRIMARY KEY, title text, author bigint, gone boolean, kept text)")
    db.run(f"CREATE UNIQUE INDEX t_live ON t {index}")
    db.run("INSERT INTO t VALUES (1, 'A', 7, false, 'one'), (2, 'B', 7, true, 'two')")
    upserted(db, *changed[::way], (3, "C", 8, False), schema=POSTS, keys=["id"])
    kept = {1: "one", 2: "two", 3: None}
    assert db.visible("t") == [(*row, kept[row[0]]) for row in [*changed, (3, "C", 8, False)]]


def test_an_expression_over_columns_that_the_batch_lacks(db: Observer) -> None:
    """What it gives is known to the server alone; a title goes from 1 to 2."""
    db.run("CREATE TABLE t (id bigint PRIMARY KEY, title text, author bigint)")
    db.run("CREATE UNIQUE INDEX t_title ON t (title, (author + 1))")
    db.run("INSERT INTO t VALUES (1, 'A', 7), (2, 'B', 7)")
    schema = pa.schema([("id", pa.int64()), ("title", pa.string())])
    upserted(db, (2, "A"), (1, "B"), schema=schema, keys=["id"])
    assert db.visible("t") == [(1, "B", 7), (2, "A", 7)]


@pytest.mark.parametrize("beside", ["", "trigger", "reference"])
def test_unique_values_of_a_partitioned_table_are_handed_on(db: Observer, beside: str) -> None:
    """Unless a trigger of a partition, or a reference to one, would take that for a delete."""
    db.run(
        "CREATE TABLE t (id bigint, day bigint, code text, PRIMARY KEY (id, day), UNIQUE (code, day))"
        " PARTITION BY LIST (day)"
    )
    db.run("CREATE TABLE t_1 PARTITION OF t FOR VALUES IN (1)")
    db.run("INSERT INTO t VALUES (1, 1, 'a'), (2, 1, 'b')")
    if beside == "trigger":
        db.run("CREATE FUNCTION nothing() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END'")
        db.run("CREATE TRIGGER own BEFORE UPDATE ON t_1 FOR EACH ROW EXECUTE FUNCTION nothing()")
    if beside == "reference":
        db.run("CREATE TABLE refers (id bigint, day bigint, FOREIGN KEY (id, day) REFERENCES t_1 ON DELETE CASCADE)")
        db.run("INSERT INTO refers VALUES (1, 1)")
    schema = pa.schema([("id", pa.int64()), ("day", pa.int64()), ("code", pa.string())])
    with pytest.raises(BadValue, match="t_1_code_day_key") if beside else contextlib.nullcontext():
        upserted(db, (1, 1, "b"), (2, 1, "a"), schema=schema, keys=["id", "day"])
    assert db.run("SELECT code FROM t ORDER BY id") == ([("a",), ("b",)] if beside else [("b",), ("a",)])
    assert beside != "reference" or db.ids("refers") == [1]


# ---------------------------------------------------------------------- what a refused swap says
EMAILS = pa.schema([("id", pa.int64()), ("email", pa.string())])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            "CREATE TABLE parts (id bigint REFERENCES t)",
            ", because of foreign key parts_id_fkey",
        ),
        (
            "CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END';"
            "CREATE TRIGGER seen BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION f()",
            ", because of trigger seen",
        ),
        (
            "ALTER TABLE t DROP CONSTRAINT one; ALTER TABLE t ADD CONSTRAINT one EXCLUDE USING btree (email WITH =)",
            r" \[EO-VALUE\]",
        ),
    ],
)
def test_a_refused_swap_says_how_values_can_be_handed_on(db: Observer, change: str, why: str) -> None:
    db.run("CREATE TABLE t (id bigint PRIMARY KEY, email text CONSTRAINT one UNIQUE)")
    db.run("INSERT INTO t VALUES (1, 'a'), (2, 'b')")
    db.run(change)
    with pytest.raises(BadValue, match=f'"one".* to swap the value with another row, use two checkpoints{why}'):
        upserted(db, (1, "b"), (2, "a"), schema=EMAILS, keys=["id"])
    sink = make(db, table="t", check=EMAILS, strategy="staged", name="append")
    appended_row = pre_commit(sink, batch([{"id": 3, "email": "a"}], EMAILS))
    with pytest.raises(BadValue, match=r"one") as appended:
        sink.validate_all(checkpoint(), [appended_row])
    assert "swap" not in str(appended.value)


def test_a_null_that_the_batch_has_is_told_to_leave_the_batch(db: Observer) -> None:
    db.run("CREATE TABLE t (id bigint, email text NOT NULL DEFAULT 'none')")
    sink = make(db, table="t", check=EMAILS)
    with pytest.raises(BadValue, match="or give it a default and leave it out of the batch"):
        pre_commit(sink, batch([{"id": 3, "email": None}], EMAILS))
