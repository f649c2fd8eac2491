"""The contract of checkpoint storage, and storages that need no system of their own."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any, ClassVar

from sinks._util.machine import machine
from sinks.errors import ExactlyOnceError

_KEY = re.compile(r"(?!\.)[A-Za-z0-9._-]{1,200}(/(?!\.)[A-Za-z0-9._-]{1,200})*")
_KEY_LIMIT = 512

SUPPORTED = (
    "Supported are file:///DIRECTORY, s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, "
    "az://CONTAINER/PREFIX, hdfs://HOST:PORT/PATH and viewfs://..., SQLAlchemy database URLs "
    "(sqlite:////FILE, postgresql://..., mysql://...) and, for tests, memory:NAME"
)
"""The forms of storage URIs, for errors."""


class StorageError(ExactlyOnceError):
    """Checkpoint storage could not do what it was asked to do.

    Nothing is known to have been written. `uri` (without passwords), `key` ("" if it concerns no
    key), `reason` (what failed) and `advice` (what to do, may be "") make up the message. The error
    of the layer below is `__cause__`, unless its text may hold a password.
    """

    code = "EO-STORAGE"

    def __init__(self, uri: str, key: str, reason: str, advice: str = "") -> None:
        self.uri = uri
        self.key = key
        self.reason = reason
        self.advice = advice
        super().__init__(uri, key, reason, advice)  # all four, so that it can be pickled

    def _text(self) -> str:
        where = f"checkpoint storage {self.uri}" + (f", key {self.key!r}" if self.key else "")
        return f"{where}: {self.reason}" + (f". {self.advice}" if self.advice else "")


class NoSuchStorage(StorageError):
    """The directory or table does not exist, and was not to be made."""

    code = "EO-NO-STORAGE"


class CheckpointStorage(ABC):
    """A store of small values that several processes share, and that forgets nothing.

    Values are bytes, a few MB at most. A key is one or more segments joined by '/', at most 512
    characters; a segment is 1 to 200 of [A-Za-z0-9._-], but not '.' or '..'. As with files and
    folders, no key may be the folder of another: beside 'a/1' there is no 'a/1/x'.

    Every method raises `StorageError` if the storage cannot be reached, read or written, and
    ValueError for a malformed key. All methods but `close` may be called from several threads.
    """

    uri: str
    """The place of the values, without passwords, for logs and errors."""

    @abstractmethod
    def put_if_absent(self, key: str, value: bytes) -> bool:
        """Write the value unless the key has one, atomically among all processes.

        True means that the value is written, durable, and seen by every later call of any process.
        False means that the key had a value already, which is unchanged. That value may be the
        caller's own, because a put is repeated when its answer got lost, so the caller has to read
        and compare. If this raises, the value may be there or not, but never a part of it.
        """

    @abstractmethod
    def get(self, key: str) -> bytes | None:
        """Return the value of the key, or None. A value that was returned once is durable."""

    @abstractmethod
    def list(self, prefix: str) -> list[str]:
        """List all keys below the folder `prefix`, at any depth, sorted by code point.

        'a/1' and 'a/1/' are the same folder, and '' is the root. The list holds every key whose put
        returned before this call, unless the key was deleted.
        """

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove the key and its value.

        A missing key is no error. After a power loss the key may be there again.
        """

    def clock(self) -> float | None:
        """Return the seconds since the epoch by the storage's own clock.

        None means that the storage has no clock, or does not tell its time.
        """
        return None

    def weaknesses(self) -> Sequence[str]:
        """Return the reasons why a durable value may still get lost.

        An example is a server that does not fsync. The job's `coordinator.Guarantee` asks for them
        when a query starts. By default there are none.
        """
        return ()

    def close(self) -> None:  # noqa: B027 - most have nothing to release
        """Release connections. May be called twice. By default there are none."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.uri!r})"


class MemoryStorage(CheckpointStorage):
    """Storage in the memory of this process, `memory:NAME`.

    All storages of one name in a process share their values, even after `close`, so that a second
    coordinator finds what the first one left. The values are gone with the process, so this storage
    cannot keep the promise over a real crash.
    """

    _shared: ClassVar[dict[str, dict[str, bytes]]] = {}
    _lock: ClassVar[Lock] = Lock()

    def __init__(self, name: str) -> None:
        self.uri = f"memory:{name}"
        with self._lock:
            self._values = self._shared.setdefault(name, {})

    def put_if_absent(self, key: str, value: bytes) -> bool:
        check_key(key)
        with self._lock:
            if key in self._values:
                return False
            self._values[key] = bytes(value)
            return True

    def get(self, key: str) -> bytes | None:
        return self._values.get(check_key(key))

    def list(self, prefix: str) -> list[str]:
        folder = check_folder(prefix)
        with self._lock:
            return sorted(key for key in self._values if key.startswith(folder))

    def delete(self, key: str) -> None:
        with self._lock:
            self._values.pop(check_key(key), None)

    def weaknesses(self) -> Sequence[str]:
        return ["it is gone with the driver's process"]


class WrappedStorage(CheckpointStorage):
    """Storage that passes all calls for keys through `_call` to another storage.

    The owner of that other storage closes it.
    """

    def __init__(self, inner: CheckpointStorage) -> None:
        self.inner = inner
        self.uri = inner.uri

    def _call(self, method: str, key: str, *more: Any) -> Any:
        return getattr(self.inner, method)(key, *more)

    def put_if_absent(self, key: str, value: bytes) -> bool:
        return bool(self._call("put_if_absent", key, value))

    def get(self, key: str) -> bytes | None:
        value: bytes | None = self._call("get", key)
        return value

    def list(self, prefix: str) -> list[str]:
        keys: list[str] = self._call("list", prefix)
        return keys

    def delete(self, key: str) -> None:
        self._call("delete", key)


class TimedStorage(WrappedStorage):
    """Storage that reports each call to `on_call`.

    `on_call` gets the name of the call and its seconds, even if the call failed, in the thread that
    made the call.
    """

    def __init__(self, inner: CheckpointStorage, on_call: Callable[[str, float], None]) -> None:
        super().__init__(inner)
        self._on_call = on_call

    def _call(self, method: str, key: str, *more: Any) -> Any:
        began = machine.clock.monotonic()
        try:
            return super()._call(method, key, *more)
        finally:
            self._on_call(method.removesuffix("_if_absent"), machine.clock.monotonic() - began)


class MissingStorage(WrappedStorage):
    """Storage that does not exist, behind a mistyped URI or after somebody deleted it.

    An operator's command finds it empty. The first put makes the storage.
    """

    def __init__(self, why: NoSuchStorage, make: Callable[[], CheckpointStorage]) -> None:
        super().__init__(MemoryStorage(""))
        self.uri = why.uri
        self.why = why
        self._make = make

    def put_if_absent(self, key: str, value: bytes) -> bool:
        if isinstance(self.inner, MemoryStorage):
            self.inner = self._make()
        return super().put_if_absent(key, value)

    def close(self) -> None:
        self.inner.close()


class DeferredStorage(CheckpointStorage):
    """Storage at a URI that the first call opens, whatever thread makes that call.

    If the storage cannot be opened, that call raises the `StorageError`, and the next call tries
    again. `close` opens nothing.
    """

    def __init__(self, uri: str, open: Callable[[], CheckpointStorage]) -> None:
        """Open nothing yet. `uri` is that of the opened storage, without passwords."""
        self.uri = uri
        self._open = open
        self._opened: CheckpointStorage | None = None
        self._lock = Lock()

    def opened(self) -> CheckpointStorage:
        """Return the storage itself, and open it if nobody has done so."""
        with self._lock:
            if self._opened is None:
                self._opened = self._open()
            return self._opened

    def put_if_absent(self, key: str, value: bytes) -> bool:
        return self.opened().put_if_absent(key, value)

    def get(self, key: str) -> bytes | None:
        return self.opened().get(key)

    def list(self, prefix: str) -> list[str]:
        return self.opened().list(prefix)

    def delete(self, key: str) -> None:
        self.opened().delete(key)

    def clock(self) -> float | None:
        return self.opened().clock()

    def weaknesses(self) -> Sequence[str]:
        return self.opened().weaknesses()

    def close(self) -> None:
        if self._opened:
            self._opened.close()


def check_key(key: str) -> str:
    """Return the key itself, or raise ValueError if it is malformed."""
    if len(key) > _KEY_LIMIT or not _KEY.fullmatch(key):
        raise ValueError(
            f"not a key of checkpoint storage: {key!r} (at most {_KEY_LIMIT} characters; segments "
            "of 1 to 200 of [A-Za-z0-9._-] except '.' and '..', joined by '/')"
        )
    return key


def check_folder(prefix: str) -> str:
    """Return the folder with one '/' at its end, or '' for the root.

    Raises ValueError if no key can begin with this prefix.
    """
    return check_key(prefix.removesuffix("/")) + "/" if prefix else ""


def is_missing(path: str | os.PathLike[str]) -> bool:
    """Tell whether nothing has this path. False if this user may not look."""
    try:
        os.lstat(path)
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    return False


def is_key(name: str) -> bool:
    """Tell whether a name that was found in a storage can be a key.

    Other names belong to somebody else.
    """
    return len(name) <= _KEY_LIMIT and _KEY.fullmatch(name) is not None
