"""What a table lacks for the columns of a batch, and the statement with which a database adds one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

import pyarrow as pa

from sinks.diagnosis import SchemaChange
from sinks.sql.catalog_queries import MYSQL

SchemaEvolution = Literal["none", "add"]
STEPS: tuple[SchemaEvolution, ...] = ("none", "add")

_ADD = {"postgresql": "ADD COLUMN IF NOT EXISTS", "oracle": "ADD", "mssql": "ADD"}
"""By SQLAlchemy's name for the kind of database; standard SQL for others."""
_LOCKS = {
    "sqlite": "the database for a moment: only its schema is written",
    "postgresql": "ACCESS EXCLUSIVE for a moment: only the catalog is written",
    **dict.fromkeys(
        MYSQL,
        "the table's metadata for a moment: only the dictionary is written (ALGORITHM=INSTANT), unless the table is "
        "compressed or has a full-text index: then all rows are",
    ),
}


def lacking(batch: Iterable[pa.Field], table: Iterable[str]) -> Iterator[pa.Field]:
    """Fields that the table has no column for. One that differs from a column by capitals alone is a mistake more often
    than not, and left to be told."""
    known = {name.lower() for name in table}
    for field in batch:
        if field.name.lower() not in known:
            known.add(field.name.lower())
            yield field


def addition(dialect: str, table: str, column: str, definition: str, *, automatic: bool) -> SchemaChange:
    """`table` is quoted; `definition` is of the column, with its name."""
    statement = f"ALTER TABLE {table} {_ADD.get(dialect, 'ADD COLUMN')} {definition}"
    locks = _LOCKS.get(dialect, "what the database locks for ALTER TABLE: see its manual")
    return SchemaChange(column, statement, "add", locks, automatic)
