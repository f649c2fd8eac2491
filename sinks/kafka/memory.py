"""What the brokers remember of a job: each participant's transaction carries an offset of a consumer group of the job's
own, which becomes the group's if, and only if, the records of the transaction become visible."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self

PARTITION = 0
_METADATA = re.compile(r"lineage=(\w*)(?: round=(\d+))?")

GroupOffsets = Mapping[tuple[str, int], tuple[int, str]]
"""By topic and partition, offset and metadata."""


@dataclass(frozen=True)
class Mark:
    """The checkpoint, and the replay (above 0) of it, that a transaction is a part of, as an offset of partition
    `PARTITION` of a topic of the job."""

    group: str
    lineage: str
    checkpoint: int
    round: int = 0

    @property
    def offset(self) -> int:
        """The next one to be committed, as with any consumer group."""
        return self.checkpoint + 1

    @property
    def metadata(self) -> str:
        return f"lineage={self.lineage}" + (f" round={self.round}" if self.round else "")

    @classmethod
    def of(cls, group: str, offset: int, metadata: str) -> Self | None:
        """None for an offset that somebody else has set."""
        match = _METADATA.fullmatch(metadata.rstrip("\0"))  # confluent-kafka writes a NUL behind it
        return cls(group, match[1], offset - 1, int(match[2] or 0)) if match else None


def newest(group: str, offsets: GroupOffsets) -> dict[str, tuple[int, int]]:
    """By lineage, the newest checkpoint that the group has an offset of, and the round of that."""
    marks: dict[str, tuple[int, int]] = {}
    for offset, metadata in offsets.values():
        if mark := Mark.of(group, offset, metadata):
            marks[mark.lineage] = max((mark.checkpoint, mark.round), marks.get(mark.lineage, (-1, 0)))
    return marks
