"""PostgreSQL's staging tables: filled by COPY, and dropped in the transaction that moves rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pyarrow as pa
from psycopg import errors, sql
from psycopg.postgres import types as builtin

from sinks.errors import ConfigurationError
from sinks.postgres import catalog
from sinks.postgres.columns import PostgresColumn, PostgresTarget, target_type
from sinks.postgres.connection import Connection, error_text
from sinks.postgres.copy import CopyEncoder, CopyTransaction
from sinks.postgres.dialect import PostgresDialect
from sinks.postgres.server import PostgresServer
from sinks.sql.dialect import Move
from sinks.sql.names import staging_table
from sinks.sql.staging import Staging
from sinks.sql.strategies import identity_of
from sinks.sql.transaction import Plan, RowTransaction
from sinks.transaction import TransactionContext

_LONG_BYTES = 2000
"""An index takes a third of a page for a row: a value of more bytes may be too long for it."""


class PostgresStaging(Staging[Connection, PostgresTarget]):
    # each drop takes some five locks out of the server's shared table (64 x max_connections = 6,400
    # by default)
    DROPPED_TOGETHER = 100
    MOVED_TOGETHER = 100

    server: PostgresServer
    dialect: PostgresDialect

    # ------------------------------------------------------------------ in the task
    def add_part(
        self,
        transaction: RowTransaction[Connection],
        plan: Plan[Connection, PostgresTarget],
        context: TransactionContext,
    ) -> CopyTransaction:
        return self.stage(plan, context, transaction)

    def stage(
        self,
        plan: Plan[Connection, PostgresTarget],
        context: TransactionContext,
        within: RowTransaction[Connection] | None = None,
    ) -> CopyTransaction:
        """Make a table like the target, and begin to copy into it.

        The table has the types, NOT NULL and CHECKs of the target.
        """
        target = plan.target
        name = plan.staging_table(context.transaction_id)
        table = sql.Identifier(target.schema, name)
        identity = identity_of(target.schema, context.transaction_id)
        transaction = CopyTransaction.begin(self.server, context, target.label, identity, within)
        with transaction.discarded_on_error():
            with transaction.explained():
                target = catalog.current(transaction.connection, target)
            columns = self.choose_columns(target.columns, context.schema, _merge_column)
            encoder = CopyEncoder(context.schema, columns, target.label, self.merge)
            written = set(self.merge.written(context.schema.names, target.names))
            declarations = ", ".join(self._declarations(target, columns, written))
            heap = " USING heap" if self.merge.order_by else ""  # of which `POSITION` is sure
            create = f"CREATE TABLE {table.as_string()} ({declarations}){heap}"
            comment = sql.SQL("COMMENT ON TABLE {} IS {}").format(
                table, sql.Literal(context.transaction_id)
            )
            with transaction.explained():
                transaction.connection.execute(f"{create}; {comment.as_string()}".encode())
            transaction.start(table, encoder)
        return transaction

    def _declarations(
        self, target: PostgresTarget, columns: Sequence[PostgresColumn], written: set[str]
    ) -> list[str]:
        """List columns and constraints for CREATE TABLE.

        A row that deletes needs nothing but its key.
        """
        quote = self.dialect.quote
        marker = self.merge.delete_marker
        lines = list[str]()
        checks = {
            check.name: check.expression for check in target.checks if set(check.columns) <= written
        }
        for column in columns:
            is_required = not column.nullable
            if is_required and marker and column.name not in self.merge.keys:
                is_required, checks[f"{column.name} is null"] = (
                    False,
                    f"{quote(column.name)} IS NOT NULL",
                )
            null = " NOT NULL" if is_required else ""
            lines.append(f"{quote(column.name)} {column.in_sql}{column.collation}{null}")
        spared = f"{quote(marker)} IS TRUE OR " if marker else ""
        return lines + [
            f"CONSTRAINT {quote(name)} CHECK ({spared}({rule}))" for name, rule in checks.items()
        ]

    # ------------------------------------------------------------------ before the decision
    def lock(
        self, connection: Connection, plan: Plan[Connection, PostgresTarget], written: Sequence[str]
    ) -> str | None:
        try:
            known = plan.target
            ledger = plan.ledger
            ledgers = [ledger.name, ledger.witness.name]
            privileges = self.merge.privileges(known, "staged")
            missing = self.catalog.missing_privileges(connection, known, privileges, ledgers)
            if reasons := "; ".join(missing):
                return reasons
            catalog.lock(connection, known)
            connection.flush()
        except (errors.UndefinedTable, errors.InvalidSchemaName) as error:
            raise ConfigurationError(
                f"table {plan.target.label} is not there any more ({error_text(error)}): rename or "
                "restore it"
            ) from None
        return None

    def changes_since(self, connection: Connection, move: Move[PostgresTarget]) -> Iterable[str]:
        yield from move.target.unwritable

    def constraints(self, connection: Connection, move: Move[PostgresTarget]) -> list[str]:
        reasons = super().constraints(connection, move)
        reasons += [
            f"check {check.name}"
            for check in move.target.checks
            if not set(check.columns) <= set(move.written)
        ]
        if self.merge.mode == "upsert" and move.target.keyless:
            reasons.append("a publication")
        if reasons:
            return reasons
        long_values = self.dialect.values_longer_than(move, _LONG_BYTES)
        return ["an index"] if long_values and self.server.query(connection, long_values) else []

    def try_out(self, connection: Connection, move: Move[PostgresTarget]) -> None:
        """Insert one row.

        Missing privileges of defaults, a sequence that is behind, and the like show with the first
        row only.
        """
        self.server.execute(connection, self.dialect.one_row(move))

    # ------------------------------------------------------------------ the move
    def put(self, connection: Connection, move: Move[PostgresTarget]) -> None:
        last = self.dialect.last(move)
        handed_on = self.dialect.hands_on_unique_value(move, last)
        if handed_on and self.server.query(connection, self.dialect.givers(move, last, handed_on)):
            self.server.execute(connection, self.dialect.put_in_anew(move, last, handed_on))
        self.server.execute(connection, self.dialect.upsert(move, last))

    # ------------------------------------------------------------------ afterwards
    def mark_moved(self, connection: Connection, schema: str, names: Sequence[str]) -> None:
        self.drop_unused(connection, schema, names[: self.DROPPED_TOGETHER])
        for name in sorted(self.catalog.existing(connection, schema, names)):
            # a DELETE may be refused, in a publication of all tables, since they have no key
            again = sql.SQL("INSERT INTO {0} SELECT * FROM {0} LIMIT 1").format(
                sql.Identifier(schema, name)
            )
            connection.execute(again)

    def tables_of(self, connection: Connection, schema: str, ids: Sequence[str]) -> list[str]:
        rows = connection.execute(
            "SELECT relname::text"
            " FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace"
            " WHERE nspname = %s AND relkind = 'r' AND left(relname, 24) = ANY(%s) ORDER BY 1",
            [schema, [staging_table(text) for text in ids]],
        ).fetchall()
        return [name for (name,) in rows]

    def staged(self, connection: Connection, schema: str, prefix: str) -> list[str]:
        rows = connection.execute(
            "SELECT DISTINCT obj_description(c.oid, 'pg_class')"
            " FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace"
            " WHERE nspname = %s AND relkind = 'r' AND relname LIKE 'tpc\\_%%'"
            " AND starts_with(obj_description(c.oid, 'pg_class'), %s) ORDER BY 1",
            [schema, prefix],
        ).fetchall()
        return [text for (text,) in rows]


def _merge_column(field: pa.Field) -> PostgresColumn:
    """Make a column that only a staging table has."""
    declared = target_type(field.type)
    element, _, array = declared.partition("[")
    return PostgresColumn(
        field.name, builtin[element.split("(")[0]].name + "[]" * bool(array), declared
    )
