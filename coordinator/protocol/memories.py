"""The rule R15: storage, Spark and the targets remember the same.

Storage, Spark's checkpointLocation and each external system remember the job by themselves, and
each can be restored to an older state by itself: by a backup, a lagging replica, or a deleted
folder. `decisions.action_for` compares the first two; the functions of this module compare storage
with the external systems. As in `decisions`, they are pure functions of what was read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

from coordinator.errors import ExternalSystemBehind, StorageBehind
from coordinator.store.records import ANY_LINEAGE, CompletedCheckpoint, Record, RecordKey
from sinks.diagnosis import InDoubt
from sinks.transaction import Identity, not_among

Memories = Mapping[str, Mapping[str, int] | None]
"""The answers of `TwoPhaseCommitSink.committed_checkpoints`, by sink.

They were given before the records were read.
"""


def require_none_later(
    sink: str,
    memory: Mapping[str, int] | None,
    known: Mapping[str, float],
    lineage: str,
    storage: str,
) -> None:
    """Raise `StorageBehind` if a sink has committed a later checkpoint than is `known`.

    `known` has the newest checkpoint of each lineage. A record is always put before anything of its
    checkpoint is committed, so storage has lost the record.
    """
    if (later := find_later_checkpoint(memory, known)) is None:
        return
    other, newest = later
    if other == lineage and other in known:
        why = (
            f"Storage is older by {newest - known[other]:.0f} checkpoint(s), or another driver "
            "runs with a copy of it. Use the newer storage and its checkpointLocation."
        )
    elif other in known:
        why = "Storage began with a savepoint of that lineage. Restore a savepoint that is as new."
    else:
        why = (
            "Storage was deleted or is older, or a second job of this name writes there. Restore "
            "the newer storage, or give the second job another name."
        )
    has = f"has none after {known[other]:.0f}" if known.get(other, -1) >= 0 else "holds none of it"
    raise StorageBehind(
        f"sink {sink!r} has rows of this job's lineage {other} up to checkpoint {newest}, and "
        f"checkpoint storage {storage} {has}. {why} Nothing of this start was made visible."
    )


def replayed_already_error(
    sink: str, unexpected: Sequence[str], complete: CompletedCheckpoint, storage: str
) -> StorageBehind:
    """Say that another driver has replayed the checkpoint.

    `unexpected` are transactions of it that the sink has committed, and no record names.
    """
    lost = [f"{name}/{subtask}" for name, subtask in complete.lost_participants() if name == sink]
    return StorageBehind(
        f"checkpoint {complete.checkpoint_id} has lost transactions ({', '.join(lost)}), but sink "
        f"{sink!r} has rows of it that no record names ({', '.join(unexpected)}). Stop a driver "
        f"with a copy of {storage}, or restore newer storage. If the target has all lost rows, run "
        "coordinator resolve --accept-loss SINK/SUBTASK. [EO-REPLAYED]"
    )


def predecessors(
    memories: Memories, newest: CompletedCheckpoint | None, lineage: str
) -> Mapping[str, int]:
    """Return the lineages before this one, each with the newest checkpoint that targets may have.

    They are as in the newest record, or, if nobody has looked yet, as the sinks remember them.
    """
    known = newest.record.predecessors if newest else None
    if known is not None and ANY_LINEAGE not in known:
        return known
    newest_of_each: dict[str, int] = {}
    for memory in memories.values():
        for other, checkpoint in (memory or {}).items():
            newest_of_each[other] = max(checkpoint, newest_of_each.get(other, -1))
    newest_of_each.pop(lineage, None)
    return newest_of_each


def require_restored(memories: Memories, base: Record, storage: str) -> None:
    """Raise `ExternalSystemBehind` if a sink lacks rows from before a restored savepoint.

    This can only be so if `base`, the oldest record, is of a savepoint.
    """
    for sink, memory in memories.items():
        if lacking := lacking_before_savepoint(sink, memory, base):
            lineage, newest = lacking
            raise ExternalSystemBehind(
                f"checkpoint storage {storage} begins with savepoint {base.restored_from}, of "
                f"checkpoint {base.checkpoint_id}, but the target of sink {sink!r} ends with "
                f"checkpoint {newest} of the earlier lineage {lineage}. The target was restored to "
                "an older state. Restore its newer state, or a savepoint of that checkpoint."
            )


def lacking_before_savepoint(
    sink: str, memory: Mapping[str, int] | None, base: Record
) -> tuple[str, int] | None:
    """Return what a sink remembers of an earlier lineage, if it lacks rows from before a savepoint.

    This is the lineage that the savepoint of `base` was taken of, and the newest checkpoint that
    the sink remembers of it. Returns None if no rows are lacking.
    """
    if not base.restored_from:
        return None
    wanted = base.newest_rows.get(sink, -1)
    known = base.predecessors or {}
    ends = (
        (lineage, at)
        for lineage, at in (memory or {}).items()
        if known.get(lineage) == base.checkpoint_id
    )
    return next((end for end in ends if end[1] < wanted), None)


def record_filter(
    memories: Memories, in_doubt: Iterable[Identity], lineage: str
) -> Callable[[int], bool]:
    """Return a filter of retained checkpoints by their id.

    A checkpoint before the newest has to be read only if a sink may lack it or have it in doubt. Of
    thousands these are a few.
    """
    ids = {InDoubt.parsed(transaction).checkpoint for transaction in in_doubt}
    if None in ids:  # the name of a transaction does not tell its checkpoint
        return lambda _: True
    first = min(
        (memory.get(lineage, -1) for memory in memories.values() if memory is not None),
        default=math.inf,
    )
    return lambda checkpoint_id: checkpoint_id > first or checkpoint_id in ids


def find_in_doubt_again(
    memories: Memories,
    in_doubt: Mapping[str, Sequence[Identity]],
    older: Iterable[CompletedCheckpoint],
    places: Mapping[str, Hashable],
) -> list[tuple[str, CompletedCheckpoint]]:
    """Find the parts of older checkpoints that are in doubt again, oldest first.

    These are parts, by sink, of the retained checkpoints `older`. A system that was restored to an
    older state has them in doubt again, though they are decided. Sinks of an equal place commit as
    one, so their parts come together, under the name of one of them. Raises `ExternalSystemBehind`
    for a part that is neither committed nor in doubt, because nobody has its rows any more.
    """
    parts = []
    for complete in older:
        found = set[Hashable]()
        for sink, memory in memories.items():
            part = complete.for_sinks([sink])
            named = [committable.transaction for committable in part.committables.values()]
            gone = not_among(named, in_doubt[sink])
            if len(gone) < len(named) and places[sink] not in found:
                found.add(places[sink])
                beside = [other for other, place in places.items() if place == places[sink]]
                parts.append((sink, complete.for_sinks(beside)))
            if gone and memory is not None and lacks_part(memory, part):
                raise external_system_behind_error(sink, newest_committed(memory, part), part)
    return parts


def newest_rows(visible: CompletedCheckpoint | None) -> Mapping[str, int]:
    """Return the field `newest_rows` of the next `Record`, after the `visible` checkpoint."""
    return visible.newest_rows if visible and not visible.record.restored_from else {}


def require_records(
    memories: Memories, newest_rows: Mapping[str, int], lineage: str, visible: Sequence[RecordKey]
) -> None:
    """Raise `ExternalSystemBehind` if a sink lacks rows whose record is no longer retained."""
    for sink, memory in memories.items():
        remembered = (memory or {}).get(lineage, -1)
        expected = newest_rows.get(sink, -1)
        if memory is not None and remembered < expected and (expected, 0) not in visible:
            raise external_system_behind_error(sink, remembered, expected)


def external_system_behind_error(
    sink: str, newest: int, lost: CompletedCheckpoint | int
) -> ExternalSystemBehind:
    """Say that the target was restored to an older state.

    `newest` is the checkpoint that the target ends with, and `lost` is the sink's part of a later
    checkpoint, or only that checkpoint's id.
    """
    id, named = (
        (lost, [])
        if isinstance(lost, int)
        else (lost.checkpoint_id, list(lost.committables.values()))
    )
    has = f"ends with checkpoint {newest}" if newest >= 0 else "has nothing of this lineage"
    rows = (
        f"{sum(committable.fingerprint.rows for committable in named)} row(s)" if named else "rows"
    )
    return ExternalSystemBehind(
        f"the target of sink {sink!r} {has}, but checkpoint {id} was complete and visible, with "
        f"{rows} of this sink. The target was restored to an older state. Restore its newer state, "
        "or restore storage and checkpointLocation to the same checkpoint. Nothing was aborted.",
        [dict(committable.transaction) for committable in named],
    )


def find_later_checkpoint(
    memory: Mapping[str, int] | None, known: Mapping[str, float]
) -> tuple[str, int] | None:
    """Find a lineage of which the sink has a later checkpoint than the `known` one.

    Returns the lineage and that checkpoint; None if there is none.
    """
    for lineage, checkpoint_id in (memory or {}).items():
        if checkpoint_id > known.get(lineage, -1):
            return lineage, checkpoint_id
    return None


def lacks_part(memory: Mapping[str, int], part: CompletedCheckpoint) -> bool:
    """Tell whether a sink should remember its part of a checkpoint, and does not."""
    remembered = any(committable.remembered for committable in part.committables.values())
    return remembered and newest_committed(memory, part) < part.checkpoint_id


def newest_committed(memory: Mapping[str, int] | None, complete: CompletedCheckpoint) -> int:
    """Return the newest checkpoint that a sink remembers of the lineage of `complete`.

    Returns -1 if there is none.
    """
    return (memory or {}).get(complete.record.lineage, -1)
