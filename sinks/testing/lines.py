"""Stops a sink, or a storage, between any two lines of its own code: there it fails, dies, or waits
while another goes ahead."""

from __future__ import annotations

import ast
import functools
import itertools
import linecache
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from coordinator.storage import CheckpointStorage
from sinks.optional import OPTIONAL

AtLine = Callable[[int, FrameType, int], None]
"""Gets the number of the line, from 0, the frame, and the line before in that frame."""


_IN_STEPS = frozenset({"write_text", "write_bytes", "copyfileobj", "_fastcopy_sendfile"})
"""Functions of `pathlib` and `shutil` in the middle of which a file is there and empty."""


@dataclass(frozen=True)
class Stop:
    """Before a line that a call executes."""

    number: int
    """Of all lines of the call, from 0."""
    file: str
    line: int
    function: str
    nth: int = 1
    """The time that the call comes to this line, from 1."""

    @classmethod
    def of(cls, number: int, frame: FrameType, nth: int = 1) -> Stop:
        return cls(number, frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name, nth)

    @property
    def place(self) -> tuple[str, int]:
        return self.file, self.line

    def __str__(self) -> str:
        text = linecache.getline(self.file, self.line).strip()
        return f"{Path(self.file).name}:{self.line} in {self.function}: `{text}`"


@contextmanager
def watched(sink: object, at_line: AtLine) -> Iterator[None]:
    """Calls `at_line` before each line that this thread executes in the modules of the sink's
    classes, in those beside them if they are in a package, and where Python's library writes a file
    in steps. A `try:` does nothing, and the end of a `with` block is no line: an error there would
    leave the block without its `__exit__`."""
    own = _own_code(sink)
    numbers = itertools.count()

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        if not own(frame.f_code.co_filename) and not _is_in_steps(frame):
            return None
        before = frame.f_lineno
        structure = _structure(frame.f_code.co_filename)

        def in_frame(frame: FrameType, event: str, arg: object) -> Any:
            nonlocal before
            line = frame.f_lineno
            if line not in structure.tries:
                leaves = line < before and line in structure.heads
                if event == "line" and not leaves:
                    at_line(next(numbers), frame, before)
                before = line
            return in_frame

        return in_frame

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def lines(
    sink: object, call: Callable[[], object], most: int, *, failing: bool = False
) -> list[Stop]:
    """Where `call` can be stopped with something done since the stop before: the first time that it
    comes to each line and the last, or `most` of these that are spread evenly, and where a file is
    being written. First come those before and after a call whose answer nobody looks at: it changes
    something. `failing`: not where an error would skip what cleans up after any error, so that a
    lock stays locked."""
    first: dict[tuple[str, int], Stop] = {}
    last: dict[tuple[str, int], Stop] = {}
    changing = set[Stop]()
    times = Counter[tuple[str, int]]()
    own = _own_code(sink)

    def seen(number: int, frame: FrameType, before: int) -> None:
        structure = _structure(frame.f_code.co_filename)
        stop = Stop.of(number, frame)
        times[stop.place] += 1
        if number and before not in structure.deeds:
            return
        if failing and _cleans_up(frame, own):
            return
        stop = Stop.of(number, frame, times[stop.place])
        first.setdefault(stop.place, stop)
        last[stop.place] = stop
        if {before, stop.line} & structure.changes:
            changing.add(stop)

    with watched(sink, seen):
        call()
    stops = sorted({*first.values(), *last.values()}, key=lambda stop: stop.number)
    chosen = _spread([stop for stop in stops if stop in changing], most)
    chosen |= _spread([stop for stop in stops if stop not in changing], most - len(chosen))
    return [stop for stop in stops if stop in chosen or stop.function in _IN_STEPS]


def _spread(stops: list[Stop], most: int) -> set[Stop]:
    count = min(most, len(stops))
    return {stops[round(n * (len(stops) - 1) / max(1, count - 1))] for n in range(count)}


def is_after_deed(frame: FrameType, before: int) -> bool:
    """Whether the line before this one in the frame did something, or a file is being written."""
    deeds = _structure(frame.f_code.co_filename).deeds
    return before in deeds or frame.f_code.co_name in _IN_STEPS


class Steps:
    """The steps of a call at which somebody looks at what it has done so far.

    These are the lines that it comes to when something was done since the line before. At a line
    that it comes to again and again, they are the first times, and then each time that is half as
    much again as the last one. After `all_of` such steps it is every second one, after twice as
    many every fourth one, and so on. So whatever holds for a third of a loop and a part in `all_of`
    of the call is seen, whatever the machine's speed.
    """

    def __init__(self, all_of: int) -> None:
        self._all_of = all_of
        self._steps = 0
        self._times = Counter[tuple[str, int]]()
        self._next = dict[tuple[str, int], int]()

    def is_due(self, frame: FrameType, before: int) -> bool:
        """Count the line, and say whether to look now."""
        if not is_after_deed(frame, before):
            return False
        place = frame.f_code.co_filename, frame.f_lineno
        self._times[place] += 1
        times = self._times[place]
        if times < self._next.get(place, 0):
            return False
        self._next[place] = max(times + 1, times * 3 // 2)
        self._steps += 1
        every = 1 << (self._steps // self._all_of).bit_length()
        return self._steps < self._all_of or self._steps % every == 0


def at(stop: Stop | None, hook: Callable[[], object]) -> AtLine:
    """Calls `hook` at this line, the time that it says."""
    times = itertools.count(1)
    place = stop and stop.place

    def at_line(number: int, frame: FrameType, before: int) -> None:
        if stop and (frame.f_code.co_filename, frame.f_lineno) == place and next(times) == stop.nth:
            hook()

    return at_line


def failing(
    sink: object,
    stop: Stop | None,
    error: Exception,
    times: int = 10,
    *,
    lasts: bool = False,
) -> AtLine:
    """Raises at this line, and there again, up to so many times: whoever tries again meets it, too.

    If that line cleans up, as when the call takes another way than before, at the next one. If it
    `lasts`, at all lines from there on that do not clean up.
    """
    places = list[tuple[str, int]]()
    own = _own_code(sink)
    come = list[Stop]()
    arrived = at(stop, lambda: come.append(stop) if stop else None)

    def at_line(number: int, frame: FrameType, before: int) -> None:
        arrived(number, frame, before)
        place = frame.f_code.co_filename, frame.f_lineno
        due = (lasts or place in places) and len(places) < times if places else bool(come)
        if due and not _cleans_up(frame, own):
            places.append(place)
            raise error

    return at_line


class _Structure(NamedTuple):
    """Lines of a file."""

    heads: frozenset[int]
    """Of `with` statements, from `with` to the colon."""
    tries: frozenset[int]
    finals: frozenset[int]
    """Of `finally` blocks, and those that release a lock."""
    deeds: frozenset[int]
    """That call something, set an attribute or an item, or yield."""
    changes: frozenset[int]
    """That only call something."""


@functools.cache
def _structure(file: str) -> _Structure:
    source = linecache.getlines(file)
    try:
        nodes = list(ast.walk(ast.parse("".join(source))))
    except SyntaxError:  # not Python
        nodes = []
    heads = set[int]()
    tries = set[int]()
    finals = set[int]()
    deeds = set[int]()
    changes = set[int]()
    for node in nodes:
        if isinstance(node, ast.With | ast.AsyncWith):
            heads.update(range(node.lineno, max(node.lineno + 1, node.body[0].lineno)))
        if isinstance(node, ast.Try):
            tries.add(node.lineno)
            finals.update(*map(_lines_of, node.finalbody))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            changes.update(_lines_of(node))
        if isinstance(node, ast.Call | ast.Yield | ast.YieldFrom | ast.Await):
            deeds.update(_lines_of(node))
        if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
            deeds.update(_lines_of(node))
    finals.update(
        n
        for n, text in enumerate(source, 1)
        if re.fullmatch(r"\s*[\w.\[\]]+\.release\(\)\s*", text)
    )
    return _Structure(*map(frozenset, (heads, tries, finals, deeds | heads, changes)))


def _lines_of(node: ast.stmt | ast.expr) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _cleans_up(frame: FrameType | None, own: Callable[[str], bool]) -> bool:
    """Whether this line, or one that led to it, is in a `finally` block, or releases a lock."""
    while frame and not (
        own(frame.f_code.co_filename)
        and frame.f_lineno in _structure(frame.f_code.co_filename).finals
    ):
        frame = frame.f_back
    return frame is not None


def _is_in_steps(frame: FrameType) -> bool:
    module = str(frame.f_globals.get("__name__")).partition(".")[0]
    return frame.f_code.co_name in _IN_STEPS and module in ("pathlib", "shutil")


def _own_code(sink: object) -> Callable[[str], bool]:
    bases: list[type] = [*OPTIONAL, CheckpointStorage]
    ours = {cls for kind in bases for cls in kind.__mro__}
    modules = {sys.modules[cls.__module__] for cls in type(sink).__mro__ if cls not in ours}
    files = {module.__file__ for module in modules if module.__file__}
    folders = {str(Path(m.__file__).parent) for m in modules if m.__file__ and "." in m.__name__}

    @functools.cache  # asked at each call of a function
    def own(file: str) -> bool:
        return file in files or str(Path(file).parent) in folders

    return own
