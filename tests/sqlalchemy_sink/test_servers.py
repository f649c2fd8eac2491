"""SqlAlchemySink on a server, PostgreSQL: upserts, types, and what it refuses."""

from __future__ import annotations

import datetime as dt
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
import sqlalchemy as sa
from sqlalchemy.engine import make_url

from coordinator.storage.sql import SQLStorage
from sinks import Checkpoint, CommitOutcome, Committable
from sinks.errors import BadValue, ConfigurationError, TransactionBlocked
from sinks.postgres import PostgresSink
from sinks.sqlalchemy import SqlAlchemySink
from sinks.testing.table import context, why_unknown
from sinks.testing.table_crashes import set_back_to_before_a_replay
from sinks.transaction import CommitState, Fingerprint
from tests.sqlalchemy_sink.test_dead_letters import Observer
from tests.sqlalchemy_sink.test_sink import ORDERS, STOCK, Play, equal_changes_of_two_partitions
from tests.sqlalchemy_sink.urls import url_of


class Server(Play):
    def __init__(self, dsn: str) -> None:
        super().__init__(Path())
        self.dsn, self.url = dsn, url_of(dsn)

    def run(self, statement: str, *parameters: Any) -> list[Any]:
        with sa.create_engine(self.url, poolclass=sa.NullPool).begin() as connection:
            result = connection.exec_driver_sql(statement)
            return [tuple(row) for row in result] if result.returns_rows else []

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()


@pytest.fixture
def pg(pg_database: str) -> Iterator[Server]:
    with closing(Server(pg_database)) as server:
        yield server


def test_storage_set_back_to_before_a_replay(pg: Server, tmp_path: Path) -> None:
    sink = SqlAlchemySink(pg.url, "orders", create_table=True)
    with closing(Observer(pg.url)) as db:
        set_back_to_before_a_replay(tmp_path, sink, db, whole=False)


@pytest.mark.parametrize("older", ["deleted", "a dump"])
def test_a_ledger_that_is_older_than_its_rows_proves_no_loss(pg: Server, older: str) -> None:
    """The dump has what was staged then, whose rows were moved since."""
    pg.run("CREATE TABLE orders (id bigint NOT NULL, name varchar(100))")
    sink = pg.sink()
    sink.check(ORDERS)
    committable = pg.pre_commit(sink, ORDERS, [(1, "a")])
    pg.run("CREATE TABLE dump AS SELECT * FROM tpc_ledger")
    assert pg.commit(sink, committable) == [CommitOutcome.COMMITTED]
    pg.run("DELETE FROM tpc_ledger WHERE transaction_id <> 'ledger'")
    if older == "a dump":
        pg.run("INSERT INTO tpc_ledger SELECT * FROM dump WHERE transaction_id <> 'ledger'")
    for driver in (sink, pg.sink()):
        with pytest.raises(ConfigurationError, match="the ledger alone was restored"):
            driver.committed_checkpoints("job")
        (outcome,) = driver.commit_all(Checkpoint("job", "l1", 0), [committable])
        assert "the ledger alone was restored" in why_unknown(outcome)
    assert pg.run("SELECT id FROM orders") == [(1,)]


def test_a_session_is_left_as_a_pooler_gave_it(pg: Server) -> None:
    """Others get it between two transactions."""
    pg.run("CREATE TABLE orders (id bigint NOT NULL, name text)")
    pg.run("ALTER ROLE CURRENT_USER SET synchronous_commit = off")
    try:
        sink = pg.sink(engine_options={"pool_size": 1, "max_overflow": 2})
        sink.check(ORDERS)
        assert pg.commit(sink, pg.pre_commit(sink, ORDERS, [(1, "a")])) == [CommitOutcome.COMMITTED]
        names = "lock_timeout", "synchronous_commit", "idle_in_transaction_session_timeout"
        settings = "SELECT " + ", ".join(f"current_setting('{name}')" for name in names)
        with sink._server.lend() as connection:
            assert sink._server.query(connection, settings) == [("10s", "local", "10s")]
            connection.rollback()
            cursor = connection.connection.cursor()
            assert cursor.execute(settings).fetchall() == [("0", "off", "0")]
    finally:
        pg.run("ALTER ROLE CURRENT_USER RESET synchronous_commit")


@pytest.mark.parametrize("setting", ["idle_in_transaction_session_timeout", "transaction_timeout"])
def test_limits_of_the_database_do_not_hold_for_a_task(pg: Server, setting: str) -> None:
    pg.run("CREATE TABLE orders (id bigint NOT NULL, name text)")
    if not pg.run(f"SELECT 1 WHERE current_setting('{setting}', true) IS NOT NULL"):
        pytest.skip("transaction_timeout came with PostgreSQL 17")
    pg.run(f"ALTER DATABASE {make_url(pg.url).database} SET {setting} = 2000")
    sink = pg.sink()
    sink.check(ORDERS)
    transaction = sink.begin_transaction(context(sink, schema=ORDERS))
    time.sleep(2.5)
    sink.write(transaction, pa.RecordBatch.from_pylist([{"id": 1, "name": "a"}], ORDERS))
    assert pg.commit(sink, sink.pre_commit(transaction).of("orders", 0, Fingerprint(1))) == [CommitOutcome.COMMITTED]


def test_a_pooler_meets_no_statement_that_the_server_keeps(pg: Server) -> None:
    """In transaction mode it would run on another session."""
    pg.run("CREATE TABLE orders (id bigint NOT NULL, name text)")
    sink = pg.sink(engine_options={"pool_size": 1})
    sink.check(ORDERS)
    for n in range(8):
        sink.committed_checkpoints("job")
        assert pg.commit(sink, pg.pre_commit(sink, ORDERS, [(n, "a")])) == [CommitOutcome.COMMITTED]
    with sink._server.lend() as connection:
        assert sink._server.query(connection, "SELECT count(*) FROM pg_prepared_statements") == [(0,)]


@pytest.mark.parametrize("encoding", ["SQL_ASCII", "LATIN1"])
def test_databases_that_are_not_in_utf8(pg: Server, encoding: str) -> None:
    name = make_url(pg.url).database
    create = f"CREATE DATABASE {name}_2 TEMPLATE template0 LOCALE 'C' ENCODING '{encoding}'"
    with psycopg.connect(pg.dsn, autocommit=True) as connection:
        connection.execute(create)
    other = Server(pg.dsn.replace(str(name), f"{name}_2"))
    try:
        other.url += "?client_encoding=utf8"
        sink = SqlAlchemySink(url_of(other.dsn), "orders", create_table=True)
        with closing(sink), closing(SQLStorage(other.dsn)) as storage:
            other.write(sink, ORDERS, [(1, "Ä")])
            if encoding == "LATIN1":
                with pytest.raises(BadValue, match='has no equivalent in encoding "LATIN1"'):
                    other.pre_commit(sink, ORDERS, [(2, "€")])
            assert storage.put_if_absent("a/b", b"\0\xff")
            assert storage.list("a/") == ["a/b"]
        assert other.run("SELECT id, name FROM orders") == [(1, "Ä")]
    finally:
        with psycopg.connect(pg.dsn, autocommit=True) as connection:
            connection.execute(f"DROP DATABASE {name}_2 WITH (FORCE)")


def test_a_foreign_table_is_refused(pg: Server) -> None:
    """Its rows are committed by another server, before ours."""
    pg.run("CREATE FOREIGN DATA WRAPPER w")
    pg.run("CREATE SERVER far_away FOREIGN DATA WRAPPER w")
    pg.run("CREATE FOREIGN TABLE far (id bigint NOT NULL, name text) SERVER far_away")
    with pytest.raises(ConfigurationError, match="far is a foreign table"):
        pg.sink("far").check(ORDERS)


def test_row_level_security_that_would_hide_rows_from_deletes(pg: Server) -> None:
    role = f"guarded_{make_url(pg.url).database}"
    pg.run("CREATE TABLE stock (sku text PRIMARY KEY, pieces int, at bigint)")
    pg.run("INSERT INTO stock VALUES ('a', 1, 1)")
    pg.run(f"CREATE ROLE {role}")
    try:
        pg.run(f"GRANT ALL ON stock TO {role}")
        pg.run(f"GRANT ALL ON SCHEMA public TO {role}")
        options = {"connect_args": {"options": f"-c role={role}"}}
        sink = pg.sink("stock", mode="upsert", keys=["sku"], delete_marker="gone", engine_options=options)
        sink.check(STOCK)
        committable = pg.pre_commit(sink, STOCK, [("a", None, 2, True)])
        pg.run("ALTER TABLE stock ENABLE ROW LEVEL SECURITY")
        pg.run("CREATE POLICY p ON stock USING (false) WITH CHECK (true)")
        with pytest.raises(ConfigurationError, match="row-level security"):
            sink.validate_all(Checkpoint("job", "l1", 0), [committable])
        with pytest.raises(ConfigurationError, match="row-level security"):
            sink.check(STOCK)
        sink.close()
    finally:
        pg.run(f"DROP OWNED BY {role}")
        pg.run(f"DROP ROLE {role}")


def test_a_view_is_refused(pg: Server) -> None:
    """Of a foreign table, for example, whose server commits by itself."""
    pg.run("CREATE TABLE orders (id bigint NOT NULL, name text)")
    pg.run("CREATE VIEW seen AS SELECT * FROM orders")
    with pytest.raises(ConfigurationError, match=r"it is a view.*name the table behind it"):
        pg.sink("seen").check(ORDERS)


def test_a_deferred_constraint_is_judged_before_the_decision(pg: Server) -> None:
    pg.run("CREATE TABLE known (id bigint PRIMARY KEY)")
    pg.run("CREATE TABLE orders (id bigint NOT NULL REFERENCES known DEFERRABLE INITIALLY DEFERRED, name text)")
    sink = pg.sink()
    sink.check(ORDERS)
    with pytest.raises(BadValue, match="orders_id_fkey"):
        sink.validate_all(Checkpoint("job", "l1", 0), [pg.pre_commit(sink, ORDERS, [(1, "a")])])


def test_an_enumeration_of_postgres_stays_when_staging_tables_go(pg: Server) -> None:
    pg.run("CREATE TYPE mood AS ENUM ('bad', 'good')")
    pg.run("CREATE TABLE orders (id bigint, name mood)")
    sink = pg.sink()
    for n in range(2):
        pg.write(sink, ORDERS, [(n, "good")], [(n, "bad")])
    assert len(pg.run("SELECT * FROM orders")) == 4


def test_a_publication_of_all_tables_takes_the_moves_too(pg: Server) -> None:
    """PostgreSQL refuses to delete from a table without a key then."""
    pg.run("CREATE TABLE orders (id bigint PRIMARY KEY, name text)")
    pg.run("CREATE PUBLICATION everything FOR ALL TABLES")
    pg.write(pg.sink(), ORDERS, [(1, "a")], [(2, "b")])
    assert pg.run("SELECT id FROM orders ORDER BY id") == [(1,), (2,)]


@pytest.mark.parametrize("portable_first", [True, False])
def test_sinks_into_one_schema_share_a_ledger(pg: Server, portable_first: bool) -> None:
    own = PostgresSink(pg.dsn, "own", create_table=True)
    with closing(own):
        sinks: list[Any] = [pg.sink("portable", create_table=True), own]
        for sink in sinks if portable_first else reversed(sinks):
            sink.check(ORDERS)
            assert pg.commit(sink, pg.pre_commit(sink, ORDERS, [(1, "a")])) == [CommitOutcome.COMMITTED]
        for sink in sinks:
            assert sink.committed_checkpoints("job") == {"l1": 0}
    assert pg.run("SELECT count(*) FROM tpc_ledger") == [(3,)]


@pytest.mark.parametrize("killed", [True, False])
def test_what_a_task_staged_that_died_is_gone(pg: Server, killed: bool) -> None:
    pg.run("CREATE TABLE orders (id bigint NOT NULL, name varchar(100))")
    sink = pg.sink()
    sink.check(ORDERS)
    transaction = sink.begin_transaction(context(sink, schema=ORDERS))
    sink.write(transaction, pa.RecordBatch.from_pylist([{"id": 1, "name": "a"}], ORDERS))
    if killed:
        transaction.connection.invalidate()
    else:
        sink.rollback(transaction)
    assert list(sink.in_doubt("job")) == []
    with sa.create_engine(pg.url, poolclass=sa.NullPool).connect() as connection:
        tables = set(sa.inspect(connection).get_table_names())
    assert tables == {"orders", "tpc_ledger", "tpc_ledger_witness"}


def test_upserts_and_deletes(pg: Server) -> None:
    options: dict[str, Any] = {"mode": "upsert", "keys": ["sku"], "order_by": "at", "delete_marker": "gone"}
    sink = pg.sink("stock", **options, order_by_nulls="first", create_table=True)
    pg.write(sink, STOCK, [("a", 1, 1, False), ("b", 1, 1, False)], [("a", 2, 2, False), ("c", 3, None, False)])
    pg.write(sink, STOCK, [("b", None, 2, True), ("c", 4, 1, False)])
    assert pg.run("SELECT sku, pieces, at FROM stock ORDER BY sku") == [("a", 2, 2), ("c", 4, 1)]


def test_equal_changes_of_two_partitions_have_to_be_the_same(pg: Server) -> None:
    pg.run("CREATE TABLE stock (sku text PRIMARY KEY, pieces int, at bigint)")
    equal_changes_of_two_partitions(pg)


@pytest.mark.parametrize("options", [{}, {"order_by": "at"}, {"order_by": "at", "keep_newer": True}], ids=str)
def test_upserts_without_deletes(pg: Server, options: dict[str, Any]) -> None:
    schema = pa.schema(list(STOCK)[:3])
    options = options | ({"order_by_nulls": "first"} if options else {})
    sink = pg.sink("stock", mode="upsert", keys=["sku"], create_table=True, **options)
    again = [("c", 9, None)] if options else []
    pg.write(sink, schema, [("a", 1, 1), ("b", 1, 1)], [("c", 3, 1), *again])
    pg.write(sink, schema, [("b", 2, 2)], [("c", 4, 0)])
    c = ("c", 3, 1) if "keep_newer" in options else ("c", 4, 0)
    assert pg.run("SELECT sku, pieces, at FROM stock ORDER BY sku") == [("a", 1, 1), ("b", 2, 2), c]


def test_deletes_without_an_order(pg: Server) -> None:
    sink = pg.sink("stock", mode="upsert", keys=["sku"], delete_marker="gone", create_table=True)
    pg.write(sink, STOCK, [("a", 1, 1, False), ("b", 1, 1, None)])
    pg.write(sink, STOCK, [("b", None, 2, True)], [("c", 4, 1, False)])
    assert pg.run("SELECT sku, pieces, at FROM stock ORDER BY sku") == [("a", 1, 1), ("c", 4, 1)]


def test_texts_that_differ_by_capitals_accents_or_blanks_are_keys_of_their_own(pg: Server) -> None:
    """In a table that the sink creates."""
    schema = pa.schema([("sku", pa.string()), ("pieces", pa.int32()), ("at", pa.string())])
    sink = pg.sink("stock", mode="upsert", keys=["sku"], order_by="at", create_table=True)
    rows = [("a", 1, "x"), ("A", 2, "x"), ("ä", 3, "x"), ("a ", 4, "x")]
    pg.write(sink, schema, rows, [("a", 0, "w")])
    assert sorted(pg.run("SELECT sku, pieces, at FROM stock")) == sorted(rows)


def test_types_come_back_as_they_went_in(pg: Server) -> None:
    moment = dt.datetime(2024, 2, 29, 23, 59, 59, 999999)
    values: dict[str, tuple[pa.DataType, Any]] = {
        "b": (pa.bool_(), True),
        "i16": (pa.int16(), -32768),
        "i64": (pa.int64(), 2**63 - 1),
        "f32": (pa.float32(), 0.5),
        "f64": (pa.float64(), 1.25e-300),
        "d": (pa.decimal128(38, 18), Decimal("-12345678901234567890.000000000000000001")),
        "s": (pa.string(), "ü😀'\"%:x"),
        "raw": (pa.binary(), b"\x00\xff"),
        "day": (pa.date32(), dt.date(9999, 12, 31)),
        "wall": (pa.timestamp("us"), moment),
        "at": (pa.timestamp("us", "UTC"), moment.replace(tzinfo=dt.timezone.utc)),
        "odd name: (%s)": (pa.int32(), 7),
    }
    schema = pa.schema([pa.field(name, kind) for name, (kind, _) in values.items()])
    row = [value for _, value in values.values()]
    pg.write(pg.sink("kinds", create_table=True), schema, [row, [None] * len(row)])
    first, second = pg.run("SELECT * FROM kinds")
    at = schema.get_field_index("at")
    got = [*first[:at], first[at].replace(tzinfo=dt.timezone.utc), *first[at + 1 :]]
    assert got == row
    assert list(second) == [None] * len(row)


def test_a_boolean_goes_into_any_integer_column(pg: Server) -> None:
    pg.run("CREATE TABLE flags (a smallint, b integer, c bigint)")
    schema = pa.schema([(name, pa.bool_()) for name in "abc"])
    pg.write(pg.sink("flags"), schema, [(True, False, True), (None, None, None)])
    assert sorted(pg.run("SELECT * FROM flags"), key=str) == [(1, 0, 1), (None, None, None)]


def test_nested_values_are_json(pg: Server) -> None:
    schema = pa.schema([("a", pa.struct([("n", pa.int32()), ("s", pa.string())])), ("b", pa.list_(pa.int32()))])
    pg.write(pg.sink("docs", create_table=True), schema, [[{"n": 1, "s": "ü"}, [1, 2]]])
    with sa.create_engine(pg.url, poolclass=sa.NullPool).connect() as connection:
        table = sa.table("docs", sa.column("a", sa.JSON), sa.column("b", sa.JSON))
        row = connection.execute(sa.select(table)).one()
    assert [row.a, row.b] == [{"n": 1, "s": "ü"}, [1, 2]]


def test_a_value_that_the_column_refuses(pg: Server) -> None:
    pg.run("CREATE TABLE orders (id smallint NOT NULL, name varchar(3))")
    sink = pg.sink()
    sink.check(ORDERS)
    for row, refusal in [
        ((40_000, "a"), ", rows 1 to 1, was refused"),
        ((1, "abcd"), ": row 1, .* is longer than VARCHAR"),
    ]:
        with pytest.raises(BadValue, match=f"table .*orders: partition 0 of checkpoint 0{refusal}"):
            pg.pre_commit(sink, ORDERS, [row])


def test_a_null_is_none_in_json_columns_of_postgresql(pg: Server) -> None:
    pg.run("CREATE TABLE t (id bigint, j json, b jsonb)")
    schema = pa.schema([("id", pa.int64()), ("j", pa.string()), ("b", pa.string())])
    sink = pg.sink("t")
    sink.check(schema)
    committable = pg.pre_commit(sink, schema, [(1, None, None), (2, "[1]", '{"a": 1}')])
    assert [outcome.state for outcome in pg.commit(sink, committable)] == [CommitState.COMMITTED]
    assert pg.run("SELECT id, j, b FROM t ORDER BY id") == [(1, None, None), (2, [1], {"a": 1})]


ROUNDED: dict[str, tuple[str, pa.DataType, Any]] = {
    "decimal": ("decimal(5,2)", pa.decimal128(12, 3), Decimal("-1.005")),
    "timestamp": ("timestamp(0)", pa.timestamp("us"), dt.datetime(2026, 1, 2, 3, 4, 5, 500_000)),
    "single": ("real", pa.float64(), 0.1),
    "single of an int": ("real", pa.int32(), 2**24 + 1),
    "blanks": ("char(3)", pa.string(), "a "),
}


@pytest.mark.parametrize("what", ROUNDED)
def test_rounding_is_refused(pg: Server, what: str) -> None:
    declared, arrow, value = ROUNDED[what]
    pg.run(f"CREATE TABLE t (id bigint, v {declared})")
    schema = pa.schema([("id", pa.int64()), ("v", arrow)])
    sink = pg.sink("t")
    sink.check(schema)
    with pytest.raises(BadValue, match=r'row 2, column "v": .*(in Spark|a space|of range of what)'):
        pg.pre_commit(sink, schema, [(1, None), (2, value)])


# ---------------------------------------------------------------------- others that write the same keys meanwhile
def commit_while(
    pg: Server, sink: SqlAlchemySink, committable: Committable, statement: str
) -> CommitOutcome | Exception:
    """The statement's transaction ends as soon as the sink waits for it."""
    waiting = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    with (
        psycopg.connect(pg.dsn) as other,
        ThreadPoolExecutor(1) as pool,
        pytest.MonkeyPatch.context() as patched,
    ):
        patched.setattr("sinks.sqlalchemy.server.LOCK_SECONDS", 300)
        other.execute(statement)
        outcomes = pool.submit(sink.commit_all, Checkpoint("job", "l1", 0), [committable])
        while not pg.run(waiting) and not outcomes.done():
            time.sleep(0.05)
        other.commit()
        return outcomes.result()[0]


@pytest.mark.parametrize("keys", [["sku"], ["sku", "pieces"]])
def test_with_keep_newer_a_change_that_was_open_stays_if_it_is_newer(pg: Server, keys: list[str]) -> None:
    pg.run(f"CREATE TABLE stock (sku text, pieces int, at bigint, PRIMARY KEY ({', '.join(keys)}))")
    pg.run("INSERT INTO stock VALUES ('a', 1, 1), ('b', 1, 1)")
    sink, schema = pg.sink("stock", mode="upsert", keys=keys, order_by="at", keep_newer=True), STOCK.remove(3)
    sink.check(schema)
    committable = pg.pre_commit(sink, schema, [("a", 1, 50), ("b", 1, 150)])
    assert commit_while(pg, sink, committable, "UPDATE stock SET at = 100") == CommitOutcome.COMMITTED
    assert pg.run("SELECT * FROM stock ORDER BY sku") == [("a", 1, 100), ("b", 1, 150)]


def test_a_key_that_somebody_inserts_amid_an_upsert_is_replaced_by_the_next_try(pg: Server) -> None:
    pg.run("CREATE TABLE stock (sku text PRIMARY KEY, pieces int, at bigint)")
    sink, schema = pg.sink("stock", mode="upsert", keys=["sku"]), STOCK.remove(3)
    sink.check(schema)
    committable = pg.pre_commit(sink, schema, [("a", 2, 2)])
    outcome = commit_while(pg, sink, committable, "INSERT INTO stock VALUES ('a', 1, 1)")
    assert isinstance(outcome, TransactionBlocked), outcome
    assert pg.commit(sink, committable) == [CommitOutcome.COMMITTED]
    assert pg.run("SELECT * FROM stock") == [("a", 2, 2)]


# ---------------------------------------------------------------------- tables that change while the query runs
NUMBERS = pa.schema([("id", pa.int64()), ("v", pa.float64())])


def altered(pg: Server, to: str) -> None:
    pg.run(f"ALTER TABLE t ALTER v TYPE {to}")


@pytest.fixture
def numbers(pg: Server) -> Server:
    """A table whose doubles a database would round into another type without a word."""
    pg.run("CREATE TABLE t (id bigint, v double precision)")
    return pg


def test_a_type_that_changes_before_the_decision_is_refused(numbers: Server) -> None:
    sink = numbers.sink("t")
    sink.check(NUMBERS)
    committable = numbers.pre_commit(sink, NUMBERS, [(1, 1.25)])
    altered(numbers, "decimal(5,1)")
    with pytest.raises(ConfigurationError, match=r'column "v" was DOUBLE PRECISION and is .*\(5, 1\): change it'):
        sink.validate_all(Checkpoint("job", "l1", 0), [committable])
    sink.abort(committable.transaction)
    assert numbers.run("SELECT * FROM t") == []
    transaction = sink.begin_transaction(context(sink, schema=NUMBERS))
    sink.write(transaction, pa.RecordBatch.from_pylist([{"id": 1, "v": 1.25}], NUMBERS))
    with pytest.raises(ConfigurationError, match="changed while the query ran"):
        sink.commit_directly(transaction)
    sink.rollback(transaction)
    assert numbers.run("SELECT * FROM t") == []


@pytest.mark.parametrize("restarted", [False, True])
def test_a_type_that_changes_after_the_decision_stops_the_query_until_it_is_changed_back(
    numbers: Server, restarted: bool
) -> None:
    sink = numbers.sink("t")
    sink.check(NUMBERS)
    committable = numbers.pre_commit(sink, NUMBERS, [(1, 1.25)])
    altered(numbers, "decimal(5,1)")
    if restarted:
        sink = numbers.sink("t")
    [outcome] = sink.commit_all(Checkpoint("job", "l1", 0), [committable])
    assert re.search(r'column "v" was .*: change it back.*the rows are safe in the staging table', why_unknown(outcome))
    altered(numbers, "double precision")
    assert sink.commit_all(Checkpoint("job", "l1", 0), [committable]) == [CommitOutcome.COMMITTED]
    assert numbers.run("SELECT * FROM t") == [(1, 1.25)]


def test_a_trigger_that_is_new_is_refused(numbers: Server) -> None:
    sink = numbers.sink("t")
    sink.check(NUMBERS)
    committable = numbers.pre_commit(sink, NUMBERS, [(1, 1.25)])
    does = "BEFORE INSERT ON t FOR EACH ROW"
    numbers.run("CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN RETURN NULL; END$$")
    numbers.run(f"CREATE TRIGGER meddles {does} EXECUTE FUNCTION f()")
    with pytest.raises(ConfigurationError, match="trigger meddles"):
        sink.validate_all(Checkpoint("job", "l1", 0), [committable])


def test_drivers_that_start_for_the_first_time_at_once(pg: Server) -> None:
    sinks = [
        [pg.sink(f"t{n}", name=f"s{m}", create_table=True, ledger=f"tpc_ledger_{n}") for m in range(4)]
        for n in range(4)
    ]
    with ThreadPoolExecutor(4) as pool:
        for together in sinks:
            list(pool.map(lambda sink: sink.check(ORDERS), together))


ODD = {
    "a": ("numeric", pa.decimal128(10, 2), Decimal("1.50")),
    "b": ("numeric(8,3)", pa.decimal128(8, 3), Decimal("1.500")),
    "c": ("timestamptz(3)", pa.timestamp("us", "UTC"), dt.datetime(2026, 1, 1, tzinfo=dt.timezone.utc)),
    "d": ("time(0)", pa.time64("us"), dt.time(1)),
    "e": ("varchar", pa.string(), "a"),
    "f": ("char(3)", pa.string(), "abc"),
    "g": ("serial", pa.int32(), 3),
    "h": ("real", pa.float32(), 0.5),
    "i": ('text COLLATE "C"', pa.string(), "a"),
    "j": ("jsonb", pa.string(), "{}"),
    "k": ("bytea", pa.binary(), b"a"),
    "l": ("bigint GENERATED BY DEFAULT AS IDENTITY", pa.int64(), 3),
}


def test_a_table_that_was_not_changed_is_not_taken_for_one_that_was(pg: Server) -> None:
    pg.run(f"CREATE TABLE t ({', '.join(f'{name} {kind}' for name, (kind, _, _) in ODD.items())})")
    schema = pa.schema([(name, kind) for name, (_, kind, _) in ODD.items()])
    sink = pg.sink("t")
    sink.check(schema)
    committable = pg.pre_commit(sink, schema, [[value for *_, value in ODD.values()]])
    sink.validate_all(Checkpoint("job", "l1", 0), [committable])
    assert pg.sink("t").commit_all(Checkpoint("job", "l1", 0), [committable]) == [CommitOutcome.COMMITTED]
    assert pg.run("SELECT count(*) FROM t") == [(1,)]


@pytest.mark.parametrize("more", ["UNIQUE INDEX there ON stock (sku) WHERE at > 0", "TABLE heir () INHERITS (keyed)"])
def test_what_does_not_tell_all_rows_of_the_table_apart_is_no_key(pg: Server, more: str) -> None:
    """The rows outside of a partial index, or of tables that inherit, may have one key: all were deleted."""
    pg.run("CREATE TABLE stock (sku text, pieces int, at bigint)")
    pg.run("CREATE TABLE keyed (PRIMARY KEY (sku)) INHERITS (stock)")
    pg.run(f"CREATE {more}")
    table = "keyed" if "heir" in more else "stock"
    with pytest.raises(ConfigurationError, match=r"needs a unique index|heir inherits from it"):
        pg.sink(table, mode="upsert", keys=["sku"]).check(STOCK.remove(3))


@pytest.mark.parametrize("kind", ["name", '"char"'])
def test_types_that_cut_what_they_get_are_refused(pg: Server, kind: str) -> None:
    pg.run(f"CREATE TABLE orders (id bigint, name {kind})")
    with pytest.raises(ConfigurationError, match=r'column "name": .* cuts texts'):
        pg.sink().check(ORDERS)


def test_percent_signs_before_an_s_are_no_parameters(pg: Server) -> None:
    pg.run('CREATE SCHEMA "100%%sales"')
    pg.run('CREATE TABLE "100%%sales".orders (id bigint, name text)')
    pg.write(pg.sink("100%sales.orders"), ORDERS, [(1, "a")])
    assert pg.run('SELECT * FROM "100%%sales".orders') == [(1, "a")]


@pytest.mark.parametrize(
    "rule",
    [
        "RAISE EXCEPTION 'no'",
        "RAISE EXCEPTION USING ERRCODE = 'U0001', MESSAGE = 'no'",
        "SELECT id INTO STRICT NEW.id FROM orders",
        "NEW.id = NULL",
    ],
)
def test_what_a_trigger_refuses_is_a_bad_row_whatever_words_it_holds(pg: Server, rule: str) -> None:
    pg.run("CREATE TABLE orders (id bigint NOT NULL, name text)")
    pg.run(f"CREATE FUNCTION judge() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {rule}; RETURN NEW; END $$")
    pg.run("CREATE TRIGGER judge BEFORE INSERT ON orders FOR EACH ROW EXECUTE FUNCTION judge()")
    with pytest.raises(BadValue):
        pg.write(pg.sink(), ORDERS, [(1, "deadlock detected, lock timeout")])
