"""What reads the database past the sink."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

from sinks.testing.table import Database, eventually


class Observer(Database):
    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.connection: psycopg.Connection[Any] = psycopg.connect(dsn, autocommit=True)

    def run(self, statement: str, parameters: Sequence[Any] | None = None) -> list[tuple[Any, ...]]:
        cursor = self.connection.execute(statement, parameters)
        return cursor.fetchall() if cursor.description else []

    def needs(self, version: int, what: str) -> None:
        """Skip the test on a server that is older."""
        if self.connection.info.server_version < version * 10_000:
            pytest.skip(f"PostgreSQL has {what} from {version} on")

    def prepared(self) -> list[str]:
        return [
            row[0]
            for row in self.run("SELECT gid FROM pg_prepared_xacts WHERE database = current_database() ORDER BY 1")
        ]

    def staging(self) -> list[str]:
        return [
            row[0]
            for row in self.run(
                "SELECT oid::regclass::text FROM pg_class"
                " WHERE relname ~ '^tpc_[0-9a-f]{20}(_[0-9a-f]{8})?$' AND relkind = 'r'"
            )
        ]

    def sessions(self) -> int:
        """Connections of sinks that are inside a transaction."""
        ((count,),) = self.run(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'tpc %'"
            " AND state <> 'idle'"
        )
        return int(count)

    def end_sessions(self, which: str) -> int:
        """End the sessions that pg_stat_activity shows for this condition, and return when they are gone: how many."""
        ended = self.run(f"SELECT pid, pg_terminate_backend(pid) FROM pg_stat_activity WHERE {which}")
        pids = [pid for pid, _ in ended]
        eventually(lambda: not self.run("SELECT 1 FROM pg_stat_activity WHERE pid = ANY(%s)", [pids]))
        return len(pids)

    def close(self) -> None:
        self.connection.close()


@contextmanager
def held(dsn: str, *statements: str) -> Iterator[psycopg.Connection[Any]]:
    """Another session with an open transaction that ran these statements."""
    with psycopg.connect(dsn) as connection:
        for statement in statements:
            connection.execute(statement)
        yield connection
        connection.rollback()
