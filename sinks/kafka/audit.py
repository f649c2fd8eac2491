"""How many records of transactions consumers can read, counted in the log.

The headers of the record batches there name the producer's id and epoch, which belong to one
transaction alone. So the records of a transaction are counted between its first and its last
offset, as the brokers told the producer, and are not read themselves.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from kafka.errors import OffsetOutOfRangeError, for_code
from tenacity import retry, retry_if_exception_type, stop_after_attempt

from sinks._util.progress import progress
from sinks.audit import Audit, Holding, Part
from sinks.kafka.cluster import Cluster
from sinks.kafka.commit import made_anew, topics_of
from sinks.kafka.connection import Where
from sinks.kafka.errors import patiently
from sinks.kafka.internals import MemoryRecords
from sinks.transaction import Committable

_FETCH_BYTES = 8 << 20
_PAUSE = 0.05

ProducerEpoch = tuple[int, int]
"""The producer id and epoch of a transaction, by which its records are known."""


Spans = dict[ProducerEpoch, tuple[int, int]]
"""The transactions in one partition, each with its first offset and the one after its last."""


@retry(
    retry=retry_if_exception_type(OffsetOutOfRangeError), stop=stop_after_attempt(3), reraise=True
)
def audit(cluster: Cluster, parts: Sequence[Part], patience: float) -> Audit:
    """Count the records of each part that consumers can read.

    `patience` is how many seconds to wait for the brokers' markers of transactions that were
    committed just before. If retention removes records during the count, the count starts again.
    """
    here = cluster.cluster_id()
    ids = cluster.topics.ids(
        topics_of(committable for part in parts for committable in part.committables)
    )
    policies = {
        name: cluster.topics.settings(name, ("cleanup.policy",)) for name, id in ids.items() if id
    }
    compacted = {
        name for name, policy in policies.items() if "compact" in policy.get("cleanup.policy", "")
    }

    def unknown(committable: Committable) -> str:
        if (there := committable.proof.get("cluster", here)) != here:
            return f"it was written to the cluster {there}, and this is {here}"
        if topic := made_anew(committable, ids):
            return f"topic {topic!r} was deleted, or made anew, since"
        if "spans" not in committable.proof:
            return (
                "its record has no offsets: an older version wrote it, or the brokers did not tell "
                "them"
            )
        if some := compacted & committable.proof["spans"].keys():
            return (
                f"topic {', '.join(sorted(some))} is compacted, so records may be gone by its rules"
            )
        return ""

    reasons = [
        next((reason for its in part.committables if (reason := unknown(its))), "")
        for part in parts
    ]
    asked = [part for part, reason in zip(parts, reasons, strict=True) if not reason]
    logs = _logs(committable for part in asked for committable in part.committables)
    starts = cluster.topics.logs(logs).starts if logs else {}
    records = Counter[ProducerEpoch]()
    hidden = dict[ProducerEpoch, str]()
    ends = {place: max(end for _, end in spans.values()) for place, spans in logs.items()}
    total = sum(
        end - min(spans.values())[0]
        for end, spans in zip(ends.values(), logs.values(), strict=True)
    )
    with progress("read the log", total, "offsets") as advance:
        for place, spans in logs.items():
            where = f"{place[0]}-{place[1]}"
            start = starts.get(place, 0)
            why = (
                f"{where} begins at offset {start} now: retention, or somebody, has removed records"
            )
            hidden |= {name: why for name, (first, _) in spans.items() if first < start}
            offset = max(start, min(spans.values())[0])
            for batch, visible in batches(cluster, place, offset, ends[place], patience):
                advance(batch.last_offset + 1 - offset)
                offset = batch.last_offset + 1
                name = batch.producer_id, batch.producer_epoch
                if visible and name in spans:
                    records[name] += batch.records_count
            why = (
                f"readers of {where} are held up at offset {offset}: a transaction is still open "
                "there"
            )
            hidden |= {name: why for name, (_, end) in spans.items() if end > offset}

    def holding(part: Part, reason: str) -> Holding:
        names = [_name(committable) for committable in part.committables]
        reason = reason or next((hidden[name] for name in names if name in hidden), "")
        if reason:
            return Holding(remarks=(reason,))
        return Holding(rows=sum(records[name] for name in names))

    return Audit([holding(part, reason) for part, reason in zip(parts, reasons, strict=True)])


def _name(committable: Committable) -> ProducerEpoch:
    return committable.transaction["producer_id"], committable.transaction["producer_epoch"]


def _logs(committables: Iterable[Committable]) -> dict[Where, Spans]:
    logs: dict[Where, Spans] = {}
    for committable in committables:
        for topic, its in committable.proof["spans"].items():
            for partition, first, end, *_ in its:
                logs.setdefault((topic, partition), {})[_name(committable)] = first, end
    return logs


def batches(
    cluster: Cluster, place: Where, offset: int, end: int, patience: float
) -> Iterator[tuple[Any, bool]]:
    """Yield record batches, and whether readers with read_committed get each.

    The batches are those from `offset` to before `end`. The call stops early if readers are held up
    for `patience` seconds. Raises the error that a broker answers.
    """
    deadline = time.monotonic() + patience
    while offset < end:
        fetched = patiently(partial(cluster.topics.fetch, *place, offset, _FETCH_BYTES), patience)
        before = offset
        if fetched.error_code:
            raise for_code(fetched.error_code)(f"{place[0]}-{place[1]}")
        aborted = sorted(
            (its.first_offset, its.producer_id) for its in fetched.aborted_transactions or ()
        )
        hidden = set[int]()
        several = MemoryRecords(bytes(fetched.records or b""))
        while (batch := several.next_batch()) is not None:
            while aborted and aborted[0][0] <= batch.last_offset:
                hidden.add(aborted.pop(0)[1])
            if batch.is_control_batch:
                hidden.discard(batch.producer_id)
            if batch.last_offset >= offset:
                offset = batch.last_offset + 1
                yield batch, not batch.is_control_batch and batch.producer_id not in hidden
        if offset == before:
            if time.monotonic() > deadline:
                return
            time.sleep(_PAUSE)
