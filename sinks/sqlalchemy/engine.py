"""Engines of SQLAlchemy as sinks and checkpoint storage need them.

What is committed is on disk, no wait is without an end, nothing is cut to fit, and no password is
shown or given to a server that proves nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import create_engine, event
from sqlalchemy.engine import URL, Engine, make_url
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.pool import ConnectionPoolEntry

from sinks.sql.databases import MYSQL
from sinks.sql.server import KEEPALIVES

LOCK_SECONDS = 10

_DRIVERS = {
    "postgres": "postgresql+psycopg",
    "postgresql": "postgresql+psycopg",
    "mysql": "mysql+pymysql",
    "mariadb": "mariadb+pymysql",
}
_FILE_READERS = {
    "local_infile",
    "allow_local_infile",
    "allow_local_infile_in_path",
    "client_flag",
    "client_flags",
}

# Run on each new connection.
_SESSION = {
    "sqlite": ("PRAGMA synchronous = EXTRA", "PRAGMA foreign_keys = ON"),
    **dict.fromkeys(
        MYSQL,
        (
            "SET SESSION"  # drivers may escape bytes by backslashes in whatever mode
            " sql_mode = CONCAT(REPLACE(REPLACE(@@sql_mode, 'EMPTY_STRING_IS_NULL',"
            " 'STRICT_ALL_TABLES'),"
            " 'NO_BACKSLASH_ESCAPES', 'STRICT_ALL_TABLES'),"
            " ',STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION,NO_AUTO_VALUE_ON_ZERO'),"
            " time_zone = '+00:00', completion_type = 0, sql_safe_updates = 0,"
            " sql_select_limit = 18446744073709551615, max_sort_length = 4096",
        ),
    ),
}


def parse(url: str | URL) -> URL:
    """Parse a URL. If it names no driver, it gets the driver that this library knows.

    Raises ArgumentError or ValueError for what is no URL, NoSuchModuleError or ImportError if the
    dialect or its driver is not there.
    """
    parsed = make_url(url)
    parsed = parsed.set(drivername=_DRIVERS.get(parsed.drivername, parsed.drivername))
    parsed.get_dialect()
    return parsed


def file_readers(url: URL) -> list[str]:
    """List the parameters by which MySQL's drivers hand out any file that a server asks for."""
    return sorted(set(url.query) & _FILE_READERS)


def make_engine(
    url: URL,
    *,
    silence: int,
    answer: int,
    short: bool = False,
    session: Sequence[str] = (),
    **options: Any,
) -> Engine:
    """Make an engine that waits for nothing without an end.

    `silence` is the number of seconds that a host, or another writer of SQLite, may keep a
    connection waiting. `answer` is the number of seconds that a statement may take in MySQL, and,
    if all statements are `short`, in PostgreSQL too. What the URL says of them comes first.
    `session` are further statements to run on each new connection, and `options` are those of
    `create_engine`.
    """
    libpq = {
        "connect_timeout": 10,
        "tcp_user_timeout": silence * 1000,
        "client_encoding": "utf8",
        **KEEPALIVES,
    }
    of_mysql = {"connect_timeout": 10, "read_timeout": answer, "write_timeout": answer}
    parameters: dict[str, dict[str, Any]] = {
        "pysqlite": {"timeout": silence},
        **dict.fromkeys(("psycopg", "psycopg2"), libpq),
        **dict.fromkeys(("pymysql", "mysqldb", "mariadbconnector"), of_mysql),
    }
    driver = url.get_driver_name()
    query = {name: str(value) for name, value in parameters.get(driver, {}).items()} | dict(
        url.query
    )
    engine = create_engine(
        url.set(query=query), **{"pool_pre_ping": True, **options, "hide_parameters": True}
    )
    if driver == "pymysql":
        from sinks.mysql import connection as of_pymysql

        of_pymysql.connect_for(engine)
    if driver == "psycopg":
        from sinks.postgres import connection as of_psycopg

        of_psycopg.connect_for(engine, answer if short else None)

    @event.listens_for(engine, "connect")
    def configure(connection: DBAPIConnection, _: ConnectionPoolEntry) -> None:
        try:
            if engine.name == "sqlite":
                connection.isolation_level = None  # no BEGIN but those of SQLAlchemy's events
            cursor = connection.cursor()
            for statement in (*_SESSION.get(engine.name, ()), *session):
                cursor.execute(statement)
            cursor.close()
            connection.commit()
        except BaseException:
            connection.close()  # the pool would leave it to the garbage collector
            raise

    return engine
