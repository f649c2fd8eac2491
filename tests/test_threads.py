"""Calls side by side."""

from __future__ import annotations

import signal
import threading

import pytest

from sinks.threads import side_by_side


def test_an_interrupt_is_raised_whatever_failed_before() -> None:
    """Of a delete that fails a warning is made, and the command would go on."""
    begun, failed = threading.Event(), threading.Event()

    def call(number: int) -> None:
        if threading.current_thread() is threading.main_thread():
            begun.set()
            assert failed.wait(60)
            signal.raise_signal(signal.SIGINT)
        assert begun.wait(60)
        threading.Timer(0.2, failed.set).start()
        raise OSError(f"{number} cannot be deleted")

    with pytest.raises(KeyboardInterrupt):
        side_by_side(call, range(2))
