"""The simulator itself: schedules that once failed, the same trace each time, a fault that is found and made small."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.simulation.scenario import Scenario, draw
from tests.simulation.search import SEEDS
from tests.simulation.shrink import fails_alike, shrink, signature
from tests.simulation.simulation import play

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("path", sorted(SEEDS.glob("*.json")), ids=lambda path: path.stem)
def test_what_once_failed(path: Path) -> None:
    """A scenario whose name begins with "limit" shows what is not promised, and that the judge knows it."""
    result = play(Scenario.from_json(path.read_text()))
    assert result.faults == []
    if path.stem.startswith("limit"):
        assert result.limits


def test_a_scenario_gives_the_same_trace_in_two_processes() -> None:
    """Whatever order sets have there."""
    code = (
        "import hashlib\n"
        "from tests.simulation.scenario import draw\n"
        "from tests.simulation.simulation import play\n"
        "for seed in range(100):\n"
        "    print(hashlib.sha256('\\n'.join(play(draw(seed), trace=True).trace).encode()).hexdigest())\n"
    )
    traces = [
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert len(set(traces[0].splitlines())) > 90
    assert traces[0] == traces[1]


def of_one_database(seed: int) -> Scenario:
    """Return the scenario of a seed with two tables whose checkpoints become visible in one step."""
    return replace(draw(seed), sinks=(("one", "whole", 1), ("two", "whole", 1 + seed % 3)))


def test_two_tables_of_one_database() -> None:
    for seed in range(60):
        assert play(of_one_database(seed)).faults == [], seed


def test_tables_of_one_database_that_commit_apart_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a deliberate bug: each sink is asked by itself, whatever place it names."""
    monkeypatch.setattr("coordinator.protocol.protocol.places", lambda sinks: {name: name for name in sinks})
    faults = itertools.chain.from_iterable(play(of_one_database(seed)).faults for seed in itertools.count())
    assert any(fault.startswith("apart: ") for fault in faults)


def test_a_fault_is_found_and_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a deliberate bug: a driver commits what it has read, whoever is the newest by then (R14)."""
    monkeypatch.setattr("coordinator.protocol.fence.Fence.require_newest", lambda self, what, listing=None: None)
    found = (scenario for seed in itertools.count() if play(scenario := draw(seed)).faults)
    scenario = next(found)
    kind = signature(play(scenario).faults)
    smallest = shrink(scenario, fails_alike(kind))
    assert signature(play(smallest).faults) == kind
    assert len(smallest.events) <= min(4, len(scenario.events))
    assert Scenario.from_json(smallest.to_json()) == smallest
