from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from sinks.errors import ConfigurationError
from sinks.sqlalchemy import SqlAlchemySink
from sinks.testing.table import Database
from tests.dead_letters import DeadLettersOfTables, batch
from tests.sqlalchemy_sink.urls import url_of


class Observer(Database):
    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.engine = sa.create_engine(dsn, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)

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


class TestPostgres(DeadLettersOfTables):
    make = SqlAlchemySink
    observe = Observer
    strategies = ("auto", "auto")
    input = tuple(batch(number, by_server=False) for number in range(3))  # a staging table has no CHECK

    @pytest.fixture
    def dsn(self, pg_database: str) -> str:
        return url_of(pg_database)

    def sink(self, dsn: str, strategy: str = "auto", **options: Any) -> SqlAlchemySink:
        return SqlAlchemySink(dsn, "good", dead_letters=SqlAlchemySink(dsn, "dead", create_table=True), **options)
