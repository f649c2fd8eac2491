"""`coordinator status`, `history` and `checkpoints show`: what checkpoint storage holds of a job.

These commands only read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any

import typer
from rich.text import Text

from coordinator.cli.output import (
    FINDING,
    JOB_FILE,
    AsJson,
    Columns,
    Job,
    coordinator_of,
    fail,
    say_bad,
    show,
    store_of,
    tell,
)
from coordinator.errors import CorruptRecord
from coordinator.operations.heartbeat import DriverStatus, look_for_driver
from coordinator.operations.inspection.text import (
    ago,
    by_sink,
    duration,
    of_driver,
    of_newest,
    time_of,
)
from coordinator.operations.statistics.model import (
    PHASES,
    Activity,
    Status,
    load_history,
    summarized,
)
from coordinator.store.job_store import jobs_in
from coordinator.store.records import CompletedCheckpoint, Record
from sinks._util.machine import machine
from sinks.transaction import shown

checkpoints = typer.Typer(
    help="Show a complete checkpoint; `coordinator history` lists them.",
    no_args_is_help=True,
    callback=lambda: None,
)
_STYLES = {
    Status.FAILED.value: "red",
    Status.HALTED.value: "bold red",
    Status.RESTORED.value: "yellow",
}


def status(job: Job = JOB_FILE, as_json: AsJson = False) -> None:
    """Show whether a driver runs, why the last one ended, how old the newest checkpoint is, and
    everything that was given up with `resolve --accept-loss` since the job began. Exit code 1 if no
    driver runs."""
    with coordinator_of(job) as coordinator:
        store = store_of(coordinator)
        bad: list[str] = []
        newest = None
        unreadable = ""
        try:
            newest = store.load_newest()
        except CorruptRecord as error:
            bad.append(str(error))
            unreadable = "Newest checkpoint: it cannot be read."
        driver = look_for_driver(store, bad, newest)
        losses = losses_of(store.losses(bad))
        others = [] if driver else jobs_in(store.storage)
    say_bad(bad)
    sentences = [f"Job {store.job!r} in {store.storage.uri}", of_driver(driver, others)]
    activity = Activity.of(driver, newest).sentences
    sentences += [*activity, unreadable or of_newest(newest)]
    if losses:
        rows = sum(loss["rows"] for loss in losses)
        sentences.append(f"Given up by operators: {len(losses)} participant(s), {rows:,} row(s).")
    tell("\n".join(sentences), as_json)
    about = {"job": store.job, "storage": store.storage.uri} | state_of(driver, newest)
    show(about | {"activity": activity, "losses": losses, "errors": bad}, as_json, losses=LOSSES)
    if unreadable or driver is None or not driver.runs:
        raise typer.Exit(FINDING)


def history(
    job: Job = JOB_FILE,
    last: Annotated[int, typer.Option("--last", "-n", min=1, help="How many to show.")] = 20,
    as_json: AsJson = False,
) -> None:
    """Show the last checkpoints: how each ended, how long its phases took, what it wrote, how many
    rows were refused. The last seconds of a killed driver are missing."""
    bad: list[str] = []
    with coordinator_of(job) as coordinator:
        store = store_of(coordinator)
        tries = load_history(store, bad)[-last:]
    say_bad(bad)
    if not tries:
        there = f"No statistics of job {store.job!r} are in {store.storage.uri}"
        tell(
            f"{there}: history_size is 0, no checkpoint yet, or its driver was killed within "
            "seconds.",
            as_json,
        )
    about: dict[str, Any] = {
        "job": store.job,
        "storage": store.storage.uri,
        "summary": summarized(tries),
    }
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


@checkpoints.command("show")
def show_(
    checkpoint: Annotated[
        int | None, typer.Argument(help="Its number; the newest if left out.")
    ] = None,
    job: Job = JOB_FILE,
    as_json: AsJson = False,
) -> None:
    """Show one checkpoint: input, participants, transactions, replay rounds."""
    with coordinator_of(job) as coordinator:
        store = store_of(coordinator)
        complete = store.load_newest() if checkpoint is None else store.find(checkpoint)
        if complete is None:
            keys = store.record_keys()
            there = (
                f"there are {keys[0].checkpoint_id} to {keys[-1].checkpoint_id}"
                if keys
                else "there is none"
            )
            which = "complete checkpoint" if checkpoint is None else f"checkpoint {checkpoint}"
            fail(f"Job {coordinator.job!r} has no {which} in {store.storage.uri}; {there}.")
        about = complete.record.to_json() | {
            "checkpoint": complete.checkpoint_id,
            "committables": [
                committable.to_json() | {"round": record.round}
                for record in complete.rounds
                for committable in record.committables
            ],
            "accepted": losses_of(complete.rounds),
        }
        show(about, as_json, facts=_facts(complete.record), **_TABLES)
        for replay in complete.rounds[1:]:
            counts = {"written again": len(replay.committables), "given up": len(replay.accepted)}
            what = ", ".join(f"{count} {how}" for how, count in counts.items() if count)
            tell(f"Round {replay.round}, by generation {replay.generation}: {what}.", as_json)


def _facts(record: Record) -> dict[str, str]:
    facts = {
        "checkpoint": (
            f"{record.checkpoint_id}, lineage {record.lineage}, generation {record.generation}"
        ),
        "restored from": record.restored_from,
        "triggered": ago(record.triggered_at),
        "complete": ago(record.completed_at),
        "mode": record.mode.replace("_", " "),
        "guarantee": record.guarantee,
        "batch rows": "" if record.batch_rows is None else f"{record.batch_rows:,}",
        "rows": by_sink(record.rows),
        "refused rows": by_sink(record.dead_lettered) if record.dead_letters else "",
        "partitions": by_sink(record.partitions),
        "offsets": ", ".join(record.offsets),
        "Spark's query": record.query_id,
    }
    return {title: text for title, text in facts.items() if text}


LOSSES: Columns = {
    "given up at": "at",
    **{name: name for name in ("checkpoint", "sink", "subtask", "rows", "outcome", "who", "why")},
    "offsets": lambda loss: ", ".join(loss["offsets"]),
}


def losses_of(records: Sequence[Record]) -> list[dict[str, Any]]:
    return [
        asdict(accepted)
        | {"lineage": record.lineage, "checkpoint": record.checkpoint_id, "round": record.round}
        | {"at": time_of(record.completed_at), "offsets": list(record.offsets)}
        for record in records
        for accepted in record.accepted
    ]


def state_of(driver: DriverStatus | None, newest: CompletedCheckpoint | None) -> dict[str, Any]:
    """Return the JSON values of the driver and of the newest checkpoint.

    Each is None if there is none.
    """
    about: dict[str, Any] = {"driver": None, "newest_checkpoint": None}
    if driver:
        about["driver"] = {
            "state": driver.state.value,
            "generation": driver.generation,
            "who": driver.sign.who,
            "last_sign": time_of(driver.sign.at),
            "age": driver.age,
            "clock": driver.clock,
            "ended": driver.sign.ended,
        }
    if newest:
        at = newest.record.completed_at
        about["newest_checkpoint"] = {
            "checkpoint": newest.checkpoint_id,
            "completed_at": time_of(at),
            "age": (machine.clock.milliseconds() - at) / 1000,
        }
    return about


_TABLES: dict[str, Columns] = {
    "committables": {
        **{name: name for name in ("round", "sink", "subtask")},
        "rows": lambda row: f"{row['fingerprint']['rows']:,}",
        "hash": lambda row: row["fingerprint"]["hash"],
        "transaction": lambda row: shown(row["transaction"]),
    },
    "accepted": LOSSES,
}
