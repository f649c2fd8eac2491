"""Where the records of checkpoints are kept: `open_storage` turns a URI into a `CheckpointStorage`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from urllib.parse import unquote, urlsplit

from coordinator.storage.base import (
    SUPPORTED,
    CheckpointStorage,
    MemoryStorage,
    MissingStorage,
    NoSuchStorage,
    StorageError,
)

__all__ = ["CheckpointStorage", "MissingStorage", "StorageError", "open_storage", "existing_storages", "storage_at"]

_make: ContextVar[bool] = ContextVar("make", default=True)

# Hadoop's file systems without an atomic put-if-absent, and what reaches the same data with one.
_INSTEAD = dict.fromkeys(("s3a", "s3n"), "s3://BUCKET/PREFIX")
_INSTEAD |= dict.fromkeys(("abfs", "abfss", "wasb", "wasbs"), "az://CONTAINER/PREFIX")
_INSTEAD |= dict.fromkeys(("webhdfs", "swebhdfs"), "hdfs://HOST:PORT/PATH")


def open_storage(uri: str | CheckpointStorage) -> CheckpointStorage:
    """The storage at a URI, ready to be written to, made there if it is missing. A storage is returned as it is.

    * `file:///DIRECTORY` or an absolute path
    * `s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX`, `az://CONTAINER/PREFIX`: credentials and endpoint come from the
      environment variables AWS_*, GOOGLE_* and AZURE_*, as obstore reads them
    * `hdfs://HOST:PORT/PATH`, `viewfs://...`: through the JVM of the Spark session, which has to run already
    * any SQLAlchemy URL; `postgresql://` means psycopg 3 and `mysql://` PyMySQL
    * `memory:NAME`, for tests

    Raises StorageError if the URI is none of these, or the storage cannot be reached or set up.
    """
    if isinstance(uri, CheckpointStorage):
        return uri
    if not isinstance(uri, str):
        raise TypeError(f"a storage is a URI or a CheckpointStorage, not {type(uri).__name__}")
    try:
        return _open(uri, make=_make.get())
    except NoSuchStorage as error:
        return MissingStorage(error, lambda: _open(uri, make=True))


@contextmanager
def existing_storages() -> Iterator[None]:
    """Within it, `open_storage` writes nothing: a directory or table that is not there is a `MissingStorage`."""
    before = _make.set(False)
    try:
        yield
    finally:
        _make.reset(before)


@contextmanager
def storage_at(uri: str | CheckpointStorage, *, existing: bool = False) -> Iterator[CheckpointStorage]:
    """Closes what it opens. `existing`: makes nothing."""
    with existing_storages() if existing else nullcontext():
        storage = open_storage(uri)
    try:
        yield storage
    finally:
        if storage is not uri:
            storage.close()


def _open(uri: str, *, make: bool) -> CheckpointStorage:
    scheme, colon, rest = uri.partition(":")
    if uri.startswith("/") or scheme == "file":
        from coordinator.storage.files import FileStorage

        return FileStorage(_directory(uri), make=make)
    if scheme in ("s3", "gs", "az"):
        from coordinator.storage.objects import open_bucket

        return open_bucket(uri, make=make)
    if scheme in _INSTEAD:  # repeats nothing: s3a URIs of old hold keys
        raise StorageError(
            f"{scheme}://...",
            "",
            f"Hadoop's {scheme} has no put-if-absent that is atomic and durable",
            f"Write {_INSTEAD[scheme]} instead. {SUPPORTED}",
        )
    if scheme == "memory" and rest:
        return MemoryStorage(rest)
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9+._-]*", scheme) or not colon:  # repeats nothing: it may hold a password
        raise StorageError("given", "", "this is neither a URI nor an absolute path", SUPPORTED)
    try:
        if scheme in ("hdfs", "viewfs"):
            from coordinator.storage.hadoop import HadoopStorage

            return HadoopStorage(uri, make=make)
        from coordinator.storage.sql import SQLStorage

        return SQLStorage(uri, make=make)
    except ImportError as error:  # of pyspark, the driver, or the dialect
        raise StorageError(
            f"{scheme}:...", "", f"{error}", f"Install the package that is missing. {SUPPORTED}"
        ) from error


def _directory(uri: str) -> str:
    """The absolute path in `file:///a/b`, `file:/a/b`, `file://localhost/a/b` or `/a/b`."""
    if uri.startswith("/"):
        return uri
    parts = urlsplit(uri)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/") or parts.query or parts.fragment:
        raise StorageError(
            uri, "", "no absolute path", "Write file:///DIRECTORY with three slashes, and '?' and '#' as %3F and %23"
        )
    return unquote(parts.path)
