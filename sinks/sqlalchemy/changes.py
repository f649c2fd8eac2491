"""A target that is altered while the query runs: databases convert what was written for other types, most of them
without a word. So its columns are looked at again in the transaction that writes, under the table's lock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.engine import Connection

from sinks.errors import ConfigurationError
from sinks.sql.engine import MYSQL
from sinks.sql.evolution import holds
from sinks.sqlalchemy.database import is_gtid_unsafe

_COLLATIONS = sa.text(
    "SELECT column_name, collation_name FROM information_schema.columns"
    " WHERE table_schema = coalesce(:schema, database()) AND table_name = :name AND collation_name IS NOT NULL"
)
RECREATED = ("sqlite", "postgresql", *MYSQL)
"""Dialects of which is tested that a staging table shows the types of the target that it was made after."""


def types_of(connection: Connection, columns: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """The types in SQL of columns that the Inspector told."""

    def text(kind: sa.types.TypeEngine[Any]) -> str:
        try:
            return str(kind.compile(dialect=connection.dialect))
        except exc.CompileError:
            return repr(kind)

    return {name: text(column["type"]) for name, column in columns.items()}


def columns_of(connection: Connection, table: sa.TableClause) -> dict[str, Mapping[str, Any]]:
    """As the database has them now."""
    found = sa.inspect(connection).get_columns(table.name, table.schema)
    columns: dict[str, Mapping[str, Any]] = {column["name"]: column for column in found}
    collate({name: column["type"] for name, column in columns.items()}, connection, table)
    return columns


def collate(types: Mapping[str, sa.types.TypeEngine[Any]], connection: Connection, table: sa.TableClause) -> None:
    """Name the collation of each text: MySQL's SHOW CREATE TABLE leaves out what is the table's, and says the character
    set only at times."""
    if connection.dialect.name not in MYSQL:
        return
    for name, collation in connection.execute(_COLLATIONS, {"schema": table.schema, "name": table.name}):
        if isinstance(kind := types.get(name), sa.String):
            kind.charset, kind.collation = None, collation  # type: ignore[attr-defined]


def require_same(
    connection: Connection, table: sa.Table, then: Iterable[tuple[str, str]]
) -> dict[str, Mapping[str, Any]]:
    """Lock the table for rows that were made for columns of the names and types `then`, and return its columns. Raises
    ConfigurationError that says what was changed."""
    then = [one for one in then if one[0] in table.columns]
    refused, written = None, list(dict(then))
    try:
        try:
            _lock(connection, table, written)
        except exc.DBAPIError as error:
            if not is_gtid_unsafe(error):
                raise
            refused = error
        now = columns_of(connection, table)
    except exc.NoSuchTableError:
        raise changed(table, ["it is gone: create it again as it was"]) from None
    types = types_of(connection, now)
    reasons = []
    for name, kind in then:
        if name not in now:
            reasons.append(f'it has no column "{name}" any more: add it, or give it its name back')
        elif not holds(types[name], kind):
            reasons.append(f'its column "{name}" is {types[name]}, and the rows are written for {kind}')
    if connection.dialect.name in MYSQL:
        options = sa.inspect(connection).get_table_options(table.name, table.schema)
        engine = str(options.get(f"{connection.dialect.name}_engine", "InnoDB"))
        if engine.lower() != "innodb":
            reasons.append(f"its engine is {engine}, which has no transactions")
    if refused and not reasons:
        raise refused
    if reasons:
        raise changed(table, reasons)
    return now


def _lock(connection: Connection, table: sa.Table, written: Sequence[str]) -> None:
    """An INSERT of no rows: where databases have a lock for it, nobody alters the table until the transaction ends."""
    nothing = sa.select(*(table.c[name] for name in written)).where(sa.false())
    connection.execute(table.insert().from_select(written, nothing))


def changed(table: sa.Table, reasons: Iterable[str]) -> ConfigurationError:
    return ConfigurationError(
        f"table {table.fullname} was changed while the query ran: {'; '.join(reasons)}. Change it back"
    )
