"""What an older version has pre-committed is settled by this one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from confluent_kafka import Producer

from sinks.audit import Part
from sinks.kafka import KafkaSink
from sinks.testing.servers.kafka import KafkaService
from sinks.transaction import Checkpoint, CommitOutcome, CommitState
from tests.kafka.play import LINEAGE, pre_commit, texts
from tests.kafka.reading import read, settled


@pytest.mark.parametrize("commit", [True, False])
def test_a_transaction_that_librdkafka_left_open(
    kafka: KafkaService, kafka_topic: str, sink: KafkaSink, commit: bool
) -> None:
    """As the sink did before it had a producer of its own: it asks for no new partitions by what it sends."""
    written = pre_commit(sink, texts("before"))
    assert sink.commit(written) == CommitOutcome.COMMITTED
    settled(kafka.bootstrap)
    places: list[Any] = []
    name = written.transaction["transactional_id"]
    old = Producer({**kafka.client_options(), "transactional.id": name})
    old.init_transactions(60)
    old.begin_transaction()
    old.produce(kafka_topic, b"old", on_delivery=lambda _, m: places.append((m.partition(), m.offset())))
    old.flush(60)
    (identity,) = sink.in_doubt("job")
    del old
    ((partition, offset),) = places
    ours = {"topic": kafka_topic, "partition": partition, "offset": offset}
    spans = {kafka_topic: [[partition, offset, offset + 1]]}
    left = replace(written, transaction=identity, proof={**written.proof, **ours, "spans": spans})
    if commit:
        assert sink.commit(left) == CommitOutcome.COMMITTED
    else:
        sink.abort(identity)
    assert list(sink.in_doubt("job")) == []
    assert sink.commit(pre_commit(sink, texts("after"))) == CommitOutcome.COMMITTED
    settled(kafka.bootstrap)
    values = {message.value() for message in read(kafka.client_options(), kafka_topic)}
    assert values == {b"before", b"after"} | ({b"old"} if commit else set())


PROOF = ("cluster", "topic", "partition", "offset")


def test_neither_ids_of_topics_nor_offsets_of_records(kafka: KafkaService, kafka_topic: str, sink: KafkaSink) -> None:
    written = [pre_commit(sink, texts("kept"), subtask=0), pre_commit(sink, texts("lost"), subtask=1)]
    old = [replace(committable, proof={name: committable.proof[name] for name in PROOF}) for committable in written]
    sink.abort(old[1].transaction)
    for _ in range(2):
        committed, lost = sink.commit_all(Checkpoint("job", LINEAGE, 0), old)
        assert committed == CommitOutcome.COMMITTED
        assert isinstance(lost, CommitOutcome)
        assert lost.state is CommitState.LOST
    settled(kafka.bootstrap)
    assert [message.value() for message in read(kafka.client_options(), kafka_topic)] == [b"kept"]
    (holding,) = sink.audit("job", [Part(LINEAGE, 0, old)]).holdings
    assert "an older version wrote it" in holding.remarks[0]
