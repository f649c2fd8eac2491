"""Optional abilities of a sink.

Inherit from those that it has.

class MySink(WholeCommitting[Handle], Auditable[Handle]): ...
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NoReturn, final

import pyarrow as pa

from sinks.audit import Audit, Part
from sinks.base import Sink, Transaction, TwoPhaseCommitSink
from sinks.dead_letters import DeadLetters, Refusal, limit_problem
from sinks.diagnosis import Finding, InDoubt, SchemaDiff
from sinks.transaction import (
    Checkpoint,
    CommitOutcome,
    Committable,
    Fingerprint,
    Identity,
    TransactionId,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class WholeCommitting(TwoPhaseCommitSink[Transaction]):
    """A checkpoint becomes visible as a whole: no reader sees some of its participants without the
    others."""

    @abstractmethod
    def commit_whole(
        self, checkpoint: Checkpoint, committables: Sequence[Committable]
    ) -> Sequence[CommitOutcome | Exception]:
        """In place of `commit`, with its outcomes, one each and in order: make all of them visible
        in one step, beside those that are already. If one is LOST or UNKNOWN, none becomes visible:
        HELD is the answer for the others; all come in one call again when the lost one is replaced.
        """

    @final
    def commit_all(
        self, checkpoint: Checkpoint, committables: Sequence[Committable]
    ) -> Sequence[CommitOutcome | Exception]:
        return self.commit_whole(checkpoint, committables)

    @final
    def commit(self, committable: Committable) -> NoReturn:
        raise TypeError(f"{type(self).__name__} commits checkpoints as a whole, by commit_whole")


class DirectCommitting(TwoPhaseCommitSink[Transaction]):
    """At-least-once mode without the second phase.

    Other sinks pre-commit and commit in the task.
    """

    @abstractmethod
    def commit_directly(self, transaction: Transaction) -> None:
        """In a task, in place of `pre_commit`: make the rows visible now, and leave no trace in
        `in_doubt` and `committed_checkpoints`. If it raises, `rollback` follows."""


class Validating(TwoPhaseCommitSink[Transaction]):
    """Refuses a checkpoint for what can only be seen with all participants together."""

    @abstractmethod
    def validate_all(self, checkpoint: Checkpoint, committables: Sequence[Committable]) -> None:
        """On the driver, when all participants have pre-committed and nothing is decided: raise
        `SinkError` to fail the checkpoint. After it is complete it *must* be committed. Nothing may
        become visible. May be repeated."""


class Related(TwoPhaseCommitSink[Transaction]):
    """Knows whether its target depends on that of another sink of the job."""

    @abstractmethod
    def check_with(self, others: Sequence[Sink]) -> None:
        """On the driver, after `check` of all sinks of the job, those of dead letters too: raise
        `ConfigurationError` if one job cannot write this target and that of one of the `others`.
        They may be sinks of any kind. May be repeated."""


class SchemaEvolving(TwoPhaseCommitSink[Transaction]):
    """Alters its target for rows with other columns."""

    evolves: bool = True
    """Whether `evolve` is to be called."""

    @abstractmethod
    def evolve(self, schema: pa.Schema) -> None:
        """On the driver, after `check` and before the tasks: let the target take rows of this
        schema, in ways that harm nobody who reads it, or still writes rows of an older schema.
        Earlier checkpoints are visible, orphans are aborted, and this driver is the newest; but an
        older one may do the same at the same time. May be repeated; if it raises, the checkpoint
        fails."""

    def schema_diff(self, schema: pa.Schema) -> SchemaDiff | None:
        """How the target differs from rows of this schema, for `coordinator schema diff`.

        Changes nothing. Default: None, the target has no columns.
        """
        return None


class DeadLettering(TwoPhaseCommitSink[Transaction]):
    """Names the rows that its target refuses: they go to another sink, in the same checkpoint."""

    def __init__(
        self,
        *,
        name: str,
        transform: Callable[[DataFrame], DataFrame] | None = None,
        dead_letters: Sink | None = None,
        max_dead_letters: int | float = 1000,
    ) -> None:
        """`dead_letters` is the sink for rows that this one refuses, `max_dead_letters` how many a
        checkpoint may have of them: rows, or as a float their share of all rows. Raises ValueError
        where these do not go together."""
        super().__init__(name=name, transform=transform)
        self.dead_letters = dead_letters
        self.max_dead_letters = max_dead_letters
        if problem := limit_problem(max_dead_letters):
            raise ValueError(f"sink {name!r}: {problem}")
        if dead_letters is None:
            return
        if not isinstance(dead_letters, TwoPhaseCommitSink):
            raise ValueError(f"sink {name!r}: dead_letters is a sink, not {dead_letters!r}")
        letters = f"sink {dead_letters.name!r} is for dead letters of {name!r}"
        if dead_letters.dead_letters is not None:
            raise ValueError(f"{letters}, and cannot have some itself")
        if dead_letters.transform is not None:
            raise ValueError(
                f"{letters}, whose tasks write it: it has no DataFrame, so it takes no transform "
                "(nor value_format)"
            )

    @abstractmethod
    def write_good_rows(
        self, transaction: Transaction, batch: pa.RecordBatch, most: int
    ) -> Sequence[Refusal]:
        """In a task, in place of `write`, if there are `dead_letters`: write the rows that the
        target takes, and return the others in their order. After more than `most` of them it may
        stop: the transaction is rolled back then. An error that is not about single rows is raised,
        as by `write`. As long as the target is the same, it must judge a row the same way each
        time. `sinks.dead_letters.find_refused_rows` finds them by bisection."""

    def lacks_characters(self) -> bool:
        """On a sink that receives dead letters, in a task: whether its target cannot hold every
        text, as a database that is not UTF-8. Letters then have escapes in place of what is not
        ASCII. Default: it can."""
        return False

    def read_dead_letters(self, job: str, sink: str, most: int) -> DeadLetters | None:
        """On a sink that receives dead letters: the visible ones of sink `sink` of the job, at
        least the `most` newest, for `coordinator dead-letters show`. Default: None, it cannot read
        them."""
        return None


class Auditable(TwoPhaseCommitSink[Transaction]):
    """Can say which rows of a checkpoint the target has."""

    def record_fingerprint(self, transaction: Transaction, fingerprint: Fingerprint) -> None:
        """In a task, before `pre_commit`: count and hash of the rows written, as the record of the
        checkpoint has them later. A sink that stores them in the same transaction lets `audit`
        compare. Default: nothing."""

    @abstractmethod
    def audit(self, job: str, parts: Sequence[Part], *, quick: bool = False) -> Audit:
        """What the external system has of these parts of visible checkpoints, for `coordinator
        verify`. Also asked before lost transactions are written again: `Holding.unexpected` shows
        whether they already were (R15). Changes nothing. With `quick` it does nothing that takes
        longer the more rows there are. Anything slow reports to `sinks._util.progress.progress`."""


class Diagnosable(TwoPhaseCommitSink[Transaction]):
    """Shows operators its condition. Each method has a default."""

    def weaknesses(self) -> Sequence[str]:
        """Why this target may lose or double rows in spite of two-phase commit, such as a server
        that does not fsync. Asked for the job's `coordinator.Guarantee` after `check`: when a query
        is set up, and in its first batch. Default: nothing."""
        return ()

    def set_answer_timeout(self, seconds: float) -> None:
        """A command calls this first, a driver never: calls to the system raise if it does not
        answer within `seconds` from the first one. For sinks that would wait longer otherwise.
        Default: nothing."""

    def probe_schema(self) -> pa.Schema | None:
        """Columns that the target takes.

        With them `diagnose` pre-commits and aborts an empty transaction. Default: None, and it does
        not.
        """
        return None

    def diagnose(self, job: str) -> Iterable[Finding]:
        """Check everything that can keep this sink from working, for `coordinator doctor`, and
        leave nothing behind. An exception counts as a finding. Default: `open`, `in_doubt`,
        `weaknesses`, and an empty transaction if there is a `probe_schema`."""
        yield from basic_findings(self, job)
        for weakness in self.weaknesses():
            yield Finding.warning(
                weakness, "change that setting or place; until then the job is not exactly-once"
            )
        if (schema := self.probe_schema()) is not None:
            name = TransactionId(job, "doctor", 0, self.name, 0, 0, 0, 0, time.time_ns())
            transaction = self.begin_transaction(name.context(schema))
            try:
                committable = self.snapshot_state(transaction)
            except BaseException:
                self.rollback(transaction)
                raise
            self.abort(committable.transaction)
            self.purge(Checkpoint(job, "doctor", 0, oldest_retained=1_000_000))
            yield Finding.ok("an empty transaction was pre-committed and aborted")

    def describe_writing(self, written: Identity | None = None) -> str:
        """How it writes, for a person: mode, keys, strategy.

        `written` is a transaction of the newest checkpoint. Default: "", it does not tell.
        """
        return ""

    def inspect(self, transactions: Sequence[Identity]) -> Sequence[InDoubt]:
        """Details of transactions that `in_doubt` listed, in order.

        Default: what their names say, if an identity has `TransactionContext.transaction_id` in it.
        """
        return [InDoubt.parsed(transaction) for transaction in transactions]


OPTIONAL: tuple[type[Sink], ...] = (
    WholeCommitting,
    DirectCommitting,
    Validating,
    Related,
    SchemaEvolving,
    DeadLettering,
    Auditable,
    Diagnosable,
)


def basic_findings(sink: Sink, job: str) -> Iterable[Finding]:
    """Checks that fit any sink."""
    sink.open()
    yield Finding.ok(f"opened: {sink!r}")
    yield Finding.ok(f"{len(list(sink.in_doubt(job)))} transaction(s) of this job in doubt")


def commit_now(sink: Sink, transaction: object, checkpoint: Checkpoint) -> None:
    """At-least-once mode, in a task."""
    if isinstance(sink, DirectCommitting):
        sink.commit_directly(transaction)
        return
    [outcome] = sink.notify_checkpoint_complete(checkpoint, [sink.snapshot_state(transaction)])
    if isinstance(outcome, Exception):
        raise outcome
    if outcome != CommitOutcome.COMMITTED:
        raise RuntimeError(f"sink {sink.name!r} could not commit: {outcome}")
