"""What the benchmarks of all sinks have in common: the Spark session, the command line, and the tables."""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import datetime, timezone
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

Aim = tuple[str, Contender, Contender, float]
"""What it says, the one that is to be faster, than whom, and how many times."""


class Bench:
    """One run: the session, a folder, and what was asked for. `jars` go to the session; `process` is the server's."""

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
            self._spark = sparks.session(self.jars, **{UNIX_SOCKETS: str(self.options.sockets == "unix").lower()})
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
        rows_on_driver: int = 0,
        replay: str = "recompute",
    ) -> CheckpointCoordinator:
        storage = (self.folder / "storage" / job).as_uri()
        config = CheckpointConfig(mode=mode, rows_on_driver=rows_on_driver, replay=replay)  # type: ignore[arg-type]
        return stack.enter_context(CheckpointCoordinator(job, [sink], storage, config))

    def stream(self, stack: ExitStack, df: DataFrame, work: sparks.Work) -> sparks.Stream:
        stream = sparks.Stream(df, work, Path(tempfile.mkdtemp(dir=self.folder)))
        stack.callback(stream.stop)
        return stream

    def small_checkpoints(self, groups: Sequence[Sequence[Contender]]) -> None:
        """What a checkpoint of few rows adds to the same Spark job, which is the first of each group."""
        runs = self.options.small
        contenders = [c for group in groups for c in group]
        rounds(contenders, runs, 5, tell, self.server_pid)
        keep("small checkpoints", contenders)
        lines = []
        for base, *others in groups:
            for c in (base, *others):
                added = [(a - b) * 1000 for a, b in zip(c.seconds, base.seconds, strict=True)]
                times = [s * 1000 for s in c.seconds]
                costs = [seconds * 1000 for seconds in c.client]
                high = f"{sorted(times)[round(0.99 * (runs - 1))]:.0f}"
                cells = [spread(times, "{:.0f}"), high, spread(added, "{:.0f}"), spread(costs, "{:.0f}")]
                lines.append([c.name, *cells, f"{median(c.load):.1f}"])
        say(f"\n## Small checkpoints, {runs} rounds (aims: 100 rows <= 90 ms, 0 rows <= 60 ms)\n")
        say(table(["what", "ms", "99th percentile", "ms added", "CPU ms of the client", "load"], lines))


def report(
    title: str, rows: int, contenders: Sequence[Contender], bases: Sequence[tuple[str, Contender]], aims: Sequence[Aim]
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
    header = ["what", "million rows/s", *(f"x {name}" for name, _ in bases), "CPU s per million", "client's", "load"]
    say(table(header, lines))
    say("\nAims, ratios of the same round:\n")
    say(table(["what", "aim", "measured"], [[w, f">= {aim}", spread(ratios(a, b))] for w, a, b, aim in aims]))


_KEPT: list[dict[str, Any]] = []


def keep(title: str, contenders: Sequence[Contender], rows: int | None = None) -> None:
    """For `save`."""
    figures = ("name", "seconds", "processor", "client", "load")
    found = [{figure: getattr(contender, figure) for figure in figures} for contender in contenders]
    _KEPT.append({"title": title, "rows": rows, "contenders": found})


def save(file: Path | None, about: str) -> None:
    """All that was measured, round by round, as JSON, so that two runs can be compared."""
    if file:
        file.write_text(json.dumps({"about": about, "sections": _KEPT}, indent=1))


def command_line(program: str, description: str | None, sections: Sequence[str], shapes: Sequence[str]) -> Parser:
    parser = Parser(prog=f"python -m {program}", description=description)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--runs", type=int, default=5, help="rounds that count")
    parser.add_argument("--warm", type=int, default=2, help="rounds before, that do not count")
    parser.add_argument(
        "--only", type=parser.some_of(sections), default=list(sections), help=f"of {','.join(sections)}"
    )
    parser.add_argument("--json", type=Path, help="file for what was measured in each round")
    parser.add_argument("--small", type=int, default=60, help="rounds of small checkpoints")
    parser.add_argument(
        "--sockets", choices=["unix", "tcp"], default="unix", help="between Spark and its Python workers"
    )
    help = f"of {','.join(shapes)}, for throughput"
    parser.add_argument("--shapes", type=parser.some_of(shapes), default=list(shapes), help=help)
    parser.add_argument("--flink", action="store_true", help=f"also Flink's sink: {FLINK.relative_to(ROOT.parent)}")
    return parser


class Parser(argparse.ArgumentParser):
    @staticmethod
    def some_of(names: Sequence[str]) -> Any:
        """Turns "a,b" into a list; empty is none of them."""

        def chosen(text: str) -> list[str]:
            found = text.split(",") if text else []
            if unknown := set(found) - set(names):
                raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}")
            return found

        return chosen

    def options(self, arguments: list[str] | None) -> argparse.Namespace:
        """Parse, and let Python workers find the benchmarks."""
        options = self.parse_args(arguments)
        if options.flink and not FLINK.exists():
            self.error(f"there is no {FLINK}")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        return options


def working_folder(stack: ExitStack) -> Path:
    return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True)))


def tell(line: str) -> None:
    print(f"  {line}", flush=True)


def say(text: str) -> None:
    print(text, flush=True)


def heading(packages: Sequence[str], server: str) -> str:
    releases = " ".join(f"{name} {version(name)}" for name in ("pyspark", "pyarrow", *packages))
    return (
        f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, "
        f"Python {platform.python_version()}, {releases}, {server}"
    )
