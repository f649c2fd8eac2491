"""The connection to the brokers, and which of them to ask: who coordinates a transactional id or a group, and who leads
a partition. A broker that answers that it is not the one, or not at all, is looked for anew.

kafka-python's admin client carries it (connections, security, wire messages). It has no call for Produce and
Fetch, for FindCoordinator and for transactions, so those messages go to its `_manager`: the one use of a private
attribute.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from logging import getLogger
from threading import Lock
from typing import Any, TypeVar

from kafka.admin import KafkaAdminClient
from kafka.errors import (
    CoordinatorNotAvailableError,
    KafkaConnectionError,
    KafkaError,
    KafkaTimeoutError,
    LeaderNotAvailableError,
    NodeNotReadyError,
    NotCoordinatorError,
    RequestTimedOutError,
    UnknownBrokerIdError,
    UnknownTopicOrPartitionError,
    for_code,
)
from kafka.protocol.data_container import DataContainer
from kafka.protocol.metadata import CoordinatorType, FindCoordinatorRequest, MetadataRequest

getLogger("kafka.admin.client").addFilter(lambda record: "with configuration" not in record.msg)  # has passwords

First = TypeVar("First")
Second = TypeVar("Second")
Where = tuple[str, int]
"""Topic and partition."""

UNANSWERED = KafkaConnectionError, KafkaTimeoutError, NodeNotReadyError, RequestTimedOutError
_UNREACHABLE = KafkaConnectionError, NodeNotReadyError, UnknownBrokerIdError
_NOT_THE_COORDINATOR = {CoordinatorNotAvailableError.errno, NotCoordinatorError.errno}
_NOT_ATTEMPTED = 55
_SHORTEST_TRY = 0.5


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
        text = ", ".join(map(str, error.args))
        explained: Exception = type(error)(
            f"{text}. A Kafka broker at {self._servers} does not answer: check that all of them run, and that this "
            "machine reaches them"
        )
        return explained


class Connection:
    """Connects at its first use; one connection for each broker, shared by all threads. `options` are kafka-python's;
    `timeout` in seconds; `reached_by`: time.monotonic() from which on the first answer is waited for no more.

    Coroutines run in kafka-python's thread, by `ask`."""

    def __init__(self, options: Mapping[str, Any], timeout: float, reached_by: float = math.inf) -> None:
        self._options = dict(options)
        self._timeout_ms = int(timeout * 1000)
        self._reached_by = reached_by
        self._lock = Lock()
        self._client: _Client | None = None
        self._coordinators: dict[tuple[CoordinatorType, str], Any] = {}
        """Their nodes."""
        self._leaders: dict[Where, int] = {}

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

    @property
    def manager(self) -> Any:
        return self.admin._manager

    def close(self) -> None:
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    # ------------------------------------------------------------------ any broker
    def ask(self, question: Callable[[], Awaitable[First]]) -> First:
        answer: First = self.manager.run(question)
        return answer

    async def both(
        self, first: Callable[[], Awaitable[First]], second: Callable[[], Awaitable[Second]]
    ) -> tuple[First, Second]:
        """At once."""
        under_way = self.manager.call_soon(second)
        return await first(), await under_way

    def send(self, requests: Iterable[tuple[Any, int | Exception | None]]) -> list[Any]:
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

    async def answer(self, sent: Any) -> Any:
        """The response, or why there is none."""
        try:
            return sent if isinstance(sent, Exception) else await sent
        except Exception as error:
            return self._client.explained(error) if self._client else error

    async def request(self, request: Any, node: int | None = None) -> Any:
        """The response. Raises why there is none."""
        return raised(await self.answer(*self.send([(request, node)])))

    async def metadata(self, topics: Iterable[str]) -> Any:
        """`cluster_id`, and `topics` as they are: `name`, `topic_id`, `partitions` and `error_code`."""
        wanted = [MetadataRequest.MetadataRequestTopic(name=name) for name in sorted(topics)]
        request = MetadataRequest(topics=wanted, allow_auto_topic_creation=False, min_version=10)
        about = await self.request(request)
        for topic in about.topics:
            for partition in topic.partitions:
                self._leaders[topic.name, partition.partition_index] = partition.leader_id
        return about

    # ------------------------------------------------------------------ the broker that knows
    async def ask_coordinators(
        self,
        kind: CoordinatorType,
        names: Sequence[str],
        request: Callable[[list[int]], Any],
        *,
        together: bool = False,
    ) -> list[Any]:
        """One request for each transactional id (or group), made of its place among `names`, which may have one twice;
        or, `together`, for all of a coordinator. A response or an exception each."""
        answers: dict[int, Any] = {}
        to_ask = list(range(len(names)))
        for _ in range(2):
            unknown = {names[at] for at in to_ask if (kind, names[at]) not in self._coordinators}
            failed = await self._look_for_coordinators(kind, unknown)
            gone = CoordinatorNotAvailableError("it has moved")
            nodes = {at: failed.get(names[at]) or self._coordinators.get((kind, names[at]), gone) for at in to_ask}
            asked: defaultdict[Any, list[int]] = defaultdict(list)
            for at, node in nodes.items():
                asked[repr(node) if together else at].append(at)  # kafka-python's errors have no hash
            requests = self.send((request(places), nodes[places[0]]) for places in asked.values())
            again = []
            for places, sent in zip(asked.values(), requests, strict=True):
                answer = await self.answer(sent)
                moved = _is_elsewhere(answer)
                for at in places:
                    answers[at] = answer
                    if moved or isinstance(answer, Exception):
                        self._coordinators.pop((kind, names[at]), None)
                    if moved and names[at] not in unknown:
                        again.append(at)
            to_ask = again
        return [answers[at] for at in range(len(names))]

    async def _look_for_coordinators(self, kind: CoordinatorType, names: Iterable[str]) -> dict[str, Exception]:
        """Those that were not found, and why."""
        keys = sorted(names)
        if not keys:
            return {}
        request = FindCoordinatorRequest(key_type=kind.value, coordinator_keys=keys, min_version=4)
        try:
            answer = await self.request(request)
        except KafkaError as error:
            return dict.fromkeys(keys, error)
        failed: dict[str, Exception] = {}
        for broker in answer.coordinators:
            if broker.error_code:
                failed[broker.key] = for_code(broker.error_code)(f"coordinator of {broker.key}")
            else:
                node = self.manager.cluster.add_coordinator(broker, kind, broker.key, synthesize_node_id=False)
                self._coordinators[kind, broker.key] = node
        return failed

    async def ask_coordinator(self, kind: CoordinatorType, name: str, request: Any) -> Any:
        """Raises what keeps it from answering, or an error of those in its answer."""
        (answer,) = await self.ask_coordinators(kind, [name], lambda _: request)
        for code in sorted(_codes(raised(answer)), key=lambda code: code == _NOT_ATTEMPTED):
            if code:
                raise for_code(code)(name)
        return answer

    async def ask_leaders(
        self, places: Iterable[Where], request: Callable[[Mapping[str, list[int]]], Any]
    ) -> dict[Where, Any]:
        """What the leader of each partition answers about it; `request` is made for topics and their partitions."""
        to_ask, answers = set(places), dict[Where, Any]()
        for last in (False, True):
            looked_up = set[Where]()
            while unknown := {place for place in to_ask if place not in self._leaders}:
                await self._look_for_leaders(unknown)
                looked_up |= unknown
            by_node: defaultdict[int, list[Where]] = defaultdict(list)
            for place in sorted(to_ask):
                by_node[self._leaders[place]].append(place)
            requests = self.send((request(by_topic(its)), node) for node, its in by_node.items())
            again = set()
            for sent, its in zip(requests, by_node.values(), strict=True):
                for place, about in _by_place(await self.answer(sent), its):
                    if error := about if isinstance(about, Exception) else _error(about, place):
                        self._leaders.pop(place, None)
                        if last or place in looked_up or isinstance(error, RequestTimedOutError):
                            raise error
                        again.add(place)
                    else:
                        answers[place] = about
            to_ask = again
        return answers

    async def _look_for_leaders(self, places: Iterable[Where]) -> None:
        """Raises for a topic, or a partition, that is not there, or has none."""
        for topic in (await self.metadata({topic for topic, _ in places})).topics:
            if topic.error_code:
                raise for_code(topic.error_code)(f"topic {topic.name!r}")
        for topic, number in places:
            if (topic, number) not in self._leaders:
                raise UnknownTopicOrPartitionError(f"{topic}-{number}")
            if self._leaders[topic, number] < 0:
                del self._leaders[topic, number]
                raise LeaderNotAvailableError(f"{topic}-{number}")


def raised(answer: Any) -> Any:
    if isinstance(answer, Exception):
        raise answer
    return answer


def by_topic(places: Iterable[Where]) -> dict[str, list[int]]:
    numbers: dict[str, list[int]] = {}
    for topic, number in places:
        numbers.setdefault(topic, []).append(number)
    return numbers


def _by_place(answer: Any, places: Iterable[Where]) -> Iterable[tuple[Where, Any]]:
    if isinstance(answer, Exception):
        return [(place, answer) for place in places]
    return [((topic.name, part.partition_index), part) for topic in answer.topics for part in topic.partitions]


def _error(about: Any, place: Where) -> Exception | None:
    error: type[Exception] = for_code(about.error_code)
    return error(f"{place[0]}-{place[1]}") if about.error_code else None


def _is_elsewhere(answer: Any) -> bool:
    if isinstance(answer, Exception):
        return isinstance(answer, _UNREACHABLE)
    return not _NOT_THE_COORDINATOR.isdisjoint(_codes(answer))


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
