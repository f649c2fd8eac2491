"""Checkpoint storage in the memory of this process, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import ClassVar

from coordinator.storage.base import CheckpointStorage, check_folder, check_key


class MemoryStorage(CheckpointStorage):
    """`memory:NAME`. All storages of one name in a process share their values, also after `close`, so that a second
    coordinator finds what the first one left. Gone with the process: it cannot keep the promise over a real crash.
    """

    _shared: ClassVar[dict[str, dict[str, bytes]]] = {}
    _lock: ClassVar[Lock] = Lock()

    def __init__(self, name: str) -> None:
        self.uri = f"memory:{name}"
        with self._lock:
            self._values = self._shared.setdefault(name, {})

    def put_if_absent(self, key: str, value: bytes) -> bool:
        check_key(key)
        with self._lock:
            if key in self._values:
                return False
            self._values[key] = bytes(value)
            return True

    def get(self, key: str) -> bytes | None:
        return self._values.get(check_key(key))

    def list(self, prefix: str) -> list[str]:
        folder = check_folder(prefix)
        with self._lock:
            return sorted(key for key in self._values if key.startswith(folder))

    def delete(self, key: str) -> None:
        with self._lock:
            self._values.pop(check_key(key), None)

    def weaknesses(self) -> Sequence[str]:
        return ["it is gone with the driver's process"]
