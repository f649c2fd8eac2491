"""What reads the database past the sink."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sinks.mysql.server import Connection, execute, parameters, query
from sinks.testing.table import Database


class Observer(Database):
    def __init__(self, dsn: str, **options: Any) -> None:
        self.dsn = dsn
        chosen: dict[str, Any] = {"autocommit": True, "charset": "utf8mb4"} | parameters(dsn) | options
        self.connection = Connection(**chosen)
        self.schema = parameters(dsn)["database"]

    def run(self, statement: str, parameters: Sequence[Any] | None = None) -> list[tuple[Any, ...]]:
        return query(self.connection, statement, parameters)

    def prepared(self) -> list[tuple[Any, ...]]:
        """All branches of the server."""
        return sorted(self.run("XA RECOVER"), key=str)

    def staging(self) -> list[str]:
        rows = self.run(
            "SELECT table_name FROM information_schema.tables WHERE table_schema = DATABASE()"
            " AND table_name REGEXP '^tpc_[0-9a-f]{20}$' ORDER BY 1"
        )
        return [row[0] for row in rows]

    def sessions(self) -> int:
        """Other connections to the database."""
        ((count,),) = self.run(
            "SELECT count(*) FROM information_schema.processlist WHERE db = DATABASE() AND id <> CONNECTION_ID()"
        )
        return int(count)

    def close(self) -> None:
        self.connection.close()


@contextmanager
def held(dsn: str, *statements: str) -> Iterator[Connection]:
    """Another session with an open transaction that ran these statements."""
    observer = Observer(dsn)
    try:
        execute(observer.connection, "BEGIN")
        for statement in statements:
            observer.run(statement)
        yield observer.connection
    finally:
        execute(observer.connection, "ROLLBACK")
        observer.close()
