"""The row-count check that the driver makes while its query runs.

It is the check of `coordinator verify --quick`, made again and again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from coordinator.config import CheckpointConfig
from coordinator.operations.inspection.balance import LOOKED_AT, Balance, take_balance
from coordinator.protocol.ports import Query, Sink
from coordinator.store.job_store import JobStore
from sinks._util.log import get_logger
from sinks._util.machine import Event, Thread, machine

logger = get_logger("coordinator.verifier")

_LAST_LOOK = 2.0
"""Seconds that the end of a query waits for a comparison that is under way."""


class Verifier:
    """Comparison of records and ledgers in a thread of its own.

    It uses copies of the sinks, so a system that does not answer holds nobody up. No decision
    depends on what is found.
    """

    def __init__(
        self,
        store: JobStore,
        sinks: Mapping[str, Sink],
        config: CheckpointConfig,
        tell: Callable[[Balance], None],
    ) -> None:
        self._store = store
        self._sinks = sinks
        self._config = config
        self._tell = tell
        self._ended = machine.threads.event()
        self._thread: Thread | None = None

    def begin(self, query: Query) -> None:
        self.end()
        self._ended = machine.threads.event()
        if self._config.verify_interval:
            self._thread = machine.threads.start(
                self._verify, query, self._ended, name="checkpoint-verifier"
            )

    def end(self) -> None:
        thread = self._thread
        self._thread = None
        self._ended.set()
        if thread:
            thread.join(_LAST_LOOK)

    def _verify(self, query: Query, ended: Event) -> None:
        while not ended.wait(self._config.verify_interval) and query.isActive:
            try:
                # The driver's own store follows its own lineage.
                store = JobStore(self._store.storage, self._store.job)
                retained = self._config.retained_checkpoints
                balance = take_balance(
                    store, self._sinks, quick=True, retained=retained, last=LOOKED_AT
                )
                if not ended.is_set():
                    self._tell(balance)
            except Exception:
                if not ended.is_set():
                    logger.info(
                        "job %s: row counts could not be compared", self._store.job, exc_info=True
                    )
