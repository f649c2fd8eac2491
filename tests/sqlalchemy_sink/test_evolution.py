"""SqlAlchemySink alters its table by the means of each database; the rest is in `tests.evolution`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import sqlalchemy as sa

from sinks.errors import SchemaMismatch, TransactionBlocked
from sinks.sqlalchemy import SqlAlchemySink
from sinks.testing.driver import KILLED, Driver, Hooked
from sinks.testing.table import COMMITTED, checkpoint, pre_commit
from sinks.testing.table_crashes import run
from tests.evolution import AFTER_BOTH, BIG, NEW, NEW_BATCH, OLD, OLD_BATCH, TABLE, batches
from tests.sqlalchemy_sink.urls import url_of


class Shop:
    def __init__(self, url: str) -> None:
        self.url = url
        self.engine = sa.create_engine(url, isolation_level="AUTOCOMMIT")

    def run(self, statement: str) -> list[Any]:
        with self.engine.connect() as connection:
            result = connection.exec_driver_sql(statement)
            return [tuple(row) for row in result] if result.returns_rows else []

    def visible(self) -> list[Any]:
        return self.run("SELECT id, price, name, ratio, note FROM orders ORDER BY id")

    def sink(self, **options: Any) -> SqlAlchemySink:
        return SqlAlchemySink(self.url, "orders", **options)


@pytest.fixture
def shop(request: pytest.FixtureRequest) -> Iterator[Shop]:
    with ExitStack() as stack:
        if request.param == "sqlite":
            url = f"sqlite:///{request.getfixturevalue('tmp_path') / 'shop.db'}"
        else:
            url = url_of(stack.enter_context(request.getfixturevalue("postgres").database()))
        shop = Shop(url)
        shop.run(TABLE)
        stack.callback(shop.engine.dispose)
        yield shop


def on(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("shop", names, indirect=True)


@on("postgresql")
def test_a_driver_is_killed_after_the_alter_and_the_rows_are_as_they_were_sent(shop: Shop, tmp_path: Path) -> None:
    sink = shop.sink(schema_evolution="add")
    input = batches(OLD_BATCH, NEW_BATCH)
    run(tmp_path, sink, input[:1])
    hooked = Hooked(sink, "evolve", after=True)
    assert Driver("job", hooked, f"file://{tmp_path / 'storage'}", tmp_path / "query", input).run() == KILLED
    run(tmp_path, sink, input)
    assert shop.visible() == [row[:5] for row in AFTER_BOTH]


@on("sqlite")
def test_sqlite_gets_columns(shop: Shop, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    run(tmp_path, shop.sink(schema_evolution="add"), batches(OLD_BATCH, NEW_BATCH))
    assert [caplog.text.count(f"ADD COLUMN {name}") for name in ("note", "at")] == [1, 1]
    assert shop.visible()[-1] == (BIG, 12345678.1234, "n" * 60, 0.1, "new")


@on("sqlite", "postgresql")
def test_rows_that_were_staged_before_a_column_was_added_are_moved(shop: Shop) -> None:
    older, newer = (shop.sink(schema_evolution="add") for _ in range(2))
    with closing(older), closing(newer):
        older.check(OLD)
        committables = [pre_commit(older, OLD_BATCH.to_batches()[0])]
        newer.evolve(NEW)
        older.validate_all(checkpoint(), committables)
        assert older.commit_all(checkpoint(), committables) == [COMMITTED]
        assert [(row[0], row[4]) for row in shop.visible()] == [(1, None), (2, None)]


@on("sqlite")
def test_somebody_who_writes_to_sqlite_blocks_it(shop: Shop) -> None:
    sink = SqlAlchemySink(f"{shop.url}?timeout=0.1", "orders", schema_evolution="add")
    with closing(sink), shop.engine.connect() as other:
        sink.check(OLD)
        other.exec_driver_sql("BEGIN IMMEDIATE")
        with pytest.raises(TransactionBlocked, match=r"locked|lock"):
            sink.evolve(NEW)
        other.exec_driver_sql("ROLLBACK")
        sink.evolve(NEW)


@on("sqlite", "postgresql")
def test_a_name_with_signs_of_the_driver_is_added_as_it_is(shop: Shop) -> None:
    schema = pa.schema([("id", pa.int64()), ("a:b 100% %s", pa.string())])
    with closing(shop.sink(schema_evolution="add")) as sink:
        sink.evolve(schema)
        committable = pre_commit(sink, pa.RecordBatch.from_pylist([{"id": 1, "a:b 100% %s": "x"}], schema=schema))
        assert sink.commit_all(checkpoint(), [committable]) == [COMMITTED]
    assert shop.run("SELECT * FROM orders")[0][-1] == "x"


@on("sqlite", "postgresql")
def test_columns_that_differ_by_capitals_are_told_that_one_of_them_is_added(shop: Shop) -> None:
    schema = pa.schema([("id", pa.int64()), ("e", pa.int64()), ("E", pa.int64())])
    with (
        closing(shop.sink(schema_evolution="add")) as sink,
        pytest.raises(SchemaMismatch, match="adds only one") as told,
    ):
        sink.check(schema)
    assert '"add" does' not in str(told.value)
