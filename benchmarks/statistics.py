"""What statistics cost a checkpoint on the driver, in microseconds: `python -m benchmarks.statistics [CHECKPOINTS]`.

All of it is switched on: the log line (formatted, thrown away), the history, OpenTelemetry's SDK and Prometheus.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client import CollectorRegistry

from coordinator import CheckpointCoordinator, CheckpointListener, Step
from coordinator.statistics.tracker import CheckpointStatisticsTracker
from examples.custom_sink import FileSink
from sinks.testing import LocalQuery
from sinks.testing.conformance import example_input


class Timed(CheckpointListener):
    """Tells a tracker what it would be told by itself, and takes the time."""

    def __init__(self) -> None:
        self.tracker: CheckpointStatisticsTracker | None = None
        self.seconds: dict[int, float] = {}

    def on_step(self, step: Step, checkpoint_id: int, facts: Mapping[str, Any]) -> None:
        if self.tracker:
            began = time.perf_counter()
            self.tracker.on_step(step, checkpoint_id, facts)
            self.seconds[checkpoint_id] = self.seconds.get(checkpoint_id, 0) + time.perf_counter() - began


def main(checkpoints: int) -> None:
    metrics.set_meter_provider(MeterProvider([InMemoryMetricReader()], shutdown_on_exit=False))
    logging.getLogger("coordinator.statistics").setLevel(logging.INFO)
    logging.basicConfig(filename="/dev/null", level=logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        (rows := Path(folder) / "rows").mkdir()
        timed, storage = Timed(), f"memory:{uuid.uuid4().hex}"
        with (
            CheckpointCoordinator("other", [FileSink(rows)], storage) as other,
            CheckpointCoordinator("job", [FileSink(rows)], storage, listeners=[timed]) as coordinator,
        ):
            other.register_metrics(CollectorRegistry())
            timed.tracker = other.statistics
            LocalQuery(Path(folder) / "query", example_input(checkpoints)).run(coordinator)
    taken = sorted(timed.seconds.values())
    print(
        f"{checkpoints} checkpoints: median {median(taken) * 1e6:.0f} µs, p99 {taken[-len(taken) // 100] * 1e6:.0f} µs"
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 500)
