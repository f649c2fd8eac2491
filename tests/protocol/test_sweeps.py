"""What is decided must not be undone by a sweep, a close, a mode or an error: each was a bug once."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from coordinator import CheckpointCoordinator, CheckpointListener, Step
from coordinator.errors import (
    CheckpointError,
    CheckpointFailed,
    CorruptRecord,
    InDoubtError,
    QueryNotAdopted,
)
from coordinator.storage import StorageError, open_storage
from coordinator.task.task import Ack
from examples.custom_sink import FileSink
from sinks import Checkpoint, CommitOutcome, Committable
from sinks.errors import SinkError, TransactionBlocked
from sinks.testing import Hooked
from sinks.testing.table import eventually
from sinks.transaction import TransactionId
from tests.protocol.job import (
    CheckedThenPut,
    CrashError,
    HookedStorage,
    Job,
    Steps,
    complete_but_one_lost,
    crash_at,
    decided,
    fail,
)


class Unreachable(FileSink):
    def commit(self, committable: Committable) -> CommitOutcome:
        raise ConnectionError("cannot reach the system to commit")


# ---------------------------------------------------------------------- close() sweeps with what it last knew
def test_close_after_an_in_doubt_error_aborts_nothing_that_is_decided(job: Job) -> None:
    """The message says: nothing is lost, start again. `with coordinator` must not make a liar of it."""
    with (
        pytest.raises(InDoubtError, match="Nothing is lost"),
        job.coordinator(sink=Unreachable(job.sink.folder)) as coordinator,
    ):
        job.query().run(coordinator)
    assert len(decided(job)) == 3, "close() aborted what the record of checkpoint 0 names"


def test_close_after_a_failed_commit_of_a_replay_aborts_nothing_that_is_decided(job: Job) -> None:
    complete_but_one_lost(job)

    class UnreachableForReplays(FileSink):
        def commit(self, committable: Committable) -> CommitOutcome:
            if TransactionId.parse(committable.transaction["file"].removesuffix(".parquet")).round:
                raise ConnectionError("cannot reach the system to commit")
            return super().commit(committable)

    with (
        pytest.raises(InDoubtError, match="Nothing is lost"),
        job.coordinator(sink=UnreachableForReplays(job.sink.folder)) as coordinator,
    ):
        job.query().run(coordinator)
    assert len(decided(job)) == 1, "close() aborted the replacement that the replay record names"


def test_close_after_wiped_storage_was_refused_aborts_nothing(job: Job) -> None:
    with pytest.raises(CrashError):
        job.run(listeners=[crash_at(Step.COMPLETE, 1)])
    with (
        pytest.raises(QueryNotAdopted, match="wiped"),
        job.coordinator(storage=open_storage(f"memory:{uuid.uuid4().hex}")) as coordinator,
    ):
        job.query().run(coordinator)
    assert len(decided(job)) == 3, "close() aborted everything, on the word of an empty storage"


class Wipe(CheckpointListener):
    """Storage loses the records from some checkpoint on when the driver begins to commit that checkpoint."""

    def __init__(self, job: Job, first: int = 0) -> None:
        self.job = job
        self.first = first

    def on_step(self, step, checkpoint_id, facts) -> None:
        if step is Step.COMMITTING and checkpoint_id == self.first:
            for key in self.job.storage.list(""):
                _, is_record, name = key.partition("/checkpoint/")
                if is_record and int(name.partition(".")[0]) >= self.first:
                    self.job.storage.delete(key)


@pytest.mark.parametrize("loaded", [False, True], ids=["of this run", "of a run before"])
def test_records_that_vanished_under_the_driver_abort_nothing(job: Job, loaded: bool) -> None:
    if loaded:
        with pytest.raises(CrashError):
            job.run(listeners=[crash_at(Step.COMPLETE, 0)])
    with (
        pytest.raises(InDoubtError),
        job.coordinator(sink=Unreachable(job.sink.folder), listeners=[Wipe(job)]) as coordinator,
    ):
        job.query().run(coordinator)
    assert len(list(job.sink.in_doubt("job"))) == 3, "it was decided, and swept on the word of an empty storage"


class UnreachableFromOneOn(FileSink):
    def commit(self, committable: Committable) -> CommitOutcome:
        if TransactionId.parse(committable.transaction["file"].removesuffix(".parquet")).checkpoint:
            raise ConnectionError("cannot reach the system to commit")
        return super().commit(committable)


def test_a_newest_record_that_vanished_under_the_driver_aborts_nothing(job: Job) -> None:
    """An older record is still there, as after a failover of the storage that has lost the newest put."""
    sink = UnreachableFromOneOn(job.sink.folder)
    with pytest.raises(InDoubtError), job.coordinator(sink=sink, listeners=[Wipe(job, 1)]) as coordinator:
        job.query().run(coordinator)
    assert len(list(job.sink.in_doubt("job"))) == 3, "it was decided, and swept on the word of an older storage"


def test_close_after_a_corrupt_record_aborts_nothing(job: Job) -> None:
    with pytest.raises(CrashError):
        job.run(listeners=[crash_at(Step.COMPLETE, 0)])
    [key] = [key for key in job.storage.list("") if "/checkpoint/" in key]
    data = job.storage.get(key)
    assert data
    job.storage.delete(key)
    job.storage.put_if_absent(key, data[:-20])
    with pytest.raises(CorruptRecord), job.coordinator() as coordinator:
        job.query().run(coordinator)
    job.storage.delete(key)
    job.storage.put_if_absent(key, data)  # "restore it from a backup of the storage; nothing was changed"
    assert len(decided(job)) == 3, "close() aborted what the damaged record names"


class Landed(HookedStorage):
    """The put of a record lands, and its answer is an error."""

    def put_if_absent(self, key: str, value: bytes) -> bool:
        done = self.inner.put_if_absent(key, value)
        if self.due and self.part in key:
            self.due = False
            raise StorageError(self.uri, key, "timed out")
        return done


def test_close_after_a_put_that_landed_but_answered_an_error(job: Job) -> None:
    storage = Landed(job.storage, "put_if_absent", "/checkpoint/", lambda: None)
    with pytest.raises(CheckpointFailed, match="timed out"), job.coordinator(storage=storage) as coordinator:
        job.query().run(coordinator)
    assert len(decided(job)) == 3, "close() aborted what the record names"


# ---------------------------------------------------------------------- a zombie sweeps what others decided
def new_driver_dies_after_complete(job: Job, n: int) -> None:
    with pytest.raises(CrashError):
        job.run(listeners=[crash_at(Step.COMPLETE, n)])


MEANWHILE: list[Job] = []  # global, because classes made inside a test are pickled with what they close over


class FailsOnce(FileSink):
    def commit(self, committable: Committable) -> CommitOutcome:
        if MEANWHILE:
            new_driver_dies_after_complete(MEANWHILE.pop(), 1)
            raise ConnectionError("lost")
        return super().commit(committable)


def test_a_zombie_that_asks_again_does_not_sweep_what_a_newer_driver_decided(job: Job) -> None:
    """The zombie sleeps between two tries to commit 0 (or is stopped there); meanwhile a newer driver commits 0 and
    completes 1."""
    MEANWHILE[:] = [job]
    with suppress(CheckpointError):
        job.run(batches=1, sink=FailsOnce(job.sink.folder))
    assert len(decided(job)) == 3, "the zombie's sweep aborted transactions that the newest record names"


def test_a_zombie_whose_checkpoint_fails_does_not_sweep_what_a_newer_driver_decided(job: Job) -> None:
    def meanwhile() -> None:
        new_driver_dies_after_complete(job, 0)
        fail()

    with suppress(CheckpointError):
        job.run(batches=1, sink=Hooked(job.sink, "validate_all", hook=meanwhile))
    assert len(decided(job)) == 3, "the zombie's sweep aborted transactions that the newest record names"


def test_a_driver_stopped_between_its_generation_check_and_its_sweep(job: Job) -> None:
    job.run(batches=1)
    zombie = job.coordinator(sink=Hooked(job.sink, "in_doubt", hook=lambda: new_driver_dies_after_complete(job, 1)))
    with suppress(CheckpointError):
        zombie.recover()
    assert len(decided(job)) == 3, "the zombie's sweep aborted transactions that the newest record names"


def test_a_new_driver_does_not_sweep_what_an_old_one_decided_after_its_load(job: Job) -> None:
    """The old driver's put lands after the new one has loaded (nothing) and before it sweeps."""
    steps = Steps()

    def new_driver_starts() -> None:
        job.run(batches=1, sink=Hooked(job.sink, "in_doubt", hook=lambda: storage.put()), listeners=[steps])

    storage = CheckedThenPut(job.storage, "put_if_absent", "/checkpoint/", new_driver_starts)
    with suppress(CheckpointError):
        job.run(batches=1, storage=storage)
    job.assert_exactly_once(batches=1)
    assert Step.REPLAYING not in [step for step, _ in steps.seen], "its sweep aborted what a record named"


# ---------------------------------------------------------------------- mode switches
def test_a_lost_transaction_is_replayed_after_a_switch_to_at_least_once(job: Job) -> None:
    complete_but_one_lost(job)
    with suppress(InDoubtError):
        job.run(config={"mode": "at_least_once"})
    job.run()
    job.assert_exactly_once()


# ---------------------------------------------------------------------- one orphan that cannot be aborted
def test_an_orphan_that_cannot_be_aborted_does_not_shield_the_others(job: Job) -> None:
    with pytest.raises(CrashError):
        job.run(listeners=[crash_at(Step.PRE_COMMITTED, 0)])
    orphans = sorted(i["file"] for i in job.sink.in_doubt("job"))

    class Refusing(FileSink):
        def in_doubt(self, job):
            return sorted(super().in_doubt(job), key=str)

        def abort(self, transaction) -> None:
            if transaction["file"] == orphans[0]:
                raise SinkError("prepared by another role")
            super().abort(transaction)

    job.run(sink=Refusing(job.sink.folder))
    assert [i["file"] for i in job.sink.in_doubt("job")] == orphans[:1]


# ---------------------------------------------------------------------- contract of close
def test_a_close_that_fails_in_a_task_is_logged_as_the_contract_says(job: Job) -> None:
    class Closing(FileSink):
        def close(self) -> None:
            raise OSError("socket is gone")

    job.run(sink=Closing(job.sink.folder))
    job.assert_exactly_once()


def test_a_close_that_fails_on_the_driver_does_not_keep_others_open(job: Job) -> None:
    class Closing(FileSink):
        def __init__(self, folder: Path, name: str, fails: bool) -> None:
            super().__init__(folder, name)
            self.fails, self.closed = fails, False

        def close(self) -> None:
            self.closed = True
            if self.fails:
                raise OSError("socket is gone")

    sinks = [Closing(job.sink.folder, "a", True), Closing(job.sink.folder, "b", False)]
    with suppress(OSError):
        CheckpointCoordinator("job", sinks, job.storage).close()
    assert sinks[1].closed


# ---------------------------------------------------------------------- commit_all that answers a mixture
def test_a_sink_that_commits_as_a_whole_is_asked_as_a_whole_after_an_exception(job: Job) -> None:
    """Contract of commit_all: one outcome each, or the exception to ask again for. LOST, HELD, exception is allowed."""
    asked: list[int] = []

    class Whole(FileSink):
        def commit_all(
            self, checkpoint: Checkpoint, committables: Sequence[Committable]
        ) -> Sequence[CommitOutcome | Exception]:
            asked.append(len(committables))
            lost = [(self.folder / f".withdrawn-{c.transaction['file']}").exists() for c in committables]
            if not any(lost):
                return [self.commit(c) for c in committables]
            answer: list[Any] = [CommitOutcome.lost("withdrawn") if gone else CommitOutcome.HELD for gone in lost]
            if len(asked) == 1:
                answer[lost.index(False)] = ConnectionError("lost while asking for this one")
            return answer

    complete_but_one_lost(job)
    visible_at_replay: list[int] = []

    class Look(CheckpointListener):
        def on_step(self, step, checkpoint_id, facts) -> None:
            if step is Step.REPLAYING:
                visible_at_replay.append(sum(job.visible().values()))

    job.run(batches=1, sink=Whole(job.sink.folder), listeners=[Look()])
    job.assert_exactly_once(batches=1)
    assert visible_at_replay == [0], "a part of the checkpoint became visible before its lost sibling was replayed"


# ---------------------------------------------------------------------- check before the first batch of a run
def test_check_is_called_before_a_replay_writes(job: Job) -> None:
    complete_but_one_lost(job)

    class Checked(FileSink):
        ready = False

        def check(self, schema) -> None:
            self.ready = True

        def begin_transaction(self, context):
            assert self.ready, "contract: check comes before the first batch of a run"
            return super().begin_transaction(context)

    job.run(sink=Checked(job.sink.folder))
    job.assert_exactly_once()


# ---------------------------------------------------------------------- close() while the query still runs
RUNNING: list[Any] = []  # coordinator, then the thread that closes it. Global: hooks are pickled with the sink


def close_meanwhile() -> None:
    """Returns when the close waits for the batch, or has ended because it does not."""
    coordinator, closing = RUNNING[0], threading.Thread(target=RUNNING[0].close)
    RUNNING.append(closing)
    closing.start()
    eventually(lambda: len(coordinator._one_at_a_time._queue) == 2 or not closing.is_alive())


def test_close_while_a_batch_is_between_pre_commit_and_complete(job: Job) -> None:
    """`with coordinator: query.awaitTermination(20)` leaves the block while the query still runs."""
    steps = Steps()
    coordinator = job.coordinator(sink=Hooked(job.sink, "validate_all", hook=close_meanwhile), listeners=[steps])
    RUNNING[:] = [coordinator]
    job.query(1).run(coordinator)
    RUNNING[1].join(300)
    job.assert_exactly_once(batches=1)
    assert Step.REPLAYING not in [step for step, _ in steps.seen], "close() aborted the running batch's transactions"


# ---------------------------------------------------------------------- retryable of one's own errors
class MyLockTimeout(SinkError):
    retryable = True


class MyBlocked(TransactionBlocked):
    pass


@pytest.mark.parametrize("kind", [MyLockTimeout, MyBlocked])
def test_retryable_survives_the_way_to_the_driver(kind: type[SinkError]) -> None:
    ack = Ack.from_json(Ack("s", 0, error=kind("lock")).to_json())
    assert ack.error is not None
    assert ack.error.retryable


# ---------------------------------------------------------------------- retention that fails
class NoDelete(HookedStorage):
    def delete(self, key: str) -> None:
        raise StorageError(self.uri, key, "no right to delete")


def test_retention_that_fails_does_not_stop_the_query(job: Job) -> None:
    job.run(storage=NoDelete(job.storage, "", "", lambda: None))
    job.assert_exactly_once()


def test_old_claims_that_cannot_be_deleted_do_not_keep_a_driver_from_starting(job: Job) -> None:
    for _ in range(11):
        job.coordinator(storage=NoDelete(job.storage, "", "", lambda: None)).recover()


# ---------------------------------------------------------------------- names of others in the storage's folders
@pytest.mark.parametrize("folder", ["generation", "checkpoint"])
def test_a_file_of_the_file_system_itself_is_passed_over(job: Job, tmp_path: Path, folder: str) -> None:
    """NFS leaves .nfs… where an open file was deleted; it is a valid key."""
    storage = open_storage(f"file://{tmp_path / 'storage'}")
    job.run(batches=1, storage=storage)
    [key] = [key for key in storage.list("") if f"/{folder}/" in key]
    (tmp_path / "storage" / key).with_name(".nfs000000000000001a").touch()
    job.run(storage=storage)
    job.assert_exactly_once()


# ---------------------------------------------------------------------- at-least-once says so
def test_at_least_once_error_does_not_say_that_nothing_is_visible(job: Job) -> None:
    with pytest.raises(CheckpointFailed) as error:
        job.run(
            sink=Hooked(job.sink, "write", nth=3, hook=fail),
            config={"mode": "at_least_once"},
        )
    assert job.visible(), "two tasks have committed"
    assert "nothing of it is visible" not in str(error.value)
