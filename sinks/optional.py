"""Optional abilities of a sink.

Inherit from the classes of the abilities that your sink has:

    class MySink(WholeCommitting[Handle], Auditable[Handle]): ...
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
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
    """Makes a checkpoint visible as a whole.

    No reader sees some of its participants without the others.
    """

    @abstractmethod
    def commit_whole(
        self, checkpoint: Checkpoint, committables: Sequence[Committable]
    ) -> Sequence[CommitOutcome | Exception]:
        """Make these transactions visible in one step, beside those that are visible already.

        The coordinator calls this method in place of `commit`. Return an outcome for each
        transaction, in order, as `commit` does. If one is LOST or UNKNOWN, none becomes visible,
        and HELD is the answer for the others. All come again in one call when the lost one is
        replaced.
        """

    @final
    def commit_all(
        self, checkpoint: Checkpoint, committables: Sequence[Committable]
    ) -> Sequence[CommitOutcome | Exception]:
        return self.commit_whole(checkpoint, committables)

    @final
    def commit(self, committable: Committable) -> NoReturn:
        raise TypeError(f"{type(self).__name__} commits checkpoints as a whole, by commit_whole")


class JointCommitting(TwoPhaseCommitSink[Transaction]):
    """Commits in one step with other sinks of the job that write to the same place.

    An example is a database whose transaction changes several tables. No reader sees the checkpoint
    of one of these sinks without that of the others.
    """

    @abstractmethod
    def place(self) -> Hashable | None:
        """Name the place in which this sink commits; None if it commits by itself.

        If several sinks of a job name equal places, the coordinator calls `validate_jointly` and
        `commit_jointly` of one of them, in place of `validate_all` and `commit_all` of each. So put
        into the name whatever sinks must have in common for that. The name depends on nothing but
        the sink's options, since the sinks must also be committed as one when the external system
        is out of reach, was restarted, or was asked by an earlier start of the query.
        """

    @abstractmethod
    def commit_jointly(
        self, checkpoint: Checkpoint, shares: Sequence[tuple[Sink, Sequence[Committable]]]
    ) -> Sequence[Sequence[CommitOutcome | Exception]]:
        """Make the transactions of several sinks visible in one step.

        `shares` has two or more sinks of this place, this one among them, each with its
        transactions. Return for each share what `commit_all` of its sink would return. If one
        transaction of any share is LOST or UNKNOWN, none becomes visible, and HELD is the answer
        for the others. All shares come again in one call when the lost one is replaced, or when one
        of them has to be asked about again. Transactions that `commit_all` would show one by one
        may become visible so here, too.
        """

    def validate_jointly(
        self, checkpoint: Checkpoint, shares: Sequence[tuple[Sink, Sequence[Committable]]]
    ) -> None:
        """Raise `SinkError` to fail the checkpoint, for all sinks of this place.

        See `Validating.validate_all`. By default each sink that is `Validating` is asked by itself.
        """
        for sink, committables in shares:
            if isinstance(sink, Validating):
                sink.validate_all(checkpoint, committables)


class DirectCommitting(TwoPhaseCommitSink[Transaction]):
    """Writes in at-least-once mode without the second phase.

    Other sinks pre-commit and commit in the task.
    """

    @abstractmethod
    def commit_directly(self, transaction: Transaction) -> None:
        """Make the rows visible now, in a task, in place of `pre_commit`.

        Leave no trace in `in_doubt` and `committed_checkpoints`. If this method raises, `rollback`
        follows.
        """


class Validating(TwoPhaseCommitSink[Transaction]):
    """Refuses a checkpoint for what can only be seen with all participants together."""

    @abstractmethod
    def validate_all(self, checkpoint: Checkpoint, committables: Sequence[Committable]) -> None:
        """Raise `SinkError` to fail the checkpoint.

        The driver calls this method when all participants have pre-committed and nothing is
        decided. After the checkpoint is complete it *must* be committed, so this is the last chance
        to refuse it. Nothing may become visible. The call may be repeated.
        """


class Related(TwoPhaseCommitSink[Transaction]):
    """Knows whether its target depends on the target of another sink of the job."""

    @abstractmethod
    def check_with(self, others: Sequence[Sink]) -> None:
        """Raise `ConfigurationError` if one job cannot write this target and that of another sink.

        The driver calls this method after `check` of all sinks of the job, including the sinks of
        dead letters. The `others` may be sinks of any kind. The call may be repeated.
        """


class SchemaEvolving(TwoPhaseCommitSink[Transaction]):
    """Alters its target for rows with other columns."""

    evolves: bool = True
    """True if `evolve` is to be called."""

    @abstractmethod
    def evolve(self, schema: pa.Schema) -> None:
        """Let the target take rows of this schema.

        The driver calls this method after `check` and before the tasks. The change must harm nobody
        who reads the target, or still writes rows of an older schema. Earlier checkpoints are
        visible, orphans are aborted, and this driver is the newest, but an older driver may do the
        same at the same time, for other new columns, which must stay. The call may be repeated. If
        it raises, the checkpoint fails.
        """

    def schema_diff(self, schema: pa.Schema) -> SchemaDiff | None:
        """Tell how the target differs from rows of this schema, for `coordinator schema diff`.

        It changes nothing. The default is None, which means that the target has no columns.
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
        """Give the sink its name, and the sink of its dead letters.

        * `dead_letters` is the sink for rows that this one refuses.
        * `max_dead_letters` is how many dead letters a checkpoint may have. It is a number of rows,
          or as a float their share of all rows.

        Raises ValueError if these options do not go together.
        """
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
        """Write the rows that the target takes, and return the others in their order.

        A task calls this method in place of `write`, if there are `dead_letters`. After more than
        `most` refused rows it may stop, because the transaction is rolled back then. Raise an error
        that is not about single rows, as `write` does. As long as the target is the same, this
        method must judge a row the same way each time. `sinks.dead_letters.find_refused_rows` finds
        the rows by bisection.
        """

    def lacks_characters(self) -> bool:
        """Tell whether the target cannot hold every string, such as a database that is not UTF-8.

        A task calls this method on a sink that receives dead letters. If the answer is yes, letters
        have escapes in place of what is not ASCII. By default the target can hold every string.
        """
        return False

    def read_dead_letters(self, job: str, sink: str, most: int) -> DeadLetters | None:
        """Return the visible dead letters of sink `sink` of the job, at least the `most` newest.

        `coordinator dead-letters show` calls this method on a sink that receives dead letters. The
        default is None, which means that the sink cannot read them.
        """
        return None


class Auditable(TwoPhaseCommitSink[Transaction]):
    """Can say which rows of a checkpoint the target has."""

    def record_fingerprint(self, transaction: Transaction, fingerprint: Fingerprint) -> None:
        """Take count and hash of the rows written, in a task, before `pre_commit`.

        The hash is any number from 0 to 2**64 - 1, so a signed integer of 64 bits cannot hold it.
        `Fingerprint.stored` has it as a string.

        The record of the checkpoint has the same count and hash later. A sink that stores them in
        the same transaction lets `audit` compare. By default nothing is stored.
        """

    @abstractmethod
    def audit(self, job: str, parts: Sequence[Part], *, quick: bool = False) -> Audit:
        """Return what the external system has of these parts of visible checkpoints.

        It is for `coordinator verify`. The coordinator asks, too, before it writes lost
        transactions again, because `Holding.unexpected` shows whether they already were (R15). The
        method changes nothing. With `quick` it does nothing that takes longer the more rows there
        are. Hashes are added modulo 2**64, as `Fingerprint.__add__` does. Transactions of other
        lineages, jobs and sinks do not count, nor do attempts that were aborted or are in doubt.
        Anything slow reports to `sinks._util.progress.progress`.
        """


class Diagnosable(TwoPhaseCommitSink[Transaction]):
    """Shows operators its condition. Each method has a default."""

    def weaknesses(self) -> Sequence[str]:
        """List why this target may lose or duplicate rows in spite of two-phase commit.

        An example is a server that does not fsync. The coordinator asks for the job's
        `coordinator.Guarantee` after `check`, when a query is set up, and in the query's first
        batch. By default there are none.
        """
        return ()

    def set_answer_timeout(self, seconds: float) -> None:
        """Let calls to the system raise if it does not answer within `seconds` from the first call.

        A command calls this method first, and a driver never does. It is for sinks that would wait
        longer otherwise. By default it does nothing.
        """

    def probe_schema(self) -> pa.Schema | None:
        """Return columns that the target takes.

        With these columns `diagnose` pre-commits and aborts an empty transaction. The default is
        None, with which `diagnose` does not.
        """
        return None

    def diagnose(self, job: str) -> Iterable[Finding]:
        """Check everything that can keep this sink from working, for `coordinator doctor`.

        The method leaves nothing behind. An exception counts as a finding. By default it checks
        `open`, `in_doubt`, `weaknesses`, and an empty transaction if there is a `probe_schema`.
        """
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
        """Say how the sink writes, for a person: mode, keys, strategy.

        `written` is a transaction of the newest checkpoint. The default is "", which says nothing.
        """
        return ""

    def inspect(self, transactions: Sequence[Identity]) -> Sequence[InDoubt]:
        """Return details of transactions that `in_doubt` listed, in order.

        By default they are what the transactions' names say, if an identity has
        `TransactionContext.transaction_id` in it.
        """
        return [InDoubt.parsed(transaction) for transaction in transactions]


OPTIONAL: tuple[type[Sink], ...] = (
    WholeCommitting,
    JointCommitting,
    DirectCommitting,
    Validating,
    Related,
    SchemaEvolving,
    DeadLettering,
    Auditable,
    Diagnosable,
)


def basic_findings(sink: Sink, job: str) -> Iterable[Finding]:
    """Yield the findings of checks that fit any sink."""
    sink.open()
    yield Finding.ok(f"opened: {sink!r}")
    yield Finding.ok(f"{len(list(sink.in_doubt(job)))} transaction(s) of this job in doubt")


def commit_now(sink: Sink, transaction: object, checkpoint: Checkpoint) -> None:
    """Commit a transaction in its task, in at-least-once mode.

    A sink that cannot commit directly pre-commits the transaction and then commits it.
    """
    if isinstance(sink, DirectCommitting):
        sink.commit_directly(transaction)
        return
    [outcome] = sink.notify_checkpoint_complete(checkpoint, [sink.snapshot_state(transaction)])
    if isinstance(outcome, Exception):
        raise outcome
    if outcome != CommitOutcome.COMMITTED:
        raise RuntimeError(f"sink {sink.name!r} could not commit: {outcome}")
