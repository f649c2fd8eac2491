"""Several tables of one database, each with a sink: a checkpoint of all of them becomes visible in one transaction."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from coordinator import CheckpointCoordinator, Step
from sinks.base import Sink
from sinks.errors import BadValue, ConfigurationError
from sinks.sql.sink import TableSink
from sinks.testing import KILLED, Driver, LocalQuery
from sinks.testing.driver import KillAt, die, in_process
from sinks.testing.lines import Stop, at, lines, watched
from sinks.testing.table import COMMITTED, Database, batch, checkpoint, pre_commit
from sinks.testing.table_crashes import At
from sinks.transaction import CommitState, Committable

CHANGES = pa.schema([("id", pa.int64()), ("parent", pa.int64()), ("at", pa.int64()), ("gone", pa.bool_())])
UPSERT = {"mode": "upsert", "keys": ["id"], "order_by": "at", "delete_marker": "gone"}
ORDERS = pytest.mark.parametrize("tables", [("parent", "child"), ("child", "parent")], ids=" then ".join)
MODES = pytest.mark.parametrize("options", [{}, {"mode": "upsert", "keys": ["id"]}], ids=["append", "upsert"])
ORPHANS = "SELECT count(*) FROM child LEFT JOIN parent ON parent.id = child.parent WHERE parent.id IS NULL"
COUNTS = f"SELECT (SELECT count(*) FROM parent), (SELECT count(*) FROM child), ({ORPHANS})"


def family(*ids: int) -> pa.Table:
    """Return rows for both tables: each row of `child` refers to the row of `parent` with its own id."""
    return pa.table({"id": pa.array(ids, pa.int64()), "parent": pa.array(ids, pa.int64())})


def changes(*rows: tuple[int, int | None, bool], at: int = 0) -> pa.RecordBatch:
    names = CHANGES.names
    return batch([dict(zip(names, (id, parent, at, gone), strict=True)) for id, parent, gone in rows], CHANGES)


def input_of(batches: int, partitions: int = 3) -> list[list[pa.Table]]:
    return [
        [family(*range(100 * (n * partitions + p), 100 * (n * partitions + p) + 20)) for p in range(partitions)]
        for n in range(batches)
    ]


def run(folder: Path, sinks: Sequence[Sink], input: Any, *listeners: Any) -> None:
    storage = f"file://{folder / 'storage'}"
    with CheckpointCoordinator("job", list(sinks), storage, None, listeners) as coordinator:
        LocalQuery(folder / "query", input).run(coordinator)


Shares = list[tuple[TableSink, list[Committable]]]


def commit_until(stop: Stop, number: int, shares: Shares) -> None:
    """Commit the shares, and die by SIGKILL at this line."""
    sink, _ = shares[0]
    with watched(sink, at(stop, die)):
        sink.commit_jointly(checkpoint(number), shares)


class OneTransaction:
    """Fixture `dsn`: of a fresh database."""

    make: Callable[..., TableSink]
    observe: Callable[[str], Database]

    @pytest.fixture
    def db(self, dsn: str) -> Iterator[Database]:
        with closing(type(self).observe(dsn)) as db:
            self.create(db)
            yield db

    def create(self, db: Database) -> None:
        db.run("CREATE TABLE parent (id bigint PRIMARY KEY, parent bigint)")
        db.run(
            "CREATE TABLE child (id bigint PRIMARY KEY, parent bigint NOT NULL,"
            " CONSTRAINT has_parent FOREIGN KEY (parent) REFERENCES parent (id))"
        )

    def sink(self, dsn: str, table: str, **options: Any) -> TableSink:
        return type(self).make(dsn, table, **{"strategy": "staged", **options})

    def staged(self, sinks: Sequence[TableSink], *rows: pa.RecordBatch, number: int = 0) -> Shares:
        """What the tasks of one checkpoint have staged, for each sink one partition."""
        shares = []
        for sink, own in zip(sinks, rows, strict=True):
            sink.check(own.schema)
            shares.append((sink, [pre_commit(sink, own, checkpoint=number)]))
        return shares

    def states(self, shares: Shares, number: int = 0) -> list[list[CommitState]]:
        """Commit the shares, and return the outcome of each partition."""
        answers = shares[0][0].commit_jointly(checkpoint(number), shares)
        for answer in (each for own in answers for each in own):
            if isinstance(answer, Exception):
                raise answer
        return [[each.state for each in own] for own in answers]  # type: ignore[union-attr]

    # ------------------------------------------------------------------ rows that refer to each other
    @ORDERS
    @MODES
    def test_rows_that_need_each_other_come_in_one_checkpoint(
        self, tmp_path: Path, dsn: str, db: Database, tables: Sequence[str], options: dict[str, Any]
    ) -> None:
        input = input_of(2)
        run(tmp_path, [self.sink(dsn, table, **options) for table in tables], input)
        expected = sorted(id for tasks in input for rows in tasks for id in rows["id"].to_pylist())
        assert (db.ids("parent"), db.ids("child"), db.pending()) == (expected, expected, 0)

    @ORDERS
    def test_changes_of_both_tables(self, dsn: str, db: Database, tables: Sequence[str]) -> None:
        """A row is deleted with those that refer to it, or when those refer to another row."""
        sinks = {table: self.sink(dsn, table, **UPSERT) for table in tables}
        checkpoints: list[dict[str, list[tuple[int, int | None, bool]]]] = [
            {"parent": [(1, 0, False), (2, 0, False)], "child": [(10, 1, False), (11, 1, False), (20, 2, False)]},
            # 10 moves to a new parent, 11 goes with its old one
            {"parent": [(1, 0, True), (3, 0, False)], "child": [(10, 3, False), (11, None, True)]},
            {"parent": [(2, 0, True), (3, 0, True)], "child": [(10, None, True), (20, None, True)]},
        ]
        left = []
        for number, rows in enumerate(checkpoints):
            given = [changes(*rows[table], at=number) for table in tables]
            shares = self.staged([sinks[table] for table in tables], *given, number=number)
            shares[0][0].validate_jointly(checkpoint(number), shares)
            assert self.states(shares, number) == [[CommitState.COMMITTED]] * 2
            left.append((db.ids("parent"), db.run("SELECT id, parent FROM child ORDER BY id")))
        assert left == [
            ([1, 2], [(10, 1), (11, 1), (20, 2)]),
            ([2, 3], [(10, 3), (20, 2)]),
            ([], []),
        ]
        for sink in sinks.values():
            sink.close()

    def test_a_deleted_row_hands_on_its_unique_value(self, dsn: str, db: Database) -> None:
        """So rows are deleted before others are put in, and after the rows that refer to them."""
        db.run("ALTER TABLE parent ADD CONSTRAINT once UNIQUE (parent)")
        sinks = [self.sink(dsn, table, **UPSERT) for table in ("child", "parent")]
        checkpoints: list[list[list[tuple[int, int | None, bool]]]] = [
            [[(10, 1, False)], [(1, 7, False)]],
            [[(10, None, True), (20, 2, False)], [(1, None, True), (2, 7, False)]],
        ]
        for number, rows in enumerate(checkpoints):
            shares = self.staged(sinks, *(changes(*own, at=number) for own in rows), number=number)
            shares[0][0].validate_jointly(checkpoint(number), shares)
            assert self.states(shares, number) == [[CommitState.COMMITTED]] * 2
        assert (db.visible("parent"), db.visible("child")) == ([(2, 7)], [(20, 2)])
        for sink in sinks:
            sink.close()

    def test_a_child_that_is_upserted_and_a_parent_that_is_appended(
        self, tmp_path: Path, dsn: str, db: Database
    ) -> None:
        """Beside a table that no foreign key concerns, and one that is written in another way."""
        db.run("CREATE TABLE aside (id bigint, parent bigint)")
        db.run("CREATE TABLE log (id bigint, parent bigint)")
        sinks = [
            self.sink(dsn, "child", mode="upsert", keys=["id"]),
            self.sink(dsn, "log", strategy="auto"),
            self.sink(dsn, "aside", ledger="own_ledger"),
            self.sink(dsn, "parent"),
        ]
        run(tmp_path, sinks, [[family(1, 2)], [family(3)]])
        for table in ("parent", "child", "aside", "log"):
            assert db.ids(table) == [1, 2, 3]
        assert db.pending() == 0

    def test_two_sinks_with_one_table(self, tmp_path: Path, dsn: str, db: Database) -> None:
        db.run("CREATE TABLE aside (id bigint, parent bigint)")
        run(tmp_path, [self.sink(dsn, "aside", name=name) for name in ("one", "two")], [[family(1)], [family(2)]])
        assert (db.ids("aside"), db.pending()) == ([1, 1, 2, 2], 0)

    # ------------------------------------------------------------------ what a reader sees
    @ORDERS
    def test_a_reader_never_sees_one_table_without_the_other(
        self, tmp_path: Path, dsn: str, db: Database, tables: Sequence[str]
    ) -> None:
        """Even if no foreign key says so."""
        db.run("DROP TABLE child")
        db.run("CREATE TABLE child (id bigint PRIMARY KEY, parent bigint NOT NULL)")
        seen = set[tuple[int, ...]]()
        done = threading.Event()

        def read() -> None:
            with closing(type(self).observe(dsn)) as reader:
                while True:
                    last = done.is_set()
                    seen.add(tuple(map(int, reader.run(COUNTS)[0])))
                    if last:
                        return

        reading = threading.Thread(target=read)
        reading.start()
        try:
            run(tmp_path, [self.sink(dsn, table) for table in tables], input_of(12))
        finally:
            done.set()
            reading.join()
        assert (12 * 60, 12 * 60, 0) in seen
        assert {(parents - children, orphans) for parents, children, orphans in seen} == {(0, 0)}, seen

    # ------------------------------------------------------------------ nothing, or all
    @ORDERS
    def test_a_row_that_the_database_refuses_leaves_nothing_of_any_table(
        self, tmp_path: Path, dsn: str, db: Database, tables: Sequence[str]
    ) -> None:
        """It is found before the decision, when all rows are moved on trial."""
        db.run("ALTER TABLE child ADD CONSTRAINT small CHECK (id < 1000 OR parent < 5)")
        sinks = [self.sink(dsn, table) for table in tables]
        run(tmp_path, sinks, [[family(1)]])
        broken = [[family(1)], [family(2), pa.table({"id": [1001], "parent": [1001]})]]
        for _ in range(2):
            with pytest.raises(BadValue, match=r"child.*small"):
                run(tmp_path, sinks, broken)
            assert (db.ids("parent"), db.ids("child"), db.pending()) == ([1], [1], 0)

    def test_a_row_whose_parent_is_nowhere(self, dsn: str, db: Database) -> None:
        sinks = [self.sink(dsn, table, **UPSERT) for table in ("child", "parent")]
        shares = self.staged(sinks, changes((10, 9, False)), changes((1, 0, False)))
        with pytest.raises(BadValue, match=r"child.*checkpoint 0 was refused.*has_parent"):
            sinks[0].validate_jointly(checkpoint(), shares)
        assert (db.ids("parent"), db.ids("child")) == ([], [])
        for sink in sinks:
            sink.close()

    def test_dead_letters_come_with_the_good_rows(self, tmp_path: Path, dsn: str, db: Database) -> None:
        """A child that the table refuses by itself is a dead letter of the same transaction."""
        dead = self.sink(dsn, "dead", create_table=True)
        sinks = [self.sink(dsn, "child", dead_letters=dead), self.sink(dsn, "parent")]
        run(tmp_path, sinks, [[family(1, 2), pa.table({"id": [3], "parent": pa.array([None], pa.int64())})]])
        assert (db.ids("parent"), db.ids("child")) == ([1, 2, 3], [1, 2])
        assert len(db.run("SELECT * FROM dead")) == 1
        assert db.pending() == 0

    def test_what_is_lost_of_one_table_holds_the_other(self, tmp_path: Path, dsn: str, db: Database) -> None:
        """Until it is written again; all becomes visible in one transaction then."""
        sinks = [self.sink(dsn, table) for table in ("parent", "child")]
        shares = self.staged(sinks, *(family(1).to_batches()[0] for _ in sinks))
        db.run(f"DROP TABLE {shares[0][1][0].transaction['table']}")
        assert self.states(shares) == [[CommitState.LOST], [CommitState.HELD]]
        assert (db.ids("parent"), db.ids("child")) == ([], [])
        again = pre_commit(sinks[0], family(1).to_batches()[0], round=1)
        assert self.states([(sinks[0], [again]), shares[1]]) == [[CommitState.COMMITTED]] * 2
        assert (db.ids("parent"), db.ids("child"), db.pending()) == ([1], [1], 0)
        for sink in sinks:
            sink.close()

    @pytest.mark.parametrize("table", ["parent", "child"])
    def test_an_operator_drops_a_decided_staging_table(
        self, tmp_path: Path, dsn: str, db: Database, table: str
    ) -> None:
        sinks = [self.sink(dsn, name) for name in ("child", "parent")]
        seen = []

        def drop() -> None:
            with closing(type(self).observe(dsn)) as other, closing(self.sink(dsn, table)) as asked:
                first, *_ = asked.in_doubt("job")
                other.run(f"DROP TABLE {first['table']}")

        def look() -> None:
            with closing(type(self).observe(dsn)) as other:
                seen.append((other.ids("parent"), other.ids("child")))

        input = input_of(2)
        run(tmp_path, sinks, input, At(Step.COMPLETE, drop), At(Step.REPLAYING, look))
        first = sorted(id for rows in input[0] for id in rows["id"].to_pylist())
        assert seen == [(first, first)]
        expected = sorted(id for tasks in input for rows in tasks for id in rows["id"].to_pylist())
        assert (db.ids("parent"), db.ids("child"), db.pending()) == (expected, expected, 0)

    def test_a_table_that_refuses_decided_rows_holds_the_other(self, dsn: str, db: Database) -> None:
        sinks = [self.sink(dsn, table) for table in ("parent", "child")]
        shares = self.staged(sinks, *(family(1).to_batches()[0] for _ in sinks))
        db.run("ALTER TABLE child ADD CONSTRAINT none CHECK (id < 0)")
        for _ in range(2):
            assert self.states(shares) == [[CommitState.HELD], [CommitState.UNKNOWN]]
        assert (db.ids("parent"), db.ids("child")) == ([], [])
        self.drop_check(db, "child", "none")
        assert self.states(shares) == [[CommitState.COMMITTED]] * 2
        assert (db.ids("parent"), db.ids("child"), db.pending()) == ([1], [1], 0)
        for sink in sinks:
            sink.close()

    def drop_check(self, db: Database, table: str, name: str) -> None:
        db.run(f"ALTER TABLE {table} DROP CONSTRAINT {name}")

    @ORDERS
    def test_what_an_earlier_version_has_half_committed(self, dsn: str, db: Database, tables: Sequence[str]) -> None:
        """It committed one sink after the other, and died in between."""
        sinks = {table: self.sink(dsn, table) for table in tables}
        shares = self.staged(list(sinks.values()), *(family(1).to_batches()[0] for _ in tables))
        by_table = dict(shares)
        parent = sinks["parent"]
        assert parent.commit_all(checkpoint(), by_table[parent]) == [COMMITTED]
        assert (db.ids("parent"), db.ids("child")) == ([1], [])
        for _ in range(2):
            assert self.states(shares) == [[CommitState.COMMITTED]] * 2
            assert (db.ids("parent"), db.ids("child"), db.pending()) == ([1], [1], 0)
        for sink in sinks.values():
            sink.close()

    def test_two_drivers_that_commit_at_once(self, dsn: str, db: Database) -> None:
        """In whatever order they have the sinks."""
        sinks = [self.sink(dsn, table) for table in ("parent", "child")]
        for number in range(10):
            rows = family(*range(10 * number, 10 * number + 10)).to_batches()[0]
            shares = self.staged(sinks, rows, rows, number=number)
            answers = list[Any]()

            def commit(shares: Shares, number: int = number, answers: list[Any] = answers) -> None:
                own = [(self.sink(dsn, sink.name), mine) for sink, mine in shares]
                try:
                    answers.extend(own[0][0].commit_jointly(checkpoint(number), own))
                finally:
                    for sink, _ in own:
                        sink.close()

            both = [threading.Thread(target=commit, args=[order]) for order in (shares, shares[::-1])]
            for thread in both:
                thread.start()
            for thread in both:
                thread.join()
            assert len(answers) == 4
            assert self.states(shares, number) == [[CommitState.COMMITTED]] * 2
            assert db.ids("parent") == db.ids("child") == [*range(10 * number + 10)]
        for sink in sinks:
            sink.close()

    @pytest.mark.parametrize("step", [Step.PRE_COMMITTED, Step.COMPLETE, Step.COMMITTED])
    def test_a_driver_killed_in_between(self, tmp_path: Path, dsn: str, db: Database, step: Step) -> None:
        input = input_of(3)
        storage = f"file://{tmp_path / 'storage'}"
        child, parent = (self.sink(dsn, table) for table in ("child", "parent"))
        driver = Driver("job", child, storage, tmp_path / "query", input, [KillAt(step, 1)], others=[parent])
        assert driver.run() == KILLED
        assert db.ids("parent") == db.ids("child")
        run(tmp_path, [child, parent], input)
        expected = sorted(id for tasks in input for rows in tasks for id in rows["id"].to_pylist())
        assert (db.ids("parent"), db.ids("child"), db.pending()) == (expected, expected, 0)

    def test_a_driver_killed_at_any_line_of_its_commit(self, tmp_path: Path, dsn: str, db: Database) -> None:
        """All is visible then, or nothing, and the next driver makes the same of it."""
        sinks = [self.sink(dsn, table) for table in ("child", "parent")]

        def stage(number: int) -> Shares:
            rows = family(2 * number, 2 * number + 1).to_batches()[0]
            return self.staged(sinks, rows, rows, number=number)

        shares = stage(0)
        for sink in sinks:
            sink.close()  # a driver that starts has no connection yet
        stops = lines(sinks[0], lambda: sinks[0].commit_jointly(checkpoint(), shares), 12)
        seen = set[int]()
        for number, stop in enumerate(stops, 1):
            shares = stage(number)
            ended, _ = in_process(partial(commit_until, stop, number, shares), tmp_path, type(sinks[0]))
            assert ended == KILLED, stop
            parents, children = db.run("SELECT (SELECT count(*) FROM parent), (SELECT count(*) FROM child)")[0]
            assert parents == children, stop
            seen.add(parents - 2 * number)
            assert self.states(shares, number) == [[CommitState.COMMITTED]] * 2, stop
            assert db.ids("parent") == db.ids("child") == [*range(2 * number + 2)], stop
        assert seen == {0, 2}
        for sink in sinks:
            sink.close()

    # ------------------------------------------------------------------ sinks that cannot
    @pytest.mark.parametrize("strategies", [("staged", "auto"), ("auto", "staged"), ("auto", "auto")])
    def test_the_refusal_says_which_option_helps(
        self, tmp_path: Path, dsn: str, db: Database, strategies: tuple[str, str]
    ) -> None:
        tables = ("parent", "child")
        sinks = [self.sink(dsn, table, strategy=s) for table, s in zip(tables, strategies, strict=True)]
        told = r'has_parent .*commits by itself.* Give both sinks strategy="staged"'
        with pytest.raises(ConfigurationError, match=told):
            run(tmp_path, sinks, [[family(1)]])

    def test_a_sink_with_another_dsn(self, tmp_path: Path, dsn: str, db: Database) -> None:
        """It may be another user's, so it commits by itself."""
        sinks = [self.sink(dsn, "parent"), self.sink(dsn, "child", connect_options={"connect_timeout": 9})]
        with pytest.raises(ConfigurationError, match="the same DSN and the same connect_options"):
            run(tmp_path, sinks, [[family(1)]])
        db.run("DROP TABLE child")
        db.run("CREATE TABLE child (id bigint PRIMARY KEY, parent bigint NOT NULL)")
        run(tmp_path, sinks, [[family(1)]])
        assert (db.ids("parent"), db.ids("child")) == ([1], [1])
