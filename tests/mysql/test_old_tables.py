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


# ---------------------------------------------------------------------- what the server puts in at an UPDATE
@pytest.mark.parametrize("kind", ["timestamp", "datetime"])
def test_a_row_whose_unique_value_is_swapped_is_marked_as_changed(old: Observer, kind: str) -> None:
    """Who reads the changes by `updated_at` sees them all, and none of a row that stays as it was."""
    old.run(
        f"ALTER TABLE orders ADD at {kind}(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6) ON UPDATE CURRENT_TIMESTAMP(6),"
        f" ADD seen {kind} NULL ON UPDATE CURRENT_TIMESTAMP, ADD made {kind} NOT NULL DEFAULT CURRENT_TIMESTAMP"
    )
    for id, name in enumerate("abcd", 1):
        old.run("INSERT INTO orders VALUES (%s, %s, %s, %s, %s)", [id, name, OLD, OLD, OLD])
    write(old, [*SWAP, {"id": 3, "name": "new"}, {"id": 4, "name": "d"}], **BY_ID)
    rows = old.run("SELECT id, name, at > made, seen > made, made FROM orders ORDER BY id")
    assert rows == [(1, "b", 1, 1, OLD), (2, "a", 1, 1, OLD), (3, "new", 1, 1, OLD), (4, "d", 0, 0, OLD)]


def test_a_time_that_the_batch_has_is_kept_when_unique_values_are_swapped(old: Observer) -> None:
    old.run("ALTER TABLE orders ADD at datetime(6) NULL ON UPDATE CURRENT_TIMESTAMP(6)")
    old.run("INSERT INTO orders VALUES (1, 'a', NULL), (2, 'b', NULL)")
    schema = pa.schema([*SCHEMA, ("at", pa.timestamp("us"))])
    write(old, [row | {"at": OLD} for row in SWAP], schema=schema, **BY_ID)
    assert old.visible() == [(1, "b", OLD), (2, "a", OLD)]


def test_a_key_that_the_server_renews_stays_when_unique_values_are_swapped(db: Observer) -> None:
    db.run(
        "CREATE TABLE notes (at timestamp NOT NULL DEFAULT '2020-01-01' ON UPDATE CURRENT_TIMESTAMP PRIMARY KEY,"
        " name varchar(9) UNIQUE)"
    )
    first, second = (datetime(2020, 1, day, tzinfo=timezone.utc) for day in (1, 2))
    db.run("SET SESSION time_zone = '+00:00'")
    db.run("INSERT INTO notes VALUES ('2020-01-01', 'a'), ('2020-01-02', 'b')")
    schema = pa.schema([("at", pa.timestamp("us", "UTC")), ("name", pa.string())])
    rows = [{"at": first, "name": "b"}, {"at": second, "name": "a"}]
    write(db, rows, schema=schema, table="notes", mode="upsert", keys=["at"])
    assert db.visible("notes") == [(datetime(2020, 1, 1), "b"), (datetime(2020, 1, 2), "a")]


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


# ---------------------------------------------------------------------- periods, which MariaDB has
@pytest.fixture
def on_mariadb(mariadb: MariaDBServer) -> Iterator[Observer]:
    with mariadb.database() as dsn, contextlib.closing(Observer(dsn)) as observer:
        yield observer


VERSIONED = (
    "CREATE TABLE orders (id bigint PRIMARY KEY, name varchar(9) UNIQUE{},"
    " born timestamp(6) GENERATED ALWAYS AS ROW START, gone timestamp(6) GENERATED ALWAYS AS ROW END,"
    " PERIOD FOR SYSTEM_TIME (born, gone)) WITH SYSTEM VERSIONING"
)


@pytest.mark.parametrize("marker", [None, "deleted"])
def test_upserts_into_a_versioned_table_go_by_its_key_and_leave_a_history(
    on_mariadb: Observer, marker: str | None
) -> None:
    """The server adds the end of a row to each key. For the rows of now that is always the same."""
    db = on_mariadb
    db.run(VERSIONED.format(""))
    schema = pa.schema([*SCHEMA, ("deleted", pa.bool_())] if marker else SCHEMA)
    rows = [{"id": 1, "name": "a", "deleted": False}, {"id": 2, "name": "b", "deleted": False}]
    write(db, rows, schema=schema, delete_marker=marker, **BY_ID)
    rows = [{"id": 1, "name": "b", "deleted": False}, {"id": 2, "name": "c", "deleted": False}]
    write(db, rows, schema=schema, number=1, delete_marker=marker, **BY_ID)
    if marker:
        rows = [{"id": 1, "name": None, "deleted": True}]
        write(db, rows, schema=schema, number=2, delete_marker=marker, **BY_ID)
    now = [(2, "c")] if marker else [(1, "b"), (2, "c")]
    assert db.run("SELECT id, name FROM orders ORDER BY 1") == now
    past = "SELECT DISTINCT id, name FROM orders FOR SYSTEM_TIME ALL WHERE gone < now(6) ORDER BY 1, 2"
    assert {(1, "a"), (2, "b"), *([(1, "b")] if marker else [])} <= set(db.run(past))


def test_appends_to_a_versioned_table_are_judged_by_the_rows_of_now(on_mariadb: Observer) -> None:
    """A key that was deleted may come again."""
    db = on_mariadb
    db.run(VERSIONED.format(""))
    db.run("INSERT INTO orders (id, name) VALUES (1, 'a'), (2, 'b')")
    db.run("DELETE FROM orders WHERE id = 1")
    write(db, [{"id": 1, "name": "a"}], strategy="staged")
    with pytest.raises(BadValue, match=r"\(id\) = \(2\) is in the table already"):
        write(db, [{"id": 2, "name": "x"}], strategy="staged", number=1)
    assert db.run("SELECT id, name FROM orders ORDER BY 1") == [(1, "a"), (2, "b")]


def test_a_versioned_table_marks_rows_that_swap_as_changed(on_mariadb: Observer) -> None:
    db = on_mariadb
    db.run(VERSIONED.format(", at timestamp(6) NOT NULL DEFAULT '2020-01-01' ON UPDATE CURRENT_TIMESTAMP(6)"))
    db.run("INSERT INTO orders (id, name) VALUES (1, 'a'), (2, 'b')")
    write(db, SWAP, **BY_ID)
    assert db.run("SELECT id, name, at > '2020-01-02' FROM orders ORDER BY 1") == [(1, "b", 1), (2, "a", 1)]


STAYS = pa.schema([("id", pa.int64()), ("room", pa.int64()), ("begins", pa.date32()), ("ends", pa.date32())])
WITHOUT_OVERLAPS = (
    "CREATE TABLE stays (id bigint{}, room int, begins date, ends date,"
    " PERIOD FOR `st``ay` (begins, ends), UNIQUE `in``room` (room, `st``ay` WITHOUT OVERLAPS))"
)


def stay(id: int, room: int, begins: int, ends: int) -> dict[str, Any]:
    """Within January 2026."""
    return {"id": id, "room": room, "begins": date(2026, 1, begins), "ends": date(2026, 1, ends)}


def test_periods_that_overlap_what_another_row_gives_up_are_moved(on_mariadb: Observer) -> None:
    """As by hand, with the rows in the right order. The catalog shows the index as one over equal columns."""
    db = on_mariadb
    db.run(WITHOUT_OVERLAPS.format(" PRIMARY KEY"))
    write(db, [stay(1, 7, 1, 10), stay(2, 7, 10, 20)], schema=STAYS, table="stays", **BY_ID)
    for number, moved in enumerate(([stay(1, 7, 1, 15), stay(2, 7, 15, 20)], [stay(1, 7, 1, 5), stay(2, 7, 5, 20)])):
        write(db, moved, schema=STAYS, table="stays", number=number + 1, **BY_ID)
        assert db.visible("stays") == [tuple(row.values()) for row in moved]
    with pytest.raises(BadValue, match="Duplicate entry"):
        write(db, [stay(1, 7, 1, 6)], schema=STAYS, table="stays", number=3, **BY_ID)


def test_appended_periods_that_overlap_are_refused_before_the_decision(on_mariadb: Observer) -> None:
    db = on_mariadb
    db.run(WITHOUT_OVERLAPS.format(""))
    with pytest.raises(BadValue, match="Duplicate entry"):
        write(db, [stay(1, 7, 1, 10), stay(2, 7, 9, 20)], schema=STAYS, table="stays", strategy="staged")
    write(db, [stay(1, 7, 1, 10), stay(2, 7, 10, 20)], schema=STAYS, table="stays", strategy="staged", number=1)


def test_an_index_without_overlaps_is_no_key_for_upserts(on_mariadb: Observer) -> None:
    """Rows that are not equal there clash as well, which nobody mends by asking again."""
    db = on_mariadb
    db.run(WITHOUT_OVERLAPS.format(""))
    with pytest.raises(ConfigurationError, match=r"needs a unique index on just these columns, .* without a period"):
        write(db, [stay(1, 7, 1, 10)], schema=STAYS, table="stays", mode="upsert", keys=["room", "begins", "ends"])


# ---------------------------------------------------------------------- as wide as a table can be
WIDE = [f"c{n}" for n in range(1017)]


@pytest.fixture(params=["columns", "bytes"])
def wide(db: Observer, request: pytest.FixtureRequest) -> tuple[Observer, pa.Schema]:
    """A table `wide` with as many columns or bytes as InnoDB has, and the schema of rows that have all of it."""
    if request.param == "bytes":
        db.run("CREATE TABLE wide (id int NOT NULL, name varchar(65526), UNIQUE (id)) CHARACTER SET latin1")
        return db, pa.schema([("id", pa.int32()), ("name", pa.string())])
    db.run(f"CREATE TABLE wide (id int NOT NULL UNIQUE, {', '.join(f'{name} tinyint' for name in WIDE[1:])})")
    return db, pa.schema([("id", pa.int32()), *((name, pa.int8()) for name in WIDE[1:])])


def test_a_table_that_is_too_wide_for_staging_takes_appends_by_xa(wide: tuple[Observer, pa.Schema]) -> None:
    db, schema = wide
    write(db, [{"id": 1, "name": "x"}], schema=schema, table="wide")
    assert db.ids("wide") == [1]


@pytest.mark.parametrize(
    ("options", "remedy"), [({"strategy": "staged"}, 'use strategy="xa"'), (BY_ID, "write fewer columns")]
)
def test_a_table_that_is_too_wide_for_staging_is_refused_at_the_start(
    wide: tuple[Observer, pa.Schema], options: dict[str, Any], remedy: str
) -> None:
    """It is no bad row, which dead letters would take."""
    db, schema = wide
    with contextlib.closing(MySQLSink(db.dsn, "wide", **options)) as sink:
        with pytest.raises(ConfigurationError, match=rf"{len(schema):,} columns and one of its own.*{remedy}"):
            sink.check(schema)
        sink.check(schema.remove(1))
        with pytest.raises(ConfigurationError, match="and one of its own"):  # the table as it may be by then
            pre_commit(sink, batch([{"id": 1, "name": "x"}], schema))
    assert db.staging() == []
