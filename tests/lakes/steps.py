"""Stop a commit before one of its steps, which are the calls that reach files, the catalog or the table's log."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from deltalake import DeltaTable
from pyiceberg.catalog import Catalog
from pyiceberg.io import FileIO, InputFile, OutputFile

from sinks.lake.files import Files

_REACHED = (Files, DeltaTable, Catalog, FileIO, InputFile, OutputFile)
"""All ways from a sink, or from a library on its behalf, to the table. A call of a public method is a step."""


@dataclass
class Stop:
    """The step before which the thread was stopped, as CLASS.METHOD; "" if the block had fewer steps."""

    step: str = ""


@contextmanager
def before_step(number: int, hook: Callable[[], object]) -> Iterator[Stop]:
    """Call `hook` before the step of this number, from 0, that this thread takes in the block.

    A test that counts up from 0 until the block has fewer steps stops before each of them. Lines of code do not count,
    so it stays complete whatever is written between two steps.
    """
    stop = Stop()
    left = number

    def profile(frame: FrameType, event: str, arg: object) -> None:
        nonlocal left
        if event == "call" and not stop.step and (step := _step_of(frame)):
            if left == 0:
                stop.step = step
                hook()
            left -= 1

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield stop
    finally:
        sys.setprofile(before)


def _step_of(frame: FrameType) -> str:
    """Name the step that a call begins; "" if it is no step."""
    code = frame.f_code
    is_public_method = code.co_varnames[:1] == ("self",) and not code.co_name.startswith("_")
    if not is_public_method or not isinstance(its := frame.f_locals["self"], _REACHED):
        return ""
    return f"{type(its).__name__}.{code.co_name}"
