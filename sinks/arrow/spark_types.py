"""Schemas in the JSON form of Spark (`df.schema.json()`), without Spark."""

from __future__ import annotations

import json
import re
from typing import Any

import pyarrow as pa
import pyarrow.types as at

from sinks.arrow.types import is_list

KINDS: dict[str, pa.DataType] = {
    "boolean": pa.bool_(),
    **dict.fromkeys(("byte", "tinyint"), pa.int8()),
    **dict.fromkeys(("short", "smallint"), pa.int16()),
    **dict.fromkeys(("integer", "int"), pa.int32()),
    **dict.fromkeys(("long", "bigint"), pa.int64()),
    **dict.fromkeys(("float", "real"), pa.float32()),
    "double": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "void": pa.null(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"),
    "timestamp_ntz": pa.timestamp("us"),
    "interval day to second": pa.duration("us"),
}
_NAMES = {kind: name for name, kind in reversed(KINDS.items())}
"""The name of each type in Spark's JSON, which is the first of its names in `KINDS`."""
_DECIMAL = re.compile(r"decimal\((\d+), ?(\d+)\)")


def schema_of_json(value: Any) -> pa.Schema:
    """Return the Arrow schema for a Spark schema in JSON.

    Raises ValueError if the value is not such a schema, or has an unknown type.
    """
    if not isinstance(value, dict) or value.get("type") != "struct":
        raise ValueError("it is not the JSON of a Spark schema, as df.schema.json() gives it")
    return pa.schema([field_of(each["name"], each["type"]) for each in value["fields"]])


def field_of(name: str, kind: Any) -> pa.Field:
    """Return a column of a Spark type.

    `kind` is the name of the type, or the JSON of a nested type.
    """
    return pa.field(name, _arrow(kind))


def _arrow(kind: Any) -> pa.DataType:
    if isinstance(kind, dict):
        if kind["type"] == "struct":
            return pa.struct(list(schema_of_json(kind)))
        if kind["type"] == "array":
            return pa.list_(_arrow(kind["elementType"]))
        if kind["type"] == "map":
            return pa.map_(_arrow(kind["keyType"]), _arrow(kind["valueType"]))
    elif decimal := _DECIMAL.fullmatch(kind):
        return pa.decimal128(int(decimal[1]), int(decimal[2]))
    elif re.fullmatch(r"(var)?char\(\d+\)", kind):
        return pa.string()
    elif kind in KINDS:
        return KINDS[kind]
    elif kind.startswith("time("):
        return pa.time64("us")
    raise ValueError(
        f"there is no type {kind!r} here; there are {', '.join(KINDS)}, decimal(p,s), varchar(n)"
    )


def schema_to_json(schema: pa.Schema) -> str:
    """Return the text of a schema that `StructType.fromJson` and `schema_of_json` take.

    Raises ValueError for a type that Spark does not have.
    """
    return json.dumps(_struct(schema), separators=(",", ":"))


def _struct(fields: Any) -> dict[str, Any]:
    return {
        "type": "struct",
        "fields": [
            {"name": f.name, "type": _spark(f.type), "nullable": True, "metadata": {}}
            for f in fields
        ],
    }


def _spark(kind: pa.DataType) -> Any:
    if at.is_struct(kind):
        return _struct(kind)
    if is_list(kind):
        return {"type": "array", "elementType": _spark(kind.value_type), "containsNull": True}
    if at.is_map(kind):
        of = {"keyType": _spark(kind.key_type), "valueType": _spark(kind.item_type)}
        return {"type": "map", **of, "valueContainsNull": True}
    if at.is_timestamp(kind):
        return "timestamp" if kind.tz else "timestamp_ntz"
    if at.is_decimal128(kind):
        return f"decimal({kind.precision},{kind.scale})"
    if at.is_time(kind):
        return "time(6)"
    if at.is_large_string(kind) or at.is_large_binary(kind):
        return "string" if at.is_large_string(kind) else "binary"
    if kind in _NAMES:
        return _NAMES[kind]
    raise ValueError(f"Spark has no type for {kind}")
