"""The files of a lake table, in a folder or an object store.

They are the data files that tasks write, and the marks of pre-committed transactions.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, UnknownConfigurationKeyError
from obstore.store import LocalStore, ObjectStore, S3Store, from_url

from sinks._util.threads import side_by_side
from sinks.errors import ConfigurationError

_OF_CLIENT = ("allow_http", "allow_invalid_certificates", "timeout", "proxy_url", "user_agent")
"""Endings of the names of the options that obstore takes for its client, and not for the store."""
_TRIES = 10


class Files(ABC):
    """The files of one table.

    A path is as the table's log has it. A file is durable when `put` returns.
    """

    @abstractmethod
    def put(self, path: str, data: bytes) -> None: ...

    @abstractmethod
    def get(self, path: str) -> bytes | None: ...

    @abstractmethod
    def names(self, folder: str) -> list[str]:
        """Return the names of the files in a folder, without the folder.

        If there is no such folder, the list is empty.
        """

    @abstractmethod
    def delete(self, paths: Sequence[str]) -> None:
        """Delete those of the files that exist."""

    @abstractmethod
    def exists(self, path: str) -> bool: ...

    def missing(self, paths: Iterable[str]) -> set[str]:
        """Return those of the paths at which there is no file."""
        listed = list(paths)
        return {
            path
            for path, there in zip(listed, side_by_side(self.exists, listed), strict=True)
            if not there
        }


def address(path: str | os.PathLike[str], sink: str = "") -> str:
    """Return the absolute path of a folder, or a URI as it is, without a slash at the end.

    Raises ConfigurationError for a URI with credentials. The message names the `sink`.
    """
    uri = os.fspath(path).rstrip("/")
    parts = urlsplit(uri)
    if "@" in parts.netloc:
        name = sink or uri.rpartition("/")[2]
        raise ConfigurationError(
            f"sink {name!r}: credentials belong into storage_options, not into the URI"
        )
    if parts.scheme == "file":
        uri = unquote(parts.path)
    return os.path.abspath(uri) if parts.scheme in ("", "file") else uri


def make_durable(file: Path, root: Path) -> None:
    """Sync a file, and the folders above it up to `root`, to disk.

    The folders have the file's name, which must not be lost either.
    """
    for path in (file, *file.parents):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
        if path == root:
            return


class ObjectFiles(Files):
    """The files of a table by obstore, which is built on the same library as deltalake.

    `folder` is the table's folder, or None if the table is in an object store. obstore itself does
    not sync the files of a folder to disk, so `put` does.
    """

    def __init__(self, store: ObjectStore, folder: Path | None) -> None:
        self._store = store
        self.folder = folder

    def put(self, path: str, data: bytes) -> None:
        obstore.put(self._store, path, data)
        if self.folder is not None:
            make_durable(self.folder / path, self.folder)

    def get(self, path: str) -> bytes | None:
        with suppress(FileNotFoundError):
            return obstore.get(self._store, path).bytes().to_bytes()
        return None

    def names(self, folder: str) -> list[str]:
        return list(self.sizes(folder))

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the names of the files in a folder, as `names` does, each with its size."""
        entries = (entry for chunk in obstore.list(self._store, folder) for entry in chunk)
        return {str(entry["path"]).rpartition("/")[2]: int(entry["size"]) for entry in entries}

    def has_folder(self, folder: str) -> bool:
        """Tell whether there is a file below this folder."""
        return any(len(chunk) for chunk in obstore.list(self._store, folder, chunk_size=1))

    def put_once(self, path: str, data: bytes) -> bytes:
        """Put a file unless there is one, and return what the file of this name has then.

        Of several callers, all get what the first of them has put.
        """
        for _ in range(_TRIES):
            try:
                obstore.put(self._store, path, data, mode="create")
                current: bytes | None = data
            except AlreadyExistsError as error:
                clash = error
                current = self.get(path)
            if current is not None:
                if self.folder is not None:
                    make_durable(self.folder / path, self.folder)
                return current
        raise clash  # S3 says so, too, while a file of this name is being deleted

    def move(self, source: str, target: str) -> bool:
        """Give a file another name, and a store copies it to that end.

        The call may be repeated. Return False if the file has neither name.
        """
        try:
            obstore.rename(self._store, source, target)
        except FileNotFoundError:
            if not self.exists(target):
                return False
        if self.folder is not None:
            make_durable((self.folder / target).parent, self.folder)
        return True

    def size(self, path: str) -> int | None:
        """Return the size of a file, or None if there is no such file."""
        with suppress(FileNotFoundError):
            return int(obstore.head(self._store, path)["size"])
        return None

    def delete(self, paths: Sequence[str]) -> None:
        """Delete those of the files that exist.

        S3 does not mind a missing file, so it gets one request for many files. A folder, and the
        stores of Google and Azure, would stop at a missing file and leave the others, so each file
        is deleted by itself.
        """
        if isinstance(self._store, S3Store):
            obstore.delete(self._store, list(paths))
        else:
            side_by_side(self._delete, paths)

    def _delete(self, path: str) -> None:
        with suppress(FileNotFoundError):
            obstore.delete(self._store, path)

    def exists(self, path: str) -> bool:
        return self.stamp(path) is not None

    def stamp(self, path: str) -> object:
        """Return a value that differs for another file of this name.

        Return None if there is no file.
        """
        with suppress(FileNotFoundError):
            head = obstore.head(self._store, path)
            return head["e_tag"], head["last_modified"]
        return None

    def puts_once(self, path: str) -> bool:
        """Tell whether the store refuses a second put of one name, as it is asked to.

        The file is deleted again.
        """
        try:
            for _ in range(2):
                obstore.put(self._store, path, b"", mode="create")
        except AlreadyExistsError:
            return True
        finally:
            self.delete([path])
        return False


def files_at(uri: str, options: Mapping[str, str]) -> ObjectFiles:
    """Open the files below a folder, or in a store that obstore knows.

    `options` are deltalake's storage options. obstore gets those that it knows, because it raises
    an error for any other option.
    """
    if "://" not in uri:
        return ObjectFiles(LocalStore(uri), Path(uri))
    config: Any = {name.lower(): value for name, value in options.items()}
    client: Any = {
        name.removeprefix("aws_").removeprefix("azure_"): config.pop(name)
        for name in list(config)
        if name.endswith(_OF_CLIENT)
    }
    while True:
        try:
            return ObjectFiles(
                from_url(uri, config=config or None, client_options=client or None), None
            )
        except UnknownConfigurationKeyError as error:
            del config[str(error).split("'")[1]]
