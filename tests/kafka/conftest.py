from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from sinks.kafka import KafkaSink, librdkafka
from sinks.testing.servers.kafka import KafkaService
from sinks.testing.servers.registry import RegistryServer
from tests.kafka.play import sink_of


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


@pytest.fixture(params=["native", "plain"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Both producers. The plain one takes over where librdkafka is one that we do not know. Neither may leave a client
    behind: its threads go on in a Python worker that Spark uses again, and those of a fenced one never rest."""
    if request.param == "plain":
        monkeypatch.setattr(librdkafka, "unusable", lambda: "for this test")
    before = clients()
    yield str(request.param)
    gc.collect()
    assert clients() <= before


def clients() -> set[str]:
    """The main threads of librdkafka's clients in this process."""
    found = set()
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it ends meanwhile
            if (thread / "comm").read_text() == "rdk:main\n":
                found.add(thread.name)
    return found
