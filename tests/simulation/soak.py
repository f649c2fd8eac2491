"""Plays new seeds without end. A schedule that fails is made smaller, and written into a file."""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import os
import secrets
import time
from dataclasses import replace
from pathlib import Path

from tests.simulation.scenario import draw
from tests.simulation.shrink import fails_alike, shrink, signature
from tests.simulation.simulation import play

logger = logging.getLogger("tests.simulation")

FAILURES = Path(".cache/simulation")
REPORT = 60.0
"""Seconds between two lines on the progress of a process."""


def soak(processes: int) -> int:
    """Play in so many processes until Ctrl-C. Returns 1 if anything was found."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    FAILURES.mkdir(parents=True, exist_ok=True)
    before = set(FAILURES.glob("*.json"))
    first = secrets.randbits(40)
    logger.info("seeds from %d on; what fails goes to %s", first, FAILURES)
    workers = [multiprocessing.Process(target=_work, args=(first + number, processes)) for number in range(processes)]
    for worker in workers:
        worker.start()
    try:
        for worker in workers:
            worker.join()
    except KeyboardInterrupt:
        for worker in workers:
            worker.terminate()
    found = set(FAILURES.glob("*.json")) - before
    logger.info("%d kinds of faults", len(found))
    return int(bool(found))


def _work(first: int, step: int) -> None:
    reported = time.monotonic()
    for count, seed in enumerate(itertools.count(first, step), 1):
        scenario = draw(seed)
        result = play(scenario)
        if result.faults:
            _keep(seed, signature(result.faults))
        if time.monotonic() - reported > REPORT:
            reported = time.monotonic()
            logger.info("process %d: %d schedules", os.getpid(), count)


def _keep(seed: int, kind: str) -> None:
    """Write the smallest schedule with this kind of fault, unless there is one already."""
    file = FAILURES / f"{abs(hash(kind)):x}.json"
    if file.exists():
        return
    scenario = shrink(draw(seed), fails_alike(kind))
    file.write_text(replace(scenario, kind=kind).to_json() + "\n")
    logger.error("seed %d: %s (%s)", seed, kind, file)
