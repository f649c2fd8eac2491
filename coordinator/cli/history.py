"""`coordinator history`: what the last checkpoints took and did. Asks checkpoint storage only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.text import Text

from coordinator.cli.output import JOB_FILE, AsJson, Job, by_sink, duration, opened, say, show_json, show_table, time_of
from coordinator.statistics.history import load_history
from coordinator.statistics.model import PHASES, CheckpointStatistics, Status
from coordinator.statistics.summary import remarks, summarized

_STYLES = {Status.FAILED: "red", Status.HALTED: "bold red", Status.RESTORED: "yellow"}


def history(
    job: Job = JOB_FILE,
    last: Annotated[int, typer.Option("--last", "-n", min=1, help="So many checkpoints are shown.")] = 20,
    summary: Annotated[bool, typer.Option("--summary", help="How long they took, in percentiles.")] = False,
    as_json: AsJson = False,
) -> None:
    """The last checkpoints: how each ended, how long its phases took, what it wrote. Those of a driver that was killed
    are missing since its last sign of life."""
    with opened(job) as coordinator:
        store = coordinator.protocol.store
        found = load_history(store)[-last:]
    if as_json:
        about = {"job": store.job, "storage": store.storage.uri, "summary": summarized(found)}
        show_json(about | {"checkpoints": [one.to_json() for one in found]})
    elif not found:
        say(f"No statistics of job {store.job!r} are in {store.storage.uri}: history_size is 0, or no checkpoint yet.")
    elif summary:
        _show_summary(found)
    else:
        _show(found)


def _show(found: Sequence[CheckpointStatistics]) -> None:
    show_table(
        ["checkpoint", "status", "ended", "took", *PHASES, "rows", "transactions", "generation", "remarks"],
        [
            [
                one.checkpoint_id,
                Text(one.status.value, _STYLES.get(one.status, "")),
                time_of(one.ended_at),
                duration(one.duration),
                *(f"{one.phases[phase]:.3f}" if phase in one.phases else "" for phase in PHASES),
                by_sink(one.rows),
                sum(one.transactions.values()),
                one.generation,
                remarks(one),
            ]
            for one in found
        ],
    )


def _show_summary(found: Sequence[CheckpointStatistics]) -> None:
    about = summarized(found)
    counts = ", ".join(f"{count} {status}" for status, count in about["status"].items())
    say(f"The last {len(found)}: {counts}.")
    columns = ["min", "mean", "p50", "p90", "p99", "max"]
    show_table(
        ["completed, seconds", *columns],
        [[name, *(f"{about[name][each]:.3f}" for each in columns)] for name in ("took", *PHASES) if about[name]],
    )
