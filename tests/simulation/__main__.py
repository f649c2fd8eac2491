"""Play schedules against the real coordinator in a simulated world.

python -m tests.simulation seeds FIRST:END     draw and play the scenarios of these seeds
python -m tests.simulation families [NAME...]  play the families, or some of them
python -m tests.simulation play FILE|SEED      play one scenario, and print each call
python -m tests.simulation shrink FILE|SEED    find the smallest scenario that fails in the same way, as JSON
python -m tests.simulation soak                play new seeds in all processors, until it is interrupted
python -m tests.simulation power [NAME...]     put deliberate bugs into the code, and see which are found
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from tests.simulation import families
from tests.simulation.scenario import Scenario, draw
from tests.simulation.shrink import fails_alike, shrink, signature
from tests.simulation.simulation import play


def main(arguments: list[str] | None = None) -> int:
    """Return 0 if nothing is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("command", choices=["seeds", "families", "play", "shrink", "soak", "power"])
    parser.add_argument("what", nargs="*")
    parser.add_argument("--cpu", type=float, default=float("inf"), help="seconds of processor time, at most")
    parser.add_argument("--first", action="store_true", help="stop at the first fault")
    parser.add_argument("-j", type=int, default=1, help="so many processes at once")
    options = parser.parse_args(arguments)
    if options.command == "seeds":
        first, end = map(int, options.what[0].split(":"))
        return play_all(map(draw, range(first, end)), options.cpu, first_only=options.first)
    if options.command == "families":
        return play_all(families.scenarios(*options.what), options.cpu, first_only=options.first)
    if options.command == "play":
        return play_one(scenario_of(options.what[0]))
    if options.command == "shrink":
        return shrink_one(scenario_of(options.what[0]))
    if options.command == "soak":
        from tests.simulation.soak import soak

        return soak(options.j)
    from tests.simulation.power import power

    return power(options.what, options.cpu, options.j)


def scenario_of(text: str) -> Scenario:
    return draw(int(text)) if text.isdecimal() else Scenario.from_json(Path(text).read_text())


def play_all(scenarios: Iterable[Scenario], cpu: float, *, first_only: bool) -> int:
    began = time.process_time()
    faults, ends, limits = Counter[str](), Counter[str](), Counter[str]()
    count = ticks = 0
    for scenario in within(scenarios, cpu):
        result = play(scenario)
        count += 1
        ticks += result.ticks
        ends[type(result.refusal).__name__ if result.refusal else "each row once"] += 1
        limits.update(set(result.limits))
        if result.faults:
            kind = signature(result.faults)
            faults[kind] += 1
            if faults[kind] <= 2:
                print(f"{scenario.to_json()}\n  {result.faults[0][:1500]}", flush=True)
            if first_only:
                break
    spent = max(time.process_time() - began, 1e-9)
    print(f"{count} schedules, {ticks} calls, {spent:.1f} s of processor time: {count / spent:.0f} schedules/s")
    print(f"ends: {dict(ends.most_common())}; not promised: {dict(limits.most_common())}")
    for kind, number in faults.most_common():
        print(f"{number:6d} {kind}")
    return int(bool(faults))


def within(scenarios: Iterable[Scenario], cpu: float) -> Iterator[Scenario]:
    """Yield scenarios until so many seconds of processor time are spent."""
    end = time.process_time() + cpu
    return itertools.takewhile(lambda _: time.process_time() < end, scenarios)


def play_one(scenario: Scenario) -> int:
    result = play(scenario, trace=True)
    print("\n".join(result.trace))
    print(scenario.to_json())
    print("processes:", *result.ends, sep="\n  ")
    print(f"causes: {dict(result.causes)}; not promised: {result.limits}")
    print(f"judge: {result.why}; refusal: {result.refusal!r}")
    print("faults:", *result.faults or ["none"], sep="\n  ")
    return int(bool(result.faults))


def shrink_one(scenario: Scenario) -> int:
    result = play(scenario)
    if not result.faults:
        print("nothing is wrong with it")
        return 0
    smallest = shrink(scenario, fails_alike(signature(result.faults)))
    print(replace(smallest, kind=scenario.kind).to_json())
    print(play(smallest).faults[0])
    return 1


if __name__ == "__main__":
    sys.exit(main())
