"""Where the kit stops a sink."""

from __future__ import annotations

import threading
from typing import Any, cast

import pytest

from sinks.testing.lines import at, lines, watched


class Locked:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.taken = 0

    def commit(self) -> int:
        while self.taken < 2:
            with self.lock:
                self.taken += 1
        with self.lock:
            return self.taken


def test_a_failure_at_any_line_leaves_no_lock_locked() -> None:
    """Nothing fails between the last line of a `with` block and its end but by our own hand."""
    sink = cast(Any, Locked())
    numbers = lines(sink, sink.commit, 100)
    assert len(numbers) > 5
    for number in numbers:
        sink = cast(Any, Locked())

        def fail() -> None:
            raise ConnectionError

        with pytest.raises(ConnectionError), watched(sink, at(number, fail)):
            sink.commit()
        assert not sink.lock.locked(), f"locked after line {number}"
