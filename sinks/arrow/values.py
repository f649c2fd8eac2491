"""Values for libraries that take Python's own types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.types as at

from sinks.arrow.types import is_list, is_text


class ValidationError(ValueError):
    """A row that its schema does not take, or that no reader would see as it is."""


def python_values(kind: pa.DataType, *, all_maps: bool = False) -> Callable[[Any], Any]:
    """Return a function that makes dicts of the maps in a value that `as_py` gives.

    `as_py` gives a map as a list of pairs. A map stays a list of `{"key": …, "value": …}`, as
    fastavro takes it, if its keys are nested, or if they are not strings and `all_maps` is false.
    The function raises ValidationError for a key that comes twice, because readers would see only
    one of the entries.
    """
    return _dicts(kind, all_maps) or (lambda value: value)


def _dicts(kind: pa.DataType, all_maps: bool) -> Callable[[Any], Any] | None:
    """Return what `python_values` returns, or None if there is nothing to change."""
    if at.is_struct(kind):
        inner = {field.name: change for field in kind if (change := _dicts(field.type, all_maps))}
        if inner:
            return _unless_none(
                lambda row: row | {name: change(row[name]) for name, change in inner.items()}
            )
    elif is_list(kind):
        if each := _dicts(kind.value_type, all_maps):
            return _unless_none(lambda values: list(map(each, values)))
    elif at.is_map(kind):
        key = python_values(kind.key_type, all_maps=all_maps)
        item = python_values(kind.item_type, all_maps=all_maps)
        if is_text(kind.key_type) or (all_maps and not at.is_nested(kind.key_type)):
            return _unless_none(lambda pairs: {key(k): item(v) for k, v in _once(pairs)})
        return _unless_none(lambda pairs: [{"key": key(k), "value": item(v)} for k, v in pairs])
    return None


def _once(pairs: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValidationError("a map has a key twice")
    return pairs


def _unless_none(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else change(value)
