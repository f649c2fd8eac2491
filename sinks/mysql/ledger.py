"""The ledger: what became of every transaction, in a table beside the target.

A participant's row (`committed` true) is written in the same transaction as its rows, so its presence proves the
commit. Its absence proves nothing until a tombstone (`committed` false) stands under the same primary key: the insert
waits for whoever is in flight, and then either meets the row or makes the loss final.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from sinks.errors import ConfigurationError
from sinks.mysql.server import Connection, execute, literal, query, quoted
from sinks.transaction import Checkpoint, TransactionId, token

_KEPT_CHECKPOINTS = 100
_COMMENT = "ledger of exactly-once sinks "


@dataclass(frozen=True)
class Ledger:
    """The ledger table. `id`, kept in its comment, tells it from another one of the same name, made after the first was
    dropped; it survives a dump and a failover."""

    schema: str
    name: str
    id: str

    @classmethod
    def ensure(cls, connection: Connection, schema: str, name: str) -> Ledger:
        """Find the table or create it; safe against others that do the same. Outside a transaction."""
        if found := cls._find(connection, schema, name):
            return found
        word = "varchar(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL"
        execute(
            connection,
            f"CREATE TABLE IF NOT EXISTS {quoted(schema, name)} ("
            "transaction_id varchar(199) CHARACTER SET ascii COLLATE ascii_bin NOT NULL PRIMARY KEY,"
            f" committed boolean NOT NULL, job {word}, lineage {word}, sink {word}, checkpoint bigint NOT NULL,"
            " at datetime NOT NULL DEFAULT current_timestamp)"
            f" ENGINE=InnoDB COMMENT={literal(_COMMENT + uuid.uuid4().hex)}",
        )
        found = cls._find(connection, schema, name)
        if found is None:
            raise ConfigurationError(f"the ledger table {schema}.{name} could not be created")
        return found

    @classmethod
    def _find(cls, connection: Connection, schema: str, name: str) -> Ledger | None:
        rows = query(
            connection,
            "SELECT table_comment, engine FROM information_schema.tables WHERE table_schema = %s AND table_name = %s",
            [schema, name],
        )
        if not rows:
            return None
        comment, engine = rows[0]
        if not comment.startswith(_COMMENT) or str(engine).lower() != "innodb":
            raise ConfigurationError(
                f"{schema}.{name} exists and is not a ledger of this library (an InnoDB table whose comment begins "
                f'with "{_COMMENT.strip()}"); give the sink another name with ledger=…'
            )
        return cls(schema, name, comment.removeprefix(_COMMENT))

    @property
    def table(self) -> str:
        return quoted(self.schema, self.name)

    def proof(self) -> dict[str, Any]:
        """What a committable carries of the ledger: where to look, and how to know that it is still the same one."""
        return {"ledger": [self.schema, self.name], "ledger_id": self.id}

    def foreign(self, connection: Connection, proof: Mapping[str, Any]) -> str | None:
        """Why this ledger cannot speak for a transaction that was pre-committed beside another one, or None."""
        there = self._find(connection, self.schema, self.name)  # it may have been made anew since `ensure`
        if not proof or (there and [*proof["ledger"], proof["ledger_id"]] == [there.schema, there.name, there.id]):
            return None
        return (
            f"the ledger {self.schema}.{self.name} is not the table that was there at pre-commit "
            f"({'.'.join(proof['ledger'])}, id {proof['ledger_id']}); it was dropped, or the sink points elsewhere"
        )

    def states(self, connection: Connection, ids: Collection[str]) -> dict[str, bool]:
        """For those ids that have a row: True is committed, False is a tombstone."""
        if not ids:
            return {}
        marks = ", ".join(["%s"] * len(ids))
        rows = query(
            connection,
            f"SELECT transaction_id, committed FROM {self.table} WHERE transaction_id IN ({marks})",
            list(ids),
        )
        return {text: bool(committed) for text, committed in rows}

    def insert(self, connection: Connection, ids: Collection[str], *, committed: bool) -> bool:
        """Insert a row or a tombstone for each id that has none, in the caller's transaction. Returns whether that was
        each of them. Waits for others that insert the same ids, at most `lock_timeout`."""
        rows, values = [], []
        for text in sorted(ids):  # sorted: two of us never wait in a circle
            one = TransactionId.parse(text)
            rows.append("(%s, %s, %s, %s, %s, %s)")
            values += [text, committed, one.job, one.lineage, one.sink, one.checkpoint]
        statement = (
            f"INSERT IGNORE INTO {self.table} (transaction_id, committed, job, lineage, sink, checkpoint)"
            f" VALUES {', '.join(rows)}"
        )
        return execute(connection, statement, values) == len(ids)

    def prune(self, connection: Connection, checkpoint: Checkpoint, sink: str) -> int:
        """Delete the rows of this job, lineage and sink that recovery will never ask for again; returns how many."""
        oldest = checkpoint.oldest_retained - _KEPT_CHECKPOINTS
        return execute(
            connection,
            f"DELETE FROM {self.table} WHERE job = %s AND lineage = %s AND sink = %s AND checkpoint < %s",
            [token(checkpoint.job), checkpoint.lineage, token(sink), oldest],
        )
