"""Storages whose puts are not atomic are caught, however fast they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.storage import CheckpointStorage
from coordinator.storage.base import check_key
from sinks.testing.storage import StorageConformance


class _InFiles(CheckpointStorage):
    """A file for each key."""

    def __init__(self, folder: Path) -> None:
        self.uri = f"files:{folder}"
        self._folder = folder

    def _file(self, key: str) -> Path:
        return self._folder / check_key(key).replace("/", "%")

    def get(self, key: str) -> bytes | None:
        file = self._file(key)
        return file.read_bytes() if file.exists() else None

    def list(self, prefix: str) -> list[str]:
        keys = [file.name.replace("%", "/") for file in self._folder.iterdir()]
        return sorted(key for key in keys if key.startswith(prefix))

    def delete(self, key: str) -> None:
        self._file(key).unlink(missing_ok=True)


class LooksThenPuts(_InFiles):
    def put_if_absent(self, key: str, value: bytes) -> bool:
        file = self._file(key)
        if file.exists():
            return False
        file.write_bytes(value)
        return True


class MakesThenFills(_InFiles):
    """One of them wins, and the other one reads nothing meanwhile."""

    def put_if_absent(self, key: str, value: bytes) -> bool:
        try:
            with self._file(key).open("xb", buffering=0) as file:
                file.write(value)
        except FileExistsError:
            return False
        return True


class PutsThenReadsItBack(_InFiles):
    """Whoever reads its own value believes that it was first."""

    def put_if_absent(self, key: str, value: bytes) -> bool:
        if (before := self.get(key)) is None:
            self._file(key).write_bytes(value)
            before = self.get(key)
        return before == value


class InADict(CheckpointStorage):
    uri = "dict:"

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def put_if_absent(self, key: str, value: bytes) -> bool:
        absent = self.get(key) is None
        if absent:
            self._values[key] = value
        return absent

    def get(self, key: str) -> bytes | None:
        return self._values.get(check_key(key))

    def list(self, prefix: str) -> list[str]:
        return sorted(key for key in self._values if key.startswith(prefix))

    def delete(self, key: str) -> None:
        self._values.pop(check_key(key), None)


@pytest.mark.parametrize("kind", [LooksThenPuts, MakesThenFills, PutsThenReadsItBack])
def test_a_put_that_is_not_atomic_is_caught(kind: type[_InFiles], tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="with a put under 'beside/"):
        StorageConformance().test_a_put_beside_another(kind(tmp_path), lambda: kind(tmp_path))


def test_a_put_that_is_not_atomic_is_caught_however_fast_it_is() -> None:
    storage = InADict()
    with pytest.raises(AssertionError, match="one of them has to answer True, and the other one False"):
        StorageConformance().test_a_put_beside_another(storage, lambda: storage)
