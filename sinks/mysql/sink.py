"""MySQL's and MariaDB's own way. Strategy `xa`: rows go into the target in an XA branch, which XA PREPARE makes
durable; the driver runs XA COMMIT. Strategy `staged`: rows go into a staging table, and COMMIT; the driver's one
transaction writes the ledger rows and moves every staging table of a checkpoint into the target. DROP TABLE would
commit it, so the staging tables are dropped after it: the ledger tells that those that are still there were moved."""

from __future__ import annotations

import contextlib
import inspect
import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa
import pymysql
from pymysql.constants import CLIENT, ER
from pymysql.cursors import Cursor

from sinks._util.threads import side_by_side
from sinks.base import Sink
from sinks.diagnosis import Finding, compare_clocks
from sinks.errors import BadValue, ConfigurationError, TransactionBlocked
from sinks.mysql import catalog, xa
from sinks.mysql.catalog import MySQLColumn, MySQLTarget, target_type
from sinks.mysql.connection import (
    ANSWER_SECONDS,
    RIGHTS,
    SHAPE,
    Connection,
    code_of,
    error_text,
    execute,
    fault,
    is_mariadb,
    listed,
    literal,
    parameters,
    query,
    quoted,
    setting,
)
from sinks.mysql.load import LoadTransaction
from sinks.mysql.xa import name_of, recovered
from sinks.options import Duration, seconds_of_sink
from sinks.sql.backend import Backend, Move, NotEnded, Plan, StagedTypes, by_table
from sinks.sql.dialects import TRIGGERS
from sinks.sql.ledger import Ledger, LedgerRow
from sinks.sql.names import of_sink, staging_table, witness_of
from sinks.sql.server import IDLE_CONNECTIONS, Pool, Row, batches, is_trusted, marks
from sinks.sql.sink import SchemaEvolution, TableSink
from sinks.sql.strategies import identity_of
from sinks.sql.table import MergeOptions, Mode, OrderByNulls
from sinks.transaction import Identity, TransactionContext, TransactionId

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

logger = logging.getLogger(__name__)

_IDLE_LIMIT = 10  # seconds
_WAIT_TIMEOUT = "28800"
"""Seconds that a connection of a task may be without rows: the servers' own default."""


_KNOWN = inspect.signature(pymysql.connections.Connection.__init__).parameters.keys()

_SQL_MODE = [
    "STRICT_ALL_TABLES",  # a value that does not fit is an error
    "NO_AUTO_VALUE_ON_ZERO",  # a 0 for an AUTO_INCREMENT column is a 0
    "NO_ENGINE_SUBSTITUTION",
    "ALLOW_INVALID_DATES",  # a table may hold some, or have one as a default
]
"""Nothing that keeps out what an old table has: a zero date is a default or a value of many, and no date of Spark turns
into one. NO_BACKSLASH_ESCAPES would change what MySQL reads in a table's own expressions, whose text has escapes."""
_KEPT = ["ERROR_FOR_DIVISION_BY_ZERO", "NO_UNSIGNED_SUBTRACTION"]
"""Modes that decide what a table's own expressions give: they stay as the server has them."""
_MODES = [f"'{','.join(_SQL_MODE)}'", *(f"IF(FIND_IN_SET('{mode}', @@sql_mode), '{mode}', NULL)" for mode in _KEPT)]
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
    "max_sort_length": "16384",  # the last change of a key is told by all of the key: an index takes 3,072 bytes
    "sort_buffer_size": "CAST(GREATEST(@@sort_buffer_size, 2097152) AS unsigned)",  # room for 15 such keys
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
_MYSQL = {"transaction_isolation": "'READ-COMMITTED'", "transaction_read_only": "0", "max_execution_time": "0"}
_NOTES = "/*M!110400 , SESSION note_verbosity = 'basic' */"
"""Of MariaDB from 11.4 on, which would cut blanks without a note."""

_REFERENCES = (
    "SELECT CONCAT(constraint_name, ' of ', constraint_schema, '.', table_name)"
    " FROM information_schema.referential_constraints"
    " WHERE unique_constraint_schema = %s AND referenced_table_name = %s ORDER BY 1"
)
_OTHER_ENGINES = (
    "SELECT table_name, engine FROM information_schema.tables"
    " WHERE table_schema = %s AND (@@lower_case_table_names OR CAST(table_name AS binary) IN %s) AND table_name IN %s"
    " AND NOT engine <=> 'InnoDB'"
)
_LONGEST_NAME = 64
_DROPPERS = 8
_FRAME = 2**14
"""Bytes of an upsert's statement around the SELECTs from staging tables, at most."""
_ALL = 2**64 - 1
"""As a LIMIT: it makes the server put the rows aside before it changes the table that they were looked up in."""
_ROW = "tpc row"
"""The primary key of a staging table: many servers take no table without one."""
# From these on a prepared branch is detached from its session, and anybody can finish it: release notes of MySQL 8.0.29
# (xa_detach_on_prepare), and of MariaDB 10.5.2 (MDEV-742)
_OLDEST = {"MySQL": (8, 0, 29), "MariaDB": (10, 5, 2)}
Strategy = Literal["auto", "xa", "staged"]


class MySQLSink(TableSink):
    """Rows into one table, by LOAD DATA LOCAL where the server has local_infile=ON, else by INSERT.

    Two strategies. `xa`: each task writes into the table itself and runs XA PREPARE; the driver runs XA COMMIT. Appends
    only. `staged`: each task writes into a staging table beside the target and commits that; the driver moves all
    staging tables of a checkpoint in one transaction. For users and servers without XA rights, and the only one for
    upserts. `auto` asks the server. What became of a transaction is kept in the table `ledger`, beside the target.

    Needs MySQL 8.0.29, MariaDB 10.5.2 or newer, and tables of InnoDB.
    """

    system = "MySQL or MariaDB"

    strategy: Strategy
    _backend: MySQLBackend

    def __init__(
        self,
        dsn: str,
        table: str,
        *,
        name: str | None = None,
        strategy: Strategy = "auto",
        mode: Mode = "append",
        keys: Sequence[str] = (),
        order_by: str | None = None,
        order_by_nulls: OrderByNulls = "error",
        delete_marker: str | None = None,
        keep_newer: bool = False,
        create_table: bool = False,
        schema_evolution: SchemaEvolution = "none",
        lock_timeout: Duration = 10.0,
        ledger: str = "tpc_ledger",
        transform: Callable[[DataFrame], DataFrame] | None = None,
        connect_options: Mapping[str, Any] | None = None,
        dead_letters: Sink | None = None,
        max_dead_letters: int | float = 1000,
    ) -> None:
        """Set up the sink; nothing is connected yet.

        * `dsn`: mysql://user:password@host:3306/database, with parameters of pymysql.connect behind a question mark;
          `connect_options`: further ones (`ssl_ca`, `read_timeout`, `unix_socket` …).
        * `table`: as in SQL: `orders`, `shop.orders`, with backticks around a part that has special characters. `name`
          (default: `table`) is the sink's uid.
        * `lock_timeout`: how long any of our statements waits for a lock, rounded up to whole seconds: a number of
          them, or a text such as "10 s".
        * The other options are those of every table: `sinks.sql.sink.TableSink`.

        Raises ConfigurationError for options that contradict each other, and for what is no DSN.
        """
        merge = MergeOptions.of(mode, keys, order_by, delete_marker, keep_newer, order_by_nulls)
        options = connect_options or {}
        backend = MySQLBackend(dsn, options, merge, strategy, name=name or table, lock_timeout=lock_timeout)
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


class MySQLBackend(Pool, Backend):
    """Connections read READ COMMITTED, so that each statement sees what others have committed by then."""

    dialect = "mysql"
    DROPPED_TOGETHER = 100
    SECRETS = ("password", "passwd", "ssl_key_password")
    SHOWN = ("host", "unix_socket", "port", "database", "user")
    INSERT_MISSING = "INSERT IGNORE INTO {table} ({columns}) VALUES {rows}"
    DELETE = "DELETE target FROM {target} AS target JOIN {rows} WHERE {condition}"
    UPDATE = "UPDATE {target} AS target CROSS JOIN {rows} SET {own_sets} WHERE {condition}"
    TWO_PHASE = "xa"
    IDLE = 2 * IDLE_CONNECTIONS  # MariaDB needs two for a commit
    KEEPS_IDLE = True
    SORTS_TEXTS = False
    POSITION = quoted(_ROW)
    HANDED_ON = (
        "can hand it on only in an index over whole columns that the batch has, not over a prefix, an expression or a "
        "generated column"
    )
    NO_TABLE_HINT = ", or none that this user may see"

    quote = staticmethod(quoted)
    execute = staticmethod(execute)
    query = staticmethod(query)
    fault = staticmethod(fault)
    locate = staticmethod(catalog.locate)
    missing_rights = staticmethod(catalog.missing_rights)

    def __init__(
        self,
        dsn: str,
        options: Mapping[str, Any],
        merge: MergeOptions,
        strategy: str,
        *,
        name: str,
        lock_timeout: Duration,
    ) -> None:
        """`dsn` is a mysql:// URL and `options` are parameters of pymysql.connect that override it; `name` is the
        sink's, and `lock_timeout` is rounded up to whole seconds. Raises ConfigurationError for what cannot be a
        DSN."""
        self.merge, self.strategy = merge, strategy
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
        for option in ("connect_timeout", "read_timeout", "write_timeout"):
            if option in given:
                given[option] = seconds_of_sink(name, given[option], option)
        defaults = {"connect_timeout": 10, "program_name": f"tpc {name}"[:32]}
        fixed: dict[str, Any] = {"charset": "utf8mb4", "autocommit": True, "local_infile": False, "cursorclass": Cursor}
        # The server may ask for rows after LOAD DATA LOCAL; PyMySQL itself, with local_infile=False, hands out no file
        flags = CLIENT.LOCAL_FILES | CLIENT.MULTI_STATEMENTS
        flags |= CLIENT.FOUND_ROWS  # the rows of an UPDATE are those found, changed by it or not
        flags |= int(given.get("client_flag", 0))
        self._known: MySQLTarget | None = None
        super().__init__(defaults | given | fixed | {"client_flag": flags}, name=name, lock_timeout=lock_timeout)
        self._lock_timeout = math.ceil(self._lock_timeout)

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
        connection.may_take(ANSWER_SECONDS + self._lock_timeout)
        return connection

    def _configure(self, connection: Connection) -> None:
        mariadb = is_mariadb(connection)
        settings = _SESSION | (_MARIADB if mariadb else _MYSQL)
        settings |= {"innodb_lock_wait_timeout": str(self._lock_timeout), "lock_wait_timeout": str(self._lock_timeout)}
        sets = ", ".join(f"SESSION {name} = {value}" for name, value in settings.items())
        execute(connection, f"SET {sets} {_NOTES}")

    def at_work(self, connection: Connection) -> AbstractContextManager[None]:
        return connection.at_work()

    def defer(
        self, connection: Connection, statement: str, parameters: Sequence[object], judge: Callable[[list[Row]], object]
    ) -> object:
        return connection.defer(statement, parameters, judge)

    def insert_missing(self, connection: Connection, inserts: Mapping[str, Sequence[LedgerRow]]) -> int:
        changed = 0
        for together in zip(*(self.insertions(ledger, rows) for ledger, rows in inserts.items()), strict=True):
            for insertion in together:
                connection.defer(*insertion)
            changed += connection.flush()
        return changed

    def answers(self, connection: Connection, rested: float) -> bool:
        if not is_trusted(connection, rested):
            connection.ping(reconnect=False)
        return True

    def can_be_lent(self, connection: Connection) -> bool:
        connection.flush()
        return connection.open

    @contextmanager
    def transaction(self, connection: Connection, *, undo: bool = False) -> Iterator[None]:
        """One transaction. Mind that DDL commits it."""
        # the server ends a transaction of ours whose process is stopped, and frees its locks
        connection.defer(f"SET SESSION wait_timeout = {max(_IDLE_LIMIT, self._lock_timeout)}")
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

    # ------------------------------------------------------------------ the target
    def unfit_server(self, connection: Connection) -> str | None:
        product = "MariaDB" if is_mariadb(connection) else "MySQL"
        ((text,),) = query(connection, "SELECT VERSION()")
        match = re.match(r"(\d+)\.(\d+)\.(\d+)", text)
        version = tuple(map(int, match.groups())) if match else ()
        if version >= _OLDEST[product]:
            return None
        return (
            f"the server is {product} {text} ({self}), and exactly-once needs {'.'.join(map(str, _OLDEST[product]))} "
            "or newer: in older ones a prepared XA transaction ends with its connection, or stays tied to it"
        )

    def describe(self, connection: Connection, schema: str, name: str) -> MySQLTarget | None:
        """Who refers to it is asked for upserts alone: the server opens every table of the database to tell."""
        triggers = connection.defer(TRIGGERS[self.dialect], [schema, name])
        referring = connection.defer(_REFERENCES, [schema, name]) if self.merge.mode == "upsert" else []
        target = self._read(connection, schema, name)
        return target and replace(
            target,
            constraints=(*target.constraints, *sorted(dict(triggers))),
            triggers=dict(triggers),
            referenced_by=tuple(f"foreign key {key}" for (key,) in referring),
        )

    def _read(self, connection: Connection, schema: str, name: str) -> MySQLTarget | None:
        self._known = catalog.read(connection, schema, name, self._known)
        return self._known

    def declared(self, connection: Connection, field: pa.Field, *, key: bool) -> str:
        return target_type(field.type, key=key)

    def table_options(self, connection: Connection) -> str:
        with contextlib.suppress(pymysql.Error):  # else MariaDB before 10.10 gives a timestamp ON UPDATE
            execute(connection, "SET SESSION explicit_defaults_for_timestamp = 1")
        bytewise = "utf8mb4_nopad_bin" if is_mariadb(connection) else "utf8mb4_0900_bin"  # blanks at the end too
        return f" ENGINE=InnoDB CHARACTER SET utf8mb4 COLLATE {bytewise}"

    def definition(self, connection: Connection, target: MySQLTarget, field: pa.Field) -> str:
        """Text gets the table's collation, if that is of utf8mb4, which has a place for all that Spark has."""
        kind = target_type(field.type)
        if kind == "longtext" and "CHARSET=utf8mb4" not in target.definition:
            kind += " CHARACTER SET utf8mb4"
        return self.column(field.name, kind, nullable=True)

    def problems(self, connection: Connection, target: MySQLTarget, ledger: str) -> Iterable[str]:
        yield from super().problems(connection, target, ledger)
        yield from catalog.no_innodb(target, target.engine)
        if len(witness_of(ledger)) > _LONGEST_NAME:
            yield f"ledger={ledger!r} leaves no room for the name of its witness: give it a shorter name"

    def no_two_phase(self, connection: Connection) -> str | None:
        if setting(connection, "wsrep_on") in ("1", "ON"):
            return "a Galera cluster has no XA transactions"
        if recovered(connection) is None:
            return "the user lacks XA_RECOVER_ADMIN: grant it, prepared transactions are listed with it"
        return None

    def choose(self, connection: Connection, target: MySQLTarget) -> tuple[str, str]:
        ((local,),) = query(connection, "SELECT @@local_infile")
        strategy, reason = super().choose(connection, target)
        return strategy, f"{reason}; by {'LOAD DATA' if local else 'INSERT, since local_infile is OFF'}"

    def findings(self, connection: Connection) -> Iterable[Finding]:
        ((version,),) = query(connection, "SELECT VERSION()")
        yield Finding.ok(f"{'MariaDB' if is_mariadb(connection) else 'MySQL'} {version}")
        if self.strategy != "staged" and self.merge.mode == "append" and (reason := self.no_two_phase(connection)):
            grant = "GRANT XA_RECOVER_ADMIN ON *.* TO CURRENT_USER; or keep the strategy staged"
            yield Finding.warning(f"{reason}; the strategy is staged", grant)
        if setting(connection, "local_infile") not in ("1", "ON"):
            yield Finding.warning(
                "local_infile is OFF: rows go in by INSERT, which takes more time than LOAD DATA",
                "SET GLOBAL local_infile = ON; and in the server's option file",
            )
        if (most := setting(connection, "group_replication_transaction_size_limit")) not in ("", "0"):
            yield Finding.warning(
                f"group_replication_transaction_size_limit = {most}: by the strategy staged a checkpoint is one "
                "transaction",
                "set it to 0, or keep checkpoints smaller than that: a larger one is refused after its decision",
            )
        yield from compare_clocks("the server", lambda: float(query(connection, "SELECT UNIX_TIMESTAMP(NOW(6))")[0][0]))

    # ------------------------------------------------------------------ errors
    def unreachable(self, error: Exception) -> str | None:
        return self.redact(error_text(error)) if isinstance(error, pymysql.Error) else None

    # ------------------------------------------------------------------ two-phase transactions
    def key(self, identity: Identity) -> str:
        return name_of(identity)

    def begin(self, plan: Plan, context: TransactionContext) -> LoadTransaction:
        target = plan.target
        identity = xa.identity_of(context.transaction_id)
        branch = xa.xid(identity, target.schema)
        transaction = LoadTransaction(self.take(), self.give, context, target, identity, branch=branch)
        transaction.own_keys = target.own_keys
        with transaction.discarded_on_error(), transaction.explained():
            transaction.connection.defer(f"XA START {branch}")
            columns = self.current(transaction.connection, target, context.schema.names).columns
            transaction.start(target.identifier, columns)
        return transaction

    def current(self, connection: Connection, known: MySQLTarget, written: Sequence[str]) -> MySQLTarget:
        """The target as the running transaction sees it, under its metadata lock. Raises ConfigurationError if it may
        not write such rows any more."""
        not_locked = ""
        connection.defer(catalog.locking(known.identifier, written))
        try:
            target = self._read(connection, known.schema, known.name)
        except pymysql.Error as error:
            if code_of(error) not in SHAPE:
                raise
            not_locked = error_text(error)
            target = self._read(connection, known.schema, known.name)
        reasons = [*catalog.no_innodb(known, target.engine if target else None)]
        if target and not reasons:
            reasons = [*target.unfit(written)] or [not_locked] * bool(not_locked)
        if reasons or not target:
            raise ConfigurationError(f"table {known.label} was changed while the query ran: {'; '.join(reasons)}")
        return target

    def evidence(self, transaction: LoadTransaction) -> dict[str, object]:
        """In MariaDB the branch is this session's until that ends, and what commits it has to lock its table."""
        if not is_mariadb(transaction.connection):
            return {}
        return {
            "session": transaction.session,
            "table": transaction.target.name,
            "written": transaction.context.schema.names,
        }

    def end_prepared(
        self,
        connection: Connection,
        ledger: Ledger,
        how: str,
        identity: Identity,
        proof: Mapping[str, Any],
    ) -> bool:
        if not is_mariadb(connection):
            return xa.end(connection, ledger.schema, how, identity)
        key = name_of(identity)
        if how == "COMMIT":
            return self._commit(connection, ledger, key, identity, proof)
        ended = xa.end(connection, ledger.schema, how, identity)
        if ended and self._is_locked(connection, ledger, key):
            raise NotEnded(
                f"the server answered XA ROLLBACK of {key} and did not do it, as MariaDB may while the session that "
                "prepared it ends. Its rows are not visible and never will be, but hold their locks until the server "
                "is restarted; it lists the branch again then, and the next start aborts it"
            )
        return ended

    def _commit(
        self, connection: Connection, ledger: Ledger, key: str, identity: Identity, proof: Mapping[str, Any]
    ) -> bool:
        """MariaDB lists a branch as free a moment before its InnoDB lets go of it, amid the end of the session that
        prepared it. XA COMMIT and ROLLBACK in that moment are answered and do nothing (seen in 11.4.5, never after this
        wait). After it nothing keeps others from giving the tables another engine, in which the branch has no rows: a
        second session has them locked meanwhile."""
        with self.lend() as watch:
            watch.defer("START TRANSACTION")
            changed = self._lock_after(proof, watch, ledger)
            ended = not changed and xa.end(connection, ledger.schema, "COMMIT", identity)
            watch.defer("COMMIT")
            committed = ledger.states(watch, [key]).get(key)
        if changed and dict(identity) in xa.prepared(connection, ledger.schema):
            raise NotEnded(
                f"{key} is prepared, and XA COMMIT would lose its rows: {changed}. Run XA ROLLBACK "
                f"{xa.xid(identity, ledger.schema)}; give the table another name, and run DROP TABLE of its own one, "
                "which InnoDB still has; then give it its name and ENGINE=InnoDB again, and start the query, which "
                "writes the rows again"
            )
        if ended and not committed:
            raise NotEnded(
                f"the server answered XA COMMIT of {key} and did not commit it, as MariaDB may do while the session "
                f"that prepared it ends. Its rows are safe, prepared in InnoDB, but {self} knows the branch "
                "again only after a restart: restart the server, then start the query again"
            )
        return ended

    def _lock_after(self, proof: Mapping[str, Any], connection: Connection, ledger: Ledger) -> str:
        """Wait for the end of the session of a branch, and lock ledger and target, unless nobody knows which that is,
        until the end of the running transaction. Returns why XA COMMIT would lose rows."""
        names = [proof.get("table", ""), ledger.name, ledger.witness.name]
        if "table" in proof:
            connection.defer(catalog.locking(quoted(ledger.schema, names[0]), proof["written"]))
        connection.defer(f"SELECT 1 FROM {', '.join(quoted(ledger.schema, name) for name in names[1:])} LIMIT 0")
        engines = connection.defer(_OTHER_ENGINES, [ledger.schema, names, names])
        try:
            xa.await_session(connection, proof.get("session"))
        except pymysql.Error as error:
            if code_of(error) not in SHAPE:
                raise
            return error_text(error)
        return " and ".join(f"the engine of {name} is {engine}" for name, engine in engines)

    def _is_locked(self, connection: Connection, ledger: Ledger, key: str) -> bool:
        row = f"SELECT 1 FROM {ledger.table} WHERE transaction_id = %s FOR UPDATE NOWAIT"
        try:
            query(connection, row, [key])
        except pymysql.Error as error:
            if code_of(error) != ER.LOCK_WAIT_TIMEOUT:
                raise
            return True
        return False

    def prepared(self, connection: Connection, schema: str, job: str, sink: str) -> Iterable[Identity]:
        prefix = TransactionId.prefix(job)
        names = {name_of(identity): identity for identity in xa.prepared(connection, schema)}
        return [identity for name, identity in names.items() if name.startswith(prefix) and of_sink(name, sink)]

    # ------------------------------------------------------------------ staged, in the task
    def unstageable(self, connection: Connection, target: MySQLTarget, batch: pa.Schema) -> Iterable[str]:
        """Tried with a temporary table, which has the same limits and leaves nothing behind. Without the right to make
        one, the first task tells."""
        table, columns = quoted(target.schema, "tpc width"), self.staging_columns(target, batch, _merge_column)
        try:
            connection.defer(f"DROP TEMPORARY TABLE IF EXISTS {table}")
            connection.defer(_creation("TEMPORARY TABLE", table, columns))
            execute(connection, f"DROP TEMPORARY TABLE {table}")
        except pymysql.Error as error:
            if _is_too_wide(error):
                yield self._too_wide(columns, error)
            elif code_of(error) not in RIGHTS:
                raise

    def _too_wide(self, columns: Sequence[MySQLColumn], error: pymysql.Error) -> str:
        remedy = (
            'use strategy="xa", which needs no such table' if self.merge.mode == "append" else "write fewer columns"
        )
        return (
            f"the strategy staged needs a table with the batch's {len(columns):,} columns and one of its own, which "
            f"the server does not take ({error_text(error)}): {remedy}, or let columns be of a shorter type"
        )

    def stage(self, plan: Plan, context: TransactionContext) -> LoadTransaction:
        """Nothing can undo CREATE TABLE but DROP TABLE. The types are those of the target."""
        target, name = plan.target, staging_table(context.transaction_id)
        table = quoted(target.schema, name)
        identity = identity_of(target.schema, context.transaction_id)
        undo = ["ROLLBACK", f"DROP TABLE IF EXISTS {table}"]
        transaction = LoadTransaction(self.take(), self.give, context, target, identity, undo=undo)
        with transaction.discarded_on_error(), transaction.explained():
            written = self.merge.written(context.schema.names, target.names)
            target = self.current(transaction.connection, target, written)
            columns = self.staging_columns(target, context.schema, _merge_column)
            transaction.start(table, columns, self.merge)
            transaction.connection.defer(
                f"{_creation('TABLE', table, columns)} COMMENT={literal(context.transaction_id)}"
            )
            try:
                execute(transaction.connection, "START TRANSACTION")
            except pymysql.Error as error:
                if not _is_too_wide(error):
                    raise
                raise ConfigurationError(f"table {target.label}: {self._too_wide(columns, error)}") from error
        return transaction

    # ------------------------------------------------------------------ before the decision
    def lock(self, connection: Connection, plan: Plan, written: Sequence[str]) -> str | None:
        try:
            execute(connection, catalog.locking(plan.target.identifier, written))
        except pymysql.Error as error:
            if code_of(error) not in SHAPE:
                raise
            return error_text(error)
        return None

    def changes_since(self, move: Move) -> Iterable[str]:
        target, staged = move.target, f"({self.union(move.tables, '*')}) AS staged"
        yield from catalog.no_innodb(target, target.engine)
        # a counter or timestamp takes a NULL for a number or the time
        counting = [c.name for c in target.columns if (c.counter or c.type == "timestamp") and not c.nullable]
        for name in counting:
            missing = f"{quoted(name)} IS NULL AND {self.stays('staged')}"
            if name in move.written and query(move.connection, f"SELECT 1 FROM {staged} WHERE {missing} LIMIT 1"):
                yield f'its column "{name}" is NOT NULL now, and rows have NULL there: let it be NULL'
        rights = [right for right in self.rights(target, "staged") if right != "INSERT"]  # which `lock` needs
        yield from self.missing_rights(move.connection, target, rights)

    def grouped(self, target: MySQLTarget, column: str) -> str:
        """MariaDB has two groups for 0.0 and -0.0, which are one key."""
        types = {known.name: known.type for known in target.columns}
        return f"{quoted(column)} + 0" if types.get(column) in ("double", "float") else quoted(column)

    def compared(self, target: MySQLTarget, column: str) -> str:
        """Byte by byte, whatever the collation; a float with all of its digits."""
        return f"CAST({self.grouped(target, column)} AS BINARY)"

    def first_tie(self, move: Move) -> Row | None:
        self._require_room(move, self._candidates(move), self._differ(move))
        return super().first_tie(move)

    def try_out(self, move: Move) -> None:
        if self.merge.mode == "upsert":
            last = self.last(move)
            self._require_room(move, self._update(move, last), self.hands_on_unique_value(move, last) or "")

    def _require_room(self, move: Move, *parts: str) -> None:
        """The server hangs up on a longer statement, and does not say why."""
        most = move.connection.longest_statement
        needed = sum(len(part.encode()) for part in parts) + _FRAME
        if needed > most:
            raise ConfigurationError(
                f"table {move.target.label}: the upsert of {len(move.tables):,} staging tables takes statements of up "
                f"to {needed:,} bytes, and the server takes max_allowed_packet = {most:,}: set that higher (SET "
                "GLOBAL, and in the option file), or write fewer partitions, and start the query again"
            )

    # ------------------------------------------------------------------ the move
    def append(self, move: Move, rows: int | None) -> None:
        """InnoDB judges a foreign key row by row, also within one INSERT. If the table refers to itself, those rows go
        first that need none of the others, then those that need the first, and so on."""
        target, needed = move.target, self._needed_rows_are_there(move, "staged")
        required = {column.name for column in target.columns if not column.nullable} & set(move.written)
        keys = [unique.columns for unique in target.uniques if set(unique.columns) <= required]
        if not needed or not keys:
            super().append(move, rows)
            return
        self.count(move, rows)
        staged = f"({self.union(move.tables, self.quoted(move.written))}) AS staged"
        insert = (
            f"{self.into(target, move.written)} SELECT staged.* FROM {staged} LEFT JOIN {target.identifier} AS own"
            f" ON {self.equal('own', 'staged', keys[0])} WHERE own.{quoted(keys[0][0])} IS NULL"
        )
        moved = 0
        while some := execute(move.connection, f"{insert} AND {needed}"):
            moved += some
        moved += execute(move.connection, insert)  # of these the server says what they lack
        ((count,),) = query(move.connection, f"SELECT count(*) FROM {staged}")
        if moved != count:
            raise BadValue(
                f"table {target.label}: {count - moved} of {count} rows have a value of ({', '.join(keys[0])}) that "
                "the table, or another of the rows, has already"
            )

    def _needed_rows_are_there(self, move: Move, rows: str) -> str:
        """The condition for `rows` that refer to no other row of the table, or to one that it has; "" if it does not
        refer to itself by columns that are written, or has triggers, which may alter them."""
        conditions = []
        for key in move.target.own_keys if not move.target.triggers else ():
            if not set(key.columns) <= set(move.written):
                continue
            names = [(quoted(c), quoted(r)) for c, r in zip(key.columns, key.referred, strict=True)]
            nothing = " OR ".join(f"{rows}.{column} IS NULL" for column, _ in names)
            there = " AND ".join(f"needed.{referred} = {rows}.{column}" for column, referred in names)
            table = move.target.identifier
            alternatives = [nothing, f"EXISTS (SELECT 1 FROM {table} AS needed WHERE {there})"]
            if set(key.referred) <= set(move.written):
                alternatives.append(" AND ".join(f"{rows}.{referred} = {rows}.{column}" for column, referred in names))
            conditions.append(f"({' OR '.join(alternatives)})")
        return " AND ".join(conditions)

    def upsert(self, move: Move) -> None:
        connection, target, last = move.connection, move.target, self.last(move)
        longest = max([self._update(move, last), *self.move_away(move, last)], key=len)
        self._require_room(move, longest, self.hands_on_unique_value(move, last) or "")
        self.delete(move, last)
        if set(move.written) == set(self.merge.keys):
            self._insert(move, last)
            return
        self._put_in_anew(move, last)
        # asked first: a trigger may change what orders changes
        changes = f"SELECT count(*) FROM ({last}) AS last"
        newer = ""
        if self.merge.keep_newer:
            changes += f" LEFT JOIN {target.identifier} AS target ON {self.equal('target', 'last', self.merge.keys)}"
            newer = f" AND (target.{quoted(self.merge.keys[0])} IS NULL OR TRUE{self.not_older()})"
        ((due,),) = query(connection, f"{changes} WHERE {self.stays('last')}{newer}")
        needed = self._needed_rows_are_there(move, "last")
        first = f"SELECT last.* FROM ({last}) AS last WHERE {needed} LIMIT {_ALL}" if needed else last
        changed = execute(connection, self._update(move, first)) + self._insert(move, last)
        if needed and changed != due:  # some refer to rows that were yet to come
            changed = execute(connection, self._update(move, last))
        if changed != due:  # neither missing for the INSERT nor there for the UPDATE
            raise TransactionBlocked(
                f"table {target.label}: somebody else inserted or deleted keys of the batch while it was moved"
            )

    def _put_in_anew(self, move: Move, last: str) -> None:
        """Rows that give up a value which another one takes, as an UPDATE would leave them."""
        connection, target = move.connection, move.target
        if (handed_on := self.hands_on_unique_value(move, last)) is None:
            return
        own = [column.name for column in target.columns if not column.generated]
        names = ", ".join(f"target.{quoted(column)}" for column in own)
        giver = f"FROM {target.identifier} AS target JOIN ({last}) AS last WHERE {handed_on}"
        if not query(connection, f"SELECT 1 {giver} FOR UPDATE"):
            return
        keys, given = self.merge.keys, quoted("tpc given")
        renewed = [c for c in target.columns if c.on_update and c.name not in (*move.written, *keys)]
        parts = [f"{quoted(c.name)} {c.declared} NULL ON UPDATE {c.on_update}" for c in renewed]
        parts.append(f"PRIMARY KEY ({listed(keys)})")
        create = f"CREATE TEMPORARY TABLE {given} ({', '.join(parts)}) ENGINE=InnoDB"
        try:
            execute(connection, f"DROP TEMPORARY TABLE IF EXISTS {given}")
            rows = execute(connection, f"{create} SELECT {names} {giver}")
        except pymysql.Error as error:
            if code_of(error) not in RIGHTS:
                raise
            raise BadValue(
                f"table {target.label}: rows of the batch swap the value of a unique index, or hand it on, for which "
                f"the user needs the right CREATE TEMPORARY TABLES: {error_text(error)}"
            ) from error
        execute(connection, self._update(move, last, given))  # the server puts the time where it would in the target
        same = self.equal("target", "given", keys)
        connection.defer("SET SESSION foreign_key_checks = 0")  # of hidden tables: the rows come back
        out = execute(connection, f"DELETE target FROM {target.identifier} AS target JOIN {given} AS given ON {same}")
        connection.defer("SET SESSION foreign_key_checks = 1")
        put = execute(connection, f"{self.into(target, own)} SELECT {listed(own)} FROM {given}")
        execute(connection, f"DROP TEMPORARY TABLE {given}")
        if not rows == out == put:
            raise TransactionBlocked(
                f"table {target.label}: somebody else changed rows of the batch while it was moved"
            )

    def _update(self, move: Move, last: str, table: str = "") -> str:
        """Of the target, or of another (quoted) table with its rows. A key stays also where the server puts the time
        into what is not set (ON UPDATE)."""
        target, keys = move.target, self.merge.keys
        own = [c.name for c in target.columns if c.name in keys and c.type in ("timestamp", "datetime")]
        changes = [(column, "last") for column in move.written if column not in keys]
        changes += [(column, "target") for column in own]
        sets = ", ".join(f"target.{quoted(column)} = {row}.{quoted(column)}" for column, row in changes)
        return (
            f"UPDATE {table or target.identifier} AS target JOIN ({last}) AS last"
            f" ON {self.equal('target', 'last', keys)}{self.not_older()} SET {sets} WHERE {self.stays('last')}"
        )

    def _insert(self, move: Move, last: str) -> int:
        target, keys = move.target, self.merge.keys
        columns = ", ".join(f"last.{quoted(column)}" for column in move.written)
        insert = (
            f"{self.into(target, move.written)} SELECT {columns} FROM ({last}) AS last"
            f" LEFT JOIN {target.identifier} AS target ON {self.equal('target', 'last', keys)}"
            f" WHERE {self.stays('last')} AND target.{quoted(keys[0])} IS NULL"
        )
        needed, inserted = self._needed_rows_are_there(move, "last"), 0
        try:
            while needed and (some := execute(move.connection, f"{insert} AND {needed}")):
                inserted += some
            return inserted + execute(move.connection, insert)
        except pymysql.IntegrityError as error:
            text, names = error_text(error), [u.name for u in target.uniques if set(u.columns) == set(keys)]
            # MySQL puts the table's name before the index
            if code_of(error) != ER.DUP_ENTRY or not any(text.endswith((f"'{n}'", f".{n}'")) for n in names):
                raise
            raise TransactionBlocked(
                f"table {target.label}: somebody else inserted keys of the batch while it was moved: {text}"
            ) from error

    # ------------------------------------------------------------------ staging tables
    def mark_moved(self, connection: Connection, schema: str, names: Sequence[str]) -> None:
        for name in names:
            connection.defer(f"DELETE FROM {quoted(schema, name)} ORDER BY {quoted(_ROW)} LIMIT 1")

    def drop(self, connection: Connection, schema: str, names: Sequence[str]) -> None:
        """Those that are there: a drop of many may have ended in the middle."""
        for some in batches(names, self.DROPPED_TOGETHER):
            execute(connection, f"DROP TABLE IF EXISTS {', '.join(quoted(schema, name) for name in some)}")

    def drop_unused(self, connection: Connection, schema: str, names: Sequence[str]) -> None:
        """The server flushes its log for each table that it drops: several connections share the flushes. What somebody
        reads now is dropped by the next sweep."""

        def drop(some: Sequence[str]) -> None:
            try:
                with self.lend() as connection:
                    connection.defer("SET SESSION lock_wait_timeout = 1")
                    self.drop(connection, schema, some)
                    connection.defer(f"SET SESSION lock_wait_timeout = {self._lock_timeout}")
            except pymysql.Error as error:
                text = error_text(error)
                logger.warning("staging tables in %s were moved and could not be dropped yet: %s", schema, text)

        parts = [names[n::_DROPPERS] for n in range(min(_DROPPERS, len(names)))]
        side_by_side(drop, parts)

    def staged(self, connection: Connection, schema: str, prefix: str) -> list[str]:
        rows = query(
            connection,
            "SELECT table_comment FROM information_schema.tables WHERE table_schema = %s"
            " AND table_name REGEXP '^tpc_[0-9a-f]{20}$' AND LEFT(table_comment, %s) = %s ORDER BY 1",
            [schema, len(prefix), prefix],
        )
        return [text for (text,) in rows]

    def staged_types(self, connection: Connection, schema: str, tables: Sequence[str]) -> StagedTypes:
        """The type of a text with its collation."""
        if not tables:
            return {}
        rows = query(
            connection,
            "SELECT table_name, column_name, column_type, coalesce(collation_name, '') FROM information_schema.columns"
            f" WHERE table_schema = %s AND column_name <> %s AND table_name IN ({marks(tables)})"
            " ORDER BY ordinal_position",
            [schema, _ROW, *tables],
        )
        return by_table((table, name, f"{kind} {collation}".rstrip()) for table, name, kind, collation in rows)


def _creation(kind: str, table: str, columns: Iterable[MySQLColumn]) -> str:
    """The statement that makes a staging table, of this (quoted) name."""
    key = f"{quoted(_ROW)} bigint unsigned NOT NULL AUTO_INCREMENT PRIMARY KEY"
    return f"CREATE {kind} {table} ({', '.join([key, *map(_declaration, columns)])}) ENGINE=InnoDB"


def _is_too_wide(error: pymysql.Error) -> bool:
    """Whether a table was not made for the number of its columns, or the length of its rows."""
    return code_of(error) in (ER.TOO_MANY_FIELDS, ER.TOO_BIG_ROWSIZE) or "Too many columns" in error_text(error)


def _declaration(column: MySQLColumn) -> str:
    """For CREATE TABLE. NULLs are refused before they get here, but those of rows that delete."""
    collation = f" COLLATE {column.collation}" if column.collation else ""
    json = f" CHECK (json_valid({quoted(column.name)}))" if column.type == "json" and column.collation else ""
    # the catalog writes members with backslashes
    kind = f"{column.type}({', '.join(map(literal, column.members))})" if column.members else column.declared
    return f"{quoted(column.name)} {kind}{collation} NULL{json}"


def _merge_column(field: pa.Field) -> MySQLColumn:
    """A column that only a staging table has: the marker of deletes, or what orders changes, which is no text."""
    declared = target_type(field.type).replace("boolean", "tinyint(1)")
    if declared == "timestamp(6)":  # which ends in 2038
        return MySQLColumn(field.name, "moment", "datetime(6)", digits=6)
    kind, *numbers = re.findall(r"\w+", declared)
    precision, scale = map(int, numbers) if kind == "decimal" else (0, None)
    digits = 6 if declared.endswith("(6)") else 0
    return MySQLColumn(field.name, kind, declared, precision=precision, scale=scale, digits=digits)
