"""Tests that leave something open, each before one that would find it; `tests/test_leaks.py` runs them."""

from __future__ import annotations

import gc
import logging
import os
import socket
import subprocess
import threading
from collections.abc import Callable
from typing import IO, Any

import psycopg
import pytest

from tests import leaks

leaks.PATIENCE = 0.1
KEPT: dict[str, Any] = {}


def in_a_cycle(thing: Any) -> None:
    """Only the garbage collector frees it."""
    cycle = [thing]
    cycle.append(cycle)


def connection() -> psycopg.Connection[Any]:
    return psycopg.connect(os.environ["TEST_POSTGRES_DSN"])


def file() -> IO[str]:
    return open(os.devnull)


def thread() -> threading.Thread:
    return threading.Thread(target=threading.Event().wait, daemon=True)


def child() -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "1000"])


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


LEFT: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "connection": (connection, psycopg.Connection.close),
    "file": (file, lambda left: left.close()),
    "socket": (socket.socket, socket.socket.close),
    "process": (child, end),
}


@pytest.mark.parametrize("kind", [*LEFT])
class TestLeft:
    def test_leaks(self, kind: str) -> None:
        KEPT[kind] = LEFT[kind][0]()

    def test_neighbour(self, kind: str) -> None:
        LEFT[kind][1](KEPT.pop(kind))


class TestFreed:
    """What is in no variable any more when the neighbour runs, or is given up by it."""

    @pytest.mark.parametrize("open_it", [connection, file])
    def test_leaks(self, open_it: Callable[[], Any]) -> None:
        in_a_cycle(open_it())

    def test_neighbour(self) -> None:
        gc.collect()


@pytest.mark.parametrize("open_it", [connection, file])
class TestGivenUpByTheNeighbour:
    def test_leaks(self, open_it: Callable[[], Any]) -> None:
        in_a_cycle(open_it())
        KEPT["given up"] = open_it()

    def test_neighbour(self, open_it: Callable[[], Any]) -> None:
        KEPT.clear()
        gc.collect()


class TestState:
    def test_leaks(self) -> None:
        os.environ["LEFT"] = "1"
        logging.getLogger("sinks").addHandler(logging.NullHandler())

    def test_neighbour(self) -> None:
        pass


class TestThread:
    def test_leaks(self) -> None:
        thread().start()

    def test_neighbour(self) -> None:
        pass
