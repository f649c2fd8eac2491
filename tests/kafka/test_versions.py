"""What an older version has pre-committed is settled by this one."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
from confluent_kafka import Producer
from kafka.admin import KafkaAdminClient

from sinks.audit import Part
from sinks.kafka import KafkaSink
from sinks.testing.servers.kafka import VERSION, KafkaServer, KafkaService, _program
from sinks.testing.table import eventually
from sinks.transaction import Checkpoint, CommitOutcome, CommitState
from tests.kafka.reading import read, settled
from tests.kafka.tasks import LINEAGE, TEXTS, pre_commit, sink_of, texts
from tests.kafka.test_reuse import again
from tests.kafka.test_sink import expect_fenced, values


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


@pytest.mark.slow
@pytest.mark.large
def test_brokers_are_upgraded_under_a_driver_that_stays_connected() -> None:
    """kafka-python goes by what the first broker could when it was asked."""
    with KafkaServer(version="3.9.1") as server, server.topic(2) as topic, closing(sink_of(server, topic)) as sink:
        sink.check(TEXTS)
        assert sink.commit(pre_commit(sink, texts("3.9"))) == CommitOutcome.COMMITTED
        server.stop()
        for broker in server.brokers:
            broker._program = tuple(_program(server.home, server.jvm, VERSION))
        server.start()
        with closing(KafkaAdminClient(bootstrap_servers=server.bootstrap.split(","))) as admin:
            for feature in ("metadata.version", "transaction.version"):
                highest = admin.describe_features()[feature]["supported"][1]
                admin.update_features({feature: ("UPGRADE", highest)})
        again(lambda: eventually(lambda: sink._brokers.fences))
        sink.check(TEXTS)
        other = sink_of(server, topic)
        expect_fenced(other, sink)
        other.close()
        assert sink.commit(pre_commit(sink, texts("4"))) == CommitOutcome.COMMITTED
        assert values(server, topic) == ["3.9", "4"]


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
