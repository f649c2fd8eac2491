"""The transaction of one partition in its task, which takes rows by LOAD DATA or by INSERT.

It has a connection to itself, and LOAD DATA LOCAL INFILE takes the rows out of memory. The server
answers LOAD DATA with a request for the file that it names; rows are then sent as packets, the last
one empty (MySQL manual, "COM_QUERY Response", LOCAL INFILE Request). PyMySQL can only send a file
of the disk, so this module speaks the protocol through three methods of its connection, two of them
private and the same since 2013: `_execute_command`, `_read_packet` and `write_packet`. No file is
ever opened, whatever name a server asks for.
"""

from __future__ import annotations

import contextlib
import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc
import pymysql
from pymysql.constants import COMMAND
from pymysql.protocol import OKPacketWrapper

from sinks._util.idle_connections import disconnect
from sinks.arrow.types import bytes_of
from sinks.errors import BadValue
from sinks.mysql.columns import Form, MySQLColumn, MySQLTarget
from sinks.mysql.connection import (
    WORK_SECONDS,
    Connection,
    Rows,
    execute,
    fault,
    is_mariadb,
    listed,
    query,
    quoted,
)
from sinks.sql.names import target_named
from sinks.sql.server import Fault
from sinks.sql.table import APPEND, Encoder, MergeOptions
from sinks.sql.transaction import RowTransaction
from sinks.transaction import Identity, TransactionContext

_PACKET = 2**15
"""Bytes: less than any sensible max_allowed_packet, above which the server would hang up."""
_ROW = re.compile(r" at row (\d+)")


class RowEncoder(Encoder[MySQLColumn]):
    null: ClassVar[str]
    """The text of NULL."""
    no_null = "NULL in a column that is NOT NULL"
    rows_at_once = 65_536

    @abstractmethod
    def statement(self, into: str) -> str:
        """Write the statement that takes rows into a (quoted) table."""

    @abstractmethod
    def _join(self, texts: list[pa.Array]) -> pa.Array:
        """Join the texts of each row into one text."""

    def pieces(self, batch: pa.RecordBatch) -> Iterator[tuple[memoryview, int]]:
        """Yield the rows of one batch as bytes, with their number."""
        for piece in self.slices(batch):
            yield from self._piece(piece)

    def _piece(self, batch: pa.RecordBatch) -> Iterator[tuple[memoryview, int]]:
        yield _bytes(self._join(self.converted(batch))), batch.num_rows
        self.rows += batch.num_rows


class LoadEncoder(RowEncoder):
    """The encoder for LOAD DATA LOCAL: a line for each row, a tab between fields."""

    null = "\\N"
    bytes_at_once = 16 * 2**20

    _SPECIAL = ("\\", "\t", "\n")  # the backslash comes first: it marks the others

    def statement(self, into: str) -> str:
        """Write the LOAD DATA statement.

        Bytes and bits go through a variable, out of which SQL makes the value.
        """
        fields = []
        sets = []
        for index, column in enumerate(self.columns):
            wrap = {Form.HEX: "UNHEX({})", Form.BITS: "CAST({} AS UNSIGNED)"}.get(column.form)
            fields.append(f"@f{index}" if wrap else quoted(column.name))
            if wrap:
                sets.append(f"{quoted(column.name)} = {wrap.format(f'@f{index}')}")
        return (
            f"LOAD DATA LOCAL INFILE 'rows' INTO TABLE {into} CHARACTER SET utf8mb4"
            " FIELDS TERMINATED BY '\t' ESCAPED BY '\\\\' LINES TERMINATED BY '\n' "
            f"({', '.join(fields)})" + (f" SET {', '.join(sets)}" if sets else "")
        )

    def _join(self, texts: list[pa.Array]) -> pa.Array:
        ready = [
            self._escaped(text) if column.form is Form.TEXT else text
            for column, text in zip(self.columns, texts, strict=True)
        ]
        return _around("", _joined(ready, "\t", self.null), "\n")

    def _escaped(self, text: pa.Array) -> pa.Array:
        used = bytes_of(text)
        for special in self._SPECIAL:
            if (used == ord(special)).any():
                text = pc.replace_substring(text, special, f"\\{special}")
        return text


class InsertEncoder(RowEncoder):
    """The encoder for INSERT … VALUES in a session without NO_BACKSLASH_ESCAPES."""

    null = "NULL"
    bytes_at_once = 2**20

    def __init__(self, *rows: Any, packet: int = 2**24) -> None:
        """Set up the encoder, with the arguments of `Encoder`.

        `packet` is the server's max_allowed_packet, in bytes.
        """
        super().__init__(*rows)
        self._packet = packet
        self._most = packet - len(self.statement("x" * 300).encode())

    def _piece(self, batch: pa.RecordBatch) -> Iterator[tuple[memoryview, int]]:
        """Yield the rows in halves, where one statement would be too long for the server."""
        data = _bytes(self._join(self.converted(batch)))
        if len(data) < self._most:
            yield data, batch.num_rows
            self.rows += batch.num_rows
        elif batch.num_rows > 1:
            half = batch.num_rows // 2
            yield from self._piece(batch.slice(0, half))
            yield from self._piece(batch.slice(half))
        else:
            raise BadValue(
                f"table {self.table}: row {self.rows + 1} needs an INSERT of {len(data)} bytes, "
                f"and the server takes less than max_allowed_packet = {self._packet}: raise it, or "
                "set local_infile=ON at the server, with which rows come by LOAD DATA in pieces"
            )

    def statement(self, into: str) -> str:
        return f"INSERT INTO {into} ({listed([column.name for column in self.columns])}) VALUES "

    def _join(self, texts: list[pa.Array]) -> pa.Array:
        ready = [
            self._quoted(column.form, text)
            for column, text in zip(self.columns, texts, strict=True)
        ]
        return _around("(", _joined(ready, ",", self.null), "),")

    @staticmethod
    def _quoted(form: Form, text: pa.Array) -> pa.Array:
        if form is Form.BITS:
            return text
        for special in ("\\", "'") if form is Form.TEXT else ():
            if (bytes_of(text) == ord(special)).any():
                text = pc.replace_substring(text, special, special * 2)
        return _around("X'" if form is Form.HEX else "'", text, "'")


def _around(before: str, text: pa.Array, after: str) -> pa.Array:
    """Put marks around each string. Null stays null."""
    marks = (pa.scalar(mark, text.type) for mark in (before, after, ""))
    return pc.binary_join_element_wise(next(marks), text, *marks)


def _joined(texts: list[pa.Array], separator: str, null: str) -> pa.Array:
    kind = (
        pa.large_string()
        if any(pa.types.is_large_string(text.type) for text in texts)
        else pa.string()
    )
    same = [text.cast(kind) for text in texts]
    return pc.binary_join_element_wise(
        *same, pa.scalar(separator, kind), null_handling="replace", null_replacement=null
    )


def _bytes(text: pa.Array) -> memoryview:
    return memoryview(bytes_of(text))  # type: ignore[arg-type]


class LoadTransaction(RowTransaction[Connection]):
    """A transaction that takes rows by LOAD DATA LOCAL, or by INSERT.

    It needs memory for two encoded pieces of a batch.

    LOAD DATA LOCAL takes what does not fit with a warning, and skips duplicates. So the warnings
    and rows of every statement are counted, and any difference fails the transaction.
    """

    def __init__(
        self,
        connection: Connection,
        give_back: Callable[[Connection], None],
        context: TransactionContext,
        target: MySQLTarget,
        identity: Identity,
        *,
        branch: str = "",
        undo: list[str] | None = None,
    ) -> None:
        """Take over a connection.

        `give_back` takes the connection when its work is done. `branch` is the xid of a transaction
        that writes into the table itself; `undo` are the statements that roll any other transaction
        back, with all its parts.
        """
        super().__init__(context, identity, target.label, fault)
        self._branch = branch
        self.target = target
        self._rows = 0
        self.undo = [f"XA END {branch}", f"XA ROLLBACK {branch}"] if branch else undo or []
        self._loading = 0
        self._ended = False
        self.connection = connection
        self._server = connection.defer(
            "SELECT @@local_infile, @@max_allowed_packet, CONNECTION_ID()"
        )
        self._give_back = give_back
        self.connection.may_take(WORK_SECONDS)

    def judge(self, error: Exception) -> Fault | None:
        """Tell what an error is about, with rows counted from the first row of the partition.

        The fault's reason does not say in which row.
        """
        known = super().judge(error)
        return known and replace(
            known, text=self._counted(known.text), reason=self._uncounted(known.text)
        )

    def _counted(self, text: str) -> str:
        return _ROW.sub(
            lambda row: f" at row {self._rows + int(row[1])}", target_named(text, self.target.name)
        )

    def _uncounted(self, text: str) -> str:
        return _ROW.sub("", target_named(text, self.target.name))

    def start(
        self, into: str, columns: Sequence[MySQLColumn], merge: MergeOptions = APPEND
    ) -> None:
        """Let rows go into these columns of a (quoted) table.

        They go in by LOAD DATA if the server takes it, and otherwise by INSERT.
        """
        ((local, packet, self.session),) = self._server
        rows = self.context.schema, columns, self.table, merge
        self._encoder: RowEncoder = (
            LoadEncoder(*rows) if local else InsertEncoder(*rows, packet=packet)
        )
        self._statement = self._encoder.statement(into)

    def write(self, batch: pa.RecordBatch) -> None:
        for data, rows in self._encoder.pieces(batch):
            with self.explained():
                self._settle()  # the server had the time that encoding took
                self._send(data, rows)

    def _send(self, data: memoryview, rows: int) -> None:
        if isinstance(self._encoder, LoadEncoder):
            _send(self.connection, self._statement, data)
            self._loading = rows
            return
        with self.connection.cursor() as cursor:
            took = cursor.execute(self._statement.encode() + data[:-1])  # type: ignore[call-overload]  # without a comma
            self._judge(rows, took, cursor.warning_count)

    def encode(self, batch: pa.RecordBatch) -> list[tuple[memoryview, int]]:
        return list(self._encoder.pieces(batch))

    def put(self, batch: pa.RecordBatch) -> None:
        pieces = self.encode(batch)
        before = self._rows
        execute(self.connection, "SAVEPOINT tpc")
        try:
            for data, rows in pieces:
                with self.explained():
                    self._send(data, rows)
                    self._settle()
        except BadValue:
            self._rows = before
            execute(self.connection, "ROLLBACK TO SAVEPOINT tpc")
            raise
        execute(self.connection, "RELEASE SAVEPOINT tpc")

    def _settle(self) -> None:
        """Wait for the last LOAD DATA."""
        if self._loading:
            rows = self._loading
            self._loading = 0
            self._judge(rows, *_result(self.connection))

    def _judge(self, rows: int, took: int, warnings: int) -> None:
        if warnings or took != rows:
            raise self._refused(
                [str(text) for _, _, text in query(self.connection, "SHOW WARNINGS")], rows, took
            )
        self._rows += rows

    def _refused(self, warnings: Sequence[str], sent: int, took: int) -> BadValue:
        """Return the error for rows that the server took with warnings, or skipped."""
        reasons = "; ".join(map(self._counted, warnings[:3])) or "the server says no more"
        more = f" (and {len(warnings) - 3} or more others)" if len(warnings) > 3 else ""
        skipped = f"; it took {took} of {sent} rows" if took != sent else ""
        skipped += self.elsewhere(reasons)
        return BadValue(
            f"table {self.table}: {self.who} was refused, since the server would alter or skip "
            f"rows: {reasons}{more}{skipped}"
        ).because("; ".join(map(self._uncounted, warnings[:3])))

    def pause(self) -> None:
        with self.explained():
            self._settle()

    def finish(self) -> int:
        with self.explained():
            self._settle()
        return self._rows

    def execute(self, statement: str) -> None:
        with self.explained():
            execute(self.connection, statement)

    def prepare(self) -> None:
        """Prepare the branch, and end the session if the branch would stay with it.

        MariaDB keeps a prepared branch to the session that has it, and so does MySQL if it is told
        to. That session has to end, soon, even if its host disappears.
        """
        detached: Rows = []
        if is_mariadb(self.connection):
            self.connection.defer("SET SESSION wait_timeout = 30")
        else:
            detached = self.connection.defer("SELECT @@xa_detach_on_prepare")
        self.connection.defer(f"XA END {self._branch}")
        self.seal(f"XA PREPARE {self._branch}")
        if detached != [(1,)]:
            disconnect(self.connection)
        self._end()

    def commit(self) -> None:
        with self.explained():
            self.connection.flush()
        if self._branch:
            self.connection.defer(f"XA END {self._branch}")
        self.seal(f"XA COMMIT {self._branch} ONE PHASE" if self._branch else "COMMIT")
        self._end()

    def seal(self, statement: str) -> None:
        """Run the statement that makes the transaction durable."""
        self.may_be_durable = True
        self.execute(statement)

    def _end(self) -> None:
        self._ended = True
        self._give_back(self.connection)

    def discard(self) -> None:
        if self._ended:  # another may have the connection
            return
        self.connection.forget()
        with contextlib.suppress(Exception):
            if self._loading:
                self._loading = 0
                _result(self.connection)
            if self.connection.open:
                for statement in self.undo:
                    with contextlib.suppress(pymysql.MySQLError):
                        execute(self.connection, statement)
        disconnect(self.connection)


def _send(connection: Connection, statement: str, data: memoryview) -> None:
    """Start the statement and give it its rows.

    The statement is not done before `_result` is called, and nothing else may be asked of the
    connection until then.
    """
    connection._execute_command(COMMAND.COM_QUERY, statement)  # type: ignore[attr-defined]
    if not connection._read_packet().is_load_local_packet():  # type: ignore[no-untyped-call]
        raise pymysql.InternalError("the server did not ask for the rows of LOAD DATA LOCAL")
    for start in range(0, len(data), _PACKET):
        connection.write_packet(data[start : start + _PACKET])
    connection.write_packet(b"")


def _result(connection: Connection) -> tuple[int, int]:
    """Wait for the end of what `_send` began.

    Return how many rows the server took, and how many warnings it has.
    """
    packet = OKPacketWrapper(connection._read_packet())  # type: ignore[no-untyped-call]
    return packet.affected_rows, packet.warning_count
