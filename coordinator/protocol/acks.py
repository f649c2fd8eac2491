"""What the participants of a checkpoint have answered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sinks.errors import SinkError
from sinks.task import Ack
from sinks.transaction import Committable


@dataclass(frozen=True)
class Acks:
    """Of a first write, one per sink and partition, also for one without rows; of a replay, those of what was lost.
    `ended`: when each sink's last one had come, by the coordinator's clock."""

    all: Sequence[Ack] = ()
    ended: Mapping[str, float] = field(default_factory=dict)

    def of(self, sink: str) -> list[Committable]:
        return [committable for committable in self.committables if committable.sink == sink]

    @property
    def committables(self) -> tuple[Committable, ...]:
        return tuple(ack.committable for ack in self.all if ack.committable)

    @property
    def errors(self) -> list[SinkError]:
        """Those that trying again cannot mend come first."""
        return sorted((ack.error for ack in self.all if ack.error), key=lambda error: error.retryable)

    @property
    def partitions(self) -> Counter[str]:
        return Counter(ack.sink for ack in self.all)

    @property
    def bytes(self) -> dict[str, int]:
        """Of the record batches."""
        return {sink: sum(ack.bytes for ack in self.all if ack.sink == sink) for sink in self.partitions}

    @property
    def rows(self) -> dict[str, int]:
        return {sink: sum(ack.fingerprint.rows for ack in self.all if ack.sink == sink) for sink in self.partitions}
