"""The topics that a producer's transaction writes to.

The producer knows the leaders of their partitions, and how large a record batch they take.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from kafka.errors import KafkaError, UnknownTopicOrPartitionError

from sinks.errors import ConfigurationError
from sinks.kafka.errors import NO_TOPIC, ask, failure, is_passing
from sinks.kafka.options import ProducerOptions
from sinks.kafka.record_batch import HEADER, Origin, RecordBatchPlan, record_batch
from sinks.kafka.topics import Place, Topics

LOOK_INTERVAL = 10.0
"""Seconds until a topic that is missing counts as deleted."""

_TELL_TIMEOUT = 30.0
"""Seconds that the brokers may take to tell about a topic."""
_PROPAGATION = 5.0
"""Seconds until all brokers know of a topic that was just made."""


@dataclass
class WrittenTopic:
    """A topic that records are written to."""

    name: str
    limit: float
    """The bytes of a record batch that the topic takes, if the principal may know."""
    largest: int
    """The bytes of records that the sink puts into one record batch."""
    leaders: Mapping[int, int] = field(default_factory=dict)
    turn: int = field(default_factory=lambda: random.randrange(1 << 16))
    missing_since: float | None = None

    def free(self) -> int:
        """Return the partition whose turn it is, of those that have a leader."""
        led = [number for number, leader in sorted(self.leaders.items()) if leader >= 0] or sorted(
            self.leaders
        )
        return led[self.turn % len(led)]


class WrittenTopics:
    """The topics of one transaction, by name.

    `limits`: bytes that a topic takes in one record batch, as far as they are known.
    """

    def __init__(self, topics: Topics, options: ProducerOptions, limits: Mapping[str, int]) -> None:
        self._topics = topics
        self._options = options
        self._limits = limits
        self._known: dict[str, WrittenTopic] = {}
        self.cluster_id = ""
        self.ids: dict[str, str] = {}
        """The ids of topics before their first record, so a recreated topic has another id."""

    def __getitem__(self, name: str) -> WrittenTopic:
        return self._known[name]

    def lacks(self, name: str, wanted: int) -> bool:
        """Tell whether the topic, or this partition of it, is not known."""
        topic = self._known.get(name)
        return topic is None or wanted >= len(topic.leaders)

    def find(self, name: str) -> Place:
        """Ask for the topic as it is now, which somebody may have made just before.

        Raises ConfigurationError if it does not exist.
        """
        deadline = time.monotonic() + _PROPAGATION

        def found() -> Place:
            if (place := self._topics.place(name)) is not None:
                return place
            if time.monotonic() < deadline:
                raise UnknownTopicOrPartitionError(f"topic {name!r}")
            raise ConfigurationError(f"topic {name!r}: {NO_TOPIC}")

        return ask(f"partitions of topic {name!r}", _TELL_TIMEOUT, found)

    def add(self, name: str, place: Place) -> None:
        """Remember the topic, or what has changed about it."""
        if name not in self._known:
            limit = self._limits.get(name) or self._limit(name, math.inf)
            self._known[name] = WrittenTopic(
                name, limit, int(min(self._options.batch_bytes, limit)) - HEADER
            )
            self.cluster_id = place.cluster
            self.ids[name] = place.id
        self._known[name].leaders = place.leaders

    def _limit(self, name: str, known: float) -> float:
        """Ask for the limit as it is now; return `known` if it cannot be told."""
        try:
            return self._topics.largest_batch(name) or known
        except KafkaError:
            return known

    def look(self, topic: WrittenTopic) -> None:
        """Look for the leaders of a topic.

        A topic that was deleted is waited for in vain; one that was made anew has lost what went
        there.
        """
        now = time.monotonic()
        try:
            about = self._topics.place(topic.name)
        except KafkaError as error:
            if not is_passing(error):
                raise failure(error, f"partitions of topic {topic.name!r}") from error
            return
        if about is None:
            topic.missing_since = topic.missing_since or now
        else:
            topic.missing_since = None
            topic.leaders = {**topic.leaders, **about.leaders}
        if topic.missing_since is not None and now - topic.missing_since > LOOK_INTERVAL:
            raise ConfigurationError(f"topic {topic.name!r} was deleted while rows went there")
        if about is not None and about.id != self.ids[topic.name]:
            raise RuntimeError(
                f"topic {topic.name!r} was deleted and made anew while rows went there"
            )

    def too_large(self, name: str, rows: pa.RecordBatch) -> Iterator[tuple[int, int, int]]:
        """Yield places of records that the producer or the topic does not take, with the bytes that
        each has, and may have."""
        topic = self._known[name]
        plan = RecordBatchPlan.of(rows)
        most = plan.bounds + HEADER
        if (most > topic.limit).any():
            # somebody may have raised it since the start
            topic.limit = self._limit(name, topic.limit)
        for at in np.flatnonzero(
            (plan.sizes > self._options.largest) | (most > topic.limit)
        ).tolist():
            alone = record_batch(rows.slice(at, 1), 0, self._options.compression, Origin(0, 0, 0))
            if plan.sizes[at] > self._options.largest:
                yield at, int(plan.sizes[at]), self._options.largest
            elif len(alone) > topic.limit:
                yield at, len(alone), int(topic.limit)
