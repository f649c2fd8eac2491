"""Values in Avro, with a real schema registry, as confluent-kafka's own deserializer reads them."""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Mapping
from contextlib import closing
from datetime import date, datetime, time, timedelta, timezone
from decimal import Context, Decimal
from io import BytesIO
from itertools import zip_longest
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from confluent_kafka.schema_registry import Schema
from confluent_kafka.schema_registry.avro import AvroDeserializer
from confluent_kafka.serialization import MessageField, SerializationContext
from pyspark.sql import SparkSession

from coordinator import CheckpointCoordinator, CheckpointListener, Step
from sinks.errors import BadValue, ConfigurationError, SchemaMismatch
from sinks.kafka import KafkaSink
from sinks.kafka.serialization.avro import essence, merged
from sinks.kafka.serialization.encoding import AvroWriter
from sinks.testing import KILLED, Driver, Hooked
from sinks.testing.driver import KillAt
from sinks.testing.local import Partitions
from sinks.testing.servers.kafka import KafkaService
from sinks.testing.servers.registry import RegistryServer
from sinks.transaction import CommitOutcome
from tests.cli.jobs import Job
from tests.kafka.reading import read, settled
from tests.kafka.subject import AnyRegistry, Subject, rows
from tests.kafka.tasks import pre_commit
from tests.kafka.test_crashes import At, run

NOTE = {"name": "note", "type": ["null", "string"], "default": None}
ID, WIDE_ID, NAME = (
    {"name": n, "type": ["null", t], "default": None} for n, t in (("id", "int"), ("id", "long"), ("name", "string"))
)


def of_ids(*ids: int | None, kind: pa.DataType | None = None, **others: tuple[pa.DataType, Any]) -> pa.Table:
    fields = {"id": kind or pa.int32(), **{name: kind for name, (kind, _) in others.items()}}
    return rows(fields, *[(id, *(value for _, value in others.values())) for id in ids])


OLD, NEW = of_ids(1, 2), of_ids(3, 4, kind=pa.int64(), note=(pa.string(), "new"))


def text(*fields: Mapping[str, Any], name: str = "orders") -> str:
    return json.dumps({"type": "record", "name": name, "fields": fields})


class Avro(Subject):
    value_format, evolution = "avro", "widen"

    def fields(self, *fields: Mapping[str, Any]) -> int:
        return self.register(text(*fields))

    def versions(self) -> list[Any]:
        """The fields of each version."""
        return [json.loads(text)["fields"] for text in self.texts()]

    def deserializer(self) -> Any:
        return AvroDeserializer(self.client)

    def ids(self) -> list[int]:
        return sorted(value["id"] for value in self.values())


@pytest.fixture
def subject(kafka: KafkaService, kafka_topic: str, registry: AnyRegistry) -> Avro:
    return Avro(kafka, kafka_topic, registry.url)


# ---------------------------------------------------------------------- what is read back
EVERY_TYPE: dict[str, tuple[pa.DataType, list[Any]]] = {
    "flag": (pa.bool_(), [True, False]),
    "tiny": (pa.int8(), [-128, 127]),
    "small": (pa.int16(), [-(2**15), 2**15 - 1]),
    "int": (pa.int32(), [-(2**31), 2**31 - 1]),
    "long": (pa.int64(), [-(2**63), 2**63 - 1]),
    "single": (pa.float32(), [-0.5, math.inf]),
    "double": (pa.float64(), [math.pi, math.nan]),
    "text": (pa.string(), ["", "grün 🌱"]),
    "bytes": (pa.binary(), [b"", b"\0\xff"]),
    "price": (pa.decimal128(10, 2), [Decimal("-99999999.99"), Decimal("0.00")]),
    "huge": (pa.decimal128(38, 0), [Decimal(10**38 - 1), Decimal(-(10**38) + 1)]),
    "day": (pa.date32(), [date(1, 1, 1), date(9999, 12, 31)]),
    "at": (
        pa.timestamp("us", "UTC"),
        [datetime(1969, 12, 31, 23, 59, 59, 999999, timezone.utc), datetime(2026, 2, 3, 4, 5, 6, 7, timezone.utc)],
    ),
    "local": (pa.timestamp("us"), [datetime(1900, 1, 1), datetime(2026, 2, 3, 4, 5, 6, 7)]),
    "span": (pa.duration("us"), [timedelta(days=-1), timedelta(microseconds=1)]),
    "list": (pa.list_(pa.int32()), [[], [1, None, 3]]),
    "map": (pa.map_(pa.string(), pa.float64()), [[], [("a", 1.0), ("-type", None)]]),
    "by_number": (pa.map_(pa.int32(), pa.date32()), [[], [(1, date(2020, 2, 29))]]),
    "struct": (
        pa.struct([("a", pa.list_(pa.struct([("b", pa.decimal128(4, 1))]))), ("at", pa.timestamp("us", "UTC"))]),
        [
            {"a": None, "at": None},
            {"a": [{"b": Decimal("1.5")}, None], "at": datetime(2020, 1, 1, tzinfo=timezone.utc)},
        ],
    ),
}


def test_every_type_is_read_back_as_it_was(subject: Avro) -> None:
    kind = {name: kind for name, (kind, _) in EVERY_TYPE.items()}
    given = rows(kind, *zip(*(values for _, values in EVERY_TYPE.values()), strict=True), (None,) * len(kind), None)
    headers = pa.array([[]] * len(given), pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])))
    [batch] = given.append_column("headers", headers).to_batches()  # record by record; the other tests in batches
    with closing(subject.ready(batch.schema)) as sink:
        assert sink.commit(pre_commit(sink, batch)) == CommitOutcome.COMMITTED
    read_back = subject.values()
    for name, (_, values) in EVERY_TYPE.items():
        plain = [_plain(name, value) for value in values]
        assert sorted(map(repr, (row[name] for row in read_back if row))) == sorted(map(repr, [*plain, None])), name
    assert read_back.count(None) == 1  # a tombstone


def _plain(name: str, value: Any) -> Any:
    """As Avro has it."""
    if name == "span":
        return value // timedelta(microseconds=1)
    if name == "map":
        return dict(value)
    return [{"key": k, "value": v} for k, v in value] if name == "by_number" else value


def test_slices_and_days_that_python_has_not() -> None:
    kind = pa.struct([("day", pa.date32()), ("tags", pa.map_(pa.string(), pa.timestamp("ns")))])
    array = pa.array([{"day": None, "tags": [("x", n)]} for n in range(0, 5000, 1000)], kind)
    far = pa.StructArray.from_arrays([pa.array([10**7, -(10**7)], pa.int32()).cast(pa.date32())], names=["day"])
    schema = merged(None, far.type, "r").text
    encoded, refused = AvroWriter(7, schema).encoded(far)
    assert [value.as_py()[:5] for value in encoded] == [b"\0\0\0\0\7"] * 2
    assert refused == []
    whole, _ = AvroWriter(7, merged(None, kind, "r").text).encoded(array)
    part, _ = AvroWriter(7, merged(None, kind, "r").text).encoded(array.slice(2, 2))
    assert part.to_pylist() == whole.to_pylist()[2:4]


# ---------------------------------------------------------------------- subjects of Java programs
STATUS = {"type": "enum", "name": "Status", "symbols": ["NEW", "PAID"]}
PRICE = {"type": "fixed", "name": "Price", "size": 5, "logicalType": "decimal", "precision": 10, "scale": 2}
MILLIS = {"type": "long", "logicalType": "timestamp-millis"}
LOCAL_MILLIS = {"type": "long", "logicalType": "local-timestamp-millis"}
TIME_MILLIS = {"type": "int", "logicalType": "time-millis"}
TEXT_UUID = {"type": "string", "logicalType": "uuid"}
A_UUID = "01234567-89ab-cdef-0123-456789abcdef"
MOMENT, CLOCK = datetime(2026, 2, 3, 4, 5, 6, 7000, timezone.utc), datetime(1969, 12, 31, 23, 59, 59, 999000)

BY_JAVA: dict[str, tuple[Any, pa.DataType, list[Any], list[Any]]] = {
    # the field's type, the column's, values that go in, and values that do not
    "status": (STATUS, pa.string(), ["NEW", "PAID"], ["new", ""]),
    "id": (TEXT_UUID, pa.string(), [A_UUID, A_UUID.upper()], ["x", A_UUID[1:], f"{A_UUID}\n"]),
    "at": (MILLIS, pa.timestamp("us", "UTC"), [MOMENT], [MOMENT.replace(microsecond=7001)]),
    "at_number": (MILLIS, pa.int64(), [-1, 1_770_091_506_007], []),
    "clock": (LOCAL_MILLIS, pa.timestamp("us"), [CLOCK], [CLOCK.replace(microsecond=999_999)]),
    "time": (TIME_MILLIS, pa.time64("us"), [time(23, 59, 59, 999_000)], [time(0, 0, 0, 1)]),
    "price": (
        PRICE,
        pa.decimal128(20, 1),
        [Decimal("-99999999.9"), Decimal("0.0"), Decimal("1.5"), Decimal("-0.1"), Decimal("99999999.9")],
        [Decimal("100000000.0"), Decimal("-100000000.0")],
    ),
    "small": (
        {**PRICE, "name": "Small", "size": 1, "precision": 2},
        pa.decimal128(4, 2),
        [Decimal("0.99"), Decimal("-0.99"), Decimal("0.00")],
        [Decimal("1.00"), Decimal("-1.28")],
    ),
    "huge": (
        {**PRICE, "name": "Huge", "size": 16, "precision": 38},
        pa.decimal128(38, 2),
        [Decimal(10**38 - 1).scaleb(-2, Context(prec=50)), Decimal(-(10**38) + 1).scaleb(-2, Context(prec=50))],
        [],
    ),
    "digest": ({"type": "fixed", "name": "Digest", "size": 2}, pa.binary(), [b"\0\xff"], [b"", b"abc"]),
    "custom": ({"type": "long", "logicalType": "of-our-own"}, pa.int64(), [7], []),
}


def decoded(registered: str, values: Any) -> list[Any]:
    schema = json.loads(registered)
    return [v and fastavro.schemaless_reader(BytesIO(v[5:]), schema, None) for v in values.to_pylist()]


def as_java_reads(name: str, value: Any) -> Any:
    if name == "id":
        return uuid.UUID(value)
    return datetime.fromtimestamp(value / 1000, timezone.utc) if name == "at_number" else value


@pytest.mark.parametrize("optional", [False, True])
@pytest.mark.parametrize("name", BY_JAVA)
def test_types_of_java_programs_take_each_value_that_fits_and_others_are_bad_rows(name: str, optional: bool) -> None:
    """By columns where there is no bad row, else row by row: both write the same bytes."""
    field, kind, good, bad = BY_JAVA[name]
    registered = text({"name": name, "type": ["null", field] if optional else field})
    struct = pa.struct([(name, kind)])
    plan = merged(registered, struct, "")
    assert (plan.text, plan.changes, plan.unfit) == (registered, (), ())
    good = [*good, None] if optional else good
    expected = [{name: value if value is None else as_java_reads(name, value)} for value in good]
    for _ in range(2):
        encoded, refused = AvroWriter(1, registered).encoded(pa.array([{name: value} for value in good], struct))
        assert refused == []
        assert decoded(registered, encoded) == expected
    mixed = [value for pair in zip_longest(bad, good, fillvalue=good[0]) for value in pair]
    encoded, refused = AvroWriter(1, registered).encoded(pa.array([{name: value} for value in mixed], struct))
    at = [n for n, value in enumerate(mixed) if value in bad]
    assert [refusal.row for refusal in refused] == at
    assert [n for n, value in enumerate(encoded.to_pylist()) if value is None] == at
    assert all(name in refusal.error or "finer" in refusal.error for refusal in refused)
    read_back = [row[name] for row in decoded(registered, encoded) if row]
    assert read_back == [v if v is None else as_java_reads(name, v) for v in mixed if v not in bad]


def test_types_of_java_programs_at_any_depth() -> None:
    """Also where a name stands for a type, with its namespace or without."""
    line = {
        "type": "record",
        "name": "Line",
        "fields": [
            {"name": "status", "type": STATUS},
            {"name": "before", "type": ["null", "com.example.Status"]},
            {"name": "at", "type": MILLIS},
        ],
    }
    fields = [
        {"name": "lines", "type": {"type": "array", "items": ["null", line]}},
        {"name": "by_name", "type": {"type": "map", "values": ["null", TEXT_UUID]}},
        {
            "name": "by_number",
            "type": {
                "type": "array",
                "items": {
                    "type": "record",
                    "name": "Entry",
                    "fields": [{"name": "key", "type": "int"}, {"name": "value", "type": "Status"}],
                },
            },
        },
        {"name": "last", "type": "com.example.Line"},
    ]
    registered = json.dumps({"type": "record", "name": "Order", "namespace": "com.example", "fields": fields})
    of_line = pa.struct([("status", pa.string()), ("before", pa.string()), ("at", pa.timestamp("us", "UTC"))])
    kind = pa.struct(
        [
            ("lines", pa.list_(of_line)),
            ("by_name", pa.map_(pa.string(), pa.string())),
            ("by_number", pa.map_(pa.int32(), pa.string())),
            ("last", of_line),
        ]
    )
    plan = merged(registered, kind, "")
    assert (plan.text, plan.changes, plan.unfit) == (registered, (), ())
    one = {"status": "NEW", "before": None, "at": MOMENT}
    two = {"status": "PAID", "before": "NEW", "at": MOMENT}
    good = {"lines": [one, None, two], "by_name": [("a", A_UUID), ("b", None)], "by_number": [(1, "NEW")], "last": two}
    bad = [
        {**good, "lines": [{**one, "before": "OLD"}]},
        {**good, "by_name": [("a", "b")]},
        {**good, "by_number": [(1, "OLD")]},
        {**good, "last": {**one, "at": MOMENT.replace(microsecond=1)}},
    ]
    encoded, refused = AvroWriter(1, registered).encoded(pa.array([good, *bad, good], kind))
    assert [refusal.row for refusal in refused] == [1, 2, 3, 4]
    told = ("'lines[].before': 'OLD' is none of the symbols", "'by_name{}': 'b' is no UUID", "'by_number{}'", "finer")
    for refusal, words in zip(refused, told, strict=True):
        assert words in refusal.error
    expected = {**good, "by_name": {"a": uuid.UUID(A_UUID), "b": None}, "by_number": [{"key": 1, "value": "NEW"}]}
    assert decoded(registered, encoded) == [expected, None, None, None, None, expected]


def test_a_record_that_contains_itself_takes_rows_of_some_depth() -> None:
    node = {
        "type": "record",
        "name": "Node",
        "fields": [{"name": "kind", "type": STATUS}, {"name": "next", "type": ["null", "Node"], "default": None}],
    }
    kind = pa.struct([("kind", pa.string()), ("next", pa.struct([("kind", pa.string())]))])
    given = [{"kind": "NEW", "next": {"kind": "PAID"}}, {"kind": "PAID", "next": None}, {"kind": "x", "next": None}]
    encoded, [refused] = AvroWriter(1, json.dumps(node)).encoded(pa.array(given, kind))
    assert refused.row == 2
    first, second, _ = decoded(json.dumps(node), encoded)
    assert first == {"kind": "NEW", "next": {"kind": "PAID", "next": None}}
    assert second == {"kind": "PAID", "next": None}


def test_a_subject_of_a_java_program_is_written_and_its_bad_rows_are_dead_letters(
    subject: Avro, kafka: KafkaService, tmp_path: Path
) -> None:
    names = ("status", "id", "at", "clock", "time", "price")
    registered = json.dumps(
        {
            "type": "record",
            "name": "Order",
            "namespace": "com.example",
            "fields": [{"name": name, "type": BY_JAVA[name][0]} for name in names],
        }
    )
    subject.register(registered)
    good = {name: BY_JAVA[name][2][0] for name in names}
    bad = [{**good, name: BY_JAVA[name][3][0]} for name in names]
    kinds = {name: BY_JAVA[name][1] for name in names}
    given = rows(kinds, *[tuple(row.values()) for row in [good, *bad, good]])
    with kafka.topic() as letters:
        dead = KafkaSink(kafka.bootstrap, letters, name="letters")
        run(subject.sink("none", dead_letters=dead), tmp_path, [[given]])
        settled(kafka.bootstrap)
        written = read(kafka.client_options(), letters)
    expected = {name: as_java_reads(name, value) for name, value in good.items()}
    assert subject.values() == [expected, expected]
    assert len(written) == len(bad)
    assert subject.texts() == [registered]


def test_what_goes_in_by_no_way_names_the_field_and_value_serializer(subject: Avro) -> None:
    subject.fields({"name": "mixed", "type": ["null", "int", "string"]})
    with closing(subject.sink("none")) as sink:
        with pytest.raises(SchemaMismatch, match=r"field 'mixed' is a union of several types.*`value_serializer`"):
            sink.check(rows({"mixed": pa.int32()}, (1,)).schema)
        diff = sink.schema_diff(rows({"mixed": pa.int32()}, (1,)).schema)
    assert diff is not None
    assert any("value_serializer" in note for note in diff.notes)


# ---------------------------------------------------------------------- schemas, without a registry
STRUCT = pa.struct([("id", pa.int32()), ("price", pa.decimal128(6, 2))])
BY_HAND = {
    "type": "record",
    "name": "Order",
    "namespace": "com.example",
    "doc": "from another team",
    "fields": [
        {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 10, "scale": 2}},
        {"name": "id", "type": "long", "doc": "the number"},
        {"name": "kind", "type": "string", "default": "web"},
        {"name": "seen", "type": ["null", "boolean"]},
    ],
}


def test_a_schema_made_by_hand_is_used_as_it_is() -> None:
    registered = json.dumps(BY_HAND)
    plan = merged(registered, STRUCT, "ignored")
    assert (plan.text, plan.changes, plan.unfit) == (registered, (), ())
    column = pa.array([{"id": 1, "price": Decimal("1.50")}, {"id": None, "price": Decimal("2.00")}], STRUCT)
    encoded, refused = AvroWriter(1, registered).encoded(column)
    assert [refusal.row for refusal in refused] == [1]
    assert "id" in refused[0].error
    assert encoded[0].as_py() == b"\0\0\0\0\1" + b"\x04\0\x96" + b"\x02" + b"\x06web" + b"\0"


def test_a_null_struct_of_fields_that_may_not_be_null() -> None:
    """Arrow has nulls in the place of its fields, too."""
    field = pa.field("v", pa.timestamp("us", "UTC"), nullable=False)
    inner = pa.StructArray.from_arrays([pa.array([5, None], field.type)], fields=[field], mask=pa.array([False, True]))
    column = pa.StructArray.from_arrays([inner], fields=[pa.field("s", inner.type)])
    encoded, refused = AvroWriter(1, merged(None, column.type, "r").text).encoded(column)
    assert (refused, encoded.null_count) == ([], 0)


def test_what_the_rows_lack_at_any_depth_is_its_default_and_decimals_keep_their_value() -> None:
    price = {"type": "bytes", "logicalType": "decimal", "precision": 12, "scale": 4}
    inner = {"type": "record", "name": "In", "fields": [{"name": "seen", "type": ["null", "int"]}, NOTE, ID]}
    registered = text({"name": "in", "type": ["null", inner]}, {"name": "price", "type": [price, "null"]})
    kind = pa.struct([("in", pa.struct([("id", pa.int32())])), ("price", pa.decimal128(6, 2))])
    plan = merged(registered, kind, "")
    assert (plan.text, plan.changes, plan.unfit) == (registered, (), ())
    given = [{"in": {"id": 3}, "price": Decimal("-1234.56")}, {"in": None, "price": None}]
    encoded, refused = AvroWriter(1, registered).encoded(pa.array(given, kind))
    assert refused == []
    first, second = (
        fastavro.schemaless_reader(BytesIO(value.as_py()[5:]), json.loads(registered), None) for value in encoded
    )
    assert first == {"in": {"seen": None, "note": None, "id": 3}, "price": Decimal("-1234.5600")}
    assert second == {"in": None, "price": None}


@pytest.mark.parametrize(
    ("kind", "default", "read"),
    [
        ("bytes", "\u00ff\u0001", b"\xff\x01"),
        (["bytes", "null"], "", b""),
        ({"type": "fixed", "name": "Fix", "size": 2}, "\u00ff\u0001", b"\xff\x01"),
        ({"type": "bytes", "logicalType": "decimal", "precision": 4, "scale": 2}, "\u0001", Decimal("0.01")),
        ({"type": "map", "values": "bytes"}, {"a": "\u00ff"}, {"a": b"\xff"}),
        ({"type": "array", "items": "bytes"}, ["\u00ff"], [b"\xff"]),
        ({"type": "record", "name": "In", "fields": [{"name": "x", "type": "bytes"}]}, {"x": ""}, {"x": b""}),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, (dict, list)) else "",
)
def test_a_default_of_bytes_is_written_where_the_rows_lack_the_field(kind: Any, default: Any, read: Any) -> None:
    registered = text(ID, {"name": "more", "type": kind, "default": default})
    encoded, refused = AvroWriter(1, registered).encoded(pa.array([{"id": 3}], pa.struct([("id", pa.int32())])))
    assert refused == []
    value = fastavro.schemaless_reader(BytesIO(encoded[0].as_py()[5:]), json.loads(registered), None)
    assert value == {"id": 3, "more": read}


def test_a_column_that_the_schema_has_no_place_for_is_not_left_out() -> None:
    column = pa.array([{"id": 1, "note": "kept", "name": "a"}])
    with pytest.raises(SchemaMismatch, match="the schema number 7 does not take the rows: add the field note"):
        AvroWriter(7, text({"name": "id", "type": "long"}, NAME)).encoded(column)


def test_null_is_not_written_as_false() -> None:
    """As fastavro would without validation."""
    column = pa.array([{"flag": None}, {"flag": False}], pa.struct([("flag", pa.bool_())]))
    encoded, [refused] = AvroWriter(1, text({"name": "flag", "type": "boolean"})).encoded(column)
    assert refused.row == 0
    assert encoded.to_pylist() == [None, b"\0\0\0\0\1\0"]


def test_a_map_with_a_key_twice_is_a_bad_row() -> None:
    """Readers would see one of the two."""
    column = pa.array(
        [{"m": [("a", 1), ("a", 2)]}, {"m": [("a", 1)]}], pa.struct([("m", pa.map_(pa.string(), pa.int32()))])
    )
    encoded, [refused] = AvroWriter(1, merged(None, column.type, "r").text).encoded(column)
    assert (refused.row, refused.error_class, encoded[0].as_py()) == (0, "ValidationError", None)


def test_a_short_name_of_two_types_stands_for_neither() -> None:
    first, second = (
        {"type": "record", "name": "In", "namespace": n, "fields": [f]} for n, f in (("a", ID), ("b", WIDE_ID))
    )
    registered = text({"name": "x", "type": first}, {"name": "y", "type": second}, {"name": "z", "type": "a.In"})
    of = {name: pa.struct([("id", kind)]) for name, kind in (("x", pa.int32()), ("y", pa.int64()), ("z", pa.int32()))}
    assert merged(registered, pa.struct(list(of.items())), "").unfit == ()
    [reason] = merged(registered.replace("a.In", "In"), pa.struct(list(of.items())), "").unfit
    assert "UnknownType('In')" in reason


@pytest.mark.parametrize(
    ("field", "kind", "step"),
    [
        ("int", pa.int64(), "widen"),
        (["null", "float"], pa.float64(), "widen"),
        ({"type": "bytes", "logicalType": "decimal", "precision": 6, "scale": 2}, pa.decimal128(8, 2), "widen"),
        ({"type": "array", "items": ["null", "int"]}, pa.list_(pa.int64()), "widen"),
        ("long", pa.int16(), ""),
        ({"type": "string", "avro.java.string": "String"}, pa.string(), ""),
        ({"type": "record", "name": "In", "fields": []}, pa.struct([("more", pa.int32())]), "add"),
    ],
)
def test_what_a_field_needs(field: Any, kind: pa.DataType, step: str) -> None:
    registered = text({"name": "v", "type": field})
    plan = merged(registered, pa.struct([("v", kind)]), "")
    assert plan.unfit == ()
    assert [change.step for change in plan.changes] == ([step] if step else [])
    again = merged(plan.text, pa.struct([("v", kind)]), "")
    assert (again.changes, again.unfit) == ((), ())


@pytest.mark.parametrize(
    ("field", "kind", "why"),
    [
        ("string", pa.int32(), "column 'v' is int32, and the field is \"string\""),
        ("int", pa.float64(), "is double"),
        (["null", "int", "string"], pa.int32(), "union of several types"),
        ({"type": "long", "logicalType": "timestamp-millis"}, pa.timestamp("us"), "timestamp-millis"),
        ({"type": "long", "logicalType": "timestamp-nanos"}, pa.timestamp("us", "UTC"), "timestamp-nanos"),
        ({"type": "long", "logicalType": "timestamp-micros"}, pa.int64(), "timestamp-micros"),
        (
            {"type": "fixed", "name": "F", "size": 4, "logicalType": "decimal", "precision": 9, "scale": 2},
            pa.decimal128(6, 3),
            "scale stays",
        ),
        ({"type": "map", "values": "int"}, pa.map_(pa.int32(), pa.int32()), "column 'v' is map<int32, int32>"),
        ({"type": "bytes", "logicalType": "decimal", "precision": 6, "scale": 2}, pa.decimal128(6, 3), "scale stays"),
        ({"type": "bytes", "logicalType": "decimal", "precision": 38, "scale": 9}, pa.decimal128(38, 2), "scale stays"),
        ("int", pa.null(), "takes no null"),
    ],
)
def test_what_no_step_mends(field: Any, kind: pa.DataType, why: str) -> None:
    [reason] = merged(text({"name": "v", "type": field}), pa.struct([("v", kind)]), "").unfit
    assert why in reason


def test_names_and_types_that_avro_has_not() -> None:
    odd = pa.struct([("a b", pa.int32()), ("c", pa.int32()), ("C", pa.int32())])
    assert len(merged(None, odd, "r").unfit) == 3
    assert "called 'Id'" in merged(text({**ID, "name": "Id"}), pa.struct([("id", pa.int32())]), "r").unfit[0]
    assert "no type of Avro" in merged(None, pa.struct([("i", pa.month_day_nano_interval())]), "r").unfit[0]
    assert "no default" in merged(text({"name": "x", "type": "int"}), pa.struct([]), "r").unfit[0]
    inner = pa.struct([("value", pa.binary()), pa.field("metadata", pa.binary(), metadata={"variant": "true"})])
    deep = pa.struct([("id", pa.int64()), ("v", pa.list_(inner))])
    for kind, where in ((inner, ""), (deep, "column 'v': ")):
        assert merged(None, kind, "r").unfit == (f"{where}it holds a variant: use to_json() in Spark",)


def test_a_type_that_stands_twice_is_not_changed_for_one() -> None:
    inner = {"type": "record", "name": "In", "fields": [ID]}
    registered = text({"name": "a", "type": inner}, {"name": "b", "type": "In"})
    wide = pa.struct([("a", pa.struct([("id", pa.int32())])), ("b", pa.struct([("id", pa.int64())]))])
    assert "stands elsewhere" in merged(registered, wide, "r").unfit[0]


def test_the_essence_is_what_bytes_are_read_by() -> None:
    assert essence(text({**ID, "doc": "x"})) == essence(text(ID))
    assert essence(text(ID)) != essence(text(WIDE_ID))
    assert essence(json.dumps(BY_HAND)) == essence(json.dumps({**BY_HAND, "name": "com.example.Order"}))


# ---------------------------------------------------------------------- evolution
@pytest.mark.large
def test_schemas_evolve_while_the_query_runs_and_both_are_read(subject: Avro, tmp_path: Path) -> None:
    run(subject.sink(), tmp_path, [[OLD], [NEW]])
    assert subject.ids() == [1, 2, 3, 4]
    assert {value.get("note") for value in subject.values()} == {None, "new"}
    assert subject.versions() == [[ID], [WIDE_ID, NOTE]]


def test_none_registers_nothing_and_says_what_differs(subject: Avro, tmp_path: Path) -> None:
    with closing(subject.sink("none")) as sink:
        with pytest.raises(SchemaMismatch, match=r"has no schema\. For these rows: it needs a first version"):
            sink.check(OLD.schema)
        assert subject.versions() == []
        subject.fields(ID)
        sink.check(OLD.schema)
        with pytest.raises(
            SchemaMismatch, match=r"widen the field id: int to long; add the field note.*schema_evolution='widen'"
        ):
            sink.check(NEW.schema)
    with closing(subject.sink("add")) as sink, pytest.raises(SchemaMismatch, match="schema_evolution='widen'"):
        run(sink, tmp_path, [[OLD], [NEW]])
    assert subject.versions() == [[ID]]
    assert subject.ids() == [1, 2]
    with closing(subject.sink()) as sink:
        assert any("has version 1, compatibility" in finding.message for finding in sink.diagnose("job"))


@pytest.mark.large
def test_an_older_program_writes_nulls_with_the_newer_schema(subject: Avro) -> None:
    newer = subject.ready(NEW.schema)
    older = subject.ready(OLD.schema, "none")
    for sink, table, subtask in ((newer, NEW, 0), (older, OLD, 1)):
        with closing(sink):
            assert sink.commit(pre_commit(sink, *table.to_batches(), subtask=subtask)) == CommitOutcome.COMMITTED
    assert subject.ids() == [1, 2, 3, 4]
    assert len(subject.versions()) == 1


@pytest.mark.large
def test_what_the_registry_calls_incompatible_stops_before_the_first_row(subject: Avro, tmp_path: Path) -> None:
    subject.fields(ID)
    subject.client.set_compatibility(subject.name, "FULL")
    with (
        closing(subject.sink()) as sink,
        pytest.raises(SchemaMismatch, match=r"id: int to long.*compatibility is FULL"),
    ):
        sink.check(NEW.schema)

    def forbid() -> None:
        subject.client.set_compatibility(subject.name, "FORWARD")

    subject.client.set_compatibility(subject.name, "BACKWARD")
    between_check_and_registration = At(Step.TRIGGERED, 1, forbid)
    with pytest.raises(SchemaMismatch, match="compatibility is FORWARD"):
        run(subject.sink(), tmp_path, [[OLD], [NEW]], between_check_and_registration)
    assert subject.versions() == [[ID]]
    assert subject.ids() == [1, 2]


def test_the_diff_shows_both_schemas_and_the_registrys_word(subject: Avro, tmp_path: Path) -> None:
    subject.fields(ID)
    subject.client.set_compatibility(subject.name, "FULL")
    job = Job(
        tmp_path,
        f'type = "kafka"\nbootstrap_servers = "{subject.kafka.bootstrap}"\ntopic = "{subject.topic}"\n'
        f'value_format = "avro"\nschema_registry = "{subject.url}"\nschema_evolution = "add"',
    )
    diff = job.json("schema", "diff", "key string, id bigint, note string", code=1)
    assert [(change["column"], change["automatic"]) for change in diff["changes"]] == [("id", False), ("note", True)]
    reason = "the registry refuses the new schema, by its compatibility FULL"
    assert {"sink": subject.topic, "reason": reason} in diff["unfit"]
    shown = job.cli("schema", "diff", "id int, note string", code=1)
    assert "add the field note" in shown.stdout
    assert f"version 1, schema {subject.client.get_latest_version(subject.name).schema_id}: {text(ID)}" in shown.stdout
    assert f"new schema: {text(ID, NOTE)}" in shown.stdout
    assert "calls it compatible with the latest version (compatibility FULL)" in shown.stdout
    assert "takes these rows as it is" in job.cli("schema", "diff", "id int").stdout
    assert subject.versions() == [[ID]]


# ---------------------------------------------------------------------- who dies, and what changes meanwhile
def test_driver_killed_twice_around_the_registration_and_every_row_is_read_once(subject: Avro, tmp_path: Path) -> None:
    input: list[Partitions] = [[of_ids(1, 2), of_ids(3)], [of_ids(4, kind=pa.int64()), of_ids(5, kind=pa.int64())]]

    def driver(sink: Any, *listeners: CheckpointListener) -> Driver:
        return Driver("job", sink, f"file://{tmp_path / 'storage'}", tmp_path / "query", input, listeners)

    assert driver(subject.sink(), KillAt(Step.COMPLETE, checkpoint_id=0)).run() == KILLED
    assert driver(Hooked(subject.sink(), "evolve", after=True)).run() == KILLED
    subject.fields(WIDE_ID, NOTE)  # by somebody else: what is replayed now lacks a field
    sink = subject.sink()

    def lose() -> None:
        for transaction in list(sink.in_doubt("job")):
            sink.abort(transaction)

    again = driver(sink, At(Step.COMPLETE, 1, lose))
    again.run_here()
    assert subject.ids() == [1, 2, 3, 4, 5]
    assert subject.versions() == [[ID], [WIDE_ID], [WIDE_ID, NOTE]]


@pytest.mark.large
def test_a_registry_that_is_down_or_was_set_back(
    kafka: KafkaService, kafka_topic: str, own_registry: RegistryServer, tmp_path: Path
) -> None:
    subject = Avro(kafka, kafka_topic, own_registry.url)
    subject.outlives(own_registry, tmp_path, [[OLD], [of_ids(3)], [of_ids(4)]], text(NOTE), "note")


@pytest.mark.large
def test_a_subject_that_is_deleted_while_the_query_runs(subject: Avro, tmp_path: Path) -> None:
    def delete() -> None:
        subject.client.delete_subject(subject.name)

    input: list[Partitions] = [[OLD], [of_ids(3)], [of_ids(4)]]
    run(subject.sink(), tmp_path, input[:2], At(Step.COMPLETE, 0, delete))
    with closing(subject.sink("none")) as sink, pytest.raises(SchemaMismatch, match="has no schema"):
        run(sink, tmp_path, input)
    run(subject.sink(), tmp_path, input)
    assert subject.ids() == [1, 2, 3, 4]
    assert subject.versions() == [[ID]]


@pytest.mark.large
def test_rows_of_spark(subject: Avro, spark: SparkSession, tmp_path: Path) -> None:
    """All columns become the value; the second start finds the first one's schema."""
    query = """SELECT key, id, CAST(id AS decimal(10,2)) AS price, map('a', id) AS m, map(id, 'a') AS by_number,
        array(named_struct('at', TIMESTAMP_MICROS(id))) AS list, make_date(9999, 12, 31) AS day FROM given"""
    source, columns = tmp_path / "source", "key string, id long"
    for start in range(2):
        spark.createDataFrame([("k", start)], columns).write.mode("append").parquet(str(source))
        spark.readStream.schema(columns).parquet(str(source)).createOrReplaceTempView("given")
        with CheckpointCoordinator("job", [subject.sink("add")], f"file://{tmp_path / 'storage'}") as coordinator:
            writer = coordinator.write_stream(spark.sql(query)).option("checkpointLocation", str(tmp_path / "location"))
            writer.trigger(availableNow=True).start().awaitTermination(300)
    [_, second] = sorted(subject.values(), key=lambda value: value["id"])
    assert second == {
        "id": 1,
        "price": Decimal("1.00"),
        "m": {"a": 1},
        "by_number": [{"key": 1, "value": "a"}],
        "list": [{"at": datetime(1970, 1, 1, 0, 0, 0, 1, timezone.utc)}],
        "day": date(9999, 12, 31),
    }
    assert {message.key() for message in read(subject.kafka.client_options(), subject.topic)} == {b"k"}
    assert len(subject.versions()) == 1


# ---------------------------------------------------------------------- keys
KEYS = pa.table({"key": pa.array([{"id": 7}], pa.struct([("id", pa.int32())])), "value": ["a"]})


def keys(subject: Avro) -> KafkaSink:
    return subject.sink("add", value_format=None, key_format="avro")


def test_keys_stay_the_same_bytes_by_the_subjects_first_version(subject: Avro, tmp_path: Path) -> None:
    run(keys(subject), tmp_path, [[KEYS]])
    client, name = subject.client, f"{subject.topic}-key"
    client.register_schema(name, Schema(text(ID, NOTE), "AVRO"))  # by somebody else
    run(keys(subject), tmp_path, [[KEYS], [KEYS]])
    settled(subject.kafka.bootstrap)
    first, second = read(subject.kafka.client_options(), subject.topic)
    assert first.key() == second.key()
    assert AvroDeserializer(subject.client)(first.key(), SerializationContext(subject.topic, MessageField.KEY)) == {
        "id": 7
    }
    wide = KEYS.set_column(0, "key", KEYS["key"].cast(pa.struct([("id", pa.int64())])))
    with closing(keys(subject)) as sink, pytest.raises(SchemaMismatch, match="int to long: a key's schema is never"):
        sink.check(wide.schema)
    client.delete_version(name, 1)
    with closing(keys(subject)) as sink, pytest.raises(ConfigurationError, match=r"first, and the topic's keys are"):
        run(sink, tmp_path, [[KEYS], [KEYS], [KEYS]])


def test_keys_without_an_order_are_refused(subject: Avro) -> None:
    maps = pa.schema([("key", pa.struct([("m", pa.map_(pa.string(), pa.int32()))])), ("value", pa.string())])
    with closing(keys(subject)) as sink, pytest.raises(SchemaMismatch, match=r"'key\.m' is a map.*other bytes"):
        sink.check(maps)


# ---------------------------------------------------------------------- bad rows
@pytest.mark.large
def test_what_the_schema_does_not_take_is_a_bad_row(subject: Avro, kafka: KafkaService, tmp_path: Path) -> None:
    subject.fields({"name": "id", "type": "int"})
    given = of_ids(1, None, 3)
    with (
        closing(subject.ready(given.schema, "none")) as sink,
        pytest.raises(BadValue, match=r"row 2 of a batch: .*id\) is None"),
    ):
        pre_commit(sink, *given.to_batches())
    with kafka.topic() as letters:
        dead = KafkaSink(kafka.bootstrap, letters, name="letters")
        run(subject.sink("none", dead_letters=dead), tmp_path, [[given]])
        settled(kafka.bootstrap)
        [letter] = read(kafka.client_options(), letters)
    assert subject.ids() == [1, 3]
    assert json.loads(letter.value() or b"") == {"value": {"id": None}}
    assert ("__streams.errors.exception", b"ValidationError") in list(letter.headers() or ())


def test_text_that_is_no_utf8_is_a_bad_row_and_the_others_are_written() -> None:
    texts = pa.array([b"a", b"\xff", b"c"], pa.binary()).view(pa.string())
    column = pa.StructArray.from_arrays([texts], names=["name"])
    encoded, [refused] = AvroWriter(1, text(NAME)).encoded(column)
    assert [value and value[6:] for value in encoded.to_pylist()] == [b"\x02a", None, b"\x02c"]
    assert (refused.row, refused.error_class) == (1, "UnicodeDecodeError")


# ---------------------------------------------------------------------- set-up
@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"value_format": "avro"}, "needs schema_registry"),
        ({"value_format": "avro", "schema_registry": "http://r", "topic": None}, "needs a topic or a subject"),
        ({"schema_registry": "http://r"}, "belong to value_format='avro'"),
        ({"value_format": "avro", "schema_registry": "http://r", "schema_evolution": "all"}, "schema_evolution is one"),
        ({"subject": "s"}, "subject belongs to"),
        ({"key_format": "avro"}, "key_format='avro' needs schema_registry"),
        ({"key_format": "protobuf", "schema_registry": "http://r"}, "key_format is 'avro' or None"),
        ({"value_format": "protobuf", "schema_registry": "http://r"}, r"value_format is one of 'json', 'avro' or None"),
        ({"key_format": "avro", "schema_registry": "http://r", "value_format": "json"}, "makes JSON of keys"),
        ({"key_subject": "s"}, "key_subject belongs to"),
    ],
)
def test_settings_that_do_not_go_together(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        KafkaSink("b:9092", options.pop("topic", "orders"), **options)


@pytest.mark.large
def test_an_address_that_is_no_registry(subject: Avro, kafka: KafkaService) -> None:
    other = Avro(kafka, subject.topic, subject.url.replace("/ccompat/v7", "/nothing"))
    with closing(other.sink()) as sink, pytest.raises(ConfigurationError, match="the address with its path"):
        sink.check(OLD.schema)
