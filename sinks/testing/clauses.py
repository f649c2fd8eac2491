"""The clauses of a sink's contract, and what a sink may lack.

Every failure of the kit names one of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any

from sinks.base import TwoPhaseCommitSink
from sinks.optional import OPTIONAL

__tracebackhide__ = True


class Ability(Enum):
    """What a sink may say that it cannot do (`SinkContract.cannot`).

    The tests of it are skipped with its reason.
    """

    TWO_PHASE = "pre-commit and commit in two phases; without it, only at-least-once mode is tested"
    SIDE_BY_SIDE = (
        "hold two open transactions at once (a system with one writer makes the second wait)"
    )
    DIRECTLY = "make the rows of a task visible by itself (at-least-once mode)"
    EMPTY = "pre-commit a transaction of no rows (in a job, none is without)"
    NULLS = "store null in `name` and `amount`"
    NEGATIVE_ZERO = "tell -0.0 from 0.0"
    DEAD_TASKS = "remove in `purge` what dead tasks left (the system has something else for that)"
    SLOT = (
        "keep what is pre-committed when its slot is used again (it rolls that back, with a proof)"
    )
    TELL_OPEN = "tell open transactions from pre-committed ones: it lists both, and aborts both"


class Clause(Enum):
    """A sentence of the contract: the method whose docstring has it, and the sentence.

    The third part, if there is one, says what to do about the most frequent mistakes.
    """

    # ------------------------------------------------------------------ the object
    PICKLED = (
        "__getstate__",
        "the sink travels to tasks and drivers by pickle, opened or not, and is the same there",
    )
    MADE_ANEW = (
        "__init__",
        "a job that starts again makes the sink anew, which ends what the former one pre-committed",
    )
    CHECK = "check", "accepts columns that the target takes, as often as it is asked"
    CHECK_REFUSES = (
        "check",
        "raises ConfigurationError for columns that the target cannot take, naming all at once",
    )
    OPEN = "open", "acquires what the sink needs to work in this process, again after `close`"
    OPEN_KEEPS = "open", "touches no transaction, open or pre-committed"
    CLOSE = "close", "releases it; called also when `open` failed or was not called, and twice"
    CLOSE_KEEPS = "close", "must not touch pre-committed transactions"
    CLOSE_BESIDE = (
        "close",
        "takes nothing away from other tasks and drivers, which are open at the same time",
        "Let `close` release what this object holds, and leave folders, tables and services alone.",
    )
    WEAKNESSES = "weaknesses", "answers with a sequence of sentences"
    # ------------------------------------------------------------------ in the task
    BEGIN = "begin_transaction", "starts a transaction"
    BEGIN_FAILS = (
        "begin_transaction",
        "if it raises, it leaves nothing behind itself: there is no handle to roll back",
    )
    NAMES = (
        "begin_transaction",
        "names it by `context.transaction_id`: each part of that tells transactions apart",
        "Use `context.transaction_id` as the name, unchanged, in at-least-once mode too. It has at "
        "most 199 characters of [a-z0-9.-], however long the names of job and sink are.",
    )
    HANDLE = (
        "begin_transaction",
        "returns the handle: two open transactions of one sink object do not meet",
    )
    WRITE = "write", "takes the rows of every Arrow record batch, all of them, as they are"
    LETTERS = (
        "read_dead_letters",
        "tells those of that sink and job that are visible, or that it cannot tell",
    )
    WRITE_GOOD_ROWS = (
        "write_good_rows",
        "names the rows that the target refuses, in their order, and writes all others",
    )
    BAD_VALUE = (
        "write",
        "a value that the target cannot hold as it is: BadValue, and nothing is kept",
    )
    WRITE_INVISIBLE = "write", "rows must stay invisible"
    PRE_COMMIT = "pre_commit", "makes the transaction durable but invisible"
    PRE_COMMIT_ABORTED = (
        "pre_commit",
        "in the step that makes the rows durable, it looks for the proof of an abort, and raises "
        "if that is there",
    )
    SLOT = (
        "pre_commit",
        "what is pre-committed lives on when another transaction gets its `context.slot`",
        "Put the rows of each transaction into a place that is named by `context.transaction_id`.",
    )
    PRE_COMMIT_EMPTY = "pre_commit", "a transaction of no rows is one like any other"
    IDENTITY = (
        "pre_commit",
        "returns the identity: a dict of JSON values, exactly what `in_doubt` lists",
    )
    DURABLE = (
        "pre_commit",
        "the task may die at any moment after; any other process can commit or abort it",
    )
    TASK_DIES = (
        "pre_commit",
        "a task that dies inside shows no row, and a sweep and another attempt get over it",
    )
    RETRY = (
        "__doc__",
        "an error of the system is no SinkError, unless that is `retryable`: Spark retries the "
        "task for any other exception only",
        "Let the error of the client pass. Raise SinkError, BadValue or the like only for what "
        "another try meets again.",
    )
    ROLLBACK = "rollback", "throws away a transaction that was not pre-committed, and no other"
    ROLLBACK_AFTER = (
        "rollback",
        "after a pre-commit that raised, what had taken effect is undone, or left to the sweep",
    )
    LEFTOVERS = "rollback", "throws it away without a trace"
    DIRECTLY = (
        "commit_directly",
        "makes the rows visible now, in the task, and leaves nothing in doubt",
    )
    # ------------------------------------------------------------------ commit
    COMMIT = "commit", "makes one pre-committed transaction visible, whole"
    COMMIT_KEEPS = (
        "commit",
        "leaves visible what is visible already",
        "Add the rows of a commit to those of earlier ones: a manifest names the files of both.",
    )
    COMMIT_OPEN = (
        "commit",
        "of a transaction that is open: UNKNOWN, or LOST if its `pre_commit` fails from then on",
        "Answer LOST only in the step that bars the way, such as an insert of a tombstone under "
        "the key that `pre_commit` inserts. Otherwise answer UNKNOWN.",
    )
    COMMIT_OUTCOME = (
        "commit",
        "answers with a CommitOutcome, which says why if it is LOST or UNKNOWN",
    )
    COMMIT_BY_NAME = (
        "commit",
        "needs nothing but the committable, in any process, and ends no other transaction",
    )
    SETTINGS = (
        "commit",
        "shows what was pre-committed as it was meant, or raises, if the sink is set otherwise by "
        "now",
    )
    IDEMPOTENT = "commit", "is idempotent: COMMITTED also if it already was"
    LOST = "commit", "LOST after an abort, and for ever"
    LOST_PROOF = "commit", 'LOST only with proof that it was rolled back ("not found" is none)'
    NOT_FOUND = "commit", '"not found" is no success: UNKNOWN if nobody can tell'
    ASK_AGAIN = "commit", "exceptions mean: ask again. A system that does not answer is no outcome"
    COMMIT_DIES = (
        "commit",
        "a driver that dies inside is asked again, and then every row is visible once",
    )
    THREADS = "commit", "is called in many threads at once, and by two drivers"
    COMMIT_ALL = "commit_all", "one outcome each, in order"
    HELD = "commit_all", "answers HELD only beside one that is LOST or UNKNOWN, or raised"
    COMMIT_ALL_GOES_ON = (
        "commit_all",
        "the exception of one participant keeps no other from its outcome",
    )
    AT_ONCE = "commit_whole", "makes a checkpoint visible as a whole: all participants or none"
    JOINTLY = (
        "commit_jointly",
        "makes the checkpoint of all sinks of one place visible in one step, or of none",
    )
    LEAKS = "close", "gives back what each transaction has acquired: files, threads, connections"
    VALIDATE = "validate_all", "may refuse a checkpoint, and decides nothing"
    # ------------------------------------------------------------------ abort and in_doubt
    ABORT = "abort", "rolls back a pre-committed transaction by its identity, and no other"
    ABORT_LEFTOVERS = "abort", "keeps proof that it was rolled back, and no rows"
    ABORT_AGAIN = "abort", "is not an error if it is gone already"
    ABORT_UNSEEN = (
        "abort",
        "is no error if it was never seen, and leaves a proof only if that bars the way of a late "
        "`pre_commit`",
    )
    ABORT_COMMITTED = "abort", "raises CommittedError if it finds it committed, and changes nothing"
    ABORT_ALL = (
        "abort_all",
        "one answer each, in order; what is committed, or was never seen, keeps no other from "
        "being aborted",
        "Catch what `abort` would raise for one, and put that into the answers at its place.",
    )
    ABORT_OR_COMMIT = "abort", "either it or a commit at the same time takes effect, never both"
    ABORT_DIES = "abort", "a driver that dies inside is asked again, and then it is aborted"
    OWNS = (
        "owns",
        "knows what it pre-committed as its own, whatever became of it, and answers for any dict",
        "Judge by the identity alone, without a look at the system: `TransactionId.prefix(job)`, "
        "and `TransactionId.parse(name).sink == token(self.name)`.",
    )
    IN_DOUBT = "in_doubt", "lists every unresolved transaction of this job and sink, of any lineage"
    IN_DOUBT_JOB = "in_doubt", "lists no other job's"
    IN_DOUBT_SINK = "in_doubt", "lists no other sink's"
    IN_DOUBT_OPEN = (
        "in_doubt",
        "lists what is pre-committed; an open one only if `pre_commit` fails once it was aborted",
    )
    IN_DOUBT_RESOLVED = "in_doubt", "lists nothing that is committed, aborted or rolled back"
    IN_DOUBT_READS = "in_doubt", "changes nothing"
    PURGE = (
        "purge",
        "removes proofs before `oldest_retained` of this job, lineage and sink, and nothing else",
    )
    PURGE_LEFTOVERS = (
        "purge",
        "removes what dead tasks of checkpoints before `oldest_retained` left",
    )
    PURGE_BESIDE = (
        "purge",
        "disturbs no `pre_commit` and no `committed_checkpoints` at the same time",
    )
    # ------------------------------------------------------------------ memory, operators
    MEMORY = (
        "committed_checkpoints",
        "by lineage the newest checkpoint that has committed rows, of this job and sink",
        "Change the memory in the step that makes the rows visible, and compare checkpoints as "
        "numbers.",
    )
    MEMORY_DIRECTLY = "committed_checkpoints", "at-least-once mode leaves no trace in it"
    EVOLVE = (
        "evolve",
        "lets the target take rows of other columns, as often as it is asked, and harms no older "
        "rows",
    )
    SCHEMA_DIFF = "schema_diff", "tells what `evolve` would change, and changes nothing"
    DIAGNOSE = "diagnose", "yields findings, and nothing of it stays behind"
    INSPECT = "inspect", "one answer for each transaction, in order"
    FINGERPRINT = (
        "record_fingerprint",
        "takes any count of rows, and any hash from 0 to 2**64 - 1",
        "A signed integer of 64 bits, or a float, cannot hold the hash: store "
        "`fingerprint.stored()`, which has it as text.",
    )
    AUDIT = "audit", "tells of rows that are visible how many were written, or that it cannot tell"
    # ------------------------------------------------------------------ the whole
    EXACTLY_ONCE = (
        "__doc__",
        "whoever dies, and wherever: every row becomes visible once, and nothing stays in doubt",
    )
    AT_LEAST_ONCE = "commit_directly", "at-least-once mode loses no row"
    UPSERT = "write", "a row with the key of an older one takes its place"
    UPSERT_NULL = (
        "write",
        "a row whose key is null: BadValue, or one row more each time; null equals nothing",
    )
    UPSERT_TWICE = (
        "write",
        "a key twice in a checkpoint: BadValue, or a participant's last row of it is visible, "
        "alone",
    )

    def __init__(self, method: str, sentence: str, remedy: str = "") -> None:
        self.method = method
        self.sentence = sentence
        self.remedy = remedy

    def broken(self, seen: str) -> str:
        """What a failed assertion says."""
        lines = [f"{self.name}: {self._called} {self.sentence}", f"seen: {seen}"]
        lines += [f"do: {self.remedy}"] * bool(self.remedy)
        return "\n  ".join([*lines, f"contract: {self._where}"])

    @property
    def _called(self) -> str:
        return "a sink:" if self.method == "__doc__" else f"`{self.method}`"

    @property
    def _where(self) -> str:
        kinds: Sequence[type] = (TwoPhaseCommitSink, *OPTIONAL)
        kind = next(kind for kind in kinds if self.method in vars(kind))
        described: Any = kind if self.method == "__doc__" else vars(kind)[self.method]
        _, line = inspect.getsourcelines(described)
        name = kind.__name__ + f".{self.method}" * (self.method != "__doc__")
        return f"docstring of {name}, {Path(inspect.getfile(kind))}:{line}"

    @contextmanager
    def guarding(self, doing: str) -> Iterator[None]:
        """Around a call of the sink that must not raise."""
        try:
            yield
        except Exception as error:
            raise AssertionError(
                self.broken(f"{doing} raised {type(error).__name__}: {error}")
            ) from error


# pydoc would cut the sentences of an Enum
__doc__ += "\n\n" + "\n".join(
    f"{clause.name}: `{clause.method}` {clause.sentence}" for clause in Clause
)
