"""FileSink passes the conformance kit: in a folder and in an object store, as Parquet and as JSON lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pytest
from obstore.store import LocalStore, ObjectStore, from_url

from sinks.files import FileSink
from sinks.testing import OverSpark, SinkConformance, SinkContract
from sinks.testing.kit import SinkTests
from sinks.testing.servers.s3 import S3Server
from sinks.testing.two_phases import TwoPhases
from sinks.testing.values import SAMPLES
from tests.azure_server import AzureServer
from tests.files.reading import hidden_of, rows_of


class Files(SinkTests):
    options: ClassVar[Mapping[str, Any]] = {}
    types = tuple(SAMPLES)

    @pytest.fixture
    def sink(self, tmp_path: Path) -> FileSink:
        return FileSink(tmp_path / "rows", **self.options)

    def accepting(self, sink: FileSink, schema: pa.Schema) -> FileSink:
        return FileSink(f"{sink}-2", **self.options)

    def set_otherwise(self, sink: FileSink) -> Sequence[FileSink]:
        others: Sequence[dict[str, Any]] = [{"format": "jsonl"}, {"compression": "gzip"}, {"partition_by": ["name"]}]
        return [FileSink(str(sink), **{**self.options, "compression": None, **other}) for other in others]

    def store(self, sink: FileSink) -> ObjectStore:
        return LocalStore(str(sink), mkdir=True)

    def visible(self, sink: FileSink) -> Sequence[Mapping[str, Any]]:
        return list(rows_of(self.store(sink)))

    def leftovers(self, sink: FileSink) -> Sequence[str]:
        return hidden_of(self.store(sink))


class TestFileSink(Files, SinkConformance):
    pass


class TestJsonLines(Files, SinkContract):
    options: ClassVar = {"format": "jsonl", "compression": "gzip"}


class TestPartitioned(Files, SinkContract):
    options: ClassVar = {"partition_by": ["id"]}

    def test_many_rows_in_several_batches_arrive(self, sink: FileSink) -> None:
        pytest.skip("each of 10,002 rows would be a file")

    def test_what_is_committed_becomes_visible_as_a_whole(self, sink: FileSink) -> None:  # type: ignore[override]
        pytest.skip("files appear one after the other, which test_files.py has")


class OnObjects(Files):
    environment: Mapping[str, str]

    def accepting(self, sink: FileSink, schema: pa.Schema) -> FileSink:
        return FileSink(f"{sink}-2", storage_options=self.environment, **self.options)

    def set_otherwise(self, sink: FileSink) -> Sequence[FileSink]:
        return [FileSink(str(sink), storage_options=self.environment, format="jsonl")]

    def store(self, sink: FileSink) -> ObjectStore:
        return from_url(str(sink))


class OnS3(OnObjects):
    @pytest.fixture
    def sink(self, s3: S3Server, s3_bucket: str) -> FileSink:
        self.environment = s3.environment
        return FileSink(f"{s3_bucket}/rows", storage_options=self.environment, **self.options)


class TestS3(OnS3, TwoPhases):
    pass


@pytest.fixture(scope="module")
def azure() -> Iterator[AzureServer]:
    with AzureServer() as server:
        yield server


@pytest.mark.large
class TestAzure(OnObjects, TwoPhases):
    @pytest.fixture
    def sink(self, azure: AzureServer, monkeypatch: pytest.MonkeyPatch) -> FileSink:
        self.environment = azure.environment
        for name, value in self.environment.items():
            monkeypatch.setenv(name, value)
        container = azure.make_container()
        return FileSink(f"az://{container}/rows", storage_options=self.environment, **self.options)


@pytest.mark.large
class TestAllOnS3(OnS3, SinkConformance):
    pass


@pytest.mark.large
class TestOverSpark(Files, OverSpark):
    pass
