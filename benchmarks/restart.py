"""How long a restart takes: from SIGKILL of the whole driver to the next checkpoint that is visible
in PostgreSQL.

    python -m benchmarks.restart [--kills 5] [--rows 40000] [--archive FILE] [--json FILE]

The job is that of `make demo`. At the same step of a checkpoint, when all rows are pre-committed,
SIGKILL ends the driver, its JVM and its Python workers, and the job is started again at once. The
contenders take turns: the JVM as it comes; with the archive of Spark's classes that
`docs/restart.md` describes; and with the options of `make demo`, too.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import psycopg

from benchmarks.bench import heading, save, say, show, tell, working_folder
from benchmarks.measure import spread
from examples.flights_demo import FILES, JAVA_OPTIONS, SETTINGS, Job, archiving_job, write_input
from examples.flights_job import FILES_PER_BATCH
from sinks.testing.servers.postgres import postgres_service

ADDITIONS = 20_000_000
PHASES = {
    "GENERATION_CLAIMED": "Python, JVM and Spark",
    "TRIGGERED": "recovery",
    "PRE_COMMITTED": "rows",
    "COMMITTED": "commit",
}
"""By the step that ends it, what a restart does."""


@dataclass
class Restart:
    seconds: float
    processor: float
    """Processor seconds of the new driver, its JVM and its Python workers."""
    phases: dict[str, float]


@dataclass
class Contender:
    """A job with a table and checkpoints of its own, which stands still before the record of
    `checkpoint_id`."""

    name: str
    arguments: list[str]
    log: Path
    dsn: str
    java: str
    every_java: str
    database: psycopg.Connection[Any]
    table: str
    checkpoint_id: int = 1
    restarts: list[Restart] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._start()
        self._pre_commit()

    def restart(self) -> Restart:
        before = self._rows()
        began = time.monotonic()
        self.job.kill()
        self.close()
        self._start()
        ended = began
        phases = dict[str, float]()
        for step in self._steps():
            if step in PHASES:
                phases[PHASES[step]], ended = time.monotonic() - ended, time.monotonic()
            if step == "COMMITTED":
                break
        if self._rows() <= before:
            raise AssertionError(f"{self.name}: checkpoint {self.checkpoint_id} is not visible")
        restart = Restart(ended - began, _processor_seconds(self.job), phases)
        self.job.go_on()
        self.checkpoint_id += 1
        self._pre_commit()
        return restart

    def close(self) -> None:
        self.job.__exit__()

    def _start(self) -> None:
        self.job = Job(self.log, self.arguments, self.dsn, self.java, self.every_java)

    def _pre_commit(self) -> None:
        for step in self._steps(recovered=True):
            if step == "PRE_COMMITTED":
                return

    def _steps(self, recovered: bool = False) -> Iterator[str]:
        """The steps up to the commit of `checkpoint_id`; the job stands still at each.

        `recovered`: without those of checkpoints before.
        """
        for step, checkpoint_id in self.job.steps():
            if checkpoint_id == self.checkpoint_id or (not recovered and step in PHASES):
                yield step
            self.job.go_on()
        raise AssertionError(
            self.job.about(f"{self.name}: the job ended before checkpoint {self.checkpoint_id}")
        )

    def _rows(self) -> int:
        [count] = self.database.execute(f"SELECT count(*) FROM {self.table}").fetchone() or (0,)
        return int(count)


def _processor_seconds(job: Job) -> float:
    total = 0.0
    for process in job.processes():
        with suppress(psutil.NoSuchProcess):
            total += sum(process.cpu_times()[:4])  # of its children that have ended, too
    return total


def loop() -> float:
    """Processor seconds of a loop of Python, by which two machines are compared."""
    began = time.process_time()
    total = 0
    for number in range(ADDITIONS):
        total += number
    return time.process_time() - began


def measure(contenders: list[Contender], kills: int) -> None:
    for number in range(kills):
        for contender in contenders:
            restart = contender.restart()
            contender.restarts.append(restart)
            load = os.getloadavg()[0]
            tell(
                f"kill {number + 1:2d} {contender.name:36s} {restart.seconds:6.1f} s "
                f"{restart.processor:6.1f} CPU s"
                f"   load {load:.1f}"
            )


def report(contenders: list[Contender], kills: int, loops: list[float]) -> None:
    first = contenders[0]
    lines = []
    for contender in contenders:
        restarts = contender.restarts
        pairs = list(zip(restarts, first.restarts, strict=True))
        lines.append(
            [
                contender.name,
                spread((restart.seconds for restart in restarts), "{:.1f}"),
                spread(restart.seconds / base.seconds for restart, base in pairs),
                spread((restart.processor for restart in restarts), "{:.1f}"),
                spread(restart.processor / base.processor for restart, base in pairs),
                *(
                    f"{median(restart.phases[phase] for restart in restarts):.1f}"
                    for phase in PHASES.values()
                ),
            ]
        )
    header = [
        "",
        "s",
        "x the first",
        "CPU s",
        "x the first",
        *(f"{phase}, s" for phase in PHASES.values()),
    ]
    show(f"From SIGKILL to the next visible checkpoint, {kills} kills each", header, lines)
    say(
        f"\n{ADDITIONS / 1e6:.0f} million additions in a loop of Python: {spread(loops)} s of "
        "processor time"
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.restart", description=(__doc__ or "").split("\n")[0]
    )
    # one is complete before the first kill, and one stands still after the last
    most = FILES // FILES_PER_BATCH - 2
    parser.add_argument(
        "--kills", type=int, default=5, choices=range(1, most + 1), metavar=f"1…{most}"
    )
    parser.add_argument(
        "--rows", type=int, default=40_000, help="of the whole input, in twelve checkpoints"
    )
    parser.add_argument(
        "--archive", type=Path, help="of classes; if there is no such file, it is written first"
    )
    parser.add_argument("--json", type=Path, help="file for the table")
    options = parser.parse_args(arguments)
    with ExitStack() as stack:
        folder = working_folder(stack)
        server = stack.enter_context(postgres_service(SETTINGS))
        dsn = stack.enter_context(server.database())
        database = stack.enter_context(psycopg.connect(dsn, autocommit=True))
        about = heading(["psycopg"], f"PostgreSQL {database.info.server_version // 10000}")
        say(about)
        loops = [loop()]
        write_input(folder / "input", options.rows)
        archive = (options.archive or folder / "spark.jsa").absolute()
        if not archive.exists():
            with archiving_job(archive, folder, dsn) as job:
                job.run_to_its_end()
        with_archive = f"-XX:SharedArchiveFile={archive}"
        contenders = []
        for table, name, java, every_java in (
            ("plain", "Java's defaults", "-Xshare:auto", ""),
            ("archived", "with the archive", with_archive, ""),
            ("demo", f"with it and {JAVA_OPTIONS}", with_archive, JAVA_OPTIONS),
        ):
            arguments = [
                "--input",
                str(folder / "input"),
                "--folder",
                str(folder / table),
                "--table",
                table,
            ]
            contender = Contender(
                name, arguments, folder / f"{table}.log", dsn, java, every_java, database, table
            )
            stack.callback(contender.close)
            contenders.append(contender)
        measure(contenders, options.kills)
        loops.append(loop())
        report(contenders, options.kills, loops)
        save(options.json, about)


if __name__ == "__main__":
    main()
