"""What the sink asks of the database before it writes: can the table take the rows, and by which strategy."""

from __future__ import annotations

import difflib
import hashlib
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.types import SchemaType, TypeEngine

from sinks.sql import planning
from sinks.sql.values import mismatches
from sinks.sqlalchemy import ledger as ledgers
from sinks.sqlalchemy.database import Database
from sinks.sqlalchemy.ledger import Ledger
from sinks.sqlalchemy.types import Column, conversion, declared

logger = logging.getLogger(__name__)

PARTICIPANT = "tpc_participant"

# Dialects whose two-phase transactions are tested here, each with the query that tells whether the server allows them.
TWO_PHASE = {"postgresql": "SELECT CAST(current_setting('max_prepared_transactions') AS integer) > 0"}


@dataclass(frozen=True)
class Target:
    table: sa.Table
    columns: dict[str, Column]

    @property
    def label(self) -> str:
        return self.table.fullname

    @property
    def names(self) -> list[str]:
        return list(self.columns)


@dataclass(frozen=True)
class Plan:
    """What the driver found out about the database, carried to the tasks in the sink's pickle. `columns` are those that
    tasks fill; `staging` is None with the strategy `two_phase`, and in recovery before the first batch."""

    target: Target
    ledger: Ledger
    strategy: str
    columns: dict[str, Column]
    staging: sa.Table | None = None


@dataclass(frozen=True)
class Planner(planning.Planner):
    database: Database

    LEDGER = Ledger

    def check(self, connection: Connection, batch: pa.Schema) -> Plan:
        with self.database.explained(f"sink {self.sink!r}"):
            plan: Plan = super().check(connection, batch)
            return plan

    def locate(self, connection: Connection) -> tuple[str | None, str]:
        schema, _, name = self.table.rpartition(".")
        return schema or None, name

    def describe(self, connection: Connection, schema: str | None, name: str) -> Target | None:
        if not sa.inspect(connection).has_table(name, schema=schema):
            return None
        table = sa.Table(name, sa.MetaData(), schema=schema, autoload_with=connection, resolve_fks=False)
        for column in table.columns:
            if isinstance(column.type, sa.JSON):
                column.type.none_as_null = True  # a NULL is none, and not the JSON value null
        columns = {
            column.name: Column(
                column.name,
                column.type,
                self.database.dialect,
                bool(column.nullable) and column is not table.autoincrement_column,
                has_default=column.server_default is not None or column is table.autoincrement_column,
                generated=column.computed is not None or bool(column.identity is not None and column.identity.always),
            )
            for column in table.columns
        }
        return Target(table, columns)

    def similar(self, connection: Connection, schema: str | None, name: str) -> list[str]:
        return difflib.get_close_matches(name, sa.inspect(connection).get_table_names(schema=schema))

    def mismatches(self, batch: pa.Schema, target: Target) -> list[str]:
        return mismatches(batch, list(target.columns.values()), conversion)

    def problems(self, connection: Connection, target: Target) -> Iterable[str]:
        yield from self._key_problems(connection, target.table)
        engine = target.table.kwargs.get(f"{self.database.dialect}_engine", "InnoDB")
        if engine != "InnoDB":
            yield f"its engine {engine} has no transactions: ALTER TABLE {target.label} ENGINE=InnoDB"
        if self.wanted == "two_phase":
            yield from self._two_phase_problems(connection)

    def plan(self, connection: Connection, target: Target, batch: pa.Schema | None) -> Plan:
        strategy = self._strategy(connection)
        logger.info("sink %r writes to %s by strategy %s", self.sink, target.label, strategy)
        ledger = Ledger.ensure(connection, target.table.schema, self.ledger)
        if strategy == "two_phase" or batch is None:
            return Plan(target, ledger, strategy, target.columns)
        filled = {name: target.columns[name] for name in self.merge.written(batch.names, target.names)}
        for field in batch:
            if field.name not in filled:
                filled[field.name] = Column(field.name, self._type_of(field), self.database.dialect)
        staging = self._staging(target.table, filled)
        ledgers.create(connection, staging)
        return Plan(target, ledger, strategy, filled, staging)

    def _strategy(self, connection: Connection) -> str:
        if self.wanted != "auto":
            return self.wanted
        able = self.merge.mode == "append" and not self._two_phase_problems(connection)
        return "two_phase" if able else "staged"

    def _two_phase_problems(self, connection: Connection) -> list[str]:
        query = TWO_PHASE.get(self.database.dialect)
        if query is None:
            other = " or sinks.mysql.MySQLSink" if self.database.dialect in ("mysql", "mariadb") else ""
            return [f'strategy="two_phase" is not for {self.database.dialect}: use strategy="staged"{other}']
        if not connection.scalar(sa.text(query)):
            return ['strategy="two_phase" needs two-phase transactions switched on in the server, or use "staged"']
        return []

    def _key_problems(self, connection: Connection, target: sa.Table) -> Iterable[str]:
        if not self.merge.keys:
            return
        inspector = sa.inspect(connection)
        uniques = [inspector.get_pk_constraint(target.name, target.schema)["constrained_columns"]]
        uniques += [unique["column_names"] for unique in inspector.get_unique_constraints(target.name, target.schema)]
        indexes = inspector.get_indexes(target.name, target.schema)
        uniques += [[name for name in index["column_names"] if name] for index in indexes if index["unique"]]
        if not any(set(columns) == set(self.merge.keys) for columns in uniques):
            yield f"upsert by ({', '.join(self.merge.keys)}) needs a primary key or unique index on just these columns"

    def declared(self, field: pa.Field) -> TypeEngine[Any]:
        return declared(field.type, self.database.dialect, key=field.name in self.merge.keys)

    def create(
        self,
        connection: Connection,
        schema: str | None,
        name: str,
        columns: Sequence[tuple[pa.Field, TypeEngine[Any]]],
    ) -> None:
        keys = self.merge.keys
        made = (
            sa.Column(
                field.name,
                kind,
                primary_key=field.name in keys,
                nullable=field.nullable and field.name not in keys,
                autoincrement=False,
            )
            for field, kind in columns
        )
        ledgers.create(connection, sa.Table(name, sa.MetaData(), *made, schema=schema))

    def _staging(self, target: sa.Table, columns: dict[str, Column]) -> sa.Table:
        """The staging table of this sink for rows of these columns, shared by all participants; another one for other
        columns, so that what is staged before a change of schema stays as it is."""
        layout = repr((self.sink, target.fullname, [(c.name, c.type, self._required(c)) for c in columns.values()]))
        name = f"tpc_{hashlib.sha256(layout.encode()).hexdigest()[:20]}"
        return sa.Table(
            name,
            sa.MetaData(),
            sa.Column(PARTICIPANT, sa.String(32), nullable=False),
            *(sa.Column(c.name, _copy(c.kind), nullable=not self._required(c)) for c in columns.values()),
            sa.Index(f"{name}_by", PARTICIPANT, *self.merge.keys),
            schema=target.schema,
            mysql_engine="InnoDB",
            mariadb_engine="InnoDB",
        )

    def _required(self, column: Column) -> bool:
        """A row that deletes needs nothing but its key."""
        return column.name in self.merge.keys or (not column.nullable and not self.merge.delete_marker)


def _copy(kind: TypeEngine[Any]) -> TypeEngine[Any]:
    return kind.copy() if isinstance(kind, SchemaType) else kind
