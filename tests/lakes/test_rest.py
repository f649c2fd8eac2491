"""Iceberg tables of a REST catalog."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import requests

import sinks.iceberg.rest
from sinks.iceberg import IcebergSink
from sinks.testing import SCHEMA, rows
from sinks.transaction import Fingerprint, TransactionId
from tests.lakes.rest import SECRET, RestCatalog, rest_catalog
from tests.lakes.test_lakes import COMMITTED, JOB, LINEAGE, committed, pre_committed


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[RestCatalog]:
    with rest_catalog(tmp_path) as made:
        yield made


@pytest.mark.parametrize("kind", ["oauth2", "credential"])
def test_a_sink_of_a_catalog_with_oauth2_writes_in_tasks(catalog: RestCatalog, kind: str) -> None:
    """pyiceberg hands out an object with a lock among the table's properties, which cannot travel."""
    with closing(IcebergSink(catalog.lake.name, catalog=getattr(catalog, kind), name="lake")) as sink:
        sink.check(SCHEMA)
        task = pickle.loads(pickle.dumps(sink))
        known = pickle.dumps(task._table)
        assert SECRET.encode() not in known, "what a catalog gives out for a while is the driver's"
        assert b"of the store" in known
        name = TransactionId(JOB, LINEAGE, 0, task.name, 0, 1, 0, 0, 0)
        transaction = task.begin_transaction(name.context(SCHEMA))
        for batch in rows(0, 2).to_batches():
            task.write(transaction, batch)
        made = task.snapshot_state(transaction).of(task.name, 0, Fingerprint(2))
        assert committed(sink, made) == [COMMITTED]
    assert catalog.lake.ids() == [0, 1]


def test_a_sink_of_a_catalog_with_oauth2_travels_to_another_driver(catalog: RestCatalog) -> None:
    """As with Spark Connect, where the driver runs in the server."""
    sink = pickle.loads(pickle.dumps(IcebergSink(catalog.lake.name, catalog=catalog.oauth2, name="lake")))
    with closing(sink):
        assert committed(sink, pre_committed(sink, rows(0, 2))) == [COMMITTED]
    assert catalog.lake.ids() == [0, 1]


def test_a_catalog_that_no_longer_answers_is_not_waited_for_without_end(
    catalog: RestCatalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each question fails after a time, so that the commit timeout is looked at; later the commit is made."""
    with closing(IcebergSink(catalog.lake.name, catalog=catalog.oauth2, name="lake")) as sink:
        made = pre_committed(sink, rows(0, 2))
        monkeypatch.setattr(sinks.iceberg.rest, "TIMEOUT", (0.2, 0.2))
        catalog.answers.clear()
        with pytest.raises(requests.exceptions.Timeout):
            committed(sink, made)
        with pytest.raises(requests.exceptions.Timeout):
            committed(IcebergSink(catalog.lake.name, catalog=catalog.oauth2, name="lake"), made)
        monkeypatch.undo()
        catalog.answers.set()
        assert committed(sink, made) == [COMMITTED]
    assert catalog.lake.ids() == [0, 1]
