"""What really became of the requests of operators: who did them, when, and what the answers said."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.simulation.machine import EPOCH
from tests.simulation.scheduler import Process

if TYPE_CHECKING:
    from tests.simulation.spark import SimQuery
    from tests.simulation.world import World

FOLDERS = ("request", "begun", "answer")
"""Where in a job's folder the notes between operators and drivers are."""


@dataclass
class Serving:
    """The work of one driver on a request. The driver has a thread for it."""

    driver: Process
    since: int
    """The tick at which the thread was started."""
    began: int = 0
    """The tick at which it said that it begins."""
    began_at: float = 0.0
    """The time at which it came to that call, whenever the call was done."""
    query: SimQuery | None = None
    """The query that ran at that time."""
    savepoints: list[str] = field(default_factory=list)
    stopped: list[SimQuery] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return bool(self.savepoints or self.stopped)


@dataclass
class Asked:
    """A request that an operator's command has put into storage."""

    id: str
    way: str
    at: float
    """When the command has asked, by the clock of the scheduler."""
    holds: float
    command: Process
    servings: dict[Process, Serving] = field(default_factory=dict)
    """By the thread that has begun with it."""
    answered: int | None = None
    """The tick at which an answer was there."""

    deleted: int | None = None
    """The tick at which the request was deleted, by its command or by who has answered it."""

    @property
    def done_by(self) -> list[Serving]:
        return [serving for serving in self.servings.values() if serving.done]


class Requests:
    def __init__(self, world: World) -> None:
        self._world = world
        self.asked: dict[str, Asked] = {}
        self._serves: dict[Process, Asked] = {}
        """The request that a driver's thread has begun with last."""
        self.stopped: set[SimQuery] = set()
        """The queries of which a driver has said that they are stopped at a savepoint."""

    def __iter__(self) -> Iterator[Asked]:
        return iter(self.asked.values())

    def note_was_put(self, folder: str, id: str, value: bytes) -> None:
        """Note that somebody has put a note, whether it is new or was there."""
        scheduler = self._world.scheduler
        process = scheduler.current
        if process is None:
            return
        body = json.loads(value)["body"]["note"]
        if folder == "request":
            at = body["sign"]["at"] / 1000 - EPOCH
            self.asked[id] = Asked(id, body["how"], at, body["holds"], process.owner)
        elif asked := self.asked.get(id):
            if folder == "answer":
                asked.answered = scheduler.ticks if asked.answered is None else asked.answered
                serving = asked.servings.get(process)
                if "savepoint" in body and asked.way != "trigger" and serving and serving.query:
                    self.is_stopped(process.owner, serving.query, body["savepoint"]["uri"])
            elif process.kind == "thread":
                serving = asked.servings.setdefault(process, Serving(process.owner, process.started_at))
                serving.began, serving.began_at = scheduler.ticks, process.called_at
                serving.query = process.owner.local.get("query")
                self._serves[process] = asked

    def note_was_deleted(self, folder: str, id: str) -> None:
        asked = self.asked.get(id)
        if asked and folder == "request" and asked.deleted is None:
            asked.deleted = self._world.scheduler.ticks

    def savepoint_was_put(self, uri: str) -> None:
        if serving := self._serving():
            serving.savepoints.append(uri)

    def query_was_stopped(self, query: SimQuery) -> None:
        if serving := self._serving():
            serving.stopped.append(query)

    def is_stopped(self, driver: Process, query: SimQuery, savepoint: str) -> None:
        """Note that a driver says that a query is stopped at a savepoint."""
        self.stopped.add(query)
        saved = self._world.saved.get(savepoint)
        if saved and driver.local.get("query") is query and driver.local.get("decided at", 0) > saved.tick:
            self._world.violations.append(
                f"stopped: {driver.name} has completed a checkpoint after the savepoint at which it has stopped"
            )

    def record_was_put(self, process: Any) -> None:
        """Note that a driver has put a record. It must not, if it has said that its query is stopped."""
        if process is not None:
            process.owner.local["decided at"] = self._world.scheduler.ticks
        query = process.owner.local.get("query") if process else None
        if query in self.stopped:
            self._world.violations.append(
                f"went on: {process.owner.name} has completed a checkpoint after it had said that the query is stopped"
            )

    def _serving(self) -> Serving | None:
        process = self._world.scheduler.current
        asked = self._serves.get(process) if process else None
        return asked.servings[process] if asked and process else None
