"""Strategy `xa`: rows go into the target in an XA branch, which XA PREPARE makes durable; the driver runs XA COMMIT."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterable
from typing import Any

import pymysql

from sinks.errors import SinkError
from sinks.mysql.catalog import current
from sinks.mysql.failures import XA_UNKNOWN, code_of
from sinks.mysql.ledger import Ledger
from sinks.mysql.loading import RowTransaction
from sinks.mysql.planning import Plan
from sinks.mysql.recovery import recovered
from sinks.mysql.server import Connection, execute
from sinks.sql.names import of_sink
from sinks.sql.strategies import Separate
from sinks.transaction import Identity, TransactionContext, TransactionId

_LIMIT = 64
"""Bytes that gtrid and bqual may have each."""
_PATIENCE = 2.0
"""Seconds that the session of a prepared branch may take to end."""


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


class Branches(Separate[RowTransaction]):
    """Strategy `xa`."""

    def key(self, identity: Identity) -> str:
        return name_of(identity)

    def begin(self, plan: Plan, context: TransactionContext) -> RowTransaction:
        """Open the participant's branch; rows go into the target itself."""
        target = plan.target
        identity = identity_of(context.transaction_id)
        name = xid(identity, target.schema)
        undo = [f"XA END {name}", f"XA ROLLBACK {name}"]
        transaction = RowTransaction(self.server, context, target.label, identity, undo)
        try:
            transaction.execute(f"XA START {name}")
            with transaction.explained():
                columns = current(transaction.connection, target, context.schema.names).columns
            transaction.start(target.identifier, plan.encoder(context.schema, columns, target.label))
        except BaseException:
            transaction.close()
            raise
        return transaction

    def prepare(self, transaction: RowTransaction, ledger: Ledger) -> None:
        name = xid(transaction.identity, ledger.schema)
        # MariaDB keeps a prepared branch to the session that has it: one whose host disappears must not live for hours
        transaction.execute("SET SESSION wait_timeout = 30")
        transaction.execute(f"XA END {name}")
        transaction.seal(f"XA PREPARE {name}")

    def commit_directly(self, transaction: RowTransaction, plan: Plan) -> None:
        transaction.finish()
        name = xid(transaction.identity, plan.target.schema)
        transaction.execute(f"XA END {name}")
        transaction.seal(f"XA COMMIT {name} ONE PHASE")

    def end(self, connection: Connection, ledger: Ledger, how: str, identity: Identity) -> bool:
        """MariaDB knows only its own session of a branch until that has ended, a moment after its connection was
        closed: raises OperationalError if it does not."""
        deadline = time.monotonic() + _PATIENCE
        while True:
            try:
                execute(connection, f"XA {how} {xid(identity, ledger.schema)}")
                return True
            except pymysql.Error as error:
                if code_of(error) != XA_UNKNOWN:
                    raise
            if dict(identity) not in _listed(connection, ledger.schema):
                return False
            if time.monotonic() > deadline:
                raise pymysql.OperationalError(
                    XA_UNKNOWN, f"{name_of(identity)} is prepared, and the session that did it has not let go of it yet"
                )
            time.sleep(0.01)

    def in_doubt(self, connection: Connection, schema: str, job: str, sink: str) -> Iterable[Identity]:
        prefix = TransactionId.prefix(job)
        names = {name_of(identity): identity for identity in _listed(connection, schema)}
        return [identity for name, identity in names.items() if name.startswith(prefix) and of_sink(name, sink)]


def _listed(connection: Connection, schema: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for form, length, _, data in recovered(connection) or []:
        if form == format_of(schema):
            text = data.decode("ascii", "replace")
            found.append({"gtrid": text[:length], "bqual": text[length:]})
    return sorted(found, key=name_of)
