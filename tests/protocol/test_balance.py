"""The books, from facts alone: docs/verify.md."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from coordinator.operations.inspection.balance import Balance, SinkHoldings, Verdict, balance
from coordinator.store.records import Acceptance, CompletedCheckpoint, Record
from sinks.audit import Audit, Holding
from sinks.transaction import Fingerprint
from tests.protocol.test_decisions import committable, record

SIX = Fingerprint(6, 14)


def books(*rounds: Record, holding: Holding | None = None, why: str = "", audit: Audit | None = None) -> Balance:
    number = rounds[0].checkpoint_id
    answer = SinkHoldings({number: holding} if holding else {}, {number: why} if why else {}, audit or Audit([]))
    return balance([CompletedCheckpoint(rounds)], {"s": answer})


def of(n: int = 4, **changed: Any) -> Record:
    """Two participants with three rows each."""
    return replace(record(n), rows={"s": 6}, **changed)


def test_what_agrees_is_balanced() -> None:
    found = books(of(batch_rows=8), holding=Holding(SIX, 6))
    assert found.verdict is Verdict.BALANCED
    assert found.totals() == {
        "s": {"batch": 8, "filtered": 2, "read": 6, "dead_lettered": 0}
        | {"pre_committed": 6, "given_up": 0, "ledger": 6, "present": 6}
    }
    assert books(of(), holding=Holding(SIX, None, remarks=("no",))).verdict is Verdict.BALANCED
    assert books(replace(of(), committables=(), rows={"s": 0}), holding=Holding()).verdict is Verdict.BALANCED


def test_what_differs_is_named() -> None:
    for holding, words in (
        (Holding(SIX, 5), "5 of 6 row(s) are there as they were written, fewer"),
        (Holding(SIX, 7), "7 of 6 row(s) are there as they were written, more"),
        (Holding(Fingerprint(5, 14), 5), "the system's ledger has 5 row(s), and the record 6"),
        (Holding(Fingerprint(6, 3), 6), "the hashes differ"),
        (Holding(SIX, 6, ("twice",)), "twice"),
    ):
        found = books(of(), holding=holding)
        assert found.verdict is Verdict.DIFFERS
        assert len(found.lines[0].differences) == 1
        assert words in found.lines[0].differences[0]
    other = books(of(), holding=Holding(SIX, 6), audit=Audit([], ("rows of others",)))
    assert (other.lines[0].verdict, other.verdict) == (Verdict.BALANCED, Verdict.DIFFERS)
    bad = books(replace(of(), rows={"s": 6, "dead": 3}, dead_letters={"dead": "s"}), holding=Holding(SIX, 6))
    assert bad.lines[0].counts.items() >= {"read": 9, "dead_lettered": 3}.items()
    assert bad.lines[0].verdict is Verdict.BALANCED
    lost = books(replace(of(), rows={"s": 9}), holding=Holding(SIX, 6))
    assert lost.lines[0].differences == ("9 row(s) came to the sink, and its transactions acknowledged 6",)


def test_what_nobody_can_tell_is_not_called_balanced() -> None:
    assert books(of(), holding=Holding(remarks=("no",))).verdict is Verdict.UNKNOWN
    assert books(of(), holding=Holding(SIX), audit=Audit([], unknown=("no right",))).verdict is Verdict.UNKNOWN
    assert books(of(), why="in doubt").lines[0].remarks == ("in doubt",)
    assert books(of(), why="in doubt").verdict is Verdict.UNKNOWN
    assert balance([], {"s": SinkHoldings({}, {}, Audit([]))}).verdict is Verdict.UNKNOWN
    without = balance([CompletedCheckpoint((of(),))], {})
    assert (without.verdict, without.lines[0].sink) == (Verdict.UNKNOWN, "s")


def test_rows_that_an_operator_gave_up_are_no_difference_and_are_counted() -> None:
    given_up = Acceptance("s", 1, committable(1).transaction, 3, "lost", "me", "why")
    loss = replace(record(4, 1, ()), accepted=(given_up,))
    (line,) = books(of(), loss, holding=Holding(Fingerprint(3, 7), 3)).lines
    assert line.counts.items() >= {"read": 6, "pre_committed": 6, "given_up": 3, "present": 3}.items()
    assert line.verdict is Verdict.BALANCED


def test_a_replacement_counts_in_place_of_what_was_lost() -> None:
    (line,) = books(of(), record(4, 1, (1,)), holding=Holding(SIX, 6)).lines
    assert line.verdict is Verdict.BALANCED
