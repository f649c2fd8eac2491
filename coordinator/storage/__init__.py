"""Where the records of checkpoints are kept: `open_storage` turns a URI into a `CheckpointStorage`."""

from __future__ import annotations

import re
from urllib.parse import unquote, urlsplit

from coordinator.storage.base import SUPPORTED, CheckpointStorage, StorageError

__all__ = ["CheckpointStorage", "StorageError", "open_storage"]


def open_storage(uri: str | CheckpointStorage) -> CheckpointStorage:
    """The storage at a URI, ready to be written to, made there if it is missing. A storage is returned as it is.

    `file:///DIRECTORY` or an absolute path, `memory:NAME`, or any SQLAlchemy URL; `postgresql://` means psycopg 3 and
    `mysql://` PyMySQL. Raises StorageError if the URI is none of these, or the storage cannot be reached or set up.
    """
    if isinstance(uri, CheckpointStorage):
        return uri
    if not isinstance(uri, str):
        raise TypeError(f"a storage is a URI or a CheckpointStorage, not {type(uri).__name__}")
    scheme, colon, rest = uri.partition(":")
    if uri.startswith("/") or scheme == "file":
        from coordinator.storage.objects import FileStorage

        return FileStorage(_directory(uri))
    if scheme == "memory" and rest:
        from coordinator.storage.memory import MemoryStorage

        return MemoryStorage(rest)
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9+._-]*", scheme) or not colon:  # repeats nothing: it may hold a password
        raise StorageError("given", "", "this is neither a URI nor an absolute path", SUPPORTED)
    try:
        from coordinator.storage.sql import SQLStorage

        return SQLStorage(uri)
    except ImportError as error:  # of the driver, or of the dialect
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
