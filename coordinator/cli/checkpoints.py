"""`coordinator checkpoints`: what checkpoint storage holds. Reads only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Annotated, Any

import typer

from coordinator.cli.output import (
    FOUND,
    JOB_FILE,
    AsJson,
    Columns,
    Job,
    Last,
    Location,
    ago,
    by_sink,
    fail,
    opened,
    say,
    say_bad,
    show,
    show_facts,
    time_of,
)
from coordinator.operate.three_memories import side_by_side
from coordinator.protocol.decisions import Complete
from coordinator.protocol.records import Record
from sinks.transaction import shown

app = typer.Typer(help="Show the complete checkpoints in storage.", no_args_is_help=True)


@app.command("list")
def list_(last: Last = 20, job: Job = JOB_FILE, as_json: AsJson = False) -> None:
    """List the last complete checkpoints, oldest first."""
    with opened(job) as coordinator:
        store = coordinator.protocol.store
        bad: list[str] = []
        ids = sorted({id for id, _ in store.ids()})[-last:]
        history = store.history(lambda id: id in ids, bad)
        losses, generation = losses_of(store.losses(bad)), store.newest_generation()
        say_bad(bad)
    about = {"job": store.job, "storage": store.storage.uri, "newest_generation": generation}
    about |= {"checkpoints": [summary(rounds) for rounds in history], "losses": losses}
    if not as_json:
        say_losses(losses)
        if not history:
            say(f"No checkpoint of job {store.job!r} is complete in {store.storage.uri}.")
    show(
        about,
        as_json,
        checkpoints={
            **{name: name for name in ("checkpoint", "lineage", "generation", "mode")},
            "completed": lambda one: _ago(one["completed_at"]),
            "took": _took,
            "rows": lambda one: by_sink(one["rows"]),
            "participants": lambda one: by_sink(one["participants"]),
            "replays": lambda one: len(one["replays"]),
        },
    )


@app.command("show")
def show_(
    checkpoint: Annotated[int | None, typer.Argument(help="Its number; the newest if left out.")] = None,
    location: Location = None,
    job: Job = JOB_FILE,
    as_json: AsJson = False,
) -> None:
    """Show one checkpoint: input, participants, transactions, replay rounds. Also compare what
    storage, Spark's checkpointLocation and the external systems remember."""
    with opened(job) as coordinator:
        memories = list(side_by_side(coordinator.protocol.store, coordinator.sinks, location))
        history = coordinator.protocol.store.history(lambda id: id == checkpoint)
        number = history[-1][0].checkpoint_id if history and checkpoint is None else checkpoint
        rounds = next((one for one in history if one[0].checkpoint_id == number), None)
        if rounds is None:
            ids = coordinator.protocol.store.ids()
            there = f"there are {ids[0][0]} to {ids[-1][0]}" if ids else "there is none"
            which = "complete checkpoint" if checkpoint is None else f"checkpoint {number}"
            fail(f"Job {coordinator.job!r} has no {which} in {coordinator.protocol.store.storage.uri}; {there}.")
        about = summary(rounds) | {
            "committables": [
                committable.to_json() | {"round": record.round}
                for record in rounds
                for committable in record.committables
            ],
            "memories": [vars(memory) | {"shown": memory.shown} for memory in memories],
        }
        if not as_json:
            show_facts(_facts(about), as_json)
        show(about, as_json, committables=_COMMITTABLES, memories=_MEMORIES, accepted=LOSSES)
        if not all(memory.agrees for memory in memories):
            raise typer.Exit(FOUND)


_COMMITTABLES: Columns = {
    **{name: name for name in ("round", "sink", "subtask")},
    "rows": lambda one: one["fingerprint"]["rows"],
    "hash": lambda one: one["fingerprint"]["hash"],
    "transaction": lambda one: shown(one["transaction"]),
}
_MEMORIES: Columns = {"memory": "name", "newest checkpoint": "shown", "beside storage": "verdict"}


def _facts(about: Mapping[str, Any]) -> dict[str, Any]:
    left_out = ("duration_ms", "offsets")
    facts = {
        key: value for key, value in about.items() if key not in left_out and value and not isinstance(value, list)
    }
    offsets = {f"offsets of source {at}": text for at, text in enumerate(about["offsets"])}
    return facts | {"completed_at": _ago(about["completed_at"]), "took": _took(about)} | offsets


def _ago(time: str) -> str:
    try:
        return ago(round(datetime.fromisoformat(time).timestamp() * 1000))
    except ValueError:
        return time


def _took(one: Mapping[str, Any]) -> str:
    return f"{one['duration_ms'] / 1000:.1f} s"


def losses(job: Job = JOB_FILE, as_json: AsJson = False) -> None:
    """List everything that was given up with `resolve --accept-loss` since the job began."""
    with opened(job) as coordinator:
        bad: list[str] = []
        found = losses_of(coordinator.protocol.store.losses(bad))
        say_bad(bad)
    if not found and not as_json:
        say(f"Nothing of job {coordinator.job!r} was ever given up.")
    show({"job": coordinator.job, "losses": found}, as_json, losses=LOSSES)


LOSSES: Columns = {
    "given up at": "at",
    **{name: name for name in ("checkpoint", "sink", "subtask", "rows", "outcome", "who", "why")},
    "offsets": lambda one: ", ".join(one["offsets"]),
}


def losses_of(records: Sequence[Record]) -> list[dict[str, Any]]:
    return [
        asdict(one)
        | {"lineage": record.lineage, "checkpoint": record.checkpoint_id, "round": record.round}
        | {"at": time_of(record.completed_at), "offsets": list(record.offsets)}
        for record in records
        for one in record.accepted
    ]


def say_losses(found: Sequence[dict[str, Any]]) -> None:
    if found:
        rows = sum(one["rows"] for one in found)
        say(f"Given up by operators: {len(found)} participant(s), {rows:,} row(s); see `coordinator losses`.")


def summary(rounds: tuple[Record, ...]) -> dict[str, Any]:
    """JSON of a checkpoint without its transactions."""
    record = rounds[0]
    return {
        "checkpoint": record.checkpoint_id,
        "lineage": record.lineage,
        "generation": record.generation,
        "mode": record.mode,
        "guarantee": record.guarantee,
        "query_id": record.query_id,
        "triggered_at": time_of(record.triggered_at),
        "completed_at": time_of(record.completed_at),
        "duration_ms": record.completed_at - record.triggered_at,
        "rows": dict(record.rows),
        "partitions": dict(record.partitions),
        "participants": dict(Counter(sink for sink, _ in Complete(rounds).named)),
        "offsets": list(record.offsets),
        "restored_from": record.restored_from,
        "replays": [
            {
                "round": replay.round,
                "generation": replay.generation,
                "completed_at": time_of(replay.completed_at),
                "rows": dict(replay.rows),
                "participants": dict(Counter(c.sink for c in replay.committables)),
            }
            for replay in rounds[1:]
        ],
        "accepted": losses_of(rounds),
    }
