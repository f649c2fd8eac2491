"""The checkpoint coordinator that runs inside foreachBatch."""

from coordinator.config import CheckpointConfig, CheckpointingMode
from coordinator.coordinator import CheckpointCoordinator
from coordinator.errors import CheckpointError
from coordinator.listener import CheckpointListener, Step

__all__ = [
    "CheckpointConfig",
    "CheckpointCoordinator",
    "CheckpointError",
    "CheckpointListener",
    "CheckpointingMode",
    "Step",
]
