"""Hashes of the rows of record batches, where Spark's JVM has not added its own (`sinks.task.with_row_hash`)."""

from __future__ import annotations

import re
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from sinks.arrow.types import is_text
from sinks.task import columns_hash

_NULL = 0x9E3779B97F4A7C15
"""In place of a value."""
_OF_THE_SESSION = re.compile(r"large_(?=string|binary|list)|(?<=tz=)[^\]]*| not null")
"""What settings make of the same type of Spark."""


def row_hashes(batch: pa.RecordBatch) -> pa.Array:
    """One int64 a row, of its columns' names and types and all its values. Equal rows have equal hashes, whatever else
    is in their batches and the session's settings, under one version of pandas."""
    import numpy
    from pandas.util import hash_array

    columns = columns_hash((field.name, _OF_THE_SESSION.sub("", str(field.type))) for field in batch.schema)
    hashes = numpy.full(batch.num_rows, columns, dtype="int64").view("uint64")
    for column in batch.columns:
        values = numpy.where(column.is_null().to_numpy(zero_copy_only=False), _NULL, _hashes(column))
        hashes = hash_array(hashes * numpy.uint64(31) + values.astype("uint64"))
    return pa.array(hashes.view("int64"))


def _hashes(column: pa.Array) -> Any:
    from pandas.util import hash_array

    kind = column.type
    if pa.types.is_boolean(kind):
        column, kind = column.cast(pa.int8()), pa.int8()
    if pa.types.is_primitive(kind) and kind.bit_width in (8, 16, 32, 64):
        bits = column.view(pa.type_for_alias(f"int{kind.bit_width}"))
        return hash_array(pc.fill_null(bits, 0).to_numpy(zero_copy_only=False).astype("uint64"))
    if is_text(kind):
        return hash_array(pc.fill_null(column, "").to_numpy(zero_copy_only=False), categorize=False)
    import numpy

    texts = numpy.empty(len(column), dtype=object)
    texts[:] = [repr(value) for value in column.to_pylist()]
    return hash_array(texts, categorize=False)
