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
        if lacking := [*fit.unfit, *(change.statement for change in fit.changes)]:
            raise SchemaMismatch(
                f"the schema number {self.schema_id} does not take the rows: {'; '.join(lacking)}"
            )
        known = self.text, column.type
        rows, finer = with_integers(column, self.text)
        at_once = self._at_once(rows) if _AGREES.get(known, True) else None
        if at_once is not None and known in _AGREES:
            return at_once, finer
        values, refused = self._row_by_row(rows)
        if at_once is not None and values.null_count < len(values):
            _AGREES[known] = not refused and at_once.equals(values)
            if not _AGREES[known]:
                logger.warning(
                    "rows of %s are written one by one: all at once, they would be other bytes",
                    column.type,
                )
        return values, sorted([*finer, *refused], key=lambda refusal: refusal.row)

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
        schema = _physical(self.text)
        prefix = self._prefix
        plain = python_values(rows.type)
        fitting = _fitting(*parsed(self.text), rows.type, "") or _as_it_is
        strict = _refuses_null(schema)
        values = list[bytes | None]()
        refused = list[Refusal]()
        try:
            given = rows.to_pylist()
        except ValueError:  # Python cannot hold one of them (text that is no UTF-8)
            given = list(rows)
        for at, row in enumerate(given):
            value = None
            try:
                row = fitting(plain(row.as_py() if isinstance(row, pa.Scalar) else row))
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
    """Return the schema for rows that `with_integers` and `_fitting` have converted.

    Of all logical types, only decimals of bytes and UUIDs stay. The default of a field is the value
    that fastavro writes.
    """

    def stripped(part: dict[str, Any]) -> dict[str, Any]:
        keep = (part.get("type"), part.get("logicalType")) in (
            ("bytes", "decimal"),
            ("string", "uuid"),
        )
        return {name: value for name, value in part.items() if keep or name != "logicalType"}

    schema, named = deepcopy(parsed(json.dumps(json.loads(text, object_hook=stripped))))
    for field in [
        field for kind in named.values() for field in kind.get("fields", ()) if "default" in field
    ]:
        field["default"] = _default(field["type"], field["default"], named)
    return schema


def _default(schema: Schema, value: Any, named: Mapping[str, Schema]) -> Any:
    """Convert a default to the value that fastavro writes. In JSON, bytes are a string."""
    schema = schema[0] if isinstance(schema, list) else schema
    form = schema if isinstance(schema, dict) else named.get(schema, {"type": schema})
    if form["type"] in ("bytes", "fixed") and isinstance(value, str):
        return value.encode("latin-1")
    if form["type"] == "array":
        return [_default(form["items"], each, named) for each in value]
    if isinstance(value, dict):
        kinds = {field["name"]: field["type"] for field in form.get("fields", ())}
        return {
            name: _default(form.get("values", kinds.get(name)), its, named)
            for name, its in value.items()
        }
    return value


def _refuses_null(schema: Schema) -> bool:
    """Tell whether rows must be validated, because some type takes no null.

    Otherwise fastavro would write such a null as false.
    """
    if isinstance(schema, list):
        return any(map(_refuses_null, schema))
    if not isinstance(schema, dict):
        return False
    inner = [field["type"] for field in schema.get("fields", ())]
    inner += [schema[part] for part in ("items", "values") if part in schema]
    return not all(map(nullable, inner)) or any(map(_refuses_null, inner))


# -------------------------------------------------------------------- what Avro has in another form
def with_integers(column: pa.StructArray, text: str) -> tuple[pa.StructArray, list[Refusal]]:
    """Convert days and times to the integers that the schema has for them, in its unit.

    Also returns the rows that it refuses, because they have a finer time than the unit. These rows
    become null.
    """
    schema, named = parsed(text)

    def made(rows: pa.StructArray) -> pa.StructArray:
        in_unit = rows.cast(_retyped(rows.type, _in_unit, schema, named))
        return in_unit.cast(_retyped(in_unit.type, _as_integer, schema, named))

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
        others = pa.array([None if at in bad else at for at in range(len(column))], pa.int64())
        return made(column.take(others)), refused


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
        # of a null struct
        return field.with_type(_retyped(field.type, change, schema, named)).with_nullable(True)

    if t.is_struct(kind):
        fields = {field["name"]: field["type"] for field in form.get("fields", ())}
        return pa.struct([again(field, fields.get(field.name, "")) for field in kind])
    if is_list(kind):
        return (pa.list_ if t.is_list(kind) else pa.large_list)(
            again(kind.value_field, form.get("items", ""))
        )
    if t.is_map(kind):
        key, value = _entry(form, named)
        return pa.map_(_retyped(kind.key_type, change, key, named), again(kind.item_field, value))
    return change(kind, has(form))


def _entry(form: Mapping[str, Any], named: Mapping[str, Schema]) -> tuple[Schema, Schema]:
    """Return the schemas of a map's key and value.

    The map is Avro's own, or an array of records.
    """
    if form["type"] == "map":
        return "string", form["values"]
    entry = form_of(form.get("items", ""), named) or {}
    fields = {field["name"]: field["type"] for field in entry.get("fields", ())}
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
        kinds = {field.name: field.type for field in kind}
        found = {
            name: inner
            for name, its in ((field["name"], field["type"]) for field in form["fields"])
            if name in kinds
            and (inner := _fitting(its, named, kinds[name], f"{path}.{name}" if path else name))
        }
        return (
            _given(lambda row: row | {name: inner(row[name]) for name, inner in found.items()})
            if found
            else None
        )
    if is_list(kind):
        each = _fitting(form["items"], named, kind.value_type, f"{path}[]")
        return _given(lambda values: list(map(each, values))) if each else None
    if t.is_map(kind):
        return _of_map(form, named, kind, path)
    return _of_value(form, kind, path)


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
    return _given(
        lambda entries: [{"key": of_key(e["key"]), "value": of_item(e["value"])} for e in entries]
    )


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
    sign, digits, exponent = value.as_tuple()
    whole: int = int("".join(map(str, digits))) * 10 ** (int(exponent) + form.get("scale", 0))
    try:
        if whole >= 10 ** form["precision"]:
            raise OverflowError
        return (-whole if sign else whole).to_bytes(form["size"], "big", signed=True)
    except OverflowError:
        what = f"decimal({form['precision']},{form.get('scale', 0)}) of {form['size']} bytes"
        raise ValidationError(
            f"column {path!r}: {value} is too large for the field, {what}"
        ) from None


def _as_it_is(value: Any) -> Any:
    return value


def _given(change: Fit) -> Fit:
    return lambda value: None if value is None else change(value)
