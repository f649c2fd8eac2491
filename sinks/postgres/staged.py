"""Strategy `staged`: COPY into a staging table of one's own and commit that; the driver moves a whole checkpoint.

The driver's one transaction writes the ledger rows, moves every staging table into the target and drops them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace

import psycopg
from psycopg import errors, sql

from sinks.errors import ConfigurationError, SchemaMismatch
from sinks.postgres import catalog
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
_MENDS: dict[type[psycopg.Error], str] = {
    errors.UniqueViolation: "remove the row that has the same key, or drop the index",
    errors.ExclusionViolation: "remove the row that is in the way, or drop the constraint",
    errors.ForeignKeyViolation: "add the row that it points to, or drop the constraint",
    errors.CheckViolation: "drop the constraint (it can come back as NOT VALID when the rows are in)",
    errors.NotNullViolation: "let the column be NULL, or give it a default",
    errors.InsufficientPrivilege: "grant the right, or a policy that lets these rows pass",
}


class Staged(StagingTables[CopyTransaction]):
    def create(self, plan: Plan, context: TransactionContext, name: str) -> CopyTransaction:
        """The staging table has the types, NOT NULL and CHECKs of the target."""
        target = plan.target
        table = sql.Identifier(target.schema, name)
        identity = identity_of(target.schema, context.transaction_id)
        transaction = CopyTransaction(self.server, context, target.label, identity)
        try:
            with transaction.explained():
                target = catalog.current(transaction.connection, target)
            columns, declarations = _staging_columns(target, self.merge, context)
            try:
                encoder = CopyEncoder(context.schema, columns, target.label, rounding=plan.rounding)
            except SchemaMismatch as mismatch:
                raise catalog.changed(mismatch, plan.target.columns, target.columns) from None
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
        """What is new in the table may bind rows that the staging tables took, so it is `beyond` those."""
        known = plan.target
        try:
            missing = self._missing_rights(connection, plan)
            if not missing:
                catalog.lock(connection, known)
        except (errors.UndefinedTable, errors.InvalidSchemaName) as error:
            raise ConfigurationError(
                f"table {known.label} is not there any more ({describe(error)}): rename or restore it"
            ) from None
        target = None if missing else catalog.describe(connection, known.schema, known.name)
        if target is None:
            raise ConfigurationError(
                f"table {known.label}: a right is missing; an owner has to run: {'; '.join(missing)}"
            )
        if reasons := list(self._changes(connection, target, known, tables)):
            raise ConfigurationError(
                f"table {known.label} was changed after its rows were staged: {'; '.join(reasons)}"
            )
        return target if target == known else replace(target, beyond=(*target.beyond, "what is new in the table"))

    def _missing_rights(self, connection: Connection, plan: Plan) -> list[str]:
        target, ledger = plan.target, plan.ledger
        rights = self.merge.rights(target, "staged")
        missing = catalog.missing_rights(connection, target.schema, target.name, rights, create=False)
        needed = ("SELECT", "INSERT", "DELETE")
        return missing + catalog.missing_rights(connection, ledger.schema, ledger.name, needed, create=False)

    def _changes(self, connection: Connection, target: Target, known: Target, tables: Sequence[str]) -> Iterable[str]:
        """What keeps the rows from going in as they are, and what to change back."""
        now = {column.name: column for column in target.columns}
        staged = catalog.staged_types(connection, known.schema, tables)
        written = self.merge.written([name for name, _ in staged], known.names)
        table = self.merge.quoted(known.schema, known.name)
        for name, kind in staged:
            column = now.get(name)
            if name not in written:
                continue
            if column is None:
                yield f'its column "{name}" is gone: name it so again, or add it'
            elif column.generated:
                yield f'its column "{name}" is generated now: make it a plain one again'
            elif kind not in ({column.declared, column.limits} if column.domain else {column.declared}):
                back = f"ALTER TABLE {table} ALTER COLUMN {self.merge.quoted(name)} TYPE {kind}"
                yield (
                    f'its column "{name}" was {kind} and is {column.declared}: change it back ({back};), and again '
                    "when the rows are in"
                )
        for column in target.columns:
            if column.name not in written and not (column.nullable or column.has_default or column.generated):
                yield f'its column "{column.name}" is NOT NULL, and the rows have none: give it a default'
        keys = set(self.merge.keys)
        if keys and not any(set(unique.columns) == keys and unique.arbiter for unique in target.uniques):
            yield f"it has no unique index on ({', '.join(self.merge.keys)}) any more: create it"

    def forbidden(self, error: Exception) -> str | None:
        return describe(error) if isinstance(error, errors.InsufficientPrivilege) else None

    def refusal(self, error: Exception, target: Target, tables: Sequence[str]) -> str | None:
        ask_again = psycopg.OperationalError | errors.IdleInTransactionSessionTimeout  # connection, lock, full disk
        if not isinstance(error, psycopg.Error) or isinstance(error, ask_again):
            return None
        constraint = f' (constraint "{error.diag.constraint_name}")' if error.diag.constraint_name else ""
        mend = next((f"; {mend}" for kind, mend in _MENDS.items() if isinstance(error, kind)), "")
        return f"{constraint}: {describe(error, dict.fromkeys(tables, target.label))}{mend}"

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
    undomained = merge.undomained(target, written)
    for column in columns:
        kind = column.limits if column.name in undomained else target.declarations[column.name]
        declared.append(_declaration(column.name, kind, required))
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
