"""Arrow columns become record batches, which decoders of others read as they were; and keys go where Java puts them."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kafka.codec import has_gzip
from kafka.partitioner.default import murmur2 as murmur2_of_key
from kafka.record import MemoryRecords

from sinks.kafka import columns
from sinks.kafka.record_batch import (
    CODECS,
    FREE,
    HEADER,
    Origin,
    RecordBatchPlan,
    by_topic,
    murmur2,
    partitions_of,
    record_batch,
)
from sinks.kafka.row_bytes import varints

NOW = 1_770_000_000_000
TYPES = [pa.string(), pa.binary(), pa.large_string(), pa.large_binary()]
HEADERS = pa.list_(pa.struct([("value", pa.binary()), ("key", pa.string())]))

short = st.none() | st.text(max_size=5) | st.integers(60, 70).map("x".__mul__) | st.just("y" * 9000)
header = st.fixed_dictionaries({"key": st.text(max_size=3), "value": st.none() | st.binary(max_size=70)})
moment = st.none() | st.integers(1, 2**41)
row = st.tuples(short, short, st.none() | st.lists(header, max_size=3), moment)


def column(values: Iterable[str | None], kind: pa.DataType) -> pa.Array:
    return pa.array([None if v is None else v.encode() for v in values], pa.binary()).cast(kind)


def decoded(batch: bytes) -> list[Any]:
    """By kafka-python."""
    (decoded_batch,) = iter(MemoryRecords(batch).next_batch, None)
    assert decoded_batch.validate_crc()
    return list(decoded_batch)


@given(
    rows=st.lists(row, min_size=1, max_size=80),
    kinds=st.tuples(st.sampled_from(TYPES), st.sampled_from(TYPES)),
    left_out=st.sets(st.sampled_from(["key", "headers", "timestamp"])),
    cut=st.integers(0, 5),
    origin=st.none() | st.builds(Origin, st.integers(0, 2**62), st.integers(0, 2**15 - 1), st.integers(0, 2**31 - 1)),
)
@settings(max_examples=100, deadline=None)
def test_rows_arrive_as_they_are(rows: Any, kinds: Any, left_out: set[str], cut: int, origin: Origin | None) -> None:
    keys, values, headers, moments = zip(*rows, strict=True)
    columns = {
        "key": column(keys, kinds[0]),
        "value": column(values, kinds[1]),
        "headers": pa.array(headers, HEADERS),
        "timestamp": pa.array([moment and moment * 1000 for moment in moments], pa.timestamp("us", "UTC")),
    }
    chosen = {name: array for name, array in columns.items() if name not in left_out}
    batch = pa.RecordBatch.from_pydict(chosen).slice(min(cut, len(rows) - 1))
    made = record_batch(batch, NOW, origin=origin)
    parsed = MemoryRecords(made).next_batch()
    assert parsed.is_transactional is (origin is not None)
    assert (parsed.producer_id, parsed.producer_epoch, parsed.base_sequence) == (origin or (-1, -1, -1))
    expected = [
        (
            None if "key" in left_out or key is None else key.encode(),
            None if value is None else value.encode(),
            [] if "headers" in left_out else [(header["key"], header["value"]) for header in some or ()],
            NOW if "timestamp" in left_out or at is None else at,
        )
        for key, value, some, at in rows[min(cut, len(rows) - 1) :]
    ]
    records = decoded(made)
    assert [(record.key, record.value, list(record.headers), record.timestamp) for record in records] == expected
    assert [record.offset for record in records] == list(range(len(records)))
    assert parsed.max_timestamp == max(moment[3] for moment in expected)
    plan = RecordBatchPlan.of(batch)
    assert HEADER + plan.bounds.sum() >= len(made)
    assert plan.sizes.tolist() == [
        sum(len(part or b"") for part in (key, value, *(x for k, v in some for x in (k.encode(), v))))
        for key, value, some, _ in expected
    ]


@given(st.lists(st.integers(-(2**63), 2**63 - 1)))
def test_varints(numbers: list[int]) -> None:
    made = varints(np.array(numbers, np.int64))
    for at, number in enumerate(numbers):
        read = sum(int(made.bytes[k, at] & 0x7F) << 7 * k for k in range(made.lengths[at]))
        assert (read >> 1) ^ -(read & 1) == number
        assert [bool(made.bytes[k, at] & 0x80) for k in range(made.lengths[at])][-1] is False


@pytest.mark.parametrize("name", ["none", "gzip"])
@pytest.mark.parametrize("count", [1, 5000])
def test_a_batch_that_is_compressed(name: str, count: int) -> None:
    """Others are read by a consumer of librdkafka (test_sink.py), since kafka-python needs a library for each."""
    assert has_gzip()
    values = [f"value {n}" for n in range(count)]
    made = record_batch(pa.RecordBatch.from_pydict({"value": values}), NOW, name)
    assert [record.value.decode() for record in decoded(made)] == values
    assert made[22] & 7 == (CODECS.index(name) if count > 1 else 0)  # what does not get smaller stays as it is


def test_elements_of_lists_that_are_null_are_none() -> None:
    """Arrow lets a null list have elements."""
    child = pa.array([{"key": "a", "value": b"1"}, {"key": "b", "value": b"2"}], HEADERS.value_type)
    lists = pa.ListArray.from_arrays(pa.array([0, 1, 2], pa.int32()), child, mask=pa.array([True, False]))
    batch = pa.RecordBatch.from_arrays([pa.array(["x", "y"]), lists], names=["value", "headers"])
    assert [list(record.headers) for record in decoded(record_batch(batch, NOW))] == [[], [("b", b"2")]]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
def test_rows_go_to_their_topics_in_order(kind: pa.DataType) -> None:
    """Texts are large with spark.sql.execution.arrow.useLargeVarTypes."""
    topics = pa.array(["x", "y", None, "x", "y", "default"], kind)
    header = pa.struct([("key", kind), ("value", pa.binary())])
    headers = pa.array([[{"key": "a", "value": b"1"}]] * 6, pa.list_(header))
    batch = pa.RecordBatch.from_pydict({"value": list("abcdef"), "topic": topics, "headers": headers})
    columns.check("sink", batch.schema, None)
    assert list(columns.refused(batch, "default")) == []
    assert decoded(record_batch(batch, NOW))[0].headers == [("a", b"1")]
    by_name = [(topic, rows.column("value").to_pylist()) for topic, rows in by_topic(batch, "default")]
    assert by_name == [("x", ["a", "d"]), ("y", ["b", "e"]), ("default", ["c", "f"])]


# ---------------------------------------------------------------------- partitions
JAVA = {
    b"21": -973932308,
    b"foobar": -790332482,
    b"a-little-bit-long-string": -985981536,
    b"a-little-bit-longer-string": -1486304829,
    b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    b"abc": 479470107,
}
"""Of org.apache.kafka.common.utils.UtilsTest."""


def test_hashes_of_javas_own_test() -> None:
    assert murmur2(pa.array(list(JAVA), pa.binary())).tolist() == [hash & 0x7FFFFFFF for hash in JAVA.values()]


@given(st.lists(st.binary(max_size=40) | st.binary(min_size=5000, max_size=5003)), st.integers(0, 3))
@settings(max_examples=50, deadline=None)
def test_hashes_of_any_keys(keys: list[bytes], cut: int) -> None:
    hashes = murmur2(pa.array(keys, pa.binary()).slice(cut))
    assert hashes.tolist() == [murmur2_of_key(key) & 0x7FFFFFFF for key in keys[cut:]]


def test_hashes_of_many_keys() -> None:
    source = random.Random(7)
    keys = [source.randbytes(source.randrange(30)) for _ in range(50_000)]
    assert murmur2(pa.array(keys, pa.binary())).tolist() == [murmur2_of_key(key) & 0x7FFFFFFF for key in keys]


def test_the_partition_of_a_row() -> None:
    rows = pa.RecordBatch.from_pydict(
        {"key": ["foobar", None, "", "foobar"], "partition": pa.array([None, None, None, 2], pa.int32())}
    )
    assert partitions_of(rows, 7).tolist() == [(-790332482 & 0x7FFFFFFF) % 7, FREE, 275646681 % 7, 2]
