"""The commit of transactions that tasks left open, and the outcome of each.

This module says what the coordinator's answer to EndTxn means. If the answer proves nothing, the
sink asks a witness.

The coordinator remembers only the newest transaction of a transactional id, and not permanently.
The lasting proof is a record of the transaction itself. The batch of the record in the log carries
the producer's id and epoch, and the log says which transactions it has aborted. The answers
"fenced" and "not found" alone prove neither a loss nor a commit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from kafka.errors import (
    ClusterAuthorizationFailedError,
    InvalidProducerEpochError,
    InvalidProducerIdMappingError,
    InvalidTxnStateError,
    KafkaError,
    OffsetOutOfRangeError,
    ProducerFencedError,
    TransactionalIdAuthorizationFailedError,
    TransactionalIdNotFoundError,
    for_code,
)

from sinks._util.log import get_logger
from sinks._util.progress import progress
from sinks._util.threads import side_by_side
from sinks.kafka.cluster import ABORTED_STATES, COMMITTED_STATES, Cluster, EndResult
from sinks.kafka.errors import NotYetKnown
from sinks.kafka.internals import MemoryRecords
from sinks.kafka.topics import Ids, Logs
from sinks.transaction import CommitOutcome, CommitState, Committable, Identity

logger = get_logger(__name__)

INVALID_TXN_STATE = InvalidTxnStateError.errno
ASK_THE_WITNESS = {
    INVALID_TXN_STATE,
    InvalidProducerEpochError.errno,
    InvalidProducerIdMappingError.errno,
    ProducerFencedError.errno,
    TransactionalIdNotFoundError.errno,
}
"""Answers of a coordinator that has ended the transaction, by commit or abort, or forgotten it."""
_NOT_ALLOWED = {
    TransactionalIdAuthorizationFailedError.errno,
    ClusterAuthorizationFailedError.errno,
}

_ENDED_TOGETHER = 1000
"""How many requests are in flight at once."""
_WITNESS_THREADS = 8
_BY_HAND = "Look for its rows in the topic; they are either all there or none"


@dataclass(frozen=True)
class Commit:
    """The commit of one sink's transactions.

    * `servers` and `target` name the brokers and the target in messages.
    * `patiently` repeats a question while the brokers are at work.
    """

    sink: str
    brokers: Cluster
    servers: str
    target: str
    patiently: Callable[[Callable[[], Any]], Any]

    def of(self, committables: Sequence[Committable]) -> Sequence[CommitOutcome | Exception]:
        names = topics_of(committables)
        places = places_of_all(committables)
        here, ids, logs, fences = self.patiently(lambda: self.brokers.before_commit(names, places))
        if there := {committable.proof.get("cluster", here) for committable in committables} - {
            here
        }:
            unknown = CommitOutcome.unknown(  # this one may have a transaction of that name too
                f"it was written to the cluster {', '.join(there)}, and {self.servers} is {here}: "
                "point the sink at the old one"
            )
            return [unknown] * len(committables)
        others: dict[int, Callable[[], CommitOutcome]] = {
            at: partial(self._without_its_topic, c, ids)
            for at, c in enumerate(committables)
            if made_anew(c, ids)
        }
        others = self._interrupted(committables, logs) | others
        whole = [at for at in range(len(committables)) if at not in others]
        answers, ids_after = self._end(
            [committables[at].transaction for at in whole], names, fences=fences
        )
        others |= {
            at: partial(self._answered, committables[at], answer)
            for at, answer in zip(whole, answers, strict=True)
            if answer != 0
        }
        outcomes = dict(
            zip(others, side_by_side(_tried, others.values(), _WITNESS_THREADS), strict=True)
        )
        if not others and not any(
            made_anew(committable, ids) for committable in committables for ids in ids_after
        ):
            return [CommitOutcome.COMMITTED] * len(committables)
        # one may have been made anew while the requests were under way
        ids = self.brokers.topics.ids(names)
        for at in whole:
            committed = outcomes.get(at, CommitOutcome.COMMITTED) == CommitOutcome.COMMITTED
            if committed and (topic := made_anew(committables[at], ids)):
                outcomes[at] = CommitOutcome.unknown(
                    f"it was committed while its topic {topic!r} was deleted: it is unknown "
                    "whether anybody has read its records. Look for them in the topic: all of "
                    "them are there, or none"
                )
        return [
            self._to_the_same(c, outcomes.get(at, CommitOutcome.COMMITTED))
            for at, c in enumerate(committables)
        ]

    def _to_the_same(
        self, committable: Committable, outcome: CommitOutcome | Exception
    ) -> CommitOutcome | Exception:
        """Turn LOST into UNKNOWN if the sink's target is not the one that the rows were written to.

        The coordinator writes the rows of a LOST transaction again, and they would go to the target
        of now.
        """
        mismatch = committable.target_mismatch(self.target)
        if mismatch and isinstance(outcome, CommitOutcome) and outcome.state is CommitState.LOST:
            return CommitOutcome.unknown(f"{outcome.reason}; {mismatch}")
        return outcome

    def _without_its_topic(self, committable: Committable, ids: Ids) -> CommitOutcome:
        """Settle a transaction after one of its topics was deleted, and the records there with it.

        If the transaction was committed before, it stays COMMITTED, as with any topic that somebody
        deletes. Otherwise the driver aborts it, so that all its rows are written again. Raises
        NotYetKnown if nobody has created the topic again.
        """
        topic = made_anew(committable, ids)
        name = committable.transaction["transactional_id"]
        if self.brokers.ended_in(COMMITTED_STATES, committable.transaction):
            logger.warning("topic %r was deleted after %s was committed", topic, name)
            return CommitOutcome.COMMITTED
        if ids[str(topic)] is None:
            raise NotYetKnown(
                f"{name}: there is no topic {topic!r} any more: create it, and its rows are "
                "written again"
            )
        return self._aborted(
            committable,
            f"its topic {topic!r} was deleted and made anew after its rows were written",
        )

    def _interrupted(
        self, committables: Sequence[Committable], logs: Logs
    ) -> dict[int, Callable[[], CommitOutcome]]:
        """Return an abort for each open transaction that is not whole, by its place.

        An EndTxn would report such a transaction as committed. After an abort, all its rows are
        written again.
        """
        ended = in_part(committables, logs)
        names = {at: committables[at].transaction["transactional_id"] for at in ended}
        states = self.brokers.states(names.values())
        return {
            at: partial(self._aborted, committables[at], why)
            for at, why in ended.items()
            if states.get(names[at]) == ongoing(committables[at])
        }

    def _aborted(self, committable: Committable, why: str) -> CommitOutcome:
        (answer,) = self.brokers.end([committable.transaction], commit=False)
        if answer == 0:
            return CommitOutcome.lost(
                f"{why}, so {committable.transaction['transactional_id']} was aborted"
            )
        return self._answered(committable, answer)

    def _end(
        self, transactions: Sequence[Identity], topics: Iterable[str], *, fences: bool
    ) -> tuple[list[EndResult], list[Ids]]:
        answers = list[EndResult]()
        ids_after = list[Ids]()
        with progress(f"sink {self.sink}: commit", len(transactions), "transactions") as advance:
            for start in range(0, len(transactions), _ENDED_TOGETHER):
                some = transactions[start : start + _ENDED_TOGETHER]
                answered, ids = self.brokers.commit(some, topics, fences=fences)
                answers += answered
                ids_after += ids
                advance(len(some))
        return answers, ids_after

    def _answered(self, committable: Committable, answer: EndResult) -> CommitOutcome:
        """Return the outcome that the answer to EndTxn(commit) means.

        Raises the error, or NotYetKnown, if asking again may change the answer.
        """
        if isinstance(answer, Exception):
            raise answer
        name = committable.transaction["transactional_id"]
        if answer in _NOT_ALLOWED:
            return CommitOutcome.unknown(
                f"the driver's principal may not end transaction {name} "
                f"({for_code(answer).message}): give it the ACLs Write and Describe on "
                "transactional ids with the prefix 'tpc.', and start the query again"
            )
        if answer in ASK_THE_WITNESS:
            return self._witnessed(committable, for_code(answer).message)
        raise NotYetKnown(f"{name}: {for_code(answer).message}")

    def _witnessed(self, committable: Committable, answer: str) -> CommitOutcome:
        """Ask the witnesses, which are the records that begin a partition, and return the outcome.

        The first witness that proves an outcome decides. If none does, the transaction's
        coordinator may know of an abort. `answer` is the reason for asking, and part of the
        outcome's message.
        """
        if not committable.proof:
            return CommitOutcome.unknown(
                f"{_forgotten(committable, answer)} only the record in storage told where its rows "
                f"are. {_BY_HAND}"
            )
        (first, (offset, *_)), *others = places_of(committable).items()
        unknown = self._record_tells(committable, *first, offset, answer)
        if unknown.state is not CommitState.UNKNOWN:
            return unknown
        starts = self.brokers.topics.logs([place for place, _ in others]).starts if others else {}
        for place, (offset, *_) in others:
            if starts.get(place, 0) <= offset:
                with suppress(KafkaError, NotYetKnown):
                    outcome = self._record_tells(committable, *place, offset, answer)
                    if outcome.state is not CommitState.UNKNOWN:
                        return outcome
        if self.brokers.ended_in(ABORTED_STATES, committable.transaction):
            return CommitOutcome.lost(
                f"its coordinator has aborted {_about(committable)} ({answer})"
            )
        return unknown

    def _record_tells(
        self, committable: Committable, topic: str, partition: int, offset: int, answer: str
    ) -> CommitOutcome:
        """Return the outcome that one record of the transaction proves, or UNKNOWN.

        Raises NotYetKnown while readers are held up before the record, and an error of Kafka if the
        broker does not return the record.
        """
        about = _about(committable)
        forgotten = _forgotten(committable, answer)
        where = f"{topic}-{partition} at offset {offset}"
        producer = committable.transaction["producer_id"]
        known = committable.proof.get("topic_ids", {}).get(topic)
        if known and self.brokers.topics.ids([topic])[topic] not in (known, None):
            return CommitOutcome.unknown(
                f"{forgotten} its topic {topic!r} was deleted and made anew: its records there are "
                "gone, whether they were committed before or not"
            )
        fetched = self.brokers.topics.fetch(topic, partition, offset)
        if fetched.error_code == OffsetOutOfRangeError.errno:
            start = self.brokers.topics.logs([(topic, partition)]).starts.get(
                (topic, partition), -1
            )
            return CommitOutcome.unknown(
                f"{forgotten} its record {where} is gone (the log starts at {start}): retention or "
                f"truncation was quicker. {_BY_HAND}",
                expired=offset < start,
            )
        if fetched.error_code:
            raise for_code(fetched.error_code)(where)
        if offset >= fetched.last_stable_offset:
            raise NotYetKnown(
                f"{about} is ended ({answer}), but readers are held up before its record {where}: "
                f"the last stable offset is {fetched.last_stable_offset}, so a transaction is "
                "still open there"
            )
        batch = _batch_at(fetched.records, offset)
        if (
            batch is None
            or not batch.is_transactional
            or batch.is_control_batch
            or batch.records_count == 0  # left over by compaction to remember the producer
            or (batch.producer_id, batch.producer_epoch)
            != (producer, committable.transaction["producer_epoch"])
        ):
            return CommitOutcome.unknown(
                f"{forgotten} {where} is not its record: the topic was compacted, or deleted and "
                f"made anew. {_BY_HAND}",
                expired=batch is None or batch.records_count == 0,
            )
        aborted = fetched.aborted_transactions or ()
        if any(its.producer_id == producer and its.first_offset <= offset for its in aborted):
            return CommitOutcome.lost(
                f"the broker has aborted {about} ({answer}): its record {where} is marked so"
            )
        return CommitOutcome.COMMITTED


def topics_of(committables: Iterable[Committable]) -> set[str]:
    return {name for committable in committables for name in committable.proof.get("topic_ids", ())}


def places_of_all(committables: Iterable[Committable]) -> set[tuple[str, int]]:
    return {place for committable in committables for place in places_of(committable)}


def in_part(committables: Sequence[Committable], logs: Logs) -> dict[int, str]:
    """Return why transactions lack some of their partitions or records, by place in `committables`.

    A transaction without such a reason is left out. The coordinator does not know that something is
    missing, and would commit the rest. A transaction that was ended as a whole looks the same here,
    and only its coordinator can tell.
    """
    reasons: dict[int, str] = {}
    for at, committable in enumerate(committables):
        producer = committable.transaction["producer_id"], committable.transaction["producer_epoch"]
        for place, (first, *others) in places_of(committable).items():
            where = f"{place[0]}-{place[1]}"
            start = logs.starts.get(place, first)
            last = others[1] if len(others) > 1 else None
            there = logs.open_in.get(place, {producer: (first, last)})
            if producer not in there:
                reasons[at] = (
                    f"somebody has ended it in {where} alone (kafka-transactions.sh abort), or all "
                    "its records there are lost"
                )
            elif others and there[producer][0] != first:
                reasons[at] = (
                    f"in {where} the open transaction begins at offset {there[producer][0]}, and "
                    f"not at {first}: it has what an attempt has written after its abort, or "
                    "somebody has ended it there and it went on"
                )
            elif last not in (None, there[producer][1]):
                reasons[at] = (
                    f"{where} has lost records that a broker had acknowledged: a replica that "
                    "lagged behind leads it now, or a machine or disk failed"
                )
            elif start > first:
                reasons[at] = (
                    f"{where} begins at offset {start} now, so its records from {first} on are "
                    "gone: somebody has deleted them (kafka-delete-records.sh), or retention has, "
                    "which goes by their timestamps"
                )
    return reasons


def ongoing(committable: Committable) -> tuple[Identity, str]:
    """Return an open transaction in the form that `Cluster.states` gives it."""
    return dict(committable.transaction), "Ongoing"


def made_anew(committable: Committable, ids: Ids) -> str | None:
    """Return a topic that the transaction wrote to and that was deleted, or recreated since.

    Return None if there is no such topic. `ids` are the ids of the topics as they are now.
    """
    return next(
        (
            name
            for name, id in committable.proof.get("topic_ids", {}).items()
            if ids.get(name) != id
        ),
        None,
    )


def places_of(committable: Committable) -> dict[tuple[str, int], list[int]]:
    """Return the topics and partitions that the transaction wrote to, as far as the brokers told.

    Each has a list of numbers, the first of which is the offset of the first record there. The next
    two are the offset after the last record and the last sequence number. An older version of this
    library wrote the first number only. Without proof, the result is empty.
    """
    proof = committable.proof
    spans = proof.get("spans") or (
        {proof["topic"]: [[proof["partition"], proof["offset"]]]} if proof else {}
    )
    return {
        (topic, partition): its for topic, several in spans.items() for partition, *its in several
    }


def _about(committable: Committable) -> str:
    its = committable.transaction
    return (
        f"{its['transactional_id']} (producer {its['producer_id']}, epoch {its['producer_epoch']})"
    )


def _forgotten(committable: Committable, answer: str) -> str:
    return f"the coordinator does not know {_about(committable)} any more ({answer}), and"


def _tried(question: Callable[[], CommitOutcome]) -> CommitOutcome | Exception:
    try:
        return question()
    except Exception as error:
        return error


def _batch_at(records: Any, offset: int) -> Any:
    if not records:
        return None
    batch = MemoryRecords(bytes(records)).next_batch()
    return batch if batch is not None and batch.base_offset <= offset <= batch.last_offset else None
