"""What reads the database past the sink."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from sinks.mysql import xa
from sinks.mysql.connection import Connection, execute, parameters, query
from sinks.testing.table import Database

ON_MARIADB = pytest.mark.parametrize("mysql", ["mariadb"], indirect=True, ids=["MariaDB"])
"""For what MySQL does not do, or does not have."""


class Observer(Database):
    def __init__(self, dsn: str, **options: Any) -> None:
        self.dsn = dsn
        chosen: dict[str, Any] = {"autocommit": True, "charset": "utf8mb4"} | parameters(dsn) | options
        if chosen["user"] == chosen["database"]:  # the user of a sink, who may do less
            chosen["user"] += "_admin"
        self.connection = Connection(**chosen)
        self.schema = parameters(dsn)["database"]

    def run(self, statement: str, parameters: Sequence[Any] | None = None) -> list[tuple[Any, ...]]:
        return query(self.connection, statement, parameters or ())

    def prepared(self) -> list[tuple[Any, ...]]:
        """Branches of the database, as XA RECOVER lists them."""
        form = xa.format_of(self.schema)
        return sorted((row for row in self.run("XA RECOVER") if row[0] == form), key=str)

    def staging(self) -> list[str]:
        rows = self.run(
            "SELECT table_name FROM information_schema.tables WHERE table_schema = DATABASE()"
            " AND table_name REGEXP '^tpc_[0-9a-f]{20}(_[0-9a-f]{8})?$' ORDER BY 1"
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


def with_option(dsn: str, option: str) -> str:
    return f"{dsn}{'&' if '?' in dsn else '?'}{option}"
