"""The ledger in MySQL. It is known by its comment."""

from __future__ import annotations

from collections.abc import Collection

from sinks.errors import ConfigurationError
from sinks.mysql.server import Connection, execute, literal, query, quoted
from sinks.sql import ledger
from sinks.transaction import TransactionId

_COMMENT = "ledger of exactly-once sinks"


class Ledger(ledger.Ledger):
    @classmethod
    def _look(cls, connection: Connection, schema: str, name: str) -> str | None:
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
                f'with "{_COMMENT}"); give the sink another name with ledger=…'
            )
        statement = f"SELECT lineage FROM {quoted(schema, name)} WHERE transaction_id = %s"
        identity = query(connection, statement, [cls.IDENTITY])
        return identity[0][0] if identity else ""

    @classmethod
    def _create(cls, connection: Connection, schema: str, name: str) -> None:
        word = "varchar(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL"
        execute(
            connection,
            f"CREATE TABLE IF NOT EXISTS {quoted(schema, name)} ("
            "transaction_id varchar(199) CHARACTER SET ascii COLLATE ascii_bin NOT NULL PRIMARY KEY,"
            f" committed boolean NOT NULL, job {word}, lineage {word}, sink {word}, checkpoint bigint NOT NULL,"
            f" at datetime NOT NULL DEFAULT current_timestamp) ENGINE=InnoDB COMMENT={literal(_COMMENT)}",
        )

    @classmethod
    def _put_id(cls, connection: Connection, schema: str, name: str, id: str) -> None:
        execute(
            connection,
            f"INSERT IGNORE INTO {quoted(schema, name)} (transaction_id, committed, job, lineage, sink, checkpoint)"
            " VALUES (%s, true, '-', %s, '-', 0)",
            [cls.IDENTITY, id],
        )

    @property
    def table(self) -> str:
        return quoted(self.schema, self.name)

    def states(self, connection: Connection, ids: Collection[str]) -> dict[str, bool]:
        if not ids:
            return {}
        marks = ", ".join(["%s"] * len(ids))
        rows = query(
            connection,
            f"SELECT transaction_id, committed FROM {self.table} WHERE transaction_id IN ({marks})",
            list(ids),
        )
        return {text: bool(committed) for text, committed in rows}

    def newest(self, connection: Connection, job: str, sink: str) -> dict[str, int]:
        statement = (
            f"SELECT lineage, max(checkpoint) FROM {self.table} WHERE job = %s AND sink = %s AND committed"
            " GROUP BY lineage"
        )
        return {lineage: int(checkpoint) for lineage, checkpoint in query(connection, statement, [job, sink])}

    def decide(self, connection: Connection, ids: Collection[str], *, committed: bool) -> bool:
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

    def _delete(self, connection: Connection, job: str, lineage: str, sink: str, before: int) -> None:
        execute(
            connection,
            f"DELETE FROM {self.table} WHERE job = %s AND lineage = %s AND sink = %s AND checkpoint < %s",
            [job, lineage, sink, before],
        )
