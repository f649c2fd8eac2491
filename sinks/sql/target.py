"""The table that rows go to, as its database describes it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from sinks.arrow.convert import Convert
from sinks.errors import TargetChanged
from sinks.sql.names import label


@dataclass(frozen=True)
class Column(ABC):
    """`declared`, or else `type`, is its type in SQL."""

    name: str
    type: str
    declared: str = ""
    nullable: bool = True
    has_default: bool = False
    generated: bool = False

    @property
    def in_sql(self) -> str:
        return self.declared or self.type

    @abstractmethod
    def conversion(self, arrow: pa.DataType) -> Convert:
        """How values of an Arrow type get into the column; those that it would round or cut are refused. Raises
        Unfit."""

    @property
    def staged_as(self) -> str:
        """Its type as staging tables show it."""
        return self.in_sql


@dataclass(frozen=True)
class Unique:
    """A unique index over whole columns. `arbiter`: upserts can go by it (it is not deferred)."""

    name: str
    columns: tuple[str, ...]
    arbiter: bool = True


@dataclass(frozen=True)
class Target:
    """`schema` is "" for the one that the database takes when none is named. `constraints` names what judges a row
    there and cannot be judged in a staging table: foreign keys, triggers and the like. `triggers` are what the database
    runs for each row when the query looks at the table first, with their definitions: what they do is meant."""

    schema: str
    name: str
    columns: tuple[Any, ...]
    uniques: tuple[Unique, ...] = ()
    constraints: tuple[str, ...] = ()
    referenced_by: tuple[str, ...] = ()
    triggers: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def label(self) -> str:
        return label(self.schema, self.name)

    @property
    def names(self) -> list[str]:
        return [column.name for column in self.columns]

    def require_meant(self, triggers: Mapping[str, str]) -> None:
        """`triggers` are those of now. Raises TargetChanged if there is one that nobody has seen at the start."""
        new = sorted(name for name, definition in triggers.items() if self.triggers.get(name) != definition)
        if new:
            raise TargetChanged(
                f"table {self.label} was changed while the query ran: {' and '.join(new)} is new or was altered, and "
                "may change or drop rows. Remove it, or start the query again, which accepts it"
            )

    @property
    def judges(self) -> bool:
        """Whether the table may refuse rows that staging tables take."""
        return bool(self.uniques or self.constraints)

    def is_unique(self, keys: tuple[str, ...]) -> bool:
        """Whether upserts can go by these keys."""
        return any(set(unique.columns) == set(keys) and unique.arbiter for unique in self.uniques)

    def unfit(self, written: Sequence[str], staged: Iterable[tuple[str, str]] = ()) -> Iterator[str]:
        """Why rows of the columns `written` cannot go in as they are, and what to change back. `staged`: columns with
        the types that their staging tables have."""
        now = {column.name: column for column in self.columns}
        for name in written:
            if name not in now:
                yield f'it has no column "{name}" any more: name it so again, or add it'
            elif now[name].generated:
                yield f'its column "{name}" is generated now: make it a plain one again'
        for name, kind in staged:
            column = now.get(name) if name in written else None
            if column and not column.generated and column.staged_as != kind:
                again = "change it back, and again when the rows are in"
                yield f'its column "{name}" was {kind} and is {column.staged_as}: {again}'
        for column in self.columns:
            if column.name not in written and not (column.nullable or column.has_default or column.generated):
                yield f'its column "{column.name}" is NOT NULL, and the rows have none: give it a default'

    def no_index_for(self, keys: tuple[str, ...]) -> Iterator[str]:
        if keys and not self.is_unique(keys):
            yield f"it has no unique index on ({', '.join(keys)}) any more: create it"
