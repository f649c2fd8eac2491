"""JSON that is made column by column is what it would be value by value."""

from __future__ import annotations

import base64
import json
import math
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.types as at
from hypothesis import given, settings
from hypothesis import strategies as st

from sinks.arrow.json import to_json

MICROSECOND = timedelta(microseconds=1)
MOMENTS = st.datetimes(datetime(1900, 1, 1), datetime(2100, 1, 1))
FLAT: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (
        pa.string(),
        st.text(st.characters(exclude_categories=["Cs"]), max_size=5) | st.sampled_from(['"', "\\", "\x01é"]),
    ),
    (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    (pa.int8(), st.integers(-128, 127)),
    (pa.bool_(), st.booleans()),
    (pa.float64(), st.floats()),
    (pa.float32(), st.sampled_from([0.5, -0.0, 2.0**20, math.nan, math.inf, -math.inf])),
    (pa.decimal128(20, 3), st.integers(-(10**19), 10**19).map(lambda n: Decimal(n).scaleb(-3))),
    (pa.binary(), st.binary(max_size=4)),
    (pa.date32(), st.dates(date(1, 1, 1))),
    (pa.timestamp("us"), MOMENTS),
    (pa.timestamp("us", "Asia/Kolkata"), MOMENTS.map(lambda moment: moment.replace(tzinfo=timezone.utc))),
    (pa.duration("us"), st.integers(-(10**15), 10**15).map(lambda n: n * MICROSECOND)),
]
KEYS = [FLAT[0], FLAT[1], FLAT[3], FLAT[8]]


def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def lists(one: Any) -> Any:
        return pa.list_(one[0]), st.lists(st.none() | one[1], max_size=3)

    def maps(pair: Any) -> Any:
        (key, keys), (item, items) = pair
        return pa.map_(key, item), st.dictionaries(keys, st.none() | items, max_size=3).map(lambda d: list(d.items()))

    def structs(fields: Any) -> Any:
        names = [f'f"{number}é' for number in range(len(fields))]
        kind = pa.struct([(name, field[0]) for name, field in zip(names, fields, strict=True)])
        return kind, st.fixed_dictionaries({n: st.none() | f[1] for n, f in zip(names, fields, strict=True)})

    return (
        inner.map(lists) | st.tuples(st.sampled_from(KEYS), inner).map(maps) | st.lists(inner, max_size=3).map(structs)
    )


COLUMNS = st.recursive(st.sampled_from(FLAT), nested, max_leaves=4).flatmap(
    lambda one: st.tuples(st.just(one[0]), st.lists(st.none() | one[1], max_size=6))
)


def text(value: Any, kind: pa.DataType) -> str:
    if value is None:
        return "null"
    if at.is_struct(kind):
        fields = [f"{json.dumps(f.name, ensure_ascii=False)}:{text(value[f.name], f.type)}" for f in kind]
        return "{" + ",".join(fields) + "}"
    if at.is_map(kind):
        names = [text(key, kind.key_type) for key, _ in value]
        names = [name if name.startswith('"') else f'"{name}"' for name in names]
        return "{" + ",".join(f"{n}:{text(v, kind.item_type)}" for n, (_, v) in zip(names, value, strict=True)) + "}"
    if at.is_list(kind):
        return "[" + ",".join(text(each, kind.value_type) for each in value) + "]"
    if at.is_floating(kind):
        named = {math.inf: '"Infinity"', -math.inf: '"-Infinity"'}
        return '"NaN"' if math.isnan(value) else named.get(value) or repr(value)
    if at.is_binary(kind):
        return f'"{base64.b64encode(value).decode()}"'
    if at.is_boolean(kind):
        return "true" if value else "false"
    if at.is_date(kind):
        return f'"{value.isoformat()}"'
    if at.is_timestamp(kind):
        utc = value.astimezone(timezone.utc) if kind.tz else value
        return f'"{utc.replace(tzinfo=None).isoformat(timespec="microseconds")}{"Z" if kind.tz else ""}"'
    if at.is_duration(kind):
        whole = value // MICROSECOND
        return f'"PT{"-" if whole < 0 else ""}{abs(whole) // 1_000_000}.{abs(whole) % 1_000_000:06}S"'
    return (
        json.dumps(value, ensure_ascii=False)
        if isinstance(value, str)
        else f"{value:f}"
        if at.is_decimal(kind)
        else str(value)
    )


@settings(max_examples=100, deadline=None)
@given(COLUMNS, st.integers(0, 2))
def test_it_is_what_each_value_is_by_itself(column: tuple[pa.DataType, list[Any]], start: int) -> None:
    kind, values = column
    array = pa.array(values, kind).slice(start)
    expected = [None if value is None else text(value, kind) for value in array.to_pylist()]
    assert to_json(array).to_pylist() == expected


def test_entries_below_a_null_are_left_out() -> None:
    keys, items = pa.array(["a", "b", "c"]), pa.array([1, 2, 3])
    maps = pa.MapArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), keys, items)
    hidden = pa.MapArray.from_buffers(
        maps.type, 3, [pa.py_buffer(b"\x05"), *maps.buffers()[1:2]], children=[maps.values]
    )
    assert to_json(hidden).to_pylist() == ['{"a":1}', None, '{"c":3}']
    assert to_json(hidden.slice(1)).to_pylist() == [None, '{"c":3}']


def test_a_text_that_is_no_utf8_is_escaped_all_the_same() -> None:
    texts = pa.array([b'\xff"', b"\xff", None, b"ok"]).view(pa.string())
    assert to_json(texts).cast(pa.binary()).to_pylist() == [b'"\xff\\""', b'"\xff"', None, b'"ok"']


def test_a_key_that_is_no_text_is_one_in_json() -> None:
    key = pa.struct([("a", pa.int32()), ("b", pa.string())])
    keys = pa.array([[({"a": 1, "b": '"'}, 2)], None, []], pa.map_(key, pa.int32()))
    assert [row and json.loads(row) for row in to_json(keys).to_pylist()] == [{'{"a":1,"b":"\\""}': 2}, None, {}]
