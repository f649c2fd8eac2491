"""What is this server's own; the rest is in `DeadLettersOfTables`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest

from coordinator import CheckpointConfig, CheckpointCoordinator, CheckpointListener, Step
from coordinator.config import Replay
from sinks.arrow.spark_types import schema_of_json
from sinks.errors import BadValue, TooManyDeadLetters, TransactionBlocked
from sinks.postgres import PostgresSink
from sinks.sql.sink import TableSink
from sinks.sqlalchemy import SqlAlchemySink
from sinks.testing import KILLED, Driver, Hooked, LocalQuery
from sinks.testing.driver import KillAt
from sinks.testing.servers.postgres import PostgresService
from sinks.testing.table import SCHEMA, context, rows_of
from sinks.testing.table_crashes import At, run
from tests.dead_letters import INPUT, DeadLettersOfTables, assert_each_once, ids
from tests.postgres.observer import Observer
from tests.self_references import RowsThatReferToEachOther, partition
from tests.sqlalchemy_sink.urls import url_of


@pytest.fixture
def dsn(pg_database: str) -> str:
    return pg_database


@dataclass
class BlockedOnce:
    """A task that finds the flag takes it away, and waits for a lock in vain."""

    flag: Path

    def __call__(self) -> None:
        if self.flag.exists():
            self.flag.unlink()
            raise TransactionBlocked("somebody else holds the lock")


class TestPostgres(DeadLettersOfTables):
    make = PostgresSink
    observe = Observer
    strategies = ("prepared", "staged")
    staging_has_checks = True

    def test_a_letter(self, tmp_path: Path, dsn: str, db: Observer) -> None:
        run(tmp_path, self.sink(dsn), INPUT[:2])
        first = db.run("SELECT * FROM dead WHERE checkpoint = 1 AND partition = 1 ORDER BY row_number")
        row = f'{{"id":4002,"name":"{"x" * 50}","amount":1.0}}'
        *about, time = first[0]
        lineage = about.pop(1)
        assert about[:6] == ["job", "good", 1, 1, 2, "BadValue"]
        assert about[6].startswith('column "name": ')
        assert about[7] == row
        assert schema_of_json(json.loads(about[8])) == INPUT[0][0].schema
        assert (about[9:], len(lineage)) == ([None, None], 8)
        assert time.tzinfo is not None
        assert first[1][6:8] == (
            "CheckViolation",
            'new row for relation "good" violates check constraint "good_amount_check"; '
            "Failing row contains (4030, user-4030, -1).",
        )

    def driver(self, folder: Path, sink: Any, *listeners: CheckpointListener) -> Driver:
        return Driver("job", sink, f"file://{folder / 'storage'}", folder / "query", INPUT, listeners)

    @pytest.mark.parametrize("step", [Step.PRE_COMMITTED, Step.COMPLETE, Step.COMMITTED])
    def test_the_driver_is_killed(self, tmp_path: Path, dsn: str, db: Observer, step: Step) -> None:
        assert self.driver(tmp_path, self.sink(dsn), KillAt(step, checkpoint_id=1)).run() == KILLED
        assert self.driver(tmp_path, self.sink(dsn)).run() == 0
        assert_each_once(db, INPUT)

    def test_a_task_is_killed_between_the_two_pre_commits(self, tmp_path: Path, dsn: str, db: Observer) -> None:
        sink = self.sink(dsn)
        assert sink.dead_letters is not None
        sink.dead_letters = Hooked(sink.dead_letters, "pre_commit", nth=3)
        assert self.driver(tmp_path, sink).run() == KILLED
        assert self.driver(tmp_path, self.sink(dsn)).run() == 0
        assert_each_once(db, INPUT)

    @pytest.mark.parametrize("lost", ["good", "dead", ""])
    def test_what_is_rolled_back_after_the_decision_is_separated_as_before(
        self, tmp_path: Path, dsn: str, db: Observer, lost: str
    ) -> None:
        """Also where the table would now refuse other rows: with the good ones in it, all of them."""
        rolled_back: list[str] = []

        def roll_back() -> None:
            with psycopg.connect(dsn, autocommit=True) as connection:
                rows = connection.execute(
                    "SELECT gid FROM pg_prepared_xacts WHERE database = current_database() AND gid LIKE %s",
                    [f"%.{lost}%"],
                )
                for (gid,) in rows.fetchall():
                    connection.execute(f"ROLLBACK PREPARED '{gid}'")
                    rolled_back.append(gid)

        run(tmp_path, self.sink(dsn), INPUT, At(Step.COMPLETE, roll_back))
        assert len(rolled_back) == (2 if lost else 4)
        assert_each_once(db, INPUT)

    def test_lost_letters_that_are_blocked_are_written_again_after_a_sweep(
        self, tmp_path: Path, dsn: str, db: Observer
    ) -> None:
        """R8, though the rows that were taken are not lost, and their tasks write none."""

        def roll_back() -> None:
            for gid in db.prepared():
                if ".dead-" in gid:
                    db.run(f"ROLLBACK PREPARED '{gid}'")
            flag.touch()

        flag = tmp_path / "blocked"
        dead = Hooked(PostgresSink(dsn, "dead", create_table=True), "pre_commit", None, hook=BlockedOnce(flag))
        sink = self.sink(dsn, dead_letters=dead)
        run(tmp_path, sink, INPUT, At(Step.COMPLETE, roll_back))
        assert not flag.exists()
        assert_each_once(db, INPUT)

    def test_lost_letters_are_written_again_from_kept_rows(self, tmp_path: Path, dsn: str, db: Observer) -> None:
        """Of a query that gives other rows by then."""
        input = [list(tables) for tables in INPUT]

        def roll_back() -> None:
            input[1][:] = input[2]
            for gid in db.prepared():
                if ".dead-" in gid:
                    db.run(f"ROLLBACK PREPARED '{gid}'")

        storage, config = f"file://{tmp_path / 'storage'}", CheckpointConfig(replay=Replay.SPOOL)
        listeners = [At(Step.COMPLETE, roll_back)]
        with CheckpointCoordinator("job", [self.sink(dsn)], storage, config, listeners) as coordinator:
            LocalQuery(tmp_path / "query", input).run(coordinator)
        assert_each_once(db, INPUT)

    @pytest.mark.parametrize(
        ("most", "reason"),
        [
            (8, r"more than 8 of the rows of partition . of checkpoint 0 alone, .* allows 8 row\(s\) in a whole"),
            (12, r"17 of the 260 rows of checkpoint 0, and max_dead_letters allows 12 row"),
        ],
    )
    def test_too_many_fail_the_checkpoint(self, tmp_path: Path, dsn: str, db: Observer, most: int, reason: str) -> None:
        with pytest.raises(TooManyDeadLetters, match=reason) as error:
            run(tmp_path, self.sink(dsn, max_dead_letters=most), INPUT)
        assert 'BadValue: column "name"' in str(error.value)
        assert (db.ids("good"), db.run("SELECT * FROM dead"), db.pending()) == ([], [], 0)

    def test_deferred_constraints_are_judged_at_the_end(self, tmp_path: Path, dsn: str, db: Observer) -> None:
        """A row may refer to a later one."""
        db.run("ALTER TABLE good ADD CONSTRAINT names UNIQUE (name)")
        db.run(
            "ALTER TABLE good ADD CONSTRAINT own FOREIGN KEY (name) REFERENCES good (name)"
            " DEFERRABLE INITIALLY DEFERRED"
        )
        [table, _] = INPUT[0]
        run(tmp_path, self.sink(dsn), [[table]])
        good = db.ids("good")
        assert good == ids([[table]], bad=False)
        db.run("ALTER TABLE good DROP CONSTRAINT own, DROP CONSTRAINT names, DROP CONSTRAINT good_pkey")
        db.run("ALTER TABLE good ADD PRIMARY KEY (id) DEFERRABLE INITIALLY DEFERRED")
        with pytest.raises(BadValue, match="good_pkey"):
            run(tmp_path, self.sink(dsn), [[table], [table]])
        assert (db.ids("good"), db.pending()) == (good, 0)


@pytest.mark.parametrize("strategy", ["prepared", "staged"])
def test_rows_that_are_long_in_coming(db: Observer, strategy: Any) -> None:
    """The server ends no session of a task that waits for them."""
    sink = PostgresSink(db.dsn, "orders", strategy=strategy)
    sink.check(SCHEMA)
    transaction: Any = sink.begin_transaction(context(sink))
    for n in range(2):
        assert not sink.write_good_rows(transaction, rows_of(n), most=0)
        limit = transaction.connection.execute("SHOW idle_in_transaction_session_timeout").fetchone()
        assert limit == ("0",)
    sink.rollback(transaction)
    sink.close()


ODD = pa.schema([("id", pa.int64()), ("name", pa.string())])
STRANGE = "Ж 😀 é"
"""A letter that LATIN1 lacks, one that only Unicode has, and one that EUC_JP lacks or has in another way."""


@pytest.mark.parametrize("kind", [PostgresSink, SqlAlchemySink])
@pytest.mark.parametrize("encoding", ["LATIN1", "EUC_JP", "SQL_ASCII"])
def test_a_database_that_lacks_characters(
    tmp_path: Path, postgres: PostgresService, kind: Callable[..., TableSink], encoding: str
) -> None:
    """Rows with what the database lacks are letters one by one, with a reason. Letters have escapes in their place,
    also for the names of job and sink, and the commands find them."""
    with postgres.database(encoding) as dsn, psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("CREATE TABLE good (id bigint PRIMARY KEY, name varchar(20))")
        connection.execute("SET client_encoding = 'UTF8'")
        url = url_of(dsn) if kind is SqlAlchemySink else dsn
        sink = kind(url, "good", name="gut Ж", dead_letters=kind(url, "dead", create_table=True))
        rows = [{"id": 1, "name": "plain"}, {"id": 2, "name": STRANGE}, {"id": 3, "name": "more"}]
        with CheckpointCoordinator("täglich Ж", [sink], f"file://{tmp_path / 'storage'}") as coordinator:
            table = pa.Table.from_pylist([*rows, {"id": 4, "name": 9 * STRANGE}], ODD)
            LocalQuery(tmp_path / "query", [[table]]).run(coordinator)
            assert isinstance(sink.dead_letters, TableSink)
            found = sink.dead_letters.read_dead_letters("täglich Ж", "gut Ж", 10)
        good = {row for (row,) in connection.execute("SELECT id FROM good").fetchall()}
        lacking = encoding != "SQL_ASCII"
        assert good == ({1, 3} if lacking else {1, 2, 3})
        letters = connection.execute("SELECT job, error, row, row_schema FROM dead ORDER BY row_number").fetchall()
        bad = [row for row in table.to_pylist() if row["id"] not in good]
        assert [json.loads(row) for _, _, row, _ in letters] == bad
        assert all(str(text).isascii() for letter in letters for text in letter)
        assert letters[0][0] == r"t\u00e4glich \u0416"
        if lacking:
            assert "has no equivalent in encoding" in letters[0][1]
        assert found is not None
        assert sorted(json.loads(row["row"])["id"] for row in found.rows) == [row["id"] for row in bad]


class TestRowsThatReferToEachOther(RowsThatReferToEachOther):
    make = PostgresSink
    observe = Observer
    two_phase = "prepared"

    @staticmethod
    def forget(db: Any, lost: str) -> None:
        for gid in db.prepared():
            if f".{lost}" in gid:
                db.run(f"ROLLBACK PREPARED '{gid}'")

    def trigger(self, db: Any) -> None:
        db.run(
            "CREATE FUNCTION has_boss() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
            " IF NEW.boss IS NOT NULL AND NOT EXISTS (SELECT FROM emp WHERE id = NEW.boss) THEN"
            " RAISE EXCEPTION 'no boss %', NEW.boss; END IF; RETURN NEW; END $$"
        )
        db.run("CREATE TRIGGER has_boss BEFORE INSERT ON emp FOR EACH ROW EXECUTE FUNCTION has_boss()")

    def test_rows_that_refer_to_each_other_in_a_circle(self, tmp_path: Path, dsn: str, db: Observer) -> None:
        """With a bad one between them."""
        rows = [(2, 3), (200, None), (3, 4), (4, 2)]
        run(tmp_path, self.sink(dsn), [[partition(rows[:2], rows[2:])]])
        assert (db.ids("emp"), self.letters(db)) == ([2, 3, 4], [(200, 1)])
