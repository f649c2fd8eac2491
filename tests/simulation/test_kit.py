"""The conformance kit passes on each simulated sink and storage, which ties the simulated world to the real one.

It is the half of the kit that works in one process. The other half kills processes, which the simulator does itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import pytest

from coordinator.storage import CheckpointStorage
from sinks.base import Sink
from sinks.testing.clauses import Ability
from sinks.testing.conformance import SinkContract
from sinks.testing.kit import copy_of
from sinks.testing.storage import StorageConformance
from sinks.transaction import Committable, Identity
from tests.simulation import targets
from tests.simulation.scenario import Scenario
from tests.simulation.scheduler import Scheduler
from tests.simulation.storage import SimStorage
from tests.simulation.targets import KINDS, Evolving, Forgetful, Kafka, Lake, Letters, Prepared, SimSink, Whole
from tests.simulation.world import STORAGE, World

BAD = -7
"""The id of the rows that a target with dead letters refuses. In a schedule it refuses ids that the kit's rows have."""
NO_AT_LEAST_ONCE = "no simulated job runs in at-least-once mode"


def empty_world() -> World:
    """Return a world without processes, so no call to a target or storage fails or is stopped."""
    return World(Scenario(), Scheduler(1, [], lambda kind, argument: None))


class Contract(SinkContract):
    kind: type[SimSink]
    refused = None
    stops = 4
    cannot: ClassVar[Mapping[Ability, str]] = {Ability.DIRECTLY: NO_AT_LEAST_ONCE}

    @pytest.fixture(autouse=True)
    def _purged_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let `purge` remove all that it may, since the kit's checkpoints are neighbors."""
        monkeypatch.setattr(targets, "KEPT", 0)

    @pytest.fixture
    def sink(self) -> SimSink:
        return self.kind(empty_world(), "simulated")

    def named(self, sink: SimSink, name: str) -> Sink:
        """Return a copy, since the constructor takes the name of the target from that of the sink."""
        other = copy_of(sink)
        other.name = name
        return other

    def visible(self, sink: SimSink) -> Sequence[Mapping[str, Any]]:
        return [row.values for row in sink.target.content()]

    def leftovers(self, sink: SimSink) -> Sequence[str]:
        return sink.target.in_state("open") + sink.target.in_state("prepared")


class TestPrepared(Contract):
    kind = Prepared


class TestEvolving(Contract):
    kind = Evolving

    def evolving(self, sink: SimSink) -> Sink:
        return copy_of(sink)

    def visible(self, sink: SimSink) -> Sequence[Mapping[str, Any]]:
        """Return the rows as a table shows them that has got all of their columns."""
        rows = super().visible(sink)
        columns = dict.fromkeys(name for row in rows for name in row)
        return [{**columns, **row} for row in rows]


class TestWhole(Contract):
    kind = Whole


class TestLake(Contract):
    kind = Lake


class TestKafka(Contract):
    kind = Kafka
    cannot: ClassVar = {
        Ability.DIRECTLY: NO_AT_LEAST_ONCE,
        Ability.SLOT: "a transactional id has one transaction, and a new one rolls back the one before",
        Ability.DEAD_TASKS: "transactions time out",
        Ability.TELL_OPEN: "a broker has no state for what is pre-committed",
    }

    def unseen(self, made: Committable, transaction_id: str) -> Identity:
        return {**made.transaction, "epoch": 1_000_000}


class TestForgetful(Contract):
    kind = Forgetful


class TestLetters(Contract):
    kind = Letters
    bad: ClassVar = {"id": BAD}

    @pytest.fixture
    def sink(self) -> Letters:
        return Letters(empty_world(), "simulated", refuses=is_bad)


def is_bad(id: int) -> bool:
    return id == BAD


def test_each_kind_of_sink_has_its_kit() -> None:
    assert {kit.kind for kit in Contract.__subclasses__()} == set(KINDS.values())


class TestStorage(StorageConformance):
    @pytest.fixture
    def reopen(self) -> Callable[[], CheckpointStorage]:
        world = empty_world()
        return lambda: SimStorage(world, STORAGE)
