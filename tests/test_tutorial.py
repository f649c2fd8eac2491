"""The code of docs/sink-tutorial.md is a sink that passes the conformance kit."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "sink-tutorial.md"


def test_the_sink_of_the_tutorial(tmp_path: Path) -> None:
    files: dict[str, str] = {}
    for name, code in re.findall(r"```python\n# (\w+\.py).*?\n(.*?)```", PAGE.read_text(), re.S):
        files[name] = files.get(name, "") + code + "\n"
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert sorted(files) == ["sqlite_sink.py", "test_sqlite_sink.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", "test_sqlite_sink.py"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert " passed" in done.stdout
