"""`coordinator status`: whether a driver runs, and how far the job has come. Asks checkpoint storage only."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import typer

from coordinator.cli.checkpoints import losses_of, say_losses
from coordinator.cli.output import FOUND, JOB_FILE, AsJson, Job, ago, by_sink, duration, opened, say, show_json, time_of
from coordinator.heartbeat import Driver, State, look_for_driver
from coordinator.protocol.records import Record, jobs_in


def status(job: Job = JOB_FILE, as_json: AsJson = False) -> None:
    """Whether a driver of the job runs, why the last one ended, how old the newest checkpoint is, and what was given
    up. Exit code 1 if no driver runs."""
    with opened(job) as coordinator:
        store = coordinator.protocol.store
        driver, newest, losses = look_for_driver(store), store.load_newest(), losses_of(store.losses())
        others = [] if driver else jobs_in(store.storage)
    if as_json:
        about = {"job": store.job, "storage": store.storage.uri}
        show_json(about | driver_json(driver) | newest_json(newest) | {"losses": losses})
    else:
        say(f"Job {store.job!r} in {store.storage.uri}")
        say(of_driver(driver, others))
        say(of_newest(newest))
        say_losses(losses)
    if driver is None or driver.state is not State.RUNNING:
        raise typer.Exit(FOUND)


def of_driver(driver: Driver | None, others: Sequence[str] = ()) -> str:
    """`others`: the jobs that storage knows."""
    if driver is None:
        there = f" It holds the jobs {', '.join(map(repr, others))}." if others else ""
        return f"Driver: the job has never been started on this storage. Is it the right one?{there}"
    sign = f"{time_of(driver.sign.at)}, {duration(max(driver.age, 0))} ago by {driver.clock} clock"
    who = f"generation {driver.generation} ({driver.sign.who})"
    if driver.state is State.RUNNING:
        return f"Driver: {who} runs; last sign of life {sign}."
    if driver.state is State.SILENT:
        return (
            f"Driver: {who} is dead, frozen, or cut off from checkpoint storage; last sign of life {sign}, and one "
            f"was due every {duration(driver.sign.next)}."
        )
    if driver.state is State.UNKNOWN:
        return (
            f"Driver: cannot tell whether {who} runs: its last sign of life, {time_of(driver.sign.at)}, is "
            f"{duration(-driver.age)} ahead of the clock of this machine. Ask on the driver's machine, or set the "
            "clocks."
        )
    if driver.state is State.ENDED:
        return f"Driver: {who} has ended its query, {sign}: {driver.sign.ended}"
    return f"Driver: none. {who[0].upper()}{who[1:]} was claimed by a command or a restore, {sign}."


def of_newest(rounds: Sequence[Record]) -> str:
    if not rounds:
        return "Newest checkpoint: none is complete."
    record = rounds[0]
    return (
        f"Newest checkpoint: {record.checkpoint_id}, complete {ago(record.completed_at)}, rows: {by_sink(record.rows)}."
    )


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
