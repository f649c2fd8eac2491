"""The application of Typer that has all commands."""

from __future__ import annotations

from typing import Annotated

import typer

from coordinator import __version__
from coordinator.cli import doctor, explain, in_doubt, new_sink, savepoints, status, targets, ui

app = typer.Typer(
    name="coordinator",
    help="See and settle the checkpoints of an exactly-once Spark job.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # they show raw values, and locals, which hold passwords
    epilog="Exit codes: 0 nothing wrong; 1 a finding or a failure; 2 wrong usage or job file; "
    "3 not confirmed, so not done; 4 the sink cannot tell.",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pyspark-exactly-once {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    pass


app.add_typer(status.checkpoints, name="checkpoints")
app.add_typer(in_doubt.app, name="in-doubt")
app.add_typer(savepoints.app, name="savepoint")
app.add_typer(targets.schema, name="schema")
app.add_typer(targets.dead_letters, name="dead-letters")
app.command()(status.status)
app.command()(status.history)
app.command()(ui.ui)
app.command()(targets.verify)
app.command()(doctor.doctor)
app.command()(explain.explain)
app.command()(in_doubt.resolve)
app.command()(new_sink.new_sink)
