"""`coordinator dead-letters`: rows that sinks have refused. Changes nothing."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from coordinator.cli.output import (
    JOB_FILE,
    UNTOLD,
    USAGE,
    AsJson,
    Job,
    fail,
    opened,
    say,
    show_json,
    show_table,
    time_of,
)
from coordinator.protocol.dead_letters import writers
from coordinator.statistics.history import load_history
from coordinator.statistics.model import Status

app = typer.Typer(help="Rows that sinks have refused.", no_args_is_help=True)
_SHOWN = ("sink", "checkpoint", "partition", "row_number", "time", "error_class", "error", "row")


@app.command("list")
def list_(job: Job = JOB_FILE, as_json: AsJson = False) -> None:
    """Of each checkpoint of the history and each sink, how many rows it has refused."""
    with opened(job) as coordinator:
        store = coordinator.protocol.store
        found = [
            (one.checkpoint_id, one.ended_at, sink, rows)
            for one in load_history(store)
            if one.status is Status.COMPLETED
            for sink, rows in one.dead_lettered.items()
        ]
    if as_json:
        keys = ("checkpoint", "ended_at", "sink", "dead_letters")
        checkpoints = [dict(zip(keys, one, strict=True)) for one in found]
        show_json({"job": store.job, "storage": store.storage.uri, "checkpoints": checkpoints})
    elif not found:
        say(f"The history of job {store.job!r} in {store.storage.uri} has no dead letters.")
    else:
        show_table(
            ["checkpoint", "ended", "sink", "dead letters"],
            [[checkpoint, time_of(ended_at), sink, f"{rows:,}"] for checkpoint, ended_at, sink, rows in found],
        )


@app.command()
def show(
    sink: Annotated[str, typer.Argument(help="The sink that refused rows; needed if several have dead letters.")] = "",
    last: Annotated[int, typer.Option("--last", "-n", min=1, help="So many letters are shown.")] = 20,
    job: Job = JOB_FILE,
    as_json: AsJson = False,
) -> None:
    """The newest dead letters, from the table that they are in. Exit code 4: their sink cannot tell them."""
    with opened(job) as coordinator:
        dead = {name: coordinator.sinks[letters] for letters, name in writers(coordinator.sinks).items()}
        if not sink and len(dead) == 1:
            [sink] = dead
        if sink not in dead:
            fail(f"name a sink with dead letters; there are {', '.join(dead) or 'none'}", USAGE)
        try:
            found = dead[sink].newest_letters(last)
        except Exception as error:
            fail(f"{dead[sink]!r} cannot be read: {error}")
    if found is None:
        fail(f"{dead[sink]!r} cannot tell its letters: read them there", UNTOLD)
    if as_json:
        show_json({"sink": sink, "dead_letters": [dict(one) for one in found]})
    else:
        show_table(list(_SHOWN), [[_text(one[name]) for name in _SHOWN] for one in found])


def _text(value: Any) -> Any:
    return value if isinstance(value, int) else str(value)
