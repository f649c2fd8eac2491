"""Storage URIs as text, and what may be shown of them."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # 0.3 s of processor time to import, which a folder as storage does not need
    from sqlalchemy.engine import URL

_FOLDERS = ("file", "s3", "gs", "az", "hdfs", "viewfs", "memory")
_SECRET = re.compile(
    r"pass|pwd|secret|token|credential|odbc_connect|api_?key|access_?key", re.IGNORECASE
)


def redacted(uri: str) -> str:
    """Return the URI as it may be shown.

    Only the scheme is left of a URI that cannot be parsed, because a password may be anywhere in
    it.
    """
    scheme = uri.partition(":")[0]
    if uri.startswith("/") or scheme in _FOLDERS:
        return f"{scheme}://..." if re.search("[@?#]", uri) and not uri.startswith("/") else uri
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    with suppress(ArgumentError, ValueError):
        url = make_url(uri)
        if not (url.host and "@" in url.host):
            return url.difference_update_query(secret_parameters(url)).render_as_string()
    return (
        f"{scheme}:..."
        if re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]*", scheme) and ":" in uri
        else "..."
    )


def secret_parameters(url: URL) -> list[str]:
    """List the parameters in the query of a database URL that seem to hold a secret."""
    return [name for name in url.query if is_secret(name)]


def is_secret(name: str) -> bool:
    """Tell whether a parameter, or a variable, of that name seems to hold a secret."""
    return _SECRET.search(name) is not None
