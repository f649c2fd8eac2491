"""A driver's clock, the deadline of a checkpoint, and the log of those who do not answer."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from coordinator.errors import CheckpointExpired
from coordinator.protocol.batch import MicroBatch
from sinks.errors import printable

logger = logging.getLogger(__package__)

_FIRST_REMINDER, _LONGEST = 10.0, 600.0


class Clock:
    """The machine's clock. Tests pass one that does not wait."""

    def monotonic(self) -> float:
        """Seconds, for durations within this process."""
        return time.monotonic()

    def milliseconds(self) -> int:
        """Since the epoch, for records."""
        return time.time_ns() // 1_000_000

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def wait(self, event: threading.Event, seconds: float) -> bool:
        """Wait for the event, at most so many seconds; returns whether it came."""
        return event.wait(seconds)


@contextmanager
def deadline(seconds: float, batch: MicroBatch, clock: Clock) -> Iterator[None]:
    """Cancels the batch after so many seconds; raises `CheckpointExpired` if it came to that."""
    over, end = threading.Event(), clock.monotonic() + seconds

    def watch() -> None:
        clock.wait(over, seconds)
        while not over.is_set():  # again, since a job may have started after the first time
            try:
                batch.cancel()
            except Exception:
                logger.warning("checkpoint %d could not be cancelled", batch.facts.checkpoint_id, exc_info=True)
            clock.wait(over, 1)

    expiry = CheckpointExpired(
        f"checkpoint {batch.facts.checkpoint_id} was not complete within {seconds:g} s (CheckpointConfig.timeout)"
    )
    watcher = threading.Thread(target=watch, name="checkpoint-timeout", daemon=True)
    watcher.start()
    try:
        yield
    except Exception as error:
        if clock.monotonic() >= end:
            raise expiry from error
        raise
    finally:
        over.set()
        watcher.join()
    if clock.monotonic() >= end:
        raise expiry


@dataclass
class _Outage:
    doing: str
    since: float
    tries: int = 1
    remind_after: float = field(default_factory=lambda: _FIRST_REMINDER)


class Outages:
    """Who does not answer a driver: logged when it begins, at growing intervals, and when it is over. Each has one
    outage at a time, of what failed first (`doing`); it is over when that has succeeded."""

    def __init__(self, job: str, clock: Clock) -> None:
        self._job, self._clock = job, clock
        self._now: dict[str, _Outage] = {}

    def failed(self, who: str, doing: str, error: BaseException) -> None:
        logger.debug("job %s: %s failed to %s", self._job, who, doing, exc_info=error)
        text = printable(" ".join(str(error).split()))
        outage = self._now.get(who)
        if outage is None:
            self._now[who] = _Outage(doing, self._clock.monotonic())
            logger.warning("job %s: %s fails to %s, and is asked again: %s", self._job, who, doing, text)
            return
        outage.tries += 1
        lasted = self._clock.monotonic() - outage.since
        if lasted >= outage.remind_after:
            outage.remind_after = lasted + min(lasted, _LONGEST)
            again = "job %s: %s has failed to %s for %.0f s, %d times: %s"
            logger.warning(again, self._job, who, outage.doing, lasted, outage.tries, text)

    def over(self, who: str, doing: str) -> None:
        outage = self._now.get(who)
        if outage and outage.doing == doing:
            del self._now[who]
            lasted = self._clock.monotonic() - outage.since
            level = logging.INFO if lasted < _FIRST_REMINDER else logging.WARNING
            logger.log(level, "job %s: %s answers again, after %.1f s", self._job, who, lasted)
