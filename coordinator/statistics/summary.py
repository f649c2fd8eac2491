"""What is said of the statistics of several checkpoints together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import mean, quantiles
from typing import Any

from coordinator.statistics.model import PHASES, CheckpointStatistics, Status


def summarized(tries: Sequence[CheckpointStatistics]) -> dict[str, Any]:
    """How many ended how; and of those that completed seconds, rows, bytes and transactions."""
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
