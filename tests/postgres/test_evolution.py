"""What is special about PostgreSQL when the sink alters its table; the rest is in `Evolution`."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pytest

from sinks.errors import ConfigurationError
from sinks.postgres import PostgresSink
from tests.evolution import NEW, Evolution, table
from tests.postgres.observer import Observer


def filenode(db: Observer, name: str = "orders") -> int:
    ((number,),) = db.run("SELECT pg_relation_filenode(%s)", [name])
    return int(number)


class TestEvolution(Evolution):
    TWO_PHASE = "prepared"
    make = PostgresSink

    @pytest.fixture(params=["prepared", "staged"])
    def strategy(self, request: pytest.FixtureRequest) -> str:
        return str(request.param)


def test_a_column_is_added_without_writing_rows_and_to_all_partitions(db: Observer, tmp_path: Path) -> None:
    db.run("DROP TABLE orders")
    db.run("CREATE TABLE orders (id bigint, price numeric(12,4)) PARTITION BY RANGE (id)")
    for at, (low, high) in enumerate([("MINVALUE", "100"), ("100", "MAXVALUE")]):
        db.run(f"CREATE TABLE part_{at} PARTITION OF orders FOR VALUES FROM ({low}) TO ({high})")
    before = filenode(db, "part_0")
    sink = PostgresSink(db.dsn, "orders", schema_evolution="add")
    TestEvolution().start(tmp_path, sink, table(NEW, [(n, "5.25", "n", 0.1, "new", None) for n in (1, 200)]))
    assert filenode(db, "part_0") == before
    assert [(len(rows), rows[0][4]) for rows in (db.visible("part_0"), db.visible("part_1"))] == [(1, "new")] * 2


def test_somebody_who_does_not_own_the_table_is_told_the_statement(db: Observer) -> None:
    db.run("DROP ROLE IF EXISTS writer")
    db.run("CREATE ROLE writer LOGIN PASSWORD 'secret'")
    db.run("GRANT ALL ON SCHEMA public TO writer; GRANT ALL ON ALL TABLES IN SCHEMA public TO writer")
    sink = PostgresSink(
        db.dsn, "orders", schema_evolution="add", connect_options={"user": "writer", "password": "secret"}
    )
    try:
        with closing(sink), pytest.raises(ConfigurationError, match=r"must be owner .*ADD COLUMN IF NOT EXISTS .note"):
            sink.evolve(pa.schema([("id", pa.int64()), ("note", pa.string())]))
    finally:
        db.run("DROP OWNED BY writer; DROP ROLE writer")
