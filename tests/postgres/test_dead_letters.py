"""What is this server's own; the rest is in `DeadLettersOfTables`."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest

from coordinator import CheckpointConfig, CheckpointCoordinator, CheckpointListener, Step
from coordinator.balance import Verdict, take_balance
from coordinator.config import CheckpointingMode, Replay
from coordinator.dead_letters import DeadLetters, Replayed
from coordinator.errors import DeadLetterError, Superseded
from coordinator.protocol.dead_letters import with_dead_letters
from coordinator.protocol.records import CheckpointStore
from coordinator.storage import open_storage
from coordinator.storage.memory import MemoryStorage
from coordinator.storage.objects import FileStorage
from sinks.errors import TooManyDeadLetters, TransactionBlocked
from sinks.kafka import KafkaSink
from sinks.postgres import PostgresSink
from sinks.spark_types import schema_of_json
from sinks.testing import KILLED, Driver, Hooked, LocalQuery
from sinks.testing.driver import KillAt, in_process
from sinks.testing.table_crashes import At, run
from tests.dead_letters import INPUT, DeadLettersOfTables, assert_each_once, batch, ids, letters_of
from tests.postgres.play import Observer


@pytest.fixture
def dsn(pg_database: str) -> str:
    return pg_database


class BlockedOnce(Hooked):
    """A task that finds the flag takes it away, and waits for a lock in vain."""

    def __init__(self, inner: PostgresSink, flag: Path) -> None:
        super().__init__(inner, "none")
        self.flag = flag

    def pre_commit(self, transaction: Any) -> Any:
        if self.flag.exists():
            self.flag.unlink()
            raise TransactionBlocked("somebody else holds the lock")
        return super().pre_commit(transaction)


class TestPostgres(DeadLettersOfTables):
    make = PostgresSink
    observe = Observer
    strategies = ("prepared", "staged")
    staging_has_checks = True

    def test_a_letter(self, tmp_path: Path, dsn: str, db: Observer) -> None:
        run(tmp_path, self.sink(dsn), INPUT[:2])
        first = db.run("SELECT * FROM dead WHERE checkpoint = 1 AND partition = 1 ORDER BY row_number")
        row = f'{{"id":4002,"name":"{"x" * 50}","amount":1.0}}'
        *about, time = first[0]
        lineage = about.pop(1)
        assert about[:6] == ["job", "good", 1, 1, 2, "BadValue"]
        assert about[6].startswith('column "name": ')
        assert about[7] == row
        assert schema_of_json(json.loads(about[8])) == INPUT[0][0].schema
        assert (about[9:], len(lineage)) == ([None, None], 8)
        assert time.tzinfo is not None
        assert first[1][6:8] == (
            "CheckViolation",
            'new row for relation "good" violates check constraint "good_amount_check"; '
            "Failing row contains (4030, user-4030, -1).",
        )

    def driver(self, folder: Path, sink: Any, *listeners: CheckpointListener) -> Driver:
        return Driver("job", sink, f"file://{folder / 'storage'}", folder / "query", INPUT, listeners)

    @pytest.mark.parametrize("step", [Step.PRE_COMMITTED, Step.COMPLETE, Step.COMMITTED])
    def test_the_driver_is_killed(self, tmp_path: Path, dsn: str, db: Observer, step: Step) -> None:
        assert self.driver(tmp_path, self.sink(dsn), KillAt(step, checkpoint_id=1)).run() == KILLED
        assert self.driver(tmp_path, self.sink(dsn)).run() == 0
        assert_each_once(db, INPUT)

    def test_a_task_is_killed_between_the_two_pre_commits(self, tmp_path: Path, dsn: str, db: Observer) -> None:
        sink = self.sink(dsn)
        assert sink.dead_letters is not None
        sink.dead_letters = Hooked(sink.dead_letters, "pre_commit", nth=3)
        assert self.driver(tmp_path, sink).run() == KILLED
        assert self.driver(tmp_path, self.sink(dsn)).run() == 0
        assert_each_once(db, INPUT)

    @pytest.mark.parametrize("lost", ["good", "dead", ""])
    def test_what_is_rolled_back_after_the_decision_is_separated_as_before(
        self, tmp_path: Path, dsn: str, db: Observer, lost: str
    ) -> None:
        """Also where the table would now refuse other rows: with the good ones in it, all of them."""
        rolled_back: list[str] = []

        def roll_back() -> None:
            with psycopg.connect(dsn, autocommit=True) as connection:
                rows = connection.execute(
                    "SELECT gid FROM pg_prepared_xacts WHERE database = current_database() AND gid LIKE %s",
                    [f"%.{lost}%"],
                )
                for (gid,) in rows.fetchall():
                    connection.execute(f"ROLLBACK PREPARED '{gid}'")
                    rolled_back.append(gid)

        run(tmp_path, self.sink(dsn), INPUT, At(Step.COMPLETE, roll_back))
        assert len(rolled_back) == (2 if lost else 4)
        assert_each_once(db, INPUT)

    def test_lost_letters_that_are_blocked_are_written_again_after_a_sweep(
        self, tmp_path: Path, dsn: str, db: Observer
    ) -> None:
        """R8, though the rows that were taken are not lost, and their tasks write none."""

        def roll_back() -> None:
            for gid in db.prepared():
                if ".dead-" in gid:
                    db.run(f"ROLLBACK PREPARED '{gid}'")
            flag.touch()

        flag = tmp_path / "blocked"
        sink = self.sink(dsn, dead_letters=BlockedOnce(PostgresSink(dsn, "dead", create_table=True), flag))
        run(tmp_path, sink, INPUT, At(Step.COMPLETE, roll_back))
        assert not flag.exists()
        assert_each_once(db, INPUT)

    def test_lost_letters_are_written_again_from_kept_rows(self, tmp_path: Path, dsn: str, db: Observer) -> None:
        """Of a query that gives other rows by then."""
        input = [list(tables) for tables in INPUT]

        def roll_back() -> None:
            input[1][:] = input[2]
            for gid in db.prepared():
                if ".dead-" in gid:
                    db.run(f"ROLLBACK PREPARED '{gid}'")

        storage, config = f"file://{tmp_path / 'storage'}", CheckpointConfig(replay=Replay.SPOOL)
        listeners = [At(Step.COMPLETE, roll_back)]
        with CheckpointCoordinator("job", [self.sink(dsn)], storage, config, listeners) as coordinator:
            LocalQuery(tmp_path / "query", input).run(coordinator)
        assert_each_once(db, INPUT)

    @pytest.mark.parametrize(
        ("most", "told"), [(8, "more than 8 of the rows of partition"), (12, "17 of the 260 rows of checkpoint 0")]
    )
    def test_too_many_fail_the_checkpoint(self, tmp_path: Path, dsn: str, db: Observer, most: int, told: str) -> None:
        with pytest.raises(TooManyDeadLetters, match=told) as error:
            run(tmp_path, self.sink(dsn, max_dead_letters=most), INPUT)
        assert 'BadValue: column "name"' in str(error.value)
        assert (db.ids("good"), db.run("SELECT * FROM dead"), db.pending()) == ([], [], 0)

    def test_deferred_constraints(self, tmp_path: Path, dsn: str, db: Observer) -> None:
        """A key or a reference to another table judges each row; one to the table itself, which a later row may
        satisfy, is judged at the end."""
        db.run("ALTER TABLE good DROP CONSTRAINT good_pkey, ADD PRIMARY KEY (id) DEFERRABLE INITIALLY DEFERRED")
        db.run("CREATE TABLE known (name text PRIMARY KEY)")
        db.run("INSERT INTO known SELECT 'user-' || id FROM generate_series(0, 100) AS id")
        db.run("ALTER TABLE good ADD CONSTRAINT who FOREIGN KEY (name) REFERENCES known DEFERRABLE INITIALLY DEFERRED")
        [table, _] = INPUT[0]
        run(tmp_path, self.sink(dsn), [[pa.concat_tables([table, table])]])
        good = [id for id in ids([[table]], bad=False) if id <= 100]
        assert db.ids("good") == good
        refused = dict(db.run("SELECT error_class, count(*) FROM dead GROUP BY 1"))
        assert refused["UniqueViolation"] == len(good)
        assert refused["ForeignKeyViolation"] == 2 * (len(ids([[table]], bad=False)) - len(good))
        db.run("ALTER TABLE good ADD CONSTRAINT names UNIQUE (name), DROP CONSTRAINT who")
        db.run(
            "ALTER TABLE good ADD CONSTRAINT own FOREIGN KEY (name) REFERENCES good (name)"
            " DEFERRABLE INITIALLY DEFERRED"
        )
        run(tmp_path, self.sink(dsn), [[table], [table.slice(110, 5)]])
        assert db.ids("good") == [*good, *(id for id in ids([[table.slice(110, 5)]], bad=False))]


_UNREACHED = (
    "RECOVERED",
    "GUARANTEED",
    "ASKING_AGAIN",
    "FAILED",
    "REPLAYING",
    "REPLAY_PRE_COMMITTED",
    "REPLAY_COMPLETE",
)


def hooked(sink: PostgresSink, method: str, *, dead: bool) -> Any:
    """Dies before that call of it, or of the sink of its dead letters."""
    if not dead:
        return Hooked(sink, method)
    assert sink.dead_letters is not None
    sink.dead_letters = Hooked(sink.dead_letters, method)
    return sink


KILLS: dict[str, tuple[Callable[[PostgresSink], Any], Sequence[CheckpointListener]]] = {
    **{step.name: (lambda sink: sink, [KillAt(step)]) for step in Step if step.name not in (*_UNREACHED, "HALTED")},
    **{
        f"{method} of {'letters' if dead else 'rows'}": (partial(hooked, method=method, dead=dead), [])
        for method in ("begin_transaction", "pre_commit", "commit_all")
        for dead in (False, True)
    },
}


class TestReplay:
    """Letters are put through again: whatever happens meanwhile, each row is there once."""

    @pytest.fixture
    def db(self, dsn: str) -> Iterator[Observer]:
        with closing(Observer(dsn)) as db:
            db.run("CREATE TABLE good (id bigint PRIMARY KEY, name varchar(20), amount float CHECK (amount > 0))")
            yield db

    def sink(self, dsn: str) -> PostgresSink:
        return PostgresSink(dsn, "good", dead_letters=PostgresSink(dsn, "dead", create_table=True))

    @pytest.fixture(autouse=True)
    def opened(self) -> Iterator[None]:
        self.stack = ExitStack()
        with self.stack:
            yield

    def letters(self, sink: Any, folder: Path, *listeners: CheckpointListener) -> DeadLetters:
        return self.stack.enter_context(letters_of(sink, folder, *listeners))

    def left(self, replay: DeadLetters) -> list[int]:
        return sorted(json.loads(one.row)["id"] for one in replay.find() or [] if not one.replayed)

    @pytest.mark.large
    @pytest.mark.parametrize("kills", [[*KILLS]], ids=["all"])
    def test_killed_at_each_step(self, tmp_path: Path, dsn: str, db: Observer, kills: Sequence[str]) -> None:
        """Half of the letters are refused again, each time."""
        input = [batch(number) for number in range(len(kills) // 2)]  # of two partitions
        run(tmp_path, self.sink(dsn), input)
        db.run("ALTER TABLE good ALTER name TYPE varchar(60)")
        replay = self.letters(self.sink(dsn), tmp_path)
        groups = sorted({str(one.id).rpartition(".")[0] for one in replay.find() or []})
        letters = {group: [json.loads(one.row) for one in replay.find([group]) or []] for group in groups}
        for number, (name, group) in enumerate(zip(kills, groups, strict=True)):
            wrapped, listeners = KILLS[name]
            killed = self.letters(wrapped(self.sink(dsn)), tmp_path, *listeners)
            code, said = in_process(partial(killed.replay, [group]), tmp_path, PostgresSink)
            assert code == KILLED, (name, said)
            if number % 2:
                replay.finish()
                assert db.prepared() == [], name
            replay.replay([group])
            written = [row["id"] for row in letters[group] if row["amount"] > 0]
            refused = [row["id"] for row in letters[group] if row["amount"] < 0]
            assert db.run("SELECT id FROM good WHERE id = ANY(%s) ORDER BY 1", [written]) == [
                (id,) for id in sorted(written)
            ], name
            assert [id for id in self.left(replay) if id in refused] == sorted(refused), name
            assert db.prepared() == [], name
        db.run("ALTER TABLE good DROP CONSTRAINT good_amount_check")
        replay.replay()
        assert db.ids("good") == sorted(ids(input, bad=False) + ids(input, bad=True))
        assert self.left(replay) == []

    @pytest.mark.parametrize(
        ("step", "first"),
        [
            pytest.param(Step.TRIGGERED, True, marks=pytest.mark.large),
            (Step.VALIDATED, False),
            (Step.COMPLETE, True),
            pytest.param(Step.COMMITTED, False, marks=pytest.mark.large),
        ],
    )
    def test_two_operators_at_the_same_time(
        self, tmp_path: Path, dsn: str, db: Observer, step: Step, first: bool
    ) -> None:
        run(tmp_path, self.sink(dsn), INPUT[:1])
        db.run("ALTER TABLE good ALTER name TYPE varchar(60), DROP CONSTRAINT good_amount_check")
        other = self.letters(self.sink(dsn), tmp_path)
        letters = [str(one.id) for one in other.find() or []]
        if not first:
            assert other.replay(letters[:1]).written == 1
        replay = self.letters(self.sink(dsn), tmp_path, At(step, other.replay, 0 if first else 1))
        try:
            replay.replay()
        except Superseded:
            assert step is not Step.COMMITTED
        assert other.replay() == Replayed(before=len(letters))
        assert db.ids("good") == sorted(ids(INPUT[:1], bad=False) + ids(INPUT[:1], bad=True))
        assert db.pending() == 0

    def test_another_decides_between_the_last_look_and_the_record(self, tmp_path: Path, dsn: str, db: Observer) -> None:
        """What it has decided is made visible, and its letters are left out."""
        run(tmp_path, self.sink(dsn), INPUT[:1])
        db.run("ALTER TABLE good ALTER name TYPE varchar(60), DROP CONSTRAINT good_amount_check")
        letters = [str(one.id) for one in self.letters(self.sink(dsn), tmp_path).find() or []]
        config = CheckpointConfig(replay=Replay.SPOOL, spool_dir=f"file://{tmp_path / 'storage'}")
        looked, go_on = threading.Event(), threading.Event()

        class Storage(FileStorage):
            at_record: Callable[[], object] = staticmethod(lambda: None)

            def put_if_absent(self, key: str, data: bytes) -> bool:
                if "/checkpoint/" in key:
                    self.at_record()
                return super().put_if_absent(key, data)

        def operator(at_record: Callable[[], object]) -> DeadLetters:
            storage = Storage(tmp_path / "storage")
            storage.at_record = at_record
            return self.stack.enter_context(DeadLetters("job", self.sink(dsn), storage, config))

        def overtaken() -> None:
            looked.set()
            assert go_on.wait(120)

        def late() -> None:
            go_on.set()
            assert isinstance(first.exception(120), Superseded)

        with ThreadPoolExecutor() as pool:
            first = pool.submit(operator(overtaken).replay, letters[:3])
            assert looked.wait(120)
            second = operator(late).replay(letters[2:])
        assert second == Replayed(written=len(letters) - 3, before=1)
        assert db.ids("good") == sorted(ids(INPUT[:1], bad=False) + ids(INPUT[:1], bad=True))
        assert db.pending() == 0

    def test_beside_a_checkpoint_of_the_query(self, tmp_path: Path, dsn: str, db: Observer) -> None:
        """Neither stops the other, and each has its own books."""
        sink, found = self.sink(dsn), list[Replayed]()
        replay = self.letters(self.sink(dsn), tmp_path)
        run(tmp_path, sink, INPUT, At(Step.COMPLETE, lambda: found.append(replay.replay()), checkpoint_id=2))
        assert [one.written + one.refused for one in found] == [len(ids(INPUT[:2], bad=True))]
        assert self.left(replay) == ids(INPUT, bad=True)
        store = CheckpointStore(open_storage(f"file://{tmp_path / 'storage'}"), "job")
        assert take_balance(store, with_dead_letters([sink])).verdict is Verdict.BALANCED
        db.run("ALTER TABLE good ALTER name TYPE varchar(60), DROP CONSTRAINT good_amount_check")
        replay.replay()
        assert db.ids("good") == sorted(ids(INPUT, bad=False) + ids(INPUT, bad=True))

    def test_what_is_rolled_back_after_the_decision(self, tmp_path: Path, dsn: str, db: Observer) -> None:
        """Is written again from the rows that were kept, though the letters are gone."""
        run(tmp_path, self.sink(dsn), INPUT)
        db.run("ALTER TABLE good ALTER name TYPE varchar(60)")

        def roll_back() -> None:
            for gid in db.prepared():
                db.run(f"ROLLBACK PREPARED '{gid}'")
            db.run("DELETE FROM dead")

        replayed = self.letters(self.sink(dsn), tmp_path, At(Step.COMPLETE, roll_back, 0)).replay()
        assert replayed.written
        assert replayed.refused
        rows = [json.loads(row) for (row,) in db.run("SELECT row FROM dead")]
        assert all(row["amount"] < 0 for row in rows)
        assert sorted(db.ids("good") + [row["id"] for row in rows]) == sorted(
            ids(INPUT, bad=False) + ids(INPUT, bad=True)
        )

    def test_what_cannot_be_put_through_changes_nothing(self, tmp_path: Path, dsn: str, db: Observer) -> None:
        run(tmp_path, self.sink(dsn), INPUT[:1])
        replay = self.letters(self.sink(dsn), tmp_path)
        name = str((replay.find() or [])[0].id)
        row = {"id": 1, "name": "a", "amount": 1.0}
        for mended, told in (
            ({name: {**row, "id": "one"}}, "column 'id': 'one' is no int"),
            ({name: {"id": 1}}, "'name' is missing"),
            ({name: {**row, "other": 1}}, "'other' is not among id, name, amount"),
            ({f"{name}0000": row}, "there is no letter"),
            ({"../letter": row}, "is no letter: write LINEAGE"),
        ):
            with pytest.raises(DeadLetterError, match=told):
                replay.replay(mended=mended)
        assert self.left(replay) == ids(INPUT[:1], bad=True)
        db.run("INSERT INTO dead SELECT * FROM dead")
        assert len(replay.find() or []) == len(ids(INPUT[:1], bad=True))
        db.run("UPDATE dead SET row = '{}' WHERE ctid = (SELECT max(ctid) FROM dead)")
        with pytest.raises(DeadLetterError, match="two different letters"):
            replay.replay()

    def test_a_number_that_was_read_as_a_float_is_refused(self, tmp_path: Path, dsn: str, db: Observer) -> None:
        run(tmp_path, self.sink(dsn), INPUT[:1])
        replay = self.letters(self.sink(dsn), tmp_path)
        row = '{"id": 1, "name": "a", "amount": 0.1234567890123456789}'
        db.run(f"ALTER TABLE dead ALTER row TYPE jsonb USING '{row}'::jsonb")
        with pytest.raises(DeadLetterError, match=r"0\.12345678901234568 may have had more digits"):
            replay.replay()
        assert replay.unfinished() == 0
        db.run("ALTER TABLE dead ALTER row TYPE text")
        assert json.loads((replay.find() or [])[0].row)["id"] == 1

    def test_what_is_refused_by_name(self, tmp_path: Path, dsn: str) -> None:
        at_least_once = CheckpointConfig(mode=CheckpointingMode.AT_LEAST_ONCE)
        storage = f"file://{tmp_path / 'storage'}"
        topic = KafkaSink("localhost:1", name="dead")
        for sink, where, config, told in (
            (self.sink(dsn), storage, at_least_once, "a row may have two letters"),
            (self.sink(dsn), MemoryStorage("here"), CheckpointConfig(), "by the URI of a storage"),
            (PostgresSink(dsn, "good", dead_letters=topic), storage, CheckpointConfig(), "cannot tell its letters"),
        ):
            letters = DeadLetters("job", sink, where, config)
            with letters, pytest.raises(DeadLetterError, match=told):
                letters.replay()
        with pytest.raises(ValueError, match="'good' has no dead letters"):
            DeadLetters("job", PostgresSink(dsn, "good"), storage, CheckpointConfig())
