"""Servers of tables die, connections are cut, operators interfere: between any two steps of the
protocol, rows stay exactly once, whichever database it is. The jobs run here without Spark;
tests/spark has them with it."""

from __future__ import annotations

import shutil
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol

import pytest

from coordinator import CheckpointConfig, CheckpointCoordinator, CheckpointListener, Step
from coordinator.errors import CheckpointFailed, InDoubtError, StorageBehind
from sinks.errors import BadValue, ConfigurationError
from sinks.sql.sink import AnyTableSink
from sinks.testing import KILLED, Driver, Hooked, LocalQuery
from sinks.testing.conformance import example_input, ids
from sinks.testing.driver import COMMIT_TIMEOUT, KillAt, die
from sinks.testing.kit import rows
from sinks.testing.table import Database


class Killable(Protocol):
    def kill(self) -> object: ...
    def start(self) -> object: ...
    def restart(self) -> object: ...


class At(CheckpointListener):
    """Calls `hook` when checkpoint `checkpoint_id` comes to `step`, once."""

    def __init__(self, step: Step, hook: Callable[[], object], checkpoint_id: int = 1) -> None:
        self.step = step
        self.hook = hook
        self.checkpoint_id = checkpoint_id
        self.due = True

    def on_step(self, step: Step, checkpoint_id: int, facts: Any) -> None:
        if self.due and (step, checkpoint_id) == (self.step, self.checkpoint_id):
            self.due = False
            self.hook()


class AskedAgain(CheckpointListener):
    """Calls `hook` when the commit of checkpoint 1 has failed so many times."""

    def __init__(self, times: int, hook: Callable[[], object]) -> None:
        self.times = times
        self.hook = hook

    def on_step(self, step: Step, checkpoint_id: int, facts: Any) -> None:
        if (step, checkpoint_id) == (Step.ASKING_AGAIN, 1):
            self.times -= 1
            if self.times == 0:
                self.hook()


class DieAfter(CheckpointListener):
    """SIGKILL some milliseconds into the commit of checkpoint 1."""

    def __init__(self, delay: float) -> None:
        self.delay = delay

    def on_step(self, step: Step, checkpoint_id: int, facts: Any) -> None:
        if (step, checkpoint_id) == (Step.COMMITTING, 1):
            threading.Timer(self.delay, die).start()


def run(
    folder: Path,
    sink: Any,
    input: Any,
    *listeners: CheckpointListener,
    commit_timeout: float = COMMIT_TIMEOUT,
) -> None:
    config = CheckpointConfig(commit_timeout=commit_timeout)
    with CheckpointCoordinator(
        "job", [sink], f"file://{folder / 'storage'}", config, listeners
    ) as coordinator:
        LocalQuery(folder / "query", input).run(coordinator)


def assert_exactly_once(db: Database, input: Any) -> None:
    """Each row of the input is there once, and no transaction is in doubt. Closes `db`."""
    with closing(db):
        assert Counter(db.ids()) == Counter(ids(input))
        assert list(db.prepared()) == []
        assert db.staging() == []


def set_back_to_before_a_replay(
    folder: Path, sink: AnyTableSink, db: Database, *, whole: bool
) -> None:
    """One transaction of checkpoint 1 is lost and written again as round 1, and its record goes:
    alone, or with all of storage that is newer than the loss."""
    input = example_input()
    storage = folder / "storage"

    def killed_at(step: Step) -> None:
        assert (
            Driver(
                "job", sink, f"file://{storage}", folder / "query", input, [KillAt(step, 1, 1)]
            ).run()
            == KILLED
        )

    killed_at(Step.COMPLETE)
    with closing(sink):
        sink.abort(next(iter(sink.in_doubt("job"))))
    shutil.copytree(storage, folder / "old")
    killed_at(Step.DONE)
    shutil.copytree(storage, folder / "newer")
    if whole:
        shutil.rmtree(storage)
        shutil.copytree(folder / "old", storage)
    else:
        [record] = storage.rglob("*.000001")
        record.unlink()
    for _ in range(2):
        with pytest.raises(
            StorageBehind,
            match=r"checkpoint 1 has lost .* no record names .* restore newer storage",
        ):
            run(folder, sink, input)
        assert Counter(db.ids()) == Counter(ids(input[:2]))
    shutil.rmtree(storage)
    shutil.copytree(folder / "newer", storage)
    run(folder, sink, input)
    assert Counter(db.ids()) == Counter(ids(input))


class TableCrashes:
    """Fixtures: `server`, one that tests may kill, `dsn` of a database of it with a table `orders`,
    and `strategy`, one of the sink's after the other."""

    make: Callable[..., AnyTableSink]
    """The sink for a DSN and a table, with its options."""
    observe: Callable[[str], Database]
    strategies: tuple[str, str]

    def cut_connections(self, server: Any) -> None:
        """All but one's own, once."""
        raise NotImplementedError

    @pytest.mark.parametrize("how", ["restart", "kill"])
    @pytest.mark.parametrize("step", [Step.PRE_COMMITTED, Step.COMPLETE])
    def test_server_goes_down_between_pre_commit_and_commit(
        self, tmp_path: Path, server: Killable, dsn: str, strategy: str, how: str, step: Step
    ) -> None:
        def down_and_up() -> None:
            if how == "kill":
                server.kill()
                server.start()
            else:
                server.restart()

        input = example_input()
        run(tmp_path, self.make(dsn, "orders", strategy=strategy), input, At(step, down_and_up))
        assert_exactly_once(self.observe(dsn), input)

    def test_commit_keeps_asking_until_the_server_is_back(
        self, tmp_path: Path, server: Killable, dsn: str, strategy: str
    ) -> None:
        input = example_input()
        down = At(Step.COMPLETE, server.kill)
        up = AskedAgain(3, server.start)
        run(tmp_path, self.make(dsn, "orders", strategy=strategy), input, down, up)
        assert up.times == 0
        assert_exactly_once(self.observe(dsn), input)

    def test_commit_gives_up_after_its_timeout_and_the_next_start_goes_on(
        self, tmp_path: Path, server: Killable, dsn: str, strategy: str
    ) -> None:
        input = example_input()
        sink = self.make(dsn, "orders", strategy=strategy)
        with pytest.raises(
            InDoubtError, match=r"\d s later it is still not known to be visible"
        ) as error:
            run(tmp_path, sink, input, At(Step.COMPLETE, server.kill), commit_timeout=1)
        assert len(error.value.transactions) == 3
        server.start()
        run(tmp_path, sink, input)
        assert_exactly_once(self.observe(dsn), input)

    def test_server_killed_while_tasks_write(
        self, tmp_path: Path, server: Killable, dsn: str, strategy: str
    ) -> None:
        input = example_input()
        sink = self.make(dsn, "orders", strategy=strategy)
        with pytest.raises(CheckpointFailed, match=r"checkpoint 0 .* nothing of it is visible"):
            run(tmp_path, Hooked(sink, "write", nth=2, hook=server.kill), input)
        server.start()
        run(tmp_path, sink, input)
        assert_exactly_once(self.observe(dsn), input)

    def test_connections_cut_during_commit(
        self, tmp_path: Path, server: Killable, dsn: str, strategy: str
    ) -> None:
        visible = threading.Event()

        def cut() -> None:
            for _ in range(200):
                self.cut_connections(server)
                if visible.is_set():
                    break

        def stop() -> None:
            visible.set()
            cutting.join()

        cutting = threading.Thread(target=cut)
        input = example_input(batches=2)
        sink = self.make(dsn, "orders", strategy=strategy)
        run(tmp_path, sink, input, At(Step.COMMITTING, cutting.start), At(Step.COMMITTED, stop))
        assert_exactly_once(self.observe(dsn), input)

    def test_driver_killed_in_the_middle_of_the_commits(
        self, tmp_path: Path, dsn: str, strategy: str
    ) -> None:
        input = [[rows(10_000 * n + 100 * p, 5) for p in range(40)] for n in range(3)]
        sink = self.make(dsn, "orders", strategy=strategy)
        at_the_latest = KillAt(Step.COMMITTED, checkpoint_id=1)
        ended = []
        for delay in (0.002, 0.005, 0.01, 0.02):
            driver = Driver(
                "job", sink, f"file://{tmp_path / 'storage'}", tmp_path / "query", input
            )
            driver.listeners = [DieAfter(delay), at_the_latest]
            ended.append(driver.run())
        assert ended[0] == KILLED
        assert {*ended} <= {0, KILLED}
        run(tmp_path, sink, input)
        assert_exactly_once(self.observe(dsn), input)

    def test_an_operator_drops_a_staging_table_before_the_decision(
        self, tmp_path: Path, dsn: str
    ) -> None:
        """The checkpoint is written again, also with the other rows of a query that is not
        deterministic."""
        input = example_input()

        def drop() -> None:
            with closing(self.observe(dsn)) as db:
                db.run(f"DROP TABLE {db.staging()[0]}")
            input[1][:] = example_input(4)[3]  # type: ignore[index]

        run(
            tmp_path,
            self.make(dsn, "orders", strategy="staged"),
            input,
            At(Step.PRE_COMMITTED, drop),
        )
        assert_exactly_once(self.observe(dsn), input)

    def test_an_operator_drops_a_decided_staging_table(self, tmp_path: Path, dsn: str) -> None:
        """The replacement and its held siblings become visible together."""

        def drop() -> None:
            with closing(self.observe(dsn)) as db:
                first, *others = db.staging()
                assert len(others) == 2
                db.run(f"DROP TABLE {first}")

        input = example_input()
        run(tmp_path, self.make(dsn, "orders", strategy="staged"), input, At(Step.COMPLETE, drop))
        assert_exactly_once(self.observe(dsn), input)

    @pytest.mark.parametrize(
        "whole", [False, True], ids=["its record is gone", "the folder is older"]
    )
    def test_storage_set_back_to_before_a_replay(
        self, tmp_path: Path, dsn: str, strategy: str, whole: bool
    ) -> None:
        with closing(self.observe(dsn)) as db:
            set_back_to_before_a_replay(
                tmp_path, self.make(dsn, "orders", strategy=strategy), db, whole=whole
            )

    def test_a_ledger_restored_by_itself_after_a_kill_writes_nothing_again(
        self, tmp_path: Path, dsn: str, strategy: str
    ) -> None:
        """Its dump is from before the checkpoint that Spark asks for again."""
        input = example_input()
        sink = self.make(dsn, "orders", strategy=strategy)
        driver = Driver("job", sink, f"file://{tmp_path / 'storage'}", tmp_path / "query", input)
        driver.listeners = [KillAt(Step.COMMITTED, checkpoint_id=1)]
        assert driver.run() == KILLED
        columns = "transaction_id, committed, job, lineage, sink, checkpoint"
        with closing(self.observe(dsn)) as db:
            db.run("DELETE FROM tpc_ledger WHERE checkpoint = 1")
            visible = Counter(db.ids())
            with pytest.raises(ConfigurationError, match="the ledger alone was restored"):
                run(tmp_path, sink, input)
            assert Counter(db.ids()) == visible == Counter(ids(input[:2]))
            there = "transaction_id IN (SELECT transaction_id FROM tpc_ledger)"
            db.run(
                f"INSERT INTO tpc_ledger ({columns}) SELECT {columns} FROM tpc_ledger_witness"
                f" WHERE NOT {there}"
            )
        run(tmp_path, sink, input)
        assert_exactly_once(self.observe(dsn), input)

    def test_strategies_may_change_between_restarts(self, tmp_path: Path, dsn: str) -> None:
        input = example_input()
        for strategy in self.strategies:
            sink = self.make(dsn, "orders", strategy=strategy)
            Driver(
                "job",
                sink,
                f"file://{tmp_path / 'storage'}",
                tmp_path / "query",
                input,
                [DieAfter(0)],
            ).run()
        run(tmp_path, self.make(dsn, "orders", strategy="auto"), input)
        assert_exactly_once(self.observe(dsn), input)

    def test_a_constraint_fails_the_checkpoint_and_leaves_nothing(
        self, tmp_path: Path, dsn: str, strategy: str
    ) -> None:
        with closing(self.observe(dsn)) as db:
            db.run("ALTER TABLE orders ADD CONSTRAINT small CHECK (id < 1100)")
        input = example_input()
        with pytest.raises(BadValue, match=r"\.orders.*small"):
            run(tmp_path, self.make(dsn, "orders", strategy=strategy), input)
        assert_exactly_once(self.observe(dsn), input[:1])
