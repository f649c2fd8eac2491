"""The sweep: presumed abort of what no record names.

Rules: docs/protocol.md#the-rules
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from coordinator.errors import StorageBehind, reason
from coordinator.listener import Listeners, Step
from coordinator.protocol.fence import Fence
from coordinator.protocol.memories import record_filter
from coordinator.protocol.outages import Outages
from coordinator.protocol.ports import Sink
from coordinator.storage import StorageError
from coordinator.store.records import CompletedCheckpoint
from sinks._util.log import get_logger
from sinks._util.machine import Clock
from sinks.errors import CommittedError
from sinks.transaction import Identity, not_among, shown

logger = get_logger(__package__)


class Sweeper:
    """The sweeper, which aborts every pre-committed transaction of a job that no record names."""

    def __init__(
        self,
        job: str,
        sinks: Mapping[str, Sink],
        interval: float,
        listeners: Listeners,
        clock: Clock,
        outages: Outages,
    ) -> None:
        self._job = job
        self._sinks = sinks
        self._interval = interval
        self._listeners = listeners
        self._clock = clock
        self._outages = outages
        self._swept_at = -math.inf

    @property
    def is_due(self) -> bool:
        return self._clock.monotonic() - self._swept_at > self._interval

    def make_due(self) -> None:
        self._swept_at = -math.inf

    def sweep(self, fence: Fence, *, known: CompletedCheckpoint | None) -> None:
        """List what is in doubt in each sink, and abort what no record names.

        What cannot be listed or aborted now is left to the next sweep, because nothing but locks
        and resources depends on it. `known` is the newest checkpoint that this driver has put or
        read. If storage ends before it now, records vanished, and nothing is aborted.
        """
        aborted: dict[str, list[dict[str, Any]]] = {}
        self._swept_at = self._clock.monotonic()
        for name, sink in self._sinks.items():
            try:
                listed = list(sink.in_doubt(self._job))
                self._outages.record_success(f"sink {name!r}", "list what is in doubt")
            except Exception as error:
                self.make_due()
                self._outages.record_failure(f"sink {name!r}", "list what is in doubt", error)
                continue
            # Generation and records are read after the sink's list, so that a newer driver, and
            # every decision on what is listed, is seen (I6).
            try:
                fence.require_newest("sweep")
                wanted = record_filter({}, listed, fence.store.lineage)
                history = fence.store.history(wanted) if listed else []
                if known and listed and _ends_before(history, known):
                    raise StorageError(
                        fence.store.storage.uri, "", "the records of this job vanished"
                    )
                self._outages.record_success("the storage", "read the records before a sweep")
            except (StorageError, StorageBehind) as error:
                self.make_due()
                self._outages.record_failure(
                    "the storage", "read the records before a sweep", error
                )
                continue
            # R16: what a record names is decided, and is not aborted.
            named = [c.transaction for complete in history for c in complete.committables.values()]
            ended, left = abort_or_leave(sink, not_among(listed, named))
            if ended:
                aborted[name] = ended
            if left:
                self.make_due()
        if aborted:
            names = [
                f"{name}: {shown(orphan)}"
                for name, orphans in aborted.items()
                for orphan in orphans
            ]
            logger.info("job %s: aborted orphaned transactions %s", self._job, "; ".join(names))
        self._listeners.tell(Step.SWEPT, aborted=aborted)


def _ends_before(history: Sequence[CompletedCheckpoint], known: CompletedCheckpoint) -> bool:
    """Tell whether records of the `known` checkpoint, or of one of its replays, are missing."""
    newest = [(complete.checkpoint_id, len(complete.rounds)) for complete in history[-1:]]
    return newest < [(known.checkpoint_id, len(known.rounds))]


def abort_or_leave(
    sink: Sink, transactions: Sequence[Identity]
) -> tuple[list[dict[str, Any]], bool]:
    """Abort transactions.

    Returns the transactions that are aborted now, and whether any is left to the next sweep.
    """
    try:
        answers = (
            list(zip(transactions, sink.abort_all(transactions), strict=True))
            if transactions
            else []
        )
    except Exception as error:
        answers = [(transaction, error) for transaction in transactions]
    for transaction, answer in answers:
        if isinstance(answer, CommittedError):
            logger.warning("not aborted, since somebody has committed it: %s", shown(transaction))
        elif answer:
            logger.warning(
                "could not abort %s; left to the next sweep: %s", shown(transaction), reason(answer)
            )
    left = any(answer and not isinstance(answer, CommittedError) for _, answer in answers)
    return [dict(transaction) for transaction, answer in answers if answer is None], left
