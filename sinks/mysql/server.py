"""One database of MySQL or MariaDB as the sink reaches it."""

from __future__ import annotations

import contextlib
import inspect
import math
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pymysql
from pymysql.constants import CLIENT
from pymysql.cursors import Cursor

from sinks.diagnosis import Finding, compare_clocks
from sinks.errors import ConfigurationError
from sinks.mysql.connection import (
    ANSWER_SECONDS,
    Connection,
    error_text,
    execute,
    fault,
    is_mariadb,
    parameters,
    query,
    setting,
)
from sinks.mysql.dialect import MySQLDialect
from sinks.options import Duration, seconds_of_sink
from sinks.sql.server import IDLE_CONNECTIONS, Pool, Row, is_trusted

_IDLE_LIMIT = 10
"""Seconds that a connection may be without a statement inside a transaction of the driver."""
_WAIT_TIMEOUT = "28800"
"""Seconds that a connection of a task may be without rows: the servers' own default."""
_KNOWN = inspect.signature(pymysql.connections.Connection.__init__).parameters.keys()
"""The parameters that PyMySQL takes."""

_SQL_MODE = [
    "STRICT_ALL_TABLES",  # a value that does not fit is an error
    "NO_AUTO_VALUE_ON_ZERO",  # a 0 for an AUTO_INCREMENT column is a 0
    "NO_ENGINE_SUBSTITUTION",
    "ALLOW_INVALID_DATES",  # a table may hold some, or have one as a default
]
"""Nothing that keeps out what an old table has: a zero date is a default or a value of many, and no
date of Spark turns into one. NO_BACKSLASH_ESCAPES would change what MySQL reads in a table's own
expressions, whose text has escapes."""
_KEPT = ["ERROR_FOR_DIVISION_BY_ZERO", "NO_UNSIGNED_SUBTRACTION"]
"""Modes that decide what a table's own expressions give: they stay as the server has them."""
_MODES = [
    f"'{','.join(_SQL_MODE)}'",
    *(f"IF(FIND_IN_SET('{mode}', @@sql_mode), '{mode}', NULL)" for mode in _KEPT),
]
_SESSION = {
    "autocommit": "1",  # init_connect of the server may have changed what the driver thinks it is
    "completion_type": "0",  # COMMIT begins no other transaction, and does not disconnect
    "sql_auto_is_null": "0",  # IS NULL finds no number that was given last
    "sql_mode": f"CONCAT_WS(',', {', '.join(_MODES)})",
    "time_zone": "'+00:00'",
    "sql_notes": "1",  # what is cut off without an error counts as a warning
    "foreign_key_checks": "1",
    "unique_checks": "1",
    "sql_safe_updates": "0",
    "sql_select_limit": "18446744073709551615",
    "sql_big_selects": "1",
    # the last change of a key is told by all of the key: an index takes 3,072 bytes
    "max_sort_length": "16384",
    # room for 15 such keys
    "sort_buffer_size": "CAST(GREATEST(@@sort_buffer_size, 2097152) AS unsigned)",
    "sql_quote_show_create": "1",
    "wait_timeout": _WAIT_TIMEOUT,
}
_MARIADB = {
    "tx_isolation": "'READ-COMMITTED'",
    "tx_read_only": "0",
    "max_statement_time": "0",
    "idle_transaction_timeout": "0",  # a task may be without rows for as long as wait_timeout
    "idle_write_transaction_timeout": "0",
}
_MYSQL = {
    "transaction_isolation": "'READ-COMMITTED'",
    "transaction_read_only": "0",
    "max_execution_time": "0",
}
_NOTES = "/*M!110400 , SESSION note_verbosity = 'basic' */"
"""The setting of MariaDB from 11.4 on, which would cut blanks without a note."""
# From these on a prepared branch is detached from its session, and anybody can finish it: release
# notes of MySQL 8.0.29 (xa_detach_on_prepare), and of MariaDB 10.5.2 (MDEV-742)
_OLDEST = {"MySQL": (8, 0, 29), "MariaDB": (10, 5, 2)}


class MySQLServer(Pool[Connection]):
    """Lend connections of PyMySQL.

    Their transactions are READ COMMITTED, so each statement sees what others have committed by
    then.
    """

    SECRETS = ("password", "passwd", "ssl_key_password")
    SHOWN = ("host", "unix_socket", "port", "database", "user")
    IDLE = 2 * IDLE_CONNECTIONS  # MariaDB needs two for a commit
    KEEPS_IDLE = True

    fault = staticmethod(fault)

    def __init__(
        self,
        dialect: MySQLDialect,
        dsn: str,
        options: Mapping[str, Any],
        *,
        name: str,
        lock_timeout: Duration,
    ) -> None:
        """Read the DSN; nothing is connected yet.

        `dsn` is a mysql:// URL and `options` are parameters of pymysql.connect that override it;
        `name` is the sink's, and `lock_timeout` is rounded up to whole seconds. Raises
        ConfigurationError for what cannot be a DSN.
        """
        try:
            given = parameters(dsn) | dict(options)
        except ValueError as error:
            raise ConfigurationError(f"sink {name!r}: {error}") from None
        if unknown := sorted(given.keys() - _KNOWN):
            raise ConfigurationError(
                f"sink {name!r}: pymysql.connect has no parameter {', '.join(map(repr, unknown))} "
                "(in the DSN or in connect_options)"
            )
        if not given.get("database") and not given.get("db"):
            raise ConfigurationError(
                f"sink {name!r}: the DSN names no database; write mysql://user@host:3306/database"
            )
        for option in ("connect_timeout", "read_timeout", "write_timeout"):
            if option in given:
                given[option] = seconds_of_sink(name, given[option], option)
        defaults = {"connect_timeout": 10, "program_name": f"tpc {name}"[:32]}
        fixed: dict[str, Any] = {
            "charset": "utf8mb4",
            "autocommit": True,
            "local_infile": False,
            "cursorclass": Cursor,
        }
        # The server may ask for rows after LOAD DATA LOCAL; PyMySQL itself, with
        # local_infile=False, hands out no file
        flags = CLIENT.LOCAL_FILES | CLIENT.MULTI_STATEMENTS
        flags |= CLIENT.FOUND_ROWS  # the rows of an UPDATE are those found, changed by it or not
        flags |= int(given.get("client_flag", 0))
        all_parameters = defaults | given | fixed | {"client_flag": flags}
        super().__init__(dialect, all_parameters, name=name, lock_timeout=lock_timeout)
        self.lock_seconds = math.ceil(self._lock_timeout)

    # ------------------------------------------------------------------ connections
    def connect(self) -> Connection:
        try:
            connection = Connection(**self._parameters)
        except pymysql.OperationalError as error:
            code, *_ = error.args
            raise pymysql.OperationalError(
                code, f"cannot connect to MySQL at {self}: {self.redact(str(error.args[-1]))}"
            ) from None
        try:
            connection.give_up_on_silence()
            self._configure(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def take(self) -> Connection:
        connection: Connection = super().take()
        connection.may_take(ANSWER_SECONDS + self.lock_seconds)
        return connection

    def _configure(self, connection: Connection) -> None:
        mariadb = is_mariadb(connection)
        settings = _SESSION | (_MARIADB if mariadb else _MYSQL)
        settings |= {
            "innodb_lock_wait_timeout": str(self.lock_seconds),
            "lock_wait_timeout": str(self.lock_seconds),
        }
        sets = ", ".join(f"SESSION {name} = {value}" for name, value in settings.items())
        execute(connection, f"SET {sets} {_NOTES}")

    def answers(self, connection: Connection, rested: float) -> bool:
        if not is_trusted(connection, rested):
            connection.ping(reconnect=False)
        return True

    def can_be_lent(self, connection: Connection) -> bool:
        connection.flush()
        return connection.open

    @property
    def place(self) -> Hashable:
        """DSN and `connect_options`, in whatever spelling, without the name of the session."""
        return "mysql", self.digest(without="program_name")

    # ------------------------------------------------------------------ statements and transactions
    @contextmanager
    def transaction(self, connection: Connection, *, undo: bool = False) -> Iterator[None]:
        """Run the block as one transaction, which DDL in the block would commit."""
        # the server ends a transaction of ours whose process is stopped, and frees its locks
        connection.defer(f"SET SESSION wait_timeout = {max(_IDLE_LIMIT, self.lock_seconds)}")
        connection.defer("START TRANSACTION")
        try:
            with connection.at_work() if undo else contextlib.nullcontext():
                yield
                connection.flush()
        except BaseException:
            connection.forget()
            with contextlib.suppress(pymysql.Error):
                execute(connection, "ROLLBACK")
            raise
        connection.defer("ROLLBACK" if undo else "COMMIT")
        connection.defer(f"SET SESSION wait_timeout = {_WAIT_TIMEOUT}")
        if undo:  # of many rows it takes as long as the rows did
            with connection.at_work(), contextlib.suppress(pymysql.Error):
                connection.flush()
        else:
            connection.flush()

    def at_work(self, connection: Connection) -> AbstractContextManager[None]:
        return connection.at_work()

    def execute(
        self, connection: Connection, statement: str, parameters: Sequence[object] = ()
    ) -> int:
        return execute(connection, statement, parameters)

    def query(
        self, connection: Connection, statement: str, parameters: Sequence[object] = ()
    ) -> list[Row]:
        return query(connection, statement, parameters)

    def defer(
        self,
        connection: Connection,
        statement: str,
        parameters: Sequence[object],
        judge: Callable[[list[Row]], object],
    ) -> object:
        return connection.defer(statement, parameters, judge)

    def insert_missing(
        self,
        connection: Connection,
        columns: Sequence[str],
        inserts: Mapping[str, Sequence[Sequence[object]]],
    ) -> int:
        """Insert missing rows as in `Server`, with one message for the statements of all tables.

        There are further messages if there are more rows than one statement has.
        """
        changed = 0
        statements = [
            self.dialect.insertions(table, columns, rows) for table, rows in inserts.items()
        ]
        for together in zip(*statements, strict=True):
            for statement, values in together:
                connection.defer(statement, values)
            changed += connection.flush()
        return changed

    def describe_loading(self, connection: Connection) -> str:
        ((local,),) = query(connection, "SELECT @@local_infile")
        return f"by {'LOAD DATA' if local else 'INSERT, since local_infile is OFF'}"

    # ------------------------------------------------------------ what operators and users are told
    def unfit(self, connection: Connection) -> str | None:
        product = "MariaDB" if is_mariadb(connection) else "MySQL"
        ((text,),) = query(connection, "SELECT VERSION()")
        match = re.match(r"(\d+)\.(\d+)\.(\d+)", text)
        version = tuple(map(int, match.groups())) if match else ()
        if version >= _OLDEST[product]:
            return None
        return (
            f"the server is {product} {text} ({self}), and exactly-once needs "
            f"{'.'.join(map(str, _OLDEST[product]))} or newer: in older ones a prepared XA "
            "transaction ends with its connection, or stays tied to it"
        )

    def findings(self, connection: Connection) -> Iterable[Finding]:
        ((version,),) = query(connection, "SELECT VERSION()")
        yield Finding.ok(f"{'MariaDB' if is_mariadb(connection) else 'MySQL'} {version}")
        if setting(connection, "local_infile") not in ("1", "ON"):
            yield Finding.warning(
                "local_infile is OFF: rows go in by INSERT, which takes more time than LOAD DATA",
                "SET GLOBAL local_infile = ON; and in the server's option file",
            )
        if (most := setting(connection, "group_replication_transaction_size_limit")) not in (
            "",
            "0",
        ):
            yield Finding.warning(
                f"group_replication_transaction_size_limit = {most}: by the strategy staged a "
                "checkpoint is one transaction",
                "set it to 0, or keep checkpoints smaller than that: a larger one is refused after "
                "its decision",
            )
        yield from compare_clocks(
            "the server", lambda: float(query(connection, "SELECT UNIX_TIMESTAMP(NOW(6))")[0][0])
        )

    def unreachable(self, error: Exception) -> str | None:
        return self.redact(error_text(error)) if isinstance(error, pymysql.Error) else None
