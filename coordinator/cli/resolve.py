"""`coordinator resolve`: when the newest checkpoint cannot become visible as a whole, because transactions are lost."""

from __future__ import annotations

import getpass
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated

import typer

from coordinator.cli.checkpoints import LOSSES, losses_of
from coordinator.cli.in_doubt import say_left
from coordinator.cli.output import (
    FOUND,
    JOB_FILE,
    USAGE,
    AsJson,
    Job,
    Yes,
    ago,
    confirm,
    fail,
    opened,
    runnable,
    say,
    show,
)
from coordinator.coordinator import CheckpointCoordinator
from coordinator.operate.in_doubt import look
from coordinator.operate.three_memories import set_back
from coordinator.protocol import operators
from coordinator.protocol.decisions import Complete, Participant
from sinks.transaction import CommitOutcome, CommitState

_MISSING = (CommitState.LOST, CommitState.UNKNOWN)
_NAMED = 3
"""Participants that a command is spelled out for."""


def resolve(
    accept_loss: Annotated[
        list[str] | None,
        typer.Option("--accept-loss", metavar="SINK/SUBTASK", help="Go on without this participant, or `all`."),
    ] = None,
    why: Annotated[str, typer.Option("--why", help="The reason, stored with the checkpoint.")] = "",
    who: Annotated[
        str, typer.Option("--who", help="Who decides, stored with the checkpoint. Default: the login.")
    ] = "",
    yes: Yes = False,
    job: Job = JOB_FILE,
    as_json: AsJson = False,
) -> None:
    """Show lost and unknown transactions of the newest complete checkpoint, and go on without them.

    This first commits decided transactions, as the next start of the query would. That start writes lost rows again
    if the source still gives the same ones. Use this command if it does not (ReplayMismatch), or if the outcome of a
    transaction is unknown (InDoubtError)."""
    with opened(job) as coordinator:
        store = coordinator.protocol.store
        if not store.load_newest():
            fail(f"Job {store.job!r} has no checkpoint in {store.storage.uri}; see `coordinator in-doubt list`.")
        seen = look(store, coordinator.sinks)
        decided = {(one.sink, one.named.subtask) for one in seen.found if one.named}
        complete, errors = operators.ask(coordinator.protocol)
        assert complete
        other_memories = set_back(coordinator.protocol.store, coordinator.sinks)
        for memory in other_memories:
            say(memory)
        if accept_loss:
            if not why:
                fail("Give the reason: --why TEXT. It is stored with the checkpoint.", USAGE)
            if errors:
                fail(f"{_unanswered(coordinator, complete, errors)} Nothing was given up.")
            chosen = _chosen(complete, accept_loss)
            rows = sum(complete.named[participant].fingerprint.rows for participant in chosen)
            confirm(
                f"Job {coordinator.job!r} goes on WITHOUT {rows} row(s) of checkpoint {complete.checkpoint_id}, of "
                f"{', '.join(f'{sink}/{subtask}' for sink, subtask in chosen)}. It is not exactly-once for them. This "
                "claims a new generation: a driver that runs stops with Superseded.",
                "accept loss",
                given=yes,
            )
            operators.accept_loss(coordinator.protocol, chosen, who=who or _login(), why=why)
            complete, errors = operators.ask(coordinator.protocol)
            assert complete
        committed_now = [p for p in decided if complete.outcomes.get(p) == CommitOutcome.COMMITTED]
        cannot_tell = _unanswered(coordinator, complete, errors) if errors else ""
        _show(
            complete,
            {f"{sink}/{subtask}": str(error) for (sink, subtask), error in errors.items()},
            len(committed_now),
            cannot_tell,
            as_json,
        )
        undecided = [one for one in seen.found if not one.named]
        if not as_json:
            say_left(coordinator, replace(seen, found=undecided), "Not touched: ")
        if errors or _missing(complete) or (other_memories and not accept_loss):
            raise typer.Exit(FOUND)


def _unanswered(coordinator: CheckpointCoordinator, complete: Complete, errors: Mapping[Participant, Exception]) -> str:
    """Whose answer is missing, and that nothing follows from it."""
    systems = {name: coordinator.sinks[name].system for name, _ in errors}
    asked = ", ".join(f"{system} (sink {name!r})" for name, system in systems.items())
    return (
        f"Cannot tell what became of {len(errors)} of {len(complete.named)} participants of checkpoint "
        f"{complete.checkpoint_id}: bring {asked} back, or mend what it says, and ask again. Nothing is known to be "
        "lost: what is decided stays decided, and the next start of the query commits it."
    )


def _missing(complete: Complete) -> list[Participant]:
    return [p for p, outcome in complete.outcomes.items() if outcome.state in _MISSING]


def _chosen(complete: Complete, wanted: list[str]) -> list[Participant]:
    missing = {f"{sink}/{subtask}": (sink, subtask) for sink, subtask in _missing(complete)}
    if wanted == ["all"]:
        wanted = list(missing)
    if not wanted:
        fail("Nothing is lost or unknown. Nothing was changed.")
    if strangers := [text for text in wanted if text not in missing]:
        fail(f"Neither lost nor unknown: {', '.join(strangers)}. Nothing was changed.", USAGE)
    return [missing[text] for text in wanted]


def _login() -> str:
    return f"{getpass.getuser()}@{socket.gethostname()}"


def _show(complete: Complete, errors: Mapping[str, str], committed_now: int, cannot_tell: str, as_json: bool) -> None:
    participants = [
        {
            "participant": f"{sink}/{subtask}",
            "outcome": outcome.state.value if outcome else "cannot tell",
            "reason": outcome.reason if outcome else errors.get(f"{sink}/{subtask}", ""),
            "rows": committable.fingerprint.rows,
            "transaction": dict(committable.transaction),
        }
        for (sink, subtask), committable in complete.named.items()
        for outcome in [complete.outcomes.get((sink, subtask))]
    ]
    hidden = [one for one in participants if one["outcome"] != CommitState.COMMITTED.value]
    losses = losses_of(complete.rounds)
    if as_json:
        about = {
            "job": complete.record.job,
            "checkpoint": complete.checkpoint_id,
            "offsets": list(complete.record.offsets),
            "participants": participants,
            "committed_now": committed_now,
            "given_up": [f"{one['sink']}/{one['subtask']}" for one in losses],
        }
        show(about, as_json)
        return
    visible = len(participants) - len(hidden)
    known = f"{visible} of {len(participants)} participants are visible" if visible or not errors else "see below"
    say(f"Checkpoint {complete.checkpoint_id}, complete {ago(complete.record.completed_at)}: {known}.")
    if committed_now:
        say(f"Committed {committed_now} now.")
    keys = ("participant", "outcome", "rows", "reason")
    found = {"given_up": losses, "participants": hidden}
    show(found, as_json, given_up=LOSSES, participants={key: key for key in keys})
    if cannot_tell:
        say(cannot_tell)
    elif hidden:
        _say_choices(complete, [f"{sink}/{subtask}" for sink, subtask in _missing(complete)])


def _say_choices(complete: Complete, missing: Sequence[str]) -> None:
    choices = [
        "Start the query again: it writes lost transactions again, from the same input "
        f"({', '.join(complete.record.offsets)}).",
    ]
    if any(outcome.state is CommitState.UNKNOWN for outcome in complete.outcomes.values()):
        choices.append(
            "unknown: look for the rows in the target; commit or roll back the transaction there, then start."
        )
    if missing:
        named = " ".join(f"--accept-loss {participant}" for participant in missing[:_NAMED])
        named = named if len(missing) <= _NAMED else "--accept-loss all"
        choices.append(f"Go on without them: {runnable(f'coordinator resolve {named} --why REASON')}")
    say("\n".join(["Choices:", *(f"  {number}. {text}" for number, text in enumerate(choices, 1))]))
