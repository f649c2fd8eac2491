"""How a restore takes a job over from drivers of the lineage that it abandons."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator import Step
from coordinator.errors import Superseded
from coordinator.operations import operator_decisions
from coordinator.storage import CheckpointStorage
from coordinator.store.job_store import JobStore
from coordinator.store.records import Record
from sinks.testing.conformance import ids
from tests.protocol.job import CheckedThenPut, CrashError, HookedStorage, Job, crash, crash_at, newest_record


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def base_of(job: Job) -> Record:
    record = newest_record(job.storage)
    return replace(record, lineage="restored", committables=(), restored_from="a savepoint")


class Later(Exception):
    pass


def refuse_later(store: JobStore, lineage: str, n: int) -> None:
    old = JobStore(store.storage, "job", lineage)
    if old.listing().newest_complete > n:
        raise Later


def restore(job: Job, base: Record, storage: CheckpointStorage | None = None) -> JobStore:
    store = JobStore(storage or job.storage, "job")
    old = store.newest_claim().lineage
    store.begin_lineage(base, lambda: refuse_later(store, old, base.checkpoint_id))
    return store


def test_r14_a_driver_that_put_its_record_unseen_by_a_restore_does_not_commit_it(job: Job) -> None:
    job.run(batches=1)
    base = base_of(job)
    storage = HookedStorage(job.storage, "put_if_absent", f"{1:020d}.", lambda: restore(job, base))
    with pytest.raises(Superseded, match="may not commit any more"):
        job.run(batches=2, storage=storage)
    assert job.visible() == Counter(ids(job.input[:1]))
    job.run()
    job.assert_exactly_once()


def test_r14_a_record_that_a_restore_has_not_seen_is_not_committed_by_who_loads_it(job: Job) -> None:
    """Found by docs/model with -DRESTORE=1 -DR14LOAD=0."""
    other = job.coordinator()
    other.process(job.query().batch(0, "other"))
    base = base_of(job)
    storage = HookedStorage(job.storage, "put_if_absent", f"{1:020d}.", lambda: restore(job, base))
    crashing = job.coordinator(storage=storage, listeners=[crash_at(Step.COMPLETE, 1)])
    with pytest.raises(CrashError):
        crashing.process(job.query().batch(1, "crashing"))
    with pytest.raises(Superseded):
        other.process(job.query().batch(2, "other"))
    assert job.visible() == Counter(ids(job.input[:1]))


def test_r14_an_operator_who_asks_amid_a_restore_commits_no_record_that_it_has_not_seen(job: Job) -> None:
    """The restore has looked; then a driver that was at its put decides checkpoint 1 and dies, and an operator asks."""
    job.run(batches=1)
    base = base_of(job)

    def operator_asks() -> None:
        driver.put()
        operator_decisions.ask(job.coordinator()._protocol)

    def restore_then_die() -> None:
        with pytest.raises(Superseded):
            restore(job, base, HookedStorage(job.storage, "put_if_absent", "restored/", operator_asks))
        crash()

    driver = CheckedThenPut(job.storage, "put_if_absent", f"{1:020d}.", restore_then_die)
    with pytest.raises(CrashError):
        job.run(batches=2, storage=driver)
    job.run()
    job.assert_exactly_once()


def test_r14_an_operator_who_asks_again_after_a_restore_commits_nothing_of_the_old_lineage(job: Job) -> None:
    job.run(batches=1)
    base = base_of(job)
    operator = job.coordinator()
    operator_decisions.ask(operator._protocol)
    storage = HookedStorage(job.storage, "put_if_absent", f"{1:020d}.", lambda: restore(job, base))
    with pytest.raises(Superseded):
        job.run(batches=2, storage=storage)
    operator_decisions.ask(operator._protocol)
    assert job.visible() == Counter(ids(job.input[:1]))
    job.run()
    job.assert_exactly_once()


def test_r14_a_restore_sees_the_record_of_a_driver_that_commits_it(job: Job) -> None:
    job.run(batches=1)
    base = base_of(job)
    job.run(batches=2)
    with pytest.raises(Later):
        restore(job, base)
    job.run()
    job.assert_exactly_once()


def test_a_driver_of_the_old_lineage_that_starts_during_a_restore_stops_it(job: Job) -> None:
    job.run(batches=1)
    base = base_of(job)
    old = JobStore(job.storage, "job").newest_claim().lineage
    hooked = HookedStorage(job.storage, "put_if_absent", "restored/checkpoint/", lambda: job.run(batches=2))
    with pytest.raises(Superseded, match="has started during the restore"):
        restore(job, base, hooked)
    assert JobStore(job.storage, "job").newest_claim().lineage == old
    with pytest.raises(Later):
        restore(job, base)
    job.run()
    job.assert_exactly_once()


def test_of_two_restores_at_once_the_later_one_wins(job: Job) -> None:
    """They do not fence each other without end, nor does the earlier one take over when the later one is done."""
    job.run(batches=1)
    base = base_of(job)

    def restore_too() -> None:
        restore(job, replace(base, lineage="later"))

    with pytest.raises(Superseded, match="has started during the restore"):
        restore(job, base, HookedStorage(job.storage, "put_if_absent", "restored/checkpoint/", restore_too))
    assert JobStore(job.storage, "job").newest_claim().lineage == "later"
    job.run()
    job.assert_exactly_once()


def test_a_restore_that_is_done_can_be_done_again(job: Job) -> None:
    job.run(batches=1)
    base = base_of(job)
    first = restore(job, base)
    assert first.newest_generation() == restore(job, base).newest_generation()
    assert newest_record(job.storage) == base
