"""Arrow record batches as COPY BINARY: the hot path."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy

import pgpq
import pyarrow as pa

from sinks.postgres.types import Column
from sinks.sql.encoder import Encoder


class CopyEncoder(Encoder[Column]):
    """For one COPY. Rows are counted as COPY's own errors do."""

    rows_at_once = 16_384
    bytes_at_once = 16 * 2**20

    def __init__(self, schema: pa.Schema, columns: Sequence[Column], table: str, *, rounding: bool = False) -> None:
        super().__init__(schema, columns, table, rounding=rounding)
        empty = pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)
        self._encoded = self._batch(empty).schema
        self._encoder = pgpq.ArrowToPostgresBinaryEncoder(self._encoded)

    def whole(self, batch: pa.RecordBatch) -> list[bytes]:
        """The batch as a COPY of its own."""
        alone = copy(self)
        alone._encoder, alone.rows = pgpq.ArrowToPostgresBinaryEncoder(self._encoded), 0
        return [alone.header(), *alone.pieces(batch), alone.trailer()]

    def header(self) -> bytes:
        return bytes(self._encoder.write_header())

    def pieces(self, batch: pa.RecordBatch) -> Iterator[bytes]:
        """The rows of one batch. Up to 1 MiB is held back for a larger write later on, at the latest that of the
        trailer."""
        for piece in self.slices(batch):
            data: bytes = self._encoder.write_batch(self._batch(piece))
            self.rows += piece.num_rows
            if data:
                yield data

    def trailer(self) -> bytes:
        return bytes(self._encoder.finish())

    def _batch(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays(self.converted(rows), names=rows.schema.names)
