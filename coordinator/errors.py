"""Errors of the coordinator. All stop the query; none is ever handled by skipping rows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sinks.errors import printable


class CheckpointError(Exception):
    """Base of the coordinator's errors."""

    def __str__(self) -> str:
        return printable(str(self.args[0])) if self.args else ""


class CheckpointLocationMismatch(CheckpointError):
    """Spark's checkpointLocation is not the one that the stored checkpoints belong to."""


class CheckpointGap(CheckpointError):
    """Checkpoints are missing between storage and Spark."""


class QueryNotAdopted(CheckpointError):
    """Storage is empty, but Spark's query is not at its first batch."""


class StorageBehind(CheckpointError):
    """Storage was set back, emptied or moved away: the driver, or an external system, remembers more than it holds."""


class SourceReplaced(CheckpointError):
    """A topic that the query reads was deleted and made anew: Spark would pass over its first records."""


class WrongJob(CheckpointError):
    """The records in storage belong to another job."""


class CorruptRecord(CheckpointError):
    """A record in storage cannot be trusted."""


class UnknownSink(CheckpointError):
    """A record names a sink that this coordinator does not have."""


class Superseded(CheckpointError):
    """A newer driver runs this job; this one is a zombie."""


class WorkersNotReady(CheckpointError):
    """Spark's Python workers lack this library, a sink's driver, or the driver's version of Python."""


class SavepointError(CheckpointError):
    """A savepoint cannot be taken, read or restored; nothing was changed."""


class UnsupportedSpark(CheckpointError):
    """This Spark lacks something that is used of it."""


class NotExactlyOnce(CheckpointError):
    """Exactly-once is required, and the job cannot promise it."""


class CheckpointFailed(CheckpointError):
    """The checkpoint was aborted before it was complete; nothing of it is visible."""


class CheckpointExpired(CheckpointError):
    """It was not complete within `CheckpointConfig.timeout`; the cause of a CheckpointFailed."""


class InDoubtError(CheckpointError):
    """The checkpoint is complete, but the outcome of some transactions cannot be told (yet): `transactions` holds their
    identities, which the operator has to settle."""

    def __init__(self, message: str, transactions: Sequence[dict[str, Any]] = ()) -> None:
        super().__init__(message, transactions)
        self.transactions = list(transactions)


class ExternalSystemBehind(InDoubtError):
    """An external system was set back, and does not hold what was complete and visible."""


class ReplayMismatch(InDoubtError):
    """Lost transactions cannot be written again as they were."""


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
    """`run` has no other attempt. Raised from the error that the last of `attempts` ended with."""

    def __init__(self, message: str, attempts: Sequence[Attempt] = ()) -> None:
        super().__init__(message, attempts)
        self.attempts = tuple(attempts)


_RAISED_IN_A_WORKER = re.compile(r"^Traceback \(most recent call last\):\n(?:[ \t].*\n)+(\S.*)", re.M)


def reason(error: BaseException) -> str:
    """Type and message of an error in a line; of one from a Python worker, which Spark buries in the stacks of both
    sides, what the worker raised."""
    name, text = type(error).__name__, printable(str(error))
    raised = _RAISED_IN_A_WORKER.findall(text)
    if raised:
        return str(raised[-1]).strip()
    return text if text.startswith(f"{name}: ") else f"{name}: {text}"
