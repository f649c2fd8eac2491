"""Give pyiceberg's REST catalogs a timeout, which they lack.

Without it, the sink would wait without end, past the commit timeout, for a catalog that no longer
answers. Importing this module sets the timeout.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pyiceberg.catalog.rest as rest
import pyiceberg.catalog.rest.auth as auth
import requests

TIMEOUT = (10.0, 60.0)
"""Seconds to connect, and seconds to wait for an answer. After a commit without an answer, the sink
asks again what became of it."""


class Session(requests.Session):
    """A session whose requests have a timeout."""

    def request(self, *arguments: Any, **options: Any) -> requests.Response:
        return super().request(*arguments, **{"timeout": TIMEOUT, **options})


rest.Session = Session  # type: ignore[attr-defined]


def _post(*arguments: Any, **options: Any) -> requests.Response:
    """Do what `requests.post` does, with a timeout.

    pyiceberg asks for OAuth2 tokens with it.
    """
    with Session() as session:
        return session.post(*arguments, **options)


auth.requests = SimpleNamespace(post=_post)  # type: ignore[attr-defined,assignment]
