"""A driver in a process of its own, for tests that kill it: it halts at a step, and waits for SIGKILL."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from coordinator import CheckpointListener, Step
from coordinator.operations.heartbeat import look_for_driver
from coordinator.operations.jobfile import load_job
from coordinator.storage import existing_storages
from sinks.testing import LocalQuery
from sinks.testing.local import Partitions
from sinks.testing.table import eventually


@dataclass
class Halt(CheckpointListener):
    step: Step
    checkpoint: int
    halted: Connection

    def on_step(self, step: Step, checkpoint_id: int, facts: Mapping[str, Any]) -> None:
        if (step, checkpoint_id) == (self.step, self.checkpoint):
            self.halted.send("halted")
            time.sleep(600)


@dataclass
class DiesOfACommit(CheckpointListener):
    """Is killed as soon as a checkpoint is complete, after a heartbeat that told of its begin."""

    checkpoint: int
    begun: Connection
    file: str

    def on_step(self, step: Step, checkpoint_id: int, facts: Mapping[str, Any]) -> None:
        if (step, checkpoint_id) == (Step.TRIGGERED, self.checkpoint):
            self.begun.send("halted")
            with existing_storages():
                store = load_job(self.file)._protocol.store
            eventually(lambda: (driver := look_for_driver(store)) is not None and "checkpoint" in driver.sign.now)
        if (step, checkpoint_id) == (Step.COMPLETE, self.checkpoint):
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class Slow(CheckpointListener):
    """Each commit takes a while. Says so once, at the first."""

    begun: Connection

    def on_step(self, step: Step, checkpoint_id: int, facts: Mapping[str, Any]) -> None:
        if step is Step.COMMITTING and checkpoint_id >= 0:
            if checkpoint_id == 0:
                self.begun.send("halted")
            time.sleep(0.3)


def run(
    environment: Mapping[str, str], file: str, query: str, input: Sequence[Partitions], listener: CheckpointListener
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    coordinator = load_job(file)
    coordinator._protocol.listeners.add(listener)
    LocalQuery(query, input).run(coordinator)
