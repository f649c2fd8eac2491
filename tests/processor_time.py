"""What a run costs in processor time, with the processes that it kills or leaves, which a shell's `time` does not see.

python -m tests.processor_time make test
"""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import sys
import time

PR_SET_CHILD_SUBREAPER = 36
"""Of prctl(2), Linux: who loses its parent becomes a child of this process."""


def main(command: list[str]) -> int:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    started = time.monotonic()
    process = subprocess.Popen(command)
    status = None
    while status is None:
        pid, ended = os.waitpid(-1, 0)
        if pid == process.pid:
            status = process.returncode = os.waitstatus_to_exitcode(ended)
    wall = time.monotonic() - started
    until = time.monotonic() + 5  # for what ends after the command: a server of forks, with all that it has forked
    while (reaped := _reap()) is not None and time.monotonic() < until:
        time.sleep(0 if reaped else 0.05)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(
        f"{wall:.0f} s, of processor time {used.ru_utime:.0f} s and {used.ru_stime:.0f} s in the kernel",
        file=sys.stderr,
    )
    return status


def _reap() -> bool | None:
    """Whether one has ended; None if there is none left."""
    try:
        return os.waitpid(-1, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
