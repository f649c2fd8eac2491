"""R15: storage, checkpointLocation and the external system are set back, each by itself, to any moment of a job's life.
Whatever is restored: every row once, or the start is refused and has aborted nothing that was decided."""

from __future__ import annotations

import random
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import sqlalchemy as sa

from coordinator import (
    CheckpointConfig,
    CheckpointCoordinator,
    CheckpointError,
    CheckpointingMode,
    CheckpointListener,
    Step,
    restore_savepoint,
)
from coordinator.errors import (
    CheckpointGap,
    CheckpointLocationMismatch,
    CorruptRecord,
    ExternalSystemBehind,
    QueryNotAdopted,
    StorageBehind,
    Superseded,
)
from coordinator.operations import operator_decisions
from coordinator.operations.inspection.memory_comparison import compare_memories, set_back
from coordinator.storage import open_storage
from coordinator.store.job_store import JobStore
from examples.custom_sink import FileSink
from sinks import Checkpoint, Committable, TransactionContext
from sinks.audit import Audit, Holding, Part
from sinks.errors import TransactionBlocked
from sinks.optional import Validating
from sinks.sqlalchemy import SqlAlchemySink
from sinks.testing import Hooked, LocalBatch, LocalQuery
from sinks.testing.conformance import example_input, ids
from sinks.testing.local import Partitions
from tests.protocol.job import QUIET, fail

BATCHES = 4
INPUT = example_input(BATCHES)
KEPT = (Step.PRE_COMMITTED, Step.COMPLETE, Step.COMMITTED, Step.DONE)
PARTS = ("storage", "query", "db")


@dataclass
class World:
    """A job whose three memories are folders, so that a copy is a backup. SQLite is the external system."""

    folder: Path
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.path("db").mkdir(parents=True, exist_ok=True)

    def path(self, part: str) -> Path:
        return self.folder / part

    @property
    def url(self) -> str:
        return f"sqlite:///{self.path('db')}/shop.db"

    def sink(self) -> Any:
        return SqlAlchemySink(self.url, "orders", create_table=True)

    @property
    def storage(self) -> str:
        return f"file://{self.path('storage')}"

    def coordinator(self, listeners: Any = ()) -> CheckpointCoordinator:
        config = CheckpointConfig(**(QUIET | {"commit_timeout": 300} | dict(self.options)))
        return CheckpointCoordinator("job", [self.sink()], self.storage, config, listeners)

    def start(self, batches: int = BATCHES, listeners: Any = (), of: Sequence[Partitions] = INPUT) -> None:
        with self.coordinator(listeners) as coordinator:
            LocalQuery(self.path("query"), of[:batches]).run(coordinator)

    def save(self) -> str:
        """A savepoint of the stopped query."""
        with self.coordinator() as coordinator:
            return coordinator.trigger_savepoint(f"file://{self.folder}/savepoints", str(self.path("query"))).uri

    def restore_savepoint(self, uri: str, **options: Any) -> None:
        """In place of the checkpointLocation."""
        shutil.rmtree(self.path("query"))
        restore_savepoint(uri, str(self.path("query")), storage=self.storage, **options)

    def back_up(self, to: Path) -> Path:
        """Copy the three memories. No thread of a driver replaces a file meanwhile: it is `QUIET`."""
        for part in PARTS:
            if self.path(part).exists():
                shutil.copytree(self.path(part), to / part)
        return to

    def query(self, text: str) -> list[Any]:
        engine = sa.create_engine(self.url, poolclass=sa.NullPool)
        if not sa.inspect(engine).has_table("orders"):
            return []
        with engine.connect() as connection:
            return list(connection.execute(sa.text(text)))

    def visible(self) -> Counter[int]:
        return Counter(row[0] for row in self.query("SELECT id FROM orders"))

    def in_doubt(self) -> list[str]:
        return sorted(map(str, self.sink().in_doubt("job")))

    def restore(self, part: str, moment: Path | None) -> None:
        """Put what a backup holds in place of what is there; None: what was there is deleted."""
        shutil.rmtree(self.path(part), ignore_errors=True)
        if moment and (moment / part).exists():
            shutil.copytree(moment / part, self.path(part))
        self.path("db").mkdir(exist_ok=True)


class Files(World):
    """The same with a sink that remembers nothing by itself."""

    def sink(self) -> Any:
        return FileSink(self.path("db"))

    def visible(self) -> Counter[int]:
        files = self.path("db").glob("[!.]*.parquet")
        return Counter(id for file in files for id in pq.read_table(file)["id"].to_pylist())


class Backups(CheckpointListener):
    """A copy of the whole world at each step of each checkpoint."""

    def __init__(self, world: World, to: Path) -> None:
        self.world, self.to = world, to
        self.moments: dict[tuple[int, Step], Path] = {}

    def on_step(self, step: Step, checkpoint_id: int, facts: Mapping[str, Any]) -> None:
        if step in KEPT:
            moment = self.to / f"{checkpoint_id}-{step.name}"
            self.moments[checkpoint_id, step] = self.world.back_up(moment)


@pytest.fixture(scope="module")
def moments(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, Step], Path]:
    folder = tmp_path_factory.mktemp("moments")
    world = World(folder / "world")
    backups = Backups(world, folder / "backups")
    world.start(listeners=[backups])
    assert world.visible() == Counter(ids(INPUT))
    return backups.moments


@pytest.fixture(scope="module")
def eras(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of a job that was restored from a savepoint of checkpoint 1: by what was seen last."""
    folder = tmp_path_factory.mktemp("eras")
    world = World(folder / "world")
    world.start(1)
    eras = {"before the savepoint": world.back_up(folder / "eras" / "before")}
    world.start(2)
    uri = world.save()
    eras["saved"] = world.back_up(folder / "eras" / "saved")
    world.restore_savepoint(uri)
    eras["restored"] = world.back_up(folder / "eras" / "restored")
    backups = Backups(world, folder / "eras")
    world.start(listeners=[backups])
    assert world.visible() == Counter(ids(INPUT))
    return eras | {moment.name: moment for moment in backups.moments.values()}


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "world")


def put_together(world: World, **moments: Path | None) -> None:
    for part in PARTS:
        world.restore(part, moments[part])


def test_one_moment_in_all_three_goes_on(world: World, moments: dict[tuple[int, Step], Path]) -> None:
    for moment in moments.values():
        put_together(world, storage=moment, query=moment, db=moment)
        world.start()
        assert world.visible() == Counter(ids(INPUT)), moment.name
        assert world.in_doubt() == []


def combinations(seed: int, moments: int, count: int) -> Iterator[list[int]]:
    chance = random.Random(seed)
    for _ in range(count):
        yield [chance.randrange(-1, moments) for _ in PARTS]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.large) for seed in (1, 2, 3))])
@pytest.mark.parametrize("life", ["moments", "eras"])
def test_any_three_moments_are_right_or_refused(
    world: World, request: pytest.FixtureRequest, life: str, seed: int
) -> None:
    """-1 stands for a folder that was deleted."""
    ordered = list(request.getfixturevalue(life).values())
    for chosen in combinations(seed, len(ordered), 30):
        mixed = {part: None if n < 0 else ordered[n] for part, n in zip(PARTS, chosen, strict=True)}
        what = {part: moment.name if moment else "deleted" for part, moment in mixed.items()}
        put_together(world, **mixed)
        before, doubts = world.visible(), world.in_doubt()
        try:
            world.start()
        except (StorageBehind, CheckpointGap, QueryNotAdopted):
            assert world.visible() == before, f"{what}: refused, but something was committed"
            assert world.in_doubt() == doubts, f"{what}: refused, but something was aborted"
        except CheckpointError:
            assert world.visible() <= Counter(ids(INPUT)), f"{what}: refused, but rows were doubled"
            assert before <= world.visible(), f"{what}: refused, but rows were lost"
        else:
            assert world.visible() == Counter(ids(INPUT)), what


# ---------------------------------------------------------------------- each as it was met
def test_both_folders_older_than_the_database(world: World, moments: dict[tuple[int, Step], Path]) -> None:
    old, new = moments[1, Step.DONE], moments[3, Step.DONE]
    put_together(world, storage=old, query=old, db=new)
    before = world.visible()
    with pytest.raises(StorageBehind, match=r"sink 'orders' has rows .* up to checkpoint 3, .* has none after 1"):
        world.start()
    assert world.visible() == before


def test_storage_older_by_one_record(world: World, moments: dict[tuple[int, Step], Path]) -> None:
    put_together(world, storage=moments[1, Step.DONE], query=moments[2, Step.COMMITTED], db=moments[2, Step.COMMITTED])
    with pytest.raises(StorageBehind, match="older by 1 checkpoint"):
        world.start()


def test_both_folders_deleted(world: World, moments: dict[tuple[int, Step], Path]) -> None:
    put_together(world, storage=None, query=None, db=moments[2, Step.COMPLETE])
    doubts = world.in_doubt()
    assert doubts
    with pytest.raises(StorageBehind, match=r"holds none of it.* was deleted"):
        world.start()
    assert world.in_doubt() == doubts, "what may be decided was aborted"


def test_the_database_set_back_to_what_an_older_record_decides(
    world: World, moments: dict[tuple[int, Step], Path]
) -> None:
    """Its rows are staged again, and those of the checkpoints after it are gone."""
    put_together(world, storage=moments[3, Step.DONE], query=moments[3, Step.DONE], db=moments[1, Step.COMPLETE])
    doubts = world.in_doubt()
    with pytest.raises(ExternalSystemBehind, match="ends with checkpoint 0, but checkpoint 2"):
        world.start()
    assert world.in_doubt() == doubts, "decided transactions were aborted"


def test_the_database_set_back_by_one_checkpoint_that_is_still_in_doubt(
    world: World, moments: dict[tuple[int, Step], Path]
) -> None:
    """An older record names it: it is committed, and the lost one after it is written again."""
    put_together(
        world, storage=moments[2, Step.COMPLETE], query=moments[2, Step.COMPLETE], db=moments[1, Step.COMPLETE]
    )
    world.start()
    assert world.visible() == Counter(ids(INPUT))


def test_what_an_older_record_decides_is_asked_for_again(
    world: World, moments: dict[tuple[int, Step], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A system that does not answer for a moment has lost nothing."""
    put_together(
        world, storage=moments[2, Step.COMPLETE], query=moments[2, Step.COMPLETE], db=moments[1, Step.COMPLETE]
    )
    sink = Hooked(world.sink(), "commit_all", hook=fail)
    monkeypatch.setattr(world, "sink", lambda: sink)
    world.start()
    assert world.visible() == Counter(ids(INPUT))


@pytest.mark.parametrize("mode", CheckpointingMode)
def test_a_refused_start_aborts_nothing(tmp_path: Path, mode: CheckpointingMode) -> None:
    """Spark is ahead of storage, and what storage lacks is in doubt, in a system without a memory."""
    world = Files(tmp_path / "world")
    backups = Backups(world, tmp_path / "backups")
    world.start(listeners=[backups])
    world.options = {"mode": mode}
    old, new = backups.moments[0, Step.DONE], backups.moments[2, Step.COMPLETE]
    put_together(world, storage=old, query=new, db=new)
    doubts = world.in_doubt()
    assert doubts
    with pytest.raises(CheckpointGap):
        world.start()
    assert world.in_doubt() == doubts


@pytest.mark.parametrize("ended", [False, True], ids=["before it claims", "when it has claimed"])
def test_a_refused_start_aborts_nothing_that_a_start_before_knew(tmp_path: Path, ended: bool) -> None:
    """The same object had a good start before all was restored. If that query has `ended`, the next start claims a
    generation before it is refused, so that it could sweep."""
    world = Files(tmp_path / "world")
    backups = Backups(world, tmp_path / "backups")
    world.start(listeners=[backups])
    old, new = backups.moments[0, Step.DONE], backups.moments[2, Step.COMPLETE]
    put_together(world, storage=old, query=old, db=old)
    with world.coordinator() as coordinator:
        LocalQuery(world.path("query"), INPUT[:1]).run(coordinator)
        put_together(world, storage=old, query=new, db=new)
        if ended:
            store = JobStore(open_storage(world.storage), coordinator.job)
            claim = store.newest_claim()
            store.journal.give_heartbeat(claim.generation, 10_000, 0.0, ended="the query was stopped")
        doubts = world.in_doubt()
        with pytest.raises(CheckpointGap):
            LocalQuery(world.path("query"), INPUT).run(coordinator)
    assert doubts
    assert world.in_doubt() == doubts


def test_an_emptied_database(world: World, moments: dict[tuple[int, Step], Path]) -> None:
    put_together(world, storage=moments[3, Step.DONE], query=moments[3, Step.DONE], db=None)
    with pytest.raises(CheckpointError):
        world.start()
    assert world.visible() == Counter()


def test_adopting_where_the_database_remembers(world: World, moments: dict[tuple[int, Step], Path]) -> None:
    """The storage is gone for good, the checkpointLocation is not: adopt=True goes on if nothing would be doubled."""
    world.options = {"adopt": True}
    put_together(world, storage=None, query=moments[1, Step.DONE], db=moments[2, Step.DONE])
    with pytest.raises(StorageBehind):
        world.start()
    put_together(world, storage=None, query=moments[2, Step.DONE], db=moments[2, Step.COMMITTED])
    with pytest.raises((StorageBehind, CheckpointGap)):
        world.start()


class LoseOne(CheckpointListener):
    """A participant of checkpoint 1 is aborted after its decision, by somebody else, so that it is written again."""

    def __init__(self, world: World) -> None:
        self.world = world

    def on_step(self, step: Step, checkpoint_id: int, facts: Mapping[str, Any]) -> None:
        if (step, checkpoint_id) == (Step.COMPLETE, 1):
            sink = self.world.sink()
            sink.abort(next(iter(sink.in_doubt("job"))))


@pytest.mark.parametrize("batches", [2, 3])
def test_storage_of_before_a_replay(world: World, batches: int) -> None:
    """Spark, which has moved on from the checkpoint, is not to be set back for its rows. Going on without writing them
    is right: they are there."""
    world.start(2, [LoseOne(world)])
    [record] = world.path("storage").rglob("*.000001")
    record.unlink()
    if batches == 2:
        (world.path("query") / "commits" / "1").unlink()
    with pytest.raises(StorageBehind, match=r"lost transactions \(orders/0\).* that no record names \(tpc") as refused:
        world.start(batches)
    assert "delete commits" not in str(refused.value)
    assert world.visible() == Counter(ids(INPUT[:2]))
    with world.coordinator() as coordinator:
        operator_decisions.accept_loss(coordinator._protocol, [("orders", 0)], who="me", why="its rows are there")
    world.start()
    assert world.visible() == Counter(ids(INPUT))


class BlockedInAReplay(SqlAlchemySink):
    """Once, by another driver."""

    other: list[Callable[[], None]] = []  # noqa: RUF012 - shared by the copies that tasks get

    def begin_transaction(self, context: TransactionContext) -> Any:
        if self.other and "r1" in context.attempt:
            self.other.pop()()
            raise TransactionBlocked("lock timeout: another transaction holds the row")
        return super().begin_transaction(context)


def test_another_driver_replays_while_a_task_waits_for_its_lock(world: World, tmp_path: Path) -> None:
    """It has a copy of the storage, and so no driver is superseded."""
    other, sink = World(tmp_path / "other"), BlockedInAReplay(world.url, "orders", create_table=True)
    other.sink = world.sink  # type: ignore[method-assign]
    world.sink = lambda: sink  # type: ignore[method-assign]

    def replay() -> None:
        for part in ("storage", "query"):
            shutil.copytree(world.path(part), other.path(part))
        other.start(2)

    BlockedInAReplay.other.append(replay)
    with pytest.raises(StorageBehind, match="that no record names"):
        world.start(2, [LoseOne(world)])
    assert world.visible() == Counter(ids(INPUT[:2]))


# ---------------------------------------------------------------------- before and after a restored savepoint
def test_the_checkpoint_location_of_before_a_restore(world: World) -> None:
    """It has the query's id, and asks for the next batch too; but its input was planned in other batches."""
    world.start(2)
    uri = world.save()
    old = world.back_up(world.folder / "old")
    (old / "query/offsets/2").write_text('v1\n{}\n{"end":7}')
    (old / "query/commits/2").touch()
    world.restore_savepoint(uri)
    world.start(3)
    world.restore("query", old)
    with pytest.raises(CheckpointLocationMismatch, match=r'other offsets: {"end":2}; Spark now reads {"end":7}'):
        world.start()
    assert world.visible() == Counter(ids(INPUT[:3]))


def test_storage_of_before_a_restore(world: World, eras: dict[str, Path]) -> None:
    """Its checkpointLocation is of then, too; the database has rows of the lineage after it."""
    put_together(world, storage=eras["saved"], query=eras["saved"], db=eras["3-DONE"])
    before = world.visible()
    with pytest.raises(StorageBehind, match=r"lineage \w+ up to checkpoint 3, and .* holds none of it"):
        world.start()
    assert world.visible() == before


def test_the_database_of_before_a_savepoint_that_was_restored(world: World, eras: dict[str, Path]) -> None:
    """Nothing of the new lineage is visible yet, so no record of it names what is gone."""
    put_together(world, storage=eras["restored"], query=eras["restored"], db=eras["before the savepoint"])
    with pytest.raises(
        ExternalSystemBehind, match=r"of checkpoint 1, but .* ends with checkpoint 0 of the earlier lineage"
    ):
        world.start()
    assert world.visible() == Counter(ids(INPUT[:1]))


def test_the_database_of_before_a_savepoint_that_was_restored_although_there_were_later_checkpoints(
    world: World, eras: dict[str, Path]
) -> None:
    """Rows of the later ones are gone from it, and one checkpoint too many. Another job has no such rows."""
    put_together(world, storage=eras["saved"], query=eras["saved"], db=eras["saved"])
    uri = world.save()
    world.start()
    world.restore("db", eras["before the savepoint"])
    world.restore_savepoint(uri, allow_later_checkpoints=True)
    with world.coordinator() as coordinator:
        [told] = set_back(coordinator._protocol.store, coordinator.sinks)
    assert "its newest checkpoint is 0, older than the savepoint that was restored" in told
    with pytest.raises(
        ExternalSystemBehind, match=r"of checkpoint 1, but .* ends with checkpoint 0 of the earlier lineage"
    ):
        world.start()
    assert world.visible() == Counter(ids(INPUT[:1]))


def test_a_backup_that_is_put_over_what_refused_starts_have_left(world: World, tmp_path: Path) -> None:
    """Where they have left claims, as those of version 0.2 and commands do, these are newer. In their place it is
    right."""
    world.start(2)
    backup = world.back_up(tmp_path / "backup")
    shutil.rmtree(world.path("storage"))
    for _ in range(3):
        with pytest.raises(StorageBehind, match="holds none of it"):
            world.start()
        JobStore(open_storage(world.storage), "job").claim_generation()
    shutil.copytree(backup / "storage", world.path("storage"), dirs_exist_ok=True)
    with pytest.raises(StorageBehind):
        world.start()
    world.restore("storage", backup)
    world.start()
    assert world.visible() == Counter(ids(INPUT))


def test_a_savepoint_restored_elsewhere_while_the_older_job_went_on(world: World) -> None:
    """In a storage that shows no later checkpoints; the database does, until they are removed."""
    world.start(2)
    uri = world.save()
    world.start(3)
    shutil.rmtree(world.path("storage"))
    world.restore_savepoint(uri)
    with pytest.raises(StorageBehind, match=r"up to checkpoint 2, and .* has none after 1.*began with a savepoint"):
        world.start()
    with pytest.raises(CorruptRecord, match=r"another base .* with the same options .* or into an empty"):
        restore_savepoint(uri, str(world.path("query")), storage=world.storage, allow_later_checkpoints=True)
    world.restore_savepoint(uri, allow_later_checkpoints=True)
    world.start()
    assert world.visible() == Counter(ids(INPUT)) + Counter(ids(INPUT[2:3])), "the operator said that they may be twice"
    world.start()


def test_two_jobs_of_one_name_in_two_storages(world: World, tmp_path: Path) -> None:
    """The second one begins while the first writes its first checkpoint, which notices before it decides."""

    class Second(CheckpointListener):
        def on_step(self, step: Step, checkpoint_id: int, facts: Mapping[str, Any]) -> None:
            if (step, checkpoint_id) == (Step.TRIGGERED, 0):
                other = World(tmp_path / "other")
                other.sink = world.sink  # type: ignore[method-assign]
                other.start(3)

    with pytest.raises(StorageBehind, match="a second job of this name"):
        world.start(listeners=[Second()])
    assert world.visible() == Counter(ids(INPUT[:3]))


class LaterTasks(LocalQuery):
    """Its task attempts have other numbers, as those of another Spark application: no name comes twice."""

    def batch(self, n: int, run_id: str) -> LocalBatch:
        batch = super().batch(n, run_id)
        batch._attempts = 100
        return batch


class Unaudited(SqlAlchemySink):
    """It remembers checkpoints, and cannot tell one's transactions."""

    def audit(self, job: str, parts: Sequence[Part], *, quick: bool = False) -> Audit:
        return Audit([Holding() for _ in parts])


@pytest.mark.parametrize(
    ("step", "kind"),
    [
        *((step, SqlAlchemySink) for step in (Step.TRIGGERED, Step.PRE_COMMITTED, Step.VALIDATED, Step.COMMITTED)),
        *((Step.COMPLETE, kind) for kind in (SqlAlchemySink, Unaudited)),
    ],
)
def test_copies_of_storage_and_location_that_run_at_once(
    world: World, tmp_path: Path, step: Step, kind: type[SqlAlchemySink]
) -> None:
    """Each takes what the other has pre-committed for orphans; what is rolled back was written by the other one."""
    world.sink = lambda: kind(world.url, "orders", create_table=True)  # type: ignore[method-assign]
    world.start(2)
    copy = World(tmp_path / "copy")
    for part in ("storage", "query"):
        copy.restore(part, world.folder)
    copy.sink = world.sink  # type: ignore[method-assign]
    told: list[CheckpointError] = []

    def start(query: LocalQuery, of: World, *listeners: CheckpointListener) -> None:
        try:
            with of.coordinator(listeners) as coordinator:
                query.run(coordinator)
        except StorageBehind as error:
            told.append(error)

    class Copy(CheckpointListener):
        def on_step(self, at: Step, checkpoint_id: int, facts: Mapping[str, Any]) -> None:
            if (at, checkpoint_id) == (step, 2):
                start(LaterTasks(copy.path("query"), INPUT), copy)

    start(LocalQuery(world.path("query"), INPUT), world, Copy())
    assert len(told) == 1
    assert "with a copy of" in str(told[0]) or step is Step.COMMITTED
    assert (world.visible(), world.in_doubt()) == (Counter(ids(INPUT)), [])


def test_a_driver_of_before_a_restore_is_superseded(world: World) -> None:
    """The restored job is done when the older one comes to its decision."""
    world.start(2)
    uri, there = world.save(), world.folder / "restored"

    class Restore(CheckpointListener):
        def on_step(self, step: Step, checkpoint_id: int, facts: Mapping[str, Any]) -> None:
            if (step, checkpoint_id) == (Step.TRIGGERED, 2):
                restore_savepoint(uri, str(there), storage=world.storage)
                with world.coordinator() as coordinator:
                    LocalQuery(there, INPUT).run(coordinator)

    with pytest.raises(Superseded):
        world.start(listeners=[Restore()])
    assert world.visible() == Counter(ids(INPUT))


# ---------------------------------------------------------------------- while the query runs
class SetBack(CheckpointListener):
    """The database fails over to a replica that lagged behind, between two batches."""

    def __init__(self, world: World, moment: Path, after: int, step: Step = Step.DONE) -> None:
        self.world, self.moment, self.when = world, moment, (step, after)

    def on_step(self, step: Step, checkpoint_id: int, facts: Mapping[str, Any]) -> None:
        if (step, checkpoint_id) == self.when:
            with (
                closing(sqlite3.connect(self.moment / "db" / "shop.db")) as old,
                closing(sqlite3.connect(self.world.path("db") / "shop.db")) as live,
            ):
                old.backup(live)


def test_the_database_set_back_while_the_query_runs(world: World, moments: dict[tuple[int, Step], Path]) -> None:
    old = moments[0, Step.DONE]
    put_together(world, storage=old, query=old, db=old)
    with pytest.raises(ExternalSystemBehind, match="ends with checkpoint 0, but checkpoint 1 was complete and visible"):
        world.start(listeners=[SetBack(world, old, after=1)])
    assert world.visible() == Counter(ids(INPUT[:1]))


def test_the_database_set_back_during_the_first_batch_of_a_start(
    world: World, moments: dict[tuple[int, Step], Path]
) -> None:
    """What an earlier run has made visible counts too."""
    old, new = moments[0, Step.DONE], moments[1, Step.DONE]
    put_together(world, storage=new, query=new, db=new)
    with pytest.raises(ExternalSystemBehind, match="ends with checkpoint 0, but checkpoint 1 was complete and visible"):
        world.start(listeners=[SetBack(world, old, after=2, step=Step.TRIGGERED)])
    assert world.visible() == Counter(ids(INPUT[:1]))


SELDOM = [batch if n in (0, 1, 7) else [rows.slice(0, 0) for rows in batch] for n, batch in enumerate(example_input(8))]
"""The records of the batches with rows are gone long before the next one has some."""


def test_a_database_without_rows_whose_record_is_gone(world: World) -> None:
    world.start(1, of=SELDOM)
    old = world.back_up(world.folder / "old")
    world.start(6, of=SELDOM)
    world.restore("db", old)
    with pytest.raises(ExternalSystemBehind, match=r"checkpoint 0, but checkpoint 1 .* with rows of this sink"):
        world.start(8, of=SELDOM)
    assert world.visible() == Counter(ids(SELDOM[:1]))


def test_a_database_set_back_between_two_batches_without_rows(world: World) -> None:
    world.start(1, of=SELDOM)
    old = world.back_up(world.folder / "old")
    world.start(5, of=SELDOM)
    with pytest.raises(ExternalSystemBehind, match="ends with checkpoint 0, but checkpoint 1 "):
        world.start(8, [SetBack(world, old, after=5)], SELDOM)
    assert world.visible() == Counter(ids(SELDOM[:1]))


def test_rows_that_come_seldom_are_in_place(world: World) -> None:
    for batches in range(1, 9):
        world.start(batches, of=SELDOM)
    assert (world.visible(), world.in_doubt()) == (Counter(ids(SELDOM)), [])


def test_a_database_of_before_a_savepoint_without_rows(world: World) -> None:
    world.start(1, of=SELDOM)
    old = world.back_up(world.folder / "old")
    world.start(3, of=SELDOM)
    world.restore_savepoint(world.save())
    world.restore_savepoint(world.save())
    world.restore("db", old)
    with pytest.raises(ExternalSystemBehind, match=r"savepoint .* ends with checkpoint 0 of the earlier lineage"):
        world.start(8, of=SELDOM)


class Meanwhile(CheckpointListener):
    """Something happens to the storage when checkpoint 2 is about to be decided, or at another step of it."""

    def __init__(self, happens: Callable[[], object], at: Step = Step.VALIDATED) -> None:
        self.happens, self.at = happens, at

    def on_step(self, step: Step, checkpoint_id: int, facts: Mapping[str, Any]) -> None:
        if (step, checkpoint_id) == (self.at, 2):
            self.happens()


def records_in(world: World) -> list[Path]:
    return list(world.path("storage").glob("*/*/checkpoint/*"))


def test_storage_that_is_moved_away_under_a_driver_stops_it_before_it_decides(tmp_path: Path) -> None:
    world = Files(tmp_path / "world")
    away = tmp_path / "away"
    with pytest.raises(StorageBehind, match=r"claim of this driver \(generation 1\) is no longer in .*moved away"):
        world.start(listeners=[Meanwhile(lambda: world.path("storage").rename(away))])
    assert records_in(world) == [], "a record went into a storage that knows nothing of the job"
    assert (world.visible(), world.in_doubt()) == (Counter(ids(INPUT[:2])), [])
    shutil.rmtree(world.path("storage"), ignore_errors=True)
    away.rename(world.path("storage"))
    world.start()
    assert world.visible() == Counter(ids(INPUT))


def test_storage_that_is_moved_away_before_a_batch_is_tried_again(tmp_path: Path) -> None:
    """Also where the sink remembers nothing: the advice for a batch that comes too late would write all rows twice."""
    storage = tmp_path / "storage"

    class Failing(FileSink, Validating[Any]):
        def validate_all(self, checkpoint: Checkpoint, committables: Sequence[Committable]) -> None:
            if checkpoint.checkpoint_id == 1:
                storage.rename(tmp_path / "away")
                raise OSError("not today")

        def committed_checkpoints(self, job: str) -> Mapping[str, int] | None:
            return None

    (tmp_path / "rows").mkdir()
    config = CheckpointConfig(tolerable_failed_checkpoints=2)
    coordinator = CheckpointCoordinator("job", [Failing(tmp_path / "rows")], storage.as_uri(), config)
    with pytest.raises(StorageBehind, match=r"claim of this driver \(generation 1\) is no longer in"), coordinator:
        LocalQuery(tmp_path / "query", INPUT).run(coordinator)


def test_another_driver_on_an_emptied_storage_has_the_same_number(tmp_path: Path) -> None:
    """R14: the older driver tells by the token that the claim is not its own."""
    world, other = Files(tmp_path / "world"), Files(tmp_path / "other")

    def begin_anew() -> None:
        shutil.rmtree(world.path("storage"))
        with CheckpointCoordinator("job", [other.sink()], world.storage) as coordinator:
            LocalQuery(other.path("query"), INPUT[:1]).run(coordinator)

    with pytest.raises(Superseded, match=r"another driver of job 'job' has claimed generation 1, .* may not complete"):
        world.start(listeners=[Meanwhile(begin_anew)])
    assert (world.visible(), world.in_doubt()) == (Counter(ids(INPUT[:2])), [])


def test_storage_that_is_set_back_under_a_driver_stops_it_before_it_commits(tmp_path: Path) -> None:
    """What it decides last is whole, so that the next start goes on from there."""
    world = Files(tmp_path / "world")
    backups = Backups(world, tmp_path / "backups")
    set_back = Meanwhile(lambda: world.restore("storage", backups.moments[0, Step.DONE]))
    with pytest.raises(StorageBehind, match="the record of checkpoint 1 is no longer in"):
        world.start(listeners=[backups, set_back])
    assert world.visible() == Counter(ids(INPUT[:2]))
    world.start()
    assert (world.visible(), world.in_doubt()) == (Counter(ids(INPUT)), [])


def test_a_record_that_a_failover_of_its_storage_has_lost_is_missed_before_the_first_commit(tmp_path: Path) -> None:
    """The target would have what no record tells of, and no start would go on."""
    world = Files(tmp_path / "world")
    backups = Backups(world, tmp_path / "backups")
    fail_over = Meanwhile(lambda: world.restore("storage", backups.moments[1, Step.DONE]), Step.COMPLETE)
    with pytest.raises(StorageBehind, match="the record of checkpoint 2 is no longer in"):
        world.start(listeners=[backups, fail_over])
    assert world.visible() == Counter(ids(INPUT[:2]))
    world.start()
    assert (world.visible(), world.in_doubt()) == (Counter(ids(INPUT)), [])


def test_storage_and_database_set_back_together_just_before_a_decision(world: World) -> None:
    """As by a failover of a server that has both. The record that goes into the older storage tells what it follows."""
    backups = Backups(world, world.folder / "backups")

    def set_back() -> None:
        for part in ("storage", "db"):
            world.restore(part, backups.moments[0, Step.DONE])

    with pytest.raises(StorageBehind, match="the record of checkpoint 1 is no longer in"):
        world.start(listeners=[backups, Meanwhile(set_back)])
    with pytest.raises(ExternalSystemBehind, match="ends with checkpoint 0, but checkpoint 1 "):
        world.start()
    assert world.visible() == Counter(ids(INPUT[:1]))


def test_what_is_decided_becomes_visible_though_its_storage_is_gone(tmp_path: Path) -> None:
    """The sweep between two tries to commit decides nothing."""
    world = Files(tmp_path / "world")

    class Commits(FileSink):
        def commit(self, committable: Any) -> Any:
            if world.path("storage").exists() and committable.transaction["file"].split(".")[3] == "2":
                shutil.rmtree(world.path("storage"))
                raise ConnectionError("not now")
            return super().commit(committable)

    world.sink = lambda: Commits(world.path("db"))  # type: ignore[method-assign]
    with pytest.raises(StorageBehind, match="may not complete any more"):
        world.start()
    assert (world.visible(), world.in_doubt()) == (Counter(ids(INPUT[:3])), [])


class FailsOver(CheckpointListener):
    """To a replica that has missed all since checkpoint 1 was decided; between two batches, unless `step` is another
    one."""

    def __init__(self, world: World, after: int, step: Step = Step.DONE) -> None:
        self.world, self.when = world, (step, after)
        self.replica = sqlite3.connect(":memory:", check_same_thread=False)

    def on_step(self, step: Step, checkpoint_id: int, facts: Mapping[str, Any]) -> None:
        with closing(sqlite3.connect(self.world.path("db") / "shop.db")) as live:
            if (step, checkpoint_id) == (Step.COMPLETE, 1):
                live.backup(self.replica)
            if (step, checkpoint_id) == self.when:
                with closing(self.replica):
                    self.replica.backup(live)


def test_a_failover_that_lost_the_newest_commit_is_mended_while_the_query_runs(world: World) -> None:
    """Its rows are staged again, as a restart would find them."""
    world.start(listeners=[FailsOver(world, after=1)])
    assert world.visible() == Counter(ids(INPUT))


def test_a_failover_that_lost_more_than_commits_stops_the_query(world: World) -> None:
    with pytest.raises(ExternalSystemBehind, match="ends with checkpoint 0, but checkpoint 2 was complete and visible"):
        world.start(listeners=[FailsOver(world, after=2)])


def test_a_failover_between_decision_and_commit_is_mended_in_order(world: World) -> None:
    """The newest transactions are written again only when those of the checkpoint before are visible again."""
    world.start(3, [FailsOver(world, after=2, step=Step.COMPLETE)])
    assert (world.visible(), world.in_doubt()) == (Counter(ids(INPUT[:3])), [])


def test_the_database_set_back_between_decision_and_commit(world: World, moments: dict[tuple[int, Step], Path]) -> None:
    old = moments[0, Step.DONE]
    put_together(world, storage=old, query=old, db=old)
    with pytest.raises(ExternalSystemBehind, match="ends with checkpoint 0, but checkpoint 1 was complete and visible"):
        world.start(listeners=[SetBack(world, old, after=2, step=Step.COMPLETE)])
    assert world.visible() == Counter(ids(INPUT[:1]))


def test_a_driver_that_was_suspended_amid_its_start_is_superseded(world: World) -> None:
    """Between its looks at the system and at storage, while another driver went on: nothing was set back."""
    world.start(1)

    class Suspended(SqlAlchemySink):
        def committed_checkpoints(self, job: str) -> Mapping[str, int]:
            answer = super().committed_checkpoints(job)
            if world.visible() != Counter(ids(INPUT)):
                world.start()
            return answer

    sink = Suspended(world.url, "orders")
    coordinator = CheckpointCoordinator("job", [sink], world.storage)
    with coordinator, pytest.raises(Superseded, match=r"has gone on from here: .* batch 1, and commits/"):
        LocalQuery(world.path("query"), INPUT).run(coordinator)
    assert world.visible() == Counter(ids(INPUT))


def test_nothing_was_set_back_when_a_driver_goes_on_between_two_looks(world: World) -> None:
    """Of an operator, at a sink, at the checkpointLocation and at storage."""
    world.start(1)

    class Asked(SqlAlchemySink):
        def committed_checkpoints(self, job: str) -> Mapping[str, int]:
            answer = super().committed_checkpoints(job)
            world.start()
            return answer

    store, location = JobStore(open_storage(world.storage), "job"), str(world.path("query"))
    seen = list(compare_memories(store, {"orders": Asked(world.url, "orders")}, location))
    assert [(memory.name, memory.newest) for memory in seen if memory.agrees] == [
        ("storage", 3),
        ("checkpointLocation", 3),
        ("sink orders", 0),
    ]


def test_a_sweep_spares_what_an_older_record_decides(tmp_path: Path) -> None:
    """The system is set back while the query runs, and has in doubt again what was committed."""
    world = Files(tmp_path / "world", {"sweep_interval": 0.001})
    backups = Backups(world, tmp_path / "backups")

    class SetBackFiles(CheckpointListener):
        def on_step(self, step: Step, checkpoint_id: int, facts: Mapping[str, Any]) -> None:
            if (step, checkpoint_id) == (Step.DONE, 2):
                world.restore("db", backups.moments[1, Step.COMPLETE])
                self.doubts = world.in_doubt()

    set_back = SetBackFiles()
    world.start(listeners=[backups, set_back])
    assert set_back.doubts
    assert world.in_doubt() == set_back.doubts
