"""SqlAlchemySink passes the conformance kit: staged on SQLite, PostgreSQL, MySQL and MariaDB, two_phase
on PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest
import sqlalchemy as sa

from sinks.sql.staging import identity_of
from sinks.sqlalchemy import SqlAlchemySink
from sinks.testing import Ability, SinkConformance, SinkContract
from sinks.testing.servers.mariadb import MariaDBServer
from sinks.testing.servers.mysql import MySQLService
from sinks.transaction import Committable, Identity
from tests.sqlalchemy_sink.play import observing, url_of


@cache
def engine(url: str) -> sa.Engine:
    return observing(url, poolclass=sa.NullPool)


class Contract(SinkContract):
    url: str
    strategy: Any = "staged"

    @pytest.fixture
    def sink(self, database: str) -> Iterator[SqlAlchemySink]:
        self.url = database
        self.run("CREATE TABLE orders (id bigint NOT NULL, name text, amount double precision)")
        sink = SqlAlchemySink(database, "orders", strategy=self.strategy)
        yield sink
        sink.close()

    def run(self, statement: str) -> list[dict[str, Any]]:
        with engine(self.url).begin() as connection:
            result = connection.execute(sa.text(statement))
            return [dict(row) for row in result.mappings()] if result.returns_rows else []

    def visible(self, sink: SqlAlchemySink) -> Sequence[Mapping[str, Any]]:
        return self.run("SELECT id, name, amount FROM orders")

    def unseen(self, made: Committable, transaction_id: str) -> Identity | None:
        schema, _, staging = made.transaction.get("table", "").rpartition(".")
        return identity_of(schema, transaction_id) if staging else None

    def sibling(self, sink: SqlAlchemySink) -> SqlAlchemySink:
        return SqlAlchemySink(self.url, "orders", strategy=self.strategy, name="orders-2")


class TestSQLite(Contract, SinkConformance):
    cannot: ClassVar = {Ability.SIDE_BY_SIDE: "SQLite has one writer at a time"}

    @pytest.fixture
    def database(self, tmp_path: Path) -> str:
        return f"sqlite:///{tmp_path}/shop.db"


class PostgreSQL(Contract):
    stops = 3

    @pytest.fixture
    def database(self, pg_database: str) -> str:
        return url_of(pg_database)


class TestPostgresTwoPhase(PostgreSQL, SinkConformance):
    strategy = "two_phase"


@pytest.mark.large  # staged is run by SQLite and MySQL, and by test_servers.py
class TestPostgresStaged(PostgreSQL):
    strategy = "staged"


class MySQL(Contract):
    stops = 3
    cannot: ClassVar = {Ability.TELL_OPEN: "the staging table is there from the first row on"}


class TestMySQL(MySQL):
    @pytest.fixture
    def database(self, mysql_server: MySQLService) -> Iterator[str]:
        with mysql_server.database() as dsn:
            yield url_of(dsn)


@pytest.mark.large  # of the code that MySQL has run
class TestMariaDB(MySQL):
    @pytest.fixture
    def database(self, mariadb: MariaDBServer) -> Iterator[str]:
        with mariadb.database() as dsn:
            yield url_of(dsn)
