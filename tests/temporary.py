"""Temporary files of the tests are in memory where there is room: they are fsynced all the time, and no test takes the
power from a disk. TMPDIR=/var/tmp has them on a disk."""

from __future__ import annotations

import os
import tempfile

import psutil

MEMORY = "/dev/shm"
ROOM = 8 << 30
"""Bytes; a run of all tests takes up to 3 GB."""


def prepare() -> None:
    """Before the first temporary file; for all processes that this one starts."""
    if "TMPDIR" not in os.environ and _has_room():
        os.environ["TMPDIR"] = MEMORY
        tempfile.tempdir = None


def _has_room() -> bool:
    try:
        facts = os.statvfs(MEMORY)
    except OSError:
        return False
    free = min(facts.f_bavail * facts.f_frsize, psutil.virtual_memory().available)
    return free >= ROOM and os.access(MEMORY, os.W_OK) and not facts.f_flag & os.ST_NOEXEC
