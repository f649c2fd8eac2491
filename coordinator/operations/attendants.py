"""Everything that accompanies a query on its driver.

It decides nothing. `CheckpointCoordinator` knows only the object `Attendants`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from coordinator.config import CheckpointConfig
from coordinator.operations.heartbeat import Heartbeats
from coordinator.operations.requests import Requests
from coordinator.operations.statistics.metrics import open_telemetry, registry_of, serve
from coordinator.operations.statistics.model import CheckpointHistory
from coordinator.operations.statistics.tracker import CheckpointStatisticsTracker
from coordinator.operations.verifier import Verifier
from coordinator.protocol.ports import Query, Sink
from coordinator.store.job_store import JobStore
from sinks._util.log import get_logger

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

logger = get_logger("coordinator.coordinator")


class Attendants:
    """The companions of a query on its driver.

    They are the heartbeat, what operators request, the row-count check, the history of checkpoints,
    and the metrics.
    """

    def __init__(
        self,
        store: JobStore,
        sinks: Mapping[str, Sink],
        config: CheckpointConfig,
        statistics: CheckpointStatisticsTracker,
        do_request: Callable[[str, Callable[[], None]], dict[str, Any]],
        require_newest: Callable[[], None],
    ) -> None:
        """Begin nothing yet.

        `do_request` does what an operator requests, and `require_newest` raises if another driver
        has taken the job over.
        """
        self._job = store.job
        self._metrics_address = config.metrics_address
        self._statistics = statistics
        self.history = CheckpointHistory(store, config.history_size)
        statistics.reporters.append(self.history)
        self._requests = Requests(store, do_request, require_newest)
        self.heartbeat = Heartbeats(
            store,
            config.heartbeat_interval,
            config.request_poll_interval,
            lambda: statistics.activity(config.request_poll_interval),
            self.history.flush,
            self._requests.look,
        )
        self._verifier = Verifier(store, sinks, config, statistics.verified)
        self._opened_telemetry = False
        self._registry: CollectorRegistry | None = None
        self._stop_metrics: Callable[[], None] | None = None

    def begin(self, query: Query) -> None:
        """Accompany a run of the query from before its driver claims a generation."""
        self._open_metrics()
        self._verifier.begin(query)

    def claimed(self, generation: int, query: Query) -> None:
        """Give heartbeats, and look for requests of operators, under a generation from now on."""
        self.heartbeat.begin(generation, query)

    @property
    def gives_heartbeats(self) -> bool:
        return self.heartbeat.begun

    def end(self, reason: str) -> None:
        """Give the last heartbeat of a query, which says why it has ended.

        Only the first reason counts.
        """
        self.heartbeat.end(reason)

    def close(self) -> None:
        self._verifier.end()
        self.end("the coordinator was closed")
        self._requests.end()
        stop_metrics = self._stop_metrics
        self._stop_metrics = None
        if stop_metrics:
            stop_metrics()

    def _open_metrics(self) -> None:
        """Open the metrics, once in the life of this object.

        What is opened for OpenTelemetry stays as long as the process. If metrics cannot be served
        at the address of the config, which an earlier driver may still hold, the job runs without
        them.
        """
        if not self._opened_telemetry:
            open_telemetry(self._statistics)
            self._opened_telemetry = True
        address = self._metrics_address
        if address and self._stop_metrics is None:
            self._registry = self._registry or registry_of(self._statistics)
            try:
                self._stop_metrics = serve(self._registry, address)
            except (OSError, ValueError, OverflowError) as error:
                # The address is taken, or is no name and port of this machine.
                logger.warning("job %s: cannot serve metrics at %s: %s", self._job, address, error)
