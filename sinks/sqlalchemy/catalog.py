"""SQLAlchemy's description of the target, with what only SQLite and PostgreSQL themselves tell."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.engine import Connection
from sqlalchemy.types import TypeEngine

from sinks.errors import SchemaMismatch
from sinks.sql.catalog import Catalog, ColumnTypes, by_table
from sinks.sql.databases import (
    COLLATIONS,
    HOMES,
    MYSQL,
    POSTGRES_FOREIGN_KEYS,
    POSTGRES_OBSTACLES,
    lacks_characters,
)
from sinks.sql.server import ambiguous
from sinks.sql.table import ForeignKey
from sinks.sqlalchemy.dialect import ROW, SqlAlchemyDialect
from sinks.sqlalchemy.server import SqlAlchemyServer
from sinks.sqlalchemy.types import SqlAlchemyColumn, SqlAlchemyTarget, declared

ID = "tpc_transaction"
"""A column of a staging table, which is NULL in each row. Its default is the transaction's id: any
database keeps that with the table from its first moment on, and tells it."""
_COLLATIONS = """
SELECT list.name, part.name, part.coll
  FROM pragma_index_list(%s, %s) AS list, pragma_index_xinfo(list.name) AS part
 WHERE list."unique" AND NOT list.partial AND part.key
"""
"""The query, in SQLite, for the collations of unique indexes and their columns, which SQLAlchemy
does not tell. The parameters are the table's name and schema."""
_HEIRS = """
UNION ALL
SELECT 'the table ' || c.oid::regclass ||
  ' inherits from it, whose rows no index of it binds: upsert into one without'
  FROM pg_inherits JOIN pg_class c ON c.oid = inhrelid JOIN target ON inhparent = target.oid
    WHERE NOT relispartition
"""
_VANISHING = re.compile(r"\bON\s+CONFLICT\s+(?:IGNORE|REPLACE|ROLLBACK)\b", re.IGNORECASE)


class SqlAlchemyCatalog(Catalog[Connection, SqlAlchemyTarget]):
    NO_TABLE_HINT = (
        " (a name is read as it is, without quotes; what is before its last dot is the schema)"
    )

    server: SqlAlchemyServer
    dialect: SqlAlchemyDialect

    # ------------------------------------------------------------------ what is there
    def locate(self, connection: Connection, table: str) -> tuple[str, str]:
        schema, _, name = table.rpartition(".")
        if schema or self.dialect.name != "postgresql":
            return schema, name
        schemas = [schema for (schema,) in self.server.query(connection, HOMES, [name])]
        if len(schemas) > 1:
            raise ambiguous(table, schemas)
        return (schemas or self.server.query(connection, "SELECT current_schema()")[0])[0], name

    def describe(self, connection: Connection, schema: str, name: str) -> SqlAlchemyTarget | None:
        if not sa.inspect(connection).has_table(name, schema or None):
            return None
        table = sa.Table(
            name, sa.MetaData(), schema=schema or None, autoload_with=connection, resolve_fks=False
        )
        collations = dict[str, str]()
        if self.dialect.name == "sqlite":
            uniques = by_table(
                self.server.query(connection, _COLLATIONS, [name, schema or "main"])
            ).values()
            ways = [way for of in uniques if set(of) == set(self.merge.keys) for way in of.items()]
            collations |= sorted(ways, key=lambda way: way[1] != "BINARY")
        columns = []
        for column in table.columns:
            declared = self._in_sql(column.type)
            kind = repr(column.type)
            if isinstance(column.type, sa.String) and column.name in collations:  # equal keys
                column.type.collation = collations[column.name]
            if isinstance(column.type, sa.JSON):
                column.type.none_as_null = True  # a NULL is none, and not the JSON value null
            is_rowid = self.dialect.name == "sqlite" and list(table.primary_key) == [column]
            counter = column is table.autoincrement_column or (
                is_rowid and isinstance(column.type, sa.Integer)
            )
            columns.append(
                SqlAlchemyColumn(
                    column.name,
                    kind,
                    declared,
                    nullable=bool(column.nullable) and not counter,
                    has_default=column.server_default is not None or counter,
                    generated=column.computed is not None
                    or bool(column.identity is not None and column.identity.always),
                    kind=column.type,
                    dialect=self.dialect.name,
                )
            )
        return SqlAlchemyTarget(
            schema,
            name,
            columns=tuple(columns),
            foreign_keys=tuple(self._foreign_keys(connection, schema, name)),
            table=table,
            lacks_characters=self._lacks_characters(connection, schema, name),
        )

    def _lacks_characters(self, connection: Connection, schema: str, name: str) -> bool:
        if self.dialect.name == "postgresql":
            return self.server.query(connection, "SELECT current_setting('server_encoding')") != [
                ("UTF8",)
            ]
        if self.dialect.name in MYSQL:
            return lacks_characters(
                way for (way,) in self.server.query(connection, COLLATIONS, [schema, name])
            )
        return False

    def _foreign_keys(self, connection: Connection, schema: str, name: str) -> Iterator[ForeignKey]:
        if self.dialect.name == "postgresql":
            for key in self.server.query(connection, POSTGRES_FOREIGN_KEYS, [schema, name]):
                yield ForeignKey(*key)
            return
        inspector = sa.inspect(connection)
        if self.dialect.name == "sqlite":
            # SQLite finds a table by another spelling, and its foreign keys only by its own
            names = inspector.get_table_names(schema or None)
            name = next((each for each in names if each.lower() == name.lower()), name)
        for found in inspector.get_foreign_keys(name, schema or None):
            unnamed = (
                f"({', '.join(found['constrained_columns'])}) REFERENCES {found['referred_table']}"
            )
            yield ForeignKey(
                found["name"] or unnamed,
                found["referred_schema"] or schema,
                found["referred_table"],
            )

    def place(self, connection: Connection, schema: str, name: str) -> tuple[object, ...] | None:
        if self.dialect.name == "sqlite":
            schema = schema.lower() or "main"
            ask = "SELECT file FROM pragma_database_list WHERE lower(name) = %s"
            return self.dialect.name, *self.server.query(connection, ask, [schema]), name.lower()
        known = super().place(connection, schema, name)
        return known or (
            str(self.server.url.set(username=None, password=None, query={})),
            schema,
            name,
        )

    def column_types(
        self, connection: Connection, schema: str, tables: Sequence[str]
    ) -> ColumnTypes:
        existing = (
            sa.inspect(connection).get_multi_columns(schema or None, tables) if tables else {}
        )
        return {
            str(table): {
                c["name"]: self._in_sql(c["type"]) for c in columns if c["name"] not in (ROW, ID)
            }
            for (_, table), columns in existing.items()
        }

    # ------------------------------------------------------------------ what is wrong with it
    def problems(
        self, connection: Connection, target: SqlAlchemyTarget, ledger: str
    ) -> Iterator[str]:
        yield from self.obstacles(connection, target)

    def obstacles(self, connection: Connection, target: SqlAlchemyTarget) -> list[str]:
        if self.dialect.name == "sqlite":
            master = self.dialect.quote(target.schema, "sqlite_master")
            ask = (
                f"SELECT type, sql FROM {master} WHERE type IN ('table', 'view')"
                " AND name = %s COLLATE NOCASE"
            )
            found = self.server.query(connection, ask, [target.name])
            views = [
                "it is a view: name the table behind it" for kind, _ in found if kind == "view"
            ]
            clauses = [clause for _, statement in found for clause in _VANISHING.findall(statement)]
            return views + [
                f"a constraint has {clause}, by which rows vanish: leave that out"
                for clause in clauses
            ]
        if self.dialect.name != "postgresql":
            return []
        ask = POSTGRES_OBSTACLES + _HEIRS * bool(self.merge.keys)
        return [
            text for (text,) in self.server.query(connection, ask, [target.schema, target.name])
        ]

    # ------------------------------------------------------------------ creating and altering
    def declared(self, connection: Connection, field: pa.Field, *, key: bool) -> str:
        kind = declared(field.type, self.dialect.name, key=key)
        try:
            return self.dialect.undoubled(str(kind.compile(dialect=connection.dialect)))
        except exc.CompileError as error:
            raise SchemaMismatch(f"{self.dialect.name} has no such type: {error}") from None

    def create_table(
        self,
        connection: Connection,
        schema: str,
        name: str,
        columns: Sequence[str],
        options: str = "",
    ) -> None:
        self.server.engine.dialect.validate_identifier(name)  # a server may cut what is too long
        super().create_table(connection, schema, name, columns, options)

    def _in_sql(self, kind: TypeEngine[Any]) -> str:
        try:
            return str(kind.compile(dialect=self.server.engine.dialect))
        except exc.CompileError:
            return repr(kind)
