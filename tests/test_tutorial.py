"""The code of docs/sink-tutorial.md is a sink that passes the conformance kit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.kit_run import run_kit

PAGE = Path(__file__).parents[1] / "docs" / "sink-tutorial.md"


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.large)], ids=["short", "whole"])
def test_the_sink_of_the_tutorial(tmp_path: Path, whole: bool) -> None:
    files: dict[str, str] = {}
    for name, code in re.findall(r"```python\n# (\w+\.py).*?\n(.*?)```", PAGE.read_text(), re.S):
        files[name] = files.get(name, "") + code + "\n"
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert sorted(files) == ["sqlite_sink.py", "test_sqlite_sink.py"]
    run_kit(tmp_path, "test_sqlite_sink.py", whole=whole)
