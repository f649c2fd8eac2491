"""The transactions in doubt in the external systems.

The report says what is decided about each, and what an operator can do.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any

from coordinator.errors import StorageBehind, Superseded, reason
from coordinator.operations.heartbeat import DriverStatus, look_for_driver
from coordinator.operations.inspection.memory_comparison import set_back
from coordinator.operations.inspection.text import duration
from coordinator.protocol.fence import Fence
from coordinator.protocol.memories import record_filter
from coordinator.protocol.ports import Sink
from coordinator.store.job_store import JobStore
from coordinator.store.records import Claim, CompletedCheckpoint
from sinks._util.machine import machine
from sinks._util.progress import progress
from sinks.diagnosis import InDoubt
from sinks.optional import Diagnosable
from sinks.transaction import Committable, not_among

_AT_WORK = 1.0
"""Seconds within which a running driver makes some decided transactions visible."""
_PAUSE = 0.1


class Decision(str, Enum):
    COMMIT = "commit"  # a complete record names it
    ORPHAN = "orphan"  # no record names it, and none will
    # No record names it yet. It belongs to the newest driver, which runs by its last heartbeat.
    OPEN = "open"
    # It is like OPEN, but no driver that could still complete its checkpoint gives heartbeats.
    STRANDED = "stranded"


@dataclass(frozen=True)
class InDoubtTransaction:
    """A transaction in doubt, and what is decided about it.

    `committable` is the one in the record, if a record names the transaction.
    """

    sink: str
    about: InDoubt
    decision: Decision
    committable: Committable | None = None

    @property
    def id(self) -> str:
        text = json.dumps([self.sink, dict(self.about.transaction)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:10]

    @property
    def age(self) -> float:
        """Return the age in seconds by the system's clock.

        It is 0 if the age is not known, because the page sorts by it.
        """
        return self.about.age or 0.0

    def meant_by(self, text: str) -> bool:
        """Tell whether an operator's argument names this transaction.

        It may be the id of this transaction, or a name that the external system shows.
        """
        return text == self.id or text in [str(value) for value in self.about.transaction.values()]

    def to_json(self) -> dict[str, Any]:
        about = asdict(self.about)
        return {"id": self.id, "sink": self.sink, "decision": self.decision.value, **about}


@dataclass(frozen=True)
class InDoubtReport:
    """The transactions in doubt, and what is known beside them.

    These are the errors of sinks that could not be asked, the driver, the newest checkpoint, and a
    sentence on each sink that remembers other checkpoints than storage.
    """

    pending: Sequence[InDoubtTransaction]
    errors: Mapping[str, str]
    driver: DriverStatus | None
    newest: CompletedCheckpoint | None
    set_back: Sequence[str] = ()


def find_in_doubt(
    store: JobStore, sinks: Mapping[str, Sink], claimed: Claim | None = None
) -> InDoubtReport:
    """Open the sinks, and ask each of them what is in doubt.

    While a driver runs, the sinks are asked again for up to a second. If some decided transactions
    are gone then, that driver is at work, and the other decided transactions of the newest
    checkpoint are left out. `claimed` is the claim of this process. While it is the newest claim,
    no driver can complete anything. Raises Superseded if it is not the newest.
    """
    seen = _find_once(store, sinks, claimed)
    until = machine.clock.monotonic() + _AT_WORK
    decided = {
        pending.id: pending.sink for pending in seen.pending if pending.decision is Decision.COMMIT
    }
    while (
        decided
        and claimed is None
        and seen.driver
        and seen.driver.runs
        and machine.clock.monotonic() < until
    ):
        machine.clock.sleep(_PAUSE)
        seen = _find_once(store, sinks, claimed)
        left = {pending.id for pending in seen.pending}
        if any(id not in left and sink not in seen.errors for id, sink in decided.items()):
            n = seen.newest.checkpoint_id if seen.newest else None
            others = [
                o
                for o in seen.pending
                if o.decision is not Decision.COMMIT or o.about.checkpoint != n
            ]
            seen = replace(seen, pending=others)
            break
    return replace(seen, set_back=set_back(store, sinks))


def _find_once(store: JobStore, sinks: Mapping[str, Sink], claimed: Claim | None) -> InDoubtReport:
    # Generation and records are read after the sinks were asked, so that a decision that was made
    # meanwhile is seen.
    listed: dict[str, Sequence[InDoubt]] = {}
    errors: dict[str, str] = {}
    with progress("ask what is in doubt", len(sinks), "sinks") as advance:
        for name, sink in sinks.items():
            try:
                sink.open()
                asked = list(sink.in_doubt(store.job))
                listed[name] = (
                    sink.inspect(asked)
                    if isinstance(sink, Diagnosable)
                    else [*map(InDoubt.parsed, asked)]
                )
            except Exception as error:
                errors[name] = reason(error)
            advance(1)
    listed_transactions = [about.transaction for abouts in listed.values() for about in abouts]
    generation = store.newest_generation()
    history = store.history(record_filter({}, listed_transactions, store.lineage))
    if claimed is not None:
        try:
            Fence(store, claimed).require_newest("abort anything")
        except (StorageBehind, Superseded) as error:
            raise Superseded(
                f"a driver of job {store.job!r} has started just now, or storage "
                f"{store.storage.uri} was emptied or set back; look again. Nothing was aborted"
            ) from error
    newest = history[-1] if history else None
    driver = look_for_driver(store, newest=newest)
    judged = [
        _judge(sink, about, history[::-1], generation, driver, fenced=claimed is not None)
        for sink, abouts in listed.items()
        for about in abouts
    ]
    return InDoubtReport(judged, errors, driver, newest)


def _judge(
    sink: str,
    about: InDoubt,
    retained: Sequence[CompletedCheckpoint],
    generation: int,
    driver: DriverStatus | None,
    *,
    fenced: bool,
) -> InDoubtTransaction:
    """Judge what is decided about a transaction in doubt.

    `retained` has the newest checkpoint first. A transaction of an older checkpoint is in doubt if
    its system was rolled back (R16).
    """
    undecided = Decision.OPEN if driver and driver.runs else Decision.STRANDED
    if not retained:  # this may be the wrong storage
        return InDoubtTransaction(sink, about, undecided)
    for complete in retained:
        for named in complete.committables.values():
            if named.sink == sink and not not_among([about.transaction], [named.transaction]):
                n = complete.checkpoint_id
                lineage = complete.record.lineage
                about = replace(about, checkpoint=n, lineage=lineage, subtask=named.subtask)
                return InDoubtTransaction(sink, about, Decision.COMMIT, named)
    record = retained[0].record
    older = about.generation is not None and about.generation < generation
    settled = (
        about.checkpoint is not None
        and about.checkpoint <= record.checkpoint_id
        and not about.round
    )
    abandoned = about.lineage is not None and about.lineage != record.lineage
    return InDoubtTransaction(
        sink, about, Decision.ORPHAN if fenced or older or settled or abandoned else undecided
    )


@dataclass(frozen=True)
class Remedy:
    """The fate of all transactions of one decision, and the command that settles them at once."""

    decision: Decision
    count: int
    what: str
    command: str


def remedies(seen: InDoubtReport) -> list[Remedy]:
    silence = duration(max(seen.driver.age, 0)) if seen.driver else ""
    ids = [
        pending.id
        for pending in seen.pending
        if pending.decision in (Decision.STRANDED, Decision.OPEN)
    ]
    which = "--all-orphans" if seen.newest else ids[0] if len(ids) == 1 else "ID"
    fenced = f"coordinator in-doubt abort {which} --fence"
    known = {
        Decision.COMMIT: (
            "decided: the next start of the query commits them; at once",
            "coordinator resolve",
        ),
        Decision.ORPHAN: (
            "of a driver that was replaced: the next sweep of a driver aborts them; at once",
            "coordinator in-doubt abort --all-orphans",
        ),
        Decision.STRANDED: (
            "no record names them, and no driver is seen that could complete their checkpoint. "
            "They hold their locks: start the query again, which settles them; only if it is not "
            "to run",
            fenced,
        ),
        Decision.OPEN: (
            f"of the newest driver, whose last heartbeat came {silence} ago: it completes or "
            "aborts them, unless it has died since. If it has, or is stuck, stop it and start the "
            "query again; only if it is not to run",
            fenced,
        ),
    }
    counted = Counter(pending.decision for pending in seen.pending)
    return [
        Remedy(decision, counted[decision], *said)
        for decision, said in known.items()
        if counted[decision]
    ]
