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
_IS_ESCAPED = np.array([bool(re.match(_ESCAPED, chr(byte))) for byte in range(256)])
"""True for the bytes that JSON has escapes for."""
_DAYS_OF_CYCLE = 146_097
"""The days of 400 years, after which the calendar repeats."""
_MICROS_OF_DAY = 86_400_000_000


def escaped(data: bytes) -> str:
    """Return a JSON text of `to_json` as valid UTF-8.

    Bytes that are not UTF-8 become Python's surrogates, as escapes.
    """
    text = data.decode(*_ANY)
    valid = text.encode("utf-8", "backslashreplace")
    return valid.decode()


def in_ascii(text: str) -> str:
    """Replace what is not ASCII by JSON's escapes.

    A JSON text stays the same value.
    """

    def escapes(some: re.Match[str]) -> str:
        quoted = json.dumps(some[0])
        return quoted[1:-1]

    return _NOT_ASCII.sub(escapes, text)


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
        return _list(array)
    if at.is_floating(kind):
        # float by its own shortest text, not by that of the double next to it
        values = array if at.is_float64(kind) else array.cast(pa.string())
        return _each(values, lambda value: _number(float(value)))
    if is_bytes(kind):
        return _each(array, _base64)
    if at.is_boolean(kind) or at.is_integer(kind) or at.is_decimal(kind):
        return array.cast(pa.string())
    if at.is_timestamp(kind):
        in_micros = array.cast(pa.timestamp("us", kind.tz))
        wall = in_micros.cast(pa.timestamp("us"))
        dated = _dated(wall, pa.int64(), _DAYS_OF_CYCLE * _MICROS_OF_DAY)
        moments = pc.replace_substring(dated, " ", "T")
        return _enclosed('"', moments, 'Z"' if kind.tz else '"')
    if at.is_date32(kind):
        dates = _dated(array, pa.int32(), _DAYS_OF_CYCLE)
        return _enclosed('"', dates, '"')
    if at.is_time(kind):
        times = array.cast(pa.time64("us"))
        return _enclosed('"', times.cast(pa.string()), '"')
    if at.is_duration(kind):
        spans = array.cast(pa.duration("us"))
        return _each(spans.cast(pa.int64()), _span)
    return _string(array.cast(pa.string()))


def _each(array: pa.Array, text: Callable[..., str]) -> pa.Array:
    texts = [None if value is None else text(value) for value in array.to_pylist()]
    return pa.array(texts, pa.string())


def _string(texts: pa.Array) -> pa.Array:
    quoted = _enclosed('"', texts, '"')
    if not _IS_ESCAPED[bytes_of(texts)].any():
        return quoted
    data = texts.cast(pa.binary())
    special = pc.match_substring_regex(data, _ESCAPED)
    special = pc.fill_null(special, False)
    some = [_quoted(text) for text in data.filter(special).to_pylist()]
    replacements = pa.array(some, pa.binary()).view(pa.string())
    return pc.replace_with_mask(quoted, special, replacements)


def _quoted(data: bytes) -> bytes:
    text = data.decode(*_ANY)
    quoted = encode_basestring(text)
    return quoted.encode(*_ANY)


def _base64(value: bytes) -> str:
    text = base64.b64encode(value).decode()
    return f'"{text}"'


def _number(value: float) -> str:
    return repr(value) if math.isfinite(value) else f'"{json.dumps(value)}"'


def _dated(array: pa.Array, whole: pa.DataType, cycle: int) -> pa.Array:
    """Return dates or moments as text.

    Arrow has no text for years beyond 32767. The calendar repeats every 400 years, which are
    `cycle` units of the array.
    """
    texts = array.cast(pa.string())
    strange = pc.starts_with(texts, "<")
    strange = pc.fill_null(strange, False)
    if not pc.any(strange).as_py():
        return texts

    def text(number: int) -> str:
        cycles, rest = divmod(number, cycle)
        in_first_cycle = pa.scalar(rest, whole).cast(array.type)
        as_text = str(in_first_cycle.cast(pa.string()))
        year, rest_of_text = as_text.split("-", 1)
        return f"{int(year) + 400 * cycles}-{rest_of_text}"

    numbers = array.view(whole).filter(strange)
    return pc.replace_with_mask(texts, strange, _each(numbers, text))


def _span(microseconds: int) -> str:
    sign = "-" if microseconds < 0 else ""
    seconds, fraction = divmod(abs(microseconds), 1_000_000)
    return f'"PT{sign}{seconds}.{fraction:06}S"'


def _or_null(texts: pa.Array) -> pa.Array:
    return texts.fill_null("null")


def _enclosed(before: str, texts: pa.Array, after: str) -> pa.Array:
    return pc.binary_join_element_wise(before, texts, after, "")


def _struct(array: pa.Array) -> pa.Array:
    pieces: list[str | pa.Array] = []
    for field, values in zip(array.type, array.flatten(), strict=True):
        before = "," if pieces else "{"
        name = json.dumps(field.name, ensure_ascii=False)
        pieces.append(f"{before}{name}:")
        pieces.append(_or_null(to_json(values)))
    texts = pa.repeat("{}", len(array))
    if pieces:
        texts = pc.binary_join_element_wise(*pieces, "}", "")
    return pc.if_else(array.is_valid(), texts, None)


def _list(array: pa.Array) -> pa.Array:
    items = _or_null(to_json(array.flatten()))
    joined = _joined(items, _offsets(array), array)
    return _enclosed("[", joined, "]")


def _map(array: pa.Array) -> pa.Array:
    start = array.offsets[0].as_py()
    end = array.offsets[-1].as_py()
    keys = array.keys[start:end]
    items = array.items[start:end]
    names = _or_null(to_json(keys))
    if at.is_nested(array.type.key_type):
        names = _string(names)
    is_string = pc.starts_with(names, '"')
    names = pc.if_else(is_string, names, _enclosed('"', names, '"'))
    values = _or_null(to_json(items))
    pairs = pc.binary_join_element_wise(names, values, ":")
    offsets = array.offsets.to_numpy() - start
    return _enclosed("{", _joined(pairs, offsets, array), "}")


def _offsets(lists: pa.Array) -> np.ndarray:
    """Return where each list begins among the items of lists that are not null."""
    lengths = pc.fill_null(pc.list_value_length(lists), 0)
    ends = np.cumsum(lengths.to_numpy())
    return np.concatenate([[0], ends])


def _joined(items: pa.Array, offsets: np.ndarray, array: pa.Array) -> pa.Array:
    """Join the items between each two offsets; the result is null where `array` is null."""
    lists = pa.ListArray.from_arrays(
        pa.array(offsets, pa.int32()),
        items,
        mask=array.is_null(),
    )
    return pc.binary_join(lists, ",")
