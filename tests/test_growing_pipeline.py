"""docs/tutorial.md, step by step: its files, its commands, and what it says that comes out."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psycopg
import pytest

PAGE = (Path(__file__).parents[1] / "docs" / "tutorial.md").read_text()
JOB, SECOND_SINK = re.findall(r"^```toml\n(.*?)^```", PAGE, re.M | re.S)
[PROGRAM] = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)

pytestmark = [pytest.mark.large, pytest.mark.slow, pytest.mark.chaos]


class Tutorial:
    def __init__(self, home: Path, dsn: str) -> None:
        self.home, self.dsn = home, dsn
        self.environment = os.environ | {"HOME": str(home), "DSN": dsn, "SPARK_LOCAL_IP": "127.0.0.1"}
        self.environment["PYTHONPATH"] = str(Path(__file__).parents[1])
        (home / "job.toml").write_text(JOB)
        (home / "readings.py").write_text(PROGRAM)

    def start(self, **variables: str) -> subprocess.Popen[str]:
        with (self.home / "log").open("w") as log:
            return subprocess.Popen(
                [sys.executable, "readings.py"],
                cwd=self.home,
                env=self.environment | variables,
                text=True,
                stdout=log,
                stderr=log,
            )

    def run(self, **variables: str) -> None:
        for seconds in ("8", "90"):  # a busy machine may not come to a checkpoint in the first
            assert self.start(SECONDS=seconds, **variables).wait(400) == 0, self.told()
            if "job readings wrote checkpoints" in self.told():
                return
        raise AssertionError(self.told())

    def told(self) -> str:
        return (self.home / "log").read_text()

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "coordinator.cli", *arguments],
            cwd=self.home,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=300,
        )

    def one(self, query: str) -> tuple[int, ...]:
        with psycopg.connect(self.dsn) as connection:
            found = connection.execute(query).fetchone()
        assert found
        return tuple(map(int, found))

    def rows(self) -> int:
        rows, different = self.one("SELECT count(*), count(DISTINCT id) FROM readings")
        assert rows == different
        assert rows % 1000 == 0
        return rows

    def wait_for_more_than(self, rows: int, process: subprocess.Popen[str]) -> None:
        deadline = time.monotonic() + 400
        while True:
            try:
                if self.one("SELECT count(*) FROM readings") > (rows,):
                    return
            except psycopg.errors.UndefinedTable:
                pass
            assert process.poll() is None, self.told()
            assert time.monotonic() < deadline, self.told()
            time.sleep(0.2)


def test_the_pipeline_that_grows(tmp_path: Path, pg_database: str) -> None:
    tutorial = Tutorial(tmp_path, pg_database)
    killed = tutorial.start(SECONDS="600")
    tutorial.wait_for_more_than(1000, killed)
    killed.kill()
    killed.wait()
    assert tutorial.command("in-doubt", "list").returncode in {0, 1}
    tutorial.run()
    written = tutorial.rows()

    (tmp_path / "job.toml").write_text(JOB + "\n" + SECOND_SINK)
    growing = tutorial.start(SECONDS="600")
    tutorial.wait_for_more_than(written, growing)
    stopped = tutorial.command("savepoint", "trigger", "--stop")
    assert stopped.returncode == 0, stopped.stderr
    assert growing.wait(400) == 0, tutorial.told()
    written = tutorial.rows()
    assert tutorial.one("SELECT count(*), min(id), max(id) FROM latest") == (100, written - 100, written - 1)

    savepoint, *_ = re.findall(r"savepoint-readings-[0-9a-f-]+", tutorial.command("savepoint", "list", "--json").stdout)
    elsewhere = str(tmp_path / "readings" / "spark-2")
    restored = tutorial.command("savepoint", "restore", "--yes", savepoint, elsewhere)
    assert restored.returncode == 0, restored.stderr
    tutorial.run(LOCATION=elsewhere)
    assert tutorial.rows() > written
