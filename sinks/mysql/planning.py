"""What the sink asks of the server before it writes: can the table take the rows, and by which strategy."""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pymysql

from sinks.errors import ConfigurationError
from sinks.mysql import catalog
from sinks.mysql.catalog import Target
from sinks.mysql.encode import InsertEncoder, LoadEncoder, RowEncoder
from sinks.mysql.failures import describe
from sinks.mysql.ledger import Ledger
from sinks.mysql.recovery import may_recover
from sinks.mysql.server import Connection, execute, is_mariadb, listed, query, quoted, setting
from sinks.mysql.types import mismatches, target_type
from sinks.sql import planning

logger = logging.getLogger(__name__)

# From these on a prepared branch is detached from its session, and anybody can finish it: release notes of MySQL 8.0.29
# (xa_detach_on_prepare), and of MariaDB 10.5.2 (MDEV-742)
_OLDEST = {
    "MySQL": ((8, 0, 29), "stays tied to the connection that prepared it"),
    "MariaDB": ((10, 5, 2), "is rolled back with the connection that prepared it"),
}


@dataclass(frozen=True)
class Plan:
    """What the driver found out about the server, carried to the tasks in the sink's pickle. `local`: rows go in by
    LOAD DATA LOCAL, else by INSERT."""

    target: Target
    ledger: Ledger
    strategy: str
    local: bool

    @property
    def encoder(self) -> type[RowEncoder]:
        return LoadEncoder if self.local else InsertEncoder


class Planner(planning.Planner):
    LEDGER = Ledger
    UNSEEN = ", or none that this user may see"

    def check(self, connection: Connection, batch: pa.Schema) -> Plan:
        self.refuse_old(connection)
        plan: Plan = super().check(connection, batch)
        return plan

    def refuse_old(self, connection: Connection) -> None:
        product = "MariaDB" if is_mariadb(connection) else "MySQL"
        ((text,),) = query(connection, "SELECT VERSION()")
        match = re.match(r"(\d+)\.(\d+)\.(\d+)", text)
        version = tuple(map(int, match.groups())) if match else ()
        oldest, reason = _OLDEST[product]
        if version < oldest:
            raise ConfigurationError(
                f"sink {self.sink!r}: the server is {product} {text} ({self.place}), and exactly-once needs "
                f"{'.'.join(map(str, oldest))} or newer: in older ones a prepared XA transaction {reason}"
            )

    def locate(self, connection: Connection) -> tuple[str, str]:
        return catalog.locate(connection, self.table)

    def describe(self, connection: Connection, schema: str, name: str) -> Target | None:
        return catalog.describe(connection, schema, name)

    def similar(self, connection: Connection, schema: str, name: str) -> list[str]:
        return catalog.similar(connection, name)

    def declared(self, field: pa.Field) -> str:
        return target_type(field.type, key=field.name in self.merge.keys)

    def mismatches(self, batch: pa.Schema, target: Target) -> list[str]:
        return mismatches(batch, target.columns)

    def create(self, connection: Connection, schema: str, name: str, columns: Sequence[tuple[pa.Field, str]]) -> None:
        keys = self.merge.keys
        declared = [
            f"{quoted(field.name)} {kind} {'NULL' if field.nullable and field.name not in keys else 'NOT NULL'}"
            for field, kind in columns
        ]
        if keys:
            declared.append(f"PRIMARY KEY ({listed(keys)})")
        collation = "utf8mb4_nopad_bin" if is_mariadb(connection) else "utf8mb4_0900_bin"
        try:
            execute(
                connection,
                f"CREATE TABLE IF NOT EXISTS {quoted(schema, name)} ({', '.join(declared)})"
                f" ENGINE=InnoDB CHARACTER SET utf8mb4 COLLATE {collation}",
            )
        except pymysql.Error as error:
            if not connection.open:
                raise
            raise ConfigurationError(
                f"sink {self.sink!r}: cannot create table {schema}.{name} at {self.place}: {describe(error)}"
            ) from error

    def problems(self, connection: Connection, target: Target) -> Iterable[str]:
        keys = self.merge.keys
        if keys and not any(set(unique.columns) == set(keys) for unique in target.uniques):
            yield f"upsert by ({', '.join(keys)}) needs a unique index on just these columns, whole ones"
        if target.engine.lower() != "innodb":
            yield f"the table's engine is {target.engine or 'unknown'}, and only InnoDB has transactions that last"
        yield from catalog.unsafe_triggers(connection, target)
        if setting(connection, "read_only") in ("1", "ON") and self._obeys_read_only(connection):
            yield "the server is read-only (a replica?)"
        if (
            setting(connection, "log_bin") in ("1", "ON")
            and setting(connection, "binlog_format", session=True) == "STATEMENT"
        ):
            yield "the server has binlog_format=STATEMENT, with which InnoDB refuses READ COMMITTED: set ROW or MIXED"
        if self.wanted == "xa" and (reason := self.no_xa(connection)):
            yield f'{reason}: use strategy="staged"'
        yield from self._rights(connection, target)

    def _obeys_read_only(self, connection: Connection) -> bool:
        try:
            with connection.cursor() as cursor:
                cursor.execute("START TRANSACTION READ WRITE")
                cursor.execute("ROLLBACK")
        except pymysql.Error:
            return True
        return False

    def _rights(self, connection: Connection, target: Target) -> Iterable[str]:
        strategy, _ = self._strategy(connection)
        rights = self.merge.rights(target, strategy)
        yield from catalog.missing_rights(connection, target.schema, target.name, rights, target.names[0])
        if strategy == "staged":
            probe = f"tpc_{uuid.uuid4().hex[:20]}"
            yield from catalog.may_not_create(connection, target.schema, probe)
        if catalog.describe(connection, target.schema, self.ledger):
            rights = ["SELECT", "INSERT", "DELETE"]
            yield from catalog.missing_rights(connection, target.schema, self.ledger, rights, "transaction_id")

    def no_xa(self, connection: Connection) -> str | None:
        """Why there can be no XA branches here."""
        if setting(connection, "wsrep_on") in ("1", "ON"):
            return "the server is part of a Galera cluster, which has no XA transactions"
        if not may_recover(connection):
            return "the user lacks the right XA_RECOVER_ADMIN, without which nobody could find a prepared transaction"
        return None

    def _strategy(self, connection: Connection) -> tuple[str, str]:
        """The strategy and the reason for it."""
        if self.merge.mode == "upsert":
            return "staged", "upserts need it"
        if self.wanted != "auto":
            return self.wanted, "as configured"
        reason = self.no_xa(connection)
        return ("staged", reason) if reason else ("xa", "the server and the user's rights allow it")

    def plan(self, connection: Connection, target: Target, batch: pa.Schema | None) -> Plan:
        strategy, reason = self._strategy(connection)
        local = setting(connection, "local_infile") in ("1", "ON")
        ledger = Ledger.ensure(connection, target.schema, self.ledger)
        logger.info(
            "sink %r writes to %s by strategy %s (%s), with %s",
            self.sink,
            target.label,
            strategy,
            reason,
            "LOAD DATA LOCAL" if local else "INSERT: the server has local_infile=OFF, and LOAD DATA would be faster",
        )
        return Plan(target, ledger, strategy, local)
