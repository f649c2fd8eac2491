"""`coordinator in-doubt` and `resolve`, for transactions that are neither committed nor aborted.

These are pre-committed transactions, and lost ones, which keep the newest checkpoint from becoming
visible as a whole.
"""

from __future__ import annotations

import getpass
import os
import socket
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Annotated, Any, NoReturn

import typer

from coordinator.cli import output
from coordinator.cli.output import (
    FINDING,
    JOB_FILE,
    USAGE,
    AsJson,
    Job,
    Yes,
    confirm,
    coordinator_of,
    fail,
    say,
    show,
    store_of,
    tell,
)
from coordinator.cli.status import LOSSES, losses_of, state_of
from coordinator.coordinator import CheckpointCoordinator
from coordinator.operations import operator_decisions
from coordinator.operations.inspection.in_doubt_report import (
    Decision,
    InDoubtReport,
    InDoubtTransaction,
    find_in_doubt,
    remedies,
)
from coordinator.operations.inspection.text import ago, duration, of_driver, of_newest
from coordinator.protocol.ports import ask_to_commit, places
from coordinator.protocol.protocol import CheckpointProtocol
from coordinator.store.job_store import JobStore
from coordinator.store.records import CompletedCheckpoint, Participant
from sinks._util.progress import progress
from sinks.audit import Part
from sinks.optional import Auditable
from sinks.transaction import (
    Checkpoint,
    CommitOutcome,
    CommitState,
    Committable,
    TransactionId,
    shown,
)

_MISSING = (CommitState.LOST, CommitState.UNKNOWN)
_NAMED = 3
"""The number of participants up to which a command names each of them."""
app = typer.Typer(
    help="Show and settle pre-committed transactions that are not resolved yet.",
    no_args_is_help=True,
)
_CHOSEN = typer.Argument(
    metavar="ID...", help="IDs from `list`, or names in the target (a gid, …)."
)
Break = Annotated[
    bool, typer.Option("--break-decision", help="With --yes: also act against a recorded decision.")
]


@app.command("list")
def list_(job: Job = JOB_FILE, as_json: AsJson = False) -> None:
    """List the transactions in doubt of all sinks.

    Changes nothing. Exit code 0 if there are none, or only those that a running driver will resolve
    itself (open).
    """
    with coordinator_of(job, missing_storage=True) as coordinator:
        seen = find_in_doubt(store_of(coordinator), coordinator.sinks)
        about = {"job": coordinator.job, "errors": seen.errors, "set_back": seen.set_back}
        about |= {"transactions": [pending.to_json() for pending in seen.pending]} | state_of(
            seen.driver, seen.newest
        )
        show(about, as_json, transactions=_TRANSACTIONS)
        _say_errors(seen)
        answered = [
            f"{name} ({sink.system})"
            for name, sink in coordinator.sinks.items()
            if name not in seen.errors
        ]
        if answered and not seen.pending:
            lost = f"Whether one was lost: {output.runnable('coordinator resolve')}"
            tell(
                f"Nothing of job {coordinator.job!r} is in doubt in {', '.join(answered)}. {lost}",
                as_json,
            )
        missing = output.of_missing_storage(coordinator)
        if missing:
            say(missing)
        else:
            tell(f"{of_driver(seen.driver)}\n{of_newest(seen.newest)}", as_json)
        for sentence in seen.set_back:
            tell(sentence, as_json)
        _tell_remedies(coordinator, seen, as_json)
        left = any(pending.decision is not Decision.OPEN for pending in seen.pending)
        if missing or seen.set_back or seen.errors or left:
            raise typer.Exit(FINDING)


@app.command()
def commit(
    chosen: Annotated[list[str], _CHOSEN],
    break_decision: Break = False,
    yes: Yes = False,
    job: Job = JOB_FILE,
    as_json: AsJson = False,
) -> None:
    """Commit transactions that no record names.

    After checkpoint storage was lost, that is right if the target shows other rows of their
    checkpoint. Else it doubles rows, so the command asks first. `coordinator resolve` commits what
    a record names.
    """
    with coordinator_of(job, missing_storage=True) as coordinator:
        store = store_of(coordinator)
        wanted = _choose(find_in_doubt(store, coordinator.sinks), chosen, Decision.COMMIT)
        if decided := [pending for pending in wanted if pending.decision is Decision.COMMIT]:
            resolve_ = output.runnable("coordinator resolve")
            fail(
                f"A record names {_names(decided)}: {resolve_} commits it. No transaction was "
                "touched.",
                USAGE,
            )
        _require_no_twins(coordinator, wanted)
        confirm(
            f"No record names {_names(wanted)}. Its batch is written by other transactions, or "
            "will be: committing it DOUBLES its rows.",
            "double",
            given=break_decision and yes,
        )
        _report(coordinator, list(_commit(coordinator, store, wanted)), as_json)


@app.command()
def abort(
    chosen: Annotated[list[str] | None, _CHOSEN] = None,
    all_orphans: Annotated[
        bool, typer.Option("--all-orphans", help="All that no record names, or ever will.")
    ] = False,
    fence: Annotated[
        bool,
        typer.Option(
            "--fence",
            help="Claim a new generation first: a running driver stops at its next checkpoint.",
        ),
    ] = False,
    break_decision: Break = False,
    yes: Yes = False,
    job: Job = JOB_FILE,
    as_json: AsJson = False,
) -> None:
    """Abort transactions.

    Orphans are safe to abort. Transactions of the newest driver (open, stranded) need --fence,
    which shuts that driver out. Aborting a decided one, which a record names, loses decided rows
    until they are replayed, so the command asks first.
    """
    if bool(chosen) == all_orphans:
        fail(
            "Name transactions (IDs of `coordinator in-doubt list`), or give --all-orphans.", USAGE
        )
    with coordinator_of(job, missing_storage=bool(chosen)) as coordinator:
        store = store_of(coordinator)
        missing = output.of_missing_storage(coordinator)
        if missing:
            say(missing)
        seen = find_in_doubt(store, coordinator.sinks)
        wanted = _choose(seen, chosen, Decision.ORPHAN)
        if (undecided := _undecided(wanted)) and not fence:
            fail(
                f"{_names(undecided)} may belong to a driver that is about to complete its "
                f"checkpoint. {of_driver(seen.driver)} Stop it, and add --fence, which shuts it "
                "out if it still runs. No transaction was touched.",
                USAGE,
            )
        unnamed = [
            each
            for each in (wanted if chosen else seen.pending)
            if each.decision is not Decision.COMMIT
        ]
        # With --fence, more transactions may be in doubt when they are looked for again.
        if asks := bool(seen.set_back and (unnamed or (all_orphans and fence))):
            it = _names(unnamed) or "what is in doubt by then"
            confirm(
                f"{' '.join(seen.set_back)} So {it} may be decided, though no record here names "
                "it, and aborting it LOSES its rows.",
                "lose",
                given=break_decision and yes,
            )
        if fence and not missing:
            confirm(
                f"This claims a new generation of job {coordinator.job!r}: a driver of it that "
                "runs stops with Superseded at its next checkpoint, and has to be started again.",
                "fence",
                given=yes,
            )
            seen = find_in_doubt(store, coordinator.sinks, store.claim_generation())
            wanted = _choose(seen, chosen, Decision.ORPHAN)
        if (undecided := _undecided(wanted)) and not asks:
            confirm(
                f"Storage {store.storage.uri} holds no checkpoint of job {coordinator.job!r}. If "
                f"it is the wrong one, {_names(undecided)} may be decided, and aborting it LOSES "
                "its rows.",
                "lose",
                given=break_decision and yes,
            )
        if decided := [pending for pending in wanted if pending.decision is Decision.COMMIT]:
            confirm(
                f"A complete checkpoint names {_names(decided)}. Aborting it LOSES rows that are "
                "decided: the next start of the query writes them again if the source still has "
                "the same rows, else it stops (ReplayMismatch).",
                "lose",
                given=break_decision and yes,
            )
        results = list(_abort(coordinator, wanted))
        left = [pending for pending in seen.pending if pending not in wanted] if all_orphans else []
        _tell_remedies(coordinator, replace(seen, pending=left), as_json, "Not touched: ")
        _report(coordinator, results, as_json, "There is no orphan, so nothing was aborted.", left)
        if any(pending.decision is Decision.STRANDED for pending in left):
            raise typer.Exit(FINDING)


def _undecided(pending: Sequence[InDoubtTransaction]) -> list[InDoubtTransaction]:
    """List the transactions that a driver may be about to decide."""
    return [each for each in pending if each.decision in (Decision.OPEN, Decision.STRANDED)]


def _choose(
    seen: InDoubtReport, chosen: list[str] | None, otherwise: Decision
) -> list[InDoubtTransaction]:
    """List the transactions that were named, or otherwise all of one kind.

    For all of one kind, each sink has to answer.
    """
    _say_errors(seen)
    if not chosen:
        if seen.errors:
            fail("No transaction was touched, because not every sink answered.")
        return [pending for pending in seen.pending if pending.decision is otherwise]
    for text in chosen:
        if not any(pending.meant_by(text) for pending in seen.pending):
            fail(
                f"{text!r} is not in doubt (any more); see `coordinator in-doubt list`. No "
                "transaction was touched."
            )
    return [pending for pending in seen.pending if any(map(pending.meant_by, chosen))]


def _require_no_twins(
    coordinator: CheckpointCoordinator, chosen: Sequence[InDoubtTransaction]
) -> None:
    """Fail if several tries of one participant would be committed.

    Several tries may be in doubt, such as a speculative one, with the same rows or, if they were
    killed while writing, with a part of them.
    """
    named = Counter(_participant(each) for each in chosen if each.about.subtask is not None)
    visible = set[Any]()
    placed = {_participant(pending)[:3] for pending in chosen if None not in _participant(pending)}
    for name, lineage, checkpoint in placed:
        sink = coordinator.sinks[name]
        if isinstance(sink, Auditable):
            [holding] = sink.audit(
                coordinator.job, [Part(lineage, checkpoint, [])], quick=True
            ).holdings
            visible |= {
                (name, lineage, checkpoint, TransactionId.subtask_of(text))
                for text in holding.unexpected
            }
    twins = [
        each for each in chosen if _participant(each) in visible or named[_participant(each)] > 1
    ]
    if twins:
        fail(
            f"{_names(twins)}: their subtask is visible already, or named twice; another try of it "
            "has the same rows, or some of them. Commit one for each subtask, and abort the "
            "others. No transaction was touched.",
            USAGE,
        )


def _participant(pending: InDoubtTransaction) -> tuple[Any, ...]:
    about = pending.about
    return pending.sink, about.lineage, about.checkpoint, about.subtask


def _commit(
    coordinator: CheckpointCoordinator, store: JobStore, pending: Sequence[InDoubtTransaction]
) -> Iterator[tuple[InDoubtTransaction, str]]:
    """Commit transactions, those of one checkpoint and sink together.

    A table takes the last change of a key from all transactions of a checkpoint. Sinks that commit
    as one are one sink here. Yields each transaction with its result.
    """
    place_of = places(coordinator.sinks)
    parts: dict[Any, dict[str, list[InDoubtTransaction]]] = {}
    for each in pending:
        name, lineage, checkpoint, _ = _participant(each)
        part = parts.setdefault((place_of[name], lineage, checkpoint), {})
        part.setdefault(name, []).append(each)
    for (_, lineage, checkpoint), by_sink in parts.items():
        about = Checkpoint(coordinator.job, lineage or store.lineage, checkpoint or 0)
        shares = [
            (
                coordinator.sinks[name],
                [
                    Committable(each.about.transaction, sink=name, subtask=each.about.subtask or 0)
                    for each in own
                ],
            )
            for name, own in by_sink.items()
        ]
        together = list(chain(*by_sink.values()))
        outcomes: Sequence[CommitOutcome | Exception]
        try:
            outcomes = list(chain(*ask_to_commit(about, shares)))
        except Exception as error:
            outcomes = [error] * len(together)
        for each, outcome in zip(together, outcomes, strict=True):
            if isinstance(outcome, Exception):
                yield each, f"failed: {outcome}"
            else:
                yield (
                    each,
                    f"{outcome.state.value}: {outcome.reason}"
                    if outcome.reason
                    else outcome.state.value,
                )


def _abort(
    coordinator: CheckpointCoordinator, pending: Sequence[InDoubtTransaction]
) -> Iterator[tuple[InDoubtTransaction, str]]:
    with progress("abort", len(pending), "transactions") as advance:
        for each in pending:
            try:
                coordinator.sinks[each.sink].abort(each.about.transaction)
                yield each, "aborted"
            except Exception as error:
                yield each, f"failed: {error}"
            advance(1)


def _names(several: Sequence[InDoubtTransaction]) -> str:
    return ", ".join(
        f"{pending.id} (sink {pending.sink!r}, checkpoint {pending.about.checkpoint})"
        for pending in several
    )


_TRANSACTIONS: output.Columns = {
    **{name: name for name in ("id", "sink", "decision", "checkpoint", "subtask", "generation")},
    "age": lambda row: duration(row["age"]),
    "transaction": lambda row: shown(row["transaction"]),
}


def _tell_remedies(
    coordinator: CheckpointCoordinator, seen: InDoubtReport, as_json: bool, before: str = ""
) -> None:
    """Tell what becomes of each kind of transaction, and the command that settles it."""
    wrong = ""
    if not seen.newest:
        wrong = (
            f" (Be sure of the storage: {coordinator.storage.uri} holds no checkpoint of the job.)"
        )
    for remedy in remedies(seen):
        unsure = wrong if remedy.decision is Decision.STRANDED else ""
        command = output.runnable(remedy.command)
        tell(
            f"{before}{remedy.count} {remedy.decision.value}: {remedy.what}: {command}{unsure}",
            as_json,
        )


def _say_errors(seen: InDoubtReport) -> None:
    for sink, error in seen.errors.items():
        say(f"sink {sink!r} cannot tell: {error}")


def _report(
    coordinator: CheckpointCoordinator,
    results: list[tuple[InDoubtTransaction, str]],
    as_json: bool,
    nothing: str = "",
    left: Sequence[InDoubtTransaction] = (),
) -> None:
    if not results:
        tell(nothing, as_json)
    show(
        {
            "job": coordinator.job,
            "results": [pending.to_json() | {"result": result} for pending, result in results],
            "not_touched": [pending.to_json() for pending in left],
        },
        as_json,
        results={
            "id": "id",
            "sink": "sink",
            "transaction": _TRANSACTIONS["transaction"],
            "result": "result",
        },
    )
    if any(result not in ("committed", "aborted") for _, result in results):
        raise typer.Exit(FINDING)


# ---------------------------------------------------------------------- lost and unknown
def resolve(
    accept_loss: Annotated[
        list[str] | None,
        typer.Option(
            "--accept-loss",
            metavar="SINK/SUBTASK",
            help="Go on without this participant, or `all`.",
        ),
    ] = None,
    why: Annotated[str, typer.Option("--why", help="The reason, stored with the checkpoint.")] = "",
    who: Annotated[
        str,
        typer.Option("--who", help="Who decides, stored with the checkpoint. Default: the login."),
    ] = "",
    yes: Yes = False,
    job: Job = JOB_FILE,
    as_json: AsJson = False,
) -> None:
    """Commit what is decided, then show lost and unknown transactions.

    Only --accept-loss gives rows up.

    It commits the newest complete checkpoint, as the next start of the query would. That start
    writes lost rows again if the source still gives the same ones. Use this command if it does not
    (ReplayMismatch), or if the outcome of a transaction is unknown (InDoubtError).
    """
    if accept_loss and not why:
        fail("Give the reason: --why TEXT. It is stored with the checkpoint.", USAGE)
    with coordinator_of(job) as coordinator:
        store = store_of(coordinator)
        if not store.load_newest():
            _fail_without_checkpoint(store)
        seen = find_in_doubt(store, coordinator.sinks)
        protocol = operator_decisions.protocol_of(store, coordinator.sinks, coordinator.config)
        complete, errors = _ask(protocol)
        for sentence in seen.set_back:
            tell(sentence, as_json)
        if accept_loss:
            if errors:
                fail(f"{_unanswered(coordinator, complete, errors)} Nothing was given up.")
            chosen = _chosen(complete, accept_loss)
            rows = sum(
                complete.committables[participant].fingerprint.rows for participant in chosen
            )
            confirm(
                f"Job {coordinator.job!r} goes on WITHOUT {rows} row(s) of checkpoint "
                f"{complete.checkpoint_id}, of "
                f"{', '.join(f'{sink}/{subtask}' for sink, subtask in chosen)}. It is not "
                "exactly-once for them. This claims a new generation: a driver that runs stops "
                "with Superseded.",
                "accept loss",
                given=yes,
            )
            operator_decisions.accept_loss(
                protocol, chosen, who=who or f"{_login()}@{socket.gethostname()}", why=why
            )
            complete, errors = _ask(protocol)
        about = _about(complete, errors)
        decided = {
            (pending.sink, pending.committable.subtask)
            for pending in seen.pending
            if pending.committable
        }
        about["committed_now"] = len(
            decided & complete.committables.keys() - set(complete.hidden_participants())
        )
        count = len(complete.committables)
        visible = about["visible"]
        known = (
            f"{visible} of {count} participants are visible"
            if visible or not errors
            else "see below"
        )
        tell(
            f"Checkpoint {complete.checkpoint_id}, complete {ago(complete.record.completed_at)}: "
            f"{known}.",
            as_json,
        )
        if about["committed_now"]:
            tell(f"Committed {about['committed_now']} now.", as_json)
        columns = {name: name for name in ("participant", "outcome", "rows", "reason")}
        show(about, as_json, given_up=LOSSES, participants=columns)
        if errors:
            say(_unanswered(coordinator, complete, errors))
        elif about["participants"]:
            tell(_choices(complete), as_json)
        undecided = [pending for pending in seen.pending if not pending.committable]
        _tell_remedies(coordinator, replace(seen, pending=undecided), as_json, "Not touched: ")
        older = [
            other
            for other in seen.pending
            if other.committable and other.about.checkpoint != complete.checkpoint_id
        ]
        if older:
            tell(
                f"Not touched: {_names(older)}, of a checkpoint before the newest: the system was "
                "set back. Start the query, which commits it, or says what else is missing.",
                as_json,
            )
        if errors or older or _missing(complete) or (seen.set_back and not accept_loss):
            raise typer.Exit(FINDING)


def _ask(
    protocol: CheckpointProtocol,
) -> tuple[CompletedCheckpoint, Mapping[Participant, Exception]]:
    complete, errors = operator_decisions.ask(protocol)
    if complete is None:  # the storage was emptied, or set back, since it was read first
        _fail_without_checkpoint(protocol.store)
    return complete, errors


def _fail_without_checkpoint(store: JobStore) -> NoReturn:
    fail(
        f"Job {store.job!r} has no checkpoint in {store.storage.uri}; see `coordinator in-doubt "
        "list`."
    )


def _login() -> str:
    """Return the name of the user, or the number where it has no name, as in many containers."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def _about(
    complete: CompletedCheckpoint, errors: Mapping[Participant, Exception]
) -> dict[str, Any]:
    """Return the JSON values of the checkpoint.

    `participants` has those that are not visible.
    """

    def about(participant: Participant) -> dict[str, Any]:
        committable = complete.committables[participant]
        outcome = complete.outcomes.get(participant)
        return {
            "participant": "{}/{}".format(*participant),
            "outcome": outcome.state.value if outcome else "cannot tell",
            "reason": outcome.reason if outcome else str(errors.get(participant, "")),
            "rows": committable.fingerprint.rows,
            "transaction": dict(committable.transaction),
        }

    hidden = [about(participant) for participant in complete.hidden_participants()]
    return {
        "job": complete.record.job,
        "checkpoint": complete.checkpoint_id,
        "offsets": list(complete.record.offsets),
        "visible": len(complete.committables) - len(hidden),
        "participants": hidden,
        "given_up": losses_of(complete.rounds),
    }


def _unanswered(
    coordinator: CheckpointCoordinator,
    complete: CompletedCheckpoint,
    errors: Mapping[Participant, Exception],
) -> str:
    """Return a sentence on the missing answers, and that nothing follows from them."""
    systems = {name: coordinator.sinks[name].system for name, _ in errors}
    asked = ", ".join(f"{system} (sink {name!r})" for name, system in systems.items())
    return (
        f"Cannot tell what became of {len(errors)} of {len(complete.committables)} participants of "
        f"checkpoint {complete.checkpoint_id}: bring {asked} back, or fix what it says, and ask "
        "again. Nothing is known to be lost: what is decided stays decided, and the next start of "
        "the query commits it."
    )


def _missing(complete: CompletedCheckpoint) -> dict[str, Participant]:
    """Return the lost and unknown participants, by the names that an operator uses."""
    outcomes = complete.outcomes.items()
    return {
        f"{sink}/{subtask}": (sink, subtask)
        for (sink, subtask), outcome in outcomes
        if outcome.state in _MISSING
    }


def _chosen(complete: CompletedCheckpoint, wanted: list[str]) -> list[Participant]:
    missing = _missing(complete)
    if wanted == ["all"]:
        wanted = list(missing)
    if not wanted:
        fail("Nothing is lost or unknown. Nothing was changed.")
    if strangers := [text for text in wanted if text not in missing]:
        fail(f"Neither lost nor unknown: {', '.join(strangers)}. Nothing was changed.", USAGE)
    return [missing[text] for text in wanted]


def _choices(complete: CompletedCheckpoint) -> str:
    offsets = ", ".join(complete.record.offsets)
    choices = [
        f"Start the query again: it writes lost transactions again from the same input, {offsets}. "
        "If that gives other rows by now, it stops (ReplayMismatch)."
    ]
    if any(outcome.state is CommitState.UNKNOWN for outcome in complete.outcomes.values()):
        choices.append(
            "unknown: look for the rows in the target; commit or roll back the transaction there, "
            "then start."
        )
    if missing := _missing(complete):
        accepted = list(missing) if len(missing) <= _NAMED else ["all"]
        named = " ".join(f"--accept-loss {participant}" for participant in accepted)
        choices.append(
            f"Go on without them: {output.runnable(f'coordinator resolve {named} --why REASON')}"
        )
    return "\n".join(
        ["Choices:", *(f"  {number}. {text}" for number, text in enumerate(choices, 1))]
    )
