"""What a sink shows operators: findings, transactions in doubt, and changes of its table."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum

from sinks.transaction import Identity, TransactionId

_CLOCK_LIMIT = 5.0  # seconds


class Severity(str, Enum):
    """The severity of a finding."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"  # the job cannot run like this, or cannot keep its promise


@dataclass(frozen=True)
class Finding:
    """One result of `diagnose`.

    `fix` is the statement, setting or step that puts right what the finding is about.
    """

    severity: Severity
    message: str
    fix: str = ""

    @classmethod
    def ok(cls, message: str) -> Finding:
        return cls(Severity.OK, message)

    @classmethod
    def warning(cls, message: str, fix: str) -> Finding:
        return cls(Severity.WARNING, message, fix)

    @classmethod
    def error(cls, message: str, fix: str) -> Finding:
        return cls(Severity.ERROR, message, fix)


@dataclass(frozen=True)
class InDoubt:
    """A pre-committed, unresolved transaction.

    `age` is in seconds, by the external system's clock. A value is None if neither the system nor
    the transaction's name has it.
    """

    transaction: Identity
    lineage: str | None = None
    checkpoint: int | None = None
    subtask: int | None = None
    generation: int | None = None
    round: int | None = None
    age: float | None = None

    @classmethod
    def parsed(cls, transaction: Identity, age: float | None = None) -> InDoubt:
        """Read the transaction's name, if the identity contains one, and return what the name says.

        Without a name, the result has only `transaction` and `age`.
        """
        with suppress(ValueError):
            name = TransactionId.find(".".join(str(value) for value in transaction.values()))
            return cls(
                transaction,
                name.lineage,
                name.checkpoint,
                name.subtask,
                name.generation,
                name.round,
                age,
            )
        return cls(transaction, age=age)


@dataclass(frozen=True)
class SchemaChange:
    """A statement that lets the table take a column of a batch.

    * `step` is the `schema_evolution` that runs the statement.
    * `locks` names the lock and its duration.
    * `automatic` says that the sink, with its current options, runs the statement before the next
      batch.
    """

    column: str
    statement: str
    step: str
    locks: str
    automatic: bool = False

    def __str__(self) -> str:
        return f"{self.statement}; it locks {self.locks}"


@dataclass(frozen=True)
class SchemaDiff:
    """Differences between a batch and the target.

    * `changes` are statements that remove differences.
    * `unfit` are the differences that no statement removes.
    * `notes` have more, such as the schemas of a registry.
    """

    changes: tuple[SchemaChange, ...] = ()
    unfit: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __add__(self, other: SchemaDiff) -> SchemaDiff:
        return SchemaDiff(
            self.changes + other.changes, self.unfit + other.unfit, self.notes + other.notes
        )


def compare_clocks(where: str, ask: Callable[[], float]) -> Iterable[Finding]:
    """Compare this machine's clock with another clock, and yield one finding.

    `ask` returns the time of the other clock, in seconds since the epoch.
    """
    before = time.time()
    theirs = ask()
    after = time.time()
    skew = theirs - after if theirs > after else theirs - before if theirs < before else 0.0
    if abs(skew) > _CLOCK_LIMIT:
        yield Finding.warning(
            f"the clock of {where} is {abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} "
            "this machine's",
            "let both take their time from NTP: timedatectl set-ntp true",
        )
    else:
        yield Finding.ok(
            f"the clock of {where} agrees with this machine's within {_CLOCK_LIMIT:.0f} s"
        )
