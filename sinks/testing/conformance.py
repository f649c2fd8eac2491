"""`SinkConformance`: the contract, and the whole protocol around a sink whose processes are
killed.

    class TestMySink(SinkConformance):
        @pytest.fixture
        def sink(self, tmp_path):
            return MySink(...)                      # a fresh, empty target each time

        def visible(self, sink):
            # every visible row as a dict, read without the sink
            return [...]

The target has to take rows of `SCHEMA`. Both the sink and its target must be reachable from other
processes, because drivers are started, killed with SIGKILL and started again.
"""

from __future__ import annotations

import atexit
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from coordinator import CheckpointConfig, CheckpointCoordinator, CheckpointingMode, Step
from coordinator.errors import Superseded
from sinks.base import Sink
from sinks.testing.clauses import Ability, Clause
from sinks.testing.driver import COMMIT_TIMEOUT, KILLED, Driver, Hooked, KillAt, die, in_process
from sinks.testing.faults import Faults, meet, together
from sinks.testing.kit import LINEAGE, copy_of, rows
from sinks.testing.lines import Stop, at, lines, watched
from sinks.testing.local import LocalQuery, Partitions
from sinks.testing.options import Options
from sinks.testing.outcomes import Outcomes
from sinks.testing.two_phases import TwoPhases, at_least_once
from sinks.testing.values import Values
from sinks.transaction import Checkpoint, CommitState, Committable, Fingerprint, TransactionContext

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


def example_input(batches: int = 3) -> list[Partitions]:
    """Batches of three partitions with rows and an empty one; each id once."""
    return [
        [*(rows(1000 * n + 100 * p, 7 + p) for p in range(3)), rows(0, 0)] for n in range(batches)
    ]


def ids(input: Sequence[Partitions]) -> list[int]:
    return sorted(id for batch in input for table in batch for id in table["id"].to_pylist())


def on_another_machine(*, days: int) -> None:
    """Of a process: another working directory, time zone, locale, umask, folder for temporary
    files, and a clock that is so many days ahead, and its date in any case."""
    os.chdir(Path(json.__file__).parent)
    os.umask(0o077)
    os.environ |= {
        "TZ": "AHEAD-23:59:59" if days > 0 else "BEHIND+23:59:59",
        "LC_ALL": "C",
        "TMPDIR": "/var/tmp",
    }
    time.tzset()
    tempfile.tempdir = None
    now = time.time
    now_ns = time.time_ns
    time.time = lambda: now() + days * 86_400
    time.time_ns = lambda: now_ns() + days * 86_400 * 10**9


def _task(
    sink: Sink, context: TransactionContext, table: pa.Table, reply: Path, stop: Stop | None = None
) -> None:
    """In a process: writes and pre-commits; dies at a line of `pre_commit`, or after it, as Python
    ends by itself for all but the first subtask. Replies its committable."""
    on_another_machine(days=-1)
    sink.open()
    transaction = sink.begin_transaction(context)
    for batch in table.to_batches():
        sink.write(transaction, batch)
    with watched(sink, at(stop, die)):
        committable = sink.snapshot_state(transaction)
    reply.write_text(json.dumps(committable.to_json()))
    if context.subtask:
        sink.close()
        atexit._run_exitfuncs()
    die()


def _call(sink: Sink, stop: Stop | None, method: str, *arguments: Any) -> None:
    """In a process: calls a method of the driver; dies at a line of it."""
    sink.open()
    with watched(sink, at(stop, die)):
        getattr(sink, method)(*arguments)
    die()


def _tell_start(started: Path, work: Callable[[], object]) -> None:
    """In a process: writes its number into the file, and then does the work."""
    new = started.with_suffix(".new")
    new.write_text(f"{os.getpid()}")
    new.rename(started)
    work()


def _ask(sink: Sink, job: str, committables: Sequence[Committable], reply: Path) -> None:
    """In a process: a driver that comes a year later, asks what became of transactions, and of
    checkpoints, and dies."""
    on_another_machine(days=400)
    sink.open()
    checkpoint = Checkpoint(job, LINEAGE, 0)
    answers = list[Any]()
    listed = [dict(identity) for identity in sink.in_doubt(job)]
    memory = sink.committed_checkpoints(job)
    sink.purge(checkpoint)
    for committable in committables:
        (answer,) = sink.notify_checkpoint_complete(checkpoint, [committable])
        answers.append(repr(answer) if isinstance(answer, Exception) else answer.state.value)
    reply.write_text(json.dumps([listed, memory, *answers]))
    die()


class SinkContract(Faults, Options, Values, Outcomes, TwoPhases):
    """What each method of a sink has to do, and to leave behind, in one process: some seconds for a
    sink into files."""


class SinkConformance(SinkContract):
    """All of `SinkContract`, and the protocol around it: drivers killed at every step, replays,
    zombies."""

    def driver(
        self, sink: Sink, folder: Path, input: Sequence[Partitions], **options: Any
    ) -> Driver:
        return Driver(
            self.job, sink, f"file://{folder / 'storage'}", folder / "query", input, **options
        )

    def killed(self, driver: Driver, when: str, clause: Clause = Clause.EXACTLY_ONCE) -> None:
        self.expect_end(
            clause, f"the driver that was to be killed {when}", (driver.run(), driver.said)
        )

    def ended(self, driver: Driver, when: str, clause: Clause = Clause.EXACTLY_ONCE) -> None:
        self.expect_end(clause, f"the driver {when}", (driver.run(), driver.said), 0)

    def finish(self, sink: Sink, folder: Path, input: Sequence[Partitions], when: str) -> None:
        """Start the job undisturbed; whatever happened before, every row is visible once and
        nothing is in doubt."""
        self.ended(self.driver(sink, folder, input), f"started {when}")
        self.exactly_once(sink, input, when)

    def exactly_once(self, sink: Sink, input: Sequence[Partitions], when: str) -> None:
        self.expect_rows(
            sink, Clause.EXACTLY_ONCE, when, *(table for batch in input for table in batch)
        )
        self.expect_doubts(sink, Clause.EXACTLY_ONCE, when)

    # ------------------------------------------------------------------ one call
    def test_another_process_sees_and_commits_what_a_dead_one_pre_committed(
        self, sink: Sink, tmp_path: Path
    ) -> None:
        self.checked(sink)
        committables = []
        for subtask in range(3):
            context = self.context(sink, subtask=subtask)
            reply = tmp_path / f"reply-{subtask}"
            work = partial(_task, sink, context, rows(10 * subtask, 5), reply)
            self.expect_end(
                Clause.DURABLE, "a task in its own process", in_process(work, tmp_path, type(sink))
            )
            committables.append(
                Committable.from_json(json.loads(reply.read_text())).of(
                    sink.name, subtask, Fingerprint(5)
                )
            )
        self.expect_doubts(
            sink, Clause.DURABLE, "when the tasks have died after pre_commit", *committables
        )
        self.abort(sink, committables[0], Clause.DURABLE)
        self.commit(sink, committables[1], clause=Clause.DURABLE, when="of a dead task's")
        self.expect_rows(
            sink, Clause.DURABLE, "with one of three dead tasks' committed", rows(10, 5)
        )
        reply = tmp_path / "reply"
        task = copy_of(sink)
        is_open = None
        if not {Ability.SIDE_BY_SIDE, Ability.TELL_OPEN} & {*self.cannot}:
            is_open = self.written(task, rows(30, 5), subtask=3)
        ended = in_process(partial(_ask, sink, self.job, committables, reply), tmp_path, type(sink))
        self.expect_end(Clause.DURABLE, "a driver that asks what became of all", ended)
        listed, memory, lost, done, new = json.loads(reply.read_text())
        where = "in another process, whose clock is a year ahead"
        assert listed == [committables[2].transaction], Clause.IN_DOUBT.broken(
            f"{where}, it lists {listed}"
        )
        assert lost == CommitState.LOST.value, Clause.LOST.broken(f"{lost} {where}")
        assert done == CommitState.COMMITTED.value, Clause.IDEMPOTENT.broken(f"{done} {where}")
        assert new == CommitState.COMMITTED.value, Clause.DURABLE.broken(f"{new} {where}")
        self.expect_rows(sink, Clause.DURABLE, f"after a commit {where}", rows(10, 5), rows(20, 5))
        here = self.memory(sink)
        assert memory == here, Clause.MEMORY.broken(f"it tells {here}, and {memory} {where}")
        if is_open is not None:
            late = self.sealed(task, is_open, 5, 3, Clause.OPEN_KEEPS)
            self.commit(
                sink,
                late,
                clause=Clause.OPEN_KEEPS,
                when=f"of what was open when a driver came {where}",
            )

    def test_a_task_killed_at_any_line_of_pre_commit(self, sink: Sink, tmp_path: Path) -> None:
        """A sweep aborts what it left in doubt, and the next attempt writes the same rows.

        A purge removes the rest.
        """
        first = self.written(sink, rows(0, 4))
        stops = lines(sink, lambda: sink.snapshot_state(first), self.stops)
        self.rollback(sink, first, Clause.ROLLBACK_AFTER)
        self.close(sink)
        before = self.leftovers(sink)
        tables = list[pa.Table]()
        for stop in stops:
            when = f"when a task was killed at {stop}"
            tables.append(rows(10 * len(tables), 4))
            arguments = self.context(sink, slot=0), tables[-1], tmp_path / "reply", stop
            self._died(sink, partial(_task, sink, *arguments), tmp_path, Clause.TASK_DIES, when)
            self.expect_rows(sink, Clause.TASK_DIES, when, *tables[:-1])
            self.sweep(sink, Clause.TASK_DIES, when)
            again = self.pre_committed(sink, tables[-1], clause=Clause.TASK_DIES, slot=0)
            self.commit(sink, again, clause=Clause.TASK_DIES, when=f"of the next attempt, {when}")
            self.expect_rows(sink, Clause.TASK_DIES, f"{when}, after the next attempt", *tables)
        if type(sink).purge is not Sink.purge and Ability.DEAD_TASKS not in self.cannot:
            self.commit(sink, self.pre_committed(sink, rows(900, 1), checkpoint=1))
            self.purge(sink, 1, 1)
            when = "after tasks were killed at lines of pre_commit, a sweep and a purge"
            self.expect_no_leftovers(sink, when, before, Clause.PURGE_LEFTOVERS)

    @together
    def test_a_driver_killed_at_any_line_of_commit(
        self, sink: Sink, tmp_path: Path, count: int
    ) -> None:
        done: list[pa.Table] = []
        for stop, tables, made in self.attempts(sink, count, done, self.stops):
            when = f"when a driver was killed at {stop}"
            arguments = "notify_checkpoint_complete", self.checkpoint_of(made[0]), made
            self._died(
                sink, partial(_call, sink, stop, *arguments), tmp_path, Clause.COMMIT_DIES, when
            )
            self.commit(sink, *made, clause=Clause.COMMIT_DIES, when=when)
            done += tables
            self.expect_rows(sink, Clause.COMMIT_DIES, when, *done)
            self.expect_doubts(sink, Clause.COMMIT_DIES, when)
            self.expect_remembered(sink, made[0], f"asked again {when}")

    def test_a_driver_of_another_process_commits_the_same(self, sink: Sink, tmp_path: Path) -> None:
        """While one is stopped at any line: a lock of the process keeps nobody else out."""
        done: list[pa.Table] = []
        for stop, tables, made in self.attempts(sink, 1, done, self.stops):
            driver = self.elsewhere(sink)
            when = f"by drivers in two processes, one stopped at {stop}"
            commit = partial(
                _call,
                sink,
                None,
                "notify_checkpoint_complete",
                self.checkpoint_of(made[0]),
                made,
            )
            started = tmp_path / f"{stop.number}.started"
            other = partial(in_process, partial(_tell_start, started, commit), tmp_path, type(sink))
            answers, _ = meet(
                driver, stop, partial(self.ask, driver, *made), other, started=started
            )
            self.close(driver)
            self._all_committed(sink, answers, made, when)
            done += tables
            self.expect_rows(sink, Clause.THREADS, when, *done)

    def test_a_driver_killed_at_any_line_of_abort(self, sink: Sink, tmp_path: Path) -> None:
        trial = self.pre_committed(sink, rows(800_000, 1))
        driver = self.elsewhere(sink)
        stops = lines(driver, lambda: driver.abort(trial.transaction), self.stops)
        self.close(driver)
        for stop in stops:
            when = f"when a driver was killed at {stop}"
            committable = self.pre_committed(sink, rows(0, 4))
            call = partial(_call, sink, stop, "abort", committable.transaction)
            self._died(sink, call, tmp_path, Clause.ABORT_DIES, when)
            self.abort(sink, committable, Clause.ABORT_DIES, when)
            self.expect_doubts(sink, Clause.ABORT_DIES, when)
            self.expect_state(sink, Clause.ABORT_DIES, when, committable)
            self.expect_rows(sink, Clause.ABORT_DIES, when)

    def test_a_driver_killed_at_any_line_of_purge(self, sink: Sink, tmp_path: Path) -> None:
        """The next purge ends what it began; what is retained keeps its proofs, and nothing is in
        doubt anew."""
        tables = [rows(0, 2), rows(10, 2)]
        self._retained(sink, 0, *tables)
        driver = self.elsewhere(sink)
        purge = partial(driver.purge, Checkpoint(self.job, LINEAGE, 2, oldest_retained=1))
        stops = lines(driver, purge, self.stops)
        self.close(driver)
        for stop in stops:
            when = f"when a driver was killed at {stop}"
            first = 10 * len(tables)
            tables += rows(10 * first, 2), rows(10 * first + 5, 2)
            old, retained, gone, dropped = self._retained(sink, first, *tables[-2:])
            memory = self.memory(sink)
            checkpoint = Checkpoint(self.job, LINEAGE, first + 2, oldest_retained=first + 1)
            self._died(
                sink, partial(_call, sink, stop, "purge", checkpoint), tmp_path, Clause.PURGE, when
            )
            for again in (when, f"{when}, and it was purged again"):
                self.expect_rows(sink, Clause.PURGE, again, *tables)
                self.expect_doubts(sink, Clause.PURGE, again)
                self.expect_memory(sink, Clause.PURGE, again, memory)
                self.commit(sink, retained, clause=Clause.PURGE, when=again)
                self.expect_state(sink, Clause.PURGE, f"{again}, of an aborted one", gone)
                self.expect_state(
                    sink, Clause.PURGE, again, old, CommitState.COMMITTED, CommitState.UNKNOWN
                )
                self.expect_state(
                    sink, Clause.PURGE, again, dropped, CommitState.LOST, CommitState.UNKNOWN
                )
                self.purge(sink, first + 2, first + 1)

    def _retained(self, sink: Sink, first: int, *tables: pa.Table) -> list[Committable]:
        """Committed: of a checkpoint that is to be purged, and of the next one.

        Aborted: of the next one, and of that which is to be purged.
        """
        old, retained = (
            self.pre_committed(sink, table, checkpoint=first + n) for n, table in enumerate(tables)
        )
        aborted = [
            self.pre_committed(sink, rows(900_000, 1), checkpoint=first + n, subtask=1)
            for n in (1, 0)
        ]
        self.commit(sink, old, clause=Clause.PURGE)
        self.commit(sink, retained, clause=Clause.PURGE)
        for committable in aborted:
            self.abort(sink, committable, Clause.PURGE)
        return [old, retained, *aborted]

    def _died(
        self, sink: Sink, work: Callable[[], None], folder: Path, clause: Clause, when: str
    ) -> None:
        self.expect_end(clause, f"{when}: it", in_process(work, folder, type(sink)))

    # ------------------------------------------------------------------ whole jobs
    def test_an_undisturbed_run(self, sink: Sink, tmp_path: Path) -> None:
        self.finish(sink, tmp_path, example_input(), "undisturbed")

    def test_driver_killed_at_every_step(self, sink: Sink, tmp_path: Path) -> None:
        """Of one checkpoint after the other."""
        for number, step in enumerate(STEPS):
            input = example_input(1 + number)
            when = f"at step {step.name} of checkpoint {number}"
            kill = KillAt(step, checkpoint_id=None if step in STEPS[:3] else number)
            self.killed(self.driver(sink, tmp_path, input, listeners=[kill]), when)
            self.finish(sink, tmp_path, input, f"after a driver was killed {when}")

    @pytest.mark.parametrize(
        "method",
        ["begin_transaction", "write", "pre_commit", "commit", "commit_all", "validate_all"],
    )
    def test_process_killed_inside_the_sink(self, sink: Sink, tmp_path: Path, method: str) -> None:
        """Before its second call, and the next process after that.

        Tasks run in the driver here, so this is also the executor that dies with its pre-commit
        done and its ack unsent.
        """
        input = example_input()
        for after in (False, True):
            driver = self.driver(Hooked(sink, method, nth=2, after=after), tmp_path, input)
            who = f"a driver that was to die {'after' if after else 'before'} {method}"
            # 0: a sink that commits as a whole has no `commit` of one to die in
            self.expect_end(Clause.EXACTLY_ONCE, who, (driver.run(), driver.said), 0, KILLED)
        self.finish(sink, tmp_path, input, f"after processes were killed before and after {method}")

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
            self.killed(
                self.driver(sink, tmp_path, input, listeners=[kill]),
                f"at step {kill.step.name} of recovery",
            )
        self.finish(sink, tmp_path, input, "after recovery was killed at each of its steps")

    @at_least_once
    def test_at_least_once_loses_nothing_when_killed_again_and_again(
        self, sink: Sink, tmp_path: Path
    ) -> None:
        """Nor does it leave anything in doubt; and exactly-once can take over from it."""
        input = example_input()
        self.needs(Ability.DIRECTLY)
        careless = CheckpointConfig(
            mode=CheckpointingMode.AT_LEAST_ONCE, commit_timeout=COMMIT_TIMEOUT
        )
        clause = Clause.AT_LEAST_ONCE
        in_write = self.driver(Hooked(sink, "write", nth=2), tmp_path, input[:2], config=careless)
        self.killed(in_write, "in its second write, at least once", clause)
        for kill in [
            KillAt(Step.TRIGGERED, checkpoint_id=0),
            KillAt(Step.PRE_COMMITTED, checkpoint_id=0),
            KillAt(Step.COMPLETE, checkpoint_id=0),
            KillAt(Step.COMMITTED, checkpoint_id=1),
            KillAt(Step.DONE, checkpoint_id=1),
        ]:
            driver = self.driver(sink, tmp_path, input[:2], listeners=[kill], config=careless)
            self.killed(driver, f"at step {kill.step.name}, at least once", clause)
        then = (
            careless
            if Ability.TWO_PHASE in self.cannot
            else CheckpointConfig(commit_timeout=COMMIT_TIMEOUT)
        )
        self.ended(
            self.driver(sink, tmp_path, input, config=then),
            "that takes over from at-least-once",
            clause,
        )
        seen = self.seen(sink)
        expected = self.counted(*(table for batch in input for table in batch))
        lost = expected - seen
        strange = [row for row in seen if row not in expected]
        assert not lost, clause.broken(f"lost: {list(lost)[:2]}")
        assert strange == [], clause.broken(f"rows that nobody wrote: {strange[:2]}")
        if Ability.TWO_PHASE not in self.cannot:
            doubled = [row for row in self.counted(*input[2]) if seen[row] > 1]
            assert doubled == [], Clause.EXACTLY_ONCE.broken(
                f"doubled after at-least-once: {doubled[:2]}"
            )
        self.expect_doubts(sink, Clause.DIRECTLY, "after at-least-once mode")

    # ------------------------------------------------------------------ losses and zombies
    @pytest.mark.parametrize(
        "step", [Step.REPLAY_PRE_COMMITTED, Step.REPLAY_COMPLETE, Step.COMMITTED]
    )
    def test_a_decided_transaction_is_rolled_back_by_an_operator(
        self, sink: Sink, tmp_path: Path, step: Step
    ) -> None:
        """One of a complete checkpoint's transactions is lost: it is written again, over a crash of
        the replay too."""
        input = example_input(2)
        complete = KillAt(Step.COMPLETE, checkpoint_id=1)
        self.killed(
            self.driver(sink, tmp_path, input, listeners=[complete]),
            "when checkpoint 1 was complete",
        )
        listed = self.doubts(sink)
        assert len(listed) == 3, Clause.IN_DOUBT.broken(
            "when a driver was killed with three transactions decided and none committed, it "
            f"lists {listed}"
        )
        self.abort(sink, Committable(listed[1]), when="by an operator")
        replay = self.driver(sink, tmp_path, input, listeners=[KillAt(step, checkpoint_id=1)])
        self.killed(replay, f"at step {step.name} of a replay")
        self.finish(sink, tmp_path, input, f"after a replay was killed at step {step.name}")

    @pytest.mark.parametrize("until", ["write", "pre_commit", "validate_all"])
    def test_a_second_driver_takes_over_from_a_zombie(
        self, sink: Sink, tmp_path: Path, until: str
    ) -> None:
        """The zombie is stopped amid its tasks or after them, and comes back after the other has
        finished."""
        if until != "validate_all":
            self.needs(Ability.SIDE_BY_SIDE)
            self.needs(Ability.TELL_OPEN)
        input = example_input(2)
        storage = f"file://{tmp_path / 'storage'}"
        folder = tmp_path / "query"

        zombie = Hooked(sink, until, hook=self.driver(sink, tmp_path, input).run_here)
        expected = Superseded if until == "validate_all" else Exception
        error: Exception | None = None
        config = CheckpointConfig(commit_timeout=COMMIT_TIMEOUT)
        with CheckpointCoordinator(self.job, [zombie], storage, config) as coordinator:
            try:
                LocalQuery(folder, input).run(coordinator)
            except Exception as raised:
                error = raised
        seen = f"a zombie that is stopped before {until}, and superseded, ended with {error!r}"
        assert isinstance(error, expected), Clause.EXACTLY_ONCE.broken(seen)
        self.exactly_once(sink, input, f"after a zombie came back to {until}")
