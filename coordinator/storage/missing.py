"""A storage that is not there: what an operator's command finds behind a mistyped URI, or after somebody deleted it."""

from __future__ import annotations

from collections.abc import Callable

from coordinator.storage.base import CheckpointStorage, NoSuchStorage, check_folder, check_key


class MissingStorage(CheckpointStorage):
    """Holds nothing; the first put makes the storage."""

    def __init__(self, why: NoSuchStorage, make: Callable[[], CheckpointStorage]) -> None:
        self.uri, self.why = why.uri, why
        self._make = make
        self._made: CheckpointStorage | None = None

    def put_if_absent(self, key: str, value: bytes) -> bool:
        self._made = self._made or self._make()
        return self._made.put_if_absent(key, value)

    def get(self, key: str) -> bytes | None:
        check_key(key)
        return self._made.get(key) if self._made else None

    def list(self, prefix: str) -> list[str]:
        check_folder(prefix)
        return self._made.list(prefix) if self._made else []

    def delete(self, key: str) -> None:
        if self._made:
            self._made.delete(key)

    def close(self) -> None:
        if self._made:
            self._made.close()
