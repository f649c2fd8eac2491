"""What is said of the statistics of several checkpoints together, or of one beside its numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import mean, quantiles
from typing import Any

from coordinator.operate.text import by_sink
from coordinator.statistics.model import PHASES, CheckpointStatistics, Status


def remarks(one: CheckpointStatistics) -> str:
    said = [one.error] if one.error else []
    said += [f"recovery {one.phases['recover']:.3f} s"] if "recover" in one.phases else []
    said += [f"try {one.attempt}"] if one.attempt > 1 else []
    said += [f"asked {one.commit_retries} times again"] if one.commit_retries else []
    said += [f"written again: {by_sink(one.replayed)}"] if one.replayed else []
    said += [f"orphans aborted: {by_sink(one.aborted)}"] if one.aborted else []
    said += [f"dead letters: {by_sink(one.dead_lettered)}"] if any(one.dead_lettered.values()) else []
    return "; ".join(said)


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
