"""`coordinator dead-letters`: rows that sinks have refused."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

import typer

from coordinator.cli.output import (
    JOB_FILE,
    UNKNOWN,
    USAGE,
    AsJson,
    Columns,
    Job,
    fail,
    opened,
    say,
    say_bad,
    show,
    time_of,
)
from coordinator.errors import CheckpointError
from coordinator.protocol.dead_letters import writers
from coordinator.statistics.history import load_history
from coordinator.statistics.model import Status
from coordinator.storage import StorageError
from sinks.optional import DeadLettering

app = typer.Typer(help="Show rows that sinks have refused.", no_args_is_help=True)
_ID = ("lineage", "checkpoint", "partition", "row_number")
_SHOWN = ("time", "error_class", "error", "row")
_SINK = "The sink that refused rows; needed if several have dead letters."


@app.command("list")
def list_(job: Job = JOB_FILE, as_json: AsJson = False) -> None:
    """Count the refused rows of each checkpoint in the history, by sink."""
    with opened(job) as coordinator:
        store, bad = coordinator.protocol.store, list[str]()
        found = [
            {"checkpoint": one.checkpoint_id, "ended_at": one.ended_at, "sink": sink, "dead_letters": rows}
            for one in load_history(store, bad)
            if one.status is Status.COMPLETED
            for sink, rows in one.dead_lettered.items()
        ]
    say_bad(bad)
    if not found and not as_json:
        say(f"The history of job {store.job!r} in {store.storage.uri} has no dead letters.")
    show(
        {"job": store.job, "storage": store.storage.uri, "checkpoints": found},
        as_json,
        checkpoints={
            "checkpoint": "checkpoint",
            "ended": lambda one: time_of(one["ended_at"]),
            "sink": "sink",
            "dead letters": lambda one: f"{one['dead_letters']:,}",
        },
    )


@app.command("show")
def show_(
    sink: Annotated[str, typer.Argument(help=_SINK)] = "",
    last: Annotated[int, typer.Option("--last", "-n", min=1, help="How many letters to show.")] = 20,
    job: Job = JOB_FILE,
    as_json: AsJson = False,
) -> None:
    """Show the newest dead letters of a table or topic. Exit code 4: their sink cannot read them."""
    with opened(job) as coordinator:
        dead = {name: coordinator.sinks[one] for one, name in writers(coordinator.sinks).items()}
        if not sink and len(dead) == 1:
            [sink] = dead
        if sink not in dead:
            fail(f"name a sink with dead letters; there are {', '.join(dead) or 'none'}", USAGE)
        try:
            holder = dead[sink]
            found = holder.read_dead_letters(coordinator.job, sink, last) if isinstance(holder, DeadLettering) else None
        except (CheckpointError, StorageError):
            raise
        except Exception as error:
            fail(f"{dead[sink]!r} cannot be read: {error}")
        if found is None:
            fail(f"{dead[sink]!r} cannot tell its letters: read them there", UNKNOWN)
    of_sink = [one for one in found.rows if (one["job"], one["sink"]) == (coordinator.job, sink)]  # by any collation
    letters = [{"letter": _id(one), **one} for one in of_sink]
    letters.sort(key=lambda one: (one["time"], *(one[name] for name in _ID)), reverse=True)
    columns: Columns = {name: partial(_text, name) for name in ("letter", *_SHOWN)}
    show({"sink": sink, "dead_letters": letters[:last]}, as_json, dead_letters=columns)
    for gap in found.gaps:
        say(f"There may be more, or may have been: {gap}.")


def _id(letter: Mapping[str, Any]) -> str:
    return ".".join(str(letter[name]) for name in _ID)


def _text(name: str, letter: Mapping[str, Any]) -> Any:
    return letter[name] if isinstance(letter[name], int) else str(letter[name])
