"""Retries of storage calls after transient errors."""

from __future__ import annotations

from collections.abc import Callable

from tenacity import RetryCallState, Retrying, retry_if_exception

from sinks._util.log import get_logger
from sinks._util.machine import machine

logger = get_logger(__name__)

_FIRST = 0.1
_LONGEST = 2.0
"""Seconds of the longest pause after the first attempt, and after any attempt."""


def retries(
    uri: str,
    seconds: float,
    may_pass: Callable[[BaseException], bool],
    reason: Callable[[BaseException], str],
) -> Retrying:
    """Return the retries of one call of a storage, for up to so many seconds from now.

    `may_pass` tells whether to try again after an error, and `reason` what the log says about it.
    """
    end = machine.clock.monotonic() + seconds

    def pause(state: RetryCallState) -> float:
        longest = min(_FIRST * 2.0 ** min(state.attempt_number - 1, 10), _LONGEST)
        return machine.random.uniform(0, longest)

    def tell(state: RetryCallState) -> None:
        error = state.outcome and state.outcome.exception()
        why = reason(error) if error else ""
        logger.warning("checkpoint storage %s: attempt %d: %s", uri, state.attempt_number, why)

    return Retrying(
        retry=retry_if_exception(may_pass),
        stop=lambda _: machine.clock.monotonic() >= end,
        wait=pause,
        sleep=machine.clock.sleep,
        before_sleep=tell,
        reraise=True,
    )
