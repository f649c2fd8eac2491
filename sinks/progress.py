"""How far something has come that people wait for: in the log every few seconds, and wherever else is asked for."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

logger = logging.getLogger(__name__)

SECONDS = 5.0
"""Between two lines, and before the first: what is done sooner is not told of."""


@dataclass(eq=False)
class Progress:
    """Of one thing that is being done. `total` is 0 if it is not known."""

    doing: str
    total: int
    unit: str
    done: int = 0

    def __str__(self) -> str:
        of = f" of {self.total:,}" if self.total else ""
        return f"{self.doing}: {self.done:,}{of} {self.unit}"


Show = Callable[[Progress, bool], None]
"""Told at the begin, whenever it has gone on, and, with True, at the end. By one thread at a time."""


def lines(tell: Callable[[str], None]) -> Show:
    """A line now and then."""
    due: dict[int, float] = {}

    def show(progress: Progress, ended: bool) -> None:
        now = time.monotonic()
        if ended:
            due.pop(id(progress), None)
        elif now >= due.setdefault(id(progress), now + SECONDS):
            due[id(progress)] = now + SECONDS
            tell(str(progress))

    return show


_log = lines(logger.info)
_show: ContextVar[Show | None] = ContextVar("show", default=None)
_under_way: list[Progress] = []


@contextmanager
def shown_by(show: Show) -> Iterator[None]:
    """Within it, progress of this thread is shown so, and not logged."""
    before = _show.set(show)
    try:
        yield
    finally:
        _show.reset(before)


@contextmanager
def progress(doing: str, total: int = 0, unit: str = "") -> Iterator[Callable[[int], None]]:
    """Yields what is called with the number of units that were done since; from any thread."""
    show, one, lock = _show.get() or _log, Progress(doing, total, unit), threading.Lock()

    def advance(count: int = 1) -> None:
        with lock:
            one.done += count
            show(one, False)

    _under_way.append(one)
    advance(0)
    try:
        yield advance
    finally:
        _under_way.remove(one)
        with lock:
            show(one, True)


def under_way() -> list[str]:
    """What this process does just now."""
    return [str(one) for one in list(_under_way)]
