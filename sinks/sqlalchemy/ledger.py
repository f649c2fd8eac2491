"""The ledger: what became of every transaction, in a table beside the target.

Its row is written in the same transaction as the rows: `committed` is true once they are visible, null while they are
staged, false when they never will be. So true proves the commit, and false (a tombstone) that there will be none, since
all go by one primary key: whoever inserts it waits for whoever is in flight, and whoever turns a null into true or
false has the row's lock. In SQLite, which has one writer at a time in the whole database, nobody ever is in flight.
No row at all proves nothing until a tombstone stands in its place.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.engine import Connection

from sinks.errors import ConfigurationError
from sinks.transaction import Checkpoint, TransactionId, token

_KEPT_CHECKPOINTS = 100
_IDENTITY = "ledger"


def table_of(name: str, schema: str | None) -> sa.Table:
    return sa.Table(
        name,
        sa.MetaData(),
        sa.Column("transaction_id", sa.String(199), primary_key=True),
        sa.Column("committed", sa.Boolean, nullable=True),
        sa.Column("job", sa.String(64), nullable=False),
        sa.Column("lineage", sa.String(64), nullable=False),
        sa.Column("sink", sa.String(64), nullable=False),
        sa.Column("checkpoint", sa.BigInteger, nullable=False),
        sa.Column("staging", sa.String(64), nullable=True),
        sa.Column("at", sa.DateTime(timezone=True), server_default=sa.func.now(), nullable=False),
        schema=schema,
        mysql_engine="InnoDB",
        mariadb_engine="InnoDB",
    )


@dataclass(frozen=True)
class Ledger:
    """The ledger table. `id`, kept in a row of its own, tells it from another one made after the first was dropped."""

    table: sa.Table
    id: str

    @classmethod
    def ensure(cls, connection: Connection, name: str, schema: str | None) -> Ledger:
        """Find the table or create it, and commit; safe against others that do the same."""
        table = table_of(name, schema)
        create(connection, table)
        columns = {column["name"]: column for column in sa.inspect(connection).get_columns(name, schema)}
        if not set(columns) >= set(table.columns.keys()) or not columns["committed"]["nullable"]:
            raise ConfigurationError(
                f"{table.fullname} exists and is not a ledger of this sink; give the sink another name with ledger=…"
            )
        query = sa.select(table.c.lineage).where(table.c.transaction_id == _IDENTITY)
        found = connection.scalar(query)
        if found is None:
            try:
                with connection.begin_nested():
                    values = {"job": "-", "lineage": uuid.uuid4().hex, "sink": "-", "checkpoint": 0, "committed": True}
                    connection.execute(table.insert().values(transaction_id=_IDENTITY, **values))
            except exc.IntegrityError:
                pass  # somebody else made it at the same moment
            found = connection.scalar(query)
        connection.commit()
        return cls(table, str(found))

    def proof(self) -> dict[str, Any]:
        """What a committable carries of the ledger: where to look, and how to know that it is still the same one."""
        return {"ledger": self.table.fullname, "ledger_id": self.id}

    def foreign(self, proof: Mapping[str, Any]) -> str | None:
        """Why this ledger cannot speak for a transaction that was pre-committed beside another one, or None."""
        if proof.get("ledger_id", self.id) == self.id:
            return None
        return (
            f"the ledger {self.table.fullname} is not the one that was there at pre-commit ({proof['ledger']}, id "
            f"{proof['ledger_id']}); it was dropped, or the sink points elsewhere"
        )

    def states(self, connection: Connection, keys: Collection[str]) -> dict[str, bool | None]:
        """Of those keys that have a row: True is committed, False a tombstone, None staged and undecided."""
        query = sa.select(self.table.c.transaction_id, self.table.c.committed)
        rows = connection.execute(query.where(self.table.c.transaction_id.in_(keys)))
        return {row.transaction_id: row.committed for row in rows}

    def insert(
        self, connection: Connection, key: str, name: TransactionId, committed: bool | None, staging: str | None = None
    ) -> bool:
        """Insert a row in the caller's transaction; False if there is one, after a wait for who is in flight."""
        values = {"job": name.job, "lineage": name.lineage, "sink": name.sink, "checkpoint": name.checkpoint}
        row = {"transaction_id": key, "committed": committed, "staging": staging, **values}
        try:
            with connection.begin_nested():
                connection.execute(self.table.insert().values(row))
            return True
        except exc.IntegrityError:
            return False

    def decide(self, connection: Connection, keys: Collection[str], committed: bool) -> bool:
        """Turn the rows of undecided transactions into committed ones or tombstones; whether all of them were open."""
        rows = self.table.update().where(self.table.c.transaction_id.in_(keys), self.table.c.committed.is_(None))
        return connection.execute(rows.values(committed=committed)).rowcount == len(keys)

    def bury(self, connection: Connection, key: str, name: TransactionId) -> bool:
        """Put a tombstone for `key`, unless it is committed. Returns whether it will never be."""
        self.insert(connection, key, name, False)
        self.decide(connection, [key], False)
        return not self.states(connection, [key])[key]

    def prune(self, connection: Connection, checkpoint: Checkpoint, sink: str) -> int:
        """Delete the rows of this job, lineage and sink that recovery will never ask for again; returns how many."""
        t, oldest = self.table.c, checkpoint.oldest_retained - _KEPT_CHECKPOINTS
        mine = (t.job == token(checkpoint.job), t.lineage == checkpoint.lineage, t.sink == token(sink))
        old = self.table.delete().where(*mine, t.checkpoint < oldest, t.committed.is_not(None))
        return connection.execute(old).rowcount


def create(connection: Connection, table: sa.Table) -> None:
    """Create a table that is missing, and commit; safe against others that do the same."""
    try:
        table.create(connection, checkfirst=True)
        connection.commit()
    except exc.DBAPIError:
        connection.rollback()
        if not sa.inspect(connection).has_table(table.name, schema=table.schema):
            raise
