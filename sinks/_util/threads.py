"""Several calls at once.

The pools of `concurrent.futures` take no calls any more when the main thread has ended, though a
job may still run in another thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from sinks._util.machine import Thread, machine

A = TypeVar("A")
B = TypeVar("B")


def side_by_side(
    call: Callable[[A], B],
    values: Iterable[A],
    threads: int = 16,
    start: Callable[[Callable[[], None]], Thread] | None = None,
) -> list[B]:
    """Call `call` with each value, in at most `threads` threads including the caller's.

    Returns the results in the order of the values. After an error no further call begins. When all
    calls that began have ended, the first error is raised, but KeyboardInterrupt and SystemExit
    come before any other. `start` starts one of the other threads. If the process can have no more
    threads, fewer do all calls.
    """
    left = deque(enumerate(values))
    results: list[Any] = [None] * len(left)
    errors: list[BaseException] = []

    def work() -> None:
        while left and not errors:
            try:
                at, value = left.popleft()
            except IndexError:  # another thread was quicker
                return
            try:
                results[at] = call(value)
            except BaseException as error:
                errors.append(error)

    others = list[Thread]()
    start = start or partial(machine.threads.start, name="side-by-side")
    with suppress(RuntimeError):  # no more threads can be had, as at the end of the process
        for _ in range(min(threads, len(left)) - 1):
            others.append(start(work))
    work()
    for other in others:
        other.join()
    if errors:
        raise next((error for error in errors if not isinstance(error, Exception)), errors[0])
    return results


class ThreadPool(ThreadPoolExecutor):
    """A pool for a library that works only with the pools of `concurrent.futures`.

    If Python's own pool does not take a call any more, this pool makes the call at once.
    """

    def submit(self, call: Callable[..., A], /, *arguments: Any, **options: Any) -> Future[A]:
        try:
            return super().submit(call, *arguments, **options)
        except RuntimeError as error:
            # no thread could be started for the call, but another thread may make it
            if not str(error).startswith("cannot schedule"):
                raise
            made = Future[A]()
            made.set_result(call(*arguments, **options))
            return made
