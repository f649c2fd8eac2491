"""Asking the driver of a job: only the one that has proven to have the token is told it."""

from __future__ import annotations

import http.client
import json
import secrets
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from coordinator.errors import SavepointError
from coordinator.http import access
from coordinator.protocol.records import CheckpointStore

_WHERE_TOKEN = (
    f"on another machine, or as another user, give it by --token-file or the variable {access.VARIABLE}, and the same "
    "variable to the driver"
)
_SECONDS, _HOUR = 10.0, 3600.0
_LARGEST_ANSWER = 1 << 24


def ask_driver(store: CheckpointStore, path: str, body: dict[str, Any], file: Path | None = None) -> dict[str, Any]:
    """What the newest driver of a job answers to a POST. `file` holds its token; by default that is the one that the
    driver has left for this user. Raises SavepointError if it refuses, or cannot be asked."""
    address = store.newest_claim().address
    if not address:
        raise SavepointError(
            f"No driver of job {store.job!r} answers over HTTP: call coordinator.serve_http() before its query "
            "starts; or, if no query runs, say --checkpoint-location."
        )
    place = urlsplit(address).netloc
    token = _token(store, file)
    nonce = secrets.token_hex(16)
    status, answer = _call(place, "GET", f"/identity?nonce={nonce}", {}, None, _SECONDS)
    if status != 200 or not access.same(str(answer.get("proof")), access.proof(token, place, nonce)):
        raise SavepointError(
            f"What answers at {address} is not the driver of job {store.job!r} whose token is known here; "
            f"nothing was sent to it. If it is the one, its token is another: {_WHERE_TOKEN}."
        )
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    status, answer = _call(place, "POST", path, headers, json.dumps(body).encode(), _HOUR)
    if status != 201:
        raise SavepointError(f"The driver at {address} refused: {answer.get('error')}")
    return answer


def _token(store: CheckpointStore, file: Path | None) -> str:
    try:
        own = access.token_file(store.job, store.storage.uri)
        token = file.read_text().strip() if file else access.given() or access.read(own)
    except (OSError, ValueError) as error:
        raise SavepointError(f"The token cannot be read: {error}") from error
    if not token:
        raise SavepointError(f"The token of the driver is not known: {_WHERE_TOKEN}.")
    return token


def _call(
    place: str, method: str, path: str, headers: dict[str, str], body: bytes | None, timeout: float
) -> tuple[int, dict[str, Any]]:
    """No proxy, no redirect."""
    connection = http.client.HTTPConnection(place, timeout=timeout)
    try:
        connection.request(method, path, body, {"Host": place, **headers})
        answer = connection.getresponse()
        about = json.loads(answer.read(_LARGEST_ANSWER))
        if not isinstance(about, dict):
            raise ValueError("not the answer of a driver")
        return answer.status, about
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise SavepointError(
            f"The newest driver was at http://{place}, and does not answer there ({error}). Does it run, and can it be "
            "reached from here?"
        ) from error
    finally:
        connection.close()
