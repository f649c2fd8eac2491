"""The connection to the brokers: a task writes a transaction over it, and the driver ends those that other processes
began, and asks what became of them.

kafka-python's admin client carries it (connections, security, wire messages). It has no call for Produce and
Fetch, for FindCoordinator and for transactions, so those messages go to its `_manager`: the one use of a private
attribute.
"""

from __future__ import annotations

import base64
import math
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from logging import getLogger
from threading import Lock
from typing import Any, Literal, NamedTuple

from kafka import TopicPartition
from kafka.admin import ConfigResource, KafkaAdminClient, OffsetSpec
from kafka.errors import (
    KafkaConnectionError,
    KafkaError,
    KafkaTimeoutError,
    NodeNotReadyError,
    RequestTimedOutError,
    TransactionalIdNotFoundError,
    UnknownBrokerIdError,
    UnknownTopicOrPartitionError,
    for_code,
)
from kafka.protocol.admin.transactions import DescribeTransactionsRequest
from kafka.protocol.consumer import IsolationLevel
from kafka.protocol.consumer.fetch import FetchRequest
from kafka.protocol.consumer.group import OffsetFetchRequest
from kafka.protocol.metadata import CoordinatorType, FindCoordinatorRequest
from kafka.protocol.producer.produce import ProduceRequest
from kafka.protocol.producer.transaction import (
    AddOffsetsToTxnRequest,
    AddPartitionsToTxnRequest,
    EndTxnRequest,
    InitProducerIdRequest,
    TxnOffsetCommitRequest,
)

from sinks.kafka.memory import PARTITION, GroupOffsets, Mark
from sinks.transaction import Identity

getLogger("kafka.admin.client").addFilter(lambda record: "with configuration" not in record.msg)  # has passwords

READ_COMMITTED = 1
COMMITTED_STATES = ("PrepareCommit", "CompleteCommit")
_PLAIN, _FENCING = 4, 5
"""Versions of EndTxn. With that of KIP-890 the broker raises the epoch, so that whoever still holds the id is fenced.
It needs the cluster's feature transaction.version 2: without it, a broker can never end the transaction after that."""

_CONCURRENT = 51
_NOT_ATTEMPTED = 55
_SHORTEST_TRY = 0.5
_LONGEST_PAUSE = 0.5

Answer = int | Exception
"""An error code of the broker (0: done), or why it could not be asked."""
Where = tuple[str, int]
"""Topic and partition."""

UNANSWERED = KafkaConnectionError, KafkaTimeoutError, NodeNotReadyError, RequestTimedOutError


class _Client:
    """kafka-python's admin client, whose own errors say nothing but which connection failed."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._servers = ", ".join(options["bootstrap_servers"])
        try:
            self._client = KafkaAdminClient(**options)
        except KafkaError as error:
            raise self.explained(error) from error

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            try:
                return method(*arguments, **named)
            except KafkaError as error:
                raise self.explained(error) from error

        method = getattr(self._client, name)
        return call if callable(method) else method

    def explained(self, error: Exception) -> Exception:
        """Of the same type, which tells whether to ask again."""
        if not isinstance(error, UNANSWERED):
            return error
        told = ", ".join(map(str, error.args))
        again: Exception = type(error)(
            f"{told}. A Kafka broker at {self._servers} does not answer: check that all of them run, and that this "
            "machine reaches them"
        )
        return again


class Place(NamedTuple):
    """A topic as it is now: its id, and the node that leads each partition, -1 for none."""

    id: str
    leaders: Mapping[int, int]


class Cluster:
    """Connects at its first use; one connection for each broker, shared by all threads. `options` are kafka-python's;
    `timeout` in seconds; `reached_by`: time.monotonic() from which on the first answer is waited for no more."""

    def __init__(self, options: Mapping[str, Any], timeout: float, reached_by: float = math.inf) -> None:
        self._options = dict(options)
        self._timeout_ms = int(timeout * 1000)
        self._reached_by = reached_by
        self._lock = Lock()
        self._client: _Client | None = None

    @property
    def admin(self) -> _Client:
        with self._lock:
            if self._client is None:
                left = max(_SHORTEST_TRY, self._reached_by - time.monotonic())
                self._client = _Client(
                    {
                        "bootstrap_timeout_ms": min(self._timeout_ms, left * 1000),
                        "request_timeout_ms": self._timeout_ms,
                        "reconnect_backoff_max_ms": 1000,
                        "max_in_flight_requests_per_connection": 1_000_000,  # beyond it, requests would fail
                        **self._options,
                    }
                )
            return self._client

    def close(self) -> None:
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    # ------------------------------------------------------------------ transactions
    def end(self, identities: Sequence[Identity], *, commit: bool) -> list[Answer]:
        """EndTxn for each, side by side: the request that its own producer would have sent. Repeating it is safe. An
        abort fences whoever still holds the transactional id, or it could go on with a part of its records."""
        answers = self._end(identities, partial(_end_txn, commit, _FENCING if self.fences else _PLAIN))
        if commit or self.fences:
            return answers
        # Not InitProducerId alone, which would abort whichever transaction of the id is open now
        aborted = [at for at, answer in enumerate(answers) if answer == 0]
        raised = self._end([identities[at] for at in aborted], _raise_epoch)
        for at, answer in zip(aborted, raised, strict=True):
            if isinstance(answer, Exception) or answer == _CONCURRENT:
                answers[at] = answer  # not fenced yet: to be asked again
        return answers

    @cached_property
    def fences(self) -> bool:
        """Whether the end of a transaction raises the epoch, and what is sent to a partition adds it (KIP-890). What
        brokers can and what the cluster may do differ, until an operator raises the latter after an upgrade."""
        _, level = self.admin.describe_features().get("transaction.version", {}).get("finalized", (0, 0))
        return bool(level >= 2)

    def _end(self, identities: Sequence[Identity], request: Callable[[Identity], Any]) -> list[Answer]:
        """Ask for each, and again for those that have been ended just before, whose markers are on their way."""
        answers = self._ask_each(identities, request)
        pause = 0.005
        while pause < _LONGEST_PAUSE and (busy := [at for at, answer in enumerate(answers) if answer == _CONCURRENT]):
            time.sleep(pause)
            pause *= 2
            again = self._ask_each([identities[at] for at in busy], request)
            for at, answer in zip(busy, again, strict=True):
                answers[at] = answer
        return answers

    def _ask_each(self, identities: Sequence[Identity], request: Callable[[Identity], Any]) -> list[Answer]:
        names = [identity["transactional_id"] for identity in identities]
        requests = iter(map(request, identities))
        answers = self._ask_coordinators(names, lambda _: next(requests))
        return [answer if isinstance(answer, Exception) else answer.error_code for answer in answers]

    def states(self, transactional_ids: Iterable[str]) -> dict[str, tuple[Identity, str]]:
        """The newest transaction of each transactional id that its coordinator knows, and its state there. Raises what
        keeps a coordinator from telling."""
        names = list(transactional_ids)
        found: dict[str, tuple[Identity, str]] = {}
        for name, answer in zip(names, self._ask_coordinators(names, _describe), strict=True):
            if isinstance(answer, Exception):
                raise answer
            (about,) = answer.transaction_states
            if about.error_code == TransactionalIdNotFoundError.errno:
                continue
            if about.error_code:
                raise for_code(about.error_code)(name)
            identity = {
                "transactional_id": name,
                "producer_id": about.producer_id,
                "producer_epoch": about.producer_epoch,
            }
            found[name] = identity, about.transaction_state
        return found

    def has_committed(self, identity: Identity) -> bool:
        """Whether its coordinator knows that it was committed. Where the end fences, it has raised the epoch by one."""
        name = identity["transactional_id"]
        now, state = self.states([name]).get(name, ({}, ""))
        raised = {**identity, "producer_epoch": identity["producer_epoch"] + 1}
        return state in COMMITTED_STATES and (now == identity or (self.fences and now == raised))

    def ages(self, transactional_ids: Sequence[str]) -> list[float | None]:
        """Seconds since each one's newest transaction began, by the clock of the coordinator's broker and ours."""
        now = time.time()
        return [
            None
            if isinstance(answer, Exception) or answer.transaction_states[0].transaction_start_time_ms < 0
            else now - answer.transaction_states[0].transaction_start_time_ms / 1000
            for answer in self._ask_coordinators(transactional_ids, _describe)
        ]

    def ongoing(self, prefix: str) -> list[Identity]:
        """The open transactions whose transactional id starts with `prefix`."""
        states = self.states(self.listed(prefix, "Ongoing"))
        return [identity for identity, state in states.values() if state == "Ongoing"]

    def listed(self, prefix: str, state: str) -> list[str]:
        """The transactional ids that start with `prefix` and whose newest transaction is in this state."""
        found = self.admin.list_transactions(state_filters=[state])
        names = {one.transactional_id for ones in found.values() for one in ones}
        return sorted(name for name in names if name.startswith(prefix))

    def group_offsets(self, group: str) -> GroupOffsets:
        """What a consumer group has committed; what transactions that are open carry for it does not count. Empty if
        there is no such group."""
        (answer,) = self._ask_coordinators([group], _offsets, CoordinatorType.GROUP)
        if isinstance(answer, Exception):
            raise answer
        (about,) = answer.groups
        if about.error_code:
            raise for_code(about.error_code)(f"consumer group {group!r}")
        return {
            (topic.name, one.partition_index): (one.committed_offset, one.metadata or "")
            for topic in about.topics
            for one in topic.partitions
        }

    def _ask_coordinators(
        self,
        names: Sequence[str],
        request: Callable[[str], Any],
        kind: CoordinatorType = CoordinatorType.TRANSACTION,
    ) -> list[Any]:
        """One request for each transactional id (or group) to its coordinator, which is looked up anew, since
        coordinators move. A response or an exception each."""
        if not names:
            return []
        keys = sorted(set(names))
        (found,) = self._send(
            [(FindCoordinatorRequest(key_type=kind.value, coordinator_keys=keys, min_version=4), None)]
        )
        if isinstance(found, Exception):
            return [found] * len(names)
        cluster = self._manager.cluster
        nodes = {
            one.key: for_code(one.error_code)(f"coordinator of {one.key}")
            if one.error_code
            else cluster.add_coordinator(one, kind, one.key, synthesize_node_id=False)
            for one in found.coordinators
        }
        return self._send([(request(name), nodes[name]) for name in names])

    # ------------------------------------------------------------------ what a producer asks
    def begin(self, transactional_id: str, timeout_ms: int) -> Identity:
        """Fence and abort whoever else has the id, and begin its next transaction."""
        new = {"transactional_id": transactional_id, "producer_id": -1, "producer_epoch": -1}
        request = InitProducerIdRequest(transaction_timeout_ms=timeout_ms, min_version=2, **new)
        found = self._ask_coordinator(transactional_id, request, lambda answer: [answer.error_code])
        return new | {"producer_id": found.producer_id, "producer_epoch": found.producer_epoch}

    def add_partitions(self, identity: Identity, places: Iterable[tuple[str, int]]) -> None:
        """To the transaction, which does not add them by itself."""
        numbers: dict[str, list[int]] = {}
        for topic, number in places:
            numbers.setdefault(topic, []).append(number)
        request = AddPartitionsToTxnRequest(
            v3_and_below_transactional_id=identity["transactional_id"],
            v3_and_below_producer_id=identity["producer_id"],
            v3_and_below_producer_epoch=identity["producer_epoch"],
            v3_and_below_topics=[
                AddPartitionsToTxnRequest.AddPartitionsToTxnTopic(name=name, partitions=its)
                for name, its in numbers.items()
            ],
            max_version=3,
        )

        def codes(answer: Any) -> Iterable[int]:
            results = answer.results_by_topic_v3_and_below
            return [one.partition_error_code for topic in results for one in topic.results_by_partition]

        self._ask_coordinator(identity["transactional_id"], request, codes)

    def add_offset(self, identity: Identity, mark: Mark, topic: str, *, by_itself: bool) -> None:
        """To the transaction, for the mark's group; `by_itself`: the group need not be added before."""
        if not by_itself:
            request = AddOffsetsToTxnRequest(group_id=mark.group, max_version=3, **identity)
            self._ask_coordinator(identity["transactional_id"], request, lambda answer: [answer.error_code])
        offsets = TxnOffsetCommitRequest.TxnOffsetCommitRequestTopic
        partition = offsets.TxnOffsetCommitRequestPartition(
            partition_index=PARTITION, committed_offset=mark.offset, committed_metadata=mark.metadata
        )
        request = TxnOffsetCommitRequest(
            group_id=mark.group,
            topics=[offsets(name=topic, partitions=[partition])],
            max_version=5 if by_itself else 3,
            **identity,
        )
        self._ask_coordinator(
            mark.group,
            request,
            lambda answer: [one.error_code for topic in answer.topics for one in topic.partitions],
            CoordinatorType.GROUP,
        )

    def _ask_coordinator(
        self,
        name: str,
        request: Any,
        codes: Callable[[Any], Iterable[int]],
        kind: CoordinatorType = CoordinatorType.TRANSACTION,
    ) -> Any:
        """Raises what keeps it from answering, or an error of those in its answer."""
        (answer,) = self._ask_coordinators([name], lambda _: request, kind)
        if isinstance(answer, Exception):
            raise answer
        for code in sorted(codes(answer), key=lambda code: code == _NOT_ATTEMPTED):
            if code:
                raise for_code(code)(name)
        return answer

    def produce(
        self,
        node: int,
        transactional_id: str,
        batches: Mapping[str, Sequence[tuple[int, bytes]]],
        timeout_ms: int,
        answered: Callable[[Any], None],
        *,
        adds: bool,
    ) -> None:
        """Send record batches, by topic and partition. `answered` is called in another thread, with the response or an
        exception. `adds`: partitions join the transaction by this."""
        data = ProduceRequest.TopicProduceData
        request = ProduceRequest(
            transactional_id=transactional_id,
            acks=-1,
            timeout_ms=timeout_ms,
            topic_data=[
                data(
                    name=name,
                    partition_data=[data.PartitionProduceData(index=number, records=its) for number, its in some],
                )
                for name, some in batches.items()
            ],
            **({"min_version": 12, "max_version": 12} if adds else {"max_version": 11}),
        )
        admin = self.admin
        manager = admin._manager

        async def exchange() -> None:
            try:
                answer = await manager.send(request, node_id=node)
            except Exception as error:
                if isinstance(error, UnknownBrokerIdError):
                    manager.cluster.request_update()
                answer = admin.explained(error)
            answered(answer)

        manager.call_soon(exchange)

    def place(self, topic: str) -> Place | None:
        """None if there is no such topic."""
        if (about := self.topic(topic)) is None:
            return None
        return Place(_id(about), {one["partition_index"]: one["leader_id"] for one in about["partitions"]})

    def largest_batch(self, topic: str) -> int | None:
        """Bytes of a record batch that the topic takes; None without the right to ask."""
        limit = "max.message.bytes"
        found = self.configs("TOPIC", topic, [limit]).get(limit)
        return int(found) if found else None

    # ------------------------------------------------------------------ topics
    def cluster_id(self) -> str:
        """As the brokers said last."""
        return str(self._manager.cluster.cluster_id or self.admin.describe_cluster()["cluster_id"])

    def topic(self, name: str) -> Mapping[str, Any] | None:
        """Partitions, leaders and our rights (`authorized_operations`) of a topic; None if there is no such topic."""
        (found,) = self.admin.describe_topics([name])
        if found["error_code"] == UnknownTopicOrPartitionError.errno:
            return None
        if found["error_code"]:
            raise for_code(found["error_code"])(f"topic {name!r}")
        return dict(found)

    def topic_ids(self, names: Iterable[str]) -> dict[str, str | None]:
        """The id that each topic has now, as Kafka writes it; None if there is no such topic."""
        wanted = sorted(names)
        found: dict[str, str | None] = dict.fromkeys(wanted)
        for about in self.admin.describe_topics(wanted) if wanted else ():
            if about["error_code"] == 0:
                found[about["name"]] = _id(about)
            elif about["error_code"] != UnknownTopicOrPartitionError.errno:
                raise for_code(about["error_code"])(f"topic {about['name']!r}")
        return found

    def brokers(self) -> list[int]:
        """Their ids."""
        return sorted(one["broker_id"] for one in self.admin.describe_cluster()["brokers"])

    def version(self) -> str:
        """The release that the API versions of a broker are of, as far as the client knows releases."""
        return ".".join(map(str, self._manager.broker_version_data.broker_version))

    def configs(self, kind: Literal["BROKER", "TOPIC"], name: str, names: Sequence[str]) -> dict[str, str]:
        """Settings in force. Empty without such a resource, or the right to ask."""
        found = self.admin.describe_configs([ConfigResource(kind, name, dict.fromkeys(names))], config_filter="all")
        about = found[kind.lower()][name]
        return {one: str(about[one]["value"]) for one in names if one in about}

    def may_lose(self, topic: str) -> list[str]:
        """Why a failover may lose acknowledged records: a replica that lags behind may become the leader, or one
        broker's word is enough. Empty without such a topic, or the right to ask."""
        unclean, enough = "unclean.leader.election.enable", "min.insync.replicas"
        found, about, reasons = self.configs("TOPIC", topic, (unclean, enough)), self.topic(topic), []
        if found.get(unclean) == "true":
            reasons.append(f"topic {topic!r} has {unclean} = true, so it may lose acknowledged records")
        replicas = min((len(one["replica_nodes"]) for one in about["partitions"]), default=0) if about else 0
        if replicas > 1 and found.get(enough) == "1":
            reasons.append(
                f"topic {topic!r} has {replicas} replicas and {enough} = 1, so records that only one broker has are "
                "acknowledged, and lost with it"
            )
        return reasons

    def create_topic(self, name: str) -> None:
        """With the brokers' default numbers of partitions and replicas. Not an error if somebody else was quicker."""
        self.admin.create_topics([name], raise_errors=False)

    def open_in(self, places: Iterable[tuple[str, int]]) -> dict[tuple[str, int], set[tuple[int, int]]]:
        """Of each topic and partition, producer id and epoch of the transactions that its leader holds open."""
        found = self.admin.describe_producers([TopicPartition(*place) for place in sorted(places)])
        return {
            (place.topic, place.partition): {
                (one.producer_id, one.producer_epoch)
                for one in about.active_producers
                if one.current_transaction_start_offset >= 0
            }
            for place, about in found.items()
        }

    def starts(self, places: Iterable[Where]) -> dict[Where, int]:
        """The offset that each topic and partition begins with."""
        return self._offsets(places, OffsetSpec.EARLIEST)

    def ends(self, places: Iterable[Where], *, committed: bool) -> dict[Where, int]:
        """The offset after the last record; or after what readers of what is `committed` get."""
        level = IsolationLevel.READ_COMMITTED if committed else IsolationLevel.READ_UNCOMMITTED
        return self._offsets(places, OffsetSpec.LATEST, isolation_level=level)

    def _offsets(self, places: Iterable[Where], spec: Any, **more: Any) -> dict[Where, int]:
        found = self.admin.list_partition_offsets({TopicPartition(*place): spec for place in places}, **more)
        return {(place.topic, place.partition): int(about.offset) for place, about in found.items()}

    def fetch(self, topic: str, partition: int, offset: int, most: int = 1) -> Any:
        """What the partition's leader answers to a Fetch at this offset, with read_committed: `error_code`,
        `last_stable_offset`, `log_start_offset`, `aborted_transactions`, `records`. These are one record batch, whole
        whatever its size, or as many as there are in `most` bytes, of which the last one may be cut off."""
        about = self.topic(topic)
        if about is None:
            raise UnknownTopicOrPartitionError(f"topic {topic!r}")
        leaders = {one["partition_index"]: one["leader_id"] for one in about["partitions"]}
        wanted = FetchRequest.FetchTopic(
            topic=topic,
            partitions=[
                FetchRequest.FetchTopic.FetchPartition(
                    partition=partition, fetch_offset=offset, current_leader_epoch=-1, partition_max_bytes=most
                )
            ],
        )
        request = FetchRequest(
            max_wait_ms=0,
            min_bytes=0,
            max_bytes=most,
            isolation_level=READ_COMMITTED,
            session_epoch=-1,
            topics=[wanted],
            min_version=4,
            max_version=12,  # from 13 on topics go by their ids
        )
        (answer,) = self._send([(request, leaders.get(partition, -1))])
        if isinstance(answer, Exception):
            raise answer
        if answer.error_code:
            raise for_code(answer.error_code)(f"fetch from {topic}-{partition}")
        return answer.responses[0].partitions[0]

    # ------------------------------------------------------------------ wire
    @property
    def _manager(self) -> Any:
        return self.admin._manager

    def _send(self, requests: Sequence[tuple[Any, int | Exception | None]]) -> list[Any]:
        """Send all to their nodes (None: any; an exception is its own answer), then await all: a response or an
        exception each."""
        admin = self.admin
        manager = admin._manager

        async def exchange() -> list[Any]:
            sent = [
                node if isinstance(node, Exception) else manager.send(request, node_id=node)
                for request, node in requests
            ]
            answers: list[Any] = []
            for future in sent:
                try:
                    answers.append(future if isinstance(future, Exception) else await future)
                except Exception as error:
                    answers.append(admin.explained(error))
            return answers

        answered: list[Any] = manager.run(exchange)
        return answered


def _id(topic: Mapping[str, Any]) -> str:
    """As Kafka writes it."""
    return base64.urlsafe_b64encode(uuid.UUID(str(topic["topic_id"])).bytes).decode().rstrip("=")


def _end_txn(commit: bool, version: int, identity: Identity) -> Any:
    return EndTxnRequest(committed=commit, max_version=version, **identity)


def _raise_epoch(identity: Identity) -> Any:
    return InitProducerIdRequest(transaction_timeout_ms=60_000, min_version=3, **identity)


def _offsets(group: str) -> Any:
    wanted = OffsetFetchRequest.OffsetFetchRequestGroup(group_id=group, topics=None)
    return OffsetFetchRequest(groups=[wanted], min_version=8, max_version=8)


def _describe(transactional_id: str) -> Any:
    return DescribeTransactionsRequest(transactional_ids=[transactional_id])
