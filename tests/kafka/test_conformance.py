"""KafkaSink passes the conformance kit, by the native way and record by record."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import pytest

from sinks.kafka import KafkaSink
from sinks.testing import Ability, SinkConformance, SinkContract
from sinks.testing.servers.kafka import KafkaService
from sinks.transaction import Committable, Identity
from tests.kafka.play import AsRecords, AsRecordsWithHeaders
from tests.kafka.reading import read, settled


class Contract(SinkContract):
    kind: type[AsRecords]
    refused = None
    cannot: ClassVar = {
        Ability.AT_ONCE: "each participant has a transaction of its own, and is visible by itself",
    }

    @pytest.fixture
    def sink(self, kafka: KafkaService, kafka_topic: str) -> Iterator[KafkaSink]:
        self.options = kafka.client_options()
        with_security = {name: value for name, value in self.options.items() if name != "bootstrap.servers"}
        sink = self.kind(kafka.bootstrap, kafka_topic, options=with_security)
        yield sink
        sink.close()

    def unseen(self, made: Committable, transaction_id: str) -> Identity:
        return {**made.transaction, "transactional_id": f"{made.transaction['transactional_id']}0"}

    def visible(self, sink: Any) -> Sequence[Mapping[str, Any]]:
        settled(sink.bootstrap_servers)
        return [json.loads(message.value() or b"") for message in read(self.options, sink.topic)]


class TestNative(Contract, SinkConformance):
    kind = AsRecords


class TestPlain(Contract):
    kind = AsRecordsWithHeaders
