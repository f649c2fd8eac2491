from __future__ import annotations

from collections.abc import Iterator

import pytest

from sinks.kafka import KafkaSink
from sinks.testing.servers.kafka import KafkaService
from sinks.testing.servers.registry import RegistryServer
from tests.kafka.tasks import sink_of


@pytest.fixture
def sink(kafka: KafkaService, kafka_topic: str) -> Iterator[KafkaSink]:
    sink = sink_of(kafka, kafka_topic)
    yield sink
    sink.close()


@pytest.fixture
def own_registry() -> Iterator[RegistryServer]:
    """One that a test may stop."""
    with RegistryServer() as server:
        yield server
