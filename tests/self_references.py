"""Rows that the table refuses as long as others are not there: for sinks whose database judges each row at once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from coordinator import CheckpointConfig, CheckpointCoordinator, Step
from coordinator.config import CheckpointingMode
from coordinator.task import participant
from sinks.errors import BadValue
from sinks.sql.sink import TableSink
from sinks.testing import LocalQuery
from sinks.testing.table import Database
from sinks.testing.table_crashes import At, run

SCHEMA = pa.schema([("id", pa.int64()), ("boss", pa.int64())])
NO_ONE = 200
"""An id that a CHECK refuses."""


def partition(*batches: Sequence[tuple[int, int | None]]) -> pa.Table:
    """Its record batches, each of (id, boss)."""
    tables = [pa.Table.from_pylist([{"id": id, "boss": boss} for id, boss in rows], SCHEMA) for rows in batches]
    return pa.concat_tables(tables)


def chain(count: int) -> list[tuple[int, int | None]]:
    """Each before its boss, who has a boss."""
    return [(id, id - 1 or None) for id in range(count, 0, -1)]


class RowsThatReferToEachOther:
    """Fixture `dsn`: of a fresh database."""

    make: Callable[..., TableSink]
    observe: Callable[[str], Database]
    two_phase: str
    forget: Callable[[Any, str], None]
    """Rolls back what is prepared of a sink."""

    @pytest.fixture
    def db(self, dsn: str) -> Iterator[Database]:
        with closing(type(self).observe(dsn)) as db:
            db.run(
                f"CREATE TABLE emp (id bigint PRIMARY KEY CHECK (id <> {NO_ONE}), boss bigint,"
                " CONSTRAINT has_boss FOREIGN KEY (boss) REFERENCES emp (id))"
            )
            yield db

    def sink(self, dsn: str, **options: Any) -> TableSink:
        dead = type(self).make(dsn, "dead", create_table=True)
        return type(self).make(dsn, "emp", **{"strategy": self.two_phase, "dead_letters": dead} | options)

    def letters(self, db: Database) -> list[tuple[int, int]]:
        """The id and the number of each row."""
        columns = "`row`, `row_number`" if db.dsn.startswith("mysql") else '"row", row_number'
        return [(json.loads(row)["id"], at) for row, at in db.run(f"SELECT {columns} FROM dead ORDER BY 2")]

    def test_a_bad_row_takes_no_good_one_with_it(self, tmp_path: Path, dsn: str, db: Database) -> None:
        run(tmp_path, self.sink(dsn), [[partition([(100, 1), (NO_ONE, None), (1, None)])]])
        assert (db.ids("emp"), self.letters(db)) == ([1, 100], [(NO_ONE, 1)])

    def test_the_boss_comes_in_a_later_record_batch(self, tmp_path: Path, dsn: str, db: Database) -> None:
        """And no dead letter is allowed."""
        first = [(id, 1) for id in range(6, 26)]
        run(tmp_path, self.sink(dsn, max_dead_letters=0), [[partition(first, [(id, None) for id in range(1, 6)])]])
        assert (db.ids("emp"), self.letters(db)) == ([*range(1, 26)], [])

    def test_each_row_comes_before_its_boss(self, tmp_path: Path, dsn: str, db: Database) -> None:
        rows = chain(40)
        rows[20:20] = [(NO_ONE, None), (300, 40), (301, 999)]
        run(tmp_path, self.sink(dsn, max_dead_letters=2), [[partition(rows[:15], rows[15:30], rows[30:])]])
        assert (db.ids("emp"), self.letters(db)) == ([*range(1, 41), 300], [(NO_ONE, 20), (301, 22)])

    @pytest.mark.parametrize("lost", ["emp", "dead", ""])
    def test_what_is_rolled_back_after_the_decision_is_written_again(
        self, tmp_path: Path, dsn: str, db: Database, lost: str
    ) -> None:
        rows = chain(12)
        rows[6:6] = [(NO_ONE, None), (301, 999)]
        input = [[partition([(50, None)])], [partition(rows[:4], rows[4:9], rows[9:])]]
        run(tmp_path, self.sink(dsn), input, At(Step.COMPLETE, lambda: type(self).forget(db, lost)))
        assert (db.ids("emp"), self.letters(db)) == ([*range(1, 13), 50], [(NO_ONE, 6), (301, 7)])
        assert db.pending() == 0

    def test_at_least_once(self, tmp_path: Path, dsn: str, db: Database) -> None:
        config = CheckpointConfig(mode=CheckpointingMode.AT_LEAST_ONCE)
        rows = [*chain(12), (NO_ONE, None)]
        with CheckpointCoordinator("job", [self.sink(dsn)], f"file://{tmp_path}/storage", config) as coordinator:
            LocalQuery(tmp_path / "query", [[partition(rows[:6], rows[6:])]]).run(coordinator)
        assert (db.ids("emp"), self.letters(db)) == ([*range(1, 13)], [(NO_ONE, 12)])

    def test_a_trigger_that_looks_for_other_rows(self, tmp_path: Path, dsn: str, db: Database) -> None:
        db.run("ALTER TABLE emp DROP CONSTRAINT has_boss")
        self.trigger(db)
        rows = [*chain(12), (NO_ONE, None), (301, 999)]
        run(tmp_path, self.sink(dsn), [[partition(rows[:6], rows[6:])]], At(Step.COMPLETE, lambda: self.forget(db, "")))
        assert (db.ids("emp"), self.letters(db)) == ([*range(1, 13)], [(NO_ONE, 12), (301, 13)])

    def trigger(self, db: Any) -> None:
        raise NotImplementedError

    @pytest.mark.parametrize("is_there", [True, False])
    def test_rows_that_wait_take_a_bounded_place(
        self, tmp_path: Path, dsn: str, db: Database, is_there: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """They are tried when it is full. If most have to wait on, the checkpoint fails."""
        monkeypatch.setattr(participant, "MAX_WAITING_BYTES", 2000)
        first = [(id, 1) for id in range(2, 50)]
        second = [(1 if is_there else 60, None), *((id, 1) for id in range(100, 140))]
        input = [[partition(first, second)]]
        if is_there:
            run(tmp_path, self.sink(dsn), input)
            assert (len(db.ids("emp")), self.letters(db)) == (89, [])
        else:
            with pytest.raises(BadValue, match=r"(?s)partition 0 of checkpoint 0 are refused as long as .*has_boss"):
                run(tmp_path, self.sink(dsn), input)
            assert (db.ids("emp"), self.letters(db), db.pending()) == ([], [], 0)

    @pytest.mark.parametrize("on_delete", ["CASCADE", "RESTRICT", "NO ACTION", "SET NULL"])
    def test_rows_that_move_away_from_a_row_that_is_deleted(
        self, tmp_path: Path, dsn: str, db: Database, on_delete: str
    ) -> None:
        """No cascade takes them, nor what refers to them, and what the batch does not have stays. Rows that refer to
        each other are deleted together."""
        db.run(
            "CREATE TABLE tree (id bigint PRIMARY KEY, boss bigint, note varchar(20) DEFAULT 'default',"
            f" CONSTRAINT of_tree FOREIGN KEY (boss) REFERENCES tree (id) ON DELETE {on_delete})"
        )
        for id, boss in [(1, None), (2, 1), (3, 2), (4, None), (5, 4), (6, 5)]:
            db.run(f"INSERT INTO tree VALUES ({id}, {boss or 'NULL'}, 'kept {id}')")
        schema = pa.schema([*SCHEMA, ("gone", pa.bool_())])
        rows = [(2, 7, False), (1, None, True), (4, None, True), (5, None, True), (6, None, True), (7, None, False)]
        changes = pa.Table.from_pylist([dict(zip(schema.names, row, strict=True)) for row in rows], schema)
        sink = type(self).make(dsn, "tree", mode="upsert", keys=["id"], delete_marker="gone")
        run(tmp_path, sink, [[changes.slice(0, 3), changes.slice(3)]])
        assert sorted(db.run("SELECT id, boss, note FROM tree")) == [
            (2, 7, "kept 2"),
            (3, 2, "kept 3"),
            (7, None, "default"),
        ]

    def test_a_cascade_takes_no_row_that_moves_away_from_what_it_takes(
        self, tmp_path: Path, dsn: str, db: Database
    ) -> None:
        """The batch deletes 1, by which 2 goes, and moves 3 from 2 to 4. Meanwhile 3 does not refer to nothing, since
        what it will refer to is there."""
        db.run(
            "CREATE TABLE tree (id bigint PRIMARY KEY, boss bigint, note varchar(20) DEFAULT 'default',"
            " CONSTRAINT of_tree FOREIGN KEY (boss) REFERENCES tree (id) ON DELETE CASCADE)"
        )
        if type(self).make.__name__ == "PostgresSink":  # MySQL has no CHECK of a column with such a key
            db.run("ALTER TABLE tree ADD CHECK (boss IS NOT NULL OR note LIKE 'root%')")
        for id, boss, note in [(1, None, "root"), (2, 1, "two"), (3, 2, "three"), (4, None, "root")]:
            db.run(f"INSERT INTO tree VALUES ({id}, {boss or 'NULL'}, '{note}')")
        schema = pa.schema([*SCHEMA, ("gone", pa.bool_())])
        changes = pa.table([[1, 3], [None, 4], [True, False]], schema=schema)
        sink = type(self).make(dsn, "tree", mode="upsert", keys=["id"], delete_marker="gone")
        run(tmp_path, sink, [[changes]])
        assert sorted(db.run("SELECT id, boss, note FROM tree")) == [(3, 4, "three"), (4, None, "root")]

    def test_rows_that_must_refer_to_something_are_deleted_together(
        self, tmp_path: Path, dsn: str, db: Database
    ) -> None:
        db.run(
            "CREATE TABLE tree (id bigint PRIMARY KEY, boss bigint NOT NULL,"
            " CONSTRAINT of_tree FOREIGN KEY (boss) REFERENCES tree (id))"
        )
        for id, boss in [(1, 1), (2, 1), (3, 2), (4, 3), (5, 1)]:
            db.run(f"INSERT INTO tree VALUES ({id}, {boss})")
        schema = pa.schema([*SCHEMA, ("gone", pa.bool_())])
        changes = pa.table([[2, 3, 4, 5], [1, 2, 3, 5], [True, True, True, False]], schema=schema)
        sink = type(self).make(dsn, "tree", mode="upsert", keys=["id"], delete_marker="gone")
        run(tmp_path, sink, [[changes.slice(0, 2), changes.slice(2)]])
        assert sorted(db.run("SELECT id, boss FROM tree")) == [(1, 1), (5, 5)]
