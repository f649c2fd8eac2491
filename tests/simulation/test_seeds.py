"""New schedules for each commit, drawn at random, in the simulated world."""

from __future__ import annotations

import hashlib
import itertools
import subprocess
import time
from pathlib import Path

import pytest

from tests.simulation.scenario import draw
from tests.simulation.simulation import play

ROOT = Path(__file__).parents[2]
PARTS = 4
SECONDS = 60.0
SHORT_SECONDS = 5.0
"""Processor time of each part."""


def first_seed() -> int:
    """Return where the seeds begin: elsewhere for each commit, and at the same place for the same one."""
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return int(hashlib.sha256(done.stdout.encode()).hexdigest()[:10], 16)


@pytest.mark.parametrize("part", range(PARTS))
def test_new_seeds(part: int, is_short: bool) -> None:
    end = time.process_time() + (SHORT_SECONDS if is_short else SECONDS)
    for seed in itertools.count(first_seed() + part, PARTS):
        assert play(draw(seed)).faults == [], f"python -m tests.simulation shrink {seed}"
        if time.process_time() > end:
            break
