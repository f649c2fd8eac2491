"""What it costs to be seen: statistics, log lines, history, metrics, spans and progress.

    python -m benchmarks.statistics [--only driver,small,batch] [--rows 1000000] [--runs 5]
        [--small 15]

With all of it (OpenTelemetry's SDK, Prometheus, lines that are thrown away) beside none of it, in
turns, on the same PostgreSQL. driver: microseconds of the driver's steps alone. small: checkpoints
of 100 rows in this process, without Spark, 20 in a round. batch: a micro-batch of Spark. The
driver's looks at its books (`verify_interval`) are in `benchmarks.verify`.
"""

from __future__ import annotations

import logging
import tempfile
import time
import uuid
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from prometheus_client import CollectorRegistry

import coordinator.protocol.sweep
import sinks.base
import sinks.sql.strategies
from benchmarks import spark as sparks
from benchmarks.bench import Bench, command_line, heading, save, say, tell, working_folder
from benchmarks.measure import Contender, rounds, spread, table
from benchmarks.protocol import batch
from benchmarks.shapes import PLAIN
from benchmarks.target import SETTINGS, Target
from coordinator import CheckpointConfig, CheckpointCoordinator, CheckpointListener, Step
from coordinator.operations.statistics.tracker import CheckpointStatisticsTracker
from examples.custom_sink import FileSink
from sinks.postgres import PostgresSink
from sinks.testing import LocalQuery, rows
from sinks.testing.conformance import example_input
from sinks.testing.servers.postgres import PostgresServer

SECTIONS = ("driver", "small", "batch")
WITH = "with all of it"
WITHOUT = "with none of it"
_CHECKPOINTS = 20
"""In a round of small ones."""


class Timed(CheckpointListener):
    """Tells a tracker what it would be told by itself, and takes the time."""

    def __init__(self) -> None:
        self.tracker: CheckpointStatisticsTracker | None = None
        self.seconds: dict[int, float] = {}

    def on_step(self, step: Step, checkpoint_id: int, facts: Mapping[str, Any]) -> None:
        if self.tracker:
            began = time.perf_counter()
            self.tracker.on_step(step, checkpoint_id, facts)
            self.seconds[checkpoint_id] = (
                self.seconds.get(checkpoint_id, 0) + time.perf_counter() - began
            )


def driver(checkpoints: int = 500) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (files := Path(folder) / "rows").mkdir()
        timed = Timed()
        storage = f"memory:{uuid.uuid4().hex}"
        with (
            CheckpointCoordinator("other", [FileSink(files)], storage) as other,
            CheckpointCoordinator(
                "job", [FileSink(files)], storage, listeners=[timed]
            ) as coordinator,
        ):
            other.register_metrics(CollectorRegistry())
            timed.tracker = other.statistics
            LocalQuery(Path(folder) / "query", example_input(checkpoints)).run(coordinator)
    taken = sorted(timed.seconds.values())
    say(f"\n## The driver's steps, {checkpoints} checkpoints\n")
    say(
        f"median {median(taken) * 1e6:.0f} µs, 99th percentile "
        f"{taken[-len(taken) // 100] * 1e6:.0f} µs"
    )


@contextmanager
def without_progress() -> Iterator[None]:
    """In this process, until it is left."""
    places: list[Any] = [sinks.base, sinks.sql.strategies, coordinator.protocol.sweep]
    shown = places[0].progress
    for place in places:
        place.progress = lambda *_: nullcontext(lambda _: None)
    try:
        yield
    finally:
        for place in places:
            place.progress = shown


class SeenOrNot:
    """A coordinator over a database of its own, with all of it or with none."""

    def __init__(
        self, stack: ExitStack, server: PostgresServer, folder: Path, *, seen: bool
    ) -> None:
        self.seen = seen
        self.dsn = stack.enter_context(server.database())
        config = CheckpointConfig() if seen else CheckpointConfig(history_size=0, verify_interval=0)
        sink = PostgresSink(self.dsn, "t", strategy="prepared", create_table=True)
        storage = (folder / f"storage-{uuid.uuid4().hex}").as_uri()
        self.coordinator = stack.enter_context(
            CheckpointCoordinator("job", [sink], storage, config)
        )
        statistics = self.coordinator.statistics
        if seen:
            self.coordinator.register_metrics(CollectorRegistry())
        else:
            statistics.reporters.clear()
            statistics.on_storage_call.clear()
            statistics.on_step = lambda *_: None  # type: ignore[method-assign]
        self.own: list[float] = []
        """Processor seconds of this process in each round: the driver's, without Spark's JVM and
        workers."""

    def timed(self, work: Callable[[], float]) -> Callable[[], float]:
        def run() -> float:
            with nullcontext() if self.seen else without_progress():
                began = time.process_time()
                seconds = work()
                self.own.append(time.process_time() - began)
                return seconds

        return run


class StatisticsBench(Bench):
    def __init__(
        self, server: PostgresServer, options: Namespace, folder: Path, stack: ExitStack
    ) -> None:
        super().__init__(server, options, folder, stack)
        self.server = server

    def small(self) -> None:
        with ExitStack() as stack:
            contenders = []
            own = dict[str, list[float]]()
            for name, seen in ((WITH, True), (WITHOUT, False)):
                one = SeenOrNot(stack, self.server, self.folder, seen=seen)
                contenders.append(Contender(name, one.timed(self._checkpoints(one.coordinator))))
                own[name] = one.own
            self._in_turns(contenders, self.options.small, 2)
            self._report(
                f"Checkpoints of 100 rows, {_CHECKPOINTS} in a round, without Spark",
                contenders,
                own,
            )
            per_round = zip(own[WITH][2:], own[WITHOUT][2:], strict=True)
            added = [(one - other) / _CHECKPOINTS * 1000 for one, other in per_round]
            say(f"\nAdded to a checkpoint, processor ms of the driver: {spread(added)} (aim: <= 5)")

    def _checkpoints(self, coordinator: CheckpointCoordinator) -> Callable[[], float]:
        partitions = [rows(0, 50), rows(50, 50)]
        numbers = iter(range(1_000_000))

        def work() -> float:
            began = time.perf_counter()
            for _ in range(_CHECKPOINTS):
                coordinator.process(batch(next(numbers), partitions))
            return time.perf_counter() - began

        return work

    def batch(self) -> None:
        with ExitStack() as stack:
            contenders = []
            own = dict[str, list[float]]()
            for name, seen in ((WITH, True), (WITHOUT, False)):
                one = SeenOrNot(stack, self.server, self.folder, seen=seen)
                target = Target(self.server, one.dsn, PLAIN, self.options.rows)
                stack.callback(target.close)
                numbers = sparks.numbers(self.spark, self.options.rows)
                stream = self.stream(stack, PLAIN.of(numbers), one.coordinator)
                contenders.append(
                    Contender(name, one.timed(stream.run), target.clear, target.check)
                )
                own[name] = one.own
            self._in_turns(contenders, self.options.runs, self.options.warm)
            self._report(f"A micro-batch of {self.options.rows:,} rows, Spark", contenders, own)

    def _in_turns(self, contenders: list[Contender], runs: int, warm: int | None) -> None:
        """A B A B …, then B A B A …: who comes first in a round is at a disadvantage while Spark
        still warms up."""
        rounds(contenders, runs - runs // 2, warm, tell, self.server_pid)
        rounds(contenders[::-1], runs // 2, 0, tell, self.server_pid)

    def _report(
        self, title: str, contenders: list[Contender], own: Mapping[str, list[float]]
    ) -> None:
        say(f"\n## {title}\n")
        lines = []
        for one in contenders:
            drivers = own[one.name][-len(one.seconds) :]
            lines.append(
                [
                    one.name,
                    spread(one.seconds),
                    *(spread(each, "{:.3f}") for each in (one.client, drivers)),
                ]
            )
        say(table(["what", "s", "CPU s of the client", "CPU s of the driver's Python"], lines))
        seen, other = contenders
        pairs = zip(seen.client, other.client, strict=True)
        say(
            "\nClient's processor time with over without, by round (aim: <= 1.02): "
            f"{spread([a / b for a, b in pairs])}"
        )


def main(arguments: list[str] | None = None) -> None:
    options = command_line("benchmarks.statistics", __doc__, SECTIONS, []).options(arguments)
    metrics.set_meter_provider(MeterProvider([InMemoryMetricReader()], shutdown_on_exit=False))
    trace.set_tracer_provider(TracerProvider(shutdown_on_exit=False))
    logging.getLogger("coordinator.statistics").setLevel(logging.INFO)
    logging.basicConfig(filename="/dev/null", level=logging.WARNING)
    with ExitStack() as stack:
        server = stack.enter_context(PostgresServer(SETTINGS))
        about = heading(("psycopg",), "PostgreSQL")
        say(about)
        bench = StatisticsBench(server, options, working_folder(stack), stack)
        for section in options.only:
            driver() if section == "driver" else getattr(bench, section)()
        save(options.json, about)


if __name__ == "__main__":
    main()
