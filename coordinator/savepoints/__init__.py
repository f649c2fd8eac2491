"""Savepoints: checkpoints that the user asks for, owns, and restarts from."""

from coordinator.savepoints.model import Savepoint, describe_savepoint, dispose_savepoint, list_savepoints
from coordinator.savepoints.restore import restore_savepoint
from coordinator.savepoints.take import take_savepoint

__all__ = [
    "Savepoint",
    "describe_savepoint",
    "dispose_savepoint",
    "list_savepoints",
    "restore_savepoint",
    "take_savepoint",
]
