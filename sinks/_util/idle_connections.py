"""Connections that stay open between two tasks of one process.

A connection is idle for some seconds, and is closed unless another task takes it. Each task has a
copy of the sink, made from its pickle, and Spark gives its Python processes one task after the
other.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Any, Protocol


class Closable(Protocol):
    def close(self) -> object: ...


IDLE_SECONDS = 5.0

_idle: dict[tuple[object, ...], list[tuple[Any, threading.Timer]]] = {}


def put_back(place: tuple[object, ...], connection: Closable) -> None:
    """Keep the connection for the next task that asks for a connection of this `place`.

    The place is what the connection leads to, and as whom. A forked process has none of its
    parent's connections.
    """

    def end() -> None:
        with contextlib.suppress(ValueError):  # somebody has taken it
            idle.remove(entry)
            disconnect(connection)

    timer = threading.Timer(IDLE_SECONDS, end)
    timer.daemon = True
    entry = connection, timer
    idle = _idle.setdefault((os.getpid(), *place), [])
    idle.append(entry)
    timer.start()


def take(place: tuple[object, ...]) -> Any | None:
    """Take the connection of this `place` that was put back last; return None if there is none."""
    alike = os.getpid(), *place
    with contextlib.suppress(KeyError, IndexError):
        connection, timer = _idle[alike].pop()
        timer.cancel()
        return connection
    return None


def disconnect(connection: Closable) -> None:
    """Close the connection. It is no error if the connection is closed or broken already."""
    with contextlib.suppress(Exception):
        connection.close()
