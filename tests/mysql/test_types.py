"""Every type goes in and comes back, by LOAD DATA and by INSERT, and what the server would alter is refused."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import math
import re
import uuid
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pymysql
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sinks.errors import BadValue, SchemaMismatch
from sinks.mysql import MySQLSink
from sinks.mysql.columns import MySQLColumn, target_type
from sinks.mysql.connection import literal
from sinks.mysql.load import InsertEncoder, LoadEncoder, RowEncoder
from sinks.sql.table import mismatches
from sinks.testing.table import context
from tests.mysql.observer import Observer

WAYS = pytest.mark.parametrize("local", [True, False], ids=["load", "insert"])
NOON = dt.datetime(2026, 1, 2, 12, 30, 15, 123456)


@pytest.fixture
def db(mysql_database: str) -> Iterator[Observer]:
    observer = Observer(mysql_database)
    observer.run("SET time_zone = '+00:00', sql_mode = 'STRICT_ALL_TABLES'")
    yield observer
    observer.close()


def write(db: Observer, batch: pa.RecordBatch, declared: list[str], *, local: bool = True) -> None:
    """Into a fresh table `t` with columns c0, c1, … of the declared types, as the sink does."""
    db.run("DROP TABLE IF EXISTS t")
    columns = ", ".join(f"c{i} {name}" for i, name in enumerate(declared))
    db.run(f"CREATE TABLE t (n int AUTO_INCREMENT PRIMARY KEY, {columns}) ENGINE=InnoDB")
    sink = MySQLSink(db.dsn, "t", strategy="xa")
    sink.check(batch.schema)
    db.run("SET GLOBAL local_infile = %s", [local])
    transaction = sink.begin_transaction(context(sink, schema=batch.schema))
    try:
        sink.write(transaction, batch)
        sink.commit_directly(transaction)
    except BaseException:
        sink.rollback(transaction)
        raise
    finally:
        db.run("SET GLOBAL local_infile = ON")
        sink.close()


def round_trip(db: Observer, array: pa.Array, declared: str, *, local: bool = True, read: str = "c0") -> list[Any]:
    write(db, pa.RecordBatch.from_arrays([array], ["c0"]), [declared], local=local)
    return [row[0] for row in db.run(f"SELECT {read} FROM t ORDER BY n")]


MEMBERS = ["a\\b", "\\", "\\'", "n\n", "\r\t\0\x1a", '"', "é", "''"]
"""Of an enumeration, in ways that the catalog writes with marks, or does not show."""
LITERALS = ", ".join(map(literal, MEMBERS))
SAME = [
    (pa.array([True, None, False]), "boolean"),
    (pa.array([-128, None, 127], pa.int8()), "tinyint"),
    (pa.array([-(2**15), None, 2**15 - 1], pa.int16()), "smallint"),
    (pa.array([-(2**23), None, 2**23 - 1], pa.int32()), "mediumint"),
    (pa.array([-(2**31), None, 2**31 - 1], pa.int32()), "int"),
    (pa.array([-(2**63), None, 2**63 - 1], pa.int64()), "bigint"),
    (pa.array([0, None, 255], pa.int64()), "tinyint unsigned"),
    (pa.array([0, None, 2**32 - 1], pa.int64()), "int unsigned zerofill"),
    (pa.array([Decimal(2**64 - 1), None, Decimal(0)], pa.decimal128(20, 0)), "bigint unsigned"),
    (pa.array([1, None, -5], pa.int32()), "double"),
    (pa.array([1901, None, 2155], pa.int32()), "year"),
    (pa.array([1e308, None, 5e-324, -0.1, 1 / 3], pa.float64()), "double"),
    (pa.array([Decimal("123.45"), None, Decimal("-0.01"), Decimal("0.00")], pa.decimal128(10, 2)), "decimal(10,2)"),
    (pa.array([Decimal("9" * 38), None, Decimal("-" + "9" * 38)], pa.decimal128(38, 0)), "decimal(38)"),
    (pa.array([Decimal("9" * 8 + "." + "9" * 30), None], pa.decimal128(38, 30)), "decimal(65,30)"),
    (pa.array([Decimal("0." + "0" * 29 + "1"), None], pa.decimal128(38, 30)), "decimal(38,30)"),
    (pa.array([Decimal("12345678901234567890123E-30"), None, Decimal(0)], pa.decimal128(38, 30)), "decimal(38,30)"),
    (pa.array([Decimal("1.50"), None], pa.decimal128(10, 4)), "decimal(3,2)"),
    (pa.array([2**63 - 1, None, -(2**63)], pa.int64()), "decimal(19,0)"),
    (pa.array(["", None, "NULL", "\\N", "ä€😀", "a\tb\nc\\d\0e'f\"g\r\x1a", " \\", "'", "x" * 100_000]), "longtext"),
    (pa.array(["a", None, "ä€😀 "], pa.large_string()), "varchar(10)"),
    (pa.array(["a", None, "é"]), "varchar(10) CHARACTER SET latin1"),
    (pa.array(["a", None, "é"]), "char(3)"),
    (pa.array([b"", None, b"\x00\xff\t\n\\'\"", bytes(range(256))]), "longblob"),
    (pa.array([b"", None, b"\x00\xff"], pa.large_binary()), "varbinary(3)"),
    (pa.array([b"\x00" * 16, None, uuid.UUID(int=7).bytes]), "binary(16)"),
    (pa.array([dt.date(1, 1, 1), None, dt.date(9999, 12, 31), dt.date(1970, 1, 1)]), "date"),
    (pa.array([NOON, None, dt.datetime(1, 1, 1), dt.datetime.max], pa.timestamp("us")), "datetime(6)"),
    (pa.array([NOON.replace(microsecond=0), None], pa.timestamp("us")), "datetime"),
    (pa.array([NOON.replace(microsecond=120_000), None], pa.timestamp("ms")), "datetime(2)"),
    (pa.array([None, None]), "int"),
    (pa.array(["sad", None, "it's"]), "enum('sad', 'it''s', '12')"),
    (pa.array(["12", None]), "enum('sad', 'it''s', '12')"),
    (pa.array(MEMBERS), f"enum({LITERALS}) COLLATE utf8mb4_bin"),
]


@WAYS
@pytest.mark.parametrize(("array", "declared"), SAME, ids=[f"{array.type} to {name!a}" for array, name in SAME])
def test_values_come_back_as_they_went(db: Observer, array: pa.Array, declared: str, local: bool) -> None:
    expected = array.to_pylist()
    assert round_trip(db, array, declared, local=local) == expected
    # buffers of a slice begin somewhere in the middle
    part = pa.concat_arrays([array, array, array]).slice(len(array) - 1, len(array) + 1)
    assert round_trip(db, part, declared, local=local) == part.to_pylist()


@WAYS
def test_values_that_are_read_by_other_means(db: Observer, local: bool) -> None:
    # the last one as 7.038531e-26 is another float if it is read as a double first
    floats = pa.array([1.5, None, 0.1, 3.4e38, 1e-45, -16777217.0, 7.038530691851209e-26], pa.float32())
    doubles = floats.cast(pa.float64())
    assert round_trip(db, doubles, "float", local=local, read="CAST(c0 AS double)") == floats.to_pylist()
    assert round_trip(db, floats, "float", local=local, read="CAST(c0 AS double)") == floats.to_pylist()
    assert round_trip(db, floats, "double", local=local) == floats.to_pylist()
    bits = pa.array([5, None, 0], pa.int64())
    assert round_trip(db, bits, "bit(3)", local=local, read="c0 + 0") == bits.to_pylist()
    assert round_trip(db, pa.array([True, None, False]), "bit(1)", local=local, read="c0 + 0") == [1, None, 0]
    everything = pa.array([Decimal(2**64 - 1), None], pa.decimal128(20, 0))
    assert round_trip(db, everything, "bit(64)", local=local, read="c0 + 0") == everything.to_pylist()
    times = pa.array([dt.time(23, 59, 59, 999999), None, dt.time(0)], pa.time64("us"))
    assert round_trip(db, times, "time(6)", local=local, read="CAST(c0 AS char)") == [
        "23:59:59.999999",
        None,
        "00:00:00.000000",
    ]
    spans = [dt.timedelta(hours=838, minutes=59, seconds=59), None, -dt.timedelta(seconds=1, microseconds=5)]
    assert round_trip(db, pa.array(spans, pa.duration("us")), "time(6)", local=local) == spans


@WAYS
@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin", "America/New_York"])
def test_timestamps_with_zone_are_points_in_time(db: Observer, zone: str, local: bool) -> None:
    moments = [NOON.replace(tzinfo=dt.timezone.utc), None, dt.datetime.fromtimestamp(1, dt.timezone.utc)]
    array = pa.array(moments, pa.timestamp("us", zone))
    read_back = round_trip(db, array, "timestamp(6) NULL", local=local, read="UNIX_TIMESTAMP(c0) * 1000000")
    assert read_back == [moment and int(moment.timestamp() * 1_000_000) for moment in moments]


STRUCT = pa.struct(
    [
        ("i", pa.int64()),
        ("f", pa.float64()),
        ("d", pa.decimal128(15, 2)),
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
    "d": Decimal("9" * 13 + ".25"),
    "s": 'quote " and \\ and \t and ü and 😀',
    "b": b"\x00\x01",
    "t": NOON.replace(tzinfo=dt.timezone.utc),
    "day": dt.date(2026, 1, 1),
    "l": [1, None],
    "m": [("k", {"x": True}), ("n", None)],
}
AS_JSON = {
    "i": 2**60,
    "f": "NaN",
    "d": Decimal("9" * 13 + ".25"),
    "s": 'quote " and \\ and \t and ü and 😀',
    "b": "AAE=",
    "t": "2026-01-02T12:30:15.123456Z",
    "day": "2026-01-01",
    "l": [1, None],
    "m": {"k": {"x": True}, "n": None},
}


LONG_STRUCT = pa.struct([("prices", pa.list_(pa.decimal128(38, 2)))])
LONG = {"prices": [Decimal("9" * 36 + ".25"), None]}


@WAYS
def test_structs_maps_and_arrays_become_json(db: Observer, local: bool) -> None:
    array = pa.array([VALUE, None, dict.fromkeys(VALUE), VALUE], STRUCT)
    for part in (array, array.slice(1)):
        read_back = [
            text and json.loads(text, parse_float=Decimal) for text in round_trip(db, part, "json", local=local)
        ]
        assert read_back == [AS_JSON, None, dict.fromkeys(VALUE), AS_JSON][4 - len(part) :]
    lists = pa.array([[1, None], None, []], pa.list_(pa.int64()))
    assert [text and json.loads(text) for text in round_trip(db, lists, "json", local=local)] == lists.to_pylist()
    texts = pa.array(['{"a": ["\\\\", "\\n", "ü"]}', None])
    assert [text and json.loads(text) for text in round_trip(db, texts, "json", local=local)] == [
        {"a": ["\\", "\n", "ü"]},
        None,
    ]


def test_a_struct_with_more_digits_than_doubles_goes_into_the_table_that_the_sink_creates(db: Observer) -> None:
    batch = pa.RecordBatch.from_arrays([pa.array([LONG, None], LONG_STRUCT)], ["c"])
    sink = MySQLSink(db.dsn, "created", strategy="staged", create_table=True)
    sink.check(batch.schema)
    transaction = sink.begin_transaction(context(sink, schema=batch.schema))
    sink.write(transaction, batch)
    sink.commit_directly(transaction)
    sink.close()
    read_back = [text and json.loads(text, parse_float=Decimal) for (text,) in db.run("SELECT c FROM created")]
    assert read_back == batch.column(0).to_pylist()


def exactly(text: str) -> Any:
    """Numbers compare by value, and objects with all their names."""
    return json.loads(
        text, parse_float=Decimal, parse_int=Decimal, object_pairs_hook=lambda pairs: sorted(pairs, key=repr)
    )


ALTERED_BY_MYSQL = [
    ('{"a": 1, "a": 2}', "'a' comes twice"),
    ('[{"a" : {"b": 1, "\\u0062"\n: 2}}]', "'b' comes twice"),
    ("0.10000000000000000555", "0.10000000000000000555 would be rounded to 0.1"),
    ("[9007199254740993.0]", "9007199254740993.0 would be rounded to 9007199254740992.0"),
    ('{"a": 18446744073709551616}', "18446744073709551616 would be rounded to 1.8446744073709552e"),
    ("9007199254740993e1", "9007199254740993e1 would be rounded to 9.007199254740994e+16"),
    ("-1e400", "-1e400 is out of range of a double"),
    ("1e-400", "1e-400 is out of range of a double"),
    ("1e9999999999999999999", "1e9999999999999999999 is out of range of a double"),
    ("[0.1234567890123456", "is no JSON: Expecting"),
]


@pytest.mark.parametrize("mysql", ["mysql_server"], indirect=True, ids=["MySQL"])
@pytest.mark.parametrize(("text", "reason"), ALTERED_BY_MYSQL, ids=[text for text, _ in ALTERED_BY_MYSQL])
def test_json_that_mysql_would_alter_is_refused(db: Observer, text: str, reason: str) -> None:
    array, refusal = pa.array(["0", text]), rf'row 2, column "c0": .*{re.escape(reason)}'
    with pytest.raises(BadValue, match=refusal):
        round_trip(db, array, "json")


NUMBERS = st.from_regex(r"-?(0|[1-9][0-9]{0,22})(\.[0-9]{1,22})?([eE][+-]?[0-9]{1,3})?", fullmatch=True)
LETTERS = st.text(st.characters(exclude_categories=["Cs"]), max_size=3)


def nested(documents: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    members = st.tuples(st.sampled_from("abc") | LETTERS, documents)
    objects = st.lists(members, max_size=4).map(
        lambda pairs: f"{{{','.join(f'{json.dumps(name)} : {value}' for name, value in pairs)}}}"
    )
    return objects | st.lists(documents, max_size=4).map(lambda items: f"[{', '.join(items)}]")


PLAIN = NUMBERS | LETTERS.map(json.dumps) | st.sampled_from(["null", "true", "[]", "{}"])
DOCUMENTS = st.recursive(PLAIN, nested, max_leaves=8)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=DOCUMENTS)
@example('{"a": 1, "b": [18446744073709551615, -9223372036854775808, 0.30000000000000004, 1e22, -0.0]}')
def test_any_json_comes_back_or_is_refused(db: Observer, json_sink: MySQLSink, text: str) -> None:
    batch = pa.RecordBatch.from_arrays([pa.array([text])], ["c"])
    transaction = json_sink.begin_transaction(context(json_sink, schema=batch.schema))
    try:
        json_sink.write(transaction, batch)
        json_sink.commit_directly(transaction)
        refused = False
    except BadValue:
        json_sink.rollback(transaction)
        refused = True
        try:
            db.run("INSERT INTO documents VALUES (%s)", [text])
        except pymysql.Error:
            return
    ((read_back,),) = db.run("SELECT c FROM documents")
    db.run("DELETE FROM documents")
    assert (exactly(read_back) != exactly(text)) is refused


@pytest.fixture
def json_sink(db: Observer) -> Iterator[MySQLSink]:
    db.run("CREATE TABLE documents (c json)")
    sink = MySQLSink(db.dsn, "documents", strategy="xa")
    sink.check(pa.schema([("c", pa.string())]))
    yield sink
    sink.close()


@WAYS
def test_types_of_mariadb_that_take_strings(db: Observer, local: bool) -> None:
    if "MariaDB" not in db.run("SELECT VERSION()")[0][0]:
        pytest.skip("the types are MariaDB's")
    for text, declared in [(str(uuid.uuid4()), "uuid"), ("10.0.0.1", "inet4"), ("::1", "inet6")]:
        assert round_trip(db, pa.array([text, None]), declared, local=local) == [text, None]


@WAYS
def test_tables_that_the_sink_creates_take_every_type(db: Observer, local: bool) -> None:
    arrays = [array.slice(0, 2) for array, _ in SAME]
    arrays += [pa.array([VALUE, None], STRUCT), pa.array([LONG, None], LONG_STRUCT), pa.array([[b"x"], None])]
    arrays += [pa.array([NOON, None], pa.timestamp("us", "UTC")), pa.array([dt.time(1), None], pa.time64("us"))]
    arrays += [pa.array([1.5, None], pa.float32()), pa.array([dt.timedelta(1), None], pa.duration("us"))]
    batch = pa.RecordBatch.from_arrays(arrays, [f"c{i}" for i in range(len(arrays))])
    write(db, batch, [target_type(field.type) + " NULL" for field in batch.schema], local=local)
    assert db.run("SELECT count(*) FROM t") == [(2,)]


def test_staged_enumerations_have_the_members_of_the_table(db: Observer) -> None:
    batch = pa.RecordBatch.from_arrays([pa.array(MEMBERS)], ["e"])
    db.run(f"CREATE TABLE t (e enum({LITERALS})) COLLATE utf8mb4_bin")
    sink = MySQLSink(db.dsn, "t", strategy="staged")
    with contextlib.closing(sink):
        sink.check(batch.schema)
        transaction = sink.begin_transaction(context(sink, schema=batch.schema))
        sink.write(transaction, batch)
        sink.commit_directly(transaction)
        assert sorted(member for (member,) in db.run("SELECT CAST(e AS char) FROM t")) == sorted(MEMBERS)
        db.run("CREATE TABLE faces (e enum('😀'))")
        with pytest.raises(SchemaMismatch, match="as question marks, so its members are not known: use a varchar"):
            MySQLSink(db.dsn, "faces").check(batch.schema)


# ------------------------------------------------------------------ bad values
BAD = [
    (pa.array([1, 2**40]), "int", r'row 2, column "c0": 1099511627776 is out of range of int'),
    (pa.array([1, -1]), "int unsigned", r'row 2, column "c0": -1 is out of range'),
    (pa.array([1, 2], pa.int8()), "bit(1)", r'row 2, column "c0": 2 is out of range'),
    (pa.array([2000, 99]), "year", r"row 2.*99 is outside the years"),  # 1999, to the server
    (pa.array([1.0, math.nan]), "double", r"row 2.*nan is no number"),
    (pa.array([1.0, -math.inf]), "double", r"row 2.*-inf is no number"),
    (pa.array([1.0, 1e39]), "float", r"row 2.*1e\+39 is out of range of float"),
    (pa.array([1.0, 1e-50]), "float", r"row 2.*1e-50 is out of range of float"),
    (pa.array([1, 2**24 + 1], pa.int32()), "float", r"row 2.*16777217 is out of range"),
    (pa.array([Decimal("1.50"), Decimal("1.55")], pa.decimal128(10, 2)), "decimal(10,1)", "row 2.*rounded to d"),
    (pa.array([1.5, 0.1]), "float", r"row 2.*0\.1 would be rounded to float: cast it"),
    (pa.array([Decimal("9.5"), Decimal("10.5")], pa.decimal128(10, 1)), "decimal(2,1)", "row 2.*out of range"),
    (pa.array([Decimal("1"), Decimal("-1")], pa.decimal128(1, 0)), "decimal(10,0) unsigned", "row 2.*is below 0"),
    (pa.array(["x", "abcd"]), "varchar(3)", "c0['`].* at row 2"),
    (pa.array(["x", "abc "]), "varchar(3)", "c0['`].* at row 2"),
    (pa.array(["x", "ab "]), "char(3)", "row 2.*ends with a space"),
    (pa.array(["x", "😀"]), "varchar(3) CHARACTER SET latin1", "c0['`].* at row 2"),
    (pa.array(["x", "😀"]), "varchar(3) CHARACTER SET utf8mb3", "c0['`].* at row 2"),
    (pa.array([b"x", b"abcd"]), "varbinary(3)", "c0['`].* at row 2"),
    (pa.array([b"abc", b"ab"]), "binary(3)", "row 2.*is not 3 bytes long"),
    (pa.array(["a", "1"]), "enum('a', 'b')", "row 2.*'1' is no member"),  # 'a', to the server
    (pa.array(["a", " 2"]), "enum('a', 'b')", "row 2.*' 2' is no member"),
    (pa.array(["a", "c"]), "enum('a', 'b')", "row 2.*'c' is no member"),
    (pa.array(["a", "A"]), "enum('a', 'b')", "row 2.*'A' is no member"),  # 'a', to the server
    (pa.array(["a", "a "]), "enum('a', 'b')", "row 2.*'a ' is no member"),
    (pa.array(["{}", "{bad"]), "json", "c0|JSON"),
    (pa.array(["{}", "[" * 101 + "]" * 101]), "json", "c0|maximum depth"),
    (pa.array([0, -719_163], pa.int32()).cast(pa.date32()), "date", "row 2.*outside the years 0001 to 9999"),
    (pa.array([0, 2_932_897], pa.int32()).cast(pa.date32()), "date", "row 2.*outside the years"),
    (pa.array([0, 2**62]).cast(pa.timestamp("us")), "datetime(6)", "row 2.*outside the years"),
    (pa.array([0, 1]).cast(pa.timestamp("us")), "datetime", r"row 2.*would be rounded to datetime"),
    (pa.array([0, 1_100]).cast(pa.timestamp("us")), "datetime(3)", r"row 2.*would be rounded to datetime\(3\)"),
    (pa.array([0, 1_100]).cast(pa.time64("us")), "time(3)", r"row 2.*would be rounded to time\(3\)"),
    (pa.array([1_000_000, 0]).cast(pa.timestamp("us", "UTC")), "timestamp NULL", "c0['`].* at row 2"),
    (pa.array([1_000_000, 5 * 10**15]).cast(pa.timestamp("us", "UTC")), "timestamp NULL", "c0['`].* at row 2"),
    (pa.array([0, 839 * 3600 * 10**6]).cast(pa.duration("us")), "time(6)", "c0['`].* at row 2"),
    (pa.array([1, None]), "int NOT NULL", r'row 2, column "c0": NULL in a column that is NOT NULL'),
    (
        pa.array([1_000_000, None], pa.int64()).cast(pa.timestamp("us", "UTC")),
        "timestamp NOT NULL DEFAULT current_timestamp",  # now, to the server
        r'row 2, column "c0": NULL',
    ),
]


@WAYS
@pytest.mark.parametrize(("array", "declared", "message"), BAD, ids=[f"{name} {text[-20:]}" for _, name, text in BAD])
def test_what_the_server_would_alter_is_refused(
    db: Observer, array: pa.Array, declared: str, message: str, local: bool
) -> None:
    with pytest.raises(BadValue, match=rf"(?s)^table {db.schema}.t: .*{message}"):
        round_trip(db, array, declared, local=local)
    assert db.run("SELECT count(*) FROM t") == [(0,)]


@pytest.mark.parametrize("encoder", [LoadEncoder, InsertEncoder])
def test_rows_are_counted_over_pieces_and_batches(encoder: type[RowEncoder]) -> None:
    encoding = encoder(pa.schema([("a", pa.int64())]), [MySQLColumn("a", "tinyint")], "t")
    assert (
        sum(rows for _, rows in encoding.pieces(pa.RecordBatch.from_arrays([pa.array([1] * 70_000)], ["a"]))) == 70_000
    )
    with pytest.raises(BadValue, match="row 70002"):
        list(encoding.pieces(pa.RecordBatch.from_arrays([pa.array([1, 1000])], ["a"])))


def test_a_piece_is_not_much_larger_than_it_should_be() -> None:
    wide = pa.RecordBatch.from_arrays([pa.array(["x" * 100_000] * 1000)], ["a"])
    for encoder in (LoadEncoder, InsertEncoder):
        encoding = encoder(wide.schema, [MySQLColumn("a", "longtext")], "t")
        sizes = [len(data) for data, _ in encoding.pieces(wide)]
        assert max(sizes) < 1.1 * encoder.bytes_at_once
        assert sum(sizes) >= 100_000_000


def test_other_columns_in_a_later_batch_are_refused() -> None:
    encoding = LoadEncoder(pa.schema([("a", pa.int64())]), [MySQLColumn("a", "bigint")], "t")
    with pytest.raises(SchemaMismatch, match="after row 0 the batches have other columns"):
        list(encoding.pieces(pa.RecordBatch.from_arrays([pa.array(["1"])], ["a"])))


# ------------------------------------------------------------------ mismatches
def test_what_the_json_of_mysql_would_round_is_refused() -> None:
    """MariaDB's is a text, and has a collation."""
    kind = pa.map_(pa.string(), pa.list_(pa.struct([("price", pa.decimal128(20, 2))])))
    schema, narrow = pa.schema([("c", kind)]), pa.schema([("c", pa.struct([("price", pa.decimal128(15, 2))]))])
    in_mysql, in_mariadb = MySQLColumn("c", "json"), MySQLColumn("c", "json", collation="utf8mb4_bin")
    [reason] = mismatches(schema, [in_mysql])
    assert "it holds a decimal(20, 2), and MySQL's JSON keeps such numbers as doubles" in reason
    assert mismatches(narrow, [in_mysql]) == []
    assert mismatches(schema, [in_mariadb]) == []
    assert mismatches(schema, [MySQLColumn("c", "longtext", collation="utf8mb4_bin")]) == []


def test_all_mismatches_are_named_at_once() -> None:
    schema = pa.schema(
        [
            ("id", pa.string()),
            ("Name", pa.string()),
            ("at", pa.timestamp("us")),
            ("local", pa.timestamp("us", "UTC")),
            ("made", pa.int64()),
            ("pairs", pa.list_(pa.int64())),
            ("twice", pa.int64()),
            ("twice", pa.int64()),
            ("big", pa.int64()),
            ("rounded", pa.float64()),
            ("place", pa.string()),
            ("flag", pa.bool_()),
        ]
    )
    columns = [
        MySQLColumn("id", "bigint"),
        MySQLColumn("name", "text"),
        MySQLColumn("at", "timestamp"),
        MySQLColumn("local", "datetime", "datetime(6)"),
        MySQLColumn("made", "bigint", generated=True),
        MySQLColumn("pairs", "varchar", "varchar(10)"),
        MySQLColumn("twice", "bigint"),
        MySQLColumn("big", "double"),
        MySQLColumn("rounded", "float", "float(7,4)", precision=7, scale=4),
        MySQLColumn("place", "point"),
        MySQLColumn("flag", "int"),
        MySQLColumn("needed", "bigint", nullable=False),
        MySQLColumn("optional", "bigint"),
        MySQLColumn("serial", "bigint", nullable=False, has_default=True),
    ]
    reasons = "\n".join(mismatches(schema, columns))
    for part in [
        '"twice" comes more than once',
        '"id": string does not go into bigint: cast it to an integer',
        '"Name" of the batch is not in the table (there is "name"; capitals count)',
        '"at": timestamp_ntz does not go into timestamp: cast it to timestamp',
        '"local": timestamp does not go into datetime(6): cast it to timestamp_ntz',
        '"made" is generated',
        '"pairs": array<bigint> does not go into varchar(10): cast it to string',
        '"big": bigint does not go into double',
        '"rounded": double does not go into float(7,4): float(7,4) rounds',
        '"place": string does not go into point: type point is not supported',
        '"flag": boolean does not go into int: cast it to an integer',
        '"needed" of the table is NOT NULL without default',
    ]:
        assert part in reasons
    assert "optional" not in reasons
    assert "serial" not in reasons
    with pytest.raises(SchemaMismatch):
        LoadEncoder(schema, columns, "t")


def test_types_that_no_table_can_be_created_for() -> None:
    variant = pa.struct([pa.field("value", pa.binary(), metadata={b"variant": b"true"})])
    for kind, advice in [
        (pa.decimal128(38, 31), "cast it"),
        (pa.month_day_nano_interval(), "cast it"),
        (variant, "to_json"),
    ]:
        with pytest.raises(SchemaMismatch, match=advice):
            target_type(kind)


# ------------------------------------------------------------------ any rows of the common types
TEXT = st.text(st.characters(exclude_categories=["Cs"])) | st.text("\\\t\n'\"N\0,;%sä€😀", max_size=8)
COMMON: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.bool_(), st.booleans()),
    (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    (pa.int32(), st.integers(-(2**31), 2**31 - 1)),
    (pa.float64(), st.floats(allow_nan=False, allow_infinity=False)),
    (pa.string(), TEXT),
    (pa.binary(), st.binary()),
    (pa.date32(), st.dates()),
    (pa.timestamp("us"), st.datetimes()),
    (pa.decimal128(20, 4), st.decimals(-(10**15), 10**15, places=4)),
]


@pytest.fixture
def wide(db: Observer) -> Iterator[MySQLSink]:
    """Of a table with a column for each of the common types."""
    with contextlib.closing(MySQLSink(db.dsn, "wide", strategy="xa", create_table=True)) as sink:
        sink.check(pa.schema([(f"c{i}", kind) for i, (kind, _) in enumerate(COMMON)]))
        yield sink
    db.run("SET GLOBAL local_infile = ON")


@WAYS
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_rows_of_the_common_types(db: Observer, wide: MySQLSink, local: bool, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 6))
    batch = pa.RecordBatch.from_arrays(
        [
            pa.array(data.draw(st.lists(st.none() | values, min_size=count, max_size=count)), kind)
            for kind, values in COMMON
        ],
        [f"c{i}" for i in range(len(COMMON))],
    )
    db.run("DELETE FROM wide")
    db.run("SET GLOBAL local_infile = %s", [local])
    transaction = wide.begin_transaction(context(wide, schema=batch.schema))
    try:
        wide.write(transaction, batch)
        wide.commit_directly(transaction)
    except BaseException:
        wide.rollback(transaction)
        raise
    read_back = db.run("SELECT * FROM wide")
    expected = list(zip(*(column.to_pylist() for column in batch.columns), strict=True))
    assert sorted(map(repr, map(_plain, read_back))) == sorted(map(repr, map(_plain, expected)))


def _plain(row: tuple[Any, ...]) -> tuple[Any, ...]:
    """-0.0 is 0.0, and booleans are numbers."""
    return tuple(
        value + 0.0 if isinstance(value, float) else int(value) if isinstance(value, bool) else value for value in row
    )


@WAYS
@pytest.mark.parametrize("kind", ["text", "json", "varchar(9) CHARACTER SET latin1"])
@pytest.mark.parametrize(
    "text", [b"b\xf0", b"\xf0\x9f", b"\xff", b"\xed\xa0\x80"], ids=["cut", "cut later", "byte", "half"]
)
def test_text_that_is_no_utf8_is_a_bad_row(db: Observer, kind: str, text: bytes, local: bool) -> None:
    """LOAD DATA of MySQL leaves out what the last row of a piece ends with."""
    rows = pa.RecordBatch.from_arrays([pa.array([b"1", text]).view(pa.string())], names=["c0"])
    with pytest.raises(BadValue, match='row 2, column "c0": the text is not UTF-8'):
        write(db, rows, [kind], local=local)
