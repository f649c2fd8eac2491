"""Any database's own way, as far as SQLAlchemy knows it, and a task's rows, which go in by executemany of INSERT.
Strategy `two_phase`: into the target itself, then SQLAlchemy's `prepare`; the driver commits by name. Strategy
`staged`: see there."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.dialects import mysql
from sqlalchemy.engine import Connection, RootTransaction
from sqlalchemy.schema import CreateColumn
from sqlalchemy.types import TypeEngine

from sinks.arrow.convert import RefusedValue
from sinks.errors import BadValue
from sinks.sql import ledger as ledgers
from sinks.sql import target as targets
from sinks.sql.ddl import Ddl, MySqlDdl, PostgresDdl, ShortAddDdl, SqliteDdl
from sinks.sql.dialect import Dialect, Plan, declarations
from sinks.sql.encoder import Encoder
from sinks.sql.errors import Fault
from sinks.sql.mysql import in_full
from sinks.sql.questions import DEFERRED, HOMES
from sinks.sql.transaction import RowTransaction
from sinks.sqlalchemy.database import Database, collate, columns_of, create, has_table, require_same, types_of
from sinks.sqlalchemy.types import Column, declared
from sinks.transaction import Identity, TransactionContext, token

# Dialects whose two-phase transactions are tested here, each with the query that tells whether the server allows them.
_TWO_PHASE = {"postgresql": "SELECT CAST(current_setting('max_prepared_transactions') AS integer) > 0"}
_DDL_IS_UNDONE = ("sqlite", "postgresql")
"""Dialects whose ROLLBACK undoes CREATE TABLE."""


@dataclass(frozen=True, kw_only=True)
class Target(targets.Target[Column]):
    """`types` are those of its columns in SQL. What judges its rows is not asked for: there may be something."""

    table: sa.Table
    types: dict[str, str]
    constraints: tuple[str, ...] = ("what the table has",)


class _Values(Encoder[Column]):
    rows_at_once = 1000
    bytes_at_once = 16 * 2**20
    no_null = "NULL in a column that takes none"

    def of(self, batch: pa.RecordBatch) -> list[tuple[Any, ...]]:
        """The rows, as Python has their values."""
        columns = []
        for column, array in zip(self.columns, self.converted(batch), strict=True):
            try:
                columns.append(array.to_pylist())
            except (ValueError, OverflowError) as error:
                text = isinstance(error, UnicodeDecodeError)
                reason = "the text is not UTF-8" if text else "Python has no such value"
                raise self.bad_value(batch, column.name, RefusedValue(_first_unreadable(array), reason)) from None
        return list(zip(*columns, strict=True))


class InsertTransaction(RowTransaction[Connection]):
    """Memory: the Python values of up to 1,000 rows."""

    def __init__(
        self,
        database: Database,
        context: TransactionContext,
        label: str,
        identity: Identity,
        into: sa.Table,
        columns: Iterable[Column],
        xid: str | None = None,
        *,
        rounding: bool = False,
        create: bool = False,
    ) -> None:
        """`columns` are those of `into` that the batch may fill. With `xid` it is a two-phase transaction. `create`: it
        makes the table, too, which goes when it is thrown away."""
        super().__init__(context, identity)
        self._judged_now = False
        self.where = f"table {label}: {self.who}"
        self.database = database
        self.into, self._undo = into, create and database.dialect not in _DDL_IS_UNDONE
        known = {column.name: column for column in columns}
        self._insert = into.insert()
        filled = [replace(known[name], nullable=bool(into.c[name].nullable)) for name in context.schema.names]
        self._values = _Values(context.schema, filled, f"{label}: {self.who}", rounding=rounding)
        with self.explained():
            self.connection = database.engine.connect()
            try:
                self.transaction: RootTransaction = (
                    database.begin_twophase(self.connection, xid) if xid else self.connection.begin()
                )
                if create:
                    into.create(self.connection, checkfirst=False)
            except BaseException:
                self.connection.close()
                raise

    def explained(self) -> AbstractContextManager[None]:
        return self.database.explained(self.where)

    def write(self, batch: pa.RecordBatch) -> None:
        names, values = batch.schema.names, self._values
        for piece in values.slices(batch):
            rows = [dict(zip(names, row, strict=True)) for row in values.of(piece)]
            where = f"{self.where}, rows {values.rows + 1} to {values.rows + len(rows)},"
            with self.database.explained(where):
                self.connection.execute(self._insert, rows)
            values.rows += len(rows)

    def encode(self, batch: pa.RecordBatch) -> None:
        self._values.of(batch)

    def put(self, batch: pa.RecordBatch) -> None:
        if not self._judged_now:
            self._judge_now()
        before, savepoint = self._values.rows, self.connection.begin_nested()
        try:
            self.write(batch)
        except BadValue:
            self._values.rows = before
            savepoint.rollback()
            raise
        savepoint.commit()

    def _judge_now(self) -> None:
        """Let constraints that wait for the end of the transaction judge each insert."""
        self._judged_now = True
        if self.database.dialect == "postgresql":
            quote = self.database.engine.dialect.identifier_preparer
            with self.explained():
                found = self.database.query(self.connection, DEFERRED, [quote.format_table(self._insert.table)])
                if found:
                    names = ", ".join(".".join(map(quote.quote_identifier, name)) for name in found)
                    self.connection.exec_driver_sql(f"SET CONSTRAINTS {names} IMMEDIATE")

    def finish(self) -> int:
        """Every row is judged already."""
        return self._values.rows

    def prepare(self) -> None:
        self.sealing = True
        assert isinstance(self.transaction, sa.TwoPhaseTransaction)
        with self.explained():
            self.transaction.prepare()
            self.connection.invalidate()  # SQLAlchemy would roll back what is only prepared
        self.connection.close()

    def commit(self) -> None:
        self.sealing = True
        with self.explained():
            self.transaction.commit()
        self.connection.close()

    def close(self) -> None:
        """Nothing is thrown away of what is sealed."""
        with contextlib.suppress(Exception):
            if not self.sealing:
                self.transaction.rollback()
                if self._undo:
                    self.into.drop(self.connection)
                    self.connection.commit()
        with contextlib.suppress(Exception):
            if self.sealing:
                self.connection.invalidate()
            self.connection.close()


_DDL: dict[str, type[Ddl[Connection]]] = {
    "sqlite": SqliteDdl,
    "postgresql": PostgresDdl,
    "mysql": MySqlDdl,
    "mariadb": MySqlDdl,
    "oracle": ShortAddDdl,
    "mssql": ShortAddDdl,
}


class SqlAlchemyDialect(Dialect[Connection, Target, InsertTransaction]):
    CHECK = "address, user, password and rights"
    TWO_PHASE = "two_phase"
    KEY = "xid"

    server: Database

    # ------------------------------------------------------------------ the target
    def locate(self, connection: Connection, table: str) -> tuple[str, str]:
        schema, _, name = table.rpartition(".")
        if not schema and self.server.dialect == "postgresql":
            ((first,),) = self.server.query(connection, "SELECT current_schema()")
            schema = next(iter(self.homes(connection, table)), first)
        return schema, name

    def homes(self, connection: Connection, table: str) -> Sequence[str]:
        if "." in table or self.server.dialect != "postgresql":
            return ()
        return [home for (home,) in self.server.query(connection, HOMES, [table])]

    def describe(self, connection: Connection, schema: str, name: str) -> Target | None:
        if not has_table(connection, name, schema):
            return None
        table = sa.Table(name, sa.MetaData(), schema=schema or None, autoload_with=connection, resolve_fks=False)
        collate({column.name: column.type for column in table.columns}, connection, table)
        columns, collations = [], self._collations(connection, table)
        for column in table.columns:
            if column.name in collations and isinstance(column.type, sa.String):
                column.type.collation = collations[column.name]
            if isinstance(column.type, sa.JSON):
                column.type.none_as_null = True  # a NULL is none, and not the JSON value null
            if isinstance(column.type, mysql.ENUM | mysql.SET):
                column.type = self._enumeration(connection, column, column.type)
            counter = column is table.autoincrement_column
            columns.append(
                Column(
                    column.name,
                    repr(column.type),
                    nullable=bool(column.nullable) and not counter,
                    has_default=column.server_default is not None or counter,
                    generated=column.computed is not None
                    or bool(column.identity is not None and column.identity.always),
                    kind=column.type,
                    dialect=self.server.dialect,
                )
            )
        types = types_of(connection, columns_of(connection, table))
        return Target(schema, name, tuple(columns), table=table, types=types)

    def _enumeration(
        self, connection: Connection, column: sa.Column[Any], kind: mysql.ENUM | mysql.SET
    ) -> mysql.ENUM | mysql.SET:
        written = kind.values if isinstance(kind, mysql.SET) else kind.enums
        names = self.server.quote(column.name), self.server.quote(column.table.schema or "", column.table.name)
        several, query = isinstance(kind, mysql.SET), partial(self.server.query, connection)
        members = in_full(written, *names, several=several, query=query)
        return type(kind)(*members, charset=kind.charset, collation=kind.collation)

    def _collations(self, connection: Connection, table: sa.Table) -> dict[str, str]:
        """By which SQLite compares the keys, which SQLAlchemy does not tell."""
        if self.server.dialect != "sqlite" or not self.merge.keys:
            return {}
        columns = (
            "SELECT c.name, coll FROM pragma_index_list(%s) AS i, pragma_index_xinfo(i.name) AS c"
            " WHERE \"unique\" AND key AND coll <> 'BINARY'"
        )
        found = self.server.query(connection, columns, [table.name])
        return {name: collation for name, collation in found if name in self.merge.keys}

    def similar(self, connection: Connection, schema: str, name: str) -> list[str]:
        return difflib.get_close_matches(name, sa.inspect(connection).get_table_names(schema=schema or None))

    def create(self, connection: Connection, schema: str, name: str, fields: Sequence[pa.Field]) -> None:
        keys = self.merge.keys
        columns = (
            sa.Column(
                field.name,
                kind,
                primary_key=field.name in keys,
                nullable=field.nullable and field.name not in keys,
                autoincrement=False,
            )
            for field, kind in declarations(fields, self._declared)
        )
        collation = "utf8mb4_nopad_bin" if getattr(connection.dialect, "is_mariadb", False) else "utf8mb4_0900_bin"
        table = sa.Table(
            name,
            sa.MetaData(),
            *columns,
            schema=schema or None,
            mysql_engine="InnoDB",
            mariadb_engine="InnoDB",
            mysql_collate=collation,
            mariadb_collate=collation,
        )
        create(connection, table)

    def _declared(self, field: pa.Field) -> TypeEngine[Any]:
        return declared(field.type, self.server.dialect, key=field.name in self.merge.keys)

    @property
    def ddl(self) -> Ddl[Connection]:
        return _DDL.get(self.server.dialect, Ddl)(self.server)

    def definition(self, connection: Connection, target: Target, field: pa.Field) -> str:
        column = sa.Column(field.name, self._declared(field), nullable=True)
        sa.Table(target.name, sa.MetaData(), column)  # the compiler asks what its table is
        return self.server.undoubled(str(CreateColumn(column).compile(dialect=connection.dialect)))

    def problems(self, connection: Connection, target: Target, ledger: str) -> Iterable[str]:
        if self.merge.keys and not self._is_unique(connection, target.table):
            yield f"upsert by ({', '.join(self.merge.keys)}) needs a primary key or unique index on just these columns"
        names: dict[type, str] = {mysql.ENUM: "enum", mysql.SET: "set"}
        yield from self.merge.orders_by_members({c.name: names.get(type(c.kind), "") for c in target.columns})
        engine = target.table.kwargs.get(f"{self.server.dialect}_engine", "InnoDB")
        if engine != "InnoDB":
            yield f"its engine {engine} has no transactions: ALTER TABLE {target.label} ENGINE=InnoDB"
        if self.strategy == "two_phase":
            yield from self._no_two_phase(connection)

    def _is_unique(self, connection: Connection, table: sa.Table) -> bool:
        inspector = sa.inspect(connection)
        uniques = [inspector.get_pk_constraint(table.name, table.schema)["constrained_columns"]]
        uniques += [unique["column_names"] for unique in inspector.get_unique_constraints(table.name, table.schema)]
        indexes = inspector.get_indexes(table.name, table.schema)
        uniques += [[name for name in index["column_names"] if name] for index in indexes if index["unique"]]
        return any(set(columns) == set(self.merge.keys) for columns in uniques)

    def choose(self, connection: Connection, target: Target) -> tuple[str, str]:
        if self.strategy != "auto":
            return self.strategy, "as configured"
        if self.merge.mode == "upsert":
            return "staged", "upserts need it"
        reasons = self._no_two_phase(connection)
        return ("staged", reasons[0]) if reasons else ("two_phase", "the server allows it")

    def _no_two_phase(self, connection: Connection) -> list[str]:
        query = _TWO_PHASE.get(self.server.dialect)
        if query is None:
            other = " or sinks.mysql.MySQLSink" if self.server.dialect in ("mysql", "mariadb") else ""
            return [f'strategy="two_phase" is not for {self.server.dialect}: use strategy="staged"{other}']
        if not connection.scalar(sa.text(query)):
            return ['strategy="two_phase" needs two-phase transactions switched on in the server, or use "staged"']
        return []

    def filled(self, target: Target, batch: pa.Schema) -> list[Column]:
        """The columns in which rows of `batch` are staged: the target's, and those that only the merge looks at."""
        written = self.merge.written(batch.names, target.names)
        extra = declarations((field for field in batch if field.name not in written), self._declared)
        columns = [column for column in target.columns if column.name in written]
        return columns + [Column.of(field.name, kind, self.server.dialect) for field, kind in extra]

    # ------------------------------------------------------------------ errors
    def fault(self, error: Exception) -> Fault | None:
        return self.server.fault(error)

    def unreachable(self, error: Exception) -> str | None:
        known = isinstance(error, exc.OperationalError)
        return f"cannot use {self.server}: {self.server.said(error)}" if known else None

    # ------------------------------------------------------------------ two-phase transactions
    def begin(self, plan: Plan[Connection, Target], context: TransactionContext) -> InsertTransaction:
        xid = self._prefix(context.job, context.sink) + _digest(context.transaction_id, 20)
        target, identity = plan.target, {self.KEY: xid}
        transaction = InsertTransaction(
            self.server, context, target.label, identity, target.table, target.columns, xid, rounding=self.merge.rounds
        )
        with transaction.begun(), transaction.explained():
            then = [(name, target.types[name]) for name in context.schema.names]
            require_same(transaction.connection, target.table, then)
        return transaction

    def _prefix(self, job: str, sink: str) -> str:
        """What the names of a job's and sink's transactions begin with. A server lists those of all its databases,
        hence the database's name; and XA takes no more than 64 bytes, hence hashes."""
        return f"tpc_{_digest(token(job))}_{_digest(f'{self.server.url.database} {token(sink)}')}_"

    def end(
        self,
        connection: Connection,
        ledger: ledgers.Ledger[Connection],
        how: str,
        identity: Identity,
        proof: Mapping[str, object],
    ) -> bool:
        xid = self.key(identity)
        connection.rollback()  # ends what reading began
        try:
            (connection.commit_prepared if how == "COMMIT" else connection.rollback_prepared)(xid, recover=True)
            return True
        except (exc.DBAPIError, self.server.engine.dialect.loaded_dbapi.Error):  # dialects may not wrap the driver's
            connection.invalidate()
            connection.rollback()
            if xid in _listed(connection):
                raise
            return False

    def prepared(self, connection: Connection, schema: str, job: str, sink: str) -> Iterable[Identity]:
        if self.server.dialect not in _TWO_PHASE:
            return []
        return [{self.KEY: xid} for xid in sorted(_listed(connection)) if xid.startswith(self._prefix(job, sink))]

    def evidence(self, transaction: InsertTransaction) -> dict[str, object]:
        return {"transaction_id": transaction.context.transaction_id}


def _digest(text: str, length: int = 10) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:length]


def _listed(connection: Connection) -> set[str]:
    return {xid.decode() if isinstance(xid, bytes) else str(xid) for xid in connection.recover_twophase()}


def _first_unreadable(array: pa.Array) -> int:
    for index, value in enumerate(array):
        try:
            value.as_py()
        except (ValueError, OverflowError):
            return index
    return 0
