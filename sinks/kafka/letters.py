"""The newest letters in a topic, read as a consumer with read_committed sees them, to its end and no further."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import Consumer, KafkaError, Message, TopicPartition

from sinks.dead_letters import FoundLetters
from sinks.errors import SinkError
from sinks.kafka.cluster import Cluster
from sinks.kafka.dead_letters import letter_of
from sinks.progress import progress

_HELD_UP = 5.0
"""Seconds that the end of a transaction is waited for that holds readers up."""
_PAUSE = 0.05
_WINDOW = 2_000
"""Offsets of a partition that are looked at first for the newest letters; then ten times as many, and so on."""
_LONGEST_FETCH = 20
"""Milliseconds until the end of a partition is told."""
_TOGETHER = 500

Ends = Mapping[int, int]
"""By partition."""


def find_letters(
    cluster: Cluster,
    options: Mapping[str, Any],
    topic: str,
    job_and_sink: tuple[str, str],
    most: int,
    timeout: float,
) -> FoundLetters:
    """Those of a sink of a job, the last `most` of each partition. `options` are librdkafka's;
    `timeout`: seconds without any answer."""
    if (about := cluster.topic(topic)) is None:
        return FoundLetters((), (f"there is no topic {topic!r}",))
    partitions = [one["partition_index"] for one in about["partitions"]]
    starts, ends, held_up = _stable(cluster, topic, partitions)
    kept = _Kept(job_and_sink, most)
    with closing(_consumer(options)) as consumer, progress(f"read topic {topic}", sum(_left(starts, ends))) as advance:
        for spans in _spans(starts, ends, kept):
            for message in _read(consumer, topic, spans, timeout, advance):
                kept.take(message)
    begins = cluster.log_starts(topic, partitions)
    removed = "retention, or somebody, has removed records"
    gaps = [f"{_name(topic, at)} begins at offset {start}: {removed}" for at, start in begins.items() if start]
    if "compact" in cluster.configs("TOPIC", topic, ["cleanup.policy"]).get("cleanup.policy", ""):
        gaps.append(f"topic {topic!r} is compacted, which removes letters with a key that a later one has")
    return FoundLetters(kept.letters(), (*gaps, *held_up))


def _stable(cluster: Cluster, topic: str, partitions: Sequence[int]) -> tuple[Ends, Ends, list[str]]:
    """The first offset of each partition, where readers stop now, and who cannot read to the end as it was at first."""
    ends, deadline = cluster.log_ends(topic, partitions, committed=False), time.monotonic() + _HELD_UP
    while True:
        stable = cluster.log_ends(topic, partitions, committed=True)
        behind = [at for at in partitions if stable[at] < ends[at]]
        if not behind or time.monotonic() > deadline:
            break
        time.sleep(_PAUSE)
    why = "by a transaction that is open"
    told = [f"readers of {_name(topic, at)} are held up at offset {stable[at]} {why}" for at in behind]
    return cluster.log_starts(topic, partitions), stable, told


def _left(starts: Ends, ends: Ends) -> Iterator[int]:
    return (max(0, end - starts[at]) for at, end in ends.items())


def _spans(starts: Ends, ends: Ends, kept: _Kept) -> Iterator[dict[int, tuple[int, int]]]:
    """What is to be read of each partition, from the end on until there are enough."""
    left, window = {at: end for at, end in ends.items() if starts[at] < end}, _WINDOW
    while left:
        firsts = {at: max(starts[at], end - window) for at, end in left.items()}
        kept.begin()
        yield {at: (firsts[at], end) for at, end in left.items()}
        left = {at: first for at, first in firsts.items() if first > starts[at] and not kept.enough(at)}
        window *= 10


def _read(
    consumer: Consumer, topic: str, spans: Mapping[int, tuple[int, int]], timeout: float, advance: Any
) -> Iterator[Message]:
    """Committed records of these offsets. Markers and what was aborted are in between, so the end is told by what comes
    after it, or by the end of the partition. Raises `SinkError` if nothing comes."""
    ends = {at: end for at, (_, end) in spans.items()}
    reached = {at: first for at, (first, _) in spans.items()}
    consumer.assign([TopicPartition(topic, at, first) for at, first in reached.items()])
    heard, last = time.monotonic(), None
    while ends:
        for message in consumer.consume(_TOGETHER, timeout=_PAUSE):
            error, at, offset = message.error(), message.partition(), message.offset()
            if error is not None and error.code() != KafkaError._PARTITION_EOF:
                last = error
                if error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
                    raise SinkError(f"the principal may not read topic {topic!r} (ACL: Read on the topic)")
                continue
            heard = time.monotonic()
            if at not in ends or offset is None:
                continue
            if error is None and offset < ends[at]:
                yield message
            position = min(ends[at], offset + (error is None))
            advance(max(0, position - reached[at]))
            reached[at] = max(reached[at], position)
            if reached[at] == ends[at]:
                del ends[at]
                consumer.incremental_unassign([TopicPartition(topic, at)])
        if time.monotonic() - heard > timeout:
            why = f": {last}" if last else ""
            raise SinkError(f"{_name(topic, min(ends))} could not be read to offset {ends[min(ends)]} in time{why}")
    consumer.unassign()


@dataclass
class _Kept:
    """Letters that are wanted, by partition, oldest first."""

    job_and_sink: tuple[str, str]
    most: int
    found: dict[int, deque[Mapping[str, Any]]] = field(default_factory=dict)
    now: dict[int, deque[Mapping[str, Any]]] = field(default_factory=dict)
    """Of the span that is being read, which comes before those that were."""

    def begin(self) -> None:
        for at, letters in self.now.items():
            self.found[at] = letters + self.found.get(at, deque())
        self.now = {}

    def enough(self, partition: int) -> bool:
        have = len(self.found.get(partition, ())) + len(self.now.get(partition, ()))
        return have >= self.most

    def take(self, message: Message) -> None:
        letter, at = letter_of(message), message.partition()
        if letter is not None and at is not None and (letter["job"], letter["sink"]) == self.job_and_sink:
            self.now.setdefault(at, deque(maxlen=self.most)).append(letter)

    def letters(self) -> list[Mapping[str, Any]]:
        self.begin()
        return [letter for letters in self.found.values() for letter in letters]


def _consumer(options: Mapping[str, Any]) -> Consumer:
    return Consumer(
        {
            **options,
            "group.id": "tpc.dead-letters",  # of no member, and nothing is committed to it: no right is needed for it
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "isolation.level": "read_committed",
            "auto.offset.reset": "earliest",
            "fetch.wait.max.ms": _LONGEST_FETCH,
            "log_level": 0,
        }
    )


def _name(topic: str, partition: int) -> str:
    return f"{topic}-{partition}"
