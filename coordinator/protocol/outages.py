"""Outages of sinks, sources and storage, for the log."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from sinks._util.log import get_logger
from sinks._util.machine import Clock
from sinks.errors import printable

logger = get_logger(__package__)

_FIRST_REMINDER = 10.0
"""Seconds until the first reminder that an outage lasts."""
_LONGEST_INTERVAL = 600.0
"""Seconds between two reminders, at most."""


@dataclass
class _Outage:
    doing: str
    since: float
    tries: int = 1
    remind_after: float = field(default_factory=lambda: _FIRST_REMINDER)


class Outages:
    """A log of outages: each when it begins, at growing intervals, and when it is over.

    Each sink, source or storage has at most one outage at a time, of what failed first (`doing`).
    The outage is over when that has succeeded.
    """

    def __init__(self, job: str, clock: Clock) -> None:
        self._job = job
        self._clock = clock
        self._now: dict[str, _Outage] = {}

    def record_failure(self, who: str, doing: str, error: BaseException) -> None:
        """Log that `who` failed, unless that was logged just now.

        `doing` is what failed, as an infinitive.
        """
        logger.debug("job %s: %s failed to %s", self._job, who, doing, exc_info=error)
        text = printable(" ".join(str(error).split()))
        outage = self._now.get(who)
        if outage is None:
            self._now[who] = _Outage(doing, self._clock.monotonic())
            logger.warning(
                "job %s: %s fails to %s, and is asked again: %s", self._job, who, doing, text
            )
            return
        outage.tries += 1
        lasted = self._clock.monotonic() - outage.since
        if lasted >= outage.remind_after:
            outage.remind_after = lasted + min(lasted, _LONGEST_INTERVAL)
            again = "job %s: %s has failed to %s for %.0f s, %d times: %s"
            logger.warning(again, self._job, who, outage.doing, lasted, outage.tries, text)

    def record_success(self, who: str, doing: str) -> None:
        """Log that `who` answers again, if `doing` has failed before."""
        outage = self._now.get(who)
        if outage and outage.doing == doing:
            del self._now[who]
            lasted = self._clock.monotonic() - outage.since
            level = logging.INFO if lasted < _FIRST_REMINDER else logging.WARNING
            logger.log(level, "job %s: %s answers again, after %.1f s", self._job, who, lasted)
