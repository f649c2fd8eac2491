"""Arrow record batches as COPY BINARY: the hot path."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pgpq
import pyarrow as pa

from sinks.errors import BadValue, SchemaMismatch
from sinks.postgres.types import Column, Refused, conversion, mismatches

_ROWS_AT_ONCE = 16_384


class CopyEncoder:
    """Encodes the batches of one COPY into `table`, whose `columns` the catalog told.

    Raises SchemaMismatch at the start if `schema` does not fit, and BadValue for a value that the column's binary form
    cannot carry, naming table, column and row (counted from 1 over all batches, as COPY's own errors do).
    """

    def __init__(self, schema: pa.Schema, columns: Sequence[Column], table: str) -> None:
        if reasons := mismatches(schema, columns):
            raise SchemaMismatch(f"table {table}: " + "; ".join(reasons))
        known = {column.name: column for column in columns}
        self.table = table
        self.columns: tuple[str, ...] = tuple(schema.names)
        self.rows = 0
        self._convert = [conversion(field.type, known[field.name]) for field in schema]
        empty = pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)
        self._encoder = pgpq.ArrowToPostgresBinaryEncoder(self._converted(empty).schema)

    def header(self) -> bytes:
        return bytes(self._encoder.write_header())

    def encode(self, batch: pa.RecordBatch) -> bytes:
        """The rows of one batch; a huge one is encoded piece by piece."""
        return b"".join(self._pieces(batch)) if batch.num_rows > _ROWS_AT_ONCE else self._piece(batch)

    def trailer(self) -> bytes:
        return bytes(self._encoder.finish())

    def _pieces(self, batch: pa.RecordBatch) -> Iterator[bytes]:
        for start in range(0, batch.num_rows, _ROWS_AT_ONCE):
            yield self._piece(batch.slice(start, _ROWS_AT_ONCE))

    def _piece(self, batch: pa.RecordBatch) -> bytes:
        data: bytes = self._encoder.write_batch(self._converted(batch))
        self.rows += batch.num_rows
        return data

    def _converted(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        arrays = []
        for name, convert, array in zip(self.columns, self._convert, batch.columns, strict=True):
            try:
                arrays.append(convert(array))
            except Refused as refused:
                row = self.rows + refused.index + 1
                raise BadValue(f'table {self.table}: row {row}, column "{name}": {refused}') from None
        return pa.RecordBatch.from_arrays(arrays, names=list(self.columns))
