"""The transaction of one partition in its task, which inserts rows into a staging table."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from sinks.errors import BadValue
from sinks.sql.databases import POSTGRES_MAY_REST
from sinks.sql.server import explained
from sinks.sql.table import MergeOptions, Values
from sinks.sql.transaction import RowTransaction
from sinks.sqlalchemy.server import SqlAlchemyServer
from sinks.sqlalchemy.types import SqlAlchemyColumn
from sinks.transaction import Identity, TransactionContext

_DDL_IS_UNDONE = ("sqlite", "postgresql")
"""Dialects whose ROLLBACK undoes CREATE TABLE."""


class InsertTransaction(RowTransaction[Connection]):
    """A transaction that inserts rows into a staging table of its own.

    It needs memory for the Python values of up to 1,000 rows.
    """

    def __init__(
        self,
        server: SqlAlchemyServer,
        context: TransactionContext,
        label: str,
        identity: Identity,
        staging: sa.Table,
        columns: Sequence[SqlAlchemyColumn],
        merge: MergeOptions,
    ) -> None:
        """Connect, begin, and create the staging table.

        `label` is the target's name for a reader.
        """
        super().__init__(context, identity, label, server.fault)
        self._server = server
        self._staging = staging
        self._values = Values(context.schema, columns, f"{label}: {self.who}", merge)
        with self.discarded_on_error(), self.explained():
            self.connection = server.engine.connect()
            self._transaction = self.connection.begin()
            if server.dialect.name == "postgresql":
                self.connection.exec_driver_sql(POSTGRES_MAY_REST)
            staging.create(self.connection, checkfirst=False)

    def write(self, batch: pa.RecordBatch) -> None:
        names = batch.schema.names
        values = self._values
        for piece in values.slices(batch):
            rows = [dict(zip(names, row, strict=True)) for row in values.of(piece)]
            who = f"{self.who}, rows {values.rows + 1} to {values.rows + len(rows)},"
            with explained(self._server.fault, self.table, who):
                self.connection.execute(self._staging.insert(), rows)
            values.rows += len(rows)

    def encode(self, batch: pa.RecordBatch) -> None:
        self._values.of(batch)

    def put(self, batch: pa.RecordBatch) -> None:
        before = self._values.rows
        savepoint = self.connection.begin_nested()
        try:
            self.write(batch)
        except BadValue:
            self._values.rows = before
            savepoint.rollback()
            raise
        savepoint.commit()

    def finish(self) -> int:
        """Return how many rows there were; every row is judged already."""
        return self._values.rows

    def commit(self) -> None:
        self.may_be_durable = True
        with self.explained():
            self._transaction.commit()
        self._disconnect()

    def discard(self) -> None:
        """Roll the transaction back, unless it may be durable already.

        Where ROLLBACK does not undo CREATE TABLE, the staging table is dropped.
        """
        with contextlib.suppress(Exception):
            if not self.may_be_durable:
                self._transaction.rollback()
                if self._server.dialect.name not in _DDL_IS_UNDONE:
                    self._staging.drop(self.connection)
                    self.connection.commit()
        self._disconnect()

    def _disconnect(self) -> None:
        """Close the connection itself, because no other task of this process has the pool."""
        with contextlib.suppress(Exception):
            self.connection.invalidate()
            self.connection.close()
