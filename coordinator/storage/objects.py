"""Checkpoint storage in object stores, through obstore, and in a local directory.

A cloud store becomes a line in `coordinator.storage.open_storage`: `ObjectStorage(uri, obstore.store.from_url(uri))`.
Its put mode "create" is one conditional request, atomic and durable when answered.

A local directory is not: obstore 0.12 (object_store 0.14) writes `KEY#1` and links it to `KEY`, which is atomic, but
never calls fsync (seen with strace). So a record that was read, and acted upon, could be empty or gone after a power
loss. `FileStorage` therefore writes by itself, the same way plus fsync, and leaves the rest to obstore.
"""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import LocalStore, ObjectStore

from coordinator.storage.base import CheckpointStorage, StorageError, check_folder, check_key, is_key

_ADVICE = {
    errno.ENOSPC: "Free space there; the query can then be restarted, nothing torn was left",
    errno.EDQUOT: "Raise the disk quota; the query can then be restarted, nothing torn was left",
    errno.EACCES: "Let the user that runs the driver write to this directory",
    errno.EPERM: "The file system must allow hard links, and the user that runs the driver to make them",
    errno.ENOTSUP: "The file system does not know hard links; use another one or a database",
    errno.EROFS: "The file system is mounted read-only; mount it for writing or use another directory",
    errno.ENOTDIR: "A part of the path is a file; use another directory",
    errno.EEXIST: "The path is a file; use another directory",
}


class ObjectStorage(CheckpointStorage):
    """Values are the objects of any store that obstore knows, keys their names below the store's own prefix."""

    def __init__(self, uri: str, store: ObjectStore) -> None:
        self.uri = uri
        self._store = store

    def put_if_absent(self, key: str, value: bytes) -> bool:
        with self._errors(f"cannot write {len(value)} bytes", check_key(key)):
            try:
                obstore.put(self._store, key, value, mode="create")
            except AlreadyExistsError:
                return False
            return True

    def get(self, key: str) -> bytes | None:
        with self._errors("cannot read", check_key(key)):
            try:
                return obstore.get(self._store, key).bytes().to_bytes()
            except FileNotFoundError:
                return None

    def list(self, prefix: str) -> list[str]:
        folder = check_folder(prefix)
        with self._errors(f"cannot list {folder!r}"):
            names = (entry["path"] for chunk in obstore.list(self._store, folder or None) for entry in chunk)
            return sorted(name for name in names if is_key(name))

    def delete(self, key: str) -> None:
        with self._errors("cannot delete", check_key(key)), suppress(FileNotFoundError):
            obstore.delete(self._store, key)

    def close(self) -> None:
        pass

    @contextmanager
    def _errors(self, action: str, key: str = "") -> Iterator[None]:
        try:
            yield
        except (OSError, BaseError) as error:
            number = error.errno if isinstance(error, OSError) else None
            reason = os.strerror(number) if number else str(error).partition("\n")[0]
            raise StorageError(self.uri, key, f"{action}: {reason}", _ADVICE.get(number or 0, "")) from error


class FileStorage(ObjectStorage):
    """`file:///DIRECTORY`: one file for each key. The directory is made if it is missing.

    A put writes `KEY#RANDOM`, fsyncs it, hard-links it to `KEY` (which fails if that exists: the one atomic step, so
    that no torn value can ever stand under a key) and fsyncs the directories. A reader fsyncs them too before it hands
    out a value: the writer may have died in between. A killed writer leaves `KEY#RANDOM` behind, which is no key, so
    `list` passes over it; it goes with `delete(KEY)`.

    Several hosts may share the directory if its file system has hard links and close-to-open consistency (NFS has).
    """

    def __init__(self, directory: str | Path) -> None:
        self._root = Path(os.path.abspath(directory))
        self.uri = self._root.as_uri()
        with self._errors("cannot make the directory"):
            self._root.mkdir(parents=True, exist_ok=True)
            for parent in self._root.parents:
                with suppress(PermissionError):  # not ours to read, so not made by us
                    _fsync_directory(parent)
        with self._errors("cannot use the directory"):
            super().__init__(self.uri, LocalStore(self._root))

    def put_if_absent(self, key: str, value: bytes) -> bool:
        path = self._root / check_key(key)
        staged = path.with_name(f"{path.name}#{uuid.uuid4().int}")
        with self._errors(f"cannot write {len(value)} bytes", key):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with staged.open("xb") as file:
                    file.write(value)
                    file.flush()
                    os.fsync(file.fileno())
                os.link(staged, path)
            except FileExistsError:
                if path.is_dir():
                    raise IsADirectoryError(errno.EISDIR, "there are keys below this one", str(path)) from None
                return False
            finally:
                staged.unlink(missing_ok=True)
            self._fsync_directories(path)
            return True

    def get(self, key: str) -> bytes | None:
        value = super().get(key)
        if value is not None:
            with self._errors("cannot fsync", key):
                self._fsync_directories(self._root / key)
        return value

    def delete(self, key: str) -> None:
        super().delete(key)
        path = self._root / key
        with self._errors("cannot delete", key):
            for staged in path.parent.glob(f"{path.name}#*"):
                staged.unlink(missing_ok=True)

    def _fsync_directories(self, path: Path) -> None:
        for parent in path.parents:
            _fsync_directory(parent)
            if parent == self._root:
                return


def _fsync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
