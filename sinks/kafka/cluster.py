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
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from logging import DEBUG, getLogger
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
from kafka.net.compat import KafkaNetClient
from kafka.protocol.admin.topics import CreateTopicsRequest
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

# At DEBUG these show passwords: in the configuration, and in logins as they are sent.
for _name, _text in (("admin.client", "with configuration"), ("protocol.parser", " Send"), ("net.connection", "Sasl")):
    getLogger(f"kafka.{_name}").addFilter(
        lambda record, text=_text: record.levelno > DEBUG or text not in record.getMessage()  # type: ignore[misc]
    )

First = TypeVar("First")
Second = TypeVar("Second")
Where = tuple[str, int]
"""Topic and partition."""

COMMITTED_STATES = ("PrepareCommit", "CompleteCommit")
ABORTED_STATES = ("PrepareAbort", "CompleteAbort")
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

_SET_UP = "socket_connection_setup_timeout_ms", "socket_connection_setup_timeout_max_ms"
"""Of a connection. They are not among the options that the admin client takes."""

_TRANSACTION, _GROUP = CoordinatorType.TRANSACTION, CoordinatorType.GROUP
Answer = int | Exception
"""An error code of the broker (0: done), or why it could not be asked."""
ByLeader = Mapping[int, Sequence[Where]]
Ids = dict[str, str | None]
"""Of topics, as Kafka writes them; None of those that are not there."""
Leaders = Mapping[int, int]
"""The node that leads each partition, -1 for none."""
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
    """A topic as it is now."""

    cluster: str
    id: str
    leaders: Leaders


class Logs(NamedTuple):
    """Of partitions, who has a transaction open there (producer id and epoch), with its first offset and the last
    sequence number of its records; and the log's first offset. Without those that are not there, or that we may not ask
    about."""

    open_in: Mapping[Where, Mapping[tuple[int, int], tuple[int, int]]]
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
        self._leaders: dict[str, Leaders] = {}
        """By topic, as last told. Asked beside the question whether they still are."""

    # ------------------------------------------------------------------ the end of transactions
    def end(self, identities: Sequence[Identity], *, commit: bool) -> list[Answer]:
        """EndTxn for each, side by side: the request that its own producer would have sent. Repeating it is safe. An
        abort fences whoever still holds the transactional id, or it could go on with a part of its records."""
        fences = self.fences
        answers, _ = self._end(identities, partial(_end_txn, commit, fences))
        if commit or fences:
            return answers
        # Not InitProducerId alone, which would abort whichever transaction of the id is open now
        aborted = [at for at, answer in enumerate(answers) if answer == 0]
        raised_epochs, _ = self._end([identities[at] for at in aborted], _raise_epoch)
        for at, answer in zip(aborted, raised_epochs, strict=True):
            if answer not in _FENCED:
                answers[at] = answer  # not fenced yet: to be asked again
        return answers

    def commit(
        self, identities: Sequence[Identity], topics: Iterable[str], *, fences: bool
    ) -> tuple[list[Answer], list[Ids]]:
        """As `end`, where `fences` is known; and the ids that topics have after that, as each coordinator tells."""
        return self._end(identities, partial(_end_txn, True, fences), sorted(topics))

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

    def _end(
        self, identities: Sequence[Identity], request: Callable[[Identity], Any], topics: Sequence[str] = ()
    ) -> tuple[list[Answer], list[Ids]]:
        """Ask for each, and again for those that have been ended just before, whose markers are on their way, and where
        the coordinator has moved. The ids of `topics` are asked for behind that, on the same connections: a broker
        answers in the order of the requests."""
        ids_after: list[Ids] = []

        def asked(places: Sequence[int]) -> dict[int, Answer]:
            names = [identities[at]["transactional_id"] for at in places]
            requests = [request(identities[at]) for at in places]
            behind = partial(_about, topics) if topics else None
            answers = self._ask(
                lambda: self._ask_coordinators(_TRANSACTION, names, lambda nth: requests[nth[0]], behind=behind)
            )
            answers, abouts = answers[: len(places)], answers[len(places) :]
            ids_after.extend({} if isinstance(about, Exception) else _ids(about) for about in abouts)
            codes = [self._explained(each) if isinstance(each, Exception) else each.error_code for each in answers]
            return dict(zip(places, codes, strict=True))

        answers, pause = asked(range(len(identities))), 0.005
        again = {_CONCURRENT, *_NOT_THE_COORDINATOR}
        while pause < _LONGEST_PAUSE and (busy := [at for at, answer in answers.items() if answer in again]):
            time.sleep(pause)
            pause *= 2
            answers |= asked(busy)
        return list(answers.values()), ids_after

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

    def ended_in(self, states: Collection[str], identity: Identity) -> bool:
        """Whether its coordinator has it in one of these states. Where the end fences, it has raised the epoch by
        one."""
        name = identity["transactional_id"]
        now, state = self.states([name]).get(name, ({}, ""))
        fenced = {**identity, "producer_epoch": identity["producer_epoch"] + 1}
        return state in states and (now == identity or (self.fences and now == fenced))

    def ages(self, transactional_ids: Sequence[str]) -> list[float | None]:
        """Seconds since each one's newest transaction began, by the clock of the coordinator's broker and ours."""
        now = time.time()
        described = self._ask(lambda: self._described(transactional_ids))
        begun = [getattr(described[name], "transaction_start_time_ms", -1) for name in transactional_ids]
        return [None if began < 0 else now - began / 1000 for began in begun]

    def ongoing(self, prefix: str) -> list[Identity]:
        """The open transactions whose transactional id starts with `prefix`."""
        answers = self._ask(lambda: self._ask_all(lambda _: [_list("Ongoing")]))
        states = self.states(_listed((listed for (listed,) in answers.values()), prefix))
        return [identity for identity, state in states.values() if state == "Ongoing"]

    async def _ask_all(self, requests: Callable[[int], list[Any]]) -> dict[int, list[Any]]:
        """`requests` of each of all brokers: of those that the client knows at once, beside the question which there
        are, and then of those that have joined since. Raises if one does not answer."""
        known = [broker.node_id for broker in self._manager.cluster.brokers()]
        about, sent = await self._both(lambda: self._metadata(()), lambda: self._ask_each(requests, known))
        there = [broker.node_id for broker in about.brokers]
        sent |= await self._ask_each(requests, [node for node in there if node not in sent])
        answers = {}
        for node in there:  # Python 3.10 takes no comprehension for it
            answers[node] = [_raised(await self._answer(its)) for its in sent[node]]
        return answers

    async def _ask_each(self, requests: Callable[[int], list[Any]], nodes: Iterable[int]) -> dict[int, list[Any]]:
        return {node: self._send((request, node) for request in requests(node)) for node in nodes}

    def settled_offsets(self, group: str, prefix: str) -> list[tuple[int, str]]:
        """Offsets and metadata that a consumer group has committed; what open transactions carry for it does not
        count. Empty if there is no such group. Raises `NotYetKnown` while a commit of transactional ids with this
        prefix is under way: what is decided reaches the group with the brokers' markers, some milliseconds after
        EndTxn."""
        return self._ask(lambda: self._settled_offsets(group, prefix))

    async def _settled_offsets(self, group: str, prefix: str) -> list[tuple[int, str]]:
        """A broker that was frozen answers with the offsets of then, until it learns that another coordinates the group
        now. So all others have to name the one that is asked for them."""
        node = _raised((await self._coordinators_of(_GROUP, [group]))[group])

        def requests(broker: int) -> list[Any]:
            return [_list("PrepareCommit"), *([_find(_GROUP, [group])] if broker != node else [])]

        asked = OffsetFetchRequest.OffsetFetchRequestGroup(group_id=group, topics=None)
        offsets = OffsetFetchRequest(groups=[asked], min_version=8, max_version=8)
        answers = await self._ask_all(requests)
        if busy := _listed((deciding for deciding, *_ in answers.values()), prefix):
            raise NotYetKnown(f"the brokers have not finished the commit of {', '.join(busy)}")
        if any(answer.coordinators[0].node_id != node for _, *others in answers.values() for answer in others):
            self._coordinators.pop((_GROUP, group), None)
            raise CoordinatorNotAvailableError(f"the brokers do not agree who coordinates group {group}")
        topics = (await self._ask_coordinator(_GROUP, group, offsets)).groups[0].topics
        return [(each.committed_offset, each.metadata or "") for topic in topics for each in topic.partitions]

    # ------------------------------------------------------------------ what a producer asks
    def begin(
        self, transactional_id: str, timeout_ms: int, topic: str | None = None
    ) -> tuple[Identity, Place | None, bool]:
        """Fence and abort whoever else has the id, and begin its next transaction. And `place` of the topic, and
        `fences`."""
        new = {"transactional_id": transactional_id, "producer_id": -1, "producer_epoch": -1}
        request = InitProducerIdRequest(transaction_timeout_ms=timeout_ms, min_version=2, **new)
        # InitProducerId first: whoever asks again when the other has failed would leave it under way, to fence itself
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
        id = _ids(about)[topic]
        return Place(about.cluster_id, id, self._leaders[topic]) if id else None

    def cluster_id(self) -> str:
        return str(self._ask(lambda: self._metadata(())).cluster_id)

    def topic_ids(self, names: Iterable[str]) -> Ids:
        return _ids(self._ask(lambda: self._metadata(names)))

    def logs(self, places: Iterable[Where]) -> Logs:
        return self._ask(lambda: self._ids_and_logs((), places))[2]

    def states_and_logs(self, transactional_ids: Sequence[str], places: Iterable[Where]) -> tuple[States, Logs]:
        (_, _, logs), states = self._ask(
            lambda: self._both(lambda: self._ids_and_logs((), places), lambda: self._states(transactional_ids))
        )
        return states, logs

    def before_commit(self, topics: Iterable[str], places: Iterable[Where]) -> tuple[str, Ids, Logs, bool]:
        """The cluster's id, the topics', the logs, and `fences`."""
        found, fences = self._ask(lambda: self._both(lambda: self._ids_and_logs(topics, places), self._fences))
        return *found, fences

    async def _ids_and_logs(self, names: Iterable[str], places: Iterable[Where]) -> tuple[str, Ids, Logs]:
        wanted = sorted(places)
        asked = self._by_leader(wanted)
        about, logs = await self._both(
            lambda: self._metadata({*names, *(topic for topic, _ in wanted)}), lambda: self._send_logs(asked)
        )
        if (by_leader := self._by_leader(wanted)) != asked:
            logs = await self._send_logs(by_leader)
        if none := by_leader.get(-1):
            raise LeaderNotAvailableError(", ".join(f"{topic}-{number}" for topic, number in none))
        described, starts = [await self._led(each) for each in logs]
        open_in = {
            place: {
                (each.producer_id, each.producer_epoch): (each.current_txn_start_offset, each.last_sequence)
                for each in its.active_producers
                if each.current_txn_start_offset >= 0
            }
            for place, its in described.items()
        }
        return about.cluster_id, _ids(about), Logs(open_in, {place: int(its.offset) for place, its in starts.items()})

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
        made = self._ask(lambda: self._created(name)).topics[0]
        if made.error_code not in (0, TopicAlreadyExistsError.errno):
            raise for_code(made.error_code)(made.error_message)

    async def _created(self, name: str) -> Any:
        topic = CreateTopicsRequest.CreatableTopic(name=name, num_partitions=-1, replication_factor=-1)
        request = CreateTopicsRequest(topics=[topic], timeout_ms=self._timeout_ms, min_version=4)
        return await self._request(request, (await self._metadata(())).controller_id)

    def _by_leader(self, places: Iterable[Where]) -> ByLeader:
        """Those whose leader is known."""
        by_leader = defaultdict[int, list[Where]](list)
        for topic, number in places:
            if (leader := self._leaders.get(topic, {}).get(number)) is not None:
                by_leader[leader].append((topic, number))
        return by_leader

    async def _send_logs(self, by_leader: ByLeader) -> tuple[list[Any], list[Any]]:
        """Who has a transaction open there, and where the logs begin. Does not wait for the answers."""
        topic, log = DescribeProducersRequest.TopicRequest, ListOffsetsRequest.ListOffsetsTopic
        first = partial(log.ListOffsetsPartition, timestamp=OffsetSpec.EARLIEST)
        open_in, starts = list[Any](), list[Any]()
        for node, places in by_leader.items():
            its = _partitions_by_topic(places).items()
            topics = [topic(name=name, partition_indexes=numbers) for name, numbers in its]
            logs = [log(name=name, partitions=[first(partition_index=n) for n in numbers]) for name, numbers in its]
            open_in.append((DescribeProducersRequest(topics=topics), node))
            level = IsolationLevel.READ_UNCOMMITTED
            starts.append((ListOffsetsRequest(topics=logs, isolation_level=level, min_version=2), node))
        return self._send(open_in), self._send(starts)

    async def _led(self, requests: Iterable[Any]) -> dict[Where, Any]:
        """What the leader of each partition answers, without those that we may not ask about."""
        answers: dict[Where, Any] = {}
        for sent in requests:
            for topic in _raised(await self._answer(sent)).topics:
                for partition in topic.partitions:
                    if partition.error_code != TopicAuthorizationFailedError.errno:
                        number = partition.partition_index
                        answers[topic.name, number] = _checked(partition, f"{topic.name}-{number}")
        return answers

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
            isolation_level=IsolationLevel.READ_COMMITTED,
            session_epoch=-1,
            topics=[wanted],
            min_version=4,
            max_version=12,  # from 13 on topics go by their ids
        )
        leader = place.leaders.get(partition, -1)
        answer = _checked(self._ask(lambda: self._request(request, leader)), f"fetch from {topic}-{partition}")
        if not answer.responses:
            raise NotYetKnown(f"the broker holds {topic}-{partition} back: a quota lets this client read no more now")
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
                    "kafka_client": _without_metrics,
                }
                self._client = _Client(**ours | self._options)
                self._client._manager.broker_version_data = _NEWEST
                self._client._manager.config |= dict.fromkeys(_SET_UP, self._timeout_ms)
            return self._client

    @property
    def _manager(self) -> Any:
        return self._admin._manager

    def connect(self) -> None:
        """Raises what keeps the client from its first broker, within one `timeout`. Nothing is sent once it has one."""
        self._call(lambda _: None)

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
        """Each to its node, at once. An exception in place of one is the answer. None: to the least busy of those that
        are connected. kafka-python would first connect to another one, which may be frozen."""
        sent, client = [], self._client
        for request, node in requests:
            try:
                if client is None:
                    raise KafkaConnectionError("the sink was closed")
                if node is None:
                    connections = [one for one in client._manager._conns.values() if one.connected and not one.paused]
                    least = min(connections, key=lambda one: len(one.in_flight_requests), default=None)
                    node = least and least.node_id
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
        answer = await self._request(_about(sorted(topics)))
        self._manager.cluster.update_metadata(answer)
        for topic in answer.topics:
            self._leaders[topic.name] = {its.partition_index: its.leader_id for its in topic.partitions}
        return answer

    # ------------------------------------------------------------------ the broker that knows
    async def _ask_coordinators(
        self,
        kind: CoordinatorType,
        names: Sequence[str],
        request: Callable[[list[int]], Any],
        *,
        together: bool = False,
        behind: Callable[[], Any] | None = None,
    ) -> list[Any]:
        """One request for each transactional id (or group), made of its place among `names`, which may have one twice;
        or, `together`, for all of a coordinator. A response or an exception each. A broker that answers that it is not
        the one, or not at all, is looked for anew the next time. `behind`: a last request to each coordinator, whose
        answers come last."""
        nodes = await self._coordinators_of(kind, names)
        asked: defaultdict[Any, list[int]] = defaultdict(list)
        for at, name in enumerate(names):
            asked[repr(nodes[name]) if together else at].append(at)  # kafka-python's errors have no hash
        requests = self._send((request(places), nodes[names[places[0]]]) for places in asked.values())
        last = self._send((behind(), node) for node in {repr(n): n for n in nodes.values()}.values()) if behind else ()
        answers: dict[int, Any] = {}
        for places, sent in zip(asked.values(), requests, strict=True):
            answer = await self._answer(sent)
            moved = isinstance(answer, Exception) or not _NOT_THE_COORDINATOR.isdisjoint(_codes(answer))
            for at in places:
                answers[at] = answer
                if moved:
                    self._coordinators.pop((kind, names[at]), None)
        return [*(answers[at] for at in range(len(names))), *[await self._answer(sent) for sent in last]]

    async def _coordinators_of(self, kind: CoordinatorType, names: Iterable[str]) -> dict[str, Any]:
        """By name, the node that is asked, or why there is none."""
        nodes = {name: self._coordinators.get((kind, name)) for name in names}
        if not (keys := sorted(name for name, node in nodes.items() if node is None)):
            return nodes
        try:
            answer = await self._request(_find(kind, keys))
        except KafkaError as error:
            return nodes | dict.fromkeys(keys, error)
        for broker in answer.coordinators:
            if broker.error_code:
                nodes[broker.key] = for_code(broker.error_code)(f"coordinator of {broker.key}")
            else:
                node = self._manager.cluster.add_coordinator(broker, kind, broker.key, synthesize_node_id=False)
                nodes[broker.key] = self._coordinators[kind, broker.key] = node
        return nodes

    async def _ask_coordinator(self, kind: CoordinatorType, name: str, request: Any) -> Any:
        """Raises what keeps it from answering, or an error of those in its answer."""
        (answer,) = await self._ask_coordinators(kind, [name], lambda _: request)
        for code in sorted(_codes(_raised(answer)), key=lambda code: code == _NOT_ATTEMPTED):
            if code:
                raise for_code(code)(name)
        return answer


def _without_metrics(metrics: object, **options: Any) -> Any:
    """They would take a tenth of the time of a request, and nobody reads them."""
    return KafkaNetClient(**options)


def _list(state: str) -> Any:
    return ListTransactionsRequest(state_filters=[state], producer_id_filters=[])


def _listed(answers: Iterable[Any], prefix: str) -> list[str]:
    """The transactional ids that start with `prefix`."""
    listed = [_checked(answer, "list of transactions").transaction_states for answer in answers]
    names = {transaction.transactional_id for transactions in listed for transaction in transactions}
    return sorted(name for name in names if name.startswith(prefix))


def _about(topics: Iterable[str]) -> Any:
    wanted = [MetadataRequest.MetadataRequestTopic(name=name) for name in topics]
    return MetadataRequest(topics=wanted, allow_auto_topic_creation=False, min_version=10)


def _end_txn(commit: bool, fences: bool, identity: Identity) -> Any:
    return EndTxnRequest(committed=commit, max_version=_FENCING if fences else _PLAIN, **identity)


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


def _ids(about: Any) -> Ids:
    ids: Ids = {}
    for topic in about.topics:
        if topic.error_code not in (0, UnknownTopicOrPartitionError.errno):
            raise for_code(topic.error_code)(f"topic {topic.name!r}")
        ids[topic.name] = None if topic.error_code else _id(topic.topic_id)
    return ids


def _raise_epoch(identity: Identity) -> Any:
    """Begins nothing, so any timeout will do: the least is below every transaction.max.timeout.ms."""
    return InitProducerIdRequest(transaction_timeout_ms=1, min_version=3, **identity)
