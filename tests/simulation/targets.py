"""Targets in the simulated world, and a sink for each kind of target.

They have what matters of the real ones: a ledger and its purge, tombstones, staged rows that become visible in one
step, pooled transactional ids that fence their holder, transactions that time out, a group's offset that remembers only
the newest commit, a table's history that expires. The conformance kit passes on each of these sinks, as on the real
ones (test_kit.py).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

import pyarrow as pa

from sinks.audit import Audit, Holding, Part
from sinks.base import Sink, TwoPhaseCommitSink
from sinks.dead_letters import Refusal
from sinks.errors import BadValue, CommittedError, TransactionBlocked, TransactionEnded
from sinks.optional import (
    Auditable,
    DeadLettering,
    JointCommitting,
    SchemaEvolving,
    Validating,
    WholeCommitting,
)
from sinks.transaction import (
    Checkpoint,
    CommitOutcome,
    Committable,
    Identity,
    TransactionContext,
    TransactionId,
    token,
)
from tests.simulation.memory import Memory
from tests.simulation.world import Unreachable, World, id_of, name_of, short

T = TypeVar("T")
Owner = tuple[str, str]
"""The tokens of a job and of a sink, as names of transactions have them."""

KEPT = 1
"""Checkpoints whose proofs a target keeps beyond what recovery can ask for. A small number finds more."""
KAFKA_TIMEOUT = 900.0
"""Seconds after which a broker aborts a transaction."""


class Row(NamedTuple):
    id: int
    """What the judge knows of the row."""
    values: Mapping[str, Any]
    """All columns, as they were written."""


ID: Callable[[Row], int] = itemgetter(0)


@dataclass(frozen=True)
class Transaction:
    """A transaction as a target remembers it: open, prepared, committed or aborted."""

    state: str
    owner: Owner
    lineage: str
    checkpoint: int
    subtask: int
    round: int
    content: tuple[Row, ...] = ()
    opened_at: float = 0.0

    @classmethod
    def named(cls, name: str, state: str) -> Transaction:
        """Return a transaction without rows of which only the name is known."""
        id = TransactionId.parse(name)
        return cls(state, (id.job, id.sink), id.lineage, id.checkpoint, id.subtask, id.round)

    @property
    def rows(self) -> tuple[int, ...]:
        return tuple(map(ID, self.content))


class Target:
    """One external system, into which several sinks of several jobs may write.

    Its memory has "transaction NAME" (the ledger, with what is prepared), "rows NAME" (the rows that readers see),
    "group" (what Kafka's consumer groups remember), "properties" (what the table of a lake remembers), and
    "purged JOB SINK LINEAGE" (the checkpoint before which there are no proofs).
    """

    def __init__(self, world: World, name: str, memory: Memory) -> None:
        self.world = world
        self.name = name
        self.memory = memory
        self.calls_that_fail = 0
        self.slow_calls = 0
        self.slowness = 0.0
        """The seconds that each of the next `slow_calls` takes, those that write."""

    def transaction(self, name: str) -> Transaction | None:
        return self.memory.values.get(f"transaction {name}")

    def transactions(self) -> Iterator[tuple[str, Transaction]]:
        for key, value in list(self.memory.values.items()):
            if key.startswith("transaction "):
                yield key.removeprefix("transaction "), value

    def in_state(self, state: str) -> list[str]:
        return [name for name, transaction in self.transactions() if transaction.state == state]

    def put(self, name: str, transaction: Transaction) -> None:
        self.memory.put(f"transaction {name}", transaction)
        if transaction.content:
            self.world.rows_of[self.name, name] = transaction.rows

    def forget(self, names: Iterable[str]) -> None:
        self.memory.remove(*(f"transaction {name}" for name in names))

    def visible(self) -> Counter[int]:
        """Return how often readers see each row."""
        return Counter(map(id_of, map(ID, self.content())))

    def content(self) -> Iterator[Row]:
        """Return the rows that readers see."""
        return chain.from_iterable(rows for key, rows in list(self.memory.values.items()) if key.startswith("rows "))

    def commit(self, prepared: Mapping[str, Transaction], **beside: Any) -> None:
        """Show the rows of transactions, and change what the target remembers beside them, in one step."""
        self.world.about_to_commit(self, prepared)
        rows = {f"rows {name}": each.content for name, each in prepared.items()}
        ledger = {f"transaction {name}": replace(each, state="committed") for name, each in prepared.items()}
        self.memory.put_all(rows | ledger | beside)

    def roll_back(self, name: str) -> None:
        """Roll a prepared transaction back without being asked: by an operator, a timeout, or the system itself."""
        transaction = self.transaction(name)
        if transaction and transaction.state in ("open", "prepared"):
            self.put(name, replace(transaction, state="aborted"))

    def delete_rows(self, first: int) -> None:
        """Delete the rows from that id on, as an operator does it. The ledger keeps its own rows."""
        for key, rows in list(self.memory.values.items()):
            if key.startswith("rows "):
                self.memory.values[key] = tuple(row for row in rows if id_of(row.id) < first)
        self.memory.keep()


class SimSink(Auditable[Any], Validating[Any]):
    """What all simulated sinks have in common: transactions with names, a ledger, tombstones."""

    system = "simulated"
    takes_at_least_once = False
    remembers = True
    """Whether the target tells at a start which checkpoints it has, whatever happened to it."""

    def __init__(self, world: World, name: str, every: int = 1) -> None:
        """Take the rows of each unit of input whose number can be divided by `every`."""
        TwoPhaseCommitSink.__init__(self, name=name)
        self.world = world
        self.every = every
        self.target_name = name

    @property
    def target(self) -> Target:
        return self.world.target(self.target_name)

    def owner(self, job: str) -> Owner:
        return token(job), token(self.name)

    def transactions(self, job: str) -> Iterator[tuple[str, Transaction]]:
        """Yield what the target remembers of this sink of a job."""
        owner = self.owner(job)
        return ((name, each) for name, each in self.target.transactions() if each.owner == owner)

    def takes(self, id: int) -> bool:
        return (id_of(id) // 2) % self.every == 0

    def call(self, what: str, effect: Callable[[], T]) -> T:
        """Make a call to the target, which may fail before it, or lose its answer."""
        target = self.target
        fault = self.world.scheduler.tick(f"{self.name} {what}")
        if target.slow_calls > 0 and what.startswith(("commit ", "commit_whole", "pre_commit")):
            target.slow_calls -= 1
            self.world.scheduler.sleep(target.slowness)
        if target.calls_that_fail > 0:
            target.calls_that_fail -= 1
            raise Unreachable(f"{self.name} is down")
        if fault in ("lost", "late"):
            raise Unreachable(f"{self.name}: {what} was not done")
        with target.memory.lock:
            result = effect()
        if fault == "landed":
            raise Unreachable(f"{self.name}: {what} was done, and the answer got lost")
        return result

    # ------------------------------------------------------------------ in a task
    def begin_transaction(self, context: TransactionContext) -> dict[str, Any]:
        name = context.transaction_id
        return {"name": name, "rows": [], "transaction": Transaction.named(name, "prepared")}

    def write(self, transaction: dict[str, Any], batch: pa.RecordBatch) -> None:
        transaction["rows"] += rows_of(batch)
        self.require_unlocked(transaction)

    def require_unlocked(self, transaction: dict[str, Any]) -> None:
        """Raise if another prepared transaction holds one of the rows, as the lock of an upsert."""
        if not (self.world.scenario.locks and isinstance(self, Prepared)):
            return
        own = {row.id for row in transaction["rows"]}
        for name, other in self.target.transactions():
            if other.state == "prepared" and own & set(other.rows):
                raise TransactionBlocked(f"{short(name)} holds a lock on a row of this one")

    def pre_commit(self, transaction: dict[str, Any]) -> Identity:
        name = transaction["name"]

        def prepare() -> None:
            if self.target.transaction(name) is not None:
                raise TransactionEnded(f"{name} was aborted, or used")
            content = tuple(transaction["rows"])
            now = self.world.scheduler.now
            self.target.put(name, replace(transaction["transaction"], content=content, opened_at=now))
            transaction["prepared"] = True

        self.call(f"pre_commit {short(name)}", prepare)
        return {"name": name}

    def rollback(self, transaction: dict[str, Any]) -> None:
        name = transaction["name"]

        def undo() -> None:
            there = self.target.transaction(name)
            if there and there.state == "prepared" and transaction.get("prepared"):
                self.target.forget([name])

        self.call(f"rollback {short(name)}", undo)

    # ------------------------------------------------------------------ on the driver
    def commit(self, committable: Committable) -> CommitOutcome:
        name = name_of(committable.transaction)
        self.world.is_asked_to_commit()
        return self.call(f"commit {short(name)}", lambda: self.outcome(name))

    def outcome(self, name: str) -> CommitOutcome:
        """Commit a transaction if it is prepared, and return what became of it."""
        transaction = self.target.transaction(name)
        if transaction is None:
            # The tombstone makes the outcome final.
            transaction = Transaction.named(name, "aborted")
            retained = self.target.memory.values.get(purged(transaction.owner, transaction.lineage), -1)
            if transaction.checkpoint < retained:
                return CommitOutcome.unknown(f"the proof of {name} was purged")
            self.target.put(name, transaction)
        if transaction.state == "aborted":
            return CommitOutcome.lost(f"{name} was rolled back")
        if transaction.state == "prepared":
            self.show({name: transaction})
        return CommitOutcome.COMMITTED

    def show(self, prepared: Mapping[str, Transaction]) -> None:
        """Commit transactions in one step, with what the target remembers of that."""
        self.target.commit(prepared)

    def abort(self, transaction: Identity) -> None:
        name = name_of(transaction)

        def undo() -> None:
            there = self.target.transaction(name)
            if there and there.state == "committed":
                raise CommittedError(name)
            if there is None:
                there = Transaction.named(name, "prepared")
            self.world.about_to_abort(self.target, name, there)
            self.target.put(name, replace(there, state="aborted"))

        self.call(f"abort {short(name)}", undo)

    def in_doubt(self, job: str) -> Iterable[Identity]:
        def look() -> list[Identity]:
            names = [name for name, transaction in self.transactions(job) if transaction.state == "prepared"]
            self.world.listed_in_doubt(self.name, names)
            return [{"name": name} for name in names]

        return self.call("in_doubt", look)

    def committed_checkpoints(self, job: str) -> Mapping[str, int] | None:
        def look() -> dict[str, int]:
            self.world.looks_at_memory()
            newest: dict[str, int] = {}
            for _, transaction in self.transactions(job):
                if transaction.state == "committed":
                    newest[transaction.lineage] = max(newest.get(transaction.lineage, -1), transaction.checkpoint)
            return newest

        return self.call("committed_checkpoints", look)

    def purge(self, checkpoint: Checkpoint) -> None:
        def prune() -> None:
            before = checkpoint.oldest_retained - KEPT
            key = purged(self.owner(checkpoint.job), checkpoint.lineage)
            self.target.memory.put(key, max(before, self.target.memory.values.get(key, -1)))
            self.target.forget(
                name
                for name, transaction in self.transactions(checkpoint.job)
                if transaction.lineage == checkpoint.lineage
                and transaction.checkpoint < before
                and transaction.state != "prepared"
            )

        self.call(f"purge {checkpoint.checkpoint_id}", prune)

    def audit(self, job: str, parts: Sequence[Part], *, quick: bool = False) -> Audit:
        def look() -> Audit:
            holdings = []
            for part in parts:
                known = {name_of(each.transaction) for each in part.committables} | set(map(name_of, part.given_up))
                there = {
                    name
                    for name, transaction in self.transactions(job)
                    if transaction.state == "committed"
                    and (transaction.lineage, transaction.checkpoint) == (part.lineage, part.checkpoint_id)
                }
                holdings.append(Holding(unexpected=tuple(sorted(there - known))))
            return Audit(holdings)

        return self.call("audit", look)

    def validate_all(self, checkpoint: Checkpoint, committables: Sequence[Committable]) -> None:
        pass


class Prepared(SimSink):
    """A database with prepared transactions and a ledger, as PostgreSQL and MySQL."""


class Evolving(SchemaEvolving[Any], Prepared):
    """A table that is altered for new columns. That waits for all that is prepared, as it takes a lock on the table."""

    def evolve(self, schema: pa.Schema) -> None:
        def alter() -> None:
            self.world.require_newest(f"alters {self.name}", calls=3)
            if held := self.target.in_state("prepared"):
                raise TransactionBlocked(f"{short(held[0])} holds a lock on the table")

        self.call("evolve", alter)


class Whole(WholeCommitting[Any], JointCommitting[Any], SimSink):
    """A table that gets staged rows, or files, of a checkpoint in one step, as do others of its database."""

    def place(self) -> str | None:
        return "the database"

    def commit_whole(self, checkpoint: Checkpoint, committables: Sequence[Committable]) -> Sequence[CommitOutcome]:
        [outcomes] = self.commit_jointly(checkpoint, [(self, committables)])
        return outcomes

    def commit_jointly(
        self, checkpoint: Checkpoint, shares: Sequence[tuple[Sink, Sequence[Committable]]]
    ) -> Sequence[Sequence[CommitOutcome]]:
        self.world.is_asked_to_commit()
        asked = {sink: [name_of(each.transaction) for each in own] for sink, own in shares if isinstance(sink, Whole)}

        def move() -> list[list[CommitOutcome]]:
            there: dict[Whole, dict[str, Transaction | None]] = {}
            for sink, names in asked.items():
                others = set(sink.target.in_state("prepared")) - set(names)
                if self.world.scenario.locks and others:
                    self.world.commit_was_held_by(sink.name, others)
                    raise Unreachable("another transaction holds a lock on the table")
                there[sink] = {name: sink.target.transaction(name) for name in names}
            if all(each and each.state != "aborted" for own in there.values() for each in own.values()):
                self.require_joint(checkpoint, asked)
                shown: dict[str, tuple[Whole, dict[str, Transaction]]] = {}
                for sink, own in there.items():
                    _, prepared = shown.setdefault(sink.target_name, (sink, {}))
                    prepared |= {name: each for name, each in own.items() if each and each.state == "prepared"}
                for sink, prepared in shown.values():
                    sink.show(prepared)
                return [[CommitOutcome.COMMITTED] * len(own) for own in there.values()]
            return [
                [
                    CommitOutcome.HELD if each and each.state == "prepared" else sink.outcome(name)
                    for name, each in own.items()
                ]
                for sink, own in there.items()
            ]

        return self.call(f"commit_whole {checkpoint.checkpoint_id}", move)

    def require_joint(self, checkpoint: Checkpoint, asked: Iterable[Whole]) -> None:
        """Note it if the checkpoint becomes visible in a table of the database, and not in another one."""
        beside = {name for name, kind, _ in self.world.scenario.sinks if KINDS[kind] is type(self)}
        for name in beside - {sink.name for sink in asked} if self.place() else ():
            staged = {
                text
                for text, each in self.world.target(name).transactions()
                if each.state == "prepared"
                and (each.lineage, each.checkpoint) == (checkpoint.lineage, checkpoint.checkpoint_id)
            }
            if apart := staged & self.world.decided_names():
                self.world.violations.append(f"apart: {self.name} shows a checkpoint, and {name} has {apart} staged")

    def validate_all(self, checkpoint: Checkpoint, committables: Sequence[Committable]) -> None:
        def look() -> None:
            prepared = self.target.in_state("prepared")
            if gone := [name for each in committables if (name := name_of(each.transaction)) not in prepared]:
                raise TransactionEnded(f"what was staged is gone: {gone}")

        self.call("validate_all", look)


class Lake(Whole):
    """A table of a lake: one commit names the files of a checkpoint.

    The table remembers its commits only as long as its history does, and a vacuum deletes files that no commit names.
    """

    def place(self) -> None:
        return None

    def committed_checkpoints(self, job: str) -> Mapping[str, int] | None:
        def look() -> dict[str, int]:
            self.world.looks_at_memory()
            owner = self.owner(job)
            properties = self.target.memory.values.get("properties", {})
            return {lineage: newest for (of, lineage), newest in properties.items() if of == owner}

        return self.call("committed_checkpoints", look)

    def show(self, prepared: Mapping[str, Transaction]) -> None:
        properties = dict(self.target.memory.values.get("properties", {}))
        for each in prepared.values():
            key = each.owner, each.lineage
            properties[key] = max(each.checkpoint, properties.get(key, -1))
        self.target.commit(prepared, properties=properties)


class Kafka(SimSink):
    """A topic.

    Transactional ids are pooled, and the use of one fences the transaction before. Transactions time out. The only
    memory is the offset of a sink's consumer group: the checkpoint of the newest commit, whatever lineage that is.
    """

    remembers = False

    def begin_transaction(self, context: TransactionContext) -> dict[str, Any]:
        handle = super().begin_transaction(context)
        pooled = ".".join((*self.owner(context.job), str(context.subtask), str(context.slot)))

        def begin() -> None:
            for name in self.target.in_state("prepared") + self.target.in_state("open"):
                if name.startswith(f"{pooled}#"):
                    self.target.roll_back(name)
            self.world.epochs += 1  # no epoch is given twice, even by brokers that were restored
            handle["name"] = f"{pooled}#{self.world.epochs}"
            now = self.world.scheduler.now
            self.target.put(handle["name"], replace(handle["transaction"], state="open", opened_at=now))

        self.call(f"begin {pooled}", begin)
        return handle

    def pre_commit(self, transaction: dict[str, Any]) -> Identity:
        name = transaction["name"]

        def seal() -> None:
            there = self.target.transaction(name)
            if there is None or there.state != "open":
                raise TransactionEnded(f"the broker has ended {name}")
            self.target.put(name, replace(there, state="prepared", content=tuple(transaction["rows"])))

        self.call(f"pre_commit {name}", seal)
        pooled, _, epoch = name.partition("#")
        return {"pooled": pooled, "epoch": int(epoch)}

    def rollback(self, transaction: dict[str, Any]) -> None:
        self.call(f"rollback {transaction['name']}", lambda: self.target.roll_back(transaction["name"]))

    def outcome(self, name: str) -> CommitOutcome:
        transaction = self.target.transaction(name)
        if transaction is None:
            return CommitOutcome.unknown(f"the broker does not know {name} any more")
        if transaction.state in ("open", "aborted"):
            return CommitOutcome.lost(f"the broker has aborted {name}")
        if transaction.state == "prepared":
            self.show({name: transaction})
        return CommitOutcome.COMMITTED

    def show(self, prepared: Mapping[str, Transaction]) -> None:
        offsets = {each.owner: (each.lineage, each.checkpoint, each.round) for each in prepared.values()}
        self.target.commit(prepared, group=self.target.memory.values.get("group", {}) | offsets)

    def offset(self, job: str) -> tuple[str, int, int] | None:
        """Return what the consumer group remembers: lineage, checkpoint and replay round of the newest commit."""
        offsets: dict[Owner, tuple[str, int, int]] = self.target.memory.values.get("group", {})
        return offsets.get(self.owner(job))

    def abort(self, transaction: Identity) -> None:
        name = name_of(transaction)

        def undo() -> None:
            there = self.target.transaction(name)
            if there and there.state == "committed":
                raise CommittedError(name)
            if there:
                self.world.about_to_abort(self.target, name, there)
                self.target.put(name, replace(there, state="aborted"))

        self.call(f"abort {name}", undo)

    def in_doubt(self, job: str) -> Iterable[Identity]:
        def look() -> list[Identity]:
            names = [name for name, each in self.transactions(job) if each.state in ("open", "prepared")]
            self.world.listed_in_doubt(self.name, names)
            return [{"pooled": name.partition("#")[0], "epoch": int(name.partition("#")[2])} for name in names]

        return self.call("in_doubt", look)

    def committed_checkpoints(self, job: str) -> Mapping[str, int] | None:
        def look() -> dict[str, int] | None:
            offset = self.offset(job)
            return {offset[0]: offset[1]} if offset else None

        return self.call("committed_checkpoints", look)

    def purge(self, checkpoint: Checkpoint) -> None:
        pass

    def audit(self, job: str, parts: Sequence[Part], *, quick: bool = False) -> Audit:
        def look() -> Audit:
            lineage, checkpoint, round = self.offset(job) or ("", -1, 0)
            return Audit(
                [
                    Holding(
                        unexpected=(f"a transaction of its replay {round}",)
                        if (lineage, checkpoint) == (part.lineage, part.checkpoint_id) and round > part.round
                        else ()
                    )
                    for part in parts
                ]
            )

        return self.call("audit", look)

    def validate_all(self, checkpoint: Checkpoint, committables: Sequence[Committable]) -> None:
        def look() -> None:
            prepared = self.target.in_state("prepared")
            for each in committables:
                if (name := name_of(each.transaction)) not in prepared:
                    raise TransactionEnded(f"the brokers have ended {name}")

        self.call("validate_all", look)

    @staticmethod
    def time_out(target: Target) -> None:
        """Abort what has been open for too long."""
        for name, transaction in list(target.transactions()):
            if "#" in name and target.world.scheduler.now - transaction.opened_at > KAFKA_TIMEOUT:
                target.roll_back(name)


class Forgetful(SimSink):
    """A sink of a user without the optional memory."""

    remembers = False

    def committed_checkpoints(self, job: str) -> None:
        return None


def is_refused(id: int) -> bool:
    return id_of(id) % 5 == 3


class Letters(DeadLettering[Any], Prepared):
    """A database whose table refuses some rows, with a sink for dead letters beside it."""

    def __init__(self, world: World, name: str, every: int = 1, refuses: Callable[[int], bool] = is_refused) -> None:
        """Refuse the rows with the ids that `refuses` says."""
        SimSink.__init__(self, world, name, every)
        self.dead_letters = Prepared(world, f"{name}-dead", every)
        self.max_dead_letters = world.scenario.most_letters
        self.refuses = refuses

    def write(self, transaction: dict[str, Any], batch: pa.RecordBatch) -> None:
        if self.write_good_rows(transaction, batch, 0):
            raise BadValue(f"{self.name} refuses a row")

    def write_good_rows(self, transaction: dict[str, Any], batch: pa.RecordBatch, most: int) -> Sequence[Refusal]:
        rows = rows_of(batch)
        refused = [Refusal(place, "Bad", f"id {row.id}") for place, row in enumerate(rows) if self.refuses(row.id)]
        transaction["rows"] += [row for row in rows if not self.refuses(row.id)]
        self.require_unlocked(transaction)
        return refused


def rows_of(batch: pa.RecordBatch) -> list[Row]:
    """Return the rows of a batch. A dead letter has the id of the row that it is for."""
    if "id" in batch.schema.names:
        return [Row(row["id"], row) for row in batch.to_pylist()]
    return [Row(json.loads(row["row"])["id"], row) for row in batch.to_pylist()]


def purged(owner: Owner, lineage: str) -> str:
    """Return the key of the checkpoint before which a target has no proofs."""
    return " ".join(("purged", *owner, lineage))


def ids_for(sink: SimSink, first_unit: int, end_unit: int) -> set[int]:
    """Return the rows that a sink gets of these units of input."""
    ids = {id for id in range(2 * first_unit, 2 * end_unit) if sink.takes(id)}
    if sink.name.endswith("-dead"):
        return {id for id in ids if is_refused(id)}
    return {id for id in ids if not is_refused(id)} if sink.dead_letters else ids


KINDS: dict[str, Callable[[World, str, int], SimSink]] = {
    "prepared": Prepared,
    "whole": Whole,
    "lake": Lake,
    "kafka": Kafka,
    "forgetful": Forgetful,
    "letters": Letters,
    "evolving": Evolving,
}
