"""The two ways for rows to become visible: `TwoPhase`, and staging tables, and how the outcome of each is told.

Their methods are those of `sinks.base`; what the sink found out about its server (`plan`), its ledger, or an open
connection is handed to them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Generic

from sinks.errors import CommittedError, ConfigurationError, SinkError
from sinks.sql.backend import Backend, NotDone, Plan, TargetT
from sinks.sql.ledger import Ledger
from sinks.sql.server import C
from sinks.sql.transaction import T
from sinks.transaction import CommitOutcome, Committable, Identity, TransactionContext, TransactionId


class Strategy(Generic[C, TargetT, T]):
    """What both do alike."""

    def __init__(self, backend: Backend[C, TargetT, T]) -> None:
        self.backend, self.merge = backend, backend.merge

    def finish(self, transaction: T, plan: Plan[C, TargetT]) -> int:
        """Wait until every row is judged, and see that they went into the database that the query began with. Returns
        how many there were."""
        rows = transaction.finish()
        with transaction.explained():
            plan.ledger.require_same(transaction.connection)
        return rows

    def proof(self, plan: Plan[C, TargetT]) -> dict[str, object]:
        """What committables carry: which ledger speaks for them, and what their rows were written for."""
        return plan.ledger.proof() | {"target": self.backend.aim(plan.target)}

    def require_meant(self, connection: C, plan: Plan[C, TargetT]) -> None:
        """Raise ConfigurationError if something new alters the rows of the target, which the transaction has locked."""
        target = plan.target
        target.require_meant(self.backend.triggers(connection, target.schema, target.name))


class TwoPhase(Strategy[C, TargetT, T]):
    """Each participant has a transaction of its own on the target: it is prepared in the task, and ended by name."""

    def begin(self, plan: Plan[C, TargetT], context: TransactionContext) -> T:
        return self.backend.begin(plan, context)

    def finish(self, transaction: T, plan: Plan[C, TargetT]) -> int:
        rows = super().finish(transaction, plan)
        with transaction.explained():
            self.require_meant(transaction.connection, plan)
        return rows

    def pre_commit(self, transaction: T, plan: Plan[C, TargetT]) -> Committable:
        """The ledger row goes into the same transaction: it becomes visible if and only if the rows do."""
        rows = self.finish(transaction, plan)
        text, ledger = transaction.context.transaction_id, plan.ledger
        key = self.backend.key(transaction.identity)
        sums = {key: replace(transaction.summed, rows=rows)} if transaction.summed else None
        with transaction.explained():
            proof = self.proof(plan) | self.backend.evidence(transaction)
            if not ledger.insert(transaction.connection, {key: TransactionId.parse(text)}, committed=True, sums=sums):
                raise SinkError(f"{text} was aborted, or used, before it was pre-committed")
        transaction.prepare()
        return Committable(transaction.identity, proof=proof)

    def commit_directly(self, transaction: T, plan: Plan[C, TargetT]) -> None:
        self.finish(transaction, plan)
        transaction.commit()

    def commit(self, plan: Plan[C, TargetT], committable: Committable) -> CommitOutcome:
        ledger = plan.ledger
        with self.backend.lend() as connection:
            try:
                if self.backend.end(connection, ledger, "COMMIT", committable.transaction, committable.proof):
                    return CommitOutcome.COMMITTED
            except (ConfigurationError, NotDone) as refused:
                return CommitOutcome.unknown(str(refused))
            return self._outcome_of_gone(connection, plan, committable)

    def _outcome_of_gone(self, connection: C, plan: Plan[C, TargetT], committable: Committable) -> CommitOutcome:
        """Not prepared: committed, rolled back by somebody, or not prepared yet. The ledger tells, see there."""
        ledger = plan.ledger
        key = self.backend.key(committable.transaction)
        with self.backend.reading(connection):
            witnessed = key in ledger.witness.states(connection, [key])
            committed = ledger.states(connection, [key]).get(key)
        if committed is None:
            proof = committable.proof
            reason = ledger.contradiction(connection, proof, witnessed=witnessed)
            if reason or (reason := self.backend.contradiction(connection, proof)):
                return CommitOutcome.unknown(
                    f"{key} is no longer prepared at {self.backend}, and nobody can tell what became of it: {reason}. "
                    "Look for its rows in the table, then point the sink at the old ledger, or insert its row into the "
                    "new one"
                )
            tombstone = {key: TransactionId.parse(proof.get("transaction_id", key))}
            with self.backend.transaction(connection):
                ledger.insert(connection, tombstone, committed=False)
            committed = ledger.states(connection, [key])[key]
        if committed:
            return CommitOutcome.COMMITTED
        lost = (
            f"{key} was rolled back by somebody else: it is not prepared any more, and the ledger {ledger.label} has a "
            "tombstone in place of its row"
        )
        if astray := committable.astray(self.backend.aim(plan.target)):
            return CommitOutcome.unknown(f"{lost}; {astray}")
        return CommitOutcome.lost(lost)

    def abort(self, connection: C, ledger: Ledger[C], identity: Identity) -> None:
        key = self.backend.key(identity)
        ended = self.backend.end(connection, ledger, "ROLLBACK", identity, {})
        if not ended and ledger.states(connection, [key]).get(key):
            raise CommittedError(f"{key} is committed: the ledger {ledger.label} has its row")
