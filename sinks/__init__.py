"""Two-phase-commit sinks: the contract (`TwoPhaseCommitSink`) and one folder per external system."""

from sinks import log  # noqa: F401  # isort: split
from sinks.base import TwoPhaseCommitSink
from sinks.transaction import (
    Checkpoint,
    CommitOutcome,
    CommitState,
    Committable,
    Identity,
    TransactionContext,
)

__all__ = [
    "Checkpoint",
    "CommitOutcome",
    "CommitState",
    "Committable",
    "Identity",
    "TransactionContext",
    "TwoPhaseCommitSink",
]
