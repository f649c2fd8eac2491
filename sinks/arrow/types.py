"""Tools for types of Arrow, whatever the width of their offsets, for bytes, and for fields."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.types as at

_NAMES = {
    "bool": "boolean",
    "int8": "tinyint",
    "int16": "smallint",
    "int32": "int",
    "int64": "bigint",
    "large_string": "string",
    "large_binary": "binary",
    "date32[day]": "date",
    "null": "void",
}
"""Spark's names of types that have another name in Arrow."""


def is_text(kind: pa.DataType) -> bool:
    return bool(at.is_string(kind) or at.is_large_string(kind))


def is_bytes(kind: pa.DataType) -> bool:
    return bool(at.is_binary(kind) or at.is_large_binary(kind))


def is_list(kind: pa.DataType) -> bool:
    return bool(at.is_list(kind) or at.is_large_list(kind))


def is_moment(kind: pa.DataType) -> bool:
    """Tell whether values are points in time, and not what a clock shows somewhere."""
    return bool(at.is_timestamp(kind) and kind.tz is not None)


def spark_name(kind: pa.DataType) -> str:
    """Return the name of an Arrow type in Spark's words."""
    if at.is_timestamp(kind):
        return "timestamp" if kind.tz else "timestamp_ntz"
    if is_list(kind):
        return f"array<{spark_name(kind.value_type)}>"
    if at.is_time(kind) or at.is_duration(kind):
        return "time" if at.is_time(kind) else "interval day to second"
    return _NAMES.get(str(kind), str(kind).replace("decimal128", "decimal"))


def bytes_of(texts: pa.Array) -> np.ndarray:
    """Return the bytes of all strings, one string after the other."""
    _, offsets, data = texts.buffers()
    if data is None or not len(texts):
        return np.zeros(0, np.uint8)
    bounds = np.frombuffer(offsets, np.int64 if at.is_large_string(texts.type) else np.int32)
    return np.frombuffer(data, np.uint8)[bounds[texts.offset] : bounds[texts.offset + len(texts)]]


def lacking(batch: Iterable[pa.Field], table: Iterable[str]) -> Iterator[pa.Field]:
    """Yield the fields that the table has no column for.

    A field that differs from a column by capitals alone is not among them. It is a mistake more
    often than not, and another check reports it.
    """
    known = {name.lower() for name in table}
    for field in batch:
        if field.name.lower() not in known:
            known.add(field.name.lower())
            yield field
