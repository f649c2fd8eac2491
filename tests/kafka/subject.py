"""The registry's side of a topic, without the sink, and rows whose value goes by one of its schemas."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pytest
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient
from confluent_kafka.serialization import MessageField, SerializationContext

from coordinator import Step
from sinks.errors import ConfigurationError
from sinks.kafka import KafkaSink
from sinks.testing.local import Partitions
from sinks.testing.servers.kafka import KafkaService
from sinks.testing.servers.registry import ExternalRegistry, RegistryServer
from tests.kafka.reading import read, settled
from tests.kafka.tasks import anew
from tests.kafka.test_crashes import At, run

AnyRegistry = RegistryServer | ExternalRegistry


def rows(kind: Mapping[str, pa.DataType], *values: tuple[Any, ...] | None) -> pa.Table:
    """Structs of these fields in a column `value`."""
    structs = [None if row is None else dict(zip(kind, row, strict=True)) for row in values]
    return pa.table({"value": pa.array(structs, pa.struct(list(kind.items())))})


class Subject(ABC):
    """As other programs see it."""

    value_format: ClassVar[str]
    evolution: ClassVar[str]
    """What its sinks may do."""

    def __init__(self, kafka: KafkaService, topic: str, url: str) -> None:
        self.kafka, self.topic, self.url, self.name = kafka, topic, url, f"{topic}-value"

    @property
    def client(self) -> SchemaRegistryClient:
        """A new one, since it caches."""
        return SchemaRegistryClient({"url": self.url, "timeout": 120})

    def register(self, text: str) -> int:
        return self.client.register_schema(self.name, Schema(text, self.value_format.upper()))

    def texts(self) -> list[str]:
        """Of each version."""
        client = self.client
        if self.name not in client.get_subjects():
            return []
        return [str(client.get_version(self.name, n).schema.schema_str) for n in client.get_versions(self.name)]

    def sink(self, evolution: str | None = None, **options: Any) -> KafkaSink:
        given = {"schema_registry": self.url, "schema_evolution": evolution or self.evolution, **options}
        security = {k: v for k, v in self.kafka.client_options().items() if k != "bootstrap.servers"}
        return KafkaSink(
            self.kafka.bootstrap, self.topic, options=security, **{"value_format": self.value_format, **given}
        )

    def ready(self, schema: pa.Schema, evolution: str | None = None, **options: Any) -> KafkaSink:
        sink = self.sink(evolution, **options)
        sink.check(schema)
        sink.evolve(schema)
        return sink

    @abstractmethod
    def deserializer(self) -> Any:
        """Confluent's."""

    def values(self) -> list[Any]:
        settled(self.kafka.bootstrap)
        deserialize = self.deserializer()
        context = SerializationContext(self.topic, MessageField.VALUE)
        return [deserialize(m.value(), context) for m in read(self.kafka.client_options(), self.topic)]

    @abstractmethod
    def ids(self) -> list[int]:
        """Of the topic's rows, sorted."""

    @abstractmethod
    def versions(self) -> Sequence[Any]:
        """What tells one version from another."""

    def outlives(
        self, server: RegistryServer, folder: Path, input: list[Partitions], other: str, shown: str = ""
    ) -> None:
        """A query that runs does not need the registry; a start does, and does not trust one that was set back, or has
        the schema `other` under the number of these rows."""

        def refused(why: str) -> None:
            with closing(self.sink()) as sink, pytest.raises(ConfigurationError, match=why):
                run(sink, folder, input)

        run(self.sink(), folder, input[:2], At(Step.COMPLETE, 0, server.kill))
        refused(r"cannot be asked for .*Check that it")
        server.start()  # and has forgotten everything
        refused("has no schema under it")
        assert self.versions() == []
        self.register(other)
        self.client.set_compatibility(self.name, "NONE")
        refused(rf"has another schema, .*{shown}.* under it")
        assert len(self.versions()) == 1
        anew(self.kafka, self.topic, 1)
        run(self.sink(), folder, input)
        assert self.ids() == [4]
