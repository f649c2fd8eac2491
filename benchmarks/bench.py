"""What the benchmarks of all sinks have in common: the Spark session, the command line, and the
tables."""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import datetime, timezone
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from benchmarks import spark as sparks
from benchmarks.measure import Contender, ratios, rounds, spread, table
from coordinator import CheckpointConfig, CheckpointCoordinator
from coordinator.spark.preflight import UNIX_SOCKETS
from sinks import TwoPhaseCommitSink
from sinks.testing.servers.common import OneProcess

ROOT = Path(__file__).resolve().parents[1]
FLINK = ROOT.parent / "shared" / "peers" / "flink"

FEW = 100
"""Rows of a small batch."""
PACED = 10
"""Batches of a round, one each second."""

Aim = tuple[str, Contender, Contender, float]
"""What it says, the one that is to be faster, than whom, and how many times."""


class Bench:
    """One run: the session, a folder, and what was asked for.

    `jars` go to the session; `process` is the server's.
    """

    def __init__(
        self,
        process: OneProcess | None,
        options: argparse.Namespace,
        folder: Path,
        stack: ExitStack,
        jars: Sequence[Path | str] = (),
    ) -> None:
        self.process = process
        self.options = options
        self.folder = folder
        self.stack = stack
        self.jars = jars
        self._spark: SparkSession | None = None
        stack.callback(self.stop_spark)

    @property
    def spark(self) -> SparkSession:
        if self._spark is None:
            self._spark = sparks.session(
                self.jars, **{UNIX_SOCKETS: str(self.options.sockets == "unix").lower()}
            )
        return self._spark

    @property
    def server_pid(self) -> int | None:
        return self.process.pid if self.process else None

    def stop_spark(self) -> None:
        if self._spark is not None:
            self._spark.stop()
            self._spark = None

    def coordinator(
        self,
        stack: ExitStack,
        job: str,
        sink: TwoPhaseCommitSink[Any],
        mode: str = "exactly_once",
        replay: str = "recompute",
    ) -> CheckpointCoordinator:
        storage = (self.folder / "storage" / job).as_uri()
        config = CheckpointConfig(mode=mode, replay=replay)  # type: ignore[arg-type]
        return stack.enter_context(CheckpointCoordinator(job, [sink], storage, config))

    def stream(self, stack: ExitStack, df: DataFrame, work: sparks.Work) -> sparks.Stream:
        stream = sparks.Stream(df, work, Path(tempfile.mkdtemp(dir=self.folder)))
        stack.callback(stream.stop)
        return stream

    def small_checkpoints(self, groups: Sequence[Sequence[Contender]]) -> None:
        """What a checkpoint of few rows takes beside the first of each group."""
        runs = self.options.small
        contenders = [c for group in groups for c in group]
        warm = rounds(contenders, runs, self.options.warm, tell, self.server_pid)
        keep("small checkpoints", contenders)
        lines = []
        for base, *others in groups:
            for c in (base, *others):
                added = [(a - b) * 1000 for a, b in zip(c.seconds, base.seconds, strict=True)]
                times = [s * 1000 for s in c.seconds]
                costs = [seconds * 1000 for seconds in c.client]
                high = sorted(times)[round(0.99 * (runs - 1))]
                slower = spread(a / b for a, b in zip(c.seconds, base.seconds, strict=True))
                tail = [f"{high:.0f}", f"{high / median(times):.2f}"]
                cells = [
                    spread(times, "{:.0f}"),
                    *tail,
                    spread(added, "{:.0f}"),
                    slower,
                    spread(costs, "{:.0f}"),
                ]
                lines.append([c.name, *cells, f"{median(c.load):.1f}"])
        aims = "times Spark's sink: PostgreSQL <= 1.0, Kafka <= 1.3; 99th percentile <= 1.5 medians"
        say(f"\n## Small checkpoints, {runs} rounds after {warm} (aims: {aims})\n")
        percentile = ["99th percentile", "over the median"]
        header = [
            "what",
            "ms",
            *percentile,
            "ms added",
            "x the first's time",
            "CPU ms of the client",
            "load",
        ]
        say(table(header, lines))

    def few(self, stack: ExitStack) -> Mapping[str, sparks.Stream]:
        """Streams of `FEW` rows: Spark's own sink, then ours."""
        raise NotImplementedError

    def steps(self) -> None:
        """Where the time of a small checkpoint goes."""
        from benchmarks.steps import measure

        measure(self)

    def questions(self, run: Callable[[], object]) -> int:
        """How many requests (statements) the server got meanwhile. 0: not known."""
        return 0

    def tail(self) -> None:
        """The 99th percentile of small checkpoints, beside Spark's own sink in foreachBatch."""
        with ExitStack() as stack:
            streams = self.few(stack)
            self.small_checkpoints(
                [[Contender(f"{FEW} rows: {name}", stream.run) for name, stream in streams.items()]]
            )

    def paced(self) -> None:
        """The processor time of a query with a small batch each second."""
        runs = min(self.options.runs, 4)
        with ExitStack() as stack:
            contenders = [
                Contender(name, partial(_paced, stream)) for name, stream in self.few(stack).items()
            ]
            rounds(contenders, runs, 1, tell, self.server_pid)
        title = f"A batch of {FEW} rows each second, {runs} rounds of {PACED} (aim: <= 0.15 cores)"
        keep(title, contenders)
        lines = [
            [
                c.name,
                *(
                    spread(cpu / s for cpu, s in zip(each, c.seconds, strict=True))
                    for each in (c.client, c.processor)
                ),
            ]
            for c in contenders
        ]
        say(f"\n## {title}\n")
        say(table(["what", "cores of the client", "cores, server included"], lines))


def _paced(stream: sparks.Stream) -> float:
    start = time.perf_counter()
    for number in range(PACED):
        stream.run()
        time.sleep(max(0.0, start + number + 1 - time.perf_counter()))
    return time.perf_counter() - start


def report(
    title: str,
    rows: int,
    contenders: Sequence[Contender],
    bases: Sequence[tuple[str, Contender]],
    aims: Sequence[Aim],
) -> None:
    """Rates, how many times those of each base they are, and what became of the aims."""
    keep(title, contenders, rows)
    lines = []
    for c in contenders:
        rates = [rows / s / 1e6 for s in c.seconds]
        times = [spread(ratios(c, base)) for _, base in bases]
        costs = [spread([cpu / rows * 1e6 for cpu in each]) for each in (c.processor, c.client)]
        lines.append([c.name, spread(rates), *times, *costs, f"{median(c.load):.1f}"])
    say(f"\n## {title}\n")
    header = [
        "what",
        "million rows/s",
        *(f"x {name}" for name, _ in bases),
        "CPU s per million",
        "client's",
        "load",
    ]
    say(table(header, lines))
    say("\nAims, ratios of the same round:\n")
    say(
        table(
            ["what", "aim", "measured"],
            [[w, f">= {aim}", spread(ratios(a, b))] for w, a, b, aim in aims],
        )
    )


_KEPT: list[dict[str, Any]] = []


def keep(title: str, contenders: Sequence[Contender], rows: int | None = None) -> None:
    """For `save`."""
    figures = ("name", "seconds", "processor", "client", "load")
    measured = [
        {figure: getattr(contender, figure) for figure in figures} for contender in contenders
    ]
    _KEPT.append({"title": title, "rows": rows, "contenders": measured})


def show(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table of what no contender tells, also for `save`."""
    _KEPT.append({"title": title, "header": header, "cells": rows})
    say(f"\n## {title}\n")
    say(table(header, rows))


def save(file: Path | None, about: str) -> None:
    """All that was measured, round by round, as JSON, so that two runs can be compared."""
    if file:
        file.write_text(json.dumps({"about": about, "sections": _KEPT}, indent=1))


def command_line(
    program: str, description: str | None, sections: Sequence[str], shapes: Sequence[str]
) -> Parser:
    parser = Parser(prog=f"python -m {program}", description=description)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--runs", type=int, default=5, help="rounds that count")
    help = (
        "rounds before, that do not count; if not given, until no contender's processor time falls "
        "any more"
    )
    parser.add_argument("--warm", type=int, help=help)
    parser.add_argument(
        "--only",
        type=parser.some_of(sections),
        default=list(sections),
        help=f"of {','.join(sections)}",
    )
    parser.add_argument("--json", type=Path, help="file for what was measured in each round")
    parser.add_argument("--small", type=int, default=60, help="rounds of small checkpoints")
    parser.add_argument(
        "--small-rows", type=int, nargs="+", default=[0, 100], help="rows of a small checkpoint"
    )
    parser.add_argument(
        "--participants", type=int, default=1000, help="of the checkpoints of that section"
    )
    parser.add_argument(
        "--sockets",
        choices=["unix", "tcp"],
        default="unix",
        help="between Spark and its Python workers",
    )
    help = f"of {','.join(shapes)}, for throughput"
    parser.add_argument("--shapes", type=parser.some_of(shapes), default=list(shapes), help=help)
    where = FLINK.relative_to(ROOT.parent)
    help = (
        f"also Flink's sinks, in turns with the others; the folder of their program, {where} if "
        "none is named"
    )
    parser.add_argument("--flink", type=Path, nargs="?", const=FLINK, help=help)
    return parser


class Parser(argparse.ArgumentParser):
    @staticmethod
    def some_of(names: Sequence[str]) -> Any:
        """Turns "a,b" into a list; empty is none of them."""

        def chosen(text: str) -> list[str]:
            parts = text.split(",") if text else []
            if unknown := set(parts) - set(names):
                raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}")
            return parts

        return chosen

    def options(self, arguments: list[str] | None) -> argparse.Namespace:
        """Parse, and let Python workers find the benchmarks."""
        options = self.parse_args(arguments)
        if options.flink and not options.flink.exists():
            self.error(f"there is no {options.flink}")
        os.environ["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
        )
        return options


def working_folder(stack: ExitStack) -> Path:
    return Path(
        stack.enter_context(
            tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True)
        )
    )


def tell(line: str) -> None:
    print(f"  {line}", flush=True)


def say(text: str) -> None:
    print(text, flush=True)


def heading(packages: Sequence[str], server: str) -> str:
    releases = " ".join(f"{name} {version(name)}" for name in ("pyspark", "pyarrow", *packages))
    return (
        f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC, {os.cpu_count()} cores, load "
        f"{os.getloadavg()[0]:.1f}, Python {platform.python_version()}, {releases}, {server}"
    )
