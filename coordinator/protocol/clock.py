"""A driver's clock, and the deadline of a checkpoint."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from coordinator.errors import CheckpointError, CheckpointExpired
from coordinator.protocol.ports import MicroBatch
from sinks._util.log import get_logger

logger = get_logger(__package__)


class Clock:
    """The machine's clock. Tests pass one that does not wait."""

    def monotonic(self) -> float:
        """Return seconds, for durations within this process."""
        return time.monotonic()

    def milliseconds(self) -> int:
        """Return the milliseconds since the epoch, for records."""
        return time.time_ns() // 1_000_000

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def wait(self, event: threading.Event, seconds: float) -> bool:
        """Wait for the event, at most so many seconds, and return whether it came."""
        return event.wait(seconds)


@contextmanager
def deadline(seconds: float, batch: MicroBatch, clock: Clock) -> Iterator[None]:
    """Cancel the batch if the block takes longer than `seconds`, and raise `CheckpointExpired`."""
    finished = threading.Event()
    end = clock.monotonic() + seconds

    def watch() -> None:
        clock.wait(finished, seconds)
        while not finished.is_set():  # again, since a job may have started after the first time
            try:
                batch.cancel()
            except Exception:
                logger.warning(
                    "checkpoint %d could not be cancelled", batch.facts.checkpoint_id, exc_info=True
                )
            clock.wait(finished, 1)

    expiry = CheckpointExpired(
        f"checkpoint {batch.facts.checkpoint_id} was not complete within {seconds:g} s "
        "(CheckpointConfig.timeout)"
    )
    watcher = threading.Thread(target=watch, name="checkpoint-timeout", daemon=True)
    watcher.start()
    try:
        yield
    except Exception as error:
        if clock.monotonic() >= end and not isinstance(error, CheckpointError):
            raise expiry from error
        raise
    finally:
        finished.set()
        watcher.join()
    if clock.monotonic() >= end:
        raise expiry
