"""What tasks do with a Kafka sink, called by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
from confluent_kafka.cimpl import NewTopic

from sinks.kafka import KafkaSink
from sinks.kafka.producer import TransactionalProducer
from sinks.testing.servers.kafka import KafkaService
from sinks.testing.table import eventually
from sinks.transaction import Committable, Fingerprint, TransactionContext, TransactionId

TEXTS = pa.schema([("key", pa.string()), ("value", pa.string())])
LINEAGE = "0badcafe"


def sink_of(kafka: KafkaService, topic: str | None, user: str | None = None, **options: Any) -> KafkaSink:
    """A sink with the service's security options; others may be given as `options=`."""
    security = {k: v for k, v in kafka.client_options(user).items() if k != "bootstrap.servers"}
    own: Mapping[str, Any] = options.pop("options", {})
    return KafkaSink(kafka.bootstrap, topic, options={**security, **own}, **options)


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


def texts(*values: str | None, key: str | None = None) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"key": [key] * len(values), "value": list(values)}, schema=TEXTS)


def context(
    sink: KafkaSink, schema: pa.Schema = TEXTS, checkpoint: int = 0, subtask: int = 0, slot: int = 0, job: str = "job"
) -> TransactionContext:
    name = TransactionId(job, LINEAGE, checkpoint, sink.name, subtask, 1, 0, 0, slot)
    attempt = f"g1r0t0a{slot}"
    return TransactionContext(job, LINEAGE, checkpoint, sink.name, subtask, attempt, schema, str(name), slot)


def begun(sink: KafkaSink, *batches: pa.RecordBatch, **about: Any) -> TransactionalProducer:
    """An open transaction with these rows written."""
    transaction = sink.begin_transaction(context(sink, batches[0].schema if batches else TEXTS, **about))
    try:
        for batch in batches:
            sink.write(transaction, batch)
    except BaseException:
        sink.rollback(transaction)
        raise
    return transaction


def pre_commit(sink: KafkaSink, *batches: pa.RecordBatch, **about: Any) -> Committable:
    """What a task does for its partition; rolls back what fails."""
    transaction = begun(sink, *batches, **about)
    try:
        committable = sink.pre_commit(transaction)
    except BaseException:
        sink.rollback(transaction)
        raise
    return committable.of(sink.name, about.get("subtask", 0), Fingerprint(sum(batch.num_rows for batch in batches)))


def anew(kafka: KafkaService, topic: str, partitions: int = 3, *, create: bool = True) -> None:
    """Delete a topic, and make it again."""
    admin = kafka.admin()
    admin.delete_topics([topic])[topic].result(120)
    eventually(lambda: topic not in admin.list_topics(timeout=120).topics)
    if create:
        admin.create_topics([NewTopic(topic, partitions)])[topic].result(120)
        eventually(lambda: topic in admin.list_topics(timeout=120).topics)
