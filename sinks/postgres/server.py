"""The server: connections that suit the protocol, without ever showing a password."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg import IsolationLevel
from psycopg.conninfo import conninfo_to_dict

from sinks.errors import ConfigurationError
from sinks.sql import server as servers

logger = logging.getLogger(__name__)

Connection = psycopg.Connection[tuple[Any, ...]]

_IDLE_LIMIT = 10  # seconds; the server ends a transaction of ours whose process is stopped, and frees its locks


class Server(servers.Server[Connection]):
    """Leaves no session state and no server-side prepared statement behind, so a transaction-pooling PgBouncer may
    stand in between."""

    SECRETS = ("password", "sslpassword", "oauth_client_secret")
    SHOWN = ("host", "hostaddr", "port", "dbname", "user")

    def __init__(self, dsn: str, options: Mapping[str, Any], *, name: str, lock_timeout: float) -> None:
        """`dsn` is a libpq URL or key=value string and `options` are libpq parameters that override it; `lock_timeout`
        is in seconds. Raises ConfigurationError if libpq cannot read them."""
        try:
            given = conninfo_to_dict(dsn, **options)
        except psycopg.Error:
            # libpq's message quotes the part it could not read, which may be the password
            raise ConfigurationError(
                f"sink {name!r}: libpq cannot read the DSN or an option of connect_options "
                f"({', '.join(map(repr, options)) or 'none given'}); a DSN is postgresql://user@host:5432/database or "
                "host=… port=… dbname=… user=…, with special characters of a URL percent-encoded"
            ) from None
        defaults = {
            "application_name": f"tpc {name}"[:63],
            "connect_timeout": 10,
            "tcp_user_timeout": 60_000,
            "client_encoding": "UTF8",  # of the text inside COPY BINARY too, so not the user's to choose
        }
        super().__init__(defaults | given | {"client_encoding": "UTF8"})
        self._lock_timeout = lock_timeout

    def connect(self) -> Connection:
        try:
            connection: Connection = psycopg.connect(**self._parameters, autocommit=True, prepare_threshold=None)
        except psycopg.OperationalError as error:
            reason = self.redact(str(error))
            message = f"cannot connect to PostgreSQL at {self}: {reason}"
            raise type(error)(message) from (None if reason != str(error) else error)
        connection.isolation_level = IsolationLevel.READ_COMMITTED
        connection.read_only = False
        return connection

    def _answers(self, connection: Connection) -> bool:
        return bool(connection.execute("SELECT 1"))

    def _clean(self, connection: Connection) -> bool:
        idle = connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
        return idle and not connection.closed

    @contextmanager
    def transaction(self, connection: Connection) -> Iterator[None]:
        with connection.transaction():
            self.configure(connection)
            yield

    @contextmanager
    def trial(self, connection: Connection) -> Iterator[None]:
        with self.transaction(connection):
            yield
            raise psycopg.Rollback

    def configure(self, connection: Connection) -> None:
        """Settings of the running transaction: at least a local flush at its end, whatever the user's default is;
        `lock_timeout`; and no statement timeout, since a COPY is one statement for as long as the partition lasts."""
        connection.execute(
            "SELECT set_config('synchronous_commit', CASE current_setting('synchronous_commit')"
            " WHEN 'off' THEN 'local' ELSE current_setting('synchronous_commit') END, true),"
            " set_config('lock_timeout', %s, true), set_config('statement_timeout', '0', true),"
            " set_config('idle_in_transaction_session_timeout', %s, true)",
            [f"{max(1, round(self._lock_timeout * 1000))}ms", f"{max(_IDLE_LIMIT, round(self._lock_timeout))}s"],
        )


def row(connection: Connection, query: str, *parameters: object) -> tuple[Any, ...]:
    """The row of a query that has one."""
    found = connection.execute(query, parameters or None).fetchone()
    assert found is not None
    return found
