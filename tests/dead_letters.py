"""Rows that a table refuses go into another one, by the same checkpoint: for the sinks of each database."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from coordinator.operations.inspection.balance import Verdict, take_balance
from coordinator.protocol.ports import sinks_by_name
from coordinator.storage import open_storage
from coordinator.store.job_store import JobStore
from sinks.errors import BadValue
from sinks.optional import DeadLettering
from sinks.sql.sink import TableSink
from sinks.testing.table import Database
from sinks.testing.table_crashes import run

SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string()), ("amount", pa.float64())])
Input = Sequence[Sequence[pa.Table]]


TOO_LONG = "x" * 50


def partition(start: int, rows: int = 130, *, by_client: str | None = TOO_LONG, by_server: bool = True) -> pa.Table:
    """One row in 29 has a name that no row may have, one in 31 hurts a CHECK."""
    ids = range(start, start + rows)
    names = [by_client if id % 29 == 0 else f"user-{id}" for id in ids]
    amounts = [-1.0 if by_server and id % 31 == 0 else 1.0 for id in ids]
    return pa.table([ids, names, amounts], schema=SCHEMA)


def batch(number: int, **bad: Any) -> Sequence[pa.Table]:
    return [partition(1000 * (3 * number + part), **bad) for part in range(2)]


def ids(input: Input, *, bad: bool) -> list[int]:
    rows = [row for tables in input for table in tables for row in table.to_pylist()]
    return [row["id"] for row in rows if (row["name"] in (None, TOO_LONG) or row["amount"] < 0) is bad]


INPUT = [batch(number) for number in range(3)]


def assert_each_once(db: Database, input: Input, letters: Sequence[tuple[Any, ...]] = ()) -> None:
    assert db.ids("good") == ids(input, bad=False)
    rows = [json.loads(row)["id"] for (row,) in letters or db.run("SELECT row FROM dead")]
    assert sorted(rows) == ids(input, bad=True)
    assert db.pending() == 0


class DeadLettersOfTables:
    """Fixture `dsn`: of a fresh database."""

    make: Callable[..., TableSink]
    observe: Callable[[str], Database]
    strategies: tuple[str, str]
    input: Input = INPUT
    staging_has_checks = False

    @pytest.fixture
    def db(self, dsn: str) -> Iterator[Database]:
        with closing(type(self).observe(dsn)) as db:
            db.run(
                "CREATE TABLE good (id bigint PRIMARY KEY, name varchar(20) NOT NULL, amount float CHECK (amount > 0))"
            )
            yield db

    @pytest.fixture
    def kept(self) -> Iterator[ExitStack]:
        with ExitStack() as stack:
            yield stack

    def sink(self, dsn: str, strategy: str = "auto", **options: Any) -> TableSink:
        dead = type(self).make(dsn, "dead", create_table=True, strategy=strategy)
        return type(self).make(dsn, "good", strategy=strategy, **{"dead_letters": dead, **options})

    def letters(self, dsn: str, db: Database) -> list[tuple[Any, ...]]:
        column = "`row`" if dsn.startswith("mysql") else '"row"'
        return db.run(f"SELECT {column} FROM dead")

    def test_each_row_is_in_one_of_the_tables_once_and_the_books_balance(
        self, tmp_path: Path, dsn: str, db: Database
    ) -> None:
        for batches, strategy in enumerate(self.strategies, 2):
            sink = self.sink(dsn, strategy, max_dead_letters=0.1)
            run(tmp_path, sink, self.input[:batches])
        assert_each_once(db, self.input, self.letters(dsn, db))
        assert isinstance(sink.dead_letters, DeadLettering)
        found = sink.dead_letters.read_dead_letters("job", "good", 3)
        newest = found.rows if found else ()
        assert [(one["checkpoint"], one["sink"], bool(one["error"])) for one in newest] == [(2, "good", True)] * 3
        others = [sink.dead_letters.read_dead_letters(*about, 3) for about in (("other", "good"), ("job", "dead"))]
        assert [found and list(found.rows) for found in others] == [[], []]
        sink.dead_letters.close()
        store = JobStore(open_storage(f"file://{tmp_path / 'storage'}"), "job")
        books = take_balance(store, sinks_by_name([sink]))
        assert books.verdict is Verdict.BALANCED
        written = [(line.counts["pre_committed"] or 0) + (line.counts["dead_lettered"] or 0) for line in books.lines]
        assert [line.counts["read"] for line in books.lines] == written
        bad, totals = len(ids(self.input, bad=True)), books.totals()
        assert (totals["good"]["read"], totals["good"]["dead_lettered"]) == (3 * 2 * 130, bad)
        assert (totals["dead"]["read"], totals["dead"]["ledger"]) == (bad, bad)

    def test_what_only_the_move_shows_fails_the_checkpoint(self, tmp_path: Path, dsn: str, db: Database) -> None:
        """Of strategy staged: no row and no letter of it is visible."""
        sink, good = self.sink(dsn, "staged"), batch(0, by_client=None, by_server=False)
        a_check = batch(1, by_client=None)
        for refused in (good,) if self.staging_has_checks else (good, a_check):  # the keys are there
            with pytest.raises(BadValue):
                run(tmp_path, sink, [good, refused])
        assert_each_once(db, [good], self.letters(dsn, db))
