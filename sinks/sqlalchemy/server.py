"""One database as SQLAlchemy reaches it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.engine import URL, Connection, Engine

from sinks.errors import BadValue, ConfigurationError
from sinks.sql.databases import MYSQL, postgres_settings
from sinks.sql.dialect import marks
from sinks.sql.server import PERCENT_ENCODED, Fault, Row, Server
from sinks.sql.table import MergeOptions
from sinks.sqlalchemy.dialect import SqlAlchemyDialect
from sinks.sqlalchemy.engine import LOCK_SECONDS, make_engine, parse

_SILENCE = 60
"""Seconds that a host may keep a connection waiting, or another writer of SQLite, which has one at
a time: a task waits for all of another's partition."""
_ANSWER_SECONDS = 300

# The words of SQLite, PostgreSQL, Oracle and SQL Server when a bounded wait for a lock timed out.
_BLOCKED = re.compile(
    r"database (table |schema )?is locked|lock timeout|deadlock|lock request time"
    r"|ORA-(00054|30006|00060)",
    re.IGNORECASE,
)
_REFUSED = re.compile(r"constraint|out of range|generated column", re.IGNORECASE)
"""Some drivers answer a refused row with OperationalError."""

# The words of databases for a table that is not as it was, and for a privilege that the user lacks.
_CHANGED = re.compile(
    r"no such (table|column)|has no column|(table|relation|column) .*(n.t|not) exist",
    re.IGNORECASE,
)
_DENIED = re.compile(
    r"(command|permission) denied|insufficient privilege|read.?only", re.IGNORECASE
)
_BROKEN = """
SELECT count(*) FROM sqlite_master AS its, pragma_foreign_key_check(its.name)
 WHERE its.type = 'table' AND its.sql LIKE '%initially%deferred%'
"""


class SqlAlchemyServer(Server[Connection]):
    """Lend connections of an engine, which each process has for itself; never show the password."""

    CHECK = "address, user, password and rights, and that the server runs"

    dialect: SqlAlchemyDialect

    def __init__(
        self, url: str | URL, options: Mapping[str, Any], merge: MergeOptions, *, name: str
    ) -> None:
        """Read the URL; nothing is connected yet.

        `options` go to `sqlalchemy.create_engine`; `name` is the sink's. Raises ConfigurationError
        for a URL that cannot be read.
        """
        self._options = dict(options)
        try:
            self.url = parse(url)
            self.dialect = SqlAlchemyDialect(self.url, merge)
            self.engine = self._make()
        except (exc.NoSuchModuleError, ImportError) as error:
            raise ConfigurationError(
                f"sink {name!r}: SQLAlchemy has no dialect or driver for the URL: {error}. Install "
                "it on the driver and the executors"
            ) from None
        except (exc.ArgumentError, ValueError):
            raise ConfigurationError(
                f"sink {name!r}: SQLAlchemy cannot read the URL; write "
                "DIALECT+DRIVER://USER:PASSWORD@HOST:PORT/DATABASE with special characters "
                "percent-encoded"
            ) from None
        if "@" in (self.url.host or ""):
            raise ConfigurationError(
                f"sink {name!r}: the host of the URL holds an '@': {PERCENT_ENCODED}"
            )
        if self.dialect.name in MYSQL:
            raise ConfigurationError(
                f"sink {name!r}: for MySQL and MariaDB use sinks.mysql.MySQLSink"
            )
        if (level := _isolation(options)) in ("AUTOCOMMIT", "READ UNCOMMITTED"):
            raise ConfigurationError(
                f"sink {name!r}: with isolation_level={level!r} the sink has no transactions, or "
                "takes what others may yet roll back for committed: leave it out"
            )
        if self.dialect.name == "sqlite" and (self.url.database or ":memory:") == ":memory:":
            raise ConfigurationError(
                f"sink {name!r}: tasks cannot see a SQLite database in memory; give it a file"
            )

    def _make(self) -> Engine:
        """Make the engine, which opens no connection yet."""
        options = dict(self._options)
        if "json_serializer" in sa.util.get_cls_kwargs(self.url.get_dialect()):
            options["json_serializer"] = str  # values for JSON columns are JSON text already
        if self.dialect.name != "sqlite":
            options.setdefault("isolation_level", "READ COMMITTED")
        engine = make_engine(self.url, silence=_SILENCE, answer=_ANSWER_SECONDS, **options)

        @sa.event.listens_for(engine, "handle_error")
        def hide_statement(context: sa.ExceptionContext) -> None:
            if isinstance(context.sqlalchemy_exception, exc.StatementError):
                context.sqlalchemy_exception.statement = None

        if self.dialect.name == "sqlite":

            @sa.event.listens_for(engine, "begin")
            def begin(connection: Connection) -> None:
                """Take the write lock at once: two readers that both want to write could only
                fail."""
                connection.exec_driver_sql("BEGIN IMMEDIATE")

        if self.dialect.name == "postgresql":

            @sa.event.listens_for(engine, "begin")
            def configure_transaction(connection: Connection) -> None:
                connection.exec_driver_sql(postgres_settings(LOCK_SECONDS))

        return engine

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "engine"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.engine = self._make()

    def __str__(self) -> str:
        return self.url.set(query={}).render_as_string(hide_password=True)

    # ----------------------------------------------------------------- connections and transactions
    def lend(self) -> AbstractContextManager[Connection]:
        return self.engine.connect()

    def close(self) -> None:
        self.engine.dispose()

    @contextmanager
    def transaction(self, connection: Connection, *, undo: bool = False) -> Iterator[None]:
        connection.rollback()  # ends what reading began
        with connection.begin() as transaction:
            before = self._broken(connection) if undo else 0
            yield
            if undo:
                if self._broken(connection) > before:
                    raise BadValue("a foreign key that SQLite judges at COMMIT refuses rows")
                transaction.rollback()

    def _broken(self, connection: Connection) -> int:
        """Count the broken foreign keys of SQLite's tables that have some which only COMMIT judges.

        In another database the result is 0.
        """
        return int(self.query(connection, _BROKEN)[0][0]) if self.dialect.name == "sqlite" else 0

    # ------------------------------------------------------------------ statements
    def execute(
        self, connection: Connection, statement: str, parameters: Sequence[object] = ()
    ) -> int:
        return connection.execute(_text(statement, parameters)).rowcount

    def query(
        self, connection: Connection, statement: str, parameters: Sequence[object] = ()
    ) -> list[Row]:
        return [tuple(row) for row in connection.execute(_text(statement, parameters))]

    def insert_missing(
        self,
        connection: Connection,
        columns: Sequence[str],
        inserts: Mapping[str, Sequence[Sequence[object]]],
    ) -> int:
        return sum(
            self._insert_missing(connection, columns, table, rows)
            for table, rows in inserts.items()
        )

    def _insert_missing(
        self,
        connection: Connection,
        columns: Sequence[str],
        table: str,
        rows: Sequence[Sequence[object]],
    ) -> int:
        """Insert all rows together, or otherwise one after the other.

        If the database refuses a single row, its primary key is there already.
        """
        statement = (
            f"INSERT INTO {table} ({self.dialect.quoted(columns)}) VALUES ({marks(columns)})"
        )
        try:
            with connection.begin_nested():
                for row in rows:
                    connection.execute(_text(statement, row))
            return len(rows)
        except exc.IntegrityError:
            if len(rows) == 1:
                return 0
            return sum(self._insert_missing(connection, columns, table, [row]) for row in rows)

    # ------------------------------------------------------------------ errors
    def error_text(self, error: BaseException) -> str:
        """Return the database's own words, in one line, without the password."""
        text = " ".join(str(error.orig if isinstance(error, exc.DBAPIError) else error).split())
        return text.replace(str(self.url.password), "***") if self.url.password else text

    def fault(self, error: Exception) -> Fault | None:
        """Tell what an error is about.

        Return None for a lost connection, and for what is not an error of SQLAlchemy.
        """
        if not isinstance(error, exc.SQLAlchemyError):
            return None
        text = self.error_text(error)
        of_database = isinstance(error, exc.DBAPIError)
        cause = getattr(error, "orig", None)
        if getattr(cause, "sqlstate", None) and self.url.get_driver_name() == "psycopg":
            from sinks.postgres import connection as of_psycopg

            known = of_psycopg.fault(cause)
            return known and replace(
                known, advice=known.advice if known.kind == "refused" else "", clash=False
            )
        unbound = isinstance(error, exc.StatementError) and not of_database
        # this comes first: the text may have values of a row, which nothing below should match
        if unbound or isinstance(error, exc.IntegrityError | exc.DataError):
            return Fault("refused", text)
        if of_database and _BLOCKED.search(text):
            return Fault("blocked", text)
        if getattr(error, "connection_invalidated", False):
            return None
        if of_database and _REFUSED.search(text):
            return Fault("refused", text)
        if isinstance(error, exc.NoSuchTableError) or (of_database and _CHANGED.search(text)):
            return Fault("changed", f"{text} (at {self})")
        if _DENIED.search(text):
            return Fault("privilege", text)
        if isinstance(error, exc.ProgrammingError | exc.NotSupportedError):
            return Fault("server", f"{text} (at {self})")
        return Fault("other", text) if of_database else None

    def unreachable(self, error: Exception) -> str | None:
        """Return the database's words for any error of SQLAlchemy, without the statement."""
        return (
            f"cannot use {self}: {self.error_text(error)}"
            if isinstance(error, exc.SQLAlchemyError)
            else None
        )


def _isolation(options: Mapping[str, Any]) -> str:
    level = options.get("isolation_level") or (options.get("execution_options") or {}).get(
        "isolation_level"
    )
    return str(level or "").upper().replace("_", " ")


def _text(statement: str, parameters: Sequence[object]) -> sa.TextClause:
    """Make a statement whose parameters are %s, with the types that the parameters' values have."""
    if not parameters:
        return sa.text(statement.replace(":", "\\:"))
    pieces = statement.replace(":", "\\:").replace("%%", "\0").split("%s")
    names = [f"p{number}" for number in range(len(parameters))]
    marks = [*(f":{name}" for name in names), ""]
    marked = "".join(
        piece.replace("\0", "%") + mark for piece, mark in zip(pieces, marks, strict=True)
    )
    return sa.text(marked).bindparams(**dict(zip(names, parameters, strict=True)))
