"""The facts of one try of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from typing import Any

from coordinator.protocol.encoding import fitting


class Status(str, Enum):
    IN_PROGRESS = "in progress"
    COMPLETED = "completed"  # all visible
    FAILED = "failed"  # aborted before it was complete: nothing of it is visible
    RESTORED = "restored"  # the newest complete one, committed again by a start
    HALTED = "halted"  # complete, but not all visible when the query stopped: the next start goes on with it


PHASES = ("prepare", "validate", "decide", "commit")
"""Of a checkpoint, in their order; one that is restored has the phase `recover` alone."""


@dataclass
class CheckpointStatistics:
    """One try of a checkpoint, in the words of Flink's checkpoint statistics where it has them.

    `triggered_at` and `ended_at` are milliseconds since the epoch (0: not yet), `duration` and the `phases` seconds.
    `spans`: by phase (prepare, commit) and sink, its begin and end in seconds from the trigger.
    `rows`, `bytes` (of the Arrow record batches) and `transactions` count what was pre-committed, by sink; `replayed`
    are transactions that were lost and written again, by sink; `dead_lettered` rows that a sink has refused, which are
    `rows` of the sink of its dead letters; `aborted` orphans that sweeps have aborted since the try before, by sink;
    `unknown` those that are decided, and were not known to be visible when the query stopped, by sink.
    `commit_retries` is how often participants had to be asked again. `reasons` say why it was not
    exactly-once. `offsets` are those of Spark's offset log that the checkpoint begins after and ends with, one JSON
    text per source; empty if unknown.
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
        """What a newer version has added is left out. Raises TypeError, ValueError or KeyError."""
        known = {each.name: value[each.name] for each in fields(cls) if each.name in value}
        texts = {name: tuple(known.get(name, ())) for name in ("reasons", "offsets_from", "offsets_to")}
        return fitting(cls(**known | texts | {"status": Status(known["status"])}))

    def __str__(self) -> str:
        """One line for a person."""
        phases = ", ".join(f"{name} {seconds:.3f}" for name, seconds in self.phases.items())
        said = [f"checkpoint {self.checkpoint_id} {self.status.value} in {self.duration:.3f} s ({phases})"]
        if self.rows:
            said.append("rows: " + ", ".join(f"{rows:,} into {sink}" for sink, rows in self.rows.items()))
        if sum(self.transactions.values()):
            said.append(f"{sum(self.transactions.values())} transactions")
        for count, what in (
            (sum(self.dead_lettered.values()), "dead letters"),
            (self.attempt - 1, "failed tries before"),
            (self.commit_retries, "times asked again to commit"),
            (sum(self.replayed.values()), "lost transactions written again"),
            (sum(self.aborted.values()), "orphans aborted"),
            (sum(self.unknown.values()), "transactions not known to be visible"),
        ):
            if count:
                said.append(f"{count} {what}")
        return "; ".join(said) + (f": {self.error}" if self.error else "")


@dataclass(frozen=True)
class Activity:
    """What a driver does now, as its signs of life tell it: the current checkpoint and what is done for it, if it takes
    a while; what has been decided, since a time in milliseconds since the epoch, and is not known to be visible, by
    sink; and the first of what its books differ in."""

    checkpoint: CheckpointStatistics | None = None
    doing: tuple[str, ...] = ()
    in_doubt: Mapping[str, int] = field(default_factory=dict)
    in_doubt_since: int = 0
    balance: str = ""

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Activity:
        """What a newer version has added is left out. Raises TypeError, ValueError or KeyError."""
        known = {each.name: value[each.name] for each in fields(cls) if each.name in value}
        if "checkpoint" in known:
            known["checkpoint"] = CheckpointStatistics.from_json(known["checkpoint"])
        return fitting(cls(**known))
