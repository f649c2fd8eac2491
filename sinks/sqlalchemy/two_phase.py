"""Strategy `two_phase`: rows go into the target itself, then SQLAlchemy's `prepare`; the driver commits by name."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from sqlalchemy import exc

from sinks.errors import CommittedError, SinkError
from sinks.sqlalchemy.database import Database
from sinks.sqlalchemy.ledger import Ledger
from sinks.sqlalchemy.plan import Plan
from sinks.sqlalchemy.rows import RowTransaction
from sinks.transaction import CommitOutcome, Committable, Identity, TransactionContext, TransactionId, token


def _prefix(database: Database, job: str, sink: str) -> str:
    """What the names of a job's and sink's transactions begin with. A server lists those of all its databases, hence
    the database's name; and XA takes no more than 64 bytes, hence hashes."""
    return f"tpc_{_digest(job)}_{_digest(f'{database.url.database} {sink}')}_"


def _digest(text: str, length: int = 10) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:length]


def begin(database: Database, plan: Plan, context: TransactionContext) -> RowTransaction:
    prefix = _prefix(database, token(context.job), token(context.sink))
    xid = prefix + _digest(context.transaction_id, 20)
    label = plan.target.fullname
    return RowTransaction(database, context, label, {"xid": xid}, plan.target, plan.columns, {}, xid)


def pre_commit(transaction: RowTransaction, ledger: Ledger) -> Committable:
    """The ledger row goes into the same transaction: it becomes visible if and only if the rows do."""
    text, xid = transaction.context.transaction_id, transaction.identity["xid"]
    with transaction.database.explained(transaction.where):
        if not ledger.insert(transaction.connection, xid, TransactionId.parse(text), True):
            raise SinkError(f"{text} was aborted, or used, before it was pre-committed")
    transaction.seal()
    return Committable(transaction.identity, proof=ledger.proof() | {"transaction_id": text})


def commit_directly(transaction: RowTransaction) -> None:
    """At-least-once: a plain commit."""
    with transaction.database.explained(transaction.where):
        transaction.transaction.commit()
    transaction.connection.close()


def commit(database: Database, ledger: Ledger, committable: Committable) -> CommitOutcome:
    xid = committable.transaction["xid"]
    with database.engine.connect() as connection:
        try:
            connection.commit_prepared(xid, recover=True)
            return CommitOutcome.COMMITTED
        except (exc.DBAPIError, _driver_errors(database)):
            connection.invalidate()
            if xid in _listed(database):
                raise
    return _outcome_of_gone(database, ledger, committable)


def _driver_errors(database: Database) -> type[Exception]:
    """Dialects that use the driver's own two-phase calls do not wrap its errors."""
    error: type[Exception] = database.engine.dialect.loaded_dbapi.Error
    return error


def _outcome_of_gone(database: Database, ledger: Ledger, committable: Committable) -> CommitOutcome:
    """No such prepared transaction: committed, rolled back by somebody, or in flight. The ledger tells, see there."""
    xid = committable.transaction["xid"]
    with database.engine.begin() as connection:
        if ledger.states(connection, [xid]).get(xid):
            return CommitOutcome.COMMITTED
        if reason := ledger.foreign(committable.proof):
            return CommitOutcome.unknown(
                f"{xid} is no longer prepared at {database}, and nobody can tell what became of it: {reason}"
            )
        if not ledger.bury(connection, xid, TransactionId.parse(committable.proof["transaction_id"])):
            return CommitOutcome.COMMITTED
    return CommitOutcome.lost(
        f"{xid} was rolled back by somebody else: it is not prepared any more, and the ledger {ledger.table.fullname} "
        "has a tombstone in place of its row"
    )


def abort(database: Database, ledger: Ledger, xid: str) -> None:
    if xid in _listed(database):
        with database.engine.connect() as connection:
            connection.rollback_prepared(xid, recover=True)
        return
    with database.engine.connect() as connection:
        if ledger.states(connection, [xid]).get(xid):
            raise CommittedError(f"{xid} is committed: the ledger {ledger.table.fullname} has its row")


def in_doubt(database: Database, job: str, sink: str) -> Iterable[Identity]:
    prefix = _prefix(database, token(job), token(sink))
    return [{"xid": xid} for xid in sorted(_listed(database)) if xid.startswith(prefix)]


def _listed(database: Database) -> set[str]:
    with database.engine.connect() as connection:
        return {xid.decode() if isinstance(xid, bytes) else str(xid) for xid in connection.recover_twophase()}
