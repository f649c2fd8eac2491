"""PostgresSink passes the conformance kit, with both strategies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import psycopg
import pytest
from psycopg.rows import dict_row

from sinks.postgres import PostgresSink
from sinks.sql.strategies import identity_of
from sinks.testing import SinkConformance
from sinks.transaction import Committable, Identity
from tests.named_tables_kit import TABLES, NamedTablesConformance, NamesTables
from tests.table_kit import TableKit

TABLE = "CREATE TABLE orders (id bigint NOT NULL, name text, amount double precision)"


class Conformance(TableKit, SinkConformance):
    strategy: str
    many = 60
    bad: ClassVar = {"name": "\0"}

    @pytest.fixture
    def sink(self, pg_database: str) -> PostgresSink:
        with psycopg.connect(pg_database, autocommit=True) as connection:
            connection.execute(TABLE)
        self.dsn = pg_database
        return self.into("orders")

    def visible(self, sink: PostgresSink) -> Sequence[Mapping[str, Any]]:
        with psycopg.connect(self.dsn, row_factory=dict_row) as connection:
            return connection.execute(f"SELECT * FROM {sink.table}").fetchall()

    def into(self, table: str, **options: Any) -> PostgresSink:
        return PostgresSink(self.dsn, table, strategy=self.strategy, **options)  # type: ignore[arg-type]

    @pytest.fixture(autouse=True)
    def nothing_is_left_behind(self, sink: PostgresSink):
        yield
        sink.close()


class TestPrepared(Conformance):
    strategy = "prepared"
    merges = False


class TestStaged(Conformance):
    strategy = "staged"
    whole = True

    def unseen(self, made: Committable, transaction_id: str) -> Identity:
        return identity_of("public", transaction_id)


class SinkOfNamedTables(NamesTables, PostgresSink):
    pass


class NamedTables(NamedTablesConformance):
    @pytest.fixture
    def sink(self, pg_database: str) -> Iterator[PostgresSink]:
        self.dsn = pg_database
        with psycopg.connect(pg_database, autocommit=True) as connection:
            for table in TABLES:
                connection.execute(TABLE.replace("orders", table).encode())
        sink = self.made()
        yield sink
        sink.close()

    def query(self, statement: str) -> Sequence[Mapping[str, Any]]:
        with psycopg.connect(self.dsn, row_factory=dict_row) as connection:
            return connection.execute(statement.encode()).fetchall()

    def made(self, name: str = "named", **options: Any) -> PostgresSink:
        tables = options.pop("tables", {table: {} for table in TABLES})
        return SinkOfNamedTables(self.dsn, name=name, tables=tables, strategy=self.strategy, **options)  # type: ignore[arg-type]


@pytest.mark.large
class TestPreparedNamedTables(NamedTables):
    strategy = "prepared"


@pytest.mark.large
class TestStagedNamedTables(NamedTables):
    strategy = "staged"
    whole = True

    def unseen(self, made: Committable, transaction_id: str) -> Identity:
        return identity_of("public", transaction_id)
