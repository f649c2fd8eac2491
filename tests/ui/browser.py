"""What a browser sends and keeps, without one."""

from __future__ import annotations

import http.client
import re
from typing import Any
from urllib.parse import urlencode, urlsplit


class Browser:
    """Lets itself in by an address, and keeps the cookie."""

    def __init__(self, place: str, cookie: str = "") -> None:
        self.place, self.cookie = place, cookie
        self.headers: dict[str, str] = {}

    @classmethod
    def invited(cls, address: str) -> Browser:
        parts = urlsplit(address)
        browser = cls(parts.netloc)
        status, _ = browser.get(f"{parts.path}?{parts.query}")
        assert (status, browser.headers["Location"]) == (303, "/ui/")
        browser.cookie = browser.headers["Set-Cookie"].partition(";")[0]
        return browser

    def get(self, path: str, **headers: str) -> tuple[int, str]:
        return self._ask("GET", path, {"Sec-Fetch-Site": "none"} | headers, None)

    def post(self, path: str, form: dict[str, str], **headers: str | None) -> tuple[int, str]:
        sent: dict[str, str | None] = {
            "Sec-Fetch-Site": "same-origin",
            "Origin": f"http://{self.place}",
            "Content-Type": "application/x-www-form-urlencoded",
        }
        sent |= headers
        return self._ask("POST", path, {k: v for k, v in sent.items() if v is not None}, urlencode(form))

    def _ask(self, method: str, path: str, headers: dict[str, str], body: Any) -> tuple[int, str]:
        connection = http.client.HTTPConnection(self.place, timeout=30)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body, named | ({"Cookie": self.cookie} if self.cookie else {}))
        answer = connection.getresponse()
        text = answer.read().decode()
        self.headers = dict(answer.getheaders())
        connection.close()
        return answer.status, text

    def see(self, path: str) -> str:
        """The page, without the spaces between its words."""
        status, text = self.get(path)
        assert status == 200, text
        return re.sub(r"\s+", " ", text)
