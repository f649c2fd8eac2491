"""Interleaved rounds, and the tables that come out of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

import psutil


@dataclass
class Contender:
    """One of the things compared.

    `run` does it once and returns seconds; `check` raises if the result is wrong.
    """

    name: str
    run: Callable[[], float]
    prepare: Callable[[], None] = lambda: None
    check: Callable[[], None] = lambda: None
    seconds: list[float] = field(default_factory=list)
    load: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    """Processor seconds that each run took, of all processes below this one: what else the machine
    does moves them less than the clock."""
    client: list[float] = field(default_factory=list)
    """The same without the server's, which users have on another machine."""


_STEADY = 3
_LONGEST_WARM_UP = 30


def rounds(
    contenders: Sequence[Contender],
    runs: int,
    warm: int | None,
    tell: Callable[[str], None],
    server: int | None = None,
) -> int:
    """A B C … A B C …: each contender once a round, so that what else the machine does falls on all
    of them alike. The first `warm` rounds are checked too, but not counted: if None, as many as it
    takes until no contender's processor time falls any more, since Java compiles what runs often.
    `server`: the process id of what they write to. Returns how many rounds were not counted."""
    warming: list[list[float]] = [[] for _ in contenders]
    while len(warming[0]) < _LONGEST_WARM_UP if warm is None else len(warming[0]) < warm:
        if warm is None and all(map(_is_steady, warming)):
            break
        for contender, processor in zip(contenders, warming, strict=True):
            processor.append(
                _turn(contender, f"warm-up {len(processor) + 1:2d}", tell, server).processor
            )
    for number in range(runs):
        for contender in contenders:
            turn = _turn(contender, f"round {number + 1:2d}", tell, server)
            contender.seconds.append(turn.seconds)
            contender.load.append(turn.load)
            contender.processor.append(turn.processor)
            contender.client.append(turn.processor - turn.of_server)
    return len(warming[0])


def _is_steady(processor: Sequence[float]) -> bool:
    """Whether the best of the last rounds is hardly better than the best of those before."""
    before = processor[:-_STEADY]
    last = processor[-_STEADY:]
    return bool(before) and min(last) > 0.97 * min(before)


class _Turn(NamedTuple):
    seconds: float
    load: float
    processor: float
    of_server: float


def _turn(
    contender: Contender, name: str, tell: Callable[[str], None], server: int | None
) -> _Turn:
    contender.prepare()
    load = os.getloadavg()[0]
    before = _processor_seconds()
    of_server = _processor_seconds(server) if server else 0.0
    seconds = contender.run()
    of_server = _processor_seconds(server) - of_server if server else 0.0
    processor = _processor_seconds() - before
    contender.check()
    tell(
        f"{name} {contender.name:45s} {seconds * 1000:10.1f} ms {processor:6.2f} CPU s   load "
        f"{load:.1f}"
    )
    return _Turn(seconds, load, processor, of_server)


def _processor_seconds(pid: int | None = None) -> float:
    """Of a process, this one by default, and all below it, those that have ended included."""
    this = psutil.Process(pid)
    while True:
        processes = [this, *this.children(recursive=True)]
        with suppress(psutil.NoSuchProcess):
            # User and system, its own and of its children that have ended.
            total = sum(sum(process.cpu_times()[:4]) for process in processes)
            if processes == [this, *this.children(recursive=True)]:
                return total


def spread(values: Iterable[float], form: str = "{:.2f}") -> str:
    """Median, and minimum to maximum."""
    values = list(values)
    return (
        f"{form.format(median(values))} ({form.format(min(values))} … {form.format(max(values))})"
    )


def ratios(over: Contender, under: Contender) -> list[float]:
    """How many times as fast `over` was as `under`, round by round."""
    return [b / a for a, b in zip(over.seconds, under.seconds, strict=True)]


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """In Markdown, columns aligned."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |"
        for line in lines
    )
