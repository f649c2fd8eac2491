"""Avro schemas of rows: what a registered one lacks for them. Nothing here asks a registry."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.types as t

from sinks.arrow.types import is_bytes, is_list, is_moment, is_text
from sinks.diagnosis import SchemaChange
from sinks.kafka.serialization.schema import Merged, below, change, is_int, no_type, unnameable

Schema = Any
"""Of Avro, as JSON: a dict, a name, or a list, which is a union."""

_MOST_DIGITS = 38
"""Of a decimal of Spark."""
_ESSENTIAL = ("type", "name", "fields", "items", "values", "symbols", "size", "logicalType", "precision", "scale")


def merged(registered: str | None, value: pa.StructType, name: str) -> Merged:
    """`registered` with room for rows of this type, or, without one, a schema that is called `name`."""
    unfit = list(unnameable(value, "Avro", ""))
    if unfit:
        return Merged(registered or "", unfit=tuple(unfit))
    if registered is None:
        problems = list[str]()
        schema = _derived(value, "", name, "", problems)
        return Merged(json.dumps(schema), unfit=tuple(problems))
    before = json.loads(registered)
    if not isinstance(before, dict) or before.get("type") != "record":
        return Merged(registered, unfit=(f"the registered schema is no record: {registered}",))
    work = _Merge(_named(before))
    after = work.record(before, value, "")
    return Merged(json.dumps(after) if work.changes else registered, tuple(work.changes), tuple(work.unfit))


def essence(text: str) -> str:
    """What tells how bytes are read: the schema without docs, defaults and aliases, and with full names."""
    return json.dumps(_essence(json.loads(text), ""), sort_keys=True)


def nullable(schema: Schema) -> bool:
    return schema == "null" or (isinstance(schema, list) and "null" in schema)


def null_first(schema: Schema) -> bool:
    """Whether null may be the default."""
    return schema == "null" or (isinstance(schema, list) and schema[:1] == ["null"])


# ---------------------------------------------------------------------- a schema of its own
def _derived(kind: pa.DataType, path: str, name: str, namespace: str, problems: list[str]) -> Schema:
    """All that may be null in Spark, but the whole record and keys of maps, may be null here."""

    def optional(inner: pa.DataType, step: str, called: str) -> Schema:
        return ["null", _derived(inner, below(path, step), called, below(namespace, name), problems)]

    record = {"type": "record", "name": name, **({"namespace": namespace} if namespace else {})}
    if t.is_struct(kind):
        fields = [{"name": f.name, "type": optional(f.type, f.name, f.name), "default": None} for f in kind]
        return record | {"fields": fields}
    if is_list(kind):
        return {"type": "array", "items": optional(kind.value_type, "[]", name)}
    if t.is_map(kind):
        if is_text(kind.key_type):
            return {"type": "map", "values": optional(kind.item_type, "{}", name)}
        key = _derived(kind.key_type, below(path, "key"), "key", below(namespace, name), problems)
        fields = [{"name": "key", "type": key}, {"name": "value", "type": optional(kind.item_type, "value", "value")}]
        return {"type": "array", "items": record | {"fields": fields}}
    primitive = _primitive(kind)
    if primitive is None:
        problems.append(no_type(path, kind, "Avro"))
        return "null"
    return primitive if len(primitive) > 1 else primitive["type"]


def _primitive(kind: pa.DataType) -> dict[str, Any] | None:
    for fits, schema in _PRIMITIVES:
        if fits(kind):
            return dict(schema)
    if t.is_decimal(kind):
        return {"type": "bytes", "logicalType": "decimal", "precision": kind.precision, "scale": kind.scale}
    return None


_PRIMITIVES: list[tuple[Any, Mapping[str, Any]]] = [
    (t.is_boolean, {"type": "boolean"}),
    (is_int, {"type": "int"}),
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


# ---------------------------------------------------------------------- a registered one
class _Merge:
    def __init__(self, named: Mapping[str, Schema]) -> None:
        self.named = named
        self.changes: list[SchemaChange] = []
        self.unfit: list[str] = []

    def record(self, schema: Mapping[str, Any], kind: pa.StructType, path: str) -> Schema:
        columns = {field.name: field.type for field in kind}
        known = {field["name"] for field in schema["fields"]}
        capitals = {name.lower(): name for name in known}
        fields = []
        for field in schema["fields"]:
            where = below(path, field["name"])
            if field["name"] in columns:
                fields.append({**field, "type": self.of(field["type"], columns[field["name"]], where)})
            else:
                fields.append(field)
                if "default" not in field and not null_first(field["type"]):
                    self.unfit.append(f"the rows lack the field {where!r}, which has no default")
        for name, column in columns.items():
            where = below(path, name)
            if name in known:
                continue
            if name.lower() in capitals:
                self.unfit.append(f"column {where!r}: the field is called {capitals[name.lower()]!r}")
                continue
            namespace = ".".join(part for part in (schema.get("namespace"), schema["name"]) if part)
            kind_of_it = ["null", _derived(column, where, name, namespace, self.unfit)]
            fields.append({"name": name, "type": kind_of_it, "default": None})
            self.changes.append(change(where, "add", f"add the field {where}: {json.dumps(kind_of_it)}"))
        return {**schema, "fields": fields}

    def of(self, schema: Schema, kind: pa.DataType, path: str) -> Schema:
        """The schema of a field, an element or a value, with room for this type."""
        if t.is_null(kind):
            if not nullable(schema):
                self.unfit.append(f"column {path!r} is always null, and the field takes no null")
            return schema
        if isinstance(schema, list):
            others = [branch for branch in schema if branch != "null"]
            if len(others) != 1:
                self.unfit.append(f"the field {path!r} is a union of several types: {json.dumps(schema)}")
                return schema
            return [branch if branch == "null" else self.of(branch, kind, path) for branch in schema]
        if isinstance(schema, str) and schema in self.named:
            return self._shared(schema, kind, path)
        if isinstance(schema, dict) and isinstance(schema["type"], (dict, list)):
            return {**schema, "type": self.of(schema["type"], kind, path)}
        form = schema if isinstance(schema, dict) else {"type": schema}
        if t.is_struct(kind) and form["type"] == "record":
            return self.record(form, kind, path)
        if is_list(kind) and form["type"] == "array":
            return {**form, "items": self.of(form["items"], kind.value_type, f"{path}[]")}
        if t.is_map(kind):
            if is_text(kind.key_type) and form["type"] == "map":
                return {**form, "values": self.of(form["values"], kind.item_type, f"{path}{{}}")}
            if not is_text(kind.key_type) and form["type"] == "array":
                entry = pa.struct([("key", kind.key_type), ("value", kind.item_type)])
                return {**form, "items": self.of(form["items"], entry, f"{path}[]")}
        return self._primitive(schema, form, kind, path)

    def _shared(self, name: str, kind: pa.DataType, path: str) -> Schema:
        """A named type that stands elsewhere; what it would need there, others would get too."""
        before = len(self.changes)
        self.of(self.named[name], kind, path)
        if len(self.changes) > before:
            del self.changes[before:]
            self.unfit.append(f"the field {path!r} is of the type {name!r}, which stands elsewhere: widen it by hand")
        return name

    def _primitive(self, schema: Schema, form: Mapping[str, Any], kind: pa.DataType, path: str) -> Schema:
        wanted = _primitive(kind)
        if wanted and _kind(form) == _kind(wanted) == ("bytes", "decimal"):
            return self._decimal(form, wanted, path)
        if wanted and (_kind(form) == _kind(wanted) or (_kind(wanted), _kind(form)) in _NARROWER):
            return schema
        if wanted and (_kind(form), _kind(wanted)) in _NARROWER:
            self.changes.append(change(path, "widen", f"widen the field {path}: {form['type']} to {wanted['type']}"))
            return {**schema, "type": wanted["type"]} if isinstance(schema, dict) else wanted["type"]
        self.unfit.append(f"column {path!r} is {kind}, and the field is {json.dumps(schema)}")
        return schema

    def _decimal(self, form: Mapping[str, Any], wanted: Mapping[str, Any], path: str) -> Schema:
        scale = form.get("scale", 0)
        precision = wanted["precision"] - wanted["scale"] + scale
        if wanted["scale"] > scale or precision > _MOST_DIGITS:
            self.unfit.append(
                f"column {path!r} is decimal({wanted['precision']},{wanted['scale']}), and the field is decimal("
                f"{form['precision']},{scale}), whose scale stays: readers of another one would misplace the point"
            )
        elif precision > form["precision"]:
            what = f"widen the field {path}: decimal({form['precision']},{scale}) to decimal({precision},{scale})"
            self.changes.append(change(path, "widen", what))
            return {**form, "precision": precision}
        return form


def _kind(form: Mapping[str, Any]) -> tuple[str, str | None]:
    return form["type"], form.get("logicalType")


_NARROWER = {(("int", None), ("long", None)), (("float", None), ("double", None))}


def _named(schema: Schema) -> dict[str, Schema]:
    """The definitions of a schema, by the names that may stand for them."""
    found = {_full(each["name"], namespace): each for each, namespace in _definitions(schema, "")}
    short = Counter(name.rpartition(".")[2] for name in found)
    return found | {one: each for name, each in found.items() if short[one := name.rpartition(".")[2]] == 1}


def _definitions(schema: Schema, namespace: str) -> Iterator[tuple[Mapping[str, Any], str]]:
    if isinstance(schema, dict):
        if "name" in schema:
            namespace = schema.get("namespace", _namespace(schema["name"]) or namespace)
            yield schema, namespace
        inner: Iterable[Schema] = [field["type"] for field in schema.get("fields", ())]
        inner = [*inner, *(schema[part] for part in ("type", "items", "values") if part in schema)]
    else:
        inner = schema if isinstance(schema, list) else ()
    for each in inner:
        if not isinstance(each, str):
            yield from _definitions(each, namespace)


def _full(name: str, namespace: str) -> str:
    return name if "." in name or not namespace else f"{namespace}.{name}"


def _namespace(name: str) -> str:
    return name.rpartition(".")[0]


def _essence(schema: Schema, namespace: str) -> Schema:
    if isinstance(schema, list):
        return [_essence(branch, namespace) for branch in schema]
    if not isinstance(schema, dict):
        return schema if schema in _SIMPLE else _full(schema, namespace)
    found = {part: schema[part] for part in _ESSENTIAL if part in schema}
    if "name" in found:
        namespace = schema.get("namespace", _namespace(schema["name"]) or namespace)
        found["name"] = _full(schema["name"], namespace)
    if "fields" in found:
        fields = found["fields"]
        found["fields"] = [{"name": field["name"], "type": _essence(field["type"], namespace)} for field in fields]
    for part in ("items", "values"):
        if part in found:
            found[part] = _essence(found[part], namespace)
    if not isinstance(found["type"], str):
        found["type"] = _essence(found["type"], namespace)
    return found["type"] if found.keys() == {"type"} else found


_SIMPLE = frozenset(("null", "boolean", "int", "long", "float", "double", "bytes", "string"))
