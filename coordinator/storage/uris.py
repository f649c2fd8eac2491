"""Storage URIs as text: what may be shown of one, and whether it leads into another."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from coordinator.storage.base import is_key

if TYPE_CHECKING:  # 0.3 s of processor time to import, which a folder as storage does not need
    from sqlalchemy.engine import URL

_FOLDERS = ("file", "s3", "gs", "az", "hdfs", "viewfs", "memory")
_SHORT = {"postgres": "postgresql", "postgresql+psycopg": "postgresql"}
_SHORT |= {"mysql+pymysql": "mysql", "mariadb+pymysql": "mariadb"}  # as storage shows them, and as users write them
_SECRET = re.compile(r"pass|pwd|secret|token|credential|odbc_connect|api_?key|access_?key", re.IGNORECASE)


def redacted(uri: str) -> str:
    """The URI as it may be shown. Of what cannot be read only the scheme is: a password may be anywhere."""
    scheme = uri.partition(":")[0]
    if _is_folder(uri):
        return f"{scheme}://..." if re.search("[@?#]", uri) and not uri.startswith("/") else uri
    url = _database(uri)
    if url is None:
        return f"{scheme}:..." if re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]*", scheme) and ":" in uri else "..."
    return url.difference_update_query(secret_parameters(url)).render_as_string()


def secret_parameters(url: URL) -> list[str]:
    """Those in the query of a database URL."""
    return [name for name in url.query if is_secret(name)]


def is_secret(name: str) -> bool:
    """Whether a parameter, or a variable, of that name seems to hold one."""
    return _SECRET.search(name) is not None


def without_secrets(uri: str) -> str:
    """The URI as it may be sent: `within` fills the secrets in again."""
    url = None if _is_folder(uri) else _database(uri)
    if url is None:
        return redacted(uri)
    query = url.difference_update_query(secret_parameters(url)).query
    return (
        type(url).create(url.drivername, url.username, None, url.host, url.port, url.database, query).render_as_string()
    )


def within(uri: str, roots: Iterable[str]) -> str | None:
    """The URI to open for `uri`, if it is one of `roots` or a folder below one, with the secrets of that root and none
    of its own. A database has to be a root itself."""
    wanted = _comparable(uri)
    for root in roots:
        allowed = _comparable(root)
        if wanted == allowed:
            return root
        if _is_folder(root) and wanted.startswith(f"{allowed}/") and is_key(below := wanted[len(allowed) + 1 :]):
            return f"{root.rstrip('/')}/{below}"
    return None


def _comparable(uri: str) -> str:
    if uri.startswith(("/", "file:")):
        return "file://" + os.path.realpath(uri if uri.startswith("/") else unquote(urlsplit(uri).path))
    dialect, colon, rest = without_secrets(uri).rstrip("/").partition(":")
    return _SHORT.get(dialect, dialect) + colon + rest


def _is_folder(uri: str) -> bool:
    return uri.startswith("/") or uri.partition(":")[0] in _FOLDERS


def _database(uri: str) -> URL | None:
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        url = make_url(uri)
    except (ArgumentError, ValueError):
        return None
    return None if url.host and "@" in url.host else url
