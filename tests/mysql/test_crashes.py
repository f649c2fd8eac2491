"""The server dies, connections are cut, operators interfere: between any two steps of the protocol, rows stay exactly
once. The jobs run here without Spark; tests/spark has them with it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pymysql
import pytest

from coordinator import CheckpointConfig, CheckpointCoordinator, CheckpointListener, Step
from coordinator.errors import CheckpointFailed, InDoubtError
from sinks.errors import BadValue, ConfigurationError
from sinks.mysql import MySQLSink, xa
from sinks.mysql.server import parameters, query
from sinks.testing import KILLED, Driver, Hooked, LocalQuery
from sinks.testing.conformance import SCHEMA, example_input, ids, rows
from sinks.testing.driver import die
from sinks.testing.servers.mariadb import MariaDBServer
from tests.mysql.play import Observer

STRATEGIES = ["xa", "staged"]


@pytest.fixture(scope="module")
def server() -> Iterator[MariaDBServer]:
    """One that tests may kill, with a binary log as those have that are replicated."""
    with MariaDBServer({"log_bin": "binlog", "binlog_format": "ROW", "server_id": "1"}) as server:
        yield server


@pytest.fixture
def dsn(server: MariaDBServer) -> Iterator[str]:
    with server.database() as dsn:
        with closing(Observer(dsn)) as observer:
            observer.run("CREATE TABLE orders (id bigint NOT NULL, name text, amount double) ENGINE=InnoDB")
        yield dsn


class At(CheckpointListener):
    """Calls `hook` when checkpoint `checkpoint_id` comes to `step`, once."""

    def __init__(self, step: Step, hook: Callable[[], object], checkpoint_id: int = 1) -> None:
        self.step, self.hook, self.checkpoint_id, self.due = step, hook, checkpoint_id, True

    def on_step(self, step: Step, checkpoint_id: int, facts: Any) -> None:
        if self.due and (step, checkpoint_id) == (self.step, self.checkpoint_id):
            self.due = False
            self.hook()


def run(folder: Path, sink: Any, input: Any, *listeners: CheckpointListener, commit_timeout: float = 30) -> None:
    config = CheckpointConfig(commit_timeout=commit_timeout)
    with CheckpointCoordinator("job", [sink], f"file://{folder / 'storage'}", config, listeners) as coordinator:
        LocalQuery(folder / "query", input).run(coordinator)


def assert_exactly_once(dsn: str, input: Any) -> None:
    with closing(Observer(dsn)) as observer:
        assert Counter(observer.ids()) == Counter(ids(input))
        assert observer.prepared() == []
        assert observer.staging() == []


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("how", [pytest.param("restart", marks=pytest.mark.large), "kill"])
@pytest.mark.parametrize("step", [Step.PRE_COMMITTED, Step.COMPLETE])
def test_server_goes_down_between_pre_commit_and_commit(
    tmp_path: Path, server: MariaDBServer, dsn: str, strategy: Any, how: str, step: Step
) -> None:
    def down_and_up() -> None:
        if how == "kill":
            server.kill()
            server.start()
        else:
            server.restart()

    input = example_input()
    run(tmp_path, MySQLSink(dsn, "orders", strategy=strategy), input, At(step, down_and_up))
    assert_exactly_once(dsn, input)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_commit_keeps_asking_until_the_server_is_back(
    tmp_path: Path, server: MariaDBServer, dsn: str, strategy: Any
) -> None:
    back = threading.Timer(3, server.start)

    def down() -> None:
        server.kill()
        back.start()

    input = example_input()
    run(tmp_path, MySQLSink(dsn, "orders", strategy=strategy), input, At(Step.COMPLETE, down))
    back.join()
    assert_exactly_once(dsn, input)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_commit_gives_up_after_its_timeout_and_the_next_start_goes_on(
    tmp_path: Path, server: MariaDBServer, dsn: str, strategy: Any
) -> None:
    input = example_input()
    sink = MySQLSink(dsn, "orders", strategy=strategy)
    with pytest.raises(InDoubtError, match=r"could not be made visible within \d s") as error:
        run(tmp_path, sink, input, At(Step.COMPLETE, server.kill), commit_timeout=1)
    assert len(error.value.transactions) == 3
    server.start()
    run(tmp_path, sink, input)
    assert_exactly_once(dsn, input)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_server_killed_while_tasks_write(tmp_path: Path, server: MariaDBServer, dsn: str, strategy: Any) -> None:
    input = example_input()
    sink = MySQLSink(dsn, "orders", strategy=strategy)
    with pytest.raises(CheckpointFailed, match=r"checkpoint 0 .* nothing of it is visible"):
        run(tmp_path, Hooked(sink, "write", nth=2, hook=server.kill), input)
    server.start()
    run(tmp_path, sink, input)
    assert_exactly_once(dsn, input)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_connections_cut_during_commit(tmp_path: Path, server: MariaDBServer, dsn: str, strategy: Any) -> None:
    visible = threading.Event()
    sessions = "SELECT id FROM information_schema.processlist WHERE id <> CONNECTION_ID() AND user = 'tester'"

    def cut() -> None:
        with server.connect() as connection:
            for _ in range(500):
                for (session,) in query(connection, sessions):
                    with suppress(pymysql.OperationalError):  # it has gone by itself
                        query(connection, f"KILL {session}")
                if visible.is_set():
                    break

    cutting = threading.Thread(target=cut)
    input = example_input(batches=2)
    sink = MySQLSink(dsn, "orders", strategy=strategy)
    run(tmp_path, sink, input, At(Step.COMMITTING, cutting.start), At(Step.COMMITTED, lambda: stop(visible, cutting)))
    assert_exactly_once(dsn, input)


def stop(visible: threading.Event, cutting: threading.Thread) -> None:
    visible.set()
    cutting.join()


class DieAfter(CheckpointListener):
    """SIGKILL some milliseconds into the commit of checkpoint 1."""

    def __init__(self, delay: float) -> None:
        self.delay = delay

    def on_step(self, step: Step, checkpoint_id: int, facts: Any) -> None:
        if (step, checkpoint_id) == (Step.COMMITTING, 1):
            threading.Timer(self.delay, die).start()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_driver_killed_in_the_middle_of_the_commits(tmp_path: Path, dsn: str, strategy: Any) -> None:
    input = [[rows(10_000 * n + 100 * p, 5) for p in range(40)] for n in range(3)]
    sink = MySQLSink(dsn, "orders", strategy=strategy)
    killed = 0
    for delay in (0.002, 0.005, 0.01, 0.02):
        driver = Driver("job", sink, f"file://{tmp_path / 'storage'}", tmp_path / "query", input)
        driver.listeners = [DieAfter(delay)]
        killed += driver.run() == KILLED
    run(tmp_path, sink, input)
    assert killed
    assert_exactly_once(dsn, input)


def test_an_operator_rolls_back_a_decided_branch(tmp_path: Path, dsn: str) -> None:
    sink = MySQLSink(dsn, "orders", strategy="xa")

    def roll_back() -> None:
        first, *others = sink.in_doubt("job")
        assert len(others) == 2
        with closing(Observer(dsn)) as observer:
            observer.run(f"XA ROLLBACK {xa.xid(first, observer.schema)}")

    input = example_input()
    run(tmp_path, sink, input, At(Step.COMPLETE, roll_back))
    assert_exactly_once(dsn, input)


def test_an_operator_drops_a_decided_staging_table(tmp_path: Path, dsn: str) -> None:
    """The replacement and its held siblings become visible together."""

    def drop() -> None:
        with closing(Observer(dsn)) as observer:
            first, *others = observer.staging()
            assert len(others) == 2
            observer.run(f"DROP TABLE {first}")

    input = example_input()
    run(tmp_path, MySQLSink(dsn, "orders", strategy="staged"), input, At(Step.COMPLETE, drop))
    assert_exactly_once(dsn, input)


def test_strategies_may_change_between_restarts(tmp_path: Path, dsn: str) -> None:
    input = example_input()
    for strategy in ("xa", "staged"):
        sink = MySQLSink(dsn, "orders", strategy=strategy)
        Driver("job", sink, f"file://{tmp_path / 'storage'}", tmp_path / "query", input, [DieAfter(0)]).run()
    run(tmp_path, MySQLSink(dsn, "orders", strategy="auto"), input)
    assert_exactly_once(dsn, input)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_constraint_fails_the_checkpoint_and_leaves_nothing(tmp_path: Path, dsn: str, strategy: Any) -> None:
    with closing(Observer(dsn)) as observer:
        observer.run("ALTER TABLE orders ADD CONSTRAINT small CHECK (id < 1100)")
    input = example_input()
    with pytest.raises(BadValue, match=r"\.orders.*small"):
        run(tmp_path, MySQLSink(dsn, "orders", strategy=strategy), input)
    assert_exactly_once(dsn, input[:1])


def test_an_orphan_that_holds_the_key_of_its_own_retry_is_swept(tmp_path: Path, dsn: str) -> None:
    """An executor that dies between XA PREPARE and its ack leaves row locks (R8)."""
    with closing(Observer(dsn)) as observer:
        observer.run("ALTER TABLE orders ADD PRIMARY KEY (id)")
    input = example_input()
    sink = MySQLSink(dsn, "orders", strategy="xa", lock_timeout=1)

    def fail() -> None:
        raise RuntimeError("the executor is gone")

    with pytest.raises(CheckpointFailed):
        run(tmp_path, Hooked(sink, "pre_commit", after=True, hook=fail), input)
    run(tmp_path, sink, input)
    assert_exactly_once(dsn, input)


def test_a_wrong_password_is_said_at_once_and_not_shown(
    tmp_path: Path, server: MariaDBServer, dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    wrong = server.url(parameters(dsn)["database"], password="hunter2")
    with pytest.raises(ConfigurationError, match="Access denied") as error:
        run(tmp_path, MySQLSink(wrong, "orders", create_table=True), example_input())
    assert "hunter2" not in str(error.value)
    assert "hunter2" not in caplog.text
    assert not any("hunter2" in path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file())


@pytest.mark.parametrize(("name", "value", "usual", "reason"), [
    ("binlog_format", "STATEMENT", "ROW", "binlog_format=STATEMENT"),
    ("read_only", "ON", "OFF", "read-only"),
])  # fmt: skip
def test_servers_that_take_no_rows_of_ours_are_refused_before_the_first(
    server: MariaDBServer, dsn: str, name: str, value: str, usual: str, reason: str
) -> None:
    schema = parameters(dsn)["database"]
    with closing(Observer(dsn)) as admin:
        assert admin.run("SELECT @@log_bin") == [(1,)]
        admin.run(f"CREATE USER {schema} IDENTIFIED BY 'p'")
        admin.run(f"GRANT ALL ON {schema}.* TO {schema}")
        sink = MySQLSink(server.url(schema, schema, "p"), "orders")
        admin.run(f"SET GLOBAL {name} = {value}")
        try:
            with pytest.raises(ConfigurationError, match=reason):
                sink.check(SCHEMA)
        finally:
            admin.run(f"SET GLOBAL {name} = {usual}")
            sink.close()
        sink.check(SCHEMA)
        sink.close()
        admin.run(f"DROP USER {schema}")
