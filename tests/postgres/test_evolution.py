"""What is special about PostgreSQL when the sink alters its table; the rest is in `Evolution`."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pytest

from sinks.diagnosis import VARCHAR
from sinks.errors import ConfigurationError
from sinks.postgres import PostgresSink
from sinks.sql.evolution import PostgresDdl
from sinks.testing.table import pre_commit
from tests.evolution import NEW, Evolution, table
from tests.postgres.play import Observer


def filenode(db: Observer, name: str = "orders") -> int:
    ((number,),) = db.run("SELECT pg_relation_filenode(%s)", [name])
    return int(number)


class TestEvolution(Evolution):
    TWO_PHASE = "prepared"
    DDL = PostgresDdl
    make = PostgresSink

    @pytest.fixture(params=["prepared", "staged"])
    def strategy(self, request: pytest.FixtureRequest) -> str:
        return str(request.param)


@pytest.mark.parametrize(
    ("declared", "kind", "becomes"),
    [
        ("smallint", pa.int32(), "integer"),
        ("integer", pa.int64(), "bigint"),
        ("real", pa.float64(), "double precision"),
        ("varchar(5)", pa.string(), "character varying(60)"),
        ('varchar(5) COLLATE "C"', pa.string(), "character varying(60)"),
        ("numeric(6,2)", pa.decimal128(12, 2), "numeric(12,2)"),
        ("numeric(6,2)", pa.decimal128(12, 4), "numeric(12,4)"),
        ("numeric(6,4)", pa.decimal128(6, 1), "numeric(9,4)"),
    ],
)
def test_the_diff_says_what_is_written_anew_and_the_column_keeps_the_rest(
    db: Observer, declared: str, kind: pa.DataType, becomes: str
) -> None:
    collation = (
        "SELECT collation_name, column_default, is_nullable FROM information_schema.columns WHERE column_name = 'v'"
    )
    db.run(f"ALTER TABLE orders ADD v {declared} NOT NULL DEFAULT '7'")
    before, at_first = filenode(db), db.run(collation)
    schema = pa.schema([("id", pa.int64()), pa.field("v", kind, metadata={VARCHAR: b"varchar(60)"})])
    with closing(PostgresSink(db.dsn, "orders", schema_evolution="widen")) as sink:
        [change] = sink.schema_diff(schema).changes
        assert f" TYPE {becomes.replace('character varying', 'varchar')}" in change.statement
        sink.evolve(schema)
        assert (filenode(db) != before) == change.rewrites
        assert ("are rewritten" in change.locks) == change.rewrites
    assert db.run("SELECT format_type(atttypid, atttypmod) FROM pg_attribute WHERE attname = 'v'") == [(becomes,)]
    after = db.run(collation)
    assert (after[0][0], after[0][2], str(after[0][1])[:3]) == (at_first[0][0], "NO", str(at_first[0][1])[:3])


def test_a_column_is_added_without_writing_rows_and_to_all_partitions(db: Observer, tmp_path: Path) -> None:
    db.run("DROP TABLE orders")
    db.run("CREATE TABLE orders (id bigint, price numeric(6,2)) PARTITION BY RANGE (id)")
    for at, (low, high) in enumerate([("MINVALUE", "100"), ("100", "MAXVALUE")]):
        db.run(f"CREATE TABLE part_{at} PARTITION OF orders FOR VALUES FROM ({low}) TO ({high})")
    before = filenode(db, "part_0")
    sink = PostgresSink(db.dsn, "orders", schema_evolution="widen")
    schema = NEW.set(1, pa.field("price", pa.decimal128(12, 2)))
    assert not any(change.rewrites for change in sink.schema_diff(schema).changes)
    TestEvolution().start(tmp_path, sink, table(schema, [(n, "5.25", "n", 0.1, "new", None) for n in (1, 200)]))
    assert filenode(db, "part_0") == before
    assert [(len(rows), rows[0][4]) for rows in (db.visible("part_0"), db.visible("part_1"))] == [(1, "new")] * 2


@pytest.mark.parametrize(
    ("over", "named"),
    [
        ("CREATE VIEW dear AS SELECT v FROM orders", "used by a view or rule; .*view dear"),
        ("ALTER TABLE orders ADD twice numeric GENERATED ALWAYS AS (v * 2) STORED", 'generated column "twice"'),
    ],
)
def test_what_stands_in_the_way_is_named_and_nothing_is_altered(db: Observer, over: str, named: str) -> None:
    db.run("ALTER TABLE orders ADD v integer")
    db.run(over)
    schema = pa.schema([("id", pa.int64()), ("v", pa.int64()), ("more", pa.string())])
    with closing(PostgresSink(db.dsn, "orders", schema_evolution="widen")) as sink:
        sink.check(schema)
        with pytest.raises(ConfigurationError, match=f"(?s)cannot be altered: .*{named}.*ALTER COLUMN .v. TYPE bigint"):
            sink.evolve(schema)
        assert [change.column for change in sink.schema_diff(schema).changes] == ["more", "v"]
    with closing(PostgresSink(db.dsn, "orders", schema_evolution="add")) as sink:
        sink.evolve(schema)
        pre_commit(sink, pa.RecordBatch.from_pylist([{"id": 1, "v": 2, "more": "x"}], schema=schema))


@pytest.mark.parametrize(("rights", "said"), [("ALL", "must be owner"), ("SELECT, INSERT", "permission denied")])
def test_somebody_who_does_not_own_the_table_is_told_the_statement(db: Observer, rights: str, said: str) -> None:
    db.run("DROP ROLE IF EXISTS writer")
    db.run("CREATE ROLE writer LOGIN PASSWORD 'secret'")
    db.run(f"GRANT ALL ON SCHEMA public TO writer; GRANT {rights} ON ALL TABLES IN SCHEMA public TO writer")
    sink = PostgresSink(
        db.dsn, "orders", schema_evolution="add", connect_options={"user": "writer", "password": "secret"}
    )
    try:
        with closing(sink), pytest.raises(ConfigurationError, match=rf"{said} .*ADD COLUMN IF NOT EXISTS .note"):
            sink.evolve(pa.schema([("id", pa.int64()), ("note", pa.string())]))
    finally:
        db.run("DROP OWNED BY writer; DROP ROLE writer")
