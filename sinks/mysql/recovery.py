"""XA RECOVER: the prepared branches of the whole server."""

from __future__ import annotations

import pymysql

from sinks.mysql.failures import code_of
from sinks.mysql.server import Connection, is_mariadb, query

_NO_RIGHT = (1227, 1401)  # MySQL without XA_RECOVER_ADMIN


def may_recover(connection: Connection) -> bool:
    """Whether this user may list prepared branches. Who may not has never prepared one here."""
    return recovered(connection) is not None


def recovered(connection: Connection) -> list[tuple[int, int, int, bytes]] | None:
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
