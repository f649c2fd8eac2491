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
"""The name of a pre-committed transaction in the external system: a dict of JSON values. Compared
as a whole."""


def shown(transaction: Identity) -> str:
    """An identity for a person: its values, named where there are several.

    >>> shown({"gid": "tpc.orders"}), shown({"schema": "public", "table": "tpc_1"})
    ('tpc.orders', 'schema public, table tpc_1')
    """
    if len(transaction) == 1:
        return printable(str(*transaction.values()))
    return printable(", ".join(f"{key} {value}" for key, value in transaction.items()))


@lru_cache
def token(name: str) -> str:
    """A short name-safe form of any string: a readable part and a hash, of [a-z0-9-] only, at most
    31 characters.

    >>> token("Täglich/Orders")
    't-glich-orders-0e45a1999a'
    """
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:20]
    return f"{slug}-{hashlib.sha256(name.encode()).hexdigest()[:10]}".lstrip("-")


@dataclass(frozen=True)
class TransactionId:
    """Name of one participant's transaction, never used twice.

    Numbers, from the outside in: `generation` of the driver, replay `round` of the checkpoint,
    `attempt` (try of the checkpoint in this driver), and `task_attempt`, which Spark counts. Of
    several transactions of one participant a record names one.

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
        """Which try to write it this is, as `TransactionContext.attempt`."""
        return f"g{self.generation}r{self.round}t{self.attempt}a{self.task_attempt}"

    def context(
        self, schema: pa.Schema, slot: int = 0, *, exactly_once: bool = True
    ) -> TransactionContext:
        """The context of the transaction with this name."""
        where = self.job, self.lineage, self.checkpoint, self.sink, self.subtask
        return TransactionContext(*where, self.attempt_label, schema, str(self), slot, exactly_once)

    @staticmethod
    def prefix(job: str, lineage: str | None = None) -> str:
        """The beginning of all transaction names of a job (and a lineage), and of no other job."""
        return f"tpc.{token(job)}." + (f"{lineage}." if lineage is not None else "")

    @classmethod
    def parse(cls, text: str) -> TransactionId:
        """The parts of a name.

        `job` and `sink` are tokens here, so the text of the result is another name. Raises
        ValueError on any other text.
        """
        match = cls._FORM.fullmatch(text)
        if not match:
            raise ValueError(f"not a transaction name of this library: {text!r}")
        job, lineage, checkpoint, sink, *numbers = match.groups()
        return cls(job, lineage, int(checkpoint), sink, *map(int, numbers))

    @classmethod
    def subtask_of(cls, text: str) -> int | None:
        """The subtask of a name, also of one that a system has shortened at its beginning.

        None of any other text.
        """
        match = re.search(f"{cls._TRY}$", text)
        return int(match[1]) if match else None

    @classmethod
    def find(cls, text: str) -> TransactionId:
        """The first name inside a text. Raises ValueError if there is none."""
        match = cls._FORM.search(text)
        if not match:
            raise ValueError(f"no transaction name of this library in {text!r}")
        return cls.parse(match[0])


@dataclass(frozen=True)
class TransactionContext:
    """Passed to `begin_transaction`."""

    job: str
    """The job's name, as passed to `in_doubt` and `committed_checkpoints`. Any text."""
    lineage: str
    """The history of checkpoints: a random text of [0-9a-f]. A restored savepoint begins another
    one."""
    checkpoint_id: int
    """Number of the micro-batch, counted from 0 in a lineage."""
    sink: str
    """The sink's `name`. Any text."""
    subtask: int
    """Number of the partition, from 0. Partitions without rows have no transaction."""
    attempt: str
    """Which attempt this is, as `g1r0t0a7`: generation of the driver, replay round, try of the
    checkpoint, Spark's task attempt. For people; `transaction_id` contains it."""
    schema: pa.Schema
    """The columns of the record batches that `write` gets."""
    transaction_id: str
    """The text of a `TransactionId`: all of the above except the schema, unique for ever. Use it as
    the name."""
    slot: int = 0
    """A small number, to build names that are used again, for systems that must not see ever new
    ones. Attempts of this subtask in one attempt of a Spark stage have different slots; each
    checkpoint begins with 0 again. If Spark runs a stage again (lost shuffle files), a task of the
    earlier attempt may still work under the same slot: PySpark does not tell them apart."""
    exactly_once: bool = True
    """True: `pre_commit` ends the transaction. False (at-least-once mode): `commit_directly`
    does."""


@dataclass(frozen=True)
class Fingerprint:
    """Count and order-free content hash (sum modulo 2**64 of `coordinator.task.row_hash`) of a
    participant's rows."""

    rows: int = 0
    hash: int = 0

    def add(self, rows: int, hash_sum: int) -> Fingerprint:
        return Fingerprint(self.rows + rows, (self.hash + hash_sum) & (2**64 - 1))

    def __add__(self, other: Fingerprint) -> Fingerprint:
        return self.add(other.rows, other.hash)

    def __str__(self) -> str:
        return f"{self.rows} rows (hash {self.hash:016x})"

    def stored(self) -> tuple[int, str]:
        """Count, and hash as a text."""
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
    """One pre-committed transaction: what the driver needs to commit it, from any process, after
    any crash.

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
        return replace(
            self, sink=sink, subtask=subtask, fingerprint=fingerprint, refused=tuple(refused)
        )

    @property
    def remembered(self) -> bool:
        """Whether `committed_checkpoints` will have its checkpoint, if the sink implements it."""
        return bool(self.proof.get("remembered", True))

    def target_mismatch(self, target: str) -> str:
        """An error text if the sink now writes to another `target` than its proof says; "" if it is
        the same."""
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
    COMMITTED = "committed"  # visible; also when it already was
    LOST = "lost"  # proven: rolled back, and it can never become visible
    UNKNOWN = "unknown"  # cannot be proven; stops the query with an error that names the choices
    HELD = "held"  # intact and invisible, waits for a LOST or UNKNOWN one; only from `commit_all`


@dataclass(frozen=True)
class CommitOutcome:
    """The result of `commit`. If another try may change it, raise an exception instead."""

    state: CommitState
    reason: str = ""
    """For people: which transaction, the proof of its loss or where it was searched, and what to
    do."""
    expired: bool = False
    """UNKNOWN because the system's retention has removed what it wrote: both the rows and the
    proof."""

    COMMITTED: ClassVar[CommitOutcome]
    HELD: ClassVar[CommitOutcome]

    @classmethod
    def lost(cls, reason: str) -> CommitOutcome:
        """It was rolled back; the coordinator logs why and writes the rows again."""
        return cls(CommitState.LOST, reason)

    @classmethod
    def unknown(cls, reason: str, *, expired: bool = False) -> CommitOutcome:
        """The query stops with an `InDoubtError` that shows the reason; if it is `expired`, only
        where Spark does not know either."""
        return cls(CommitState.UNKNOWN, reason, expired)


CommitOutcome.COMMITTED = CommitOutcome(CommitState.COMMITTED)
CommitOutcome.HELD = CommitOutcome(CommitState.HELD)


def not_among(listed: Iterable[Identity], named: Iterable[Identity]) -> list[Identity]:
    """The listed identities that `named` does not have, compared as a whole."""
    known = {_key(identity) for identity in named}
    return [identity for identity in listed if _key(identity) not in known]


def _key(identity: Identity) -> str:
    return json.dumps(dict(identity), sort_keys=True)
