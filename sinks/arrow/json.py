"""Arrow structs, maps and lists as JSON text, column by column rather than value by value."""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Callable
from json.encoder import encode_basestring

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as at

from sinks.arrow.types import bytes_of, is_bytes, is_list

_ANY = "utf-8", "surrogateescape"
"""Encoding and error handler for strings of Spark, which may be invalid UTF-8."""
_NOT_ASCII = re.compile(r"[^\x00-\x7f]+")
_ESCAPED = r'[\x00-\x1f"\\]'
_IS_ESCAPED = np.array(
    [re.match(_ESCAPED, chr(byte)) is not None for byte in range(128)] + [False] * 128
)


def escaped(data: bytes) -> str:
    """Return a JSON text of `to_json` as valid UTF-8.

    Bytes that are not UTF-8 become Python's surrogates, as escapes.
    """
    return data.decode(*_ANY).encode("utf-8", "backslashreplace").decode()


def in_ascii(text: str) -> str:
    """Replace what is not ASCII by JSON's escapes.

    A JSON text stays the same value.
    """
    return _NOT_ASCII.sub(lambda some: json.dumps(some[0])[1:-1], text)


def to_json(array: pa.Array) -> pa.Array:
    """Return one JSON text for each value; null stays null.

    Numbers keep their digits. NaN and infinities become strings, binary values become base64, and
    dates and times ISO 8601. The keys of maps become strings. A string that is invalid UTF-8 makes
    a JSON text that is invalid, too.
    """
    kind = array.type
    if at.is_struct(kind):
        return _struct(array)
    if at.is_map(kind):
        return _map(array)
    if is_list(kind):
        return _enclosed(
            "[", _joined(_or_null(to_json(array.flatten())), _offsets(array), array), "]"
        )
    if at.is_floating(kind):
        # float by its own shortest text, not by that of the double next to it
        values = array if at.is_float64(kind) else array.cast(pa.string())
        return _each(values, lambda value: _number(float(value)))
    if is_bytes(kind):
        return _each(array, lambda value: f'"{base64.b64encode(value).decode()}"')
    if at.is_boolean(kind) or at.is_integer(kind) or at.is_decimal(kind):
        return array.cast(pa.string())
    if at.is_timestamp(kind):
        wall = array.cast(pa.timestamp("us", kind.tz)).cast(pa.timestamp("us"))
        moments = pc.replace_substring(_dated(wall, pa.int64(), 146_097 * 86_400_000_000), " ", "T")
        return _enclosed('"', moments, 'Z"' if kind.tz else '"')
    if at.is_date32(kind):
        return _enclosed('"', _dated(array, pa.int32(), 146_097), '"')
    if at.is_time(kind):
        return _enclosed('"', array.cast(pa.time64("us")).cast(pa.string()), '"')
    if at.is_duration(kind):
        return _each(array.cast(pa.duration("us")).cast(pa.int64()), _span)
    return _string(array.cast(pa.string()))


def _each(array: pa.Array, text: Callable[..., str]) -> pa.Array:
    return pa.array(
        [None if value is None else text(value) for value in array.to_pylist()], pa.string()
    )


def _string(texts: pa.Array) -> pa.Array:
    quoted = _enclosed('"', texts, '"')
    if not _IS_ESCAPED[bytes_of(texts)].any():
        return quoted
    data = texts.cast(pa.binary())
    special = pc.fill_null(pc.match_substring_regex(data, _ESCAPED), False)
    some = [
        encode_basestring(text.decode(*_ANY)).encode(*_ANY)
        for text in data.filter(special).to_pylist()
    ]
    return pc.replace_with_mask(quoted, special, pa.array(some, pa.binary()).view(pa.string()))


def _number(value: float) -> str:
    return repr(value) if math.isfinite(value) else f'"{json.dumps(value)}"'


def _dated(array: pa.Array, whole: pa.DataType, cycle: int) -> pa.Array:
    """Return dates or moments as text.

    Arrow has no text for years beyond 32767. The calendar repeats every 400 years, which are
    `cycle` units of the array.
    """
    texts = array.cast(pa.string())
    strange = pc.fill_null(pc.starts_with(texts, "<"), False)
    if not pc.any(strange).as_py():
        return texts

    def text(number: int) -> str:
        cycles, rest = divmod(number, cycle)
        year, rest_of_text = str(pa.scalar(rest, whole).cast(array.type).cast(pa.string())).split(
            "-", 1
        )
        return f"{int(year) + 400 * cycles}-{rest_of_text}"

    return pc.replace_with_mask(texts, strange, _each(array.view(whole).filter(strange), text))


def _span(microseconds: int) -> str:
    seconds, fraction = divmod(abs(microseconds), 1_000_000)
    return f'"PT{"-" if microseconds < 0 else ""}{seconds}.{fraction:06}S"'


def _or_null(texts: pa.Array) -> pa.Array:
    return texts.fill_null("null")


def _enclosed(before: str, texts: pa.Array, after: str) -> pa.Array:
    return pc.binary_join_element_wise(before, texts, after, "")


def _struct(array: pa.Array) -> pa.Array:
    pieces: list[str | pa.Array] = []
    for field, values in zip(array.type, array.flatten(), strict=True):
        pieces += [
            f"{',' if pieces else '{'}{json.dumps(field.name, ensure_ascii=False)}:",
            _or_null(to_json(values)),
        ]
    texts = pc.binary_join_element_wise(*pieces, "}", "") if pieces else pa.repeat("{}", len(array))
    return pc.if_else(array.is_valid(), texts, None)


def _map(array: pa.Array) -> pa.Array:
    start = array.offsets[0].as_py()
    end = array.offsets[-1].as_py()
    keys = array.keys[start:end]
    items = array.items[start:end]
    names = _or_null(to_json(keys))
    if at.is_nested(array.type.key_type):
        names = _string(names)
    names = pc.if_else(pc.starts_with(names, '"'), names, _enclosed('"', names, '"'))
    pairs = pc.binary_join_element_wise(names, _or_null(to_json(items)), ":")
    return _enclosed("{", _joined(pairs, array.offsets.to_numpy() - start, array), "}")


def _offsets(lists: pa.Array) -> np.ndarray:
    """Return where each list begins among the items of lists that are not null."""
    lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy()
    return np.concatenate([[0], np.cumsum(lengths)])


def _joined(items: pa.Array, offsets: np.ndarray, array: pa.Array) -> pa.Array:
    """Join the items between each two offsets; the result is null where `array` is null."""
    lists = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), items, mask=array.is_null())
    return pc.binary_join(lists, ",")
