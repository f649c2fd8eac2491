"""Plain columns become Avro all rows at once, in the bytes that fastavro makes of each."""

from __future__ import annotations

import json
import logging
from datetime import datetime, timedelta, timezone
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sinks.kafka.serialization import encoding
from sinks.kafka.serialization.avro import merged
from sinks.kafka.serialization.encoding import AvroWriter, with_integers

MOMENTS = st.datetimes(datetime(1, 1, 1), datetime(9999, 12, 31))
INTERVAL = timedelta(microseconds=2**63 - 1)
"""The longest that Arrow can hold."""
KINDS: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.bool_(), st.booleans()),
    *((getattr(pa, f"int{n}")(), st.integers(-(2 ** (n - 1)), 2 ** (n - 1) - 1)) for n in (8, 16, 32, 64)),
    (pa.float32(), st.floats(width=32)),
    (pa.float64(), st.floats()),
    (pa.string(), st.text(max_size=200)),
    (pa.large_string(), st.text(max_size=3)),
    (pa.binary(), st.binary(max_size=20)),
    (pa.timestamp("us", "UTC"), MOMENTS.map(lambda at: at.replace(tzinfo=timezone.utc))),
    (pa.date32(), st.dates()),
    (pa.timestamp("us"), MOMENTS),
    (pa.timestamp("ns"), MOMENTS.filter(lambda at: 1700 < at.year < 2200)),
    (pa.duration("us"), st.timedeltas(-INTERVAL, INTERVAL)),
    (pa.time64("us"), st.times()),
    (pa.time64("ns"), st.times()),
]


@st.composite
def structs(draw: st.DrawFn, kinds: list[tuple[pa.DataType, st.SearchStrategy[Any]]]) -> pa.StructArray:
    """A few rows, some of them or of their structs null, out of a longer array."""

    def several(deep: int) -> tuple[pa.DataType, st.SearchStrategy[Any]]:
        chosen = [draw(st.sampled_from(kinds)) for _ in range(draw(st.integers(1, 4)))]
        chosen += [several(deep - 1)] if deep and draw(st.booleans()) else []
        fields = {f"f{at}": schema for at, schema in enumerate(chosen)}
        values = st.fixed_dictionaries({name: st.none() | strategy for name, (_, strategy) in fields.items()})
        return pa.struct([(name, kind) for name, (kind, _) in fields.items()]), values

    kind, values = several(2)
    rows = draw(st.lists(st.none() | values, min_size=1, max_size=12))
    return pa.array(rows, kind)[draw(st.integers(0, len(rows) - 1)) :]


def writer_of(kind: pa.DataType, text: str | None = None) -> AvroWriter:
    return AvroWriter(70_000, text or merged(None, kind, "row").text)


def same(writer: AvroWriter, rows: pa.StructArray) -> bool:
    """Whether they are written at once; the bytes are those of one by one."""
    integers, finer = with_integers(rows, writer.text)
    row_by_row, refused = writer._row_by_row(integers)
    at_once = writer._at_once(integers)
    assert not finer
    if at_once is None:
        return False
    assert not refused
    assert at_once.to_pylist() == row_by_row.to_pylist()
    return True


@settings(max_examples=100, deadline=None)
@given(structs(KINDS))
def test_records_of_avro(rows: pa.StructArray) -> None:
    assert same(writer_of(rows.type), rows)


@pytest.mark.parametrize(
    ("fields", "at_once"),
    [
        ([{"name": "id", "type": "long"}], True),
        ([{"name": "id", "type": ["long", "null"]}], True),
        ([{"name": "more", "type": ["null", "string"]}, {"name": "id", "type": {"type": "long"}}], True),
        ([{"name": "id", "type": "long"}, {"name": "more", "type": "string", "default": "x"}], False),
        ([{"name": "id", "type": "long"}, {"name": "more", "type": ["string", "null"], "default": "x"}], False),
    ],
)
def test_registered_schemas_of_avro(fields: list[Any], at_once: bool) -> None:
    text = json.dumps({"type": "record", "name": "r", "fields": fields})
    rows = pa.array([{"id": 1}, {"id": -(2**31)}], pa.struct([("id", pa.int32())]))
    assert same(writer_of(rows.type, text), rows) is at_once


@pytest.mark.parametrize(
    "column",
    [
        pa.array([b"\xff"]).view(pa.string()),
        pa.array([[1]]),
        pa.array([1], pa.decimal128(5, 2)),
    ],
)
def test_other_columns_go_one_by_one(column: pa.Array) -> None:
    rows = pa.StructArray.from_arrays([column], names=["a"])
    assert writer_of(rows.type)._at_once(rows) is None


def test_a_null_where_none_may_be_is_refused_one_by_one() -> None:
    text = json.dumps({"type": "record", "name": "r", "fields": [{"name": "id", "type": "int"}]})
    writer = writer_of(pa.struct([("id", pa.int32())]), text)
    made, [refused] = writer.encoded(pa.array([{"id": 1}, {"id": None}], pa.struct([("id", pa.int32())])))
    assert (refused.row, made.is_valid().to_pylist()) == (1, [True, False])


@pytest.mark.parametrize(
    ("field", "column"),
    [
        ({"type": "enum", "name": "E", "symbols": ["A", "B"]}, pa.array(["B", None, "A"])),
        ({"type": "string", "logicalType": "uuid"}, pa.array(["01234567-89ab-cdef-0123-456789abcdef", None])),
        ({"type": "fixed", "name": "F", "size": 2}, pa.array([b"ab", None, b"\0\xff"])),
        ({"type": "long", "logicalType": "timestamp-millis"}, pa.array([-1000, None, 7000], pa.timestamp("us", "UTC"))),
        ({"type": "int", "logicalType": "time-millis"}, pa.array([1000, None], pa.time64("us"))),
    ],
    ids=lambda given: str(given.type) if isinstance(given, pa.Array) else "",
)
def test_types_of_other_programs_are_written_at_once(field: Any, column: pa.Array) -> None:
    inner = {"type": "record", "name": "In", "fields": [{"name": "v", "type": ["null", field]}]}
    text = json.dumps({"type": "record", "name": "r", "fields": [{"name": "s", "type": [inner, "null"]}]})
    struct = pa.StructArray.from_arrays([column], names=["v"])
    rows = pa.StructArray.from_arrays([pa.concat_arrays([struct, pa.nulls(1, struct.type)])], names=["s"])
    assert same(writer_of(rows.type, text), rows)


def test_bytes_that_differ_are_noticed_with_the_first_rows(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(encoding, "_AGREES", {})
    rows = pa.array([{"id": 1}, {"id": 2}], pa.struct([("id", pa.int32())]))
    writer = writer_of(rows.type)
    monkeypatch.setattr(AvroWriter, "_at_once", lambda self, column: pa.array([b"x"] * len(column), pa.large_binary()))
    with caplog.at_level(logging.WARNING):
        encoded = [writer.encoded(rows)[0].to_pylist() for _ in range(2)]
    assert encoded == [writer._row_by_row(with_integers(rows, writer.text)[0])[0].to_pylist()] * 2
    assert caplog.text.count("written one by one") == 1
