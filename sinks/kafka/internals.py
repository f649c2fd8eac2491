"""Everything that the sink uses of kafka-python without being its public API, in this one
module.

Public are `kafka`, `kafka.admin`, `kafka.errors`, and the token provider that an option is
documented to take. They have no call for Produce and Fetch, for FindCoordinator, and for what a
transaction needs. So the sink builds these messages by itself, out of `kafka.protocol`, and sends
them over the connections of the admin client.

The admin client takes a documented option `kafka_client`, a function that makes its connections.
`Client` makes them there, out of kafka-python's event loop and connection manager, and keeps both:
no attribute that begins with an underscore is used.

All of it was read and run in kafka-python 3.0.0 and 3.0.12. What is gone in another version is
reported when a sink is made or connects, with the version, in place of an AttributeError in the
middle of a batch.

kafka-python 3.1 is not released. These differences were read in its main branch (3.1.0.dev, August
2026), and are prepared here, but could not be run:

* `KafkaConnectionManager.run` is gone. `NetworkSelector.run`, which is used here, is in both.
* The event loop has moved to `kafka.net.backend`. An option `net` chooses one of several, and
  inside of a running asyncio loop, as in a notebook, another one would be chosen. `Client` makes
  the one that is in both.
* `NetworkSelector.run` gives up after `default_api_timeout_ms` (60 s). It has to be at least
  `request_timeout_ms`, so a sink's `timeout` above 60 s would be refused.
* Only futures that the event loop has made can be awaited; those that are awaited here are made so.
* The admin client takes the timeouts of a new connection as options. Here they are set for its
  connections in both.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial
from logging import DEBUG, LogRecord, getLogger
from typing import Any, TypeVar

from kafka.admin import KafkaAdminClient

from sinks._util.private_names import PrivateNames

KAFKA_PYTHON = PrivateNames(
    "kafka-python",
    ">=3.0,<3.1",
    (
        "kafka.admin.KafkaAdminClient.DEFAULT_CONFIG",
        "kafka.cluster.ClusterMetadata.add_coordinator(response, key_type, key, "
        "synthesize_node_id)",
        "kafka.cluster.ClusterMetadata.brokers",
        "kafka.cluster.ClusterMetadata.update_metadata(metadata)",
        "kafka.future.Future.add_callback",
        "kafka.future.Future.add_errback",
        "kafka.net.compat.KafkaNetClient(net, manager)",
        "kafka.net.compat.KafkaNetClient.close",
        "kafka.net.compat.KafkaNetClient.in_flight_request_count(node_id)",
        "kafka.net.compat.KafkaNetClient.is_ready(node_id)",
        "kafka.net.manager.KafkaConnectionManager.broker_version_data",
        "kafka.net.manager.KafkaConnectionManager.call_soon",
        "kafka.net.manager.KafkaConnectionManager.cluster",
        "kafka.net.manager.KafkaConnectionManager.send(request, node_id)",
        "kafka.protocol.broker_version_data.BrokerVersionData.broker_version",
        "kafka.protocol.metadata.MetadataResponse.fields",
        "kafka.record.MemoryRecords.next_batch",
        "kafka.record.default_records.DefaultRecordBatch.base_offset",
        "kafka.record.default_records.DefaultRecordBatch.is_control_batch",
        "kafka.record.default_records.DefaultRecordBatch.is_transactional",
        "kafka.record.default_records.DefaultRecordBatch.last_offset",
        "kafka.record.default_records.DefaultRecordBatch.producer_epoch",
        "kafka.record.default_records.DefaultRecordBatch.producer_id",
        "kafka.record.default_records.DefaultRecordBatch.records_count",
    ),
)

with KAFKA_PYTHON.imports():
    from kafka.net.compat import KafkaNetClient
    from kafka.net.manager import KafkaConnectionManager
    from kafka.partitioner.default import murmur2
    from kafka.protocol.admin.topics import CreateTopicsRequest
    from kafka.protocol.admin.transactions import (
        DescribeProducersRequest,
        DescribeTransactionsRequest,
        ListTransactionsRequest,
    )
    from kafka.protocol.broker_version_data import BROKER_API_VERSIONS, BrokerVersionData
    from kafka.protocol.consumer import ListOffsetsRequest
    from kafka.protocol.consumer.fetch import FetchRequest
    from kafka.protocol.consumer.group import OffsetFetchRequest
    from kafka.protocol.data_container import DataContainer
    from kafka.protocol.metadata import (
        ApiVersionsRequest,
        CoordinatorType,
        FindCoordinatorRequest,
        MetadataRequest,
    )
    from kafka.protocol.producer.produce import ProduceRequest
    from kafka.protocol.producer.transaction import (
        AddOffsetsToTxnRequest,
        AddPartitionsToTxnRequest,
        EndTxnRequest,
        InitProducerIdRequest,
        TxnOffsetCommitRequest,
    )
    from kafka.record import MemoryRecords

    try:
        from kafka.net.selector import NetworkSelector
    except ModuleNotFoundError:  # kafka-python 3.1
        from kafka.net.backend.selector import NetworkSelector

__all__ = [
    "KAFKA_PYTHON",
    "AddOffsetsToTxnRequest",
    "AddPartitionsToTxnRequest",
    "ApiVersionsRequest",
    "Client",
    "CoordinatorType",
    "CreateTopicsRequest",
    "DescribeProducersRequest",
    "DescribeTransactionsRequest",
    "EndTxnRequest",
    "FetchRequest",
    "FindCoordinatorRequest",
    "InitProducerIdRequest",
    "ListOffsetsRequest",
    "ListTransactionsRequest",
    "MemoryRecords",
    "MetadataRequest",
    "OffsetFetchRequest",
    "ProduceRequest",
    "TxnOffsetCommitRequest",
    "error_codes",
    "murmur2",
]

T = TypeVar("T")

_NEWEST = BrokerVersionData(max(BROKER_API_VERSIONS))
"""Each connection is held to what its broker can. kafka-python would hold all of them to what the
first broker could when it was asked, even after an upgrade."""

_SET_UP = ("socket_connection_setup_timeout_ms", "socket_connection_setup_timeout_max_ms")
"""Options of a connection that the admin client of kafka-python 3.0 does not take."""

_BOUND_OF_RUN = "default_api_timeout_ms"
_REQUESTS_OF_A_QUESTION = 10
"""How many requests one question sends at most, one after another. Each has its own timeout."""


class Client:
    """The connections to the brokers of one cluster, with the thread that coroutines run in.

    It connects when it is made, and raises what keeps it from its first broker within `first_ms`.
    Then it leaves neither a thread nor an open file. `options` are kafka-python's.
    """

    admin: KafkaAdminClient
    """The client for everything that kafka-python has a public call for."""
    _client: KafkaNetClient

    def __init__(self, options: Mapping[str, Any], timeout_ms: int, first_ms: float) -> None:
        KAFKA_PYTHON.check()
        filter_kafka_log()
        ours: dict[str, Any] = {
            "bootstrap_timeout_ms": first_ms,
            "request_timeout_ms": timeout_ms,
            "reconnect_backoff_max_ms": 1000,
            "max_in_flight_requests_per_connection": 1_000_000,  # beyond it, requests would fail
            "kafka_client": partial(self._connections, timeout_ms),
        }
        if _BOUND_OF_RUN in KafkaAdminClient.DEFAULT_CONFIG:  # kafka-python 3.1
            ours[_BOUND_OF_RUN] = _REQUESTS_OF_A_QUESTION * timeout_ms
        try:
            self.admin = KafkaAdminClient(**ours | dict(options))
        except BaseException:
            # the admin client closes nothing before it has reached a broker
            if hasattr(self, "_client"):
                self._client.close()
            raise
        self._manager.broker_version_data = _NEWEST

    def _connections(self, timeout_ms: int, metrics: object, **options: Any) -> KafkaNetClient:
        """Make what the admin client sends by, without metrics.

        Metrics would take a tenth of the time of a request, and nobody reads them.
        """
        options.pop("net", None)
        options |= dict.fromkeys(_SET_UP, timeout_ms)
        self._loop = NetworkSelector(**options)
        self._manager = KafkaConnectionManager(self._loop, **options)
        self._client = KafkaNetClient(self._loop, self._manager)
        return self._client

    def close(self) -> None:
        self.admin.close()

    # ------------------------------------------------------------------ coroutines
    def run(self, question: Callable[[], Awaitable[T]]) -> T:
        """Run a coroutine in the client's thread, and wait for what it returns or raises."""
        answer: T = self._loop.run(question)
        return answer

    def call_soon(self, question: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
        """Run a coroutine in the client's thread.

        Return a future that coroutines can await, and nobody else.
        """
        return self._manager.call_soon(question, *arguments)

    def send(self, request: Any, node: int | None) -> Any:
        """Send a request to a broker, and return what awaits the response.

        Call it from a coroutine.

        Without a broker it goes to the least busy one of those that are connected. kafka-python
        would first connect to another one, which may be frozen.
        """
        return self._manager.send(request, node_id=self._least_busy() if node is None else node)

    def _least_busy(self) -> int | None:
        ready = [node for node in self.nodes() if self._client.is_ready(node)]
        return min(ready, key=self._client.in_flight_request_count, default=None)

    # ----------------------------------------------------------------- what it knows of the cluster
    def nodes(self) -> list[int]:
        """Return the ids of the brokers that the client knows."""
        return [broker.node_id for broker in self._manager.cluster.brokers()]

    def learn(self, metadata: Any) -> None:
        """Replace what it knows, which may be minutes old, by a broker's answer."""
        self._manager.cluster.update_metadata(metadata)

    def add_coordinator(self, broker: Any, kind: CoordinatorType, name: str) -> int:
        """Return the node of a coordinator that a broker has named.

        The coordinator may have joined the cluster after the client last asked.
        """
        node: int = self._manager.cluster.add_coordinator(
            broker, kind, name, synthesize_node_id=False
        )
        return node


def error_codes(answer: DataContainer) -> Iterator[int]:
    """Yield the codes of errors in a response, wherever they are. 0 is no error."""
    for name in answer.fields:
        value = getattr(answer, name)
        if name.endswith("error_code"):
            yield value
        elif isinstance(value, list):
            for part in value:
                if isinstance(part, DataContainer):
                    yield from error_codes(part)


# ---------------------------------------------------------------------- logging
_WITH_PASSWORDS = {
    "kafka.admin.client": "with configuration",
    "kafka.protocol.parser": " Send",
    "kafka.net.connection": "Sasl",
}
"""Parts of the messages that show passwords at DEBUG, by logger. Such messages have the
configuration, or logins as they are sent."""


def filter_kafka_log() -> None:
    """Keep passwords out of three loggers of kafka-python, which show them at DEBUG.

    To call it again changes nothing.

    A `KafkaSink` calls this before it first connects, and no import does it.
    """
    for name in _WITH_PASSWORDS:
        getLogger(name).addFilter(_shows_no_password)


def _shows_no_password(record: LogRecord) -> bool:
    return record.levelno > DEBUG or _WITH_PASSWORDS[record.name] not in record.getMessage()
