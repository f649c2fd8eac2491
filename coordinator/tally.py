"""What a coordinator has written since it was made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from coordinator.listener import CheckpointListener, Step


class Tally(CheckpointListener):
    """Counts checkpoints that it saw from pre-commit to visible, and their rows by sink."""

    def __init__(self) -> None:
        self.checkpoints: list[int] = []
        self.rows: Counter[str] = Counter()
        self._pending: Mapping[str, int] | None = None

    def on_step(self, step: Step, checkpoint_id: int, facts: Mapping[str, Any]) -> None:
        if step is Step.PRE_COMMITTED:
            self._pending = facts["rows"]
        elif step is Step.FAILED:
            self._pending = None
        elif step is Step.COMMITTED and self._pending is not None:
            self.checkpoints.append(checkpoint_id)
            self.rows.update(self._pending)
            self._pending = None

    def __str__(self) -> str:
        if not self.checkpoints:
            return "wrote no checkpoint"
        rows = ", ".join(f"{count:,} into {sink}" for sink, count in self.rows.items())
        return f"wrote checkpoints {self.checkpoints[0]} to {self.checkpoints[-1]}; rows: {rows or 'none'}"
