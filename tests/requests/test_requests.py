"""What operators ask of a driver through storage: done between two batches by the newest driver, or told why not."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator import CheckpointCoordinator, CheckpointListener, list_savepoints
from coordinator.errors import SavepointError
from coordinator.listener import Step
from coordinator.operations import requests
from coordinator.operations.requests import Request, ask_driver
from coordinator.operations.savepoints.on_driver import DriverSavepoints
from coordinator.storage import CheckpointStorage, StorageError, open_storage
from coordinator.storage.base import WrappedStorage
from coordinator.store.encoding import seal
from coordinator.store.job_store import JobStore
from coordinator.store.records import Heartbeat
from sinks.testing.local import LocalQuery
from sinks.testing.servers.s3 import S3Server
from sinks.testing.table import eventually
from sinks.transaction import token
from tests.protocol.job import Job

Change = Callable[[Heartbeat], Heartbeat]

FAST = {"request_poll_interval": 0.1, "heartbeat_interval": 1}


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "_LOOK", 0.1)
    monkeypatch.setattr("coordinator.operations.heartbeat._MISSED", 600)  # of a busy machine


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture(params=["memory", "file", "sqlite", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CheckpointStorage:
    folder = f"{tmp_path}/checkpoints"
    if request.param == "s3":
        server: S3Server = request.getfixturevalue("s3")
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        return open_storage(f"s3://{server.make_bucket()}/checkpoints")
    uris = {"memory": f"memory:{folder}", "file": f"file://{folder}", "sqlite": f"sqlite:///{folder}.db"}
    return open_storage(uris[request.param])


def store_of(storage: CheckpointStorage) -> JobStore:
    return JobStore(storage, "job")


def notes(storage: CheckpointStorage) -> list[str]:
    return [key for key in storage.list("") if key.split("/")[1] in ("request", "begun", "answer")]


def asking(storage: CheckpointStorage, how: str = "trigger", **options: Any) -> Future[dict[str, Any]]:
    """In a thread of its own, as another process does."""
    pool = ThreadPoolExecutor(1)
    asked = pool.submit(ask_driver, store_of(storage), how, **options)
    pool.shutdown(wait=False)
    return asked


class Held(CheckpointListener):
    """Holds a batch up amid its checkpoint."""

    def __init__(self, checkpoint: int = 1) -> None:
        self.checkpoint, self.reached, self.go_on = checkpoint, threading.Event(), threading.Event()

    def on_step(self, step: Step, checkpoint_id: int, facts: Mapping[str, Any]) -> None:
        if (step, checkpoint_id) == (Step.PRE_COMMITTED, self.checkpoint):
            self.reached.set()
            assert self.go_on.wait(120)


# ---------------------------------------------------------------------- what is done
def test_a_savepoint_and_nothing_is_left_in_storage(job: Job, target: str, storage: CheckpointStorage) -> None:
    with job.coordinator(storage=storage, config={"savepoint_dir": target}) as coordinator:  # as it is by default
        job.quiet(2).run(coordinator)
        taken = ask_driver(store_of(storage), "trigger")
        assert store_of(storage).newest_generation() == 1
    assert taken["checkpoint"] == 1
    assert [one.uri for one in list_savepoints(target)] == [taken["uri"]]
    assert notes(storage) == []


@pytest.mark.parametrize("how", ["stop", "cancel"])
def test_a_query_is_stopped(job: Job, target: str, storage: CheckpointStorage, how: str) -> None:
    coordinator = job.coordinator(storage=storage, config={"min_pause": 60, "savepoint_dir": target} | FAST)
    running = threading.Thread(target=lambda: LocalQuery(job.folder / "query", job.input).run(coordinator))
    running.start()
    eventually((job.folder / "query/commits/0").exists)
    taken = ask_driver(store_of(storage), how)
    running.join(120)
    assert not running.is_alive()
    job.assert_exactly_once(batches=taken["checkpoint"] + 1)
    coordinator.close()
    assert notes(storage) == []


def test_it_is_between_two_batches_and_the_signs_go_on(job: Job, target: str) -> None:
    held = Held()
    with job.coordinator(config={"savepoint_dir": target} | FAST, listeners=[held]) as coordinator:
        running = threading.Thread(target=job.quiet(2).run, args=[coordinator])
        running.start()
        assert held.reached.wait(120)
        asked = asking(job.storage)
        store, root = store_of(job.storage), store_of(job.storage).newest_claim()
        before = store.journal.last_heartbeat(root).at
        eventually(lambda: store.journal.last_heartbeat(root).at > before)
        assert not asked.done()
        assert not [key for key in notes(job.storage) if "/begun/" in key]
        held.go_on.set()
        assert asked.result(120)["checkpoint"] == 1
        running.join(120)


def test_a_savepoint_is_asked_for_while_the_first_batch_recovers(job: Job, target: str) -> None:
    """It waits for that batch, as for any other."""
    recovering, go_on = threading.Event(), threading.Event()

    class Recovering(CheckpointListener):
        def on_step(self, step: Step, checkpoint_id: int, facts: Mapping[str, Any]) -> None:
            if step is Step.LOADED:
                recovering.set()
                assert go_on.wait(120)

    with job.coordinator(config={"savepoint_dir": target} | FAST, listeners=[Recovering()]) as coordinator:
        running = threading.Thread(target=job.quiet(1).run, args=[coordinator])
        running.start()
        assert recovering.wait(120)
        asked = asking(job.storage)
        eventually(lambda: len(coordinator._one_at_a_time._queue) == 2)  # it waits for this batch
        go_on.set()
        assert asked.result(120)["checkpoint"] == 0
        running.join(120)


def test_two_at_once_are_both_done(job: Job, target: str) -> None:
    with job.coordinator(config={"savepoint_dir": target} | FAST) as coordinator:
        job.quiet(1).run(coordinator)
        one, other = asking(job.storage), asking(job.storage)
        taken = {one.result(120)["uri"], other.result(120)["uri"]}
    assert {each.uri for each in list_savepoints(target)} == taken
    assert len(taken) == 2


def test_a_request_outlives_its_driver(job: Job, target: str) -> None:
    """It was begun, and nothing came of it."""
    job.run(1)
    store = store_of(job.storage)
    id = asked(store)
    store.journal.put_note("begun", id, {})
    with job.coordinator(config={"savepoint_dir": target} | FAST) as coordinator:
        job.quiet(2).run(coordinator)
        eventually(lambda: store.journal.read_note("answer", id) is not None)
        eventually(lambda: store.journal.note_ids("request") == [])
    assert [one.summary()["checkpoint"] for one in list_savepoints(target)] == [1]


def test_what_was_answered_is_not_done_again(job: Job, target: str) -> None:
    job.run(1)
    store = store_of(job.storage)
    id = asked(store, "stop")
    store.journal.put_note("answer", id, {"savepoint": {}})
    with job.coordinator(config={"savepoint_dir": target} | FAST) as coordinator:
        job.quiet(2).run(coordinator)
        eventually(lambda: store.journal.note_ids("request") == [])
        assert coordinator.query.isActive
    assert list_savepoints(target) == []


@pytest.mark.parametrize("how", ["stop", "cancel"])
def test_what_a_driver_began_before_it_died_does_not_stop_the_next_one(job: Job, target: str, how: str) -> None:
    """It may have been done, and the operator has started the query again."""
    job.run(1)
    store = store_of(job.storage)
    id = asked(store, how)
    store.journal.put_note("begun", id, {})
    with job.coordinator(config={"savepoint_dir": target} | FAST) as coordinator:
        job.quiet(2).run(coordinator)
        assert f"a driver before this one had begun to {how}" in answer_to(store, id)["error"]
        eventually(lambda: store.journal.note_ids("request") == [])
        assert coordinator.query.isActive
    assert list_savepoints(target) == []


def asked(store: JobStore, how: str = "trigger", change: Callable[[Heartbeat], Heartbeat] = lambda s: s) -> str:
    """A request that nobody waits for."""
    id, sign = store.journal.new_note_id()
    store.journal.put_note("request", id, Request(how, change(sign)).to_json())
    return id


# ---------------------------------------------------------------------- what is not
def aged(hours: float) -> Change:
    return lambda sign: replace(sign, at=int(sign.at - hours * 3_600_000))


@pytest.mark.parametrize(("hours", "told"), [(1, "1.0 h old"), (-1, "ahead")])
def test_a_request_is_refused_by_its_age(job: Job, target: str, hours: float, told: str) -> None:
    store = store_of(job.storage)
    id = asked(store, "stop", aged(hours))
    with job.coordinator(config={"savepoint_dir": target} | FAST) as coordinator:
        job.quiet(1).run(coordinator)
        eventually(lambda: store.journal.read_note("answer", id) is not None)
        assert told in (store.journal.read_note("answer", id) or {})["error"]
        assert coordinator.query.isActive
        eventually(lambda: store.journal.note_ids("request") == [])
    assert list_savepoints(target) == []


def test_a_storage_with_a_clock_tells_the_age(job: Job, target: str) -> None:
    class Clocked(WrappedStorage):
        def clock(self) -> float:
            return time.time() - 7200

    storage = Clocked(job.storage)
    store = store_of(storage)
    with job.coordinator(storage=storage, config={"savepoint_dir": target} | FAST) as coordinator:
        job.quiet(1).run(coordinator)
        id = asked(store, change=aged(5))  # the operator's machine is hours behind
        eventually(lambda: store.journal.read_note("answer", id) is not None)
        assert "savepoint" in (store.journal.read_note("answer", id) or {})


def test_a_superseded_driver_answers_nothing(job: Job, target: str) -> None:
    store = store_of(job.storage)
    with job.coordinator(config={"savepoint_dir": target} | FAST) as coordinator:
        job.quiet(1).run(coordinator)
        store.follow_newest_claim()
        store.claim_generation("", 30.0)
        id = asked(store, "stop")
        with pytest.raises(SavepointError, match=r"has not come to it within 2\.0 s\. Driver: generation 2 \("):
            ask_driver(store, "trigger", holds=2)
        assert coordinator.query.isActive
        assert store.journal.note_ids("request") == [id]
        assert store.journal.note_ids("begun") == store.journal.note_ids("answer") == []
        assert list_savepoints(target) == []
        job.quiet(2).run(coordinator)  # started again, it is the newest
        eventually(lambda: store.journal.read_note("answer", id) is not None)
        eventually(lambda: not coordinator.query.isActive)
    assert len(list_savepoints(target)) == 1


def test_what_is_withdrawn_is_not_done(job: Job, target: str) -> None:
    held = Held(0)
    with job.coordinator(config={"savepoint_dir": target} | FAST, listeners=[held]) as coordinator:
        running = threading.Thread(target=job.quiet(1).run, args=[coordinator])
        running.start()
        assert held.reached.wait(120)
        with pytest.raises(SavepointError, match="Nothing was done, and the request is withdrawn"):
            ask_driver(store_of(job.storage), "stop", holds=1)
        held.go_on.set()
        running.join(120)
        assert coordinator.query.isActive
        ask_driver(store_of(job.storage), "trigger")
    assert len(list_savepoints(target)) == 1


@contextmanager
def amid_a_batch(
    job: Job, coordinator: CheckpointCoordinator, held: Held, how: str, caplog: pytest.LogCaptureFixture
) -> Iterator[str]:
    """In this block the driver has come to a request, whose id this is, and waits for the batch under way."""
    running = threading.Thread(target=job.quiet(1).run, args=[coordinator])
    running.start()
    assert held.reached.wait(120)
    with caplog.at_level(logging.INFO, "coordinator.requests"):
        id = asked(store_of(job.storage), how)
        eventually(lambda: "asks for a savepoint" in caplog.text)
    yield id
    held.go_on.set()
    running.join(120)


def answer_to(store: JobStore, id: str) -> Mapping[str, Any]:
    eventually(lambda: store.journal.read_note("answer", id) is not None)
    return store.journal.read_note("answer", id) or {}


def test_what_is_withdrawn_while_the_driver_waits_for_its_batch(
    job: Job, target: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = store_of(job.storage)
    with job.coordinator(config={"savepoint_dir": target} | FAST, listeners=[held := Held(0)]) as coordinator:
        with amid_a_batch(job, coordinator, held, "stop", caplog) as id:
            store.journal.delete_note("request", id)
        assert "was withdrawn" in answer_to(store, id)["error"]
        assert coordinator.query.isActive
    assert list_savepoints(target) == []


def test_nobody_waits_where_no_driver_runs(job: Job) -> None:
    with pytest.raises(SavepointError, match=r"has never been started .* say --checkpoint-location"):
        ask_driver(store_of(job.storage), "trigger")
    with job.coordinator() as coordinator:
        job.quiet(1).run(coordinator)
    with pytest.raises(SavepointError, match="has ended its query"):
        ask_driver(store_of(job.storage), "trigger")
    assert notes(job.storage) == []


def test_a_driver_that_ends_before_it_comes_to_it(job: Job, target: str) -> None:
    with job.coordinator(config={"savepoint_dir": target, "request_poll_interval": 0}) as coordinator:
        job.quiet(1).run(coordinator)
        waiting = asking(job.storage)
        eventually(lambda: bool(notes(job.storage)))
    with pytest.raises(SavepointError, match=r"(?s)Nothing was done, .* the coordinator was closed"):
        waiting.result(120)
    assert notes(job.storage) == []


class Followed(WrappedStorage):
    """Calls the hook after each call, with its method and key."""

    def __init__(self, inner: CheckpointStorage, hook: Callable[[str, str], object]) -> None:
        super().__init__(inner)
        self.hook = hook

    def _call(self, method: str, key: str, *more: Any) -> Any:
        done = super()._call(method, key, *more)
        self.hook(method, key)
        return done


def begun_at_once(storage: CheckpointStorage) -> Followed:
    """The operator's storage, where a driver has begun with each request before anybody waits for it."""

    def begin(method: str, key: str) -> None:
        if method == "put_if_absent" and "/request/" in key:
            store_of(storage).journal.put_note("begun", key.rpartition("/")[2], {})

    return Followed(storage, begin)


def test_a_driver_that_dies_after_it_has_begun(job: Job, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "_INSIST", 1)
    with job.coordinator(config={"savepoint_dir": target, "request_poll_interval": 0}) as coordinator:
        job.quiet(1).run(coordinator)
        waiting = asking(begun_at_once(job.storage), "stop", holds=1)
        eventually(lambda: bool(store_of(job.storage).journal.note_ids("begun")))
    with pytest.raises(SavepointError, match=r"(?s)the outcome is unknown.* savepoint list"):
        waiting.result(120)


def test_a_cancel_may_take_as_long_as_the_request_holds(job: Job, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver has ended its query, and commits what was complete."""
    monkeypatch.setattr(requests, "_INSIST", 0.0)
    store, looks = store_of(job.storage), []

    def look(method: str, key: str) -> None:
        if method == "get" and "/answer/" in key:
            looks.append(key)

    with job.coordinator(config={"savepoint_dir": target, "request_poll_interval": 0}) as coordinator:
        job.quiet(1).run(coordinator)
        waiting = asking(Followed(begun_at_once(job.storage), look), "cancel", holds=600)
        eventually(lambda: bool(store.journal.note_ids("begun")))
    looks.clear()
    eventually(lambda: len(looks) > 5 or waiting.done())
    [id] = store.journal.note_ids("begun")
    store.journal.put_note("answer", id, {"savepoint": {"checkpoint": 0}})
    assert waiting.result(120) == {"checkpoint": 0}


class Shaky(WrappedStorage):
    """Refuses so many calls of notes between operators and drivers."""

    left = 0

    def _call(self, method: str, key: str, *more: Any) -> Any:
        if self.left and key.split("/")[1] in ("request", "begun", "answer"):
            self.left -= 1
            raise StorageError(self.uri, key, "not today")
        return super()._call(method, key, *more)


def _refuse_after_the_savepoint(storage: Shaky, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many calls, from when the savepoint is taken and not yet answered."""

    class Fails(DriverSavepoints):
        def _save(self, *given: Any) -> Any:
            savepoint = super()._save(*given)
            storage.left = calls
            return savepoint

    monkeypatch.setattr("coordinator.coordinator.DriverSavepoints", Fails)


def test_storage_that_fails_when_a_request_is_looked_for(job: Job, target: str) -> None:
    storage = Shaky(job.storage)
    with job.coordinator(storage=storage, config={"savepoint_dir": target} | FAST) as coordinator:
        job.quiet(1).run(coordinator)
        storage.left = 5
        assert ask_driver(store_of(job.storage), "trigger")["checkpoint"] == 0
        assert storage.left == 0


def test_storage_that_fails_when_the_answer_is_put(job: Job, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Shaky(job.storage)
    _refuse_after_the_savepoint(storage, 2, monkeypatch)
    with job.coordinator(storage=storage, config={"savepoint_dir": target} | FAST) as coordinator:
        job.quiet(1).run(coordinator)
        taken = ask_driver(store_of(job.storage), "trigger")
    assert [one.uri for one in list_savepoints(target)] == [taken["uri"]]


def test_an_answer_that_storage_did_not_take_for_long_is_told_later(
    job: Job, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "_INSIST", 0.0)
    storage, store = Shaky(job.storage), store_of(job.storage)
    _refuse_after_the_savepoint(storage, 3, monkeypatch)
    with job.coordinator(storage=storage, config={"savepoint_dir": target} | FAST) as coordinator:
        job.quiet(1).run(coordinator)
        id = asked(store)
        assert "savepoint" in answer_to(store, id)
        eventually(lambda: store.journal.note_ids("request") == [])
        assert storage.left == 0
    assert len(list_savepoints(target)) == 1


def test_a_request_whose_put_storage_did_not_answer_is_withdrawn(job: Job, target: str) -> None:

    def no_answer(method: str, key: str) -> None:
        if method == "put_if_absent" and "/request/" in key:
            raise StorageError(job.storage.uri, key, "no answer")

    with job.coordinator(config={"savepoint_dir": target, "request_poll_interval": 0}) as coordinator:
        job.quiet(1).run(coordinator)
        with pytest.raises(SavepointError, match=r"no answer.* The request is withdrawn if .*savepoint list"):
            ask_driver(store_of(Followed(job.storage, no_answer)), "stop")
        assert notes(job.storage) == []


def test_a_request_that_cannot_be_read_holds_up_no_other(job: Job, target: str) -> None:
    """A file for another account alone."""
    unreadable = asked(store_of(job.storage))

    class Denied(WrappedStorage):
        def _call(self, method: str, key: str, *more: Any) -> Any:
            if method == "get" and key.endswith(f"/request/{unreadable}"):
                raise StorageError(self.uri, key, "permission denied")
            return super()._call(method, key, *more)

    with job.coordinator(storage=Denied(job.storage), config={"savepoint_dir": target} | FAST) as coordinator:
        job.quiet(1).run(coordinator)
        assert ask_driver(store_of(job.storage), "trigger")["checkpoint"] == 0
    assert store_of(job.storage).journal.note_ids("request") == [unreadable]


@pytest.mark.parametrize(
    "data",
    [
        b"\xff",
        b"[" * 50_000,
        seal({"job": "other", "note": {}}),
        seal({"job": "job", "note": {"how": "burn"}}),
        seal({"job": "job", "note": "evil"}),
        seal([1, 2]),  # type: ignore[arg-type]
    ],
    ids=["no record", "deep", "of another job", "of another kind", "no mapping", "a list"],
)
def test_a_bad_request_is_told_of_and_others_are_done(job: Job, target: str, data: bytes) -> None:
    store = store_of(job.storage)
    id, _ = store.journal.new_note_id()
    job.storage.put_if_absent(f"{token('job')}/request/{id}", data)
    with job.coordinator(config={"savepoint_dir": target} | FAST) as coordinator:
        job.quiet(1).run(coordinator)
        assert ask_driver(store, "trigger")["checkpoint"] == 0
    assert "error" in (store.journal.read_note("answer", id) or {})
    assert store.journal.note_ids("request") == []


def test_a_foreign_object_beside_the_history_keeps_no_request_from_being_done(job: Job, target: str) -> None:
    job.storage.put_if_absent(f"{token('job')}/statistics/x", b"evil")
    with job.coordinator(config={"savepoint_dir": target} | FAST) as coordinator:
        job.quiet(1).run(coordinator)
        assert ask_driver(store_of(job.storage), "trigger")["checkpoint"] == 0


def test_a_query_that_was_started_again_meanwhile_is_not_stopped(
    job: Job, target: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The request was for the one before."""
    store = store_of(job.storage)
    with job.coordinator(config={"savepoint_dir": target} | FAST, listeners=[held := Held(0)]) as coordinator:
        with amid_a_batch(job, coordinator, held, "stop", caplog) as id:
            coordinator._lifecycle.run_id = "another"
        assert "was started again" in answer_to(store, id)["error"]
        assert coordinator.query.isActive
    assert list_savepoints(target) == []


# ---------------------------------------------------------------------- where to
def test_a_driver_without_a_place_for_savepoints_takes_none(job: Job) -> None:
    with job.coordinator(config=FAST) as coordinator:
        job.quiet(1).run(coordinator)
        with pytest.raises(SavepointError, match="savepoint_dir"):
            ask_driver(store_of(job.storage), "trigger")


def test_a_place_for_savepoints_that_cannot_be_opened_is_told(job: Job, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with job.coordinator(config={"savepoint_dir": f"file://{tmp_path}/file/savepoints"} | FAST) as coordinator:
        job.quiet(1).run(coordinator)
        with pytest.raises(SavepointError, match=r"The driver refused: .*file/savepoints.*Not a directory"):
            ask_driver(store_of(job.storage), "trigger", holds=10)


def test_what_nobody_fetched_is_gone_after_a_day(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "_SWEEP", 0.2)
    store = store_of(job.storage)
    old = f"{time.time_ns() // 1_000_000 - 90_000_000:015d}.{'0' * 16}"
    for folder in ("request", "begun", "answer"):
        store.journal.put_note(folder, old, {})
    new, _ = store.journal.new_note_id()
    store.journal.put_note("answer", new, {})
    with job.coordinator(config=FAST) as coordinator:
        job.quiet(1).run(coordinator)
        eventually(lambda: len(notes(job.storage)) == 1)
        store.journal.put_note("answer", old, {})  # while the driver runs
        eventually(lambda: len(notes(job.storage)) == 1)
    assert store.journal.note_ids("answer") == [new]


def test_it_costs_one_list_each_time(job: Job) -> None:
    asked: list[tuple[str, str]] = []

    class Counting(WrappedStorage):
        def _call(self, method: str, key: str, *more: Any) -> Any:
            asked.append((method, key))
            return super()._call(method, key, *more)

    def called() -> list[tuple[str, str]]:
        return [(method, key.split("/")[1]) for method, key in asked if key.split("/")[1] in ("request", "answer")]

    with job.coordinator(storage=Counting(job.storage), config=FAST | {"heartbeat_interval": 60}) as coordinator:
        job.quiet(1).run(coordinator)
        eventually(lambda: len(called()) >= 3)  # the first look deletes what is old
        began = time.monotonic()
        asked.clear()
        eventually(lambda: len(called()) >= 5)
        calls, took = called(), time.monotonic() - began
        assert set(calls) == {("list", "request")}
        assert len(calls) <= 2 + took / 0.1
