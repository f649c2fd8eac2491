"""PREPARE TRANSACTION: tasks copy into the target itself, the driver runs COMMIT PREPARED."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from psycopg import errors, sql

from sinks.diagnosis import Finding
from sinks.errors import ConfigurationError
from sinks.postgres import catalog
from sinks.postgres.columns import PostgresTarget
from sinks.postgres.connection import Connection, error_text, row
from sinks.postgres.copy import CopyEncoder, CopyTransaction
from sinks.postgres.server import PostgresServer
from sinks.sql.ledger import Ledger
from sinks.sql.names import of_sink
from sinks.sql.prepared import PreparedTransactions
from sinks.sql.transaction import Plan, RowTransaction
from sinks.transaction import Identity, TransactionContext, TransactionId

_OLD_SECONDS = 3600
"""From this age on a prepared transaction is worth a warning."""
_FEW_FREE = 8
"""Fewer free slots of max_prepared_transactions than these are worth a warning."""


class PreparedInPostgres(PreparedTransactions[Connection, PostgresTarget]):
    NAME = "prepared"
    KEY = "gid"

    server: PostgresServer

    def obstacle(self, connection: Connection) -> str | None:
        if row(connection, "SELECT current_setting('max_prepared_transactions')") != ("0",):
            return None
        return (
            "max_prepared_transactions is 0: set it above the number of partitions and restart the "
            "server"
        )

    def findings(self, connection: Connection, strategy: str) -> Iterable[Finding]:
        limit, used = row(
            connection,
            "SELECT current_setting('max_prepared_transactions')::int, (SELECT count(*)"
            " FROM pg_prepared_xacts)::int",
        )
        free = f"{limit - used} of max_prepared_transactions = {limit} are free"
        if limit == 0 and strategy == "auto":
            yield Finding.ok("max_prepared_transactions is 0, so the sink uses the strategy staged")
        elif 0 < limit < used + _FEW_FREE and strategy != "staged":
            setting = (
                f"ALTER SYSTEM SET max_prepared_transactions = {max(64, 2 * limit)}; then restart "
                "the server"
            )
            yield Finding.warning(f"{free}; each partition needs one", setting)
        elif limit:
            yield Finding.ok(free)
        yield from _old(connection)

    # ------------------------------------------------------------------ in the task
    def add_part(
        self,
        transaction: RowTransaction[Connection],
        plan: Plan[Connection, PostgresTarget],
        context: TransactionContext,
    ) -> CopyTransaction:
        return self.begin(plan, context, transaction)

    def begin(
        self,
        plan: Plan[Connection, PostgresTarget],
        context: TransactionContext,
        within: RowTransaction[Connection] | None = None,
    ) -> CopyTransaction:
        """Begin to copy into the target itself, with the types that this transaction sees.

        COPY BINARY would take the bytes of one type for those of another type.
        """
        target = plan.target
        transaction = CopyTransaction.begin(
            self.server, context, target.label, {self.KEY: context.transaction_id}, within
        )
        with transaction.discarded_on_error():
            with transaction.explained():
                catalog.lock(transaction.connection, target)
                transaction.number = transaction.connection.defer("SELECT txid_current()")
                columns = catalog.current(transaction.connection, target).columns
            transaction.own_keys = target.own_keys
            transaction.start(
                target.identifier, CopyEncoder(context.schema, columns, target.label, self.merge)
            )
        return transaction

    def evidence(self, transaction: RowTransaction[Connection]) -> dict[str, object]:
        first = next(iter(transaction.parts.values()))
        assert isinstance(first, CopyTransaction)
        ((xid,),) = first.number
        return {"xid": xid}

    # ------------------------------------------------------------------ on the driver
    def end(
        self,
        connection: Connection,
        ledger: Ledger[Connection],
        how: str,
        identity: Identity,
        proof: Mapping[str, object],
    ) -> bool:
        statement = f"{how} PREPARED {sql.Literal(self.key(identity)).as_string(connection)}"
        try:
            connection.execute(statement.encode())
            return True
        except errors.UndefinedObject:
            return False
        except (errors.InsufficientPrivilege, errors.FeatureNotSupported) as error:
            raise ConfigurationError(
                f"the role of the sink may not finish its own transaction at {self.server}: "
                f"{error_text(error)}. Connect to the database as the role that prepared it "
                f"(pg_prepared_xacts.owner), or as a superuser, and run: {statement};"
            ) from error

    def in_doubt(
        self, connection: Connection, schema: str, job: str, sink: str
    ) -> Iterable[Identity]:
        """List the prepared transactions of this job and sink in the schema.

        The name of a transaction does not have the schema, and another environment may have the
        same names in another schema. The locks tell them apart: a prepared transaction still holds
        the locks of the table, and of the ledger beside it.
        """
        rows = connection.execute(
            "SELECT gid FROM pg_prepared_xacts p"
            " WHERE database = current_database() AND starts_with(gid, %s)"
            " AND EXISTS (SELECT FROM pg_locks own JOIN pg_locks held USING (virtualtransaction)"
            " JOIN pg_class c ON c.oid = held.relation JOIN pg_namespace n ON n.oid = relnamespace"
            " WHERE own.transactionid = p.transaction AND own.pid IS NULL AND held.pid IS NULL"
            " AND held.mode = 'RowExclusiveLock' AND nspname = %s)"
            " ORDER BY gid",
            [TransactionId.prefix(job), schema],
        ).fetchall()
        return [{self.KEY: gid} for (gid,) in rows if of_sink(gid, sink)]

    def contradiction(self, connection: Connection, proof: Mapping[str, object]) -> str | None:
        """Tell why a transaction cannot be called lost: the server remembers that it was committed.

        The server remembers for a while how transactions ended. Only a commit counts here, because
        after a failover that lost some transactions the answer may be about another transaction.
        Return None otherwise.
        """
        try:
            (status,) = row(connection, "SELECT txid_status(%s::bigint)", proof.get("xid"))
        except errors.InvalidParameterValue:  # a number that this server has not come to
            return None
        if status != "committed":
            return None
        return (
            f"the server says that its transaction {proof['xid']} was committed, but the ledger "
            "has no row for it"
        )


def _old(connection: Connection) -> Iterable[Finding]:
    old = connection.execute(
        "SELECT gid, database, owner, extract(epoch from now() - prepared)::bigint"
        " FROM pg_prepared_xacts"
        " WHERE prepared < now() - make_interval(secs => %s) ORDER BY prepared LIMIT 5",
        [_OLD_SECONDS],
    ).fetchall()
    for gid, database, owner, age in old:
        name = sql.Literal(gid).as_string(connection)
        what = "coordinator in-doubt list (of its job)"
        if not gid.startswith("tpc."):
            statements = f"COMMIT PREPARED {name}; or ROLLBACK PREPARED {name};"
            what = f"ask who made it, then, as {owner}: {statements}"
        yield Finding.warning(
            f"transaction {gid} in database {database} has been prepared for {age / 3600:.1f} h: "
            "it holds locks, and VACUUM back",
            what,
        )
