"""Metrics of OpenTelemetry, whose own exporter shows the metrics to Prometheus.

The name `checkpointing.commit.retries` is `checkpointing_commit_retries_total` in Prometheus; a
unit of seconds or bytes becomes part of it there. Every metric has the label `job_name`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from opentelemetry import metrics

from coordinator.operations.inspection.balance import Balance
from coordinator.operations.statistics.model import CheckpointStatistics, Status
from coordinator.operations.statistics.tracker import CheckpointStatisticsTracker
from sinks._util.extras import needs_extra

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_SCOPE = "coordinator"
JOB = "job_name"
"""The label of the job, because the label `job` is Prometheus' own."""
_BUCKETS = {
    "s": (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 600.0),
    "By": tuple(float(10**n) for n in range(3, 12)),
}
"""The bounds of histogram buckets, by unit."""


@dataclass(frozen=True)
class Metric:
    name: str
    unit: str
    description: str


CHECKPOINTS = Metric("checkpointing.checkpoints", "", "Tries of checkpoints that have ended")
ROWS = Metric("checkpointing.rows", "", "Rows that became visible")
DEAD_LETTERS = Metric("checkpointing.dead_letters", "", "Rows that the sink refused")
BYTES = Metric("checkpointing.data", "By", "Size of these rows as Arrow record batches")
TRANSACTIONS = Metric(
    "checkpointing.transactions", "", "Transactions by outcome: committed, aborted, lost, unknown"
)
COMMIT_RETRIES = Metric(
    "checkpointing.commit.retries", "", "Outcomes that had to be asked for again"
)
COUNTERS = (CHECKPOINTS, ROWS, DEAD_LETTERS, BYTES, TRANSACTIONS, COMMIT_RETRIES)

DURATION = Metric(
    "checkpointing.checkpoint.duration",
    "s",
    "From trigger to all rows visible, of completed checkpoints",
)
SIZE = Metric(
    "checkpointing.checkpoint.size", "By", "Rows of completed checkpoints as Arrow record batches"
)
PHASE = Metric(
    "checkpointing.phase.duration", "s", "Of prepare, validate, decide, commit and recover"
)
STORAGE = Metric(
    "checkpointing.storage.duration",
    "s",
    "Of the driver's calls of checkpoint storage: put, get, list, delete",
)
HISTOGRAMS = (DURATION, SIZE, PHASE, STORAGE)

GAUGES = (
    Metric(
        "checkpointing.checkpoint.last",
        "",
        "Number of the newest visible checkpoint, -1 before the first",
    ),
    Metric(
        "checkpointing.checkpoint.last.timestamp", "s", "When it became visible, since the epoch"
    ),
    Metric("checkpointing.checkpoint.last.duration", "s", "How long it took"),
    Metric("checkpointing.checkpoint.last.size", "By", "Its rows as Arrow record batches"),
    Metric(
        "checkpointing.checkpoint.in_progress",
        "s",
        "How long the current one has been under way; 0 between two",
    ),
    Metric("checkpointing.in_doubt", "", "Decided transactions that are not known to be visible"),
    Metric("checkpointing.in_doubt.age", "s", "How long they have been in doubt"),
    Metric("checkpointing.generation", "", "Number of the driver among all of the job"),
    Metric("checkpointing.exactly_once", "", "1 if the guarantee is exactly-once"),
    Metric(
        "checkpointing.balance.differences",
        "",
        "Differences between the row counts of the newest checkpoints",
    ),
    Metric("checkpointing.balance.unknown", "", "Checkpoints of these that could not be compared"),
    Metric("checkpointing.balance.rows", "", "Rows of the newest checkpoints, by column"),
    Metric(
        "checkpointing.balance.timestamp", "s", "When row counts were compared, since the epoch"
    ),
)

GaugeValues = dict[str, Sequence[tuple[float, Mapping[str, str]]]]
"""The values of gauges, by name; each value with its labels."""


def _of_tracker(tracker: CheckpointStatisticsTracker) -> GaugeValues:
    newest = tracker.newest
    values = {
        "checkpointing.checkpoint.last": newest.checkpoint_id if newest else -1,
        "checkpointing.checkpoint.last.timestamp": newest.ended_at / 1000 if newest else 0,
        "checkpointing.checkpoint.last.duration": newest.duration if newest else 0,
        "checkpointing.checkpoint.last.size": sum(newest.bytes.values()) if newest else 0,
        "checkpointing.checkpoint.in_progress": tracker.under_way_seconds,
        "checkpointing.in_doubt": tracker.in_doubt.total(),
        "checkpointing.in_doubt.age": tracker.in_doubt_seconds,
        "checkpointing.generation": tracker.generation,
    }
    if tracker.exactly_once is not None:
        values["checkpointing.exactly_once"] = tracker.exactly_once
    shown: GaugeValues = {name: [(value, {})] for name, value in values.items()}
    return shown | _of_balance(tracker.balance, tracker.verified_at) if tracker.balance else shown


def _of_balance(balance: Balance, verified_at: int) -> GaugeValues:
    by_sink = balance.by_sink()
    return {
        "checkpointing.balance.differences": [
            (count, {"sink": sink}) for sink, (count, _) in by_sink.items()
        ],
        "checkpointing.balance.unknown": [
            (count, {"sink": sink}) for sink, (_, count) in by_sink.items()
        ],
        "checkpointing.balance.timestamp": [(verified_at / 1000, {})],
        "checkpointing.balance.rows": [
            (rows, {"sink": sink, "column": column})
            for sink, totals in balance.totals().items()
            for column, rows in totals.items()
            if rows is not None
        ],
    }


class MetricsReporter:
    """A reporter that passes to a meter what the tracker tells."""

    def __init__(self, tracker: CheckpointStatisticsTracker, meter: metrics.Meter) -> None:
        self._job = {JOB: tracker.job}
        self._counters = {
            each: meter.create_counter(each.name, each.unit, each.description) for each in COUNTERS
        }
        self._histograms = {
            each: meter.create_histogram(
                each.name,
                each.unit,
                each.description,
                explicit_bucket_boundaries_advisory=_BUCKETS[each.unit],
            )
            for each in HISTOGRAMS
        }
        for each in GAUGES:
            read = partial(self._observed, weakref.ref(tracker), each.name)
            meter.create_observable_gauge(each.name, [read], each.unit, each.description)
        tracker.reporters.append(self)
        tracker.on_storage_call.append(self._storage_called)

    def begin_at_zero(self, sinks: Iterable[str]) -> None:
        """Report the counters as 0.

        An alert of Prometheus on the first event of any kind needs the 0 before that event.
        """
        self._add(COMMIT_RETRIES, 0)
        for status in Status:
            if status is not Status.IN_PROGRESS:
                self._add(CHECKPOINTS, 0, status=status.value)
        for sink in sinks:
            self._add(DEAD_LETTERS, 0, sink=sink)
            for outcome in ("committed", "aborted", "lost", "unknown"):
                self._add(TRANSACTIONS, 0, sink=sink, outcome=outcome)

    def report(self, statistics: CheckpointStatistics) -> None:
        self._add(CHECKPOINTS, 1, status=statistics.status.value)
        self._add(COMMIT_RETRIES, statistics.commit_retries)
        for phase, seconds in statistics.phases.items():
            self._record(PHASE, seconds, phase=phase)
        for outcome, counts in (
            ("aborted", statistics.aborted),
            ("lost", statistics.replayed),
            ("unknown", statistics.unknown),
        ):
            for sink, count in counts.items():
                self._add(TRANSACTIONS, count, sink=sink, outcome=outcome)
        if statistics.status is Status.COMPLETED:
            self._record(DURATION, statistics.duration)
            self._record(SIZE, sum(statistics.bytes.values()))
            for sink, rows in statistics.rows.items():
                self._add(ROWS, rows, sink=sink)
                self._add(BYTES, statistics.bytes[sink], sink=sink)
                self._add(
                    TRANSACTIONS, statistics.transactions[sink], sink=sink, outcome="committed"
                )
            for sink, rows in statistics.dead_lettered.items():
                self._add(DEAD_LETTERS, rows, sink=sink)

    def _observed(
        self,
        tracker: weakref.ref[CheckpointStatisticsTracker],
        name: str,
        _: metrics.CallbackOptions,
    ) -> list[metrics.Observation]:
        """Return the values of a gauge.

        There are none if the coordinator is gone, whose meter stays as long as the process.
        """
        values = _of_tracker(of).get(name, ()) if (of := tracker()) else ()
        return [metrics.Observation(value, {**self._job, **labels}) for value, labels in values]

    def _storage_called(self, operation: str, seconds: float) -> None:
        self._record(STORAGE, seconds, operation=operation)

    def _add(self, metric: Metric, value: float, **labels: str) -> None:
        self._counters[metric].add(value, {**self._job, **labels})

    def _record(self, metric: Metric, value: float, **labels: str) -> None:
        self._histograms[metric].record(value, {**self._job, **labels})


def open_telemetry(tracker: CheckpointStatisticsTracker) -> None:
    """Report metrics to whichever SDK the process has set up.

    Without an SDK, the metrics do nothing.
    """
    MetricsReporter(tracker, metrics.get_meter(_SCOPE))


def prometheus(tracker: CheckpointStatisticsTracker, registry: CollectorRegistry) -> None:
    """Report metrics to a registry of `prometheus-client` (extra `prometheus`).

    Raises ValueError if the registry has such metrics already.
    """
    if any(family.name.startswith("checkpointing_") for family in registry.collect()):
        raise ValueError("the registry has the metrics of a job already: take another one")
    MetricsReporter(tracker, _shown_by(registry)).begin_at_zero(tracker.sinks)


def _shown_by(registry: CollectorRegistry) -> metrics.Meter:
    with needs_extra("prometheus"):
        from opentelemetry.exporter.prometheus import PrometheusMetricReader
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.resources import Resource
    reader = PrometheusMetricReader(
        disable_target_info=True, scope_info_enabled=False, registry=registry
    )
    return MeterProvider([reader], Resource.get_empty(), shutdown_on_exit=False).get_meter(_SCOPE)


def registry_of(tracker: CheckpointStatisticsTracker) -> CollectorRegistry:
    """Make a registry with all metrics of the tracker."""
    with needs_extra("prometheus"):
        from prometheus_client import CollectorRegistry
    registry = CollectorRegistry()
    prometheus(tracker, registry)
    return registry


def serve(registry: CollectorRegistry, address: str) -> Callable[[], None]:
    """Let Prometheus read the registry at `address`, by the server of `prometheus-client`.

    Returns the function that ends the server. Raises OSError if the address cannot be had.
    """
    from prometheus_client import start_http_server

    host, _, port = address.rpartition(":")
    server, thread = start_http_server(int(port), host.strip("[]") or "127.0.0.1", registry)

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return stop
