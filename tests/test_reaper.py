"""A test run that is killed leaves no process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.reaper import marked
from tests.signals import in_foreground
from tests.spark.job import wait_for


@pytest.mark.parametrize(
    ("test", "processes", "how"),
    [
        ("test_orphans_run", {"postgres", "sleep"}, signal.SIGTERM),
        pytest.param("test_servers_run", {"postgres", "java"}, signal.SIGTERM, marks=pytest.mark.large),
        pytest.param("test_servers_run", {"postgres", "java"}, signal.SIGINT, marks=pytest.mark.large),
    ],
)
def test_killed_while_servers_run(tmp_path: Path, test: str, processes: set[str], how: signal.Signals) -> None:
    """The signal gets to pytest and to its workers, as from a terminal or from CI."""
    all_run = tmp_path / "all-run"
    command = [sys.executable, "-m", "pytest", "-n", "1", "-p", "no:cacheprovider", "--basetemp", str(tmp_path / "tmp")]
    run = subprocess.Popen(
        [*command, f"tests/left_running.py::{test}"],
        cwd=Path(__file__).parents[1],
        env=os.environ | {"ALL_RUN": str(all_run)},
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        preexec_fn=in_foreground,
    )
    wait_for(lambda: all_run.exists() or run.poll() is not None, 300)
    family = list(marked(all_run.read_text()))
    names = [process.name() for process in family]
    assert processes <= set(names)
    assert names.count("java") in (0, 4), "Spark Connect, a master, two workers"
    os.killpg(run.pid, how)
    run.wait(300)
    _, alive = psutil.wait_procs(family, timeout=120)
    assert alive == []
