"""Several calls at once.

The pools of `concurrent.futures` take none any more when the main thread has ended, though a job
may run in another one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from threading import Thread
from typing import Any, TypeVar

A = TypeVar("A")
B = TypeVar("B")


def side_by_side(
    call: Callable[[A], B],
    values: Iterable[A],
    threads: int = 16,
    thread: Callable[..., Thread] = Thread,
) -> list[B]:
    """`call` of each value, in at most so many threads, of which this is one.

    Raises the first error when all that were begun have ended, or what is to end the program.
    `thread`: makes the others.
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
    with suppress(RuntimeError):  # no more threads can be had, as at the end of the process
        for _ in range(min(threads, len(left)) - 1):
            other = thread(target=work, daemon=True)
            other.start()
            others.append(other)
    work()
    for other in others:
        other.join()
    if errors:
        raise next((error for error in errors if not isinstance(error, Exception)), errors[0])
    return results


class ThreadPool(ThreadPoolExecutor):
    """For a library that knows only such pools: where Python's own takes a call no more, it is made
    at once."""

    def submit(self, call: Callable[..., A], /, *arguments: Any, **options: Any) -> Future[A]:
        try:
            return super().submit(call, *arguments, **options)
        except RuntimeError as error:
            # of a thread, which another may do without
            if not str(error).startswith("cannot schedule"):
                raise
            made = Future[A]()
            made.set_result(call(*arguments, **options))
            return made
