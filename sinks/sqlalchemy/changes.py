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
from sinks.sql.evolution import holds

RECREATED = ("sqlite", "postgresql", "mysql", "mariadb")
"""Dialects of which is tested that a staging table shows the types of the target that it was made after."""


def types_of(connection: Connection, columns: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """The types in SQL of columns that the Inspector told."""

    def text(kind: sa.types.TypeEngine[Any]) -> str:
        try:
            return str(kind.compile(dialect=connection.dialect))
        except exc.CompileError:
            return repr(kind)

    return {name: text(column["type"]) for name, column in columns.items()}


def columns_of(connection: Connection, table: sa.Table) -> dict[str, Mapping[str, Any]]:
    """As the database has them now."""
    return {column["name"]: column for column in sa.inspect(connection).get_columns(table.name, table.schema)}


def require_same(connection: Connection, table: sa.Table, then: Mapping[str, str]) -> dict[str, Mapping[str, Any]]:
    """Lock the table for rows that were made for columns of the types `then`, and return its columns. Raises
    ConfigurationError that says what was changed."""
    written = [name for name in then if name in table.columns]
    try:
        _lock(connection, table, written)
        now = columns_of(connection, table)
    except exc.NoSuchTableError:
        raise changed(table, ["it is gone: create it again as it was"]) from None
    types = types_of(connection, now)
    reasons = []
    for name in written:
        if name not in now:
            reasons.append(f'it has no column "{name}" any more: add it, or give it its name back')
        elif not holds(types[name], then[name]):
            reasons.append(f'its column "{name}" is {types[name]}, and the rows are written for {then[name]}')
    if connection.dialect.name in ("mysql", "mariadb"):
        options = sa.inspect(connection).get_table_options(table.name, table.schema)
        engine = str(options.get(f"{connection.dialect.name}_engine", "InnoDB"))
        if engine.lower() != "innodb":
            reasons.append(f"its engine is {engine}, which has no transactions")
    if reasons:
        raise changed(table, reasons)
    return now


def _lock(connection: Connection, table: sa.Table, written: Sequence[str]) -> None:
    """An INSERT of no rows: where databases have a lock for it, nobody alters the table until the transaction ends."""
    nothing = sa.select(*(table.c[name] for name in written)).where(sa.false())
    connection.execute(table.insert().from_select(written, nothing))


def changed(table: sa.Table, reasons: Iterable[str]) -> ConfigurationError:
    return ConfigurationError(f"table {table.fullname} was changed while the query ran: " + "; ".join(reasons))
