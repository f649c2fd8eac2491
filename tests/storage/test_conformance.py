"""Storages in memory, in files and in databases pass the suite for checkpoint storages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import pytest
from obstore.store import LocalStore, MemoryStore

from coordinator.storage import CheckpointStorage, deferred_storage, open_storage
from coordinator.storage.objects import ObjectStorage
from sinks.testing.storage import ProcessConformance, StorageConformance


class TestMemory(StorageConformance):
    @pytest.fixture
    def reopen(self) -> Callable[[], CheckpointStorage]:
        name = uuid4().hex
        return lambda: open_storage(f"memory:{name}")

    def test_names_are_apart(self, storage):
        storage.put_if_absent("a", b"1")
        assert open_storage(f"memory:{uuid4().hex}").get("a") is None


class TestObjectsInMemory(StorageConformance):
    """The part that cloud stores will share, on obstore's own in-memory store."""

    @pytest.fixture
    def reopen(self) -> Callable[[], CheckpointStorage]:
        store = MemoryStore()
        return lambda: ObjectStorage("objects:memory", store)


class TestObjectsInFiles(StorageConformance):
    """The same, on obstore's own local store."""

    @pytest.fixture
    def reopen(self, tmp_path: Path) -> Callable[[], CheckpointStorage]:
        return lambda: ObjectStorage("objects:local", LocalStore(tmp_path))


class TestFile(ProcessConformance):
    @pytest.fixture
    def uri(self, tmp_path: Path) -> str:
        return (tmp_path / "not yet" / "there").as_uri()


class TestDeferred(StorageConformance):
    """The same as one in files, which each object opens by its first call."""

    @pytest.fixture
    def reopen(self, tmp_path: Path) -> Callable[[], CheckpointStorage]:
        return lambda: deferred_storage((tmp_path / "not yet" / "there").as_uri())


class TestSqlite(ProcessConformance):
    @pytest.fixture
    def uri(self, tmp_path: Path) -> str:
        return f"sqlite:///{tmp_path}/check points.db"


class TestPostgres(ProcessConformance):
    keys = 60
    kills = 4

    @pytest.fixture
    def uri(self, pg_database: str) -> str:
        return pg_database
