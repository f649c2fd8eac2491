"""One round: a job whose driver is started again whenever it ends, under faults, until its input is through."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from coordinator import CheckpointConfig
from tests.chaos import driver, faults, rigs
from tests.chaos.driver import Input, Life
from tests.chaos.faults import STEPS, Fault
from tests.chaos.oracle import Reader, Verdict
from tests.chaos.rigs import Target

_PATIENCE = 8.0
"""Seconds without a sign of life after which a driver is taken for hung, and killed."""
_CHAOS_LIMIT = 150.0
_QUIET_LIMIT = 90.0
"""Seconds that a round may take with faults, and its end without; a driver that needs longer is stuck."""
_HALF_OPEN = 12.0

EXPECTED = frozenset(
    [
        "Superseded",
        "CheckpointFailed",
        "StorageError",
        "InDoubtError",
        "ConfigurationError",
        "TransactionBlocked",
        "CheckpointLocationMismatch",
        "ReplayMismatch",
        "OperationalError",
        "InterfaceError",
        "AdminShutdown",
        "KafkaConnectionError",
        "NodeNotReadyError",
        "KafkaTimeoutError",
        "NoBrokersAvailable",
    ]
)
"""How drivers may fail under faults: refusals that a restart mends, and servers that are not there."""

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload([driver.__name__])


@dataclass
class Result:
    """What one round did and found. `kills` by kind, `at_steps` by the last protocol step before a kill ("": none
    yet), `at_calls` by the last point; `faults` are those beside kills; `recovery` is in seconds."""

    sink: str
    mode: str
    tier: str
    seed: str
    storage: str
    bug: str | None = None
    lives: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    at_steps: Counter[str] = field(default_factory=Counter)
    at_calls: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    replays: int = 0
    checkpoints: int = 0
    rows: int = 0
    lost: int = 0
    duplicated: int = 0
    polls: int = 0
    recovery: list[float] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    seconds: float = 0.0
    finished: str = ""

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


class _Driver:
    """A running driver, as the supervisor knows it."""

    def __init__(self, life: Life) -> None:
        self.connection, other = _processes.Pipe()
        self.process = _processes.Process(target=driver.live, args=(life, other), daemon=True)
        self.life = life
        self.started = self.heard = time.monotonic()
        self.process.start()
        other.close()
        self.step = self.point = ""
        self.resume_at: float | None = None
        self.until = ""
        self.kill_at: float | None = None
        self.killed_by = ""
        self.arm("")

    @property
    def stopped(self) -> bool:
        return self.resume_at is not None

    def arm(self, point: str) -> None:
        """Start the time of a kill that counts from here."""
        for fault in self.life.faults:
            if (fault.kind, fault.nth, fault.point) == ("kill", 0, point) and self.kill_at is None:
                self.kill_at = time.monotonic() + fault.seconds

    def kill(self, why: str) -> None:
        self.killed_by = why
        self.process.kill()

    def resume(self) -> None:
        self.resume_at = None
        self.heard = time.monotonic()
        pid = self.process.pid
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


class Round:
    def __init__(
        self,
        sink: str,
        mode: str,
        targets: Sequence[Target],
        folder: Path,
        seed: str,
        batches: int,
        bug: str | None,
        only: Sequence[str] = (),
    ) -> None:
        self._rng = random.Random(seed)
        self._targets, self._folder = targets, folder
        (folder / "query").mkdir(parents=True)
        file = self._rng.random() < 0.6 or bug == "put-without-if-absent"
        storage = f"file://{folder}/storage" if file else f"sqlite:///{folder}/storage.db"
        self._result = Result(sink, mode, "local", seed, storage.partition(":")[0], bug)
        self._worlds, self._only = rigs.worlds(sink), only
        self._life = Life(
            job=f"chaos {folder.name}",
            sinks=[],
            storage=storage,
            folder=folder / "query",
            input=Input(seed, batches + 1, hot=any(target.hot for target in targets)),
            config=CheckpointConfig(
                commit_timeout=10,
                tolerable_failed_checkpoints=self._rng.choice((0, 2)),
                retained_checkpoints=self._rng.choice((2, 3)),
                sweep_interval=self._rng.choice((0.5, 60)),
            ),
            bug=bug,
        )
        self._drivers: list[_Driver] = []
        self._killed_at: float | None = None
        self._unfaithful = False

    def run(self) -> Result:
        """A round ends early with the first violation that a reader sees."""
        result, started = self._result, time.monotonic()
        life = self._life
        reader = Reader(self._targets, life.job, life.storage, life.input)
        reader.start()
        try:
            self._chaos(reader, batches=len(life.input) - 1)
            self._settle()
            if not reader.violations:
                self._quiet(len(life.input))
        finally:
            for one in self._drivers:
                one.process.kill()
            reader.stop()
        result.polls = reader.polls
        result.violations += reader.violations
        if not result.violations:
            retained = life.config.retained_checkpoints
            verdict = Verdict(self._targets, life.job, life.storage, life.input, retained)
            result.lost, result.duplicated = verdict.lost, verdict.duplicated
            result.violations += verdict.violations
        elif any("more than once" in violation for violation in result.violations):
            result.duplicated = max(result.duplicated, 1)
        result.checkpoints = len(life.input) if not result.violations else self._done()
        result.rows = sum(map(len, life.input.ids()[: result.checkpoints])) * len(self._targets)
        result.seconds = round(time.monotonic() - started, 1)
        result.finished = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        return result

    # ------------------------------------------------------------------ phases
    def _chaos(self, reader: Reader, batches: int) -> None:
        deadline = time.monotonic() + _CHAOS_LIMIT
        while self._done() < batches and not reader.violations and not self._result.violations:
            if time.monotonic() > deadline:
                return  # the rest goes without faults
            if all(one.stopped for one in self._drivers):
                self._start(batches, faults.plan(self._rng, self._worlds, self._only))
            self._attend()

    def _settle(self) -> None:
        """Zombies go on, and every driver comes to its end."""
        for one in self._drivers:
            one.resume()
        deadline = time.monotonic() + 10
        while self._drivers and time.monotonic() < deadline:
            self._attend()
        while self._drivers:
            for one in self._drivers:
                one.kill("in the end")
            self._attend()

    def _quiet(self, batches: int) -> None:
        """One more checkpoint without any fault, and a clean stop."""
        deadline = time.monotonic() + _QUIET_LIMIT
        while self._done() < batches or self._drivers:
            if time.monotonic() > deadline:
                self._result.violations.append(f"stuck: {self._done()} of {batches} checkpoints after {_QUIET_LIMIT} s")
                return
            if not self._drivers:
                self._start(batches, [])
            self._attend()

    def _done(self) -> int:
        folder = self._life.folder / "commits"
        return len(list(folder.iterdir())) if folder.exists() else 0

    # ------------------------------------------------------------------ drivers
    def _start(self, batches: int, planned: Sequence[Fault]) -> None:
        life = self._life
        sinks = [target.sink(self._rng) for target in self._targets]
        if any(fault.kind == "expire" for fault in planned):
            sinks = [target.sink(_Low()) for target in self._targets]
        input = Input(life.input.seed, batches, life.input.hot)
        self._drivers.append(_Driver(Life(**{**life.__dict__, "sinks": sinks, "input": input, "faults": planned})))
        self._result.lives += 1

    def _attend(self) -> None:
        """Hear what the drivers say, and do what is due."""
        by_handle: dict[Any, _Driver] = {}
        for one in self._drivers:
            by_handle[one.connection] = by_handle[one.process.sentinel] = one
        for one in {id(d): d for d in map(by_handle.__getitem__, wait(list(by_handle), 0.05))}.values():
            self._hear(one)
        now = time.monotonic()
        for one in list(self._drivers):
            if one.process.exitcode is not None:
                self._hear(one)
                self._bury(one)
            elif one.resume_at is not None:
                if now > one.resume_at:
                    if self._rng.random() < 0.2:
                        one.kill("stopped")
                    one.resume()
            elif one.kill_at is not None and now > one.kill_at:
                one.kill("at a random time")
            elif now > one.heard + _PATIENCE:
                one.kill("hung")

    def _hear(self, one: _Driver) -> None:
        with suppress(EOFError, OSError):
            while one.connection.poll():
                kind, *facts = one.connection.recv()
                one.heard = time.monotonic()
                if kind == "at":
                    self._note(one, *facts)
                elif kind == "fired":
                    self._strike(one, *facts)
                else:
                    self._failed(one, *facts)

    def _note(self, one: _Driver, point: str, when: float) -> None:
        one.point = point
        for other in self._drivers:
            if other is not one and other.stopped and other.until == point:
                other.resume()
        if point in STEPS:
            one.step = point
            one.arm(point)
            self._result.replays += point == "REPLAY_COMPLETE"
        if point == "DONE" and self._killed_at is not None and one.started > self._killed_at:
            self._result.recovery.append(round(when - self._killed_at, 3))
            self._killed_at = None

    def _failed(self, one: _Driver, error: str, text: str) -> None:
        self._result.errors[error] += 1
        faithless = error == "ReplayMismatch" and not any(fault.kind == "source" for fault in one.life.faults)
        if error not in EXPECTED or faithless:
            self._result.violations.append(f"a driver failed by {error}: {text}")

    def _bury(self, one: _Driver) -> None:
        self._drivers.remove(one)
        one.connection.close()
        code = one.process.exitcode
        if one.life.faults and any(fault.kind == "delay" for fault in one.life.faults):
            for target in self._targets:
                target.system.network.delay = 0.0
        if code == -signal.SIGKILL:
            self._result.kills[one.killed_by] += 1
            self._result.at_steps[one.step] += 1
            self._result.at_calls[one.point] += 1
            self._killed_at = time.monotonic()
        elif code not in (0, 1):
            self._result.violations.append(f"a driver ended with {code}")

    # ------------------------------------------------------------------ faults
    def _strike(self, one: _Driver, fault: Fault) -> None:
        """The driver says that this fault is due, and waits if it is ours to perform."""
        if fault.kind == "kill":
            one.killed_by = "at a point"
            return
        self._result.faults[fault.kind] += 1
        system = self._rng.choice(self._targets).system
        if fault.kind == "stop":
            one.resume_at, one.until = time.monotonic() + (5.0 if fault.until else fault.seconds), fault.until
        elif fault.kind == "crash":
            system.crash()
        elif fault.kind == "cut":
            system.network.cut()
        elif fault.kind == "delay":
            system.network.delay = 0.01
        elif fault.kind == "half-open":
            system.network.half_open(_HALF_OPEN)
        elif fault.kind == "operator":
            with suppress(*rigs.UNREADABLE):
                self._rng.choice(self._targets).roll_back(self._life.job, self._rng)
        elif fault.kind == "expire":
            self._expire()
        elif fault.kind == "second":
            self._start(len(one.life.input), [])
        if fault.kind in faults.WORLD:
            with suppress(OSError):
                one.connection.send("done")
        now = time.monotonic()
        for other in self._drivers:
            other.heard = now  # all waited for us

    def _expire(self) -> None:
        """Wait until the brokers have ended what is pre-committed."""
        deadline = time.monotonic() + 8
        kafka = [target for target in self._targets if target.name == "kafka"]
        with suppress(*rigs.UNREADABLE):
            while time.monotonic() < deadline and any(target.in_doubt(self._life.job) for target in kafka):
                time.sleep(0.1)


class _Low(random.Random):
    """Chooses the first: Kafka's shortest time-out."""

    def choice(self, seq: Any) -> Any:
        return seq[0]
