"""One participant's transaction in the task: a connection of its own, and executemany inserts."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import sqlalchemy as sa
from sqlalchemy.engine import Connection, RootTransaction

from sinks.arrow.convert import RefusedValue
from sinks.errors import BadValue
from sinks.sql.encoder import bad_value
from sinks.sql.questions import DEFERRED
from sinks.sql.transaction import RowTransaction
from sinks.sqlalchemy.database import Database
from sinks.sqlalchemy.types import Column, conversion
from sinks.transaction import Identity, TransactionContext

_ROWS_TOGETHER = 1000


class InsertTransaction(RowTransaction[Connection]):
    """Memory: the Python values of 1,000 rows."""

    def __init__(
        self,
        database: Database,
        context: TransactionContext,
        label: str,
        identity: Identity,
        into: sa.Table,
        columns: dict[str, Column],
        constants: dict[str, str],
        xid: str | None = None,
        *,
        rounding: bool = False,
    ) -> None:
        """`columns` are those of `into` that the batch fills, `constants` the values of others. With `xid` it is a
        two-phase transaction."""
        super().__init__(context, identity)
        self._judged_now = False
        self.where = f"table {label}: {self.who}"
        self.database = database
        self._insert = into.insert()
        self._constants = constants
        self._names = [name for name in context.schema.names if name in columns]
        self._convert = {
            name: conversion(context.schema.field(name).type, columns[name], rounding=rounding) for name in self._names
        }
        self._nullable = {name: bool(into.c[name].nullable) for name in self._names}
        self._row = 0
        with self.explained():
            self.connection = database.engine.connect()
            try:
                self.transaction: RootTransaction = (
                    database.begin_twophase(self.connection, xid) if xid else self.connection.begin()
                )
            except BaseException:
                self.connection.close()
                raise

    def explained(self) -> AbstractContextManager[None]:
        return self.database.explained(self.where)

    def write(self, batch: pa.RecordBatch) -> None:
        for start in range(0, batch.num_rows, _ROWS_TOGETHER):
            piece = batch.slice(start, _ROWS_TOGETHER)
            columns = [self._values(piece, name) for name in self._names]
            rows = [dict(zip(self._names, row, strict=True), **self._constants) for row in zip(*columns, strict=True)]
            where = f"{self.where}, rows {self._row + 1} to {self._row + len(rows)},"
            with self.database.explained(where):
                self.connection.execute(self._insert, rows)
            self._row += len(rows)

    def encode(self, batch: pa.RecordBatch) -> None:
        for name in self._names:
            self._values(batch, name)

    def put(self, batch: pa.RecordBatch) -> None:
        if not self._judged_now:
            self._judge_now()
        before, savepoint = self._row, self.connection.begin_nested()
        try:
            self.write(batch)
        except BadValue:
            self._row = before
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

    def _values(self, batch: pa.RecordBatch, name: str) -> list[Any]:
        array = batch.column(batch.schema.get_field_index(name))
        try:
            if array.null_count and not self._nullable[name]:
                raise RefusedValue(pc.index(array.is_null(), True).as_py(), "NULL in a column that takes none")
            converted = self._convert[name](array)
            try:
                values: list[Any] = converted.to_pylist()
            except (ValueError, OverflowError) as error:
                text = isinstance(error, UnicodeDecodeError)
                reason = "the text is not UTF-8" if text else "the year is not within 1 to 9999"
                raise RefusedValue(_first_unreadable(converted), reason) from None
            return values
        except RefusedValue as refused:
            raise bad_value(self.where, self._row, batch, name, refused) from None

    def finish(self) -> int:
        """Every row is judged already."""
        return self._row

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
        with contextlib.suppress(Exception):
            if self.sealing:
                self.connection.invalidate()
            self.connection.close()


def _first_unreadable(array: pa.Array) -> int:
    for index, value in enumerate(array):
        try:
            value.as_py()
        except (ValueError, OverflowError):
            return index
    return 0
