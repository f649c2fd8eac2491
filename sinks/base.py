"""The contract of a sink. What a sink may do besides is in `sinks.optional`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeAlias, TypeVar, final

import pyarrow as pa

from sinks.progress import progress
from sinks.transaction import Checkpoint, CommitOutcome, Committable, Identity, TransactionContext

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Transaction = TypeVar("Transaction")


class TwoPhaseCommitSink(ABC, Generic[Transaction]):
    """Writes a checkpoint in transactions that become visible on all partitions, or never.

    Subclass it, implement the seven abstract methods, and hand an instance to `coordinator.CheckpointCoordinator`.
    `sinks.testing.SinkConformance` tells whether the subclass keeps the contract; `sinks.optional` has what a sink may
    do besides. One transaction belongs to one *participant*: a task that writes one partition of one checkpoint.

    ===================== ======== ======================================================= ======== ==================
    method                where    order                                                   repeated may fail
    ===================== ======== ======================================================= ======== ==================
    open                  both     first in each task; first on the driver                 yes      yes
    committed_checkpoints driver   at a start, before anything is committed or aborted     yes      stops the query
    check                 driver   before the first batch of a run, again on a new schema  yes      yes, stops the query
    begin_transaction     task     before the first row; never for a partition without     no       task fails
    write                 task     once per Arrow record batch                             no       task fails
    pre_commit            task     after the last row                                      no       task fails
    rollback              task     after a write or pre_commit that failed                 no       logged
    commit_all, commit    driver   after the checkpoint is complete, and in recovery       yes      asked again
    purge                 driver   when all of a checkpoint with rows is visible           yes      logged
    in_doubt              driver   in recovery, and every so often                         yes      asked again
    abort                 driver   for each that `in_doubt` lists and no record names      yes      asked again
    close                 both     last                                                    yes      logged
    ===================== ======== ======================================================= ======== ==================

    The object is pickled and sent to the executors: open handles belong into what `begin_transaction` returns, or into
    attributes set in `open` and dropped in `__getstate__`. Raise `sinks.errors.SinkError` for what cannot get better by
    trying again; any other exception in a task is left to Spark's task retries.

    **Threads.** A task has a copy of the sink to itself, in one thread; copies for several tasks may live in one
    process, one after another. On the driver the methods are called one at a time, though not always by the same thread
    (sweeps between batches have their own); only `commit` is called from several at once, by the default `commit_all`.

    **Processes.** Any process may ask about any transaction: another driver that does not know that it was superseded
    calls `commit`, `abort` and `in_doubt` at the same time, and its tasks go on writing. So what decides an outcome has
    to be atomic in the external system: a compare-and-set, a rename, a primary key.
    """

    system: ClassVar[str] = "the external system"
    """What the sink writes to, in messages for people."""
    dead_letters: Sink | None = None
    """The sink of the rows that this one refuses: of a `sinks.optional.DeadLettering` alone."""

    def __init__(self, *, name: str, transform: Callable[[DataFrame], DataFrame] | None = None) -> None:
        """`name` is the sink's uid: unique within its coordinator and stable over restarts, because records and
        transactions carry it. `transform` maps the batch's DataFrame to the one that this sink writes; the driver alone
        calls it, so it is not pickled."""
        if not name:
            raise ValueError("a sink needs a name: it is how a restarted job finds the transactions of this sink again")
        self.name = name
        self.transform = transform

    # ------------------------------------------------------------------ in both
    def open(self) -> None:
        """Acquire what the sink needs to work in this process; called again for each start of a query, also without
        `close` in between. Touches no transaction. Default: nothing."""

    def close(self) -> None:
        """Release it. Called even when `open` failed; must not touch pre-committed transactions. Default: nothing."""

    # ------------------------------------------------------------------ in the task
    @abstractmethod
    def begin_transaction(self, context: TransactionContext) -> Transaction:
        """Start a transaction under a name derived from `context.transaction_id` and return the handle of it: all that
        `write`, `pre_commit` and `rollback` need, since several may be open on one sink object. If this raises, it has
        to leave nothing behind itself: without a handle there is no `rollback`."""

    @abstractmethod
    def write(self, transaction: Transaction, batch: pa.RecordBatch) -> None:
        """Write the rows of one Arrow record batch (schema: `context.schema`; never empty). They must stay invisible,
        and the transaction is not in doubt yet. Raises `sinks.errors.BadValue` for a value that the target cannot hold
        as it is."""

    @abstractmethod
    def pre_commit(self, transaction: Transaction) -> Identity | Committable:
        """Make the transaction durable but invisible, such that any other process can commit or abort it by what is
        returned: its identity (a dict of JSON values that `in_doubt` would list), or a `Committable` that adds proof.
        After this returns the task may die at any moment; the transaction must live on. Raises if `abort` has
        left its proof under this name meanwhile."""

    @abstractmethod
    def rollback(self, transaction: Transaction) -> None:
        """Throw away, without a trace, a transaction whose `write` or `pre_commit` raised, or that is not needed. A
        pre-commit that raised may have taken effect all the same (its answer got lost): look, and undo that too, or
        leave it to the sweep, which aborts what `in_doubt` lists and no record names. Not called after a
        `begin_transaction` that raised, nor when the process dies."""

    @final
    def snapshot_state(self, barrier: Transaction) -> Committable:
        """Flink's name. On the barrier, which is the end of the micro-batch's partition: `pre_commit`."""
        result = self.pre_commit(barrier)
        return result if isinstance(result, Committable) else Committable(transaction=result)

    # ------------------------------------------------------------------ on the driver
    def check(self, schema: pa.Schema) -> None:
        """Raise `ConfigurationError` if the target cannot take rows of this schema, naming all reasons at once; what
        `SchemaEvolving.evolve` will mend is none. Default: it takes any."""

    @final
    def notify_checkpoint_complete(
        self, checkpoint: Checkpoint, committables: Sequence[Committable]
    ) -> Sequence[CommitOutcome | Exception]:
        """Flink's name. The checkpoint is durably complete: `commit_all`."""
        return self.commit_all(checkpoint, committables) if committables else []

    def commit_all(
        self, checkpoint: Checkpoint, committables: Sequence[Committable]
    ) -> Sequence[CommitOutcome | Exception]:
        """Commit all participants of this sink that are not known to be committed; one outcome each, in order, or the
        exception to ask again for. Override it for speed: one request for many. One that fails keeps no other from its
        outcome, unless they have to become visible in order: then commit none beside one that is LOST, and answer HELD
        for them; all come in one call again when the lost one is replaced. What is raised is the answer for all of
        them. Default: `commit` in 16 threads."""
        return commit_in_threads(self, committables, threads=16)

    @abstractmethod
    def commit(self, committable: Committable) -> CommitOutcome:
        """Make one pre-committed transaction visible, and answer what became of it:

        * COMMITTED: its rows are visible, by this call or an earlier one, and stay so.
        * LOST: proven to be rolled back; no process can make it visible any more, not even one that is in the middle of
          `commit`. The coordinator writes the rows again. "Not found" is no proof.
        * UNKNOWN: neither can be proven, and asking again will not help: never seen, or its proof is gone. The query
          stops, and a person decides.
        * An exception: the system cannot answer now. The coordinator asks again until `commit_timeout`.
        * HELD is for `commit_all` alone."""

    @abstractmethod
    def abort(self, transaction: Identity) -> None:
        """Roll back a pre-committed transaction by its identity, that one alone, and keep proof that it was: a later
        `commit` of it answers LOST. Raises `CommittedError`, and changes nothing, if it finds it committed.

        Not an error if it was aborted already, or was never seen (aborted and purged, or the system was set back).
        What was never seen leaves a proof only if that also bars its way: a later `pre_commit` under that name has to
        fail. Else leave none, and `commit` answers UNKNOWN."""

    @abstractmethod
    def in_doubt(self, job: str) -> Iterable[Identity]:
        """The identities of all transactions of this job and sink, of any lineage and generation, that are
        pre-committed and unresolved, as the external system lists them now. What is listed and no record names is
        aborted. So those of another job, or of another sink of this job in the same system, must not be among them; an
        open one only if its `pre_commit` fails once it was aborted.

        Keep `context.job` and `context.sink` beside the transaction, and ask for `job` and `self.name`. Where it has
        nothing but a name, `TransactionId.prefix(job)` finds those of the job, and `TransactionId.parse(name).sink ==
        token(self.name)` tells those of the sink."""

    def owns(self, job: str, transaction: Identity) -> bool:
        """Whether this can be the identity of a transaction of this library, job and sink. Asked before one that a
        record names is committed or aborted by its name. Default: yes."""
        return True

    def purge(self, checkpoint: Checkpoint) -> None:
        """All of this sink's part of `checkpoint` is visible. Proofs of this job, lineage and sink (of commits and of
        aborts alike) that are of checkpoints before `checkpoint.oldest_retained` may go: nobody asks for them any more
        but a driver that was superseded long ago, and UNKNOWN stops that one. So may what dead tasks of those
        checkpoints left. Never called for a checkpoint without rows of this sink, so the newest that is committed stays
        for `committed_checkpoints`. Default: nothing, and proofs stay for ever."""

    def committed_checkpoints(self, job: str) -> Mapping[str, int] | None:
        """What the external system itself remembers: by lineage, the newest checkpoint of which rows of this job and
        sink are committed there; {} if there is none. A start compares it with checkpoint storage, so that neither is
        taken for whole after it was set back (R15). None if nobody can tell: the system keeps no such memory (the
        default), or has forgotten it. A committable whose checkpoint will not be told has `"remembered": False` in its
        proof."""
        return None

    def __repr__(self) -> str:
        return f"{type(self).__name__}(name={self.name!r})"

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"transform": None}


Sink: TypeAlias = TwoPhaseCommitSink[Any]
"""Whatever its transactions are."""


def commit_in_threads(sink: Sink, committables: Sequence[Committable], threads: int) -> list[CommitOutcome | Exception]:
    """`commit` of each of them, side by side: the outcome, or the exception to ask again for."""

    def one(committable: Committable) -> CommitOutcome | Exception:
        try:
            return sink.commit(committable)
        except Exception as error:
            return error

    threads = min(threads, len(committables))
    if threads < 2:
        return [one(committable) for committable in committables]
    answers = []
    with (
        progress(f"sink {sink.name}: commit", len(committables), "transactions") as advance,
        ThreadPoolExecutor(threads, f"commit-{sink.name}") as pool,
    ):
        for answer in pool.map(one, committables):
            answers.append(answer)
            advance(1)
    return answers
