"""Checkpoint storage in a table of any database that SQLAlchemy knows."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from sqlalchemy import (
    Column,
    DateTime,
    LargeBinary,
    MetaData,
    String,
    Table,
    func,
    inspect,
    literal_column,
    select,
)
from sqlalchemy.dialects.mysql import LONGBLOB, VARCHAR
from sqlalchemy.engine import URL, Connection
from sqlalchemy.exc import (
    ArgumentError,
    DBAPIError,
    IntegrityError,
    NoSuchModuleError,
    OperationalError,
    SQLAlchemyError,
)
from sqlalchemy.pool import NullPool
from sqlalchemy.sql import Executable
from tenacity import Retrying

from coordinator.storage.base import (
    SUPPORTED,
    CheckpointStorage,
    NoSuchStorage,
    StorageError,
    check_folder,
    check_key,
    is_missing,
)
from coordinator.storage.retry import retries
from coordinator.storage.uris import redacted, secret_parameters
from sinks.sql.databases import weaknesses
from sinks.sql.server import Row
from sinks.sqlalchemy.engine import file_readers, make_engine, parse

_SILENCE = 30
_ANSWER_SECONDS = 10
_DURABLE = (
    "SELECT set_config('synchronous_commit', 'local', false) WHERE"
    " current_setting('synchronous_commit') = 'off'"
)

# The expressions for the seconds since the epoch, by dialect.
_CLOCK = {"postgresql": "extract(epoch FROM clock_timestamp())"}
_CLOCK |= dict.fromkeys(("mysql", "mariadb"), "UNIX_TIMESTAMP(NOW(6))")

_URL_ADVICE = (
    "Write DIALECT://USER:PASSWORD@HOST:PORT/DATABASE, with '@', ':', '/', '?', '#' and '%' in the "
    "password as %40, %3A, %2F, %3F, %23 and %25"
)

_ADVICE = (
    (
        "disk is full|No space left",
        "Free space there; the query can then be restarted, nothing torn was left",
    ),
    (
        "permission denied|read-?only|unable to open",
        "Let this user create and write the table, or the file",
    ),
    (
        "is locked",
        "Another process keeps the sqlite file locked; stop it, or use a server database",
    ),
    ("password|authentication", "Check user and password"),
    ("connection|connect|resolve", "Check that the server runs and can be reached from the driver"),
)

# Keys are compared byte by byte, whatever the collation of the database.
_KEY_TYPE = (
    String(512)
    .with_variant(String(512, collation="C"), "postgresql")
    .with_variant(VARCHAR(512, charset="ascii", collation="ascii_bin"), "mysql", "mariadb")
)
_TABLE = Table(
    "checkpoint_storage",
    MetaData(),
    Column("key", _KEY_TYPE, primary_key=True),
    Column("value", LargeBinary().with_variant(LONGBLOB(), "mysql", "mariadb"), nullable=False),
    Column("created", DateTime(timezone=True), server_default=func.now(), nullable=False),
    mysql_engine="InnoDB",
    mariadb_engine="InnoDB",
)


class SQLStorage(CheckpointStorage):
    """Storage in the table `checkpoint_storage` of a database, with one row for each key.

    The URI is `sqlite:////FILE`, `postgresql://...`, `mysql://...`. The table is made if it is
    missing, unless `make` is False.

    Every call is one autocommitted statement, so none can be left half done or hold a lock that
    others wait for. A lost connection is made again for up to `retry_seconds`. If it was lost
    during a put, the put is repeated. If the repeated put finds a value, the two values are
    compared: that tells a put whose answer got lost from a put that came second.

    A value is durable when the put is answered, because sqlite runs with synchronous=EXTRA, and
    PostgreSQL sessions with synchronous_commit at least local. With FULL, sqlite may undo a commit
    on a power loss, as it does not sync the removal of the journal:
    https://sqlite.org/pragma.html#pragma_synchronous. A pooler in front of PostgreSQL must not undo
    the setting of the session.
    """

    def __init__(self, uri: str, *, retry_seconds: float = 30.0, make: bool = True) -> None:
        """Connect, and make the table if it is missing.

        Raises StorageError at once if that fails, because retries are for connections that worked
        before.
        """
        url = _parse(uri)
        self.uri = _shown(url)
        if url.get_backend_name() == "sqlite" and is_missing(str(url.database)):
            if not make:
                raise NoSuchStorage(self.uri, "", "there is no such file")
            with suppress(OSError):  # SQLite says it better
                os.close(os.open(str(url.database), os.O_CREAT, 0o600))
        self._secrets = sorted(_secrets(url), key=len, reverse=True)
        session = [_DURABLE] if url.get_backend_name() == "postgresql" else []
        bounds: dict[str, Any] = {"silence": _SILENCE, "answer": _ANSWER_SECONDS, "short": True}
        # A connection that stays open would not see that the file was replaced.
        if url.get_backend_name() == "sqlite":
            bounds["poolclass"] = NullPool
        with self._errors("cannot load the driver"):
            self._engine = make_engine(url, **bounds, session=session, isolation_level="AUTOCOMMIT")
        try:
            with self._errors("cannot connect"):
                self._engine.connect().close()
                if not make and not inspect(self._engine).has_table(_TABLE.name):
                    raise NoSuchStorage(self.uri, "", f"there is no table {_TABLE.name}")
            self._make_table()
        except BaseException:
            self.close()
            raise
        self._retry_seconds = retry_seconds

    def put_if_absent(self, key: str, value: bytes) -> bool:
        retrying = self._retrying()
        with self._errors(f"cannot write {len(value)} bytes", check_key(key)):
            try:
                retrying(self._execute, _TABLE.insert().values(key=key, value=value))
            except IntegrityError:
                return retrying.statistics["attempt_number"] > 1 and self.get(key) == value
            return True

    def get(self, key: str) -> bytes | None:
        with self._errors("cannot read", check_key(key)):
            rows = self._retrying()(
                self._execute, select(_TABLE.c.value).where(_TABLE.c.key == key)
            )
            return bytes(rows[0]) if rows else None

    def list(self, prefix: str) -> list[str]:
        folder = check_folder(prefix)
        query = select(_TABLE.c.key)
        if folder:
            end = folder[:-1] + chr(ord("/") + 1)
            query = query.where(_TABLE.c.key >= folder, _TABLE.c.key < end)
        with self._errors(f"cannot list {folder!r}"):
            return sorted(self._retrying()(self._execute, query))

    def delete(self, key: str) -> None:
        with self._errors("cannot delete", check_key(key)):
            self._retrying()(self._execute, _TABLE.delete().where(_TABLE.c.key == key))

    def clock(self) -> float | None:
        expression = _CLOCK.get(self._engine.dialect.name)
        if expression is None:
            return None
        with self._errors("cannot read the clock"):
            return float(self._retrying()(self._execute, select(literal_column(expression)))[0])

    def weaknesses(self) -> Sequence[str]:
        with self._errors("cannot read the server's settings"):
            return weaknesses(
                self._engine.dialect.name, partial(self._retrying(), self._ask), "", _TABLE.name
            )

    def _connect(self) -> Connection:
        if self._engine.dialect.name == "sqlite" and is_missing(str(self._engine.url.database)):
            raise StorageError(self.uri, "", "the file is gone", "Bring it back, as it was")
        return self._engine.connect()

    def _ask(self, question: str, parameters: Sequence[str]) -> Sequence[Row]:
        with self._connect() as connection:
            return [tuple(row) for row in connection.exec_driver_sql(question, tuple(parameters))]

    def close(self) -> None:
        self._engine.dispose()

    def _execute(self, statement: Executable) -> Sequence[Any]:
        """Execute one statement in its own transaction, and return the first column of its rows."""
        with self._connect() as connection:
            result = connection.execute(statement)
            return result.scalars().all() if result.returns_rows else ()

    def _retrying(self) -> Retrying:
        return retries(
            self.uri, self._retry_seconds, _connection_failed, lambda _: "the connection failed"
        )

    def _make_table(self) -> None:
        with self._errors(f"cannot make the table {_TABLE.name}"):
            try:
                _TABLE.create(self._engine, checkfirst=True)
            except DBAPIError:  # another process may have made it at the same time
                if not inspect(self._engine).has_table(_TABLE.name):
                    raise
            columns = {column["name"] for column in inspect(self._engine).get_columns(_TABLE.name)}
            primary_key = inspect(self._engine).get_pk_constraint(_TABLE.name)[
                "constrained_columns"
            ]
        wanted = set(_TABLE.columns.keys()), ["key"]
        if (columns, primary_key) != wanted:  # without that key a second put would be taken
            raise StorageError(
                self.uri,
                "",
                f"the table {_TABLE.name} has the columns {sorted(columns)} and the primary key "
                f"{primary_key}, not {sorted(_TABLE.columns.keys())} and ['key']",
                "It belongs to something else: use another database or schema, or give it that "
                "primary key",
            )

    @contextmanager
    def _errors(self, action: str, key: str = "") -> Iterator[None]:
        try:
            yield
        except SQLAlchemyError as error:
            text = " ".join(str(error.orig if isinstance(error, DBAPIError) else error).split())
            reason = text
            for secret in self._secrets:
                reason = re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)", "***", reason)
            advice = next(
                (advice for pattern, advice in _ADVICE if re.search(pattern, text, re.IGNORECASE)),
                "",
            )
            raise StorageError(self.uri, key, f"{action}: {reason}", advice) from (
                error if reason == text else None
            )


def _parse(uri: str) -> URL:
    """Parse a database URL, and add the driver if the URL names none.

    Errors repeat nothing of a URL that cannot be parsed, because it may hold a password.
    """
    scheme = uri.partition(":")[0]
    try:
        url = parse(uri)
    except NoSuchModuleError:
        raise StorageError(f"{scheme}:...", "", f"unknown scheme {scheme!r}", SUPPORTED) from None
    except (ArgumentError, ValueError):
        raise StorageError(f"{scheme}:...", "", "this is no database URL", _URL_ADVICE) from None
    if url.host and "@" in url.host:
        raise StorageError(
            f"{scheme}:...", "", "the host of the database URL holds an '@'", _URL_ADVICE
        )
    if readers := file_readers(url):
        raise StorageError(
            redacted(uri),
            "",
            f"{', '.join(readers)} would let the server read files of this machine",
            "Leave it out",
        )
    if url.get_backend_name() == "sqlite" and not (url.database and url.database.startswith("/")):
        raise StorageError(
            redacted(uri),
            "",
            "no absolute path",
            "Write sqlite:////PATH with four slashes, or memory:NAME for a test",
        )
    return url


def _shown(url: URL) -> str:
    return redacted(url.render_as_string(hide_password=False))


def address_of_database(uri: str) -> str:
    """Return the URI of the storage, without passwords.

    Raises StorageError if it is no database URL.
    """
    return _shown(_parse(uri))


def _secrets(url: URL) -> list[str]:
    """List the parts of the URL that may not be shown."""
    return [str(url.query[name]) for name in secret_parameters(url)] + (
        [str(url.password)] if url.password else []
    )


def _connection_failed(error: BaseException) -> bool:
    """Tell whether the connection could not be made, or was lost in the middle.

    If it could not be made, the error has no statement.
    """
    return isinstance(error, DBAPIError) and (
        error.connection_invalidated
        or (isinstance(error, OperationalError) and error.statement is None)
    )
