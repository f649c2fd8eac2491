"""One round: a job whose driver is started again whenever it ends, under faults, until its input is through."""

from __future__ import annotations

import logging
import math
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import psutil

from coordinator import CheckpointConfig, Replay
from sinks.testing.local import LocalQuery
from tests.chaos import faults, rigs
from tests.chaos.driver import Input, Life, LocalProcess
from tests.chaos.faults import STEPS, Fault
from tests.chaos.oracle import Reader, Verdict
from tests.chaos.rigs import EVOLUTION, Target

_HALF_OPEN = 12.0

logger = logging.getLogger(__name__)

EXPECTED = frozenset(
    [
        "Superseded",
        "CheckpointFailed",
        "StorageError",
        "InDoubtError",
        "ConfigurationError",
        "TransactionBlocked",
        "TransactionEnded",
        "CheckpointLocationMismatch",
        "ReplayMismatch",
        "StreamingQueryException",  # what Spark says of its own
        "OperationalError",
        "InterfaceError",
        "AdminShutdown",
        "KafkaConnectionError",
        "NodeNotReadyError",
        "KafkaTimeoutError",
        "RequestTimedOutError",
        "NoBrokersAvailable",
    ]
)
"""How drivers may fail under faults: refusals that a restart fixes, and servers that are not there."""

REFUSALS = frozenset(
    ["StorageBehind", "ExternalSystemBehind", "CheckpointGap", "CheckpointLocationMismatch", "QueryNotAdopted"]
)
"""How the first driver after a set-back may fail; restoring what was there before fixes it."""

_SET_BACKS = (("storage",), ("query",), ("storage", "query"), ("system",))


@dataclass
class Result:
    """What one round did and found. `kills` by kind, `at_steps` by the last protocol step before a kill ("": none
    yet), `at_calls` by the last point; `faults` are those beside kills, `refused` the starts
    that a set-back was refused at, by error; `recovery` is in seconds."""

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
    refused: Counter[str] = field(default_factory=Counter)
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


@dataclass(frozen=True)
class Tier:
    """How drivers run, and how long things take there.

    `launch` starts a driver. `pace` is the length of a checkpoint in units of 50 ms. A driver without a heartbeat
    for `patience` seconds is taken for hung, and killed. One that is stopped until another comes to a point goes on
    after `longest_stop` seconds. Faults end after `limit` seconds of a round; if the rest takes more than `quiet`
    seconds, the job is stuck. `victims` finds the processes of a driver's tasks, by its process id.
    """

    name: str = "local"
    launch: Callable[[Life], Any] = LocalProcess
    pace: float = 1.0
    patience: float = 60.0
    longest_stop: float = 4.0
    limit: float = 150.0
    quiet: float = 300.0
    victims: Callable[[int], list[tuple[str, psutil.Process]]] | None = None


LOCAL = Tier()


class _Driver:
    """A running driver, as the supervisor knows it."""

    def __init__(self, life: Life, tier: Tier) -> None:
        self.life = life
        self.started = self.heard = time.monotonic()
        self.process = tier.launch(life)
        self.step = self.point = ""
        self.resume_at: float | None = None
        self.until = ""
        self.disturb_at: float | None = None
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
        self.process.signal(signal.SIGKILL)

    def resume(self) -> None:
        self.resume_at = None
        self.heard = time.monotonic()
        self.process.signal(signal.SIGCONT)
        self.arm("resumed")


class Round:
    def __init__(
        self,
        sink: str,
        mode: str,
        targets: Sequence[Target],
        folder: Path,
        seed: str,
        *,
        batches: int,
        tier: Tier = LOCAL,
        only: Sequence[str] = (),
        bug: str | None = None,
        peer: Mapping[str, str] | None = None,
    ) -> None:
        """`folder` is an empty one for all files of the round; `batches` checkpoints are taken under faults, and one
        more after them."""
        self._rng = random.Random(seed)
        self._targets, self._tier = targets, tier
        LocalQuery(folder / "query", [])  # its logs and its id, before two drivers make them at once
        file = self._rng.random() < 0.6 or bug == "put-without-if-absent"
        storage = f"file://{folder}/storage" if file else f"sqlite:///{folder}/storage.db"
        self._result = Result(sink, mode, tier.name, seed, storage.partition(":")[0], bug)
        self._worlds, self._only = rigs.worlds(sink), only
        if tier.victims:
            del self._worlds["source"]  # what their tasks read is Spark's affair
        spool = not bug and not peer and self._rng.random() < 0.4
        self._life = Life(
            job=f"chaos {folder.name}",
            sinks=[],
            storage=storage,
            folder=folder / "query",
            input=Input(
                seed,
                batches + 1,
                hot=any(target.hot for target in targets),
                wider=batches // 2 if mode == EVOLUTION else math.inf,
            ),
            config=CheckpointConfig(
                commit_timeout=10,
                tolerable_failed_checkpoints=self._rng.choice((0, 2)),
                retained_checkpoints=self._rng.choice((2, 3)),
                sweep_interval=self._rng.choice((0.5, 60)),
                replay=Replay.SPOOL if spool else Replay.RECOMPUTE,
                spool_dir=f"file://{folder}/spool" if spool else None,
            ),
            bug=bug,
            peer=peer,
        )
        self._drivers: list[_Driver] = []
        self._killed_at: float | None = None
        self._folder, self._backups = folder, 0
        fits = file and not (tier.victims or peer or bug)
        self._may_set_back = fits and (not only or "set-back" in only)
        self._refusal = ""

    def run(self) -> Result:
        """A round ends early with the first violation that a reader sees."""
        result, started = self._result, time.monotonic()
        life = self._life
        reader = Reader([] if life.peer else self._targets, life.job, life.storage, life.input)
        reader.start()
        try:
            self._chaos(reader, batches=len(life.input) - 1)
            self._settle()
            if not reader.violations and not result.violations:
                self._quiet(len(life.input))
        finally:
            for one in self._drivers:
                one.process.signal(signal.SIGKILL)
            reader.stop()
        result.polls = reader.polls
        result.violations += reader.violations
        if not result.violations:
            verdict = Verdict(self._targets, life.input)
            result.lost, result.duplicated = verdict.lost, verdict.duplicated
            if not life.peer:
                verdict.ask_systems(self._targets, life.job)
                verdict.ask_storage(life.job, life.storage, len(life.input) - 1, life.config.retained_checkpoints)
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
        deadline = time.monotonic() + self._tier.limit
        while self._done() < batches and not reader.violations and not self._result.violations:
            if time.monotonic() > deadline:
                return  # the rest goes without faults
            if not self._drivers and self._may_set_back and self._rng.random() < 0.3:
                self._back_up()
                if self._rng.random() < 0.5:
                    self._set_back(reader, batches)
            if all(one.stopped for one in self._drivers):
                self._start(batches, self._plan())
            self._attend()

    # ------------------------------------------------------------------ set back
    def _back_up(self) -> None:
        """While nobody runs, so it is of one moment."""
        for part in ("storage", "query"):
            if (self._folder / part).exists():
                shutil.copytree(self._folder / part, self._folder / f"backup-{self._backups}" / part)
        self._backups += 1

    def _restore(self, part: str, backup: int) -> None:
        """-1: it is deleted."""
        shutil.rmtree(self._folder / part, ignore_errors=True)
        if (kept := self._folder / f"backup-{backup}" / part).exists():
            shutil.copytree(kept, self._folder / part)
        self._life.folder.mkdir(exist_ok=True)  # drivers log there

    def _set_back(self, reader: Reader, batches: int) -> None:
        """A driver starts on memories of different moments, and nothing else happens to it. If it is refused, what was
        there before comes back."""
        newest, parts = self._backups - 1, self._rng.choice(_SET_BACKS)
        reader.remember()
        undo: Callable[[], None] | None = None
        if parts == ("system",):
            undo = self._rng.choice(self._targets).set_back(self._life.job, self._rng)
            if undo is None:
                return
        else:
            old = self._rng.randint(-1, newest)
            for part in parts:
                self._restore(part, old)
        name = "set-back " + " and ".join(parts)
        self._result.faults[name] += 1
        self._refusal = "none"
        deadline, doubts = time.monotonic() + self._tier.quiet, -1
        while self._result.errors["InDoubtError"] != doubts:  # the sink orders changes otherwise than the rows need
            doubts = self._result.errors["InDoubtError"]
            self._start(min(self._done() + 2, batches), [])
            while self._drivers:
                if time.monotonic() > deadline:
                    self._drivers[0].kill("stuck after a set-back")
                self._attend()
        refusal, self._refusal = self._refusal, ""
        if refusal != "none":
            self._result.refused[f"{name}: {refusal}"] += 1
            for part in parts if undo is None else ():
                self._restore(part, newest)
            if undo:
                undo()

    def _plan(self) -> list[Fault]:
        if self._life.peer:
            return faults.at_a_random_time(self._rng, self._tier.pace)
        return faults.plan(self._rng, self._worlds, self._only, self._tier.pace)

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
        deadline = time.monotonic() + self._tier.quiet
        while self._done() < batches or self._drivers:
            if time.monotonic() > deadline:
                self._result.violations.append(f"stuck: {self._done()} of {batches} checkpoints")
                return
            if not self._drivers:
                self._start(batches, [])
            self._attend()

    def _done(self) -> int:
        folder = self._life.folder / "commits"
        return sum(file.name.isdigit() for file in folder.iterdir()) if folder.exists() else 0

    # ------------------------------------------------------------------ drivers
    def _start(self, batches: int, planned: Sequence[Fault]) -> None:
        life = self._life
        sinks = [target.sink(self._rng) for target in self._targets]
        if any(fault.kind == "expire" for fault in planned):
            sinks = [target.sink(_Low()) for target in self._targets]
        life = replace(life, sinks=sinks, input=replace(life.input, batches=batches), faults=planned)
        self._drivers.append(_Driver(life, self._tier))
        self._result.lives += 1

    def _attend(self) -> None:
        """Hear what the drivers say, and do what is due."""
        by_handle: dict[Any, _Driver] = {}
        for one in self._drivers:
            by_handle[one.process.connection] = by_handle[one.process.sentinel] = one
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
            elif now > one.heard + self._tier.patience:
                one.kill("hung")
            elif one.disturb_at is not None and now > one.disturb_at:
                self._disturb(one)

    def _hear(self, one: _Driver) -> None:
        with suppress(EOFError, OSError):
            while one.process.connection.poll():
                kind, *facts = one.process.connection.recv()
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
        if point == "TRIGGERED" and one.life.faults and self._tier.victims and self._rng.random() < 0.6:
            one.disturb_at = time.monotonic() + self._rng.uniform(0.0, 1.0)
        if point == "DONE" and self._killed_at is not None and one.started > self._killed_at:
            self._result.recovery.append(round(when - self._killed_at, 3))
            self._killed_at = None

    def _failed(self, one: _Driver, error: str, text: str) -> None:
        self._result.errors[error] += 1
        if self._refusal and error in REFUSALS:
            self._refusal = error
            return
        other_rows = any(fault.kind == "source" for fault in one.life.faults)
        faithless = error == "ReplayMismatch" and (not other_rows or one.life.config.replay is Replay.SPOOL)
        if error == "StreamingQueryException":
            logger.warning("Spark failed: %s", text)
        if faithless or (error not in EXPECTED and not self._life.peer):
            self._result.violations.append(f"a driver failed by {error}: {text}")

    def _bury(self, one: _Driver) -> None:
        self._drivers.remove(one)
        code = one.process.exitcode
        one.process.close()
        if any(fault.kind == "delay" for fault in one.life.faults):
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
            one.resume_at = time.monotonic() + (self._tier.longest_stop if fault.until else fault.seconds)
            one.until = fault.until
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
            self._start(len(one.life.input), faults.at_a_random_time(self._rng, self._tier.pace))
        if fault.kind in faults.WORLD:
            with suppress(OSError):
                one.process.connection.send("done")
        now = time.monotonic()
        for other in self._drivers:
            other.heard = now  # all waited for us

    def _disturb(self, one: _Driver) -> None:
        """SIGKILL to an executor or a Python worker, under its tasks or between them; often not to one alone."""
        tasks = any(fault.kind == "tasks" for fault in one.life.faults)
        again, pause = (1.0, 1.5) if tasks else (0.5, 3.0)
        one.disturb_at = time.monotonic() + self._rng.uniform(0.0, pause) if self._rng.random() < again else None
        found = dict[str, list[psutil.Process]]()
        for kind, process in self._tier.victims(one.process.pid) if self._tier.victims else ():
            found.setdefault(kind, []).append(process)
        if found:
            kind = self._rng.choice(sorted(found))
            with suppress(psutil.Error):
                self._rng.choice(found[kind]).kill()
                self._result.kills[kind] += 1
                self._result.at_steps[one.step] += 1
                self._result.at_calls[one.point] += 1

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
