"""Heartbeats, by which an operator tells a driver that works from one that died.

No decision depends on them.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from coordinator.errors import CorruptRecord
from coordinator.protocol.ports import Query
from coordinator.storage import StorageError
from coordinator.store.job_store import JobStore
from coordinator.store.records import CompletedCheckpoint, Heartbeat
from sinks._util.log import get_logger
from sinks._util.machine import Event, Thread, machine

logger = get_logger("coordinator.heartbeat")

_MISSED = 3
"""The number of intervals without a heartbeat after which a driver counts as silent."""
_LATE = 1.5
"""The number of intervals after which the next heartbeat is overdue."""
_LONGEST = 4000
"""The number of characters that are kept of the error that a query ended with."""
_LAST_WORD = 5.0
"""Seconds that the end of a query waits for its last heartbeat to be written."""


class Heartbeats:
    """The heartbeat of a driver, which a thread of its own gives.

    So a batch that takes long or waits for a database does not hold it up. Every
    `request_poll_interval` seconds, unless that is 0, the thread calls `look`, and gives an extra
    heartbeat if `now()`, what the driver does, has changed. `flush` is called each time, and at the
    end.
    """

    def __init__(
        self,
        store: JobStore,
        interval: float,
        request_poll_interval: float,
        now: Callable[[], Mapping[str, Any]],
        flush: Callable[[], None],
        look: Callable[[], None],
    ) -> None:
        self._store = store
        self._interval = interval
        self._request_poll_interval = request_poll_interval
        self._now = now
        self._flush = flush
        self._look = look
        self._ended = machine.threads.event()
        self._reason = ""
        self._thread: Thread | None = None
        self._query: Query | None = None
        self._signs = Counter[int]()
        """The number of heartbeats that each generation has given."""

    @property
    def begun(self) -> bool:
        return self._thread is not None

    def begin(self, generation: int, query: Query) -> None:
        """Give the heartbeats of a query that runs under this generation from now on."""
        self.end("the query was started again")
        self._ended = machine.threads.event()
        self._reason = ""
        self._query = query
        self._thread = machine.threads.start(
            self._beat, generation, query, self._ended, name="checkpoint-heartbeat"
        )

    def end(self, reason: str) -> None:
        """Give the last heartbeat of the query, which says why it has ended.

        Only the first reason counts.
        """
        thread = self._thread
        self._thread = None
        if thread:
            self._reason = (self._failure() or reason)[:_LONGEST]
            self._ended.set()
            thread.join(_LAST_WORD)

    def _beat(self, generation: int, query: Query, ended: Event) -> None:
        over = False
        due = machine.clock.monotonic() + self._interval
        signed: Mapping[str, Any] = {}
        while not over:
            until_due = max(0.1, due - machine.clock.monotonic())
            over = ended.wait(min(self._request_poll_interval or self._interval, until_due))
            is_due = over or machine.clock.monotonic() >= due
            if is_due:
                due = machine.clock.monotonic() + self._interval
            level = logging.INFO if is_due else logging.DEBUG
            with self._tried("a heartbeat could not be given", level):
                if not over and not query.isActive:
                    over = is_due = True
                    self._reason = (
                        self._failure()
                        or "the query was stopped, or failed outside of the coordinator"
                    )
                now = {} if over else self._now()
                if is_due or now != signed:
                    self._signs[generation] += 1
                    due = machine.clock.monotonic() + self._interval
                    self._store.journal.give_heartbeat(
                        generation, self._signs[generation], self._interval, self._reason, now
                    )
                    signed = now
            with self._tried("the history of its checkpoints could not be written", level):
                self._flush()
            if self._request_poll_interval and not over:
                with self._tried("what operators ask could not be looked for", level):
                    self._look()

    def _failure(self) -> str:
        """Return what the query failed with outside of the coordinator; "" if that is not known."""
        with suppress(Exception):  # The session of the query is gone.
            if self._query and (error := self._query.exception()):
                return f"the query failed outside of the coordinator: {error}"
        return ""

    @contextmanager
    def _tried(self, otherwise: str, level: int) -> Iterator[None]:
        """Log an error of the block, which keeps nothing else from being done."""
        try:
            yield
        except Exception:
            logger.log(level, "job %s: %s", self._store.job, otherwise, exc_info=True)


class State(str, Enum):
    RUNNING = "running"
    SILENT = "silent"  # no sign for several intervals: it died, is frozen, or cut off from storage
    ENDED = "ended"  # as it said itself
    UNKNOWN = "unknown"  # its last sign lies in the future (clocks differ too much)
    NONE = "none"  # the newest generation is not a driver's, so whichever runs stops


@dataclass(frozen=True)
class DriverStatus:
    """The driver of the newest generation, as far as storage tells.

    `age` is the number of seconds since its last heartbeat, and `clock` says whose clock that is:
    the storage's, or otherwise the driver's for the heartbeat and this machine's for now.
    """

    state: State
    generation: int
    sign: Heartbeat
    age: float
    clock: str

    @property
    def runs(self) -> bool:
        """Tell whether the driver runs, as far as storage tells."""
        return self.state is State.RUNNING

    @property
    def is_overdue(self) -> bool:
        """Tell whether the next heartbeat is late.

        The driver does not count as silent yet, but may well be dead.
        """
        return self.runs and self.age > _LATE * self.sign.next

    @property
    def patience(self) -> float:
        """Return the seconds without a heartbeat after which the driver counts as silent."""
        return _MISSED * self.sign.next


def look_for_driver(
    store: JobStore, bad: list[str] | None = None, newest: CompletedCheckpoint | None = None
) -> DriverStatus | None:
    """Return the driver that storage shows; None if nobody has ever started the job there.

    If its last heartbeat cannot be read, `bad` gets a sentence about that, and the claim tells
    instead. Without `bad`, this raises. `newest` is the newest checkpoint, whose end is a heartbeat
    of its driver, too.
    """
    claim = store.newest_claim()
    if not claim.generation:
        return None
    try:
        sign = store.journal.last_heartbeat(claim)
    except (CorruptRecord, StorageError) as error:
        if bad is None:
            raise
        bad.append(str(error))
        sign = claim.sign
    now = store.storage.clock() if sign.storage_at is not None else None
    age = (
        (machine.clock.milliseconds() - sign.at) / 1000
        if now is None or sign.storage_at is None
        else now - sign.storage_at
    )
    record = newest.record if newest and newest.record.generation == claim.generation else None
    since = record.completed_at - sign.at if record else 0
    if 0 < since <= age * 1000 and not sign.ended:
        sign = replace(sign, at=sign.at + since)
        age = age - since / 1000
    if not sign.next:
        state = State.NONE
    elif sign.ended:
        state = State.ENDED
    elif age < -_MISSED * sign.next:
        state = State.UNKNOWN
    else:
        state = State.RUNNING if age <= _MISSED * sign.next else State.SILENT
    clock = "the driver's and this machine's" if now is None else "the storage's"
    return DriverStatus(state, claim.generation, sign, age, clock)
