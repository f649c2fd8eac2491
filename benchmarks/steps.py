"""Where a checkpoint of few rows spends its time, and how often it asks the server, beside Spark's
own sink. A section of `benchmarks.postgres` and `benchmarks.kafka`: `--only steps [--small
ROUNDS]`.

Milliseconds are medians. Processor time is the mean of all rounds; in the table by step it is that
of this process.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from statistics import mean, median
from typing import Any

from pyspark.sql import DataFrame

from benchmarks import spark as sparks
from benchmarks.bench import FEW, Bench, show, tell
from benchmarks.measure import Contender, rounds
from coordinator import CheckpointCoordinator, CheckpointListener, Step

_STEPS = {
    Step.TRIGGERED: "begin",
    Step.PRE_COMMITTED: "phase one: Spark's job, rows, pre-commit",
    Step.VALIDATED: "what the sink remembers, validation",
    Step.COMPLETE: "the record",
    Step.COMMITTED: "phase two: commit",
    Step.DONE: "purge",
}
_COUNTED = 10


class Steps(CheckpointListener):
    """By step, seconds and processor seconds of each checkpoint that `work` sees through."""

    def __init__(self, work: sparks.Work) -> None:
        self._work = work
        self._at = (0.0, 0.0)
        self.checkpoints: list[dict[str, tuple[float, float]]] = []
        if isinstance(work, CheckpointCoordinator):
            work._protocol.listeners.add(self)

    def __call__(self, df: DataFrame, batch_id: int) -> None:
        self._at = time.perf_counter(), time.process_time()
        self.checkpoints.append({})
        self._work(df, batch_id)

    def on_step(self, step: Step, checkpoint_id: int, facts: Mapping[str, Any]) -> None:
        if step in _STEPS and self.checkpoints:
            (since, cpu), self._at = self._at, (time.perf_counter(), time.process_time())
            self.checkpoints[-1][_STEPS[step]] = self._at[0] - since, self._at[1] - cpu


def _run_counted(contender: Contender) -> None:
    for _ in range(_COUNTED):
        contender.run()


def measure(bench: Bench) -> None:
    runs = bench.options.small
    watched: dict[str, Steps] = {}
    with ExitStack() as stack:
        contenders = []
        for name, stream in bench.few(stack).items():
            stream.work = watched[name] = Steps(stream.work)
            contenders.append(Contender(name, stream.run))
        rounds(contenders, runs, bench.options.warm, tell, bench.server_pid)
        times = {
            name: steps.checkpoints[-runs:]
            for name, steps in watched.items()
            if len(steps.checkpoints[-1]) > 1
        }
        asked = {c.name: bench.questions(partial(_run_counted, c)) for c in contenders}
    base = contenders[0]
    lines = []
    for c in contenders:
        ms = sorted(1000 * s for s in c.seconds)
        cpu = 1000 * mean(c.client)
        slower = median(a / b for a, b in zip(c.seconds, base.seconds, strict=True))
        count = asked[c.name]
        cells = [median(ms), ms[round(0.99 * (runs - 1))], cpu]
        relative = [f"{slower:.2f}", f"{cpu / (1000 * mean(base.client)):.2f}"]
        lines.append(
            [
                c.name,
                *(f"{value:.0f}" for value in cells),
                *relative,
                f"{count / _COUNTED:.1f}" if count else "",
            ]
        )
    header = [
        "what",
        "ms",
        "99th percentile",
        "CPU ms of the client",
        "x Spark's ms",
        "x Spark's CPU",
        "requests",
    ]
    show(f"A checkpoint of {FEW} rows, {runs} rounds", header, lines)
    by_step = []
    for step in _STEPS.values():
        pairs = [
            [checkpoint.get(step, (0.0, 0.0)) for checkpoint in each] for each in times.values()
        ]
        by_step.append(
            [
                step,
                *(
                    f"{1000 * median(s for s, _ in p):.1f} / {1000 * mean(cpu for _, cpu in p):.1f}"
                    for p in pairs
                ),
            ]
        )
    show("By step: ms / processor ms of the driver's Python", ["step", *times], by_step)
