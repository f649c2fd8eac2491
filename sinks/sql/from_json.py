"""Values of the JSON that `to_json` makes, as Arrow has them."""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Callable, Collection, Sequence
from datetime import datetime, time, timedelta
from decimal import Decimal
from typing import Any, TypeAlias, TypeVar

import pyarrow as pa
import pyarrow.types as at

from sinks.arrow_types import is_bytes, is_list

Json: TypeAlias = Any
"""A value out of JSON: what it is has to be looked at."""
Parse: TypeAlias = Callable[[Json], object]
Value = TypeVar("Value")
_SPAN = re.compile(r"PT(-?)(\d+)\.(\d{6})S")
_DATE = re.compile(r"(-?\d{4,})-(\d\d)-(\d\d)")
_TIME = re.compile(r"([01]\d|2[0-3]):\d\d(:\d\d(\.\d{1,6})?)?")
"""Not 24:00, which newer Pythons take for the midnight before."""
_MOMENT = re.compile(r"([^T ]+)[T ]([^Z+-]+)(Z|[+-]\d\d:\d\d)?")
_EPOCH = datetime(1970, 1, 1)
_MICROSECOND = timedelta(microseconds=1)
_NO_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def loads(text: str) -> Json:
    """JSON in which decimals keep their digits. Raises ValueError, also for a name that comes twice in an object."""
    return json.loads(text, parse_float=Decimal, object_pairs_hook=_object)


def _object(pairs: Sequence[tuple[str, Json]]) -> dict[str, Json]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} comes twice")
    return found


def from_json(values: Sequence[Json], kind: pa.DataType) -> pa.Array:
    """Values out of JSON (`loads`) of a type. Raises ValueError, or TypeError, for one that is none of it."""
    parse = _parse(kind)
    return pa.array([parse(value) for value in values], kind)


def _parse(kind: pa.DataType) -> Parse:
    parse = _parse_value(kind)
    return lambda value: None if value is None else parse(value)


def _parse_value(kind: pa.DataType) -> Parse:
    if at.is_struct(kind):
        return _struct(kind)
    if at.is_map(kind):
        return _map(kind)
    if is_list(kind):
        element = _parse(kind.value_type)
        return lambda value: [element(one) for one in _of(list, value)]
    if at.is_floating(kind):
        return _float(kind)
    if is_bytes(kind):
        return lambda value: base64.b64decode(value, validate=True)
    if at.is_decimal(kind):
        return _decimal
    if at.is_timestamp(kind):
        return _in_utc if kind.tz else _moment
    if at.is_date32(kind):
        return _days
    if at.is_time(kind):
        return _clock
    if at.is_duration(kind):
        return _span
    exact = bool if at.is_boolean(kind) else int if at.is_integer(kind) else str
    return lambda value: _of(exact, value)


def _of(kind: type[Value], value: Json) -> Value:
    if type(value) is not kind:
        raise ValueError(f"{value!r} is no {kind.__name__}")
    return value


def _struct(kind: pa.DataType) -> Parse:
    fields = {field.name: _parse(field.type) for field in kind}

    def parse(value: Json) -> dict[str, object]:
        found = members(value, fields)
        return {name: of(found[name]) for name, of in fields.items()}

    return parse


def members(value: Json, names: Collection[str]) -> dict[str, Json]:
    """Those of an object that has just these. Raises ValueError."""
    found = _of(dict, value)
    if missing := [name for name in names if name not in found]:
        raise ValueError(f"{missing[0]!r} is missing")
    if strange := [name for name in found if name not in names]:
        raise ValueError(f"{strange[0]!r} is not among {', '.join(names)}")
    return found


def _map(kind: pa.MapType) -> Parse:
    key, item = _parse_key(kind.key_type), _parse(kind.item_type)

    def parse(value: Json) -> list[tuple[object, object]]:
        found = {key(name): item(one) for name, one in _of(dict, value).items()}
        if len(found) < len(value):
            raise ValueError(f"two keys of {value!r} are the same {kind.key_type}")
        return list(found.items())

    return parse


def _parse_key(kind: pa.DataType) -> Parse:
    """Keys of maps are texts in JSON, whatever they are."""
    parse = _parse(kind)
    if at.is_boolean(kind) or at.is_integer(kind):
        return lambda name: parse(json.loads(name))
    return parse


def _float(kind: pa.DataType) -> Parse:
    def parse(value: Json) -> float:
        if isinstance(value, str):
            if value not in _NO_NUMBERS:
                raise ValueError(f"{value!r} is no number")
            return _NO_NUMBERS[value]
        number = float(pa.scalar(str(_decimal(value))).cast(kind).as_py())  # a float's text is no double's
        if math.isinf(number) or (number == 0) is not (value == 0) or (type(value) is int and number != value):
            raise ValueError(f"{value} does not fit into a {kind}")
        return number

    return parse


def _decimal(value: Json) -> Decimal:
    if type(value) not in (int, Decimal):
        raise ValueError(f"{value!r} is no number")
    return Decimal(value)


def _days(text: str) -> int:
    """Since 1970, of any year: the calendar repeats every 400 years."""
    match = _DATE.fullmatch(_of(str, text))
    if match is None:
        raise ValueError(f"{text!r} is no date")
    cycles, year = divmod(int(match[1]), 400)
    return (datetime(year + 400, int(match[2]), int(match[3])) - _EPOCH).days + (cycles - 1) * 146_097


def _clock(text: str) -> time:
    if _TIME.fullmatch(_of(str, text)) is None:
        raise ValueError(f"{text!r} is no time of day, with 6 decimals at most and without a zone")
    return time.fromisoformat(text)


def _moment(text: str) -> int:
    """In microseconds since 1970, by a clock without a zone."""
    since, zone = _since_1970(text)
    if zone:
        raise ValueError(f"{text!r} has a zone, and timestamp_ntz none")
    return since


def _in_utc(text: str) -> int:
    since, zone = _since_1970(text)
    offset = datetime.strptime(zone or "Z", "%z").utcoffset()
    assert offset is not None
    return since - offset // _MICROSECOND


def _since_1970(text: str) -> tuple[int, str | None]:
    """In microseconds, by the clock of the zone."""
    match = _MOMENT.fullmatch(_of(str, text))
    if match is None:
        raise ValueError(f"{text!r} is no timestamp: write 2024-02-29T12:00:00")
    at = _clock(match[2])
    clock = timedelta(hours=at.hour, minutes=at.minute, seconds=at.second, microseconds=at.microsecond)
    return (timedelta(_days(match[1])) + clock) // _MICROSECOND, match[3]


def _span(text: str) -> timedelta:
    match = _SPAN.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no span of time")
    span = timedelta(seconds=int(match[2]), microseconds=int(match[3]))
    return -span if match[1] else span
