"""Values in Protobuf, with a real schema registry, as confluent-kafka's own deserializer reads them."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from contextlib import closing
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka.schema_registry.protobuf import ProtobufDeserializer
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.text_format import Parse

from coordinator import CheckpointListener, Step
from sinks.errors import BadValue, ConfigurationError, SchemaMismatch
from sinks.kafka import KafkaSink
from sinks.kafka.serialization.encoding import Writer
from sinks.kafka.serialization.protobuf import essence, file_of, merged, root, shown
from sinks.kafka.serialization.protobuf_encoding import Protobuf
from sinks.kafka.serialization.schema import Merged
from sinks.testing import KILLED, Driver, Hooked
from sinks.testing.driver import KillAt
from sinks.testing.local import Partitions
from sinks.testing.servers.kafka import KafkaService
from sinks.testing.servers.registry import RegistryServer
from sinks.transaction import CommitOutcome
from tests.cli.play import Job
from tests.kafka.play import pre_commit
from tests.kafka.subject import AnyRegistry, Subject, rows
from tests.kafka.test_crashes import At, run

ID, NOTE = pa.field("id", pa.int32()), pa.field("note", pa.string())


def merge(kind: list[pa.Field], registered: str | None = None, *earlier: str) -> Merged:
    return merged(registered, pa.struct(kind), "orders", lambda: earlier)


def numbers(text: str) -> dict[str, int]:
    return {field.name: field.number for field in file_of(text).message_type[0].field}


def by_hand(fields: str, **about: str) -> str:
    """A descriptor as serializers register it: fields in the text format of DescriptorProto."""
    file = FileDescriptorProto(**{"name": "by_hand.proto", "syntax": "proto3", **about})
    Parse(f'name: "orders" {fields}', file.message_type.add())
    return base64.b64encode(file.SerializeToString()).decode()


def field(name: str, number: int, kind: str = "TYPE_INT32", *, more: str = "") -> str:
    return f'field {{ name: "{name}" number: {number} label: LABEL_OPTIONAL type: {kind} {more} }} '


def encoded(text: str, kind: list[pa.Field], *given: Any) -> tuple[list[Any], list[str]]:
    """What readers see, and why rows are refused."""
    values, refused = Writer(Protobuf(), 7, text).encoded(pa.array(given, pa.struct(kind)))
    message = GetMessageClass(root(text))
    assert all(value is None or value[:6] == b"\0\0\0\0\7\0" for value in values.to_pylist())
    found = [value and message.FromString(value[6:]) for value in values.to_pylist()]
    return found, [f"{one.row} {one.error_class}: {one.error}" for one in refused]


class Messages(Subject):
    value_format, evolution = "protobuf", "add"

    def deserializer(self) -> Any:
        latest = self.client.get_latest_version(self.name, fmt="serialized").schema.schema_str
        return ProtobufDeserializer(GetMessageClass(root(str(latest))), None, self.client)

    def rows(self) -> list[dict[str, Any]]:
        return [{one.name: value for one, value in message.ListFields()} for message in self.values()]

    def ids(self) -> list[int]:
        return sorted(row["id"] for row in self.rows())

    def versions(self) -> list[dict[str, int]]:
        return [numbers(text) for text in self.texts()]


@pytest.fixture
def subject(kafka: KafkaService, kafka_topic: str, registry: AnyRegistry) -> Messages:
    return Messages(kafka, kafka_topic, registry.url)


def of_ids(*ids: int | None) -> pa.Table:
    return rows({"id": pa.int32()}, *[(id,) for id in ids])


def noted(*values: tuple[str | None, int]) -> pa.Table:
    return rows({"note": pa.string(), "id": pa.int32()}, *values)


OLD, NEW = of_ids(1, 2), noted(("new", 3), (None, 4))

# ---------------------------------------------------------------------- what is read back
STRUCT = pa.struct([("a", pa.list_(pa.struct([("b", pa.decimal128(4, 1))]))), ("at", pa.timestamp("us", "UTC"))])
EVERY_TYPE: dict[str, tuple[pa.DataType, list[Any], list[str]]] = {
    "flag": (pa.bool_(), [True, False], ["True", "False"]),
    "tiny": (pa.int8(), [-128, 127], ["-128", "127"]),
    "small": (pa.int16(), [-(2**15), 2**15 - 1], ["-32768", "32767"]),
    "int": (pa.int32(), [-(2**31), 0], ["-2147483648", "0"]),
    "long": (pa.int64(), [-(2**63), 2**63 - 1], ["-9223372036854775808", "9223372036854775807"]),
    "single": (pa.float32(), [0.1, math.nan], ["0.10000000149011612", "nan"]),
    "double": (pa.float64(), [math.pi, -0.0], ["3.141592653589793", "-0.0"]),
    "text": (pa.string(), ["", "grün 🌱"], ["", "grün 🌱"]),
    "bytes": (pa.binary(), [b"", b"\0\xff"], ["b''", r"b'\x00\xff'"]),
    "price": (pa.decimal128(10, 2), [Decimal("-99999999.90"), Decimal("0.00")], ["-99999999.90", "0.00"]),
    "huge": (pa.decimal128(38, 0), [Decimal(10**38 - 1), Decimal(1)], ["9" * 38, "1"]),
    "exact": (pa.decimal128(38, 38), [Decimal("1E-38"), Decimal("0E-38")], [f"0.{'0' * 37}1", f"0.{'0' * 38}"]),
    "day": (
        pa.date32(),
        [date(1, 1, 1), date(9999, 12, 31)],
        ["year: 1 month: 1 day: 1", "year: 9999 month: 12 day: 31"],
    ),
    "clock": (
        pa.time64("us"),
        [time(0, 0), time(23, 59, 58, 999999)],
        ["", "hours: 23 minutes: 59 seconds: 58 nanos: 999999000"],
    ),
    "at": (
        pa.timestamp("us", "UTC"),
        [datetime(1969, 12, 31, 23, 59, 59, 999999, timezone.utc), datetime(1970, 1, 1, tzinfo=timezone.utc)],
        ["seconds: -1 nanos: 999999000", ""],
    ),
    "local": (
        pa.timestamp("us"),
        [datetime(1, 1, 1), datetime(2026, 2, 3, 4, 5, 6, 7)],
        ["year: 1 month: 1 day: 1", "year: 2026 month: 2 day: 3 hours: 4 minutes: 5 seconds: 6 nanos: 7000"],
    ),
    "span": (
        pa.duration("us"),
        [timedelta(days=-1, microseconds=1), timedelta(0)],
        ["seconds: -86399 nanos: -999999000", ""],
    ),
    "list": (pa.list_(pa.int32()), [[], [1, 3]], ["[]", "[1, 3]"]),
    "map": (pa.map_(pa.string(), pa.float64()), [[], [("b", 1.0), ("a", 2.0)]], ["{}", "{'a': 2.0, 'b': 1.0}"]),
    "by_number": (
        pa.map_(pa.int32(), pa.struct([("x", pa.date32())])),
        [[], [(1, {"x": date(2020, 2, 29)})]],
        ["{}", "{1: x { year: 2020 month: 2 day: 29 }}"],
    ),
    "struct": (
        STRUCT,
        [{"a": [], "at": None}, {"a": [{"b": Decimal("1.5")}, {"b": None}], "at": None}],
        ["", 'a { b: "1.5" } a { }'],
    ),
}


@pytest.mark.large
def test_every_type_is_read_back_as_it_was(subject: Messages) -> None:
    kind = {name: kind for name, (kind, _, _) in EVERY_TYPE.items()}
    nulls: list[Any] = [[] if pa.types.is_list(one) or pa.types.is_map(one) else None for one in kind.values()]
    given = rows(kind, *zip(*(values for _, values, _ in EVERY_TYPE.values()), strict=True), tuple(nulls), None)
    [batch] = given.to_batches()
    with closing(subject.ready(batch.schema)) as sink:
        assert sink.commit(pre_commit(sink, batch)) == CommitOutcome.COMMITTED
    found = subject.values()
    for name, (one, _, expected) in EVERY_TYPE.items():
        repeated = pa.types.is_list(one) or pa.types.is_map(one)
        present = [row for row in found if row is not None and (repeated or row.HasField(name))]
        last = [] if not repeated else ["{}" if pa.types.is_map(one) else "[]"]
        assert sorted(_plain(getattr(row, name)) for row in present) == sorted([*expected, *last]), name
    assert found.count(None) == 1  # a tombstone


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):  # in whatever order it was parsed
        return "{" + ", ".join(f"{key!r}: {_plain(value[key])}" for key in sorted(value)) + "}"
    return " ".join(str(value).split())


def test_the_same_row_is_the_same_bytes_in_whatever_order_its_maps_come() -> None:
    kind = [pa.field("m", pa.map_(pa.string(), pa.int32()))]
    text = merge(kind).text
    given = [{"m": [(str(n), n) for n in order]} for order in (range(50), reversed(range(50)))]
    one, other = Writer(Protobuf(), 7, text).encoded(pa.array(given, pa.struct(kind)))[0].to_pylist()
    assert one == other


@pytest.mark.parametrize(
    ("kind", "value", "why"),
    [
        (pa.list_(pa.int32()), None, "v: null, which would be read as an empty array"),
        (pa.map_(pa.string(), pa.int32()), None, "v: null, which would be read as an empty map"),
        (pa.list_(pa.int32()), [1, None], "v: an element is null"),
        (pa.map_(pa.string(), pa.int32()), [("a", None)], "v: a value of the map is null"),
        (pa.map_(pa.string(), pa.int32()), [("a", 1), ("a", 2)], "v: a map has a key twice"),
        (pa.struct([("in", pa.list_(pa.int32()))]), {"in": None}, "v: in: null, which would be read"),
        (pa.date32(), 10**7, "v: a year before 1 or after 9999"),
        (pa.timestamp("us", "UTC"), 2**62, "v: a year before 1 or after 9999"),
        (pa.timestamp("us"), -(2**62), "v: a year before 1 or after 9999"),
        (pa.duration("us"), 2**62, "v: an interval of more than 10,000 years"),
    ],
)
def test_what_would_be_read_as_something_else_is_a_bad_row(kind: pa.DataType, value: Any, why: str) -> None:
    numbers = pa.array([value], pa.int32() if kind == pa.date32() else pa.int64()) if isinstance(value, int) else None
    column = pa.array([value], kind) if numbers is None else numbers.cast(kind)
    text = merge([pa.field("v", kind)]).text
    values, refused = Writer(Protobuf(), 7, text).encoded(pa.StructArray.from_arrays([column], names=["v"]))
    assert [one.error[: len(why)] for one in refused] == [why]
    assert values.to_pylist() == [None]


def test_a_field_that_cannot_tell_null_from_zero_takes_no_null() -> None:
    text = by_hand(field("id", 1))
    assert merge([ID], text) == Merged(text)
    found, [refused] = encoded(text, [ID], {"id": 0}, {"id": None})
    assert found[0].id == 0
    assert refused.startswith("1 ValidationError: id: null, which the field takes for its default")


# ---------------------------------------------------------------------- schemas, without a registry
def test_names_keep_their_numbers_and_new_ones_get_new_ones() -> None:
    first = merge([pa.field("a", pa.int32()), pa.field("b", pa.struct([("x", pa.int64())])), ID])
    assert numbers(first.text) == {"a": 1, "b": 2, "id": 3}
    second = merge([NOTE, ID, pa.field("b", pa.struct([("y", pa.bool_()), ("x", pa.int64())]))], first.text)
    assert numbers(second.text) == {"a": 1, "b": 2, "id": 3, "note": 4}  # `a` is no column any more
    assert [(one.column, one.step) for one in second.changes] == [("note", "add"), ("b.y", "add")]
    assert "    optional int64 x = 1;\n    optional bool y = 2;\n" in shown(second.text)
    assert merge([ID, NOTE], second.text) == Merged(second.text)


def test_a_number_is_not_given_away_twice_even_if_somebody_dropped_its_field() -> None:
    first = by_hand(
        field("a", 1)
        + field("b", 2, "TYPE_STRING", more="oneof_index: 0 proto3_optional: true")
        + 'oneof_decl { name: "_b" }'
    )
    second = by_hand(field("a", 1))
    found = merge([NOTE], second, first)
    assert numbers(found.text) == {"a": 1, "note": 3}
    assert "`b` had the number 2" in merge([pa.field("b", pa.string())], second, first).unfit[0].replace("'", "`")
    [reason] = merge([pa.field("a", pa.int32())], by_hand(field("a", 4)), first).unfit
    assert "the number 4 in the newest version, and 1 in another" in reason


def test_reserved_numbers_and_names_stay_so() -> None:
    text = by_hand(field("a", 18_998) + "reserved_range { start: 18999 end: 19000 } reserved_name: 'note' ")
    found = merge([ID], text)
    assert numbers(found.text) == {"a": 18_998, "id": 20_000}  # Protobuf keeps 19000 to 19999 for itself
    assert "the name is reserved" in merge([NOTE], text).unfit[0]
    full = by_hand(field("a", 2**29 - 1))
    assert "no number left" in merge([ID], full).unfit[0]


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (pa.list_(pa.list_(pa.int32())), "'v[]' is list<item: int32> in an array or a map, which Protobuf has not"),
        (pa.map_(pa.string(), pa.list_(pa.int32())), "'v.value' is list<item: int32> in an array or a map"),
        (pa.map_(pa.date32(), pa.int32()), "keys of maps are texts, integers or booleans"),
        (pa.month_day_nano_interval(), "no type of Protobuf for month_day_nano_interval"),
        (pa.null(), "no type of Protobuf for null; cast it"),
    ],
)
def test_types_that_protobuf_has_not(kind: pa.DataType, why: str) -> None:
    [reason] = merge([pa.field("v", kind)]).unfit
    assert why in reason


ENTRY = 'nested_type { name: "VEntry" field { name: "key" number: 1 label: LABEL_OPTIONAL type: TYPE_STRING } \
    field { name: "value" number: 2 label: LABEL_OPTIONAL type: TYPE_INT32 } options { map_entry: true } } '


@pytest.mark.parametrize(
    ("fields", "kind", "why"),
    [
        (field("v", 1), pa.int64(), "column 'v' is int64, and the field is int32"),
        (field("v", 1, "TYPE_UINT32"), pa.int32(), "column 'v' is int32, and the field is uint32"),
        (field("v", 1, "TYPE_SINT64"), pa.int32(), ""),
        (field("v", 1, "TYPE_FLOAT"), pa.float64(), "is double, and the field is float"),
        (field("v", 1, "TYPE_DOUBLE"), pa.float32(), ""),
        (field("v", 1), pa.list_(pa.int32()), "is list<item: int32>, and the field is int32"),
        (field("v", 1), pa.null(), "the field takes no null"),
        (field("v", 1, more="oneof_index: 0") + 'oneof_decl { name: "either" }', pa.int32(), "is one of 'either'"),
        (field("V", 1), pa.int32(), "the field is called 'V'"),
        (
            f'field {{ name: "v" number: 1 label: LABEL_REPEATED type: TYPE_MESSAGE type_name: "VEntry" }} {ENTRY}',
            pa.map_(pa.string(), pa.int32()),
            "",
        ),
        (
            f'field {{ name: "v" number: 1 label: LABEL_REPEATED type: TYPE_MESSAGE type_name: "VEntry" }} {ENTRY}',
            pa.map_(pa.int32(), pa.int32()),
            "column 'v.key' is int32, and the field is string",
        ),
    ],
)
def test_fields_that_take_a_column_and_those_that_do_not(fields: str, kind: pa.DataType, why: str) -> None:
    text = by_hand(fields)
    found = merge([pa.field("v", kind)], text)
    assert (found.text, found.changes) == (text, ())
    assert [why in reason for reason in found.unfit] == ([True] if why else [])


def test_schemas_that_cannot_be_written_say_why() -> None:
    assert "is of proto2" in merge([ID], by_hand(field("id", 1), syntax="proto2")).unfit[0]
    assert "register its descriptor" in merge([ID], 'syntax = "proto3"; message A {}').unfit[0]
    assert "cannot be loaded" in merge([ID], by_hand(field("id", 1, "TYPE_MESSAGE", more='type_name: ".B"'))).unfit[0]
    names = [pa.field("a b", pa.int32()), pa.field("a_b", pa.int32()), pa.field("aB", pa.int32())]
    assert len(merge(names).unfit) == 3


def test_the_essence_is_what_bytes_are_read_by() -> None:
    text = merge([ID, pa.field("s", pa.struct([NOTE]))]).text
    file = file_of(text)
    file.name, file.options.java_package = "other", "com.example"
    assert essence(base64.b64encode(file.SerializeToString()).decode()) == essence(text)
    file.message_type[0].nested_type[0].field[0].number = 9
    assert essence(base64.b64encode(file.SerializeToString()).decode()) != essence(text)


# ---------------------------------------------------------------------- evolution
@pytest.mark.large
def test_none_registers_nothing_and_the_diff_shows_what_is_to_be_done(subject: Messages, tmp_path: Path) -> None:
    with closing(subject.sink("none")) as sink, pytest.raises(SchemaMismatch, match="needs a first version"):
        sink.check(OLD.schema)
    assert subject.versions() == []
    subject.register(merge([ID]).text)
    with closing(subject.sink("none")) as sink:
        sink.check(OLD.schema)
        with pytest.raises(SchemaMismatch, match=r"add the field note: optional string.*schema_evolution='add'"):
            sink.check(NEW.schema)
        assert any("has version 1, compatibility" in finding.message for finding in sink.diagnose("job"))
    job = Job(
        tmp_path,
        f'type = "kafka"\nbootstrap_servers = "{subject.kafka.bootstrap}"\ntopic = "{subject.topic}"\n'
        f'value_format = "protobuf"\nschema_registry = "{subject.url}"\nschema_evolution = "add"',
    )
    diff = job.cli("schema", "diff", "id int, note string", code=1)
    assert "add the field note" in diff.stdout
    assert "optional int32 id = 1;\n  optional string note = 2;\n}" in diff.stderr
    assert "calls it compatible with the latest version" in diff.stderr
    assert "is int64, and the field is int32" in job.cli("schema", "diff", "id bigint", code=1).stderr
    assert len(subject.versions()) == 1


@pytest.mark.large
def test_a_registry_that_does_not_take_the_new_fields_stops_before_the_first_row(subject: Messages) -> None:
    """Apicurio 2.6 cannot compare descriptors, as serializers register them: with a rule it takes none any more."""
    subject.register(merge([ID]).text)
    subject.client.set_compatibility(subject.name, "FORWARD")
    subject.ready(OLD.schema).close()
    refused = (ConfigurationError, SchemaMismatch)
    with closing(subject.sink()) as sink, pytest.raises(refused, match=r"whether a schema is compatible|FORWARD"):
        sink.check(NEW.schema)
    assert subject.versions() == [{"id": 1}]


# ---------------------------------------------------------------------- who dies, and what changes meanwhile
@pytest.mark.large
def test_driver_killed_twice_around_the_registration_and_every_row_is_read_once(
    subject: Messages, tmp_path: Path
) -> None:
    input: list[Partitions] = [[of_ids(1, 2), of_ids(3)], [noted((None, 4)), noted(("x", 5))]]

    def driver(sink: Any, *listeners: CheckpointListener) -> Driver:
        return Driver("job", sink, f"file://{tmp_path / 'storage'}", tmp_path / "query", input, listeners)

    assert driver(subject.sink(), KillAt(Step.COMPLETE, checkpoint_id=0)).run() == KILLED
    assert driver(Hooked(subject.sink(), "evolve", after=True)).run() == KILLED
    subject.register(merge([pa.field("other", pa.int32())], subject.texts()[-1]).text)  # by somebody else
    sink = subject.sink()

    def lose() -> None:
        for transaction in list(sink.in_doubt("job")):
            sink.abort(transaction)

    driver(sink, At(Step.COMPLETE, 1, lose)).run_here()
    assert subject.ids() == [1, 2, 3, 4, 5]
    assert subject.versions()[-1] in ({"id": 1, "other": 2, "note": 3}, {"id": 1, "note": 2, "other": 3})


@pytest.mark.large
def test_a_registry_that_is_down_or_was_set_back(
    kafka: KafkaService, kafka_topic: str, own_registry: RegistryServer, tmp_path: Path
) -> None:
    subject = Messages(kafka, kafka_topic, own_registry.url)
    own_registry.pause()
    impatient = {"url": subject.url, "timeout": 0.5, "max.retries": 0}
    with (
        closing(subject.sink(schema_registry=impatient)) as sink,
        pytest.raises(ConfigurationError, match=r"cannot be asked for .*Timeout"),
    ):
        sink.check(OLD.schema)
    own_registry.resume()
    subject.outlives(own_registry, tmp_path, [[OLD], [of_ids(3)], [of_ids(4)]], merge([NOTE]).text)


@pytest.mark.large
def test_what_protobuf_cannot_hold_is_a_bad_row(subject: Messages, kafka: KafkaService, tmp_path: Path) -> None:
    given = rows({"id": pa.int32(), "tags": pa.list_(pa.string())}, (1, []), (2, None), (3, ["a"]))
    with (
        closing(subject.ready(given.schema)) as sink,
        pytest.raises(BadValue, match="row 2 of a batch: tags: null, which would be read as an empty array"),
    ):
        pre_commit(sink, *given.to_batches())
    with kafka.topic() as letters:
        dead = KafkaSink(kafka.bootstrap, letters, name="letters")
        run(subject.sink(dead_letters=dead), tmp_path, [[given]])
    assert subject.ids() == [1, 3]


# ---------------------------------------------------------------------- set-up
@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, "value_format='protobuf' needs schema_registry"),
        ({"schema_registry": "http://r", "topic": None}, "needs a topic or a subject"),
        ({"schema_registry": "http://r", "schema_evolution": "widen"}, "'widen' is only for Avro"),
    ],
)
def test_settings_that_do_not_go_together(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        KafkaSink("b:9092", options.pop("topic", "orders"), value_format="protobuf", **options)
