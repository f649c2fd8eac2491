"""The checkpoint coordinator that runs inside foreachBatch."""

__version__ = "0.2.1"

from coordinator import import_check  # noqa: F401  # isort: split
from coordinator.config import (
    CheckpointConfig,
    CheckpointingMode,
    ExternalizedCheckpointCleanup,
    Replay,
    StateBackend,
)
from coordinator.coordinator import CheckpointCoordinator
from coordinator.errors import Attempt, CheckpointError
from coordinator.listener import CheckpointListener, Step
from coordinator.operations.jobfile import load_job
from coordinator.operations.restart import (
    ExponentialDelay,
    FailureRate,
    FixedDelay,
    NoRestart,
    RunSummary,
    run,
)
from coordinator.operations.savepoints.restore import restore_savepoint
from coordinator.operations.savepoints.savepoint import (
    Savepoint,
    describe_savepoint,
    dispose_savepoint,
    list_savepoints,
)
from coordinator.protocol.guarantee import Guarantee
from sinks.errors import ExactlyOnceError

__all__ = [
    "Attempt",
    "CheckpointConfig",
    "CheckpointCoordinator",
    "CheckpointError",
    "CheckpointListener",
    "CheckpointingMode",
    "ExactlyOnceError",
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
    "load_job",
    "restore_savepoint",
    "run",
]
