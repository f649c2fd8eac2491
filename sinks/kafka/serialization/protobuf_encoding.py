"""Messages of Protobuf, with Google's library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import date, datetime, timedelta
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.types as t

from sinks.arrow.types import is_list, is_moment
from sinks.extras import needs_extra
from sinks.kafka.joining import Numbers, Part, plain_varints
from sinks.kafka.serialization import protobuf
from sinks.kafka.serialization.by_columns import (
    Mask,
    Parts,
    RowByRow,
    floats,
    length,
    only,
    text,
    valid,
    whole_numbers,
)
from sinks.kafka.serialization.schema import Encode, Format, Merged, ValidationError, once

with needs_extra("protobuf"):
    from google.protobuf.descriptor import Descriptor, FieldDescriptor
    from google.protobuf.message_factory import GetMessageClass

Convert = Callable[[Any], Any]
"""From a value that is not null to what a field takes."""

_SECOND = 1_000_000
"""In microseconds."""
_FIRST, _LAST = -62_135_596_800, 253_402_300_799
"""Of google.protobuf.Timestamp, in seconds: the years 1 to 9999."""
_LONGEST = 315_576_000_000
"""Of google.protobuf.Duration, in seconds."""
_EPOCH = datetime(1970, 1, 1)
_EPOCH_DAY = date(1970, 1, 1).toordinal()


class Protobuf(Format):
    name, kind, asked_as = "Protobuf", "PROTOBUF", "serialized"
    prefix = b"\0"
    """The path to the rows' message: the file's first."""

    def merged(
        self, registered: str | None, value: pa.StructType, name: str, earlier: Callable[[], Sequence[str]]
    ) -> Merged:
        return protobuf.merged(registered, value, name, earlier)

    def essence(self, text: str) -> str:
        return protobuf.essence(text)

    def problem_of(self, text: str) -> str:
        try:
            protobuf.root(text)
        except ValueError as error:
            return str(error)
        return ""

    def shown(self, text: str) -> str:
        return protobuf.shown(text)

    def at_once(self, text: str, rows: pa.StructArray) -> Parts:
        return _fields(protobuf.root(text), rows)

    def encoder(self, text: str, value: pa.StructType) -> Encode:
        convert = _message(value, protobuf.root(text))

        def encode(row: Any, out: IO[bytes]) -> None:
            out.write(convert(row).SerializeToString(deterministic=True))  # entries of maps in one order

        return encode


def _fields(descriptor: Descriptor, rows: pa.StructArray) -> Parts:
    columns = {field.name: column for field, column in zip(rows.type, rows.flatten(), strict=True)}
    parts: Parts = []
    for field in sorted(descriptor.fields, key=lambda field: field.number):
        if field.name in columns:
            parts += _optional(field, columns[field.name])
    return parts


def _optional(field: FieldDescriptor, column: pa.Array) -> Parts:
    """Nothing where it is null."""
    if not field.has_presence:  # as arrays and maps
        raise RowByRow
    there = valid(column)
    if t.is_struct(column.type):
        return _delimited(field, _fields(field.message_type, column), there)
    if is_moment(column.type):
        return _delimited(field, _moment(whole_numbers(column)), there)
    if field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES) and not t.is_decimal(column.type):
        count, data = text(column, zigzag=False)
        return [*_tag(field.number, 2, there), only(there, count), data]
    wire, number = _number(field, column)
    return [*_tag(field.number, wire, there), only(there, number)]


def _number(field: FieldDescriptor, column: pa.Array) -> tuple[int, Part]:
    if field.type in (FieldDescriptor.TYPE_BOOL, FieldDescriptor.TYPE_INT32, FieldDescriptor.TYPE_INT64):
        return 0, plain_varints(whole_numbers(column))
    if field.type == FieldDescriptor.TYPE_DOUBLE:
        return 1, floats(column, pa.float64())
    if field.type == FieldDescriptor.TYPE_FLOAT:
        return 5, floats(column, pa.float32())
    raise RowByRow


def _delimited(field: FieldDescriptor, parts: Parts, there: Mask) -> Parts:
    """A message: its bytes' number, and these."""
    parts = [one if isinstance(one, pa.Array) else only(there, one) for one in parts]
    lengths = np.broadcast_to(length(parts), len(there)).astype(np.int64)
    return [*_tag(field.number, 2, there), only(there, plain_varints(lengths)), *parts]


def _moment(micros: Numbers) -> Parts:
    """Seconds and nanoseconds, of which 0 is left out."""
    seconds, rest = np.divmod(micros, _SECOND)
    if not ((seconds >= _FIRST) & (seconds <= _LAST)).all():
        raise RowByRow
    parts: Parts = []
    for number, counts in ((1, seconds), (2, 1000 * rest)):
        parts += [*_tag(number, 0, counts != 0), only(counts != 0, plain_varints(counts))]
    return parts


def _tag(number: int, wire: int, where: Mask) -> list[Part]:
    made = plain_varints(np.array([number << 3 | wire], np.int64)).bytes[:, 0]
    return [only(where, int(byte)) for byte in made]


def _message(kind: pa.StructType, descriptor: Descriptor) -> Convert:
    made = GetMessageClass(descriptor)
    fields = [_field(column, descriptor.fields_by_name[column.name]) for column in kind]

    def convert(row: Any) -> Any:
        found = {}
        for name, inner, required in fields:
            value = row[name]
            try:
                if value is not None:
                    found[name] = inner(value) if inner else value
                elif required:
                    raise ValidationError(required)
            except ValueError as error:
                raise ValidationError(f"{name}: {error}") from error
        return made(**found)

    return convert


def _field(column: pa.Field, field: FieldDescriptor) -> tuple[str, Convert | None, str]:
    """Its name, how its values are made, and what is wrong with null, if anything is."""
    kind = column.type
    if is_list(kind):
        return column.name, _list(kind, field), "null, which would be read as an empty array: write one, or an array"
    if t.is_map(kind):
        return column.name, _map(kind, field), "null, which would be read as an empty map: write one, or a map"
    required = "" if field.has_presence else "null, which the field takes for its default: make it optional"
    return column.name, _value(kind, field), required


def _list(kind: pa.DataType, field: FieldDescriptor) -> Convert:
    inner = _value(kind.value_type, field)

    def convert(values: Any) -> Any:
        if None in values:
            raise ValidationError("an element is null, which an array of Protobuf cannot hold")
        return list(map(inner, values)) if inner else values

    return convert


def _map(kind: pa.MapType, field: FieldDescriptor) -> Convert:
    inner = _value(kind.item_type, field.message_type.fields_by_name["value"])

    def convert(pairs: Any) -> Any:
        found = dict(once(pairs))
        if None in found.values():
            raise ValidationError("a value of the map is null, which a map of Protobuf cannot hold")
        return {key: inner(value) for key, value in found.items()} if inner else found

    return convert


def _value(kind: pa.DataType, field: FieldDescriptor) -> Convert | None:
    """None where the field takes what Arrow has."""
    if t.is_struct(kind):
        return _message(kind, field.message_type)
    if t.is_decimal(kind):
        return _digits
    for fits, convert in _KNOWN:
        if fits(kind):
            made = GetMessageClass(field.message_type)
            return lambda value: made(**convert(value))
    return None


def _digits(value: Any) -> str:
    return format(value, "f")


def _date(days: int) -> dict[str, int]:
    found = _within_years(lambda: date.fromordinal(days + _EPOCH_DAY))
    return {"year": found.year, "month": found.month, "day": found.day}


def _time(micros: int) -> dict[str, int]:
    seconds, rest = divmod(micros, _SECOND)
    return {"hours": seconds // 3600, "minutes": seconds // 60 % 60, "seconds": seconds % 60, "nanos": rest * 1000}


def _duration(micros: int) -> dict[str, int]:
    sign = -1 if micros < 0 else 1
    seconds, rest = divmod(abs(micros), _SECOND)
    if seconds > _LONGEST:
        raise ValidationError("an interval of more than 10,000 years, which Protobuf has not")
    return {"seconds": sign * seconds, "nanos": sign * rest * 1000}


def _timestamp(micros: int) -> dict[str, int]:
    seconds, rest = divmod(micros, _SECOND)
    if not _FIRST <= seconds <= _LAST:
        raise ValidationError(_NO_YEAR)
    return {"seconds": seconds, "nanos": rest * 1000}


def _local(micros: int) -> dict[str, int]:
    found = _within_years(lambda: _EPOCH + timedelta(microseconds=micros))
    return {
        "year": found.year,
        "month": found.month,
        "day": found.day,
        "hours": found.hour,
        "minutes": found.minute,
        "seconds": found.second,
        "nanos": found.microsecond * 1000,
    }


_NO_YEAR = "a year before 1 or after 9999, which Protobuf has not"


def _within_years(made: Callable[[], Any]) -> Any:
    try:
        return made()
    except (OverflowError, ValueError) as error:
        raise ValidationError(_NO_YEAR) from error


_KNOWN: Sequence[tuple[Callable[[pa.DataType], bool], Callable[[int], dict[str, int]]]] = [
    (t.is_date, _date),
    (t.is_time, _time),
    (t.is_duration, _duration),
    (is_moment, _timestamp),
    (t.is_timestamp, _local),
]
