"""What a sink tells of rows that are visible, for books that have to balance: `TwoPhaseCommitSink.audit`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sinks.transaction import Committable, Fingerprint, Identity


@dataclass(frozen=True)
class Part:
    """One sink's part of a checkpoint that was complete, and of which nothing is in doubt. `given_up`: transactions
    that an operator has given up; nobody knows whether they are visible. `round`: the newest decision, above 0 after
    replays."""

    lineage: str
    checkpoint_id: int
    committables: Sequence[Committable]
    given_up: Sequence[Identity] = ()
    round: int = 0


@dataclass(frozen=True)
class Holding:
    """What the external system has of a part. `kept`: count and hash of rows that stand beside the rows, written by
    their own transactions. `held`: how many of the rows are there now, as they were written. Either is None where the
    system cannot tell; `remarks` say why. `differences` are what is wrong whatever the counts are. `unnamed`:
    transactions of the checkpoint that are committed beside those of the part, as far as the system can tell."""

    kept: Fingerprint | None = None
    held: int | None = None
    differences: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    unnamed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Audit:
    """One `Holding` for each part, in order; and what is not about one part: `remarks` say what this system never
    tells, `untold` what it should have told, and did not."""

    holdings: Sequence[Holding]
    differences: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    untold: tuple[str, ...] = ()
