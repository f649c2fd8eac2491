"""What the README tells a new user to run does run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import psycopg

README = Path(__file__).parents[1] / "README.md"


def test_the_first_pipeline_of_the_readme(tmp_path: Path, pg_database: str) -> None:
    section = README.read_text().split("## A first pipeline")[1]
    found = re.search(r"```python\n(.*?)```", section, re.S)
    assert found
    program = found[1].replace("/tmp/numbers", str(tmp_path)).replace("awaitTermination(30)", "awaitTermination(15)")
    environment = os.environ | {"DSN": pg_database, "PYTHONPATH": str(README.parent)}
    log = tmp_path / "log"
    with log.open("wb") as output:
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, stdout=output, stderr=output, timeout=200, cwd=tmp_path
        )
    assert done.returncode == 0, log.read_text()
    with psycopg.connect(pg_database) as connection:
        row = connection.execute("SELECT count(*), count(DISTINCT value), max(value) FROM numbers").fetchone()
    assert row
    rows, distinct, largest = row
    assert rows == distinct == largest + 1 >= 1000
