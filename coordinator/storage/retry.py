"""Retries of storage calls after transient errors."""

from __future__ import annotations

from collections.abc import Callable

from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception,
    stop_after_delay,
    wait_random_exponential,
)

from sinks._util.log import get_logger

logger = get_logger(__name__)


def retries(
    uri: str,
    seconds: float,
    may_pass: Callable[[BaseException], bool],
    reason: Callable[[BaseException], str],
) -> Retrying:
    """Return the retries of a storage's calls, for up to so many seconds.

    `may_pass` tells whether to try again after an error, and `reason` what the log says about it.
    """

    def tell(state: RetryCallState) -> None:
        error = state.outcome and state.outcome.exception()
        why = reason(error) if error else ""
        logger.warning("checkpoint storage %s: attempt %d: %s", uri, state.attempt_number, why)

    return Retrying(
        retry=retry_if_exception(may_pass),
        stop=stop_after_delay(seconds),
        wait=wait_random_exponential(multiplier=0.1, max=2.0),
        before_sleep=tell,
        reraise=True,
    )
