"""MySQL's and MariaDB's own way: rows go into the target in an XA branch, which XA PREPARE makes durable (strategy
`xa`); the driver runs XA COMMIT. Or they go into a staging table (strategy `staged`), see `staging`."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import pyarrow as pa
import pymysql
from pymysql.constants import ER

from sinks.diagnosis import Finding, of_clock
from sinks.errors import ConfigurationError
from sinks.mysql import catalog, xa
from sinks.mysql.catalog import Target
from sinks.mysql.encode import InsertEncoder, LoadEncoder, RowEncoder
from sinks.mysql.failures import code_of, describe, fault
from sinks.mysql.loading import LoadTransaction
from sinks.mysql.server import Connection, Server, bytewise, execute, is_mariadb, query, quoted, setting
from sinks.mysql.types import Column, target_type
from sinks.mysql.xa import identity_of, name_of, recovered
from sinks.sql.ddl import MySqlDdl
from sinks.sql.dialect import Dialect, NotDone, Plan, declarations
from sinks.sql.errors import Fault
from sinks.sql.ledger import Ledger
from sinks.sql.names import of_sink, witness_of
from sinks.transaction import Identity, TransactionContext, TransactionId

# From these on a prepared branch is detached from its session, and anybody can finish it: release notes of MySQL 8.0.29
# (xa_detach_on_prepare), and of MariaDB 10.5.2 (MDEV-742)
_OLDEST = {
    "MySQL": ((8, 0, 29), "stays tied to the connection that prepared it"),
    "MariaDB": ((10, 5, 2), "is rolled back with the connection that prepared it"),
}


class MySQLDialect(Dialect[Connection, Target, LoadTransaction]):
    TWO_PHASE = "xa"
    UNSEEN = ", or none that this user may see"

    server: Server

    # ------------------------------------------------------------------ the target
    def unfit_server(self, connection: Connection) -> str | None:
        product = "MariaDB" if is_mariadb(connection) else "MySQL"
        ((text,),) = query(connection, "SELECT VERSION()")
        match = re.match(r"(\d+)\.(\d+)\.(\d+)", text)
        version = tuple(map(int, match.groups())) if match else ()
        oldest, reason = _OLDEST[product]
        if version >= oldest:
            return None
        return (
            f"the server is {product} {text} ({self.server}), and exactly-once needs {'.'.join(map(str, oldest))} or "
            f"newer: in older ones a prepared XA transaction {reason}"
        )

    def locate(self, connection: Connection, table: str) -> tuple[str, str]:
        return catalog.locate(connection, table)

    def describe(self, connection: Connection, schema: str, name: str) -> Target | None:
        found = catalog.describe(connection, schema, name)
        return found and replace(
            found,
            local=setting(connection, "local_infile") in ("1", "ON"),
            packet=int(setting(connection, "max_allowed_packet")),
        )

    def similar(self, connection: Connection, schema: str, name: str) -> list[str]:
        rows = query(
            connection,
            "SELECT table_schema, table_name FROM information_schema.tables WHERE LOWER(table_name) = LOWER(%s)"
            " ORDER BY 1, 2 LIMIT 5",
            [name],
        )
        return [f"{schema}.{table}" for schema, table in rows]

    def create(self, connection: Connection, schema: str, name: str, fields: Sequence[pa.Field]) -> None:
        keys = self.merge.keys
        columns = declarations(fields, lambda field: target_type(field.type, key=field.name in keys))
        declared = [
            f"{quoted(field.name)} {kind} {'NULL' if field.nullable and field.name not in keys else 'NOT NULL'}"
            for field, kind in columns
        ]
        if keys:
            declared.append(f"PRIMARY KEY ({self.quoted(keys)})")
        try:
            execute(
                connection,
                f"CREATE TABLE IF NOT EXISTS {quoted(schema, name)} ({', '.join(declared)})"
                f" ENGINE=InnoDB CHARACTER SET utf8mb4 COLLATE {bytewise(connection)}",
            )
        except pymysql.Error as error:
            if not connection.open:
                raise
            raise ConfigurationError(
                f"cannot create table {schema}.{name} at {self.server}: {describe(error)}"
            ) from error

    @property
    def ddl(self) -> MySqlDdl[Connection]:
        return MySqlDdl(self.server)

    def definition(self, connection: Connection, target: Target, field: pa.Field) -> str:
        """Text gets the table's collation, if that is of utf8mb4, which has a place for all that Spark has."""
        kind = target_type(field.type)
        charset = ""
        if kind == "longtext":
            collation = catalog.collation(connection, target)
            charset = "" if collation.startswith("utf8mb4") else " CHARACTER SET utf8mb4"
        return f"{quoted(field.name)} {kind}{charset} NULL"

    def problems(self, connection: Connection, target: Target, ledger: str) -> Iterable[str]:
        keys = self.merge.keys
        if keys and not target.is_unique(keys):
            yield f"upsert by ({', '.join(keys)}) needs a unique index on just these columns, whole ones"
        yield from self.merge.orders_by_members({column.name: column.type for column in target.columns})
        if target.engine.lower() != "innodb":
            yield f"the table's engine is {target.engine or 'unknown'}, and only InnoDB has transactions that last"
        if setting(connection, "read_only") in ("1", "ON") and self._obeys_read_only(connection):
            yield "the server is read-only (a replica?)"
        if (
            setting(connection, "log_bin") in ("1", "ON")
            and setting(connection, "binlog_format", session=True) == "STATEMENT"
        ):
            yield "the server has binlog_format=STATEMENT, with which InnoDB refuses READ COMMITTED: set ROW or MIXED"
        if self.strategy == "xa" and (reason := self.no_xa(connection)):
            yield f'{reason}: use strategy="staged"'
        strategy, _ = self.choose(connection, target)
        rights = self.rights(target, strategy)
        yield from catalog.missing_rights(connection, target.schema, target.name, rights, target.names[0])
        if strategy == "staged":
            probe = f"tpc_{uuid.uuid4().hex[:20]}"
            yield from catalog.may_not_create(connection, target.schema, probe)
        for name in (ledger, witness_of(ledger)):
            if catalog.describe(connection, target.schema, name):
                rights = ["SELECT", "INSERT", "DELETE"]
                yield from catalog.missing_rights(connection, target.schema, name, rights, "transaction_id")

    def _obeys_read_only(self, connection: Connection) -> bool:
        try:
            with connection.cursor() as cursor:
                cursor.execute("START TRANSACTION READ WRITE")
                cursor.execute("ROLLBACK")
        except pymysql.Error:
            return True
        return False

    def no_xa(self, connection: Connection) -> str | None:
        """Why there can be no XA branches here."""
        if setting(connection, "wsrep_on") in ("1", "ON"):
            return "the server is part of a Galera cluster, which has no XA transactions"
        if recovered(connection) is None:
            return "the user lacks the right XA_RECOVER_ADMIN, without which nobody could find a prepared transaction"
        return None

    def choose(self, connection: Connection, target: Target) -> tuple[str, str]:
        slow = "INSERT: the server has local_infile=OFF, and LOAD DATA would be faster"
        way = f"with {'LOAD DATA LOCAL' if target.local else slow}"
        if self.merge.mode == "upsert":
            return "staged", f"upserts need it, {way}"
        if self.strategy != "auto":
            return self.strategy, f"as configured, {way}"
        reason = self.no_xa(connection)
        return "staged" if reason else "xa", f"{reason or 'the server and the rights of the user allow it'}, {way}"

    def findings(self, connection: Connection) -> Iterable[Finding]:
        branches = self.strategy != "staged" and self.merge.mode == "append"
        return _findings(connection, xa=branches, no_xa=self.no_xa(connection) if branches else None)

    def encoder(self, context: TransactionContext, columns: Sequence[Column], target: Target) -> RowEncoder:
        """For rows that go into `columns`, those of the target now or of a staging table."""
        rounding = self.merge.rounds
        if target.local:
            return LoadEncoder(context.schema, columns, target.label, rounding=rounding)
        return InsertEncoder(context.schema, columns, target.label, rounding=rounding, packet=target.packet)

    # ------------------------------------------------------------------ errors
    def fault(self, error: Exception) -> Fault | None:
        return fault(error)

    def unreachable(self, error: Exception) -> str | None:
        return self.server.redact(describe(error)) if isinstance(error, pymysql.Error) else None

    # ------------------------------------------------------------------ two-phase transactions
    def key(self, identity: Identity) -> str:
        return name_of(identity)

    def begin(self, plan: Plan[Connection, Target], context: TransactionContext) -> LoadTransaction:
        target = plan.target
        identity = identity_of(context.transaction_id)
        branch = xa.xid(identity, target.schema)
        transaction = LoadTransaction(self.server, context, target.label, identity, branch=branch)
        with transaction.begun():
            transaction.execute(f"XA START {branch}")
            with transaction.explained():
                columns = catalog.current(transaction.connection, target, context.schema.names).columns
            transaction.start(target.identifier, self.encoder(context, columns, target))
        return transaction

    def evidence(self, transaction: LoadTransaction) -> dict[str, object]:
        return {"session": transaction.connection.thread_id()}  # type: ignore[no-untyped-call]

    def end(
        self,
        connection: Connection,
        ledger: Ledger[Connection],
        how: str,
        identity: Identity,
        proof: Mapping[str, object],
    ) -> bool:
        """MariaDB lists a branch as free a moment before its InnoDB lets go of it, amid the end of the session that
        prepared it. XA COMMIT and ROLLBACK in that moment are answered and do nothing (seen in 11.4.5, never after this
        wait)."""
        key, mariadb = name_of(identity), is_mariadb(connection)
        if mariadb and how == "COMMIT":
            xa.await_session(connection, proof.get("session"))
        ended = xa.end(connection, ledger.schema, how, identity)
        if ended and mariadb and how == "COMMIT" and not ledger.states(connection, [key]).get(key):
            raise NotDone(
                f"the server answered XA COMMIT of {key} and did not commit it, as MariaDB may do while the session "
                f"that prepared it ends. Its rows are safe, prepared in InnoDB, but {self.server} knows the branch "
                "again only after a restart: restart the server, then start the query again"
            )
        if ended and mariadb and how == "ROLLBACK" and self._is_locked(connection, ledger, key):
            raise NotDone(
                f"the server answered XA ROLLBACK of {key} and did not do it, as MariaDB may while the session that "
                "prepared it ends. Its rows are not visible and never will be, but hold their locks until the server "
                "is restarted; it lists the branch again then, and the next start aborts it"
            )
        return ended

    def _is_locked(self, connection: Connection, ledger: Ledger[Connection], key: str) -> bool:
        row = f"SELECT 1 FROM {ledger.table} WHERE transaction_id = %s FOR UPDATE NOWAIT"
        try:
            query(connection, row, [key])
        except pymysql.Error as error:
            if code_of(error) != ER.LOCK_WAIT_TIMEOUT:
                raise
            return True
        return False

    def prepared(self, connection: Connection, schema: str, job: str, sink: str) -> Iterable[Identity]:
        prefix = TransactionId.prefix(job)
        names = {name_of(identity): identity for identity in xa.prepared(connection, schema)}
        return [identity for name, identity in names.items() if name.startswith(prefix) and of_sink(name, sink)]


# ---------------------------------------------------------------------- what `coordinator doctor` says
def _findings(connection: Connection, *, xa: bool, no_xa: str | None) -> Iterable[Finding]:
    """`xa`: whether the sink would use XA branches, and `no_xa` why it cannot."""
    ((version,),) = query(connection, "SELECT VERSION()")
    mariadb = is_mariadb(connection)
    yield Finding.ok(f"{'MariaDB' if mariadb else 'MySQL'} {version}")
    if no_xa:
        grant = "GRANT XA_RECOVER_ADMIN ON *.* TO CURRENT_USER; or keep the strategy staged"
        yield Finding.warning(f"{no_xa}; the strategy is staged", grant)
    elif xa and setting(connection, "xa_detach_on_prepare") == "OFF":
        yield Finding.error(
            "xa_detach_on_prepare is OFF, so a prepared transaction stays with its connection",
            "SET PERSIST xa_detach_on_prepare = ON;",
        )
    if setting(connection, "local_infile") not in ("1", "ON"):
        yield Finding.warning(
            "local_infile is OFF: rows go in by INSERT, which takes more time than LOAD DATA",
            "SET GLOBAL local_infile = ON; and in the server's option file",
        )
    if setting(connection, "log_bin") in ("1", "ON"):
        yield Finding.ok(f"the binary log is on, format {setting(connection, 'binlog_format')}")
        if (sync := setting(connection, "sync_binlog")) != "1":
            yield Finding.warning(
                f"sync_binlog is {sync}: after a crash of its machine, replicas may have other rows than the server",
                "SET GLOBAL sync_binlog = 1; and in the server's option file",
            )
    yield from of_clock("the server", lambda: float(query(connection, "SELECT UNIX_TIMESTAMP(NOW(6))")[0][0]))
