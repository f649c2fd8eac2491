"""Flink's JDBC XA sink, if its program is there: a folder with `run.sh`, of which a copy is built in the cache."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from sinks.testing.servers.postgres import PostgresService, jdbc_url

SETTINGS = (("jdbc-xa", 1000, False), ("jdbc-xa", 1000, True), ("jdbc-xa", 10_000, True))


def measure(
    program: Path, cache: Path, service: PostgresService, dsn: str, rows: int, runs: int
) -> Iterator[tuple[str, list[float]]]:
    """Name of the setting and rows/s of each run. Raises RuntimeError with Flink's output if a run failed or the rows
    are not there once."""
    copy = cache / "flink"
    if not copy.exists():
        shutil.copytree(program, copy)
        for path in [copy, *copy.rglob("*")]:
            path.chmod(path.stat().st_mode | 0o200)
    variables = {"PG_URL": jdbc_url(dsn), "PG_USER": service.user, "PG_PASSWORD": service.password}
    for mode, batch, rewrite in SETTINGS:
        arguments = [f"mode={mode}", f"n={rows}", "warm=1", f"runs={runs}", f"batch={batch}"]
        command = ["bash", str(copy / "run.sh"), *arguments, f"rewrite={str(rewrite).lower()}"]
        done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=900)
        lines = [line for line in done.stdout.splitlines() if line.startswith("RUN ")]
        complete = f"count={rows}/{rows}distinct/prepared=0"
        if done.returncode or len(lines) != runs or not all(line.endswith(complete) for line in lines):
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
        rates = [float(match[1]) for line in lines if (match := re.search(r"rate=([\d.]+)", line))]
        yield f"Flink JDBC XA sink, batch {batch:,}, rewrite {'on' if rewrite else 'off'}", rates
