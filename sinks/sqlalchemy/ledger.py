"""The ledger in any database.

Beside true and false, `committed` is null while a participant's rows are staged. All go by one primary key: whoever
inserts it waits for whoever is in flight, and whoever turns a null into true or false has the row's lock. In SQLite,
which has one writer at a time in the whole database, nobody ever is in flight.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.engine import Connection

from sinks.errors import ConfigurationError
from sinks.sql import ledger
from sinks.transaction import TransactionId


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
class Ledger(ledger.Ledger):
    schema: str | None
    name: str
    id: str
    table: sa.Table

    @classmethod
    def ensure(cls, connection: Connection, schema: str | None, name: str) -> Ledger:
        table = table_of(name, schema)
        create(connection, table)
        found = cls.find(connection, schema, name)
        if found is None:
            try:
                with connection.begin_nested():
                    values = {"job": "-", "lineage": uuid.uuid4().hex, "sink": "-", "checkpoint": 0, "committed": True}
                    connection.execute(table.insert().values(transaction_id=cls.IDENTITY, **values))
            except exc.IntegrityError:
                pass  # somebody else made it at the same moment
            found = cls.find(connection, schema, name)
        connection.commit()
        if found is None:
            raise ConfigurationError(f"the ledger table {table.fullname} could not be created")
        return found

    @classmethod
    def find(cls, connection: Connection, schema: str | None, name: str) -> Ledger | None:
        table = table_of(name, schema)
        if not sa.inspect(connection).has_table(name, schema=schema):
            return None
        columns = {column["name"]: column for column in sa.inspect(connection).get_columns(name, schema)}
        if not set(columns) >= set(table.columns.keys()) or not columns["committed"]["nullable"]:
            raise ConfigurationError(
                f"{table.fullname} exists and is not a ledger of this sink; give the sink another name with ledger=…"
            )
        id = connection.scalar(sa.select(table.c.lineage).where(table.c.transaction_id == cls.IDENTITY))
        return None if id is None else cls(schema, name, str(id), table)

    @property
    def label(self) -> str:
        return self.table.fullname

    def proof(self) -> dict[str, Any]:
        return {"ledger": self.label, "ledger_id": self.id}

    def states(self, connection: Connection, ids: Collection[str]) -> dict[str, bool]:
        t = self.table.c
        query = sa.select(t.transaction_id, t.committed).where(t.transaction_id.in_(ids), t.committed.is_not(None))
        return {row.transaction_id: row.committed for row in connection.execute(query)}

    def undecided(self, connection: Connection, ids: Collection[str]) -> list[str]:
        """Those of the ids that are staged."""
        t = self.table.c
        query = sa.select(t.transaction_id).where(t.transaction_id.in_(ids), t.committed.is_(None))
        return list(connection.scalars(query))

    def staged(self, connection: Connection, job: str, sink: str) -> dict[str, str]:
        """The undecided transactions of a job and sink (as tokens), each with the name of its staging table."""
        t = self.table.c
        mine = (t.job == job, t.sink == sink, t.committed.is_(None))
        query = sa.select(t.transaction_id, t.staging).where(*mine).order_by(t.transaction_id)
        return {row.transaction_id: row.staging for row in connection.execute(query)}

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

    def decide(self, connection: Connection, ids: Collection[str], *, committed: bool) -> bool:
        """Turn what is staged; a tombstone also goes where there is no row."""
        there = self.table.c.transaction_id.in_(ids)
        staged = self.table.update().where(there, self.table.c.committed.is_(None))
        decided = connection.execute(staged.values(committed=committed)).rowcount
        if not committed and decided < len(ids):
            known = set(connection.scalars(sa.select(self.table.c.transaction_id).where(there)))
            new = sorted(set(ids) - known)
            decided += sum(self.insert(connection, text, TransactionId.parse(text), False) for text in new)
        return decided == len(ids)

    def _delete(self, connection: Connection, job: str, lineage: str, sink: str, before: int) -> None:
        t = self.table.c
        mine = (t.job == job, t.lineage == lineage, t.sink == sink)
        connection.execute(self.table.delete().where(*mine, t.checkpoint < before, t.committed.is_not(None)))


def create(connection: Connection, table: sa.Table) -> None:
    """Create a table that is missing, and commit; safe against others that do the same."""
    try:
        table.create(connection, checkfirst=True)
        connection.commit()
    except exc.DBAPIError:
        connection.rollback()
        if not sa.inspect(connection).has_table(table.name, schema=table.schema):
            raise
