"""Flink's sinks, if their program is there: a folder with `run.sh`, of which a copy is built in the cache."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.bench import FLINK, ROOT
from sinks.testing.servers.postgres import PostgresService, jdbc_url

Rates = tuple[str, list[float]]
"""Name of the setting, and rows/s of each run."""


def jdbc(service: PostgresService, dsn: str, rows: int, runs: int) -> Iterator[Rates]:
    """Its JDBC XA sink. Raises RuntimeError with Flink's output if a run failed or the rows are not there once."""
    variables = {"PG_URL": jdbc_url(dsn), "PG_USER": service.user, "PG_PASSWORD": service.password}
    for batch, rewrite in ((1000, False), (1000, True), (10_000, True)):
        arguments = ["mode=jdbc-xa", f"batch={batch}", f"rewrite={str(rewrite).lower()}"]
        rates = _run(arguments, rows, 1, runs, variables, f"count={rows}/{rows}distinct/prepared=0")
        yield f"Flink JDBC XA sink, batch {batch:,}, rewrite {'on' if rewrite else 'off'}", rates


def kafka(bootstrap: str, topic: str, rows: int, runs: int) -> Iterator[tuple[str, list[float], int]]:
    """Its Kafka sink with 46-byte values; also the number of rows that each setting has written, warm-up included."""
    warm = 2
    for mode, tuned in (("kafka-eos", False), ("kafka-eos", True), ("kafka-alo", True)):
        arguments = [f"mode={mode}", f"kafka={bootstrap}", f"topic={topic}", f"tuned={str(tuned).lower()}"]
        rates = _run(arguments, rows, warm, runs)
        guarantee = "exactly-once" if mode == "kafka-eos" else "at-least-once"
        yield f"Flink, {guarantee}, {'tuned' if tuned else 'defaults'}", rates, rows * (warm + runs)


def _run(
    arguments: Sequence[str],
    rows: int,
    warm: int,
    runs: int,
    variables: Mapping[str, str] | None = None,
    ending: str = "",
) -> list[float]:
    """Rows/s of each run; every line about one has to end with `ending`."""
    command = ["bash", str(_program()), *arguments, f"n={rows}", f"warm={warm}", f"runs={runs}"]
    done = subprocess.run(command, env=os.environ | dict(variables or {}), capture_output=True, text=True, timeout=900)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RUN ")]
    if done.returncode or len(lines) != runs or not all(line.endswith(ending) for line in lines):
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return [float(match[1]) for line in lines if (match := re.search(r"rate=([\d.]+)", line))]


def _program() -> Path:
    copy: Path = ROOT / ".cache" / "flink"
    if not copy.exists():
        shutil.copytree(FLINK, copy)
        for path in [copy, *copy.rglob("*")]:
            path.chmod(path.stat().st_mode | 0o200)
    return copy / "run.sh"
