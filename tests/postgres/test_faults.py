"""PostgresSink under an operator, a backup, and a driver that is stopped in the middle: each was a bug once."""

from __future__ import annotations

import logging
import math
import os
import re
import signal
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from coordinator import CheckpointConfig, CheckpointCoordinator, CheckpointListener, Step
from coordinator.errors import InDoubtError
from coordinator.protocol import outages
from sinks import CommitOutcome
from sinks.errors import SinkError
from sinks.postgres import PostgresSink
from sinks.postgres.connection import fault
from sinks.sql import databases
from sinks.sql.server import explained
from sinks.sql.strategies import StagingTables
from sinks.testing import Driver, LocalQuery
from sinks.testing.conformance import example_input, ids
from sinks.testing.servers.postgres import PostgresServer
from sinks.testing.table import SCHEMA, checkpoint, context, eventually, pre_commit, rows_of, why_unknown
from tests.postgres.observer import Observer, held


@pytest.fixture(params=["prepared", "staged"])
def strategy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def sink(db: Observer, strategy: str) -> Iterator[PostgresSink]:
    sink = PostgresSink(db.dsn, "orders", strategy=strategy, lock_timeout=0.5)  # type: ignore[arg-type]
    sink.check(SCHEMA)
    yield sink
    sink.close()


def test_a_ledger_made_anew_under_a_running_driver_proves_nothing(db: Observer, sink: PostgresSink) -> None:
    """The id in the proof is compared with that of the table, not with the one that this driver read at `check`."""
    committable = pre_commit(sink, rows_of(1))
    other = PostgresSink(db.dsn, "orders", strategy=sink.strategy)
    assert other.commit_all(checkpoint(), [committable]) == [CommitOutcome.COMMITTED]  # our own answer got lost
    db.run("DROP TABLE tpc_ledger")
    other.check(SCHEMA)  # or our own sweep: abort() and in_doubt() make a missing ledger too
    other.close()
    [outcome] = sink.commit_all(checkpoint(), [committable])
    assert "not the one that was there at pre-commit" in why_unknown(outcome)


@pytest.mark.parametrize("strategy", ["staged"], indirect=True)
def test_a_name_that_another_driver_uses_is_told(sink: PostgresSink) -> None:
    """It has a copy of the checkpoint storage, or the name would never come twice."""
    same = context(sink)
    transaction = sink.begin_transaction(same)
    sink.write(transaction, rows_of(1))
    sink.pre_commit(transaction)
    with pytest.raises(SinkError, match=r"its staging table was there before.*a copy of checkpoint storage"):
        sink.begin_transaction(same)


def test_a_staging_table_that_is_gone_is_not_taken_for_the_target(db: Observer) -> None:
    staging = "tpc_0123456789abcdef0123"
    with (
        pytest.raises(SinkError, match=r"its staging table is gone.*a copy"),
        explained(fault, "public.orders", "checkpoint 0"),
    ):
        db.run(f"SELECT * FROM public.{staging}")


def test_a_reader_of_a_staging_table_does_not_hold_up_the_checkpoint(db: Observer) -> None:
    """pg_dump locks every table that is there when it starts, in ACCESS SHARE mode, until it ends."""
    sink = PostgresSink(db.dsn, "orders", strategy="staged", lock_timeout=0.5)
    sink.check(SCHEMA)
    committable = pre_commit(sink, rows_of(1))
    with held(db.dsn, f"LOCK TABLE {db.staging()[0]} IN ACCESS SHARE MODE"):
        outcome = sink.commit_all(checkpoint(), [committable])
        assert outcome == [CommitOutcome.COMMITTED]
        assert db.ids() == [1]
    assert list(sink.in_doubt("job")) == []
    assert db.staging() == []
    sink.close()


@pytest.mark.parametrize("strategy", ["prepared", "staged"])
def test_close_after_an_in_doubt_error_keeps_what_is_decided(db: Observer, tmp_path: Path, strategy: str) -> None:
    """The table is locked by a migration for longer than the commit timeout; the query stops; the program leaves its
    `with` block."""
    db.run("ALTER TABLE orders ADD amount double precision")

    class Failing(PostgresSink):
        def commit_all(self, checkpoint, committables):
            raise ConnectionError("cannot reach the server to commit")

    sink = Failing(db.dsn, "orders", strategy=strategy)  # type: ignore[arg-type]
    storage, config = f"file://{tmp_path / 'storage'}", CheckpointConfig(commit_timeout=0.5)
    with (
        pytest.raises(InDoubtError, match="Nothing is lost"),
        CheckpointCoordinator("job", [sink], storage, config) as coordinator,
    ):
        LocalQuery(tmp_path / "query", example_input(1)).run(coordinator)
    assert db.pending() == 3, "close() aborted what the record of checkpoint 0 names"


@pytest.mark.slow
def test_a_server_that_is_down_is_told_in_a_few_lines(
    tmp_path: Path,
    strategy: str,
    own_postgres: PostgresServer,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It crashes when a checkpoint is complete, and comes back after the third reminder."""
    monkeypatch.setattr(outages, "_FIRST_REMINDER", 0.5)
    with own_postgres.database() as dsn:

        class Crash(CheckpointListener):
            def on_step(self, step: Step, checkpoint_id: int, facts: Mapping[str, Any]) -> None:
                if (step, checkpoint_id) == (Step.COMPLETE, 1):
                    own_postgres.stop("immediate")
                if step is Step.ASKING_AGAIN and caplog.text.count("has failed to commit for") == 3:
                    own_postgres.start()

        sink = PostgresSink(dsn, "orders", strategy=strategy, create_table=True)  # type: ignore[arg-type]
        storage, config = f"file://{tmp_path / 'storage'}", CheckpointConfig(commit_timeout=300)
        input = example_input(3)
        with CheckpointCoordinator("job", [sink], storage, config, [Crash()]) as coordinator:
            LocalQuery(tmp_path / "query", input).run(coordinator)
        with own_postgres.connect(dsn) as connection:
            stored = [id for (id,) in connection.execute("SELECT id FROM orders").fetchall()]
        assert Counter(stored) == Counter(ids(input))
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    lines = [record.getMessage() for record in warnings]
    assert "sink 'orders' fails to commit, and is asked again" in lines[0]
    reminders, last = lines[1:-1], re.search(r"sink 'orders' answers again, after ([0-9.]+) s", lines[-1])
    assert last
    lasted = float(last[1]) + 0.1
    assert 3 <= len(reminders) <= 2 + math.log2(lasted), lines  # after 0.5, 1, 2, 4 s, if it is asked then
    assert all("sink 'orders' has failed to commit for" in line for line in reminders)
    assert not any("\n" in line for line in lines)
    assert [record for record in warnings if record.exc_info] == []


class StopsInTheMiddle(StagingTables):
    """SIGSTOP to the driver, inside its transaction that moves a checkpoint."""

    def move(self, *args: Any) -> None:
        super().move(*args)
        os.kill(os.getpid(), signal.SIGSTOP)


class SoonIdle(Driver):
    """The server ends its transactions after two seconds without a statement, not ten."""

    def run_here(self) -> None:
        databases._IDLE_LIMIT = 2
        super().run_here()


def test_a_driver_stopped_inside_its_move_does_not_hold_up_its_successor(db: Observer, tmp_path: Path) -> None:
    """Its session is idle in transaction, with the ledger rows and the staging tables locked, for as long as its host
    answers TCP keepalives."""
    db.run("ALTER TABLE orders ADD amount double precision")
    input = example_input(1)
    sink = PostgresSink(db.dsn, "orders", strategy="staged", lock_timeout=2)
    stopped = PostgresSink(db.dsn, "orders", strategy="staged", lock_timeout=2)
    stopped._staged = StopsInTheMiddle(stopped._backend)
    storage, config = f"file://{tmp_path / 'storage'}", CheckpointConfig(commit_timeout=120)
    zombie = SoonIdle("job", stopped, storage, tmp_path / "query", input, config=config).start()
    assert zombie.pid
    try:
        eventually(lambda: Path(f"/proc/{zombie.pid}/stat").read_text().split()[2] == "T")
        with CheckpointCoordinator("job", [sink], storage, config) as coordinator:
            LocalQuery(tmp_path / "query", input).run(coordinator)
        assert Counter(db.ids()) == Counter(ids(input))
    finally:
        os.kill(zombie.pid, signal.SIGCONT)
        zombie.join(120)
    assert Counter(db.ids()) == Counter(ids(input))
