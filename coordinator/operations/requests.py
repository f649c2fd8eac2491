"""Requests of operators to the running driver, through checkpoint storage.

An operator asks for a savepoint, and perhaps for a stop there.

The operator's command puts a request. The driver finds it, does it between two batches and puts the
answer. A superseded driver does nothing, and no driver does a request that is withdrawn or too old.
Before the driver does anything, it puts that it has begun, and then looks whether the request is
still there. To withdraw a request, the command deletes it, and then looks whether it was begun. So
one of the two sees the other.

What a driver began before it died is not done again, because the query was started again since, and
is not meant to stop. A savepoint without a stop is the exception, because another one does no harm.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from coordinator.errors import CheckpointError, SavepointError, StorageBehind, Superseded, reason
from coordinator.operations.heartbeat import DriverStatus, State, look_for_driver
from coordinator.operations.inspection.text import duration, of_driver
from coordinator.storage import StorageError
from coordinator.storage.retry import retries
from coordinator.store.encoding import corrupt_if_malformed, require_field_types
from coordinator.store.job_store import JobStore
from coordinator.store.records import Heartbeat
from sinks._util.log import get_logger
from sinks._util.machine import Thread, machine
from sinks._util.progress import progress

logger = get_logger("coordinator.requests")

WAYS = ("trigger", "stop", "cancel")
"""What the query does after the savepoint: it continues, stops there, or stops permanently."""
HOLDS = 600.0
LONGEST = 86400.0
"""Seconds that a request holds for.

A driver refuses a request that it has not begun by then. `HOLDS` is the default, and `LONGEST` the
most that a request may ask for.
"""

_OLDEST_MS = 86_400_000
_SWEEP = 3600.0
"""The age at which a note that nobody has fetched is deleted, and the time between two sweeps.

The age is in milliseconds, and the time in seconds.
"""
_INSIST = 60.0
"""Seconds in which a driver tries to put an answer.

An operator waits as long for the answer of a driver that is gone.
"""
_POLL = 0.3
_LOOK = 3.0
"""Seconds between two looks of an operator's command, for an answer and for the driver."""


@dataclass(frozen=True)
class Request:
    """A request of an operator.

    `how` is one of `WAYS`, `sign` says who asks, and when, and the request holds for `holds`
    seconds from then.
    """

    how: str
    sign: Heartbeat
    holds: float = HOLDS

    def to_json(self) -> dict[str, Any]:
        return vars(self) | {"sign": self.sign.to_json()}

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Request:
        with corrupt_if_malformed("the request"):
            request = require_field_types(
                cls(body["how"], Heartbeat(**body["sign"]), body["holds"])
            )
            if request.how not in WAYS or not 0 <= request.holds <= LONGEST:
                raise ValueError(f"{request.how} within {request.holds} s")
            return request

    def require_fresh(self, now: float | None) -> None:
        """Raise SavepointError if the request no longer holds.

        `now` is the time by the storage's clock, if it has one. Otherwise the operator's clock is
        compared with this machine's.
        """
        if now is not None and self.sign.storage_at is not None:
            age = now - self.sign.storage_at
            clock = "the storage's clock"
        else:
            age = (machine.clock.milliseconds() - self.sign.at) / 1000
            clock = "the clocks of the driver and of who asked"
        if abs(age) <= self.holds:
            return
        how_old = f"{duration(age)} old" if age > 0 else f"{duration(-age)} ahead"
        raise SavepointError(
            f"the request is {how_old} by {clock}, and holds for {duration(self.holds)}; ask again"
        )


class Requests:
    """The driver's side.

    `take(how, begin)` waits for the current batch, calls `begin`, which may raise to refuse, and
    takes the savepoint. `require_newest` raises if this driver is superseded.
    """

    def __init__(
        self,
        store: JobStore,
        take: Callable[[str, Callable[[], None]], Mapping[str, Any]],
        require_newest: Callable[[], None],
    ) -> None:
        self._store = store
        self._journal = store.journal
        self._take = take
        self._require_newest = require_newest
        self._answers: dict[str, Mapping[str, Any]] = {}
        """The answers that are not in storage yet, by the request that this driver has begun.

        An answer is {} until there is one.
        """
        self._worker: Thread | None = None
        self._ended = False
        self._sweep_at = 0.0

    def look(self) -> None:
        """Begin with the oldest readable request, unless the driver is busy with a request.

        Raises StorageError.
        """
        if self._worker and self._worker.is_alive():
            return
        if machine.clock.monotonic() >= self._sweep_at:
            self._sweep()
            self._sweep_at = machine.clock.monotonic() + _SWEEP
        asked = self._journal.note_ids("request")
        if asked:
            self._ended = False
            self._worker = machine.threads.start(self._serve, *asked, name="checkpoint-requests")
            atexit.unregister(self._wait)
            # A process whose query is stopped may end before the answer is there.
            atexit.register(self._wait)

    def end(self) -> None:
        """Wait for the request that is being done, unless this is the thread that does it.

        That thread closes the storage when it ends.
        """
        self._ended = True
        self._wait()
        if self._worker is not machine.threads.current():  # else the answer is yet to be put
            atexit.unregister(self._wait)

    def _wait(self) -> None:
        worker = self._worker
        if worker and worker.is_alive() and worker is not machine.threads.current():
            worker.join(_INSIST)

    def _serve(self, *asked: str) -> None:
        """Do the first request that can be read.

        A request that cannot be read must not hold up the others.
        """
        try:
            for id in asked:
                try:
                    if answer := self._answer(id):
                        self._tell(id, answer)
                    return
                except (Superseded, StorageBehind, StorageError) as error:
                    # The request is looked at again, perhaps by a newer driver.
                    logger.debug("job %s: a request is left as it is: %s", self._store.job, error)
                    # If it was begun, its answer comes before the next request.
                    if self._ended or id in self._answers:
                        return
        finally:
            if self._ended:
                self._store.storage.close()

    def _answer(self, id: str) -> Mapping[str, Any] | None:
        self._require_newest()
        if answer := self._answers.get(id):
            return answer
        try:
            body = self._journal.read_note("request", id)
            before = self._journal.read_note("answer", id)
            if body is None or before is not None:
                return before
            request = Request.from_json(body)
            stops = request.how != "trigger" and id not in self._answers
            if stops and self._journal.read_note("begun", id) is not None:
                raise SavepointError(
                    f"a driver before this one had begun to {request.how}, and ended. It is not "
                    "done again, since the query was started anew. See coordinator savepoint "
                    "list, and ask again if it is to stop"
                )
        except CheckpointError as error:
            return {"error": reason(error)}

        begun = False

        def begin() -> None:
            nonlocal begun
            self._require_newest()
            request.require_fresh(self._store.storage.clock())
            self._answers[id] = {}
            self._journal.put_note("begun", id, {})
            if self._journal.read_note("request", id) is None:
                raise SavepointError("the request was withdrawn")
            begun = True

        logger.info(
            "job %s: %s asks for a savepoint (%s)", self._store.job, request.sign.who, request.how
        )
        try:
            return {"savepoint": self._take(request.how, begin)}
        except (Superseded, StorageBehind):
            raise
        except Exception as error:
            if (
                isinstance(error, StorageError)
                and error.uri == self._store.storage.uri
                and not begun
            ):
                raise  # another driver may do it meanwhile, and its answer counts
            logger.warning("job %s: a request was not done: %s", self._store.job, reason(error))
            return {"error": reason(error)}

    def _tell(self, id: str, answer: Mapping[str, Any]) -> None:
        self._answers[id] = answer

        def put() -> None:
            self._journal.put_note("answer", id, answer)
            self._journal.delete_note("request", id)

        retries(
            self._store.storage.uri, _INSIST, lambda error: isinstance(error, StorageError), reason
        )(put)
        del self._answers[id]

    def _sweep(self) -> None:
        for folder in ("request", "begun", "answer"):
            for id in self._journal.note_ids(folder):
                age = machine.clock.milliseconds() - int(id.partition(".")[0])
                if age > _OLDEST_MS:
                    self._journal.delete_note(folder, id)


# ---------------------------------------------------------------------- the operator's side
_INSTEAD = "For a job whose query is stopped say --checkpoint-location. [EO-SAVEPOINT-REQUEST]"
_SEE = (
    "See coordinator status, and which savepoints there are: coordinator savepoint list "
    "[EO-SAVEPOINT-REQUEST]"
)


def ask_driver(store: JobStore, how: str, holds: float = HOLDS) -> dict[str, Any]:
    """Have the running driver take a savepoint, wait for it, and return its summary.

    Raises SavepointError if no driver runs, if the driver refuses, or if it is gone before it has
    answered. A request that the driver has not begun is withdrawn then.
    """
    driver = look_for_driver(store)
    if not _may_run(driver):
        raise SavepointError(
            f"No driver of job {store.job!r} runs that could be asked. {of_driver(driver)} "
            f"{_INSTEAD}"
        )
    id, sign = store.journal.new_note_id()
    try:
        store.journal.put_note("request", id, Request(how, sign, holds).to_json())
        with progress("wait for the driver, which takes the savepoint between two batches"):
            answer = _wait(store, id, holds)
    except StorageError as error:
        raise SavepointError(
            f"Checkpoint storage failed: {error}. The request is withdrawn if storage takes that; "
            f"else the driver may do it within {duration(holds)}. {_SEE}"
        ) from error
    finally:
        with suppress(StorageError):  # a driver deletes what is left
            for folder in ("request", "answer", "begun"):
                store.journal.delete_note(folder, id)
    if "error" in answer:
        raise SavepointError(f"The driver refused: {answer['error']}")
    return dict(answer["savepoint"])


def _wait(store: JobStore, id: str, holds: float) -> Mapping[str, Any]:
    end = machine.clock.monotonic() + holds
    look_at = machine.clock.monotonic() + _LOOK
    begun = False
    gone = ""
    gone_at = 0.0
    patience = _INSIST
    driver = look_for_driver(store)
    while (answer := store.journal.read_note("answer", id)) is None:
        now = machine.clock.monotonic()
        if now >= look_at:
            look_at = now + _LOOK
            driver = look_for_driver(store)
            gone_at = gone_at if gone else now
            gone = "" if _may_run(driver) else of_driver(driver)
            # A driver that ended, perhaps by this request, may still put its answer.
            settles = driver is not None and driver.state in (State.ENDED, State.NONE)
            patience = max(holds, _INSIST) if settles else _INSIST
        begun = begun or store.journal.read_note("begun", id) is not None
        if not begun and (gone or now > end):
            store.journal.delete_note("request", id)
            begun = store.journal.read_note("begun", id) is not None
            if not begun:
                late = f"The driver has not come to it within {duration(holds)}."
                why = gone or f"{late} {of_driver(driver)}"
                raise SavepointError(
                    f"Nothing was done, and the request is withdrawn. {why} {_INSTEAD}"
                )
        if begun and gone and now - gone_at > patience:
            raise SavepointError(f"The driver had begun, and the outcome is unknown. {gone} {_SEE}")
        machine.clock.sleep(_POLL)
    return answer


def _may_run(driver: DriverStatus | None) -> bool:
    return driver is not None and driver.state in (State.RUNNING, State.UNKNOWN)
