"""MySQLSink passes the conformance kit, with both strategies."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

import pytest

from sinks.mysql import MySQLSink
from sinks.testing import SinkConformance
from tests.mysql.play import Observer

TABLE = "CREATE TABLE orders (id bigint NOT NULL, name text, amount double) ENGINE=InnoDB"


class Conformance(SinkConformance):
    strategy: str

    @pytest.fixture
    def sink(self, mysql_database: str):
        self.dsn = mysql_database
        with closing(Observer(mysql_database)) as observer:
            observer.run(TABLE)
        sink = MySQLSink(mysql_database, "orders", strategy=self.strategy)  # type: ignore[arg-type]
        yield sink
        sink.close()

    def visible(self, sink: MySQLSink) -> Sequence[int]:
        with closing(Observer(self.dsn)) as observer:
            return observer.ids()


class TestXA(Conformance):
    strategy = "xa"


class TestStaged(Conformance):
    strategy = "staged"
