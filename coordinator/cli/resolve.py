"""`coordinator resolve`: when the newest checkpoint cannot become visible as a whole, because transactions are lost."""

from __future__ import annotations

import getpass
import socket
from typing import Annotated, Any

import typer

from coordinator.cli.output import (
    FOUND,
    JOB_FILE,
    USAGE,
    AsJson,
    Job,
    Yes,
    confirm,
    fail,
    opened,
    say,
    show_json,
    show_table,
)
from coordinator.protocol import operators
from coordinator.protocol.decisions import Complete, Participant
from sinks.transaction import CommitState

_MISSING = (CommitState.LOST, CommitState.UNKNOWN)


def resolve(
    accept_loss: Annotated[
        list[str] | None,
        typer.Option("--accept-loss", metavar="SINK/SUBTASK", help="Go on without this participant, or `all`."),
    ] = None,
    why: Annotated[str, typer.Option("--why", help="The reason, kept in the record.")] = "",
    who: Annotated[str, typer.Option("--who", help="Who decides, kept in the record; the login by default.")] = "",
    yes: Yes = False,
    job: Job = JOB_FILE,
    as_json: AsJson = False,
) -> None:
    """Show which transactions of the newest complete checkpoint are lost or unknown, and decide to go on without them.

    Looking commits what is decided and still can be committed, as the next start of the query would. Lost rows are
    written again by that start, if the source still gives the very same rows; so this is for when it cannot
    (ReplayMismatch), or when nobody can tell what became of a transaction."""
    with opened(job) as coordinator:
        complete, errors = operators.ask(coordinator.protocol)
        if complete is None:
            fail(f"job {coordinator.job!r} has no checkpoint in {coordinator.protocol.store.storage.uri}")
        if accept_loss:
            if not why:
                fail("Say --why: the reason is kept in the record.", USAGE)
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
        _show(complete, {f"{sink}/{subtask}": str(error) for (sink, subtask), error in errors.items()}, as_json)
        if errors or _missing(complete):
            raise typer.Exit(FOUND)


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


def _show(complete: Complete, errors: dict[str, str], as_json: bool) -> None:
    participants = [
        {
            "participant": f"{sink}/{subtask}",
            "outcome": outcome.state.value if outcome else "not answered",
            "reason": outcome.reason if outcome else errors.get(f"{sink}/{subtask}", ""),
            "rows": committable.fingerprint.rows,
            "transaction": dict(committable.transaction),
        }
        for (sink, subtask), committable in complete.named.items()
        for outcome in [complete.outcomes.get((sink, subtask))]
    ]
    open_ones = [one for one in participants if one["outcome"] != CommitState.COMMITTED.value]
    if as_json:
        about: dict[str, Any] = {
            "job": complete.record.job,
            "checkpoint": complete.checkpoint_id,
            "offsets": list(complete.record.offsets),
            "participants": participants,
            "given_up": [f"{one.sink}/{one.subtask}" for record in complete.rounds for one in record.accepted],
        }
        show_json(about)
        return
    committed = len(participants) - len(open_ones)
    say(f"Checkpoint {complete.checkpoint_id}: {committed} of {len(participants)} participants are visible.")
    for record in complete.rounds:
        for given_up in record.accepted:
            say(
                f"Given up: {given_up.sink}/{given_up.subtask}, {given_up.rows} rows, by {given_up.who}: {given_up.why}"
            )
    if open_ones:
        keys = ("participant", "outcome", "rows", "reason")
        show_table(keys, [[one[key] for key in keys] for one in open_ones])
        say(
            "Choices:\n"
            "  1. Start the query again: it writes lost transactions again, from the same input "
            f"({', '.join(complete.record.offsets)}).\n"
            "  2. unknown: look for the rows in the target; commit or roll back the transaction there, then start.\n"
            "  3. Go on without them: coordinator resolve --accept-loss SINK/SUBTASK --why REASON"
        )
