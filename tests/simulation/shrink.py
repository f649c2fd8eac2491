"""The smallest schedule that still fails."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from tests.simulation.scenario import Scenario, Settings
from tests.simulation.scheduler import Event
from tests.simulation.simulation import play


def signature(faults: Sequence[str]) -> str:
    """Return the kind of the first fault: its text without numbers and names."""
    [first, *_] = faults[0].split("\n")
    return re.sub(r"[0-9a-f]{8,}|\d+", "#", first)[:110]


def fails_alike(wanted: str) -> Callable[[Scenario], bool]:
    def fails(scenario: Scenario) -> bool:
        faults = play(scenario).faults
        return bool(faults) and signature(faults) == wanted

    return fails


def shrink(scenario: Scenario, fails: Callable[[Scenario], bool]) -> Scenario:
    """Leave out events and make numbers smaller, as long as the scenario fails."""
    best = scenario
    progress = True
    while progress:
        progress = False
        for candidate in _smaller(best):
            if candidate != best and fails(candidate):
                best, progress = candidate, True
                break
    return best


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    """Yield smaller scenarios, those that leave most out first."""
    events = scenario.events
    for size in (8, 4, 2, 1):
        for at in range(0, len(events), size):
            yield replace(scenario, events=events[:at] + events[at + size :])
    for at, event in enumerate(events):
        for smaller in _smaller_events(event):
            yield replace(scenario, events=(*events[:at], smaller, *events[at + 1 :]))
    plain = Scenario()
    for name in ("adopt", "locks", "empty", "boundary", "units"):
        yield replace(scenario, **{name: getattr(plain, name)})
    yield replace(scenario, sinks=scenario.sinks[:1])
    yield replace(scenario, sinks=(("one", "prepared", 1), *scenario.sinks[1:]))
    for name in Settings.__dataclass_fields__:
        own = replace(scenario.settings, **{name: getattr(Settings(), name)})
        yield replace(scenario, settings=own)


def _smaller_events(event: Event) -> Iterator[Event]:
    gap, kind, argument = event
    for less in dict.fromkeys((0, gap // 2, gap - 1)):
        if 0 <= less < gap:
            yield less, kind, argument
    for less in (0, 1, 2, 3, argument % 15, argument % 960, argument // 2):
        if less < argument:
            yield gap, kind, less
