"""`coordinator resolve`: when the newest checkpoint cannot become visible as a whole, because transactions are lost."""

from __future__ import annotations

import getpass
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

import typer

from coordinator.cli import output
from coordinator.cli.in_doubt import say_remedies, say_set_back
from coordinator.cli.output import FINDING, JOB_FILE, USAGE, AsJson, Job, Yes, confirm, coordinator_of, fail, say, show
from coordinator.cli.status import LOSSES, losses_of
from coordinator.coordinator import CheckpointCoordinator
from coordinator.operate.in_doubt import look
from coordinator.operate.text import ago
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
    with coordinator_of(job) as coordinator:
        store = coordinator.protocol.store
        if not store.load_newest():
            fail(f"Job {store.job!r} has no checkpoint in {store.storage.uri}; see `coordinator in-doubt list`.")
        seen = look(store, coordinator.sinks)
        complete, errors = operators.ask(coordinator.protocol)
        assert complete
        was_set_back = say_set_back(coordinator)
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
        about = _about(complete, errors)
        decided = {(pending.sink, pending.named.subtask) for pending in seen.pending if pending.named}
        about["committed_now"] = sum(complete.outcomes.get(each) == CommitOutcome.COMMITTED for each in decided)
        count, visible = len(complete.named), about["visible"]
        known = f"{visible} of {count} participants are visible" if visible or not errors else "see below"
        say(f"Checkpoint {complete.checkpoint_id}, complete {ago(complete.record.completed_at)}: {known}.")
        if about["committed_now"]:
            say(f"Committed {about['committed_now']} now.")
        columns = {name: name for name in ("participant", "outcome", "rows", "reason")}
        show(about, as_json, given_up=LOSSES, participants=columns)
        if errors:
            say(_unanswered(coordinator, complete, errors))
        elif about["participants"]:
            _say_choices(complete, [f"{sink}/{subtask}" for sink, subtask in _missing(complete)])
        undecided = [pending for pending in seen.pending if not pending.named]
        say_remedies(coordinator, replace(seen, pending=undecided), "Not touched: ")
        if errors or _missing(complete) or (was_set_back and not accept_loss):
            raise typer.Exit(FINDING)


def _about(complete: Complete, errors: Mapping[Participant, Exception]) -> dict[str, Any]:
    """JSON of the checkpoint. `participants`: those that are not visible."""
    hidden = [
        {
            "participant": f"{sink}/{subtask}",
            "outcome": outcome.state.value if outcome else "cannot tell",
            "reason": outcome.reason if outcome else str(errors.get((sink, subtask), "")),
            "rows": committable.fingerprint.rows,
            "transaction": dict(committable.transaction),
        }
        for (sink, subtask), committable in complete.named.items()
        if (outcome := complete.outcomes.get((sink, subtask))) != CommitOutcome.COMMITTED
    ]
    return {
        "job": complete.record.job,
        "checkpoint": complete.checkpoint_id,
        "offsets": list(complete.record.offsets),
        "visible": len(complete.named) - len(hidden),
        "participants": hidden,
        "given_up": losses_of(complete.rounds),
    }


def _unanswered(coordinator: CheckpointCoordinator, complete: Complete, errors: Mapping[Participant, Exception]) -> str:
    """Whose answer is missing, and that nothing follows from it."""
    systems = {name: coordinator.sinks[name].system for name, _ in errors}
    asked = ", ".join(f"{system} (sink {name!r})" for name, system in systems.items())
    return (
        f"Cannot tell what became of {len(errors)} of {len(complete.named)} participants of checkpoint "
        f"{complete.checkpoint_id}: bring {asked} back, or fix what it says, and ask again. Nothing is known to be "
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
        choices.append(f"Go on without them: {output.runnable(f'coordinator resolve {named} --why REASON')}")
    say("\n".join(["Choices:", *(f"  {number}. {text}" for number, text in enumerate(choices, 1))]))
