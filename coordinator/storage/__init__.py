"""Checkpoint storage, where the records of checkpoints are kept.

`open_storage` turns a URI into a `CheckpointStorage`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from urllib.parse import unquote, urlsplit

from coordinator.storage.base import (
    SUPPORTED,
    CheckpointStorage,
    DeferredStorage,
    MemoryStorage,
    MissingStorage,
    NoSuchStorage,
    StorageError,
)

__all__ = [
    "CheckpointStorage",
    "MissingStorage",
    "StorageError",
    "deferred_storage",
    "existing_storages",
    "open_storage",
    "storage_at",
]

_make: ContextVar[bool] = ContextVar("make", default=True)

# Hadoop's file systems without an atomic put-if-absent, and what reaches the same data with one.
_INSTEAD = dict.fromkeys(("s3a", "s3n"), "s3://BUCKET/PREFIX")
_INSTEAD |= dict.fromkeys(("abfs", "abfss", "wasb", "wasbs"), "az://CONTAINER/PREFIX")
_INSTEAD |= dict.fromkeys(("webhdfs", "swebhdfs"), "hdfs://HOST:PORT/PATH")


def open_storage(uri: str | CheckpointStorage) -> CheckpointStorage:
    """Open the storage at a URI for writing, and make the storage there if it is missing.

    A storage is returned as it is, and a storage from `deferred_storage` is opened. The URI is one
    of

    * `file:///DIRECTORY` or an absolute path
    * `s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX`, `az://CONTAINER/PREFIX`: credentials and endpoint
      come from the environment variables AWS_*, GOOGLE_* and AZURE_*, as obstore reads them
    * `hdfs://HOST:PORT/PATH`, `viewfs://...`: through the JVM of the Spark session, which has to
      run already
    * any SQLAlchemy URL; `postgresql://` means psycopg 3 and `mysql://` PyMySQL
    * `memory:NAME`, for tests

    Raises StorageError if the URI is none of these, or if the storage cannot be reached or set up.
    """
    if isinstance(uri, DeferredStorage):
        return uri.opened()
    if isinstance(uri, CheckpointStorage):
        return uri
    return _open_or_missing(_opener(uri)[1], make=_make.get())


def deferred_storage(uri: str | CheckpointStorage) -> CheckpointStorage:
    """Return the storage at a URI, which its first call opens as `open_storage` would now.

    This connects to nothing, and raises StorageError only for a URI that `open_storage` does not
    know. A storage is returned as it is.
    """
    if isinstance(uri, CheckpointStorage):
        return uri
    shown, open = _opener(uri)
    return DeferredStorage(shown, partial(_open_or_missing, open, make=_make.get()))


@contextmanager
def existing_storages() -> Iterator[None]:
    """Keep `open_storage` from writing anything in the block.

    A directory or table that does not exist becomes a `MissingStorage`. The same holds for a
    storage that `deferred_storage` names in the block, even if it is opened later.
    """
    before = _make.set(False)
    try:
        yield
    finally:
        _make.reset(before)


@contextmanager
def storage_at(
    uri: str | CheckpointStorage, *, existing: bool = False
) -> Iterator[CheckpointStorage]:
    """Open the storage at a URI for the block, and close what was opened.

    With `existing`, nothing is made.
    """
    with existing_storages() if existing else nullcontext():
        storage = open_storage(uri)
    try:
        yield storage
    finally:
        if not isinstance(uri, CheckpointStorage):
            storage.close()


_Opener = Callable[..., CheckpointStorage]
"""A function that opens a storage.

It is called with `make`, which says whether to make what is missing.
"""


def _open_or_missing(open: _Opener, *, make: bool) -> CheckpointStorage:
    try:
        return open(make=make)
    except NoSuchStorage as error:
        return MissingStorage(error, partial(open, make=True))


def _opener(uri: str) -> tuple[str, _Opener]:
    """Return what may be shown of a URI, and what opens its storage. Connects to nothing."""
    if not isinstance(uri, str):
        raise TypeError(f"a storage is a URI or a CheckpointStorage, not {type(uri).__name__}")
    scheme, colon, rest = uri.partition(":")
    if uri.startswith("/") or scheme == "file":
        from coordinator.storage.files import FileStorage

        directory = Path(os.path.abspath(_directory(uri)))
        return directory.as_uri(), partial(FileStorage, directory)
    if scheme in ("s3", "gs", "az"):
        from coordinator.storage.objects import address_of_bucket, open_bucket

        return address_of_bucket(uri), partial(open_bucket, uri)
    if scheme in _INSTEAD:  # repeats no URI: old s3a URIs hold keys
        raise StorageError(
            f"{scheme}://...",
            "",
            f"Hadoop's {scheme} has no put-if-absent that is atomic and durable",
            f"Write {_INSTEAD[scheme]} instead. {SUPPORTED}",
        )
    if scheme == "memory" and rest:
        return uri, lambda make: MemoryStorage(rest)
    # The message repeats nothing of the URI, which may hold a password.
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9+._-]*", scheme) or not colon:
        raise StorageError("given", "", "this is neither a URI nor an absolute path", SUPPORTED)
    with _missing_packages_named(scheme):
        if scheme in ("hdfs", "viewfs"):
            from coordinator.storage.hadoop import HadoopStorage, address_of_directory

            return address_of_directory(uri), partial(HadoopStorage, uri)
        from coordinator.storage.sql import SQLStorage, address_of_database

        return address_of_database(uri), _missing_packages_named(scheme)(partial(SQLStorage, uri))


@contextmanager
def _missing_packages_named(scheme: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:  # of pyspark, the driver, or the dialect
        raise StorageError(
            f"{scheme}:...", "", f"{error}", f"Install the package that is missing. {SUPPORTED}"
        ) from error


def _directory(uri: str) -> str:
    """Return the absolute path in `file:///a/b`, `file:/a/b`, `file://localhost/a/b` or `/a/b`."""
    if uri.startswith("/"):
        return uri
    parts = urlsplit(uri)
    if (
        parts.netloc not in ("", "localhost")
        or not parts.path.startswith("/")
        or parts.query
        or parts.fragment
    ):
        raise StorageError(
            uri,
            "",
            "no absolute path",
            "Write file:///DIRECTORY with three slashes, and '?' and '#' as %3F and %23",
        )
    return unquote(parts.path)
