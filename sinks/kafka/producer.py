"""What a task does with a Kafka producer: one transaction, from begin to a sealed one that any process can finish."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import pyarrow as pa

from sinks.errors import BadValue, ConfigurationError
from sinks.kafka.memory import Mark
from sinks.transaction import Committable

logger = logging.getLogger(__name__)

STATS_INTERVAL_MS = 20
"""librdkafka tells producer id and epoch in its statistics only."""

METADATA_TIMEOUT = 30.0
"""Seconds that a broker may take to tell about a topic."""

MARK_TIMEOUT = 30.0
"""Seconds that the brokers may take to add a group's offset to a transaction."""

_SETTLE_TIMEOUT = 5.0
_STATISTICS_TIMEOUT = 10.0
LOOK_INTERVAL = 10.0
"""Seconds without an acknowledgement until a producer looks for its topics."""
LOOK_TIMEOUT = 1.0

NO_RIGHTS_ON_GROUP = (
    "the principal may not use the consumer group that remembers the job's checkpoints (ACL: Read on groups with the "
    "prefix 'tpc.'; or remember=False, and a checkpoint storage that was set back goes unnoticed)"
)

_CONFIGURATION = {
    "TOPIC_AUTHORIZATION_FAILED": "the principal may not write to the topic (ACL: Write and Describe on the topic, and "
    "Read unless remember=False)",
    "TRANSACTIONAL_ID_AUTHORIZATION_FAILED": "the principal may not use the transactional id (ACL: Write and Describe "
    "on transactional ids with the prefix 'tpc.')",
    "GROUP_AUTHORIZATION_FAILED": NO_RIGHTS_ON_GROUP,
    "CLUSTER_AUTHORIZATION_FAILED": "the principal lacks a right on the cluster (ACL: IdempotentWrite)",
    "INVALID_TRANSACTION_TIMEOUT": "the broker's transaction.max.timeout.ms is below the sink's transaction_timeout; "
    "raise the one or lower the other",
    "UNKNOWN_TOPIC_OR_PART": "the topic does not exist",
    "_UNKNOWN_TOPIC": "the topic does not exist",
    "_UNKNOWN_PARTITION": "the topic has no such partition",
    "_AUTHENTICATION": "the brokers refuse user name, password or certificate",
}
_BAD_VALUES = {
    "MSG_SIZE_TOO_LARGE": "a record is larger than the producer's message.max.bytes or the topic's max.message.bytes, "
    "or so are all that go together, which options={'batch.size': …} (bytes) bounds",
    "INVALID_RECORD": "the broker refuses a record of this kind in this topic (a compacted topic needs keys)",
    "INVALID_TIMESTAMP": "the timestamp of a record is out of the range that the topic allows",
}

NO_TOPIC = ("UNKNOWN_TOPIC_OR_PART", "_UNKNOWN_TOPIC")
_PURGED = ("_PURGE_QUEUE", "_PURGE_INFLIGHT")
_AFTER_A_FAILURE = (*_PURGED, "_STATE")
"""What librdkafka says of records after one has failed the transaction; of that one it may tell later."""

_FENCED = (
    "the broker has ended this transaction: it was open for longer than the sink's transaction_timeout, or another "
    "attempt or driver of this job has taken its place"
)
_NOBODY = "no Kafka broker answers: check that they run, and that this machine reaches them"
_HINTS = {
    **dict.fromkeys(("_FATAL", "_FENCED", "PRODUCER_FENCED", "INVALID_PRODUCER_EPOCH", "INVALID_TXN_STATE"), _FENCED),
    **dict.fromkeys(("_TRANSPORT", "_ALL_BROKERS_DOWN", "_RESOLVE"), _NOBODY),
}


def failure(name: str, text: str, what: str) -> Exception:
    """The exception for a librdkafka error by its name: a SinkError if trying again cannot help."""
    if name in _CONFIGURATION:
        return ConfigurationError(f"{what}: {_CONFIGURATION[name]} ({name}: {text})")
    if name in _BAD_VALUES:
        return BadValue(f"{what}: {_BAD_VALUES[name]} ({name}: {text})")
    hint = f"{_HINTS[name]} " if name in _HINTS else ""
    return RuntimeError(f"{what}: {hint}({name}: {text})")


class TransactionalProducer(ABC):
    """One transaction of one producer. `transactional_id` names it; `default_topic` is for rows without a topic; `mark`
    is what the transaction carries for the brokers' memory. `columns.refused` keeps away rows that none can write."""

    def __init__(self, transactional_id: str, default_topic: str | None, mark: Mark | None) -> None:
        self.transactional_id = transactional_id
        self.default_topic = default_topic
        self._mark = mark
        self._marking: Future[Any] | None = None
        self.topic_ids: dict[str, str] = {}
        """Asked for before the first record for a topic, so a topic that is made anew later has another one."""
        self.sent = self.delivered = self._undelivered = 0
        self._failure: Exception | None = None
        self._purged: tuple[str, Exception] | None = None
        """Of records that librdkafka threw away."""
        self._cluster = ""
        self._producer: tuple[int, int] | None = None
        self._witness: tuple[str, int, int] | None = None
        self._progress, self._next_look, self._missing = -1, 0.0, set[str]()
        self._spans: dict[tuple[str, int], list[int]] = {}

    @abstractmethod
    def begin(self, timeout: float) -> None:
        """Fence and abort whoever else has the id, and begin. At most `timeout` seconds."""

    @abstractmethod
    def write(self, batch: pa.RecordBatch) -> None:
        """Produce the rows. Waits while the queue is full; raises what a delivery that failed means."""

    @abstractmethod
    def partitions(self, topic: str, wanted: int) -> int:
        """How many the topic has, of which a row asks for this one: they may have become more."""

    @abstractmethod
    def _send_mark(self, mark: Mark, topic: str) -> Any:
        """Add the mark to the transaction, in a thread of its own: the answer goes to `_check_mark`."""

    @abstractmethod
    def _check_mark(self, answer: Any) -> None:
        """Raise what the answer means, if it is an error."""

    @abstractmethod
    def flush(self, timeout: float) -> None:
        """Return when every record sent was acknowledged by the broker, or raise what went wrong with one."""

    @abstractmethod
    def _is_missing(self, topic: str) -> bool:
        """Whether a broker says, soon, that there is no such topic."""

    @abstractmethod
    def _poll(self) -> None:
        """Take what the brokers have told. Waits a tenth of a second for it, at most."""

    @abstractmethod
    def _commit(self, timeout: float) -> None: ...

    @abstractmethod
    def abort(self, timeout: float) -> None:
        """Throw all away."""

    @abstractmethod
    def close(self) -> None:
        """Release the producer; an open transaction stays open."""

    def commit(self, timeout: float) -> None:
        """Flush and commit."""
        self.flush(timeout)
        self.end_mark()
        self._commit(timeout)

    def seal(self, timeout: float) -> Committable:
        """Flush, and leave the transaction open at the broker for somebody else to finish: by its name there. The proof
        says where one of its records lies; the ids of all topics that it wrote to; and in `spans`, by topic: partition,
        offset of the first record there, and the one after the last, unless a broker did not tell an offset."""
        self.flush(timeout)
        self.end_mark()
        deadline = time.monotonic() + _STATISTICS_TIMEOUT
        while self._producer is None and time.monotonic() < deadline:
            self._poll()
            self._raise_failure()
        return self._sealed()

    def _begin_mark(self, topic: str) -> None:
        """Once, as soon as there is a topic: the brokers take some time for it, in which records are written."""
        mark, self._mark = self._mark, None
        if mark:
            executor = ThreadPoolExecutor(1, "kafka-mark")
            self._marking = executor.submit(self._send_mark, mark, topic)
            executor.shutdown(wait=False)

    def end_mark(self) -> None:
        """Return when the mark is part of the transaction, or raise why it is not."""
        marking, self._marking = self._marking, None
        if marking:
            self._check_mark(marking.result())

    def _settle(self) -> None:
        """Before an abort: librdkafka tells the broker nothing if it believes that no partition has joined yet, which a
        request under way may be about to change."""
        try:
            self.flush(_SETTLE_TIMEOUT)
        except Exception as error:
            logger.debug("flush before the abort of %s: %s", self.transactional_id, error)
        self._await_mark()

    def _await_mark(self) -> None:
        """librdkafka takes no other call on the transaction, and not its own end, before."""
        if self._marking:
            wait([self._marking])

    def _topic_has(self, topic: str, id: str) -> None:
        """librdkafka writes ids in another alphabet of base64 than Kafka does."""
        self._begin_mark(topic)
        self.topic_ids[topic] = id.rstrip("=").replace("+", "-").replace("/", "_")

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._marking and self._marking.done():
            self.end_mark()

    def _cause(self, name: str, error: Exception) -> Exception:
        """Of this error of librdkafka's; itself, if nothing else is told in time."""
        deadline = time.monotonic() + _SETTLE_TIMEOUT
        try:
            while name in _AFTER_A_FAILURE and self._is_untold() and time.monotonic() < deadline:
                self._raise_failure()
                self._poll()
            self._await_mark()  # with a mark that is refused, all that follows is
            self._raise_failure()
        except Exception as cause:
            return cause
        return error

    def _is_untold(self) -> bool:
        """Whether reports of records are to come."""
        return self.delivered + self._undelivered < self.sent

    def _failed(self, name: str, text: str, topic: str, records: int) -> None:
        """Remember the first failed delivery."""
        self._undelivered += records
        error = failure(name, text, f"{records} record(s) for topic {topic!r} were not taken by the broker")
        if name in _PURGED:
            self._purged = self._purged or (name, error)
        else:
            self._failure = self._failure or error

    def _delivered_at(self, topic: str, partition: int, offset: int, records: int) -> None:
        """Of records that follow one another; offset -1 if the broker did not tell it."""
        self.delivered += records
        if self._witness is None and offset >= 0:
            self._witness = topic, partition, offset
        span = self._spans.setdefault((topic, partition), [offset, offset])
        span[:] = min(span[0], offset), max(span[1], offset + records)

    def _look_for_topics(self) -> None:
        """While records wait: librdkafka waits for a topic that was deleted as for a broker, and says nothing. One that
        is missing at two looks does not come back by itself."""
        now = time.monotonic()
        if self.delivered != self._progress:
            self._progress, self._next_look, self._missing = self.delivered, now + LOOK_INTERVAL, set()
        if now < self._next_look:
            return
        missing = {topic for topic in self.topic_ids if self._is_missing(topic)}
        for topic in missing & self._missing:
            self._failure = self._failure or ConfigurationError(f"topic {topic!r} was deleted while rows went there")
        self._next_look, self._missing = time.monotonic() + LOOK_INTERVAL, missing

    def _is_awaited(self) -> bool:
        """Whether the brokers may still acknowledge what was sent."""
        return self.delivered < self.sent and self._failure is None and self._purged is None

    def _check_delivered(self) -> None:
        self._raise_failure()
        if self._purged:
            raise self._cause(*self._purged)
        if self.delivered != self.sent:
            raise RuntimeError(f"{self.sent - self.delivered} of {self.sent} records were not acknowledged in time")

    def _sealed(self) -> Committable:
        if self._producer is None or self._witness is None:
            missing = "its id and epoch" if self._producer is None else "the offset of any record"
            raise RuntimeError(f"the producer {self.transactional_id} did not tell {missing}")
        producer_id, producer_epoch = self._producer
        topic, partition, offset = self._witness
        spans: dict[str, list[list[int]]] = {}
        for (name, number), (first, end) in sorted(self._spans.items()):
            spans.setdefault(name, []).append([number, first, end])
        told = all(first >= 0 for first, _ in self._spans.values())
        return Committable(
            {
                "transactional_id": self.transactional_id,
                "producer_id": producer_id,
                "producer_epoch": producer_epoch,
            },
            {
                "cluster": self._cluster,
                "topic": topic,
                "partition": partition,
                "offset": offset,
                "topic_ids": self.topic_ids,
                **({"spans": spans} if told else {}),
            },
        )

    def _learn_producer(self, statistics: Mapping[str, Any]) -> None:
        eos = statistics.get("eos", {})
        if self._producer is None and eos.get("producer_id", -1) >= 0:
            self._producer = eos["producer_id"], eos["producer_epoch"]
