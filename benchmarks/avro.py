"""What a task computes to make values of rows, without Spark and Kafka: Avro beside JSON of rows in
Arrow. `python -m benchmarks.avro [ROWS]`"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from decimal import Decimal
from statistics import median

import pyarrow as pa

from sinks.arrow.json import to_json
from sinks.kafka.serialization.avro import merged
from sinks.kafka.serialization.encoding import AvroWriter

_ROUNDS = 5


def four_columns(count: int) -> pa.Table:
    moment = datetime(2026, 1, 1, tzinfo=timezone.utc)
    return pa.table(
        {
            "id": pa.array(range(count), pa.int64()),
            "name": [f"user-{n}" for n in range(count)],
            "amount": [n + 0.5 for n in range(count)],
            "at": pa.array([moment] * count, pa.timestamp("us", "UTC")),
        }
    )


def with_decimal(count: int) -> pa.Table:
    prices = pa.array([Decimal(n) / 100 for n in range(count)], pa.decimal128(12, 2))
    return four_columns(count).append_column("price", prices)


def nested(count: int) -> pa.Table:
    kind = pa.struct(
        {"a": pa.int32(), "tags": pa.list_(pa.string()), "sums": pa.map_(pa.string(), pa.float64())}
    )
    structs = [{"a": n, "tags": ["x", "y"], "sums": [("k", 1.0)]} for n in range(count)]
    return four_columns(count).append_column("struct", pa.array(structs, kind))


def processor_time(work: Callable[[], object], count: int) -> float:
    """Microseconds a row, the median of some rounds."""

    def once() -> float:
        before = time.process_time()
        work()
        return time.process_time() - before

    return median(once() for _ in range(_ROUNDS)) / count * 1e6


def main(count: int = 50_000) -> None:
    print("| rows of | Avro, µs | JSON, µs |\n|---|---|---|")
    for made in (four_columns, with_decimal, nested):
        batch = made(count).combine_chunks().to_batches()[0]
        column = pa.StructArray.from_arrays(batch.columns, fields=list(batch.schema))
        writer = AvroWriter(1, merged(None, column.type, "row").text)
        avro = processor_time(lambda: writer.encoded(column), count)  # noqa: B023
        json = processor_time(lambda: to_json(column), count)  # noqa: B023
        print(f"| {made.__name__.replace('_', ' ')} | {avro:.1f} | {json:.1f} |")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
