"""The interface between the protocol and Spark, in any kind of session.

It has micro-batches and queries, and the tasks' acks. The helpers for dead-letter sinks are here,
too, because protocol, operations and Spark's part share them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

import pyarrow as pa

from coordinator.errors import CheckpointError
from coordinator.task.task import Ack, SinkTask
from sinks.base import Sink as Sink
from sinks.errors import SinkError
from sinks.optional import JointCommitting, Related
from sinks.transaction import Checkpoint, CommitOutcome, Committable

TopicIds = Sequence[Mapping[str, str]]
"""The ids of the Kafka topics that each source reads, by name.

Sources are in the order of `BatchFacts.offsets`. A source of another kind has {}.
"""


@dataclass(frozen=True)
class BatchFacts:
    """The facts that Spark tells of a micro-batch.

    `offsets` are one JSON text per source, and `planned_at` is when Spark chose them, in
    milliseconds since the epoch (0: unknown).
    """

    checkpoint_id: int
    query_id: str
    offsets: tuple[str, ...]
    planned_at: int = 0


class BatchLeft(CheckpointError):
    """The batch is left to the next start, because its query is being stopped.

    This counts as a clean stop.
    """

    code = "EO-STOPPED"


class Query(Protocol):
    """A streaming query that can be stopped."""

    @property
    def isActive(self) -> bool: ...  # noqa: N802 - Spark's name
    @property
    def status(self) -> Mapping[str, Any]:
        """Return Spark's status of the query.

        `isTriggerActive` in it tells whether the query plans, runs or finishes a batch just now.
        """

    def exception(self) -> Exception | None:
        """Return the error that the query failed with; None if it runs, or was stopped."""

    def stop(self) -> None:
        """Stop the query, and wait until it has stopped."""


class MicroBatch(Protocol):
    """A micro-batch, as far as the protocol knows it.

    `run_id` tells one start of the query from the next; `location` is the checkpointLocation.
    """

    facts: BatchFacts
    run_id: str
    location: str

    @property
    def query(self) -> Query: ...

    @property
    def row_hash(self) -> str:
        """Return the name of the way in which the batch hashes its rows.

        Another way has another name.
        """

    @property
    def rows(self) -> int | None:
        """Return the number of its rows, before the sinks' transforms.

        Returns None before `run`, or if `run` does not count them.
        """

    def facts_of(self, checkpoint_id: int) -> BatchFacts:
        """Return the facts of an earlier batch, from Spark's log."""

    def is_done(self, checkpoint_id: int) -> bool:
        """Tell whether Spark's log has the end of a batch, `commits/N`.

        If it has the end of this batch, or of a later one, then another driver has put it there
        since this driver planned its batch.
        """

    def schema(self, sink: Sink) -> pa.Schema: ...
    def partitions(self, sink: Sink) -> int: ...
    def run(self, tasks: Mapping[str, SinkTask], ended: Callable[[str], None]) -> list[Ack]:
        """Run each task over the batch, side by side, and return the acks.

        They are of all partitions that ran. Replays of spooled rows bring their rows themselves,
        whatever the batch's layout is. `ended` is called with the name of each sink whose task is
        done, from any thread.
        """

    def cancel(self) -> None:
        """Make `run` fail soon.

        This is called from another thread, again and again until `run` has failed.
        """

    def weaknesses(self, *, recomputed: bool) -> list[str]:
        """Return why the source or the query's settings may lose or duplicate rows.

        This is for the job's `Guarantee`. `recomputed` means that lost rows are computed again.
        """

    @property
    def active(self) -> bool:
        """Tell whether the query runs and is not being stopped."""

    def raise_stopped(self) -> NoReturn:
        """Raise the error that Spark treats as a clean stop.

        The next start then hands this batch over again. This is called for the batch, still
        unprocessed, of a query that is being stopped.
        """

    def topic_ids(self) -> TopicIds:
        """Ask Kafka's brokers for the ids of the topics now.

        Returns () if the sources of the query cannot be seen. Raises the error that keeps the
        brokers from answering.
        """

    def drain(self) -> None:
        """Compute the batch without writing it."""

    def same_rows(self, other: Any) -> bool:
        """Tell whether `other` came with the same DataFrame.

        `other` is another call for this batch in the same run.
        """


@dataclass(frozen=True)
class Acks:
    """The answers of the tasks.

    In a first write, there is one ack for each sink and partition, even without rows; in a replay,
    one for each lost participant. `ended` is the time when the last ack of each sink had come, by
    the coordinator's clock.
    """

    all: Sequence[Ack] = ()
    ended: Mapping[str, float] = field(default_factory=dict)

    def committables_of(self, sink: str) -> list[Committable]:
        return [committable for committable in self.committables if committable.sink == sink]

    @property
    def committables(self) -> tuple[Committable, ...]:
        return tuple(ack.committable for ack in self.all if ack.committable)

    @property
    def errors(self) -> list[SinkError]:
        """Return the errors of the tasks. Those that another try cannot fix come first."""
        return sorted(
            (ack.error for ack in self.all if ack.error), key=lambda error: error.retryable
        )

    @property
    def partitions(self) -> Counter[str]:
        return Counter(ack.sink for ack in self.all)

    @property
    def bytes(self) -> dict[str, int]:
        """Return the size of each sink's record batches."""
        return _sum_by_sink((ack.sink, ack.bytes) for ack in self.all)

    @property
    def rows(self) -> dict[str, int]:
        return _sum_by_sink((ack.sink, ack.fingerprint.rows) for ack in self.all)


def _sum_by_sink(numbers: Iterable[tuple[str, int]]) -> dict[str, int]:
    sums = dict[str, int]()
    for sink, number in numbers:
        sums[sink] = sums.get(sink, 0) + number
    return sums


# ---------------------------------------------------------------------- sinks of dead letters
def sinks_by_name(sinks: Sequence[Sink]) -> dict[str, Sink]:
    """Return all sinks of a job by name, with dead-letter sinks last.

    Raises ValueError if a sink has two roles, or two sinks have one name.
    """
    dead = [sink.dead_letters for sink in sinks if sink.dead_letters]
    for letters in dead:
        if sum(letters is other for other in dead) > 1:
            raise ValueError(
                f"sink {letters.name!r} is for the dead letters of two sinks; give each its own"
            )
        if any(letters is sink for sink in sinks):
            raise ValueError(
                f"sink {letters.name!r} is for dead letters, and written by the tasks of another "
                "sink alone"
            )
    names = [sink.name for sink in (*sinks, *dead)]
    if len(set(names)) < len(names):
        name = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"two sinks have the name {name!r}; set name= on one of them")
    return {sink.name: sink for sink in (*sinks, *dead)}


def check_together(sinks: Collection[Sink]) -> None:
    """Raise ConfigurationError if the sinks have something against each other's targets.

    Each of them was checked before.
    """
    for sink in sinks:
        if isinstance(sink, Related):
            sink.check_with([other for other in sinks if other is not sink])


def places(sinks: Mapping[str, Sink]) -> dict[str, Hashable]:
    """Return what the sinks that commit as one have in common, by the name of the sink.

    For a sink that commits by itself, that is its name.
    """
    named = {
        name: sink.place() if isinstance(sink, JointCommitting) else None
        for name, sink in sinks.items()
    }
    return {name: name if place is None else ("place", place) for name, place in named.items()}


def ask_to_commit(
    checkpoint: Checkpoint, shares: Sequence[tuple[Sink, Sequence[Committable]]]
) -> Sequence[Sequence[CommitOutcome | Exception]]:
    """Ask a sink to commit these transactions, or one of several sinks of one place all of theirs.

    Returns the answers for each of the sinks.
    """
    sink, committables = shares[0]
    if len(shares) > 1 and isinstance(sink, JointCommitting):
        return sink.commit_jointly(checkpoint, shares)
    return [sink.notify_checkpoint_complete(checkpoint, committables)]


def dead_letter_writers(sinks: Mapping[str, Sink]) -> dict[str, str]:
    """Return the writers of dead-letter sinks: the sinks whose tasks write into them.

    They are names, by the name of the dead-letter sink.
    """
    return {sink.dead_letters.name: name for name, sink in sinks.items() if sink.dead_letters}
