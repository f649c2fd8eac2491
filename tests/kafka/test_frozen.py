"""A broker that is frozen (SIGSTOP), whose kernel keeps connections and takes what is sent: every call ends."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any, TypeVar

import pyarrow as pa
import pytest
from kafka.errors import KafkaError
from tenacity import Retrying, stop_after_delay

from sinks import Committable
from sinks.kafka import KafkaSink
from sinks.kafka.cluster import Cluster
from sinks.kafka.producer import TransactionalProducer
from sinks.testing.servers.kafka import KafkaServer
from sinks.transaction import Fingerprint, TransactionContext, TransactionId
from tests.kafka.tasks import LINEAGE, TEXTS, begun, sink_of

T = TypeVar("T")
ROW = pa.RecordBatch.from_pylist([{"key": "a", "value": "b"}], TEXTS)


def again(question: Callable[[], T]) -> T:
    """Of a sink that is not patient: a busy broker may take longer than it waits."""
    return Retrying(stop=stop_after_delay(120), reraise=True)(question)


@contextmanager
def frozen(server: KafkaServer) -> Iterator[None]:
    os.kill(server.broker(1).pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.broker(1).pid, signal.SIGCONT)


@pytest.mark.slow
@pytest.mark.large
def test_every_wait_for_a_frozen_broker_ends() -> None:
    attempts = itertools.count()
    with (
        KafkaServer() as server,
        closing(sink_of(server, "t", timeout=10.0, transaction_timeout=20.0, create_topic=True)) as sink,
    ):
        again(lambda: sink.check(TEXTS))

        def begun() -> TransactionalProducer:
            n = next(attempts)
            name = str(TransactionId("job", LINEAGE, 0, sink.name, n, 1, 0, 0, n))
            return sink.begin_transaction(TransactionContext("job", LINEAGE, 0, sink.name, n, f"a{n}", TEXTS, name))

        def written() -> TransactionalProducer:
            transaction = begun()
            sink.write(transaction, ROW)
            return transaction

        def pre_committed() -> Committable:
            return sink.pre_commit(written()).of(sink.name, 0, Fingerprint(1, 0))

        def ends(call: Callable[[], Any], error: type[Exception] = Exception) -> None:
            with frozen(server), pytest.raises(error):
                call()
            # A broker that was away loads its transaction coordinator anew, which may take longer than one call waits.
            again(lambda: sink.rollback(begun()))

        ends(begun)
        transaction = again(written)
        ends(lambda: sink.pre_commit(transaction))
        sink.rollback(transaction)
        committable = again(pre_committed)
        for call in (
            lambda: sink.commit(committable),
            lambda: list(sink.in_doubt("job")),
            lambda: sink.abort(committable.transaction),
            sink.weaknesses,
            lambda: sink.check(TEXTS),
        ):
            ends(call)


@pytest.mark.slow
def test_a_connection_is_waited_for_as_long_as_an_answer() -> None:
    with KafkaServer() as server, ExitStack() as stack:
        options = {"bootstrap_servers": server.bootstrap.split(",")}
        quick, slow, patient = [stack.enter_context(closing(Cluster(options, timeout))) for timeout in (2, 14, 280)]
        for cluster in (quick, slow, patient):
            again(lambda cluster=cluster: cluster.connect())  # type: ignore[misc]  # it has no connection to the broker
        server.broker(1).pause()
        began, waits = time.monotonic(), threading.Thread(target=patient.cluster_id)
        waits.start()
        for cluster in (quick, slow):
            with pytest.raises(KafkaError, match="does not answer"):
                cluster.cluster_id()
        assert time.monotonic() - began > 2 + 14 - 1
        assert waits.is_alive(), "they waited for longer than they may"
        server.broker(1).resume()
        waits.join()


def test_a_cluster_that_does_not_answer_holds_up_no_other(kafka: KafkaServer) -> None:
    """One driver writes to several clusters."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        options = {"bootstrap_servers": f"127.0.0.1:{silent.getsockname()[1]}"}
        other = Cluster(options, timeout=45)

        def ask() -> None:
            with contextlib.suppress(KafkaError):
                _ = other.fences

        waits = threading.Thread(target=ask)
        waits.start()
        silent.accept()
        with closing(Cluster({"bootstrap_servers": kafka.bootstrap}, timeout=300)) as cluster:
            assert isinstance(cluster.fences, bool)
        assert waits.is_alive()
        waits.join()
    other.close()


@pytest.mark.parametrize("call", [lambda sink: sink.check(TEXTS), lambda sink: sink.rollback(begun(sink))])
def test_a_start_and_a_task_begin_though_the_first_address_that_they_try_does_not_answer(
    kafka: KafkaServer, kafka_topic: str, monkeypatch: pytest.MonkeyPatch, call: Callable[[KafkaSink], None]
) -> None:
    """A frozen broker takes the time of one request, and then another one is asked."""
    turns = itertools.count()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]

        def choice(brokers: list[Any]) -> Any:
            if not any(broker.port == port for broker in brokers):
                return brokers[0]  # of a client that another test has left
            first = next(turns) == 0
            return next(broker for broker in brokers if (broker.port == port) is first)

        monkeypatch.setattr("kafka.net.manager.random.choice", choice)
        with closing(KafkaSink(f"127.0.0.1:{port},{kafka.bootstrap}", kafka_topic, timeout=10)) as sink:
            call(sink)
    assert next(turns) == 2
