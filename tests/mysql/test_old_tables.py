"""Tables as old and ordinary applications have them: what a plain statement of theirs does, the sink does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from datetime import date, datetime, timezone
from typing import Any

import pyarrow as pa
import pytest

from sinks.errors import BadValue, ConfigurationError
from sinks.mysql import MySQLSink
from sinks.testing.servers.mariadb import MariaDBServer
from sinks.testing.servers.mysql import MySQLService
from sinks.testing.table import COMMITTED, SCHEMA, batch, checkpoint, pre_commit
from tests.mysql.observer import Observer, with_option

BY_ID: dict[str, Any] = {"mode": "upsert", "keys": ["id"]}
SWAP = [{"id": 1, "name": "b"}, {"id": 2, "name": "a"}]
OLD = datetime(2020, 1, 1)
ZERO = "0000-00-00 00:00:00"  # which Python has no other name for


def write(
    db: Observer,
    rows: Sequence[dict[str, Any]],
    *,
    schema: pa.Schema = SCHEMA,
    table: str = "orders",
    dsn: str = "",
    number: int = 0,
    **options: Any,
) -> None:
    """One checkpoint of one partition, with all that a coordinator asks of the sink."""
    with contextlib.closing(MySQLSink(dsn or db.dsn, table, **options)) as sink:
        if sink.evolves:
            sink.evolve(schema)
        sink.check(schema)
        committable = pre_commit(sink, batch(rows, schema), checkpoint=number)
        sink.validate_all(checkpoint(number), [committable])
        assert sink.commit_all(checkpoint(number), [committable]) == [COMMITTED]


@pytest.fixture
def old(db: Observer) -> Observer:
    """A session that takes what a server of long ago did."""
    db.run("SET SESSION sql_mode = 'ALLOW_INVALID_DATES'")
    db.run("ALTER TABLE orders ADD PRIMARY KEY (id), ADD UNIQUE (name)")
    return db


# ---------------------------------------------------------------------- zero dates
def test_rows_get_a_zero_date_as_the_tables_default(old: Observer) -> None:
    """As by a plain INSERT."""
    old.run(f"ALTER TABLE orders ADD created datetime NOT NULL DEFAULT '{ZERO}'")
    for number, strategy in enumerate(("xa", "staged")):
        write(old, [{"id": number, "name": strategy}], strategy=strategy, number=number)
    assert old.visible() == [(0, "xa", ZERO), (1, "staged", ZERO)]


def test_unique_values_are_swapped_in_a_table_with_a_zero_date_as_default(old: Observer) -> None:
    old.run(f"ALTER TABLE orders ADD created datetime NOT NULL DEFAULT '{ZERO}', ADD due date DEFAULT '2010-02-31'")
    old.run("INSERT INTO orders VALUES (1, 'a', '2020-01-01', NULL), (2, 'b', '2020-01-01', NULL)")
    write(old, [*SWAP, {"id": 3, "name": "c"}], **BY_ID)
    assert old.visible() == [(1, "b", OLD, None), (2, "a", OLD, None), (3, "c", ZERO, "2010-02-31")]


@pytest.mark.parametrize("held", ["0000-00-00", "2010-00-00", "2010-02-31"])
def test_unique_values_are_swapped_in_rows_that_hold_a_date_of_no_calendar(old: Observer, held: str) -> None:
    old.run("ALTER TABLE orders ADD seen datetime NULL, ADD born date NULL")
    old.run("INSERT INTO orders VALUES (1, 'a', %s, %s), (2, 'b', NULL, %s)", [held] * 3)
    write(old, SWAP, **BY_ID)
    assert old.visible() == [(1, "b", f"{held} 00:00:00", held), (2, "a", None, held)]


def test_a_column_is_added_to_a_table_with_a_zero_date_as_default(old: Observer) -> None:
    old.run(f"ALTER TABLE orders ADD created timestamp NOT NULL DEFAULT '{ZERO}'")
    old.run("INSERT INTO orders (id, name) VALUES (1, 'a')")
    rows = [{"id": 2, "name": "b", "note": "new"}]
    write(old, rows, schema=pa.schema([*SCHEMA, ("note", pa.string())]), schema_evolution="add")
    assert old.visible() == [(1, "a", ZERO, None), (2, "b", ZERO, "new")]


@pytest.mark.parametrize("local", [True, False], ids=["LOAD", "INSERT"])
@pytest.mark.parametrize("strategy", ["xa", "staged"])
@pytest.mark.parametrize(
    ("column", "kind", "value"),
    [
        ("timestamp NULL", pa.timestamp("us", "UTC"), datetime(1969, 12, 31, tzinfo=timezone.utc)),
        ("timestamp NULL", pa.timestamp("us", "UTC"), datetime(9999, 1, 1, tzinfo=timezone.utc)),
        ("timestamp NOT NULL DEFAULT CURRENT_TIMESTAMP", pa.timestamp("us", "UTC"), None),
        ("datetime NOT NULL", pa.timestamp("us"), None),
        ("datetime", pa.int64(), 20200231000000),
        ("date", pa.string(), "2020-02-31"),
        ("date NOT NULL", pa.date32(), None),
    ],
)
def test_no_value_of_a_batch_becomes_a_zero_date(
    old: Observer,
    mysql: MySQLService,
    request: pytest.FixtureRequest,
    local: bool,
    strategy: str,
    column: str,
    kind: pa.DataType,
    value: object,
) -> None:
    """It is refused, though the session takes such dates from the table."""
    if not local:
        request.getfixturevalue("without_local")
    old.run(f"ALTER TABLE orders ADD at {column}")
    schema = pa.schema([*SCHEMA, ("at", kind)])
    with pytest.raises((BadValue, ConfigurationError)):
        write(old, [{"id": 1, "name": "a", "at": value}], schema=schema, strategy=strategy)
    assert old.visible() == []


# ---------------------------------------------------------------------- a table's own expressions
@pytest.mark.parametrize("local", [True, False], ids=["LOAD", "INSERT"])
def test_backslashes_in_a_tables_own_expressions_mean_what_they_say(
    old: Observer, mysql: MySQLService, request: pytest.FixtureRequest, local: bool
) -> None:
    """MySQL reads them by the sql_mode of the session that opens the table."""
    if not local:
        request.getfixturevalue("without_local")
    old.run(
        r"CREATE TABLE calls (id bigint PRIMARY KEY, phone varchar(20) UNIQUE CHECK (phone REGEXP '^[\\d \\\\]+\'?$'),"
        r" digits varchar(20) AS (regexp_replace(phone, '\\D', '')) STORED, kind enum('a\\b', 'c\'d'))"
    )
    schema = pa.schema([("id", pa.int64()), ("phone", pa.string()), ("kind", pa.string())])
    rows = [
        {"id": 1, "phone": "030 12", "kind": "a\\b"},
        {"id": 2, "phone": "4\\9'", "kind": "c'd"},
    ]
    for number, options in enumerate(({"strategy": "xa"}, BY_ID)):
        old.run("FLUSH TABLES")
        write(old, rows, schema=schema, table="calls", number=number, **options)
        assert old.visible("calls") == [(1, "030 12", "03012", "a\\b"), (2, "4\\9'", "49", "c'd")]
    old.run("FLUSH TABLES")
    swapped = [{"id": 1, "phone": "4\\9'", "kind": "c'd"}, {"id": 2, "phone": "030 12", "kind": "a\\b"}]
    write(old, swapped, schema=schema, table="calls", number=2, **BY_ID)
    assert old.visible("calls") == [(1, "4\\9'", "49", "c'd"), (2, "030 12", "03012", "a\\b")]


@pytest.mark.parametrize("strategy", ["xa", "staged"])
def test_a_tables_own_division_by_zero_is_what_the_server_makes_of_it(old: Observer, strategy: str) -> None:
    """NULL, where the server's own sql_mode has no word against it, and an error elsewhere."""
    old.run("ALTER TABLE orders ADD n int NOT NULL DEFAULT 0, ADD part int AS (10 DIV n) STORED")
    mode = "init_command=SET SESSION sql_mode='{}'"
    for_error = with_option(old.dsn, mode.format("ERROR_FOR_DIVISION_BY_ZERO"))
    with pytest.raises(BadValue, match="Division by 0"):
        write(old, SWAP, dsn=for_error, strategy=strategy)
    write(old, SWAP, dsn=with_option(old.dsn, mode.format("")), strategy=strategy, number=1)
    assert old.visible() == [(1, "b", 0, None), (2, "a", 0, None)]
