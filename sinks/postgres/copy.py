"""Arrow record batches by COPY … FROM STDIN (FORMAT BINARY): the hot path.

Each transaction has a connection to itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from copy import copy

import pgpq
import psycopg
import pyarrow as pa
from psycopg import sql

from sinks.errors import BadValue
from sinks.postgres.columns import PostgresColumn
from sinks.postgres.connection import Connection, Rows, fault
from sinks.postgres.server import PostgresServer
from sinks.sql.databases import POSTGRES_MAY_REST
from sinks.sql.table import APPEND, Encoder, MergeOptions
from sinks.sql.transaction import RowTransaction
from sinks.transaction import Identity, TransactionContext


class CopyEncoder(Encoder[PostgresColumn]):
    """The encoder of one COPY. It counts rows as COPY's own errors do."""

    rows_at_once = 16_384
    bytes_at_once = 16 * 2**20

    def __init__(
        self,
        schema: pa.Schema,
        columns: Sequence[PostgresColumn],
        table: str,
        merge: MergeOptions = APPEND,
    ) -> None:
        super().__init__(schema, columns, table, merge)
        empty = pa.RecordBatch.from_arrays(
            [pa.array([], field.type) for field in schema], schema=schema
        )
        self._encoded = self._batch(empty).schema
        self._encoder = pgpq.ArrowToPostgresBinaryEncoder(self._encoded)

    def restart(self) -> None:
        """Begin another COPY, whose errors count its own rows."""
        self._encoder = pgpq.ArrowToPostgresBinaryEncoder(self._encoded)
        self.rows = 0

    def whole(self, batch: pa.RecordBatch) -> list[bytes]:
        """Encode the batch as a COPY of its own."""
        alone = copy(self)
        alone.restart()
        return [alone.header(), *alone.pieces(batch), alone.trailer()]

    def header(self) -> bytes:
        return bytes(self._encoder.write_header())

    def pieces(self, batch: pa.RecordBatch) -> Iterator[bytes]:
        """Encode the rows of one batch.

        Up to 1 MiB is held back for a larger write later on, at the latest that of the trailer.
        """
        for piece in self.slices(batch):
            data: bytes = self._encoder.write_batch(self._batch(piece))
            self.rows += piece.num_rows
            if data:
                yield data

    def trailer(self) -> bytes:
        return bytes(self._encoder.finish())

    def _batch(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays(self.converted(rows), names=rows.schema.names)


class CopyTransaction(RowTransaction[Connection]):
    """A transaction that takes rows by COPY.

    It needs memory for one encoded batch and libpq's output buffer.
    """

    @classmethod
    def begin(
        cls,
        server: PostgresServer,
        context: TransactionContext,
        table: str,
        identity: Identity,
        within: RowTransaction[Connection] | None = None,
    ) -> CopyTransaction:
        """Begin a transaction on a connection that it has to itself.

        With `within` it is a part of that transaction, for another table. `table` is the target's
        name for a reader.
        """
        if within is not None:
            return cls(within.connection, server.give, context, table, identity)
        connection = server.take()
        server.begin(connection)
        return cls(connection, server.give, context, table, identity)

    def __init__(
        self,
        connection: Connection,
        give_back: Callable[[Connection], None],
        context: TransactionContext,
        table: str,
        identity: Identity,
    ) -> None:
        """Take over the transaction that the connection is in.

        `give_back` takes the connection when the transaction is durable.
        """
        super().__init__(context, identity, table, fault)
        self.connection = connection
        self._give_back = give_back
        self._copying: AbstractContextManager[psycopg.Copy] | None = None
        self._sealed = False
        self._put = 0
        self.number: Rows = []
        self._has_begun = False
        self._in_several_copies = False

    def start(self, into: sql.Identifier, encoder: CopyEncoder) -> None:
        """Let rows go into this table."""
        self._encoder = encoder
        columns = sql.SQL(", ").join(sql.Identifier(column.name) for column in encoder.columns)
        self._statement = sql.SQL("COPY {} ({}) FROM STDIN (FORMAT BINARY)").format(into, columns)

    def _begin_copy(self) -> None:
        self._cursor = self.connection.cursor()
        copying = self._cursor.copy(self._statement)
        with self.explained():
            self._copy = copying.__enter__()
            self._copying = copying
            self._has_begun = True
            self._copy.write(self._encoder.header())

    def write(self, batch: pa.RecordBatch) -> None:
        if self._copying is None:
            self._begin_copy()
        for piece in self._encoder.pieces(batch):
            with self.explained():
                self._copy.write(piece)

    def encode(self, batch: pa.RecordBatch) -> None:
        self._encoder.whole(batch)

    def put(self, batch: pa.RecordBatch) -> None:
        data = self._encoder.whole(batch)
        self._expect_several_copies()
        self.connection.execute("SAVEPOINT tpc")
        try:
            with self.explained(), self.connection.cursor() as cursor:
                with cursor.copy(self._statement) as copying:
                    for piece in data:
                        copying.write(piece)
                self._put += cursor.rowcount
        except BadValue:
            self.connection.execute("ROLLBACK TO SAVEPOINT tpc")
            raise
        finally:
            if self.connection.info.transaction_status == psycopg.pq.TransactionStatus.INTRANS:
                self.connection.execute("RELEASE SAVEPOINT tpc")

    def _expect_several_copies(self) -> None:
        # between two COPYs the server counts the time until the next rows
        if not self._in_several_copies:
            self.connection.defer(POSTGRES_MAY_REST)
        self._in_several_copies = True

    def pause(self) -> None:
        if self._copying is not None:
            self._end_copy()
            self._encoder.restart()
            self._expect_several_copies()

    def finish(self) -> int:
        """End the COPY, after which every row is checked; return how many rows the server took."""
        if not self._has_begun and not self._in_several_copies:
            self._begin_copy()
        if self._copying is not None:
            self._end_copy()
        return self._put

    def _end_copy(self) -> None:
        assert self._copying is not None
        copying = self._copying
        self._copying = None
        with self.explained():
            self._copy.write(self._encoder.trailer())
            copying.__exit__(None, None, None)
        self._put += self._cursor.rowcount

    def prepare(self) -> None:
        self.seal(sql.SQL("PREPARE TRANSACTION {}").format(sql.Literal(self.identity["gid"])))

    def commit(self) -> None:
        self.seal("COMMIT")

    def seal(self, statement: str | sql.Composed) -> None:
        """Run the statement that makes the transaction durable, then let go of the connection.

        From then on another transaction may have the connection.
        """
        with self.explained():
            self.connection.flush()
        self.may_be_durable = True
        with self.explained():
            self.connection.end(statement)
        self._sealed = True
        self._give_back(self.connection)

    def discard(self) -> None:
        """Roll the transaction back, even while it waits for a lock, unless it is sealed."""
        if self._sealed:
            return
        with contextlib.suppress(Exception):
            if self.connection.info.transaction_status == psycopg.pq.TransactionStatus.ACTIVE:
                self.connection.cancel_safe(timeout=5)
            if self._copying is not None:
                copying = self._copying
                self._copying = None
                reason = RuntimeError("rolled back")
                copying.__exit__(type(reason), reason, None)
        with contextlib.suppress(Exception):
            self.connection.rollback()
        self.connection.close()
