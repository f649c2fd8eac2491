"""How far something has come that people wait for: in the log every few seconds, and wherever else is asked for."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)

SECONDS = 5.0
"""Between two lines, and before the first: what is done sooner is not told of."""
_TICK = 1.0


@dataclass(eq=False)
class Progress:
    """Of one thing that is being done. `total` is 0 if it is not known."""

    doing: str
    total: int
    unit: str
    done: int = 0
    began: float = field(default_factory=lambda: time.monotonic())

    @property
    def pace(self) -> str:
        """Seconds since the begin, and units in each."""
        seconds = time.monotonic() - self.began
        return f"{seconds:,.0f} s" + (f", {self.done / max(seconds, 1e-9):,.0f}/s" if self.unit else "")

    def __str__(self) -> str:
        of = f" of {self.total:,}" if self.total else ""
        return f"{self.doing}: {self.done:,}{of} {self.unit}" if self.unit else self.doing


Show = Callable[[Progress, bool], None]
"""Told at the begin, whenever it has gone on, every second, and, with True, at the end. By one thread at a time."""


def lines(tell: Callable[[str], None]) -> Show:
    """A line now and then, and a last one of what was told of before."""
    due: dict[int, float] = {}
    told = set[int]()

    def show(progress: Progress, ended: bool) -> None:
        now, one = time.monotonic(), id(progress)
        if ended:
            due.pop(one, None)
            if one in told:
                told.remove(one)
                tell(f"{progress} ({progress.pace}), ended")
        elif now >= due.setdefault(one, now + SECONDS):
            due[one] = now + SECONDS
            told.add(one)
            tell(f"{progress} ({progress.pace})")

    return show


_log = lines(logger.info)
_show: ContextVar[Show | None] = ContextVar("show", default=None)
_under_way: dict[Progress, Callable[[int], None]] = {}
_ticks = threading.Lock()
_ticking = False


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
    """Yields what is called with the number of units that were done since; from any thread. Without a `unit`, all that
    can be told is that it goes on."""
    show, one, lock = _show.get() or _log, Progress(doing, total, unit), threading.Lock()

    def advance(count: int = 1) -> None:
        with lock:
            one.done += count
            if not ended:
                show(one, False)

    ended = False
    _under_way[one] = advance
    advance(0)
    _tick_meanwhile()
    try:
        yield advance
    finally:
        del _under_way[one]
        with lock:
            ended = True
            show(one, True)


def _tick_meanwhile() -> None:
    """What does not go on for a while is told of too."""
    global _ticking
    with _ticks:
        if not _ticking:
            _ticking = True
            threading.Thread(target=_tick, name="progress", daemon=True).start()


def _tick() -> None:
    global _ticking
    while True:
        time.sleep(_TICK)
        with _ticks:
            if not _under_way:
                _ticking = False
                return
        for advance in list(_under_way.values()):
            advance(0)


def under_way() -> list[str]:
    """What this process does just now."""
    return [str(one) for one in list(_under_way)]
