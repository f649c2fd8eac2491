"""Calls side by side."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable

import pytest

from sinks._util.threads import ThreadPool, side_by_side


def test_an_interrupt_is_raised_whatever_failed_before() -> None:
    """Of a delete that fails a warning is made, and the command would go on."""
    begun, others = threading.Event(), list[threading.Thread]()

    def start(work: Callable[[], None]) -> threading.Thread:
        others.append(threading.Thread(target=work, daemon=True))
        others[-1].start()
        return others[-1]

    def call(number: int) -> None:
        if threading.current_thread() is threading.main_thread():
            begun.set()
            others[0].join(300)  # it has failed
            signal.raise_signal(signal.SIGINT)
        assert begun.wait(300)
        raise OSError(f"{number} cannot be deleted")

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin without
    try:
        with pytest.raises(KeyboardInterrupt):
            side_by_side(call, range(2), start=start)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_pool_makes_no_call_twice_where_no_thread_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has taken the call by then, and makes it when there is a thread again."""
    pool, calls = ThreadPool(1), list[int]()

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="can't start"):
        pool.submit(calls.append, 1)
    monkeypatch.undo()
    pool.submit(calls.append, 2).result()
    assert calls == [1, 2]
    pool.shutdown()
    pool.submit(calls.append, 3)
    assert calls == [1, 2, 3]
