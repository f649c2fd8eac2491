"""The protocol's model in docs/model: two of the variants of `make model`."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CHECK = Path(__file__).parents[1] / "docs" / "model" / "check.py"


@pytest.mark.skipif(
    not (shutil.which("spin") and shutil.which("gcc")), reason="the model checker cannot be had: apt install spin gcc"
)
def test_the_protocol_holds_and_fails_without_a_rule() -> None:
    done = subprocess.run([sys.executable, CHECK, "quick"], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 variants, 0 surprises" in done.stdout
