"""The bytes that a user's serializer makes of the column `value`."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from confluent_kafka.serialization import MessageField, SerializationContext

from sinks.arrow.values import python_values
from sinks.errors import BadValue

Serializer = Callable[[Any, SerializationContext], bytes | None]
SerializerFactory = Callable[[], Serializer]


def serialize_values(
    rows: pa.RecordBatch, serialize: Serializer, *, sink: str, default_topic: str | None
) -> pa.RecordBatch:
    """Replace the column `value` by the bytes that the serializer makes of it.

    Raises BadValue if the serializer refuses a value, or returns what Kafka does not take.
    """
    values = rows["value"]
    topics = [default_topic] * rows.num_rows
    plain = python_values(values.type, all_maps=True)
    if "topic" in rows.schema.names:
        topics = pc.coalesce(rows["topic"], pa.scalar(default_topic, pa.string())).to_pylist()

    def of_row(row: int, column: pa.Scalar, topic: str | None) -> bytes | None:
        try:
            value = plain(column.as_py())
            context = SerializationContext(str(topic), MessageField.VALUE)
            made = None if value is None else serialize(value, context)
        except Exception as error:
            raise BadValue(
                f"sink {sink!r}: row {row} of a batch: the serializer refuses column `value`, for "
                f"topic {topic!r}: {error!r}"
            ) from error
        try:
            return (
                made
                if made is None or isinstance(made, bytes)
                else pa.scalar(made, pa.binary()).as_py()
            )
        except Exception as error:
            raise BadValue(
                f"sink {sink!r}: row {row} of a batch: the serializer made of column `value` what "
                f"Kafka does not take, for topic {topic!r}: {error}. Let value_serializer return "
                "bytes or None"
            ) from error

    made = pa.array(map(of_row, count(1), values, topics), pa.binary())
    return rows.set_column(rows.schema.get_field_index("value"), "value", made)
