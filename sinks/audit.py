"""What a sink knows about rows that are visible: the result of `sinks.optional.Auditable.audit`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sinks.transaction import Committable, Fingerprint, Identity


@dataclass(frozen=True)
class Part:
    """One sink's part of a checkpoint that was complete, and of which nothing is in doubt.

    `given_up`: transactions that an operator has given up; nobody knows whether they are visible.
    `round`: the newest decision, above 0 after replays.
    """

    lineage: str
    checkpoint_id: int
    committables: Sequence[Committable]
    given_up: Sequence[Identity] = ()
    round: int = 0


@dataclass(frozen=True)
class Holding:
    """What the external system has of a part.

    `fingerprint`: count and hash that the transactions stored with their rows, such as in a ledger.
    `rows`: how many of the rows are there now, as they were written. Each is None if the system
    cannot tell; `remarks` say why. `differences` are errors whatever the counts are. `unexpected`:
    transactions of the checkpoint that are committed but not part of it, as far as the system can
    tell.
    """

    fingerprint: Fingerprint | None = None
    rows: int | None = None
    differences: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


@dataclass(frozen=True)
class Audit:
    """One `Holding` for each part, in order.

    The rest is about no single part: `remarks` say what this system can never tell, `unknown` what
    it should have told and did not.
    """

    holdings: Sequence[Holding]
    differences: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
