"""What a run of the tests tells about its servers: which one it is waiting for, and which one could not be had.

Lines about servers go to the terminal as they come, past pytest's capture and from each test process, since a download
or a start can take minutes in which no test ends. A test whose server cannot be had is skipped. The end of the run has
one sentence for each such server. With `--require-servers` the test fails.
"""

from __future__ import annotations

import logging
import os
import re
import tempfile
import time
from collections import Counter
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from sinks.testing.servers.common import CannotBeHad

MISSING = " cannot be had: "
"""In the reason of a skipped test: the end of the sentence says what to do."""
AGAIN = 30.0
"""Seconds until the same line is written again."""
RUN = "TEST_RUN"
"""The environment variable that names the run, for all of its processes."""


class Lines(logging.Handler):
    """Writes what servers log to standard error. Of a line that several test processes have, one of them writes it."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._terminal = os.dup(2)  # pytest takes the other one for its captures
        self._told = Path(tempfile.gettempdir()) / f"told-{os.environ[RUN]}"

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        if re.match("(fetching|starting) ", line) and not line.endswith(", ended") and self._is_due(line):
            os.write(self._terminal, f"\n{line}\n".encode())

    def _is_due(self, line: str) -> bool:
        """Whether no process has written the line, except for its seconds, for some time."""
        self._told.mkdir(exist_ok=True)
        mark = self._told / re.sub(r"\W+", "-", line.partition(" (")[0])
        with suppress(FileNotFoundError):
            if time.time() - mark.stat().st_mtime < AGAIN:
                return False
        mark.touch()
        return True

    def close(self) -> None:
        os.close(self._terminal)
        super().close()
        if "PYTEST_XDIST_WORKER" not in os.environ:
            for mark in self._told.glob("*"):
                mark.unlink()
            with suppress(FileNotFoundError):
                self._told.rmdir()


class Servers:
    """The plugin. `required`: a test whose server cannot be had fails."""

    def __init__(self, *, required: bool) -> None:
        self._required = required
        self._lines = Lines()
        self._logger = logging.getLogger("sinks.testing.servers")
        self._logger.addHandler(self._lines)
        self._logger.setLevel(logging.INFO)

    def pytest_unconfigure(self) -> None:
        self._logger.removeHandler(self._lines)
        self._lines.close()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self) -> Generator[None, object, object]:
        return (yield from self._skipping())

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Generator[None, object, object]:
        return (yield from self._skipping())

    def _skipping(self) -> Generator[None, object, object]:
        try:
            return (yield)
        except CannotBeHad as error:
            if self._required:
                raise
            pytest.skip(why(error))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        skipped = Counter(str(report.longrepr[2]) for report in terminalreporter.stats.get("skipped", []))
        missing = Counter[str]()
        for reason, count in skipped.items():
            if MISSING in reason:
                missing[reason.removeprefix("Skipped: ")] += count
        for reason, count in missing.items():
            terminalreporter.write_line(f"{_tests(count)} skipped, because {reason}")
        if others := skipped.total() - missing.total():
            terminalreporter.write_line(f"{_tests(others)} skipped for other reasons; -rs lists them")


def why(error: Exception) -> str:
    """The reason to skip a test."""
    return str(error).partition("\n")[0].rstrip(".")


def _tests(count: int) -> str:
    return f"{count:,} tests were" if count > 1 else "1 test was"
