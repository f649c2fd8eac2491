"""The clock, the randomness and the threads of a simulated process: what `sinks._util.machine` is in a real one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sinks._util.machine import Clock, Machine, Random, Threads, machine
from tests.simulation.scheduler import Process, Scheduler

EPOCH = 1.6e9
"""The time of the day when the simulated machines were started, in seconds."""


class SimClock(Clock):
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def monotonic(self) -> float:
        return self._scheduler.now

    def milliseconds(self) -> int:
        return int((EPOCH + self._scheduler.now) * 1000)

    def sleep(self, seconds: float) -> None:
        self._scheduler.sleep(seconds)


class SimRandom(Random):
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def token(self, count: int) -> str:
        return self._scheduler.token(count)

    def uniform(self, low: float, high: float) -> float:
        return low + (high - low) * int(self._scheduler.token(2), 16) / 65536


class SimEvent:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._set = False

    def set(self) -> None:
        self._set = True

    def clear(self) -> None:
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def wait(self, timeout: float | None = None) -> bool:
        until = math.inf if timeout is None else self._scheduler.now + timeout
        return self._scheduler.running.wait(self.is_set, until)


class SimLock:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._held = False

    def __enter__(self) -> bool:
        if self._held:
            self._scheduler.running.wait(lambda: not self._held)
        self._held = True
        return True

    def __exit__(self, *_: object) -> None:
        self._held = False


class SimCondition:
    """A condition. Its lock needs nothing, since a process gives control back only at a tick."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._notified = False

    def __enter__(self) -> bool:
        return True

    def __exit__(self, *_: object) -> None:
        """Let a thread that waits come first, if it was notified and an event wants that."""
        if self._notified:
            self._notified = False
            self._scheduler.tick("lets others go on")

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        if predicate():
            return True
        until = math.inf if timeout is None else self._scheduler.now + timeout
        return self._scheduler.running.wait(predicate, until)

    def notify_all(self) -> None:
        self._notified = self._scheduler.current is not None


class SimThreads(Threads):
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._outside = object()

    def start(self, target: Callable[..., object], *arguments: Any, name: str) -> Process:
        owner = self._scheduler.running.owner
        return self._scheduler.spawn(f"{owner.name}/{name}", "thread", lambda: target(*arguments), owner)

    def current(self) -> Any:
        return self._scheduler.current or self._outside

    def lock(self) -> Any:
        return SimLock(self._scheduler)

    def event(self) -> Any:
        return SimEvent(self._scheduler)

    def condition(self) -> Any:
        return SimCondition(self._scheduler)


@contextmanager
def simulated_machine(scheduler: Scheduler) -> Iterator[Machine]:
    """Run the block on simulated machines."""
    before = vars(machine).copy()
    machine.clock = SimClock(scheduler)
    machine.random = SimRandom(scheduler)
    machine.threads = SimThreads(scheduler)
    try:
        yield machine
    finally:
        vars(machine).update(before)
