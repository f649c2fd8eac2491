"""SqlAlchemySink on servers: strategies, upserts and what they refuse."""

from __future__ import annotations

import datetime as dt
import math
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import sqlalchemy as sa

from sinks import Checkpoint, CommitOutcome
from sinks.errors import BadValue, ConfigurationError, TransactionBlocked
from sinks.mysql import MySQLSink
from sinks.postgres import PostgresSink
from sinks.sqlalchemy import SqlAlchemySink, database
from sinks.testing.servers.mariadb import MariaDBServer
from sinks.testing.servers.mysql import MySQLService
from sinks.testing.servers.postgres import PostgresService
from sinks.testing.table import context, why_unknown
from sinks.testing.table_crashes import set_back_to_before_a_replay
from sinks.transaction import CommitState
from tests.mysql.conftest import REPEATED
from tests.mysql.play import with_option
from tests.mysql.test_changes import NOTES_TABLE, TRIGGER, UNSAFE
from tests.sqlalchemy_sink.play import observing, url_of
from tests.sqlalchemy_sink.test_dead_letters import Observer
from tests.sqlalchemy_sink.test_sink import ORDERS, STOCK, Play

NOON = dt.datetime(2026, 1, 2, 12)


class Server(Play):
    def __init__(self, dsn: str) -> None:
        super().__init__(Path())
        self.dsn, self.url = dsn, url_of(dsn)
        self.kind = "pg" if dsn.startswith("postgresql") else "my"

    def run(self, statement: str, *parameters: Any) -> list[Any]:
        with observing(self.url, poolclass=sa.NullPool).begin() as connection:
            result = connection.exec_driver_sql(statement)
            return [tuple(row) for row in result] if result.returns_rows else []

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()


MYSQL = [pytest.param("mysql_server", id="MySQL"), pytest.param("mariadb", id="MariaDB", marks=REPEATED)]


@pytest.fixture
def pg(pg_database: str) -> Iterator[Server]:
    with closing(Server(pg_database)) as server:
        yield server


@pytest.fixture(params=MYSQL)
def my(request: pytest.FixtureRequest) -> Iterator[Server]:
    with request.getfixturevalue(request.param).database() as dsn, closing(Server(dsn)) as server:
        yield server


@pytest.fixture(params=["postgres", *MYSQL])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with request.getfixturevalue(request.param).database() as dsn, closing(Server(dsn)) as server:
        yield server


def test_auto_asks_the_server(pg: Server, postgres_unprepared: PostgresService) -> None:
    sink = pg.sink("orders", create_table=True)
    sink.check(ORDERS)
    assert list(pg.pre_commit(sink, ORDERS, [(1, "a")]).transaction) == ["xid"]
    with postgres_unprepared.database() as dsn:
        other = Server(dsn)
        sink = other.sink("orders", create_table=True)
        sink.check(ORDERS)
        assert list(other.pre_commit(sink, ORDERS, [(1, "a")]).transaction) == ["transaction_id", "table"]
        with pytest.raises(ConfigurationError, match="switched on in the server"):
            other.sink("orders", strategy="two_phase").check(ORDERS)
        other.close()


@pytest.mark.parametrize("strategy", ["staged", "two_phase"])
def test_storage_set_back_to_before_a_replay(pg: Server, tmp_path: Path, strategy: str) -> None:
    """The names of prepared transactions tell nothing of replays here."""
    sink = SqlAlchemySink(pg.url, "orders", strategy=strategy, create_table=True)  # type: ignore[arg-type]
    with closing(Observer(pg.url)) as db:
        set_back_to_before_a_replay(tmp_path, sink, db, whole=False)


def test_two_phase_on_mysql_points_to_its_own_sink(my: Server) -> None:
    my.run("CREATE TABLE orders (id bigint, name text)")
    with pytest.raises(ConfigurationError, match=r"not for mysql: use strategy=\"staged\" or sinks\.mysql\.MySQLSink"):
        my.sink(strategy="two_phase").check(ORDERS)


def test_a_table_without_transactions_is_refused(my: Server) -> None:
    my.run("CREATE TABLE orders (id bigint, name text) ENGINE=MyISAM")
    with pytest.raises(ConfigurationError, match="its engine MyISAM has no transactions"):
        my.sink().check(ORDERS)


def test_two_databases_of_one_server_are_told_apart(pg: Server, postgres: PostgresService) -> None:
    with postgres.database() as dsn:
        other = Server(dsn)
        for place in (pg, other):
            sink = place.sink("orders", create_table=True)
            sink.check(ORDERS)
            committable = place.pre_commit(sink, ORDERS, [(1, "a")])
            assert list(sink.in_doubt("job")) == [committable.transaction]
        other.close()


def test_a_prepared_transaction_rolled_back_by_an_operator_is_lost(pg: Server) -> None:
    sink = pg.sink("orders", create_table=True)
    sink.check(ORDERS)
    committable = pg.pre_commit(sink, ORDERS, [(1, "a")])
    engine = sa.create_engine(pg.url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
    with engine.connect() as connection:
        connection.exec_driver_sql(f"ROLLBACK PREPARED '{committable.transaction['xid']}'")
    assert [outcome.state for outcome in pg.commit(sink, committable)] == [CommitState.LOST]


@pytest.mark.parametrize("strategy", ["auto", "staged"])
@pytest.mark.parametrize("older", ["deleted", "a dump"])
def test_a_ledger_that_is_older_than_its_rows_proves_no_loss(server: Server, strategy: str, older: str) -> None:
    """The dump has what was staged then, whose rows were moved since. `auto` is `two_phase` where it can."""
    server.run("CREATE TABLE orders (id bigint NOT NULL, name varchar(100))")
    sink = server.sink(strategy=strategy)
    sink.check(ORDERS)
    committable = server.pre_commit(sink, ORDERS, [(1, "a")])
    server.run("CREATE TABLE dump AS SELECT * FROM tpc_ledger")
    assert server.commit(sink, committable) == [CommitOutcome.COMMITTED]
    server.run("DELETE FROM tpc_ledger WHERE transaction_id <> 'ledger'")
    if older == "a dump":
        server.run("INSERT INTO tpc_ledger SELECT * FROM dump WHERE transaction_id <> 'ledger'")
    for one in (sink, server.sink(strategy=strategy)):
        with pytest.raises(ConfigurationError, match="the ledger was set back by itself"):
            one.committed_checkpoints("job")
        (outcome,) = one.commit_all(Checkpoint("job", "l1", 0), [committable])
        assert "the ledger was set back by itself" in why_unknown(outcome)
    assert server.run("SELECT id FROM orders") == [(1,)]


def test_two_prepared_rows_of_one_key_block_for_a_bounded_time(pg: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "_TRANSACTION", database._TRANSACTION.replace("'10s'", "'1s'"))
    pg.run("CREATE TABLE orders (id bigint PRIMARY KEY, name text)")
    sink = pg.sink(strategy="two_phase")
    sink.check(ORDERS)
    pg.pre_commit(sink, ORDERS, [(1, "a")])
    with pytest.raises(TransactionBlocked, match="lock timeout"):
        pg.pre_commit(sink, ORDERS, [(1, "b")], subtask=1)


@pytest.mark.parametrize("strategy", ["two_phase", "staged"])
def test_a_session_is_left_as_a_pooler_gave_it(pg: Server, strategy: str) -> None:
    """Others get it between two transactions."""
    pg.run("CREATE TABLE orders (id bigint NOT NULL, name text)")
    pg.run("ALTER ROLE CURRENT_USER SET synchronous_commit = off")
    try:
        sink = pg.sink(strategy=strategy, engine_options={"pool_size": 1, "max_overflow": 2})
        sink.check(ORDERS)
        assert pg.commit(sink, pg.pre_commit(sink, ORDERS, [(1, "a")])) == [CommitOutcome.COMMITTED]
        settings = "SELECT current_setting('lock_timeout'), current_setting('synchronous_commit')"
        with sink._backend.lend() as connection:
            assert sink._backend.query(connection, settings) == [("10s", "local")]
            connection.rollback()
            cursor = connection.connection.cursor()
            assert cursor.execute(settings).fetchall() == [("0", "off")]
    finally:
        pg.run("ALTER ROLE CURRENT_USER RESET synchronous_commit")


def test_an_enumeration_of_postgres_stays_when_staging_tables_go(pg: Server) -> None:
    pg.run("CREATE TYPE mood AS ENUM ('bad', 'good')")
    pg.run("CREATE TABLE orders (id bigint, name mood)")
    sink = pg.sink(strategy="staged")
    for n in range(2):
        pg.write(sink, ORDERS, [(n, "good")], [(n, "bad")])
    assert len(pg.run("SELECT * FROM orders")) == 4


def test_a_publication_of_all_tables_takes_the_moves_too(pg: Server) -> None:
    """PostgreSQL refuses to delete from a table without a key then."""
    pg.run("CREATE TABLE orders (id bigint PRIMARY KEY, name text)")
    pg.run("CREATE PUBLICATION everything FOR ALL TABLES")
    pg.write(pg.sink(strategy="staged"), ORDERS, [(1, "a")], [(2, "b")])
    assert pg.run("SELECT id FROM orders ORDER BY id") == [(1,), (2,)]


def test_a_ledger_without_transactions_proves_nothing(my: Server) -> None:
    my.run("CREATE TABLE orders (id bigint, name text)")
    sink = my.sink(strategy="staged")
    my.write(sink, ORDERS, [(1, "a")])
    my.run("ALTER TABLE tpc_ledger MODIFY transaction_id varchar(199) NOT NULL, ENGINE=MyISAM")  # a short key
    with pytest.raises(ConfigurationError, match="not a ledger of this version"):
        sink.committed_checkpoints("job")


@pytest.mark.parametrize("portable_first", [True, False])
def test_sinks_into_one_schema_share_a_ledger(server: Server, portable_first: bool) -> None:
    own = (PostgresSink if server.kind == "pg" else MySQLSink)(server.dsn, "own", create_table=True)
    with closing(own):
        sinks: list[Any] = [server.sink("portable", create_table=True), own]
        for sink in sinks if portable_first else reversed(sinks):
            sink.check(ORDERS)
            assert server.commit(sink, server.pre_commit(sink, ORDERS, [(1, "a")])) == [CommitOutcome.COMMITTED]
        for sink in sinks:
            assert sink.committed_checkpoints("job") == {"l1": 0}
    assert server.run("SELECT count(*) FROM tpc_ledger") == [(3,)]


@pytest.mark.parametrize("killed", [True, False])
def test_what_a_task_staged_that_died_is_found_and_swept(server: Server, killed: bool) -> None:
    """MySQL has its table from CREATE on, PostgreSQL from COMMIT on."""
    server.run("CREATE TABLE orders (id bigint NOT NULL, name varchar(100))")
    sink = server.sink(strategy="staged")
    sink.check(ORDERS)
    about = context(sink, schema=ORDERS)
    transaction = sink.begin_transaction(about)
    sink.write(transaction, pa.RecordBatch.from_pylist([{"id": 1, "name": "a"}], ORDERS))
    if killed:
        transaction.connection.invalidate()
    else:
        sink.rollback(transaction)
    found = [identity["transaction_id"] for identity in sink.in_doubt("job")]
    assert found == [about.transaction_id] * (killed and server.kind == "my")
    for identity in sink.in_doubt("job"):
        sink.abort(identity)
    assert list(sink.in_doubt("job")) == []
    with observing(server.url, poolclass=sa.NullPool).connect() as connection:
        tables = set(sa.inspect(connection).get_table_names())
    assert tables == {"orders", "tpc_ledger", "tpc_ledger_witness"}


def test_upserts_and_deletes(server: Server) -> None:
    options: dict[str, Any] = {"mode": "upsert", "keys": ["sku"], "order_by": "at", "delete_marker": "gone"}
    sink = server.sink("stock", **options, create_table=True)
    server.write(sink, STOCK, [("a", 1, 1, False), ("b", 1, 1, False)], [("a", 2, 2, False), ("c", 3, None, False)])
    server.write(sink, STOCK, [("b", None, 2, True), ("c", 4, 1, False)])
    assert server.run("SELECT sku, pieces, at FROM stock ORDER BY sku") == [("a", 2, 2), ("c", 4, 1)]


@pytest.mark.parametrize("options", [{}, {"order_by": "at"}, {"order_by": "at", "keep_newer": True}], ids=str)
def test_upserts_without_deletes(server: Server, options: dict[str, Any]) -> None:
    schema = pa.schema(list(STOCK)[:3])
    sink = server.sink("stock", mode="upsert", keys=["sku"], create_table=True, **options)
    again = [("c", 9, None)] if options else []
    server.write(sink, schema, [("a", 1, 1), ("b", 1, 1)], [("c", 3, 1), *again])
    server.write(sink, schema, [("b", 2, 2)], [("c", 4, 0)])
    c = ("c", 3, 1) if "keep_newer" in options else ("c", 4, 0)
    assert server.run("SELECT sku, pieces, at FROM stock ORDER BY sku") == [("a", 1, 1), ("b", 2, 2), c]


def test_deletes_without_an_order(server: Server) -> None:
    sink = server.sink("stock", mode="upsert", keys=["sku"], delete_marker="gone", create_table=True)
    server.write(sink, STOCK, [("a", 1, 1, False), ("b", 1, 1, None)])
    server.write(sink, STOCK, [("b", None, 2, True)], [("c", 4, 1, False)])
    assert server.run("SELECT sku, pieces, at FROM stock ORDER BY sku") == [("a", 1, 1), ("c", 4, 1)]


def test_texts_that_differ_by_capitals_accents_or_blanks_are_keys_of_their_own(server: Server) -> None:
    """In a table that the sink creates."""
    schema = pa.schema([("sku", pa.string()), ("pieces", pa.int32()), ("at", pa.string())])
    sink = server.sink("stock", mode="upsert", keys=["sku"], order_by="at", create_table=True)
    rows = [("a", 1, "x"), ("A", 2, "x"), ("ä", 3, "x"), ("a ", 4, "x")]
    server.write(sink, schema, rows, [("a", 0, "w")])
    assert sorted(server.run("SELECT sku, pieces, at FROM stock")) == sorted(rows)


NOTES = pa.schema([("id", pa.int64()), ("at", pa.string()), ("gone", pa.bool_())])


@pytest.mark.parametrize(("length", "fits"), [(600, True), (1365, False), (4000, False)])
def test_the_last_of_long_texts_wins_or_they_are_refused(mariadb: MariaDBServer, length: int, fits: bool) -> None:
    """By that column type the server sorts letters alone, though it tells capitals apart."""
    with mariadb.database() as dsn, closing(Server(dsn)) as maria:
        at = "at longtext CHARACTER SET utf8mb4 COLLATE utf8mb4_uca1400_as_cs"
        maria.run(f"CREATE TABLE notes (id bigint PRIMARY KEY, {at})")
        sink = maria.sink("notes", mode="upsert", keys=["id"], order_by="at", delete_marker="gone")
        sink.check(NOTES)
        rows = [(1, "x" * length + last, False) for last in "aBCcb"]
        staged = [maria.pre_commit(sink, NOTES, part, n) for n, part in enumerate([rows[:3], rows[3:]])]
        if fits:
            maria.commit(sink, *staged)
            assert maria.run("SELECT RIGHT(at, 1) FROM notes") == [("C",)]
        else:
            with pytest.raises(BadValue, match='order_by column "at" is longer than 4096 bytes'):
                sink.validate_all(Checkpoint("job", "l1", 0), staged)


def test_json_and_enumerations_of_mysql(mysql_server: MySQLService) -> None:
    members = ["a\\b", "it's", "n\n", "😀", "?x"]
    with (
        mysql_server.database() as dsn,
        closing(Server(dsn)) as place,
        closing(mysql_server.connect(dsn)) as connection,
    ):
        cursor = connection.cursor()
        cursor.execute(f"CREATE TABLE t (e enum({', '.join(map(connection.escape, members))}), c json)")
        sink = place.sink("t")
        schema = pa.schema([("e", pa.string()), ("c", pa.string())])
        sink.check(schema)
        rows = [(member, '{"a": 1, "b": 0.30000000000000004}') for member in members]
        place.commit(sink, place.pre_commit(sink, schema, rows))
        cursor.execute("SELECT CAST(e AS char) FROM t")
        assert sorted(cursor.fetchall()) == sorted((member,) for member in members)
        with pytest.raises(
            BadValue, match=r"row 2, column \"c\": .* would be altered by MySQL's JSON.*'a' comes twice"
        ):
            place.pre_commit(sink, schema, [("a\\b", "{}"), ("a\\b", '{"a": 1, "a": 2}')])


def test_types_come_back_as_they_went_in(server: Server) -> None:
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
    server.write(server.sink("kinds", create_table=True, strategy="staged"), schema, [row, [None] * len(row)])
    first, second = server.run("SELECT * FROM kinds")
    at = schema.get_field_index("at")
    got = [*first[:at], first[at].replace(tzinfo=dt.timezone.utc), *first[at + 1 :]]  # MySQL has no zone, PG has UTC
    assert got == row
    assert list(second) == [None] * len(row)


def test_nested_values_are_json(server: Server) -> None:
    schema = pa.schema([("a", pa.struct([("n", pa.int32()), ("s", pa.string())])), ("b", pa.list_(pa.int32()))])
    server.write(server.sink("docs", create_table=True), schema, [[{"n": 1, "s": "ü"}, [1, 2]]])
    with observing(server.url, poolclass=sa.NullPool).connect() as connection:
        table = sa.table("docs", sa.column("a", sa.JSON), sa.column("b", sa.JSON))
        row = connection.execute(sa.select(table)).one()
    assert [row.a, row.b] == [{"n": 1, "s": "ü"}, [1, 2]]


def test_a_value_that_the_column_refuses(server: Server) -> None:
    server.run("CREATE TABLE orders (id smallint NOT NULL, name varchar(3))")
    sink = server.sink(strategy="staged")
    sink.check(ORDERS)
    for row in [(40_000, "a"), (1, "abcd")]:
        with pytest.raises(BadValue, match=r"table .*orders: partition 0 of checkpoint 0, rows 1 to 1, was refused"):
            server.pre_commit(sink, ORDERS, [row])


ALTERED = {
    "enum": ("enum('a','2b')", pa.string(), "2", "is no member"),
    "set": ("set('a','b')", pa.string(), "3", "is no member"),
    "char": ("char(5)", pa.string(), "a ", "ends with a space"),
    "varchar": ("varchar(3)", pa.string(), "abc ", "more than 3 characters"),
    "binary": ("binary(4)", pa.binary(), b"ab", "is not 4 bytes long"),
}


@pytest.mark.parametrize("what", ALTERED)
def test_what_mysql_would_alter_is_refused_with_column_and_row(my: Server, what: str) -> None:
    kind, arrow, value, reason = ALTERED[what]
    my.run(f"CREATE TABLE t (id bigint, v {kind}) ENGINE=InnoDB")
    schema = pa.schema([("id", pa.int64()), ("v", arrow)])
    sink = my.sink("t")
    sink.check(schema)
    with pytest.raises(BadValue, match=f'row 1, column "v": .*{reason}'):
        my.pre_commit(sink, schema, [(1, value)])


def test_a_zero_for_a_counter_is_a_zero(my: Server) -> None:
    my.run("CREATE TABLE t (id bigint PRIMARY KEY AUTO_INCREMENT, name text) ENGINE=InnoDB")
    sink = my.sink("t")
    sink.check(ORDERS)
    committable = my.pre_commit(sink, ORDERS, [(0, "a")])
    assert [one.state for one in my.commit(sink, committable)] == [CommitState.COMMITTED]
    assert my.run("SELECT id FROM t") == [(0,)]


@pytest.mark.parametrize("strategy", ["staged", "two_phase"])
def test_a_null_is_none_in_json_columns_of_postgresql(pg: Server, strategy: str) -> None:
    pg.run("CREATE TABLE t (id bigint, j json, b jsonb)")
    schema = pa.schema([("id", pa.int64()), ("j", pa.string()), ("b", pa.string())])
    sink = pg.sink("t", strategy=strategy)
    sink.check(schema)
    committable = pg.pre_commit(sink, schema, [(1, None, None), (2, "[1]", '{"a": 1}')])
    assert [one.state for one in pg.commit(sink, committable)] == [CommitState.COMMITTED]
    assert pg.run("SELECT id, j, b FROM t ORDER BY id") == [(1, None, None), (2, [1], {"a": 1})]


HALF = dt.datetime(2026, 1, 2, 3, 4, 5, 500_000)
ROUNDED: dict[str, tuple[str, pa.DataType, Any, Any]] = {
    "decimal": ("decimal(5,2)", pa.decimal128(12, 3), Decimal("-1.005"), Decimal("-1.01")),
    "timestamp": ("{wall}(0)", pa.timestamp("us"), HALF, HALF.replace(second=6, microsecond=0)),
    "single": ("{single}", pa.float64(), 0.1, pa.scalar(0.1, pa.float32()).as_py()),
    "single of an int": ("{single}", pa.int32(), 2**24 + 1, float(2**24)),
    "blanks": ("char(3)", pa.string(), "a ", "a"),
}
WORDS = {"pg": {"wall": "timestamp", "single": "real"}, "my": {"wall": "datetime", "single": "float"}}


@pytest.mark.parametrize("what", ROUNDED)
def test_rounding_is_refused_unless_it_is_allowed(server: Server, what: str) -> None:
    declared, arrow, value, rounded = ROUNDED[what]
    words = WORDS[server.kind]
    server.run(f"CREATE TABLE t (id bigint, v {declared.format(**words)})")
    schema = pa.schema([("id", pa.int64()), ("v", arrow)])
    sink = server.sink("t")
    sink.check(schema)
    with pytest.raises(BadValue, match=r'row 2, column "v": .*(rounding="allow"|is out of range of what)'):
        server.pre_commit(sink, schema, [(1, None), (2, value)])
    server.write(server.sink("t", rounding="allow"), schema, [(1, None), (2, value)])
    read = f"v + CAST(0 AS {'double precision' if words is WORDS['pg'] else 'double'})" if "single" in what else "v"
    found = [row[0] for row in server.run(f"SELECT {read} FROM t ORDER BY id")]
    assert [one.rstrip() if isinstance(one, str) else one for one in found] == [None, rounded]


@pytest.mark.parametrize("value", ["A", "a ", "2"])
def test_what_compares_equal_to_a_member_is_none(my: Server, value: str) -> None:
    my.run("CREATE TABLE t (id bigint, v enum('a', 'b') COLLATE utf8mb4_general_ci)")
    schema = pa.schema([("id", pa.int64()), ("v", pa.string())])
    sink = my.sink("t")
    sink.check(schema)
    with pytest.raises(BadValue, match=r'row 2, column "v": .*is no member'):
        my.pre_commit(sink, schema, [(1, "a"), (2, value)])


@pytest.mark.parametrize("kind", ["enum", "set"])
def test_no_order_by_an_enumeration_of_mysql(my: Server, kind: str) -> None:
    my.run(f"CREATE TABLE t (id bigint PRIMARY KEY, at {kind}('new', 'done'))")
    with pytest.raises(ConfigurationError, match=f"order_by names the column 'at', which is {kind}"):
        my.sink("t", mode="upsert", keys=["id"], order_by="at").check(
            pa.schema([("id", pa.int64()), ("at", pa.string())])
        )


def test_an_empty_text_is_no_null_whatever_mode_the_server_is_in(my: Server) -> None:
    my.run("CREATE TABLE orders (id bigint NOT NULL, name varchar(100))")
    mode = ",EMPTY_STRING_IS_NULL" * ("MariaDB" in my.run("SELECT VERSION()")[0][0])
    url = with_option(my.url, f"init_command=SET sql_mode='NO_BACKSLASH_ESCAPES{mode}', sql_select_limit=1")
    my.write(my.sink(url=url), ORDERS, [(1, ""), (2, "b")], [(3, "\\'c")])
    assert my.run("SELECT * FROM orders ORDER BY id") == [(1, ""), (2, "b"), (3, "\\'c")]


# ---------------------------------------------------------------------- tables that change while the query runs
NUMBERS = pa.schema([("id", pa.int64()), ("v", pa.float64())])


def altered(server: Server, to: str) -> None:
    server.run(f"ALTER TABLE t {'MODIFY v' if server.kind == 'my' else 'ALTER v TYPE'} {to}")


@pytest.fixture
def numbers(server: Server) -> Server:
    """A table whose doubles a database would round into another type without a word."""
    server.run("CREATE TABLE t (id bigint, v double precision)")
    return server


def test_a_type_that_changes_before_the_decision_is_refused(numbers: Server) -> None:
    sink = numbers.sink("t", strategy="staged")
    sink.check(NUMBERS)
    committable = numbers.pre_commit(sink, NUMBERS, [(1, 1.25)])
    altered(numbers, "decimal(5,1)")
    with pytest.raises(ConfigurationError, match=r'column "v" is .*\(5, 1\), and the rows are written for DOUBLE'):
        numbers.commit(sink, committable)
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
    sink = numbers.sink("t", strategy="staged")
    sink.check(NUMBERS)
    committable = numbers.pre_commit(sink, NUMBERS, [(1, 1.25)])
    altered(numbers, "decimal(5,1)")
    if restarted:
        sink = numbers.sink("t", strategy="staged")
    [outcome] = sink.commit_all(Checkpoint("job", "l1", 0), [committable])
    assert re.search(r'column "v" is .*Change it back\. .*its rows are safe in the staging table', why_unknown(outcome))
    altered(numbers, "double precision")
    assert sink.commit_all(Checkpoint("job", "l1", 0), [committable]) == [CommitOutcome.COMMITTED]
    assert numbers.run("SELECT * FROM t") == [(1, 1.25)]


def test_a_trigger_that_is_new_is_refused(numbers: Server) -> None:
    sink = numbers.sink("t", strategy="staged")
    sink.check(NUMBERS)
    committable = numbers.pre_commit(sink, NUMBERS, [(1, 1.25)])
    does = "BEFORE INSERT ON t FOR EACH ROW"
    if numbers.kind == "my":
        numbers.run(f"CREATE TRIGGER meddles {does} SET NEW.v = 0")
    else:
        numbers.run("CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN RETURN NULL; END$$")
        numbers.run(f"CREATE TRIGGER meddles {does} EXECUTE FUNCTION f()")
    with pytest.raises(ConfigurationError, match="trigger meddles"):
        numbers.commit(sink, committable)


def test_a_type_that_changes_before_a_prepared_participant_is_refused(pg: Server) -> None:
    pg.run("CREATE TABLE t (id bigint, v double precision)")
    sink = pg.sink("t", strategy="two_phase")
    sink.check(NUMBERS)
    altered(pg, "decimal(5,1)")
    with pytest.raises(ConfigurationError, match=r'column "v" is NUMERIC\(5, 1\)'):
        pg.pre_commit(sink, NUMBERS, [(1, 1.25)])
    pg.run("ALTER TABLE t RENAME v TO w")
    with pytest.raises(ConfigurationError, match='column "v"'):
        pg.pre_commit(sink, NUMBERS, [(1, 1.25)])
    sink.check(pa.schema([("id", pa.int64())]))
    pg.pre_commit(sink, pa.schema([("id", pa.int64())]), [(1,)])


def test_a_prepared_participant_keeps_the_table_as_it_is(pg: Server) -> None:
    pg.run("CREATE TABLE t (id bigint, v double precision)")
    sink = pg.sink("t", strategy="two_phase")
    sink.check(NUMBERS)
    transaction = sink.begin_transaction(context(sink, schema=NUMBERS))
    with pytest.raises(sa.exc.OperationalError, match="lock timeout"):
        pg.run("SET lock_timeout = '300ms'; ALTER TABLE t ALTER v TYPE numeric(5,1)")
    sink.rollback(transaction)


def test_an_engine_without_transactions_is_refused_while_the_query_runs(my: Server) -> None:
    my.run("CREATE TABLE t (id bigint, v double)")
    sink = my.sink("t")
    sink.check(NUMBERS)
    committable = my.pre_commit(sink, NUMBERS, [(1, 1.25)])
    my.run("ALTER TABLE t ENGINE=MyISAM")
    with pytest.raises(ConfigurationError, match="its engine is MyISAM, which has no transactions"):
        my.commit(sink, committable)
    assert my.run("SELECT * FROM t") == []


def test_a_null_does_not_become_the_next_number_of_a_new_counter(my: Server) -> None:
    my.run("CREATE TABLE t (id bigint, n bigint)")
    schema = pa.schema([("id", pa.int64()), ("n", pa.int64())])
    sink = my.sink("t")
    sink.check(schema)
    committable = my.pre_commit(sink, schema, [(1, 7), (2, None)])
    my.run("ALTER TABLE t MODIFY n bigint NOT NULL AUTO_INCREMENT PRIMARY KEY")
    with pytest.raises(ConfigurationError, match='its column "n" takes no NULL, and rows have NULL there'):
        my.commit(sink, committable)


TEXTS = pa.schema([("id", pa.int64()), ("v", pa.string())])


@pytest.mark.parametrize(
    ("of_table", "kind"),
    [
        ("utf8mb4 COLLATE utf8mb4_bin", "varchar(9)"),
        ("utf8mb4 COLLATE utf8mb4_bin", "varchar(9) COLLATE utf8mb4_unicode_ci"),
        ("utf8mb4 COLLATE utf8mb4_general_ci", "enum('a','ü')"),
        ("latin1", "longtext"),
    ],
)
def test_a_collation_that_is_not_the_databases(my: Server, of_table: str, kind: str) -> None:
    my.run(f"CREATE TABLE t (id bigint, v {kind}) DEFAULT CHARSET {of_table}")
    sink = my.sink("t")
    my.write(sink, TEXTS, [(1, "ü")], [(2, "a")])
    committable = my.pre_commit(sink, TEXTS, [(3, "a")])
    my.run(f"ALTER TABLE t MODIFY v {kind.split(' COLL')[0]} COLLATE utf8mb4_spanish_ci")
    with pytest.raises(ConfigurationError, match=r'column "v" is .* COLLATE utf8mb4_spanish_ci, and the rows'):
        my.commit(sink, committable)
    assert my.run("SELECT id, v FROM t ORDER BY id") == [(1, "ü"), (2, "a")]


def test_drivers_that_start_for_the_first_time_at_once(my: Server) -> None:
    """MySQL answers some questions about a table that somebody creates with an error."""
    sinks = [
        [my.sink(f"t{n}", name=f"s{m}", create_table=True, ledger=f"tpc_ledger_{n}") for m in range(4)]
        for n in range(8)
    ]
    with ThreadPoolExecutor(4) as pool:
        for together in sinks:
            list(pool.map(lambda sink: sink.check(ORDERS), together))


@pytest.mark.parametrize(("kind", "value"), [("double", math.nan), ("double", -math.inf), ("float", math.inf)])
def test_what_mysql_has_no_number_for_is_refused_with_column_and_row(my: Server, kind: str, value: float) -> None:
    my.run(f"CREATE TABLE t (id bigint, v {kind})")
    sink = my.sink("t", rounding="allow")
    schema = pa.schema([("id", pa.int64()), ("v", pa.float32() if kind == "float" else pa.float64())])
    sink.check(schema)
    with pytest.raises(BadValue, match=r'row 2, column "v": .*is no number'):
        my.pre_commit(sink, schema, [(1, 0.5), (2, value)])


# ---------------------------------------------------------------------- tables without transactions
def test_an_engine_that_changes_after_the_decision_is_said_with_where_the_rows_are(my: Server) -> None:
    my.run("CREATE TABLE t (id bigint, v double)")
    sink = my.sink("t")
    sink.check(NUMBERS)
    committable = my.pre_commit(sink, NUMBERS, [(1, 1.25)])
    my.run("ALTER TABLE t ENGINE=MyISAM")
    for one in (sink, my.sink("t")):
        [outcome] = one.commit_all(Checkpoint("job", "l1", 0), [committable])
        assert re.search("its engine is MyISAM, .*rows are safe in the staging table", why_unknown(outcome))
    my.run("ALTER TABLE t ENGINE=InnoDB")
    assert one.commit_all(Checkpoint("job", "l1", 0), [committable]) == [CommitOutcome.COMMITTED]
    assert my.run("SELECT * FROM t") == [(1, 1.25)]


def require_gtids(my: Server) -> None:
    if "MariaDB" in my.run("SELECT VERSION()")[0][0]:
        pytest.skip("MariaDB has no enforce_gtid_consistency")


def test_a_trigger_that_the_server_refuses_for_its_gtids(my: Server) -> None:
    require_gtids(my)
    my.run(NOTES_TABLE)
    my.run("CREATE TABLE t (id bigint, v double)")
    my.run(TRIGGER)
    sink = my.sink("t")
    sink.check(NUMBERS)
    committable = my.pre_commit(sink, NUMBERS, [(1, 1.25)])
    my.run("ALTER TABLE notes ENGINE=MyISAM")
    with pytest.raises(ConfigurationError, match=UNSAFE):
        my.commit(sink, committable)
    [outcome] = sink.commit_all(Checkpoint("job", "l1", 0), [committable])
    assert re.search(f"{UNSAFE}.*rows are safe in the staging table", why_unknown(outcome))
    assert (my.run("SELECT * FROM notes"), my.run("SELECT * FROM t")) == ([], [])


def test_a_table_that_a_trigger_writes_to_loses_its_transactions(my: Server) -> None:
    """A trigger on DELETE, which no INSERT of no rows shows."""
    require_gtids(my)
    my.run("CREATE TABLE t (id bigint PRIMARY KEY, v double)")
    my.run("INSERT INTO t VALUES (1, 0)")
    my.run(NOTES_TABLE)
    my.run(TRIGGER.replace("AFTER INSERT", "AFTER DELETE").replace("NEW", "OLD"))
    sink = my.sink("t", mode="upsert", keys=["id"])
    sink.check(NUMBERS)
    committable = my.pre_commit(sink, NUMBERS, [(1, 1.25)])
    my.run("ALTER TABLE notes ENGINE=MyISAM")
    with pytest.raises(ConfigurationError, match=UNSAFE):
        my.commit(sink, committable)
    [outcome] = sink.commit_all(Checkpoint("job", "l1", 0), [committable])
    assert re.search(f"{UNSAFE}.*rows are safe in the staging table", why_unknown(outcome))
    my.run("ALTER TABLE notes ENGINE=InnoDB")
    assert my.commit(sink, committable) == [CommitOutcome.COMMITTED]
    assert (my.run("SELECT * FROM t"), my.run("SELECT * FROM notes")) == ([(1, 1.25)], [(1,)])


ODD = {
    "pg": {
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
    },
    "my": {
        "a": ("decimal(65,30)", pa.decimal128(10, 2), Decimal("1.50")),
        "b": ("int(5) unsigned zerofill", pa.int64(), 3),
        "c": ("timestamp(3) NOT NULL", pa.timestamp("us", "UTC"), dt.datetime(2026, 1, 1, tzinfo=dt.timezone.utc)),
        "d": ("time", pa.time64("us"), dt.time(1)),
        "e": ("varchar(20) CHARACTER SET latin1 COLLATE latin1_german2_ci", pa.string(), "a"),
        "f": ("char(3)", pa.string(), "abc"),
        "g": ("bigint AUTO_INCREMENT PRIMARY KEY", pa.int64(), 3),
        "h": ("float", pa.float32(), 0.5),
        "i": ("enum('a','b''c') COLLATE utf8mb4_bin", pa.string(), "b'c"),
        "j": ("json", pa.string(), "{}"),
        "k": ("varbinary(20)", pa.binary(), b"a"),
        "l": ("set('a','b')", pa.string(), "a,b"),
        "m": ("tinytext", pa.string(), "a"),
        "n": ("boolean", pa.int8(), 1),
        "o": ("datetime DEFAULT current_timestamp ON UPDATE current_timestamp", pa.timestamp("us"), NOON),
    },
}


def test_a_table_that_was_not_changed_is_not_taken_for_one_that_was(server: Server) -> None:
    odd = ODD[server.kind]
    server.run(f"CREATE TABLE t ({', '.join(f'{name} {kind}' for name, (kind, _, _) in odd.items())})")
    schema = pa.schema([(name, kind) for name, (_, kind, _) in odd.items()])
    sink = server.sink("t", strategy="staged")
    sink.check(schema)
    committable = server.pre_commit(sink, schema, [[value for *_, value in odd.values()]])
    sink.validate_all(Checkpoint("job", "l1", 0), [committable])
    assert server.sink("t", strategy="staged").commit_all(Checkpoint("job", "l1", 0), [committable]) == [
        CommitOutcome.COMMITTED
    ]
    assert server.run("SELECT count(*) FROM t") == [(1,)]
