"""One transaction of a task, from its begin until it is sealed.

A sealed transaction can be finished by any process. Rows become record batches, several of which
are in flight at once.

All state belongs to the calling thread. The thread of kafka-python only carries bytes, and hands
over the brokers' answers.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, Queue
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from kafka.errors import (
    KafkaConnectionError,
    KafkaTimeoutError,
    for_code,
)

from sinks._util.log import get_logger
from sinks.errors import BadValue, ConfigurationError
from sinks.kafka.cluster import Cluster
from sinks.kafka.errors import ask, failure, is_passing, name_of
from sinks.kafka.memory import Mark
from sinks.kafka.options import ProducerOptions
from sinks.kafka.record_batch import (
    FREE,
    Origin,
    RecordBatchPlan,
    by_topic,
    latest_time,
    record_batch,
)
from sinks.kafka.row_bytes import Numbers
from sinks.kafka.written_topics import WrittenTopic, WrittenTopics
from sinks.transaction import Committable, Identity

logger = get_logger(__name__)

_REQUEST_TIMEOUT = 30.0
"""Seconds that the brokers may take to add partitions or an offset to a transaction, and that a
leader may wait for its replicas."""
_SETTLE_TIMEOUT = 5.0
_REQUEST_BYTES = 4 << 20
"""The bytes of record batches in one request, at most, unless a single one is larger."""
_FIRST_PAUSE = 0.01
_LONGEST_PAUSE = 1.0
_SEQUENCES = 1 << 31
_KNOWN_AGAIN = 5
"""How many of a producer's newest record batches a leader recognizes if they come twice."""
_IN_FLIGHT = 5
"""How many requests to one broker are in flight, at most."""

_OUT_OF_ORDER = "OUT_OF_ORDER_SEQUENCE_NUMBER"
_DUPLICATE = "DUPLICATE_SEQUENCE_NUMBER"


@dataclass(eq=False)
class _Batch:
    nth: int
    data: bytes
    records: int
    timed: bool
    """True if the records have timestamps of their own."""
    made: float


@dataclass
class _Partition:
    """The rows and record batches for one partition of a topic.

    The record batches have sequence numbers in their order, by which the leader takes each batch
    once. After a batch that the leader did not take, no other batch is sent until all answers have
    arrived. Then all of them are sent again.
    """

    topic: WrittenTopic
    number: int
    rows: list[pa.RecordBatch] = field(default_factory=list)
    bytes: int = 0
    """The bytes that these rows take in a record batch, at most."""
    sequence: int = 0
    made: int = 0
    """How many record batches were made."""
    batches: deque[_Batch] = field(default_factory=deque)
    """The record batches that are not acknowledged, in their order."""
    under_way: int = 0
    """How many of `batches` are in flight: the first ones, unless a leader did not take one."""
    leader: int = -1
    """The leader that the batches in flight were sent to."""
    retry_at: float | None = None
    """The time.monotonic() for sending all batches again after a leader did not take one."""
    pause: float = field(default_factory=lambda: _FIRST_PAUSE)
    added: bool = False
    taken: int = -1
    """The number of the latest record batch that the leader has taken."""

    @property
    def place(self) -> tuple[str, int]:
        return self.topic.name, self.number

    @property
    def next(self) -> _Batch | None:
        """The batch that may be sent now, or None.

        A leader recognizes only the last five batches if they come twice. If a leader does not know
        the producer, it takes any batch as the first one, so the first batch is sent alone.
        """
        if (
            self.retry_at is not None
            or self.under_way == len(self.batches)
            or (self.under_way and self.taken < 0)
        ):
            return None
        batch = self.batches[self.under_way]
        return batch if batch.nth - self.batches[0].nth < _KNOWN_AGAIN else None

    @property
    def due_at(self) -> float:
        return math.inf if self.retry_at is None or self.under_way else self.retry_at

    def fail(self, now: float) -> None:
        if self.retry_at is None:
            self.retry_at = now + self.pause
            self.pause = min(2 * self.pause, _LONGEST_PAUSE)


ProduceResult = tuple[int, list[tuple[_Partition, _Batch]], Any]
"""A node, the batches that were sent there, and the node's response, or the exception in place of a
response."""


class TransactionalProducer:
    """One transaction of one producer.

    * `transactional_id` names the transaction.
    * `default_topic` is for rows without a topic.
    * `mark` is what the transaction carries for the brokers' memory.
    * `limits` are the bytes that a topic takes in one record batch, as far as they are known.

    Rows that no topic takes must not come here. `columns.refused` finds them.
    """

    def __init__(
        self,
        cluster: Cluster,
        options: ProducerOptions,
        transactional_id: str,
        default_topic: str | None,
        mark: Mark | None = None,
        limits: Mapping[str, int] | None = None,
    ) -> None:
        self.transactional_id = transactional_id
        self.default_topic = default_topic
        self.serialize: Callable[[Any, Any], bytes | None] | None = None
        self._brokers = cluster
        self._options = options
        self._topics = WrittenTopics(cluster.topics, options, limits or {})
        self._mark = mark
        self._add_mark: Callable[[], Future[None]] | None = None
        self._marking: Future[None] | None = None
        self.sent = self.delivered = 0
        self._failure: Exception | None = None
        self._identity: Identity | None = None
        self._adds = False
        """True if sending records to a partition adds it to the transaction (KIP-890)."""
        self._spans: dict[tuple[str, int], tuple[int, int]] = {}
        """The first offset and the one after the last, as far as the brokers told offsets."""
        self._untold = False
        self._partitions: dict[tuple[str, int], _Partition] = {}
        # No SimpleQueue: in Python 3.10 it may wait forever, whatever the timeout.
        self._answers: Queue[ProduceResult] = Queue()
        self._requests: Counter[int] = Counter()
        """How many requests are in flight, by node."""
        self._held = self._encoded = 0
        """The bytes of rows that wait for others, and of batches that are not acknowledged."""
        self._closed = False

    # ------------------------------------------------------------------ life
    def begin(self, timeout: float) -> None:
        """Fence and abort anyone else who has the id, and begin, within `timeout` seconds."""
        how = self.transactional_id, self._options.transaction_timeout_ms, self.default_topic
        self._identity, place, self._adds = ask(
            f"begin of {self.transactional_id}", timeout, lambda: self._brokers.begin(*how)
        )
        if self.default_topic:
            self._begin_mark(self.default_topic)
            if place:
                self._topics.add(self.default_topic, place)

    def seal(self, timeout: float) -> Committable:
        """Flush, and leave the transaction open at the broker, for another process to finish.

        The committable has the name that the transaction has at the broker. Its proof has:

        * the place of one record of the transaction, as `topic`, `partition` and `offset`;
        * `topic_ids`, the ids of all topics that the transaction wrote to;
        * `spans`, by topic, unless a broker did not tell an offset: the partition, the offset of
          the first record there, the offset after the last record, and the sequence number of the
          last record.

        Raises an error if the brokers do not acknowledge all records within `timeout` seconds.
        """
        self.flush(timeout)
        self.end_mark()
        if self._identity is None or not self._spans:
            raise RuntimeError(
                f"the brokers did not tell the offset of any record of {self.transactional_id}"
            )
        (topic, partition), (offset, _) = next(iter(self._spans.items()))
        written = {
            partition.topic.name for partition in self._partitions.values() if partition.made
        }
        spans: defaultdict[str, list[list[int]]] = defaultdict(list)
        for (name, number), (first, end) in sorted(self._spans.items()):
            last = (self._partitions[name, number].sequence - 1) % _SEQUENCES
            spans[name].append([number, first, end, last])
        return Committable(
            self._identity,
            {
                "cluster": self._topics.cluster_id,
                "topic": topic,
                "partition": partition,
                "offset": offset,
                "topic_ids": {name: id for name, id in self._topics.ids.items() if name in written},
                **({} if self._untold else {"spans": dict(spans)}),
            },
        )

    def commit(self, timeout: float) -> None:
        """Flush and commit, within `timeout` seconds for each of the two."""
        self.flush(timeout)
        self.end_mark()
        ask(f"commit of {self.transactional_id}", timeout, lambda: self._end(commit=True))

    def _end(self, *, commit: bool) -> None:
        (answer,) = self._brokers.end([self._identity or {}], commit=commit)
        if isinstance(answer, Exception):
            raise answer
        if answer:
            raise for_code(answer)(self.transactional_id)

    def abort(self, timeout: float) -> None:
        """Abort the transaction, and wait at most `timeout` seconds for records in flight.

        A transaction that cannot be aborted, or that was sealed, is left to the sweep.
        """
        if self._closed or self._identity is None:
            return
        self._settle(min(timeout, _SETTLE_TIMEOUT))
        try:
            if self._requests.total() and not self._adds:
                self._brokers.fence(self._identity)
            else:
                self._end(commit=False)
        except Exception as error:
            level = logging.WARNING if self.sent or self._marking else logging.DEBUG
            logger.log(
                level, "transaction %s is left to the sweep: %s", self.transactional_id, error
            )

    def _settle(self, timeout: float) -> None:
        """Wait for the answers to all requests, at most `timeout` seconds.

        Otherwise a request might come after the abort, and begin another transaction if nothing
        fences the request.
        """
        deadline = time.monotonic() + timeout
        while self._requests.total() and time.monotonic() < deadline:
            self._hear(0.05)
        if self._marking:
            wait([self._marking], _REQUEST_TIMEOUT)

    def close(self) -> None:
        """Drop the rows and record batches. An open transaction stays open at the broker."""
        self._closed = True
        if self._marking:
            wait([self._marking], _REQUEST_TIMEOUT)
        self._partitions.clear()

    # ------------------------------------------------------------------ the offset that remembers
    def _begin_mark(self, topic: str) -> None:
        """Begin to add the mark to the transaction, once, as soon as there is a topic.

        The brokers take some time for it, during which records are written.
        """
        if self._mark and self._add_mark is None:
            self._add_mark = partial(
                self._brokers.memory.add_offset,
                self._identity or {},
                self._mark,
                topic,
                by_itself=self._adds,
            )
            self._marking = self._add_mark()

    def end_mark(self) -> None:
        """Return when the mark is part of the transaction, or raise why it is not."""

        def added() -> bool:
            assert self._add_mark
            marking = self._marking or self._add_mark()
            self._marking = None
            if not wait([marking], self._options.transaction_timeout_ms / 1000).done:
                return False
            marking.result()
            return True

        if self._marking and not ask(f"offset of {self.transactional_id}", _REQUEST_TIMEOUT, added):
            raise KafkaTimeoutError(
                f"the brokers did not take the offset of {self.transactional_id} in time"
            )

    # ------------------------------------------------------------------ rows
    def write(self, batch: pa.RecordBatch) -> None:
        """Send the rows, or keep them until there are more.

        Waits while too much is in flight. Raises the error of a record that failed, and BadValue if
        a row asks for a partition that its topic does not have.
        """
        self._raise_failure()
        if not batch.num_rows:
            return
        for topic, rows in by_topic(batch, self.default_topic):
            assert topic is not None
            self._write(topic, rows)
        self._send()

    def _write(self, name: str, rows: pa.RecordBatch) -> None:
        wanted = 0
        if "partition" in rows.schema.names:
            wanted = pc.max(rows["partition"]).as_py() or 0
        count = self.partitions(name, wanted)
        if wanted >= count:
            raise BadValue(
                f"topic {name!r} has no partition {wanted}, which a row asks for: it has {count}"
            )
        plan = RecordBatchPlan.of(rows)
        largest = int(plan.sizes.max(initial=0))
        if largest > self._options.largest:
            raise failure(for_code(10)(), f"a record of {largest} bytes for topic {name!r}")
        self.sent += rows.num_rows
        for number, share, bytes in plan.shares(count):
            self._keep(self._topics[name], number, share, bytes)

    def _keep(self, topic: WrittenTopic, number: int, rows: pa.RecordBatch, bytes: Numbers) -> None:
        """Keep rows for a partition until they fill a record batch.

        Rows without a partition go to all partitions in turn, a batch at a time. `bytes` are the
        bounds of the rows.
        """
        ends = np.concatenate([[0], np.cumsum(bytes)])
        start = 0
        while start < rows.num_rows:
            chosen = topic.free() if number == FREE else number
            partition = self._partitions.setdefault((topic.name, chosen), _Partition(topic, chosen))
            room = topic.largest - partition.bytes
            end = int(np.searchsorted(ends, ends[start] + room, side="right")) - 1
            if end <= start and partition.rows:
                self._encode(partition)
                continue
            end = max(end, start + 1)
            partition.rows.append(rows.slice(start, end - start))
            partition.bytes += int(ends[end] - ends[start])
            self._held += int(ends[end] - ends[start])
            if end < rows.num_rows:
                self._encode(partition)
            start = end
        if self._held > self._options.buffer_bytes // 2:
            self._encode(*self._partitions.values())

    def _encode(self, *partitions: _Partition) -> None:
        """Make record batches of the rows that the partitions have.

        Waits while too much is in flight.
        """
        for partition in partitions:
            if partition.rows:
                self._make_batch(partition)
        self._send()
        while self._encoded > self._options.buffer_bytes // 2:
            self._take(self._patience())
            self._send()

    def _make_batch(self, partition: _Partition) -> None:
        (rows,) = pa.Table.from_batches(partition.rows).combine_chunks().to_batches()
        identity = self._identity or {}
        origin = Origin(identity["producer_id"], identity["producer_epoch"], partition.sequence)
        data = record_batch(rows, time.time_ns() // 1_000_000, self._options.compression, origin)
        timed = "timestamp" in rows.schema.names and rows["timestamp"].null_count < rows.num_rows
        partition.batches.append(
            _Batch(partition.made, data, rows.num_rows, timed, time.monotonic())
        )
        partition.made += 1
        partition.sequence = (partition.sequence + rows.num_rows) % _SEQUENCES
        self._held -= partition.bytes
        self._encoded += len(data)
        partition.rows = []
        partition.bytes = 0
        if partition.number == partition.topic.free():
            partition.topic.turn += 1

    def partitions(self, name: str, wanted: int) -> int:
        """Return how many partitions the topic has.

        `wanted` is a partition that a row asks for. If the topic had fewer before, the brokers are
        asked again, because partitions may have been added.
        """
        if self._topics.lacks(name, wanted):
            place = self._topics.find(name)
            self._begin_mark(name)
            self._topics.add(name, place)
        return len(self._topics[name].leaders)

    def too_large(self, name: str, rows: pa.RecordBatch) -> Iterator[tuple[int, int, int]]:
        """Yield what `WrittenTopics.too_large` does, for a topic that may be new."""
        self.partitions(name, 0)
        yield from self._topics.too_large(name, rows)

    # ------------------------------------------------------------------ requests
    def flush(self, timeout: float) -> None:
        """Return when the brokers have acknowledged every record.

        Raises the error of a record that failed, and KafkaTimeoutError after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        self._raise_failure()
        self._encode(*self._partitions.values())
        while any(partition.batches for partition in self._partitions.values()):
            if time.monotonic() > deadline:
                raise self._late()
            self._take(self._patience())
            self._send()
        if self.delivered != self.sent:
            raise self._late()

    def _patience(self) -> float:
        """Return the seconds until something can be sent again, at most a tenth of a second."""
        now = time.monotonic()
        return max(
            0.0, min([0.1, *(partition.due_at - now for partition in self._partitions.values())])
        )

    def _late(self) -> Exception:
        late: Exception = KafkaTimeoutError(
            f"{self.sent - self.delivered} of {self.sent} records were not acknowledged in time"
        )
        return late

    def _send(self) -> None:
        """Send the record batches that may be sent now."""
        self._take(0)
        now = time.monotonic()
        by_leader: defaultdict[int, list[_Partition]] = defaultdict(list)
        self._try_again(now)
        ready = [partition for partition in self._partitions.values() if partition.next]
        if not self._adds:
            self._add([partition for partition in ready if not partition.added])
        for partition in ready:
            leader = partition.topic.leaders.get(partition.number, -1)
            if partition.under_way and leader != partition.leader:
                continue
            partition.leader = leader
            if leader >= 0:
                by_leader[leader].append(partition)
            else:
                partition.fail(now)
        for leader, partitions in by_leader.items():
            while self._requests[leader] < _IN_FLIGHT and (taken := _next_of(partitions)):
                self._produce(leader, taken)

    def _try_again(self, now: float) -> None:
        due = [partition for partition in self._partitions.values() if partition.due_at <= now]
        for topic in {partition.topic.name: partition.topic for partition in due}.values():
            self._topics.look(topic)
        for partition in due:
            partition.retry_at = None

    def _add(self, partitions: Sequence[_Partition]) -> None:
        """Add partitions to the transaction, before their first records are sent."""
        if places := [partition.place for partition in partitions]:
            identity = self._identity or {}
            what = f"partitions of {self.transactional_id}"
            ask(what, _REQUEST_TIMEOUT, lambda: self._brokers.add_partitions(identity, places))
        for partition in partitions:
            partition.added = True

    def _produce(self, leader: int, taken: list[tuple[_Partition, _Batch]]) -> None:
        by_name: dict[str, list[tuple[int, bytes]]] = {}
        for partition, batch in taken:
            by_name.setdefault(partition.topic.name, []).append((partition.number, batch.data))
        self._requests[leader] += 1
        self._brokers.produce(
            leader,
            self.transactional_id,
            by_name,
            int(_REQUEST_TIMEOUT * 1000),
            lambda answer: self._answers.put((leader, taken, answer)),
            adds=self._adds,
        )

    def _take(self, timeout: float) -> None:
        """Take all answers that have arrived, as `_hear` does.

        Raises the error of a record that failed, and KafkaTimeoutError if a record batch is older
        than the transaction timeout.
        """
        self._hear(timeout)
        self._raise_failure()
        oldest = time.monotonic() - self._options.transaction_timeout_ms / 1000
        if any(its.batches[0].made < oldest for its in self._partitions.values() if its.batches):
            raise self._late()

    def _hear(self, timeout: float) -> None:
        """Wait for the first answer, at most `timeout` seconds, and take all that have arrived."""
        try:
            answered = self._answers.get(timeout=timeout)
            while True:
                self._settled(*answered)
                answered = self._answers.get_nowait()
        except Empty:
            pass

    def _settled(self, leader: int, taken: list[tuple[_Partition, _Batch]], answer: Any) -> None:
        self._requests[leader] -= 1
        by_place = {}
        if not isinstance(answer, Exception):
            by_place = {
                (of.name, its.index): its
                for of in answer.responses
                for its in of.partition_responses
            }
        for partition, batch in taken:
            partition.under_way -= 1
            about = by_place.get(partition.place)
            if about is None:
                self._refused(
                    partition,
                    batch,
                    answer if isinstance(answer, Exception) else KafkaConnectionError(),
                )
            elif about.error_code:
                self._refused(
                    partition, batch, for_code(about.error_code)(about.error_message or "")
                )
            else:
                self._taken(partition, batch, about.base_offset, about.log_append_time_ms)

    def _taken(self, partition: _Partition, batch: _Batch, offset: int, appended_at: int) -> None:
        """Note that a leader took a batch, whose first record has this offset.

        `offset` and `appended_at` are -1 if the broker did not tell them.
        """
        partition.batches.remove(batch)
        self._encoded -= len(batch.data)
        self.delivered += batch.records
        partition.pause = _FIRST_PAUSE
        if offset < 0:
            self._untold = True
        else:
            first, end = self._spans.get(partition.place, (offset, 0))
            if batch.nth > partition.taken and offset < end:
                self._failure = self._failure or RuntimeError(
                    f"{partition.topic.name}-{partition.number} has lost records that a broker had "
                    f"acknowledged: the next ones are at offset {offset}, and those before end at "
                    f"{end}"
                )
            self._spans[partition.place] = min(first, offset), max(end, offset + batch.records)
        partition.taken = max(partition.taken, batch.nth)
        # Of a batch that it has already, a leader tells the latest of the records' own times.
        if batch.timed and appended_at not in (-1, latest_time(batch.data)):
            self._failure = self._failure or ConfigurationError(
                f"topic {partition.topic.name!r} puts its own time in place of the records' "
                "timestamps (message.timestamp.type = LogAppendTime): set CreateTime, or leave "
                "the column `timestamp` out"
            )

    def _refused(self, partition: _Partition, batch: _Batch, error: Exception) -> None:
        name = name_of(error)
        if name == _DUPLICATE:
            self._taken(partition, batch, -1, -1)
        elif is_passing(error) or (name == _OUT_OF_ORDER and batch is not partition.batches[0]):
            logger.info("%s of %s: %s", partition.place, self.transactional_id, error)
            partition.fail(time.monotonic())
        elif name == "INVALID_TIMESTAMP" and not batch.timed:
            self._failure = self._failure or ConfigurationError(
                f"topic {partition.topic.name!r} takes no records of the time that this machine's "
                "clock shows: set the clock (or the topic's message.timestamp.after.max.ms and "
                "message.timestamp.before.max.ms)"
            )
        else:
            what = (
                f"{batch.records} record(s) for topic {partition.topic.name!r} were not taken by "
                "the broker"
            )
            self._failure = self._failure or failure(error, what)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


def _next_of(partitions: Iterable[_Partition]) -> list[tuple[_Partition, _Batch]]:
    """Choose the batches of one request, and count them as in flight.

    A leader takes one record batch of each partition in a request.
    """
    taken: list[tuple[_Partition, _Batch]] = []
    bytes = 0
    for partition in partitions:
        batch = partition.next
        if batch and (not taken or bytes + len(batch.data) <= _REQUEST_BYTES):
            taken.append((partition, batch))
            partition.under_way += 1
            bytes += len(batch.data)
    return taken
