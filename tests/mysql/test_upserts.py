"""Which change of a key is the last one, and what one key is, as the server has it."""

from __future__ import annotations

import contextlib
from typing import Any

import pyarrow as pa
import pytest

from sinks.errors import BadValue, ConfigurationError
from sinks.mysql import MySQLSink
from sinks.testing.table import batch, checkpoint, pre_commit
from tests.mysql.play import Observer


@pytest.mark.parametrize("kind", ["double", "float"])
def test_negative_zero_is_the_key_zero(db: Observer, kind: str) -> None:
    """MariaDB groups them apart."""
    schema = pa.schema([("id", pa.float32()), ("note", pa.string())])
    db.run(f"CREATE TABLE notes (id {kind} PRIMARY KEY, note text)")
    rows = [{"id": 0.0, "note": "a"}, {"id": 1.5, "note": "b"}], [{"id": -0.0, "note": "c"}]
    upsert: dict[str, Any] = {"mode": "upsert", "keys": ["id"]}
    for options, rule in ((upsert, "two changes of one key"), ({}, "unique index")):
        with contextlib.closing(MySQLSink(db.dsn, "notes", strategy="staged", **options)) as sink:
            sink.check(schema)
            staged = [pre_commit(sink, batch(part, schema), subtask=n) for n, part in enumerate(rows)]
            with pytest.raises(BadValue, match=rf"{rule}.*\(id\) = \(-?0\.0\) comes 2 times"):
                sink.validate_all(checkpoint(), staged)


@pytest.mark.parametrize("kind", [pa.string(), pa.binary(), pa.list_(pa.int64())], ids=str)
def test_no_order_by_but_numbers_and_times(db: Observer, kind: pa.DataType) -> None:
    """The server sorts texts by their beginning, an enumeration by places or texts, and documents by nothing."""
    db.run("CREATE TABLE notes (id bigint PRIMARY KEY)")
    with (
        contextlib.closing(MySQLSink(db.dsn, "notes", mode="upsert", keys=["id"], order_by="at")) as sink,
        pytest.raises(ConfigurationError, match="order_by names the column 'at', which is no number and no time"),
    ):
        sink.check(pa.schema([("id", pa.int64()), ("at", kind)]))
