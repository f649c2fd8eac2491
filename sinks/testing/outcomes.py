"""What commit and abort answer, and what `in_doubt` lists: of one's own transactions, of others, of
none."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

import pyarrow as pa
import pytest

from sinks.base import Sink
from sinks.errors import CommittedError
from sinks.optional import JointCommitting, WholeCommitting
from sinks.testing.clauses import Ability, Clause
from sinks.testing.kit import (
    LINEAGE,
    SCHEMA,
    SinkTests,
    closed_later,
    copy_of,
    forget,
    in_pieces,
    rows,
)
from sinks.testing.lines import Steps, Stop, watched
from sinks.transaction import Checkpoint, CommitOutcome, CommitState, Committable, Fingerprint

EACH_PART: list[dict[str, Any]] = [
    {},
    {"lineage": "feedbeef"},
    {"checkpoint": 1},
    {"subtask": 1},
    {"generation": 2},
]
EACH_PART += [{"round": 1}, {"attempt": 1}, {"task_attempt": 2}]
"""Names that differ from the first in one part each."""

NAMES = [
    ("a:b+c", "a+b:c"),
    ("a.b+c", "a+b.c"),
    ("a-b+c", "a+b-c"),
    ("a/b+c", "a+b/c"),
    ("a_b+c", "a+b_c"),
]
NAMES += [
    ("job+sink", "JOB+sink"),
    ("job+sink", "job+Sink"),
    ("job+sink", "job+sink2"),
    ("job+s_nk", "job+sink"),
]
NAMES += [("job+sink", "job +sink"), ("job+sink", "job+sink "), ("job+sink", "jöb+sink")]
NAMES += [
    ("job+s?n*", "job+sink"),
    ("j.b+s.nk", "job+sink"),
    ("%+sink", "job+sink"),
    ("_+sink", "j+sink"),
]
NAMES += [("job+sink", "jo+sink"), ("job+sink", "job-2+sink")]
LONG_JOBS = f"{'j' * 300}1+sink", f"{'j' * 300}2+sink"
LONG_SINKS = f"job+{'s' * 300}1", f"job+{'s' * 300}2"
LONG_ENDS = f"1{'j' * 300}+sink", f"2{'j' * 300}+sink"
NAMES += [LONG_JOBS, LONG_SINKS, LONG_ENDS]
NAMES += [("注文+sink", "請求+sink"), ("job+注文", "job+請求"), ("straße+sink", "strasse+sink")]
NAMES += [("caf\u00e9+sink", "cafe\u0301+sink")]
NAMES += [("job+sink", "other job/ü 'o\"`; DROP TABLE orders --%s_%+sink")]
"""Pairs of job and sink."""


def _short(name: str) -> str:
    return name if len(name) < 99 else f"{name.replace(300 * name[10], '…')} of {len(name)}"


class Outcomes(SinkTests):
    # ------------------------------------------------------------------ abort
    def test_abort_leaves_nothing_and_may_be_repeated(self, sink: Sink) -> None:
        other = self.pre_committed(sink, rows(50, 1), subtask=1)
        driver = copy_of(sink)
        before = self.leftovers(sink)
        self.expect_doubts(driver, Clause.IN_DOUBT, "with one pre-committed", other)
        committable = self.pre_committed(sink, in_pieces(rows(0, self.many)), slot=0)
        self.abort(driver, committable)
        self.expect_rows(sink, Clause.ABORT, "after abort")
        for asked in (sink, driver):
            self.expect_doubts(asked, Clause.IN_DOUBT_RESOLVED, "after abort", other)
        self.abort(driver, other)
        self.expect_no_leftovers(sink, "after abort", before, Clause.ABORT_LEFTOVERS)
        for asked in (sink, copy_of(sink)):
            self.abort(asked, committable, Clause.ABORT_AGAIN, "again")
        self.expect_rows(sink, Clause.ABORT_AGAIN, "after three aborts")
        self.commit(sink, self.pre_committed(sink, rows(10, 5), slot=0), clause=Clause.ABORT)
        self.expect_rows(
            sink, Clause.ABORT, "after an abort, and a commit of the next attempt", rows(10, 5)
        )

    def test_commit_after_abort_is_lost_and_stays_lost(self, sink: Sink) -> None:
        committable = self.pre_committed(sink, rows(0, 5))
        self.abort(sink, committable)
        for asked in (sink, copy_of(sink)):
            outcome = self.expect_state(asked, Clause.LOST, "after abort", committable)
            assert outcome.reason, Clause.COMMIT_OUTCOME.broken("LOST without a reason")
            self.abort(asked, committable, Clause.ABORT_AGAIN, "after a commit that was told LOST")
        self.expect_rows(sink, Clause.LOST, "after abort, then commit")
        self.expect_doubts(sink, Clause.IN_DOUBT_RESOLVED, "after abort, then commit")

    def test_abort_after_commit_raises_and_changes_nothing(self, sink: Sink) -> None:
        committable = self.pre_committed(sink, rows(0, 5))
        self.commit(sink, committable)
        for asked in (sink, copy_of(sink)):
            asked.open()
            try:
                asked.abort(committable.transaction)
            except CommittedError:
                pass
            except Exception as error:
                raise AssertionError(
                    Clause.ABORT_COMMITTED.broken(f"abort after commit raised {error!r}")
                ) from error
            else:
                raise AssertionError(
                    Clause.ABORT_COMMITTED.broken("abort after commit raised nothing")
                )
        self.expect_rows(sink, Clause.ABORT_COMMITTED, "after commit, then abort", rows(0, 5))
        self.commit(
            sink, committable, clause=Clause.ABORT_COMMITTED, when="after commit, then abort"
        )

    # ------------------------------------------------------------------ names
    def test_transactions_are_told_apart_by_each_part_of_their_names(self, sink: Sink) -> None:
        """As of drivers and tasks that died, all in doubt at once."""
        self.rollback(sink, self.begun(sink))  # whatever a first transaction sets up is there
        tables = [rows(10 * n, 2) for n in range(len(EACH_PART))]
        usual: dict[str, Any] = {"task_attempt": 1}
        made = [
            self.pre_committed(sink, table, **(usual | parts), slot=n)
            for n, (parts, table) in enumerate(zip(EACH_PART, tables, strict=True))
        ]
        for committable, parts in zip(made[1:], EACH_PART[1:], strict=True):
            assert dict(committable.transaction) != dict(made[0].transaction), Clause.NAMES.broken(
                f"two that differ in {next(iter(parts))} are both {dict(made[0].transaction)}"
            )
        for committable in made:
            self.expect_owned(sink, committable, "which it pre-committed")
        for identity in ({}, {"another": 1}, dict.fromkeys(made[0].transaction, 1)):
            with Clause.OWNS.guarding(f"owns of {identity}"):
                sink.owns(self.job, identity)
        self.expect_doubts(
            sink, Clause.IN_DOUBT, f"with transactions that differ in {EACH_PART[1:]}", *made
        )
        for number, (committable, parts) in enumerate(zip(made, EACH_PART, strict=True), 1):
            self.commit(sink, committable, clause=Clause.NAMES, when=f"of the one with {parts}")
            self.expect_named(sink, f"after the commit of the one with {parts}", *tables[:number])

    def test_owns_knows_its_own_whatever_became_of_it(self, sink: Sink) -> None:
        """A driver that starts asks about the newest record, whose transactions may have ended."""
        waiting, done, gone = (
            self.pre_committed(sink, rows(10 * n, 2), subtask=n) for n in range(3)
        )
        self.commit(sink, done)
        self.abort(sink, gone)
        driver = self.elsewhere(sink)
        for asked in (sink, driver):
            self.open(asked)
            self.expect_owned(asked, waiting, "which is in doubt")
            self.expect_owned(asked, done, "which is committed")
            self.expect_owned(asked, gone, "which is aborted")
        self.abort(sink, waiting)
        self.commit(sink, self.pre_committed(sink, rows(30, 2), checkpoint=10))
        self.purge(sink, 10, 10)
        for committable in (waiting, done, gone):
            self.expect_owned(driver, committable, "which was purged")

    def test_what_is_pre_committed_lives_on_when_its_slot_is_used_again(self, sink: Sink) -> None:
        """By the next checkpoint, by another driver, one of which is a zombie, or by another job or
        sink. Others begin, and are rolled back, aborted or committed."""
        shown = list[pa.Table]()
        others: list[dict[str, Any]] = [{"checkpoint": 1}, {"generation": 2}, {"round": 1}]
        others += [{"lineage": "feedbeef"}, {"job": "another"}, {}]
        for number, parts in enumerate(others):
            table = rows(10 * number, 3)
            victim = self.pre_committed(sink, table, slot=0)
            other = copy_of(sink) if parts else self.sibling(sink)
            transaction = self.written(other, rows(900, 2), slot=0, **parts)
            if number % 2:
                self.rollback(other, transaction)
            else:
                late = self.sealed(other, transaction, 2, clause=Clause.SLOT)
                self.abort(other, late, Clause.SLOT)
            self.close(other)
            how = "was rolled back" if number % 2 else "was pre-committed and aborted"
            whose = f"with {parts}" if parts else f"of sink {other.name!a}"
            when = f"after another transaction {whose} began with the same `slot`, and {how}"
            (outcome,) = self.outcomes(sink, victim, clause=Clause.SLOT)
            rolled_back = outcome.state is CommitState.LOST and Ability.SLOT in self.cannot
            assert rolled_back or outcome == CommitOutcome.COMMITTED, Clause.SLOT.broken(
                f"{when}, commit answers {outcome}"
            )
            shown += [] if rolled_back else [table]
            self.expect_rows(sink, Clause.SLOT, when, *shown)

    def test_abort_all_answers_for_each(self, sink: Sink) -> None:
        """One is committed, one in doubt, one aborted already, and one was never seen, in
        several orders."""
        what = ["committed", "in doubt", "aborted already", "in doubt, too", "never seen"]
        shown = list[pa.Table]()
        for first in range(0, len(what), 2):
            tables = [rows(100 * first + 10 * n, 2) for n in range(5)]
            made = [
                self.pre_committed(sink, table, subtask=n, checkpoint=first)
                for n, table in enumerate(tables)
            ]
            done, waiting, gone, too, beside = made
            self.commit(sink, done)
            self.abort(sink, gone)
            shown += [tables[0]]
            asked = [done, waiting, gone, too]
            context = self.context(sink)
            with suppress(pytest.skip.Exception):
                asked.append(self.never_seen(sink, context))
            order = [(first + n) % len(asked) for n in range(len(asked))]
            driver = self.elsewhere(sink)
            when = f"of transactions that are {', '.join(what[n] for n in order)}"
            with Clause.ABORT_ALL.guarding(f"abort_all {when},"):
                answers = driver.abort_all(
                    [json.loads(json.dumps(dict(asked[n].transaction))) for n in order]
                )
            self.close(driver)
            assert isinstance(answers, Sequence), Clause.ABORT_ALL.broken(
                f"{when}, it answers {answers!r}"
            )
            as_documented = [
                isinstance(answer, CommittedError) if n == 0 else answer is None
                for n, answer in zip(order, answers, strict=False)
            ]
            assert len(answers) == len(asked), Clause.ABORT_ALL.broken(
                f"{when}, {len(answers)} answers for {len(asked)} transactions: {answers}"
            )
            assert all(as_documented), Clause.ABORT_ALL.broken(
                f"{when}, it answers {answers}: CommittedError for what is committed, and None for "
                "the others, are right"
            )
            when = f"after abort_all {when}"
            for committable in (waiting, gone, too):
                self.expect_state(sink, Clause.ABORT_ALL, when, committable)
            self.expect_doubts(sink, Clause.ABORT_ALL, when, beside)
            self.commit(sink, done, clause=Clause.ABORT_ALL, when=when)
            self.expect_rows(sink, Clause.ABORT_ALL, when, *shown)
            if len(asked) == len(what):
                states = CommitState.UNKNOWN, CommitState.LOST
                outcome = self.expect_state(sink, Clause.ABORT_ALL, when, asked[-1], *states)
                if outcome.state is CommitState.LOST:
                    self._stays_lost(sink, context, Clause.ABORT_ALL, shown)
            self.sweep(sink, Clause.ABORT_ALL, "of what else is in doubt")

    def test_commit_and_abort_end_only_what_they_name(self, sink: Sink) -> None:
        """Names of which one begins with another."""
        parts: list[dict[str, Any]] = [
            {"subtask": 1, "task_attempt": 1},
            {"subtask": 1, "task_attempt": 10},
        ]
        parts += [{"subtask": 10, "task_attempt": 1}, {"subtask": 10, "task_attempt": 10}]
        tables = [rows(10 * n, 2) for n in range(4)]
        made = [
            self.pre_committed(sink, table, **about, slot=n)
            for n, (about, table) in enumerate(zip(parts, tables, strict=True))
        ]
        self.abort(sink, made[2])
        self.expect_doubts(sink, Clause.ABORT, "with the third of four aborted", *made[:2], made[3])
        self.commit(sink, made[0], clause=Clause.ABORT, when="beside an abort")
        self.expect_rows(sink, Clause.COMMIT_BY_NAME, "with one of three committed", tables[0])
        self.expect_doubts(
            sink, Clause.COMMIT_BY_NAME, "with one of three committed", made[1], made[3]
        )
        self.commit(sink, made[1], made[3], clause=Clause.COMMIT_BY_NAME)
        self.expect_rows(
            sink, Clause.COMMIT_BY_NAME, "with three committed", *tables[:2], tables[3]
        )
        self.abort(sink, self.pre_committed(sink, rows(40, 2), subtask=2))
        self.expect_rows(
            sink, Clause.ABORT, "after an abort beside three committed", *tables[:2], tables[3]
        )
        self.commit(
            sink,
            made[0],
            made[1],
            made[3],
            clause=Clause.ABORT,
            when="again, after an abort of another",
        )
        self.expect_state(sink, Clause.LOST, "after commits and aborts of others", made[2])

    @pytest.mark.parametrize(
        "loser", ["is stopped", "is killed", "goes on", "of an older driver goes on"]
    )
    def test_two_attempts_of_one_subtask_are_open_at_once(self, sink: Sink, loser: str) -> None:
        """Spark's speculation, or a zombie.

        The slow one may fail, and what it pre-commits is aborted. The rows of the other are
        visible, once.
        """
        self.needs(Ability.SIDE_BY_SIDE)
        fast = copy_of(sink)
        slow = copy_of(sink)
        late = None
        losing = self.begun(slow, slot=0)
        winning = self.begun(fast, slot=1, generation=2 if "older" in loser else 1)
        for first in (0, 10):
            self.write(slow, losing, rows(first, 5))
            self.write(fast, winning, rows(first, 5))
        winner = self.sealed(fast, winning, 10, clause=Clause.NAMES)
        self.close(fast)
        when = f"when another attempt of the same subtask {loser}"
        if loser == "is stopped":
            self.rollback(slow, losing)
        if "goes on" in loser:
            try:
                slow.write(losing, rows(20, 5).to_batches()[0])
                late = slow.snapshot_state(losing)
            except Exception as error:
                forget(error)
                with suppress(Exception):  # as in a task, where it is left to the sweep
                    slow.rollback(losing)
        if late is not None:
            self.expect_doubts(sink, Clause.IN_DOUBT, when, winner, late)
            self.abort(sink, late)
        if loser != "is killed" or Ability.TELL_OPEN not in self.cannot:
            self.expect_doubts(sink, Clause.IN_DOUBT, when, winner)
        self.commit(sink, winner, clause=Clause.NAMES, when=when)
        self.expect_rows(sink, Clause.NAMES, when, rows(0, 5), rows(10, 5))
        if loser == "is killed":
            self.rollback(slow, losing)
        self.close(slow)
        self.expect_rows(sink, Clause.NAMES, f"{when}, at the end", rows(0, 5), rows(10, 5))

    # ------------------------------------------------------------------ in doubt
    def test_in_doubt_lists_no_other_sinks_transactions(self, sink: Sink) -> None:
        other = self.sibling(sink)
        ours = self.pre_committed(sink, rows(0, 2), slot=0, task_attempt=1)
        theirs = self.pre_committed(other, rows(10, 2), slot=0, task_attempt=1)
        assert dict(ours.transaction) != dict(theirs.transaction), Clause.NAMES.broken(
            f"those of two sinks of a job are both {dict(ours.transaction)}"
        )
        self.expect_doubts(
            sink, Clause.IN_DOUBT_SINK, f"with one of sink {other.name!r}, too", ours
        )
        self.expect_doubts(
            other, Clause.IN_DOUBT_SINK, f"with one of sink {sink.name!r}, too", theirs
        )
        self.abort(other, theirs)
        self.close(other)
        self.commit(sink, ours, clause=Clause.ABORT, when="after an abort by another sink")
        self.expect_rows(
            sink, Clause.IN_DOUBT_SINK, "with one committed, the other sink's aborted", rows(0, 2)
        )

    @pytest.mark.parametrize(("ours", "theirs"), NAMES, ids=_short)
    def test_names_that_look_alike_are_not_the_same(
        self, sink: Sink, ours: str, theirs: str
    ) -> None:
        """Of job and sink, where the names of both begin alike, differ in case, or meet when they
        are joined."""
        prefix = uuid.uuid4().hex[:8]
        made = []
        for at, name in enumerate((ours, theirs)):
            job, _, own = name.partition("+")
            job = f"{prefix}{job}"
            named = self.of_name(sink, own)
            done = self.pre_committed(
                named,
                rows(100 * at, 2),
                clause=Clause.NAMES,
                job=job,
                checkpoint=at,
                task_attempt=1,
            )
            self.commit(named, done, clause=Clause.IN_DOUBT_JOB)
            gone = self.pre_committed(
                named, rows(100 * at + 10, 2), job=job, checkpoint=at, task_attempt=2
            )
            self.abort(named, gone)
            left = self.pre_committed(
                named, rows(100 * at + 20, 2), job=job, checkpoint=at, task_attempt=3
            )
            made.append((job, named, done, gone, left))
        for at, (job, named, _, _, left) in enumerate(made):
            alike = f"beside job and sink {(theirs, ours)[at]!a}, for {(ours, theirs)[at]!a}"
            self.expect_doubts(named, Clause.IN_DOUBT_JOB, alike, left, job=job)
            self.expect_owned(named, left, "which it pre-committed", job)
            memory = self.memory(named, job)
            assert not memory or memory == {LINEAGE: at}, Clause.MEMORY.broken(
                f"{alike}, it tells {memory}"
            )
        job, named, *_, left = made[0]
        self.commit(named, left, clause=Clause.IN_DOUBT_JOB)
        self.purge(named, 53, 53, job)
        _, other, done, gone, left = made[1]
        when = f"after a purge for {ours!a}, of {theirs!a}"
        self.commit(other, done, left, clause=Clause.PURGE, when=when)
        self.expect_state(other, Clause.PURGE, f"{when}, that was aborted", gone)

    def test_in_doubt_changes_nothing(self, sink: Sink) -> None:
        made = [self.pre_committed(sink, rows(10 * p, 2), subtask=p) for p in range(2)]
        for _ in range(3):
            self.doubts(sink)
        self.expect_doubts(sink, Clause.IN_DOUBT_READS, "after three listings", *made)
        if Ability.SIDE_BY_SIDE not in self.cannot:
            transaction = self.begun(copy := copy_of(sink), subtask=2)
            self.write(copy, transaction, rows(20, 2))
            self.doubts(sink)
            made.append(self.sealed(copy, transaction, 2, 2, Clause.IN_DOUBT_READS))
            self.close(copy)
        self.commit(sink, *made, clause=Clause.IN_DOUBT_READS)
        self.expect_rows(
            sink,
            Clause.IN_DOUBT_READS,
            "after commit",
            *(rows(10 * p, 2) for p in range(len(made))),
        )

    @pytest.mark.parametrize("characters", ["j", "🙂"])
    def test_the_longest_names(self, sink: Sink, characters: str) -> None:
        """A character outside of ASCII may be four bytes, or twelve characters of a URL."""
        named = self.of_name(sink, characters * 100)
        job = characters * 100
        parts: dict[str, Any] = {"checkpoint": 10**9, "subtask": 10**5, "generation": 10**4}
        contexts = [
            self.context(named, job=job, slot=n, task_attempt=10**12 + n, **parts) for n in range(2)
        ]
        made = [
            self.pre_committed(named, rows(10 * n, 2), context, Clause.NAMES)
            for n, context in enumerate(contexts)
        ]
        when = (
            f"with two names of {len(contexts[0].transaction_id)} characters that differ in the "
            f"last, of job and sink {characters!a} * 100"
        )
        self.expect_doubts(named, Clause.NAMES, when, *made, job=job)
        self.commit(named, *made, clause=Clause.NAMES, when=when)
        self.expect_rows(named, Clause.NAMES, when, rows(0, 2), rows(10, 2))

    # ------------------------------------------------------------------ never seen
    def test_commit_of_what_was_never_seen_is_no_success_and_no_proof(self, sink: Sink) -> None:
        context = self.context(sink)
        never = self.never_seen(sink, context)
        when = "of a transaction that never was"
        outcome = self.expect_state(
            sink, Clause.NOT_FOUND, when, never, CommitState.UNKNOWN, CommitState.LOST
        )
        assert outcome.reason, Clause.COMMIT_OUTCOME.broken(
            f"{outcome.state.name} without a reason"
        )
        self.expect_rows(sink, Clause.NOT_FOUND, "after commit of a transaction that never was")
        self.expect_doubts(sink, Clause.NOT_FOUND, "after commit of a transaction that never was")
        if outcome.state is CommitState.LOST:
            self._stays_lost(sink, context, Clause.LOST_PROOF)

    def _stays_lost(
        self, sink: Sink, context: Any, clause: Clause, shown: Sequence[pa.Table] = ()
    ) -> None:
        """A sink that makes a loss final may call it one: what comes late under this name is
        refused, at any step."""
        self.checked(sink)
        transaction = None
        try:
            transaction = sink.begin_transaction(context)
            sink.write(transaction, rows(0, 5).to_batches()[0])
            committable = sink.snapshot_state(transaction).of(sink.name, 0, Fingerprint(5))
        except Exception as error:
            forget(error)
            if transaction is not None:
                self.rollback(sink, transaction)
        else:
            late = "a transaction that never was is told LOST; when its task pre-commits then"
            self.expect_state(sink, clause, late, committable)
        self.expect_rows(
            sink, clause, "when the task of a transaction comes after that was told LOST", *shown
        )

    def test_abort_of_what_was_never_seen_is_no_error_and_no_commit(self, sink: Sink) -> None:
        other = self.pre_committed(sink, rows(10, 2), subtask=1)
        context = self.context(sink)
        never = self.never_seen(sink, context)
        for when in ("of a transaction that never was", "of it again"):
            self.abort(sink, never, Clause.ABORT_UNSEEN, when)
        self.expect_doubts(
            sink, Clause.ABORT_UNSEEN, "after abort of a transaction that never was", other
        )
        states = CommitState.UNKNOWN, CommitState.LOST
        outcome = self.expect_state(sink, Clause.ABORT_UNSEEN, "after abort of it", never, *states)
        if outcome.state is CommitState.LOST:
            self._stays_lost(sink, context, Clause.ABORT_UNSEEN)

    # ------------------------------------------------------------------ memory, proofs
    def test_committed_checkpoints_are_those_that_are_visible(self, sink: Sink) -> None:
        """Nobody can tell (None) before the first commit, if the system keeps nothing by itself."""
        if type(sink).committed_checkpoints is Sink.committed_checkpoints:
            pytest.skip(
                "this sink does not override `committed_checkpoints`: its system keeps no memory"
            )

        def expect(
            expected: Mapping[str, int], when: str, job: str = self.job, of: Sink = sink
        ) -> None:
            for asked, who in ((of, ""), (driver, " another driver, open since then,"))[
                : 1 + (of is sink)
            ]:
                memory = self.memory(asked, job) or {}
                seen = f"{when},{who} it tells {memory} instead of {expected}"
                assert memory == expected, Clause.MEMORY.broken(seen)

        driver = self.elsewhere(sink)
        expect({}, "on an empty target")
        committed, other = (
            self.pre_committed(sink, rows(10 * p, 5), subtask=p, checkpoint=9) for p in range(2)
        )
        expect({}, "after pre_commit")
        self.abort(sink, other)
        expect({}, "after abort")
        self.commit(sink, committed)
        if self.memory(sink) is None:
            pytest.skip("this sink's system keeps no memory of committed checkpoints")
        expect({LINEAGE: 9}, "with checkpoint 9 visible")
        expect({}, "with another job's checkpoint visible", "conformance-2")
        expect({}, "with another sink's checkpoint visible", of=self.sibling(sink))
        again = self.pre_committed(sink, rows(5, 5), subtask=1, checkpoint=10)
        self.abort(sink, again)
        expect({LINEAGE: 9}, "after an abort of checkpoint 10")
        self.commit(sink, self.pre_committed(sink, rows(20, 1), checkpoint=10))
        expect({LINEAGE: 10}, "with checkpoints 9 and 10 visible")
        self.commit(sink, committed)
        expect({LINEAGE: 10}, "with checkpoints 9 and 10 visible, and 9 committed again")
        newest = 10
        for number in (999_999, 10**6, 10**9 - 1, 10**9, 2**31):
            self.commit(sink, self.pre_committed(sink, rows(number, 1), checkpoint=number))
            expect({LINEAGE: number}, f"with checkpoints {newest} and {number} visible")
            newest = number
        self.commit(sink, self.pre_committed(sink, rows(30, 1), lineage="feedbeef", checkpoint=100))
        memory = dict(self.memory(sink) or {})
        as_documented = memory in ({"feedbeef": 100}, {LINEAGE: newest, "feedbeef": 100})
        assert as_documented, Clause.MEMORY.broken(
            f"with checkpoint 100 of another lineage visible, too, it tells {memory}"
        )

    def test_purge_removes_nothing_that_is_still_asked_for(self, sink: Sink) -> None:
        other = self.sibling(sink)
        old, oldest = 999_998, 999_999  # with fewer digits than the next one
        each_part: list[dict[str, Any]] = [{"checkpoint": n} for n in (old, oldest, oldest + 1)]
        each_part += [{"lineage": "feedbeef"}, {"job": "another"}]
        tables = [rows(10 * n, 2) for n in range(len(each_part) + 1)]
        done = [
            self.pre_committed(sink, table, **parts)
            for table, parts in zip(tables, each_part, strict=False)
        ]
        done.append(self.pre_committed(other, tables[-1]))
        gone = [self.pre_committed(sink, rows(900, 2), **parts) for parts in each_part]
        gone.append(self.pre_committed(other, rows(900, 1)))
        pending = [old, oldest + 2]
        waiting = [
            self.pre_committed(sink, rows(800 + n, 1), checkpoint=of)
            for n, of in enumerate(pending)
        ]
        for committed, aborted in zip(done, gone, strict=True):
            self.commit(sink if committed.sink == sink.name else other, committed)
            self.abort(sink if committed.sink == sink.name else other, aborted)
        memory = self.memory(sink)
        newest = {"checkpoint": oldest + 3}
        open_ones = [(copy_of(sink), parts) for parts in (newest, *each_part[3:])] + [
            (copy_of(other), {})
        ]
        if Ability.SIDE_BY_SIDE in self.cannot:
            open_ones.clear()
        begun = [
            (task, self.written(task, rows(700, 1), **parts), parts) for task, parts in open_ones
        ]
        for _ in range(2):
            self.purge(sink, oldest + 2, oldest)
        for task, transaction, parts in begun:
            with Clause.PURGE.guarding(
                f"pre_commit of what was open, of sink {task.name!r}, {parts}"
            ):
                committable = task.snapshot_state(transaction)
            if parts == newest:
                waiting.append(committable.of(sink.name, 0, Fingerprint(1)))
            else:
                self.abort(task, committable, Clause.PURGE)
        self.expect_rows(sink, Clause.PURGE, "after purge", *tables)
        self.expect_doubts(sink, Clause.PURGE, "after purge", *waiting)
        self.expect_memory(sink, Clause.PURGE, "after purge", memory)
        (first, *others), (lost, *more) = done, gone
        for purged, possible in ((first, CommitState.COMMITTED), (lost, CommitState.LOST)):
            when = "with its proof purged"
            self.expect_state(sink, Clause.PURGE, when, purged, possible, CommitState.UNKNOWN)
        for committed, aborted in zip(others, more, strict=True):
            asked = sink if committed.sink == sink.name else other
            self.commit(
                asked,
                committed,
                clause=Clause.PURGE,
                when=f"of what was committed, {committed.transaction}",
            )
            self.expect_state(
                asked, Clause.PURGE, f"after purge, of the aborted {aborted.transaction}", aborted
            )
        self.close(other)
        self.commit(sink, *waiting, clause=Clause.PURGE, when="of what was in doubt")
        tables += [rows(800, 1), rows(801, 1)] + [rows(700, 1)] * bool(begun)
        self.expect_rows(
            sink, Clause.PURGE, "after purge, and the commit of what was open or in doubt", *tables
        )

    # ------------------------------------------------------------------ a checkpoint
    @pytest.mark.parametrize("lost", [0, 1])
    def test_commit_all_tells_the_outcome_of_each_in_order(self, sink: Sink, lost: int) -> None:
        """With one that is lost; its siblings are committed, or all of them are held back."""
        # as texts: 10, 11, 9
        made = [self.pre_committed(sink, rows(10 * p, 2), subtask=9 + p) for p in range(3)]
        self.abort(sink, made[lost])
        states = [
            outcome.state.name for outcome in self.outcomes(sink, *made, clause=Clause.COMMIT_ALL)
        ]
        separate = ["LOST" if p == lost else "COMMITTED" for p in range(3)]
        held = ["LOST" if p == lost else "HELD" for p in range(3)]
        assert states in (separate, held), Clause.COMMIT_ALL.broken(
            f"number {lost} of three is lost, and told {states}"
        )
        others = [rows(10 * p, 2) for p in range(3) if p != lost]
        again = rows(10 * lost, 2)
        clause = Clause.AT_ONCE if states == held else Clause.COMMIT_ALL
        self.expect_rows(sink, clause, f"with {states}", *(() if states == held else others))
        replacement = self.pre_committed(sink, again, subtask=9 + lost, round=1)
        asked = (
            [committable for committable in made if committable is not made[lost]]
            if states == held
            else []
        )
        self.commit(sink, *asked, replacement, clause=clause, when="of the replay")
        self.expect_rows(sink, clause, "after the replay", *others, again)
        self.expect_state(sink, Clause.LOST, "asked again after commit_all", made[lost])

    def test_what_is_unknown_keeps_no_sibling_from_its_outcome(self, sink: Sink) -> None:
        """Of a checkpoint that shows as a whole, nothing is visible then."""
        never = self.never_seen(sink, self.context(sink, subtask=9))
        made = [self.pre_committed(sink, rows(10 * p, 2), subtask=p) for p in range(2)]
        *answers, _ = self.outcomes(sink, *made, never, clause=Clause.COMMIT_ALL)
        clause = (
            Clause.AT_ONCE if isinstance(sink, WholeCommitting) or self.whole else Clause.COMMIT_ALL
        )
        expected = (
            {CommitState.HELD}
            if clause is Clause.AT_ONCE
            else {CommitState.HELD, CommitState.COMMITTED}
        )
        states = {answer.state for answer in answers}
        assert len(states) == 1, clause.broken(f"beside one that never was, it answers {answers}")
        assert states <= expected, clause.broken(f"beside one that never was, it answers {answers}")
        shown = [rows(10 * p, 2) for p in range(2)] if states == {CommitState.COMMITTED} else []
        self.expect_rows(sink, clause, "beside one that never was", *shown)

    def test_commit_all_goes_on_when_one_fails(self, sink: Sink) -> None:
        made = [self.pre_committed(sink, rows(10 * p, 2), subtask=p) for p in range(3)]
        driver = copy_of(sink)
        called = []
        inner = driver.commit

        def failing(committable: Committable) -> CommitOutcome:
            called.append(committable)
            if committable.subtask == 0:
                raise self.outage
            return inner(committable)

        driver.commit = failing  # type: ignore[method-assign]
        answers = self.answers(driver, *made)
        driver.close()
        if not called:
            pytest.skip("this sink's `commit_all` does not use `commit`")
        described = [str(getattr(answer, "state", answer)) for answer in answers]
        assert answers[0] is self.outage, Clause.COMMIT_ALL_GOES_ON.broken(
            f"the first raises, and is told {described[0]}"
        )
        assert answers[1:] == [CommitOutcome.COMMITTED] * 2, Clause.COMMIT_ALL_GOES_ON.broken(
            f"the first of three raises, and the others are told {described[1:]}"
        )
        self.commit(sink, *made, clause=Clause.ASK_AGAIN)
        self.expect_rows(
            sink, Clause.ASK_AGAIN, "asked again", *(rows(10 * p, 2) for p in range(3))
        )

    def test_a_transaction_of_no_rows(self, sink: Sink) -> None:
        self.needs(Ability.EMPTY)
        empty = [self.sealed(sink, self.begun(sink, subtask=n), 0, n) for n in range(2)]
        self.abort(sink, empty[0], Clause.PRE_COMMIT_EMPTY)
        self.commit(sink, empty[1], clause=Clause.PRE_COMMIT_EMPTY)
        self.expect_rows(sink, Clause.PRE_COMMIT_EMPTY, "after its commit")
        self.expect_doubts(sink, Clause.PRE_COMMIT_EMPTY, "after one abort and one commit")

    def test_what_is_committed_becomes_visible_as_a_whole(self, sink: Sink) -> None:
        """A checkpoint, or a transaction: a reader looks at each step of the commit, and ever less
        often in its loops. The first participant has many rows, which a sink may move in parts."""
        whole = self.whole or isinstance(sink, WholeCommitting)
        clause, count = (Clause.AT_ONCE, min(self.many, 80)) if whole else (Clause.COMMIT, 1)

        def participants(first: int, count: int) -> tuple[list[pa.Table], list[Committable], int]:
            tables = [rows(first + 2_000 * p, 2 if p else 1_001) for p in range(count)]
            made = [self.pre_committed(sink, table, subtask=p) for p, table in enumerate(tables)]
            return tables, made, sum(table.num_rows for table in tables)

        others, first, before = participants(800_000, min(count, 2))
        driver = copy_of(sink)
        self.commit(driver, *first)
        self.expect_rows(
            sink,
            Clause.WRITE,
            f"after the commit of {before} rows in {len(first)} participants",
            *others,
        )
        _, made, all_of_them = participants(0, count)
        partly = list[str]()
        steps = Steps(6 * self.stops)

        def look(number: int, frame: FrameType, line_before: int) -> None:
            if steps.is_due(frame, line_before) and not partly:
                try:
                    seen = f"{self.seen(sink).total() - before} of {all_of_them} rows are visible"
                except Exception as error:
                    seen = f"`visible` raised {error!r}"
                if not seen.startswith(("0 ", f"{all_of_them} ")):
                    partly.append(f"at {Stop.of(number, frame)}, {seen}")

        with watched(driver, look):
            self.answers(driver, *made)
        self.close(driver)
        assert partly == [], clause.broken(partly[0])

    @pytest.mark.parametrize("lost", [0, 1])
    def test_sinks_of_one_place_commit_as_one(self, sink: Sink, lost: int) -> None:
        """A reader looks at each step of the commit, and of the commit after a replay."""
        if not isinstance(sink, JointCommitting) or sink.place() is None:
            pytest.skip("this sink names no place in which others commit, too")
        if not (self.whole or isinstance(sink, WholeCommitting)):
            pytest.skip("each transaction of this sink becomes visible by itself")
        other = self.sibling(sink)
        clause = Clause.JOINTLY
        assert isinstance(other, JointCommitting)
        assert other.place() == sink.place(), clause.broken("another name makes another `place`")
        sinks = (sink, other)
        made = [
            self.pre_committed(each, rows(10 * n, 2), subtask=n) for n, each in enumerate(sinks)
        ]
        checkpoint = Checkpoint(self.job, LINEAGE, 0)
        with clause.guarding("validate_jointly of good rows"):
            sink.validate_jointly(checkpoint, [(sink, made[:1]), (other, made[1:])])
        self.expect_rows(sink, clause, "after validate_jointly")
        self.abort(sinks[lost], made[lost])

        def states() -> list[str]:
            answers = sink.commit_jointly(checkpoint, [(sink, made[:1]), (other, made[1:])])
            return [
                each.state.name if isinstance(each, CommitOutcome) else repr(each)
                for own in answers
                for each in own
            ]

        told = states()
        expected = ["LOST" if n == lost else "HELD" for n in range(2)]
        assert told == expected, clause.broken(f"number {lost} of two is lost, and told {told}")
        self.expect_rows(sink, clause, f"with {told}")
        made[lost] = self.pre_committed(sinks[lost], rows(10 * lost, 2), subtask=lost, round=1)
        partly = list[str]()
        steps = Steps(6 * self.stops)

        def look(number: int, frame: FrameType, before: int) -> None:
            if steps.is_due(frame, before) and (shown := self.seen(sink).total()) not in (0, 4):
                partly.append(f"at {Stop.of(number, frame)}, {shown} of 4 rows are visible")

        with watched(sink, look):
            told = states()
        assert told == ["COMMITTED"] * 2, clause.broken(f"of the replay, it answers {told}")
        assert partly == [], clause.broken(partly[0])
        self.expect_rows(sink, clause, "after the replay", rows(0, 2), rows(10, 2))
        assert states() == told, clause.broken("asked again, it answers otherwise")

    # ------------------------------------------------------------------ a job that starts again
    def test_a_sink_made_anew_ends_what_the_former_one_pre_committed(self, sink: Sink) -> None:
        task = copy_of(sink)
        made = [self.pre_committed(task, rows(10 * p, 2), subtask=p) for p in range(3)]
        self.close(sink)
        with Clause.MADE_ANEW.guarding("its constructor, called with the same arguments,"):
            anew = self.made_anew(sink)
        when = "in a sink that is made anew by its constructor"
        self.expect_doubts(anew, Clause.MADE_ANEW, when, *made)
        self.abort(anew, made[0], Clause.MADE_ANEW, when)
        self.commit(anew, *made[1:], clause=Clause.MADE_ANEW, when=when)
        self.expect_rows(anew, Clause.MADE_ANEW, when, rows(10, 2), rows(20, 2))
        self.expect_memory(anew, Clause.MADE_ANEW, when, self.memory(sink))

    def test_settings_that_changed_before_the_commit(self, sink: Sink) -> None:
        others = self.set_otherwise(sink)
        if not others:
            pytest.skip("this kit names no other settings: it does not override `set_otherwise`")
        done: list[pa.Table] = []
        for number, other in enumerate(map(closed_later, others)):
            table = rows(10 * number, 5)
            made = self.pre_committed(sink, table)
            with suppress(Exception):
                other.open()
                other.check(SCHEMA)
            (answer,) = self.answers(other, made)
            when = f"written by {sink!r}, its commit by {other!r} answers {answer}"
            lost = isinstance(answer, CommitOutcome) and answer.state is CommitState.LOST
            assert not lost, Clause.SETTINGS.broken(when)
            if answer == CommitOutcome.COMMITTED:
                self.expect_rows(sink, Clause.SETTINGS, when, *done, table)
            self.commit(
                sink,
                made,
                clause=Clause.SETTINGS,
                when=f"with its former settings, after those of {other!r}",
            )
            done.append(table)
            self.expect_rows(sink, Clause.SETTINGS, when, *done)
