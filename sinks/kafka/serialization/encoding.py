"""From Arrow to Confluent's wire format, in tasks."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as t

from sinks.dead_letters import Refusal
from sinks.errors import SchemaMismatch
from sinks.kafka.row_bytes import rows_of
from sinks.kafka.serialization.by_columns import RowByRow
from sinks.kafka.serialization.schema import Format

logger = logging.getLogger(__name__)

MAGIC = b"\0"
"""What Confluent's wire format begins with, before four bytes of the schema's id."""

_MOST_BYTES = 1 << 30
"""Bytes of columns: what is made of them has offsets of 32 bits."""
_AGREES: dict[tuple[str, pa.DataType], bool] = {}
"""Whether the first rows of a schema and type were the same bytes at once and row by row."""


@dataclass(frozen=True)
class Writer:
    """A registered schema, as tasks need it."""

    format: Format
    schema_id: int
    text: str

    @property
    def named(self) -> dict[str, Any]:
        """For a record of what was written with it."""
        return {"id": self.schema_id, "hash": self.format.hash_of(self.text)}

    def encoded(self, column: pa.StructArray) -> tuple[pa.LargeBinaryArray, list[Refusal]]:
        """A value for each row, null for a null one, and which rows the schema does not take; those are null too.

        Raises SchemaMismatch for columns that it has no place for: rows that were kept may be of an earlier query."""
        merged = self.format.merged(self.text, column.type, "")
        if lacking := [*merged.unfit, *(change.statement for change in merged.changes)]:
            raise SchemaMismatch(f"the schema number {self.schema_id} does not take the rows: {'; '.join(lacking)}")
        known = self.text, column.type
        at_once = self._at_once(column) if _AGREES.get(known, True) else None
        if at_once is not None and known in _AGREES:
            return at_once, []
        made, refused = self._row_by_row(column)
        if at_once is not None and made.null_count < len(made):
            _AGREES[known] = not refused and at_once.equals(made)
            if not _AGREES[known]:
                logger.warning("rows of %s are written one by one: all at once, they would be other bytes", column.type)
        return made, refused

    @property
    def _prefix(self) -> bytes:
        return MAGIC + self.schema_id.to_bytes(4, "big")

    def _at_once(self, column: pa.StructArray) -> pa.Array | None:
        if column.nbytes > _MOST_BYTES:
            return None
        try:
            parts = self.format.at_once(self.text, column)
        except RowByRow:
            return None
        made = rows_of(len(column), [*self._prefix, *parts]).cast(pa.large_binary())
        return pc.if_else(column.is_valid(), made, None) if column.null_count else made

    def _row_by_row(self, column: pa.StructArray) -> tuple[pa.LargeBinaryArray, list[Refusal]]:
        encode, prefix = self.format.encoder(self.text, column.type), self._prefix
        out, refused = BytesIO(), list[Refusal]()
        ends, valid = np.zeros(len(column) + 1, np.int64), np.ones(len(column), bool)
        for at, row in enumerate(_rows(column)):
            start = ends[at]
            if row is None:
                valid[at] = False
            else:
                try:
                    if isinstance(row, Exception):
                        raise row
                    out.write(prefix)
                    encode(row, out)
                except Exception as error:
                    out.seek(start)
                    out.truncate()
                    valid[at] = False
                    refused.append(Refusal(at, type(error).__name__, str(error)))
            ends[at + 1] = out.tell()
        validity = pa.array(valid).buffers()[1] if not valid.all() else None
        buffers = [validity, pa.py_buffer(ends), pa.py_buffer(out.getbuffer())]
        return pa.Array.from_buffers(pa.large_binary(), len(column), buffers), refused


def _rows(column: pa.StructArray) -> list[Any]:
    """Dicts, in which days and times are the integers that Arrow has for them, in microseconds, and maps are lists of
    pairs; None; and, for what Python cannot hold (text that is no UTF-8), the exception that says so."""
    numbers = column.cast(_retyped(column.type, exact=True)).cast(_retyped(column.type, exact=False))
    try:
        return list(numbers.to_pylist())
    except ValueError:
        return [_row(numbers, at) for at in range(len(numbers))]


def _row(column: pa.StructArray, at: int) -> Any:
    try:
        return column[at].as_py()
    except ValueError as error:
        return error


def _retyped(kind: pa.DataType, *, exact: bool) -> pa.DataType:
    """The type with times in microseconds (`exact`), or as the integers that Arrow has for them."""

    def again(inner: pa.DataType) -> pa.DataType:
        return _retyped(inner, exact=exact)

    if t.is_struct(kind):
        return pa.struct(
            [field.with_type(again(field.type)).with_nullable(True) for field in kind]
        )  # null in a null one
    if t.is_list(kind):
        return pa.list_(kind.value_field.with_type(again(kind.value_type)))
    if t.is_large_list(kind):
        return pa.large_list(kind.value_field.with_type(again(kind.value_type)))
    if t.is_map(kind):
        key, item = (field.with_type(again(field.type)) for field in (kind.key_field, kind.item_field))
        return pa.map_(key, item)
    if t.is_date(kind):
        return pa.date32() if exact else pa.int32()
    if t.is_time(kind):
        return pa.time64("us") if exact else pa.int64()
    if t.is_timestamp(kind):
        return pa.timestamp("us", kind.tz) if exact else pa.int64()
    if t.is_duration(kind):
        return pa.duration("us") if exact else pa.int64()
    return kind
