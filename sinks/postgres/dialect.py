"""PostgreSQL's own way: COPY into the target, then PREPARE TRANSACTION (strategy `prepared`); the driver runs COMMIT
PREPARED. Or COPY into a staging table of one's own (strategy `staged`), see `staging`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import psycopg
import pyarrow as pa
from psycopg import errors, sql

from sinks.diagnosis import Finding, of_clock
from sinks.errors import ConfigurationError, SchemaMismatch
from sinks.postgres import catalog
from sinks.postgres.catalog import Target
from sinks.postgres.copying import CopyTransaction
from sinks.postgres.encode import CopyEncoder
from sinks.postgres.failures import describe, fault
from sinks.postgres.server import Connection, Server, row
from sinks.postgres.types import Column, target_type
from sinks.sql.ddl import PostgresDdl
from sinks.sql.dialect import Dialect, Plan, Writers, declarations
from sinks.sql.errors import Fault
from sinks.sql.ledger import Ledger
from sinks.sql.names import of_sink, witness_of
from sinks.sql.questions import HOMES
from sinks.transaction import Identity, TransactionContext, TransactionId

HIDES_ROWS = "row-level security may hide rows from the DELETE of delete_marker: let the role pass it (BYPASSRLS)"


_OLD = 3600
_FEW = 8


class PostgresDialect(Dialect[Connection, Target, CopyTransaction]):
    ADVICE = "; a name with capitals needs double quotes"
    CHECK = "host, port, database, user, password and pg_hba.conf"
    TWO_PHASE = "prepared"
    KEY = "gid"

    server: Server

    # ------------------------------------------------------------------ the target
    def locate(self, connection: Connection, table: str) -> tuple[str, str]:
        return catalog.locate(connection, table)

    def homes(self, connection: Connection, table: str) -> Sequence[str]:
        *schema, name = row(connection, "SELECT parse_ident(%s)", table)[0]
        return [] if schema else [home for (home,) in self.server.query(connection, HOMES, [name])]

    def describe(self, connection: Connection, schema: str, name: str) -> Target | None:
        with connection.bounded():
            return catalog.describe(connection, schema, name)

    def similar(self, connection: Connection, schema: str, name: str) -> list[str]:
        rows = connection.execute(
            "SELECT format('%%I.%%I', nspname, relname) FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace"
            " WHERE relkind IN ('r', 'p') AND lower(relname) = lower(%s) ORDER BY 1 LIMIT 5",
            [name],
        ).fetchall()
        return [table for (table,) in rows]

    def create(self, connection: Connection, schema: str, name: str, fields: Sequence[pa.Field]) -> None:
        columns = declarations(fields, lambda field: target_type(field.type))
        for field in fields:
            _require_whole_name(connection, field.name, f"{schema}.{name}")
        declared = [
            f"{self.server.quote(field.name)} {kind}{'' if field.nullable else ' NOT NULL'}" for field, kind in columns
        ]
        if self.merge.keys:
            declared.append(f"PRIMARY KEY ({self.quoted(self.merge.keys)})")
        try:
            self.server.create_table(connection, f"{self.server.quote(schema, name)} ({', '.join(declared)})")
        except psycopg.ProgrammingError as error:
            raise ConfigurationError(
                f"cannot create table {schema}.{name} at {self.server}: {describe(error)}"
            ) from error

    @property
    def ddl(self) -> PostgresDdl[Connection]:
        return PostgresDdl(self.server)

    def definition(self, connection: Connection, target: Target, field: pa.Field) -> str:
        _require_whole_name(connection, field.name, target.label)
        return f"{self.server.quote(field.name)} {target_type(field.type)}"

    def problems(self, connection: Connection, target: Target, ledger: str) -> Iterable[str]:
        keys = self.merge.keys
        if keys and not target.is_unique(keys):
            yield (
                f"upsert by ({', '.join(keys)}) needs a unique index on just these columns, neither partial nor "
                "deferrable"
            )
        if foreign := catalog.foreign_partitions(connection, target):
            yield f"its partition {foreign[0]} is a foreign table, whose rows do not belong to the transaction here"
        yield from self.unseen_rows(target)
        strategy, _ = self.choose(connection, target)
        if self.strategy == "prepared" and _limit(connection) == 0:
            yield (
                'strategy="prepared" needs max_prepared_transactions above the number of partitions, and the server '
                'has 0, which switches it off: set it (and restart the server), or use strategy="staged"'
            )
        if self.strategy == "prepared" and target.row_security:
            yield 'the table has row-level security, which COPY cannot obey: use strategy="staged"'
        if self.strategy == "prepared" and target.rules:
            yield f'the table has the rule {target.rules[0]}, which COPY passes over: use strategy="staged"'
        if row(connection, "SELECT pg_is_in_recovery()")[0]:
            yield "the server is a read-only standby"
        rights = self.rights(target, strategy)
        ledgers = [
            name
            for name in (ledger, witness_of(ledger))
            if row(connection, "SELECT to_regclass(%s) IS NOT NULL", self.server.quote(target.schema, name))[0]
        ]
        create = strategy == "staged" or len(ledgers) < 2
        statements = catalog.missing_rights(connection, target.schema, target.name, rights, create=create)
        for name in ledgers:
            ledger_rights = ("SELECT", "INSERT", "DELETE")
            statements += catalog.missing_rights(connection, target.schema, name, ledger_rights, create=False)
        for statement in dict.fromkeys(statements):
            yield f"a right is missing; an owner has to run: {statement}"

    def unseen_rows(self, target: Target) -> Iterable[str]:
        """Why an upsert or a delete may not find the row of its key."""
        if self.merge.delete_marker and target.row_security:
            yield HIDES_ROWS
        if self.merge.keys and target.heirs:
            yield (
                f"{target.heirs[0]} inherits from it, and no index of it binds rows there, so that an upsert may add a "
                "key once more: make it a partition, or write to a table that none inherits from"
            )

    def choose(self, connection: Connection, target: Target) -> tuple[str, str]:
        if self.merge.mode == "upsert":
            return "staged", "upserts need it"
        if self.strategy != "auto":
            return self.strategy, "as configured"
        if target.row_security:
            return "staged", "the table has row-level security"
        if target.rules:
            return "staged", f"the table has the rule {target.rules[0]}, which COPY passes over"
        limit = _limit(connection)
        if limit == 0:
            return "staged", "the server has max_prepared_transactions = 0"
        return "prepared", f"the server has max_prepared_transactions = {limit}"

    def findings(self, connection: Connection) -> Iterable[Finding]:
        return _findings(connection, self.strategy)

    def encoder(self, context: TransactionContext, columns: Sequence[Column], target: Target) -> CopyEncoder:
        """For rows that go into `columns`, those of the target now or of a staging table."""
        return CopyEncoder(context.schema, columns, target.label, rounding=self.merge.rounds)

    # ------------------------------------------------------------------ errors
    def fault(self, error: Exception) -> Fault | None:
        return fault(error)

    def unreachable(self, error: Exception) -> str | None:
        return self.server.redact(str(error)).strip() if isinstance(error, psycopg.OperationalError) else None

    # ------------------------------------------------------------------ two-phase transactions
    def begin(self, plan: Plan[Connection, Target], context: TransactionContext) -> CopyTransaction:
        """Begin to copy into the target itself, with the types that this transaction sees: COPY BINARY would take the
        bytes of one type for those of another."""
        target = plan.target
        transaction = CopyTransaction(self.server, context, target.label, {self.KEY: context.transaction_id})
        with transaction.begun():
            with transaction.explained():
                catalog.lock(transaction.connection, target)
                columns = catalog.current(transaction.connection, target).columns
            try:
                encoder = self.encoder(context, columns, target)
            except SchemaMismatch as mismatch:
                raise catalog.changed(mismatch, target.columns, columns) from None
            transaction.start(target.identifier, encoder)
        return transaction

    def end(
        self,
        connection: Connection,
        ledger: Ledger[Connection],
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
                f"the role of the sink may not finish its own transaction at {self.server}: {describe(error)}. Connect "
                "to the database as the role that prepared it (pg_prepared_xacts.owner), or as a superuser, and run: "
                f"{statement};"
            ) from error

    def prepared(self, connection: Connection, schema: str, job: str, sink: str) -> Iterable[Identity]:
        rows = connection.execute(
            "SELECT gid FROM pg_prepared_xacts WHERE database = current_database() AND starts_with(gid, %s)"
            " ORDER BY gid",
            [TransactionId.prefix(job)],
        ).fetchall()
        return [{self.KEY: gid} for (gid,) in rows if of_sink(gid, sink)]

    def evidence(self, transaction: CopyTransaction) -> dict[str, object]:
        (xid,) = row(transaction.connection, "SELECT txid_current()")
        return {"xid": xid} | ({"writers": "untold"} if transaction.under_savepoints else {})

    def writers(
        self, connection: Connection, target: Target, ledger: Ledger[Connection], keys: Sequence[str]
    ) -> Writers:
        """By the system column xmin, which rows share with the ledger's row of their transaction. It outlives VACUUM,
        and an UPDATE sets it anew."""
        rows = connection.execute(
            f"WITH known AS MATERIALIZED (SELECT transaction_id, xmin::text AS writer, age(xmin) FROM {ledger.table}"
            " WHERE committed), written AS (SELECT xmin::text AS writer, count(*) AS rows"
            f" FROM {self.server.quote(target.schema, target.name).replace('%', '%%')} WHERE age(xmin) <="
            " (SELECT max(age) FROM known WHERE transaction_id = ANY(%s)) GROUP BY 1)"
            " SELECT transaction_id, writer, coalesce(rows, 0) FROM known FULL JOIN written USING (writer)".encode(),
            [list(keys)],
        ).fetchall()
        of = {key: writer for key, writer, _ in rows if key is not None}
        counts = {writer: int(count) for key, writer, count in rows if key is not None}
        return Writers(of, counts, sum(int(count) for key, _, count in rows if key is None))

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
            "its row: somebody deleted it"
        )


def _require_whole_name(connection: Connection, column: str, table: str) -> None:
    (longest,) = row(connection, "SELECT current_setting('max_identifier_length')::int")
    if (length := len(column.encode())) > longest:
        raise SchemaMismatch(
            f'column "{column}" cannot be created in {table}: its name has {length} bytes, and '
            f"PostgreSQL cuts names after {longest}: rename it in Spark"
        )


def _limit(connection: Connection) -> int:
    """How many transactions the server lets be prepared at once."""
    return int(row(connection, "SELECT current_setting('max_prepared_transactions')")[0])


# ---------------------------------------------------------------------- what `coordinator doctor` says
def _findings(connection: Connection, wanted: str) -> Iterable[Finding]:
    version, level, limit, used = row(
        connection,
        "SELECT current_setting('server_version'), current_setting('synchronous_commit'),"
        " current_setting('max_prepared_transactions')::int, (SELECT count(*) FROM pg_prepared_xacts)::int",
    )
    yield Finding.ok(f"PostgreSQL {version}")
    if level == "off":
        yield Finding.ok("synchronous_commit is off; the sink sets it to local in its own transactions")
    yield from _prepared(limit, used, wanted)
    yield from _old(connection)
    yield from of_clock("the server", lambda: float(row(connection, "SELECT extract(epoch from clock_timestamp())")[0]))


def _prepared(limit: int, used: int, wanted: str) -> Iterable[Finding]:
    mend = f"ALTER SYSTEM SET max_prepared_transactions = {max(64, 2 * limit)}; then restart the server"
    if limit == 0:
        if wanted == "auto":
            yield Finding.ok("max_prepared_transactions is 0, so the sink uses the strategy staged")
    elif limit - used < _FEW and wanted != "staged":
        yield Finding.warning(
            f"{limit - used} of max_prepared_transactions = {limit} are free; each partition needs one", mend
        )
    else:
        yield Finding.ok(f"{limit - used} of max_prepared_transactions = {limit} are free")


def _old(connection: Connection) -> Iterable[Finding]:
    old = connection.execute(
        "SELECT gid, database, owner, extract(epoch from now() - prepared)::bigint FROM pg_prepared_xacts"
        " WHERE prepared < now() - make_interval(secs => %s) ORDER BY prepared LIMIT 5",
        [_OLD],
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
