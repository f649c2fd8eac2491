"""KafkaSink passes the conformance kit, by the native way and record by record."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from sinks.kafka import KafkaSink
from sinks.testing import SinkConformance, SinkContract
from sinks.testing.servers.kafka import KafkaService
from tests.kafka.play import AsRecords, AsRecordsWithHeaders
from tests.kafka.reading import read, settled


class Contract(SinkContract):
    kind: type[AsRecords]

    @pytest.fixture
    def sink(self, kafka: KafkaService, kafka_topic: str) -> Iterator[KafkaSink]:
        self.options = kafka.client_options()
        with_security = {name: value for name, value in self.options.items() if name != "bootstrap.servers"}
        sink = self.kind(kafka.bootstrap, kafka_topic, options=with_security)
        yield sink
        sink.close()

    def visible(self, sink: Any) -> Sequence[int]:
        settled(sink.bootstrap_servers)
        return [json.loads(message.value() or b"")["id"] for message in read(self.options, sink.topic)]


class TestNative(Contract, SinkConformance):
    kind = AsRecords


class TestPlain(Contract):
    kind = AsRecordsWithHeaders
