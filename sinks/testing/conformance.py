"""The conformance kit: what every sink has to do right, as tests that a sink's author inherits.

    class TestMySink(SinkConformance):
        @pytest.fixture
        def sink(self, tmp_path):
            return MySink(...)                      # a fresh, empty target each time

        def visible(self, sink):
            return [...]                            # the `id` of every visible row, read without the sink

The target has to take rows of `SCHEMA`. Both the sink and its target must be reachable from other processes, because
drivers are started, killed with SIGKILL and started again.
"""

from __future__ import annotations

import json
import pickle
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from coordinator import CheckpointConfig, CheckpointCoordinator, CheckpointingMode, Step
from coordinator.errors import InDoubtError
from sinks.base import TwoPhaseCommitSink
from sinks.errors import CommittedError
from sinks.testing.driver import KILLED, Driver, Hooked, KillAt
from sinks.testing.local import LocalQuery, Partitions
from sinks.transaction import (
    Checkpoint,
    CommitOutcome,
    CommitState,
    Committable,
    Fingerprint,
    TransactionContext,
    TransactionId,
)

Sink = TwoPhaseCommitSink[Any]

SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string()), ("amount", pa.float64())])

# steps that an undisturbed run of two checkpoints comes by
STEPS = [
    Step.GENERATION_CLAIMED,
    Step.LOADED,
    Step.SWEPT,
    Step.TRIGGERED,
    Step.PRE_COMMITTED,
    Step.VALIDATED,
    Step.COMPLETE,
    Step.COMMITTING,
    Step.COMMITTED,
    Step.DONE,
]


def rows(first: int, count: int) -> pa.Table:
    ids = list(range(first, first + count))
    return pa.table([ids, [f"user-{i}" for i in ids], [i + 0.5 for i in ids]], schema=SCHEMA)


def example_input(batches: int = 3) -> list[Partitions]:
    """Batches of three partitions with rows and an empty one; each id once."""
    return [[*(rows(1000 * n + 100 * p, 7 + p) for p in range(3)), rows(0, 0)] for n in range(batches)]


def ids(input: Sequence[Partitions]) -> list[int]:
    return sorted(id for batch in input for table in batch for id in table["id"].to_pylist())


class SinkContract:
    """The tests without a driver that dies: what each method has to do, and to leave behind."""

    job = "conformance"

    @pytest.fixture
    def sink(self) -> Sink:
        raise NotImplementedError("override the `sink` fixture")

    def visible(self, sink: Any) -> Sequence[int]:
        raise NotImplementedError("override `visible`: read the ids without the sink")

    # ------------------------------------------------------------------ helpers
    def pre_committed(
        self, sink: Sink, table: pa.Table, subtask: int = 0, attempt: int = 1, job: str = ""
    ) -> Committable:
        """What a task does, up to its ack."""
        handle = self.begun(sink, subtask, attempt, job)
        sink.write(handle, table.combine_chunks().to_batches()[0])
        committable = sink.snapshot_state(handle)
        sink.close()
        return committable.of(sink.name, subtask, Fingerprint(table.num_rows))

    def begun(self, sink: Sink, subtask: int = 0, attempt: int = 1, job: str = "") -> Any:
        name = TransactionId(job or self.job, "0badcafe", 0, sink.name, subtask, 1, 0, 0, attempt)
        sink.open()
        sink.check(SCHEMA)
        return sink.begin_transaction(
            TransactionContext(
                job or self.job, "0badcafe", 0, sink.name, subtask, f"g1r0t0a{attempt}", SCHEMA, str(name), attempt
            )
        )

    def commit(self, sink: Sink, *committables: Committable) -> list[CommitOutcome]:
        sink.open()
        outcomes = sink.notify_checkpoint_complete(Checkpoint(self.job, "0badcafe", 0), committables)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
        return [outcome for outcome in outcomes if isinstance(outcome, CommitOutcome)]

    def doubts(self, sink: Sink, job: str = "") -> list[dict[str, Any]]:
        sink.open()
        return [dict(identity) for identity in sink.in_doubt(job or self.job)]

    # ------------------------------------------------------------------ the two phases
    def test_pre_committed_rows_are_invisible_and_in_doubt(self, sink: Sink) -> None:
        committable = self.pre_committed(sink, rows(0, 5))
        assert list(self.visible(sink)) == []
        assert self.doubts(sink) == [dict(committable.transaction)]

    def test_commit_makes_all_rows_visible_once(self, sink: Sink) -> None:
        committable = self.pre_committed(sink, rows(0, 5))
        assert self.commit(sink, committable) == [CommitOutcome.COMMITTED]
        assert sorted(self.visible(sink)) == [0, 1, 2, 3, 4]
        assert self.doubts(sink) == []

    def test_commit_is_idempotent(self, sink: Sink) -> None:
        committable = self.pre_committed(sink, rows(0, 5))
        for _ in range(3):
            assert self.commit(sink, committable) == [CommitOutcome.COMMITTED]
        assert sorted(self.visible(sink)) == [0, 1, 2, 3, 4]

    def test_commit_needs_only_the_pickled_sink_and_the_committable_as_json(self, sink: Sink) -> None:
        text = json.dumps(self.pre_committed(sink, rows(0, 5)).to_json())
        other: Sink = pickle.loads(pickle.dumps(sink))
        assert self.commit(other, Committable.from_json(json.loads(text))) == [CommitOutcome.COMMITTED]
        other.close()
        assert sorted(self.visible(sink)) == [0, 1, 2, 3, 4]

    def test_all_batches_of_a_transaction_belong_to_it(self, sink: Sink) -> None:
        handle = self.begun(sink)
        for first in (0, 10, 20):
            sink.write(handle, rows(first, 3).to_batches()[0])
        committable = sink.snapshot_state(handle).of(sink.name, 0, Fingerprint(9))
        assert list(self.visible(sink)) == []
        self.commit(sink, committable)
        assert sorted(self.visible(sink)) == [0, 1, 2, 10, 11, 12, 20, 21, 22]

    def test_several_participants_commit_together(self, sink: Sink) -> None:
        committables = [self.pre_committed(sink, rows(10 * p, 2), subtask=p) for p in range(4)]
        assert self.commit(sink, *committables) == [CommitOutcome.COMMITTED] * 4
        assert sorted(self.visible(sink)) == [0, 1, 10, 11, 20, 21, 30, 31]

    # ------------------------------------------------------------------ abort
    def test_rollback_leaves_nothing(self, sink: Sink) -> None:
        handle = self.begun(sink)
        sink.write(handle, rows(0, 5).to_batches()[0])
        sink.rollback(handle)
        sink.close()
        assert list(self.visible(sink)) == []
        assert self.doubts(sink) == []

    def test_abort_leaves_nothing_and_may_be_repeated(self, sink: Sink) -> None:
        committable = self.pre_committed(sink, rows(0, 5))
        for _ in range(2):
            sink.open()
            sink.abort(committable.transaction)
        assert list(self.visible(sink)) == []
        assert self.doubts(sink) == []

    def test_commit_after_abort_is_lost_and_stays_lost(self, sink: Sink) -> None:
        committable = self.pre_committed(sink, rows(0, 5))
        sink.open()
        sink.abort(committable.transaction)
        for _ in range(2):
            assert [outcome.state for outcome in self.commit(sink, committable)] == [CommitState.LOST]
        assert list(self.visible(sink)) == []

    def test_abort_after_commit_raises_and_changes_nothing(self, sink: Sink) -> None:
        committable = self.pre_committed(sink, rows(0, 5))
        self.commit(sink, committable)
        sink.open()
        with pytest.raises(CommittedError):
            sink.abort(committable.transaction)
        assert sorted(self.visible(sink)) == [0, 1, 2, 3, 4]

    def test_two_attempts_of_one_subtask_are_told_apart(self, sink: Sink) -> None:
        winner = self.pre_committed(sink, rows(0, 5), attempt=1)
        loser = self.pre_committed(sink, rows(0, 5), attempt=2)
        assert dict(winner.transaction) != dict(loser.transaction)
        sink.open()
        sink.abort(loser.transaction)
        assert self.commit(sink, winner) == [CommitOutcome.COMMITTED]
        assert sorted(self.visible(sink)) == [0, 1, 2, 3, 4]

    # ------------------------------------------------------------------ in doubt
    @pytest.mark.parametrize("other", ["conformance-2", "conformanc", "CONFORMANCE", "other job/ü", "%", "_"])
    def test_in_doubt_lists_no_other_jobs_transactions(self, sink: Sink, other: str) -> None:
        theirs = self.pre_committed(sink, rows(0, 2), job=other)
        ours = self.pre_committed(sink, rows(10, 2), attempt=2)
        assert self.doubts(sink) == [dict(ours.transaction)]
        assert self.doubts(sink, other) == [dict(theirs.transaction)]

    # ------------------------------------------------------------------ memory
    def test_committed_checkpoints_are_those_that_are_visible(self, sink: Sink) -> None:
        """Nobody can tell (None) before the first commit, if the system keeps nothing by itself."""

        def remembered(job: str = self.job) -> Mapping[str, int]:
            sink.open()
            return sink.committed_checkpoints(job) or {}

        assert remembered() == {}, "an empty target remembers a checkpoint"
        one, other = self.pre_committed(sink, rows(0, 5)), self.pre_committed(sink, rows(5, 5), subtask=1)
        assert remembered() == {}, "a checkpoint counts as committed when it is pre-committed"
        sink.abort(other.transaction)
        assert remembered() == {}, "a checkpoint counts as committed when it was aborted"
        self.commit(sink, one)
        if sink.committed_checkpoints(self.job) is None:
            pytest.skip("this sink's system keeps no memory of committed checkpoints")
        assert remembered() == {"0badcafe": 0}, "a checkpoint that is visible is not remembered"
        assert remembered("conformance-2") == {}, "another job's checkpoint is told as one's own"
        again = self.pre_committed(sink, rows(5, 5), subtask=1, attempt=2)
        sink.open()
        sink.abort(again.transaction)
        assert remembered() == {"0badcafe": 0}, "an abort takes away what was committed before"


class SinkConformance(SinkContract):
    """All of `SinkContract`, and the protocol around it: drivers killed at every step, replays, zombies."""

    def driver(self, sink: Sink, folder: Path, input: Sequence[Partitions], **options: Any) -> Driver:
        return Driver(self.job, sink, f"file://{folder / 'storage'}", folder / "query", input, **options)

    def finish(self, sink: Sink, folder: Path, input: Sequence[Partitions], **options: Any) -> None:
        """Start the job undisturbed; whatever happened before, every row is visible once and nothing is in doubt."""
        assert self.driver(sink, folder, input, **options).run() == 0
        self.exactly_once(sink, input)

    def exactly_once(self, sink: Sink, input: Sequence[Partitions]) -> None:
        seen = Counter(self.visible(sink))
        assert [id for id, count in seen.items() if count > 1] == [], "rows were doubled"
        assert sorted(seen) == ids(input), "rows were lost"
        assert self.doubts(sink) == [], "transactions were left in doubt"

    def test_an_undisturbed_run(self, sink: Sink, tmp_path: Path) -> None:
        self.finish(sink, tmp_path, example_input())

    @pytest.mark.parametrize("checkpoint", [0, 2])
    @pytest.mark.parametrize("step", STEPS)
    def test_driver_killed_at_every_step(self, sink: Sink, tmp_path: Path, step: Step, checkpoint: int) -> None:
        input = example_input()
        if checkpoint and step in (Step.GENERATION_CLAIMED, Step.LOADED, Step.SWEPT):
            assert self.driver(sink, tmp_path, input[:checkpoint]).run() == 0
        kill = KillAt(step) if step in STEPS[:3] else KillAt(step, checkpoint_id=checkpoint)
        assert self.driver(sink, tmp_path, input, listeners=[kill]).run() == KILLED
        self.finish(sink, tmp_path, input)

    @pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
    @pytest.mark.parametrize(
        "method", ["begin_transaction", "write", "pre_commit", "commit", "commit_all", "validate_all"]
    )
    def test_process_killed_inside_the_sink(self, sink: Sink, tmp_path: Path, method: str, after: bool) -> None:
        """Tasks run in the driver here, so this is also the executor that dies with PREPARE done and its ack unsent."""
        input = example_input()
        killed = self.driver(Hooked(sink, method, nth=2, after=after), tmp_path, input).run()
        assert killed in (0, KILLED)  # 0: a sink that commits as a whole has no `commit` of one to die in
        self.finish(sink, tmp_path, input)

    def test_killed_again_and_again(self, sink: Sink, tmp_path: Path) -> None:
        """Recovery itself dies too, at each of its steps."""
        input = example_input()
        for kill in [
            KillAt(Step.COMPLETE, checkpoint_id=1),
            KillAt(Step.GENERATION_CLAIMED),
            KillAt(Step.LOADED),
            KillAt(Step.COMMITTING),
            KillAt(Step.RECOVERED),
            KillAt(Step.SWEPT),
            KillAt(Step.DONE, checkpoint_id=1),
        ]:
            assert self.driver(sink, tmp_path, input, listeners=[kill]).run() == KILLED
        self.finish(sink, tmp_path, input)

    def test_at_least_once_loses_nothing_when_killed_again_and_again(self, sink: Sink, tmp_path: Path) -> None:
        """Nor does it leave anything in doubt; and exactly-once can take over from it."""
        input = example_input()
        careless = CheckpointConfig(mode=CheckpointingMode.AT_LEAST_ONCE, commit_timeout=30)
        assert self.driver(Hooked(sink, "write", nth=2), tmp_path, input[:2], config=careless).run() == KILLED
        for kill in [
            KillAt(Step.TRIGGERED, checkpoint_id=0),
            KillAt(Step.PRE_COMMITTED, checkpoint_id=0),
            KillAt(Step.COMPLETE, checkpoint_id=0),
            KillAt(Step.COMMITTED, checkpoint_id=1),
            KillAt(Step.DONE, checkpoint_id=1),
        ]:
            driver = self.driver(sink, tmp_path, input[:2], listeners=[kill], config=careless)
            assert driver.run() == KILLED
        assert self.driver(sink, tmp_path, input).run() == 0
        seen = Counter(self.visible(sink))
        assert sorted(seen) == ids(input), "rows were lost"
        assert [id for id in ids(input[2:]) if seen[id] != 1] == [], "rows were doubled by exactly-once"
        assert self.doubts(sink) == [], "transactions were left in doubt"

    @pytest.mark.parametrize("step", [Step.REPLAYING, Step.REPLAY_PRE_COMMITTED, Step.REPLAY_COMPLETE, Step.COMMITTED])
    def test_a_decided_transaction_is_rolled_back_by_an_operator(self, sink: Sink, tmp_path: Path, step: Step) -> None:
        """One of a complete checkpoint's transactions is lost: it is written again, over a crash of the replay too."""
        input = example_input()
        assert self.driver(sink, tmp_path, input, listeners=[KillAt(Step.COMPLETE, checkpoint_id=1)]).run() == KILLED
        sink.open()
        sink.abort(self.doubts(sink)[1])
        assert self.driver(sink, tmp_path, input, listeners=[KillAt(step, checkpoint_id=1)]).run() == KILLED
        self.finish(sink, tmp_path, input)

    def test_replay_of_other_rows_stops_and_loses_nothing(self, sink: Sink, tmp_path: Path) -> None:
        input = example_input()
        assert self.driver(sink, tmp_path, input, listeners=[KillAt(Step.COMPLETE, checkpoint_id=0)]).run() == KILLED
        sink.open()
        sink.abort(self.doubts(sink)[0])
        changed = [[rows(5000, 7), rows(6000, 8), rows(7000, 9), rows(0, 0)], *input[1:]]
        with pytest.raises(InDoubtError, match="replayed"):
            self.driver(sink, tmp_path, changed).run_here()
        self.finish(sink, tmp_path, input)

    def test_a_second_driver_takes_over_from_a_zombie(self, sink: Sink, tmp_path: Path) -> None:
        """The zombie is stopped between pre-commit and complete, and comes back after the other has finished."""
        input = example_input()
        storage, folder = f"file://{tmp_path / 'storage'}", tmp_path / "query"

        def other_driver() -> None:
            self.driver(sink, tmp_path, input).run_here()

        zombie = Hooked(sink, "validate_all", hook=other_driver)
        coordinator = CheckpointCoordinator(self.job, [zombie], storage, CheckpointConfig(commit_timeout=30))
        with coordinator, pytest.raises(Exception, match="Two drivers"):
            LocalQuery(folder, input).run(coordinator)
        self.exactly_once(sink, input)
