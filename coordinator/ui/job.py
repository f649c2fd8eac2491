"""What the pages show, from the statistics, checkpoint storage and the sinks. Nothing here changes anything."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

from coordinator.config import CheckpointConfig
from coordinator.coordinator import CheckpointCoordinator
from coordinator.errors import CheckpointError, reason
from coordinator.guarantee import Guarantee
from coordinator.heartbeat import Driver, look_for_driver
from coordinator.operate.balance import take_balance
from coordinator.operate.in_doubt import Seen, look, remedies
from coordinator.operate.memories import set_back
from coordinator.operate.text import of_driver, of_newest
from coordinator.protocol.batch import Sink
from coordinator.protocol.records import CheckpointStore, jobs_in
from coordinator.savepoints.model import Savepoint, list_savepoints
from coordinator.statistics.history import load_history
from coordinator.statistics.model import Activity, CheckpointStatistics, Status
from coordinator.storage import CheckpointStorage, StorageError
from coordinator.storage.uris import redacted
from coordinator.ui.answer_cache import Answer, AnswerCache
from sinks.optional import Diagnosable


@dataclass(frozen=True)
class Notice:
    """Something that a person should see. `level`: bad or warn; `page`: where there is more."""

    level: str
    text: str
    page: str = ""


@dataclass(frozen=True)
class Bar:
    """One of a waterfall; `begin` and `width` in thousandths of the whole."""

    phase: str
    sink: str
    seconds: float
    begin: float
    width: float


@dataclass(frozen=True)
class Setting:
    name: str
    value: str
    is_default: bool
    what: str = ""


@dataclass
class JobView:
    """Of one job, for one page."""

    job: str
    storage: CheckpointStorage
    sinks: Mapping[str, Sink]
    config: CheckpointConfig
    guarantee: Callable[[], Guarantee]
    _answers: AnswerCache = field(default_factory=AnswerCache)
    _tries: dict[str, list[CheckpointStatistics]] = field(default_factory=dict)

    @property
    def store(self) -> CheckpointStore:
        """Of its own: one in use follows the lineage of what was claimed last."""
        return CheckpointStore(self.storage, self.job)

    # ------------------------------------------------------------------ tries of checkpoints
    def tries(self) -> Answer:
        """Those kept, newest first."""
        answer = self._answers.get("history", 1, lambda bad: load_history(self.store, bad, self._tries))
        return Answer(list(reversed(answer.value or ())), answer.trouble)

    def activity(self) -> Activity:
        return Activity.of(self.driver().value)

    def find(self, key: str) -> CheckpointStatistics | None:
        return next((statistics for statistics in self.tries().value if key_of(statistics) == key), None)

    def participants(self, statistics: CheckpointStatistics) -> Answer:
        """Its committables, with the round of each, as long as the record is retained."""

        if statistics.status is Status.FAILED:
            return Answer([])

        def read(bad: list[str]) -> list[tuple[int, Any]]:
            for rounds in self.store.history(lambda id: id == statistics.checkpoint_id):
                if rounds[0].checkpoint_id == statistics.checkpoint_id:
                    return [(record.round, committable) for record in rounds for committable in record.committables]
            return []

        return self._answers.get(f"participants {statistics.checkpoint_id}", 5, read)

    # ------------------------------------------------------------------ the job
    def driver(self) -> Answer:
        return self._answers.get("driver", 1, lambda bad: look_for_driver(self.store, bad))

    def newest(self) -> Answer:
        """The newest complete checkpoint's records."""
        return self._answers.get("newest", 3, lambda _: self.store.load_newest())

    def jobs(self) -> Answer:
        """All that the storage holds: each one's driver and newest checkpoint, as sentences."""

        def read(bad: list[str]) -> list[tuple[str, str, str]]:
            jobs = []
            for name in jobs_in(self.storage):
                store = CheckpointStore(self.storage, name)
                try:
                    jobs.append((name, of_driver(look_for_driver(store, bad)), of_newest(store.load_newest())))
                except (CheckpointError, StorageError) as error:
                    jobs.append((name, reason(error), ""))
            return jobs

        return self._answers.get("jobs", 30, read)

    def given_up(self) -> Answer:
        return self._answers.get(
            "losses", 30, lambda bad: [loss for record in self.store.losses(bad) for loss in record.accepted]
        )

    def promise(self) -> tuple[Guarantee, str]:
        """The guarantee, and whose word it is."""
        tries = self.tries().value
        if tries:
            return Guarantee(tries[0].reasons), f"computed by the driver of generation {tries[0].generation}"
        return self.guarantee(), "computed from the configuration and checkpoint storage; there is no checkpoint yet"

    def notices(self) -> list[Notice]:
        """What is wrong, the worst first."""
        said: list[Notice] = []
        tries = self.tries()
        latest = next(iter(tries.value), None)
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
                Notice("bad", f"Given up by operators: {rows:,} rows of {len(given_up)} participant(s)", "guarantee")
            )
        if tries.trouble:
            said.append(Notice("warn", f"The history cannot be read: {tries.trouble}"))
        if not self.promise()[0].exactly_once:
            said.append(Notice("warn", "This job is not exactly-once", "guarantee"))
        return said

    def _of_driver(self) -> list[Notice]:
        answer = self.driver()
        driver: Driver | None = answer.value
        if answer.trouble:
            return [Notice("bad", f"Checkpoint storage does not tell: {answer.trouble}")]
        if driver and driver.runs:
            return [Notice("warn", of_driver(driver))] if driver.is_overdue else []
        return [Notice("warn", of_driver(driver)), *self._left_behind()]

    def _left_behind(self) -> list[Notice]:
        """By a driver that does not run, in the systems of the sinks."""
        answer = self.in_doubt()
        if answer.trouble:
            return [Notice("warn", f"Transactions in doubt are not known: {answer.trouble}", "in-doubt")]
        seen, memories = answer.value
        said = [Notice("bad", f"{text[0].upper()}{text[1:]}", "in-doubt") for text in memories]
        said += [Notice("warn", f"Sink {name} cannot tell: {error}", "in-doubt") for name, error in seen.errors.items()]
        for remedy in remedies(seen):
            text = f"{remedy.count:,} transactions in doubt: {remedy.decision.value}"
            said.append(Notice("bad", text, "in-doubt"))
        return said

    # ------------------------------------------------------------------ what other systems tell
    def in_doubt(self) -> Answer:
        """What is in doubt, and a sentence on each sink that remembers other checkpoints than storage. Of copies of the
        sinks, since the balance may ask them just now."""

        def ask(_: list[str]) -> tuple[Seen, list[str]]:
            copies = {name: copy.deepcopy(sink) for name, sink in self.sinks.items()}
            try:
                for sink in copies.values():
                    if isinstance(sink, Diagnosable):
                        sink.set_answer_timeout(8.0)
                return look(self.store, copies), set_back(self.store, copies)
            finally:
                for sink in copies.values():
                    sink.close()

        return self._answers.get("in doubt", 10, ask)

    def savepoints(self) -> Answer:
        place = self.config.savepoint_dir
        if not place:
            return Answer([])

        def read(bad: list[str]) -> list[Savepoint]:
            return [savepoint for savepoint in reversed(list_savepoints(place, bad)) if savepoint.job == self.job]

        return self._answers.get("savepoints", 10, read)

    def balance(self) -> Answer:
        """Records beside the systems' own ledgers: no table and no topic is read."""
        return self._answers.get("balance", 30, lambda _: take_balance(self.store, self.sinks, quick=True))

    # ------------------------------------------------------------------ configuration
    def settings(self) -> list[Setting]:
        documented = re.findall(r"^ {4}(\w+): (.+(?:\n {8}.+)*)$", CheckpointConfig.__doc__ or "", re.MULTILINE)
        texts = {name: " ".join(text.split()) for name, text in documented}
        settings = []
        for each in fields(CheckpointConfig):
            value = getattr(self.config, each.name)
            if each.name == "storage":
                value, is_default = self.storage.uri, False
            else:
                is_default = value == each.default
                value = redacted(value) if each.name == "savepoint_dir" and value else value
            value = value.value if isinstance(value, Enum) else value
            settings.append(
                Setting(each.name, "" if value is None else str(value), is_default, texts.get(each.name, ""))
            )
        return settings

    def how_sinks_write(self) -> dict[str, str]:
        """Of those that tell, by the transactions of the newest checkpoint."""
        committables = [each for record in self.newest().value or () for each in record.committables]
        written = {each.sink: each.transaction for each in committables}
        diagnosable = {name: sink for name, sink in self.sinks.items() if isinstance(sink, Diagnosable)}
        return {name: sink.describe_writing(written.get(name)) for name, sink in diagnosable.items()}


def view_of(coordinator: CheckpointCoordinator) -> JobView:
    return JobView(
        coordinator.job,
        coordinator.protocol.store.storage,
        coordinator.sinks,
        coordinator.config,
        lambda: coordinator.guarantee,
    )


# ---------------------------------------------------------------------- of one or several tries
def key_of(statistics: CheckpointStatistics) -> str:
    """Its place in addresses."""
    return f"{statistics.generation}.{statistics.checkpoint_id}.{statistics.attempt}.{statistics.triggered_at}"


@dataclass(frozen=True)
class Pace:
    """Of the last completed tries, between the first's end and the last's."""

    rows: float
    """A second."""
    seconds: float
    """Between the ends of two."""


def pace(tries: Sequence[CheckpointStatistics]) -> Pace | None:
    """`tries` newest first; None for less than two."""
    completed = [statistics for statistics in tries if statistics.status is Status.COMPLETED]
    if len(completed) < 2 or (span := (completed[0].ended_at - completed[-1].ended_at) / 1000) <= 0:
        return None
    return Pace(sum(sum(statistics.rows.values()) for statistics in completed[:-1]) / span, span / (len(completed) - 1))


def waterfall(statistics: CheckpointStatistics) -> list[Bar]:
    """Its phases, one after another; of several sinks each one's part."""
    whole = max(statistics.duration, sum(statistics.phases.values()), 1e-9)
    bars, at = [], 0.0
    for phase, seconds in statistics.phases.items():
        bars.append(Bar(phase, "", seconds, at / whole * 1000, seconds / whole * 1000))
        at += seconds
        spans = statistics.spans.get(phase, {})
        for sink, (begin, end) in spans.items() if len(spans) > 1 else ():
            bars.append(Bar(phase, sink, end - begin, begin / whole * 1000, (end - begin) / whole * 1000))
    return bars
