"""SqlAlchemySink on servers: strategies, upserts and what they refuse."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import sqlalchemy as sa

from sinks import Checkpoint, CommitOutcome
from sinks.errors import BadValue, ConfigurationError, TransactionBlocked
from sinks.sqlalchemy import database
from sinks.testing.servers.postgres import PostgresService
from sinks.testing.table import context, why_unknown
from sinks.transaction import CommitState
from tests.sqlalchemy_sink.test_sink import ORDERS, STOCK, Play

NOON = dt.datetime(2026, 1, 2, 12)


class Server(Play):
    def __init__(self, url: str) -> None:
        super().__init__(Path())
        self.url = url

    def run(self, statement: str, *parameters: Any) -> list[Any]:
        engine = sa.create_engine(self.url, poolclass=sa.NullPool)
        with engine.begin() as connection:
            result = connection.exec_driver_sql(statement)
            return [tuple(row) for row in result] if result.returns_rows else []

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()


@pytest.fixture
def pg(pg_database: str) -> Iterator[Server]:
    server = Server(pg_database.replace("postgresql://", "postgresql+psycopg://"))
    yield server
    server.close()


@pytest.fixture
def maria(mysql_database: str) -> Iterator[Server]:
    server = Server(mysql_database.replace("mysql://", "mysql+pymysql://"))
    yield server
    server.close()


@pytest.fixture(params=["pg", "maria"])
def server(request: pytest.FixtureRequest) -> Server:
    server: Server = request.getfixturevalue(request.param)
    return server


def test_auto_asks_the_server(pg: Server, postgres_unprepared: PostgresService) -> None:
    sink = pg.sink("orders", create_table=True)
    sink.check(ORDERS)
    assert list(pg.pre_commit(sink, ORDERS, [(1, "a")]).transaction) == ["xid"]
    with postgres_unprepared.database() as dsn:
        other = Server(dsn.replace("postgresql://", "postgresql+psycopg://"))
        sink = other.sink("orders", create_table=True)
        sink.check(ORDERS)
        assert list(other.pre_commit(sink, ORDERS, [(1, "a")]).transaction) == ["transaction_id", "staging"]
        with pytest.raises(ConfigurationError, match="switched on in the server"):
            other.sink("orders", strategy="two_phase").check(ORDERS)
        other.close()


def test_two_phase_on_mysql_points_to_its_own_sink(maria: Server) -> None:
    maria.run("CREATE TABLE orders (id bigint, name text)")
    with pytest.raises(ConfigurationError, match=r"not for mysql: use strategy=\"staged\" or sinks\.mysql\.MySQLSink"):
        maria.sink(strategy="two_phase").check(ORDERS)


def test_a_table_without_transactions_is_refused(maria: Server) -> None:
    maria.run("CREATE TABLE orders (id bigint, name text) ENGINE=MyISAM")
    with pytest.raises(ConfigurationError, match="its engine MyISAM has no transactions"):
        maria.sink().check(ORDERS)


def test_two_databases_of_one_server_are_told_apart(pg: Server, postgres: PostgresService) -> None:
    with postgres.database() as dsn:
        other = Server(dsn.replace("postgresql://", "postgresql+psycopg://"))
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


def test_two_prepared_rows_of_one_key_block_for_a_bounded_time(pg: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    shorter = tuple(statement.replace("'10s'", "'1s'") for statement in database._SESSION["postgresql"])
    monkeypatch.setitem(database._SESSION, "postgresql", shorter)
    pg.run("CREATE TABLE orders (id bigint PRIMARY KEY, name text)")
    sink = pg.sink(strategy="two_phase")
    sink.check(ORDERS)
    pg.pre_commit(sink, ORDERS, [(1, "a")])
    with pytest.raises(TransactionBlocked, match="lock timeout"):
        pg.pre_commit(sink, ORDERS, [(1, "b")], subtask=1)


def test_upserts_and_deletes(server: Server) -> None:
    options: dict[str, Any] = {"mode": "upsert", "keys": ["sku"], "order_by": "at", "delete_marker": "gone"}
    sink = server.sink("stock", **options, create_table=True)
    server.write(sink, STOCK, [("a", 1, 1, False), ("b", 1, 1, False)], [("a", 2, 2, False), ("c", 3, None, False)])
    server.write(sink, STOCK, [("b", None, 2, True), ("c", 4, 1, False)])
    assert server.run("SELECT sku, pieces, at FROM stock ORDER BY sku") == [("a", 2, 2), ("c", 4, 1)]


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
    got = [*first[:at], first[at].replace(tzinfo=dt.timezone.utc), *first[at + 1 :]]  # MariaDB has no zone, PG has UTC
    assert got == row
    assert list(second) == [None] * len(row)


def test_nested_values_are_json(server: Server) -> None:
    schema = pa.schema([("a", pa.struct([("n", pa.int32()), ("s", pa.string())])), ("b", pa.list_(pa.int32()))])
    server.write(server.sink("docs", create_table=True), schema, [[{"n": 1, "s": "ü"}, [1, 2]]])
    engine = sa.create_engine(server.url, poolclass=sa.NullPool)
    with engine.connect() as connection:
        table = sa.table("docs", sa.column("a", sa.JSON), sa.column("b", sa.JSON))
        row = connection.execute(sa.select(table)).one()
    assert [row.a, row.b] == [{"n": 1, "s": "ü"}, [1, 2]]


def test_a_value_that_the_column_refuses(server: Server) -> None:
    server.run("CREATE TABLE orders (id smallint NOT NULL, name varchar(3))")
    sink = server.sink(strategy="staged")
    sink.check(ORDERS)
    for row in [(40_000, "a"), (1, "abcd")]:
        with pytest.raises(BadValue, match="table orders: partition 0 of checkpoint 0, rows 1 to 1, was refused"):
            server.pre_commit(sink, ORDERS, [row])


ALTERED = {
    "enum": ("enum('a','2b')", pa.string(), "2", "is no member"),
    "set": ("set('a','b')", pa.string(), "3", "is no member"),
    "char": ("char(5)", pa.string(), "a ", "ends with a space"),
    "varchar": ("varchar(3)", pa.string(), "abc ", "more than 3 characters"),
    "binary": ("binary(4)", pa.binary(), b"ab", "is not 4 bytes long"),
}


@pytest.mark.parametrize("what", ALTERED)
def test_what_mariadb_would_alter_is_refused_with_column_and_row(maria: Server, what: str) -> None:
    kind, arrow, value, reason = ALTERED[what]
    maria.run(f"CREATE TABLE t (id bigint, v {kind}) ENGINE=InnoDB")
    schema = pa.schema([("id", pa.int64()), ("v", arrow)])
    sink = maria.sink("t")
    sink.check(schema)
    with pytest.raises(BadValue, match=f'row 1, column "v": .*{reason}'):
        maria.pre_commit(sink, schema, [(1, value)])


def test_a_zero_for_a_counter_is_a_zero(maria: Server) -> None:
    maria.run("CREATE TABLE t (id bigint PRIMARY KEY AUTO_INCREMENT, name text) ENGINE=InnoDB")
    sink = maria.sink("t")
    sink.check(ORDERS)
    committable = maria.pre_commit(sink, ORDERS, [(0, "a")])
    assert [one.state for one in maria.commit(sink, committable)] == [CommitState.COMMITTED]
    assert maria.run("SELECT id FROM t") == [(0,)]


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
WORDS = {"pg": {"wall": "timestamp", "single": "real"}, "maria": {"wall": "datetime", "single": "float"}}


@pytest.mark.parametrize("what", ROUNDED)
def test_rounding_is_refused_unless_it_is_allowed(server: Server, request: pytest.FixtureRequest, what: str) -> None:
    declared, arrow, value, rounded = ROUNDED[what]
    words = WORDS[request.node.callspec.params["server"]]
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
def test_what_compares_equal_to_a_member_is_none(maria: Server, value: str) -> None:
    maria.run("CREATE TABLE t (id bigint, v enum('a', 'b') COLLATE utf8mb4_general_ci)")
    schema = pa.schema([("id", pa.int64()), ("v", pa.string())])
    sink = maria.sink("t")
    sink.check(schema)
    with pytest.raises(BadValue, match=r'row 2, column "v": .*is no member'):
        maria.pre_commit(sink, schema, [(1, "a"), (2, value)])


@pytest.mark.parametrize("kind", ["enum", "set"])
def test_no_order_by_an_enumeration_of_mariadb(maria: Server, kind: str) -> None:
    maria.run(f"CREATE TABLE t (id bigint PRIMARY KEY, at {kind}('new', 'done'))")
    with pytest.raises(ConfigurationError, match=f"order_by names the column 'at', which is {kind}"):
        maria.sink("t", mode="upsert", keys=["id"], order_by="at").check(
            pa.schema([("id", pa.int64()), ("at", pa.string())])
        )


def test_an_empty_text_is_no_null_whatever_mode_the_server_is_in(maria: Server) -> None:
    maria.run("CREATE TABLE orders (id bigint NOT NULL, name varchar(100))")
    url = f"{maria.url}?init_command=SET sql_mode='EMPTY_STRING_IS_NULL,NO_BACKSLASH_ESCAPES', sql_select_limit=1"
    maria.write(maria.sink(url=url), ORDERS, [(1, ""), (2, "b")], [(3, "\\'c")])
    assert maria.run("SELECT * FROM orders ORDER BY id") == [(1, ""), (2, "b"), (3, "\\'c")]


# ---------------------------------------------------------------------- tables that change while the query runs
NUMBERS = pa.schema([("id", pa.int64()), ("v", pa.float64())])


def altered(server: Server, to: str) -> None:
    server.run(f"ALTER TABLE t {'MODIFY v' if 'pymysql' in server.url else 'ALTER v TYPE'} {to}")


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
    if "pymysql" in numbers.url:
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


def test_an_engine_without_transactions_is_refused_while_the_query_runs(maria: Server) -> None:
    maria.run("CREATE TABLE t (id bigint, v double)")
    sink = maria.sink("t")
    sink.check(NUMBERS)
    committable = maria.pre_commit(sink, NUMBERS, [(1, 1.25)])
    maria.run("ALTER TABLE t ENGINE=MyISAM")
    with pytest.raises(ConfigurationError, match="its engine is MyISAM, which has no transactions"):
        maria.commit(sink, committable)
    assert maria.run("SELECT * FROM t") == []


def test_a_null_does_not_become_the_next_number_of_a_new_counter(maria: Server) -> None:
    maria.run("CREATE TABLE t (id bigint, n bigint)")
    schema = pa.schema([("id", pa.int64()), ("n", pa.int64())])
    sink = maria.sink("t")
    sink.check(schema)
    committable = maria.pre_commit(sink, schema, [(1, 7), (2, None)])
    maria.run("ALTER TABLE t MODIFY n bigint NOT NULL AUTO_INCREMENT PRIMARY KEY")
    with pytest.raises(ConfigurationError, match='its column "n" takes no NULL, and rows have NULL there'):
        maria.commit(sink, committable)


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
    "maria": {
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


def test_a_table_that_was_not_changed_is_not_taken_for_one_that_was(
    server: Server, request: pytest.FixtureRequest
) -> None:
    odd = ODD[request.node.callspec.params["server"]]
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
