"""`coordinator dead-letters`: rows that sinks have refused."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from coordinator.cli.output import JOB_FILE, UNKNOWN, USAGE, AsJson, Columns, Job, coordinator_of, fail, say, show
from coordinator.errors import CheckpointError
from coordinator.protocol.dead_letters import writers
from coordinator.storage import StorageError
from sinks.optional import DeadLettering

app = typer.Typer(
    help="Show rows that sinks have refused; `coordinator history` counts them.",
    no_args_is_help=True,
    callback=lambda: None,
)
_ID = ("lineage", "checkpoint", "partition", "row_number")
_COLUMNS: Columns = {name: name for name in ("letter", "time", "error_class", "error", "row")}


@app.command("show")
def show_(
    sink: Annotated[str, typer.Argument(help="The sink that refused rows; needed if several have dead letters.")] = "",
    last: Annotated[int, typer.Option("--last", "-n", min=1, help="How many letters to show.")] = 20,
    job: Job = JOB_FILE,
    as_json: AsJson = False,
) -> None:
    """Show the newest dead letters of a table or topic. Exit code 4: their sink cannot read them."""
    with coordinator_of(job) as coordinator:
        dead = {name: coordinator.sinks[writer] for writer, name in writers(coordinator.sinks).items()}
        if not sink and len(dead) == 1:
            [sink] = dead
        if sink not in dead:
            fail(f"name a sink with dead letters; there are {', '.join(dead) or 'none'}", USAGE)
        writer = dead[sink]
        try:
            answer = (
                writer.read_dead_letters(coordinator.job, sink, last) if isinstance(writer, DeadLettering) else None
            )
        except (CheckpointError, StorageError):
            raise
        except Exception as error:
            fail(f"{writer!r} cannot be read: {error}")
        if answer is None:
            fail(f"{writer!r} cannot read its dead letters: look there", UNKNOWN)
    letters: list[dict[str, Any]] = [
        {"letter": ".".join(str(letter[name]) for name in _ID), **letter}
        for letter in answer.rows
        if (letter["job"], letter["sink"]) == (coordinator.job, sink)  # by any collation
    ]
    letters.sort(key=lambda letter: (letter["time"], *(letter[name] for name in _ID)), reverse=True)
    show({"sink": sink, "dead_letters": letters[:last]}, as_json, dead_letters=_COLUMNS)
    for gap in answer.gaps:
        say(f"There may be more, or may have been: {gap}.")
