"""What is right, without the library's own rules.

The judge looks at the memories, and asks what becomes of each row if a driver takes them as they are and continues:
the rows that are visible, with the rows that retained records name and the target still has prepared, with those that
are provably lost and come again with the batch that Spark asks for, and with all later input. If that is each row
once, and Spark's log fits the newest record, a driver that refuses to continue is wrong. Otherwise a refusal is right,
however the library words it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from typer import Exit

from coordinator.errors import CheckpointError
from coordinator.operations.savepoints.savepoint import MARK
from coordinator.storage import StorageError
from tests.simulation.requests import Asked
from tests.simulation.scheduler import Process
from tests.simulation.spark import SimQuery, end_of, newest_batch
from tests.simulation.targets import KEPT, SimSink, ids_for
from tests.simulation.world import SAVEPOINTS, STORAGE, Unreachable, World, id_of, name_of, short


class Verdict(NamedTuple):
    continues: bool
    """Whether a driver that takes the memories as they are makes each row visible once."""
    why: str


def judge(world: World) -> Verdict:
    store = world.job_store()
    try:
        newest = store.load_newest()
        history = store.history() if newest else []
    except (CheckpointError, StorageError) as error:
        return Verdict(False, f"storage cannot be read: {type(error).__name__}")
    files = world.location(world.location_name).values
    planned = newest_batch(files, "offsets")
    asked_for = planned + (f"commits/{planned}" in files) if planned >= 0 else 0
    if asked_for and f"offsets/{asked_for - 1}" not in files:
        return Verdict(False, f"Spark's log has batch {asked_for}, and not the one before")
    if newest is None:
        return _without_record(world, asked_for)
    if why := _misfit(files, newest, asked_for) or _other_setup(world, newest):
        return Verdict(False, why)
    if world.causes["rows deleted"] and world.was_restored:
        return Verdict(False, "rows were deleted by hand, and the target's memory tells nothing of that")
    end = json.loads(newest.record.offsets[0])[0]
    for sink in world.all_sinks():
        if why := _wrong_rows(world, sink, history, newest.checkpoint_id, asked_for, end):
            return Verdict(False, why)
    return Verdict(True, "it would continue")


def first_unit(world: World) -> int:
    """Return the unit of input that the library begins with."""
    return 1 if world.scenario.adopt else 0


def expected(world: World, sink: SimSink, from_unit: int = 0) -> set[int]:
    """Return the rows that a sink has to have once, those of its first unit of input and after it."""
    return ids_for(sink, max(from_unit, first_unit(world), _began(world, sink)), world.units)


def _began(world: World, sink: SimSink) -> int:
    """Return the unit of input with which a sink began, or begins if it was added just now."""
    if sink.name in world.first_units or not world.decided:
        return world.first_units.get(sink.name, 0)
    history = world.history()
    return int(json.loads(history[-1].record.offsets[0])[0]) if history else 0


def _without_record(world: World, asked_for: int) -> Verdict:
    adopts = world.scenario.adopt and not world.decided
    if asked_for > 0 and not (adopts and asked_for == 1):
        return Verdict(False, f"there is no record, and Spark asks for batch {asked_for}")
    if world.scenario.adopt and not adopts:
        return Verdict(False, "the query was adopted before, and its storage is empty now")
    for sink in world.all_sinks():
        wanted = expected(world, sink)
        rows = world.target(sink.name).visible()
        rows.update(expected(world, sink, first_unit(world) if asked_for else 0))
        if wrong := sorted(id for id in wanted | rows.keys() if rows[id] != (id in wanted)):
            return Verdict(False, f"{sink.name} would not have rows {wrong[:8]} once")
    return Verdict(True, "it would continue")


def _misfit(files: Mapping[str, bytes], newest: Any, asked_for: int) -> str:
    """Say why Spark's log does not fit the newest record; "" if it does."""
    record = newest.record
    at = newest.checkpoint_id
    if json.loads(files.get("metadata", b'{"id": ""}'))["id"] != record.query_id:
        return "the checkpointLocation is of another query"
    log = files.get(f"offsets/{at}", b"\n{}\n").decode().split("\n")
    planned_at = json.loads(log[1]).get("batchTimestampMs")
    if log[2] != record.offsets[0] or record.planned_at not in (0, planned_at):
        return f"Spark has another plan of batch {at}"
    if asked_for not in (at, at + 1) or newest_batch(files, "commits") > at:
        return f"Spark asks for batch {asked_for}, and storage has checkpoint {at}"
    return ""


def _other_setup(world: World, newest: Any) -> str:
    """Say why the job is not what it was at the newest checkpoint; "" if it is."""
    names = {sink.name for sink in world.all_sinks()}
    if gone := sorted(set(newest.record.partitions) - names):
        return f"the job lacks sinks {gone}"
    before = [topic for topics in newest.record.topic_ids for topic in topics.values()]
    if before and world.scenario.topics and before != [f"topic-{world.topic}"]:
        return "the source has another topic"
    return ""


def _wrong_rows(world: World, sink: SimSink, history: list[Any], at: int, asked_for: int, end: int) -> str:
    """Say which rows a sink would have not once; "" if there are none."""
    target = world.target(sink.name)
    rows = target.visible()
    given_up = world.given_up.get(sink.name, set())
    for checkpoint, committable in _named(history, sink.name):
        name = name_of(committable.transaction)
        if f"rows {name}" in target.memory.values:
            continue
        transaction = target.transaction(name)
        if transaction and transaction.state == "prepared":
            rows.update(map(id_of, transaction.rows))
        elif checkpoint == at and asked_for != at:
            return f"{sink.name} has lost {short(name)}, and Spark has moved on"
        elif checkpoint == at and (why := _no_replay(world, sink, history[-1].record, committable)):
            return why
        elif checkpoint == at and (transaction or "#" not in name):
            lost = transaction.rows if transaction and transaction.rows else _input_of(world, sink, committable, at)
            rows.update(map(id_of, lost))
    rows.update(expected(world, sink, end))
    wanted = expected(world, sink)
    wrong = sorted(id for id in wanted | rows.keys() if rows[id] != (id in wanted) and id not in given_up)
    return f"{sink.name} would not have rows {wrong[:8]} once" if wrong else ""


def _no_replay(world: World, sink: SimSink, record: Any, committable: Any) -> str:
    """Say why the lost rows of a participant cannot be written again; "" if they can."""
    if world.settings.replay == "spool":
        return ""
    writer = sink.name.removesuffix("-dead")
    if record.partitions.get(writer) not in (1, world.partitions):
        return f"{sink.name} was written in another number of partitions"
    if json.loads(record.offsets[0])[0] > world.changed_from:
        return "the source gives other rows by now"
    return ""


def _named(history: list[Any], sink: str) -> Iterator[tuple[int, Any]]:
    for complete in history:
        for (name, _), committable in complete.committables.items():
            if name == sink:
                yield complete.checkpoint_id, committable


def _input_of(world: World, sink: SimSink, committable: Any, n: int) -> list[int]:
    """Return the rows of one partition of a batch."""
    files = world.location(world.location_name).values
    first = end_of(files[f"offsets/{n - 1}"].decode()) if n else 0
    end = end_of(files[f"offsets/{n}"].decode())
    count = world.partitions
    wanted = expected(world, sink)
    return [id for id in range(2 * first, 2 * end) if id % count == committable.subtask and id in wanted]


def wrong_at_the_end(world: World) -> list[str]:
    """Say what is wrong with the rows after a driver has continued to the end of the input."""
    faults = []
    for sink in world.all_sinks():
        target = world.target(sink.name)
        seen = target.visible()
        given_up = world.given_up.get(sink.name, set())
        wanted = expected(world, sink)
        if lost := sorted(id for id in wanted if not seen[id] and id not in given_up):
            faults.append(f"lost: rows {lost} of {sink.name} at the end")
        if more := sorted(id for id, count in seen.items() if count > (id in wanted)):
            faults.append(f"duplicated: rows {more} of {sink.name} at the end")
        if sink.remembers and (count := _checkpoints_with_proof(world, sink)) > world.settings.retained + KEPT + 4:
            faults.append(f"proofs of {count} checkpoints are kept in {sink.name}: nobody purges them")
        if doubt := [short(name) for name in target.in_state("prepared")]:
            faults.append(f"in doubt forever: {doubt} of {sink.name}")
    return faults


def _checkpoints_with_proof(world: World, sink: SimSink) -> int:
    lineage = world.job_store().follow_newest_claim().lineage
    transactions = [transaction for _, transaction in world.target(sink.name).transactions()]
    return len({each.checkpoint for each in transactions if each.lineage == lineage and each.state == "committed"})


def not_promised(world: World, fault: str, *, restore_pending: bool) -> str:
    """Say which limit of docs/failures.md covers a fault; "" if none does.

    Some have a scenario that shows it (seeds/limit-*.json).
    """
    causes = world.causes
    kinds = {kind for _, kind, _ in world.sinks_now}
    rows_are_wrong = fault.startswith(("lost", "duplicated"))
    if rows_are_wrong and causes["two copies"]:
        return "two drivers with two copies of a storage"
    if fault.startswith("aborted") and causes["copied"]:
        return "a sweep by a driver that does not know yet of the copy"
    if rows_are_wrong and causes["target"] and causes["savepoint restored"] and causes["target emptied"]:
        return "a savepoint, and a target without rows"
    if fault.startswith("lost") and world.scenario.adopt and causes["target emptied"]:
        return "adopt, and a target without rows"
    if fault.startswith("lost") and causes["partial"] and causes["savepoint restored"]:
        return "only some commits of a checkpoint, and a savepoint"
    if rows_are_wrong and world.was_restored and kinds & {"kafka", "forgetful"}:
        return "a target that does not remember"
    if fault.startswith("duplicated") and causes["rows deleted"] and causes["target"]:
        return "a target with rows again that were deleted by hand"
    if fault.startswith("lost") and causes["rows deleted"] and world.was_restored:
        return "rows deleted by hand, and memories of before the restore"
    if causes["rows deleted"] and restore_pending:
        return "rows deleted, and the restore not done"
    return ""


# ---------------------------------------------------------------------- requests to a driver
def wrong_requests(world: World) -> list[str]:
    """Say which requests of operators were done though they must not be, or done twice."""
    if world.was_restored:  # requests of before come again
        return []
    return [f"request to {asked.way}: {fault}" for asked in world.requests for fault in _wrong_request(asked)]


def _wrong_request(asked: Asked) -> Iterator[str]:
    done = asked.done_by
    said = " ".join(asked.command.local.get("said", ()))
    if done and "Nothing was done" in said:
        yield "the command has said that nothing was done, and a driver has done it"
    for serving in done:
        who = serving.driver.name
        if asked.deleted is not None and asked.deleted < serving.began:
            yield f"{who} has done it, and has begun after it was withdrawn"
        if serving.began_at - asked.at > asked.holds + 0.1:
            age = serving.began_at - asked.at
            yield f"{who} has begun when it was {age:.0f} s old, and it holds for {asked.holds:g} s"
        if asked.answered is not None and asked.answered < serving.since:
            yield f"{who} has done it after it was answered"
        if len(serving.savepoints) > 1:
            yield f"{who} has done it twice"
    for driver in {serving.driver for serving in done}:
        if len([serving for serving in done if serving.driver is driver]) > 1:
            yield f"{driver.name} has done it twice"
    for serving in asked.servings.values():
        began_before = [
            other
            for other in asked.servings.values()
            if other.driver is not serving.driver and other.began < serving.since
        ]
        if asked.way != "trigger" and serving.stopped and began_before:
            names = ", ".join(other.driver.name for other in began_before)
            yield f"{serving.driver.name} has stopped by it, and {names} had begun with it before"


def wrong_stop(world: World, process: Process, query: SimQuery, savepoint: str) -> list[str]:
    """Say what is wrong if a driver now says that it has stopped a query with a savepoint."""
    if _failed_meanwhile(world, query, process.first_tick or 0, savepoint):
        return ["said that it has stopped a query that had failed while its savepoint was taken"]
    return []


def _failed_meanwhile(world: World, query: SimQuery, since: int, savepoint: str) -> bool:
    return query.failed_at is not None and since <= query.failed_at < world.saved[savepoint].tick


# ---------------------------------------------------------------------- what a command says
@dataclass(frozen=True)
class Before:
    """What there was when an operator has called a command."""

    events: int
    drivers: tuple[Process, ...]
    alone: bool
    """Whether no other process was there."""
    causes: tuple[int, int]
    spoiled: frozenset[str]
    storages: Mapping[str, Mapping[str, bytes]]
    locations: Mapping[str, Mapping[str, bytes]]
    location_names: frozenset[str]
    """The locations that the query was started with."""
    quiet: bool
    """Whether each system could be reached, and each driver has given its heartbeats."""

    @classmethod
    def of(cls, world: World) -> Before:
        alive = world.scheduler.alive()
        return cls(
            events=world.events,
            drivers=tuple(process for process in alive if process.kind == "driver"),
            alone=len(alive) == 1,
            causes=world.outside,
            spoiled=frozenset(world.spoiled),
            storages={name: dict(memory.values) for name, memory in world.storages.items()},
            locations={name: dict(memory.values) for name, memory in world.locations.items()},
            location_names=frozenset(name for _, name in world.location_names),
            quiet=not world.was_suspended
            and not any(target.calls_that_fail or target.slow_calls for target in world.targets.values())
            and all(until <= world.scheduler.now for until in world.cut_off.values()),
        )

    def is_undisturbed(self, world: World) -> bool:
        """Tell whether nothing has happened since, but what the processes of then do."""
        return self.events == world.events and self.quiet


class Command(NamedTuple):
    """A command of an operator that has ended."""

    world: World
    process: Process
    code: int
    """Its exit code."""

    @property
    def before(self) -> Before:
        before: Before = self.process.local["before"]
        return before

    @property
    def shown(self) -> Any:
        """What it shows as its result, None if it has failed before."""
        return self.process.local.get("shown")

    @property
    def said(self) -> str:
        return " ".join(self.process.local.get("said", ()))

    @property
    def same_world(self) -> bool:
        """Whether no memory was restored meanwhile, and no savepoint."""
        return self.before.causes == self.world.outside


def wrong_command(world: World, process: Process) -> list[str]:
    """Say what is wrong with what an operator's command has said, and with its exit code."""
    rule = COMMANDS.get(process.kind)
    if rule is None:
        return []
    error = process.error
    if isinstance(error, KeyboardInterrupt):
        return []
    if error is not None and not isinstance(error, Exit | Unreachable):
        return [f"no exit code: {process.kind} ended with {error!r}"]
    code = error.exit_code if isinstance(error, Exit) else int(error is not None)
    return [f"{process.kind}: {fault}" for fault in rule(Command(world, process, code))]


def _wrong_list(command: Command) -> Iterator[str]:
    shown, world = command.shown, command.world
    if shown is None:
        return
    told = {(row["sink"], name_of(row["transaction"])): row for row in shown["transactions"]}
    listings = {
        sink: listed
        for sink, listed in command.process.local.get("listings", {}).items()
        if sink not in shown["errors"]
    }
    yield from _wrong_transactions(command, told, listings)
    if shown["set_back"] and not any(world.causes[cause] for cause in OUTSIDE):
        yield f"says that a memory is older than the others, and none is: {shown['set_back']}"
    left = [row for row in told.values() if row["decision"] != "open"]
    if (command.code == 0) == bool(left or shown["set_back"] or shown["errors"]):
        yield f"exit code {command.code}, and it shows {shown}"


def _wrong_transactions(
    command: Command, told: Mapping[tuple[str, str], Any], listings: Mapping[str, list[Any]]
) -> Iterator[str]:
    world = command.world
    committed_meanwhile = {
        (sink, name) for sink, [first, *_] in listings.items() for name in first.decided - set(listings[sink][-1].names)
    }
    for sink, [*_, last] in listings.items():
        names = {name for of, name in told if of == sink}
        if more := names - set(last.names):
            yield f"shows what {sink} does not have: {sorted(map(short, more))}"
        missing = set(last.names) - names - (last.decided if committed_meanwhile else set())
        if missing:
            yield f"does not show what {sink} has: {sorted(map(short, missing))}"
    for (sink, name), row in told.items():
        [*_, last] = listings.get(sink) or [None]
        transaction = world.target(sink).transaction(name)
        if last is None or last.causes != world.outside or transaction is None or transaction.state != "prepared":
            continue
        decision = row["decision"]
        if name in last.decided and decision != "commit":
            yield f"calls {sink} {short(name)} {decision}, and a record names it"
        if decision == "commit" and (sink, name) not in world.named:
            yield f"calls {sink} {short(name)} decided, and no record names it"
        same = [
            other
            for of, other in committed_meanwhile
            if (there := world.target(of).transaction(other)) and there.checkpoint == row["checkpoint"]
        ]
        drivers = {world.committed_by.get((of, other)) for of, other in committed_meanwhile if other in same}
        at_work = [driver for driver in drivers if driver and driver.kind == "driver" and not driver.ended]
        if decision == "commit" and at_work:
            yield f"shows {sink} {short(name)}, which {at_work[0].name} is about to commit with {short(same[0])}"


OUTSIDE = (
    "restored",
    "copied",
    "rows deleted",
    "expired",
    "old location",
    "log overwritten",
    "topic",
    "input",
    "damaged",
    "partitions",
    "sinks",
)
"""What may come from outside. Without one of these, no driver may refuse to continue at the end."""


def _wrong_abort(command: Command) -> Iterator[str]:
    world = command.world
    for row in (command.shown or {}).get("results", ()):
        transaction = world.target(row["sink"]).transaction(name_of(row["transaction"]))
        if row["result"] == "aborted" and transaction and transaction.state == "prepared" and command.same_world:
            yield f"says that it has aborted {short(name_of(row['transaction']))}, which is still in doubt"
    asks = "LOSES its rows" in command.said and "holds no checkpoint" not in command.said
    if asks and not any(world.causes[cause] for cause in OUTSIDE):
        yield f"warns of a memory that was restored, and none was: {command.said}"


def _wrong_resolve(command: Command) -> Iterator[str]:
    shown, world = command.shown, command.world
    if shown is None or not command.same_world or world.causes["rows deleted"]:
        return
    for row in shown["participants"]:
        sink, name = row["participant"].rpartition("/")[0], name_of(row["transaction"])
        transaction = world.target(sink).transaction(name)
        if row["outcome"] == "lost" and transaction and transaction.state in ("prepared", "committed"):
            yield f"says that {sink} {short(name)} is lost, and it is {transaction.state}"
    if command.code == 0 and command.process.local["accepts"] and not command.process.local.get("gave up"):
        yield "says that rows are given up, and it has given up none"
    newest = next((each for each in world.history() if each.checkpoint_id == shown["checkpoint"]), None)
    if command.code == 0 and newest and newest.record.offsets == tuple(shown["offsets"]):
        for (sink, _), committable in newest.committables.items():
            name = name_of(committable.transaction)
            transaction = world.target(sink).transaction(name)
            if transaction and transaction.state != "committed":
                yield f"says that all is visible, and {sink} {short(name)} is {transaction.state}"


def _wrong_request_command(command: Command) -> Iterator[str]:
    world = command.world
    yield from _wrong_savepoint(command)
    if command.code and _nothing_was_in_its_way(command):
        yield f"was not done, and nothing was in its way: {command.said}"
    servings = [
        each for asked in world.requests if asked.command is command.process for each in asked.servings.values()
    ]
    for serving in servings if command.code == 0 else ():
        for query in serving.stopped:
            if _failed_meanwhile(world, query, serving.began, command.shown["uri"]):
                yield "says that the query is stopped, and it had failed while its savepoint was taken"


def _nothing_was_in_its_way(command: Command) -> bool:
    """Tell whether the driver ran and was idle, from before a request until after its command.

    A driver listens from the first batch of its query on.
    """
    world, before = command.world, command.before
    if not before.is_undisturbed(world) or len(before.drivers) != 1:
        return False
    [driver] = before.drivers
    query: SimQuery | None = driver.local.get("query")
    if driver.ended or query is None or not query.isActive or not query.is_quiet:
        return False
    if query.listens_since is None or query.listens_since > command.process.started_at:
        return False
    is_newest = driver.local.get("generation") == world.job_store().newest_generation()
    listens = driver.local["coordinator"].config.request_poll_interval > 0
    return is_newest and listens and query.memory is world.location(world.location_name)


def _wrong_savepoint(command: Command) -> Iterator[str]:
    if command.code == 0:
        uri = command.shown["uri"]
        metadata = f"{uri.rpartition('/')[2]}/_metadata"
        gone = metadata not in command.world.storage(SAVEPOINTS).values and uri not in command.world.spoiled
        if uri not in command.world.saved or (gone and command.before.is_undisturbed(command.world)):
            yield f"shows savepoint {uri}, which is not there"


def _wrong_restore(command: Command) -> Iterator[str]:
    world, before, shown = command.world, command.before, command.shown
    if command.code == 0:
        if shown["uri"] in before.spoiled:
            yield f"has restored {shown['uri']}, which is damaged"
        yield from _wrong_files(command)
    elif before.alone and before.is_undisturbed(world):
        for name, memory in world.locations.items():
            if memory.values != before.locations.get(name, {}):
                yield f"has failed, and changed the location {name}: {command.said}"
        if world.storage(STORAGE).values != before.storages.get(STORAGE, {}):
            yield f"has failed, and changed storage: {command.said}"


def _wrong_files(command: Command) -> Iterator[str]:
    """Compare the restored files with those of the location that was saved."""
    world, shown = command.world, command.shown
    if world.was_restored:
        return  # perhaps the location, while it was saved
    n = shown["checkpoint"]
    tick, location = world.saved[shown["uri"]]
    name = str(shown["checkpoint_location"]).removeprefix("loc:")
    if name in command.before.location_names:
        return  # this is the second call, and the query may have been started after the first one
    if f"offsets/{n + 1}" in world.location(name).values and command.process.local.get("met"):
        return  # a driver has started there while the restore was at work
    saved = world.location(location).at(tick)
    restored = world.location(name).values
    for path, content in restored.items():
        folder, _, number = path.rpartition("/")
        if path == MARK:
            continue
        if path not in saved or content != saved[path]:
            yield f"the restored file {path} is not what was saved"
        elif folder in ("offsets", "commits") and int(number) > n:
            yield f"the restored file {path} is of a batch after checkpoint {n}"


def _wrong_list_of_savepoints(command: Command) -> Iterator[str]:
    world = command.world
    if command.code or not (command.before.alone and command.before.is_undisturbed(world)):
        return
    values = world.storage(SAVEPOINTS).values
    there = set()
    for uri, saved in world.saved.items():
        key = f"{uri.rpartition('/')[2]}/_metadata"
        whole = values.get(key) == world.storage(SAVEPOINTS).at(saved.tick).get(key)
        if key in values and whole and (SAVEPOINTS, key) not in world.unreadable:
            there.add(uri)
    if {row["uri"] for row in command.shown} != there:
        yield f"shows {sorted(row['uri'] for row in command.shown)}, and there are {sorted(there)}"


def _wrong_dispose(command: Command) -> Iterator[str]:
    world, before = command.world, command.before
    if command.code or not (before.alone and before.is_undisturbed(world)):
        return
    values = world.storage(SAVEPOINTS).values
    gone = {key.partition("/")[0] for key in before.storages[SAVEPOINTS].keys() - values.keys()}
    left = {key.partition("/")[0] for key in values}
    if len(gone) != 1 or gone & left:
        yield f"has deleted objects of {sorted(gone)}, and there are still some of {sorted(gone & left)}"


COMMANDS: dict[str, Callable[[Command], Iterator[str]]] = {
    "list": _wrong_list,
    "abort": _wrong_abort,
    "resolve": _wrong_resolve,
    "save": _wrong_savepoint,
    "request": _wrong_request_command,
    "restore": _wrong_restore,
    "list savepoints": _wrong_list_of_savepoints,
    "dispose": _wrong_dispose,
}
