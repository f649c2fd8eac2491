"""The database: an engine that suits the protocol, its errors in the words of the sinks, and its tables as they are."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.engine import URL, Connection, Engine

from sinks.errors import ConfigurationError
from sinks.sql.engine import LOCK_SECONDS, file_readers, make_engine, parse
from sinks.sql.errors import Fault
from sinks.sql.evolution import holds
from sinks.sql.names import label
from sinks.sql.questions import GTID_UNSAFE, MYSQL, REFUSED_BY_GTID
from sinks.sql.server import LEDGER_COLUMNS, PERCENT_ENCODED, LedgerRow, Row, Server, no_ledger

_SILENCE, _ANSWER_SECONDS = 60, 300  # SQLite has one writer at a time, so a task waits for all of another's partition

# In each transaction: a pooler may give PostgreSQL's session to somebody else.
_TRANSACTION = (
    f"SELECT set_config('lock_timeout', '{LOCK_SECONDS}s', true), set_config('synchronous_commit',"
    " CASE current_setting('synchronous_commit') WHEN 'off' THEN 'local'"
    " ELSE current_setting('synchronous_commit') END, true)"
)

# What databases say when a bounded wait for a lock ran out: SQLite, PostgreSQL, MySQL, Oracle, SQL Server.
_BLOCKED = re.compile(
    r"database (table |schema )?is locked|lock (wait )?timeout|deadlock|lock request time|ORA-(00054|30006|00060)",
    re.IGNORECASE,
)
# Some drivers answer a refused row with OperationalError (MySQL: CHECK constraint, no default).
_REFUSED = re.compile(
    r"constraint|doesn't have a default value|out of range|Incorrect .* value|has no partition|generated column"
    r"|max_allowed_packet",
    re.IGNORECASE,
)


# What databases say of a table that is not as it was, or cannot be written, and of a right that the user lacks.
_CHANGED = re.compile(
    r"no such (table|column)|has no column|Unknown column|read.?only|(table|relation|column) .*(n.t|not) exist",
    re.IGNORECASE,
)
_RIGHT = re.compile(r"(command|permission) denied|insufficient privilege", re.IGNORECASE)

_COLLATIONS = sa.text(
    "SELECT column_name, collation_name FROM information_schema.columns"
    " WHERE table_schema = coalesce(:schema, database()) AND table_name = :name AND collation_name IS NOT NULL"
)
RECREATED = ("sqlite", "postgresql", *MYSQL)
"""Dialects of which is tested that a staging table shows the types of the target that it was made after."""


class Database(Server[Connection]):
    """One database. Makes its engine when it is first needed, in each process anew; never shows the password."""

    def __init__(self, url: str | URL, options: Mapping[str, Any], *, name: str) -> None:
        """`options` go to `sqlalchemy.create_engine`. Raises ConfigurationError for a URL that cannot be read."""
        try:
            self.url = parse(url)
        except (exc.NoSuchModuleError, ImportError) as error:
            raise ConfigurationError(
                f"sink {name!r}: SQLAlchemy has no dialect or driver for the URL: {error}. Install it on the driver "
                "and the executors"
            ) from None
        except (exc.ArgumentError, ValueError):
            raise ConfigurationError(
                f"sink {name!r}: SQLAlchemy cannot read the URL; write "
                "DIALECT+DRIVER://USER:PASSWORD@HOST:PORT/DATABASE with special characters percent-encoded"
            ) from None
        if "@" in (self.url.host or ""):
            raise ConfigurationError(f"sink {name!r}: the host of the URL holds an '@': {PERCENT_ENCODED}")
        self.dialect = self.url.get_backend_name()
        if found := file_readers(self.url):
            raise ConfigurationError(
                f"sink {name!r}: {', '.join(found)} lets the server read files of this machine: leave it out"
            )
        if (level := _isolation(options)) in ("AUTOCOMMIT", "READ UNCOMMITTED"):
            raise ConfigurationError(
                f"sink {name!r}: with isolation_level={level!r} the sink has no transactions, or takes what others may "
                "yet roll back for committed: leave it out"
            )
        if self.dialect == "sqlite" and (self.url.database or ":memory:") == ":memory:":
            raise ConfigurationError(f"sink {name!r}: tasks cannot see a SQLite database in memory; give it a file")
        self._options = dict(options)
        self._engines: dict[str, Engine] = {}

    @property
    def engine(self) -> Engine:
        """Of threads that meet in the first call, all get the one that is kept; the others have opened nothing."""
        return self._engines.get("kept") or self._engines.setdefault("kept", self._make())

    def _make(self) -> Engine:
        options = dict(self._options)
        if "json_serializer" in sa.util.get_cls_kwargs(self.url.get_dialect()):
            options["json_serializer"] = str  # values for JSON columns are JSON text already
        if self.dialect != "sqlite":
            options.setdefault("isolation_level", "READ COMMITTED")
        waits = f"SET SESSION innodb_lock_wait_timeout = {LOCK_SECONDS}, lock_wait_timeout = {LOCK_SECONDS}"
        session = [waits] if self.dialect in MYSQL else []
        engine = make_engine(self.url, silence=_SILENCE, answer=_ANSWER_SECONDS, session=session, **options)

        if self.dialect == "sqlite":

            @sa.event.listens_for(engine, "begin")
            def begin(connection: Connection) -> None:
                """Take the write lock at once: two readers that both want to write could only fail."""
                connection.exec_driver_sql("BEGIN IMMEDIATE")

        if self.dialect == "postgresql":

            @sa.event.listens_for(engine, "begin")
            def configure_transaction(connection: Connection) -> None:
                connection.exec_driver_sql(_TRANSACTION)

        return engine

    def begin_twophase(self, connection: Connection, xid: str) -> sa.TwoPhaseTransaction:
        transaction = connection.begin_twophase(xid)
        if self.dialect == "postgresql":
            connection.exec_driver_sql(_TRANSACTION)
        return transaction

    @contextmanager
    def lend(self) -> Iterator[Connection]:
        with self.engine.connect() as connection:
            yield connection

    @contextmanager
    def transaction(self, connection: Connection, *, undo: bool = False) -> Iterator[None]:
        connection.rollback()  # ends what reading began
        with connection.begin() as transaction:
            yield
            if undo:
                transaction.rollback()

    def quote(self, *names: str) -> str:
        quote = self.engine.dialect.identifier_preparer.quote
        return self.undoubled(".".join(quote(name) for name in names if name))

    def undoubled(self, compiled: str) -> str:
        """Without the percent signs that a dialect doubles for its driver, as `sqlalchemy.text` does once more."""
        doubles = "%%" in self.engine.dialect.identifier_preparer.quote("%")
        return compiled.replace("%%", "%") if doubles else compiled

    def execute(self, connection: Connection, statement: str, parameters: Sequence[object] = ()) -> int:
        return connection.execute(_text(statement, parameters)).rowcount

    def query(self, connection: Connection, statement: str, parameters: Sequence[object] = ()) -> list[Row]:
        return [tuple(row) for row in connection.execute(_text(statement, parameters))]

    def triggers(self, connection: Connection, schema: str, name: str) -> Mapping[str, str]:
        if self.dialect != "sqlite":
            return super().triggers(connection, schema, name)
        table = self.quote(schema, "sqlite_master")
        found = f"SELECT 'trigger ' || name, sql FROM {table} WHERE type = 'trigger' AND lower(tbl_name) = lower(%s)"
        return dict(self.query(connection, found, [name]))

    # ------------------------------------------------------------------ the ledger's table
    def has_ledger(self, connection: Connection, schema: str, name: str) -> bool:
        if not has_table(connection, name, schema):
            return False
        inspector = sa.inspect(connection)
        columns = {column["name"] for column in inspector.get_columns(name, schema or None)}
        keys = inspector.get_pk_constraint(name, schema or None)["constrained_columns"]
        engine = "InnoDB"
        if self.dialect in MYSQL:
            engine = inspector.get_table_options(name, schema or None).get(f"{connection.dialect.name}_engine", engine)
        if keys != ["transaction_id"] or not columns >= set(LEDGER_COLUMNS) or engine != "InnoDB":
            raise no_ledger(label(schema, name))
        return True

    def create_table(
        self, connection: Connection, schema: str, name: str, columns: Sequence[str], options: str = ""
    ) -> None:
        self.engine.dialect.validate_identifier(name)  # a server may cut what is too long
        super().create_table(connection, schema, name, columns, options)

    def insert_missing(self, connection: Connection, ledger: str, rows: Sequence[LedgerRow]) -> int:
        """All together, or else one after the other: a refused row is told by its primary key."""
        names, marks = ", ".join(map(self.quote, LEDGER_COLUMNS)), ", ".join(["%s"] * len(LEDGER_COLUMNS))
        statement = f"INSERT INTO {ledger} ({names}) VALUES ({marks})"
        try:
            with connection.begin_nested():
                for row in rows:
                    connection.execute(_text(statement, row))
            return len(rows)
        except exc.IntegrityError:
            return sum(self.insert_missing(connection, ledger, [row]) for row in rows) if len(rows) > 1 else 0

    def close(self) -> None:
        engine = self._engines.pop("kept", None)
        if engine is not None:
            engine.dispose()

    def said(self, error: BaseException) -> str:
        """The database's own words, in one line, without the password."""
        text = " ".join(str(error.orig if isinstance(error, exc.DBAPIError) else error).split())
        return text.replace(str(self.url.password), "***") if self.url.password else text

    @contextmanager
    def in_words(self, where: str) -> Iterator[None]:
        """Errors of the database in this block in the sinks' words."""
        try:
            yield
        except exc.SQLAlchemyError as error:
            raise self.explain(error, where) from None

    def explain(self, error: exc.SQLAlchemyError, where: str) -> Exception:
        """A SinkError, if it is about rows, locks or the set-up, or else at least without the statement."""
        fault, text = self.fault(error), self.said(error)
        packet = " (or a row is larger than its max_allowed_packet: raise that)" if "has gone away" in text else ""
        told = fault and fault.explained(where, error)
        return told or RuntimeError(f"{where} failed at {self}: {text}{packet}")

    def fault(self, error: Exception) -> Fault | None:
        """None for a lost connection, and what is no error of SQLAlchemy."""
        if not isinstance(error, exc.SQLAlchemyError):
            return None
        text = self.said(error)
        if isinstance(error, exc.DBAPIError) and _BLOCKED.search(text):
            return Fault("blocked", text)
        if getattr(error, "connection_invalidated", False):
            return None
        if self.refuses(error):
            return Fault("refused", text)
        if is_gtid_unsafe(error):
            return Fault("server", REFUSED_BY_GTID)
        told = isinstance(error, exc.OperationalError | exc.ProgrammingError) and _CHANGED.search(text)
        if told or isinstance(error, exc.NoSuchTableError):
            return Fault("changed", f"{text} (at {self})")
        if _RIGHT.search(text):
            return Fault("right", text)
        if isinstance(error, exc.ProgrammingError | exc.NotSupportedError):
            return Fault("server", f"{text} (at {self})")
        return Fault("other", text) if isinstance(error, exc.DBAPIError) else None

    def refuses(self, error: BaseException) -> bool:
        """Whether the error is about the rows, so that trying again cannot help."""
        if isinstance(error, exc.StatementError) and not isinstance(error, exc.DBAPIError):
            return True  # SQLAlchemy could not bind a value
        return isinstance(error, exc.IntegrityError | exc.DataError) or (
            isinstance(error, exc.DBAPIError)
            and not error.connection_invalidated
            and not _BLOCKED.search(str(error.orig))
            and bool(_REFUSED.search(str(error.orig)))
        )

    def __str__(self) -> str:
        return self.url.set(query={}).render_as_string(hide_password=True)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_engines": {}}


def _isolation(options: Mapping[str, Any]) -> str:
    level = options.get("isolation_level") or (options.get("execution_options") or {}).get("isolation_level")
    return str(level or "").upper().replace("_", " ")


def _text(statement: str, parameters: Sequence[object]) -> sa.TextClause:
    """A statement whose parameters are %s, of the types that their values have."""
    if not parameters:
        return sa.text(statement.replace(":", "\\:"))
    pieces = statement.replace(":", "\\:").split("%s")
    names = [f"p{number}" for number in range(len(parameters))]
    marks = [*(f":{name}" for name in names), ""]
    marked = "".join(piece.replace("%%", "%") + mark for piece, mark in zip(pieces, marks, strict=True))
    return sa.text(marked).bindparams(**dict(zip(names, parameters, strict=True)))


def is_gtid_unsafe(error: BaseException) -> bool:
    """Whether MySQL refused a write into a table without transactions."""
    driver = getattr(error, "orig", None)
    return getattr(driver, "errno", None) == GTID_UNSAFE or getattr(driver, "args", ())[:1] == (GTID_UNSAFE,)


def has_table(connection: Connection, name: str, schema: str | None) -> bool:
    inspector = sa.inspect(connection)
    if connection.dialect.name not in MYSQL:
        return inspector.has_table(name, schema=schema or None)
    try:  # unlike DESCRIBE, SHOW CREATE TABLE waits for who creates the table at this moment
        inspector.get_table_options(name, schema=schema or None)
    except exc.NoSuchTableError:
        return False
    return True


# ---------------------------------------------------------------------- tables that are altered while the query runs
# Databases convert what was written for other types, most of them without a word. So the target's columns are looked at
# again in the transaction that writes, under the table's lock.
def types_of(connection: Connection, columns: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """The types in SQL of columns that the Inspector told."""

    def text(kind: sa.types.TypeEngine[Any]) -> str:
        try:
            return str(kind.compile(dialect=connection.dialect))
        except exc.CompileError:
            return repr(kind)

    return {name: text(column["type"]) for name, column in columns.items()}


def columns_of(connection: Connection, table: sa.TableClause) -> dict[str, Mapping[str, Any]]:
    """As the database has them now."""
    found = sa.inspect(connection).get_columns(table.name, table.schema)
    columns: dict[str, Mapping[str, Any]] = {column["name"]: column for column in found}
    collate({name: column["type"] for name, column in columns.items()}, connection, table)
    return columns


def collate(types: Mapping[str, sa.types.TypeEngine[Any]], connection: Connection, table: sa.TableClause) -> None:
    """Name the collation of each text: MySQL's SHOW CREATE TABLE leaves out what is the table's, and says the character
    set only at times."""
    if connection.dialect.name not in MYSQL:
        return
    for name, collation in connection.execute(_COLLATIONS, {"schema": table.schema, "name": table.name}):
        if isinstance(kind := types.get(name), sa.String):
            kind.charset, kind.collation = None, collation  # type: ignore[attr-defined]


def require_same(
    connection: Connection, table: sa.Table, then: Iterable[tuple[str, str]]
) -> dict[str, Mapping[str, Any]]:
    """Lock the table for rows that were made for columns of the names and types `then`, and return its columns. Raises
    ConfigurationError that says what was changed."""
    then = [one for one in then if one[0] in table.columns]
    refused, written = None, list(dict(then))
    try:
        try:
            _lock(connection, table, written)
        except exc.DBAPIError as error:
            if not is_gtid_unsafe(error):
                raise
            refused = error
        now = columns_of(connection, table)
    except exc.NoSuchTableError:
        raise changed(table, ["it is gone: create it again as it was"]) from None
    types = types_of(connection, now)
    reasons = []
    for name, kind in then:
        if name not in now:
            reasons.append(f'it has no column "{name}" any more: add it, or give it its name back')
        elif not holds(types[name], kind):
            reasons.append(f'its column "{name}" is {types[name]}, and the rows are written for {kind}')
    if connection.dialect.name in MYSQL:
        options = sa.inspect(connection).get_table_options(table.name, table.schema)
        engine = str(options.get(f"{connection.dialect.name}_engine", "InnoDB"))
        if engine.lower() != "innodb":
            reasons.append(f"its engine is {engine}, which has no transactions")
    if refused and not reasons:
        raise refused
    if reasons:
        raise changed(table, reasons)
    return now


def _lock(connection: Connection, table: sa.Table, written: Sequence[str]) -> None:
    """An INSERT of no rows: where databases have a lock for it, nobody alters the table until the transaction ends."""
    nothing = sa.select(*(table.c[name] for name in written)).where(sa.false())
    connection.execute(table.insert().from_select(written, nothing))


def changed(table: sa.Table, reasons: Iterable[str]) -> ConfigurationError:
    return ConfigurationError(
        f"table {table.fullname} was changed while the query ran: {'; '.join(reasons)}. Change it back"
    )
