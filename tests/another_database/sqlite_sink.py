"""A sink for SQLite by Python's own driver, written from docs/another-database.md."""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from sqlite3 import Connection
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as at

from sinks.arrow import convert
from sinks.arrow.convert import Convert, Holds, Unfit, bits, created_type
from sinks.errors import ConfigurationError
from sinks.sql.backend import Backend
from sinks.sql.catalog import Catalog, ColumnTypes, by_table
from sinks.sql.dialect import Dialect, Move
from sinks.sql.names import staging_table
from sinks.sql.server import Fault, Kind, Pool, Row
from sinks.sql.sink import TableSink
from sinks.sql.staging import Staging
from sinks.sql.strategies import identity_of
from sinks.sql.table import Column, MergeOptions, Target, Unique, Values
from sinks.sql.transaction import Plan, RowTransaction
from sinks.transaction import TransactionContext

_HOLDS = {  # the first that a declared type matches
    "bool": Holds(convert.BOOLEAN),
    "int": Holds(convert.INTEGER, bounds=bits(64)),
    "char|clob|text": Holds(convert.JSON),
    "blob": Holds(convert.BYTES),
    "real|floa|doub": Holds(convert.FLOAT, to=pa.float64(), missing=(pc.is_nan, "would become NULL in SQLite")),
    "datetime|timestamp": Holds(convert.TIMESTAMP),
    "date": Holds(convert.DATE),
}
_INTEGERS = ("tinyint", "smallint", "int", "bigint")
_CREATED = {kind: kind for kind in ("boolean", "double", "date", "timestamp")} | dict.fromkeys(_INTEGERS, "integer")
_CREATED |= {"float": "double", "timestamp_ntz": "timestamp", "string": "text", "binary": "blob"}
_FAULTS: Mapping[str, Kind] = {
    "database .*is locked": "blocked",
    "attempt to write a readonly|not authorized|access permission": "privilege",
    "no such table": "gone",
    "no such column|table .* has no column": "changed",
    "file is not a database|database .*is malformed": "server",
    "string or blob too big": "refused",
}


@dataclass(frozen=True)
class SqliteColumn(Column):
    def conversion(self, arrow: pa.DataType) -> Convert:
        """Days and times become text."""
        holds = next((holds for kind, holds in _HOLDS.items() if re.search(kind, self.type, re.IGNORECASE)), None)
        if holds is None:
            raise Unfit(f"this sink does not know the type {self.type!r}")
        checked = replace(holds, name=self.type).conversion(arrow)
        is_text = at.is_date(arrow) or at.is_timestamp(arrow)
        return (lambda array: checked(array).cast(pa.string())) if is_text else checked


class SqliteTransaction(RowTransaction[Connection]):
    """Rows wait in a temporary table, while other tasks write theirs: SQLite has one writer at a time."""

    def __init__(
        self,
        server: SqliteServer,
        target: Target,
        columns: Sequence[Column],
        merge: MergeOptions,
        context: TransactionContext,
    ) -> None:
        super().__init__(context, identity_of(target.schema, context.transaction_id), target.label, server.fault)
        self._quote = server.dialect.quote
        self._target = target
        self._values = Values(context.schema, columns, f"{target.label}: {self.who}", merge)
        self._definitions = ", ".join(f"{self._quote(c.name)} {c.type}" for c in self._values.columns)
        with self.explained():
            self.connection = server.connect()
            with self.discarded_on_error():
                self.connection.execute(f"CREATE TEMPORARY TABLE tpc_rows ({self._definitions})")

    def encode(self, batch: pa.RecordBatch) -> object:
        return self._values.of(batch)

    def put(self, batch: pa.RecordBatch) -> None:
        rows, before = self._values, self._values.rows
        insert = f"INSERT INTO tpc_rows VALUES ({', '.join('?' * batch.num_columns)})"
        try:
            with self.explained(), self.connection:
                self.connection.execute("BEGIN")
                for piece in rows.slices(batch):
                    self.connection.executemany(insert, rows.of(piece))
                    rows.rows += piece.num_rows
        except BaseException:
            rows.rows = before
            raise

    def finish(self) -> int:
        text = self.context.transaction_id
        table = self._quote(self._target.schema, staging_table(text))
        with self.explained():
            self.connection.execute("BEGIN IMMEDIATE")
            self.connection.execute(f"CREATE TABLE {table} /* {text} */ ({self._definitions})")
            self.connection.execute(f"INSERT INTO {table} SELECT * FROM tpc_rows")
        return self._values.rows

    def commit(self) -> None:
        self.may_be_durable = True
        with self.explained():
            self.connection.commit()
        self.connection.close()

    def discard(self) -> None:
        self.connection.close()


class SqliteDialect(Dialect[Target]):
    name = "sqlite"
    POSITION = "rowid"

    def union(self, tables: Sequence[str], columns: str) -> str:
        """SQLite takes 500 terms."""
        united = super().union
        parts = [united(tables[start : start + 500], columns) for start in range(0, len(tables), 500)]
        return parts[0] if len(parts) == 1 else " UNION ALL ".join(f"SELECT * FROM ({part})" for part in parts)

    def into(self, target: Target, written: Sequence[str]) -> str:
        """Also where the table's own constraints say ON CONFLICT IGNORE."""
        return super().into(target, written).replace("INSERT", "INSERT OR ABORT", 1)


class SqliteServer(Pool[Connection]):
    """One file, in any journal mode. A transaction locks it against all other writers."""

    CHECK = "the path, and your permissions in its folder"

    def __init__(self, dialect: SqliteDialect, path: str | os.PathLike[str], *, name: str, lock_timeout: float) -> None:
        super().__init__(dialect, {"database": os.path.abspath(path)}, name=name, lock_timeout=lock_timeout)

    def connect(self) -> Connection:
        connection: Connection = sqlite3.connect(
            **self._parameters, timeout=self._lock_timeout, isolation_level=None, check_same_thread=False
        )
        connection.execute("PRAGMA synchronous = EXTRA")
        connection.execute("PRAGMA foreign_keys = ON")
        return connection

    def answers(self, connection: Connection, rested: float) -> bool:
        """The file may be another one by now."""
        return False

    @contextmanager
    def transaction(self, connection: Connection, *, undo: bool = False) -> Iterator[None]:
        connection.execute("BEGIN IMMEDIATE")
        with connection:
            yield
            if undo:
                connection.rollback()

    def execute(self, connection: Connection, statement: str, parameters: Sequence[object] = ()) -> int:
        return self._run(connection, statement, parameters).rowcount

    def query(self, connection: Connection, statement: str, parameters: Sequence[object] = ()) -> list[Row]:
        return self._run(connection, statement, parameters).fetchall()

    def _run(self, connection: Connection, statement: str, parameters: Sequence[Any]) -> sqlite3.Cursor:
        marked = statement % (("?",) * len(parameters)) if parameters else statement
        return connection.execute(marked, parameters)

    def fault(self, error: Exception) -> Fault | None:
        if isinstance(error, sqlite3.IntegrityError):
            return Fault("refused", str(error))
        kinds = (kind for words, kind in _FAULTS.items() if re.match(words, str(error)))
        kind = next(kinds, None) if isinstance(error, sqlite3.Error) else None
        return Fault(kind, str(error)) if kind else None

    def unreachable(self, error: Exception) -> str | None:
        return f"cannot use {self}: {error}" if isinstance(error, sqlite3.OperationalError) else None


class SqliteCatalog(Catalog[Connection, Target]):
    def locate(self, connection: Connection, table: str) -> tuple[str, str]:
        return "main", table

    def describe(self, connection: Connection, schema: str, name: str) -> Target | None:
        asked = "SELECT name, sql FROM sqlite_master WHERE type IN ('table', 'view') AND name = %s COLLATE NOCASE"
        for known, sql in self.server.query(connection, asked, [name]):
            if not sql.upper().startswith("CREATE TABLE"):
                raise ConfigurationError(f"{known} is a view or a virtual table: write into a plain one")
            return self._described(connection, schema, known, sql)
        return None

    def _described(self, connection: Connection, schema: str, name: str, sql: str) -> Target:
        indexes: dict[str, list[str]] = {}
        plain = "CASE WHEN NOT i.partial AND c.coll = 'BINARY' THEN c.name END"
        asked = f'{plain} FROM pragma_index_list(%s) AS i, pragma_index_xinfo(i.name) AS c WHERE "unique" AND key'
        for index, column in self.server.query(connection, f"SELECT i.name, {asked} ORDER BY c.seqno", [name]):
            indexes.setdefault(index, []).append(column)
        columns, rows = [], self.server.query(connection, "SELECT * FROM pragma_table_xinfo(%s)", [name])
        primary = [row[1] for row in rows if row[5]]
        for _, column, kind, not_null, default, key, hidden in rows:
            counts = primary == [column] and kind.upper() == "INTEGER"
            if counts:
                indexes["the primary key"] = primary
            has_default = counts or default is not None
            columns.append(SqliteColumn(column, kind, "", not (not_null or key), has_default, hidden in (2, 3)))
        uniques = tuple(Unique(index, tuple(names)) for index, names in indexes.items() if None not in names)
        checks = re.search(r"\b(CHECK|REFERENCES)\b", sql, re.IGNORECASE)
        others = [f"index {index}" for index, names in indexes.items() if None in names]
        constraints = *self.triggers(connection, schema, name), *others, *["what it checks"] * bool(checks)
        asked = (
            'SELECT m.name FROM sqlite_master AS m, pragma_foreign_key_list(m.name) WHERE "table" = %s COLLATE NOCASE'
        )
        referenced_by = tuple(table for (table,) in self.server.query(connection, asked, [name]))
        return Target(schema, name, tuple(columns), uniques, constraints, referenced_by)

    def declared(self, connection: Connection, field: pa.Field, *, key: bool) -> str:
        return declared(field)

    def column_types(self, connection: Connection, schema: str, tables: Sequence[str]) -> ColumnTypes:
        asked = "SELECT m.name, c.name, c.type FROM sqlite_master AS m, pragma_table_xinfo(m.name) AS c WHERE m.name IN"
        marks = ", ".join(["%s"] * len(tables))
        return by_table(self.server.query(connection, f"{asked} ({marks}) ORDER BY cid", tables))


class SqliteStaging(Staging[Connection, Target]):
    server: SqliteServer

    def stage(self, plan: Plan[Connection, Target], context: TransactionContext) -> SqliteTransaction:
        columns = self.choose_columns(
            plan.target.columns, context.schema, lambda field: SqliteColumn(field.name, declared(field))
        )
        return SqliteTransaction(self.server, plan.target, columns, self.merge, context)

    def staged(self, connection: Connection, schema: str, prefix: str) -> list[str]:
        ask = "SELECT sql FROM sqlite_master WHERE type = 'table' AND name LIKE 'tpc%'"
        tables = self.server.query(connection, ask)
        ids = [text for (sql,) in tables for text in re.findall(r"/\* (tpc\.[a-z0-9.-]+) \*/", sql)]
        return sorted(text for text in ids if text.startswith(prefix))

    def upsert(self, connection: Connection, move: Move[Target]) -> None:
        """Rows that swap values of another unique index are refused."""
        dialect = self.dialect
        keys, last = dialect.quoted(self.merge.keys), dialect.last(move)
        if marker := self.merge.delete_marker:
            gone = f"({keys}) IN (SELECT {keys} FROM ({last}) WHERE {dialect.quote(marker)} IS TRUE)"
            table = dialect.quote(move.target.schema, move.target.name)
            self.server.execute(connection, f"DELETE FROM {table} WHERE {gone}")
        changed = [dialect.quote(column) for column in move.written if column not in self.merge.keys]
        action = f"UPDATE SET {', '.join(f'{name} = excluded.{name}' for name in changed)}" if changed else "NOTHING"
        rows = f"SELECT {dialect.quoted(move.written)} FROM ({last}) AS last WHERE {dialect.stays('last')}"
        into = dialect.into(move.target, move.written)
        self.server.execute(connection, f"{into} {rows} ON CONFLICT ({keys}) DO {action}")


def declared(field: pa.Field) -> str:
    """The type of a column that is created for a field."""
    return created_type(field.type, _CREATED, "text", "SQLite")


class SqliteSink(TableSink[Connection, Target]):
    """Appends rows, or with `keys` upserts them."""

    system = "SQLite"

    def __init__(
        self,
        path: str | os.PathLike[str],
        table: str,
        *,
        keys: Sequence[str] = (),
        order_by: str | None = None,
        delete_marker: str | None = None,
        create_table: bool = False,
        ledger: str = "tpc_ledger",
        name: str | None = None,
        lock_timeout: float = 30,
    ) -> None:
        merge = MergeOptions.of("upsert" if keys else "append", keys, order_by, delete_marker)
        dialect = SqliteDialect(merge)
        server = SqliteServer(dialect, path, name=name or table, lock_timeout=lock_timeout)
        backend = Backend(SqliteStaging(SqliteCatalog(server, dialect)))
        super().__init__(backend, table, name=name, create_table=create_table, ledger=ledger)
