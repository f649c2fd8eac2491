"""A system that does not answer, drivers at the same time: the sink is stopped at any line of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from sinks.testing.clauses import Ability, Clause
from sinks.testing.kit import Sink, SinkTests, copy_of, rows
from sinks.testing.lines import at, lines, watched
from sinks.transaction import CommitOutcome, CommitState, Committable

COMMITTED = CommitOutcome.COMMITTED
_BLOCKED = 0.1  # seconds until one that waits for the other is let wait


class Beside:
    """A call in a thread, begun while another is stopped; that goes on when this has ended or waits."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._answer: Any = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            self._answer = self._call()
        except Exception as error:
            self._answer = error

    def start(self) -> None:
        self._thread.start()
        self._thread.join(_BLOCKED)

    def join(self) -> Any:
        """What the call answered or raised; None if it was not begun."""
        if self._thread.ident is not None:
            self._thread.join()
        return self._answer


class Faults(SinkTests):
    stops: ClassVar[int] = 6
    """Lines of a method at which it is stopped, at most."""

    def _stops(self, sink: Sink, method: str) -> list[int]:
        committable = self.pre_committed(sink, rows(800_000, 1))
        driver = copy_of(sink)
        driver.open()
        argument = committable.transaction if method == "abort" else committable
        found = lines(driver, lambda: getattr(driver, method)(argument), self.stops)
        driver.close()
        return found

    def test_a_system_that_does_not_answer_is_no_outcome(self, sink: Sink) -> None:
        """It fails at any line of `commit`, once, and is asked again."""
        tables = [rows(800_000, 1)]
        for number in self._stops(sink, "commit"):
            tables.append(rows(10 * number, 2))
            committable = self.pre_committed(sink, tables[-1])
            driver = copy_of(sink)
            driver.open()
            answer: Any = None
            try:
                with watched(driver, at(number, self._fail)):
                    answer = driver.commit(committable)
            except Exception as error:
                answer = error
            driver.close()
            assert isinstance(answer, Exception) or answer == COMMITTED, Clause.ASK_AGAIN.broken(
                f"{self.outage!r} at line {number} of commit, and it answers {answer}"
            )
            if isinstance(answer, Exception):
                self.commit(sink, committable, clause=Clause.ASK_AGAIN, when="asked again")
        self.expect_rows(sink, Clause.ASK_AGAIN, "after commits that were asked again", *tables)
        self.expect_doubts(sink, Clause.ASK_AGAIN, "after commits that were asked again")

    def _fail(self) -> None:
        raise self.outage

    def test_a_task_fails_inside_pre_commit_and_rolls_back(self, sink: Sink) -> None:
        first = self.begun(sink)
        self.write(sink, first, rows(0, 2))
        numbers = lines(sink, lambda: sink.snapshot_state(first), self.stops)
        self.rollback(sink, first, Clause.ROLLBACK_AFTER)
        before = self.leftovers(sink)
        for number in numbers:
            transaction = self.begun(sink)
            self.write(sink, transaction, rows(0, 2))
            try:
                with watched(sink, at(number, self._fail)):
                    sink.snapshot_state(transaction)
            except Exception:
                self.rollback(sink, transaction, Clause.ROLLBACK_AFTER)
            else:
                self.rollback(sink, transaction, Clause.ROLLBACK_AFTER)
            self.close(sink)
            when = f"after pre_commit that failed at its line {number}, then rollback"
            self.sweep(sink, Clause.ROLLBACK_AFTER, when)
            self.expect_no_leftovers(sink, when, before)
        self.expect_rows(sink, Clause.ROLLBACK_AFTER, "after pre_commits that failed, then rollback")

    def test_commits_side_by_side(self, sink: Sink) -> None:
        """While one is stopped at any line of `commit`, the same sink object commits another."""
        tables = [rows(800_000, 1)]
        for number in self._stops(sink, "commit"):
            tables += [rows(20 * number, 2), rows(20 * number + 10, 2)]
            one, two = (self.pre_committed(sink, tables[n], subtask=n + 2) for n in (-2, -1))
            driver = copy_of(sink)
            driver.open()
            answers = self._beside(driver, number, lambda: driver.commit(two), lambda: driver.commit(one))  # noqa: B023
            self.close(driver)
            self._all_committed(sink, answers, [two, one], f"beside another at line {number} of commit")
        self.expect_rows(sink, Clause.THREADS, "after commits side by side", *tables)
        self.expect_doubts(sink, Clause.THREADS, "after commits side by side")

    def test_two_drivers_commit_the_same(self, sink: Sink) -> None:
        """While one is stopped at any line of `commit`, the other commits it."""
        tables = [rows(800_000, 1)]
        for number in self._stops(sink, "commit"):
            tables.append(rows(10 * number, 2))
            one, driver, other = self.pre_committed(sink, tables[-1]), copy_of(sink), copy_of(sink)
            driver.open()
            other.open()
            answers = self._beside(driver, number, lambda: other.commit(one), lambda: driver.commit(one))  # noqa: B023
            self.close(driver)
            self.close(other)
            self._all_committed(sink, answers, [one, one], f"by two drivers, one stopped at line {number} of commit,")
            self.expect_rows(
                sink, Clause.THREADS, f"after two drivers, one stopped at line {number} of commit", *tables
            )

    def _beside(self, driver: Sink, number: int, other: Callable[[], Any], call: Callable[[], Any]) -> list[Any]:
        """The answers of `other`, and of `call`, which is stopped at a line meanwhile."""
        beside = Beside(other)
        try:
            with watched(driver, at(number, beside.start)):
                answer = call()
        except Exception as error:
            answer = error
        return [beside.join(), answer]

    def _all_committed(self, sink: Sink, answers: list[Any], asked: list[Committable], when: str) -> None:
        """Or asked again, if none has said so of one."""
        wrong = [a for a in answers if isinstance(a, CommitOutcome) and a != COMMITTED]
        assert wrong == [], Clause.THREADS.broken(f"commit {when} answers {wrong}")
        done = [c for answer, c in zip(answers, asked, strict=True) if answer == COMMITTED]
        again = [committable for committable in asked if committable not in done]
        self.commit(sink, *again, clause=Clause.THREADS, when=when)

    def test_many_commit_at_once(self, sink: Sink) -> None:
        made = [self.pre_committed(sink, rows(10 * p, 2), subtask=p) for p in range(20)]
        self.commit(sink, *made, clause=Clause.THREADS, when="by commit_all of 20")
        self.expect_rows(sink, Clause.THREADS, "after commit_all of 20", *(rows(10 * p, 2) for p in range(20)))

    def test_a_checkpoint_becomes_visible_as_a_whole(self, sink: Sink) -> None:
        if type(sink).commit_all is Sink.commit_all:
            pytest.skip("this sink does not override `commit_all`: participants become visible one by one")
        self.needs(Ability.AT_ONCE)
        tables = [rows(10 * p, 2) for p in range(3)]
        made = [self.pre_committed(sink, table, subtask=p) for p, table in enumerate(tables)]
        driver, trial = copy_of(sink), [self.pre_committed(sink, rows(800_000 + p, 1), subtask=p) for p in range(2)]
        numbers = lines(driver, lambda: self.answers(driver, *trial), 3 * self.stops)
        seen: list[int] = []

        def look(number: int) -> None:
            if number in numbers:
                seen.append(self.seen(sink).total() - len(trial))

        with watched(driver, look):
            self.answers(driver, *made)
        self.close(driver)
        partly = [count for count in seen if count not in (0, 6)]
        assert partly == [], Clause.AT_ONCE.broken(f"amid commit_all, {partly[0]} of 6 rows were visible")

    def test_an_abort_beside_a_commit(self, sink: Sink) -> None:
        """Another driver aborts while one is stopped at any line of `commit`: one of them has its way."""
        tables = [rows(800_000, 1)]
        for number in self._stops(sink, "commit"):
            table = rows(10 * number, 2)
            committable = self.pre_committed(sink, table)
            driver, other = copy_of(sink), copy_of(sink)
            driver.open()
            other.open()
            call = lambda: driver.commit(committable)  # noqa: B023, E731
            aborted, answer = self._beside(driver, number, lambda: _aborted(other, committable), call)  # noqa: B023
            self.close(driver)
            self.close(other)
            both = answer == COMMITTED and aborted == "aborted"
            assert not both, Clause.ABORT_OR_COMMIT.broken(
                f"an abort at line {number} of commit returns, and so does the commit, with COMMITTED"
            )
            (final,) = self.outcomes(sink, committable, clause=Clause.ABORT_OR_COMMIT)
            expected = {CommitState.COMMITTED} if answer == COMMITTED else set(CommitState)
            expected -= {CommitState.COMMITTED} if aborted == "aborted" else set()
            assert final.state in expected, Clause.ABORT_OR_COMMIT.broken(
                f"commit answered {answer}, abort at its line {number} {aborted!r}, and commit again {final}"
            )
            if final.state is CommitState.COMMITTED:
                tables.append(table)
            self.expect_rows(sink, Clause.ABORT_OR_COMMIT, f"with an abort at line {number} of commit", *tables)


def _aborted(sink: Sink, committable: Committable) -> str:
    sink.abort(committable.transaction)
    return "aborted"
