"""Arrow structs, maps and lists as JSON text, column by column rather than value by value."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Sequence
from json.encoder import encode_basestring

import pyarrow as pa
import pyarrow.types as at

Texts = Sequence[str | None]


def to_json(array: pa.Array) -> pa.Array:
    """One JSON text per value; null stays null. Numbers keep their digits; NaN and infinities become strings, binary
    base64, dates and times ISO 8601, map keys strings."""
    return pa.array(_texts(array), pa.string())


def _texts(array: pa.Array) -> Texts:
    kind = array.type
    if at.is_struct(kind):
        return _structs(array)
    if at.is_map(kind):
        return _maps(array)
    if at.is_list(kind) or at.is_large_list(kind):
        items = _or_null(_texts(array.flatten()))
        return [None if text is None else f"[{text}]" for text in _joined(array, items)]
    if at.is_floating(kind):
        # float by its own shortest text, not by that of the double next to it
        values = array.to_pylist() if at.is_float64(kind) else array.cast(pa.string()).to_pylist()
        return [None if value is None else _number(float(value)) for value in values]
    if at.is_binary(kind) or at.is_large_binary(kind):
        return [None if value is None else f'"{base64.b64encode(value).decode()}"' for value in array.to_pylist()]
    if at.is_boolean(kind) or at.is_integer(kind) or at.is_decimal(kind):
        texts: Texts = array.cast(pa.string()).to_pylist()
        return texts
    if at.is_timestamp(kind):
        wall = array.cast(pa.timestamp("us", kind.tz)).cast(pa.timestamp("us"))
        zone = "Z" if kind.tz else ""
        moments = _dated(wall, pa.int64(), 146_097 * 86_400_000_000)
        return [None if moment is None else f'"{moment.replace(" ", "T")}{zone}"' for moment in moments]
    if at.is_date32(kind):
        return [None if day is None else f'"{day}"' for day in _dated(array, pa.int32(), 146_097)]
    if at.is_duration(kind):
        spans = array.cast(pa.duration("us")).cast(pa.int64()).to_pylist()
        return [None if span is None else _span(span) for span in spans]
    return [None if text is None else encode_basestring(text) for text in array.cast(pa.string()).to_pylist()]


def _number(value: float) -> str:
    return (
        repr(value)
        if math.isfinite(value)
        else f'"{ {math.inf: "Infinity", -math.inf: "-Infinity"}.get(value, "NaN") }"'
    )


def _dated(array: pa.Array, whole: pa.DataType, cycle: int) -> Texts:
    """Dates or moments as text. Arrow has none for years beyond 32767; the calendar repeats every 400 years, which are
    `cycle` units of the array."""
    texts: list[str | None] = array.cast(pa.string()).to_pylist()
    for index, text in enumerate(texts):
        if text is not None and text.startswith("<"):
            cycles, rest = divmod(array.view(whole)[index].as_py(), cycle)
            year, rest_of_text = str(pa.scalar(rest, whole).cast(array.type).cast(pa.string())).split("-", 1)
            texts[index] = f"{int(year) + 400 * cycles}-{rest_of_text}"
    return texts


def _span(microseconds: int) -> str:
    seconds, fraction = divmod(abs(microseconds), 1_000_000)
    return f'"PT{"-" if microseconds < 0 else ""}{seconds}.{fraction:06}S"'


def _or_null(texts: Texts) -> list[str]:
    return ["null" if text is None else text for text in texts]


def _structs(array: pa.Array) -> Texts:
    names = [json.dumps(array.type.field(i).name, ensure_ascii=False) + ":" for i in range(array.type.num_fields)]
    fields = [_or_null(_texts(field)) for field in array.flatten()]
    rows = zip(*fields, strict=True) if fields else [()] * len(array)
    texts = ["{" + ",".join(map("".join, zip(names, row, strict=True))) + "}" for row in rows]
    return [text if valid else None for text, valid in zip(texts, array.is_valid().to_pylist(), strict=True)]


def _maps(array: pa.Array) -> Texts:
    start, end = array.offsets[0].as_py(), array.offsets[-1].as_py()
    keys, items = array.keys[start:end], array.items[start:end]
    names = [key if key.startswith('"') else json.dumps(key) for key in _or_null(_texts(keys))]
    pairs = [f"{name}:{item}" for name, item in zip(names, _or_null(_texts(items)), strict=True)]
    return [text if text is None else "{" + text + "}" for text in _joined(array, pairs)]


def _joined(array: pa.Array, items: Sequence[str]) -> Texts:
    """The items of each list or map, joined; the items of null entries are not among `items`."""
    offsets = array.offsets.to_pylist()
    shift = offsets[0]
    texts: list[str | None] = []
    position = 0
    for index, valid in enumerate(array.is_valid().to_pylist()):
        if not valid:
            texts.append(None)
            if at.is_map(array.type):
                position = offsets[index + 1] - shift
            continue
        count = offsets[index + 1] - offsets[index]
        texts.append(",".join(items[position : position + count]))
        position += count
    return texts
