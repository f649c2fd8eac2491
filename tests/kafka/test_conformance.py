"""KafkaSink passes the conformance kit, without headers and with them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import pyarrow as pa
import pytest

from sinks.dead_letters import SCHEMA
from sinks.kafka import KafkaSink
from sinks.testing import Ability, SinkConformance, SinkContract
from sinks.testing.kit import copy_of
from sinks.testing.servers.kafka import KafkaServer, KafkaService
from sinks.transaction import Committable, Identity
from tests.kafka.reading import read, settled
from tests.kafka.tasks import AsRecords, AsRecordsWithHeaders


class Contract(SinkContract):
    kind: type[AsRecords]
    refused = None
    many = 20
    stops = 3
    cannot: ClassVar = {
        Ability.SLOT: "a transactional id has one transaction, and a new one rolls back the one before",
        Ability.TELL_OPEN: "the broker has no state for it; what was aborted while it was open is told LOST",
        Ability.EMPTY: "the proof is the place of one of its records",
    }

    @pytest.fixture
    def sink(self, kafka: KafkaService, kafka_topic: str) -> Iterator[KafkaSink]:
        self.options = kafka.client_options()
        self.security = {name: value for name, value in self.options.items() if name != "bootstrap.servers"}
        sink = self.kind(kafka.bootstrap, kafka_topic, options=self.security)
        yield sink
        sink.close()

    def accepting(self, sink: Any, schema: pa.Schema) -> Any:
        letters = schema == SCHEMA
        return KafkaSink(sink.bootstrap_servers, sink.topic, options=self.security) if letters else copy_of(sink)

    def unseen(self, made: Committable, transaction_id: str) -> Identity:
        pytest.skip("a proof is the place of a record of the transaction: what never was has none")

    def visible(self, sink: Any) -> Sequence[Mapping[str, Any]]:
        settled(sink.bootstrap_servers)
        return [json.loads(message.value() or b"") for message in read(self.options, sink.topic)]


class TestRows(Contract, SinkConformance):
    kind = AsRecords


@pytest.mark.large
class TestRowsWithHeaders(Contract):
    kind = AsRecordsWithHeaders


@pytest.fixture(scope="module")
def kafka_3() -> Iterator[KafkaServer]:
    with KafkaServer(version="3.9.1") as server:
        yield server


@pytest.mark.large
class TestRowsInKafka3(Contract, SinkConformance):
    kind = AsRecords

    @pytest.fixture
    def kafka(self, kafka_3: KafkaServer) -> KafkaServer:
        return kafka_3
