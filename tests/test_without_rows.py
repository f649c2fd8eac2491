"""A checkpoint without rows is a record and no transaction. The servers are asked what they remember (R15)."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from kafka.net.connection import KafkaConnection

from coordinator import CheckpointConfig, CheckpointCoordinator
from coordinator.storage import open_storage
from sinks import TwoPhaseCommitSink
from sinks.kafka import KafkaSink
from sinks.postgres import PostgresSink
from sinks.testing.local import LocalQuery
from sinks.testing.servers.kafka import KafkaService
from tests.protocol.test_protocol import CountedStorage

ROWS = pa.table({"value": ["a", "b"]})
QUIET = CheckpointConfig(heartbeat_interval=600, request_poll_interval=0, verify_interval=0, history_size=0)


def asked_of(
    sink: TwoPhaseCommitSink[Any], folder: Path, asked: list[str]
) -> tuple[list[str], list[str], dict[str, int]]:
    """By a checkpoint with rows, and by one without; and what that one asks of storage."""
    storage = CountedStorage(open_storage(f"file://{folder}/storage"))
    query = LocalQuery(folder / "spark", [[ROWS, ROWS]] * 4 + [[ROWS.slice(0, 0)] * 2])
    with CheckpointCoordinator("job", [sink], storage, QUIET) as coordinator:
        for n in range(5):
            before = list(asked)
            asked.clear()
            storage.since_last()
            coordinator.process(query.batch(n, "run"))
        return before, list(asked), storage.since_last()


def noting(method: Callable[..., Any], asked: list[str], what: Callable[[Any], str]) -> Callable[..., Any]:
    def call(self: Any, request: Any, *args: Any, **options: Any) -> Any:
        asked.append(what(request))
        return method(self, request, *args, **options)

    return call


@pytest.mark.parametrize("strategy", ["prepared", "staged"])
def test_postgresql(pg_database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: Any) -> None:
    asked: list[str] = []
    for method in ("execute", "copy"):
        monkeypatch.setattr(
            psycopg.ClientCursor, method, noting(getattr(psycopg.ClientCursor, method), asked, lambda query: str(query))
        )
    with_rows, without, storage = asked_of(
        PostgresSink(pg_database, "orders", create_table=True, strategy=strategy), tmp_path, asked
    )
    assert any("COPY" in statement for statement in with_rows)
    assert not any(re.search("COPY|BEGIN|INSERT|DELETE|PREPARE", statement) for statement in without), without
    assert len(without) == 1, without
    assert storage == {"list": 2, "get": 2, "put_if_absent": 1, "delete": 1}


def test_kafka(kafka: KafkaService, kafka_topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    send = noting(KafkaConnection._send_request, asked, lambda request: type(request).__name__)
    monkeypatch.setattr(KafkaConnection, "_send_request", send)
    with_rows, without, storage = asked_of(KafkaSink(kafka.bootstrap, kafka_topic), tmp_path, asked)
    assert any("EndTxn" in request for request in with_rows), with_rows
    questions = {"Metadata", "ListTransactions", "OffsetFetch"}
    assert {request.removesuffix("Request") for request in without} == questions, without
    assert storage == {"list": 2, "get": 2, "put_if_absent": 1, "delete": 1}
