"""A claim is known by its token, and not by its number alone: a storage that was emptied or set back gives the number
to another driver. And a start that is refused shuts nobody out."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from coordinator import CheckpointListener, Step, restore_savepoint
from coordinator.errors import CheckpointLocationMismatch, SavepointError, StorageBehind, Superseded, UnknownSink
from coordinator.operations import operator_decisions
from coordinator.operations.inspection.in_doubt_report import find_in_doubt
from coordinator.storage import CheckpointStorage
from coordinator.store.encoding import seal, unseal
from coordinator.store.job_store import JobStore
from examples.custom_sink import FileSink
from sinks.testing import LocalQuery
from tests.protocol.job import CrashError, HookedStorage, Job, Steps, crash_at, decided
from tests.protocol.test_memories import BATCHES, INPUT, World


class At(CheckpointListener):
    """Something happens at one step of a checkpoint, once."""

    def __init__(self, step: Step, checkpoint_id: int, happens: Callable[[], object]) -> None:
        self.moments, self.happens = [(step, checkpoint_id)], happens

    def on_step(self, step, checkpoint_id, facts) -> None:
        if (step, checkpoint_id) in self.moments:
            self.moments.clear()
            self.happens()


def put_back(storage: CheckpointStorage, values: dict[str, bytes]) -> None:
    for key in storage.list(""):
        storage.delete(key)
    for key, value in values.items():
        storage.put_if_absent(key, value)


def values_of(storage: CheckpointStorage) -> dict[str, bytes]:
    return {key: storage.get(key) or b"" for key in storage.list("")}


def next_driver_decides(job: Job, n: int) -> None:
    """It dies before it commits."""
    with pytest.raises(CrashError):
        job.run(listeners=[crash_at(Step.COMPLETE, n)])


@contextmanager
def the_next_start_finds_all(job: Job) -> Iterator[None]:
    """What was decided at the end of this block is committed, not written again."""
    yield
    assert len(decided(job)) == 3, "what the next driver has decided was rolled back"
    steps = Steps()
    job.run(listeners=[steps])
    assert Step.REPLAYING not in [step for step, _ in steps.seen]
    job.assert_exactly_once()


@pytest.mark.parametrize("step", [Step.PRE_COMMITTED, Step.VALIDATED])
def test_a_driver_whose_storage_was_emptied_aborts_nothing_of_the_next_one(job: Job, step: Step) -> None:
    """Both have generation 1, in two lineages. Neither its decision nor `close` touches what the next one has decided,
    and it puts no record into that one's storage."""

    def emptied() -> None:
        put_back(job.storage, {})
        next_driver_decides(job, 1)

    with the_next_start_finds_all(job):
        coordinator = job.coordinator(listeners=[At(step, 0, emptied)])
        with pytest.raises(Superseded, match="another driver of job 'job' has claimed generation 1"), coordinator:
            job.query().run(coordinator)
        assert sorted(key.rpartition("/")[2][:20] for key in job.storage.list("") if "/checkpoint/" in key) == [
            f"{n:020d}" for n in range(2)
        ]


def test_a_table_remembers_the_driver_of_a_storage_that_was_emptied(tmp_path: Path) -> None:
    """As above, where the target shows rows of the other lineage, so that the first driver raises before its decision.
    Seed `amid-abort` of the simulation."""
    world = World(tmp_path / "world")

    def emptied() -> None:
        shutil.rmtree(world.path("storage"))
        with pytest.raises(CrashError):
            world.start(listeners=[crash_at(Step.COMPLETE, 1)])

    with pytest.raises(Superseded, match="another driver of job 'job' has claimed generation 1"):
        world.start(listeners=[At(Step.PRE_COMMITTED, 0, emptied)])
    assert len(world.in_doubt()) == 3, "what the next driver has decided was rolled back"
    world.start()
    assert sorted(world.visible().elements()) == sorted(id for n in range(BATCHES) for id in _ids(n))


def _ids(n: int) -> list[int]:
    return [id for table in INPUT[n] for id in table["id"].to_pylist()]


def test_a_driver_whose_storage_was_set_back_shares_names_with_the_next_one(job: Job) -> None:
    """Both have generation 2 of one lineage, and their tasks the same numbers, so their transactions the same names.
    The older one leaves what it wrote to the sweep of the newer one."""
    job.run(batches=1)
    backup = values_of(job.storage)

    def set_back() -> None:
        put_back(job.storage, backup)
        next_driver_decides(job, 1)

    with the_next_start_finds_all(job):
        coordinator = job.coordinator(listeners=[At(Step.VALIDATED, 1, set_back)])
        with pytest.raises(Superseded, match=r"claimed generation 2.*was emptied or set back"), coordinator:
            job.query().run(coordinator)


def test_a_sweep_between_batches_knows_its_claim(job: Job) -> None:
    """Both have generation 2 of one lineage, and the older one sees no record of what the newer one has decided."""
    job.run(batches=1)
    backup = values_of(job.storage)
    coordinator = job.coordinator()
    job.query(2).run(coordinator)
    put_back(job.storage, backup)
    job.forget_commits(1)
    for file in job.sink.folder.glob("[!.]*.1.files-*"):
        file.unlink()  # the target was set back with it

    with the_next_start_finds_all(job):
        next_driver_decides(job, 1)
        with pytest.raises(Superseded, match="may not sweep any more"):
            coordinator._protocol.sweep()
        coordinator.close()


def test_who_was_told_of_another_storage_sweeps_no_more(tmp_path: Path) -> None:
    """A second job of this name, with a storage of its own, has rows in the target. The claim of the first job is where
    it was, but its storage does not tell what the second one has decided (R16). Whoever calls: the function for
    foreachBatch again, a sweep between batches, an operator, `close`."""
    world, other = World(tmp_path / "world"), World(tmp_path / "other")
    other.sink = world.sink  # type: ignore[method-assign]

    def second_job() -> None:
        with pytest.raises(CrashError):
            other.start(listeners=[crash_at(Step.COMPLETE, 1)])

    coordinator = world.coordinator([At(Step.PRE_COMMITTED, 0, second_job)])
    query = LocalQuery(world.path("query"), INPUT)
    with coordinator:
        with pytest.raises(StorageBehind, match="a second job of this name"):
            query.run(coordinator)
        coordinator._protocol._sweeper.make_due()
        coordinator._protocol.sweep()
        with pytest.raises(StorageBehind, match="a second job of this name"):
            coordinator.process(query.batch(0, str(coordinator._protocol.run_id)))
        coordinator._protocol.sweep()
        with pytest.raises(SavepointError, match="no complete checkpoint"):
            coordinator.trigger_savepoint(f"file://{tmp_path}/savepoints", str(world.path("query")))
        coordinator._protocol.sweep()
    assert len(world.in_doubt()) == 3, "what the second job has decided was rolled back"


def test_a_storage_that_is_back_at_its_place_lets_nobody_sweep_again(job: Job) -> None:
    """A driver that has missed its claim once cannot know what came between."""
    coordinator = job.coordinator()
    job.query(1).run(coordinator)
    values = values_of(job.storage)
    put_back(job.storage, {})
    coordinator._protocol.sweep()
    put_back(job.storage, values)
    next_driver_decides(job, 1)
    put_back(job.storage, values)
    coordinator.close()
    assert len(list(job.sink.in_doubt("job"))) == 3


def test_a_restore_notices_that_another_driver_has_its_number(job: Job) -> None:
    job.run(batches=2)
    savepoint = job.coordinator().trigger_savepoint(f"file://{job.folder}/savepoints", str(job.folder / "query"))

    def emptied() -> None:
        put_back(job.storage, {})
        for _ in range(3):
            JobStore(job.storage, "job").claim_generation()

    storage = HookedStorage(job.storage, "put_if_absent", "0001.000000", emptied)
    with pytest.raises(Superseded, match="has started during the restore"):
        restore_savepoint(savepoint.uri, str(job.folder / "restored"), storage=storage, allow_later_checkpoints=True)


def test_an_operator_behind_a_fence_knows_its_claim(job: Job) -> None:
    """`in-doubt abort --fence` takes what is in doubt for orphans, since no driver can decide it."""
    job.run(batches=1)
    backup, store = values_of(job.storage), JobStore(job.storage, "job")
    claimed = store.claim_generation()
    put_back(job.storage, backup)
    with pytest.raises(CrashError):
        job.run(listeners=[crash_at(Step.PRE_COMMITTED, 1)])
    with pytest.raises(Superseded, match=r"or storage .* was emptied or set back"):
        find_in_doubt(store, {"files": job.sink}, claimed)


def test_a_claim_of_version_0_2_has_no_token(job: Job) -> None:
    """An operator may ask while such a driver runs, and this version goes on after it."""
    with pytest.raises(CrashError):
        job.run(listeners=[crash_at(Step.COMPLETE, 1)])
    [key] = [key for key in job.storage.list("") if "/generation/" in key]
    claim = unseal(job.storage.get(key) or b"", key)
    assert claim["token"]
    job.storage.delete(key)
    job.storage.put_if_absent(key, seal({name: value for name, value in claim.items() if name != "token"}))
    complete, errors = operator_decisions.ask(job.coordinator()._protocol)
    assert complete
    assert (complete.hidden_participants(), errors) == ([], {})
    job.run()
    job.assert_exactly_once()


# ---------------------------------------------------------------------- a refused start
def test_a_driver_that_was_overtaken_before_its_first_call_leaves_the_other_one_alone(tmp_path: Path) -> None:
    """It was suspended when it had planned batch 0. Storage no longer has that checkpoint, so it was told that its
    checkpointLocation was restored from a backup. Seed `stale-start` of the simulation."""
    job = Job(tmp_path, batches=5)
    stale = job.query().batch(0, "suspended")
    healthy, query = job.coordinator(), job.query(4)
    query.run(healthy)
    with (
        job.coordinator() as coordinator,
        pytest.raises(Superseded, match=r"gone on from here: .* batch 0, and commits/"),
    ):
        coordinator.process(stale)
    assert JobStore(job.storage, "job").newest_generation() == 1
    query.input = job.input
    healthy.process(query.batch(4, str(healthy._protocol.run_id)))
    job.assert_exactly_once()


def test_the_end_of_an_old_batch_may_be_deleted_by_spark(tmp_path: Path) -> None:
    job = Job(tmp_path, batches=5)
    stale = job.query().batch(0, "suspended")
    job.run()
    for n in range(3):
        (job.folder / "query" / "commits" / str(n)).unlink()
    with pytest.raises(Superseded, match="batch 0, and commits/3 is in"):
        job.coordinator().process(stale)


def test_a_start_with_another_checkpoint_location_shuts_nobody_out(job: Job) -> None:
    """Somebody tries the job on a laptop, with the storage of production."""
    healthy, query = job.coordinator(), job.query(1)
    query.run(healthy)
    with pytest.raises(CheckpointLocationMismatch, match="was written by query"):
        LocalQuery(job.folder / "laptop", job.input).run(job.coordinator())
    with pytest.raises(UnknownSink):
        job.run(sink=FileSink(job.sink.folder, name="other"))
    query.input = job.input
    for n in (1, 2):
        healthy.process(query.batch(n, str(healthy._protocol.run_id)))
    job.assert_exactly_once()
