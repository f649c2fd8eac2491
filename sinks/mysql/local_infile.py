"""LOAD DATA LOCAL INFILE out of memory.

The server answers the statement with a request for the file that it names; rows are then sent as packets, the last one
empty (MySQL manual, "COM_QUERY Response", LOCAL INFILE Request). PyMySQL can only send a file of the disk, so this
module speaks the protocol through three methods of its connection, two of them private and the same since 2013:
`_execute_command`, `_read_packet` and `write_packet`. No file is ever opened, whatever name a server asks for.
"""

from __future__ import annotations

import pymysql
from pymysql.constants import COMMAND
from pymysql.protocol import OKPacketWrapper

from sinks.mysql.server import Connection

_PACKET = 2**20


def send(connection: Connection, statement: str, data: memoryview) -> None:
    """Start the statement and give it its rows. It is not done before `result` is called, and nothing else may be
    asked of the connection until then."""
    connection._execute_command(COMMAND.COM_QUERY, statement)  # type: ignore[attr-defined]
    if not connection._read_packet().is_load_local_packet():  # type: ignore[no-untyped-call]
        raise pymysql.InternalError("the server did not ask for the rows of LOAD DATA LOCAL")
    for start in range(0, len(data), _PACKET):
        connection.write_packet(data[start : start + _PACKET])
    connection.write_packet(b"")


def result(connection: Connection) -> tuple[int, int]:
    """Wait for the end of what `send` began: how many rows the server took, and how many warnings it has."""
    packet = OKPacketWrapper(connection._read_packet())  # type: ignore[no-untyped-call]
    return packet.affected_rows, packet.warning_count
