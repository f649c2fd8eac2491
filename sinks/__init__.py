"""Two-phase-commit sinks: the contract (`TwoPhaseCommitSink`), and one folder per external system.

`sql` and `lake` are what several of them share, `arrow` is how values are converted, and `testing`
the conformance kit.
"""

from sinks.base import TwoPhaseCommitSink
from sinks.errors import ExactlyOnceError
from sinks.transaction import (
    Checkpoint,
    CommitOutcome,
    CommitState,
    Committable,
    Identity,
    TransactionContext,
    TransactionId,
    token,
)

__all__ = [
    "Checkpoint",
    "CommitOutcome",
    "CommitState",
    "Committable",
    "ExactlyOnceError",
    "Identity",
    "TransactionContext",
    "TransactionId",
    "TwoPhaseCommitSink",
    "token",
]
