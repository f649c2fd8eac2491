"""The contract of checkpoint storage."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from sinks.errors import printable

_KEY = re.compile(r"(?!\.)[A-Za-z0-9._-]{1,200}(/(?!\.)[A-Za-z0-9._-]{1,200})*")
_KEY_LIMIT = 512

SUPPORTED = (
    "Supported are file:///DIRECTORY, s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX, "
    "hdfs://HOST:PORT/PATH and viewfs://..., SQLAlchemy database URLs (sqlite:////FILE, postgresql://..., mysql://...) "
    "and, for tests, memory:NAME"
)
"""The forms of storage URIs, for errors."""


class StorageError(Exception):
    """Checkpoint storage could not do what it was asked to; nothing is known to have been written.

    `uri` (without passwords), `key` ("" if it concerns no key), `reason` (what failed) and `advice` (what to do, may be
    "") make up the message. The error of the layer below is `__cause__`, unless its text may hold a password.
    """

    def __init__(self, uri: str, key: str, reason: str, advice: str = "") -> None:
        super().__init__(uri, key, reason, advice)  # all of them, so that it can be pickled
        self.uri, self.key, self.reason, self.advice = uri, key, reason, advice

    def __str__(self) -> str:
        where = f"checkpoint storage {self.uri}" + (f", key {self.key!r}" if self.key else "")
        return printable(f"{where}: {self.reason}" + (f". {self.advice}" if self.advice else ""))


class NoSuchStorage(StorageError):
    """There is no such directory or table, and it was not to be made."""


class CheckpointStorage(ABC):
    """Keeps small byte values (a few MB at most) under keys, for ever, for several processes at once.

    A key is one or more segments joined by '/', at most 512 characters; a segment is 1 to 200 of [A-Za-z0-9._-], but
    not '.' or '..'. As with files and folders, no key may be the folder of another: beside 'a/1' there is no 'a/1/x'.

    Every method raises `StorageError` if the storage cannot be reached, read or written, and ValueError for a key that
    is none. All but `close` may be called from several threads.
    """

    uri: str
    """Where the values are, without passwords: for logs and errors."""

    @abstractmethod
    def put_if_absent(self, key: str, value: bytes) -> bool:
        """Write the value unless the key has one, atomically among all processes.

        True: written, durable, and seen by every later call of any process. False: there was a value already and it is
        unchanged. It may be one's own: a put is repeated when its answer got lost. So read and compare.
        When it raises, the value may be there or not, but never a part of it.
        """

    @abstractmethod
    def get(self, key: str) -> bytes | None:
        """The value of the key, or None. What was returned once is durable."""

    @abstractmethod
    def list(self, prefix: str) -> list[str]:
        """All keys below the folder `prefix` ('a/1' and 'a/1/' are the same folder; '' is the root), at any depth,
        sorted by code point. Holds every key whose put returned before this call, unless it was deleted.
        """

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove the key and its value. Not an error if there is none. After a power loss it may be there again."""

    def clock(self) -> float | None:
        """Seconds since the epoch by the storage's own clock; None if it has none, or does not tell."""
        return None

    def weaknesses(self) -> Sequence[str]:
        """Why what was answered may get lost all the same, such as a server that does not fsync. Asked for the job's
        `coordinator.Guarantee` when a query starts. Default: nothing."""
        return ()

    def close(self) -> None:  # noqa: B027 - most have nothing to release
        """Release connections. May be called twice. Default: there are none."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.uri!r})"


class MissingStorage(CheckpointStorage):
    """What an operator's command finds behind a mistyped URI, or after somebody deleted it: it holds nothing. The first
    put makes the storage."""

    def __init__(self, why: NoSuchStorage, make: Callable[[], CheckpointStorage]) -> None:
        self.uri, self.why = why.uri, why
        self._make = make
        self._made: CheckpointStorage | None = None

    def put_if_absent(self, key: str, value: bytes) -> bool:
        self._made = self._made or self._make()
        return self._made.put_if_absent(key, value)

    def get(self, key: str) -> bytes | None:
        check_key(key)
        return self._made.get(key) if self._made else None

    def list(self, prefix: str) -> list[str]:
        check_folder(prefix)
        return self._made.list(prefix) if self._made else []

    def delete(self, key: str) -> None:
        if self._made:
            self._made.delete(key)

    def close(self) -> None:
        if self._made:
            self._made.close()


def check_key(key: str) -> str:
    """The key itself; ValueError if it is none."""
    if len(key) > _KEY_LIMIT or not _KEY.fullmatch(key):
        raise ValueError(
            f"not a key of checkpoint storage: {key!r} (at most {_KEY_LIMIT} characters; segments of 1 to 200 of "
            f"[A-Za-z0-9._-] except '.' and '..', joined by '/')"
        )
    return key


def check_folder(prefix: str) -> str:
    """The folder with one '/' at its end, or '' for the root; ValueError if it is no prefix of keys."""
    return check_key(prefix.removesuffix("/")) + "/" if prefix else ""


def is_key(name: str) -> bool:
    """Whether a name that was found in a storage can be a key at all, or belongs to somebody else."""
    return len(name) <= _KEY_LIMIT and _KEY.fullmatch(name) is not None
