"""Tests of PostgresSink that the mutation run found missing: each passes now, and fails under the mutant named."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from sinks import CommitOutcome
from sinks.errors import CommittedError
from sinks.postgres import PostgresSink
from sinks.testing.table import SCHEMA, checkpoint, eventually, pre_commit, rows_of, why_unknown
from sinks.transaction import CommitState
from tests.postgres.observer import Observer, held
from tests.table_kit import transaction_name


@pytest.fixture(params=["prepared", "staged"])
def strategy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def sink(db: Observer, strategy: str) -> Iterator[PostgresSink]:
    sink = PostgresSink(db.dsn, "orders", strategy=strategy)  # type: ignore[arg-type]
    sink.check(SCHEMA)
    yield sink
    sink.close()


@pytest.fixture
def staged(db: Observer) -> Iterator[PostgresSink]:
    sink = PostgresSink(db.dsn, "orders", strategy="staged")
    sink.check(SCHEMA)
    yield sink
    sink.close()


def name(committable: Any) -> str:
    return str(committable.transaction.get("gid") or committable.transaction["transaction_id"])


INSERT = (
    "INSERT INTO tpc_ledger (transaction_id, committed, job, lineage, sink, checkpoint) "
    "VALUES ('{}', {}, 'job-5e8c990220', 'l1', 'orders-1c168adb00', 0)"
)


def test_a_ledger_that_was_restored_from_a_dump_still_proves_a_commit(db: Observer, sink: PostgresSink) -> None:
    """P ledger state ignored: another oid, yet the row is there."""
    committable = pre_commit(sink, rows_of(1))
    assert sink.commit_all(checkpoint(), [committable]) == [CommitOutcome.COMMITTED]
    db.run("CREATE TABLE restored (LIKE tpc_ledger INCLUDING ALL)")
    db.run("INSERT INTO restored SELECT * FROM tpc_ledger")
    db.run("DROP TABLE tpc_ledger")
    db.run("ALTER TABLE restored RENAME TO tpc_ledger")
    again = PostgresSink(db.dsn, "orders", strategy=sink.strategy)
    assert again.commit_all(checkpoint(), [committable]) == [CommitOutcome.COMMITTED]
    again.close()


def test_nothing_is_moved_beside_a_sibling_whose_outcome_is_unknown(db: Observer, staged: PostgresSink) -> None:
    """S moves beside an unknown sibling"""
    lost, sibling = pre_commit(staged, rows_of(1)), pre_commit(staged, rows_of(2), subtask=1)
    db.run(f"DROP TABLE {lost.transaction['table']}")
    db.run("DROP TABLE tpc_ledger")
    again = PostgresSink(db.dsn, "orders", strategy="staged")
    states = [o.state for o in again.commit_all(checkpoint(), [lost, sibling]) if isinstance(o, CommitOutcome)]
    assert states == [CommitState.UNKNOWN, CommitState.HELD]
    assert db.ids() == []
    again.close()


@pytest.mark.parametrize("committed", [False, True])
def test_a_participant_settled_by_somebody_else_meanwhile_is_not_moved(
    db: Observer, staged: PostgresSink, committed: bool
) -> None:
    """S move without ledger conflict check: a zombie's sweep (or move) is in flight and comes first."""
    committable = pre_commit(staged, rows_of(1))
    answer: list[Any] = []
    with held(db.dsn, INSERT.format(name(committable), committed)) as zombie:
        asking = threading.Thread(target=lambda: answer.extend(staged.commit_all(checkpoint(), [committable])))
        asking.start()
        eventually(lambda: db.run("SELECT count(*) FROM pg_locks WHERE NOT granted")[0][0] == 1)
        zombie.commit()
        asking.join(120)
    assert isinstance(answer[0], Exception), "ask again"
    assert db.ids() == []
    [outcome] = staged.commit_all(checkpoint(), [committable])
    assert isinstance(outcome, CommitOutcome)
    assert outcome.state is (CommitState.COMMITTED if committed else CommitState.LOST)


def test_a_missing_staging_table_that_is_just_being_moved_is_not_lost(db: Observer, staged: PostgresSink) -> None:
    """S tombstones without conflict check; S lost without tombstones: somebody else's move is in flight."""
    committable = pre_commit(staged, rows_of(1))
    db.run(f"DROP TABLE {committable.transaction['table']}")
    answer: list[Any] = []
    with held(db.dsn, INSERT.format(name(committable), True), "INSERT INTO orders VALUES (1, 'row 1')") as other:
        asking = threading.Thread(target=lambda: answer.extend(staged.commit_all(checkpoint(), [committable])))
        asking.start()
        eventually(lambda: db.run("SELECT count(*) FROM pg_locks WHERE NOT granted")[0][0] == 1)
        other.commit()
        asking.join(120)
    assert isinstance(answer[0], Exception), "ask again"
    assert staged.commit_all(checkpoint(), [committable]) == [CommitOutcome.COMMITTED]
    assert db.ids() == [1]


def test_staging_tables_that_are_read_are_moved_inside_a_publication_of_all_tables(db: Observer) -> None:
    sink = PostgresSink(db.dsn, "orders", strategy="staged", lock_timeout=0.5)
    sink.check(SCHEMA)
    db.run("CREATE PUBLICATION everything FOR ALL TABLES")
    committable = pre_commit(sink, rows_of(1))
    with held(db.dsn, f"SELECT * FROM {db.staging()[0]}"):
        assert sink.commit_all(checkpoint(), [committable]) == [CommitOutcome.COMMITTED]
    assert db.ids() == [1]
    sink.close()


def test_prune_leaves_the_rows_of_others_and_of_a_hundred_checkpoints(db: Observer, staged: PostgresSink) -> None:
    """L prune one too far; keeps none; any lineage; any sink; any job"""
    mine = pre_commit(staged, rows_of(1), checkpoint=265)
    assert staged.commit_all(checkpoint(0), [mine]) == [CommitOutcome.COMMITTED]
    (job, lineage, sink_name), *_ = db.run("SELECT job, lineage, sink FROM tpc_ledger WHERE job <> '-'")
    db.run("DELETE FROM tpc_ledger WHERE transaction_id <> 'ledger'")
    for key in (
        (job, lineage, sink_name, 99),  # 200 - 100 = 100 is the oldest that is kept
        (job, lineage, sink_name, 100),
        ("other", lineage, sink_name, 1),
        (job, "other", sink_name, 2),
        (job, lineage, "other", 3),
    ):
        db.run(
            "INSERT INTO tpc_ledger (transaction_id, committed, job, lineage, sink, checkpoint)"
            " VALUES (%s, true, %s, %s, %s, %s)",
            [transaction_name(*key), *key],
        )
    last = pre_commit(staged, rows_of(2), checkpoint=265)
    assert staged.commit_all(checkpoint(265), [last]) == [CommitOutcome.COMMITTED]
    staged.purge(checkpoint(265, oldest=200))
    remaining = db.run("SELECT checkpoint FROM tpc_ledger WHERE job <> '-' ORDER BY 1")
    assert [n for (n,) in remaining] == [1, 2, 3, 100, 265]


def test_an_abort_waits_for_a_move_in_flight_and_tells_that_it_is_committed(db: Observer, staged: PostgresSink) -> None:
    """S abort without tombstone"""
    committable = pre_commit(staged, rows_of(1))
    answer: list[Exception] = []

    def abort() -> None:
        try:
            staged.abort(committable.transaction)
        except Exception as error:
            answer.append(error)

    with held(db.dsn, INSERT.format(name(committable), True)) as mover:
        aborting = threading.Thread(target=abort)
        aborting.start()
        eventually(lambda: db.run("SELECT count(*) FROM pg_locks WHERE NOT granted")[0][0] == 1)
        assert len(db.staging()) == 1
        mover.commit()
        aborting.join(120)
    assert [type(error) for error in answer] == [CommittedError]


def test_a_commit_whose_row_was_deleted_from_the_ledger_is_unknown_not_lost(db: Observer) -> None:
    """The server remembers how the prepared transaction ended; a replay would write its rows twice."""
    sink = PostgresSink(db.dsn, "orders", strategy="prepared")
    sink.check(SCHEMA)
    committable, aborted = pre_commit(sink, rows_of(1)), pre_commit(sink, rows_of(2), subtask=1)
    assert sink.commit(committable) == CommitOutcome.COMMITTED
    db.run(f"ROLLBACK PREPARED '{name(aborted)}'")
    db.run("DELETE FROM tpc_ledger WHERE job <> '-'")
    db.run("TRUNCATE tpc_ledger_witness")
    outcome = sink.commit(committable)
    assert "was committed, but the ledger has no row for it" in why_unknown(outcome)
    assert db.ledger() == {}, "no tombstone was put in the row's place"
    assert sink.commit(aborted).state is CommitState.LOST
    sink.close()


def test_a_transaction_number_from_another_server_proves_nothing(db: Observer) -> None:
    sink = PostgresSink(db.dsn, "orders", strategy="prepared")
    sink.check(SCHEMA)
    committable = pre_commit(sink, rows_of(1))
    db.run(f"ROLLBACK PREPARED '{name(committable)}'")
    ahead = replace(committable, proof={**committable.proof, "xid": committable.proof["xid"] + 10**6})
    assert sink.commit(ahead).state is CommitState.LOST
    sink.close()


def test_two_drivers_that_settle_at_once_commit_each_row_once(db: Observer, sink: PostgresSink) -> None:
    """The ledger's key orders them: whoever comes second is told so, or asks again."""
    committables = [pre_commit(sink, rows_of(number), subtask=number) for number in range(4)]
    other, start = PostgresSink(db.dsn, "orders", strategy=sink.strategy), threading.Barrier(2)

    def settle(driver: PostgresSink) -> list[Any]:
        start.wait()
        return list(driver.commit_all(checkpoint(), committables))

    with ThreadPoolExecutor(2) as pool:
        answers = [answer for answers in pool.map(settle, (sink, other)) for answer in answers]
    assert all(answer == CommitOutcome.COMMITTED or isinstance(answer, Exception) for answer in answers), answers
    for driver in (sink, other):
        assert driver.commit_all(checkpoint(), committables) == [CommitOutcome.COMMITTED] * 4
    assert db.ids() == [0, 1, 2, 3]
    other.close()


def test_a_move_that_calls_what_is_gone_is_refused_at_once(db: Observer) -> None:
    """Asking again until commit_timeout would not bring the function back."""
    helper = "CREATE FUNCTION helper() RETURNS void LANGUAGE sql AS ''"
    calls = "CREATE FUNCTION judge() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN PERFORM helper(); RETURN NEW; END$$"
    db.run(f"{helper}; {calls}; CREATE TRIGGER t BEFORE INSERT ON orders FOR EACH ROW EXECUTE FUNCTION judge()")
    sink = PostgresSink(db.dsn, "orders", strategy="staged")
    sink.check(SCHEMA)
    committable = pre_commit(sink, rows_of(1))
    sink.validate_all(checkpoint(), [committable])
    db.run("DROP FUNCTION helper()")
    [outcome] = sink.commit_all(checkpoint(), [committable])
    assert "function helper() does not exist" in why_unknown(outcome)
    db.run(helper)
    assert sink.commit_all(checkpoint(), [committable]) == [CommitOutcome.COMMITTED]
    assert db.ids() == [1]
    sink.close()
