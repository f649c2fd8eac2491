"""How far something has come that people wait for: in the log every few seconds, and wherever else
is asked for."""

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
"""Between two lines, and before the first: nothing is logged of what is done sooner."""
_TICK = 1.0

_tell: ContextVar[Callable[[str], None] | None] = ContextVar("tell", default=None)


@dataclass(eq=False)
class Progress:
    """One thing that is being done. `done` counts up to `total`, which is 0 if it is not known."""

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
"""Held by the thread that tells of what is under way."""


@contextmanager
def shown_by(tell: Callable[[str], None]) -> Iterator[None]:
    """Within it, lines on the progress of this thread go there, and not into the log."""
    before = _tell.set(tell)
    try:
        yield
    finally:
        _tell.reset(before)


@contextmanager
def progress(doing: str, total: int = 0, unit: str = "") -> Iterator[Callable[[int], None]]:
    """Yields what is called with the number of units that were done since; from any thread.

    Without a `unit`, all that can be told is that it goes on.
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
    """The lines of all that this process does just now."""
    return [str(work) for work in list(_under_way)]
