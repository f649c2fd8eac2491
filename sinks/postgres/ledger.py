"""The ledger: what became of every transaction, in a table beside the target.

A participant's row (`committed` true) is written in the same transaction as its rows, so its presence proves the
commit. Its absence proves nothing until a tombstone (`committed` false) stands under the same primary key: the insert
waits for whoever is in flight, and then either meets the row or makes the loss final.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from psycopg import errors, sql

from sinks.errors import ConfigurationError
from sinks.postgres.server import Connection
from sinks.transaction import Checkpoint, TransactionId, token

logger = logging.getLogger(__name__)

_KEPT_CHECKPOINTS = 100

# How CREATE TABLE IF NOT EXISTS fails when another session creates the same table at the same moment.
CREATED_BY_OTHERS = (errors.UniqueViolation, errors.DuplicateTable, errors.DuplicateObject)


@dataclass(frozen=True)
class Ledger:
    """The ledger table. `oid` tells it from another one of the same name, made after the first was dropped."""

    schema: str
    name: str
    oid: int

    @classmethod
    def ensure(cls, connection: Connection, schema: str, name: str) -> Ledger:
        """Find the table or create it; safe against others that do the same. Outside a transaction."""
        table = sql.Identifier(schema, name)
        if found := cls._find(connection, schema, name):
            return found
        try:
            connection.execute(
                sql.SQL(
                    'CREATE TABLE IF NOT EXISTS {} (transaction_id text COLLATE "C" PRIMARY KEY,'
                    " committed boolean NOT NULL,"
                    " job text NOT NULL, lineage text NOT NULL, sink text NOT NULL, checkpoint bigint NOT NULL,"
                    " at timestamptz NOT NULL DEFAULT now())"
                ).format(table)
            )
        except CREATED_BY_OTHERS:
            logger.debug("ledger %s.%s was created by somebody else at the same time", schema, name)
        found = cls._find(connection, schema, name)
        if found is None:
            raise ConfigurationError(f"the ledger table {schema}.{name} could not be created")
        return found

    @classmethod
    def _find(cls, connection: Connection, schema: str, name: str) -> Ledger | None:
        row = connection.execute(
            "SELECT c.oid::bigint, c.relkind IN ('r', 'p'), ARRAY(SELECT attname::text FROM pg_attribute"
            " WHERE attrelid = c.oid AND attnum > 0 AND NOT attisdropped)"
            " FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace WHERE nspname = %s AND relname = %s",
            [schema, name],
        ).fetchone()
        if row is None:
            return None
        oid, is_table, columns = row
        if not is_table or not set(columns) >= {"transaction_id", "committed", "job", "lineage", "sink", "checkpoint"}:
            raise ConfigurationError(
                f"{schema}.{name} exists and is not a ledger of this library; give the sink another name with ledger=…"
            )
        return cls(schema, name, oid)

    @property
    def table(self) -> sql.Identifier:
        return sql.Identifier(self.schema, self.name)

    def proof(self) -> dict[str, Any]:
        """What a committable carries of the ledger: where to look, and how to know that it is still the same one."""
        return {"ledger": [self.schema, self.name], "ledger_oid": self.oid}

    def foreign(self, connection: Connection, proof: Mapping[str, Any]) -> str | None:
        """Why this ledger cannot speak for a transaction that was pre-committed beside another one, or None."""
        there = self._find(connection, self.schema, self.name)  # it may have been made anew since `ensure`
        if not proof or (there and [*proof["ledger"], proof["ledger_oid"]] == [there.schema, there.name, there.oid]):
            return None
        return (
            f"the ledger {self.schema}.{self.name} is not the table that was there at pre-commit "
            f"({'.'.join(proof['ledger'])}, oid {proof['ledger_oid']}); it was dropped, or the sink points elsewhere"
        )

    def states(self, connection: Connection, ids: Sequence[str]) -> dict[str, bool]:
        """For those ids that have a row: True is committed, False is a tombstone."""
        query = sql.SQL("SELECT transaction_id, committed FROM {} WHERE transaction_id = ANY(%s)").format(self.table)
        return dict(connection.execute(query, [list(ids)]).fetchall())

    def insert(self, connection: Connection, ids: Iterable[str], *, committed: bool) -> set[str]:
        """Insert a row or a tombstone for each id, in the caller's transaction; returns the ids that had none. Waits
        for others that insert the same ids (at most `lock_timeout`, then psycopg.errors.LockNotAvailable)."""
        parsed = [TransactionId.parse(text) for text in sorted(ids)]  # sorted: two of us never wait in a circle
        query = sql.SQL(
            "INSERT INTO {} (transaction_id, committed, job, lineage, sink, checkpoint)"
            " SELECT id, %s, job, lineage, sink, checkpoint"
            " FROM unnest(%s::text[], %s::text[], %s::text[], %s::text[], %s::bigint[])"
            " AS new (id, job, lineage, sink, checkpoint) ON CONFLICT DO NOTHING RETURNING transaction_id"
        ).format(self.table)
        columns = [
            sorted(ids),
            [one.job for one in parsed],
            [one.lineage for one in parsed],
            [one.sink for one in parsed],
            [one.checkpoint for one in parsed],
        ]
        return {row[0] for row in connection.execute(query, [committed, *columns]).fetchall()}

    def prune(self, connection: Connection, checkpoint: Checkpoint, sink: str) -> int:
        """Delete the rows of this job, lineage and sink that recovery will never ask for again; returns how many."""
        query = sql.SQL("DELETE FROM {} WHERE job = %s AND lineage = %s AND sink = %s AND checkpoint < %s").format(
            self.table
        )
        oldest = checkpoint.oldest_retained - _KEPT_CHECKPOINTS
        return connection.execute(query, [token(checkpoint.job), checkpoint.lineage, token(sink), oldest]).rowcount
