"""The tracker, which makes statistics of the protocol's steps, and of nothing else."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from coordinator.errors import reason
from coordinator.listener import CheckpointListener, Step
from coordinator.operations.inspection.balance import Balance
from coordinator.operations.statistics.model import CheckpointStatistics, Status
from sinks._util.log import get_logger
from sinks._util.machine import Clock
from sinks._util.progress import under_way

logger = get_logger("coordinator.statistics")

_LONG_OFFSETS = 10_000
"""The number of characters above which a batch's offsets are left out.

A hundred checkpoints go into one object of storage, and the record has the offsets anyway.
"""
_PHASE_ENDED_BY = {
    Step.PRE_COMMITTED: "prepare",
    Step.VALIDATED: "validate",
    Step.COMPLETE: "decide",
    Step.COMMITTED: "commit",
}


class Reporter(Protocol):
    def report(self, statistics: CheckpointStatistics) -> None:
        """Report a try of a checkpoint that has ended."""


class LogReporter:
    """A reporter that logs one line for each try, at INFO if all is well.

    A formatter that writes JSON finds all facts in the record's attribute `checkpoint`.
    """

    def report(self, statistics: CheckpointStatistics) -> None:
        well = statistics.status in (Status.COMPLETED, Status.RESTORED)
        level = logging.INFO if well else logging.WARNING
        logger.log(
            level,
            "job %s: %s",
            statistics.job,
            statistics,
            extra={"checkpoint": statistics.to_json()},
        )


class CheckpointStatisticsTracker(CheckpointListener):
    """A listener that makes the statistics of one coordinator.

    It passes every try that has ended to the reporters, and knows what is under way.
    """

    def __init__(self, job: str, clock: Clock, sinks: Sequence[str] = ()) -> None:
        self.job = job
        self._clock = clock
        self.sinks = tuple(sinks)
        self.reporters: list[Reporter] = [LogReporter()]
        self.on_storage_call: list[Callable[[str, float], None]] = []
        """Functions to call at each call of checkpoint storage, from any thread.

        They get the name of the call (put, get, list, delete), and its seconds.
        """
        self.generation = 0
        self.exactly_once: bool | None = None
        """Whether the job is exactly-once; None as long as that is not known."""
        self.weaknesses: tuple[str, ...] = ()
        """The reasons why the job is not exactly-once."""
        self.verified_at = 0
        """The time of the last row-count check, in milliseconds since the epoch; 0: not yet."""
        self.balance: Balance | None = None
        """The result of the last row-count check."""
        self.newest: CheckpointStatistics | None = None
        """The newest checkpoint that is completely visible."""
        self.restored: CheckpointStatistics | None = None
        """The checkpoint that the last start has committed again.

        Nobody can tell whether all of it was visible before.
        """
        self.in_doubt: Counter[str] = Counter()
        """The number of transactions that are decided and not known to be visible, by sink."""
        self.rows: Counter[str] = Counter()
        """The rows by sink, of the checkpoints that this driver saw from pre-commit to visible."""
        self.first = -1
        """The first of these checkpoints."""
        self._current: CheckpointStatistics | None = None
        self._started = self._step_ended = self._decided = 0.0
        self._is_recovering = False
        self._offsets: tuple[str, ...] = ()
        self._failed_tries = 0
        self._aborted: Counter[str] = Counter()

    @property
    def in_doubt_seconds(self) -> float:
        """Return how long the transactions in doubt have been decided."""
        return self._clock.monotonic() - self._decided if self.in_doubt else 0.0

    @property
    def under_way_seconds(self) -> float:
        """Return how long the current checkpoint has been under way; 0 between two checkpoints."""
        return self._clock.monotonic() - self._started if self._current else 0.0

    def activity(self, seconds: float) -> dict[str, Any]:
        """Return what a heartbeat tells beside the tries that have ended, as JSON values.

        This is the current try and what is in doubt, each once it has lasted for `seconds`, and the
        first difference of the row counts.
        """
        activity: dict[str, Any] = {}
        current = self._current
        since_when = self._clock.milliseconds() - round(self.in_doubt_seconds * 1000)
        if current and self.under_way_seconds >= seconds:
            copied = replace(current, phases=dict(current.phases), spans=dict(current.spans))
            activity |= {"checkpoint": copied.to_json(), "doing": under_way()}
        if self.in_doubt and self.in_doubt_seconds >= seconds:
            activity |= {
                "in_doubt": dict(self.in_doubt),
                "in_doubt_since": since_when // 1000 * 1000,
            }
        if self.balance and self.balance.findings:
            activity["balance"] = self.balance.findings[0]
        return activity

    def storage_called(self, operation: str, seconds: float) -> None:
        for report in self.on_storage_call:
            try:
                report(operation, seconds)
            except Exception:
                logger.exception("%r could not report a call of storage", report)

    def guaranteed(self, weaknesses: Sequence[str], *, complete: bool = True) -> None:
        """Note why the job is not exactly-once.

        There are no `weaknesses` if it is, or if not everything was asked yet (not `complete`).
        """
        self.exactly_once = not weaknesses if weaknesses or complete else None
        self.weaknesses = tuple(weaknesses)

    def verified(self, balance: Balance) -> None:
        """Note the result of a row-count check. Called from any thread."""
        if balance.findings and balance.findings != (self.balance and self.balance.findings):
            warning = "job %s: row counts differ: %s. `coordinator verify` shows each checkpoint"
            logger.warning(warning, self.job, "; ".join(balance.findings))
        self.balance, self.verified_at = balance, self._clock.milliseconds()

    def on_step(self, step: Step, checkpoint_id: int, facts: Mapping[str, Any]) -> None:
        if step is Step.SWEPT:
            self._aborted.update(
                {sink: len(identities) for sink, identities in facts["aborted"].items()}
            )
        elif step is Step.GENERATION_CLAIMED:
            self.generation = facts["generation"]
            self._is_recovering = True
            self._failed_tries = 0
            self._begin(-1)
        elif step is Step.LOADED and self._is_recovering:
            if facts["checkpoint"] < 0:
                self._is_recovering = False
                self._current = None
            elif self._current:
                self._current.checkpoint_id = facts["checkpoint"]
                self._current.rows = dict(facts["rows"])
                self._current.dead_lettered = dict(facts["dead_lettered"])
        elif step is Step.COMMITTING:
            self._decide(facts["transactions"])
        elif step is Step.RECOVERED and self._is_recovering:
            self._recovered(checkpoint_id, facts["lost"])
        elif step is Step.GUARANTEED:
            self.guaranteed(facts["weaknesses"])
        elif step is Step.TRIGGERED:
            # What was in doubt is of the checkpoint before, which was committed again after a
            # failed try.
            self.in_doubt = Counter()
            self._begin(checkpoint_id, facts["offsets"])
        else:
            if self._current is None and self._begins_late(step):
                self._begin(checkpoint_id)
            if self._current:
                self._go_on(self._current, step, checkpoint_id, facts)

    def _begins_late(self, step: Step) -> bool:
        """Tell whether a try begins with this step.

        That is a replay of a checkpoint that an earlier driver completed, or a start that was
        refused before its claim.
        """
        return step is Step.REPLAYING or (step is Step.HALTED and not self.generation)

    def _decide(self, transactions: Mapping[str, int]) -> None:
        self.in_doubt, self._decided = Counter(transactions), self._clock.monotonic()
        if self._is_recovering and self._current:
            self._current.transactions = dict(transactions)

    def _recovered(self, checkpoint_id: int, lost: Mapping[str, int]) -> None:
        self._is_recovering = False
        self.in_doubt = Counter(lost)
        if lost:  # a replay follows, or an error
            self._begin(checkpoint_id)
        else:
            self._phase("recover")
            self._end(Status.RESTORED)

    def _begin(self, checkpoint_id: int, offsets: Sequence[str] = ()) -> None:
        self._started = self._step_ended = self._clock.monotonic()
        if sum(map(len, offsets)) > _LONG_OFFSETS:
            offsets = self._offsets = ()
        self._current = CheckpointStatistics(
            self.job,
            checkpoint_id,
            self.generation,
            attempt=self._failed_tries + 1,
            triggered_at=self._clock.milliseconds(),
            offsets_from=self._offsets,
            offsets_to=tuple(offsets),
        )

    def _go_on(
        self, current: CheckpointStatistics, step: Step, asked: int, facts: Mapping[str, Any]
    ) -> None:
        if phase := _PHASE_ENDED_BY.get(step):
            self._phase(phase)
        if step is Step.PRE_COMMITTED:
            current.rows = dict(facts["rows"])
            current.bytes = dict(facts["bytes"])
            current.transactions = dict(facts["transactions"])
            current.dead_lettered = dict(facts["dead_lettered"])
            current.spans["prepare"] = {
                sink: self._span(self._started, end) for sink, end in facts["ended"].items()
            }
        elif step is Step.COMPLETE:
            current.adopted = facts["adopted"]
        elif step is Step.ASKING_AGAIN:
            current.commit_retries += 1
        elif step is Step.REPLAYING:
            current.replayed = dict(Counter(current.replayed) + Counter(facts["transactions"]))
        elif step is Step.COMMITTED:
            current.spans["commit"] = {
                sink: self._span(*span) for sink, span in facts["asked"].items()
            }
            self._offsets = current.offsets_to or self._offsets
            self._failed_tries = 0
            self._end(Status.COMPLETED)
        elif step in (Step.FAILED, Step.HALTED):
            self._failed_tries += 1
            # A start has no checkpoint id.
            current.checkpoint_id = asked if current.checkpoint_id < 0 else current.checkpoint_id
            current.error = reason(facts["error"])
            self._end(
                Status.HALTED if self.in_doubt or "decide" in current.phases else Status.FAILED
            )

    def _span(self, begin: float, end: float) -> list[float]:
        return [round(begin - self._started, 6), round(end - self._started, 6)]

    def _phase(self, name: str) -> None:
        now = self._clock.monotonic()
        if self._current:
            self._current.phases[name] = now - self._step_ended
        self._step_ended = now

    def _end(self, status: Status) -> None:
        ended = self._current
        self._current = None
        if ended is None:
            return
        ended.status = status
        ended.exactly_once = bool(self.exactly_once)
        ended.reasons = self.weaknesses
        ended.ended_at = self._clock.milliseconds()
        ended.duration = self._clock.monotonic() - self._started
        ended.aborted = dict(self._aborted)
        self._aborted = Counter()
        ended.unknown = dict(self.in_doubt) if status is Status.HALTED else {}
        if status in (Status.COMPLETED, Status.RESTORED):
            self.newest = ended
            self.in_doubt = Counter()
        if status is Status.RESTORED:
            self.restored = ended
        if status is Status.COMPLETED:
            if self.first < 0 and "prepare" in ended.phases:
                self.first = ended.checkpoint_id
            self.rows.update(ended.rows)
        for reporter in self.reporters:
            try:
                reporter.report(ended)
            except Exception:
                logger.exception("%r could not report checkpoint %d", reporter, ended.checkpoint_id)

    def totals(self) -> str:
        """Describe what has been written since this object was made, for a person."""
        if self.first < 0 or self.newest is None:
            return "wrote no checkpoint"
        text = (
            f"wrote checkpoints {self.first} to {self.newest.checkpoint_id}; rows: "
            f"{_into(self.rows)}"
        )
        if self.restored:
            before = f"checkpoint {self.restored.checkpoint_id} was complete before"
            text += f"; {before}, and only committed again; its rows: {_into(self.restored.rows)}"
        return text


def _into(rows: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} into {sink}" for sink, count in rows.items()) or "none"
