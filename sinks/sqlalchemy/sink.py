"""Any database's own way, as far as SQLAlchemy knows it: SQLAlchemy creates the staging tables, plain INSERT and DELETE
move their rows. The driver's transaction has no DDL, which would commit it in many databases, so the staging tables are
dropped after it: the ledger tells that those that are still there were moved."""

from __future__ import annotations

import contextlib
import itertools
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.engine import URL, Connection, Engine
from sqlalchemy.types import SchemaType, TypeEngine

from sinks.base import Sink
from sinks.errors import BadValue, ConfigurationError, SchemaMismatch, TransactionBlocked
from sinks.sql import table as tables
from sinks.sql.backend import Backend, Move, Plan, RowTransaction, StagedTypes, by_table
from sinks.sql.dialects import (
    COLLATIONS,
    HOMES,
    MYSQL,
    POSTGRES_FOREIGN_KEYS,
    POSTGRES_MAY_REST,
    POSTGRES_OBSTACLES,
    lacks_characters,
    postgres_settings,
)
from sinks.sql.ledger import LEDGER_COLUMNS, LedgerRow
from sinks.sql.names import STAGING, staging_table
from sinks.sql.server import PERCENT_ENCODED, Fault, Row, ambiguous, explained, marks
from sinks.sql.sink import SchemaEvolution, TableSink
from sinks.sql.strategies import identity_of
from sinks.sql.table import ForeignKey, MergeOptions, Mode, OrderByNulls, Values
from sinks.sqlalchemy.engine import LOCK_SECONDS, make_engine, parse
from sinks.sqlalchemy.types import SqlAlchemyColumn, declared
from sinks.transaction import Identity, TransactionContext

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_SILENCE, _ANSWER_SECONDS = 60, 300  # SQLite has one writer at a time, so a task waits for all of another's partition

# What databases say when a bounded wait for a lock ran out: SQLite, PostgreSQL, Oracle, SQL Server.
_BLOCKED = re.compile(
    r"database (table |schema )?is locked|lock timeout|deadlock|lock request time|ORA-(00054|30006|00060)",
    re.IGNORECASE,
)
_REFUSED = re.compile(r"constraint|out of range|generated column", re.IGNORECASE)
"""Some drivers answer a refused row with OperationalError."""

# What databases say of a table that is not as it was, and of a right that the user lacks.
_CHANGED = re.compile(
    r"no such (table|column)|has no column|(table|relation|column) .*(n.t|not) exist",
    re.IGNORECASE,
)
_RIGHT = re.compile(r"(command|permission) denied|insufficient privilege|read.?only", re.IGNORECASE)

_COLLATIONS = """
SELECT list.name, part.name, part.coll FROM pragma_index_list(%s, %s) AS list, pragma_index_xinfo(list.name) AS part
 WHERE list."unique" AND NOT list.partial AND part.key
"""
"""In SQLite, of unique indexes and their columns: SQLAlchemy does not tell. The parameters are the table's name and
schema."""
_HEIRS = """
UNION ALL
SELECT 'the table ' || c.oid::regclass || ' inherits from it, whose rows no index of it binds: upsert into one without'
  FROM pg_inherits JOIN pg_class c ON c.oid = inhrelid JOIN target ON inhparent = target.oid WHERE NOT relispartition
"""

_BROKEN = """
SELECT count(*) FROM sqlite_master AS its, pragma_foreign_key_check(its.name)
 WHERE its.type = 'table' AND its.sql LIKE '%initially%deferred%'
"""
_VANISHING = re.compile(r"\bON\s+CONFLICT\s+(?:IGNORE|REPLACE|ROLLBACK)\b", re.IGNORECASE)
_RECREATED = ("sqlite", "postgresql")
"""Dialects of which is tested that a staging table shows the types of the target that it was made after."""


_ID = "tpc_transaction"
"""A column of a staging table, which is NULL in each row. Its default is the transaction's id: any database keeps that
with the table from its first moment on, and tells it."""
_ROW = "tpc_row"
"""Its primary key: without one PostgreSQL's publications refuse DELETE, and some servers the table."""


class SqlAlchemySink(TableSink):
    """Rows into one table, by `executemany` of INSERT: the portable path, not the fast one. PostgresSink and MySQLSink
    are the fast ones.

    Tasks insert into staging tables beside the target and commit them; the driver moves a checkpoint in one
    transaction. What became of a transaction is kept in the table `ledger`, beside the target. MySQL and MariaDB are
    refused: `MySQLSink` is theirs.
    """

    def __init__(
        self,
        url: str | URL,
        table: str,
        *,
        name: str | None = None,
        mode: Mode = "append",
        keys: Sequence[str] = (),
        order_by: str | None = None,
        order_by_nulls: OrderByNulls = "error",
        delete_marker: str | None = None,
        keep_newer: bool = False,
        create_table: bool = False,
        schema_evolution: SchemaEvolution = "none",
        ledger: str = "tpc_ledger",
        transform: Callable[[DataFrame], DataFrame] | None = None,
        engine_options: Mapping[str, Any] | None = None,
        dead_letters: Sink | None = None,
        max_dead_letters: int | float = 1000,
    ) -> None:
        """Set up the sink; nothing is connected yet.

        * `url`: SQLAlchemy's, `sqlite:////var/lib/app.db`; `engine_options`: more for `sqlalchemy.create_engine`.
        * `table`: `orders` or `schema.orders`, as the database has it. `name` (default: `table`) is the sink's uid.
        * The other options are those of every table: `sinks.sql.sink.TableSink`. An upsert replaces a row as DELETE and
          INSERT do.

        Raises ConfigurationError for options that contradict each other, and for a URL that SQLAlchemy cannot read.
        """
        merge = MergeOptions.of(mode, keys, order_by, delete_marker, keep_newer, order_by_nulls)
        backend = SqlAlchemyBackend(url, engine_options or {}, merge, name=name or table)
        beside = isinstance(dead_letters, SqlAlchemySink) and str(dead_letters._backend) == str(backend)
        if backend.dialect == "sqlite" and beside:
            raise ConfigurationError(
                f"sink {name or table!r}: a SQLite file takes one writer at a time, so its dead letters go into "
                "another file"
            )
        super().__init__(
            backend,
            table,
            name=name,
            create_table=create_table,
            ledger=ledger,
            schema_evolution=schema_evolution,
            transform=transform,
            dead_letters=dead_letters,
            max_dead_letters=max_dead_letters,
        )
        self.system = backend.dialect


@dataclass(frozen=True, kw_only=True)
class SqlAlchemyTarget(tables.Target):
    """What judges its rows is not asked for: there may be something."""

    table: sa.Table
    constraints: tuple[str, ...] = ("what the table has",)

    def is_unique(self, keys: tuple[str, ...]) -> bool:
        known = self.table.constraints
        uniques = [tuple[Any, ...](c) for c in known if isinstance(c, sa.PrimaryKeyConstraint | sa.UniqueConstraint)]
        indexes = (index for index in self.table.indexes if index.unique and not _is_partial(index))
        uniques += [tuple[Any, ...](index.expressions) for index in indexes]
        return any({getattr(part, "name", None) for part in parts} == set(keys) for parts in uniques)


class SqlAlchemyBackend(Backend):
    """Has an engine of its own in each process; never shows the password."""

    CHECK = "address, user, password and rights, and that the server runs"
    POSITION = _ROW
    NO_TABLE_HINT = " (a name is read as it is, without quotes; what is before its last dot is the schema)"

    def __init__(self, url: str | URL, options: Mapping[str, Any], merge: MergeOptions, *, name: str) -> None:
        """`options` go to `sqlalchemy.create_engine`; `name` is the sink's. Raises ConfigurationError for a URL that
        cannot be read."""
        self.merge, self._options = merge, dict(options)
        try:
            self.url = parse(url)
            self.dialect = self.url.get_backend_name()
            self.engine = self._make()
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
        if self.dialect in MYSQL:
            raise ConfigurationError(f"sink {name!r}: for MySQL and MariaDB use sinks.mysql.MySQLSink")
        if (level := _isolation(options)) in ("AUTOCOMMIT", "READ UNCOMMITTED"):
            raise ConfigurationError(
                f"sink {name!r}: with isolation_level={level!r} the sink has no transactions, or takes what others may "
                "yet roll back for committed: leave it out"
            )
        if self.dialect == "sqlite" and (self.url.database or ":memory:") == ":memory:":
            raise ConfigurationError(f"sink {name!r}: tasks cannot see a SQLite database in memory; give it a file")

    def _make(self) -> Engine:
        """It opens no connection yet."""
        options = dict(self._options)
        if "json_serializer" in sa.util.get_cls_kwargs(self.url.get_dialect()):
            options["json_serializer"] = str  # values for JSON columns are JSON text already
        if self.dialect != "sqlite":
            options.setdefault("isolation_level", "READ COMMITTED")
        engine = make_engine(self.url, silence=_SILENCE, answer=_ANSWER_SECONDS, **options)

        @sa.event.listens_for(engine, "handle_error")
        def hide_statement(context: sa.ExceptionContext) -> None:
            if isinstance(context.sqlalchemy_exception, exc.StatementError):
                context.sqlalchemy_exception.statement = None

        if self.dialect == "sqlite":

            @sa.event.listens_for(engine, "begin")
            def begin(connection: Connection) -> None:
                """Take the write lock at once: two readers that both want to write could only fail."""
                connection.exec_driver_sql("BEGIN IMMEDIATE")

        if self.dialect == "postgresql":

            @sa.event.listens_for(engine, "begin")
            def configure_transaction(connection: Connection) -> None:
                connection.exec_driver_sql(postgres_settings(LOCK_SECONDS))

        return engine

    def lend(self) -> AbstractContextManager[Connection]:
        return self.engine.connect()

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
        """How many foreign keys are broken in tables that have some which only COMMIT judges."""
        return int(self.query(connection, _BROKEN)[0][0]) if self.dialect == "sqlite" else 0

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

    def create_table(
        self, connection: Connection, schema: str, name: str, columns: Sequence[str], options: str = ""
    ) -> None:
        self.engine.dialect.validate_identifier(name)  # a server may cut what is too long
        super().create_table(connection, schema, name, columns, options)

    def insert_missing(self, connection: Connection, inserts: Mapping[str, Sequence[LedgerRow]]) -> int:
        return sum(self._insert_missing(connection, ledger, rows) for ledger, rows in inserts.items())

    def _insert_missing(self, connection: Connection, ledger: str, rows: Sequence[LedgerRow]) -> int:
        """All together, or else one after the other: a refused row is told by its primary key."""
        statement = f"INSERT INTO {ledger} ({self.quoted(LEDGER_COLUMNS)}) VALUES ({marks(LEDGER_COLUMNS)})"
        try:
            with connection.begin_nested():
                for row in rows:
                    connection.execute(_text(statement, row))
            return len(rows)
        except exc.IntegrityError:
            return sum(self._insert_missing(connection, ledger, [row]) for row in rows) if len(rows) > 1 else 0

    def close(self) -> None:
        self.engine.dispose()

    def error_text(self, error: BaseException) -> str:
        """The database's own words, in one line, without the password."""
        text = " ".join(str(error.orig if isinstance(error, exc.DBAPIError) else error).split())
        return text.replace(str(self.url.password), "***") if self.url.password else text

    def fault(self, error: Exception) -> Fault | None:
        """None for a lost connection, and what is no error of SQLAlchemy."""
        if not isinstance(error, exc.SQLAlchemyError):
            return None
        text, of_database = self.error_text(error), isinstance(error, exc.DBAPIError)
        cause = getattr(error, "orig", None)
        if getattr(cause, "sqlstate", None) and self.url.get_driver_name() == "psycopg":
            from sinks.postgres import connection as of_psycopg

            known = of_psycopg.fault(cause)
            return known and replace(known, advice=known.advice if known.kind == "refused" else "", clash=False)
        unbound = isinstance(error, exc.StatementError) and not of_database
        if unbound or isinstance(error, exc.IntegrityError | exc.DataError):  # the text may have values of a row
            return Fault("refused", text)
        if of_database and _BLOCKED.search(text):
            return Fault("blocked", text)
        if getattr(error, "connection_invalidated", False):
            return None
        if of_database and _REFUSED.search(text):
            return Fault("refused", text)
        if isinstance(error, exc.NoSuchTableError) or (of_database and _CHANGED.search(text)):
            return Fault("changed", f"{text} (at {self})")
        if _RIGHT.search(text):
            return Fault("right", text)
        if isinstance(error, exc.ProgrammingError | exc.NotSupportedError):
            return Fault("server", f"{text} (at {self})")
        return Fault("other", text) if of_database else None

    def unreachable(self, error: Exception) -> str | None:
        """Also of what else SQLAlchemy raises, without the statement."""
        return f"cannot use {self}: {self.error_text(error)}" if isinstance(error, exc.SQLAlchemyError) else None

    def __str__(self) -> str:
        return self.url.set(query={}).render_as_string(hide_password=True)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "engine"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.engine = self._make()

    # ------------------------------------------------------------------ the target
    def locate(self, connection: Connection, table: str) -> tuple[str, str]:
        schema, _, name = table.rpartition(".")
        if schema or self.dialect != "postgresql":
            return schema, name
        schemas = [schema for (schema,) in self.query(connection, HOMES, [name])]
        if len(schemas) > 1:
            raise ambiguous(table, schemas)
        return (schemas or self.query(connection, "SELECT current_schema()")[0])[0], name

    def describe(self, connection: Connection, schema: str, name: str) -> SqlAlchemyTarget | None:
        if not sa.inspect(connection).has_table(name, schema or None):
            return None
        table = sa.Table(name, sa.MetaData(), schema=schema or None, autoload_with=connection, resolve_fks=False)
        collations = dict[str, str]()
        if self.dialect == "sqlite":
            uniques = by_table(self.query(connection, _COLLATIONS, [name, schema or "main"])).values()
            ways = [way for of in uniques if set(of) == set(self.merge.keys) for way in of.items()]
            collations |= sorted(ways, key=lambda way: way[1] != "BINARY")
        columns = []
        for column in table.columns:
            declared, kind = self._in_sql(column.type), repr(column.type)
            if isinstance(column.type, sa.String) and column.name in collations:  # equal keys
                column.type.collation = collations[column.name]
            if isinstance(column.type, sa.JSON):
                column.type.none_as_null = True  # a NULL is none, and not the JSON value null
            is_rowid = self.dialect == "sqlite" and list(table.primary_key) == [column]
            counter = column is table.autoincrement_column or (is_rowid and isinstance(column.type, sa.Integer))
            columns.append(
                SqlAlchemyColumn(
                    column.name,
                    kind,
                    declared,
                    nullable=bool(column.nullable) and not counter,
                    has_default=column.server_default is not None or counter,
                    generated=column.computed is not None
                    or bool(column.identity is not None and column.identity.always),
                    kind=column.type,
                    dialect=self.dialect,
                )
            )
        return SqlAlchemyTarget(
            schema,
            name,
            tuple(columns),
            foreign_keys=tuple(self._foreign_keys(connection, schema, name)),
            table=table,
            lacks_characters=self._lacks_characters(connection, schema, name),
        )

    def _lacks_characters(self, connection: Connection, schema: str, name: str) -> bool:
        if self.dialect == "postgresql":
            return self.query(connection, "SELECT current_setting('server_encoding')") != [("UTF8",)]
        if self.dialect in MYSQL:
            return lacks_characters(way for (way,) in self.query(connection, COLLATIONS, [schema, name]))
        return False

    def _foreign_keys(self, connection: Connection, schema: str, name: str) -> Iterator[ForeignKey]:
        if self.dialect == "postgresql":
            for key in self.query(connection, POSTGRES_FOREIGN_KEYS, [schema, name]):
                yield ForeignKey(*key)
            return
        inspector = sa.inspect(connection)
        if self.dialect == "sqlite":  # which finds a table by another spelling, and its foreign keys only by its own
            names = inspector.get_table_names(schema or None)
            name = next((each for each in names if each.lower() == name.lower()), name)
        for found in inspector.get_foreign_keys(name, schema or None):
            unnamed = f"({', '.join(found['constrained_columns'])}) REFERENCES {found['referred_table']}"
            yield ForeignKey(found["name"] or unnamed, found["referred_schema"] or schema, found["referred_table"])

    def place(self, connection: Connection, schema: str, name: str) -> tuple[object, ...] | None:
        if self.dialect == "sqlite":
            schema = schema.lower() or "main"
            ask = "SELECT file FROM pragma_database_list WHERE lower(name) = %s"
            return self.dialect, *self.query(connection, ask, [schema]), name.lower()
        known = super().place(connection, schema, name)
        return known or (str(self.url.set(username=None, password=None, query={})), schema, name)

    def problems(self, connection: Connection, target: SqlAlchemyTarget, ledger: str) -> Iterator[str]:
        yield from super().problems(connection, target, ledger)
        yield from self._obstacles(connection, target)

    def _obstacles(self, connection: Connection, target: SqlAlchemyTarget) -> list[str]:
        if self.dialect == "sqlite":
            master = self.quote(target.schema, "sqlite_master")
            ask = f"SELECT type, sql FROM {master} WHERE type IN ('table', 'view') AND name = %s COLLATE NOCASE"
            found = self.query(connection, ask, [target.name])
            views = ["it is a view: name the table behind it" for kind, _ in found if kind == "view"]
            clauses = [clause for _, statement in found for clause in _VANISHING.findall(statement)]
            return views + [f"a constraint has {clause}, by which rows vanish: leave that out" for clause in clauses]
        if self.dialect != "postgresql":
            return []
        ask = POSTGRES_OBSTACLES + _HEIRS * bool(self.merge.keys)
        return [text for (text,) in self.query(connection, ask, [target.schema, target.name])]

    def _in_sql(self, kind: TypeEngine[Any]) -> str:
        try:
            return str(kind.compile(dialect=self.engine.dialect))
        except exc.CompileError:
            return repr(kind)

    def declared(self, connection: Connection, field: pa.Field, *, key: bool) -> str:
        kind = declared(field.type, self.dialect, key=key)
        try:
            return self.undoubled(str(kind.compile(dialect=connection.dialect)))
        except exc.CompileError as error:
            raise SchemaMismatch(f"{self.dialect} has no such type: {error}") from None

    # ------------------------------------------------------------------ staged, in the task
    def stage(self, plan: Plan, context: TransactionContext) -> InsertTransaction:
        target, text, keys = plan.target, context.transaction_id, self.merge.keys
        columns = self.staging_columns(
            target,
            context.schema,
            lambda field: SqlAlchemyColumn.of(field.name, declared(field.type, self.dialect), self.dialect),
        )
        optional = bool(self.merge.delete_marker)  # a row that deletes needs nothing but its key
        staging = sa.Table(
            staging_table(text),
            sa.MetaData(),
            sa.Column(_ROW, sa.BigInteger().with_variant(sa.Integer, "sqlite"), sa.Identity(), primary_key=True),
            sa.Column(_ID, sa.String(199), default=sa.null(), server_default=text),
            *(
                sa.Column(c.name, _copy(c.kind), nullable=c.nullable or (optional and c.name not in keys))
                for c in columns
            ),
            schema=target.schema or None,
        )
        return InsertTransaction(self, context, target.label, identity_of(target.schema, text), staging, columns)

    # ------------------------------------------------------------------ before the decision
    def locked(self, connection: Connection, plan: Plan, staged: StagedTypes) -> Move:
        if self.dialect not in _RECREATED:
            types = {column.name: column.declared for column in plan.target.columns}
            staged = {table: {name: types.get(name, kind) for name, kind in of.items()} for table, of in staged.items()}
        return super().locked(connection, plan, staged)

    def changes_since(self, move: Move) -> Iterator[str]:
        """Databases may count on, or put the time, in place of a NULL that the table takes no more."""
        target, connection = move.target, move.connection
        yield from self._obstacles(connection, target)
        required = {column.name for column in target.columns if not column.nullable} & set(move.written)
        existing = sa.inspect(connection).get_multi_columns(target.schema or None, move.staging) if required else {}
        for (_, table), columns in existing.items():
            for name in [c["name"] for c in columns if c["name"] in required and c["nullable"]]:
                rows = self._tables(move._replace(staging=[str(table)]), [name, *self._marker])[0]
                missing = rows.c[name].is_(None), *(self._deletes(rows).is_not(sa.true()) for _ in self._marker)
                if connection.execute(sa.select(rows.c[name]).where(*missing).limit(1)).first():
                    yield f'its column "{name}" takes no NULL, and rows have NULL there: let it be NULL'

    def first_duplicate(self, move: Move, columns: Sequence[str]) -> Row | None:
        keys = list(sa.union_all(*map(sa.select, self._tables(move, columns))).subquery().c)
        groups = sa.select(*keys, sa.func.count()).group_by(*keys).having(sa.func.count() > 1).limit(1)
        row = move.connection.execute(groups).first()
        return row and tuple(row)

    def first_tie(self, move: Move) -> Row | None:
        """Few databases compare values of every type, so Python does."""
        keys, by = self.merge.keys, str(self.merge.order_by)
        rows = self._with_partition(move, [*keys, by])
        part = rows.c.tpc_part
        alike = sa.select(sa.literal(1)).select_from(rows).group_by(*(rows.c[name] for name in (*keys, by)))
        equals = alike.having(sa.func.min(part) < sa.func.max(part)).limit(1)
        if len(move.staging) < 2 or not move.connection.execute(equals).first():
            return None
        written, shown = [name for name in move.written if name != by], len(keys) + 2
        with move.connection.execute(
            self._candidates_of(move, written), execution_options={"yield_per": 1000}
        ) as found:
            for _, group in itertools.groupby(map(tuple, found), key=operator.itemgetter(0)):
                first, *others = ((row[1:shown], row[shown:]) for row in group)
                if not all(_alike(change, first[1]) for _, change in others):
                    return (*first[0], len(others) + 1)
        return None

    def _candidates_of(self, move: Move, written: Sequence[str]) -> sa.Select[Any]:
        """Of each key those changes that are the last ones of their partition, if none is newer by `order_by`: a number
        that stands for the key, the key, `order_by`, whether it deletes, and the columns `written`."""
        rows = self._with_partition(move, [*self._looked_at(move), _ROW])
        keys = [rows.c[key] for key in self.merge.keys]
        newest = self._newest(rows)
        place = sa.func.rank().over(partition_by=keys, order_by=newest)
        last = sa.func.row_number().over(partition_by=[*keys, rows.c.tpc_part], order_by=[*newest, rows.c[_ROW].desc()])
        ranked = sa.select(
            *rows.c,
            self._marked(rows).label("tpc_deletes"),
            sa.func.dense_rank().over(order_by=keys).label("tpc_key"),
            place.label("tpc_place"),
            last.label("tpc_last"),
        ).subquery()
        shown = [ranked.c[name] for name in (*self.merge.keys, str(self.merge.order_by), "tpc_deletes", *written)]
        wanted = ranked.c.tpc_place == 1, ranked.c.tpc_last == 1
        return sa.select(ranked.c.tpc_key, *shown).where(*wanted).order_by(ranked.c.tpc_key)

    def _with_partition(self, move: Move, columns: Sequence[str]) -> sa.Subquery:
        """These columns of all staged rows, with the number of their staging table."""
        tables = enumerate(self._tables(move, columns))
        parts = (sa.select(*table.c, sa.literal_column(str(n)).label("tpc_part")) for n, table in tables)
        return sa.union_all(*parts).subquery()

    # ------------------------------------------------------------------ the move
    def upsert(self, move: Move) -> None:
        """As any database can: the rows of the target with these keys go, then the last changes come. DELETE waits for
        others that write the same rows, and judges what they made of them."""
        into, connection = move.target.table, move.connection
        tables = self._tables(move, [*self._looked_at(move), _ROW])
        older = [table.delete().where(self._is_older(table, into)) for table in tables if self.merge.keep_newer]
        replaced = [into.delete().where(self._is_changed(into, table), *self._is_due(into, table)) for table in tables]
        for delete in (*older, *replaced, *older):
            connection.execute(delete)
        rows = sa.union_all(*map(sa.select, tables)).subquery()
        try:
            with connection.begin_nested():
                connection.execute(into.insert().from_select(move.written, self._last(rows, move.written)))
        except exc.IntegrityError as error:
            for table in tables:
                there = sa.select(sa.literal(1)).select_from(into).where(self._is_changed(into, table)).limit(1)
                if connection.execute(there).first():
                    raise TransactionBlocked(
                        f"table {move.target.label}: somebody else wrote rows with keys of this batch at the same time"
                    ) from error
            raise

    def _is_changed(self, into: sa.Table, table: sa.TableClause) -> sa.ColumnElement[bool]:
        """Whether the batch has a change of the row, in the form by which a database looks for the rows of the target
        by its index: a list of keys, or else one by one."""
        keys = self.merge.keys
        if len(keys) == 1 or self.dialect == "sqlite":
            return sa.tuple_(*(self._key(into, key) for key in keys)).in_(sa.select(*(table.c[key] for key in keys)))
        return sa.exists(sa.select(sa.literal(1)).select_from(table).where(*self._equal(into, table)))

    def _equal(self, into: sa.Table, table: sa.TableClause) -> list[sa.ColumnElement[bool]]:
        return [self._key(into, key) == table.c[key] for key in self.merge.keys]

    def _key(self, into: sa.Table, key: str) -> sa.ColumnElement[Any]:
        """SQLite compares by the column's collation, and its unique index may have another."""
        collation = getattr(into.c[key].type, "collation", None) if self.dialect == "sqlite" else None
        return into.c[key].collate(collation) if collation else into.c[key]

    def _is_due(self, into: sa.Table, table: sa.TableClause) -> list[sa.ColumnElement[bool]]:
        """With `keep_newer`, whether a change of the row is no older. SQLite, where nobody else writes meanwhile, would
        look for it without an index."""
        if not self.merge.keep_newer or self.dialect == "sqlite":
            return []
        stored, change = into.c[str(self.merge.order_by)], table.c[str(self.merge.order_by)]
        due = sa.or_(stored.is_(None), stored <= change)
        return [sa.exists(sa.select(sa.literal(1)).select_from(table).where(*self._equal(into, table), due))]

    def _is_older(self, table: sa.TableClause, into: sa.Table) -> sa.ColumnElement[bool]:
        """Whether the target has a newer row of a staged row's key."""
        stored, change = into.c[str(self.merge.order_by)], table.c[str(self.merge.order_by)]
        newer = stored.is_not(None), sa.or_(change.is_(None), stored > change)
        return sa.exists(sa.select(sa.literal(1)).select_from(into).where(*self._equal(into, table), *newer))

    def _last(self, rows: sa.Subquery, written: Sequence[str]) -> sa.Select[Any]:
        """The last change of each key, by the greatest `order_by`, NULLs first; of equals the one that came last.
        Without `order_by` each key is there once."""
        columns, deletes = [rows.c[name] for name in written], self._marked(rows)
        if not self.merge.order_by:
            return sa.select(*columns).where(deletes == 0)
        order = [*self._newest(rows), rows.c[_ROW].desc()]
        number = sa.func.row_number().over(partition_by=[rows.c[key] for key in self.merge.keys], order_by=order)
        last = sa.select(*columns, number.label("tpc_place"), deletes.label("tpc_deletes")).subquery()
        return sa.select(*(last.c[name] for name in written)).where(last.c.tpc_place == 1, last.c.tpc_deletes == 0)

    def _newest(self, rows: sa.FromClause) -> list[sa.ColumnElement[Any]]:
        """Orders changes, those without a value at the end."""
        by = rows.c[str(self.merge.order_by)]
        return [sa.case((by.is_(None), 1), else_=0), by.desc()]

    def _marked(self, rows: sa.FromClause) -> sa.ColumnElement[int]:
        """1 for a row that deletes, 0 for others."""
        return sa.case((self._deletes(rows) == sa.literal(True), 1), else_=0) if self._marker else sa.literal(0)

    @property
    def _marker(self) -> list[str]:
        return [self.merge.delete_marker] if self.merge.delete_marker else []

    def _deletes(self, rows: sa.FromClause) -> sa.ColumnElement[bool]:
        return sa.type_coerce(rows.c[str(self.merge.delete_marker)], sa.Boolean)

    def _tables(self, move: Move, columns: Sequence[str]) -> list[sa.TableClause]:
        schema = move.target.schema or None
        return [sa.table(name, *map(sa.column, columns), schema=schema) for name in move.staging]

    # ------------------------------------------------------------------ staging tables
    def staged(self, connection: Connection, schema: str, prefix: str) -> list[str]:
        inspector = sa.inspect(connection)
        names = [name for name in inspector.get_table_names(schema or None) if STAGING.fullmatch(name)]
        tables = inspector.get_multi_columns(schema or None, names) if names else {}
        defaults = [str(c["default"]) for columns in tables.values() for c in columns if c["name"] == _ID]
        ids = [text for default in defaults for text in re.findall(r"tpc\.[a-z0-9.-]+", default)]
        return sorted(text for text in ids if text.startswith(prefix))

    def staged_types(self, connection: Connection, schema: str, tables: Sequence[str]) -> StagedTypes:
        existing = sa.inspect(connection).get_multi_columns(schema or None, tables) if tables else {}
        return {
            str(table): {c["name"]: self._in_sql(c["type"]) for c in columns if c["name"] not in (_ROW, _ID)}
            for (_, table), columns in existing.items()
        }


def _alike(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether two changes, each with a mark for a delete before its values, come to the same."""
    (deletes, *values), (others, *theirs) = one, other
    same = (a == b or (a != a and b != b) for a, b in zip(values, theirs, strict=True))  # NaN is itself
    return bool(deletes == others and (deletes or all(same)))


def _is_partial(index: sa.Index) -> bool:
    return any(name.endswith("_where") and rule is not None for name, rule in index.dialect_kwargs.items())


def _isolation(options: Mapping[str, Any]) -> str:
    level = options.get("isolation_level") or (options.get("execution_options") or {}).get("isolation_level")
    return str(level or "").upper().replace("_", " ")


def _text(statement: str, parameters: Sequence[object]) -> sa.TextClause:
    """A statement whose parameters are %s, of the types that their values have."""
    if not parameters:
        return sa.text(statement.replace(":", "\\:"))
    pieces = statement.replace(":", "\\:").replace("%%", "\0").split("%s")
    names = [f"p{number}" for number in range(len(parameters))]
    marks = [*(f":{name}" for name in names), ""]
    marked = "".join(piece.replace("\0", "%") + mark for piece, mark in zip(pieces, marks, strict=True))
    return sa.text(marked).bindparams(**dict(zip(names, parameters, strict=True)))


def _copy(kind: TypeEngine[Any]) -> TypeEngine[Any]:
    if not isinstance(kind, SchemaType):
        return kind
    copy = kind.copy()
    if hasattr(copy, "create_type"):  # PostgreSQL's, which is there
        copy.create_type = False
    return copy


_DDL_IS_UNDONE = ("sqlite", "postgresql")
"""Dialects whose ROLLBACK undoes CREATE TABLE."""


class InsertTransaction(RowTransaction):
    """Rows go into a staging table of its own. Memory: the Python values of up to 1,000 rows."""

    def __init__(
        self,
        backend: SqlAlchemyBackend,
        context: TransactionContext,
        label: str,
        identity: Identity,
        staging: sa.Table,
        columns: Sequence[SqlAlchemyColumn],
    ) -> None:
        super().__init__(context, identity, label, backend.fault)
        self._backend, self._staging = backend, staging
        self._values: Values = Values(context.schema, columns, f"{label}: {self.who}", backend.merge)
        with self.discarded_on_error(), self.explained():
            self.connection = backend.engine.connect()
            self._transaction = self.connection.begin()
            if backend.dialect == "postgresql":
                self.connection.exec_driver_sql(POSTGRES_MAY_REST)
            staging.create(self.connection, checkfirst=False)

    def write(self, batch: pa.RecordBatch) -> None:
        names, values = batch.schema.names, self._values
        for piece in values.slices(batch):
            rows = [dict(zip(names, row, strict=True)) for row in values.of(piece)]
            who = f"{self.who}, rows {values.rows + 1} to {values.rows + len(rows)},"
            with explained(self._backend.fault, self.table, who):
                self.connection.execute(self._staging.insert(), rows)
            values.rows += len(rows)

    def encode(self, batch: pa.RecordBatch) -> None:
        self._values.of(batch)

    def put(self, batch: pa.RecordBatch) -> None:
        before, savepoint = self._values.rows, self.connection.begin_nested()
        try:
            self.write(batch)
        except BadValue:
            self._values.rows = before
            savepoint.rollback()
            raise
        savepoint.commit()

    def finish(self) -> int:
        """Every row is judged already."""
        return self._values.rows

    def commit(self) -> None:
        self.may_be_durable = True
        with self.explained():
            self._transaction.commit()
        self._disconnect()

    def discard(self) -> None:
        """Nothing is thrown away of what is sealed."""
        with contextlib.suppress(Exception):
            if not self.may_be_durable:
                self._transaction.rollback()
                if self._backend.dialect not in _DDL_IS_UNDONE:
                    self._staging.drop(self.connection)
                    self.connection.commit()
        self._disconnect()

    def _disconnect(self) -> None:
        """No other task of this process has the pool."""
        with contextlib.suppress(Exception):
            self.connection.invalidate()
            self.connection.close()
