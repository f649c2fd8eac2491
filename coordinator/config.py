"""Settings of a coordinator."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class CheckpointingMode(str, Enum):
    EXACTLY_ONCE = "exactly_once"
    AT_LEAST_ONCE = "at_least_once"


@dataclass(frozen=True)
class CheckpointConfig:
    """How checkpoints are taken. Raises ValueError on a value out of range.

    mode: AT_LEAST_ONCE lets every task commit by itself; a crash then doubles rows.
    tolerable_failed_checkpoints: how often in a row a batch may fail before it is complete, and be tried again.
    retained_checkpoints: complete checkpoints kept in storage; at least 2.
    commit_timeout: seconds a complete checkpoint may take to become visible before the query stops with `InDoubtError`.
    sweep_interval: seconds between sweeps for orphaned transactions while the query runs.
    adopt: accept a query that has already run without this coordinator, at its next batch.
    """

    mode: CheckpointingMode = CheckpointingMode.EXACTLY_ONCE
    tolerable_failed_checkpoints: int = 0
    retained_checkpoints: int = 3
    commit_timeout: float = 600.0
    sweep_interval: float = 60.0
    adopt: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "mode", CheckpointingMode(self.mode))
        if self.tolerable_failed_checkpoints < 0:
            raise ValueError(f"tolerable_failed_checkpoints must be >= 0, not {self.tolerable_failed_checkpoints}")
        if self.retained_checkpoints < 2:
            raise ValueError(
                f"retained_checkpoints must be >= 2 (the newest and its predecessor), not {self.retained_checkpoints}"
            )
        if self.commit_timeout <= 0 or self.sweep_interval <= 0:
            raise ValueError("commit_timeout and sweep_interval are seconds > 0")

    @property
    def exactly_once(self) -> bool:
        return self.mode is CheckpointingMode.EXACTLY_ONCE
