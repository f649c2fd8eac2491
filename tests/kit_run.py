"""The conformance kit as an author runs it: pytest, in a folder with a sink and its test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REST = (
    "killed_at_every_step or killed_inside or at_any_line or again_and_again or by_an_operator or zombie or beside "
    "or side_by_side or at_once or the_same or silence or does_not_answer or look_alike or as_a_whole or many_rows"
)
"""Of `make test-all` only: what the kit's tests of other sinks cover."""


def run_kit(folder: Path, test: str, *, whole: bool) -> None:
    options = ["-q", "-W", "error", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, test, *([] if whole else ["-k", f"not ({REST})"])]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert " passed" in done.stdout
