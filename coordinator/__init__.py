"""The checkpoint coordinator that runs inside foreachBatch."""

from coordinator.config import CheckpointConfig, CheckpointingMode, ExternalizedCheckpointCleanup, StateBackend
from coordinator.coordinator import CheckpointCoordinator
from coordinator.errors import CheckpointError
from coordinator.guarantee import Guarantee
from coordinator.listener import CheckpointListener, Step

__all__ = [
    "CheckpointConfig",
    "CheckpointCoordinator",
    "CheckpointError",
    "CheckpointListener",
    "CheckpointingMode",
    "ExternalizedCheckpointCleanup",
    "Guarantee",
    "StateBackend",
    "Step",
]
