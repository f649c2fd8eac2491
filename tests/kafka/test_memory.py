"""R15 on brokers: the offset that a transaction carries, what becomes of it, and what a start knows by it."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import OFFSET_END, ConsumerGroupTopicPartitions, TopicPartition

from coordinator import Step
from coordinator.errors import ExternalSystemBehind, InDoubtError, StorageBehind
from sinks.kafka import KafkaSink, memory
from sinks.kafka.connection import Connections
from sinks.kafka.producer import TransactionalProducer
from sinks.testing import KILLED, Driver, Hooked
from sinks.testing.conformance import example_input, ids
from sinks.testing.driver import KillAt, die
from sinks.testing.servers.kafka import KafkaService
from sinks.testing.table import eventually
from sinks.transaction import Checkpoint, CommitOutcome, Committable, token
from tests.kafka.reading import read, settled
from tests.kafka.tasks import LINEAGE, AsRecords, anew, begun, context, pre_commit, sink_of, texts

INPUT = example_input(6)


def group(sink: KafkaSink, job: str) -> str:
    return f"tpc.{token(job)}.{token(sink.name)}"


def forget(kafka: KafkaService, sink: KafkaSink, job: str) -> None:
    """As the brokers do after `offsets.retention.minutes`, and an operator on purpose."""
    admin, name = kafka.admin(), group(sink, job)
    admin.delete_consumer_groups([name])[name].result(120)


def set_offset(kafka: KafkaService, sink: KafkaSink, job: str, offset: TopicPartition) -> None:
    admin = kafka.admin()
    (done,) = admin.alter_consumer_group_offsets([ConsumerGroupTopicPartitions(group(sink, job), [offset])]).values()
    done.result(120)


# ---------------------------------------------------------------------- the offset in the transaction
def test_what_is_committed_is_remembered_and_what_is_aborted_changes_nothing(sink: KafkaSink) -> None:
    assert sink.committed_checkpoints("job") is None
    for n in (4, 5):
        committable = pre_commit(sink, texts("a"), checkpoint=n)
        assert sink.committed_checkpoints("job") == ({LINEAGE: 4} if n == 5 else None)
        assert sink.commit(committable) == CommitOutcome.COMMITTED
        assert sink.committed_checkpoints("job") == {LINEAGE: n}
    sink.abort(pre_commit(sink, texts("b"), checkpoint=6).transaction)
    assert sink.committed_checkpoints("job") == {LINEAGE: 5}
    assert sink.committed_checkpoints("job 2") is None


def test_a_commit_that_is_under_way_is_waited_for(sink: KafkaSink) -> None:
    """EndTxn is answered before the group has the offset."""
    for n in range(20):
        assert sink.commit(pre_commit(sink, texts("a"), checkpoint=n)) == CommitOutcome.COMMITTED
        assert sink.committed_checkpoints("job") == {LINEAGE: n}


def test_what_is_committed_while_the_brokers_are_asked_is_remembered(
    kafka: KafkaService, kafka_topic: str, sink: KafkaSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The offsets are read when no commit is under way any more, not beside that question."""
    assert sink.commit(pre_commit(sink, texts("a"), checkpoint=1)) == CommitOutcome.COMMITTED
    assert sink.committed_checkpoints("job") == {LINEAGE: 1}
    ask_all, later = Connections.ask_all, pre_commit(sink, texts("b"), checkpoint=2)
    with closing(sink_of(kafka, kafka_topic)) as other:

        async def amid(self: Connections, requests: Any) -> Any:
            if self is sink._brokers.net:
                await self.client._loop.sleep(0.2)
                assert other.commit(later) == CommitOutcome.COMMITTED
                eventually(lambda: other.committed_checkpoints("job") == {LINEAGE: 2})
            return await ask_all(self, requests)

        monkeypatch.setattr(Connections, "ask_all", amid)
        assert sink.committed_checkpoints("job") == {LINEAGE: 2}


def test_it_is_asked_again_while_markers_are_written(sink: KafkaSink, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then the group has the offset of before, as if nothing were committed."""
    answers = [["tpc.job"], ["tpc.job"], []]
    monkeypatch.setattr(memory, "listed", lambda *_: answers.pop(0))
    assert sink.committed_checkpoints("job") is None
    assert answers == []


def test_a_task_that_rolls_back_or_commits_by_itself(sink: KafkaSink) -> None:
    """At-least-once: what is visible has no record yet, so it must not count as committed."""
    sink.rollback(begun(sink, texts("a"), checkpoint=1))
    assert list(sink.in_doubt("job")) == []
    assert sink.committed_checkpoints("job") is None
    transaction = sink.begin_transaction(replace(context(sink, checkpoint=2), exactly_once=False))
    sink.write(transaction, texts("a"))
    sink.commit_directly(transaction)
    assert sink.committed_checkpoints("job") is None


class Dies(AsRecords):
    """In its first task, when the offset is in the transaction."""

    def pre_commit(self, transaction: TransactionalProducer) -> Committable:
        transaction.end_mark()
        die()
        return super().pre_commit(transaction)


def test_a_task_that_is_killed_between_the_offset_and_the_pre_commit(
    kafka: KafkaService, kafka_topic: str, tmp_path: Path
) -> None:
    """The transaction is open with its offset. Swept, it leaves the group as it was."""
    job = Job(kafka, kafka_topic, tmp_path)
    assert job.driver(5, sink=Dies(kafka.bootstrap, kafka_topic)).run() == KILLED
    (orphan,) = job.sink.in_doubt("job")
    assert job.sink.committed_checkpoints("job") == {_lineage(job): 3}
    job.sink.abort(orphan)
    assert job.sink.committed_checkpoints("job") == {_lineage(job): 3}
    job.run(6)
    assert job.visible() == Counter(ids(INPUT))
    job.sink.close()


def test_a_losing_attempt_does_not_count(sink: KafkaSink) -> None:
    """A zombie's task wrote checkpoint 3 in another slot; checkpoint 2 is what is decided."""
    zombie = pre_commit(sink, texts("zombie"), checkpoint=3, slot=1)
    assert sink.commit(pre_commit(sink, texts("a"), checkpoint=2)) == CommitOutcome.COMMITTED
    assert sink.committed_checkpoints("job") == {LINEAGE: 2}
    sink.abort(zombie.transaction)
    assert sink.committed_checkpoints("job") == {LINEAGE: 2}


def test_each_participant_remembers_alone(sink: KafkaSink) -> None:
    """Whichever of a checkpoint's participants was committed before a crash, the checkpoint is known."""
    committables = [pre_commit(sink, texts(str(n)), checkpoint=7, subtask=n) for n in range(3)]
    assert sink.commit(committables[2]) == CommitOutcome.COMMITTED
    assert sink.committed_checkpoints("job") == {LINEAGE: 7}
    outcomes = sink.commit_all(Checkpoint("job", LINEAGE, 7), committables)
    assert list(outcomes) == [CommitOutcome.COMMITTED] * 3


def test_an_offset_that_somebody_else_has_set_is_none(kafka: KafkaService, sink: KafkaSink) -> None:
    assert sink.commit(pre_commit(sink, texts("a"), checkpoint=1)) == CommitOutcome.COMMITTED
    settled(kafka.bootstrap)
    set_offset(kafka, sink, "job", TopicPartition(sink.topic or "", 0, 100))
    assert sink.committed_checkpoints("job") is None


def test_a_sink_whose_rows_name_their_topics(kafka: KafkaService) -> None:
    """It remembers in the topics that it writes to; with one of them goes a part of it, so it tells of no loss."""
    with kafka.topic() as first, kafka.topic() as second:
        sink = sink_of(kafka, None, name="routed")
        for n, topic in enumerate([first, second]):
            rows = pa.RecordBatch.from_pylist([{"value": "a", "topic": topic}])
            committable = pre_commit(sink, rows, checkpoint=n)
            assert committable.proof["remembered"] is False
            assert sink.commit(committable) == CommitOutcome.COMMITTED
        assert sink.committed_checkpoints("job") == {LINEAGE: 1}
        sink.close()


# ---------------------------------------------------------------------- a job whose memories are set back
class Job:
    """A backup of both folders, storage and checkpointLocation, when checkpoint 1 was done; then on to 3."""

    def __init__(self, kafka: KafkaService, topic: str, folder: Path) -> None:
        self.kafka, self.folder = kafka, folder
        self.sink = AsRecords(kafka.bootstrap, topic)
        self.run(2)
        for part in ("storage", "query"):
            shutil.copytree(folder / part, folder / f"old-{part}")
        self.run(4)

    def driver(self, batches: int, *listeners: KillAt, sink: Any = None) -> Driver:
        storage = f"file://{self.folder / 'storage'}"
        return Driver("job", sink or self.sink, storage, self.folder / "query", INPUT[:batches], listeners)

    def run(self, batches: int, *listeners: KillAt) -> None:
        assert self.driver(batches, *listeners).run() == (KILLED if listeners else 0)

    def restore(self, *parts: str) -> None:
        for part in parts:
            shutil.rmtree(self.folder / part)
            shutil.copytree(self.folder / f"old-{part}", self.folder / part)

    def records(self) -> list[Path]:
        return sorted((self.folder / "storage").rglob("checkpoint/*"))

    def visible(self) -> Counter[int]:
        settled(self.kafka.bootstrap)
        messages = read(self.kafka.client_options(), self.sink.topic or "")
        return Counter(json.loads(message.value() or b"")["id"] for message in messages)


@pytest.fixture
def job(kafka: KafkaService, kafka_topic: str, tmp_path: Path) -> Iterator[Job]:
    made = Job(kafka, kafka_topic, tmp_path)
    yield made
    made.sink.close()


def test_storage_and_location_two_batches_back(job: Job) -> None:
    job.restore("storage", "query")
    with pytest.raises(StorageBehind, match=r"sink .* has rows .* up to checkpoint 3, .* has none after 1"):
        job.driver(5).run_here()
    assert job.visible() == Counter(ids(INPUT[:4]))


def test_storage_older_by_one_record(job: Job) -> None:
    """Its checkpoint is committed, but Spark does not know yet that it is."""
    job.run(5, KillAt(Step.COMMITTED, checkpoint_id=4))
    job.records()[-1].unlink()
    with pytest.raises(StorageBehind, match="older by 1 checkpoint"):
        job.driver(5).run_here()
    assert job.visible() == Counter(ids(INPUT[:5]))


def test_storage_set_back_to_before_a_replay(job: Job) -> None:
    """One transaction is aborted after its decision and written again; the record that says so is gone."""
    job.run(5, KillAt(Step.COMPLETE, checkpoint_id=4))
    job.sink.abort(next(iter(job.sink.in_doubt("job"))))
    job.sink.close()
    job.run(5, KillAt(Step.DONE, checkpoint_id=4))
    record, content = job.records()[-1], job.records()[-1].read_bytes()
    assert record.name.endswith(".000001")
    record.unlink()
    told = r"checkpoint 4 .* \(a transaction of its replay 1\).* restore newer storage"
    for _ in range(2):
        with pytest.raises(StorageBehind, match=told):
            job.driver(6).run_here()
        assert job.visible() == Counter(ids(INPUT[:5]))
    record.write_bytes(content)
    job.run(6)
    assert job.visible() == Counter(ids(INPUT))


def test_both_folders_deleted(job: Job) -> None:
    for part in ("storage", "query"):
        shutil.rmtree(job.folder / part)
    with pytest.raises(StorageBehind, match=r"holds none of it.* was deleted"):
        job.driver(5).run_here()
    assert job.visible() == Counter(ids(INPUT[:4]))


def _lineage(job: Job) -> str:
    return job.records()[-1].parent.parent.name


def test_a_group_that_has_expired_is_unknown(job: Job) -> None:
    forget(job.kafka, job.sink, "job")
    job.run(6)
    assert job.visible() == Counter(ids(INPUT))
    assert job.sink.committed_checkpoints("job") == {_lineage(job): 5}


def expire(job: Job) -> None:
    """As after a rest that is longer than what brokers keep of groups, transactional ids and records."""
    forget(job.kafka, job.sink, "job")
    plain = sink_of(job.kafka, job.sink.topic)
    for subtask in range(3):
        plain.rollback(begun(plain, texts("next"), subtask=subtask))
    plain.close()
    settled(job.kafka.bootstrap)
    admin = job.kafka.admin()
    for number in admin.list_topics(job.sink.topic, timeout=120).topics[job.sink.topic or ""].partitions:
        (deleted,) = admin.delete_records([TopicPartition(job.sink.topic or "", number, OFFSET_END)]).values()
        deleted.result(120)


def test_a_job_that_rests_longer_than_its_records_are_kept(job: Job) -> None:
    """The brokers cannot tell any more what became of its last transactions; Spark knows that they were visible."""
    expire(job)
    job.run(6)
    assert job.visible() == Counter(ids(INPUT[4:]))


def test_a_job_that_rests_longer_with_a_checkpoint_that_nobody_knows_visible(job: Job) -> None:
    job.run(5, KillAt(Step.COMPLETE, checkpoint_id=4))
    expire(job)
    with pytest.raises(InDoubtError, match="retention or truncation was quicker"):
        job.driver(6).run_here()
    assert job.visible() == Counter()


def test_a_topic_that_was_made_anew_is_unknown(job: Job) -> None:
    """Its offsets go with it: the rest of the input is written to the new one."""
    anew(job.kafka, job.sink.topic or "")
    job.run(6)
    assert job.visible() == Counter(ids(INPUT[4:]))


def test_records_older_than_the_group_are_behind(job: Job) -> None:
    """The cluster was set back as a whole: here, its group alone."""
    settled(job.kafka.bootstrap)
    set_offset(job.kafka, job.sink, "job", TopicPartition(job.sink.topic or "", 0, 1, f"lineage={_lineage(job)}"))
    with pytest.raises(ExternalSystemBehind, match="ends with checkpoint 0, but checkpoint 1 was complete and visible"):
        job.driver(5).run_here()
    assert job.visible() == Counter(ids(INPUT[:4]))


def test_a_storage_from_before_a_savepoint_was_restored(job: Job) -> None:
    """The group has an offset of the lineage that the restore began."""
    settled(job.kafka.bootstrap)
    set_offset(job.kafka, job.sink, "job", TopicPartition(job.sink.topic or "", 0, 3, "lineage=5afe5afe"))
    reason = "has rows of this job's lineage 5afe5afe up to checkpoint 2, and .* holds none of it"
    with pytest.raises(StorageBehind, match=reason):
        job.driver(5).run_here()
    assert job.visible() == Counter(ids(INPUT[:4]))


def test_remembering_is_turned_off_and_on_again(job: Job) -> None:
    """What was written without it is not missed."""
    job.sink.remember = False
    job.run(5)
    job.sink.remember = True
    job.run(6)
    assert job.visible() == Counter(ids(INPUT))


def test_the_system_is_asked_before_each_decision(job: Job) -> None:
    """A group that vanishes while the query runs is unknown; it is there again after the next commit."""
    hooked = Hooked(job.sink, "validate_all", hook=_Forget.of(job))
    job.driver(6, sink=hooked).run_here()
    assert job.visible() == Counter(ids(INPUT))


class _Forget:
    job: Job

    @classmethod
    def of(cls, job: Job) -> Any:
        cls.job = job
        return _forget


def _forget() -> None:
    from tests.kafka import test_memory

    forget(test_memory._Forget.job.kafka, test_memory._Forget.job.sink, "job")
