"""The statistics of one try of a checkpoint, and the history of the last ones.

The history is in checkpoint storage, where it outlives its driver.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from enum import Enum
from statistics import mean, quantiles
from typing import Any

from coordinator.errors import CheckpointError
from coordinator.operations.heartbeat import DriverStatus, State
from coordinator.operations.inspection.text import by_sink, duration
from coordinator.storage import StorageError
from coordinator.store.encoding import require_field_types
from coordinator.store.job_store import JobStore
from coordinator.store.records import CompletedCheckpoint
from sinks._util.machine import machine

_TOGETHER = 100
"""The number of checkpoints in one object.

With a higher number there are fewer objects, and a flush writes more of them again.
"""


class Status(str, Enum):
    IN_PROGRESS = "in progress"
    COMPLETED = "completed"  # all visible
    FAILED = "failed"  # aborted before it was complete: nothing of it is visible
    RESTORED = "restored"  # the newest complete one, committed again by a start
    # It is complete, but not all of it was visible when the query stopped. The next start continues
    # with it.
    HALTED = "halted"


PHASES = ("prepare", "validate", "decide", "commit")
"""The phases of a checkpoint, in their order. A restored one has the phase `recover` alone."""


@dataclass
class CheckpointStatistics:
    """The statistics of one try of a checkpoint, in Flink's words where Flink has them.

    `triggered_at` and `ended_at` are in milliseconds since the epoch (0: not yet), and `duration`
    and the `phases` in seconds. `spans` has, by phase (prepare, commit) and sink, its begin and end
    in seconds from the trigger.

    These counts are by sink. `rows`, `bytes` (of the Arrow record batches) and `transactions` count
    what was pre-committed. `replayed` counts transactions that were lost and written again.
    `dead_lettered` counts rows that a sink has refused, which are `rows` of its dead-letter sink.
    `aborted` counts orphans that sweeps have aborted since the try before. `unknown` counts
    transactions that are decided, and were not known to be visible when the query stopped.

    `commit_retries` is how often participants had to be asked again. `reasons` say why the job was
    not exactly-once. `offsets_from` and `offsets_to` are the offsets in Spark's offset log that the
    checkpoint begins after and ends with, one JSON text per source; they are empty if unknown.
    """

    job: str
    checkpoint_id: int
    generation: int = 0
    status: Status = Status.IN_PROGRESS
    attempt: int = 1
    triggered_at: int = 0
    ended_at: int = 0
    duration: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    spans: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)
    transactions: dict[str, int] = field(default_factory=dict)
    replayed: dict[str, int] = field(default_factory=dict)
    aborted: dict[str, int] = field(default_factory=dict)
    unknown: dict[str, int] = field(default_factory=dict)
    dead_lettered: dict[str, int] = field(default_factory=dict)
    commit_retries: int = 0
    adopted: bool = False
    exactly_once: bool = False
    reasons: tuple[str, ...] = ()
    error: str = ""
    offsets_from: tuple[str, ...] = ()
    offsets_to: tuple[str, ...] = ()

    @property
    def sinks(self) -> list[str]:
        return sorted({*self.rows, *self.transactions, *self.replayed, *self.aborted})

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"status": self.status.value}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> CheckpointStatistics:
        """Return statistics from their JSON values, without what a newer version has added.

        Raises TypeError, ValueError or KeyError.
        """
        known = {each.name: value[each.name] for each in fields(cls) if each.name in value}
        texts = {
            name: tuple(known.get(name, ())) for name in ("reasons", "offsets_from", "offsets_to")
        }
        return require_field_types(cls(**known | texts | {"status": Status(known["status"])}))

    @property
    def remarks(self) -> str:
        """Return the error, and everything else that is out of the ordinary."""
        remarks = [self.error] if self.error else []
        remarks += [f"recovery {self.phases['recover']:.3f} s"] if "recover" in self.phases else []
        remarks += ["no row was written again"] if self.status is Status.RESTORED else []
        remarks += [f"try {self.attempt}"] if self.attempt > 1 else []
        remarks += [f"asked {self.commit_retries} times again"] if self.commit_retries else []
        for what, counts in (
            ("dead letters", self.dead_lettered),
            ("lost" if self.error else "written again", self.replayed),
            ("orphans aborted", self.aborted),
            ("not known to be visible", self.unknown),
        ):
            remarks += [f"{what}: {by_sink(counts)}"] if any(counts.values()) else []
        return "; ".join(remarks)

    def __str__(self) -> str:
        """Return one line for a person."""
        if self.status is Status.RESTORED:
            parts = [f"checkpoint {self.checkpoint_id}, complete before this start, restored"]
            label = "its rows: "
        else:
            phases = ", ".join(f"{name} {seconds:.3f}" for name, seconds in self.phases.items())
            ended = f"{self.status.value} in {self.duration:.3f} s ({phases})"
            parts = [f"checkpoint {self.checkpoint_id} {ended}"]
            label = "rows: "
        parts += (
            [label + ", ".join(f"{rows:,} into {sink}" for sink, rows in self.rows.items())]
            if self.rows
            else []
        )
        transactions = sum(self.transactions.values())
        parts += [f"{transactions} transactions"] if transactions else []
        return "; ".join([*parts, self.remarks] if self.remarks else parts)


def summarized(tries: Sequence[CheckpointStatistics]) -> dict[str, Any]:
    """Summarize tries: how many ended in which way, and what the completed ones took.

    That is the spread of their seconds, rows, bytes and transactions.
    """
    completed = [each for each in tries if each.status is Status.COMPLETED]
    summary: dict[str, Any] = {"status": dict(Counter(each.status.value for each in tries))}
    summary["took"] = _spread([each.duration for each in completed])
    for phase in PHASES:
        summary[phase] = _spread([each.phases[phase] for each in completed if phase in each.phases])
    for name in ("rows", "bytes", "transactions"):
        summary[name] = _spread([sum(getattr(each, name).values()) for each in completed])
    return summary


def _spread(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    cuts = quantiles(values, n=100, method="inclusive") if len(values) > 1 else [values[0]] * 99
    ends = {"min": min(values), "mean": mean(values)}
    return ends | {"p50": cuts[49], "p90": cuts[89], "p99": cuts[98], "max": max(values)}


@dataclass(frozen=True)
class Activity:
    """The current work of a driver, as its last heartbeat tells it.

    `checkpoint` is the current checkpoint, and `doing` what is done for it, if it takes a while.
    `in_doubt` counts, by sink, the transactions that have been decided since `in_doubt_since`, in
    milliseconds since the epoch, and are not known to be visible. `balance` is the first difference
    of the row counts. `at` is now, in milliseconds by the driver's clock. If `is_past`, the driver
    counts as dead, and `at` is the time of that heartbeat.
    """

    checkpoint: CheckpointStatistics | None = None
    doing: tuple[str, ...] = ()
    in_doubt: Mapping[str, int] = field(default_factory=dict)
    in_doubt_since: int = 0
    balance: str = ""
    at: float = 0.0
    is_past: bool = False

    @classmethod
    def of(cls, driver: DriverStatus | None, newest: CompletedCheckpoint | None = None) -> Activity:
        """Return what the last heartbeat of a driver tells.

        This is nothing if the driver has ended, or if this version does not understand the
        heartbeat. A checkpoint that the heartbeat does not know as decided yet is left out if it is
        complete by now: if it is `newest` or an earlier one.
        """
        if driver and driver.state in (State.RUNNING, State.SILENT):
            with suppress(KeyError, TypeError, ValueError):
                at = driver.sign.at + (max(driver.age, 0) * 1000 if driver.runs else 0)
                activity = replace(cls.from_json(driver.sign.now), at=at, is_past=not driver.runs)
                own = (
                    newest.checkpoint_id
                    if newest and newest.record.generation == driver.generation
                    else -2
                )
                checkpoint = activity.checkpoint
                if (
                    checkpoint
                    and "decide" not in checkpoint.phases
                    and checkpoint.checkpoint_id <= own
                ):
                    activity = replace(activity, checkpoint=None, doing=(), in_doubt={})
                if activity.checkpoint:
                    activity.checkpoint.duration = (at - activity.checkpoint.triggered_at) / 1000
                return activity
        return cls()

    @property
    def when(self) -> str:
        return "when the driver died or fell silent" if self.is_past else "by the last heartbeat"

    @property
    def sentences(self) -> list[str]:
        """Return everything in sentences, for a person."""
        lines = (
            [f"Under way then: {text}" for text in self.doing] if self.is_past else list(self.doing)
        )
        if checkpoint := self.checkpoint:
            number = checkpoint.checkpoint_id if checkpoint.checkpoint_id >= 0 else "?"
            again = f", try {checkpoint.attempt}" if checkpoint.attempt > 1 else ""
            phases = ", ".join(
                f"{name} {seconds:.1f} s" for name, seconds in checkpoint.phases.items()
            )
            done = (phases or "nothing yet") + (
                f"; rows: {by_sink(checkpoint.rows)}" if checkpoint.rows else ""
            )
            lasts = duration(checkpoint.duration) + (" then" if self.is_past else "")
            settled = " The next start settles it." if self.is_past else ""
            lines.insert(
                0,
                f"In progress {self.when}: checkpoint {number}, for {lasts}{again}. Done: "
                f"{done}.{settled}",
            )
        return [*lines, *self.not_visible, *self.differs]

    @property
    def not_visible(self) -> list[str]:
        if not self.in_doubt:
            return []
        what = f"{sum(self.in_doubt.values()):,} decided transactions"
        lasts = duration((self.at - self.in_doubt_since) / 1000)
        sinks = by_sink(self.in_doubt)
        if self.is_past:
            return [
                f"{what} were not known to be visible {self.when}: {sinks}. The next start commits "
                "them."
            ]
        return [f"{what} are not known to be visible for {lasts}: {sinks}. The driver asks again."]

    @property
    def differs(self) -> list[str]:
        return [f"Row counts differ: {self.balance}"] if self.balance else []

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Activity:
        """Return an activity from its JSON values, without what a newer version has added.

        Raises TypeError, ValueError or KeyError.
        """
        known = {each.name: value[each.name] for each in fields(cls) if each.name in value}
        if "checkpoint" in known:
            known["checkpoint"] = CheckpointStatistics.from_json(known["checkpoint"])
        return require_field_types(cls(**known))


# ---------------------------------------------------------------------- kept in storage
class CheckpointHistory:
    """The history of checkpoints, kept here until the next `flush` writes it to storage.

    What a killed driver had not flushed is lost. `size` is roughly the number of checkpoints that
    storage keeps; 0 means none.
    """

    def __init__(self, store: JobStore, size: int) -> None:
        self._store = store
        self._size = size
        self._new: deque[CheckpointStatistics] = deque(maxlen=size)
        self._flushing = machine.threads.lock()

    def report(self, statistics: CheckpointStatistics) -> None:
        self._new.append(statistics)

    def flush(self) -> None:
        """Add the new tries to the newest object, or begin another object.

        This can be called from any thread. Raises `StorageError`, and the next flush tries again.
        """
        with self._flushing:
            new = [self._new.popleft() for _ in range(len(self._new))]
            if new:
                try:
                    values = [statistics.to_json() for statistics in new]
                    self._store.journal.add_statistics(values, together=_TOGETHER, keep=self._size)
                except BaseException:
                    self._new.extendleft(reversed(new))
                    raise


def load_history(
    store: JobStore, bad: list[str], known: dict[str, list[CheckpointStatistics]] | None = None
) -> list[CheckpointStatistics]:
    """Load the tries in the history, in the order of their ends, whatever the clocks said.

    `bad` gets a sentence on each part that cannot be read. `known` has what earlier calls have
    read, by key, since an object never changes. Raises `StorageError` and `CorruptRecord`.
    """
    before = {} if known is None else known
    read: dict[str, list[CheckpointStatistics]] = {}
    for *_, key in store.journal.statistics_objects():
        read[key] = before.get(key) or list(_understood(store, key, bad))
    before.clear()
    before |= read
    unique = {
        (
            statistics.generation,
            statistics.checkpoint_id,
            statistics.attempt,
            statistics.triggered_at,
        ): statistics
        for each in read.values()
        for statistics in each
    }
    return sorted(unique.values(), key=lambda statistics: statistics.generation)


def _understood(store: JobStore, key: str, bad: list[str]) -> Iterator[CheckpointStatistics]:
    try:
        for value in store.journal.read_statistics(key):
            try:
                yield CheckpointStatistics.from_json(value)
            except (KeyError, TypeError, ValueError) as error:
                bad.append(
                    f"statistics {key} in {store.storage.uri} lack or misuse a field: {error!r}"
                )
    except (CheckpointError, StorageError) as error:
        bad.append(str(error))
