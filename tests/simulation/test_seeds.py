"""New schedules for each commit, drawn at random, in the simulated world."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import pytest

from tests.simulation.scenario import draw
from tests.simulation.simulation import play

ROOT = Path(__file__).parents[2]
PARTS = 4
COUNT = 250
SHORT_COUNT = 120
"""The number of schedules in each part. A number and not a time, so that a commit has the same ones on each machine."""


def first_seed() -> int:
    """Return where the seeds begin: elsewhere for each commit, and at the same place for the same one."""
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return int(hashlib.sha256(done.stdout.encode()).hexdigest()[:10], 16)


@pytest.mark.parametrize("part", range(PARTS))
def test_new_seeds(part: int, is_short: bool) -> None:
    first = first_seed() + part
    count = SHORT_COUNT if is_short else COUNT
    for seed in range(first, first + count * PARTS, PARTS):
        assert play(draw(seed)).faults == [], f"python -m tests.simulation shrink {seed}"
