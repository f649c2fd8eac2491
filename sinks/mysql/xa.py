"""Strategy `xa`: rows go into the target in an XA branch, which XA PREPARE makes durable; the driver runs XA COMMIT."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterable
from typing import Any

import pymysql

from sinks.errors import CommittedError, SinkError
from sinks.mysql.catalog import Target
from sinks.mysql.encode import RowEncoder
from sinks.mysql.failures import XA_UNKNOWN, code_of
from sinks.mysql.ledger import Ledger
from sinks.mysql.loading import RowTransaction
from sinks.mysql.server import Connection, Server, execute, is_mariadb, query
from sinks.sql.names import of_sink
from sinks.transaction import CommitOutcome, Committable, Identity, TransactionContext, TransactionId

_LIMIT = 64
"""Bytes that gtrid and bqual may have each."""
_PATIENCE = 2.0
"""Seconds that the session of a prepared branch may take to end."""
_NO_RIGHT = (1227, 1401)  # MySQL without XA_RECOVER_ADMIN


def identity_of(transaction_id: str) -> Identity:
    """The name of the branch: the parts of a transaction's name up to the checkpoint, and those from the sink on.
    Raises SinkError if one is too long, for which a checkpoint must have 20 digits."""
    parts = transaction_id.split(".")
    identity = {"gtrid": ".".join(parts[:4]), "bqual": ".".join(parts[4:])}
    if any(len(part) > _LIMIT for part in identity.values()):
        raise SinkError(f"{transaction_id} is too long for the name of an XA branch: use strategy='staged'")
    return identity


def name_of(identity: Identity) -> str:
    return f"{identity['gtrid']}.{identity['bqual']}"


def format_of(schema: str) -> int:
    """The formatID of our branches: it tells those of one database from those of another, since XA RECOVER lists all
    that the server has."""
    return zlib.crc32(f"tpc {schema}".encode()) & 0x7FFFFFFF


def xid(identity: Identity, schema: str) -> str:
    return f"'{identity['gtrid']}', '{identity['bqual']}', {format_of(schema)}"


# ---------------------------------------------------------------------- in the task
def begin(server: Server, target: Target, encoder: type[RowEncoder], context: TransactionContext) -> RowTransaction:
    """Open the participant's branch; rows go into the target itself."""
    encode = encoder(context.schema, target.columns, target.label)
    identity = identity_of(context.transaction_id)
    name = xid(identity, target.schema)
    transaction = RowTransaction(server, context, target.label, identity, [f"XA END {name}", f"XA ROLLBACK {name}"])
    try:
        transaction.execute(f"XA START {name}")
        transaction.start(target.identifier, encode)
    except BaseException:
        transaction.close()
        raise
    return transaction


def pre_commit(transaction: RowTransaction, ledger: Ledger) -> Committable:
    """The ledger row goes into the same branch: it becomes visible if and only if the rows do."""
    transaction.finish()
    with transaction.explained():
        if not ledger.insert(transaction.connection, [transaction.context.transaction_id], committed=True):
            raise SinkError(f"{transaction.context.transaction_id} was aborted, or used, before it was pre-committed")
    name = xid(transaction.identity, ledger.schema)
    # MariaDB keeps a prepared branch to the session that has it: one whose host disappears must not live for hours
    transaction.execute("SET SESSION wait_timeout = 30")
    transaction.execute(f"XA END {name}")
    transaction.seal(f"XA PREPARE {name}")
    return Committable(transaction.identity, proof=ledger.proof())


def commit_directly(transaction: RowTransaction, target: Target) -> None:
    transaction.finish()
    name = xid(transaction.identity, target.schema)
    transaction.execute(f"XA END {name}")
    transaction.seal(f"XA COMMIT {name} ONE PHASE")


# ---------------------------------------------------------------------- on the driver
def commit(server: Server, ledger: Ledger, committable: Committable) -> CommitOutcome:
    with server.lend() as connection:
        if _end(connection, "COMMIT", committable.transaction, ledger.schema):
            return CommitOutcome.COMMITTED
        return _outcome_of_gone(server, connection, ledger, committable)


def _outcome_of_gone(server: Server, connection: Connection, ledger: Ledger, committable: Committable) -> CommitOutcome:
    """No prepared branch: committed, rolled back by somebody, or not prepared yet. The ledger tells, see there."""
    name = name_of(committable.transaction)
    committed = ledger.states(connection, [name]).get(name)
    if committed is None:
        if reason := ledger.foreign(connection, committable.proof):
            return CommitOutcome.unknown(
                f"{name} is no longer prepared at {server}, and nobody can tell what became of it: {reason}. Look for "
                "its rows in the table, then point the sink at the old ledger, or insert its row into the new one"
            )
        with server.transaction(connection):
            ledger.insert(connection, [name], committed=False)
        committed = ledger.states(connection, [name])[name]
    if committed:
        return CommitOutcome.COMMITTED
    return CommitOutcome.lost(
        f"{name} was rolled back by somebody else: it is not prepared any more, and the ledger "
        f"{ledger.schema}.{ledger.name} has a tombstone in place of its row"
    )


def abort(server: Server, ledger: Ledger, identity: Identity) -> None:
    name = name_of(identity)
    with server.lend() as connection:
        if _end(connection, "ROLLBACK", identity, ledger.schema):
            return
        if ledger.states(connection, [name]).get(name):
            raise CommittedError(f"{name} is committed: the ledger {ledger.schema}.{ledger.name} has its row")


def _end(connection: Connection, how: str, identity: Identity, schema: str) -> bool:
    """COMMIT or ROLLBACK a branch; False if there is no prepared one. MariaDB knows only its own session of it until
    that has ended, a moment after its connection was closed: raises OperationalError if it does not."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            execute(connection, f"XA {how} {xid(identity, schema)}")
            return True
        except pymysql.Error as error:
            if code_of(error) != XA_UNKNOWN:
                raise
        if dict(identity) not in _listed(connection, schema):
            return False
        if time.monotonic() > deadline:
            raise pymysql.OperationalError(
                XA_UNKNOWN, f"{name_of(identity)} is prepared, and the session that did it has not let go of it yet"
            )
        time.sleep(0.01)


def in_doubt(connection: Connection, schema: str, job: str, sink: str) -> Iterable[Identity]:
    prefix = TransactionId.prefix(job)
    return [
        identity
        for identity in _listed(connection, schema)
        if name_of(identity).startswith(prefix) and of_sink(name_of(identity), sink)
    ]


def _listed(connection: Connection, schema: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for form, length, _, data in _recover(connection) or []:
        if form == format_of(schema):
            text = data.decode("ascii", "replace")
            found.append({"gtrid": text[:length], "bqual": text[length:]})
    return sorted(found, key=name_of)


def may_recover(connection: Connection) -> bool:
    """Whether this user may list prepared branches. Who may not has never prepared one here."""
    return _recover(connection) is not None


def _recover(connection: Connection) -> list[tuple[int, int, int, bytes]] | None:
    """formatID, the lengths of gtrid and bqual, and the bytes of both; None for who may not see them."""
    try:
        if is_mariadb(connection):
            return [(form, gtrid, bqual, data) for form, gtrid, bqual, data in query(connection, "XA RECOVER")]
        rows = query(connection, "XA RECOVER CONVERT XID")
        return [(form, gtrid, bqual, bytes.fromhex(data.removeprefix("0x"))) for form, gtrid, bqual, data in rows]
    except pymysql.Error as error:
        if code_of(error) in _NO_RIGHT:
            return None
        raise
