"""Savepoints of a job of files: taken, looked at, restored, refused."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import tarfile
import threading
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from tarfile import TarInfo
from typing import Any

import pytest

from coordinator import (
    CheckpointCoordinator,
    CheckpointListener,
    Savepoint,
    Step,
    describe_savepoint,
    dispose_savepoint,
    list_savepoints,
    restore_savepoint,
)
from coordinator.errors import CheckpointError, CorruptRecord, InDoubtError, SavepointError, Superseded, UnknownSink
from coordinator.operations.savepoints.restore import _base, _files
from coordinator.operations.savepoints.savepoint import savepoint_at
from coordinator.operations.savepoints.take import require_own_location
from coordinator.spark.checkpoint_location import open_location
from coordinator.storage import open_storage
from coordinator.storage.files import FileStorage
from coordinator.store.encoding import seal, unseal
from coordinator.store.job_store import JobStore
from examples.custom_sink import FileSink
from sinks.testing import LocalBatch, LocalQuery
from sinks.testing.conformance import example_input
from sinks.testing.table import eventually
from tests.protocol.job import CrashError, HookedStorage, Job, complete_but_one_lost, crash, crash_at, newest_record


def save(job: Job, target: str, batches: int = 2) -> Savepoint:
    """Run so many batches, and take a savepoint of the stopped query."""
    with job.coordinator() as coordinator:
        job.query(batches).run(coordinator)
        return coordinator.trigger_savepoint(target)


def restored(played: Job, savepoint: Savepoint, folder: str = "restored", **options: Any) -> LocalQuery:
    options = {"storage": played.storage} | options
    restore_savepoint(savepoint.uri, str(played.folder / folder), **options)
    return LocalQuery(played.folder / folder, played.input)


def saved(savepoint: Savepoint) -> list[str]:
    with savepoint_at(savepoint.uri) as (storage, _):
        return [path for path, _ in _files(storage, savepoint)]


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ---------------------------------------------------------------------- take and look
@pytest.mark.parametrize("kind", ["file", "memory", "sqlite"])
def test_a_savepoint_goes_on_in_a_new_place_with_nothing_lost_or_doubled(job: Job, tmp_path: Path, kind: str) -> None:
    storages = {
        "file": f"file://{tmp_path}/s",
        "memory": f"memory:{uuid.uuid4().hex}",
        "sqlite": f"sqlite:///{tmp_path}/s.db",
    }
    savepoint = save(job, storages[kind])
    query = restored(job, savepoint)
    query.run(job.coordinator())
    job.assert_exactly_once()
    assert files(tmp_path / "restored").keys() >= files(tmp_path / "query").keys()


def test_a_savepoint_says_what_it_holds(job: Job, target: str) -> None:
    savepoint = save(job, target)
    assert describe_savepoint(savepoint.uri) == savepoint
    assert list_savepoints(target) == [savepoint]
    assert (savepoint.job, savepoint.checkpoint_id) == ("job", 1)
    assert savepoint.sinks == {"files": "examples.custom_sink.FileSink"}
    assert len(savepoint.record.committables) == 3
    assert set(saved(savepoint)) == {"metadata", "offsets/0", "offsets/1", "commits/0", "commits/1"}
    content = files(job.folder / "query").values()
    assert (savepoint.summary()["files"], savepoint.summary()["bytes"]) == (len(content), sum(map(len, content)))
    json.dumps(savepoint.summary())


def test_files_larger_and_smaller_than_a_chunk_come_back(job: Job, target: str, monkeypatch: Any) -> None:
    monkeypatch.setattr("coordinator.storage.stream.VALUE_BYTES", 100)
    monkeypatch.setattr("coordinator.operations.savepoints.take._IN_MEMORY", 500)
    (job.folder / "query" / "state" / "0").mkdir(parents=True)
    contents = {"state/0/1.delta": b"x" * 1050, "state/0/2.delta": b"", "state/0/2.snapshot": bytes(range(256))}
    for path, content in contents.items():
        (job.folder / "query" / path).write_bytes(content)
    savepoint = save(job, target)
    restored(job, savepoint)
    assert len(savepoint.chunks) > 20
    assert {path: (job.folder / "restored" / path).read_bytes() for path in contents} == contents


def test_later_batches_and_hidden_files_are_left_out(job: Job, target: str) -> None:
    hidden = ("offsets/.1.crc", ".ipynb_checkpoints/metadata")
    for path in (*hidden, "state/0/3.delta", "state/0/4_a-b.zip", "sources/0/9", "state/0/2_a-b.changelog"):
        file = job.folder / "query" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(path)
    job.run(2)
    job.query().batch(2, "planned by Spark before the savepoint")
    savepoint = job.coordinator().trigger_savepoint(target, str(job.folder / "query"))
    assert set(saved(savepoint)) == {
        *("metadata", "offsets/0", "offsets/1", "commits/0", "commits/1", "sources/0/9", "state/0/2_a-b.changelog")
    }
    restored(job, savepoint).run(job.coordinator())


def test_savepoints_in_the_checkpoint_location_are_not_part_of_the_next(job: Job) -> None:
    target = f"file://{job.folder}/query/savepoints"
    first = saved(save(job, target, 1))
    with job.coordinator() as coordinator:
        again = coordinator.trigger_savepoint(target, str(job.folder / "query"))
    assert saved(again) == first


def test_a_batch_between_callback_and_commit_log_is_finished_by_the_restored_query(job: Job, target: str) -> None:
    with pytest.raises(CrashError):
        job.run(listeners=[crash_at(Step.DONE, 1)])
    assert not (job.folder / "query/commits/1").exists()
    savepoint = job.coordinator().trigger_savepoint(target, str(job.folder / "query"))
    assert savepoint.checkpoint_id == 1
    restored(job, savepoint).run(job.coordinator())
    job.assert_exactly_once()


def test_nothing_is_saved_before_all_is_visible(job: Job, target: str) -> None:
    complete_but_one_lost(job)
    with pytest.raises(InDoubtError, match="not visible"):
        job.coordinator().trigger_savepoint(target, str(job.folder / "query"))
    assert list_savepoints(target) == []


def test_what_is_complete_is_committed_before_it_is_saved(job: Job, target: str) -> None:
    with pytest.raises(CrashError):
        job.run(listeners=[crash_at(Step.COMPLETE, 1)])
    job.coordinator().trigger_savepoint(target, str(job.folder / "query"))
    job.assert_exactly_once(batches=2)


def test_a_failed_batch_is_not_skipped_over_by_a_savepoint_of_the_same_object(job: Job, target: str) -> None:
    coordinator = job.coordinator(listeners=[crash_at(Step.COMPLETE, 1)])
    with pytest.raises(CrashError):
        job.query().run(coordinator)
    assert coordinator.trigger_savepoint(target).checkpoint_id == 1
    job.assert_exactly_once(batches=2)


def test_there_is_nothing_to_save_yet(job: Job, target: str) -> None:
    with pytest.raises(SavepointError, match="no batch has come to this coordinator"):
        job.coordinator().trigger_savepoint(target)
    with pytest.raises(SavepointError, match="no complete checkpoint"):
        job.coordinator().trigger_savepoint(target, str(job.folder / "query"))


def test_a_location_that_planned_the_batch_anew_is_not_saved(job: Job) -> None:
    """As Spark's file source does in an older checkpointLocation."""
    job.run(batches=1)
    record = newest_record(job.storage)
    record = replace(record, offsets=('{"logOffset":0}',), planned_at=1000)
    for planned_at, own in ((1000, True), (2000, False)):
        log = f'v1\n{{"batchTimestampMs":{planned_at}}}\n{record.offsets[0]}'
        (job.folder / "query/offsets/0").write_text(log)
        with nullcontext() if own else pytest.raises(SavepointError, match="that Spark planned at another time"):
            require_own_location(open_location(str(job.folder / "query")), record)


def test_another_checkpoint_location_is_refused(job: Job, target: str, tmp_path: Path) -> None:
    job.run(batches=2)
    other = LocalQuery(tmp_path / "other", job.input)
    other.batch(1, "")
    with pytest.raises(SavepointError, match="is not the checkpointLocation of checkpoint 1"):
        job.coordinator().trigger_savepoint(target, str(other.folder))
    with pytest.raises(SavepointError, match="is not the checkpointLocation of checkpoint 1"):
        job.coordinator().trigger_savepoint(target, str(tmp_path / "nowhere"))


def test_a_driver_is_not_stopped_where_no_savepoint_can_be_taken(job: Job, target: str) -> None:
    """In another process: the location is mistyped, or left out, or the newest record is damaged."""
    job.run(batches=2)

    def refused(kind: type[Exception], location: str | None) -> None:
        with pytest.raises(kind):
            job.coordinator(config={"checkpoint_location": f"{job.folder}/query"}).trigger_savepoint(target, location)
        assert JobStore(job.storage, "job").newest_generation() == 1

    refused(SavepointError, f"{job.folder}/nowhere")
    refused(SavepointError, None)
    [newest] = [key for key in job.storage.list("") if f"checkpoint/{1:020d}." in key]
    job.storage.delete(newest)
    job.storage.put_if_absent(newest, b"damaged")
    refused(CorruptRecord, f"{job.folder}/query")


def test_a_superseded_driver_takes_no_savepoint(job: Job, target: str) -> None:
    old = job.coordinator()
    job.query(2).run(old)
    JobStore(job.storage, "job").claim_generation()
    with pytest.raises(Superseded):
        old.trigger_savepoint(target)
    assert open_storage(target).list("") == []


def test_files_that_maintenance_replaces_are_saved_in_their_new_form(job: Job, target: str) -> None:
    state = job.folder / "query" / "state"
    state.mkdir(parents=True)
    for version in (1, 2):
        (state / f"{version}.delta").write_text("delta")

    def maintain() -> None:
        (state / "2.snapshot").write_text("snapshot")
        (state / "1.delta").unlink()
        (state / "2.delta").unlink()

    job.run(batches=2)
    coordinator = job.coordinator()
    import coordinator.spark.checkpoint_location as module

    original = module._Directory.read
    seen: list[str] = []

    def read(self: Any, path: str) -> Any:
        seen.append(path)
        if len(seen) == 3:
            maintain()
        return original(self, path)

    module._Directory.read = read  # type: ignore[method-assign]
    try:
        savepoint = coordinator.trigger_savepoint(target, str(job.folder / "query"))
    finally:
        module._Directory.read = original  # type: ignore[method-assign]
    assert [path for path in saved(savepoint) if path.startswith("state")] == ["state/2.snapshot"]


# ---------------------------------------------------------------------- while it runs
class Allowed(LocalQuery):
    """Begins each batch when it is allowed."""

    def __init__(self, job: Job) -> None:
        super().__init__(job.folder / "query", job.input)
        self.allowed = threading.Semaphore(0)

    def batch(self, n: int, run_id: str) -> LocalBatch:
        assert self.allowed.acquire(timeout=120)
        return super().batch(n, run_id)


class Running:
    """A query that runs in a thread."""

    def __init__(self, query: LocalQuery, coordinator: CheckpointCoordinator) -> None:
        self.query = query
        self.coordinator = coordinator
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.query.run(self.coordinator)
        except BaseException as error:
            self.error = error

    def join(self) -> None:
        self.thread.join(120)
        assert not self.thread.is_alive()
        if self.error:
            raise self.error


def wait_for_commit(job: Job, n: int) -> None:
    eventually((job.folder / "query/commits" / str(n)).exists)


def test_savepoints_of_a_running_query_hold_no_batch_up(job: Job, target: str) -> None:
    coordinator, query = job.coordinator(), Allowed(job)
    running = Running(query, coordinator)
    savepoints = []
    for n in range(len(job.input)):
        query.allowed.release()
        wait_for_commit(job, n)
        savepoints += [coordinator.trigger_savepoint(target) for _ in range(2)]
    running.join()
    job.assert_exactly_once()
    assert [savepoint.checkpoint_id for savepoint in savepoints] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_savepoint_comes_before_the_next_batch_however_soon_that_follows(job: Job, target: str) -> None:
    asked = (1, 11, 21, 31)
    savepoints: list[Future[Savepoint]] = []

    class Asking(CheckpointListener):
        def on_step(self, step: Step, checkpoint_id: int, facts: Mapping[str, Any]) -> None:
            if step is Step.PRE_COMMITTED and checkpoint_id in asked:
                savepoints.append(pool.submit(coordinator.trigger_savepoint, target))
                eventually(lambda: len(coordinator._one_at_a_time._queue) == 2)  # it waits for this batch

    job.input = example_input(40)
    config = {"checkpoint_location": str(job.folder / "query")}
    with ThreadPoolExecutor() as pool, job.coordinator(config=config, listeners=[Asking()]) as coordinator:
        job.query().run(coordinator)
        assert [savepoint.result(120).checkpoint_id for savepoint in savepoints] == [*asked]


def test_a_query_is_stopped_with_a_savepoint_and_goes_on_from_it(job: Job, target: str) -> None:
    coordinator = job.coordinator(config={"min_pause": 600})
    running = Running(job.query(), coordinator)
    wait_for_commit(job, 0)
    savepoint = coordinator.stop_with_savepoint(running.query, target)
    running.join()
    assert newest_record(job.storage).checkpoint_id == savepoint.checkpoint_id == 0
    job.assert_exactly_once(batches=1)
    restored(job, savepoint).run(job.coordinator())
    job.assert_exactly_once()


@pytest.mark.parametrize("how", ["savepoint", "cancel"])
def test_a_run_that_has_ended_is_not_taken_for_the_one_that_runs(job: Job, target: str, how: str) -> None:
    """As after a restart, by who holds the query of before."""
    coordinator = job.coordinator()
    ended = job.query(1)
    ended.run(coordinator)
    running = job.quiet(2)
    running.run(coordinator)
    with pytest.raises(CheckpointError, match=r"another run of it is active, which was not stopped"):
        coordinator.stop_with_savepoint(ended, target) if how == "savepoint" else coordinator.cancel(ended)
    assert running.isActive
    assert list_savepoints(target) == []
    running.stop()
    coordinator.close()


def test_a_query_whose_savepoint_fails_goes_on(job: Job, tmp_path: Path) -> None:
    coordinator, query = job.coordinator(), Allowed(job)
    running = Running(query, coordinator)
    query.allowed.release()
    wait_for_commit(job, 0)
    broken = HookedStorage(open_storage(f"memory:{uuid.uuid4().hex}"), "put_if_absent", "_metadata", crash)
    with pytest.raises(CrashError):
        coordinator.stop_with_savepoint(running.query, broken)
    assert broken.list("") == []
    query.allowed.release(len(job.input) - 1)
    running.join()
    job.assert_exactly_once()


def test_a_query_is_cancelled_with_a_savepoint_that_outlives_its_checkpoints(job: Job, target: str) -> None:
    coordinator = job.coordinator(config={"externalized_cleanup": "delete_on_cancellation"})
    job.query(2).run(coordinator)
    savepoint = coordinator.cancel_with_savepoint(job.query(2), target)
    assert JobStore(job.storage, "job").load_newest() is None
    restored(job, savepoint).run(job.coordinator())
    job.assert_exactly_once()


def test_a_driver_that_was_superseded_cancels_nothing_of_the_newer_one(job: Job) -> None:
    config = {"externalized_cleanup": "delete_on_cancellation"}
    old, new = job.coordinator(config=config), job.coordinator(config=config)
    job.query(1).run(old)
    query = job.query(2)
    query.run(new)
    with pytest.raises(Superseded, match="may not cancel the job any more"):
        old.cancel(job.query())
    store = JobStore(job.storage, "job")
    assert (store.newest_generation(), newest_record(store.storage).checkpoint_id) == (2, 1)


def test_a_client_of_spark_connect_cancels_a_query_that_its_copy_on_the_server_serves(job: Job) -> None:
    client, server = job.coordinator(), job.coordinator()
    job.query(1).run(server)
    client.recover()  # as after a stop
    query = job.query(2)
    query.run(server)
    client.cancel(query)
    job.assert_exactly_once(batches=2)


def test_a_query_is_stopped_though_the_target_of_its_savepoint_cannot_be_closed(
    job: Job, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would wait for ever, held back before its next batch."""
    coordinator = job.coordinator(config={"min_pause": 600})
    running = Running(job.query(), coordinator)
    wait_for_commit(job, 0)
    monkeypatch.setattr(FileStorage, "close", lambda _: crash())
    with pytest.raises(CrashError):
        coordinator.stop_with_savepoint(running.query, target)
    running.join()
    assert running.query.stopped
    assert len(list_savepoints(open_storage(target))) == 1


# ---------------------------------------------------------------------- restore
def test_a_restored_query_begins_a_lineage_without_committables(job: Job, target: str) -> None:
    savepoint = save(job, target)
    restored(job, savepoint)
    base = newest_record(job.storage)
    assert base.lineage != savepoint.lineage
    assert (base.checkpoint_id, base.committables, base.restored_from) == (1, (), savepoint.id)


def test_only_the_lineage_of_the_savepoint_has_its_number(job: Job, target: str) -> None:
    """An earlier one that ended there by chance may lack rows."""
    savepoint = save(job, target)
    n = savepoint.checkpoint_id
    for of_a_base, at in (("", n + 1), ("a savepoint", n)):
        record = replace(savepoint.record, predecessors={"before": n}, restored_from=of_a_base)
        base = _base(replace(savepoint, records=(record,)), "job", "new", [], later=False)
        assert base.predecessors == {"before": at, savepoint.lineage: n}


def test_the_driver_of_the_abandoned_lineage_is_stopped(job: Job, target: str) -> None:
    old = job.coordinator()
    for n in range(2):
        old.process(job.query().batch(n, "one run"))
        (job.folder / "query/commits" / str(n)).touch()
    savepoint = old.trigger_savepoint(target)
    query = restored(job, savepoint)
    with pytest.raises(Superseded):
        old.process(job.query().batch(2, "one run"))
    query.run(job.coordinator())
    job.assert_exactly_once()


def test_later_checkpoints_refuse_a_restore_unless_allowed(job: Job, target: str) -> None:
    savepoint = save(job, target)
    job.run()
    before = job.storage.list("")
    with pytest.raises(SavepointError, match=r"after it, up to 3 .* allow_later_checkpoints=True"):
        restored(job, savepoint)
    assert job.storage.list("") == before
    assert not (job.folder / "restored").exists()
    query = restored(job, savepoint, allow_later_checkpoints=True)
    query.run(job.coordinator())
    assert [job.visible()[id] for id in (0, 2000, 3000)] == [1, 2, 2]  # as the user allowed


def test_what_the_abandoned_lineage_left_in_doubt_is_aborted_not_adopted(job: Job, target: str) -> None:
    savepoint = save(job, target)
    with pytest.raises(CrashError):
        job.run(listeners=[crash_at(Step.COMPLETE, 2)])  # complete, nothing of it visible
    assert list(job.sink.in_doubt("job"))
    restored(job, savepoint, allow_later_checkpoints=True).run(job.coordinator())
    job.assert_exactly_once()


def test_a_second_restore_of_an_unstarted_one_is_no_later_checkpoint(job: Job, target: str) -> None:
    savepoint = save(job, target)
    restored(job, savepoint, "first")
    query = restored(job, savepoint, "second")
    query.run(job.coordinator())
    job.assert_exactly_once()
    for folder in ("first", "second", "third"):
        with pytest.raises(SavepointError, match=r"up to 3|gone on since"):
            restored(job, savepoint, folder)


def test_another_job_name_and_another_storage(job: Job, target: str, tmp_path: Path) -> None:
    savepoint = save(job, target)
    storage = open_storage(f"memory:{uuid.uuid4().hex}")
    query = restored(job, savepoint, storage=storage, job="renamed")
    query.run(CheckpointCoordinator("renamed", [job.sink], storage))
    job.assert_exactly_once()
    assert newest_record(storage, "renamed").job == "renamed"


def test_a_sink_that_was_added_gets_the_batches_from_there_on(job: Job, target: str, tmp_path: Path) -> None:
    savepoint = save(job, target)
    (tmp_path / "more").mkdir()
    more = FileSink(tmp_path / "more", name="more")
    restored(job, savepoint, sinks=["files", "more"]).run(CheckpointCoordinator("job", [job.sink, more], job.storage))
    job.assert_exactly_once()
    assert len(list((tmp_path / "more").glob("*.parquet"))) == 6


def test_a_sink_that_is_gone_is_an_error_unless_allowed(job: Job, target: str, tmp_path: Path) -> None:
    savepoint = save(job, target)
    renamed = FileSink(job.sink.folder, name="renamed")
    with pytest.raises(UnknownSink, match=r"\['files'\]"):
        restored(job, savepoint, "a", sinks=["renamed"])
    query = restored(job, savepoint, "b")
    with pytest.raises(UnknownSink, match=r"\['files'\]"):
        query.run(CheckpointCoordinator("job", [renamed], job.storage))
    restored(job, savepoint, "c", allow_non_restored=True).run(CheckpointCoordinator("job", [renamed], job.storage))
    job.assert_exactly_once()


def test_a_checkpoint_location_in_use_is_refused(job: Job, target: str) -> None:
    savepoint, another = save(job, target), save(job, target, batches=3)
    with pytest.raises(SavepointError, match=r"is not empty: it holds 7 file"):
        restored(job, savepoint, "query")
    restored(job, savepoint, "there", allow_later_checkpoints=True)
    with pytest.raises(SavepointError, match=r"is not empty: .* of the restore"):
        restored(job, another, "there")


# ---------------------------------------------------------------------- damage
def metadata(savepoint: Savepoint) -> Path:
    return Path(savepoint.uri.removeprefix("file://")) / "_metadata"


def flip_metadata(savepoint: Savepoint) -> None:
    data = metadata(savepoint).read_bytes()
    metadata(savepoint).write_bytes(data.replace(b'"checkpoint_id": 1', b'"checkpoint_id": 0'))


def truncate_metadata(savepoint: Savepoint) -> None:
    metadata(savepoint).write_bytes(metadata(savepoint).read_bytes()[:-20])


def future_format(savepoint: Savepoint) -> None:
    sealed = json.loads(metadata(savepoint).read_bytes())
    metadata(savepoint).write_text(json.dumps(sealed | {"format": 99}))


def older_form(savepoint: Savepoint) -> None:
    body = unseal(metadata(savepoint).read_bytes(), "")
    metadata(savepoint).write_bytes(seal(body | {"chunk_size": 4194304, "files": []}))


def chunk(savepoint: Savepoint) -> Path:
    return metadata(savepoint).with_name("0000000000")


def flip_a_byte(savepoint: Savepoint) -> None:
    data = bytearray(chunk(savepoint).read_bytes())
    data[data.index(b"offsets/1")] ^= 1
    chunk(savepoint).write_bytes(data)


def cut_off(savepoint: Savepoint) -> None:
    chunk(savepoint).write_bytes(chunk(savepoint).read_bytes()[:-1])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (flip_metadata, r"_metadata .* was changed after it was written"),
        (truncate_metadata, r"_metadata .* is truncated"),
        (future_format, r"_metadata .* written by a newer version .* format 99"),
        (lambda savepoint: metadata(savepoint).unlink(), r"is half-written: 1 chunk\(s\), but no _metadata"),
        (flip_a_byte, r"damaged: chunk .*/0000000000 was altered or cut off: its checksum does not match"),
        (cut_off, r"damaged: chunk .*/0000000000 was altered or cut off"),
        (lambda savepoint: chunk(savepoint).unlink(), r"damaged: chunk .*/0000000000 is missing"),
        (older_form, r"_metadata .* lacks or misuses a field: .*chunk_size"),
        (lambda savepoint: dispose_savepoint(savepoint.uri), r"there is no savepoint"),
    ],
)
def test_a_damaged_savepoint_is_refused_before_anything_is_written(
    job: Job, target: str, damage: Any, message: str
) -> None:
    savepoint = save(job, target)
    damage(savepoint)
    before = job.storage.list("")
    with pytest.raises(SavepointError, match=message):
        restored(job, savepoint)
    assert not (job.folder / "restored").exists()
    assert job.storage.list("") == before
    dispose_savepoint(savepoint.uri)
    assert open_storage(target).list("") == []


def forge(savepoint: Savepoint, change: Callable[[TarInfo], None]) -> None:
    """Change the entry of `offsets/0`."""
    forged = io.BytesIO()
    with tarfile.open(chunk(savepoint)) as tar, tarfile.open(mode="w", fileobj=forged) as other:
        for entry in tar:
            content = tar.extractfile(entry)
            if entry.name == "offsets/0":
                change(entry)
            other.addfile(entry, content)
    fill(savepoint, forged.getvalue())


def fill(savepoint: Savepoint, data: bytes) -> None:
    chunk(savepoint).write_bytes(data)
    reseal(savepoint, {"chunks": [hashlib.sha256(data).hexdigest()]})


def reseal(savepoint: Savepoint, change: dict[str, Any]) -> None:
    metadata(savepoint).write_bytes(seal(unseal(metadata(savepoint).read_bytes(), "") | change))


def rename(path: str, entry: TarInfo) -> None:
    entry.name = path


def link(entry: TarInfo) -> None:
    entry.type, entry.size, entry.linkname = tarfile.SYMTYPE, 0, "/etc/passwd"


@pytest.mark.parametrize(
    "harm",
    [
        *(
            partial(forge, change=partial(rename, path))
            for path in (
                *("/tmp/outside", "../outside", "state/../../outside", "state//0", ".hidden/0", "state/.0.tmp"),
                *("state\\0", "state/0\n", "", "_restored", "_restored/0", "offsets/1", "offsets"),
            )
        ),
        partial(forge, change=link),
        partial(forge, change=lambda entry: setattr(entry, "type", tarfile.DIRTYPE)),
        partial(fill, data=b"x" * 10240),
        partial(fill, data=b""),
        partial(reseal, change={"chunks": 7}),
        partial(reseal, change={"chunks": []}),
        partial(reseal, change={"id": "savepoint-another"}),
        partial(reseal, change={"records": []}),
    ],
)
def test_a_savepoint_that_was_made_to_do_harm_is_refused_before_anything_is_written(
    job: Job, target: str, harm: Callable[[Savepoint], None]
) -> None:
    savepoint = save(job, target)
    harm(savepoint)
    before = job.storage.list("")
    with pytest.raises(SavepointError, match=f"savepoint {re.escape(savepoint.uri)}"):
        restored(job, savepoint)
    assert not (job.folder / "restored").exists()
    assert job.storage.list("") == before


@pytest.mark.parametrize("link", ["offsets", "metadata", ".metadata.tmp"])
def test_a_restore_writes_through_no_symbolic_link(job: Job, target: str, tmp_path: Path, link: str) -> None:
    savepoint, outside = save(job, target), tmp_path / "outside"
    outside.mkdir() if link == "offsets" else outside.write_text("mine")
    (job.folder / "restored").mkdir()
    (job.folder / "restored" / link).symlink_to(outside)
    with pytest.raises(SavepointError, match="is a symbolic link"):
        restored(job, savepoint)
    assert os.listdir(job.folder / "restored") == [link]
    assert os.listdir(outside) == [] if outside.is_dir() else outside.read_text() == "mine"


def test_a_silent_target_does_not_hold_the_query_up(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is opened before the query has to wait."""
    job.run(batches=2)
    coordinator, opening, go_on = job.coordinator(), threading.Event(), threading.Event()

    def silent(uri: Any) -> Any:
        opening.set()
        assert go_on.wait(300)
        return open_storage(f"memory:{uuid.uuid4().hex}")

    monkeypatch.setattr("coordinator.storage.open_storage", silent)
    saving = threading.Thread(target=coordinator.trigger_savepoint, args=("postgresql://silent/db",))
    saving.start()
    assert opening.wait(120)
    running = threading.Thread(target=job.query(4).run, args=(coordinator,))
    running.start()
    running.join(120)
    stuck = running.is_alive()
    go_on.set()
    saving.join(120)
    running.join(120)
    assert not stuck
    job.assert_exactly_once()


def test_a_listing_passes_over_what_is_damaged(job: Job, target: str, caplog: pytest.LogCaptureFixture) -> None:
    first = save(job, target)
    second = save(job, target, batches=3)
    metadata(first).unlink()
    assert list_savepoints(target) == [second]
    assert "is half-written" in caplog.text


def test_an_uri_that_names_no_savepoint_is_not_repeated() -> None:
    with pytest.raises(SavepointError, match="not the id or the URI of a savepoint") as error:
        describe_savepoint("postgresql://user:secret@host/db")
    assert "secret" not in str(error.value)


def test_a_folder_that_cannot_be_listed_makes_no_savepoint(
    job: Job, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files would be missing in it without a word."""
    coordinator = job.coordinator()
    job.query(1).run(coordinator)
    (job.folder / "query/state/0").mkdir(parents=True)
    scandir = os.scandir

    def broken(path: Any) -> Any:
        if str(path).endswith("state/0"):
            raise OSError(5, "Input/output error", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", broken)
    with pytest.raises(SavepointError, match="Input/output error"):
        coordinator.trigger_savepoint(target)
    assert list_savepoints(target) == []


def test_a_query_that_fails_while_its_savepoint_is_taken_was_not_stopped_by_it(
    job: Job, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restart would go on, past the savepoint."""
    coordinator, running = job.coordinator(), job.quiet(2)
    running.run(coordinator)
    save = coordinator._savepoints._save

    def saved(*arguments: Any) -> Any:
        running.stop()
        monkeypatch.setattr(running, "exception", lambda: RuntimeError("the source is gone"))
        return save(*arguments)

    monkeypatch.setattr(coordinator._savepoints, "_save", saved)
    with pytest.raises(SavepointError, match=r"failed while savepoint .* was taken: the source is gone"):
        coordinator.stop_with_savepoint(running, target)
    assert len(list_savepoints(target)) == 1
