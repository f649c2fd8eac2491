"""What is special about MySQL and MariaDB when the sink alters its table; the rest is in `Evolution`."""

from __future__ import annotations

from contextlib import closing

import pyarrow as pa
import pytest

from sinks.diagnosis import VARCHAR
from sinks.mysql import MySQLSink
from sinks.mysql.connection import is_mariadb
from sinks.sql.evolution import MySqlDdl
from tests.evolution import Evolution
from tests.mysql.play import Observer


class TestEvolution(Evolution):
    REAL = "float"
    TWO_PHASE = "xa"
    DDL = MySqlDdl
    make = MySQLSink

    @pytest.fixture(params=["xa", "staged"])
    def strategy(self, request: pytest.FixtureRequest) -> str:
        return str(request.param)


def table_id(db: Observer) -> object:
    """Another one when the table was built anew."""
    tables = "innodb_sys_tables" if is_mariadb(db.connection) else "innodb_tables"
    return db.run(f"SELECT table_id FROM information_schema.{tables} WHERE name = %s", [f"{db.schema}/orders"])


@pytest.mark.parametrize(
    ("declared", "kind", "becomes"),
    [
        ("tinyint", pa.int16(), "smallint"),
        ("mediumint", pa.int64(), "bigint"),
        ("int", pa.int64(), "bigint"),
        ("float", pa.float64(), "double"),
        ("varchar(5)", pa.string(), "varchar(60)"),
        ("varchar(100)", pa.string(), "varchar(60)"),
        ("varchar(80) CHARACTER SET latin1", pa.string(), "varchar(260)"),
        ("varchar(200) CHARACTER SET latin1", pa.string(), "varchar(260)"),
        ("decimal(6,2)", pa.decimal128(12, 2), "decimal(12,2)"),
        ("int unsigned", pa.int64(), ""),
        ("tinyint(1)", pa.int64(), ""),
    ],
)
def test_the_diff_says_what_is_written_anew_and_the_column_keeps_the_rest(
    db: Observer, declared: str, kind: pa.DataType, becomes: str
) -> None:
    more = "NOT NULL DEFAULT '7' COMMENT 'it''s, v' CHECK (v IS NOT NULL)"
    db.run(f"ALTER TABLE orders ADD v {declared} {more}, ADD KEY (v)")
    [(_, before)] = db.run("SHOW CREATE TABLE orders")
    at_first = table_id(db)
    length = b"varchar(260)" if "latin1" in declared else b"varchar(60)"
    schema = pa.schema([("id", pa.int64()), pa.field("v", kind, metadata={VARCHAR: length})])
    with closing(MySQLSink(db.dsn, "orders", schema_evolution="widen")) as sink:
        changes = sink.schema_diff(schema).changes
        sink.evolve(schema)
        rewritten = table_id(db) != at_first
    [(_, after)] = db.run("SHOW CREATE TABLE orders")
    if not changes:
        assert not becomes or becomes == "varchar(60)"
        assert after == before
        return
    [change] = changes
    assert f" {becomes} " in change.statement
    assert rewritten == change.rewrites
    line = next(line for line in before.splitlines() if line.startswith("  `v` "))
    assert f"  `v` {becomes}" in after.replace("bigint(20)", "bigint").replace("smallint(6)", "smallint")
    assert line[line.index(" NOT NULL") :] in after
    assert ("CHARACTER SET latin1" in after) == ("latin1" in declared)


def test_a_compressed_table_is_built_anew_for_a_column_and_the_diff_says_so(db: Observer) -> None:
    schema = pa.schema([("id", pa.int64()), ("note", pa.string())])
    with closing(MySQLSink(db.dsn, "orders", schema_evolution="add")) as sink:
        [change] = sink.schema_diff(schema).changes
        assert not change.rewrites
        db.run("ALTER TABLE orders ROW_FORMAT=COMPRESSED")
        [change] = sink.schema_diff(schema).changes
        assert change.rewrites
        at_first = table_id(db)
        sink.evolve(schema)
        assert table_id(db) != at_first


def test_text_is_added_with_a_place_for_all_that_spark_has(db: Observer) -> None:
    db.run("ALTER TABLE orders DEFAULT CHARACTER SET latin1")
    schema = pa.schema([("id", pa.int64()), ("note", pa.string())])
    with closing(MySQLSink(db.dsn, "orders", schema_evolution="add")) as sink:
        sink.evolve(schema)
    [(_, text)] = db.run("SHOW CREATE TABLE orders")
    assert "`note` longtext CHARACTER SET utf8mb4" in text
