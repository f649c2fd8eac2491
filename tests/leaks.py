"""A test that leaves something open fails, always, and no other test does.

Connections, sockets, files, processes and threads are noted with the place where they were opened. The plugin looks for
them when their test has been torn down, or their module, if a fixture of the module opened them. If something is still
open, the plugin collects garbage at once, so that a warning out of `__del__` comes in the test that caused it. What a
fixture of the whole session opened is not looked for, because `tests/reaper.py` ends the processes of the session.

A test that plays a driver's death leaves the driver's threads. They end with the test, as they would with the driver.
"""

from __future__ import annotations

import builtins
import functools
import gc
import io
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import psycopg
import pymysql
import pytest

from coordinator.operations.heartbeat import Heartbeats
from coordinator.operations.verifier import Verifier
from coordinator.task import task
from sinks._util import idle_connections

PATIENCE = 60.0
"""Seconds in which what a test has stopped ends, for example a thread with its socket, on the slowest machine."""

KEPT = (
    "/py4j/",
    "/pyspark/",
    "/sinks/_util/progress.py",
    "/sinks/testing/servers/",
    "/sinks/_util/threads.py",
    "/tests/chaos/rigs.py",
    "/tests/spark/job.py",
)
"""What is opened below one of these files is kept for the tests to come, or ends by itself."""

FRAMES = 40

STDLIB = os.path.dirname(threading.__file__)


@dataclass
class Opened:
    """Something that has to be closed."""

    kind: str
    thing: Callable[[], Any]
    is_open: Callable[[Any], bool]
    test: str
    scope: str
    callers: list[tuple[CodeType, int]]
    name: str = ""
    """What a warning calls a file."""

    @property
    def is_of_a_library(self) -> bool:
        """Whether neither the product nor a test has asked Python's own library for it."""
        for code, _ in self.callers:
            if "/site-packages/" in code.co_filename:
                return True
            if not code.co_filename.startswith((STDLIB, "<")):
                return False
        return True

    @property
    def is_kept(self) -> bool:
        return any(place in code.co_filename for code, _ in self.callers for place in KEPT)

    def __str__(self) -> str:
        ours = [f"  {file}:{line}" for file, line in map(_place, self.callers) if "site-packages" not in file]
        return "\n".join([f"{self.kind} {self.thing()!r}, which was opened in {self.test} at", *ours[:8]])


class Leaks:
    """The plugin."""

    def __init__(self) -> None:
        self._test = "no test"
        self._scope = "session"
        self._opened: dict[int, Opened] = {}
        """The keys are what `id` returns, which most warnings name."""
        self._drivers = weakref.WeakSet[Heartbeats | Verifier]()
        self._unraisable: list[str] = []
        self._state: dict[str, object] = {}
        self._descriptors: set[str] = set()
        """The open file descriptors when the test began."""

    # ------------------------------------------------------------------ what is noted
    def pytest_sessionstart(self) -> None:
        self._note(psycopg.Connection, "__init__", "connection", lambda each: not each.closed)
        self._note(pymysql.connections.Connection, "__init__", "connection", lambda each: each.open)
        self._note(socket.socket, "__init__", "socket", lambda each: each.fileno() != -1)
        self._note(subprocess.Popen, "__init__", "process", lambda each: each.returncode is None)
        self._note(threading.Thread, "start", "thread", lambda each: each.is_alive())
        self._note_files()
        sys.unraisablehook = self._unraisable_hook
        for kind in (Heartbeats, Verifier):
            _before(kind, "begin", self._drivers.add)

    def _note(self, kind: type, method: str, word: str, is_open: Callable[[Any], bool]) -> None:
        _before(kind, method, lambda thing: self._add(word, thing, is_open))

    def _note_files(self) -> None:
        inner = io.open

        @functools.wraps(inner)
        def noting_open(*arguments: Any, **options: Any) -> Any:
            file = inner(*arguments, **options)
            self._add("file", file, lambda each: not each.closed, repr(file))
            return file

        for module in (builtins, io):
            vars(module)["open"] = noting_open

    def _add(self, word: str, thing: Any, is_open: Callable[[Any], bool], name: str = "") -> None:
        callers = _callers()
        self._opened[id(thing)] = Opened(word, weakref.ref(thing), is_open, self._test, self._scope, callers, name)

    def _unraisable_hook(self, unraisable: Any) -> None:
        """An error out of `__del__`. Of something that another test opened, that test has been told."""
        owner = self._owner(str(unraisable.exc_value))
        if owner is None or owner.test == self._test:
            told = [f"{unraisable.err_msg or 'Exception ignored in'}: {unraisable.object!r}"]
            told += [line.rstrip() for line in traceback.format_exception(unraisable.exc_value)]
            told += [str(owner)] if owner else []
            try:
                warnings.warn(pytest.PytestUnraisableExceptionWarning("\n".join(told)), stacklevel=1)
            except pytest.PytestUnraisableExceptionWarning as error:  # the test does not ignore them
                self._unraisable.append(str(error))

    def _owner(self, message: str) -> Opened | None:
        """What the message names, by its `id` or, if it is a file, by the name of the file."""
        named = [self._opened.get(int(found, 16)) for found in re.findall(r"0x[0-9a-f]+", message)]
        files = [each for each in reversed([*self._opened.values()]) if each.name and each.name in message]
        return next((each for each in [*named, *files] if each), None)

    # ------------------------------------------------------------------ when it is looked for
    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._test, self._scope, self._state = item.nodeid, "function", _state()
        self._descriptors = _descriptors()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, object, object]:
        before, self._scope = self._scope, fixturedef.scope
        try:
            return (yield)
        finally:
            self._scope = before

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if not report.passed:  # the traceback, also of a skip in the middle, holds what it had open
            self._forget({"function"})
        return report

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, object, object]:
        self._end_drivers()
        _close_idle_connections()
        result = yield
        _close_idle_connections()  # of sinks that a fixture has closed
        scopes = {"function"}
        if nextitem is None or nextitem.path != item.path:
            scopes |= {"class", "module", "package"}
        if any(self._left(scopes)) or _descriptors() - self._descriptors:  # to collect takes longer than most tests
            gc.collect()
        left = [f"the test left a {each}" for each in self._stay(scopes, _on_purpose(item))]
        left += self._unraisable
        left += [f"the test changed {name}" for name, value in _state().items() if self._state.get(name) != value]
        self._forget(scopes)
        self._unraisable = []
        if left:
            pytest.fail("\n\n".join(left), pytrace=False)
        return result

    def _left(self, scopes: set[str]) -> Iterator[Opened]:
        for each in list(self._opened.values()):
            thing = each.thing()
            if each.scope not in scopes or thing is None or not each.is_open(thing) or each.is_kept:
                continue
            if each.kind in ("socket", "file") and each.is_of_a_library:  # which closes it in a thread of its own
                continue
            yield each

    def _stay(self, scopes: set[str], on_purpose: set[str]) -> list[Opened]:
        """What is still open when everything that ends by itself has ended."""
        patience = time.monotonic() + PATIENCE
        while True:
            left = [each for each in self._left(scopes) if each.kind not in on_purpose]
            if not left or time.monotonic() > patience:
                return left
            time.sleep(0.05)

    def _forget(self, scopes: set[str]) -> None:
        """What is open is told of once; what is collected by now can be in no warning."""
        self._opened = {key: each for key, each in list(self._opened.items()) if each.thing() is not None}
        for each in self._opened.values():
            if each.scope in scopes:
                each.scope = "forgotten"

    def _end_drivers(self) -> None:
        for each in list(self._drivers):
            each._ended.set()
            if each._thread:
                each._thread.join(PATIENCE)
        self._drivers.clear()


def _before(kind: type, method: str, call: Callable[[Any], object]) -> None:
    inner = getattr(kind, method)

    @functools.wraps(inner)
    def outer(self: Any, *arguments: Any, **options: Any) -> Any:
        call(self)
        return inner(self, *arguments, **options)

    setattr(kind, method, outer)


def _descriptors() -> set[str]:
    return set(os.listdir("/dev/fd"))


def _callers() -> list[tuple[CodeType, int]]:
    """Who opens something, up to pytest, with the place in each function's code. To find the line of each takes long,
    and only a leak asks for it."""
    found: list[tuple[CodeType, int]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(found) < FRAMES and "/_pytest/" not in frame.f_code.co_filename:
        if frame.f_code.co_filename != __file__:
            found.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return found


def _place(caller: tuple[CodeType, int]) -> tuple[str, int]:
    code, instruction = caller
    lines = (line for start, end, line in code.co_lines() if start <= instruction < end and line)
    return code.co_filename, next(lines, code.co_firstlineno)


def _on_purpose(item: pytest.Item) -> set[str]:
    """What a test may leave: one that fails between `open` or `connect` and `try` says so by its mark."""
    ignored = [warning for mark in item.iter_markers("filterwarnings") for warning in mark.args]
    return {"connection", "socket", "file"} if "ignore::ResourceWarning" in ignored else set()


def _close_idle_connections() -> None:
    """Each would be closed some seconds later, in the midst of another test."""
    for place in list(idle_connections._idle):
        while (connection := idle_connections.take(place[1:])) is not None:
            idle_connections.disconnect(connection)


def _state() -> dict[str, object]:
    """What all tests of a process share."""
    loggers = [logging.getLogger(name) for name in ("", "coordinator", "sinks")]
    return {
        "the working directory": os.getcwd(),
        "the environment": {
            name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "SPARK_", "PYSPARK_"))
        },
        "the time zone": time.tzname,
        "loggers": [(each.level, each.disabled, each.propagate, [*each.handlers]) for each in loggers],
        "whether garbage is collected": gc.isenabled(),
        "how many tasks of sinks this process has begun": sum(task._tasks.values()),
        # A Spark session takes SIGINT, and keeps it; pytest-timeout takes SIGALRM.
        "what signals do": [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)],
    }
