"""From Arrow to Avro in Confluent's wire format, in tasks."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as t

from sinks.arrow.types import is_list
from sinks.arrow.values import ValidationError, python_values
from sinks.dead_letters import Refusal
from sinks.errors import SchemaMismatch
from sinks.extras import needs_extra
from sinks.kafka.row_bytes import rows_of
from sinks.kafka.serialization.avro import Schema, hash_of, merged, nullable, parsed
from sinks.kafka.serialization.by_columns import RowByRow, record, valid

with needs_extra("avro"):
    import fastavro.validation

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

    schema_id: int
    text: str

    @property
    def named(self) -> dict[str, Any]:
        """For a record of what was written with it."""
        return {"id": self.schema_id, "hash": hash_of(self.text)}

    def encoded(self, column: pa.StructArray) -> tuple[pa.LargeBinaryArray, list[Refusal]]:
        """A value for each row, null for a null one, and which rows the schema does not take; those are null too.

        Raises SchemaMismatch for columns that it has no place for: rows that were kept may be of an earlier query."""
        fit = merged(self.text, column.type)
        if lacking := [*fit.unfit, *(change.statement for change in fit.changes)]:
            raise SchemaMismatch(f"the schema number {self.schema_id} does not take the rows: {'; '.join(lacking)}")
        known = self.text, column.type
        rows = with_integers(column)
        at_once = self._at_once(rows) if _AGREES.get(known, True) else None
        if at_once is not None and known in _AGREES:
            return at_once, []
        values, refused = self._row_by_row(rows)
        if at_once is not None and values.null_count < len(values):
            _AGREES[known] = not refused and at_once.equals(values)
            if not _AGREES[known]:
                logger.warning("rows of %s are written one by one: all at once, they would be other bytes", column.type)
        return values, refused

    @property
    def _prefix(self) -> bytes:
        return MAGIC + self.schema_id.to_bytes(4, "big")

    def _at_once(self, rows: pa.StructArray) -> pa.Array | None:
        if rows.nbytes > _MOST_BYTES:
            return None
        try:
            parts = record(_physical(self.text), rows, valid(rows))
        except RowByRow:
            return None
        values = rows_of(len(rows), [*self._prefix, *parts]).cast(pa.large_binary())
        return pc.if_else(rows.is_valid(), values, None) if rows.null_count else values

    def _row_by_row(self, rows: pa.StructArray) -> tuple[pa.LargeBinaryArray, list[Refusal]]:
        schema, prefix, plain = _physical(self.text), self._prefix, python_values(rows.type)
        strict = _refuses_null(schema)
        values, refused = list[bytes | None](), list[Refusal]()
        try:
            given = rows.to_pylist()
        except ValueError:  # Python cannot hold one of them (text that is no UTF-8)
            given = list(rows)
        for at, row in enumerate(given):
            value = None
            try:
                row = plain(row.as_py() if isinstance(row, pa.Scalar) else row)
                if strict and row is not None:
                    _validate(row, schema)
                if row is not None:
                    out = BytesIO()
                    out.write(prefix)
                    fastavro.schemaless_writer(out, schema, row, disable_tuple_notation=True)
                    value = out.getvalue()
            except Exception as error:
                refused.append(Refusal(at, type(error).__name__, str(error)))
            values.append(value)
        return pa.array(values, pa.large_binary()), refused


def _validate(row: Any, schema: Schema) -> None:
    try:
        fastavro.validation.validate(row, schema, raise_errors=True)
    except fastavro.validation.ValidationError as error:
        raise ValidationError("; ".join(map(str, error.errors))) from error


@cache
def _physical(text: str) -> Schema:
    """For rows `with_integers`: of all logical types only decimals stay. A field's default is what is written."""

    def stripped(part: dict[str, Any]) -> dict[str, Any]:
        keep = part.get("logicalType") == "decimal"
        return {name: value for name, value in part.items() if keep or name != "logicalType"}

    schema, named = deepcopy(parsed(json.dumps(json.loads(text, object_hook=stripped))))
    for field in [field for kind in named.values() for field in kind.get("fields", ()) if "default" in field]:
        field["default"] = _default(field["type"], field["default"], named)
    return schema


def _default(schema: Schema, value: Any, named: Mapping[str, Schema]) -> Any:
    """A default as fastavro writes it; in JSON, bytes are a text."""
    schema = schema[0] if isinstance(schema, list) else schema
    form = schema if isinstance(schema, dict) else named.get(schema, {"type": schema})
    if form["type"] in ("bytes", "fixed") and isinstance(value, str):
        return value.encode("latin-1")
    if form["type"] == "array":
        return [_default(form["items"], each, named) for each in value]
    if isinstance(value, dict):
        kinds = {field["name"]: field["type"] for field in form.get("fields", ())}
        return {name: _default(form.get("values", kinds.get(name)), its, named) for name, its in value.items()}
    return value


def _refuses_null(schema: Schema) -> bool:
    """Whether rows have to be validated: a null where none may be would be written as false."""
    if isinstance(schema, list):
        return any(map(_refuses_null, schema))
    if not isinstance(schema, dict):
        return False
    inner = [field["type"] for field in schema.get("fields", ())]
    inner += [schema[part] for part in ("items", "values") if part in schema]
    return not all(map(nullable, inner)) or any(map(_refuses_null, inner))


def with_integers(column: pa.StructArray) -> pa.StructArray:
    """With days and times as the integers that Avro has for them, in microseconds."""
    return column.cast(_retyped(column.type, _in_microseconds)).cast(_retyped(column.type, _as_integer))


def _retyped(kind: pa.DataType, change: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    def again(field: pa.Field) -> pa.Field:
        return field.with_type(_retyped(field.type, change)).with_nullable(True)  # a null struct has null fields

    if t.is_struct(kind):
        return pa.struct([again(field) for field in kind])
    if is_list(kind):
        return (pa.list_ if t.is_list(kind) else pa.large_list)(again(kind.value_field))
    if t.is_map(kind):
        return pa.map_(_retyped(kind.key_type, change), again(kind.item_field))
    return change(kind)


def _in_microseconds(kind: pa.DataType) -> pa.DataType:
    if t.is_date(kind):
        return pa.date32()
    if t.is_time(kind):
        return pa.time64("us")
    if t.is_duration(kind):
        return pa.duration("us")
    return pa.timestamp("us", kind.tz) if t.is_timestamp(kind) else kind


def _as_integer(kind: pa.DataType) -> pa.DataType:
    return pa.int32() if t.is_date(kind) else pa.int64() if t.is_temporal(kind) else kind
