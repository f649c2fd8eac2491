"""The two ways for rows to become visible, and how the outcome of each is told.

Their methods are those of `sinks.base`; what the sink found out about its server (`plan`), its ledger, or an open
connection is handed to them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Generic

from sinks.errors import BadValue, CommittedError, ConfigurationError, SinkError
from sinks.progress import progress
from sinks.sql.dialect import Dialect, NotDone, Plan, TargetT
from sinks.sql.ledger import Ledger
from sinks.sql.server import C
from sinks.sql.transaction import T
from sinks.transaction import (
    Checkpoint,
    CommitOutcome,
    Committable,
    Fingerprint,
    Identity,
    TransactionContext,
    TransactionId,
)


class Strategy(ABC, Generic[C, TargetT, T]):
    def __init__(self, dialect: Dialect[C, TargetT, T]) -> None:
        self.dialect, self.server, self.merge = dialect, dialect.server, dialect.merge

    @abstractmethod
    def begin(self, plan: Plan[C, TargetT], context: TransactionContext) -> T: ...

    @abstractmethod
    def pre_commit(self, transaction: T, plan: Plan[C, TargetT]) -> Committable: ...

    @abstractmethod
    def commit_directly(self, transaction: T, plan: Plan[C, TargetT]) -> None: ...

    @abstractmethod
    def abort(self, connection: C, ledger: Ledger[C], identity: Identity) -> None: ...

    def finish(self, transaction: T, plan: Plan[C, TargetT]) -> int:
        """Wait until every row is judged, and see that they went into the database that the query began with. Returns
        how many there were."""
        rows = transaction.finish()
        with transaction.explained():
            plan.ledger.require_same(transaction.connection)
        return rows

    def proof(self, plan: Plan[C, TargetT]) -> dict[str, object]:
        """What committables carry: which ledger speaks for them, and what their rows were written for."""
        return plan.ledger.proof() | {"target": self.dialect.aim(plan.target)}

    def require_meant(self, connection: C, plan: Plan[C, TargetT]) -> None:
        """Raise ConfigurationError if something new alters the rows of the target, which the transaction has locked."""
        target = plan.target
        target.require_meant(self.server.triggers(connection, target.schema, target.name))


class TwoPhase(Strategy[C, TargetT, T]):
    """Each participant has a transaction of its own on the target: it is prepared in the task, and ended by name."""

    def begin(self, plan: Plan[C, TargetT], context: TransactionContext) -> T:
        return self.dialect.begin(plan, context)

    def finish(self, transaction: T, plan: Plan[C, TargetT]) -> int:
        rows = super().finish(transaction, plan)
        with transaction.explained():
            self.require_meant(transaction.connection, plan)
        return rows

    def pre_commit(self, transaction: T, plan: Plan[C, TargetT]) -> Committable:
        """The ledger row goes into the same transaction: it becomes visible if and only if the rows do."""
        rows = self.finish(transaction, plan)
        text, ledger = transaction.context.transaction_id, plan.ledger
        key = self.dialect.key(transaction.identity)
        sums = {key: replace(transaction.summed, rows=rows)} if transaction.summed else None
        with transaction.explained():
            proof = self.proof(plan) | self.dialect.evidence(transaction)
            if not ledger.insert(transaction.connection, {key: TransactionId.parse(text)}, committed=True, sums=sums):
                raise SinkError(f"{text} was aborted, or used, before it was pre-committed")
        transaction.prepare()
        return Committable(transaction.identity, proof=proof)

    def commit_directly(self, transaction: T, plan: Plan[C, TargetT]) -> None:
        self.finish(transaction, plan)
        transaction.commit()

    def commit(self, plan: Plan[C, TargetT], committable: Committable) -> CommitOutcome:
        ledger = plan.ledger
        with self.server.lend() as connection:
            try:
                if self.dialect.end(connection, ledger, "COMMIT", committable.transaction, committable.proof):
                    return CommitOutcome.COMMITTED
            except (ConfigurationError, NotDone) as refused:
                return CommitOutcome.unknown(str(refused))
            return self._outcome_of_gone(connection, plan, committable)

    def _outcome_of_gone(self, connection: C, plan: Plan[C, TargetT], committable: Committable) -> CommitOutcome:
        """Not prepared: committed, rolled back by somebody, or not prepared yet. The ledger tells, see there."""
        ledger = plan.ledger
        key = self.dialect.key(committable.transaction)
        witnessed = key in ledger.witness.states(connection, [key])
        committed = ledger.states(connection, [key]).get(key)
        if committed is None:
            proof = committable.proof
            reason = ledger.contradiction(connection, proof, witnessed=witnessed)
            if reason or (reason := self.dialect.contradiction(connection, proof)):
                return CommitOutcome.unknown(
                    f"{key} is no longer prepared at {self.server}, and nobody can tell what became of it: {reason}. "
                    "Look for its rows in the table, then point the sink at the old ledger, or insert its row into the "
                    "new one"
                )
            tombstone = {key: TransactionId.parse(proof.get("transaction_id", key))}
            with self.server.transaction(connection):
                ledger.insert(connection, tombstone, committed=False)
            committed = ledger.states(connection, [key])[key]
        if committed:
            return CommitOutcome.COMMITTED
        lost = (
            f"{key} was rolled back by somebody else: it is not prepared any more, and the ledger {ledger.label} has a "
            "tombstone in place of its row"
        )
        if astray := committable.astray(self.dialect.aim(plan.target)):
            return CommitOutcome.unknown(f"{lost}; {astray}")
        return CommitOutcome.lost(lost)

    def abort(self, connection: C, ledger: Ledger[C], identity: Identity) -> None:
        key = self.dialect.key(identity)
        ended = self.dialect.end(connection, ledger, "ROLLBACK", identity, {})
        if not ended and ledger.states(connection, [key]).get(key):
            raise CommittedError(f"{key} is committed: the ledger {ledger.label} has its row")


class TargetRefuses(Exception):
    """The target refuses the rows of a complete checkpoint: asking again cannot help, an operator can."""


class Doubtful(Exception):
    """What is staged is not what was acknowledged, so nobody can tell what became of the rows."""


class SettledByOthers(Exception):
    """Somebody else settled a participant at the same time: ask again."""


class Staged(Strategy[C, TargetT, T]):
    """Tasks commit their rows into staging tables; the driver moves a whole checkpoint in one transaction, which also
    writes the ledger. In between nothing is locked and no transaction is open."""

    @abstractmethod
    def intact(self, connection: C, plan: Plan[C, TargetT], committables: Sequence[Committable]) -> Collection[str]:
        """The transaction ids of those whose rows are still staged."""

    @abstractmethod
    def kept(self, committables: Sequence[Committable]) -> str:
        """Where their rows are staged, for a reader."""

    @abstractmethod
    def gone(self, transaction_id: str) -> str:
        """What a reader is told of one that is not intact."""

    @abstractmethod
    def move(self, connection: C, plan: Plan[C, TargetT], committables: Sequence[Committable]) -> None:
        """Put their rows into the target, in the caller's transaction. Raises TargetRefuses, ConfigurationError or
        BadValue if the target refuses them, another SinkError that is not retryable if they are not what was staged."""

    @abstractmethod
    def forget(self, connection: C, schema: str, identity: Identity) -> None:
        """Remove what is staged of an aborted transaction, if there is anything."""

    def tidy(self, connection: C, schema: str, ids: Sequence[str]) -> None:
        """Remove what moved participants leave behind, as far as it can be done now. Default: they leave nothing."""

    @abstractmethod
    def validate_all(
        self, plan: Plan[C, TargetT], checkpoint: Checkpoint, committables: Sequence[Committable]
    ) -> None: ...

    @abstractmethod
    def staged(self, connection: C, schema: str, ledger: Ledger[C] | None, job: str, sink: str) -> dict[str, Identity]:
        """All that is staged of this job and sink, by transaction id, also of tasks that died before their pre-commit
        and of participants that were moved. `ledger` is None if there is none yet."""

    def commit_all(self, plan: Plan[C, TargetT], committables: Sequence[Committable]) -> list[CommitOutcome]:
        """Settle the participants of one checkpoint together: all become visible, or none does."""
        with self.server.lend() as connection:
            try:
                with progress(_moving(plan, committables)), self.server.transaction(connection):
                    outcomes = self.settle(connection, plan, committables)
            except TargetRefuses as refused:
                return self.refused(committables, str(refused))
            except Doubtful as doubtful:
                what = f"{doubtful}. Nothing was moved now: look which of its rows are in the table"
                return [CommitOutcome.unknown(what)] * len(committables)
            except Exception as error:
                fault = self.dialect.fault(error)
                if fault is None or fault.kind != "right":
                    raise
                return self.refused(committables, f"the user lacks a right: {fault.text}: grant it")
            committed = [text for text, outcome in outcomes.items() if outcome == CommitOutcome.COMMITTED]
            self.tidy(connection, plan.ledger.schema, committed)
        return [outcomes[_id(c)] for c in committables]

    def refused(self, committables: Sequence[Committable], reason: str) -> list[CommitOutcome]:
        """What an operator is told: asking again does not help, mending what is named does."""
        return [
            CommitOutcome.unknown(
                f"{reason}. The checkpoint is complete and none of it is in the table; its rows are safe in "
                f"{self.kept(committables)}, which must not be touched. Mend what is named and start the query "
                "again: it moves every row, once"
            )
        ] * len(committables)

    def settle(
        self, connection: C, plan: Plan[C, TargetT], committables: Sequence[Committable]
    ) -> dict[str, CommitOutcome]:
        """The outcomes by transaction id. What is lost is told by tombstones, and holds its siblings until the replay:
        an older change must not come after a newer one."""
        ledger = plan.ledger
        by_id = {_id(c): c for c in committables}
        witnessed = ledger.witness.states(connection, list(by_id))
        states = ledger.states(connection, list(by_id))
        ledger.require_intact(connection)
        undecided = [c for text, c in by_id.items() if text not in states]
        for text, c in by_id.items():
            if not states.get(text) and (astray := c.astray(self.dialect.aim(plan.target))):
                raise TargetRefuses(f"{text}: {astray}")
        intact = self.intact(connection, plan, undecided)
        outcomes: dict[str, CommitOutcome] = {}

        lost = []
        for c in undecided:
            if _id(c) in witnessed or _id(c) not in intact:
                if reason := ledger.contradiction(connection, c.proof, witnessed=_id(c) in witnessed):
                    outcomes[_id(c)] = CommitOutcome.unknown(
                        f"nobody can tell whether the rows of {_id(c)} are in the table: {reason}. Look for them, then "
                        "point the sink at the old ledger, or insert its row into the new one"
                    )
                else:
                    lost.append(_id(c))
        if lost:
            states |= self._decide(connection, ledger, lost, committed=False)

        if intact and not outcomes and all(states.values()):
            sums = {text: c.fingerprint for text, c in by_id.items()}
            states |= self._decide(connection, ledger, intact, committed=True, sums=sums)
            self._move(connection, plan, [c for c in undecided if _id(c) in intact])

        return {text: outcomes.get(text) or self._outcome(ledger, text, states.get(text)) for text in by_id}

    def _move(self, connection: C, plan: Plan[C, TargetT], committables: Sequence[Committable]) -> None:
        try:
            self.move(connection, plan, committables)
        except (ConfigurationError, BadValue) as error:
            raise TargetRefuses(str(error)) from error
        except SinkError as error:
            if error.retryable:
                raise
            raise Doubtful(f"table {plan.target.label}: {error}") from error

    def _outcome(self, ledger: Ledger[C], text: str, committed: bool | None) -> CommitOutcome:
        if committed is None:
            return CommitOutcome.HELD
        if committed:
            return CommitOutcome.COMMITTED
        return CommitOutcome.lost(
            f"{self.gone(text)}, and the ledger {ledger.label} has a tombstone in place of its row"
        )

    def _decide(
        self,
        connection: C,
        ledger: Ledger[C],
        ids: Collection[str],
        *,
        committed: bool,
        sums: Mapping[str, Fingerprint] | None = None,
    ) -> dict[str, bool]:
        if not ledger.decide(connection, ids, committed=committed, sums=sums):
            raise SettledByOthers(f"somebody else settled one of {sorted(ids)} at the same time")
        return dict.fromkeys(ids, committed)

    def abort(self, connection: C, ledger: Ledger[C], identity: Identity) -> None:
        """Make the loss final with a tombstone, and remove what is staged."""
        text = identity["transaction_id"]
        with self.server.transaction(connection):
            ledger.decide(connection, [text], committed=False)
        if ledger.states(connection, [text]).get(text):
            raise CommittedError(f"{text} is committed: the ledger {ledger.label} has its row")
        self.forget(connection, ledger.schema, identity)

    def in_doubt(self, connection: C, schema: str, ledger: Ledger[C] | None, job: str, sink: str) -> Iterator[Identity]:
        """What is staged and was not moved."""
        staged = self.staged(connection, schema, ledger, job, sink)
        states = ledger.states(connection, list(staged)) if ledger and staged else {}
        moved = sorted(text for text in staged if states.get(text))
        if moved:
            self.tidy(connection, schema, moved)  # a reader was in the way then
        return (identity for text, identity in staged.items() if text not in moved)


def _moving(plan: Plan[C, TargetT], committables: Sequence[Committable]) -> str:
    rows = sum(committable.fingerprint.rows for committable in committables)
    return f"move {rows:,} rows of {len(committables):,} participants into {plan.target.label}"


def _id(committable: Committable) -> str:
    return str(committable.transaction["transaction_id"])
