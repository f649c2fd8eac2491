"""One scheduler for everything that acts: drivers, their threads and tasks, operators' commands, late packets.

Each of them is a process, a greenlet that gives control back at `tick`. A tick stands before each call to a storage, a
target or Spark's logs, so whatever can happen between two calls can happen there, and nowhere else. Without events a
process runs until it waits or ends, and then the next one runs. Events are data: `(gap, kind, argument)` means that
after `gap` further ticks `kind` happens. So a schedule can be played again exactly, and leaving events out makes a
smaller schedule.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from greenlet import getcurrent, greenlet

Event = tuple[int, str, int]

INTERRUPT = "interrupt"
"""The fault by which Ctrl-C ends a command, wherever it is."""
TICK = 0.01
"""The seconds that a call takes."""


class Killed(BaseException):
    """A SIGKILL. Each further call of the process raises it again, so the process changes nothing any more."""


class Runaway(BaseException):
    """A process, or the whole world, does not come to an end."""


class Process:
    """A process of an operating system, a thread in one, or anything else that acts by itself.

    A thread is a process of kind "thread", whose `owner` is the process that it belongs to. As an object it is what
    `sinks._util.machine.Thread` asks for.
    """

    def __init__(
        self, scheduler: Scheduler, name: str, kind: str, work: Callable[[], Any], parent: Process | None
    ) -> None:
        self.name = name
        self.kind = kind
        self.parent = parent
        self.owner: Process = parent.owner if parent and kind == "thread" else self
        self.children: list[Process] = []
        self.local: dict[Any, Any] = {} if self.owner is self else self.owner.local
        """What would be global in a real process."""
        self.dead = False
        self.ended = False
        self.started_at = scheduler.ticks
        self.recent: deque[int] = deque(maxlen=32)
        """The numbers of its newest calls."""
        self.calls = 0
        self.first_tick: int | None = None
        """The tick of its first call."""
        self.called_at = scheduler.now
        """The time at which it came to its last call. What it decides before the call, it decides at that time."""
        self.fault = ""
        """The fault that the next call meets."""
        self.result: Any = None
        self.error: BaseException | None = None
        self._scheduler = scheduler
        self._work = work
        self._ready: Callable[[], bool] | None = None
        self._wakes_at = math.inf
        self.greenlet = greenlet(self._main, scheduler.hub)

    def _main(self) -> None:
        try:
            self.result = self._work()
        except Killed:
            self.dead = True
        except BaseException as error:
            self.error = error
        self.ended = True

    @property
    def runnable(self) -> bool:
        if self.ended:
            return False
        return self._ready is None or self._scheduler.now >= self._wakes_at or self._ready()

    @property
    def wakes_at(self) -> float:
        return math.inf if self.ended or self._ready is None else self._wakes_at

    def wait(self, ready: Callable[[], bool], until: float = math.inf) -> bool:
        """Let others run until something is ready, or until that time. Returns whether it is ready."""
        self._ready, self._wakes_at = ready, until
        try:
            while not self.runnable:
                self._scheduler.give_way()
        finally:
            self._ready = None
        return ready()

    def made_calls_since(self, tick: int) -> int:
        """Return how many calls it has made since then; 32 stands for all that are more."""
        return sum(when > tick for when in self.recent)

    # as `sinks._util.machine.Thread`
    def is_alive(self) -> bool:
        return not self.ended

    def join(self, timeout: float | None = None) -> None:
        until = math.inf if timeout is None else self._scheduler.now + timeout
        self._scheduler.running.wait(lambda: self.ended, until)


class Scheduler:
    LIMIT = 20_000
    """The number of ticks after which a schedule has no end."""

    def __init__(self, seed: int, events: Sequence[Event], perform: Callable[[str, int], None]) -> None:
        """Run nothing yet. `perform` makes an event happen, and may call all methods but `tick`."""
        self._seed = seed
        self._events = list(reversed(events))
        self._perform = perform
        self._gap = self._next_gap()
        self._names = 0
        self.holds_events = False
        """Whether the gap before the next event stands still, until something has happened or nobody runs."""
        self.awaited_call: re.Pattern[str] | None = None
        """The call before which events happen again."""
        self.hub = getcurrent()
        self.processes: list[Process] = []
        """Those that have not ended."""
        self.current: Process | None = None
        self.ticks = 0
        self.now = 1000.0
        self.limit = self.LIMIT
        self.trace: list[str] | None = None
        self.when_ended: Callable[[Process], None] = lambda process: None

    def _next_gap(self) -> float:
        return self._events[-1][0] if self._events else math.inf

    # ------------------------------------------------------------------ inside a process
    @property
    def running(self) -> Process:
        assert self.current is not None, "this is for a process"
        return self.current

    def tick(self, what: str) -> str:
        """Come to a call. Returns the fault that the call meets, "" for none. Outside of a process it does nothing."""
        process = self.current
        if process is None:
            return ""
        if process.dead:
            raise Killed
        self.ticks += 1
        if process.first_tick is None:
            process.first_tick = self.ticks
        process.called_at = self.now
        self.now += TICK
        process.recent.append(self.ticks)
        process.calls += 1
        if self.ticks > self.limit:
            raise Runaway(f"{process.name} at {what}")
        if self.awaited_call and self.awaited_call.search(what):
            self.awaited_call, self.holds_events = None, False
        if not self.holds_events:
            self._gap -= 1
            if self._gap < 0:
                self.give_way()
        fault, process.fault = process.fault, ""
        if fault == INTERRUPT:
            raise KeyboardInterrupt
        if self.trace is not None:
            self.trace.append(f"{self.ticks:5d} {process.name:16s} {what}{f'  FAULT {fault}' if fault else ''}")
        return fault

    def give_way(self) -> None:
        process = self.running
        self.hub.switch()
        if process.dead:
            raise Killed

    def sleep(self, seconds: float) -> None:
        process = self.current
        if process is None:
            self.now += seconds
            return
        process.wait(lambda: False, self.now + seconds)
        self.tick(f"has slept {seconds:.2f} s")

    def token(self, count: int) -> str:
        """Return so many random bytes as hexadecimal digits. They are the same each time a schedule is played."""
        self._names += 1
        return hashlib.sha256(f"{self._seed}.{self._names}".encode()).hexdigest()[: 2 * count]

    # ------------------------------------------------------------------ in the hub, and anywhere
    def spawn(self, name: str, kind: str, work: Callable[[], Any], parent: Process | None = None) -> Process:
        process = Process(self, name, kind, work, parent)
        self.processes.append(process)
        if parent:
            parent.children.append(process)
        return process

    def alive(self, *kinds: str) -> list[Process]:
        return [process for process in self.processes if not process.ended and (not kinds or process.kind in kinds)]

    def kill(self, process: Process, *, with_tasks: bool) -> None:
        """Kill a process with its threads, and with the tasks that it has started, if these are to die, too."""
        for child in list(process.children):
            if not child.ended and (child.kind == "thread" or with_tasks):
                self.kill(child, with_tasks=with_tasks)
        process.dead = True
        before, self.current = self.current, process
        while not process.ended and process.greenlet:  # it has begun
            process.greenlet.switch()
        process.ended = True
        self.current = before if before is not process else None
        self._forget(process)

    def _forget(self, process: Process) -> None:
        if process in self.processes:
            self.processes.remove(process)
        for child in process.children:
            if child.kind == "thread" and not child.ended and process.owner is process:
                child.dead = True  # a daemon thread ends with its process
                self.kill(child, with_tasks=False)

    def run(self) -> None:
        """Run until every process has ended and every event has happened."""
        while True:
            if (self._gap < 0 and not self.holds_events) or not self.processes:
                self.awaited_call, self.holds_events = None, False
                if self._events:
                    _, kind, argument = self._events.pop()
                    self._gap = self._next_gap()
                    if self.trace is not None:
                        self.trace.append(f"      ---- {kind} {argument}")
                    self._perform(kind, argument)
                    continue
                self._gap = math.inf
                if not self.processes:
                    return
            process = self.current
            if process is None or not process.runnable:
                process = self._choose(process)
            if process is None:
                self._wait_for_time()
                continue
            self.current = process
            process.greenlet.switch()
            if process.ended:
                self._forget(process)
                self.when_ended(process)

    def _choose(self, last: Process | None) -> Process | None:
        """Choose who runs next. What belongs to the last process comes first."""
        near: list[Process] = []
        if last is not None:
            near += last.children
            if last.parent:
                near += [last.parent, *last.parent.children]
        return next((each for each in (*near, *self.processes) if each.runnable and each in self.processes), None)

    def _wait_for_time(self) -> None:
        """Nobody can run now: let the time pass until somebody wakes, or let the next event happen."""
        wakes_at = min((process.wakes_at for process in self.processes), default=math.inf)
        if wakes_at < math.inf:
            self.now = max(self.now, wakes_at)
        elif self._events:
            self._gap, self.awaited_call, self.holds_events = -1, None, False
        else:
            waiting = ", ".join(process.name for process in self.processes)
            raise Runaway(f"{waiting} wait for something that never comes")
