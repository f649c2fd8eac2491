"""Each moment of some kinds of schedules, in the simulated world."""

from __future__ import annotations

import pytest

from tests.simulation import families
from tests.simulation.simulation import play

EVERY = 8
"""The short loop plays each so-manieth scenario of a family, and longer runs play all."""


@pytest.mark.parametrize("family", families.FAMILIES)
def test_each_moment(family: str, is_short: bool) -> None:
    for scenario in families.scenarios(family, every=EVERY if is_short else 1):
        assert play(scenario).faults == [], scenario.to_json()
