"""Who may look at the page, and who may do something there.

A browser is let in by an address that holds for one use, or by the token; from then on by a cookie that no script and
no other site gets. What changes something has to come from the page itself, by its `Origin`.
"""

from __future__ import annotations

import secrets
import threading
import time

from coordinator.http import access
from coordinator.http.server import Request, RequestRefused

_SECONDS, _OPEN = 600.0, 8
"""How long an invitation holds, and how many there may be."""


class Visitors:
    """`token`: "" if none lets anybody in. `public`: everybody may look."""

    def __init__(self, address: str, token: str, *, public: bool) -> None:
        self.address, self._token, self.public = address, token, public
        self._cookie = f"coordinator-{address.rpartition(':')[2]}"  # browsers keep cookies of all ports together
        self._session = secrets.token_urlsafe(32)
        self._invitations: dict[str, float] = {}
        self._lock = threading.Lock()

    def invitation(self) -> str:
        """An address that lets one browser in."""
        code = secrets.token_urlsafe(32)
        with self._lock:
            self._forget_old()
            if len(self._invitations) >= _OPEN:
                del self._invitations[next(iter(self._invitations))]
            self._invitations[code] = time.monotonic() + _SECONDS
        return f"{self.address}/ui/login?once={code}"

    def _forget_old(self) -> None:
        now = time.monotonic()
        self._invitations = {code: end for code, end in self._invitations.items() if end > now}

    def accepts(self, code: str) -> bool:
        """Once."""
        with self._lock:
            self._forget_old()
            found = [one for one in self._invitations if access.same(one, code)]
            for one in found:
                del self._invitations[one]
            return bool(found)

    def has_token(self, text: str) -> bool:
        return bool(self._token) and access.same(self._token, text.strip())

    @property
    def cookie(self) -> str:
        """For `Set-Cookie`. Ends with the browser, and with this process."""
        return f"{self._cookie}={self._session}; Path=/ui/; HttpOnly; SameSite=Strict"

    def is_known(self, request: Request) -> bool:
        return access.same(request.cookie(self._cookie), self._session)

    def require_own_page(self, request: Request) -> None:
        """Raises RequestRefused for what another web page makes a browser ask."""
        site = request.headers.get("Sec-Fetch-Site", "none")
        if site not in ("none", "same-origin"):
            raise RequestRefused(403, "another web page has led here: open this address from the address bar")
        if request.method == "POST" and request.headers.get_all("Origin") != [self.address]:
            raise RequestRefused(403, "not sent by this page")
