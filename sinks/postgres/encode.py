"""Arrow record batches as COPY BINARY: the hot path."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy

import pgpq
import pyarrow as pa

from sinks.errors import SchemaMismatch
from sinks.postgres.types import Column, conversion, mismatches
from sinks.sql.values import RefusedValue, bad_value, require_same_columns

_ROWS_AT_ONCE = 16_384
_BYTES_AT_ONCE = 16 * 2**20


class CopyEncoder:
    """Encodes the batches of one COPY into `table`, whose `columns` the catalog told.

    Raises SchemaMismatch at the start if `schema` does not fit, or later for a batch of another schema, and BadValue
    for a value that the column cannot hold as it is (or, with `rounding`, not even rounded), naming table, column and
    row (counted from 1 over all batches, as COPY's own errors do) and what the row begins with.
    """

    def __init__(self, schema: pa.Schema, columns: Sequence[Column], table: str, *, rounding: bool = False) -> None:
        if reasons := mismatches(schema, columns):
            raise SchemaMismatch(f"table {table}: " + "; ".join(reasons))
        known = {column.name: column for column in columns}
        self.table = table
        self.columns: tuple[str, ...] = tuple(schema.names)
        self.rows = 0
        self._schema = schema
        self._convert = [conversion(field.type, known[field.name], rounding=rounding) for field in schema]
        empty = pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)
        self._encoded = self._converted(empty).schema
        self._encoder = pgpq.ArrowToPostgresBinaryEncoder(self._encoded)

    def whole(self, batch: pa.RecordBatch) -> list[bytes]:
        """The batch as a COPY of its own."""
        alone = copy(self)
        alone._encoder, alone.rows = pgpq.ArrowToPostgresBinaryEncoder(self._encoded), 0
        return [alone.header(), *alone.pieces(batch), alone.trailer()]

    def header(self) -> bytes:
        return bytes(self._encoder.write_header())

    def pieces(self, batch: pa.RecordBatch) -> Iterator[bytes]:
        """The rows of one batch, at most 16,384 rows and about 16 MiB at a time. Up to 1 MiB is held back for a larger
        write later on, at the latest that of the trailer."""
        require_same_columns(batch, self._schema, f"table {self.table}", self.rows)
        rows = min(_ROWS_AT_ONCE, max(1, batch.num_rows * _BYTES_AT_ONCE // max(batch.nbytes, 1)))
        for start in range(0, batch.num_rows, rows):
            piece = batch.slice(start, rows)
            data: bytes = self._encoder.write_batch(self._converted(piece))
            self.rows += piece.num_rows
            if data:
                yield data

    def trailer(self) -> bytes:
        return bytes(self._encoder.finish())

    def _converted(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        arrays = []
        for name, convert, array in zip(self.columns, self._convert, batch.columns, strict=True):
            try:
                arrays.append(convert(array))
            except RefusedValue as refused:
                raise bad_value(f"table {self.table}", self.rows, batch, name, refused) from None
        return pa.RecordBatch.from_arrays(arrays, names=list(self.columns))
