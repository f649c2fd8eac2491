"""Progress of long operations.

It is logged every few seconds, and `under_way` returns it to anyone else who asks.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field

from sinks._util.log import get_logger

logger = get_logger("sinks.progress")

SECONDS = 5.0
"""The seconds between two lines, and before the first line. Nothing is logged of an operation that
ends sooner."""
_TICK = 1.0

_tell: ContextVar[Callable[[str], None] | None] = ContextVar("tell", default=None)


@dataclass(eq=False)
class Progress:
    """The progress of one operation.

    `done` counts up to `total`, which is 0 if the total is unknown.
    """

    doing: str
    total: int
    unit: str
    tell: Callable[[str], None]
    done: int = 0
    began: float = field(default_factory=lambda: time.monotonic())
    logged_at: float = -math.inf
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __str__(self) -> str:
        of = f" of {self.total:,}" if self.total else ""
        return f"{self.doing}: {self.done:,}{of} {self.unit}" if self.unit else self.doing

    def advance(self, count: int = 1) -> None:
        with self._lock:
            self.done += count

    def tell_if_due(self, *, ended: bool = False) -> None:
        """Report the progress if the last line is long enough ago.

        The line of an operation that has `ended` is due if the operation took long enough.
        """
        with self._lock:
            now = time.monotonic()
            since = self.began if ended else max(self.began, self.logged_at)
            if now - since >= SECONDS:
                self.logged_at = now
                seconds = now - self.began
                pace = f", {self.done / max(seconds, 1e-9):,.0f}/s" if self.unit else ""
                self.tell(f"{self} ({seconds:,.0f} s{pace})" + (", ended" if ended else ""))


_under_way: list[Progress] = []
_watching = threading.Lock()
"""The lock of the thread that reports what is under way."""


@contextmanager
def shown_by(tell: Callable[[str], None]) -> Iterator[None]:
    """Pass the lines on the progress of this thread to `tell`, and not to the log.

    This ends with the body of the `with` statement.
    """
    before = _tell.set(tell)
    try:
        yield
    finally:
        _tell.reset(before)


@contextmanager
def progress(doing: str, total: int = 0, unit: str = "") -> Iterator[Callable[[int], None]]:
    """Report the progress of an operation, which is the body of the `with` statement.

    The context manager yields a function, to call with the number of units that were done since the
    last call. Any thread can call it. Without a `unit`, the lines say only that the operation goes
    on.
    """
    work = Progress(doing, total, unit, _tell.get() or logger.info)
    _under_way.append(work)
    if not _watching.locked():
        with suppress(RuntimeError):  # no more threads can be had
            threading.Thread(target=_watch, name="progress", daemon=True).start()
    try:
        yield work.advance
    finally:
        _under_way.remove(work)
        work.tell_if_due(ended=True)


def _watch() -> None:
    while _under_way and _watching.acquire(blocking=False):
        try:
            while _under_way:
                time.sleep(_TICK)
                for work in list(_under_way):
                    work.tell_if_due()
        finally:
            _watching.release()


def under_way() -> list[str]:
    """Return the lines of all operations that this process does just now."""
    return [str(work) for work in list(_under_way)]
