"""What is said of the statistics of several checkpoints together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import mean, quantiles
from typing import Any

from coordinator.statistics.model import PHASES, CheckpointStatistics, Status


def summarized(found: Sequence[CheckpointStatistics]) -> dict[str, Any]:
    """How many ended how; and of those that completed seconds, rows, bytes and transactions."""
    completed = [one for one in found if one.status is Status.COMPLETED]
    summary: dict[str, Any] = {"status": dict(Counter(one.status.value for one in found))}
    summary["took"] = _spread([one.duration for one in completed])
    for phase in PHASES:
        summary[phase] = _spread([one.phases[phase] for one in completed if phase in one.phases])
    for name in ("rows", "bytes", "transactions"):
        summary[name] = _spread([sum(getattr(one, name).values()) for one in completed])
    return summary


def _spread(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    cuts = quantiles(values, n=100, method="inclusive") if len(values) > 1 else [values[0]] * 99
    ends = {"min": min(values), "mean": mean(values)}
    return ends | {"p50": cuts[49], "p90": cuts[89], "p99": cuts[98], "max": max(values)}
