"""Sinks of dead letters: sinks of the job like any other, but that the tasks of another one write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from coordinator.protocol.batch import Sink
from sinks.dead_letters import allowed, too_many
from sinks.optional import DeadLettering
from sinks.task import Ack


def with_dead_letters(sinks: Sequence[Sink]) -> dict[str, Sink]:
    """All sinks of a job by name, those of dead letters last. Raises ValueError where one has two parts, or a name."""
    dead = [sink.dead_letters for sink in sinks if sink.dead_letters]
    for letters in dead:
        if sum(letters is other for other in dead) > 1:
            raise ValueError(f"sink {letters.name!r} is for the dead letters of two sinks; give each its own")
        if any(letters is sink for sink in sinks):
            raise ValueError(
                f"sink {letters.name!r} is for dead letters, and written by the tasks of another sink alone"
            )
    names = [sink.name for sink in (*sinks, *dead)]
    if len(set(names)) < len(names):
        raise ValueError(f"two sinks have the same name in {names}; set name= on one of them")
    return {sink.name: sink for sink in (*sinks, *dead)}


def writers(sinks: Mapping[str, Sink]) -> dict[str, str]:
    """By name of a sink of dead letters, the sink whose tasks write it."""
    return {sink.dead_letters.name: name for name, sink in sinks.items() if sink.dead_letters}


def require_few(n: int, rows: Mapping[str, int], acks: Sequence[Ack], sinks: Mapping[str, Sink]) -> None:
    """Raises `TooManyDeadLetters`. `rows`: of each sink in checkpoint `n`."""
    for name, sink in sinks.items():
        if not (isinstance(sink, DeadLettering) and sink.dead_letters):
            continue
        dead, limit = sink.dead_letters.name, sink.max_dead_letters
        refused = rows.get(dead, 0)
        read = refused + rows.get(name, 0)
        if refused > allowed(limit, read):
            named = [row for ack in acks if ack.sink == dead and ack.committable for row in ack.committable.refused]
            reasons = [(row.error_class, row.error) for row in named[:3]]
            raise too_many(name, f"the {read:,} rows of checkpoint {n}", f"{refused:,}", limit, reasons)
