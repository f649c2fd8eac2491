"""Interleaved rounds, and the tables that come out of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median


@dataclass
class Contender:
    """One of the things compared. `run` does it once and returns seconds; `check` raises if the result is wrong."""

    name: str
    run: Callable[[], float]
    prepare: Callable[[], None] = lambda: None
    check: Callable[[], None] = lambda: None
    seconds: list[float] = field(default_factory=list)
    load: list[float] = field(default_factory=list)


def rounds(contenders: Sequence[Contender], runs: int, warm: int, tell: Callable[[str], None]) -> None:
    """A B C … A B C …: each contender once a round, so that what else the machine does falls on all of them alike. The
    first `warm` rounds are checked too, but not counted."""
    for number in range(warm + runs):
        for contender in contenders:
            contender.prepare()
            load = os.getloadavg()[0]
            seconds = contender.run()
            contender.check()
            if number >= warm:
                contender.seconds.append(seconds)
                contender.load.append(load)
            tell(f"round {number + 1 - warm:2d} {contender.name:45s} {seconds * 1000:10.1f} ms   load {load:.1f}")


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
