"""Timeout, pause, cancel and guarantee of a coordinator."""

from __future__ import annotations

import logging
import uuid
from pathlib import Path

import pyarrow as pa
import pytest

from coordinator import (
    CheckpointConfig,
    CheckpointCoordinator,
    CheckpointingMode,
    ExternalizedCheckpointCleanup,
    Replay,
    Step,
)
from coordinator.errors import CheckpointExpired, CheckpointFailed, InDoubtError, NotExactlyOnce, QueryNotAdopted
from coordinator.operations.statistics.model import Status, load_history
from coordinator.protocol.deadline import deadline
from coordinator.storage import StorageError
from coordinator.store.job_store import JobStore
from examples.custom_sink import FileSink
from sinks._util.machine import Clock
from sinks.optional import Validating
from sinks.testing import Hooked
from sinks.testing.local import QueryStopped
from tests.protocol.job import Job, Steps, complete_but_one_lost, newest_record

CLOCKS: list[Clock] = []  # global: hooks are pickled with the sink


@pytest.fixture(autouse=True)
def _clock(job: Job) -> None:
    CLOCKS[:] = [job.clock]


def doze() -> None:
    CLOCKS[0].sleep(6)


def test_an_expired_checkpoint_is_aborted_and_tried_again(job: Job) -> None:
    steps = Steps()
    slow = Hooked(job.sink, "write", hook=doze)
    job.run(sink=slow, config={"timeout": 5, "tolerable_failed_checkpoints": 1}, listeners=[steps])
    [error] = [facts["error"] for facts in steps.facts if "error" in facts]
    assert isinstance(error, CheckpointExpired)
    assert "checkpoint 0 was not complete within 5 s" in str(error)
    job.assert_exactly_once()


@pytest.mark.parametrize("method", ["write", "validate_all"])
def test_an_expired_checkpoint_leaves_nothing(job: Job, method: str) -> None:
    with pytest.raises(CheckpointFailed, match=r"nothing of it is visible: CheckpointExpired") as error:
        job.run(sink=Hooked(job.sink, method, hook=doze), config={"timeout": 5})
    assert isinstance(error.value.__cause__, CheckpointExpired)
    assert not job.visible()
    assert list(job.sink.in_doubt("job")) == []
    assert JobStore(job.storage, "job").load_newest() is None
    job.run()
    job.assert_exactly_once()


def test_an_error_with_advice_of_its_own_is_not_taken_for_the_time_that_it_took(job: Job) -> None:
    batch = job.query().batch(0, "one run")

    def refused_late() -> None:
        with deadline(5, batch, job.clock):
            job.clock.sleep(6)
            raise InDoubtError("ask somebody")

    with pytest.raises(InDoubtError, match="ask somebody"):
        refused_late()


@pytest.mark.parametrize(
    ("method", "then"),
    [
        ("validate_all", "it is not complete, and the next start writes it"),
        ("commit_all", "it is complete, and the next start makes visible what is not"),
    ],
)
def test_a_stop_amid_a_batch_says_what_follows(
    job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, method: str, then: str
) -> None:
    batch = job.query().batch(0, "run")

    def stop() -> None:
        batch.active = False
        raise OSError("interrupted")

    class Stopped(Validating, FileSink):
        def validate_all(self, checkpoint, committables) -> None:
            if method == "validate_all":
                stop()

        def commit_all(self, checkpoint, committables):
            stop()

        def __reduce__(self):
            return FileSink, (self.folder,)

    coordinator = job.coordinator(sink=Stopped(job.sink.folder))
    coordinator._preflight_done = True
    monkeypatch.setattr("coordinator.coordinator.batch_of", lambda *_, **__: batch)
    with caplog.at_level(logging.INFO), pytest.raises(QueryStopped):
        coordinator(None, 0)  # type: ignore[arg-type]
    assert f"job job: the query was stopped in the middle of batch 0: {then}" in caplog.text
    assert coordinator.statistics.under_way_seconds == 0
    coordinator.history.flush()
    tried = [each.status for each in load_history(coordinator._protocol.store, [])]
    assert tried == [Status.HALTED if method == "commit_all" else Status.FAILED]
    job.run()
    job.assert_exactly_once()


def test_what_is_complete_does_not_expire(job: Job) -> None:
    job.run(sink=Hooked(job.sink, "commit", hook=doze), config={"timeout": 5})
    job.assert_exactly_once()


def test_min_pause_is_between_the_end_of_one_and_the_begin_of_the_next(job: Job) -> None:
    steps, times = Steps(), []
    steps.on_step = lambda step, *rest: times.append((step, job.clock.monotonic()))  # type: ignore[method-assign]
    job.run(config={"min_pause": 300}, listeners=[steps])
    done = [at for step, at in times if step is Step.DONE]
    triggered = [at for step, at in times if step is Step.TRIGGERED]
    assert all(begin - end >= 300 for end, begin in zip(done, triggered[1:], strict=False))


DELETE = {"externalized_cleanup": ExternalizedCheckpointCleanup.DELETE_ON_CANCELLATION}


def test_cancel_deletes_checkpoints_only_when_told_so(job: Job) -> None:
    for config, kept in (({}, True), (DELETE, False)):
        coordinator = job.coordinator(config=config)
        query = job.query()
        query.run(coordinator)
        coordinator.cancel(query)
        assert bool(JobStore(job.storage, "job").load_newest()) is kept
        job.assert_exactly_once()
    with pytest.raises(QueryNotAdopted, match="holds no checkpoint of this job"):
        job.coordinator().process(job.query().batch(1, "later"))


def test_cancel_deletes_nothing_that_is_still_to_be_made_visible(job: Job) -> None:
    complete_but_one_lost(job)
    with pytest.raises(InDoubtError, match="checkpoint 0 is complete, but these are not visible"):
        job.coordinator(config=DELETE).cancel(job.query())
    job.run()
    job.assert_exactly_once()


def test_storage_comes_from_the_config(tmp_path: Path) -> None:
    sink = FileSink(tmp_path)
    with pytest.raises(ValueError, match="a coordinator needs a storage"):
        CheckpointCoordinator("job", [sink])
    coordinator = CheckpointCoordinator("job", [sink], config=CheckpointConfig(storage=f"file://{tmp_path}/s"))
    assert coordinator.storage.uri == f"file://{tmp_path}/s"


def test_nothing_is_promised_before_the_first_batch(job: Job, tmp_path: Path) -> None:
    """Neither the sinks nor the source were asked yet."""
    coordinator = CheckpointCoordinator("job", [job.sink], f"file://{tmp_path}/s")
    assert str(coordinator.guarantee) == "exactly-once: not known before the first batch"
    assert not coordinator.guarantee.exactly_once
    assert coordinator.statistics.exactly_once is None
    job.query(1).run(coordinator)
    assert str(coordinator.guarantee) == "exactly-once: yes"
    assert str(coordinator.statistics.exactly_once) == "True"


def test_what_cannot_be_exactly_once_is_refused_where_that_is_required(job: Job, tmp_path: Path) -> None:
    """Before the claim, which would stop a driver that works."""
    memory = f"memory:{uuid.uuid4().hex}"
    in_memory = CheckpointCoordinator("job", [job.sink], memory, CheckpointConfig(require="exactly-once"))
    said = r"job 'job' requires exactly-once, but cannot promise it: .* gone with the driver"
    with pytest.raises(NotExactlyOnce, match=said):
        job.query(1).run(in_memory)
    with pytest.raises(NotExactlyOnce, match=said):
        in_memory.guarantee  # noqa: B018 - it asks the storage
    config = CheckpointConfig(mode=CheckpointingMode.AT_LEAST_ONCE, require="exactly-once")
    at_least_once = CheckpointCoordinator("job", [job.sink], f"file://{tmp_path}/s", config)
    with pytest.raises(NotExactlyOnce, match="the mode is AT_LEAST_ONCE"):
        job.query(1).run(at_least_once)
    for coordinator in (in_memory, at_least_once):
        assert JobStore(coordinator.storage, "job").newest_generation() == 0


def test_the_constructor_opens_no_storage(job: Job, tmp_path: Path) -> None:
    places = tmp_path / "checkpoints", tmp_path / "spool"
    config = CheckpointConfig(replay=Replay.SPOOL, spool_dir=places[1].as_uri())
    with CheckpointCoordinator("job", [job.sink], places[0].as_uri(), config) as coordinator:
        assert coordinator.storage.uri == places[0].as_uri()
    assert [place.exists() for place in places] == [False, False]
    job.query(1).run(coordinator)
    assert [place.exists() for place in places] == [True, True]


def test_what_opens_the_storage_says_why_it_cannot(job: Job) -> None:
    unreachable = CheckpointCoordinator("job", [job.sink], "postgresql://app@127.0.0.1:1/checkpoints")
    said = r"checkpoint storage postgresql\+?\w*://app@127.0.0.1:1/checkpoints: cannot connect: .*Check that the server"
    for call in (unreachable.newest_checkpoint, unreachable.recover, lambda: unreachable.guarantee):
        with pytest.raises(StorageError, match=said):
            call()
    with pytest.raises(StorageError, match=said):
        job.query(1).run(unreachable)
    unreachable.close()
    assert job.visible() == {}


class Leaky(FileSink):
    def weaknesses(self) -> list[str]:
        return ["the disk forgets"]


def test_a_sinks_weakness_is_in_the_record_and_refused_where_exactly_once_is_required(job: Job, tmp_path: Path) -> None:
    sink = Leaky(job.sink.folder)
    coordinator = CheckpointCoordinator("job", [sink], f"file://{tmp_path}/s")
    job.query(1).run(coordinator)
    record = newest_record(coordinator.storage)
    assert record.guarantee == str(coordinator.guarantee) == "exactly-once: no, because sink 'files': the disk forgets"
    strict = CheckpointConfig(require="exactly-once")
    with pytest.raises(NotExactlyOnce, match="sink 'files': the disk forgets"):
        job.query().run(CheckpointCoordinator("job", [sink], f"file://{tmp_path}/s", strict))


class LeakyOnceMade(FileSink):
    """Its target is made by `check`, with the defaults of a system that may lose rows."""

    made = False

    def check(self, schema: pa.Schema) -> None:
        super().check(schema)
        self.made = True

    def weaknesses(self) -> list[str]:
        return ["the new topic may lose records"] if self.made else []


def test_a_weakness_of_what_the_first_batch_creates_is_told(job: Job, tmp_path: Path) -> None:
    coordinator = CheckpointCoordinator("job", [LeakyOnceMade(job.sink.folder)], f"file://{tmp_path}/s")
    job.query(1).run(coordinator)
    assert str(coordinator.guarantee) == "exactly-once: no, because sink 'files': the new topic may lose records"
