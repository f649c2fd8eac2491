"""The folder of one job in checkpoint storage.

`JobStore` and `Journal` know different parts of it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

from coordinator.errors import WrongJob
from coordinator.storage import CheckpointStorage, StorageError
from coordinator.storage.base import TimedStorage
from coordinator.store.encoding import unseal
from coordinator.store.records import Heartbeat
from sinks._util.machine import machine
from sinks.transaction import token


class JobFolder:
    """The folder of a job, which refuses to read what belongs to another job."""

    def __init__(
        self,
        storage: CheckpointStorage,
        job: str,
        on_call: Callable[[str, float], None] | None = None,
    ) -> None:
        """Open nothing yet. `on_call` is as in `TimedStorage`."""
        self.storage = storage
        self.timed_storage = TimedStorage(storage, on_call) if on_call else storage
        """The storage, for all calls whose duration counts in the statistics."""
        self.job = job
        self.root = token(job)

    def read(self, key: str) -> dict[str, Any] | None:
        data = self.timed_storage.get(key)
        if data is None:
            return None
        body = unseal(data, self.describe(key))
        if (job := body.get("job")) != self.job:
            raise WrongJob(
                f"{self.describe(key)} belongs to job {job!r}, not to {self.job!r}. Give every job "
                "its own name, and do not copy records between jobs."
            )
        return body

    def stale_listing_error(self, key: str, what: str) -> StorageError:
        advice = (
            "Listings have to show what is there; use a storage that is consistent, and start again"
        )
        return StorageError(self.storage.uri, key, what, advice)

    def describe(self, key: str) -> str:
        return f"record {key} in {self.storage.uri}"


def new_heartbeat(storage: CheckpointStorage, next: float = 0.0, ended: str = "") -> Heartbeat:
    who = f"host {socket.gethostname()}, process {os.getpid()}"
    return Heartbeat(who, machine.clock.milliseconds(), storage.clock(), next, ended)
