"""Run by test_reaper.py, which kills it: what runs while a test does."""

from __future__ import annotations

import os
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

from sinks.testing.servers.postgres import PostgresServer
from tests.spark.cluster import standalone_cluster
from tests.spark.connect import ConnectServer


def test_servers_run(tmp_path: Path) -> None:
    with ExitStack() as stack:
        stack.enter_context(PostgresServer())
        stack.enter_context(ConnectServer(tmp_path))
        stack.enter_context(standalone_cluster(tmp_path))
        be_killed()


def test_orphans_run() -> None:
    """Neither ends by itself, and one of them is in no process group of the run."""
    with PostgresServer():
        for new_session in (False, True):
            subprocess.Popen(["sleep", "300"], start_new_session=new_session)
        be_killed()


def be_killed() -> None:
    Path(os.environ["ALL_RUN"]).write_text(os.environ["TEST_RUN"])
    time.sleep(200)
