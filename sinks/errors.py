"""Errors of the sinks. All are picklable, and survive the way from a Spark task to the driver (`to_json`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self


def printable(text: str) -> str:
    """The text with what could steer a terminal, or turn its direction, as escapes: for log, command and page. Values
    of rows, names and answers of servers are in it."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


class SinkError(Exception):
    """Base of all errors that a sink raises on purpose. The message says what happened, where, and what to do. If
    `retryable`, another try of the same checkpoint can help."""

    retryable: bool = False

    def __str__(self) -> str:
        return printable(super().__str__())

    def to_json(self) -> dict[str, Any]:
        return {"type": type(self).__name__, "message": str(self), "retryable": self.retryable}

    @staticmethod
    def from_json(value: dict[str, Any]) -> SinkError:
        kind = _BY_NAME.get(value["type"])
        if kind:
            return kind(value["message"])
        error = SinkError(f"{value['type']}: {value['message']}")  # a subclass that may not be known in this process
        error.retryable = value["retryable"]
        return error


class ConfigurationError(SinkError):
    """An option, a setting of the server, a right or the table is not as the sink needs it."""


class SchemaMismatch(ConfigurationError):
    """The columns of the batch do not fit the target. Names all mismatches at once."""


class TargetChanged(ConfigurationError):
    """The target has a trigger, a rule or the like that was not there when the query began. The next start accepts it,
    so a person has to make it."""


class BadValue(SinkError):
    """The target refuses a value of the batch (type, range, constraint). Names table, column and row. For dead letters,
    `reason` is the text without the row, and `kind` the name of the driver's error, if any. Neither leaves the task."""

    reason: str = ""
    kind: str = ""

    def because(self, reason: str, kind: str = "") -> Self:
        self.reason, self.kind = reason, kind
        return self


class TooManyDeadLetters(BadValue):
    """The target refuses more rows of a checkpoint than `max_dead_letters`."""


class TransactionBlocked(SinkError):
    """A lock wait ran into its limit: an open transaction, or an orphaned pre-committed one, holds the lock. The
    coordinator sweeps orphans and tries again."""

    retryable = True


class TransactionEnded(SinkError):
    """Somebody has ended a transaction before its checkpoint was decided, or used its name: a driver of before storage
    was set back. The coordinator writes the checkpoint again."""

    retryable = True


class CommittedError(SinkError):
    """`abort` found the transaction committed."""


_BY_NAME = {name: kind for name, kind in globals().items() if isinstance(kind, type) and issubclass(kind, SinkError)}
