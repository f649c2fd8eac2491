"""What a transaction goes through: begin, write, pre-commit, commit or roll back."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pyarrow as pa
import pytest

from sinks.base import Sink
from sinks.errors import ConfigurationError
from sinks.testing.clauses import Ability, Clause
from sinks.testing.kit import SCHEMA, SinkTests, copy_of, forget, in_pieces, rows
from sinks.transaction import Committable


def at_least_once(test: Any) -> Any:
    """A test for sinks without two phases, too."""
    test.at_least_once = True
    return test


class TwoPhases(SinkTests):
    # ------------------------------------------------------------------ the object
    @at_least_once
    def test_the_sink_is_closed_and_opened_again_in_any_process(self, sink: Sink) -> None:
        self.close(copy_of(sink))
        self.rollback(sink, self.begun(sink))
        copy = copy_of(sink)
        for _ in range(2):
            self.close(sink)
        self.close(copy)
        for task in (sink, copy):
            self.rollback(task, self.begun(task, clause=Clause.OPEN))
        transaction = self.written(copy, rows(0, 2))
        self.close(sink)
        self.write(copy, transaction, rows(2, 2), Clause.CLOSE_BESIDE)
        self.rollback(copy, transaction, Clause.CLOSE_BESIDE)
        self.rollback(copy, self.begun(copy, clause=Clause.CLOSE_BESIDE))
        self.close(copy)

    @at_least_once
    def test_the_sink_travels_whatever_its_transform_is(self, sink: Sink) -> None:
        assert hasattr(sink, "transform"), Clause.PICKLED.broken(
            "its constructor does not call `super().__init__`"
        )
        before = sink.transform
        sink.transform = lambda df: df
        try:
            assert getattr(copy_of(sink), "transform", 0) is None, Clause.PICKLED.broken(
                "its `transform` travels, or is lost"
            )
        finally:
            sink.transform = before

    @at_least_once
    def test_check_takes_and_refuses_columns(self, sink: Sink) -> None:
        with Clause.CHECK.guarding("check of SCHEMA, twice,"):
            sink.open()
            sink.check(SCHEMA)
            sink.check(SCHEMA)
        for what, schema in (
            ("are not nullable", pa.schema([field.with_nullable(False) for field in SCHEMA])),
            ("have metadata", pa.schema([field.with_metadata({"a": "b"}) for field in SCHEMA])),
        ):
            with Clause.CHECK.guarding(f"check of the columns of SCHEMA, which {what} now,"):
                sink.check(schema)
        if type(sink).check is Sink.check or self.refused is None:
            pytest.skip("this sink takes any columns")
        refusal: Exception | None = None
        try:
            sink.check(self.refused)
        except Exception as error:
            refusal = error
        assert isinstance(refusal, ConfigurationError), Clause.CHECK_REFUSES.broken(
            f"check of {self.refused.names}, of which it cannot take the last two, raised "
            f"{refusal!r}"
        )
        unnamed = [name for name in self.refused.names[-2:] if name not in str(refusal)]
        assert unnamed == [], Clause.CHECK_REFUSES.broken(f"{unnamed} are not named in: {refusal}")

    # ------------------------------------------------------------------ the two phases
    def test_written_rows_are_invisible_and_not_in_doubt(self, sink: Sink) -> None:
        self.expect_doubts(copy_of(sink), Clause.IN_DOUBT, "on an empty target, before `check`")
        transaction = self.written(sink, rows(0, 5))
        self.expect_rows(copy_of(sink), Clause.WRITE_INVISIBLE, "before pre_commit")
        driver = copy_of(sink)
        for identity in (
            ()
            if {Ability.TELL_OPEN, Ability.SIDE_BY_SIDE} & {*self.cannot}
            else self.doubts(driver)
        ):
            self.abort(
                driver,
                Committable(identity),
                Clause.IN_DOUBT_OPEN,
                "of an open one, which it lists",
            )
            seen = (
                "one is listed that is open: if it cannot tell them apart, say `cannot = "
                "{Ability.TELL_OPEN: why}`"
            )
            with suppress(Exception):
                sink.snapshot_state(transaction)
                seen = f"{identity} was open, and aborted, and is pre-committed"
            raise AssertionError(Clause.IN_DOUBT_OPEN.broken(seen))
        self.close(driver)
        self.rollback(sink, transaction)
        self.expect_rows(sink, Clause.ROLLBACK, "after rollback")

    def test_the_identity_is_a_dict_of_json_values(self, sink: Sink) -> None:
        committable = self.pre_committed(sink, rows(0, 5))
        with Clause.IDENTITY.guarding("json.dumps of the committable"):
            text = json.dumps(committable.to_json())
        again = Committable.from_json(json.loads(text))
        for what in ("transaction", "proof"):
            here = dict(getattr(committable, what))
            there = getattr(again, what)
            assert here == there, Clause.IDENTITY.broken(
                f"its {what} is {here}, and {there} after a way through JSON"
            )

    def test_pre_committed_rows_are_invisible_and_in_doubt(self, sink: Sink) -> None:
        committable = self.sealed(sink, self.written(sink, rows(0, 5)), 5)
        self.expect_rows(sink, Clause.PRE_COMMIT, "after pre_commit")
        for asked in ("once", "again"):
            self.expect_doubts(
                sink, Clause.IDENTITY, f"after pre_commit, asked {asked}", committable
            )
        self.close(sink)
        self.expect_doubts(sink, Clause.CLOSE_KEEPS, "after pre_commit and `close`", committable)

    def test_commit_makes_all_rows_visible_once(self, sink: Sink) -> None:
        committable = self.sealed(sink, self.written(sink, rows(0, 5)), 5)
        self.expect_doubts(sink, Clause.IN_DOUBT, "before commit", committable)
        self.commit(sink, committable)
        self.expect_rows(
            sink, Clause.COMMIT, "after a commit without a `close`", rows(0, 5).select(["id"])
        )
        self.expect_rows(sink, Clause.WRITE, "after commit", rows(0, 5))
        self.expect_doubts(sink, Clause.IN_DOUBT_RESOLVED, "after commit")
        later = rows(10, 5)
        self.commit(sink, self.pre_committed(sink, later, checkpoint=1))
        is_there = self.counted(later) <= self.seen(sink)
        clause = Clause.COMMIT_KEEPS if is_there else Clause.COMMIT
        self.expect_rows(sink, clause, "after a commit of the next checkpoint", rows(0, 5), later)

    def test_commit_needs_only_the_pickled_sink_and_the_committable_as_json(
        self, sink: Sink
    ) -> None:
        copy = copy_of(sink)
        text = json.dumps(self.pre_committed(sink, rows(0, 5)).to_json())
        self.close(sink)
        when = "by a copy of the sink, which was pickled"
        self.commit(
            copy, Committable.from_json(json.loads(text)), clause=Clause.COMMIT_BY_NAME, when=when
        )
        self.close(copy)
        self.expect_rows(sink, Clause.COMMIT_BY_NAME, f"after the commit {when}", rows(0, 5))

    def test_commit_is_idempotent(self, sink: Sink) -> None:
        committable = self.pre_committed(sink, rows(0, 5))
        self.commit(sink, committable)
        for number in ("second", "third"):
            self.commit(
                copy_of(sink), committable, clause=Clause.IDEMPOTENT, when=f"by the {number} commit"
            )
        self.expect_rows(sink, Clause.IDEMPOTENT, "after three commits", rows(0, 5))

    def test_all_batches_of_a_transaction_belong_to_it(self, sink: Sink) -> None:
        transaction = self.begun(sink)
        for first in (0, 10, 20):
            self.write(sink, transaction, rows(first, 3))
        committable = self.sealed(sink, transaction, 9)
        self.expect_rows(sink, Clause.PRE_COMMIT, "after pre_commit")
        self.commit(sink, committable)
        self.expect_rows(
            sink, Clause.WRITE, "after three record batches", *(rows(n, 3) for n in (0, 10, 20))
        )

    def test_several_participants_commit_together(self, sink: Sink) -> None:
        committables = [self.pre_committed(sink, rows(10 * p, 2), subtask=p) for p in range(4)]
        self.commit(sink, *committables, clause=Clause.COMMIT_ALL)
        self.expect_rows(
            sink,
            Clause.COMMIT_ALL,
            "after commit_all of four",
            *(rows(10 * p, 2) for p in range(4)),
        )

    @pytest.mark.parametrize("what", ["opened", "checked", "closed"])
    def test_a_copy_of_the_sink_touches_no_transaction(self, sink: Sink, what: str) -> None:
        """As each task has one, and a driver that starts."""
        clause = {
            "opened": Clause.OPEN_KEEPS,
            "checked": Clause.CHECK,
            "closed": Clause.CLOSE_KEEPS,
        }[what]

        def call() -> None:
            copy = self.elsewhere(sink)
            if what == "checked":
                with clause.guarding("check"):
                    copy.check(SCHEMA)
            if what == "closed":
                self.close(copy_of(sink), copy)

        driver = self.elsewhere(sink)  # stays open
        self.commit(driver, self.sealed(sink, self.written(sink, rows(100, 2), subtask=2), 2, 2))
        self.sealed(sink, self.written(sink, rows(0, 2)), 2)
        before = len(list(driver.in_doubt(self.job)))
        assert before == 1, Clause.PRE_COMMIT.broken(
            f"pre_commit has returned, and a copy lists {before} in doubt"
        )
        call()
        after = len(list(driver.in_doubt(self.job)))
        assert before == after, clause.broken(
            f"{before} transactions were in doubt, and {after} when a copy of the sink was {what}"
        )
        self.expect_rows(sink, clause, f"when a copy of the sink was {what}", rows(100, 2))
        if Ability.SIDE_BY_SIDE not in self.cannot:
            transaction = self.written(sink, rows(10, 2), subtask=1)
            call()
            with clause.guarding(
                f"pre_commit of a transaction that was open when a copy of the sink was {what}"
            ):
                sink.snapshot_state(transaction)

    # ------------------------------------------------------------------ rollback
    def test_rollback_leaves_nothing(self, sink: Sink) -> None:
        """In the same object, and of others whose names begin with the same."""
        neighbour = self.pre_committed(sink, rows(100, 2), slot=0, task_attempt=10)
        task = copy_of(sink)
        is_open = None
        shown = list[pa.Table]()
        if not {Ability.SIDE_BY_SIDE, Ability.TELL_OPEN} & {*self.cannot}:
            done = self.pre_committed(sink, rows(200, 2), subtask=3)
            shown = [rows(200, 2)]
            other = self.begun(task, subtask=3)
            is_open = self.written(task, rows(10, 2), subtask=1)
            when = "when another attempt of its subtask has begun"
            self.commit(sink, done, clause=Clause.NAMES, when=when)
            self.expect_named(sink, when, *shown)
            self.rollback(task, other)
        before = self.leftovers(sink)
        for count in (0, self.many):
            table = in_pieces(rows(0, count)) if count else rows(0, 0)
            transaction = self.written(sink, table, slot=1, task_attempt=1, round=count)
            self.rollback(sink, transaction)
            self.close(sink)
            self.expect_no_leftovers(sink, f"after rollback of {count} record batches", before)
        self.expect_rows(sink, Clause.ROLLBACK, "after rollback", *shown)
        self.expect_doubts(
            sink, Clause.ROLLBACK, "after rollback beside one that is pre-committed", neighbour
        )
        made = [neighbour, self.pre_committed(sink, rows(20, 2), clause=Clause.ROLLBACK, subtask=2)]
        if is_open is not None:
            made.append(self.sealed(task, is_open, 2, 1, Clause.ROLLBACK))
        self.commit(sink, *made, clause=Clause.ROLLBACK, when="beside a rollback")
        tables = [rows(100, 2), rows(20, 2), rows(10, 2)][: len(made)]
        self.expect_rows(
            sink, Clause.ROLLBACK, "after a rollback and the commit of others", *shown, *tables
        )

    def test_begin_transaction_fails_and_leaves_nothing(self, sink: Sink) -> None:
        """Of columns that the target cannot take."""
        if self.refused is None:
            pytest.skip("this sink takes any columns")
        self.rollback(sink, self.begun(sink))
        before = self.leftovers(sink)
        transaction = None
        try:
            transaction = sink.begin_transaction(self.context(sink, self.refused))
        except Exception as error:
            forget(error)
        if transaction is not None:
            self.rollback(sink, transaction)
        self.close(sink)
        self.expect_doubts(sink, Clause.BEGIN_FAILS, "after begin_transaction raised")
        left = sorted(set(self.leftovers(sink)) - set(before))
        assert left == [], Clause.BEGIN_FAILS.broken(
            f"after begin_transaction raised, there is {', '.join(left)}"
        )

    def test_two_open_transactions_of_one_sink_object_do_not_meet(self, sink: Sink) -> None:
        self.needs(Ability.SIDE_BY_SIDE)
        first = self.written(sink, rows(0, 2), subtask=0)
        second = self.begun(sink, subtask=1)
        for transaction, start in ((first, 10), (second, 100), (second, 110)):
            self.write(sink, transaction, rows(start, 2), Clause.HANDLE)
        committable = self.sealed(sink, first, 4)
        self.rollback(sink, second)
        self.expect_doubts(
            sink, Clause.HANDLE, "with one of two sealed, the other rolled back", committable
        )
        self.commit(sink, committable, clause=Clause.HANDLE)
        self.expect_rows(sink, Clause.HANDLE, "with one of two committed", rows(0, 2), rows(10, 2))
