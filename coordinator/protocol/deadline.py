"""The deadline of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from coordinator.errors import CheckpointError, CheckpointExpired
from coordinator.protocol.ports import MicroBatch
from sinks._util.log import get_logger
from sinks._util.machine import Clock, machine

logger = get_logger(__package__)


@contextmanager
def deadline(seconds: float, batch: MicroBatch, clock: Clock) -> Iterator[None]:
    """Cancel the batch if the block takes longer than `seconds`, and raise `CheckpointExpired`."""
    finished = machine.threads.event()
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
    watcher = machine.threads.start(watch, name="checkpoint-timeout")
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
