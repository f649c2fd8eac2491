"""What a sink does besides: each class of `sinks.optional` has its clauses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

import pyarrow as pa
import pytest

from sinks.audit import Part
from sinks.base import Sink
from sinks.dead_letters import SCHEMA as LETTERS
from sinks.diagnosis import Finding, InDoubt
from sinks.errors import ConfigurationError
from sinks.optional import (
    Auditable,
    DeadLettering,
    Diagnosable,
    SchemaEvolving,
    Validating,
    commit_now,
)
from sinks.testing.clauses import Ability, Clause
from sinks.testing.faults import meet
from sinks.testing.kit import LINEAGE, SCHEMA, SinkTests, closed_later, copy_of, forget, rows
from sinks.testing.lines import failing, lines, watched
from sinks.testing.outcomes import EACH_PART
from sinks.testing.two_phases import at_least_once
from sinks.transaction import Checkpoint, Fingerprint

Kind = TypeVar("Kind")


def as_(kind: Callable[..., Kind], sink: Any) -> Kind:
    """Skips the test if the sink is not of this class."""
    assert isinstance(kind, type)
    if not isinstance(sink, kind):
        pytest.skip(f"this sink is not {kind.__name__}")
    return cast(Kind, sink)


class Options(SinkTests):
    # ------------------------------------------------------------------ DirectCommitting, or not
    @at_least_once
    def test_commit_directly_makes_rows_visible_now(self, sink: Sink) -> None:
        self.needs(Ability.DIRECTLY)
        before = self.leftovers(sink)
        transaction = self.written(sink, rows(0, 5), exactly_once=False)
        with Clause.DIRECTLY.guarding("the end of a transaction in at-least-once mode"):
            commit_now(sink, transaction, Checkpoint(self.job, LINEAGE, 0))
        self.close(sink)
        self.expect_rows(sink, Clause.DIRECTLY, "in at-least-once mode", rows(0, 5))
        self.expect_doubts(sink, Clause.DIRECTLY, "in at-least-once mode")
        memory = sink.committed_checkpoints(self.job)
        assert not memory, Clause.MEMORY_DIRECTLY.broken(f"`committed_checkpoints` tells {memory}")
        self.expect_no_leftovers(sink, "in at-least-once mode", before)

    @at_least_once
    def test_at_least_once_transactions_are_told_apart_by_their_names(self, sink: Sink) -> None:
        """None overwrites the rows of another one."""
        self.needs(Ability.DIRECTLY)
        shown = list[pa.Table]()
        usual: dict[str, Any] = {"slot": 0, "task_attempt": 1, "exactly_once": False}
        for number, parts in enumerate([*EACH_PART, {"job": "another"}, None]):
            shown.append(rows(10 * number, 2))
            task = self.sibling(sink) if parts is None else copy_of(sink)
            transaction = self.written(task, shown[-1], **(usual | (parts or {})))
            when = f"in at-least-once mode, after one with {parts or {'sink': task.name}}"
            with Clause.DIRECTLY.guarding(f"the end of a transaction {when}"):
                commit_now(task, transaction, Checkpoint(self.job, LINEAGE, 0))
            self.close(task)
            self.expect_rows(sink, Clause.NAMES, when, *shown)

    # ------------------------------------------------------------------ Validating
    def test_validate_all_decides_nothing(self, sink: Sink) -> None:
        validating: Validating[Any] = as_(Validating, sink)
        committables = [self.pre_committed(sink, rows(10 * p, 2), subtask=p) for p in range(2)]
        sink.open()
        for _ in range(2):
            with Clause.VALIDATE.guarding("validate_all of good rows"):
                validating.validate_all(Checkpoint(self.job, LINEAGE, 0), committables)
        self.expect_rows(sink, Clause.VALIDATE, "after validate_all")
        self.expect_doubts(sink, Clause.VALIDATE, "after validate_all", *committables)
        self.commit(
            copy_of(sink),
            *committables,
            clause=Clause.VALIDATE,
            when="by another driver, after validate_all",
        )

    # ------------------------------------------------------------------ DeadLettering
    def test_bad_rows_are_named_and_the_others_written(self, sink: Sink) -> None:
        if self.bad is None:
            pytest.skip("this kit names no `bad` values")
        choosy: DeadLettering[Any] = as_(DeadLettering, sink)
        good = rows(0, 9).to_pylist()
        for places in ([0, 4, 8], [2, 3], [], list(range(9))):
            table = [row | self.bad if at in places else row for at, row in enumerate(good)]
            batch = pa.RecordBatch.from_pylist(table, schema=SCHEMA)
            transaction = self.begun(sink)
            with Clause.WRITE_GOOD_ROWS.guarding(
                f"write_good_rows of 9 rows, of which those at {places} are bad,"
            ):
                refused = [refusal.row for refusal in choosy.write_good_rows(transaction, batch, 9)]
            assert refused == places, Clause.WRITE_GOOD_ROWS.broken(
                f"of 9 rows those at {places} are bad, not {refused}"
            )
            self.rollback(sink, transaction)
        transaction = self.begun(sink)
        batch = pa.RecordBatch.from_pylist([row | self.bad for row in good], schema=SCHEMA)
        count = len(choosy.write_good_rows(transaction, batch, 3))
        assert count > 3, Clause.WRITE_GOOD_ROWS.broken(
            f"of 9 bad rows it names {count}, if asked for 3"
        )
        self.rollback(sink, transaction)
        self._letters_of_an_outage(sink, choosy, [*good[:2], good[2] | self.bad])
        transaction = self.begun(sink)
        for part in (good[:4], good[4:]):
            batch = pa.RecordBatch.from_pylist([*part, good[0] | self.bad], schema=SCHEMA)
            refused = [refusal.row for refusal in choosy.write_good_rows(transaction, batch, 10)]
            seen = f"in one of two batches, row {len(part)} is bad, not {refused}"
            assert refused == [len(part)], Clause.WRITE_GOOD_ROWS.broken(seen)
        self.commit(sink, self.sealed(sink, transaction, 9, clause=Clause.WRITE_GOOD_ROWS))
        self.expect_rows(
            sink, Clause.WRITE_GOOD_ROWS, "after 9 good rows and two bad ones", rows(0, 9)
        )

    def _letters_of_an_outage(
        self, sink: Sink, choosy: DeadLettering[Any], table: list[dict[str, Any]]
    ) -> None:
        """Of a system that does not answer, no row is to blame."""
        batch = pa.RecordBatch.from_pylist(table, schema=SCHEMA)
        first = self.begun(sink)
        stops = lines(
            sink, lambda: choosy.write_good_rows(first, batch, 9), 2 * self.stops, failing=True
        )
        self.rollback(sink, first)
        for stop in stops:
            transaction = self.begun(sink)
            refused = [2]
            try:
                with watched(sink, failing(sink, stop, self.outage)):
                    refused = [
                        refusal.row for refusal in choosy.write_good_rows(transaction, batch, 9)
                    ]
            except Exception as error:
                forget(error)
            self.rollback(sink, transaction, Clause.ROLLBACK_AFTER)
            seen = f"{self.outage!r} at {stop}; row 2 of 3 is bad, not {refused}"
            assert refused == [2], Clause.WRITE_GOOD_ROWS.broken(seen)

    def test_letters_are_told_of_that_are_visible(self, sink: Sink) -> None:
        letters: DeadLettering[Any] = as_(
            DeadLettering, closed_later(self.accepting(sink, LETTERS))
        )
        if type(letters).read_dead_letters is DeadLettering.read_dead_letters:
            pytest.skip("this sink does not override `read_dead_letters`: it cannot tell")

        def newest(most: int) -> list[int]:
            with Clause.LETTERS.guarding("read_dead_letters"):
                answer = letters.read_dead_letters(self.job, "theirs", most)
            return [] if answer is None else sorted(letter["row_number"] for letter in answer.rows)

        try:
            letters.open()
            letters.check(LETTERS)
        except ConfigurationError:
            pytest.skip(
                "this sink takes no letters: override `accepting`, if another into the same system "
                "does"
            )
        with Clause.LETTERS.guarding("read_dead_letters where no letter was written yet"):
            if letters.read_dead_letters(self.job, "theirs", 9) is None:
                pytest.skip("this sink cannot tell of letters as it is set up")
        made = [
            self.pre_committed(letters, _letters(number, job, of), subtask=number)
            for number, (job, of) in enumerate(
                [(self.job, "theirs")] * 5 + [(f"{self.job}-2", "theirs"), (self.job, "theirs-2")]
            )
        ]
        self.abort(letters, made[4])
        assert newest(9) == [], Clause.LETTERS.broken(
            f"of letters that are in doubt or aborted, it tells {newest(9)}"
        )
        self.commit(letters, *made[:3], *made[5:], clause=Clause.LETTERS)
        assert newest(9) == [0, 1, 2], Clause.LETTERS.broken(
            f"numbers 0, 1, 2 are visible, and it tells {newest(9)}"
        )
        assert newest(2)[-2:] == [1, 2], Clause.LETTERS.broken(
            f"1 and 2 are the newest two, and it tells {newest(2)}"
        )

    # ------------------------------------------------------------------ SchemaEvolving
    def test_evolve_takes_new_columns(self, sink: Sink) -> None:
        evolving = self._evolving(sink)
        wider = rows(10, 2).add_column(0, "more", pa.array([1, None], pa.int64()))
        older = [rows(0, 2), rows(20, 2)]
        self.commit(evolving, self.pre_committed(evolving, older[0]), clause=Clause.EVOLVE)
        for when in ("before", "again before"):
            with Clause.SCHEMA_DIFF.guarding("schema_diff"):
                diff = evolving.schema_diff(wider.schema)
            as_documented = diff is None or any(change.column == "more" for change in diff.changes)
            assert as_documented, Clause.SCHEMA_DIFF.broken(
                f"{when} evolve, of a new column `more`: {diff}"
            )
        drivers: list[SchemaEvolving[Any]] = [
            evolving,
            as_(SchemaEvolving, self.elsewhere(evolving)),
        ]
        with Clause.EVOLVE.guarding("check by two drivers, then evolve by both, twice,"):
            for driver in drivers:
                driver.check(wider.schema)
            for driver in drivers * 2:
                driver.evolve(wider.schema)
        diff = evolving.schema_diff(wider.schema)
        assert diff is None or not diff.changes, Clause.SCHEMA_DIFF.broken(
            f"after evolve, it tells {diff}"
        )
        self.commit(evolving, self.pre_committed(evolving, wider, subtask=1), clause=Clause.EVOLVE)
        with Clause.EVOLVE.guarding("check, then evolve, for rows without the new column,"):
            evolving.check(SCHEMA)
            evolving.evolve(SCHEMA)
        late = self.pre_committed(evolving, older[1], clause=Clause.EVOLVE, subtask=2)
        self.commit(
            evolving,
            late,
            clause=Clause.EVOLVE,
            when="of rows without the new column, after evolve",
        )
        nulls = [table.add_column(0, "more", pa.nulls(2, pa.int64())) for table in older]
        self.expect_rows(evolving, Clause.EVOLVE, "after evolve", wider, *nulls)

    def test_evolve_by_two_drivers_whose_columns_differ(self, sink: Sink) -> None:
        """Both have checked before either evolves, as a zombie and its successor do."""
        first = self._evolving(sink)
        drivers = [first, as_(SchemaEvolving, self.elsewhere(first))]
        tables = [_wider(0, "more0"), _wider(10, "more1")]
        for driver, table in zip(drivers, tables, strict=True):
            with Clause.EVOLVE.guarding("check"):
                driver.check(table.schema)
        ended = [
            _raised_by(driver.evolve, table.schema)
            for driver, table in zip(drivers, tables, strict=True)
        ]
        when = "by two drivers that both had checked before"
        self._expect_both(drivers, tables, ended, [], when)

    def test_evolve_beside_another_driver(self, sink: Sink) -> None:
        """Which adds another column, while one is stopped at any line."""
        evolving = self._evolving(sink)
        evolving.check(SCHEMA)
        trial = _wider(0, "more")
        evolving.check(trial.schema)
        stops = lines(evolving, partial(evolving.evolve, trial.schema), self.stops)
        shown = list[pa.Table]()
        for number, stop in enumerate(stops, 1):
            drivers: list[SchemaEvolving[Any]] = [
                as_(SchemaEvolving, self.elsewhere(evolving)) for _ in range(2)
            ]
            tables = [_wider(100 * number + 10 * n, f"more{number}_{n}") for n in range(2)]
            for driver, table in zip(drivers, tables, strict=True):
                driver.check(table.schema)
            first, other = (
                partial(driver.evolve, table.schema)
                for driver, table in zip(drivers, tables, strict=True)
            )
            ended = meet(drivers[0], stop, first, other)
            when = f"by two drivers, one stopped at {stop}"
            self._expect_both(drivers, tables, ended, shown, when)
            self.close(*drivers)

    def _evolving(self, sink: Sink) -> SchemaEvolving[Any]:
        candidate = self.evolving(sink)
        if candidate is None:
            pytest.skip("this kit has no sink that evolves: it does not override `evolving`")
        evolving: SchemaEvolving[Any] = as_(SchemaEvolving, closed_later(candidate))
        self.open(evolving)
        return evolving

    def _expect_both(
        self,
        drivers: Sequence[SchemaEvolving[Any]],
        tables: Sequence[pa.Table],
        ended: Sequence[Exception | None],
        shown: list[pa.Table],
        when: str,
    ) -> None:
        """A driver whose evolve raised does its checkpoint again; then the rows of both arrive."""
        for driver, table, error in zip(drivers, tables, ended, strict=True):
            if error is not None:
                with Clause.EVOLVE.guarding(f"check, then evolve again after {error!r}, {when},"):
                    driver.check(table.schema)
                    driver.evolve(table.schema)
        for driver, table in zip(drivers, tables, strict=True):
            made = self.pre_committed(driver, table, clause=Clause.EVOLVE, checkpoint=len(shown))
            self.commit(driver, made, clause=Clause.EVOLVE, when=when)
            shown.append(table)
        both = pa.concat_tables(shown, promote_options="default")
        when = f"with rows of {tables[0].column_names[-1]} and {tables[1].column_names[-1]}, {when}"
        self.expect_rows(drivers[0], Clause.EVOLVE, when, both)

    def test_evolve_fails_and_is_called_again(self, sink: Sink) -> None:
        """By another driver, after it failed at any line."""
        evolving = self._evolving(sink)
        table = rows(0, 2)
        self.commit(evolving, self.pre_committed(evolving, table), clause=Clause.EVOLVE)

        def evolve(driver: SchemaEvolving[Any], number: int) -> None:
            driver.check(wider(number).schema)
            driver.evolve(wider(number).schema)

        def wider(number: int) -> pa.Table:
            return rows(10 * number, 2).append_column(
                f"more{number}", pa.array([number, None], pa.int64())
            )

        with Clause.EVOLVE.guarding("check, then evolve"):
            stops = lines(evolving, partial(evolve, evolving, 0), self.stops, failing=True)
        for number, stop in enumerate(stops, 1):
            try:
                with watched(evolving, failing(evolving, stop, self.outage)):
                    evolve(evolving, number)
            except Exception as error:
                forget(error)
            when = f"after {self.outage!r} at {stop}, by another driver,"
            driver: SchemaEvolving[Any] = as_(SchemaEvolving, self.elsewhere(evolving))
            with Clause.EVOLVE.guarding(f"check, then evolve {when}"):
                evolve(driver, number)
            made = self.pre_committed(
                driver, wider(number), clause=Clause.EVOLVE, checkpoint=number
            )
            self.commit(driver, made, clause=Clause.EVOLVE, when=when)
            table = pa.concat_tables([table, wider(number)], promote_options="default")
            self.expect_rows(driver, Clause.EVOLVE, f"with rows of the new column, {when}", table)

    # ------------------------------------------------------------------ Auditable
    def test_a_fingerprint_of_any_rows_is_recorded(self, sink: Sink) -> None:
        """Its hash may be any number of 64 bits, and half of these are above 2**63."""
        as_(Auditable, sink)
        shown = [rows(0, 2)]
        self.commit(sink, self.pre_committed(sink, shown[0]))
        for number, hash in enumerate((2**63, 2**64 - 1), 1):
            shown.append(rows(10 * number, 2))
            transaction = self.written(sink, shown[-1])
            made = self.sealed(sink, transaction, 2, clause=Clause.FINGERPRINT, hash=hash)
            when = f"of rows whose hash is {hash}"
            self.commit(sink, made, clause=Clause.FINGERPRINT, when=when)
        self.expect_rows(
            sink, Clause.FINGERPRINT, "after commits of rows with large hashes", *shown
        )

    def test_the_audit_counts_what_is_visible(self, sink: Sink) -> None:
        """And not what the record of the checkpoint has."""
        auditable: Auditable[Any] = as_(Auditable, sink)
        prints = Fingerprint(3, 2**64 - 3), Fingerprint(4, 2**63 + 12345678901)
        parts = []
        for number in range(2):
            made = [
                self.pre_committed(
                    sink,
                    rows(100 * number + 10 * p, fingerprint.rows),
                    hash=fingerprint.hash,
                    subtask=p,
                    checkpoint=number,
                )
                for p, fingerprint in enumerate(prints)
            ]
            self.commit(sink, *made, clause=Clause.AUDIT)
            named = [replace(each, fingerprint=Fingerprint(99)) for each in made[number:]]
            parts.append(Part(LINEAGE, number, named))
        self.abort(sink, self.pre_committed(sink, rows(900, 1), attempt=1))
        others = [
            self.pre_committed(sink, rows(910, 1), lineage="feedbeef", subtask=n) for n in (0, 2)
        ]
        others.append(self.pre_committed(sink, rows(930, 1), job=f"{self.job}-2"))
        for other in others:
            self.commit(sink, other, clause=Clause.AUDIT)
        sibling = self.sibling(sink)
        self.commit(sibling, self.pre_committed(sibling, rows(940, 1)), clause=Clause.AUDIT)
        self.close(sibling)
        waiting = self.pre_committed(sink, rows(950, 1), attempt=2)
        self.open(sink)
        for quick in (False, True):
            with Clause.AUDIT.guarding(f"audit with quick={quick}"):
                held = list(auditable.audit(self.job, parts, quick=quick).holdings)
            assert len(held) == 2, Clause.AUDIT.broken(f"{len(held)} answers for 2 checkpoints")
            for number, holding in enumerate(held):
                expected = sum(prints[number:], Fingerprint())
                seen = f"{holding} of {expected} that are visible, with quick={quick}"
                assert holding.rows in (None, expected.rows), Clause.AUDIT.broken(seen)
                assert holding.fingerprint in (None, expected), Clause.AUDIT.broken(
                    f"{seen}: hashes of participants are added modulo 2**64"
                )
                assert not holding.differences, Clause.AUDIT.broken(seen)
                # the second record lacks a participant that is committed
                assert len(holding.unexpected) <= number, Clause.AUDIT.broken(
                    f"{seen}: `unexpected` is for what is committed of this checkpoint, job and "
                    "sink, and not for aborted or pre-committed attempts, other lineages, jobs and "
                    "sinks"
                )
        self.abort(sink, waiting)

    # ------------------------------------------------------------------ Diagnosable
    def test_what_operators_are_told_is_told_as_documented(self, sink: Sink) -> None:
        diagnosable: Diagnosable[Any] = as_(Diagnosable, sink)
        committables = [self.pre_committed(sink, rows(10 * p, 2), subtask=p) for p in range(2)]
        listed = self.doubts(sink)
        with Clause.INSPECT.guarding("inspect of what `in_doubt` lists"):
            inspected = [*diagnosable.inspect([]), *diagnosable.inspect(listed)]
        assert [
            dict(item.transaction) for item in inspected if isinstance(item, InDoubt)
        ] == listed, Clause.INSPECT.broken(f"{inspected} for {listed}")
        for committable in committables:
            self.abort(sink, committable)
        with Clause.DIAGNOSE.guarding("diagnose"):
            findings = list(as_(Diagnosable, copy_of(sink)).diagnose(self.job))
        strange = [finding for finding in findings if not isinstance(finding, Finding)]
        assert strange == [], Clause.DIAGNOSE.broken(f"{strange}")
        for job in (self.job, "doctor"):
            self.expect_doubts(sink, Clause.DIAGNOSE, f"after diagnose, for job {job!r}", job=job)
        self.expect_rows(sink, Clause.DIAGNOSE, "after diagnose")
        with Clause.WEAKNESSES.guarding("weaknesses"):
            weaknesses = diagnosable.weaknesses()
        assert not isinstance(weaknesses, str), Clause.WEAKNESSES.broken(
            f"one text: {weaknesses!r}"
        )
        assert all(isinstance(weakness, str) for weakness in weaknesses), Clause.WEAKNESSES.broken(
            f"{weaknesses!r}"
        )


def _raised_by(call: Callable[[pa.Schema], None], schema: pa.Schema) -> Exception | None:
    try:
        call(schema)
    except Exception as error:
        forget(error)
        return error
    return None


def _wider(first: int, name: str) -> pa.Table:
    return rows(first, 2).append_column(name, pa.array([first, None], pa.int64()))


def _letters(number: int, job: str, sink: str) -> pa.Table:
    about: dict[str, Any] = {
        "job": job,
        "lineage": LINEAGE,
        "sink": sink,
        "checkpoint": 0,
        "partition": 0,
    }
    about |= {
        "row_number": number,
        "error_class": "BadValue",
        "error": "refused",
        "row": "{}",
        "time": 1_700_000_000_000_000 + number,
    }
    return pa.Table.from_pylist([about], LETTERS)
