"""The result of `sinks.optional.Auditable.audit`: what a sink knows about rows that are visible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sinks.transaction import Committable, Fingerprint, Identity


@dataclass(frozen=True)
class Part:
    """One sink's part of a checkpoint that was complete, and of which nothing is in doubt.

    * `given_up` are transactions that an operator has discarded. Nobody knows whether they are
      visible.
    * `round` is the replay round of the newest commit decision, which is above 0 after replays.
    """

    lineage: str
    checkpoint_id: int
    committables: Sequence[Committable]
    given_up: Sequence[Identity] = ()
    round: int = 0


@dataclass(frozen=True)
class Holding:
    """The answer of an external system about one part.

    * `fingerprint` is the count and hash that the transactions stored with their rows, such as in a
      ledger. It is None if the system cannot tell, and `remarks` say why.
    * `rows` is how many of the rows are there now, as they were written. It is None if the system
      cannot tell, and `remarks` say why.
    * `differences` are errors, whatever the counts are.
    * `unexpected` are transactions of the checkpoint that are committed but not part of it, as far
      as the system can tell. Each of them keeps the coordinator from writing lost rows again, so
      leave out attempts that were aborted or are in doubt.
    """

    fingerprint: Fingerprint | None = None
    rows: int | None = None
    differences: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


@dataclass(frozen=True)
class Audit:
    """One `Holding` for each part, in order, and what is about no single part.

    * `differences` are errors.
    * `remarks` say what this system can never tell.
    * `unknown` says what the system should have told and did not.
    """

    holdings: Sequence[Holding]
    differences: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
