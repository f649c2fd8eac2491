"""What a coordinator has written since it was made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from coordinator.listener import CheckpointListener, Step


class Tally(CheckpointListener):
    """Counts checkpoints that it saw from pre-commit to visible, and their rows by sink."""

    def __init__(self) -> None:
        self.first = self.last = -1
        self.rows: Counter[str] = Counter()
        self._pending: Mapping[str, int] | None = None

    def on_step(self, step: Step, checkpoint_id: int, facts: Mapping[str, Any]) -> None:
        if step is Step.PRE_COMMITTED:
            self._pending = facts["rows"]
        elif step is Step.FAILED:
            self._pending = None
        elif step is Step.COMMITTED and self._pending is not None:
            self.first = checkpoint_id if self.first < 0 else self.first
            self.last = checkpoint_id
            self.rows.update(self._pending)
            self._pending = None

    def __str__(self) -> str:
        if self.last < 0:
            return "wrote no checkpoint"
        rows = ", ".join(f"{count:,} into {sink}" for sink, count in self.rows.items())
        return f"wrote checkpoints {self.first} to {self.last}; rows: {rows or 'none'}"
