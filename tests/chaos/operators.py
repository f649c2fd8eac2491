"""Operators who put dead letters through again while the query runs: killed at their steps, two at the same time, and
with letters that were put through before."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

from coordinator import Replay
from coordinator.balance import Verdict, take_balance
from coordinator.dead_letters import DeadLetters, Letter, replay_job
from coordinator.protocol.dead_letters import with_dead_letters
from coordinator.protocol.records import CheckpointStore
from coordinator.storage import open_storage
from sinks.sql.from_json import loads
from tests.chaos import faults
from tests.chaos.driver import Life, LocalProcess, mortal
from tests.chaos.faults import Fault, WatchedSink, WatchedStorage
from tests.chaos.rigs import Target

_PAUSES = (0.1, 1.0)
"""Seconds between two operators."""
_TRIES = 5
MENDED = "mended"
"""What the names of rows begin with that their target takes."""


@dataclass(frozen=True)
class Shift:
    """What an operator is started with. `seed` chooses letters and what becomes of them; "": none, the operator only
    finishes what others have left."""

    life: Life
    seed: str

    def letters(self, *, watched: bool) -> DeadLetters:
        life = self.life
        sink: Any = WatchedSink(life.sinks[0]) if watched else life.sinks[0]
        storage = open_storage(life.storage)
        config = replace(life.config, replay=Replay.SPOOL, spool_dir=life.config.spool_dir or life.storage)
        listeners = [faults.here] if watched and faults.here else []
        return DeadLetters(life.job, sink, WatchedStorage(storage) if watched else storage, config, listeners)


def operate(shift: Shift, connection: Connection) -> None:
    with mortal(shift.life, connection, "operators.log"), shift.letters(watched=True) as letters:
        if shift.seed:
            found = _put_through(letters, random.Random(shift.seed))
            connection.send(("put", found))
        else:
            letters.finish()


def _put_through(letters: DeadLetters, rng: random.Random) -> Counter[str]:
    found = letters.find() or []
    if not found:
        return Counter()
    chosen = rng.sample(found, rng.randint(1, len(found)))
    if rng.random() < 0.2:
        told = letters.replay([str(chosen[0].id).rpartition(".")[0]])  # as they are, so they are refused again
    else:
        told = letters.replay(mended={str(one.id): _mended(one, rng) for one in chosen})
    return Counter(written=told.written, refused=told.refused, before=told.before)


def _mended(letter: Letter, rng: random.Random) -> dict[str, Any]:
    row: dict[str, Any] = loads(letter.row)
    return row | {"name": f"{MENDED}-{row['id']}"} if rng.random() < 0.8 else row


class Operators:
    """Those of a round, as its supervisor knows them. `expected`: how they may fail."""

    def __init__(self, target: Target, life: Life, result: Any, expected: frozenset[str], patience: float) -> None:
        self._target, self._life, self._result = target, life, result
        self._expected, self._patience = expected, patience
        self._rng = random.Random(f"{life.input.seed}/operators")
        self._running: dict[LocalProcess, float] = {}
        """And when each was heard last."""
        self._next = time.monotonic() + self._rng.uniform(*_PAUSES)

    # ------------------------------------------------------------------ beside the query
    def attend(self) -> None:
        """Hear what they say, and send one, or two, if it is time and nobody is at work."""
        self._hear()
        if not self._running and time.monotonic() > self._next:
            for _ in range(self._rng.choice((1, 1, 2))):
                self._send(f"{self._life.input.seed}/{self._rng.random()}", self._faults())

    def waited(self) -> None:
        """The supervisor was busy with something else."""
        self._running = dict.fromkeys(self._running, time.monotonic())

    def _faults(self) -> Sequence[Fault]:
        draw = self._rng.random()
        if draw < 0.3:
            return ()
        if draw < 0.5:
            return [Fault("kill", "", self._rng.randint(1, 120))]
        return [Fault("kill", self._rng.choice(faults.POINTS), self._rng.choice((1, 1, 2, 3)))]

    def _send(self, seed: str, planned: Sequence[Fault] = ()) -> None:
        life = replace(self._life, sinks=[self._target.sink(self._rng)], faults=planned)
        self._running[LocalProcess(Shift(life, seed), operate)] = time.monotonic()
        self._result.put_through["operators"] += 1

    def _hear(self) -> None:
        for one in list(self._running):
            ended = one.exitcode is not None
            with suppress(EOFError, OSError):
                while one.connection.poll():
                    self._told(*one.connection.recv())
                    self._running[one] = time.monotonic()
            if ended:
                self._bury(one)
            elif time.monotonic() > self._running[one] + self._patience:
                one.signal(signal.SIGKILL)

    def _told(self, kind: str, *facts: Any) -> None:
        if kind == "put":
            self._result.put_through.update(facts[0])
        elif kind == "error":
            error, text = facts
            self._result.put_through[f"stopped by {error}"] += 1
            if error not in self._expected:
                self._result.violations.append(f"an operator failed by {error}: {text}")

    def _bury(self, one: LocalProcess) -> None:
        del self._running[one]
        if one.exitcode == -signal.SIGKILL:
            self._result.kills["an operator's replay"] += 1
        elif one.exitcode not in (0, 1):
            self._result.violations.append(f"an operator ended with {one.exitcode}")
        one.close()
        self._next = time.monotonic() + self._rng.uniform(*_PAUSES)

    # ------------------------------------------------------------------ in the end
    def stop(self) -> None:
        for one in list(self._running):
            one.signal(signal.SIGKILL)
        while self._running:
            self._hear()
            time.sleep(0.01)

    def settle(self) -> None:
        """What was cut off is finished, and more letters are put through, without faults."""
        self.stop()
        for seed in ("", f"{self._life.input.seed}/last", ""):
            for _ in range(_TRIES):
                stopped = self._stopped()
                self._send(seed)
                while self._running:
                    self._hear()
                    time.sleep(0.01)
                if self._stopped() == stopped:
                    break
                time.sleep(1)
            else:
                self._result.violations.append(f"no replay comes to its end: {dict(self._result.put_through)}")

    def _stopped(self) -> int:
        kinds = self._result.put_through
        killed: int = self._result.kills["an operator's replay"]
        return killed + sum(int(count) for kind, count in kinds.items() if kind.startswith("stopped"))

    def verdict(self, bad: Sequence[int]) -> list[str]:
        """Each bad row is in the target, or in one letter that was never put through; and the books balance."""
        life = replace(self._life, sinks=[self._target.sink(self._rng)])
        with Shift(life, "").letters(watched=False) as letters:
            found = letters.find() or []
            gaps = letters.gaps
        written = Counter(self._target.accepted())
        left = Counter(loads(one.row)["id"] for one in found if not one.replayed)
        wrong = [id for id in bad if written[id] + left[id] != 1]
        problems = [f"letters: {gap}" for gap in gaps]
        if wrong:
            told = [f"{id} is written {written[id]} time(s), and {left[id]} letter(s)" for id in wrong[:3]]
            problems.append(f"{len(wrong)} bad row(s) are not there once: {'; '.join(told)}")
        sink = life.sinks[0]
        with closing(open_storage(life.storage)) as storage:
            for job in (life.job, replay_job(life.job, sink.name)):
                books = take_balance(CheckpointStore(storage, job), with_dead_letters([sink]))
                if books.verdict is Verdict.DIFFERS:
                    problems.append(f"the books of {job!r}: {'; '.join(books.found)}")
                self._result.put_through[f"books {books.verdict.value}"] += 1
        for one in with_dead_letters([sink]).values():
            one.close()
        return problems
