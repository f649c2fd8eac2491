from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from coordinator import CheckpointCoordinator
from sinks.mysql import MySQLSink, xa
from sinks.testing import LocalQuery
from tests.dead_letters import INPUT, DeadLettersOfTables, batch
from tests.mysql.observer import Observer
from tests.self_references import RowsThatReferToEachOther


@pytest.fixture
def dsn(mysql_database: str) -> str:
    return mysql_database


class TestMySQL(DeadLettersOfTables):
    make = MySQLSink
    observe = Observer
    strategies = ("xa", "staged")
    input = (*INPUT[:2], batch(2, by_server=False))  # a staging table has no CHECK


ODD = pa.schema([("id", pa.int64()), ("name", pa.string())])


@pytest.mark.parametrize("charset", ["latin1", "utf8mb3"])
def test_tables_that_lack_characters(tmp_path: Path, dsn: str, charset: str) -> None:
    """Rows with what the table lacks are letters one by one, with a reason; letters have escapes in their place, also
    for the names of job and sink, and the commands find them."""
    db = Observer(dsn)
    db.run(f"CREATE TABLE good (id bigint PRIMARY KEY, name varchar(20)) ENGINE=InnoDB CHARACTER SET {charset}")
    db.run(
        "CREATE TABLE dead (job text, lineage text, sink text, checkpoint bigint, `partition` int, `row_number` bigint,"
        " error_class text, error text, `row` text, row_schema text, `key` blob, value blob, time timestamp(6))"
        f" ENGINE=InnoDB CHARACTER SET {charset}"
    )
    strange = "Ж 😀 é"
    sink = MySQLSink(dsn, "good", name="gut 😀", dead_letters=MySQLSink(dsn, "dead"))
    rows = [{"id": 1, "name": "plain"}, {"id": 2, "name": strange}, {"id": 3, "name": "more"}]
    table = pa.Table.from_pylist([*rows, {"id": 4, "name": 9 * strange}], ODD)
    with CheckpointCoordinator("job 😀", [sink], f"file://{tmp_path / 'storage'}") as coordinator:
        LocalQuery(tmp_path / "query", [[table]]).run(coordinator)
        assert isinstance(sink.dead_letters, MySQLSink)
        found = sink.dead_letters.read_dead_letters("job 😀", "gut 😀", 10)
    assert db.ids("good") == [1, 3]
    letters = db.run("SELECT job, error, `row`, row_schema FROM dead ORDER BY `row_number`")
    assert [json.loads(row) for _, _, row, _ in letters] == [row for row in table.to_pylist() if row["id"] in (2, 4)]
    assert all(text.isascii() for letter in letters for text in letter)
    assert letters[0][0] == r"job \ud83d\ude00"
    assert "Incorrect string value" in letters[0][1]
    assert found is not None
    assert len(found.rows) == 2
    db.close()


class TestRowsThatReferToEachOther(RowsThatReferToEachOther):
    make = MySQLSink
    observe = Observer
    two_phase = "xa"

    @staticmethod
    def forget(db: Any, lost: str) -> None:
        for identity in xa.prepared(db.connection, db.schema):
            if f".{lost}" in f".{identity['bqual']}":
                xa.end(db.connection, db.schema, "ROLLBACK", identity)

    def trigger(self, db: Any) -> None:
        db.run(
            "CREATE TRIGGER has_boss BEFORE INSERT ON emp FOR EACH ROW IF NEW.boss IS NOT NULL AND NOT EXISTS"
            " (SELECT 1 FROM emp WHERE id = NEW.boss) THEN SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'no boss'; END IF"
        )
