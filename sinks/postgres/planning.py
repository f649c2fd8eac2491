"""What the sink asks of the server before it writes: can the table take the rows, and by which strategy."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import psycopg
import pyarrow as pa
from psycopg import sql

from sinks.errors import ConfigurationError, SchemaMismatch
from sinks.postgres import catalog
from sinks.postgres.catalog import Target
from sinks.postgres.failures import describe
from sinks.postgres.ledger import CREATED_BY_OTHERS, Ledger
from sinks.postgres.server import Connection, row
from sinks.postgres.types import mismatches, target_type
from sinks.sql import planning

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plan:
    """What the driver found out about the server, carried to the tasks in the sink's pickle."""

    target: Target
    ledger: Ledger
    strategy: str
    rounding: bool


class Planner(planning.Planner):
    LEDGER = Ledger
    ADVICE = "; a name with capitals needs double quotes"

    def locate(self, connection: Connection) -> tuple[str, str]:
        return catalog.locate(connection, self.table)

    def describe(self, connection: Connection, schema: str, name: str) -> Target | None:
        with connection.bounded():
            return catalog.describe(connection, schema, name)

    def similar(self, connection: Connection, schema: str, name: str) -> list[str]:
        return catalog.similar(connection, name)

    def declared(self, field: pa.Field) -> str:
        return target_type(field.type)

    def mismatches(self, batch: pa.Schema, target: Target) -> list[str]:
        return mismatches(batch, target.columns)

    def create(self, connection: Connection, schema: str, name: str, columns: Sequence[tuple[pa.Field, str]]) -> None:
        (longest,) = row(connection, "SELECT current_setting('max_identifier_length')::int")
        for field, _ in columns:
            if (length := len(field.name.encode())) > longest:
                raise SchemaMismatch(
                    f'sink {self.sink!r}: column "{field.name}" cannot be created in {schema}.{name}: its name has '
                    f"{length} bytes, and PostgreSQL cuts names after {longest}: rename it in Spark"
                )
        declared = [
            f"{self.merge.quoted(field.name)} {kind}{'' if field.nullable else ' NOT NULL'}" for field, kind in columns
        ]
        if self.merge.keys:
            declared.append(f"PRIMARY KEY ({self.merge.listed(self.merge.keys)})")
        try:
            with connection.bounded(write=True):
                self.merge.execute(
                    connection, f"CREATE TABLE IF NOT EXISTS {self.merge.quoted(schema, name)} ({', '.join(declared)})"
                )
        except CREATED_BY_OTHERS:
            logger.debug("somebody else created %s.%s at the same time", schema, name)
        except psycopg.ProgrammingError as error:
            raise ConfigurationError(
                f"sink {self.sink!r}: cannot create table {schema}.{name} at {self.place}: {describe(error)}"
            ) from error

    def problems(self, connection: Connection, target: Target) -> Iterable[str]:
        keys = self.merge.keys
        if keys and not any(set(unique.columns) == set(keys) and unique.arbiter for unique in target.uniques):
            yield (
                f"upsert by ({', '.join(keys)}) needs a unique index on just these columns, neither partial nor "
                "deferrable"
            )
        strategy, _ = self._strategy(connection, target)
        if self.wanted == "prepared" and _limit(connection) == 0:
            yield (
                'strategy="prepared" needs max_prepared_transactions above the number of partitions, and the server '
                'has 0, which switches it off: set it (and restart the server), or use strategy="staged"'
            )
        if self.wanted == "prepared" and target.row_security:
            yield 'the table has row-level security, which COPY cannot obey: use strategy="staged"'
        if row(connection, "SELECT pg_is_in_recovery()")[0]:
            yield "the server is a read-only standby"
        rights = self.merge.rights(target, strategy)
        ledger = sql.Identifier(target.schema, self.ledger).as_string(connection)
        (exists,) = row(connection, "SELECT to_regclass(%s) IS NOT NULL", ledger)
        create = strategy == "staged" or not exists
        statements = catalog.missing_rights(connection, target.schema, target.name, rights, create=create)
        if exists:
            ledger_rights = ("SELECT", "INSERT", "DELETE")
            statements += catalog.missing_rights(connection, target.schema, self.ledger, ledger_rights, create=False)
        for statement in dict.fromkeys(statements):
            yield f"a right is missing; an owner has to run: {statement}"

    def _strategy(self, connection: Connection, target: Target) -> tuple[str, str]:
        """The strategy and the reason for it."""
        if self.merge.mode == "upsert":
            return "staged", "upserts need it"
        if self.wanted != "auto":
            return self.wanted, "as configured"
        if target.row_security:
            return "staged", "the table has row-level security"
        limit = _limit(connection)
        if limit == 0:
            return "staged", "the server has max_prepared_transactions = 0"
        return "prepared", f"the server has max_prepared_transactions = {limit}"

    def plan(self, connection: Connection, target: Target, batch: pa.Schema | None) -> Plan:
        strategy, reason = self._strategy(connection, target)
        ledger = Ledger.ensure(connection, target.schema, self.ledger)
        logger.info("sink %r writes to %s by strategy %s: %s", self.sink, target.label, strategy, reason)
        return Plan(target, ledger, strategy, self.merge.rounding == "allow")


def _limit(connection: Connection) -> int:
    """How many transactions the server lets be prepared at once."""
    return int(row(connection, "SELECT current_setting('max_prepared_transactions')")[0])
