"""Strategy `staged`: rows go into a staging table of one's own, and COMMIT; the driver moves a whole checkpoint.

The driver's one transaction writes the ledger rows and moves every staging table into the target. DROP TABLE would
commit it, so the staging tables are dropped after it: the ledger tells that those that are still there were moved.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace

import pymysql

from sinks.mysql import catalog
from sinks.mysql.catalog import Target, extra_column
from sinks.mysql.failures import RIGHTS, SHAPE, Writing, code_of, describe, refuses
from sinks.mysql.loading import RowTransaction
from sinks.mysql.merge import Merge
from sinks.mysql.planning import Plan
from sinks.mysql.server import Connection, execute, literal, query, quoted
from sinks.mysql.types import Column
from sinks.sql.names import staging_table
from sinks.sql.staging import StagingTables, identity_of, names_of
from sinks.transaction import Committable, TransactionContext

logger = logging.getLogger(__name__)

_DROPPED_TOGETHER = 100
_DROPPERS = 8
_ROW = "tpc row"
"""The primary key of a staging table: many servers take no table without one."""


class Staged(StagingTables[RowTransaction]):
    def create(self, plan: Plan, context: TransactionContext, name: str) -> RowTransaction:
        """Nothing can undo CREATE TABLE but DROP TABLE. The types are those of the target."""
        target = plan.target
        table = quoted(target.schema, name)
        identity = identity_of(target.schema, context.transaction_id)
        undo = ["ROLLBACK", f"DROP TABLE IF EXISTS {table}"]
        transaction = RowTransaction(self.server, context, target.label, identity, undo)
        try:
            with transaction.explained():
                written = self.merge.written(context.schema.names, target.names)
                target = catalog.current(transaction.connection, target, written)
            columns = staging_columns(target, self.merge, context)
            encode = plan.encoder(context.schema, columns, target.label)
            transaction.execute(
                f"CREATE TABLE {table} ({', '.join(_declarations(name, columns, target, self.merge))}) ENGINE=InnoDB"
                f" COMMENT={literal(context.transaction_id)}"
            )
            transaction.execute("START TRANSACTION READ WRITE")
            transaction.start(table, encode, alias=name)
        except BaseException:
            transaction.close()
            raise
        return transaction

    def seal(self, transaction: RowTransaction) -> None:
        transaction.seal("COMMIT")

    def seal_without(self, transaction: RowTransaction, table: str) -> None:
        transaction.execute("COMMIT")
        transaction.seal(f"DROP TABLE {table}")

    def judges(self, target: Target) -> bool:
        return bool(target.uniques or target.beyond)

    def explained(self, target: Target, where: str, tables: Sequence[str]) -> AbstractContextManager[None]:
        return Writing(target.label, where, dict.fromkeys(tables, target.name)).explained()

    def locked(self, connection: Connection, plan: Plan, tables: Sequence[str]) -> Target:
        """The lock is that of an INSERT of no rows. Types, engine and indexes are asked for under it."""
        known, upsert = plan.target, self.merge.mode == "upsert"
        staged = catalog.staged_types(connection, known.schema, tables)
        names = sorted({name for name, *_ in staged} - {_ROW})
        written = self.merge.written(names, known.names)
        unlocked = catalog.lock(connection, known, written)
        target = catalog.describe(connection, known.schema, known.name, references=upsert)
        catalog.require_innodb(known, target.engine if target else None)
        assert target is not None
        reasons = catalog.lacking(written, target) or ([describe(unlocked)] if unlocked else [])
        reasons += catalog.other_types(target, staged)
        # a counter or timestamp takes a NULL for a number or the time; of others it is better to know now
        nullable = {column.name for column in known.columns if column.nullable}
        asked = [c for c in target.columns if c.counter or c.type == "timestamp" or c.name in nullable]
        required = [c.name for c in asked if not c.nullable and c.name in written]
        reasons += self._nulls(connection, target, tables, required)
        reasons += catalog.unsafe_triggers(connection, target)
        rights = self.merge.rights(target, "staged")
        reasons += catalog.missing_rights(connection, target.schema, target.name, rights, target.names[0])
        if upsert and not any(set(unique.columns) == set(self.merge.keys) for unique in target.uniques):
            reasons.append(f"it has no unique index on ({', '.join(self.merge.keys)}) any more: add it")
        if reasons:
            raise catalog.changed(target, reasons)
        return target

    def _nulls(
        self, connection: Connection, target: Target, tables: Sequence[str], columns: Sequence[str]
    ) -> Iterable[str]:
        kept = f" AND {quoted(self.merge.delete_marker)} IS NOT TRUE" if self.merge.delete_marker else ""
        for name in columns:
            staged = self.merge.union([quoted(target.schema, table) for table in tables], "*")
            where = f"({staged}) AS staged WHERE {quoted(name)} IS NULL{kept}"
            if query(connection, f"SELECT 1 FROM {where} LIMIT 1"):
                yield f'its column "{name}" is NOT NULL now, and rows have NULL there: let it be NULL'

    def refusal(self, error: Exception, target: Target, tables: Sequence[str]) -> str | None:
        if not isinstance(error, pymysql.Error) or not (refuses(error) or code_of(error) in SHAPE):
            return None  # the connection, a lock, a full disk
        return f": {Writing(target.label, '', dict.fromkeys(tables, target.name)).said(describe(error))}"

    def forbidden(self, error: Exception) -> str | None:
        return describe(error) if isinstance(error, pymysql.Error) and code_of(error) in RIGHTS else None

    def move(self, connection: Connection, plan: Plan, committables: Sequence[Committable]) -> None:
        with connection.at_work():
            super().move(connection, plan, committables)
        for name in names_of(committables):
            execute(connection, f"DELETE FROM {quoted(plan.target.schema, name)} ORDER BY {quoted(_ROW)} LIMIT 1")

    def drop(self, connection: Connection, schema: str, names: Sequence[str]) -> None:
        for start in range(0, len(names), _DROPPED_TOGETHER):
            tables = ", ".join(quoted(schema, name) for name in names[start : start + _DROPPED_TOGETHER])
            execute(connection, f"DROP TABLE IF EXISTS {tables}")

    def tidy(self, connection: Connection, schema: str, ids: Sequence[str]) -> None:
        """The server flushes its log for each table that it drops: several connections share the flushes. What somebody
        reads now is dropped by the next sweep."""

        def drop(names: Sequence[str]) -> None:
            try:
                with self.server.lend() as connection, self.server.impatient(connection):
                    self.drop(connection, schema, names)
            except pymysql.Error as error:
                text = describe(error)
                logger.warning("staging tables in %s were moved and could not be dropped yet: %s", schema, text)

        names = sorted(self.existing(connection, schema, [staging_table(text) for text in ids]))
        parts = [names[n::_DROPPERS] for n in range(min(_DROPPERS, len(names)))]
        if len(parts) < 2:
            for part in parts:
                drop(part)
            return
        with ThreadPoolExecutor(_DROPPERS, "drop-staging") as pool:
            list(pool.map(drop, parts))

    def existing(self, connection: Connection, schema: str, names: Sequence[str]) -> set[str]:
        if not names:
            return set()
        marks = ", ".join(["%s"] * len(names))
        rows = query(
            connection,
            f"SELECT table_name FROM information_schema.tables WHERE table_schema = %s AND table_name IN ({marks})",
            [schema, *names],
        )
        return {name for (name,) in rows}

    def comments(self, connection: Connection, schema: str, prefix: str) -> list[str]:
        rows = query(
            connection,
            "SELECT table_comment FROM information_schema.tables WHERE table_schema = %s"
            " AND table_name REGEXP '^tpc_[0-9a-f]{20}$' AND LEFT(table_comment, %s) = %s ORDER BY 1",
            [schema, len(prefix), prefix],
        )
        return [text for (text,) in rows]

    def columns(self, connection: Connection, target: Target, name: str) -> list[str]:
        rows = query(
            connection,
            "SELECT column_name FROM information_schema.columns WHERE table_schema = %s AND table_name = %s"
            " ORDER BY ordinal_position",
            [target.schema, name],
        )
        return [column for (column,) in rows if column != _ROW]


def staging_columns(target: Target, merge: Merge, context: TransactionContext) -> list[Column]:
    """The target's columns that are written, and those of the batch that only the merge looks at."""
    written = merge.written(context.schema.names, target.names)
    columns = []
    for column in target.columns:
        if column.name in written:
            required = column.name in merge.keys or (not column.nullable and not merge.delete_marker)
            columns.append(replace(column, nullable=not required))
    for field in context.schema:
        if field.name not in written:
            columns.append(extra_column(field.name, field.type))
    return columns


def _declarations(name: str, columns: Sequence[Column], target: Target, merge: Merge) -> list[str]:
    """Columns and constraints for CREATE TABLE. NULLs are refused before they get here, except in those columns that a
    row that deletes may leave empty."""
    declared = [f"{quoted(_ROW)} bigint unsigned NOT NULL AUTO_INCREMENT PRIMARY KEY"]
    for column in columns:
        charset = f" CHARACTER SET {column.charset} COLLATE {column.collation}" if column.collation else ""
        json = f" CHECK (json_valid({quoted(column.name)}))" if column.type == "json" and column.collation else ""
        declared.append(f"{quoted(column.name)} {column.declared}{charset} NULL{json}")
    if merge.delete_marker:
        required = {column.name for column in target.columns if not column.nullable}
        for number, column in enumerate(columns):
            if column.name in required and column.nullable:
                rule = f"{quoted(merge.delete_marker)} IS TRUE OR {quoted(column.name)} IS NOT NULL"
                called = f"{name} {number} {column.name}"[:56] + " is NULL"  # MySQL has them unique in the database
                declared.append(f"CONSTRAINT {quoted(called)} CHECK ({rule})")
    return declared
