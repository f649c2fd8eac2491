"""Arrow columns become librdkafka's messages, byte for byte; and its structure is the one we take it for."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sinks.kafka import librdkafka as rd
from sinks.kafka.messages import by_topic, messages


def cell(pointer: int, length: int) -> bytes | None:
    return ctypes.string_at(int(pointer), int(length)) if pointer else None


def as_rows(batch: pa.RecordBatch) -> list[tuple[bytes | None, bytes | None, int]]:
    made = messages(batch)
    return [(cell(m["key"], m["key_len"]), cell(m["payload"], m["len"]), int(m["partition"])) for m in made]


TYPES = [pa.string(), pa.binary(), pa.large_string(), pa.large_binary()]


@given(
    rows=st.lists(st.tuples(st.none() | st.text(max_size=5), st.none() | st.text(max_size=5)), min_size=1),
    key_type=st.sampled_from(TYPES),
    value_type=st.sampled_from(TYPES),
    cut=st.integers(0, 5),
)
@settings(max_examples=200, deadline=None)
def test_keys_and_values_arrive_as_they_are(rows: Any, key_type: Any, value_type: Any, cut: int) -> None:
    def column(values: list[str | None], kind: pa.DataType) -> pa.Array:
        return pa.array([None if v is None else v.encode() for v in values], pa.binary()).cast(kind)

    batch = pa.RecordBatch.from_arrays(
        [column([k for k, _ in rows], key_type), column([v for _, v in rows], value_type)], names=["key", "value"]
    ).slice(cut)
    expected = [(k if k is None else k.encode(), v if v is None else v.encode(), -1) for k, v in rows]
    assert as_rows(batch) == expected[cut:]


def test_an_empty_value_is_not_a_tombstone() -> None:
    batch = pa.RecordBatch.from_pydict({"value": pa.array(["", None], pa.string())})
    assert as_rows(batch) == [(None, b"", -1), (None, None, -1)]


def test_partition_of_a_row_or_the_partitioners() -> None:
    batch = pa.RecordBatch.from_pydict({"value": ["a", "b"], "partition": pa.array([3, None], pa.int32())})
    assert [m["partition"] for m in messages(batch)] == [3, rd.ANY_PARTITION]


def test_rows_go_to_their_topics_in_order() -> None:
    batch = pa.RecordBatch.from_pydict({"value": list("abcde"), "topic": ["x", "y", None, "x", "y"]})
    found = {topic: rows.column("value").to_pylist() for topic, rows in by_topic(batch, "default")}
    assert found == {"x": ["a", "d"], "y": ["b", "e"], "default": ["c"]}


def test_the_installed_library_is_known() -> None:
    assert rd.unusable() is None


@pytest.mark.parametrize("version", [0x01090000, 0x03000000])
def test_another_major_version_is_not_called(version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rd.lib, "version", lambda: version)
    assert "major version 2" in str(rd.unusable())


def test_the_message_structure_is_librdkafkas() -> None:
    """Without any broker: the one record that is too large is found, and no other, so size and offsets agree."""
    text = ctypes.create_string_buffer(512)
    conf = rd.lib.conf_new()
    assert rd.lib.conf_set(conf, b"message.max.bytes", b"1000", text, len(text)) == 0
    rd.lib.conf_set_events(conf, rd.EVENT_DELIVERY | rd.EVENT_ERROR)
    handle = rd.lib.new(rd.PRODUCER, conf, text, len(text))
    topic = rd.lib.topic_new(handle, b"t", None)
    try:
        values = ["small", "b" * 2000, "", "small too"]
        made = messages(pa.RecordBatch.from_pydict({"key": ["k"] * 4, "value": values}))
        taken = rd.lib.produce_batch(topic, rd.ANY_PARTITION, rd.MSG_COPY | rd.MSG_PARTITION, made.ctypes.data, 4)
        assert taken == 3
        assert rd.lib.err2name(int(made["err"][1])) == b"MSG_SIZE_TOO_LARGE"
        assert np.flatnonzero(made["err"]).tolist() == [1]
    finally:
        rd.lib.topic_destroy(topic)
        rd.lib.destroy(handle)
