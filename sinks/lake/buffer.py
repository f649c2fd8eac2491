"""Rows of a transaction that wait in memory until they are enough for a file."""

from __future__ import annotations

import pyarrow as pa

_ENOUGH = 64 << 20
"""The bytes of rows, in Arrow's form, that become one file, or one file for each partition of the
target."""


class RowBuffer:
    """The rows that a transaction has taken and not yet written."""

    def __init__(self) -> None:
        self._rows: list[pa.RecordBatch] = []
        self._size = 0

    def add(self, rows: pa.RecordBatch) -> None:
        """Keep these rows, too."""
        self._rows.append(rows)
        self._size += rows.nbytes

    @property
    def is_full(self) -> bool:
        """True if the rows are enough for a file."""
        return self._size > _ENOUGH

    def take(self) -> pa.Table | None:
        """Empty the buffer, and return its rows, or None if it has none."""
        rows = self._rows
        self._rows = []
        self._size = 0
        return pa.Table.from_batches(rows) if rows else None
