"""Values of a `value_serializer`, by the code in docs/schema-registry.md, as confluent-kafka's own deserializer reads
them."""

from __future__ import annotations

import re
from contextlib import closing
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.protobuf import ProtobufDeserializer
from confluent_kafka.serialization import MessageField, SerializationContext

from coordinator import CheckpointListener, Step
from sinks.arrow.values import python_values
from sinks.errors import BadValue
from sinks.kafka import KafkaSink
from sinks.testing import KILLED, Driver
from sinks.testing.driver import KillAt
from sinks.testing.local import Partitions
from sinks.testing.servers.kafka import KafkaService
from tests.kafka.orders_pb2 import Order
from tests.kafka.reading import read, settled
from tests.kafka.subject import AnyRegistry, rows
from tests.kafka.tasks import pre_commit, sink_of
from tests.kafka.test_crashes import At

PAGE = Path(__file__).parents[2] / "docs" / "schema-registry.md"
NOON = datetime(2026, 2, 3, 12, tzinfo=timezone.utc)
KIND = {"id": pa.int64(), "at": pa.timestamp("us", "UTC"), "tags": pa.list_(pa.string()), "note": pa.string()}


def documented(registry: str) -> Any:
    """The function of the page, which travels to tasks as one of a user's notebook does."""
    [code] = re.findall(r"```python\n([^`]*ProtobufSerializer[^`]*)```", PAGE.read_text())
    code = code.replace("http://registry:8081", registry).replace("from orders_pb2", "from tests.kafka.orders_pb2")
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(code, names)
    assert isinstance(names["sink"], KafkaSink)
    return names["order_serializer"]


@pytest.fixture
def sink(kafka: KafkaService, kafka_topic: str, registry: AnyRegistry) -> KafkaSink:
    return sink_of(kafka, kafka_topic, value_serializer=documented(registry.url))


def orders(*ids: int, tags: Any = ("a", "b")) -> pa.Table:
    return rows(KIND, *((n, NOON, list(tags), "new" if n > 2 else None) for n in ids))


def test_messages_of_a_generated_class_are_written_once_through_kills_and_lost_transactions(
    kafka: KafkaService, kafka_topic: str, registry: AnyRegistry, sink: KafkaSink, tmp_path: Path
) -> None:
    input: list[Partitions] = [[orders(1, 2), orders(3)], [orders(4)]]

    def driver(*listeners: CheckpointListener) -> Driver:
        return Driver("job", sink, f"file://{tmp_path / 'storage'}", tmp_path / "query", input, listeners)

    def lose() -> None:
        for transaction in list(sink.in_doubt("job")):
            sink.abort(transaction)

    assert driver(KillAt(Step.PRE_COMMITTED)).run() == KILLED
    assert driver(KillAt(Step.COMPLETE)).run() == KILLED
    driver(At(Step.COMPLETE, 1, lose)).run_here()
    settled(kafka.bootstrap)
    deserialize = ProtobufDeserializer(Order, None, SchemaRegistryClient({"url": registry.url}))
    context = SerializationContext(kafka_topic, MessageField.VALUE)
    values = [deserialize(message.value(), context) for message in read(kafka.client_options(), kafka_topic)]
    expected = [(n, NOON, ["a", "b"], "new" if n > 2 else None) for n in (1, 2, 3, 4)]
    assert expected == sorted(
        (order.id, order.at.ToDatetime(timezone.utc), list(order.tags), order.note if order.HasField("note") else None)
        for order in values
    )


def test_a_value_that_the_class_does_not_take_is_named_by_its_row(sink: KafkaSink) -> None:
    with closing(sink), pytest.raises(BadValue, match=r"row 3 of a batch: the serializer refuses column `value`, for"):
        pre_commit(sink, *pa.concat_tables([orders(1, 2), orders(3, tags=[None])]).combine_chunks().to_batches())


@pytest.mark.parametrize(
    ("made", "why"),
    [("\udcff", "surrogates not allowed"), (5, "got a 'int' object"), ({"id": 3}, "got a 'dict' object")],
)
def test_what_a_serializer_makes_and_kafka_does_not_take_is_named_by_its_row(
    kafka: KafkaService, kafka_topic: str, made: object, why: str
) -> None:
    def serialize(value: Any, _: SerializationContext) -> Any:
        return made if value["id"] == 3 else "text"

    told = rf"row 3 of a batch: .* column `value` .* for topic '{kafka_topic}': .*{why}\. Let value_serializer return"
    with (
        closing(sink_of(kafka, kafka_topic, value_serializer=lambda: serialize)) as sink,
        pytest.raises(BadValue, match=told),
    ):
        pre_commit(sink, *orders(1, 2, 3).to_batches())


def test_a_map_comes_as_a_dict(kafka: KafkaService, kafka_topic: str) -> None:
    kind = pa.struct([("id", pa.int64()), ("counts", pa.map_(pa.int32(), pa.list_(pa.map_(pa.string(), pa.int64()))))])
    values = [{"id": n, "counts": None if n == 2 else [(7, [[("a", n)], None])]} for n in (1, 2)]
    given: list[Any] = []

    def serialize(value: Any, _: SerializationContext) -> bytes:
        given.append(value)
        return b"made"

    with closing(sink_of(kafka, kafka_topic, value_serializer=lambda: serialize)) as sink:
        pre_commit(sink, pa.record_batch({"value": pa.array(values, kind)}))
    assert given == [{"id": 1, "counts": {7: [{"a": 1}, None]}}, {"id": 2, "counts": None}]
    by_struct = pa.array([[({"n": 1}, 2)]], pa.map_(pa.struct([("n", pa.int32())]), pa.int32()))
    assert python_values(by_struct.type, all_maps=True)(by_struct[0].as_py()) == [{"key": {"n": 1}, "value": 2}]


def test_a_text_that_is_no_utf_8_is_named_by_its_row(sink: KafkaSink) -> None:
    note = pa.array([b"a", b"\xff"]).view(pa.string())
    values = orders(1, 2).column("value").combine_chunks()
    struct = pa.StructArray.from_arrays([*values.flatten()[:3], note], fields=list(values.type))
    with closing(sink), pytest.raises(BadValue, match=r"row 2 of a batch: .* column `value`, for .*UnicodeDecodeError"):
        pre_commit(sink, pa.RecordBatch.from_arrays([struct], ["value"]))
