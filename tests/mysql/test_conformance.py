"""MySQLSink passes the conformance kit, with both strategies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any, ClassVar

import pytest

from sinks.base import Sink
from sinks.mysql import MySQLSink
from sinks.mysql.connection import parameters
from sinks.sql.strategies import identity_of
from sinks.testing import Ability, SinkConformance
from sinks.transaction import Committable, Identity
from tests.mysql.observer import Observer
from tests.table_kit import TableKit

TABLE = "CREATE TABLE orders (id bigint NOT NULL, name text, amount double) ENGINE=InnoDB"


class Conformance(TableKit, SinkConformance):
    strategy: str

    @pytest.fixture
    def sink(self, mysql_database: str):
        self.dsn = mysql_database
        with closing(Observer(mysql_database)) as observer:
            observer.run(TABLE)
        sink = self.into("orders")
        yield sink
        sink.close()

    def visible(self, sink: MySQLSink) -> Sequence[Mapping[str, Any]]:
        with closing(Observer(self.dsn)) as observer:
            names = [name for name, *_ in observer.run(f"SHOW COLUMNS FROM {sink.table}")]
            return [dict(zip(names, row, strict=True)) for row in observer.run(f"SELECT * FROM {sink.table}")]

    def into(self, table: str, **options: Any) -> MySQLSink:
        return MySQLSink(self.dsn, table, strategy=self.strategy, **options)  # type: ignore[arg-type]


class TestXA(Conformance):
    strategy = "xa"
    merges = False

    def test_a_commit_beside_a_pre_commit(self, sink: Sink) -> None:
        """Twice a commit waits for the ledger's row of what is pre-committed, until its time is up."""
        with closing(self.into("orders", lock_timeout=1)) as impatient:
            super().test_a_commit_beside_a_pre_commit(impatient)


class TestStaged(Conformance):
    strategy = "staged"
    whole = True
    cannot: ClassVar = {
        Ability.TELL_OPEN: "the staging table is there from the first row on, and DROP TABLE waits for the task"
    }

    def unseen(self, made: Committable, transaction_id: str) -> Identity:
        return identity_of(parameters(self.dsn)["database"], transaction_id)
