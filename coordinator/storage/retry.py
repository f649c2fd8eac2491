"""Retries of storage calls after transient errors."""

from __future__ import annotations

from collections.abc import Callable

from tenacity import RetryCallState, Retrying, retry_if_exception

from sinks._util.log import get_logger
from sinks._util.machine import machine

logger = get_logger(__name__)


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

    def tell(state: RetryCallState) -> None:
        error = state.outcome and state.outcome.exception()
        why = reason(error) if error else ""
        logger.warning("checkpoint storage %s: attempt %d: %s", uri, state.attempt_number, why)

    return Retrying(
        retry=retry_if_exception(may_pass),
        stop=lambda _: machine.clock.monotonic() >= end,
        wait=lambda state: machine.random.pause(state.attempt_number, longest=2.0),
        sleep=machine.clock.sleep,
        before_sleep=tell,
        reraise=True,
    )
