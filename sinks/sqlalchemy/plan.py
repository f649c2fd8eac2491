"""What the sink asks of the database before it writes: can the table take the rows, and by which strategy."""

from __future__ import annotations

import difflib
import hashlib
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.types import SchemaType, TypeEngine

from sinks.errors import ConfigurationError, SchemaMismatch
from sinks.sql.options import MergeOptions
from sinks.sql.values import Unfit, mismatches
from sinks.sqlalchemy import ledger as ledgers
from sinks.sqlalchemy.database import Database
from sinks.sqlalchemy.ledger import Ledger
from sinks.sqlalchemy.types import Column, conversion, declared

logger = logging.getLogger(__name__)

PARTICIPANT = "tpc_participant"

# Dialects whose two-phase transactions are tested here, each with the query that tells whether the server allows them.
TWO_PHASE = {"postgresql": "SELECT CAST(current_setting('max_prepared_transactions') AS integer) > 0"}


@dataclass(frozen=True)
class Plan:
    """What the driver found out about the database, carried to the tasks in the sink's pickle. `staging` is None with
    the strategy `two_phase`, and in recovery before the first batch."""

    target: sa.Table
    ledger: Ledger
    strategy: Literal["two_phase", "staged"]
    columns: dict[str, Column]
    staging: sa.Table | None = None


@dataclass(frozen=True)
class Planner:
    """The sink as the user configured it."""

    sink: str
    table: str
    database: Database
    wanted: Literal["auto", "two_phase", "staged"]
    merge: MergeOptions
    create_table: bool
    ledger: str

    @property
    def name(self) -> str:
        return self.table.rpartition(".")[2]

    @property
    def schema(self) -> str | None:
        return self.table.rpartition(".")[0] or None

    def check(self, connection: Connection, schema: pa.Schema) -> Plan:
        """Find the table (or create it) and see whether it can take rows of `schema`. Raises ConfigurationError
        (SchemaMismatch if it is only about columns) with all reasons at once."""
        if not sa.inspect(connection).has_table(self.name, schema=self.schema):
            self._create(connection, schema)
        target = self._reflect(connection)
        columns = self._columns(target)
        written = self.merge.written(schema.names, list(columns))
        batch = pa.schema([field for field in schema if field.name in written])
        problems = mismatches(batch, list(columns.values()), conversion)
        others = [*self.merge.problems(schema), *self._key_problems(connection), *self._engine_problems(target)]
        others += self._two_phase_problems(connection) if self.wanted == "two_phase" else []
        if problems or others:
            kind = ConfigurationError if others else SchemaMismatch
            reasons = "".join(f"\n  - {reason}" for reason in [*others, *problems])
            raise kind(f"sink {self.sink!r} cannot write to table {target.fullname} ({self.database}):{reasons}")
        strategy = self._strategy(connection)
        logger.info("sink %r writes to %s by strategy %s", self.sink, target.fullname, strategy)
        ledger = Ledger.ensure(connection, self.ledger, self.schema)
        if strategy == "two_phase":
            return Plan(target, ledger, strategy, columns)
        filled = {name: columns[name] for name in written}
        for field in schema:
            if field.name not in written:
                filled[field.name] = self._extra(field)
        staging = self._staging(target, filled)
        ledgers.create(connection, staging)
        return Plan(target, ledger, strategy, filled, staging)

    def load(self, connection: Connection) -> Plan:
        """The plan without a look at any rows. Raises ConfigurationError if there is no table."""
        if not sa.inspect(connection).has_table(self.name, schema=self.schema):
            raise ConfigurationError(f"sink {self.sink!r}: there is no table {self.table} at {self.database}")
        target = self._reflect(connection)
        ledger = Ledger.ensure(connection, self.ledger, self.schema)
        return Plan(target, ledger, self._strategy(connection), self._columns(target))

    def _strategy(self, connection: Connection) -> Literal["two_phase", "staged"]:
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

    def _engine_problems(self, target: sa.Table) -> Iterable[str]:
        engine = target.kwargs.get(f"{self.database.dialect}_engine", "InnoDB")
        if engine != "InnoDB":
            yield f"its engine {engine} has no transactions: ALTER TABLE {target.fullname} ENGINE=InnoDB"

    def _reflect(self, connection: Connection) -> sa.Table:
        return sa.Table(self.name, sa.MetaData(), schema=self.schema, autoload_with=connection, resolve_fks=False)

    def _columns(self, target: sa.Table) -> dict[str, Column]:
        return {
            column.name: Column(
                column.name,
                column.type,
                self.database.dialect,
                bool(column.nullable),
                has_default=column.server_default is not None or column is target.autoincrement_column,
                generated=column.computed is not None or bool(column.identity is not None and column.identity.always),
            )
            for column in target.columns
        }

    def _key_problems(self, connection: Connection) -> Iterable[str]:
        if not self.merge.keys:
            return
        inspector = sa.inspect(connection)
        uniques = [inspector.get_pk_constraint(self.name, self.schema)["constrained_columns"]]
        uniques += [unique["column_names"] for unique in inspector.get_unique_constraints(self.name, self.schema)]
        indexes = inspector.get_indexes(self.name, self.schema)
        uniques += [[name for name in index["column_names"] if name] for index in indexes if index["unique"]]
        if not any(set(columns) == set(self.merge.keys) for columns in uniques):
            yield f"upsert by ({', '.join(self.merge.keys)}) needs a primary key or unique index on just these columns"

    def _create(self, connection: Connection, schema: pa.Schema) -> None:
        if not self.create_table:
            names = sa.inspect(connection).get_table_names(schema=self.schema)
            similar = difflib.get_close_matches(self.name, names)
            hint = f" Did you mean {' or '.join(similar)}?" if similar else ""
            raise ConfigurationError(
                f"sink {self.sink!r}: there is no table {self.table} at {self.database}.{hint} Create it, or let "
                "create_table=True do so"
            )
        if missing := [key for key in self.merge.keys if key not in schema.names]:
            raise SchemaMismatch(f"sink {self.sink!r}: the batch has no column {', '.join(missing)}, named in keys")
        columns = []
        for field in schema:
            if field.name != self.merge.delete_marker:
                key = field.name in self.merge.keys
                kind = self._type_of(field)
                columns.append(
                    sa.Column(
                        field.name, kind, primary_key=key, nullable=field.nullable and not key, autoincrement=False
                    )
                )
        ledgers.create(connection, sa.Table(self.name, sa.MetaData(), *columns, schema=self.schema))
        logger.info("sink %r created table %s", self.sink, self.table)

    def _type_of(self, field: pa.Field) -> TypeEngine[Any]:
        try:
            return declared(field.type, self.database.dialect, key=field.name in self.merge.keys)
        except Unfit as unfit:
            raise SchemaMismatch(f'sink {self.sink!r}: column "{field.name}": {unfit}') from None

    def _extra(self, field: pa.Field) -> Column:
        return Column(field.name, self._type_of(field), self.database.dialect)

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
