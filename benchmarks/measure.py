"""Interleaved rounds, and the tables that come out of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median

import psutil


@dataclass
class Contender:
    """One of the things compared. `run` does it once and returns seconds; `check` raises if the result is wrong."""

    name: str
    run: Callable[[], float]
    prepare: Callable[[], None] = lambda: None
    check: Callable[[], None] = lambda: None
    seconds: list[float] = field(default_factory=list)
    load: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    """Processor seconds that each run took, of all processes below this one: what else the machine does moves them
    less than the clock."""
    client: list[float] = field(default_factory=list)
    """The same without the server's, which users have on another machine."""


def rounds(
    contenders: Sequence[Contender], runs: int, warm: int, tell: Callable[[str], None], server: int | None = None
) -> None:
    """A B C … A B C …: each contender once a round, so that what else the machine does falls on all of them alike. The
    first `warm` rounds are checked too, but not counted. `server`: the process id of what they write to."""
    for number in range(warm + runs):
        for contender in contenders:
            contender.prepare()
            load = os.getloadavg()[0]
            before, of_server = _processor_seconds(), _processor_seconds(server) if server else 0.0
            seconds = contender.run()
            of_server = _processor_seconds(server) - of_server if server else 0.0
            processor = _processor_seconds() - before
            contender.check()
            if number >= warm:
                contender.seconds.append(seconds)
                contender.load.append(load)
                contender.processor.append(processor)
                contender.client.append(processor - of_server)
            cost = f"{seconds * 1000:10.1f} ms {processor:6.2f} CPU s"
            tell(f"round {number + 1 - warm:2d} {contender.name:45s} {cost}   load {load:.1f}")


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
    return f"{form.format(median(values))} ({form.format(min(values))} … {form.format(max(values))})"


def ratios(over: Contender, under: Contender) -> list[float]:
    """How many times as fast `over` was as `under`, round by round."""
    return [b / a for a, b in zip(over.seconds, under.seconds, strict=True)]


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """In Markdown, columns aligned."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join("| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in lines)
