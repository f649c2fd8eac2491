"""What is these servers' own; the rest is in `NamedTables`."""

from __future__ import annotations

import json
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any, ClassVar

import pytest

from sinks.errors import BadValue, ConfigurationError
from sinks.mysql import MySQLSink
from sinks.testing.table import COMMITTED, Database, checkpoint, pre_commit
from tests.mysql.observer import Observer
from tests.named_tables import NamedTables, row, rows


@pytest.fixture
def dsn(mysql_database: str) -> str:
    return mysql_database


class TestMySQL(NamedTables):
    make = MySQLSink
    observe = Observer
    two_phase = "xa"

    VALUES: ClassVar = [
        ("tinyint(1)", True, 1),
        ("tinyint", 7, 7),
        ("bigint unsigned", 2**64 - 1, 2**64 - 1),
        ("decimal(10,2)", "12.30", Decimal("12.30")),
        ("float", 0.5, 0.5),
        ("double", 0.1, 0.1),
        ("varchar(10)", 12.50, "12.5"),
        ("enum('a', 'b')", "b", "b"),
        ("varbinary(9)", "AP8=", b"\0\xff"),
        ("date", "2024-02-29", date(2024, 2, 29)),
        ("time(1)", "10:00:01.5", timedelta(hours=10, seconds=1.5)),
        ("datetime(1)", "2024-02-29T10:00:01.5Z", datetime(2024, 2, 29, 10, 0, 1, 500_000)),
        ("timestamp NULL", "2024-02-29T10:00:01+02:00", datetime(2024, 2, 29, 8, 0, 1)),
        ("year", 2024, 2024),
    ]

    @pytest.mark.parametrize("strategy", ["xa", "staged"])
    def test_values_of_each_type(self, db: Database, dsn: str, strategy: str) -> None:
        db.run("SET SESSION time_zone = '+00:00'")
        columns = ", ".join(f"c{n} {kind}" for n, (kind, _, _) in enumerate(self.VALUES))
        db.run(f"CREATE TABLE typed (id int, {columns}, j json)")
        sink = self.sink(dsn, strategy=strategy, tables={"typed": {}})
        values = {f"c{n}": value for n, (_, value, _) in enumerate(self.VALUES)}
        nested = {"a": [1.5, "ü", True, None]}
        some = rows(row("typed", id=1, j=nested, **values), row("typed", id=2), row("typed", id=3, j='{"a": 1}'))
        assert sink.commit_all(checkpoint(), [pre_commit(sink, some)]) == [COMMITTED]
        first, second, third = db.visible("typed")
        assert list(first[1:-1]) == [value for _, _, value in self.VALUES]
        assert json.loads(first[-1]) == nested
        assert second == (2, *[None] * (len(values) + 1))
        assert json.loads(third[-1]) == {"a": 1}

    @pytest.mark.parametrize(
        ("kind", "value"),
        [
            ("tinyint", 128),
            ("bigint", 1.5),
            ("decimal(10,2)", 1.234),
            ("varbinary(9)", "no base64!"),
            ("date", 19_000),
            ("datetime", 1_700_000_000_000),
            ("datetime", "2024-02-29T10:00:01.5"),
            ("varchar(3)", "abcd"),
            ("enum('a', 'b')", "1"),
        ],
    )
    def test_values_that_are_not_the_columns(self, db: Database, dsn: str, kind: str, value: Any) -> None:
        db.run(f"CREATE TABLE typed (id int, c {kind})")
        sink = self.sink(dsn, tables={"typed": {}})
        with pytest.raises(BadValue, match=r'"c"|is no value of|Data truncated'):
            pre_commit(sink, rows(row("typed", id=1, c=value)))
        assert db.pending() == 0

    def test_a_column_that_no_text_fits(self, db: Database, dsn: str) -> None:
        db.run("CREATE TABLE places (id int, place point)")
        with pytest.raises(ConfigurationError, match=r'column "place": no text becomes a value of point.* columns='):
            self.sink(dsn, tables={"places": {}})
