"""Who may decide and commit: the driver of the newest generation. Rules: docs/protocol.md#the-rules"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from coordinator.errors import StorageBehind, Superseded
from coordinator.protocol.records import CompletedCheckpoint, JobStore, Listing, Participant
from sinks.transaction import CommitOutcome


@dataclass(frozen=True)
class CommitPermit:
    """The right to commit what has been decided of one checkpoint. A commit takes it and no checkpoint, and only
    `Fence.permit` gives it, for records that were put or read before (R14)."""

    complete: CompletedCheckpoint

    def with_outcomes(self, outcomes: Mapping[Participant, CommitOutcome]) -> CommitPermit:
        return replace(self, complete=self.complete.with_outcomes(outcomes))


@dataclass(frozen=True)
class Fence:
    """One generation, which newer ones shut out. 0: none has been claimed."""

    store: JobStore
    generation: int = 0

    def require_newest(self, what: str, listing: Listing | None = None) -> None:
        """Raises `Superseded` if a newer generation is in the listing (default: one made now), `StorageBehind` if this
        one is not."""
        listing = listing or self.store.listing("generation/")
        if listing.newest_generation > self.generation:
            raise Superseded(
                f"generation {listing.newest_generation} of job {self.store.job!r} has started; this driver "
                f"(generation {self.generation}) may not {what} any more. Two drivers of one job were running."
            )
        if self.generation not in listing.generations:
            raise self.storage_changed(what, f"the claim of this driver (generation {self.generation})")

    def storage_changed(self, what: str, gone: str) -> StorageBehind:
        return StorageBehind(
            f"{gone} is no more in checkpoint storage {self.store.storage.uri}: the storage was deleted, moved away or "
            f"set back while the query ran, so this driver may not {what} any more. Start the query again; if "
            "that start is refused, put the storage back as it was."
        )

    def permit(self, complete: CompletedCheckpoint, listing: Listing | None = None) -> CommitPermit:
        """R14: fence after the put or the load, before the first commit. `listing` was made after it."""
        self.require_newest("commit", listing)
        return CommitPermit(complete)
