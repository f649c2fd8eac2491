"""What the sink asks of the server before it writes: can the table take the rows, and by which strategy."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import psycopg
import pyarrow as pa
from psycopg import sql

from sinks.errors import ConfigurationError, SchemaMismatch
from sinks.postgres import catalog
from sinks.postgres.catalog import Target
from sinks.postgres.failures import describe
from sinks.postgres.ledger import CREATED_BY_OTHERS, Ledger
from sinks.postgres.merge import Merge
from sinks.postgres.server import Connection
from sinks.postgres.types import mismatches, target_type

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plan:
    """What the driver found out about the server, carried to the tasks in the sink's pickle."""

    target: Target
    ledger: Ledger
    strategy: Literal["prepared", "staged"]


@dataclass(frozen=True)
class Planner:
    """The sink as the user configured it, without the connection. `place` says where the server is, for errors."""

    sink: str
    table: str
    place: str
    wanted: Literal["auto", "prepared", "staged"]
    merge: Merge
    create_table: bool
    ledger: str

    def check(self, connection: Connection, schema: pa.Schema) -> Plan:
        """Find the table (or create it) and see whether it can take rows of `schema`. Raises ConfigurationError
        (SchemaMismatch if it is only about columns) with all reasons at once."""
        schema_name, name = catalog.locate(connection, self.table)
        target = catalog.describe(connection, schema_name, name)
        if target is None:
            target = self._created(connection, schema_name, name, schema)
        written = self.merge.written(schema.names, target.names)
        columns = mismatches(pa.schema([field for field in schema if field.name in written]), list(target.columns))
        others = [*self._upsert_problems(schema, target), *self._server_problems(connection, target)]
        if columns or others:
            kind = ConfigurationError if others else SchemaMismatch
            reasons = "".join(f"\n  - {reason}" for reason in [*others, *columns])
            raise kind(f"sink {self.sink!r} cannot write to table {target.label} ({self.place}):{reasons}")
        return self._plan(connection, target)

    def _created(self, connection: Connection, schema_name: str, name: str, schema: pa.Schema) -> Target:
        if not self.create_table:
            others = catalog.similar(connection, name)
            hint = f" Did you mean {' or '.join(others)}?" if others else ""
            raise ConfigurationError(
                f"sink {self.sink!r}: there is no table {schema_name}.{name} at {self.place}.{hint} Create it, or let "
                "create_table=True do so; a name with capitals needs double quotes"
            )
        unwritten = {self.merge.delete_marker}
        declared = [
            sql.SQL("{} {}{}").format(
                sql.Identifier(field.name),
                sql.SQL(self._type_of(field)),
                sql.SQL("" if field.nullable else " NOT NULL"),
            )
            for field in schema
            if field.name not in unwritten
        ]
        if missing := [key for key in self.merge.keys if key not in schema.names]:
            raise SchemaMismatch(f"sink {self.sink!r}: the batch has no column {', '.join(missing)}, named in keys")
        if self.merge.keys:
            keys = sql.SQL(", ").join(map(sql.Identifier, self.merge.keys))
            declared.append(sql.SQL("PRIMARY KEY ({})").format(keys))
        statement = sql.SQL("CREATE TABLE IF NOT EXISTS {} ({})").format(
            sql.Identifier(schema_name, name), sql.SQL(", ").join(declared)
        )
        try:
            connection.execute(statement)
        except CREATED_BY_OTHERS:
            logger.debug("somebody else created %s.%s at the same time", schema_name, name)
        except psycopg.ProgrammingError as error:
            raise ConfigurationError(
                f"sink {self.sink!r}: cannot create table {schema_name}.{name} at {self.place}: {describe(error)}"
            ) from error
        logger.info("sink %r created table %s.%s", self.sink, schema_name, name)
        target = catalog.describe(connection, schema_name, name)
        assert target is not None
        return target

    def _type_of(self, field: pa.Field) -> str:
        try:
            return target_type(field.type)
        except SchemaMismatch as unfit:
            raise SchemaMismatch(f'sink {self.sink!r}: column "{field.name}": {unfit}') from None

    def _upsert_problems(self, schema: pa.Schema, target: Target) -> Iterable[str]:
        merge = self.merge
        yield from merge.problems(schema)
        if merge.keys and not any(set(u.columns) == set(merge.keys) and u.arbiter for u in target.uniques):
            keys = ", ".join(merge.keys)
            yield f"upsert by ({keys}) needs a unique index on just these columns, neither partial nor deferrable"

    def _server_problems(self, connection: Connection, target: Target) -> Iterable[str]:
        strategy, _ = self._strategy(connection, target)
        limit = int(_value(connection, "SELECT current_setting('max_prepared_transactions')"))
        if self.wanted == "prepared" and limit == 0:
            yield (
                'strategy="prepared" needs max_prepared_transactions above the number of partitions, and the server '
                'has 0, which switches it off: set it (and restart the server), or use strategy="staged"'
            )
        if self.wanted == "prepared" and target.row_security:
            yield 'the table has row-level security, which COPY cannot obey: use strategy="staged"'
        if _value(connection, "SELECT pg_is_in_recovery()"):
            yield "the server is a read-only standby"
        rights = ["INSERT"]
        if strategy == "staged" and (self.merge.mode == "upsert" or target.uniques):
            rights.append("SELECT")
        if self.merge.mode == "upsert":
            rights.append("UPDATE")
        if self.merge.delete_marker:
            rights.append("DELETE")
        ledger = sql.Identifier(target.schema, self.ledger).as_string(connection)
        exists = _value(connection, "SELECT to_regclass(%s) IS NOT NULL", ledger)
        create = strategy == "staged" or not exists
        statements = catalog.missing_rights(connection, target.schema, target.name, rights, create=create)
        if exists:
            ledger_rights = ("SELECT", "INSERT", "DELETE")
            statements += catalog.missing_rights(connection, target.schema, self.ledger, ledger_rights, create=False)
        for statement in dict.fromkeys(statements):
            yield f"a right is missing; an owner has to run: {statement}"

    def _strategy(self, connection: Connection, target: Target) -> tuple[Literal["prepared", "staged"], str]:
        """The strategy and the reason for it."""
        if self.merge.mode == "upsert":
            return "staged", "upserts need it"
        if self.wanted != "auto":
            return self.wanted, "as configured"
        if target.row_security:
            return "staged", "the table has row-level security"
        limit = int(_value(connection, "SELECT current_setting('max_prepared_transactions')"))
        if limit == 0:
            return "staged", "the server has max_prepared_transactions = 0"
        return "prepared", f"the server has max_prepared_transactions = {limit}"

    def _plan(self, connection: Connection, target: Target) -> Plan:
        strategy, reason = self._strategy(connection, target)
        ledger = Ledger.ensure(connection, target.schema, self.ledger)
        logger.info("sink %r writes to %s by strategy %s: %s", self.sink, target.label, strategy, reason)
        return Plan(target, ledger, strategy)

    def load(self, connection: Connection) -> Plan:
        """The plan without a look at any rows. Raises ConfigurationError if there is no table."""
        schema_name, name = catalog.locate(connection, self.table)
        target = catalog.describe(connection, schema_name, name)
        if target is None:
            raise ConfigurationError(f"sink {self.sink!r}: there is no table {schema_name}.{name} at {self.place}")
        return self._plan(connection, target)


def _value(connection: Connection, query: str, *parameters: object) -> Any:
    row = connection.execute(query, list(parameters)).fetchone()
    assert row is not None
    return row[0]
