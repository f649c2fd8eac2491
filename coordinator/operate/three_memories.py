"""The three memories of a job side by side: storage, Spark's checkpointLocation, each external system. Reads only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from coordinator.protocol.batch import Sink
from coordinator.protocol.decisions import Complete
from coordinator.protocol.memories import Remembered, of_location, of_sink, worth_reading
from coordinator.protocol.records import CheckpointStore
from coordinator.spark.location import newest_commit, open_location


@dataclass(frozen=True)
class Memory:
    name: str
    newest: int | None
    """Number of its newest checkpoint; None if nobody can tell."""
    verdict: str
    agrees: bool

    @property
    def shown(self) -> str:
        return "?" if self.newest is None else "none" if self.newest == -1 else str(self.newest)


def side_by_side(store: CheckpointStore, sinks: Mapping[str, Sink], location: str | None) -> Iterator[Memory]:
    """Storage is asked last but for the checkpointLocation, which a driver that runs writes after it."""
    asked = {name: _ask(store.job, sink) for name, sink in sinks.items()}
    told = {name: answer for name, answer in asked.items() if not isinstance(answer, Exception)}
    store.follow_newest_claim()
    history = [Complete(rounds) for rounds in store.history(worth_reading(told, (), store.lineage))]
    newest = history[-1].checkpoint_id if history else -1
    yield Memory("storage", newest, "" if history else "holds no checkpoint of this job", True)
    if location is not None:
        yield _of_location(location, history)
    for name, answer in asked.items():
        if isinstance(answer, Exception):
            yield Memory(f"sink {name}", None, f"cannot be asked: {answer}", False)
        else:
            yield _of(f"sink {name}", of_sink(name, answer, history))


def set_back(store: CheckpointStore, sinks: Mapping[str, Sink]) -> list[str]:
    """A sentence on each sink that remembers other checkpoints than storage. Who cannot be asked is left out."""
    return [
        f"{memory.name}: newest checkpoint {memory.shown}, {memory.verdict} (docs/runbook.md)."
        for memory in side_by_side(store, sinks, None)
        if not memory.agrees and memory.newest is not None
    ]


def _of_location(location: str, history: Sequence[Complete]) -> Memory:
    name, files = "checkpointLocation", open_location(location).files()
    if not files:
        return Memory(name, None, "there is none: mistyped, or deleted", False)
    return _of(name, of_location(newest_commit(location) + 1, history))


def _of(name: str, remembered: Remembered) -> Memory:
    return Memory(name, remembered.newest, remembered.words, remembered.agrees)


def _ask(job: str, sink: Sink) -> dict[str, int] | Exception | None:
    try:
        sink.open()
        answer = sink.committed_checkpoints(job)
        return None if answer is None else dict(answer)
    except Exception as error:
        return error
