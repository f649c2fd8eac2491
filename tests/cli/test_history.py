from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from contextlib import suppress

import pytest

from coordinator.errors import ReplayMismatch
from coordinator.listener import Step
from sinks.testing.conformance import example_input
from tests.cli.jobs import INPUT, Job


def test_history(file_job: Job) -> None:
    assert "No statistics of job 'orders'" in file_job.cli("history").stdout
    file_job.run(1)
    file_job.run(2, crash=(Step.COMPLETE, 1))
    file_job.run(3)
    told = file_job.json("history")
    ended = [(one["checkpoint_id"], one["status"], one["generation"]) for one in told["checkpoints"]]
    # what the killed driver had restored, and not yet flushed, is not in it
    assert ended == [(0, "completed", 1), (1, "restored", 3), (2, "completed", 3)]
    assert told["checkpoints"][2]["rows"] == {"files": sum(table.num_rows for table in INPUT[2])}
    assert told["summary"]["status"] == {"completed": 2, "restored": 1}
    assert 0 < told["summary"]["took"]["min"] <= told["summary"]["took"]["p99"] <= told["summary"]["took"]["max"]
    table = file_job.cli("history").stdout
    assert [line.split()[:2] for line in table.splitlines()[1:]] == [
        ["0", "completed"],
        ["1", "restored"],
        ["2", "completed"],
    ]
    assert "recovery 0." in table
    assert not re.search(" $", table, re.MULTILINE)
    assert len(file_job.json("history", "--last", "1")["checkpoints"]) == 1


def in_a_terminal(columns: int, *arguments: str) -> list[list[str]]:
    """The words of each line that a command prints there."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    command, printed = [sys.executable, "-m", "coordinator", *arguments], b""
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        with suppress(OSError):  # the end
            while part := os.read(ours, 65536):
                printed += part
    os.close(ours)
    assert process.returncode == 0, printed
    return [line.split() for line in re.sub(r"\x1b\[[0-9;]*m", "", printed.decode()).splitlines()]


def test_a_table_that_is_too_wide_for_the_terminal_has_each_row_by_itself(file_job: Job) -> None:
    file_job.run(2)
    narrow = in_a_terminal(80, "history", "--job", str(file_job.file))
    assert narrow.count(["status", "completed"]) == 2
    assert [line[1] for line in narrow if line[:1] == ["checkpoint"]] == ["0", "1"]
    assert ["generation", "1"] in narrow
    wide = in_a_terminal(200, "history", "--job", str(file_job.file))
    assert wide[0][:4] == ["checkpoint", "status", "ended", "took"]
    assert len(wide) == 3


def test_what_was_lost_and_not_written_again_is_called_lost(file_job: Job) -> None:
    file_job.run(crash=(Step.COMPLETE, 0))
    one = file_job.json("in-doubt", "list", code=1)["transactions"][0]
    file_job.cli("in-doubt", "abort", one["id"], "--break-decision", "--yes")
    file_job.input = example_input(3)[1:]
    with pytest.raises(ReplayMismatch):
        file_job.run(1)
    failed = file_job.json("history")["checkpoints"][-1]
    assert failed["status"] == "halted"
    assert failed["remarks"].endswith("lost: files 1; not known to be visible: files 1")
    assert "written again" not in failed["remarks"].rpartition("coordinator resolve")[2]
    assert "If that gives other rows by now, it stops (ReplayMismatch)" in file_job.cli("resolve", code=1).stdout
