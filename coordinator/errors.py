"""Errors of the coordinator.

Each stops the query. None is handled by skipping rows.

`sinks.errors` shows the whole tree of errors, and their codes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sinks.errors import ExactlyOnceError, printable


class CheckpointError(ExactlyOnceError):
    """Base of the coordinator's errors."""

    code = "EO-CHECKPOINT"

    def _text(self) -> str:
        return str(self.args[0]) if self.args else ""


class CheckpointLocationMismatch(CheckpointError):
    """Spark's checkpointLocation does not belong to the stored checkpoints."""

    code = "EO-LOCATION"


class CheckpointGap(CheckpointError):
    """Storage lacks checkpoints that Spark has done."""

    code = "EO-GAP"


class QueryNotAdopted(CheckpointError):
    """Storage is empty, but the query has run before: restore the storage, or set `adopt`."""

    code = "EO-NOT-ADOPTED"


class StorageBehind(CheckpointError):
    """The driver or a target remembers later checkpoints than storage has.

    Storage was restored to an older state, emptied or moved.
    """

    code = "EO-STORAGE-BEHIND"


class SourceReplaced(CheckpointError):
    """A topic that the query reads was deleted and created again.

    Spark would skip its first records.
    """

    code = "EO-SOURCE-REPLACED"


class WrongJob(CheckpointError):
    """The records in storage belong to another job."""

    code = "EO-WRONG-JOB"


class CorruptRecord(CheckpointError):
    """A record in storage is damaged."""

    code = "EO-CORRUPT"


class UnknownSink(CheckpointError):
    """A record names a sink that this coordinator does not have."""

    code = "EO-UNKNOWN-SINK"


class Superseded(CheckpointError):
    """A newer driver has taken the job over; this one must stop."""

    code = "EO-SUPERSEDED"


class WorkersNotReady(CheckpointError):
    """Spark's Python workers cannot load the sinks.

    They lack this library, a sink's driver, or the driver's version of Python.
    """

    code = "EO-WORKERS"


class SavepointError(CheckpointError):
    """A savepoint cannot be taken, read or restored; nothing was changed."""

    code = "EO-SAVEPOINT"


class UnsupportedSpark(CheckpointError):
    """This Spark lacks an internal that the library needs."""

    code = "EO-SPARK"


class NotExactlyOnce(CheckpointError):
    """Exactly-once is required, and the job cannot promise it."""

    code = "EO-GUARANTEE"


class CheckpointFailed(CheckpointError):
    """The checkpoint was aborted before it was complete, or the write of its record failed.

    Nothing of it is visible. A record whose write failed may still have landed.
    """

    code = "EO-FAILED"


class CheckpointExpired(CheckpointError):
    """The checkpoint was not complete within `CheckpointConfig.timeout`.

    This is the cause of a CheckpointFailed.
    """

    code = "EO-TIMEOUT"


class InDoubtError(CheckpointError):
    """The checkpoint is complete, but the outcome of some transactions is not known (yet).

    `transactions` has their identities.
    """

    code = "EO-IN-DOUBT"

    def __init__(self, message: str, transactions: Sequence[dict[str, Any]] = ()) -> None:
        super().__init__(message, transactions)
        self.transactions = list(transactions)


class ExternalSystemBehind(InDoubtError):
    """A target was restored to an older state: it lacks checkpoints that were visible."""

    code = "EO-TARGET-BEHIND"


class ReplayMismatch(InDoubtError):
    """Lost transactions cannot be written again as they were."""

    code = "EO-REPLAY"


@dataclass(frozen=True)
class Attempt:
    """One start of the query.

    Times are seconds since the epoch. Offsets are of the newest complete checkpoint, one JSON text
    per source; () if there is none or they could not be read. `error` is None if the query ended
    without an error. `span` has the beginning and the end by the monotonic clock, which strategies
    use because the wall clock may be changed.
    """

    number: int
    started: float
    ended: float
    offsets_before: tuple[str, ...] = ()
    offsets_after: tuple[str, ...] = ()
    error: Exception | None = None
    span: tuple[float, float] = (0.0, 0.0)


class JobFailed(CheckpointError):
    """`run` has given up. This is raised from the error of the last of its `attempts`."""

    code = "EO-JOB-FAILED"

    def __init__(self, message: str, attempts: Sequence[Attempt] = ()) -> None:
        super().__init__(message, attempts)
        self.attempts = tuple(attempts)


_RAISED_IN_A_WORKER = re.compile(
    r"^Traceback \(most recent call last\):\n(?:[ \t].*\n)+(\S.*)", re.M
)


def reason(error: BaseException) -> str:
    """Return the type and message of an error in one line.

    Spark buries an error of a Python worker in the stacks of both sides. Of such an error, this
    returns what the worker raised.
    """
    name = type(error).__name__
    text = printable(str(error))
    raised = _RAISED_IN_A_WORKER.findall(text)
    if raised:
        return str(raised[-1]).strip()
    return text if text.startswith(f"{name}: ") else f"{name}: {text}"
