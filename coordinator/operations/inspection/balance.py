"""The row-count check: records of visible checkpoints compared with the targets of the sinks.

`balance` is a pure function of facts; `take_balance` reads them. It proves what docs/verify.md
says, and no more.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from coordinator.operations.inspection.memory_comparison import compare_sink
from coordinator.protocol.ports import Sink
from coordinator.store.job_store import JobStore
from coordinator.store.records import CompletedCheckpoint, RecordKey
from sinks.audit import Audit, Holding, Part
from sinks.optional import Auditable
from sinks.transaction import Fingerprint, not_among

History = Sequence[CompletedCheckpoint]
LOOKED_AT = 100
"""The number of the newest checkpoints that a driver and the page compare repeatedly."""
_TRIES = 3
_AT_LEAST_ONCE = "it was written at least once: no transaction is named"


class Verdict(str, Enum):
    BALANCED = "balanced"
    DIFFERS = "differs"
    UNKNOWN = "cannot tell"  # only the record tells


COLUMNS = {
    "batch": "batch",
    "filtered": "filtered",
    "read": "read",
    "dead_lettered": "dead letters",
    "pre_committed": "pre-committed",
    "given_up": "given up",
    "ledger": "ledger",
    "present": "present",
}
"""The counts of rows, and their titles for people.

`batch` counts the rows of Spark's batch, and `filtered` those that the sink's transform removed
(less than 0 if it made rows). `read` counts the rows that came to the sink, and `dead_lettered`
those that the sink refused. `pre_committed` counts the rows that the sink's transactions
acknowledged, and `given_up` those that an operator gave up. `ledger` is the count in the system's
own ledger, and `present` counts the rows that are there now as they were written.
"""

Counts = dict[str, int | None]
"""Counts by the names of `COLUMNS`. None is a count that nobody can tell."""


@dataclass(frozen=True)
class Line:
    """The part of one sink in one checkpoint."""

    checkpoint: int
    lineage: str
    sink: str
    counts: Counts
    verdict: Verdict
    differences: tuple[str, ...]
    remarks: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        about = vars(self) | self.counts | {"verdict": self.verdict.value}
        del about["counts"]
        return about


@dataclass(frozen=True)
class Balance:
    """The result of a row-count check.

    `differences`, `remarks` and `unknown`, by sink, belong to no single checkpoint.
    """

    lines: tuple[Line, ...]
    differences: Mapping[str, tuple[str, ...]]
    remarks: Mapping[str, tuple[str, ...]]
    unknown: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def verdict(self) -> Verdict:
        verdicts = {line.verdict for line in self.lines}
        if Verdict.DIFFERS in verdicts or any(self.differences.values()):
            return Verdict.DIFFERS
        unknown = Verdict.UNKNOWN in verdicts or any(self.unknown.values()) or not self.lines
        return Verdict.UNKNOWN if unknown else Verdict.BALANCED

    @property
    def findings(self) -> tuple[str, ...]:
        """Return a sentence on every difference, for a person."""
        return (
            *(f"sink {sink}: {text}" for sink, texts in self.differences.items() for text in texts),
            *(
                f"checkpoint {line.checkpoint}, sink {line.sink}: {text}"
                for line in self.lines
                for text in line.differences
            ),
        )

    def by_sink(self) -> dict[str, tuple[int, int]]:
        """Count, by sink, the differences, and the checkpoints of which only the record tells."""
        counts = {}
        for sink in dict.fromkeys((*self.differences, *(line.sink for line in self.lines))):
            lines = [line for line in self.lines if line.sink == sink]
            cannot_tell = bool(self.unknown.get(sink))
            differences = len(self.differences.get(sink, ())) + sum(
                len(line.differences) for line in lines
            )
            counts[sink] = (
                differences,
                sum(cannot_tell or line.verdict is Verdict.UNKNOWN for line in lines),
            )
        return counts

    def totals(self) -> dict[str, Counts]:
        """Sum up the counts by sink, over all checkpoints; None where a checkpoint has None."""
        return {
            sink: {
                name: _total([line.counts[name] for line in self.lines if line.sink == sink])
                for name in COLUMNS
            }
            for sink in dict.fromkeys(line.sink for line in self.lines)
        }

    def to_json(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict.value,
            "checkpoints": [line.to_json() for line in self.lines],
            "totals": self.totals(),
            "differences": {sink: list(texts) for sink, texts in self.differences.items() if texts},
            "remarks": {sink: list(texts) for sink, texts in self.remarks.items() if texts},
            "unknown": {sink: list(texts) for sink, texts in self.unknown.items() if texts},
        }


def _total(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


# ---------------------------------------------------------------------- facts
@dataclass(frozen=True)
class SinkHoldings:
    """The answers of one sink.

    `holdings` are those on the checkpoints that the sink was asked about, by checkpoint, and `why`
    says why it was not asked about the others.
    """

    holdings: Mapping[int, Holding]
    why: Mapping[int, str]
    audit: Audit
    memory: Mapping[str, int] | None = None
    """The answer of `TwoPhaseCommitSink.committed_checkpoints`."""

    def with_memory_differences(self, sink: str, before: History, after: History) -> SinkHoldings:
        """Add the difference between the memory of the sink and storage.

        `before` and `after` are the checkpoints in storage, read before and after the sink was
        asked.
        """
        memory = compare_sink(sink, self.memory, before, after)
        differences = (
            *self.audit.differences,
            *(() if memory.agrees else (f"its {memory.difference}",)),
        )
        return replace(self, audit=replace(self.audit, differences=differences))


def take_balance(
    store: JobStore,
    sinks: Mapping[str, Sink],
    *,
    quick: bool = False,
    retained: int | None = None,
    last: int | None = None,
) -> Balance:
    """Read storage, ask copies of the sinks, and compare.

    The copies are asked because a driver may use the sinks meanwhile. If a driver ends a checkpoint
    at the same time, everything is read again. `retained` is `retained_checkpoints` as far as it is
    known; records before those, which a zombie has put, are left out. `last` limits the number of
    the newest checkpoints; None means all that storage has. Raises `StorageError` and
    `CorruptRecord`.
    """
    keys = store.record_keys()
    oldest = _oldest_retained(keys, retained) if retained else 0
    if keys and last:
        oldest = max(oldest, keys[-1].checkpoint_id - last + 1)

    def wanted(checkpoint: int) -> bool:
        return checkpoint >= oldest

    for _ in range(_TRIES):
        history = store.history(wanted)
        answers = {
            name: _ask(sink, store.job, history, quick=quick) for name, sink in sinks.items()
        }
        before = keys
        keys = store.record_keys()
        later = history if keys == before else store.history(wanted)
        answers = {
            name: answer.with_memory_differences(name, history, later)
            for name, answer in answers.items()
        }
        now = {complete.checkpoint_id: complete for complete in later}
        if all(now.get(complete.checkpoint_id, complete) == complete for complete in history):
            break
    return balance(history, answers)


def _oldest_retained(keys: Sequence[RecordKey], retained: int) -> int:
    """Find the first checkpoint of the unbroken row that ends with the newest one.

    The driver may retain more checkpoints than is known here. If the row is longer by one, its
    first checkpoint is left out, because retention has freed its key, and a zombie may have put it.
    """
    ids = {key.checkpoint_id for key in keys}
    newest = oldest = max(ids, default=0)
    while oldest - 1 in ids:
        oldest -= 1
    return oldest + (newest - oldest == retained)


def _ask(sink: Sink, job: str, history: History, *, quick: bool) -> SinkHoldings:
    parts = dict[int, Part]()
    why = dict[int, str]()
    try:
        with closing(copy.deepcopy(sink)) as asked:
            asked.open()
            in_doubt = list(asked.in_doubt(job))
            memory = asked.committed_checkpoints(job)
            for complete in history:
                number = complete.checkpoint_id
                part = complete.audited_part(sink.name)
                named = [committable.transaction for committable in part.committables]
                if len(not_among(named, in_doubt)) < len(named):
                    why[number] = "transactions of it are in doubt, so not all of it is visible yet"
                elif not named and complete.record.rows.get(sink.name):
                    why[number] = _AT_LEAST_ONCE
                else:
                    parts[number] = part
            audit = _audited(asked, job, list(parts.values()), quick=quick)
            if _AT_LEAST_ONCE in why.values():  # no record names their writers
                audit = replace(audit, differences=(), remarks=audit.remarks + audit.differences)
            return SinkHoldings(dict(zip(parts, audit.holdings, strict=True)), why, audit, memory)
    except Exception as error:
        reason = f"sink {sink.name!r} cannot be asked: {error}"
        return SinkHoldings({}, {complete.checkpoint_id: reason for complete in history}, Audit([]))


def _audited(sink: Sink, job: str, parts: Sequence[Part], *, quick: bool) -> Audit:
    if isinstance(sink, Auditable):
        return sink.audit(job, parts, quick=quick)
    return Audit(
        [Holding(remarks=(f"{type(sink).__name__} cannot ask {sink.system} for rows",))]
        * len(parts)
    )


# ---------------------------------------------------------------------- the books
def balance(history: History, answers: Mapping[str, SinkHoldings]) -> Balance:
    """Compare the records with the answers, checkpoint by checkpoint.

    There is a line for each retained checkpoint, oldest first, and each sink that is asked or has
    rows in it.
    """
    lines = [
        _line(name, complete, answers.get(name))
        for complete in history
        if not complete.record.restored_from
        for name in dict.fromkeys([*answers, *complete.record.rows])
    ]
    audits = {name: answer.audit for name, answer in answers.items()}
    return Balance(
        tuple(lines),
        {name: audit.differences for name, audit in audits.items()},
        {name: audit.remarks for name, audit in audits.items()},
        {name: audit.unknown for name, audit in audits.items()},
    )


def _line(sink: str, complete: CompletedCheckpoint, answer: SinkHoldings | None) -> Line:
    record = complete.record
    part = complete.audited_part(sink)
    batch = None if sink in record.dead_letters else record.batch_rows
    dead_lettered = record.dead_lettered.get(sink, 0)
    read = record.rows.get(sink, 0) + dead_lettered
    given_up = sum(loss.rows for loss in complete.given_up if loss.sink == sink)
    written = sum((committable.fingerprint for committable in part.committables), Fingerprint())
    holding = answer.holdings.get(record.checkpoint_id) if answer else None
    if answer is None:
        remarks: tuple[str, ...] = ("the job has no sink of this name",)
    elif holding is None:
        remarks = (answer.why[record.checkpoint_id],)
    else:
        remarks = holding.remarks
    differences = [*(holding.differences if holding else ())]
    differences += [
        f"{name} was committed, and the record does not name it: its rows are there beside those "
        "of the record"
        for name in (holding.unexpected if holding else ())
    ]
    if part.committables and read != written.rows + given_up + dead_lettered:
        differences.append(
            f"{read:,} row(s) came to the sink, and its transactions acknowledged {written.rows:,}"
            + (f" beside {dead_lettered:,} dead letters" if dead_lettered else "")
        )
    ledger, present = (holding.fingerprint, holding.rows) if holding else (None, None)
    if ledger and ledger.rows != written.rows:
        differences.append(
            f"the system's ledger has {ledger.rows:,} row(s), and the record {written.rows:,}"
        )
    elif ledger and ledger.hash != written.hash:
        differences.append(
            "the system's ledger and the record have as many rows, but not the same: the hashes "
            "differ"
        )
    committed = ledger.rows if ledger else written.rows
    if present is not None and present != committed:
        changed = "fewer: rows were deleted or changed" if present < committed else "more"
        differences.append(
            f"{present:,} of {committed:,} row(s) are there as they were written, {changed}"
        )
    verdict = Verdict.DIFFERS if differences else Verdict.BALANCED
    if not differences and ledger is None and present is None and (part.committables or read):
        verdict = Verdict.UNKNOWN
    counts = {
        "batch": batch,
        "filtered": None if batch is None else batch - read,
        "read": read,
        "dead_lettered": dead_lettered,
        "pre_committed": written.rows + given_up,
        "given_up": given_up,
        "ledger": ledger.rows if ledger else None,
        "present": present,
    }
    return Line(
        record.checkpoint_id, record.lineage, sink, counts, verdict, tuple(differences), remarks
    )
