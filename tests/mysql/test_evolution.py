"""What is special about MySQL and MariaDB when the sink alters its table; the rest is in `Evolution`."""

from __future__ import annotations

from contextlib import closing

import pyarrow as pa
import pytest

from sinks.mysql import MySQLSink
from tests.evolution import Evolution
from tests.mysql.observer import Observer


class TestEvolution(Evolution):
    TWO_PHASE = "xa"
    make = MySQLSink

    @pytest.fixture(params=["xa", "staged"])
    def strategy(self, request: pytest.FixtureRequest) -> str:
        return str(request.param)


def test_text_is_added_with_a_place_for_all_that_spark_has(db: Observer) -> None:
    db.run("ALTER TABLE orders DEFAULT CHARACTER SET latin1")
    schema = pa.schema([("id", pa.int64()), ("note", pa.string())])
    with closing(MySQLSink(db.dsn, "orders", schema_evolution="add")) as sink:
        sink.evolve(schema)
    [(_, text)] = db.run("SHOW CREATE TABLE orders")
    assert "`note` longtext CHARACTER SET utf8mb4" in text
