"""The protocol's decisions are pure functions; these tests read as its rules."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.errors import (
    CheckpointGap,
    CheckpointLocationMismatch,
    ExternalSystemBehind,
    InDoubtError,
    QueryNotAdopted,
    ReplayMismatch,
    SourceReplaced,
    StorageBehind,
)
from coordinator.protocol.decisions import (
    Action,
    action_for,
    may_try_again,
    refused_again_error,
    require_known,
    require_none_lost,
    require_same_layout,
    require_same_offsets,
    require_same_rows,
    require_same_topics,
    still_in_doubt_error,
)
from coordinator.protocol.memories import lacking_before_savepoint, require_none_later, require_restored
from coordinator.protocol.ports import BatchFacts
from coordinator.spark.checkpoint_location import facts_in
from coordinator.store.records import ANY_LINEAGE, CompletedCheckpoint, Record
from coordinator.task.task import Ack
from sinks.errors import BadValue, TransactionBlocked
from sinks.transaction import CommitOutcome, Committable, Fingerprint

LOST, UNKNOWN = CommitOutcome.lost("timed out"), CommitOutcome.unknown("permission denied")


def committable(subtask: int, round: int = 0, sink: str = "s", rows: int = 3) -> Committable:
    return Committable({"id": f"{sink}-{subtask}-{round}"}, {}, Fingerprint(rows, 7), sink, subtask)


def record(n: int, round: int = 0, subtasks: tuple[int, ...] = (0, 1), sink: str = "s", offsets: str = "7") -> Record:
    return Record(
        "job", "aa", n, round, 1, "query", (offsets,), {sink: 2},
        tuple(committable(subtask, round, sink) for subtask in subtasks), "exactly_once", {sink: 6}, 0, 1,
    )  # fmt: skip


def batch(n: int, query: str = "query", offsets: str = "7") -> BatchFacts:
    return BatchFacts(n, query, (offsets,))


def call(
    n: int, newest: CompletedCheckpoint | None, *, adopt: bool = False, reloaded: bool = True, **facts: str
) -> Action:
    return action_for(batch(n, **facts), newest, adopt=adopt, reloaded=reloaded)


def test_the_first_batch_of_a_new_job_is_written():
    assert call(0, None) is Action.WRITE


def test_empty_storage_at_a_later_batch_is_an_error_that_offers_adoption():
    with pytest.raises(QueryNotAdopted, match=r"batch 5.*adopt=True"):
        call(5, None)


def test_empty_storage_at_a_later_batch_is_read_again_first():
    assert call(5, None, reloaded=False) is Action.RELOAD


def test_adopt_starts_at_whatever_batch_spark_is_at():
    assert call(5, None, adopt=True) is Action.WRITE


def test_adopt_does_not_excuse_a_gap():
    with pytest.raises(CheckpointGap):
        call(5, CompletedCheckpoint((record(3),)), adopt=True)


def test_the_successor_is_written():
    assert call(4, CompletedCheckpoint((record(3),))) is Action.WRITE


def test_a_complete_batch_is_finished_not_written():
    assert call(3, CompletedCheckpoint((record(3),))) is Action.FINISH


def test_an_older_batch_is_skipped():
    assert call(2, CompletedCheckpoint((record(3),))) is Action.SKIP


def test_a_gap_is_read_again_first_then_an_error():
    """R9: the newest that was loaded may be stale, so a gap is only believed after a second look."""
    assert call(5, CompletedCheckpoint((record(3),)), reloaded=False) is Action.RELOAD
    with pytest.raises(CheckpointGap, match=r"batch 5.*newest complete checkpoint in storage is 3"):
        call(5, CompletedCheckpoint((record(3),)))


def test_another_query_id_is_an_error():
    with pytest.raises(CheckpointLocationMismatch, match="checkpointLocation was replaced"):
        call(0, CompletedCheckpoint((record(3),)), query="other")


def test_a_complete_batch_with_other_offsets_is_an_error():
    """R12"""
    with pytest.raises(CheckpointLocationMismatch, match="other offsets"):
        call(3, CompletedCheckpoint((record(3),)), offsets="8")


def test_an_older_batch_whose_record_is_gone_cannot_be_compared():
    """R12"""
    with pytest.raises(CheckpointLocationMismatch, match="no longer retained"):
        require_same_offsets(batch(1), None)


def test_lost_transactions_of_c_when_spark_is_past_it_are_read_again_first():
    """Somebody else has replayed them, or Spark could not have moved on."""
    newest = CompletedCheckpoint((record(3),), {("s", 0): LOST, ("s", 1): CommitOutcome.COMMITTED})
    assert call(4, newest, reloaded=False) is Action.RELOAD
    assert call(4, CompletedCheckpoint(newest.rounds)) is Action.WRITE, "its outcomes are asked for before it is"
    with pytest.raises(InDoubtError, match="Spark has moved on"):
        require_none_lost(newest)


def test_a_batch_goes_on_in_the_topics_of_the_batch_before():
    """R19. A topic that is new to a source does no harm, nor one that it no longer has; what was never told is not
    compared."""
    before = [{"orders": "a", "gone": "b"}, {}]
    require_same_topics(4, before, [{"orders": "a", "new": "c"}, {"orders": "z"}])
    require_same_topics(4, (), [{"orders": "b"}])
    require_same_topics(4, before, ())
    with pytest.raises(
        SourceReplaced, match=r"'orders' was deleted and created again .*batch 4 .*new job name.*adopt=True"
    ):
        require_same_topics(4, before, [{"orders": "b", "new": "c"}, {}])


@pytest.mark.parametrize("offset", ['{"logOffset":7}', '{"topic":{"0":7}}'])
def test_a_batch_that_was_planned_anew_is_another_batch(offset: str):
    """Files under the same number may be others, and so may timers that the batch's time fires."""
    done = replace(record(3, offsets=offset), planned_at=1000)
    require_same_offsets(replace(batch(3, offsets=offset), planned_at=1000), done)
    with pytest.raises(CheckpointLocationMismatch, match="that Spark planned at another time"):
        require_same_offsets(replace(batch(3, offsets=offset), planned_at=2000), done)
    require_same_offsets(replace(batch(3, offsets=offset), planned_at=2000), replace(done, planned_at=0))
    log = f'v1\n{{"batchTimestampMs":2000}}\n{offset}'
    assert facts_in(log, 3, "query") == replace(batch(3, offsets=offset), planned_at=2000)


def test_a_replay_record_replaces_lost_participants_only():
    complete = CompletedCheckpoint((record(3),), {("s", 0): LOST, ("s", 1): CommitOutcome.COMMITTED})
    replayed = complete.with_round(record(3, 1, (0,)))
    assert replayed.committables == {("s", 0): committable(0, 1), ("s", 1): committable(1, 0)}
    assert list(replayed.lost_participants()) == []


def test_r20_a_sink_is_asked_again_about_all_of_its_participants():
    """Its system may have been set back since it committed the others."""
    complete = CompletedCheckpoint((record(3),), {("s", 0): LOST, ("s", 1): CommitOutcome.COMMITTED})
    assert complete.pending_participants({}) == []
    replayed = complete.with_round(record(3, 1, (0,)))
    assert replayed.pending_participants({}) == [("s", 0), ("s", 1)]
    assert replayed.with_outcomes({("s", 0): CommitOutcome.COMMITTED}).pending_participants({}) == []


def test_held_participants_are_not_asked_before_their_lost_sibling_is_replaced():
    """Or an atomic sink would make the rest of the checkpoint visible without it."""
    complete = CompletedCheckpoint((record(3),), {("s", 0): LOST, ("s", 1): CommitOutcome.HELD})
    assert complete.pending_participants({}) == []
    require_known(complete)
    assert list(complete.lost_participants()) == [("s", 0)]
    assert complete.with_round(record(3, 1, (0,))).pending_participants({}) == [("s", 0), ("s", 1)]


def test_sinks_of_one_place_are_asked_together_and_wait_for_each_other():
    """R20: what is lost of one of them holds the others, and its replacement has all of them asked."""
    both = replace(
        record(3),
        partitions={"s": 1, "t": 1, "u": 1},
        committables=tuple(Committable({"id": name}, sink=name, subtask=0) for name in ("s", "t", "u")),
    )
    outcomes = {("s", 0): LOST, ("t", 0): CommitOutcome.HELD, ("u", 0): CommitOutcome.COMMITTED}
    complete = CompletedCheckpoint((both,), outcomes)
    places = {"s": "here", "t": "here", "u": "u"}
    assert complete.pending_participants({}) == [("t", 0)]
    assert complete.pending_participants(places) == []
    again = replace(both, round=1, committables=(Committable({"id": "s2"}, sink="s", subtask=0),))
    replayed = complete.with_round(again)
    assert replayed.pending_participants(places) == [("s", 0), ("t", 0)]
    half = replayed.with_outcomes({("t", 0): CommitOutcome.COMMITTED})
    assert half.pending_participants({}) == [("s", 0)]
    assert half.pending_participants(places) == [("s", 0), ("t", 0)]


def test_an_unknown_outcome_halts_and_names_the_transaction():
    complete = CompletedCheckpoint((record(3),), {("s", 0): UNKNOWN, ("s", 1): LOST})
    with pytest.raises(InDoubtError, match=r"s-0-0.*permission denied") as error:
        require_known(complete)
    assert error.value.transactions == [{"id": "s-0-0"}]


def test_held_without_a_lost_sibling_halts():
    with pytest.raises(InDoubtError, match="defect of the sink"):
        require_known(
            CompletedCheckpoint((record(3),), {("s", 0): CommitOutcome.HELD, ("s", 1): CommitOutcome.COMMITTED})
        )


def test_a_sink_that_is_ahead_is_told_by_whole_numbers():
    with pytest.raises(StorageBehind, match=r"older by 1234567 checkpoint\(s\)") as error:
        require_none_later("s", {"aa": 3_234_567}, {"aa": 2_000_000}, "aa", "memory:x")
    assert "has none after 2000000." in str(error.value)


def test_running_out_of_time_names_the_transactions_and_their_causes():
    error = still_in_doubt_error(CompletedCheckpoint((record(3),)), {("s", 1): OSError("connection refused")}, 600)
    assert "connection refused" in str(error)
    assert error.transactions == [{"id": "s-1-0"}]


@pytest.mark.parametrize(
    ("errors", "again"),
    [
        ([TransactionBlocked("lock")], True),
        ([TransactionBlocked("lock")] * 2, True),
        ([TransactionBlocked("lock")] * 3, False),
        ([BadValue("row 3")], False),
        ([OSError()], True),
        ([OSError()] * 2, False),
        ([TransactionBlocked("lock"), OSError(), TransactionBlocked("lock")], True),
    ],
)
def test_blocked_tasks_and_tolerable_failures_are_counted_apart(errors: list[Exception], again: bool):
    """R8"""
    assert may_try_again(errors, tolerable=1) is again


def test_a_checkpoint_of_many_participants_is_read_once_for_all():
    """Or the driver's time grows with the square of their number."""
    complete = CompletedCheckpoint((record(3),))
    assert complete.committables is complete.committables


def test_another_layout_stops_the_replay():
    """R13"""
    require_same_layout(record(3), {"s": 2}, [("s", 0)])
    with pytest.raises(ReplayMismatch, match="2 partitions, and the batch now has 5"):
        require_same_layout(record(3), {"s": 5}, [("s", 0)])


def test_a_row_that_a_replay_cannot_write_is_told_as_one_that_is_decided():
    told = str(refused_again_error(3, BadValue("table t: row 1 was refused")))
    assert told.startswith("table t: row 1 was refused\n")
    assert "checkpoint 3, which is decided" in told
    assert "coordinator resolve" in told
    blocked = TransactionBlocked("a lock")
    assert refused_again_error(3, blocked) is blocked


@pytest.mark.parametrize("now", [Fingerprint(3, 8), Fingerprint(2, 7), None])
def test_other_rows_stop_the_replay(now: Fingerprint | None):
    lost = {("s", 0): committable(0)}
    require_same_rows(lost, {("s", 0): Ack("s", 0, Fingerprint(3, 7))})
    with pytest.raises(ReplayMismatch, match="other rows"):
        require_same_rows(lost, {("s", 0): Ack("s", 0, now)} if now else {})


def test_only_the_record_that_a_restore_put_tells_what_its_savepoint_had():
    """A later one has the savepoint's lineage among those before it, and newer rows of its own lineage."""
    memories = {"orders": {"old": 20}, "dead": {"old": 3, "aa": 14}}
    later = replace(record(20), predecessors={"old": 20}, newest_rows={"orders": 20, "dead": 14})
    require_restored(memories, later, "file:///c")
    with pytest.raises(ExternalSystemBehind, match="sink 'dead' ends with checkpoint 3 of the earlier lineage old"):
        require_restored(memories, replace(later, restored_from="ffff"), "file:///c")


def test_the_lineage_of_a_savepoint_counts_and_no_longer_one():
    before = {"old": 20, ANY_LINEAGE: -1}
    base = replace(record(20), restored_from="ffff", predecessors=before, newest_rows={"orders": 20})
    assert lacking_before_savepoint("orders", {"oldest": 100, "old": 18}, base) == ("old", 18)
    for memory in ({"oldest": 100, "old": 20}, {"oldest": 3}, {}, None):
        assert lacking_before_savepoint("orders", memory, base) is None
