"""`coordinator checkpoints`: what checkpoint storage holds. Reads only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

from coordinator.cli.output import (
    FOUND,
    JOB_FILE,
    AsJson,
    Job,
    Location,
    ago,
    by_sink,
    fail,
    opened,
    say,
    show_json,
    show_table,
    time_of,
)
from coordinator.protocol.decisions import Complete
from coordinator.protocol.records import Record
from coordinator.three_memories import Memory, side_by_side
from sinks.transaction import shown

app = typer.Typer(help="The complete checkpoints that are retained.", no_args_is_help=True)


@app.command("list")
def list_(job: Job = JOB_FILE, as_json: AsJson = False) -> None:
    """All retained complete checkpoints, oldest first."""
    with opened(job) as coordinator:
        store = coordinator.protocol.store
        history, losses, generation = store.history(), losses_of(store.losses()), store.newest_generation()
    if as_json:
        about = {"job": store.job, "storage": store.storage.uri, "newest_generation": generation}
        show_json(about | {"checkpoints": [summary(rounds) for rounds in history], "losses": losses})
        return
    say_losses(losses)
    if not history:
        say(f"No checkpoint of job {store.job!r} is complete in {store.storage.uri}.")
        return
    show_table(
        ["checkpoint", "lineage", "generation", "mode", "completed", "took", "rows", "participants", "replays"],
        [
            [
                about["checkpoint"],
                about["lineage"],
                about["generation"],
                about["mode"],
                ago(rounds[0].completed_at),
                f"{about['duration_ms'] / 1000:.1f} s",
                by_sink(about["rows"]),
                by_sink(about["participants"]),
                len(about["replays"]),
            ]
            for rounds in history
            for about in [summary(rounds)]
        ],
    )


@app.command()
def show(
    checkpoint: Annotated[int | None, typer.Argument(help="Its number; the newest if left out.")] = None,
    location: Location = None,
    job: Job = JOB_FILE,
    as_json: AsJson = False,
) -> None:
    """One checkpoint: its input, its participants and their transactions, its replay rounds; and whether storage,
    Spark's checkpointLocation and the external systems remember the same."""
    with opened(job) as coordinator:
        memories = list(side_by_side(coordinator.protocol.store, coordinator.sinks, location))
        history = {rounds[0].checkpoint_id: rounds for rounds in coordinator.protocol.store.history()}
        number = max(history, default=-1) if checkpoint is None else checkpoint
        if number not in history:
            there = f"there are {', '.join(map(str, history))}" if history else "there is none"
            which = "complete checkpoint" if checkpoint is None else f"checkpoint {number}"
            fail(f"Job {coordinator.job!r} has no {which} in {coordinator.protocol.store.storage.uri}; {there}.")
        rounds = history[number]
        about = summary(rounds) | {
            "committables": [
                committable.to_json() | {"round": record.round}
                for record in rounds
                for committable in record.committables
            ],
            "memories": [vars(memory) for memory in memories],
        }
        if as_json:
            show_json(about)
        else:
            _show(rounds[0], about, memories)
        if not all(memory.agrees for memory in memories):
            raise typer.Exit(FOUND)


def _show(record: Record, about: dict[str, Any], memories: Sequence[Memory]) -> None:
    facts = {key: value for key, value in about.items() if value != "" and not isinstance(value, (dict, list))}
    facts |= {"took": f"{facts.pop('duration_ms') / 1000:.1f} s"}
    facts |= {key: ago(getattr(record, key)) for key in ("triggered_at", "completed_at")}
    facts |= {key: by_sink(about[key]) for key in ("rows", "partitions", "participants")}
    facts |= {f"offsets of source {at}": text for at, text in enumerate(about["offsets"])}
    show_table(["", ""], facts.items())
    show_table(
        ["round", "sink", "subtask", "rows", "hash", "transaction"],
        [
            [
                one["round"],
                one["sink"],
                one["subtask"],
                one["fingerprint"]["rows"],
                one["fingerprint"]["hash"],
                shown(one["transaction"]),
            ]
            for one in about["committables"]
        ],
    )
    show_table(
        ["memory", "newest checkpoint", "beside storage"],
        [[memory.name, memory.shown, memory.verdict] for memory in memories],
    )
    show_losses(about["accepted"])


def losses(job: Job = JOB_FILE, as_json: AsJson = False) -> None:
    """What operators have given up, by `resolve --accept-loss`, since the job began. Retention keeps it."""
    with opened(job) as coordinator:
        found = losses_of(coordinator.protocol.store.losses())
    if as_json:
        show_json({"job": coordinator.job, "losses": found})
    elif found:
        show_losses(found)
    else:
        say(f"Nothing of job {coordinator.job!r} was ever given up.")


def losses_of(records: Sequence[Record]) -> list[dict[str, Any]]:
    return [
        asdict(one)
        | {"lineage": record.lineage, "checkpoint": record.checkpoint_id, "round": record.round}
        | {"at": time_of(record.completed_at), "offsets": list(record.offsets)}
        for record in records
        for one in record.accepted
    ]


def show_losses(found: Sequence[dict[str, Any]]) -> None:
    keys = ("at", "checkpoint", "sink", "subtask", "rows", "outcome", "who", "why", "offsets")
    if found:
        names = ["given up at", *keys[1:]]
        show_table(names, [[*(one[key] for key in keys[:-1]), ", ".join(one["offsets"])] for one in found])


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
