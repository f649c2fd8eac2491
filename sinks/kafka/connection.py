"""The connections to the brokers of one cluster.

They find out which broker to ask: the coordinator of a transactional id or a group, or the leader
of a partition. Everything here is about any question. The questions are in `cluster.py`,
`topics.py` and `memory.py`.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from threading import Lock
from typing import Any, TypeVar

from kafka.admin import KafkaAdminClient
from kafka.errors import (
    CoordinatorNotAvailableError,
    KafkaConnectionError,
    KafkaError,
    KafkaTimeoutError,
    NodeNotReadyError,
    NotCoordinatorError,
    OperationNotAttemptedError,
    RequestTimedOutError,
    for_code,
)

from sinks.kafka.internals import (
    Client,
    CoordinatorType,
    FindCoordinatorRequest,
    ListTransactionsRequest,
    MetadataRequest,
    error_codes,
)

First = TypeVar("First")
Second = TypeVar("Second")

Where = tuple[str, int]
"""Topic and partition."""
Leaders = Mapping[int, int]
"""The node that leads each partition, -1 for none."""
ByLeader = Mapping[int, Sequence[Where]]

TRANSACTION = CoordinatorType.TRANSACTION
GROUP = CoordinatorType.GROUP
NOT_THE_COORDINATOR = {CoordinatorNotAvailableError.errno, NotCoordinatorError.errno}

_NOT_ATTEMPTED = OperationNotAttemptedError.errno
_UNANSWERED = (KafkaConnectionError, KafkaTimeoutError, NodeNotReadyError, RequestTimedOutError)
_SHORTEST_TRY = 0.5


class Connections:
    """The connections to the brokers of one cluster, one for each broker, shared by all threads.

    They are made at the first use. Each call asks once, and raises what keeps the brokers from
    answering; `errors.patiently` asks again. Coroutines run in kafka-python's thread, by `ask`.

    * `options` are kafka-python's.
    * `timeout` is in seconds.
    * `reached_by` is the time.monotonic() until which the first answer is waited for.
    """

    def __init__(
        self, options: Mapping[str, Any], timeout: float, reached_by: float = math.inf
    ) -> None:
        self._options = dict(options)
        self.timeout_ms = int(timeout * 1000)
        self._reached_by = reached_by
        self._lock = Lock()
        self._client: Client | None = None
        self._coordinators: dict[tuple[CoordinatorType, str], int] = {}
        """The nodes of coordinators, by kind and name."""
        self.leaders: dict[str, Leaders] = {}
        """The leaders of each topic, as the brokers last told them.

        They are asked at the same time as the question whether they still lead.
        """

    @property
    def client(self) -> Client:
        with self._lock:
            if self._client is None:
                left = max(_SHORTEST_TRY, self._reached_by - time.monotonic())
                first_ms = min(self.timeout_ms, left * 1000)
                self._client = Client(self._options, self.timeout_ms, first_ms)
            return self._client

    @property
    def is_open(self) -> bool:
        return self._client is not None

    def connect(self) -> None:
        """Raise what keeps the client from its first broker, within one timeout.

        Send nothing if it has one.
        """
        self.call(lambda _: None)

    def close(self) -> None:
        with self._lock:
            client = self._client
            self._client = None
        if client is not None:
            client.close()

    # ------------------------------------------------------------------ from any thread
    def call(self, question: Callable[[KafkaAdminClient], Any]) -> Any:
        """Ask what kafka-python's admin client has a call for."""
        try:
            return question(self.client.admin)
        except KafkaError as error:
            raise self.explained(error) from error

    def ask(self, question: Callable[[], Awaitable[First]]) -> First:
        """Run a coroutine, and wait for what it returns or raises."""
        try:
            return self.client.run(question)
        except KafkaError as error:
            raise self.explained(error) from error

    def start(self, question: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
        """Run a coroutine.

        Return a future for callbacks, which are called in kafka-python's thread.
        """
        return self.client.call_soon(question, *arguments)

    def explained(self, answer: Any) -> Any:
        """Add to an error of kafka-python, which says only which connection failed, what to look
        at.

        The type stays: it tells whether to ask again. Anything else is returned as it is.
        """
        if not isinstance(answer, _UNANSWERED):
            return answer
        servers = ", ".join(self._options["bootstrap_servers"])
        text = ", ".join(map(str, answer.args))
        return type(answer)(
            f"{text}. A Kafka broker at {servers} does not answer: check that all of them run, and "
            "that this machine reaches them"
        )

    # ------------------------------------------------------------------ in coroutines
    @property
    def _open_client(self) -> Client:
        """The client of a coroutine.

        One that is still running when the sink is closed must not connect again.
        """
        client = self._client
        if client is None:
            raise KafkaConnectionError("the sink was closed")
        return client

    async def both(
        self, first: Callable[[], Awaitable[First]], second: Callable[[], Awaitable[Second]]
    ) -> tuple[First, Second]:
        """Ask two questions at once."""
        under_way = self._open_client.call_soon(second)
        return await first(), await under_way

    def send(self, requests: Iterable[tuple[Any, int | Exception | None]]) -> list[Any]:
        """Send each request to its node, at once, and return what `answer` waits for.

        An exception in place of a node is the answer. None is the least busy of the brokers that
        are connected.
        """
        sent: list[Any] = []
        for request, node in requests:
            if isinstance(node, Exception):
                sent.append(node)
                continue
            try:
                sent.append(self._open_client.send(request, node))
            except KafkaError as error:
                sent.append(error)
        return sent

    async def answer(self, sent: Any) -> Any:
        """Return the response, or why there is none."""
        try:
            return sent if isinstance(sent, Exception) else await sent
        except Exception as error:
            return error

    async def request(self, request: Any, node: int | None = None) -> Any:
        """Send one request, and return the response. Raises why there is none."""
        return raised(await self.answer(*self.send([(request, node)])))

    async def metadata(self, topics: Iterable[str]) -> Any:
        """Return `cluster_id`, `brokers`, and `topics`: `name`, `topic_id`, `partitions` and
        `error_code` of each.

        The client's own list of brokers, which may be minutes old, becomes this one, so that a
        broker that has joined can be asked.
        """
        answer = await self.request(metadata_request(sorted(topics)))
        self._open_client.learn(answer)
        for topic in answer.topics:
            self.leaders[topic.name] = {
                its.partition_index: its.leader_id for its in topic.partitions
            }
        return answer

    def by_leader(self, places: Iterable[Where]) -> ByLeader:
        """Return the partitions whose leader is known."""
        by_leader = defaultdict[int, list[Where]](list)
        for topic, number in places:
            if (leader := self.leaders.get(topic, {}).get(number)) is not None:
                by_leader[leader].append((topic, number))
        return by_leader

    async def ask_all(self, requests: Callable[[int], list[Any]]) -> dict[int, list[Any]]:
        """Send every broker its requests, and return the responses of each.

        The brokers that the client knows get their requests at once, beside the question which
        brokers there are. Brokers that have joined since get theirs after that. Raises an error if
        a broker does not answer.
        """
        known = self._open_client.nodes()
        about_them, sent = await self.both(
            lambda: self.metadata(()), lambda: self._ask_each(requests, known)
        )
        there = [broker.node_id for broker in about_them.brokers]
        sent |= await self._ask_each(requests, [node for node in there if node not in sent])
        answers = {}
        for node in there:  # Python 3.10 takes no comprehension for it
            answers[node] = [raised(await self.answer(its)) for its in sent[node]]
        return answers

    async def _ask_each(
        self, requests: Callable[[int], list[Any]], nodes: Iterable[int]
    ) -> dict[int, list[Any]]:
        return {node: self.send((request, node) for request in requests(node)) for node in nodes}

    # ------------------------------------------------------------------ the broker that knows
    async def ask_coordinators(
        self,
        kind: CoordinatorType,
        names: Sequence[str],
        request: Callable[[list[int]], Any],
        *,
        together: bool = False,
        behind: Callable[[], Any] | None = None,
    ) -> list[Any]:
        """Send requests to coordinators, and return a response or an exception for each name.

        The names are transactional ids or groups, and a name may come twice. `request` makes a
        request from places among `names`. Each name gets a request of its own, or, with `together`,
        each coordinator gets one request for all of its names.

        If a broker answers that it is not the coordinator, or does not answer, the coordinator is
        looked for again the next time. `behind` makes a last request to each coordinator, whose
        answers come last.
        """
        nodes = await self.coordinators_of(kind, names)
        asked: defaultdict[Any, list[int]] = defaultdict(list)
        for at, name in enumerate(names):
            # kafka-python's errors have no hash
            asked[repr(nodes[name]) if together else at].append(at)
        requests = self.send(
            (request(places), nodes[names[places[0]]]) for places in asked.values()
        )
        each_once = {repr(node): node for node in nodes.values()}.values()
        last = self.send((behind(), node) for node in each_once) if behind else ()
        answers: dict[int, Any] = {}
        for places, sent in zip(asked.values(), requests, strict=True):
            answer = await self.answer(sent)
            moved = isinstance(answer, Exception) or not NOT_THE_COORDINATOR.isdisjoint(
                error_codes(answer)
            )
            for at in places:
                answers[at] = answer
                if moved:
                    self.forget_coordinator(kind, names[at])
        return [
            *(answers[at] for at in range(len(names))),
            *[await self.answer(sent) for sent in last],
        ]

    async def coordinators_of(self, kind: CoordinatorType, names: Iterable[str]) -> dict[str, Any]:
        """Return by name the node that is asked, or why there is none."""
        nodes: dict[str, Any] = {name: self._coordinators.get((kind, name)) for name in names}
        if not (keys := sorted(name for name, node in nodes.items() if node is None)):
            return nodes
        try:
            answer = await self.request(coordinator_request(kind, keys))
        except KafkaError as error:
            return nodes | dict.fromkeys(keys, error)
        for broker in answer.coordinators:
            if broker.error_code:
                nodes[broker.key] = for_code(broker.error_code)(f"coordinator of {broker.key}")
            else:
                node = self._open_client.add_coordinator(broker, kind, broker.key)
                nodes[broker.key] = self._coordinators[kind, broker.key] = node
        return nodes

    def forget_coordinator(self, kind: CoordinatorType, name: str) -> None:
        self._coordinators.pop((kind, name), None)

    async def ask_coordinator(self, kind: CoordinatorType, name: str, request: Any) -> Any:
        """Send a request to the coordinator of one name.

        Raises what keeps it from answering, or an error in its answer.
        """
        (answer,) = await self.ask_coordinators(kind, [name], lambda _: request)
        for code in sorted(error_codes(raised(answer)), key=lambda code: code == _NOT_ATTEMPTED):
            if code:
                raise for_code(code)(name)
        return answer


def metadata_request(topics: Iterable[str]) -> Any:
    """Make the request for the places of these topics, which creates none."""
    wanted = [MetadataRequest.MetadataRequestTopic(name=name) for name in topics]
    return MetadataRequest(topics=wanted, allow_auto_topic_creation=False, min_version=10)


def coordinator_request(kind: CoordinatorType, names: list[str]) -> Any:
    """Make the request for the coordinators of these transactional ids or groups."""
    return FindCoordinatorRequest(key_type=kind.value, coordinator_keys=names, min_version=4)


def transactions_request(state: str) -> Any:
    """Make the request for the transactions in this state that a broker coordinates."""
    return ListTransactionsRequest(state_filters=[state], producer_id_filters=[])


def listed(answers: Iterable[Any], prefix: str) -> list[str]:
    """Return the transactional ids in the answers that start with `prefix`."""
    several = [checked(answer, "list of transactions").transaction_states for answer in answers]
    names = {
        transaction.transactional_id for transactions in several for transaction in transactions
    }
    return sorted(name for name in names if name.startswith(prefix))


def raised(answer: Any) -> Any:
    """Return a response, and raise what is in place of one."""
    if isinstance(answer, Exception):
        raise answer
    return answer


def checked(answer: Any, what: str) -> Any:
    """Return a response, and raise the error that it tells."""
    if answer.error_code:
        raise for_code(answer.error_code)(what)
    return answer
