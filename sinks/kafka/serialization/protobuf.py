"""Protobuf schemas of rows: what a registered one lacks for them. Nothing here asks a registry."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache

import pyarrow as pa
import pyarrow.types as t

from sinks.arrow.types import is_bytes, is_list, is_moment, is_text
from sinks.diagnosis import SchemaChange
from sinks.extras import needs_extra
from sinks.kafka.serialization.schema import Merged, alike, below, change, is_int, no_type, unnameable

with needs_extra("protobuf"):
    from google.protobuf import descriptor_pool, duration_pb2, timestamp_pb2
    from google.protobuf.descriptor import Descriptor
    from google.protobuf.descriptor_pb2 import DescriptorProto as Message
    from google.protobuf.descriptor_pb2 import EnumDescriptorProto as Enum
    from google.protobuf.descriptor_pb2 import FieldDescriptorProto as Field
    from google.protobuf.descriptor_pb2 import FileDescriptorProto as File
    from google.protobuf.message import DecodeError
    from google.type import date_pb2, datetime_pb2, timeofday_pb2

_LAST_NUMBER = 2**29 - 1
_OURS_TO_LEAVE = range(19_000, 20_000)
"""Numbers of fields that Protobuf keeps for itself."""

_SCALARS: Sequence[tuple[Callable[[pa.DataType], bool], Sequence[int]]] = [
    (t.is_boolean, [Field.TYPE_BOOL]),
    (
        is_int,
        [
            Field.TYPE_INT32,
            Field.TYPE_SINT32,
            Field.TYPE_SFIXED32,
            Field.TYPE_INT64,
            Field.TYPE_SINT64,
            Field.TYPE_SFIXED64,
        ],
    ),
    (t.is_int64, [Field.TYPE_INT64, Field.TYPE_SINT64, Field.TYPE_SFIXED64]),
    (t.is_float32, [Field.TYPE_FLOAT, Field.TYPE_DOUBLE]),
    (t.is_float64, [Field.TYPE_DOUBLE]),
    (is_text, [Field.TYPE_STRING]),
    (is_bytes, [Field.TYPE_BYTES]),
    (t.is_decimal, [Field.TYPE_STRING]),
]
"""The types of fields that hold all values of a column: the first is that of a new field."""

_KNOWN: Sequence[tuple[Callable[[pa.DataType], bool], Descriptor]] = [
    (t.is_date, date_pb2.Date.DESCRIPTOR),
    (t.is_time, timeofday_pb2.TimeOfDay.DESCRIPTOR),
    (t.is_duration, duration_pb2.Duration.DESCRIPTOR),
    (is_moment, timestamp_pb2.Timestamp.DESCRIPTOR),
    (t.is_timestamp, datetime_pb2.DateTime.DESCRIPTOR),
]
"""Messages that everybody has."""


def merged(registered: str | None, value: pa.StructType, name: str, earlier: Callable[[], Sequence[str]]) -> Merged:
    """As `Format.merged`. Texts are descriptors of files in base64; the first message is the rows'."""
    unfit = list(unnameable(value, "Protobuf", "_"))
    if unfit:
        return Merged(registered or "", unfit=tuple(unfit))
    if registered is None:
        file = File(name=f"{name}.proto", syntax="proto3")
        file.message_type.add(name=name)
    else:
        try:
            file = file_of(registered)
        except ValueError as error:
            return Merged(registered, unfit=(str(error),))
    work = _Merge(file, earlier)
    first = _prefix(file) + file.message_type[0].name
    work.message(work.messages[first], first, value, "")
    text = _text(file) if work.changes or registered is None else registered
    return Merged(text, () if registered is None else tuple(work.changes), tuple(work.unfit))


def root(text: str) -> Descriptor:
    """The message of the rows. Raises ValueError with what is wrong with a schema."""
    return _loaded(text)[1]


def file_of(text: str) -> File:
    """With full names of types. Raises ValueError as `root`."""
    return File.FromString(_loaded(text)[0])


def essence(text: str) -> str:
    """What tells how bytes are read: the first message and those in it. A text that is no descriptor is its own."""
    try:
        file = file_of(text)
    except ValueError:
        return text
    messages, found = dict(_messages(file)), dict[str, list[list[object]]]()
    names = [_prefix(file) + file.message_type[0].name]
    for name in names:
        if name in messages and name not in found:
            fields = sorted(messages[name].field, key=lambda field: field.number)
            found[name] = [
                [f.number, f.name, f.proto3_optional, f.options.packed, f.type, f.label, f.type_name] for f in fields
            ]
            names += [f.type_name[1:] for f in fields if f.type_name]
    return json.dumps([names[0], found], sort_keys=True)


# ---------------------------------------------------------------------- descriptors
@cache
def _loaded(text: str) -> tuple[bytes, Descriptor]:
    try:
        file = File.FromString(base64.b64decode(text, validate=True))
    except (binascii.Error, DecodeError, ValueError):
        raise ValueError(
            "the registry gives the schema as text, and not as the descriptor that it was asked for "
            "(format=serialized): register its descriptor in base64, as Confluent's serializers do"
        ) from None
    if file.syntax != "proto3":
        raise ValueError(f"the schema is of {file.syntax or 'proto2'}, and only proto3 can be written")
    if not file.message_type:
        raise ValueError("the schema has no message")
    file.name = file.name or "schema.proto"
    pool = descriptor_pool.DescriptorPool()
    try:
        for name in file.dependency:
            _add(pool, name)
        pool.AddSerializedFile(file.SerializeToString())
        loaded = pool.FindFileByName(file.name)
    except (KeyError, TypeError) as error:
        raise ValueError(f"the schema cannot be loaded: {error}") from None
    resolved = File()
    loaded.CopyToProto(resolved)
    return resolved.SerializeToString(), pool.FindMessageTypeByName(_prefix(file) + file.message_type[0].name)


def _add(pool: descriptor_pool.DescriptorPool, name: str) -> None:
    """A file that everybody has."""
    file = descriptor_pool.Default().FindFileByName(name)
    for each in file.dependencies:
        _add(pool, each.name)
    pool.AddSerializedFile(file.serialized_pb)


def _text(file: File) -> str:
    return base64.b64encode(file.SerializeToString(deterministic=True)).decode()


def _prefix(file: File) -> str:
    return f"{file.package}." if file.package else ""


def _messages(file: File) -> Iterator[tuple[str, Message]]:
    """All of a file, by their full names."""
    inside = [(_prefix(file) + message.name, message) for message in file.message_type]
    for name, message in inside:
        inside += [(f"{name}.{nested.name}", nested) for nested in message.nested_type]
        yield name, message


# ---------------------------------------------------------------------- what rows need
class _Merge:
    """Changes the file."""

    def __init__(self, file: File, earlier: Callable[[], Sequence[str]]) -> None:
        self.file, self.messages = file, dict(_messages(file))
        self.changes: list[SchemaChange] = []
        self.unfit: list[str] = []
        self._earlier = earlier
        self._once_there: dict[str, list[Field]] | None = None

    def message(self, message: Message, full_name: str, kind: pa.StructType, path: str) -> None:
        known = {field.name: field for field in message.field}
        normal = {alike(name, "_"): name for name in known}
        for column in kind:
            where = below(path, column.name)
            if column.name in known:
                self._as_numbered_once(full_name, known[column.name], where)
                self._fit(message, known[column.name], column.type, where)
            elif alike(column.name, "_") in normal:
                self.unfit.append(f"column {where!r}: the field is called {normal[alike(column.name, '_')]!r}")
            elif number := self._number(message, full_name, column.name, where):
                field = message.field.add(name=column.name, number=number, label=Field.LABEL_OPTIONAL)
                self._new(message, full_name, field, column.type, where)
                self.changes.append(change(where, "add", f"add the field {where}: {_shown(field, full_name)}"))

    # ------------------------------------------------------------------ fields that are there
    def _fit(self, message: Message, field: Field, kind: pa.DataType, path: str) -> None:
        repeated = field.label == Field.LABEL_REPEATED
        entry = self.messages.get(field.type_name[1:])
        is_map = entry is not None and entry.options.map_entry
        if field.HasField("oneof_index") and not field.proto3_optional:
            name = message.oneof_decl[field.oneof_index].name
            self.unfit.append(f"the field {path!r} is one of {name!r}: rows could lose all but one of these")
        elif t.is_null(kind):
            if repeated or not (field.proto3_optional or field.type == Field.TYPE_MESSAGE):
                self.unfit.append(f"column {path!r} is always null, and the field takes no null")
        elif is_map and entry is not None and t.is_map(kind):
            self._fit_one(entry.field[0], kind.key_type, below(path, "key"))
            self._fit_one(entry.field[1], kind.item_type, below(path, "value"))
        elif repeated and not is_map and is_list(kind):
            self._fit_one(field, kind.value_type, f"{path}[]")
        elif repeated or is_list(kind) or t.is_map(kind):
            self.unfit.append(f"column {path!r} is {kind}, and the field is {_shown(field, '')}")
        else:
            self._fit_one(field, kind, path)

    def _fit_one(self, field: Field, kind: pa.DataType, path: str) -> None:
        inner = self.messages.get(field.type_name[1:])
        if t.is_struct(kind) and inner is not None and not inner.options.map_entry:
            self.message(inner, field.type_name[1:], kind, path)
        elif field.type not in _scalar(kind) and not (
            (known := _known(kind)) and field.type_name == f".{known.full_name}"
        ):
            self.unfit.append(f"column {path!r} is {kind}, and the field is {_shown(field, '', single=True)}")

    # ------------------------------------------------------------------ new fields
    def _new(self, message: Message, full_name: str, field: Field, kind: pa.DataType, path: str) -> None:
        if is_list(kind):
            field.label = Field.LABEL_REPEATED
            self._typed(message, full_name, field, kind.value_type, f"{path}[]")
        elif t.is_map(kind):
            field.label = Field.LABEL_REPEATED
            self._new_map(message, full_name, field, kind, path)
        else:
            self._typed(message, full_name, field, kind, path)
            if not field.type_name:
                field.proto3_optional, field.oneof_index = True, len(message.oneof_decl)
                message.oneof_decl.add(name=_free(f"_{field.name}", message))

    def _new_map(self, message: Message, full_name: str, field: Field, kind: pa.MapType, path: str) -> None:
        key = kind.key_type
        if not (is_text(key) or t.is_boolean(key) or is_int(key) or t.is_int64(key)):
            self.unfit.append(
                f"column {path!r}: keys of maps are texts, integers or booleans in Protobuf, not {key}: cast "
                "them, or make it an array of structs (map_entries)"
            )
            return
        name = "".join(part[:1].upper() + part[1:] for part in field.name.split("_")) + "Entry"  # as protoc wants it
        entry = message.nested_type.add(name=name)
        entry.options.map_entry = True
        field.type, field.type_name = Field.TYPE_MESSAGE, f".{full_name}.{name}"
        self.messages[f"{full_name}.{name}"] = entry
        for number, (part, inner) in enumerate((("key", kind.key_type), ("value", kind.item_type)), 1):
            added = entry.field.add(name=part, number=number, label=Field.LABEL_OPTIONAL)
            self._typed(message, full_name, added, inner, below(path, part), called=f"{field.name}_value")

    def _typed(
        self, message: Message, full_name: str, field: Field, kind: pa.DataType, path: str, called: str = ""
    ) -> None:
        """Give a new field, or its elements, a type."""
        if is_list(kind) or t.is_map(kind):
            self.unfit.append(
                f"column {path!r} is {kind} in an array or a map, which Protobuf has not: put it into a struct there"
            )
        elif t.is_struct(kind):
            name = _free("".join(part[:1].upper() + part[1:] for part in (called or field.name).split("_")), message)
            inner = message.nested_type.add(name=name)
            field.type, field.type_name = Field.TYPE_MESSAGE, f".{full_name}.{name}"
            self.messages[f"{full_name}.{name}"] = inner
            count = len(self.changes)
            self.message(inner, f"{full_name}.{name}", kind, path)
            del self.changes[count:]
        elif known := _known(kind):
            field.type, field.type_name = Field.TYPE_MESSAGE, f".{known.full_name}"
            if known.file.name not in self.file.dependency:
                self.file.dependency.append(known.file.name)
        elif scalar := _scalar(kind):
            field.type = scalar[0]
        else:
            self.unfit.append(no_type(path, kind, "Protobuf"))

    def _number(self, message: Message, full_name: str, name: str, path: str) -> int | None:
        """One that no version has given away."""
        once = self._once(full_name)
        reserved = [range(one.start, one.end) for one in (*message.reserved_range, *message.extension_range)]
        if name in message.reserved_name:
            self.unfit.append(f"column {path!r}: the name is reserved in {full_name}: give it another")
            return None
        if before := [field.number for field in once if field.name == name]:
            self.unfit.append(
                f"column {path!r} had the number {before[0]} in another version of the schema, and the newest has no "
                "such field: register a version that has it again, or rename the column"
            )
            return None
        number: int = max([0, *(field.number for field in (*message.field, *once))]) + 1
        while taken := [one for one in (*reserved, _OURS_TO_LEAVE) if number in one]:
            number = taken[0].stop
        if number > _LAST_NUMBER:
            self.unfit.append(f"column {path!r}: {full_name} has no number left after its others")
            return None
        return number

    def _as_numbered_once(self, full_name: str, field: Field, path: str) -> None:
        """Two drivers may have registered a version each, by a registry that compares none."""
        others = {one.number for one in self._once(full_name) if one.name == field.name} - {field.number}
        if others:
            self.unfit.append(
                f"column {path!r} has the number {field.number} in the newest version, and {min(others)} in another: "
                "readers of one would miss what the other writes: delete the version that nobody uses"
            )

    def _once(self, full_name: str) -> Sequence[Field]:
        """The fields of a message in earlier versions."""
        if self._once_there is None:
            self._once_there = {}
            for text in self._earlier():
                try:
                    earlier = file_of(text)
                except ValueError:
                    continue  # of another kind
                for name, message in _messages(earlier):
                    self._once_there.setdefault(name, []).extend(message.field)
        return self._once_there.get(full_name, ())


def _scalar(kind: pa.DataType) -> Sequence[int]:
    return next((types for fits, types in _SCALARS if fits(kind)), ())


def _known(kind: pa.DataType) -> Descriptor | None:
    return next((one for fits, one in _KNOWN if fits(kind)), None)


def _free(name: str, message: Message) -> str:
    """The name, with _ behind it until nothing else is called so: fields, types and oneofs share their names."""
    taken = {
        one.name for part in (message.field, message.nested_type, message.enum_type, message.oneof_decl) for one in part
    }
    while name in taken:
        name += "_"
    return name


# ---------------------------------------------------------------------- as people write it
def shown(text: str) -> str:
    """The .proto file; what is not a descriptor as it is."""
    try:
        file = file_of(text)
    except ValueError:
        return text
    lines = ['syntax = "proto3";']
    lines += [f"package {file.package};"] if file.package else []
    lines += [f'import "{name}";' for name in file.dependency]
    for enum in file.enum_type:
        lines += _enum_lines(enum)
    for message in file.message_type:
        lines += _lines(message, _prefix(file) + message.name, dict(_messages(file)))
    return "\n".join(lines)


def _lines(message: Message, full_name: str, messages: Mapping[str, Message]) -> list[str]:
    lines = list[str]()
    for enum in message.enum_type:
        lines += _enum_lines(enum)
    for nested in message.nested_type:
        if not nested.options.map_entry:
            lines += _lines(nested, f"{full_name}.{nested.name}", messages)
    for one in message.reserved_range:
        last = f" to {one.end - 1}" if one.end > one.start + 1 else ""
        lines.append(f"reserved {one.start}{last};")
    lines += [f'reserved "{name}";' for name in message.reserved_name]
    for field in message.field:
        entry = messages.get(field.type_name[1:])
        if entry is not None and entry.options.map_entry:
            key, value = (_shown(one, full_name, single=True) for one in entry.field)
            kind = f"map<{key}, {value}>"
        else:
            kind = _shown(field, full_name)
        line = f"{kind} {field.name} = {field.number};"
        if field.HasField("oneof_index") and not field.proto3_optional:
            line = f"oneof {message.oneof_decl[field.oneof_index].name} {{ {line} }}"
        lines.append(line)
    return [f"message {message.name} {{", *(f"  {line}" for line in lines), "}"]


def _enum_lines(enum: Enum) -> list[str]:
    return [f"enum {enum.name} {{", *(f"  {value.name} = {value.number};" for value in enum.value), "}"]


def _shown(field: Field, inside: str, *, single: bool = False) -> str:
    """The type, relative to the message that it is in."""
    name: str = (
        field.type_name[1:].removeprefix(f"{inside}.") or Field.Type.Name(field.type).removeprefix("TYPE_").lower()
    )
    label = "repeated " if field.label == Field.LABEL_REPEATED else "optional " if field.proto3_optional else ""
    return name if single else label + name
