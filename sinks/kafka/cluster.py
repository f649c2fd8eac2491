"""The questions and orders for the brokers of a cluster.

A task asks when it writes a transaction. The driver ends transactions that other processes began,
and asks for the state of each.

The module `connection.py` has how the brokers are asked, and which of them. `topics.py` has what
they say about topics, and `memory.py` what they remember of a job.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from kafka.admin import KafkaAdminClient
from kafka.errors import (
    ConcurrentTransactionsError,
    InvalidProducerEpochError,
    InvalidProducerIdMappingError,
    ProducerFencedError,
    TransactionalIdNotFoundError,
)

from sinks.kafka.connection import (
    NOT_THE_COORDINATOR,
    TRANSACTION,
    Connections,
    Where,
    checked,
    listed,
    metadata_request,
    raised,
    transactions_request,
)
from sinks.kafka.internals import (
    AddPartitionsToTxnRequest,
    ApiVersionsRequest,
    DescribeTransactionsRequest,
    EndTxnRequest,
    InitProducerIdRequest,
    ProduceRequest,
)
from sinks.kafka.memory import GroupMemory
from sinks.kafka.topics import Ids, Logs, Place, Topics, ids_in, numbers_by_topic, settings_of
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
States = dict[str, tuple[Identity, str]]
"""The newest transaction of each transactional id, and its state."""


class Cluster:
    """The brokers of one cluster.

    The arguments are those of `Connections`, and so is what each call raises.
    """

    def __init__(
        self, options: Mapping[str, Any], timeout: float, reached_by: float = math.inf
    ) -> None:
        self.net = Connections(options, timeout, reached_by)
        self.topics = Topics(self.net)
        self.memory = GroupMemory(self.net)

    def connect(self) -> None:
        self.net.connect()

    def close(self) -> None:
        self.net.close()

    # ------------------------------------------------------------------ the end of transactions
    def end(self, identities: Sequence[Identity], *, commit: bool) -> list[EndResult]:
        """Send EndTxn for each transaction, side by side, as its own producer would have done.

        Repeating the call is safe. An abort fences anyone who still holds the transactional id,
        because they could continue with a part of their records. Returns a result for each
        transaction, in order.
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
        """Commit transactions as `end` does, and look at their topics after that.

        `fences` is the cluster's property of that name, which the caller has asked for already.
        Returns a result for each transaction, and the ids that the topics have after the commit, as
        each coordinator tells them.
        """
        return self._end(identities, partial(_end_txn, True, fences), sorted(topics))

    def fence(self, identity: Identity) -> None:
        """Abort a transaction by a newer epoch.

        No leader takes what is still in flight after that. InitProducerId aborts whichever
        transaction of the id is open now. If another attempt has begun one, that attempt has fenced
        this transaction, and nothing is sent.
        """
        name = identity["transactional_id"]
        if self.states([name]).get(name) == (identity, "Ongoing"):
            self._end([identity], _raise_epoch)

    @property
    def fences(self) -> bool:
        """True if the end of a transaction raises the epoch, as with KIP-890.

        With it, records that are sent to a partition also add the partition to the transaction.
        What the brokers can do and what the cluster may do are two things, because an operator can
        raise and lower the cluster's feature level at any time.
        """
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
        """Send a request for each transaction, and repeat it while a coordinator is not ready.

        A coordinator is not ready if it has ended a transaction just before, whose markers are on
        their way, or if it has moved. The ids of `topics` are asked for behind the requests, on the
        same connections, and a broker answers requests in their order.
        """
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
                {} if isinstance(about, Exception) else ids_in(about) for about in abouts
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
        """Return the newest transaction of each transactional id, and its state.

        A transactional id that its coordinator does not know is missing from the result.
        """
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
        """Return the coordinator's description of the newest transaction of each transactional id.

        An exception in place of a description says why there is none.
        """

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
        """Tell whether the coordinator has the transaction in one of these states.

        If the end of a transaction fences, it has raised the epoch by one.
        """
        name = identity["transactional_id"]
        now, state = self.states([name]).get(name, ({}, ""))
        fenced = {**identity, "producer_epoch": identity["producer_epoch"] + 1}
        return state in states and (now == identity or (self.fences and now == fenced))

    def ages(self, transactional_ids: Sequence[str]) -> list[float | None]:
        """Return how many seconds ago the newest transaction of each transactional id began.

        An age is None if no transaction is open. It compares the clock of the coordinator's broker
        with the clock of this machine.
        """
        now = time.time()
        described = self.net.ask(lambda: self._described(transactional_ids))
        begun = [
            getattr(described[name], "transaction_start_time_ms", -1) for name in transactional_ids
        ]
        return [None if began < 0 else now - began / 1000 for began in begun]

    def ongoing(self, prefix: str) -> list[Identity]:
        """Return the open transactions whose transactional id starts with `prefix`."""
        answers = self.net.ask(
            lambda: self.net.ask_all(lambda _: [transactions_request("Ongoing")])
        )
        states = self.states(listed((answer for (answer,) in answers.values()), prefix))
        return [identity for identity, state in states.values() if state == "Ongoing"]

    def states_and_logs(
        self, transactional_ids: Sequence[str], places: Iterable[Where]
    ) -> tuple[States, Logs]:
        """Return the results of `states` and `Topics.logs`, asked for at the same time."""
        (_, _, logs), states = self.net.ask(
            lambda: self.net.both(
                lambda: self.topics.ids_and_logs((), places),
                lambda: self._states(transactional_ids),
            )
        )
        return states, logs

    def before_commit(
        self, topics: Iterable[str], places: Iterable[Where]
    ) -> tuple[str, Ids, Logs, bool]:
        """Return the id of the cluster, the ids of the topics, the logs, and `fences`."""
        found, fences = self.net.ask(
            lambda: self.net.both(lambda: self.topics.ids_and_logs(topics, places), self._fences)
        )
        return *found, fences

    # ------------------------------------------------------------------ what a producer asks
    def begin(
        self, transactional_id: str, timeout_ms: int, topic: str | None = None
    ) -> tuple[Identity, Place | None, bool]:
        """Fence and abort anyone else who has the transactional id, and begin its next transaction.

        Returns the transaction, the `Place` of the topic, or None if no topic is named, and
        `fences`. `timeout_ms` is how long the brokers keep the transaction open, in milliseconds.
        """
        new = {"transactional_id": transactional_id, "producer_id": -1, "producer_epoch": -1}
        request = InitProducerIdRequest(transaction_timeout_ms=timeout_ms, min_version=2, **new)
        # InitProducerId first: whoever asks again when the other has failed would leave it under
        # way, to fence itself
        answer, (place, fences) = self.net.ask(
            lambda: self.net.both(
                lambda: self.net.ask_coordinator(TRANSACTION, transactional_id, request),
                lambda: self.net.both(lambda: self.topics.find(topic), self._fences),
            )
        )
        return (
            new | {"producer_id": answer.producer_id, "producer_epoch": answer.producer_epoch},
            place,
            fences,
        )

    def add_partitions(self, identity: Identity, places: Iterable[Where]) -> None:
        """Add partitions to a transaction where sending records does not add them."""
        request = AddPartitionsToTxnRequest(
            v3_and_below_transactional_id=identity["transactional_id"],
            v3_and_below_producer_id=identity["producer_id"],
            v3_and_below_producer_epoch=identity["producer_epoch"],
            v3_and_below_topics=[
                AddPartitionsToTxnRequest.AddPartitionsToTxnTopic(name=name, partitions=its)
                for name, its in numbers_by_topic(places).items()
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
        """Send record batches to a broker, and do not wait.

        * `batches` has, by topic, the number of a partition and a record batch for it.
        * `timeout_ms` is how long the broker may wait for replicas, in milliseconds.
        * `answered` is called in another thread, with the response or an exception.
        * With `adds`, the partitions join the transaction by this request.
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

    # ------------------------------------------------------------------ the cluster itself
    def cluster_id(self) -> str:
        return str(self.net.ask(lambda: self.net.metadata(())).cluster_id)

    def brokers(self) -> list[int]:
        """Return the brokers' ids."""
        return sorted(
            broker["broker_id"]
            for broker in self.net.call(KafkaAdminClient.describe_cluster)["brokers"]
        )

    def version(self) -> str:
        """Return the release of a broker, by its API versions.

        The client knows releases up to its own.
        """
        node = self.brokers()[0]
        release = self.net.call(lambda admin: admin.get_broker_version_data(node)).broker_version
        return ".".join(map(str, release))

    def broker_settings(self, broker: int, names: Sequence[str]) -> dict[str, str]:
        """Return the broker's settings in force, as `settings_of` does."""
        return settings_of(self.net, "BROKER", str(broker), names)


def _end_txn(commit: bool, fences: bool, identity: Identity) -> Any:
    return EndTxnRequest(committed=commit, max_version=_FENCING if fences else _PLAIN, **identity)


def _raise_epoch(identity: Identity) -> Any:
    """Make a request that raises the epoch.

    The request begins no transaction, so any timeout will do. One millisecond is below every
    transaction.max.timeout.ms.
    """
    return InitProducerIdRequest(transaction_timeout_ms=1, min_version=3, **identity)
