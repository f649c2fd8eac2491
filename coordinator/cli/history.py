"""`coordinator history`: what the last checkpoints took and did. Asks checkpoint storage only."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import typer
from rich.text import Text

from coordinator.cli.output import JOB_FILE, AsJson, Job, coordinator_of, say, say_bad, show
from coordinator.operate.text import by_sink, duration, time_of
from coordinator.statistics.history import load_history
from coordinator.statistics.model import PHASES, Status, summarized

_STYLES = {Status.FAILED.value: "red", Status.HALTED.value: "bold red", Status.RESTORED.value: "yellow"}


def history(
    job: Job = JOB_FILE,
    last: Annotated[int, typer.Option("--last", "-n", min=1, help="How many to show.")] = 20,
    as_json: AsJson = False,
) -> None:
    """Show the last checkpoints: how each ended, how long its phases took, what it wrote, how many rows were refused.
    The last seconds of a killed driver are missing."""
    bad: list[str] = []
    with coordinator_of(job) as coordinator:
        store = coordinator.protocol.store
        tries = load_history(store, bad)[-last:]
    say_bad(bad)
    if not tries:
        say(f"No statistics of job {store.job!r} are in {store.storage.uri}: history_size is 0, or no checkpoint yet.")
    about: dict[str, Any] = {"job": store.job, "storage": store.storage.uri, "summary": summarized(tries)}
    about["checkpoints"] = [each.to_json() | {"remarks": each.remarks} for each in tries]
    show(
        about,
        as_json,
        checkpoints={
            "checkpoint": "checkpoint_id",
            "status": lambda each: Text(each["status"], _STYLES.get(each["status"], "")),
            "ended": lambda each: time_of(each["ended_at"]),
            "took": lambda each: duration(each["duration"]),
            **{phase: partial(_seconds, phase) for phase in PHASES},
            "rows": lambda each: by_sink(each["rows"]),
            "transactions": lambda each: sum(each["transactions"].values()),
            "generation": "generation",
            "remarks": "remarks",
        },
    )


def _seconds(phase: str, each: dict[str, Any]) -> str:
    return f"{each['phases'][phase]:.3f}" if phase in each["phases"] else ""
