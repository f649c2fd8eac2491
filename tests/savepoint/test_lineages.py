"""How a restore takes a job over from drivers of the lineage that it abandons."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator import Step
from coordinator.errors import Superseded
from coordinator.records import CheckpointStore, Record
from sinks.testing.conformance import ids
from tests.protocol.play import CrashError, HookedStorage, Job, crash_at


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def base_of(job: Job) -> Record:
    [record] = CheckpointStore(job.storage, "job").load_newest()
    return replace(record, lineage="restored", committables=(), restored_from="a savepoint")


class Later(Exception):
    pass


def refuse_later(store: CheckpointStore, lineage: str, n: int) -> None:
    old = CheckpointStore(store.storage, "job")
    old.lineage = lineage
    if old.newest_complete() > n:
        raise Later


def restore(job: Job, base: Record) -> CheckpointStore:
    store = CheckpointStore(job.storage, "job")
    old = store.current_lineage()
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


def test_r14_a_restore_sees_the_record_of_a_driver_that_commits_it(job: Job) -> None:
    job.run(batches=1)
    base = base_of(job)
    job.run(batches=2)
    with pytest.raises(Later):
        restore(job, base)
    job.run()
    job.assert_exactly_once()


def test_a_driver_of_the_old_lineage_that_starts_during_a_restore_makes_it_look_again(job: Job) -> None:
    job.run(batches=1)
    base = base_of(job)
    hooked = HookedStorage(job.storage, "put_if_absent", "restored/checkpoint/", lambda: job.run(batches=2))
    store = CheckpointStore(hooked, "job")
    old = store.current_lineage()
    with pytest.raises(Later):
        store.begin_lineage(base, lambda: refuse_later(store, old, 0))
    assert CheckpointStore(job.storage, "job").current_lineage() == old
    job.run()
    job.assert_exactly_once()


def test_a_restore_that_is_done_can_be_done_again(job: Job) -> None:
    job.run(batches=1)
    base = base_of(job)
    first = restore(job, base)
    assert first.newest_generation() == restore(job, base).newest_generation()
    assert CheckpointStore(job.storage, "job").load_newest() == (base,)
