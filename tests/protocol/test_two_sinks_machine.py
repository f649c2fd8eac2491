"""The state machine with more in it: two sinks, drivers that close(), a sink that cannot be reached for a while, puts
that fail (landed or not), tasks that pre-commit after their driver died. And one more invariant: the library itself
never aborts a pre-committed transaction that a record names at that moment (that it can replay it does not help a query
whose rows cannot be had again)."""

from __future__ import annotations

import shutil
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from coordinator import CheckpointConfig, CheckpointCoordinator
from coordinator.errors import CheckpointError
from coordinator.storage import StorageError
from coordinator.store.job_store import JobStore
from sinks.testing import LocalQuery, rows
from sinks.transaction import TransactionId, token
from tests.protocol import test_state_machine as base
from tests.protocol.job import TestClock
from tests.protocol.test_state_machine import CrashError, Histories, Ticking, WorldSink, WorldStorage

base.BATCHES = 2  # a run does at most so many new batches, so that every run has something to do
TOTAL = 60


class Sink(WorldSink):
    def __init__(self, world: str, atomic: bool, name: str) -> None:
        super().__init__(world, atomic)
        self.name = name

    def write(self, transaction, batch) -> None:
        super().write(transaction, batch)
        self.world.begun[transaction[0]] = transaction[1]

    def commit_all(self, checkpoint, committables):
        if self.world.unreachable:
            self.world.unreachable -= 1
            self.world.tick()
            return [ConnectionError("not now")] * len(committables)
        return super().commit_all(checkpoint, committables)

    def abort(self, transaction) -> None:
        name = transaction["name"]
        if self.world.transactions[name][0] == "prepared" and name in self.world.named():
            self.world.tick()
            self.world.violations.append(name)
        super().abort(transaction)

    def in_doubt(self, job: str):
        return [i for i in super().in_doubt(job) if TransactionId.parse(i["name"]).sink == token(self.name)]


class Storage(WorldStorage):
    def put_if_absent(self, key: str, value: bytes) -> bool:
        fault = self.world.fault if "/checkpoint/" in key else ""
        if fault:
            self.world.fault = ""
            self.world.tick()
            if fault == "landed":
                self.inner.put_if_absent(key, value)
            raise StorageError(self.uri, key, fault)
        return super().put_if_absent(key, value)


class More(Histories):
    def __init__(self) -> None:
        super().__init__()
        self.world.named = self.named
        self.input = [[rows(100 * n + 10 * p, 2) for p in range(2)] for n in range(TOTAL)]
        self.target = 1

    def named(self) -> set[str]:
        newest = JobStore(self.storage, "job").load_newest()
        rounds = newest.rounds if newest else ()
        return {committable.transaction["name"] for record in rounds for committable in record.committables}

    def coordinator(self) -> CheckpointCoordinator:
        return CheckpointCoordinator(
            "job",
            [Sink(self.key, self.atomic, "world"), Sink(self.key, self.atomic, "other")],
            Storage(self.storage, self.world),
            CheckpointConfig(retained_checkpoints=2),
            [Ticking(self.world)],
            clock=TestClock(),  # no choice must depend on the time
        )

    def start(self, batches: int = base.BATCHES) -> None:
        done = LocalQuery(self.folder, []).next_batch()
        self.target = max(self.target, min(TOTAL, done + batches))
        with self.coordinator() as coordinator:
            LocalQuery(self.folder, self.input[: self.target]).run(coordinator)

    def _meanwhile(self, batches: int) -> None:
        rest, self.world.agenda = self.world.agenda, []
        with suppress(CheckpointError):  # a fault that was meant for the other one
            self.start(batches)
        self.world.agenda = rest

    def run_and(self, *agenda: Any, batches: int = base.BATCHES) -> None:
        self.world.agenda = list(reversed(agenda))
        try:
            self.start(batches)
        except (CrashError, CheckpointError, StorageError):
            pass
        finally:
            self.world.agenda, self.world.crashed = [], False
            self.world.unreachable, self.world.fault = 0, ""

    @rule(times=st.integers(1, 3), after=st.integers(0, 80), batches=st.integers(1, base.BATCHES), crash=st.booleans())
    def unreachable(self, times: int, after: int, batches: int, crash: bool) -> None:
        """times=3 comes near the commit timeout or over it."""
        self.world.unreachable = times * 2
        self.run_and((after, self.world.crash if crash else lambda: self._meanwhile(batches)))

    @rule(fault=st.sampled_from(["landed", "lost"]), after=st.integers(0, 80), crash=st.booleans())
    def put_fails(self, fault: str, after: int, crash: bool) -> None:
        self.world.fault = fault
        self.run_and((after, self.world.crash if crash else lambda: self._meanwhile(base.BATCHES)))

    @precondition(lambda self: bool(set(self.world.begun) - set(self.world.transactions)))
    @rule(pick=st.integers(0, 100))
    def a_late_task_pre_commits(self, pick: int) -> None:
        late = sorted(set(self.world.begun) - set(self.world.transactions))
        name = late[pick % len(late)]
        self.world.transactions[name] = ("prepared", self.world.begun[name])

    @rule(after=st.integers(0, 80), pick=st.integers(0, 100))
    def a_late_task_pre_commits_while_a_driver_runs(self, after: int, pick: int) -> None:
        def late() -> None:
            if set(self.world.begun) - set(self.world.transactions):
                self.a_late_task_pre_commits(pick)

        self.run_and((after, late))

    @invariant()
    def no_row_is_doubled(self) -> None:
        assert all(count <= 2 for count in self.world.visible().values())
        for sink in ("world", "other"):
            seen = [
                id
                for name, (state, ids) in self.world.transactions.items()
                if state == "committed" and TransactionId.parse(name).sink == token(sink)
                for id in ids
            ]
            assert len(seen) == len(set(seen))

    @invariant()
    def nothing_decided_is_aborted_by_the_library(self) -> None:
        assert self.world.violations == []

    def teardown(self) -> None:
        self.world.unreachable, self.world.fault = 0, ""
        self.world.agenda, self.world.crashed = [], False
        self.start(0)
        self.coordinator().recover()
        ids = [id for batch in self.input[: self.target] for table in batch for id in table["id"].to_pylist()]
        assert self.world.visible() == Counter(ids * 2)
        assert self.world.names("prepared") == []
        shutil.rmtree(self.folder)


class MoreAtomic(More):
    atomic = True


class MuchMore(More):
    pass


class MuchMoreAtomic(MoreAtomic):
    pass


def machine(histories: type[More], examples: int) -> Any:
    case = histories.TestCase
    case.settings = settings(
        max_examples=examples, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
    )
    return case


TestMore, TestMoreAtomic = (machine(histories, 8) for histories in (More, MoreAtomic))
TestMuchMore, TestMuchMoreAtomic = (
    pytest.mark.large(machine(histories, 60)) for histories in (MuchMore, MuchMoreAtomic)
)
