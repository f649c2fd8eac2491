"""The server: connections that suit the protocol, without ever showing a password."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import psycopg
from psycopg import IsolationLevel, errors, sql
from psycopg.conninfo import conninfo_to_dict

from sinks.errors import ConfigurationError
from sinks.postgres import connection as connections
from sinks.sql import server as servers

logger = logging.getLogger(__name__)

_IDLE_LIMIT = 10  # seconds; the server ends a transaction of ours whose process is stopped, and frees its locks


class Connection(connections.Connection):
    server: Server

    @property
    def place(self) -> str:
        return str(self.server)

    def probe(self) -> None:
        try:
            super().probe()
        except errors.ConnectionTimeout:
            self.server.was_silent()
            raise

    @contextmanager
    def bounded(self, *, write: bool = False) -> Iterator[None]:
        """A transaction, or the one that is open already: outside of one `lock_timeout` cannot be set."""
        if self.info.transaction_status == psycopg.pq.TransactionStatus.INTRANS:
            yield
            return
        self.read_only = not write
        try:
            with self.transaction():
                self.server.configure(self)
                yield
        finally:
            if not self.closed:
                self.read_only = False


# How CREATE TABLE IF NOT EXISTS fails when another session creates the same table at the same moment.
_CREATED_BY_OTHERS = (errors.UniqueViolation, errors.DuplicateTable, errors.DuplicateObject)


class Server(servers.PooledServer[Connection]):
    """Leaves no session state and no server-side prepared statement behind, so a transaction-pooling PgBouncer may
    stand in between."""

    dialect = "postgresql"
    SECRETS = ("password", "sslpassword", "oauth_client_secret")
    SHOWN = ("host", "hostaddr", "port", "dbname", "user")
    INSERT_MISSING = "INSERT INTO {table} ({columns}) VALUES {rows} ON CONFLICT DO NOTHING"

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
        authority, _, path = dsn.partition("?")[0].partition("://")[2].partition("/")
        if authority.count("@") > 1 or "@" in path:  # libpq takes a part of the password for the host or the database
            raise ConfigurationError(f"sink {name!r}: the DSN holds an '@' too many: {servers.PERCENT_ENCODED}")
        defaults = {
            "application_name": f"tpc {name}"[:63],
            "connect_timeout": 10,
            "tcp_user_timeout": 60_000,
            "client_encoding": "UTF8",  # of the text inside COPY BINARY too, so not the user's to choose
        }
        super().__init__(defaults | given | {"client_encoding": "UTF8"}, name=name, lock_timeout=lock_timeout)
        self._silent_until = 0.0

    def connect(self) -> Connection:
        if time.monotonic() < self._silent_until:
            raise psycopg.OperationalError(
                f"PostgreSQL at {self} did not answer a moment ago; it is not asked yet again"
            )
        try:
            connection = Connection.connect(**self._parameters, autocommit=True, prepare_threshold=None)
        except psycopg.OperationalError as error:
            if isinstance(error, errors.ConnectionTimeout):
                self.was_silent()
            reason = self.redact(str(error))
            message = f"cannot connect to PostgreSQL at {self}: {reason}"
            raise type(error)(message) from (None if reason != str(error) else error)
        connection.server = self
        connection.isolation_level = IsolationLevel.READ_COMMITTED
        connection.read_only = False
        return connection

    def was_silent(self) -> None:
        self._silent_until = time.monotonic() + connections.SILENCE

    def _answers(self, connection: Connection) -> bool:
        return bool(connection.execute("SELECT 1"))

    def _clean(self, connection: Connection) -> bool:
        idle = connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
        return idle and not connection.closed

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_silent_until": 0.0}  # another machine has another clock

    @contextmanager
    def transaction(self, connection: Connection, *, undo: bool = False) -> Iterator[None]:
        with connection.transaction(force_rollback=undo):
            self.configure(connection)
            yield

    def reading(self, connection: Connection) -> AbstractContextManager[None]:
        return connection.bounded()

    def quote(self, *names: str) -> str:
        return sql.Identifier(*names).as_string()

    def execute(self, connection: Connection, statement: str, parameters: Sequence[object] = ()) -> int:
        with connection.bounded(write=True):
            return connection.execute(statement.encode(), parameters or None).rowcount

    def query(self, connection: Connection, statement: str, parameters: Sequence[object] = ()) -> list[servers.Row]:
        with connection.bounded():
            return connection.execute(statement.encode(), parameters or None).fetchall()

    def has_ledger(self, connection: Connection, schema: str, name: str) -> bool:
        found = self.query(
            connection,
            "SELECT c.relkind IN ('r', 'p') AND EXISTS (SELECT FROM pg_index WHERE indrelid = c.oid AND indisprimary),"
            " ARRAY(SELECT attname::text FROM pg_attribute"
            " WHERE attrelid = c.oid AND attnum > 0 AND NOT attisdropped)"
            " FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace WHERE nspname = %s AND relname = %s",
            [schema, name],
        )
        if found and not (found[0][0] and set(found[0][1]) >= set(servers.LEDGER_COLUMNS)):
            raise servers.no_ledger(f"{schema}.{name}")
        return bool(found)

    def create_ledger(self, connection: Connection, schema: str, name: str) -> None:
        self.create_table(
            connection,
            f'{self.quote(schema, name)} (transaction_id text COLLATE "C" PRIMARY KEY, committed boolean NOT NULL,'
            " job text NOT NULL, lineage text NOT NULL, sink text NOT NULL, checkpoint bigint NOT NULL,"
            " written bigint, row_hash text,"
            " at timestamptz NOT NULL DEFAULT now())",
        )

    def create_table(self, connection: Connection, definition: str) -> None:
        """Create a table, unless there is one, or somebody else does at the same moment."""
        try:
            self.execute(connection, f"CREATE TABLE IF NOT EXISTS {definition}")
        except _CREATED_BY_OTHERS:
            logger.debug("somebody else created the same table at the same time: %s", definition)

    def configure(self, connection: Connection) -> None:
        """Settings of the running transaction: at least a local flush at its end, whatever the user's default is;
        `lock_timeout`; and no statement or transaction timeout, since a COPY is one statement for as long as the
        partition lasts."""
        unlimited = ", set_config('transaction_timeout', '0', true)" if connection.info.server_version >= 170000 else ""
        connection.execute(
            "SELECT set_config('synchronous_commit', CASE current_setting('synchronous_commit')"
            " WHEN 'off' THEN 'local' ELSE current_setting('synchronous_commit') END, true),"
            " set_config('lock_timeout', %s, true), set_config('statement_timeout', '0', true),"
            f" set_config('idle_in_transaction_session_timeout', %s, true){unlimited}",
            [f"{max(1, round(self._lock_timeout * 1000))}ms", f"{max(_IDLE_LIMIT, round(self._lock_timeout))}s"],
        )


def row(connection: Connection, query: str, *parameters: object) -> tuple[Any, ...]:
    """The row of a query that has one."""
    found = connection.execute(query, parameters or None).fetchone()
    assert found is not None
    return found
