"""The topic that is written to, and the proof that all rows arrived once."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterable

import pyarrow as pa
from confluent_kafka import Consumer, IsolationLevel, KafkaError, TopicPartition
from confluent_kafka.admin import OffsetSpec  # type: ignore[attr-defined]  # re-exported without saying so

from sinks.testing.servers.kafka import KafkaServer

SETTINGS = {
    "offsets.topic.num.partitions": "50",
    "transaction.state.log.num.partitions": "50",
    "broker.session.timeout.ms": "9000",
}
"""Kafka's defaults, which the server for tests departs from."""
JVM = ("-Xms1g", "-Xmx1g", "-XX:+UseG1GC")
PARTITIONS = 4

Content = tuple[int, int]
"""Number of records, and the sum of checksums of their keys and values, which no order changes."""


class Topic:
    """A topic for rows that are known: `expected` is what has to be in it after a turn."""

    def __init__(self, server: KafkaServer, name: str, expected: Content) -> None:
        self.name = name
        self.expected = expected
        self._options = server.client_options()
        self._admin = server.admin()
        self._partitions = [TopicPartition(name, partition) for partition in range(PARTITIONS)]

    def clear(self) -> None:
        """Let go of all records."""
        wanted = [
            TopicPartition(p.topic, p.partition, end)
            for p, end in zip(self._partitions, self._ends(), strict=True)
        ]
        for future in self._admin.delete_records(wanted).values():
            future.result(30)

    def check(self) -> None:
        """Raise AssertionError unless consumers with read_committed get just the expected rows, and
        no transaction is open."""
        self.settle()
        read = self.read()
        if read != self.expected:
            raise AssertionError(f"(records, checksum) are {read}, not {self.expected}")
        self.clear()

    def settle(self) -> None:
        """Return when every transaction has its markers: read_committed gets as far as
        read_uncommitted."""
        deadline = time.monotonic() + 10
        while self._ends(IsolationLevel.READ_COMMITTED) != self._ends():
            if time.monotonic() > deadline:
                raise AssertionError(f"a transaction in {self.name} is still open after 10 s")
            time.sleep(0.002)

    def _ends(self, isolation: IsolationLevel = IsolationLevel.READ_UNCOMMITTED) -> list[int]:
        latest = {partition: OffsetSpec.latest() for partition in self._partitions}
        answers = self._admin.list_offsets(latest, isolation_level=isolation)
        return [answers[partition].result(30).offset for partition in self._partitions]

    def read(self) -> Content:
        consumer = Consumer(
            {
                **self._options,
                "group.id": "bench",
                "enable.auto.commit": False,
                "enable.partition.eof": True,
                "isolation.level": "read_committed",
                "auto.offset.reset": "earliest",
            }
        )
        count = checksum = ended = 0
        try:
            consumer.assign([TopicPartition(p.topic, p.partition, -2) for p in self._partitions])
            deadline = time.monotonic() + 60
            while ended < PARTITIONS:
                if time.monotonic() > deadline:
                    raise AssertionError(f"nothing more of {self.name} for 60 s, and no end")
                for message in consumer.consume(10_000, 0.1):
                    deadline = time.monotonic() + 60
                    error = message.error()
                    if error is None:
                        count += 1
                        checksum += _checksum(message.key(), message.value())
                    elif error.code() == KafkaError._PARTITION_EOF:
                        ended += 1
                    else:
                        raise AssertionError(error)
        finally:
            consumer.close()
        return count, checksum


def content(rows: pa.Table) -> Content:
    """Of columns `key` (if there is one) and `value`."""
    keys: Iterable[str | None] = (
        rows["key"].to_pylist() if "key" in rows.column_names else [None] * rows.num_rows
    )
    values = rows["value"].to_pylist()
    encoded = (
        (key and key.encode(), value.encode()) for key, value in zip(keys, values, strict=True)
    )
    return rows.num_rows, sum(_checksum(key, value) for key, value in encoded)


def _checksum(key: object, value: object) -> int:
    assert isinstance(key, bytes | None)
    assert isinstance(value, bytes)
    return zlib.crc32(value, zlib.crc32(key or b""))
