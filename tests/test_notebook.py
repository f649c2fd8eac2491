"""The cells of examples/one_sink.ipynb, one after the other, in one Python."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CELLS = json.loads((ROOT / "examples" / "one_sink.ipynb").read_text())["cells"]


def texts(kind: str) -> list[str]:
    return ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == kind]


@pytest.mark.large
@pytest.mark.slow
def test_the_notebook(tmp_path: Path, pg_database: str) -> None:
    environment = os.environ | {"HOME": str(tmp_path), "DSN": pg_database, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, "-c", "\n".join(texts("code"))], env=environment, capture_output=True, text=True, timeout=500
    )
    assert ran.returncode == 0, ran.stderr
    first, last = re.findall(r"^([\d,]+) rows, \1 different$", ran.stdout, re.M)
    assert "in doubt" in ran.stdout.lower(), ran.stdout
    assert int(last.replace(",", "")) > int(first.replace(",", "")) > 0


def test_its_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)", "\n".join(texts("markdown"))):
        assert (ROOT / "examples" / target).exists(), target
