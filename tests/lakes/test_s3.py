"""Lake tables in a store that knows conditional puts, by an S3 server of our own."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyiceberg.catalog import load_catalog

from sinks.delta import DeltaSink
from sinks.iceberg import IcebergSink
from sinks.lake.files import files_at
from sinks.testing import SCHEMA, rows
from sinks.testing.servers.s3 import S3Server
from tests.lakes.test_lakes import COMMITTED, JOB, LOST, committed, pre_committed


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


class OnS3:
    def __init__(self, server: S3Server, folder: Path) -> None:
        self.bucket, self.folder = server.make_bucket(), folder
        self.options = server.environment
        self.s3 = {
            "s3.endpoint": server.endpoint,
            "s3.access-key-id": "test",
            "s3.secret-access-key": "test",
            "s3.region": "us-east-1",
        }

    def delta(self) -> DeltaSink:
        options = self.options | {"TIMEOUT": "20s", "AWS_S3_LOCKING_PROVIDER": "", "AWS_CONDITIONAL_PUT": "etag"}
        return DeltaSink(f"s3://{self.bucket}/delta", storage_options=options, name="lake", create_table=True)

    def iceberg(self) -> IcebergSink:
        return IcebergSink("test.orders", catalog=self._catalog(), name="lake", create_table=True)

    def _catalog(self) -> dict[str, str]:
        catalog = {"name": "s3", "type": "sql", "uri": f"sqlite:///{self.folder}/catalog.db"}
        return {**catalog, "warehouse": f"s3://{self.bucket}/iceberg", **self.s3}

    def ids(self, kind: str) -> list[int]:
        if kind == "delta":
            table: Any = DeltaTable(f"s3://{self.bucket}/delta", storage_options=self.options).to_pyarrow_table()
        else:
            table = load_catalog(**self._catalog()).load_table("test.orders").scan().to_arrow()
        return sorted(table["id"].to_pylist())


@pytest.fixture
def store(server: S3Server, tmp_path: Path) -> OnS3:
    return OnS3(server, tmp_path)


@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_two_phases(store: OnS3, kind: str) -> None:
    sink = getattr(store, kind)()
    made = [pre_committed(sink, rows(10 * n, 2), subtask=n) for n in range(3)]
    listed = {one["transaction"] for one in sink.in_doubt(JOB)}
    assert listed == {one.transaction["transaction"] for one in made}
    sink.abort(made[2].transaction)
    assert committed(sink, *made[:2]) == [COMMITTED] * 2
    assert committed(getattr(store, kind)(), *made) == [COMMITTED, COMMITTED, LOST]
    assert list(sink.in_doubt(JOB)) == []
    assert store.ids(kind) == [0, 1, 10, 11]
    transaction = sink.begin_transaction(_context(sink, rows(50, 2)))
    sink.write(transaction, rows(50, 2).to_batches()[0])
    sink.pre_commit(transaction)
    sink.rollback(transaction)
    assert list(sink.in_doubt(JOB)) == []


def _context(sink: Any, table: Any) -> Any:
    from sinks.transaction import TransactionId

    return TransactionId(JOB, "0badcafe", 5, sink.name, 0, 1, 0, 0, 0).context(table.schema)


@pytest.mark.parametrize("kind", ["delta", pytest.param("iceberg", marks=pytest.mark.large)])  # test_catalogs.py has it
def test_drivers_that_commit_the_same_at_once(store: OnS3, kind: str) -> None:
    sink = getattr(store, kind)()
    made = [pre_committed(sink, rows(10 * n, 2), n) for n in range(6)]

    def commit() -> None:
        driver = getattr(store, kind)()
        for one in made:
            committed(driver, one)

    drivers = [threading.Thread(target=commit) for _ in range(3)]
    for driver in drivers:
        driver.start()
    for driver in drivers:
        driver.join()
    assert store.ids(kind) == [10 * n + m for n in range(6) for m in range(2)]


def test_a_store_that_ignores_conditions_is_told(store: OnS3, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = store.delta()
    sink.check(SCHEMA)
    assert sink.weaknesses() == ()
    monkeypatch.setattr("obstore.put", lambda *args, **options: None)
    [told] = sink.weaknesses()
    assert "ignores the condition of a put" in told


def test_options_by_the_environment(store: OnS3, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in store.options.items():
        monkeypatch.setenv(name, value)
    files = files_at(f"s3://{store.bucket}/x", {})
    files.put("a/b", b"c")
    assert (files.get("a/b"), files.names("a"), files.missing(["a/b", "d"])) == (b"c", ["b"], {"d"})
    assert os.environ["AWS_ENDPOINT_URL"].startswith("http://127.0.0.1")
