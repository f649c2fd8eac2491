"""Strategy `staged`: COPY into a staging table of one's own and commit that; the driver moves a whole checkpoint.

The driver's one transaction writes the ledger rows, moves every staging table into the target and drops them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace

import psycopg
from psycopg import errors, sql

from sinks.errors import ConfigurationError, SchemaMismatch
from sinks.postgres import catalog
from sinks.postgres.catalog import Target
from sinks.postgres.copying import CopyTransaction
from sinks.postgres.dialect import PostgresDialect
from sinks.postgres.failures import describe, explained
from sinks.postgres.server import Connection, Server
from sinks.postgres.types import Column, target_type
from sinks.sql.dialect import Plan
from sinks.sql.names import staging_table
from sinks.sql.staging import StagedTypes, StagingTables, by_table, identity_of
from sinks.transaction import TransactionContext

# Staging tables dropped in one transaction. Each drop takes some five locks out of the server's shared table (64 x
# max_connections = 6,400 by default).
_DROPPED_TOGETHER = 100
_MOVED_TOGETHER = 100
_MENDS: dict[type[psycopg.Error], str] = {
    errors.UniqueViolation: "remove the row that has the same key, or drop the index",
    errors.ExclusionViolation: "remove the row that is in the way, or drop the constraint",
    errors.ForeignKeyViolation: "add the row that it points to, or drop the constraint",
    errors.CheckViolation: "drop the constraint (it can come back as NOT VALID when the rows are in)",
    errors.NotNullViolation: "let the column be NULL, or give it a default",
    errors.InsufficientPrivilege: "grant the right, or a policy that lets these rows pass",
}


class PostgresStaging(StagingTables[Connection, Target, CopyTransaction]):
    dialect: PostgresDialect
    server: Server

    MATCHING = "WHERE EXISTS (SELECT FROM {table} AS target WHERE {condition})"

    # ------------------------------------------------------------------ in the task
    def begin(self, plan: Plan[Connection, Target], context: TransactionContext) -> CopyTransaction:
        """The staging table has the types, NOT NULL and CHECKs of the target."""
        target, name = plan.target, staging_table(context.transaction_id)
        table = sql.Identifier(target.schema, name)
        identity = identity_of(target.schema, context.transaction_id)
        transaction = CopyTransaction(self.server, context, target.label, identity)
        with transaction.begun():
            with transaction.explained():
                target = catalog.current(transaction.connection, target)
            columns, declarations = self._staging_columns(target, context)
            try:
                encoder = self.dialect.encoder(context, columns, target)
            except SchemaMismatch as mismatch:
                raise catalog.changed(mismatch, plan.target.columns, target.columns) from None
            transaction.execute(f"CREATE TABLE {table.as_string()} ({', '.join(declarations)})")
            transaction.execute(sql.SQL("COMMENT ON TABLE {} IS {}").format(table, sql.Literal(context.transaction_id)))
            transaction.start(table, encoder, alias=name)
        return transaction

    def _staging_columns(self, target: Target, context: TransactionContext) -> tuple[list[Column], list[str]]:
        """Columns for the encoder, and the declarations of columns and constraints for CREATE TABLE."""
        quote, keys, marker = self.server.quote, self.merge.keys, self.merge.delete_marker
        written = self.merge.written(context.schema.names, target.names)
        columns = [column for column in target.columns if column.name in written]
        required = set(keys) | (set() if marker else {column.name for column in columns if not column.nullable})
        undomained = self._undomained(target, written)
        declared = {c.name: c.limits if c.name in undomained else target.declarations[c.name] for c in columns}
        checks = {check.name: check.expression for check in target.checks if set(check.columns) <= set(written)}
        checks |= {
            f"{column.name} is null": f"{quote(column.name)} IS NOT NULL"
            for column in columns
            if not column.nullable and column.name not in required
        }
        for field in context.schema:
            if field.name not in written:
                kind = declared[field.name] = target_type(field.type)
                columns.append(Column(field.name, kind, kind))
        lines = [f"{quote(name)} {kind}{' NOT NULL' if name in required else ''}" for name, kind in declared.items()]
        # a row that deletes needs nothing but its key
        spared = f"{quote(marker)} IS TRUE OR " if marker else ""
        return columns, lines + [f"CONSTRAINT {quote(name)} CHECK ({spared}({rule}))" for name, rule in checks.items()]

    def seal(self, transaction: CopyTransaction, moved: str | None = None) -> None:
        if moved:
            transaction.execute(f"DROP TABLE {moved}")
        transaction.seal("COMMIT")

    # ------------------------------------------------------------------ before the decision
    def locked(self, connection: Connection, plan: Plan[Connection, Target], staged: StagedTypes) -> Target:
        """What is new in the table may bind rows that the staging tables took, so it is a constraint beside those."""
        known = plan.target
        try:
            missing = self._missing_rights(connection, plan)
            if not missing:
                catalog.lock(connection, known)
        except (errors.UndefinedTable, errors.InvalidSchemaName) as error:
            raise ConfigurationError(
                f"table {known.label} is not there any more ({describe(error)}): rename or restore it"
            ) from None
        target = None if missing else catalog.describe(connection, known.schema, known.name)
        if target is None:
            raise ConfigurationError(
                f"table {known.label}: a right is missing; an owner has to run: {'; '.join(missing)}"
            )
        if reasons := list(self._changes(target, known, staged)):
            raise ConfigurationError(
                f"table {known.label} was changed after its rows were staged: {'; '.join(reasons)}"
            )
        if target == known:
            return target
        return replace(target, constraints=(*target.constraints, "what is new in the table"))

    def _missing_rights(self, connection: Connection, plan: Plan[Connection, Target]) -> list[str]:
        target, ledger = plan.target, plan.ledger
        rights = self.dialect.rights(target, "staged")
        missing = catalog.missing_rights(connection, target.schema, target.name, rights, create=False)
        needed = ("SELECT", "INSERT", "DELETE")
        for table in (ledger, ledger.witness):
            missing += catalog.missing_rights(connection, table.schema, table.name, needed, create=False)
        return missing

    def _changes(self, target: Target, known: Target, staged: StagedTypes) -> Iterable[str]:
        """What keeps the rows from going in as they are, and what to change back."""
        types = sorted({one for columns in staged.values() for one in columns.items()})
        written = self.merge.written([name for name, _ in types], known.names)
        table, quote = self.server.quote(known.schema, known.name), self.server.quote
        yield from target.unfit(
            written, types, lambda name, kind: f"ALTER TABLE {table} ALTER COLUMN {quote(name)} TYPE {kind}"
        )
        yield from self.dialect.unseen_rows(target)
        yield from target.no_index_for(self.merge.keys)

    def constraints(self, target: Target, written: Sequence[str]) -> list[str]:
        reasons = [f"check {check.name}" for check in target.checks if not set(check.columns) <= set(written)]
        reasons += [f'domain of column "{name}"' for name in self._undomained(target, written)]
        return super().constraints(target, written) + reasons

    def _undomained(self, target: Target, written: Sequence[str]) -> list[str]:
        """Columns that are staged without their domain: it may have a rule that binds no row that deletes."""
        if not self.merge.delete_marker:
            return []
        return [
            c.name
            for c in target.columns
            if c.domain and not c.element and c.name in written and c.name not in self.merge.keys
        ]

    def sample(self, connection: Connection, target: Target, staging: Sequence[str], written: Sequence[str]) -> None:
        """Rights of defaults and the like show with the first row only."""
        one = f"SELECT {self.dialect.quoted(written)} FROM {staging[0]}{self._kept(staging[0])} LIMIT 1"
        # judged already; and a deferrable index takes no ON CONFLICT
        conflict = " ON CONFLICT DO NOTHING" if all(unique.arbiter for unique in target.uniques) else ""
        self.server.execute(connection, f"{self._into(target, written)} {one}{conflict}")

    # ------------------------------------------------------------------ the move
    def one_at_a_time(self, connection: Connection, job: str, sink: str) -> None:
        connection.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", [f"tpc {job} {sink}"])

    def transfer(
        self, connection: Connection, target: Target, staging: Sequence[str], written: Sequence[str], rows: int
    ) -> None:
        """Deferred constraints judge the rows now."""
        super().transfer(connection, target, staging, written, rows)
        connection.execute("SET CONSTRAINTS ALL IMMEDIATE")

    def append(
        self, connection: Connection, target: Target, staging: Sequence[str], written: Sequence[str], rows: int
    ) -> None:
        moved, into = 0, self._into(target, written)
        for start in range(0, len(staging), _MOVED_TOGETHER):
            some = self.union(staging[start : start + _MOVED_TOGETHER], self.dialect.quoted(written))
            moved += self.server.execute(connection, f"{into} {some}")
        if moved != rows:  # by a trigger or rule of the target, or because somebody changed a staging table
            self.count(connection, staging, rows)

    def upsert(self, connection: Connection, target: Target, staging: Sequence[str], written: Sequence[str]) -> None:
        last, keys, marker = self._last(staging, written), self.merge.keys, self.merge.delete_marker
        names = self.dialect.quoted(written)
        quote, table = self.server.quote, self.server.quote(target.schema, target.name)
        if marker:
            same = self.equal("target", "last", keys)
            self.server.execute(
                connection,
                f"DELETE FROM {table} AS target USING ({last}) AS last"
                f" WHERE last.{quote(marker)} AND {same}{self.not_older()}",
            )
        changes = [column for column in written if column not in {*keys, *target.always_identity}]
        self._put_in_anew(connection, target, last, written, changes)
        changed = [quote(column) for column in changes]
        sets = ", ".join(f"{name} = excluded.{name}" for name in changed)
        action = f"UPDATE SET {sets} WHERE true{self.not_older('excluded')}" if changed else "NOTHING"
        self.server.execute(
            connection,
            f"{self._into(target, written)} SELECT {names} FROM ({last}) AS last{self._kept('last')}"
            f" ON CONFLICT ({self.dialect.quoted(keys)}) DO {action}",
        )

    def _put_in_anew(
        self, connection: Connection, target: Target, last: str, written: Sequence[str], changes: Sequence[str]
    ) -> None:
        """Rows that give up a value which another one takes, with what the batch has not as it was."""
        giving, quote = self.giving(target, written, last), self.server.quote
        table = quote(target.schema, target.name)
        if giving is None or not self.server.query(
            connection, f"SELECT 1 FROM {table} AS target, ({last}) AS last WHERE {giving} LIMIT 1"
        ):
            return
        own = [column.name for column in target.columns if not column.generated]
        values = ", ".join(f"{'last' if column in changes else 'given'}.{quote(column)}" for column in own)
        # counted first: no row goes in before all are out
        self.server.execute(
            connection,
            f"WITH given AS (DELETE FROM {table} AS target USING ({last}) AS last WHERE {giving} RETURNING target.*)"
            f" {self._into(target, own)} SELECT {values} FROM given JOIN ({last}) AS last"
            f" ON {self.equal('given', 'last', self.merge.keys)} WHERE (SELECT count(*) FROM given) > 0",
        )

    def _into(self, target: Target, written: Sequence[str]) -> str:
        table = self.server.quote(target.schema, target.name)
        return f"INSERT INTO {table} AS target ({self.dialect.quoted(written)}){target.overriding(written)}"

    def _kept(self, table: str) -> str:
        """The condition for rows that are no deletes. Without a WHERE the parser takes ON CONFLICT for a join's."""
        marker = self.merge.delete_marker
        return f" WHERE {table}.{self.server.quote(marker)} IS NOT TRUE" if marker else " WHERE true"

    def _last(self, staging: Sequence[str], written: Sequence[str]) -> str:
        """The last change of each key, over all participants."""
        columns, order = self.changes(written)
        names, keys = self.dialect.quoted(columns), self.dialect.quoted(self.merge.keys)
        union = self.union(staging, names)
        if not self.merge.order_by:  # validated: every key is there once
            return union
        ranks = ", ".join(f"{self.server.quote(column)} DESC NULLS LAST" for column in order)
        return f"SELECT DISTINCT ON ({keys}) {names} FROM ({union}) AS staged ORDER BY {keys}, {ranks}"

    def explained(self, target: Target, where: str, tables: Sequence[str]) -> AbstractContextManager[None]:
        return explained(target.label, where, dict.fromkeys(tables, target.label))

    def refusal(self, error: Exception, target: Target, tables: Sequence[str]) -> str | None:
        ask_again = psycopg.OperationalError | errors.IdleInTransactionSessionTimeout  # connection, lock, full disk
        if not isinstance(error, psycopg.Error) or isinstance(error, ask_again):
            return None
        constraint = f' (constraint "{error.diag.constraint_name}")' if error.diag.constraint_name else ""
        mend = next((f"; {mend}" for kind, mend in _MENDS.items() if isinstance(error, kind)), "")
        if isinstance(error, errors.CheckViolation) and not constraint:
            mend = "; attach a partition that takes it"
        return f"{constraint}: {describe(error, dict.fromkeys(tables, target.label))}{mend}"

    # ------------------------------------------------------------------ staging tables
    def mark_moved(self, connection: Connection, schema: str, names: Sequence[str]) -> None:
        self.drop_unused(connection, schema, names[:_DROPPED_TOGETHER])
        for name in sorted(self.existing(connection, schema, names)):
            # a DELETE may be refused, in a publication of all tables, since they have no key
            again = sql.SQL("INSERT INTO {0} SELECT * FROM {0} LIMIT 1").format(sql.Identifier(schema, name))
            connection.execute(again)

    def drop(self, connection: Connection, schema: str, names: Sequence[str]) -> None:
        for start in range(0, len(names), _DROPPED_TOGETHER):
            tables = ", ".join(self.server.quote(schema, name) for name in names[start : start + _DROPPED_TOGETHER])
            with self.server.transaction(connection):
                self.server.execute(connection, f"DROP TABLE {tables}")

    def drop_unused(self, connection: Connection, schema: str, names: Sequence[str]) -> None:
        for start in range(0, len(names), _DROPPED_TOGETHER):
            with suppress(errors.LockNotAvailable):  # pg_dump may be reading one
                self.drop(connection, schema, names[start : start + _DROPPED_TOGETHER])

    def existing(self, connection: Connection, schema: str, names: Sequence[str]) -> set[str]:
        rows = connection.execute(
            "SELECT relname::text FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace"
            " WHERE nspname = %s AND relkind = 'r' AND relname = ANY(%s)",
            [schema, list(names)],
        ).fetchall()
        return {name for (name,) in rows}

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
