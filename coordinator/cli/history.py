"""`coordinator history`: what the last checkpoints took and did. Asks checkpoint storage only."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import typer
from rich.text import Text

from coordinator.cli.output import JOB_FILE, AsJson, Job, Last, by_sink, duration, opened, say, say_bad, show, time_of
from coordinator.statistics.history import load_history
from coordinator.statistics.model import PHASES, Status
from coordinator.statistics.summary import remarks, summarized

_STYLES = {Status.FAILED.value: "red", Status.HALTED.value: "bold red", Status.RESTORED.value: "yellow"}


def history(
    job: Job = JOB_FILE,
    last: Last = 20,
    summary: Annotated[
        bool, typer.Option("--summary", help="Show durations as minimum, mean, percentiles and maximum.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the last checkpoints: how each ended, how long its phases took, what it wrote. The last seconds of a killed
    driver are missing."""
    bad: list[str] = []
    with opened(job) as coordinator:
        store = coordinator.protocol.store
        found = load_history(store, bad)[-last:]
    say_bad(bad)
    spreads = summarized(found)
    about: dict[str, Any] = {"job": store.job, "storage": store.storage.uri, "summary": spreads}
    about["checkpoints"] = [one.to_json() | {"remarks": remarks(one)} for one in found]
    if not found and not as_json:
        say(f"No statistics of job {store.job!r} are in {store.storage.uri}: history_size is 0, or no checkpoint yet.")
    elif summary and not as_json:
        counts = ", ".join(f"{count} {status}" for status, count in spreads["status"].items())
        say(f"The last {len(found)}: {counts}.")
        rows = [{"name": name} | spreads[name] for name in ("took", *PHASES) if spreads[name]]
        ends = {name: partial(_seconds, name) for name in ("min", "mean", "p50", "p90", "p99", "max")}
        show(rows, as_json, self={"completed, seconds": "name", **ends})
    else:
        phases = {phase: partial(_phase, phase) for phase in PHASES}
        show(
            about,
            as_json,
            checkpoints={
                "checkpoint": "checkpoint_id",
                "status": lambda one: Text(one["status"], _STYLES.get(one["status"], "")),
                "ended": lambda one: time_of(one["ended_at"]),
                "took": lambda one: duration(one["duration"]),
                **phases,
                "rows": lambda one: by_sink(one["rows"]),
                "transactions": lambda one: sum(one["transactions"].values()),
                "generation": "generation",
                "remarks": "remarks",
            },
        )


def _phase(name: str, one: dict[str, Any]) -> str:
    return _seconds(name, one["phases"])


def _seconds(name: str, of: dict[str, Any]) -> str:
    return f"{of[name]:.3f}" if name in of else ""
