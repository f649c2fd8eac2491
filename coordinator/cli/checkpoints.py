"""`coordinator checkpoints`: what checkpoint storage holds. Reads only."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Annotated, Any

import typer

from coordinator.cli.output import JOB_FILE, AsJson, Job, by_sink, fail, opened, say, show_json, show_table, time_of
from coordinator.protocol.decisions import Complete
from coordinator.protocol.records import Record

app = typer.Typer(help="The complete checkpoints that are retained.", no_args_is_help=True)


@app.command("list")
def list_(job: Job = JOB_FILE, as_json: AsJson = False) -> None:
    """All retained complete checkpoints, oldest first."""
    with opened(job) as coordinator:
        found = [summary(rounds) for rounds in coordinator.protocol.store.history()]
        if as_json:
            show_json(
                {
                    "job": coordinator.job,
                    "storage": coordinator.protocol.store.storage.uri,
                    "newest_generation": coordinator.protocol.store.newest_generation(),
                    "checkpoints": found,
                }
            )
            return
        show_table(
            ["checkpoint", "lineage", "generation", "mode", "completed", "took", "rows", "participants", "replays"],
            [
                [
                    one["checkpoint"],
                    one["lineage"],
                    one["generation"],
                    one["mode"],
                    one["completed_at"],
                    f"{one['duration_ms'] / 1000:.1f} s",
                    by_sink(one["rows"]),
                    by_sink(one["participants"]),
                    len(one["replays"]),
                ]
                for one in found
            ],
        )
        if not found:
            say(f"No checkpoint of job {coordinator.job!r} in {coordinator.protocol.store.storage.uri}.")


@app.command()
def show(
    checkpoint: Annotated[int | None, typer.Argument(help="Its number; the newest if left out.")] = None,
    job: Job = JOB_FILE,
    as_json: AsJson = False,
) -> None:
    """One checkpoint: its input, its participants and their transactions, its replay rounds."""
    with opened(job) as coordinator:
        history = {rounds[0].checkpoint_id: rounds for rounds in coordinator.protocol.store.history()}
        number = max(history, default=-1) if checkpoint is None else checkpoint
        if number not in history:
            there = f"there are {', '.join(map(str, history))}" if history else "there is none"
            fail(f"job {coordinator.job!r} has no checkpoint {'' if number < 0 else number} in storage; {there}")
        rounds = history[number]
        about = summary(rounds) | {
            "committables": [
                committable.to_json() | {"round": record.round}
                for record in rounds
                for committable in record.committables
            ]
        }
        if as_json:
            show_json(about)
            return
        shown = {key: value for key, value in about.items() if not isinstance(value, (dict, list))}
        shown |= {key: by_sink(about[key]) for key in ("rows", "partitions", "participants")}
        shown |= {f"offsets of source {at}": text for at, text in enumerate(about["offsets"])}
        show_table(["", ""], shown.items())
        show_table(
            ["round", "sink", "subtask", "rows", "hash", "transaction"],
            [
                [
                    one["round"],
                    one["sink"],
                    one["subtask"],
                    one["fingerprint"]["rows"],
                    one["fingerprint"]["hash"],
                    one["transaction"],
                ]
                for one in about["committables"]
            ],
        )
        for given_up in about["accepted"]:
            say(
                f"given up in round {given_up['round']}: sink {given_up['sink']!r}, subtask {given_up['subtask']}, "
                f"{given_up['rows']} rows ({given_up['outcome']}), by {given_up['who']} at {given_up['at']}: "
                f"{given_up['why']}"
            )


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
        "accepted": [
            asdict(one) | {"round": replay.round, "at": time_of(replay.completed_at)}
            for replay in rounds
            for one in replay.accepted
        ],
    }
