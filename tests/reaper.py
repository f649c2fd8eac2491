"""Nothing that a test run started outlives it, also when pytest and its workers are killed.

Every process of a run has the run's mark in its environment. `start` leaves a process behind that waits until the one
that called it is gone, and then sends SIGKILL to what does not end by itself.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress

import psutil

MARK = "TEST_RUN"
PATIENCE = 5.0
"""Seconds in which servers are stopped by their watchdogs, and jobs see that nobody listens any more."""


def start() -> None:
    """Mark this process' children, and see to it that they end with it."""
    os.environ[MARK] = uuid.uuid4().hex
    ours, _ = os.pipe()  # the other end is closed with this process
    command = [sys.executable, __file__, os.environ[MARK]]
    subprocess.Popen(command, stdin=ours, stdout=subprocess.DEVNULL, start_new_session=True).returncode = 0
    os.close(ours)


def marked(mark: str) -> Iterator[psutil.Process]:
    """The processes of a run, but for this one."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get(MARK) == mark:
                yield process


def reap(mark: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while left := list(marked(mark)):
        if time.monotonic() > deadline:
            for process in left:
                with suppress(psutil.Error):
                    print("still ran after the tests:", *process.cmdline()[:8], file=sys.stderr)
                    process.kill()
        time.sleep(0.2)


if __name__ == "__main__":
    sys.stdin.read()
    reap(sys.argv[1])
