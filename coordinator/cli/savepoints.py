"""`coordinator savepoint`: take, look at, delete and restore savepoints."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Annotated, Any

import typer

from coordinator.cli.output import (
    JOB_FILE,
    AsJson,
    Job,
    Yes,
    confirm,
    fail,
    opened,
    say,
    show_json,
    show_table,
    time_of,
)
from coordinator.coordinator import CheckpointCoordinator
from coordinator.savepoints import (
    Savepoint,
    describe_savepoint,
    dispose_savepoint,
    list_savepoints,
    restore_savepoint,
)

app = typer.Typer(help="Checkpoints that you own, and restart from.", no_args_is_help=True)

Target = Annotated[str, typer.Argument(metavar="STORAGE", help="The storage of savepoints, as for checkpoints.")]
Address = Annotated[str, typer.Argument(metavar="SAVEPOINT", help="Its URI, as `trigger` and `list` tell it.")]
_TIMEOUT = 3600.0


@app.command()
def trigger(
    target: Target,
    stop: Annotated[bool, typer.Option("--stop", help="Stop the query there.")] = False,
    cancel: Annotated[bool, typer.Option("--cancel", help="Stop it for good.")] = False,
    location: Annotated[
        str | None,
        typer.Option("--checkpoint-location", help="No query runs: Spark's checkpointLocation. Claims a generation."),
    ] = None,
    yes: Yes = False,
    job: Job = JOB_FILE,
    as_json: AsJson = False,
) -> None:
    """Take one of the newest checkpoint: by asking the driver that runs (`CheckpointCoordinator.serve_http`), or of a
    stopped query with --checkpoint-location."""
    with opened(job) as coordinator:
        if location is None:
            about = _ask_driver(coordinator, {"target": target, "stop": stop, "cancel": cancel})
        else:
            confirm(
                f"This settles job {coordinator.job!r} and claims a new generation: a driver that runs stops.",
                "fence",
                given=yes,
            )
            about = coordinator.trigger_savepoint(target, location).summary()
        _show(about, as_json)


@app.command("list")
def list_(target: Target, job: Job = JOB_FILE, as_json: AsJson = False) -> None:
    """The whole savepoints in a storage, of the job, oldest first."""
    with opened(job) as coordinator:
        found = [one.summary() for one in list_savepoints(target) if one.job == coordinator.job]
        if as_json:
            show_json(found)
            return
        show_table(
            ["savepoint", "checkpoint", "created", "files", "bytes"],
            [
                [one["uri"], one["checkpoint"], time_of(one["created_at"]), one["files"], f"{one['bytes']:,}"]
                for one in found
            ],
        )


@app.command()
def show(savepoint: Address, job: Job = JOB_FILE, as_json: AsJson = False) -> None:
    """What a savepoint holds."""
    with opened(job):
        _show(describe_savepoint(savepoint).summary(), as_json)


@app.command()
def dispose(savepoint: Address, yes: Yes = False, job: Job = JOB_FILE) -> None:
    """Delete a savepoint, also a damaged one."""
    with opened(job):
        confirm(f"This deletes {savepoint}. Nothing can be restored from it any more.", "dispose", given=yes)
        dispose_savepoint(savepoint)
        say(f"Deleted {savepoint}.")


@app.command()
def restore(
    savepoint: Address,
    checkpoint_location: Annotated[str, typer.Argument(help="An empty place for Spark's checkpointLocation.")],
    allow_non_restored: Annotated[
        bool, typer.Option("--allow-non-restored", help="Sinks of the savepoint may be missing in the job.")
    ] = False,
    allow_later_checkpoints: Annotated[
        bool, typer.Option("--allow-later-checkpoints", help="Rows of later checkpoints may be written again.")
    ] = False,
    yes: Yes = False,
    job: Job = JOB_FILE,
    as_json: AsJson = False,
) -> None:
    """Prepare the job's next start: from the savepoint, in a new checkpointLocation and lineage."""
    with opened(job) as coordinator:
        confirm(
            f"This begins a new lineage of job {coordinator.job!r}: a driver that runs stops with Superseded.",
            "restore",
            given=yes,
        )
        restored: Savepoint = restore_savepoint(
            savepoint,
            checkpoint_location,
            storage=coordinator.protocol.store.storage,
            job=coordinator.job,
            sinks=list(coordinator.sinks),
            allow_non_restored=allow_non_restored,
            allow_later_checkpoints=allow_later_checkpoints,
        )
        _show(restored.summary(), as_json)
        say(f"Start the query with option('checkpointLocation', {checkpoint_location!r}).")


def _ask_driver(coordinator: CheckpointCoordinator, body: dict[str, Any]) -> dict[str, Any]:
    address = coordinator.protocol.store.newest_claim().address
    if not address:
        fail(
            f"No driver of job {coordinator.job!r} answers over HTTP: call coordinator.serve_http() before its query "
            "starts; or, if no query runs, say --checkpoint-location."
        )
    request = urllib.request.Request(
        f"{address}/savepoints", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=_TIMEOUT) as answer:
            about: dict[str, Any] = json.load(answer)
            return about
    except urllib.error.HTTPError as error:
        fail(f"The driver at {address} refused: {json.load(error)['error']}")
    except OSError as error:
        fail(f"The newest driver was at {address}, and does not answer there ({error}). Does it run, on this machine?")


def _show(about: dict[str, Any], as_json: bool) -> None:
    if as_json:
        show_json(about)
    else:
        show_table(["", ""], list(about.items()))
