"""Every type both ways round: Arrow as Spark yields it, COPY BINARY into a real table, and back from the server."""

from __future__ import annotations

import datetime as dt
import json
import math
import re
import uuid
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sinks.errors import BadValue, SchemaMismatch
from sinks.postgres import catalog
from sinks.postgres.columns import PostgresColumn, target_type
from sinks.postgres.connection import Connection
from sinks.postgres.copy import CopyEncoder
from sinks.sql.table import mismatches
from sinks.testing.servers.postgres import PostgresService

UTC = "UTC"


@pytest.fixture(scope="module")
def connection(postgres: PostgresService) -> Iterator[psycopg.Connection]:
    with (
        postgres.database() as dsn,
        Connection.connect(dsn, autocommit=True, cursor_factory=psycopg.ClientCursor) as connection,
    ):
        connection.prepare_threshold = None  # the tables behind the same statement change
        connection.execute("SET timezone = 'UTC'")
        connection.execute("CREATE TYPE mood AS ENUM ('sad', 'happy')")
        connection.execute("CREATE DOMAIN positive AS integer CHECK (value > 0)")
        yield connection


def copy(connection: Any, batch: pa.RecordBatch, declared: list[str]) -> None:
    """Copy into a fresh table `t` with columns c0, c1, … of the declared types, as the sink does."""
    connection.execute("DROP TABLE IF EXISTS t")
    connection.execute(f"CREATE TABLE t ({', '.join(f'c{i} {name}' for i, name in enumerate(declared))})")
    target = catalog.describe(connection, "public", "t")
    assert target is not None
    encoder = CopyEncoder(batch.schema, target.columns, "public.t")
    with connection.cursor().copy("COPY t FROM STDIN (FORMAT BINARY)") as stream:
        stream.write(encoder.header())
        stream.write(b"".join(encoder.pieces(batch)))
        stream.write(encoder.trailer())


def round_trip(connection: psycopg.Connection, array: pa.Array, declared: str) -> list[Any]:
    copy(connection, pa.RecordBatch.from_arrays([array], ["c0"]), [declared])
    return [row[0] for row in connection.execute("SELECT c0 FROM t").fetchall()]


def texts(connection: psycopg.Connection, array: pa.Array, declared: str) -> list[str | None]:
    """As the server writes the values: for what Python has no type for."""
    copy(connection, pa.RecordBatch.from_arrays([array], ["c0"]), [declared])
    return [row[0] for row in connection.execute("SELECT c0::text FROM t").fetchall()]


NOON = dt.datetime(2026, 1, 2, 12, 30, 15, 123456)

SAME = [
    (pa.array([True, None, False]), "boolean"),
    (pa.array([-128, None, 127], pa.int8()), "smallint"),
    (pa.array([-(2**15), None, 2**15 - 1], pa.int16()), "smallint"),
    (pa.array([-(2**31), None, 2**31 - 1], pa.int32()), "integer"),
    (pa.array([-(2**63), None, 2**63 - 1], pa.int64()), "bigint"),
    (pa.array([1, None, -5], pa.int64()), "integer"),
    (pa.array([1, None, -5], pa.int32()), "bigint"),
    (pa.array([1, None, -5], pa.int32()), "double precision"),
    (pa.array([7, None, 9], pa.int32()), "positive"),
    (pa.array([1.5, None, -0.0, math.inf, -math.inf], pa.float32()), "real"),
    (pa.array([1e308, None, 5e-324, math.inf, -math.inf], pa.float64()), "double precision"),
    (pa.array([1.5, None], pa.float32()), "double precision"),
    (pa.array([Decimal("123.45"), None, Decimal("-0.01"), Decimal("0.00")], pa.decimal128(10, 2)), "numeric"),
    (pa.array([Decimal("9" * 38), None, Decimal("-" + "9" * 38)], pa.decimal128(38, 0)), "numeric(38)"),
    (pa.array([Decimal("0." + "0" * 37 + "1"), None], pa.decimal128(38, 38)), "numeric"),
    (pa.array([2**63 - 1, None, -(2**63)], pa.int64()), "numeric"),
    (pa.array(["", None, "ä€😀", "x" * 100_000]), "text"),
    (pa.array(["a", None, "ä€😀"], pa.large_string()), "varchar(10)"),
    (pa.array(["abc", None, "äb ", "   "]), "char(3)"),  # as another database shows its char(3)
    (pa.array([b"", None, b"\x00\xff"]), "bytea"),
    (pa.array([dt.date(1, 1, 1), None, dt.date(9999, 12, 31), dt.date(1970, 1, 1)]), "date"),
    (pa.array([NOON, None, dt.datetime(1, 1, 1)], pa.timestamp("us")), "timestamp"),
    (pa.array([[1, None, 3], None, []], pa.list_(pa.int64())), "bigint[]"),
    (pa.array([[1, None, 3], None, []], pa.list_(pa.int32())), "bigint[]"),
    (pa.array([["a", None, "ß"], None, []]), "text[]"),
    (pa.array([["a", None, "ß"], None, []]), "text[]"),
    (pa.array([[True, None], None, []]), "boolean[]"),
    (pa.array([[1.5, None], None, []]), "double precision[]"),
    (pa.array([[Decimal("1.50"), None], None, []], pa.list_(pa.decimal128(5, 2))), "numeric(5,2)[]"),
    (pa.array([[dt.date(2026, 1, 1), None], None, []]), "date[]"),
    (pa.array([[b"x", None], None, []]), "bytea[]"),
    (pa.array([[NOON, None], None, []], pa.list_(pa.timestamp("us"))), "timestamp[]"),
    (pa.array([None, None]), "integer"),
    (pa.array([dt.timedelta(days=3, hours=4, microseconds=5), None], pa.duration("us")), "interval"),
    (pa.array([dt.time(23, 59, 59, 999999), None], pa.time64("us")), "time"),
]


@pytest.mark.parametrize(("array", "declared"), SAME, ids=[f"{array.type} to {name}" for array, name in SAME])
def test_values_come_back_as_they_went(connection: psycopg.Connection, array: pa.Array, declared: str) -> None:
    assert round_trip(connection, array, declared) == array.to_pylist()


@pytest.mark.parametrize(("array", "declared"), SAME, ids=[f"{array.type} to {name}" for array, name in SAME])
def test_slices_come_back_as_they_went(connection: psycopg.Connection, array: pa.Array, declared: str) -> None:
    """Buffers of a slice begin somewhere in the middle."""
    part = pa.concat_arrays([array, array, array]).slice(len(array) - 1, len(array) + 1)
    assert round_trip(connection, part, declared) == part.to_pylist()


def test_nan(connection: psycopg.Connection) -> None:
    [double] = round_trip(connection, pa.array([math.nan]), "double precision")
    assert math.isnan(double)


def test_timestamps_with_zone_are_points_in_time(connection: psycopg.Connection) -> None:
    utc = NOON.replace(tzinfo=dt.timezone.utc)
    for zone in ("UTC", "Europe/Berlin", "America/New_York"):
        assert round_trip(connection, pa.array([utc, None], pa.timestamp("us", zone)), "timestamptz") == [utc, None]


def test_years_that_python_has_no_dates_for(connection: psycopg.Connection) -> None:
    """Arrow's last microsecond, PostgreSQL's first one."""
    moments = pa.array([2**63 - 1, -210_866_803_200_000_000, None], pa.int64()).cast(pa.timestamp("us"))
    expected = ["294247-01-10 04:00:54.775807", "4714-11-24 00:00:00 BC", None]
    assert texts(connection, moments, "timestamp") == expected
    zoned = [text and re.sub(r"( BC)?$", r"+00\1", text, count=1) for text in expected]
    assert texts(connection, moments.cast(pa.timestamp("us", "Europe/Berlin")), "timestamptz") == zoned
    days = pa.array([-719_529, 2_932_897, None], pa.int32()).cast(pa.date32())
    assert texts(connection, days, "date") == ["0002-12-31 BC", "10000-01-01", None]


def test_types_that_take_strings(connection: psycopg.Connection) -> None:
    key = str(uuid.uuid4())
    assert texts(connection, pa.array([key, None, key.upper()]), "uuid") == [key, None, key]
    assert texts(connection, pa.array([key, None, key.replace("-", "")]), "uuid") == [key, None, key]
    assert texts(connection, pa.array(["happy", None, "sad"]), "mood") == ["happy", None, "sad"]
    assert texts(connection, pa.array(['{"a": [1, "ü"]}', None]), "json") == ['{"a": [1, "ü"]}', None]
    assert round_trip(connection, pa.array(['{"a": [1, "ü"]}', None]), "jsonb") == [{"a": [1, "ü"]}, None]


STRUCT = pa.struct(
    [
        ("i", pa.int64()),
        ("f", pa.float64()),
        ("d", pa.decimal128(38, 2)),
        ("s", pa.string()),
        ("b", pa.binary()),
        ("t", pa.timestamp("us", "UTC")),
        ("day", pa.date32()),
        ("l", pa.list_(pa.int32())),
        ("m", pa.map_(pa.string(), pa.struct([("x", pa.bool_())]))),
    ]
)
VALUE = {
    "i": 2**60,
    "f": math.nan,
    "d": Decimal("9" * 36 + ".25"),
    "s": 'quote " and ü',
    "b": b"\x00\x01",
    "t": NOON.replace(tzinfo=dt.timezone.utc),
    "day": dt.date(2026, 1, 1),
    "l": [1, None],
    "m": [("k", {"x": True}), ("n", None)],
}


@pytest.mark.parametrize("declared", ["json", "jsonb"])
def test_structs_and_maps_become_json(connection: psycopg.Connection, declared: str) -> None:
    empty = dict.fromkeys(VALUE)
    array = pa.array([VALUE, None, empty, VALUE], STRUCT)
    expected = [
        {
            "i": 2**60,
            "f": "NaN",
            "d": Decimal("9" * 36 + ".25"),
            "s": 'quote " and ü',
            "b": "AAE=",
            "t": "2026-01-02T12:30:15.123456Z",
            "day": "2026-01-01",
            "l": [1, None],
            "m": {"k": {"x": True}, "n": None},
        },
        None,
        empty,
    ]
    for part in (array, array.slice(1)):
        read = [text and json.loads(text, parse_float=Decimal) for text in texts(connection, part, declared)]
        assert read == [*expected, expected[0]][4 - len(part) :]
    pairs = pa.array([[("a", 1), ("b", None)], None, [], [("c", 3)]], pa.map_(pa.string(), pa.int64()))
    assert round_trip(connection, pairs.slice(1), declared) == [None, {}, {"c": 3}]
    numbered = pa.array([[(1, "x")], None], pa.map_(pa.int64(), pa.string()))
    assert round_trip(connection, numbered, declared) == [{"1": "x"}, None]


def test_tables_that_the_sink_creates_take_every_type(connection: psycopg.Connection) -> None:
    arrays = {f"c{i}": array.slice(0, 2) for i, (array, _) in enumerate(SAME)}
    arrays["c98"] = pa.array([VALUE, None], STRUCT)
    batch = pa.RecordBatch.from_arrays(list(arrays.values()), [f"c{i}" for i in range(len(arrays))])
    copy(connection, batch, [target_type(field.type) for field in batch.schema])
    assert connection.execute("SELECT count(*) FROM t").fetchone() == (2,)


# ------------------------------------------------------------------ bad values
BAD = [
    (pa.array(["fine", "bad\0one"]), "text", r'row 2, column "c0": .* holds a NUL'),
    (pa.array([["fine"], ["x", "bad\0one"]]), "text[]", r'row 2, column "c0": .* holds a NUL'),
    (pa.array([1, 2**40]), "integer", r'row 2, column "c0": 1099511627776 is out of range'),
    (pa.array([str(uuid.uuid4()), "no-uuid"]), "uuid", "row 2, column .*no uuid"),
    (pa.array([str(uuid.uuid4()), "g" * 36]), "uuid", "row 2, column .*no uuid"),
]


@pytest.mark.parametrize(("array", "declared", "message"), BAD, ids=[name for _, name, _ in BAD])
def test_bad_values_name_table_column_and_row(
    connection: psycopg.Connection, array: pa.Array, declared: str, message: str
) -> None:
    with pytest.raises(BadValue, match="table public.t: " + message):
        round_trip(connection, array, declared)
    assert connection.execute("SELECT count(*) FROM t").fetchone() == (0,)


def test_rows_are_counted_over_batches() -> None:
    encoder = CopyEncoder(pa.schema([("a", pa.string())]), [PostgresColumn("a", "text")], "t")
    encoder.header()
    list(encoder.pieces(pa.RecordBatch.from_arrays([pa.array(["x"] * 40_000)], ["a"])))
    with pytest.raises(BadValue, match="row 40002"):
        list(encoder.pieces(pa.RecordBatch.from_arrays([pa.array(["x", "\0"])], ["a"])))


# ------------------------------------------------------------------ mismatches
def test_all_mismatches_are_named_at_once() -> None:
    schema = pa.schema(
        [
            ("id", pa.string()),
            ("Name", pa.string()),
            ("at", pa.timestamp("us")),
            ("local", pa.timestamp("us", "UTC")),
            ("made", pa.int64()),
            ("pairs", pa.list_(pa.list_(pa.int64()))),
            ("twice", pa.int64()),
            ("twice", pa.int64()),
            ("big", pa.int64()),
        ]
    )
    columns = [
        PostgresColumn("id", "int8", declared="bigint"),
        PostgresColumn("name", "text"),
        PostgresColumn("at", "timestamptz"),
        PostgresColumn("local", "timestamp"),
        PostgresColumn("made", "int8", generated=True),
        PostgresColumn("pairs", "int8[]"),
        PostgresColumn("twice", "int8"),
        PostgresColumn("big", "float8"),
        PostgresColumn("needed", "int8", nullable=False),
        PostgresColumn("optional", "int8"),
        PostgresColumn("serial", "int8", nullable=False, has_default=True),
    ]
    reasons = "\n".join(mismatches(schema, columns))
    for part in [
        '"twice" comes more than once',
        '"id": string does not go into bigint: cast it to an integer',
        '"Name" of the batch is not in the table (there is "name"; capitals count)',
        '"at": timestamp_ntz does not go into timestamptz',
        '"local": timestamp does not go into timestamp: cast it to timestamp_ntz',
        '"made" is generated',
        '"pairs": array<array<bigint>> does not go into int8[]: arrays of arrays',
        '"big": bigint does not go into float8',
        '"needed" of the table is NOT NULL without default',
    ]:
        assert part in reasons
    assert "optional" not in reasons
    assert "serial" not in reasons
    with pytest.raises(SchemaMismatch):
        CopyEncoder(schema, columns, "t")


# ------------------------------------------------------------------ any rows of the common types
COMMON: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.bool_(), st.booleans()),
    (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    (pa.int32(), st.integers(-(2**31), 2**31 - 1)),
    (pa.float64(), st.floats(allow_nan=False)),
    (pa.string(), st.text(st.characters(blacklist_characters="\0", blacklist_categories=["Cs"]))),
    (pa.binary(), st.binary()),
    (pa.date32(), st.dates()),
    (pa.timestamp("us"), st.datetimes()),
    (pa.decimal128(20, 4), st.decimals(-(10**15), 10**15, places=4)),
    (pa.list_(pa.int64()), st.lists(st.none() | st.integers(-(2**63), 2**63 - 1), max_size=4)),
    (pa.list_(pa.string()), st.lists(st.none() | st.text("aä€😀\"\\{},'", max_size=5), max_size=4)),
]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_rows_of_the_common_types(connection: psycopg.Connection, data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.sampled_from(COMMON), min_size=1, max_size=5))
    count = data.draw(st.integers(0, 6))
    columns = [
        pa.array(data.draw(st.lists(st.none() | values, min_size=count, max_size=count)), kind)
        for kind, values in chosen
    ]
    batch = pa.RecordBatch.from_arrays(columns, [f"c{i}" for i in range(len(columns))])
    copy(connection, batch, [target_type(kind) for kind, _ in chosen])
    read = connection.execute("SELECT * FROM t").fetchall()
    assert read == list(zip(*(column.to_pylist() for column in columns), strict=True))
