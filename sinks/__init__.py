"""Two-phase-commit sinks: the contract (`TwoPhaseCommitSink`), and one folder per external system.

`sql` and `lake` have what several of these folders share, `arrow` converts values, and `testing` is
the conformance kit.
"""

from sinks.base import TwoPhaseCommitSink
from sinks.errors import ExactlyOnceError
from sinks.projection import Projection, Select
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
    "Projection",
    "Select",
    "TransactionContext",
    "TransactionId",
    "TwoPhaseCommitSink",
    "token",
]
