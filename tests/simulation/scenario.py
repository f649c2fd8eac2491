"""A schedule as data: settings, and events. A seed only draws it."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from tests.simulation.scheduler import Event

FORMAT = 1


@dataclass(frozen=True)
class Settings:
    """What an operator can change between two starts."""

    retained: int = 2
    commit_timeout: float = 30.0
    tolerable: int = 0
    replay: str = "recompute"
    partitions: int = 1
    pause: float = 0.0
    """Seconds that the query waits before each batch. In these the driver's threads act."""


@dataclass(frozen=True)
class Scenario:
    """All that decides a run, so that it can be played again. `kind` is only for people."""

    seed: int = 1
    kind: str = ""
    units: int = 4
    empty: bool = False
    """Whether some batches have no rows."""
    boundary: int = 0
    """What the first driver does between two batches: nothing (0), a savepoint (odd), a sweep (even)."""
    adopt: bool = False
    """Whether the query ran without the library before."""
    locks: bool = False
    """Whether a prepared transaction locks its rows."""
    calls_again: bool = False
    """Whether the user's function calls the coordinator a second time for a batch that failed."""
    topics: bool = False
    """Whether the source is a topic of Kafka, which can be deleted and created again."""
    most_letters: int = 1000
    """The number of dead letters that a checkpoint may have."""
    log_is_overwritten: bool = False
    """Whether two drivers may write the same file of Spark's log, as in a file system that renames over a file."""
    one_pass: bool = False
    """Whether a task writes its partition to all sinks. Otherwise each sink has a Spark job of its own."""
    sinks: tuple[tuple[str, str, int], ...] = (("one", "prepared", 1),)
    """The name of each sink, its kind in `targets.KINDS`, and which units of input it takes."""
    settings: Settings = field(default_factory=Settings)
    events: tuple[Event, ...] = ()

    def is_empty(self, n: int) -> bool:
        return self.empty and (n * 5 + self.seed) % 4 == 1

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> Scenario:
        value: dict[str, Any] = json.loads(text)
        if value.pop("format") != FORMAT:
            raise ValueError("this scenario is of another version of the simulator")
        value.pop("about", None)
        return cls.of(value)

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> Scenario:
        tuples = {
            "sinks": tuple((name, kind, every) for name, kind, every in value.get("sinks", cls.sinks)),
            "settings": Settings(**value.get("settings", {})),
            "events": tuple((gap, kind, argument) for gap, kind, argument in value.get("events", ())),
        }
        return cls(**{**value, **tuples})


# ---------------------------------------------------------------------- drawn from a seed
PROFILES: dict[str, dict[str, int]] = {
    "plain": {
        "switch": 10,
        "crash": 6,
        "driver": 8,
        "fault": 6,
        "roll back": 4,
        "down": 2,
        "speculate": 2,
        "time": 2,
        "abort orphans": 2,
        "abort one": 2,
        "resolve": 3,
        "recover": 1,
        "list": 1,
        "setting": 2,
        "crash all": 1,
        "stop": 2,
        "expire": 1,
        "request": 2,
        "cancel": 1,
        "topic": 1,
        "source down": 1,
        "input": 1,
        "sinks": 1,
        "until decided": 3,
        "until call": 3,
        "resume": 3,
        "resolve one": 1,
        "slow": 1,
        "cut off": 1,
    },
    "savepoints": {
        "switch": 8,
        "crash": 5,
        "driver": 8,
        "fault": 4,
        "roll back": 2,
        "save": 6,
        "restore": 6,
        "old driver": 1,
        "time": 1,
        "abort orphans": 1,
        "resolve": 2,
        "recover": 1,
        "crash all": 1,
        "request": 3,
        "cancel": 1,
        "spoil": 2,
        "dispose": 1,
        "list savepoints": 1,
        "stop with savepoint": 2,
        "fail": 1,
        "cut off": 1,
        "until call": 1,
        "resume": 2,
    },
    "requests": {
        "switch": 8,
        "crash": 5,
        "driver": 6,
        "fault": 4,
        "request": 8,
        "cancel": 4,
        "interrupt": 3,
        "time": 4,
        "cut off": 3,
        "spoil": 2,
        "fail": 2,
        "stop": 2,
        "stop with savepoint": 3,
        "slow": 2,
        "down": 1,
        "list": 2,
        "resolve": 1,
        "restore": 1,
        "until call": 4,
        "resume": 4,
    },
    "memories": {
        "switch": 5,
        "crash": 5,
        "driver": 8,
        "fault": 3,
        "roll back": 2,
        "set back": 8,
        "abort orphans": 2,
        "abort one": 1,
        "resolve": 2,
        "recover": 1,
        "time": 1,
        "crash all": 2,
        "damage": 1,
        "until decided": 2,
    },
    "all": {
        "switch": 6,
        "crash": 5,
        "driver": 8,
        "fault": 3,
        "roll back": 2,
        "set back": 5,
        "save": 4,
        "restore": 4,
        "abort orphans": 2,
        "abort one": 1,
        "resolve": 2,
        "recover": 1,
        "time": 1,
        "crash all": 2,
        "speculate": 1,
        "down": 1,
        "setting": 1,
        "request": 1,
    },
}
"""How often each kind of event comes in a profile."""

TEMPLATES: dict[str, list[list[str]]] = {
    "plain": [
        [],
        ["driver", "switch", "switch"],
        ["crash", "driver", "driver", "switch"],
        ["roll back", "driver", "switch"],
        ["crash", "roll back", "driver", "driver", "switch", "switch"],
        ["fault", "driver", "switch"],
        ["crash", "roll back", "resolve", "driver", "switch"],
    ],
    "savepoints": [
        [],
        ["save", "driver", "restore", "driver", "switch"],
        ["save", "driver", "crash", "restore", "driver"],
        ["save", "driver", "restore", "crash", "restore", "driver"],
        ["save", "restore", "driver", "save", "restore"],
        ["save", "driver", "restore", "driver", "switch", "switch"],
        ["request", "driver", "restore", "driver"],
        ["save", "spoil", "restore", "driver"],
        ["save", "restore", "spoil", "restore"],
    ],
    "requests": [
        [],
        ["request", "crash", "driver"],
        ["request", "crash", "crash", "driver"],
        ["request", "crash", "time"],
        ["request", "interrupt", "switch"],
        ["request", "cut off"],
        ["cancel", "cut off", "driver"],
        ["request", "fail", "driver"],
        ["request", "driver", "switch", "switch"],
        ["driver", "stop with savepoint", "switch"],
        ["slow", "slow", "list"],
    ],
    "memories": [
        [],
        ["driver", "set back", "driver"],
        ["crash", "set back", "driver"],
        ["driver", "set back", "driver", "set back"],
        ["crash", "driver", "set back", "abort orphans", "driver"],
        ["driver", "crash", "set back", "resolve", "driver"],
    ],
    "all": [
        [],
        ["save", "driver", "restore", "driver", "set back", "driver"],
        ["save", "set back", "restore", "driver"],
        ["save", "restore", "driver", "crash", "set back", "driver"],
        ["save", "driver", "set back", "restore", "driver"],
        ["save", "restore", "driver", "save", "restore", "driver", "set back"],
    ],
}
"""Orders of events in which the order matters. What comes between them is drawn."""


def draw(seed: int) -> Scenario:
    """Draw the scenario of a seed."""
    chance = random.Random(seed)
    profile = chance.choices(list(PROFILES), [2, 2, 1, 3, 3])[0]
    weights = PROFILES[profile]
    # Each scenario leaves some kinds out, since a kind that comes often keeps others from happening.
    kinds = [kind for kind in weights if kind in ("driver", "crash") or chance.random() < 0.7]

    def event(kind: str, longest: int) -> Event:
        return chance.randint(0, longest), kind, chance.getrandbits(20)

    def any_events(count: int) -> list[Event]:
        chosen = chance.choices(kinds, [weights[kind] for kind in kinds], k=count)
        return [event(kind, chance.choice([3, 15, 40, 100])) for kind in chosen]

    template = chance.choice(TEMPLATES[profile])
    events = any_events(chance.randint(0, 2) if template else chance.randint(2, 14))
    for kind in template:
        if chance.random() < 0.9:
            events.append(event(kind, chance.choice([8, 25, 50])))
        if chance.random() < 0.3:
            events += any_events(1)
    if template:
        events += any_events(chance.randint(0, 3))
    settings = Settings(
        retained=chance.choice([2, 2, 3]),
        commit_timeout=chance.choice([0.5, 30.0]),
        tolerable=chance.choice([0, 0, 1]),
        replay=chance.choice(["recompute"] * 9 + ["spool"]),
        partitions=chance.choice([1, 1, 2, 2, 3]),
        pause=chance.choice([1.0, 3.0, 70.0] if profile == "requests" else [0.0, 0.0, 1.0, 70.0]),
    )
    return Scenario(
        seed=seed,
        kind=profile,
        units=chance.choice([3, 4, 5]),
        empty=chance.random() < 0.3,
        boundary=chance.choice([0, 0, 0, 1, 2, 3, 5]),
        adopt=chance.random() < 0.08,
        locks=chance.random() < 0.2,
        topics=chance.random() < 0.15,
        calls_again=chance.random() < 0.1,
        most_letters=chance.choice([1000] * 7 + [0]),
        one_pass=chance.random() < 0.6,
        sinks=tuple(_draw_sinks(chance, profile)),
        settings=settings,
        events=tuple(events),
    )


def _draw_sinks(chance: random.Random, profile: str) -> list[tuple[str, str, int]]:
    kind = chance.choice(["prepared", "prepared", "prepared", "whole", "kafka", "letters", "lake", "evolving"])
    if profile in ("plain", "savepoints") and chance.random() < 0.1:
        kind = "forgetful"
    if chance.random() < 0.5:
        second = chance.choice(["prepared", "prepared", "whole", "kafka", "lake"])
        return [("one", kind, 1), ("two", second, chance.choice([1, 2, 3]))]
    return [("one", kind, chance.choice([2, 3]) if chance.random() < 0.3 else 1)]
