"""A leak fails the test that leaks, with the place where it was opened, and no other test."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from sinks.testing.servers.postgres import PostgresService

ROOT = Path(__file__).parents[1]


def test_a_leak_fails_the_test_that_leaks_and_no_other(postgres: PostgresService) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", "-q", "tests/leaking.py"],
        cwd=ROOT,
        env=os.environ | {"TEST_POSTGRES_DSN": postgres.dsn},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    failed = re.findall(r"^(?:ERROR|FAILED) tests/leaking\.py::(\S+)", done.stdout, re.M)
    assert sorted(failed) == [
        "TestFreed::test_leaks[connection]",
        "TestFreed::test_leaks[file]",
        "TestGivenUpByTheNeighbour::test_leaks[connection]",
        "TestGivenUpByTheNeighbour::test_leaks[file]",
        "TestLeft::test_leaks[connection]",
        "TestLeft::test_leaks[file]",
        "TestLeft::test_leaks[process]",
        "TestLeft::test_leaks[socket]",
        "TestState::test_leaks",
        "TestThread::test_leaks",
    ], done.stdout
    for kind in ("connection", "file", "process", "socket", "thread"):
        assert re.search(rf"the test left a {kind} .* opened in .*leaking\.py", done.stdout), kind
    assert "leaking.py:" in done.stdout, "where it was opened"
    for changed in ("the environment", "loggers"):
        assert f"the test changed {changed}" in done.stdout
