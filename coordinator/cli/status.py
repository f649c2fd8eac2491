"""`coordinator status`: whether a driver runs, and how far the job has come. Asks checkpoint storage only."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import typer

from coordinator.cli.output import FINDING, JOB_FILE, AsJson, Columns, Job, coordinator_of, say, say_bad, show
from coordinator.heartbeat import Driver, look_for_driver
from coordinator.operate.text import of_driver, of_newest, time_of
from coordinator.protocol.records import Record, jobs_in
from coordinator.statistics.model import Activity


def status(job: Job = JOB_FILE, as_json: AsJson = False) -> None:
    """Show whether a driver runs, why the last one ended, how old the newest checkpoint is, and everything that was
    given up with `resolve --accept-loss` since the job began. Exit code 1 if no driver runs."""
    with coordinator_of(job) as coordinator:
        store = coordinator.protocol.store
        bad: list[str] = []
        driver, newest, losses = look_for_driver(store, bad), store.load_newest(), losses_of(store.losses(bad))
        others = [] if driver else jobs_in(store.storage)
    say_bad(bad)
    say(f"Job {store.job!r} in {store.storage.uri}")
    say(of_driver(driver, others))
    for sentence in Activity.of(driver).sentences:
        say(sentence)
    say(of_newest(newest))
    if losses:
        rows = sum(loss["rows"] for loss in losses)
        say(f"Given up by operators: {len(losses)} participant(s), {rows:,} row(s).")
    about = {"job": store.job, "storage": store.storage.uri} | state_of(driver, newest)
    show(about | {"losses": losses}, as_json, losses=LOSSES)
    if driver is None or not driver.runs:
        raise typer.Exit(FINDING)


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


def state_of(driver: Driver | None, newest: Sequence[Record]) -> dict[str, Any]:
    """JSON of the driver and of the newest checkpoint, which are None if there is none."""
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
        at = newest[0].completed_at
        about["newest_checkpoint"] = {
            "checkpoint": newest[0].checkpoint_id,
            "completed_at": time_of(at),
            "age": time.time() - at / 1000,
        }
    return about
