"""Where the kit stops a sink, and what it says of that."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from sinks.testing.lines import Stop, at, lines, watched


class Locked:
    """Takes its lock in a way, twice, and lets it go whatever fails."""

    def __init__(self, way: str) -> None:
        self.lock, self.other, self.taken = threading.Lock(), threading.Lock(), 0
        self.take = getattr(self, way)

    def commit(self) -> int:
        while self.taken < 2:
            self.take()
        with self.lock, self.other:
            return self.taken

    def with_block(self) -> None:
        with self.lock:
            self.taken += 1

    def with_block_over_several_lines(self) -> None:
        # fmt: off
        with (
            self.lock,
            self.other,
        ):
            self.taken += 1
        # fmt: on

    def try_and_finally(self) -> None:
        self.lock.acquire()
        try:
            self.taken += 1
        finally:
            self.lock.release()

    def try_and_finally_elsewhere(self) -> None:
        self.lock.acquire()
        try:
            self.taken += 1
        finally:
            self.let_go()

    def let_go(self) -> None:
        lock = self.lock
        lock.release()

    def exit_stack(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(self.lock)
            for lock in [self.other]:
                stack.enter_context(lock)
            self.taken += 1

    def context_manager(self) -> None:
        with self.locked() as taken:
            self.taken = taken + 1

    @contextmanager
    def locked(self) -> Iterator[int]:
        with self.lock, self.other:
            yield self.taken

    def context_manager_that_tries(self) -> None:
        with self.held():
            self.taken += 1

    @contextmanager
    def held(self) -> Iterator[None]:
        self.lock.acquire()
        try:
            yield
        finally:
            self.lock.release()

    def context_manager_of_its_own(self) -> None:
        with self:
            self.taken += 1

    def __enter__(self) -> None:
        self.lock.acquire()

    def __exit__(self, *error: object) -> None:
        self.lock.release()


WAYS = [name for name in vars(Locked) if name.startswith(("with_", "try_", "exit_", "context_"))]


def _fail() -> None:
    raise ConnectionError


def _stops(of: Callable[[], Any]) -> list[Stop]:
    sink = of()
    return lines(sink, sink.commit, 100, failing=True)


@pytest.mark.parametrize("way", WAYS)
def test_a_failure_at_any_line_leaves_no_lock_locked(way: str) -> None:
    """Nothing fails between the last line of a block and its end but by our own hand."""
    stops = _stops(lambda: Locked(way))
    assert len(stops) > 4
    for stop in stops:
        sink = cast(Any, Locked(way))
        with pytest.raises(ConnectionError), watched(sink, at(stop, _fail)):
            sink.commit()
        assert not sink.lock.locked(), f"locked after {stop}"
        assert not sink.other.locked(), f"locked after {stop}"


def test_each_line_after_one_that_did_something_is_one_to_stop_at() -> None:
    source = Path(__file__).read_text(encoding="utf-8").splitlines()
    stops = {str(stop) for stop in _stops(lambda: Locked("try_and_finally"))}
    for line, function in (
        ("while self.taken < 2:", "commit"),
        ("self.taken += 1", "try_and_finally"),
        ("return self.taken", "commit"),
    ):
        at_line = next(n for n, text in enumerate(source, 1) if text.strip() == line and _in(source, n, function))
        assert f"test_lines.py:{at_line} in {function}: `{line}`" in stops
    assert len(stops) == 3


class Writes:
    def __init__(self, folder: Path) -> None:
        self.file, self.other = folder / "file", folder / "other"

    def commit(self) -> None:
        self.file.write_text("text")
        shutil.copyfile(self.file, self.other)


def test_it_stops_where_a_file_of_the_library_is_there_and_empty(tmp_path: Path) -> None:
    sink, empty = cast(Any, Writes(tmp_path)), set[str]()

    def look() -> None:
        empty.update(file.name for file in tmp_path.iterdir() if not file.stat().st_size)

    for stop in lines(sink, sink.commit, 1):
        sink.file.unlink()
        sink.other.unlink()
        with watched(sink, at(stop, look)):
            sink.commit()
    assert empty == {"file", "other"}


def _in(source: list[str], line: int, function: str) -> bool:
    return next(text for text in source[line - 1 :: -1] if text.startswith("    def ")).startswith(
        f"    def {function}("
    )
