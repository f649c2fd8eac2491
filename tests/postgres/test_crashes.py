"""The server dies, connections are cut, operators interfere: between any two steps of the protocol, rows stay exactly
once. The jobs run here without Spark; tests/spark has them with it."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from coordinator import CheckpointConfig, CheckpointCoordinator, CheckpointListener, Step
from coordinator.errors import CheckpointFailed, InDoubtError
from sinks.errors import BadValue, ConfigurationError
from sinks.postgres import PostgresSink
from sinks.testing import KILLED, Driver, Hooked, LocalQuery
from sinks.testing.conformance import example_input, ids, rows
from sinks.testing.driver import KillAt, die
from sinks.testing.servers.postgres import PostgresServer, PostgresService
from tests.table import SCHEMA, context, rows_of

STRATEGIES = ["prepared", "staged"]


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """One that tests may kill."""
    with PostgresServer({"max_prepared_transactions": "64"}) as server:
        yield server


@pytest.fixture
def dsn(server: PostgresServer) -> Iterator[str]:
    with server.database() as dsn:
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute("CREATE TABLE orders (id bigint NOT NULL, name text, amount double precision)")
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
    with psycopg.connect(dsn, autocommit=True) as connection:
        seen = Counter(id for (id,) in connection.execute("SELECT id FROM orders"))
        assert seen == Counter(ids(input))
        prepared = "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"
        assert connection.execute(prepared).fetchall() == []
        staging = "SELECT relname FROM pg_class WHERE relkind = 'r' AND relname ~ '^tpc_[0-9a-f]{20}$'"
        assert connection.execute(staging).fetchall() == []


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("how", [pytest.param("restart", marks=pytest.mark.large), "kill"])
@pytest.mark.parametrize("step", [Step.PRE_COMMITTED, Step.COMPLETE])
def test_server_goes_down_between_pre_commit_and_commit(
    tmp_path: Path, server: PostgresServer, dsn: str, strategy: Any, how: str, step: Step
) -> None:
    def down_and_up() -> None:
        if how == "kill":
            server.kill()
            server.start()
        else:
            server.restart()

    input = example_input()
    run(tmp_path, PostgresSink(dsn, "orders", strategy=strategy), input, At(step, down_and_up))
    assert_exactly_once(dsn, input)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_commit_keeps_asking_until_the_server_is_back(
    tmp_path: Path, server: PostgresServer, dsn: str, strategy: Any
) -> None:
    back = threading.Timer(3, server.start)

    def down() -> None:
        server.kill()
        back.start()

    input = example_input()
    run(tmp_path, PostgresSink(dsn, "orders", strategy=strategy), input, At(Step.COMPLETE, down))
    back.join()
    assert_exactly_once(dsn, input)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_commit_gives_up_after_its_timeout_and_the_next_start_goes_on(
    tmp_path: Path, server: PostgresServer, dsn: str, strategy: Any
) -> None:
    input = example_input()
    sink = PostgresSink(dsn, "orders", strategy=strategy)
    with pytest.raises(InDoubtError, match=r"could not be made visible within \d s") as error:
        run(tmp_path, sink, input, At(Step.COMPLETE, server.kill), commit_timeout=1)
    assert len(error.value.transactions) == 3
    server.start()
    run(tmp_path, sink, input)
    assert_exactly_once(dsn, input)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_server_killed_while_tasks_write(tmp_path: Path, server: PostgresServer, dsn: str, strategy: Any) -> None:
    input = example_input()
    sink = PostgresSink(dsn, "orders", strategy=strategy)
    with pytest.raises(CheckpointFailed, match=r"checkpoint 0 .* nothing of it is visible"):
        run(tmp_path, Hooked(sink, "write", nth=2, hook=server.kill), input)
    server.start()
    run(tmp_path, sink, input)
    assert_exactly_once(dsn, input)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_connections_cut_during_commit(tmp_path: Path, server: PostgresServer, dsn: str, strategy: Any) -> None:
    visible = threading.Event()

    def cut() -> None:
        with server.connect() as connection:
            for _ in range(200):
                connection.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                    " WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'"
                )
                if visible.is_set():
                    break

    cutting = threading.Thread(target=cut)
    input = example_input(batches=2)
    sink = PostgresSink(dsn, "orders", strategy=strategy)
    run(tmp_path, sink, input, At(Step.COMMITTING, cutting.start), At(Step.COMMITTED, lambda: stop(visible, cutting)))
    assert_exactly_once(dsn, input)


def stop(visible: threading.Event, cutting: threading.Thread) -> None:
    visible.set()
    cutting.join()


def die_soon(delay: float) -> None:
    threading.Timer(delay, die).start()


class DieAfter(CheckpointListener):
    """SIGKILL some milliseconds into the commit of checkpoint 1."""

    def __init__(self, delay: float) -> None:
        self.delay = delay

    def on_step(self, step: Step, checkpoint_id: int, facts: Any) -> None:
        if (step, checkpoint_id) == (Step.COMMITTING, 1):
            die_soon(self.delay)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_driver_killed_in_the_middle_of_the_commits(tmp_path: Path, dsn: str, strategy: Any) -> None:
    input = [[rows(10_000 * n + 100 * p, 5) for p in range(40)] for n in range(3)]
    sink = PostgresSink(dsn, "orders", strategy=strategy)
    killed = 0
    for delay in (0.002, 0.005, 0.01, 0.02):
        driver = Driver("job", sink, f"file://{tmp_path / 'storage'}", tmp_path / "query", input)
        driver.listeners = [DieAfter(delay)]
        killed += driver.run() == KILLED
    run(tmp_path, sink, input)
    assert killed
    assert_exactly_once(dsn, input)


def test_an_operator_rolls_back_a_decided_prepared_transaction(tmp_path: Path, dsn: str) -> None:
    def roll_back() -> None:
        with psycopg.connect(dsn, autocommit=True) as connection:
            found = connection.execute(
                "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"
            ).fetchall()
            assert len(found) == 3
            connection.execute(f"ROLLBACK PREPARED '{found[0][0]}'")

    input = example_input()
    run(tmp_path, PostgresSink(dsn, "orders", strategy="prepared"), input, At(Step.COMPLETE, roll_back))
    assert_exactly_once(dsn, input)


def test_an_operator_drops_a_decided_staging_table(tmp_path: Path, dsn: str) -> None:
    """The replacement and its held siblings become visible together."""

    def drop() -> None:
        with psycopg.connect(dsn, autocommit=True) as connection:
            staging = "SELECT relname FROM pg_class WHERE relkind = 'r' AND relname ~ '^tpc_[0-9a-f]{20}$'"
            found = connection.execute(staging).fetchall()
            assert len(found) == 3
            connection.execute(f"DROP TABLE {found[0][0]}")

    input = example_input()
    run(tmp_path, PostgresSink(dsn, "orders", strategy="staged"), input, At(Step.COMPLETE, drop))
    assert_exactly_once(dsn, input)


def test_strategies_may_change_between_restarts(tmp_path: Path, dsn: str) -> None:
    input = example_input()
    for strategy in ("prepared", "staged"):
        driver = Driver("job", PostgresSink(dsn, "orders", strategy=strategy), f"file://{tmp_path / 'storage'}",
                        tmp_path / "query", input, [DieAfter(0)])  # fmt: skip
        driver.run()
    run(tmp_path, PostgresSink(dsn, "orders", strategy="auto"), input)
    assert_exactly_once(dsn, input)


def test_a_table_changed_after_the_decision_is_mended_and_every_row_is_there_once(tmp_path: Path, dsn: str) -> None:
    def alter(change: str) -> None:
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(f"ALTER TABLE orders {change}".encode())

    input = example_input()
    sink = PostgresSink(dsn, "orders", strategy="staged")
    killed = KillAt(Step.COMPLETE, checkpoint_id=1)
    driver = Driver("job", sink, f"file://{tmp_path / 'storage'}", tmp_path / "query", input, [killed])
    assert driver.run() == KILLED
    alter("RENAME amount TO price")
    for _ in range(2):
        with pytest.raises(InDoubtError, match=r'"amount" is gone.*safe in the staging table') as error:
            run(tmp_path, sink, input)
        assert "whether these took effect" not in str(error.value)
    alter("RENAME price TO amount")
    run(tmp_path, sink, input)
    assert_exactly_once(dsn, input)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_server_that_freezes_holds_nobody_up(tmp_path: Path, server: PostgresServer, dsn: str, strategy: Any) -> None:
    """Five seconds of silence, then the two that a connection may take: asked once, and given up."""
    input = example_input()
    sink = PostgresSink(dsn, "orders", strategy=strategy, connect_options={"connect_timeout": "2"})
    started: list[float] = []

    def freeze() -> None:
        server.pause()
        started.append(time.monotonic())

    try:
        with pytest.raises(InDoubtError, match="could not be made visible"):
            run(tmp_path, sink, input, At(Step.COMMITTING, freeze), commit_timeout=1)
        assert time.monotonic() - started[0] < 20
    finally:
        server.resume()
    run(tmp_path, sink, input)
    assert_exactly_once(dsn, input)


def test_a_server_that_freezes_under_a_copy(server: PostgresServer, dsn: str) -> None:
    sink = PostgresSink(dsn, "orders", strategy="prepared", connect_options={"connect_timeout": "2"})
    sink.check(SCHEMA)
    transaction = sink.begin_transaction(context(sink))
    sink.write(transaction, rows_of(1))
    server.pause()
    try:
        started = time.monotonic()
        with pytest.raises(psycopg.OperationalError, match="takes connections and does not answer"):
            sink.pre_commit(transaction)
        transaction.close()
        assert time.monotonic() - started < 20
    finally:
        server.resume()
    sink.close()


def test_prepared_transactions_run_out_in_the_middle(tmp_path: Path) -> None:
    with PostgresServer({"max_prepared_transactions": "2"}) as small, small.database() as dsn:
        input = example_input()
        with pytest.raises(ConfigurationError, match="max_prepared_transactions"):
            run(tmp_path, PostgresSink(dsn, "orders", create_table=True), input)
        assert_exactly_once(dsn, [])
        run(tmp_path, PostgresSink(dsn, "orders", strategy="staged"), input)
        assert_exactly_once(dsn, input)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_constraint_fails_the_checkpoint_and_leaves_nothing(tmp_path: Path, dsn: str, strategy: Any) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("ALTER TABLE orders ADD CONSTRAINT small CHECK (id < 1100)")
    input = example_input()
    with pytest.raises(BadValue, match=r"public\.orders.*(small|1200)"):
        run(tmp_path, PostgresSink(dsn, "orders", strategy=strategy), input)
    assert_exactly_once(dsn, input[:1])


def test_a_wrong_address_is_said_at_once_and_without_the_password(
    tmp_path: Path, postgres: PostgresService, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    with postgres.database() as dsn:
        wrong = psycopg.conninfo.make_conninfo(dsn, password="hunter2")
        if postgres.unmanaged:
            pytest.skip(postgres.unmanaged)
        with pytest.raises(ConfigurationError, match="password") as error:
            run(tmp_path, PostgresSink(wrong, "orders", create_table=True), example_input())
    assert "hunter2" not in str(error.value)
    assert "hunter2" not in caplog.text
    assert not any("hunter2" in path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file())
