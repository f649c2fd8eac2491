"""`coordinator in-doubt`: pre-committed transactions whose outcome the external systems have not been told yet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import typer

from coordinator.cli import output
from coordinator.cli.output import FINDING, JOB_FILE, USAGE, AsJson, Job, Yes, confirm, coordinator_of, fail, say, show
from coordinator.cli.status import state_of
from coordinator.coordinator import CheckpointCoordinator
from coordinator.errors import Superseded
from coordinator.operate.in_doubt import Decision, Pending, Seen, look, remedies
from coordinator.operate.memories import set_back
from coordinator.operate.text import duration, of_driver, of_newest
from coordinator.protocol import operators
from coordinator.protocol.protocol import CheckpointProtocol
from sinks.progress import progress
from sinks.transaction import Checkpoint, CommitOutcome, CommitState, Committable, shown

app = typer.Typer(help="Show and settle pre-committed transactions that are not resolved yet.", no_args_is_help=True)


Chosen = Annotated[
    list[str] | None, typer.Argument(metavar="[ID]...", help="IDs from `list`, or names in the target (a gid, …).")
]
Break = Annotated[bool, typer.Option("--break-decision", help="With --yes: also act against a recorded decision.")]


Fence = Annotated[
    bool,
    typer.Option(
        "--fence", help="Claim a new generation first: a running driver of this job stops at its next checkpoint."
    ),
]


@app.command("list")
def list_(job: Job = JOB_FILE, as_json: AsJson = False) -> None:
    """List the transactions in doubt of all sinks. Changes nothing. Exit code 0 if there are none, or only those that a
    running driver will resolve itself (open)."""
    with coordinator_of(job, missing_storage=True) as coordinator:
        seen = look(coordinator.protocol.store, coordinator.sinks)
        about = {"job": coordinator.job} | state_of(seen.driver, seen.rounds)
        about |= {"transactions": [pending.to_json() for pending in seen.pending], "errors": seen.errors}
        show(about, as_json, transactions=_TRANSACTIONS)
        _say_errors(seen)
        answered = [f"{name} ({sink.system})" for name, sink in coordinator.sinks.items() if name not in seen.errors]
        if answered and not seen.pending:
            say(f"Nothing of job {coordinator.job!r} is in doubt in {', '.join(answered)}.")
        missing = output.of_missing_storage(coordinator)
        say(missing or of_driver(seen.driver))
        if not missing:
            say(of_newest(seen.rounds))
        say_remedies(coordinator, seen)
        was_set_back = say_set_back(coordinator)
        left = any(pending.decision is not Decision.OPEN for pending in seen.pending)
        if missing or was_set_back or seen.errors or left:
            raise typer.Exit(FINDING)


@app.command()
def commit(
    chosen: Chosen = None,
    all_decided: Annotated[
        bool, typer.Option("--all-decided", help="All that a record names: the decided ones.")
    ] = False,
    break_decision: Break = False,
    yes: Yes = False,
    job: Job = JOB_FILE,
    as_json: AsJson = False,
) -> None:
    """Commit transactions. A decided one, which a record names, is committed with its whole checkpoint, as at the next
    start of the query. Committing any other doubles its rows, so the command asks first."""
    _require_choice(chosen, all_decided)
    with coordinator_of(job, missing_storage=bool(chosen)) as coordinator:
        protocol = coordinator.protocol
        wanted = _choose(look(protocol.store, protocol.sinks), chosen, Decision.COMMIT)
        if strangers := [pending for pending in wanted if pending.decision is not Decision.COMMIT]:
            confirm(
                f"No record names {_names(strangers)}. Its batch is written by other transactions, or will be: "
                "committing it DOUBLES its rows.",
                "double",
                given=break_decision and yes,
            )
        results = [*_commit_decided(protocol, wanted), *_commit_strangers(protocol, wanted)]
        _report(coordinator, results, as_json, "Nothing is decided and still in doubt, so nothing was committed.")


@app.command()
def abort(
    chosen: Chosen = None,
    all_orphans: Annotated[bool, typer.Option("--all-orphans", help="All that no record names, or ever will.")] = False,
    fence: Fence = False,
    break_decision: Break = False,
    yes: Yes = False,
    job: Job = JOB_FILE,
    as_json: AsJson = False,
) -> None:
    """Abort transactions. Orphans are safe to abort. Transactions of the newest driver (open, stranded) need --fence,
    which shuts that driver out. Aborting a decided one, which a record names, loses rows, so the command asks first."""
    _require_choice(chosen, all_orphans)
    with coordinator_of(job, missing_storage=bool(chosen)) as coordinator:
        protocol = coordinator.protocol
        missing = output.of_missing_storage(coordinator)
        if missing:
            say(missing)
        elif fence:
            confirm(
                f"This claims a new generation of job {coordinator.job!r}: a driver of it that runs stops with "
                "Superseded at its next checkpoint, and has to be started again.",
                "fence",
                given=yes,
            )
        claimed = protocol.store.claim_generation() if fence and not missing else None
        seen = look(protocol.store, protocol.sinks, claimed)
        wanted = _choose(seen, chosen, Decision.ORPHAN)
        undecided = [pending for pending in wanted if pending.decision in (Decision.OPEN, Decision.STRANDED)]
        if undecided and fence:
            confirm(
                f"Storage {coordinator.protocol.store.storage.uri} holds no checkpoint of job {coordinator.job!r}. If "
                f"it is the wrong one, {_names(undecided)} may be decided, and aborting it LOSES its rows.",
                "lose",
                given=break_decision and yes,
            )
        elif undecided:
            fail(
                f"{_names(undecided)} may belong to a driver that is about to complete its checkpoint. "
                f"{of_driver(seen.driver)} Stop it, and add --fence, which shuts it out if it still runs. "
                "No transaction was touched.",
                USAGE,
            )
        if decided := [pending for pending in wanted if pending.decision is Decision.COMMIT]:
            confirm(
                f"A complete checkpoint names {_names(decided)}. Aborting it LOSES rows that are decided: the next "
                "start of the query writes them again if the source still has the same rows, else it "
                "stops (ReplayMismatch).",
                "lose",
                given=break_decision and yes,
            )
        results = list(_abort(protocol, wanted))
        left = [pending for pending in seen.pending if pending not in wanted] if all_orphans else []
        say_remedies(coordinator, replace(seen, pending=left), "Not touched: ")
        _report(coordinator, results, as_json, "There is no orphan, so nothing was aborted.", left)
        if any(pending.decision is Decision.STRANDED for pending in left):
            raise typer.Exit(FINDING)


def _require_choice(chosen: list[str] | None, all_of_them: bool) -> None:
    if bool(chosen) == all_of_them:
        fail("Name transactions (IDs of `coordinator in-doubt list`), or give the option for all.", USAGE)


def _choose(seen: Seen, chosen: list[str] | None, otherwise: Decision) -> list[Pending]:
    """Those that were named, else all of one kind, which takes that each sink can tell."""
    _say_errors(seen)
    if not chosen:
        if seen.errors:
            fail("No transaction was touched, because not every sink answered.")
        return [pending for pending in seen.pending if pending.decision is otherwise]
    for text in chosen:
        if not any(pending.meant_by(text) for pending in seen.pending):
            fail(f"{text!r} is not in doubt (any more); see `coordinator in-doubt list`. No transaction was touched.")
    return [pending for pending in seen.pending if any(map(pending.meant_by, chosen))]


def _commit_decided(protocol: CheckpointProtocol, wanted: list[Pending]) -> Iterable[tuple[Pending, str]]:
    """The checkpoint goes as a whole: an upsert may not become visible before another that it follows."""
    mine = [pending for pending in wanted if pending.decision is Decision.COMMIT]
    if not mine:
        return
    complete, errors = operators.ask(protocol)
    assert complete
    for pending in mine:
        assert pending.named
        if pending.about.checkpoint != complete.checkpoint_id:
            yield (
                pending,
                f"failed: of checkpoint {pending.about.checkpoint}, before the newest: the system was set back. Start "
                "the query, which commits it, or says what else is missing",
            )
            continue
        participant = pending.sink, pending.named.subtask
        outcome = complete.outcomes.get(participant)
        if complete.named.get(participant) != pending.named:
            raise Superseded(f"{pending.id} was replaced meanwhile; look again")
        yield pending, _text_of(outcome) if outcome else f"failed: {errors.get(participant)}"


def _commit_strangers(protocol: CheckpointProtocol, wanted: list[Pending]) -> Iterable[tuple[Pending, str]]:
    """Commit what no record names."""
    for pending in wanted:
        if pending.decision is Decision.COMMIT:
            continue
        committable = Committable(pending.about.transaction, sink=pending.sink, subtask=pending.about.subtask or 0)
        about = Checkpoint(protocol.job, protocol.store.lineage, pending.about.checkpoint or 0)
        try:
            (outcome,) = protocol.sinks[pending.sink].notify_checkpoint_complete(about, [committable])
        except Exception as error:
            outcome = error
        yield pending, f"failed: {outcome}" if isinstance(outcome, Exception) else _text_of(outcome)


def _abort(protocol: CheckpointProtocol, wanted: list[Pending]) -> Iterable[tuple[Pending, str]]:
    with progress("abort", len(wanted), "transactions") as advance:
        for pending in wanted:
            try:
                protocol.sinks[pending.sink].abort(pending.about.transaction)
                yield pending, "aborted"
            except Exception as error:
                yield pending, f"failed: {error}"
            advance(1)


def _text_of(outcome: CommitOutcome) -> str:
    return outcome.state.value if outcome.state is CommitState.COMMITTED else f"{outcome.state.value}: {outcome.reason}"


def _names(several: Sequence[Pending]) -> str:
    return ", ".join(
        f"{pending.id} (sink {pending.sink!r}, checkpoint {pending.about.checkpoint})" for pending in several
    )


def _known(name: str, row: Mapping[str, Any]) -> Any:
    return "?" if row[name] is None else row[name]


_TRANSACTIONS: output.Columns = {
    **{name: name for name in ("id", "sink", "decision")},
    **{name: partial(_known, name) for name in ("checkpoint", "subtask", "generation")},
    "age": lambda row: duration(row["age"]),
    "transaction": lambda row: shown(row["transaction"]),
}


def say_remedies(coordinator: CheckpointCoordinator, seen: Seen, before: str = "") -> None:
    """What becomes of each kind, and the command for it."""
    wrong = ""
    if not seen.rounds:
        wrong = f" (Be sure of the storage: {coordinator.protocol.store.storage.uri} holds no checkpoint of the job.)"
    for remedy in remedies(seen):
        unsure = wrong if remedy.decision is Decision.STRANDED else ""
        command = output.runnable(remedy.command)
        say(f"{before}{remedy.count} {remedy.decision.value}: {remedy.what}: {command}{unsure}")


def say_set_back(coordinator: CheckpointCoordinator) -> bool:
    """Whether a sink remembers other checkpoints than storage; says which."""
    sentences = set_back(coordinator.protocol.store, coordinator.sinks)
    for sentence in sentences:
        say(sentence)
    return bool(sentences)


def _say_errors(seen: Seen) -> None:
    for sink, error in seen.errors.items():
        say(f"sink {sink!r} cannot tell: {error}")


def _report(
    coordinator: CheckpointCoordinator,
    results: list[tuple[Pending, str]],
    as_json: bool,
    nothing: str,
    left: Sequence[Pending] = (),
) -> None:
    if not results:
        say(nothing)
    show(
        {
            "job": coordinator.job,
            "results": [pending.to_json() | {"result": result} for pending, result in results],
            "not_touched": [pending.to_json() for pending in left],
        },
        as_json,
        results={"id": "id", "sink": "sink", "transaction": _TRANSACTIONS["transaction"], "result": "result"},
    )
    if any(result not in ("committed", "aborted") for _, result in results):
        raise typer.Exit(FINDING)
