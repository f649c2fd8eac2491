"""`coordinator status`: whether a driver runs, and how far the job has come. Asks checkpoint storage only."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import typer

from coordinator.cli.checkpoints import losses_of, say_losses
from coordinator.cli.output import FOUND, JOB_FILE, AsJson, Job, opened, say, say_bad, show, time_of
from coordinator.heartbeat import Driver, State, look_for_driver
from coordinator.operate.wording import of_driver, of_newest
from coordinator.protocol.records import Record, jobs_in


def status(job: Job = JOB_FILE, as_json: AsJson = False) -> None:
    """Show whether a driver runs, why the last one ended, how old the newest checkpoint is, and what was given up.
    Exit code 1 if no driver runs."""
    with opened(job) as coordinator:
        store = coordinator.protocol.store
        bad: list[str] = []
        driver, newest, losses = look_for_driver(store, bad), store.load_newest(), losses_of(store.losses(bad))
        say_bad(bad)
        others = [] if driver else jobs_in(store.storage)
    about = {"job": store.job, "storage": store.storage.uri} | driver_json(driver) | newest_json(newest)
    show(about | {"losses": losses}, as_json)
    if not as_json:
        say(f"Job {store.job!r} in {store.storage.uri}")
        say(of_driver(driver, others))
        say(of_newest(newest))
        say_losses(losses)
    if driver is None or driver.state is not State.RUNNING:
        raise typer.Exit(FOUND)


def driver_json(driver: Driver | None) -> dict[str, Any]:
    if driver is None:
        return {"driver": None}
    return {
        "driver": {
            "state": driver.state.value,
            "generation": driver.generation,
            "who": driver.sign.who,
            "last_sign": time_of(driver.sign.at),
            "age": driver.age,
            "clock": driver.clock,
            "ended": driver.sign.ended,
        }
    }


def newest_json(rounds: Sequence[Record]) -> dict[str, Any]:
    if not rounds:
        return {"newest_checkpoint": None}
    at = rounds[0].completed_at
    age = time.time() - at / 1000
    return {
        "newest_checkpoint": {"checkpoint": rounds[0].checkpoint_id, "completed_at": time_of(at), "age": age},
    }
