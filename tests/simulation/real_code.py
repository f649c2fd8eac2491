"""The few places where the real code is led into the simulated world, beside the machine (`machine.py`).

None of them changes what the protocol does. Two leave out work that a simulation does not need, for its speed.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Any

import coordinator.coordinator
import coordinator.operations.attendants
import coordinator.operations.inspection.memory_comparison
import coordinator.operations.requests
import coordinator.operations.savepoints.on_driver
import coordinator.operations.savepoints.restore
import coordinator.operations.savepoints.take
import coordinator.spark.lifecycle
import coordinator.storage
import coordinator.store.folder
import coordinator.store.job_store
import coordinator.store.journal
import coordinator.store.records
import sinks._util.progress
from coordinator.cli import in_doubt, output, savepoints
from coordinator.coordinator import CheckpointCoordinator
from coordinator.store.encoding import unseal
from tests.simulation.spark import SimLocation
from tests.simulation.storage import SimStorage
from tests.simulation.world import World


class PerProcess(MutableMapping[Any, Any]):
    """A global variable of the library, which each simulated process has for itself."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._outside: dict[Any, Any] = {}

    def _own(self) -> dict[Any, Any]:
        process = self._world.scheduler.current
        return process.local.setdefault("globals", {}) if process else self._outside

    def __getitem__(self, key: Any) -> Any:
        return self._own()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._own()[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._own()[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._own())

    def __len__(self) -> int:
        return len(self._own())


class NoStatistics:
    """In place of the statistics of checkpoints, which are for people and take a tenth of the time."""

    def __init__(self, *_: object) -> None:
        self.reporters: list[object] = []

    def on_step(self, *_: object) -> None: ...
    def storage_called(self, *_: object) -> None: ...
    def guaranteed(self, *_: object, **__: object) -> None: ...
    def verified(self, *_: object) -> None: ...

    def activity(self, *_: object) -> dict[str, object]:
        return {}

    def totals(self) -> str:
        return ""


def _quiet(*_: object, **__: object) -> None:
    """Do nothing."""


class Said:
    """What each operator's command prints: the sentences, and the result that `--json` would have."""

    def __init__(self, world: World) -> None:
        self._scheduler = world.scheduler

    def say(self, text: str, *_: object) -> None:
        self._scheduler.running.local.setdefault("said", []).append(text)

    def say_bad(self, sentences: Iterable[str]) -> None:
        for text in sentences:
            self.say(text)

    def show(self, about: Any, /, *_: object, **__: object) -> None:
        self._scheduler.running.local["shown"] = about


class AtExit:
    """What each simulated process does at its end, as the module `atexit`."""

    def __init__(self, world: World) -> None:
        self._scheduler = world.scheduler

    def _own(self) -> list[Callable[[], object]]:
        own: list[Callable[[], object]] = self._scheduler.running.local.setdefault("at exit", [])
        return own

    def register(self, function: Callable[[], object]) -> None:
        self._own().append(function)

    def unregister(self, function: Callable[[], object]) -> None:
        self._own()[:] = [other for other in self._own() if other != function]


@contextlib.contextmanager
def led_into(world: World, job: Callable[[], CheckpointCoordinator]) -> Iterator[None]:
    """Lead the real code into a world. `job` makes the coordinator that an operator's job file names."""
    changed: list[tuple[Any, str, Any]] = []

    def change(where: Any, name: str, value: Any) -> None:
        changed.append((where, name, getattr(where, name)))
        setattr(where, name, value)

    open_real = coordinator.storage._opener

    def opener(uri: str) -> Any:
        if not isinstance(uri, str) or not uri.startswith("sim:"):
            return open_real(uri)
        return uri, lambda make: SimStorage(world, uri.removeprefix("sim:"))

    def open_location(uri: str) -> Any:
        return SimLocation(world, uri.removeprefix("loc:"))

    change(coordinator.storage, "_opener", opener)
    for module in (
        coordinator.operations.savepoints.on_driver,
        coordinator.operations.savepoints.restore,
        coordinator.operations.savepoints.take,
        coordinator.operations.inspection.memory_comparison,
    ):
        change(module, "open_location", open_location)
    change(coordinator.spark.lifecycle, "_CALLS", PerProcess(world))
    change(output, "load_job", lambda place: job())
    change(coordinator.operations.requests, "atexit", AtExit(world))
    said = Said(world)
    for commands in (in_doubt, savepoints, output):
        for name, function in (("tell", said.say), ("say", said.say), ("show", said.show), ("say_bad", said.say_bad)):
            if hasattr(commands, name):
                change(commands, name, function)
    # Statistics, metrics and progress are for people, and decide nothing.
    change(coordinator.coordinator, "CheckpointStatisticsTracker", NoStatistics)
    change(coordinator.operations.attendants, "open_telemetry", _quiet)
    change(coordinator.coordinator, "require_packages", _quiet)
    change(coordinator.store.folder, "unseal", _unseal)
    for store in (coordinator.store.job_store, coordinator.store.journal, coordinator.store.records):
        change(store, "require_field_types", lambda value: value)
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    watches = sinks._util.progress._watching.acquire(blocking=False)
    try:
        yield
    finally:
        if watches:
            sinks._util.progress._watching.release()
        logging.disable(before)
        for where, name, value in reversed(changed):
            setattr(where, name, value)


_unseal = functools.lru_cache(4096)(unseal)
"""The same bytes are unsealed again and again. The result is read and never changed."""
