"""A sink for SQLite by Python's own driver, written from docs/another-database.md."""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from sqlite3 import Connection
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as at

from sinks.arrow import convert
from sinks.arrow.convert import Convert, Holds, Unfit, bits, created_type
from sinks.errors import ConfigurationError
from sinks.sql import table as tables
from sinks.sql.backend import Backend, Move, Plan, RowTransaction, StagedTypes, by_table
from sinks.sql.names import staging_table
from sinks.sql.server import Fault, Kind, Pool, Row
from sinks.sql.sink import TableSink
from sinks.sql.strategies import identity_of
from sinks.sql.table import MergeOptions, Values
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
    "attempt to write a readonly|not authorized|access permission": "right",
    "no such table": "gone",
    "no such column|table .* has no column": "changed",
    "file is not a database|database .*is malformed": "server",
    "string or blob too big": "refused",
}


@dataclass(frozen=True)
class SqliteColumn(tables.Column):
    def conversion(self, arrow: pa.DataType) -> Convert:
        """Days and times become text."""
        holds = next((holds for kind, holds in _HOLDS.items() if re.search(kind, self.type, re.IGNORECASE)), None)
        if holds is None:
            raise Unfit(f"this sink does not know the type {self.type!r}")
        checked = replace(holds, name=self.type).conversion(arrow)
        is_text = at.is_date(arrow) or at.is_timestamp(arrow)
        return (lambda array: checked(array).cast(pa.string())) if is_text else checked


Target: TypeAlias = tables.Target


class SqliteTransaction(RowTransaction):
    """Rows wait in a temporary table, while other tasks write theirs: SQLite has one writer at a time."""

    def __init__(self, backend: SqliteBackend, target: Target, context: TransactionContext) -> None:
        super().__init__(context, identity_of(target.schema, context.transaction_id), target.label, backend.fault)
        self._backend, self._target = backend, target
        columns = backend.staging_columns(target, context.schema, backend.merge_column)
        self._values = Values(context.schema, columns, f"{target.label}: {self.who}", backend.merge)
        self._definitions = ", ".join(f"{backend.quote(c.name)} {c.type}" for c in self._values.columns)
        with self.explained():
            self.connection = backend.connect()
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
        table = self._backend.quote(self._target.schema, staging_table(text))
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


class SqliteBackend(Pool, Backend):
    """One file, in any journal mode. A transaction locks it against all other writers."""

    dialect = "sqlite"
    CHECK = "the path, and your rights in its folder"
    POSITION = "rowid"

    def __init__(self, path: str | os.PathLike[str], merge: MergeOptions, *, name: str, lock_timeout: float) -> None:
        super().__init__({"database": os.path.abspath(path)}, name=name, lock_timeout=lock_timeout)
        self.merge = merge

    # ------------------------------------------------------------------ connections
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

    # ------------------------------------------------------------------ the target
    def locate(self, connection: Connection, table: str) -> tuple[str, str]:
        return "main", table

    def describe(self, connection: Connection, schema: str, name: str) -> Target | None:
        asked = "SELECT name, sql FROM sqlite_master WHERE type IN ('table', 'view') AND name = %s COLLATE NOCASE"
        for known, sql in self.query(connection, asked, [name]):
            if not sql.upper().startswith("CREATE TABLE"):
                raise ConfigurationError(f"{known} is a view or a virtual table: write into a plain one")
            return self._described(connection, schema, known, sql)
        return None

    def _described(self, connection: Connection, schema: str, name: str, sql: str) -> Target:
        indexes: dict[str, list[str]] = {}
        plain = "CASE WHEN NOT i.partial AND c.coll = 'BINARY' THEN c.name END"
        asked = f'{plain} FROM pragma_index_list(%s) AS i, pragma_index_xinfo(i.name) AS c WHERE "unique" AND key'
        for index, column in self.query(connection, f"SELECT i.name, {asked} ORDER BY c.seqno", [name]):
            indexes.setdefault(index, []).append(column)
        columns, rows = [], self.query(connection, "SELECT * FROM pragma_table_xinfo(%s)", [name])
        primary = [row[1] for row in rows if row[5]]
        for _, column, kind, not_null, default, key, hidden in rows:
            counts = primary == [column] and kind.upper() == "INTEGER"
            if counts:
                indexes["the primary key"] = primary
            has_default = counts or default is not None
            columns.append(SqliteColumn(column, kind, "", not (not_null or key), has_default, hidden in (2, 3)))
        uniques = tuple(tables.Unique(index, tuple(names)) for index, names in indexes.items() if None not in names)
        checks = re.search(r"\b(CHECK|REFERENCES)\b", sql, re.IGNORECASE)
        others = [f"index {index}" for index, names in indexes.items() if None in names]
        constraints = *self.triggers(connection, schema, name), *others, *["what it checks"] * bool(checks)
        asked = (
            'SELECT m.name FROM sqlite_master AS m, pragma_foreign_key_list(m.name) WHERE "table" = %s COLLATE NOCASE'
        )
        referenced_by = tuple(table for (table,) in self.query(connection, asked, [name]))
        return Target(schema, name, tuple(columns), uniques, constraints, referenced_by)

    def declared(self, connection: Connection | None, field: pa.Field, *, key: bool) -> str:
        return created_type(field.type, _CREATED, "text", "SQLite")

    # ------------------------------------------------------------------ staging tables
    def stage(self, plan: Plan, context: TransactionContext) -> SqliteTransaction:
        return SqliteTransaction(self, plan.target, context)

    def merge_column(self, field: pa.Field) -> SqliteColumn:
        return SqliteColumn(field.name, self.declared(None, field, key=False))

    def staged_types(self, connection: Connection, schema: str, tables: Sequence[str]) -> StagedTypes:
        asked = "SELECT m.name, c.name, c.type FROM sqlite_master AS m, pragma_table_xinfo(m.name) AS c WHERE m.name IN"
        return by_table(self.query(connection, f"{asked} ({', '.join(['%s'] * len(tables))}) ORDER BY cid", tables))

    def staged(self, connection: Connection, schema: str, prefix: str) -> list[str]:
        tables = self.query(connection, "SELECT sql FROM sqlite_master WHERE type = 'table' AND name LIKE 'tpc%'")
        ids = [text for (sql,) in tables for text in re.findall(r"/\* (tpc\.[a-z0-9.-]+) \*/", sql)]
        return sorted(text for text in ids if text.startswith(prefix))

    # ------------------------------------------------------------------ the move
    def union(self, staging: Sequence[str], columns: str) -> str:
        """SQLite takes 500 terms."""
        united = super().union
        parts = [united(staging[start : start + 500], columns) for start in range(0, len(staging), 500)]
        return parts[0] if len(parts) == 1 else " UNION ALL ".join(f"SELECT * FROM ({part})" for part in parts)

    def into(self, target: Target, written: Sequence[str]) -> str:
        """Also where the table's own constraints say ON CONFLICT IGNORE."""
        return super().into(target, written).replace("INSERT", "INSERT OR ABORT", 1)

    def upsert(self, move: Move) -> None:
        """Rows that swap values of another unique index are refused."""
        keys, last = self.quoted(self.merge.keys), self.last(move)
        if marker := self.merge.delete_marker:
            gone = f"({keys}) IN (SELECT {keys} FROM ({last}) WHERE {self.quote(marker)} IS TRUE)"
            table = self.quote(move.target.schema, move.target.name)
            self.execute(move.connection, f"DELETE FROM {table} WHERE {gone}")
        changed = [self.quote(column) for column in move.written if column not in self.merge.keys]
        action = f"UPDATE SET {', '.join(f'{name} = excluded.{name}' for name in changed)}" if changed else "NOTHING"
        rows = f"SELECT {self.quoted(move.written)} FROM ({last}) AS last WHERE {self.stays('last')}"
        self.execute(move.connection, f"{self.into(move.target, move.written)} {rows} ON CONFLICT ({keys}) DO {action}")


class SqliteSink(TableSink):
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
        backend = SqliteBackend(path, merge, name=name or table, lock_timeout=lock_timeout)
        super().__init__(backend, table, name=name, create_table=create_table, ledger=ledger)
