"""One PostgreSQL database as the sink reaches it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg import errors
from psycopg.conninfo import conninfo_to_dict

from sinks.diagnosis import Finding, compare_clocks
from sinks.errors import ConfigurationError
from sinks.options import Duration
from sinks.postgres.connection import SILENCE, Connection, fault, row
from sinks.postgres.dialect import PostgresDialect
from sinks.sql.databases import postgres_settings
from sinks.sql.server import KEEPALIVES, PERCENT_ENCODED, Pool, Row, is_trusted


class PostgresServer(Pool[Connection]):
    """Lend connections of psycopg, and run statements on them.

    They leave no session state and no server-side prepared statement behind, so a
    transaction-pooling PgBouncer may stand in between.
    """

    KEEPS_IDLE = True
    SECRETS = ("password", "sslpassword", "oauth_client_secret")
    SHOWN = ("host", "hostaddr", "port", "dbname", "user")
    CHECK = "host, port, database, user, password and pg_hba.conf, and that the server runs"

    fault = staticmethod(fault)

    def __init__(
        self,
        dialect: PostgresDialect,
        dsn: str,
        options: Mapping[str, Any],
        *,
        name: str,
        lock_timeout: Duration,
    ) -> None:
        """Read the DSN; nothing is connected yet.

        `dsn` is a libpq URL or key=value string and `options` are libpq parameters that override
        it; `name` is the sink's. Raises ConfigurationError if libpq cannot read them.
        """
        try:
            given = conninfo_to_dict(dsn, **options)
        except psycopg.Error:
            # libpq's message quotes the part it could not read, which may be the password
            raise ConfigurationError(
                f"sink {name!r}: libpq cannot read the DSN or an option of connect_options "
                f"({', '.join(map(repr, options)) or 'none given'}); a DSN is "
                "postgresql://user@host:5432/database or host=… port=… dbname=… user=…, with "
                "special characters of a URL percent-encoded"
            ) from None
        authority, _, path = dsn.partition("?")[0].partition("://")[2].partition("/")
        # libpq takes a part of the password for the host or the database
        if authority.count("@") > 1 or "@" in path:
            raise ConfigurationError(
                f"sink {name!r}: the DSN holds an '@' too many: {PERCENT_ENCODED}"
            )
        defaults = {
            "application_name": f"tpc {name}"[:63],
            "connect_timeout": 10,
            "tcp_user_timeout": 60_000,
            **KEEPALIVES,
        }
        fixed = {"client_encoding": "UTF8"}  # this holds for the text inside COPY BINARY too
        super().__init__(dialect, defaults | given | fixed, name=name, lock_timeout=lock_timeout)
        self._silent_until = 0.0

    # ------------------------------------------------------------------ connections
    def connect(self) -> Connection:
        if time.monotonic() < self._silent_until:
            raise psycopg.OperationalError(
                f"PostgreSQL at {self} did not answer a moment ago; it is not asked yet again"
            )
        try:
            how = {
                "autocommit": True,
                "prepare_threshold": None,
                "cursor_factory": psycopg.ClientCursor,
            }
            connection = Connection.connect(**self._parameters | how)
        except psycopg.OperationalError as error:
            if isinstance(error, errors.ConnectionTimeout):
                self._was_silent()
            reason = self.redact(str(error))
            message = f"cannot connect to PostgreSQL at {self}: {reason}"
            raise type(error)(message) from (None if reason != str(error) else error)
        return connection

    def take(self) -> Connection:
        connection: Connection = super().take()
        connection.server = str(self)
        connection.on_silence = self._was_silent
        return connection

    def _was_silent(self) -> None:
        self._silent_until = time.monotonic() + SILENCE

    def answers(self, connection: Connection, rested: float) -> bool:
        return is_trusted(connection, rested) or bool(connection.execute("SELECT 1"))

    def can_be_lent(self, connection: Connection) -> bool:
        connection.flush()
        return connection.idle and not connection.closed

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_silent_until": 0.0}  # another machine has another clock

    @property
    def place(self) -> Hashable:
        """DSN and `connect_options`, in whatever spelling, without the name of the session."""
        return "postgres", self.digest(without="application_name")

    # ------------------------------------------------------------------ transactions
    @contextmanager
    def transaction(self, connection: Connection, *, undo: bool = False) -> Iterator[None]:
        connection.flush()
        if connection.idle:
            with self._begun(connection, "WRITE", undo=undo):
                yield
            return
        with connection.transaction(force_rollback=undo):
            yield

    @contextmanager
    def reading(self, connection: Connection) -> Iterator[None]:
        """Run the block as one transaction that only reads, or inside the one that runs already."""
        with self._begun(connection, "ONLY") if connection.idle else contextlib.nullcontext():
            yield

    @contextmanager
    def _begun(self, connection: Connection, access: str, *, undo: bool = False) -> Iterator[None]:
        self.begin(connection, access)
        try:
            yield
            connection.flush()
        except BaseException:
            with contextlib.suppress(psycopg.Error):  # that of a lost connection
                connection.rollback()
            raise
        if undo:
            connection.rollback()
        else:
            connection.end("COMMIT")

    def begin(self, connection: Connection, access: str = "WRITE") -> None:
        """Begin a transaction together with the next statement."""
        connection.defer(f"BEGIN ISOLATION LEVEL READ COMMITTED READ {access}")
        connection.defer(postgres_settings(self._lock_timeout))

    # ------------------------------------------------------------------ statements
    def execute(
        self, connection: Connection, statement: str, parameters: Sequence[object] = ()
    ) -> int:
        if connection.idle:
            with self.transaction(connection):
                return self.execute(connection, statement, parameters)
        return connection.execute(statement.encode(), parameters or None).rowcount

    def query(
        self, connection: Connection, statement: str, parameters: Sequence[object] = ()
    ) -> list[Row]:
        self._defer_settings(connection)
        return connection.execute(statement.encode(), parameters or None).fetchall()

    def defer(
        self,
        connection: Connection,
        statement: str,
        parameters: Sequence[object],
        judge: Callable[[list[Row]], object],
    ) -> list[Row]:
        self._defer_settings(connection)
        return connection.defer(statement, parameters, judge)

    def _defer_settings(self, connection: Connection) -> None:
        """Configure the next statement, if it runs outside of a transaction.

        The statements of one message are one transaction, so the settings hold for the statement.
        """
        if connection.idle:
            connection.defer(postgres_settings(self._lock_timeout))

    def insert_missing(
        self,
        connection: Connection,
        columns: Sequence[str],
        inserts: Mapping[str, Sequence[Sequence[object]]],
    ) -> int:
        """Insert missing rows as in `Server`, with all statements in one message."""
        statements = [
            statement
            for table, rows in inserts.items()
            for statement in self.dialect.insertions(table, columns, rows)
        ]
        last, values = statements.pop()
        added = [
            self.defer(connection, f"{statement} RETURNING 1", asked, len)
            for statement, asked in statements
        ]
        added.append(self.query(connection, f"{last} RETURNING 1", values))
        return sum(map(len, added))

    # ------------------------------------------------------------ what operators and users are told
    def findings(self, connection: Connection) -> Iterable[Finding]:
        (version,) = row(connection, "SELECT current_setting('server_version')")
        yield Finding.ok(f"PostgreSQL {version}")
        yield from compare_clocks(
            "the server",
            lambda: float(row(connection, "SELECT extract(epoch from clock_timestamp())")[0]),
        )

    def unreachable(self, error: Exception) -> str | None:
        return (
            self.redact(str(error)).strip() if isinstance(error, psycopg.OperationalError) else None
        )
