from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import sqlalchemy as sa

from sinks.errors import ConfigurationError
from sinks.sqlalchemy import SqlAlchemySink
from sinks.testing.servers.mariadb import MariaDBServer
from sinks.testing.servers.mysql import MySQLService
from sinks.testing.table import Database
from sinks.testing.table_crashes import run
from tests.dead_letters import INPUT, DeadLettersOfTables, batch, ids
from tests.sqlalchemy_sink.play import observing, url_of


class Observer(Database):
    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.engine = observing(dsn, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)

    def run(self, statement: str, parameters: Sequence[Any] | None = None) -> list[tuple[Any, ...]]:
        with self.engine.connect() as connection:
            result = connection.exec_driver_sql(statement)
            return [tuple(row) for row in result] if result.returns_rows else []

    def prepared(self) -> Sequence[Any]:
        return self.run("SELECT * FROM pg_prepared_xacts") if self.engine.name == "postgresql" else []

    def staging(self) -> list[str]:
        tables = [name for name in sa.inspect(self.engine).get_table_names() if name.startswith("tpc_")]
        return [name for name in tables if not name.startswith("tpc_ledger")]

    def close(self) -> None:
        self.engine.dispose()


class TestSQLite(DeadLettersOfTables):
    make = SqlAlchemySink
    observe = Observer
    strategies = ("staged", "staged")
    input = tuple(batch(number, by_client=None, by_server=False) for number in range(3))

    @pytest.fixture
    def dsn(self, tmp_path: Path) -> str:
        return f"sqlite:///{tmp_path / 'rows.db'}"

    def sink(self, dsn: str, strategy: str = "auto", **options: Any) -> SqlAlchemySink:
        dead = SqlAlchemySink(f"{dsn}.dead", "dead", create_table=True)
        return SqlAlchemySink(dsn, "good", dead_letters=dead, **options)

    def letters(self, dsn: str, db: Database) -> list[tuple[Any, ...]]:
        with closing(Observer(f"{dsn}.dead")) as dead:
            return super().letters(dsn, dead)

    def test_one_file_takes_one_writer(self, dsn: str) -> None:
        with pytest.raises(ConfigurationError, match="into another file"):
            SqlAlchemySink(dsn, "good", dead_letters=SqlAlchemySink(dsn, "dead"))


class TestTwoPhase(DeadLettersOfTables):
    make = SqlAlchemySink
    observe = Observer
    strategies = ("two_phase", "staged")
    input = (*INPUT[:2], batch(2, by_server=False))  # a staging table has no CHECK

    @pytest.fixture
    def dsn(self, pg_database: str) -> str:
        return url_of(pg_database)

    def test_a_deferred_key_judges_each_row(self, tmp_path: Path, dsn: str, db: Database) -> None:
        db.run("ALTER TABLE good DROP CONSTRAINT good_pkey, ADD PRIMARY KEY (id) DEFERRABLE INITIALLY DEFERRED")
        [table, _] = INPUT[0]
        run(tmp_path, self.sink(dsn, "two_phase"), [[pa.concat_tables([table, table])]])
        good = ids([[table]], bad=False)
        assert db.ids("good") == good
        assert db.run("SELECT count(*) FROM dead WHERE strpos(error, 'good_pkey') > 0") == [(len(good),)]


class TestMySQL(DeadLettersOfTables):
    make = SqlAlchemySink
    observe = Observer
    strategies = ("staged", "staged")
    input = tuple(batch(number, by_server=False) for number in range(3))

    def test_what_is_no_number_is_a_letter(self, tmp_path: Path, dsn: str, db: Database) -> None:
        [table, _] = batch(0, by_client=None, by_server=False)
        amounts = [math.nan if id in (5, 6) else 1.0 for id in table["id"].to_pylist()]
        run(tmp_path, self.sink(dsn, max_dead_letters=0.1), [[table.set_column(2, "amount", pa.array(amounts))]])
        assert sorted(set(table["id"].to_pylist()) - set(db.ids("good"))) == [0, 5, 6, 29, 58, 87, 116]
        assert db.run("SELECT count(*) FROM dead WHERE error LIKE '%%is no number%%'") == [(2,)]

    @pytest.fixture
    def dsn(self, mysql_server: MySQLService) -> Iterator[str]:
        with mysql_server.database() as dsn:
            yield url_of(dsn)


@pytest.mark.large  # of the code that MySQL has run
class TestMariaDB(TestMySQL):
    @pytest.fixture
    def dsn(self, mariadb: MariaDBServer) -> Iterator[str]:
        with mariadb.database() as dsn:
            yield url_of(dsn)
