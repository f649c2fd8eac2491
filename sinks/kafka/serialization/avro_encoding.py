"""Records of Avro, with fastavro."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.types as t

from sinks.arrow.types import is_list, is_text
from sinks.extras import needs_extra
from sinks.kafka.row_bytes import Bytes, varints
from sinks.kafka.serialization import avro
from sinks.kafka.serialization.avro import Schema, null_first, nullable
from sinks.kafka.serialization.by_columns import Mask, Parts, RowByRow, floats, only, text, valid, whole_numbers
from sinks.kafka.serialization.schema import Encode, Format, Merged, ValidationError, once

with needs_extra("avro"):
    import fastavro
    import fastavro.schema
    import fastavro.validation


class Avro(Format):
    name, kind = "Avro", "AVRO"

    def merged(self, registered: str | None, value: pa.StructType, name: str) -> Merged:
        return avro.merged(registered, value, name)

    def essence(self, text: str) -> str:
        return avro.essence(text)

    def problem_of(self, text: str) -> str:
        try:
            _parsed(text)
        except (fastavro.schema.SchemaParseException, fastavro.schema.UnknownType, ValueError) as error:
            return f"fastavro does not take the schema: {error!r}"
        return ""

    def shown(self, text: str) -> str:
        return json.dumps(json.loads(text))

    def at_once(self, text: str, rows: pa.StructArray) -> Parts:
        return _record(_parsed(text)[0], rows, valid(rows))

    def encoder(self, text: str, value: pa.StructType) -> Encode:
        schema, strict = _parsed(text)
        plain = _plain(value) or _same

        def encode(row: Any, out: IO[bytes]) -> None:
            row = plain(row)
            if strict:
                _validate(row, schema)
            fastavro.schemaless_writer(out, schema, row, disable_tuple_notation=True)

        return encode


def _record(schema: Schema, rows: pa.StructArray, where: Mask) -> Parts:
    """Of the rows that are there."""
    columns = {field.name: column for field, column in zip(rows.type, rows.flatten(), strict=True)}
    parts: Parts = []
    for field in schema["fields"]:
        column = columns.get(field["name"])
        if column is None and null_first(field["type"]) and field.get("default") is None:
            parts.append(only(where, 0))
        elif column is None:
            raise RowByRow
        else:
            parts += _union(field["type"], column, where)
    return parts


def _union(schema: Schema, column: pa.Array, where: Mask) -> Parts:
    if not isinstance(schema, list):
        if not valid(column)[where].all():
            raise RowByRow
        return _value(schema, column, where)
    null = schema.index("null") if len(schema) == 2 and "null" in schema else -1
    if null < 0:
        raise RowByRow
    there = where & valid(column)
    branch = np.where(there, 2 * (1 - null), 2 * null).astype(np.uint8)
    which = Bytes(branch[None], np.ones(len(column), np.int64))
    return [only(where, which), *_value(schema[1 - null], column, there)]


def _value(schema: Schema, column: pa.Array, where: Mask) -> Parts:
    kind = schema["type"] if isinstance(schema, dict) else schema
    if kind == "record":
        return _record(schema, column, where)
    if kind in ("int", "long"):
        return [only(where, varints(whole_numbers(column)))]
    if kind == "boolean":
        return [only(where, Bytes(whole_numbers(column).astype(np.uint8)[None], np.ones(len(column), np.int64)))]
    if kind in ("float", "double"):
        return [only(where, floats(column, pa.float32() if kind == "float" else pa.float64()))]
    if kind in ("string", "bytes") and not (isinstance(schema, dict) and "logicalType" in schema):
        count, data = text(column)
        return [only(where, count), data]
    raise RowByRow


def _validate(row: Any, schema: Schema) -> None:
    try:
        fastavro.validation.validate(row, schema, raise_errors=True)
    except fastavro.validation.ValidationError as error:
        raise ValidationError("; ".join(map(str, error.errors))) from error


@cache
def _parsed(text: str) -> tuple[Schema, bool]:
    """Ready for fastavro, dates and times as the numbers that they are written as, which Python's could not hold; and
    whether rows have to be validated, since a null where none may be would be written as false."""
    schema = _physical(json.loads(text))
    return fastavro.parse_schema(schema), _refuses_null(schema)


def _physical(schema: Schema) -> Schema:
    if isinstance(schema, list):
        return [_physical(branch) for branch in schema]
    if not isinstance(schema, dict):
        return schema
    keep = schema.get("logicalType") == "decimal"
    found = {part: value for part, value in schema.items() if keep or part != "logicalType"}
    for part in ("type", "items", "values"):
        if part in found:
            found[part] = _physical(found[part])
    if "fields" in found:
        found["fields"] = [_field(field) for field in found["fields"]]
    return found


def _field(field: Mapping[str, Any]) -> dict[str, Any]:
    """One that rows lack is null where it can be."""
    by_default = {"default": None} if null_first(field["type"]) else {}
    return {**by_default, **field, "type": _physical(field["type"])}


def _refuses_null(schema: Schema) -> bool:
    """Whether a value of a row, below the record itself, may not be null."""
    if isinstance(schema, list):
        return any(_refuses_null(branch) for branch in schema)
    if not isinstance(schema, dict):
        return False
    inner = [field["type"] for field in schema.get("fields", ())]
    inner += [schema[part] for part in ("items", "values") if part in schema]
    return not all(map(nullable, inner)) or any(map(_refuses_null, inner))


def _plain(kind: pa.DataType) -> Callable[[Any], Any] | None:
    """From a value as Arrow gives it, where maps are lists of pairs, to what fastavro takes; None if that is alike."""
    if t.is_struct(kind):
        inner = {field.name: plain for field in kind if (plain := _plain(field.type))}
        return (
            _unless_none(lambda row: row | {name: plain(row[name]) for name, plain in inner.items()}) if inner else None
        )
    if is_list(kind):
        each = _plain(kind.value_type)
        return _unless_none(lambda values: list(map(each, values))) if each else None
    if t.is_map(kind):
        key, item = _plain(kind.key_type) or _same, _plain(kind.item_type) or _same
        if is_text(kind.key_type):
            return _unless_none(lambda pairs: {k: item(v) for k, v in once(pairs)})
        return _unless_none(lambda pairs: [{"key": key(k), "value": item(v)} for k, v in pairs])
    return None


def _unless_none(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else change(value)


def _same(value: Any) -> Any:
    return value
