"""Who may decide and commit: the driver of the newest generation. Rules: docs/protocol.md#the-rules"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from coordinator.errors import Superseded
from coordinator.protocol.decisions import Complete, Participant
from coordinator.protocol.records import CheckpointStore, Listing
from sinks.transaction import CommitOutcome


@dataclass(frozen=True)
class CommitPermit:
    """The right to commit what has been decided of one checkpoint. A commit takes it and no checkpoint, and only
    `Fence.permit` gives it, for records that were put or read before (R14)."""

    complete: Complete
    listing: Listing | None = None
    """What storage showed after the put, where there was one."""

    def with_outcomes(self, outcomes: Mapping[Participant, CommitOutcome]) -> CommitPermit:
        return replace(self, complete=self.complete.with_outcomes(outcomes))


@dataclass(frozen=True)
class Fence:
    """One generation, which newer ones shut out. 0: none has been claimed."""

    store: CheckpointStore
    generation: int = 0

    def require_newest(self, what: str, listing: Listing | None = None) -> None:
        """Raises `Superseded` if a newer generation was claimed before the listing was made, or now."""
        newest = listing.newest_generation if listing else self.store.newest_generation()
        if newest > self.generation:
            raise Superseded(
                f"generation {newest} of job {self.store.job!r} has started; this driver (generation "
                f"{self.generation}) may not {what} any more. Two drivers of one job were running."
            )

    def permit(self, complete: Complete, listing: Listing | None = None) -> CommitPermit:
        """R14: fence after the put or the load, before the first commit. `listing` was made after it."""
        self.require_newest("commit", listing)
        return CommitPermit(complete, listing)
