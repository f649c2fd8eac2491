"""What a sink's `schema_evolution` keeps, whichever database it is: each row is there once, with its values, whoever
dies or comes in between, and nobody's table is altered in another way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from coordinator import CheckpointListener, Step
from coordinator.errors import Superseded
from coordinator.storage import open_storage
from coordinator.store.job_store import JobStore
from sinks.errors import BadValue, ConfigurationError, SchemaMismatch, TransactionBlocked
from sinks.sql.sink import TableSink
from sinks.testing import KILLED, Driver, Hooked, KillAt
from sinks.testing.table import COMMITTED, Database, checkpoint, pre_commit
from sinks.testing.table_crashes import At, run

Rows = Sequence[tuple[Any, ...]]
OLD = pa.schema([("id", pa.int64()), ("price", pa.decimal128(12, 4))])
NEW = pa.schema(
    [
        *OLD,
        ("name", pa.string()),
        ("ratio", pa.float64()),
        ("note", pa.string()),
        ("at", pa.timestamp("us", "UTC")),
    ]
)
TABLE = "CREATE TABLE orders (id bigint NOT NULL, price decimal(12,4), name varchar(60), ratio double precision)"
BIG = 2**40
OF_OLD = [(1, "1.25"), (2, "2.50")]
OF_NEW = [(BIG, "12345678.1234", "n" * 60, 0.1, "new", None), (4, None, None, None, None, None)]
AFTER_BOTH = [
    (1, Decimal("1.25"), None, None, None, None),
    (2, Decimal("2.50"), None, None, None, None),
    (4, None, None, None, None, None),
    (BIG, Decimal("12345678.1234"), "n" * 60, 0.1, "new", None),
]


def table(schema: pa.Schema, rows: Iterable[tuple[Any, ...]]) -> pa.Table:
    def values(row: tuple[Any, ...]) -> dict[str, Any]:
        row = tuple(Decimal(v) if name == "price" and v else v for name, v in zip(schema.names, row, strict=True))
        return dict(zip(schema.names, row, strict=True))

    return pa.Table.from_pylist([values(row) for row in rows], schema=schema)


def batches(*parts: pa.Table) -> list[list[pa.Table]]:
    return [[part] for part in parts]


OLD_BATCH, NEW_BATCH = table(OLD, OF_OLD), table(NEW, OF_NEW)


class Evolution:
    """Fixtures: `db` with an empty database, `strategy`, one of the sink's after the other."""

    TWO_PHASE: str
    """The strategy in which what is pre-committed locks the table."""

    make: Callable[..., TableSink]

    @pytest.fixture
    def orders(self, db: Any) -> Database:
        db.run("DROP TABLE orders")
        db.run(TABLE)
        return db  # type: ignore[no-any-return]

    def start(self, folder: Path, sink: Any, *parts: pa.Table, listeners: Sequence[CheckpointListener] = ()) -> None:
        run(folder, sink, batches(*parts), *listeners)

    def killed(self, folder: Path, sink: Any, *parts: pa.Table, listeners: Sequence[CheckpointListener] = ()) -> None:
        driver = Driver("job", sink, f"file://{folder / 'storage'}", folder / "query", batches(*parts), listeners)
        assert driver.run() == KILLED

    def columns(self, db: Database) -> list[str]:
        rows = db.run("SELECT column_name FROM information_schema.columns WHERE table_name = 'orders' ORDER BY 1")
        return [str(row[0]) for row in rows]

    def test_columns_are_added_while_the_query_runs_and_older_rows_stay(
        self, orders: Database, tmp_path: Path, strategy: str
    ) -> None:
        sink = self.make(orders.dsn, "orders", strategy=strategy, schema_evolution="add")
        self.start(tmp_path, sink, OLD_BATCH, NEW_BATCH)
        assert orders.visible() == AFTER_BOTH
        assert orders.pending() == 0

    def test_types_are_left_alone_and_a_value_that_does_not_fit_is_refused(self, orders: Database) -> None:
        orders.run("ALTER TABLE orders ADD small smallint")
        schema = pa.schema([*OLD, ("small", pa.int64()), ("note", pa.string())])
        rows = [(1, Decimal(1), 7, "a"), (2, Decimal(2), BIG, "b")]
        batch = pa.RecordBatch.from_pylist([dict(zip(schema.names, row, strict=True)) for row in rows], schema=schema)
        with closing(self.make(orders.dsn, "orders", schema_evolution="add")) as sink:
            assert [change.column for change in sink.schema_diff(schema).changes] == ["note"]
            sink.evolve(schema)
            refused = rf'orders.*: row 2, column "small": {BIG} is out of range of (smallint|SMALLINT)'
            with pytest.raises(BadValue, match=refused):
                pre_commit(sink, batch)
            pre_commit(sink, batch.slice(0, 1))

    def test_widen_is_refused(self, orders: Database) -> None:
        with pytest.raises(ConfigurationError, match=r"schema_evolution='widen' is not one of .*alter types by hand"):
            self.make(orders.dsn, "orders", schema_evolution="widen")

    def test_without_it_the_table_is_left_alone_and_the_diff_names_all(self, orders: Database) -> None:
        with closing(self.make(orders.dsn, "orders")) as sink:
            before = self.columns(orders)
            found = sink.schema_diff(NEW)
            assert [(change.column, change.step) for change in found.changes] == [
                ("note", "add"),
                ("at", "add"),
            ]
            assert found.unfit == ()
            sink.evolve(NEW.remove(5).remove(4))
            message = r'"note" of the batch is not in the table: add it \(schema_evolution="add" does\)'
            with pytest.raises(SchemaMismatch, match=message):
                sink.check(NEW)
            assert [change.column for change in sink.schema_diff(NEW).changes] == [c.column for c in found.changes]
            assert self.columns(orders) == before

    # ------------------------------------------------------------------ who dies
    @pytest.mark.parametrize("back_to_old", [False, True])
    def test_driver_killed_between_the_alter_and_the_rows(
        self, orders: Database, tmp_path: Path, back_to_old: bool
    ) -> None:
        sink = self.make(orders.dsn, "orders", schema_evolution="add")
        self.start(tmp_path, sink, OLD_BATCH)
        self.killed(tmp_path, Hooked(sink, "evolve", after=True), OLD_BATCH, NEW_BATCH)
        assert sink.schema_diff(NEW).changes == ()
        again = table(OLD, [(4, None)]) if back_to_old else NEW_BATCH
        self.start(tmp_path, sink, OLD_BATCH, again)
        assert orders.visible() == (AFTER_BOTH[:3] if back_to_old else AFTER_BOTH)
        assert orders.pending() == 0

    @pytest.mark.parametrize("step", [Step.PRE_COMMITTED, Step.COMPLETE])
    def test_driver_killed_with_transactions_of_before_the_alter(
        self, orders: Database, tmp_path: Path, step: Step
    ) -> None:
        """What locks the table is committed, or swept, before the next program alters it."""
        sink = self.make(orders.dsn, "orders", strategy=self.TWO_PHASE, schema_evolution="add", lock_timeout=60)
        self.killed(tmp_path, sink, OLD_BATCH, listeners=[KillAt(step, checkpoint_id=0)])
        decided = step is Step.COMPLETE
        self.start(tmp_path, sink, *[OLD_BATCH] * decided, NEW_BATCH)
        assert orders.visible() == (AFTER_BOTH if decided else AFTER_BOTH[2:])
        assert orders.pending() == 0

    def test_transactions_lost_after_the_alter_are_written_again(self, orders: Database, tmp_path: Path) -> None:
        """The replay of rows of the older schema: its fingerprint is of their own columns."""

        def lose() -> None:
            other = self.make(orders.dsn, "orders", schema_evolution="add")
            for name in orders.staging():
                orders.run(f"DROP TABLE {name}")
            other.evolve(NEW)
            other.close()

        sink = self.make(orders.dsn, "orders", strategy="staged", schema_evolution="add")
        self.start(tmp_path, sink, OLD_BATCH, NEW_BATCH, listeners=[At(Step.COMPLETE, lose, checkpoint_id=0)])
        assert orders.visible() == AFTER_BOTH

    def test_a_table_that_was_set_back_is_altered_again_for_the_rows_that_were_lost(
        self, orders: Database, tmp_path: Path
    ) -> None:
        sink = self.make(orders.dsn, "orders", strategy="staged", schema_evolution="add")
        self.start(tmp_path, sink, OLD_BATCH)
        self.killed(tmp_path, sink, OLD_BATCH, NEW_BATCH, listeners=[KillAt(Step.COMPLETE, checkpoint_id=1)])
        for name in orders.staging():
            orders.run(f"DROP TABLE {name}")
        orders.run("ALTER TABLE orders DROP COLUMN note, DROP COLUMN at")
        self.start(tmp_path, sink, OLD_BATCH, NEW_BATCH)
        assert orders.visible() == AFTER_BOTH

    # ------------------------------------------------------------------ two drivers
    def test_a_superseded_driver_alters_nothing(self, orders: Database, tmp_path: Path) -> None:
        storage = f"file://{tmp_path / 'storage'}"

        def supersede() -> None:
            JobStore(open_storage(storage), "job").claim_generation()

        sink = self.make(orders.dsn, "orders", schema_evolution="add")
        before = self.columns(orders)
        with pytest.raises(Superseded, match="may not alter a table any more"):
            self.start(tmp_path, sink, NEW_BATCH, listeners=[At(Step.TRIGGERED, supersede, checkpoint_id=0)])
        assert self.columns(orders) == before

    def test_what_another_has_added_meanwhile_is_not_added_again(
        self, orders: Database, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Both have seen the old table."""
        first, second = (self.make(orders.dsn, "orders", schema_evolution="add") for _ in range(2))
        server = second._server
        execute = server.execute

        def after_the_first(connection: Any, statement: str, *parameters: Any) -> int:
            if "ALTER TABLE" in statement:
                first.evolve(NEW)
            return execute(connection, statement, *parameters)

        monkeypatch.setattr(server, "execute", after_the_first)
        with closing(first), closing(second):
            second.evolve(NEW)
            assert second.schema_diff(NEW).changes == ()

    def test_rows_that_were_staged_before_the_alter_are_moved_as_they_are(self, orders: Database) -> None:
        older, newer = (self.make(orders.dsn, "orders", strategy="staged", schema_evolution="add") for _ in "12")
        with closing(older), closing(newer):
            older.check(OLD)
            committables = [pre_commit(older, OLD_BATCH.to_batches()[0])]
            newer.evolve(NEW)
            older.validate_all(checkpoint(), committables)
            assert older.commit_all(checkpoint(), committables) == [COMMITTED]
            assert orders.visible() == AFTER_BOTH[:2]

    # ------------------------------------------------------------------ locks
    def test_who_waits_for_a_lock_is_named_and_the_next_start_goes_on(self, orders: Database, tmp_path: Path) -> None:
        other = self.make(orders.dsn, "orders", name="other", strategy=self.TWO_PHASE)
        sink = self.make(orders.dsn, "orders", schema_evolution="add", lock_timeout=0.3)
        with closing(other):
            other.check(OLD)
            committable = pre_commit(other, OLD_BATCH.to_batches()[0], job="of-others")
            with pytest.raises(TransactionBlocked, match=r"orders: sink .*, which alters it, timed out waiting"):
                self.start(tmp_path, sink, NEW_BATCH)
            assert "note" not in self.columns(orders)
            other.commit(committable)
        self.start(tmp_path, self.make(orders.dsn, "orders", schema_evolution="add"), NEW_BATCH)
        assert orders.visible() == AFTER_BOTH

    # ------------------------------------------------------------------ what is never done
    def test_nothing_is_altered_if_something_else_does_not_fit(self, orders: Database) -> None:
        wrong = NEW.set(3, pa.field("ratio", pa.date32()))
        with closing(self.make(orders.dsn, "orders", schema_evolution="add")) as sink:
            before = self.columns(orders)
            with pytest.raises(SchemaMismatch, match=r'column "ratio": date does not go into') as refused:
                sink.check(wrong)
            assert "note" not in str(refused.value)
            assert any("ratio" in reason for reason in sink.schema_diff(wrong).unfit)
            assert self.columns(orders) == before

    def test_a_name_in_other_capitals_is_not_added(self, orders: Database) -> None:
        told = pytest.raises(SchemaMismatch, match=r'"PRICE" of the batch is not in the table \(there is "price"')
        with closing(self.make(orders.dsn, "orders", schema_evolution="add")) as sink, told:
            sink.check(pa.schema([("id", pa.int32()), ("PRICE", pa.decimal128(6, 2))]))

    def test_columns_that_only_tell_about_a_change_are_not_added(self, orders: Database, tmp_path: Path) -> None:
        orders.run("ALTER TABLE orders ADD PRIMARY KEY (id)")
        merge: dict[str, Any] = {"mode": "upsert", "keys": ["id"], "order_by": "seq", "delete_marker": "gone"}
        sink = self.make(orders.dsn, "orders", schema_evolution="add", **merge)
        changes = pa.table(
            {"id": pa.array([1, 2, 1], pa.int32()), "seq": [1, 2, 3], "gone": [False, True, False], "more": [7, 8, 9]}
        )
        self.start(tmp_path, sink, changes)
        assert orders.visible() == [(1, None, None, None, 9)]
