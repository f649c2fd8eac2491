"""What an older version has pre-committed, with one record of its own for a proof, is settled by this one."""

from __future__ import annotations

from dataclasses import replace

from sinks.audit import Part
from sinks.kafka import KafkaSink
from sinks.testing.servers.kafka import KafkaService
from sinks.transaction import Checkpoint, CommitOutcome, CommitState
from tests.kafka.play import LINEAGE, pre_commit, texts
from tests.kafka.reading import read, settled

PROOF = ("cluster", "topic", "partition", "offset")


def test_neither_ids_of_topics_nor_offsets_of_records(kafka: KafkaService, kafka_topic: str, sink: KafkaSink) -> None:
    written = [pre_commit(sink, texts("kept"), subtask=0), pre_commit(sink, texts("lost"), subtask=1)]
    old = [replace(one, proof={name: one.proof[name] for name in PROOF}) for one in written]
    sink.abort(old[1].transaction)
    for _ in range(2):
        committed, lost = sink.commit_all(Checkpoint("job", LINEAGE, 0), old)
        assert committed == CommitOutcome.COMMITTED
        assert isinstance(lost, CommitOutcome)
        assert lost.state is CommitState.LOST
    settled(kafka.bootstrap)
    assert [one.value() for one in read(kafka.client_options(), kafka_topic)] == [b"kept"]
    (holding,) = sink.audit("job", [Part(LINEAGE, 0, old)]).holdings
    assert "an older version wrote it" in holding.remarks[0]
