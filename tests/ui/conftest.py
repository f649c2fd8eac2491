from __future__ import annotations

from pathlib import Path

import pytest

from tests.protocol.play import Job


@pytest.fixture(autouse=True)
def state_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where drivers leave their tokens."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path, batches=4)


@pytest.fixture
def target(tmp_path: Path) -> str:
    return f"file://{tmp_path}/savepoints"
