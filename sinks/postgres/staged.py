"""Strategy `staged`: COPY into a staging table of one's own and commit that; the driver moves a whole checkpoint.

The driver's one transaction writes the ledger rows, moves every staging table into the target and drops them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress

import psycopg
from psycopg import errors, sql

from sinks.postgres.catalog import Target, extra_column
from sinks.postgres.copying import CopyTransaction
from sinks.postgres.encode import CopyEncoder
from sinks.postgres.failures import describe, explained
from sinks.postgres.merge import Merge
from sinks.postgres.planning import Plan
from sinks.postgres.server import Connection
from sinks.postgres.types import Column, target_type
from sinks.sql.staging import StagingTables, identity_of, names_of
from sinks.transaction import CommitOutcome, Committable, TransactionContext, TransactionId

# Staging tables dropped in one transaction. Each drop takes some five locks out of the server's shared table (64 x
# max_connections = 6,400 by default).
_DROPPED_TOGETHER = 100


class Staged(StagingTables[CopyTransaction]):
    def create(self, plan: Plan, context: TransactionContext, name: str) -> CopyTransaction:
        """The staging table has the types, NOT NULL and CHECKs of the target."""
        target = plan.target
        columns, declarations = _staging_columns(target, self.merge, context)
        encoder = CopyEncoder(context.schema, columns, target.label)
        table = sql.Identifier(target.schema, name)
        identity = identity_of(target.schema, context.transaction_id)
        transaction = CopyTransaction(self.server, context, target.label, identity)
        try:
            transaction.execute(sql.SQL("CREATE TABLE {} ({})").format(table, sql.SQL(", ").join(declarations)))
            transaction.execute(sql.SQL("COMMENT ON TABLE {} IS {}").format(table, sql.Literal(context.transaction_id)))
            transaction.start(table, encoder, alias=name)
        except BaseException:
            transaction.close()
            raise
        return transaction

    def seal(self, transaction: CopyTransaction) -> None:
        transaction.seal("COMMIT")

    def seal_without(self, transaction: CopyTransaction, table: str) -> None:
        transaction.execute(f"DROP TABLE {table}")
        transaction.seal("COMMIT")

    def judges(self, target: Target) -> bool:
        return bool(target.uniques or target.beyond or target.checks)

    def explained(self, target: Target, where: str, tables: Sequence[str]) -> AbstractContextManager[None]:
        return explained(target.label, where, dict.fromkeys(tables, target.label))

    def locked(self, connection: Connection, plan: Plan, tables: Sequence[str]) -> Target:
        target: Target = plan.target
        return target

    def refusal(self, error: Exception, target: Target, tables: Sequence[str]) -> str | None:
        ask_again = psycopg.OperationalError | errors.IdleInTransactionSessionTimeout  # connection, lock, full disk
        if not isinstance(error, psycopg.Error) or isinstance(error, ask_again):
            return None
        constraint = f' (constraint "{error.diag.constraint_name}")' if error.diag.constraint_name else ""
        return f"{constraint}: {describe(error, dict.fromkeys(tables, target.label))}"

    def settle(
        self, connection: Connection, plan: Plan, committables: Sequence[Committable]
    ) -> dict[str, CommitOutcome]:
        """Two drivers never settle checkpoints of one sink at the same time."""
        one = TransactionId.parse(committables[0].transaction["transaction_id"])
        connection.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", [f"tpc {one.job} {one.sink}"])
        return super().settle(connection, plan, committables)

    def move(self, connection: Connection, plan: Plan, committables: Sequence[Committable]) -> None:
        super().move(connection, plan, committables)
        ids = [c.transaction["transaction_id"] for c in committables]
        schema = plan.target.schema
        self.tidy(connection, schema, ids[:_DROPPED_TOGETHER])
        for name in sorted(self.existing(connection, schema, names_of(committables))):
            # a DELETE may be refused, in a publication of all tables, since they have no key
            again = sql.SQL("INSERT INTO {0} SELECT * FROM {0} LIMIT 1").format(sql.Identifier(schema, name))
            connection.execute(again)

    def drop(self, connection: Connection, schema: str, names: Sequence[str]) -> None:
        for start in range(0, len(names), _DROPPED_TOGETHER):
            tables = sql.SQL(", ").join(sql.Identifier(schema, n) for n in names[start : start + _DROPPED_TOGETHER])
            with self.server.transaction(connection):
                connection.execute(sql.SQL("DROP TABLE {}").format(tables))

    def tidy(self, connection: Connection, schema: str, ids: Sequence[str]) -> None:
        for start in range(0, len(ids), _DROPPED_TOGETHER):
            with suppress(errors.LockNotAvailable):  # pg_dump may be reading one
                self.discard(connection, schema, ids[start : start + _DROPPED_TOGETHER])

    def existing(self, connection: Connection, schema: str, names: Sequence[str]) -> set[str]:
        rows = connection.execute(
            "SELECT relname::text FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace"
            " WHERE nspname = %s AND relkind = 'r' AND relname = ANY(%s)",
            [schema, list(names)],
        ).fetchall()
        return {name for (name,) in rows}

    def comments(self, connection: Connection, schema: str, prefix: str) -> list[str]:
        rows = connection.execute(
            "SELECT obj_description(c.oid, 'pg_class') FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace"
            " WHERE nspname = %s AND relkind = 'r' AND relname LIKE 'tpc\\_%%'"
            " AND starts_with(obj_description(c.oid, 'pg_class'), %s) ORDER BY 1",
            [schema, prefix],
        ).fetchall()
        return [text for (text,) in rows]

    def columns(self, connection: Connection, target: Target, name: str) -> list[str]:
        rows = connection.execute(
            "SELECT attname::text FROM pg_attribute WHERE attrelid = to_regclass(%s) AND attnum > 0"
            " AND NOT attisdropped ORDER BY attnum",
            [sql.Identifier(target.schema, name).as_string(connection)],
        ).fetchall()
        return [column for (column,) in rows]


def _staging_columns(
    target: Target, merge: Merge, context: TransactionContext
) -> tuple[list[Column], list[sql.Composed]]:
    """Columns for the encoder, and the declarations of columns and constraints for CREATE TABLE."""
    written = merge.written(context.schema.names, target.names)
    columns = [column for column in target.columns if column.name in written]
    declared = []
    required = set(merge.keys)
    if not merge.delete_marker:
        required |= {column.name for column in columns if not column.nullable}
    for column in columns:
        declared.append(_declaration(column.name, target.declarations[column.name], required))
    for field in context.schema:
        if field.name not in written:
            kind = target_type(field.type)
            columns.append(extra_column(field.name, kind))
            declared.append(_declaration(field.name, kind, required))
    checks = {check.name: check.expression for check in target.checks if set(check.columns) <= set(written)}
    for column in target.columns:
        if column.name in written and not column.nullable and column.name not in required:
            checks[f"{column.name} is null"] = sql.SQL("{} IS NOT NULL").format(sql.Identifier(column.name)).as_string()
    for name, expression in checks.items():
        if merge.delete_marker:  # a row that deletes needs nothing but its key
            expression = f"{sql.Identifier(merge.delete_marker).as_string()} IS TRUE OR ({expression})"
        declared.append(sql.SQL("CONSTRAINT {} CHECK ({})").format(sql.Identifier(name), sql.SQL(expression)))
    return columns, declared


def _declaration(name: str, kind: str, required: set[str]) -> sql.Composed:
    return sql.SQL("{} {}{}").format(
        sql.Identifier(name), sql.SQL(kind), sql.SQL(" NOT NULL" if name in required else "")
    )
