"""PostgresSink passes the conformance kit, with both strategies."""

from __future__ import annotations

from collections.abc import Sequence

import psycopg
import pytest

from sinks.postgres import PostgresSink
from sinks.testing import SinkConformance

TABLE = "CREATE TABLE orders (id bigint NOT NULL, name text, amount double precision)"


class Conformance(SinkConformance):
    strategy: str

    @pytest.fixture
    def sink(self, pg_database: str) -> PostgresSink:
        with psycopg.connect(pg_database, autocommit=True) as connection:
            connection.execute(TABLE)
        self.dsn = pg_database
        return PostgresSink(pg_database, "orders", strategy=self.strategy)  # type: ignore[arg-type]

    def visible(self, sink: PostgresSink) -> Sequence[int]:
        with psycopg.connect(self.dsn) as connection:
            return [id for (id,) in connection.execute("SELECT id FROM orders")]

    @pytest.fixture(autouse=True)
    def nothing_is_left_behind(self, sink: PostgresSink):
        yield
        sink.close()


class TestPrepared(Conformance):
    strategy = "prepared"


class TestStaged(Conformance):
    strategy = "staged"
