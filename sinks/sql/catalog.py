"""The table that rows go to, as its database describes it.

This includes what is created or altered there.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import ClassVar, Generic, TypeAlias, TypeVar

import pyarrow as pa

from sinks._util.log import get_logger
from sinks.errors import ConfigurationError, SchemaMismatch
from sinks.sql.databases import DATABASES, TRIGGERS
from sinks.sql.dialect import Dialect, TargetT
from sinks.sql.names import label
from sinks.sql.server import ConnectionT, Row, Server
from sinks.sql.table import Target, mismatches

logger = get_logger(__name__)

Declared = TypeVar("Declared")
ItemT = TypeVar("ItemT")
LEDGER_PRIVILEGES = ("SELECT", "INSERT", "DELETE")
"""The privileges on the ledger that the sink's user needs."""
ColumnTypes: TypeAlias = Mapping[str, Mapping[str, str]]
"""The columns of each table, in order, each with its type as the server writes it."""


class Catalog(ABC, Generic[ConnectionT, TargetT]):
    """Find, describe, create and alter the tables of one database."""

    NO_TABLE_HINT: ClassVar[str] = ""
    """The words that follow "there is no table" in messages."""

    def __init__(self, server: Server[ConnectionT], dialect: Dialect[TargetT]) -> None:
        self.server = server
        self.dialect = dialect
        self.merge = dialect.merge

    # ------------------------------------------------------------------ what is there
    @abstractmethod
    def locate(self, connection: ConnectionT, table: str) -> tuple[str, str]:
        """Find schema and name of the table, which need not exist.

        Raises ConfigurationError if `table` is no table name.
        """

    @abstractmethod
    def describe(self, connection: ConnectionT, schema: str, name: str) -> TargetT | None:
        """Read the table; return None if there is none.

        Raises ConfigurationError if it is something other than a table.
        """

    @abstractmethod
    def column_types(
        self, connection: ConnectionT, schema: str, tables: Sequence[str]
    ) -> ColumnTypes:
        """Read the columns of those of the tables that exist, with their types.

        A column that only a staging table itself needs is left out.
        """

    def existing(self, connection: ConnectionT, schema: str, names: Sequence[str]) -> set[str]:
        """Return those of the names that a table has, be it a staging table or another table."""
        return set(self.column_types(connection, schema, names))

    def place(self, connection: ConnectionT, schema: str, name: str) -> tuple[object, ...] | None:
        """Return what tells a table from the tables of all databases, as the server says it.

        Return None for a `dialect` that `DATABASES` does not cover, because it is not known how to
        ask.
        """
        ask = DATABASES.get(self.dialect.name)
        return (*self.server.query(connection, ask)[0], schema, name) if ask else None

    def triggers(self, connection: ConnectionT, schema: str, name: str) -> Mapping[str, str]:
        """Read what the database runs for the rows of a table and may alter them, with definitions.

        The result is empty for a `dialect` that `TRIGGERS` does not cover, because it is not known
        how to ask.
        """
        ask = TRIGGERS.get(self.dialect.name)
        return dict(self.server.query(connection, ask, [schema, name])) if ask else {}

    def require_known_triggers(self, connection: ConnectionT, target: TargetT) -> None:
        """Raise TargetChanged if triggers of the table are new or altered.

        The error comes at the latest with the next statement.
        """
        if ask := TRIGGERS.get(self.dialect.name):
            asked = [target.schema, target.name]
            self.server.defer(
                connection, ask, asked, lambda rows: target.require_known_triggers(dict(rows))
            )

    # ------------------------------------------------------------------ what is wrong with it
    def problems(self, connection: ConnectionT, target: TargetT, ledger: str) -> Iterable[str]:
        """Return why the sink cannot write into this table, or have this ledger.

        These are problems in one kind of database; those that all kinds share are in
        `Backend.problems`. By default there are none.
        """
        return ()

    def mismatches(self, batch: pa.Schema, target: TargetT) -> list[str]:
        """List every reason why the columns do not fit."""
        return mismatches(batch, target.columns)

    def missing_privileges(
        self,
        connection: ConnectionT,
        target: TargetT,
        privileges: Sequence[str],
        ledgers: Iterable[str] = (),
        create: bool = False,
    ) -> Iterable[str]:
        """Return the privileges that the user lacks, and how to give them.

        The user needs `privileges` on the target, those of `LEDGER_PRIVILEGES` on the ledgers,
        and, with `create`, the privilege to create tables. By default none is missing.
        """
        return ()

    # ------------------------------------------------------------------ creating and altering
    @abstractmethod
    def declared(self, connection: ConnectionT, field: pa.Field, *, key: bool) -> str:
        """Choose the type of a column that is created for a field.

        It is written as CREATE TABLE and ADD COLUMN have it. `key` says that the column gets an
        index. Raises SchemaMismatch for a field whose type has no counterpart, or whose name the
        server would not keep.
        """

    def definition(self, connection: ConnectionT, target: TargetT, field: pa.Field) -> str:
        """Write name and type of a nullable column for ADD COLUMN.

        Raises SchemaMismatch.
        """
        return self.dialect.column(
            field.name, self.declared(connection, field, key=False), nullable=True
        )

    def table_options(self, connection: ConnectionT) -> str:
        """Write what follows the columns in CREATE TABLE; by default nothing does."""
        return ""

    def create(
        self, connection: ConnectionT, schema: str, name: str, fields: Sequence[pa.Field]
    ) -> None:
        """Create the table, with the keys as primary key.

        Raises ConfigurationError with the server's words.
        """
        keys = self.merge.keys
        kinds = declarations(
            fields, lambda field: self.declared(connection, field, key=field.name in keys)
        )
        columns = [
            self.dialect.column(f.name, kind, nullable=f.nullable and f.name not in keys)
            for f, kind in kinds
        ]
        if keys:
            columns.append(f"PRIMARY KEY ({self.dialect.quoted(keys)})")
        try:
            self.create_table(connection, schema, name, columns, self.table_options(connection))
        except Exception as error:
            fault = self.server.fault(error)
            if fault is None or fault.kind == "blocked":
                raise
            raise ConfigurationError(
                f"cannot create table {label(schema, name)} at {self.server}: {fault.text}"
            ) from error

    def create_table(
        self,
        connection: ConnectionT,
        schema: str,
        name: str,
        columns: Sequence[str],
        options: str = "",
    ) -> None:
        """Create a table, unless somebody else does at the same moment.

        Call it outside a transaction.
        """
        table = self.dialect.quote(schema, name)
        try:
            with self.server.transaction(connection):
                self.server.execute(
                    connection, f"CREATE TABLE {table} ({', '.join(columns)}){options}"
                )
        except Exception:
            there = False
            with contextlib.suppress(Exception):
                there = bool(self.existing(connection, schema, [name]))
            if not there:
                raise
            logger.debug("somebody else created %s at the same time", table)


def order_by_foreign_keys(
    items: Iterable[ItemT], target_of: Callable[[ItemT], Target]
) -> list[ItemT]:
    """Sort items so that each table comes after the tables that it refers to.

    `target_of` returns the table of an item. The order depends on nothing but the tables, so two
    processes never lock the same tables in two orders. Where foreign keys form a circle, one of
    them refers to a table that comes later.
    """
    by_table: dict[tuple[str, str], list[ItemT]] = {}
    referred: dict[tuple[str, str], set[tuple[str, str]]] = {}
    for item in items:
        target = target_of(item)
        table = target.schema, target.name
        by_table.setdefault(table, []).append(item)
        referred[table] = {(key.schema, key.table) for key in target.foreign_keys}
    ordered: list[ItemT] = []

    def visit(table: tuple[str, str]) -> None:
        if table in referred:
            for parent in sorted(referred.pop(table)):
                visit(parent)
            ordered.extend(by_table[table])

    for table in sorted(by_table):
        visit(table)
    return ordered


def declarations(
    fields: Iterable[pa.Field], declare: Callable[[pa.Field], Declared]
) -> list[tuple[pa.Field, Declared]]:
    """Pair each field with the type that a created table has for it.

    Raises SchemaMismatch, which names the column.
    """
    declared = []
    for field in fields:
        try:
            declared.append((field, declare(field)))
        except SchemaMismatch as unfit:
            raise SchemaMismatch(f'column "{field.name}": {unfit}') from None
    return declared


def by_table(rows: Iterable[Row]) -> ColumnTypes:
    """Group rows of table, column and type by their table."""
    tables: dict[str, dict[str, str]] = {}
    for table, column, kind in rows:
        tables.setdefault(table, {})[column] = kind
    return tables
