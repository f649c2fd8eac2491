"""What each strategy answers to a history of failures. Times are made up: nothing sleeps here."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from coordinator import (
    Attempt,
    ExponentialDelay,
    FailureRate,
    FixedDelay,
    NoRestart,
    run,
)
from coordinator.errors import JobFailed


def failed(*ran: tuple[float, float]) -> list[Attempt]:
    """Attempts that began and failed at these times; the wall clock goes back by a day with each."""
    error = RuntimeError("down")
    return [
        Attempt(number, began - 86_400 * number, ended - 86_400 * (number + 1), error=error, span=(began, ended))
        for number, (began, ended) in enumerate(ran, 1)
    ]


def delays(strategy: Any, attempts: list[Attempt]) -> list[float | None]:
    """After the first failure, the first two, and so on."""
    return [strategy.delay_after(attempts[:count]) for count in range(1, len(attempts) + 1)]


FIVE = failed(*[(10 * i, 10 * i + 5) for i in range(5)])


def test_no_restart() -> None:
    assert NoRestart().delay_after(FIVE[:1]) is None


def test_fixed_delay_counts_restarts() -> None:
    assert delays(FixedDelay(attempts=3, delay=7), FIVE) == [7, 7, 7, None, None]
    assert delays(FixedDelay(attempts=0), FIVE[:1]) == [None]


def test_exponential_delay_grows_to_its_maximum() -> None:
    strategy = ExponentialDelay(initial=1, max=3, multiplier=1.5, jitter=0)
    assert delays(strategy, FIVE) == [1, 1.5, 2.25, 3, 3]


def test_exponential_delay_of_many_failures_does_not_overflow() -> None:
    assert ExponentialDelay(jitter=0, multiplier=10).delay_after(FIVE * 2000) == 60
    assert ExponentialDelay(jitter=0, multiplier=1).delay_after(FIVE * 2000) == 1


def test_exponential_delay_begins_anew_after_a_long_run() -> None:
    strategy = ExponentialDelay(jitter=0, multiplier=2, reset_after=100, attempts=2)
    assert delays(strategy, failed((0, 1), (2, 3), (4, 104), (105, 106), (107, 108))) == [1, 2, 1, 2, None]


def test_exponential_delay_without_end() -> None:
    assert ExponentialDelay(jitter=0).delay_after(FIVE * 100) == 60


def test_jitter_stays_within_its_share_and_below_the_maximum() -> None:
    strategy = ExponentialDelay(initial=10, max=10.5, multiplier=1, jitter=0.1)
    seen = [strategy.delay_after(FIVE[:1]) or 0 for _ in range(1000)]
    assert min(seen) >= 9
    assert max(seen) <= 10.5
    assert len(set(seen)) > 100


def test_failure_rate_looks_at_its_interval_only() -> None:
    strategy = FailureRate(max_failures=2, interval=60, delay=4)
    slow = failed(*[(40 * i, 40 * i + 5) for i in range(6)])
    assert delays(strategy, slow) == [4] * 6
    assert delays(strategy, FIVE) == [4, 4, None, None, None]


def test_a_wall_clock_that_jumps_does_not_hide_a_failure_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    hours = itertools.count(step=3600)
    monkeypatch.setattr("coordinator.operations.restart.time.time", lambda: float(next(hours)))
    starts = 0

    def down() -> Any:
        nonlocal starts
        starts += 1
        if starts > 3:
            raise KeyboardInterrupt("restarted for ever")
        raise RuntimeError("down")

    with pytest.raises(JobFailed, match="at attempt 3"):
        run(down, FailureRate(max_failures=2, interval=60, delay=0))


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: FixedDelay(attempts=-1), r"attempts must be 0 or more, not -1"),
        (lambda: FixedDelay(delay=float("nan")), r"delay must be a finite number of seconds, not nan"),
        (lambda: ExponentialDelay(initial=5, max=2), r"max must be at least initial"),
        (lambda: ExponentialDelay(multiplier=0.5), r"multiplier must be 1 or more"),
        (lambda: ExponentialDelay(jitter=2), r"jitter is a share"),
        (lambda: ExponentialDelay(reset_after=0), r"reset_after must be more than 0"),
        (lambda: FailureRate(max_failures=0), r"max_failures must be 1 or more"),
        (lambda: FailureRate(interval=0), r"interval must be more than 0"),
    ],
)
def test_refused(make: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        make()
