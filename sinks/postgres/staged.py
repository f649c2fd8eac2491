"""Strategy `staged`: COPY into a staging table of one's own and commit that; the driver moves a whole checkpoint.

The driver's one transaction writes the ledger rows, moves every staging table into the target and drops them, so the
checkpoint becomes visible as a whole. In between nothing is locked and no transaction is open.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import psycopg
from psycopg import errors, sql

from sinks.errors import BadValue, CommittedError, SinkError
from sinks.postgres.catalog import Target, extra_column
from sinks.postgres.copying import CopyTransaction
from sinks.postgres.encode import CopyEncoder
from sinks.postgres.failures import describe, explained
from sinks.postgres.ledger import Ledger
from sinks.postgres.merge import Merge
from sinks.postgres.server import Connection, Server
from sinks.postgres.types import Column, target_type
from sinks.sql.names import of_sink, staging_table
from sinks.transaction import (
    Checkpoint,
    CommitOutcome,
    Committable,
    Identity,
    TransactionContext,
    TransactionId,
)

# Staging tables dropped in the transaction that moves them. Each drop takes some five locks out of the server's shared
# table (64 x max_connections = 6,400 by default), so the rest is dropped in transactions of its own.
_DROPPED_TOGETHER = 100


def identity_of(schema: str, transaction_id: str) -> Identity:
    return {"transaction_id": transaction_id, "table": f"{schema}.{staging_table(transaction_id)}"}


# ---------------------------------------------------------------------- in the task
def begin(server: Server, target: Target, merge: Merge, context: TransactionContext) -> CopyTransaction:
    """Create the staging table and begin to copy into it. Its types, NOT NULL and CHECKs are those of the target."""
    columns, declarations = _staging_columns(target, merge, context)
    encoder = CopyEncoder(context.schema, columns, target.label)
    name = staging_table(context.transaction_id)
    table = sql.Identifier(target.schema, name)
    transaction = CopyTransaction(server, context, target.label, identity_of(target.schema, context.transaction_id))
    try:
        transaction.execute(sql.SQL("CREATE TABLE {} ({})").format(table, sql.SQL(", ").join(declarations)))
        transaction.execute(sql.SQL("COMMENT ON TABLE {} IS {}").format(table, sql.Literal(context.transaction_id)))
        transaction.start(table, encoder, alias=name)
    except BaseException:
        transaction.close()
        raise
    return transaction


def _staging_columns(
    target: Target, merge: Merge, context: TransactionContext
) -> tuple[list[Column], list[sql.Composed]]:
    """Columns for the encoder, and the declarations of columns and constraints for CREATE TABLE."""
    written = merge.written(context.schema.names, target.names)
    columns = [column for column in target.columns if column.name in written]
    declared = []
    required = set(merge.keys)
    if not merge.delete_marker:
        required |= {column.name for column in columns if not column.nullable}
    for column in columns:
        declared.append(_declaration(column.name, target.declarations[column.name], required))
    for field in context.schema:
        if field.name not in written:
            kind = target_type(field.type)
            columns.append(extra_column(field.name, kind))
            declared.append(_declaration(field.name, kind, required))
    checks = {check.name: check.expression for check in target.checks if set(check.columns) <= set(written)}
    for column in target.columns:
        if column.name in written and not column.nullable and column.name not in required:
            checks[f"{column.name} is null"] = sql.SQL("{} IS NOT NULL").format(sql.Identifier(column.name)).as_string()
    for name, expression in checks.items():
        if merge.delete_marker:  # a row that deletes needs nothing but its key
            expression = f"{sql.Identifier(merge.delete_marker).as_string()} IS TRUE OR ({expression})"
        declared.append(sql.SQL("CONSTRAINT {} CHECK ({})").format(sql.Identifier(name), sql.SQL(expression)))
    return columns, declared


def _declaration(name: str, kind: str, required: set[str]) -> sql.Composed:
    return sql.SQL("{} {}{}").format(
        sql.Identifier(name), sql.SQL(kind), sql.SQL(" NOT NULL" if name in required else "")
    )


def pre_commit(transaction: CopyTransaction, ledger: Ledger) -> Committable:
    transaction.finish()
    transaction.seal("COMMIT")
    return Committable(transaction.identity, proof=ledger.proof())


def commit_directly(transaction: CopyTransaction, target: Target, merge: Merge) -> None:
    """At-least-once: move the rows in the transaction that staged them."""
    rows = transaction.finish()
    table = sql.Identifier(target.schema, staging_table(transaction.context.transaction_id))
    written = merge.written(transaction.context.schema.names, target.names)
    with transaction.explained():
        if merge.mode == "upsert":
            merge.clashes(transaction.connection, target, [table], written)
        merge.move(transaction.connection, target, [table], written, rows)
    transaction.execute(sql.SQL("DROP TABLE {}").format(table))
    transaction.seal("COMMIT")


# ---------------------------------------------------------------------- on the driver
def validate_all(
    server: Server, target: Target, merge: Merge, checkpoint: Checkpoint, committables: Sequence[Committable]
) -> None:
    """Raise BadValue for what the target would refuse and no staging table could see. Costs nothing for an append to a
    table without constraints, and for an upsert with `order_by` to a table with none but its key."""
    if merge.mode == "append" and not (target.uniques or target.beyond or target.checks):
        return
    with server.lend() as connection:
        where = f"checkpoint {checkpoint.checkpoint_id}"
        tables = _existing(connection, target.schema, [c.transaction["transaction_id"] for c in committables])
        if not tables:
            return
        staging, written = _staged(connection, target, merge, list(tables.values()))
        aliases = dict.fromkeys(tables.values(), target.label)
        with explained(target.label, where, aliases), server.transaction(connection):
            merge.clashes(connection, target, staging, written)
            if merge.beyond(target, written):
                rows = sum(c.fingerprint.rows for c in committables)
                merge.move(connection, target, staging, written, rows)
            raise psycopg.Rollback


def commit_all(
    server: Server,
    target: Target,
    ledger: Ledger,
    merge: Merge,
    committables: Sequence[Committable],
) -> list[CommitOutcome]:
    """Settle the participants of one checkpoint together: all become visible, or none does."""
    by_id: dict[str, Committable] = {c.transaction["transaction_id"]: c for c in committables}
    with server.lend() as connection:
        try:
            with server.transaction(connection):
                outcomes = _settle(connection, target, ledger, merge, by_id)
        except _Refused as refused:
            unknown = CommitOutcome.unknown(str(refused))
            return [unknown] * len(committables)
        drop_committed(
            connection, server, target.schema, [i for i, o in outcomes.items() if o == CommitOutcome.COMMITTED]
        )
    return [outcomes[c.transaction["transaction_id"]] for c in committables]


class _Refused(Exception):
    """The target refuses the rows of a complete checkpoint: asking again cannot help, an operator can."""


def _settle(
    connection: Connection, target: Target, ledger: Ledger, merge: Merge, by_id: dict[str, Committable]
) -> dict[str, CommitOutcome]:
    one = TransactionId.parse(next(iter(by_id)))
    connection.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", [f"tpc {one.job} {one.sink}"])
    states = ledger.states(connection, list(by_id))
    open_ids = [text for text in by_id if text not in states]
    tables = _existing(connection, target.schema, open_ids)
    outcomes: dict[str, CommitOutcome] = {}

    missing = [text for text in open_ids if text not in tables]
    for text in list(missing):
        if reason := ledger.foreign(connection, by_id[text].proof):
            outcomes[text] = CommitOutcome.unknown(
                f"the staging table of {text} is gone, and nobody can tell whether it was moved: {reason}"
            )
            missing.remove(text)
    if missing and ledger.insert(connection, missing, committed=False) != set(missing):
        raise errors.SerializationFailure("somebody else settled a participant at the same time: ask again")
    states |= dict.fromkeys(missing, False)

    if tables and not outcomes and all(states.values()):
        if ledger.insert(connection, tables, committed=True) != set(tables):
            raise errors.SerializationFailure("somebody else settled a participant at the same time: ask again")
        _move(connection, target, merge, [by_id[text] for text in tables], list(tables.values()))
        states |= dict.fromkeys(tables, True)

    for text in by_id:
        if text not in outcomes:
            outcomes[text] = _outcome(text, states.get(text), ledger)
    return outcomes


def _outcome(text: str, committed: bool | None, ledger: Ledger) -> CommitOutcome:
    if committed is None:
        return CommitOutcome.HELD
    if committed:
        return CommitOutcome.COMMITTED
    return CommitOutcome.lost(
        f"the staging table {staging_table(text)} of {text} is gone, and the ledger {ledger.schema}.{ledger.name} has "
        "a tombstone in place of its row"
    )


def _move(
    connection: Connection, target: Target, merge: Merge, committables: Sequence[Committable], tables: Sequence[str]
) -> None:
    rows = sum(committable.fingerprint.rows for committable in committables)
    choices = (
        "the checkpoint is complete, so nothing is lost: it stays in its staging tables until what stands in the way "
        "is removed and the query is started again"
    )
    try:
        staging, written = _staged(connection, target, merge, tables)
        merge.move(connection, target, staging, written, rows)
        with suppress(errors.LockNotAvailable), connection.transaction():  # pg_dump may be reading one
            _drop(connection, target.schema, tables[:_DROPPED_TOGETHER])
    except (psycopg.OperationalError, errors.IdleInTransactionSessionTimeout):
        raise  # the connection, a lock, a full disk: ask again
    except psycopg.Error as error:
        aliases = dict.fromkeys(tables, target.label)
        constraint = f' (constraint "{error.diag.constraint_name}")' if error.diag.constraint_name else ""
        raise _Refused(
            f"table {target.label} refuses rows{constraint}: {describe(error, aliases)}; {choices}"
        ) from error
    except (SinkError, BadValue) as error:
        raise _Refused(f"table {target.label}: {error}; {choices}") from error


def abort(server: Server, schema: str, ledger: Ledger, transaction_id: str) -> None:
    """Make the loss final with a tombstone, and drop the staging table."""
    with server.lend() as connection, server.transaction(connection):
        if not ledger.insert(connection, [transaction_id], committed=False) and ledger.states(
            connection, [transaction_id]
        ).get(transaction_id):
            raise CommittedError(f"{transaction_id} is committed: the ledger {ledger.schema}.{ledger.name} has its row")
        _drop(connection, schema, list(_existing(connection, schema, [transaction_id]).values()))


def in_doubt(connection: Connection, schema: str, job: str, sink: str) -> list[str]:
    """The transaction ids of all staging tables of the job and sink, by their comments; whether they were moved, and
    only wait to be dropped, is for the ledger to tell."""
    rows = connection.execute(
        "SELECT obj_description(c.oid, 'pg_class') FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace"
        " WHERE nspname = %s AND relkind = 'r' AND relname LIKE 'tpc\\_%%'"
        " AND starts_with(obj_description(c.oid, 'pg_class'), %s) ORDER BY 1",
        [schema, TransactionId.prefix(job)],
    ).fetchall()
    return [text for (text,) in rows if of_sink(text, sink)]


def _existing(connection: Connection, schema: str, ids: Sequence[str]) -> dict[str, str]:
    """The staging tables that are there: transaction id -> table name, in the order of `ids`."""
    names = {staging_table(text): text for text in ids}
    rows = connection.execute(
        "SELECT relname::text FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace"
        " WHERE nspname = %s AND relkind = 'r' AND relname = ANY(%s)",
        [schema, list(names)],
    ).fetchall()
    found = {row[0] for row in rows}
    return {text: name for name, text in names.items() if name in found}


def _staged(
    connection: Connection, target: Target, merge: Merge, tables: Sequence[str]
) -> tuple[list[sql.Identifier], list[str]]:
    """Staging tables, and the columns that they have for the target."""
    staging = [sql.Identifier(target.schema, name) for name in tables]
    columns = connection.execute(
        "SELECT attname::text FROM pg_attribute WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped"
        " ORDER BY attnum",
        [staging[0].as_string(connection)],
    ).fetchall()
    return staging, merge.written([row[0] for row in columns], target.names)


def _drop(connection: Connection, schema: str, tables: Sequence[str]) -> None:
    if tables:
        names = sql.SQL(", ").join(sql.Identifier(schema, name) for name in tables)
        connection.execute(sql.SQL("DROP TABLE {}").format(names))


def drop_committed(connection: Connection, server: Server, schema: str, ids: Sequence[str]) -> None:
    """Drop the staging tables that were moved and are still there."""
    tables = list(_existing(connection, schema, ids).values())
    for start in range(0, len(tables), _DROPPED_TOGETHER):
        with suppress(errors.LockNotAvailable), server.transaction(connection):
            _drop(connection, schema, tables[start : start + _DROPPED_TOGETHER])
