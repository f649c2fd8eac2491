"""The commands of the Makefile do the same, whatever the shell is set to."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_shells_own_spark_and_postgresql_are_not_used() -> None:
    elsewhere = {"PGSERVICE": "shop", "SPARK_HOME": "/opt/spark", "PYTHONPATH": "/opt/spark/python"}
    done = subprocess.run(
        ["make", "-f", "-", "show"],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "SPARK_LOCAL_IP": "127.0.0.1", "NO_PROXY": "in.house"} | elsewhere,
        input="include Makefile\nshow: ; @env\n",
        capture_output=True,
        text=True,
    )
    seen = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    assert not elsewhere.keys() & seen.keys(), done.stderr
    assert seen["SPARK_LOCAL_IP"] == "127.0.0.1"
    assert seen["no_proxy"] == seen["NO_PROXY"] == "127.0.0.1,127.0.0.2,localhost,in.house"


def test_what_takes_minutes_is_told_before_it_begins(tmp_path: Path) -> None:
    for file in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / file, tmp_path)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\n" + 'case "$*" in *install*) echo "pip begins";; esac\n')
    python.chmod(0o755)
    command = ["make", "--no-print-directory", ".venv/.ready"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told, *rest = done.stdout.splitlines()
    assert "into .venv, once" in told
    assert "minutes" in told
    assert rest == ["pip begins"]
