"""XA branches: their names, and the branches that the server has prepared."""

from __future__ import annotations

import time
import zlib

import pymysql

from sinks.errors import SinkError
from sinks.mysql.connection import XA_UNKNOWN, Connection, code_of, execute, is_mariadb, query
from sinks.transaction import Identity

_LIMIT = 64
"""The most bytes that gtrid and bqual may have each."""
_DETACH_TIMEOUT = 2.0
"""Seconds that the session of a prepared branch may take to end."""
_NO_RIGHT = (1227, 1401)  # MySQL without XA_RECOVER_ADMIN


def identity_of(transaction_id: str) -> Identity:
    """Return the name of a transaction's branch.

    `gtrid` has the parts of the transaction's name up to the checkpoint, and `bqual` the parts from
    the sink on. Raises SinkError if one of the two is too long, for which a checkpoint must have 20
    digits.
    """
    parts = transaction_id.split(".")
    identity = {"gtrid": ".".join(parts[:4]), "bqual": ".".join(parts[4:])}
    if any(len(part) > _LIMIT for part in identity.values()):
        raise SinkError(
            f"{transaction_id} is too long for the name of an XA branch: use strategy='staged'"
        )
    return identity


def name_of(identity: Identity) -> str:
    return f"{identity['gtrid']}.{identity['bqual']}"


def format_of(schema: str) -> int:
    """Return the formatID of our branches.

    It tells the branches of one database from those of another, since XA RECOVER lists all branches
    that the server has.
    """
    return zlib.crc32(f"tpc {schema}".encode()) & 0x7FFFFFFF


def xid(identity: Identity, schema: str) -> str:
    return f"'{identity['gtrid']}', '{identity['bqual']}', {format_of(schema)}"


def recovered(connection: Connection) -> list[tuple[int, int, int, bytes]] | None:
    """List formatID, the lengths of gtrid and bqual, and the bytes of both, of every branch.

    Return None if the user may not see the branches.
    """
    try:
        if is_mariadb(connection):
            return [
                (form, gtrid, bqual, data)
                for form, gtrid, bqual, data in query(connection, "XA RECOVER")
            ]
        rows = query(connection, "XA RECOVER CONVERT XID")
        return [
            (form, gtrid, bqual, bytes.fromhex(data.removeprefix("0x")))
            for form, gtrid, bqual, data in rows
        ]
    except pymysql.Error as error:
        if code_of(error) in _NO_RIGHT:
            return None
        raise


def prepared(connection: Connection, schema: str) -> list[dict[str, str]]:
    """List the names of our branches of one database."""
    identities = []
    for form, length, _, data in recovered(connection) or []:
        if form == format_of(schema):
            text = data.decode("ascii", "replace")
            identities.append({"gtrid": text[:length], "bqual": text[length:]})
    return sorted(identities, key=name_of)


def end(connection: Connection, schema: str, how: str, identity: Identity) -> bool:
    """Run XA COMMIT or XA ROLLBACK (`how`) of a branch; return False if there is none.

    MariaDB lets only the session that prepared a branch end it, until that session has ended, which
    is a moment after its connection was closed. Raises OperationalError if the session does not
    end.
    """
    deadline = time.monotonic() + _DETACH_TIMEOUT
    while True:
        try:
            execute(connection, f"XA {how} {xid(identity, schema)}")
            return True
        except pymysql.Error as error:
            if code_of(error) != XA_UNKNOWN:
                raise
        if dict(identity) not in prepared(connection, schema):
            return False
        if time.monotonic() > deadline:
            raise pymysql.OperationalError(
                XA_UNKNOWN,
                f"{name_of(identity)} is prepared, and the session that did it has not let go of "
                "it yet",
            )
        time.sleep(0.01)


def await_session(connection: Connection, session: object) -> None:
    """Wait until a session has ended, for `_DETACH_TIMEOUT` seconds at most."""
    deadline = time.monotonic() + _DETACH_TIMEOUT
    there = "SELECT 1 FROM information_schema.processlist WHERE id = %s"
    while query(connection, there, [session]) and time.monotonic() < deadline:
        time.sleep(0.01)
