"""Which change of a key is the last one, and what one key is, as the server has it."""

from __future__ import annotations

import contextlib
from datetime import datetime, timezone
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pymysql
import pytest

from sinks.errors import BadValue, ConfigurationError
from sinks.mysql import MySQLSink
from sinks.testing.servers.mariadb import MariaDBServer
from sinks.testing.servers.mysql import MySQLService
from sinks.testing.table import COMMITTED, SCHEMA, batch, checkpoint, pre_commit
from tests.mysql.observer import Observer


@pytest.mark.parametrize("kind", ["double", "float"])
def test_negative_zero_is_the_key_zero(db: Observer, kind: str) -> None:
    """MariaDB groups them apart."""
    schema = pa.schema([("id", pa.float32()), ("note", pa.string())])
    db.run(f"CREATE TABLE notes (id {kind} PRIMARY KEY, note text)")
    rows = [{"id": 0.0, "note": "a"}, {"id": 1.5, "note": "b"}], [{"id": -0.0, "note": "c"}]
    upsert: dict[str, Any] = {"mode": "upsert", "keys": ["id"]}
    for options, rule in ((upsert, "two changes of one key"), ({}, "unique index")):
        with contextlib.closing(MySQLSink(db.dsn, "notes", strategy="staged", **options)) as sink:
            sink.check(schema)
            staged = [pre_commit(sink, batch(part, schema), subtask=n) for n, part in enumerate(rows)]
            with pytest.raises(BadValue, match=rf"{rule}.*\(id\) = \(-?0\.0\) comes 2 times"):
                sink.validate_all(checkpoint(), staged)


@pytest.mark.parametrize("kind", ["double", "float"])
def test_the_last_change_of_zero_is_one_with_either_sign(db: Observer, kind: str) -> None:
    schema = pa.schema([("id", pa.float32()), ("at", pa.int64())])
    db.run(f"CREATE TABLE notes (id {kind} PRIMARY KEY, at bigint)")
    rows = [[{"id": id, "at": n + 10 * part} for n, id in enumerate((0.0, 1.5, -0.0))] for part in range(2)]
    with contextlib.closing(MySQLSink(db.dsn, "notes", mode="upsert", keys=["id"], order_by="at")) as sink:
        sink.check(schema)
        for number in range(2):
            parts = enumerate(batch(part, schema) for part in rows)
            staged = [pre_commit(sink, part, subtask=n, checkpoint=number) for n, part in parts]
            assert sink.commit_all(checkpoint(number), staged) == [COMMITTED] * 2
    assert db.run("SELECT at FROM notes ORDER BY id") == [(12,), (11,)]


@pytest.mark.parametrize("rule", ["CASCADE", "SET NULL", "RESTRICT"])
def test_values_that_are_swapped_leave_alone_what_refers_to_their_rows(
    db: Observer, mysql: MySQLService, rule: str
) -> None:
    """From a database that the sink's user may not see: the rows go out and come back."""
    db.run("ALTER TABLE orders ADD PRIMARY KEY (id), ADD UNIQUE (name)")
    db.run("INSERT INTO orders VALUES (1, 'a'), (2, 'b')")
    with mysql.database() as dsn, contextlib.closing(Observer(dsn)) as elsewhere:
        refers = f"FOREIGN KEY (id) REFERENCES {db.schema}.orders (id) ON DELETE {rule}"
        elsewhere.run(f"CREATE TABLE items (n int, id bigint, {refers})")
        elsewhere.run("INSERT INTO items VALUES (10, 1), (20, 2)")
        with contextlib.closing(MySQLSink(db.dsn, "orders", mode="upsert", keys=["id"])) as sink:
            sink.check(SCHEMA)
            committable = pre_commit(sink, batch([{"id": 1, "name": "b"}, {"id": 2, "name": "a"}], SCHEMA))
            sink.validate_all(checkpoint(), [committable])
            assert sink.commit_all(checkpoint(), [committable]) == [COMMITTED]
        assert db.visible() == [(1, "b"), (2, "a")]
        assert elsewhere.visible("items") == [(10, 1), (20, 2)]
        elsewhere.run("DROP TABLE items")


def test_texts_that_are_longer_than_a_sort_compares_are_no_keys(mariadb: MariaDBServer) -> None:
    """MariaDB has unique indexes over them, by a hash. Two keys would be taken for one, and a change left out."""
    with mariadb.database() as dsn, contextlib.closing(Observer(dsn)) as db:
        db.run("CREATE TABLE orders (id bigint NOT NULL, name longtext, UNIQUE (name))")
        with (
            contextlib.closing(MySQLSink(dsn, "orders", mode="upsert", keys=["name"], order_by="id")) as sink,
            pytest.raises(ConfigurationError, match="needs a unique index"),
        ):
            sink.check(SCHEMA)
        rows = batch([{"id": n, "name": "x" * 20_000 + f"{n}"} for n in range(2)], SCHEMA)
        with contextlib.closing(MySQLSink(dsn, "orders", strategy="staged")) as sink:
            sink.check(SCHEMA)
            first, again = (pre_commit(sink, rows, checkpoint=number) for number in range(2))
            sink.validate_all(checkpoint(), [first])
            assert sink.commit_all(checkpoint(), [first]) == [COMMITTED]
            with pytest.raises(BadValue, match="is in the table already"):
                sink.validate_all(checkpoint(1), [again])
        assert db.ids() == [0, 1]


@pytest.mark.parametrize("length", [760, 380])
def test_long_keys_are_told_apart_by_their_ends(db: Observer, length: int) -> None:
    """By default a server sorts by 1,024 bytes: a change could come back that another one has deleted."""
    names = ["a", "b"] if length == 380 else ["a"]
    columns = ", ".join(f"{name} varchar({length}) COLLATE utf8mb4_general_ci" for name in names)
    db.run(f"CREATE TABLE notes ({columns}, at bigint, PRIMARY KEY ({', '.join(names)}))")
    schema = pa.schema([*((name, pa.string()) for name in names), ("at", pa.int64()), ("gone", pa.bool_())])
    rows = [
        dict.fromkeys(names, "x" * (length - 3) + f"{n:03}") | {"at": at, "gone": at == 2 and n % 2 == 0}
        for at in (2, 1)
        for n in range(100)
    ]
    merge: dict[str, Any] = {"keys": names, "order_by": "at", "delete_marker": "gone"}
    with contextlib.closing(MySQLSink(db.dsn, "notes", mode="upsert", **merge)) as sink:
        sink.check(schema)
        staged = [pre_commit(sink, batch(rows[part::3], schema), subtask=part) for part in range(3)]
        sink.validate_all(checkpoint(), staged)
        assert sink.commit_all(checkpoint(), staged) == [COMMITTED] * 3
    assert db.run("SELECT RIGHT(a, 3), at FROM notes ORDER BY a") == [(f"{n:03}", 2) for n in range(1, 100, 2)]


@pytest.mark.parametrize("kind", [pa.string(), pa.binary(), pa.list_(pa.int64())], ids=str)
def test_no_order_by_but_numbers_and_times(db: Observer, kind: pa.DataType) -> None:
    """The server sorts texts by their beginning, an enumeration by places or texts, and documents by nothing."""
    db.run("CREATE TABLE notes (id bigint PRIMARY KEY)")
    with (
        contextlib.closing(MySQLSink(db.dsn, "notes", mode="upsert", keys=["id"], order_by="at")) as sink,
        pytest.raises(ConfigurationError, match=r"order_by names the column 'at', .* which the database sorts"),
    ):
        sink.check(pa.schema([("id", pa.int64()), ("at", kind)]))


@pytest.mark.parametrize("event", ["INSERT", "UPDATE"])
def test_a_trigger_may_change_what_orders_changes(db: Observer, event: str) -> None:
    db.run("CREATE TABLE notes (id bigint PRIMARY KEY, at bigint)")
    db.run(f"CREATE TRIGGER later BEFORE {event} ON notes FOR EACH ROW SET NEW.at = NEW.at + 10")
    schema = pa.schema([("id", pa.int64()), ("at", pa.int64())])
    options: dict[str, Any] = {"mode": "upsert", "keys": ["id"], "order_by": "at", "keep_newer": True}
    with contextlib.closing(MySQLSink(db.dsn, "notes", **options)) as sink:
        sink.check(schema)
        for number, at in enumerate((1, 12, 2)):
            staged = [pre_commit(sink, batch([{"id": 1, "at": at}], schema), checkpoint=number)]
            sink.validate_all(checkpoint(number), staged)
            assert sink.commit_all(checkpoint(number), staged) == [COMMITTED]
    assert db.run("SELECT * FROM notes") == [(1, 12 if event == "INSERT" else 22)]


def test_changes_are_ordered_by_times_that_no_timestamp_holds(db: Observer) -> None:
    """A column that only the merge looks at is a datetime, which ends in 9999 and not in 2038."""
    db.run("CREATE TABLE notes (id bigint PRIMARY KEY, name text)")
    moments = [datetime(1970, 1, 1, tzinfo=timezone.utc), datetime(9999, 1, 1, tzinfo=timezone.utc)]
    schema = pa.schema([("id", pa.int64()), ("name", pa.string()), ("at", pa.timestamp("us", "UTC"))])
    with contextlib.closing(MySQLSink(db.dsn, "notes", mode="upsert", keys=["id"], order_by="at")) as sink:
        sink.check(schema)
        rows = [{"id": 1, "name": str(at.year), "at": at} for at in reversed(moments)]
        staged = [pre_commit(sink, batch(rows, schema))]
        sink.validate_all(checkpoint(), staged)
        assert sink.commit_all(checkpoint(), staged) == [COMMITTED]
    assert db.run("SELECT name FROM notes") == [("9999",)]


@pytest.mark.parametrize(
    ("kind", "arrow", "one", "other"),
    [
        ("json", pa.string(), '{"a": [1, null]}', '{"a": [1, 2]}'),
        ("varchar(20) COLLATE utf8mb4_general_ci", pa.string(), "ä", "A"),
        ("longtext", pa.string(), "x" * 70000 + "a", "x" * 70000 + "b"),
        ("longblob", pa.binary(), b"\xff\x00", b"\xff"),
        ("float", pa.float32(), 16777215.0, 16777214.0),
        ("double", pa.float64(), 0.1 + 0.2, 0.3),
        ("decimal(38, 9)", pa.decimal128(38, 9), Decimal("1.000000001"), Decimal("1.000000002")),
        ("datetime(6)", pa.timestamp("us"), datetime(2024, 1, 1, 0, 0, 0, 1), datetime(2024, 1, 1, 0, 0, 0, 2)),
        ("bit(3)", pa.int64(), 5, 4),
        ("tinyint(1)", pa.bool_(), True, None),
        ("enum('a', 'b')", pa.string(), "a", "b"),
    ],
)
def test_equal_changes_are_told_apart_by_values_of_every_type(
    db: Observer, kind: str, arrow: pa.DataType, one: Any, other: Any
) -> None:
    """Two partitions may deliver the same change, and not two different ones."""
    schema = pa.schema([("id", pa.int64()), ("at", pa.int64()), ("note", arrow)])
    db.run(f"CREATE TABLE notes (id bigint PRIMARY KEY, note {kind})")
    with contextlib.closing(MySQLSink(db.dsn, "notes", mode="upsert", keys=["id"], order_by="at")) as sink:
        sink.check(schema)
        for number, notes in enumerate([(one, one), (None, None), (one, other), (one, None)]):
            rows = [batch([{"id": 1, "at": 5, "note": note}], schema) for note in notes]
            staged = [pre_commit(sink, row, checkpoint=number, subtask=n) for n, row in enumerate(rows)]
            if notes[0] == notes[1]:
                sink.validate_all(checkpoint(number), staged)
                continue
            with pytest.raises(BadValue, match=r"2 partitions have different changes of the key \(id\) = \(1\)"):
                sink.validate_all(checkpoint(number), staged)


EMAILS = pa.schema([("id", pa.int64()), ("email", pa.string())])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            "CREATE TABLE parts (id bigint, FOREIGN KEY refers (id) REFERENCES t (id))",
            ", because of .*foreign key",
        ),
        (
            "CREATE TRIGGER seen BEFORE INSERT ON t FOR EACH ROW SET @seen = 1",
            ", because of trigger seen",
        ),
        ("ALTER TABLE t DROP KEY one, ADD UNIQUE one (email(3))", r" \[EO-VALUE\]"),
        (
            "ALTER TABLE t DROP KEY one, ADD small varchar(50) AS (lower(email)) STORED, ADD UNIQUE one (small)",
            r" \[EO-VALUE\]",
        ),
    ],
)
def test_a_refused_swap_says_how_values_can_be_handed_on(db: Observer, change: str, why: str) -> None:
    db.run("CREATE TABLE t (id bigint PRIMARY KEY, email varchar(50), UNIQUE one (email))")
    db.run("INSERT INTO t (id, email) VALUES (1, 'a'), (2, 'b')")
    db.run(change)
    swapped = batch([{"id": 1, "email": "b"}, {"id": 2, "email": "a"}], EMAILS)
    with contextlib.closing(MySQLSink(db.dsn, "t", mode="upsert", keys=["id"])) as sink:
        sink.check(EMAILS)
        with pytest.raises(BadValue, match=f"one'.* to swap the value with another row, use two checkpoints{why}"):
            sink.validate_all(checkpoint(), [pre_commit(sink, swapped)])


def test_a_unique_index_that_upserts_cannot_go_by_is_named(db: Observer) -> None:
    db.run("CREATE TABLE t (id bigint PRIMARY KEY, email varchar(50), UNIQUE one (email(3)))")
    sink = MySQLSink(db.dsn, "t", mode="upsert", keys=["email"], order_by="id")
    with contextlib.closing(sink), pytest.raises(ConfigurationError, match=r"; one is over a prefix of email\s"):
        sink.check(EMAILS)


def test_an_index_over_an_expression_that_upserts_cannot_go_by_is_named(db: Observer) -> None:
    db.run("CREATE TABLE t (id bigint PRIMARY KEY, email varchar(50))")
    try:
        db.run("CREATE UNIQUE INDEX one ON t ((lower(email)))")
    except pymysql.ProgrammingError:
        pytest.skip("MariaDB has no indexes over expressions")
    sink = MySQLSink(db.dsn, "t", mode="upsert", keys=["email"], order_by="id")
    with contextlib.closing(sink), pytest.raises(ConfigurationError, match=r"index .*; one is over an expression\s"):
        sink.check(EMAILS)


def test_a_double_with_digits_and_a_set_are_told_what_to_do(db: Observer) -> None:
    """No type of Spark goes in, and no view."""
    db.run("CREATE TABLE t (id decimal(9, 2), email set('a', 'b'))")
    db.run("ALTER TABLE t MODIFY id double(10, 2)")
    schema = pa.schema([("id", pa.decimal128(9, 2)), ("email", pa.string())])
    with contextlib.closing(MySQLSink(db.dsn, "t")) as sink, pytest.raises(ConfigurationError) as refused:
        sink.check(schema)
    for told in ("nothing goes into it: alter it to double or decimal, or drop", "alter it to a text, json or blob"):
        assert told in str(refused.value)
