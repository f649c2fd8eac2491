"""Gives pyiceberg's REST catalogs a timeout, which they lack: a catalog that no longer answers
would be waited for without end, past the commit timeout. Importing this does it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pyiceberg.catalog.rest as rest
import pyiceberg.catalog.rest.auth as auth
import requests

TIMEOUT = (10.0, 60.0)
"""Seconds to connect, and to wait for an answer. What became of a commit without an answer is asked
again."""


class Session(requests.Session):
    def request(self, *arguments: Any, **options: Any) -> requests.Response:
        return super().request(*arguments, **{"timeout": TIMEOUT, **options})


rest.Session = Session  # type: ignore[attr-defined]


def _post(*arguments: Any, **options: Any) -> requests.Response:
    """As `requests.post`, with which pyiceberg asks for tokens of OAuth2."""
    with Session() as session:
        return session.post(*arguments, **options)


auth.requests = SimpleNamespace(post=_post)  # type: ignore[attr-defined,assignment]
