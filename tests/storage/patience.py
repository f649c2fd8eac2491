"""For calls before and after those that a limit of a second has to cut off."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from coordinator.storage import StorageError

T = TypeVar("T")


def patiently(call: Callable[[], T], seconds: float = 300) -> T:
    """What the call answers, made again where a busy machine took longer than its limit."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return call()
        except StorageError:
            if time.monotonic() > deadline:
                raise
