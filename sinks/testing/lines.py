"""Stops a sink between any two lines of its own code: there it fails, dies, or waits while another goes ahead."""

from __future__ import annotations

import functools
import itertools
import linecache
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from sinks.base import TwoPhaseCommitSink
from sinks.optional import OPTIONAL

AtLine = Callable[[int, FrameType], None]


@contextmanager
def watched(sink: TwoPhaseCommitSink[Any], at_line: AtLine) -> Iterator[None]:
    """Calls `at_line(n, frame)` before the n-th line (from 0) that this thread executes in the modules of the sink's
    classes, and in those beside them if they are in a package. The end of a `with` block is no line: an error there
    would leave the block without its `__exit__`, and a lock locked."""
    own = _own_code(sink)
    numbers = itertools.count()

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        if not own(frame.f_code.co_filename):
            return None
        before = frame.f_lineno

        def in_frame(frame: FrameType, event: str, arg: object) -> Any:
            nonlocal before
            line = frame.f_lineno
            if event == "line" and not (line < before and _is_with(frame.f_code.co_filename, line)):
                at_line(next(numbers), frame)
            before = line
            return in_frame

        return in_frame

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def lines(sink: TwoPhaseCommitSink[Any], call: Callable[[], object], most: int) -> list[int]:
    """Numbers of lines at which `call` can be stopped: the first time that it comes to each and the last, or the first
    alone, or `most` of these that are spread evenly."""
    first: dict[tuple[str, int], int] = {}
    last: dict[tuple[str, int], int] = {}

    def seen(number: int, frame: FrameType) -> None:
        place = frame.f_code.co_filename, frame.f_lineno
        first.setdefault(place, number)
        last[place] = number

    with watched(sink, seen):
        call()
    numbers = sorted({*first.values(), *last.values()})
    numbers = numbers if len(numbers) <= most else sorted(first.values())
    step = max(1.0, len(numbers) / most)
    return [numbers[int(n * step)] for n in range(min(most, len(numbers)))]


def at(number: int, hook: Callable[[], object]) -> AtLine:
    """Calls `hook` at the line of this number."""

    def at_line(n: int, frame: FrameType) -> None:
        if n == number:
            hook()

    return at_line


@functools.cache
def _is_with(file: str, line: int) -> bool:
    return linecache.getline(file, line).lstrip().startswith(("with ", "async with "))


def _own_code(sink: TwoPhaseCommitSink[Any]) -> Callable[[str], bool]:
    ours = {cls for kind in OPTIONAL for cls in kind.__mro__}
    modules = {sys.modules[cls.__module__] for cls in type(sink).__mro__ if cls not in ours}
    files = {module.__file__ for module in modules if module.__file__}
    folders = {str(Path(m.__file__).parent) for m in modules if m.__file__ and "." in m.__name__}

    @functools.cache  # asked at each call of a function
    def own(file: str) -> bool:
        return file in files or str(Path(file).parent) in folders

    return own
