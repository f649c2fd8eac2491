"""The contract of a sink.

Optional abilities are in `sinks.optional`.
"""

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

    ===================== ====== ========================================== ======== ===============
    method                where  order                                      repeated may fail
    ===================== ====== ========================================== ======== ===============
    open                  both   first in each task; first on the driver    yes      yes
    committed_checkpoints driver first at a start; again before a           yes      stops the query
                                 checkpoint is decided
    check                 driver before the first batch of a run, again on  yes      yes, stops the
                                 a new schema                                        query
    begin_transaction     task   before the first row; never for a          no       task fails
                                 partition without rows
    write                 task   once per Arrow record batch                no       task fails
    pre_commit            task   after the last row                         no       task fails
    rollback              task   after a write or pre_commit that failed    no       logged
    owns                  driver before each commit, of all that the        yes      stops the query
                                 record names, whatever became of it
    commit_all, commit    driver after the checkpoint is complete, and in   yes      asked again
                                 recovery
    purge                 driver when all of a checkpoint with rows is      yes      logged
                                 visible
    in_doubt              driver in recovery, and every so often            yes      asked again
    abort_all, abort      driver for what `in_doubt` lists and no record    yes      asked again
                                 names
    close                 both   last                                       yes      logged
    ===================== ====== ========================================== ======== ===============

    The object is pickled and sent to the executors, so open handles belong into what
    `begin_transaction` returns, or into attributes that are set in `open` and dropped in
    `__getstate__`. Raise `sinks.errors.SinkError` if Spark's retry cannot help; for any other
    exception Spark retries the task. So let errors of the system and its client pass as they are.

    **Threads.** A task has a copy of the sink to itself, in one thread. Copies for several tasks
    may live in one process, one after another. On the driver the methods are called one at a time,
    though not always by the same thread, because sweeps between batches have their own thread. Only
    `commit` is called from several threads at once, by the default `commit_all`.

    **Processes.** Any process may ask about any transaction. Another driver that does not know that
    it was superseded calls `commit`, `abort` and `in_doubt` at the same time, and its tasks
    continue to write. So what decides an outcome must be atomic in the external system: a
    compare-and-set, a rename, a primary key.
    """

    system: str = "the external system"
    """The name of the target's kind, for messages."""
    dead_letters: Sink | None = None
    """The sink for rows that this one refuses; only `sinks.optional.DeadLettering` sets it."""
    takes_at_least_once: bool = True
    """True if the sink can be written in at-least-once mode."""
    writes_alone: bool = False
    """True if a task must write no other sink, because the system has one writer at a time."""

    def __init__(
        self, *, name: str, transform: Callable[[DataFrame], DataFrame] | None = None
    ) -> None:
        """Give the sink its name.

        * `name` is the sink's uid. It must be unique within its coordinator and stable over
          restarts, because records and transactions carry it.
        * `transform` maps the batch's DataFrame to the DataFrame that the sink writes. With a
          `sinks.Select`, or none, several sinks get their rows in one pass. It is not pickled.

        Raises ValueError if the name is empty.
        """
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

        Many tasks may call it at the same time, also where nothing is set up yet. So make what is
        missing in one step that is no error if another task was faster, such as
        `mkdir(exist_ok=True)`.

        It is called again at each start of a query, even without `close` in between. It must not
        touch transactions. By default it does nothing.
        """

    def close(self) -> None:
        """Release what the sink has acquired.

        It is called even if `open` failed. It must not touch pre-committed transactions, nor take
        anything away from other tasks and drivers, which are open at the same time. By default it
        does nothing.
        """

    # ------------------------------------------------------------------ in the task
    @abstractmethod
    def begin_transaction(self, context: TransactionContext) -> Transaction:
        """Start a transaction named after `context.transaction_id`, and return its handle.

        The handle has everything that `write`, `pre_commit` and `rollback` need, because several
        transactions may be open on one sink object. Use the name in at-least-once mode, too. A
        place that is named by `context.slot` must not hold the rows beyond `pre_commit`, because
        later transactions get the same slot. If this method raises, it must clean up after itself,
        because without a handle there is no `rollback`. It may be unable to, for example if a
        request took effect and its answer was lost. `purge` removes what is left then, or `abort`
        does if `in_doubt` lists it.
        """

    @abstractmethod
    def write(self, transaction: Transaction, batch: pa.RecordBatch) -> None:
        """Write the rows of one Arrow record batch, which is never empty.

        The schema of the batch is `context.schema`. The rows must stay invisible, and the
        transaction is not in doubt yet. Raises `sinks.errors.BadValue` for a value that the target
        cannot store exactly. If rows replace others by a key, the last row of a key in the task
        wins, and a null equals nothing. Alternatively, refuse such rows with BadValue, before the
        checkpoint is decided.
        """

    @abstractmethod
    def pre_commit(self, transaction: Transaction) -> Identity | Committable:
        """Make the transaction durable but invisible, and return its identity.

        Any other process must be able to commit or abort the transaction from now on. The identity
        is a dict of JSON values, as `in_doubt` lists it; return a `Committable` to add proof. The
        task may die at any moment afterwards, and the transaction must live on. It lives on even if
        a task of another driver, of the next checkpoint or of another job begins a transaction
        with the same `context.slot`. Raises if `abort` has meanwhile left its proof under this
        name.
        """

    @abstractmethod
    def rollback(self, transaction: Transaction) -> None:
        """Remove every trace of a transaction that has failed or is not needed.

        It has failed if its `write` or `pre_commit` raised. A pre-commit that raised may have taken
        effect, if its answer got lost. Check that, and undo the pre-commit too, or leave it to the
        sweep, which aborts transactions that `in_doubt` lists and no record names. `rollback` is
        not called when the process dies.
        """

    @final
    def snapshot_state(self, barrier: Transaction) -> Committable:
        """Call `pre_commit`, under the name that it has in Flink.

        The barrier is the end of the partition of the micro-batch.
        """
        result = self.pre_commit(barrier)
        return result if isinstance(result, Committable) else Committable(transaction=result)

    # ------------------------------------------------------------------ on the driver
    def check(self, schema: pa.Schema) -> None:
        """Raise `ConfigurationError` if the target cannot take rows of this schema.

        The error has all reasons at once. A column that is not nullable, and metadata, are no
        reasons: Spark changes both with the query, and the rows are the same. Ignore differences
        that `SchemaEvolving.evolve` will remove. By default any schema is fine.
        """

    @final
    def notify_checkpoint_complete(
        self, checkpoint: Checkpoint, committables: Sequence[Committable]
    ) -> Sequence[CommitOutcome | Exception]:
        """Call `commit_all`, under the name that it has in Flink.

        The checkpoint is durably complete.
        """
        return self.commit_all(checkpoint, committables) if committables else []

    def commit_all(
        self, checkpoint: Checkpoint, committables: Sequence[Committable]
    ) -> Sequence[CommitOutcome | Exception]:
        """Commit all participants of this sink that are not known to be committed.

        Return an outcome for each, in order, or an exception for each participant to ask about
        again. Override this method for speed, to make one request for many. A failure of one
        participant must not prevent the outcome of another, unless they must become visible in
        order. In that case, if one is LOST or UNKNOWN, commit none and answer HELD for the others;
        all of them come again, in one call, with the replacement. An exception that this method
        raises is the answer for all. By default it calls `commit` in 16 threads.
        """
        return commit_in_threads(self, committables, threads=16)

    @abstractmethod
    def commit(self, committable: Committable) -> CommitOutcome:
        """Make one pre-committed transaction visible, whole, and return its outcome:

        * COMMITTED: its rows are visible, by this call or an earlier one, and stay so.
        * LOST: it is proven to be rolled back. No process can make it visible any more, not even
          one that is in the middle of `commit`. The coordinator writes the rows again. "Not found"
          is no proof.
        * UNKNOWN: neither can be proven, and asking again will not help, because the transaction
          was never seen, or its proof is gone. The query stops, and a person decides.
        * An exception: the system cannot answer now. The coordinator asks again until
          `commit_timeout`.
        * HELD is only for `commit_all`.

        What is visible already stays visible. A transaction that is still open was not
        pre-committed, so no record names it, unless the target was restored to an older state.
        Answer UNKNOWN for it. LOST is right only if its `pre_commit` fails from then on, and an
        exception only if the answer will be another one later.
        """

    @abstractmethod
    def abort(self, transaction: Identity) -> None:
        """Roll back one pre-committed transaction by its identity, and keep a proof of that.

        With the proof, a later `commit` answers LOST. If the transaction is committed, raise
        `CommittedError` and change nothing.

        It is no error if the transaction was aborted already, or was never seen, because it was
        aborted and purged, or because the system was restored to an older state. For a transaction
        that was never seen, leave a proof only if that makes a later `begin_transaction` or
        `pre_commit` under this name fail. Otherwise leave none, and `commit` answers UNKNOWN.
        """

    def abort_all(self, transactions: Sequence[Identity]) -> Sequence[Exception | None]:
        """Abort many transactions, and return an answer for each, in order.

        The answer is None for a transaction that `abort` would end without an error: it is aborted
        now, was aborted already, or was never seen. For a committed transaction, the answer is a
        `CommittedError`, as an object and not raised. Such a transaction keeps no other one from
        being aborted. An exception that this method itself raises counts as the answer for all, so
        raise only if nobody knows which transactions were aborted.

        Override the method for speed, if one step of the system can abort many transactions. By
        default it calls `abort` for one transaction after the other.
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
        """List the identities of all pre-committed, unresolved transactions of this job and sink.

        They are of any lineage and generation, as the external system lists them now. The
        coordinator aborts every listed transaction that no record names. So never list transactions
        of another job, or of another sink of this job in the same system. List an open transaction
        only if its `pre_commit` fails after an abort.

        Store `context.job` and `context.sink` with the transaction, and search for `job` and
        `self.name`. If the system stores only a name, names of the job start with
        `TransactionId.prefix(job)`, and names of the sink have `TransactionId.parse(name).sink ==
        token(self.name)`.
        """

    def owns(self, job: str, transaction: Identity) -> bool:
        """Tell whether this can be the identity of a transaction of this job and sink.

        The coordinator asks about all transactions of a record whenever it commits the record: in
        the batch, on each retry, and at every start. If the answer is no, the query stops, because
        somebody has altered the record. Some of these transactions are committed or aborted by
        then, so the answer must not depend on what became of one, and stays yes. Judge by the
        identity alone. It may be any dict, such as one that another sink made, so answer no for
        what has none of your fields, and do not raise. By default the answer is yes.
        """
        return True

    def purge(self, checkpoint: Checkpoint) -> None:
        """Delete old proofs, once all rows of this sink in `checkpoint` are visible.

        Delete the proofs, of commits and aborts, of this job, lineage and sink for checkpoints
        before `checkpoint.oldest_retained`, and what dead tasks of all those checkpoints left, not
        only of the newest among them. Only a
        driver that was superseded long ago could still ask for these proofs, and UNKNOWN stops it.
        At the same time tasks of newer checkpoints pre-commit, and another driver may ask
        `committed_checkpoints`. `purge` is never called for a checkpoint without rows of this sink,
        so the newest committed one stays for `committed_checkpoints`. By default nothing is
        deleted, and proofs stay permanently.
        """

    def committed_checkpoints(self, job: str) -> Mapping[str, int] | None:
        """Return the target's own memory: the newest committed checkpoint of each lineage.

        It is the newest checkpoint with committed rows of this job and sink. Return {} if there is
        none. Return None, the default, if the system has no such memory or has forgotten it.

        At startup, and before each checkpoint is decided, the coordinator compares this memory with
        what storage and the driver know. It notices in this way if storage or the target was
        restored to an older state (R15). So the method should be fast. Change the memory in the
        same step that makes the rows visible. If it is a second step, a driver may die between
        them, the next `commit` finds the rows visible, and the query never starts again. Rows of
        at-least-once mode (`TransactionContext.exactly_once` is False) do not count, because they
        have no record in storage. A committable whose checkpoint will not be remembered has
        `"remembered": False` in its proof.
        """
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
    """Call `commit` for each committable in parallel.

    Returns an outcome for each, or the exception for each to ask about again.
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
