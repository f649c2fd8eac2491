"""KafkaSink passes the conformance kit, by the native way and record by record."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pytest

from sinks.kafka import KafkaSink
from sinks.kafka.producer import TransactionalProducer
from sinks.testing import SinkConformance
from sinks.testing.servers.kafka import KafkaService
from sinks.transaction import TransactionContext
from tests.kafka.reading import read, settled


class AsRecords(KafkaSink):
    """Rows of the kit as JSON values; the kit has no Spark that could do so by `transform`."""

    headers = False

    def _records(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        values = pa.array([json.dumps(row).encode() for row in batch.to_pylist()], pa.binary())
        columns = {"key": batch.column("id").cast(pa.string()), "value": values}
        if self.headers:
            kind = pa.list_(pa.struct({"key": pa.string(), "value": pa.binary()}))
            columns["headers"] = pa.array([[{"key": "of", "value": b"kit"}]] * len(values), kind)
        return pa.RecordBatch.from_pydict(columns)

    def check(self, schema: pa.Schema) -> None:
        super().check(self._records(pa.RecordBatch.from_pylist([], schema=schema)).schema)

    def begin_transaction(self, context: TransactionContext) -> TransactionalProducer:
        schema = self._records(pa.RecordBatch.from_pylist([], schema=context.schema)).schema
        return super().begin_transaction(TransactionContext(**{**context.__dict__, "schema": schema}))

    def write(self, transaction: TransactionalProducer, batch: pa.RecordBatch) -> None:
        super().write(transaction, self._records(batch))


class AsRecordsWithHeaders(AsRecords):
    headers = True


class Conformance(SinkConformance):
    kind: type[AsRecords]

    @pytest.fixture
    def sink(self, kafka: KafkaService, kafka_topic: str) -> Iterator[KafkaSink]:
        self.options = kafka.client_options()
        with_security = {name: value for name, value in self.options.items() if name != "bootstrap.servers"}
        sink = self.kind(kafka.bootstrap, kafka_topic, options=with_security)
        yield sink
        sink.close()

    def visible(self, sink: Any) -> Sequence[int]:
        settled(sink.bootstrap_servers)
        return [json.loads(message.value() or b"")["id"] for message in read(self.options, sink.topic)]


class TestNative(Conformance):
    kind = AsRecords


class TestPlain(Conformance):
    kind = AsRecordsWithHeaders
