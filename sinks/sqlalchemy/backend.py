"""Any database's own way, as far as SQLAlchemy knows it. Strategy `two_phase`: rows go into the target, then
SQLAlchemy's `prepare`; the driver commits by name. Strategy `staged`: SQLAlchemy creates the staging tables, plain
INSERT and DELETE move their rows. The driver's transaction has no DDL, which would commit it in many databases, so the
staging tables are dropped after it: the ledger tells that those that are still there were moved."""

from __future__ import annotations

import difflib
import hashlib
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.dialects import mysql
from sqlalchemy.engine import URL, Connection
from sqlalchemy.types import SchemaType, TypeEngine

from sinks.errors import SchemaMismatch
from sinks.sql import ledger as ledgers
from sinks.sql import target as targets
from sinks.sql.backend import Backend, Plan, StagedTypes, declarations
from sinks.sql.mysql import in_full
from sinks.sql.names import staging_table
from sinks.sql.options import MergeOptions
from sinks.sql.questions import HOMES, MYSQL
from sinks.sql.server import Row
from sinks.sql.staging import identity_of
from sinks.sqlalchemy.database import (
    RECREATED,
    Database,
    changed,
    collate,
    columns_of,
    has_table,
    require_same,
    types_of,
)
from sinks.sqlalchemy.insert import InsertTransaction
from sinks.sqlalchemy.types import SqlAlchemyColumn, declared
from sinks.transaction import Identity, TransactionContext, token

logger = logging.getLogger(__name__)

# Dialects whose two-phase transactions are tested here, each with the query that tells whether the server allows them.
_TWO_PHASE = {"postgresql": "SELECT CAST(current_setting('max_prepared_transactions') AS integer) > 0"}
_ID = "tpc_transaction"
"""A column of a staging table, which is NULL in each row. Its default is the transaction's id: any database keeps that
with the table from its first moment on, and tells it."""
_ROW = "tpc_row"
"""Its primary key: without one PostgreSQL's publications refuse DELETE, and some servers the table."""


_TEXT = sa.String(199).with_variant(mysql.VARCHAR(199, charset="ascii", collation="ascii_bin"), *MYSQL)


@dataclass(frozen=True, kw_only=True)
class SqlAlchemyTarget(targets.Target[SqlAlchemyColumn]):
    """`types` are those of its columns in SQL. What judges its rows is not asked for: there may be something."""

    table: sa.Table
    types: dict[str, str]
    constraints: tuple[str, ...] = ("what the table has",)


class SqlAlchemyBackend(Database, Backend[Connection, SqlAlchemyTarget, InsertTransaction]):
    CHECK = "address, user, password and rights, and that the server runs"
    TWO_PHASE = "two_phase"
    KEY = "xid"

    def __init__(
        self, url: str | URL, options: Mapping[str, Any], merge: MergeOptions, strategy: str, *, name: str
    ) -> None:
        """`url` and `options` are the database's; `name` is the sink's."""
        super().__init__(url, options, name=name)
        self.merge, self.strategy = merge, strategy

    # ------------------------------------------------------------------ the target
    def locate(self, connection: Connection, table: str) -> tuple[str, str]:
        schema, _, name = table.rpartition(".")
        if not schema and self.dialect == "postgresql":
            ((first,),) = self.query(connection, "SELECT current_schema()")
            schema = next(iter(self.homes(connection, table)), first)
        return schema, name

    def homes(self, connection: Connection, table: str) -> Sequence[str]:
        if "." in table or self.dialect != "postgresql":
            return ()
        return [home for (home,) in self.query(connection, HOMES, [table])]

    def describe(self, connection: Connection, schema: str, name: str) -> SqlAlchemyTarget | None:
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
                SqlAlchemyColumn(
                    column.name,
                    repr(column.type),
                    nullable=bool(column.nullable) and not counter,
                    has_default=column.server_default is not None or counter,
                    generated=column.computed is not None
                    or bool(column.identity is not None and column.identity.always),
                    kind=column.type,
                    dialect=self.dialect,
                )
            )
        types = types_of(connection, columns_of(connection, table))
        return SqlAlchemyTarget(schema, name, tuple(columns), table=table, types=types)

    def _enumeration(
        self, connection: Connection, column: sa.Column[Any], kind: mysql.ENUM | mysql.SET
    ) -> mysql.ENUM | mysql.SET:
        written = kind.values if isinstance(kind, mysql.SET) else kind.enums
        names = self.quote(column.name), self.quote(column.table.schema or "", column.table.name)
        several, query = isinstance(kind, mysql.SET), partial(self.query, connection)
        members = in_full(written, *names, several=several, query=query)
        return type(kind)(*members, charset=kind.charset, collation=kind.collation)

    def _collations(self, connection: Connection, table: sa.Table) -> dict[str, str]:
        """By which SQLite compares the keys, which SQLAlchemy does not tell."""
        if self.dialect != "sqlite" or not self.merge.keys:
            return {}
        columns = (
            "SELECT c.name, coll FROM pragma_index_list(%s) AS i, pragma_index_xinfo(i.name) AS c"
            " WHERE \"unique\" AND key AND coll <> 'BINARY'"
        )
        found = self.query(connection, columns, [table.name])
        return {name: collation for name, collation in found if name in self.merge.keys}

    def similar(self, connection: Connection, schema: str, name: str) -> list[str]:
        return difflib.get_close_matches(name, sa.inspect(connection).get_table_names(schema=schema or None))

    def declared(self, connection: Connection, field: pa.Field, *, key: bool) -> str:
        kind = declared(field.type, self.dialect, key=key)
        try:
            return self.undoubled(str(kind.compile(dialect=connection.dialect)))
        except exc.CompileError as error:
            raise SchemaMismatch(f"{self.dialect} has no such type: {error}") from None

    def table_options(self, connection: Connection) -> str:
        if self.dialect not in MYSQL:
            return ""
        mariadb = getattr(connection.dialect, "is_mariadb", False)
        return f" ENGINE=InnoDB COLLATE {'utf8mb4_nopad_bin' if mariadb else 'utf8mb4_0900_bin'}"

    def problems(self, connection: Connection, target: SqlAlchemyTarget, ledger: str) -> Iterable[str]:
        if self.merge.keys and not self._is_unique(connection, target.table):
            yield f"upsert by ({', '.join(self.merge.keys)}) needs a primary key or unique index on just these columns"
        names: dict[type, str] = {mysql.ENUM: "enum", mysql.SET: "set"}
        yield from self.merge.orders_by_members({c.name: names.get(type(c.kind), "") for c in target.columns})
        engine = target.table.kwargs.get(f"{self.dialect}_engine", "InnoDB")
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

    def choose(self, connection: Connection, target: SqlAlchemyTarget) -> tuple[str, str]:
        if self.strategy != "auto":
            return self.strategy, "as configured"
        if self.merge.mode == "upsert":
            return "staged", "upserts need it"
        reasons = self._no_two_phase(connection)
        return ("staged", reasons[0]) if reasons else ("two_phase", "the server allows it")

    def _no_two_phase(self, connection: Connection) -> list[str]:
        query = _TWO_PHASE.get(self.dialect)
        if query is None:
            other = " or sinks.mysql.MySQLSink" if self.dialect in ("mysql", "mariadb") else ""
            return [f'strategy="two_phase" is not for {self.dialect}: use strategy="staged"{other}']
        if not connection.scalar(sa.text(query)):
            return ['strategy="two_phase" needs two-phase transactions switched on in the server, or use "staged"']
        return []

    def filled(self, target: SqlAlchemyTarget, batch: pa.Schema) -> list[SqlAlchemyColumn]:
        """The columns in which rows of `batch` are staged: the target's, and those that only the merge looks at."""
        written = self.merge.written(batch.names, target.names)
        extra = declarations(
            (field for field in batch if field.name not in written), lambda field: declared(field.type, self.dialect)
        )
        columns = [column for column in target.columns if column.name in written]
        return columns + [SqlAlchemyColumn.of(field.name, kind, self.dialect) for field, kind in extra]

    # ------------------------------------------------------------------ errors
    def unreachable(self, error: Exception) -> str | None:
        known = isinstance(error, exc.OperationalError)
        return f"cannot use {self}: {self.said(error)}" if known else None

    # ------------------------------------------------------------------ two-phase transactions
    def begin(self, plan: Plan[Connection, SqlAlchemyTarget], context: TransactionContext) -> InsertTransaction:
        xid = self._prefix(context.job, context.sink) + _digest(context.transaction_id, 20)
        target, identity = plan.target, {self.KEY: xid}
        transaction = InsertTransaction(
            self, context, target.label, identity, target.table, target.columns, xid, rounding=self.merge.rounds
        )
        with transaction.begun(), transaction.explained():
            then = [(name, target.types[name]) for name in context.schema.names]
            require_same(transaction.connection, target.table, then)
        return transaction

    def _prefix(self, job: str, sink: str) -> str:
        """What the names of a job's and sink's transactions begin with. A server lists those of all its databases,
        hence the database's name; and XA takes no more than 64 bytes, hence hashes."""
        return f"tpc_{_digest(token(job))}_{_digest(f'{self.url.database} {token(sink)}')}_"

    def owns(self, job: str, sink: str, name: str) -> bool:
        return name.startswith(self._prefix(job, sink)) or super().owns(job, sink, name)

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
        except (exc.DBAPIError, self.engine.dialect.loaded_dbapi.Error):  # dialects may not wrap the driver's
            connection.invalidate()
            connection.rollback()
            if xid in _listed(connection):
                raise
            return False

    def prepared(self, connection: Connection, schema: str, job: str, sink: str) -> Iterable[Identity]:
        if self.dialect not in _TWO_PHASE:
            return []
        return [{self.KEY: xid} for xid in sorted(_listed(connection)) if xid.startswith(self._prefix(job, sink))]

    def evidence(self, transaction: InsertTransaction) -> dict[str, object]:
        return {"transaction_id": transaction.context.transaction_id}

    # ------------------------------------------------------------------ staged, in the task
    def stage(self, plan: Plan[Connection, SqlAlchemyTarget], context: TransactionContext) -> InsertTransaction:
        target, text = plan.target, context.transaction_id
        name, keys, columns = staging_table(text), self.merge.keys, self.filled(target, context.schema)
        optional = bool(self.merge.delete_marker)  # a row that deletes needs nothing but its key
        staging = sa.Table(
            name,
            sa.MetaData(),
            sa.Column(_ROW, sa.BigInteger().with_variant(sa.Integer, "sqlite"), sa.Identity(), primary_key=True),
            sa.Column(_ID, _TEXT, default=sa.null(), server_default=text),
            *(
                sa.Column(c.name, _copy(c.kind), nullable=c.name not in keys and (c.nullable or optional))
                for c in columns
            ),
            schema=target.schema or None,
            mysql_engine="InnoDB",
            mariadb_engine="InnoDB",
            mysql_collate="utf8mb4_bin",
            mariadb_collate="utf8mb4_bin",
        )
        identity = identity_of(target.schema, text)
        rounding = self.merge.rounds
        return InsertTransaction(
            self, context, target.label, identity, staging, columns, rounding=rounding, create=True
        )

    # ------------------------------------------------------------------ before the decision
    def locked(
        self, connection: Connection, plan: Plan[Connection, SqlAlchemyTarget], staged: StagedTypes
    ) -> SqlAlchemyTarget:
        """Databases may count on, or put the time, in place of a NULL that the table takes no more."""
        target = plan.target
        types = [one for columns in staged.values() for one in columns.items()]
        if connection.dialect.name not in RECREATED:
            types = [(name, target.types[name]) for name, _ in types if name in target.types]
        now = require_same(connection, target.table, dict.fromkeys(types))
        nullable = {c.name for c in target.columns if c.nullable} & {name for name in now if now[name]["nullable"]}
        required = [name for name in self.merge.written(list(dict(types)), target.names) if name not in nullable]
        found = sa.inspect(connection).get_multi_columns(target.schema or None, list(staged)) if required else {}
        for (_, table), columns in found.items():
            for name in [c["name"] for c in columns if c["name"] in required and c["nullable"]]:
                rows = self._union(target, [table], [name, *self._marker])
                missing = rows.c[name].is_(None), *(self._deletes(rows).is_not(sa.true()) for _ in self._marker)
                if connection.execute(sa.select(rows.c[name]).where(*missing).limit(1)).first():
                    raise changed(target.table, [f'its column "{name}" takes no NULL, and rows have NULL there'])
        return target

    def twice(
        self, connection: Connection, target: SqlAlchemyTarget, staging: Sequence[str], columns: Sequence[str]
    ) -> Row | None:
        keys = list(self._union(target, staging, columns).c)
        found = sa.select(*keys, sa.func.count()).group_by(*keys).having(sa.func.count() > 1).limit(1)
        row = connection.execute(found).first()
        return row and tuple(row)

    # ------------------------------------------------------------------ the move
    def append(
        self,
        connection: Connection,
        target: SqlAlchemyTarget,
        staging: Sequence[str],
        written: Sequence[str],
        rows: int,
    ) -> None:
        """By SQLAlchemy, which knows what a dialect needs besides. Not every driver tells how many rows went in."""
        self.count(connection, staging, rows)
        for table in self._tables(target, staging, written):
            connection.execute(target.table.insert().from_select(written, sa.select(table)))

    def upsert(
        self, connection: Connection, target: SqlAlchemyTarget, staging: Sequence[str], written: Sequence[str]
    ) -> None:
        """As any database can: the rows of the target with these keys go, then the last changes come."""
        into, (columns, _) = target.table, self.changes(written)
        tables = self._tables(target, staging, columns)
        if self.merge.keep_newer:
            for table in tables:
                connection.execute(table.delete().where(self._is_older(table, into)))
        for table in tables:
            connection.execute(into.delete().where(self._is_changed(into, table)))
        last = self._last(connection, self._union(target, staging, columns), written)
        connection.execute(into.insert().from_select(written, last))

    def _is_changed(self, into: sa.Table, table: sa.TableClause) -> sa.ColumnElement[bool]:
        """Whether the batch has a change of the row, in the form by which a database looks for the rows of the target
        by its index: a join, or a list of keys."""
        keys = self.merge.keys
        equal = [table.c[key] == into.c[key] for key in keys]
        if self.dialect in MYSQL:
            return sa.and_(*equal)
        if len(keys) == 1 or self.dialect == "sqlite":
            return sa.tuple_(*(into.c[key] for key in keys)).in_(sa.select(*(table.c[key] for key in keys)))
        return sa.exists(sa.select(sa.literal(1)).select_from(table).where(*equal))

    def _is_older(self, table: sa.TableClause, into: sa.Table) -> sa.ColumnElement[bool]:
        """Whether the target has a newer row of a staged row's key."""
        stored, change = into.c[str(self.merge.order_by)], table.c[str(self.merge.order_by)]
        equal = (table.c[key] == into.c[key] for key in self.merge.keys)
        newer = sa.or_(change.is_(None), stored > change)
        return sa.exists(sa.select(sa.literal(1)).select_from(into).where(*equal, stored.is_not(None), newer))

    def _last(self, connection: Connection, rows: sa.Subquery, written: Sequence[str]) -> sa.Select[Any]:
        """The last change of each key, by the greatest `order_by`, NULLs first; of equals a delete wins. Without
        `order_by` each key is there once. MariaDB sorts wide columns by no more than letters where their collation
        tells accents or capitals apart too."""
        columns = [rows.c[name] for name in written]
        deletes: sa.ColumnElement[int] = sa.literal(0)
        if self._marker:
            deletes = sa.case((self._deletes(rows) == sa.literal(True), 1), else_=0)
        if not self.merge.order_by:
            return sa.select(*columns).where(deletes == 0)
        by = rows.c[self.merge.order_by]
        order = [sa.case((by.is_(None), 1), else_=0), by.desc()]
        if self.dialect in MYSQL:
            order.append(sa.func.weight_string(by).desc())
        if self._marker:
            order.append(deletes.desc())
        number = sa.func.row_number().over(partition_by=[rows.c[key] for key in self.merge.keys], order_by=order)
        last = sa.select(*columns, number.label("tpc_place"), deletes.label("tpc_deletes")).subquery()
        return sa.select(*(last.c[name] for name in written)).where(last.c.tpc_place == 1, last.c.tpc_deletes == 0)

    @property
    def _marker(self) -> list[str]:
        return [self.merge.delete_marker] if self.merge.delete_marker else []

    def _deletes(self, rows: sa.Subquery) -> sa.ColumnElement[bool]:
        return sa.type_coerce(rows.c[str(self.merge.delete_marker)], sa.Boolean)

    def _union(self, target: SqlAlchemyTarget, staging: Sequence[str], columns: Sequence[str]) -> sa.Subquery:
        return sa.union_all(*map(sa.select, self._tables(target, staging, columns))).subquery()

    def _tables(self, target: SqlAlchemyTarget, staging: Sequence[str], columns: Sequence[str]) -> list[sa.TableClause]:
        """`staging` may be quoted names: they need no quotes."""
        names, schema = (name.rpartition(".")[2] for name in staging), target.schema or None
        return [sa.table(name, *map(sa.column, columns), schema=schema) for name in names]

    def shown(self, error: Exception, where: str) -> Exception:
        return self.explain(error, where) if isinstance(error, exc.SQLAlchemyError) else error

    def explained(self, target: SqlAlchemyTarget, where: str, tables: Sequence[str]) -> AbstractContextManager[None]:
        return self.in_words(f"table {target.label}: {where}")

    def refusal(self, error: Exception, target: SqlAlchemyTarget, tables: Sequence[str]) -> str | None:
        fault = self.fault(error)
        if fault is None or fault.kind not in ("refused", "changed", "server"):
            return None
        return f": {fault.text}" + (". Change it back" if fault.kind == "changed" else "")

    # ------------------------------------------------------------------ staging tables
    def moved(self, connection: Connection, target: SqlAlchemyTarget, staging: Sequence[str]) -> None:
        """Empty the staging tables, so that this is tried before the decision, too."""
        for table in self._tables(target, staging, ()):
            connection.execute(table.delete())

    def mark_moved(self, connection: Connection, schema: str, names: Sequence[str]) -> None:
        """They are empty."""

    def existing(self, connection: Connection, schema: str, names: Sequence[str]) -> set[str]:
        if len(names) == 1:
            return {name for name in names if has_table(connection, name, schema)}
        return set(names) & set(sa.inspect(connection).get_table_names(schema or None))

    def staged(self, connection: Connection, schema: str, prefix: str) -> list[str]:
        inspector = sa.inspect(connection)
        names = [name for name in inspector.get_table_names(schema or None) if re.fullmatch("tpc_[0-9a-f]{20}", name)]
        tables = inspector.get_multi_columns(schema or None, names) if names else {}
        defaults = [str(c["default"]) for columns in tables.values() for c in columns if c["name"] == _ID]
        ids = [text for default in defaults for text in re.findall(r"tpc\.[a-z0-9.-]+", default)]
        return sorted(text for text in ids if text.startswith(prefix))

    def staged_types(self, connection: Connection, schema: str, tables: Sequence[str]) -> StagedTypes:
        found = {}
        for name in tables:
            columns = columns_of(connection, sa.table(name, schema=schema or None))
            types = types_of(connection, columns)
            found[name] = {name: kind for name, kind in types.items() if name not in (_ROW, _ID)}
        return found


def _digest(text: str, length: int = 10) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:length]


def _listed(connection: Connection) -> set[str]:
    return {xid.decode() if isinstance(xid, bytes) else str(xid) for xid in connection.recover_twophase()}


def _copy(kind: TypeEngine[Any]) -> TypeEngine[Any]:
    if not isinstance(kind, SchemaType):
        return kind
    copy = kind.copy()
    for name in ("charset", "collation"):  # SQLAlchemy forgets those of MySQL's ENUM
        if hasattr(kind, name):
            setattr(copy, name, getattr(kind, name))
    if hasattr(copy, "create_type"):  # PostgreSQL's, which is there
        copy.create_type = False
    return copy
