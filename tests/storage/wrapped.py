"""A storage around a storage, for tests that want something to happen there."""

from __future__ import annotations

from typing import Any

from coordinator.storage import CheckpointStorage


class WrappedStorage(CheckpointStorage):
    """Every call goes through `_call`, which passes it on; the inner storage is closed by whom it belongs to."""

    def __init__(self, inner: CheckpointStorage) -> None:
        self.inner, self.uri = inner, inner.uri

    def _call(self, method: str, key: str, *more: Any) -> Any:
        return getattr(self.inner, method)(key, *more)

    def put_if_absent(self, key: str, value: bytes) -> bool:
        return bool(self._call("put_if_absent", key, value))

    def get(self, key: str) -> bytes | None:
        value: bytes | None = self._call("get", key)
        return value

    def list(self, prefix: str) -> list[str]:
        keys: list[str] = self._call("list", prefix)
        return keys

    def delete(self, key: str) -> None:
        self._call("delete", key)

    def close(self) -> None:
        pass
