"""MySQLSink under an operator, a backup, and a driver that is stopped in the middle."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from coordinator import CheckpointConfig, CheckpointCoordinator
from sinks import CommitOutcome
from sinks.errors import CommittedError, SinkError, TransactionBlocked
from sinks.mysql import MySQLSink, load, xa
from sinks.mysql import server as mysql_server
from sinks.mysql.connection import Connection, parameters
from sinks.mysql.staging import MySQLStaging
from sinks.sql.strategies import StagingTables
from sinks.testing import Driver, LocalQuery
from sinks.testing.conformance import example_input, ids
from sinks.testing.table import SCHEMA, checkpoint, context, eventually, pre_commit, rows_of, why_unknown
from sinks.transaction import CommitState
from tests.mysql.observer import ON_MARIADB, Observer, held
from tests.table_kit import transaction_name

COMMITTED = CommitOutcome.COMMITTED
COLUMNS = "transaction_id, committed, job, lineage, sink, checkpoint"


@pytest.fixture(params=["xa", "staged"])
def strategy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def sink(db: Observer, strategy: str) -> Iterator[MySQLSink]:
    sink = MySQLSink(db.dsn, "orders", strategy=strategy, lock_timeout=300)  # type: ignore[arg-type]
    sink.check(SCHEMA)
    yield sink
    sink.close()


@pytest.fixture
def staged(db: Observer) -> Iterator[MySQLSink]:
    sink = MySQLSink(db.dsn, "orders", strategy="staged", lock_timeout=300)
    sink.check(SCHEMA)
    yield sink
    sink.close()


def name(committable: Any) -> str:
    identity = committable.transaction
    return xa.name_of(identity) if "gtrid" in identity else str(identity["transaction_id"])


def insert(committable: Any, committed: bool) -> str:
    """What somebody else writes into the ledger."""
    return f"INSERT INTO tpc_ledger ({COLUMNS}) VALUES ('{name(committable)}', {committed}, 'j', 'l', 's', 0)"


def waits(db: Observer) -> bool:
    """Whether a session waits for a row of the ledger; without a wait, the INSERT takes no time to be seen."""
    running = "SELECT 1 FROM information_schema.processlist WHERE db = DATABASE() AND info LIKE 'INSERT IGNORE%'"
    return bool(db.run(running))


# ---------------------------------------------------------------------- the ledger
def test_a_ledger_made_anew_under_a_running_driver_proves_nothing(db: Observer, sink: MySQLSink) -> None:
    committable = pre_commit(sink, rows_of(1))
    other = MySQLSink(db.dsn, "orders", strategy=sink.strategy)
    assert other.commit_all(checkpoint(), [committable]) == [COMMITTED]  # our own answer got lost
    db.run("DROP TABLE tpc_ledger")
    other.check(SCHEMA)
    other.close()
    [outcome] = sink.commit_all(checkpoint(), [committable])
    assert "not the one that was there at pre-commit" in why_unknown(outcome)


def test_a_ledger_that_was_restored_from_a_dump_still_proves_a_commit(db: Observer, sink: MySQLSink) -> None:
    committable = pre_commit(sink, rows_of(1))
    assert sink.commit_all(checkpoint(), [committable]) == [COMMITTED]
    db.run("CREATE TABLE restored LIKE tpc_ledger")
    db.run("INSERT INTO restored SELECT * FROM tpc_ledger")
    db.run("DROP TABLE tpc_ledger")
    db.run("ALTER TABLE restored RENAME TO tpc_ledger")
    again = MySQLSink(db.dsn, "orders", strategy=sink.strategy)
    assert again.commit_all(checkpoint(), [committable]) == [COMMITTED]
    again.close()


def test_prune_leaves_the_rows_of_others_and_of_a_hundred_checkpoints(db: Observer, staged: MySQLSink) -> None:
    mine = pre_commit(staged, rows_of(1), checkpoint=265)
    assert staged.commit_all(checkpoint(1), [mine]) == [COMMITTED]
    (job, lineage, sink_name), *_ = db.run("SELECT job, lineage, sink FROM tpc_ledger WHERE job <> '-'")
    db.run("DELETE FROM tpc_ledger WHERE transaction_id <> 'ledger'")
    for key in (
        *((job, lineage, sink_name, n) for n in range(50, 200)),  # 200 - 100 = 100 is the oldest that is kept
        ("other", lineage, sink_name, 1),
        (job, "other", sink_name, 2),
        (job, lineage, "other", 3),
    ):
        db.run(f"INSERT INTO tpc_ledger ({COLUMNS}) VALUES (%s, true, %s, %s, %s, %s)", [transaction_name(*key), *key])
    last = pre_commit(staged, rows_of(2), checkpoint=265)
    assert staged.commit_all(checkpoint(265), [last]) == [COMMITTED]
    prepared = f"INSERT INTO tpc_ledger ({COLUMNS}) VALUES ('x', true, 'other', 'l', 's', 1)"
    db.run("ANALYZE TABLE tpc_ledger")  # MariaDB would read all of it for many keys
    with held(db.dsn, prepared):  # another job's rows are not waited for
        staged.purge(checkpoint(265, oldest=200))
    retained = db.run("SELECT checkpoint FROM tpc_ledger WHERE job <> '-' ORDER BY 1")
    assert [n for (n,) in retained] == [1, 2, 3, *range(100, 200), 265]


def test_nothing_is_moved_beside_a_sibling_whose_outcome_is_unknown(db: Observer, staged: MySQLSink) -> None:
    first, second = pre_commit(staged, rows_of(1)), pre_commit(staged, rows_of(2), subtask=1)
    db.run(f"DROP TABLE {first.transaction['table']}")
    db.run("DROP TABLE tpc_ledger")
    again = MySQLSink(db.dsn, "orders", strategy="staged")
    states = [o.state for o in again.commit_all(checkpoint(), [first, second]) if isinstance(o, CommitOutcome)]
    assert states == [CommitState.UNKNOWN, CommitState.HELD]
    assert db.ids() == []
    again.close()


# ---------------------------------------------------------------------- somebody else at the same moment
def meanwhile(db: Observer, act: Any, *statements: str) -> list[Any]:
    """What `act` answers that begins while another session has run these statements, and goes on when that commits."""
    answer: list[Any] = []

    def acting() -> None:
        try:
            answer.append(act())
        except Exception as error:
            answer.append(error)

    with held(db.dsn, *statements) as other:
        thread = threading.Thread(target=acting)
        thread.start()
        eventually(lambda: waits(db))
        assert len(db.staging()) <= 1
        other.commit()
        thread.join(120)
    return answer


@pytest.mark.parametrize("committed", [False, True])
def test_a_participant_settled_by_somebody_else_meanwhile_is_not_moved(
    db: Observer, staged: MySQLSink, committed: bool
) -> None:
    committable = pre_commit(staged, rows_of(1))
    [[answer]] = meanwhile(db, lambda: staged.commit_all(checkpoint(), [committable]), insert(committable, committed))
    assert isinstance(answer, Exception), "ask again"
    assert db.ids() == []
    [outcome] = staged.commit_all(checkpoint(), [committable])
    assert isinstance(outcome, CommitOutcome)
    assert outcome.state is (CommitState.COMMITTED if committed else CommitState.LOST)


def test_a_missing_staging_table_that_is_just_being_moved_is_not_lost(db: Observer, staged: MySQLSink) -> None:
    committable = pre_commit(staged, rows_of(1))
    db.run(f"DROP TABLE {committable.transaction['table']}")
    statements = [insert(committable, True), "INSERT INTO orders VALUES (1, 'row 1')"]
    [[answer]] = meanwhile(db, lambda: staged.commit_all(checkpoint(), [committable]), *statements)
    assert isinstance(answer, Exception), "ask again"
    assert staged.commit_all(checkpoint(), [committable]) == [COMMITTED]
    assert db.ids() == [1]


def test_an_abort_waits_for_a_move_in_flight_and_tells_that_it_is_committed(db: Observer, staged: MySQLSink) -> None:
    committable = pre_commit(staged, rows_of(1))
    [answer] = meanwhile(db, lambda: staged.abort(committable.transaction), insert(committable, True))
    assert isinstance(answer, CommittedError)
    assert len(db.staging()) == 1


def test_a_reader_of_a_staging_table_does_not_hold_up_the_checkpoint(db: Observer) -> None:
    """A backup keeps all tables that it has read until it ends."""
    sink = MySQLSink(db.dsn, "orders", strategy="staged", lock_timeout=300)
    sink.check(SCHEMA)
    committable = pre_commit(sink, rows_of(1))
    with held(db.dsn, f"SELECT * FROM {db.staging()[0]}"):
        done: list[Any] = []
        thread = threading.Thread(target=lambda: done.extend(sink.commit_all(checkpoint(), [committable])))
        thread.start()
        thread.join(240)
        assert done == [COMMITTED]
        assert db.ids() == [1]
    assert list(sink.in_doubt("job")) == []
    assert db.staging() == []
    sink.close()


def test_a_column_renamed_after_the_pre_commit_does_not_lose_its_values(db: Observer, staged: MySQLSink) -> None:
    committable = pre_commit(staged, rows_of(1))
    db.run("ALTER TABLE orders CHANGE name title varchar(100)")
    restarted = MySQLSink(db.dsn, "orders", strategy="staged")
    (outcome,) = restarted.commit_all(checkpoint(), [committable])
    assert 'no column "name" any more' in why_unknown(outcome)
    assert db.visible() == []
    db.run("ALTER TABLE orders CHANGE title name varchar(100)")
    assert restarted.commit_all(checkpoint(), [committable]) == [COMMITTED]
    assert db.visible() == [(1, "row 1")]
    restarted.close()


class Overtaken(MySQLStaging):
    """Somebody else inserts a key after it was looked for, and commits before it is inserted, or while that waits."""

    db: Observer
    later: bool

    def _insert(self, *args: Any) -> int:
        if not self.db.visible():
            self.db.run("BEGIN")
            self.db.run("INSERT INTO orders VALUES (1, 'theirs')")
            thread = threading.Thread(target=self._commit_theirs)
            thread.start()
            if not self.later:
                thread.join()
        return super()._insert(*args)

    def _commit_theirs(self) -> None:
        running = "SELECT 1 FROM information_schema.processlist WHERE db = DATABASE() AND info LIKE 'INSERT%'"
        with closing(Observer(self.db.dsn)) as other:
            eventually(lambda: not self.later or bool(other.run(running)))
            self.db.run("COMMIT")


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("index", ["PRIMARY KEY", "UNIQUE ours"])
def test_an_upsert_whose_key_somebody_else_inserts_meanwhile_is_asked_again(
    db: Observer, index: str, later: bool
) -> None:
    db.run(f"ALTER TABLE orders ADD {index} (id)")
    sink = MySQLSink(db.dsn, "orders", mode="upsert", keys=["id"], lock_timeout=300)
    staging = sink._backend.staging
    staging.__class__ = Overtaken
    assert isinstance(staging, Overtaken)
    staging.later = later
    staging.db = db
    sink.check(SCHEMA)
    committable = pre_commit(sink, rows_of(1))
    (answer,) = sink.commit_all(checkpoint(), [committable])
    assert isinstance(answer, TransactionBlocked), db.visible()
    assert sink.commit_all(checkpoint(), [committable]) == [COMMITTED]
    assert db.visible() == [(1, "row 1")]
    sink.close()


# ---------------------------------------------------------------------- a stopped driver
class StopsInTheMiddle(StagingTables):
    """SIGSTOP to the driver, inside its transaction that moves a checkpoint."""

    def move(self, *args: Any) -> None:
        super().move(*args)
        os.kill(os.getpid(), signal.SIGSTOP)


class SoonIdle(Driver):
    """The server ends its sessions after two seconds without a statement, not ten."""

    def run_here(self) -> None:
        mysql_server._IDLE_LIMIT = 2
        super().run_here()


def test_a_driver_stopped_inside_its_move_does_not_hold_up_its_successor(db: Observer, tmp_path: Path) -> None:
    """Its session would hold the ledger rows for as long as its host answers TCP keepalives."""
    db.run("ALTER TABLE orders ADD amount double")
    input = example_input(1)
    sink = MySQLSink(db.dsn, "orders", strategy="staged", lock_timeout=2)
    stopped = MySQLSink(db.dsn, "orders", strategy="staged", lock_timeout=2)
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
    assert db.staging() == []


# ------------------------------------------------------------------ XA COMMIT beside the end of the session (MariaDB)
@ON_MARIADB
@pytest.mark.parametrize("strategy", ["xa"], indirect=True)
def test_a_task_that_fails_before_its_session_has_ended_is_undone(
    db: Observer, sink: MySQLSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then MariaDB keeps the branch to it: nobody else could roll it back."""
    transaction = sink.begin_transaction(context(sink))
    sink.write(transaction, rows_of(1))
    with monkeypatch.context() as patched:
        patched.setattr(load, "disconnect", Mock(side_effect=RuntimeError))
        with pytest.raises(RuntimeError):
            sink.pre_commit(transaction)
    sink.rollback(transaction)
    assert list(sink.in_doubt("job")) == []


@ON_MARIADB
@pytest.mark.parametrize("strategy", ["xa"], indirect=True)
def test_a_branch_is_committed_only_when_its_session_has_ended(db: Observer, sink: MySQLSink) -> None:
    """In the moment in which it ends, MariaDB answers XA COMMIT and may do nothing."""
    committable = pre_commit(sink, rows_of(1))
    other = Connection(**parameters(db.dsn))
    still_there = replace(committable, proof={**committable.proof, "session": other.thread_id()})
    closing_it = threading.Timer(1, other.close)
    closing_it.start()
    assert sink.commit_all(checkpoint(), [still_there]) == [COMMITTED]
    assert not other.open
    closing_it.join()
    assert db.ids() == [1]


@ON_MARIADB
@pytest.mark.parametrize("strategy", ["xa"], indirect=True)
def test_a_commit_that_the_server_answers_and_does_not_do_is_no_commit(
    db: Observer, sink: MySQLSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As MariaDB 11.4.5 did now and then, when XA COMMIT was sent while the session of the branch ended. It cannot be
    made to do so at will: here the answer is ours, and the branch stays prepared as it does there."""
    committable = pre_commit(sink, rows_of(1))
    with monkeypatch.context() as answered:
        answered.setattr(xa, "end", lambda *_: True)
        [outcome] = sink.commit_all(checkpoint(), [committable])
    assert "answered XA COMMIT" in why_unknown(outcome)
    assert sink.commit_all(checkpoint(), [committable]) == [COMMITTED]
    assert db.ids() == [1]


@ON_MARIADB
@pytest.mark.parametrize("strategy", ["xa"], indirect=True)
def test_a_rollback_that_the_server_answers_and_does_not_do_is_told(
    db: Observer, sink: MySQLSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As MariaDB 11.4.5 did for 5 of 1,200 branches, whose sessions had just ended; the answer is ours, as above."""
    identity = pre_commit(sink, rows_of(1)).transaction
    with monkeypatch.context() as answered:
        answered.setattr(xa, "end", lambda *_: True)
        with pytest.raises(SinkError, match=r"answered XA ROLLBACK .* until you restart the server"):
            sink.abort(identity)
    sink.abort(identity)
    assert db.prepared() == []
