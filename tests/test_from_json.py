"""Rows that went into JSON for a dead letter come back as they were, with the schema that is beside them."""

from __future__ import annotations

import json
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from sinks.spark_types import schema_of_json, schema_to_json
from sinks.sql.from_json import from_json, loads
from sinks.sql.json import to_json

UTC = timezone.utc
STRUCT = pa.struct([("a", pa.int32()), ("b", pa.list_(pa.decimal128(38, 18)))])
COLUMNS: list[tuple[str, pa.DataType, list[Any]]] = [
    ("boolean", pa.bool_(), [True, False]),
    ("byte", pa.int8(), [-128, 127]),
    ("short", pa.int16(), [-(2**15), 2**15 - 1]),
    ("integer", pa.int32(), [-(2**31), 2**31 - 1]),
    ("long", pa.int64(), [-(2**63), 2**63 - 1]),
    ("float", pa.float32(), [0.1, 7.038530691851209e-26]),
    ("double", pa.float64(), [1e308, float("-inf")]),
    ("decimal", pa.decimal128(38, 18), [Decimal("12345678901234567890.123456789012345678"), Decimal("-1E-18")]),
    ("string", pa.string(), ['"\\\0ü\n', ""]),
    ("binary", pa.binary(), [b"\x00\xff", b""]),
    ("date", pa.date32(), [date(1, 1, 1), date(9999, 12, 31)]),
    ("timestamp", pa.timestamp("us", "UTC"), [datetime(1, 1, 1, 0, 0, 0, 1, UTC), datetime(9999, 12, 31, tzinfo=UTC)]),
    ("timestamp_ntz", pa.timestamp("us"), [datetime(2024, 2, 29, 23, 59, 59, 999999), datetime(1, 1, 1)]),
    ("time(6)", pa.time64("us"), [time(23, 59, 59, 999999), time(0)]),
    ("interval day to second", pa.duration("us"), [timedelta(-3, 0, 1), timedelta(40_000, 1)]),
    ("struct", STRUCT, [{"a": 1, "b": [Decimal("0.1"), None]}, {"a": None, "b": None}]),
    ("array", pa.list_(pa.timestamp("us")), [[datetime(2024, 1, 1), None], []]),
    ("map of int", pa.map_(pa.int64(), STRUCT), [[(2**62, {"a": 1, "b": []})], []]),
    ("map of date", pa.map_(pa.date32(), pa.binary()), [[(date(2024, 1, 1), b"\x01")], [(date(2024, 1, 2), None)]]),
    ("map of boolean", pa.map_(pa.bool_(), pa.string()), [[(True, "x")], [(False, None)]]),
]  # fmt: skip


def test_a_row_comes_back_as_it_was() -> None:
    schema = pa.schema([(name, kind) for name, kind, _ in COLUMNS])
    batch = pa.RecordBatch.from_arrays([pa.array([*values, None], kind) for _, kind, values in COLUMNS], schema=schema)
    rows = [loads(text) for text in to_json(pa.StructArray.from_arrays(batch.columns, fields=list(schema))).to_pylist()]
    known = schema_of_json(json.loads(schema_to_json(schema)))
    assert known == schema
    for field in known:
        assert from_json([row[field.name] for row in rows], field.type).equals(batch[field.name]), field
    [nan] = from_json([loads(to_json(pa.array([float("nan")])).to_pylist()[0])], pa.float64()).to_pylist()
    assert nan != nan


def test_a_time_comes_back_that_spark_counts_in_nanoseconds() -> None:
    [text] = to_json(pa.array([time(23, 59, 59, 1)], pa.time64("ns"))).to_pylist()
    assert from_json([loads(text)], pa.time64("us")).to_pylist() == [time(23, 59, 59, 1)]


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ("1", pa.int64()),
        (True, pa.int64()),
        (1, pa.bool_()),
        (1, pa.string()),
        (2**31, pa.int32()),
        (Decimal("1.5"), pa.int32()),
        (True, pa.float64()),
        (True, pa.decimal128(10, 2)),
        ("1_000", pa.float64()),
        ("1_000", pa.decimal128(10, 2)),
        ([0, [1, 2], 0], pa.decimal128(10, 2)),
        (Decimal("1E+39"), pa.float32()),
        (Decimal("1E+400"), pa.float64()),
        (Decimal("1E-400"), pa.float64()),
        (2**24 + 1, pa.float32()),
        (2**53 + 1, pa.float64()),
        ("*", pa.binary()),
        (Decimal("0.001"), pa.decimal128(10, 2)),
        ({"a": 1}, STRUCT),
        ([1], STRUCT),
        ("today", pa.date32()),
        ("2024-01-01T00:00:00+02:00", pa.timestamp("us")),
        ("2024-01-01T00:00:00Z", pa.timestamp("us")),
        ("2024-01-01T00:00:00.123456789", pa.timestamp("us")),
        ("2024-01-01T00:00:00+02:00Z", pa.timestamp("us", "UTC")),
        ("10:00+02:00", pa.time64("us")),
        ({"1": 1, " 1": 2}, pa.map_(pa.int32(), pa.int32())),
        ("1 s", pa.duration("us")),
    ],
)
def test_what_is_of_another_type_is_refused(value: Any, kind: pa.DataType) -> None:
    with pytest.raises((ValueError, TypeError)):
        from_json([value], kind)


def test_a_name_that_comes_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="'id' comes twice"):
        loads('{"row": {"id": 1, "id": 2}}')


@pytest.mark.parametrize("kind", [pa.date32(), pa.timestamp("us"), pa.timestamp("us", "UTC")])
def test_years_that_python_has_not(kind: pa.DataType) -> None:
    days = pa.array([-4_000_000, -719_529, -719_528, 2_932_896, 2_932_897, 40_000_000], pa.int32())
    dates = days.view(pa.date32()).cast(pa.timestamp("s")).cast(kind) if kind != pa.date32() else days.view(kind)
    assert from_json([loads(text) for text in to_json(dates).to_pylist()], kind).equals(dates)


def test_a_timestamp_of_another_zone() -> None:
    [found] = from_json(["2024-01-01T00:00:00+02:00"], pa.timestamp("us", "UTC")).to_pylist()
    assert found == datetime(2023, 12, 31, 22, tzinfo=UTC)


def test_a_type_that_spark_has_not() -> None:
    with pytest.raises(ValueError, match="Spark has no type for uint8"):
        schema_to_json(pa.schema([("a", pa.uint8())]))
