"""XA transactions: a task writes into the target itself, and the driver runs XA COMMIT."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pymysql
from pymysql.constants import ER

from sinks.diagnosis import Finding
from sinks.mysql import catalog, xa
from sinks.mysql.catalog import MySQLCatalog
from sinks.mysql.columns import MySQLTarget
from sinks.mysql.connection import (
    SHAPE,
    Connection,
    code_of,
    error_text,
    is_mariadb,
    query,
    quoted,
    setting,
)
from sinks.mysql.load import LoadTransaction
from sinks.mysql.server import MySQLServer
from sinks.mysql.xa import name_of, recovered
from sinks.sql.ledger import Ledger
from sinks.sql.names import of_sink
from sinks.sql.prepared import NotEnded, PreparedTransactions
from sinks.sql.transaction import Plan, RowTransaction
from sinks.transaction import Identity, TransactionContext, TransactionId

_OTHER_ENGINES = (
    "SELECT table_name, engine FROM information_schema.tables"
    " WHERE table_schema = %s AND (@@lower_case_table_names OR CAST(table_name AS binary) IN %s)"
    " AND table_name IN %s"
    " AND NOT engine <=> 'InnoDB'"
)


class XATransactions(PreparedTransactions[Connection, MySQLTarget]):
    NAME = "xa"

    server: MySQLServer
    catalog: MySQLCatalog

    def obstacle(self, connection: Connection) -> str | None:
        if setting(connection, "wsrep_on") in ("1", "ON"):
            return "a Galera cluster has no XA transactions"
        if recovered(connection) is None:
            return (
                "the user lacks XA_RECOVER_ADMIN: grant it, prepared transactions are listed with "
                "it"
            )
        return None

    def findings(self, connection: Connection, strategy: str) -> Iterable[Finding]:
        if (
            strategy != "staged"
            and self.merge.mode == "append"
            and (reason := self.obstacle(connection))
        ):
            grant = "GRANT XA_RECOVER_ADMIN ON *.* TO CURRENT_USER; or keep the strategy staged"
            yield Finding.warning(f"{reason}; the strategy is staged", grant)

    # ------------------------------------------------------------------ in the task
    def add_part(
        self,
        transaction: RowTransaction[Connection],
        plan: Plan[Connection, MySQLTarget],
        context: TransactionContext,
    ) -> LoadTransaction:
        return self.begin(plan, context, transaction)

    def begin(
        self,
        plan: Plan[Connection, MySQLTarget],
        context: TransactionContext,
        within: RowTransaction[Connection] | None = None,
    ) -> LoadTransaction:
        target = plan.target
        identity = xa.identity_of(context.transaction_id)
        branch = xa.xid(identity, target.schema)
        connection = within.connection if within else self.server.take()
        transaction = LoadTransaction(
            connection, self.server.give, context, target, identity, branch=branch
        )
        transaction.own_keys = target.own_keys
        with transaction.discarded_on_error(), transaction.explained():
            if within is None:
                transaction.connection.defer(f"XA START {branch}")
            columns = self.catalog.current(
                transaction.connection, target, context.schema.names
            ).columns
            transaction.start(target.identifier, columns)
        return transaction

    def evidence(self, transaction: RowTransaction[Connection]) -> dict[str, object]:
        """Return what the commit of a branch needs in MariaDB.

        There the branch belongs to the session that prepared it until that session ends, and
        whatever commits the branch has to lock its tables. `further` are those after the first.
        """
        if not is_mariadb(transaction.connection):
            return {}
        session: object = None
        tables = list[dict[str, object]]()
        for part in transaction.parts.values():
            assert isinstance(part, LoadTransaction)
            session = part.session
            tables.append({"table": part.target.name, "written": part.context.schema.names})
        first, *further = tables
        return {"session": session} | first | ({"further": further} if further else {})

    # ------------------------------------------------------------------ on the driver
    def key(self, identity: Identity) -> str:
        return name_of(identity)

    def end(
        self,
        connection: Connection,
        ledger: Ledger[Connection],
        how: str,
        identity: Identity,
        proof: Mapping[str, Any],
    ) -> bool:
        if not is_mariadb(connection):
            return xa.end(connection, ledger.schema, how, identity)
        key = name_of(identity)
        if how == "COMMIT":
            return self._commit(connection, ledger, key, identity, proof)
        ended = xa.end(connection, ledger.schema, how, identity)
        if ended and self._is_locked(connection, ledger, key):
            raise NotEnded(
                f"the server answered XA ROLLBACK of {key} and did not roll it back. Its rows "
                "will never be visible, but hold their locks until you restart the server. Then "
                "the next start of the query aborts it"
            )
        return ended

    def _commit(
        self,
        connection: Connection,
        ledger: Ledger[Connection],
        key: str,
        identity: Identity,
        proof: Mapping[str, Any],
    ) -> bool:
        """Commit a branch in MariaDB; return False if there is none.

        MariaDB lists a branch as free a moment before its InnoDB lets go of it, while the session
        that prepared it ends. In that moment XA COMMIT and XA ROLLBACK are answered and do nothing
        (seen in 11.4.5, never after this wait). After the wait nothing would keep others from
        giving the tables another engine, in which the branch has no rows, so a second session has
        the tables locked meanwhile. Raises NotEnded if the rows would be lost, or the ledger does
        not show the commit.
        """
        with self.server.lend() as watch:
            watch.defer("START TRANSACTION")
            changed = self._lock_after(proof, watch, ledger)
            ended = not changed and xa.end(connection, ledger.schema, "COMMIT", identity)
            watch.defer("COMMIT")
            committed = ledger.states(watch, [key]).get(key)
        if changed and dict(identity) in xa.prepared(connection, ledger.schema):
            raise NotEnded(
                f"{key} is prepared, and XA COMMIT would lose its rows: {changed}. Run XA ROLLBACK "
                f"{xa.xid(identity, ledger.schema)}; rename the table, DROP its old name, rename "
                "it back, ALTER it to ENGINE=InnoDB, and start the query again"
            )
        if ended and not committed:
            raise NotEnded(
                f"the server answered XA COMMIT of {key} and did not commit it. Its rows are safe, "
                f"but {self.server} finds the branch only after a restart: restart the server, "
                "then start the query again"
            )
        return ended

    def _lock_after(
        self, proof: Mapping[str, Any], connection: Connection, ledger: Ledger[Connection]
    ) -> str:
        """Lock ledger and targets, and wait until the session of a branch has ended.

        The locks last until the end of the running transaction. A target is locked only if `proof`
        names it. Return why XA COMMIT would lose rows; "" if it would not.
        """
        written = [proof, *proof.get("further", [])] if "table" in proof else []
        ledgers = [ledger.name, ledger.witness.name]
        names = [*(each["table"] for each in written), *ledgers]
        for each in written:
            table = quoted(ledger.schema, each["table"])
            connection.defer(catalog.locking(table, each["written"]))
        connection.defer(
            f"SELECT 1 FROM {', '.join(quoted(ledger.schema, name) for name in ledgers)} LIMIT 0"
        )
        engines = connection.defer(_OTHER_ENGINES, [ledger.schema, names, names])
        try:
            xa.await_session(connection, proof.get("session"))
        except pymysql.Error as error:
            if code_of(error) not in SHAPE:
                raise
            return error_text(error)
        return " and ".join(f"the engine of {name} is {engine}" for name, engine in engines)

    def _is_locked(self, connection: Connection, ledger: Ledger[Connection], key: str) -> bool:
        row = f"SELECT 1 FROM {ledger.table} WHERE transaction_id = %s FOR UPDATE NOWAIT"
        try:
            query(connection, row, [key])
        except pymysql.Error as error:
            if code_of(error) != ER.LOCK_WAIT_TIMEOUT:
                raise
            return True
        return False

    def in_doubt(
        self, connection: Connection, schema: str, job: str, sink: str
    ) -> Iterable[Identity]:
        prefix = TransactionId.prefix(job)
        names = {name_of(identity): identity for identity in xa.prepared(connection, schema)}
        return [
            identity
            for name, identity in names.items()
            if name.startswith(prefix) and of_sink(name, sink)
        ]
