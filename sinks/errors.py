"""The base class of all errors that this library raises on purpose, and the errors of the sinks.

All errors of the library, each with its code. Those from `CheckpointError` on are in
`coordinator.errors`, `coordinator.storage` and `coordinator.jobfile`:

    ExactlyOnceError                    EO-ERROR
      SinkError                         EO-SINK
        ConfigurationError              EO-CONFIG
          SchemaMismatch                EO-SCHEMA
          TargetChanged                 EO-TARGET-CHANGED
        BadValue                        EO-VALUE
          TooManyDeadLetters            EO-DEAD-LETTERS
        TransactionBlocked              EO-LOCKED
        TransactionEnded                EO-ENDED
        CommittedError                  EO-COMMITTED
      CheckpointError                   EO-CHECKPOINT
        CheckpointLocationMismatch      EO-LOCATION
        CheckpointGap                   EO-GAP
        QueryNotAdopted                 EO-NOT-ADOPTED
        StorageBehind                   EO-STORAGE-BEHIND
        SourceReplaced                  EO-SOURCE-REPLACED
        WrongJob                        EO-WRONG-JOB
        CorruptRecord                   EO-CORRUPT
        UnknownSink                     EO-UNKNOWN-SINK
        Superseded                      EO-SUPERSEDED
        WorkersNotReady                 EO-WORKERS
        SavepointError                  EO-SAVEPOINT
        UnsupportedSpark                EO-SPARK
        NotExactlyOnce                  EO-GUARANTEE
        CheckpointFailed                EO-FAILED
        CheckpointExpired               EO-TIMEOUT
        InDoubtError                    EO-IN-DOUBT
          ExternalSystemBehind          EO-TARGET-BEHIND
          ReplayMismatch                EO-REPLAY
        JobFailed                       EO-JOB-FAILED
        BatchLeft                       EO-STOPPED
      StorageError                      EO-STORAGE
        NoSuchStorage                   EO-NO-STORAGE
      JobFileError                      EO-JOB-FILE

All are picklable. Errors of the sinks also survive the way from a Spark task to the driver
(`to_json`).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self


def printable(text: str) -> str:
    """Return the text with escapes in place of what could steer a terminal, or turn its direction.

    The text is for the log, a command or a page. It contains values of rows, names, and answers of
    servers.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


_CODE = re.compile(r"\s?\[(EO(?:-[A-Z0-9]+)+)\]")


def without_code(text: str) -> str:
    """Return the message of an error without its code.

    It is for a text in which another error's code comes last.
    """
    return _CODE.sub("", text)


class ExactlyOnceError(Exception):
    """Base of all errors that this library raises on purpose.

    The message says what happened, where, and what to do. It ends with the code of the error, such
    as `[EO-SCHEMA]`, under which docs/errors.md and `coordinator explain` say more. If the message
    has several lines, the code is the last one. A class has a code, and a message may name a more
    special one. The code stays the same when the error is sent to another process. An error that
    wraps another one, and names no code in its own text, takes over the code of the other one.
    """

    code: str = "EO-ERROR"

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        if codes := _CODE.findall(self._text()):
            self.code = codes[-1]

    def __str__(self) -> str:
        text = without_code(self._text())
        # the last line of several may be a statement to copy
        between = "\n" if "\n" in text else " "
        return printable(f"{text}{between}[{self.code}]".lstrip())

    def _text(self) -> str:
        return super().__str__()


class SinkError(ExactlyOnceError):
    """Base of all errors that a sink raises on purpose.

    If `retryable`, another try of the same checkpoint can help.
    """

    code = "EO-SINK"
    retryable: bool = False

    def to_json(self) -> dict[str, Any]:
        return {"type": type(self).__name__, "message": str(self), "retryable": self.retryable}

    @staticmethod
    def from_json(value: dict[str, Any]) -> SinkError:
        """Return the error that `to_json` described.

        A class that this process does not know becomes SinkError, with the name of the class in the
        message.
        """
        kind = _BY_NAME.get(value["type"])
        if kind:
            return kind(value["message"])
        # a subclass that may not be known in this process
        error = SinkError(f"{value['type']}: {value['message']}")
        error.retryable = value["retryable"]
        return error


class ConfigurationError(SinkError):
    """An option, a setting of the server, a privilege or the table is not as the sink needs it."""

    code = "EO-CONFIG"


class SchemaMismatch(ConfigurationError):
    """The columns of the batch do not fit the target. The message names all mismatches at once."""

    code = "EO-SCHEMA"


class TargetChanged(ConfigurationError):
    """The target has a trigger, a rule or the like that was not there when the query began.

    The next restart accepts this change, so it is for a person to restart the query.
    """

    code = "EO-TARGET-CHANGED"


class BadValue(SinkError):
    """The target refuses a value of the batch because of its type, its range or a constraint.

    The message names table, column and row. For dead letters, `reason` is the text without the row,
    and `kind` is the name of the driver's error, if there is one. `reason` and `kind` do not leave
    the task.
    """

    code = "EO-VALUE"
    reason: str = ""
    kind: str = ""

    def because(self, reason: str, kind: str = "") -> Self:
        """Set `reason` and `kind`, and return this error."""
        self.reason = reason
        self.kind = kind
        return self


class TooManyDeadLetters(BadValue):
    """The target refuses more rows of a checkpoint than `max_dead_letters`."""

    code = "EO-DEAD-LETTERS"


class TransactionBlocked(SinkError):
    """A lock wait timed out.

    An open transaction, or an orphaned pre-committed one, holds the lock. The coordinator sweeps
    orphans and tries again.
    """

    code = "EO-LOCKED"
    retryable = True


class TransactionEnded(SinkError):
    """Somebody has ended a transaction before its checkpoint was decided, or has used its name.

    A driver from before storage was restored to an older state may use the name. The coordinator
    writes the checkpoint again.
    """

    code = "EO-ENDED"
    retryable = True


class CommittedError(SinkError):
    """`abort` found the transaction committed."""

    code = "EO-COMMITTED"


_BY_NAME = {
    name: kind
    for name, kind in globals().items()
    if isinstance(kind, type) and issubclass(kind, SinkError)
}
