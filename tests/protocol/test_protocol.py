"""The protocol's rules, each in the race that it was made for. Real sink, real storage; the other driver is called at
the very point where it hurts."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from coordinator import CheckpointCoordinator, CheckpointListener, Step
from coordinator.errors import (
    CheckpointFailed,
    CheckpointLocationMismatch,
    CorruptRecord,
    InDoubtError,
    QueryNotAdopted,
    Superseded,
    UnknownSink,
    WrongJob,
)
from coordinator.storage import CheckpointStorage, StorageError, open_storage
from coordinator.storage.base import WrappedStorage
from coordinator.store.encoding import seal
from coordinator.store.job_store import JobStore
from examples.custom_sink import FileSink
from sinks import CommitOutcome, Committable
from sinks.errors import BadValue, TransactionBlocked
from sinks.testing import Hooked, LocalBatch
from sinks.testing.conformance import ids
from sinks.testing.kit import rows
from sinks.transaction import TransactionId
from tests.protocol.job import (
    CrashError,
    HookedStorage,
    Job,
    Locking,
    Recording,
    Steps,
    TestClock,
    complete_but_one_lost,
    crash_at,
    fail,
)


def test_r1_a_zombie_that_puts_a_record_which_retention_has_deleted_commits_nothing(tmp_path: Path) -> None:
    job = Job(tmp_path, batches=5)
    storage = HookedStorage(job.storage, "put_if_absent", "/checkpoint/", job.run)
    with pytest.raises(Superseded, match=r"checkpoint 4 .* complete already"):
        job.run(storage=storage)
    job.assert_exactly_once()


def test_a_damaged_record_of_a_replay_keeps_no_other_from_being_deleted(tmp_path: Path) -> None:
    job = Job(tmp_path, batches=6)
    complete_but_one_lost(job)
    job.run(batches=2)
    [replay] = [key for key in job.storage.list("") if key.endswith(".000001")]
    job.storage.delete(replay)
    job.storage.put_if_absent(replay, b"torn")
    job.run()
    assert JobStore(job.storage, "job").record_keys() == [(0, 1), (4, 0), (5, 0)]
    job.assert_exactly_once()


def test_r2_not_found_is_not_taken_for_lost(job: Job) -> None:
    with pytest.raises(CrashError):
        job.run(listeners=[crash_at(Step.COMPLETE, 0)])
    hidden = next(path for path in job.sink.folder.iterdir())
    hidden.unlink()
    with pytest.raises(InDoubtError, match="neither hidden, visible nor withdrawn") as error:
        job.run()
    assert error.value.transactions == [{"file": hidden.name[1:]}]


def test_r3_two_drivers_replay_and_only_one_replacement_wins(job: Job) -> None:
    complete_but_one_lost(job)
    storage = HookedStorage(job.storage, "put_if_absent", ".000001", lambda: job.run(batches=1))
    steps = Steps()
    coordinator = job.coordinator(storage=storage, listeners=[steps])
    with pytest.raises(Superseded, match="may not commit any more"):
        coordinator.process(job.query().batch(0, "late"))
    assert {"adopted": True} in steps.facts
    coordinator.close()
    job.assert_exactly_once(batches=1)


def test_r4_no_transaction_name_is_used_twice(job: Job) -> None:
    Recording.names.clear()
    sink = Recording(job.sink.folder)
    for step in (Step.TRIGGERED, Step.PRE_COMMITTED, Step.COMPLETE, Step.COMMITTED):
        with pytest.raises(CrashError):
            job.run(sink=sink, listeners=[crash_at(step, 1)])
        if step is Step.COMPLETE:
            job.sink.abort(min(job.sink.in_doubt("job"), key=str))
    failing = Hooked(sink, "validate_all", hook=fail)
    job.run(sink=failing, config={"tolerable_failed_checkpoints": 1})
    job.assert_exactly_once()
    assert len(Recording.names) == len(set(Recording.names)) > 15
    assert {TransactionId.parse(name).round for name in Recording.names} == {0, 1}


def test_r6_a_driver_that_is_no_longer_the_newest_does_not_replay(job: Job) -> None:
    complete_but_one_lost(job)
    steps = Steps()

    class OtherDriverStarts(CheckpointListener):
        def on_step(self, step, checkpoint_id, facts) -> None:
            if step is Step.SWEPT:
                JobStore(job.storage, "job").claim_generation()

    with pytest.raises(Superseded, match="may not replay"):
        job.run(listeners=[steps, OtherDriverStarts()])
    assert Step.REPLAYING not in [step for step, _ in steps.seen]
    job.run()
    job.assert_exactly_once()


class HeldBackByOrphans(FileSink):
    """As a Kafka topic holds readers back: commit cannot tell as long as any stray transaction is open."""

    def commit(self, committable: Committable) -> CommitOutcome:
        if any("stray" in str(path) for path in self.folder.glob(".tpc.*stray*.parquet")):
            raise TimeoutError("a transaction that is still open holds the last stable offset")
        return super().commit(committable)

    def in_doubt(self, job):
        yield from super().in_doubt(job)
        yield from ({"file": path.name[1:]} for path in self.folder.glob(".tpc.*stray*.parquet"))


def test_r7_orphans_are_swept_while_a_commit_keeps_asking(job: Job) -> None:
    def stray() -> None:
        (job.sink.folder / ".tpc.stray.parquet").touch()

    sink = HeldBackByOrphans(job.sink.folder)
    job.run(sink=Hooked(sink, "commit", hook=stray))
    job.assert_exactly_once()


def test_r8_a_task_blocked_by_an_orphan_of_a_dead_executor_goes_on_after_a_sweep(job: Job) -> None:
    """The executor died after its pre-commit, before its ack: Spark's retry meets the orphan's locks."""

    def executor_dies_after_pre_commit() -> None:
        ready = next(job.sink.folder.glob(".tpc.*.0.files-*.0.g*.parquet"))
        ready.rename(str(ready).replace("a1.parquet", "a77.parquet"))
        raise TransactionBlocked("lock timeout: another transaction holds the row")

    job.run(sink=Hooked(Locking(job.sink.folder), "pre_commit", after=True, hook=executor_dies_after_pre_commit))
    job.assert_exactly_once()


def test_a_task_that_stays_blocked_fails_the_checkpoint(job: Job) -> None:
    def blocked() -> None:
        raise TransactionBlocked("lock timeout on table t")

    class Always(FileSink):
        def write(self, transaction, batch: pa.RecordBatch) -> None:
            blocked()

    with pytest.raises(TransactionBlocked, match="table t"):
        job.run(sink=Always(job.sink.folder))
    assert list(job.sink.in_doubt("job")) == []


def test_r9_a_load_that_retention_cuts_into_is_read_again(tmp_path: Path) -> None:
    """While checkpoint 1 is being loaded, another driver goes on to 4 and deletes it."""
    job = Job(tmp_path, batches=5)
    job.run(batches=2)
    steps = Steps()
    coordinator = job.coordinator(storage=HookedStorage(job.storage, "get", "/checkpoint/", job.run), listeners=[steps])
    with pytest.raises(Superseded):
        coordinator.recover()
    assert {"checkpoint": 4, "rounds": 1, "rows": {"files": 24}, "dead_lettered": {}} in steps.facts
    job.assert_exactly_once()


def test_r9_a_gap_seen_from_a_stale_load_is_read_again(job: Job) -> None:
    """Another driver completed checkpoints while this one's query was starting; Spark then asks for a later one."""
    coordinator = job.coordinator()
    coordinator.process(job.query().batch(0, "first"))
    other = job.coordinator()
    other.process(job.query().batch(0, "second"))
    other.process(job.query().batch(1, "second"))
    with pytest.raises(Superseded):
        coordinator.process(job.query().batch(2, "first"))
    other.process(job.query().batch(2, "second"))
    job.assert_exactly_once()


def test_r10_a_batch_with_nothing_left_to_write_is_still_run(job: Job) -> None:
    job.run()
    job.forget_commits(1)
    coordinator = job.coordinator()
    for n in (2, 1):  # the newest, and one before it
        batch = job.query().batch(n, "again")
        coordinator.process(batch)
        assert batch.drained == 1
    job.assert_exactly_once()


def test_r12_an_older_checkpoint_location_is_refused(job: Job) -> None:
    job.run()
    job.forget_commits(2)
    facts = job.query().batch(2, "restored").facts
    restored = LocalBatch(type(facts)(2, facts.query_id, ('{"end":99}',)), "restored", job.input[0], job.query())
    with pytest.raises(CheckpointLocationMismatch, match="other offsets"):
        job.coordinator().process(restored)
    job.assert_exactly_once()


def test_wiped_storage_is_refused_and_nothing_is_aborted(job: Job) -> None:
    with pytest.raises(CrashError):
        job.run(listeners=[crash_at(Step.COMPLETE, 1)])
    before = sorted(map(str, job.sink.in_doubt("job")))
    with pytest.raises(QueryNotAdopted, match="wiped"):
        job.run(storage=open_storage(f"memory:{uuid.uuid4().hex}"))
    assert sorted(map(str, job.sink.in_doubt("job"))) == before != []
    job.run()
    job.assert_exactly_once()


def test_a_failed_batch_leaves_nothing_and_is_tried_again_as_often_as_tolerated(job: Job) -> None:
    with pytest.raises(CheckpointFailed, match=r"checkpoint 0 of job 'job' failed.*OSError: not today"):
        job.run(sink=Hooked(job.sink, "validate_all", hook=fail))
    assert job.visible() == Counter()
    assert list(job.sink.in_doubt("job")) == []
    job.run(sink=Hooked(job.sink, "validate_all", hook=fail), config={"tolerable_failed_checkpoints": 1})
    job.assert_exactly_once()


def test_a_bad_value_fails_at_once_with_its_own_error(job: Job) -> None:
    def bad() -> None:
        raise BadValue("table t, column c, row 3: NUL")

    with pytest.raises(BadValue, match="row 3"):
        job.run(sink=Hooked(job.sink, "write", hook=bad), config={"tolerable_failed_checkpoints": 5})
    assert list(job.sink.in_doubt("job")) == []


def test_a_batch_without_rows_is_a_checkpoint_too(job: Job) -> None:
    job.input = [job.input[0], [job.input[0][0].slice(0, 0)] * 4, job.input[2]]
    job.run()
    job.assert_exactly_once()


def test_one_coordinator_serves_a_second_start(job: Job) -> None:
    coordinator = job.coordinator()
    job.query(1).run(coordinator)
    job.query().run(coordinator)
    job.assert_exactly_once()


def test_a_storage_that_cannot_be_written_leaves_the_decision_to_recovery(job: Job) -> None:
    def full() -> None:
        raise StorageError(job.storage.uri, "key", "disk full", "free some space")

    with pytest.raises(CheckpointFailed, match="disk full"):
        job.run(storage=HookedStorage(job.storage, "put_if_absent", "/checkpoint/", full))
    job.run()
    job.assert_exactly_once()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-20], "truncated"),
        (lambda data: b"", "truncated"),
        (lambda data: b'{"some": "other file"}', "not a record"),
        (lambda data: data.replace(b'"rows": 7', b'"rows": 8'), "checksum"),
        (lambda data: data.replace(b'"format": 2', b'"format": 9'), "written by a newer version .* format 9"),
        (lambda data: data.replace(b'"format": 2', b'"format": 1'), "by one before 0.2: it has format 1"),
    ],
)
def test_a_damaged_record_is_an_error_never_a_guess(job: Job, damage: Callable[[bytes], bytes], message: str) -> None:
    job.run()
    [key] = [key for key in job.storage.list("") if "/checkpoint/" in key and "002." in key]
    data = job.storage.get(key)
    assert data
    job.storage.delete(key)
    job.storage.put_if_absent(key, damage(data))
    with pytest.raises(CorruptRecord, match=message):
        job.coordinator().recover()
    job.assert_exactly_once()


@pytest.mark.parametrize(
    ("claim", "message"),
    [(b"", "truncated"), (seal({"job": "job"}), r"lacks or misuses a field: KeyError\('lineage'\)")],
)
def test_an_empty_claim_is_damaged_and_not_a_listing_that_lags(job: Job, claim: bytes, message: str) -> None:
    job.run()
    key = max(key for key in job.storage.list("") if "/generation/" in key)
    job.storage.delete(key)
    job.storage.put_if_absent(key, claim)
    with pytest.raises(CorruptRecord, match=message):
        job.coordinator().recover()


def test_records_copied_from_another_job_are_refused(job: Job) -> None:
    job.run()
    for key in job.storage.list(""):
        data = job.storage.get(key)
        assert data
        job.storage.put_if_absent(key.replace(key.split("/")[0], JobStore(job.storage, "job 2")._folder.root), data)
    with pytest.raises(WrongJob, match="belongs to job 'job', not to 'job 2'"):
        CheckpointCoordinator("job 2", [job.sink], job.storage).recover()


def test_a_sink_that_is_gone_is_an_error(job: Job) -> None:
    job.run()
    with pytest.raises(UnknownSink, match="files"):
        job.coordinator(sink=FileSink(job.sink.folder, name="renamed")).recover()


def test_a_sink_that_is_gone_is_missed_also_after_an_empty_checkpoint(job: Job) -> None:
    """Put back later, its target would lack what came in between."""
    other = FileSink(job.folder / "other", name="other")
    other.folder.mkdir()
    job.input = [job.input[0], [rows(0, 0)], job.input[2]]
    job.query(2).run(CheckpointCoordinator("job", [job.sink, other], job.storage))
    with pytest.raises(UnknownSink, match=r"checkpoint 1 was written by sink\(s\) \['other'\]"):
        job.run()
    assert job.visible() == Counter(ids(job.input[:2]))


def test_sinks_need_different_names(job: Job) -> None:
    with pytest.raises(ValueError, match=r"the name .files.; set name="):
        CheckpointCoordinator("job", [job.sink, FileSink(job.folder)], job.storage)


@pytest.mark.parametrize("sinks", [5, ["postgres"], "postgres"])
def test_sinks_come_in_a_list(job: Job, sinks: Any) -> None:
    with pytest.raises(TypeError, match="has to be a list of sinks, not"):
        CheckpointCoordinator("job", sinks, job.storage)


def test_a_listener_that_fails_changes_nothing(job: Job) -> None:
    class Failing(CheckpointListener):
        def on_step(self, step, checkpoint_id, facts) -> None:
            raise RuntimeError

    job.run(listeners=[Failing()])
    job.assert_exactly_once()


def test_at_least_once_mode_can_be_switched_to_exactly_once(job: Job) -> None:
    job.run(batches=1, config={"mode": "at_least_once"})
    job.run()
    job.assert_exactly_once()


class CountedStorage(WrappedStorage):
    def __init__(self, inner: CheckpointStorage) -> None:
        super().__init__(inner)
        self.calls: Counter[str] = Counter()

    def _call(self, method: str, key: str, *more: Any) -> Any:
        self.calls[method] += 1
        return super()._call(method, key, *more)

    def since_last(self) -> dict[str, int]:
        calls, self.calls = self.calls, Counter()
        return dict(calls)


def test_what_a_checkpoint_asks_of_storage(tmp_path: Path) -> None:
    """Each call is a request that an object store bills; docs/storage.md tells how many."""
    job = Job(tmp_path, batches=5, clock=TestClock())
    storage = CountedStorage(job.storage)
    counts = []
    for run_id, batches in (("first", range(4)), ("second", [4])):
        coordinator = job.coordinator(storage=storage)
        for n in batches:
            coordinator.process(job.query().batch(n, run_id))
            counts.append(storage.since_last())
    assert counts == [
        {"list": 8, "get": 4, "put_if_absent": 2},
        {"list": 2, "get": 2, "put_if_absent": 1},  # retention has nothing to delete yet
        {"list": 2, "get": 2, "put_if_absent": 1, "delete": 1},
        {"list": 2, "get": 2, "put_if_absent": 1, "delete": 1},
        {"list": 13, "get": 11, "put_if_absent": 2, "delete": 1},
    ]


def _records_and_folders(storage: Path) -> list[Path]:
    """Without what is written every few seconds: the history and heartbeats."""
    return [path for path in storage.rglob("*") if not {"statistics", "alive"} & set(path.parts)]


def test_storage_does_not_grow_with_the_number_of_checkpoints(tmp_path: Path) -> None:
    """Neither in records nor in the folders that hold them, which every checkpoint lists."""
    job = Job(tmp_path, batches=30)
    storage = tmp_path / "storage"
    job.run(batches=10, storage=open_storage(f"file://{storage}"))
    before = _records_and_folders(storage)
    job.run(storage=open_storage(f"file://{storage}"))
    assert len(_records_and_folders(storage)) == len(before) + 1, "one more generation, and nothing else"
    job.assert_exactly_once()
