"""The edges of the encoder: what a value must not turn into on its way, and how a refused one is told.

`test_types.py` sends every type both ways round; here are the limits of PostgreSQL's types, arrays whose element type
only the catalog knows, and rows that must not get through.
"""

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

FIRST = -210_866_803_200_000_000
"""PostgreSQL's first microsecond, 4714-11-24 BC, counted from 1970."""
WRAPS = -(2**63) + 946_684_800_000_000
"""Counted from 2000 this is -2**63, the bytes of -infinity."""


@pytest.fixture(scope="module")
def connection(postgres: PostgresService) -> Iterator[psycopg.Connection]:
    with (
        postgres.database() as dsn,
        Connection.connect(dsn, autocommit=True, cursor_factory=psycopg.ClientCursor) as connection,
    ):
        connection.prepare_threshold = None  # the tables behind the same statement change
        connection.execute("SET timezone = 'UTC'")
        connection.execute("CREATE TYPE _mood AS ENUM ('sad', 'happy')")
        yield connection


def copy(connection: Any, batch: pa.RecordBatch, declared: list[str], slices: int = 1) -> None:
    """Copy into a fresh table `t` whose columns have the batch's names, in `slices` batches."""
    columns = ", ".join(f'"{name}" {kind}' for name, kind in zip(batch.schema.names, declared, strict=True))
    connection.execute("DROP TABLE IF EXISTS t")
    connection.execute(f"CREATE TABLE t ({columns})")
    target = catalog.describe(connection, "public", "t")
    assert target is not None
    encoder = CopyEncoder(batch.schema, target.columns, "public.t")
    step = max(1, -(-batch.num_rows // slices))
    with connection.cursor().copy("COPY t FROM STDIN (FORMAT BINARY)") as stream:
        stream.write(encoder.header())
        for start in range(0, batch.num_rows, step):
            stream.write(b"".join(encoder.pieces(batch.slice(start, step))))
        stream.write(encoder.trailer())


def texts(connection: Any, array: pa.Array, declared: str) -> list[str | None]:
    """As the server writes the values."""
    copy(connection, pa.RecordBatch.from_arrays([array], ["c"]), [declared])
    return [row[0] for row in connection.execute("SELECT c::text FROM t").fetchall()]


def moments(values: list[int | None], zone: str | None = None) -> pa.Array:
    return pa.array(values, pa.int64()).cast(pa.timestamp("us", zone))


def days(values: list[int | None]) -> pa.Array:
    return pa.array(values, pa.int32()).cast(pa.date32())


def nested(array: pa.Array) -> pa.Array:
    """Every value in an array of its own."""
    return pa.ListArray.from_arrays(pa.array(range(len(array) + 1), pa.int32()), array)


# ------------------------------------------------------------------ limits
def test_first_and_last_day(connection: psycopg.Connection) -> None:
    assert texts(connection, days([-2_440_588, None, 2_145_042_905]), "date") == [
        "4714-11-24 BC",
        None,
        "5874897-12-31",
    ]


@pytest.mark.parametrize("count", [-2_440_589, 2_145_042_906, -(2**31), -(2**31) + 10_957, 2**31 - 1])
def test_days_that_postgresql_has_not(connection: psycopg.Connection, count: int) -> None:
    """-2**31 + 10,957 days are -2**31 from 2000: the bytes of -infinity."""
    with pytest.raises(BadValue, match=f'row 2, column "c": {count} days from 1970 is outside'):
        texts(connection, days([None, count]), "date")


@pytest.mark.parametrize("micros", [FIRST - 1, WRAPS, WRAPS - 1, -(2**63)])
@pytest.mark.parametrize(("zone", "in_array"), [(None, False), (None, True), ("UTC", False), ("Europe/Berlin", False)])
def test_moments_that_postgresql_has_not(
    connection: psycopg.Connection, micros: int, in_array: bool, zone: str | None
) -> None:
    array, declared = moments([0, micros], zone), "timestamptz" if zone else "timestamp"
    with pytest.raises(BadValue, match=f'row 2, column "c": {micros} microseconds from 1970 is outside'):
        texts(connection, nested(array) if in_array else array, declared + "[]" * in_array)


def test_first_and_last_moment_in_arrays(connection: psycopg.Connection) -> None:
    array = pa.array([[FIRST, None, 2**63 - 1], None, []], pa.list_(pa.int64()))
    clocks = array.cast(pa.list_(pa.timestamp("us")))
    expected = ['{"4714-11-24 00:00:00 BC",NULL,"294247-01-10 04:00:54.775807"}', None, "{}"]
    assert texts(connection, clocks, "timestamp[]") == expected


def test_other_units_lose_nothing(connection: psycopg.Connection) -> None:
    nanos = pa.array([1_000, None], pa.int64()).cast(pa.timestamp("ns"))
    assert texts(connection, nanos, "timestamp") == ["1970-01-01 00:00:00.000001", None]
    for array in (pa.array([0, 1]).cast(pa.timestamp("ns")), pa.array([0, 2**60]).cast(pa.timestamp("s"))):
        with pytest.raises(BadValue, match=r"row 2, .*out of range"):
            texts(connection, array, "timestamp")


def test_intervals(connection: psycopg.Connection) -> None:
    array = pa.array([2**63 - 1, -(2**63), -1, None, 86_400_000_000], pa.int64()).cast(pa.duration("us"))
    expected = ["2562047788:00:54.775807", "-2562047788:00:54.775808", "-00:00:00.000001", None, "24:00:00"]
    assert texts(connection, array, "interval") == expected


@pytest.mark.parametrize("value", [1e300, -1e300, 3.5e38, 1e-60, -1e-60])
def test_doubles_never_become_infinite_or_zero(connection: psycopg.Connection, value: float) -> None:
    with pytest.raises(BadValue, match=r'row 3, column "c": .* is out of range of real'):
        texts(connection, pa.array([0.0, None, value]), "real")
    with pytest.raises(BadValue, match="row 2, "):
        texts(connection, nested(pa.array([0.0, value])), "real[]")


def test_doubles_that_real_holds(connection: psycopg.Connection) -> None:
    array = pa.array([0.5, -0.0, math.inf, -math.inf, math.nan, None, 2.0**-149])
    assert texts(connection, array, "real") == ["0.5", "-0", "Infinity", "-Infinity", "NaN", None, "1e-45"]


PARTS = pa.array([0, None, 600_000], pa.int64())
ROUNDED = [
    (pa.array([0.5, None, 0.1]), "real"),
    (pa.array([1, None, 2**24 + 1], pa.int32()), "real"),
    (pa.array([Decimal("1.500"), None, Decimal("1.125")]), "numeric(5,2)"),
    (pa.array([100, None, 150]), "numeric(5,-2)"),
    (PARTS.cast(pa.time64("us")), "time(0)"),
    (PARTS.cast(pa.timestamp("us")), "timestamp(0)"),
    (PARTS.cast(pa.timestamp("us", "UTC")), "timestamptz(0)"),
    (PARTS.cast(pa.duration("us")), "interval(0)"),
    (pa.array(["a", None, "abc  "]), "varchar(3)"),
    (pa.array(["äöü", None, "ab "]), "char(4)"),
]


@pytest.mark.parametrize(("array", "declared"), ROUNDED, ids=[declared for _, declared in ROUNDED])
def test_what_a_column_cannot_hold_as_it_is_is_refused(
    connection: psycopg.Connection, array: pa.Array, declared: str
) -> None:
    in_arrays = declared.startswith(("real", "numeric", "time(", "timestamp("))
    for rows, column in ((array, declared), (nested(array), declared + "[]"))[: 1 + in_arrays]:
        with pytest.raises(BadValue, match=r'row 3, column "c": .*(in Spark|of range|a space|longer than)'):
            texts(connection, rows, column)
        assert len(texts(connection, rows.slice(0, 2), column)) == 2


@pytest.mark.parametrize("declared", ["interval year", "interval day to second(0)"])
def test_intervals_with_fields(declared: str) -> None:
    column = PostgresColumn("c", "interval", declared=declared)
    assert "make the column a plain interval" in mismatches(pa.schema([("c", pa.duration("us"))]), [column])[0]


def test_domains_over_domains_and_over_arrays(connection: Any) -> None:
    connection.execute("CREATE DOMAIN natural_number AS bigint CHECK (value >= 0)")
    connection.execute("CREATE DOMAIN positive AS natural_number NOT NULL CHECK (value > 0)")
    connection.execute("CREATE DOMAIN several AS bigint[]")
    connection.execute("CREATE DOMAIN a_few AS several CHECK (cardinality(value) < 2)")
    numbers = pa.array([1, 2], pa.int32())
    assert texts(connection, numbers, "positive") == ["1", "2"]
    for declared in ("several", "a_few"):
        assert texts(connection, nested(numbers), declared) == ["{1}", "{2}"]
    connection.execute("CREATE DOMAIN rate AS numeric(5,1)")
    with pytest.raises(BadValue, match=r'row 1, column "c": .*cast it in Spark'):
        texts(connection, pa.array([Decimal("1.25")]), "rate")
    with pytest.raises(psycopg.errors.CheckViolation, match="positive_check"):
        texts(connection, pa.array([1, 0]), "positive")
    connection.execute("DROP TABLE IF EXISTS t; CREATE TABLE t (c positive, d positive DEFAULT 1)")
    target = catalog.describe(connection, "public", "t")
    assert target is not None
    assert [column.nullable for column in target.columns] == [False, False]
    assert len(mismatches(pa.schema([("d", pa.int64())]), target.columns)) == 1


@pytest.mark.parametrize("declared", ["price[]", "prices", "motto[]", "character varying(3)[]", "_mood[]"])
def test_arrays_that_are_refused_by_name(connection: Any, declared: str) -> None:
    connection.execute("DROP DOMAIN IF EXISTS prices, price, motto CASCADE; CREATE DOMAIN price AS numeric(5,1)")
    connection.execute("CREATE DOMAIN prices AS price[]; CREATE DOMAIN motto AS text")
    connection.execute(f"DROP TABLE IF EXISTS t; CREATE TABLE t (c {declared})")
    target = catalog.describe(connection, "public", "t")
    assert target is not None
    kind = pa.decimal128(5, 1) if declared.startswith("price") else pa.string()
    [reason] = mismatches(pa.schema([("c", pa.list_(kind))]), target.columns)
    assert re.search(
        rf"does not go into {re.escape(declared)}: its elements are none of .*: make the column text", reason
    )


def test_integers_that_real_cannot_hold(connection: psycopg.Connection) -> None:
    assert texts(connection, pa.array([2**24, None], pa.int32()), "real") == ["1.6777216e+07", None]
    with pytest.raises(BadValue, match=r"row 2, .* 16777217 is out of range of what the column holds exactly"):
        texts(connection, pa.array([1, 2**24 + 1], pa.int32()), "real")


def test_decimals(connection: psycopg.Connection) -> None:
    thousands = pa.array([Decimal("12300"), None, Decimal(0), Decimal("-100")], pa.decimal128(5, -2))
    assert texts(connection, thousands, "numeric") == ["12300", None, "0", "-100"]
    # groups of four digits, with zeros at both ends
    groups = [Decimal(text) for text in ("10000.0001", "-10000", "0.00001", "99999999.99990000", "-0.99999999")]
    array = pa.array(groups, pa.decimal128(30, 8))
    read = texts(connection, array, "numeric")
    assert read == [format(value, "f") for value in array.to_pylist()]
    tiny = pa.array([Decimal("9." + "9" * 37), Decimal("-9." + "9" * 37)], pa.decimal128(38, 37))
    assert texts(connection, tiny, "numeric") == [str(value) for value in tiny.to_pylist()]
    assert texts(connection, pa.array([2**64 - 1, 0], pa.uint64()), "numeric") == [str(2**64 - 1), "0"]


def test_the_server_judges_what_only_it_knows(connection: psycopg.Connection) -> None:
    cases: list[tuple[pa.Array, str, type[psycopg.Error]]] = [
        (pa.array([Decimal("1.00"), Decimal("123.45")]), "numeric(4,2)", psycopg.errors.NumericValueOutOfRange),
        (pa.array(["sad", "angry"]), "_mood", psycopg.errors.InvalidTextRepresentation),
        (pa.array(["{}", '{"a":']), "jsonb", psycopg.errors.InvalidTextRepresentation),
    ]
    for array, declared, error in cases:
        with pytest.raises(error) as caught:
            texts(connection, array, declared)
        assert "line 2, column c" in (caught.value.diag.context or "")


# ------------------------------------------------------------------ strings that are not text
KEY = "0f8fad5b-d9cb-469f-a165-70867728950e"


@pytest.mark.parametrize(
    "text", [KEY.upper(), KEY.replace("-", ""), "{" + KEY + "}", "0f8f-ad5bd9cb469fa16570867728950e"]
)
def test_uuids_as_postgresql_reads_them(connection: psycopg.Connection, text: str) -> None:
    assert texts(connection, pa.array([KEY, None, text]), "uuid") == [KEY, None, KEY]
    assert connection.execute("SELECT %s::uuid", [text]).fetchone() == (uuid.UUID(KEY),)


@pytest.mark.parametrize(
    "text",
    [
        "0f8f_ad5bd9cb469fa16570867728950e",  # Python's UUID() takes these for other values
        " f8fad5bd9cb469fa16570867728950e",
        "0f8fad5b+d9cb-469f-a165-70867728950e",
        "{" + KEY,
        KEY + "}",
        KEY[:-1],
        "é" * 18,
        KEY[:-1] + "g",
        "",
    ],
)
def test_no_uuids(connection: psycopg.Connection, text: str) -> None:
    with pytest.raises(BadValue, match=r'row 2, column "c": .* is no uuid'):
        texts(connection, pa.array([KEY, text]), "uuid")


def test_uuids_of_slices_and_nulls(connection: psycopg.Connection) -> None:
    for kind in (pa.string(), pa.large_string()):
        array = pa.array(["no uuid", None, KEY, None, KEY], kind)
        assert texts(connection, array.slice(1), "uuid") == [None, KEY, None, KEY]
    assert texts(connection, pa.array([None, None], pa.string()), "uuid") == [None, None]


# ------------------------------------------------------------------ arrays
def test_arrays_of_nothing_but_nulls(connection: psycopg.Connection) -> None:
    """Spark's array<void>, which says nothing about the elements."""
    plain = ("bigint", "numeric", "numeric(5,2)", "text", "boolean", "bytea", "time", "time(0)", "timestamp(3)")
    array = pa.array([[None, None], [], None])
    for element in (*plain, "uuid", "timestamptz", "varchar(3)", "char(3)", "_mood"):
        assert texts(connection, pa.nulls(2), element) == [None, None]
        assert texts(connection, pa.nulls(2), element + "[]") == [None, None]
    assert texts(connection, array, "text[]") == ["{NULL,NULL}", "{}", None]
    with pytest.raises(SchemaMismatch, match="its elements have no type: cast it"):
        texts(connection, array, "bigint[]")


def test_enums_whose_name_begins_like_an_array(connection: psycopg.Connection) -> None:
    assert texts(connection, pa.array(["sad", None]), "_mood") == ["sad", None]


def test_null_arrays_may_have_elements_behind_them(connection: psycopg.Connection) -> None:
    """Arrow allows a null entry to span elements; they must not show, and not shift the row of an error."""

    def spanning(last: str) -> pa.Array:
        offsets = pa.array([0, 1, 3, 4], pa.int32()).buffers()[1]
        valid = pa.py_buffer(b"\x05")
        return pa.ListArray.from_buffers(
            pa.list_(pa.string()), 3, [valid, offsets], children=[pa.array(["1", "\0", "3", last])]
        )

    assert texts(connection, spanning("4"), "text[]") == ["{1}", None, "{4}"]
    assert texts(connection, spanning("4").slice(1), "text[]") == [None, "{4}"]
    with pytest.raises(BadValue, match="row 3, "):
        texts(connection, spanning("\0"), "text[]")
    with pytest.raises(BadValue, match="row 2, "):
        texts(connection, spanning("\0").slice(1), "text[]")


def test_large_lists(connection: psycopg.Connection) -> None:
    array = pa.array([["a", None], None, []], pa.large_list(pa.large_string()))
    assert texts(connection, array, "text[]") == ["{a,NULL}", None, "{}"]


# ------------------------------------------------------------------ JSON
@pytest.mark.parametrize("declared", ["json", "jsonb"])
def test_empty_arrays_in_json(connection: psycopg.Connection, declared: str) -> None:
    lists = pa.array([[], None, [[]], [[], None, [1]]], pa.list_(pa.list_(pa.int64())))
    read = texts(connection, lists, declared)
    assert [text and json.loads(text) for text in read] == [[], None, [[]], [[], None, [1]]]
    inside = pa.array(
        [{"l": []}, {"l": None}, None, {"l": [{"m": []}]}],
        pa.struct([("l", pa.list_(pa.struct([("m", pa.list_(pa.int64()))])))]),
    )
    for part in (inside, inside.slice(1)):
        read = texts(connection, part, declared)
        assert [text and json.loads(text) for text in read] == part.to_pylist()


def test_years_in_json(connection: psycopg.Connection) -> None:
    far = [2**63 - 1, FIRST, 0, None]
    for zone, end in ((None, ""), ("Asia/Tokyo", "Z")):
        array = pa.StructArray.from_arrays([moments(far, zone)], ["t"])
        assert [json.loads(text or "")["t"] for text in texts(connection, array, "jsonb")] == [
            f"294247-01-10T04:00:54.775807{end}",
            f"-4713-11-24T00:00:00.000000{end}",
            f"1970-01-01T00:00:00.000000{end}",
            None,
        ]
    array = pa.StructArray.from_arrays([days([2_145_042_905, -2_440_588, None])], ["d"])
    assert [json.loads(text or "")["d"] for text in texts(connection, array, "jsonb")] == [
        "5874897-12-31",
        "-4713-11-24",
        None,
    ]


def test_numbers_and_intervals_in_json(connection: psycopg.Connection) -> None:
    floats = pa.array([0.1, 3.4e38, math.nan, math.inf, -math.inf, None], pa.float32())
    array = pa.StructArray.from_arrays([floats], ["f"])
    assert [json.loads(text or "", parse_int=float)["f"] for text in texts(connection, array, "jsonb")] == [
        0.1,
        3.4e38,
        "NaN",
        "Infinity",
        "-Infinity",
        None,
    ]
    spans = pa.array([86_401_000_000, -1, None], pa.int64()).cast(pa.duration("us"))
    copy(connection, pa.RecordBatch.from_arrays([pa.StructArray.from_arrays([spans], ["d"])], ["c"]), ["jsonb"])
    assert connection.execute("SELECT (c ->> 'd')::interval FROM t").fetchall() == [
        (dt.timedelta(days=1, seconds=1),),
        (dt.timedelta(microseconds=-1),),
        (None,),
    ]


# ------------------------------------------------------------------ how a refused value is told
def test_a_bad_value_is_told_with_what_its_row_begins_with(connection: psycopg.Connection) -> None:
    batch = pa.RecordBatch.from_pydict(
        {
            "id": [1, 2],
            "note": ["fine", "bad\0" + "x" * 500],
            "at": moments([0, 2**63 - 1]),  # no datetime of Python's
            "key": ["k" * 500, "k" * 500],
            "fifth": [1, 2],
        }
    )
    with pytest.raises(BadValue) as caught:
        copy(connection, batch, ["bigint", "text", "timestamp", "text", "bigint"])
    message = str(caught.value)
    assert message.startswith('table public.t: row 2, column "note": \'bad')
    assert message.endswith(f"(the row begins id=2, at={2**63 - 1}, key='{'k' * 56}...) [EO-VALUE]")
    assert len(message) < 300


def test_rows_are_counted_over_batches_and_pieces() -> None:
    encoder = CopyEncoder(pa.schema([("a", pa.string())]), [PostgresColumn("a", "text")], "t")
    encoder.header()
    list(encoder.pieces(pa.RecordBatch.from_arrays([pa.array(["x"] * 10)], ["a"])))
    rows = pa.array(["x"] * 40_000 + ["\0"] + ["x"] * 5)
    with pytest.raises(BadValue, match="row 40009,"):
        list(encoder.pieces(pa.RecordBatch.from_arrays([rows.slice(2)], ["a"])))


def pieces_of(array: pa.Array) -> tuple[CopyEncoder, list[int]]:
    encoder = CopyEncoder(pa.schema([("a", pa.string())]), [PostgresColumn("a", "text")], "t")
    encoder.header()
    sizes = [len(piece) for piece in encoder.pieces(pa.RecordBatch.from_arrays([array], ["a"]))]
    return encoder, [*sizes, len(encoder.trailer())]


def test_large_batches_come_in_pieces() -> None:
    encoder, many = pieces_of(pa.array(["x"] * 1_000_000))
    assert sum(many) == 1_000_000 * 7 + 2  # two bytes of count, four of length, one of text; the end is two
    assert max(many) < 1.5 * 2**20
    assert encoder.rows == 1_000_000
    encoder, wide = pieces_of(pa.array(["x" * 2**20] * 64))
    assert sum(wide) == 64 * (2**20 + 6) + 2
    assert max(wide) < 17 * 2**20
    encoder, none = pieces_of(pa.array([], pa.string()))
    assert (none, encoder.rows) == ([2], 0)


def test_batches_of_another_schema_are_refused() -> None:
    """Two columns of one type that change places would go unseen: COPY knows no names."""
    encoder = CopyEncoder(
        pa.schema([("a", pa.int64()), ("b", pa.int64())]),
        [PostgresColumn("a", "int8"), PostgresColumn("b", "int8")],
        "t",
    )
    for batch in ({"b": [1], "a": [2]}, {"a": [1]}, {"a": ["x"], "b": [1]}):
        with pytest.raises(SchemaMismatch, match="table t: after row 0 the batches have other columns"):
            list(encoder.pieces(pa.RecordBatch.from_pydict(batch)))


# ------------------------------------------------------------------ what does not go in
VARIANT = pa.struct(
    [
        pa.field("value", pa.binary(), nullable=False),
        pa.field("metadata", pa.binary(), nullable=False, metadata={b"variant": b"true"}),
    ]
)
GEOMETRY = pa.struct(
    [
        pa.field("srid", pa.int32(), nullable=False),
        pa.field("wkb", pa.binary(), nullable=False, metadata={b"geometry": b"true", b"srid": b"0"}),
    ]
)


@pytest.mark.parametrize(
    ("arrow", "advice"),
    [
        (VARIANT, "use to_json()"),
        (pa.list_(VARIANT), "use to_json()"),
        (pa.struct([("inner", pa.map_(pa.string(), VARIANT))]), "use to_json()"),
        (GEOMETRY, "use st_asbinary()"),
    ],
    ids=["variant", "array", "struct of map", "geometry"],
)
def test_inner_bytes_of_spark_are_not_json(arrow: pa.DataType, advice: str) -> None:
    [reason] = mismatches(pa.schema([("v", arrow)]), [PostgresColumn("v", "jsonb")])
    assert advice in reason
    with pytest.raises(SchemaMismatch, match=f"no PostgreSQL type for .*{re.escape(advice)}"):
        target_type(arrow)


@pytest.mark.parametrize(
    ("arrow", "declared"),
    [
        (pa.decimal128(10, 0), "int8"),
        (pa.float64(), "int8"),
        (pa.float64(), "numeric"),
        (pa.string(), "numeric"),
        (pa.string(), "timestamp"),
        (pa.string(), "bool"),
        (pa.int64(), "bool"),
        (pa.int64(), "text"),
        (pa.bool_(), "int4"),
        (pa.binary(), "text"),
        (pa.string(), "bytea"),
        (pa.date32(), "timestamp"),
        (pa.timestamp("us"), "date"),
        (pa.timestamp("us"), "timestamptz"),
        (pa.timestamp("us", "UTC"), "timestamp"),
        (pa.list_(pa.int64()), "int8"),
        (pa.int64(), "int8[]"),
        (pa.list_(pa.list_(pa.int64())), "int8[]"),
        (pa.list_(pa.null()), "int8[]"),
        (pa.struct([("a", pa.int64())]), "text"),
        (pa.decimal256(50, 2), "numeric"),
        (pa.month_day_nano_interval(), "interval"),
        (pa.binary(16), "uuid"),
        (pa.string(), "tsvector"),
        (pa.string(), "macaddr"),
        (pa.string(), "cidr"),
        (pa.string(), "xml"),
    ],
    ids=str,
)
def test_what_does_not_go_in_is_said_before_the_first_row(arrow: pa.DataType, declared: str) -> None:
    [reason] = mismatches(pa.schema([("a", arrow)]), [PostgresColumn("a", declared)])
    assert reason.startswith('column "a": ')
    assert f"does not go into {declared}: " in reason


# ------------------------------------------------------------------ any rows
ELEMENTS: list[tuple[pa.DataType, str, st.SearchStrategy[Any]]] = [
    (pa.timestamp("us", "UTC"), "timestamptz", st.datetimes(timezones=st.just(dt.timezone.utc))),
    (pa.string(), "varchar", st.text(st.characters(blacklist_characters="\0", blacklist_categories=["Cs"]))),
    (pa.string(), "uuid", st.uuids().map(str)),
    (pa.decimal128(38, 10), "numeric", st.decimals(-(10**28) + 1, 10**28 - 1, places=10)),
    (pa.int32(), "int2", st.integers(-(2**15), 2**15 - 1)),
    (pa.float64(), "float8", st.floats(allow_nan=False)),
    (pa.date32(), "date", st.dates()),
    (pa.binary(), "bytea", st.binary()),
    (pa.bool_(), "bool", st.booleans()),
]
NOT_IN_ARRAYS = {"timestamptz", "varchar", "uuid"}


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_rows_in_any_batches(connection: psycopg.Connection, data: st.DataObject) -> None:
    """Values and arrays of them, sliced and in several batches, come back as they went."""
    chosen = data.draw(st.lists(st.tuples(st.sampled_from(ELEMENTS), st.booleans()), min_size=1, max_size=5))
    skip, count = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 8))
    arrays, declared = [], []
    for (kind, name, values), in_array in chosen:
        in_array = in_array and name not in NOT_IN_ARRAYS
        drawn = st.none() | (st.lists(st.none() | values, max_size=3) if in_array else values)
        rows = data.draw(st.lists(drawn, min_size=skip + count, max_size=skip + count))
        arrays.append(pa.array(rows, pa.list_(kind) if in_array else kind).slice(skip))
        declared.append(name + "[]" * in_array)
    batch = pa.RecordBatch.from_arrays(arrays, [f"c{i}" for i in range(len(arrays))])
    copy(connection, batch, declared, slices=data.draw(st.integers(1, 3)))
    read = connection.execute("SELECT * FROM t").fetchall()
    assert [tuple(map(_plain, row)) for row in read] == list(zip(*(a.to_pylist() for a in arrays), strict=True))


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, uuid.UUID) else value


def test_every_conversion_takes_no_rows() -> None:
    """Nothing may depend on there being a value: empty arrays have no buffers to look into."""
    for kind, name, _ in ELEMENTS:
        for arrow, declared in ((kind, name), (pa.list_(kind), "text[]" if kind == pa.string() else name + "[]")):
            if declared == "timestamptz[]":
                continue
            assert len(PostgresColumn("a", declared).conversion(arrow)(pa.array([], arrow))) == 0
