"""Strategy `two_phase`: rows go into the target itself, then SQLAlchemy's `prepare`; the driver commits by name."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from sqlalchemy import exc
from sqlalchemy.engine import Connection

from sinks.sql.strategies import Separate
from sinks.sqlalchemy.ledger import Ledger
from sinks.sqlalchemy.plan import TWO_PHASE, Plan
from sinks.sqlalchemy.rows import RowTransaction
from sinks.transaction import Committable, Identity, TransactionContext, TransactionId, token


class TwoPhase(Separate[RowTransaction]):
    KEY = "xid"

    def begin(self, plan: Plan, context: TransactionContext) -> RowTransaction:
        xid = self._prefix(context.job, context.sink) + _digest(context.transaction_id, 20)
        target = plan.target
        return RowTransaction(self.server, context, target.label, {self.KEY: xid}, target.table, plan.columns, {}, xid)

    def _prefix(self, job: str, sink: str) -> str:
        """What the names of a job's and sink's transactions begin with. A server lists those of all its databases,
        hence the database's name; and XA takes no more than 64 bytes, hence hashes."""
        return f"tpc_{_digest(token(job))}_{_digest(f'{self.server.url.database} {token(sink)}')}_"

    def prepare(self, transaction: RowTransaction, ledger: Ledger) -> None:
        transaction.seal()

    def commit_directly(self, transaction: RowTransaction, plan: Plan) -> None:
        """At-least-once: a plain commit."""
        with transaction.explained():
            transaction.transaction.commit()
        transaction.connection.close()

    def proof(self, transaction: RowTransaction, ledger: Ledger) -> dict[str, Any]:
        return ledger.proof() | {"transaction_id": transaction.context.transaction_id}

    def record(self, transaction: RowTransaction, ledger: Ledger) -> bool:
        name = TransactionId.parse(transaction.context.transaction_id)
        return ledger.insert(transaction.connection, self.key(transaction.identity), name, True)

    def bury(self, connection: Connection, ledger: Ledger, committable: Committable) -> None:
        name = TransactionId.parse(committable.proof["transaction_id"])
        ledger.insert(connection, self.key(committable.transaction), name, False)

    def end(self, connection: Connection, ledger: Ledger, how: str, identity: Identity) -> bool:
        xid = self.key(identity)
        connection.rollback()  # ends what reading began
        try:
            (connection.commit_prepared if how == "COMMIT" else connection.rollback_prepared)(xid, recover=True)
            return True
        except (exc.DBAPIError, self.server.engine.dialect.loaded_dbapi.Error):  # dialects may not wrap the driver's
            connection.invalidate()
            connection.rollback()
            if xid in _listed(connection):
                raise
            return False

    def in_doubt(self, connection: Connection, schema: str | None, job: str, sink: str) -> Iterable[Identity]:
        if self.server.dialect not in TWO_PHASE:
            return []
        return [{self.KEY: xid} for xid in sorted(_listed(connection)) if xid.startswith(self._prefix(job, sink))]


def _digest(text: str, length: int = 10) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:length]


def _listed(connection: Connection) -> set[str]:
    return {xid.decode() if isinstance(xid, bytes) else str(xid) for xid in connection.recover_twophase()}
