"""What the brokers remember of a job: each participant's transaction carries an offset of a consumer group of the job's
own, which becomes the group's if, and only if, the records of the transaction become visible."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self

PARTITION = 0

GroupOffsets = Mapping[tuple[str, int], tuple[int, str]]
"""By topic and partition, offset and metadata."""


@dataclass(frozen=True)
class Mark:
    """The checkpoint that a transaction is a part of, as an offset of partition `PARTITION` of a topic of the job."""

    group: str
    lineage: str
    checkpoint: int

    @property
    def offset(self) -> int:
        """The next one to be committed, as with any consumer group."""
        return self.checkpoint + 1

    @property
    def metadata(self) -> str:
        return f"lineage={self.lineage}"

    @classmethod
    def of(cls, group: str, offset: int, metadata: str) -> Self | None:
        """None for an offset that somebody else has set."""
        name, _, lineage = metadata.rstrip("\0").partition("=")  # confluent-kafka writes a NUL behind it
        return cls(group, lineage, offset - 1) if name == "lineage" else None


def newest(group: str, offsets: GroupOffsets) -> dict[str, int]:
    """By lineage, the newest checkpoint that the group has an offset of."""
    found: dict[str, int] = {}
    for offset, metadata in offsets.values():
        if mark := Mark.of(group, offset, metadata):
            found[mark.lineage] = max(mark.checkpoint, found.get(mark.lineage, -1))
    return found
