"""Texts for people, on the page and by the command: times, durations, counts, the driver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

from coordinator.operations.heartbeat import DriverStatus, State
from coordinator.store.records import CompletedCheckpoint
from sinks._util.machine import machine


def time_of(milliseconds: int) -> str:
    """Return a time in ISO 8601, in the time zone of this machine, with its offset."""
    try:
        return (
            datetime.fromtimestamp(milliseconds / 1000)
            .astimezone()
            .isoformat(timespec="milliseconds")
        )
    except (ValueError, OverflowError, OSError):
        return f"{milliseconds} ms, which is no time"


def ago(milliseconds: int) -> str:
    """Return a time, and how long ago it was by the clock of this machine."""
    if not milliseconds:
        return "at an unknown time"
    age = (machine.clock.milliseconds() - milliseconds) / 1000
    distance = (
        f"{duration(max(age, 0))} ago"
        if age > -1
        else f"{duration(-age)} ahead of the clock of this machine"
    )
    return f"{time_of(milliseconds)} ({distance})"


def by_sink(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{sink} {count:,}" for sink, count in sorted(counts.items())) or "0"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"


def of_driver(driver: DriverStatus | None, others: Sequence[str] = ()) -> str:
    """Describe the state of the driver.

    `others` are the jobs that storage knows.
    """
    if driver is None:
        there = f" It holds the jobs {', '.join(map(repr, others))}." if others else ""
        return (
            f"Driver: the job has never been started on this storage. Is it the right one?{there}"
        )
    sign = f"{time_of(driver.sign.at)}, {duration(max(driver.age, 0))} ago by {driver.clock} clock"
    who = f"generation {driver.generation} ({driver.sign.who})"
    if driver.state is State.RUNNING:
        overdue = " The next one is overdue." if driver.is_overdue else ""
        return (
            f"Driver: {who} runs, or has died since its last heartbeat: that was "
            f"{sign}.{overdue} It is taken for dead after {duration(driver.patience)} without one."
        )
    if driver.state is State.SILENT:
        return (
            f"Driver: {who} is dead, frozen, or cut off from checkpoint storage; last heartbeat "
            f"{sign}, and one was due every {duration(driver.sign.next)}. Look at its log, and "
            "start the query again."
        )
    if driver.state is State.UNKNOWN:
        return (
            f"Driver: cannot tell whether {who} runs: its last heartbeat, "
            f"{time_of(driver.sign.at)}, is {duration(-driver.age)} ahead by {driver.clock} clock. "
            "Ask on the driver's machine, or set the clocks."
        )
    if driver.state is State.ENDED:
        return f"Driver: {who} has ended its query, {sign}: {driver.sign.ended.rstrip('.')}."
    return f"Driver: none. {who[0].upper()}{who[1:]} was claimed by a command or a restore, {sign}."


def of_newest(newest: CompletedCheckpoint | None) -> str:
    if newest is None:
        return "Newest checkpoint: none is complete."
    record = newest.record
    return (
        f"Newest checkpoint: {record.checkpoint_id}, complete {ago(record.completed_at)}, rows: "
        f"{by_sink(record.rows)}."
    )
