"""Look for a fault in the code as it is, in the seeds and families or at random.

python -m tests.simulation.search seeds-and-families|random SECONDS
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.simulation import families
from tests.simulation.scenario import Scenario, draw
from tests.simulation.simulation import play

SEEDS = Path(__file__).with_name("seeds")


def known() -> Iterator[Scenario]:
    """Yield the scenarios that once showed a fault."""
    for path in sorted(SEEDS.glob("*.json")):
        yield Scenario.from_json(path.read_text())


def in_turns(every: int = 25) -> Iterator[Scenario]:
    """Yield the families' scenarios, each so-manieth of all of them first, so that a short search sees each family."""
    for first in range(every):
        for name in families.FAMILIES:
            yield from itertools.islice(families.scenarios(name), first, None, every)


def main() -> int:
    what, seconds = sys.argv[1], float(sys.argv[2])
    scenarios = itertools.chain(known(), in_turns()) if what != "random" else map(draw, itertools.count(1_000_000))
    began = time.process_time()
    for number, scenario in enumerate(scenarios, 1):
        result = play(scenario)
        spent = time.process_time() - began
        if result.faults:
            print(f"FOUND after {spent:.1f} s, {number} schedules, {scenario.kind}: {result.faults[0][:300]!r}")
            return 1
        if spent > seconds:
            break
    print(f"nothing found in {spent:.1f} s, {number} schedules")
    return 0


if __name__ == "__main__":
    sys.exit(main())
