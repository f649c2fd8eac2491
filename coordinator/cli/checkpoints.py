"""`coordinator checkpoints`: what checkpoint storage holds of one. Reads only."""

from __future__ import annotations

from typing import Annotated

import typer

from coordinator.cli.output import FINDING, JOB_FILE, AsJson, Columns, Job, Location, coordinator_of, fail, say, show
from coordinator.cli.status import LOSSES, losses_of
from coordinator.operate.memories import side_by_side
from sinks.transaction import shown

app = typer.Typer(
    help="Show a complete checkpoint; `coordinator history` lists them.", no_args_is_help=True, callback=lambda: None
)


@app.command("show")
def show_(
    checkpoint: Annotated[int | None, typer.Argument(help="Its number; the newest if left out.")] = None,
    location: Location = None,
    job: Job = JOB_FILE,
    as_json: AsJson = False,
) -> None:
    """Show one checkpoint: input, participants, transactions, replay rounds. Also compare what storage, Spark's
    checkpointLocation and the external systems remember."""
    with coordinator_of(job) as coordinator:
        store = coordinator.protocol.store
        memories = list(side_by_side(store, coordinator.sinks, location))
        history = store.history(lambda id: id == checkpoint)
        rounds = next((each for each in history if checkpoint in (None, each[0].checkpoint_id)), None)
        if rounds is None:
            ids = store.ids()
            there = f"there are {ids[0][0]} to {ids[-1][0]}" if ids else "there is none"
            which = "complete checkpoint" if checkpoint is None else f"checkpoint {checkpoint}"
            fail(f"Job {coordinator.job!r} has no {which} in {store.storage.uri}; {there}.")
        about = rounds[0].to_json() | {
            "checkpoint": rounds[0].checkpoint_id,
            "committables": [
                committable.to_json() | {"round": record.round}
                for record in rounds
                for committable in record.committables
            ],
            "accepted": losses_of(rounds),
            "memories": [vars(memory) | {"shown": memory.shown} for memory in memories],
        }
        facts = {name: value for name, value in about.items() if value and name not in ("checkpoint_id", *_TABLES)}
        show(about, as_json, facts=facts, **_TABLES)
        for replay in rounds[1:]:
            say(f"Round {replay.round}, by generation {replay.generation}: {len(replay.committables)} written again.")
        if not all(memory.agrees for memory in memories):
            raise typer.Exit(FINDING)


_TABLES: dict[str, Columns] = {
    "committables": {
        **{name: name for name in ("round", "sink", "subtask")},
        "rows": lambda row: row["fingerprint"]["rows"],
        "hash": lambda row: row["fingerprint"]["hash"],
        "transaction": lambda row: shown(row["transaction"]),
    },
    "memories": {"memory": "name", "newest checkpoint": "shown", "compared with storage": "verdict"},
    "accepted": LOSSES,
}
