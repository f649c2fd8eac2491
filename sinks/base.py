"""The contract of a sink."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeAlias, TypeVar, final

import pyarrow as pa

from sinks.audit import Audit, Holding, Part
from sinks.dead_letters import FoundLetters, Refusal, limit_problem
from sinks.diagnosis import Finding, InDoubt, SchemaDiff
from sinks.progress import progress
from sinks.transaction import (
    Checkpoint,
    CommitOutcome,
    Committable,
    Fingerprint,
    Identity,
    TransactionContext,
    TransactionId,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Transaction = TypeVar("Transaction")


class TwoPhaseCommitSink(ABC, Generic[Transaction]):
    """Writes a checkpoint in transactions that become visible on all partitions, or never.

    Subclass it, implement the seven abstract methods, and hand an instance to `coordinator.CheckpointCoordinator`.
    `sinks.testing.SinkConformance` is the test suite that tells whether the subclass keeps the contract.

    One transaction belongs to one *participant*: a Spark task that writes the rows of one partition of one checkpoint.

    ===================== ======== ======================================================= ======== ==================
    method                where    order                                                   repeated may fail
    ===================== ======== ======================================================= ======== ==================
    check                 driver   before the first batch of a run, again on a new schema  yes      yes, stops the query
    open                  both     first in each task; first on the driver                 yes      yes
    evolve                driver   if it evolves, after check, before tasks of a batch     yes      checkpoint fails
    weaknesses            driver   after open, when a query starts                         yes      logged
    begin_transaction     task     before the first row; never for a partition without     no       task fails
    write                 task     once per Arrow record batch                             no       task fails
    write_accepted        task     instead of write, with dead letters                     no       task fails
    sum_up                task     after the last row, before pre_commit                   no       task fails
    pre_commit            task     after the last row                                      no       task fails
    commit_directly       task     instead of pre_commit, in at-least-once mode            no       task fails
    rollback              task     after a failed write, pre_commit or commit_directly     no       logged
                                   of it, or of its dead letters; or all rows were refused
    validate_all          driver   all acks are in, nothing is decided                     yes      checkpoint fails
    commit / commit_all   driver   after the checkpoint is complete, and in recovery       yes      asked again
    purge                 driver   when all of a checkpoint with rows is visible           yes      logged
    abort                 driver   for every pre-committed transaction that no record names yes      asked again
                          task     dead letters of it could not be pre-committed           yes      logged
    in_doubt              driver   recovery, and every so often                            yes      asked again
    committed_checkpoints driver   recovery, before anything is committed or aborted       yes      stops the query
    reach_within          CLI      before all else of a command                            no       no
    diagnose, inspect     CLI      when an operator asks                                   yes      shown
    find_letters          CLI      the same, of dead letters                               yes      shown
    audit                 CLI      the same, on an object of its own                       yes      shown
                          driver   before rows that are lost are written again             yes      stops the query
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

    @property
    def evolves(self) -> bool:
        """Whether `evolve` is to be called. Default: no."""
        return False

    @property
    def writes_on_driver(self) -> bool:
        """Whether a transaction may be written on the driver, too, for small batches (`rows_on_driver`): with this very
        object, in a thread beside the one that calls the driver's methods. Default: no."""
        return False

    def __init__(
        self,
        *,
        name: str,
        transform: Callable[[DataFrame], DataFrame] | None = None,
        dead_letters: Sink | None = None,
        max_dead_letters: int | float = 1000,
    ) -> None:
        """`name` is the sink's uid: unique within its coordinator and stable over restarts, because records and
        transactions carry it. `transform` maps the batch's DataFrame to the one that this sink writes.

        `dead_letters` is a sink for the rows that this one refuses (`write_accepted`), `max_dead_letters` how many a
        checkpoint may have of them: rows, or as a float their share of all rows. Raises ValueError where these do not
        go together."""
        if not name:
            raise ValueError("a sink needs a name: it is how a restarted job finds the transactions of this sink again")
        self.name = name
        self.transform = transform
        self.dead_letters = dead_letters
        self.max_dead_letters = max_dead_letters
        if problem := limit_problem(max_dead_letters):
            raise ValueError(f"sink {name!r}: {problem}")
        if dead_letters is not None:
            self._require_dead_letters(dead_letters)

    def _require_dead_letters(self, other: Sink) -> None:
        if not isinstance(other, TwoPhaseCommitSink):
            raise ValueError(f"sink {self.name!r}: dead_letters is a sink, not {other!r}")
        if type(self).write_accepted is TwoPhaseCommitSink.write_accepted:
            raise ValueError(
                f"sink {self.name!r} cannot have dead letters: {type(self).__name__} has no write_accepted, which names"
                " the rows that the target refuses"
            )
        if other.dead_letters is not None:
            raise ValueError(f"sink {other.name!r} is for dead letters of {self.name!r}, and cannot have some itself")
        if other.transform is not None:
            raise ValueError(
                f"sink {other.name!r} is for dead letters of {self.name!r}, whose tasks write it: it has no DataFrame, "
                "so it takes no transform (nor value_format)"
            )

    # ------------------------------------------------------------------ in both
    def open(self) -> None:
        """Acquire what the sink needs to work in this process; called again for each start of a query, also without
        `close` in between. Default: nothing."""

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
        and the transaction is not in doubt yet."""

    def write_accepted(self, transaction: Transaction, batch: pa.RecordBatch, most: int) -> Sequence[Refusal]:
        """Instead of `write`, for a sink with `dead_letters`: write the rows that the target takes, and name the others
        in their order. With more than `most` of them it may stop there: the transaction is rolled back then. What is
        wrong with no row in particular is raised, as by `write`. Has to judge a row alike each time, as long as the
        target is the same. `sinks.dead_letters.refused_of` finds the rows by halves.

        Optional: a sink that cannot name them leaves this out, and has no dead letters."""
        raise NotImplementedError(f"{type(self).__name__} cannot name the rows that it refuses")

    def sum_up(self, transaction: Transaction, fingerprint: Fingerprint) -> None:
        """Told count and hash of the rows that were written, as the ack will carry them: a sink that keeps them beside
        the rows, in the same transaction, lets `audit` compare. Not in at-least-once mode. Default: nothing."""

    @abstractmethod
    def pre_commit(self, transaction: Transaction) -> Identity | Committable:
        """Make the transaction durable but invisible, such that any other process can commit or abort it by what is
        returned: its identity (a dict of JSON values that `in_doubt` would list), or a `Committable` that adds proof.
        After this returns the task may die at any moment; the transaction must live on. Raises if `abort` has
        left its proof under this name meanwhile."""

    @abstractmethod
    def rollback(self, transaction: Transaction) -> None:
        """Throw away, without a trace, a transaction whose `write`, `pre_commit` or `commit_directly` raised. A
        pre-commit that raised may have taken effect all the same (its answer got lost): look, and undo that too, or
        leave it to the sweep, which aborts what `in_doubt` lists and no record names. Not called after a
        `begin_transaction` that raised, nor when the process dies."""

    def commit_directly(self, transaction: Transaction) -> None:
        """At-least-once mode: make the rows visible now, in the task, and leave no trace in `in_doubt` and
        `committed_checkpoints`. Default: `pre_commit`, then `commit`."""
        outcome = self.commit(_committable(self.pre_commit(transaction)))
        if outcome != CommitOutcome.COMMITTED:
            raise RuntimeError(f"sink {self.name!r} could not commit: {outcome}")

    # ------------------------------------------------------------------ on the driver
    def check(self, schema: pa.Schema) -> None:
        """Raise `ConfigurationError` if the target cannot take rows of this schema, naming all reasons at once; what
        `evolve` will mend is none."""

    def evolve(self, schema: pa.Schema) -> None:
        """Let the target take rows of this schema, in ways that harm nobody who reads it, or still writes rows of an
        older schema. Earlier checkpoints are visible, orphans are aborted, and this driver is the newest; but an older
        one may do the same at the same time. Only if `evolves`. Default: nothing."""

    def weaknesses(self) -> Sequence[str]:
        """Why this target may lose or double rows in spite of two-phase commit, such as a server that does not fsync.
        Asked for the job's `coordinator.Guarantee` when a query starts. Default: nothing."""
        return ()

    def validate_all(self, checkpoint: Checkpoint, committables: Sequence[Committable]) -> None:
        """Last chance to refuse a checkpoint, for what can only be seen with all participants together. Raise
        `SinkError` to fail the checkpoint: after it is complete it *must* be committed. Nothing may become visible.
        Default: nothing."""

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

    def commit_all(
        self, checkpoint: Checkpoint, committables: Sequence[Committable]
    ) -> Sequence[CommitOutcome | Exception]:
        """Commit all participants of this sink that are not known to be committed; one outcome each, in order, or the
        exception to ask again for. Default: `commit` in 16 threads; one that raises does not keep the others from being
        committed. Override it where a checkpoint must become visible as a whole, or in order: if one of them is lost,
        commit none of the others and answer HELD for them; all come in one call again when the lost one is replaced."""
        return self._commit_each(committables, threads=16)

    def _commit_each(self, committables: Sequence[Committable], threads: int) -> list[CommitOutcome | Exception]:
        """`commit` on each of them, side by side: the outcome, or the exception to ask again for."""

        def one(committable: Committable) -> CommitOutcome | Exception:
            try:
                return self.commit(committable)
            except Exception as error:
                return error

        threads = min(threads, len(committables))
        if threads < 2:
            return [one(committable) for committable in committables]
        with (
            progress(f"sink {self.name}: commit", len(committables), "transactions") as advance,
            ThreadPoolExecutor(threads, f"commit-{self.name}") as pool,
        ):
            answers = []
            for answer in pool.map(one, committables):
                answers.append(answer)
                advance(1)
            return answers

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

    # ------------------------------------------------------------------ for operators
    def reach_within(self, seconds: float) -> None:
        """Said by a command before all else, never by a driver: the system is to be reached within `seconds` from now,
        or what asks it raises. For systems that the sink would wait longer for. Default: nothing."""

    def trial_schema(self) -> pa.Schema | None:
        """Columns that the target takes: with them `diagnose` pre-commits and aborts a transaction of no rows. Default:
        None, and no transaction is tried."""
        return None

    def diagnose(self, job: str) -> Iterable[Finding]:
        """Look at all that can keep this sink from working, for `coordinator doctor`. Nothing of it stays behind.
        Default: `open`, `in_doubt`, `weaknesses`, and a transaction without rows if there is a `trial_schema`. What
        is raised counts as a finding."""
        self.open()
        yield Finding.ok(f"opened: {self!r}")
        listed = list(self.in_doubt(job))
        yield Finding.ok(f"lists transactions in doubt, {len(listed)} of this job now")
        for weakness in self.weaknesses():
            yield Finding.warning(weakness, "set it otherwise; the job is not exactly-once like this")
        if (schema := self.trial_schema()) is not None:
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

    def schema_diff(self, schema: pa.Schema) -> SchemaDiff | None:
        """How the target differs from rows of this schema, for `coordinator schema diff`. Changes nothing. Default:
        None, the target has no columns."""
        return None

    def inspect(self, transactions: Sequence[Identity]) -> Sequence[InDoubt]:
        """What can be told of transactions that `in_doubt` listed, in order. Default: what their names say, where an
        identity holds `TransactionContext.transaction_id`."""
        return [InDoubt.named(transaction) for transaction in transactions]

    def audit(self, job: str, parts: Sequence[Part], *, quick: bool = False) -> Audit:
        """What the external system has of these parts of checkpoints that are visible, for `coordinator verify`; and,
        before a part of which transactions are lost is written again, whether it was already (`Holding.unnamed`, R15).
        Changes nothing. With `quick` nothing is done that takes longer the more rows there are. What takes long tells
        `sinks.progress.progress` how far it has come. Default: nobody can tell."""
        return Audit([Holding(remarks=(f"{type(self).__name__} cannot ask {self.system} for rows",))] * len(parts))

    def find_letters(self, job: str, sink: str, most: int) -> FoundLetters | None:
        """Of a sink of dead letters: those of that sink of the job that are visible, for `coordinator dead-letters
        show`; at least the `most` newest of them. Default: None, it cannot tell."""
        return None

    # ------------------------------------------------------------------ Flink's names
    @final
    def snapshot_state(self, barrier: Transaction) -> Committable:
        """On the barrier (the end of the micro-batch's partition): pre-commit the running transaction."""
        return _committable(self.pre_commit(barrier))

    @final
    def notify_checkpoint_complete(
        self, checkpoint: Checkpoint, committables: Sequence[Committable]
    ) -> Sequence[CommitOutcome | Exception]:
        """The checkpoint is durably complete: commit its transactions."""
        return self.commit_all(checkpoint, committables) if committables else []

    @final
    def notify_checkpoint_aborted(self, committables: Sequence[Committable]) -> None:
        """The checkpoint will never be complete: abort its transactions."""
        for committable in committables:
            self.abort(committable.transaction)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(name={self.name!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "transform"} | {"transform": None}


Sink: TypeAlias = TwoPhaseCommitSink[Any]
"""Whatever its transactions are."""


def _committable(result: Identity | Committable) -> Committable:
    return result if isinstance(result, Committable) else Committable(transaction=result)
