"""Arrow record batches as what a database takes rows by: the part that is alike in all of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar, Generic

import pyarrow as pa

from sinks.errors import SchemaMismatch
from sinks.sql.values import ColumnT, Convert, RefusedValue, bad_value, mismatches, require_same_columns


class Encoder(ABC, Generic[ColumnT]):
    """Encodes the batches that go into one table, whose `columns` the catalog told.

    Raises SchemaMismatch at the start if `schema` does not fit, or later for a batch of another schema, and BadValue
    for a value that the column would not keep as it is (or, with `rounding`, not even rounded), naming table, column
    and row (counted from 1 over all batches) and what the row begins with.
    """

    rows_at_once: ClassVar[int]
    bytes_at_once: ClassVar[int]
    """What a piece should not have much more of."""

    def __init__(self, schema: pa.Schema, columns: Sequence[ColumnT], table: str, *, rounding: bool = False) -> None:
        self._rounding = rounding
        if reasons := mismatches(schema, columns, self.conversion):
            raise SchemaMismatch(f"table {table}: " + "; ".join(reasons))
        known = {column.name: column for column in columns}
        self.table = table
        self.columns = [known[name] for name in schema.names]
        self.rows = 0
        self._schema = schema
        self._convert = [self.conversion(field.type, known[field.name]) for field in schema]

    @abstractmethod
    def conversion(self, arrow: pa.DataType, column: ColumnT) -> Convert:
        """Raises Unfit."""

    def slices(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """The rows of one batch, some thousands at a time."""
        require_same_columns(batch, self._schema, f"table {self.table}", self.rows)
        rows = min(self.rows_at_once, max(1, batch.num_rows * self.bytes_at_once // max(batch.nbytes, 1)))
        for start in range(0, batch.num_rows, rows):
            yield batch.slice(start, rows)

    def converted(self, batch: pa.RecordBatch) -> list[pa.Array]:
        arrays = []
        for column, convert, array in zip(self.columns, self._convert, batch.columns, strict=True):
            try:
                arrays.append(convert(array))
            except RefusedValue as refused:
                raise bad_value(f"table {self.table}", self.rows, batch, column.name, refused) from None
        return arrays
