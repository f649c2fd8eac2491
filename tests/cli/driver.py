"""A driver in a process of its own, for tests that kill it: it halts at a step of a checkpoint, and waits for SIGKILL.

python -m tests.cli.driver JOB_FILE QUERY_FOLDER STEP CHECKPOINT
"""

from __future__ import annotations

import pickle
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coordinator import CheckpointListener, Step
from coordinator.jobfile import load_job
from sinks.testing import LocalQuery


class Halt(CheckpointListener):
    def on_step(self, step: Step, checkpoint_id: int, facts: Mapping[str, Any]) -> None:
        if (step.name, str(checkpoint_id)) == (sys.argv[3], sys.argv[4]):
            print("halted", flush=True)
            time.sleep(600)


if __name__ == "__main__":
    coordinator = load_job(sys.argv[1])
    coordinator.protocol.listeners.add(Halt())
    LocalQuery(sys.argv[2], pickle.loads(Path(sys.argv[2]).with_suffix(".input").read_bytes())).run(coordinator)
