"""Avro schemas for rows, and what a registered schema lacks for them.

Nothing here asks a registry.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import pyarrow as pa
import pyarrow.types as t

from sinks._util.extras import needs_extra
from sinks.arrow.convert import Unfit, no_internals
from sinks.arrow.types import is_bytes, is_list, is_moment, is_text
from sinks.diagnosis import SchemaChange

with needs_extra("avro"):
    from fastavro.schema import SchemaParseException, UnknownType, parse_schema

Schema = Any
"""A schema of Avro as JSON: a dict, a name, or a list, which is a union."""

_MOST_DIGITS = 38
"""The most digits of a decimal in Spark."""
UUID = "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
_LOGICAL = {
    *("date", "decimal", "duration", "uuid", "time-millis", "time-micros"),
    *(
        f"{kind}-{unit}"
        for kind in ("timestamp", "local-timestamp")
        for unit in ("millis", "micros", "nanos")
    ),
}
"""The logical types of Avro. Readers ignore others."""
_ESSENTIAL = (
    "type",
    "name",
    "fields",
    "items",
    "values",
    "symbols",
    "size",
    "logicalType",
    "precision",
    "scale",
)


@dataclass(frozen=True)
class Merged:
    """A schema that takes the rows.

    It is the registered schema with `changes`, or a first schema. `unfit` says what no change can
    fix.
    """

    text: str
    changes: tuple[SchemaChange, ...] = ()
    unfit: tuple[str, ...] = ()


@cache
def merged(registered: str | None, value: pa.StructType, name: str = "") -> Merged:
    """Return the registered schema with room for rows of this type.

    Without a registered schema, make one that is called `name`.
    """
    unfit = [*_unnameable(value, "")]
    for where, kind in (
        *((f"column {field.name!r}: ", field.type) for field in value),
        ("", value),
    ):
        try:
            no_internals(kind)
        except Unfit as error:
            unfit.append(f"{where}{error}")
            break
    if unfit:
        return Merged(registered or "", unfit=tuple(unfit))
    text = registered or json.dumps({"type": "record", "name": name, "fields": []})
    try:
        merge = _Merge(parsed(text)[1])
        before = json.loads(text)
        if not isinstance(before, dict) or before["type"] != "record":
            raise ValueError(f"the registered schema is no record: {registered}")
        after = merge.record(before, value, "")
        text = json.dumps(after) if merge.changes else text
        parsed(text)
    except ValueError as error:
        return Merged(text, unfit=(str(error),))
    return Merged(text, tuple(merge.changes) if registered else (), tuple(merge.unfit))


@cache
def parsed(text: str) -> tuple[Schema, Mapping[str, Schema]]:
    """Return a schema with full names, as fastavro takes it, and its named types.

    Raises ValueError for a string that is not a schema.
    """
    named: dict[str, Schema] = {}
    try:
        return parse_schema(json.loads(text), named), named
    except (SchemaParseException, UnknownType, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"fastavro does not take the schema: {error!r}") from error


def hash_of(text: str) -> str:
    """Hash all of a schema that decides how bytes are read."""
    return hashlib.sha256(essence(text).encode()).hexdigest()[:16]


def essence(text: str) -> str:
    """Return all of a schema that decides how bytes are read.

    That is the schema with full names, and without docs, defaults and aliases. A string that is not
    a schema is its own essence.
    """
    try:
        return json.dumps(_essential(parsed(text)[0]), sort_keys=True)
    except ValueError:
        return text


def _essential(schema: Schema) -> Schema:
    if isinstance(schema, list):
        return [_essential(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    parts = {part: _essential(schema[part]) for part in _ESSENTIAL if part in schema}
    return parts["type"] if parts.keys() == {"type"} else parts


def shown(text: str) -> str:
    """Write a schema on one line."""
    return json.dumps(json.loads(text))


def form_of(schema: Schema, named: Mapping[str, Schema]) -> Mapping[str, Any] | None:
    """Return the one type of a field besides null, or None for a union of several types."""
    if isinstance(schema, list):
        branches = [branch for branch in schema if branch != "null"]
        return form_of(branches[0], named) if len(branches) == 1 else None
    if not isinstance(schema, dict):
        return form_of(named[schema], named) if schema in named else {"type": schema}
    return schema


def has(form: Mapping[str, Any]) -> str:
    """Return a type and its logical type as one word."""
    logical = form.get("logicalType")
    return str(form["type"]) + (logical if logical in _LOGICAL else "")


def nullable(schema: Schema) -> bool:
    return schema == "null" or (isinstance(schema, list) and "null" in schema)


def null_first(schema: Schema) -> bool:
    """Tell whether null may be the default."""
    return schema == "null" or (isinstance(schema, list) and schema[:1] == ["null"])


def _below(path: str, step: str) -> str:
    return f"{path}.{step}" if path else step


def _unnameable(kind: pa.DataType, path: str) -> Iterator[str]:
    """Yield what is wrong with the names of fields.

    Avro does not take each name, and readers confuse names that differ only in capital letters.
    """
    if t.is_struct(kind):
        names = Counter(field.name.lower() for field in kind)
        for field in kind:
            where = _below(path, field.name)
            if not field.name.isascii() or not field.name.isidentifier():
                yield (
                    f"column {where!r}: a name in Avro has letters, digits and _ only, and no "
                    "digit first: rename it"
                )
            if names[field.name.lower()] > 1:
                yield f"column {where!r} comes twice, but for capitals"
            yield from _unnameable(field.type, where)
    elif is_list(kind):
        yield from _unnameable(kind.value_type, path)
    elif t.is_map(kind):
        yield from _unnameable(kind.key_type, path)
        yield from _unnameable(kind.item_type, path)


class _Merge:
    """A merge of a schema with the type of rows.

    It collects what it changes in the schema, and what it cannot change.
    """

    def __init__(self, named: Mapping[str, Schema]) -> None:
        short = Counter(name.rpartition(".")[2] for name in named)
        self.named = {
            **named,
            **{last: named[n] for n in named if short[last := n.rpartition(".")[2]] == 1},
        }
        self.changes: list[SchemaChange] = []
        self.unfit: list[str] = []

    def record(self, schema: Mapping[str, Any], kind: pa.StructType, path: str) -> Schema:
        columns = {field.name: field.type for field in kind}
        known = {field["name"] for field in schema["fields"]}
        capitals = {name.lower(): name for name in known}
        fields = []
        for field in schema["fields"]:
            where = _below(path, field["name"])
            if field["name"] in columns:
                fields.append(
                    {**field, "type": self.of(field["type"], columns[field["name"]], where)}
                )
            else:
                fields.append(field)
                if "default" not in field and not null_first(field["type"]):
                    self.unfit.append(f"the rows lack the field {where!r}, which has no default")
        for name, column in columns.items():
            where = _below(path, name)
            if name in known:
                continue
            if name.lower() in capitals:
                self.unfit.append(
                    f"column {where!r}: the field is called {capitals[name.lower()]!r}"
                )
                continue
            namespace = _below(schema.get("namespace", ""), schema["name"])
            optional = ["null", self.new(column, where, name, namespace)]
            fields.append({"name": name, "type": optional, "default": None})
            self._change(where, "add", f"add the field {where}: {json.dumps(optional)}")
        return {**schema, "fields": fields}

    def new(self, kind: pa.DataType, path: str, name: str, namespace: str) -> Schema:
        """Return a schema for a column without a field.

        Whatever may be null in Spark may be null here, except keys of maps.
        """

        def optional(inner: pa.DataType, path: str, called: str) -> Schema:
            return ["null", self.new(inner, path, called, _below(namespace, name))]

        record = {"type": "record", "name": name, "namespace": namespace}
        if t.is_struct(kind):
            fields = [
                (field.name, optional(field.type, _below(path, field.name), field.name))
                for field in kind
            ]
            return record | {
                "fields": [{"name": name, "type": inner, "default": None} for name, inner in fields]
            }
        if is_list(kind):
            return {"type": "array", "items": optional(kind.value_type, f"{path}[]", name)}
        if t.is_map(kind):
            if is_text(kind.key_type):
                return {"type": "map", "values": optional(kind.item_type, f"{path}{{}}", name)}
            key = self.new(kind.key_type, _below(path, "key"), "key", _below(namespace, name))
            item = optional(kind.item_type, _below(path, "value"), "value")
            fields = [("key", key), ("value", item)]
            return {
                "type": "array",
                "items": record | {"fields": [{"name": n, "type": inner} for n, inner in fields]},
            }
        primitive = _primitive(kind)
        if primitive is None:
            self.unfit.append(
                f"column {path!r}: there is no type of Avro for {kind}; cast it to another"
            )
            return "null"
        return primitive if len(primitive) > 1 else primitive["type"]

    def of(self, schema: Schema, kind: pa.DataType, path: str) -> Schema:
        """Return the schema of a field, an element or a value, with room for this type."""
        if t.is_null(kind):
            if not nullable(schema):
                self.unfit.append(f"column {path!r} is always null, and the field takes no null")
            return schema
        if isinstance(schema, list):
            if len([branch for branch in schema if branch != "null"]) != 1:
                self.unfit.append(
                    f"the field {path!r} is a union of several types: {json.dumps(schema)}"
                )
                return schema
            return [
                branch if branch == "null" else self.of(branch, kind, path) for branch in schema
            ]
        if isinstance(schema, str) and schema in self.named:
            return self._shared(schema, kind, path)
        form = schema if isinstance(schema, dict) else {"type": schema}
        if t.is_struct(kind) and form["type"] == "record":
            return self.record(form, kind, path)
        if is_list(kind) and form["type"] == "array":
            return {**form, "items": self.of(form["items"], kind.value_type, f"{path}[]")}
        if t.is_map(kind) and is_text(kind.key_type) and form["type"] == "map":
            return {**form, "values": self.of(form["values"], kind.item_type, f"{path}{{}}")}
        if t.is_map(kind) and not is_text(kind.key_type) and form["type"] == "array":
            entry = pa.struct([("key", kind.key_type), ("value", kind.item_type)])
            return {**form, "items": self.of(form["items"], entry, f"{path}[]")}
        return self._simple(schema, form, kind, path)

    def _shared(self, name: str, kind: pa.DataType, path: str) -> Schema:
        """Check a named type that is defined elsewhere, and leave it as it is.

        Any change would apply to the other places as well, so a needed change is unfit.
        """
        before = len(self.changes)
        self.of(self.named[name], kind, path)
        if len(self.changes) > before:
            del self.changes[before:]
            self.unfit.append(
                f"the field {path!r} is of the type {name!r}, which stands elsewhere: widen it by "
                "hand"
            )
        return name

    def _simple(
        self, schema: Schema, form: Mapping[str, Any], kind: pa.DataType, path: str
    ) -> Schema:
        wanted = _primitive(kind)
        if wanted:
            there = has(form)
            needs = has(wanted)
            if needs == "bytesdecimal" and there in ("bytesdecimal", "fixeddecimal"):
                return self._decimal(form, wanted, path)
            if there == needs or (needs, there) in _WIDER or there in _BY_VALUE.get(needs, ()):
                return schema
            if (there, needs) in _WIDER:
                self._change(path, "widen", f"widen the field {path}: {there} to {needs}")
                return {**schema, "type": needs} if isinstance(schema, dict) else needs
        self.unfit.append(f"column {path!r} is {kind}, and the field is {json.dumps(schema)}")
        return schema

    def _decimal(self, form: Mapping[str, Any], wanted: Mapping[str, Any], path: str) -> Schema:
        scale = form.get("scale", 0)
        precision = wanted["precision"] - wanted["scale"] + scale
        if wanted["scale"] > scale or (precision > _MOST_DIGITS and form["type"] == "bytes"):
            self.unfit.append(
                f"column {path!r} is decimal({wanted['precision']},{wanted['scale']}), and the "
                f"field is decimal({form['precision']},{scale}), whose scale stays: readers of "
                "another one would misplace the point"
            )
        elif precision > form["precision"] and form["type"] == "bytes":
            # of a fixed one, value by value
            what = (
                f"widen the field {path}: decimal({form['precision']},{scale}) to "
                f"decimal({precision},{scale})"
            )
            self._change(path, "widen", what)
            return {**form, "precision": precision}
        return form

    def _change(self, path: str, step: str, statement: str) -> None:
        self.changes.append(SchemaChange(path, statement, step, locks="nothing"))


_WIDER = {("int", "long"), ("float", "double")}
_MILLIS = ("longtimestamp-millis", "longlocal-timestamp-millis")
_BY_VALUE = {
    "string": ("enum", "stringuuid"),
    "bytes": ("fixed",),
    "int": _MILLIS,
    "long": _MILLIS,
    "longtimestamp-micros": ("longtimestamp-millis",),
    "longlocal-timestamp-micros": ("longlocal-timestamp-millis",),
    "longtime-micros": ("inttime-millis",),
}
"""Other types that take a type, though perhaps not each of its values. A number counts as
milliseconds."""


def _primitive(kind: pa.DataType) -> dict[str, Any] | None:
    if t.is_decimal(kind):
        return {
            "type": "bytes",
            "logicalType": "decimal",
            "precision": kind.precision,
            "scale": kind.scale,
        }
    return next((dict(schema) for fits, schema in _PRIMITIVES if fits(kind)), None)


_PRIMITIVES: list[tuple[Callable[[pa.DataType], bool], Mapping[str, Any]]] = [
    (t.is_boolean, {"type": "boolean"}),
    (t.is_int8, {"type": "int"}),
    (t.is_int16, {"type": "int"}),
    (t.is_int32, {"type": "int"}),
    (t.is_int64, {"type": "long"}),
    (t.is_float32, {"type": "float"}),
    (t.is_float64, {"type": "double"}),
    (is_text, {"type": "string"}),
    (is_bytes, {"type": "bytes"}),
    (t.is_date, {"type": "int", "logicalType": "date"}),
    (t.is_time, {"type": "long", "logicalType": "time-micros"}),
    (t.is_duration, {"type": "long"}),
    (is_moment, {"type": "long", "logicalType": "timestamp-micros"}),
    (t.is_timestamp, {"type": "long", "logicalType": "local-timestamp-micros"}),
]
