"""What the participants of a checkpoint have answered."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from sinks.errors import SinkError
from sinks.task import Ack
from sinks.transaction import Committable


@dataclass(frozen=True)
class Acks:
    """By sink, one per partition, also for one without rows; and when each sink's last one had come, by the
    coordinator's clock."""

    by_sink: Mapping[str, Sequence[Ack]] = field(default_factory=dict)
    ended: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def by_their_sinks(cls, acks: Iterable[Ack], ended: Mapping[str, float]) -> Acks:
        by_sink: dict[str, list[Ack]] = {}
        for ack in acks:
            by_sink.setdefault(ack.sink, []).append(ack)
        return cls(by_sink, ended)

    def of(self, sink: str) -> list[Committable]:
        return [ack.committable for ack in self.by_sink.get(sink, ()) if ack.committable]

    @property
    def committables(self) -> tuple[Committable, ...]:
        return tuple(committable for sink in self.by_sink for committable in self.of(sink))

    @property
    def errors(self) -> list[SinkError]:
        """Those that trying again cannot mend come first."""
        errors = [ack.error for acks in self.by_sink.values() for ack in acks if ack.error]
        return sorted(errors, key=lambda error: error.retryable)

    @property
    def bytes(self) -> dict[str, int]:
        """Of the record batches."""
        return {sink: sum(ack.bytes for ack in acks) for sink, acks in self.by_sink.items()}

    @property
    def rows(self) -> dict[str, int]:
        return {sink: sum(ack.fingerprint.rows for ack in acks) for sink, acks in self.by_sink.items()}
