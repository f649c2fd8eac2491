from __future__ import annotations

from pathlib import Path

import psycopg
import pytest

from sinks.postgres import PostgresSink
from sinks.testing.table import Database, checkpoint
from sinks.transaction import CommitState
from tests.one_transaction import UPSERT, OneTransaction, changes, family, run
from tests.postgres.observer import Observer


@pytest.fixture
def dsn(pg_database: str) -> str:
    return pg_database


class TestPostgres(OneTransaction):
    make = PostgresSink
    observe = Observer

    @pytest.mark.parametrize("when", ["DEFERRABLE INITIALLY DEFERRED", "DEFERRABLE"])
    def test_tables_that_refer_to_each_other(self, tmp_path: Path, dsn: str, db: Database, when: str) -> None:
        """Which takes constraints that can be deferred: whichever row comes first lacks the other."""
        db.run(f"ALTER TABLE child ALTER CONSTRAINT has_parent {when}")
        db.run(f"ALTER TABLE parent ADD CONSTRAINT has_child FOREIGN KEY (parent) REFERENCES child (id) {when}")
        run(tmp_path, [self.sink(dsn, table) for table in ("parent", "child")], [[family(1, 2)], [family(3)]])
        assert (db.ids("parent"), db.ids("child"), db.pending()) == ([1, 2, 3], [1, 2, 3], 0)

    def test_a_key_that_can_be_deferred_allows_any_order(self, dsn: str, db: Database) -> None:
        """A row takes the unique value of its deleted parent's row, and another moves there from the deleted one."""
        db.run("ALTER TABLE child ALTER CONSTRAINT has_parent DEFERRABLE")
        db.run("ALTER TABLE parent ADD CONSTRAINT once UNIQUE (parent)")
        sinks = [self.sink(dsn, table, **UPSERT) for table in ("child", "parent")]
        rows = [
            [changes((10, 1, False)), changes((1, 7, False))],
            [changes((10, 2, False), at=1), changes((1, None, True), (2, 7, False), at=1)],
        ]
        for number, own in enumerate(rows):
            shares = self.staged(sinks, *own, number=number)
            sinks[0].validate_jointly(checkpoint(number), shares)
            assert self.states(shares, number) == [[CommitState.COMMITTED]] * 2
        assert (db.visible("parent"), db.visible("child")) == ([(2, 7)], [(10, 2)])
        for sink in sinks:
            sink.close()

    @pytest.mark.parametrize("key", ["parent", "parents"])
    @pytest.mark.parametrize("written", ["parent", "parents"])
    def test_a_table_of_partitions(self, tmp_path: Path, dsn: str, db: Database, key: str, written: str) -> None:
        """A foreign key to it and one to a partition, while a sink writes into the one or the other."""
        db.run("DROP TABLE child, parent")
        db.run("CREATE TABLE parent (id bigint PRIMARY KEY, parent bigint) PARTITION BY RANGE (id)")
        db.run("CREATE TABLE parents PARTITION OF parent FOR VALUES FROM (0) TO (99)")
        db.run(f"CREATE TABLE child (id bigint, parent bigint REFERENCES {key})")
        run(tmp_path, [self.sink(dsn, "child"), self.sink(dsn, written)], [[family(1, 2)], [family(3)]])
        assert (db.ids("parent"), db.ids("child"), db.pending()) == ([1, 2, 3], [1, 2, 3], 0)

    def test_two_spellings_of_one_dsn(self, tmp_path: Path, dsn: str, db: Database) -> None:
        """A URL and a list of parameters, with two names that the server shows."""
        listed = psycopg.conninfo.make_conninfo(dsn, application_name="another")
        assert listed != dsn
        run(tmp_path, [self.sink(dsn, "child"), self.sink(listed, "parent")], [[family(1)]])
        assert (db.ids("parent"), db.ids("child")) == ([1], [1])
