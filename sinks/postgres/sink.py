"""PostgreSQL's own way: rows by COPY, into the target under PREPARE TRANSACTION, or into staging tables, which are
dropped in the transaction that moves them."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import psycopg
import pyarrow as pa
from psycopg import errors, sql
from psycopg.conninfo import conninfo_to_dict
from psycopg.postgres import types as builtin

from sinks.base import Sink
from sinks.diagnosis import Finding, InDoubt, compare_clocks
from sinks.errors import ConfigurationError, SchemaMismatch
from sinks.options import Duration
from sinks.postgres import catalog
from sinks.postgres.catalog import PostgresColumn, PostgresTarget, target_type
from sinks.postgres.connection import SILENCE, Connection, error_text, fault, row
from sinks.postgres.copy import CopyEncoder, CopyTransaction
from sinks.sql.backend import Backend, Move, Plan, StagedTypes, by_table
from sinks.sql.dialects import postgres_settings
from sinks.sql.ledger import Ledger, LedgerRow
from sinks.sql.names import of_sink, staging_table
from sinks.sql.server import KEEPALIVES, PERCENT_ENCODED, Pool, Row, is_trusted
from sinks.sql.sink import SchemaEvolution, TableSink
from sinks.sql.strategies import identity_of
from sinks.sql.table import MergeOptions, Mode, OrderByNulls
from sinks.transaction import Identity, TransactionContext, TransactionId

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

logger = logging.getLogger(__name__)

_OLD_SECONDS = 3600  # of a prepared transaction
_LONG_BYTES = 2000  # of what goes into an index, which takes a third of a page for a row
_LEDGER_BYTES = 62  # of its name, at most
_FEW_FREE = 8  # free slots of max_prepared_transactions
Strategy = Literal["auto", "prepared", "staged"]


class PostgresSink(TableSink):
    """Rows into one table, by COPY BINARY.

    Two strategies. `prepared`: each task copies into the table itself and runs PREPARE TRANSACTION; the driver runs
    COMMIT PREPARED. Appends only, and the server must have max_prepared_transactions above the number of partitions.
    `staged`: each task copies into a staging table beside the target and commits that; the driver moves all staging
    tables of a checkpoint in one transaction. For any server and PgBouncer pool, and the only one for upserts. `auto`
    asks the server. What became of a transaction is kept in the table `ledger`, beside the target.
    """

    system = "PostgreSQL"

    strategy: Strategy
    _backend: PostgresBackend

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

        * `dsn`: a libpq URL or key=value string; `connect_options`: further libpq parameters (`sslmode`, `passfile` …).
        * `table`: as in SQL: `orders`, `shop.orders`, `"Shop"."Orders"`. `name` (default: `table`) is the sink's uid.
        * `lock_timeout`: how long any of our transactions waits for a lock: seconds, or a text such as "10 s".
        * The other options are those of every table: `sinks.sql.sink.TableSink`.

        Raises ConfigurationError for options that contradict each other, and for a DSN that libpq cannot read.
        """
        merge = MergeOptions.of(mode, keys, order_by, delete_marker, keep_newer, order_by_nulls)
        options = connect_options or {}
        backend = PostgresBackend(dsn, options, merge, strategy, name=name or table, lock_timeout=lock_timeout)
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

    def inspect(self, transactions: Sequence[Identity]) -> Sequence[InDoubt]:
        gids = [transaction["gid"] for transaction in transactions if "gid" in transaction]
        with self._backend.lend() as connection:
            ages = dict(
                connection.execute(
                    "SELECT gid, extract(epoch from now() - prepared)::float FROM pg_prepared_xacts"
                    " WHERE gid = ANY(%s)",
                    [gids],
                ).fetchall()
            )
        return [InDoubt.parsed(transaction, ages.get(transaction.get("gid"))) for transaction in transactions]


class PostgresBackend(Pool, Backend):
    """Leaves no session state and no server-side prepared statement behind, so a transaction-pooling PgBouncer may
    stand in between."""

    dialect = "postgresql"
    # each drop takes some five locks out of the server's shared table (64 x max_connections = 6,400 by default)
    DROPPED_TOGETHER = MOVED_TOGETHER = 100
    KEEPS_IDLE = True
    SECRETS = ("password", "sslpassword", "oauth_client_secret")
    SHOWN = ("host", "hostaddr", "port", "dbname", "user")
    HANDED_ON = (
        "can hand it on only in an index whose columns the batch has, and neither in an exclusion constraint nor in an "
        "index that only a partition has"
    )
    NO_TABLE_HINT = " (a name with capitals needs double quotes)"
    CHECK = "host, port, database, user, password and pg_hba.conf, and that the server runs"
    TWO_PHASE = "prepared"
    KEY = "gid"
    NEWEST_FIRST = "{} DESC NULLS LAST"
    POSITION = "ctid"  # COPY fills a table that its transaction made from the beginning to the end
    AS_TEXT = "{}::text"

    locate = staticmethod(catalog.locate)
    missing_rights = staticmethod(catalog.missing_rights)
    fault = staticmethod(fault)

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
        """`dsn` is a libpq URL or key=value string and `options` are libpq parameters that override it; `name` is the
        sink's. Raises ConfigurationError if libpq cannot read them."""
        self.merge, self.strategy = merge, strategy
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
            raise ConfigurationError(f"sink {name!r}: the DSN holds an '@' too many: {PERCENT_ENCODED}")
        defaults = {
            "application_name": f"tpc {name}"[:63],
            "connect_timeout": 10,
            "tcp_user_timeout": 60_000,
            **KEEPALIVES,
        }
        fixed = {"client_encoding": "UTF8"}  # of the text inside COPY BINARY too
        super().__init__(defaults | given | fixed, name=name, lock_timeout=lock_timeout)
        self._silent_until = 0.0

    def connect(self) -> Connection:
        if time.monotonic() < self._silent_until:
            raise psycopg.OperationalError(
                f"PostgreSQL at {self} did not answer a moment ago; it is not asked yet again"
            )
        try:
            how = {"autocommit": True, "prepare_threshold": None, "cursor_factory": psycopg.ClientCursor}
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
        connection.server, connection.on_silence = str(self), self._was_silent
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
    def _begun(self, connection: Connection, access: str, *, undo: bool = False) -> Iterator[None]:
        self._begin(connection, access)
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

    def _begin(self, connection: Connection, access: str = "WRITE") -> None:
        """Begin a transaction together with the next statement."""
        connection.defer(f"BEGIN ISOLATION LEVEL READ COMMITTED READ {access}")
        connection.defer(postgres_settings(self._lock_timeout))

    def quote(self, *names: str) -> str:
        return sql.Identifier(*names).as_string()

    def execute(self, connection: Connection, statement: str, parameters: Sequence[object] = ()) -> int:
        if connection.idle:
            with self.transaction(connection):
                return self.execute(connection, statement, parameters)
        return connection.execute(statement.encode(), parameters or None).rowcount

    def query(self, connection: Connection, statement: str, parameters: Sequence[object] = ()) -> list[Row]:
        self._defer_settings(connection)
        return connection.execute(statement.encode(), parameters or None).fetchall()

    def defer(
        self, connection: Connection, statement: str, parameters: Sequence[object], judge: Callable[[list[Row]], object]
    ) -> list[Row]:
        self._defer_settings(connection)
        return connection.defer(statement, parameters, judge)

    def _defer_settings(self, connection: Connection) -> None:
        """Outside of a transaction: the statements of one message are one transaction, so the settings hold for it."""
        if connection.idle:
            connection.defer(postgres_settings(self._lock_timeout))

    def insert_missing(self, connection: Connection, inserts: Mapping[str, Sequence[LedgerRow]]) -> int:
        parts = [part for ledger, rows in inserts.items() for part in self.insertions(ledger, rows)]
        last, parameters = parts.pop()
        added = [self.defer(connection, f"{part} RETURNING 1", asked, len) for part, asked in parts]
        added.append(self.query(connection, f"{last} RETURNING 1", parameters))
        return sum(map(len, added))

    # ------------------------------------------------------------------ the target
    def describe(self, connection: Connection, schema: str, name: str) -> PostgresTarget | None:
        with self._begun(connection, "ONLY") if connection.idle else contextlib.nullcontext():
            return catalog.describe(connection, schema, name)

    def declared(self, connection: Connection, field: pa.Field, *, key: bool) -> str:
        (longest,) = row(connection, "SELECT current_setting('max_identifier_length')::int")
        if (length := len(field.name.encode())) > longest:
            raise SchemaMismatch(
                f"its name has {length} bytes, and PostgreSQL cuts names after {longest}: rename it in Spark"
            )
        return target_type(field.type)

    def problems(self, connection: Connection, target: PostgresTarget, ledger: str) -> Iterable[str]:
        yield from super().problems(connection, target, ledger)
        yield from target.unwritable
        if len(ledger.encode()) > _LEDGER_BYTES:
            yield f"ledger={ledger!r} is cut by PostgreSQL to the name of its witness: give it a shorter name"

    def mismatches(self, batch: pa.Schema, target: PostgresTarget) -> list[str]:
        fixed = sorted(target.always_identity.intersection(batch.names).difference(self.merge.keys))
        why = "is GENERATED ALWAYS AS IDENTITY, so an upsert cannot change it: make it BY DEFAULT, or leave it out"
        return super().mismatches(batch, target) + [f"column {name!r} {why}" for name in fixed if self.merge.keys]

    def no_two_phase(self, connection: Connection) -> str | None:
        if row(connection, "SELECT current_setting('max_prepared_transactions')") != ("0",):
            return None
        return "max_prepared_transactions is 0: set it above the number of partitions and restart the server"

    def findings(self, connection: Connection) -> Iterable[Finding]:
        version, limit, used = row(
            connection,
            "SELECT current_setting('server_version'), current_setting('max_prepared_transactions')::int,"
            " (SELECT count(*) FROM pg_prepared_xacts)::int",
        )
        yield Finding.ok(f"PostgreSQL {version}")
        free = f"{limit - used} of max_prepared_transactions = {limit} are free"
        if limit == 0 and self.strategy == "auto":
            yield Finding.ok("max_prepared_transactions is 0, so the sink uses the strategy staged")
        elif 0 < limit < used + _FEW_FREE and self.strategy != "staged":
            setting = f"ALTER SYSTEM SET max_prepared_transactions = {max(64, 2 * limit)}; then restart the server"
            yield Finding.warning(f"{free}; each partition needs one", setting)
        elif limit:
            yield Finding.ok(free)
        yield from _old(connection)
        yield from compare_clocks(
            "the server", lambda: float(row(connection, "SELECT extract(epoch from clock_timestamp())")[0])
        )

    # ------------------------------------------------------------------ errors
    def unreachable(self, error: Exception) -> str | None:
        return self.redact(str(error)).strip() if isinstance(error, psycopg.OperationalError) else None

    # ------------------------------------------------------------------ two-phase transactions
    def _new(self, context: TransactionContext, target: PostgresTarget, identity: Identity) -> CopyTransaction:
        connection = self.take()
        self._begin(connection)
        return CopyTransaction(connection, self.give, context, target.label, identity)

    def begin(self, plan: Plan, context: TransactionContext) -> CopyTransaction:
        """Begin to copy into the target itself, with the types that this transaction sees: COPY BINARY would take the
        bytes of one type for those of another."""
        target = plan.target
        transaction = self._new(context, target, {self.KEY: context.transaction_id})
        with transaction.discarded_on_error():
            with transaction.explained():
                catalog.lock(transaction.connection, target)
                transaction.number = transaction.connection.defer("SELECT txid_current()")
                columns = catalog.current(transaction.connection, target).columns
            transaction.own_keys = target.own_keys
            transaction.start(target.identifier, CopyEncoder(context.schema, columns, target.label, self.merge))
        return transaction

    def end_prepared(
        self,
        connection: Connection,
        ledger: Ledger,
        how: str,
        identity: Identity,
        proof: Mapping[str, object],
    ) -> bool:
        statement = f"{how} PREPARED {sql.Literal(self.key(identity)).as_string(connection)}"
        try:
            connection.execute(statement.encode())
            return True
        except errors.UndefinedObject:
            return False
        except (errors.InsufficientPrivilege, errors.FeatureNotSupported) as error:
            raise ConfigurationError(
                f"the role of the sink may not finish its own transaction at {self}: {error_text(error)}. Connect "
                "to the database as the role that prepared it (pg_prepared_xacts.owner), or as a superuser, and run: "
                f"{statement};"
            ) from error

    def prepared(self, connection: Connection, schema: str, job: str, sink: str) -> Iterable[Identity]:
        """The name does not have the schema, and another environment may have the same names in another schema. The
        locks tell: a prepared transaction still holds those of the table, and of the ledger beside it."""
        rows = connection.execute(
            "SELECT gid FROM pg_prepared_xacts p WHERE database = current_database() AND starts_with(gid, %s)"
            " AND EXISTS (SELECT FROM pg_locks own JOIN pg_locks held USING (virtualtransaction)"
            " JOIN pg_class c ON c.oid = held.relation JOIN pg_namespace n ON n.oid = relnamespace"
            " WHERE own.transactionid = p.transaction AND own.pid IS NULL AND held.pid IS NULL"
            " AND held.mode = 'RowExclusiveLock' AND nspname = %s)"
            " ORDER BY gid",
            [TransactionId.prefix(job), schema],
        ).fetchall()
        return [{self.KEY: gid} for (gid,) in rows if of_sink(gid, sink)]

    def evidence(self, transaction: CopyTransaction) -> dict[str, object]:
        ((xid,),) = transaction.number
        return {"xid": xid}

    def contradiction(self, connection: Connection, proof: Mapping[str, object]) -> str | None:
        """The server remembers for a while how transactions ended. Only that one was committed counts: what it says
        after a failover that lost some may be about another transaction."""
        try:
            (status,) = row(connection, "SELECT txid_status(%s::bigint)", proof.get("xid"))
        except errors.InvalidParameterValue:  # a number that this server has not come to
            return None
        if status != "committed":
            return None
        return (
            f"the server says that its transaction {proof['xid']} was committed, and the ledger has not "
            "its row: somebody deleted it, or restored an older copy of the database"
        )

    # ------------------------------------------------------------------ staged, in the task
    def stage(self, plan: Plan, context: TransactionContext) -> CopyTransaction:
        """The staging table has the types, NOT NULL and CHECKs of the target."""
        target, name = plan.target, staging_table(context.transaction_id)
        table = sql.Identifier(target.schema, name)
        identity = identity_of(target.schema, context.transaction_id)
        transaction = self._new(context, target, identity)
        with transaction.discarded_on_error():
            with transaction.explained():
                target = catalog.current(transaction.connection, target)
            columns = self.staging_columns(target, context.schema, _merge_column)
            encoder = CopyEncoder(context.schema, columns, target.label, self.merge)
            written = set(self.merge.written(context.schema.names, target.names))
            declarations = ", ".join(self._declarations(target, columns, written))
            heap = " USING heap" if self.merge.order_by else ""  # of which `POSITION` is sure
            create = f"CREATE TABLE {table.as_string()} ({declarations}){heap}"
            comment = sql.SQL("COMMENT ON TABLE {} IS {}").format(table, sql.Literal(context.transaction_id))
            with transaction.explained():
                transaction.connection.execute(f"{create}; {comment.as_string()}".encode())
            transaction.start(table, encoder)
        return transaction

    def _declarations(self, target: PostgresTarget, columns: Sequence[PostgresColumn], written: set[str]) -> list[str]:
        """Columns and constraints for CREATE TABLE. A row that deletes needs nothing but its key."""
        quote, marker, lines = self.quote, self.merge.delete_marker, list[str]()
        checks = {check.name: check.expression for check in target.checks if set(check.columns) <= written}
        for column in columns:
            is_required = not column.nullable
            if is_required and marker and column.name not in self.merge.keys:
                is_required, checks[f"{column.name} is null"] = False, f"{quote(column.name)} IS NOT NULL"
            null = " NOT NULL" if is_required else ""
            lines.append(f"{quote(column.name)} {column.in_sql}{column.collation}{null}")
        spared = f"{quote(marker)} IS TRUE OR " if marker else ""
        return lines + [f"CONSTRAINT {quote(name)} CHECK ({spared}({rule}))" for name, rule in checks.items()]

    # ------------------------------------------------------------------ before the decision
    def lock(self, connection: Connection, plan: Plan, written: Sequence[str]) -> str | None:
        try:
            known, ledger = plan.target, plan.ledger
            ledgers = [ledger.name, ledger.witness.name]
            if missing := self.missing_rights(connection, known, self.rights(known, "staged"), ledgers):
                return "; ".join(missing)
            catalog.lock(connection, known)
            connection.flush()
        except (errors.UndefinedTable, errors.InvalidSchemaName) as error:
            raise ConfigurationError(
                f"table {plan.target.label} is not there any more ({error_text(error)}): rename or restore it"
            ) from None
        return None

    def sorted_by(self, move: Move, column: str) -> str:
        is_own = column not in move.target.names and move.types[column] == "text"
        return f'{self.quote(column)} COLLATE "C"' if is_own else self.quote(column)  # the latter as the table sorts

    def compared(self, target: PostgresTarget, column: str) -> str:
        """Some types have no equality."""
        return f'{self.quote(column)}::text COLLATE "C"'

    def changes_since(self, move: Move) -> Iterable[str]:
        yield from move.target.unwritable

    def constraints(self, move: Move) -> list[str]:
        reasons = [f"check {check.name}" for check in move.target.checks if not set(check.columns) <= set(move.written)]
        reasons += ["a publication"] * (self.merge.mode == "upsert" and move.target.keyless)
        reasons = super().constraints(move) + reasons
        return reasons or ["an index"] * self._has_long_values(move)

    def _has_long_values(self, move: Move) -> bool:
        """Whether staged rows have values that may be too long for an index of the target."""
        columns = [set(index) & set(move.written) for index in move.target.long_indexes]
        sizes = [
            " + ".join(f"coalesce(pg_catalog.pg_column_size({self.quote(c)}), 0)" for c in sorted(c))
            for c in columns
            if c
        ]
        if not sizes:
            return False
        staged = self.union(move.tables, self.quoted(sorted(set().union(*columns))))
        statement = f"SELECT 1 FROM ({staged}) AS staged WHERE greatest({', '.join(sizes)}) > {_LONG_BYTES} LIMIT 1"
        return bool(self.query(move.connection, statement))

    def try_out(self, move: Move) -> None:
        """Rights of defaults, a sequence that is behind, and the like show with the first row only."""
        tables = move.tables if self.merge.delete_marker else move.tables[:1]
        marker = [self.merge.delete_marker] if self.merge.delete_marker else []
        staged = f"({self.union(tables, self.quoted(dict.fromkeys([*move.written, *marker])))}) AS staged"
        row = f"SELECT {self.quoted(move.written)} FROM {staged} WHERE {self.stays('staged')} LIMIT 1"
        conflict = f" ON CONFLICT ({self.quoted(self.merge.keys)}) DO NOTHING" if self.merge.keys else ""
        self.execute(move.connection, f"{self.into(move.target, move.written)} {row}{conflict}")

    # ------------------------------------------------------------------ the move
    def upsert(self, move: Move) -> None:
        target, last, keys = move.target, self.last(move), self.merge.keys
        changes = [column for column in move.written if column not in keys]
        self.delete(move, last)
        self._put_in_anew(move, last, changes)
        sets = ", ".join(f"{name} = excluded.{name}" for name in map(self.quote, changes))
        action = f"UPDATE SET {sets} WHERE true{self.not_older('excluded')}" if changes else "NOTHING"
        rows = f"SELECT {self.quoted(move.written)} FROM ({last}) AS last WHERE {self.stays('last')}"
        conflict = f"ON CONFLICT ({self.quoted(keys)}) DO {action}"
        self.execute(move.connection, f"{self.into(target, move.written)} {rows} {conflict}")

    def _put_in_anew(self, move: Move, last: str, changes: Sequence[str]) -> None:
        """Rows that give up a value which another one takes, with what the batch has not as it was."""
        handed_on, table = self.hands_on_unique_value(move, last), self.quote(move.target.schema, move.target.name)
        if handed_on is None or not self.query(
            move.connection, f"SELECT 1 FROM {table} AS target, ({last}) AS last WHERE {handed_on} LIMIT 1"
        ):
            return
        own = [column.name for column in move.target.columns if not column.generated]
        values = ", ".join(f"{'last' if column in changes else 'given'}.{self.quote(column)}" for column in own)
        # counted first: no row goes in before all are out
        self.execute(
            move.connection,
            f"WITH given AS (DELETE FROM {table} AS target USING ({last}) AS last WHERE {handed_on} RETURNING target.*)"
            f" {self.into(move.target, own)} SELECT {values} FROM given JOIN ({last}) AS last"
            f" ON {self.equal('given', 'last', self.merge.keys)} WHERE (SELECT count(*) FROM given) > 0",
        )

    def takes(self, move: Move) -> list[str]:
        """Also of indexes that are partial, as if they were whole, or over expressions."""
        takes = super().takes(move)
        for unique in move.target.special_uniques:
            plain = [self.quote(column) for column in unique.columns if column in move.written]
            sides = [(f"taker.{column}", f"target.{column}") for column in plain]
            if set(unique.reads) <= set(move.written):  # of others the new value is not known
                sides += [
                    (
                        self._evaluated(expression, unique.reads, "taker"),
                        self._evaluated(expression, unique.reads, "target"),
                    )
                    for expression in unique.expressions
                ]
            operator = "IS NOT DISTINCT FROM" if unique.nulls_equal else "="
            if sides:
                takes.append("(" + " AND ".join(f"{taker} {operator} {target}" for taker, target in sides) + ")")
        return takes

    def _evaluated(self, expression: str, columns: Sequence[str], row: str) -> str:
        """An expression over columns of a `row` of the statement around."""
        names = ", ".join(f"{row}.{self.quote(column)}" for column in columns)
        return f"(SELECT {expression} FROM (SELECT {names}) AS one)"

    def into(self, target: PostgresTarget, written: Sequence[str]) -> str:
        """Identity columns that are GENERATED ALWAYS are written, as COPY does."""
        overriding = " OVERRIDING SYSTEM VALUE" if target.always_identity & set(written) else ""
        return f"INSERT INTO {self.quote(target.schema, target.name)} AS target ({self.quoted(written)}){overriding}"

    # ------------------------------------------------------------------ staging tables
    def mark_moved(self, connection: Connection, schema: str, names: Sequence[str]) -> None:
        self.drop_unused(connection, schema, names[: self.DROPPED_TOGETHER])
        for name in sorted(self.existing(connection, schema, names)):
            # a DELETE may be refused, in a publication of all tables, since they have no key
            again = sql.SQL("INSERT INTO {0} SELECT * FROM {0} LIMIT 1").format(sql.Identifier(schema, name))
            connection.execute(again)

    def staged(self, connection: Connection, schema: str, prefix: str) -> list[str]:
        rows = connection.execute(
            "SELECT obj_description(c.oid, 'pg_class') FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace"
            " WHERE nspname = %s AND relkind = 'r' AND relname LIKE 'tpc\\_%%'"
            " AND starts_with(obj_description(c.oid, 'pg_class'), %s) ORDER BY 1",
            [schema, prefix],
        ).fetchall()
        return [text for (text,) in rows]

    def staged_types(self, connection: Connection, schema: str, tables: Sequence[str]) -> StagedTypes:
        rows = connection.execute(
            "SELECT relname::text, attname::text, format_type(atttypid, atttypmod) FROM pg_attribute"
            " JOIN pg_class c ON c.oid = attrelid JOIN pg_namespace n ON n.oid = relnamespace"
            " WHERE nspname = %s AND relname = ANY(%s) AND attnum > 0 AND NOT attisdropped ORDER BY attnum",
            [schema, list(tables)],
        ).fetchall()
        return by_table(rows)


def _merge_column(field: pa.Field) -> PostgresColumn:
    """A column that only a staging table has."""
    declared = target_type(field.type)
    element, _, array = declared.partition("[")
    return PostgresColumn(field.name, builtin[element.split("(")[0]].name + "[]" * bool(array), declared)


def _old(connection: Connection) -> Iterable[Finding]:
    old = connection.execute(
        "SELECT gid, database, owner, extract(epoch from now() - prepared)::bigint FROM pg_prepared_xacts"
        " WHERE prepared < now() - make_interval(secs => %s) ORDER BY prepared LIMIT 5",
        [_OLD_SECONDS],
    ).fetchall()
    for gid, database, owner, age in old:
        name = sql.Literal(gid).as_string(connection)
        yield Finding.warning(
            f"transaction {gid} in database {database} has been prepared for {age / 3600:.1f} h: it holds locks, and "
            "VACUUM back",
            "coordinator in-doubt list (of its job)"
            if gid.startswith("tpc.")
            else f"ask who made it, then, as {owner}: COMMIT PREPARED {name}; or ROLLBACK PREPARED {name};",
        )
