"""Random histories of drivers that crash anywhere, zombies that come back, and operators that roll back decided
transactions, against the real coordinator. What is checked after each step is what the model checker checks: no row is
visible twice, only decided rows are visible, and in the end every row is visible once and nothing is in doubt."""

from __future__ import annotations

import re
import shutil
import tempfile
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from coordinator import CheckpointConfig, CheckpointCoordinator, CheckpointListener
from coordinator.errors import CheckpointError
from coordinator.storage import CheckpointStorage, open_storage
from coordinator.storage.base import WrappedStorage
from coordinator.store.job_store import JobStore
from sinks import Checkpoint, CommitOutcome, Committable, Identity, TransactionContext, TwoPhaseCommitSink
from sinks.errors import CommittedError
from sinks.testing import LocalQuery, rows
from sinks.transaction import TransactionId, token
from tests.protocol.job import TestClock

BATCHES = 4


class CrashError(BaseException):
    pass


class World:
    """An external system that keeps every transaction it was ever given, and the moments at which something happens."""

    def __init__(self) -> None:
        self.transactions: dict[str, tuple[str, list[int]]] = {}  # name -> state, ids
        self.agenda: list[tuple[int, Callable[[], None]]] = []
        self.crashed = False
        self.begun: dict[str, list[int]] = {}
        self.unreachable = 0  # commits that fail before the next one gets through
        self.fault = ""  # what the next put of a record does
        self.violations: list[str] = []  # decided transactions that the library aborted
        self.named: Callable[[], set[str]] = set

    def tick(self) -> None:
        """Every step of a driver, call of a sink and call of storage comes by here."""
        if self.crashed:
            raise CrashError
        if self.agenda:
            left, action = self.agenda.pop()
            if left:
                self.agenda.append((left - 1, action))
            else:
                action()

    def crash(self) -> None:
        self.crashed = True
        raise CrashError

    def names(self, state: str) -> list[str]:
        return sorted(name for name, (at, _) in self.transactions.items() if at == state)

    def visible(self) -> Counter[int]:
        return Counter(id for state, ids in self.transactions.values() if state == "committed" for id in ids)


WORLDS: dict[str, World] = {}


class WorldSink(TwoPhaseCommitSink[tuple[str, list[int]]]):
    """Commits participant by participant, or (`atomic`) a checkpoint as a whole, holding siblings of a lost one."""

    def __init__(self, world: str, atomic: bool) -> None:
        super().__init__(name="world")
        self.key, self.atomic = world, atomic

    @property
    def world(self) -> World:
        return WORLDS[self.key]

    def begin_transaction(self, context: TransactionContext) -> tuple[str, list[int]]:
        self.world.tick()
        assert context.transaction_id not in self.world.transactions, "a name was used twice"
        return context.transaction_id, []

    def write(self, transaction: tuple[str, list[int]], batch: pa.RecordBatch) -> None:
        transaction[1].extend(batch["id"].to_pylist())

    def pre_commit(self, transaction: tuple[str, list[int]]) -> Identity:
        self.world.tick()
        self.world.transactions[transaction[0]] = ("prepared", transaction[1])
        self.world.tick()
        return {"name": transaction[0]}

    def rollback(self, transaction: tuple[str, list[int]]) -> None:
        pass

    def commit(self, committable: Committable) -> CommitOutcome:
        self.world.tick()
        name = committable.transaction["name"]
        state, ids = self.world.transactions[name]
        if state == "aborted":
            return CommitOutcome.lost("rolled back")
        self.world.transactions[name] = ("committed", ids)
        return CommitOutcome.COMMITTED

    def commit_all(
        self, checkpoint: Checkpoint, committables: Sequence[Committable]
    ) -> Sequence[CommitOutcome | Exception]:
        if self.atomic and any(self.world.transactions[c.transaction["name"]][0] == "aborted" for c in committables):
            self.world.tick()
            states = [self.world.transactions[c.transaction["name"]][0] for c in committables]
            assert "committed" not in states, "an atomic checkpoint was torn"
            return [CommitOutcome.lost("rolled back") if s == "aborted" else CommitOutcome.HELD for s in states]
        if self.atomic:
            self.world.tick()
            for c in committables:
                _, ids = self.world.transactions[c.transaction["name"]]
                self.world.transactions[c.transaction["name"]] = ("committed", ids)
            self.world.tick()
            return [CommitOutcome.COMMITTED] * len(committables)
        return [self.commit(committable) for committable in committables]

    def abort(self, transaction: Identity) -> None:
        self.world.tick()
        state, ids = self.world.transactions[transaction["name"]]
        if state == "committed":
            raise CommittedError(transaction["name"])
        self.world.transactions[transaction["name"]] = ("aborted", ids)

    def in_doubt(self, job: str) -> Iterable[Identity]:
        self.world.tick()
        return [{"name": name} for name in self.world.names("prepared") if name.startswith(TransactionId.prefix(job))]


class WorldStorage(WrappedStorage):
    def __init__(self, inner: CheckpointStorage, world: World) -> None:
        super().__init__(inner)
        self.world = world

    def _call(self, method: str, key: str, *more: Any) -> Any:
        if not re.search("/(alive|statistics|request|begun|answer)", key):  # of other threads; they decide nothing
            self.world.tick()
        return super()._call(method, key, *more)


class Ticking(CheckpointListener):
    def __init__(self, world: World) -> None:
        self.world = world

    def on_step(self, step: Any, checkpoint_id: int, facts: Mapping[str, Any]) -> None:
        self.world.tick()


class Histories(RuleBasedStateMachine):
    atomic = False

    def __init__(self) -> None:
        super().__init__()
        self.key = uuid.uuid4().hex
        self.world = WORLDS[self.key] = World()
        self.folder = Path(tempfile.mkdtemp(prefix="histories-"))
        self.input = [[rows(100 * n + 10 * p, 2) for p in range(2)] for n in range(BATCHES)]
        self.expected = Counter(id for batch in self.input for table in batch for id in table["id"].to_pylist())
        self.storage = open_storage(f"memory:{self.key}")

    def coordinator(self) -> CheckpointCoordinator:
        return CheckpointCoordinator(
            "job",
            [WorldSink(self.key, self.atomic)],
            WorldStorage(self.storage, self.world),
            CheckpointConfig(retained_checkpoints=2, commit_timeout=0.5),
            [Ticking(self.world)],
            clock=TestClock(),
        )

    def start(self, batches: int = BATCHES) -> None:
        LocalQuery(self.folder, self.input[:batches]).run(self.coordinator())

    def run_and(self, *agenda: tuple[int, Callable[[], None]], batches: int = BATCHES) -> None:
        self.world.agenda = list(reversed(agenda))
        try:
            self.start(batches)
        except CrashError:
            pass
        except CheckpointError:
            assert len(agenda) > 1 or agenda[0][1] != self.world.crash, "only a driver that met another may stop"
        finally:
            self.world.agenda, self.world.crashed = [], False

    @rule(after=st.integers(0, 60))
    def crash(self, after: int) -> None:
        self.run_and((after, self.world.crash))

    @rule(after=st.integers(0, 60), batches=st.integers(1, BATCHES), then=st.none() | st.integers(0, 40))
    def zombie(self, after: int, batches: int, then: int | None) -> None:
        """Another driver runs at any moment of the first one, which then goes on, perhaps to crash."""
        self.run_and(
            (after, lambda: self._meanwhile(batches)), *([(then, self.world.crash)] if then is not None else [])
        )

    @rule(after=st.integers(0, 60), dies=st.integers(0, 40))
    def zombie_meets_a_driver_that_crashes(self, after: int, dies: int) -> None:
        def meanwhile() -> None:
            rest, self.world.agenda = self.world.agenda, [(dies, self.world.crash)]
            try:
                self.start()
            except CrashError:
                self.world.crashed = False
            finally:
                self.world.agenda = rest

        self.run_and((after, meanwhile))

    def _meanwhile(self, batches: int) -> None:
        rest, self.world.agenda = self.world.agenda, []
        self.start(batches)
        self.world.agenda = rest

    @precondition(lambda self: self.world.names("prepared"))
    @rule(pick=st.integers(0, 100))
    def operator_rolls_back(self, pick: int) -> None:
        prepared = self.world.names("prepared")
        name = prepared[pick % len(prepared)]
        self.world.transactions[name] = ("aborted", self.world.transactions[name][1])

    @rule(after=st.integers(0, 60), pick=st.integers(0, 100), dies=st.none() | st.integers(0, 40))
    def operator_rolls_back_while_a_driver_runs(self, after: int, pick: int, dies: int | None) -> None:
        def roll_back() -> None:
            if self.world.names("prepared"):
                self.operator_rolls_back(pick)

        self.run_and((after, roll_back), *([(dies, self.world.crash)] if dies is not None else []))

    @invariant()
    def no_row_is_doubled(self) -> None:
        assert all(count == 1 for count in self.world.visible().values())

    @invariant()
    def only_decided_rows_are_visible(self) -> None:
        store = JobStore(self.storage, "job")
        complete = store.load_newest()
        newest, records = (complete.checkpoint_id, complete.rounds) if complete else (-1, ())
        named = {c.transaction["name"] for record in records for c in record.committables}
        for name in self.world.names("committed"):
            id = TransactionId.parse(name)
            assert id.job == token("job")
            assert id.checkpoint <= newest
            assert id.checkpoint < newest or name in named

    def teardown(self) -> None:
        self.world.agenda, self.world.crashed = [], False
        self.start()
        self.coordinator().recover()  # sweeps what a driver left behind that died after the last commit
        assert self.world.visible() == self.expected
        assert self.world.names("prepared") == []
        del WORLDS[self.key]
        shutil.rmtree(self.folder)


class AtomicHistories(Histories):
    atomic = True


TestHistories = Histories.TestCase
TestAtomicHistories = AtomicHistories.TestCase
TestHistories.settings = TestAtomicHistories.settings = settings(
    max_examples=80, stateful_step_count=12, deadline=None, suppress_health_check=list(HealthCheck)
)
