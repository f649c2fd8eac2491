"""MySQLSink passes the conformance kit, with both strategies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any, ClassVar

import pytest

from sinks.mysql import MySQLSink
from sinks.mysql.connection import parameters
from sinks.sql.strategies import identity_of
from sinks.testing import Ability, SinkConformance
from sinks.transaction import Committable, Identity
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

    def visible(self, sink: MySQLSink) -> Sequence[Mapping[str, Any]]:
        with closing(Observer(self.dsn)) as observer:
            columns = "id", "name", "amount"
            return [dict(zip(columns, row, strict=True)) for row in observer.visible()]

    def named(self, sink: MySQLSink, name: str) -> MySQLSink:
        return MySQLSink(self.dsn, "orders", strategy=self.strategy, name=name)  # type: ignore[arg-type]


class TestXA(Conformance):
    strategy = "xa"


class TestStaged(Conformance):
    strategy = "staged"
    whole = True
    cannot: ClassVar = {
        Ability.TELL_OPEN: "the staging table is there from the first row on, and DROP TABLE waits for the task"
    }

    def unseen(self, made: Committable, transaction_id: str) -> Identity:
        return identity_of(parameters(self.dsn)["database"], transaction_id)
