"""The topics of a cluster: leaders of partitions, contents of logs, and settings.

The questions about transactions are in `cluster.py`.
"""

from __future__ import annotations

import base64
import uuid
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

from kafka import IsolationLevel, TopicPartition
from kafka.admin import ConfigResource, OffsetSpec
from kafka.errors import (
    LeaderNotAvailableError,
    TopicAlreadyExistsError,
    TopicAuthorizationFailedError,
    UnknownTopicOrPartitionError,
    for_code,
)

from sinks.kafka.connection import ByLeader, Connections, Leaders, Where, checked, raised
from sinks.kafka.errors import NotYetKnown
from sinks.kafka.internals import (
    CreateTopicsRequest,
    DescribeProducersRequest,
    FetchRequest,
    ListOffsetsRequest,
)

Ids = dict[str, str | None]
"""The ids of topics, as Kafka writes them. The id of a topic that does not exist is None."""


class Place(NamedTuple):
    """A topic as it is now."""

    cluster: str
    id: str
    leaders: Leaders


class Logs(NamedTuple):
    """The logs of partitions, without partitions that do not exist or that we may not ask about.

    `open_in` tells which producers (id and epoch) have a transaction open in a partition, with the
    first offset of the transaction and the last sequence number of its records. `starts` has the
    first offset of each log.
    """

    open_in: Mapping[Where, Mapping[tuple[int, int], tuple[int, int]]]
    starts: Mapping[Where, int]


class Topics:
    """The topics of one cluster.

    Each call raises what a call of `Connections` raises. The coroutines are parts of questions that
    are asked together with others.
    """

    def __init__(self, connections: Connections) -> None:
        self._net = connections

    # ------------------------------------------------------------------ which topics there are
    def place(self, topic: str) -> Place | None:
        """Return the topic as it is now, or None if it does not exist."""
        return self._net.ask(lambda: self.find(topic))

    async def find(self, topic: str | None) -> Place | None:
        """Return the topic as it is now, or None if it does not exist or none is named."""
        if topic is None:
            return None
        about = await self._net.metadata([topic])
        id = ids_in(about)[topic]
        return Place(about.cluster_id, id, self._net.leaders[topic]) if id else None

    def ids(self, names: Iterable[str]) -> Ids:
        """Return the ids that the topics have now."""
        return ids_in(self._net.ask(lambda: self._net.metadata(names)))

    def describe(self, name: str) -> Mapping[str, Any] | None:
        """Return partitions, leaders and our permissions (`authorized_operations`) of a topic.

        Return None if the topic does not exist.
        """
        (about,) = self._net.call(lambda admin: admin.describe_topics([name]))
        if about["error_code"] == UnknownTopicOrPartitionError.errno:
            return None
        if about["error_code"]:
            raise for_code(about["error_code"])(f"topic {name!r}")
        return dict(about)

    def create(self, name: str) -> None:
        """Create a topic with the brokers' default numbers of partitions and replicas.

        It is no error if somebody else was quicker.
        """
        made = self._net.ask(lambda: self._created(name)).topics[0]
        if made.error_code not in (0, TopicAlreadyExistsError.errno):
            raise for_code(made.error_code)(made.error_message)

    async def _created(self, name: str) -> Any:
        topic = CreateTopicsRequest.CreatableTopic(
            name=name, num_partitions=-1, replication_factor=-1
        )
        request = CreateTopicsRequest(
            topics=[topic], timeout_ms=self._net.timeout_ms, min_version=4
        )
        return await self._net.request(request, (await self._net.metadata(())).controller_id)

    # ------------------------------------------------------------------ how they are set up
    def settings(self, topic: str, names: Sequence[str]) -> dict[str, str]:
        """Return the topic's settings in force, as `settings_of` does."""
        return settings_of(self._net, "TOPIC", topic, names)

    def largest_batch(self, topic: str) -> int | None:
        """Return the bytes of a record batch that the topic takes.

        Return None without the permission to ask.
        """
        limit = self.settings(topic, ["max.message.bytes"]).get("max.message.bytes")
        return int(limit) if limit else None

    def may_lose(self, topic: str) -> list[str]:
        """List why a failover may lose acknowledged records.

        A replica that lags behind may become the leader, or one broker's word is enough. The list
        is empty if the topic does not exist, or without the permission to ask.
        """
        unclean = "unclean.leader.election.enable"
        enough = "min.insync.replicas"
        settings = self.settings(topic, (unclean, enough))
        about = self.describe(topic)
        reasons = []
        if settings.get(unclean) == "true":
            reasons.append(
                f"topic {topic!r} has {unclean} = true, so it may lose acknowledged records"
            )
        partitions = about["partitions"] if about else ()
        replicas = min((len(partition["replica_nodes"]) for partition in partitions), default=0)
        if replicas > 1 and settings.get(enough) == "1":
            reasons.append(
                f"topic {topic!r} has {replicas} replicas and {enough} = 1, so records that only "
                "one broker has are acknowledged, and lost with it"
            )
        return reasons

    # ------------------------------------------------------------------ what their logs hold
    def logs(self, places: Iterable[Where]) -> Logs:
        """Return the logs of these partitions."""
        return self._net.ask(lambda: self.ids_and_logs((), places))[2]

    async def ids_and_logs(
        self, names: Iterable[str], places: Iterable[Where]
    ) -> tuple[str, Ids, Logs]:
        """Return the cluster's id, the ids of these topics and partitions' topics, and the logs."""
        wanted = sorted(places)
        asked = self._net.by_leader(wanted)
        about, logs = await self._net.both(
            lambda: self._net.metadata({*names, *(topic for topic, _ in wanted)}),
            lambda: self._send_logs(asked),
        )
        if (by_leader := self._net.by_leader(wanted)) != asked:
            logs = await self._send_logs(by_leader)
        if none := by_leader.get(-1):
            raise LeaderNotAvailableError(", ".join(f"{topic}-{number}" for topic, number in none))
        described, starts = [await self._led(each) for each in logs]
        open_in = {
            place: {
                (each.producer_id, each.producer_epoch): (
                    each.current_txn_start_offset,
                    each.last_sequence,
                )
                for each in its.active_producers
                if each.current_txn_start_offset >= 0
            }
            for place, its in described.items()
        }
        offsets = {place: int(its.offset) for place, its in starts.items()}
        return about.cluster_id, ids_in(about), Logs(open_in, offsets)

    async def _send_logs(self, by_leader: ByLeader) -> tuple[list[Any], list[Any]]:
        """Ask who has a transaction open there, and where the logs begin.

        Does not wait for the answers.
        """
        topic = DescribeProducersRequest.TopicRequest
        log = ListOffsetsRequest.ListOffsetsTopic
        first = partial(log.ListOffsetsPartition, timestamp=OffsetSpec.EARLIEST)
        open_in = list[Any]()
        starts = list[Any]()
        for node, places in by_leader.items():
            its = numbers_by_topic(places).items()
            topics = [topic(name=name, partition_indexes=numbers) for name, numbers in its]
            logs = [
                log(name=name, partitions=[first(partition_index=n) for n in numbers])
                for name, numbers in its
            ]
            open_in.append((DescribeProducersRequest(topics=topics), node))
            level = IsolationLevel.READ_UNCOMMITTED
            starts.append(
                (ListOffsetsRequest(topics=logs, isolation_level=level, min_version=2), node)
            )
        return self._net.send(open_in), self._net.send(starts)

    async def _led(self, requests: Iterable[Any]) -> dict[Where, Any]:
        """Return what the leader of each partition answers.

        Partitions that we may not ask about are left out.
        """
        answers: dict[Where, Any] = {}
        for sent in requests:
            for topic in raised(await self._net.answer(sent)).topics:
                for partition in topic.partitions:
                    if partition.error_code != TopicAuthorizationFailedError.errno:
                        number = partition.partition_index
                        answers[topic.name, number] = checked(partition, f"{topic.name}-{number}")
        return answers

    def ends(self, places: Iterable[Where], *, committed: bool = False) -> dict[Where, int]:
        """Return the offset after the last record of each partition.

        If `committed`, the offset after the last record that readers with read_committed get.
        """
        wanted = {TopicPartition(*place): OffsetSpec.LATEST for place in places}
        level = IsolationLevel.READ_COMMITTED if committed else IsolationLevel.READ_UNCOMMITTED
        offsets = self._net.call(lambda admin: admin.list_partition_offsets(wanted, level))
        return {tuple(place): at.offset for place, at in offsets.items()}

    def fetch(self, topic: str, partition: int, offset: int, most: int = 1) -> Any:
        """Return what the partition's leader answers to a Fetch at this offset, with
        read_committed: `error_code`, `last_stable_offset`, `log_start_offset`,
        `aborted_transactions`, `records`.

        The records are one record batch, whole whatever its size, or as many as there are in `most`
        bytes, of which the last one may be cut off.
        """
        if (place := self.place(topic)) is None:
            raise UnknownTopicOrPartitionError(f"topic {topic!r}")
        wanted = FetchRequest.FetchTopic(
            topic=topic,
            partitions=[
                FetchRequest.FetchTopic.FetchPartition(
                    partition=partition,
                    fetch_offset=offset,
                    current_leader_epoch=-1,
                    partition_max_bytes=most,
                )
            ],
        )
        request = FetchRequest(
            max_wait_ms=0,
            min_bytes=0,
            max_bytes=most,
            isolation_level=IsolationLevel.READ_COMMITTED,
            session_epoch=-1,
            topics=[wanted],
            min_version=4,
            max_version=12,  # from 13 on topics go by their ids
        )
        leader = place.leaders.get(partition, -1)
        answer = checked(
            self._net.ask(lambda: self._net.request(request, leader)),
            f"fetch from {topic}-{partition}",
        )
        if not answer.responses:
            raise NotYetKnown(
                f"the broker holds {topic}-{partition} back: a quota lets this client read no more "
                "now"
            )
        return answer.responses[0].partitions[0]


def settings_of(
    connections: Connections, kind: Literal["BROKER", "TOPIC"], name: str, names: Sequence[str]
) -> dict[str, str]:
    """Return the settings in force of a broker or a topic.

    There are none if it does not exist, or without the permission to ask.
    """
    of = ConfigResource(kind, name, dict.fromkeys(names))
    described = connections.call(lambda admin: admin.describe_configs([of], config_filter="all"))
    settings = described[kind.lower()][name]
    return {setting: str(settings[setting]["value"]) for setting in names if setting in settings}


def numbers_by_topic(places: Iterable[Where]) -> dict[str, list[int]]:
    """Group the numbers of partitions by their topics."""
    numbers: dict[str, list[int]] = {}
    for topic, number in places:
        numbers.setdefault(topic, []).append(number)
    return numbers


def ids_in(metadata: Any) -> Ids:
    """Return the ids of the topics that the brokers' metadata tells about."""
    ids: Ids = {}
    for topic in metadata.topics:
        if topic.error_code not in (0, UnknownTopicOrPartitionError.errno):
            raise for_code(topic.error_code)(f"topic {topic.name!r}")
        ids[topic.name] = None if topic.error_code else _id(topic.topic_id)
    return ids


def _id(topic_id: object) -> str:
    return base64.urlsafe_b64encode(uuid.UUID(str(topic_id)).bytes).decode().rstrip("=")
