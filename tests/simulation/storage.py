"""Checkpoint storage in the simulated world."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from coordinator.storage import CheckpointStorage, StorageError
from coordinator.storage.base import check_folder, check_key
from tests.simulation.requests import FOLDERS
from tests.simulation.world import STORAGE, World

T = TypeVar("T")


class SimStorage(CheckpointStorage):
    """A storage whose calls can fail: not done, done with the answer lost, or done later."""

    def __init__(self, world: World, name: str) -> None:
        self.uri = f"sim:{name}"
        self._name = name
        self._world = world
        self._memory = world.storage(name)

    def _call(self, what: str, key: str, effect: Callable[[], T]) -> T:
        scheduler = self._world.scheduler
        fault = scheduler.tick(f"storage {what} {key}")
        if not self._world.reaches_storage():
            raise StorageError(self.uri, key, "simulated: unreachable")
        if fault == "late" and what in ("put", "delete"):

            def land() -> None:
                scheduler.tick(f"late {what} {key}")
                effect()

            scheduler.spawn("packet", "packet", land)
        if fault in ("lost", "late"):
            raise StorageError(self.uri, key, "simulated: no answer")
        with self._memory.lock:
            result = effect()
            if fault == "repeated" and what == "put":
                result = effect()  # its answer got lost, and the client has put again
        if fault == "landed":
            raise StorageError(self.uri, key, "simulated: the answer got lost")
        return result

    def put_if_absent(self, key: str, value: bytes) -> bool:
        check_key(key)

        def put() -> bool:
            if note := note_of(key):
                self._world.requests.note_was_put(*note, value)
            if key in self._memory.values:
                return False
            self._memory.put(key, bytes(value))
            self._world.record_was_put(key, value)
            if "/generation/" in key and self._memory is self._world.storage(STORAGE):
                self._world.claim_was_put(key, self._memory.values[key])
            if key.endswith("/_metadata"):
                self._world.savepoint_was_put(f"{self.uri}/{key.removesuffix('/_metadata')}", value)
            return True

        return self._call("put", key, put)

    def get(self, key: str) -> bytes | None:
        check_key(key)

        def read() -> bytes | None:
            if (self._name, key) in self._world.unreadable and key in self._memory.values:
                raise StorageError(self.uri, key, "simulated: it cannot be read")
            return self._memory.values.get(key)

        return self._call("get", key, read)

    def list(self, prefix: str) -> list[str]:
        folder = check_folder(prefix)
        return self._call("list", prefix, lambda: sorted(k for k in self._memory.values if k.startswith(folder)))

    def delete(self, key: str) -> None:
        check_key(key)

        def remove() -> None:
            if note := note_of(key):
                self._world.requests.note_was_deleted(*note)
            self._memory.remove(key)

        self._call("delete", key, remove)


def note_of(key: str) -> tuple[str, str] | None:
    """Return the folder and the id, if the key is that of a note between an operator and a driver."""
    _, _, rest = key.partition("/")
    folder, _, id = rest.partition("/")
    return (folder, id) if folder in FOLDERS else None


class Snapshot(CheckpointStorage):
    """A storage as it is now, to look into without a call."""

    def __init__(self, values: dict[str, bytes]) -> None:
        self.uri = "snapshot"
        self._values = values

    def put_if_absent(self, key: str, value: bytes) -> bool:
        raise AssertionError("a snapshot does not change")

    def get(self, key: str) -> bytes | None:
        return self._values.get(key)

    def list(self, prefix: str) -> list[str]:
        folder = check_folder(prefix)
        return sorted(key for key in self._values if key.startswith(folder))

    def delete(self, key: str) -> None:
        raise AssertionError("a snapshot does not change")
