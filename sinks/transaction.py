"""The values that travel between tasks, driver, checkpoint storage and external systems."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, field, replace
from enum import Enum
from functools import lru_cache
from typing import Any, ClassVar

import pyarrow as pa

from sinks.errors import printable

Identity = Mapping[str, Any]
"""The name of a pre-committed transaction in the external system: a dict of JSON values. Identities
are compared as a whole."""


def shown(transaction: Identity) -> str:
    """Return an identity for a person: its values, with their names if there are several.

    >>> shown({"gid": "tpc.orders"}), shown({"schema": "public", "table": "tpc_1"})
    ('tpc.orders', 'schema public, table tpc_1')
    """
    if len(transaction) == 1:
        return printable(str(*transaction.values()))
    return printable(", ".join(f"{key} {value}" for key, value in transaction.items()))


@lru_cache
def token(name: str) -> str:
    """Return a short name-safe form of any string: a readable part and a hash.

    The token has only characters of [a-z0-9-], and at most 31 of them.

    >>> token("Täglich/Orders")
    't-glich-orders-0e45a1999a'
    """
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:20]
    return f"{slug}-{hashlib.sha256(name.encode()).hexdigest()[:10]}".lstrip("-")


@dataclass(frozen=True)
class TransactionId:
    """The name of one participant's transaction, never used twice.

    Its numbers are, from the outside in, `generation` of the driver, replay `round` of the
    checkpoint, `attempt` (try of the checkpoint in this driver), and `task_attempt`, which Spark
    counts. Of several transactions of one participant, a commit record names one.

    The text form has at most 199 characters (PostgreSQL's limit for a gid) of [a-z0-9.-]:
    `tpc.JOB.LINEAGE.CHECKPOINT.SINK.SUBTASK.gGENERATIONrROUNDtTRYaATTEMPT`, with JOB and SINK as
    `token`.
    """

    job: str
    lineage: str
    checkpoint: int
    sink: str
    subtask: int
    generation: int
    round: int
    attempt: int
    task_attempt: int

    _TRY: ClassVar[str] = r"\.(\d+)\.g(\d+)r(\d+)t(\d+)a(\d+)"
    _FORM: ClassVar[re.Pattern[str]] = re.compile(
        rf"tpc\.([a-z0-9-]+)\.([a-z0-9]+)\.(\d+)\.([a-z0-9-]+){_TRY}"
    )

    def __str__(self) -> str:
        part = f"{self.checkpoint}.{token(self.sink)}.{self.subtask}"
        return f"{self.prefix(self.job, self.lineage)}{part}.{self.attempt_label}"

    @property
    def attempt_label(self) -> str:
        """The part of the name that says which try this is, as `TransactionContext.attempt`."""
        return f"g{self.generation}r{self.round}t{self.attempt}a{self.task_attempt}"

    def context(
        self, schema: pa.Schema, slot: int = 0, *, exactly_once: bool = True
    ) -> TransactionContext:
        """Return the context of the transaction with this name."""
        where = self.job, self.lineage, self.checkpoint, self.sink, self.subtask
        return TransactionContext(*where, self.attempt_label, schema, str(self), slot, exactly_once)

    @staticmethod
    def prefix(job: str, lineage: str | None = None) -> str:
        """Return the beginning of all transaction names of a job.

        No name of another job begins with it. With `lineage`, it is the beginning of the names of
        this lineage alone.
        """
        return f"tpc.{token(job)}." + (f"{lineage}." if lineage is not None else "")

    @classmethod
    def parse(cls, text: str) -> TransactionId:
        """Return the parts of a name.

        `job` and `sink` are tokens here, so the text of the result is another name. Raises
        ValueError for any other text.
        """
        match = cls._FORM.fullmatch(text)
        if not match:
            raise ValueError(f"not a transaction name of this library: {text!r}")
        job, lineage, checkpoint, sink, *numbers = match.groups()
        return cls(job, lineage, int(checkpoint), sink, *map(int, numbers))

    @classmethod
    def subtask_of(cls, text: str) -> int | None:
        """Return the subtask in a name, even if a system has shortened the name at its beginning.

        Return None for any other text.
        """
        match = re.search(f"{cls._TRY}$", text)
        return int(match[1]) if match else None

    @classmethod
    def find(cls, text: str) -> TransactionId:
        """Return the first name inside a text. Raises ValueError if there is none."""
        match = cls._FORM.search(text)
        if not match:
            raise ValueError(f"no transaction name of this library in {text!r}")
        return cls.parse(match[0])


@dataclass(frozen=True)
class TransactionContext:
    """The transaction to begin, which is passed to `begin_transaction`."""

    job: str
    """The job's name, as passed to `in_doubt` and `committed_checkpoints`. It can be any string."""
    lineage: str
    """The history of checkpoints: a random string of [0-9a-f]. A restored savepoint begins another
    lineage."""
    checkpoint_id: int
    """The number of the micro-batch, counted from 0 in a lineage."""
    sink: str
    """The sink's `name`. It can be any string."""
    subtask: int
    """The number of the partition, from 0. Partitions without rows have no transaction."""
    attempt: str
    """Which attempt this is, as `g1r0t0a7`: generation of the driver, replay round, try of the
    checkpoint, Spark's task attempt. It is for people; `transaction_id` contains it."""
    schema: pa.Schema
    """The columns of the record batches that `write` gets."""
    transaction_id: str
    """The text of a `TransactionId`, which contains all of the above except the schema and is never
    used twice. Use it as the name of the transaction."""
    slot: int = 0
    """A small number, to build names that are used again, for systems that must not see ever new
    names. Other systems ignore it, and use `transaction_id`. Transactions of other checkpoints,
    drivers and jobs have the same slots, and what was pre-committed under one must live on when the
    next transaction begins. Attempts of this subtask in one attempt of a Spark stage have different
    slots; each checkpoint begins with 0 again. If Spark runs a stage again because shuffle files
    were lost, a task of the earlier attempt may still work under the same slot, because PySpark
    does not tell them apart."""
    exactly_once: bool = True
    """True if `pre_commit` ends the transaction. False in at-least-once mode, in which
    `commit_directly` ends it."""


@dataclass(frozen=True)
class Fingerprint:
    """Count and order-free content hash of a participant's rows.

    The hash is the sum of `coordinator.task.row_hash` over the rows, modulo 2**64.
    """

    rows: int = 0
    hash: int = 0

    def add(self, rows: int, hash_sum: int) -> Fingerprint:
        """Return the fingerprint with further rows, of which `hash_sum` is the sum of hashes."""
        return Fingerprint(self.rows + rows, (self.hash + hash_sum) & (2**64 - 1))

    def __add__(self, other: Fingerprint) -> Fingerprint:
        return self.add(other.rows, other.hash)

    def __str__(self) -> str:
        return f"{self.rows} rows (hash {self.hash:016x})"

    def stored(self) -> tuple[int, str]:
        """Return the count, and the hash as a string."""
        return self.rows, f"{self.hash:016x}"

    def to_json(self) -> dict[str, Any]:
        rows, text = self.stored()
        return {"rows": rows, "hash": text}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Fingerprint:
        return cls(int(value["rows"]), int(value["hash"], 16))


@dataclass(frozen=True)
class Refused:
    """A row that became a dead letter: its hash, and the error."""

    row_hash: int
    error_class: str
    error: str


@dataclass(frozen=True)
class Committable:
    """One pre-committed transaction, with all that the driver needs to commit it.

    The driver can commit it from any process, after any crash.

    `transaction` is the identity, the only part that is compared. `proof` has JSON values that help
    `commit` to find the outcome later; `abort` does not get it. After `pre_commit` the coordinator
    fills in `sink`, `subtask` and `fingerprint`, and for dead letters `refused`, by which a replay
    separates the rows.
    """

    transaction: Identity
    proof: Mapping[str, Any] = field(default_factory=dict)
    fingerprint: Fingerprint = Fingerprint()
    sink: str = ""
    subtask: int = -1
    refused: tuple[Refused, ...] = ()

    def of(
        self, sink: str, subtask: int, fingerprint: Fingerprint, refused: Iterable[Refused] = ()
    ) -> Committable:
        """Return this committable with what the coordinator fills in."""
        return replace(
            self, sink=sink, subtask=subtask, fingerprint=fingerprint, refused=tuple(refused)
        )

    @property
    def remembered(self) -> bool:
        """True if `committed_checkpoints`, if the sink has it, will name the checkpoint."""
        return bool(self.proof.get("remembered", True))

    def target_mismatch(self, target: str) -> str:
        """Return an error text if the sink now writes to another `target` than its proof says.

        Return "" if the target is the same, or if the proof does not name a target.
        """
        before = self.proof.get("target", target)
        if before == target:
            return ""
        return (
            f"its rows were written for {before}, and the sink writes to {target} now: give it "
            f"{before} until this checkpoint is visible"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "sink": self.sink,
            "subtask": self.subtask,
            "transaction": dict(self.transaction),
            "proof": dict(self.proof),
            "fingerprint": self.fingerprint.to_json(),
            **({"refused": [astuple(row) for row in self.refused]} if self.refused else {}),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Committable:
        return cls(
            value["transaction"],
            value["proof"],
            Fingerprint.from_json(value["fingerprint"]),
            value["sink"],
            int(value["subtask"]),
            tuple(Refused(*row) for row in value.get("refused", ())),
        )


@dataclass(frozen=True)
class Checkpoint:
    """The checkpoint that a sink commits, validates or purges."""

    job: str
    lineage: str
    checkpoint_id: int
    oldest_retained: int = 0
    """The oldest checkpoint of this lineage that recovery can still ask for. `purge` may delete
    older proofs."""


class CommitState(str, Enum):
    """The states of a pre-committed transaction."""

    COMMITTED = "committed"  # visible; also when it already was
    LOST = "lost"  # proven: rolled back, and it can never become visible
    UNKNOWN = "unknown"  # cannot be proven; stops the query with an error that names the choices
    HELD = "held"  # intact and invisible, waits for a LOST or UNKNOWN one; only from `commit_all`


@dataclass(frozen=True)
class CommitOutcome:
    """The result of `commit`. If another try may change it, raise an exception instead."""

    state: CommitState
    reason: str = ""
    """Text for people, which says which transaction it is, the proof of its loss or where it was
    searched, and what to do."""
    expired: bool = False
    """True if the outcome is UNKNOWN because the system's retention has removed what it wrote: both
    the rows and the proof."""

    COMMITTED: ClassVar[CommitOutcome]
    HELD: ClassVar[CommitOutcome]

    @classmethod
    def lost(cls, reason: str) -> CommitOutcome:
        """Return the outcome of a transaction that was rolled back.

        The coordinator logs the reason and writes the rows again.
        """
        return cls(CommitState.LOST, reason)

    @classmethod
    def unknown(cls, reason: str, *, expired: bool = False) -> CommitOutcome:
        """Return the outcome of a transaction of which neither commit nor rollback can be proven.

        The query stops with an `InDoubtError` that shows the reason. If the outcome is `expired`,
        the query stops only if Spark does not know either.
        """
        return cls(CommitState.UNKNOWN, reason, expired)


CommitOutcome.COMMITTED = CommitOutcome(CommitState.COMMITTED)
CommitOutcome.HELD = CommitOutcome(CommitState.HELD)


def not_among(listed: Iterable[Identity], named: Iterable[Identity]) -> list[Identity]:
    """Return the listed identities that `named` does not have, compared as a whole."""
    known = {_key(identity) for identity in named}
    return [identity for identity in listed if _key(identity) not in known]


def _key(identity: Identity) -> str:
    return json.dumps(dict(identity), sort_keys=True)
