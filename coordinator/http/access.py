"""Who may call the driver, and who answers for it: a token that only the user who runs the job can read."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from contextlib import suppress
from pathlib import Path

from coordinator.errors import SavepointError

VARIABLE = "COORDINATOR_TOKEN"
_LEAST = 32


def token_file(job: str, storage_uri: str) -> Path:
    """Where a driver keeps its token for other programs of the same user on the same machine."""
    name = hashlib.sha256(f"{job}\n{storage_uri}".encode()).hexdigest()[:32]
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "pyspark-exactly-once" / f"{name}.token"


def given(text: str | None = None) -> str | None:
    """The token in `text`, or in the environment. Raises ValueError for one that can be guessed."""
    token = (text or os.environ.get(VARIABLE, "")).strip()
    if token and (len(token) < _LEAST or not token.isascii() or not token.isprintable()):
        raise ValueError(f"a token has at least {_LEAST} ASCII characters, from a random source: openssl rand -hex 32")
    return token or None


def issue(path: Path) -> str:
    """A new token, in a file that only this user can read."""
    token, staged = secrets.token_urlsafe(32), path.with_suffix(f".{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with os.fdopen(os.open(staged, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(token)
        staged.replace(path)
    except OSError as error:
        raise SavepointError(
            f"the token of the HTTP server cannot be kept in {path}: {error.strerror}. Set {VARIABLE}, to the same on "
            "the driver and where it is called from"
        ) from error
    return token


def read(path: Path) -> str | None:
    """What `issue` has left. Raises SavepointError if others may have written or read it."""
    with suppress(FileNotFoundError), os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "r") as file:
        about = os.fstat(file.fileno())
        if about.st_uid != os.geteuid() or about.st_mode & 0o077:
            raise SavepointError(f"{path} is not this user's alone; remove it, and start the query again")
        return file.read()
    return None


def forget(path: Path, token: str) -> None:
    """Remove the file, unless a later driver has put its own there."""
    with suppress(OSError, SavepointError):
        if read(path) == token:
            path.unlink()


def proof(token: str, address: str, nonce: str) -> str:
    """Shows that one has the token, without showing it; holds for one address and one question."""
    return hmac.new(token.encode(), f"{address}\n{nonce}".encode(), hashlib.sha256).hexdigest()


def same(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(), other.encode())
