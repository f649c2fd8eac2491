"""The fence around a job: only the driver of the newest generation decides, commits and aborts.

Rules: docs/protocol.md#the-rules
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from coordinator.errors import StorageBehind, Superseded
from coordinator.store.job_store import JobStore
from coordinator.store.records import Claim, CompletedCheckpoint, Listing, Participant
from sinks.transaction import CommitOutcome


@dataclass(frozen=True)
class CommitPermit:
    """The right to commit what has been decided of one checkpoint.

    A commit takes a permit in place of a checkpoint, and only `Fence.permit` gives it, for records
    that were put or read before (R14).
    """

    complete: CompletedCheckpoint

    def with_outcomes(self, outcomes: Mapping[Participant, CommitOutcome]) -> CommitPermit:
        return replace(self, complete=self.complete.with_outcomes(outcomes))


@dataclass
class Fence:
    """A driver's claim of a generation, which newer claims shut out.

    In generation 0, no claim has been made.
    """

    store: JobStore
    claim: Claim = field(default_factory=Claim)
    displaced: bool = False
    """True once this driver was told that something is in place of its own.

    This is another driver, or another state of storage or of a target. It stays True, whatever
    storage shows later, because records that tell what is decided may be elsewhere (R16).
    """
    has_namesake: bool = False
    """True once another driver of the same number and lineage was seen.

    The transactions of that driver may have the same names.
    """

    @property
    def generation(self) -> int:
        return self.claim.generation

    def require_newest(self, what: str, listing: Listing | None = None) -> None:
        """Raise `Superseded` or `StorageBehind` unless this driver is the newest.

        `Superseded` means that a newer generation is in the listing (default: one made now), or
        that another driver has claimed the same generation in a storage that was emptied or
        restored to an older state. `StorageBehind` means that the claim is gone. `what` is what
        this driver is about to do, as an infinitive.
        """
        listing = listing or self.store.listing("generation/")
        if listing.newest_generation > self.generation:
            self.displaced = True
            raise Superseded(
                f"generation {listing.newest_generation} of job {self.store.job!r} has started; "
                f"this driver (generation {self.generation}) may not {what} any more. Two drivers "
                "of one job were running."
            )
        found = self.store.claim_of(self.generation)
        if found is None:
            raise self.storage_changed_error(
                what, f"the claim of this driver (generation {self.generation})"
            )
        if found.token != self.claim.token:
            self.displaced = True
            self.has_namesake = found.lineage == self.claim.lineage
            raise Superseded(
                f"another driver of job {self.store.job!r} has claimed generation "
                f"{self.generation}, the number of this driver: checkpoint storage "
                f"{self.store.storage.uri} was emptied or set back while the query ran. This "
                f"driver may not {what} any more. Run one driver for each job."
            )

    def storage_changed_error(self, what: str, gone: str) -> StorageBehind:
        self.displaced = True
        return StorageBehind(
            f"{gone} is no longer in checkpoint storage {self.store.storage.uri}, which was "
            f"deleted, moved away or set back, so this driver may not {what} any more. Start the "
            "query again. If the start fails, put the storage back as it was. [EO-STORAGE-GONE]"
        )

    def permit(self, complete: CompletedCheckpoint, listing: Listing | None = None) -> CommitPermit:
        """Give the right to commit if this driver is the newest.

        R14: fence after the put or the load, before the first commit. `listing` was made after the
        put or the load.
        """
        self.require_newest("commit", listing)
        return CommitPermit(complete)
