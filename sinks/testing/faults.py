"""A system that does not answer, drivers at the same time: the sink is stopped at any line of its
own."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import Any

import pyarrow as pa
import pytest

from sinks.base import Sink
from sinks.testing.clauses import Ability, Clause
from sinks.testing.kit import LINEAGE, SinkTests, copy_of, forget, rows
from sinks.testing.lines import Stop, at, failing, is_after_deed, lines, watched
from sinks.transaction import Checkpoint, CommitOutcome, CommitState, Committable, Fingerprint

COMMITTED = CommitOutcome.COMMITTED
HELD = CommitOutcome.HELD
_LOOK = 0.005  # seconds between two looks at a thread
# looks in a row at a thread that stands still, after which it seems to wait for the other
_BLOCKED = 20


def meet(
    sink: object,
    stop: Stop,
    call: Callable[[], Any],
    other: Callable[[], Any],
    *,
    ended: list[Stop] | None = None,
    fails: Exception | None = None,
    started: Path | None = None,
) -> tuple[Any, Any]:
    """What two calls answer, or raise.

    The first is stopped at a line of the sink, and goes on, or `fails`, when the other, in a
    thread, has ended or seems to wait for it. `ended` gets the stop if the other has ended by then.
    If the other waits for a process, this writes its number into `started` when it begins.
    """
    answers: list[Any] = [None, None]

    def run(number: int, of: Callable[[], Any]) -> None:
        try:
            answers[number] = of()
        except Exception as error:
            forget(error)
            answers[number] = error

    thread = threading.Thread(target=run, args=(1, other), daemon=True)

    def begin() -> None:
        thread.start()
        # before the first line little is locked
        looks = _BLOCKED if stop.number and not started else 10 * _BLOCKED
        _await_end_or_standstill(thread, looks, started)
        if ended is not None and not thread.is_alive():
            ended.append(stop)

    stopped = at(stop, begin)
    fail = failing(sink, stop, fails) if fails else None

    def at_line(number: int, frame: FrameType, before: int) -> None:
        stopped(number, frame, before)
        if fail:
            fail(number, frame, before)

    with watched(sink, at_line):
        run(0, call)
    if thread.ident is None:  # it did not come to that line
        thread.start()
    thread.join()
    return answers[0], answers[1]


class _Caller:
    """A call in a thread of its own, which is stopped once, after it has done so many things."""

    def __init__(self, sink: Sink, call: Callable[[], Any], deeds: int) -> None:
        self.stop: Stop | None = None
        self.error: Exception | None = None
        self._sink = sink
        self._call = call
        self._deeds = deeds
        self._go_on = threading.Event()
        self._arrived = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        left = self._deeds

        def at_line(number: int, frame: FrameType, before: int) -> None:
            nonlocal left
            if number and not is_after_deed(frame, before):
                return
            left -= 1
            if left == 0:
                self.stop = Stop.of(number, frame)
                self._arrived.set()
                self._go_on.wait()

        try:
            with watched(self._sink, at_line):
                self._call()
        except Exception as error:
            forget(error)
            self.error = error
        finally:
            self._arrived.set()

    def start(self) -> bool:
        """Return whether it was stopped, and not at its end, or waiting for another one."""
        self._thread.start()
        _await_end_or_standstill(self._thread, _BLOCKED, None, self._arrived)
        return self.stop is not None

    def go_on(self) -> None:
        self._go_on.set()
        _await_end_or_standstill(self._thread, _BLOCKED, None)

    def end(self) -> None:
        self._thread.join()


def overtaking(sinks: Sequence[Sink], calls: Sequence[Callable[[], Any]]) -> list[_Caller]:
    """Calls of several processes, each overtaken by all that come later.

    The first is stopped before it does anything, the next one when it has done one thing, and so
    on, until one ends. Then they go on, the last one first. So whatever a call has looked at, the
    others change before it acts on that.
    """
    callers = [
        _Caller(sink, call, number)
        for number, (sink, call) in enumerate(zip(sinks, calls, strict=True), 1)
    ]
    started = list[_Caller]()
    for caller in callers:
        started.append(caller)
        if not caller.start():
            break
    for caller in reversed(started):
        caller.go_on()
    for caller in started:
        caller.end()
    return started


def _raised(answers: Sequence[Exception | None]) -> None:
    """Raise the error among the answers of `abort_all`, if there is one."""
    for error in answers:
        if error:
            raise error


def _await_end_or_standstill(
    thread: threading.Thread,
    looks: int,
    started: Path | None,
    arrived: threading.Event | None = None,
) -> None:
    """Return when the thread has ended, or seems to wait for another one: it stands still at so
    many looks in a row, or sleeps at three times as many, as one does that looks again and again
    whether a lock is free. On a busy machine a thread that is ready to run does not sleep, however
    long it has to wait for a processor. If the thread waits for a process that writes its number
    into the file `started`, that process is looked at in its place. If `arrived` is set, return,
    too."""
    before = ""
    still = 0
    asleep = 0
    while thread.is_alive() and still < looks and asleep < 3 * looks:
        if arrived is None:
            thread.join(_LOOK)
        elif arrived.wait(_LOOK):
            return
        task = _text_of(started) if started else f"self/task/{thread.native_id}"
        switches = _asleep(task) if task else ""
        asleep += bool(switches)
        still = still + 1 if switches and switches == before else 0
        before = switches


def _text_of(file: Path) -> str:
    with suppress(FileNotFoundError):
        return file.read_text()
    return ""


def _asleep(task: str) -> str:
    """How often a task of the system has been switched; "" if it has ended, runs, is ready to run,
    or waits for a disk."""
    try:
        status = Path("/proc", task, "status").read_text()
    except OSError:
        return ""
    facts = dict(line.split(":", 1) for line in status.splitlines())
    if facts["State"].strip()[0] in "RD":
        return ""
    return facts["voluntary_ctxt_switches"] + facts["nonvoluntary_ctxt_switches"]


def together(test: Any) -> Any:
    """With one transaction, and with three in one call: of a sink with a `commit_all` of its own,
    or by itself the same."""
    return pytest.mark.parametrize("count", [1, 3])(test)


@pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
class Faults(SinkTests):
    """A line that fails between `connect` and `try` leaves a connection to the garbage collector,
    whatever the sink."""

    @classmethod
    def teardown_class(cls) -> None:
        gc.collect()  # now, while the warnings of such connections are ignored

    def participants(
        self, sink: Sink, tables: Sequence[pa.Table], **parts: Any
    ) -> list[Committable]:
        return [
            self.pre_committed(sink, table, subtask=p, **parts) for p, table in enumerate(tables)
        ]

    def attempts(
        self, sink: Sink, count: int, done: list[pa.Table], most: int = 0, *, failing: bool = False
    ) -> Iterator[tuple[Stop, list[pa.Table], list[Committable]]]:
        """Each line at which a commit can be stopped, with the tables of the participants of a
        checkpoint of its own, and these. `done` gets what is visible before."""
        if count > 1 and type(sink).commit_all is Sink.commit_all:
            pytest.skip("this sink does not override `commit_all`: it calls `commit` of each")

        def tables(number: int) -> list[pa.Table]:
            return [rows(100 * number + 10 * p, 2) for p in range(count)]

        done += tables(8_000)
        made = self.participants(sink, done)
        driver = self.elsewhere(sink)
        stops = lines(
            driver, lambda: self.ask(driver, *made), most or 2 * self.stops, failing=failing
        )
        self.close(driver)
        for number, stop in enumerate(stops, 1):
            made = self.participants(sink, tables(stop.number), checkpoint=number)
            yield stop, tables(stop.number), made

    @together
    def test_a_system_that_does_not_answer_is_no_outcome(self, sink: Sink, count: int) -> None:
        """It fails at any line of a commit, once, and is asked again: also for what was committed
        before it failed."""
        done: list[pa.Table] = []
        for stop, tables, made in self.attempts(sink, count, done, failing=True):
            failed = f"{self.outage!r} at {stop}"
            driver = self.elsewhere(sink)
            answers = self._ask_failing(driver, stop, *made)
            self.close(driver)
            wrong = [
                a for a in answers if not isinstance(a, Exception) and a not in (COMMITTED, HELD)
            ]
            assert wrong == [], Clause.ASK_AGAIN.broken(f"{failed}, and it answers {wrong}")
            forget(*answers)
            if COMMITTED in answers:
                visible = [
                    table
                    for table, answer in zip(tables, answers, strict=True)
                    if answer == COMMITTED
                ]
                hidden = self.counted(*visible) - self.seen(sink)
                assert not hidden, Clause.ASK_AGAIN.broken(
                    f"{failed}; it answers COMMITTED, and {len(hidden)} rows are not visible"
                )
            self.commit(sink, *made, clause=Clause.ASK_AGAIN, when=f"asked again after {failed}")
            done += tables
            self.expect_rows(sink, Clause.ASK_AGAIN, f"asked again after {failed}", *done)
            self.expect_remembered(sink, made[0], f"asked again after {failed}")
        self.expect_doubts(sink, Clause.IN_DOUBT_RESOLVED, "after commits that were asked again")

    def _ask_failing(self, driver: Sink, stop: Stop | None, *made: Committable) -> list[Any]:
        with watched(driver, failing(driver, stop, self.outage)):
            return self.ask(driver, *made)

    def test_rollback_after_a_pre_commit_whose_answer_was_lost(self, sink: Sink) -> None:
        before = self.leftovers(sink)
        transaction = self.written(sink, rows(0, 5))
        committable = self.sealed(sink, transaction, 5)
        self.rollback(sink, transaction, Clause.ROLLBACK_AFTER)
        when = "after pre_commit, then rollback"
        self.sweep(sink, Clause.ROLLBACK_AFTER, when)
        self.expect_no_leftovers(sink, when, before)
        self.expect_state(
            sink, Clause.ROLLBACK_AFTER, when, committable, CommitState.LOST, CommitState.UNKNOWN
        )
        self.expect_rows(sink, Clause.ROLLBACK_AFTER, when)

    @pytest.mark.parametrize("inside", ["write", "pre_commit"])
    def test_a_task_fails_and_rolls_back(self, sink: Sink, inside: str) -> None:
        """Or it has not failed: then all of its rows are there."""
        done = list[pa.Table]()

        def fails(transaction: Any, table: pa.Table) -> Committable:
            if inside == "pre_commit":
                return sink.snapshot_state(transaction)
            sink.write(transaction, table.slice(2).to_batches()[0])
            return Committable({})

        def begun(table: pa.Table) -> Any:
            return self.written(sink, table.slice(0, 2 if inside == "write" else 4))

        first = begun(rows(0, 4))
        stops = lines(sink, lambda: fails(first, rows(0, 4)), 2 * self.stops, failing=True)
        self.rollback(sink, first, Clause.ROLLBACK_AFTER)
        before = self.leftovers(sink)
        for stop in stops:
            table = rows(10 * stop.number, 4)
            transaction = begun(table)
            committable = None
            try:
                with watched(sink, failing(sink, stop, self.outage)):
                    committable = fails(transaction, table)
            except Exception as error:
                self.expect_retried(error, f"{self.outage!r} at {stop}, and {inside}")
                forget(error)
            if committable is not None:
                done.append(table)
                clause = Clause.WRITE if inside == "write" else Clause.PRE_COMMIT
                made = committable.of(sink.name, 0, Fingerprint(4))
                if inside == "write":
                    made = self.sealed(sink, transaction, 4)
                when = f"after {self.outage!r} at {stop}, of which {inside} told nothing"
                self.commit(sink, made, clause=clause, when=when)
                self.expect_rows(sink, clause, when, *done)
                continue
            self.rollback(sink, transaction, Clause.ROLLBACK_AFTER)
            self.close(sink)
            when = f"after {inside} that failed at {stop}, then rollback"
            self.sweep(sink, Clause.ROLLBACK_AFTER, when)
            self.expect_no_leftovers(sink, when, before)
        self.expect_rows(
            sink, Clause.ROLLBACK_AFTER, f"after {inside} that failed, then rollback", *done
        )

    def test_begin_transaction_fails_at_any_line(self, sink: Sink) -> None:
        """Once, or from there on.

        What it cannot clean up itself, a sweep or a purge does; the next attempt goes on.
        """
        self.checked(sink)
        trial = list[Any]()
        begin = partial(sink.begin_transaction, self.context(sink))
        stops = lines(sink, lambda: trial.append(begin()), self.stops, failing=True)
        tables = list[pa.Table]()
        self.rollback(sink, *trial)
        self.close(sink)
        before = self.leftovers(sink)
        can_purge = type(sink).purge is not Sink.purge and Ability.DEAD_TASKS not in self.cannot
        for stop in stops:
            when = f"after begin_transaction failed at {stop}"
            for lasts in (False, True)[: 1 + can_purge]:
                self.checked(sink)
                try:
                    with watched(sink, failing(sink, stop, self.outage, lasts=lasts)):
                        transaction = sink.begin_transaction(self.context(sink, slot=0))
                except Exception as error:
                    self.expect_retried(error, f"{self.outage!r} at {stop}, and begin_transaction")
                    forget(error)
                else:
                    self.rollback(sink, transaction)
                self.close(sink)
                self.sweep(sink, Clause.BEGIN_FAILS, when)
            tables.append(rows(10 * len(tables), 2))
            self.checked(sink)
            with Clause.BEGIN_FAILS.guarding(f"begin_transaction of the next attempt, {when},"):
                transaction = sink.begin_transaction(self.context(sink, slot=0))
            self.write(sink, transaction, tables[-1], Clause.BEGIN_FAILS)
            again = self.sealed(sink, transaction, 2, clause=Clause.BEGIN_FAILS)
            self.close(sink)
            self.commit(sink, again, clause=Clause.BEGIN_FAILS, when=f"of the next attempt, {when}")
            self.expect_rows(sink, Clause.BEGIN_FAILS, f"{when}, and the next attempt", *tables)
        when = f"after begin_transaction failed at {', or at '.join(map(str, stops))}, and a sweep"
        if can_purge:
            self.commit(sink, self.pre_committed(sink, rows(900, 1), checkpoint=1))
            self.purge(sink, 1, 1)
            when += " and a purge"
        self.expect_no_leftovers(sink, when, before, Clause.BEGIN_FAILS)

    def test_open_fails_in_a_task(self, sink: Sink) -> None:
        """At any line; then the task closes the sink, and Spark tries it again."""
        trial = copy_of(sink)
        stops = lines(trial, trial.open, 2 * self.stops, failing=True)
        self.close(trial)
        self.rollback(sink, self.begun(sink))
        for stop in stops:
            task = copy_of(sink)
            try:
                with watched(task, failing(task, stop, self.outage)):
                    task.open()
            except Exception as error:
                self.expect_retried(error, f"{self.outage!r} at {stop}, and open")
                forget(error)
            self.close(task)
            self.rollback(task, self.begun(task, clause=Clause.OPEN))
            self.close(task)

    def test_open_in_many_tasks_at_once(self, sink: Sink) -> None:
        """Where nothing was set up yet: each is overtaken by the next one."""
        tasks = [copy_of(sink) for _ in range(2 * self.stops)]
        for caller in overtaking(tasks, [task.open for task in tasks]):
            assert caller.error is None, Clause.OPEN.broken(
                f"stopped at {caller.stop} while other tasks open their copies, it raised "
                f"{type(caller.error).__name__}: {caller.error}"
            )
        table = rows(0, 2)
        task = tasks[0]
        self.open(task)
        committable = self.pre_committed(task, table, clause=Clause.OPEN)
        self.commit(sink, committable, clause=Clause.OPEN, when="after many tasks opened copies")
        self.expect_rows(sink, Clause.OPEN, "after many tasks opened copies at once", table)

    def _call(self, method: str, driver: Sink, victim: Committable) -> Any:
        """What this method answers, of which the last three have something to end."""
        if method == "in_doubt":
            return [dict(identity) for identity in driver.in_doubt(self.job)]
        if method == "committed_checkpoints":
            return driver.committed_checkpoints(self.job)
        if method == "abort_all":
            return _raised(driver.abort_all([victim.transaction]))
        if method == "abort":
            return driver.abort(victim.transaction)
        return driver.purge(Checkpoint(self.job, LINEAGE, 1, oldest_retained=1))

    @pytest.mark.parametrize(
        "method", ["in_doubt", "committed_checkpoints", "abort", "abort_all", "purge"]
    )
    def test_silence_is_no_answer(self, sink: Sink, method: str) -> None:
        """The system fails at any line: the method raises, or it has done what it was asked."""
        clause = Clause.MEMORY if method == "committed_checkpoints" else Clause[method.upper()]
        if method == "abort_all" and type(sink).abort_all is Sink.abort_all:
            pytest.skip("this sink does not override `abort_all`: it calls `abort` of each")
        for number in range(2):
            self.commit(sink, self.pre_committed(sink, rows(number, 1), checkpoint=number))
        self.abort(sink, self.pre_committed(sink, rows(2, 1), checkpoint=1))
        memory = self.memory(sink)

        call = partial(self._call, method)

        def met() -> tuple[Sink, Committable]:
            if method == "purge":
                self.abort(sink, self.pre_committed(sink, rows(2, 1)))
            return self.elsewhere(sink), self.pre_committed(sink, rows(10, 1), checkpoint=2)

        driver, victim = met()
        for stop in lines(driver, partial(call, driver, victim), 2 * self.stops, failing=True):
            self.close(driver)
            self.sweep(sink, clause, "before the next try")
            driver, victim = met()
            error = None
            answer = None
            try:
                with watched(driver, failing(driver, stop, self.outage)):
                    answer = call(driver, victim)
            except Exception as raised:
                forget(error := raised)
            when = f"the system did not answer at {stop}; {method} " + (
                "raised" if error else f"answered {answer}"
            )
            if error is None and method == "in_doubt":
                assert answer == [dict(victim.transaction)], clause.broken(when)
            if error is None and method == "committed_checkpoints":
                assert answer == memory, clause.broken(when)
            if error is None and method.startswith("abort"):
                self.expect_state(sink, clause, when, victim)
            if not method.startswith("abort"):
                self.expect_doubts(sink, clause, when, victim)
            self.expect_memory(sink, clause, when, memory)
            self.expect_rows(sink, clause, when, rows(0, 2))

    @pytest.mark.parametrize("then", ["both go on", "the first fails", "the other fails"])
    def test_commits_side_by_side(self, sink: Sink, then: str) -> None:
        """While one is stopped at any line, the same sink object commits another: as `commit_all`
        does in threads. One that fails does so at that line."""
        if type(sink).commit_all is not Sink.commit_all:
            pytest.skip("this sink overrides `commit_all`, which is called one at a time")
        done = list[pa.Table]()
        fail = then != "both go on"
        for stop, tables, (first,) in self.attempts(
            sink, 1, done, self.stops if fail else 0, failing=fail
        ):
            tables.append(rows(100 * stop.number + 10, 2))
            second = self.pre_committed(sink, tables[1], subtask=1)
            driver = self.elsewhere(sink)
            other = partial(
                self._ask_failing, driver, stop if then == "the other fails" else None, second
            )
            fails = self.outage if then == "the first fails" else None
            answers = meet(driver, stop, partial(self.ask, driver, first), other, fails=fails)
            self.close(driver)
            when = f"beside another that is stopped at {stop} ({then})"
            self._all_committed(sink, [*chain(*answers)], [first, second], when)
            done += tables
            self.expect_rows(sink, Clause.THREADS, f"after a commit {when}", *done)
        self.expect_doubts(sink, Clause.THREADS, "after commits side by side")

    @together
    def test_two_drivers_commit_the_same(self, sink: Sink, count: int) -> None:
        """While one is stopped at any line, the other commits the same."""
        done: list[pa.Table] = []
        for stop, tables, made in self.attempts(sink, count, done):
            driver = self.elsewhere(sink)
            other = self.elsewhere(sink)
            when = f"by two drivers, one stopped at {stop}"
            answers = meet(
                driver, stop, partial(self.ask, driver, *made), partial(self.ask, other, *made)
            )
            self.close(driver, other)
            self._all_committed(sink, [*chain(*answers)], [*made, *made], when)
            done += tables
            self.expect_rows(sink, Clause.THREADS, when, *done)

    def _all_committed(
        self, sink: Sink, answers: list[Any], asked: list[Committable], when: str
    ) -> None:
        """Or asked again, if none has said so of one."""
        forget(*answers)
        wrong = [a for a in answers if isinstance(a, CommitOutcome) and a != COMMITTED]
        assert wrong == [], Clause.THREADS.broken(f"commit {when} answers {wrong}")
        done = [c for answer, c in zip(answers, asked, strict=True) if answer == COMMITTED]
        again = [committable for committable in asked if committable not in done]
        self.commit(sink, *again, clause=Clause.THREADS, when=when)

    def test_many_commit_at_once(self, sink: Sink) -> None:
        tables = [rows(10 * p, 2) for p in range(self.many)]
        made = self.participants(sink, tables)
        self.expect_doubts(sink, Clause.IN_DOUBT, f"with {self.many} pre-committed", *made)
        few = self.many // 10
        for committable in made[:few]:
            self.abort(sink, committable)
        first = made[few : self.many // 2]
        other = self.elsewhere(sink)
        when = f"by commit_all of {len(first)}, of two drivers at once"
        with ThreadPoolExecutor(2) as pool:
            both = [
                pool.submit(
                    driver.notify_checkpoint_complete, Checkpoint(self.job, LINEAGE, 0), first
                )
                for driver in (sink, other)
            ]
        answers = list(
            chain(*([e] * len(first) if (e := one.exception()) else one.result() for one in both))
        )
        self.close(other)
        self._all_committed(sink, answers, first * 2, when)
        self.commit(
            sink, *made[few:], clause=Clause.THREADS, when=f"by commit_all of {self.many - few}"
        )
        self.expect_rows(
            sink, Clause.THREADS, f"after commit_all of {self.many - few}", *tables[few:]
        )
        self.commit(
            sink, *made[few:], clause=Clause.IDEMPOTENT, when=f"of {self.many - few}, again"
        )
        self.purge(sink, 0, 0)
        when = (
            f"after a purge of nothing, of {few} aborted ones and {self.many - few} committed ones"
        )
        self.commit(sink, *made[few:], clause=Clause.PURGE, when=when)
        states = {
            outcome.state for outcome in self.outcomes(sink, *made[:few], clause=Clause.PURGE)
        }
        assert states == {CommitState.LOST}, Clause.PURGE.broken(
            f"{when}, commit of the aborted answers {states}"
        )
        if self.memory(sink) is not None:
            self.commit(sink, self.pre_committed(sink, rows(100_000, 1), checkpoint=1))
            self.expect_memory(
                sink, Clause.MEMORY, f"with {self.many - few} committed, and one more", {LINEAGE: 1}
            )

    def test_abort_all_of_many(self, sink: Sink) -> None:
        if type(sink).abort_all is Sink.abort_all:
            pytest.skip("this sink does not override `abort_all`: it calls `abort` of each")
        made = self.participants(sink, [rows(10 * p, 2) for p in range(self.many)])
        driver = self.elsewhere(sink)
        with Clause.ABORT_ALL.guarding(f"abort_all of {self.many}"):
            answers = list(driver.abort_all([each.transaction for each in made]))
        self.close(driver)
        when = f"after abort_all of {self.many}"
        assert answers == [None] * self.many, Clause.ABORT_ALL.broken(f"{when}: {answers[:3]}")
        self.expect_doubts(sink, Clause.ABORT_ALL, when)
        states = {answer.state for answer in self.outcomes(sink, *made, clause=Clause.ABORT_ALL)}
        assert states == {CommitState.LOST}, Clause.ABORT_ALL.broken(
            f"{when}, commit answers {states}"
        )
        self.expect_rows(sink, Clause.ABORT_ALL, when)

    def test_other_threads_call_the_same_sink(self, sink: Sink) -> None:
        """A driver's sweeps have their own thread."""
        first, second = self.participants(sink, [rows(0, 2), rows(10, 2)])
        driver = self.elsewhere(sink)

        def sweep() -> None:
            with Clause.THREADS.guarding("in_doubt and abort in another thread than `open`"):
                list(driver.in_doubt(self.job))
                driver.abort(first.transaction)
            self.commit(driver, second, clause=Clause.THREADS)

        with ThreadPoolExecutor(1) as pool:
            pool.submit(sweep).result()
        self.close(driver)
        self.expect_rows(sink, Clause.THREADS, "after a sweep in another thread", rows(10, 2))

    def test_nothing_grows_with_each_transaction(self, sink: Sink) -> None:
        """In a driver that lives on while its query starts again."""
        driver = copy_of(sink)
        before = dict[str, int]()

        def grown() -> dict[str, int]:
            held = {
                "open files": len(os.listdir("/proc/self/fd")),
                "threads": threading.active_count(),
            }
            return {
                what: more
                for what, count in held.items()
                if (more := count - before.setdefault(what, count)) > 5
            }

        for number in range(12):
            driver.open()
            made = self.participants(sink, [rows(10 * number, 1), rows(10 * number + 5, 1)])
            answers = list(
                driver.notify_checkpoint_complete(Checkpoint(self.job, LINEAGE, 0), made)
            )
            self._all_committed(sink, answers, made, "by `commit_all` of two")
            if number == 1:
                gc.collect()  # what others have left, and would be freed meanwhile
                grown()
        if grown():
            gc.collect()  # takes long, and most sinks leave nothing to it
        assert not grown(), Clause.LEAKS.broken(
            f"opened again, and after 20 more transactions, it has more: {grown()}"
        )

    @together
    def test_an_abort_beside_a_commit(self, sink: Sink, count: int) -> None:
        """Another driver aborts one while a driver is stopped at any line: one of them has its
        way."""
        done: list[pa.Table] = []
        for stop, tables, made in self.attempts(sink, count, done):
            driver = self.elsewhere(sink)
            other = self.elsewhere(sink)
            (*_, answer), aborted = meet(
                driver,
                stop,
                partial(self.ask, driver, *made),
                partial(other.abort, made[-1].transaction),
            )
            self.close(driver, other)
            done += self._decided(
                sink, made, tables, answer, aborted, f"a commit is stopped at {stop}"
            )
            self.expect_rows(
                sink,
                Clause.ABORT_OR_COMMIT,
                f"with an abort while a commit is stopped at {stop}",
                *done,
            )

    def test_a_commit_beside_an_abort(self, sink: Sink) -> None:
        """A driver commits while another, which aborts the same, is stopped at any line: one of
        them has its way."""
        trial = self.pre_committed(sink, rows(800_000, 1))
        driver = self.elsewhere(sink)
        done: list[pa.Table] = []
        for stop in lines(driver, partial(driver.abort, trial.transaction), 2 * self.stops):
            self.close(driver)
            table = rows(100 * stop.number, 2)
            made = self.pre_committed(sink, table)
            driver = self.elsewhere(sink)
            other = self.elsewhere(sink)
            abort = partial(driver.abort, made.transaction)
            commit = partial(self.ask, other, made)
            aborted, (answer,) = meet(driver, stop, abort, commit)
            self.close(other)
            when = f"an abort is stopped at {stop}"
            done += self._decided(sink, [made], [table], answer, aborted, when)
            self.expect_rows(sink, Clause.ABORT_OR_COMMIT, f"with a commit while {when}", *done)

    def _decided(
        self,
        sink: Sink,
        made: list[Committable],
        tables: list[pa.Table],
        answer: Any,
        aborted: Any,
        when: str,
    ) -> list[pa.Table]:
        """Those that are visible, after a commit of these answered so for the last, and an abort of
        that ended so."""
        both = answer == COMMITTED and aborted is None
        assert not both, Clause.ABORT_OR_COMMIT.broken(
            f"while {when}, abort returns, and commit answers COMMITTED"
        )
        finals = self.outcomes(sink, *made, clause=Clause.ABORT_OR_COMMIT)
        expected = {CommitState.COMMITTED} if answer == COMMITTED else set(CommitState)
        expected -= {CommitState.COMMITTED} if aborted is None else set()
        assert finals[-1].state in expected, Clause.ABORT_OR_COMMIT.broken(
            f"while {when}, commit answers {answer}; the abort {aborted or 'returned'}; commit "
            f"again: {finals[-1]}"
        )
        return [table for table, final in zip(tables, finals, strict=True) if final == COMMITTED]

    def test_an_abort_beside_a_pre_commit(self, sink: Sink) -> None:
        """Another driver aborts the transaction before its task pre-commits, or while it is stopped
        at any line."""
        self.needs(Ability.SIDE_BY_SIDE)
        self.needs(Ability.TELL_OPEN)
        trial = self.written(sink, rows(0, 2))
        stops = lines(sink, lambda: sink.snapshot_state(trial), self.stops)
        done = list[pa.Table]()
        self.rollback(sink, trial, Clause.ROLLBACK_AFTER)
        ended = list[Stop]()
        for stop in stops:
            context = self.context(sink)
            table = rows(100 * stop.number, 2)
            unseen = self.never_seen(sink, context)
            driver = self.elsewhere(sink)
            task = copy_of(sink)
            transaction = self.written(task, table, context)
            abort = partial(driver.abort, unseen.transaction)
            committable, _ = meet(
                task, stop, partial(self.sealed, task, transaction, 2), abort, ended=ended
            )
            if isinstance(committable, Exception):
                self.rollback(task, transaction, Clause.ROLLBACK_AFTER)
            else:
                listed = committable.transaction in self.doubts(driver)
                (outcome,) = self.outcomes(driver, committable, clause=Clause.PRE_COMMIT_ABORTED)
                # its proof was there before pre_commit did anything
                aborted_first = stop.number == 0 and stop in ended
                lost = outcome.state is CommitState.LOST and (listed or not aborted_first)
                final = outcome == COMMITTED or lost
                assert final, Clause.PRE_COMMIT_ABORTED.broken(
                    f"aborted at {stop}, it raises nothing and returns {committable.transaction}; "
                    f"then `in_doubt` {'lists it' if listed else 'does not list it'}, and commit "
                    f"answers {outcome}"
                )
                done += [table] * (outcome == COMMITTED)
            self.close(driver, task)
        self.expect_rows(sink, Clause.PRE_COMMIT_ABORTED, "after aborts beside pre_commit", *done)
        self.sweep(sink, Clause.PRE_COMMIT_ABORTED, "after aborts beside pre_commit")

    def test_a_commit_beside_a_pre_commit(self, sink: Sink) -> None:
        """A driver commits a transaction that is open, or that is stopped at any line of
        `pre_commit`: after the target was set back, a record may name it."""
        self.needs(Ability.SIDE_BY_SIDE)
        self.needs(Ability.TELL_OPEN)
        trial = self.written(sink, rows(0, 2))
        stops = lines(sink, lambda: sink.snapshot_state(trial), self.stops)
        self.rollback(sink, trial, Clause.ROLLBACK_AFTER)
        done = list[pa.Table]()

        def ask_if_open(driver: Sink, unseen: Committable) -> list[Any]:
            # The proof of `unseen` is that of other rows, which no record names with what is
            # pre-committed already.
            if unseen.proof and unseen.transaction in [
                dict(one) for one in driver.in_doubt(self.job)
            ]:
                return [CommitOutcome.unknown("it is pre-committed by now")]
            return self.ask(driver, unseen)

        for stop in stops:
            context = self.context(sink)
            table = rows(100 * stop.number, 2)
            unseen = self.never_seen(sink, context)
            driver = self.elsewhere(sink)
            task = copy_of(sink)
            transaction = self.written(task, table, context)
            committable, answers = meet(
                task,
                stop,
                partial(task.snapshot_state, transaction),
                partial(ask_if_open, driver, unseen),
            )
            (answer,) = answers if isinstance(answers, list) else [answers]
            when = f"asked when its pre_commit was at {stop}, commit answers {answer!r}"
            refused = isinstance(committable, Exception)
            if refused:
                self.rollback(task, transaction, Clause.ROLLBACK_AFTER)
                made = unseen
            else:
                made = committable.of(sink.name, 0, Fingerprint(2))
            then = f"{when}; pre_commit then {'raised' if refused else 'returned'}"
            (final,) = self.outcomes(driver, made, clause=Clause.COMMIT_OPEN)
            told = answer.state if isinstance(answer, CommitOutcome) else CommitState.UNKNOWN
            kept = told in (CommitState.UNKNOWN, final.state)
            expected = refused or final == COMMITTED or told is CommitState.LOST
            is_right = kept and expected
            assert is_right, Clause.COMMIT_OPEN.broken(f"{then}, and commit answers {final} now")
            done += [table] * (final == COMMITTED)
            self.expect_rows(sink, Clause.COMMIT_OPEN, f"{then}, and commit {final} now", *done)
            self.close(driver, task)
        self.sweep(sink, Clause.COMMIT_OPEN, "after commits beside pre_commit")

    def test_purge_removes_what_dead_tasks_left(self, sink: Sink) -> None:
        """Of several old checkpoints and drivers: a purge may be the first one for a while."""
        if type(sink).purge is Sink.purge:
            pytest.skip("this sink does not override `purge`")
        self.needs(Ability.DEAD_TASKS)
        self.needs(Ability.SIDE_BY_SIDE)  # what a dead task holds in this process, its death frees
        self.commit(sink, self.pre_committed(sink, rows(0, 1)))
        before = self.leftovers(sink)
        dead = list[Any]()
        for checkpoint in range(4):
            for generation in (1, 2):
                task = copy_of(sink)
                context = self.context(task, checkpoint=checkpoint, generation=generation)
                dead.append(self.written(task, rows(10, 2), context))
                self.close(task)
        self.commit(sink, self.pre_committed(sink, rows(1, 1), checkpoint=20))
        self.purge(sink, 20, 4)
        when = (
            f"when {len(dead)} tasks of checkpoints 0 to 3 have died after `write`, and a purge of "
            "those before 4"
        )
        self.expect_no_leftovers(sink, when, before, Clause.PURGE_LEFTOVERS)

    @pytest.mark.parametrize("stopped", ["pre_commit", "abort"])
    def test_a_pre_commit_beside_another_task_or_a_sweep(self, sink: Sink, stopped: str) -> None:
        """One of these is stopped at any line, and a task goes ahead.

        It may fail; what it pre-commits is in doubt.
        """
        self.needs(Ability.SIDE_BY_SIDE)
        done: list[pa.Table] = []

        def task(first: int) -> tuple[Sink, Callable[[], Committable | None]]:
            copy = copy_of(sink)
            table = rows(first, 2)
            transaction = self.written(copy, table)

            def seal() -> Committable | None:
                try:
                    committable = copy.snapshot_state(transaction)
                except Exception as error:
                    forget(error)
                    self.rollback(copy, transaction, Clause.ROLLBACK_AFTER)
                    return None
                done.append(table)
                return committable.of(sink.name, 0, Fingerprint(2))

            return copy, seal

        def other(first: int) -> tuple[Sink, Callable[[], Any]]:
            if stopped == "pre_commit":
                return task(first)
            driver = self.elsewhere(sink)
            return driver, partial(self.abort, driver, self.pre_committed(sink, rows(first, 2)))

        asked, call = other(0)
        stops = lines(asked, call, 2 * self.stops)
        self.sweep(sink, Clause.IN_DOUBT, "of a first one")
        done.clear()
        for number, stop in enumerate(stops):
            self.close(asked)
            (asked, call), (beside, seal) = other(20 * number), task(20 * number + 10)
            answers = meet(asked, stop, call, seal)
            self.close(beside)
            if error := next((answer for answer in answers if isinstance(answer, Exception)), None):
                raise error
            made = [answer for answer in answers if answer]
            when = f"with a pre_commit while {stopped} is at {stop}"
            if len(made) == 1 + (stopped == "pre_commit"):  # else a sweep is due
                self.expect_doubts(sink, Clause.IN_DOUBT, when, *made)
            self.commit(sink, *made, when=when)
            self.sweep(sink, Clause.IN_DOUBT, when)
        self.expect_rows(sink, Clause.COMMIT, f"after pre_commits beside {stopped}", *done)

    def _purge(self, sink: Sink, done: list[pa.Table]) -> tuple[Sink, Callable[[], None]]:
        """A driver that has something to purge, and its purge. `done` gets what is visible."""
        if type(sink).purge is Sink.purge:
            pytest.skip(
                "this sink does not override `purge`: old proofs and what dead tasks left stay "
                "there for ever"
            )
        first = 10 * len(done)
        for checkpoint in (first, first + 1):
            done.append(rows(10 * checkpoint, 2))
            self.commit(sink, self.pre_committed(sink, done[-1], checkpoint=checkpoint))
        self.abort(sink, self.pre_committed(sink, rows(0, 1), checkpoint=first))
        driver = self.elsewhere(sink)
        return driver, partial(
            driver.purge, Checkpoint(self.job, LINEAGE, first + 1, oldest_retained=first + 1)
        )

    @pytest.mark.parametrize("stopped", ["purge", "pre_commit"])
    def test_a_purge_beside_a_pre_commit(self, sink: Sink, stopped: str) -> None:
        """Of a task of a newer checkpoint. One is stopped at any line, and the other goes ahead."""
        self.needs(Ability.SIDE_BY_SIDE)
        done = list[pa.Table]()
        trial = self.written(sink, rows(0, 1), checkpoint=10**6)
        self._purge(sink, done)[1]()  # from now on each has as much to remove
        driver, purge = self._purge(sink, done)
        asked, call = (
            (driver, purge) if stopped == "purge" else (sink, partial(sink.snapshot_state, trial))
        )
        stops = lines(asked, call, 2 * self.stops)
        self.rollback(sink, trial, Clause.ROLLBACK_AFTER)
        self.sweep(sink, Clause.ROLLBACK_AFTER, "after a rollback")
        for stop in stops:
            self.close(driver)
            driver, purge = self._purge(sink, done)
            task = copy_of(sink)
            table = rows(100 * len(done) + 50, 2)
            newer = 10 * len(done)
            if stopped == "purge":
                work = partial(
                    self.pre_committed, task, table, None, Clause.PURGE_BESIDE, checkpoint=newer
                )
                _, committable = meet(driver, stop, purge, work)
            else:
                transaction = self.written(task, table, checkpoint=newer)
                seal = partial(self.sealed, task, transaction, 2, clause=Clause.PURGE_BESIDE)
                committable, _ = meet(task, stop, seal, purge)
            if isinstance(committable, Exception):
                raise committable
            when = f"with {stopped} stopped at {stop}"
            self.expect_doubts(sink, Clause.PURGE_BESIDE, when, committable)
            self.commit(sink, committable, clause=Clause.PURGE_BESIDE, when=when)
            self.close(task)
            done.append(table)
        when = f"with a {stopped} stopped at {', or at '.join(map(str, stops))}"
        self.expect_rows(sink, Clause.PURGE_BESIDE, when, *done)

    @pytest.mark.parametrize("stopped", ["purge", "committed_checkpoints"])
    def test_a_purge_beside_committed_checkpoints(self, sink: Sink, stopped: str) -> None:
        """It answers as before, or raises. One is stopped at any line, and the other goes ahead."""
        done: list[pa.Table] = []
        self._purge(sink, done)[1]()
        driver, purge = self._purge(sink, done)
        ask: Callable[[], Any] = partial(driver.committed_checkpoints, self.job)
        for stop in lines(driver, purge if stopped == "purge" else ask, 2 * self.stops):
            self.close(driver)
            driver, purge = self._purge(sink, done)
            starting = self.elsewhere(sink)
            memory = self.memory(sink)
            ask = partial(starting.committed_checkpoints, self.job)
            answer = (
                meet(driver, stop, purge, ask)[1]
                if stopped == "purge"
                else meet(starting, stop, ask, purge)[0]
            )
            self.close(starting)
            when = f"with {stopped} stopped at {stop}"
            assert answer == memory or isinstance(answer, Exception), Clause.PURGE_BESIDE.broken(
                f"{when}, committed_checkpoints is {answer}, and was {memory}"
            )
            self.expect_memory(sink, Clause.PURGE_BESIDE, when, memory)
