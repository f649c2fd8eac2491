"""The server: connections that suit the protocol, without ever showing a password."""

from __future__ import annotations

import contextlib
import inspect
import math
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeAlias
from urllib.parse import parse_qsl, unquote, urlsplit

import pymysql
from pymysql.constants import CLIENT
from pymysql.cursors import Cursor

from sinks.errors import ConfigurationError
from sinks.mysql import connection as connections
from sinks.sql import server as servers
from sinks.sql.questions import SORTED_BYTES

Connection: TypeAlias = connections.Connection

_IDLE_LIMIT = 10  # seconds
_WAIT_TIMEOUT = "28800"
"""Seconds that a connection of a task may be without rows: the servers' own default."""


_KNOWN = inspect.signature(pymysql.connections.Connection.__init__).parameters.keys()

_SQL_MODE = ",".join(
    [
        "STRICT_ALL_TABLES",  # a value that does not fit is an error
        "NO_ZERO_DATE",
        "NO_ZERO_IN_DATE",
        "ERROR_FOR_DIVISION_BY_ZERO",
        "NO_AUTO_VALUE_ON_ZERO",  # a 0 for an AUTO_INCREMENT column is a 0
        "NO_ENGINE_SUBSTITUTION",
        "NO_BACKSLASH_ESCAPES",  # in SQL text a quote is doubled, and nothing else is special
    ]
)
_SESSION = {
    "autocommit": "1",  # init_connect of the server may have changed what the driver thinks it is
    "completion_type": "0",  # COMMIT begins no other transaction, and does not disconnect
    "sql_auto_is_null": "0",  # IS NULL finds no number that was given last
    "sql_mode": f"'{_SQL_MODE}'",
    "time_zone": "'+00:00'",
    "sql_notes": "1",  # what is cut off without an error counts as a warning
    "foreign_key_checks": "1",
    "unique_checks": "1",
    "max_sort_length": str(SORTED_BYTES),
    "sql_safe_updates": "0",
    "sql_select_limit": "18446744073709551615",
    "wait_timeout": _WAIT_TIMEOUT,
}
_MARIADB = {"tx_isolation": "'READ-COMMITTED'", "max_statement_time": "0"}
_MYSQL = {"transaction_isolation": "'READ-COMMITTED'", "max_execution_time": "0"}


class Server(servers.PooledServer[Connection]):
    """Connections read READ COMMITTED, so that each statement sees what others have committed by then."""

    dialect = "mysql"
    SECRETS = ("password", "passwd", "ssl_key_password")
    SHOWN = ("host", "unix_socket", "port", "database", "user")
    INSERT_MISSING = "INSERT IGNORE INTO {table} ({columns}) VALUES {rows}"

    def __init__(self, dsn: str, options: Mapping[str, Any], *, name: str, lock_timeout: float) -> None:
        """`dsn` is a mysql:// URL and `options` are parameters of pymysql.connect that override it; `lock_timeout` is
        in seconds, and rounded up to whole ones. Raises ConfigurationError for what cannot be a DSN."""
        try:
            given = parameters(dsn) | dict(options)
        except ValueError as error:
            raise ConfigurationError(f"sink {name!r}: {error}") from None
        if unknown := sorted(given.keys() - _KNOWN):
            raise ConfigurationError(
                f"sink {name!r}: pymysql.connect has no parameter {', '.join(map(repr, unknown))} (in the DSN or in "
                "connect_options)"
            )
        if not given.get("database") and not given.get("db"):
            raise ConfigurationError(f"sink {name!r}: the DSN names no database; write mysql://user@host:3306/database")
        defaults = {"connect_timeout": 10, "program_name": f"tpc {name}"[:32]}
        fixed: dict[str, Any] = {"charset": "utf8mb4", "autocommit": True, "local_infile": False, "cursorclass": Cursor}
        # The server may ask for rows after LOAD DATA LOCAL; PyMySQL itself, with local_infile=False, hands out no file
        flags = CLIENT.LOCAL_FILES | CLIENT.FOUND_ROWS  # the rows of an UPDATE are those found, changed by it or not
        flags |= int(given.get("client_flag", 0))
        lock_timeout = math.ceil(lock_timeout)
        super().__init__(defaults | given | fixed | {"client_flag": flags}, name=name, lock_timeout=lock_timeout)

    def connect(self) -> Connection:
        try:
            connection: Connection = connections.Connection(**self._parameters)
        except pymysql.OperationalError as error:
            code, *_ = error.args
            raise pymysql.OperationalError(
                code, f"cannot connect to MySQL at {self}: {self.redact(str(error.args[-1]))}"
            ) from None
        try:
            _give_up_on_silence(connection)
            connection.may_take(connections.ANSWER_SECONDS + self._lock_timeout)
            self._configure(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _configure(self, connection: Connection) -> None:
        mariadb = is_mariadb(connection)
        settings = _SESSION | (_MARIADB if mariadb else _MYSQL)
        settings |= {"innodb_lock_wait_timeout": str(self._lock_timeout), "lock_wait_timeout": str(self._lock_timeout)}
        execute(connection, "SET " + ", ".join(f"SESSION {name} = {value}" for name, value in settings.items()))

    def at_work(self, connection: Connection) -> AbstractContextManager[None]:
        return connection.at_work()

    def quote(self, *names: str) -> str:
        return quoted(*names)

    def execute(self, connection: Connection, statement: str, parameters: Sequence[object] = ()) -> int:
        return execute(connection, statement, parameters or None)

    def query(self, connection: Connection, statement: str, parameters: Sequence[object] = ()) -> list[servers.Row]:
        return query(connection, statement, parameters or None)

    def has_ledger(self, connection: Connection, schema: str, name: str) -> bool:
        marks = ", ".join(["%s"] * len(servers.LEDGER_COLUMNS))
        found = query(
            connection,
            "SELECT engine, (SELECT MAX(column_name) FROM information_schema.statistics"
            " WHERE table_schema = %s AND table_name = %s AND index_name = 'PRIMARY'),"
            " (SELECT count(*) FROM information_schema.columns"
            f" WHERE table_schema = %s AND table_name = %s AND column_name IN ({marks}))"
            " FROM information_schema.tables WHERE table_schema = %s AND table_name = %s",
            [schema, name, schema, name, *servers.LEDGER_COLUMNS, schema, name],
        )
        for engine, key, columns in found:
            if (str(engine).lower(), key, columns) != ("innodb", "transaction_id", len(servers.LEDGER_COLUMNS)):
                raise servers.no_ledger(f"{schema}.{name}")
        return bool(found)

    def create_ledger(self, connection: Connection, schema: str, name: str) -> None:
        word = "varchar(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL"
        execute(
            connection,
            f"CREATE TABLE IF NOT EXISTS {quoted(schema, name)} ("
            "transaction_id varchar(199) CHARACTER SET ascii COLLATE ascii_bin NOT NULL PRIMARY KEY,"
            f" committed boolean NOT NULL, job {word}, lineage {word}, sink {word}, checkpoint bigint NOT NULL,"
            " written bigint, row_hash varchar(16) CHARACTER SET ascii COLLATE ascii_bin,"
            " at datetime NOT NULL DEFAULT current_timestamp) ENGINE=InnoDB COMMENT='ledger of exactly-once sinks'",
        )

    def _answers(self, connection: Connection) -> bool:
        connection.ping(reconnect=False)
        return True

    def _clean(self, connection: Connection) -> bool:
        return connection.open

    @contextmanager
    def transaction(self, connection: Connection, *, undo: bool = False) -> Iterator[None]:
        """One transaction. Mind that DDL commits it."""
        # the server ends a transaction of ours whose process is stopped, and frees its locks
        execute(connection, f"SET SESSION wait_timeout = {max(_IDLE_LIMIT, self._lock_timeout)}")
        execute(connection, "START TRANSACTION READ WRITE")
        try:
            with connection.at_work() if undo else contextlib.nullcontext():
                yield
        except BaseException:
            with contextlib.suppress(pymysql.Error):
                execute(connection, "ROLLBACK")
            raise
        execute(connection, "ROLLBACK" if undo else "COMMIT")
        with contextlib.suppress(pymysql.Error):
            execute(connection, f"SET SESSION wait_timeout = {_WAIT_TIMEOUT}")

    @contextmanager
    def impatient(self, connection: Connection) -> Iterator[None]:
        """Wait a second at most for a table that others use."""
        execute(connection, "SET SESSION lock_wait_timeout = 1")
        try:
            yield
        finally:
            with contextlib.suppress(pymysql.Error):
                execute(connection, f"SET SESSION lock_wait_timeout = {self._lock_timeout}")


def _give_up_on_silence(connection: Connection) -> None:
    """Let the system close the connection when the server's host has been silent for a minute, however long a
    statement takes."""
    options = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 60_000}
    channel: socket.socket = connection._sock  # type: ignore[attr-defined]
    if channel.family != getattr(socket, "AF_UNIX", None):
        channel.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in options.items():
            if number := getattr(socket, name, None):  # not every system has each of them
                channel.setsockopt(socket.IPPROTO_TCP, number, value)


def parameters(dsn: str) -> dict[str, Any]:
    """The parameters of pymysql.connect that a URL stands for: mysql://user:password@host:port/database?ssl_ca=…

    mariadb:// and mysql+pymysql:// will do too. Raises ValueError, which never quotes the DSN, for what is none."""
    form = "a DSN is mysql://user:password@host:3306/database, with special characters percent-encoded"
    try:
        url = urlsplit(dsn)
        port = url.port
        if "@" in url.path:
            raise ValueError
    except ValueError:
        raise ValueError(f"the DSN cannot be read; {form}") from None
    if url.scheme.split("+")[0] not in ("mysql", "mariadb"):
        raise ValueError(f"the DSN does not begin with mysql:// or mariadb://; {form}")
    found: dict[str, Any] = {
        "host": url.hostname or "localhost",
        "port": port or 3306,
        "user": unquote(url.username or ""),
        "password": unquote(url.password or ""),
        "database": unquote(url.path.removeprefix("/")),
    }
    for name, value in parse_qsl(url.query):
        word = {"true": True, "false": False}.get(value.lower())
        found[name] = word if word is not None else int(value) if value.isdigit() else value
    return {name: value for name, value in found.items() if value != ""}


def is_mariadb(connection: Connection) -> bool:
    return "mariadb" in connection.get_server_info().lower()  # type: ignore[no-untyped-call]


def bytewise(connection: Connection) -> str:
    """The collation that tells texts apart by their bytes, blanks at the end too."""
    return "utf8mb4_nopad_bin" if is_mariadb(connection) else "utf8mb4_0900_bin"


def execute(connection: Connection, statement: str, parameters: Sequence[Any] | None = None) -> int:
    """Run a statement; returns how many rows it changed."""
    with connection.cursor() as cursor:
        return cursor.execute(statement, parameters)


def query(connection: Connection, statement: str, parameters: Sequence[Any] | None = None) -> list[tuple[Any, ...]]:
    with connection.cursor() as cursor:
        cursor.execute(statement, parameters)
        return list(cursor.fetchall())


def setting(connection: Connection, name: str, *, session: bool = False) -> str:
    """A variable of the server; "" if it has none of that name."""
    rows = query(connection, f"SHOW {'SESSION' if session else 'GLOBAL'} VARIABLES LIKE %s", [name])
    return str(rows[0][1]).upper() if rows else ""


def quoted(*names: str) -> str:
    """An identifier of one or more parts, in backticks."""
    return ".".join("`" + name.replace("`", "``") + "`" for name in names)


def listed(names: Sequence[str]) -> str:
    return ", ".join(map(quoted, names))


def literal(text: str) -> str:
    """A string literal under NO_BACKSLASH_ESCAPES."""
    return "'" + text.replace("'", "''") + "'"
