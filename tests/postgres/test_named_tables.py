"""What is this server's own; the rest is in `NamedTables`."""

from __future__ import annotations

import json
from datetime import date, datetime, time, timezone
from decimal import Decimal
from typing import Any, ClassVar
from uuid import UUID

import pytest

from sinks.errors import BadValue, ConfigurationError
from sinks.postgres import PostgresSink
from sinks.testing.table import COMMITTED, Database, checkpoint, pre_commit
from tests.named_tables import NamedTables, row, rows
from tests.postgres.observer import Observer


@pytest.fixture
def dsn(pg_database: str) -> str:
    return pg_database


class TestPostgres(NamedTables):
    make = PostgresSink
    observe = Observer
    two_phase = "prepared"

    VALUES: ClassVar = [
        ("boolean", True, True),
        ("smallint", -3, -3),
        ("bigint", 2**62, 2**62),
        ("numeric(10,2)", "12.30", Decimal("12.30")),
        ("numeric(38,0)", 10**37, Decimal(10**37)),
        ("numeric", 0.1, Decimal("0.1")),
        ("real", 0.1, 0.1),
        ("double precision", 0.1, 0.1),
        ("text", 12.50, "12.5"),
        ("text", {"a": [1, None]}, '{"a": [1, null]}'),
        ("uuid", "0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0", UUID("0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0")),
        ("bytea", "AP8=", b"\0\xff"),
        ("date", "2024-02-29", date(2024, 2, 29)),
        ("time", "10:00:01.5", time(10, 0, 1, 500_000)),
        ("timestamp", "2024-02-29T10:00:01.5Z", datetime(2024, 2, 29, 10, 0, 1, 500_000)),
        ("timestamptz", "2024-02-29T10:00:01+02:00", datetime(2024, 2, 29, 8, 0, 1, tzinfo=timezone.utc)),
        ("jsonb", {"a": [1.5, "ü", True, None]}, {"a": [1.5, "ü", True, None]}),
        ("jsonb", '{"a": 1}', {"a": 1}),
        ("text[]", ["a", None], ["a", None]),
        ("bigint[]", [1, 2], [1, 2]),
    ]

    @pytest.mark.parametrize("strategy", ["prepared", "staged"])
    def test_values_of_each_type(self, db: Database, dsn: str, strategy: str) -> None:
        columns = ", ".join(f"c{n} {kind}" for n, (kind, _, _) in enumerate(self.VALUES))
        db.run(f"CREATE TABLE typed (id int, {columns})")
        sink = self.sink(dsn, strategy=strategy, tables={"typed": {}})
        values = {f"c{n}": value for n, (_, value, _) in enumerate(self.VALUES)}
        some = rows(row("typed", id=1, **values), row("typed", id=2), row("typed", id=3, **dict.fromkeys(values)))
        assert sink.commit_all(checkpoint(), [pre_commit(sink, some)]) == [COMMITTED]
        first, *others = db.visible("typed")
        assert list(first[1:]) == [value for _, _, value in self.VALUES]
        assert others == [(n, *[None] * len(values)) for n in (2, 3)]

    @pytest.mark.parametrize(
        ("kind", "value"),
        [
            ("boolean", 2),
            ("smallint", 2**15),
            ("bigint", 1.5),
            ("numeric(10,2)", 1.234),
            ("bytea", "no base64!"),
            ("date", "2024-02-30"),
            ("date", 19_000),
            ("timestamp", 1_700_000_000_000),
            ("timestamp", "2024-02-29T10:00:01+02:00"),
            ("timestamptz", "2024-02-29T10:00:01"),
            ("varchar(3)", "abcd"),
            ("jsonb", [Decimal("0.12345678901234567890123")]),
            ("jsonb", "{"),
            ("text[]", {"a": 1}),
        ],
    )
    def test_values_that_are_not_the_columns(self, db: Database, dsn: str, kind: str, value: Any) -> None:
        db.run(f"CREATE TABLE typed (id int, c {kind})")
        sink = self.sink(dsn, tables={"typed": {}})
        text = json.dumps({"id": 1, "c": value}, default=lambda number: 0)
        if isinstance(value, list):
            text = f'{{"id": 1, "c": [{value[0]}]}}'
        with pytest.raises(BadValue, match=r'"c"|is no value of|invalid input syntax for type json'):
            pre_commit(sink, rows({"table": "typed", "payload": text}))
        assert db.pending() == 0

    def test_generated_columns_are_left_out(self, db: Database, dsn: str) -> None:
        db.run("CREATE TABLE sums (id int, double int GENERATED ALWAYS AS (2 * id) STORED)")
        sink = self.sink(dsn, tables={"sums": {}})
        assert sink.commit_all(checkpoint(), [pre_commit(sink, rows(row("sums", id=2, double=5)))]) == [COMMITTED]
        assert db.visible("sums") == [(2, 4)]

    def test_a_column_that_no_text_fits(self, db: Database, dsn: str) -> None:
        db.run("CREATE TABLE places (id int, place point)")
        with pytest.raises(ConfigurationError, match=r'column "place": no text becomes a value of point.* columns='):
            self.sink(dsn, tables={"places": {}})
        sink = self.sink(dsn, tables={"places": {"columns": ["id"]}})
        assert sink.commit_all(checkpoint(), [pre_commit(sink, rows(row("places", id=2, place="1")))]) == [COMMITTED]

    def test_tables_of_several_schemas(self, db: Database, dsn: str) -> None:
        db.run("CREATE SCHEMA other")
        db.run("CREATE TABLE other.parent (id int)")
        with pytest.raises(ConfigurationError, match="are in several schemas, and one ledger"):
            self.sink(dsn, tables={"parent": {}, "others": {"table": "other.parent"}})

    def test_constraints_that_are_deferred(self, db: Database, dsn: str) -> None:
        """Then a circle of foreign keys is no obstacle."""
        self.refer(db)
        db.run("ALTER TABLE parent ADD favorite bigint REFERENCES child DEFERRABLE INITIALLY DEFERRED")
        sink = self.sink(dsn)
        committable = pre_commit(sink, rows(row("child", id=1, parent=2), row("parent", id=2, favorite=1)))
        sink.validate_all(checkpoint(), [committable])
        assert sink.commit_all(checkpoint(), [committable]) == [COMMITTED]
        assert self.family(db) == ([(2, None, 1)], [(1, None, 2)])
