"""Strategy `prepared`: COPY into the target, then PREPARE TRANSACTION; the driver runs COMMIT PREPARED."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from psycopg import errors, sql

from sinks.errors import ConfigurationError, SchemaMismatch
from sinks.postgres import catalog
from sinks.postgres.copying import CopyTransaction
from sinks.postgres.encode import CopyEncoder
from sinks.postgres.failures import describe
from sinks.postgres.ledger import Ledger
from sinks.postgres.planning import Plan
from sinks.postgres.server import Connection, row
from sinks.sql.names import of_sink
from sinks.sql.strategies import Separate
from sinks.transaction import Committable, Identity, TransactionContext, TransactionId


class Prepared(Separate[CopyTransaction]):
    KEY = "gid"

    def begin(self, plan: Plan, context: TransactionContext) -> CopyTransaction:
        """Open the participant's transaction and begin to copy into the target itself, with the types that this
        transaction sees: COPY BINARY would take the bytes of one type for those of another."""
        target = plan.target
        transaction = CopyTransaction(self.server, context, target.label, {self.KEY: context.transaction_id})
        try:
            with transaction.explained():
                catalog.lock(transaction.connection, target)
                columns = catalog.current(transaction.connection, target).columns
            try:
                encoder = CopyEncoder(context.schema, columns, target.label, rounding=plan.rounding)
            except SchemaMismatch as mismatch:
                raise catalog.changed(mismatch, target.columns, columns) from None
            transaction.start(target.identifier, encoder)
        except BaseException:
            transaction.close()
            raise
        return transaction

    def proof(self, transaction: CopyTransaction, ledger: Ledger) -> dict[str, Any]:
        (xid,) = row(transaction.connection, "SELECT txid_current()")
        return ledger.proof() | {"xid": xid}

    def contradiction(self, connection: Connection, committable: Committable) -> str | None:
        """The server remembers for a while how transactions ended. Only that one was committed counts: what it says
        after a failover that lost some may be about another transaction."""
        try:
            (status,) = row(connection, "SELECT txid_status(%s::bigint)", committable.proof.get("xid"))
        except errors.InvalidParameterValue:  # a number that this server has not come to
            return None
        if status != "committed":
            return None
        return (
            f"the server says that its transaction {committable.proof['xid']} was committed, and the ledger has not "
            "its row: somebody deleted it"
        )

    def prepare(self, transaction: CopyTransaction, ledger: Ledger) -> None:
        transaction.seal(sql.SQL("PREPARE TRANSACTION {}").format(sql.Literal(self.key(transaction.identity))))

    def commit_directly(self, transaction: CopyTransaction, plan: Plan) -> None:
        transaction.finish()
        transaction.seal("COMMIT")

    def end(self, connection: Connection, ledger: Ledger, how: str, identity: Identity) -> bool:
        statement = f"{how} PREPARED {sql.Literal(self.key(identity)).as_string(connection)}"
        try:
            connection.execute(statement.encode())
            return True
        except errors.UndefinedObject:
            return False
        except (errors.InsufficientPrivilege, errors.FeatureNotSupported) as error:
            raise ConfigurationError(
                f"the role of the sink may not finish its own transaction at {self.server}: {describe(error)}. Connect "
                "to the database as the role that prepared it (pg_prepared_xacts.owner), or as a superuser, and run: "
                f"{statement};"
            ) from error

    def in_doubt(self, connection: Connection, schema: str, job: str, sink: str) -> Iterable[Identity]:
        rows = connection.execute(
            "SELECT gid FROM pg_prepared_xacts WHERE database = current_database() AND starts_with(gid, %s)"
            " ORDER BY gid",
            [TransactionId.prefix(job)],
        ).fetchall()
        return [{self.KEY: gid} for (gid,) in rows if of_sink(gid, sink)]
