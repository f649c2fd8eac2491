"""SqlAlchemySink on SQLite: types, upserts, what is refused and how it is told."""

from __future__ import annotations

import datetime as dt
import itertools
import pickle
import sqlite3
from collections.abc import Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pytest
import sqlalchemy as sa

from sinks import Checkpoint, CommitOutcome, Committable, TransactionContext
from sinks.arrow.convert import RefusedValue
from sinks.errors import BadValue, ConfigurationError, SchemaMismatch, SinkError, TransactionBlocked, TransactionEnded
from sinks.sqlalchemy import SqlAlchemySink
from sinks.sqlalchemy.staging import SqlAlchemyStaging
from sinks.sqlalchemy.types import SqlAlchemyColumn
from sinks.testing.lines import watched
from sinks.testing.table import context, why_unknown
from sinks.transaction import CommitState, Fingerprint, TransactionId

ORDERS = pa.schema([pa.field("id", pa.int64()), pa.field("name", pa.string())])
STOCK = pa.schema(
    [
        pa.field("sku", pa.string(), nullable=False),
        pa.field("pieces", pa.int32()),
        pa.field("at", pa.int64()),
        pa.field("gone", pa.bool_()),
    ]
)
_attempts = itertools.count()


class Play:
    """A SQLite file, read past the sink, and what coordinator and tasks do with a sink."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.url = f"sqlite:///{file}"
        self.sinks: list[SqlAlchemySink] = []

    def sink(self, table: str = "orders", url: str | None = None, **options: Any) -> SqlAlchemySink:
        sink = SqlAlchemySink(url or self.url, table, **options)
        self.sinks.append(sink)
        return sink

    def run(self, statement: str, *parameters: Any) -> list[Any]:
        connection = sqlite3.connect(self.file)
        try:
            with connection:
                return connection.execute(statement, parameters).fetchall()
        finally:
            connection.close()

    def pre_commit(self, sink: SqlAlchemySink, schema: pa.Schema, rows: Sequence[Any], subtask: int = 0) -> Committable:
        attempt = next(_attempts)
        name = TransactionId("job", "l1", 0, sink.name, subtask, 1, 0, 0, attempt)
        transaction = sink.begin_transaction(
            TransactionContext("job", "l1", 0, sink.name, subtask, f"a{attempt}", schema, str(name))
        )
        try:
            sink.write(
                transaction,
                pa.RecordBatch.from_pylist([dict(zip(schema.names, row, strict=True)) for row in rows], schema),
            )
            return sink.snapshot_state(transaction).of(sink.name, subtask, Fingerprint(len(rows)))
        except BaseException:
            sink.rollback(transaction)
            raise

    def commit(self, sink: SqlAlchemySink, *committables: Committable) -> list[CommitOutcome]:
        outcomes = sink.commit_all(Checkpoint("job", "l1", 0), committables)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
        return [outcome for outcome in outcomes if isinstance(outcome, CommitOutcome)]

    def write(self, sink: SqlAlchemySink, schema: pa.Schema, *partitions: Sequence[Any]) -> None:
        sink.check(schema)
        committables = [self.pre_commit(sink, schema, rows, n) for n, rows in enumerate(partitions)]
        sink.validate_all(Checkpoint("job", "l1", 0), committables)
        assert self.commit(sink, *committables) == [CommitOutcome.COMMITTED] * len(partitions)


@pytest.fixture
def db(tmp_path: Path) -> Iterator[Play]:
    play = Play(tmp_path / "shop.db")
    play.run("CREATE TABLE orders (id bigint NOT NULL, name varchar(100))")
    yield play
    for sink in play.sinks:
        sink.close()


# ---------------------------------------------------------------------- types
def test_types_come_back_as_they_went_in(db: Play) -> None:
    moment = dt.datetime(2024, 2, 29, 23, 59, 59, 999999)
    values: dict[str, tuple[pa.DataType, Any]] = {
        "b": (pa.bool_(), True),
        "i8": (pa.int8(), -128),
        "i16": (pa.int16(), 32767),
        "i32": (pa.int32(), -(2**31)),
        "i64": (pa.int64(), 2**63 - 1),
        "f32": (pa.float32(), 0.5),
        "f64": (pa.float64(), 1e300),
        "d": (pa.decimal128(15, 2), Decimal("1234567890123.45")),
        "s": (pa.string(), "ü😀'\"%:x"),
        "raw": (pa.binary(), b"\x00\xff"),
        "day": (pa.date32(), dt.date(1, 1, 1)),
        "wall": (pa.timestamp("us"), moment),
        "time": (pa.time64("ns"), dt.time(1, 2, 3, 4)),
        "odd name: (%s)": (pa.int32(), 7),
    }
    schema = pa.schema([pa.field(name, kind) for name, (kind, _) in values.items()])
    row = [value for _, value in values.values()]
    db.write(db.sink("kinds", create_table=True), schema, [row, [None] * len(row)])
    engine = sa.create_engine(db.url, poolclass=sa.NullPool)
    with engine.connect() as connection:
        table = sa.Table("kinds", sa.MetaData(), autoload_with=connection)
        types = {"d": sa.Numeric(15, 2, asdecimal=False)}
        query = sa.select(*(sa.type_coerce(c, types.get(c.name, c.type)) for c in table.columns))
        first, second = connection.execute(query).fetchall()
    assert [Decimal(str(v)) if isinstance(e, Decimal) else v for v, e in zip(first, row, strict=True)] == row
    assert list(second) == [None] * len(row)


def test_a_timestamp_is_stored_in_utc(db: Play) -> None:
    schema = pa.schema([pa.field("at", pa.timestamp("us", "Europe/Berlin"))])
    db.write(db.sink("moments", create_table=True), schema, [[dt.datetime(2024, 7, 1, tzinfo=dt.timezone.utc)]])
    assert db.run("SELECT at FROM moments") == [("2024-07-01 00:00:00.000000",)]


def test_nested_values_are_json_in_json_and_text_columns(db: Play) -> None:
    kind = pa.struct([("n", pa.decimal128(20, 2)), ("tags", pa.list_(pa.string()))])
    schema = pa.schema(
        [pa.field("a", kind), pa.field("b", pa.map_(pa.string(), pa.int32())), pa.field("c", pa.string())]
    )
    db.run("CREATE TABLE docs (a json, b text, c json)")
    db.write(db.sink("docs"), schema, [[{"n": Decimal("1.10"), "tags": ["ü"]}, [("k", 1)], '{"as": "given"}']])
    assert db.run("SELECT a, b, c FROM docs") == [('{"n":1.10,"tags":["ü"]}', '{"k":1}', '{"as": "given"}')]


def test_a_null_is_no_json_text(db: Play) -> None:
    db.run("CREATE TABLE t (id integer, j json)")
    schema = pa.schema([("id", pa.int64()), ("j", pa.struct([("a", pa.int64())]))])
    sink = db.sink("t")
    sink.check(schema)
    committable = db.pre_commit(sink, schema, [(1, None), (2, {"a": None})])
    assert [outcome.state for outcome in db.commit(sink, committable)] == [CommitState.COMMITTED]
    assert db.run("SELECT id, j FROM t ORDER BY id") == [(1, None), (2, '{"a":null}')]


@pytest.mark.parametrize("reference", ["", "REFERENCES orders (id)"])
def test_a_null_never_becomes_the_next_number(db: Play, reference: str) -> None:
    db.run(f"CREATE TABLE t (id integer PRIMARY KEY {reference}, name text)")
    sink = db.sink("t")
    sink.check(ORDERS)
    with pytest.raises(BadValue, match=r'row 2, column "id": NULL in a column that takes none'):
        db.pre_commit(sink, ORDERS, [(1, "a"), (None, "b")])


def test_what_sqlite_would_alter_is_refused(db: Play) -> None:
    schema = pa.schema([pa.field("id", pa.int64()), pa.field("x", pa.float64())])
    sink = db.sink("numbers", create_table=True)
    sink.check(schema)
    with pytest.raises(BadValue, match=r'row 2, column "x": nan would become NULL in SQLite \(the row begins id=2\)'):
        db.pre_commit(sink, schema, [[1, 1.5], [2, float("nan")]])
    with pytest.raises(SchemaMismatch, match="SQLite keeps 15 digits"):
        db.sink("wide", create_table=True).check(pa.schema([pa.field("d", pa.decimal128(38, 10))]))
    db.run("CREATE TABLE doubles (n numeric(20), j json)")
    schema = pa.schema([pa.field("n", pa.int64()), pa.field("j", pa.string())])
    sink = db.sink("doubles")
    sink.check(schema)
    for row, refusal in (
        ((2**53 + 1, None), "9007199254740993 would be rounded to a double"),
        ((-(2**53) - 1, None), "-9007199254740993 would be rounded to a double"),
        ((1, " 12345678901234567891"), "is a number by itself, which SQLite would make a double"),
    ):
        with pytest.raises(BadValue, match=refusal):
            db.pre_commit(sink, schema, [row])
    rows = [(2**53, '{"n": 1.10}'), (-(2**63), "null")]
    db.write(sink, schema, rows)
    assert db.run("SELECT n, j FROM doubles") == rows


def test_the_digits_of_a_sqlite_type_are_no_zone(db: Play) -> None:
    db.run("CREATE TABLE times (a datetime(6), b time(3))")
    schema = pa.schema([("a", pa.timestamp("us")), ("b", pa.time64("us"))])
    db.write(db.sink("times"), schema, [[dt.datetime(2024, 7, 1, 12), dt.time(1, 2, 3)]])
    assert db.run("SELECT a, b FROM times") == [("2024-07-01 12:00:00.000000", "01:02:03.000000")]


def test_a_number_is_no_json(db: Play) -> None:
    """A JSON column of SQLite makes a double of it."""
    db.run("CREATE TABLE docs (j json)")
    for kind in (pa.decimal128(38, 18), pa.int64(), pa.float64(), pa.binary()):
        with pytest.raises(SchemaMismatch, match="SQLite makes doubles of numbers in it"):
            db.sink("docs").check(pa.schema([("j", kind)]))


@pytest.mark.parametrize(
    ("arrow", "kind", "refusal"),
    [
        (pa.timestamp("us"), sa.DateTime(timezone=True), "a wall clock is no point in time"),
        (pa.time64("us"), sa.Time(timezone=True), "a time of day in Spark has no zone"),
    ],
)
def test_what_other_databases_would_take_for_something_else_is_refused(
    arrow: pa.DataType, kind: sa.types.TypeEngine[Any], refusal: str
) -> None:
    with pytest.raises(SchemaMismatch, match=refusal):
        SqlAlchemyColumn.of("c", kind, "postgresql").conversion(arrow)


def test_a_column_of_more_digits_than_arrow_has() -> None:
    values = pa.array([Decimal("1.5"), Decimal("2.345")], pa.decimal128(38, 10))
    converted = SqlAlchemyColumn.of("c", sa.Numeric(100, 2), "postgresql").conversion(values.type)
    assert converted(values[:1]).to_pylist() == [Decimal("1.5")]
    with pytest.raises(RefusedValue, match="would be rounded"):
        converted(values)


# ---------------------------------------------------------------------- set-up
def test_a_missing_table_is_named(db: Play) -> None:
    with pytest.raises(ConfigurationError, match=r"no table order at .*create_table=True"):
        db.sink("order").check(ORDERS)


def test_all_mismatches_are_told_at_once(db: Play) -> None:
    db.run("CREATE TABLE wrong (id bigint NOT NULL, day date, must int NOT NULL)")
    schema = pa.schema([pa.field("id", pa.string()), pa.field("day", pa.int32()), pa.field("Day", pa.date32())])
    with pytest.raises(SchemaMismatch) as caught:
        db.sink("wrong").check(schema)
    for part in ['column "id": string does not go into BIGINT', 'column "day"', '(there is "day"', 'column "must"']:
        assert part in str(caught.value)


def test_an_upsert_needs_a_unique_index(db: Play) -> None:
    with pytest.raises(ConfigurationError, match=r"upsert by \(id\) needs a unique index"):
        db.sink(mode="upsert", keys=["id"]).check(ORDERS)
    db.run("CREATE UNIQUE INDEX by_id ON orders (id)")
    db.sink(mode="upsert", keys=["id"]).check(ORDERS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "upsert"}, "needs keys"),
        ({"keys": ["id"]}, 'belong to mode="upsert"'),
        ({"url": "mysql://u:secret@h/d"}, "use sinks.mysql.MySQLSink"),
        ({"url": "no url:secret@"}, "cannot read the URL"),
        ({"url": "nosuchdb://u:secret@h/d"}, "no dialect or driver"),
        ({"url": "postgresql+psycopg://u:my@secret@h/d"}, r"host of the URL holds an '@': write '@', .* as %40"),
        ({"url": "sqlite://"}, "in memory"),
    ],
)
def test_options_that_cannot_be_meant(db: Play, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        db.sink(**options)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"isolation_level": "AUTOCOMMIT"},
        {"isolation_level": "read_uncommitted"},
        {"execution_options": {"isolation_level": "AUTOCOMMIT"}},
    ],
)
def test_an_engine_without_transactions_is_refused(db: Play, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="the sink has no transactions"):
        db.sink(engine_options=options)
    db.sink(engine_options={"isolation_level": "SERIALIZABLE"}).check(ORDERS)


def test_a_password_is_never_shown() -> None:
    sink = SqlAlchemySink("postgresql+psycopg://app:s3cret@127.0.0.1:1/shop?connect_timeout=2", "orders")
    with pytest.raises(ConfigurationError, match=r"app:\*\*\*@127.0.0.1:1/shop") as caught:
        sink.check(ORDERS)
    sink.close()
    assert "s3cret" not in f"{caught.value} {sink!r}"


def test_a_table_that_is_no_ledger_is_refused(db: Play) -> None:
    with pytest.raises(ConfigurationError, match="orders exists and is not a ledger"):
        list(db.sink(ledger="orders").in_doubt("job"))
    with pytest.raises(ConfigurationError, match="orders exists and is not a ledger"):
        db.sink(ledger="orders").check(ORDERS)


# ---------------------------------------------------------------------- rows
def test_rows_of_many_chunks_and_partitions_come_once(db: Play) -> None:
    db.write(db.sink(), ORDERS, [(n, "x") for n in range(2500)], [(n, "y") for n in range(2500, 2503)])
    assert [row[0] for row in db.run("SELECT id FROM orders ORDER BY id")] == list(range(2503))
    assert db.run("SELECT name FROM sqlite_master WHERE name GLOB 'tpc_????????????????????*'") == []


@pytest.mark.large
def test_more_partitions_than_sqlite_takes_tables_in_one_statement(db: Play) -> None:
    db.write(db.sink(), ORDERS, *([(n, "a")] for n in range(501)))
    assert db.run("SELECT count(*), count(DISTINCT id) FROM orders") == [(501, 501)]


def test_a_row_that_the_staging_table_refuses_fails_the_task(db: Play) -> None:
    sink = db.sink()
    sink.check(ORDERS)
    with pytest.raises(BadValue, match=r"partition 0 of checkpoint 0: row 2, column \"id\": NULL"):
        db.pre_commit(sink, ORDERS, [(1, "a"), (None, "b")])
    assert list(sink.in_doubt("job")) == []


def test_what_only_the_target_refuses_fails_the_checkpoint_before_the_decision(db: Play) -> None:
    db.run("CREATE UNIQUE INDEX by_id ON orders (id)")
    db.run("INSERT INTO orders VALUES (1, 'old')")
    sink = db.sink()
    sink.check(ORDERS)
    committable = db.pre_commit(sink, ORDERS, [(1, "new")])
    with pytest.raises(BadValue, match=r"table orders: checkpoint 0 was refused: UNIQUE constraint failed: orders.id"):
        sink.validate_all(Checkpoint("job", "l1", 0), [committable])
    outcomes = sink.commit_all(Checkpoint("job", "l1", 0), [committable])
    assert "rows are safe in the staging table" in why_unknown(outcomes[0])
    db.run("DELETE FROM orders")
    assert db.commit(sink, committable) == [CommitOutcome.COMMITTED]


def test_at_least_once_moves_rows_directly(db: Play) -> None:
    sink = db.sink()
    sink.check(ORDERS)
    name = str(TransactionId("job", "l1", 0, sink.name, 0, 1, 0, 0, 1))
    transaction = sink.begin_transaction(TransactionContext("job", "l1", 0, sink.name, 0, "a", ORDERS, name))
    sink.write(transaction, pa.RecordBatch.from_pylist([{"id": 1, "name": "a"}], ORDERS))
    sink.commit_directly(transaction)
    assert db.run("SELECT * FROM orders") == [(1, "a")]
    assert list(sink.in_doubt("job")) == []


@pytest.mark.parametrize("clause", ["IGNORE", "REPLACE", "ABORT"])
def test_a_constraint_of_sqlite_by_which_rows_vanish_is_refused(db: Play, clause: str) -> None:
    db.run(f"CREATE TABLE stock (sku TEXT PRIMARY KEY, ean TEXT UNIQUE on  conflict {clause})")
    schema = pa.schema([("sku", pa.string()), ("ean", pa.string())])
    if clause == "ABORT":
        db.write(db.sink("Stock"), schema, [("a", "1")])
    else:
        with pytest.raises(ConfigurationError, match=f"on  conflict {clause}, by which rows vanish"):
            db.sink("Stock").check(schema)


# ---------------------------------------------------------------------- upsert
@pytest.fixture
def stock(db: Play) -> Play:
    db.run("CREATE TABLE stock (sku varchar(20) PRIMARY KEY, pieces int, at bigint)")
    return db


UPSERT: dict[str, Any] = {"mode": "upsert", "keys": ["sku"]}


def test_the_last_change_of_a_key_wins_over_all_partitions(stock: Play) -> None:
    stock.run("INSERT INTO stock VALUES ('a', 1, 1), ('untouched', 9, 9)")
    sink = stock.sink("stock", **UPSERT, order_by="at", order_by_nulls="first", delete_marker="gone")
    late, early = [("a", 3, 30, False), ("b", 1, 10, False)], [("a", 2, 20, None), ("b", 2, None, False)]
    stock.write(sink, STOCK, late, early)
    assert stock.run("SELECT * FROM stock ORDER BY sku") == [("a", 3, 30), ("b", 1, 10), ("untouched", 9, 9)]


def test_a_marked_row_deletes(stock: Play) -> None:
    stock.run("INSERT INTO stock VALUES ('a', 1, 1), ('b', 2, 1)")
    sink = stock.sink("stock", **UPSERT, order_by="at", delete_marker="gone")
    rows = [("a", None, 5, True), ("b", None, 5, True), ("b", 7, 6, False), ("c", 1, 5, False), ("c", 1, 5, True)]
    stock.write(sink, STOCK, rows)
    assert stock.run("SELECT * FROM stock ORDER BY sku") == [("b", 7, 6)]


@pytest.mark.parametrize(
    "changes",
    [
        [("A", 2, 2, False), ("a", 1, 1, False)],
        [("A", 2, 2, False), ("a", None, 1, True)],
        [("A", 1, 2, True), ("a", 1, 1, False)],
    ],
)
def test_keys_that_are_equal_in_the_table_alone(db: Play, changes: list[Any]) -> None:
    db.run("CREATE TABLE stock (sku text COLLATE nocase PRIMARY KEY, pieces int, at bigint)")
    db.run("INSERT INTO stock VALUES ('a', 0, 0)")
    sink = db.sink("stock", **UPSERT, order_by="at", delete_marker="gone")
    db.write(sink, STOCK, changes)
    assert db.run("SELECT * FROM stock") == [row[:3] for row in changes[:1] if not row[3]]


def test_an_order_column_that_the_table_has_not(stock: Play) -> None:
    stock.run("ALTER TABLE stock DROP COLUMN at")
    sink = stock.sink("stock", **UPSERT, order_by="at", delete_marker="gone")
    stock.write(sink, STOCK, [("a", 2, 2, False), ("a", 1, 1, False)])
    assert stock.run("SELECT * FROM stock") == [("a", 2)]


def test_keys_of_several_columns(db: Play) -> None:
    schema = pa.schema([pa.field("x", pa.int32()), pa.field("y", pa.int32()), pa.field("v", pa.string())])
    sink = db.sink("grid", mode="upsert", keys=["x", "y"], create_table=True)
    db.write(sink, schema, [(1, 1, "a"), (1, 2, "b")], [(2, 1, "c")])
    db.write(sink, schema, [(1, 2, "B")])
    assert db.run("SELECT * FROM grid ORDER BY x, y") == [(1, 1, "a"), (1, 2, "B"), (2, 1, "c")]


@pytest.mark.parametrize("gone", [False, True])
def test_a_change_without_an_order_is_a_bad_row(stock: Play, gone: bool) -> None:
    sink = stock.sink("stock", **UPSERT, order_by="at", delete_marker="gone")
    with pytest.raises(BadValue, match=r'row 2, column "at": NULL in the column of order_by.* begins sku=.b'):
        stock.write(sink, STOCK, [("a", 1, 1, False), ("b", 1, None, gone)])


@pytest.mark.parametrize("at", [7, None])
def test_of_equal_changes_the_last_in_its_partition_wins(stock: Play, at: int | None) -> None:
    sink = stock.sink("stock", **UPSERT, order_by="at", order_by_nulls="first", delete_marker="gone")
    updates = [(sku, n, at, False) for n in range(1, 9) for sku in ("a", "b", "c")]
    stock.write(
        sink, STOCK, [*updates, ("b", 1, at, True), ("c", 1, at, True), ("c", 9, at, None)], [("d", 1, 1, False)]
    )
    assert stock.run("SELECT * FROM stock ORDER BY sku") == [("a", 8, at), ("c", 9, at), ("d", 1, 1)]


def test_equal_changes_of_two_partitions_have_to_be_the_same(stock: Play) -> None:
    equal_changes_of_two_partitions(stock)


def equal_changes_of_two_partitions(db: Any) -> None:
    """Into an empty table `stock`. Nobody knows which partition's is newer, unless the source only repeats itself."""
    sink = db.sink("stock", **UPSERT, order_by="at", delete_marker="gone")
    first = [("a", 1, 5, False), ("b", 1, 5, True), ("c", 1, 5, False), ("c", 2, 5, False), ("d", 1, 5, False)]
    second = [("d", 2, 6, False), ("c", 2, 5, None), ("b", 9, 5, True), ("a", 1, 5, False), ("d", 7, 5, False)]
    db.write(sink, STOCK, first, second, [("e", None, 1, False)])
    expected = [("a", 1, 5), ("c", 2, 5), ("d", 2, 6), ("e", None, 1)]
    assert db.run("SELECT sku, pieces, at FROM stock ORDER BY sku") == expected
    for other in [("a", 2, 6, False), ("a", None, 6, False), ("a", 1, 6, True)]:
        told = r"2 partitions have different changes of the key \(sku\) = \(a\), all with at = 6"
        with pytest.raises(BadValue, match=told):
            db.write(sink, STOCK, [("b", 1, 7, False), ("a", 1, 6, False)], [other])
    assert db.run("SELECT sku, pieces, at FROM stock ORDER BY sku") == expected


def test_a_key_twice_without_order_is_an_error(stock: Play) -> None:
    sink = stock.sink("stock", **UPSERT)
    schema = pa.schema([field for field in STOCK if field.name != "gone"])
    sink.check(schema)
    committables = [stock.pre_commit(sink, schema, [("a", n, n)], n) for n in range(2)]
    with pytest.raises(BadValue, match=r"no order_by=: \(sku\) = \(a\) comes 2 times in the batch"):
        sink.validate_all(Checkpoint("job", "l1", 0), committables)


# ---------------------------------------------------------------------- proofs
def test_siblings_of_a_lost_participant_are_held(db: Play) -> None:
    sink = db.sink()
    sink.check(ORDERS)
    lost, held = (db.pre_commit(sink, ORDERS, [(n, "x")], n) for n in range(2))
    sink.abort(lost.transaction)
    states = [outcome.state for outcome in db.commit(sink, lost, held)]
    assert states == [CommitState.LOST, CommitState.HELD]
    assert db.run("SELECT * FROM orders") == []
    again = db.pre_commit(sink, ORDERS, [(0, "x")], 0)
    assert db.commit(sink, again, held) == [CommitOutcome.COMMITTED] * 2


def test_text_that_is_not_utf8_is_told(db: Play) -> None:
    sink = db.sink()
    sink.check(ORDERS)
    offsets, data = pa.array([0, 1], pa.int32()).buffers()[1], pa.py_buffer(b"\xff")
    bad = pa.Array.from_buffers(pa.string(), 1, [None, offsets, data])
    transaction = sink.begin_transaction(context(sink, schema=ORDERS))
    with pytest.raises(BadValue, match='row 1, column "name": the text is not UTF-8'):
        sink.write(transaction, pa.RecordBatch.from_arrays([pa.array([1]), bad], schema=ORDERS))
    sink.rollback(transaction)


def test_keys_that_the_index_takes_for_one_are_changed_as_one(db: Play) -> None:
    db.run("CREATE TABLE stock (sku text COLLATE NOCASE PRIMARY KEY, pieces int, at bigint)")
    sink = db.sink("stock", mode="upsert", keys=["sku"], order_by="at", delete_marker="gone", keep_newer=True)
    db.write(sink, STOCK, [("a", 1, 1, False), ("b", 1, 1, False)])
    db.write(sink, STOCK, [("A", 2, 2, False), ("B", 2, 2, True)])
    db.write(sink, STOCK, [("a", 1, 1, False)])
    assert db.run("SELECT * FROM stock") == [("A", 2, 2)]
    db.write(sink, STOCK, [("a", 3, 3, False)], [("A", 4, 4, False)])
    assert db.run("SELECT * FROM stock") == [("A", 4, 4)]


@pytest.mark.parametrize("keep_newer", [False, True])
def test_keys_that_their_index_tells_apart_are_two(db: Play, keep_newer: bool) -> None:
    db.run("CREATE TABLE stock (sku text PRIMARY KEY, pieces int, at bigint, UNIQUE (sku COLLATE NOCASE, pieces))")
    sink = db.sink("stock", mode="upsert", keys=["sku"], order_by="at", delete_marker="gone", keep_newer=keep_newer)
    db.write(sink, STOCK, [("a", 1, 5, False), ("A", 2, 6, False)])
    db.write(sink, STOCK, [("A", 3, 7, False), ("a", 4, 4, None)] if keep_newer else [("A", 3, 7, False)])
    assert sorted(db.run("SELECT * FROM stock")) == [("A", 3, 7), ("a", 1, 5)]


@pytest.mark.parametrize("keep_newer", [False, True])
@pytest.mark.parametrize(("column", "index"), [("NOCASE", "BINARY"), ("BINARY", "NOCASE")])
def test_keys_are_compared_as_the_index_does(db: Play, column: str, index: str, keep_newer: bool) -> None:
    db.run(f"CREATE TABLE stock (sku text COLLATE {column} NOT NULL, pieces int, at bigint)")
    db.run(f"CREATE UNIQUE INDEX by_sku ON stock (sku COLLATE {index})")
    sink = db.sink("stock", mode="upsert", keys=["sku"], order_by="at", keep_newer=keep_newer)
    old, new = ("a", 1, 5), ("A", 2, 4 if keep_newer else 6)
    for row in (old, new):
        db.write(sink, STOCK.remove(3), [row])
    expected = [new, old] if index == "BINARY" else [old if keep_newer else new]
    assert sorted(db.run("SELECT * FROM stock")) == expected


def test_a_partial_index_does_not_tell_keys_apart(db: Play) -> None:
    """Rows outside of it may have one key."""
    db.run("CREATE TABLE stock (sku text, pieces int, at bigint)")
    db.run("CREATE UNIQUE INDEX there ON stock (sku) WHERE pieces > 0")
    with pytest.raises(ConfigurationError, match="needs a unique index"):
        db.sink("stock", mode="upsert", keys=["sku"]).check(STOCK.remove(3))


@pytest.mark.parametrize("mode", ["append", "upsert"])
def test_a_deferred_foreign_key_is_judged_before_the_decision(db: Play, mode: str) -> None:
    """What was broken before is let be, and a foreign key of another table to what is no key."""
    db.run("CREATE TABLE wrong (id int REFERENCES orders (id))")
    db.run("INSERT INTO wrong VALUES (1)")
    db.run("CREATE TABLE stock (sku text PRIMARY KEY, pieces int, at bigint)")
    db.run("CREATE TABLE items (sku text REFERENCES stock DEFERRABLE INITIALLY DEFERRED, n int)")
    db.run("INSERT INTO items VALUES ('nothing', 1), ('a', 2)")
    db.run("INSERT INTO stock VALUES ('a', 1, 1)")
    sink, schema = db.sink("items"), pa.schema([STOCK.field("sku")])
    good, bad = ("a", 2, 2, False), ("b", 2, 2, False)
    if mode == "upsert":
        sink, schema = db.sink("stock", mode=mode, keys=["sku"], order_by="at", delete_marker="gone"), STOCK
        bad = ("a", 2, 2, True)
    columns = len(schema)
    db.write(sink, schema, [good[:columns]])
    with pytest.raises(BadValue, match="foreign key"):
        db.write(sink, schema, [bad[:columns]])


def test_words_of_a_row_are_no_words_of_the_database(db: Play) -> None:
    db.run("CREATE TRIGGER judge BEFORE INSERT ON orders BEGIN SELECT RAISE(ABORT, 'database is locked'); END")
    with pytest.raises(BadValue):
        db.write(db.sink(), ORDERS, [(1, "a")])


def test_an_error_that_is_about_no_row_shows_no_statement(db: Play) -> None:
    sink = db.sink()
    sink.check(ORDERS)
    committable = db.pre_commit(sink, ORDERS, [(1, "a")])
    sink.close()
    db.run("ALTER TABLE tpc_ledger RENAME TO elsewhere")
    [outcome] = sink.commit_all(Checkpoint("job", "l1", 0), [committable])
    assert "no such table: tpc_ledger" in str(outcome)
    assert "SELECT" not in str(outcome)


def test_with_keep_newer_an_older_change_of_a_later_batch_is_dropped(db: Play) -> None:
    db.run("CREATE TABLE stock (sku text PRIMARY KEY, pieces int, at bigint)")
    options: dict[str, Any] = {"order_by": "at", "order_by_nulls": "first", "delete_marker": "gone", "keep_newer": True}
    sink = db.sink("stock", **UPSERT, **options)
    db.write(sink, STOCK, [("a", 1, 5, False), ("b", 1, 5, False), ("c", 1, 5, False), ("d", 1, None, False)])
    later = [("a", 2, 4, False), ("b", 2, 4, True), ("c", 2, 5, False), ("d", 2, 1, False), ("c", 3, None, False)]
    db.write(sink, STOCK, later, [("e", 2, None, False)])
    expected = [("a", 1, 5), ("b", 1, 5), ("c", 2, 5), ("d", 2, 1), ("e", 2, None)]
    assert db.run("SELECT * FROM stock ORDER BY sku") == expected
    with pytest.raises(ConfigurationError, match="keep_newer=True needs order_by"):
        db.sink("stock", mode="upsert", keys=["sku"], keep_newer=True)


@pytest.mark.parametrize("options", [{}, {"mode": "upsert", "keys": ["id"], "order_by": "name"}], ids=str)
def test_staged_rows_that_somebody_changed_are_never_half_moved(db: Play, options: dict[str, Any]) -> None:
    db.run("CREATE UNIQUE INDEX by_id ON orders (id)")
    sink = db.sink(**options)
    sink.check(ORDERS)
    committable = db.pre_commit(sink, ORDERS, [(1, "a"), (2, "b")])
    db.run(f"DELETE FROM {committable.transaction['table']} WHERE id = 1")
    [outcome] = sink.commit_all(Checkpoint("job", "l1", 0), [committable])
    assert "hold 1 rows, and their tasks acknowledged 2" in why_unknown(outcome)
    assert db.run("SELECT * FROM orders") == []
    assert list(sink.in_doubt("job")) == [committable.transaction]


def test_moved_rows_are_not_moved_again_after_the_ledger_was_emptied(db: Play) -> None:
    """A reader kept their staging table from being dropped, and both tables of the ledger lost their rows."""
    sink = db.sink()
    sink.check(ORDERS)
    committable = db.pre_commit(sink, ORDERS, [(1, "a")])
    with patch.object(SqlAlchemyStaging, "drop", side_effect=sa.exc.OperationalError("DROP", (), Exception("locked"))):
        assert db.commit(sink, committable) == [CommitOutcome.COMMITTED]
    for table in ("tpc_ledger", "tpc_ledger_witness"):
        db.run(f"DELETE FROM {table} WHERE transaction_id <> 'ledger'")
    [outcome] = sink.commit_all(Checkpoint("job", "l1", 0), [committable])
    assert "or emptied the ledger" in why_unknown(outcome)
    assert db.run("SELECT * FROM orders") == [(1, "a")]


def test_what_could_not_be_dropped_is_dropped_by_the_next_sweep(db: Play) -> None:
    sink = db.sink()
    sink.check(ORDERS)
    committable = db.pre_commit(sink, ORDERS, [(1, "a")])
    with patch.object(SqlAlchemyStaging, "drop", side_effect=sa.exc.OperationalError("DROP", (), Exception("locked"))):
        assert db.commit(sink, committable) == [CommitOutcome.COMMITTED]
    assert db.run(f"SELECT count(*) FROM {committable.transaction['table']}") == [(0,)]
    assert list(sink.in_doubt("job")) == []
    assert db.run("SELECT name FROM sqlite_master WHERE name GLOB 'tpc_????????????????????*'") == []


def test_a_staging_table_that_somebody_alters_moves_no_nulls(db: Play) -> None:
    sink = db.sink()
    sink.check(ORDERS)
    committable = db.pre_commit(sink, ORDERS, [(1, "a")])
    db.run(f"ALTER TABLE {committable.transaction['table']} DROP COLUMN name")
    for driver in (sink, db.sink()):  # the driver that decided, and one that starts anew
        with pytest.raises(SinkError, match="was altered by somebody"):
            driver.validate_all(Checkpoint("job", "l1", 0), [committable])
        [outcome] = driver.commit_all(Checkpoint("job", "l1", 0), [committable])
        assert "was altered by somebody" in why_unknown(outcome)
    assert db.run("SELECT * FROM orders") == []


def test_a_staging_table_that_was_dropped_is_a_loss(db: Play) -> None:
    sink = db.sink()
    sink.check(ORDERS)
    committable = db.pre_commit(sink, ORDERS, [(1, "a")])
    db.run(f"DROP TABLE {committable.transaction['table']}")
    with pytest.raises(
        TransactionEnded, match=r"table orders: 1 of 1 staging tables of checkpoint 0 are gone\. Of tpc_"
    ):
        sink.validate_all(Checkpoint("job", "l1", 0), [committable])
    assert [outcome.state for outcome in db.commit(sink, committable)] == [CommitState.LOST]


def test_no_row_goes_into_another_table_than_it_was_written_for(db: Play) -> None:
    sink, elsewhere = db.sink(), db.sink("others", name="orders")
    db.run("CREATE TABLE others (id bigint NOT NULL, name varchar(100))")
    sink.check(ORDERS)
    committable = db.pre_commit(sink, ORDERS, [(1, "a")])
    (outcome,) = elsewhere.commit_all(Checkpoint("job", "l1", 0), [committable])
    assert "written for orders (append), and the sink writes to others (append) now" in why_unknown(outcome)
    assert db.commit(sink, committable) == [CommitOutcome.COMMITTED]
    assert elsewhere.commit_all(Checkpoint("job", "l1", 0), [committable]) == [CommitOutcome.COMMITTED]
    assert (db.run("SELECT id FROM orders"), db.run("SELECT id FROM others")) == ([(1,)], [])


@pytest.mark.parametrize("how", ["DROP TABLE", "DELETE FROM"])
def test_another_ledger_proves_nothing(db: Play, how: str) -> None:
    sink = db.sink()
    sink.check(ORDERS)
    committable = db.pre_commit(sink, ORDERS, [(1, "a")])
    assert db.commit(sink, committable) == [CommitOutcome.COMMITTED]
    db.run(f"{how} tpc_ledger")
    other = db.sink()
    (outcome,) = db.commit(other, committable)
    assert "not the one that was there at pre-commit" in why_unknown(outcome)
    assert db.run("SELECT count(*) FROM orders") == [(1,)]


def test_a_trigger_that_leaves_rows_out_is_refused_unless_it_was_there_at_the_start(db: Play) -> None:
    sink = db.sink()
    sink.check(ORDERS)
    committable = db.pre_commit(sink, ORDERS, [(1, "a")])
    db.run("CREATE TRIGGER skips BEFORE INSERT ON orders BEGIN SELECT RAISE(IGNORE); END")
    with pytest.raises(ConfigurationError, match="trigger skips is new"):
        sink.validate_all(Checkpoint("job", "l1", 0), [committable])
    [outcome] = sink.commit_all(Checkpoint("job", "l1", 0), [committable])
    assert "trigger skips is new" in why_unknown(outcome)
    db.run("DROP TRIGGER skips")
    assert db.commit(sink, committable) == [CommitOutcome.COMMITTED]
    assert db.run("SELECT * FROM orders") == [(1, "a")]


def test_what_is_staged_outlives_a_change_of_the_batch(db: Play) -> None:
    sink = db.sink()
    sink.check(ORDERS)
    committable = db.pre_commit(sink, ORDERS, [(1, "a")])
    restarted: SqlAlchemySink = pickle.loads(pickle.dumps(db.sink()))
    db.sinks.append(restarted)
    restarted.check(pa.schema([ORDERS.field("id")]))
    assert db.commit(restarted, committable) == [CommitOutcome.COMMITTED]
    assert db.run("SELECT * FROM orders") == [(1, "a")]


def test_a_replay_after_the_table_was_altered_moves_together_with_its_siblings(db: Play) -> None:
    def sink() -> SqlAlchemySink:
        sink = db.sink("stock", mode="upsert", keys=["sku"], order_by="at", create_table=True)
        sink.check(schema)
        return sink

    schema = pa.schema([STOCK.field(name) for name in ("sku", "pieces", "at")])
    earlier = db.pre_commit(sink(), schema, [("a", 2, 2), ("b", 1, 1)])
    db.run("DROP TABLE stock")
    db.run("CREATE TABLE stock (sku varchar(255) PRIMARY KEY, pieces integer NOT NULL, at bigint)")
    restarted = sink()
    replayed = db.pre_commit(restarted, schema, [("a", 1, 1)], subtask=1)
    assert db.commit(restarted, earlier, replayed) == [CommitOutcome.COMMITTED] * 2
    assert db.run("SELECT * FROM stock ORDER BY sku") == [("a", 2, 2), ("b", 1, 1)]


def test_old_rows_of_the_ledger_are_pruned(db: Play) -> None:
    sink = db.sink()
    db.write(sink, ORDERS, [(1, "a")])
    assert len(db.run("SELECT * FROM tpc_ledger")) == 2
    sink.purge(Checkpoint("job", "l1", 159, oldest_retained=101))
    assert len(db.run("SELECT * FROM tpc_ledger")) == 1


# ---------------------------------------------------------------------- locks
def test_a_locked_database_blocks_for_a_bounded_time(db: Play) -> None:
    sink = db.sink(url=f"{db.url}?timeout=0.2")
    sink.check(ORDERS)
    committable = db.pre_commit(sink, ORDERS, [(1, "a")])
    other = sqlite3.connect(db.file, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(TransactionBlocked, match="database is locked"):
        db.pre_commit(sink, ORDERS, [(2, "b")])
    (outcome,) = sink.commit_all(Checkpoint("job", "l1", 0), [committable])
    assert isinstance(outcome, Exception)  # asked again
    other.execute("ROLLBACK")
    other.close()
    assert db.commit(sink, committable) == [CommitOutcome.COMMITTED]


def test_whatever_line_of_begin_transaction_fails_nothing_stays_locked(db: Play) -> None:
    sink = db.sink()
    sink.check(ORDERS)

    def fail(number: int, *_: object) -> None:
        if number == stop:
            raise RuntimeError("stopped")

    for stop in itertools.count():  # noqa: B007 - `fail` looks at it
        try:
            with watched(sink, fail):
                transaction = sink.begin_transaction(context(sink, schema=ORDERS))
            break
        except RuntimeError:
            other = sqlite3.connect(db.file, isolation_level=None, timeout=0)
            other.execute("BEGIN IMMEDIATE")  # while the error still has the frames that it was raised in
            other.close()
    assert stop > 100
    sink.rollback(transaction)
    assert db.run("SELECT name FROM sqlite_master WHERE name GLOB 'tpc_[0-9a-f]*'") == []
