"""`coordinator savepoint`, to take, look at, delete and restore savepoints."""

from __future__ import annotations

from typing import Annotated

import typer

from coordinator.cli.output import (
    JOB_FILE,
    USAGE,
    AsJson,
    Job,
    Yes,
    confirm,
    coordinator_of,
    fail,
    runnable,
    say_bad,
    show,
    store_of,
    tell,
)
from coordinator.coordinator import CheckpointCoordinator
from coordinator.operations.inspection.text import ago, duration
from coordinator.operations.requests import LONGEST, ask_driver
from coordinator.operations.savepoints.restore import restore_savepoint
from coordinator.operations.savepoints.savepoint import (
    Savepoint,
    describe_savepoint,
    dispose_savepoint,
    full_address,
    list_savepoints,
)
from coordinator.storage.uris import redacted
from sinks.options import seconds

app = typer.Typer(
    help="Take, list and restore savepoints: checkpoints that you own.", no_args_is_help=True
)

Address = Annotated[
    str,
    typer.Argument(metavar="SAVEPOINT", help="Its id in savepoint_dir, or its URI; see `list`."),
]


@app.command()
def trigger(
    stop: Annotated[bool, typer.Option("--stop", help="Stop the query at the savepoint.")] = False,
    cancel: Annotated[bool, typer.Option("--cancel", help="Stop the query for good.")] = False,
    location: Annotated[
        str | None,
        typer.Option(
            "--checkpoint-location",
            help="Spark's checkpointLocation, if no query runs. Claims a generation.",
        ),
    ] = None,
    timeout: Annotated[
        str, typer.Option(help="How long the request is valid. The driver first ends its batch.")
    ] = "10 min",
    yes: Yes = False,
    job: Job = JOB_FILE,
    as_json: AsJson = False,
) -> None:
    """Save the newest checkpoint.

    Asks the running driver, through checkpoint storage. For a stopped query pass
    --checkpoint-location.
    """
    if stop and cancel:
        fail("Say --stop or --cancel.", USAGE)
    if location and (stop or cancel):
        fail(
            "--checkpoint-location is for a query that is stopped: leave --stop and --cancel out.",
            USAGE,
        )
    how = "cancel" if cancel else "stop" if stop else "trigger"
    try:
        holds = seconds(timeout, "--timeout")
    except ValueError as error:
        fail(str(error), USAGE)
    if holds > LONGEST:
        fail(f"--timeout may be {duration(LONGEST)} at most.", USAGE)
    with coordinator_of(job) as coordinator:
        if location is None:
            try:
                about = ask_driver(store_of(coordinator), how, holds)
            except KeyboardInterrupt:
                fail(
                    "Interrupted. If the driver had begun, it goes on: see coordinator savepoint "
                    "list.",
                    130,
                )
        else:
            place = _savepoint_dir(coordinator)
            confirm(
                f"This settles job {coordinator.job!r} and claims a new generation: a driver that "
                "runs stops.",
                "fence",
                given=yes,
            )
            about = coordinator.trigger_savepoint(place, location).summary()
        show(about, as_json, facts={name: about[name] for name in ("id", "checkpoint", "uri")})
        command = f"coordinator savepoint restore {about['id']} NEW_LOCATION"
        tell(f"Restore it: {runnable(command)}", as_json)


@app.command("list")
def list_(job: Job = JOB_FILE, as_json: AsJson = False) -> None:
    """List the complete savepoints of the job, oldest first."""
    with coordinator_of(job, missing_storage=True) as coordinator:
        storage = _savepoint_dir(coordinator)
        bad: list[str] = []
        of_job = [
            savepoint
            for savepoint in list_savepoints(storage, bad)
            if savepoint.job == coordinator.job
        ]
        say_bad(bad)
        if not of_job:
            tell(
                f"There is no savepoint of job {coordinator.job!r} in {redacted(storage)}.", as_json
            )
        show(
            [savepoint.summary() for savepoint in of_job],
            as_json,
            self={
                "savepoint": "uri",
                "checkpoint": "checkpoint",
                "created": lambda row: ago(row["created_at"]),
                "files": "files",
                "bytes": lambda row: f"{row['bytes']:,}",
            },
        )


@app.command("show")
def show_(savepoint: Address, job: Job = JOB_FILE, as_json: AsJson = False) -> None:
    """Show what is in a savepoint."""
    with coordinator_of(job, missing_storage=True) as coordinator:
        about = describe_savepoint(
            full_address(savepoint, coordinator.config.savepoint_dir)
        ).summary()
        show(about, as_json, facts=about | {"spark": about["spark"].get("version")})


@app.command()
def dispose(savepoint: Address, yes: Yes = False, job: Job = JOB_FILE) -> None:
    """Delete a savepoint, also a damaged one."""
    with coordinator_of(job, missing_storage=True) as coordinator:
        address = full_address(savepoint, coordinator.config.savepoint_dir)
        shown = redacted(address)
        confirm(
            f"This deletes {shown}. Nothing can be restored from it any more.", "dispose", given=yes
        )
        if not dispose_savepoint(address):
            fail(f"There is no savepoint {shown}.")
        tell(f"Deleted {shown}.")


@app.command()
def restore(
    savepoint: Address,
    checkpoint_location: Annotated[
        str, typer.Argument(help="An empty folder or URI, the new checkpointLocation.")
    ],
    allow_non_restored: Annotated[
        bool,
        typer.Option(
            "--allow-non-restored", help="Allow that the job lacks sinks of the savepoint."
        ),
    ] = False,
    allow_later_checkpoints: Annotated[
        bool,
        typer.Option(
            "--allow-later-checkpoints",
            help="Allow that rows of later checkpoints are written again.",
        ),
    ] = False,
    yes: Yes = False,
    job: Job = JOB_FILE,
    as_json: AsJson = False,
) -> None:
    """Prepare the next start of the job, from a savepoint, in an empty checkpointLocation."""
    with coordinator_of(job, missing_storage=True) as coordinator:
        address = full_address(savepoint, coordinator.config.savepoint_dir)

        def ask(chosen: Savepoint) -> None:
            confirm(
                f"This begins a new lineage of job {coordinator.job!r} at checkpoint "
                f"{chosen.checkpoint_id}, saved {ago(chosen.created_at)}: a driver that runs stops "
                "with Superseded.",
                "restore",
                given=yes,
            )

        restored = restore_savepoint(
            address,
            checkpoint_location,
            storage=coordinator.storage,
            job=coordinator.job,
            sinks=list(coordinator.sinks),
            allow_non_restored=allow_non_restored,
            allow_later_checkpoints=allow_later_checkpoints,
            confirm=ask,
        )
        lineage = store_of(coordinator).newest_claim().lineage
        about = restored.summary() | {
            "lineage": lineage,
            "checkpoint_location": checkpoint_location,
        }
        show(
            about,
            as_json,
            facts={
                name: about[name] for name in ("id", "checkpoint", "lineage", "checkpoint_location")
            },
        )
        tell(
            f"Start the query with option('checkpointLocation', {checkpoint_location!r}).", as_json
        )


def _savepoint_dir(coordinator: CheckpointCoordinator) -> str:
    place = coordinator.config.savepoint_dir
    if not place:
        fail("Set savepoint_dir in the section [checkpointing] of the job file.", USAGE)
    return place
