"""Staging tables of MySQL and MariaDB.

DROP TABLE would commit the transaction that moves their rows, so they are dropped after it: the
ledger tells that the staging tables that are still there were moved.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import pyarrow as pa
import pymysql
from pymysql.constants import ER

from sinks._util.log import get_logger
from sinks._util.threads import side_by_side
from sinks.errors import BadValue, ConfigurationError, TransactionBlocked
from sinks.mysql import catalog
from sinks.mysql.catalog import MySQLCatalog
from sinks.mysql.columns import MySQLColumn, MySQLTarget, target_type
from sinks.mysql.connection import (
    DENIED,
    SHAPE,
    Connection,
    code_of,
    error_text,
    execute,
    literal,
    query,
    quoted,
)
from sinks.mysql.dialect import GIVEN, ROW, MySQLDialect
from sinks.mysql.load import LoadTransaction
from sinks.mysql.server import MySQLServer
from sinks.sql.dialect import Move, batches, marks
from sinks.sql.names import staging_table
from sinks.sql.server import Row
from sinks.sql.staging import Staging
from sinks.sql.strategies import identity_of
from sinks.sql.transaction import Plan, RowTransaction
from sinks.transaction import TransactionContext

logger = get_logger(__name__)

_DROPPERS = 8
"""The number of connections that drop staging tables side by side."""
_FRAME = 2**14
"""Bytes of an upsert's statement around the SELECTs from staging tables, at most."""


class MySQLStaging(Staging[Connection, MySQLTarget]):
    DROPPED_TOGETHER = 100

    server: MySQLServer
    dialect: MySQLDialect
    catalog: MySQLCatalog

    # ------------------------------------------------------------------ in the task
    def add_part(
        self,
        transaction: RowTransaction[Connection],
        plan: Plan[Connection, MySQLTarget],
        context: TransactionContext,
    ) -> LoadTransaction:
        """Make a further staging table, which commits the rows of those before.

        They do not count before the pre-commit, which tells how many rows each table has.
        """
        assert isinstance(transaction, LoadTransaction)
        return self.stage(plan, context, transaction)

    def stage(
        self,
        plan: Plan[Connection, MySQLTarget],
        context: TransactionContext,
        within: LoadTransaction | None = None,
    ) -> LoadTransaction:
        """Make a table with the types of the target, and begin to write into it.

        Only DROP TABLE can undo CREATE TABLE, so that is added to `undo`, which the transaction
        shares with the one that it is a part of.
        """
        target = plan.target
        table = quoted(target.schema, plan.staging_table(context.transaction_id))
        identity = identity_of(target.schema, context.transaction_id)
        connection = within.connection if within else self.server.take()
        undo = within.undo if within else ["ROLLBACK"]
        undo.append(f"DROP TABLE IF EXISTS {table}")
        transaction = LoadTransaction(
            connection, self.server.give, context, target, identity, undo=undo
        )
        with transaction.discarded_on_error(), transaction.explained():
            written = self.merge.written(context.schema.names, target.names)
            target = self.catalog.current(transaction.connection, target, written)
            columns = self.choose_columns(target.columns, context.schema, _merge_column)
            transaction.start(table, columns, self.merge)
            transaction.connection.defer(
                f"{_creation('TABLE', table, columns)} COMMENT={literal(context.transaction_id)}"
            )
            try:
                execute(transaction.connection, "START TRANSACTION")
            except pymysql.Error as error:
                if not _is_too_wide(error):
                    raise
                raise ConfigurationError(
                    f"table {target.label}: {self._too_wide(columns, error)}"
                ) from error
        return transaction

    def unstageable(
        self, connection: Connection, target: MySQLTarget, batch: pa.Schema
    ) -> Iterable[str]:
        """Try whether a temporary table can be made, and yield why not.

        A temporary table has the same limits, and leaves nothing behind. If the user lacks the
        privilege to make one, the first task tells.
        """
        table = quoted(target.schema, "tpc width")
        columns = self.choose_columns(target.columns, batch, _merge_column)
        try:
            connection.defer(f"DROP TEMPORARY TABLE IF EXISTS {table}")
            connection.defer(_creation("TEMPORARY TABLE", table, columns))
            execute(connection, f"DROP TEMPORARY TABLE {table}")
        except pymysql.Error as error:
            if _is_too_wide(error):
                yield self._too_wide(columns, error)
            elif code_of(error) not in DENIED:
                raise

    def _too_wide(self, columns: Sequence[MySQLColumn], error: pymysql.Error) -> str:
        remedy = 'use strategy="xa"' if self.merge.mode == "append" else "write fewer columns"
        return (
            f"the strategy staged needs a table with the batch's {len(columns):,} columns and one "
            f"of its own, which the server does not take ({error_text(error)}): {remedy}, or use "
            "shorter types"
        )

    # ------------------------------------------------------------------ before the decision
    def lock(
        self, connection: Connection, plan: Plan[Connection, MySQLTarget], written: Sequence[str]
    ) -> str | None:
        try:
            execute(connection, catalog.locking(plan.target.identifier, written))
        except pymysql.Error as error:
            if code_of(error) not in SHAPE:
                raise
            return error_text(error)
        return None

    def changes_since(self, connection: Connection, move: Move[MySQLTarget]) -> Iterable[str]:
        target = move.target
        staged = f"({self.dialect.union(move.tables, '*')}) AS staged"
        yield from catalog.no_innodb(target, target.engine)
        # a counter or timestamp takes a NULL for a number or the time
        counting = [
            c.name
            for c in target.columns
            if (c.counter or c.type == "timestamp") and not c.nullable
        ]
        for name in counting:
            missing = f"{quoted(name)} IS NULL AND {self.dialect.stays('staged')}"
            if name in move.written and query(
                connection, f"SELECT 1 FROM {staged} WHERE {missing} LIMIT 1"
            ):
                yield (
                    f'its column "{name}" is NOT NULL now, and rows have NULL there: let it be NULL'
                )
        # which `lock` needs
        needed = self.merge.privileges(target, "staged")
        others = [privilege for privilege in needed if privilege != "INSERT"]
        yield from self.catalog.missing_privileges(connection, target, others)

    def first_tie(self, connection: Connection, move: Move[MySQLTarget]) -> Row | None:
        self._require_room(connection, move, self.dialect.ties(move))
        return super().first_tie(connection, move)

    def try_out(self, connection: Connection, move: Move[MySQLTarget]) -> None:
        if self.merge.mode == "upsert":
            last = self.dialect.last(move)
            handed_on = self.dialect.hands_on_unique_value(move, last) or ""
            self._require_room(connection, move, self.dialect.update(move, last), handed_on)

    def _require_room(self, connection: Connection, move: Move[MySQLTarget], *parts: str) -> None:
        """Raise ConfigurationError if a statement with these parts is too long for the server.

        The server hangs up on a longer statement, and does not say why.
        """
        most = connection.longest_statement
        needed = sum(len(part.encode()) for part in parts) + _FRAME
        if needed > most:
            raise ConfigurationError(
                f"table {move.target.label}: the upsert of {len(move.tables):,} staging tables "
                f"takes statements of up to {needed:,} bytes, and the server takes "
                f"max_allowed_packet = {most:,}: set that higher (SET GLOBAL, and in the option "
                "file), or write fewer partitions, and start the query again"
            )

    # ------------------------------------------------------------------ the move
    def append(self, connection: Connection, move: Move[MySQLTarget], rows: int | None) -> None:
        """Put the rows of all staging tables into the target, in an order that it takes.

        InnoDB judges a foreign key row by row, even within one INSERT. So if the table refers to
        itself, the rows that need none of the others go first, then the rows that need the first
        ones, and so on.
        """
        target = move.target
        needed = self.dialect.needed_rows_are_there(move, "staged")
        required = {column.name for column in target.columns if not column.nullable} & set(
            move.written
        )
        keys = [unique.columns for unique in target.uniques if set(unique.columns) <= required]
        if not needed or not keys:
            super().append(connection, move, rows)
            return
        self.count(connection, move, rows)
        insert = self.dialect.missing(move, keys[0])
        moved = 0
        while some := execute(connection, f"{insert} AND {needed}"):
            moved += some
        moved += execute(connection, insert)  # the server says what the other rows lack
        staged = self.dialect.union(move.tables, "1")
        ((count,),) = query(connection, f"SELECT count(*) FROM ({staged}) AS staged")
        if moved != count:
            raise BadValue(
                f"table {target.label}: {count - moved} of {count} rows have a value of "
                f"({', '.join(keys[0])}) that the table, or another of the rows, has already"
            )

    def delete(self, connection: Connection, move: Move[MySQLTarget]) -> None:
        statements = self.dialect.move_away(move, self.dialect.last(move))
        self._require_room(connection, move, max(statements, key=len, default=""))
        super().delete(connection, move)

    def put(self, connection: Connection, move: Move[MySQLTarget]) -> None:
        dialect = self.dialect
        last = dialect.last(move)
        handed_on = dialect.hands_on_unique_value(move, last)
        self._require_room(connection, move, dialect.update(move, last), handed_on or "")
        if set(move.written) == set(self.merge.keys):
            self._insert(connection, move, last)
            return
        if handed_on:
            self._put_in_anew(connection, move, last, handed_on)
        # this is asked first, because a trigger may change what orders changes
        ((due,),) = query(connection, dialect.due(move, last))
        needed = dialect.needed_rows_are_there(move, "last")
        first = dialect.first(last, needed) if needed else last
        changed = execute(connection, dialect.update(move, first)) + self._insert(
            connection, move, last
        )
        if needed and changed != due:  # some refer to rows that were yet to come
            changed = execute(connection, dialect.update(move, last))
        if changed != due:  # neither missing for the INSERT nor there for the UPDATE
            raise TransactionBlocked(
                f"table {move.target.label}: somebody else inserted or deleted keys of the batch "
                "while it was moved"
            )

    def _put_in_anew(
        self, connection: Connection, move: Move[MySQLTarget], last: str, handed_on: str
    ) -> None:
        """Take out the rows that give up a value which another row takes, and put them in again.

        They return as an UPDATE would leave them.
        """
        givers = self.dialect.givers(move, last, handed_on)
        if not query(connection, f"SELECT 1 {givers} FOR UPDATE"):
            return
        given = quoted(GIVEN)
        try:
            execute(connection, f"DROP TEMPORARY TABLE IF EXISTS {given}")
            rows = execute(connection, self.dialect.keep_givers(move, givers))
        except pymysql.Error as error:
            if code_of(error) not in DENIED:
                raise
            raise BadValue(
                f"table {move.target.label}: rows of the batch swap the value of a unique index, "
                "or hand it on, for which the user needs the right CREATE TEMPORARY TABLES: "
                f"{error_text(error)}"
            ) from error
        # the server puts the time where it would in the target
        execute(connection, self.dialect.update(move, last, given))
        # foreign keys of tables that are hidden from this user must not judge: the rows come back
        connection.defer("SET SESSION foreign_key_checks = 0")
        out = execute(connection, self.dialect.take_givers_out(move))
        connection.defer("SET SESSION foreign_key_checks = 1")
        put = execute(connection, self.dialect.put_givers_in(move))
        execute(connection, f"DROP TEMPORARY TABLE {given}")
        if not rows == out == put:
            raise TransactionBlocked(
                f"table {move.target.label}: somebody else changed rows of the batch while it was "
                "moved"
            )

    def _insert(self, connection: Connection, move: Move[MySQLTarget], last: str) -> int:
        """Insert the changes whose key no row has; return how many these are.

        If the table refers to itself, the changes that need no other row go first.
        """
        target = move.target
        keys = self.merge.keys
        insert = self.dialect.insert(move, last)
        needed = self.dialect.needed_rows_are_there(move, "last")
        inserted = 0
        try:
            while needed and (some := execute(connection, f"{insert} AND {needed}")):
                inserted += some
            return inserted + execute(connection, insert)
        except pymysql.IntegrityError as error:
            text = error_text(error)
            names = [u.name for u in target.uniques if set(u.columns) == set(keys)]
            # MySQL puts the table's name before the index
            if code_of(error) != ER.DUP_ENTRY or not any(
                text.endswith((f"'{n}'", f".{n}'")) for n in names
            ):
                raise
            raise TransactionBlocked(
                f"table {target.label}: somebody else inserted keys of the batch while it was "
                f"moved: {text}"
            ) from error

    # ------------------------------------------------------------------ afterwards
    def mark_moved(self, connection: Connection, schema: str, names: Sequence[str]) -> None:
        for name in names:
            connection.defer(f"DELETE FROM {quoted(schema, name)} ORDER BY {quoted(ROW)} LIMIT 1")

    def drop(self, connection: Connection, schema: str, names: Sequence[str]) -> None:
        """Drop those of the staging tables that exist.

        An earlier drop of many tables may have ended in the middle.
        """
        for some in batches(names, self.DROPPED_TOGETHER):
            execute(
                connection,
                f"DROP TABLE IF EXISTS {', '.join(quoted(schema, name) for name in some)}",
            )

    def drop_unused(self, connection: Connection, schema: str, names: Sequence[str]) -> None:
        """Drop those staging tables that nobody reads now, by several connections side by side.

        The server flushes its log for each table that it drops, and the connections share the
        flushes. The next sweep drops the other tables.
        """

        def drop(some: Sequence[str]) -> None:
            try:
                with self.server.lend() as connection:
                    connection.defer("SET SESSION lock_wait_timeout = 1")
                    self.drop(connection, schema, some)
                    connection.defer(f"SET SESSION lock_wait_timeout = {self.server.lock_seconds}")
            except pymysql.Error as error:
                text = error_text(error)
                logger.warning(
                    "staging tables in %s were moved and could not be dropped yet: %s", schema, text
                )

        parts = [names[n::_DROPPERS] for n in range(min(_DROPPERS, len(names)))]
        side_by_side(drop, parts)

    def tables_of(self, connection: Connection, schema: str, ids: Sequence[str]) -> list[str]:
        if not ids:
            return []
        rows = query(
            connection,
            "SELECT table_name FROM information_schema.tables WHERE table_schema = %s"
            f" AND LEFT(table_name, 24) IN ({marks(ids)}) ORDER BY 1",
            [schema, *map(staging_table, ids)],
        )
        return [name for (name,) in rows]

    def staged(self, connection: Connection, schema: str, prefix: str) -> list[str]:
        rows = query(
            connection,
            "SELECT DISTINCT table_comment FROM information_schema.tables WHERE table_schema = %s"
            " AND table_name REGEXP '^tpc_[0-9a-f]{20}(_[0-9a-f]{8})?$'"
            " AND LEFT(table_comment, %s) = %s ORDER BY 1",
            [schema, len(prefix), prefix],
        )
        return [text for (text,) in rows]


def _creation(kind: str, table: str, columns: Iterable[MySQLColumn]) -> str:
    """Write the statement that makes a staging table of this (quoted) name."""
    key = f"{quoted(ROW)} bigint unsigned NOT NULL AUTO_INCREMENT PRIMARY KEY"
    return f"CREATE {kind} {table} ({', '.join([key, *map(_declaration, columns)])}) ENGINE=InnoDB"


def _is_too_wide(error: pymysql.Error) -> bool:
    """Tell whether a table was not made because it has too many columns, or too long rows."""
    return code_of(error) in (
        ER.TOO_MANY_FIELDS,
        ER.TOO_BIG_ROWSIZE,
    ) or "Too many columns" in error_text(error)


def _declaration(column: MySQLColumn) -> str:
    """Declare a column for CREATE TABLE.

    The column takes NULL, since NULLs are refused before they get here, except in rows that delete.
    """
    collation = f" COLLATE {column.collation}" if column.collation else ""
    json = (
        f" CHECK (json_valid({quoted(column.name)}))"
        if column.type == "json" and column.collation
        else ""
    )
    # the catalog writes members with backslashes
    kind = (
        f"{column.type}({', '.join(map(literal, column.members))})"
        if column.members
        else column.declared
    )
    return f"{quoted(column.name)} {kind}{collation} NULL{json}"


def _merge_column(field: pa.Field) -> MySQLColumn:
    """Make a column that only a staging table has.

    It is the marker of deletes, or the column that orders changes, which is no string.
    """
    declared = target_type(field.type).replace("boolean", "tinyint(1)")
    if declared == "timestamp(6)":  # which ends in 2038
        return MySQLColumn(field.name, "moment", "datetime(6)", digits=6)
    kind, *numbers = re.findall(r"\w+", declared)
    precision, scale = map(int, numbers) if kind == "decimal" else (0, None)
    digits = 6 if declared.endswith("(6)") else 0
    return MySQLColumn(field.name, kind, declared, precision=precision, scale=scale, digits=digits)
