"""The ledger in any database.

Beside true and false, `committed` is null while a participant's rows are staged. All go by one primary key: whoever
inserts it waits for whoever is in flight, and whoever turns a null into true or false has the row's lock. In SQLite,
which has one writer at a time in the whole database, nobody ever is in flight.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.engine import Connection

from sinks.errors import ConfigurationError
from sinks.sql import ledger
from sinks.transaction import TransactionId

if TYPE_CHECKING:
    from typing_extensions import Self


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


class Ledger(ledger.Ledger):
    @cached_property
    def table(self) -> sa.Table:
        return table_of(self.name, self.schema)

    @classmethod
    def ensure(cls, connection: Connection, schema: str | None, name: str) -> Self:
        found = super().ensure(connection, schema, name)
        connection.commit()  # ends what reading began
        return found

    @classmethod
    def _look(cls, connection: Connection, schema: str | None, name: str) -> str | None:
        if not sa.inspect(connection).has_table(name, schema=schema):
            return None
        table = table_of(name, schema)
        columns = {column["name"]: column for column in sa.inspect(connection).get_columns(name, schema)}
        if not set(columns) >= set(table.columns.keys()) or not columns["committed"]["nullable"]:
            raise ConfigurationError(
                f"{table.fullname} exists and is not a ledger of this sink; give the sink another name with ledger=…"
            )
        query = sa.select(table.c.lineage).where(table.c.transaction_id == cls.IDENTITY)
        return connection.scalar(query) or ""

    @classmethod
    def _create(cls, connection: Connection, schema: str | None, name: str) -> None:
        create(connection, table_of(name, schema))

    @classmethod
    def _put_id(cls, connection: Connection, schema: str | None, name: str, id: str) -> None:
        row = {"job": "-", "lineage": id, "sink": "-", "checkpoint": 0, "committed": True}
        try:
            with connection.begin_nested():
                connection.execute(table_of(name, schema).insert().values(transaction_id=cls.IDENTITY, **row))
        except exc.IntegrityError:
            pass  # somebody else made it at the same moment

    def proof(self) -> dict[str, Any]:
        return {"ledger": self.label, "ledger_id": self.id}

    def states(self, connection: Connection, ids: Collection[str]) -> dict[str, bool]:
        t = self.table.c
        query = sa.select(t.transaction_id, t.committed).where(t.transaction_id.in_(ids), t.committed.is_not(None))
        return {row.transaction_id: row.committed for row in connection.execute(query)}

    def newest(self, connection: Connection, job: str, sink: str) -> dict[str, int]:
        t = self.table.c
        mine = (t.job == job, t.sink == sink, t.committed.is_(True))
        query = sa.select(t.lineage, sa.func.max(t.checkpoint)).where(*mine).group_by(t.lineage)
        return {lineage: int(checkpoint) for lineage, checkpoint in connection.execute(query)}

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
