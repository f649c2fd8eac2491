"""One participant's transaction in the task: a connection of its own, which takes rows by LOAD DATA LOCAL INFILE out of
memory, or by INSERT.

The server answers LOAD DATA with a request for the file that it names; rows are then sent as packets, the last one
empty (MySQL manual, "COM_QUERY Response", LOCAL INFILE Request). PyMySQL can only send a file of the disk, so this
module speaks the protocol through three methods of its connection, two of them private and the same since 2013:
`_execute_command`, `_read_packet` and `write_packet`. No file is ever opened, whatever name a server asks for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager

import pyarrow as pa
import pymysql
from pymysql.constants import COMMAND
from pymysql.protocol import OKPacketWrapper

from sinks.errors import BadValue
from sinks.mysql.connection import WORK_SECONDS
from sinks.mysql.encode import LoadEncoder, RowEncoder
from sinks.mysql.failures import Writing
from sinks.mysql.server import Connection, Server, execute, query
from sinks.sql.server import disconnect
from sinks.sql.transaction import RowTransaction
from sinks.transaction import Identity, TransactionContext

_PACKET = 2**20


class LoadTransaction(RowTransaction[Connection]):
    """Memory: two encoded pieces of a batch.

    LOAD DATA LOCAL takes what does not fit with a warning and skips duplicates: every statement's warnings and rows are
    counted, and any difference fails the transaction.
    """

    def __init__(
        self,
        server: Server,
        context: TransactionContext,
        table: str,
        identity: Identity,
        *,
        branch: str = "",
        undo: Sequence[str] = (),
    ) -> None:
        """`branch` is the xid of one that writes into the table itself; `undo` are the statements that throw another
        away."""
        super().__init__(context, identity)
        self._branch = branch
        self._writing = Writing(table, self.who)
        self._undo = [f"XA END {branch}", f"XA ROLLBACK {branch}"] if branch else undo
        self._loading = 0
        self.connection = server.connect()
        self.connection.may_take(WORK_SECONDS)

    def explained(self) -> AbstractContextManager[None]:
        return self._writing.explained()

    def start(self, into: str, encoder: RowEncoder, *, alias: str | None = None) -> None:
        """Rows go into this (quoted) table. `alias` is the name of it that errors must not show, if it is a staging
        table."""
        if alias:
            self._writing.aliases = {alias: self._writing.table.split(".")[-1]}
        self._encoder = encoder
        self._statement = encoder.statement(into)

    def write(self, batch: pa.RecordBatch) -> None:
        for data, rows in self._encoder.pieces(batch):
            with self.explained():
                self._settle()  # the server had the time that encoding took
                self._send(data, rows)

    def _send(self, data: memoryview, rows: int) -> None:
        if isinstance(self._encoder, LoadEncoder):
            _send(self.connection, self._statement, data)
            self._loading = rows
        else:
            self._insert(data, rows)

    def encode(self, batch: pa.RecordBatch) -> list[tuple[memoryview, int]]:
        return list(self._encoder.pieces(batch))

    def put(self, batch: pa.RecordBatch) -> None:
        pieces, before = self.encode(batch), self._writing.before
        execute(self.connection, "SAVEPOINT tpc")
        try:
            for data, rows in pieces:
                with self.explained():
                    self._send(data, rows)
                    self._settle()
        except BadValue:
            self._writing.before = before
            execute(self.connection, "ROLLBACK TO SAVEPOINT tpc")
            raise
        execute(self.connection, "RELEASE SAVEPOINT tpc")

    def _settle(self) -> None:
        """Wait for the last LOAD DATA."""
        if self._loading:
            rows, self._loading = self._loading, 0
            self._judge(rows, *_result(self.connection))

    def _insert(self, data: memoryview, rows: int) -> None:
        without_comma = self._statement.encode() + data[:-1]
        with self.connection.cursor() as cursor:
            took = cursor.execute(without_comma)  # type: ignore[call-overload]
            self._judge(rows, took, cursor.warning_count)

    def _judge(self, rows: int, took: int, warnings: int) -> None:
        if warnings or took != rows:
            raise self._writing.refused(query(self.connection, "SHOW WARNINGS"), rows, took)
        self._writing.before += rows

    def finish(self) -> int:
        with self.explained():
            self._settle()
        return self._writing.before

    def execute(self, statement: str) -> None:
        with self.explained():
            execute(self.connection, statement)

    def prepare(self) -> None:
        # MariaDB keeps a prepared branch to the session that has it: one whose host disappears must not live for hours
        self.execute("SET SESSION wait_timeout = 30")
        self.execute(f"XA END {self._branch}")
        self.seal(f"XA PREPARE {self._branch}")

    def commit(self) -> None:
        if self._branch:
            self.execute(f"XA END {self._branch}")
        self.seal(f"XA COMMIT {self._branch} ONE PHASE" if self._branch else "COMMIT")

    def seal(self, statement: str) -> None:
        """Run the statement that makes the transaction durable, then let go of the connection."""
        self.sealing = True
        self.execute(statement)
        disconnect(self.connection)

    def close(self) -> None:
        with contextlib.suppress(Exception):
            if self._loading:
                self._loading = 0
                _result(self.connection)
            if self.connection.open:
                for statement in self._undo:
                    with contextlib.suppress(pymysql.MySQLError):
                        execute(self.connection, statement)
        disconnect(self.connection)


def _send(connection: Connection, statement: str, data: memoryview) -> None:
    """Start the statement and give it its rows. It is not done before `_result` is called, and nothing else may be
    asked of the connection until then."""
    connection._execute_command(COMMAND.COM_QUERY, statement)  # type: ignore[attr-defined]
    if not connection._read_packet().is_load_local_packet():  # type: ignore[no-untyped-call]
        raise pymysql.InternalError("the server did not ask for the rows of LOAD DATA LOCAL")
    for start in range(0, len(data), _PACKET):
        connection.write_packet(data[start : start + _PACKET])
    connection.write_packet(b"")


def _result(connection: Connection) -> tuple[int, int]:
    """Wait for the end of what `_send` began: how many rows the server took, and how many warnings it has."""
    packet = OKPacketWrapper(connection._read_packet())  # type: ignore[no-untyped-call]
    return packet.affected_rows, packet.warning_count
