"""The checkpoint coordinator that runs inside foreachBatch."""

__version__ = "0.2.1"

from coordinator import import_check  # noqa: F401  # isort: split
from coordinator.config import CheckpointConfig, CheckpointingMode, ExternalizedCheckpointCleanup, Replay, StateBackend
from coordinator.coordinator import CheckpointCoordinator
from coordinator.errors import Attempt, CheckpointError
from coordinator.guarantee import Guarantee
from coordinator.listener import CheckpointListener, Step
from coordinator.restart import (
    ExponentialDelay,
    FailureRate,
    FixedDelay,
    NoRestart,
    RunSummary,
    run,
)
from coordinator.savepoints.model import Savepoint, describe_savepoint, dispose_savepoint, list_savepoints
from coordinator.savepoints.restore import restore_savepoint

__all__ = [
    "Attempt",
    "CheckpointConfig",
    "CheckpointCoordinator",
    "CheckpointError",
    "CheckpointListener",
    "CheckpointingMode",
    "ExternalizedCheckpointCleanup",
    "ExponentialDelay",
    "FailureRate",
    "FixedDelay",
    "Guarantee",
    "NoRestart",
    "Replay",
    "RunSummary",
    "Savepoint",
    "StateBackend",
    "Step",
    "describe_savepoint",
    "dispose_savepoint",
    "list_savepoints",
    "restore_savepoint",
    "run",
]
