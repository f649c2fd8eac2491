from __future__ import annotations

from pathlib import Path

import pytest

from sinks.errors import BadValue, ConfigurationError, TransactionBlocked
from sinks.mysql import MySQLSink
from sinks.testing.table_crashes import run
from tests.foreign_keys import ForeignKeys, run_all
from tests.mysql.observer import Observer
from tests.self_references import partition


@pytest.fixture
def dsn(mysql_database: str) -> str:
    return mysql_database


class TestMySQL(ForeignKeys):
    make = MySQLSink
    observe = Observer

    @pytest.mark.parametrize(
        ("bosses", "error"), [([(1, None)], TransactionBlocked), ([(3, 999)], BadValue)], ids=["there", "nowhere"]
    )
    def test_the_row_of_another_partition_is_named_where_it_is_missed(
        self, tmp_path: Path, dsn: str, db: Observer, bosses: list[tuple[int, int | None]], error: type[Exception]
    ) -> None:
        """By the strategy that writes each partition by itself."""
        self.bosses(db)
        sink = self.sink(dsn, "emp", strategy="xa", lock_timeout=1)
        with pytest.raises(error, match=r'has_boss needs may be in another partition: use strategy="staged"'):
            run(tmp_path, sink, [[partition(bosses), partition([(2, 1)])]])

    def test_rows_of_a_key_that_is_there_are_refused(self, tmp_path: Path, dsn: str, db: Observer) -> None:
        """Also in the order in which a table that refers to itself takes them."""
        self.bosses(db)
        db.run("INSERT INTO emp VALUES (1, NULL)")
        for rows in ([(1, 2), (2, None)], [(3, None), (4, 3), (3, 4)]):
            with pytest.raises(BadValue, match="PRIMARY"):
                run(tmp_path / str(rows), self.sink(dsn, "emp"), [[partition(rows)]])
        assert (db.ids("emp"), db.pending()) == ([1], 0)

    def test_a_key_to_itself_of_several_columns_and_odd_names(self, tmp_path: Path, dsn: str, db: Observer) -> None:
        db.run(
            "CREATE TABLE `odd ``one` (id bigint, boss bigint NOT NULL, PRIMARY KEY (id, boss), KEY (boss, id),"
            " CONSTRAINT `its ``own` FOREIGN KEY (boss, id) REFERENCES `odd ``one` (id, boss))"
        )
        rows = [(1, 1), (2, 2)]
        sink = MySQLSink(dsn, "`odd ``one`", name="odd")
        run(tmp_path, sink, [[partition(rows)]])
        assert db.visible("`odd ``one`") == rows

    def test_a_sink_that_writes_into_another_database_of_the_server(
        self, tmp_path: Path, dsn: str, db: Observer
    ) -> None:
        other = f"{db.schema}_too"
        dsn = dsn.replace(":sesame@", "_admin:sesame@")
        db.run(f"CREATE DATABASE {other}")
        try:
            db.run(f"CREATE TABLE {other}.parent (id bigint PRIMARY KEY, parent bigint)")
            db.run("INSERT INTO parent VALUES (1, 1), (2, 2)")
            run_all(tmp_path / "two", self.sink(dsn, "child"), self.sink(dsn, f"{other}.parent"))
            assert db.ids("child") == [1, 2]
            db.run(f"ALTER TABLE child ADD CONSTRAINT far FOREIGN KEY (parent) REFERENCES {other}.parent (id)")
            with pytest.raises(ConfigurationError, match=rf"far .*child refers to {other}.parent"):
                run_all(tmp_path, self.sink(dsn, "child"), self.sink(dsn, f"{other}.parent"), job="far")
        finally:
            db.run("DROP TABLE child")
            db.run(f"DROP DATABASE {other}")
