"""From Arrow to Avro in Confluent's wire format, in tasks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from io import BytesIO
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as t

from sinks._util.extras import needs_extra
from sinks._util.log import get_logger
from sinks.arrow.types import is_bytes, is_list, is_text
from sinks.arrow.values import ValidationError, python_values
from sinks.dead_letters import Refusal
from sinks.errors import SchemaMismatch
from sinks.kafka.row_bytes import rows_of
from sinks.kafka.serialization.avro import (
    UUID,
    Schema,
    form_of,
    has,
    hash_of,
    merged,
    nullable,
    parsed,
)
from sinks.kafka.serialization.by_columns import RowByRow, record, valid

with needs_extra("avro"):
    import fastavro.validation

logger = get_logger(__name__)

MAGIC = b"\0"
"""The first byte of Confluent's wire format. Four bytes of the schema's id follow."""

_MOST_BYTES = 1 << 30
"""The most bytes of columns that are encoded at once, because the result has offsets of 32 bits."""
_AGREES: dict[tuple[str, pa.DataType], bool] = {}
"""True for a schema and type whose first rows were the same bytes at once and row by row."""


@dataclass(frozen=True)
class AvroWriter:
    """A registered schema, as tasks need it."""

    schema_id: int
    text: str

    @property
    def named(self) -> dict[str, Any]:
        """The schema's id and hash, for the proof of a transaction."""
        return {"id": self.schema_id, "hash": hash_of(self.text)}

    def encoded(self, column: pa.StructArray) -> tuple[pa.LargeBinaryArray, list[Refusal]]:
        """Encode each row to a value, and return the rows that the schema does not take.

        A null row, and a row that the schema does not take, become null. Raises SchemaMismatch for
        columns that the schema has no place for, because rows that were kept may be those of an
        earlier query.
        """
        fit = merged(self.text, column.type)
        needed = [change.statement for change in fit.changes]
        if lacking := [*fit.unfit, *needed]:
            raise SchemaMismatch(
                f"the schema number {self.schema_id} does not take the rows: {'; '.join(lacking)}"
            )
        known = self.text, column.type
        rows, finer = with_integers(column, self.text)
        at_once = None
        if _AGREES.get(known, True):
            at_once = self._at_once(rows)
        if at_once is not None and known in _AGREES:
            return at_once, finer
        values, refused = self._row_by_row(rows)
        if at_once is not None and values.null_count < len(values):
            agrees = not refused and at_once.equals(values)
            _AGREES[known] = agrees
            if not agrees:
                logger.warning(
                    "rows of %s are written one by one: all at once, they would be other bytes",
                    column.type,
                )
        refusals = [*finer, *refused]
        refusals.sort(key=lambda refusal: refusal.row)
        return values, refusals

    @property
    def _prefix(self) -> bytes:
        number = self.schema_id.to_bytes(4, "big")
        return MAGIC + number

    def _at_once(self, rows: pa.StructArray) -> pa.Array | None:
        if rows.nbytes > _MOST_BYTES:
            return None
        schema = _physical(self.text)
        try:
            parts = record(schema, rows, valid(rows))
        except RowByRow:
            return None
        records = rows_of(len(rows), [*self._prefix, *parts])
        values = records.cast(pa.large_binary())
        if rows.null_count:
            return pc.if_else(rows.is_valid(), values, None)
        return values

    def _row_by_row(self, rows: pa.StructArray) -> tuple[pa.LargeBinaryArray, list[Refusal]]:
        schema = _physical(self.text)
        registered, named = parsed(self.text)
        prefix = self._prefix
        plain = python_values(rows.type)
        fitting = _fitting(registered, named, rows.type, "") or _as_it_is
        strict = _refuses_null(schema)

        def encoded(given: Any) -> bytes | None:
            value = given.as_py() if isinstance(given, pa.Scalar) else given
            row = fitting(plain(value))
            if row is None:
                return None
            if strict:
                _validate(row, schema)
            out = BytesIO()
            out.write(prefix)
            fastavro.schemaless_writer(
                out,
                schema,
                row,
                disable_tuple_notation=True,
            )
            return out.getvalue()

        values = list[bytes | None]()
        refused = list[Refusal]()
        try:
            given = rows.to_pylist()
        except ValueError:  # Python cannot hold one of them (text that is no UTF-8)
            given = list(rows)
        for at, row in enumerate(given):
            value = None
            try:
                value = encoded(row)
            except Exception as error:
                refused.append(Refusal(at, type(error).__name__, str(error)))
            values.append(value)
        return pa.array(values, pa.large_binary()), refused


def _validate(row: Any, schema: Schema) -> None:
    try:
        fastavro.validation.validate(row, schema, raise_errors=True)
    except fastavro.validation.ValidationError as error:
        raise ValidationError("; ".join(map(str, error.errors))) from error


_PHYSICAL = (("bytes", "decimal"), ("string", "uuid"))
"""Types and logical types that fastavro itself converts."""


@cache
def _physical(text: str) -> Schema:
    """Return the schema for rows that `with_integers` and `_fitting` have converted.

    Of all logical types, only decimals of bytes and UUIDs stay. The default of a field is the value
    that fastavro writes.
    """

    def stripped(part: dict[str, Any]) -> dict[str, Any]:
        kind = part.get("type"), part.get("logicalType")
        if kind in _PHYSICAL:
            return part
        return {name: value for name, value in part.items() if name != "logicalType"}

    physical = json.loads(text, object_hook=stripped)
    schema, named = deepcopy(parsed(json.dumps(physical)))
    for kind in named.values():
        for field in kind.get("fields", ()):
            if "default" in field:
                field["default"] = _default(field["type"], field["default"], named)
    return schema


def _default(schema: Schema, value: Any, named: Mapping[str, Schema]) -> Any:
    """Convert a default to the value that fastavro writes. In JSON, bytes are a string."""
    if isinstance(schema, list):
        schema = schema[0]
    form = schema if isinstance(schema, dict) else named.get(schema, {"type": schema})
    if form["type"] in ("bytes", "fixed") and isinstance(value, str):
        return value.encode("latin-1")
    if form["type"] == "array":
        return [_default(form["items"], each, named) for each in value]
    if isinstance(value, dict):
        kinds = _types_of_fields(form)
        defaults = {}
        for name, its in value.items():
            kind = form.get("values", kinds.get(name))
            defaults[name] = _default(kind, its, named)
        return defaults
    return value


def _types_of_fields(form: Mapping[str, Any]) -> dict[str, Schema]:
    """Return the schemas of a record's fields, by name; there are none for another type."""
    fields = form.get("fields", ())
    return {field["name"]: field["type"] for field in fields}


def _refuses_null(schema: Schema) -> bool:
    """Tell whether rows must be validated, because some type takes no null.

    Otherwise fastavro would write such a null as false.
    """
    if isinstance(schema, list):
        return any(map(_refuses_null, schema))
    if not isinstance(schema, dict):
        return False
    inner = list(_types_of_fields(schema).values())
    inner += [schema[part] for part in ("items", "values") if part in schema]
    if not all(map(nullable, inner)):
        return True
    return any(map(_refuses_null, inner))


# -------------------------------------------------------------------- what Avro has in another form
def with_integers(column: pa.StructArray, text: str) -> tuple[pa.StructArray, list[Refusal]]:
    """Convert days and times to the integers that the schema has for them, in its unit.

    Also returns the rows that it refuses, because they have a finer time than the unit. These rows
    become null.
    """
    schema, named = parsed(text)

    def made(rows: pa.StructArray) -> pa.StructArray:
        units = _retyped(rows.type, _in_unit, schema, named)
        in_unit = rows.cast(units)
        integers = _retyped(in_unit.type, _as_integer, schema, named)
        return in_unit.cast(integers)

    try:
        return made(column), []
    except pa.ArrowInvalid:
        refused = list[Refusal]()
        for at in range(len(column)):
            try:
                made(column.slice(at, 1))
            except pa.ArrowInvalid as error:
                why = f"a time is finer than the schema's unit: {error}"
                refused.append(Refusal(at, ValidationError.__name__, why))
        bad = {refusal.row for refusal in refused}
        places = [None if at in bad else at for at in range(len(column))]
        others = column.take(pa.array(places, pa.int64()))
        return made(others), refused


Change = Callable[[pa.DataType, str], pa.DataType]


def _retyped(
    kind: pa.DataType, change: Change, schema: Schema, named: Mapping[str, Schema]
) -> pa.DataType:
    """Return the type with each of its types that are not nested changed.

    `change` gets such a type, and what the schema has for it. That is "" if the schema has no such
    field.
    """
    form = form_of(schema, named) or {"type": ""}

    def again(field: pa.Field, schema: Schema) -> pa.Field:
        changed = _retyped(field.type, change, schema, named)
        # of a null struct
        return field.with_type(changed).with_nullable(True)

    if t.is_struct(kind):
        types = _types_of_fields(form)
        fields = [again(field, types.get(field.name, "")) for field in kind]
        return pa.struct(fields)
    if is_list(kind):
        element = again(kind.value_field, form.get("items", ""))
        return pa.list_(element) if t.is_list(kind) else pa.large_list(element)
    if t.is_map(kind):
        in_key, in_value = _entry(form, named)
        key = _retyped(kind.key_type, change, in_key, named)
        item = again(kind.item_field, in_value)
        return pa.map_(key, item)
    return change(kind, has(form))


def _entry(form: Mapping[str, Any], named: Mapping[str, Schema]) -> tuple[Schema, Schema]:
    """Return the schemas of a map's key and value.

    The map is Avro's own, or an array of records.
    """
    if form["type"] == "map":
        return "string", form["values"]
    entry = form_of(form.get("items", ""), named) or {}
    fields = _types_of_fields(entry)
    return fields.get("key", ""), fields.get("value", "")


def _in_unit(kind: pa.DataType, there: str) -> pa.DataType:
    unit = "ms" if there.endswith("-millis") else "us"
    if t.is_date(kind):
        return pa.date32()
    if t.is_time(kind):
        return pa.time32("ms") if unit == "ms" else pa.time64("us")
    if t.is_duration(kind):
        return pa.duration("us")
    return pa.timestamp(unit, kind.tz) if t.is_timestamp(kind) else kind


def _as_integer(kind: pa.DataType, _: str) -> pa.DataType:
    if t.is_date(kind) or t.is_time32(kind):
        return pa.int32()
    return pa.int64() if t.is_temporal(kind) else kind


Fit = Callable[[Any], Any]


def _fitting(
    schema: Schema, named: Mapping[str, Schema], kind: pa.DataType, path: str
) -> Fit | None:
    """Return a function that converts a value to one that fastavro writes as it is.

    The function raises ValidationError for a value that the type does not take. Return None if
    there is nothing to convert.
    """
    form = form_of(schema, named)
    if form is None:
        return None
    if t.is_struct(kind):
        return _of_struct(form, named, kind, path)
    if is_list(kind):
        each = _fitting(form["items"], named, kind.value_type, f"{path}[]")
        if each is None:
            return None
        return _given(lambda values: list(map(each, values)))
    if t.is_map(kind):
        return _of_map(form, named, kind, path)
    return _of_value(form, kind, path)


def _of_struct(
    form: Mapping[str, Any], named: Mapping[str, Schema], kind: pa.DataType, path: str
) -> Fit | None:
    columns = {field.name: field.type for field in kind}
    found = dict[str, Fit]()
    for name, schema in _types_of_fields(form).items():
        if name in columns:
            below = f"{path}.{name}" if path else name
            inner = _fitting(schema, named, columns[name], below)
            if inner is not None:
                found[name] = inner
    if not found:
        return None
    return _given(lambda row: row | {name: inner(row[name]) for name, inner in found.items()})


def _of_map(
    form: Mapping[str, Any], named: Mapping[str, Schema], kind: pa.DataType, path: str
) -> Fit | None:
    in_schema, of_schema = _entry(form, named)
    key = _fitting(in_schema, named, kind.key_type, f"{path}.key")
    item = _fitting(of_schema, named, kind.item_type, f"{path}{{}}")
    if key is None and item is None:
        return None
    of_key = key or _as_it_is
    of_item = item or _as_it_is
    if form["type"] == "map":
        return _given(lambda entries: {key: of_item(value) for key, value in entries.items()})

    def of_entry(entry: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "key": of_key(entry["key"]),
            "value": of_item(entry["value"]),
        }

    return _given(lambda entries: list(map(of_entry, entries)))


def _of_value(form: Mapping[str, Any], kind: pa.DataType, path: str) -> Fit | None:
    def require(fits: Callable[[Any], object], what: str) -> Fit:
        def fitting(value: Any) -> Any:
            if not fits(value):
                raise ValidationError(f"column {path!r}: {value!r} is {what}")
            return value

        return _given(fitting)

    there = has(form)
    if is_text(kind) and there == "enum":
        symbols = set(form["symbols"])
        return require(symbols.__contains__, f"none of the symbols of {form['name']}")
    if is_text(kind) and there == "stringuuid":
        return require(re.compile(UUID).fullmatch, "no UUID")
    if is_bytes(kind) and there == "fixed":
        return require(lambda value: len(value) == form["size"], f"not of {form['size']} bytes")
    if t.is_decimal(kind) and there == "fixeddecimal":
        return _given(lambda value: _fixed(value, form, path))
    return None


def _fixed(value: Decimal, form: Mapping[str, Any], path: str) -> bytes:
    """Encode a decimal as two's complement of the field's full size.

    fastavro writes other bytes for some values. Raises ValidationError if the value is too large
    for the field.
    """
    precision = form["precision"]
    scale = form.get("scale", 0)
    size = form["size"]
    sign, digits, exponent = value.as_tuple()
    significand = int("".join(map(str, digits)))
    whole: int = significand * 10 ** (int(exponent) + scale)
    signed = -whole if sign else whole
    try:
        if whole >= 10**precision:
            raise OverflowError
        return signed.to_bytes(size, "big", signed=True)
    except OverflowError:
        what = f"decimal({precision},{scale}) of {size} bytes"
        raise ValidationError(
            f"column {path!r}: {value} is too large for the field, {what}"
        ) from None


def _as_it_is(value: Any) -> Any:
    return value


def _given(change: Fit) -> Fit:
    return lambda value: None if value is None else change(value)
