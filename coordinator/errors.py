"""Errors of the coordinator. All stop the query; none is ever handled by skipping rows.

* CheckpointError
    * CheckpointLocationMismatch - Spark's checkpointLocation is not the one that the stored checkpoints belong to
    * CheckpointGap - checkpoints are missing between storage and Spark
    * FirstCheckpointError - storage is empty, but Spark's query is not at its first batch
    * StorageBehind - storage was set back or emptied: an external system remembers later checkpoints than it
    * WrongJob - the records in storage belong to another job
    * CorruptRecord - a record in storage cannot be trusted
    * UnknownSink - a record names a sink that this coordinator does not have
    * Superseded - a newer driver runs this job; this one is a zombie
    * WorkersNotReady - Spark's Python workers lack this library, a sink's driver, or the driver's version of Python
    * SavepointError - a savepoint cannot be taken, read or restored; nothing was changed
    * DeadLetterError - dead letters cannot be put through again as they are; nothing was changed
    * UnsupportedSpark - this Spark lacks something that is used of it
    * NotExactlyOnce - exactly-once is required, and the job cannot promise it
    * CheckpointFailed - the checkpoint was aborted before it was complete; nothing of it is visible
    * CheckpointExpired - it was not complete within `CheckpointConfig.timeout`; the cause of a CheckpointFailed
    * InDoubtError - complete, but the outcome of some transactions cannot be told (yet); `transactions` names them
        * ExternalSystemBehind - it was set back, and does not hold what was complete and visible
        * ReplayMismatch - lost transactions cannot be written again as they were
    * JobFailed - `run` has no other attempt; its cause is the last error, `attempts` has them all
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


class CheckpointError(Exception):
    """Base of the coordinator's errors."""


class CheckpointLocationMismatch(CheckpointError):
    pass


class CheckpointGap(CheckpointError):
    pass


class FirstCheckpointError(CheckpointError):
    pass


class StorageBehind(CheckpointError):
    pass


class WrongJob(CheckpointError):
    pass


class CorruptRecord(CheckpointError):
    pass


class UnknownSink(CheckpointError):
    pass


class Superseded(CheckpointError):
    pass


class WorkersNotReady(CheckpointError):
    pass


class SavepointError(CheckpointError):
    pass


class DeadLetterError(CheckpointError):
    """Dead letters cannot be put through again as they are; nothing was changed."""


class UnsupportedSpark(CheckpointError):
    pass


class NotExactlyOnce(CheckpointError):
    pass


class CheckpointFailed(CheckpointError):
    pass


class CheckpointExpired(CheckpointError):
    pass


class InDoubtError(CheckpointError):
    """`transactions` holds the identities whose outcome the operator has to settle."""

    def __init__(self, message: str, transactions: Sequence[dict[str, Any]] = ()) -> None:
        super().__init__(message, transactions)
        self.transactions = list(transactions)

    def __str__(self) -> str:
        return str(self.args[0])


class ExternalSystemBehind(InDoubtError):
    pass


class ReplayMismatch(InDoubtError):
    pass


@dataclass(frozen=True)
class Attempt:
    """One start of the query. Times are seconds since the epoch; offsets are those of the newest complete checkpoint,
    one JSON text per source, () if there is none (or if they could not be read). `error` is None for a good end.
    `span` is begin and end by the monotonic clock: what strategies go by, since the other may be set back or forth."""

    number: int
    started: float
    ended: float
    offsets_before: tuple[str, ...] = ()
    offsets_after: tuple[str, ...] = ()
    error: Exception | None = None
    span: tuple[float, float] = (0.0, 0.0)


class JobFailed(CheckpointError):
    """Raised from the error that the last of `attempts` ended with."""

    def __init__(self, message: str, attempts: Sequence[Attempt] = ()) -> None:
        super().__init__(message, attempts)
        self.attempts = tuple(attempts)

    def __str__(self) -> str:
        return str(self.args[0])


_RAISED_IN_A_WORKER = re.compile(r"^Traceback \(most recent call last\):\n(?:[ \t].*\n)+(\S.*)", re.M)


def reason(error: BaseException) -> str:
    """Type and message of an error in a line; of one from a Python worker, which Spark buries in the stacks of both
    sides, what the worker raised."""
    raised = _RAISED_IN_A_WORKER.findall(str(error))
    name, text = type(error).__name__, str(error)
    if raised:
        return str(raised[-1]).strip()
    return text if text.startswith(f"{name}: ") else f"{name}: {text}"
