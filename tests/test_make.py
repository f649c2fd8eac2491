"""The commands of the Makefile do the same, whatever the shell is set to."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


def test_the_shells_own_spark_and_postgresql_are_not_used() -> None:
    elsewhere = {"PGSERVICE": "shop", "SPARK_HOME": "/opt/spark", "PYTHONPATH": "/opt/spark/python"}
    done = subprocess.run(
        ["make", "-f", "-", "show"],
        cwd=Path(__file__).parents[1],
        env={"PATH": os.environ["PATH"], "SPARK_LOCAL_IP": "127.0.0.1", "NO_PROXY": "in.house"} | elsewhere,
        input="include Makefile\nshow: ; @env\n",
        capture_output=True,
        text=True,
    )
    seen = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    assert not elsewhere.keys() & seen.keys(), done.stderr
    assert seen["SPARK_LOCAL_IP"] == "127.0.0.1"
    assert seen["no_proxy"] == seen["NO_PROXY"] == "127.0.0.1,127.0.0.2,localhost,in.house"
