"""A task's rows, which go in by executemany of INSERT."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import replace

import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy.engine import Connection, RootTransaction

from sinks.errors import BadValue
from sinks.sql.encoder import Values
from sinks.sql.questions import DEFERRED
from sinks.sql.transaction import RowTransaction
from sinks.sqlalchemy.database import Database
from sinks.sqlalchemy.types import SqlAlchemyColumn
from sinks.transaction import Identity, TransactionContext

_DDL_IS_UNDONE = ("sqlite", "postgresql")
"""Dialects whose ROLLBACK undoes CREATE TABLE."""


class InsertTransaction(RowTransaction[Connection]):
    """Memory: the Python values of up to 1,000 rows."""

    def __init__(
        self,
        database: Database,
        context: TransactionContext,
        label: str,
        identity: Identity,
        into: sa.Table,
        columns: Iterable[SqlAlchemyColumn],
        xid: str | None = None,
        *,
        rounding: bool = False,
        create: bool = False,
    ) -> None:
        """`columns` are those of `into` that the batch may fill. With `xid` it is a two-phase transaction. `create`: it
        makes the table, too, which goes when it is thrown away."""
        super().__init__(context, identity)
        self._judged_now = False
        self.where = f"table {label}: {self.who}"
        self.database = database
        self.into, self._undo = into, create and database.dialect not in _DDL_IS_UNDONE
        known = {column.name: column for column in columns}
        self._insert = into.insert()
        filled = [replace(known[name], nullable=bool(into.c[name].nullable)) for name in context.schema.names]
        self._values = Values(context.schema, filled, f"{label}: {self.who}", rounding=rounding)
        with self.explained():
            self.connection = database.engine.connect()
            try:
                self.transaction: RootTransaction = (
                    database.begin_twophase(self.connection, xid) if xid else self.connection.begin()
                )
                if create:
                    into.create(self.connection, checkfirst=False)
            except BaseException:
                self.connection.close()
                raise

    def explained(self) -> AbstractContextManager[None]:
        return self.database.in_words(self.where)

    def write(self, batch: pa.RecordBatch) -> None:
        names, values = batch.schema.names, self._values
        for piece in values.slices(batch):
            rows = [dict(zip(names, row, strict=True)) for row in values.of(piece)]
            where = f"{self.where}, rows {values.rows + 1} to {values.rows + len(rows)},"
            with self.database.in_words(where):
                self.connection.execute(self._insert, rows)
            values.rows += len(rows)

    def encode(self, batch: pa.RecordBatch) -> None:
        self._values.of(batch)

    def put(self, batch: pa.RecordBatch) -> None:
        if not self._judged_now:
            self._judge_now()
        before, savepoint = self._values.rows, self.connection.begin_nested()
        try:
            self.write(batch)
        except BadValue:
            self._values.rows = before
            savepoint.rollback()
            raise
        savepoint.commit()

    def _judge_now(self) -> None:
        """Let constraints that wait for the end of the transaction judge each insert."""
        self._judged_now = True
        if self.database.dialect == "postgresql":
            quote = self.database.engine.dialect.identifier_preparer
            with self.explained():
                found = self.database.query(self.connection, DEFERRED, [quote.format_table(self._insert.table)])
                if found:
                    names = ", ".join(".".join(map(quote.quote_identifier, name)) for name in found)
                    self.connection.exec_driver_sql(f"SET CONSTRAINTS {names} IMMEDIATE")

    def finish(self) -> int:
        """Every row is judged already."""
        return self._values.rows

    def prepare(self) -> None:
        self.sealing = True
        assert isinstance(self.transaction, sa.TwoPhaseTransaction)
        with self.explained():
            self.transaction.prepare()
            self.connection.invalidate()  # SQLAlchemy would roll back what is only prepared
        self.connection.close()

    def commit(self) -> None:
        self.sealing = True
        with self.explained():
            self.transaction.commit()
        self.connection.close()

    def close(self) -> None:
        """Nothing is thrown away of what is sealed."""
        with contextlib.suppress(Exception):
            if not self.sealing:
                self.transaction.rollback()
                if self._undo:
                    self.into.drop(self.connection)
                    self.connection.commit()
        with contextlib.suppress(Exception):
            if self.sealing:
                self.connection.invalidate()
            self.connection.close()
