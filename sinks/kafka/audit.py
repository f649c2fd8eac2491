"""How many records of transactions consumers can read: counted in the log, by the headers of its record batches.

Each batch there names the producer's id and epoch, which are of one transaction alone. So its records are counted
between the first and the last offset that the producer was told, without a look into them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kafka.errors import OffsetOutOfRangeError, for_code
from kafka.record import MemoryRecords

from sinks.audit import Audit, Holding, Part
from sinks.kafka.cluster import Cluster, Where
from sinks.kafka.commit import made_anew, topics_of
from sinks.progress import progress
from sinks.transaction import Committable

_FETCH_BYTES = 8 << 20
_PAUSE = 0.05

Transaction = tuple[int, int]
"""Producer id and epoch."""


@dataclass
class _Span:
    """A range of offsets in one partition, and whose records are looked for there."""

    first: int
    end: int
    of: dict[Transaction, tuple[int, int]] = field(default_factory=dict)


def audit(cluster: Cluster, parts: Sequence[Part], patience: float) -> Audit:
    """`patience`: seconds to wait for the brokers' markers of what was committed just before."""
    here = cluster.cluster_id()
    ids = cluster.topic_ids(topics_of(committable for part in parts for committable in part.committables))
    policies = {name: cluster.configs("TOPIC", name, ("cleanup.policy",)) for name, id in ids.items() if id}
    compacted = {name for name, policy in policies.items() if "compact" in policy.get("cleanup.policy", "")}

    def unknown(committable: Committable) -> str:
        if committable.proof["cluster"] != here:
            return f"it was written to the cluster {committable.proof['cluster']}, and this is {here}"
        if topic := made_anew(committable, ids):
            return f"topic {topic!r} was deleted, or made anew, since"
        if "spans" not in committable.proof:
            return "its record has no offsets: an older version wrote it, or the brokers did not tell them"
        if some := compacted & committable.proof["spans"].keys():
            return f"topic {', '.join(sorted(some))} is compacted, so records may be gone by its rules"
        return ""

    reasons = [next((reason for its in part.committables if (reason := unknown(its))), "") for part in parts]
    asked = [part for part, reason in zip(parts, reasons, strict=True) if not reason]
    counter = _Counter(cluster, patience)
    spans = _spans(committable for part in asked for committable in part.committables)
    with progress("read the log", sum(span.end - span.first for span in spans.values()), "offsets") as advance:
        for place, span in spans.items():
            counter.count(place, span, advance)

    def holding(part: Part, reason: str) -> Holding:
        names = [_name(committable) for committable in part.committables]
        reason = reason or next((counter.unknown[name] for name in names if name in counter.unknown), "")
        if reason:
            return Holding(remarks=(reason,))
        return Holding(rows=sum(counter.records[name] for name in names))

    return Audit([holding(part, reason) for part, reason in zip(parts, reasons, strict=True)])


def _name(committable: Committable) -> Transaction:
    return committable.transaction["producer_id"], committable.transaction["producer_epoch"]


def _spans(committables: Iterable[Committable]) -> dict[Where, _Span]:
    spans: dict[Where, _Span] = {}
    for committable in committables:
        for topic, its in committable.proof["spans"].items():
            for partition, first, end in its:
                span = spans.setdefault((topic, partition), _Span(first, end))
                span.first, span.end = min(span.first, first), max(span.end, end)
                span.of[_name(committable)] = first, end
    return spans


@dataclass(frozen=True)
class _Counter:
    """Committed records by transaction; or why those of one cannot be told."""

    cluster: Cluster
    patience: float
    records: Counter[Transaction] = field(default_factory=Counter)
    unknown: dict[Transaction, str] = field(default_factory=dict)

    def count(self, place: Where, span: _Span, advance: Callable[[int], None]) -> None:
        where, offset = f"{place[0]}-{place[1]}", span.first
        deadline = time.monotonic() + self.patience
        while offset < span.end:
            fetched = self.cluster.fetch(*place, offset, _FETCH_BYTES)
            start = 0
            if fetched.error_code == OffsetOutOfRangeError.errno:
                start = self.cluster.starts([place])[place]
            if start > offset:
                advance(min(start, span.end) - offset)
                offset = start
                why = f"{where} begins at offset {offset} now: retention, or somebody, has removed records"
                self.unknown.update({name: why for name, (first, _) in span.of.items() if first < offset})
                continue
            if fetched.error_code:
                raise for_code(fetched.error_code)(where)
            before, offset = offset, self._take(fetched, span, offset)
            if offset > before:
                advance(min(offset, span.end) - before)
            elif time.monotonic() < deadline:
                time.sleep(_PAUSE)
            else:
                why = f"readers of {where} are held up at offset {offset}: a transaction is still open there"
                self.unknown.update({name: why for name, (_, end) in span.of.items() if end > offset})
                return

    def _take(self, fetched: Any, span: _Span, offset: int) -> int:
        """Returns the offset after what was fetched."""
        aborted = [(its.producer_id, its.first_offset) for its in fetched.aborted_transactions or ()]
        for batch in _batches(fetched.records):
            if batch.last_offset < offset:
                continue
            offset = batch.last_offset + 1
            name = batch.producer_id, batch.producer_epoch
            if name in span.of and not batch.is_control_batch:
                first, end = span.of[name]
                if not any(id == name[0] and first <= at < end for id, at in aborted):
                    self.records[name] += batch.records_count
        return offset


def _batches(records: Any) -> Iterable[Any]:
    if records:
        several = MemoryRecords(bytes(records))
        while (batch := several.next_batch()) is not None:
            yield batch
