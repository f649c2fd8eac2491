"""SqlAlchemySink passes the conformance kit on SQLite and PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest
import sqlalchemy as sa

from sinks.sql.strategies import identity_of
from sinks.sqlalchemy import SqlAlchemySink
from sinks.testing import Ability, SinkConformance, SinkContract
from sinks.transaction import Committable, Identity
from tests.sqlalchemy_sink.urls import url_of
from tests.table_kit import TableKit


@cache
def engine(url: str) -> sa.Engine:
    return sa.create_engine(url, poolclass=sa.NullPool)


class Contract(TableKit, SinkContract):
    url: str

    @pytest.fixture
    def sink(self, database: str) -> Iterator[SqlAlchemySink]:
        self.url = database
        self.run("CREATE TABLE orders (id bigint NOT NULL, name text, amount double precision)")
        sink = self.into("orders")
        yield sink
        sink.close()

    def run(self, statement: str) -> list[dict[str, Any]]:
        with engine(self.url).begin() as connection:
            result = connection.execute(sa.text(statement))
            return [dict(row) for row in result.mappings()] if result.returns_rows else []

    def visible(self, sink: SqlAlchemySink) -> Sequence[Mapping[str, Any]]:
        return self.run(f"SELECT * FROM {sink.table}")

    def unseen(self, made: Committable, transaction_id: str) -> Identity | None:
        schema, _, staging = made.transaction.get("table", "").rpartition(".")
        return identity_of(schema, transaction_id) if staging else None

    def into(self, table: str, **options: Any) -> SqlAlchemySink:
        return SqlAlchemySink(self.url, table, **options)


class TestSQLite(Contract, SinkConformance):
    cannot: ClassVar = {
        Ability.SIDE_BY_SIDE: "SQLite has one writer at a time",
        Ability.NEGATIVE_ZERO: "SQLite stores it as 0",
    }

    @pytest.fixture
    def database(self, tmp_path: Path) -> str:
        return f"sqlite:///{tmp_path}/shop.db"


class TestPostgres(Contract, SinkConformance):
    stops = 3

    @pytest.fixture
    def database(self, pg_database: str) -> str:
        return url_of(pg_database)
