"""JSON objects as storage has them.

They are sealed with a checksum, and trusted only if each field is of its type.
"""

from __future__ import annotations

import hashlib
import json
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from coordinator.errors import CorruptRecord

T = TypeVar("T")

FORMAT = 2
"""The number of the format that is written.

Formats from `_OLDEST` up to this one are read. A new field that older versions cannot read needs a
new number.
"""
_OLDEST = 2


def seal(body: Mapping[str, Any]) -> bytes:
    """Return the JSON of `body` with format number and checksum."""
    text = json.dumps(body, sort_keys=True)
    return json.dumps(
        {"format": FORMAT, "sha256": hashlib.sha256(text.encode()).hexdigest(), "body": body}
    ).encode()


def unseal(data: bytes, where: str) -> dict[str, Any]:
    fix = "Restore it from a backup of the storage; nothing was changed."
    try:
        sealed = json.loads(data)
        version = sealed["format"]
        checksum = sealed["sha256"]
        body = sealed["body"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CorruptRecord(
            f"{where} is truncated or not a record of this library ({error}). {fix}"
        ) from error
    if version not in range(_OLDEST, FORMAT + 1):
        raise CorruptRecord(
            f"{where} was written by a newer version of this library, or by one before 0.2: it has "
            f"format {version}, and this version reads formats {_OLDEST} to {FORMAT}. Use the "
            "version that wrote it. Nothing was changed [EO-FORMAT]"
        )
    if hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest() != checksum:
        raise CorruptRecord(
            f"{where} was changed after it was written: its checksum does not match. {fix}"
        )
    if not isinstance(body, dict):
        raise CorruptRecord(f"{where} is not a record of this library. {fix}")
    return body


@contextmanager
def corrupt_if_malformed(where: str) -> Iterator[None]:
    """Turn the errors of the block, which parses a record, into `CorruptRecord`.

    `where` names the record, for people.
    """
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise CorruptRecord(f"{where} lacks or misuses a field: {error!r}") from error


def require_field_types(instance: T) -> T:
    """Return the dataclass as it is, if each field is of its type.

    Otherwise, at any depth, this raises TypeError.
    """
    for name, kind in _kinds(type(instance)).items():  # type: ignore[arg-type]
        if not _fits(value := getattr(instance, name), kind):
            raise TypeError(f"{name} is {str(value)[:80]!r}")
    return instance


@cache
def _kinds(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {each.name: hints[each.name] for each in fields(kind)}


def _fits(value: object, kind: Any) -> bool:
    origin = get_origin(kind)
    parts = get_args(kind)
    if kind is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(_fits(value, part) for part in parts)
    if origin in (tuple, list, Sequence):
        return isinstance(value, (tuple, list)) and all(_fits(each, parts[0]) for each in value)
    if origin in (dict, Mapping):
        return isinstance(value, dict) and all(
            isinstance(key, str) and _fits(value[key], parts[1]) for key in value
        )
    if isinstance(value, bool) or kind is bool:
        return isinstance(value, bool) and kind is bool
    if kind is float:
        return isinstance(value, (int, float))
    if is_dataclass(kind):
        return type(value) is kind and require_field_types(value) is value
    return isinstance(value, kind)
