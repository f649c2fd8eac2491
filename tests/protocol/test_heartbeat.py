"""Heartbeats in storage."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from coordinator.errors import CheckpointError, CheckpointFailed
from coordinator.listener import Step
from coordinator.operations.heartbeat import DriverStatus, Heartbeats, State, look_for_driver
from coordinator.operations.inspection.text import of_driver
from coordinator.storage import StorageError
from coordinator.storage.base import WrappedStorage
from coordinator.store.job_store import JobStore
from coordinator.store.records import CompletedCheckpoint, Heartbeat
from sinks.testing import Hooked, LocalQuery
from sinks.testing.table import eventually
from tests.protocol.job import CrashError, Job, crash_at, fail, newest_record

FAST = {"heartbeat_interval": 0.1}


class CountedStorage(WrappedStorage):
    """Counts the heartbeats that were put; its clock is an hour behind this machine's. `broken`: refuses heartbeats."""

    put = 0
    broken = False

    def put_if_absent(self, key: str, value: bytes) -> bool:
        if "/alive/" in key:
            if self.broken:
                raise StorageError(self.uri, key, "not today")
            self.put += 1
        return super().put_if_absent(key, value)

    def clock(self) -> float:
        return time.time() - 3600


def heartbeats(job: Job) -> list[str]:
    return job.storage.list(f"{JobStore(job.storage, 'job')._folder.root}/alive")


def test_a_driver_gives_heartbeats_while_its_batch_takes_long_and_one_is_kept(job: Job) -> None:
    seen: list[tuple[DriverStatus | None, int]] = []

    def runs() -> bool:
        driver = look_for_driver(JobStore(storage, "job"))
        seen[:] = [(driver, len(heartbeats(job)))]
        return storage.put > 5 and driver is not None and driver.state is State.RUNNING

    storage = CountedStorage(job.storage)
    coordinator = job.coordinator(Hooked(job.sink, "validate_all", hook=lambda: eventually(runs)), storage, config=FAST)
    with coordinator:
        job.query(1).run(coordinator)
    driver, kept = seen[0]
    assert driver
    assert (driver.state, driver.generation, driver.clock) == (State.RUNNING, 1, "the storage's")
    assert -1 < driver.age < 100, "the clock of this machine plays no part"
    assert kept in (1, 2)  # put, and the one before not yet deleted
    ended = look_for_driver(JobStore(storage, "job"))
    assert ended
    assert ended.state is State.ENDED
    reasons = "the coordinator was closed", "the query was stopped, or failed outside of the coordinator"
    assert ended.sign.ended in reasons, "whichever is seen first"
    with job.coordinator(config=FAST) as again:
        job.query().run(again)
    assert len(heartbeats(job)) == 1


def test_the_last_heartbeat_says_what_the_query_ended_with(job: Job) -> None:
    with pytest.raises(CheckpointFailed):
        job.run(sink=Hooked(job.sink, "write", hook=fail))
    driver = look_for_driver(JobStore(job.storage, "job"))
    assert driver
    assert driver.state is State.ENDED
    assert "CheckpointFailed: checkpoint 0" in driver.sign.ended
    assert "not today" in driver.sign.ended


def test_a_query_that_ends_outside_of_the_coordinator(job: Job) -> None:
    coordinator = job.coordinator(config=FAST)
    job.query(1).run(coordinator)
    store = JobStore(job.storage, "job")
    eventually(lambda: (driver := look_for_driver(store)) is not None and driver.state is State.ENDED)
    driver = look_for_driver(store)
    assert driver
    assert "outside of the coordinator" in driver.sign.ended


def test_a_driver_that_gives_no_more_signs_is_silent_and_its_query_goes_on(job: Job) -> None:
    storage = CountedStorage(job.storage)
    storage.broken = True

    def silent() -> bool:
        driver = look_for_driver(JobStore(storage, "job"))
        return driver is not None and driver.state is State.SILENT

    with job.coordinator(
        Hooked(job.sink, "validate_all", hook=lambda: eventually(silent)), storage, config=FAST
    ) as coordinator:
        job.query().run(coordinator)
    job.assert_exactly_once()


def test_an_operators_claim_is_no_driver(job: Job) -> None:
    store = JobStore(job.storage, "job")
    assert look_for_driver(store) is None
    job.run(1)
    job.coordinator().recover()
    driver = look_for_driver(store)
    assert driver
    assert (driver.state, driver.generation) == (State.NONE, 2)


@pytest.mark.parametrize(("age", "overdue"), [(29.0, False), (31.0, False), (46.0, True), (89.0, True)])
def test_a_driver_that_missed_a_heartbeat_is_not_called_running_without_a_doubt(age: float, overdue: bool) -> None:
    driver = DriverStatus(State.RUNNING, 1, Heartbeat("host h, process 1", 0, None, 30.0), age, "the driver's")
    assert ("The next one is overdue. It is taken for dead after 1.5 min" in of_driver(driver)) is overdue


def test_a_heartbeat_that_is_ahead_is_told_by_the_clock_that_was_looked_at() -> None:
    driver = DriverStatus(State.UNKNOWN, 1, Heartbeat("host h, process 1", 0, 0.0, 30.0), -3600.0, "the storage's")
    assert "1.0 h ahead by the storage's clock" in of_driver(driver)


def test_a_checkpoint_that_is_complete_is_a_heartbeat(job: Job) -> None:
    """Else a driver would be told silent for longer than its newest checkpoint is old."""
    with pytest.raises(CrashError):
        job.run(2, listeners=[crash_at(Step.COMPLETE, 1)])
    store = JobStore(job.storage, "job")
    record = newest_record(store.storage, store.job)
    later = replace(record, completed_at=time.time_ns() // 1_000_000)
    time.sleep(0.01)
    alone, both = look_for_driver(store), look_for_driver(store, newest=CompletedCheckpoint((later,)))
    assert alone
    assert both
    assert both.sign.at == later.completed_at > alone.sign.at
    assert 0 <= both.age < alone.age
    of_another = replace(later, generation=2)
    ahead = replace(later, completed_at=later.completed_at + 3_600_000)
    for other in of_another, ahead:
        told = look_for_driver(store, newest=CompletedCheckpoint((other,)))
        assert told
        assert told.sign == alone.sign


def test_a_second_query_of_one_coordinator_is_refused_and_the_first_goes_on_with_its_signs(job: Job) -> None:
    second = LocalQuery(job.folder / "second", job.input)
    with job.coordinator(config=FAST) as coordinator:
        first = job.quiet(1)
        first.run(coordinator)
        with pytest.raises(CheckpointError, match="Give that one a coordinator"):
            second.run(coordinator)
        first.input = job.input
        first.run(coordinator)
        assert coordinator.query is first
        store = JobStore(job.storage, "job")
        eventually(lambda: (driver := look_for_driver(store)) is not None and driver.state is State.RUNNING)
    job.assert_exactly_once()


def test_a_driver_whose_function_calls_again_gives_heartbeats_again(job: Job) -> None:
    """The call that failed has said that the query ended."""
    query, store = job.quiet(), JobStore(job.storage, "job")
    with job.coordinator(Hooked(job.sink, "validate_all", hook=fail), config=FAST) as coordinator:
        with pytest.raises(CheckpointFailed):
            coordinator.process(query.batch(0, "one run"))
        assert [driver.state for driver in [look_for_driver(store)] if driver] == [State.ENDED]
        coordinator.process(query.batch(0, "one run"))
        eventually(lambda: (driver := look_for_driver(store)) is not None and driver.state is State.RUNNING)
        assert len(heartbeats(job)) <= 2


def test_a_driver_whose_spark_is_gone_asks_it_no_more_often(job: Job) -> None:
    class Gone:
        @property
        def isActive(self) -> bool:  # noqa: N802 - Spark's name
            raise OSError("Py4J has no gateway")

    looks: list[float] = []
    store = JobStore(job.storage, "job")
    heartbeat = Heartbeats(store, 0.5, 0, dict, lambda: looks.append(time.monotonic()), lambda: None)
    began = time.monotonic()
    heartbeat.begin(1, Gone())  # type: ignore[arg-type]
    eventually(lambda: len(looks) >= 4)
    heartbeat.end("the test is over")
    assert looks[3] - began > 1.9, "four intervals of half a second, or more on a busy machine"
