from __future__ import annotations

from pathlib import Path

import pytest

from tests.protocol.job import Job


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path, batches=4)


@pytest.fixture
def target(tmp_path: Path) -> str:
    return f"file://{tmp_path}/savepoints"
