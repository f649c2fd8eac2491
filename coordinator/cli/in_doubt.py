"""`coordinator in-doubt`: pre-committed transactions whose outcome the external systems have not been told yet."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Annotated, Any

import typer

from coordinator.cli.memories import set_back
from coordinator.cli.output import (
    FOUND,
    JOB_FILE,
    USAGE,
    AsJson,
    Fence,
    Job,
    Yes,
    confirm,
    duration,
    fail,
    of_missing_storage,
    opened,
    say,
    show_json,
    show_table,
)
from coordinator.cli.status import driver_json, newest_json, of_driver, of_newest
from coordinator.coordinator import CheckpointCoordinator
from coordinator.errors import Superseded, reason
from coordinator.heartbeat import Driver, State, look_for_driver
from coordinator.protocol import operators
from coordinator.protocol.decisions import Complete
from coordinator.protocol.records import Record
from coordinator.storage import MissingStorage
from sinks.base import TwoPhaseCommitSink
from sinks.diagnosis import InDoubt
from sinks.transaction import Checkpoint, CommitOutcome, CommitState, Committable, shown, unnamed

app = typer.Typer(help="Transactions that are pre-committed and not yet resolved.", no_args_is_help=True)


class Decision(str, Enum):
    COMMIT = "commit"  # a complete record names it
    ORPHAN = "orphan"  # no record names it, and none will
    OPEN = "open"  # no record names it yet: of the newest driver, which runs
    STRANDED = "stranded"  # as open, but no driver gives signs of life that could still complete its checkpoint


@dataclass(frozen=True)
class Pending:
    """A transaction in doubt and what is decided about it. `named` is its committable in the record."""

    sink: str
    about: InDoubt
    decision: Decision
    named: Committable | None = None

    @property
    def id(self) -> str:
        text = json.dumps([self.sink, dict(self.about.transaction)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:10]

    def meant_by(self, text: str) -> bool:
        """Whether an operator's argument is this one's id, or a name that the external system shows."""
        return text == self.id or text in [str(value) for value in self.about.transaction.values()]

    def to_json(self) -> dict[str, Any]:
        about = asdict(self.about)
        return {"id": self.id, "sink": self.sink, "decision": self.decision.value, **about}


Chosen = Annotated[list[str] | None, typer.Argument(metavar="[ID]...", help="IDs of `list`, or names (a gid, …).")]
Break = Annotated[
    bool, typer.Option("--break-decision", help="With --yes: also do what the records have decided otherwise.")
]


@app.command("list")
def list_(job: Job = JOB_FILE, as_json: AsJson = False) -> None:
    """All of them, over all sinks of the job. Reads only. Exit code 1 if there is one, or a sink cannot tell; only
    those of a driver that runs are no finding."""
    with opened(job, missing_storage=True) as coordinator:
        seen = look(coordinator)
        if as_json:
            about = {"job": coordinator.job} | driver_json(seen.driver) | newest_json(seen.rounds)
            show_json(about | {"transactions": [one.to_json() for one in seen.found], "errors": seen.errors})
        else:
            _show(coordinator, seen)
        other_memories = set_back(coordinator)
        for memory in other_memories:
            say(memory)
        missing = isinstance(coordinator.protocol.store.storage, MissingStorage)
        if missing or other_memories or seen.errors or any(one.decision is not Decision.OPEN for one in seen.found):
            raise typer.Exit(FOUND)


@app.command()
def commit(
    chosen: Chosen = None,
    all_decided: Annotated[bool, typer.Option("--all-decided", help="All that a record names.")] = False,
    break_decision: Break = False,
    yes: Yes = False,
    job: Job = JOB_FILE,
    as_json: AsJson = False,
) -> None:
    """Commit transactions. One that a record names is committed with its whole checkpoint, as the next start of the
    query would. Committing another doubles its rows, so that asks first."""
    _require_one(chosen, all_decided)
    with opened(job) as coordinator:
        wanted = _choose(look(coordinator), chosen, Decision.COMMIT)
        if strangers := [one for one in wanted if one.decision is not Decision.COMMIT]:
            confirm(
                f"No record names {_names(strangers)}. Its batch is written by other transactions, or will be: "
                "committing it DOUBLES its rows.",
                "double",
                given=break_decision and yes,
            )
        results = [*_commit_decided(coordinator, wanted), *_commit_strangers(coordinator, strangers)]
        _report(coordinator, results, as_json, "Nothing is decided and still in doubt, so nothing was committed.")


@app.command()
def abort(
    chosen: Chosen = None,
    all_orphans: Annotated[bool, typer.Option("--all-orphans", help="All that no record names or will name.")] = False,
    fence: Fence = False,
    break_decision: Break = False,
    yes: Yes = False,
    job: Job = JOB_FILE,
    as_json: AsJson = False,
) -> None:
    """Abort transactions. Orphans hold locks and resources, and are for nothing. Those of the newest driver (open) are
    orphans if it is dead: --fence makes sure of that. Aborting what a record names loses decided rows, so that asks."""
    _require_one(chosen, all_orphans)
    with opened(job) as coordinator:
        claimed = None
        if fence:
            confirm(
                f"This claims a new generation of job {coordinator.job!r}: a driver of it that runs stops with "
                "Superseded at its next checkpoint, and has to be started again.",
                "fence",
                given=yes,
            )
            claimed = coordinator.protocol.store.claim_generation()
        seen = look(coordinator, claimed)
        wanted = _choose(seen, chosen, Decision.ORPHAN)
        undecided = [one for one in wanted if one.decision in (Decision.OPEN, Decision.STRANDED)]
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
                f"{of_driver(seen.driver)} Stop it, and say --fence, which stops it for good if it still runs. No "
                "transaction was touched.",
                USAGE,
            )
        if decided := [one for one in wanted if one.decision is Decision.COMMIT]:
            confirm(
                f"A complete checkpoint names {_names(decided)}. Aborting it LOSES rows that are decided: the next "
                "start of the query writes them again if the source still has the same rows, else it "
                "stops (ReplayMismatch).",
                "lose",
                given=break_decision and yes,
            )
        results = []
        for one in wanted:
            try:
                coordinator.sinks[one.sink].abort(one.about.transaction)
                results.append((one, "aborted"))
            except Exception as error:
                results.append((one, f"failed: {error}"))
        left = [one for one in seen.found if one not in wanted] if all_orphans else []
        _report(coordinator, results, as_json, "There is no orphan, so nothing was aborted.", left)
        if not as_json:
            say_left(coordinator, replace(seen, found=left), "Not touched: ")
        if any(one.decision is Decision.STRANDED for one in left):
            raise typer.Exit(FOUND)


@dataclass(frozen=True)
class Seen:
    """What is in doubt, what keeps a sink from telling, the driver, and the newest checkpoint."""

    found: Sequence[Pending]
    errors: Mapping[str, str]
    driver: Driver | None
    rounds: Sequence[Record]


def look(coordinator: CheckpointCoordinator, claimed: int | None = None) -> Seen:
    """Generation and records are read after the sinks, so that a decision that was made meanwhile is seen. `claimed`:
    the generation of this process; while it is the newest, no driver may complete anything. Raises Superseded if it is
    not."""
    listed: dict[str, Sequence[InDoubt]] = {}
    errors: dict[str, str] = {}
    for name, sink in coordinator.sinks.items():
        try:
            sink.open()
            listed[name] = sink.inspect(list(sink.in_doubt(coordinator.job)))
        except Exception as error:
            errors[name] = reason(error)
    store = coordinator.protocol.store
    generation, history = store.newest_generation(), store.history()
    if claimed is not None and generation != claimed:
        raise Superseded(f"a driver of job {coordinator.job!r} (generation {generation}) has started just now")
    retained = [Complete(rounds) for rounds in reversed(history)]
    driver = look_for_driver(store)
    found = [
        _judged(sink, about, retained, generation, driver, fenced=claimed is not None)
        for sink, abouts in listed.items()
        for about in abouts
    ]
    return Seen(found, errors, driver, history[-1] if history else ())


def _judged(
    sink: str, about: InDoubt, retained: Sequence[Complete], generation: int, driver: Driver | None, *, fenced: bool
) -> Pending:
    """`retained`: the newest checkpoint first. One before it is in doubt where the system was set back (R16)."""
    undecided = Decision.OPEN if driver and driver.state is State.RUNNING else Decision.STRANDED
    if not retained:  # it may be the wrong storage
        return Pending(sink, about, undecided)
    for complete in retained:
        for named in complete.named.values():
            if named.sink == sink and not unnamed([about.transaction], [named.transaction]):
                n, lineage = complete.checkpoint_id, complete.record.lineage
                about = replace(about, checkpoint=n, lineage=lineage, subtask=named.subtask)
                return Pending(sink, about, Decision.COMMIT, named)
    record = retained[0].record
    older = about.generation is not None and about.generation < generation
    settled = about.checkpoint is not None and about.checkpoint <= record.checkpoint_id and not about.round
    abandoned = about.lineage is not None and about.lineage != record.lineage
    return Pending(sink, about, Decision.ORPHAN if fenced or older or settled or abandoned else undecided)


def _require_one(chosen: list[str] | None, all_of_them: bool) -> None:
    if bool(chosen) == all_of_them:
        fail("Name transactions (IDs of `coordinator in-doubt list`), or give the option for all.", USAGE)


def _choose(seen: Seen, chosen: list[str] | None, otherwise: Decision) -> list[Pending]:
    """Those that were named, else all of one kind, which takes that each sink can tell."""
    _say_errors(seen)
    if not chosen:
        if seen.errors:
            fail("No transaction was touched: not every sink can tell.")
        return [one for one in seen.found if one.decision is otherwise]
    wanted: list[Pending] = []
    for text in chosen:
        meant = [one for one in seen.found if one.meant_by(text)]
        if not meant:
            fail(f"{text!r} is not in doubt (any more); see `coordinator in-doubt list`. No transaction was touched.")
        wanted += [one for one in meant if one not in wanted]
    return wanted


def _commit_decided(coordinator: CheckpointCoordinator, wanted: list[Pending]) -> Iterable[tuple[Pending, str]]:
    """The checkpoint goes as a whole: an upsert may not become visible before another that it follows."""
    mine = [one for one in wanted if one.decision is Decision.COMMIT]
    if not mine:
        return
    complete, errors = operators.ask(coordinator.protocol)
    assert complete
    for one in mine:
        assert one.named
        if one.about.checkpoint != complete.checkpoint_id:
            yield (
                one,
                f"failed: of checkpoint {one.about.checkpoint}, before the newest: the system was set back. Start the "
                "query, which commits it, or says what else is missing",
            )
            continue
        participant = one.sink, one.named.subtask
        outcome = complete.outcomes.get(participant)
        if complete.named.get(participant) != one.named:
            raise Superseded(f"{one.id} was replaced meanwhile; look again")
        yield one, _told(outcome) if outcome else f"failed: {errors.get(participant)}"


def _commit_strangers(coordinator: CheckpointCoordinator, strangers: list[Pending]) -> Iterable[tuple[Pending, str]]:
    """Commit what no record names."""
    for one in strangers:
        sink: TwoPhaseCommitSink[Any] = coordinator.sinks[one.sink]
        committable = Committable(one.about.transaction, sink=one.sink, subtask=one.about.subtask or 0)
        about = Checkpoint(coordinator.job, coordinator.protocol.store.lineage, one.about.checkpoint or 0)
        try:
            (outcome,) = sink.notify_checkpoint_complete(about, [committable])
        except Exception as error:
            outcome = error
        yield one, f"failed: {outcome}" if isinstance(outcome, Exception) else _told(outcome)


def _told(outcome: CommitOutcome) -> str:
    return outcome.state.value if outcome.state is CommitState.COMMITTED else f"{outcome.state.value}: {outcome.reason}"


def _names(pending: Sequence[Pending]) -> str:
    return ", ".join(f"{one.id} (sink {one.sink!r}, checkpoint {one.about.checkpoint})" for one in pending)


def _show(coordinator: CheckpointCoordinator, seen: Seen) -> None:
    if seen.found:
        show_table(
            ["id", "sink", "decision", "checkpoint", "subtask", "generation", "age", "transaction"],
            [
                [
                    one.id,
                    one.sink,
                    one.decision.value,
                    "?" if one.about.checkpoint is None else one.about.checkpoint,
                    "?" if one.about.subtask is None else one.about.subtask,
                    "?" if one.about.generation is None else one.about.generation,
                    duration(one.about.age),
                    shown(one.about.transaction),
                ]
                for one in seen.found
            ],
        )
    _say_errors(seen)
    if not seen.found:
        told = [f"{name} ({sink.system})" for name, sink in coordinator.sinks.items() if name not in seen.errors]
        if told:
            say(f"Nothing of job {coordinator.job!r} is in doubt in {', '.join(told)}.")
    if missing := of_missing_storage(coordinator):
        say(missing)
    else:
        say(of_driver(seen.driver))
        say(of_newest(seen.rounds))
    say_left(coordinator, seen)


def say_left(coordinator: CheckpointCoordinator, seen: Seen, before: str = "") -> None:
    """What becomes of each kind, and the command for it."""
    counted = Counter(one.decision for one in seen.found)
    fenced, wrong = "in-doubt abort --all-orphans --fence", ""
    if not seen.rounds:
        fenced = "in-doubt abort ID --fence"
        wrong = f" (Be sure of the storage: {coordinator.protocol.store.storage.uri} holds no checkpoint of the job.)"
    for decision, what in (
        (
            Decision.COMMIT,
            "decided: the next start of the query commits them; at once: coordinator in-doubt commit --all-decided",
        ),
        (
            Decision.ORPHAN,
            "of a driver that was replaced: the next sweep of a driver aborts them; at once: coordinator "
            "in-doubt abort --all-orphans",
        ),
        (
            Decision.STRANDED,
            "no record names them, and no driver is seen that could complete their checkpoint. They hold their locks "
            f"until the query is started again, which aborts them; at once: coordinator {fenced}{wrong}",
        ),
        (
            Decision.OPEN,
            "of the driver that runs, which completes or aborts them. If that is stuck, stop it, and: "
            f"coordinator {fenced}",
        ),
    ):
        if counted[decision]:
            say(f"{before}{counted[decision]} {decision.value}: {what}")


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
    if as_json:
        told = [one.to_json() | {"result": told} for one, told in results]
        show_json({"job": coordinator.job, "results": told, "not_touched": [one.to_json() for one in left]})
    elif results:
        rows = [[one.id, one.sink, shown(one.about.transaction), told] for one, told in results]
        show_table(["id", "sink", "transaction", "result"], rows)
    else:
        say(nothing)
    if any(told not in ("committed", "aborted") for _, told in results):
        raise typer.Exit(FOUND)
