"""The contract of a sink. Optional abilities are in `sinks.optional`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar, final

import pyarrow as pa

from sinks._util.progress import progress
from sinks._util.threads import side_by_side
from sinks.transaction import Checkpoint, CommitOutcome, Committable, Identity, TransactionContext

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Transaction = TypeVar("Transaction")


class TwoPhaseCommitSink(ABC, Generic[Transaction]):
    """Writes a checkpoint in transactions that become visible on all partitions, or never.

    Subclass it, implement the seven abstract methods, and hand an instance to
    `coordinator.CheckpointCoordinator`. `sinks.testing.SinkConformance` tests the contract;
    `sinks.optional` has further abilities. One transaction belongs to one *participant*: a task
    that writes one partition of one checkpoint.

    ===================== ======== ======================================================= ========
    ================== method where order repeated may fail ===================== ========
    ======================================================= ======== ================== open both
    first in each task; first on the driver yes yes committed_checkpoints driver first at a start;
    again before a checkpoint is decided yes stops the query check driver before the first batch of
    a run, again on a new schema yes yes, stops the query begin_transaction task before the first
    row; never for a partition without no task fails write task once per Arrow record batch no task
    fails pre_commit task after the last row no task fails rollback task after a write or pre_commit
    that failed no logged owns driver before a commit of what a record names yes stops the query
    commit_all, commit driver after the checkpoint is complete, and in recovery yes asked again
    purge driver when all of a checkpoint with rows is visible yes logged in_doubt driver in
    recovery, and every so often yes asked again abort_all, abort driver for what `in_doubt` lists
    and no record names yes asked again close both last yes logged ===================== ========
    ======================================================= ======== ==================

    The object is pickled and sent to the executors: open handles belong into what
    `begin_transaction` returns, or into attributes set in `open` and dropped in `__getstate__`.
    Raise `sinks.errors.SinkError` if Spark's retry cannot help; for any other exception Spark
    retries the task.

    **Threads.** A task has a copy of the sink to itself, in one thread; copies for several tasks
    may live in one process, one after another. On the driver the methods are called one at a time,
    though not always by the same thread (sweeps between batches have their own); only `commit` is
    called from several at once, by the default `commit_all`.

    **Processes.** Any process may ask about any transaction: another driver that does not know that
    it was superseded calls `commit`, `abort` and `in_doubt` at the same time, and its tasks go on
    writing. So what decides an outcome has to be atomic in the external system: a compare-and-set,
    a rename, a primary key.
    """

    system: str = "the external system"
    """Name of the target's kind, for messages."""
    dead_letters: Sink | None = None
    """The sink for rows that this one refuses; only `sinks.optional.DeadLettering` sets it."""
    takes_at_least_once: bool = True
    """Whether it can be written in at-least-once mode."""

    def __init__(
        self, *, name: str, transform: Callable[[DataFrame], DataFrame] | None = None
    ) -> None:
        """`name` is the sink's uid: unique within its coordinator and stable over restarts, because
        records and transactions carry it. `transform` maps the batch's DataFrame to the one that it
        writes; it is not pickled."""
        if not name:
            raise ValueError(
                "a sink needs a name: it is how a restarted job finds the transactions of this "
                "sink again"
            )
        self.name = name
        self.transform = transform

    # ------------------------------------------------------------------ in both
    def open(self) -> None:
        """Acquire what the sink needs in this process.

        Called again at each start of a query, also without `close` in between. Must not touch
        transactions. Default: nothing.
        """

    def close(self) -> None:
        """Release it.

        Called even if `open` failed. Must not touch pre-committed transactions. Default: nothing.
        """

    # ------------------------------------------------------------------ in the task
    @abstractmethod
    def begin_transaction(self, context: TransactionContext) -> Transaction:
        """Start a transaction named after `context.transaction_id`, and return its handle:
        everything that `write`, `pre_commit` and `rollback` need, because several may be open on
        one sink object. If this raises, it has to clean up after itself: without a handle there is
        no `rollback`. What it cannot, as when a request took effect and its answer was lost,
        `purge` removes, or `abort` if `in_doubt` lists it."""

    @abstractmethod
    def write(self, transaction: Transaction, batch: pa.RecordBatch) -> None:
        """Write the rows of one Arrow record batch (schema: `context.schema`; never empty).

        They must stay invisible, and the transaction is not in doubt yet. Raises
        `sinks.errors.BadValue` for a value that the target cannot store exactly. If rows replace
        others by a key, the last row of a key in the task wins, and a null equals nothing; or
        refuse such rows with BadValue, before the checkpoint is decided.
        """

    @abstractmethod
    def pre_commit(self, transaction: Transaction) -> Identity | Committable:
        """Make the transaction durable but invisible, so that any other process can commit or abort
        it. Return its identity (a dict of JSON values, as `in_doubt` lists it), or a `Committable`
        that adds proof. The task may die at any moment afterwards; the transaction must live on.
        Raises if `abort` has meanwhile left its proof under this name."""

    @abstractmethod
    def rollback(self, transaction: Transaction) -> None:
        """Remove every trace of a transaction that is not needed, or whose `write` or `pre_commit`
        raised. A pre-commit that raised may have taken effect (its answer got lost): check, and
        undo it too, or leave it to the sweep, which aborts transactions that `in_doubt` lists and
        no record names. Not called when the process dies."""

    @final
    def snapshot_state(self, barrier: Transaction) -> Committable:
        """Flink's name for `pre_commit`.

        The barrier is the end of the partition of the micro-batch.
        """
        result = self.pre_commit(barrier)
        return result if isinstance(result, Committable) else Committable(transaction=result)

    # ------------------------------------------------------------------ on the driver
    def check(self, schema: pa.Schema) -> None:
        """Raise `ConfigurationError` if the target cannot take rows of this schema, with all
        reasons at once. Ignore differences that `SchemaEvolving.evolve` will remove. Default: any
        schema is fine."""

    @final
    def notify_checkpoint_complete(
        self, checkpoint: Checkpoint, committables: Sequence[Committable]
    ) -> Sequence[CommitOutcome | Exception]:
        """Flink's name for `commit_all`. The checkpoint is durably complete."""
        return self.commit_all(checkpoint, committables) if committables else []

    def commit_all(
        self, checkpoint: Checkpoint, committables: Sequence[Committable]
    ) -> Sequence[CommitOutcome | Exception]:
        """Commit all participants of this sink that are not known to be committed.

        Return an outcome for each, in order, or an exception for those to ask again. Override it
        for speed: one request for many. A failure of one must not prevent the outcome of another,
        unless they have to become visible in order. Then, if one is LOST or UNKNOWN, commit none
        and answer HELD for the others; all come again, in one call, with the replacement. A raised
        exception is the answer for all. Default: `commit` in 16 threads.
        """
        return commit_in_threads(self, committables, threads=16)

    @abstractmethod
    def commit(self, committable: Committable) -> CommitOutcome:
        """Make one pre-committed transaction visible, whole, and return its outcome:

        * COMMITTED: its rows are visible, by this call or an earlier one, and stay so.
        * LOST: it is proven to be rolled back. No process can make it visible any more, not even
          one that is in the middle of `commit`. The coordinator writes the rows again. "Not found"
          is no proof.
        * UNKNOWN: neither can be proven, and asking again will not help: it was never seen, or its
          proof is gone. The query stops, and a person decides.
        * An exception: the system cannot answer now. The coordinator asks again until
          `commit_timeout`.
        * HELD is only for `commit_all`.
        """

    @abstractmethod
    def abort(self, transaction: Identity) -> None:
        """Roll back one pre-committed transaction by its identity, and keep a proof of it: a later
        `commit` answers LOST. If it is committed, raise `CommittedError` and change nothing.

        It is no error if it was aborted already, or was never seen (aborted and purged, or the
        system was set back). For a transaction that was never seen, leave a proof only if that
        makes a later `begin_transaction` or `pre_commit` under this name fail. Otherwise leave
        none, and `commit` answers UNKNOWN.
        """

    def abort_all(self, transactions: Sequence[Identity]) -> Sequence[Exception | None]:
        """Call `abort` for each.

        Return what it raised, or None, in order; a raised exception is the answer for all. Override
        it for speed, where one step of the system can abort many. Default: one after the other.
        """
        answers: list[Exception | None] = []
        with progress(f"sink {self.name}: abort", len(transactions), "transactions") as advance:
            for transaction in transactions:
                try:
                    self.abort(transaction)
                    answers.append(None)
                except Exception as error:
                    answers.append(error)
                advance(1)
        return answers

    @abstractmethod
    def in_doubt(self, job: str) -> Iterable[Identity]:
        """The identities of all pre-committed, unresolved transactions of this job and sink, of any
        lineage and generation, as the external system lists them now. The coordinator aborts every
        listed transaction that no record names. So never list transactions of another job, or of
        another sink of this job in the same system. List an open one only if its `pre_commit` fails
        after an abort.

        Store `context.job` and `context.sink` with the transaction, and search for `job` and
        `self.name`. If the system stores only a name, names of the job start with
        `TransactionId.prefix(job)`, and those of the sink have `TransactionId.parse(name).sink ==
        token(self.name)`.
        """

    def owns(self, job: str, transaction: Identity) -> bool:
        """Whether this can be the identity of a transaction of this job and sink.

        Asked before a transaction that a record names is committed. Default: yes.
        """
        return True

    def purge(self, checkpoint: Checkpoint) -> None:
        """Called when all rows of this sink in `checkpoint` are visible.

        Delete proofs, of commits and aborts, of this job, lineage and sink for checkpoints before
        `checkpoint.oldest_retained`, and what dead tasks of those checkpoints left. Only a driver
        that was superseded long ago could still ask for them, and UNKNOWN stops it. At the same
        time tasks of newer checkpoints pre-commit, and another driver may ask
        `committed_checkpoints`. Never called for a checkpoint without rows of this sink, so the
        newest committed one stays for `committed_checkpoints`. Default: nothing, and proofs stay
        for ever.
        """

    def committed_checkpoints(self, job: str) -> Mapping[str, int] | None:
        """The target's own memory: for each lineage, the newest checkpoint with committed rows of
        this job and sink; {} if there is none. A start, and each checkpoint before it is decided,
        compares it with what storage and the driver know, and so notices if either was set back
        (R15). So it should be fast. Rows of at-least-once mode (`TransactionContext.exactly_once`
        is False), which have no record there, do not count. None, the default, if the system has no
        such memory or has forgotten it. A committable whose checkpoint will not be remembered has
        `"remembered": False` in its proof."""
        return None

    def __repr__(self) -> str:
        return f"{type(self).__name__}(name={self.name!r})"

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"transform": None}


Sink: TypeAlias = TwoPhaseCommitSink[Any]
"""A sink with any type of transaction."""


def commit_in_threads(
    sink: Sink, committables: Sequence[Committable], threads: int
) -> list[CommitOutcome | Exception]:
    """Call `commit` for each in parallel.

    Returns outcomes, or exceptions for those to ask again.
    """

    def outcome_of(committable: Committable) -> CommitOutcome | Exception:
        try:
            return sink.commit(committable)
        except Exception as error:
            return error
        finally:
            advance(1)

    with progress(f"sink {sink.name}: commit", len(committables), "transactions") as advance:
        return side_by_side(outcome_of, committables, threads)
