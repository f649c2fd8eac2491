"""The statistics of the last checkpoints in checkpoint storage, so that they outlive their driver."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator

from coordinator.errors import CheckpointError
from coordinator.protocol.records import CheckpointStore
from coordinator.statistics.model import CheckpointStatistics
from coordinator.storage import StorageError

_TOGETHER = 100
"""Checkpoints that are kept in one object: the more, the fewer objects, and the more is written again by a flush."""


class CheckpointHistory:
    """Keeps what it is told until the next `flush`; what a driver that is killed had not flushed is lost. `size`: of so
    many checkpoints, more or less; of none if it is 0."""

    def __init__(self, store: CheckpointStore, size: int) -> None:
        self._store, self._size = store, size
        self._new: deque[CheckpointStatistics] = deque(maxlen=size)
        self._flushing = threading.Lock()

    def report(self, statistics: CheckpointStatistics) -> None:
        self._new.append(statistics)

    def flush(self) -> None:
        """Add what is new to the newest object, or begin another. From any thread. Raises `StorageError`; the next
        flush tries again."""
        with self._flushing:
            new = [self._new.popleft() for _ in range(len(self._new))]
            if new:
                try:
                    values = [statistics.to_json() for statistics in new]
                    self._store.add_statistics(values, together=_TOGETHER, keep=self._size)
                except BaseException:
                    self._new.extendleft(reversed(new))
                    raise


def load_history(
    store: CheckpointStore, bad: list[str], known: dict[str, list[CheckpointStatistics]] | None = None
) -> list[CheckpointStatistics]:
    """In the order of their ends. `bad`: gets a sentence on what cannot be read. `known`: what calls before
    have read, by key, since an object never changes. Raises `StorageError`, `CorruptRecord`."""
    before = {} if known is None else known
    read: dict[str, list[CheckpointStatistics]] = {}
    for key in store.statistics_keys():
        read[key] = before.get(key) or list(_understood(store, key, bad))
    before.clear()
    before |= read
    unique = {
        (statistics.generation, statistics.checkpoint_id, statistics.attempt, statistics.triggered_at): statistics
        for each in read.values()
        for statistics in each
    }
    return sorted(unique.values(), key=lambda statistics: statistics.ended_at)


def _understood(store: CheckpointStore, key: str, bad: list[str]) -> Iterator[CheckpointStatistics]:
    try:
        for value in store.statistics_in(key):
            try:
                yield CheckpointStatistics.from_json(value)
            except (KeyError, TypeError, ValueError) as error:
                bad.append(f"statistics {key} in {store.storage.uri} lack or misuse a field: {error!r}")
    except (CheckpointError, StorageError) as error:
        bad.append(str(error))
