"""The columns that a Kafka sink takes."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pyarrow.types as t

from sinks.errors import SchemaMismatch

_BY_RECORD = ("headers", "timestamp")
"""Columns that librdkafka takes only record by record."""


def _bytes(kind: pa.DataType) -> bool:
    return bool(t.is_string(kind) or t.is_binary(kind) or t.is_large_string(kind) or t.is_large_binary(kind))


def _headers(kind: pa.DataType) -> bool:
    if not t.is_list(kind) or not t.is_struct(kind.value_type):
        return False
    fields = {field.name: field.type for field in kind.value_type}
    return set(fields) == {"key", "value"} and t.is_string(fields["key"]) and _bytes(fields["value"])


_COLUMNS: dict[str, tuple[str, Callable[[pa.DataType], bool]]] = {
    "key": ("string or binary", _bytes),
    "value": ("string or binary", _bytes),
    "topic": ("string", t.is_string),
    "partition": ("int", t.is_integer),
    "headers": ("array<struct<key: string, value: binary>>", _headers),
    "timestamp": ("timestamp", t.is_timestamp),
}


def by_record(schema: pa.Schema) -> bool:
    """Whether a batch of this schema has to be produced record by record."""
    return any(name in schema.names for name in _BY_RECORD)


def check(sink: str, schema: pa.Schema, topic: str | None) -> None:
    """Raise SchemaMismatch with every column that does not fit."""
    problems = []
    if "value" not in schema.names:
        problems.append("there is no column `value`")
    if topic is None and "topic" not in schema.names:
        problems.append("there is no column `topic`, and the sink has no topic of its own")
    for field in schema:
        if field.name not in _COLUMNS:
            problems.append(
                f"a column `{field.name}` is not one of {', '.join(_COLUMNS)}: drop it, or put it into the value"
            )
            continue
        wanted, fits = _COLUMNS[field.name]
        if not fits(field.type):
            problems.append(f"column `{field.name}` is {field.type}, and must be {wanted}")
    for name in set(schema.names):
        if schema.names.count(name) > 1:
            problems.append(f"column `{name}` comes twice")
    if problems:
        raise SchemaMismatch(f"sink {sink!r}: " + "; ".join(problems))
