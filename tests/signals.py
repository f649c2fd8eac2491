"""Signals that a shell, a CI system or a JVM has left ignored or blocked: whoever it starts inherits that."""

from __future__ import annotations

import signal


def prepare() -> None:
    """Undo it for this process and all that it starts. SIGINT and SIGHUP stay ignored: who starts tests in the
    background wants them to outlive a Ctrl-C and the terminal."""
    for number in (signal.SIGTERM, signal.SIGQUIT, signal.SIGALRM, signal.SIGCHLD):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def in_foreground() -> None:
    """For `preexec_fn`: Ctrl-C ends it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def in_background() -> None:
    """For `preexec_fn`: as `nohup … &` in a script starts it."""
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
