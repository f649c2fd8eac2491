"""More of the rules in docs/protocol.md, R1 to R20: each test fails if one line of the protocol is taken away or turned
round."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import Mock

import pytest

from coordinator import CheckpointCoordinator, CheckpointListener, Step
from coordinator.errors import (
    CheckpointError,
    CheckpointFailed,
    CheckpointLocationMismatch,
    CorruptRecord,
    InDoubtError,
    ReplayMismatch,
    SourceReplaced,
    Superseded,
)
from coordinator.protocol import protocol
from coordinator.protocol.decisions import require_same_offsets
from coordinator.protocol.ports import TopicIds
from coordinator.spark.lifecycle import _CALLS
from coordinator.storage import CheckpointStorage, StorageError, open_storage
from coordinator.storage.base import WrappedStorage
from coordinator.store.job_store import JobStore
from examples.custom_sink import FileSink
from sinks import CommitOutcome
from sinks.errors import BadValue, TransactionBlocked
from sinks.optional import Validating
from sinks.testing import Hooked, LocalBatch, LocalQuery
from sinks.testing.conformance import ids
from sinks.testing.kit import rows
from sinks.transaction import TransactionId
from tests.protocol.job import (
    CheckedThenPut,
    CrashError,
    HookedStorage,
    Job,
    Locking,
    Recording,
    Steps,
    complete_but_one_lost,
    crash_at,
    decided,
    fail,
    newest_record,
)
from tests.protocol.test_decisions import batch, record


def steps_of(steps: Steps) -> list[Step]:
    return [step for step, _ in steps.seen]


def test_a_blocked_task_is_tried_three_times_in_all(job: Job) -> None:
    steps = Steps()

    class Always(FileSink):
        def write(self, transaction, batch) -> None:
            raise TransactionBlocked("lock timeout on table t")

    with pytest.raises(TransactionBlocked):
        job.run(sink=Always(job.sink.folder), listeners=[steps])
    assert steps_of(steps).count(Step.TRIGGERED) == 3


def test_r8_a_blocked_driver_sees_what_another_one_has_completed_meanwhile(job: Job) -> None:
    """The old driver's put lands while the new one's tasks wait for its locks."""
    steps = Steps()

    class Once(CheckpointListener):
        def on_step(self, step, checkpoint_id, facts) -> None:
            if step is Step.PRE_COMMITTED:
                storage.put()

    def blocked() -> None:
        raise TransactionBlocked("lock timeout on table t")

    def new_driver() -> None:
        with pytest.raises(Superseded, match="another driver completed checkpoint 0"):
            job.run(batches=1, sink=Hooked(job.sink, "validate_all", hook=blocked), listeners=[Once(), steps])

    storage = CheckedThenPut(job.storage, "put_if_absent", "/checkpoint/", new_driver)
    with pytest.raises(Superseded):
        job.run(batches=1, storage=storage)
    assert steps_of(steps).count(Step.TRIGGERED) == 1
    job.run(batches=1)
    job.assert_exactly_once(batches=1)


def test_r8_a_replay_blocked_by_an_orphan_of_a_dead_executor_goes_on_after_a_sweep(job: Job) -> None:
    complete_but_one_lost(job)

    def executor_dies_after_pre_commit() -> None:
        ready = next(job.sink.folder.glob(".tpc.*.0.files-*.0.g*.parquet"))
        ready.rename(str(ready).replace("a1.parquet", "a77.parquet"))
        raise TransactionBlocked("lock timeout: another transaction holds the row")

    job.run(sink=Hooked(Locking(job.sink.folder), "pre_commit", after=True, hook=executor_dies_after_pre_commit))
    job.assert_exactly_once()


def test_a_replay_that_stays_blocked_stops_and_leaves_no_orphans(job: Job) -> None:
    complete_but_one_lost(job)
    before = sorted(map(str, job.sink.in_doubt("job")))
    steps = Steps()

    class Always(FileSink):
        def pre_commit(self, transaction):
            raise TransactionBlocked("lock timeout on table t")

    with pytest.raises(TransactionBlocked):
        job.run(sink=Always(job.sink.folder), listeners=[steps])
    assert steps_of(steps).count(Step.REPLAYING) == 1
    job.run()
    assert before != []
    job.assert_exactly_once()


def test_r9_a_load_that_retention_cuts_into_between_two_rounds_is_read_again(tmp_path: Path) -> None:
    """The complete record was read, and is old by the time its rounds are."""
    job = Job(tmp_path, batches=5)
    job.run(batches=2)
    steps = Steps()
    storage = HookedStorage(job.storage, "get", "0001.000001", job.run)
    with pytest.raises(Superseded):
        job.coordinator(storage=storage, listeners=[steps]).recover()
    assert {"checkpoint": 4, "rounds": 1, "rows": {"files": 24}, "dead_lettered": {}} in steps.facts
    job.assert_exactly_once()


def test_r12_a_record_of_another_query_is_another_batch() -> None:
    with pytest.raises(CheckpointLocationMismatch):
        require_same_offsets(batch(3, query="other"), record(3))


def test_r12_a_skipped_batch_with_other_offsets_is_refused(job: Job) -> None:
    """Before anything is committed."""
    with pytest.raises(CrashError):
        job.run(listeners=[crash_at(Step.COMPLETE, 2)])
    job.forget_commits(1)
    facts = job.query().batch(1, "restored").facts
    restored = LocalBatch(type(facts)(1, facts.query_id, ('{"end":99}',)), "restored", job.input[0], job.query())
    with pytest.raises(CheckpointLocationMismatch, match="other offsets"):
        job.coordinator().process(restored)
    assert restored.drained == 0
    assert job.visible() == Counter(ids(job.input[:2]))
    job.run()
    job.assert_exactly_once()


def test_r12_a_record_that_another_query_put_first_is_not_adopted(job: Job) -> None:
    """Two checkpointLocations, one job name."""

    def other_query() -> None:
        other = LocalQuery(job.folder / "other-query", [[rows(5000, 2)]])
        store = JobStore(job.storage, "job")
        coordinator = job.coordinator()
        coordinator.process(other.batch(0, "other"))
        # it passed its generation check before ours was claimed
        job.storage.delete(store._generation_key(store.newest_generation()))

    storage = HookedStorage(job.storage, "put_if_absent", "/checkpoint/", other_query)
    with pytest.raises(CheckpointLocationMismatch, match="batch 0 is complete in storage"):
        job.run(batches=1, storage=storage)
    assert sorted(job.visible()) == [5000, 5001]


def test_a_second_call_for_a_batch_with_other_rows_is_refused(job: Job) -> None:
    """Its checkpoint is complete with the rows of the first call, so they would be dropped without a word."""
    coordinator, query = job.coordinator(), job.query()
    coordinator.process(query.batch(0, "one run"))
    coordinator.process(query.batch(0, "one run"))
    query.input = [job.input[1], *job.input[1:]]
    for _ in range(2):  # also when the error was swallowed
        with pytest.raises(CheckpointError, match="called twice for batch 0, with different DataFrames"):
            coordinator.process(query.batch(0, "one run"))
    coordinator.process(query.batch(1, "one run"))
    assert job.visible() == Counter(ids(job.input[:2]))


def test_another_coordinator_refuses_other_rows_of_a_batch(job: Job) -> None:
    """As where the function that Spark calls makes one for each part of a batch."""
    query = job.query()
    for n in range(2):
        job.coordinator().process(query.batch(n, "one run"))
        job.coordinator().process(query.batch(n, "one run"))
    query.input = [job.input[0], job.input[0]]
    with pytest.raises(CheckpointError, match="called twice for batch 1, with different DataFrames"):
        job.coordinator().process(query.batch(1, "one run"))
    assert job.visible() == Counter(ids(job.input[:2]))


def test_a_second_call_after_one_that_failed_with_other_rows_is_refused(job: Job) -> None:
    """By a function that catches the error of one part of a batch, and goes on to the next."""
    coordinator, query = job.coordinator(), job.query()
    coordinator._lifecycle.failed(query.batch(0, "one run"), CheckpointError("an executor was lost"))
    query.input = [job.input[1], *job.input[1:]]
    for each in (coordinator, coordinator, job.coordinator()):
        part = query.batch(0, "one run")
        with pytest.raises(CheckpointError, match=r"called twice.*first one failed.*an executor was lost") as refused:
            each.process(part)
        each._lifecycle.failed(part, refused.value)
    query.input = job.input
    coordinator.process(query.batch(0, "one run"))
    assert job.visible() == Counter(ids(job.input[:1]))


def test_a_part_that_was_refused_is_missing_also_where_the_first_is_handed_over_again(job: Job) -> None:
    coordinator, query = job.coordinator(), job.query()
    first, second = query.batch(0, "one run"), LocalBatch(query.facts_of(0), "one run", job.input[1], query)
    coordinator.process(first)
    coordinator._lifecycle.failed(second, CheckpointError("called twice"))
    coordinator.process(first)
    with pytest.raises(CheckpointError, match="batch 0 failed, but Spark considers it finished"):
        coordinator._lifecycle.require_errors_passed_on(query.batch(1, "one run"))


def test_a_call_that_failed_beside_another_is_forgotten_where_that_had_its_rows(job: Job) -> None:
    """In two threads: it fails when the other has begun. That finishes the batch, so no rows are missing."""
    coordinator, query = job.coordinator(), job.query()
    lifecycle, error = coordinator._lifecycle, CheckpointError("an executor was lost")
    lifecycle.failed(query.batch(0, "one run"), error)
    coordinator.process(query.batch(0, "one run"))
    lifecycle.require_errors_passed_on(query.batch(1, "one run"))
    coordinator.process(query.batch(1, "one run"))
    query.input = [job.input[0], job.input[2], job.input[2]]
    lifecycle.failed(query.batch(1, "one run"), error)
    with pytest.raises(CheckpointError, match="batch 1 failed, but Spark considers it finished"):
        lifecycle.require_errors_passed_on(query.batch(2, "one run"))


def test_a_part_that_failed_is_not_forgotten_where_a_stop_cuts_the_next_one_off(job: Job) -> None:
    """Whose function may catch that error, too: Spark takes the batch for done. The same part is handed over again."""
    coordinator, query = job.coordinator(), job.query()
    coordinator._lifecycle.failed(query.batch(0, "one run"), CheckpointError("an executor was lost"))
    for again, told in ((job.input[1], "an executor was lost"), (job.input[0], "None")):
        cut_off = LocalBatch(query.facts_of(0), "one run", again, query)
        cut_off.active = False
        coordinator._lifecycle.failed(cut_off, CheckpointError("interrupted"))
        assert told in str(coordinator.swallowed_error)


def test_a_closed_coordinator_holds_no_dataframe(job: Job) -> None:
    coordinator = job.coordinator()
    coordinator.process(job.query().batch(0, "one run"))
    before = len(_CALLS)
    coordinator.close()
    assert len(_CALLS) == before - 1


def fail_replay(*_: object) -> NoReturn:
    raise CheckpointError("an executor was lost")


class FailsOnce(FileSink):
    """The first commit of checkpoint 1 is not answered, or finds a transaction rolled back."""

    due = ""

    def commit_all(self, checkpoint, committables):
        if self.due and checkpoint.checkpoint_id == 1:
            if self.due == "no answer":
                raise ConnectionError(self.due)
            self.abort(committables[0].transaction)
        return super().commit_all(checkpoint, committables)


@pytest.mark.parametrize("due", ["no answer", "lost"])
def test_a_second_call_for_a_batch_that_failed_after_its_decision_finishes_it(
    job: Job, monkeypatch: pytest.MonkeyPatch, due: str
) -> None:
    """By a function that catches the error and calls the coordinator again: decided is not yet visible."""
    sink = FailsOnce(job.sink.folder)
    coordinator, query = job.coordinator(sink), job.query()
    coordinator.process(query.batch(0, "one run"))
    sink.due = due
    with monkeypatch.context() as patch:
        patch.setattr(coordinator._protocol, "_replay_lost", fail_replay)
        with pytest.raises(CheckpointError):
            coordinator.process(query.batch(1, "one run"))
    sink.due = ""
    for n in (1, 2):
        coordinator.process(query.batch(n, "one run"))
    job.assert_exactly_once()


def test_a_driver_that_was_suspended_while_another_went_on_is_superseded(job: Job) -> None:
    """It wakes when the time of its checkpoint is up. A restart would fence the driver that has taken over."""

    class Suspend(CheckpointListener):
        def on_step(self, step, checkpoint_id, facts) -> None:
            if (step, checkpoint_id) == (Step.PRE_COMMITTED, 1):
                job.run()
                job.clock.sleep(3600)

    with pytest.raises(Superseded, match="generation 2 of job 'job' has started"):
        job.run(listeners=[Suspend()])
    job.assert_exactly_once()


class Suspended(FileSink):
    """Amid its commits, until another driver has done it all, and what tells of it was purged."""

    def commit_all(self, checkpoint, committables):
        JOBS[0].run()
        return [CommitOutcome.unknown("its proof is gone")] * len(committables)


def test_a_driver_that_was_suspended_amid_its_commits_is_superseded(job: Job) -> None:
    JOBS[:] = [job]
    with pytest.raises(Superseded, match="generation 2 of job 'job' has started"):
        job.run(sink=Suspended(job.sink.folder))
    job.assert_exactly_once()


def test_r13_a_replay_under_another_layout_is_refused_before_it_writes(job: Job) -> None:
    complete_but_one_lost(job)
    Recording.names.clear()
    table = job.input[0]
    job.input = [[*table[:2], table[2], table[3], rows(0, 0)], *job.input[1:]]
    with pytest.raises(ReplayMismatch, match="in 4 partitions, and the batch now has 5"):
        job.run(sink=Recording(job.sink.folder))
    assert Recording.names == []


def test_a_replay_that_hashes_rows_in_another_way_is_refused_before_it_writes(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete_but_one_lost(job)
    Recording.names.clear()
    with monkeypatch.context() as patch:
        patch.setattr(LocalBatch, "row_hash", "new")
        with pytest.raises(ReplayMismatch, match=r"hashed their rows differently \('local'; here: 'new'\)"):
            job.run(sink=Recording(job.sink.folder))
    assert Recording.names == []
    job.run(batches=2)
    store = JobStore(job.storage, "job")
    store.follow_newest_claim()
    assert newest_record(store.storage).row_hash == "local"
    assert job.visible() == Counter(ids(job.input[:2]))


def hidden_rounds(job: Job) -> list[int]:
    return sorted(TransactionId.parse(path.stem[1:]).round for path in job.sink.folder.glob(".tpc.*.parquet"))


def test_a_replay_of_other_rows_aborts_what_it_wrote(job: Job) -> None:
    complete_but_one_lost(job)
    job.input = [[rows(5000, 7), *job.input[0][1:]], *job.input[1:]]
    with pytest.raises(ReplayMismatch):
        job.run()
    assert 1 not in hidden_rounds(job)


class CannotList(FileSink):
    def in_doubt(self, job):
        raise ConnectionError("not now")


class Down(CannotList):
    """Until another driver has started, or a savepoint was restored."""

    def commit_all(self, checkpoint, committables):
        if JOBS:
            store = JobStore(JOBS.pop().storage, "job")
            store.claim_generation()
            raise ConnectionError("not now")
        return super().commit_all(checkpoint, committables)


def test_r14_a_driver_that_asks_again_looks_at_the_fence_before(job: Job) -> None:
    """Of a restored savepoint the same input is written under another lineage."""
    JOBS[:] = [job]
    with pytest.raises(Superseded, match="may not commit any more"):
        job.run(sink=Down(job.sink.folder))
    assert job.visible() == Counter()


def test_a_driver_that_adopts_a_record_aborts_its_own_transactions_at_once(job: Job) -> None:
    """The other driver's sweep could not do it."""

    def other_driver() -> None:
        job.run(batches=1, sink=CannotList(job.sink.folder))

    storage = HookedStorage(job.storage, "put_if_absent", "/checkpoint/", other_driver)
    with pytest.raises(Superseded, match="may not commit any more"):
        job.coordinator(sink=CannotList(job.sink.folder), storage=storage).process(job.query().batch(0, "late"))
    job.assert_exactly_once(batches=1)


def test_a_driver_that_is_superseded_after_its_put_aborts_its_own_transactions_at_once(tmp_path: Path) -> None:
    """As R1, where the other driver's sweep could not do it."""
    job = Job(tmp_path, batches=5)

    def other_driver() -> None:
        job.run(sink=CannotList(job.sink.folder))

    storage = HookedStorage(job.storage, "put_if_absent", "/checkpoint/", other_driver)
    with pytest.raises(Superseded, match=r"checkpoint 4 .* complete already"):
        job.run(sink=CannotList(job.sink.folder), storage=storage)
    job.assert_exactly_once()


@pytest.mark.parametrize(("late", "called_again"), [(False, False), (True, False), (True, True)])
def test_a_failed_put_aborts_nothing_since_it_may_have_landed(job: Job, late: bool, called_again: bool) -> None:
    """Or lands only when the coordinator is closed. The function for foreachBatch may catch the error, and call again,
    with tasks that fail."""
    under_way = []

    class Landed(HookedStorage):
        def put_if_absent(self, key: str, value: bytes) -> bool:
            if "/checkpoint/" in key:
                under_way.append((key, value)) if late else super().put_if_absent(key, value)
                raise StorageError(self.uri, key, "timed out")
            return super().put_if_absent(key, value)

    coordinator = job.coordinator(storage=Landed(job.storage, "", "", lambda: None))
    query = job.query()
    with pytest.raises(CheckpointFailed, match="timed out"):
        coordinator.process(query.batch(0, "one run"))
    if called_again:
        again = query.batch(0, "one run")
        again.run = lambda *_: fail()  # type: ignore[method-assign]
        with pytest.raises(CheckpointFailed, match="not today"):
            coordinator.process(again)
    coordinator.close()
    for key, value in under_way:
        assert job.storage.put_if_absent(key, value)
    assert hidden_rounds(job) == [0, 0, 0]
    steps = Steps()
    job.run(listeners=[steps])
    job.assert_exactly_once()
    assert Step.REPLAYING not in steps_of(steps)


ANSWERS: list[Exception] = []  # global: classes made inside a test are pickled with what they close over


class Stumbles(FileSink):
    """Fails as often as there are answers left in ANSWERS, in the method whose name is set."""

    method = ""

    def _stumble(self, method: str) -> None:
        if method == self.method and ANSWERS:
            raise ANSWERS.pop()

    def commit_all(self, checkpoint, committables):
        try:
            self._stumble("commit_all")
        except Exception as error:
            return [error] * len(committables)
        return super().commit_all(checkpoint, committables)

    def in_doubt(self, job):
        self._stumble("in_doubt")
        return list(super().in_doubt(job))

    def abort(self, transaction) -> None:
        self._stumble("abort")
        super().abort(transaction)

    @classmethod
    def at(cls, job: Job, method: str, *answers: Exception) -> Stumbles:
        ANSWERS[:] = answers
        sink = cls(job.sink.folder)
        sink.method = method
        return sink


def test_r7_a_sweep_while_asking_spares_what_is_asked_for(job: Job) -> None:
    steps = Steps()
    job.run(sink=Stumbles.at(job, "commit_all", ConnectionError("not now")), listeners=[steps])
    job.assert_exactly_once()
    assert Step.REPLAYING not in steps_of(steps)


def test_r7_a_sweep_while_asking_spares_what_a_replay_record_names(job: Job) -> None:
    complete_but_one_lost(job)
    steps = Steps()
    sink = Stumbles.at(job, "commit_all")

    class FailAfterReplay(CheckpointListener):
        def on_step(self, step, checkpoint_id, facts) -> None:
            if step is Step.REPLAY_COMPLETE:
                ANSWERS.append(ConnectionError("not now"))

    job.run(sink=sink, listeners=[steps, FailAfterReplay()])
    job.assert_exactly_once()
    assert steps_of(steps).count(Step.REPLAYING) == 1


@pytest.mark.parametrize("method", ["in_doubt", "abort"])
def test_a_sweep_that_failed_is_tried_again_with_the_next_batch(job: Job, method: str) -> None:
    with pytest.raises(CrashError):
        job.run(listeners=[crash_at(Step.PRE_COMMITTED, 0)])
    job.run(batches=2, sink=Stumbles.at(job, method, ConnectionError("not now")))
    job.assert_exactly_once(batches=2)


def test_a_generation_that_was_claimed_by_another_at_the_same_moment_is_not_shared(job: Job) -> None:
    other = JobStore(job.storage, "job")
    storage = HookedStorage(job.storage, "put_if_absent", "/generation/", other.claim_generation)
    assert JobStore(storage, "job").claim_generation().generation == 2


def test_a_generation_whose_key_was_deleted_while_it_was_claimed_is_claimed_anew(job: Job) -> None:
    other = JobStore(job.storage, "job")

    def many() -> None:
        for _ in range(15):
            other.claim_generation()

    storage = HookedStorage(job.storage, "put_if_absent", "/generation/", many)
    assert JobStore(storage, "job").claim_generation().generation == 16


class Stale(WrappedStorage):
    """Its listings stay as they were when it was opened."""

    def __init__(self, inner: CheckpointStorage) -> None:
        super().__init__(inner)
        self.seen = list(inner.list(""))

    def list(self, prefix: str) -> list[str]:
        return [key for key in self.seen if key.startswith(prefix)]


def test_a_storage_whose_listings_are_stale_is_an_error(job: Job) -> None:
    stale = JobStore(Stale(job.storage), "job")
    JobStore(job.storage, "job").claim_generation()
    with pytest.raises(StorageError, match="listings in a row show no generation after 0"):
        stale.claim_generation()


def test_a_storage_that_still_lists_what_was_deleted_is_an_error(job: Job) -> None:
    store = JobStore(job.storage, "job")
    store.claim_generation()
    stale = JobStore(Stale(job.storage), "job")
    [key] = job.storage.list("")
    job.storage.delete(key)
    with pytest.raises(StorageError, match="listings in a row show it, but it is not there"):
        stale.claim_generation()


def test_a_storage_that_still_lists_a_deleted_record_is_an_error(job: Job) -> None:
    job.run(batches=1)
    stale = JobStore(Stale(job.storage), "job")
    [key] = [key for key in job.storage.list("") if "/checkpoint/" in key]
    job.storage.delete(key)
    with pytest.raises(StorageError, match="listings in a row show it as the newest record, but it is not there"):
        stale.load_newest()


def records(job: Job) -> list[int]:
    return [int(key.rsplit("/", 1)[1].split(".")[0]) for key in job.storage.list("") if "/checkpoint/" in key]


def test_retention_keeps_as_many_checkpoints_as_configured(tmp_path: Path) -> None:
    job = Job(tmp_path, batches=5)
    job.run()
    assert records(job) == [3, 4]


CALLS: list[tuple[int, int, list[int]]] = []
JOBS: list[Job] = []


class Told(FileSink):
    def commit_all(self, checkpoint, committables):
        CALLS.append((checkpoint.checkpoint_id, checkpoint.oldest_retained, records(JOBS[0])))
        return super().commit_all(checkpoint, committables)


def test_sinks_may_remove_no_proof_that_a_retained_record_needs(tmp_path: Path) -> None:
    job = Job(tmp_path, batches=5)
    CALLS.clear()
    JOBS[:] = [job]
    job.run(sink=Told(job.sink.folder))
    assert [n for n, _, _ in CALLS] == [0, 1, 2, 3, 4]
    assert all(oldest <= min(kept) for _, oldest, kept in CALLS)


PURGED: list[tuple[int, int, list[int], int]] = []


class Purging(FileSink):
    """Is asked to purge, and cannot."""

    def purge(self, checkpoint):
        in_doubt = list(self.in_doubt(checkpoint.job))
        PURGED.append((checkpoint.checkpoint_id, checkpoint.oldest_retained, records(JOBS[0]), len(in_doubt)))
        raise ConnectionError("not now")


def test_a_sink_may_purge_when_its_part_of_a_checkpoint_is_visible(tmp_path: Path) -> None:
    job = Job(tmp_path, batches=5)
    job.input[3] = [rows(0, 0)] * 4  # type: ignore[index]
    complete_but_one_lost(job, 2)
    PURGED.clear()
    JOBS[:] = [job]
    job.run(sink=Purging(job.sink.folder))
    job.assert_exactly_once()
    assert [n for n, *_ in PURGED] == [2, 4]  # not 3: what is committed of 2 is the newest that it can remember
    assert all(oldest <= min(kept) and not in_doubt for _, oldest, kept, in_doubt in PURGED)


class RepeatsPuts(HookedStorage):
    """An object store's client that repeats a put whose answer got lost: the second answer is 'exists'."""

    def put_if_absent(self, key: str, value: bytes) -> bool:
        self.inner.put_if_absent(key, value)
        return self.inner.put_if_absent(key, value) if "/checkpoint/" in key else True


def test_ones_own_record_that_answers_exists_is_ones_own(job: Job) -> None:
    steps = Steps()
    job.run(storage=RepeatsPuts(job.storage, "", "", lambda: None), listeners=[steps])
    job.assert_exactly_once()
    assert {"adopted": True} not in steps.facts
    assert Step.REPLAYING not in steps_of(steps)


def test_a_record_under_the_key_of_another_checkpoint_is_refused(job: Job) -> None:
    job.run(batches=2)
    [older, newest] = [key for key in job.storage.list("") if "/checkpoint/" in key]
    data = job.storage.get(older)
    assert data
    job.storage.delete(newest)
    job.storage.put_if_absent(newest, data)
    with pytest.raises(CorruptRecord, match="copied or renamed"):
        job.coordinator().recover()


def test_r4_the_name_tells_the_drivers_tries_apart(job: Job) -> None:
    """Spark numbers task attempts through; the name must not depend on that alone."""
    Recording.names.clear()
    sink = Hooked(Recording(job.sink.folder), "validate_all", hook=fail)
    job.run(batches=1, sink=sink, config={"tolerable_failed_checkpoints": 1})
    assert {TransactionId.parse(name).attempt for name in Recording.names} == {0, 1}


BLOCK: list[bool] = []


class BlockedOnce(Recording):
    def pre_commit(self, transaction):
        if BLOCK:
            BLOCK.clear()
            raise TransactionBlocked("lock timeout")
        return super().pre_commit(transaction)


def test_r4_the_name_tells_the_tries_of_a_replay_apart(job: Job) -> None:
    complete_but_one_lost(job)
    Recording.names.clear()
    BLOCK[:] = [True]
    job.run(batches=1, sink=BlockedOnce(job.sink.folder))
    tries = [TransactionId.parse(name) for name in Recording.names]
    assert [(one.round, one.attempt) for one in tries] == [(1, 0), (1, 1)]


def test_a_zombie_that_goes_on_with_its_next_batch_sweeps_nothing(job: Job) -> None:
    zombie = job.coordinator(config={"sweep_interval": 1e-9})
    zombie.process(job.query().batch(0, "zombie"))
    with pytest.raises(CrashError):
        job.run(listeners=[crash_at(Step.COMPLETE, 1)])
    with pytest.raises(Superseded):
        zombie.process(job.query().batch(1, "zombie"))
    assert len(decided(job)) == 3


def test_recover_with_an_empty_storage_aborts_nothing(job: Job) -> None:
    with pytest.raises(CrashError):
        job.run(listeners=[crash_at(Step.COMPLETE, 0)])
    job.coordinator(storage=open_storage(f"memory:{job.folder.name}-empty")).recover()
    assert len(decided(job)) == 3


def test_recover_commits_the_newest_checkpoint(job: Job) -> None:
    with pytest.raises(CrashError):
        job.run(listeners=[crash_at(Step.COMPLETE, 0)])
    job.coordinator().recover()
    job.assert_exactly_once(batches=1)


def test_a_second_start_of_one_coordinator_is_a_new_driver_and_sweeps_at_once(job: Job) -> None:
    steps = Steps()
    coordinator = job.coordinator(listeners=[steps])
    job.query(1).run(coordinator)
    with pytest.raises(CrashError):
        job.run(listeners=[crash_at(Step.PRE_COMMITTED, 1)])
    job.query().run(coordinator)
    job.assert_exactly_once()
    assert [facts["generation"] for facts in steps.facts if "generation" in facts] == [1, 3]


def test_a_recovery_that_failed_is_done_again_by_the_next_call(job: Job) -> None:

    def unreadable() -> None:
        raise StorageError(job.storage.uri, "key", "not now")

    with pytest.raises(CrashError):
        job.run(listeners=[crash_at(Step.COMPLETE, 0)])
    steps = Steps()
    coordinator = job.coordinator(
        storage=HookedStorage(job.storage, "get", "/checkpoint/", unreadable), listeners=[steps]
    )
    with pytest.raises(StorageError):
        coordinator.process(job.query().batch(0, "one run"))
    coordinator.process(job.query().batch(0, "one run"))
    job.assert_exactly_once(batches=1)
    assert Step.TRIGGERED not in steps_of(steps)


def test_a_query_that_is_being_stopped_does_not_try_again(job: Job) -> None:
    stopping = job.query().batch(0, "run")

    class Stops(Steps):
        def on_step(self, step, checkpoint_id, facts) -> None:
            super().on_step(step, checkpoint_id, facts)
            stopping.active &= step is not Step.PRE_COMMITTED

    steps = Stops()
    coordinator = job.coordinator(
        sink=Hooked(job.sink, "validate_all", hook=fail), config={"tolerable_failed_checkpoints": 3}, listeners=[steps]
    )
    with pytest.raises(OSError, match="not today"):
        coordinator.process(stopping)
    assert steps_of(steps).count(Step.TRIGGERED) == 1
    assert list(job.sink.in_doubt("job")) == []


COMMITS: list[str] = []


class Away(FileSink):
    def commit(self, committable):
        COMMITS.append(committable.transaction["file"])
        raise ConnectionError("cannot reach the system to commit")


@pytest.mark.parametrize("complete_already", [False, True])
def test_a_query_that_is_being_stopped_does_not_wait_for_a_system_that_is_away(
    job: Job, complete_already: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record decides, so the next start commits."""
    monkeypatch.setattr(protocol, "STOP_GRACE_PERIOD", 0)
    if complete_already:
        with pytest.raises(CrashError):
            job.run(listeners=[crash_at(Step.COMPLETE, 0)])
    COMMITS.clear()
    stopping = job.query().batch(0, "run")

    class Stop(CheckpointListener):
        def on_step(self, step, checkpoint_id, facts) -> None:
            stopping.active &= step is not Step.COMMITTING

    with pytest.raises(InDoubtError, match="Start the query again"):
        job.coordinator(sink=Away(job.sink.folder), listeners=[Stop()]).process(stopping)
    assert len(COMMITS) == len(set(COMMITS)) == 3, "each was asked for once"
    job.run()
    job.assert_exactly_once()


def test_a_sink_that_is_away_holds_back_the_query_but_no_other_sink(job: Job, tmp_path: Path) -> None:
    """What is decided is not left to time out, in Kafka for one."""
    away, other = Away(job.sink.folder), FileSink(tmp_path / "other", name="other")
    other.folder.mkdir()
    with pytest.raises(InDoubtError, match="is still not known to be visible"):
        job.query().run(CheckpointCoordinator("job", [away, other], job.storage, clock=job.clock))
    assert job.visible() == Counter()
    assert len(list(other.folder.glob("[!.]*.parquet"))) == 3
    job.query().run(CheckpointCoordinator("job", [job.sink, other], job.storage))
    job.assert_exactly_once()


def test_a_failed_batch_is_tried_no_more_often_than_tolerated(job: Job) -> None:
    steps = Steps()

    class Always(FileSink, Validating[Any]):
        def validate_all(self, checkpoint, committables) -> None:
            fail()

    with pytest.raises(CheckpointFailed):
        job.run(sink=Always(job.sink.folder), config={"tolerable_failed_checkpoints": 2}, listeners=[steps])
    assert steps_of(steps).count(Step.TRIGGERED) == 3


def test_a_checkpoint_that_failed_for_good_leaves_no_orphans_of_siblings(job: Job) -> None:
    """The Spark job failed, so no ack tells which transactions there are."""

    class FailsLate(FileSink):
        def begin_transaction(self, context):
            if context.subtask == 2:
                fail()
            return super().begin_transaction(context)

    with pytest.raises(CheckpointFailed):
        job.run(sink=FailsLate(job.sink.folder))
    assert list(job.sink.in_doubt("job")) == []


class AbortsFirst(FileSink):
    def in_doubt(self, job):
        raise ConnectionError("not now")


def test_a_checkpoint_that_failed_aborts_its_acks_also_where_no_sweep_can(job: Job) -> None:
    with pytest.raises(CheckpointFailed):
        job.run(sink=Hooked(AbortsFirst(job.sink.folder), "validate_all", hook=fail))
    assert list(job.sink.in_doubt("job")) == []


def test_errors_that_no_retry_mends_come_first(job: Job) -> None:
    steps = Steps()

    class Both(FileSink):
        def begin_transaction(self, context):
            if context.subtask == 0:
                raise TransactionBlocked("lock timeout")
            if context.subtask == 1:
                raise BadValue("row 3")
            return super().begin_transaction(context)

    with pytest.raises(BadValue, match="row 3"):
        job.run(sink=Both(job.sink.folder), listeners=[steps])
    assert steps_of(steps).count(Step.TRIGGERED) == 1


CHECKS: list[Any] = []


class Checking(FileSink):
    def check(self, schema) -> None:
        CHECKS.append(schema.names)


def test_the_schema_is_checked_at_each_start_and_when_it_changes(job: Job) -> None:
    CHECKS.clear()
    wider = [table.append_column("more", table["id"]) for table in job.input[1]]
    job.input = [job.input[0], wider, wider]
    coordinator = job.coordinator(sink=Checking(job.sink.folder))
    job.query(2).run(coordinator)
    assert [len(names) for names in CHECKS] == [3, 4]
    job.query().run(coordinator)
    assert [len(names) for names in CHECKS] == [3, 4, 4]


def test_a_checkpoint_whose_replay_was_lost_too_is_replayed_again_after_a_restart(job: Job) -> None:
    complete_but_one_lost(job)
    for _ in range(2):
        with pytest.raises(CrashError):
            job.run(listeners=[crash_at(Step.REPLAY_COMPLETE, 0)])
        job.sink.abort(next(i for i in job.sink.in_doubt("job") if TransactionId.parse(i["file"][:-8]).round))
    steps = Steps()
    job.run(batches=1, listeners=[steps])
    job.assert_exactly_once(batches=1)
    assert [facts["round"] for facts in steps.facts if "round" in facts] == [3]
    assert {"checkpoint": 0, "rounds": 3, "rows": {"files": 24}, "dead_lettered": {}} in steps.facts


def test_close_sweeps(job: Job) -> None:
    coordinator = job.coordinator()
    job.query().run(coordinator)
    stray = TransactionId("job", "aa", 3, "files", 0, 1, 0, 0, 99)
    (job.sink.folder / f".{stray}.parquet").touch()
    coordinator.close()
    assert list(job.sink.in_doubt("job")) == []


def test_close_sweeps_what_a_stop_amid_the_first_checkpoint_left(job: Job) -> None:
    """Without a checkpoint the storage may be the wrong one, but not where it swept before the first batch."""
    stopping = job.query().batch(0, "run")

    class StoppedLate(FileSink):
        def begin_transaction(self, context):
            if context.subtask == 2:
                fail()
            return super().begin_transaction(context)

    class Stop(CheckpointListener):
        def on_step(self, step, checkpoint_id, facts) -> None:
            stopping.active &= step is not Step.TRIGGERED

    coordinator = job.coordinator(sink=StoppedLate(job.sink.folder), listeners=[Stop()])
    with pytest.raises(OSError, match="not today"):
        coordinator.process(stopping)
    assert len(list(job.sink.in_doubt("job"))) == 2
    coordinator.close()
    assert list(job.sink.in_doubt("job")) == []


def test_close_of_a_zombie_sweeps_nothing(job: Job) -> None:
    zombie = job.coordinator()
    zombie.process(job.query().batch(0, "zombie"))
    with pytest.raises(CrashError):
        job.run(listeners=[crash_at(Step.COMPLETE, 1)])
    zombie.close()
    assert len(decided(job)) == 3


def test_recover_tells_of_an_outcome_that_nobody_knows(job: Job) -> None:
    with pytest.raises(CrashError):
        job.run(listeners=[crash_at(Step.COMPLETE, 0)])
    next(path for path in job.sink.folder.iterdir()).unlink()
    with pytest.raises(InDoubtError, match="neither hidden, visible nor withdrawn"):
        job.coordinator().recover()


def test_r19_a_topic_made_anew_between_two_batches_is_refused_before_a_row_is_written(job: Job) -> None:
    job.topics = [{"orders": "first"}]
    job.run(batches=1)
    job.topics = [{"orders": "second"}]
    steps = Steps()
    with pytest.raises(SourceReplaced, match=r"'orders' was deleted and created again .*batch 1 .*adopt=True"):
        job.run(listeners=[steps])
    assert Step.TRIGGERED not in steps_of(steps)

    class MakeAnew(CheckpointListener):
        def on_step(self, step, checkpoint_id, facts) -> None:
            if step is Step.DONE:
                job.topics = [{"orders": "third"}]

    with pytest.raises(SourceReplaced, match="batch 2 "):
        job.run(config={"adopt": True}, listeners=[MakeAnew()])
    job.assert_exactly_once(batches=2)


def test_r19_a_topic_made_anew_while_its_tasks_run_is_refused_before_the_decision(job: Job) -> None:
    job.topics = [{"orders": "first"}]

    class MakeAnew(CheckpointListener):
        def on_step(self, step, checkpoint_id, facts) -> None:
            if step is Step.PRE_COMMITTED:
                job.topics = [{"orders": "second"}]

    with pytest.raises(SourceReplaced, match="batch 0 "):
        job.run(listeners=[MakeAnew()])
    assert job.coordinator().newest_checkpoint() == {}
    assert job.visible() == Counter()
    assert list(job.sink.in_doubt("job")) == []


def test_r19_where_nobody_tells_ids_the_next_batch_is_compared_with_what_was_known_last(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    """Checkpoint 0 is of a version that did not ask."""
    job.run(batches=1)
    job.topics = [{"orders": "first"}]
    job.run(batches=2)
    silent = job.query()
    silent.topic_ids = fail
    silent.run(job.coordinator())
    assert caplog.text.count("the source fails to tell the ids of its topics, and is asked again: not today") == 1
    assert job.coordinator().newest_checkpoint()["topic_ids"] == ({"orders": "first"},)
    job.assert_exactly_once()


def test_r19_a_query_that_is_stopped_amid_the_question_decides_nothing(job: Job) -> None:
    batch = job.query().batch(0, "run")

    def asked_before_the_tasks() -> TopicIds:
        batch.topic_ids = stopped
        return [{"orders": "first"}]

    def stopped() -> NoReturn:
        batch.active = False
        fail()

    batch.topic_ids = asked_before_the_tasks
    with pytest.raises(OSError, match="not today"):
        job.coordinator().process(batch)
    assert job.coordinator().newest_checkpoint() == {}
    assert list(job.sink.in_doubt("job")) == []


def test_the_error_of_a_batch_that_was_passed_over_is_the_last_one(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else `run` and `with` would raise the one that was caught, by which nothing is missing."""
    coordinator, query = job.coordinator(), job.query()
    coordinator.last_error = CheckpointError("an executor was lost")
    coordinator._lifecycle.failed(query.batch(0, "one run"), coordinator.last_error)
    monkeypatch.setattr("coordinator.coordinator.batch_of", lambda *_, **__: query.batch(1, "one run"))
    with pytest.raises(CheckpointError, match="Spark considers it finished") as raised:
        coordinator(Mock(), 1)
    assert coordinator.last_error is raised.value


def test_a_stray_file_among_the_records_is_named(job: Job) -> None:
    job.run(1)
    [key] = [key for key in job.storage.list("") if "/checkpoint/" in key]
    job.storage.put_if_absent(f"{key}.bak", b"")
    with pytest.raises(CorruptRecord, match=rf"'{key}\.bak' in memory:.* move it out of there"):
        job.run()
