"""Rows that name the table that they go to: for the sinks of each database."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pytest

from coordinator import CheckpointCoordinator, Step
from sinks.errors import BadValue, ConfigurationError
from sinks.sql.sink import TableSink
from sinks.testing import KILLED, Driver, LocalQuery
from sinks.testing.driver import KillAt
from sinks.testing.table import COMMITTED, Database, batch, checkpoint, context, pre_commit, why_unknown
from sinks.transaction import CommitState

TEXT = pa.schema([("table", pa.string()), ("payload", pa.string())])
CHANGES = pa.schema([*TEXT, ("at", pa.int64()), ("gone", pa.bool_())])
FIELDS = [("id", pa.int64()), ("name", pa.string()), ("parent", pa.int64())]
UPSERT: dict[str, Any] = {"mode": "upsert", "keys": ["id"], "order_by": "at", "delete_marker": "gone"}


_made: list[TableSink] = []


def row(table: str | None, **values: Any) -> dict[str, Any]:
    """A row of TEXT."""
    return {"table": table, "payload": json.dumps(values)}


def rows(*rows: dict[str, Any], schema: pa.Schema = TEXT) -> pa.RecordBatch:
    return batch(rows, schema)


def change(at: int, table: str, gone: bool = False, **values: Any) -> dict[str, Any]:
    """A row of CHANGES."""
    return row(table, **values) | {"at": at, "gone": gone}


def changes(*rows: dict[str, Any]) -> pa.RecordBatch:
    return batch(rows, CHANGES)


class NamedTables:
    """Fixture `dsn`: of a fresh database."""

    make: Callable[..., TableSink]
    observe: Callable[[str], Database]
    two_phase: str
    """The strategy in which each participant has a transaction of its own on the tables."""
    tables: ClassVar[dict[str, Any]] = {"parent": {}, "child": {}}

    @pytest.fixture
    def db(self, dsn: str) -> Iterator[Database]:
        with closing(type(self).observe(dsn)) as db:
            db.run("CREATE TABLE parent (id bigint PRIMARY KEY, name varchar(20))")
            db.run("CREATE TABLE child (id bigint PRIMARY KEY, name varchar(20), parent bigint)")
            yield db
            while _made:
                _made.pop().close()

    @pytest.fixture(params=["two-phase", "staged"])
    def strategy(self, request: pytest.FixtureRequest) -> str:
        return self.two_phase if request.param == "two-phase" else "staged"

    def sink(self, dsn: str, schema: pa.Schema | None = TEXT, **options: Any) -> TableSink:
        """A sink as the driver has it; closed at the end of the test."""
        sink = type(self).make(dsn, **{"tables": self.tables} | options)
        _made.append(sink)
        if schema is not None:
            sink.check(schema)
        return sink

    def refer(self, db: Database) -> None:
        db.run("ALTER TABLE child ADD CONSTRAINT has_parent FOREIGN KEY (parent) REFERENCES parent (id)")

    def family(self, db: Database) -> tuple[Sequence[Any], Sequence[Any]]:
        return db.visible("parent"), db.visible("child")

    # ------------------------------------------------------------------ rows of each form
    @pytest.mark.parametrize("form", ["text", "map", "struct"])
    def test_each_row_goes_to_its_table(self, db: Database, dsn: str, strategy: str, form: str) -> None:
        kinds = {"text": pa.string(), "map": pa.map_(pa.string(), pa.string()), "struct": pa.struct(FIELDS)}
        schema = pa.schema([("table", pa.string()), ("payload", kinds[form])])
        values: list[tuple[str, dict[str, Any]]] = [
            ("child", {"id": 1, "name": "a", "parent": 7}),
            ("parent", {"id": 7, "name": "b\n'\"\\ü"}),
            ("child", {"id": 2, "parent": 7}),
        ]

        def payload(value: dict[str, Any]) -> Any:
            texts = [(name, str(each)) for name, each in value.items()]
            return {"text": json.dumps(value), "map": texts, "struct": value}[form]

        sink = self.sink(dsn, schema, strategy=strategy)
        batches = [
            rows(*({"table": table, "payload": payload(value)} for table, value in some), schema=schema)
            for some in (values[:2], values[2:])
        ]
        committable = pre_commit(sink, *batches)
        assert self.family(db) == ([], [])
        assert list(sink.in_doubt("job")) == [committable.transaction]
        sink.validate_all(checkpoint(), [committable])
        assert sink.commit_all(checkpoint(), [committable]) == [COMMITTED]
        assert self.family(db) == ([(7, "b\n'\"\\ü")], [(1, "a", 7), (2, None, 7)])
        assert (db.pending(), list(sink.in_doubt("job"))) == (0, [])
        assert len(db.ledger()) == 1

    def test_a_table_has_another_name_in_the_database_and_fewer_columns(
        self, db: Database, dsn: str, strategy: str
    ) -> None:
        tables = {"inventory.parents": {"table": "parent"}, "kids": {"table": "child", "columns": ["id", "name"]}}
        schema = pa.schema([("topic", pa.string()), ("after", pa.string())])
        sink = self.sink(dsn, schema, tables=tables, table_column="topic", payload_column="after", strategy=strategy)
        some = [
            {"topic": "kids", "after": '{"id": 1, "name": "a", "parent": 3, "more": 1}'},
            {"topic": "inventory.parents", "after": '{"id": 3, "name": null}'},
        ]
        committable = pre_commit(sink, rows(*some, schema=schema))
        assert sink.commit_all(checkpoint(), [committable]) == [COMMITTED]
        assert self.family(db) == ([(3, None)], [(1, "a", None)])

    def test_many_partitions(self, db: Database, dsn: str, strategy: str) -> None:
        """Not each has rows of each table."""
        sink = self.sink(dsn, strategy=strategy)
        committables = [
            pre_commit(sink, rows(row("parent", id=n), *[row("child", id=n)] * (n % 2)), subtask=n) for n in range(5)
        ]
        sink.validate_all(checkpoint(), committables)
        assert sink.commit_all(checkpoint(), committables) == [COMMITTED] * 5
        assert (db.ids("parent"), db.ids("child")) == ([0, 1, 2, 3, 4], [1, 3])
        assert sink.committed_checkpoints("job") == {"0badcafe": 0}

    def test_at_least_once(self, db: Database, dsn: str, strategy: str) -> None:
        sink = self.sink(dsn, strategy=strategy)
        transaction = sink.begin_transaction(context(sink, schema=TEXT))
        sink.write(transaction, rows(row("child", id=1), row("parent", id=1)))
        sink.commit_directly(transaction)
        assert (db.ids("parent"), db.ids("child"), db.pending(), db.ledger()) == ([1], [1], 0, {})

    # ------------------------------------------------------------------ changes, and foreign keys
    def test_upserts_and_deletes_of_tables_that_refer_to_each_other(self, db: Database, dsn: str) -> None:
        self.refer(db)
        sink = self.sink(dsn, CHANGES, **UPSERT)

        def write(number: int, *some: dict[str, Any]) -> None:
            committable = pre_commit(sink, changes(*some), checkpoint=number)
            sink.validate_all(checkpoint(number), [committable])
            assert sink.commit_all(checkpoint(number), [committable]) == [COMMITTED]

        write(
            0,
            change(1, "child", id=1, parent=1),
            change(2, "child", id=2, parent=2),
            change(3, "parent", id=1, name="old"),
            change(4, "parent", id=2),
            change(5, "parent", id=1, name="new"),
        )
        assert self.family(db) == ([(1, "new"), (2, None)], [(1, None, 1), (2, None, 2)])
        # a parent goes whose children go, or move to a parent that comes
        write(
            1,
            change(6, "parent", id=1, gone=True),
            change(7, "child", id=1, gone=True),
            change(8, "parent", id=2, gone=True),
            change(9, "child", id=2, parent=3),
            change(10, "parent", id=3),
        )
        assert self.family(db) == ([(3, None)], [(2, None, 3)])
        assert db.pending() == 0

    def test_a_deleted_row_hands_on_its_unique_value(self, db: Database, dsn: str) -> None:
        self.refer(db)
        db.run("CREATE UNIQUE INDEX of_name ON parent (name)")
        sink = self.sink(dsn, CHANGES, **UPSERT)
        first = pre_commit(sink, changes(change(1, "parent", id=1, name="x"), change(2, "child", id=1, parent=1)))
        assert sink.commit_all(checkpoint(), [first]) == [COMMITTED]
        some = changes(
            change(3, "parent", id=2, name="x"),
            change(4, "parent", id=1, gone=True),
            change(5, "child", id=1, gone=True),
            change(6, "child", id=2, parent=2),
        )
        second = pre_commit(sink, some, checkpoint=1)
        sink.validate_all(checkpoint(1), [second])
        assert sink.commit_all(checkpoint(1), [second]) == [COMMITTED]
        assert self.family(db) == ([(2, "x")], [(2, None, 2)])

    def test_each_table_has_its_own_mode_and_keys(self, db: Database, dsn: str) -> None:
        db.run("CREATE TABLE log (id bigint, name varchar(20))")
        tables = {"parent": {}, "child": {"keep_newer": False}, "log": {"mode": "append"}}
        sink = self.sink(dsn, CHANGES, tables=tables, **UPSERT)
        some = [change(n, table, id=1, name=f"{n}") for n, table in enumerate(["parent", "child", "log"] * 2)]
        committable = pre_commit(sink, changes(*some))
        sink.validate_all(checkpoint(), [committable])
        assert sink.commit_all(checkpoint(), [committable]) == [COMMITTED]
        assert self.family(db) == ([(1, "3")], [(1, "4", None)])
        assert db.visible("log", "name") == [(1, "2"), (1, "5")]

    def test_a_child_without_parent_is_refused_before_the_decision(self, db: Database, dsn: str) -> None:
        self.refer(db)
        sink = self.sink(dsn)
        committable = pre_commit(sink, rows(row("child", id=1, parent=9), row("parent", id=1)))
        with pytest.raises(BadValue, match=r"child.*has_parent"):
            sink.validate_all(checkpoint(), [committable])
        sink.abort(committable.transaction)
        assert (self.family(db), db.pending()) == (([], []), 0)

    def test_tables_that_refer_to_each_other_are_staged_unless_told_otherwise(self, db: Database, dsn: str) -> None:
        alone = self.sink(dsn)
        committable = pre_commit(alone, rows(row("parent", id=1)))
        assert "table" not in committable.transaction
        alone.abort(committable.transaction)
        self.refer(db)
        assert "table" in pre_commit(self.sink(dsn), rows(row("parent", id=1))).transaction
        sink = self.sink(dsn, strategy=self.two_phase)
        both = pre_commit(sink, rows(row("child", id=2, parent=2), row("parent", id=2)))
        assert sink.commit_all(checkpoint(), [both]) == [COMMITTED]
        with pytest.raises(BadValue, match=r'has_parent needs may be in another partition: use strategy="staged"'):
            pre_commit(sink, rows(row("child", id=3, parent=3)), rows(row("parent", id=3)))

    # ------------------------------------------------------------------ rows that are refused
    BAD: ClassVar = {
        "stranger": (row("others", id=1), r"'others' is none of the tables parent, child"),
        "nameless": (row(None, id=1), r"None is none of the tables"),
        "no JSON": ({"table": "child", "payload": "{"}, r"'\{' is no JSON"),
        "no object": ({"table": "child", "payload": "[1]"}, r"is no JSON object"),
        "not a number": ({"table": "child", "payload": '{"id": NaN}'}, r"JSON has no NaN"),
        "nothing": ({"table": "child", "payload": None}, r"the payload is NULL"),
        "field": (row("parent", id=1, parent=1), r'value of "parent", for which the table has no column'),
        "kind": (row("parent", id="x"), r"'x' is no value of bigint"),
        "too long": (row("parent", id=1, name="x" * 21), r"name"),
        "no key": (row("parent", name="x"), r"id"),
    }

    @pytest.mark.parametrize("kind", BAD)
    def test_a_bad_row_is_refused(self, db: Database, dsn: str, strategy: str, kind: str) -> None:
        bad, why = self.BAD[kind]
        sink = self.sink(dsn, strategy=strategy)
        with pytest.raises(BadValue, match=why):
            pre_commit(sink, rows(row("child", id=1), bad))
        assert (self.family(db), db.pending()) == (([], []), 0)

    def test_bad_rows_become_dead_letters(self, tmp_path: Path, db: Database, dsn: str, strategy: str) -> None:
        good = [row("parent", id=1), row("child", id=1), row("child", id=2, name="b")]
        some = [pa.Table.from_batches([rows(*(bad for bad, _ in self.BAD.values()), *good)])]
        dead = self.sink(dsn, None, tables=None, table="dead", create_table=True)
        sink = self.sink(dsn, None, strategy=strategy, dead_letters=dead)
        with CheckpointCoordinator("job", [sink], f"file://{tmp_path / 'storage'}") as coordinator:
            LocalQuery(tmp_path / "query", [some]).run(coordinator)
        assert (db.ids("parent"), db.ids("child")) == ([1], [1, 2])
        letters = db.run("SELECT dead.row_number, dead.error FROM dead ORDER BY 1")
        assert [number for number, _ in letters] == list(range(len(self.BAD)))
        assert "others" in letters[0][1]
        assert db.pending() == 0

    def test_a_field_without_value_does_not_replace_a_default(self, db: Database, dsn: str) -> None:
        db.run("CREATE TABLE stamped (id bigint, kind varchar(9) DEFAULT 'plain')")
        sink = self.sink(dsn, tables={"stamped": {}})
        with pytest.raises(BadValue, match=r'has no "kind", and the column has a default: .* columns='):
            pre_commit(sink, rows(row("stamped", id=1)))
        sink = self.sink(dsn, tables={"stamped": {"columns": ["id"]}})
        committable = pre_commit(sink, rows(row("stamped", id=1)))
        assert sink.commit_all(checkpoint(), [committable]) == [COMMITTED]
        assert db.visible("stamped") == [(1, "plain")]

    # ------------------------------------------------------------------ what is wrong with the sink
    @pytest.mark.parametrize(
        ("options", "why"),
        [
            ({"tables": None}, r"give the sink table="),
            ({"table": "parent"}, r"give the sink table="),
            ({"tables": {}}, r"names no table"),
            ({"tables": {"": {}}}, r"without a name"),
            ({"tables": {"a": {"key": ["id"]}}}, r"tables\['a'\] takes the options columns"),
            ({"tables": {"a": {"mode": "upsert"}}}, r"tables\['a'\]: mode=\"upsert\" needs keys"),
            ({"create_table": True}, r"create_table and schema_evolution are for the sink of one table"),
            ({"schema_evolution": "add"}, r"create_table and schema_evolution are for the sink of one table"),
            ({"tables": None, "table": "parent", "payload_column": "x"}, r"payload_column belong to tables="),
        ],
    )
    def test_options_that_contradict_each_other(self, dsn: str, options: dict[str, Any], why: str) -> None:
        with pytest.raises(ConfigurationError, match=why):
            self.sink(dsn, None, **options)

    def test_columns_that_do_not_fit(self, db: Database, dsn: str) -> None:
        for schema, why in [
            (pa.schema([("table", pa.string())]), r"payload_column is 'payload', which the batch has not"),
            (pa.schema([("table", pa.int64()), ("payload", pa.string())]), r"must be a string"),
            (pa.schema([*TEXT, ("more", pa.int64())]), r"the columns more go nowhere"),
            (pa.schema([("table", pa.string()), ("payload", pa.int64())]), r"a payload is a struct, a map"),
            (
                pa.schema([("table", pa.string()), ("payload", pa.struct([("id", pa.string())]))]),
                r'column "id": string does not go into',
            ),
        ]:
            with pytest.raises(ConfigurationError, match=why):
                self.sink(dsn, schema)
        diff = self.sink(dsn, None).schema_diff(pa.schema([*TEXT, ("more", pa.int64())]))
        assert diff
        assert "the columns more go nowhere" in diff.unfit[0]
        with pytest.raises(ConfigurationError, match=r"there is no table .*others"):
            self.sink(dsn, tables={"parent": {}, "others": {}})
        with pytest.raises(ConfigurationError, match="needs a unique index"):
            self.sink(dsn, mode="upsert", keys=["name"])

    # ------------------------------------------------------------------ transactions that are in doubt
    def test_what_is_aborted_leaves_nothing(self, db: Database, dsn: str, strategy: str) -> None:
        committable = pre_commit(self.sink(dsn, strategy=strategy), rows(row("child", id=1), row("parent", id=1)))
        fewer = self.sink(dsn, strategy=strategy, tables={"parent": {}})
        assert list(fewer.in_doubt("job")) == [committable.transaction]
        fewer.abort(committable.transaction)
        assert (self.family(db), db.pending()) == (([], []), 0)
        [outcome] = self.sink(dsn).commit_all(checkpoint(), [committable])
        assert outcome.state is CommitState.LOST  # type: ignore[union-attr]

    def test_a_staging_table_that_is_gone(self, db: Database, dsn: str) -> None:
        sink = self.sink(dsn, strategy="staged")
        lost = pre_commit(sink, rows(row("child", id=1), row("parent", id=1)))
        other = pre_commit(sink, rows(row("child", id=2)), subtask=1)
        assert len(db.staging()) == 3
        gone = next(name for name in db.staging() if db.ids(name) == [1])
        db.run(f"DROP TABLE {gone}")
        first, second = sink.commit_all(checkpoint(), [lost, other])
        assert (first.state, second.state) == (CommitState.LOST, CommitState.HELD)  # type: ignore[union-attr]
        again = pre_commit(sink, rows(row("child", id=1), row("parent", id=1)), round=1)
        assert sink.commit_all(checkpoint(), [again, other]) == [COMMITTED] * 2
        assert (db.ids("parent"), db.ids("child")) == ([1], [1, 2])

    def test_rows_wait_for_the_table_that_they_were_written_for(self, db: Database, dsn: str) -> None:
        sink = self.sink(dsn, strategy="staged")
        committable = pre_commit(sink, rows(row("child", id=1)))
        [outcome] = self.sink(dsn, tables={"parent": {}}).commit_all(checkpoint(), [committable])
        assert "name the table 'child', which tables= does not have any more" in why_unknown(outcome)
        swapped = self.sink(dsn, tables={"child": {"table": "parent"}})
        [outcome] = swapped.commit_all(checkpoint(), [committable])
        assert "child (append), and the sink writes to" in why_unknown(outcome)
        assert sink.commit_all(checkpoint(), [committable]) == [COMMITTED]
        assert self.family(db) == ([], [(1, None, None)])

    @pytest.mark.parametrize("step", [Step.PRE_COMMITTED, Step.COMPLETE])
    def test_the_driver_is_killed(self, tmp_path: Path, db: Database, dsn: str, strategy: str, step: Step) -> None:
        input = [
            [pa.Table.from_batches([rows(row("child", id=9 * n + p), row("parent", id=9 * n + p))]) for p in range(3)]
            for n in range(3)
        ]
        sink = self.sink(dsn, None, strategy=strategy)
        storage = f"file://{tmp_path / 'storage'}"
        killed = Driver("job", sink, storage, tmp_path / "query", input, [KillAt(step, checkpoint_id=1)])
        assert killed.run() == KILLED
        with CheckpointCoordinator("job", [sink], storage) as coordinator:
            LocalQuery(tmp_path / "query", input).run(coordinator)
        there = [9 * n + p for n in range(3) for p in range(3)]
        assert (db.ids("parent"), db.ids("child"), db.pending()) == (there, there, 0)
