"""What a broker's answer to EndTxn means, and the witness that is asked when it means nothing certain.

The coordinator remembers only the newest transaction of a transactional id, and not for ever. A record of the
transaction itself is the lasting proof: its batch in the log carries producer id and epoch, and the log tells which
transactions it has aborted. "Fenced" or "not found" alone is never taken for lost, nor for committed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kafka.errors import OffsetOutOfRangeError, for_code
from kafka.record import MemoryRecords

from sinks.kafka.cluster import Answer, Cluster
from sinks.kafka.errors import NotYetKnown
from sinks.transaction import CommitOutcome, Committable

INVALID_PRODUCER_EPOCH, INVALID_TXN_STATE, INVALID_PRODUCER_ID_MAPPING = 47, 48, 49
PRODUCER_FENCED, TRANSACTIONAL_ID_NOT_FOUND = 90, 105
TRANSACTIONAL_ID_AUTHORIZATION_FAILED, CLUSTER_AUTHORIZATION_FAILED = 53, 31

ASK_THE_WITNESS = {
    INVALID_PRODUCER_EPOCH,
    INVALID_TXN_STATE,
    INVALID_PRODUCER_ID_MAPPING,
    PRODUCER_FENCED,
    TRANSACTIONAL_ID_NOT_FOUND,
}
"""The coordinator has ended this transaction, either way, or forgotten it."""

NOT_ALLOWED = {TRANSACTIONAL_ID_AUTHORIZATION_FAILED, CLUSTER_AUTHORIZATION_FAILED}


def made_anew(committable: Committable, ids: Mapping[str, str | None]) -> str | None:
    """A topic that the transaction wrote to and that is gone, or another one of that name now. `ids` are those of the
    topics as they are."""
    return next((name for name, id in committable.proof.get("topic_ids", {}).items() if ids.get(name) != id), None)


def places_of(committable: Committable) -> dict[tuple[str, int], int]:
    """Topics and partitions that the transaction wrote to, as far as the brokers have told, and the offset of its first
    record there."""
    proof = committable.proof
    spans = proof.get("spans") or {proof["topic"]: [[proof["partition"], proof["offset"]]]}
    return {(topic, partition): first for topic, its in spans.items() for partition, first, *_ in its}


def of_commit(cluster: Cluster, committable: Committable, answer: Answer) -> CommitOutcome:
    """The outcome that the answer to EndTxn(commit) means. Raises what may change by asking again."""
    if isinstance(answer, Exception):
        raise answer
    if answer == 0:
        return CommitOutcome.COMMITTED
    name = committable.transaction["transactional_id"]
    if answer in NOT_ALLOWED:
        return CommitOutcome.unknown(
            f"the driver's principal may not end transaction {name} ({for_code(answer).message}): give it the ACLs "
            "Write and Describe on transactional ids with the prefix 'tpc.', and start the query again"
        )
    if answer in ASK_THE_WITNESS:
        return witnessed(cluster, committable, for_code(answer).message)
    raise NotYetKnown(f"{name}: {for_code(answer).message}")


def witnessed(cluster: Cluster, committable: Committable, answer: str) -> CommitOutcome:
    """What the log says about the record that the committable names. `answer` is why it is asked."""
    identity, proof = committable.transaction, committable.proof
    topic, partition, offset = proof["topic"], proof["partition"], proof["offset"]
    about = f"{identity['transactional_id']} (producer {identity['producer_id']}, epoch {identity['producer_epoch']})"
    where = f"{topic}-{partition} at offset {offset}"
    by_hand = "Look for its rows in the topic; they are either all there or none"

    known = proof.get("topic_ids", {}).get(topic)
    if known and cluster.topic_ids([topic])[topic] not in (known, None):
        return CommitOutcome.unknown(
            f"the coordinator does not know {about} any more ({answer}), and its topic {topic!r} was deleted and made "
            "anew: its records there are gone, whether they were committed before or not"
        )
    found = cluster.fetch(topic, partition, offset)
    if found.error_code == OffsetOutOfRangeError.errno:
        return CommitOutcome.unknown(
            f"the coordinator does not know {about} any more ({answer}), and its record {where} is gone (the log "
            f"starts at {found.log_start_offset}): retention or truncation was quicker. {by_hand}"
        )
    if found.error_code:
        raise for_code(found.error_code)(where)
    if offset >= found.last_stable_offset:
        raise NotYetKnown(
            f"{about} is ended ({answer}), but readers are held up before its record {where}: the last stable offset "
            f"is {found.last_stable_offset}, so a transaction is still open there"
        )
    batch = _batch_at(found.records, offset)
    if (
        batch is None
        or not batch.is_transactional
        or batch.is_control_batch
        or batch.records_count == 0  # left over by compaction to remember the producer
        or (batch.producer_id, batch.producer_epoch) != (identity["producer_id"], identity["producer_epoch"])
    ):
        return CommitOutcome.unknown(
            f"the coordinator does not know {about} any more ({answer}), and {where} is not its record: the topic was "
            f"compacted, or deleted and made anew. {by_hand}"
        )
    aborted = found.aborted_transactions or ()
    if any(one.producer_id == identity["producer_id"] and one.first_offset <= offset for one in aborted):
        return CommitOutcome.lost(f"the broker has aborted {about} ({answer}): its record {where} is marked so")
    return CommitOutcome.COMMITTED


def _batch_at(records: Any, offset: int) -> Any:
    if not records:
        return None
    batch = MemoryRecords(bytes(records)).next_batch()
    return batch if batch is not None and batch.base_offset <= offset <= batch.last_offset else None
