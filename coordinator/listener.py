"""Callbacks at each step of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from sinks._util.log import get_logger

logger = get_logger(__name__)


class Step(str, Enum):
    """The steps of a checkpoint, each of which listeners are told of when its text is true.

    First come the steps of an undisturbed checkpoint, in order, then those of a disturbed one. The
    comment beside or above each step names its facts.
    """

    GENERATION_CLAIMED = "generation claimed"  # generation
    # checkpoint (-1: none), rounds; rows, dead_lettered: by sink
    LOADED = "newest checkpoint loaded"
    RECOVERED = "newest checkpoint committed again"  # committed; lost: by sink
    GUARANTEED = "guarantee computed"  # exactly_once, weaknesses
    SWEPT = "orphans aborted"  # aborted: identities by sink
    TRIGGERED = "checkpoint triggered"  # offsets
    # participants; rows, bytes, transactions, ended: by sink
    PRE_COMMITTED = "all participants pre-committed"
    VALIDATED = "sinks have no objection"
    COMPLETE = "complete record written"  # adopted: another driver's record was there
    COMMITTING = "about to commit"  # participants; transactions: by sink
    COMMITTED = "all participants visible"  # asked: begin and end by sink
    DONE = "about to return to Spark"
    FAILED = "checkpoint aborted before it was complete"  # error
    # tries, errors: by participant
    ASKING_AGAIN = "about to ask again for outcomes that are not known"
    # lost: reasons by participant; round; transactions: by sink
    REPLAYING = "about to write lost participants again"
    REPLAY_PRE_COMMITTED = "replacements pre-committed"
    REPLAY_COMPLETE = "replay record written"  # adopted
    HALTED = "the query ends with an error"  # error


class CheckpointListener:
    """The base of listeners: subclass it and override `on_step`.

    That method is called on the driver, in the query's thread, and for sweeps between two batches
    (`SWEPT`) in another thread, never in both at once. An exception is only logged.
    """

    def on_step(self, step: Step, checkpoint_id: int, facts: Mapping[str, Any]) -> None:
        """Take notice of a step. By default nothing is done.

        `checkpoint_id` is -1 if no checkpoint is in progress. The comment of each step names its
        `facts`.
        """


class Listeners:
    """The listeners of one job.

    If a listener fails, nothing changes for the job or for the other listeners.
    """

    def __init__(self, job: str, listeners: Sequence[CheckpointListener] = ()) -> None:
        self._job = job
        self._all = list(listeners)

    def add(self, listener: CheckpointListener) -> None:
        self._all.append(listener)

    def tell(self, step: Step, checkpoint_id: int = -1, **facts: Any) -> None:
        logger.debug("job %s checkpoint %d: %s %s", self._job, checkpoint_id, step.value, facts)
        for listener in self._all:
            try:
                listener.on_step(step, checkpoint_id, facts)
            except Exception:
                logger.exception("listener %r failed at %s", listener, step)
