"""The time that the protocol waits by."""

from __future__ import annotations

import threading
import time


class Clock:
    """The machine's. Tests pass one that nobody waits for."""

    def monotonic(self) -> float:
        """Seconds, for durations within this process."""
        return time.monotonic()

    def milliseconds(self) -> int:
        """Since the epoch, for records."""
        return time.time_ns() // 1_000_000

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def wait(self, event: threading.Event, seconds: float) -> bool:
        """For the event, at most so many seconds; whether it came."""
        return event.wait(seconds)
