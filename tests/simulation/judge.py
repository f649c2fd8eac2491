"""What is right, without the library's own rules.

The judge looks at the memories, and asks what becomes of each row if a driver takes them as they are and continues:
the rows that are visible, with the rows that retained records name and the target still has prepared, with those that
are provably lost and come again with the batch that Spark asks for, and with all later input. If that is each row
once, and Spark's log fits the newest record, a driver that refuses to continue is wrong. Otherwise a refusal is right,
however the library words it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from coordinator.errors import CheckpointError
from coordinator.storage import StorageError
from tests.simulation.spark import newest_batch
from tests.simulation.targets import KEPT, SimSink, ids_for
from tests.simulation.world import World, id_of, name_of, short


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
    if newest is None:
        return _without_record(world, asked_for)
    if why := _misfit(files, newest, asked_for) or _other_setup(world, newest):
        return Verdict(False, why)
    if world.causes["rows deleted"] and world.was_restored:
        return Verdict(False, "rows were deleted by hand, and the target's memory tells nothing of that")
    end = json.loads(newest.record.offsets[0])[1]
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
    return int(json.loads(history[-1].record.offsets[0])[1]) if history else 0


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
    if (log[2], json.loads(log[1]).get("batchTimestampMs")) != (record.offsets[0], record.planned_at):
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
    if json.loads(record.offsets[0])[1] > world.changed_from:
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
    first, end = json.loads(files[f"offsets/{n}"].decode().split("\n")[2])
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
    if rows_are_wrong and causes["target"] and causes["savepoint restored"] and causes["target emptied"]:
        return "a savepoint, and a target without rows"
    if fault.startswith("lost") and causes["partial"] and causes["savepoint restored"]:
        return "only some commits of a checkpoint, and a savepoint"
    if rows_are_wrong and world.was_restored and kinds & {"kafka", "forgetful"}:
        return "a target that does not remember"
    if causes["rows deleted"] and restore_pending:
        return "rows deleted, and the restore not done"
    return ""
