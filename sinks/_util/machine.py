"""The machine that the library runs on: its clock, its randomness, and its threads.

What the library does depends on its arguments and on these three, and it takes them only from here.
So a simulation can replace them, and run the library in a world where each schedule can be played
again (`tests/simulation`). Nothing else in the library knows of that.
"""

from __future__ import annotations

import random
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol


class Clock:
    """The machine's clock. Tests pass one that does not wait."""

    def monotonic(self) -> float:
        """Return seconds, for durations within this process."""
        return time.monotonic()

    def milliseconds(self) -> int:
        """Return the milliseconds since the epoch, for records."""
        return time.time_ns() // 1_000_000

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def wait(self, event: Event, seconds: float) -> bool:
        """Wait for the event, at most so many seconds, and return whether it came."""
        return event.wait(seconds)


class Random:
    """The machine's randomness."""

    def token(self, count: int) -> str:
        """Return so many random bytes as hexadecimal digits, for a name that nobody has had."""
        return secrets.token_hex(count)

    def uniform(self, low: float, high: float) -> float:
        return random.uniform(low, high)

    def pause(self, tries: int, longest: float) -> float:
        """Return the seconds to wait after so many tries.

        Their range doubles with each try, from 0.1 s up to `longest`. They are random, so that
        those who failed together do not try again together.
        """
        return self.uniform(0, min(longest, 0.1 * 2.0 ** min(tries - 1, 10)))


class Event(Protocol):
    """A flag that threads wait for, such as `threading.Event`."""

    def set(self) -> None: ...
    def clear(self) -> None: ...
    def is_set(self) -> bool: ...
    def wait(self, timeout: float | None = None) -> bool: ...


class Thread(Protocol):
    """A thread that was started, such as `threading.Thread`."""

    def is_alive(self) -> bool: ...
    def join(self, timeout: float | None = None) -> None: ...


class Condition(Protocol):
    """A lock whose holder can wait until something has changed, such as `threading.Condition`."""

    def __enter__(self) -> bool: ...
    def __exit__(self, *error: Any) -> None: ...
    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool: ...
    def notify_all(self) -> None: ...


class Threads:
    """The machine's threads, and what they wait for."""

    def start(self, target: Callable[..., object], *arguments: Any, name: str) -> Thread:
        """Start a thread that does not keep the process from ending.

        Raises RuntimeError if the process can have no more threads.
        """
        thread = threading.Thread(target=target, args=arguments, name=name, daemon=True)
        thread.start()
        return thread

    def current(self) -> Thread:
        """Return the thread that calls this."""
        return threading.current_thread()

    def lock(self) -> AbstractContextManager[Any]:
        return threading.Lock()

    def event(self) -> Event:
        return threading.Event()

    def condition(self) -> Condition:
        return threading.Condition()


class Machine:
    def __init__(self) -> None:
        self.clock = Clock()
        self.random = Random()
        self.threads = Threads()


machine = Machine()
"""The machine of this process."""
