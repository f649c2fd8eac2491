"""SqlAlchemySink on servers: strategies, upserts, what they refuse, and a Spark stream that is killed."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import sqlalchemy as sa

from coordinator import Step
from sinks.errors import BadValue, ConfigurationError, TransactionBlocked
from sinks.sqlalchemy import SqlAlchemySink
from sinks.testing import Hooked
from sinks.testing.driver import die
from sinks.testing.servers.postgres import PostgresService
from sinks.transaction import CommitState
from tests.spark.job import KILLED, KillGroupAt, Once, SparkJob, write_input
from tests.sqlalchemy_sink.test_sink import ORDERS, STOCK, Play


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


def test_two_prepared_rows_of_one_key_block_for_a_bounded_time(pg: Server) -> None:
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


@pytest.mark.large
def test_a_spark_stream_killed_at_the_worst_moments(tmp_path: Path) -> None:
    """Into SQLite: after pre-commit, after the decision, and a Python worker between its COMMIT and its ack."""
    ids = write_input(tmp_path / "input")
    db = Play(tmp_path / "shop.db")
    sink = SqlAlchemySink(db.url, "orders", create_table=True)
    assert SparkJob(tmp_path, [sink], listeners=[KillGroupAt(Step.PRE_COMMITTED, 0)]).run() == KILLED
    assert SparkJob(tmp_path, [sink], listeners=[KillGroupAt(Step.COMPLETE, 1)]).run() == KILLED
    assert db.run("SELECT count(*) FROM tpc_ledger WHERE committed IS NULL") == [(3,)]
    worker = Hooked(sink, "pre_commit", after=True, hook=Once(tmp_path / "killed", die))
    job = SparkJob(tmp_path, [worker])
    assert job.run() == 0, job.output()
    assert (tmp_path / "killed").exists()
    assert Counter(row[0] for row in db.run("SELECT id FROM orders")) == Counter(ids)
    assert db.run("SELECT count(*) FROM tpc_ledger WHERE committed IS NULL") == [(0,)]


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
