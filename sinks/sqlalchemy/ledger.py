"""The ledger in any database.

Beside true and false, `committed` is null while a participant's rows are staged. All go by one primary key: whoever
inserts it waits for whoever is in flight, and whoever turns a null into true or false has the row's lock. In SQLite,
which has one writer at a time in the whole database, nobody ever is in flight.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cached_property
from typing import TYPE_CHECKING

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from sinks.sql import ledger
from sinks.sql.server import SUMS, Server
from sinks.sqlalchemy.database import inserted, ledger_table
from sinks.transaction import Fingerprint, TransactionId

if TYPE_CHECKING:
    from typing_extensions import Self


class Ledger(ledger.Ledger[Connection]):
    @cached_property
    def rows(self) -> sa.Table:
        return ledger_table(self.name, self.schema)

    @classmethod
    def ensure(cls, server: Server[Connection], connection: Connection, schema: str, name: str) -> Self:
        found = super().ensure(server, connection, schema, name)
        connection.commit()  # ends what reading began
        return found

    def proof(self) -> dict[str, object]:
        return {"ledger": self.label, "ledger_id": self.id}

    def stage(self, connection: Connection, text: str, staging: str, rows: Fingerprint | None) -> bool:
        """Note in the running transaction that its rows are in the table `staging`; False if it has a row already."""
        name = TransactionId.parse(text)
        facts = {"job": name.job, "lineage": name.lineage, "sink": name.sink, "checkpoint": name.checkpoint}
        row = {"transaction_id": text, "committed": None, "staging": staging, **facts}
        if rows and self.has_sums:
            row |= zip(SUMS, rows.stored(), strict=True)
        return inserted(connection, self.rows.insert().values(row))

    def undecided(self, connection: Connection, ids: Collection[str]) -> list[str]:
        """Those of the ids that are staged."""
        t = self.rows.c
        query = sa.select(t.transaction_id).where(t.transaction_id.in_(ids), t.committed.is_(None))
        return list(connection.scalars(query))

    def staged(self, connection: Connection, job: str, sink: str) -> dict[str, str]:
        """The undecided transactions of a job and sink (as tokens), each with the name of its staging table."""
        t = self.rows.c
        mine = (t.job == job, t.sink == sink, t.committed.is_(None))
        query = sa.select(t.transaction_id, t.staging).where(*mine).order_by(t.transaction_id)
        return {row.transaction_id: row.staging for row in connection.execute(query)}

    def decide(
        self,
        connection: Connection,
        ids: Collection[str],
        *,
        committed: bool,
        sums: Mapping[str, Fingerprint] | None = None,
    ) -> bool:
        """Turn what is staged; a tombstone also goes where there is no row. Sums are there since it was staged."""
        t = self.rows.c
        turn = self.rows.update().where(t.transaction_id.in_(ids), t.committed.is_(None)).values(committed=committed)
        decided = connection.execute(turn).rowcount
        if committed:
            names = {text: TransactionId.parse(text) for text in ids}
            return decided == len(ids) and self.witness._insert(connection, names, committed=True)
        if decided == len(ids):
            return True
        known = set(connection.scalars(sa.select(t.transaction_id).where(t.transaction_id.in_(ids))))
        new = {text: TransactionId.parse(text) for text in ids if text not in known}
        return self.insert(connection, new, committed=False) and decided + len(new) == len(ids)
