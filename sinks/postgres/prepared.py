"""Strategy `prepared`: COPY into the target, then PREPARE TRANSACTION; the driver runs COMMIT PREPARED."""

from __future__ import annotations

from collections.abc import Iterable

import psycopg
from psycopg import errors, sql

from sinks.errors import CommittedError, ConfigurationError, SinkError
from sinks.postgres.catalog import Target
from sinks.postgres.copying import CopyTransaction
from sinks.postgres.encode import CopyEncoder
from sinks.postgres.failures import describe
from sinks.postgres.ledger import Ledger
from sinks.postgres.server import Connection, Server
from sinks.sql.names import of_sink
from sinks.transaction import CommitOutcome, Committable, Identity, TransactionContext, TransactionId


def identity_of(transaction_id: str) -> Identity:
    return {"gid": transaction_id}


def begin(server: Server, target: Target, context: TransactionContext) -> CopyTransaction:
    """Open the participant's transaction and begin to copy into the target itself."""
    encoder = CopyEncoder(context.schema, target.columns, target.label)
    transaction = CopyTransaction(server, context, target.label, identity_of(context.transaction_id))
    try:
        transaction.start(target.identifier, encoder)
    except BaseException:
        transaction.close()
        raise
    return transaction


def pre_commit(transaction: CopyTransaction, ledger: Ledger) -> Committable:
    """The ledger row goes into the same transaction: it becomes visible if and only if the rows do."""
    transaction.finish()
    with transaction.explained():
        if not ledger.insert(transaction.connection, [transaction.context.transaction_id], committed=True):
            raise SinkError(f"{transaction.context.transaction_id} was aborted, or used, before it was pre-committed")
    transaction.seal(sql.SQL("PREPARE TRANSACTION {}").format(sql.Literal(transaction.context.transaction_id)))
    return Committable(transaction.identity, proof=ledger.proof())


def commit_directly(transaction: CopyTransaction) -> None:
    transaction.finish()
    transaction.seal("COMMIT")


def commit(server: Server, ledger: Ledger, committable: Committable) -> CommitOutcome:
    gid = committable.transaction["gid"]
    statement = sql.SQL("COMMIT PREPARED {}").format(sql.Literal(gid))
    with server.lend() as connection:
        try:
            connection.execute(statement)
            return CommitOutcome.COMMITTED
        except errors.UndefinedObject:
            return _outcome_of_gone(server, connection, ledger, committable)
        except (errors.InsufficientPrivilege, errors.FeatureNotSupported) as error:
            return CommitOutcome.unknown(_by_hand(server, connection, statement, error))


def _outcome_of_gone(server: Server, connection: Connection, ledger: Ledger, committable: Committable) -> CommitOutcome:
    """No such prepared transaction: committed, rolled back by somebody, or in flight. The ledger tells, see there."""
    gid = committable.transaction["gid"]
    committed = ledger.states(connection, [gid]).get(gid)
    if committed is None:
        if reason := ledger.foreign(connection, committable.proof):
            return CommitOutcome.unknown(
                f"{gid} is no longer prepared at {server}, and nobody can tell what became of it: {reason}. Look for "
                "its rows in the table, then point the sink at the old ledger, or insert its row into the new one"
            )
        with server.transaction(connection):
            ledger.insert(connection, [gid], committed=False)
        committed = ledger.states(connection, [gid])[gid]
    if committed:
        return CommitOutcome.COMMITTED
    return CommitOutcome.lost(
        f"{gid} was rolled back by somebody else: it is not prepared any more, and the ledger "
        f"{ledger.schema}.{ledger.name} has a tombstone in place of its row"
    )


def abort(server: Server, ledger: Ledger, gid: str) -> None:
    statement = sql.SQL("ROLLBACK PREPARED {}").format(sql.Literal(gid))
    with server.lend() as connection:
        try:
            connection.execute(statement)
        except errors.UndefinedObject:
            if ledger.states(connection, [gid]).get(gid):
                raise CommittedError(
                    f"{gid} is committed: the ledger {ledger.schema}.{ledger.name} has its row"
                ) from None
        except (errors.InsufficientPrivilege, errors.FeatureNotSupported) as error:
            raise ConfigurationError(_by_hand(server, connection, statement, error)) from error


def in_doubt(connection: Connection, job: str, sink: str) -> Iterable[Identity]:
    rows = connection.execute(
        "SELECT gid FROM pg_prepared_xacts WHERE database = current_database() AND starts_with(gid, %s) ORDER BY gid",
        [TransactionId.prefix(job)],
    ).fetchall()
    return [identity_of(gid) for (gid,) in rows if of_sink(gid, sink)]


def _by_hand(server: Server, connection: Connection, statement: sql.Composed, error: psycopg.Error) -> str:
    return (
        f"the role of the sink may not finish its own transaction at {server}: {describe(error)}. Connect to the "
        f"database as the role that prepared it (pg_prepared_xacts.owner), or as a superuser, and run: "
        f"{statement.as_string(connection)};"
    )
