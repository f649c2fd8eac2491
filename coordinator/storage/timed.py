"""Checkpoint storage that tells how long its calls take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from coordinator.storage.base import CheckpointStorage


class TimedStorage(CheckpointStorage):
    """`on_call` gets the name of each call and its seconds, also of one that failed, in the thread that made it. Who
    opened the storage closes it."""

    def __init__(self, storage: CheckpointStorage, on_call: Callable[[str, float], None]) -> None:
        self.uri, self._storage, self._on_call = storage.uri, storage, on_call

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._on_call(name, time.perf_counter() - began)

    def put_if_absent(self, key: str, value: bytes) -> bool:
        with self._timed("put"):
            return self._storage.put_if_absent(key, value)

    def get(self, key: str) -> bytes | None:
        with self._timed("get"):
            return self._storage.get(key)

    def list(self, prefix: str) -> list[str]:
        with self._timed("list"):
            return self._storage.list(prefix)

    def delete(self, key: str) -> None:
        with self._timed("delete"):
            self._storage.delete(key)

    def clock(self) -> float | None:
        return self._storage.clock()

    def weaknesses(self) -> Sequence[str]:
        return self._storage.weaknesses()
