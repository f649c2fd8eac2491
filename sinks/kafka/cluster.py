"""What the brokers of a cluster are asked and told: by a task that writes a transaction, and by the
driver, which ends those that other processes began, and asks what became of them.

How they are asked, and which of them, is in `connection.py`; what they remember of a job, in
`memory.py`.
"""

from __future__ import annotations

import base64
import math
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

from kafka import IsolationLevel, TopicPartition
from kafka.admin import ConfigResource, KafkaAdminClient, OffsetSpec
from kafka.errors import (
    ConcurrentTransactionsError,
    InvalidProducerEpochError,
    InvalidProducerIdMappingError,
    LeaderNotAvailableError,
    ProducerFencedError,
    TopicAlreadyExistsError,
    TopicAuthorizationFailedError,
    TransactionalIdNotFoundError,
    UnknownTopicOrPartitionError,
    for_code,
)

from sinks.kafka.connection import (
    NOT_THE_COORDINATOR,
    TRANSACTION,
    ByLeader,
    Connections,
    Leaders,
    Where,
    checked,
    listed,
    metadata_request,
    raised,
    transactions_request,
)
from sinks.kafka.errors import NotYetKnown
from sinks.kafka.internals import (
    AddPartitionsToTxnRequest,
    ApiVersionsRequest,
    CreateTopicsRequest,
    DescribeProducersRequest,
    DescribeTransactionsRequest,
    EndTxnRequest,
    FetchRequest,
    InitProducerIdRequest,
    ListOffsetsRequest,
    ProduceRequest,
)
from sinks.kafka.memory import GroupMemory
from sinks.transaction import Identity

COMMITTED_STATES = ("PrepareCommit", "CompleteCommit")
ABORTED_STATES = ("PrepareAbort", "CompleteAbort")
_PLAIN = 4
_FENCING = 5
"""Versions of EndTxn. With that of KIP-890 the broker raises the epoch, so that whoever still holds
the id is fenced. It needs the cluster's feature transaction.version 2: without it, a broker can
never end the transaction after that."""

_CONCURRENT = ConcurrentTransactionsError.errno
_FENCED = (
    0,
    InvalidProducerEpochError.errno,
    InvalidProducerIdMappingError.errno,
    ProducerFencedError.errno,
)
_LONGEST_PAUSE = 0.5

EndResult = int | Exception
"""The result of EndTxn for one transaction: the broker's error code (0: done), or why the broker
gave none."""
Ids = dict[str, str | None]
"""Of topics, as Kafka writes them; None of those that are not there."""
States = dict[str, tuple[Identity, str]]
"""By transactional id."""


class Place(NamedTuple):
    """A topic as it is now."""

    cluster: str
    id: str
    leaders: Leaders


class Logs(NamedTuple):
    """Of partitions, who has a transaction open there (producer id and epoch), with its first
    offset and the last sequence number of its records; and the log's first offset. Without those
    that are not there, or that we may not ask about."""

    open_in: Mapping[Where, Mapping[tuple[int, int], tuple[int, int]]]
    starts: Mapping[Where, int]


class Cluster:
    """The brokers of one cluster.

    The arguments are those of `Connections`, and so is what each call raises.
    """

    def __init__(
        self, options: Mapping[str, Any], timeout: float, reached_by: float = math.inf
    ) -> None:
        self.net = Connections(options, timeout, reached_by)
        self.memory = GroupMemory(self.net)

    def connect(self) -> None:
        self.net.connect()

    def close(self) -> None:
        self.net.close()

    # ------------------------------------------------------------------ the end of transactions
    def end(self, identities: Sequence[Identity], *, commit: bool) -> list[EndResult]:
        """EndTxn for each, side by side: the request that its own producer would have sent.

        Repeating it is safe. An abort fences whoever still holds the transactional id, or it could
        go on with a part of its records.
        """
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
    ) -> tuple[list[EndResult], list[Ids]]:
        """As `end`, where `fences` is known; and the ids that topics have after that, as each
        coordinator tells."""
        return self._end(identities, partial(_end_txn, True, fences), sorted(topics))

    def fence(self, identity: Identity) -> None:
        """Abort it by a newer epoch, behind which no leader takes what is still under way.

        InitProducerId would abort whichever transaction of the id is open now: if another attempt
        has begun one, that has fenced this one.
        """
        name = identity["transactional_id"]
        if self.states([name]).get(name) == (identity, "Ongoing"):
            self._end([identity], _raise_epoch)

    @property
    def fences(self) -> bool:
        """Whether the end of a transaction raises the epoch, and what is sent to a partition adds
        it (KIP-890). What brokers can and what the cluster may do differ: an operator may raise the
        latter, and lower it, at any time."""
        return self.net.ask(self._fences)

    async def _fences(self) -> bool:
        request = ApiVersionsRequest(
            client_software_name="exactly-once", client_software_version="1", min_version=3
        )
        levels = (await self.net.request(request)).finalized_features or ()
        return any(
            level.name == "transaction.version" and level.max_version_level >= 2 for level in levels
        )

    def _end(
        self,
        identities: Sequence[Identity],
        request: Callable[[Identity], Any],
        topics: Sequence[str] = (),
    ) -> tuple[list[EndResult], list[Ids]]:
        """Ask for each, and again for those that have been ended just before, whose markers are on
        their way, and where the coordinator has moved. The ids of `topics` are asked for behind
        that, on the same connections: a broker answers in the order of the requests."""
        ids_after: list[Ids] = []

        def asked(places: Sequence[int]) -> dict[int, EndResult]:
            names = [identities[at]["transactional_id"] for at in places]
            requests = [request(identities[at]) for at in places]
            behind = partial(metadata_request, topics) if topics else None
            answers = self.net.ask(
                lambda: self.net.ask_coordinators(
                    TRANSACTION, names, lambda nth: requests[nth[0]], behind=behind
                )
            )
            answers, abouts = answers[: len(places)], answers[len(places) :]
            ids_after.extend(
                {} if isinstance(about, Exception) else _ids(about) for about in abouts
            )
            codes = [
                self.net.explained(each) if isinstance(each, Exception) else each.error_code
                for each in answers
            ]
            return dict(zip(places, codes, strict=True))

        answers = asked(range(len(identities)))
        pause = 0.005
        again = {_CONCURRENT, *NOT_THE_COORDINATOR}
        while pause < _LONGEST_PAUSE and (
            busy := [at for at, answer in answers.items() if answer in again]
        ):
            time.sleep(pause)
            pause *= 2
            answers |= asked(busy)
        return list(answers.values()), ids_after

    # ------------------------------------------------------------------ what became of transactions
    def states(self, transactional_ids: Iterable[str]) -> States:
        """The newest transaction of each transactional id that its coordinator knows, and its state
        there."""
        names = list(transactional_ids)
        return self.net.ask(lambda: self._states(names)) if names else {}

    async def _states(self, names: Sequence[str]) -> States:
        states: States = {}
        for name, answer in (await self._described(names)).items():
            about = raised(answer)
            if about.error_code == TransactionalIdNotFoundError.errno:
                continue
            checked(about, name)
            identity = {
                "transactional_id": name,
                "producer_id": about.producer_id,
                "producer_epoch": about.producer_epoch,
            }
            states[name] = identity, about.transaction_state
        return states

    async def _described(self, names: Sequence[str]) -> dict[str, Any]:
        """By transactional id, what its coordinator tells of the newest transaction, or an
        exception."""

        def request(places: list[int]) -> Any:
            return DescribeTransactionsRequest(transactional_ids=[names[at] for at in places])

        answers = await self.net.ask_coordinators(TRANSACTION, names, request, together=True)
        described: dict[str, Any] = dict(zip(names, answers, strict=True))
        for answer in {
            id(answer): answer for answer in answers if not isinstance(answer, Exception)
        }.values():
            described |= {about.transactional_id: about for about in answer.transaction_states}
        return described

    def ended_in(self, states: Collection[str], identity: Identity) -> bool:
        """Whether its coordinator has it in one of these states.

        Where the end fences, it has raised the epoch by one.
        """
        name = identity["transactional_id"]
        now, state = self.states([name]).get(name, ({}, ""))
        fenced = {**identity, "producer_epoch": identity["producer_epoch"] + 1}
        return state in states and (now == identity or (self.fences and now == fenced))

    def ages(self, transactional_ids: Sequence[str]) -> list[float | None]:
        """Seconds since each one's newest transaction began, by the clock of the coordinator's
        broker and ours."""
        now = time.time()
        described = self.net.ask(lambda: self._described(transactional_ids))
        begun = [
            getattr(described[name], "transaction_start_time_ms", -1) for name in transactional_ids
        ]
        return [None if began < 0 else now - began / 1000 for began in begun]

    def ongoing(self, prefix: str) -> list[Identity]:
        """The open transactions whose transactional id starts with `prefix`."""
        answers = self.net.ask(
            lambda: self.net.ask_all(lambda _: [transactions_request("Ongoing")])
        )
        states = self.states(listed((answer for (answer,) in answers.values()), prefix))
        return [identity for identity, state in states.values() if state == "Ongoing"]

    # ------------------------------------------------------------------ what a producer asks
    def begin(
        self, transactional_id: str, timeout_ms: int, topic: str | None = None
    ) -> tuple[Identity, Place | None, bool]:
        """Fence and abort whoever else has the id, and begin its next transaction.

        And `place` of the topic, and `fences`.
        """
        new = {"transactional_id": transactional_id, "producer_id": -1, "producer_epoch": -1}
        request = InitProducerIdRequest(transaction_timeout_ms=timeout_ms, min_version=2, **new)
        # InitProducerId first: whoever asks again when the other has failed would leave it under
        # way, to fence itself
        answer, (place, fences) = self.net.ask(
            lambda: self.net.both(
                lambda: self.net.ask_coordinator(TRANSACTION, transactional_id, request),
                lambda: self.net.both(lambda: self._place(topic), self._fences),
            )
        )
        return (
            new | {"producer_id": answer.producer_id, "producer_epoch": answer.producer_epoch},
            place,
            fences,
        )

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
        self.net.ask(
            lambda: self.net.ask_coordinator(TRANSACTION, identity["transactional_id"], request)
        )

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
        """Send record batches, by topic and partition.

        `answered` is called in another thread, with the response or an exception. `adds`:
        partitions join the transaction by this.
        """
        data = ProduceRequest.TopicProduceData
        request = ProduceRequest(
            transactional_id=transactional_id,
            acks=-1,
            timeout_ms=timeout_ms,
            topic_data=[
                data(
                    name=name,
                    partition_data=[
                        data.PartitionProduceData(index=number, records=its) for number, its in some
                    ],
                )
                for name, some in batches.items()
            ],
            **({"min_version": 12, "max_version": 12} if adds else {"max_version": 11}),
        )

        async def exchange() -> None:
            answered(self.net.explained(await self.net.answer(*self.net.send([(request, node)]))))

        self.net.start(exchange)

    # ------------------------------------------------------------------ topics
    def place(self, topic: str) -> Place | None:
        """None if there is no such topic."""
        return self.net.ask(lambda: self._place(topic))

    async def _place(self, topic: str | None) -> Place | None:
        if topic is None:
            return None
        about = await self.net.metadata([topic])
        id = _ids(about)[topic]
        return Place(about.cluster_id, id, self.net.leaders[topic]) if id else None

    def cluster_id(self) -> str:
        return str(self.net.ask(lambda: self.net.metadata(())).cluster_id)

    def topic_ids(self, names: Iterable[str]) -> Ids:
        return _ids(self.net.ask(lambda: self.net.metadata(names)))

    def logs(self, places: Iterable[Where]) -> Logs:
        return self.net.ask(lambda: self._ids_and_logs((), places))[2]

    def states_and_logs(
        self, transactional_ids: Sequence[str], places: Iterable[Where]
    ) -> tuple[States, Logs]:
        (_, _, logs), states = self.net.ask(
            lambda: self.net.both(
                lambda: self._ids_and_logs((), places), lambda: self._states(transactional_ids)
            )
        )
        return states, logs

    def before_commit(
        self, topics: Iterable[str], places: Iterable[Where]
    ) -> tuple[str, Ids, Logs, bool]:
        """The cluster's id, the topics', the logs, and `fences`."""
        found, fences = self.net.ask(
            lambda: self.net.both(lambda: self._ids_and_logs(topics, places), self._fences)
        )
        return *found, fences

    async def _ids_and_logs(
        self, names: Iterable[str], places: Iterable[Where]
    ) -> tuple[str, Ids, Logs]:
        wanted = sorted(places)
        asked = self.net.by_leader(wanted)
        about, logs = await self.net.both(
            lambda: self.net.metadata({*names, *(topic for topic, _ in wanted)}),
            lambda: self._send_logs(asked),
        )
        if (by_leader := self.net.by_leader(wanted)) != asked:
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
        return about.cluster_id, _ids(about), Logs(open_in, offsets)

    def topic(self, name: str) -> Mapping[str, Any] | None:
        """Partitions, leaders and our rights (`authorized_operations`) of a topic; None if there is
        no such topic."""
        (about,) = self.net.call(lambda admin: admin.describe_topics([name]))
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
        return sorted(
            broker["broker_id"]
            for broker in self.net.call(KafkaAdminClient.describe_cluster)["brokers"]
        )

    def version(self) -> str:
        """The release that the API versions of a broker are of, as far as the client knows
        releases."""
        node = self.brokers()[0]
        release = self.net.call(lambda admin: admin.get_broker_version_data(node)).broker_version
        return ".".join(map(str, release))

    def configs(
        self, kind: Literal["BROKER", "TOPIC"], name: str, names: Sequence[str]
    ) -> dict[str, str]:
        """Settings in force. Empty without such a resource, or the right to ask."""
        of = ConfigResource(kind, name, dict.fromkeys(names))
        described = self.net.call(lambda admin: admin.describe_configs([of], config_filter="all"))
        settings = described[kind.lower()][name]
        return {
            setting: str(settings[setting]["value"]) for setting in names if setting in settings
        }

    def may_lose(self, topic: str) -> list[str]:
        """Why a failover may lose acknowledged records: a replica that lags behind may become the
        leader, or one broker's word is enough. Empty without such a topic, or the right to ask."""
        unclean = "unclean.leader.election.enable"
        enough = "min.insync.replicas"
        settings = self.configs("TOPIC", topic, (unclean, enough))
        about = self.topic(topic)
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

    def create_topic(self, name: str) -> None:
        """With the brokers' default numbers of partitions and replicas.

        Not an error if somebody else was quicker.
        """
        made = self.net.ask(lambda: self._created(name)).topics[0]
        if made.error_code not in (0, TopicAlreadyExistsError.errno):
            raise for_code(made.error_code)(made.error_message)

    async def _created(self, name: str) -> Any:
        topic = CreateTopicsRequest.CreatableTopic(
            name=name, num_partitions=-1, replication_factor=-1
        )
        request = CreateTopicsRequest(topics=[topic], timeout_ms=self.net.timeout_ms, min_version=4)
        return await self.net.request(request, (await self.net.metadata(())).controller_id)

    async def _send_logs(self, by_leader: ByLeader) -> tuple[list[Any], list[Any]]:
        """Who has a transaction open there, and where the logs begin.

        Does not wait for the answers.
        """
        topic = DescribeProducersRequest.TopicRequest
        log = ListOffsetsRequest.ListOffsetsTopic
        first = partial(log.ListOffsetsPartition, timestamp=OffsetSpec.EARLIEST)
        open_in = list[Any]()
        starts = list[Any]()
        for node, places in by_leader.items():
            its = _partitions_by_topic(places).items()
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
        return self.net.send(open_in), self.net.send(starts)

    async def _led(self, requests: Iterable[Any]) -> dict[Where, Any]:
        """What the leader of each partition answers, without those that we may not ask about."""
        answers: dict[Where, Any] = {}
        for sent in requests:
            for topic in raised(await self.net.answer(sent)).topics:
                for partition in topic.partitions:
                    if partition.error_code != TopicAuthorizationFailedError.errno:
                        number = partition.partition_index
                        answers[topic.name, number] = checked(partition, f"{topic.name}-{number}")
        return answers

    def ends(self, places: Iterable[Where], *, committed: bool = False) -> dict[Where, int]:
        """The offset after the last record, or after the last that readers with read_committed
        get."""
        wanted = {TopicPartition(*place): OffsetSpec.LATEST for place in places}
        level = IsolationLevel.READ_COMMITTED if committed else IsolationLevel.READ_UNCOMMITTED
        offsets = self.net.call(lambda admin: admin.list_partition_offsets(wanted, level))
        return {tuple(place): at.offset for place, at in offsets.items()}

    def fetch(self, topic: str, partition: int, offset: int, most: int = 1) -> Any:
        """What the partition's leader answers to a Fetch at this offset, with read_committed:
        `error_code`, `last_stable_offset`, `log_start_offset`, `aborted_transactions`, `records`.
        These are one record batch, whole whatever its size, or as many as there are in `most`
        bytes, of which the last one may be cut off."""
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
            self.net.ask(lambda: self.net.request(request, leader)),
            f"fetch from {topic}-{partition}",
        )
        if not answer.responses:
            raise NotYetKnown(
                f"the broker holds {topic}-{partition} back: a quota lets this client read no more "
                "now"
            )
        return answer.responses[0].partitions[0]


def _end_txn(commit: bool, fences: bool, identity: Identity) -> Any:
    return EndTxnRequest(committed=commit, max_version=_FENCING if fences else _PLAIN, **identity)


def _partitions_by_topic(places: Iterable[Where]) -> dict[str, list[int]]:
    numbers: dict[str, list[int]] = {}
    for topic, number in places:
        numbers.setdefault(topic, []).append(number)
    return numbers


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
    """Begins nothing, so any timeout will do: the least is below every
    transaction.max.timeout.ms."""
    return InitProducerIdRequest(transaction_timeout_ms=1, min_version=3, **identity)
