"""The three memories of a job side by side: storage, Spark's checkpointLocation, the targets.

This only reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from coordinator.protocol.memories import (
    find_later_checkpoint,
    lacking_before_savepoint,
    lacks_part,
    newest_committed,
    record_filter,
)
from coordinator.protocol.ports import Sink
from coordinator.spark.checkpoint_location import newest_commit, open_location
from coordinator.store.job_store import JobStore
from coordinator.store.records import ANY_LINEAGE, CompletedCheckpoint

_DELETED = "newer: the storage was deleted, or is another one"
SET_BACK = (
    "Before anything else restore a newer state of the older one. If there is none, set storage, "
    "checkpointLocation and all targets back to one checkpoint (`coordinator savepoint restore`)"
)


@dataclass(frozen=True)
class MemoryComparison:
    """One of the three memories, compared with storage.

    `newest` is its newest checkpoint, -1 if it has none, None if nobody can tell. `ahead` means
    that it has checkpoints that storage does not know.
    """

    name: str
    newest: int | None
    verdict: str
    agrees: bool = True
    ahead: bool = False

    @property
    def difference(self) -> str:
        return f"newest checkpoint is {self.shown}, {self.verdict}. {SET_BACK}"

    @property
    def shown(self) -> str:
        return "?" if self.newest is None else "none" if self.newest == -1 else str(self.newest)


def compare_memories(
    store: JobStore, sinks: Mapping[str, Sink], location: str | None
) -> Iterator[MemoryComparison]:
    """Compare storage with the checkpointLocation and each sink.

    Storage is read before and after the others are asked, since a driver may run.
    """
    store.follow_newest_claim()
    before = store.listing().newest_complete
    asked = {name: _ask(store.job, sink) for name, sink in sinks.items()}
    files = None if location is None else open_location(location).files()
    memories = {name: answer for name, answer in asked.items() if not isinstance(answer, Exception)}
    store.follow_newest_claim()
    history = store.history(record_filter(memories, (), store.lineage))
    newest = history[-1].checkpoint_id if history else -1
    yield MemoryComparison("storage", newest, "" if history else "holds no checkpoint of this job")
    if files is not None:
        yield _compare_location(files, before, newest)
    for name, answer in asked.items():
        if isinstance(answer, Exception):
            yield MemoryComparison(f"sink {name}", None, f"cannot be asked: {answer}", agrees=False)
        else:
            history_before = [complete for complete in history if complete.checkpoint_id <= before]
            yield compare_sink(name, answer, history_before, history)


def set_back(store: JobStore, sinks: Mapping[str, Sink]) -> list[str]:
    """List a sentence on each sink that remembers other checkpoints than storage.

    A sink that cannot be asked is left out.
    """
    return [
        f"{memory.name}: its {memory.difference}."
        for memory in compare_memories(store, sinks, None)
        if not memory.agrees and memory.newest is not None
    ]


def compare_sink(
    sink: str,
    memory: Mapping[str, int] | None,
    before: Sequence[CompletedCheckpoint],
    after: Sequence[CompletedCheckpoint],
) -> MemoryComparison:
    """Compare the `memory` of a sink with the retained complete checkpoints.

    `before` and `after` are these checkpoints, oldest first, as storage had them before and after
    the sink was asked.
    """
    ahead = _compare(sink, memory, after)
    if ahead.ahead:
        return ahead
    behind = _compare(sink, memory, before)
    return (
        replace(behind, verdict="as storage", agrees=True, ahead=False) if behind.ahead else behind
    )


def _compare(
    sink: str, memory: Mapping[str, int] | None, history: Sequence[CompletedCheckpoint]
) -> MemoryComparison:
    name = f"sink {sink}"
    if memory is None:
        return MemoryComparison(
            name, None, "cannot tell: it keeps no memory, has none yet, or it has expired"
        )
    if not history:
        newest = max(memory.values(), default=-1)
        if newest < 0:
            return MemoryComparison(name, newest, "as storage")
        return MemoryComparison(name, newest, _DELETED, agrees=False, ahead=True)
    record = history[-1].record
    others = {lineage: newest for lineage, newest in memory.items() if lineage != record.lineage}
    known = record.predecessors
    if (
        known is not None
        and ANY_LINEAGE not in known
        and (other := find_later_checkpoint(others, known))
    ):
        verdict = f"has lineage {other[0]}, which storage does not know, or not so far"
        return MemoryComparison(name, other[1], verdict, agrees=False, ahead=True)
    newest = newest_committed(memory, history[-1])
    stored = history[-1].checkpoint_id
    if newest > stored:
        return MemoryComparison(
            name,
            newest,
            f"newer by {newest - stored}: the storage was set back",
            agrees=False,
            ahead=True,
        )
    if lacks := lacking_before_savepoint(sink, memory, history[0].record):
        return MemoryComparison(
            name,
            lacks[1],
            "older than the savepoint that was restored: the system was set back",
            agrees=False,
        )
    lacking = [
        part for complete in history if lacks_part(memory, part := complete.for_sinks([sink]))
    ]
    if not lacking and (record.restored_from or newest >= record.newest_rows.get(sink, -1)):
        return MemoryComparison(
            name,
            newest,
            "as storage" if newest >= 0 else "as storage, which has no rows of its lineage for it",
        )
    if [part.checkpoint_id for part in lacking] == [stored]:
        return MemoryComparison(
            name,
            newest,
            f"as storage, once checkpoint {stored} is committed: its driver or the next start does",
        )
    behind = f"older by {stored - newest}, unless that is in doubt: the system was set back"
    return MemoryComparison(name, newest, behind, agrees=False)


def _compare_location(files: Sequence[str], before: int, after: int) -> MemoryComparison:
    """Compare the `files` of the checkpointLocation with storage.

    `before` and `after` are the newest checkpoint in storage, -1 if there is none, as it was before
    and after `files` were listed.
    """
    name = "checkpointLocation"
    if not files:
        return MemoryComparison(name, None, "there is none: mistyped, or deleted", agrees=False)
    newest = newest_commit(files)
    if newest > after:
        verdict = (
            _DELETED if after == -1 else f"newer by {newest - after}: the storage was set back"
        )
        return MemoryComparison(name, newest, verdict, agrees=False)
    if newest >= before:
        return MemoryComparison(name, newest, "as storage")
    if newest == before - 1:
        return MemoryComparison(
            name, newest, f"as storage, once Spark has asked for batch {before} again"
        )
    return MemoryComparison(
        name, newest, f"older by {before - newest}: it was set back", agrees=False
    )


def _ask(job: str, sink: Sink) -> dict[str, int] | Exception | None:
    try:
        sink.open()
        answer = sink.committed_checkpoints(job)
        return None if answer is None else dict(answer)
    except Exception as error:
        return error
