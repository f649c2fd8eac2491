"""Strategy `staged`: rows go into a staging table of one's own, and COMMIT; the driver moves a whole checkpoint.

The driver's one transaction writes the ledger rows and moves every staging table into the target. DROP TABLE would
commit it, so the staging tables are dropped after it: the ledger tells that those that are still there were moved.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace

import pyarrow as pa
import pymysql

from sinks.errors import BadValue, SinkError, TransactionBlocked
from sinks.mysql import catalog
from sinks.mysql.catalog import Target
from sinks.mysql.dialect import MySQLDialect
from sinks.mysql.failures import RIGHTS, SHAPE, Writing, code_of, describe, refuses
from sinks.mysql.loading import LoadTransaction
from sinks.mysql.server import Connection, Server, bytewise, execute, listed, literal, query, quoted
from sinks.mysql.types import Column, target_type
from sinks.sql.dialect import Plan
from sinks.sql.names import staging_table
from sinks.sql.questions import SORTED_BYTES
from sinks.sql.staging import StagedTypes, StagingTables, by_table, identity_of, too_long_to_sort
from sinks.transaction import TransactionContext

logger = logging.getLogger(__name__)

_DROPPED_TOGETHER = 100
_DROPPERS = 8
_ROW = "tpc row"
"""The primary key of a staging table: many servers take no table without one."""


class MySQLStaging(StagingTables[Connection, Target, LoadTransaction]):
    dialect: MySQLDialect
    server: Server

    MATCHING = "JOIN {table} AS target ON {condition}"

    # ------------------------------------------------------------------ in the task
    def begin(self, plan: Plan[Connection, Target], context: TransactionContext) -> LoadTransaction:
        """Nothing can undo CREATE TABLE but DROP TABLE. The types are those of the target."""
        target, name = plan.target, staging_table(context.transaction_id)
        table = quoted(target.schema, name)
        identity = identity_of(target.schema, context.transaction_id)
        undo = ["ROLLBACK", f"DROP TABLE IF EXISTS {table}"]
        transaction = LoadTransaction(self.server, context, target.label, identity, undo=undo)
        with transaction.begun():
            with transaction.explained():
                written = self.merge.written(context.schema.names, target.names)
                target = catalog.current(transaction.connection, target, written)
            columns = self._staging_columns(target, context, bytewise(transaction.connection))
            encoder = self.dialect.encoder(context, columns, target)
            transaction.execute(
                f"CREATE TABLE {table} ({', '.join(self._declarations(name, columns, target))}) ENGINE=InnoDB"
                f" COMMENT={literal(context.transaction_id)}"
            )
            transaction.execute("START TRANSACTION READ WRITE")
            transaction.start(table, encoder, alias=name)
        return transaction

    def _staging_columns(self, target: Target, context: TransactionContext, collation: str) -> list[Column]:
        """The target's columns that are written, and those of the batch that only the merge looks at: texts of these
        get `collation`."""
        written = self.merge.written(context.schema.names, target.names)
        columns = []
        for column in target.columns:
            if column.name in written:
                required = column.name in self.merge.keys or (not column.nullable and not self.merge.delete_marker)
                columns.append(replace(column, nullable=not required))
        extra = [field for field in context.schema if field.name not in written]
        return columns + [_extra_column(field.name, field.type, collation) for field in extra]

    def _declarations(self, name: str, columns: Sequence[Column], target: Target) -> list[str]:
        """Columns and constraints for CREATE TABLE. NULLs are refused before they get here, except in those columns
        that a row that deletes may leave empty."""
        declared = [f"{quoted(_ROW)} bigint unsigned NOT NULL AUTO_INCREMENT PRIMARY KEY"]
        for column in columns:
            charset = f" CHARACTER SET {column.charset} COLLATE {column.collation}" if column.collation else ""
            json = f" CHECK (json_valid({quoted(column.name)}))" if column.type == "json" and column.collation else ""
            # the catalog writes members with backslashes, and without characters beyond U+FFFF
            kind = f"{column.type}({', '.join(map(literal, column.members))})" if column.members else column.declared
            declared.append(f"{quoted(column.name)} {kind}{charset} NULL{json}")
        if self.merge.delete_marker:
            required = {column.name for column in target.columns if not column.nullable}
            for number, column in enumerate(columns):
                if column.name in required and column.nullable:
                    rule = f"{quoted(self.merge.delete_marker)} IS TRUE OR {quoted(column.name)} IS NOT NULL"
                    called = f"{name} {number} {column.name}"[:56] + " is NULL"  # MySQL has them unique in the database
                    declared.append(f"CONSTRAINT {quoted(called)} CHECK ({rule})")
        return declared

    def seal(self, transaction: LoadTransaction, moved: str | None = None) -> None:
        if moved:
            transaction.execute("COMMIT")
        transaction.seal(f"DROP TABLE {moved}" if moved else "COMMIT")

    # ------------------------------------------------------------------ before the decision
    def locked(self, connection: Connection, plan: Plan[Connection, Target], staged: StagedTypes) -> Target:
        """The lock is that of an INSERT of no rows. Types, engine and indexes are asked for under it."""
        with connection.at_work():
            return self._unchanged(connection, plan.target, staged)

    def _unchanged(self, connection: Connection, known: Target, staged: StagedTypes) -> Target:
        upsert = self.merge.mode == "upsert"
        types = {one for columns in staged.values() for one in columns.items()}
        names = sorted({name for name, _ in types})
        written = self.merge.written(names, known.names)
        unlocked = catalog.lock(connection, known, written)
        target = catalog.describe(connection, known.schema, known.name, references=upsert)
        catalog.require_innodb(known, target.engine if target else None)
        assert target is not None
        reasons = list(target.unfit(written, sorted(types)))
        # a counter or timestamp takes a NULL for a number or the time; of others it is better to know now
        nullable = {column.name for column in known.columns if column.nullable}
        asked = [c for c in target.columns if c.counter or c.type == "timestamp" or c.name in nullable]
        required = [c.name for c in asked if not c.nullable and c.name in written]
        reasons += self._nulls(connection, target, list(staged), required)
        rights = self.dialect.rights(target, "staged")
        reasons += catalog.missing_rights(connection, target.schema, target.name, rights, target.names[0])
        reasons += target.no_index_for(self.merge.keys)
        if unlocked and not reasons:
            reasons.append(describe(unlocked))
        if reasons:
            raise catalog.changed(target, reasons)
        return target

    def _nulls(
        self, connection: Connection, target: Target, tables: Sequence[str], columns: Sequence[str]
    ) -> Iterable[str]:
        kept = f" AND {quoted(self.merge.delete_marker)} IS NOT TRUE" if self.merge.delete_marker else ""
        for name in columns:
            staged = self.union([quoted(target.schema, table) for table in tables], "*")
            where = f"({staged}) AS staged WHERE {quoted(name)} IS NULL{kept}"
            if query(connection, f"SELECT 1 FROM {where} LIMIT 1"):
                yield f'its column "{name}" is NOT NULL now, and rows have NULL there: let it be NULL'

    def clashes(self, connection: Connection, target: Target, staging: Sequence[str], written: Sequence[str]) -> None:
        super().clashes(connection, target, staging, written)
        if self.merge.order_by is None:
            return
        by = quoted(self.merge.order_by)
        weights, limit = f"GREATEST(LENGTH({by}), LENGTH(WEIGHT_STRING({by})))", SORTED_BYTES
        staged = f"({self.union(staging, by)}) AS staged"
        if query(connection, f"SELECT 1 FROM {staged} WHERE {weights} > {limit} LIMIT 1"):
            raise too_long_to_sort(target, self.merge.order_by)

    def grouped(self, target: Target, column: str) -> str:
        """MariaDB has two groups for 0.0 and -0.0, which are one key."""
        types = {known.name: known.type for known in target.columns}
        return f"{quoted(column)} + 0" if types.get(column) in ("double", "float") else quoted(column)

    # ------------------------------------------------------------------ the move
    def transfer(
        self, connection: Connection, target: Target, staging: Sequence[str], written: Sequence[str], rows: int
    ) -> None:
        with connection.at_work():
            super().transfer(connection, target, staging, written, rows)

    def append(
        self, connection: Connection, target: Target, staging: Sequence[str], written: Sequence[str], rows: int
    ) -> None:
        names = listed(written)
        into = f"INSERT INTO {target.identifier} ({names}) SELECT {names} FROM"
        moved = sum(execute(connection, f"{into} {table}") for table in staging)
        if moved != rows:
            raise SinkError(
                f"{moved} rows went into the table out of the staging tables, and their tasks acknowledged {rows}: "
                "somebody changed a staging table, or emptied the ledger after they were moved"
            )

    def upsert(self, connection: Connection, target: Target, staging: Sequence[str], written: Sequence[str]) -> None:
        last = self._last(target, staging, written)
        if self.merge.delete_marker:
            execute(connection, self._delete(target, last))
        if set(written) == set(self.merge.keys):
            execute(connection, self._insert(target, last, written))
            return
        self._put_in_anew(connection, target, last, written)
        changed = execute(connection, self._update(target, last, written))
        changed += execute(connection, self._insert(target, last, written))
        ((kept,),) = query(connection, self._placed(target, last))
        if changed != kept:  # neither missing for the INSERT nor there for the UPDATE
            raise TransactionBlocked(
                f"table {target.label}: somebody else inserted or deleted keys of the batch while it was moved"
            )

    def _put_in_anew(self, connection: Connection, target: Target, last: str, written: Sequence[str]) -> None:
        """Rows that give up a value which another one takes, with what the batch has not as it was."""
        if (giving := self.giving(target, written, last)) is None:
            return
        own = [column.name for column in target.columns if not column.generated]
        names = ", ".join(f"target.{quoted(column)}" for column in own)
        giver = f"FROM {target.identifier} AS target JOIN ({last}) AS last WHERE {giving}"
        if not query(connection, f"SELECT 1 {giver} FOR UPDATE"):
            return
        keys, given = self.merge.keys, quoted("tpc given")
        create = f"CREATE TEMPORARY TABLE {given} (PRIMARY KEY ({listed(keys)}))"
        try:
            execute(connection, f"DROP TEMPORARY TABLE IF EXISTS {given}")
            rows = execute(connection, f"{create} SELECT {names} {giver}")
        except pymysql.Error as error:
            if code_of(error) not in RIGHTS:
                raise
            raise BadValue(
                f"table {target.label}: rows of the batch swap the value of a unique index, or hand it on, for which "
                f"the user needs the right CREATE TEMPORARY TABLES: {describe(error)}"
            ) from error
        same = self.equal("target", "given", keys)
        out = execute(connection, f"DELETE target FROM {target.identifier} AS target JOIN {given} AS given ON {same}")
        changes = [column for column in written if column not in keys]
        values = ", ".join(f"{'last' if column in changes else 'given'}.{quoted(column)}" for column in own)
        put = execute(
            connection,
            f"INSERT INTO {target.identifier} ({listed(own)}) SELECT {values} FROM {given} AS given"
            f" JOIN ({last}) AS last ON {self.equal('given', 'last', keys)}",
        )
        execute(connection, f"DROP TEMPORARY TABLE {given}")
        if not rows == out == put:
            raise TransactionBlocked(
                f"table {target.label}: somebody else changed rows of the batch while it was moved"
            )

    def _last(self, target: Target, staging: Sequence[str], written: Sequence[str]) -> str:
        """The last change of each key, over all participants. MariaDB sorts wide columns by no more than letters where
        their collation tells accents or capitals apart too."""
        columns, order = self.changes(written)
        names = listed(columns)
        if not self.merge.order_by:  # validated: every key is there once
            return self.union(staging, names)
        subtle = {c.name for c in target.columns if any(mark in c.collation for mark in ("_as_", "_cs", "_w2"))}
        ranks = ", ".join(  # NULL is below all else
            f"{quoted(name)} DESC" + (f", WEIGHT_STRING({quoted(name)}) DESC" if name in subtle else "")
            for name in order
        )
        return (
            f"SELECT {names} FROM (SELECT {names}, ROW_NUMBER() OVER (PARTITION BY {listed(self.merge.keys)}"
            f" ORDER BY {ranks}) AS `tpc rank` FROM ({self.union(staging, names)}) AS staged) AS ranked"
            " WHERE `tpc rank` = 1"
        )

    def _kept(self, and_: str = "") -> str:
        """The condition for rows that are no deletes."""
        terms = [f"last.{quoted(self.merge.delete_marker)} IS NOT TRUE"] if self.merge.delete_marker else []
        terms += [and_] if and_ else []
        return f" WHERE {' AND '.join(terms)}" if terms else ""

    def _delete(self, target: Target, last: str) -> str:
        return (
            f"DELETE target FROM {target.identifier} AS target JOIN ({last}) AS last ON"
            f" {self.equal('target', 'last', self.merge.keys)}"
            f" WHERE last.{quoted(self.merge.delete_marker or '')} IS TRUE{self.not_older()}"
        )

    def _placed(self, target: Target, last: str) -> str:
        """How many changes are in the table when all are made that replace what is not newer."""
        if not self.merge.keep_newer:
            return f"SELECT count(*) FROM ({last}) AS last{self._kept()}"
        same = f"{self.equal('target', 'last', self.merge.keys)}{self.not_older()}"
        return f"SELECT count(*) FROM ({last}) AS last JOIN {target.identifier} AS target ON {same}{self._kept()}"

    def _update(self, target: Target, last: str, written: Sequence[str]) -> str:
        """A key stays also where the server puts the time into what is not set (ON UPDATE)."""
        own = [c.name for c in target.columns if c.name in self.merge.keys and c.type in ("timestamp", "datetime")]
        changes = [(column, "last") for column in written if column not in self.merge.keys]
        changes += [(column, "target") for column in own]
        sets = ", ".join(f"target.{quoted(column)} = {row}.{quoted(column)}" for column, row in changes)
        return (
            f"UPDATE {target.identifier} AS target JOIN ({last}) AS last"
            f" ON {self.equal('target', 'last', self.merge.keys)}{self.not_older()} SET {sets}{self._kept()}"
        )

    def _insert(self, target: Target, last: str, written: Sequence[str]) -> str:
        columns = ", ".join(f"last.{quoted(column)}" for column in written)
        return (
            f"INSERT INTO {target.identifier} ({listed(written)}) SELECT {columns} FROM ({last}) AS last"
            f" LEFT JOIN {target.identifier} AS target ON {self.equal('target', 'last', self.merge.keys)}"
            f"{self._kept(f'target.{quoted(self.merge.keys[0])} IS NULL')}"
        )

    def explained(self, target: Target, where: str, tables: Sequence[str]) -> AbstractContextManager[None]:
        return Writing(target.label, where, dict.fromkeys(tables, target.name)).explained()

    def refusal(self, error: Exception, target: Target, tables: Sequence[str]) -> str | None:
        if not isinstance(error, pymysql.Error) or not (refuses(error) or code_of(error) in SHAPE):
            return None  # the connection, a lock, a full disk
        return f": {Writing(target.label, '', dict.fromkeys(tables, target.name)).said(describe(error))}"

    # ------------------------------------------------------------------ staging tables
    def mark_moved(self, connection: Connection, schema: str, names: Sequence[str]) -> None:
        for name in names:
            execute(connection, f"DELETE FROM {quoted(schema, name)} ORDER BY {quoted(_ROW)} LIMIT 1")

    def drop(self, connection: Connection, schema: str, names: Sequence[str]) -> None:
        for start in range(0, len(names), _DROPPED_TOGETHER):
            tables = ", ".join(quoted(schema, name) for name in names[start : start + _DROPPED_TOGETHER])
            execute(connection, f"DROP TABLE IF EXISTS {tables}")

    def drop_unused(self, connection: Connection, schema: str, names: Sequence[str]) -> None:
        """The server flushes its log for each table that it drops: several connections share the flushes. What somebody
        reads now is dropped by the next sweep."""

        def drop(some: Sequence[str]) -> None:
            try:
                with self.server.lend() as connection, self.server.impatient(connection):
                    self.drop(connection, schema, some)
            except pymysql.Error as error:
                text = describe(error)
                logger.warning("staging tables in %s were moved and could not be dropped yet: %s", schema, text)

        parts = [names[n::_DROPPERS] for n in range(min(_DROPPERS, len(names)))]
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

    def staged(self, connection: Connection, schema: str, prefix: str) -> list[str]:
        rows = query(
            connection,
            "SELECT table_comment FROM information_schema.tables WHERE table_schema = %s"
            " AND table_name REGEXP '^tpc_[0-9a-f]{20}$' AND LEFT(table_comment, %s) = %s ORDER BY 1",
            [schema, len(prefix), prefix],
        )
        return [text for (text,) in rows]

    def staged_types(self, connection: Connection, schema: str, tables: Sequence[str]) -> StagedTypes:
        """The type of a text with its collation."""
        marks = ", ".join(["%s"] * len(tables))
        rows = query(
            connection,
            "SELECT table_name, column_name, column_type, coalesce(collation_name, '') FROM information_schema.columns"
            f" WHERE table_schema = %s AND table_name IN ({marks}) AND column_name <> %s ORDER BY ordinal_position",
            [schema, *tables, _ROW],
        )
        return by_table((table, name, f"{kind} {collation}".rstrip()) for table, name, kind, collation in rows)


def _extra_column(name: str, arrow: pa.DataType, collation: str) -> Column:
    """A column that only a staging table has."""
    declared = target_type(arrow).replace("boolean", "tinyint(1)")
    kind, *numbers = re.findall(r"\w+", declared)
    text = ("utf8mb4", collation) if kind == "longtext" else ("", "")
    precision, scale = map(int, numbers) if kind == "decimal" else (0, None)
    return Column(
        name,
        kind,
        declared,
        precision=precision,
        scale=scale,
        digits=6 if declared.endswith("(6)") else 0,
        charset=text[0],
        collation=text[1],
    )
