"""Streams of bytes as values of a storage.

A storage takes neither very large values nor very many small ones well.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable

VALUE_BYTES = 4 * 2**20


class Cut(io.RawIOBase):
    """A file that is cut into values, each of which goes to `put`.

    `rest` is what is left for the last value.
    """

    def __init__(self, put: Callable[[bytes], None]) -> None:
        self._put = put
        self._buffer = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        view = memoryview(data).cast("B")  # type: ignore[arg-type]
        self._buffer += view
        while len(self._buffer) > VALUE_BYTES:
            value = bytes(self._buffer[:VALUE_BYTES])
            del self._buffer[:VALUE_BYTES]
            self._put(value)
        return len(view)

    @property
    def rest(self) -> bytes:
        return bytes(self._buffer)


class Joined(io.RawIOBase):
    """The file that was cut into values, for reading."""

    def __init__(self, values: Iterable[bytes]) -> None:
        self._values = iter(values)
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        into = memoryview(buffer).cast("B")  # type: ignore[arg-type]
        if not self._rest:
            self._rest = memoryview(next(self._values, b""))
        count = min(len(into), len(self._rest))
        into[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count
