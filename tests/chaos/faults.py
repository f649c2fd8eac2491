"""Faults: where they strike, how they are chosen, and what strikes them inside the driver."""

from __future__ import annotations

import os
import random
import resource
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from coordinator import CheckpointListener, Step
from coordinator.storage import open_storage
from coordinator.storage.base import WrappedStorage
from sinks.testing.driver import around

STEPS = tuple(step.name for step in Step)
REPLAY_STEPS = ("REPLAYING", "REPLAY_PRE_COMMITTED", "REPLAY_COMPLETE")
SINK_CALLS = ("open", "begin_transaction", "write", "pre_commit", "validate_all", "commit", "commit_all", "abort",
              "in_doubt", "close")  # fmt: skip
STORAGE_CALLS = ("put_if_absent", "get", "list", "delete")
CALLS = tuple(f"{call}:{when}" for call in (*SINK_CALLS, *STORAGE_CALLS) for when in ("before", "after"))
POINTS = tuple(step for step in STEPS if step not in (*REPLAY_STEPS, "FAILED")) + CALLS
"""Where a driver tells its supervisor that it is: after a protocol step, before or after a call of sink or storage."""

DECIDED = ("PRE_COMMITTED", "VALIDATED", "COMPLETE", "COMMITTING")
"""Where an operator's rollback or a time-out leads to a replay."""

_RACES = ("GENERATION_CLAIMED", "put_if_absent:before", "put_if_absent:after", "COMPLETE", "COMMITTED")
"""Where a second driver is when the first one goes on."""

WORLD = ("crash", "cut", "delay", "half-open", "operator", "expire", "second")
"""Faults that the supervisor performs while the driver waits at the point; all others the driver does to itself."""

KINDS = ("kill", "stop", *WORLD, "disk", "clock", "source", "set-back", "tasks")


@dataclass(frozen=True)
class Fault:
    """`kind` strikes when the driver comes to `point` ("": any point) for the `nth` time in its life. Kinds:

    kill         SIGKILL to the driver (with `nth` 0: `seconds` after its start, `point`, or "resumed")
    stop         SIGSTOP; another driver starts, and `seconds` later, or when that comes to the point `until`, this one
                 goes on as a zombie
    crash        SIGKILL to the server, which starts again
    cut          all connections to the server end
    delay        every packet takes some milliseconds longer
    half-open    what is sent on the connections of now vanishes, and nobody is told
    operator     somebody rolls back one of the job's pre-committed transactions
    expire       the server's own time-out rolls all of them back (Kafka)
    disk         no file of the storage can grow beyond `amount` bytes: its disk is full
    clock        the driver's wall clock jumps by `amount` seconds
    source       from now on a replay gets other rows than the first time
    second       another driver of the same job starts beside this one
    set-back     while no driver runs: storage, checkpointLocation or both become those of a backup, or are deleted; or
                 Kafka's group of the job gets an older offset. No driver strikes it: see `Round._set_back`. Only with
                 storage in files, and without Spark
    tasks        executors and Python workers are killed one after another, and the driver only after some checkpoints
                 (with Spark). The supervisor strikes it
    """

    kind: str
    point: str = ""
    nth: int = 1
    seconds: float = 0.0
    amount: int = 0
    until: str = ""


def plan(rng: random.Random, worlds: Mapping[str, int], only: Sequence[str] = (), pace: float = 1.0) -> list[Fault]:
    """The faults of one driver's life. `worlds`: the kinds beside kill and stop that fit the rig, with their weights.
    `only`: no other kinds than these. `pace`: how long a checkpoint takes, in units of 50 ms."""
    if pace > 1 and (not only or "tasks" in only) and rng.random() < 0.5:
        return [Fault("tasks", nth=0), Fault("kill", "TRIGGERED", rng.randint(8, 25))]
    worlds = {kind: weight for kind, weight in worlds.items() if not only or kind in only}
    faults: list[Fault] = []
    if worlds and rng.random() < 0.3:
        (kind,) = rng.choices(list(worlds), list(worlds.values()))
        faults += _world(rng, kind)
    if not only or "stop" in only:
        stops = 0.15 if not only or "kill" in only else 1.0
        if rng.random() < stops:
            faults.append(_stop(rng, pace))
            return faults if only else [*faults, _timed(rng, pace, "resumed"), _anywhere(rng, 150)]
    if not only or "kill" in only:
        faults += _kills(rng, pace, replay=any(fault.kind in ("operator", "expire") for fault in faults))
    return faults


def _kills(rng: random.Random, pace: float, replay: bool) -> list[Fault]:
    """At a named point, and at any other in case the driver does not come there; or at a random time."""
    draw = rng.random()
    if replay and draw < 0.6:
        return [Fault("kill", rng.choice(REPLAY_STEPS)), _anywhere(rng, 250)]
    if draw < 0.65:
        return [Fault("kill", rng.choice(POINTS), _nth(rng, pace)), _anywhere(rng, 150)]
    if draw < 0.8:
        return [_anywhere(rng, 1)]
    return [_timed(rng, pace, rng.choice(("", "TRIGGERED", "TRIGGERED")) if pace == 1 else "TRIGGERED")]


def _anywhere(rng: random.Random, least: int) -> Fault:
    return Fault("kill", "", rng.randint(least, 300))


def _timed(rng: random.Random, pace: float, since: str) -> Fault:
    return Fault("kill", since, nth=0, seconds=pace * rng.choice((0.02, 0.1, 0.4)) * rng.uniform(0.0, 1.0))


def at_a_random_time(rng: random.Random, pace: float) -> list[Fault]:
    """For a life with a kill and nothing else, at no chosen point."""
    return [_timed(rng, pace, "TRIGGERED")]


def _stop(rng: random.Random, pace: float) -> Fault:
    """Half of them before a put: a driver that decides late."""
    point, nth = rng.choice(((rng.choice(POINTS), _nth(rng, pace)), ("put_if_absent:before", rng.choice((1, 2, 3)))))
    seconds = pace * rng.choice((0.1, 0.4, 1.5)) * rng.uniform(0.5, 1.0)
    return Fault("stop", point, nth, seconds, until=rng.choice(("", *_RACES)))


def _nth(rng: random.Random, pace: float = 1.0) -> int:
    """Where a life is slow to start, it lasts for more checkpoints."""
    return rng.choice((1, 1, 2, 3) if pace == 1 else (1, 3, 5, 8))


def _world(rng: random.Random, kind: str) -> list[Fault]:
    nth = _nth(rng)
    if kind in ("operator", "expire"):
        return [Fault(kind, rng.choice(DECIDED), nth)]
    if kind == "source":
        return [Fault("source", "GENERATION_CLAIMED"), Fault("operator", rng.choice(DECIDED), nth)]
    amount = {"disk": rng.choice((0, 100, 600)), "clock": rng.choice((-1, 1)) * rng.randint(1, 10**7)}.get(kind, 0)
    return [Fault(kind, rng.choice(POINTS), nth, amount=amount)]


# ---------------------------------------------------------------------- inside the driver
class Injector:
    """Tells the supervisor where its driver is, and strikes the faults of this life. `group`: the driver has a process
    group of its own, which dies with it."""

    def __init__(self, connection: Connection, faults: Sequence[Fault], group: bool = False) -> None:
        self._connection, self._faults, self._group = connection, list(faults), group
        self._lock = threading.Lock()
        self._times: Counter[str] = Counter()
        self.unfaithful = self.told = False
        self.world = World()

    def at(self, point: str) -> None:
        with self._lock:
            self._tell("at", point, time.monotonic())
            self._times[point] += 1
            self._times[""] += 1
            due = [f for f in self._faults if f.nth and f.point in (point, "") and self._times[f.point] == f.nth]
            for fault in due:
                self._strike(fault)

    def _tell(self, *message: Any) -> None:
        try:
            self._connection.send(message)
        except OSError:
            os._exit(3)  # the supervisor is gone

    def _strike(self, fault: Fault) -> None:
        self._tell("fired", fault)
        if fault.kind in WORLD:
            self._connection.recv()
        elif fault.kind == "kill":
            os.killpg(0, signal.SIGKILL) if self._group else os.kill(os.getpid(), signal.SIGKILL)
        elif fault.kind == "stop":
            os.killpg(0, signal.SIGSTOP) if self._group else os.kill(os.getpid(), signal.SIGSTOP)
        elif fault.kind == "disk":
            self.world = replace(self.world, room=fault.amount)
        elif fault.kind == "clock":
            self.world = replace(self.world, clock=fault.amount)
            self.world.set_clock()
        elif fault.kind == "source":
            self.unfaithful = True

    def failed(self, error: str, text: str) -> None:
        self.told = True
        with self._lock:
            self._tell("error", error, text[:500])

    def listen(self, address: str) -> None:
        """Act for the driver's other processes, too."""
        listener = Listener(address, "AF_UNIX")

        def accept() -> None:
            while True:
                threading.Thread(target=answer, args=[listener.accept()], daemon=True).start()

        def answer(remote: Connection) -> None:
            with suppress(EOFError, OSError):
                while True:
                    method, *arguments = remote.recv()
                    getattr(self, method)(*arguments)
                    remote.send(self.world)

        threading.Thread(target=accept, daemon=True).start()


@dataclass(frozen=True)
class World:
    """What the processes of a driver find around them. `room`: bytes that a file of the storage may have; `clock`:
    seconds by which the wall clock is wrong."""

    room: int = resource.RLIM_INFINITY
    clock: float = 0.0

    def set_clock(self, real: Any = time.time, real_ns: Any = time.time_ns) -> None:
        time.time = lambda: real() + self.clock
        time.time_ns = lambda: real_ns() + int(self.clock * 1e9)


class Remote:
    """In a process that Spark has started: stands for the injector in the driver's first process."""

    def __init__(self, address: str) -> None:
        self._connection, self._lock, self.world = Client(address, "AF_UNIX"), threading.Lock(), World()

    def at(self, point: str) -> None:
        self._ask("at", point)

    def failed(self, error: str, text: str) -> None:
        self._ask("failed", error, text)

    def _ask(self, *question: Any) -> None:
        with self._lock:
            try:
                self._connection.send(question)
                self.world = self._connection.recv()
                self.world.set_clock()
            except (EOFError, OSError):  # the driver was killed, and this process with it, or some time later
                if random.random() < 0.5:
                    os._exit(3)


REMOTE = "CHAOS_DRIVER"
"""The environment variable with the address of the driver's first process."""

here: Injector | None = None
"""That of this process, if it is a driver's: sinks are pickled on their way to the tasks, so it cannot hang on them."""


@lru_cache(1)
def _remote(process: int) -> Remote | None:
    try:
        return Remote(os.environ[REMOTE])
    except (KeyError, OSError):
        return None


def _injector() -> Injector | Remote | None:
    return here or _remote(os.getpid())


@contextmanager
def _full_disk() -> Iterator[None]:
    """As full as the fault `disk` has made it. Spark's own files are on another."""
    injector = _injector()
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (injector.world.room if injector else hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


def at(point: str) -> None:
    if injector := _injector():
        injector.at(point)


def failed(error: BaseException) -> None:
    if injector := _injector():
        injector.failed(type(error).__name__, str(error))


class Steps(CheckpointListener):
    """Says where the driver is after each step."""

    def on_step(self, step: Step, checkpoint_id: int, facts: Mapping[str, Any]) -> None:
        at(step.name)


def watched(sink: Any) -> Any:
    """Says where it is before and after every call."""
    return around(sink, _say_where)


def _say_where(method: str, call: Callable[[], Any]) -> Any:
    point = "abort" if method == "abort_all" else method  # lakes abort many in one step, and never call `abort`
    at(f"{point}:before")
    result = call()
    at(f"{point}:after")
    return result


class WatchedStorage(WrappedStorage):
    """Says where it is before and after every call."""

    def _call(self, method: str, key: str, *more: Any) -> Any:
        at(f"{method}:before")
        with _full_disk():
            result = super()._call(method, key, *more)
        at(f"{method}:after")
        return result

    def close(self) -> None:
        self.inner.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return watched_storage, (self.uri,)


def watched_storage(uri: str) -> WatchedStorage:
    return WatchedStorage(open_storage(uri))
