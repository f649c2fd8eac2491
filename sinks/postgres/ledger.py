"""The ledger in PostgreSQL."""

from __future__ import annotations

import logging
from collections.abc import Collection

from psycopg import errors, sql

from sinks.errors import ConfigurationError
from sinks.postgres.server import Connection
from sinks.sql import ledger
from sinks.transaction import TransactionId

logger = logging.getLogger(__name__)

# How CREATE TABLE IF NOT EXISTS fails when another session creates the same table at the same moment.
CREATED_BY_OTHERS = (errors.UniqueViolation, errors.DuplicateTable, errors.DuplicateObject)


class Ledger(ledger.Ledger):
    @classmethod
    def _look(cls, connection: Connection, schema: str, name: str) -> str | None:
        with connection.bounded():
            return cls._read(connection, schema, name)

    @classmethod
    def _read(cls, connection: Connection, schema: str, name: str) -> str | None:
        row = connection.execute(
            "SELECT c.relkind IN ('r', 'p'), ARRAY(SELECT attname::text FROM pg_attribute"
            " WHERE attrelid = c.oid AND attnum > 0 AND NOT attisdropped)"
            " FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace WHERE nspname = %s AND relname = %s",
            [schema, name],
        ).fetchone()
        if row is None:
            return None
        is_table, columns = row
        if not is_table or not set(columns) >= {"transaction_id", "committed", "job", "lineage", "sink", "checkpoint"}:
            raise ConfigurationError(
                f"{schema}.{name} exists and is not a ledger of this library; give the sink another name with ledger=…"
            )
        query = sql.SQL("SELECT lineage FROM {} WHERE transaction_id = %s").format(_named(schema, name))
        identity = connection.execute(query, [cls.IDENTITY]).fetchone()
        return identity[0] if identity else ""

    @classmethod
    def _create(cls, connection: Connection, schema: str, name: str) -> None:
        statement = sql.SQL(
            'CREATE TABLE IF NOT EXISTS {} (transaction_id text COLLATE "C" PRIMARY KEY, committed boolean NOT NULL,'
            " job text NOT NULL, lineage text NOT NULL, sink text NOT NULL, checkpoint bigint NOT NULL,"
            " at timestamptz NOT NULL DEFAULT now())"
        )
        try:
            with connection.bounded(write=True):
                connection.execute(statement.format(sql.Identifier(schema, name)))
        except CREATED_BY_OTHERS:
            logger.debug("ledger %s.%s was created by somebody else at the same time", schema, name)

    @classmethod
    def _put_id(cls, connection: Connection, schema: str, name: str, id: str) -> None:
        statement = sql.SQL(
            "INSERT INTO {} (transaction_id, committed, job, lineage, sink, checkpoint)"
            " VALUES (%s, true, '-', %s, '-', 0) ON CONFLICT DO NOTHING"
        )
        with connection.bounded(write=True):
            connection.execute(statement.format(_named(schema, name)), [cls.IDENTITY, id])

    @property
    def table(self) -> sql.SQL:
        return _named(self.schema, self.name)

    def states(self, connection: Connection, ids: Collection[str]) -> dict[str, bool]:
        query = sql.SQL("SELECT transaction_id, committed FROM {} WHERE transaction_id = ANY(%s)").format(self.table)
        with connection.bounded():
            return dict(connection.execute(query, [list(ids)]).fetchall())

    def newest(self, connection: Connection, job: str, sink: str) -> dict[str, int]:
        query = sql.SQL(
            "SELECT lineage, max(checkpoint) FROM {} WHERE job = %s AND sink = %s AND committed GROUP BY lineage"
        ).format(self.table)
        with connection.bounded():
            return dict(connection.execute(query, [job, sink]).fetchall())

    def decide(self, connection: Connection, ids: Collection[str], *, committed: bool) -> bool:
        parsed = [TransactionId.parse(text) for text in sorted(ids)]  # sorted: two of us never wait in a circle
        query = sql.SQL(
            "INSERT INTO {} (transaction_id, committed, job, lineage, sink, checkpoint)"
            " SELECT id, %s, job, lineage, sink, checkpoint"
            " FROM unnest(%s::text[], %s::text[], %s::text[], %s::text[], %s::bigint[])"
            " AS new (id, job, lineage, sink, checkpoint) ON CONFLICT DO NOTHING"
        ).format(self.table)
        columns = [
            sorted(ids),
            [one.job for one in parsed],
            [one.lineage for one in parsed],
            [one.sink for one in parsed],
            [one.checkpoint for one in parsed],
        ]
        return connection.execute(query, [committed, *columns]).rowcount == len(parsed)

    def _delete(self, connection: Connection, job: str, lineage: str, sink: str, before: int) -> None:
        query = sql.SQL("DELETE FROM {} WHERE job = %s AND lineage = %s AND sink = %s AND checkpoint < %s")
        connection.execute(query.format(self.table), [job, lineage, sink, before])


def _named(schema: str, name: str) -> sql.SQL:
    """The table, for a statement that has parameters, in which % stands for itself only when doubled."""
    return sql.SQL(sql.Identifier(schema, name).as_string().replace("%", "%%"))
