"""The content of the pages, from the statistics, checkpoint storage and the sinks.

Nothing here changes anything.
"""

from __future__ import annotations

import copy
import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any, NamedTuple

from coordinator.config import CheckpointConfig
from coordinator.coordinator import CheckpointCoordinator
from coordinator.errors import CheckpointError, reason
from coordinator.operations.heartbeat import DriverStatus, look_for_driver
from coordinator.operations.inspection.balance import LOOKED_AT, Balance, take_balance
from coordinator.operations.inspection.in_doubt_report import InDoubtReport, find_in_doubt, remedies
from coordinator.operations.inspection.text import duration, of_driver
from coordinator.operations.savepoints.savepoint import Savepoint, list_savepoints
from coordinator.operations.statistics.model import (
    Activity,
    CheckpointStatistics,
    Status,
    load_history,
)
from coordinator.protocol.guarantee import Guarantee, compute_guarantee
from coordinator.protocol.ports import Sink
from coordinator.storage import StorageError
from coordinator.storage.uris import redacted
from coordinator.store.job_store import JobStore, jobs_in
from coordinator.store.records import Acceptance, CompletedCheckpoint
from sinks._util.log import get_logger
from sinks.errors import SinkError
from sinks.optional import Diagnosable
from sinks.transaction import Committable

logger = get_logger("coordinator.ui")

_PATIENCE = 5.0
"""Seconds that a page waits for an answer, from the time of the question."""


@dataclass(frozen=True)
class ReadResult:
    """The value that was read for a page, and the trouble.

    The trouble says why the value is missing or incomplete.
    """

    value: Any = None
    trouble: str = ""


class Notice(NamedTuple):
    """A sentence that a person should see.

    `level` is bad or warn, and `page` is where there is more about it.
    """

    level: str
    text: str
    page: str = ""


class Bar(NamedTuple):
    """One bar of a waterfall, with `begin` and `width` in thousandths of the whole."""

    phase: str
    sink: str
    seconds: float
    begin: float
    width: float


def _cached_for(seconds: float) -> Callable[[Callable[..., Any]], Callable[..., ReadResult]]:
    """Decorate a method that reads, so that its `ReadResult` is kept for `seconds`.

    One thread at a time reads, so that many viewers cost no more than one, and a slow answer stops
    no other page: a viewer who would wait too long gets the previous result. The method gets a
    list, to which it adds a sentence on everything that it leaves out.
    """

    def decorate(read: Callable[..., Any]) -> Callable[..., ReadResult]:
        @functools.wraps(read)
        def get(view: JobView, *about: Any) -> ReadResult:
            return view.read_cached(
                (read.__name__, *about), seconds, functools.partial(read, view, *about)
            )

        return get

    return decorate


class JobView:
    """Everything that the pages show of one job."""

    def __init__(self, coordinator: CheckpointCoordinator) -> None:
        self.job = coordinator.job
        self.sinks = coordinator.sinks
        self.config = coordinator.config
        self.storage = coordinator.storage
        self._lock = threading.Lock()
        self._results: dict[tuple[Any, ...], tuple[float, ReadResult]] = {}
        self._readers: dict[tuple[Any, ...], tuple[float, threading.Thread]] = {}
        self._tries: dict[str, list[CheckpointStatistics]] = {}

    @property
    def store(self) -> JobStore:
        """Return a new store, because a store in use follows the lineage of its newest claim."""
        return JobStore(self.storage, self.job)

    # ------------------------------------------------------------------ results that are kept
    def read_cached(
        self, name: tuple[Any, ...], seconds: float, read: Callable[[list[str]], Any]
    ) -> ReadResult:
        with self._lock:
            until, result = self._results.get(name, (0.0, ReadResult()))
            if time.monotonic() < until:
                return result
            if name not in self._readers:
                thread = threading.Thread(
                    target=self._read, args=(name, seconds, read), daemon=True
                )
                self._readers[name] = time.monotonic(), thread
                thread.start()
            began, thread = self._readers[name]
        thread.join(max(0.0, began + _PATIENCE - time.monotonic()))
        if thread.is_alive():
            late = f"no answer for {duration(time.monotonic() - began)}"
            return replace(result, trouble=f"{late}; what is shown is older" if until else late)
        return self._results[name][1]

    def _read(
        self, name: tuple[Any, ...], seconds: float, read: Callable[[list[str]], Any]
    ) -> None:
        bad: list[str] = []
        try:
            result = ReadResult(read(bad), " ".join(bad))
        except Exception as error:
            if not isinstance(error, (CheckpointError, StorageError, SinkError, OSError)):
                logger.warning("%s could not be read", name[0], exc_info=True)
            result = ReadResult(trouble=reason(error))
        with self._lock:
            self._results[name] = time.monotonic() + seconds, result
            del self._readers[name]

    # ------------------------------------------------------------------ tries of checkpoints
    @_cached_for(1)
    def history(self, bad: list[str]) -> list[CheckpointStatistics]:
        return load_history(self.store, bad, self._tries)[::-1]

    def tries(self) -> ReadResult:
        """Return the tries in the history, newest first."""
        history = self.history()
        return replace(history, value=history.value or [])

    def activity(self) -> Activity:
        return Activity.of(self.driver().value, self.newest().value)

    def find(self, key: str) -> CheckpointStatistics | None:
        return next((each for each in self.tries().value if key_of(each) == key), None)

    @_cached_for(5)
    def participants(self, checkpoint_id: int, _: list[str]) -> list[tuple[int, Committable]]:
        """List the committables of a checkpoint, each with its round.

        There are none once the record is no longer retained.
        """
        complete = self.store.find(checkpoint_id)
        rounds = complete.rounds if complete else ()
        return [
            (record.round, committable) for record in rounds for committable in record.committables
        ]

    # ------------------------------------------------------------------ the job
    @_cached_for(1)
    def driver(self, bad: list[str]) -> DriverStatus | None:
        return look_for_driver(self.store, bad, self.newest().value)

    @_cached_for(3)
    def newest(self, _: list[str]) -> CompletedCheckpoint | None:
        return self.store.load_newest()

    @_cached_for(30)
    def jobs(self, _: list[str]) -> list[str]:
        """List all jobs in the storage."""
        return jobs_in(self.storage)

    @_cached_for(30)
    def given_up(self, bad: list[str]) -> list[Acceptance]:
        return [loss for record in self.store.losses(bad) for loss in record.accepted]

    def guarantee(self) -> tuple[Guarantee, str]:
        """Return the guarantee, and a sentence on who computed it."""
        if tries := self.tries().value:
            known = tries[0].exactly_once or bool(tries[0].reasons)
            return Guarantee(
                tries[0].reasons, known
            ), f"computed by the driver of generation {tries[0].generation}"
        whence = (
            "computed from the configuration and checkpoint storage; there is no checkpoint yet"
        )
        return self._guarantee().value or Guarantee(complete=False), whence

    @_cached_for(30)
    def _guarantee(self, _: list[str]) -> Guarantee:
        """Compute the guarantee before the first batch.

        This works even for a job that requires more than it can have.
        """
        return compute_guarantee(self.job, replace(self.config, require=None), self.storage, {})

    def notices(self) -> list[Notice]:
        """List what is wrong, the worst first."""
        said: list[Notice] = []
        tries = self.tries()
        latest = next(iter(tries.value), None)
        if trouble := self.newest().trouble:
            said.append(Notice("bad", f"The newest checkpoint cannot be read: {trouble}"))
        if latest and latest.status in (Status.FAILED, Status.HALTED):
            text = f"Checkpoint {latest.checkpoint_id} {latest.status.value}: {latest.error}"
            said.append(Notice("bad", text, f"history/{key_of(latest)}"))
        activity = self.activity()
        said += [Notice("warn", text, "in-doubt") for text in activity.not_visible]
        said += [Notice("bad", text, "balance") for text in activity.differs]
        said += self._of_driver()
        if given_up := self.given_up().value:
            rows = sum(loss.rows for loss in given_up)
            said.append(
                Notice(
                    "bad",
                    f"Given up by operators: {rows:,} rows of {len(given_up)} participant(s)",
                    "guarantee",
                )
            )
        if tries.trouble:
            said.append(Notice("warn", f"The history cannot be read: {tries.trouble}"))
        if self.guarantee()[0].weaknesses:
            said.append(Notice("warn", "This job is not exactly-once", "guarantee"))
        return said

    def _of_driver(self) -> list[Notice]:
        answer = self.driver()
        driver: DriverStatus | None = answer.value
        if answer.trouble:
            return [Notice("bad", f"Checkpoint storage does not tell: {answer.trouble}")]
        if driver and driver.runs:
            return [Notice("warn", of_driver(driver))] if driver.is_overdue else []
        return [Notice("warn", of_driver(driver)), *self._left_behind()]

    def _left_behind(self) -> list[Notice]:
        """List what a driver that no longer runs has left behind in the sinks' systems."""
        answer = self.in_doubt()
        if answer.trouble:
            return [
                Notice("warn", f"Transactions in doubt are not known: {answer.trouble}", "in-doubt")
            ]
        seen: InDoubtReport = answer.value
        news = [Notice("bad", f"{text[0].upper()}{text[1:]}", "in-doubt") for text in seen.set_back]
        news += [
            Notice("warn", f"Sink {name} cannot tell: {error}", "in-doubt")
            for name, error in seen.errors.items()
        ]
        for remedy in remedies(seen):
            text = f"{remedy.count:,} transactions in doubt: {remedy.decision.value}"
            news.append(Notice("bad", text, "in-doubt"))
        return news

    # ------------------------------------------------------------------ what other systems tell
    @_cached_for(10)
    def in_doubt(self, _: list[str]) -> InDoubtReport:
        with self._asked() as sinks:
            return find_in_doubt(self.store, sinks)

    @_cached_for(10)
    def savepoints(self, bad: list[str]) -> list[Savepoint]:
        place = self.config.savepoint_dir
        newest_first = reversed(list_savepoints(place, bad)) if place else ()
        return [savepoint for savepoint in newest_first if savepoint.job == self.job]

    @_cached_for(30)
    def balance(self, _: list[str]) -> Balance:
        """Compare the records with the systems' own ledgers. No table and no topic is read."""
        with self._asked() as sinks:
            retained = self.config.retained_checkpoints
            return take_balance(self.store, sinks, quick=True, retained=retained, last=LOOKED_AT)

    @contextmanager
    def _asked(self) -> Iterator[dict[str, Sink]]:
        """Yield copies of the sinks, since two pages may ask at once.

        From then on, the sinks' systems have some seconds to answer.
        """
        copies = {name: copy.deepcopy(sink) for name, sink in self.sinks.items()}
        try:
            for sink in copies.values():
                if isinstance(sink, Diagnosable):
                    sink.set_answer_timeout(8.0)
            yield copies
        finally:
            for sink in copies.values():
                sink.close()

    # ------------------------------------------------------------------ configuration
    def settings(self) -> list[tuple[str, str, bool]]:
        """List the settings: name, value, and whether the value is the default."""
        settings = []
        for each in fields(CheckpointConfig):
            value = self.storage.uri if each.name == "storage" else getattr(self.config, each.name)
            is_default = value == each.default
            if value and each.name in ("savepoint_dir", "spool_dir"):
                value = redacted(value)
            text = value.value if isinstance(value, Enum) else "" if value is None else str(value)
            settings.append((each.name, text, is_default))
        return settings

    def how_sinks_write(self) -> dict[str, str]:
        """Describe how each sink writes, by the transactions of the newest checkpoint.

        Sinks that do not tell are left out.
        """
        newest: CompletedCheckpoint | None = self.newest().value
        written = (
            {each.sink: each.transaction for each in newest.committables.values()} if newest else {}
        )
        diagnosable = {
            name: sink for name, sink in self.sinks.items() if isinstance(sink, Diagnosable)
        }
        return {
            name: sink.describe_writing(written.get(name)) for name, sink in diagnosable.items()
        }


# ---------------------------------------------------------------------- of one or several tries
def key_of(statistics: CheckpointStatistics) -> str:
    """Return the part of a page's address that names a try."""
    attempt = f"{statistics.checkpoint_id}.{statistics.attempt}"
    return f"{statistics.generation}.{attempt}.{statistics.triggered_at}"


def pace(tries: Sequence[CheckpointStatistics]) -> tuple[float, float] | None:
    """Return the rows per second, and the seconds from one checkpoint's end to the next.

    Only the completed ones of `tries` (newest first) of the newest driver count.
    """
    completed = [
        each
        for each in tries
        if each.status is Status.COMPLETED and each.generation == tries[0].generation
    ]
    if len(completed) < 2 or (span := (completed[0].ended_at - completed[-1].ended_at) / 1000) <= 0:
        return None
    return sum(sum(statistics.rows.values()) for statistics in completed[:-1]) / span, span / (
        len(completed) - 1
    )


def waterfall(statistics: CheckpointStatistics) -> list[Bar]:
    """Return a bar for each phase, one after another, and one for each of several sinks in it."""
    whole = max(statistics.duration, sum(statistics.phases.values()), 1e-9)
    bars = []
    at = 0.0
    for phase, seconds in statistics.phases.items():
        bars.append(Bar(phase, "", seconds, at / whole * 1000, seconds / whole * 1000))
        at += seconds
        spans = statistics.spans.get(phase, {})
        for sink, (begin, end) in spans.items() if len(spans) > 1 else ():
            bars.append(
                Bar(phase, sink, end - begin, begin / whole * 1000, (end - begin) / whole * 1000)
            )
    return bars
