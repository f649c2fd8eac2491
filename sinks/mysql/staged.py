"""Strategy `staged`: rows go into a staging table of one's own, and COMMIT; the driver moves a whole checkpoint.

The driver's one transaction writes the ledger rows and moves every staging table into the target, so the checkpoint
becomes visible as a whole. DROP TABLE would commit it, so the staging tables are dropped after it: the ledger tells
that those that are still there were moved. In between nothing is locked and no transaction is open.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import pymysql

from sinks.errors import BadValue, CommittedError, SinkError
from sinks.mysql.catalog import Target, extra_column
from sinks.mysql.encode import RowEncoder
from sinks.mysql.failures import Writing, describe, refuses
from sinks.mysql.ledger import Ledger
from sinks.mysql.loading import RowTransaction
from sinks.mysql.merge import Merge
from sinks.mysql.server import Connection, Server, execute, literal, query, quoted
from sinks.mysql.types import Column
from sinks.sql.names import of_sink, staging_table
from sinks.transaction import (
    Checkpoint,
    CommitOutcome,
    Committable,
    Identity,
    TransactionContext,
    TransactionId,
)

logger = logging.getLogger(__name__)

_DROPPED_TOGETHER = 100
_ROW = "tpc row"
"""The primary key of a staging table: many servers take no table without one."""


def identity_of(schema: str, transaction_id: str) -> Identity:
    return {"transaction_id": transaction_id, "table": f"{schema}.{staging_table(transaction_id)}"}


# ---------------------------------------------------------------------- in the task
def begin(
    server: Server, target: Target, merge: Merge, encoder: type[RowEncoder], context: TransactionContext
) -> RowTransaction:
    """Create the staging table, which nothing can undo but DROP TABLE, and begin the transaction that fills it. Its
    types are those of the target."""
    columns = staging_columns(target, merge, context)
    encode = encoder(context.schema, columns, target.label)
    name = staging_table(context.transaction_id)
    table = quoted(target.schema, name)
    identity = identity_of(target.schema, context.transaction_id)
    transaction = RowTransaction(server, context, target.label, identity, ["ROLLBACK", f"DROP TABLE IF EXISTS {table}"])
    try:
        transaction.execute(
            f"CREATE TABLE {table} ({', '.join(_declarations(columns, target, merge))}) ENGINE=InnoDB"
            f" COMMENT={literal(context.transaction_id)}"
        )
        transaction.execute("START TRANSACTION READ WRITE")
        transaction.start(table, encode, alias=name)
    except BaseException:
        transaction.close()
        raise
    return transaction


def staging_columns(target: Target, merge: Merge, context: TransactionContext) -> list[Column]:
    """The target's columns that are written, and those of the batch that only the merge looks at."""
    written = merge.written(context.schema.names, target.names)
    columns = []
    for column in target.columns:
        if column.name in written:
            required = column.name in merge.keys or (not column.nullable and not merge.delete_marker)
            columns.append(replace(column, nullable=not required))
    for field in context.schema:
        if field.name not in written:
            columns.append(extra_column(field.name, field.type))
    return columns


def _declarations(columns: Sequence[Column], target: Target, merge: Merge) -> list[str]:
    """Columns and constraints for CREATE TABLE. NULLs are refused before they get here, except in those columns that a
    row that deletes may leave empty."""
    declared = [f"{quoted(_ROW)} bigint unsigned NOT NULL AUTO_INCREMENT PRIMARY KEY"]
    for column in columns:
        charset = f" CHARACTER SET {column.charset} COLLATE {column.collation}" if column.collation else ""
        json = f" CHECK (json_valid({quoted(column.name)}))" if column.type == "json" and column.collation else ""
        declared.append(f"{quoted(column.name)} {column.declared}{charset} NULL{json}")
    if merge.delete_marker:
        required = {column.name for column in target.columns if not column.nullable}
        for column in columns:
            if column.name in required and column.nullable:
                rule = f"{quoted(merge.delete_marker)} IS TRUE OR {quoted(column.name)} IS NOT NULL"
                declared.append(f"CONSTRAINT {quoted(f'{column.name} is NULL'[:64])} CHECK ({rule})")
    return declared


def pre_commit(transaction: RowTransaction, ledger: Ledger) -> Committable:
    transaction.finish()
    transaction.seal("COMMIT")
    return Committable(transaction.identity, proof=ledger.proof())


def commit_directly(transaction: RowTransaction, target: Target, merge: Merge) -> None:
    """At-least-once: move the rows in the transaction that staged them."""
    rows = transaction.finish()
    table = quoted(target.schema, staging_table(transaction.context.transaction_id))
    written = merge.written(transaction.context.schema.names, target.names)
    with transaction.explained():
        if merge.mode == "upsert":
            merge.clashes(transaction.connection, target, [table], written)
        merge.move(transaction.connection, target, [table], written, rows)
    transaction.execute("COMMIT")
    transaction.seal(f"DROP TABLE {table}")


# ---------------------------------------------------------------------- on the driver
def validate_all(
    server: Server, target: Target, merge: Merge, checkpoint: Checkpoint, committables: Sequence[Committable]
) -> None:
    """Raise BadValue for what the target would refuse and no staging table could see. Costs nothing for an append to a
    table without constraints, and for an upsert with `order_by` to a table with none but its key."""
    if merge.mode == "append" and not (target.uniques or target.beyond):
        return
    with server.lend() as connection:
        where = f"checkpoint {checkpoint.checkpoint_id}"
        tables = _existing(connection, target.schema, [c.transaction["transaction_id"] for c in committables])
        if not tables:
            return
        staging, written = _staged(connection, target, merge, list(tables.values()))
        with Writing(target.label, where, dict.fromkeys(tables.values(), target.name)).explained():
            merge.clashes(connection, target, staging, written)
            if merge.beyond(target, written):
                rows = sum(c.fingerprint.rows for c in committables)
                with server.trial(connection):
                    merge.move(connection, target, staging, written, rows)


def commit_all(
    server: Server, target: Target, ledger: Ledger, merge: Merge, committables: Sequence[Committable]
) -> list[CommitOutcome]:
    """Settle the participants of one checkpoint together: all become visible, or none does."""
    by_id: dict[str, Committable] = {c.transaction["transaction_id"]: c for c in committables}
    with server.lend() as connection:
        try:
            with server.transaction(connection):
                outcomes = _settle(connection, target, ledger, merge, by_id)
        except _Refused as refused:
            return [CommitOutcome.unknown(str(refused))] * len(committables)
        committed = [text for text, outcome in outcomes.items() if outcome == CommitOutcome.COMMITTED]
        drop_committed(connection, server, target.schema, committed)
    return [outcomes[c.transaction["transaction_id"]] for c in committables]


class _Refused(Exception):
    """The target refuses the rows of a complete checkpoint: asking again cannot help, an operator can."""


class _SettledByOthers(Exception):
    """Somebody else settled a participant at the same time: ask again."""


def _settle(
    connection: Connection, target: Target, ledger: Ledger, merge: Merge, by_id: dict[str, Committable]
) -> dict[str, CommitOutcome]:
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
    if missing and not ledger.insert(connection, missing, committed=False):
        raise _SettledByOthers(f"somebody else settled one of {missing} at the same time")
    states |= dict.fromkeys(missing, False)

    if tables and not outcomes and all(states.values()):
        if not ledger.insert(connection, tables, committed=True):
            raise _SettledByOthers(f"somebody else settled one of {list(tables)} at the same time")
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
    except pymysql.Error as error:
        if not refuses(error):
            raise  # the connection, a lock, a full disk: ask again
        said = Writing(target.label, "", dict.fromkeys(tables, target.name)).said(describe(error))
        raise _Refused(f"table {target.label} refuses rows: {said}; {choices}") from error
    except (SinkError, BadValue) as error:
        raise _Refused(f"table {target.label}: {error}; {choices}") from error


def abort(server: Server, schema: str, ledger: Ledger, transaction_id: str) -> None:
    """Make the loss final with a tombstone, and drop the staging table."""
    with server.lend() as connection:
        with server.transaction(connection):
            new = ledger.insert(connection, [transaction_id], committed=False)
        if not new and ledger.states(connection, [transaction_id]).get(transaction_id):
            raise CommittedError(f"{transaction_id} is committed: the ledger {ledger.schema}.{ledger.name} has its row")
        _drop(connection, schema, list(_existing(connection, schema, [transaction_id]).values()))


def in_doubt(connection: Connection, schema: str, job: str, sink: str) -> list[str]:
    """The transaction ids of all staging tables of the job and sink, by their comments; whether they were moved, and
    only wait to be dropped, is for the ledger to tell. A task that died before its pre-commit leaves one too."""
    rows = query(
        connection,
        "SELECT table_comment FROM information_schema.tables WHERE table_schema = %s"
        " AND table_name REGEXP '^tpc_[0-9a-f]{20}$' AND LEFT(table_comment, %s) = %s ORDER BY 1",
        [schema, len(TransactionId.prefix(job)), TransactionId.prefix(job)],
    )
    return [text for (text,) in rows if text.startswith(TransactionId.prefix(job)) and of_sink(text, sink)]


def _existing(connection: Connection, schema: str, ids: Sequence[str]) -> dict[str, str]:
    """The staging tables that are there: transaction id -> table name, in the order of `ids`."""
    names = {staging_table(text): text for text in ids}
    if not names:
        return {}
    marks = ", ".join(["%s"] * len(names))
    rows = query(
        connection,
        f"SELECT table_name FROM information_schema.tables WHERE table_schema = %s AND table_name IN ({marks})",
        [schema, *names],
    )
    found = {row[0] for row in rows}
    return {text: name for name, text in names.items() if name in found}


def _staged(connection: Connection, target: Target, merge: Merge, tables: Sequence[str]) -> tuple[list[str], list[str]]:
    """Staging tables, quoted, and the columns that they have for the target."""
    columns = query(
        connection,
        "SELECT column_name FROM information_schema.columns WHERE table_schema = %s AND table_name = %s"
        " ORDER BY ordinal_position",
        [target.schema, tables[0]],
    )
    staging = [quoted(target.schema, name) for name in tables]
    return staging, merge.written([row[0] for row in columns if row[0] in target.names], target.names)


def drop_committed(connection: Connection, server: Server, schema: str, ids: Sequence[str]) -> None:
    """Drop those staging tables of committed transactions that are still there. What somebody reads now is dropped by
    the next sweep: that it was moved stands in the ledger."""
    tables = list(_existing(connection, schema, ids).values())
    try:
        with server.impatient(connection):
            _drop(connection, schema, tables)
    except pymysql.Error as error:
        logger.warning("staging tables in %s were moved and could not be dropped yet: %s", schema, describe(error))


def _drop(connection: Connection, schema: str, tables: Sequence[str]) -> None:
    for start in range(0, len(tables), _DROPPED_TOGETHER):
        names = ", ".join(quoted(schema, name) for name in tables[start : start + _DROPPED_TOGETHER])
        execute(connection, f"DROP TABLE IF EXISTS {names}")
