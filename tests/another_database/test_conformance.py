"""SqliteSink passes the conformance kit, and does with a table what the sinks that come with the project do."""

from __future__ import annotations

import re
import sqlite3
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pytest

from coordinator import Step
from coordinator.errors import InDoubtError
from sinks import Committable
from sinks.errors import BadValue, ConfigurationError
from sinks.sql.sink import TableSink
from sinks.sql.strategies import identity_of
from sinks.testing import KILLED, Ability, Driver, KillAt, SinkConformance
from sinks.testing.conformance import example_input, ids
from sinks.testing.driver import die
from sinks.testing.table import CHANGES, COMMITTED, batch, change, checkpoint, pre_commit, rows_of, why_unknown
from sinks.testing.table_crashes import At, run
from sinks.transaction import CommitState, Identity
from tests.another_database.sqlite_sink import SqliteDialect, SqliteSink, SqliteStaging

ORDERS = "CREATE TABLE orders (id bigint NOT NULL, name text, amount double)"


class Database:
    """Past the sink."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def run(self, statement: str) -> list[Any]:
        with closing(sqlite3.connect(self.path, isolation_level=None, timeout=300)) as connection:
            connection.row_factory = sqlite3.Row
            return connection.execute(statement).fetchall()

    def visible(self, table: str = "orders") -> list[tuple[Any, ...]]:
        return [tuple(row) for row in self.run(f"SELECT * FROM {table} ORDER BY 1")]

    def staging(self) -> list[str]:
        names = [row["name"] for row in self.run("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return [name for name in names if re.fullmatch("tpc_[0-9a-f]{20}", name)]


@pytest.fixture(params=["delete", pytest.param("wal", marks=pytest.mark.large)])
def db(tmp_path: Path, request: pytest.FixtureRequest) -> Database:
    db = Database(tmp_path / "shop.db")
    db.run(f"PRAGMA journal_mode = {request.param}")
    return db


def upserting(db: Database, table: str = "orders", **options: Any) -> SqliteSink:
    sink = SqliteSink(db.path, table, keys=["id"], order_by="at", delete_marker="gone", **options)
    sink.check(CHANGES)
    return sink


def committed(sink: TableSink, number: int, *partitions: pa.RecordBatch) -> None:
    staged = [pre_commit(sink, rows, checkpoint=number, subtask=n) for n, rows in enumerate(partitions)]
    sink.validate_all(checkpoint(number), staged)
    assert sink.commit_all(checkpoint(number), staged) == [COMMITTED] * len(staged)


class TestSqliteSink(SinkConformance):
    types: ClassVar = [
        *(pa.bool_(), pa.int8(), pa.int64(), pa.float32(), pa.float64(), pa.string(), pa.binary()),
    ]
    bad: ClassVar = {"amount": float("nan")}
    cannot: ClassVar = {Ability.NEGATIVE_ZERO: "SQLite stores it as 0"}

    @pytest.fixture
    def sink(self, tmp_path: Path) -> SqliteSink:
        self.db = Database(tmp_path / "shop.db")
        self.db.run(ORDERS)
        return SqliteSink(self.db.path, "orders")

    def visible(self, sink: SqliteSink) -> Sequence[Mapping[str, Any]]:
        return [dict(row) for row in self.db.run(f"SELECT * FROM {sink.table}")]

    def accepting(self, sink: SqliteSink, schema: pa.Schema) -> SqliteSink:
        return SqliteSink(self.db.path, "accepting", create_table=True)

    def upserting(self, sink: SqliteSink) -> SqliteSink:
        return SqliteSink(self.db.path, "upserted", keys=["id"], create_table=True)

    def set_otherwise(self, sink: SqliteSink) -> Sequence[SqliteSink]:
        return [SqliteSink(self.db.path, "others", name="orders"), SqliteSink(self.db.path, "orders", keys=["id"])]

    def leftovers(self, sink: SqliteSink) -> list[str]:
        return self.db.staging()

    def named(self, sink: SqliteSink, name: str) -> SqliteSink:
        return SqliteSink(self.db.path, "orders", name=name)

    def unseen(self, made: Committable, transaction_id: str) -> Identity:
        return identity_of("main", transaction_id)


# ---------------------------------------------------------------------- upserts
def test_upserts_keep_the_last_change_of_each_key_and_delete(db: Database) -> None:
    db.run("CREATE TABLE orders (id integer PRIMARY KEY, name text NOT NULL, note text DEFAULT 'as it was')")
    sink = upserting(db)
    first = [change(1, "a", 1), change(2, "b", 1), change(1, "older", 0)], [change(3, "c", 1), change(2, "newer", 2)]
    committed(sink, 0, *(batch(rows, CHANGES) for rows in first))
    assert db.visible() == [(1, "a", "as it was"), (2, "newer", "as it was"), (3, "c", "as it was")]
    db.run("UPDATE orders SET note = 'kept'")
    gone = [change(n, None, 5, True) for n in (1, 2, 9)]
    second = [change(1, "x", 5), *gone], [change(3, "y", 1), change(2, "older", 4)]
    committed(sink, 1, *(batch(rows, CHANGES) for rows in second))
    assert db.visible() == [(3, "y", "kept")]
    with pytest.raises(BadValue, match='column "name": NULL in a column that takes none'):
        pre_commit(sink, batch([change(3, None, 7)], CHANGES), checkpoint=2)
    assert db.staging() == []


def test_two_changes_of_a_key_need_an_order(db: Database) -> None:
    db.run("CREATE TABLE orders (id bigint PRIMARY KEY, name text)")
    sink = SqliteSink(db.path, "orders", keys=["id"])
    staged = [pre_commit(sink, rows_of(1, 2), subtask=0), pre_commit(sink, rows_of(2), subtask=1)]
    with pytest.raises(BadValue, match="two changes of one key"):
        sink.validate_all(checkpoint(), staged)


def test_without_an_order_of_staged_rows_two_equal_changes_are_refused(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    db.run("CREATE TABLE orders (id bigint PRIMARY KEY, name text, at bigint)")
    sink = upserting(db)
    rows = batch([change(1, "a", 5), change(1, "b", 5)], CHANGES)
    committed(sink, 0, rows, batch([change(1, "b", 5), change(2, "c", 1)], CHANGES))
    assert db.visible() == [(1, "b", 5), (2, "c", 1)]
    monkeypatch.setattr(SqliteDialect, "POSITION", "")
    told = r"two changes of one key with an equal order_by: \(id, at\) = \(1, 5\) comes 2 times"
    with pytest.raises(BadValue, match=told):
        sink.validate_all(checkpoint(1), [pre_commit(sink, rows, checkpoint=1)])


def test_upserts_need_an_index_that_compares_by_bytes(db: Database) -> None:
    db.run("CREATE TABLE orders (id text PRIMARY KEY COLLATE NOCASE, name text)")
    with pytest.raises(ConfigurationError, match="needs a unique index on just these columns"):
        SqliteSink(db.path, "orders", keys=["id"]).check(pa.schema({"id": pa.string(), "name": pa.string()}))


# ---------------------------------------------------------------------- what the table refuses
@pytest.mark.parametrize(
    ("more", "why"),
    [
        (", CHECK (amount < 100)", "CHECK constraint failed"),
        (", UNIQUE (id) ON CONFLICT IGNORE", "is in the table already"),
        (", UNIQUE (name COLLATE NOCASE) ON CONFLICT REPLACE", "UNIQUE constraint failed"),
        (", FOREIGN KEY (name) REFERENCES names (name)", "FOREIGN KEY constraint failed"),
    ],
)
def test_what_the_table_refuses_fails_the_checkpoint_before_it_is_decided(
    tmp_path: Path, db: Database, more: str, why: str
) -> None:
    db.run("CREATE TABLE names (name text PRIMARY KEY)")
    db.run("INSERT INTO names VALUES ('USER-1')")
    db.run(ORDERS[:-1] + more + ")")
    db.run("PRAGMA foreign_keys = OFF")
    db.run("INSERT INTO orders VALUES (1, 'USER-1', 1)")
    with pytest.raises(BadValue, match=why):
        run(tmp_path, SqliteSink(db.path, "orders"), example_input(1))
    assert db.visible() == [(1, "USER-1", 1.0)]
    assert db.staging() == []


def test_what_the_table_refuses_after_the_decision_is_safe_until_it_is_mended(db: Database) -> None:
    db.run("CREATE TABLE orders (id bigint NOT NULL, name text)")
    sink = SqliteSink(db.path, "orders")
    staged = pre_commit(sink, rows_of(1, 2))
    sink.validate_all(checkpoint(), [staged])
    db.run("CREATE UNIQUE INDEX one_of_each ON orders (name)")
    db.run("INSERT INTO orders VALUES (7, 'row 2')")
    for _ in range(2):
        (outcome,) = sink.commit_all(checkpoint(), [staged])
        assert "refuses rows: UNIQUE constraint failed: orders.name" in why_unknown(outcome)
    db.run("DELETE FROM orders")
    assert sink.commit_all(checkpoint(), [staged]) == [COMMITTED]
    assert db.visible() == [(1, "row 1"), (2, "row 2")]


# ---------------------------------------------------------------------- a table that changes
@pytest.mark.parametrize(
    ("change", "back", "why"),
    [
        ("RENAME amount TO price", "RENAME price TO amount", 'no column "amount" any more'),
        ("RENAME TO others", "", "there is no table main.orders"),
        ("ADD COLUMN more NOT NULL DEFAULT 1", None, ""),
    ],
)
def test_a_table_that_is_altered_while_the_query_runs(
    tmp_path: Path, db: Database, change: str, back: str | None, why: str
) -> None:
    db.run(ORDERS)
    input, sink = example_input(), SqliteSink(db.path, "orders")
    killed = KillAt(Step.COMPLETE, checkpoint_id=1)
    assert Driver("job", sink, f"file://{tmp_path / 'storage'}", tmp_path / "query", input, [killed]).run() == KILLED
    db.run(f"ALTER TABLE orders {change}")
    if back is not None:
        for _ in range(2):
            with pytest.raises(InDoubtError, match=why):
                run(tmp_path, sink, input)
        db.run(f"ALTER TABLE orders {back}" if back else "ALTER TABLE others RENAME TO orders")
    run(tmp_path, sink, input)
    exactly_once(db, input)


def test_a_new_trigger_is_refused_until_a_start_that_takes_it_as_meant(db: Database) -> None:
    db.run("CREATE TABLE orders (id bigint NOT NULL, name text)")
    sink = SqliteSink(db.path, "orders")
    staged = pre_commit(sink, rows_of(1))
    trigger = "CREATE TRIGGER meddles BEFORE INSERT ON orders BEGIN SELECT raise(IGNORE); END"
    db.run(trigger)
    with pytest.raises(ConfigurationError, match="trigger meddles is new"):
        sink.validate_all(checkpoint(), [staged])
    committed(SqliteSink(db.path, "orders"), 1, rows_of(2))
    assert db.visible() == []


def test_a_staging_table_that_is_dropped_is_lost_and_holds_its_siblings(db: Database) -> None:
    db.run("CREATE TABLE orders (id bigint NOT NULL, name text)")
    sink = SqliteSink(db.path, "orders")
    lost, sibling = pre_commit(sink, rows_of(1), subtask=0), pre_commit(sink, rows_of(2), subtask=1)
    db.run(f"DROP TABLE {lost.transaction['table']}")
    outcomes = [outcome.state for outcome in sink.commit_all(checkpoint(), [lost, sibling])]  # type: ignore[union-attr]
    assert outcomes == [CommitState.LOST, CommitState.HELD]
    replay = pre_commit(sink, rows_of(1), subtask=0, round=1)
    assert sink.commit_all(checkpoint(), [replay, sibling]) == [COMMITTED, COMMITTED]
    assert db.visible() == [(1, "row 1"), (2, "row 2")]


# ---------------------------------------------------------------------- side by side
def test_two_first_starts_at_once(db: Database) -> None:
    errors, start = list[BaseException](), threading.Barrier(6)

    def begin(number: int) -> None:
        try:
            sink = SqliteSink(db.path, "orders", create_table=True, name=f"sink-{number}", lock_timeout=300)
            start.wait()
            sink.check(rows_of().schema)
            committed(sink, 0, rows_of(number))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=begin, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert [id for id, _ in db.visible()] == list(range(6))


def test_a_wait_for_a_lock_ends(db: Database) -> None:
    db.run(ORDERS)
    sink = SqliteSink(db.path, "orders", lock_timeout=0.1)
    with closing(sqlite3.connect(db.path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(ConfigurationError, match=r"somebody locks.*database is locked"):
            sink.check(rows_of().schema)


def test_a_commit_that_a_reader_keeps_out_is_asked_for_again(db: Database) -> None:
    """In a rollback journal it is; beside a write-ahead log nobody is in the way."""
    db.run("CREATE TABLE orders (id bigint NOT NULL, name text)")
    sink = SqliteSink(db.path, "orders", lock_timeout=0.1)
    staged = [pre_commit(sink, rows_of(1))]
    with closing(sqlite3.connect(db.path, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM orders").fetchall()
        ((mode,),) = db.run("PRAGMA journal_mode")
        (outcome,) = sink.commit_all(checkpoint(), staged)
        assert outcome == COMMITTED if mode == "wal" else "database is locked" in str(outcome)
    assert sink.commit_all(checkpoint(), staged) == [COMMITTED]
    assert db.visible() == [(1, "row 1")]


def test_more_partitions_than_a_compound_select_may_have(db: Database) -> None:
    committed(upserting(db, create_table=True), 0, *(batch([change(n, "a", 1)], CHANGES) for n in range(600)))
    assert len(db.visible()) == 600


# ---------------------------------------------------------------------- names and types
def test_names_with_capitals_quotes_and_percent_signs(db: Database) -> None:
    table, key, value, by = 'Or"ders %s {x}', 'I"d', "100%s % of {it}", "At.Time"
    schema = pa.schema({key: pa.string(), value: pa.int32(), by: pa.timestamp("us", "UTC"), "Gone %": pa.bool_()})
    sink = SqliteSink(
        db.path, table, keys=[key], order_by=by, delete_marker="Gone %", create_table=True, ledger='Led"ger %s'
    )
    sink.check(schema)
    for number, gone in enumerate([False, True]):
        rows = [{key: "k", value: 1, by: 1, "Gone %": gone}, {key: "K", value: 2, by: 2, "Gone %": False}]
        committed(sink, number, batch(rows, schema), batch(rows[:0], schema))
    quoted = '"' + table.replace('"', '""') + '"'
    assert db.visible(quoted) == [("K", 2, "1970-01-01 00:00:00.000002")]
    assert SqliteSink(db.path, table.lower(), ledger='Led"ger %s', name=table).committed_checkpoints("job") != {}


def test_errors_name_the_file(tmp_path: Path) -> None:
    sink = SqliteSink(tmp_path / "no" / "folder.db", "orders")
    with pytest.raises(ConfigurationError, match=r"cannot use database=.*folder\.db: unable to open.*Check the path"):
        sink.check(rows_of().schema)


# ---------------------------------------------------------------------- crashes
class DyingStaging(SqliteStaging):
    def mark_moved(self, connection: sqlite3.Connection, schema: str, names: Sequence[str]) -> None:
        super().mark_moved(connection, schema, names)
        die()


class DyingSink(SqliteSink):
    """Dies when rows and ledger are written, before COMMIT."""

    def __init__(self, path: Path, table: str) -> None:
        super().__init__(path, table)
        self._backend.staging.__class__ = DyingStaging


def exactly_once(db: Database, input: Any) -> None:
    assert Counter(id for id, *_ in db.visible()) == Counter(ids(input))
    assert db.staging() == []


def test_a_driver_killed_in_the_middle_of_a_move(tmp_path: Path, db: Database) -> None:
    """A second process recovers."""
    db.run(ORDERS)
    input, storage = example_input(), f"file://{tmp_path / 'storage'}"
    for _ in range(2):
        assert Driver("job", DyingSink(db.path, "orders"), storage, tmp_path / "query", input).run() == KILLED
        assert db.visible() == []
        assert len(db.staging()) == 3
    assert Driver("job", SqliteSink(db.path, "orders"), storage, tmp_path / "query", input).run() == 0
    exactly_once(db, input)


def test_another_file_takes_the_place_of_the_first(tmp_path: Path, db: Database) -> None:
    db.run(ORDERS)
    db.run("PRAGMA journal_mode = delete")
    input, sink = example_input(), SqliteSink(db.path, "orders")

    def set_back() -> None:
        db.path.unlink()
        db.run(ORDERS)

    with pytest.raises(InDoubtError, match="is not the one that was there at pre-commit"):
        run(tmp_path, sink, input, At(Step.COMMITTING, set_back))
    assert db.visible() == []
