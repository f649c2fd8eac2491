"""What the brokers of a cluster are asked and told: by a task that writes a transaction, and by the driver, which ends
those that other processes began, and asks what became of them. And which broker to ask: who coordinates a transactional
id or a group, and who leads a partition.

kafka-python's admin client carries it (connections, security, wire messages). It has no call for Produce and
Fetch, for FindCoordinator and for transactions, so those messages go to its `_manager`: the one use of a private
attribute.
"""

from __future__ import annotations

import base64
import math
import re
import time
import uuid
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import starmap
from logging import getLogger
from threading import Lock
from typing import Any, Literal, NamedTuple, TypeVar

from kafka import TopicPartition
from kafka.admin import ConfigResource, KafkaAdminClient, OffsetSpec
from kafka.errors import (
    ConcurrentTransactionsError,
    CoordinatorNotAvailableError,
    InvalidProducerEpochError,
    InvalidProducerIdMappingError,
    KafkaConnectionError,
    KafkaError,
    KafkaTimeoutError,
    LeaderNotAvailableError,
    NodeNotReadyError,
    NotCoordinatorError,
    OperationNotAttemptedError,
    ProducerFencedError,
    RequestTimedOutError,
    TopicAlreadyExistsError,
    TopicAuthorizationFailedError,
    TransactionalIdNotFoundError,
    UnknownTopicOrPartitionError,
    for_code,
)
from kafka.protocol.admin.transactions import (
    DescribeProducersRequest,
    DescribeTransactionsRequest,
    ListTransactionsRequest,
)
from kafka.protocol.broker_version_data import BROKER_API_VERSIONS, BrokerVersionData
from kafka.protocol.consumer import IsolationLevel, ListOffsetsRequest
from kafka.protocol.consumer.fetch import FetchRequest
from kafka.protocol.consumer.group import OffsetFetchRequest
from kafka.protocol.data_container import DataContainer
from kafka.protocol.metadata import ApiVersionsRequest, CoordinatorType, FindCoordinatorRequest, MetadataRequest
from kafka.protocol.producer.produce import ProduceRequest
from kafka.protocol.producer.transaction import (
    AddOffsetsToTxnRequest,
    AddPartitionsToTxnRequest,
    EndTxnRequest,
    InitProducerIdRequest,
    TxnOffsetCommitRequest,
)

from sinks.kafka.errors import NotYetKnown
from sinks.transaction import Identity

getLogger("kafka.admin.client").addFilter(lambda record: "with configuration" not in record.msg)  # has passwords

First = TypeVar("First")
Second = TypeVar("Second")
Where = tuple[str, int]
"""Topic and partition."""

READ_COMMITTED = 1
COMMITTED_STATES = ("PrepareCommit", "CompleteCommit")
_PLAIN, _FENCING = 4, 5
"""Versions of EndTxn. With that of KIP-890 the broker raises the epoch, so that whoever still holds the id is fenced.
It needs the cluster's feature transaction.version 2: without it, a broker can never end the transaction after that."""

_CONCURRENT = ConcurrentTransactionsError.errno
_NOT_THE_COORDINATOR = {CoordinatorNotAvailableError.errno, NotCoordinatorError.errno}
_NOT_ATTEMPTED = OperationNotAttemptedError.errno
_FENCED = 0, InvalidProducerEpochError.errno, InvalidProducerIdMappingError.errno, ProducerFencedError.errno
_UNANSWERED = KafkaConnectionError, KafkaTimeoutError, NodeNotReadyError, RequestTimedOutError
_SHORTEST_TRY = 0.5
_LONGEST_PAUSE = 0.5

_NEWEST = BrokerVersionData(max(BROKER_API_VERSIONS))
"""Each connection is held to what its broker can. kafka-python would hold all to what the first one could when it was
asked, also after an upgrade."""

_TRANSACTION, _GROUP = CoordinatorType.TRANSACTION, CoordinatorType.GROUP
Answer = int | Exception
"""An error code of the broker (0: done), or why it could not be asked."""
ByLeader = Mapping[int, Sequence[Where]]
States = dict[str, tuple[Identity, str]]
"""By transactional id."""


# ---------------------------------------------------------------------- what the brokers remember
# Each participant's transaction carries an offset of a consumer group of the job's own, which becomes the group's if,
# and only if, the records of the transaction become visible.
PARTITION = 0
_METADATA = re.compile(r"lineage=(\w*)(?: round=(\d+))?")


@dataclass(frozen=True)
class Mark:
    """The checkpoint, and the replay (above 0) of it, that a transaction is a part of, as an offset of partition
    `PARTITION` of a topic of the job."""

    group: str
    lineage: str
    checkpoint: int
    round: int = 0

    @property
    def offset(self) -> int:
        """The next one to be committed, as with any consumer group."""
        return self.checkpoint + 1

    @property
    def metadata(self) -> str:
        return f"lineage={self.lineage}" + (f" round={self.round}" if self.round else "")


def newest_marks(offsets: Iterable[tuple[int, str]]) -> dict[str, tuple[int, int]]:
    """By lineage, the newest checkpoint that a group has an offset of, and the round of that. An offset that somebody
    else has set is passed over."""
    marks: dict[str, tuple[int, int]] = {}
    for offset, metadata in offsets:
        if match := _METADATA.fullmatch(metadata.rstrip("\0")):  # confluent-kafka writes a NUL behind it
            lineage, its = match[1], (offset - 1, int(match[2] or 0))
            marks[lineage] = max(its, marks.get(lineage, its))
    return marks


# ---------------------------------------------------------------------- the brokers
class Place(NamedTuple):
    """A topic as it is now: the cluster, its id, and the node that leads each partition, -1 for none."""

    cluster: str
    id: str
    leaders: Mapping[int, int]


class Logs(NamedTuple):
    """Of partitions, who has a transaction open there (producer id and epoch) and the last sequence number of its
    records; and the first offset. Without those that are not there, or that we may not ask about."""

    open_in: Mapping[Where, Mapping[tuple[int, int], int]]
    starts: Mapping[Where, int]


class _Client(KafkaAdminClient):  # type: ignore[misc]
    """Without a thread and open files if no broker is reached."""

    def __init__(self, **options: Any) -> None:
        try:
            super().__init__(**options)
        except BaseException:
            self._closed = not hasattr(self, "_net")
            self.close()
            raise


class Cluster:
    """The brokers of one cluster: connects at its first use; one connection for each broker, shared by all threads.
    Each call raises what keeps them from answering. `options` are kafka-python's; `timeout` in seconds; `reached_by`:
    time.monotonic() from which on the first answer is waited for no more.

    Coroutines run in kafka-python's thread, by `_ask`. A call asks once; `errors.patiently` asks again."""

    def __init__(self, options: Mapping[str, Any], timeout: float, reached_by: float = math.inf) -> None:
        self._options = dict(options)
        self._timeout_ms = int(timeout * 1000)
        self._reached_by = reached_by
        self._lock = Lock()
        self._client: KafkaAdminClient | None = None
        self._coordinators: dict[tuple[CoordinatorType, str], Any] = {}
        """Their nodes."""

    # ------------------------------------------------------------------ the end of transactions
    def end(self, identities: Sequence[Identity], *, commit: bool) -> list[Answer]:
        """EndTxn for each, side by side: the request that its own producer would have sent. Repeating it is safe. An
        abort fences whoever still holds the transactional id, or it could go on with a part of its records."""
        fences = self.fences
        version = _FENCING if fences else _PLAIN
        answers = self._end(identities, lambda its: EndTxnRequest(committed=commit, max_version=version, **its))
        if commit or fences:
            return answers
        # Not InitProducerId alone, which would abort whichever transaction of the id is open now
        aborted = [at for at, answer in enumerate(answers) if answer == 0]
        raised_epochs = self._end([identities[at] for at in aborted], _raise_epoch)
        for at, answer in zip(aborted, raised_epochs, strict=True):
            if answer not in _FENCED:
                answers[at] = answer  # not fenced yet: to be asked again
        return answers

    def fence(self, identity: Identity) -> None:
        """Abort it by a newer epoch, behind which no leader takes what is still under way. InitProducerId would abort
        whichever transaction of the id is open now: if another attempt has begun one, that has fenced this one."""
        name = identity["transactional_id"]
        if self.states([name]).get(name) == (identity, "Ongoing"):
            self._end([identity], _raise_epoch)

    @property
    def fences(self) -> bool:
        """Whether the end of a transaction raises the epoch, and what is sent to a partition adds it (KIP-890). What
        brokers can and what the cluster may do differ: an operator may raise the latter, and lower it, at any time."""
        return self._ask(self._fences)

    async def _fences(self) -> bool:
        request = ApiVersionsRequest(client_software_name="exactly-once", client_software_version="1", min_version=3)
        levels = (await self._request(request)).finalized_features or ()
        return any(level.name == "transaction.version" and level.max_version_level >= 2 for level in levels)

    def _end(self, identities: Sequence[Identity], request: Callable[[Identity], Any]) -> list[Answer]:
        """Ask for each, and again for those that have been ended just before, whose markers are on their way, and where
        the coordinator has moved."""

        def asked(places: Sequence[int]) -> dict[int, Answer]:
            names = [identities[at]["transactional_id"] for at in places]
            requests = [request(identities[at]) for at in places]
            answers = self._ask(lambda: self._ask_coordinators(_TRANSACTION, names, lambda nth: requests[nth[0]]))
            codes = [self._explained(each) if isinstance(each, Exception) else each.error_code for each in answers]
            return dict(zip(places, codes, strict=True))

        answers, pause = asked(range(len(identities))), 0.005
        again = {_CONCURRENT, *_NOT_THE_COORDINATOR}
        while pause < _LONGEST_PAUSE and (busy := [at for at, answer in answers.items() if answer in again]):
            time.sleep(pause)
            pause *= 2
            answers |= asked(busy)
        return list(answers.values())

    # ------------------------------------------------------------------ what became of transactions
    def states(self, transactional_ids: Iterable[str]) -> States:
        """The newest transaction of each transactional id that its coordinator knows, and its state there."""
        names = list(transactional_ids)
        return self._ask(lambda: self._states(names)) if names else {}

    async def _states(self, names: Sequence[str]) -> States:
        states: States = {}
        for name, answer in (await self._described(names)).items():
            about = _raised(answer)
            if about.error_code == TransactionalIdNotFoundError.errno:
                continue
            _checked(about, name)
            identity = {
                "transactional_id": name,
                "producer_id": about.producer_id,
                "producer_epoch": about.producer_epoch,
            }
            states[name] = identity, about.transaction_state
        return states

    async def _described(self, names: Sequence[str]) -> dict[str, Any]:
        """By transactional id, what its coordinator tells of the newest transaction, or an exception."""

        def request(places: list[int]) -> Any:
            return DescribeTransactionsRequest(transactional_ids=[names[at] for at in places])

        answers = await self._ask_coordinators(_TRANSACTION, names, request, together=True)
        described: dict[str, Any] = dict(zip(names, answers, strict=True))
        for answer in {id(answer): answer for answer in answers if not isinstance(answer, Exception)}.values():
            described |= {about.transactional_id: about for about in answer.transaction_states}
        return described

    def has_committed(self, identity: Identity) -> bool:
        """Whether its coordinator knows that it was committed. Where the end fences, it has raised the epoch by one."""
        name = identity["transactional_id"]
        now, state = self.states([name]).get(name, ({}, ""))
        fenced = {**identity, "producer_epoch": identity["producer_epoch"] + 1}
        return state in COMMITTED_STATES and (now == identity or (self.fences and now == fenced))

    def ages(self, transactional_ids: Sequence[str]) -> list[float | None]:
        """Seconds since each one's newest transaction began, by the clock of the coordinator's broker and ours."""
        now = time.time()
        described = self._ask(lambda: self._described(transactional_ids))
        begun = [getattr(described[name], "transaction_start_time_ms", -1) for name in transactional_ids]
        return [None if began < 0 else now - began / 1000 for began in begun]

    def ongoing(self, prefix: str) -> list[Identity]:
        """The open transactions whose transactional id starts with `prefix`."""
        (answers,) = self._ask(lambda: self._ask_all(lambda: _list("Ongoing")))
        states = self.states(_listed(answers, prefix))
        return [identity for identity, state in states.values() if state == "Ongoing"]

    async def _ask_all(self, *requests: Callable[[], Any]) -> list[list[Any]]:
        """Each of all brokers: of those that the client knows at once, beside the question which there are, and then of
        those that have joined since. Raises if one does not answer."""
        known = [broker.node_id for broker in self._manager.cluster.brokers()]
        # first which there are: kafka-python would ask one that is frozen, and has no connection, before a busy one
        about, sent = await self._both(lambda: self._metadata(()), lambda: self._ask_each(requests, known))
        there = [broker.node_id for broker in about.brokers]
        sent |= await self._ask_each(requests, [node for node in there if (node, 0) not in sent])
        return [[_raised(await self._answer(sent[node, at])) for node in there] for at in range(len(requests))]

    async def _ask_each(
        self, requests: Sequence[Callable[[], Any]], nodes: Iterable[int]
    ) -> dict[tuple[int, int], Any]:
        asked = [(node, at) for node in nodes for at in range(len(requests))]
        return dict(zip(asked, self._send((requests[at](), node) for node, at in asked), strict=True))

    def settled_offsets(self, group: str, prefix: str) -> list[tuple[int, str]]:
        """Offsets and metadata that a consumer group has committed; what open transactions carry for it does not
        count. Empty if there is no such group. Raises `NotYetKnown` while a commit of transactional ids with this
        prefix is under way: what is decided reaches the group with the brokers' markers, some milliseconds after
        EndTxn."""
        topics = self._ask(lambda: self._settled_offsets(group, prefix)).groups[0].topics
        return [(each.committed_offset, each.metadata or "") for topic in topics for each in topic.partitions]

    async def _settled_offsets(self, group: str, prefix: str) -> Any:
        """A broker that was frozen answers with the offsets of then, until it learns that another coordinates the group
        now. So all brokers have to name the same."""
        request = OffsetFetchRequest.OffsetFetchRequestGroup(group_id=group, topics=None)
        deciding, found = await self._ask_all(lambda: _list("PrepareCommit"), lambda: _find(_GROUP, [group]))
        if busy := _listed(deciding, prefix):
            raise NotYetKnown(f"the brokers have not finished the commit of {', '.join(busy)}")
        named = [answer.coordinators[0] for answer in found]
        if len({broker.node_id for broker in named}) > 1:
            raise CoordinatorNotAvailableError(f"the brokers do not agree who coordinates group {group}")
        self._know_coordinator(_GROUP, _checked(named[0], f"coordinator of {group}"))
        return await self._ask_coordinator(
            _GROUP, group, OffsetFetchRequest(groups=[request], min_version=8, max_version=8)
        )

    # ------------------------------------------------------------------ what a producer asks
    def begin(
        self, transactional_id: str, timeout_ms: int, topic: str | None = None
    ) -> tuple[Identity, Place | None, bool]:
        """Fence and abort whoever else has the id, and begin its next transaction. And `place` of the topic, and
        `fences`."""
        new = {"transactional_id": transactional_id, "producer_id": -1, "producer_epoch": -1}
        request = InitProducerIdRequest(transaction_timeout_ms=timeout_ms, min_version=2, **new)
        answer, (place, fences) = self._ask(
            lambda: self._both(
                lambda: self._ask_coordinator(_TRANSACTION, transactional_id, request),
                lambda: self._both(lambda: self._place(topic), self._fences),
            )
        )
        return new | {"producer_id": answer.producer_id, "producer_epoch": answer.producer_epoch}, place, fences

    def add_partitions(self, identity: Identity, places: Iterable[Where]) -> None:
        """To the transaction, which does not add them by itself."""
        request = AddPartitionsToTxnRequest(
            v3_and_below_transactional_id=identity["transactional_id"],
            v3_and_below_producer_id=identity["producer_id"],
            v3_and_below_producer_epoch=identity["producer_epoch"],
            v3_and_below_topics=[
                AddPartitionsToTxnRequest.AddPartitionsToTxnTopic(name=name, partitions=its)
                for name, its in _partitions_by_topic(places).items()
            ],
            max_version=3,
        )
        self._ask(lambda: self._ask_coordinator(_TRANSACTION, identity["transactional_id"], request))

    def add_offset(self, identity: Identity, mark: Mark, topic: str, *, by_itself: bool) -> Future[None]:
        """To the transaction, for the mark's group; `by_itself`: the group need not be added before. Does not wait."""
        done = Future[None]()
        added = self._manager.call_soon(self._add_offset, identity, mark, topic, by_itself)
        added.add_callback(done.set_result).add_errback(done.set_exception)
        return done

    async def _add_offset(self, identity: Identity, mark: Mark, topic: str, by_itself: bool) -> None:
        if not by_itself:
            add = AddOffsetsToTxnRequest(group_id=mark.group, max_version=3, **identity)
            await self._ask_coordinator(_TRANSACTION, identity["transactional_id"], add)
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
        await self._ask_coordinator(_GROUP, mark.group, request)

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

        async def exchange() -> None:
            answered(self._explained(await self._answer(*self._send([(request, node)]))))

        self._manager.call_soon(exchange)

    # ------------------------------------------------------------------ topics
    def place(self, topic: str) -> Place | None:
        """None if there is no such topic."""
        return self._ask(lambda: self._place(topic))

    async def _place(self, topic: str | None) -> Place | None:
        if topic is None:
            return None
        about = await self._metadata([topic])
        (described,), id = about.topics, _ids(about)[topic]
        leaders = {partition.partition_index: partition.leader_id for partition in described.partitions}
        return Place(about.cluster_id, id, leaders) if id else None

    def cluster_id(self) -> str:
        return str(self._ask(lambda: self._metadata(())).cluster_id)

    def topic_ids(self, names: Iterable[str]) -> dict[str, str | None]:
        """The id that each topic has now, as Kafka writes it; None if there is no such topic."""
        return _ids(self._ask(lambda: self._metadata(names)))

    def logs(self, places: Iterable[Where]) -> Logs:
        return self.ids_and_logs((), places)[2]

    def states_and_logs(self, transactional_ids: Sequence[str], places: Iterable[Where]) -> tuple[States, Logs]:
        states, (_, _, logs) = self._ask(
            lambda: self._both(lambda: self._states(transactional_ids), lambda: self._ids_and_logs((), places))
        )
        return states, logs

    def ids_and_logs(self, names: Iterable[str], places: Iterable[Where]) -> tuple[str, dict[str, str | None], Logs]:
        """The cluster's id, the topics', and the logs."""
        return self._ask(lambda: self._ids_and_logs(names, places))

    async def _ids_and_logs(
        self, names: Iterable[str], places: Iterable[Where]
    ) -> tuple[str, dict[str, str | None], Logs]:
        wanted, by_leader = set(places), defaultdict[int, list[Where]](list)
        about = await self._metadata({*names, *(topic for topic, _ in wanted)})
        for topic in about.topics:
            for partition in topic.partitions:
                place = topic.name, partition.partition_index
                if place in wanted and partition.leader_id < 0:
                    raise LeaderNotAvailableError(f"{place[0]}-{place[1]}")
                if place in wanted:
                    by_leader[partition.leader_id].append(place)
        logs = await self._both(lambda: self._open_in(by_leader), lambda: self._starts(by_leader))
        return about.cluster_id, _ids(about), Logs(*logs)

    def topic(self, name: str) -> Mapping[str, Any] | None:
        """Partitions, leaders and our rights (`authorized_operations`) of a topic; None if there is no such topic."""
        (about,) = self._call(lambda admin: admin.describe_topics([name]))
        if about["error_code"] == UnknownTopicOrPartitionError.errno:
            return None
        if about["error_code"]:
            raise for_code(about["error_code"])(f"topic {name!r}")
        return dict(about)

    def largest_batch(self, topic: str) -> int | None:
        """Bytes of a record batch that the topic takes; None without the right to ask."""
        limit = self.configs("TOPIC", topic, ["max.message.bytes"]).get("max.message.bytes")
        return int(limit) if limit else None

    def brokers(self) -> list[int]:
        """Their ids."""
        return sorted(broker["broker_id"] for broker in self._call(KafkaAdminClient.describe_cluster)["brokers"])

    def version(self) -> str:
        """The release that the API versions of a broker are of, as far as the client knows releases."""
        node = self.brokers()[0]
        return str(self._call(lambda admin: admin.get_broker_version_data(node)).broker_version_str)

    def configs(self, kind: Literal["BROKER", "TOPIC"], name: str, names: Sequence[str]) -> dict[str, str]:
        """Settings in force. Empty without such a resource, or the right to ask."""
        of = ConfigResource(kind, name, dict.fromkeys(names))
        described = self._call(lambda admin: admin.describe_configs([of], config_filter="all"))
        settings = described[kind.lower()][name]
        return {setting: str(settings[setting]["value"]) for setting in names if setting in settings}

    def may_lose(self, topic: str) -> list[str]:
        """Why a failover may lose acknowledged records: a replica that lags behind may become the leader, or one
        broker's word is enough. Empty without such a topic, or the right to ask."""
        unclean, enough = "unclean.leader.election.enable", "min.insync.replicas"
        settings, about, reasons = self.configs("TOPIC", topic, (unclean, enough)), self.topic(topic), []
        if settings.get(unclean) == "true":
            reasons.append(f"topic {topic!r} has {unclean} = true, so it may lose acknowledged records")
        partitions = about["partitions"] if about else ()
        replicas = min((len(partition["replica_nodes"]) for partition in partitions), default=0)
        if replicas > 1 and settings.get(enough) == "1":
            reasons.append(
                f"topic {topic!r} has {replicas} replicas and {enough} = 1, so records that only one broker has are "
                "acknowledged, and lost with it"
            )
        return reasons

    def create_topic(self, name: str) -> None:
        """With the brokers' default numbers of partitions and replicas. Not an error if somebody else was quicker."""
        made = self._call(lambda admin: admin.create_topics([name], raise_errors=False))["topics"][0]
        if made["error_code"] not in (0, TopicAlreadyExistsError.errno):
            raise for_code(made["error_code"])(made["error_message"])

    async def _open_in(self, by_leader: ByLeader) -> dict[Where, dict[tuple[int, int], int]]:
        topic = DescribeProducersRequest.TopicRequest
        answers = await self._ask_leaders(
            by_leader, lambda name, its: topic(name=name, partition_indexes=its), DescribeProducersRequest
        )
        return {
            place: {
                (producer.producer_id, producer.producer_epoch): producer.last_sequence
                for producer in about.active_producers
                if producer.current_txn_start_offset >= 0
            }
            for place, about in answers.items()
        }

    async def _starts(self, by_leader: ByLeader) -> dict[Where, int]:
        topic = ListOffsetsRequest.ListOffsetsTopic
        first = partial(topic.ListOffsetsPartition, timestamp=OffsetSpec.EARLIEST)
        answers = await self._ask_leaders(
            by_leader,
            lambda name, its: topic(name=name, partitions=[first(partition_index=number) for number in its]),
            partial(ListOffsetsRequest, isolation_level=IsolationLevel.READ_UNCOMMITTED, min_version=2),
        )
        return {place: int(about.offset) for place, about in answers.items()}

    def ends(self, places: Iterable[Where], *, committed: bool = False) -> dict[Where, int]:
        """The offset after the last record, or after the last that readers with read_committed get."""
        wanted = {TopicPartition(*place): OffsetSpec.LATEST for place in places}
        level = IsolationLevel.READ_COMMITTED if committed else IsolationLevel.READ_UNCOMMITTED
        offsets = self._call(lambda admin: admin.list_partition_offsets(wanted, level))
        return {tuple(place): at.offset for place, at in offsets.items()}

    def fetch(self, topic: str, partition: int, offset: int, most: int = 1) -> Any:
        """What the partition's leader answers to a Fetch at this offset, with read_committed: `error_code`,
        `last_stable_offset`, `log_start_offset`, `aborted_transactions`, `records`. These are one record batch, whole
        whatever its size, or as many as there are in `most` bytes, of which the last one may be cut off."""
        if (place := self.place(topic)) is None:
            raise UnknownTopicOrPartitionError(f"topic {topic!r}")
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
        leader = place.leaders.get(partition, -1)
        answer = _checked(self._ask(lambda: self._request(request, leader)), f"fetch from {topic}-{partition}")
        return answer.responses[0].partitions[0]

    # ------------------------------------------------------------------ the connection
    @property
    def _admin(self) -> KafkaAdminClient:
        with self._lock:
            if self._client is None:
                left = max(_SHORTEST_TRY, self._reached_by - time.monotonic())
                ours = {
                    "bootstrap_timeout_ms": min(self._timeout_ms, left * 1000),
                    "request_timeout_ms": self._timeout_ms,
                    "reconnect_backoff_max_ms": 1000,
                    "max_in_flight_requests_per_connection": 1_000_000,  # beyond it, requests would fail
                }
                self._client = _Client(**ours | self._options)
                self._client._manager.broker_version_data = _NEWEST
            return self._client

    @property
    def _manager(self) -> Any:
        return self._admin._manager

    def close(self) -> None:
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _call(self, question: Callable[[KafkaAdminClient], Any]) -> Any:
        try:
            return question(self._admin)
        except KafkaError as error:
            raise self._explained(error) from error

    def _explained(self, answer: Any) -> Any:
        """kafka-python's own errors say nothing but which connection failed. Of the same type, which tells whether to
        ask again."""
        if not isinstance(answer, _UNANSWERED):
            return answer
        servers, text = ", ".join(self._options["bootstrap_servers"]), ", ".join(map(str, answer.args))
        return type(answer)(
            f"{text}. A Kafka broker at {servers} does not answer: check that all of them run, and that this machine "
            "reaches them"
        )

    def _ask(self, question: Callable[[], Awaitable[First]]) -> First:
        answer: First = self._call(lambda admin: admin._manager.run(question))
        return answer

    async def _both(
        self, first: Callable[[], Awaitable[First]], second: Callable[[], Awaitable[Second]]
    ) -> tuple[First, Second]:
        """At once."""
        under_way = self._manager.call_soon(second)
        return await first(), await under_way

    def _send(self, requests: Iterable[tuple[Any, int | Exception | None]]) -> list[Any]:
        """Each to its node (None: any), at once. An exception in place of one is the answer."""
        sent, client = [], self._client
        for request, node in requests:
            try:
                if client is None:
                    raise KafkaConnectionError("the sink was closed")
                sent.append(node if isinstance(node, Exception) else client._manager.send(request, node_id=node))
            except KafkaError as error:
                sent.append(error)
        return sent

    async def _answer(self, sent: Any) -> Any:
        """The response, or why there is none."""
        try:
            return sent if isinstance(sent, Exception) else await sent
        except Exception as error:
            return error

    async def _request(self, request: Any, node: int | None = None) -> Any:
        """The response. Raises why there is none."""
        return _raised(await self._answer(*self._send([(request, node)])))

    async def _metadata(self, topics: Iterable[str]) -> Any:
        """`cluster_id`, `brokers`, and `topics` as they are: `name`, `topic_id`, `partitions` and `error_code`. The
        client's own list of brokers, which may be minutes old, becomes this one: one that has joined can be asked."""
        wanted = [MetadataRequest.MetadataRequestTopic(name=name) for name in sorted(topics)]
        answer = await self._request(MetadataRequest(topics=wanted, allow_auto_topic_creation=False, min_version=10))
        self._manager.cluster.update_metadata(answer)
        return answer

    # ------------------------------------------------------------------ the broker that knows
    async def _ask_coordinators(
        self,
        kind: CoordinatorType,
        names: Sequence[str],
        request: Callable[[list[int]], Any],
        *,
        together: bool = False,
    ) -> list[Any]:
        """One request for each transactional id (or group), made of its place among `names`, which may have one twice;
        or, `together`, for all of a coordinator. A response or an exception each. A broker that answers that it is not
        the one, or not at all, is looked for anew the next time."""
        failed = await self._look_for_coordinators(
            kind, {name for name in names if (kind, name) not in self._coordinators}
        )
        gone = CoordinatorNotAvailableError("it has moved")
        nodes = [failed.get(name) or self._coordinators.get((kind, name), gone) for name in names]
        asked: defaultdict[Any, list[int]] = defaultdict(list)
        for at, node in enumerate(nodes):
            asked[repr(node) if together else at].append(at)  # kafka-python's errors have no hash
        requests = self._send((request(places), nodes[places[0]]) for places in asked.values())
        answers: dict[int, Any] = {}
        for places, sent in zip(asked.values(), requests, strict=True):
            answer = await self._answer(sent)
            moved = isinstance(answer, Exception) or not _NOT_THE_COORDINATOR.isdisjoint(_codes(answer))
            for at in places:
                answers[at] = answer
                if moved:
                    self._coordinators.pop((kind, names[at]), None)
        return [answers[at] for at in range(len(names))]

    async def _look_for_coordinators(self, kind: CoordinatorType, names: Iterable[str]) -> dict[str, Exception]:
        """Those that were not found, and why."""
        if not (keys := sorted(names)):
            return {}
        try:
            answer = await self._request(_find(kind, keys))
        except KafkaError as error:
            return dict.fromkeys(keys, error)
        failed: dict[str, Exception] = {}
        for broker in answer.coordinators:
            if broker.error_code:
                failed[broker.key] = for_code(broker.error_code)(f"coordinator of {broker.key}")
            else:
                self._know_coordinator(kind, broker)
        return failed

    def _know_coordinator(self, kind: CoordinatorType, broker: Any) -> None:
        node = self._manager.cluster.add_coordinator(broker, kind, broker.key, synthesize_node_id=False)
        self._coordinators[kind, broker.key] = node

    async def _ask_coordinator(self, kind: CoordinatorType, name: str, request: Any) -> Any:
        """Raises what keeps it from answering, or an error of those in its answer."""
        (answer,) = await self._ask_coordinators(kind, [name], lambda _: request)
        for code in sorted(_codes(_raised(answer)), key=lambda code: code == _NOT_ATTEMPTED):
            if code:
                raise for_code(code)(name)
        return answer

    async def _ask_leaders(
        self, by_leader: ByLeader, asked: Callable[[str, list[int]], Any], request: Callable[..., Any]
    ) -> dict[Where, Any]:
        """What the leader of each partition answers, without those that we may not ask about. `request` is made of
        topics, each `asked` by its name and partitions."""
        answers: dict[Where, Any] = {}
        topics = {node: starmap(asked, _partitions_by_topic(its).items()) for node, its in by_leader.items()}
        for sent in self._send((request(topics=list(its)), node) for node, its in topics.items()):
            for topic in _raised(await self._answer(sent)).topics:
                for partition in topic.partitions:
                    if partition.error_code != TopicAuthorizationFailedError.errno:
                        number = partition.partition_index
                        answers[topic.name, number] = _checked(partition, f"{topic.name}-{number}")
        return answers


def _list(state: str) -> Any:
    return ListTransactionsRequest(state_filters=[state], producer_id_filters=[])


def _listed(answers: Iterable[Any], prefix: str) -> list[str]:
    """The transactional ids that start with `prefix`."""
    found = [_checked(answer, "list of transactions").transaction_states for answer in answers]
    names = {transaction.transactional_id for transactions in found for transaction in transactions}
    return sorted(name for name in names if name.startswith(prefix))


def _find(kind: CoordinatorType, keys: list[str]) -> Any:
    return FindCoordinatorRequest(key_type=kind.value, coordinator_keys=keys, min_version=4)


def _partitions_by_topic(places: Iterable[Where]) -> dict[str, list[int]]:
    numbers: dict[str, list[int]] = {}
    for topic, number in places:
        numbers.setdefault(topic, []).append(number)
    return numbers


def _raised(answer: Any) -> Any:
    if isinstance(answer, Exception):
        raise answer
    return answer


def _checked(answer: Any, what: str) -> Any:
    """Raises the error that it tells."""
    if answer.error_code:
        raise for_code(answer.error_code)(what)
    return answer


def _codes(answer: DataContainer) -> Iterator[int]:
    """Of errors, wherever it has them; 0 is none."""
    for name in answer.fields:
        value = getattr(answer, name)
        if name.endswith("error_code"):
            yield value
        elif isinstance(value, list):
            for part in value:
                if isinstance(part, DataContainer):
                    yield from _codes(part)


def _id(topic_id: object) -> str:
    return base64.urlsafe_b64encode(uuid.UUID(str(topic_id)).bytes).decode().rstrip("=")


def _ids(about: Any) -> dict[str, str | None]:
    """Of the topics, as Kafka writes them; None of those that are not there."""
    ids: dict[str, str | None] = {}
    for topic in about.topics:
        if topic.error_code not in (0, UnknownTopicOrPartitionError.errno):
            raise for_code(topic.error_code)(f"topic {topic.name!r}")
        ids[topic.name] = None if topic.error_code else _id(topic.topic_id)
    return ids


def _raise_epoch(identity: Identity) -> Any:
    """Begins nothing, so any timeout will do: the least is below every transaction.max.timeout.ms."""
    return InitProducerIdRequest(transaction_timeout_ms=1, min_version=3, **identity)
