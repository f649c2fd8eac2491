"""The server: connections that suit the protocol, without ever showing a password."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg import IsolationLevel
from psycopg.conninfo import conninfo_to_dict

from sinks.errors import ConfigurationError

logger = logging.getLogger(__name__)

Connection = psycopg.Connection[tuple[Any, ...]]

_SECRETS = ("password", "sslpassword", "oauth_client_secret")
IDLE_CONNECTIONS = 4
_IDLE_LIMIT = 10  # seconds; the server ends a transaction of ours whose process is stopped, and frees its locks


class Server:
    """One database of one server: makes connections, and lends them again on the driver.

    All connections are in autocommit mode, and every transaction of ours is begun by hand or by `transaction()`. No
    session state and no server-side prepared statement is left behind, so a transaction-pooling PgBouncer may stand in
    between.
    """

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
        self._parameters: dict[str, Any] = defaults | given | {"client_encoding": "UTF8"}
        self._lock_timeout = lock_timeout
        self._lock = threading.Lock()
        self._idle: list[Connection] = []

    def connect(self) -> Connection:
        """A new connection. Raises psycopg.OperationalError, naming the server but no password, if there is none."""
        try:
            connection: Connection = psycopg.connect(**self._parameters, autocommit=True, prepare_threshold=None)
        except psycopg.OperationalError as error:
            reason = self.redact(str(error))
            message = f"cannot connect to PostgreSQL at {self}: {reason}"
            raise type(error)(message) from (None if reason != str(error) else error)
        connection.isolation_level = IsolationLevel.READ_COMMITTED
        connection.read_only = False
        return connection

    @contextmanager
    def lend(self) -> Iterator[Connection]:
        """A connection out of a small pool. It comes back unless it broke or was left inside a transaction."""
        connection = self._reusable() or self.connect()
        try:
            yield connection
        finally:
            idle = connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
            with self._lock:
                keep = idle and not connection.closed and len(self._idle) < IDLE_CONNECTIONS
                if keep:
                    self._idle.append(connection)
            if not keep:
                connection.close()

    def _reusable(self) -> Connection | None:
        while True:
            with self._lock:
                if not self._idle:
                    return None
                connection = self._idle.pop()
            try:
                connection.execute("SELECT 1")
                return connection
            except psycopg.Error:
                connection.close()

    @contextmanager
    def transaction(self, connection: Connection) -> Iterator[None]:
        """One READ COMMITTED transaction, durable when it ends, with bounded lock waits."""
        with connection.transaction():
            self.configure(connection)
            yield

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

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def redact(self, text: str) -> str:
        for secret in _SECRETS:
            if value := self._parameters.get(secret):
                text = text.replace(str(value), "***")
        return text

    def __str__(self) -> str:
        """Host, port, database and user as far as they are given, never a password."""
        shown = {key: self._parameters.get(key) for key in ("host", "hostaddr", "port", "dbname", "user")}
        return " ".join(f"{key}={value}" for key, value in shown.items() if value) or "libpq's defaults"

    def __repr__(self) -> str:
        return f"Server({self})"

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in ("_lock", "_idle")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()
        self._idle = []
